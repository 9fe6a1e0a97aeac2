"""What an update starts from, what it may use, and what it ends with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import likelihoods, memory
from torch_ssgp.buffers import stored
from torch_ssgp.exceptions import Breakdown
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.inducing import InducingPolicy
from torch_ssgp.memory import Counts, Data, GaussianData, Memory, Rows
from torch_ssgp.modules import observation_noise
from torch_ssgp.prediction import Predictor, freeze
from torch_ssgp.update import young
from torch_ssgp.update.ascent import Ascended
from torch_ssgp.update.objective import GaussianObjective, Objective, Prior
from torch_ssgp.update.result import Status
from torch_ssgp.update.sharding import ShardedObjective, Team
from torch_ssgp.update.sites import SiteObjective
from torch_ssgp.update.young import Grid


class Known(NamedTuple):
    """What a model knows before an update.

    Attributes:
        prior: Its modules; they are copied before anything changes.
        frozen: Copies of them that do not learn, in the dtype of the algebra.
        start: What their parameters were before the first update.
        memory: What the stream has said so far.
        predictor: Its factor, if it is at hand.
        curvature: Inverse Hessian that learning met last, if any did.
    """

    prior: Prior
    frozen: Prior
    start: list[Tensor]
    memory: Memory
    predictor: Predictor | None = None
    curvature: Tensor | None = None


class Limits(NamedTuple):
    """What a model may use, and in which form.

    Attributes:
        num_inducing: Number of points that a compression leaves.
        memory_size: Largest number of rows.
        policy: Chooses the points; ``None`` for those that cover the inputs.
        alpha: Power of Power-EP.
        shared_noise: Whether all rows have the noise of the likelihood.
        jitter: Relative jitter.
        dtype: Dtype of the model.
        team: Processes that share the work on rows; ``None`` where there is one.
    """

    num_inducing: int
    memory_size: int
    policy: InducingPolicy | None
    alpha: float
    shared_noise: bool
    jitter: float
    dtype: torch.dtype
    team: Team | None = None


class Base(NamedTuple):
    """What a branch inherited, kept apart from what it has seen since.

    Attributes:
        key: Names the model that the branch continues.
        past: Its rows, the first ones.
        num_raw: The number of its raw data, the first ones.
        power: ``()`` or ``(*batch,)``, what forgetting has left of it.
        sunk: ``(*batch,)``, nats that compressions of it have lost.
    """

    key: int
    past: PseudoObservations
    num_raw: int
    power: Tensor
    sunk: Tensor

    def added(self, past: PseudoObservations) -> PseudoObservations:
        """Those of the rows of a branch that came after the base."""
        count = self.past.g.size(-1)
        return PseudoObservations(
            past.U[..., count:, :],
            past.g[..., count:],
            past.rho - self.past.rho,
            past.n - self.past.n,
        )

    def buffers(self) -> dict[str, Tensor]:
        """Buffers of a memory."""
        past, sunk = self.past, self.sunk
        parts = (past.rho, past.n, sunk, self.power)
        base = torch.tensor([self.key, past.g.size(-1), self.num_raw])
        return {
            "base": base.to(sunk.device),
            "inherited": torch.stack([p.to(sunk).expand_as(sunk) for p in parts], -1),
        }


class State(NamedTuple):
    """What a model knows, between two steps of an update.

    Attributes:
        prior: Modules that do not learn, in the dtype of the algebra.
        rows: What is compressed.
        data: Raw data, with their time.
        sites: The same as Gaussian observations, where the likelihood is not Gaussian.
        error: ``(*batch, k)``, standardised errors of raw data when they came.
        sunk: ``(*batch,)``, nats that compressions have lost.
        bound: ``(*batch,)``, what the last update reported.
        extremes: Smallest and largest target seen.
        odds: ``(*batch,)``, log odds of the learned hyperparameters against a mixture.
        grid: What the mixture is over; ``None`` where there is none.
        rate: ``(*batch,)``, rate of drift; ``None`` where nothing drifts.
        alarm: ``(*batch, 3)``, log Bayes factors against the model.
        alarmed: ``(*batch, 3)``, raw data before each of them.
        counts: What the stream has counted.
        base: What a branch inherited.
        jitter: Relative jitter.
        predictor: Its factor, if it is at hand.
    """

    prior: Prior
    rows: Rows
    data: Data
    sites: GaussianData | None
    error: Tensor
    sunk: Tensor
    bound: Tensor
    extremes: Tensor
    odds: Tensor
    grid: Grid | None
    rate: Tensor | None
    alarm: Tensor
    alarmed: Tensor
    counts: Counts
    base: Base | None
    jitter: float
    predictor: Predictor | None

    @property
    def num_rows(self) -> int:
        """The number of rows, raw data included."""
        return self.rows.past.g.size(-1) + self.data.y.size(-1)

    @property
    def num_raw(self) -> int:
        """The number of raw data."""
        return self.data.y.size(-1)

    @property
    def num_data(self) -> Tensor:
        """``()`` or ``(*batch,)``, data behind all rows."""
        return self.rows.past.n + self.data.num_data

    @property
    def is_compressed(self) -> bool:
        """Whether there are rows besides raw data."""
        return self.rows.points.size(-2) > 0

    @property
    def is_young(self) -> bool:
        """Whether hyperparameters are integrated out, in some stream."""
        return self.grid is not None

    def counted(self, **values: float) -> State:
        """The state with other counts."""
        return self._replace(counts=self.counts._replace(**values))

    def buffers(self, shared_noise: bool) -> dict[str, Tensor]:
        """Buffers of the memory that it is to be.

        Args:
            shared_noise: Whether the noise of the rows follows the likelihood.
        """
        sites, g = self.sites, self.rows.past.g
        if sites is None:
            sites = self.observations(shared_noise)
            sites = sites._replace(noise=self._remembered(sites, shared_noise))
        rate = torch.zeros_like(self.sunk) if self.rate is None else self.rate
        base = {
            "base": g.new_zeros(0, dtype=torch.int64),
            "inherited": self.sunk.new_zeros(*self.sunk.shape, 0),
        }
        if self.base is not None:
            base = self.base.buffers()
        return {
            **memory.buffers(self.rows, self.data, sites, shared_noise),
            "error": stored(self.error),
            "sunk": stored(self.sunk),
            "bound": stored(self.bound),
            "extremes": stored(self.extremes),
            "odds": stored(self.odds),
            "rate": stored(rate),
            "alarm": stored(self.alarm),
            "alarmed": stored(self.alarmed),
            "counts": g.new_tensor(self.counts),
            **base,
        }

    def observations(self, shared_noise: bool) -> GaussianData:
        """The raw data as Gaussian observations.

        Args:
            shared_noise: Whether they have the noise of the likelihood.
        """
        if self.sites is not None:
            return self.sites
        y, noise = self.data.y, None
        if not shared_noise:
            likelihood = self.prior.likelihood
            noise = observation_noise(likelihood, self.data.noise).expand(y.shape)
        return GaussianData(y, noise, torch.zeros_like(self.sunk))

    def _remembered(self, sites: GaussianData, shared_noise: bool) -> Tensor | None:
        """Noise with which raw data are remembered; ``None`` for that of all rows."""
        if shared_noise:
            return None
        if self.data.noise is not None and hasattr(
            self.prior.likelihood, "second_noise"
        ):
            return self.data.noise  # what is learned on top of it may change
        return sites.noise

    def scale(self, shared_noise: bool) -> Tensor:
        """Noise scale of the rows, ``(*batch,)`` or one that broadcasts with it."""
        if shared_noise:
            return self.prior.likelihood.noise.squeeze(-1)
        return self.sunk.new_ones(())


def recall(known: Known, new: Data, limits: Limits) -> State:
    """What is known, in the form and dtype of the coming update.

    Args:
        known: What the model knows.
        new: New data, for their dtype and batch dimensions.
        limits: The form of the rows.
    """
    memory, y, batch, frozen = known.memory, new.y, new.y.shape[:-1], known.frozen

    def of_data(value: Tensor) -> Tensor:
        return value.detach().to(y.dtype).expand(*batch, -1)

    _, past, time = memory.compressed
    z, x = _points_of(memory, new.x)
    assert time is not None
    past = PseudoObservations(*(t.detach().to(y.dtype) for t in past))
    noise, weight = (t.detach().to(y.dtype) for t in (memory.noise, memory.weight))
    numbers = memory.rate, memory.odds, memory.sunk, memory.bound, memory.offset
    rate, odds, sunk, bound, offset = (t.to(y.dtype).expand(batch) for t in numbers)
    facts = [memory.shared_noise, (weight == 1).all()]
    facts += [(odds < young.TRUSTED).any(), (rate > 0).any()]
    shared, is_whole, is_young, drifts = torch.stack(facts).tolist()  # a device waits
    changes_form, scale = shared and not limits.shared_noise, None
    if changes_form and not memory.is_empty:
        sigma2 = frozen.likelihood.noise.detach().to(y.dtype)
        scale = sigma2.squeeze(-1).expand(batch)
        past, noise = fn.to_sites(past, scale), noise.where(noise != 0, sigma2)
    past = past._replace(g=of_data(past.g), rho=past.rho.expand(batch))
    data = Data(
        x,
        of_data(memory.y),
        None if limits.shared_noise else of_data(noise),
        None if is_whole else weight,
        memory.time[..., memory.time.size(-1) - memory.num_raw :].to(y.dtype),
    )
    sites = None
    if not likelihoods.is_gaussian(frozen.likelihood):
        sites = GaussianData(of_data(memory.target), of_data(noise), offset)
        data = data._replace(noise=None)
    is_young = is_young and limits.shared_noise
    return State(
        prior=frozen,
        rows=Rows(z, past, time.to(y.dtype)),
        data=data,
        sites=sites,
        error=of_data(memory.error),
        sunk=sunk,
        bound=bound,
        extremes=memory.extremes.to(y.dtype),
        odds=odds,
        grid=young.grid_of(known.prior, known.start) if is_young else None,
        rate=rate if drifts else None,
        alarm=memory.alarm.to(y.dtype),
        alarmed=memory.alarmed.to(y.dtype),
        counts=memory.count(),
        base=_base_of(memory, sunk, scale),
        jitter=limits.jitter,
        predictor=None if changes_form else known.predictor,
    )


def _points_of(memory: Memory, like: Tensor) -> list[Tensor]:
    """Points of the rows and of raw data, in the shape and dtype of other inputs."""
    parts = like[..., :0, :], like[..., :0, :]
    if not memory.is_empty:
        parts = memory.compressed.points, memory.raw_x
    shape = (*like.shape[:-2], -1, like.size(-1))
    return [part.detach().to(like.dtype).expand(shape) for part in parts]


def _base_of(memory: Memory, sunk: Tensor, scale: Tensor | None) -> Base | None:
    """What a branch inherited; in site form if its rows had a noise ``scale``."""
    if not memory.is_branch:
        return None
    key, _, num_raw = memory.base.tolist()
    past = PseudoObservations(*(t.detach().to(sunk) for t in memory.of_base))
    if scale is not None:
        past = fn.to_sites(past, scale)
    *_, lost, power = memory.inherited.to(sunk).expand(*sunk.shape, -1).unbind(-1)
    power = power if memory.row_data.ndim else power.flatten()[0]  # of all streams
    return Base(key, past, num_raw, power, lost)


def appended(
    state: State, new: Data, sites: GaussianData | None, error: Tensor
) -> State:
    """The state with new raw data; its factor is not extended.

    Args:
        state: What is known.
        new: New data.
        sites: All data as Gaussian observations, where the likelihood is not Gaussian.
        error: ``(*batch, n)``, standardised errors of the new data.
    """
    num_new, counts = new.y.size(-1), state.counts
    if not num_new:
        return state._replace(sites=sites, counts=counts.after(0))
    batch = new.y.shape[:-1]
    error = torch.cat(fn.broadcast_rows(state.error, error.expand(new.y.shape)), -1)
    return state._replace(
        data=state.data.joined(new),
        sites=sites,
        error=error,
        extremes=memory.extremes(state.extremes, new),
        odds=state.odds.expand(batch),
        alarm=state.alarm.expand(*batch, -1),
        alarmed=state.alarmed.expand(*batch, -1),
        predictor=None,
        counts=counts.after(num_new),
    )


def no_rows(state: State) -> Rows:
    """Nothing compressed, in the shape of a state."""
    points, past, time = state.rows
    assert time is not None
    nothing = PseudoObservations(
        past.U[..., :0, :0], past.g[..., :0], 0 * past.rho, 0 * past.n
    )
    return Rows(points[..., :0, :], nothing, time[..., :0])


def fitted(state: State, limits: Limits) -> State:
    """The state with a factor of its rows."""
    predictor = state.predictor
    if predictor is None:
        predictor = _factored(state, limits)
    if state.grid is None or not state.num_raw:
        return state._replace(predictor=predictor.blended(None, state.odds))
    if predictor.young is not None:
        mixture, _ = predictor.young
    else:
        data, (mean, kernel, _) = state.data, state.prior
        x = data.x.expand(*data.y.shape, -1)
        mixture = young.mix(mean, kernel, state.grid, x, data.y, data.weight)
        mixture = young.pruned(mixture)
    return state._replace(predictor=predictor.blended(mixture, state.odds))


def _factored(state: State, limits: Limits) -> Predictor:
    """The factor of all rows, anew."""
    mean, kernel, likelihood = state.prior
    now = state.data.y.new_tensor(state.counts.arrived)
    scale = state.scale(limits.shared_noise)
    if limits.dtype != state.sunk.dtype:
        likelihood = freeze(likelihood, limits.dtype)
    empty = Predictor(mean, kernel, likelihood, scale, state.rate, now)
    return empty.fitted(
        state.rows,
        state.data,
        state.observations(limits.shared_noise),
        state.jitter,
        limits.memory_size + 1,
    )


def evidence(state: State, limits: Limits) -> Tensor:
    r"""Bound on the log evidence of all data, ``(*batch,)``, from the factor.

    .. math:: -\tfrac12 \|e\|^2 + \sum_i \log W_{ii} - \tfrac{N}{2} \log 2 \pi
    """
    predictor, past = state.predictor, state.rows.past
    if predictor is None or predictor.factor is None:
        return torch.zeros_like(state.sunk)
    factor, s = predictor.factor, predictor.s
    sites = state.observations(limits.shared_noise)
    data = fn.weigh(sites.target, sites.noise, s, state.data.weight)
    rest = (state.num_data - factor.count) * (fn.LOG_2PI + s.log())
    rest = rest + (past.rho + sites.offset + data.rho) / s
    log_dets = factor.W.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    density = log_dets - 0.5 * (fn.squared_norm(factor.e) + factor.count * fn.LOG_2PI)
    return (density - 0.5 * rest - state.sunk).expand(state.sunk.shape)


class Learned(NamedTuple):
    """What an update ends with, before the model becomes it.

    Attributes:
        state: What is known now.
        prior: Modules with the hyperparameters learned; ``None`` where they stay.
        bound: ``(*batch,)``, bound on the evidence of all data seen.
        increment: ``(*batch,)``, by how much the new data raised it.
        lost: ``(*batch,)``, nats lost by a compression of this update.
        restarted: ``(*batch,)``, where a fresh start won.
        forgot: ``(*batch,)``, power that the past was raised to.
        surprise: ``(*batch,)``, nats per datum below what the model expected.
        flattened: ``(*batch,)``, where learning explained the function as noise.
        ascended: What the inner loop did.
        settled: Whether what is not learned by gradients has converged.
        status: How far it had to fall back.
    """

    state: State
    prior: Prior | None
    bound: Tensor
    increment: Tensor
    lost: Tensor
    restarted: Tensor
    forgot: Tensor
    surprise: Tensor
    flattened: Tensor
    ascended: Ascended
    settled: bool
    status: Status


def make_objective(state: State, limits: Limits, prior: Prior) -> Objective:
    """What an update maximises.

    Args:
        state: What is known.
        limits: The form of the rows.
        prior: Working copies of the modules.
    """
    gaussian = likelihoods.is_gaussian(prior.likelihood)
    kind: Callable[..., Objective] = GaussianObjective if gaussian else SiteObjective
    if limits.team is not None and gaussian and limits.alpha == 0:
        kind = partial(ShardedObjective, team=limits.team)
    objective = kind(
        prior,
        state.rows,
        state.data,
        shared_noise=limits.shared_noise,
        alpha=limits.alpha,
        jitter=state.jitter,
        rate=state.rate,
        sunk=state.sunk,
    )
    if isinstance(objective, SiteObjective) and state.sites is not None:
        objective.recall_sites(state.sites)
    return objective


def check_finite(*values: Tensor) -> None:
    """Raise :class:`Breakdown` unless all are."""
    finite = [torch.isfinite(value).all() for value in values]
    if not bool(torch.stack(finite).all()):
        raise Breakdown("the new posterior is not finite")

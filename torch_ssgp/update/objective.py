"""What an update maximises, as a function of hyperparameters and inducing points.

The evidence of the rows (:mod:`torch_ssgp.rows`) while everything is raw, the bound at
inducing points (:mod:`torch_ssgp.fused`) where they are to be, or were, compressed:
hyperparameters then suit what the points can say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean, Mean, ZeroMean
from torch import Tensor, nn

from torch_ssgp import functional as fn
from torch_ssgp import fused
from torch_ssgp import rows as row_space
from torch_ssgp.exceptions import Breakdown, breakdowns
from torch_ssgp.functional import PriorBlocks, Projection
from torch_ssgp.kernels import Drifting, Form, Values, read
from torch_ssgp.memory import Data, GaussianData, Rows
from torch_ssgp.modules import (
    Opaque,
    form_of,
    observation_noise,
    prior_blocks,
    same_variables,
    square_gram,
)
from torch_ssgp.points import evenly
from torch_ssgp.rows import Regression
from torch_ssgp.update import young
from torch_ssgp.update.initialization import (
    SUBSET,
    average,
    initialize_from_data,
    weights_of,
)
from torch_ssgp.update.young import Grid

DECAY = 0.25  # standard deviation of weights of a network, a priori
JITTERS = (1e-6, 1e-4, 1e-2)  # tried one after the other where a smaller one fails


Result = TypeVar("Result")


class Prior(NamedTuple):
    """The modules of a model, or working copies of them."""

    mean: Mean
    kernel: Kernel
    likelihood: Likelihood

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in a fixed order."""
        return [p for module in self for p in module.parameters()]


class Evaluated(NamedTuple):
    """A prior at some hyperparameters.

    Attributes:
        form: Its covariance.
        mean: From inputs ``(*batch, n, d)`` to their prior mean ``(*batch, n)``.
        noise: ``(*batch, 1)``, noise of a Gaussian likelihood; ``None`` if it has none
            of its own, or several.
    """

    form: Form
    mean: Callable[[Tensor], Tensor]
    noise: Tensor | None


def evaluate(
    prior: Prior, value: Values | None = None, rate: Tensor | None = None
) -> Evaluated:
    """A prior at its present hyperparameters, or at others where :func:`is_readable`.

    With a ``rate`` ``(*batch,)`` of drift inputs end with the time.
    """
    mean: Callable[[Tensor], Tensor] = prior.mean
    if value is None:
        form: Form = form_of(prior.kernel)
        noise = getattr(prior.likelihood, "noise", None)
    else:
        form = read(prior.kernel, value) or Opaque(prior.kernel)
        mean = _mean(prior.mean, value)
        noise = value(prior.likelihood.noise_covar, "noise")
    if rate is not None:
        form, plain = Drifting(form, rate), mean

        def mean(x: Tensor) -> Tensor:
            return plain(x[..., :-1])

    return Evaluated(form, mean, noise)


def _mean(module: Mean, value: Values) -> Callable[[Tensor], Tensor]:
    if isinstance(module, ZeroMean):
        return module

    def constant(x: Tensor) -> Tensor:
        level = value(module, "constant")
        return level.unsqueeze(-1).expand(*level.shape, x.size(-2))

    return constant


def is_readable(prior: Prior) -> bool:
    """Whether all hyperparameters can be given to :func:`evaluate` as values."""
    modules = [m for module in prior for m in module.modules()]
    owned = [id(p) for m in modules for p in m.parameters(recurse=False)]
    return (
        read(prior.kernel) is not None
        and type(prior.mean) in (ConstantMean, ZeroMean)
        and "forward" not in vars(prior.mean)
        and type(prior.likelihood) is GaussianLikelihood
        and len(set(owned)) == len(owned)  # each owner may have a constraint of its own
    )


class Objective(ABC):
    """What an update maximises, on working copies: the model is not touched.

    It knows compressed ``rows`` and raw ``data``, a ``rate`` ``(*batch,)`` of drift or
    none, and the nats ``sunk`` ``(*batch,)`` that compressions have lost.
    """

    z: nn.Parameter | None = None
    same: Tensor | None = None  # which points are which rows, see `same_variables`
    settled: bool = True  # what is not learned by gradients has converged
    round_length: int | None = None  # steps of L-BFGS for which the function stays

    def __init__(
        self,
        prior: Prior,
        rows: Rows,
        data: Data,
        *,
        shared_noise: bool,
        alpha: float,
        jitter: float,
        rate: Tensor | None = None,
        sunk: Tensor | float = 0.0,
    ) -> None:
        self.mean, self.kernel, self.likelihood = prior
        self.rows, self.data, self.past = rows, data, rows.past
        self.shared_noise, self.alpha, self.jitter = shared_noise, alpha, jitter
        self.sunk = sunk
        self.log_rate: nn.Parameter | None = None
        if rate is not None:
            self.log_rate = nn.Parameter(rate.log())
        self.z_a = self.with_time(rows.points, rows.time)
        self.x = self.with_time(data.x, data.time)

    def with_time(self, x: Tensor, time: Tensor | None) -> Tensor:
        """Inputs as the kernel sees them: with the time behind, if it drifts."""
        if self.log_rate is None:
            return x
        assert time is not None
        return torch.cat([x, time.expand(x.shape[:-1]).unsqueeze(-1)], -1)

    # -- what a likelihood decides ----------------------------------------------------

    @property
    def coupled(self) -> bool:
        """Whether the last batch dimension is classes that share their data."""
        return False

    @property
    def num_classes(self) -> int:
        """The number of functions that share their data."""
        return self.batch_shape[-1] if self.coupled else 1

    @abstractmethod
    def initialize(self, grid: Grid | None = None) -> None:
        """Initialise hyperparameters that nobody set, in place; see ``young.py``."""

    @abstractmethod
    def noises(self, now: Evaluated) -> tuple[Tensor | None, Tensor]:
        """Noise of the data ``(*batch, n)`` and noise scale of rows ``(*batch,)``.

        That of the data is ``None`` where it is the scale.
        """

    @abstractmethod
    def bound(self, value: Values | None = None) -> Tensor:
        """The evidence, or a bound of it, ``(*batch,)``; see :func:`evaluate`."""

    @abstractmethod
    def as_gaussian(self) -> GaussianData:
        """The data as Gaussian observations, at the present hyperparameters."""

    def as_frozen(self, data: GaussianData) -> GaussianData:
        """The same for data that are compressed now, and never seen again."""
        return data

    @abstractmethod
    def spread(self) -> Tensor:
        """Typical size of the function ``(*batch,)``, the unit of a constant mean."""

    def new_round(self) -> None:
        """Called before every round of L-BFGS, see ``round_length``."""
        return

    # -- what processes that share the work agree on, see ``sharding.py`` -------------

    def agree(self, points: Tensor) -> Tensor:
        """A choice that was made, the same in all processes."""
        return points

    def share_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Called after every gradient, which may be that of some rows only."""
        return

    # -- what all share ---------------------------------------------------------------

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of independent streams."""
        return self.data.y.shape[:-1]

    @property
    def is_readable(self) -> bool:
        """Whether :meth:`bound` takes hyperparameters as values."""
        return self.shared_noise and is_readable(self.prior)

    @property
    def prior(self) -> Prior:
        """Mean, kernel and likelihood."""
        return Prior(self.mean, self.kernel, self.likelihood)

    @property
    def rate(self) -> Tensor | None:
        """Rate of drift ``(*batch,)``."""
        return None if self.log_rate is None else self.log_rate.exp()

    @cached_property
    def past_precision(self) -> Tensor:
        """``(*batch, m_a, m_a)``, of the past in units of its noise scale."""
        return self.past.U.mT @ self.past.U

    @property
    def num_data(self) -> Tensor:
        """``()`` or ``(*batch,)``, data behind data and past."""
        return self.past.n + self.data.num_data

    @property
    def points(self) -> Tensor:
        """All points: those of the rows, then the inputs of the data."""
        return torch.cat(fn.broadcast_matrices(self.z_a, self.x), -2)

    def evaluate(self, value: Values | None = None) -> Evaluated:
        """The prior, at present or at other hyperparameters."""
        return evaluate(self.prior, value, self.rate)

    def start_at(self, z: Tensor | None, learn: bool = False) -> None:
        """Put inducing points at ``z`` ``(*batch, m, d)``; at ``None``, do without.

        Those that ``learn`` are no points of the memory or the data, which stay.
        """
        if z is None:
            self.z = None
            return
        self.z = nn.Parameter(z.clone(), requires_grad=learn)
        self.same = None if learn else same_variables(z, self.x, self.z_a)

    def blocks(self, now: Evaluated, to_the_last_digit: bool = False) -> PriorBlocks:
        """Prior blocks at the inducing points; for storing, to the last digit."""
        assert self.z is not None
        blocks = prior_blocks(
            now.mean, now.form, self.z, self.x, self.z_a, self.jitter, self.same
        )
        if to_the_last_digit:
            return blocks._replace(L_aa=fn.cholesky(blocks.K_aa))
        return blocks

    def project(
        self,
        prior: PriorBlocks,
        data: GaussianData,
        now: Evaluated,
        past: fn.PseudoObservations,
        weight: Tensor | None,
    ) -> tuple[Projection, Tensor]:
        """Rows of data and past on the points of ``prior``, and their noise scale."""
        _, s = self.noises(now)
        past = past._replace(rho=past.rho + data.offset)
        rows = fn.project(prior, past, data.target, data.noise, s, self.alpha, weight)
        return rows, s

    def regression(
        self, data: GaussianData, now: Evaluated
    ) -> tuple[Regression, Tensor]:
        """All rows as one regression, and their noise scale."""
        _, s = self.noises(now)
        past = self.past._replace(rho=self.past.rho + data.offset)
        weight = self.data.weight
        return row_space.regression(past, data.target, data.noise, s, weight), s

    def gram(self, now: Evaluated) -> Tensor:
        """Prior covariance of all points; those of the rows have their jitter."""
        return square_gram(now.form, self.points, self.z_a.size(-2), self.jitter)

    def exact(self, data: GaussianData, now: Evaluated) -> Tensor:
        """Evidence of all rows, ``(*batch,)``, without inducing points."""
        rows, s = self.regression(data, now)
        return row_space.evidence(rows, self.gram(now), now.mean(self.points), s)

    def total(self, value: Values | None = None) -> tuple[Tensor, Tensor]:
        """What the inner loop maximises and the bounds in it, ``(*batch,)`` each."""
        with breakdowns():
            bound = self.bound(value)
        return bound + self.log_prior(), bound

    @torch.no_grad()
    def check_finite(self) -> None:
        """Raise :class:`Breakdown` unless there is a point to start from."""
        if not bool(torch.isfinite(self.total()[0]).all()):
            raise Breakdown("the bound is not finite before the first step")

    def raise_jitter(self) -> bool:
        """Take the next larger jitter; ``False`` if there is none."""
        larger = [jitter for jitter in JITTERS if jitter > self.jitter]
        self.jitter = larger[0] if larger else self.jitter
        return bool(larger)

    @breakdowns(ValueError)  # of a distribution, where a hyperparameter is NaN
    def log_prior(self) -> Tensor | float:
        """Log-density of the hyperparameters under GPyTorch priors, ``(*batch,)``.

        Streams that share a hyperparameter share its density. Weights of a network have
        a normal prior, known as weight decay.
        """
        batch = self.batch_shape
        total: Tensor | float = 0.0
        for _, owner, prior, closure, _ in self.named_priors:
            density = prior.log_prob(closure(owner))
            if density.shape[: len(batch)] == batch:
                total = total + sum_over(density, len(batch))
            else:
                total = total + density.sum() / batch.numel()
        decay = sum(w.square().sum() for w in self.weights) / DECAY**2
        return total - 0.5 * decay / batch.numel()

    @cached_property
    def weights(self) -> list[nn.Parameter]:
        """Weights of networks in the kernel."""
        return weights_of(self.kernel)

    @cached_property
    def named_priors(self) -> list[tuple]:
        """Those of all modules, as GPyTorch names them."""
        return [each for m in self.prior for each in m.named_priors()]


def sum_over(values: Tensor, num_kept: int) -> Tensor:
    """Sum of all but the first ``num_kept`` dimensions."""
    return values.unsqueeze(-1).flatten(num_kept).sum(-1)


class GaussianObjective(Objective):
    """The evidence with Gaussian noise, in closed form."""

    def initialize(self, grid: Grid | None = None) -> None:
        """Initialise hyperparameters that nobody set; see :class:`Objective`."""
        x, y, seen = self.data.x, self.data.y, self.data.seen
        if self.rows.points.size(-2):
            z, a = known_values(self.rows.points, self.past)
            x = torch.cat(fn.broadcast_matrices(z, x), -2)
            y = torch.cat(fn.broadcast_rows(a, y), -1)
            if seen is not None:
                known = (self.past.n > 0).unsqueeze(-1).expand(a.shape)
                seen = torch.cat(fn.broadcast_rows(known, seen), -1)
        if grid is None or not grid.is_all:
            initialize_from_data(*self.prior, x, y, seen)
        if grid is not None:
            if y.size(-1) > SUBSET:
                keep = evenly(x, SUBSET)
                x, y = x[..., keep, :], y[..., keep]
                seen = None if seen is None else seen[..., keep]
            weight = None if seen is None else seen.to(y.dtype)
            mixture = young.mix(self.mean, self.kernel, grid, x, y, weight)
            young.set_best(self.prior, grid, mixture)

    def noises(self, now: Evaluated) -> tuple[Tensor | None, Tensor]:
        """Noise of the data and noise scale of rows; see :class:`Objective`."""
        y = self.data.y
        if self.shared_noise:
            assert now.noise is not None
            return None, now.noise.squeeze(-1).expand(y.shape[:-1])
        noise = observation_noise(self.likelihood, self.data.noise)
        return noise.expand(y.shape), y.new_ones(y.shape[:-1])

    def as_gaussian(self) -> GaussianData:
        """The data themselves."""
        return self._gaussian(self.evaluate())

    def _gaussian(self, now: Evaluated) -> GaussianData:
        noise, _ = self.noises(now)
        return GaussianData(self.data.y, noise, torch.zeros_like(self.past.rho))

    def bound(self, value: Values | None = None) -> Tensor:
        """The evidence of all rows, or its bound at the inducing points."""
        now = self.evaluate(value)
        if self.z is None:
            return self.exact(self._gaussian(now), now) - self.sunk
        if self.alpha:
            data, weight = self._gaussian(now), self.data.weight
            rows, s = self.project(self.blocks(now), data, now, self.past, weight)
            return fn.evidence(rows, s) - self.sunk
        return fused.evidence(*self.terms(now), self.num_data) - self.sunk

    def terms(self, now: Evaluated) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """``K_bb``, ``K_br``, ``r``, ``t`` and ``s`` of the bound, see ``fused``."""
        prior, past, data = self.blocks(now), self.past, self.data
        noise, s = self.noises(now)
        rows = fn.weigh(data.y - prior.m_f, noise, s, data.weight)
        K_bf, k_ff = prior.K_bf, prior.k_ff
        if rows.root is not None:
            K_bf, k_ff = K_bf * rows.root.unsqueeze(-2), k_ff * rows.root.square()
        U = past.U
        t = past.rho + rows.rho + k_ff.sum(-1)
        K_br, r = K_bf, rows.r
        if U.size(-1):
            t = t + (self.past_precision * prior.K_aa).sum((-2, -1))
            K_br = torch.cat(fn.broadcast_matrices(K_bf, prior.K_ba @ U.mT), -1)
            r_a = past.g - fn.matvec(U, prior.m_a)
            r = torch.cat(fn.broadcast_rows(r, r_a), -1)
        return prior.K_bb, K_br, r, t, s

    @torch.no_grad()
    def spread(self) -> Tensor:
        """Size of the targets about the prior mean, ``(*batch,)``.

        Not about their own mean: a level that the stream has left far behind would
        need thousands of steps to follow in units of a small spread.
        """
        square = (self.data.y - self.mean(self.data.x)).square()
        size = average(square, self.data.seen).sqrt()
        return torch.where(size > 0, size, 1)  # NaN where there are no data


def known_values(z: Tensor, past: fn.PseudoObservations) -> tuple[Tensor, Tensor]:
    """Points that pseudo-observations at ``z`` say much about, and what they say.

    They are ``(*batch, k, d)`` and ``(*batch, k)``: all streams have as many.
    """
    batch = torch.broadcast_shapes(z.shape[:-2], past.g.shape[:-1])
    z = z.expand(*batch, *z.shape[-2:])
    weight = past.U.square().sum(-2).expand(*batch, -1)
    # All of a stream that has no reading yet, not to hold back the others.
    known = weight >= KNOWN * weight.amax(-1, keepdim=True)
    count = int(known.sum(-1).min())
    best = weight.topk(count, -1).indices
    # Least squares by the pseudo-inverse, about one level for all: what rows say little
    # about stays there.
    ones, g = past.U.sum(-1, keepdim=True), past.g.unsqueeze(-1)
    size = fn.squared_norm(ones, -2)
    level = (ones * g).sum(-2) / torch.where(size > 0, size, 1)
    inverse = torch.linalg.pinv(past.U, rtol=FAINT)
    a = (level.unsqueeze(-1) + inverse @ (g - ones * level.unsqueeze(-1))).squeeze(-1)
    z = z.gather(-2, best.unsqueeze(-1).expand(*best.shape, z.size(-1)))
    return z, a.expand(*batch, -1).gather(-1, best)


KNOWN = 0.25  # share of the largest weight that a point must have to count as known
FAINT = 0.1  # share of the largest singular value below which rows say little


def with_enough_jitter(objective: Objective, attempt: Callable[[], Result]) -> Result:
    """Retry with larger and larger jitter, until nothing breaks down."""
    while True:
        try:
            return attempt()
        except Breakdown:
            if not objective.raise_jitter():
                raise

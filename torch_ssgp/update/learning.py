r"""The walk of an update: a function of what is known, new data and options.

    remember    new data join the raw data of the memory: exact
    learn       maximise the bound on all that is remembered over hyperparameters and
                inducing points; when the data have doubled, from a fresh start too
    summarise   q(b), as pseudo-observations at the inducing points
    compress    if the memory is over its capacity: choose points, project, one QR

Nothing of the model changes in here: it takes over what comes out, or does not.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import likelihoods
from torch_ssgp import validation as check
from torch_ssgp.exceptions import Breakdown, FactorizationError, breakdowns
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.inducing import Candidates, InducingPolicy, merge_duplicates
from torch_ssgp.memory import (
    Data,
    GaussianData,
    Memory,
    Rows,
    buffers,
    choose_points,
    is_full,
    remember,
    stored,
)
from torch_ssgp.modules import same_points
from torch_ssgp.summary import PosteriorSummary
from torch_ssgp.update.ascent import Ascended, choose, maximize
from torch_ssgp.update.objective import GaussianObjective, Objective, Prior
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.result import Status
from torch_ssgp.update.sites import SiteObjective

Result = TypeVar("Result")


class Known(NamedTuple):
    """What a model knows before an update.

    Attributes:
        prior: Its modules; they are copied before anything changes.
        frozen: Copies of them that do not learn, in the dtype of the algebra.
        start: What their parameters were before the first update.
        memory: What the stream has said so far.
        summary: The posterior at the inducing points.
    """

    prior: Prior
    frozen: Prior
    start: list[Tensor]
    memory: Memory
    summary: PosteriorSummary


class Limits(NamedTuple):
    """What a model may use, and in which form.

    Attributes:
        num_inducing: Largest number of inducing points.
        memory_size: Number of points that the memory is compressed to.
        policy: Chooses inducing points.
        alpha: Power of Power-EP.
        shared_noise: Whether all rows have the noise of the likelihood.
        jitter: Relative jitter.
        dtype: Dtype of the model.
    """

    num_inducing: int
    memory_size: int
    policy: InducingPolicy
    alpha: float
    shared_noise: bool
    jitter: float
    dtype: torch.dtype


class Learned(NamedTuple):
    """What an update ends with, before the model becomes it.

    Attributes:
        prior: Modules with the hyperparameters learned.
        summary: The next buffers of the summary.
        memory: The next buffers of the memory.
        bound: ``(*batch,)``, bound on the evidence of all data seen.
        loss: ``(*batch,)``, nats lost by the inducing points.
        loss_before: ``(*batch,)``, the same before the inner loop.
        memory_loss: ``(*batch,)``, nats lost by compressing the memory.
        num_kept: ``(*batch,)``, old inducing points that are still there.
        restarted: ``(*batch,)``, where a fresh start won.
        ascended: What the inner loop did.
        settled: Whether what is not learned by gradients has converged.
        status: How far it had to fall back.
    """

    prior: Prior
    summary: dict[str, Tensor]
    memory: dict[str, Tensor]
    bound: Tensor
    loss: Tensor
    loss_before: Tensor
    memory_loss: Tensor
    num_kept: Tensor
    restarted: Tensor
    ascended: Ascended
    settled: bool
    status: Status


def learn(known: Known, data: Data, options: UpdateOptions, limits: Limits) -> Learned:
    """One update; where numbers stop being finite, in closed form.

    Args:
        known: What is known before.
        data: New data, checked, in the dtype of the algebra.
        options: How to learn.
        limits: What may be used.

    Returns:
        What the model is to become.
    """
    try:
        try:
            return Update(known, data, options, limits).run()
        except Breakdown:
            if options.num_steps == 0:
                raise
            closed_form = replace(options, num_steps=0)
            learned = Update(known, data, closed_form, limits).run()
            return learned._replace(status=Status.CLOSED_FORM)
    except Breakdown as error:
        raise FactorizationError(
            f"Nothing could be learned from the data ({error}); the model is "
            "unchanged. Check kernel and likelihood for values that are not "
            "finite, or raise the jitter: with torch_ssgp.settings.jitter(1e-4): "
            "..."
        ) from error


def make_objective(
    prior: Prior,
    data: Data,
    z_a: Tensor,
    past: PseudoObservations,
    *,
    shared_noise: bool,
    alpha: float,
    jitter: float,
) -> Objective:
    """The bound that goes with the likelihood; see :class:`Objective`."""
    gaussian = likelihoods.is_gaussian(prior.likelihood)
    return (GaussianObjective if gaussian else SiteObjective)(
        prior,
        data,
        z_a,
        past,
        shared_noise=shared_noise,
        alpha=alpha,
        jitter=jitter,
    )


class Update:
    """One update, step by step."""

    def __init__(
        self, known: Known, data: Data, options: UpdateOptions, limits: Limits
    ) -> None:
        self.known, self.new = known, data
        self.options, self.limits = options, limits
        self.learns = options.learns_at(int(known.summary.num_updates))
        self.past, raw = recall(known, data, limits.shared_noise, options.forget)
        self.data = remember(raw, data) if data.y.size(-1) else raw
        self.num_data = float(self.past.past.n + self.data.num_data)
        self.since_start = float(known.memory.since_start) + data.y.size(-1)

    def run(self) -> Learned:
        """All steps; see the top of this file."""
        attempts = [self.attempt(self.objective(), fresh=self.is_first)]
        restarted = self.new.y.new_zeros(self.new.y.shape[:-1], dtype=torch.bool)
        is_due = self.is_due()
        if is_due:
            try:
                attempts.append(self.attempt(self.fresh_objective(), fresh=True))
            except Breakdown:  # what was learned before stays
                pass
        objective, ascended = attempts[0]
        if len(attempts) > 1:
            restarted = _take_better(objective, attempts[1][0])
            if bool(restarted.all()):
                objective, ascended = attempts[1]
        learned = self.finish(objective, ascended)
        started_at, since_start = self.known.memory.started_at, self.since_start
        if is_due or (self.is_first and self.learns):
            started_at, since_start = torch.full_like(started_at, self.num_data), 0
        memory = {
            **learned.memory,
            "started_at": started_at,
            "since_start": torch.full_like(started_at, since_start),
        }
        return learned._replace(memory=memory, restarted=restarted)

    # -- starts -----------------------------------------------------------------------

    def objective(self) -> Objective:
        """The bound, on working copies of the modules."""
        prior = self.known.frozen
        if self.options.num_steps:
            modules = self.known.prior
            prior = Prior(*(deepcopy(m).to(self.new.y.dtype) for m in modules))
        z_a, past = self.past
        objective = make_objective(
            prior,
            self.data,
            z_a,
            past,
            shared_noise=self.limits.shared_noise,
            alpha=self.limits.alpha,
            jitter=self.limits.jitter,
        )
        objective.recall_sites(self.known.memory)
        return objective

    @property
    def is_first(self) -> bool:
        """Whether hyperparameters were never learned."""
        return float(self.known.memory.started_at) == 0

    def is_due(self) -> bool:
        """Whether a fresh start is: as many data came since the last one as it had."""
        return (
            self.learns
            and self.options.restart
            and self.options.trust_region is None
            and not self.is_first
            and self.since_start >= float(self.known.memory.started_at)
        )

    def fresh_objective(self) -> Objective:
        """The bound, at the hyperparameters of a new model; what is frozen stays."""
        objective = self.objective()
        parameters = objective.modules_of_prior.parameters()
        with torch.no_grad():
            for parameter, value in zip(parameters, self.known.start, strict=True):
                if parameter.requires_grad:
                    parameter.copy_(value)
        return objective

    def attempt(
        self, objective: Objective, *, fresh: bool
    ) -> tuple[Objective, Ascended]:
        """Choose points, then the inner loop, from where the objective is."""
        options = self.options
        if fresh and self.learns:
            objective.initialize()
        if fresh and not self.is_first:  # the callback has seen one loop
            options = replace(options, callback=None, progress=False)
        with torch.no_grad():
            z = options.inducing_points
            z = self.choose(objective) if z is None else z
        moves = options.learn_inducing_points and options.num_steps > 0
        objective.start_at(z, learn=moves)
        if options.num_steps:
            _with_enough_jitter(objective, objective.check_finite)
        return objective, maximize(
            objective, options, learn_hyperparameters=self.learns
        )

    # -- inducing points --------------------------------------------------------------

    def candidates(self, objective: Objective) -> Candidates:
        """Where inducing points may lie, and what relies on them."""
        summary, x = self.known.summary, objective.data.x
        z_a = x[..., :0, :]
        if not summary.is_empty:
            z_a = summary.inducing_points.detach().to(x)
            z_a = z_a.expand(*x.shape[:-2], *z_a.shape[-2:])
        return Candidates(
            kernel=objective.kernel,
            z_a=z_a,
            z_s=objective.z_a,
            past=objective.past,
            x=x,
            weight=_precision(objective),
            s=objective.noises()[1],
            jitter=objective.jitter,
            num_inducing=self.limits.num_inducing,
            num_updates=int(summary.num_updates),
            num_new=self.new.y.size(-1),
        )

    @breakdowns()
    def choose(self, objective: Objective) -> Tensor:
        """The choice of the policy."""
        policy = self.limits.policy
        z = policy(self.candidates(objective))
        check.check_choice(z, policy, objective.data.x)
        return merge_duplicates(objective.kernel, z, objective.jitter)

    def revise(self, objective: Objective, loss: Tensor) -> bool:
        """Choose again where the policy wants to; whether anything changed."""
        z, policy = objective.z.detach(), self.limits.policy
        revised = policy.revise(self.candidates(objective), z, loss)
        if revised is not z:
            check.check_choice(revised, policy, objective.data.x)
        revised = merge_duplicates(objective.kernel, revised, objective.jitter)
        if revised is not z:
            objective.start_at(revised)
        return revised is not z

    # -- what is kept -----------------------------------------------------------------

    def finish(self, objective: Objective, ascended: Ascended) -> Learned:
        """Summary and memory at the hyperparameters learned."""
        with torch.no_grad():
            learned = _with_enough_jitter(
                objective, lambda: self.store(objective, ascended)
            )
        if objective.jitter > self.limits.jitter:
            raised = torch.full_like(self.known.summary.jitter, objective.jitter)
            summary = {**learned.summary, "jitter": raised}
            return learned._replace(summary=summary, status=Status.JITTER)
        return learned

    @breakdowns()
    def store(self, objective: Objective, ascended: Ascended) -> Learned:
        """The next buffers; nothing of the model changes yet."""
        if self.options.num_steps:
            for parameter in objective.modules_of_prior.parameters():
                # As the model will store it, before anything is made with it.
                parameter.copy_(parameter.to(self.limits.dtype))
        if objective.z.requires_grad:
            # Where they came to rest, points may coincide.
            objective.start_at(objective.z.detach())
        compresses = self.compresses(objective)
        prior = objective.final_prior(objective.z.detach())
        data = objective.as_gaussian(prior, freeze=compresses)
        rows, s = objective.project(prior, data)
        if self.options.inducing_points is None and self.revise(
            objective, rows.loss / (2 * s)
        ):
            compresses = self.compresses(objective)
            prior = objective.final_prior(objective.z.detach())
            data = objective.as_gaussian(prior, freeze=compresses)
            rows, s = objective.project(prior, data)
        loss = rows.loss / (2 * s)
        rows = fn.compress(rows)
        bound = fn.evidence(rows, s)
        past = fn.absorb(rows, prior.m_b)
        _check_finite(bound, *past)
        memory_loss = torch.zeros_like(loss)
        kept, raw = Rows(objective.z_a, objective.past), objective.data
        sites = data._replace(noise=objective.remembered_noise(data))
        if compresses:
            kept = Rows(objective.z.detach(), past)
            if self.is_finer:
                kept, memory_loss = self.compress(objective, data)
            nothing = raw.y[..., :0]
            raw = Data(raw.x[..., :0, :], nothing)
            sites = GaussianData(nothing, None, torch.zeros_like(kept.past.rho))
        shared_noise = self.limits.shared_noise
        loss_before = objective.loss_before
        old = self.candidates(objective).z_a
        return Learned(
            prior=objective.modules_of_prior,
            summary={
                "inducing_points": stored(objective.z),
                "U": stored(past.U),
                "g": stored(past.g),
                "residual": stored(past.rho),
                "num_data": stored(past.n),
                "prior_mean": stored(prior.m_b),
                "prior_cholesky": stored(rows.L),
                "noise_scale": stored(s),
                "shared_noise": torch.tensor(shared_noise, device=bound.device),
                "num_updates": self.known.summary.num_updates + 1,
                "jitter": self.known.summary.jitter,
            },
            memory=buffers(kept, raw, sites, shared_noise),
            bound=bound,
            loss=loss,
            loss_before=loss if loss_before is None else loss_before,
            memory_loss=memory_loss,
            num_kept=same_points(objective.z.detach(), old).any(-1).sum(-1),
            restarted=torch.zeros_like(loss, dtype=torch.bool),
            ascended=ascended,
            settled=objective.settled,
            status=ascended.status,
        )

    @property
    def is_finer(self) -> bool:
        """Whether the memory may have more points than the model, or is the model's."""
        return self.limits.memory_size > self.limits.num_inducing

    def compresses(self, objective: Objective) -> bool:
        """Whether the memory is over its capacity, or is to be the summary."""
        num_points = objective.z_a.size(-2) + objective.data.x.size(-2)
        return not self.is_finer or is_full(num_points, self.limits.memory_size)

    def compress(self, objective: Objective, data: GaussianData) -> tuple[Rows, Tensor]:
        """Rows at the points that the memory goes on with, and the nats they lose.

        It contains inducing points that do not learn: as long as these stay, updates
        equal batch inference.
        """
        z = objective.z.detach()
        if self.options.learn_inducing_points and self.options.num_steps:
            z = z[..., :0, :]
        points, fixed = z, z.size(-2)
        # Power-EP projects diagonally, once: more points in between would change it.
        if not (fixed and self.limits.alpha):
            points = choose_points(
                Rows(objective.z_a, objective.past),
                objective.data.x,
                _precision(objective),
                self.limits.memory_size,
                objective.jitter,
                z,
            )
        prior = objective.final_prior(points, num_inducing=fixed)
        rows, s = objective.project(prior, data)
        past = fn.absorb(fn.compress(rows), prior.m_b)
        _check_finite(*past)
        return Rows(points, past), rows.loss / (2 * s)


# -- what is known ------------------------------------------------------------------


def recall(
    known: Known, new: Data, shared_noise: bool, power: float = 1.0
) -> tuple[Rows, Data]:
    """Rows and raw data of a memory, in the form and dtype of the coming update.

    Args:
        known: What is known.
        new: New data, for their dtype and batch dimensions.
        shared_noise: Whether the noise of all rows is that of the likelihood.
        power: Power to which the likelihood of the past is raised.

    Returns:
        Rows with all batch dimensions, and raw data; both may be empty.
    """
    memory, y, batch = known.memory, new.y, new.y.shape[:-1]
    num_dims = new.x.size(-1)
    if memory.is_empty:
        past = PseudoObservations(
            y.new_zeros(*batch, 0, 0),
            y.new_zeros(*batch, 0),
            y.new_zeros(batch),
            y.new_zeros(()),
        )
        nothing = y.new_zeros(*batch, 0)
        rows = Rows(y.new_zeros(*new.x.shape[:-2], 0, num_dims), past)
        return rows, Data(new.x[..., :0, :], nothing)

    def prepared(value: Tensor) -> Tensor:
        return value.detach().to(y.dtype)

    z_a, past = memory.compressed
    past = PseudoObservations(*map(prepared, past))
    x = prepared(memory.raw_x)
    targets, known_noise = prepared(memory.y), prepared(memory.noise)
    weight = power * prepared(memory.weight)
    if bool(memory.shared_noise) and not shared_noise:
        sigma2 = prepared(known.frozen.likelihood.noise)
        past = fn.to_sites(past, sigma2.squeeze(-1).expand(batch))
        known_noise = torch.where(known_noise == 0, sigma2, known_noise)
    z_a = prepared(z_a)
    z_a = z_a.expand(*new.x.shape[:-2], *z_a.shape[-2:])
    raw = Data(
        x.expand(*new.x.shape[:-2], *x.shape[-2:]),
        targets.expand(*batch, -1),
        None if shared_noise else known_noise.expand(*batch, -1),
        None if bool((weight == 1).all()) else weight,
    )
    return Rows(z_a, past.discount(power)), raw


@torch.no_grad()
def _take_better(first: Objective, second: Objective) -> Tensor:
    """Where the second start ended higher; the first objective becomes the better.

    Streams that share no hyperparameter are told apart; others follow their sum.
    """
    scores = [
        objective.total()[0].nan_to_num(-torch.inf) for objective in (first, second)
    ]
    better = scores[1] > scores[0]
    batch = first.batch_shape
    pairs = list(
        zip(
            first.modules_of_prior.parameters(),
            second.modules_of_prior.parameters(),
            strict=True,
        )
    )
    shared = first.coupled or any(a.shape[: len(batch)] != batch for a, _ in pairs)
    if shared:
        better = (scores[1].sum() > scores[0].sum()).expand(batch)
    if bool(better.all()) or not bool(better.any()):
        return better
    for a, b in pairs:
        a.copy_(choose(better, b, a))
    count = max(first.z.size(-2), second.z.size(-2))
    z, other = (_padded(objective.z.detach(), count) for objective in (first, second))
    first.start_at(choose(better, other, z), learn=first.z.requires_grad)
    return better


def _padded(z: Tensor, count: int) -> Tensor:
    """As many points as ``count``: copies of the first are as good as none."""
    more = z[..., :1, :].expand(*z.shape[:-2], count - z.size(-2), z.size(-1))
    return torch.cat([z, more], -2)


def _precision(objective: Objective) -> Tensor:
    """Precision of the data in units of the rows, ``(*batch, n)``."""
    noise, s = objective.noises()
    precision = (s.unsqueeze(-1) / noise).expand(objective.data.y.shape)
    weight = objective.data.weight
    return precision if weight is None else weight * precision


def _with_enough_jitter(objective: Objective, attempt: Callable[[], Result]) -> Result:
    """Try with larger and larger jitter, until nothing breaks down."""
    while True:
        try:
            return attempt()
        except Breakdown:
            if not objective.raise_jitter():
                raise


def _check_finite(*values: Tensor) -> None:
    finite = [torch.isfinite(value).all() for value in values]
    if not bool(torch.stack(finite).all()):
        raise Breakdown("the new posterior is not finite")

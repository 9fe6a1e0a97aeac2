"""Learn hyperparameters: when it is due, from which starts, of what objective."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp import likelihoods
from torch_ssgp.exceptions import Breakdown
from torch_ssgp.prediction import freeze
from torch_ssgp.update import young
from torch_ssgp.update.ascent import Ascended, maximize, promise
from torch_ssgp.update.compress import choose, is_full, times_of
from torch_ssgp.update.objective import Objective, Prior, with_enough_jitter
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.sites import SiteObjective
from torch_ssgp.update.state import Known, Limits, State, make_objective

GROWTH = 0.2  # share of the data since the last learning that makes it due
WORTH = 0.5  # nats that a Newton step must promise
SURPRISE = 2.0  # nats by which errors since the last learning are too large
ODDS = math.log(1e3)  # nats that a rate of drift must win
FEW = 8  # data that say nothing of a drift
RATES = (0.1, 1.0, 10.0)  # of drift, in units of one over the number of data


class Fit(NamedTuple):
    """Hyperparameters learned, and on the way to a new state.

    Attributes:
        objective: Where it ended.
        ascended: What the inner loop did.
        restarted: ``(*batch,)``, where a fresh start won.
        score: ``(*batch,)``, what was maximised, where it ended.
    """

    objective: Objective
    ascended: Ascended
    restarted: Tensor
    score: Tensor


# -- when -----------------------------------------------------------------------------


def is_first(state: State) -> bool:
    """Whether hyperparameters were never learned."""
    return state.counts.started_at == 0


def has_one_class(state: State) -> bool:
    """Whether data are labels that all agree: any constant explains them.

    A kernel learned from them would be one, and could not tell classes that come later
    apart.
    """
    if not likelihoods.takes_labels(state.prior.likelihood) or not is_first(state):
        return False
    low, high = state.extremes.unbind(-1)
    return bool((low >= high).all())


def is_fresh_due(state: State, options: UpdateOptions) -> bool:
    """Whether as many data came since the last fresh start as it had."""
    counts = state.counts
    return (
        options.restart
        and options.trust_region is None
        and not is_first(state)
        and counts.since_start >= counts.started_at
    )


def is_due(state: State, options: UpdateOptions) -> bool:
    """Whether it is time to ask if hyperparameters are to be learned."""
    counts = state.counts
    if not options.learns_at(int(counts.num_updates) - 1) or has_one_class(state):
        return False
    if not options.learns_when_due or is_first(state):
        return True
    num_data = max(float(state.num_data.max()), 1.0)
    if counts.since_learning >= GROWTH * num_data:
        return True
    watched = options.forgets_by_evidence  # by alarms
    return not watched and surprised(state)


def pays(state: State, known: Known, options: UpdateOptions, limits: Limits) -> bool:
    """Whether a Newton step promises enough to learn, where it is due."""
    if not options.learns_when_due or is_first(state):
        return True
    if is_fresh_due(state, options) or known.curvature is None:
        return True
    objective = objective_of(state, known, limits, options)
    try:
        return promise(objective, known.curvature) > WORTH
    except Breakdown:
        return True


def surprised(state: State) -> bool:
    """Whether data since the last learning are further off than was expected."""
    num_new = min(int(state.counts.since_learning), state.num_raw)
    error = state.error[..., state.num_raw - num_new :]
    return float(0.5 * (error.square() - 1).sum(-1).max()) > SURPRISE


# -- from where, and of what ----------------------------------------------------------


def working_copy(known: Known, state: State) -> Prior:
    """Modules that may learn, with the present hyperparameters."""
    dtype = state.sunk.dtype
    modules = Prior(*(deepcopy(m).to(dtype) for m in known.prior))
    with torch.no_grad():
        pairs = zip(modules.parameters(), state.prior.parameters(), strict=True)
        for parameter, value in pairs:
            parameter.copy_(value)
    return modules


def objective_of(
    state: State,
    known: Known,
    limits: Limits,
    options: UpdateOptions,
) -> Objective:
    """What is to be maximised, on working copies of the modules.

    It is the evidence of the rows while everything is raw and fits, and the bound at
    the points of a compression afterwards.
    """
    objective = make_objective(state, limits, working_copy(known, state))
    z = options.inducing_points
    moves = bool(options.learn_inducing_points)
    if z is not None:
        time = times_of(z, state.rows, state.data)
        objective.start_at(objective.with_time(z, time), moves)
    elif isinstance(objective, SiteObjective) and not is_full(state, limits):
        objective.start_at(objective.points)
    elif state.is_compressed or is_full(state, limits):
        num_new = state.num_raw
        z = choose(objective, limits, num_new, int(state.counts.num_updates))
        objective.start_at(z, moves and is_full(state, limits))
    return objective


def start(state: State, known: Known, options: UpdateOptions, limits: Limits) -> Fit:
    """Hyperparameters to start from, as a fit that has not been learned."""
    objective = objective_of(state, known, limits, options)
    points = objective.z
    start_afresh(objective, known)
    if points is not None:
        objective.start_at(points.detach(), points.requires_grad)
    with_enough_jitter(objective, objective.check_finite)
    with torch.no_grad():
        for parameter in objective.prior.parameters():
            parameter.copy_(parameter.to(limits.dtype))
        score = objective.total()[0]
    nothing = Ascended(score.new_empty(0, *score.shape), 0, True)
    return Fit(objective, nothing, torch.zeros_like(score, dtype=torch.bool), score)


def start_afresh(objective: Objective, known: Known) -> None:
    """Hyperparameters of a new model, with this data; what is frozen stays."""
    with torch.no_grad():
        for parameter, value in zip(
            objective.prior.parameters(), known.start, strict=True
        ):
            if parameter.requires_grad:
                parameter.copy_(value)
    objective.initialize(young.grid_of(known.prior, known.start))


def learn(
    state: State,
    known: Known,
    options: UpdateOptions,
    limits: Limits,
    *,
    afresh: bool = False,
    points_alone: bool = False,
) -> Fit:
    """Climb from the present hyperparameters, from a fresh start too when it is due.

    Args:
        state: What is known.
        known: What was known before, with the first hyperparameters.
        options: How to learn.
        limits: What may be used.
        afresh: Whether to climb from a fresh start alone.
        points_alone: Whether inducing points move, and hyperparameters stay.
    """
    fresh = [False, True] if is_fresh_due(state, options) else [False]
    if is_first(state) or afresh:
        fresh = [True]
    if points_alone:
        fresh = [False]
    fits: list[Fit] = []
    for anew in fresh:
        try:
            fits.append(_climb(state, known, options, limits, anew, points_alone))
        except Breakdown:
            if anew is fresh[-1] and not fits:
                raise
        # The callback has seen one loop.
        options = replace(options, callback=None, progress=False)
    return better_of(fits[0], fits[1]) if len(fits) == 2 else fits[0]


def _climb(
    state: State,
    known: Known,
    options: UpdateOptions,
    limits: Limits,
    anew: bool,
    points_alone: bool = False,
) -> Fit:
    objective = objective_of(state, known, limits, options)
    if anew:
        points = objective.z
        start_afresh(objective, known)
        if points is not None:
            objective.start_at(points.detach(), points.requires_grad)
    with_enough_jitter(objective, objective.check_finite)
    ascended = maximize(objective, options, not points_alone)
    with torch.no_grad():
        for parameter in objective.prior.parameters():
            # As the model will store it, before anything is made with it.
            parameter.copy_(parameter.to(limits.dtype))
        score = objective.total()[0]
    return Fit(
        objective, ascended, torch.full_like(score, anew, dtype=torch.bool), score
    )


@torch.no_grad()
def better_of(first: Fit, second: Fit, price: float = 0.0) -> Fit:
    """The better of two fits, stream by stream.

    Streams that share hyperparameters are compared by their sum.

    Args:
        first: A fit, which takes over what is better.
        second: Another.
        price: Nats by which the second has to be better.
    """
    a, b = first.objective, second.objective
    scores = [fit.score.nan_to_num(-torch.inf) for fit in (first, second)]
    batch = a.batch_shape
    better = scores[1] > scores[0] + price
    pairs = list(zip(a.prior.parameters(), b.prior.parameters(), strict=True))
    if a.coupled or any(p.shape[: len(batch)] != batch for p, _ in pairs):
        better = (scores[1].sum() > scores[0].sum() + price).expand(batch)
    if not bool(better.any()):
        return first._replace(restarted=better & second.restarted)
    if bool(better.all()):
        return second
    for p, q in pairs:
        p.copy_(select(better, q, p))
    if a.z is not None and b.z is not None:
        count = max(a.z.size(-2), b.z.size(-2))
        z, other = (_padded(z.detach(), count) for z in (a.z, b.z))
        a.start_at(select(better, other, z), learn=a.z.requires_grad)
    curvature = first.ascended.curvature
    if curvature is not None and second.ascended.curvature is not None:
        curvature = select(better, second.ascended.curvature, curvature)
    return Fit(
        a,
        first.ascended._replace(curvature=curvature),
        better & second.restarted,
        torch.where(better, scores[1], scores[0]),
    )


def _padded(z: Tensor, count: int) -> Tensor:
    """``count`` points: copies of the first fill up, and change nothing."""
    more = z[..., :1, :].expand(*z.shape[:-2], count - z.size(-2), z.size(-1))
    return torch.cat([z, more], -2)


def select(condition: Tensor, value: Tensor, other: Tensor) -> Tensor:
    """``value`` of the streams for which ``condition`` holds, else ``other``."""
    shape = condition.shape + (1,) * (value.ndim - condition.ndim)
    return torch.where(condition.reshape(shape), value, other)


def adopt(state: State, fit: Fit) -> State:
    """The state with the hyperparameters of a fit."""
    objective = fit.objective
    dtype = state.sunk.dtype
    frozen = Prior(*(freeze(m, dtype) for m in objective.prior))
    state = state._replace(
        prior=frozen, predictor=None, jitter=max(state.jitter, objective.jitter)
    )
    if isinstance(objective, SiteObjective):
        with torch.no_grad():
            state = state._replace(sites=objective.as_gaussian())
    rate = objective.rate
    return state._replace(rate=None if rate is None else rate.detach())


# -- drift ----------------------------------------------------------------------------


def with_rate(
    fit: Fit, state: State, known: Known, options: UpdateOptions, limits: Limits
) -> Fit:
    """The fit, or one with a rate of drift if that wins by the odds."""
    if float(state.num_data.max()) < FEW or fit.objective.log_rate is not None:
        return fit
    if state.num_rows > 2 * limits.memory_size:  # a batch that does not fit
        return fit
    start = _promising_rate(fit, state, limits)
    if start is None:
        return fit
    drifting = state._replace(
        rate=start, prior=Prior(*(m for m in fit.objective.prior))
    )
    options = replace(options, callback=None, progress=False, restart=False)
    try:
        other = _climb(drifting, known, options, limits, False)
    except Breakdown:
        return fit
    with torch.no_grad():
        gain = exact(other.objective) - exact(fit.objective) - ODDS
    if bool((gain <= 0).all()):
        return fit
    rate = other.objective.rate
    assert rate is not None and other.objective.log_rate is not None
    with torch.no_grad():  # none where it did not win
        off = torch.full_like(rate, -torch.inf)
        other.objective.log_rate.copy_(torch.where(gain > 0, rate.log(), off))
    return other


def exact(objective: Objective) -> Tensor:
    """Evidence of all rows, without inducing points, ``(*batch,)``."""
    if isinstance(objective, SiteObjective):
        return objective.total()[0]
    z, objective.z = objective.z, None
    try:
        return objective.total()[0]
    finally:
        objective.z = z


@torch.no_grad()
def _promising_rate(fit: Fit, state: State, limits: Limits) -> Tensor | None:
    """A rate that explains the data better as it is, ``(*batch,)``; or none."""
    best, rate = exact(fit.objective), None
    count = state.num_data.expand(fit.score.shape).clamp_min(1)
    for factor in RATES:
        trial = state._replace(rate=factor / count)
        objective = make_objective(trial, limits, fit.objective.prior)
        if isinstance(objective, SiteObjective):
            objective.start_at(objective.points)
        try:
            score = objective.total()[0]
        except Breakdown:
            continue
        if bool((score > best).any()):
            better = score > best
            old = factor / count if rate is None else rate
            rate = torch.where(better, factor / count, old)
            best = torch.where(better, score, best)
    return rate

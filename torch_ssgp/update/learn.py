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
from torch_ssgp.update.ascent import WORTH, Ascended, maximize, promise
from torch_ssgp.update.compress import choose, drifted, is_full, moves_on, times_of
from torch_ssgp.update.objective import Objective, Prior, with_enough_jitter
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.sites import SiteObjective
from torch_ssgp.update.state import Known, Limits, State, make_objective

GROWTH = 0.2  # share of the data since the last learning that makes it due
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
    return counts.since_learning >= GROWTH * num_data  # an alarm says so before


def pays(state: State, known: Known, options: UpdateOptions, limits: Limits) -> bool:
    """Whether a Newton step promises enough to learn, where it is due."""
    if not options.learns_when_due or is_first(state):
        return True
    if is_fresh_due(state, options) or known.curvature is None:
        return True
    objective = objective_of(state, known, limits, options)
    try:
        if promise(objective, known.curvature) > WORTH:
            return True
        asks = options.forgets_by_evidence and state.rate is None
        if not asks or not _may_drift(state, limits):
            return False
        return _promising_rate(objective, state, limits, ODDS) is not None
    except Breakdown:
        return True


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

    It is the evidence of the rows while everything is raw and fits, and on a time axis;
    otherwise the bound at the points that a compression would leave.
    """
    objective = make_objective(state, limits, working_copy(known, state))
    z = options.inducing_points
    moves = bool(options.learn_inducing_points)
    if z is not None:
        time = times_of(z, state.rows, state.data)
        objective.start_at(objective.with_time(z, time), moves)
    elif isinstance(objective, SiteObjective) and not is_full(state, limits):
        objective.start_at(objective.points)
    elif not isinstance(objective, SiteObjective) and moves_on(objective, limits):
        return objective  # what its points will lose is to be seen, and forgotten
    elif state.is_compressed or is_full(state, limits):
        num_new = state.num_raw
        z = choose(objective, limits, num_new, int(state.counts.num_updates))
        objective.start_at(z, moves and is_full(state, limits))
    return objective


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

    Or from a fresh start alone, ``afresh``; or with hyperparameters that stay, while
    points move.
    """
    fresh = [False, True] if is_fresh_due(state, options) else [False]
    if points_alone or afresh or is_first(state):
        fresh = [not points_alone]
    fits: list[Fit] = []
    for anew in fresh:
        try:
            goal = fits[0].score if fits else None
            fit = _climb(state, known, options, limits, anew, points_alone, goal)
            fits.append(fit)
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
    goal: Tensor | None = None,
) -> Fit:
    objective = objective_of(state, known, limits, options)
    if anew:
        points = objective.z
        start_afresh(objective, known)
        if points is not None:
            objective.start_at(points.detach(), points.requires_grad)
    with_enough_jitter(objective, objective.check_finite)
    usual = options.optimizer == "adam" and options.lr is None
    near = known.curvature if usual and not anew else None
    ascended = maximize(objective, options, not points_alone, near, goal)
    with torch.no_grad():
        for parameter in objective.prior.parameters():
            # As the model will store it, before anything is made with it.
            parameter.copy_(parameter.to(limits.dtype))
        score = objective.total()[0]
    again = anew and ascended.num_steps > 0 and not is_first(state)
    return Fit(
        objective, ascended, torch.full_like(score, again, dtype=torch.bool), score
    )


@torch.no_grad()
def better_of(first: Fit, second: Fit) -> Fit:
    """The better of two fits, stream by stream: the first takes over what is better.

    Streams that share hyperparameters are compared by their sum.
    """
    scores = [fit.score.nan_to_num(-torch.inf) for fit in (first, second)]
    if _is_shared(first.objective):
        scores = [score.sum().expand(score.shape) for score in scores]
    return choose_fit(first, second, scores[1] > scores[0])


def _is_shared(objective: Objective) -> bool:
    """Whether some hyperparameter is that of several streams."""
    batch = objective.batch_shape
    parameters = objective.prior.parameters()
    return objective.coupled or any(p.shape[: len(batch)] != batch for p in parameters)


@torch.no_grad()
def choose_fit(first: Fit, second: Fit, better: Tensor) -> Fit:
    """The first fit, which takes over the second where that is better, ``(*batch,)``.

    Streams that share hyperparameters take them over together.
    """
    a, b = first.objective, second.objective
    pairs = list(zip(a.prior.parameters(), b.prior.parameters(), strict=True))
    if _is_shared(a):
        better = better.any().expand(better.shape)
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
        torch.where(better, second.score, first.score),
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


def _may_drift(state: State, limits: Limits) -> bool:
    """Whether a rate can be asked for: there are data enough, and they fit.

    Labels may come class by class, which looks like a drift.
    """
    if likelihoods.takes_labels(state.prior.likelihood):
        return False
    fits = state.num_rows <= 2 * limits.memory_size
    return fits and float(state.num_data.max()) >= FEW


def with_rate(
    fit: Fit, state: State, known: Known, options: UpdateOptions, limits: Limits
) -> Fit:
    """The fit, with a rate of drift where that wins by the odds, and with none else."""
    if not _may_drift(state, limits):
        return fit
    drifts = fit.objective.log_rate is not None
    rate = None if drifts else _promising_rate(fit.objective, state, limits)
    if not drifts and rate is None:
        return fit
    state = state._replace(rate=rate, prior=fit.objective.prior)
    known = known._replace(curvature=fit.ascended.curvature)
    options = replace(options, callback=None, progress=False, restart=False)
    try:
        other = _climb(state, known, options, limits, False)
    except Breakdown:
        return fit
    still, moving = (other, fit) if drifts else (fit, other)
    wins = exact(moving.objective) - exact(still.objective) > ODDS
    wins = wins & drifted(moving.objective)  # else it is only a rougher kernel
    if bool(wins.any()) and still.objective.z is not None:
        # It was learned on the bound; a drift on the evidence, where it has to win.
        best = _best_without(state, still, known, options, limits)
        wins = wins & (exact(moving.objective) - best > ODDS)
    if not bool(wins.any()):
        return still
    a, b, log_rate = moving.objective, still.objective, moving.objective.log_rate
    assert log_rate is not None
    with torch.no_grad():  # where it did not win nothing changes
        log_rate.copy_(log_rate.where(wins, -torch.inf))
        pairs = zip(a.prior.parameters(), b.prior.parameters(), strict=True)
        for p, q in () if _is_shared(a) else pairs:
            p.copy_(select(wins, p, q))
    return moving


def _best_without(
    state: State, still: Fit, known: Known, options: UpdateOptions, limits: Limits
) -> Tensor:
    """The most evidence of all rows ``(*batch,)`` without a rate."""
    state = state._replace(rate=None, prior=still.objective.prior)
    objective = make_objective(state, limits, working_copy(known, state))
    if isinstance(objective, SiteObjective):
        return exact(still.objective)
    try:
        maximize(objective, options, True, known.curvature)
    except Breakdown:
        return exact(still.objective)
    return exact(objective).maximum(exact(still.objective))


@torch.no_grad()
def exact(objective: Objective) -> Tensor:
    """Evidence of all rows, ``(*batch,)``: with no inducing points, or with all."""
    z, same = objective.z, objective.same
    sites = isinstance(objective, SiteObjective)
    objective.start_at(objective.points if sites else None)
    try:
        return objective.bound()
    finally:
        objective.z, objective.same = z, same


@torch.no_grad()
def _promising_rate(
    now: Objective, state: State, limits: Limits, price: float = 0.0
) -> Tensor | None:
    """A rate that explains the data better as it is, ``(*batch,)``; or none."""
    best, rate = exact(now) + price, None
    count = state.num_data.expand(best.shape).clamp_min(1)
    for factor in RATES:
        trial = state._replace(rate=factor / count)
        objective = make_objective(trial, limits, now.prior)
        try:
            score = exact(objective)
        except Breakdown:
            continue
        if bool((score > best).any()):
            better = score > best
            old = factor / count if rate is None else rate
            rate = torch.where(better, factor / count, old)
            best = torch.where(better, score, best)
    return rate

r"""An update: a function of what a model knows, new data and options.

    extend     new rows border the factor: exact; their errors are one step ahead
    judge      do these errors speak of a change? (``change.py``)
    learn      if it is due, maximise the evidence (``learn.py``, ``ascent.py``)
    compress   if there are more rows than a memory may hold (``compress.py``)
    finish     the bound, and the factor for the next update

The model does not change here. It takes over the result, or discards it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp.exceptions import Breakdown, FactorizationError, breakdowns
from torch_ssgp.memory import TRUSTED, Data, GaussianData, Memory
from torch_ssgp.modules import observation_noise
from torch_ssgp.prediction import Predictor
from torch_ssgp.rows import Border
from torch_ssgp.update import change, young
from torch_ssgp.update.ascent import Ascended
from torch_ssgp.update.change import News
from torch_ssgp.update.compress import choose, compress, is_full, times_of
from torch_ssgp.update.initialization import average
from torch_ssgp.update.learn import (
    Fit,
    adopt,
    is_due,
    is_first,
    is_fresh_due,
    learn,
    pays,
    with_rate,
)
from torch_ssgp.update.objective import JITTERS, Prior
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.result import Status
from torch_ssgp.update.sites import joined_sites, sites_ahead
from torch_ssgp.update.state import (
    Known,
    Learned,
    Limits,
    State,
    appended,
    check_finite,
    evidence,
    fitted,
    make_objective,
    no_rows,
    recall,
)

TINY = 1e-30  # weight of a row that says nothing


def update(known: Known, data: Data, options: UpdateOptions, limits: Limits) -> Learned:
    """One update; in closed form if numbers stop being finite.

    Args:
        known: What the model knows before.
        data: New data, checked, in the dtype of the algebra; perhaps none.
        options: How to learn.
        limits: What may be used.

    Returns:
        What the model is to become.
    """
    try:
        try:
            return _walk(known, data, options, limits)
        except Breakdown:
            if options.num_steps == 0:
                raise
            closed_form = replace(options, num_steps=0)
            learned = _walk(known, data, closed_form, limits)
            return learned._replace(status=Status.CLOSED_FORM)
    except Breakdown as error:
        raise FactorizationError(
            f"Nothing could be learned from the data ({error}); the model is "
            "unchanged. Check kernel and likelihood for values that are not "
            "finite, or raise the jitter: with torch_ssgp.settings.jitter(1e-4): "
            "..."
        ) from error


def _walk(known: Known, data: Data, options: UpdateOptions, limits: Limits) -> Learned:
    state, before = _recalled(known, data, options, limits)
    state, news = extend(state, data, limits)
    state, surprise = _judge(state, known, news, options)
    num_new = data.y.size(-1)
    state, taught = _learn(state, known, options, limits, num_new)
    state, lost, status = _compress(state, options, limits, taught, num_new)
    return _finish(state, limits, taught, before, surprise, lost, status)


def caught_up(learned: Learned, then: Memory, now: Known, limits: Limits) -> State:
    """What was learned from a snapshot, with the data that came meanwhile.

    Args:
        learned: What was learned.
        then: The memory of the snapshot.
        now: What the model knows now.
        limits: What may be used.
    """
    memory, state = now.memory, learned.state
    num_new = int(memory.count().arrived - then.count().arrived)
    dtype = state.sunk.dtype
    nothing = Data(*(t[..., :0] for t in (state.data.x.mT, state.data.y)))
    nothing = nothing._replace(x=nothing.x.mT)
    recalled, num_old = recall(now, nothing, limits), memory.num_raw - num_new
    grew = num_new >= 0 and torch.equal(memory.U, then.U)
    grew = grew and torch.equal(memory.y[..., :num_old], then.y)
    with breakdowns(), torch.no_grad():
        if grew:  # nothing but new rows
            if not num_new:
                return state
            new = recalled.data.narrow(memory.num_raw - num_new, num_new)
            state, _ = extend(fitted(state, limits), new._replace(time=None), limits)
        else:  # rows have changed: only hyperparameters are taken over
            counts = recalled.counts._replace(
                started_at=state.counts.started_at, since_learning=0.0, since_start=0.0
            )
            state = recalled._replace(
                prior=state.prior, rate=state.rate, counts=counts, predictor=None
            )
        state = fitted(state, limits)
        return state._replace(bound=evidence(state, limits).to(dtype))


def surprise(known: Known, data: Data, limits: Limits) -> Tensor:
    """Nats per datum by which data are less probable than expected, ``(*batch,)``.

    Args:
        known: What the model knows.
        data: Data that it does not learn, checked.
        limits: The form of the rows.
    """
    state = recall(known, data, limits)
    if is_first(state):
        return torch.zeros_like(state.sunk)
    with breakdowns(), torch.no_grad():
        _, news = extend(fitted(state, limits), data, limits)
    return average(news.surprise, data.seen)


# -- recall ---------------------------------------------------------------------------


def _recalled(
    known: Known, data: Data, options: UpdateOptions, limits: Limits
) -> tuple[State, Tensor]:
    """What is known, faded if that is asked for, and its bound."""
    state = recall(known, data, limits)
    power = options.power
    if power != 1:
        state = discounted(state, power)
    if options.forget == 1 and state.rate is not None:  # every datum at its word
        state = state._replace(rate=None, predictor=None)
    try:
        with breakdowns():
            state = fitted(state, limits)
    except Breakdown:  # learning may find hyperparameters that do not
        if not options.num_steps or state.sites is not None:
            raise
    return state, state.bound if power == 1 else evidence(state, limits)


def discounted(state: State, power: float | Tensor) -> State:
    """The past with its likelihood raised to a power, one or ``(*batch,)``."""
    ones = state.data.y.new_ones(state.num_raw)
    weight = ones if state.data.weight is None else state.data.weight
    factor = power.unsqueeze(-1) if isinstance(power, Tensor) else power
    base = state.base
    if base is not None:
        base = base._replace(
            past=base.past.discount(power),
            power=torch.as_tensor(base.power * power),
            sunk=base.sunk * power,
        )
    return state._replace(
        rows=state.rows._replace(past=state.rows.past.discount(power)),
        data=state.data._replace(weight=factor * weight),
        sunk=state.sunk * power,
        base=base,
        predictor=None,
    )


# -- extend ---------------------------------------------------------------------------


@breakdowns()
@torch.no_grad()
def extend(state: State, new: Data, limits: Limits) -> tuple[State, News]:
    """The state with new data, and how they were predicted.

    Few data border the factor; a batch that does not fit is predicted datum by datum,
    and all rows are factored again when they are learned or compressed.

    Args:
        state: What is known.
        new: New data.
        limits: What may be used.
    """
    num_new, old = new.y.size(-1), state.predictor
    time = torch.arange(num_new, dtype=new.y.dtype, device=new.y.device)
    time, zero = time + state.counts.arrived, torch.zeros_like(new.y)
    new, sites = new._replace(time=time), None
    nothing = News(zero, zero, zero, zero > 0, zero)
    if old is None or not num_new:  # it broke down, or there is nothing to predict
        return appended(state, new, state.sites if old else None, zero), nothing
    seen: Data | None = new
    if state.sites is not None:
        sites, seen = _sites_of(state, new, limits), None
        if sites is None:
            sites = sites_ahead(state.prior, old, new, no_rows(state), state.jitter)
            seen = new._replace(y=sites.target, noise=sites.noise)
            sites = joined_sites(state.sites, sites)
    border, root = None, None
    if seen is not None and num_new <= limits.memory_size:
        root = _root(seen, state, limits)
        target = seen.y if root is None else root * seen.y
        border = old.border(seen.x, target, root, time)
    if state.sites is None:
        state, news = _news(old, new, border, root, state, limits)
    else:
        news = change.news_of_sites(old, new)
    state = appended(state, new, sites, news.error)
    if border is not None and seen is not None and limits.team is None:
        predictor = old.extended(seen.x, target, root, border, time)
        predictor.now = new.y.new_tensor(state.counts.arrived)
        mixture = None if old.young is None else old.young[0].extended(new)
        if mixture is not None:
            predictor = predictor.blended(mixture, state.odds)
        state = state._replace(predictor=predictor)
    return state, news


def _news(
    old: Predictor,
    new: Data,
    border: Border | None,
    root: Tensor | None,
    state: State,
    limits: Limits,
) -> tuple[State, News]:
    """How Gaussian data were predicted: each given those before it, if they fit."""
    s, k = _noise(new, state, limits), old.form.variances(old.with_time(new.x))
    if border is not None:
        e, scale = border.e, border.L_inv.diagonal(dim1=-2, dim2=-1).reciprocal()
        known = border.V.square().sum(-2)
        if root is not None:
            least = root.clamp_min(TINY)
            scale, known = scale / least, known / least.square()
        left = k - known
    else:
        mean, left = old.moments(new.x)
        scale = (left + s).sqrt()
        e = (new.y - mean) / scale
    if old.young is not None:
        odds, e, scale = young.one_ahead(old, new, state.num_data)
        state = state._replace(odds=odds)
    e = e.expand(new.y.shape)
    if new.seen is not None:
        e = e.where(new.seen, 0)
    return state, change.news_of(e, scale, left, k, s, new.y - old.mean(new.x))


def _noise(new: Data, state: State, limits: Limits) -> Tensor:
    """Noise variances of new data."""
    if limits.shared_noise:
        return state.scale(True).unsqueeze(-1)
    if state.sites is not None:
        assert new.noise is not None  # that of a site
        return new.noise
    return observation_noise(state.prior.likelihood, new.noise)


def _root(new: Data, state: State, limits: Limits) -> Tensor | None:
    """Weights of new rows; ``None`` for ones."""
    weight = new.weight
    if limits.shared_noise:
        return None if weight is None else weight.sqrt()
    root = _noise(new, state, limits).rsqrt().expand(new.y.shape)
    return root if weight is None else root * weight.sqrt()


def _sites_of(state: State, new: Data, limits: Limits) -> GaussianData | None:
    """Sites of old and new data, settled together; ``None`` for a single datum.

    A single one gets a site given what the rows predict of it; all are settled when the
    model learns or compresses.
    """
    if new.y.size(-1) == 1 and state.num_rows:
        return None
    every = state._replace(data=state.data.joined(new))
    objective = make_objective(every, limits, state.prior)
    if every.num_rows > 2 * limits.memory_size:
        objective.start_at(choose(objective, limits, new.y.size(-1)))
    else:
        objective.start_at(objective.points)
    return objective.as_gaussian()


# -- judge ----------------------------------------------------------------------------


@breakdowns()
@torch.no_grad()
def _judge(
    state: State,
    known: Known,
    news: News,
    options: UpdateOptions,
) -> tuple[State, Tensor]:
    """The state with new alarms, and the surprise of the new data."""
    num_new = news.surprise.size(-1)
    if not num_new or is_first(state):
        return state, torch.zeros_like(state.sunk)
    seen = state.data.narrow(state.num_raw - num_new, num_new).seen
    if options.watches:
        state = change.judge(state, known, news)
    return state, average(news.surprise, seen)


# -- learn ----------------------------------------------------------------------------


class Taught(NamedTuple):
    """What learning did.

    Attributes:
        fit: Where it ended; ``None`` if nothing was learned.
        forgot: ``(*batch,)``, streams that begin anew.
    """

    fit: Fit | None
    forgot: Tensor


def _learn(
    state: State, known: Known, options: UpdateOptions, limits: Limits, num_new: int
) -> tuple[State, Taught]:
    """The state with new hyperparameters, where it is time for them."""
    nowhere = torch.zeros_like(state.sunk, dtype=torch.bool)
    if not options.num_steps:
        return state, Taught(None, nowhere)
    state = _aged(state, known, options, limits)
    count = float(state.num_data.max())
    if _starts_only(state, options):
        fit = learn(state, known, replace(options, num_steps=0), limits, afresh=True)
        state = adopt(state, fit).counted(since_learning=0.0, since_start=0.0)
        return state.counted(started_at=count), Taught(fit, nowhere)
    if options.postpones:
        return state, Taught(None, nowhere)
    if options.watches:
        newest = num_new or min(int(state.counts.since_learning), state.num_raw)
        alarmed = change.is_alarmed(state, options, newest)
        if bool(alarmed.any()):
            explained = change.explain(state, known, options, limits, alarmed)
            state = adopt(explained.state, explained.fit)
            state = state.counted(since_learning=0.0)
            return state, Taught(explained.fit, explained.forgot)
    due = is_due(state, options)
    if due and not pays(state, known, options, limits):
        state, due = state.counted(since_learning=0.0), False  # asked and answered
    if not due:
        moves = options.inducing_points is not None or is_full(state, limits)
        if not (options.learn_inducing_points and moves):
            return state, Taught(None, nowhere)
        fit = learn(state, known, options, limits, points_alone=True)
        return adopt(state, fit), Taught(fit, nowhere)
    starts = is_first(state) or is_fresh_due(state, options)
    if options.budget is not None:  # evaluations, of one climb or of two
        steps = options.budget // (2 if is_fresh_due(state, options) else 1)
        options = replace(options, num_steps=min(max(steps, 1), options.num_steps))
    fit = learn(state, known, options, limits)
    if options.leaves_out and fit.ascended.converged:  # else all may be far off
        state, fit = change.leave_out(state, fit, known, options, limits)
    if options.forgets_by_evidence:
        fit = with_rate(fit, state, known, options, limits)
    state = adopt(state, fit)
    if fit.ascended.converged or options.budget is None:  # else it goes on
        state = state.counted(since_learning=0.0)
    if starts:
        count = float(state.num_data.max())
        state = state.counted(started_at=count, since_start=0.0)
    return state, Taught(fit, nowhere)


def _starts_only(state: State, options: UpdateOptions) -> bool:
    """Whether hyperparameters are only set to a start, without a gradient.

    So they are while data are few; and where learning is postponed, as often as a fresh
    start is due, until :meth:`~torch_ssgp.StreamingGP.learn` is called.
    """
    if options.postpones:
        counts = state.counts
        return is_first(state) or (
            state.is_young and counts.since_start >= counts.started_at
        )
    return state.is_young and float(state.num_data.max()) < young.FEW


def _aged(state: State, known: Known, options: UpdateOptions, limits: Limits) -> State:
    """The state as that of a young model, or of one that is young no more."""
    if is_first(state) and options.integrates and limits.shared_noise:
        grid = young.grid_of(known.prior, known.start)
        if grid is not None:
            return state._replace(grid=grid, odds=torch.full_like(state.odds, -TRUSTED))
    if state.grid is None:
        return state
    is_old = state.odds > young.ODDS
    if state.num_rows > young.LARGEST or not options.integrates:
        is_old = torch.ones_like(is_old)
    state = state._replace(odds=torch.where(is_old, TRUSTED, state.odds))
    return state._replace(grid=None) if bool(is_old.all()) else state


# -- compress -------------------------------------------------------------------------


def _compress(
    state: State,
    options: UpdateOptions,
    limits: Limits,
    taught: Taught,
    num_new: int,
) -> tuple[State, Tensor, Status]:
    """The state within its bounds, the nats that cost, and whether it was hard."""
    lost, status, z = torch.zeros_like(state.sunk), Status.OK, None
    if options.inducing_points is not None:
        z = options.inducing_points
        if state.rate is not None:
            time = times_of(z, state.rows, state.data).expand(z.shape[:-1])
            z = torch.cat([z, time.unsqueeze(-1)], -1)
    elif not is_full(state, limits):
        return state, lost, status
    if taught.fit is not None:
        moved = taught.fit.objective.z
        if moved is not None and moved.requires_grad:
            z = moved.detach()
    while True:
        try:
            state, lost = compress(state, limits, z, num_new)
            return state, lost, status
        except Breakdown:
            larger = [jitter for jitter in JITTERS if jitter > state.jitter]
            if not larger:
                raise
            state, status = state._replace(jitter=larger[0]), Status.JITTER


# -- finish ---------------------------------------------------------------------------


@torch.no_grad()
def _finish(
    state: State,
    limits: Limits,
    taught: Taught,
    before: Tensor,
    surprise: Tensor,
    lost: Tensor,
    status: Status,
) -> Learned:
    """The bound and the report."""
    with breakdowns():
        state = fitted(state, limits)
    bound = evidence(state, limits)
    check_finite(bound)
    fit = taught.fit
    nothing = Ascended(bound.new_empty(0, *bound.shape), 0, True)
    ascended = nothing if fit is None else fit.ascended
    if status is Status.OK:
        status = ascended.status
    if state.jitter > limits.jitter:
        status = Status.JITTER
    before = torch.where(taught.forgot, 0.0, before)
    return Learned(
        state=state._replace(bound=bound),
        prior=None if fit is None else Prior(*fit.objective.prior),
        bound=bound,
        increment=bound - before,
        lost=lost,
        restarted=taught.forgot if fit is None else fit.restarted,
        forgot=(~taught.forgot).to(bound),
        surprise=surprise.expand(bound.shape),
        flattened=torch.zeros_like(taught.forgot),
        ascended=ascended,
        settled=True if fit is None else fit.objective.settled,
        status=status,
    )

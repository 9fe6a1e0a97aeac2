r"""Change: alarms, and three explanations among which the evidence decides.

An alarm is a sum of log Bayes factors of new data against the model (Page's test): it
starts over when it falls below zero, and no datum counts for more than ``CAP`` nats.
There are three kinds of alternatives:

    the past is no help      the raw data since the alarm began predict better alone
    errors are too large     their standard deviation is three times what it should be
    errors are too small     it is a tenth of it

An alarm decides nothing. It makes the model learn, and the evidence compares

    one function             for all data
    outliers                 the same, but data that are far off are left out, each at a
                             price
    a new function           the past ended; the data since begin anew, hyperparameters
                             integrated out

What is undecided is asked again when the data since then have doubled.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.memory import TRUSTED, Data, GaussianData, Rows
from torch_ssgp.prediction import Predictor
from torch_ssgp.update import young
from torch_ssgp.update.initialization import average
from torch_ssgp.update.learn import Fit, adopt, exact, learn
from torch_ssgp.update.objective import Prior
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.state import (
    Known,
    Limits,
    State,
    fitted,
    make_objective,
    no_rows,
)

CAP = 4.6  # nats of one datum: it is one of a hundred
LARGE, SMALL = 3.0, 0.1  # standard deviations of errors that are too large, too small
KNOWN = 0.5  # share of the prior variance, or of the noise, that the past may leave
CLOSE = 1.1  # a noise closer to its lower limit cannot fall
FEWEST = 3  # data that can be a new function
ROUNDS = 3  # of looking for outliers behind outliers
GROSS = 6.0  # standard deviations at which one datum is an alarm
FAR = 4.0  # standard deviations at which a datum may be an outlier
SHARE = 0.01  # of data with which a run of outliers begins
STAYS = 0.9  # probability that it goes on
WIDE = 3.0  # standard deviation of outliers, in units of that of the targets
MANY = 200  # data that stand for all in a comparison
OPEN = 60  # data after which a question is no longer asked again


# -- alarms ---------------------------------------------------------------------------


class Judged(NamedTuple):
    """What new data say about the model that predicted them.

    Attributes:
        alarm: ``(*batch, 3)``, log Bayes factors against it.
        alarmed: ``(*batch, 3)``, raw data before each of them began.
        surprise: ``(*batch,)``, nats per datum below what it expected.
    """

    alarm: Tensor
    alarmed: Tensor
    surprise: Tensor


class News(NamedTuple):
    """New rows as the model saw them coming.

    Attributes:
        log_scale: ``(*batch, n)``, :math:`\\log \\sigma_i` of their predictions.
        is_known: ``(*batch, n)``, whether the past said much about them: of others it
            knew nothing, and they cannot tell that it ended.
        num_new: How many they are.
    """

    log_scale: Tensor
    is_known: Tensor
    num_new: int


def judge(state: State, known: Known, news: News, limits: Limits) -> Judged:
    r"""Add new data to the alarms.

    Args:
        state: What is known, the new data among the raw ones.
        known: What was known before.
        news: How the model saw them coming.
        limits: The form of the rows.
    """
    log_scale, is_known, num_new = news
    first = state.num_raw - num_new
    # What is no alarm yet begins with the new data, wherever the last one ended.
    begun = torch.where(state.alarm > 0, state.alarmed, first)
    state = state._replace(alarmed=begun)
    e = state.error[..., state.num_raw - num_new :]
    seen = state.data.narrow(state.num_raw - num_new, num_new).seen
    ours = -0.5 * e.square() - log_scale
    alone = _alone(state, num_new, limits)
    # Of a large batch the last data stand for all.
    alone = torch.cat([ours[..., : num_new - alone.size(-1)], alone], -1)
    falls = can_fall(known.prior.likelihood, state.prior.likelihood)
    gains = gains_of(e, log_scale, alone, is_known, falls)
    surprise = average(0.5 * (e.square() - 1), seen)
    if seen is not None:
        gains = gains.where(seen.unsqueeze(-2), 0)
    sums = state.alarm.unsqueeze(-1) + gains.cumsum(-1)
    low, place = sums.cummin(-1)
    low, place = low[..., -1], place[..., -1]
    restarts = low <= 0
    return Judged(
        torch.where(restarts, sums[..., -1] - low, sums[..., -1]),
        torch.where(restarts, first + place + 1.0, state.alarmed),
        surprise,
    )


def gains_of(
    e: Tensor, log_scale: Tensor, alone: Tensor, is_known: Tensor, falls: Tensor
) -> Tensor:
    """Capped log Bayes factors of new data against the model, ``(*batch, 3, n)``.

    Args:
        e: ``(*batch, n)``, their standardised errors.
        log_scale: ``(*batch, n)``, and the logarithms of their scales.
        alone: ``(*batch, n)``, their log densities without the past.
        is_known: ``(*batch, n)``, whether the past said much about them.
        falls: ``(*batch,)``, whether the noise could be smaller.
    """
    half = 0.5 * e.square()
    gains = [
        (alone + half + log_scale).where(is_known, 0),
        half * (1 - LARGE**-2) - math.log(LARGE),
        # Where the noise cannot be smaller, small errors are no news.
        (-math.log(SMALL) - half * (SMALL**-2 - 1)).where(
            falls.to(e.device).unsqueeze(-1), 0
        ),
    ]
    return torch.stack(gains, -2).clamp(-CAP, CAP)


def gains_of_one(
    e: float, log_scale: float, alone: float, is_known: bool, falls: bool
) -> list[float]:
    """The same for a single datum, as numbers; see :func:`gains_of`."""
    half = 0.5 * e * e
    gains = (
        alone + half + log_scale if is_known else 0.0,
        half * (1 - LARGE**-2) - math.log(LARGE),
        -math.log(SMALL) - half * (SMALL**-2 - 1) if falls else 0.0,
    )
    return [min(max(gain, -CAP), CAP) for gain in gains]


def can_fall(likelihood: Likelihood, present: Likelihood) -> Tensor:
    """Whether a smaller noise could be learned, ``(*batch,)``.

    Args:
        likelihood: That of the model, which says what may be learned.
        present: The same as it is.
    """
    if not isinstance(likelihood, GaussianLikelihood):
        return torch.tensor(False)
    noise = present.noise.squeeze(-1)
    if not likelihood.raw_noise.requires_grad:
        return torch.zeros_like(noise, dtype=torch.bool)
    least = likelihood.noise_covar.raw_noise_constraint.lower_bound
    return noise > CLOSE * least.to(noise)


def _alone(state: State, num_new: int, limits: Limits) -> Tensor:
    """Log densities of new data, up to a constant, from the raw data of the alarm."""
    since = state.alarmed[..., 0].clamp_max(state.num_raw - num_new)
    first = max(int(since.min()), state.num_raw - MANY)
    raw = state.data.narrow(first, state.num_raw - first)
    index = torch.arange(first, state.num_raw, device=since.device)
    weight = (index >= since.unsqueeze(-1)).to(raw.y)
    if raw.weight is not None:
        weight = weight * (raw.weight > 0)
    sites = state.observations(limits.shared_noise)
    sites = GaussianData(
        sites.target[..., first:],
        None if sites.noise is None else sites.noise[..., first:],
        torch.zeros_like(state.sunk),
    )
    mean, kernel, likelihood = state.prior
    now = raw.y.new_tensor(state.counts.arrived)
    scale = state.scale(limits.shared_noise)
    nothing = Predictor(mean, kernel, likelihood, scale, None, now)
    raw = raw._replace(weight=None if bool((weight == 1).all()) else weight)
    factor = nothing.fitted(no_rows(state), raw, sites, state.jitter).factor
    assert factor is not None
    log_diagonal = factor.W.diagonal(dim1=-2, dim2=-1).log()
    density = (log_diagonal - 0.5 * factor.e.square())[..., -num_new:]
    return density.expand(*state.sunk.shape, -1)


def is_alarmed(state: State, options: UpdateOptions, num_new: int) -> Tensor:
    """Streams whose alarm asks for an explanation, ``(*batch,)``.

    Args:
        state: What is known, the new data among the raw ones.
        options: How to learn.
        num_new: The number of new data. One that is gross is looked at by itself.
    """
    loud = (state.alarm > options.price) & (state.num_raw - state.alarmed >= 2)
    result = loud.any(-1)
    if options.leaves_out and num_new:
        newest = state.error[..., state.num_raw - num_new :]
        result = result | (newest.abs() > GROSS).any(-1)
    counts = state.counts
    if counts.question_due and state.num_raw >= counts.question_due:
        result = torch.ones_like(result)
    return result


# -- explanations ---------------------------------------------------------------------


class Explained(NamedTuple):
    """What an alarm led to.

    Attributes:
        state: What is known now.
        fit: Hyperparameters learned on the way.
        forgot: ``(*batch,)``, where the past has ended.
    """

    state: State
    fit: Fit
    forgot: Tensor


def explain(
    state: State,
    known: Known,
    options: UpdateOptions,
    limits: Limits,
    alarmed: Tensor,
) -> Explained:
    """Compare one function, outliers and a new function; take what explains best.

    Args:
        state: What is known, the new data among the raw ones.
        known: What was known before.
        options: How to learn.
        limits: What may be used.
        alarmed: ``(*batch,)``, streams that ask for an explanation.
    """
    since = _since(state, options)
    index = torch.arange(state.num_raw, device=since.device)
    is_new = index >= since.unsqueeze(-1)
    # What was left out since then is asked for again.
    weight = _weights(state)
    back = _left_out(state) & is_new
    every = _with_weight(state, weight.where(~back, 1.0))
    every = every.counted(num_outliers=every.counts.num_outliers - float(back.sum()))
    one, nowhere = learn(every, known, options, limits), torch.zeros_like(alarmed)
    best, out = _without_outliers(every, one, known, options, limits)
    begins = _may_begin(every, one, is_new, options, limits) & alarmed
    if bool(begins.any()):
        fresh = _begin(every, is_new, begins)
        afresh = options.trust_region is None
        new = learn(fresh, known, options, limits, afresh=afresh)
        gain = _gain(every, known, options, limits, is_new, new) - best.score
        harm = _harm(every, is_new, (one, new), limits)
        begins = begins & (torch.minimum(gain, harm) > options.price)
        if bool(begins.any()):
            fresh = _begin(every, is_new, begins)
            count = float(fresh.num_data.max())
            fresh = fresh.counted(started_at=count, since_start=0.0)
            fresh = _young(fresh, begins, known, options, limits)
            return Explained(_asked(fresh, fresh.num_raw), new, begins)
    return Explained(_asked(_left(every, out), int(since.min())), best, nowhere)


def leave_out(
    state: State, fit: Fit, known: Known, options: UpdateOptions, limits: Limits
) -> tuple[State, Fit]:
    """The state without outliers that nobody noticed when they came, and its fit.

    Args:
        state: What is known.
        fit: Hyperparameters learned from it.
        known: What was known before.
        options: How to learn.
        limits: What may be used.
    """
    fit, out = _without_outliers(state, fit, known, options, limits)
    return _left(state, out), fit


def _left(state: State, out: Tensor) -> State:
    """The state without some raw data."""
    if not bool(out.any()):
        return state
    num_out = state.counts.num_outliers + float(out.sum())
    weight = _weights(state).where(~out, 0.0)
    # Whatever it was when it came: that is how they are told from missing readings.
    error = state.error.where(~out, state.error.abs().clamp_min(2 * FAR))
    state = state._replace(error=error).counted(num_outliers=num_out)
    return _with_weight(state, weight)


def _without_outliers(
    state: State,
    one: Fit,
    known: Known,
    options: UpdateOptions,
    limits: Limits,
) -> tuple[Fit, Tensor]:
    """The fit that leaves out data that are far off, if it is better, and which.

    Data may be if they are far from what was predicted when they came, or from what all
    others say of them now.
    """
    weight = _weights(state)
    if not options.leaves_out:
        return one, torch.zeros_like(weight, dtype=torch.bool)
    far = (_far(state) | (_given_others(state, one, limits) > FAR)) & (weight > 0)
    nothing, more = torch.zeros_like(far), far
    if not bool(far.any()):
        return one, nothing
    for _ in range(ROUNDS):
        trial = _with_weight(state, weight.where(~far, 0.0))
        # More than a third of all data are no outliers: they say what is usual.
        if bool((3 * far.sum(-1) > state.num_data).any()):
            return one, nothing
        fit = learn(trial, known, options, limits)
        # Outliers hide each other: without these, others may stand out.
        more = (_given_others(trial, fit, limits) > FAR) & (weight > 0) & ~far
        if not bool(more.any()):
            break
        far = far | more
    fit = fit._replace(score=fit.score + _log_probability_of_outliers(state, far))
    is_better = fit.score > one.score
    if not bool(is_better.any()):
        return one, nothing
    return fit, far & is_better.unsqueeze(-1)


@torch.no_grad()
def _given_others(state: State, fit: Fit, limits: Limits) -> Tensor:
    """How far raw data are from what all others say of them, ``(*batch, k)``.

    Leave-one-out errors in standard deviations: with :math:`\\alpha = W^\\top e` and
    :math:`B^{-1} = W^\\top W` they are :math:`\\alpha_i / \\sqrt{B^{-1}_{ii}}`.
    """
    if state.num_rows > 2 * limits.memory_size:  # a batch that does not fit
        return torch.zeros_like(state.data.y)
    predictor = fitted(adopt(state, fit), limits).predictor
    assert predictor is not None and predictor.factor is not None
    W, e = predictor.factor.W, predictor.factor.e
    errors = fn.matvec(W.mT, e).abs() / fn.squared_norm(W, -2).sqrt()
    return errors[..., errors.size(-1) - state.num_raw :].expand(state.data.y.shape)


@torch.no_grad()
def _may_begin(
    state: State, one: Fit, is_new: Tensor, options: UpdateOptions, limits: Limits
) -> Tensor:
    """Streams in which a new function is worth a closer look, ``(*batch,)``.

    The new data that the past says much about have to be likelier without it,
    hyperparameters integrated out.
    """
    enough = is_new.sum(-1) >= FEWEST
    if not bool(enough.any()):
        return enough
    witness = _some(_witnesses(state, is_new, limits))
    alone = _mixture(state, witness)
    prior = one.objective.prior
    given = _given_past(state, is_new, witness, prior, limits)
    return enough & witness.any(-1) & (alone - given - state.sunk > options.price)


def _since(state: State, options: UpdateOptions) -> Tensor:
    """Raw data before the loudest alarm, ``(*batch,)``, or before an open question."""
    loudest = state.alarm.argmax(-1, keepdim=True)
    since = state.alarmed.gather(-1, loudest).squeeze(-1)
    if not state.counts.question_due:
        return since
    is_loud = (state.alarm > options.price).any(-1)
    question = torch.full_like(since, state.counts.question_at)
    return torch.where(is_loud, since.minimum(question), question)


def _asked(state: State, since: int) -> State:
    """No alarm; the question may be asked again when data have doubled."""
    num_new = state.num_raw - since
    due = since + 2 * num_new if num_new < OPEN else 0
    return state._replace(
        alarm=torch.zeros_like(state.alarm),
        alarmed=torch.full_like(state.alarmed, state.num_raw),
    ).counted(question_at=since, question_due=due)


def _weights(state: State) -> Tensor:
    weight, y = state.data.weight, state.data.y
    return torch.ones_like(y) if weight is None else weight.expand(y.shape)


def _with_weight(state: State, weight: Tensor) -> State:
    """The state with other weights of its raw data."""
    if bool((weight == _weights(state)).all()):
        return state
    data = state.data._replace(weight=weight)
    return state._replace(data=data, predictor=None)


def _only(state: State, weight: Tensor) -> State:
    """The state with other weights, without raw data that no stream counts."""
    index = (weight > 0).reshape(-1, weight.size(-1)).any(0).nonzero().squeeze(-1)
    data, sites = state.data, state.sites

    def taken(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.index_select(-1, index)

    if sites is not None:
        target = sites.target.index_select(-1, index)
        sites = GaussianData(target, taken(sites.noise), sites.offset)
    return state._replace(
        data=Data(
            data.x.index_select(-2, index),
            data.y.index_select(-1, index),
            taken(data.noise),
            weight.index_select(-1, index),
            taken(data.time),
        ),
        sites=sites,
        error=state.error.index_select(-1, index),
        predictor=None,
    )


def _some(chosen: Tensor) -> Tensor:
    """At most so many of the chosen data that all can be looked at, spread evenly."""
    count = chosen.cumsum(-1)
    step = (count[..., -1:] / MANY).clamp_min(1)
    return chosen & ((count / step).floor() > ((count - 1) / step).floor())


def _young(
    state: State, begins: Tensor, known: Known, options: UpdateOptions, limits: Limits
) -> State:
    """The state with streams that begin anew as young ones."""
    if not (options.integrates and limits.shared_noise):
        return state
    grid = young.grid_of(known.prior, known.start)
    if grid is None or state.num_rows > young.LARGEST:
        return state
    return state._replace(grid=grid, odds=torch.where(begins, -TRUSTED, state.odds))


def _far(state: State) -> Tensor:
    """Raw data that may be outliers, ``(*batch, k)``."""
    return state.error.abs() > FAR


def _left_out(state: State) -> Tensor:
    """Raw data that were left out as outliers, ``(*batch, k)``."""
    return _far(state) & (_weights(state) == 0)


def _log_probability_of_outliers(state: State, far: Tensor) -> Tensor:
    """Log probability of some raw data as outliers, ``(*batch,)``.

    A run of them begins at one datum in a hundred and goes on with nine in ten. Their
    values are noise about the level of the others, of a variance that is integrated
    out: an inverse gamma variable of three times their standard deviation.
    """
    y, usual = state.data.y, ((_weights(state) > 0) & ~far).to(state.data.y)
    count = usual.sum(-1).clamp_min(1)
    level = (usual * y).sum(-1) / count
    r = y - level.unsqueeze(-1)
    spread = (usual * r.square()).sum(-1) / count
    b_0 = 0.5 * WIDE**2 * torch.where(spread > 0, spread, 1.0)
    num_far = far.sum(-1)
    b = b_0 + 0.5 * (r.square() * far).sum(-1)
    a = 0.5 * (1 + num_far)
    values = torch.lgamma(a) - math.lgamma(0.5) + 0.5 * b_0.log() - a * b.log()
    num_follow = (far[..., 1:] & far[..., :-1]).sum(-1)
    places = (num_far - num_follow) * math.log(SHARE) + num_follow * math.log(STAYS)
    return values - 0.5 * num_far * fn.LOG_2PI + places


def _mixture(state: State, chosen: Tensor) -> Tensor:
    """Evidence of some raw data as a new function, ``(*batch,)``."""
    first = int((~chosen).to(torch.uint8).cumprod(-1).sum(-1).min())
    if first == state.num_raw:
        return torch.zeros_like(state.sunk)
    data = state.data.narrow(first, state.num_raw - first)
    weight = (_weights(state) * chosen)[..., first:]
    x = data.x.expand(*data.y.shape, -1)
    kernel, grid = young.any_function(x.size(-1))
    mixture = young.mix(state.prior.mean, kernel.to(x), grid, x, data.y, weight)
    return mixture.evidence


def _gain(
    state: State,
    known: Known,
    options: UpdateOptions,
    limits: Limits,
    is_new: Tensor,
    new: Fit,
) -> Tensor:
    """Evidence of a past that ended and of a new function, ``(*batch,)``.

    A mixture knows no limits of hyperparameters; the model does.
    """
    old = _with_weight(state, _weights(state).where(~is_new, 0.0))
    past = torch.zeros_like(state.sunk)
    if bool((old.num_data > 0).any()):
        past = learn(old, known, options, limits).score
    if int(is_new.sum(-1).max()) > MANY:
        return past + new.score
    return past + torch.minimum(_mixture(state, is_new), new.score)


def _witnesses(state: State, is_new: Tensor, limits: Limits) -> Tensor:
    """New data that the past says much about, ``(*batch, k)``.

    Of others it knows nothing, and they cannot tell that it ended: hyperparameters may
    have changed, but no function.
    """
    old = _with_weight(state, _weights(state).where(~is_new, 0.0))
    past = fitted(old, limits).predictor
    assert past is not None
    _, variance = past.moments(state.data.x)
    prior = past.form.variances(past.with_time(state.data.x))
    noise = state.observations(limits.shared_noise).noise
    noise = past.s.unsqueeze(-1) if noise is None else noise
    return is_new & (variance < KNOWN * prior.maximum(noise)) & (_weights(state) > 0)


def _given_past(
    state: State, is_new: Tensor, witness: Tensor, prior: Prior, limits: Limits
) -> Tensor:
    """Log density of witnesses given the past, ``(*batch,)``."""
    weight = _weights(state)
    old = _only(state, weight.where(~is_new, 0.0))
    told = _only(state, weight.where(witness | ~is_new, 0.0))
    together, past = (
        exact(make_objective(each, limits, prior)) for each in (told, old)
    )
    return together - past


@torch.no_grad()
def _harm(
    state: State, is_new: Tensor, fits: tuple[Fit, Fit], limits: Limits
) -> Tensor:
    r"""Nats by which the past makes witnesses less probable, ``(*batch,)``.

    .. math:: \log p(y \mid \theta') - \max_\theta \log p(y \mid past, \theta)

    What compressions have lost is taken off: so much the past may be wrong because it
    is blurred.

    Args:
        state: The past and the new data.
        is_new: ``(*batch, k)``, which raw data are new.
        fits: Hyperparameters of one function, and of the new data alone.
        limits: The form of the rows.
    """
    witness = _some(_witnesses(state, is_new, limits))
    priors = [fit.objective.prior for fit in fits]
    given = [_given_past(state, is_new, witness, prior, limits) for prior in priors]
    alone = _only(state, _weights(state).where(witness, 0.0))
    alone = alone._replace(rows=no_rows(state), sunk=torch.zeros_like(state.sunk))
    evidence = exact(make_objective(alone, limits, priors[1]))
    return evidence - torch.stack(given).amax(0) - state.sunk


def _begin(state: State, is_new: Tensor, begins: Tensor) -> State:
    """Forget what came before, in the streams that begin anew."""
    old = ~is_new & begins.unsqueeze(-1)
    weight = _weights(state).where(~old, 0.0)
    rows = state.rows
    if bool(begins.all()):
        first = int((~is_new).to(torch.uint8).sum(-1).min())
        count = state.num_raw - first
        weight = weight[..., first:]
        sites = state.sites
        if sites is not None:
            assert sites.noise is not None
            sites = GaussianData(
                sites.target[..., first:], sites.noise[..., first:], 0 * sites.offset
            )
        data = state.data.narrow(first, count)._replace(weight=weight)
        state = state._replace(
            rows=no_rows(state),
            data=data,
            sites=sites,
            error=state.error[..., first:],
            base=None,
        ).counted(question_at=0.0, question_due=0.0)
    else:
        past = rows.past
        keep = (~begins).to(past.g)
        past = PseudoObservations(
            past.U * keep[..., None, None],
            past.g * keep.unsqueeze(-1),
            past.rho * keep,
            past.n * keep,
        )
        data = state.data._replace(weight=weight)
        state = state._replace(rows=Rows(rows.points, past, rows.time), data=data)
    if bool((weight == 1).all()):
        state = state._replace(data=state.data._replace(weight=None))
    sunk = torch.where(begins, 0.0, state.sunk)
    rate = state.rate if state.rate is None else torch.where(begins, 0.0, state.rate)
    return state._replace(sunk=sunk, rate=rate, predictor=None)

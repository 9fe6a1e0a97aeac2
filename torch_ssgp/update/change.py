r"""Change: alarms, and three explanations among which the evidence decides.

An alarm is a sum of log Bayes factors of new data against the model (Page's test): it
starts over when it falls below zero, and no datum counts for more than ``CAP`` nats.
There are three kinds of alternatives:

    the past is no help      the prior predicts better
    errors are too large     their standard deviation is three times what it should be
    errors are too small     it is a tenth of it

An alarm decides nothing. It makes the model learn, and the evidence compares

    one function             for all data
    outliers                 the same, but data that are far off are left out, each at a
                             price
    a new function           the past ended: new data are more probable without it

What is undecided is asked again when the data since then have doubled.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import likelihoods
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.memory import TRUSTED, Data, GaussianData, Rows
from torch_ssgp.prediction import Predictor
from torch_ssgp.update import young
from torch_ssgp.update.learn import (
    ODDS,
    Fit,
    adopt,
    choose_fit,
    exact,
    learn,
    with_rate,
)
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
GROSS = 6.0  # standard deviations at which one datum is an alarm
FAR = 4.0  # standard deviations at which a datum may be an outlier
ROUNDS = 3  # of looking for outliers behind outliers
SHARE, STAYS = 0.01, 0.9  # of data at which outliers begin; how likely a run goes on
WIDE = 3.0  # standard deviation of outliers, in units of that of the targets
MANY = 200  # data that stand for all in a comparison
OPEN = 60  # data after which a question is no longer asked again


# -- alarms ---------------------------------------------------------------------------


class News(NamedTuple):
    """New data as the model saw them coming, ``(*batch, n)`` each.

    Attributes:
        log_prob: Log densities given all before, up to a constant.
        vague: The same without any past.
        surprise: Nats by which they are below what was expected.
        is_known: Whether the past said much about them: of others it knew nothing, and
            they cannot tell that it ended.
        error: Standardised errors; zeros where the likelihood is not Gaussian.
    """

    log_prob: Tensor
    vague: Tensor
    surprise: Tensor
    is_known: Tensor
    error: Tensor


def news_of(
    e: Tensor, scale: Tensor, left: Tensor, k: Tensor, s: Tensor, r: Tensor
) -> News:
    """Those of Gaussian data, ``(*batch, n)`` each.

    They have standardised errors ``e`` in units of ``scale``, prior variances ``k`` of
    which the past has ``left`` some, noise ``s``, and errors ``r`` of the prior mean.
    """
    half = 0.5 * e.square()
    vague = -0.5 * (r.square() / (k + s) + (k + s).log())
    values = (-half - scale.log(), vague, half - 0.5, left < KNOWN * k.maximum(s), e)
    return News(*(value.expand(e.shape) for value in values))


def news_of_sites(old: Predictor, new: Data) -> News:
    """Those of data with any likelihood, given the past, and not one another."""
    likelihood, y, k = old.likelihood, new.y, old.form.variances(old.with_time(new.x))
    mean, variance, prior_mean, k = (
        t.expand(y.shape) for t in (*old.moments(new.x), old.mean(new.x), k)
    )
    log_prob = likelihoods.log_predictive(likelihood, y, mean, variance)
    expected = likelihoods.expected_log_predictive(likelihood, y, mean, variance)
    is_known, is_coupled = variance < KNOWN * k, likelihoods.couples_classes(likelihood)
    if is_coupled:  # classes share their data
        log_prob, expected = (
            t.sum(-2, keepdim=True).expand(y.shape) for t in (log_prob, expected)
        )
        is_known = is_known.all(-2, keepdim=True).expand(y.shape)
    if likelihoods.takes_labels(likelihood):  # without a past they are a guess
        vague = torch.full_like(y, -math.log(y.size(-2) if is_coupled else 2))
    else:
        vague = likelihoods.log_predictive(likelihood, y, prior_mean, k)
    return News(log_prob, vague, expected - log_prob, is_known, torch.zeros_like(y))


def judge(state: State, known: Known, news: News) -> State:
    """The state with new data in its alarms."""
    num_new = news.error.size(-1)
    first = state.num_raw - num_new
    new = state.data.narrow(first, num_new)
    if likelihoods.takes_labels(state.prior.likelihood):
        # The past could not know of a class that it had not seen.
        low, high = known.memory.extremes.to(new.y).unsqueeze(-1).unbind(-2)
        is_old = (new.y >= low) & (new.y <= high)
        news = news._replace(is_known=news.is_known & is_old)
    # What is no alarm yet begins with the new data, wherever the last one ended.
    begun = torch.where(state.alarm > 0, state.alarmed, first)
    falls = can_fall(known.prior.likelihood, state.prior.likelihood)
    gains = gains_of(news, falls & (state.sites is None))
    if new.seen is not None:
        gains = gains.where(new.seen.unsqueeze(-2), 0)
    sums = state.alarm.unsqueeze(-1) + gains.cumsum(-1)
    low, place = (each[..., -1] for each in sums.cummin(-1))
    restarts = low <= 0
    return state._replace(
        alarm=torch.where(restarts, sums[..., -1] - low, sums[..., -1]),
        alarmed=torch.where(restarts, first + place + 1.0, begun),
    )


def gains_of(news: News, falls: Tensor) -> Tensor:
    """Capped log Bayes factors of new data against the model, ``(*batch, 3, n)``."""
    half = 0.5 * news.error.square()
    small = -math.log(SMALL) - half * (SMALL**-2 - 1)
    gains = [
        (news.vague - news.log_prob).where(news.is_known, 0),
        half * (1 - LARGE**-2) - math.log(LARGE),
        # Where the noise cannot be smaller, small errors are no news.
        small.where(falls.to(half.device).unsqueeze(-1), 0),
    ]
    return torch.stack(gains, -2).clamp(-CAP, CAP)


def gains_of_one(
    e: float, log_scale: float, vague: float, is_known: bool, falls: bool
) -> list[float]:
    """The same for a single datum, as numbers; see :func:`gains_of`."""
    half = 0.5 * e * e
    gains = (
        vague + half + log_scale if is_known else 0.0,
        half * (1 - LARGE**-2) - math.log(LARGE),
        -math.log(SMALL) - half * (SMALL**-2 - 1) if falls else 0.0,
    )
    return [min(max(gain, -CAP), CAP) for gain in gains]


def can_fall(likelihood: Likelihood, present: Likelihood) -> Tensor:
    """Whether a smaller noise could be learned, ``(*batch,)``."""
    if not isinstance(likelihood, GaussianLikelihood):
        return torch.tensor(False)
    noise = present.noise.squeeze(-1)
    if not likelihood.raw_noise.requires_grad:
        return torch.zeros_like(noise, dtype=torch.bool)
    least = likelihood.noise_covar.raw_noise_constraint.lower_bound
    return noise > CLOSE * least.to(noise)


def is_alarmed(state: State, options: UpdateOptions, num_new: int) -> Tensor:
    """Streams whose alarm asks for an explanation, ``(*batch,)``."""
    loud = (state.alarm > options.price) & (state.num_raw - state.alarmed >= 2)
    result = loud.any(-1)
    if num_new and state.sites is None:
        newest = state.error[..., state.num_raw - num_new :]
        result = result | (newest.abs() > GROSS).any(-1)
    due = state.counts.question_due
    return result | bool(due and state.num_raw >= due)


# -- explanations ---------------------------------------------------------------------


class Explained(NamedTuple):
    """What an alarm led to."""

    state: State  # what is known now
    fit: Fit  # hyperparameters learned on the way
    forgot: Tensor  # (*batch,), where the past has ended


class Setting(NamedTuple):
    """What all explanations share."""

    known: Known
    options: UpdateOptions
    limits: Limits

    def learn(self, state: State, afresh: bool = False) -> Fit:
        """Hyperparameters learned from a state."""
        return learn(state, self.known, self.options, self.limits, afresh=afresh)


def explain(
    state: State,
    known: Known,
    options: UpdateOptions,
    limits: Limits,
    alarmed: Tensor,
) -> Explained:
    """Compare one function, outliers and a new function; take what explains best."""
    on, since = Setting(known, options, limits), _since(state, options)
    is_new = torch.arange(state.num_raw, device=since.device) >= since.unsqueeze(-1)
    # What was left out since then is asked for again.
    weight = _weights(state)
    back = is_new & (weight == 0) & (state.error.abs() > FAR)
    state = _weighted(state, weight.where(~back, 1.0))
    state = state.counted(num_outliers=state.counts.num_outliers - float(back.sum()))
    best, out = _without_outliers(state, on.learn(state), on)
    if options.forgets_by_evidence:
        best = with_rate(best, _left(state, out), known, options, limits)
    begins, new = _compare(state, is_new, best, out, alarmed, on)
    state = _left(state, out & ~begins.unsqueeze(-1))
    if new is None or not bool(begins.any()):
        return Explained(_asked(state, int(since.min())), best, begins)
    state = _begin(state, is_new, begins)
    count = float(state.num_data.max())
    state = _asked(state, state.num_raw).counted(started_at=count, since_start=0.0)
    if not bool(begins.all()):
        prior = choose_fit(best, new, begins).objective.prior
        new = new._replace(objective=make_objective(state, limits, prior))
    return Explained(_young(state, begins, on), new, begins)


def leave_out(
    state: State, fit: Fit, known: Known, options: UpdateOptions, limits: Limits
) -> tuple[State, Fit]:
    """The state without outliers that nobody noticed when they came, and its fit."""
    fit, out = _without_outliers(state, fit, Setting(known, options, limits))
    return _left(state, out), fit


def _since(state: State, options: UpdateOptions) -> Tensor:
    """Raw data before the loudest alarm, ``(*batch,)``, or before an open question."""
    loudest = state.alarm.argmax(-1, keepdim=True)
    since = state.alarmed.gather(-1, loudest).squeeze(-1)
    if not state.counts.question_due:
        return since
    is_loud = (state.alarm > options.price).any(-1)
    question = torch.full_like(since, state.counts.question_at)
    return torch.where(is_loud, since, question)


def _asked(state: State, since: int) -> State:
    """No alarm; the question may be asked again when data have doubled."""
    num_new = state.num_raw - since
    due = since + 2 * num_new if num_new < OPEN else 0
    return state._replace(
        alarm=torch.zeros_like(state.alarm),
        alarmed=torch.full_like(state.alarmed, state.num_raw),
    ).counted(question_at=since, question_due=due)


# -- outliers -------------------------------------------------------------------------


def _left(state: State, out: Tensor) -> State:
    """The state without some raw data."""
    if not bool(out.any()):
        return state
    num_out = state.counts.num_outliers + float(out.sum())
    # Whatever it was when it came: that is how they are told from missing readings.
    error = state.error.where(~out, state.error.abs().clamp_min(2 * FAR))
    state = state._replace(error=error).counted(num_outliers=num_out)
    return _weighted(state, _weights(state).where(~out, 0.0))


def _without_outliers(state: State, one: Fit, on: Setting) -> tuple[Fit, Tensor]:
    """The fit that leaves out data that are far off, if it is better, and which.

    Data may be if they are far from what was predicted when they came, or from what all
    others say of them now.
    """
    weight = _weights(state)
    usable, nowhere = weight > 0, torch.zeros_like(weight, dtype=torch.bool)
    if not on.options.leaves_out or state.sites is not None:
        return one, nowhere
    far = (state.error.abs() > FAR) | (_given_others(state, one, on.limits) > FAR)
    far, out, fit = far & usable, nowhere, one
    for _ in range(ROUNDS):
        # More than a third of all data are no outliers: they say what is usual.
        if bool((3 * far.sum(-1) > state.num_data).any()) or not bool(far.any()):
            return one, nowhere
        out, trial = far, _weighted(state, weight.where(~far, 0.0))
        fit = on.learn(trial)
        # Outliers hide each other, and make others look like outliers.
        far = (_given_others(trial, fit, on.limits) > FAR) & usable
        if torch.equal(far, out):
            break
    fit = fit._replace(score=fit.score + _log_probability_of_outliers(state, out))
    is_better = fit.score > one.score
    return choose_fit(one, fit, is_better), out & is_better.unsqueeze(-1)


@torch.no_grad()
def _given_others(state: State, fit: Fit, limits: Limits) -> Tensor:
    """How far raw data are from what all others say of them, ``(*batch, k)``.

    Leave-one-out errors in standard deviations: with :math:`\\alpha = W^\\top e` and
    :math:`B^{-1} = W^\\top W` they are :math:`\\alpha_i / \\sqrt{B^{-1}_{ii}}`.
    """
    y = state.data.y
    if state.num_rows > 2 * limits.memory_size:  # a batch that does not fit
        return torch.zeros_like(y)
    predictor = fitted(adopt(state, fit)._replace(grid=None), limits).predictor
    assert predictor is not None and predictor.factor is not None
    W, e = predictor.factor.W, predictor.factor.e
    errors = fn.matvec(W.mT, e).abs() / fn.squared_norm(W, -2).sqrt()
    errors = errors[..., errors.size(-1) - state.num_raw :].expand(y.shape)
    if state.data.weight is None:
        return errors
    mean, variance = predictor.moments(state.data.x)  # of those left out
    noise = state.observations(limits.shared_noise).noise
    s = predictor.s.unsqueeze(-1) if noise is None else noise
    return errors.where(state.data.weight > 0, (y - mean).abs() / (variance + s).sqrt())


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


# -- a new function -------------------------------------------------------------------


def _compare(
    state: State, is_new: Tensor, best: Fit, out: Tensor, alarmed: Tensor, on: Setting
) -> tuple[Tensor, Fit | None]:
    r"""Streams in which a new function wins, ``(*batch,)``, and the fit of new data.

    .. math:: \log p(w) - \max_\theta \log p(w \mid past, \theta) > \log(1 / odds)

    for the new data w that the past says much about. Without the past, hyperparameters
    are integrated out: those that are learned can explain any few data. What
    compressions have lost of a datum is taken off for each: so much the past may be
    wrong because it is blurred.
    """
    nowhere = torch.zeros_like(alarmed)
    if not on.options.forgets_by_evidence:
        return nowhere, None
    with torch.no_grad():
        witness = _some(_witnesses(state, is_new, on.limits))
    enough = alarmed & (is_new.sum(-1) >= FEWEST) & witness.any(-1)
    if not bool(enough.any()):
        return nowhere, None
    lost = state.sunk / state.rows.past.n.clamp_min(1) * witness.sum(-1)
    price = on.options.price + lost
    rate, usual = best.objective.rate, witness & ~out
    extra = _log_probability_of_outliers(state, witness & out)
    if rate is not None and state.rate is None:
        extra = extra - ODDS * (rate > 0)  # a drift has its price as well
    state = state._replace(rate=None if rate is None else rate.detach())
    alone = _integrated(state, witness, on)
    given = _given_past(state, is_new, usual, best.objective.prior, on) + extra
    enough = enough & (_joint(alone - given, best) > price)
    if not bool(enough.any()):
        return nowhere, None
    fresh = _begin(state, is_new, enough)
    fit = on.learn(fresh, afresh=on.options.trust_region is None)
    if state.sites is None:
        # A mixture knows no limits of hyperparameters; the model does. And if these
        # alone have changed, the past still says what the function is.
        prior = fit.objective.prior
        alone = alone.minimum(_evidence(_alone_in(state, witness), prior, on))
        given = given.maximum(_given_past(state, is_new, witness, prior, on))
    return enough & (_joint(alone - given, best) > price), fit


def _joint(value: Tensor, fit: Fit) -> Tensor:
    """The sum over classes that share their data, ``(*batch,)``; else the value."""
    if not fit.objective.coupled:
        return value
    return value.sum(-1, keepdim=True).expand(value.shape)


@torch.no_grad()
def _integrated(state: State, chosen: Tensor, on: Setting) -> Tensor:
    """Evidence of some raw data as a new function, ``(*batch,)``.

    Hyperparameters are integrated out; with sites they are those of before. Labels are
    a guess: some constant explains those that all agree, and they may come so.
    """
    alone, likelihood = _alone_in(state, chosen), state.prior.likelihood
    if likelihoods.takes_labels(likelihood):
        count = chosen.sum(-1)
        if not likelihoods.couples_classes(likelihood):
            return -math.log(2) * count
        num_classes = chosen.size(-2)
        return -math.log(num_classes) / num_classes * count  # the share of each
    if state.sites is not None:
        return _evidence(alone, state.prior, on)
    x, y = alone.data.x, alone.data.y
    kernel, grid = young.any_function(x.size(-1))
    x, kernel = x.expand(*y.shape, -1), kernel.to(x)
    return young.mix(state.prior.mean, kernel, grid, x, y, alone.data.weight).evidence


@torch.no_grad()
def _evidence(state: State, prior: Prior, on: Setting) -> Tensor:
    """Evidence of all rows, ``(*batch,)``."""
    return exact(make_objective(state, on.limits, prior))


def _given_past(
    state: State, is_new: Tensor, new: Tensor, prior: Prior, on: Setting
) -> Tensor:
    """Log density of some new data given the past, ``(*batch,)``."""
    weight = _weights(state)
    told, old = (
        _evidence(_only(state, weight.where(some, 0.0)), prior, on)
        for some in (new | ~is_new, ~is_new)
    )
    return told - old


@torch.no_grad()
def _witnesses(state: State, is_new: Tensor, limits: Limits) -> Tensor:
    """New data that the past says much about, ``(*batch, k)``.

    Of others it knows nothing, and they cannot tell that it ended: hyperparameters may
    have changed, but no function.
    """
    old = _weighted(state, _weights(state).where(~is_new, 0.0))
    past = fitted(old._replace(grid=None), limits).predictor
    assert past is not None
    _, variance = past.moments(state.data.x)
    prior = past.form.variances(past.with_time(state.data.x))
    if state.sites is None:
        noise = state.observations(limits.shared_noise).noise
        prior = prior.maximum(past.s.unsqueeze(-1) if noise is None else noise)
    result = is_new & (variance < KNOWN * prior) & (_weights(state) > 0)
    result = result & _first_of_copies(state.data.x, is_new)
    if likelihoods.couples_classes(state.prior.likelihood):
        result = result.all(-2, keepdim=True).expand(result.shape)
    return result


def _first_of_copies(x: Tensor, chosen: Tensor) -> Tensor:
    """The chosen data whose input no chosen one before has: copies say no more."""
    _, copy_of = x.movedim(-2, 0).flatten(1).unique(dim=0, return_inverse=True)
    copy_of, count = copy_of.expand(chosen.shape), chosen.size(-1)
    index = torch.arange(count, device=x.device).expand(chosen.shape)
    place = index.where(chosen, count)
    first = torch.full_like(place, count).scatter_reduce(-1, copy_of, place, "amin")
    return first.gather(-1, copy_of) == index


def _some(chosen: Tensor) -> Tensor:
    """At most so many of the chosen data that all can be looked at, spread evenly."""
    count = chosen.cumsum(-1)
    step = (count[..., -1:] / MANY).clamp_min(1)
    return chosen & ((count / step).floor() > ((count - 1) / step).floor())


# -- states ---------------------------------------------------------------------------


def _weights(state: State) -> Tensor:
    weight, y = state.data.weight, state.data.y
    return torch.ones_like(y) if weight is None else weight.expand(y.shape)


def _weighted(state: State, weight: Tensor) -> State:
    """The state with other weights of its raw data."""
    if bool((weight == _weights(state)).all()):
        return state
    data = state.data._replace(weight=None if bool((weight == 1).all()) else weight)
    return state._replace(data=data, predictor=None)


def _only(state: State, weight: Tensor) -> State:
    """The state with other weights, without raw data that no stream counts."""
    index = (weight > 0).reshape(-1, weight.size(-1)).any(0).nonzero().squeeze(-1)
    state = _weighted(state, weight)

    def taken(value: Tensor | None, dim: int = -1) -> Tensor | None:
        return None if value is None else value.index_select(dim, index)

    x, *others = state.data
    data = Data(taken(x, -2), *map(taken, others))  # type: ignore[arg-type]
    sites = state.sites
    if sites is not None:
        target = sites.target.index_select(-1, index)
        sites = GaussianData(target, taken(sites.noise), 0 * sites.offset)
    error = state.error.index_select(-1, index)
    return state._replace(data=data, sites=sites, error=error, predictor=None)


def _alone_in(state: State, chosen: Tensor) -> State:
    """Some raw data, and nothing else."""
    alone = _only(state, _weights(state).where(chosen, 0.0))
    return alone._replace(rows=no_rows(state), sunk=0 * state.sunk, rate=None)


def _begin(state: State, is_new: Tensor, begins: Tensor) -> State:
    """Forget what came before, in the streams that begin anew."""
    keep = is_new | ~begins.unsqueeze(-1)
    weight = _weights(state).where(keep, 0.0)
    if bool(begins.all()):
        return _alone_in(state, keep)._replace(base=None).counted(question_due=0.0)
    points, past, time = state.rows
    stays = (~begins).to(past.g)
    past = PseudoObservations(
        past.U * stays[..., None, None],
        past.g * stays.unsqueeze(-1),
        past.rho * stays,
        past.n * stays,
    )
    rate = None if state.rate is None else state.rate * stays
    state = state._replace(
        rows=Rows(points, past, time),
        sunk=state.sunk * stays,
        rate=rate,
        predictor=None,
    )
    return _weighted(state, weight)


def _young(state: State, begins: Tensor, on: Setting) -> State:
    """The state with streams that begin anew as young ones."""
    if not (on.options.integrates and on.limits.shared_noise):
        return state
    grid = young.grid_of(on.known.prior, on.known.start)
    if grid is None or state.num_rows > young.LARGEST:
        return state
    return state._replace(grid=grid, odds=torch.where(begins, -TRUSTED, state.odds))

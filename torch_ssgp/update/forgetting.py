r"""How much of the past to keep: the evidence of the new data decides.

Before anything is learned, new data are predicted from the past raised to each of a few
powers :math:`\lambda`, from 1 (nothing changed) to 0 (begin anew), in closed form. What
:math:`\lambda` gains over 1 on each datum,

.. math:: \delta_i(\lambda) = \log p(y_i \mid y_{<i}, past^\lambda)
    - \log p(y_i \mid y_{<i}, past),

is summed over updates, and the sum starts again when it falls below zero: Page's test,
one for each power. A sum above the log-odds against a change per update is an alarm.
Old evidence fades with every datum, or that of a young model would last.

What does not count as evidence:

- ``SLACK`` nats of every datum. No model is right in all details, so a past of less
  weight predicts real data a little better even if nothing changes.
- More than ``OUTLIER`` nats of one datum, less than an alarm takes: a change needs more
  than one witness. For a drift, errors beyond those that are as improbable.
- A datum about which the past says little, as in a new range of inputs. It cannot
  contradict the past, except by its scale.
- A time axis that arrives in pieces of more data than there are inducing points. It is
  a map, filled in piece by piece, and wants its whole range. With smaller pieces it may
  outgrow the model, see ``clock.py``.
- Labels, until all classes have come since the doubt began.
- A batch that arrives twice. Its outliers would confirm themselves, and its noise would
  be zero.

Data that are far too good to be true are evidence too, although no power of the past
explains them: if the scale of a stream falls by orders of magnitude, later data hide
in what used to be noise. Errors of a tenth of their expected size are therefore a
hypothesis of their own.

A model at the edge of what it has seen may be overconfident, which looks like a change.
So an alarm alone discards nothing. Both explanations are learned, one function for all
data and a new one for the new data, and their evidence decides (see ``trial.py``). If
the first wins, a power of the past may still predict better with what was learned: the
stream drifts. Powers near 1 need no such trial. What a stream that drifts keeps is
limited from then on (see ``drift.py``). Evidence for less is then judged as between
equals: it has to be likelier than not.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import likelihoods
from torch_ssgp.compression import first_of_each
from torch_ssgp.exceptions import Breakdown, breakdowns
from torch_ssgp.memory import Data
from torch_ssgp.modules import (
    form_of,
    least_noise,
    observation_noise,
)
from torch_ssgp.points import evenly
from torch_ssgp.summary import PosteriorSummary
from torch_ssgp.update.appending import Recalled, recall_at
from torch_ssgp.update.clock import Clock, outgrown
from torch_ssgp.update.drift import Drift
from torch_ssgp.update.objective import Prior
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.state import Known, Limits
from torch_ssgp.update.witnesses import bears_witness, has_all_classes

POWERS = (0.0, 0.05, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
SLACK = 0.05  # nats per datum by which a model that is not quite right may lose
QUIET = 0.1  # size of errors, in units of that expected, that speaks for a change
ANEW = 0.5  # powers below it stand for a beginning, not for a drift
OUTLIER = 4.6  # nats by which one datum may speak for a change: one in a hundred
WITNESS = 2.3  # nats of doubt that make data part of what may have begun
MAX_DATA = 256  # new data that are looked at, evenly spread over the batch
SURPRISING = 4.0  # standard deviations of the misfit that call for learning
FOLLOWED = 0.5  # share of the variance of new data that is known where one follows
FADING = 0.99  # what a new datum leaves of old evidence
LIKELY = math.log(2)  # nats for a drift that make it go on: it is likelier than not


class Judgement(NamedTuple):
    """What new data say about the past.

    Attributes:
        gain: ``(*batch, q)``, nats by which each of ``POWERS`` predicts them better
            than the past as it is; last, those by which ``QUIET`` errors do.
        capped: ``(*batch, q)``, the same, no datum counting for more than ``OUTLIER``,
            and for a drift no error for more than that.
        surprise: ``(*batch,)``, nats per datum by which the data are less probable
            than the model expected.
        is_surprising: ``(*batch,)``, whether that is more than chance.
        is_refuted: ``(*batch,)``, the same of data about which the past says much.
        explained: ``(*batch,)``, share of their prior variance that was known before;
            zero for a stream without a reading.
        num_followed: ``(*batch,)``, data about which the past says much.
        num_old: ``(*batch,)``, data of the past.
        num_new: ``(*batch,)``, new data.
        leaves_enough: ``(*batch, q)``, which powers leave more data than there are
            hyperparameters: else nothing could be learned.
    """

    gain: Tensor
    capped: Tensor
    surprise: Tensor
    is_surprising: Tensor
    is_refuted: Tensor
    explained: Tensor
    num_followed: Tensor
    num_old: Tensor
    num_new: Tensor
    leaves_enough: Tensor

    @property
    def convincing(self) -> Tensor:
        """``(*batch, q)``, of ``capped`` what a model not quite right leaves."""
        return self.capped - SLACK * self.num_followed.unsqueeze(-1)

    @property
    def is_helped(self) -> Tensor:
        """``(*batch,)``, whether the past predicts better than nothing at all."""
        return self.is_followed & (self.gain[..., 0] < 0)

    @property
    def is_followed(self) -> Tensor:
        """``(*batch,)``, whether the past says much about the data.

        Where it says little, as in a new range of inputs, nothing contradicts it.
        """
        return self.explained > FOLLOWED


@torch.no_grad()
@breakdowns(ValueError)
def judge(
    prior: Prior,
    summary: PosteriorSummary,
    data: Data,
    jitter: float,
    powers_tried: tuple[float, ...] = POWERS,
    recalled: Recalled | None = None,
) -> Judgement | None:
    """Predict new data from the past, raised to each of a few powers.

    Args:
        prior: Frozen modules in the dtype of the algebra.
        summary: The posterior at the inducing points.
        data: New data.
        jitter: Relative jitter.
        powers_tried: The powers, 1 last.
        recalled: What :func:`~torch_ssgp.update.appending.recall_at` found for them.

    Returns:
        ``None`` if there is no past, or no new data.
    """
    if summary.is_empty or data.y.size(-1) == 0:
        return None
    form, seen = form_of(prior.kernel), data.seen
    recalled = recalled or recall_at(summary, prior.mean, form, data.x, jitter)
    _, rows, A_f, k_ff, m_f, _, _ = recalled
    num_new = data.num_data
    if data.y.size(-1) > 1:
        keep, _ = first_of_each(data.x)  # copies of an input are one witness
        keep = keep[evenly(keep.unsqueeze(-1), min(MAX_DATA, len(keep)))]
        noise = None if data.noise is None else data.noise[..., keep]
        seen = None if seen is None else seen[..., keep]
        data = Data(data.x[..., keep, :], data.y[..., keep], noise)
        A_f, k_ff, m_f = (t[..., keep] for t in (A_f, k_ff, m_f))
    y, gaussian = data.y, likelihoods.is_gaussian(prior.likelihood)
    s = torch.ones_like(rows.rho)
    if bool(summary.shared_noise):
        s = prior.likelihood.noise.squeeze(-1).expand(rows.rho.shape)
    scale = s[..., None, None]
    known = rows.A @ rows.A.mT / scale
    if not bool(torch.isfinite(known).all()):
        raise Breakdown("the posterior is not finite")
    # known = Q E Qᵀ, so that of all powers D = I + λ known = Q (I + λ E) Qᵀ.
    E, Q = torch.linalg.eigh(known)
    powers = torch.tensor(powers_tried, dtype=y.dtype, device=y.device).unsqueeze(-1)
    D = 1 + powers * E.clamp_min(0).unsqueeze(-2)  # (*batch, q, m)
    h = (Q.mT @ (rows.A @ rows.r.unsqueeze(-1) / scale)).mT
    QA_f = Q.mT @ A_f
    B = QA_f.unsqueeze(-3) / D.sqrt().unsqueeze(-1)  # (*batch, q, m, n)
    mean = m_f.unsqueeze(-2) + (powers * h / D) @ QA_f  # (*batch, q, n)
    k_ff = k_ff.unsqueeze(-2)
    known_before = fn.squared_norm(A_f, -2).unsqueeze(-2)
    variance = k_ff - known_before + fn.squared_norm(B, -2)
    if gaussian:
        sigma2 = observation_noise(prior.likelihood, data.noise).expand(y.shape)
        # (*batch, q, n, n); no datum is used to predict itself or those before it.
        C = B.mT @ B
        if y.size(-1) > 1:
            C = C + (form.gram(data.x, data.x) - A_f.mT @ A_f).unsqueeze(-3)
        diagonal = variance.clamp_min(0) + sigma2.unsqueeze(-2)
        if seen is not None:  # what is missing is known, and correlated with nothing
            both = seen.unsqueeze(-1) & seen.unsqueeze(-2)
            C = C.where(both.unsqueeze(-3), 0)
            diagonal = diagonal.where(seen.unsqueeze(-2), 1)
            mean = mean.where(seen.unsqueeze(-2), y.unsqueeze(-2))
        L_C = fn.cholesky(torch.diagonal_scatter(C, diagonal, dim1=-2, dim2=-1))
        error = (y.unsqueeze(-2) - mean).unsqueeze(-1)
        error = fn.solve_lower(L_C, error).squeeze(-1)
        logs = L_C.diagonal(dim1=-2, dim2=-1).log()
        log_prob = -0.5 * (error.square() + fn.LOG_2PI) - logs
        misfit = error[..., -1, :].square()
        # What outliers say for a drift: it shows in many errors, not in a few large
        # ones, which any doubt about the past explains better.
        share = 1 - (2 * OUTLIER / misfit).clamp_max(1).unsqueeze(-2)
        outlying = 0.5 * share * (misfit.unsqueeze(-2) - error.square())
        outlying[..., 0, :] = 0.0
        # log N(e; 0, c²) - log N(e; 0, 1), with no less noise than there may be.
        least = (
            least_noise(prior.likelihood, data.noise) * (-2 * logs[..., -1, :]).exp()
        )
        c2 = least.clamp(QUIET**2, 1)
        quiet = -0.5 * (c2.log() + misfit * (1 / c2 - 1))
    else:
        variance = variance.clamp_min(1e-12)
        target = y.unsqueeze(-2).expand(mean.shape)
        log_prob = torch.stack(
            [
                likelihoods.log_predictive(prior.likelihood, t, m, v)
                for t, m, v in zip(
                    target.unbind(-2), mean.unbind(-2), variance.unbind(-2), strict=True
                )
            ],
            -2,
        )
        misfit = 1 - 2 * (log_prob[..., -1, :] - log_prob[..., 0, :]).clamp_max(0)
        quiet, outlying = torch.zeros_like(misfit), torch.zeros_like(log_prob)
        # Each is predicted without the others: neighbours say the same thing, and all
        # count for as many as their values are independent, (tr C)² / tr C².
        B_1 = B[..., -1, :, :]
        C = form.gram(data.x, data.x) - A_f.mT @ A_f + B_1.mT @ B_1
        num_seen: int | Tensor = y.size(-1)
        if seen is not None:
            C = C.where(seen.unsqueeze(-1) & seen.unsqueeze(-2), 0)
            num_seen = seen.sum(-1).clamp_min(1)
        trace = C.diagonal(dim1=-2, dim2=-1).sum(-1)
        independent = trace.square() / fn.squared_norm(C, (-2, -1)).clamp_min(1e-300)
        share = (independent / num_seen).clamp(0, 1).nan_to_num(1.0)
        log_prob = share[..., None, None] * log_prob
    misfit = misfit - 1
    explained = (1 - variance[..., -1, :] / k_ff.squeeze(-2)).nan_to_num(1.0)
    count: int | Tensor = y.size(-1)
    if seen is not None:
        quiet, explained = quiet.where(seen, 0), explained.where(seen, 0)
        misfit, count = misfit.where(seen, 0), seen.sum(-1).clamp_min(1)
    # Of what the past says little about, nothing contradicts it, but its scale may.
    followed = explained > FOLLOWED
    gain = (log_prob - log_prob[..., -1:, :]).where(followed.unsqueeze(-2), 0)
    outlying = outlying.where(followed.unsqueeze(-2), 0)
    capped = torch.cat([gain - outlying, quiet.unsqueeze(-2)], -2).nan_to_num(0.0)
    gain = torch.cat([gain, quiet.unsqueeze(-2)], -2).nan_to_num(0.0)
    num_followed = followed.sum(-1)
    # Again no datum alone: an outlier is nothing to learn from.
    excess = misfit.clamp_max(5.0)
    against = excess.where(followed, 0).sum(-1) / (2 * num_followed).sqrt()
    num_old = summary.num_data.to(y).expand(num_followed.shape)
    return Judgement(
        gain=gain.sum(-1),
        capped=capped.clamp_max(OUTLIER).sum(-1),
        surprise=0.5 * misfit.sum(-1) / count,
        is_surprising=excess.sum(-1) / (2 * count) ** 0.5 > SURPRISING,
        is_refuted=against > SURPRISING,
        explained=explained.sum(-1) / count,
        num_followed=num_followed,
        num_old=num_old,
        num_new=torch.zeros_like(num_old) + num_new,
        leaves_enough=_leave_enough(
            num_old,
            count,
            powers.squeeze(-1),
            sum(p.numel() for p in prior.parameters()) / num_followed.numel(),
        ),
    )


def _leave_enough(
    num_old: Tensor, num_new: int | Tensor, powers: Tensor, num_free: float
) -> Tensor:
    """Which powers leave more data than there are hyperparameters.

    Those for a beginning do not have to: it is tried with the new data alone. Nor do
    those near 1, which take little away.
    """
    gone = (1 - powers) * num_old.unsqueeze(-1)
    left = (num_old + num_new).unsqueeze(-1) - gone
    leaves = (powers == 0) | (powers >= ANEW) | (left > num_free + 1)
    return torch.cat([leaves, torch.ones_like(leaves[..., :1])], -1)


class Verdict(NamedTuple):
    """What to do with the past.

    Attributes:
        power: ``(*batch,)``, what its likelihood is to be raised to, if it is kept.
        alarm: ``(*batch,)``, which streams seem to begin anew.
        doubt: ``(*batch, q)``, evidence for a change after these data.
        drift: Which streams drift.
    """

    power: Tensor
    alarm: Tensor
    doubt: Tensor
    drift: Drift


def decide(judgement: Judgement, doubt: Tensor, odds: float, drift: Drift) -> Verdict:
    """Add new evidence to the old, and see whether it suffices.

    Evidence for more of a drift is counted in full: its steps are smaller than what a
    model that is not quite right may lose, but all of one sign.

    Args:
        judgement: What new data say.
        doubt: ``(*batch, q)``, evidence so far, or of another size if there is none.
        odds: Prior odds of a change per update.
        drift: Which streams have drifted so far.
    """
    if doubt.size(-1) != judgement.capped.size(-1):
        doubt = torch.zeros_like(judgement.capped)
    powers = torch.tensor([*POWERS, 0.0], dtype=doubt.dtype, device=doubt.device)
    within = drift.goes_on.unsqueeze(-1) & (powers > 0) & (powers < 1)
    # A scale is known where the function is not; no reading says nothing about either.
    is_heard = judgement.is_followed.unsqueeze(-1).expand(doubt.shape).clone()
    is_heard[..., -1] |= judgement.gain[..., -1] != 0
    new = torch.where(within, judgement.capped, judgement.convincing)
    # Within a drift powers compete with 1, and may be behind for a while.
    floor = torch.where(within, -WITNESS, 0.0)
    left = (FADING**judgement.num_new).unsqueeze(-1)
    doubt = torch.where(is_heard, (left * doubt + new).maximum(floor), doubt)
    # However long a drift was confirmed, it must be possible to see that it is over. A
    # beginning has to explain more than the drift does.
    excess = (doubt[..., 1:-2].amax(-1, keepdim=True) + math.log(odds)).clamp_min(0)
    excess = torch.where(drift.goes_on.unsqueeze(-1), excess, 0.0)
    doubt = (doubt - excess).maximum(floor)
    # The cap is for the alarm; which power is the best, all that was gained decides.
    score = doubt + (judgement.gain - judgement.capped)
    enough = torch.where(within, LIKELY, -math.log(odds))
    is_heard &= judgement.leaves_enough
    score = torch.where(is_heard & (doubt > enough), score, -torch.inf)
    # In a drift small powers are part of it; else they stand for a beginning.
    is_fading = within | ((powers >= ANEW) & (powers < 1))
    best, index = torch.where(is_fading, score, -torch.inf).max(-1)
    begins = torch.where(is_fading | (powers == 1), -torch.inf, score).amax(-1)
    alarm = (begins >= best) & (begins > -torch.inf)
    power = torch.where(best > -torch.inf, powers.take(index), 1.0)
    power = torch.where(alarm & ~drift.goes_on, 1.0, power)
    num_old, num_new = judgement.num_old, judgement.num_new
    is_noticed = judgement.is_followed & (power < 1)
    drift = drift.go_on(num_new).begin(is_noticed, num_old + num_new)
    return Verdict(power, alarm, doubt, drift)


def of_beginning(doubt: Tensor, drift: Drift) -> Tensor:
    """``(*batch,)``, evidence that the stream has begun anew."""
    if doubt.size(-1) != len(POWERS) + 1:
        return doubt.new_zeros(doubt.shape[:-1])  # nothing is in doubt yet
    small = doubt[..., : sum(power < ANEW for power in POWERS)].amax(-1)
    small = torch.where(drift.goes_on, doubt[..., 0], small)
    return small.maximum(doubt[..., -1])


def fading(judgement: Judgement, doubt: Tensor, odds: float) -> Tensor:
    """``(*batch,)``, the power that predicts data best; 1 unless that is convincing.

    All evidence has to suffice for an alarm, and the data at hand have to bear witness
    with the hyperparameters learned since. A beginning is not among the powers: it has
    lost against one function for all data.

    Args:
        judgement: What new data say, with these hyperparameters.
        doubt: ``(*batch, q)``, all evidence for a change.
        odds: Prior odds of a change per update.
    """
    powers = judgement.gain.new_tensor(POWERS[1:-1])
    is_convincing = doubt[..., 1:-2] > -math.log(odds)
    is_convincing &= judgement.convincing[..., 1:-2] > WITNESS
    is_convincing &= judgement.leaves_enough[..., 1:-2]
    gain = torch.where(is_convincing, judgement.gain[..., 1:-2], -torch.inf)
    best, index = gain.max(-1)
    is_heard = judgement.is_followed & (best > -torch.inf)
    return torch.where(is_heard, powers.take(index), 1.0)


class Judged(NamedTuple):
    """What new data say about the past, and what follows from it.

    Attributes:
        power: One number or ``(*batch,)``, what the past is to be raised to.
        alarm: ``(*batch,)``, which streams seem to begin anew.
        drift: Which streams drift.
        doubt: ``(*batch, q)``, evidence for a change so far.
        doubted: Data that came since there is a doubt, the new ones included.
        waiting: Data until a new beginning may be tried again.
        surprise: ``(*batch,)``, nats per datum below what the model expected.
        is_surprising: ``(*batch,)``, whether that is more than chance.
        clock: The input along which the older half of the past is to be dropped.
        recalled: The posterior of before, for the new data.
    """

    power: float | Tensor
    alarm: Tensor
    drift: Drift
    doubt: Tensor
    doubted: float
    waiting: float
    surprise: Tensor
    is_surprising: Tensor
    clock: Clock | None = None
    recalled: Recalled | None = None

    @classmethod
    def of(
        cls, known: Known, data: Data, options: UpdateOptions, limits: Limits
    ) -> Judged:
        """Predict the new data, and decide."""
        memory, y = known.memory, data.y
        nothing = y.new_zeros(y.shape[:-1])
        none, drift = nothing > 0, Drift.of(memory, nothing)
        is_auto = options.forgets_by_evidence
        if options.forget is None and int(memory.base_key):
            is_auto = False  # a branch keeps what is to be merged
        if not is_auto:
            drift = drift.end(~none)  # what is kept is no longer for it to say
        is_auto = is_auto and bears_witness(memory, data, known.summary.num_inducing)
        power: float | Tensor = options.power
        judgement = recalled = None
        if is_auto or options.learns_when_due:
            with suppress(Breakdown):  # what cannot be predicted says nothing
                powers = POWERS if is_auto else (0.0, 1.0)
                mean, kernel, _ = known.frozen
                if not known.summary.is_empty and y.size(-1):
                    recalled = recall_at(
                        known.summary, mean, kernel, data.x, limits.jitter
                    )
                judgement = judge(
                    known.frozen, known.summary, data, limits.jitter, powers, recalled
                )
        kept = cls(power, none, drift, memory.doubt.to(y), 0.0, 0.0, nothing, none)
        if judgement is None:
            return kept
        surprise, is_surprising = judgement.surprise, judgement.is_surprising
        kept = kept._replace(
            surprise=surprise, is_surprising=is_surprising, recalled=recalled
        )
        if not is_auto:
            return kept
        odds, doubt = options.change_odds, kept.doubt
        is_old = bool((of_beginning(doubt, drift) > WITNESS).any())  # doubt of before
        before = drift
        power, alarm, doubt, drift = decide(judgement, doubt, odds, drift)
        if options.num_steps:
            # No power explains data of another scale: let learning try both.
            is_refuted = judgement.is_refuted & judgement.is_followed
            alarm = alarm | is_refuted | (is_surprising & (power < 1))
        doubted = is_old * float(memory.doubted) + y.size(-1)
        if likelihoods.takes_labels(known.prior.likelihood):
            is_told = has_all_classes(memory, data, int(doubted))
            alarm, drift = alarm & is_told, drift.where(is_told, before)
            power = torch.where(is_told, power, 1.0)
        waiting = max(float(memory.waiting) - y.size(-1), 0.0)
        if waiting:
            # A beginning lost against the past, which may only fade.
            faded = fading(judgement, doubt, odds)
            begins = alarm & ~drift.goes_on & (faded < 1)
            power = torch.where(begins, faded, power)
            drift = drift.begin(begins, judgement.num_old + judgement.num_new)
            alarm = is_surprising = none
        is_spent = drift.goes_on & (drift.since == 0)  # what noticed it just now
        doubt = torch.where(is_spent.unsqueeze(-1), 0.0, doubt)
        clock = None
        if not bool((alarm | (power < 1)).any()):
            clock = outgrown(known.frozen.kernel, memory, data, judgement.is_followed)
        power = drift.limit(power, judgement.num_old)
        if not bool((alarm | (power < 1)).any()):
            power = 1.0
        return kept._replace(
            power=power,
            alarm=alarm,
            drift=drift,
            doubt=doubt,
            doubted=doubted,
            waiting=waiting,
            is_surprising=is_surprising,
            clock=clock,
        )

    @property
    def is_doubtful(self) -> bool:
        """Whether to wait for more witnesses before anything is learned."""
        is_doubtful = of_beginning(self.doubt, self.drift) > WITNESS
        return bool((is_doubtful & ~self.drift.goes_on).any())

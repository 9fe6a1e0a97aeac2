r"""What an alarm asks: one function for all data, or a new one for the new data?

Both are learned, and their evidence decides:

    together   all data, with the past as it was
    apart      the new data, beginning anew; and the past, as it was before the doubt
    price      what a beginning has to gain beyond that

Where a beginning loses the past may still fade, see :func:`fade`.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.memory import Data
from torch_ssgp.summary import PosteriorSummary
from torch_ssgp.update.ascent import maximize
from torch_ssgp.update.forgetting import Judged, Judgement, fading, judge
from torch_ssgp.update.objective import Objective, Prior
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.state import Known, Learned, Limits
from torch_ssgp.update.walk import Update

APART = 0.5  # nats per datum that a beginning has to gain: less is no new function


def update_with(
    known: Known, data: Data, options: UpdateOptions, limits: Limits, judged: Judged
) -> Learned:
    """One update; on an alarm both explanations are tried.

    Args:
        known: What is known before.
        data: New data.
        options: How to learn.
        limits: What may be used.
        judged: What the data say about the past.
    """
    alarm = judged.alarm
    if not bool(alarm.any()):
        return Update(known, data, options, limits, judged).run()
    kept = torch.as_tensor(judged.power).to(data.y).expand(alarm.shape)
    # One function for all data, or a new one for those that came since the doubt. If
    # the first is better the doubt stays, and is settled when it has doubled.
    num_free = sum(p.numel() for p in known.prior.parameters() if p.requires_grad)
    price = price_of(judged.doubted, num_free / alarm.numel(), options.change_odds)
    if options.num_steps and price == math.inf:  # too few to learn a function from
        return Update(known, data, options, limits, judged._replace(power=kept)).run()
    calm = judged._replace(power=kept, waiting=judged.doubted)
    together = Update(known, data, options, limits, calm, must_learn=True)
    joint = together.run()
    if not options.num_steps:  # nothing can be learned: the alarm decides
        change = alarm
    else:
        begin = judged._replace(
            power=torch.where(alarm, 0.0, kept),
            drift=judged.drift.end(alarm),
            doubt=torch.where(alarm.unsqueeze(-1), 0.0, judged.doubt),
            doubted=0.0,
            waiting=0.0,
        )
        silent = replace(options, callback=None, progress=False)  # has seen one loop
        apart = Update(known, data, silent, limits, begin, must_learn=True)
        apart.pending = together.num_pending(judged)
        split = apart.restart().run()
        old = evidence_of_past(together, apart.pending)
        change = alarm & (
            split.bound + split.loss + old - price > joint.bound + joint.loss
        )
        if bool(change.any()):
            # A new noise alone is no new function: what still predicts stays.
            again = judge_since(together, joint, split.prior, judged)
            change = change & ~again.is_helped if again is not None else change
        if bool((change == alarm).all()):
            return split
    if not bool(change.any()):
        return fade(together, joint, calm)
    settled = judged._replace(
        power=torch.where(change, 0.0, kept),
        drift=judged.drift.end(change),
        doubt=torch.where(change.unsqueeze(-1), 0.0, judged.doubt),
    )
    mixed = Update(known, data, options, limits, settled, must_learn=True)
    mixed.pending = together.num_pending(judged)
    return mixed.restart().run()


def price_of(num_data: float, num_free: float, odds: float) -> float:
    r"""Nats that a new beginning has to gain.

    The log-odds against a change; what a model that is not quite right loses, more here
    than by forgetting, as new hyperparameters suit every stretch of real data better;
    and what :math:`p` hyperparameters learned from the same :math:`n` data fit of their
    chance, :math:`p n / (n - p - 1)`, Akaike's criterion corrected for few data.
    Without more data than hyperparameters there is no telling.

    Args:
        num_data: Data since the doubt began.
        num_free: Hyperparameters that are learned.
        odds: Prior odds of a change per update.
    """
    spare = num_data - num_free - 1
    if num_free and spare <= 0:
        return math.inf
    fitted = num_free * num_data / spare if num_free else 0.0
    return fitted + APART * num_data - math.log(odds)


def fade(together: Update, joint: Learned, judged: Judged) -> Learned:
    """One function for all data, unless a power of the past predicts the new better.

    Asked with the hyperparameters of that function: those of before may have been too
    sure of themselves.

    Args:
        together: The update that learned from all data.
        joint: What it learned.
        judged: What the data say about the past, calmed.
    """
    known, data, options, limits = together.arguments
    judgement = judge_since(together, joint, joint.prior, judged)
    if judgement is None:
        return joint
    power = fading(judgement, judged.doubt, options.change_odds)
    begins = power < 1
    if not bool(begins.any()):
        return joint
    drift = judged.drift.begin(begins, judgement.num_old + judgement.num_new)
    doubt = torch.where(begins.unsqueeze(-1), 0.0, judged.doubt)
    # The past was judged as far as it is kept.
    power = torch.as_tensor(judged.power) * drift.limit(power, judgement.num_old)
    faded = judged._replace(power=power, drift=drift, doubt=doubt)
    silent = replace(options, callback=None, progress=False)
    return Update(known, data, silent, limits, faded, must_learn=True).run()


def judge_since(
    together: Update, joint: Learned, prior: Prior, judged: Judged
) -> Judgement | None:
    """What all data since the doubt say about the past before it.

    Args:
        together: The update that learned from all data.
        joint: What it learned.
        prior: Hyperparameters to judge with.
        judged: What was judged before.
    """
    pending = together.num_pending(judged)
    first = together.num_raw - pending
    since = together.data.narrow(first, together.data.y.size(-1) - first)
    past = summary_of_past(together, joint._replace(prior=prior), pending)
    return judge(prior, past, since, together.limits.jitter)


def evidence_of_past(together: Update, num_pending: int) -> Tensor:
    """Evidence of all before the doubt, ``(*batch,)``.

    Data since then have moved the hyperparameters: without them they are learned
    again.

    Args:
        together: The update that learns from all data.
        num_pending: Raw data of the memory that came since the doubt.
    """
    learns, known = num_pending > 0, together.known
    prior = together.working_copy() if learns else known.frozen
    z = known.summary.inducing_points.to(together.data.x)
    objective = _of_past(together, prior, z, num_pending, learn=learns)
    if learns:
        options = replace(together.options, callback=None, progress=False)
        maximize(objective, options, learn_hyperparameters=True)
    with torch.no_grad():
        rows, s, _ = _projected(objective)
        return fn.evidence(rows, s) + rows.loss / (2 * s)


@torch.no_grad()
def summary_of_past(
    together: Update, learned: Learned, num_pending: int
) -> PosteriorSummary:
    """What the past alone says, with hyperparameters learned from new data too.

    Args:
        together: The update that learned from all data.
        learned: Hyperparameters and inducing points.
        num_pending: Raw data of the memory, the last ones, that are not of the past.
    """
    z = learned.summary["inducing_points"].to(together.data.x)
    rows, _, m_b = _projected(_of_past(together, learned.prior, z, num_pending))
    past = fn.absorb(fn.compress(rows), m_b)
    summary = copy(together.known.summary)
    summary.replace(
        inducing_points=z,
        U=past.U,
        g=past.g,
        residual=past.rho,
        num_data=past.n,
        prior_mean=m_b,
        prior_cholesky=rows.L,
        shared_noise=learned.summary["shared_noise"],
    )
    return summary


def _of_past(
    together: Update,
    prior: Prior,
    z: Tensor,
    num_pending: int = 0,
    learn: bool = False,
) -> Objective:
    """The bound on what came before the new data, or before the last of these."""
    data = together.data.narrow(0, together.num_raw - num_pending)
    objective = together.objective_on(prior, data)
    objective.recall_sites(together.known.memory, 0)
    objective.start_at(z.expand(*data.x.shape[:-2], *z.shape[-2:]), learn=learn)
    return objective


def _projected(objective: Objective) -> tuple[fn.Projection, Tensor, Tensor]:
    """Rows at the inducing points, their noise scale, and the prior mean there."""
    prior = objective.final_prior(objective.z.detach())
    rows, s = objective.project(prior, objective.as_gaussian(prior))
    return rows, s, prior.m_b

r"""An update: a function of what is known, new data and options.

    judge       how well the past predicts the new data: what to forget, and whether
                it pays to learn (``forgetting.py``)
    remember    new data join the raw data of the memory: exact
    learn       maximise the bound on all that is remembered over hyperparameters and
                inducing points; when the data have doubled, from a fresh start too
    summarise   q(b), as pseudo-observations at the inducing points
    compress    if the memory is over its capacity: choose points, project, one QR
                (all four in ``walk.py``)

Nothing of the model changes in here: it takes over what comes out, or does not.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from torch_ssgp.exceptions import Breakdown, FactorizationError
from torch_ssgp.memory import Data
from torch_ssgp.update.forgetting import (
    ANEW,
    SLACK,
    Judged,
    after_fading,
    fading,
    judge,
)
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.result import Status
from torch_ssgp.update.state import Known, Learned, Limits
from torch_ssgp.update.walk import Update


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
    judged = Judged.of(known, data, options, limits)
    try:
        try:
            return _learn(known, data, options, limits, judged)
        except Breakdown:
            if options.num_steps == 0:
                raise
            closed_form = replace(options, num_steps=0)
            learned = _learn(known, data, closed_form, limits, judged)
            return learned._replace(status=Status.CLOSED_FORM)
    except Breakdown as error:
        raise FactorizationError(
            f"Nothing could be learned from the data ({error}); the model is "
            "unchanged. Check kernel and likelihood for values that are not "
            "finite, or raise the jitter: with torch_ssgp.settings.jitter(1e-4): "
            "..."
        ) from error


def _learn(
    known: Known, data: Data, options: UpdateOptions, limits: Limits, judged: Judged
) -> Learned:
    """One update; on an alarm both explanations are tried."""
    alarm = judged.alarm
    if not bool(alarm.any()):
        return Update(known, data, options, limits, judged).run()
    assert isinstance(judged.power, Tensor)
    kept = torch.where(judged.power < ANEW, 1.0, judged.power)
    # One function for all data, or a new one for those that came since the doubt. As
    # long as the first is better the doubt stays, and is settled when it has doubled.
    num_free = sum(p.numel() for p in known.prior.parameters() if p.requires_grad)
    price = _price(judged.doubted, num_free / alarm.numel(), options.change_odds)
    if options.num_steps and price == math.inf:  # too few to learn a function from
        return Update(known, data, options, limits, judged._replace(power=kept)).run()
    calm = judged._replace(power=kept, waiting=judged.doubted)
    together = Update(known, data, options, limits, calm, must_learn=True)
    joint = together.run()
    if not options.num_steps:  # nothing can be learned: the alarm decides
        change = alarm
    else:
        begin = judged._replace(
            power=torch.where(alarm, 0.0, judged.power),
            doubt=torch.where(alarm.unsqueeze(-1), 0.0, judged.doubt),
            doubted=0.0,
            waiting=0.0,
        )
        apart = Update(known, data, options, limits, begin, must_learn=True)
        apart.pending = together.num_pending(judged)
        split = apart.restart().run()
        old = together.evidence_of_past(apart.pending)
        change = alarm & (
            split.bound + split.loss + old - price > joint.bound + joint.loss
        )
        if bool(change.any()):
            # A new noise alone is no new function: what still predicts stays.
            past = together.summary_of_past(joint._replace(prior=split.prior))
            again = judge(split.prior, past, data, limits.jitter)
            change = change & ~again.is_helped if again is not None else change
        if bool((change == alarm).all()):
            return split
    if not bool(change.any()):
        return _fade(known, data, options, limits, calm, together, joint)
    settled = judged._replace(
        power=torch.where(change, 0.0, kept),
        doubt=torch.where(change.unsqueeze(-1), 0.0, judged.doubt),
    )
    mixed = Update(known, data, options, limits, settled, must_learn=True)
    mixed.pending = together.num_pending(judged)
    return mixed.restart().run()


def _price(num_data: float, num_free: float, odds: float) -> float:
    r"""Nats that a new beginning has to gain.

    The log-odds against a change; what a model that is not quite right loses anyway;
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
    return fitted + SLACK * num_data - math.log(odds)


def _fade(
    known: Known,
    data: Data,
    options: UpdateOptions,
    limits: Limits,
    judged: Judged,
    update: Update,
    joint: Learned,
) -> Learned:
    """One function for all data, unless a power of the past predicts the new better.

    Asked with the hyperparameters of that function: those of before may have been too
    sure of themselves.
    """
    past = update.summary_of_past(joint)
    judgement = judge(joint.prior, past, data, limits.jitter)
    if judgement is None:
        return joint
    power = fading(judgement, judgement.convincing, options.change_odds)
    if bool((power >= torch.as_tensor(judged.power)).all()):
        return joint
    doubt = after_fading(judged.doubt, power, options.change_odds)
    faded = judged._replace(power=power, doubt=doubt)
    return Update(known, data, options, limits, faded, must_learn=True).run()

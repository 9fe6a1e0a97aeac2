r"""How much of the past to keep: the evidence of the new data decides.

Before anything is learned, new data are predicted from the past raised to each of a few
powers :math:`\lambda`, from 1 (nothing changed) to 0 (begin anew), in closed form. What
:math:`\lambda` gains over 1 on each datum,

.. math:: \delta_i(\lambda) = \log p(y_i \mid y_{<i}, past^\lambda)
    - \log p(y_i \mid y_{<i}, past),

is summed up over updates, and the sum starts again whenever it falls below zero:
Page's test, one for each power. A sum that exceeds the log-odds against a change per
update is an alarm. One datum adds at most ``OUTLIER`` nats, less than an alarm takes:
a change needs more than one witness, an outlier is none.

A model at the edge of what it has seen may be too sure of itself, which looks like a
change. So nothing is thrown away on an alarm alone: both explanations are learned, one
function for all data and a new one for the new data, and their evidence decides (see
``learning.py``). Powers between are for streams that drift: there is nothing to begin
anew with, and they need no such trial.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import likelihoods
from torch_ssgp.exceptions import Breakdown, breakdowns
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.inducing import evenly
from torch_ssgp.memory import Data
from torch_ssgp.modules import form_of, inducing_gram, observation_noise
from torch_ssgp.summary import PosteriorSummary
from torch_ssgp.update.objective import Prior
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.state import Known, Limits

POWERS = (0.0, 0.05, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
ANEW = 0.5  # powers below it stand for a beginning, not for a drift
OUTLIER = 4.6  # nats by which one datum may speak for a change: one in a hundred
WITNESS = 2.3  # nats of doubt that make data part of what may have begun
MAX_DATA = 256  # new data that are looked at, evenly spread over the batch
SURPRISING = 4.0  # standard deviations of the misfit that call for learning
FADING = 0.9  # what is left of old evidence for a drift after an update


class Judgement(NamedTuple):
    """What new data say about the past.

    Attributes:
        gain: ``(*batch, q)``, nats by which each of ``POWERS`` predicts them better
            than the past as it is.
        capped: ``(*batch, q)``, the same, no datum counting for more than ``OUTLIER``.
        surprise: ``(*batch,)``, nats per datum by which the data are less probable
            than the model expected.
        is_surprising: ``(*batch,)``, whether that is more than chance.
    """

    gain: Tensor
    capped: Tensor
    surprise: Tensor
    is_surprising: Tensor


@torch.no_grad()
@breakdowns(ValueError)
def judge(
    prior: Prior, summary: PosteriorSummary, data: Data, jitter: float
) -> Judgement | None:
    """Predict new data from the past, raised to each of ``POWERS``.

    Args:
        prior: Frozen modules in the dtype of the algebra.
        summary: The posterior at the inducing points.
        data: New data.
        jitter: Relative jitter.

    Returns:
        ``None`` if there is no past, or no new data.
    """
    if summary.is_empty or data.y.size(-1) == 0:
        return None
    keep = evenly(data.x, min(MAX_DATA, data.x.size(-2)))
    noise = None if data.noise is None else data.noise[..., keep]
    data = Data(data.x[..., keep, :], data.y[..., keep], noise)
    form = form_of(prior.kernel)
    z, y = summary.inducing_points.to(data.x), data.y
    z = z.expand(*data.x.shape[:-2], *z.shape[-2:])
    past = PseudoObservations(*(t.to(y) for t in summary.pseudo_observations))
    gaussian = likelihoods.is_gaussian(prior.likelihood)
    s = torch.ones_like(past.rho)
    if bool(summary.shared_noise):
        s = prior.likelihood.noise.squeeze(-1).expand(past.rho.shape)
    K_zz, K_zf, _ = inducing_gram(form, z, jitter, data.x)
    L = fn.cholesky(K_zz)
    A_f = fn.solve_lower(L, K_zf)
    rows = fn.recall(past, L, prior.mean(z))
    scale = s[..., None, None]
    known_rows = rows.A @ rows.A.mT / scale
    if not bool(torch.isfinite(known_rows).all()):
        raise Breakdown("the posterior is not finite")
    # In the eigenbasis of what is known, every power is a division.
    values, Q = torch.linalg.eigh(known_rows)
    b = (Q.mT @ (rows.A @ rows.r.unsqueeze(-1)) / scale).squeeze(-1)
    B = Q.mT @ A_f
    powers = torch.tensor(POWERS, dtype=y.dtype, device=y.device)
    known = powers.unsqueeze(-1) * values.clamp_min(0).unsqueeze(-2)  # (*batch, q, m)
    shrunk = powers.unsqueeze(-1) * b.unsqueeze(-2) / (1 + known)
    mean = prior.mean(data.x).unsqueeze(-2) + shrunk @ B  # (*batch, q, n)
    explained = known / (1 + known)
    if gaussian:
        sigma2 = observation_noise(prior.likelihood, data.noise).expand(y.shape)
        # (*batch, q, n, n); no datum is used to predict itself or those before it.
        K_ff = form.gram(data.x, data.x).unsqueeze(-3)
        explained = (B.unsqueeze(-3).mT * explained.unsqueeze(-2)) @ B.unsqueeze(-3)
        C = K_ff - explained
        k_ff = form.variances(data.x).unsqueeze(-2)
        diagonal = k_ff - explained.diagonal(dim1=-2, dim2=-1)
        diagonal = diagonal.clamp_min(0) + sigma2.unsqueeze(-2)
        L_C = fn.cholesky(torch.diagonal_scatter(C, diagonal, dim1=-2, dim2=-1))
        error = (y.unsqueeze(-2) - mean).unsqueeze(-1)
        error = fn.solve_lower(L_C, error).squeeze(-1)
        logs = L_C.diagonal(dim1=-2, dim2=-1).log()
        log_prob = -0.5 * (error.square() + fn.LOG_2PI) - logs
        misfit = error[..., -1, :].square()
    else:
        k_ff = form.variances(data.x).unsqueeze(-2)
        variance = (k_ff - explained @ B.square()).clamp_min(1e-12)
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
    gain = (log_prob - log_prob[..., -1:, :]).nan_to_num(0.0)
    capped = gain.clamp_max(OUTLIER).sum(-1)
    num_data = y.size(-1)
    surprise = 0.5 * (misfit - 1).mean(-1)
    # Again no datum alone: an outlier is nothing to learn from.
    excess = (misfit - 1).clamp_max(5.0).sum(-1) / (2 * num_data) ** 0.5
    return Judgement(gain.sum(-1), capped, surprise, excess > SURPRISING)


class Verdict(NamedTuple):
    """What to do with the past.

    Attributes:
        power: ``(*batch,)``, what its likelihood is to be raised to.
        doubt: ``(*batch, q)``, evidence for a change after these data.
    """

    power: Tensor
    doubt: Tensor


def decide(judgement: Judgement, doubt: Tensor, odds: float) -> Verdict:
    """Add new evidence to the old, and see whether it suffices.

    Args:
        judgement: What new data say.
        doubt: ``(*batch, q)``, evidence so far, or without columns.
        odds: Prior odds of a change per update.
    """
    if doubt.size(-1) == 0:
        doubt = torch.zeros_like(judgement.capped)
    doubt = (FADING * doubt + judgement.capped).clamp_min(0)
    # The cap is for the alarm; which power is the best, all that was gained decides.
    score = doubt + (judgement.gain - judgement.capped)
    score = torch.where(doubt > -math.log(odds), score, -torch.inf)
    best, index = score.max(-1)
    powers = torch.tensor(POWERS, dtype=doubt.dtype, device=doubt.device)
    return Verdict(torch.where(best > -torch.inf, powers[index], 1.0), doubt)


class Judged(NamedTuple):
    """What new data say about the past, and what follows from it.

    Attributes:
        power: One number or ``(*batch,)``, what the past is to be raised to.
        doubt: ``(*batch, q)``, evidence for a change so far.
        doubted: Data that came since there is a doubt, the new ones included.
        surprise: ``(*batch,)``, nats per datum below what the model expected.
        is_surprising: ``(*batch,)``, whether that is more than chance.
    """

    power: float | Tensor
    doubt: Tensor
    doubted: float
    surprise: Tensor
    is_surprising: Tensor

    @classmethod
    def of(
        cls, known: Known, data: Data, options: UpdateOptions, limits: Limits
    ) -> Judged:
        """Predict the new data, and decide."""
        memory, y = known.memory, data.y
        nothing = y.new_zeros(y.shape[:-1])
        is_auto = options.forget == "auto"
        power: float | Tensor = 1.0 if is_auto else options.forget  # type: ignore[assignment]
        judgement = None
        if is_auto or options.learns_when_due:
            with suppress(Breakdown):  # what cannot be predicted says nothing
                judgement = judge(known.frozen, known.summary, data, limits.jitter)
        if judgement is None:
            return cls(power, memory.doubt, 0.0, nothing, nothing > 0)
        doubt, doubted = memory.doubt.to(y), 0.0
        if is_auto:
            is_old = bool((doubt[..., :1] > WITNESS).any())  # doubt of before
            power, doubt = decide(judgement, doubt, options.change_odds)
            doubted = is_old * float(memory.doubted) + y.size(-1)
            if bool((power == 1).all()):
                power = 1.0
        return cls(power, doubt, doubted, *judgement[-2:])

    @property
    def is_doubtful(self) -> bool:
        """Whether to wait for more witnesses before anything is learned."""
        return self.doubt.numel() > 0 and bool((self.doubt[..., 0] > WITNESS).any())

    @property
    def alarm(self) -> Tensor:
        """``(*batch,)``, which streams seem to begin anew."""
        if not isinstance(self.power, Tensor):
            return torch.zeros_like(self.is_surprising)
        return (self.power < ANEW) | ((self.power < 1) & self.is_surprising)

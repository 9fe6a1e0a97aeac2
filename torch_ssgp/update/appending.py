r"""Updates that only add rows: constant cost, whatever the size of the memory.

With the prior and the inducing points of before, the posterior of all data is that of
before with one row for every new datum,

.. math::
    A = [A_{old}, L^{-1} K_{bf} W], \quad r = [r_{old}, W (y - m_f)], \quad
    t = t_{old} + \mathrm{tr}\, W (K_{ff} - Q_{ff}) W,

the same as projecting all that is remembered once more, to rounding. Only the kernel
between inducing points and new data has to be computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from gpytorch.means import Mean
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.exceptions import Breakdown, breakdowns
from torch_ssgp.functional import Projection, PseudoObservations
from torch_ssgp.kernels import Form
from torch_ssgp.modules import form_of, inducing_gram, same_variables
from torch_ssgp.summary import PosteriorSummary
from torch_ssgp.update.objective import Objective


class Appended(NamedTuple):
    """The posterior with new rows.

    Attributes:
        past: Pseudo-observations at the inducing points of before.
        bound: ``(*batch,)``, bound on the evidence of all data seen.
        loss: ``(*batch,)``, nats that the inducing points lose of the new data.
        s: ``(*batch,)``, noise scale of the rows.
    """

    past: PseudoObservations
    bound: Tensor
    loss: Tensor
    s: Tensor


class PriorAt(NamedTuple):
    """The prior at new data, and at inducing points.

    Attributes:
        K_bf: ``(*batch, m, n)``, covariance of inducing values and data.
        k_ff: ``(*batch, n)``, variances at the data.
        m_f: ``(*batch, n)``, means there.
        m_b: ``(*batch, m)``, means at the inducing points.
        k_b: ``(*batch, m)``, variances there, without the jitter.
        jitter: ``(*batch, m)``, variance of the jitter.
    """

    K_bf: Tensor
    k_ff: Tensor
    m_f: Tensor
    m_b: Tensor
    k_b: Tensor
    jitter: Tensor


def recall_at(
    summary: PosteriorSummary, mean: Mean, form: Form, x: Tensor, jitter: float
) -> tuple[Projection, PriorAt, bool]:
    """The posterior of before, and the prior that ties new data to it.

    The factor that the summary was stored with serves again where the prior is the
    same: one call of the kernel, for the data and the first inducing point.

    Args:
        summary: The posterior of before.
        mean: Prior mean.
        form: Prior covariance.
        x: ``(*batch, n, d)``, where the data are.
        jitter: Relative jitter.

    Returns:
        The rows of the summary; the prior; whether it is that of the summary.
    """
    z, L, m_b = (
        t.to(x)
        for t in (summary.inducing_points, summary.prior_cholesky, summary.prior_mean)
    )
    x, z = fn.broadcast_matrices(x, z)
    K = form.gram(z, torch.cat([x, z[..., :1, :]], -2))
    k_b, sizes = form.variances(z), [z.size(-2), x.size(-2)]
    variance = jitter * torch.where(k_b == 0, 1.0, k_b)
    m_z, m_f = mean(torch.cat([z, x], -2)).split(sizes, -1)
    column = torch.cat([(k_b + variance)[..., :1], K[..., 1:, -1]], -1)
    is_same = _agree(
        (column, L[..., :1, 0] * L[..., :, 0], k_b), (m_z, m_b, k_b.sqrt())
    )
    if not is_same:
        L, m_b = fn.cholesky(inducing_gram(form, z, jitter).K_zz), m_z
    past = PseudoObservations(*(t.to(x) for t in summary.pseudo_observations))
    at = PriorAt(K[..., :-1], form.variances(x), m_f, m_b, k_b, variance)
    return fn.recall(past, L, m_b), at, is_same


@torch.no_grad()
@breakdowns()
def append(
    summary: PosteriorSummary,
    objective: Objective,
    num_new: int,
    wants_points: Callable[[Tensor, int, int], bool] | None,
    num_inducing: int,
) -> Appended | None:
    """The posterior of all data, where prior and inducing points stay.

    Args:
        summary: The posterior of before.
        objective: The bound on all that is remembered, at fixed hyperparameters.
        num_new: How many of its data, the last ones, are not in the summary.
        wants_points: Whether new data need inducing points, see
            :class:`~torch_ssgp.inducing.InducingPolicy`; ``None`` where they are given.
        num_inducing: The largest number of them.

    Returns:
        ``None`` if the prior differs from that of the summary, or if new data need
        points of their own.
    """
    y = objective.data.y
    first = y.size(-1) - num_new
    data = objective.data.narrow(first, num_new)
    z = summary.inducing_points.to(y)
    old, at, is_same = recall_at(
        summary, objective.mean, form_of(objective.kernel), data.x, objective.jitter
    )
    if not is_same:
        return None
    # A datum at an inducing point is that variable, jitter included.
    same = same_variables(z, data.x, z[..., :0, :])
    K_bf = torch.where(same, (at.k_b + at.jitter).unsqueeze(-1), at.K_bf)
    k_ff = at.k_ff + (at.jitter.unsqueeze(-1) * same).sum(-2)
    noise, s = objective.noises()
    own = None if objective.shared_noise else noise.expand(y.shape)[..., first:]
    weighed = fn.weigh(data.y - at.m_f, own, s, data.weight)
    A_f = fn.solve_lower(old.L, K_bf)
    lost = k_ff - fn.squared_norm(A_f, -2)
    if weighed.root is not None:
        A_f, lost = A_f * weighed.root.unsqueeze(-2), lost * weighed.root.square()
    if wants_points is not None:
        nats = lost / (2 * s.unsqueeze(-1))
        if wants_points(nats, z.size(-2), num_inducing):
            return None
    rows = Projection(
        L=old.L,
        A=torch.cat(fn.broadcast_matrices(old.A, A_f), -1),
        r=torch.cat(fn.broadcast_rows(old.r, weighed.r), -1),
        loss=lost.sum(-1),
        rho=old.rho + weighed.rho,
        n=old.n + data.num_data,
    )
    rows = fn.compress(rows)
    bound, past = fn.evidence(rows, s), fn.absorb(rows, at.m_b)
    if not bool(torch.isfinite(bound).all() & torch.isfinite(past.U).all()):
        raise Breakdown("the new posterior is not finite")
    return Appended(past, bound, rows.loss / (2 * s), s)


def _agree(*pairs: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether values and those of before differ by rounding alone, on their scale."""
    tolerance = min(1e6 * torch.finfo(pairs[0][0].dtype).eps, 1e-6)
    close = (
        ((now - then).abs() <= tolerance * scale.amax()).all()
        for now, then, scale in pairs
    )
    return bool(torch.stack(list(close)).all())

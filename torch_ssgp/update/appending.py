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
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.exceptions import Breakdown, breakdowns
from torch_ssgp.functional import Projection, PseudoObservations
from torch_ssgp.modules import form_of, same_variables
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
    form = form_of(objective.kernel)
    z, L, m_b = (
        t.to(y)
        for t in (summary.inducing_points, summary.prior_cholesky, summary.prior_mean)
    )
    # One call of the kernel: new data, and the first point, to know the prior by.
    x, probe = fn.broadcast_matrices(data.x, z[..., :1, :])
    z = z.expand(*x.shape[:-2], *z.shape[-2:])
    K = form.gram(z, torch.cat([x, probe], -2))
    k_z = form.variances(z)
    jitter = objective.jitter * torch.where(k_z == 0, 1.0, k_z)
    column = torch.cat([(k_z + jitter)[..., :1], K[..., 1:, -1]], -1)
    if not (
        _agree(column, L[..., :1, 0] * L[..., :, 0], k_z.amax())
        and _agree(objective.mean(z), m_b, k_z.amax().sqrt())
    ):
        return None
    # A datum at an inducing point is that variable, jitter included.
    same = same_variables(z, x, z[..., :0, :])
    K_bf = torch.where(same, (k_z + jitter).unsqueeze(-1), K[..., :-1])
    k_ff = form.variances(x) + (jitter.unsqueeze(-1) * same).sum(-2)
    noise, s = objective.noises()
    own = None if objective.shared_noise else noise.expand(y.shape)[..., first:]
    weighed = fn.weigh(data.y - objective.mean(x), own, s, data.weight)
    A_f = fn.solve_lower(L, K_bf)
    lost = k_ff - fn.squared_norm(A_f, -2)
    if weighed.root is not None:
        A_f, lost = A_f * weighed.root.unsqueeze(-2), lost * weighed.root.square()
    if wants_points is not None:
        nats = lost / (2 * s.unsqueeze(-1))
        if wants_points(nats, z.size(-2), num_inducing):
            return None
    past = PseudoObservations(*(t.to(y) for t in summary.pseudo_observations))
    old = fn.recall(past, L, m_b)
    rows = Projection(
        L=L,
        A=torch.cat(fn.broadcast_matrices(old.A, A_f), -1),
        r=torch.cat(fn.broadcast_rows(old.r, weighed.r), -1),
        loss=lost.sum(-1),
        rho=past.rho + weighed.rho,
        n=past.n + data.num_data,
    )
    rows = fn.compress(rows)
    bound, past = fn.evidence(rows, s), fn.absorb(rows, m_b)
    if not bool(torch.isfinite(bound).all() & torch.isfinite(past.U).all()):
        raise Breakdown("the new posterior is not finite")
    return Appended(past, bound, rows.loss / (2 * s), s)


def _agree(now: Tensor, then: Tensor, scale: Tensor) -> bool:
    """Whether two values differ by rounding alone."""
    tolerance = min(1e6 * torch.finfo(now.dtype).eps, 1e-6)
    return bool(((now - then).abs() <= tolerance * scale).all())

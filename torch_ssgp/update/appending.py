r"""Updates that only add rows: constant cost, whatever the size of the memory.

With the prior and the inducing points of before, the posterior of all data is that of
before with one row for every new datum,

.. math::
    A = [A_{old}, L^{-1} K_{bf} W], \quad r = [r_{old}, W (y - m_f)], \quad
    t = t_{old} + \mathrm{tr}\, W (K_{ff} - Q_{ff}) W,

the same as projecting all that is remembered once more, to rounding. Only the kernel
between inducing points and new data has to be computed. New rows join the old ones as
they are; many wait for one QR.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.exceptions import Breakdown, breakdowns
from torch_ssgp.functional import Projection, PseudoObservations
from torch_ssgp.kernels import Form
from torch_ssgp.modules import form_of, inducing_gram, same_variables
from torch_ssgp.points import Lost
from torch_ssgp.summary import PosteriorSummary
from torch_ssgp.update.objective import Objective

WAITING = 0.25  # rows that wait for a QR, as a share of the inducing points


class Appended(NamedTuple):
    """The posterior with new rows.

    Attributes:
        past: Pseudo-observations at the inducing points of before.
        bound: ``(*batch,)``, bound on the evidence of all data seen.
        misfit: ``(*batch,)``, see :class:`~torch_ssgp.functional.Fit`.
        loss: ``(*batch,)``, nats that the inducing points lose of all data.
        s: ``(*batch,)``, noise scale of the rows.
    """

    past: PseudoObservations
    bound: Tensor
    misfit: Tensor
    loss: Tensor
    s: Tensor


class Recalled(NamedTuple):
    """The posterior of before, and what it knows of new data.

    Attributes:
        past: The posterior as pseudo-observations.
        rows: The same as rows of a regression on its inducing points.
        A_f: ``(*batch, m, n)``, how data depend on these, whitened.
        k_ff: ``(*batch, n)``, prior variances of the data.
        m_f: ``(*batch, n)``, their prior means.
        m_b: ``(*batch, m)``, prior means at the inducing points.
        is_same: Whether the prior is that of the summary.
    """

    past: PseudoObservations
    rows: Projection
    A_f: Tensor
    k_ff: Tensor
    m_f: Tensor
    m_b: Tensor
    is_same: bool


@torch.no_grad()
@breakdowns()
def recall_at(
    summary: PosteriorSummary,
    mean: Mean,
    kernel: Kernel | Form,
    x: Tensor,
    jitter: float,
) -> Recalled:
    """Recall the posterior of before, for new data.

    The factor that the summary was stored with serves again where the prior is the
    same: one call of the kernel, for the data and the first inducing point.

    Args:
        summary: The posterior of before.
        mean: Prior mean.
        kernel: Prior covariance.
        x: ``(*batch, n, d)``, where the data are.
        jitter: Relative jitter.
    """
    form = form_of(kernel)
    z, L, m_b = (
        t.to(x)
        for t in (summary.inducing_points, summary.prior_cholesky, summary.prior_mean)
    )
    x, z = fn.broadcast_matrices(x, z)
    K = form.gram(z, torch.cat([x, z[..., :1, :]], -2))
    k_b, k_ff = form.variances(z), form.variances(x)
    variance = jitter * torch.where(k_b == 0, 1.0, k_b)
    k_bb = k_b + variance
    m_z, m_f = mean(torch.cat([z, x], -2)).split([z.size(-2), x.size(-2)], -1)
    column = torch.cat([k_bb[..., :1], K[..., 1:, -1]], -1)
    is_same = _agree(
        (column, L[..., :1, 0] * L[..., :, 0], k_b), (m_z, m_b, k_b.sqrt())
    )
    if not is_same:
        L, m_b = fn.cholesky(inducing_gram(form, z, jitter).K_zz), m_z
    # A datum at an inducing point is that variable, jitter included.
    same = same_variables(z, x, z[..., :0, :])
    A_f = fn.solve_lower(L, torch.where(same, k_bb.unsqueeze(-1), K[..., :-1]))
    k_ff = k_ff + (variance.unsqueeze(-1) * same).sum(-2)
    past = PseudoObservations(*(t.to(x) for t in summary.pseudo_observations))
    return Recalled(past, fn.recall(past, L, m_b), A_f, k_ff, m_f, m_b, is_same)


@torch.no_grad()
@breakdowns()
def append(
    summary: PosteriorSummary,
    objective: Objective,
    num_new: int,
    wants_points: Callable[[Lost, int, int], bool] | None,
    num_inducing: int,
    lost_before: Tensor | None = None,
    recalled: Recalled | None = None,
) -> Appended | None:
    """The posterior of all data, where prior and inducing points stay.

    Args:
        summary: The posterior of before.
        objective: The bound on all that is remembered, at fixed hyperparameters.
        num_new: How many of its data, the last ones, are not in the summary.
        wants_points: Whether new data need inducing points, see
            :class:`~torch_ssgp.inducing.InducingPolicy`; ``None`` where they are given.
        num_inducing: The largest number of them.
        lost_before: ``(*batch,)``, nats that they lose of the data before, where these
            are remembered without that loss.
        recalled: What :func:`recall_at` has found for these data, if it was asked.

    Returns:
        ``None`` if the prior differs from that of the summary, or if new data need
        points of their own.
    """
    y = objective.data.y
    first = y.size(-1) - num_new
    data = objective.data.narrow(first, num_new)
    old = recalled or recall_at(
        summary, objective.mean, objective.kernel, data.x, objective.jitter
    )
    if not old.is_same:
        return None
    before, A_f = old.rows, old.A_f
    noise, s = objective.noises()
    own = None if objective.shared_noise else noise.expand(y.shape)[..., first:]
    weighed = fn.weigh(data.y - old.m_f, own, s, data.weight)
    lost = old.k_ff - fn.squared_norm(A_f, -2)
    if weighed.root is not None:
        A_f, lost = A_f * weighed.root.unsqueeze(-2), lost * weighed.root.square()
    new = Projection(
        L=before.L,
        A=A_f,
        r=weighed.r,
        loss=lost.sum(-1),
        rho=before.rho + weighed.rho,
        n=before.n + data.num_data,
    )
    rows = new._replace(
        A=torch.cat(fn.broadcast_matrices(before.A, A_f), -1),
        r=torch.cat(fn.broadcast_rows(before.r, weighed.r), -1),
    )
    loss = rows.loss / (2 * s)
    if lost_before is not None:  # with the noise of then
        loss = loss + lost_before.to(loss) * summary.noise_scale.to(s) / s
    if wants_points is not None:
        # What rows say is tr K; A has all of it but what is lost.
        said = loss + fn.squared_norm(rows.A, (-2, -1)) / (2 * s)
        num_data = objective.past.n + (
            y.size(-1)
            if objective.data.weight is None
            else (objective.data.weight > 0).sum(-1)
        )
        all_lost = Lost(lost / (2 * s.unsqueeze(-1)), loss, said, num_data)
        if wants_points(all_lost, summary.num_inducing, num_inducing):
            return None
    if rows.A.size(-1) > (1 + WAITING) * summary.num_inducing:
        rows = fn.compress(rows)
        now = fn.absorb(rows, old.m_b)
    else:
        added = fn.absorb(new, old.m_b)
        now = added._replace(
            U=torch.cat(fn.broadcast_matrices(old.past.U, added.U), -2),
            g=torch.cat(fn.broadcast_rows(old.past.g, added.g), -1),
        )
    fit = fn.fit(rows, s)
    if not bool(torch.isfinite(fit.bound.sum() + now.U.sum())):
        raise Breakdown("the new posterior is not finite")
    return Appended(now, *fit, loss, s)


def _agree(*pairs: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether values and those of before differ by rounding alone, on their scale."""
    tolerance = min(1e6 * torch.finfo(pairs[0][0].dtype).eps, 1e-6)
    close = (
        ((now - then).abs() <= tolerance * scale.amax()).all()
        for now, then, scale in pairs
    )
    return bool(torch.stack(list(close)).all())

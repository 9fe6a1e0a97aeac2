"""The mathematics of a strategy with a past, as pure functions of tensors.

Letters as in :mod:`torch_ssgp.variational`. Shapes, after batch dimensions: ``L``
``(m_b, m_b)``, Cholesky factor of ``K_bb``; ``K_ba`` ``(m_b, m_a)``; ``K_aa``
``(m_a, m_a)``, with jitter; ``same`` ``(m_b, m_a)``, which new points are which old
ones; ``U`` ``(p, m_a)`` and ``r`` ``(p,)``, rows of the past and their residuals;
whitened moments of q(b): ``mean`` ``(m_b,)``, ``covariance`` ``(m_b, m_b)``, and any
``root`` of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.functional import matvec, solve_lower, squared_norm

# A whitened variance below this is taken as this: a standard deviation of 1e-6 of the
# prior's, the least that float64 algebra can still tell from certainty.
MIN_VARIANCE = 1e-12
# In standard deviations. Keeps targets finite where q moved and did not narrow at all.
MAX_SURPRISE = 1e6


class SitePast(NamedTuple):
    r"""A Gaussian q(b) divided by its prior, as pseudo-observations with unit noise.

    Attributes:
        U: ``(*batch, m, m)``, observed rows; a row of zeros says nothing.
        g: ``(*batch, m)``, their targets, in function space.
        log_evidence: ``(*batch,)``, :math:`\log E`, what the rows were worth under
            the prior they were made with (without the factor :math:`(2\pi)^{-m/2}`).
        num_clipped: ``(*batch,)``, directions in which q is wider than the prior.
    """

    U: Tensor
    g: Tensor
    log_evidence: Tensor
    num_clipped: Tensor


class KLTerms(NamedTuple):
    r"""The parts of a streaming KL divergence.

    Attributes:
        prior: ``(*batch,)``, :math:`KL(q(b) \| p(b))`.
        old_data: ``(*batch,)``,
            :math:`KL(q(a) \| q_{old}(a)) - KL(q(a) \| p_{old}(a))`; zero if there is
            no past. May be negative: it is a difference.
    """

    prior: Tensor
    old_data: Tensor


def cross_covariance(K_ba: Tensor, L: Tensor, same: Tensor) -> Tensor:
    r"""``K_ba`` in which a point that was kept is the same variable, jitter included.

    The column of a kept point takes the value of its column in
    :math:`K_{bb} = L L^\top`, without which every absorb would leak information. Its
    gradient stays that of the kernel, because old points do not move with new ones.
    """
    columns = L @ (L.mT @ same.to(L.dtype))
    kept = same.any(-2, keepdim=True)
    return K_ba + torch.where(kept, columns - K_ba, 0.0).detach()


def expected_misfit(
    L: Tensor,
    K_ba: Tensor,
    K_aa: Tensor,
    same: Tensor,
    U: Tensor,
    r: Tensor,
    mean: Tensor,
    covariance: Tensor | None,
) -> Tensor:
    r"""How badly q(b) explains the pseudo-observations of the past.

    .. math::
        \tfrac12 E_{q(a)} \|g - U a\|^2 = \tfrac12 \big( \|r - G^\top \mu\|^2
            + \mathrm{tr}\, U (K_{aa} - A_a^\top A_a) U^\top
            + \mathrm{tr}\, G^\top S G \big),

    with :math:`A_a = L^{-1} K_{ba}`, :math:`G = A_a U^\top` and :math:`r = g - U m_a`.
    If q is a point, it has no ``covariance``. The result is not negative.
    """
    A_a = solve_lower(L, K_ba)
    G = A_a @ U.mT
    # A kept point is known given b: its residual is zero, whatever rounding says.
    U_moved = U * ~same.any(-2, keepdim=True)
    R_a = K_aa - A_a.mT @ A_a
    misfit = squared_norm(r - matvec(G.mT, mean))
    misfit = misfit + ((U_moved @ R_a) * U_moved).sum((-2, -1))
    if covariance is not None:
        misfit = misfit + ((covariance @ G) * G).sum((-2, -1))
    return 0.5 * misfit


def divide_by_prior(
    L: Tensor, m_b: Tensor, mean: Tensor, root: Tensor, max_surprise: float
) -> SitePast:
    r"""The data that would turn the prior into q(b): ``q(b) / p(b)`` in site form.

    With :math:`S = V \mathrm{diag}(\sigma_i) V^\top` in whitened space and
    :math:`\mu_i = (V^\top \mu)_i`, direction :math:`i` was observed with precision
    :math:`\lambda_i = 1/\sigma_i - 1` and residual :math:`r_i`,

    .. math::
        U = \mathrm{diag}(\sqrt{\lambda_i})\, V^\top L^{-1}, \quad
        r_i = \frac{\mu_i}{\sqrt{\sigma_i (1 - \sigma_i)}}, \quad
        g = r + U m_b, \quad
        \log E = \tfrac12 \sum_i \Big( \log \sigma_i
            - \frac{\mu_i^2}{1 - \sigma_i} \Big).

    Data never make a Gaussian wider than its prior, but a q that has not converged may
    be (:math:`\sigma_i > 1`). Nor do data move a mean without making it more certain.
    So such a direction keeps its mean, and gets the precision of an observation that
    was surprising by ``max_surprise`` standard deviations,
    :math:`1 - \sigma_i = \mu_i^2 / z_{max}^2`, at most a half. Where the mean has not
    moved, nothing was observed.
    """
    # Singular values of the root, not eigenvalues of S: small ones keep their digits.
    V, root_variance, _ = torch.linalg.svd(root)
    variance = root_variance.square().clamp_min(MIN_VARIANCE)
    mu = matvec(V.mT, mean)

    least = torch.where(variance < 1, mu / MAX_SURPRISE, mu / max_surprise)
    least = least.square().clamp_max(0.5)
    gain = torch.maximum(1 - variance, least)  # 1 - sigma
    informed = gain > torch.finfo(gain.dtype).tiny
    gain = torch.where(informed, gain, 1.0)
    num_clipped = (variance > 1 + 1e-6).sum(-1)  # not what rounding explains
    variance = torch.where(gain > 1 - variance, 1 - gain, variance)
    variance = torch.where(informed, variance, 1.0)

    # sqrt(lambda), r and the evidence of directions that say nothing are zero.
    scale = torch.where(informed, (gain / variance).sqrt(), 0.0)
    r = torch.where(informed, mu / (gain * variance).sqrt(), 0.0)
    surprise = torch.where(informed, mu.square() / gain, 0.0)
    zero = torch.zeros_like(surprise[..., 0])
    rows = fn.Projection(L, V * scale.unsqueeze(-2), r, loss=zero, rho=zero, n=zero)
    past = fn.absorb(rows, m_b)
    log_evidence = 0.5 * (variance.log() - surprise).sum(-1)
    return SitePast(past.U, past.g, log_evidence, num_clipped)


def predict_whitened(
    L: Tensor, L_c: Tensor, K_bc: Tensor, mean: Tensor, root: Tensor
) -> tuple[Tensor, Tensor]:
    r"""q at other inducing points, whitened there: its mean, and a Cholesky factor.

    .. math::
        \mu_c = B^\top \mu, \quad S_c = I - B^\top B + B^\top S B, \quad
        B = L^{-1} K_{bc} L_c^{-\top}
    """
    B = solve_lower(L_c, solve_lower(L, K_bc).mT).mT
    eye = torch.eye(B.size(-1), dtype=B.dtype, device=B.device)
    S = eye - B.mT @ B + B.mT @ root @ (root.mT @ B)
    # Eigenvalues, not a Cholesky factorisation: what is nearly certain must not fail.
    values, vectors = torch.linalg.eigh(0.5 * (S + S.mT))
    half = vectors * values.clamp_min(MIN_VARIANCE).sqrt().unsqueeze(-2)
    R = torch.linalg.qr(half.mT).R
    sign = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(R.dtype)
    return matvec(B.mT, mean), (R * sign.unsqueeze(-1)).mT

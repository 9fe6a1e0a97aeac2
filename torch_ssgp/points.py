"""Sets of points: thin them, merge copies, drop redundant ones."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from torch_ssgp.functional import cholesky, solve_lower
from torch_ssgp.kernels import Form
from torch_ssgp.modules import inducing_gram, same_points


def merge_duplicates(kernel: Kernel, z: Tensor, jitter: float) -> Tensor:
    r"""Inducing points without those that the jitter hides behind an earlier one.

    Two values are the same in practice if
    :math:`\mathrm{var}(f(z_i) - f(z_j)) \le j (k_i + k_j)`, no more than their jitter.

    Args:
        kernel: Prior covariance.
        z: ``(*batch, m, d)``.
        jitter: Relative jitter :math:`j`.

    Returns:
        ``(*batch, at most m, d)``; streams with fewer points than others keep some
        copies, as all have the same number.
    """
    K = inducing_gram(kernel, z, 0.0).K_zz
    k = K.diagonal(dim1=-2, dim2=-1)
    distance = k.unsqueeze(-1) + k.unsqueeze(-2) - 2 * K
    close = distance <= jitter * (k.unsqueeze(-1) + k.unsqueeze(-2))
    close = close.tril(-1)
    if not bool(close.any()):
        return z
    kept = torch.ones_like(close[..., 0])
    for i in range(1, z.size(-2)):  # in order: a copy of a copy may be far enough
        kept[..., i] = ~(close[..., i, :] & kept).any(-1)
    count = int(kept.sum(-1).max())
    order = (~kept).to(torch.uint8).argsort(dim=-1, stable=True)[..., :count]
    return z.gather(-2, order.unsqueeze(-1).expand(*order.shape, z.size(-1)))


def unexplained(
    kernel: Kernel, points: Tensor, given: Tensor, jitter: float
) -> tuple[Tensor, Tensor]:
    """Covariance of ``points`` given ``given``, and the jitter in it."""
    num_given = given.size(-2)
    every = torch.cat([given, points], -2)
    K, _, added = inducing_gram(kernel, every, jitter)
    K_gg, K_gp = K[..., :num_given, :].split([num_given, points.size(-2)], -1)
    same = same_points(given, points)
    K_gp = torch.where(same, K_gg.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), K_gp)
    A = solve_lower(cholesky(K_gg), K_gp)
    E = K[..., num_given:, num_given:] - A.mT @ A
    taken = same.any(-2)
    E = E.masked_fill(taken.unsqueeze(-1) | taken.unsqueeze(-2), 0.0)
    return E, added[..., num_given:]


def without_least_telling(
    form: Form,
    z: Tensor,
    jitter: float,
    points: Tensor,
    U: Tensor,
    root: Tensor,
    count: int,
) -> Tensor:
    r"""The ``count`` points that are left when the least telling go, one by one.

    Without point :math:`j` rows :math:`W` on the function at points :math:`X` lose

    .. math:: \|T_{j:}\|^2 / P_{jj}, \quad P = K_{zz}^{-1}, \quad T = P K_{zX} W^\top.

    Args:
        form: Prior covariance.
        z: ``(*batch, m, d)``.
        jitter: Relative jitter.
        points: ``(*batch, m_s + n, d)``: those of the past, then inputs of data.
        U: ``(*batch, p, m_s)``, rows of the past.
        root: ``(*batch, n)``, weights of the data in their rows.
        count: The number of points to keep.
    """
    K_zz, K, _ = inducing_gram(form, z, jitter, points)
    K_zs, K_zf = K[..., : U.size(-1)], K[..., U.size(-1) :]
    P = torch.cholesky_inverse(cholesky(K_zz))
    T = P @ torch.cat([K_zs @ U.mT, K_zf * root.unsqueeze(-2)], -1)
    while z.size(-2) > count:
        p = P.diagonal(dim1=-2, dim2=-1)
        j = (T.square().sum(-1) / p).argmin(-1, keepdim=True)
        kept = torch.arange(z.size(-2) - 1, device=z.device).expand(*j.shape[:-1], -1)
        kept = (kept + (kept >= j)).unsqueeze(-1)
        P_j = P.gather(-2, j.unsqueeze(-1).expand(*j.shape, P.size(-1)))
        T_j = T.gather(-2, j.unsqueeze(-1).expand(*j.shape, T.size(-1)))
        ratio = P_j.mT / p.gather(-1, j).unsqueeze(-1)
        z, P, T = (
            t.expand(*kept.shape[:-2], *t.shape[-2:]).gather(
                -2, kept.expand(*kept.shape[:-1], t.size(-1))
            )
            for t in (z, P - ratio * P_j, T - ratio * T_j)
        )
        P = P.gather(-1, kept.mT.expand(*kept.shape[:-2], P.size(-2), -1))
    return z


def evenly(x: Tensor, count: int) -> Tensor:
    """Indices of ``count`` rows of ``x``, evenly spread."""
    return torch.linspace(0, x.size(-2) - 1, count, device=x.device).long()

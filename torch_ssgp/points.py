"""Sets of points: thin them, merge copies, drop what the others already say."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from torch_ssgp.functional import cholesky
from torch_ssgp.kernels import Form
from torch_ssgp.modules import inducing_gram


def merge_duplicates(kernel: Kernel, z: Tensor, jitter: float) -> Tensor:
    r"""Inducing points without those the jitter cannot tell from an earlier one.

    Two values are the same for all purposes if
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


def without_most_redundant(
    form: Form, z: Tensor, jitter: float, num_new: int
) -> Tensor:
    """All but the point that the others say most about; the last ``num_new`` stay."""
    K = inducing_gram(form, z, jitter).K_zz
    precision = torch.cholesky_inverse(cholesky(K)).diagonal(dim1=-2, dim2=-1)
    # Of the prior variance, what is left given the others.
    left = 1 / (precision * K.diagonal(dim1=-2, dim2=-1))
    left = left[..., : z.size(-2) - num_new]
    drop = left.argmin(-1, keepdim=True)
    index = torch.arange(z.size(-2) - 1, device=z.device).expand(*drop.shape[:-1], -1)
    index = index + (index >= drop)
    return z.gather(-2, index.unsqueeze(-1).expand(*index.shape, z.size(-1)))


def evenly(x: Tensor, count: int) -> Tensor:
    """Indices of ``count`` rows of ``x``, evenly spread."""
    return torch.linspace(0, x.size(-2) - 1, count, device=x.device).long()

"""Sets of points: thin them, merge copies, drop redundant ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from torch_ssgp.functional import broadcast_matrices, cholesky
from torch_ssgp.modules import inducing_gram

# Squared partial correlation above which one point stands in for another.
ALIKE = 0.3


class Lost(NamedTuple):
    """What inducing points lose where nothing is learned, in nats.

    Attributes:
        new: ``(*batch, n)``, of each new datum.
        total: ``(*batch,)``, of all data.
        said: ``(*batch,)``, what all data say.
        num_data: ``()`` or ``(*batch,)``, how many they are.
    """

    new: Tensor
    total: Tensor
    said: Tensor
    num_data: Tensor


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


def least_missed(K: Tensor, G: Tensor, capacity: int) -> Tensor:
    r"""All points but those that the rows miss least, one round after the other.

    With :math:`P = K^{-1}`, point :math:`j` is known from the others up to a variance
    of :math:`1 / P_{jj}`, and leaving it out loses :math:`G_{jj} / P_{jj}`. Leaving out
    a set :math:`J` replaces :math:`f_J` by :math:`-T f`,

    .. math::
        T = P_{JJ}^{-1} P_{J:}, \quad P \leftarrow P - P_{:J} T, \quad
        G \leftarrow (I - I_{:J} T)^\top G (I - I_{:J} T).

    Points that stand in for each other do not go in the same round.

    Args:
        K: ``(*batch, n, n)``, prior covariance.
        G: ``(*batch, n, n)``, what rows say about the points.
        capacity: The number of points to keep.

    Returns:
        Indices ``(*batch, capacity)``, in order.
    """
    P = torch.cholesky_inverse(cholesky(K))
    P = broadcast_matrices(P, G)[0].contiguous()
    batch = P.shape[:-2]
    left = torch.arange(P.size(-1), device=P.device).expand(*batch, -1)
    gone = torch.zeros_like(left, dtype=torch.bool)
    num_left = P.size(-1)
    while num_left > capacity:
        variance = diagonal(P).reciprocal()
        missed = torch.where(gone, torch.inf, variance * diagonal(G))
        most = -(-(num_left - capacity) // 2)
        J = missed.topk(min(2 * most, num_left), largest=False).indices
        v = variance.gather(-1, J)
        partial = _columns(_rows(P, J), J).square() * v.unsqueeze(-1) * v.unsqueeze(-2)
        waits = (partial > ALIKE).tril(-1).any(-1)
        size = min(int((~waits).sum(-1).min()), most)
        order = waits.to(torch.uint8).argsort(dim=-1, stable=True)[..., :size]
        J = J.gather(-1, order)
        P_J, G_J = _rows(P, J), _rows(G, J)
        T = torch.cholesky_solve(P_J, cholesky(_columns(P_J, J)))
        X = 0.5 * (_columns(G_J, J) @ T) - G_J
        gone, num_left = gone.scatter(-1, J, True), num_left - size
        if 4 * num_left < 3 * P.size(-1) or num_left == capacity:
            alive = gone.to(torch.uint8).argsort(dim=-1, stable=True)[..., :num_left]
            left, gone = left.gather(-1, alive), gone.gather(-1, alive)
            if num_left == capacity:
                break
            P, G = (_columns(_rows(t, alive), alive) for t in (P, G))
            P_J, T, X = (_columns(t, alive) for t in (P_J, T, X))
        P -= P_J.mT @ T
        G += torch.cat([T, X], -2).mT @ torch.cat([X, T], -2)
    return left


def _rows(A: Tensor, index: Tensor) -> Tensor:
    if index.ndim == 1:
        return A[index]
    return A.gather(-2, index.unsqueeze(-1).expand(*index.shape, A.size(-1)))


def _columns(A: Tensor, index: Tensor) -> Tensor:
    if index.ndim == 1:
        return A[:, index]
    return A.gather(-1, index.unsqueeze(-2).expand(*A.shape[:-1], index.size(-1)))


def diagonal(A: Tensor) -> Tensor:
    """The diagonal of every matrix."""
    return A.diagonal(dim1=-2, dim2=-1)


def evenly(x: Tensor, count: int) -> Tensor:
    """Indices of ``count`` rows of ``x``, evenly spread."""
    return torch.linspace(0, x.size(-2) - 1, count, device=x.device).long()

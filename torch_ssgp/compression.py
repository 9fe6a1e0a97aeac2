"""Which points a memory goes on with, once it has more than it may keep."""

from __future__ import annotations

import torch
from gpytorch.kernels import MaternKernel
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.memory import Rows
from torch_ssgp.modules import gram
from torch_ssgp.points import diagonal, evenly, least_missed

# Raw data that may wait for the next compression, as a share of the memory: a stream of
# single points is then compressed once for many updates.
OVERFLOW = 0.25
# Lengthscale under which points are judged, in units of their spacing. The kernel is
# rough: one that is smooth calls all points of a dense batch known, and cannot tell
# which of them matter.
ROUGHNESS = 6.0
# Raw data beyond this number are thinned out evenly before points are chosen.
MAX_CANDIDATES = 1000


# -- compressing ------------------------------------------------------------------


def is_full(num_points: int, capacity: int) -> bool:
    """Whether so many points are more than a memory of this capacity lets wait."""
    return num_points > capacity + int(OVERFLOW * capacity)


def choose_points(
    rows: Rows, x: Tensor, weight: Tensor, capacity: int, jitter: float, kept: Tensor
) -> Tensor:
    """The points that a memory goes on with.

    They are judged under a rough kernel of our own, with lengthscales in units of the
    spacing that so many points have: what the present hyperparameters believe must not
    throw away what would refute them. Inputs that coincide share a point.

    Args:
        rows: The compressed part so far.
        x: ``(*batch, n, d)``, inputs of raw data.
        weight: ``(*batch, n)``, their precision in units of the rows.
        capacity: Number of points allowed.
        jitter: Relative jitter.
        kept: ``(*batch, m, d)``, points to keep in any case; perhaps none.

    Returns:
        ``(*batch, at most capacity, d)``, those to be kept first.
    """
    if kept.size(-2) >= capacity:
        return kept
    limit = max(MAX_CANDIDATES, 2 * capacity)
    if x.size(-2) > limit:
        some = evenly(x, limit)
        x, weight = x[..., some, :], weight[..., some] * (x.size(-2) / limit)
    points = torch.cat([kept, rows.points, x], -2)
    first, copy_of = first_of_each(points)
    if len(first) <= capacity:
        return points[..., first, :]
    # G = Wᵀ W of the rows W that observe the points.
    count, num_kept, num_old = points.size(-2), kept.size(-2), rows.points.size(-2)
    G = points.new_zeros(*weight.shape[:-1], count, count)
    G[..., num_kept : num_kept + num_old, num_kept : num_kept + num_old] = (
        rows.past.U.mT @ rows.past.U
    )
    G.diagonal(dim1=-2, dim2=-1)[..., num_kept + num_old :] = weight
    if len(first) < count:
        G = G.new_zeros(*G.shape[:-2], len(first), count).index_add_(-2, copy_of, G)
        G = G.new_zeros(*G.shape[:-1], len(first)).index_add_(-1, copy_of, G)
        points = points[..., first, :]
    K = gram(_rough_kernel(points, capacity), points, points)
    # The jitter, or more where rounding takes it.
    nugget = max(jitter, 10 * points.size(-2) * torch.finfo(K.dtype).eps)
    diagonal(K).add_(nugget)
    index = least_missed(K, G, capacity, num_kept)
    return points.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.size(-1)))


def first_of_each(points: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the points that no earlier one equals in all streams.

    Args:
        points: ``(*batch, n, d)``.

    Returns:
        The indices, in order, and ``(n,)`` which of these each point equals.
    """
    flat = points.movedim(-2, 0).flatten(1)  # streams side by side
    distinct, inverse = torch.unique(flat, dim=0, return_inverse=True)
    order = torch.arange(len(flat), device=flat.device)
    first = order.new_full((len(distinct),), len(flat))
    first, by_place = first.scatter_reduce(0, inverse, order, "amin").sort()
    return first, by_place.argsort()[inverse]


def _rough_kernel(points: Tensor, capacity: int) -> MaternKernel:
    num_dims = points.size(-1)
    span = points.amax(-2, keepdim=True) - points.amin(-2, keepdim=True)
    span = torch.where(span > 0, span, torch.ones_like(span))
    kernel = MaternKernel(ard_num_dims=num_dims, batch_shape=points.shape[:-2])
    kernel = kernel.to(points)
    kernel.lengthscale = ROUGHNESS * span / capacity ** (1 / num_dims)
    return kernel.requires_grad_(False)


# -- forgetting a stretch ---------------------------------------------------------


def older_half(points: Tensor, dim: int, sign: int) -> Tensor:
    """The earlier half of the points, ``(*batch, r // 2, d)``; see below."""
    order = (sign * points[..., dim]).argsort(-1)[..., : points.size(-2) // 2]
    index = order.unsqueeze(-1).expand(*order.shape, points.size(-1))
    return points.gather(-2, index)


def recent_half(rows: Rows, dim: int, sign: int) -> Rows:
    r"""What rows say about the later half of their points.

    The values at the others are integrated out of the likelihood, with nothing known
    about them: with :math:`[U_{old}, U_{new}] = Q R`, the rows of :math:`R` below the
    first block. Data and residual are counted in proportion to the precision that is
    left.

    Args:
        rows: Pseudo-observations at points.
        dim: The input that tells earlier from later.
        sign: 1 if it grows with time, -1 if it falls.
    """
    points, (U, g, rho, n) = rows
    count = points.size(-2) // 2
    order = (sign * points[..., dim]).argsort(-1)
    ordered = points.gather(-2, order.unsqueeze(-1).expand(points.shape))
    batch = torch.broadcast_shapes(order.shape[:-1], U.shape[:-2])
    index = order.unsqueeze(-2).expand(*batch, U.size(-2), -1)
    U = U.expand(*batch, -1, -1).gather(-1, index)
    size = fn.squared_norm(U, (-2, -1))  # zero of a stream that has no reading yet
    share = fn.squared_norm(U[..., count:], (-2, -1)) / torch.where(size > 0, size, 1)
    g = g.expand(*batch, -1).unsqueeze(-1)
    R = torch.linalg.qr(torch.cat([U, g], -1), mode="r").R[..., count:, :]
    num_left = points.size(-2) - count
    U, g = R[..., :num_left, count:-1], R[..., :num_left, -1]
    residual = fn.squared_norm(R[..., num_left:, -1])
    past = PseudoObservations(U, g, share * (rho + residual), share * n)
    return Rows(ordered[..., count:, :], past)

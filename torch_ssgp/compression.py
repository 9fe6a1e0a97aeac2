"""Which points a memory goes on with, once it has more than it may keep."""

from __future__ import annotations

import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.functional import PseudoObservations, cholesky
from torch_ssgp.memory import Rows
from torch_ssgp.modules import gram
from torch_ssgp.points import evenly

# Raw data that may wait for the next compression, as a share of the memory: a stream of
# single points is then compressed once for many updates.
OVERFLOW = 0.25
# Lengthscale under which points are judged, in units of their spacing.
ROUGHNESS = 1.5
# Squared partial correlation above which one point stands in for another.
ALIKE = 0.3
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

    They are judged under a rough kernel of our own, with lengthscales of the spacing
    that so many points have: what the present hyperparameters believe must not throw
    away what would refute them. Inputs that coincide share a point.

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
    _diagonal(K).add_(nugget)
    index = _least_missed(K, G, capacity, num_kept)
    return points.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.size(-1)))


def _least_missed(K: Tensor, G: Tensor, capacity: int, num_kept: int) -> Tensor:
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
        num_kept: How many of them, the first ones, stay in any case.

    Returns:
        Indices ``(*batch, capacity)``, in order.
    """
    P = torch.cholesky_inverse(cholesky(K))
    batch = torch.broadcast_shapes(P.shape[:-2], G.shape[:-2])
    P = P.expand(*batch, -1, -1).contiguous()
    left = torch.arange(P.size(-1), device=P.device).expand(*batch, -1)
    gone = torch.zeros_like(left, dtype=torch.bool)
    num_left = P.size(-1)
    while num_left > capacity:
        variance = _diagonal(P).reciprocal()
        missed = torch.where(gone, torch.inf, variance * _diagonal(G))
        missed[..., :num_kept] = torch.inf
        most = -(-(num_left - capacity) // 2)
        J = missed.topk(min(2 * most, num_left - num_kept), largest=False).indices
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


def _diagonal(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1)


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


def _rough_kernel(points: Tensor, capacity: int) -> RBFKernel:
    num_dims = points.size(-1)
    span = points.amax(-2, keepdim=True) - points.amin(-2, keepdim=True)
    span = torch.where(span > 0, span, torch.ones_like(span))
    kernel = RBFKernel(ard_num_dims=num_dims, batch_shape=points.shape[:-2]).to(points)
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

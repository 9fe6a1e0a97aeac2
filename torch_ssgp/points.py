r"""Points: thin them, merge copies, take the best first, cover all that was seen.

With :math:`W` the rows that observe the candidates and :math:`E` their prior covariance
that the points taken so far leave unexplained, projecting on these points loses
:math:`t / 2s` nats, :math:`t = \mathrm{tr}\, W E W^\top`. Candidate :math:`j` lowers
:math:`t` by :math:`(E W^\top W E)_{jj} / E_{jj}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from torch_ssgp.exceptions import Breakdown
from torch_ssgp.memory import Rows
from torch_ssgp.modules import inducing_gram
from torch_ssgp.radial import far

# Lengthscale under which points are judged, in units of the spacing that a memory of so
# many points has.
SPACINGS = 1.5
MAX_HALVINGS = 20  # of that lengthscale, until it tells enough points apart
# Raw data beyond this number are thinned out evenly before points are chosen.
MAX_CANDIDATES = 1000
EXACT = "donot_use_mm_for_euclid_dist"  # distances to rounding, far from zero too
BLOCK = 16  # choices between two looks at what is left, at most: a device waits there


def diagonal(A: Tensor) -> Tensor:
    """The diagonal of every matrix."""
    return A.diagonal(dim1=-2, dim2=-1)


def evenly(x: Tensor, count: int) -> Tensor:
    """Indices of ``count`` rows of ``x``, evenly spread."""
    return torch.linspace(0, x.size(-2) - 1, count, device=x.device).long()


def thinned(x: Tensor, weight: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """At most ``limit`` data, evenly spread, with the weight of all."""
    if x.size(-2) <= limit:
        return x, weight
    some = evenly(x, limit)
    return x[..., some, :], weight[..., some] * (x.size(-2) / limit)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``(*batch, m, d)`` of ``x`` at indices ``(*batch, m)``."""
    return x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.size(-1)))


def first_of_each(points: Tensor) -> tuple[Tensor, Tensor]:
    """Which points ``(*batch, n, d)`` no earlier one equals in all streams.

    Their indices, in order, and ``(n,)`` which of these each point equals.
    """
    flat = points.movedim(-2, 0).flatten(1)  # streams side by side
    distinct, inverse = torch.unique(flat, dim=0, return_inverse=True)
    order = torch.arange(len(flat), device=flat.device)
    first = order.new_full((len(distinct),), len(flat))
    first, by_place = first.scatter_reduce(0, inverse, order, "amin").sort()
    return first, by_place.argsort()[inverse]


def merge_duplicates(kernel: Kernel, z: Tensor, jitter: float) -> Tensor:
    r"""Inducing points without those that the jitter hides behind an earlier one.

    Two values are the same in practice if
    :math:`\mathrm{var}(f(z_i) - f(z_j)) \le j (k_i + k_j)`, no more than their jitter.
    Streams with fewer points than others keep some copies, as all have the same number.

    Args:
        kernel: Prior covariance.
        z: ``(*batch, m, d)``.
        jitter: Relative jitter :math:`j`.
    """
    K = inducing_gram(kernel, z, 0.0).K_zz
    total = diagonal(K).unsqueeze(-1) + diagonal(K).unsqueeze(-2)
    close = (total - 2 * K <= jitter * total).tril(-1)
    if not bool(close.any()):
        return z
    kept = torch.ones_like(close[..., 0])
    for i in range(1, z.size(-2)):  # in order: a copy of a copy may be far enough
        kept[..., i] = ~(close[..., i, :] & kept).any(-1)
    count = int(kept.sum(-1).max())
    return pick(z, (~kept).to(torch.uint8).argsort(dim=-1, stable=True)[..., :count])


# -- the best first -----------------------------------------------------------------


class Observed(NamedTuple):
    r"""What rows say about candidates: :math:`W^\top W`, block by block.

    Attributes:
        old: ``(*batch, m, m)``, of the first candidates.
        weight: ``(*batch, n)``, of the others, each observed alone.
    """

    old: Tensor
    weight: Tensor

    def after(self, V: Tensor) -> Tensor:
        """``V Wᵀ W``."""
        num_old = self.old.size(-1)
        new = self.weight.unsqueeze(-2) * V[..., num_old:]
        return torch.cat([V[..., :num_old] @ self.old, new], -1)


class Taken(NamedTuple):
    """Candidates in the order in which they were taken.

    Attributes:
        order: ``(*batch, m)``, their indices.
        useful: ``(*batch, m)``, whether it was a new point, or a copy because a stream
            had no more to tell apart.
        gain: ``(*batch, m)``, by how much it lowered ``t``.
        t: ``(*batch,)``, before any was taken.
    """

    order: Tensor
    useful: Tensor
    gain: Tensor
    t: Tensor


# From e, the diagonal of E, and h, that of E Wᵀ W E, to scores.
Score = Callable[[Tensor, Tensor], Tensor]


def information(e: Tensor, h: Tensor) -> Tensor:
    """What ``t`` falls by."""
    return h / e


def take(
    K: Tensor,
    observed: Observed,
    count: int,
    score: Score,
    floor: Tensor,
    first: Tensor | None = None,
) -> Taken:
    """At most ``count`` candidates, the one with the best score first.

    Args:
        K: ``(*batch, k, k)``, prior covariance of the candidates, with jitter.
        observed: What rows say about them.
        count: How many to take.
        score: The score of each candidate.
        floor: ``(*batch, k)``, unexplained variance of what cannot be told apart.
        first: ``(*batch, k)``, candidates to be taken before all others.
    """
    e, KW = diagonal(K).clone(), observed.after(K)
    h, t = (K * KW).sum(-1), diagonal(KW).sum(-1)
    # E = K - CᵀC is never formed: a row, or a product with a few vectors, is cheaper.
    C = K.new_zeros(*K.shape[:-2], count, K.size(-1))
    order: list[Tensor] = []
    useful: list[Tensor] = []
    gain: list[Tensor] = []
    k, is_left = 0, True
    while k < count and is_left:
        # h follows after every block of points, in one product. Within it e is exact,
        # and h falls with its square as that of a neighbour does.
        shape = h.clamp_min(0) / torch.where(e > 0, e, 1).square()
        before, end = k, k + max(min(k // 8, BLOCK, count - k), 1)
        for k in range(before, end):
            scores = score(e, e.square().mul_(shape))
            if first is not None:
                scores = scores.masked_fill(first, torch.inf)
            best, j = scores.masked_fill(e <= floor, -torch.inf).max(-1, keepdim=True)
            # A stream that has no more to tell apart takes a copy, which says nothing.
            is_new = best > -torch.inf
            pivot = e.gather(-1, j).masked_fill_(~is_new, torch.inf)
            C[..., k, :] = c = _row(K, C[..., :k, :], j).mul_(pivot.rsqrt())
            e.addcmul_(c, c, value=-1).scatter_(-1, j, 0.0)
            order.append(j)
            useful.append(is_new)
        k, old, new = end, C[..., :before, :], C[..., before:end, :]
        # Few rows times a matrix: its transpose takes twice the time.
        V = observed.after(new)
        VC, VE = V @ new.mT, V @ K - (V @ old.mT) @ old
        h += (new * (VC @ new - 2 * VE)).sum(-2)
        gain.append(diagonal(VC))
        is_left = bool(is_new.any())
    taken = [torch.cat(each, -1) for each in (order, useful, gain)]
    # Steps after the last useful candidate chose copies of what is already there.
    num_useful = int(taken[1].reshape(-1, k).any(0).sum())
    if num_useful == 0 and not bool(torch.isfinite(K).all()):
        raise Breakdown("the prior covariance of the candidates is not finite")
    # Where the function is known, as that of a linear kernel at zero, one point stays.
    some = slice(max(num_useful, 1))
    return Taken(taken[0][..., some], taken[1][..., some], taken[2][..., some], t)


def _row(K: Tensor, C: Tensor, j: Tensor) -> Tensor:
    """Row ``j`` of ``K - CᵀC``, ``(*batch, k)``."""
    row = pick(K, j)
    if C.size(-2):
        at_j = C.gather(-1, j.unsqueeze(-2).expand(*C.shape[:-1], 1))
        row -= at_j.mT @ C
    return row.squeeze(-2)


# -- what a compression leaves -------------------------------------------------------


def choose_points(
    rows: Rows, x: Tensor, weight: Tensor, capacity: int, jitter: float, kept: Tensor
) -> Tensor:
    """The points that a memory goes on with.

    They are judged under a kernel of our own, with lengthscales in units of the spacing
    that so many points have: what the present hyperparameters believe must not throw
    away what would refute them. The kernel is smooth, so that points cover all inputs:
    to a rough one each point speaks for itself, and points at which many data are known
    crowd out those where few are. Inputs that coincide share a point.

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
    x, weight = thinned(x, weight, max(MAX_CANDIDATES, 2 * capacity))
    points = torch.cat([kept, rows.points, x], -2)
    first, copy_of = first_of_each(points)
    points = points[..., first, :]
    if len(first) <= capacity:
        return points
    before = kept.size(-2), kept.size(-2) + rows.points.size(-2)
    num_kept, num_old = (int((first < count).sum()) for count in before)
    copy_of = copy_of[before[0] :]  # for the rows, and then for the data
    U, batch = rows.past.U, weight.shape[:-1]
    U = U.new_zeros(*U.shape[:-1], num_old).index_add_(-1, copy_of[: U.size(-1)], U)
    G = (U.mT @ U).expand(*batch, -1, -1).clone()
    weight = weight.new_zeros(*batch, len(first)).index_add_(
        -1, copy_of[rows.points.size(-2) :], weight
    )
    diagonal(G).add_(weight[..., :num_old])
    observed = Observed(G, weight[..., num_old:])
    return pick(points, _cover(points, observed, capacity, num_kept, jitter))


def _cover(
    points: Tensor, observed: Observed, capacity: int, num_kept: int, jitter: float
) -> Tensor:
    """Indices ``(*batch, capacity)`` of the points that say most, the best first.

    A kernel that is too smooth to tell so many points apart, as after an outlier among
    the inputs, is halved in its lengthscales; what it has chosen stays.
    """
    num_points, num_dims = points.shape[-2:]
    span = points.amax(-2, keepdim=True) - points.amin(-2, keepdim=True)
    unit = points / (SPACINGS * span.where(span > 0, 1.0) / capacity ** (1 / num_dims))
    # Points in the order in which they were taken; the others behind.
    order = torch.arange(num_points, device=points.device).expand(points.shape[:-1])
    place = torch.where(order < num_kept, order, num_points)
    floor = torch.full_like(unit[..., 0], 3 * jitter)
    first = place < num_points if num_kept else None
    for _ in range(MAX_HALVINGS):
        distance = torch.cdist(unit, unit, compute_mode=EXACT)
        K = distance.square_().mul_(-0.5).clamp_min_(far(unit)).exp_()
        diagonal(K).add_(jitter)
        taken = take(K, observed, capacity, information, floor, first)
        rank = torch.arange(taken.order.size(-1), device=points.device)
        rank = torch.where(taken.useful, rank, num_points)
        place = place.scatter_reduce(-1, taken.order, rank, "amin")
        first = place < num_points
        if bool(first.sum(-1).min() >= capacity):
            break
        unit = 2 * unit
    return place.argsort(dim=-1, stable=True)[..., :capacity]

"""Which points a compression leaves, chosen to cover what was seen."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ssgp.memory import Rows
from torch_ssgp.points import (
    Observed,
    diagonal,
    first_of_each,
    information,
    pick,
    take,
    thinned,
)
from torch_ssgp.radial import far

# Lengthscale under which points are judged, in units of the spacing that a memory of so
# many points has.
SPACINGS = 1.5
MAX_HALVINGS = 20  # of that lengthscale, until it tells enough points apart
# Raw data beyond this number are thinned out evenly before points are chosen.
MAX_CANDIDATES = 1000
EXACT = "donot_use_mm_for_euclid_dist"  # distances to rounding, far from zero too


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
    for _ in range(MAX_HALVINGS):
        distance = torch.cdist(unit, unit, compute_mode=EXACT)
        K = distance.square_().mul_(-0.5).clamp_min_(far(unit)).exp_()
        diagonal(K).add_(jitter)
        first = place < num_points
        taken = take(K, observed, capacity, information, floor, first)
        rank = torch.arange(taken.order.size(-1), device=points.device)
        rank = torch.where(taken.useful, rank, num_points)
        place = place.scatter_reduce(-1, taken.order, rank, "amin")
        if bool((place < num_points).sum(-1).min() >= capacity):
            break
        unit = 2 * unit
    return place.argsort(dim=-1, stable=True)[..., :capacity]

"""Two starts of one inner loop: keep the better, stream by stream."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ssgp.update.objective import Objective


@torch.no_grad()
def take_better(first: Objective, second: Objective) -> Tensor:
    """Keep the better of two starts in the first objective; where the second won.

    Streams that share no hyperparameters are compared separately, others by their sum.
    """
    scores = [
        objective.total()[0].nan_to_num(-torch.inf) for objective in (first, second)
    ]
    better = scores[1] > scores[0]
    batch = first.batch_shape
    pairs = list(
        zip(
            first.modules_of_prior.parameters(),
            second.modules_of_prior.parameters(),
            strict=True,
        )
    )
    shared = first.coupled or any(a.shape[: len(batch)] != batch for a, _ in pairs)
    if shared:
        better = (scores[1].sum() > scores[0].sum()).expand(batch)
    if bool(better.all()) or not bool(better.any()):
        return better
    for a, b in pairs:
        a.copy_(choose(better, b, a))
    count = max(first.z.size(-2), second.z.size(-2))
    z, other = (_padded(objective.z.detach(), count) for objective in (first, second))
    first.start_at(choose(better, other, z), learn=first.z.requires_grad)
    return better


def _padded(z: Tensor, count: int) -> Tensor:
    """``count`` points: copies of the first fill up, and change nothing."""
    more = z[..., :1, :].expand(*z.shape[:-2], count - z.size(-2), z.size(-1))
    return torch.cat([z, more], -2)


def choose(condition: Tensor, value: Tensor, other: Tensor) -> Tensor:
    """``value`` of the streams for which ``condition`` holds, else ``other``."""
    shape = condition.shape + (1,) * (value.ndim - condition.ndim)
    return torch.where(condition.reshape(shape), value, other)

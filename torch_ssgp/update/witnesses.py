"""New data that bear no witness of a change, whatever the past predicts of them."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ssgp.memory import Data, Memory, extremes
from torch_ssgp.update.clock import ticking


def bears_witness(memory: Memory, data: Data, num_inducing: int) -> bool:
    """Whether data may speak for a change, or against one.

    The next piece of a map does not: it wants its whole range. Nor does a batch that
    arrives a second time: its outliers would confirm themselves, without noise.

    Args:
        memory: What is remembered.
        data: New data.
        num_inducing: The number of inducing points before.
    """
    is_large = data.y.size(-1) > num_inducing > 0
    is_map = is_large and ticking(memory, data, ties=True) is not None
    return not is_map and not is_repeated(memory, data)


def is_repeated(memory: Memory, data: Data) -> bool:
    """Whether a batch is the one before, sent again.

    Args:
        memory: What is remembered.
        data: New data.
    """
    count, num_raw = data.y.size(-1), memory.num_raw
    if not 1 < count <= num_raw:
        return False
    old = Data(memory.raw_x, memory.y).narrow(num_raw - count, count)
    return torch.equal(old.y.to(data.y), data.y) and torch.equal(
        old.x.to(data.x), data.x
    )


def has_all_classes(memory: Memory, data: Data, count: int) -> Tensor:
    """``(*batch,)``, whether the last labels have the classes of all before.

    Labels that arrive class by class contradict all that was known, and change
    nothing. Of several classes the first and the last stand for all.

    Args:
        memory: What is remembered.
        data: New labels.
        count: How many labels to look at, the new ones included.
    """
    num_old = min(count - data.y.size(-1), memory.num_raw)
    old = Data(memory.raw_x, memory.y, None, memory.weight)
    old = old.narrow(memory.num_raw - num_old, num_old)
    recent = extremes(extremes(data.y[..., :0], old).to(data.y), data)
    return (recent == extremes(memory.extremes.to(data.y), data)).all(-1)

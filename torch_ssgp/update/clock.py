"""Inputs that move on, past what inducing points can cover: what they left is dropped.

Most often an input is time, and every datum is later than the one before. Or the inputs
move from one range to another, and do not come back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.compression import first_of_each, older_half
from torch_ssgp.kernels import Form
from torch_ssgp.memory import Data, Memory
from torch_ssgp.modules import form_of

STARVED = 0.01  # nats per datum that inducing points lose when a stream outgrew them
UNRELATED = 0.05  # correlation below which the past says nothing about new data
TICKS = 4  # data in order that make an input a clock
MOVED = 16  # data beyond half of the points that have not come there by chance


class Clock(NamedTuple):
    """An input that grows as the stream goes on, or falls: time, as a rule.

    Attributes:
        dim: Which of the inputs.
        sign: Whether it grows (1) or falls (-1).
    """

    dim: int
    sign: int


def outgrown(
    kernel: Kernel | Form,
    memory: Memory,
    data: Data,
    is_followed: Tensor,
) -> Clock | None:
    """The clock of a stream that has outgrown its inducing points, if it has one.

    Points that must cover a whole time axis, or all ranges that inputs have left,
    cannot resolve the recent part. The oldest stretch is dropped, provided that it says
    nothing about the new data. Of a time axis, only if the stream is followed, so that
    each datum is predicted from those just before it.

    Args:
        kernel: Prior covariance.
        memory: What is remembered.
        data: New data.
        is_followed: ``(*batch,)``, whether much was known of them before.
    """
    if int(memory.base_key):  # a branch does not mix what is kept apart
        return None
    is_starved = memory.lost / memory.num_data > STARVED
    old = memory.compressed.points
    if not bool(is_starved.any()) or old.size(-2) < 2:
        return None
    clock = ticking(memory, data)
    if clock is not None and not bool((is_starved & is_followed).any()):
        return None
    clock = clock or moved(memory, data)
    if clock is None:
        return None
    x = _recent(memory, data)
    return None if _is_related(kernel, older_half(old, *clock), x) else clock


def ticking(memory: Memory, data: Data, ties: bool = False) -> Clock | None:
    """The input that has grown with every datum of late, or fallen, if there is one.

    Args:
        memory: What is remembered.
        data: New data.
        ties: Whether some data may have the same value, as those of a row of a map.
    """
    old = memory.compressed.points.to(data.x)
    x = _recent(memory, data)
    if x.size(-2) < TICKS:
        return None
    for sign in (1, -1):
        step = sign * x.diff(dim=-2)
        least, most = torch.aminmax(step, dim=-2)
        grows = (least >= 0) & (most > 0) if ties else least > 0
        if old.size(-2):
            low, high = torch.aminmax(sign * old, dim=-2)
            # Points that learn may have moved past the last datum, if not far.
            spacing = (high - low) / old.size(-2)
            grows = grows & (sign * x[..., 0, :] >= high - spacing)
        grows = grows.reshape(-1, x.size(-1)).all(0)
        if bool(grows.any()):
            return Clock(int(grows.int().argmax()), sign)
    return None


def moved(memory: Memory, data: Data) -> Clock | None:
    """The input along which all recent data lie beyond the older half of the points.

    And around the middle of the other half, which they would be left with: data that
    come to one place alone have not moved. Inputs that coincide are one witness.

    Args:
        memory: What is remembered.
        data: New data.
    """
    x = _recent(memory, data)
    x = x[..., first_of_each(x)[0], :]
    if x.size(-2) < MOVED:
        return None
    old = memory.compressed.points.to(data.x)
    for sign in (1, -1):
        low, high = torch.aminmax(sign * x, dim=-2)
        ordered = (sign * old).sort(-2).values
        size = old.size(-2)
        half, middle = ordered[..., size // 2 - 1, :], ordered[..., 3 * size // 4, :]
        is_beyond = (low > half) & (low < middle) & (middle < high)
        is_beyond = is_beyond.reshape(-1, x.size(-1)).all(0)
        if bool(is_beyond.any()):
            return Clock(int(is_beyond.int().argmax()), sign)
    return None


def _recent(memory: Memory, data: Data) -> Tensor:
    """Inputs of raw and new data, in their order."""
    return torch.cat(fn.broadcast_matrices(memory.raw_x.to(data.x), data.x), -2)


def _is_related(kernel: Kernel | Form, old: Tensor, x: Tensor) -> bool:
    """Whether the function at old points says anything about that at ``x``."""
    form, old = form_of(kernel), old.to(x)
    variances = form.variances(old).unsqueeze(-1) * form.variances(x).unsqueeze(-2)
    return bool((form.gram(old, x).square() > UNRELATED**2 * variances).any())

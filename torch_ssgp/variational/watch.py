"""Detect a forgotten ``absorb``.

Without ``absorb`` between two batches, a strategy trains like GPyTorch's own: the
second batch replaces the first, without an error. The objective knows how many data a
batch has. So it counts the different data that it has seen at least twice since the
last ``absorb``. If there are more than ``num_data``, they are from more than one batch.

Data are counted only when they return, because augmented inputs never do. A batch
sampled in any order, with or without replacement, never exceeds the count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_ssgp.exceptions import ForgottenAbsorbWarning, warn

SAMPLE = 1024  # of larger batches about so many data are counted, chosen by their keys
EVERY = 10  # calls between two looks where a look waits for a device
MULTIPLIER = -7046029254386353131  # 2⁶⁴ / golden ratio: spreads bits over an int64


class SeenData:
    """Data that an objective has seen since the last ``absorb``."""

    def __init__(self, num_data: int) -> None:
        self.stride = max(1, num_data // SAMPLE)
        self.once = torch.empty(0, dtype=torch.int64)
        self.twice = self.once
        self.num_calls = 0
        self.is_counting = True

    def add(self, x: Tensor, y: Tensor) -> None:
        """Count the data of one evaluation."""
        self.num_calls += 1
        waits = x.device.type != "cpu"
        if not self.is_counting or (waits and self.num_calls % EVERY):
            return
        keys = data_keys(x, y)
        if self.stride > 1:
            keys = keys[(keys >> 33) % self.stride == 0]
        keys = keys.cpu()
        keys = keys[~torch.isin(keys, self.twice)].unique()
        if len(keys):
            known = torch.isin(keys, self.once)
            self.twice = torch.cat([self.twice, keys[known]])
            self.once = torch.cat([self.once, keys[~known]])

    def is_more_than(self, num_data: int) -> bool:
        """Whether more data returned than a batch has."""
        limit = num_data / self.stride
        if self.stride > 1:  # a sample: six standard deviations above its size
            limit += 6 * limit**0.5
        if len(self.once) > 8 * max(limit, SAMPLE):  # data that do not return
            self.is_counting = False
        return len(self.twice) > limit


def data_keys(x: Tensor, y: Tensor) -> Tensor:
    """One integer per datum, the same for equal data."""
    rows = torch.cat([t.reshape(len(t), -1).double() for t in (x, y)], -1)
    # Integers: their sum does not depend on the order. Mixed, or grids would collide.
    bits = rows.view(torch.int64)
    for _ in range(2):
        bits = (bits ^ (bits >> 32)) * MULTIPLIER
    columns = torch.arange(bits.size(-1), device=bits.device)
    return (bits * (2 * columns + 1)).sum(-1)


def label(output: Any, x: Any) -> Any:
    """Attach its inputs to an output of a strategy."""
    if isinstance(x, Tensor):
        output.inputs = x.detach()
    return output


def check_absorbed(strategy: Any, output: Any, target: Tensor, num_data: int) -> None:
    """Warn once if a second batch is trained on without an ``absorb`` before it."""
    x, num_dims = getattr(output, "inputs", None), len(output.event_shape)
    if x is None or target.dim() < num_dims:
        return
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    x, y = x.movedim(-2, 0), target.detach().movedim(-num_dims, 0)
    if len(x) != len(y):
        return
    strategy = getattr(strategy, "base_variational_strategy", strategy)
    seen = strategy.seen = getattr(strategy, "seen", None) or SeenData(num_data)
    seen.add(x, y)
    if seen.is_counting and seen.is_more_than(num_data):
        seen.is_counting = False
        warn(
            f"The objective was trained on more than num_data={num_data} different "
            "data since the last absorb(), so the model is overwriting what it learned "
            "from an earlier batch. Call variational_strategy.absorb(optimizer=...) "
            "before each new batch, and set num_data to its size.",
            ForgottenAbsorbWarning,
        )

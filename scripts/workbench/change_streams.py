"""Streams that change: made up ones, and a sensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.streams import gp_draw

NOISE = 0.1  # standard deviation, where functions have about 1
Function = Callable[[Tensor], Tensor]


class Changing(NamedTuple):
    """A stream in the order in which it arrives.

    Attributes:
        x: ``(n, d)``.
        y: ``(n,)``.
        scale: ``(n,)``, unit in which errors count.
        batch: Data in a batch.
        num_changes: How often it changes at once.
        is_labels: Whether targets are labels.
    """

    x: Tensor
    y: Tensor
    scale: Tensor
    batch: int
    num_changes: int
    is_labels: bool = False

    def batches(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Inputs, targets and the unit of their errors."""
        parts = (part.split(self.batch) for part in (self.x, self.y, self.scale))
        for x, y, scale in zip(*parts, strict=True):
            yield x, y, float(scale[0])


# Where a stream is at a batch: t grows from 0 to 1. Functions are drawn in order.
NUM_CHANGES = {
    "abrupt": 5,
    "gradual": 0,
    "recurring": 5,
    "scale up and down": 2,
    "offset jumps": 1,
    "noise x 3": 1,
    "boundary jumps": 1,
    "stationary": 0,
    "stationary, 2 inputs": 0,
}
NAMES = [*NUM_CHANGES]


def make(name: str, batches: int, batch: int, seed: int) -> Changing:
    """A stream by its name."""
    gen = torch.Generator().manual_seed(1000 * NAMES.index(name) + seed)
    dims = 2 if "2 inputs" in name else 1
    num, num_changes = batches * batch, NUM_CHANGES[name]
    x = 6 * torch.rand(num, dims, generator=gen, dtype=torch.float64)
    draws = [gp_draw(gen, dims, 1.0) for _ in range(num_changes + 2)]
    values = torch.stack([f(x) for f in draws])  # (number of functions, n)
    t = torch.arange(batches, dtype=x.dtype).repeat_interleave(batch) / batches
    regime = (t * (num_changes + 1)).floor().long()
    rows = torch.arange(num)
    noise, scale = torch.full_like(t, NOISE), torch.ones_like(t)
    f = values[0]
    if name == "abrupt":
        f = values[regime, rows]
    elif name == "gradual":
        f = (math.pi * t).cos() * values[0] + (math.pi * t).sin() * values[1]
    elif name == "recurring":
        f = values[regime % 2, rows]
    elif name == "scale up and down":
        scale = torch.where(regime == 1, 1e3, 1.0).to(t)
    elif name == "offset jumps":
        f = f + 5 * regime
    elif name == "noise x 3":
        noise = NOISE * (1 + 2 * regime)
    elif name == "boundary jumps":
        labels = ((1 - 2 * regime) * f > 0).to(t)
        return Changing(x, labels, scale, batch, num_changes, is_labels=True)
    e = torch.randn(num, generator=gen, dtype=torch.float64)
    return Changing(x, scale * (f + noise * e), scale, batch, num_changes)


class Still(NamedTuple):
    """A stream in which nothing changes.

    Attributes:
        batches: Inputs and noisy values.
        x_test: ``(k, d)``.
        f_test: ``(k,)``, the function there.
    """

    batches: list[tuple[Tensor, Tensor]]
    x_test: Tensor
    f_test: Tensor


def still(batch: int, batches: int, seed: int) -> Still:
    """One of 12 kinds in turn: 1 to 3 inputs, sorted or not, little or much noise."""
    gen = torch.Generator().manual_seed(10_000 * batch + seed)
    dims, is_sorted, noise = 1 + seed % 3, seed % 2 == 1, (0.1, 0.5)[seed // 2 % 2]
    draw = gp_draw(gen, dims, 1.0)
    x = 4 * torch.rand(batch * batches, dims, generator=gen, dtype=torch.float64)
    if is_sorted:
        x = x[x[:, 0].argsort()]
    e = torch.randn(len(x), generator=gen, dtype=torch.float64)
    y = draw(x) + noise * e
    x_test = 4 * torch.rand(500, dims, generator=gen, dtype=torch.float64)
    parts = zip(x.split(batch), y.split(batch), strict=True)
    return Still(list(parts), x_test, draw(x_test))


def with_outliers(num: int, seed: int, burst: bool) -> tuple[Still, Tensor]:
    """Single points in which nothing changes, and their targets with gross outliers.

    Args:
        num: Data.
        seed: Of the stream, see :func:`still`, and of its outliers.
        burst: Ten in a row, each 50 noise levels off; otherwise one to three, 20 to 50.
    """
    stream, noise = still(1, num, seed), (0.1, 0.5)[seed // 2 % 2]
    gen = torch.Generator().manual_seed(seed)
    places, sizes = torch.rand(2, 1 + seed % 3, generator=gen, dtype=torch.float64)
    at, size = 30 + (places * (num - 40)).long(), 20 + 30 * sizes
    if burst:
        at, size = at[0] + torch.arange(10), torch.full((10,), 50.0).double()
    sign = torch.randn(len(at), generator=gen).sign()
    y = torch.cat([y for _, y in stream.batches])
    return stream, y.index_add(0, at, noise * size * sign)


def constant_then_wave(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Data on [0, 6]: so many at a level of 5, then as many of sin 2x."""
    gen = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(2 * num, 1, generator=gen, dtype=torch.float64)
    f = torch.where(torch.arange(2 * num) < num, 5.0, torch.sin(2 * x[:, 0]))
    return x, f + NOISE * torch.randn(2 * num, generator=gen, dtype=torch.float64)


GRID = torch.linspace(0, 6, 200, dtype=torch.float64).unsqueeze(-1)


def turning(
    turn: float, noise: float, seed: int, pieces: int = 25, piece: int = 20
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The stream of examples/drift.py: data, and the function as of then on the grid.

    Args:
        turn: The angle in the end: pi for the negative of the beginning, 0 if it stays.
        noise: Its standard deviation; that of the function is 0.7.
        seed: Of inputs and noise.
        pieces: How often it moves.
        piece: Data in between.
    """
    gen = torch.Generator().manual_seed(seed)
    for k in range(pieces):
        angle = turn * k / (pieces - 1)
        x = 6 * torch.rand(piece, 1, generator=gen, dtype=torch.float64)
        f, truth = (
            math.cos(angle) * (1.5 * at).sin() + math.sin(angle) * (2 * at).cos()
            for at in (x[:, 0], GRID[:, 0])
        )
        e = torch.randn(piece, generator=gen, dtype=torch.float64)
        yield x, f + noise * e, truth


def sensor(num: int) -> tuple[Tensor, Tensor]:
    """Readings every 5 minutes: a day, weather of some hours, and noise.

    Returns:
        Time in hours ``(n, 1)``, and readings ``(n,)``.
    """
    gen = torch.Generator().manual_seed(0)
    t = torch.arange(num, dtype=torch.float64) / 12
    e = torch.randn(2, num, generator=gen, dtype=torch.float64)
    keep = math.exp(-1 / (12 * 6))  # of the weather after 5 minutes
    speed, weather, level = 0.0, [], 0.0
    for shock in e[0].tolist():  # twice smoothed, so that it is no random walk
        speed = keep * speed + math.sqrt(1 - keep**2) * shock
        level = keep * level + (1 - keep) * speed
        weather.append(level)
    y = 5 * (2 * math.pi * t / 24).sin() + 4 * torch.tensor(weather).to(t)
    return t.unsqueeze(-1), 15 + y + 0.2 * e[1]

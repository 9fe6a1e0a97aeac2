"""What a stream is, and how rows become one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

ROUNDING = 1e-12  # relative, of targets


@dataclass(frozen=True)
class Stream:
    """Batches in order of arrival, ``(n, d)`` and ``(n,)``, and tests, all scaled."""

    name: str
    batches: list[tuple[Tensor, Tensor]]
    x_test: Tensor
    y_test: Tensor

    @property
    def x_train(self) -> Tensor:
        """All training inputs in order of arrival, ``(n, d)``."""
        return torch.cat([x for x, _ in self.batches])

    @property
    def y_train(self) -> Tensor:
        """All training targets in order of arrival, ``(n,)``."""
        return torch.cat([y for _, y in self.batches])

    def __len__(self) -> int:
        return len(self.batches)


def rounded(stream: Stream, seed: int) -> Stream:
    """The stream with targets that differ by roundings; as it is for seed zero.

    A greedy choice may tip over by a rounding, and what follows is another run: where
    a budget is used up, the ends show how far that reaches.
    """
    if seed == 0:
        return stream
    gen = generator(seed)
    batches = [
        (x, y * (1 + ROUNDING * torch.randn(y.shape, generator=gen, dtype=y.dtype)))
        for x, y in stream.batches
    ]
    return replace(stream, batches=batches)


def split_rows(
    x: Tensor, y: Tensor, first: int, batch: int
) -> list[tuple[Tensor, Tensor]]:
    """Rows in batches; the first and the last may have another size."""
    sizes = [min(first, len(y))]
    while sum(sizes) < len(y):
        sizes.append(min(batch, len(y) - sum(sizes)))
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def cut(
    name: str, x: Tensor, y: Tensor, is_train: Tensor, first: int, batch: int
) -> Stream:
    """A stream of rows: batches of those that train, y scaled by the first batch."""
    batches = split_rows(x[is_train], y[is_train], first, batch)
    mean, std = moments(batches[0][1])
    scaled = [(x_new, (y_new - mean) / std) for x_new, y_new in batches]
    return Stream(name, scaled, x[~is_train], (y[~is_train] - mean) / std)


def generator(seed: int) -> torch.Generator:
    """A source of random numbers that leaves the global one alone."""
    return torch.Generator().manual_seed(seed)


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over rows; a constant column is not scaled."""
    mean, std = values.mean(0), values.std(0, correction=0)
    return mean, torch.where(std > 0, std, torch.ones_like(std))


def evenly(n: int, most: int | None) -> Tensor:
    """Indices of at most ``most`` of ``n`` rows, evenly spaced."""
    if most is None or most >= n:
        return torch.arange(n)
    return torch.linspace(0, n - 1, most, dtype=torch.float64).round().long()

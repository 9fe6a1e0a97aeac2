"""A stream that is hard on purpose: regimes and odd batches."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

NOISE = 0.1  # standard deviation, in units of that of the function
OUTLIER = 20.0  # in units of the noise
WIDTH = 4.0  # of the input range


class Change(NamedTuple):
    """What happens when a regime begins.

    Attributes:
        name: What to call it.
        new_range: Whether inputs move to where none has been.
        factor: What the scale of y is multiplied by.
        noise: Noise, in units of the scale.
        gap: Whether the middle of the range is never observed.
    """

    name: str
    new_range: bool = False
    factor: float = 1.0
    noise: float = NOISE
    gap: bool = False


# In this order, again and again: the scale is back where it was after one round.
CHANGES = (
    Change("range moves", new_range=True),
    Change("range moves, no noise", new_range=True, noise=0.0),
    Change("range moves, gap", new_range=True, gap=True),
    Change("function changes"),
    Change("function changes"),
    Change("function changes, y 1000x larger", factor=1e3),
    Change("function changes, y 1000x smaller", factor=1e-3),
    Change("function changes, no noise", noise=0.0),
    Change("range moves, y 1000x larger", new_range=True, factor=1e3),
    Change("range moves, y 1000x smaller", new_range=True, factor=1e-3),
    Change("function changes"),
)


class Regime:
    """A function on a range, with its scale and noise.

    Args:
        change: How it differs from the regime before.
        low: Where its inputs begin.
        scale: Its standard deviation.
        num_dims: Number of inputs.
        rng: Source of all random numbers.
    """

    def __init__(
        self,
        change: Change,
        low: float,
        scale: float,
        num_dims: int,
        rng: torch.Generator,
    ) -> None:
        self.change, self.low, self.scale = change, low, scale
        self.rng, self.num_dims = rng, num_dims
        self.lengthscale = 2 ** (2 * float(self.uniform(())) - 1)  # 0.5 to 2
        self.w = self.normal((num_dims, 100)) / self.lengthscale
        self.b = 2 * math.pi * self.uniform((100,))

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """Numbers in [0, 1)."""
        return torch.rand(shape, generator=self.rng, dtype=torch.float64)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.rng, dtype=torch.float64)

    def f(self, x: Tensor) -> Tensor:
        """The function, a draw from a GP with an RBF kernel, ``(n,)``."""
        features = (x @ self.w + self.b).cos()
        return self.scale * features.mean(-1) * math.sqrt(2 * len(self.b))

    def inputs(self, n: int) -> Tensor:
        """Inputs ``(n, d)`` of the range; first third or last third if it has a gap."""
        u = self.uniform((n, self.num_dims))
        if self.change.gap:
            u[:, 0] = torch.where(u[:, 0] < 0.5, u[:, 0] * 2 / 3, (2 * u[:, 0] + 1) / 3)
        return self.low + WIDTH * u

    def observe(self, x: Tensor) -> Tensor:
        """Noisy values ``(n,)``."""
        return self.f(x) + self.scale * self.change.noise * self.normal((len(x),))

    def batch(
        self, previous: tuple[Tensor, Tensor] | None
    ) -> tuple[str, Tensor, Tensor]:
        """A batch of 1 to 20 points, one in eight of them odd, and what it is."""
        size = (1, 2 + int(4 * self.uniform(())), 5 + int(16 * self.uniform(())))
        n = size[int(self.uniform(()).mul(4).clamp_max(2))]
        x = self.inputs(n)
        odd = float(self.uniform(()))
        if odd < 0.03 and previous is not None:
            return "same batch again", *previous
        if 0.03 <= odd < 0.06:
            x = x[:1].expand(20, -1).clone()
            return "identical inputs", x, self.observe(x)
        y = self.observe(x)
        if 0.06 <= odd < 0.12:
            y[0] += OUTLIER * NOISE * self.scale * (1 if odd < 0.09 else -1)
            return "outlier", x, y
        return ("one point" if n == 1 else "plain"), x, y

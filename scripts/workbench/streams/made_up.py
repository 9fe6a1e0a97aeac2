"""Streams from a formula: draws from Gaussian processes, with noise.

Functions have lengthscale 1 and variance 1; nothing is scaled further. ``seed`` is that
of function, inputs and noise. Test inputs are uniform over the range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workbench.streams.stream import Stream, generator

NOISE = 0.1  # standard deviation


def growing_range(
    factor: int = 50,
    batch: int = 100,
    *,
    width: float = 2.0,
    seed: int = 0,
    num_test: int = 1_000,
) -> Stream:
    """A range that grows ``factor``-fold: batch k covers ``[k, k + 1] * width``.

    The function is as irregular at the end as at the start, so the inducing points
    needed grow with the range.
    """
    places = range(factor)
    return _sweep("growing_range", places, batch, width, seed, num_test, factor)


def revisiting(
    passes: int = 50, batch: int = 100, *, seed: int = 0, num_test: int = 1_000
) -> Stream:
    """The range [0, 10] in two batches from left to right, again and again."""
    places = [0, 1] * passes
    return _sweep("revisiting", places, batch, 5.0, seed, num_test, 2)


def repeated_iid(batches: int = 200, batch: int = 50, *, seed: int = 0) -> Stream:
    """Batches alike, on [0, 10]: nothing changes, so nothing may drift."""
    return _sweep("repeated_iid", [0] * batches, batch, 10.0, seed, 1_000, 1)


def arm(num: int, rate: float = 500.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inverse dynamics of an arm with two links: torque of the shoulder, ``(num,)``.

    Links of 1 kg and 1 m, masses at their middles, in a vertical plane, on a path of
    five slow waves for each joint. Inputs ``(num, 6)`` are angles, velocities and
    accelerations; torques have noise of 0.5 Nm.
    """
    gen = generator(seed)
    t = torch.arange(num, dtype=torch.float64).unsqueeze(-1) / rate
    omega = 2 * math.pi * (0.05 + 0.45 * _uniform(10, gen).mT)  # 0.05 to 0.5 Hz
    phase, size = 2 * math.pi * _uniform(10, gen).mT, _uniform(10, gen).mT

    def joints(waves: Tensor) -> list[Tensor]:
        return [part.sum(-1) for part in waves.chunk(2, -1)]

    angle = omega * t + phase
    q = joints(size * angle.sin())
    v = joints(size * omega * angle.cos())
    a = joints(-size * omega.square() * angle.sin())
    # M(q) a + c(q, v) + g(q), first row.
    cos, sin = q[1].cos(), q[1].sin()
    inertia = (5 / 3 + cos) * a[0] + (1 / 3 + cos / 2) * a[1]
    turning = -sin * (v[0] * v[1] + v[1].square() / 2)
    weight = 9.81 * (1.5 * q[0].cos() + 0.5 * (q[0] + q[1]).cos())
    torque = with_noise(inertia + turning + weight, 0.5, gen)
    return torch.stack([*q, *v, *a], -1), torque


def gp_draw(
    gen: torch.Generator,
    num_inputs: int = 1,
    lengthscale: float = 1.0,
    features: int = 500,
) -> Callable[[Tensor], Tensor]:
    """A draw from a GP (RBF, variance 1) by random Fourier features.

    Args:
        gen: Source of random numbers.
        num_inputs: Number of inputs, d.
        lengthscale: Of all inputs.
        features: How many.

    Returns:
        From inputs ``(n, d)`` to values ``(n,)``.
    """
    omega = torch.randn(num_inputs, features, generator=gen, dtype=torch.float64)
    phase = 2 * math.pi * _uniform(features, gen).squeeze(-1)
    weight = torch.randn(features, generator=gen, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        waves = torch.cos(x @ omega / lengthscale + phase)  # (n, features)
        return math.sqrt(2 / features) * (waves @ weight)

    return function


def with_noise(f: Tensor, noise: float, gen: torch.Generator) -> Tensor:
    """Values with noise of this standard deviation."""
    return f + noise * torch.randn(f.shape, generator=gen, dtype=f.dtype)


def _sweep(
    name: str,
    places: Sequence[int],
    batch: int,
    width: float,
    seed: int,
    num_test: int,
    tested: int,
) -> Stream:
    """A batch in ``[p, p + 1] * width`` for every place; tests up to ``tested``."""
    gen = generator(seed)
    function = gp_draw(gen)

    def draw(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, with_noise(function(x), NOISE, gen)

    batches = [draw((place + _uniform(batch, gen)) * width) for place in places]
    test = draw(_uniform(num_test, gen) * (width * tested))
    return Stream(name, batches, *test)


def _uniform(n: int, gen: torch.Generator) -> Tensor:
    """Uniform on [0, 1), ``(n, 1)``."""
    return torch.rand(n, 1, generator=gen, dtype=torch.float64)

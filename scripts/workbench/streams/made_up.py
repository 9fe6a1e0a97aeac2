"""Streams from a formula: draws from Gaussian processes, with noise.

Arguments that all of them share:

* ``batch``: size of every batch,
* ``width``: of the range of inputs,
* ``noise``: standard deviation,
* ``seed``: of function, inputs and noise,
* ``num_batches``: only so many batches,
* ``num_test``: number of test rows, uniform over the range.

Functions have lengthscale 1 and variance 1; nothing is scaled further.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workbench.streams.stream import Stream, generator

Function = Callable[[Tensor], Tensor]


def growing_range(
    factor: int = 50,
    batch: int = 100,
    *,
    width: float = 2.0,
    noise: float = 0.1,
    seed: int = 0,
    num_batches: int | None = None,
    num_test: int = 1_000,
) -> Stream:
    """A range that grows ``factor``-fold: batch k covers ``[k, k + 1] * width``.

    The function is as irregular at the end as at the start, so the inducing points
    needed grow with the range. The test set covers that of the batches kept.
    """
    return _sweep(
        "growing_range",
        range(factor),
        f"range grows {len(range(factor)[:num_batches])}-fold",
        batch=batch,
        width=width,
        noise=noise,
        seed=seed,
        num_batches=num_batches,
        num_test=num_test,
    )


def revisiting(
    passes: int = 50,
    batch: int = 100,
    *,
    batches_per_pass: int = 2,
    width: float = 10.0,
    noise: float = 0.1,
    seed: int = 0,
    num_batches: int | None = None,
    num_test: int = 1_000,
) -> Stream:
    """The same range from left to right, again and again; the test set covers it."""
    return _sweep(
        "revisiting",
        [part for _ in range(passes) for part in range(batches_per_pass)],
        f"{batches_per_pass} batches a pass",
        batch=batch,
        width=width / batches_per_pass,
        noise=noise,
        seed=seed,
        num_batches=num_batches,
        num_test=num_test,
        tested=batches_per_pass,
    )


def repeated_iid(
    batches: int = 200,
    batch: int = 50,
    *,
    width: float = 10.0,
    noise: float = 0.1,
    seed: int = 0,
    num_batches: int | None = None,
    num_test: int = 1_000,
) -> Stream:
    """Batches alike: nothing changes, so nothing may drift."""
    return _sweep(
        "repeated_iid",
        [0] * batches,
        "iid",
        batch=batch,
        width=width,
        noise=noise,
        seed=seed,
        num_batches=num_batches,
        num_test=num_test,
    )


def drift(
    batches: int = 40,
    batch: int = 50,
    *,
    turn: float = 0.5,
    width: float = 6.0,
    noise: float = 0.1,
    seed: int = 0,
    num_batches: int | None = None,
    num_test: int = 300,
) -> Stream:
    r"""A function that changes over time while its inputs stay in one range.

    .. math:: f_t(x) = \cos(2\pi c\,t) f_0(x) + \sin(2\pi c\,t) f_1(x)

    for two independent draws :math:`f_0, f_1` from the same GP and t from 0 at the
    first batch to 1 at the last: at any time it looks alike, but after half a turn
    (``turn``, c = 0.5) it is :math:`-f_0`, and all that was learned at the start is
    wrong. The stream has ``test_batches``; its test set is as of the last batch kept.
    """
    gen = generator(seed)
    f_0, f_1 = gp_draw(gen), gp_draw(gen)

    def at_batch(k: int) -> Function:
        angle = 2 * math.pi * turn * k / max(batches - 1, 1)
        return lambda x: math.cos(angle) * f_0(x) + math.sin(angle) * f_1(x)

    parts, tests = [], []
    for k in range(batches):
        parts.append(_observed(at_batch(k), _uniform(batch, gen) * width, noise, gen))
        tests.append(
            _observed(at_batch(k), _uniform(num_test, gen) * width, noise, gen)
        )
    parts, tests = parts[:num_batches], tests[:num_batches]
    return Stream(
        "drift",
        parts,
        *tests[-1],
        notes=f"{turn} turns over {batches} batches; noise std {noise}",
        test_batches=tests,
    )


def gp_draw(
    gen: torch.Generator,
    num_inputs: int = 1,
    lengthscale: float = 1.0,
    features: int = 500,
) -> Function:
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
    notes: str,
    *,
    batch: int,
    width: float,
    noise: float,
    seed: int,
    num_batches: int | None,
    num_test: int,
    tested: int | None = None,
) -> Stream:
    """One batch in ``[p, p + 1] * width`` for every place p.

    Tests are in ``[0, tested] * width``; by default up to the last place kept.
    """
    gen = generator(seed)
    function = gp_draw(gen)
    batches = [
        _observed(function, (place + _uniform(batch, gen)) * width, noise, gen)
        for place in places
    ]
    reach = width * (tested or 1 + places[:num_batches][-1])
    return Stream(
        name,
        batches[:num_batches],
        *_observed(function, _uniform(num_test, gen) * reach, noise, gen),
        notes=f"{notes}; lengthscale 1, noise std {noise}",
    )


def _observed(
    function: Function, x: Tensor, noise: float, gen: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Inputs ``(n, 1)`` with noisy values ``(n,)`` of a function."""
    return x, with_noise(function(x), noise, gen)


def _uniform(n: int, gen: torch.Generator) -> Tensor:
    """Uniform on [0, 1), ``(n, 1)``."""
    return torch.rand(n, 1, generator=gen, dtype=torch.float64)

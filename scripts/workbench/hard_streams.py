"""Streams that are hard for a small memory: few points, periods, labels."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.module import Module
from torch import Tensor

from workbench import streams

NOISE = 0.1  # standard deviation, of all targets that are numbers


# On the unit cube, so that a few hundred data determine the function.
LENGTHSCALES = {1: 0.15, 2: 0.4, 3: 0.7, 4: 1.0}
SMALL_TEST = 300


class Small(NamedTuple):
    """A stationary stream of small batches; seed 1 begins with a single point."""

    batch: int
    inputs: int
    arrival: str
    seed: int

    @property
    def case(self) -> str:
        """Its name, without the seed."""
        inputs = f"{self.inputs} input" + "s" * (self.inputs > 1)
        return f"batches of {self.batch}, {inputs}, {self.arrival}"

    @property
    def first(self) -> int:
        """Points of the first batch."""
        return 1 if self.seed else self.batch


def small_streams() -> list[Small]:
    """60 of them: the most expensive ones, of 4 inputs, have one seed only."""
    return [
        Small(batch, inputs, arrival, seed)
        for batch in (1, 2, 5, 10)
        for inputs in LENGTHSCALES
        for arrival in ("sorted", "random")
        for seed in range(1 if batch <= 2 and inputs == 4 else 2)
    ]


class SmallData(NamedTuple):
    """Batches, and the function without noise at test inputs."""

    batches: list[tuple[Tensor, Tensor]]
    x_test: Tensor
    f_test: Tensor


def small_data(case: Small, num: int | None = None) -> SmallData:
    """Uniform inputs, a draw from a GP; sorted streams arrive by the first input.

    There are 300 data, or 500 in batches of 5 and 10, if their number is not given.
    """
    num = num or (300 if case.batch <= 2 else 500)
    number = 100 * case.batch + 10 * case.inputs + 2 * case.seed
    gen = torch.Generator().manual_seed(number + (case.arrival == "sorted"))
    function = streams.gp_draw(gen, case.inputs, LENGTHSCALES[case.inputs])
    x, x_test = torch.rand(
        num + SMALL_TEST, case.inputs, generator=gen, dtype=torch.float64
    ).split([num, SMALL_TEST])
    if case.arrival == "sorted":
        x = x[x[:, 0].argsort()]
    y = streams.with_noise(function(x), NOISE, gen)
    batches = streams.split_rows(x, y, case.first, case.batch)
    return SmallData(batches, x_test, function(x_test))


# Lengthscale where there is one input, and noise; the function has 1.
KINDS = {"smooth": (1, 0.1), "rough": (0.3, 0.1), "noisy": (1, 1), "clean": (1, 1e-3)}


class Young(NamedTuple):
    """Few data of one of several kinds, of 1 to 6 inputs."""

    kind: str
    x: Tensor
    y: Tensor


def young_data(seed: int, num: int) -> Young:
    """Kinds in turn, then sorted by the first input or not, then more inputs."""
    kind, dims = [*KINDS][seed % 4], 1 + seed // 8 % 6
    (length, noise), gen = KINDS[kind], torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(num, dims, generator=gen, dtype=torch.float64)
    x = x[x[:, 0].argsort()] if seed // 4 % 2 else x
    f = streams.gp_draw(gen, dims, length * math.sqrt(dims))(x)
    return Young(kind, x, 7 + 3 * streams.with_noise(f, noise, gen))


class Series(NamedTuple):
    """A series with one period or two, in days; all methods begin at the true ones."""

    patterns: dict[float, list[float]]  # amplitudes of harmonics, the longest first
    per_period: int  # readings in the first period, and in a batch
    periods: int  # that are learned; the next one is forecast


SERIES = {
    "weekly, hourly readings": Series({7.0: [0.7, 0.5, 0.3], 1.0: [0.9, 0.4]}, 168, 5),
    "daily, every quarter of an hour": Series({1.0: [1.0, 0.6, 0.4, 0.3, 0.2]}, 96, 8),
}
SWINGS = 0.2  # their size; their lengthscale is 0.3 periods


def series_data(case: Series, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Times ``(n, 1)``, readings, and the function; the last period is the test."""
    gen = torch.Generator().manual_seed(seed)
    longest = max(case.patterns)
    num = case.per_period * (case.periods + 1)
    x = torch.arange(num, dtype=torch.float64).unsqueeze(-1)
    x = x * longest / case.per_period
    f = SWINGS * streams.gp_draw(gen, 1, 0.3 * longest)(x)
    for period, amplitudes in case.patterns.items():
        for harmonic, amplitude in enumerate(amplitudes, 1):
            phase = torch.rand((), generator=gen, dtype=torch.float64)
            angle = 2 * math.pi * (harmonic * x.squeeze(-1) / period + phase)
            f = f + amplitude * torch.cos(angle)
    return x, streams.with_noise(f, NOISE, gen), f


def series_kernel(case: Series) -> Kernel:
    """Swings and the patterns; periods are those a user would set."""
    kernel = ScaleKernel(RBFKernel())
    for period in case.patterns:
        pattern = PeriodicKernel()
        pattern.period_length = period
        kernel = kernel + ScaleKernel(pattern)
    return kernel.double()


def series_starts(case: Series) -> list[Kernel]:
    """Where exact models start: as streams do, and with sharper patterns.

    ``PeriodicKernel`` divides by its lengthscale, not by the square.
    """
    plain, sharp = series_kernel(case), series_kernel(case)
    swings, *patterns = sharp.kernels
    swings.base_kernel.lengthscale = 2 * max(case.patterns)
    for pattern in patterns:
        pattern.base_kernel.lengthscale = 0.2
    return [plain, sharp]


def start_anywhere(model: Module, seed: int) -> None:
    """All hyperparameters but the periods, ``exp(0.7 N(0, 1))`` times as large."""
    gen = torch.Generator().manual_seed(seed)
    for name, raw, constraint in model.named_parameters_and_constraints():
        if constraint is not None and "period" not in name:
            factor = torch.randn(raw.shape, generator=gen).mul(0.7).exp()
            value = constraint.transform(raw.detach()) * factor
            raw.data.copy_(constraint.inverse_transform(value))


BANANA_PARTS = 5
ORDERS = {"class 0 first": False, "class 1 first": True, "random": None}


def banana_batches(order: str, seed: int) -> tuple[list, Tensor, Tensor]:
    """Batches in an order, test inputs and labels; a class has half of the batches."""
    stream = streams.banana("random", seed, 2 * BANANA_PARTS)
    descending = ORDERS[order]
    if descending is None:
        return stream.batches, stream.x_test, stream.y_test
    x, y = stream.x_train, stream.y_train
    batches = []
    for label in sorted(y.unique().tolist(), reverse=descending):
        x_label, y_label = x[y == label], y[y == label]
        parts = (each.chunk(BANANA_PARTS) for each in (x_label, y_label))
        batches += list(zip(*parts, strict=True))
    return batches, stream.x_test, stream.y_test


def digits_batches(num: int = 1_000) -> tuple[list, Tensor, Tensor]:
    """Digits of scikit-learn, one class after the other, test images and labels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(pixels / 16)[order], torch.tensor(labels)[order]
    parts = [(y[:num] == label).nonzero()[:, 0] for label in range(10)]
    return [(x[part], y[part]) for part in parts], x[1_000:], y[1_000:]

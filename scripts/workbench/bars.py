"""Acceptance bars: the figures about accuracy on streams, measured.

    PYTHONPATH=scripts python -m workbench.bars table --data-dir DIR --storage-of-old
    PYTHONPATH=scripts python -m workbench.bars sensor drift --only "a day|still"
    PYTHONPATH=scripts python -m workbench.bars --quick

Rows are printed and kept in the file as they come, beside those of other versions; the
bars follow. For another version, put its folder first on the path. What exact models
gave is taken from the file. Streams from files need ``--data-dir``. Nothing here knows
the inside of the package, imports included, so that it runs on any version. The cases:

"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import time
import warnings
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from unittest import mock

import pandas as pd
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, MaternKernel, PeriodicKernel, RBFKernel
from gpytorch.kernels import ScaleKernel as Scaled
from gpytorch.likelihoods import BernoulliLikelihood, SoftmaxLikelihood
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import mse_loss

import torch_ssgp
from torch_ssgp import StreamingGP
from workbench import change_streams, changes, hard_streams
from workbench.changes import AUTO, FIXED, NOTHING, is_still
from workbench.common import new_parser
from workbench.exact import dense, one_ahead, run_exact
from workbench.results import LIBRARY, Row, Table, header, rounded
from workbench.streams import river_series, split_rows
from workbench.streams.cases import CASES as STREAMS
from workbench.streams.recorded import uci

KEYS = ["case", "stream", "seed", "version"]
EXACT = "exact GP: "  # before the columns of references
ONE_SET = hasattr(StreamingGP, "log_evidence")  # the points are the memory
LABEL = version(LIBRARY)
CHUNK = 1_000  # test points predicted at once
Batches = Iterable[tuple[Tensor, ...]]
Track = namedtuple("Track", "forgot mean deviation seconds")  # of updates


class Setting(NamedTuple):
    """What was asked for."""

    data_dir: Path | None
    quick: bool
    storage_of_old: bool

    def size(self, full: Any, quick: Any) -> Any:
        """The one that was asked for."""
        return quick if self.quick else full

    def points(self, number: int) -> int:
        """``num_inducing``, with the storage of version 0.2.0 if that was asked for."""
        number = min(number, self.size(number, 20))
        return 2 * number if ONE_SET and self.storage_of_old else number


# ------------------------------------------------------------------- what cases share


def new_model(kernel: int | Kernel, number: int, *others: Any, **more: Any) -> Any:
    """With a kernel, or a smooth one of so many inputs."""
    if isinstance(kernel, int):
        kernel = Scaled(RBFKernel(ard_num_dims=kernel))
    return StreamingGP(kernel, *others, num_inducing=number, **more).double()


def learn(model: Any, batches: Batches, ahead: bool = False, **options: Any) -> Track:
    """Update after update; with ``ahead``, all batches but the first are predicted."""
    parts, forgot, seconds = [(torch.empty(0), torch.empty(0))], [], 0.0
    for x, y in batches:
        if ahead and forgot:
            parts.append(predicted(model, x))
        start = time.process_time()
        result = model.update(x, y, **options)
        forgot.append(float(torch.as_tensor(result.forgot).min()))
        seconds += time.process_time() - start
    return Track(forgot, *joined(parts), seconds)


@torch.no_grad()
def predicted(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Mean and standard deviation of targets, noise included."""
    parts = [model.predict(part) for part in x.split(CHUNK)]
    return joined([(part.mean, part.variance.sqrt()) for part in parts])


@torch.no_grad()
def off(model: Any, x: Tensor, f: Tensor) -> float:
    """RMSE of the mean against the function."""
    with dense():
        return mse_loss(model(x).mean, f).sqrt().item()


def joined(parts: Batches) -> tuple[Tensor, ...]:
    """All batches in one."""
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def beside(name: str, error: float, other: float, most: float) -> Row:
    """An error, its ratio to another, and whether that is small enough."""
    ratio = error / other
    return {"RMSE": error, f"RMSE / {name}": ratio, f"within {most:g}": ratio <= most}


# ------------------------------------------- rows: by stream, seed, and what is known

RIVER = ("TrumpApproval", "ChickWeights")
GOALS = {  # RMSE and MLL of the prototype of one set of points; CPU time / that of old
    "pseudo-periodic M=100": (0.0003 / 1.02, None, 0.6),
    "pseudo-periodic M=200": (0.0001 / 1.02, None, 0.6),
    "audio M=100": (0.0441, 1.703, 0.6),
    "audio M=200": (0.0052, 3.53, 0.6),
    "revisiting": (0.0967, None, 0.6),
    "elevators": (0.3755, -0.438, 1.0),
    "bike": (0.2650, -0.073, 1.0),
    "terrain OS": (0.2389, None, 0.6),
    "terrain": (0.3354, None, 0.6),
    "kin40k": (0.3612, -0.389, 1.0),
}


def table_row(on: Setting, stream: str, size: int, _: Row) -> Row:
    """Streams of docs/benchmarks.md; the seed is the size of batches, 0 for theirs."""
    if stream in RIVER:
        data, number = river_series(stream), 100
    else:
        data, number = STREAMS[stream].stream(0, on.data_dir), STREAMS[stream][1]
    batches, x, y = data.batches, data.x_test, data.y_test
    if size:
        batches = split_rows(*joined(batches), size, size)
        on = on._replace(storage_of_old=True)
    if on.quick:
        batches = [(each[0][:40], each[1][:40]) for each in batches[:2]]
    model = new_model(x.size(-1), on.points(number))
    row = {"cpu_seconds": learn(model, batches).seconds}
    mean, deviation = predicted(model, x)
    row["noise"] = model.likelihood.noise.sqrt().item()
    row["RMSE"] = mse_loss(mean, y).sqrt().item()
    row["MLL"] = Normal(mean, deviation).log_prob(y).mean().item()
    if size:
        return row
    rmse, mll, cpu = GOALS[stream]
    row |= {"RMSE / goal": row["RMSE"] / rmse, "CPU / goal": row["cpu_seconds"] / cpu}
    return row if mll is None else {**row, "MLL - goal": row["MLL"] - mll}


SMALL = hard_streams.small_streams()


def small_row(on: Setting, _: str, seed: int, __: Row) -> Row:
    """60 streams of small batches against all data at once, by Adam or L-BFGS."""
    data, bounds = hard_streams.small_data(SMALL[seed], on.size(None, 20)), {}
    for optimizer in ("adam", "lbfgs", ""):
        model = new_model(SMALL[seed].inputs, on.points(50))
        if optimizer:
            options = {"optimizer": optimizer, "num_steps": on.size(300, 5)}
            bound = model.update(*joined(data.batches), **options).bound
            bounds[float(bound)] = off(model, data.x_test, data.f_test)
    learn(model, data.batches)
    error = off(model, data.x_test, data.f_test)
    row = {"name": SMALL[seed].case}
    return {**row, **beside("once", error, bounds[max(bounds)], 1.05)}


START = ", from a random start"


def series_row(on: Setting, stream: str, seed: int, known: Row) -> Row:
    """Weekly and daily series: forecasts against an exact GP, or ends from any start.

    With a random start all data fit into the memory.
    """
    case, fits = hard_streams.SERIES[stream.removesuffix(START)], START in stream
    case = on.size(case, case._replace(per_period=12, periods=2))
    x, y, f = hard_streams.series_data(case, 0 if fits else seed)
    size, num = case.per_period, case.per_period * case.periods
    model = new_model(hard_streams.series_kernel(case), num if fits else on.points(100))
    if fits:
        hard_streams.start_anywhere(model, seed)
    for each in split_rows(x[:num], y[:num], size, size):
        bound = model.update(*each).bound
    error = off(model, x[num:], f[num:])
    if fits:
        with torch.no_grad(), dense():
            prior = model.mean_module(x[:num]), model.covar_module(x[:num])
            exact = model.likelihood(MultivariateNormal(*prior)).log_prob(y[:num])
            evidence = model.log_evidence() if ONE_SET else bound
        return {"evidence": float(evidence), "exact": float(exact), "RMSE": error}
    if (exact := known.get(f"{EXACT}RMSE")) is None:
        starts, steps = hard_streams.series_starts(case), on.size(300, 3)
        gp, _ = run_exact(starts, x[:num], y[:num], num_steps=steps)
        exact = off(gp, x[num:], f[num:])
    return {f"{EXACT}RMSE": exact, **beside("exact GP", error, exact, 1.1)}


QUIET = "nothing changes"


def changes_row(on: Setting, stream: str, seed: int, _: Row) -> Row:
    """Streams of docs/changes.md: auto against fixed rates, or what is forgotten."""
    size = on.size(changes.Size(), changes.QUICK)
    if stream == QUIET:
        row = changes.still_row([*size.still][seed // 20], AUTO, seed % 20, size)
        return {**row, "forgot": row["alarms"] + row["faded"]}
    names = on.size([AUTO, *FIXED], [AUTO, NOTHING])
    rows = {name: changes.stream_row(stream, name, seed, size) for name in names}
    return {"at": rows[AUTO]["at"], **{name: rows[name]["error"] for name in names}}


def constant_row(on: Setting, stream: str, seed: int, _: Row) -> Row:
    """A level of 5 that becomes sin 2x: whether it is found, and beside a new model."""
    num, size, grid = on.size(120, 30), int(stream.split()[-1]), change_streams.GRID
    x, y = change_streams.constant_then_wave(num, seed)
    forgot, errors = [], []
    for begin in (0, num):
        model = new_model(1, on.points(30))
        parts = split_rows(x[begin:], y[begin:], size, size)
        forgot.append(learn(model, parts).forgot)
        errors.append(off(model, grid, torch.sin(2 * grid[:, 0])))
    # Data since the change, at the end of every update that forgot something.
    ends = [(k + 1) * size - num for k, power in enumerate(forgot[0]) if power < 1]
    row = {"found within 40 data": any(0 < end <= 40 for end in ends)}
    row["false alarms"] = sum(end <= 0 for end in ends)
    return {**row, **beside("new model", *errors, 1.2)}


RATES = {f"λ = {rate:g}": rate for rate in (1, 0.98, 0.95, 0.9, 0.8, 0.6, 0.4, 0.2)}
STILL, LEVELS = "still", [*product((0.4, 0.7), (20, 1))]  # noise, and data at once
DRIFTS = {f"noise {level:g}, batches of {n}": (level, n) for level, n in LEVELS}


def drift_row(on: Setting, stream: str, seed: int, _: Row) -> Row:
    """Slow drift: auto against rates per 20 data, in the second half; still twins."""
    turn = math.pi * (stream != STILL)
    level, size = DRIFTS.get(stream, LEVELS[seed % len(LEVELS)])
    row: Row = {}
    for method in [AUTO, NOTHING] if on.quick or not turn else [AUTO, *RATES]:
        rate = AUTO if method == AUTO else RATES[method] ** (size / 20)
        model, errors = new_model(1, on.points(30)), []
        for x, y, f in change_streams.turning(turn, level, seed, on.size(25, 3)):
            learn(model, split_rows(x, y, size, size), forget=rate)
            errors.append(off(model, change_streams.GRID, f))
        row[method] = fmean(errors[len(errors) // 2 :])
    ratio = row[AUTO] / row[NOTHING]
    return row if turn else {**row, "as λ = 1": abs(ratio - 1) < 1e-6, "worse": ratio}


FEW, BURST = "1 to 3 outliers", "a burst of ten"


def outliers_row(on: Setting, stream: str, seed: int, _: Row) -> Row:
    """Single points with gross outliers against the same stream without them."""
    data, dirty = change_streams.with_outliers(on.size(150, 44), seed, stream == BURST)
    (x, clean), errors, resets = joined(data.batches), [], []
    for y in (dirty, clean):
        model = new_model(x.size(-1), on.points(50))
        forgot = learn(model, split_rows(x, y, 1, 1)).forgot
        resets.append(sum(power < changes.ALARM for power in forgot))
        errors.append(off(model, data.x_test, data.f_test))
    row = {"resets": resets[0], "resets without": resets[1]}
    return {**row, **beside("without", *errors, 1.1)}


DAY, MOVED = "a day", ("recalibrated", "recalibrated, periodic kernel")
TRUE, NEXT = 0.2, 144  # standard deviation of the noise; readings in 12 hours


def sensor_row(on: Setting, stream: str, seed: int, known: Row) -> Row:
    """10,000 readings one by one, each predicted first; recalibrations by 7 noises."""
    t, y = change_streams.sensor(on.size(10_000, 60))
    tenth, begin, end = len(y) // 10, on.size(2000 + 1000 * seed, 30), len(y)
    kernel = Scaled(MaternKernel())
    if stream == MOVED[1]:
        kernel = kernel + Scaled(PeriodicKernel()).double()
        kernel.kernels[1].base_kernel.period_length = 24.0
    if stream in MOVED:
        y[begin:] += 7 * TRUE
        end = begin + on.size(NEXT, 10)
    model = new_model(kernel, 100)
    track = learn(model, split_rows(t[:end], y[:end], 1, 1), ahead=True)
    error, row = y[1:end] - track.mean, {"cpu_seconds": track.seconds}
    if stream in MOVED:
        inside = (error.abs() < 1.96 * track.deviation)[begin - 1 :].double()
        lowest = min(track.forgot[begin:])
        return {**row, "in 95 %": inside.mean().item(), "lowest forgot": lowest}
    exact = known.get(f"{EXACT}last tenth")
    exact = exact or changes.exact_ahead(t, y, 1, 9 * tenth, 10 * tenth)
    tenths = [part.square().mean().sqrt().item() for part in error.tensor_split(10)]
    row |= {"tenths": tenths, "last / second tenth": tenths[-1] / tenths[1]}
    row |= {f"{EXACT}last tenth": exact, "last / exact GP": tenths[-1] / exact}
    return {**row, "noise / true": model.likelihood.noise.sqrt().item() / TRUE}


AGES = {"2-3": 3, "4-6": 6, "7-11": 11, "12-21": 21, "22-50": 50, "later": 70}
LEAST = -30.0  # of a log score


def young_row(on: Setting, _: str, seed: int, known: Row) -> Row:
    """64 streams point by point: coverage and log score by age against scikit-learn."""
    kind, x, y = hard_streams.young_data(seed, on.size(70, 24))
    track = learn(new_model(x.size(-1), 100), split_rows(x, y, 1, 1), ahead=True)
    row = by_age(y[1:], track.mean, track.deviation)
    exact = {name: value for name, value in known.items() if name.startswith(EXACT)}
    if not exact:
        found = by_age(y[1:], *one_ahead(x, y, on.size(3, 0)))
        exact = {f"{EXACT}{name}": value for name, value in found.items()}
    for age in AGES:
        more = row[f"{age}: score"] - exact[f"{EXACT}{age}: score"]
        row[f"{age}: score - exact GP"] = more
    return {"kind": kind, "inputs": x.size(-1), **row, **exact}


def by_age(y: Tensor, mean: Tensor, deviation: Tensor) -> Row:
    """Shares inside of intervals, and log scores; the first datum is not predicted."""
    far = ((y - mean) / deviation).abs()
    score = Normal(mean, deviation).log_prob(y).clamp_min(LEAST)
    row, begin = {}, 0
    for age, last in AGES.items():
        part = slice(begin, begin := last - 1)
        row[f"{age}: in 68 %"] = (far[part] < 0.9945).double().mean().item()
        row[f"{age}: in 95 %"] = (far[part] < 1.96).double().mean().item()
        row[f"{age}: score"] = score[part].mean().item()
    return row


SIZES, STARTS = (50, 150, 500), 20  # data, and random starts of exact models


def first_row(on: Setting, stream: str, size: int, known: Row) -> Row:
    """The first 500 data of real streams: evidence beside the best of 20 exact GPs.

    The seed is the size of batches. What a datum of the first hundred costs is relative
    to a standard normal distribution, the unit of the targets.
    """
    sizes = on.size(SIZES, (20,))
    x, y = joined(first_of(stream, on, sizes[-1]))
    model, costs, row = new_model(x.size(-1), sizes[-1]), [torch.zeros(1)], {}
    for begin in range(0, len(y), size):
        part = slice(begin, begin + size)
        if 0 < begin < 100:
            far = Normal(*predicted(model, x[part])).log_prob(y[part])
            costs.append(Normal(0, 1).log_prob(y[part]) - far)
        model.update(x[part], y[part])
        if (num := begin + len(y[part])) in sizes:
            best = known.get(f"{EXACT}{num}") or best_evidence(x[:num], y[:num], on)
            short = best - float(model.log_evidence())
            row |= {f"{EXACT}{num}": best, f"short at {num}": short}
    return {**row, "dearest": torch.cat(costs).max().item()}


def first_of(stream: str, on: Setting, num: int) -> Batches:
    """Batches of the first data of a file."""
    yield tuple(each[:num] for each in joined(uci(stream, on.data_dir).batches))


def best_evidence(x: Tensor, y: Tensor, on: Setting) -> float:
    """Of exact models from random starts."""
    gen, starts = torch.Generator().manual_seed(0), []
    for _ in range(on.size(STARTS, 2)):
        kernel = Scaled(RBFKernel(ard_num_dims=x.size(-1))).double()
        sizes = torch.randn(1, x.size(-1), generator=gen, dtype=x.dtype).exp()
        kernel.base_kernel.lengthscale = sizes * x.size(-1) ** 0.5
        starts.append(kernel)
    return max(run_exact(starts, x, y, num_steps=on.size(200, 3))[1]["evidences"])


class DeepKernel(Kernel):
    """A kernel on features, as in docs/guides/deep.md."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.base_kernel = network, RBFKernel()

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **more: Any) -> Any:
        """The base kernel at the features."""
        features = self.network(x1), self.network(x2)
        return self.base_kernel.forward(*features, diag=diag, **more)


RIDGE = "two directions of eight inputs"


def deep_row(on: Setting, stream: str, seed: int, _: Row) -> Row:
    """A network in the kernel, or trained before it on the first batch, and ARD."""
    num, size = on.size((1_000, 500), (60, 20)), on.size(200, 30)
    gen = torch.Generator().manual_seed(seed)
    if stream == RIDGE:
        x = torch.randn(sum(num), 8, generator=gen, dtype=torch.float64)
        f = torch.sin(2 * x[:, 0] + x[:, 1]) + torch.tanh(x[:, 2] * x[:, 0])
        y = f + 0.1 * torch.randn(sum(num), generator=gen, dtype=torch.float64)
    else:
        x, y = joined(uci(stream, on.data_dir).batches)
        order = torch.randperm(len(y), generator=gen)[: sum(num)]
        x, y = x[order], y[order]
    (x, x_test), (y, y_test) = x.split(num), y.split(num)
    torch.manual_seed(seed)
    layers = nn.Linear(x.size(-1), 32), nn.Tanh(), nn.Linear(32, 2)
    network = nn.Sequential(*layers).double()
    before = train(network, x[:size], y[:size], on.size(300, 3))
    ways = {
        "deep": (Scaled(DeepKernel(network)), nn.Identity()),
        "features": (2, before),
        "ARD": (x.size(-1), nn.Identity()),
    }
    row = {}
    for name, (kernel, features) in ways.items():
        model = new_model(kernel, on.points(100))
        with torch.no_grad():
            z, z_test = features(x), features(x_test)
        learn(model, split_rows(z, y, size, size))
        row |= {f"{name}: {k}": v for k, v in scored(y_test, predicted(model, z_test))}
    return row


def train(network: nn.Module, x: Tensor, y: Tensor, num_steps: int) -> nn.Module:
    """A copy of a network, trained with a linear head by least squares."""
    network = copy.deepcopy(network)
    head = nn.Linear(2, 1).double()
    parameters = [*network.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01, weight_decay=1e-3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        mse_loss(head(network(x)).squeeze(-1), y).backward()
        optimizer.step()
    return network


def scored(y: Tensor, moments: tuple[Tensor, ...]) -> Iterator[tuple[str, float]]:
    """Error and coverage."""
    mean, deviation = moments
    far = ((y - mean) / deviation).abs()
    yield "RMSE", mse_loss(mean, y).sqrt().item()
    yield "in 95 %", (far < 1.96).double().mean().item()


def labels_row(on: Setting, stream: str, seed: int, _: Row) -> Row:
    """Labels class by class against all at once: percent that are wrong."""
    if several := stream == "digits":
        batches, *test = hard_streams.digits_batches(on.size(1_000, 60))
    else:
        batches, *test = hard_streams.banana_batches(stream.partition(", ")[2], seed)
    errors, order = [], torch.randperm(sum(len(y) for _, y in batches))
    for parts in (batches, [[each[order] for each in joined(batches)]]):
        if several:  # as docs/benchmarks.md has them
            likelihood = SoftmaxLikelihood(num_classes=10, mixing_weights=False)
            options = {"num_steps": on.size(30, 3), "learn_inducing_points": False}
        else:
            likelihood, once = BernoulliLikelihood(), {"num_steps": on.size(300, 5)}
            options = {} if parts is batches else once
        number, shape = (100, [10]) if several else (30, [])
        kernel, shape = Scaled(RBFKernel()), torch.Size(shape)
        model = new_model(kernel, on.points(number), likelihood, batch_shape=shape)
        learn(model, parts, **options)
        with torch.no_grad():
            latent = model(test[0]).mean
        guess = latent.argmax(0) if several else latent > 0
        errors.append(100 * (guess != test[1]).double().mean().item())
    return {"error": errors[0], "at once": errors[1], "points": errors[0] - errors[1]}


# ---------------------------------------------------------------------- cases and bars

FIRST = ("kin40k", "elevators", "bike_noleak", "protein")
FILES = ("elevators", "bike", "terrain OS", *FIRST)
PIECES = ("audio M=100", "elevators", "terrain", *RIVER)
DAILY = "daily, every quarter of an hour" + START
SIZED = [f"batches of {size}" for size in (10, 1, 5, 30)]
BANANA = ("banana, class 0 first", "banana, class 1 first")
# What makes rows, their streams and seeds; a quick run has the first of each.
CASES: dict[str, tuple[Callable[..., Row], list[tuple[Any, Any]]]] = {
    "table": (table_row, [(GOALS, [0])]),
    "pieces": (table_row, [(PIECES, [500, 50, 5])]),
    "small": (small_row, [(["small batches"], range(len(SMALL)))]),
    "periods": (series_row, [(hard_streams.SERIES, range(5))]),
    "starts": (series_row, [([DAILY], range(9))]),
    "changes": (changes_row, [(change_streams.NAMES, range(6))]),
    "constant": (constant_row, [(SIZED, range(10))]),
    "drift": (drift_row, [(DRIFTS, range(5)), ([STILL], range(60))]),
    "quiet": (changes_row, [([QUIET], range(20 * len(changes.STILL)))]),
    "outliers": (outliers_row, [([FEW], range(100)), ([BURST], range(30))]),
    "sensor": (sensor_row, [([DAY], [0]), (MOVED, range(3))]),
    "young": (young_row, [(["young"], range(64))]),
    "deep": (deep_row, [((RIDGE, "elevators"), range(3))]),
    "first": (first_row, [(FIRST, [50, 1])]),
    "labels": (labels_row, [(["digits"], [0]), (BANANA, range(3))]),
}
# Case | figure and column, of the seeds of every stream | at least | at most.
BARS = """
table    | mean RMSE / goal           |       | 1.02
table    | mean MLL - goal            | -0.02 |
table    | mean CPU / goal / old      |       | 1
pieces   | spread RMSE                |       | 1.03
pieces   | range MLL                  |       | 0.03
pieces   | spread noise               |       | 1.1
small    | mean within 1.05           | 1     |
small    | max RMSE / once            |       |
periods  | median RMSE / exact GP     |       | 1.1
starts   | top evidence               | 0.888 |
starts   | top exact                  | 0.888 |
changes  | auto / λ = 1               |       |
changes  | auto / best λ              |       | 1.1
changes  | mean auto / old            |       | 1.02
constant | mean found within 40 data  | 0.95  |
constant | mean within 1.2            | 0.95  |
constant | max RMSE / new model       |       |
constant | sum false alarms           |       |
drift    | mean auto                  |       |
drift    | auto / best λ              |       | 1.05
drift    | mean as λ = 1              | 0.983 |
drift    | max worse                  |       | 1.02
quiet    | sum updates                |       |
quiet    | sum forgot                 |       | 2
outliers | sum resets                 |       | 0
outliers | sum resets without         |       |
outliers | mean within 1.1            | 1     |
outliers | max RMSE / without         |       |
sensor   | mean last / second tenth   |       | 1.05
sensor   | mean last / exact GP       |       | 1
sensor   | mean noise / true          | 0.8   | 1.2
sensor   | min in 95 %                | 0.85  |
labels   | max points                 |       | 1
deep     | mean deep: in 95 %         | 0.88  |
deep     | mean features: in 95 %     |       |
deep     | mean ARD: in 95 %          |       |
deep     | mean deep: RMSE            |       |
deep     | mean features: RMSE        |       |
deep     | mean ARD: RMSE             |       |
first    | max short at 50            |       | 2
first    | max short at 150           |       | 2
first    | max short at 500           |       | 2
first    | max dearest                |       | 15
"""
for age, last in AGES.items():
    BARS += f"young | mean {age}: in 95 % | 0.88 | {0.99 if last > 11 else ''}\n"
    BARS += f"young | mean {age}: in 68 % | | \n"
    BARS += f"young | mean {age}: score - exact GP | 0 | \n"
FIGURES: dict[str, Any] = {  # those that pandas does not have
    "spread": lambda values: values.max() / values.min(),
    "range": lambda values: values.max() - values.min(),
    "top": lambda values: (values >= values.max() - 0.5).mean(),  # nats
}


def judged(case: str, rows: pd.DataFrame) -> Iterator[Row]:
    """What is asked beside what was measured, and in how many rows."""
    best: dict[str, float] = {}  # auto over the best fixed rate, which comes last
    asked = [line.split(" |") for line in BARS.splitlines() if line.startswith(case)]
    for (_, what, *ends), stream in product(asked, rows.stream.unique()):
        part, what = rows[rows.stream == stream], what.strip()
        how, _, column = what.partition(" ")
        least, most = (end.strip() for end in ends)
        if how == AUTO and AUTO in part:
            rates = part.filter(regex="^λ = 1$" if "1" in column else "^λ").mean()
            value = best[stream] = part[AUTO].mean() / rates.min()
        elif column in part and part[column].notna().any():
            values = part[column].dropna().astype(float)
            value = float(values.agg(FIGURES.get(how, how)))
        else:
            continue
        fails = value < float(least or "-inf") or value > float(most or "inf")
        verdict = f"{'MISSED' if fails else 'met':7}" if least or most else ""
        verdict += f"at least {least} " * bool(least) + f"at most {most}" * bool(most)
        row = {"stream": stream, "figure": what, "rows": len(part)}
        yield {**row, "value": float(value), "bar": verdict.rstrip()}
    moves = [math.log(best[name]) for name in best if not is_still(name)]
    if case == "changes" and moves:
        mean = math.exp(sum(moves) / len(moves))
        row = {"stream": "all", "figure": "geometric mean of auto / best λ"}
        yield {**row, "rows": len(rows), "value": mean, "bar": "at most 0.85"}


def bars(case: str, rows: pd.DataFrame) -> None:
    """Print it."""
    for row in judged(case, rows):
        title = f"{row['stream']}: {row['figure']} ({row['rows']})"
        if row["stream"] == "all":
            print(f"  {row['figure']} {row['value']:.4g}, {row['bar']}")
        else:
            print(f"  {title:<66} {row['value']:10.4g}  {row['bar']}".rstrip())


# ------------------------------------------------------------------------ the command


def measured(job: Callable[[], Row]) -> Row:
    """A row with its seconds and warnings; what fails is a row as well."""
    torch.manual_seed(0)
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            row = job()
        except Exception as error:
            row = {"failure": f"{type(error).__name__}: {error}"}
    row = {"cpu_seconds": time.process_time() - start, **row}
    return {**row, "warnings": Counter(each.category.__name__ for each in caught)}


def run(case: str, on: Setting, chosen: argparse.Namespace, table: Table) -> None:
    """The rows of a case, one after the other, and its bars."""
    (make, groups), name = CASES[case], case + ", quick" * on.quick
    wanted = [cell for streams, seeds in groups for cell in product(streams, seeds)]
    if on.quick:
        wanted = [(next(iter(streams)), seeds[0]) for streams, seeds in groups]
    for stream, seed in wanted:
        if seed not in (chosen.seeds or [seed]) or not re.search(chosen.only, stream):
            continue
        if stream in FILES and on.data_dir is None:
            continue
        key = (name, stream, seed, chosen.label)
        others = [r for r in table.rows().values() if table.key(r)[:3] == key[:3]]
        known = {column: value for row in others for column, value in row.items()}
        found = measured(partial(make, on, stream, seed, known))
        table.add({**dict(zip(KEYS, key, strict=True)), **found})
        shown = {k: rounded(v, 4) for k, v in found.items() if not k.startswith(EXACT)}
        print(*key[:3], json.dumps(shown, ensure_ascii=False), sep=", ", flush=True)
    rows = pd.DataFrame(row for row in table.rows().values() if row["case"] == name)
    if rows.empty:
        return
    rows = rows.set_index(["stream", "seed"], drop=False)
    ours, old = (rows[rows.version == label] for label in (chosen.label, chosen.old))
    for column in {AUTO, "CPU / goal"} & {*rows} if chosen.old != chosen.label else ():
        ours = ours.assign(**{f"{column} / old": ours[column] / old[column]})
    failed = ours.get("failure", pd.Series()).notna().sum()
    print(f"{name}, {chosen.label}: {failed} of {len(ours)} failed")
    bars(case, ours)


def main(arguments: list[str] | None = None) -> None:
    """Run the cases that were asked for."""
    titles = [
        f"{name:10}{make.__doc__.splitlines()[0]}" for name, (make, _) in CASES.items()
    ]
    parser = new_parser(__doc__ + "\n".join(titles))
    parser.add_argument("cases", nargs="*", help="all of them, if there are none")
    parser.add_argument(
        "--seeds", nargs="+", type=int, help="only these; sizes of pieces"
    )
    parser.add_argument("--only", default="", help="streams with this pattern")
    parser.add_argument("--data-dir", type=Path, help="where UCI and OS files are")
    parser.add_argument("--out", type=Path, default=Path("out/bars.json"), help="file")
    parser.add_argument("--label", default=LABEL, help=f"of the version ({LABEL})")
    parser.add_argument("--old", default="0.2.0", help="to compare with (0.2.0)")
    parser.add_argument("--quick", action="store_true", help="as small as can be")
    words = "2M inducing points if one set of points is all there is; M on 0.2.0"
    parser.add_argument("--storage-of-old", action="store_true", help=words)
    chosen = parser.parse_args(arguments)
    if unknown := {*chosen.cases} - {*CASES}:
        parser.error(f"no {sorted(unknown)}; there are {list(CASES)}")
    torch.set_num_threads(1)
    on = Setting(chosen.data_dir, chosen.quick, chosen.storage_of_old)
    print(f"{chosen.label} from {Path(torch_ssgp.__file__).parent}")
    with mock.patch.object(changes, "INDUCING", on.points(changes.INDUCING)):
        for case in chosen.cases or CASES:
            run(case, on, chosen, Table(chosen.out, KEYS, header()))


if __name__ == "__main__":
    main()

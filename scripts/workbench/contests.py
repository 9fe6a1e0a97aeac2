"""All methods over the same streams: accuracy against running time, and memory."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from workbench import streams
from workbench.baselines import (
    BatchSGPR,
    Careful,
    Method,
    PaperForm,
    Streaming,
    WindowedGP,
    WindowedSGPR,
    normal_scores,
)
from workbench.cells import Cell, Settings
from workbench.common import peak_mib, reset_peak, resident_mib
from workbench.results import Row
from workbench.streams import Stream
from workbench.uncollapsed import SVI, OnlineConditioning


def trace(method: Method, stream: Stream, max_test: int = 2000) -> Row:
    """Accuracy and running time (training and testing) after every batch.

    After a batch, at most ``max_test`` test points are predicted, evenly chosen among
    those that the stream has come past; after the last batch, all of them.
    """
    rows, seconds, reach = [], 0.0, -math.inf
    last = len(stream) - 1
    for k, (x, y) in enumerate(stream.batches):
        reach = max(reach, x[:, 0].max().item())
        near = stream.x_test[:, 0] <= reach
        x_test, y_test = stream.x_test[near], stream.y_test[near]
        if k < last and len(y_test) > max_test:
            kept = torch.linspace(0, len(y_test) - 1, max_test).long()
            x_test, y_test = x_test[kept], y_test[kept]
        elif k == last:
            x_test, y_test = stream.x_test, stream.y_test
        start = time.process_time()
        method.update(x, y)
        mean, variance = method.predict(x_test)
        seconds += time.process_time() - start
        rows.append({"seconds": seconds, **normal_scores(mean, variance, y_test)})
    return {
        "trace": rows,
        **rows[-1],
        "hyperparameters": method.hyperparameters(),
        "failures": getattr(method, "failures", []),
    }


def spread_points(stream: Stream, num: int) -> Tensor:
    """Points spread evenly over the range of all inputs, ``(num, d)``."""
    low, high = stream.x_train.amin(0), stream.x_train.amax(0)
    num_dims = low.numel()
    per_dim = math.ceil(num ** (1 / num_dims))
    axis = (torch.arange(per_dim, dtype=low.dtype) + 0.5) / per_dim
    grid = torch.cartesian_prod(*[axis] * num_dims).reshape(-1, num_dims)
    kept = torch.linspace(0, len(grid) - 1, num).round().long()
    return low + grid[kept] * (high - low)


class Budget(NamedTuple):
    """How much work every method gets.

    Attributes:
        steps: Adam steps a batch of ours and of the windowed sparse model, and of the
            first batch of online conditioning; all stop at a plateau.
        gp_steps: L-BFGS steps a batch of the exact GP, whose few parameters carry
            over; it stops at a plateau.
        svi_steps: Steps a batch of stochastic variational inference.
        batch_steps: L-BFGS steps of the batch model.
        gp_window: Points of the exact GP.
        sgpr_window: Points of the windowed sparse model.
        gp_first_steps: L-BFGS steps of the exact GP on the first batch.
        batch_first_steps: Adam steps of the batch model, before L-BFGS.
        max_points: Points that online conditioning does not exceed.
        last_steps: L-BFGS steps of the last batch of ours, if learned with care.
    """

    steps: int
    gp_steps: int
    svi_steps: int
    batch_steps: int
    gp_window: int
    sgpr_window: int
    gp_first_steps: int = 50
    batch_first_steps: int = 50
    max_points: int = 3000
    last_steps: int = 300


SMALL = Budget(10, 3, 10, 10, 200, 300, last_steps=20)
TIMESERIES = Budget(100, 10, 100, 300, 3000, 3000)
TERRAIN = Budget(100, 10, 100, 100, 3000, 7500)
MEMORY = Budget(
    100, 10, 0, 0, 2000, 6000, batch_first_steps=0, max_points=0, last_steps=0
)
# Whose results depend on what.
SPENDERS = {
    "steps": (
        "streaming",
        "the paper's form",
        "streaming, last batch with care",
        "windowed SGPR",
        "online conditioning",
    ),
    "gp_steps": ("windowed GP",),
    "svi_steps": ("SVI",),
    "batch_steps": ("batch SGPR",),
    "gp_window": ("windowed GP",),
    "sgpr_window": ("windowed SGPR",),
    "gp_first_steps": ("windowed GP",),
    "batch_first_steps": ("batch SGPR",),
    "max_points": ("online conditioning",),
    "last_steps": ("streaming, last batch with care",),
}
BUDGETS = {"timeseries": TIMESERIES, "terrain": TERRAIN, "memory": MEMORY}
RATES = (0.001, 0.01, 0.1)


def budget_of(name: str, quick: bool) -> Budget:
    """The budget of an experiment, tiny or not."""
    return SMALL if quick else BUDGETS[name]


def make(name: str, stream: Stream, num_inducing: int, budget: Budget) -> Method:
    """A method by its name in tables."""
    d, m, b = stream.x_test.size(-1), num_inducing, budget
    if name == "streaming":
        return Streaming(d, m, num_steps=b.steps)
    if name == "the paper's form":
        return PaperForm(d, m, num_steps=b.steps)
    if name == "streaming, last batch with care":
        steps = {"num_steps": b.steps, "last_steps": b.last_steps}
        return Careful(d, m, num_batches=len(stream), **steps)
    if name == "windowed GP":
        steps = {"num_steps": b.gp_steps, "first_steps": b.gp_first_steps}
        return WindowedGP(d, window=b.gp_window, **steps)
    if name == "windowed SGPR":
        return WindowedSGPR(d, m, window=b.sgpr_window, num_steps=b.steps)
    if name == "online conditioning":
        limit = b.max_points
        return OnlineConditioning(d, m, first_steps=b.steps, max_points=limit)
    if name == "batch SGPR":
        first = b.batch_first_steps
        return BatchSGPR(d, m, num_steps=b.batch_steps, first_steps=first)
    rate = float(name.removeprefix("SVI "))
    return SVI(d, z=spread_points(stream, m), lr=rate, num_steps=b.svi_steps)


def time_series(data: str, batch: int, quick: bool) -> Stream:
    """The pseudo-periodic series or the audio signal."""
    source = {"pseudo-periodic": streams.pseudo_periodic, "audio": streams.audio}[data]
    if quick:
        return source(first=200, batch=100, num_batches=4, thin=4, max_test=500)
    return source(first=1000, batch=batch)


def heights(data: str, batch: int, quick: bool, data_dir: str | None) -> Stream:
    """A terrain, row by row."""
    size: Row = {"first": 1000, "batch": batch}
    if quick:
        size = {"first": 300, "batch": 200, "num_batches": 3, "max_test": 500}
    if data == "terrain OS":
        return streams.terrain_os(data_dir, **size)
    return streams.terrain(**size)


def compare(
    data: str,
    method: str,
    num_inducing: int,
    batch: int,
    quick: bool,
    data_dir: str | None = None,
) -> Row:
    """One method over one stream; ``batch`` is 0 for all data at once."""
    size = batch or 1000
    if data.startswith("terrain"):
        stream = heights(data, size, quick, data_dir)
        budget = budget_of("terrain", quick)
    else:
        stream = time_series(data, size, quick)
        budget = budget_of("timeseries", quick)
    if batch == 0:
        whole = [(stream.x_train, stream.y_train)]
        stream = Stream(stream.name, whole, stream.x_test, stream.y_test, stream.notes)
    runner = make(method, stream, num_inducing, budget)
    row = trace(runner, stream)
    if method.startswith("streaming"):
        row |= memory_scores(runner, stream)
    return {**row, "converged": getattr(runner, "converged", None)}


def memory_scores(method: Streaming, stream: Stream) -> Row:
    """How the memory predicts all test points at the end; not counted in seconds."""
    found = normal_scores(*method.predict_from_memory(stream.x_test), stream.y_test)
    return {f"memory {score}": value for score, value in found.items()}


def compare_cells(
    datasets: tuple[str, ...],
    batches: tuple[int, ...],
    sizes: tuple[int, ...],
    quick: bool,
    data_dir: Path | None = None,
) -> list[Cell]:
    """Every method where it makes a difference: a full GP has no inducing points, and
    the batch model sees no batches.
    """
    cells, folder = [], data_dir and str(data_dir)

    def add(data: str, method: str, m: int, batch: int) -> None:
        size = f"M={m}" if m else "all points"
        arrival = f"batches of {batch}" if batch else "at once"
        key = f"{data}; {method}; {size}; {arrival}"
        cells.append(Cell(key, partial(compare, data, method, m, batch, quick, folder)))

    # What the claims rest on comes first.
    for data in datasets:
        for method in (
            "streaming",
            "the paper's form",
            "streaming, last batch with care",
            "windowed SGPR",
            "online conditioning",
        ):
            for m in sizes:
                for batch in batches:
                    add(data, method, m, batch)
        for m in sizes:
            add(data, "batch SGPR", m, 0)
        for batch in batches:
            add(data, "windowed GP", 0, batch)
    for rate in RATES:
        for data in datasets:
            # Not with 600 points, to save time.
            for m in [m for m in sizes if m <= 400]:
                for batch in batches:
                    add(data, f"SVI {rate:g}", m, batch)
    return cells


def timeseries_cells(settings: Settings) -> list[Cell]:
    """Both series, both sizes of batches, both numbers of inducing points."""
    batches, sizes = ((100,), (20,)) if settings.quick else ((300, 500), (100, 200))
    return compare_cells(("pseudo-periodic", "audio"), batches, sizes, settings.quick)


def terrain_cells(settings: Settings) -> list[Cell]:
    """Heights in two dimensions, row by row."""
    batches, sizes = ((200,), (30,)) if settings.quick else ((750, 1000), (400, 600))
    data = "terrain OS" if settings.data_dir else "terrain"
    return compare_cells((data,), batches, sizes, settings.quick, settings.data_dir)


# -------------------------------------------------------------------------- memory


def memory(name: str, data: str, quick: bool, data_dir: str | None) -> Row:
    """Peak memory of one method over the terrain, in a process of its own.

    What the process holds before the method exists (libraries, data) is subtracted.
    """
    stream = heights(data, 750, quick, data_dir)
    before = resident_mib()
    runner = make(name, stream, 30 if quick else 600, budget_of("memory", quick))
    method = Watched(runner, before)
    row = trace(method, stream)
    return {**row, "peak_MiB": max(method.peaks), "peaks_MiB": method.peaks}


class Watched:
    """A method whose peaks of memory are noted, one for every batch.

    Args:
        method: What is watched.
        before: What the process held before, in MiB.
    """

    def __init__(self, method: Method, before: float) -> None:
        self.method, self.before = method, before
        self.hyperparameters = method.hyperparameters
        self.peaks: list[float] = []

    def update(self, x: Tensor, y: Tensor) -> None:
        """As the method; a new peak begins."""
        reset_peak()
        self.method.update(x, y)

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As the method; the peak is noted."""
        result = self.method.predict(x)
        self.peaks.append(peak_mib() - self.before)
        return result


def memory_cells(settings: Settings) -> list[Cell]:
    """Ours and both windowed models."""
    data = "terrain OS" if settings.data_dir else "terrain"
    folder = settings.data_dir and str(settings.data_dir)
    return [
        Cell(method, partial(memory, method, data, settings.quick, folder))
        for method in ("streaming", "windowed GP", "windowed SGPR")
    ]

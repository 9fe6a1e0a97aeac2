"""Predict each datum, then learn from it: our river estimators and river's models.

    python scripts/benchmark.py prequential --data-dir DIR --workers 2
    python scripts/benchmark.py prequential --quick --out FILE

The streams are those of river with one target, and bike and elevators, which need
``--data-dir``; they are whole, or cut at ``LENGTH`` data. SolarFlare and Yeast, also in
river, are left out: each datum has several targets. Rows in the file are not run again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from river import (
    conf,
    datasets,
    dummy,
    forest,
    linear_model,
    neighbors,
    preprocessing,
    rules,
    stats,
    tree,
)

from torch_ssgp.river import StreamingGPClassifier, StreamingGPRegressor
from workbench.common import bench_parser, positive
from workbench.results import Jobs, Row, Table, header, quiet

OURS = "StreamingGP"
LENGTH = 5_000  # data of a stream, from its beginning
QUICK = 30
LEVEL = 0.9
NORMAL = 1.6448536269514722  # half the width of an interval of that level
FLOOR = 1e-12  # of probabilities and variances, before their logarithm
NAMES = ("task", "stream", "model")

Datum = tuple[dict[Hashable, Any], Any]


# --------------------------------------------------------------------------- streams


class Source(NamedTuple):
    """Where the data of a stream come from.

    Attributes:
        task: ``"regression"`` or ``"classification"``.
        data: All data, from the beginning.
        file: What has to be in ``--data-dir``, if anything.
    """

    task: str
    data: Callable[[Path | None], Iterable[Datum]]
    file: str = ""


def packaged(name: str, *parts: str) -> Callable[[Path | None], Iterator[Datum]]:
    """A stream of river's package; dates become days, and the parts that are named."""

    def data(data_dir: Path | None) -> Iterator[Datum]:
        start: datetime | None = None
        for x, y in getattr(datasets, name)():
            dates = [value for value in x.values() if isinstance(value, datetime)]
            if dates:
                start = start or dates[0]
                x = {"days": (dates[0] - start).total_seconds() / 86400}
                x |= {part: part_of(dates[0], part) for part in parts}
            yield x, y

    return data


def part_of(date: datetime, part: str) -> int:
    """Its month, hour or weekday."""
    return date.weekday() if part == "weekday" else getattr(date, part)


def from_file(name: str) -> Callable[[Path | None], Iterator[Datum]]:
    """A UCI set in order of time, or of the file if it has no time."""

    def data(data_dir: Path | None) -> Iterator[Datum]:
        assert data_dir is not None
        with np.load(data_dir / name) as arrays:
            x, y = arrays["X"], arrays["y"].reshape(-1)
            order = arrays["time_order"] if "time_order" in arrays else range(len(y))
        for k in order:
            yield {f"x{j}": float(v) for j, v in enumerate(x[k])}, float(y[k])

    return data


SOURCES = {
    "TrumpApproval": Source("regression", packaged("TrumpApproval")),
    "ChickWeights": Source("regression", packaged("ChickWeights")),
    "WaterFlow": Source("regression", packaged("WaterFlow", "hour", "weekday")),
    "AirlinePassengers": Source("regression", packaged("AirlinePassengers", "month")),
    "SP500Stocks": Source("regression", packaged("SP500Stocks")),
    "bike": Source(
        "regression", from_file("uci_bike_noleak.npz"), "uci_bike_noleak.npz"
    ),
    "elevators": Source(
        "regression", from_file("uci_elevators.npz"), "uci_elevators.npz"
    ),
    "Phishing": Source("classification", packaged("Phishing")),
    "Bananas": Source("classification", packaged("Bananas")),
    "ImageSegments": Source("classification", packaged("ImageSegments")),
    "Shuttle": Source("classification", packaged("Shuttle")),
}


# ---------------------------------------------------------------------------- models


def scaled(model: Any) -> Any:
    """A model behind a scaler."""
    return preprocessing.StandardScaler() | model


MODELS: dict[str, dict[str, Callable[[], Any]]] = {
    "regression": {
        OURS: StreamingGPRegressor,
        "linear": lambda: scaled(linear_model.LinearRegression()),
        "KNN": lambda: scaled(neighbors.KNNRegressor()),
        "Hoeffding adaptive tree": lambda: scaled(
            tree.HoeffdingAdaptiveTreeRegressor(seed=0)
        ),
        "adaptive random forest": lambda: scaled(forest.ARFRegressor(seed=0)),
        "Mondrian forest": lambda: scaled(forest.AMFRegressor(seed=0)),
        "AMRules": lambda: scaled(rules.AMRules()),
        "mean": lambda: dummy.StatisticRegressor(stats.Mean()),
    },
    "classification": {
        OURS: StreamingGPClassifier,
        "linear": lambda: scaled(linear_model.SoftmaxRegression()),
        "KNN": lambda: scaled(neighbors.KNNClassifier()),
        "Hoeffding adaptive tree": lambda: scaled(
            tree.HoeffdingAdaptiveTreeClassifier(seed=0)
        ),
        "adaptive random forest": lambda: scaled(forest.ARFClassifier(seed=0)),
        "Mondrian forest": lambda: scaled(forest.AMFClassifier(seed=0)),
        "frequencies": dummy.PriorClassifier,
    },
}


# ----------------------------------------------------------------------------- a run


class Errors:
    """Mean square of all errors so far, which stands in for a missing variance."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def deviation(self) -> float:
        """Square root of it; 1 before the first error."""
        return math.sqrt(self.total / self.count) if self.count else 1.0

    def add(self, error: float) -> None:
        """One more."""
        self.total, self.count = self.total + error**2, self.count + 1


def regress(model: Any, stream: list[Datum]) -> Row:
    """Scores of predictions, each made before its datum was learned."""
    errors, absolute, square, density, inside = Errors(), [], [], [], []
    start = time.process_time()
    for k, (x, y) in enumerate(stream):
        if isinstance(model, StreamingGPRegressor):
            target = model.predict_one(x, with_dist=True)
            mean, deviation = target.mu, target.sigma
            interval = model.predict_interval_one(x, LEVEL)
        else:
            mean, deviation = model.predict_one(x) or 0.0, errors.deviation()
            half = NORMAL * deviation
            interval = conf.Interval(lower=mean - half, upper=mean + half)
        if k:  # nobody can predict the first
            error = y - mean
            errors.add(error)
            absolute.append(abs(error))
            square.append(error**2)
            variance = max(deviation**2, FLOOR)
            density.append(
                -0.5 * (math.log(2 * math.pi * variance) + error**2 / variance)
            )
            inside.append(y in interval)
        model.learn_one(x, y)
    return {
        "MAE": average(absolute),
        "RMSE": math.sqrt(average(square)),
        "log density": average(density),
        "inside": average(inside),
        "cpu_seconds": time.process_time() - start,
    }


def classify(model: Any, stream: list[Datum]) -> Row:
    """Scores of labels and probabilities."""
    right, density = [], []
    start = time.process_time()
    for k, (x, y) in enumerate(stream):
        probabilities = model.predict_proba_one(x)
        if k:
            label = max(probabilities, key=probabilities.get, default=None)
            right.append(label == y)
            density.append(math.log(max(probabilities.get(y, 0.0), FLOOR)))
        model.learn_one(x, y)
    return {
        "accuracy": average(right),
        "log density": average(density),
        "cpu_seconds": time.process_time() - start,
    }


def average(values: list[Any]) -> float:
    """The mean."""
    return sum(values) / len(values)


def run(task: str, name: str, model: str, length: int, data_dir: Path | None) -> Row:
    """The row of one model on one stream."""
    torch.manual_seed(0)
    # All of it, as river closes a file at its end only.
    stream = list(SOURCES[name].data(data_dir))[:length]
    score = {"regression": regress, "classification": classify}[task]
    with quiet():
        row = score(MODELS[task][model](), stream)
    return {"data": len(stream), **row}


def jobs(
    length: int,
    data_dir: Path | None,
    streams: Iterable[str] = SOURCES,
    models: Iterable[str] = (),
) -> Jobs:
    """Streams x models, each a job; streams without their file are left out."""
    return {
        (source.task, name, model): partial(
            run, source.task, name, model, length, data_dir
        )
        for name, source in SOURCES.items()
        if name in streams
        if not source.file or (data_dir and (data_dir / source.file).exists())
        for model in MODELS[source.task]
        if not models or model in models
    }


def main(arguments: list[str]) -> None:
    """Run what is missing."""
    parser = bench_parser(__doc__, "data/prequential.json")
    parser.add_argument("--length", type=positive, default=LENGTH, help=f"({LENGTH})")
    parser.add_argument("--streams", nargs="*", choices=[*SOURCES], default=[*SOURCES])
    parser.add_argument("--models", nargs="*", default=(), help="only these")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    length = QUICK if chosen.quick else chosen.length
    made = header(others=["river"], length=length, level=LEVEL)
    todo = jobs(length, chosen.data_dir, chosen.streams, chosen.models)
    table = Table(chosen.out, NAMES, made)
    table.run(todo, again=chosen.again, workers=chosen.workers)

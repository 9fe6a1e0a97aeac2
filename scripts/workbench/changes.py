"""Streams that change: forget="auto" beside fixed powers and a window.

    python scripts/benchmark.py changes                 streams, sensor and points
    python scripts/benchmark.py changes streams --seeds 3
    python scripts/benchmark.py changes sensor --readings 10000
    python scripts/benchmark.py changes points          annotated series of river
    python scripts/benchmark.py changes still           nothing changes: false alarms
    python scripts/benchmark.py changes --quick --out DIR
    python scripts/benchmark.py changes --page          the page from what was written

Every batch is predicted, then learned. Rows in the file are not run again.
"""

from __future__ import annotations

import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from river import drift
from torch import Tensor

from torch_ssgp import StreamingGP
from torch_ssgp.exceptions import StreamingGPWarning
from workbench import changes_page, exact
from workbench.change_streams import NAMES, Changing, annotated, make, sensor, still
from workbench.changes_page import AUTO, FIXED, NOTHING, WINDOW
from workbench.common import DOCS, new_parser, positive
from workbench.results import Jobs, Row, Table, header, read

INDUCING = 30
BATCH = 20
BATCHES = 30
STEPS = 50
WIDTH = 5 * BATCH  # data in the window of the exact model
ALARM = 0.5  # powers below it are a beginning
SENSOR_INDUCING = 100
READINGS = 2000
LAST = 300  # readings of the exact model of a sensor
PIECE = 5  # readings of an annotated series in an update
# Data in a batch, and batches, of streams in which nothing changes.
STILL = {1: 60, 3: 50, 10: 40, 30: 20, 100: 10, 1000: 5}
STILL_SEEDS = 20
COLUMNS = ("table", "stream", "model", "seed")


class Size(NamedTuple):
    """How much of everything is run."""

    batches: int = BATCHES
    readings: int = READINGS
    points: int | None = None
    still: dict[int, int] = STILL
    still_seeds: int = STILL_SEEDS


QUICK = Size(batches=6, readings=40, points=40, still={1: 5, 10: 2}, still_seeds=1)


# -------------------------------------------------------------------------- streams


def stream_row(name: str, model: str, seed: int, size: Size) -> Row:
    """One model on one stream: errors of predictions before their data were learned."""
    torch.manual_seed(0)
    stream = make(name, size.batches, BATCH, seed)
    start = time.process_time()
    errors, alarms = (windowed if model == WINDOW else streamed)(model, stream)
    return {
        "data": size.batches * BATCH,
        "error": average(errors),
        "changes": stream.num_changes,
        "alarms": len(alarms),
        "at": alarms,
        "cpu_seconds": time.process_time() - start,
    }


def streamed(model: str, stream: Changing) -> tuple[list[float], list[int]]:
    """Errors of a streaming model by batch, and the batches at which it began anew."""
    kernel = ScaleKernel(RBFKernel(ard_num_dims=stream.x.size(-1)))
    likelihood = BernoulliLikelihood() if stream.is_labels else None
    gp = StreamingGP(kernel, likelihood, num_inducing=INDUCING).double()
    forget = FIXED.get(model, "auto")
    errors, alarms = [], []
    for k, (x, y, scale) in enumerate(stream.batches()):
        if k:
            mean = gp.predict(x).mean.detach()
            errors.append(error(mean, y, scale, stream.is_labels))
        result = gp.update(x, y, forget=forget, num_steps=STEPS)
        if model == AUTO and float(result.forgot) < ALARM:
            alarms.append(k)
    return errors, alarms


def windowed(model: str, stream: Changing) -> tuple[list[float], list[int]]:
    """The same of an exact model that is learned anew on the last few batches."""
    errors: list[float] = []
    seen_x, seen_y = stream.x[:0], stream.y[:0]
    for x, y, scale in stream.batches():
        if len(seen_y):
            mean = fit_exact(seen_x, seen_y)(x)
            errors.append(error(mean, y, scale, stream.is_labels))
        seen_x = torch.cat([seen_x, x])[-WIDTH:]
        seen_y = torch.cat([seen_y, y])[-WIDTH:]
    return errors, []


class Predictor(NamedTuple):
    """An exact model in units of its data."""

    gp: exact.Exact
    center: Tensor
    unit: Tensor

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        with exact.dense():
            return self.center + self.unit * self.gp(x).mean


def fit_exact(x: Tensor, y: Tensor, kernel: Any = None, steps: int = 30) -> Predictor:
    """Learn an exact model, targets standardized."""
    center, unit = y.mean(), y.std().clamp_min(1e-9)
    kernel = kernel or ScaleKernel(RBFKernel(ard_num_dims=x.size(-1)))
    with exact.dense():
        gp, _ = exact.run_exact(
            [kernel], x, (y - center) / unit, num_steps=steps, adam=None
        )
    return Predictor(gp, center, unit)


def error(mean: Tensor, y: Tensor, scale: float, is_labels: bool) -> float:
    """RMSE of a batch in units of the stream, or the share of wrong labels."""
    if is_labels:
        return float(((mean > 0.5) != (y > 0.5)).double().mean())
    return float((mean - y).square().mean().sqrt()) / scale


def average(values: list[float]) -> float:
    """The mean."""
    return sum(values) / len(values)


# ---------------------------------------------------------------------------- still


def still_row(batch: int, model: str, seed: int, size: Size) -> Row:
    """A stream in which nothing changes: its alarms, and how it ends."""
    torch.manual_seed(0)
    stream = still(batch, size.still[batch], seed)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=stream.x_test.size(-1)))
    gp = StreamingGP(kernel, num_inducing=INDUCING).double()
    start = time.process_time()
    forgot = [
        float(gp.update(x, y, forget=FIXED.get(model, "auto")).forgot)
        for x, y in stream.batches
    ]
    seconds = time.process_time() - start
    square = (gp(stream.x_test).mean.detach() - stream.f_test).square()
    return {
        "updates": len(forgot),
        "alarms": sum(power < ALARM for power in forgot),
        "faded": sum(ALARM <= power < 1 for power in forgot),
        "error": float(square.mean().sqrt()),
        "cpu_seconds": seconds,
    }


# --------------------------------------------------------------------------- sensor


def sensor_row(model: str, size: Size) -> Row:
    """A series that grows: errors one step ahead, by tenths of it."""
    torch.manual_seed(0)
    t, y = sensor(size.readings)
    step = 12 if "12" in model else 1
    gp = StreamingGP(ScaleKernel(MaternKernel()), num_inducing=SENSOR_INDUCING).double()
    start, square = time.process_time(), []
    for k in range(0, len(y), step):
        x_new, y_new = t[k : k + step], y[k : k + step]
        if k:
            square.append((gp(x_new).mean.detach() - y_new).square())
        gp.update(x_new, y_new, forget="auto", num_steps=STEPS)
    seconds = time.process_time() - start
    tenth = len(y) // 10
    errors = torch.cat([square[0].new_full((step,), torch.nan), *square])
    tenths = [
        float(part.nanmean().sqrt()) for part in errors[: 10 * tenth].split(tenth)
    ]
    reference = exact_ahead(t, y, step, 9 * tenth, 10 * tenth)
    return {
        "data": len(y),
        "tenths": tenths,
        "last_to_second": tenths[-1] / tenths[1],
        "exact": reference,
        "last_to_exact": tenths[-1] / reference,
        "ms": 1000 * seconds / len(y),
    }


def exact_ahead(t: Tensor, y: Tensor, step: int, begin: int, end: int) -> float:
    """RMSE one step ahead of an exact model of the last readings.

    Its hyperparameters are learned once, where the last tenth begins.
    """
    low = max(begin - LAST, 0)
    kernel = ScaleKernel(MaternKernel())
    fitted = fit_exact(t[low:begin], y[low:begin], kernel, steps=60)
    square = []
    begin -= begin % step  # as the stream was cut
    for k in range(begin, end, step):
        seen = slice(max(k - LAST, 0), k)
        fitted.gp.set_train_data(
            t[seen], (y[seen] - fitted.center) / fitted.unit, strict=False
        )
        square.append((fitted(t[k : k + step]) - y[k : k + step]).square())
    return float(torch.cat(square).mean().sqrt())


# --------------------------------------------------------------------------- points

DETECTORS = {
    "ADWIN": drift.ADWIN,
    "Page-Hinkley": drift.PageHinkley,
    "KSWIN": partial(drift.KSWIN, seed=0),
}


def points_row(name: str, model: str, size: Size) -> Row:
    """Change points that were found in an annotated series, and how well."""
    torch.manual_seed(0)
    series = annotated(name, size.points)
    found = detected(series.y) if model == AUTO else alarms_of(model, series.y)
    margin = max(round(0.05 * len(series.y)), 1)
    precision, recall = agreement(found, series.changes, margin)
    return {
        "data": len(series.y),
        "found": len(found),
        "precision": precision,
        "recall": recall,
        "F1": 2 * precision * recall / (precision + recall),
        "at": found,
    }


def detected(y: Tensor) -> list[int]:
    """Where a model of the series over time begins anew."""
    t = torch.arange(len(y), dtype=y.dtype).unsqueeze(-1)
    gp = StreamingGP(ScaleKernel(MaternKernel()), num_inducing=INDUCING).double()
    found = []
    for k in range(0, len(y), PIECE):
        piece = slice(k, k + PIECE)
        result = gp.update(t[piece], y[piece], forget="auto", num_steps=STEPS)
        if float(result.forgot) == 0:  # dropping an old stretch is no alarm
            found.append(k)
    return found


def alarms_of(model: str, y: Tensor) -> list[int]:
    """Where a detector of river says that there was a change."""
    detector, found = DETECTORS[model](), []
    for k, value in enumerate(y.tolist()):
        detector.update(value)
        if detector.drift_detected:
            found.append(k)
    return found


def agreement(
    found: list[int], annotators: list[list[int]], margin: int
) -> tuple[float, float]:
    """Precision over all annotators together, recall averaged over them.

    As in the Turing benchmark of change points: the beginning counts as a change that
    all have found, and an annotation is found by one alarm only.
    """
    alarms = sorted({0, *found})
    union = sorted({0, *(t for each in annotators for t in each)})
    precision = matched(union, alarms, margin) / len(alarms)
    recalls = [
        matched(sorted({0, *each}), alarms, margin) / len({0, *each})
        for each in annotators
    ]
    return precision, average(recalls)


def matched(truth: list[int], alarms: list[int], margin: int) -> int:
    """How many true changes have an alarm of their own close to them."""
    free, count = set(alarms), 0
    for t in truth:
        near = [a for a in free if abs(a - t) <= margin]
        if near:
            free.remove(min(near, key=lambda a: (abs(a - t), a)))
            count += 1
    return count


SERIES = (
    "Bitcoin",
    "UKCoalEmploy",
    "AirlinePassengers",
    "RunLog",
    "Occupancy",
    "Apple",
)


# ----------------------------------------------------------------------------- a run


def jobs(
    tables: list[str],
    size: Size,
    seeds: int,
    only_streams: list[str],
    only_models: list[str],
) -> Jobs:
    """Everything that was asked for, each cell a job."""
    found: dict[Any, Any] = {}
    if "streams" in tables:
        for seed in range(seeds):
            for name in only_streams or NAMES:
                for model in (AUTO, *FIXED, WINDOW):
                    if model != WINDOW or name != "boundary jumps":
                        key = ("streams", name, model, seed)
                        found[key] = partial(stream_row, name, model, seed, size)
    if "points" in tables:
        for name in SERIES:
            for model in (AUTO, *DETECTORS):
                key = ("points", name, model, 0)
                found[key] = partial(points_row, name, model, size)
    if "sensor" in tables:
        for model in ("batches of 12", "single points"):
            found["sensor", "5 minutes", model, 0] = partial(sensor_row, model, size)
    if "still" in tables:
        for seed in range(size.still_seeds):
            for batch in size.still:
                for model in (AUTO, NOTHING):
                    key = ("still", f"batches of {batch}", model, seed)
                    found[key] = partial(still_row, batch, model, seed, size)
    return {
        key: job
        for key, job in found.items()
        if not only_models or key[2] in only_models
    }


def main(arguments: list[str]) -> None:
    """Run what is missing, write the file and the page."""
    parser = new_parser(__doc__)
    tables = ("streams", "points", "sensor", "still")
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(tables)} (all)")
    parser.add_argument("--seeds", type=positive, default=1, help="of streams (1)")
    parser.add_argument(
        "--batches", type=positive, default=BATCHES, help=f"({BATCHES})"
    )
    parser.add_argument(
        "--readings", type=positive, default=READINGS, help="of a sensor"
    )
    parser.add_argument("--streams", nargs="*", default=[], choices=NAMES, help="only")
    parser.add_argument("--models", nargs="*", default=[], help="only these")
    parser.add_argument("--quick", action="store_true", help="a few data of each")
    parser.add_argument("--again", action="store_true", help="replace rows")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder (docs)")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.tables) - set(tables)
    if unknown:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(tables)}.")
    path = chosen.out / "data" / "changes.json"
    if not chosen.page:
        torch.set_num_threads(1)
        size = QUICK if chosen.quick else Size(chosen.batches, chosen.readings)
        made = header(
            others=["river"],
            inducing=INDUCING,
            batch=BATCH,
            batches=size.batches,
            steps=STEPS,
            window=WIDTH,
            sensor_inducing=SENSOR_INDUCING,
            piece=PIECE,
        )
        todo = jobs(
            chosen.tables or [*tables],
            size,
            chosen.seeds,
            chosen.streams,
            chosen.models,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StreamingGPWarning)
            Table(path, COLUMNS, made, digits=4).run(todo, again=chosen.again)
    text = changes_page.page(read(path))
    (chosen.out / "changes.md").write_text(text, encoding="utf-8")

"""The picture of the README: one real stream that changes, predicted and then learned.

    python scripts/benchmark.py picture            docs/data/picture.json
    python scripts/benchmark.py picture --draw     the picture from what was written

Every model predicts a reading before it learns it. Ours is ``torch_ssgp.river`` with
its defaults. The paper's form keeps the past at the inducing points, with the noise it
had, and forgets nothing; when it learns is our choice, for both. Batch is an exact GP
with the same kernel and all data so far, its hyperparameters learned anew every
``EVERY`` readings. Of river's models the one with the smallest error is drawn. Seconds
are those of the processor.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot

from torch_ssgp import StreamingGP
from torch_ssgp.estimators import default_kernel
from torch_ssgp.river import StreamingGPRegressor
from workbench.common import bench_parser, positive, save
from workbench.exact import dense, run_exact
from workbench.prequential import LEVEL, MODELS, OURS, SOURCES, Datum
from workbench.results import Contents, Row, Table, header, read

STREAM, UNIT = "TrumpApproval", "approval, per cent"
FIRST, EVERY, INDUCING = 10, 25, 50
PAPER, BATCH = "the paper's form", "batch"
COLORS = {OURS: "tab:blue", BATCH: "0.35", PAPER: "tab:orange"}
LABELS = {OURS: "torch_ssgp", BATCH: "batch: an exact GP on all data so far"}
WINDOW = 50  # readings, of the running error


def ours(data: list[Datum]) -> Iterator[tuple[float, ...]]:
    """Means, and intervals."""
    model = StreamingGPRegressor(num_inducing=INDUCING)
    for x, y in data:
        interval = model.predict_interval_one(x, LEVEL)
        yield model.predict_one(x), interval.lower, interval.upper
        model.learn_one(x, y)


def rivers(name: str, data: list[Datum]) -> Iterator[tuple[float, ...]]:
    """One of river's models."""
    model = MODELS["regression"][name]()
    for x, y in data:
        yield (float(model.predict_one(x) or 0.0),)
        model.learn_one(x, y)


def tensors(data: list[Datum]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs ``(n, d)`` and targets ``(n,)``."""
    x = torch.tensor([[float(v) for v in x.values()] for x, _ in data]).double()
    return x, torch.tensor([float(y) for _, y in data]).double()


def paper(data: list[Datum]) -> Iterator[tuple[float, ...]]:
    """The past at the inducing points, with its noise; nothing is forgotten."""
    kernel = default_kernel(len(data[0][0]))
    sizes = {"num_inducing": INDUCING, "memory_size": INDUCING}
    model = StreamingGP(kernel, share_noise=False, **sizes).double()
    for x, y in zip(*(part.split(1) for part in tensors(data)), strict=True):
        yield (float(model(x).mean.detach()),)
        model.update(x, y, forget=1.0)


def batch(data: list[Datum]) -> Iterator[tuple[float, ...]]:
    """All data so far; of the first readings their mean."""
    x, y = tensors(data)
    for n in range(len(data)):
        if n < FIRST:
            yield (float(y[:n].mean()) if n else 0.0,)
            continue
        if n == FIRST or n % EVERY == 0:
            level, scale = y[:n].mean(), y[:n].std()
            kernel = default_kernel(x.size(-1)).double()
            kernel.base_kernel.lengthscale = x[:n].std(0).clamp(min=1e-3)
            target = (y - level) / scale
            model, _ = run_exact([kernel], x[:n], target[:n], num_steps=50)
        with dense(), torch.no_grad():
            model.set_train_data(x[:n], target[:n], strict=False)
            yield (float(model(x[n : n + 1]).mean * scale + level),)


def run(name: str, length: int | None) -> Row:
    """All predictions of one model."""
    torch.manual_seed(0)
    data = list(SOURCES[STREAM].data(None))[:length]
    start, makers = time.process_time(), {OURS: ours, PAPER: paper, BATCH: batch}
    made = list(makers[name](data) if name in makers else rivers(name, data))
    seconds = time.process_time() - start
    columns = zip(("mean", "lower", "upper"), zip(*made, strict=True), strict=False)
    return {"y": [y for _, y in data], **dict(columns), "seconds": seconds}


def shown(file: Contents) -> list[tuple[str, np.ndarray, Row]]:
    """Label, errors from the second reading on, and row; the best model first.

    Of river's models only the best.
    """
    error = {
        row["model"]: np.abs(np.subtract(row["y"], row["mean"]))[1:]
        for row in file.rows
    }
    rows = sorted(file.rows, key=lambda row: error[row["model"]].mean())
    best = next(row["model"] for row in rows if row["model"] not in COLORS)
    labels = {PAPER: PAPER, **LABELS, best: f"best of river: {best}"}
    return [
        (labels[row["model"]], error[row["model"]], row)
        for row in rows
        if row["model"] in labels
    ]


def table(file: Contents) -> list[Row]:
    """Errors and seconds, a column for each model."""
    found = shown(file)
    errors = {label: f"{error.mean():.2f}" for label, error, _ in found}
    seconds = {label: row.get("seconds") for label, _, row in found}
    return [{"": "mean absolute error", **errors}, {"": "CPU seconds", **seconds}]


def running(values: np.ndarray) -> list[float]:
    """Means of the last ``WINDOW`` values, of fewer at first."""
    return [values[max(0, k - WINDOW) : k].mean() for k in range(1, len(values) + 1)]


def draw(file: Contents, path: Path) -> None:
    """The stream with our intervals above, running errors of four models below."""
    size = {"figsize": (10, 6), "height_ratios": (1, 1.15), "sharex": True}
    figure, (band, error) = pyplot.subplots(2, **size)
    for label, errors, row in reversed(shown(file)):
        color = COLORS.get(row["model"], "tab:green")
        style = {"color": color, "label": f"{label}: {errors.mean():.2f}"}
        width = 2.4 if row["model"] == OURS else 1.4
        error.plot(range(1, len(errors) + 1), running(errors), lw=width, **style)
        if row["model"] == OURS:
            y, time = np.array(row["y"][1:]), range(1, len(row["y"]))
            band.plot(time, y, ".", color="0.25", ms=3, label="readings")
            ends = row["lower"][1:], row["upper"][1:]
            text = "torch_ssgp, 90 % interval before the reading"
            band.fill_between(time, *ends, color=color, alpha=0.3, lw=0, label=text)
            margin = 0.15 * np.ptp(y)
            band.set_ylim(y.min() - margin, y.max() + margin)
    band.set_ylabel(file.header["unit"])
    error.set(xlabel="readings so far", ylim=(0, None))
    error.set_ylabel(f"mean absolute error,\nlast {WINDOW} readings")
    band.legend(fontsize=9, loc="best")
    error.legend(fontsize=9, title="average over all", title_fontsize=9)
    for ax in (band, error):
        ax.grid(color="0.93")
    figure.tight_layout()
    save(figure, path)


def main(arguments: list[str]) -> None:
    """Run what is missing, and draw."""
    parser = bench_parser(__doc__, "data/picture.json")
    parser.add_argument("--length", type=positive, help="readings (all)")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    chosen = parser.parse_args(arguments)
    if not chosen.draw:
        torch.set_num_threads(1)
        length = 40 if chosen.quick else chosen.length
        settings = {"inducing": INDUCING, "every": EVERY, "length": length}
        made = header(others=["river"], stream=STREAM, unit=UNIT, **settings)
        names = [*MODELS["regression"], BATCH, PAPER]
        jobs = {(name,): partial(run, name, length) for name in names}
        rows = Table(chosen.out, ["model"], made)
        rows.run(jobs, again=chosen.again, workers=chosen.workers)
    draw(read(chosen.out), chosen.out.parents[1] / "figures" / "picture.png")

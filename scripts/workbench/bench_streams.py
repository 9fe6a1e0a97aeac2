"""Streams that are hard for a small memory, each compared with all data at once.

    python scripts/benchmark.py streams --out docs/data/streams.json
    python scripts/benchmark.py streams small --only "batches of 1," --out FILE
    python scripts/benchmark.py streams --methods exact batch --out FILE
    python scripts/benchmark.py streams --again stream --out FILE

``small``    60 stationary streams of 1, 2, 5 or 10 points a batch
``periods``  weekly and daily series, one period a batch; forecast of the next one
``labels``   labels that arrive class by class, or in random order
``deep``     a small network before the kernel

A stream is a new model and one ``model.update(x, y)`` per batch, with default options;
the digits have the options of ``scripts/likelihoods.py``. The references:

``batch``    The same model, given all data in one update: 300 steps of Adam, and again
             300 of L-BFGS; the fit with the larger bound counts, and the seconds are
             those of both.
``forget=1`` The same stream, of which nothing is forgotten; ``small`` alone.
``exact``    GPyTorch's ``ExactGP`` with the same kernel on all data: L-BFGS to a
             plateau from two starts, or 500 steps of Adam at 0.01 for deep kernels.

Rows already in the file are not run again, so a run can be interrupted and resumed.
References are kept when the version changes; streams of another version are run again.
``--again`` drops the rows of a method first. Seconds are processor time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from torch_ssgp import StreamingGP
from workbench import likelihoods, streams
from workbench.baselines import CAREFUL, new_kernel, small_budget
from workbench.bench_streams_tables import (
    BATCH,
    CARE,
    EXACT,
    KEPT,
    METHODS,
    NAMES,
    STREAM,
    sections,
)
from workbench.common import new_parser, positive
from workbench.exact import dense, run_exact
from workbench.hard_streams import (
    DEEP_DATA,
    ORDERS,
    SERIES,
    Small,
    banana_batches,
    deep_data,
    deep_kernel,
    series_data,
    series_kernel,
    series_starts,
    small_data,
    small_streams,
)
from workbench.results import Row, Table, header, read
from workbench.running import Batches, follow, wrong_labels

BATCH_STEPS = 300  # of Adam, and of L-BFGS

Make = Callable[[], StreamingGP]


class Key(NamedTuple):
    """What names a row."""

    bench: str
    case: str
    seed: int
    method: str


Jobs = dict[Key, Callable[[], Row]]


# ------------------------------------------------------------------- what all share


def run_stream(model: StreamingGP, batches: Batches, **options: Any) -> Row:
    """Update after update."""
    run = follow(partial(model.update, **options), batches)
    return {"updates": len(run.sizes), **run.row()}


def run_batch(
    make: Make, x: Tensor, y: Tensor, num_steps: int = BATCH_STEPS
) -> tuple[StreamingGP, Row]:
    """All data in one update, by two optimisers; the larger bound wins."""
    start, fits = time.process_time(), []
    for optimizer in ("adam", "lbfgs"):
        model = make()
        with small_budget():
            result = model.update(x, y, num_steps=num_steps, optimizer=optimizer)
        fits.append((result.bound.sum().item(), optimizer, model, result.converged))
    bound, optimizer, model, converged = max(fits, key=lambda fit: fit[0])
    seconds = time.process_time() - start
    end = {"bound": bound, "optimizer": optimizer, "converged": converged}
    return model, {**end, "cpu_seconds": seconds}


def learned(make: Make, batches: Batches, method: str) -> tuple[StreamingGP, Row]:
    """A model of the batches, one after the other or all at once."""
    if method == BATCH:
        return run_batch(make, *map(torch.cat, zip(*batches, strict=True)))
    model = make()
    if method == CARE:
        *first, last = batches
        early = run_stream(model, first)
        late = run_stream(model, [last], num_steps=BATCH_STEPS, **CAREFUL)
        return model, {
            "updates": early["updates"] + late["updates"],
            "cpu_seconds": early["cpu_seconds"] + late["cpu_seconds"],
            "failure": early["failure"] or late["failure"],
        }
    options = {"forget": 1.0} if method == KEPT else {}
    return model, run_stream(model, batches, **options)


@torch.no_grad()
def rmse(model: Callable[[Tensor], MultivariateNormal], x: Tensor, f: Tensor) -> float:
    """Error of the mean against the function without noise, ``(s,)``."""
    with dense():
        return (model(x).mean - f).square().mean().sqrt().item()


# -------------------------------------------------------------------- small batches


SMALL_M = 50


def run_small(
    case: Small, method: str, memory_size: int | None, num: int | None = None
) -> Row:
    """A stream of small batches, or all of its data at once."""
    batches, x_test, f_test = small_data(case, num)

    def make() -> StreamingGP:
        return StreamingGP(
            new_kernel(case.inputs), num_inducing=SMALL_M, memory_size=memory_size
        ).double()

    model, row = learned(make, batches, method)
    kind = {"batch": case.batch, "inputs": case.inputs, "arrival": case.arrival}
    error = rmse(model, x_test, f_test)
    return {**kind, "first": case.first, "RMSE": error, **row}


def small_jobs(memory_size: int | None) -> Jobs:
    """Every stream, and its batch model."""
    return {
        Key("small", case.case, case.seed, method): partial(
            run_small, case, method, memory_size
        )
        for case in small_streams()
        for method in (BATCH, STREAM, KEPT)
    }


# -------------------------------------------------------------------------- periods


SERIES_M, SERIES_SEEDS = 100, 5
EXACT_STEPS = 300  # of L-BFGS, at most


def run_series(name: str, seed: int, method: str, memory_size: int | None) -> Row:
    """A forecast of the next period, and the periods that were learned."""
    case = SERIES[name]
    x, y, f = series_data(case, seed)
    train = slice(0, case.per_period * case.periods)
    test = slice(train.stop, None)

    def make() -> StreamingGP:
        return StreamingGP(
            series_kernel(case), num_inducing=SERIES_M, memory_size=memory_size
        ).double()

    if method == EXACT:
        model, row = run_exact(
            series_starts(case), x[train], y[train], num_steps=EXACT_STEPS, adam=None
        )
    else:
        batches = streams.split_rows(x[train], y[train], *2 * [case.per_period])
        model, row = learned(make, batches, method)
    periods = [
        each.base_kernel.period_length.item() for each in model.covar_module.kernels[1:]
    ]
    return {
        "RMSE": rmse(model, x[test], f[test]),
        "periods": periods,
        "true_periods": list(case.patterns),
        "noise": model.likelihood.noise.sqrt().item(),
        **row,
    }


def series_jobs(memory_size: int | None) -> Jobs:
    """Every series by every method."""
    return {
        Key("periods", name, seed, method): partial(
            run_series, name, seed, method, memory_size
        )
        for name in SERIES
        for seed in range(SERIES_SEEDS)
        for method in (EXACT, BATCH, STREAM, CARE)
    }


# --------------------------------------------------------------------------- labels


BANANA_M, BANANA_SEEDS = 30, 3
DIGITS_M = 100
# Those of the table of digits of scripts/likelihoods.py.
DIGITS_OPTIONS = {"num_steps": 30, "learn_inducing_points": False}


def run_banana(order: str, seed: int, method: str, memory_size: int | None) -> Row:
    """Share of test labels that are wrong."""
    batches, x_test, y_test = banana_batches(order, seed)
    make = partial(likelihoods.binary_model, BANANA_M, memory_size)
    model, row = learned(make, batches, method)
    return {"error": wrong_labels(model, x_test, y_test), **row}


def run_digits(method: str, memory_size: int | None) -> Row:
    """Ten classes, one after the other or at once, with the options of the table."""
    x, y, x_test, y_test = likelihoods.digits()
    model = likelihoods.digits_model(10, DIGITS_M, memory_size)
    parts = [slice(None)] if method == BATCH else [y == label for label in range(10)]
    row = run_stream(model, [(x[part], y[part]) for part in parts], **DIGITS_OPTIONS)
    accuracy, _ = likelihoods.class_accuracies(model, x_test, y_test)
    return {"error": 1 - accuracy, **row}


def label_jobs(memory_size: int | None) -> Jobs:
    """Streams in every order; a batch has none."""
    jobs: Jobs = {
        Key("labels", "banana", 0, BATCH): partial(
            run_banana, "random", 0, BATCH, memory_size
        )
    }
    for order in ORDERS:
        for seed in range(BANANA_SEEDS):
            jobs[Key("labels", f"banana, {order}", seed, STREAM)] = partial(
                run_banana, order, seed, STREAM, memory_size
            )
    for case, method in (("digits", BATCH), ("digits, class by class", STREAM)):
        job = partial(run_digits, method, memory_size)
        jobs[Key("labels", case, 0, method)] = job
    return jobs


# --------------------------------------------------------------------- deep kernels


DEEP_M, DEEP_SEEDS, DEEP_BATCH = 100, 3, 200
DEEP_STEPS, DEEP_RATE = 500, 0.01  # of Adam, for exact models


def run_deep(
    seed: int, method: str, memory_size: int | None, num: int = DEEP_DATA
) -> Row:
    """A model with a deep kernel; all methods begin with the same weights."""
    x, y, x_test, f_test = deep_data(seed, num)

    def make() -> StreamingGP:
        return StreamingGP(
            deep_kernel(seed), num_inducing=DEEP_M, memory_size=memory_size
        ).double()

    if method == EXACT:
        model, row = run_exact(
            [deep_kernel(seed)], x, y, num_steps=DEEP_STEPS, adam=DEEP_RATE
        )
    else:
        batches = streams.split_rows(x, y, DEEP_BATCH, DEEP_BATCH)
        model, row = learned(make, batches, method)
    noise = model.likelihood.noise.sqrt().item()
    return {"RMSE": rmse(model, x_test, f_test), "noise": noise, **row}


def deep_jobs(memory_size: int | None) -> Jobs:
    """Every seed by every method."""
    return {
        Key("deep", "deep kernel", seed, method): partial(
            run_deep, seed, method, memory_size
        )
        for seed in range(DEEP_SEEDS)
        for method in (EXACT, BATCH, STREAM)
    }


BENCHES: dict[str, Callable[[int | None], Jobs]] = {
    "small": small_jobs,
    "periods": series_jobs,
    "labels": label_jobs,
    "deep": deep_jobs,
}


# ------------------------------------------------------------------------ the command


def run(
    out: Path, memory_size: int | None, jobs: Jobs, again: Iterable[str] = ()
) -> list[Row]:
    """All rows that are not in the file yet; the file after every one of them.

    Args:
        out: The file.
        memory_size: Of all streams; a file of another size is refused.
        jobs: What to run.
        again: Methods whose rows are dropped first.
    """
    if out.exists() and (old := read(out).header["memory_size"]) != memory_size:
        raise SystemExit(
            f"{out} has memory_size={old}, not {memory_size}. Choose another file with "
            "--out."
        )
    table = Table(out, NAMES, header(memory_size=memory_size))

    def stale(row: Row) -> bool:
        method = row["method"]
        ours = method in (STREAM, KEPT, CARE)
        other = ours and row["version"] != table.header["torch_ssgp"]
        return Key(*table.key(row)) in jobs and (other or method in again)

    table.drop(stale)
    return table.run(jobs)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing and print the tables."""
    parser = new_parser(__doc__)
    parser.add_argument("benches", nargs="*", metavar=f"{{{','.join(BENCHES)}}}")
    parser.add_argument(
        "--out",
        "--json",
        type=Path,
        default=Path("out/streams.json"),
        help="where results are kept (out/streams.json)",
    )
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--seeds", type=positive, help="only the first seeds")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--again", nargs="+", choices=METHODS, default=())
    parser.add_argument("--memory-size", type=positive, help="of StreamingGP")
    parser.add_argument("--threads", type=positive, default=1, help="of torch (1)")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.benches) - set(BENCHES):
        parser.error(f"no {sorted(unknown)}; there are {list(BENCHES)}")
    torch.set_num_threads(chosen.threads)
    names = chosen.benches or list(BENCHES)
    jobs = {
        key: job
        for name in names
        for key, job in BENCHES[name](chosen.memory_size).items()
        if key.method in chosen.methods
        # A batch of labels is there for all orders: its name is part of theirs.
        and (chosen.only in key.case or key.case in chosen.only)
        and key.seed < (chosen.seeds or math.inf)
    }
    text = sections(run(chosen.out, chosen.memory_size, jobs, chosen.again))
    print(*(text[name] for name in names), sep="\n\n")

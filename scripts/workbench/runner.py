"""One runner: methods over streams, and where they end.

    python scripts/benchmark.py run --streams elevators bike --sizes 100 200
    python scripts/benchmark.py run --methods streaming "batch SGPR" --seeds 3

A row is named by its stream, method, number of inducing points, size of batches and
seed. Rows in the file are not run again. Seconds are those of the processor on one
thread; ``bytes`` are what a method has to keep to go on. Streams from files need
``--data-dir``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.baselines import (
    Method,
    PaperForm,
    SinglePoints,
    Sites,
    Streaming,
    WindowedGP,
    WindowedSGPR,
    learned_from_some,
    normal_scores,
)
from workbench.batch_bound import MAX_STEPS, BatchSGPR
from workbench.common import bench_parser, positive
from workbench.experts import LocalExperts
from workbench.results import Jobs, Row, Table, header
from workbench.streams import Stream
from workbench.streams.cases import FILES, STREAMS, Asked, stream_of
from workbench.streams.stream import evenly
from workbench.uncollapsed import SVI, Minibatches

NAMES = ("stream", "method", "M", "batch", "seed")
GIVEN = 1_000  # data that hyperparameters are learned from, where they are given


class Budget(NamedTuple):
    """How much work every method gets, at most."""

    steps: int = 100  # of Adam, a batch
    gp_steps: int = 10  # of L-BFGS, a batch of an exact GP
    batch_steps: int = MAX_STEPS  # evaluations of the bound by the batch model
    window: int = 3_000  # points of the windowed models
    epochs: int = 30  # passes of minibatches over all data


TINY = Budget(5, 3, 10, 100, 2)


# --------------------------------------------------------------------------- methods

OURS, POINTS, PAPER = "streaming", "streaming, single points", "the paper's form"
TWICE, MOVING = "streaming, 2M points", "streaming, moving points"
BATCH, MINIBATCHES, EXPERTS = "batch SGPR", "SVGP, minibatches", "local experts"
WINDOW, WINDOWED = "windowed GP", "windowed SGPR"
TURNS, REGIONS, LEARNED = "three sites in turns", "three sites in regions", ", learned"
SITES = (TURNS, REGIONS, TURNS + LEARNED, REGIONS + LEARNED)
RATES = (0.001, 0.01, 0.1)
Make = Callable[[Stream, int, Budget], Method]


def dims(stream: Stream) -> int:
    """Number of inputs."""
    return stream.x_test.size(-1)


def spread_points(stream: Stream, num: int) -> Tensor:
    """Points spread evenly over the range of all inputs, ``(num, d)``."""
    low, high = stream.x_train.amin(0), stream.x_train.amax(0)
    per_dim = math.ceil(num ** (1 / len(low)))
    axis = (torch.arange(per_dim, dtype=low.dtype) + 0.5) / per_dim
    grid = torch.cartesian_prod(*[axis] * len(low)).reshape(-1, len(low))
    return low + grid[evenly(len(grid), num)] * (high - low)


def given_experts(stream: Stream, num: int, b: Budget) -> LocalExperts:
    """Local experts, with hyperparameters of an exact GP on some of all data."""
    data = stream.x_train, stream.y_train
    return LocalExperts(
        learned_from_some(*data, 5 * b.gp_steps, min(GIVEN, b.window)), num
    )


def ours(stream: Stream, num: int, b: Budget, **options: Any) -> Streaming:
    """With options of updates."""
    return Streaming(dims(stream), num, {"num_steps": b.steps, **options})


METHODS: dict[str, Make] = {
    OURS: ours,
    TWICE: lambda s, m, b: ours(s, 2 * m, b),
    MOVING: lambda s, m, b: ours(s, m, b, learn_inducing_points=True),
    POINTS: lambda s, m, b: SinglePoints(dims(s), m, {"num_steps": b.steps}),
    PAPER: lambda s, m, b: PaperForm(dims(s), m, num_steps=b.steps),
    WINDOW: lambda s, m, b: WindowedGP(
        dims(s), window=m or b.window, num_steps=b.gp_steps, first_steps=5 * b.gp_steps
    ),
    WINDOWED: lambda s, m, b: WindowedSGPR(
        dims(s), m, window=b.window, num_steps=b.steps
    ),
    **{
        f"SVI {rate:g}": lambda s, m, b, rate=rate: SVI(
            dims(s), lr=rate, z=spread_points(s, m), num_steps=b.steps
        )
        for rate in RATES
    },
    **{
        name: lambda s, m, b, name=name: Sites(
            dims(s), m, b.steps, len(s), turns=TURNS in name, learned=LEARNED in name
        )
        for name in SITES
    },
    BATCH: lambda s, m, b: BatchSGPR(dims(s), m, num_steps=b.batch_steps),
    MINIBATCHES: lambda s, m, b: Minibatches(dims(s), m, epochs=b.epochs),
    EXPERTS: given_experts,  # M is the most data of an expert
}
AT_ONCE = (BATCH, MINIBATCHES)  # see all data in one update


def ends(method: Method, stream: Stream) -> Row:
    """Accuracy on all test points after the last batch."""
    start = time.process_time()
    for x, y in stream.batches:
        method.update(x, y)
    learned = time.process_time()
    scores = normal_scores(*method.predict(stream.x_test), stream.y_test)
    return {
        **scores,
        "cpu_seconds": learned - start,
        "predict_seconds": time.process_time() - learned,
        "bytes": method.num_bytes(),
    }


def traced(method: Method, stream: Stream, max_test: int = 2_000) -> Row:
    """Accuracy and seconds, training and testing, after every batch.

    After a batch, at most ``max_test`` test points are predicted, evenly chosen among
    those that the stream has come past; after the last batch, all of them.
    """
    rows, seconds, reach = [], 0.0, -math.inf
    for k, (x, y) in enumerate(stream.batches):
        reach = max(reach, x[:, 0].max().item())
        x_test, y_test = stream.x_test, stream.y_test
        if k < len(stream) - 1:
            near = (x_test[:, 0] <= reach).nonzero().squeeze(-1)
            near = near[evenly(len(near), max_test)]
            x_test, y_test = x_test[near], y_test[near]
        start = time.process_time()
        method.update(x, y)
        mean, variance = method.predict(x_test)
        seconds += time.process_time() - start
        rows.append({"seconds": seconds, **normal_scores(mean, variance, y_test)})
    failures = getattr(method, "failures", [])
    return {"trace": rows, **rows[-1], "failures": failures}


def small(stream: Stream) -> Stream:
    """The beginning of a stream, with some of its tests."""
    some = [evenly(len(y), 60) for _, y in stream.batches[:3]]
    batches = [
        (x[kept], y[kept]) for kept, (x, y) in zip(some, stream.batches, strict=False)
    ]
    kept = evenly(len(stream.y_test), 100)
    tests = {"x_test": stream.x_test[kept], "y_test": stream.y_test[kept]}
    return replace(stream, batches=batches, **tests)


class Setting(NamedTuple):
    """What is the same for all rows of a run."""

    data_dir: Path | None = None
    budget: Budget = Budget()
    quick: bool = False
    trace: bool = False


def run(on: Setting, name: str, method: str, m: int, batch: int, seed: int) -> Row:
    """One method over one stream; what fails is a row as well."""
    torch.manual_seed(seed)
    stream = stream_of(name, Asked(seed, batch, on.data_dir))
    stream = small(stream) if on.quick else stream
    if method in AT_ONCE:
        stream = replace(stream, batches=[(stream.x_train, stream.y_train)])
    m = min(m, 20) if on.quick else m
    made = METHODS[method](stream, m, TINY if on.quick else on.budget)
    try:
        row = (traced if on.trace else ends)(made, stream)
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    return {**row, "converged": getattr(made, "converged", None)}


def jobs(
    on: Setting,
    streams: Iterable[str],
    methods: Iterable[str],
    sizes: Iterable[int],
    batches: Iterable[int] = (0,),
    seeds: int = 1,
) -> Jobs:
    """Every method on every stream; those without their file are left out."""
    found = {}
    for key in product(streams, methods, sizes, batches, range(seeds)):
        name, method, m, batch, seed = key
        if name not in FILES or on.data_dir:
            # All data at once have no batches.
            key = (name, method, m, 0 if method in AT_ONCE else batch, seed)
            found[key] = partial(run, on, *key)
    return found


def main(arguments: list[str]) -> None:
    """Run what is missing."""
    parser = bench_parser(__doc__, "data/runs.json")
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=[*STREAMS])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[OURS, BATCH])
    parser.add_argument("--sizes", nargs="+", type=positive, default=[100])
    parser.add_argument("--batches", nargs="+", type=int, default=[0], help="0: usual")
    parser.add_argument("--seeds", type=positive, default=1, help="(1)")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    on = Setting(chosen.data_dir, quick=chosen.quick)
    asked = chosen.streams, chosen.methods, chosen.sizes, chosen.batches, chosen.seeds
    made = header(budget=on.budget._asdict(), quick=chosen.quick)
    table = Table(chosen.out, NAMES, made)
    table.run(jobs(on, *asked), again=chosen.again, workers=chosen.workers)

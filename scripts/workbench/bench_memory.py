"""Streams x memory sizes x seeds: what a memory finer than the model gains and costs.

    python scripts/benchmark.py memory --data-dir DIR --out docs/data/memory.json
    python scripts/benchmark.py memory --streams bike --variants "batch SGPR" default
    python scripts/benchmark.py memory tables --out docs/data/memory.json

Every row is one run with default settings, or the batch model of the same number of
inducing points that has all training data at once. ``tables`` runs nothing and prints
what is there. Rows already in the file are not run again, so a run can be interrupted
and resumed, and split over processes by ``--streams``; ``--again`` replaces them.

Batch models run to a plateau: L-BFGS begins anew where it ended until 100 evaluations
of the bound gain less than 0.01 nats per 100 data. Seconds are those of the processor,
for learning alone. A batch model's are those to the plateau; it is good enough long
before, and ``cpu_seconds_near`` says when: within 1.02 and 0.02 of its end.
Ratios of errors take an RMSE below 0.01 for 0.01, the likelihood's smallest noise.

The inner loop stops early in a stream that learns often. "Last update with care" lets
the last one take 300 steps of L-BFGS, until they gain next to nothing.

Does the memory pay, or would more inducing points do the same? R points of a memory
store their rows (a triangle, taken as R x R), their inputs (R x d) and their targets
(R); M inducing points likewise. "No memory, same storage" has M' of them, with

    M' (M' + d + 1) = M (M + d + 1) + R (R + d + 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp import StreamingGP, UpdateResult
from workbench import bench_cases
from workbench.baselines import CAREFUL, new_kernel
from workbench.batch_bound import MAX_STEPS, PLATEAU, batch_reference
from workbench.bench_cases import BATCH, CASES
from workbench.bench_memory_tables import (
    CARE,
    DEFAULT,
    KEPT,
    SIZES,
    STRICT,
    VARIANTS,
    floored,
    sections,
)
from workbench.common import new_parser, positive
from workbench.results import Row, Table, header, read
from workbench.running import follow, scores
from workbench.streams import Stream
from workbench.verdicts import gap

NAMES = ("stream", "variant", "seed")


class Budget(NamedTuple):
    """Points of a model: inducing ones, and those of its memory (``None``: default)."""

    num_inducing: int
    memory_size: int | None


def new_model(num_dims: int, budget: Budget) -> StreamingGP:
    """The model of all variants: a smooth kernel with a lengthscale per input."""
    return StreamingGP(
        new_kernel(num_dims),
        num_inducing=budget.num_inducing,
        memory_size=budget.memory_size,
    ).double()


def budget_of(variant: str, num_inducing: int, num_dims: int) -> Budget:
    """How many points a variant has where the batch model has ``num_inducing``."""
    if variant in (DEFAULT, KEPT, CARE):
        return Budget(num_inducing, None)
    if variant in SIZES:
        return Budget(num_inducing, round(SIZES[variant] * num_inducing))
    size = new_model(num_dims, Budget(num_inducing, None)).memory_size
    num = same_storage(num_inducing, size, num_dims)
    return Budget(num, num)


def same_storage(num_inducing: int, memory_size: int, num_dims: int) -> int:
    """M' of ``M' (M' + d + 1) = M (M + d + 1) + R (R + d + 1)``, to the nearest."""
    c = num_dims + 1
    numbers = sum(size * (size + c) for size in (num_inducing, memory_size))
    return round((math.sqrt(c**2 + 4 * numbers) - c) / 2)


LAST_STEPS = 300  # of an update with care


def run_stream(stream: Stream, budget: Budget, variant: str = DEFAULT) -> Row:
    """Default updates over a stream, and how they end."""
    model, forgot = new_model(stream.x_test.size(-1), budget), []
    forget, num_updates = 1.0 if variant == KEPT else None, len(stream.batches)

    def update(x: Tensor, y: Tensor) -> UpdateResult:
        is_last = len(forgot) == num_updates - 1
        with_care = variant == CARE and is_last
        options = {**CAREFUL, "num_steps": LAST_STEPS} if with_care else {}
        result = model.update(x, y, forget=forget, **options)
        forgot.append(float(result.forgot))
        return result

    run = follow(update, stream.batches)
    memory = scores(model, stream, from_memory=True)
    return {
        **budget._asdict(),
        **scores(model, stream),
        **{f"memory {name}": value for name, value in memory.items()},
        "M": model.summary.num_inducing,
        "R": model.memory.points.size(-2),
        "forgot": [[k, power] for k, power in enumerate(forgot) if power < 1],
        **run.row(),
    }


def run_batch(stream: Stream, num_inducing: int, max_steps: int = MAX_STEPS) -> Row:
    """The reference on a stream, and how it ends."""
    found = batch_reference(stream.x_train, stream.y_train, num_inducing, max_steps)
    end = scores(found.model, stream)
    trace = [
        {
            "steps": at.steps,
            "cpu_seconds": at.seconds,
            "bound": at.bound,
            **scores(found.model_at(at.variables), stream),
        }
        for at in found.path
    ]
    near = [
        each["cpu_seconds"]
        for each in trace
        if STRICT.met_by(gap(floored(each), floored(end)))
    ]
    return {
        "num_inducing": num_inducing,
        **end,
        "M": found.model.summary.num_inducing,
        "cpu_seconds": found.seconds,
        "cpu_seconds_near": min([*near, found.seconds]),
        "bound": found.bound,
        "converged": found.converged,
        "steps": found.steps,
        "restarts": found.restarts,
        "gain": found.gain,
        "failure": "",
        "trace": trace,
    }


def run(
    out: Path,
    data_dir: Path | None,
    num_seeds: int,
    only_streams: Iterable[str] = (),
    only_variants: Iterable[str] = (),
    max_steps: int = MAX_STEPS,
    again: bool = False,
) -> list[Row]:
    """All rows that are not in the file yet; the file after every one of them."""

    def one(name: str, variant: str, seed: int) -> Row:
        case = CASES[name]
        stream = case.stream(seed, data_dir)
        if variant == BATCH:
            return run_batch(stream, case.num_inducing, max_steps)
        budget = budget_of(variant, case.num_inducing, stream.x_test.size(-1))
        return run_stream(stream, budget, variant)

    batch = {"plateau": PLATEAU, "max_steps": max_steps}
    table = Table(out, NAMES, header(batch=batch, streams="default settings"))
    jobs = bench_cases.case_jobs(one, VARIANTS, num_seeds, only_streams, only_variants)
    return table.run(jobs, again=again)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing and print the tables."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "command",
        nargs="?",
        choices=["streams", "tables"],
        default="streams",
        help="run what is missing (streams), or print what is there",
    )
    parser.add_argument(
        "--out",
        "--json",
        type=Path,
        default=Path("out/memory.json"),
        help="where results are kept (out/memory.json)",
    )
    bench_cases.add_options(parser)
    parser.add_argument(
        "--variants", nargs="*", choices=[BATCH, *VARIANTS], help="only these"
    )
    parser.add_argument(
        "--max-steps",
        type=positive,
        default=MAX_STEPS,
        help=f"evaluations of the bound by a batch model ({MAX_STEPS})",
    )
    parser.add_argument("--again", action="store_true", help="replace rows of the file")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    if chosen.command == "tables":
        rows = read(chosen.out).rows
    else:
        rows = run(
            chosen.out,
            chosen.data_dir,
            chosen.seeds,
            chosen.streams or (),
            chosen.variants or (),
            chosen.max_steps,
            chosen.again,
        )
    print("\n\n".join(text for text in sections(rows).values() if text))

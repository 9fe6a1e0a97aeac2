"""Speed and accuracy, as ratios and tables.

    python scripts/benchmark.py core       cost of an update against its floor
    python scripts/benchmark.py choice     cost of choosing inducing points
    python scripts/benchmark.py policies   streams x policies x seeds; takes hours
    python scripts/benchmark.py memory     streams x memory sizes x seeds; takes hours
    python scripts/benchmark.py streams    small batches, periods, labels, deep kernels
    python scripts/benchmark.py bayesopt   cost, fantasies and regret with BoTorch
    python scripts/benchmark.py report     docs/benchmarks.md from what was written

``policies``, ``memory`` and ``bayesopt`` take the arguments of
``scripts/bench_policies.py``, ``scripts/bench_memory.py`` and
``scripts/bench_bayesopt.py``, see ``policies --help``. Accuracy on the streams of the
paper: ``scripts/reproduce.py``.

Absolute times depend on the machine; ratios within one run do not, as far as that is
possible. Every time is the median of repetitions that alternate with its floor.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor
from tqdm import tqdm

from torch_ssgp import (
    AdaptiveBudget,
    GreedyInformation,
    GreedyVariance,
    InducingPolicy,
    StreamingGP,
)
from torch_ssgp.update import UpdateOptions
from torch_ssgp.update.ascent import Ascent
from torch_ssgp.update.coordinates import coordinates
from torch_ssgp.update.learning import Update
from torch_ssgp.update.objective import Objective
from workbench.common import markdown, wrapped, write_json

Row = dict[str, Any]


def median_times(
    jobs: dict[str, Callable[[], object]], repeats: int
) -> dict[str, float]:
    """Median seconds of each job; the jobs take turns, so drifts hit all alike."""
    for job in jobs.values():
        job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def _stream_state(m: int, n: int, batch_shape: tuple[int, ...]) -> Any:
    """A model in mid-stream with ``m`` inducing points, and the next batch."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    kernel.base_kernel.lengthscale, kernel.outputscale = 0.2, 1.0
    model = StreamingGP(
        kernel, num_inducing=m, memory_size=m, batch_shape=torch.Size(batch_shape)
    ).double()
    model.likelihood.noise = 0.1
    z, x = draw(*batch_shape, m, 2), draw(*batch_shape, n, 2)
    y = torch.sin(6 * x.sum(-1))
    model.update(x, y, num_steps=0, inducing_points=z)
    return model, x, y, z


def _update(model: StreamingGP, x: Tensor, y: Tensor) -> Update:
    """The next update of a model, before it began."""
    data = model.check_data(x, y, None)
    return Update(model.known(data), data, UpdateOptions(), model.limits(data))


def _gradient_step(update: Update, z: Tensor) -> tuple[Objective, Callable[[], None]]:
    """The objective of an update at ``z``, and one step of its inner loop."""
    objective = update.objective()
    objective.start_at(z, learn=True)
    ascent = Ascent(objective, coordinates(objective, True, True), None)
    optimizer = torch.optim.Adam(ascent.etas)

    def step() -> None:
        ascent.loss()
        optimizer.step()

    return objective, step


def core_row(m: int, n: int, batch: int, repeats: int) -> Row:
    """Closed-form update and gradient step against one GEMM and one Cholesky."""
    model, x, y, z = _stream_state(m, n, (batch,) if batch > 1 else ())
    A = torch.randn(*x.shape[:-2], m, n, dtype=torch.float64)
    eye = torch.eye(m, dtype=torch.float64)

    _, step = _gradient_step(_update(model, x, y), z)
    times = median_times(
        {
            "floor": lambda: torch.linalg.cholesky(A @ A.mT / n + eye),
            "closed form": lambda: model.update(x, y, num_steps=0, inducing_points=z),
            "gradient step": step,
        },
        repeats,
    )
    floor = times["floor"]
    return {
        "M": m,
        "N": n,
        "batch": batch,
        "floor_ms": 1e3 * floor,
        "closed_form_ratio": times["closed form"] / floor,
        "gradient_step_ratio": times["gradient step"] / floor,
    }


def batching_row(repeats: int) -> Row:
    """One update of 32 streams against 32 updates, at M = 50, N = 100."""
    model, x, y, z = _stream_state(50, 100, (32,))
    single, x1, y1, z1 = _stream_state(50, 100, ())

    def loop() -> None:
        for _ in range(32):
            single.update(x1, y1, num_steps=0, inducing_points=z1)

    times = median_times(
        {
            "batched": lambda: model.update(x, y, num_steps=0, inducing_points=z),
            "loop": loop,
        },
        repeats,
    )
    return {"speedup_of_batching_32": times["loop"] / times["batched"]}


def core(repeats: int = 15) -> list[Row]:
    """Cost of an update, as ratios to what no implementation can avoid."""
    sizes = [(100, 300), (200, 500), (600, 1000)]
    cases = [(m, n, b) for b in (1, 32) for m, n in sizes]
    rows = []
    for m, n, b in tqdm(cases, desc="core"):
        # The largest case takes a second a piece; the median needs few of them.
        few = 2 if m * n * b > 3e6 else repeats
        rows.append(core_row(m, n, b, few))
    rows.append(batching_row(repeats))
    return rows


def choice_row(m: int, n: int, repeats: int) -> Row:
    """Choosing inducing points, in units of one gradient step; five are allowed."""
    model, x, y, z = _stream_state(m, n, ())
    update = _update(model, x, y)
    objective, step = _gradient_step(update, z)

    def choose(policy: InducingPolicy) -> Callable[[], Tensor]:
        return torch.no_grad()(lambda: policy(update.candidates(objective)))

    policies = (GreedyInformation(), GreedyVariance(), AdaptiveBudget())
    jobs = {type(policy).__name__: choose(policy) for policy in policies}
    times = median_times({"step": step, **jobs}, repeats)
    ratios = {f"{name} / step": times[name] / times["step"] for name in jobs}
    return {"M": m, "N": n, **ratios}


def choice(repeats: int = 15) -> list[Row]:
    """Cost of choosing inducing points."""
    return [choice_row(m, n, repeats) for m, n in [(100, 300), (200, 500), (400, 750)]]


COMMANDS = {"core": core, "choice": choice}
# Scripts with a command line of their own; the last needs the extra botorch.
OTHERS = {
    "policies": "bench_policies",
    "memory": "bench_memory",
    "streams": "bench_streams",
    "bayesopt": "bench_bayesopt",
}
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = """# Benchmarks

Written by `scripts/benchmark.py report` from the files that `--json` wrote. The tables
on the memory were made with version {memory_version}. Those on the cost of an update,
on policies and on Bayesian optimisation were made with version 0.1.0, before there was
a memory, and have not been made anew yet.

## Memory

Written by `scripts/benchmark.py memory`: streams with default settings against batch
sparse regression with the same number of inducing points (all training data at once,
all inducing points free, L-BFGS to a plateau). `R` is the size of the memory.
Predictions come from the inducing points, q(b), or from all points of the memory.
An RMSE below {memory_floor} counts as {memory_floor}: the likelihood has no smaller
noise.

{memory_streams}

{memory_remarks}

The batch models:

{memory_references}

## Periods

Written by `scripts/benchmark.py streams periods`: series with a weekly and a daily
period, streamed one period at a time with default settings. The forecast of the next
period is compared with that of an exact GP learned on all data with the same kernel.

{periods}

## Cost of an update

`floor_ms` is one product `A @ A.T` and one Cholesky factorisation of the size of the
update, in the same run on one thread; the other columns are ratios to it. Small sizes
are dominated by the overhead of many small operations, large ones by arithmetic.

{core}

## Inducing points

Cost of choosing them, in units of one gradient step of the inner loop:

{choice}

Written by `scripts/benchmark.py policies`: what each policy ends with, against batch
sparse regression of the same size (all training data at once, all inducing points free,
50 steps of Adam and at most {steps} of L-BFGS). `budget` is the number of inducing
points allowed, `M` what was used in the end. Another seed is another split or draw;
where a stream has none, targets that differ by roundings of 1e-12: a greedy choice may
tip over by a rounding, and where the budget is used up the ends then differ by far
more. Lines with several seeds have medians and ranges. All streams:

{ranking}

Stream by stream:

{policies}

{remarks}

{reading}

## Bayesian optimisation

Written by `scripts/benchmark.py bayesopt fantasies cost --out docs/data/bayesopt.json`.
A batch of fantasies against a loop over them; one update and one acquisition against
the same at 200 evaluations, beside the refit of BoTorch's exact model.

{bayesopt}
"""


def page() -> str:
    """The page of the docs, from the JSON files beside it."""
    tables = {
        name: markdown(json.loads((DOCS / "data" / f"{name}.json").read_text()))
        for name in ("core", "choice")
    }
    bayesopt = json.loads((DOCS / "data" / "bayesopt.json").read_text())
    tables["bayesopt"] = markdown([row for rows in bayesopt.values() for row in rows])
    from workbench import bench_policies

    rows = json.loads((DOCS / "data" / "policies.json").read_text())
    gap = json.loads((DOCS / "data" / "gap.json").read_text())
    tables |= bench_policies.sections(rows, gap)
    from workbench import bench_memory

    rows = list(bench_memory.read(DOCS / "data" / "memory.json").values())
    tables |= bench_memory.sections(rows)
    from workbench import bench_streams

    kept = bench_streams.read(DOCS / "data" / "streams.json").values()
    tables["periods"] = bench_streams.sections(list(kept))["periods"]
    made_with = {row["version"] for row in rows if row["variant"] != bench_memory.BATCH}
    tables["memory_version"] = " and ".join(sorted(made_with))
    return wrapped(PAGE.format(**tables))


def main(arguments: list[str] | None = None) -> None:
    """Run one benchmark, print its table, optionally write it as JSON."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in OTHERS:
        return importlib.import_module(f"workbench.{OTHERS[arguments[0]]}").main(
            arguments[1:]
        )
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", choices=[*COMMANDS, *OTHERS, "report"], help="see above"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch (1)")
    parser.add_argument("--repeats", type=int, default=15, help="of what is timed (15)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    chosen = parser.parse_args(arguments)
    if chosen.command in OTHERS:
        parser.error(f"arguments of {chosen.command} come after it.")
    torch.set_num_threads(chosen.threads)
    if chosen.command == "report":
        (DOCS / "benchmarks.md").write_text(page(), encoding="utf-8")
        return
    rows = COMMANDS[chosen.command](chosen.repeats)
    print(markdown(rows))
    if chosen.json:
        write_json(chosen.json, rows)

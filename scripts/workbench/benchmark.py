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

import importlib
import sys
from pathlib import Path

import torch

from workbench import bench_core, bench_memory_tables, bench_policies
from workbench import bench_streams_tables as stream_tables
from workbench.common import DOCS, new_parser, positive
from workbench.pages import listed, markdown, wrapped
from workbench.results import Contents, header, read, write

COMMANDS = {"core": bench_core.core, "choice": bench_core.choice}
# Commands with a command line of their own; the last needs the extra botorch.
OTHERS = {
    "policies": "bench_policies",
    "memory": "bench_memory",
    "streams": "bench_streams",
    "ablation": "ablation",
    "bayesopt": "bench_bayesopt",
}
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
    """The page of the docs, from the files beside it."""
    names = ("memory", "streams", "core", "choice", "policies", "gap", "bayesopt")
    files = {name: read(DOCS / "data" / f"{name}.json") for name in names}
    places = {name: markdown(files[name].rows) for name in ("core", "choice")}
    places["bayesopt"] = markdown(files["bayesopt"].rows, hide=("table", "version"))
    places |= bench_policies.sections(files["policies"].rows, files["gap"])
    places |= bench_memory_tables.sections(files["memory"].rows)
    places["periods"] = stream_tables.sections(files["streams"].rows)["periods"]
    places |= {f"{name}_version": made_with(file) for name, file in files.items()}
    return wrapped(PAGE.format(**places))


def made_with(file: Contents) -> str:
    """The versions of the library that made the rows of a file."""
    default = file.header["torch_ssgp"]
    return listed(sorted({row.get("version", default) for row in file.rows}))


def main(arguments: list[str] | None = None) -> None:
    """Run one benchmark, print its table, optionally write it as JSON."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in OTHERS:
        module = importlib.import_module(f"workbench.{OTHERS[arguments[0]]}")
        return module.main(arguments[1:])
    parser = new_parser(__doc__)
    parser.add_argument(
        "command", choices=[*COMMANDS, *OTHERS, "report"], help="see above"
    )
    parser.add_argument("--threads", type=positive, default=1, help="of torch (1)")
    parser.add_argument(
        "--repeats", type=positive, default=15, help="of what is timed (15)"
    )
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
        write(chosen.json, header(repeats=chosen.repeats), rows)

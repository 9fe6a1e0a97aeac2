"""Speed and accuracy, as ratios and tables.

    python scripts/benchmark.py core       cost of an update against its floor
    python scripts/benchmark.py choice     cost of choosing inducing points
    python scripts/benchmark.py policies   streams x policies x seeds; takes hours
    python scripts/benchmark.py memory     streams x memory sizes x seeds; takes hours
    python scripts/benchmark.py flat       bytes and time of ten thousand updates
    python scripts/benchmark.py streams    small batches, periods, labels, deep kernels
    python scripts/benchmark.py ablation   constants of the package, one by one
    python scripts/benchmark.py loop       ways to climb, by time until near the end
    python scripts/benchmark.py bayesopt   cost, fantasies and regret with BoTorch
    python scripts/benchmark.py prequential   our river estimators and river's models
    python scripts/benchmark.py merge      three sites, a hundred models
    python scripts/benchmark.py distributed    messages and times of several ranks
    python scripts/benchmark.py peers      cost relative to GPyTorch and the paper
    python scripts/benchmark.py changes    streams that change, and what is forgotten
    python scripts/benchmark.py export     one row through an exported model
    python scripts/benchmark.py report     docs/benchmarks.md and README.md from files

All but ``core``, ``choice`` and ``report`` have their own arguments: see
``memory --help``. For accuracy on the streams of the paper, see
``scripts/reproduce.py``.

Absolute times depend on the machine; ratios within one run should not. Every time is
the median of repetitions that alternate with its floor.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from workbench import (
    ablation,
    bench_core,
    bench_flat,
    bench_loop,
    bench_memory_tables,
    bench_policies,
    readme,
)
from workbench import bench_bayesopt_tables as bayesopt_tables
from workbench import bench_scale_tables as bench_scale
from workbench import bench_streams_tables as stream_tables
from workbench.common import DOCS, new_parser, positive
from workbench.pages import listed, made_with, markdown, paragraphs, wrapped
from workbench.results import Contents, header, read, write

COMMANDS = {"core": bench_core.core, "choice": bench_core.choice}
# Commands with a command line of their own; some need an extra.
OTHERS = {
    "policies": "bench_policies",
    "memory": "bench_memory",
    "flat": "bench_flat",
    "streams": "bench_streams",
    "ablation": "ablation",
    "loop": "bench_loop",
    "bayesopt": "bench_bayesopt",
    "prequential": "prequential",
    "merge": "bench_merge",
    "distributed": "bench_distributed",
    "peers": "peers",
    "changes": "changes",
    "export": "bench_export",
}
EXTRAS = ("botorch", "river")
DATA = DOCS / "data"


# -------------------------------------------------------------------------- the page


def page() -> str:
    """The page of the docs, from the files beside it."""
    parts = [
        "# Benchmarks",
        "Written by `scripts/benchmark.py report` from the files in `data/`. Each "
        "section names the version of the library that produced its tables. The "
        "files also contain the settings.",
        memory_section(read(DATA / "memory.json")),
        streams_section(read(DATA / "streams.json")),
        bench_flat.section(read(DATA / "flat.json")),
        ablation_section(),
        loop_section(read(DATA / "loop.json")),
        core_section(*(read(DATA / f"{name}.json") for name in ("core", "choice"))),
        policies_section(
            *(read(DATA / f"{name}.json") for name in ("policies", "memory", "gap"))
        ),
        bayesopt_section(read(DATA / "bayesopt.json")),
        *(bench_scale.section(DATA / f"{n}.json") for n in ("merge", "distributed")),
    ]
    return wrapped(paragraphs(*parts))


def titled(text: str, table: str) -> str:
    """A table with the sentence that explains it; nothing where there is no table."""
    return paragraphs(text, table) if table else ""


def memory_section(file: Contents) -> str:
    """Streams against batch models, by the size of the memory."""
    places = bench_memory_tables.sections(file.rows)
    floor = places["memory_floor"]
    return paragraphs(
        "## Memory",
        f"Written by `scripts/benchmark.py memory` ({made_with(file)}): streams with "
        "default settings, compared with batch sparse regression with the same number "
        "of inducing points (all training data at once, all inducing points free, "
        "L-BFGS to a plateau; written apart from the package). `R` is the size of the "
        "memory. Predictions come from the inducing points, q(b), or from all points "
        f"of the memory. An RMSE below {floor} counts as {floor}, because the "
        "likelihood cannot have a smaller noise.",
        titled("Targets for the defaults, in every seed:", places["memory_bars"]),
        titled("All runs:", places["memory_streams"]),
        titled("What a larger memory buys:", places["memory_sizes"]),
        titled(
            "The memory, compared with M' inducing points that need the same storage:",
            places["memory_storage"],
        ),
        titled(
            "The default, forgetting by the evidence, against `forget=1`. Nothing "
            "changes in these streams, and most of them arrive in order:",
            places["memory_kept"],
        ),
        titled("The batch models:", places["memory_references"]),
        places["memory_remarks"],
    )


def streams_section(file: Contents) -> str:
    """Streams that are hard for a small memory."""
    tables = stream_tables.sections(file.rows)
    return paragraphs(
        "## Hard streams",
        f"Written by `scripts/benchmark.py streams` ({made_with(file)}), each with "
        "default settings, compared with all data at once.",
        titled(
            "Small batches: 60 stationary streams of 1, 2, 5 or 10 points a batch, "
            "against the same model given all data in one update.",
            tables["small"],
        ),
        titled(
            "Periods: series with a weekly and a daily period, streamed one period at "
            "a time. The forecast of the next period is compared with that of an exact "
            "GP learned on all data with the same kernel. A last update with care "
            "takes up to 300 steps of L-BFGS.",
            tables["periods"],
        ),
        titled(
            "Labels that arrive class by class or in random order, against the same "
            "model given all of them at once.",
            tables["labels"],
        ),
        titled(
            "A network before the kernel, against an exact GP with the same network.",
            tables["deep"],
        ),
    )


def ablation_section() -> str:
    """Constants of the package, one by one."""
    path = DATA / "ablation.json"
    if not path.exists():
        return ""
    return paragraphs(
        "## Constants",
        f"Written by `scripts/benchmark.py ablation` ({made_with(read(path))}): "
        "constants and options of the package, changed one at a time, on the streams "
        "where they can matter. Ratios are those of the RMSE to that with the "
        "defaults; above 1, the default is better. The next column is the worst "
        "difference in mean log-likelihood over these streams; below 0, the default is "
        "better. The last one is the median ratio of processor time. Streams that "
        "change, and the sensor, are predicted batch by batch before they are learned.",
        ablation.section(path),
    )


def loop_section(file: Contents) -> str:
    """Ways to climb."""
    streams = listed(dict.fromkeys(row["stream"] for row in file.rows))
    return paragraphs(
        "## Inner loop",
        f"Written by `scripts/benchmark.py loop` ({made_with(file)}): the same update "
        "learned in several ways, by copies of one model, early and late in the "
        f"streams {streams}. The end is the best bound that any way met, and near it "
        f"is within {file.header['near']:g} nats per datum. Every way stops by itself "
        f"on a plateau, or after {file.header['steps']} steps. Processor times, the "
        "choice of points included, are medians of ratios to the default; steps are "
        "medians; what is missing at the stop is in nats per datum. A cold start has "
        "the hyperparameters of a new model.",
        markdown(bench_loop.lines(file.rows)),
    )


def core_section(core: Contents, choice: Contents) -> str:
    """Cost of an update, and of choosing inducing points."""
    return paragraphs(
        "## Cost of an update",
        f"Written by `scripts/benchmark.py core` and `choice` ({made_with(core)}). "
        "`floor_ms` is the time of one product `A @ A.T` and one Cholesky "
        "factorisation of the same size, in the same run on one thread. The other "
        "columns are ratios to it. Small sizes are dominated by the overhead of "
        "many small operations, large ones by arithmetic.",
        markdown(core.rows),
        "Cost of choosing inducing points, in units of one gradient step of the inner "
        "loop:",
        markdown(choice.rows),
    )


def policies_section(file: Contents, memory: Contents, gap: Contents) -> str:
    """Ways to choose inducing points."""
    places = bench_policies.sections(file.rows, memory.rows, gap)
    return paragraphs(
        "## Inducing points",
        f"Written by `scripts/benchmark.py policies` ({made_with(file)}): the final "
        "result of each policy, compared with batch sparse regression of the same "
        "size. The batch models and the default policy are those of the first table. "
        "`budget` is the number of inducing points allowed, and `M` the number used "
        "in the end. Each seed is another split or draw. For streams without either, "
        "the seeds perturb the targets by 1e-12. Such a perturbation can flip a greedy "
        "choice, and if the budget is used up, the final results differ by far more. "
        "Lines with several seeds show medians and ranges. The streams on which all "
        "policies were run:",
        places["ranking"],
        titled("Stream by stream:", places["policies"]),
        places["remarks"],
        places["reading"],
    )


def bayesopt_section(file: Contents) -> str:
    """Surrogates for BoTorch."""
    return paragraphs(
        "## Bayesian optimisation",
        f"Written by `scripts/benchmark.py bayesopt` ({made_with(file)}). Regret is "
        "the distance to the known maximum after the last evaluation. All methods have "
        "the same seeds and initial designs; `to_exact` compares the medians. The "
        "other tables, as far as they were run, compare a batch of fantasies with a "
        "loop over them; one update and one acquisition with refitting BoTorch's exact "
        "model, whose time is the unit of `ratio`; and this version with 0.1.0 "
        "(`old_ms`).",
        bayesopt_tables.sections(file.rows),
        bayesopt_tables.crossing(file.rows),
    )


# ----------------------------------------------------------------------- the command


def command(name: str) -> Callable[[list[str]], None]:
    """The main function of a command, or an end that says what it needs."""
    try:
        return importlib.import_module(f"workbench.{OTHERS[name]}").main
    except ModuleNotFoundError as error:
        extra = str(error.name).partition(".")[0]
        if extra not in EXTRAS:
            raise
        raise SystemExit(f"{error}. Install it: pip install -e '.[{extra}]'") from None


def main(arguments: list[str] | None = None) -> None:
    """Run one benchmark, print its table, optionally write it as JSON."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in OTHERS:
        return command(arguments[0])(arguments[1:])
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
        return readme.main()
    rows = COMMANDS[chosen.command](chosen.repeats)
    print(markdown(rows))
    if chosen.json:
        write(chosen.json, header(repeats=chosen.repeats), rows)

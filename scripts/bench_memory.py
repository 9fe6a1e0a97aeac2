"""Streams x memory sizes x seeds: what a memory finer than the model gains and costs.

    python scripts/benchmark.py memory --data-dir DIR --out docs/data/memory.json
    python scripts/benchmark.py memory --streams bike --variants "batch SGPR" default
    python scripts/benchmark.py memory tables --out docs/data/memory.json

Every row is one run with default settings, or the batch model of the same number of
inducing points that has all training data at once. ``tables`` runs nothing and prints
what is there. Rows already in the file are not run again, so a run can be interrupted
and resumed, and split over processes by ``--streams``; ``--again`` replaces them.

Batch models run to a plateau: L-BFGS begins anew where it ended until a restart gains
less than 0.01 nats per 100 data for every 100 evaluations of the bound. Seconds are
those of the processor, for learning alone; a batch model's include its restarts.

Does the memory pay, or would more inducing points do the same? R points of a memory
store their rows (a triangle, taken as R x R), their inputs (R x d) and their targets
(R); M inducing points likewise. "No memory, same storage" has M' of them, with

    M' (M' + d + 1) = M (M + d + 1) + R (R + d + 1).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import streams
from baselines import CHUNK, BatchSGPR, new_kernel, normal_scores, small_budget
from common import listed, markdown, positive
from streams import Stream
from torch_ssgp import StreamingGP
from verdicts import Gap, gap

BATCH, DEFAULT, STORAGE = "batch SGPR", "default", "no memory, same storage"
ROUND = 400  # steps of L-BFGS between two restarts
PLATEAU = 1e-4  # nats per datum and 100 evaluations that are worth another restart
MAX_STEPS = 4_000  # evaluations of the bound, over all restarts
# The likelihood's smallest noise, as a standard deviation: errors below it say
# nothing, since the model takes them for noise.
FLOOR = 0.01
FROM_Q, FROM_MEMORY = "q(b)", "memory"

Row = dict[str, Any]
Make = Callable[[int, Path | None], Stream]
Job = tuple[str, str, int]  # stream, variant, seed


class Bar(NamedTuple):
    """What the default has to reach in every seed, against the batch model.

    Attributes:
        ratio: Largest RMSE / batch, of errors above :data:`FLOOR`.
        margin: How far the mean log-likelihood may be below.
        memory_counts: Whether predictions from the memory's points may reach it.
    """

    ratio: float
    margin: float
    memory_counts: bool

    def __str__(self) -> str:
        text = f"RMSE x {self.ratio:g}"
        if self.margin < math.inf:
            text += f", MLL - {self.margin:g}"
        return text + (", or from memory" if self.memory_counts else "")


STRICT, LOOSE = Bar(1.02, 0.02, False), Bar(1.05, math.inf, True)


class Case(NamedTuple):
    """A stream, its budget, and whether a seed changes the data.

    Attributes:
        make: From a seed and the directory of the data to the stream.
        num_inducing: Budget of inducing points, M.
        seeded: Whether the data depend on the seed; otherwise other seeds are other
            roundings of the targets, see :func:`streams.rounded`, with one batch model.
        bar: What the default has to reach.
    """

    make: Make
    num_inducing: int
    seeded: bool
    bar: Bar | None


def _uci(name: str) -> Make:
    return lambda seed, data_dir: streams.uci(name, data_dir, split=seed)


# The cheap ones first.
CASES: dict[str, Case] = {
    "pseudo-periodic M=100": Case(
        lambda *_: streams.pseudo_periodic(), 100, False, STRICT
    ),
    "pseudo-periodic M=200": Case(
        lambda *_: streams.pseudo_periodic(), 200, False, STRICT
    ),
    "audio M=100": Case(lambda *_: streams.audio(), 100, False, STRICT),
    "audio M=200": Case(lambda *_: streams.audio(), 200, False, LOOSE),
    "growing range": Case(
        lambda seed, _: streams.growing_range(seed=seed), 250, True, STRICT
    ),
    "revisiting": Case(
        lambda seed, _: streams.revisiting(seed=seed), 100, True, STRICT
    ),
    "elevators": Case(_uci("elevators"), 200, True, STRICT),
    "bike": Case(_uci("bike_noleak"), 200, True, STRICT),
    "terrain": Case(lambda *_: streams.terrain(), 400, False, LOOSE),
    "terrain OS": Case(lambda _, d: streams.terrain_os(d), 400, False, LOOSE),
    "kin40k": Case(_uci("kin40k"), 200, True, None),
}


# ----------------------------------------------------------------------- the variants


class Budget(NamedTuple):
    """Points of a model: inducing ones, and those of its memory (``None``: default)."""

    num_inducing: int
    memory_size: int | None


SIZES: dict[str, float] = {
    "memory M": 1,
    "memory 1.5M": 1.5,
    "memory 2M": 2,
    "memory 3M": 3,
}
VARIANTS = (DEFAULT, *SIZES, STORAGE)


def new_model(num_dims: int, budget: Budget) -> StreamingGP:
    """The model of all variants: a smooth kernel with a lengthscale per input."""
    return StreamingGP(
        new_kernel(num_dims),
        num_inducing=budget.num_inducing,
        memory_size=budget.memory_size,
    ).double()


def budget_of(variant: str, num_inducing: int, num_dims: int) -> Budget:
    """How many points a variant has where the batch model has ``num_inducing``."""
    if variant == DEFAULT:
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


# ----------------------------------------------------------------------------- runs


@torch.no_grad()
def accuracy(model: StreamingGP, stream: Stream, **options: bool) -> Row:
    """RMSE and mean log-likelihood on all test points; options of ``predict``."""
    parts = [model.predict(x, **options) for x in stream.x_test.split(CHUNK)]
    mean, variance = (
        torch.cat([getattr(part, name) for part in parts])
        for name in ("mean", "variance")
    )
    return normal_scores(mean, variance, stream.y_test)


def run_stream(stream: Stream, budget: Budget) -> Row:
    """Default updates over a stream, and how they end; a failure is a row as well."""
    start = time.process_time()
    model = new_model(stream.x_test.size(-1), budget)
    failure = ""
    with small_budget():
        for x, y in tqdm(stream.batches, desc="updates", leave=False):
            try:
                model.update(x, y)
            except Exception as error:  # what fails is part of the result
                failure = f"{type(error).__name__}: {error}"
                break
    seconds = time.process_time() - start
    memory = accuracy(model, stream, from_memory=True)
    return {
        "num_inducing": budget.num_inducing,
        "memory_size": budget.memory_size,
        **accuracy(model, stream),
        **{f"memory {name}": value for name, value in memory.items()},
        "M": model.summary.num_inducing,
        "R": model.memory.points.size(-2),
        "cpu_seconds": seconds,
        "failure": failure,
    }


class Reference(NamedTuple):
    """A batch model and how it was learned.

    Attributes:
        model: The model, with all data.
        bound: Its bound on the log evidence.
        converged: Whether it is on a plateau.
        steps: Evaluations of the bound by L-BFGS.
        restarts: How often L-BFGS began anew.
        gain: Nats per datum and 100 evaluations that the last restart gained; infinite
            where there was none.
    """

    model: StreamingGP
    bound: float
    converged: bool
    steps: int
    restarts: int
    gain: float


def batch_reference(
    x: Tensor, y: Tensor, num_inducing: int, max_steps: int = MAX_STEPS
) -> Reference:
    """All data at once, all of Z free, to a plateau.

    L-BFGS may end early, where a line search fails, or late. So it is the gain of a
    restart that says whether there is more to learn.

    Args:
        x: ``(n, d)``, all inputs.
        y: ``(n,)``, all targets.
        num_inducing: Largest number of inducing points.
        max_steps: Evaluations of the bound after which there is no other restart.

    Returns:
        The best model met.
    """
    batch = BatchSGPR(x.size(-1), num_inducing, num_steps=ROUND)
    batch.update(x, y)
    model, steps, restarts, gain = batch.model, batch.steps, 0, math.inf
    _, bound, _ = _restarted(model, x, y, 0)
    with tqdm(total=max_steps, initial=steps, desc="L-BFGS", leave=False) as bar:
        while gain >= PLATEAU and steps < max_steps:
            again, found, taken = _restarted(model, x, y, ROUND)
            gain = (found - bound) / len(y) / max(taken / 100, 1)
            if found > bound:
                model, bound = again, found
            steps, restarts = steps + taken, restarts + 1
            bar.update(taken)
            bar.set_postfix(gain=f"{gain:.1e}", bound=f"{bound / len(y):.5f}")
    return Reference(model, bound, gain < PLATEAU, steps, restarts, gain)


def _restarted(
    model: StreamingGP, x: Tensor, y: Tensor, num_steps: int
) -> tuple[StreamingGP, float, int]:
    """A new model from a learned one's values; its bound and evaluations."""
    again = StreamingGP(
        copy.deepcopy(model.covar_module),
        likelihood=copy.deepcopy(model.likelihood),
        mean_module=copy.deepcopy(model.mean_module),
        num_inducing=model.num_inducing,
    ).double()
    with small_budget():
        result = again.update(
            x,
            y,
            num_steps=num_steps,
            optimizer="lbfgs",
            inducing_points=model.summary.inducing_points,
        )
    return again, result.bound.item(), result.num_steps


def run_batch(stream: Stream, num_inducing: int, max_steps: int = MAX_STEPS) -> Row:
    """The reference on a stream, and how it ends."""
    start = time.process_time()
    x, y = stream.x_train, stream.y_train
    reference = batch_reference(x, y, num_inducing, max_steps)
    seconds = time.process_time() - start
    return {
        "num_inducing": num_inducing,
        **accuracy(reference.model, stream),
        "M": reference.model.summary.num_inducing,
        "cpu_seconds": seconds,
        "bound": reference.bound / len(y),
        "converged": reference.converged,
        "steps": reference.steps,
        "restarts": reference.restarts,
        "gain": reference.gain if reference.restarts else None,
        "failure": "",
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
    only_streams, only_variants = set(only_streams), set(only_variants)
    jobs = [
        (name, variant, seed)
        for name, case in CASES.items()
        if not only_streams or name in only_streams
        for variant in [BATCH, *VARIANTS]
        if not only_variants or variant in only_variants
        for seed in range(num_seeds)
        if seed == 0 or case.seeded or variant != BATCH
    ]
    done = set() if again else set(read(out))
    settings = _settings(max_steps)
    bar = tqdm([job for job in jobs if job not in done])
    for name, variant, seed in bar:
        bar.set_description(f"{name}, {variant}, {seed}")
        case = CASES[name]
        stream = case.make(seed, data_dir)
        if variant == BATCH:
            result = run_batch(stream, case.num_inducing, max_steps)
        else:
            stream = stream if case.seeded else streams.rounded(stream, seed)
            num_dims = stream.x_test.size(-1)
            budget = budget_of(variant, case.num_inducing, num_dims)
            result = run_stream(stream, budget)
        key = {"stream": name, "variant": variant, "seed": seed}
        row = {**key, "version": settings["torch_ssgp"], **result}
        # Another process may have written meanwhile.
        write(out, settings, {**read(out), (name, variant, seed): row}.values())
    return list(read(out).values())


def _settings(max_steps: int) -> Row:
    """What the header of a file says: versions, and how rows are made."""
    return {
        **{name: version(name) for name in ("torch_ssgp", "torch", "gpytorch")},
        "threads": torch.get_num_threads(),
        "batch": {"round": ROUND, "plateau": PLATEAU, "max_steps": max_steps},
        "streams": "StreamingGP and update with default settings",
    }


# ------------------------------------------------------------------------- the file


def read(out: Path) -> dict[Job, Row]:
    """The rows in a file, by stream, variant and seed."""
    if not out.exists():
        return {}
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    return {(row["stream"], row["variant"], row["seed"]): row for row in rows}


def write(out: Path, header: Row, rows: Iterable[Row]) -> None:
    """A line for the header and one for every row; whole at any time."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = f'{{"header": {json.dumps(header)},\n"rows": [\n{lines}\n]}}\n'
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, out)


# ----------------------------------------------------------------------- the tables


class Run(NamedTuple):
    """A row against the batch model of its data.

    Attributes:
        row: The run.
        q: RMSE / batch and MLL - batch from q(b).
        memory: The same from the memory's points.
        floored: RMSE / batch from either, with errors below :data:`FLOOR` taken for it.
        cpu: CPU seconds / batch.
    """

    row: Row
    q: Gap
    memory: Gap
    floored: dict[str, float]
    cpu: float


def compared(rows: list[Row]) -> dict[tuple[str, str], list[Run]]:
    """Runs that have a batch model, by stream and variant, in the order of tables."""
    ceiling = {
        (row["stream"], row["seed"]): row for row in rows if row["variant"] == BATCH
    }
    result: dict[tuple[str, str], list[Run]] = {
        (name, variant): [] for name in CASES for variant in VARIANTS
    }
    for row in sorted(rows, key=lambda row: row["seed"]):
        name, variant = row["stream"], row["variant"]
        best = ceiling.get((name, row["seed"] if CASES[name].seeded else 0))
        if variant == BATCH or best is None:
            continue
        memory = {score: row[f"memory {score}"] for score in ("RMSE", "MLL")}
        ends = {FROM_Q: row, FROM_MEMORY: memory}
        floored = {
            source: max(end["RMSE"], FLOOR) / max(best["RMSE"], FLOOR)
            for source, end in ends.items()
        }
        cpu = row["cpu_seconds"] / best["cpu_seconds"]
        run = Run(row, gap(row, best), gap(memory, best), floored, cpu)
        result[name, variant].append(run)
    return {key: runs for key, runs in result.items() if runs}


def table(rows: list[Row]) -> list[Row]:
    """One line per stream and variant: ranges over seeds, against the batch model."""
    return [
        {
            "stream": name,
            "variant": variant,
            "seeds": len(runs),
            "M": _median([run.row["M"] for run in runs]),
            "R": _median([run.row["R"] for run in runs]),
            "RMSE": _median([run.row["RMSE"] for run in runs]),
            "RMSE / batch": _range([run.q.ratio for run in runs], ".3f"),
            "MLL - batch": _range([run.q.difference for run in runs], "+.3f"),
            "memory RMSE / batch": _range([run.memory.ratio for run in runs], ".3f"),
            "memory MLL - batch": _range(
                [run.memory.difference for run in runs], "+.3f"
            ),
            "CPU seconds": _median([run.row["cpu_seconds"] for run in runs]),
            "CPU / batch": _range([run.cpu for run in runs], ".2f"),
            "failures": sum(bool(run.row["failure"]) for run in runs),
        }
        for (name, variant), runs in compared(rows).items()
    ]


def references(rows: list[Row]) -> list[Row]:
    """One line per batch model: where it ends, and whether that is a plateau."""
    order = {name: place for place, name in enumerate(CASES)}
    return [
        {
            "stream": row["stream"],
            "seed": row["seed"],
            **{name: row[name] for name in ("M", "RMSE", "MLL")},
            "bound per datum": row["bound"],
            "evaluations": row["steps"],
            "restarts": row["restarts"],
            "plateau": "yes" if row["converged"] else "no",
            "CPU seconds": row["cpu_seconds"],
        }
        for row in sorted(rows, key=lambda row: (order[row["stream"]], row["seed"]))
        if row["variant"] == BATCH
    ]


def bars(rows: list[Row]) -> list[Row]:
    """One line per stream that has a bar: the default's worst seed, and who met it."""
    lines = []
    for (name, variant), runs in compared(rows).items():
        bar = CASES[name].bar
        if variant != DEFAULT or bar is None:
            continue
        source, met = FROM_Q, _meets(runs, bar, FROM_Q)
        if not met and bar.memory_counts and _meets(runs, bar, FROM_MEMORY):
            source, met = FROM_MEMORY, True
        gaps = [run.q if source == FROM_Q else run.memory for run in runs]
        lines.append(
            {
                "stream": name,
                "bar": str(bar),
                "seeds": len(runs),
                "from": source,
                "worst RMSE / batch": max(each.ratio for each in gaps),
                "worst MLL - batch": min(each.difference for each in gaps),
                "met": "yes" if met else "no",
            }
        )
    return lines


def _meets(runs: list[Run], bar: Bar, source: str) -> bool:
    """Whether every seed meets the bar; what failed does not."""
    return all(
        not run.row["failure"]
        and run.floored[source] <= bar.ratio
        and (run.q if source == FROM_Q else run.memory).difference >= -bar.margin
        for run in runs
    )


def sizes(rows: list[Row]) -> list[Row]:
    """One line per memory size, over the streams that have them all: what R buys."""
    runs = compared(rows)
    names = [name for name in CASES if all((name, size) in runs for size in SIZES)]
    lines = []
    for variant in SIZES if names else ():
        middles = [_middle(runs[name, variant]) for name in names]
        line: Row = {"variant": variant, "streams": len(names)}
        for label, gaps in [
            ("", [middle.q for middle in middles]),
            ("memory ", [middle.memory for middle in middles]),
        ]:
            ratios = [each.ratio for each in gaps]
            differences = [each.difference for each in gaps]
            line |= {
                f"{label}RMSE / batch, median": statistics.median(ratios),
                f"{label}RMSE / batch, worst": max(ratios),
                f"{label}MLL - batch, median": statistics.median(differences),
                f"{label}MLL - batch, worst": min(differences),
            }
        cpu = [middle.cpu for middle in middles]
        lines.append({**line, "CPU / batch, median": statistics.median(cpu)})
    return lines


def storage(rows: list[Row]) -> list[Row]:
    """One line per stream: the default, and its storage spent on inducing points."""
    runs = compared(rows)
    lines = []
    for name in CASES:
        pair = [runs.get((name, variant)) for variant in (DEFAULT, STORAGE)]
        if not all(pair):
            continue
        ours, other = (_middle(each) for each in pair)
        first, second = pair[0][0].row, pair[1][0].row
        lines.append(
            {
                "stream": name,
                "M, R": f"{first['M']}, {first['R']}",
                "M'": second["M"],
                "RMSE / batch": ours.q.ratio,
                "from memory": ours.memory.ratio,
                "with M'": other.q.ratio,
                "MLL - batch": ours.q.difference,
                "MLL from memory": ours.memory.difference,
                "MLL with M'": other.q.difference,
                "CPU / batch": ours.cpu,
                "CPU with M'": other.cpu,
            }
        )
    return lines


class Middle(NamedTuple):
    """Medians over seeds, as in :class:`Run`."""

    q: Gap
    memory: Gap
    cpu: float


def _middle(runs: list[Run]) -> Middle:
    def median(gaps: list[Gap]) -> Gap:
        return Gap(
            statistics.median(each.ratio for each in gaps),
            statistics.median(each.difference for each in gaps),
        )

    return Middle(
        median([run.q for run in runs]),
        median([run.memory for run in runs]),
        statistics.median(run.cpu for run in runs),
    )


def _median(values: list[float]) -> float:
    """As a whole number where all are."""
    return statistics.median(values) if len(values) > 1 else values[0]


def _range(values: list[float], form: str) -> str:
    """Smallest and largest of several values; the one there is."""
    ends = dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values)))
    return " to ".join(ends)


# -------------------------------------------------------------------------- the page


def sections(rows: list[Row]) -> dict[str, str]:
    """What ``docs/benchmarks.md`` has to say about the memory, by place.

    Args:
        rows: What :func:`run` wrote.
    """
    return {
        "memory_bars": markdown(bars(rows)),
        "memory_streams": markdown(table(rows)),
        "memory_sizes": markdown(sizes(rows)),
        "memory_storage": markdown(storage(rows)),
        "memory_references": markdown(references(rows)),
        "memory_remarks": remarks(rows),
    }


def remarks(rows: list[Row]) -> str:
    """Which runs were not made yet, which failed, and which references fall short."""
    done = {(row["stream"], row["variant"]) for row in rows}
    gaps = [
        f"{name} ({', '.join(left)})"
        for name in CASES
        if (left := [each for each in [BATCH, *VARIANTS] if (name, each) not in done])
    ]
    short = [
        f"{row['stream']} ({row['seed']})"
        for row in rows
        if row["variant"] == BATCH and not row["converged"]
    ]
    failed = [
        f"{row['stream']}, {row['variant']} ({row['seed']})"
        for row in rows
        if row["failure"]
    ]
    versions = sorted({row["version"] for row in rows})
    return " ".join(
        f"{text}: {joined}."
        for text, joined in [
            ("Not run yet", "; ".join(gaps)),
            ("Batch models that are on no plateau (seed)", "; ".join(short)),
            ("Runs that failed (seed)", "; ".join(failed)),
            ("Versions of torch_ssgp", listed(versions)),
        ]
        if joined
    )


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
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
    parser.add_argument("--data-dir", type=Path, help="where UCI and OS files are")
    parser.add_argument(
        "--seeds", type=positive, default=3, help="splits, draws or roundings (3)"
    )
    parser.add_argument("--streams", nargs="*", choices=[*CASES], help="only these")
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
    parser.add_argument("--threads", type=positive, default=1, help="of torch (1)")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    if chosen.command == "tables":
        rows = list(read(chosen.out).values())
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


if __name__ == "__main__":
    main()

"""Tables of the memory's benchmark: what a finer memory gains and costs."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from torch_ssgp.models import MEMORY
from workbench.bench_cases import BATCH, CASES, not_run
from workbench.pages import markdown, median, reach
from workbench.results import Row
from workbench.verdicts import Gap, gap, median_gap

DEFAULT, STORAGE = "default", "no memory, same storage"
KEPT = "forget=1"  # the default, but nothing is forgotten
# The default, but the last update is thorough, see ``baselines.CAREFUL``.
CARE = "last update with care"
# Memory sizes in units of M, beside that of the default.
SIZES: dict[str, float] = {"memory M": 1, "memory 1.5M": 1.5, "memory 3M": 3}
VARIANTS = (DEFAULT, KEPT, CARE, *SIZES, STORAGE)
# The likelihood's smallest noise, as a standard deviation: the model takes smaller
# errors for noise, so that their ratios say nothing.
FLOOR = 0.01
FROM_Q, FROM_MEMORY = "q(b)", "memory"


class Bar(NamedTuple):
    """What the default has to reach in every seed, against the batch model.

    Attributes:
        ratio: Largest RMSE / batch.
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

    def met_by(self, found: Gap) -> bool:
        """Whether a gap is within."""
        return found.ratio <= self.ratio and found.difference >= -self.margin


STRICT, LOOSE = Bar(1.02, 0.02, False), Bar(1.05, math.inf, True)
BARS = {name: STRICT for name in CASES if name != "kin40k"}
BARS |= dict.fromkeys(("audio M=200", "terrain", "terrain OS"), LOOSE)


class Measured(NamedTuple):
    """A row against the batch model of its data.

    Attributes:
        row: The run.
        q: RMSE / batch and MLL - batch from q(b); an RMSE below :data:`FLOOR` is taken
            for it.
        memory: The same from the memory's points.
        cpu: CPU seconds / batch.
    """

    row: Row
    q: Gap
    memory: Gap
    cpu: float


def compared(rows: list[Row]) -> dict[tuple[str, str], list[Measured]]:
    """Runs that have a batch model, by stream and variant, in the order of tables."""
    ceiling = {
        (row["stream"], row["seed"]): row for row in rows if row["variant"] == BATCH
    }
    result: dict[tuple[str, str], list[Measured]] = {
        (name, variant): [] for name in CASES for variant in VARIANTS
    }
    for row in sorted(rows, key=lambda row: row["seed"]):
        name, variant = row["stream"], row["variant"]
        best = ceiling.get((name, CASES[name].reference(row["seed"])))
        if variant == BATCH or best is None:
            continue
        q, memory = (
            gap(floored(row, source), floored(best)) for source in (FROM_Q, FROM_MEMORY)
        )
        cpu = row["cpu_seconds"] / best["cpu_seconds"]
        result[name, variant].append(Measured(row, q, memory, cpu))
    return {key: runs for key, runs in result.items() if runs}


def floored(row: Row, source: str = FROM_Q) -> Row:
    """Scores from q(b) or from the memory, with an RMSE of no less than the floor."""
    prefix = "memory " if source == FROM_MEMORY else ""
    rmse, mll = row[f"{prefix}RMSE"], row[f"{prefix}MLL"]
    return {"RMSE": max(rmse, FLOOR), "MLL": mll}


def table(rows: list[Row]) -> list[Row]:
    """One line per stream and variant: ranges over seeds, against the batch model."""
    return [
        {
            "stream": name,
            "variant": variant,
            "seeds": len(runs),
            "M": median([run.row["M"] for run in runs]),
            "R": median([run.row["R"] for run in runs]),
            "RMSE": median([run.row["RMSE"] for run in runs]),
            "RMSE / batch": reach([run.q.ratio for run in runs], ".3f"),
            "MLL - batch": reach([run.q.difference for run in runs], "+.3f"),
            "memory RMSE / batch": reach([run.memory.ratio for run in runs], ".3f"),
            "memory MLL - batch": reach(
                [run.memory.difference for run in runs], "+.3f"
            ),
            "CPU seconds": median([run.row["cpu_seconds"] for run in runs]),
            "CPU / batch": reach([run.cpu for run in runs], ".2f"),
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
            "until near": row["cpu_seconds_near"],
        }
        for row in sorted(rows, key=lambda row: (order[row["stream"]], row["seed"]))
        if row["variant"] == BATCH
    ]


def bars(rows: list[Row]) -> list[Row]:
    """One line per stream that has a bar: the default's worst seed, and who met it."""
    lines = []
    for (name, variant), runs in compared(rows).items():
        bar = BARS.get(name)
        if variant != DEFAULT or bar is None:
            continue
        sources = {FROM_Q: [run.q for run in runs]}
        if bar.memory_counts:
            sources[FROM_MEMORY] = [run.memory for run in runs]
        failed = any(run.row["failure"] for run in runs)
        met = [
            source
            for source, gaps in sources.items()
            if not failed and all(map(bar.met_by, gaps))
        ]
        source = met[0] if met else FROM_Q
        lines.append(
            {
                "stream": name,
                "bar": str(bar),
                "seeds": len(runs),
                "from": source,
                "worst RMSE / batch": max(each.ratio for each in sources[source]),
                "worst MLL - batch": min(each.difference for each in sources[source]),
                "met": "yes" if met else "no",
            }
        )
    return lines


def sizes(rows: list[Row]) -> list[Row]:
    """One line per memory size, over the streams that have them all: what R buys.

    Of every stream, the first seed.
    """
    runs = compared([row for row in rows if row["seed"] == 0])
    by_size = sorted([*SIZES, DEFAULT], key=lambda name: SIZES.get(name, MEMORY))
    names = [name for name in CASES if all((name, size) in runs for size in by_size)]
    lines = []
    for variant in by_size if names else ():
        middles = [_middle(runs[name, variant]) for name in names]
        label = f"memory {MEMORY}M, the default" if variant == DEFAULT else variant
        line: Row = {"variant": label, "streams": len(names)}
        for source, gaps in [
            ("", [each.q for each in middles]),
            ("memory ", [each.memory for each in middles]),
        ]:
            ratios = [each.ratio for each in gaps]
            differences = [each.difference for each in gaps]
            line |= {
                f"{source}RMSE / batch, median": statistics.median(ratios),
                f"{source}RMSE / batch, worst": max(ratios),
                f"{source}MLL - batch, median": statistics.median(differences),
                f"{source}MLL - batch, worst": min(differences),
            }
        cpu = [each.cpu for each in middles]
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


def kept(rows: list[Row]) -> list[Row]:
    """One line per stream: the default against ``forget=1``, seed by seed."""
    runs = {(row["stream"], row["variant"], row["seed"]): row for row in rows}
    lines = []
    for name in CASES:
        pairs = [
            (runs[key], runs[name, KEPT, key[2]])
            for key in sorted(runs)
            if key[:2] == (name, DEFAULT) and (name, KEPT, key[2]) in runs
        ]
        if pairs:
            ratios = [
                [a[score] / b[score] for a, b in pairs]
                for score in ("RMSE", "memory RMSE", "cpu_seconds")
            ]
            names = ("RMSE / forget=1", "from memory", "CPU / forget=1")
            line = {n: reach(r, ".4f") for n, r in zip(names, ratios, strict=True)}
            lines.append({"stream": name, "seeds": len(pairs), **line})
    return lines


class Middle(NamedTuple):
    """Medians over seeds, as in :class:`Measured`."""

    q: Gap
    memory: Gap
    cpu: float


def _middle(runs: list[Measured]) -> Middle:
    return Middle(
        median_gap([run.q for run in runs]),
        median_gap([run.memory for run in runs]),
        statistics.median(run.cpu for run in runs),
    )


# -------------------------------------------------------------------------- the page


def sections(rows: list[Row]) -> dict[str, str]:
    """What ``docs/benchmarks.md`` has to say about the memory, by place."""
    return {
        "memory_bars": markdown(bars(rows)),
        "memory_streams": markdown(table(rows)),
        "memory_sizes": markdown(sizes(rows)),
        "memory_storage": markdown(storage(rows)),
        "memory_kept": markdown(kept(rows)),
        "memory_references": markdown(references(rows)),
        "memory_remarks": remarks(rows),
        "memory_floor": f"{FLOOR:g}",
    }


def remarks(rows: list[Row]) -> str:
    """Which runs were not made yet, which failed, and which references fall short."""
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
    return " ".join(
        f"{text}: {joined}."
        for text, joined in [
            ("Not run yet", not_run(rows, "variant", VARIANTS)),
            ("Batch models that are on no plateau (seed)", "; ".join(short)),
            ("Runs that failed (seed)", "; ".join(failed)),
        ]
        if joined
    )

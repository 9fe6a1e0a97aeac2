"""Tables of the docs and of README.md, from files of results.

    python scripts/benchmark.py tables

People write pages. Between ``<!-- table: name -->`` and ``<!-- end -->`` stands what
:data:`TABLES` makes of a file, and nothing else is touched. Every number that the
sentences of such a page quote has to be in its files; :func:`strangers` finds others.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench.common import DOCS, ROOT
from workbench.results import Contents, Row, read, versions

README = ROOT / "README.md"
BLOCK = re.compile(r"<!-- (?:table: )?([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
MARK = re.compile(r"<!-- table: ([\w-]+) -->")

# ---------------------------------------------------------------------------- Markdown


def markdown(rows: Sequence[Row]) -> str:
    """Rows as one Markdown table; what a row does not have is a dash."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(map(str, names)) + " |", "|---" * len(names) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(cell(row.get(name)) for name in names) + " |")
    return "\n".join(lines)


def cell(value: Any) -> str:
    """Four digits of a float; a dash for nothing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def lines(frame: pd.DataFrame) -> list[Row]:
    """Rows of a frame, its index first."""
    return [dict(row) for row in frame.reset_index().to_dict("records")]


def pivoted(frame: pd.DataFrame, index: Any, columns: str, values: str) -> pd.DataFrame:
    """Means of a column, in the order in which rows and columns first came."""
    table = frame.pivot_table(index=index, columns=columns, values=values, sort=False)
    return table[[name for name in frame[columns].unique() if name in table]]


def with_error(values: Iterable[float], form: str = ".3f") -> str:
    """``1.348 ± 0.146``: a mean and its standard error, if there are several values."""
    array = np.array(list(values))
    if len(array) < 2:
        return f"{array.mean():{form}}"
    error = array.std(ddof=1) / math.sqrt(len(array))
    return f"{array.mean():{form}} ± {error:{form}}"


def rows_of(file: Contents, **where: str) -> list[Row]:
    """Rows with these values."""
    pairs = where.items()
    return [row for row in file.rows if all(row.get(k) == v for k, v in pairs)]


def of(file: Contents, **where: str) -> pd.DataFrame:
    """The same as a frame."""
    return pd.DataFrame(rows_of(file, **where))


HIDDEN = ("version", "case", "table", "took", "seed")


def plain(*columns: str, **where: str) -> Callable[[Contents], list[Row]]:
    """Rows as they are: some columns, or all that say something."""

    def rows(file: Contents) -> list[Row]:
        found = rows_of(file, **where)
        names = columns or [
            name
            for name in dict.fromkeys(name for row in found for name in row)
            if name not in HIDDEN and any(row.get(name) is not None for row in found)
        ]
        return [{name: row.get(name) for name in names} for row in found]

    return rows


def changes(file: Contents) -> list[Row]:
    """Errors with rates and without, stream by stream, means over seeds."""
    from workbench.changes import AUTO, FIXED

    frame = of(file, case="changes")
    by = frame[frame["version"] == frame["version"].iloc[-1]].groupby(
        "stream", sort=False
    )
    error = by[[AUTO, *FIXED]].mean()
    error["auto / best λ"] = error[AUTO] / error[[*FIXED]].min(axis=1)
    error["alarms"] = by["at"].apply(
        lambda each: ", ".join(str(len(at)) for at in each)
    )
    return lines(error)


def alarms(file: Contents) -> list[Row]:
    """Shares of updates and streams, by the size of batches and the threshold."""
    by = of(file).groupby(["batch", "nats"], sort=False)
    updates = by["updates"].sum()
    shares = {
        "updates": updates,
        "surprise above it": by["surprise above"].sum() / updates,
        "alarm above it": by["alarm above"].sum() / updates,
        "bad readings found": by["bad reading above"].mean(),
    }
    return lines(pd.DataFrame(shares))


def river(file: Contents, task: str) -> list[Row]:
    """Our front against the best of river's models, stream by stream."""
    from workbench.prequential import OURS

    score, sign = ("MAE", 1) if task == "regression" else ("accuracy", -1)
    found = []
    for name, part in of(file, task=task).groupby("stream", sort=False):
        part = part.set_index("model")
        ours, others = part.loc[OURS], part.drop(OURS)
        which = (sign * others[score]).idxmin()
        row: Row = {"stream": name, "data": int(ours["data"]), "score": score}
        row |= {"torch_ssgp": ours[score], "CPU seconds": ours["cpu_seconds"]}
        row |= {"best of river": others.loc[which, score], "which": which}
        row["its CPU seconds"] = others.loc[which, "cpu_seconds"]
        if task == "regression":
            row["inside 90 %"] = f"{100 * ours['inside']:.1f}"
        found.append(row)
    return found


def readme_table(file: Contents) -> list[Row]:
    """Both tasks, in few columns and digits."""
    rows = [*river(file, "regression"), *river(file, "classification")]
    for row in rows:
        row.pop("inside 90 %", None)
        row |= {k: f"{v:.3g}" for k, v in row.items() if isinstance(v, float)}
    return rows


def every_model(file: Contents) -> list[Row]:
    """Errors or accuracies of all models."""
    frame = pd.DataFrame(file.rows)
    frame["score"] = frame["MAE"].fillna(frame["accuracy"])
    return lines(pivoted(frame, "stream", "model", "score"))


def toy(file: Contents) -> list[Row]:
    """Ends of all four streams beside batch SGPR."""
    found = []
    for row in sorted(file.rows, key=lambda row: row["cell"]):
        ends = {score: row[score] for score in ("RMSE", "MLL")}
        batch = {f"batch {score}": row["batch"][score] for score in ends}
        found.append({"stream": row["cell"].replace("alpha", "α ="), **ends, **batch})
    return found


def alpha(file: Contents) -> list[Row]:
    """Scores and gaps by alpha, over splits."""
    from workbench.figures import alpha_forms, gaps

    found = []
    for form, rows in alpha_forms({row["cell"]: row for row in file.rows}).items():
        stream = [np.mean([step["MLL"] for step in row["trace"]]) for row in rows]
        apart = [gaps(row) for row in rows]
        close = np.mean([(each < 0.1 * each.mean()).mean() for each in apart])
        row = {
            "α": form,
            "splits": len(rows),
            "MLL over the stream": with_error(stream),
        }
        row["MLL at the end"] = with_error(row["MLL"] for row in rows)
        row["RMSE at the end"] = with_error((row["RMSE"] for row in rows), ".4f")
        found.append({**row, "gaps < 0.1 x mean": f"{close:.1%}"})
    return found


def hyperparameters(file: Contents) -> list[Row]:
    """Learned - true at the end, by lengthscale and M."""
    from workbench.figures import learned

    found = []
    for true, group in learned({row["cell"]: row for row in file.rows}).items():
        full = group[None][:, -1].mean() if None in group else math.nan
        for m, errors in group.items():
            last = errors[:, -1]
            row = {"lengthscale": true, "M": m or "full GP", "draws": len(last)}
            row["learned − true"] = with_error(last, "+.4f")
            found.append(row | {"− full GP's": f"{last.mean() - full:+.4f}"})
    return found


def contest(score: str) -> Callable[[Contents], list[Row]]:
    """RMSE over that of batch SGPR with CPU seconds, or MLL minus it, by setting."""
    from workbench.figures import COLOURS, contests
    from workbench.runner import BATCH

    def text(row: Row, batch: Row | None) -> str:
        if score == "MLL":
            return f"{row['MLL'] - batch['MLL']:+.3f}" if batch else f"{row['MLL']:.3f}"
        ratio = f"{row['RMSE'] / batch['RMSE']:.3f}" if batch else f"{row['RMSE']:.3g}"
        return f"{ratio} ({row['seconds']:.3g} s)"

    def rows(file: Contents) -> list[Row]:
        return [
            {
                **dict(zip(("stream", "M", "batches of"), setting, strict=True)),
                **{
                    name: text(ran[name], None if name == BATCH else ran.get(BATCH))
                    for name in COLOURS
                    if name in ran
                },
            }
            for setting, ran in contests(file.rows).items()
        ]

    return rows


def banana(file: Contents) -> list[Row]:
    """Percent of labels that are wrong, in the middle and at the end."""
    frame = pd.DataFrame(file.rows)
    errors = frame["errors"]
    frame["arrival"] = frame["cell"].str.replace(r" \d+$", "", regex=True)
    frame["arrival"] = frame["arrival"].str.replace("_", " ")
    frame["middle"] = [100 * each[len(each) // 2] for each in errors]
    frame["end"] = [100 * each[-1] for each in errors]
    by = frame.groupby("arrival", sort=False)
    table = by[["middle", "end"]].agg(lambda each: with_error(each, ".2f"))
    table.insert(0, "runs", by.size())
    return lines(table)


def timing_steps(file: Contents) -> list[Row]:
    """Ratios to the floor by size; of the floor milliseconds."""
    frame = of(file, case="steps")
    frame["size"] = "(" + frame["M"].astype(str) + ", " + frame["N"].astype(str) + ")"
    table = pivoted(frame, "work", "size", "ratio").drop("floor")
    floor = pivoted(frame, "work", "size", "ms").loc["floor"]
    first = {name: f"{value:.3g} ms" for name, value in floor.items()}
    return [{"work": "floor", **first}, *lines(table.map("{:.3g}".format))]


def regret(file: Contents) -> list[Row]:
    """Median regret of each method."""
    by = of(file, table="regret").groupby(["case", "method"], sort=False)
    table = by["regret"].agg(["count", "median", "min", "max"])
    return lines(table.assign(seconds=by["seconds"].median()))


def bayesopt_cost(file: Contents) -> list[Row]:
    """Seconds of an update and an acquisition, and of a refit."""
    table = pivoted(of(file, table="cost"), "case", "method", "seconds")
    return lines(table.assign(ratio=table["streaming"] / table["exact refit"]))


def soak(file: Contents) -> list[Row]:
    """What a run of ten thousand updates saw."""
    (total,) = rows_of(file, kind="totals")
    ratio = of(file, kind="regime")["ratio"]
    spent = total["cpu_seconds_per_update"]
    near = "regimes within 1.5 times the error of a new model"
    found = {
        near: f"{(ratio <= 1.5).sum()} of {len(ratio)}",
        "error / that of a new model, median": ratio.median(),
        "resident memory at the end / at the first look": total["memory_growth"],
        "CPU ms per update, median": 1e3 * spent["median"],
        "CPU ms per update, mean": 1e3 * spent["mean"],
        "CPU per update, last tenth / second tenth": spent["late_over_early"],
    }
    for name in ("exceptions", "not_finite", "status", "warnings", "batches"):
        counts = total[name]
        if isinstance(counts, dict):
            counts = ", ".join(f"{key} {count:,}" for key, count in counts.items())
        found[name.replace("_", " ")] = counts
    for name, wrong in (("conditioned", "and_changed"), ("loaded", "and_differs")):
        found[f"{name}, {wrong.replace('_', ' ')}"] = (
            f"{total[name]}, {total[f'{name}_{wrong}']}"
        )
    return [{"what": name, "measured": value} for name, value in found.items()]


def soak_regimes(file: Contents) -> list[Row]:
    """Medians over regimes, by what changed."""
    frame = of(file, kind="regime")
    frame["learned noise"] = frame["learned_noise_std"] / frame["scale"]
    frame["lengthscale"] = frame["learned_lengthscale"] / frame["lengthscale"]
    by = frame.groupby("change", sort=False)
    names = ["RMSE", "batch_RMSE", "ratio", "learned noise", "lengthscale"]
    table = by[names].median()
    recovered = by["recovered_after"]
    table["recovered"] = [
        f"{n} of {k}" for n, k in zip(recovered.count(), by.size(), strict=True)
    ]
    return lines(table.assign(**{"after updates": recovered.median()}))


def acceptance(file: Contents) -> list[Row]:
    """Acceptance bars, of the last version in the file."""
    from workbench.bars import CASES, judged

    frame = pd.DataFrame(file.rows)
    frame = frame[frame["version"] == frame["version"].iloc[-1]]
    found = []
    for case in CASES:
        part = frame[frame["case"] == case].set_index(["stream", "seed"], drop=False)
        found += [{"case": case, **row} for row in judged(case, part)]
    return found


def deep(file: Contents) -> list[Row]:
    """Error and coverage with a network in the kernel, before it, and without."""
    frame = of(file, case="deep")
    return [
        {
            "stream": stream,
            "model": words,
            "RMSE": part[f"{name}: RMSE"].mean(),
            "of 95 % intervals": part[f"{name}: in 95 %"].mean(),
        }
        for stream, part in frame.groupby("stream")
        for name, words in NETWORKS.items()
    ]


def elsewhere(module: str) -> Callable[[Contents], list[Row]]:
    """The table that a module of the workbench makes of its file."""
    return lambda file: importlib.import_module(f"workbench.{module}").table(file)


Maker = Callable[[Contents], list[Row]]
RIVER = "data/prequential.json"
TIMING, BAYESOPT = "data/timing.json", "data/bayesopt.json"
SERIES, TERRAIN = "reproduction/timeseries.json", "reproduction/terrain.json"
ENDS = ("stream", "method", "M", "RMSE", "MLL", "cpu_seconds")
LATENCY = ("data", "work", "M", "mean", "p50", "p99", "max", "p50 / floor")
LATENCY += ("fantasy / mean", "fantasy / p50", "predict", "exported")
LATENCY += ("SMSE", "MSLL", "inside 90 %")
TABLES: dict[str, tuple[str, Maker]] = {
    "picture": ("data/picture.json", elsewhere("picture")),
    "table": (RIVER, readme_table),
    "changes": ("data/bars.json", changes),
    "alarms": ("data/alarms.json", alarms),
    "river-numbers": (RIVER, partial(river, task="regression")),
    "river-labels": (RIVER, partial(river, task="classification")),
    "river-all": (RIVER, every_model),
    "toy": ("reproduction/toy.json", toy),
    "alpha": ("reproduction/alpha.json", alpha),
    "hyperparameters": ("reproduction/hyperparameters.json", hyperparameters),
    "timeseries": (SERIES, contest("RMSE")),
    "timeseries-mll": (SERIES, contest("MLL")),
    "terrain": (TERRAIN, contest("RMSE")),
    "terrain-mll": (TERRAIN, contest("MLL")),
    "banana": ("reproduction/banana.json", banana),
    "timing-steps": (TIMING, timing_steps),
    "latency": ("data/latency.json", plain(*LATENCY)),
    "timing-streams": (TIMING, plain(case="streams")),
    "export": (TIMING, plain(case="export")),
    "distributed": ("data/distributed.json", plain()),
    "bayesopt-regret": (BAYESOPT, regret),
    "bayesopt-cost": (BAYESOPT, bayesopt_cost),
    "merge": ("data/merge.json", plain(*ENDS)),
    "soak": ("data/soak.json", soak),
    "soak-regimes": ("data/soak.json", soak_regimes),
    "bars": ("data/bars.json", acceptance),
    "frontier": ("data/frontier.json", elsewhere("frontier")),
    "deep": ("data/deep.json", deep),
}
NETWORKS = {
    "deep": "network in the kernel, learned along the stream",
    "features": "network trained on the first batch, then frozen",
    "ARD": "no network, one lengthscale per input",
}
SHORT = ("picture", "table")  # of README.md, which is short
PICTURES = {"frontier": "![Error against cost](figures/frontier.png)\n\n"}


def block(name: str) -> str:
    """A table and what made it, or that it was not made yet."""
    file, make = TABLES[name]
    if not (DOCS / file).exists():
        return f"*Not measured yet: `{file}`.*"
    contents = read(DOCS / file)
    made = ", ".join(versions(contents))
    rows = make(contents)
    if name in SHORT:
        return markdown(rows)
    return f"{PICTURES.get(name, '')}{markdown(rows)}\n\n*`{file}`, torch_ssgp {made}*"


def filled(text: str) -> str:
    """A page with its tables."""

    def table(match: re.Match[str]) -> str:
        head = match[0].partition("\n")[0]
        space = "\n" if match[1] in SHORT else "\n\n"
        return f"{head}{space}{block(match[1])}{space}<!-- end -->"

    return BLOCK.sub(table, text)


def pages() -> list[Path]:
    """Those with tables."""
    every = [README, *sorted(DOCS.rglob("*.md"))]
    return [path for path in every if BLOCK.search(path.read_text(encoding="utf-8"))]


NUMBER = re.compile(r"(?<![\w.,/])[\d,]*\d\.\d+(?!\w|\.\d)")  # no counts of things


def strangers(text: str) -> list[str]:
    """Numbers in the sentences of a page that none of its tables or files has.

    Where a file is still to be made, nothing can be said.
    """
    files = dict.fromkeys(TABLES[name][0] for name in MARK.findall(text))
    if not all((DOCS / file).exists() for file in files):
        return []
    known = [number for file in files for number in numbers_in(file)]
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    known += [float(n) for n in re.findall(r"\d+(?:\.\d+)?", tables.replace(",", ""))]
    values = np.array(known or [math.nan])
    aside = r"```.*?```|`[^`]*`|^\|[^\n]*$|\]\([^)]*\)"  # code, tables, links
    prose = re.sub(aside, "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for number in NUMBER.findall(prose):
        digits = len(number.partition(".")[2])
        value = float(number.replace(",", ""))
        if not (np.abs(np.round(values, digits) - value) < 1e-9).any():
            found.append(number)
    return found


def numbers_in(file: str) -> list[float]:
    """All numbers in a file, those of its header too."""
    path = DOCS / file
    return list(_numbers(list(read(path)))) if path.exists() else []


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield abs(float(value))


def main(arguments: list[str] | None = None) -> None:
    """Fill all pages, and say what they took."""
    from workbench.common import new_parser

    new_parser(__doc__).parse_args(arguments)
    for path in pages():
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text), encoding="utf-8")
    rows = [
        row
        for path in [*DOCS.glob("data/*.json"), *DOCS.glob("reproduction/*.json")]
        for row in read(path).rows
    ]
    took = sum(row.get("took", 0.0) for row in rows)
    print(f"{len(rows):,} rows, {took / 60:,.0f} CPU minutes where they are known")

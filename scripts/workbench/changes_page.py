"""The page of streams that change."""

from __future__ import annotations

import math
import statistics

from workbench.pages import (
    bullets,
    listed,
    made_with,
    markdown,
    paragraphs,
    reach,
    wrapped,
)
from workbench.results import Contents, Row

AUTO = "auto"
FIXED = {f"λ = {power:g}": power for power in (1.0, 0.99, 0.95, 0.9, 0.8, 0.5, 0.2)}
NOTHING = "λ = 1"
WINDOW = "windowed exact"
CLOSE = 1.1  # of the best fixed power
STILL = 1.01  # of nothing forgotten, where nothing changes
SENSOR = 1.1


def of_table(rows: list[Row], table: str) -> dict[str, dict[str, list[Row]]]:
    """Rows of a table by stream and model, one for each seed."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if row["table"] == table:
            models = found.setdefault(row["stream"], {})
            models.setdefault(row["model"], []).append(row)
    return {name: models for name, models in found.items() if AUTO in models}


def errors(models: dict[str, list[Row]]) -> dict[str, float]:
    """The error of every model, averaged over seeds."""
    return {
        name: statistics.fmean(row["error"] for row in rows)
        for name, rows in models.items()
    }


def streams(rows: list[Row]) -> list[Row]:
    """Errors of all models, stream by stream."""
    shown = []
    for name, models in of_table(rows, "streams").items():
        error = errors(models)
        fixed = {model: error[model] for model in FIXED if model in error}
        line: Row = {"stream": name, AUTO: error[AUTO]}
        line |= {model: error.get(model, "–") for model in (*FIXED, WINDOW)}
        line["auto / best λ"] = error[AUTO] / min(fixed.values()) if fixed else "–"
        line["changes"] = models[AUTO][0]["changes"]
        line["alarms"] = ", ".join(str(row["alarms"]) for row in models[AUTO])
        shown.append(line)
    return shown


def is_still(name: str) -> bool:
    """Whether nothing changes in a stream."""
    return name.startswith("stationary")


def verdict(rows: list[Row]) -> str:
    """Which bars are reached."""
    ratios, over_one, means, at_edge = {}, {}, {}, []
    for name, models in of_table(rows, "streams").items():
        error = errors(models)
        fixed = {model: error[model] for model in FIXED if model in error}
        if not fixed:
            continue
        if is_still(name):
            over_one[name] = error[AUTO] / error.get(NOTHING, math.nan)
            continue
        ratios[name] = error[AUTO] / min(fixed.values())
        if min(fixed, key=lambda model: fixed[model]) == [*FIXED][-1]:
            at_edge.append(name)
        for model in (AUTO, *fixed):
            relative = error[model] / min(fixed.values())
            means.setdefault(model, []).append(math.log(relative))
    parts = []
    if ratios:
        behind = [f"{n} ({r:.2f})" for n, r in ratios.items() if r > CLOSE]
        ahead = [n for n, r in ratios.items() if r < 1]
        parts.append(
            f"Within 10 % of the best fixed λ in hindsight on "
            f"{len(ratios) - len(behind)} of {len(ratios)} streams that change, ahead "
            f"of it on {len(ahead)}"
            + (f"; not on {listed(behind)}." if behind else ".")
        )
        total = {
            name: math.exp(statistics.fmean(values))
            for name, values in means.items()
            if len(values) == len(ratios)
        }
        parts.append(
            "Error relative to the best fixed λ of each stream, geometric mean over "
            "those that change: "
            + ", ".join(f"{name} {value:.2f}" for name, value in total.items())
            + "."
        )
    if at_edge:
        parts.append(
            f"The smallest λ tried, {[*FIXED.values()][-1]:g}, is the best on "
            f"{listed(at_edge)}: a smaller one may be better there, and the best "
            "fixed λ is that of this grid only."
        )
    if ratios.get("gradual", 0) > CLOSE:
        alarms = [row["alarms"] for row in of_table(rows, "streams")["gradual"][AUTO]]
        parts.append(
            "The gradual stream turns into another function and then into its negative "
            f"within the run. Auto leaves less than half of the past {listed(alarms)} "
            "times and all of it in between: after such a fade little but one batch is "
            "left, which the next one hardly contradicts."
        )
    if over_one:
        parts.append(
            "Where nothing changes, the error relative to that of λ = 1 is "
            + listed([f"{value:.3f} ({name})" for name, value in over_one.items()])
            + f"; the bar is {STILL}."
        )
    return bullets(*parts)


def still(rows: list[Row]) -> str:
    """False alarms, and what they cost."""
    table = of_table(rows, "still")
    if not table:
        return ""
    shown, found, everything = [], [], []
    for name, models in table.items():
        auto, one = (
            sorted(models.get(model, []), key=lambda row: row["seed"])
            for model in (AUTO, NOTHING)
        )
        ratios = [a["error"] / b["error"] for a, b in zip(auto, one, strict=False)]
        shown.append(
            {
                "stream": name,
                "seeds": len(auto),
                "updates": sum(row["updates"] for row in auto),
                "alarms": sum(row["alarms"] for row in auto),
                "faded": sum(row["faded"] for row in auto),
                "RMSE / λ = 1": reach(ratios, ".3f"),
                "CPU / λ = 1": sum(row["cpu_seconds"] for row in auto)
                / sum(row["cpu_seconds"] for row in one),
            }
        )
        found += ratios
        everything += auto
    updates = sum(row["updates"] for row in everything)
    alarms = sum(row["alarms"] for row in everything)
    return paragraphs(
        "## Where nothing changes",
        "Streams of 1 to 3 inputs, in random order or sorted by the first of them, "
        "noise of 0.1 or 0.5 where the function has 1, at most 30 inducing points, "
        "default steps. Alarms are updates that leave less than half of the past, and "
        "`faded` those that leave more, if not all. The error is that of the mean "
        "against the function at the end, its range over seeds, in units of that with "
        "λ = 1.",
        markdown(shown),
        f"{alarms} false alarms in {updates:,} updates; at most one in 1,000 was "
        f"asked for. Of {len(found)} ratios of errors "
        f"{sum(ratio <= STILL for ratio in found)} are at most {STILL}, which was "
        f"asked for; the largest is {max(found):.3f}.",
    )


def sensor(rows: list[Row]) -> str:
    """The series that grows."""
    shown = [
        {
            "readings": row["data"],
            "arrive as": row["model"],
            "tenths": " ".join(f"{value:.3f}" for value in row["tenths"]),
            "last / second": row["last_to_second"],
            "exact": row["exact"],
            "last / exact": row["last_to_exact"],
            "ms": row["ms"],
        }
        for row in rows
        if row["table"] == "sensor"
    ]
    if not shown:
        return ""
    fewer = min(row["readings"] for row in shown) < 10_000
    return paragraphs(
        "## A sensor",
        "Readings every 5 minutes, with a daily cycle, weather that lasts some hours "
        "and noise of 0.2. The error is that of the next reading, or of the next 12, "
        "by tenths of the series. The exact GP has the last 300 readings and predicts "
        f"the last tenth in the same way. The bar for both ratios is {SENSOR}, over "
        "10,000 readings" + ("; these are fewer." if fewer else "."),
        markdown(shown),
    )


def points(rows: list[Row]) -> str:
    """Change points of annotated series."""
    table: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["table"] == "points":
            table.setdefault(row["stream"], {})[row["model"]] = row
    if not table:
        return ""
    models = list(dict.fromkeys(name for each in table.values() for name in each))
    shown: list[Row] = [
        {"series": name, "length": next(iter(each.values()))["data"]}
        | {
            model: f"{each[model]['F1']:.2f} ({each[model]['found']})"
            if model in each
            else "–"
            for model in models
        }
        for name, each in table.items()
    ]
    means = {
        model: statistics.fmean(
            each[model]["F1"] for each in table.values() if model in each
        )
        for model in models
    }
    shown.append(
        {"series": "mean", "length": ""}
        | {model: f"{value:.2f}" for model, value in means.items()}
    )
    best = max(means, key=lambda model: means[model])
    return paragraphs(
        "## Annotated change points",
        "The series of `river.drift.datasets`, standardized, against what their "
        "annotators marked: F1, and in brackets the number of alarms. `auto` is a "
        "model of the series over time (Matérn 5/2) that learns 5 readings at a "
        "time; an alarm is an update that starts anew, `forgot` = 0. River's detectors "
        "have their defaults and read values one by one. A mark is found by an alarm "
        "that is no further away than 5 % of the length; an alarm finds one mark at "
        "most, and the beginning counts as found. Precision is over the marks of all "
        "annotators, recall is averaged over annotators, as in the Turing Change Point "
        "Dataset. Its series "
        "are not always those in the package: we take every third day of Apple, and "
        "the first 774 days of Bitcoin. BrentSpotPrice is left out, because its marks "
        "belong to a sampled series that is not in the package. Of "
        "several columns we take the closing price (Apple), the pace (RunLog) and V1 "
        "(Occupancy).",
        markdown(shown),
        f"The best mean is that of {best}. Where there is no alarm at all, F1 is "
        "that of the beginning alone. One run each; nothing was tuned to these series.",
    )


def seeds_of(rows: list[Row]) -> str:
    """The number of seeds, or the least and the most where streams differ."""
    counts = [len(models[AUTO]) for models in of_table(rows, "streams").values()]
    return f"{reach(counts, 'd')} seed{'s' * (max(counts) > 1)}"


def more_seeds(rows: list[Row]) -> str:
    """What as many seeds as all streams have say of those that have more."""
    table = of_table(rows, "streams")
    fewest = min((len(models[AUTO]) for models in table.values()), default=0)
    parts = []
    for name, models in table.items():
        if len(models[AUTO]) == fewest:
            continue
        first = {
            model: statistics.fmean(r["error"] for r in own if r["seed"] < fewest)
            for model, own in models.items()
        }
        best = min(error for model, error in first.items() if model.startswith("λ"))
        parts.append(
            f"Over the first {fewest} seeds alone, as many as other streams have, "
            f"auto / best λ of {name} is {first[AUTO] / best:.3f}."
        )
    return paragraphs(*parts)


def page(file: Contents) -> str:
    """The page, from the file beside it."""
    rows, made = file.rows, file.header
    table = streams(rows)
    return wrapped(
        paragraphs(
            "# Streams that change",
            f"Written by `scripts/benchmark.py changes` ({made_with(file)}, river "
            f"{made['river']}) from `data/changes.json`.",
            "## Forgetting: by the evidence, at a fixed rate, or all but a window"
            if table
            else "",
            f"Streams of {made['batches']} batches of {made['batch']} data, at most "
            f"{made['inducing']} inducing points, {made['steps']} steps, "
            f"{seeds_of(rows)}. Every batch is predicted, then learned; errors are "
            "RMSE, or shares of wrong labels, averaged over all batches but the "
            "first. Noise of 0.1 is part of them. The window is an exact GP, "
            f"trained from scratch on the last {made['window']} data before every "
            "batch; it has no version for labels. `alarms` counts updates that leave "
            "less than half of the past, one number for each seed."
            if table
            else "",
            verdict(rows),
            more_seeds(rows),
            markdown(table),
            still(rows),
            sensor(rows),
            points(rows),
        )
    )

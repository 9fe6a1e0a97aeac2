"""The page and the picture of predict-then-learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib import pyplot

from workbench.pages import bullets, listed, markdown, paragraphs, reach, wrapped
from workbench.results import Contents, Row

OURS = "StreamingGP"
FORGETTING = 'StreamingGP, forget="auto"'
CLOSE = 1.02  # of the best error
POINT = 0.01  # of accuracy
INSIDE = (0.87, 0.93)  # of intervals that should hold 90 %
COLORS = pyplot.get_cmap("Dark2").colors
SPREAD = 0.6  # of the distance between two streams, so that no point hides another


def of_task(rows: list[Row], task: str) -> dict[str, dict[str, Row]]:
    """Rows by stream and model, of streams on which our front has run."""
    streams: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["task"] == task:
            streams.setdefault(row["stream"], {})[row["model"]] = row
    return {name: models for name, models in streams.items() if OURS in models}


def best(models: dict[str, Row], measure: str, sign: int) -> Row:
    """The best of the models that are not ours; sign is -1 where less is better."""
    return max(
        (row for row in models.values() if row["model"] not in (OURS, FORGETTING)),
        key=lambda row: sign * row[measure],
    )


def verdicts(rows: list[Row], task: str) -> list[Row]:
    """Our front against the best of river's models, stream by stream."""
    found = []
    for name, models in of_task(rows, task).items():
        ours = models[OURS]
        verdict: Row = {"stream": name, "data": ours["data"]}
        if task == "regression":
            other = best(models, "MAE", -1)
            verdict |= {
                "MAE": ours["MAE"],
                "best of river": other["MAE"],
                "which": other["model"],
                "ratio": ours["MAE"] / other["MAE"],
                "inside 90 %": f"{100 * ours['inside']:.1f}",
            }
        else:
            other = best(models, "accuracy", 1)
            verdict |= {
                "accuracy": ours["accuracy"],
                "best of river": other["accuracy"],
                "which": other["model"],
                "points": 100 * (ours["accuracy"] - other["accuracy"]),
            }
        found.append(verdict)
    return found


def bars(rows: list[Row]) -> str:
    """How many streams reach what was asked for."""
    regression = of_task(rows, "regression")
    close = [
        name
        for name, models in regression.items()
        if models[OURS]["MAE"] <= CLOSE * best(models, "MAE", -1)["MAE"]
    ]
    inside = [
        name
        for name, models in regression.items()
        if INSIDE[0] <= models[OURS]["inside"] <= INSIDE[1]
    ]
    classes = of_task(rows, "classification")
    right = [
        name
        for name, models in classes.items()
        if models[OURS]["accuracy"] >= best(models, "accuracy", 1)["accuracy"] - POINT
    ]
    return bullets(
        f"MAE is the best, or within 2 % of it, on {counted(close, regression)}.",
        "Intervals of 90 % contain 87 to 93 % of the targets on "
        f"{counted(inside, regression)}.",
        f"Accuracy is within one point of the best on {counted(right, classes)}.",
    )


NOTHING_TO_LEARN = 1.05  # of the best error, where predicting the mean does as well
GROWING = 2  # times the error of the first third, in the last


def ahead(rows: list[Row]) -> list[str]:
    """Where one of river's models has the smaller MAE, and what the rows say of why."""
    found = []
    for name, models in of_task(rows, "regression").items():
        ours, other = models[OURS], best(models, "MAE", -1)
        if ours["MAE"] <= other["MAE"]:
            continue
        percent = 100 * (ours["MAE"] / other["MAE"] - 1)
        text = f"On {name} {other['model']} is ahead, by {percent:.1f} % of its MAE."
        mean = models.get("mean", other)
        if mean["MAE"] <= NOTHING_TO_LEARN * other["MAE"]:
            above = 100 * (mean["MAE"] / other["MAE"] - 1)
            text += (
                f" The mean of all targets so far is within {above:.1f} % of it: the "
                "features carry almost no information, and models that hardly use "
                "them do best."
            )
        growth, theirs = (row["late MAE"] / row["early MAE"] for row in (ours, other))
        if growth > GROWING:
            text += (
                f" Our errors in the last third are {growth:.1f} times those in the "
                f"first, {other['model']}'s {theirs:.1f} times: the spread of "
                "targets grows, and our model has one noise for all of them."
            )
        found.append(text)
    return found or ["None of river's models is ahead of ours in MAE."]


def forgetting(rows: list[Row]) -> str:
    """What ``forget="auto"`` changes."""
    pairs = {
        name: (models[FORGETTING], models[OURS])
        for name, models in of_task(rows, "regression").items()
        if FORGETTING in models
    }
    if not pairs:
        return ""
    errors = [f"{name} {a['MAE'] / b['MAE']:.2f}" for name, (a, b) in pairs.items()]
    costs = [a["ms"] / b["ms"] for a, b in pairs.values()]
    return (
        'With `forget="auto"` the evidence decides when the past no longer holds. MAE '
        f"relative to the default, which forgets nothing: {listed(errors)}. A datum "
        f"costs {reach(costs, '.1f')} times as much."
    )


def limits(rows: list[Row], length: int) -> str:
    """What the bars do not show, from the same rows."""
    streams = {
        name: models
        for task in ("regression", "classification")
        for name, models in of_task(rows, task).items()
    }
    behind = [
        name
        for name, models in streams.items()
        if models[OURS]["log density"] < best(models, "log density", 1)["log density"]
    ]
    slower = [
        models[OURS]["ms"]
        / max(r["ms"] for r in models.values() if r["model"] not in (OURS, FORGETTING))
        for models in streams.values()
        if len(models) > 1
    ]
    return bullets(
        *ahead(rows),
        forgetting(rows),
        "Log density is below the best of river's models on "
        f"{counted(behind, streams)}. It is computed from the model's own "
        "distribution, which can be far too narrow.",
        "Our intervals are calibrated on the last targets, so they reach their "
        "coverage by design. Those of river's models are not calibrated this way, "
        "so the two columns cannot be compared.",
        f"A datum costs {min(slower):.0f} to {max(slower):.0f} times the processor "
        "time of the slowest of river's models.",
        f"Streams are cut at {length} data{shorter(streams, length)}, to keep the "
        "run short. The results say nothing about longer streams, and if models are "
        "close, their order may change.",
        "SolarFlare and Yeast, also in river's package, have several targets per datum "
        "and are left out.",
        "Each cell was run once, with one seed.",
    )


def shorter(streams: dict[str, dict[str, Row]], length: int) -> str:
    """`` (A has 144, B is cut at 300)``, of those with fewer data."""
    fewer = [
        f"{name} {models[OURS]['data']}"
        for name, models in streams.items()
        if models[OURS]["data"] < length
    ]
    return f" ({listed(fewer)})" if fewer else ""


def counted(some: list[str], streams: dict[str, dict[str, Row]]) -> str:
    """``2 of 7 streams (a and b)``."""
    names = f" ({listed(some)})" if some else ""
    return f"{len(some)} of {len(streams)} streams{names}"


def page(file: Contents) -> str:
    """The page, from the file beside it."""
    rows, made = file.rows, file.header
    measures = {
        "regression": ("MAE", "RMSE", "log density", "inside", "ms"),
        "classification": ("accuracy", "log density", "ms"),
    }
    tables = []
    for task, names in measures.items():
        for name, models in of_task(rows, task).items():
            shown = [
                {"model": row["model"], **{key: row[key] for key in names}}
                for row in models.values()
            ]
            tables.append(f"### {name}\n\n{markdown(shown)}")
    return wrapped(
        paragraphs(
            "# Comparison with river",
            "Written by `scripts/benchmark.py prequential` (torch_ssgp "
            f"{made['torch_ssgp']}, river {made['river']}) from "
            "`data/prequential.json`. Every model predicts a datum and then learns "
            f"from it, on at most the first {made['length']} data of each stream. "
            "The first prediction is not scored. All rows come from one version of "
            "the code, run one after the other. `StreamingGP` is `torch_ssgp.river` "
            "with its defaults. The others are river's models with their defaults, "
            "behind a StandardScaler if they use features. All models get dates as "
            "days and as month, hour or weekday.",
            "![Errors relative to the best](figures/prequential.png)",
            "## Against the best of river's models",
            bars(rows),
            markdown(verdicts(rows, "regression")),
            markdown(verdicts(rows, "classification")),
            "What else the results show, and what they do not:",
            limits(rows, made["length"]),
            "## All models",
            "In the tables, `inside` is the share of targets in intervals of 90 %, "
            "and `ms` the processor time per datum for prediction and learning. "
            "River's regressors predict numbers only, so their density is a "
            "Gaussian with the mean square of all errors so far as its variance.",
            *tables,
        )
    )


def draw(rows: list[Row], path: Path) -> None:
    """One panel per task: error of each model, relative to the best."""

    def mae(row: Row) -> float:
        return row["MAE"]

    def wrong(row: Row) -> float:
        return 1 - row["accuracy"]

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4))
    panel(panels[0], of_task(rows, "regression"), mae, "MAE / smallest MAE")
    panel(panels[1], of_task(rows, "classification"), wrong, "share of wrong labels")
    panels[0].set_yscale("log")
    panels[0].set_yticks(ticks := [1, 2, 5, 10], [f"{tick}" for tick in ticks])
    panels[0].minorticks_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def panel(
    ax: pyplot.Axes,
    streams: dict[str, dict[str, Row]],
    error: Callable[[Row], float],
    label: str,
) -> None:
    """Streams along the axis, a point for each model."""
    relative = "/" in label
    models = list(dict.fromkeys(name for rows in streams.values() for name in rows))
    for i, model in enumerate(models):
        shift = SPREAD * (i / max(len(models) - 1, 1) - 0.5)
        points = [
            (k + shift, error(rows[model]) / (smallest(rows, error) if relative else 1))
            for k, rows in enumerate(streams.values())
            if model in rows
        ]
        ours = model == OURS
        ax.plot(
            *zip(*points, strict=True),
            "D" if ours else "o",
            ms=7 if ours else 5,
            color="black" if ours else COLORS[i % len(COLORS)],
            label=model,
        )
    ax.set_xticks(range(len(streams)), [*streams], rotation=30, ha="right")
    ax.set_ylabel(label)
    ax.grid(axis="y", alpha=0.3)
    if streams:
        ax.legend(fontsize=7)


def smallest(rows: dict[str, Row], error: Callable[[Row], float]) -> float:
    """The smallest error of all models."""
    return max(min(map(error, rows.values())), 1e-12)

"""The picture of the README, and its caption, from docs/data/picture.json."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot

from workbench.pages import listed
from workbench.prequential_page import FORGETTING
from workbench.results import Contents, Row

OURS, PAPER, BATCH = "StreamingGP", "the paper's form", "batch"
COLORS = {OURS: "tab:blue", BATCH: "0.35", PAPER: "tab:orange"}
LABELS = {OURS: "torch_ssgp", BATCH: "batch: an exact GP on all data so far"}
WINDOW = 50  # readings, of the running error


def errors(rows: list[Row]) -> dict[str, list[float]]:
    """Absolute errors of each model, from the second reading on."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["k"]:
            found.setdefault(row["model"], []).append(abs(row["y"] - row["mean"]))
    return found


def average(values: list[float]) -> float:
    """The mean."""
    return sum(values) / len(values)


def best_of_river(found: dict[str, list[float]]) -> str:
    """The model of river's with the smallest error."""
    theirs = [name for name in found if name not in (OURS, FORGETTING, PAPER, BATCH)]
    return min(theirs, key=lambda name: average(found[name]))


def shown(found: dict[str, list[float]]) -> list[str]:
    """The models of the picture, the worst first."""
    names = [OURS, BATCH, PAPER, best_of_river(found)]
    names = [name for name in names if name in found]  # a run may go on
    return sorted(names, key=lambda name: -average(found[name]))


def label(name: str) -> str:
    """What a model is called in the picture."""
    if name in (OURS, BATCH, PAPER):
        return LABELS.get(name, name)
    return f"best of river: {name}"


def caption(file: Contents) -> str:
    """What is to be seen, in words and numbers."""
    found = errors(file.rows)
    scores = [f"{average(found[n]):.2f} ({label(n)})" for n in reversed(shown(found))]
    count, points = len(found[OURS]), file.header["inducing"]
    return (
        f"{file.header['stream']}, a stream of river's: {count} readings, each "
        f"predicted before it was learned; {points} inducing points. Mean absolute "
        f"error: {listed(scores)}."
    )


def running(values: list[float]) -> list[float]:
    """Means of the last ``WINDOW`` values, of fewer at first."""
    return [average(values[max(0, k - WINDOW) : k]) for k in range(1, len(values) + 1)]


def draw(file: Contents, path: Path) -> None:
    """The stream with our intervals above, running errors of four models below."""
    found = errors(file.rows)
    ours = [row for row in file.rows if row["model"] == OURS and row["k"]]
    time = [row["k"] for row in ours]
    figure, (band, error) = pyplot.subplots(
        2, figsize=(10, 6), sharex=True, height_ratios=(1, 1.15)
    )
    values = [row["y"] for row in ours]
    band.plot(time, values, ".", color="0.25", ms=3, label="readings")
    band.fill_between(
        time,
        [row["lower"] for row in ours],
        [row["upper"] for row in ours],
        color=COLORS[OURS],
        alpha=0.3,
        lw=0,
        label="torch_ssgp, 90 % interval before the reading",
    )
    margin = 0.15 * (max(values) - min(values))
    band.set_ylim(min(values) - margin, max(values) + margin)
    band.set_ylabel(file.header["unit"])
    band.legend(fontsize=9, loc="best")
    for name in shown(found):
        error.plot(
            time,
            running(found[name]),
            color=COLORS.get(name, "tab:green"),
            lw=2.4 if name == OURS else 1.4,
            label=f"{label(name)}: {average(found[name]):.2f}",
        )
    error.set_ylabel(f"mean absolute error,\nlast {WINDOW} readings")
    error.set_xlabel("readings so far")
    error.set_xlim(0, len(time))
    error.set_ylim(bottom=0)
    error.legend(fontsize=9, title="average over all", title_fontsize=9)
    for ax in (band, error):
        ax.grid(color="0.93")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

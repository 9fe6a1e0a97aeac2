"""Pictures of the experiments, drawn from their rows.

Rows may be missing: what is there is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from workbench.common import save
from workbench.experiments import COMPARED, some_of
from workbench.results import Row
from workbench.runner import BATCH, OURS, PAPER, TWICE, WINDOW, WINDOWED

Cells = Mapping[str, Row]
SVI = "SVI"
COLOURS = dict(zip((OURS, TWICE, PAPER, WINDOW), ("C3", "C6", "C9", "C0"), strict=True))
COLOURS |= {WINDOWED: "C2", SVI: "C1", BATCH: "0.35"}
# Stars where two methods end in the same place: the small one is on the large one.
STARS = {WINDOWED: 15, TWICE: 8}  # others 12
# Forms of alpha: no two of the same colour, line or marker beside each other.
LOOKS = [
    {"color": look[:-2], "ls": "--" if look[-1] in "svP" else "-", "marker": look[-1]}
    for look in ("black o", "C0 s", "C9 ^", "C2 v", "C1 D", "C4 P", "C3 *")
]


def merit(row: Row, score: str) -> float:
    """``RMSE`` or ``MLL`` of a row, such that more is better and NaN is worst."""
    value = row[score] if score == "MLL" else -row[score]
    return -math.inf if math.isnan(value) else value


def contests(rows: Iterable[Row]) -> dict[tuple[str, int, int], Cells]:
    """Rows of all methods by stream, inducing points and size of batches.

    A full GP, which has no inducing points, and the batch model, which sees no batches,
    belong to every setting of their stream. Of SVI the rate that ends best is kept.
    """
    rows = sorted((r for r in rows if "RMSE" in r), key=lambda r: merit(r, "RMSE"))
    settings = {(r["stream"], r["M"], r["batch"]) for r in rows}
    return {
        (name, m, batch): {
            SVI if row["method"].startswith(SVI) else row["method"]: row
            for row in rows
            if row["stream"] == name
            and row["M"] in (0, m)
            and row["batch"] in (0, batch)
        }
        for name, m, batch in sorted(settings)
        if m and batch
    }


def frontier(contest: Cells, score: str) -> list[Row]:
    """Ends of streams that no other is both faster and better than, by time."""
    kept: list[Row] = []
    rivals = [row for method, row in contest.items() if method != BATCH]
    for row in sorted(rivals, key=lambda row: row["seconds"]):
        if not kept or merit(row, score) > merit(kept[-1], score):
            kept.append(row)
    return kept


def alpha_forms(cells: Cells) -> dict[str, list[Row]]:
    """Rows of the experiment on alpha by form, in order of alpha, ours last."""
    forms: dict[str, list[Row]] = {}
    for key in sorted(cells, key=lambda k: ("noise" in k, cells[k]["alpha"], k)):
        forms.setdefault(key.split("; split ")[0], []).append(cells[key])
    return forms


def gaps(row: Row) -> np.ndarray:
    """Distances between neighbouring inducing points on a line."""
    return np.diff(np.sort(np.array(row["z"])))


def learned(cells: Cells) -> dict[float, dict[int | None, np.ndarray]]:
    """Learned - true, draws x batches, by lengthscale and M; the full GP is last."""
    groups: dict[float, dict[int | None, list[list[float]]]] = {}
    for row in sorted(cells.values(), key=lambda r: (r["lengthscale"], r["M"] or 1e9)):
        true, sizes = row["lengthscale"], groups.setdefault(row["lengthscale"], {})
        sizes.setdefault(row["M"], []).append([each - true for each in row["learned"]])
    return {true: {m: np.array(e) for m, e in g.items()} for true, g in groups.items()}


def draw(name: str, rows: list[Row], path: Path) -> None:
    """Write the picture of one experiment."""
    if name in COMPARED:
        figure = draw_compare(contests(rows))
    else:
        figure = DRAWINGS[name]({row["cell"]: row for row in rows})
    save(figure, path)


def _grid(rows: int, columns: int, width: float, height: float, **options: Any) -> Any:
    """A figure and its axes, ``(rows, columns)``; sizes are those of one of them."""
    size = (width * columns, height * rows)
    options |= {"layout": "constrained", "squeeze": False, "figsize": size}
    return pyplot.subplots(rows, columns, **options)


def _log_axis(ax: Any, which: str) -> None:
    """A logarithmic axis with plain numbers, 1-2-5 where powers of ten are too few."""
    getattr(ax, f"set_{which}scale")("log")
    low, high = getattr(ax, f"get_{which}lim")()
    axis = getattr(ax, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 50 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _whole_ticks(ax: Any) -> None:
    """Batches have no fractions."""
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("batch")


def _stretch_top(ax: Any, values: Iterable[float]) -> None:
    """A y axis on which the best values are apart and the worst still in sight."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or max(finite) - min(finite) < 1:
        return
    top = max(finite) + 0.05

    def height(value: np.ndarray) -> np.ndarray:
        return -np.log(np.maximum(0.2 + top - value, 1e-3))

    ax.set_yscale("function", functions=(height, lambda h: 0.2 + top - np.exp(-h)))
    ticks = [top - 0.05 - step for step in (0, 0.3, 1, 3, 10, 30, 100)]
    ticks = [round(tick, 1) for tick in ticks if tick > min(finite)]
    ax.set_yticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
    ax.minorticks_off()
    ax.set_ylim(min(finite) - 0.1 * (top - min(finite)), top)


def _band(
    ax: Any, x: Any, mean: Any, half: Any, alpha: float = 0.2, **style: Any
) -> None:
    """A line with a band around it."""
    ax.plot(x, mean, **style)
    color = {"color": style["color"], "alpha": alpha, "lw": 0}
    ax.fill_between(x, mean - half, mean + half, **color)


def draw_toy(cells: Cells) -> Any:
    """Data, prediction and points after some of the batches."""
    names = sorted(cells, key=lambda key: (key.split(",")[0], "iid" in key))
    columns = some_of(len(cells[names[0]]["panels"]))
    figure, axes = _grid(len(names), len(columns), 3.6, 2.0, sharex=True, sharey=True)
    for name, row_axes in zip(names, axes, strict=True):
        grid, panels = np.array(cells[name]["grid"]), cells[name]["panels"]
        for k, ax in zip(columns, row_axes, strict=True):
            mean, std = np.array(panels[k]["mean"]), np.array(panels[k]["std"])
            past = [panel for panel in panels[:k]]
            x, y = ([v for panel in past for v in panel[axis]] for axis in "xy")
            ax.plot(x, y, ".", color="0.75", ms=3, label="data before")
            now = (panels[k]["x"], panels[k]["y"])
            ax.plot(*now, ".", color="black", ms=3, label="new data")
            _band(ax, grid, mean, 2 * std, 0.25, color="C0", lw=1.5)
            z, low = panels[k]["z"], ax.get_xaxis_transform()
            style = {"color": "C3", "ms": 8, "mew": 1.2, "label": "points"}
            ax.plot(z, [0.05] * len(z), "|", transform=low, **style)
            if ax in axes[0]:
                ax.set_title(f"batch {k + 1}", fontsize=10)
        label = name.replace("alpha 0,", "VFE,").replace("alpha", "Power-EP, α =")
        row_axes[0].set_ylabel(label, fontsize=9)
    axes[0, -1].legend(fontsize=7, loc="upper right")
    axes[0, 0].margins(y=0.2)
    return figure


def draw_alpha(cells: Cells) -> Any:
    """Log-likelihood as data arrive, and how close inducing points are in the end."""
    figure, ((left, right),) = _grid(1, 2, 6.5, 4.5)
    forms = alpha_forms(cells)
    for k, (form, rows) in enumerate(forms.items()):
        style = {**LOOKS[k % len(LOOKS)], "lw": 1.3, "ms": 4, "label": f"α = {form}"}
        scores = np.array([[step["MLL"] for step in row["trace"]] for row in rows])
        error = scores.std(0, ddof=1) / math.sqrt(len(scores)) if len(scores) > 1 else 0
        batches = np.arange(1, scores.shape[1] + 1)
        _band(left, batches, scores.mean(0), error, **style)
        apart = np.maximum(np.sort(np.concatenate([gaps(row) for row in rows])), 1e-6)
        every = max(len(apart) // 8, 1)
        marks = (k * every // len(forms), every)
        share = np.arange(1, len(apart) + 1) / len(apart)
        right.step(apart, share, where="post", markevery=marks, **style)
    _stretch_top(left, [step["MLL"] for row in cells.values() for step in row["trace"]])
    left.set_ylabel("test log-likelihood per point")
    _whole_ticks(left)
    _log_axis(right, "x")
    right.set_xlabel("distance between neighbouring inducing points at the end")
    right.set_ylabel("share of distances that are smaller")
    left.legend(fontsize=8, loc="lower left")
    return figure


def draw_hyperparameters(cells: Cells) -> Any:
    """Learned - true lengthscale against batches."""
    groups = learned(cells)
    figure, (axes,) = _grid(1, len(groups), 6.0, 4.2, sharey=True)
    sizes = sorted({m for group in groups.values() for m in group if m})
    shades = pyplot.get_cmap("viridis")(np.linspace(0, 0.85, len(sizes)))
    colours = {None: "black", **dict(zip(sizes, shades, strict=True))}
    for ax, (true, group) in zip(axes, groups.items(), strict=True):
        for m, errors in group.items():
            batches = np.arange(1, errors.shape[1] + 1)
            style = {"color": colours[m], "lw": 1.5, "ls": "-" if m else "--"}
            label = f"M = {m}" if m else "full GP"
            _band(
                ax, batches, errors.mean(0), errors.std(0), 0.12, label=label, **style
            )
        ax.axhline(0, color="0.6", lw=0.8)
        ax.set_title(f"true lengthscale {true:g}")
        _whole_ticks(ax)
        ax.legend(fontsize=8)
    axes[0].set_ylabel("learned − true lengthscale")
    return figure


def draw_compare(every: dict[tuple[str, int, int], Cells]) -> Any:
    """Accuracy against time, a column for each setting of each stream."""
    names = list(dict.fromkeys(setting[0] for setting in every))
    columns = max(sum(setting[0] == name for setting in every) for name in names)
    size = (2 * len(names), columns, max(4.0, 8 / columns), 3.0)
    figure, axes = _grid(*size, sharex="row", sharey="row")
    for name, pair in zip(names, axes.reshape(len(names), 2, columns), strict=True):
        of = {setting: each for setting, each in every.items() if setting[0] == name}
        for score, row_axes in zip(("MLL", "RMSE"), pair, strict=True):
            for ax in row_axes[len(of) :]:
                ax.set_visible(False)
            for ax, contest in zip(row_axes, of.values(), strict=False):
                _race(ax, contest, score)
            _log_axis(row_axes[0], "x")
            row_axes[0].set_ylabel(f"{score}, {name}")
        for ax, (_, m, batch) in zip(pair[0], of, strict=False):
            ax.set_title(f"{name}, M={m}, batches of {batch:,}", fontsize=9)
        traces = [row["trace"] for each in of.values() for row in each.values()]
        _stretch_top(pair[0, 0], [step["MLL"] for trace in traces for step in trace])
        _log_axis(pair[1, 0], "y")
        for ax in pair[1]:
            ax.set_xlabel("seconds, training and testing")
    styles = [
        {"color": colour, "marker": "x" if method == BATCH else ".", "label": method}
        for method, colour in COLOURS.items()
    ]
    styles += [{"color": "0.3", "ls": "", "marker": "*", "label": "end of stream"}]
    _legend(figure, [*styles, {"color": "0.3", "lw": 0.7, "label": "frontier"}])
    return figure


def _legend(figure: Any, styles: Iterable[dict[str, Any]]) -> None:
    """One for all panels, below them."""
    lines = [Line2D([], [], **style) for style in styles]
    figure.legend(handles=lines, loc="outside lower center", ncols=4, fontsize=9)


def _race(ax: Any, contest: Cells, score: str) -> None:
    """One panel: a curve for each method, and the frontier of where they end."""
    for method, row in contest.items():
        colour = COLOURS[method]
        if method == BATCH:
            ax.axhline(row[score], color=colour, ls=":", lw=1.2)
            ax.plot(row["seconds"], row[score], "x", color=colour, ms=7, mew=1.5)
            continue
        seconds, scores = (
            [step[k] for step in row["trace"]] for k in ("seconds", score)
        )
        width = 1.8 if method == OURS else 1.0
        ax.plot(seconds, scores, ".-", color=colour, lw=width, ms=3.5)
        size = STARS.get(method, 12)
        star = {"ms": size, "mec": "w", "mew": 0.7, "zorder": 5 - size / 20}
        ax.plot(seconds[-1], scores[-1], "*", color=colour, **star)
    if ends := frontier(contest, score):
        corners = [(row["seconds"], row[score]) for row in ends]
        latest = max(row["seconds"] for row in contest.values())
        corners.append((1.15 * latest, corners[-1][1]))
        ax.step(*zip(*corners, strict=True), where="post", color="0.3", lw=0.7)
    ax.grid(alpha=0.25, lw=0.5)


def draw_banana(cells: Cells) -> Any:
    """Decision boundaries after some of the batches, beside the batch model."""
    orders = {"left_to_right": "in order", "random 0": "iid"}
    rows = {label: cells[key] for key, label in orders.items() if key in cells}
    columns = some_of(max(len(row["panels"]) for row in rows.values()))
    size = (len(rows), len(columns) + 1, 2.9, 2.9)
    figure, axes = _grid(*size, sharex=True, sharey=True)
    for row_axes, (label, row) in zip(axes, rows.items(), strict=True):
        for k, ax in zip(columns, row_axes, strict=False):
            _boundary(ax, row["span"], row["panels"][: k + 1])
            ax.set_title(f"{label}, batch {k + 1}", fontsize=9)
        if whole := cells.get("one batch"):
            _boundary(row_axes[-1], whole["span"], whole["panels"])
        row_axes[-1].set_title("all data in one batch", fontsize=9)
    dot = {"ls": "", "marker": "."}
    styles = [{"color": f"C{k}", **dot, "label": f"class {k}"} for k in (0, 1)]
    styles += [{"color": "black", "label": "both as likely"}]
    _legend(figure, [*styles, {**CIRCLE, "ls": "", "label": "points"}])
    return figure


CIRCLE = {"color": "black", "marker": "o", "ms": 3.5, "mfc": "none", "mew": 0.8}


def _boundary(ax: Any, span: list[float], panels: list[Row]) -> None:
    """The line between classes after the last of ``panels``, and all data so far."""
    for age, panel in enumerate(reversed(panels)):
        x, y = np.array(panel["x"]), np.array(panel["y"])
        for k in (0, 1):
            style = {"color": f"C{k}", "ms": 4, "alpha": 1 if not age else 0.3}
            ax.plot(x[y == k, 0], x[y == k, 1], ".", **style)
    mean, z = np.array(panels[-1]["mean"]).T, np.array(panels[-1]["z"])
    if mean.min() < 0 < mean.max():
        ax.contour(span, span, mean, levels=[0], colors="black", linewidths=1.5)
    ax.plot(z[:, 0], z[:, 1], **CIRCLE, ls="")
    ax.set(xlim=(span[0], span[-1]), ylim=(span[0], span[-1]), aspect="equal")


DRAWINGS = {
    "toy": draw_toy,
    "alpha": draw_alpha,
    "hyperparameters": draw_hyperparameters,
    "banana": draw_banana,
}

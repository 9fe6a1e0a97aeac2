"""Pictures of the experiments, drawn from their results.

``draw`` takes what ``scripts/reproduce.py`` keeps of one experiment. Cells may be
missing: what is there is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from torch_ssgp.plotting import require_pyplot
from workbench.cells import some_of
from workbench.results import Row
from workbench.verdicts import (
    BATCH,
    CARE,
    OURS,
    PAPER,
    SVI,
    Cells,
    alpha_forms,
    contests,
    family,
    frontier,
    gaps,
    is_svi,
    learned,
    shown,
)

COLOURS = {
    OURS: "C3",
    PAPER: "C9",
    CARE: "C6",
    "windowed GP": "C0",
    "windowed SGPR": "C2",
    SVI: "C1",
    "online conditioning": "C4",
    BATCH: "0.35",
}
# Stars where two methods end in the same place: the small one is on the large one.
STARS = {"windowed SGPR": 15, "online conditioning": 8, CARE: 8}  # others 12
# Forms of alpha: no two of the same colour, line or marker beside each other.
LOOKS = [
    {"color": colour, "ls": line, "marker": marker}
    for colour, line, marker in (
        ("black", "-", "o"),
        ("C0", "--", "s"),
        ("C9", "-", "^"),
        ("C2", "--", "v"),
        ("C1", "-", "D"),
        ("C4", "--", "P"),
        ("C3", "-", "*"),
    )
]


# ----------------------------------------------------------------------- the figures


def draw(name: str, cells: Cells, path: Path) -> None:
    """Write the picture of one experiment.

    Args:
        name: The experiment.
        cells: Its results; where none can be drawn, nothing is written.
        path: The PNG file.
    """
    figure = DRAWINGS[name](cells)
    if figure is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    require_pyplot().close(figure)


def _grid(rows: int, columns: int, width: float, height: float, **options: Any) -> Any:
    """A figure and its axes, ``(rows, columns)``; sizes are those of one of them."""
    return require_pyplot().subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows),
        layout="constrained",
        squeeze=False,
        **options,
    )


def _log_axis(ax: Any, which: str) -> None:
    """A logarithmic axis with plain numbers, 1-2-5 where powers of ten are too few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

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
    """A y axis on which the best values are apart and the worst still in sight.

    Heights are logarithms of how far a value is below the best one.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or max(finite) - min(finite) < 1:
        return
    top, bottom = max(finite) + 0.05, min(finite)

    def height(value: np.ndarray) -> np.ndarray:
        return -np.log(np.maximum(0.2 + top - value, 1e-3))

    def value_at(h: np.ndarray) -> np.ndarray:
        return 0.2 + top - np.exp(-h)

    ax.set_yscale("function", functions=(height, value_at))
    low, high = height(np.array([bottom, top]))
    places = value_at(np.linspace(low, high, 8))
    # Round to the last digit in which neighbours differ.
    digits = -np.floor(np.log10(np.diff(places))).astype(int)
    places = places[1:]
    ticks = sorted({round(v, d) + 0.0 for v, d in zip(places, digits, strict=True)})
    ax.set_yticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
    ax.minorticks_off()
    ax.set_ylim(value_at(low - 0.04 * (high - low)), top)


def draw_toy(cells: Cells) -> Any:
    """Data, prediction and inducing points after some of the batches."""
    if not cells:
        return None
    names = sorted(cells, key=lambda key: (key.split(",")[0], "iid" in key))
    columns = some_of(len(cells[names[0]]["panels"]))
    figure, axes = _grid(len(names), len(columns), 3.6, 2.0, sharex=True, sharey=True)
    for name, row_axes in zip(names, axes, strict=True):
        row = cells[name]
        grid = np.array(row["grid"])
        for k, ax in zip(columns, row_axes, strict=True):
            panel = row["panels"][k]
            mean, std = np.array(panel["mean"]), np.array(panel["std"])
            for past in row["panels"][:k]:
                ax.plot(past["x"], past["y"], ".", color="0.75", ms=3)
            ax.plot(panel["x"], panel["y"], ".", color="black", ms=3)
            ax.plot(grid, mean, color="C0", lw=1.5)
            ax.fill_between(
                grid, mean - 2 * std, mean + 2 * std, color="C0", alpha=0.25, lw=0
            )
            _ticks(ax, panel["z"])
            if ax in axes[0]:
                ax.set_title(f"batch {k + 1}", fontsize=10)
        label = name.replace("alpha 0,", "VFE,").replace("alpha", "Power-EP, α =")
        row_axes[0].set_ylabel(label, fontsize=9)
    axes[0, 0].plot([], [], ".", color="black", ms=3, label="new data")
    axes[0, 0].plot([], [], ".", color="0.75", ms=3, label="data before")
    axes[0, 0].plot([], [], "|", color="C3", label="inducing points")
    axes[0, 0].legend(fontsize=7, loc="upper right")
    every = np.concatenate([p["y"] for row in cells.values() for p in row["panels"]])
    span = every.max() - every.min()
    axes[0, 0].set_ylim(every.min() - 0.3 * span, every.max() + 0.2 * span)
    return figure


def _ticks(ax: Any, z: list[float]) -> None:
    """Inducing points, just above the lower edge."""
    ax.plot(
        z,
        [0.05] * len(z),
        "|",
        color="C3",
        ms=8,
        mew=1.2,
        transform=ax.get_xaxis_transform(),
    )


def draw_alpha(cells: Cells) -> Any:
    """Log-likelihood as data arrive, and how close inducing points are in the end."""
    if not cells:
        return None
    figure, ((left, right),) = _grid(1, 2, 6.5, 4.5)
    forms = alpha_forms(cells)
    for k, (form, rows) in enumerate(forms.items()):
        style = LOOKS[k % len(LOOKS)]
        scores = np.array([[r["MLL"] for r in row["trace"]] for row in rows.values()])
        mean = scores.mean(0)
        error = scores.std(0, ddof=1) / math.sqrt(len(scores)) if len(scores) > 1 else 0
        batches = np.arange(1, len(mean) + 1)
        left.plot(batches, mean, **style, lw=1.3, ms=4, label=f"α = {form}")
        left.fill_between(
            batches, mean - error, mean + error, color=style["color"], alpha=0.2, lw=0
        )
        apart = np.sort(np.concatenate([gaps(row) for row in rows.values()]))
        apart = np.maximum(apart, 1e-6)
        share = np.arange(1, len(apart) + 1) / len(apart)
        every = max(len(apart) // 8, 1)
        right.step(
            apart,
            share,
            where="post",
            **style,
            lw=1.3,
            ms=4,
            markevery=(k * every // len(forms), every),
            label=f"α = {form}",
        )
    _stretch_top(left, [r["MLL"] for row in cells.values() for r in row["trace"]])
    left.set_ylabel("test log-likelihood per point")
    _whole_ticks(left)
    left.legend(fontsize=8, loc="lower left")
    _log_axis(right, "x")
    right.set(
        xlabel="distance between neighbouring inducing points at the end",
        ylabel="share of distances that are smaller",
    )
    right.legend(fontsize=8, loc="upper left")
    return figure


def draw_hyperparameters(cells: Cells) -> Any:
    """Learned - true lengthscale against batches."""
    groups = learned(cells)
    if not groups:
        return None
    figure, (axes,) = _grid(1, len(groups), 6.0, 4.2, sharey=True)
    sizes = sorted({m for group in groups.values() for m in group if m})
    shades = require_pyplot().get_cmap("viridis")(np.linspace(0, 0.85, len(sizes)))
    colours = {None: "black", **dict(zip(sizes, shades, strict=True))}
    for ax, (true, group) in zip(axes, groups.items(), strict=True):
        for m, errors in group.items():
            mean, std = errors.mean(0), errors.std(0)
            batches = np.arange(1, len(mean) + 1)
            ax.plot(
                batches,
                mean,
                color=colours[m],
                lw=1.5,
                ls="-" if m else "--",
                marker="." if m else "",
                label=f"M = {m}" if m else "full GP",
            )
            ax.fill_between(
                batches, mean - std, mean + std, color=colours[m], alpha=0.12, lw=0
            )
        ax.axhline(0, color="0.6", lw=0.8)
        ax.set_title(f"true lengthscale {true:g}")
        _whole_ticks(ax)
        ax.legend(fontsize=8)
    axes[0].set_ylabel("learned − true lengthscale")
    return figure


def draw_compare(cells: Cells) -> Any:
    """Accuracy against time, a column for each setting of each stream."""
    every = contests(cells)
    if not every:
        return None
    datasets = sorted({setting.data for setting in every})
    by_data = {d: [s for s in every if s.data == d] for d in datasets}
    columns = max(len(settings) for settings in by_data.values())
    figure, axes = _grid(
        2 * len(datasets),
        columns,
        max(4.0, 8 / columns),
        3.0,
        sharex="row",
        sharey="row",
    )
    for data, pair in zip(
        datasets, axes.reshape(len(datasets), 2, columns), strict=True
    ):
        contest_of = {setting: shown(every[setting]) for setting in by_data[data]}
        for score, row_axes in zip(("MLL", "RMSE"), pair, strict=True):
            for ax in row_axes[len(contest_of) :]:
                ax.set_visible(False)
            for ax, contest in zip(row_axes, contest_of.values(), strict=False):
                _race(ax, contest, score)
            _log_axis(row_axes[0], "x")
            row_axes[0].set_ylabel(f"{score}, {data}")
        for ax, (setting, contest) in zip(pair[0], contest_of.items(), strict=False):
            rates = [name for name in contest if is_svi(name)]
            ax.set_title(
                "\n".join([str(setting), *(f"({r})" for r in rates)]), fontsize=9
            )
        scores = [
            r["MLL"]
            for contest in contest_of.values()
            for row in contest.values()
            for r in row["trace"]
        ]
        _stretch_top(pair[0, 0], scores)
        _log_axis(pair[1, 0], "y")
        for ax in pair[1]:
            ax.set_xlabel("seconds, training and testing")
    _method_legend(figure, columns=2 if columns == 1 else 4)
    return figure


def _race(ax: Any, contest: Cells, score: str) -> None:
    """One panel: a curve for each method, and the frontier of where they end."""
    for method, row in contest.items():
        colour = COLOURS[family(method)]
        if method == BATCH:
            ax.axhline(row[score], color=colour, ls=":", lw=1.2)
            ax.plot(row["seconds"], row[score], "x", color=colour, ms=7, mew=1.5)
            continue
        # Up to its last batch, care is ours.
        drawn = row["trace"][-2:] if method == CARE else row["trace"]
        seconds = [r["seconds"] for r in drawn]
        scores = [r[score] for r in drawn]
        ours = method == OURS
        ax.plot(
            seconds,
            scores,
            color=colour,
            lw=1.8 if ours else 1.0,
            marker=".",
            ms=3.5,
            zorder=3 if ours else 2,
        )
        size = STARS.get(family(method), 12)
        ax.plot(
            seconds[-1],
            scores[-1],
            "*",
            color=colour,
            ms=size,
            mec="w",
            mew=0.7,
            zorder=5 - size / 20,
        )
    if ends := frontier(contest, score):
        corners = [(row["seconds"], row[score]) for row in ends]
        latest = max(row["seconds"] for row in contest.values())
        corners.append((1.15 * latest, corners[-1][1]))
        ax.step(*zip(*corners, strict=True), where="post", color="0.3", lw=0.7)
    ax.grid(alpha=0.25, lw=0.5)


def _method_legend(figure: Any, columns: int) -> None:
    from matplotlib.lines import Line2D

    names = {SVI: "SVI, best rate", BATCH: "batch SGPR, all data at once"}
    handles = [
        Line2D([], [], color=colour, ls=":", marker="x", label=names[method])
        if method == BATCH
        else Line2D([], [], color=colour, marker=".", label=names.get(method, method))
        for method, colour in COLOURS.items()
    ]
    handles += [
        Line2D([], [], color="0.3", ls="", marker="*", ms=10, label="end of stream"),
        Line2D([], [], color="0.3", lw=0.7, label="frontier"),
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, fontsize=9
    )


def draw_memory(cells: Cells) -> Any:
    """Peak memory against accuracy, and over the stream."""
    if not cells:
        return None
    figure, (axes,) = _grid(1, 3, 4.4, 3.8)
    most = 1.15 * max(row["peak_MiB"] for row in cells.values())
    for method, colour in COLOURS.items():
        if method not in cells:
            continue
        row = cells[method]
        for score, ax in zip(("RMSE", "MLL"), axes[:2], strict=True):
            ax.plot(row["peak_MiB"], row[score], "o", color=colour, ms=9, label=method)
        peaks = row["peaks_MiB"]
        axes[2].plot(
            range(1, len(peaks) + 1), peaks, ".-", color=colour, lw=1.5, label=method
        )
    for score, ax in zip(("RMSE", "MLL"), axes[:2], strict=True):
        ax.set(xlabel="peak memory, MiB", ylabel=f"{score} at the end", xlim=(0, most))
        ax.margins(y=0.2)
        ax.grid(alpha=0.25, lw=0.5)
    axes[2].set(ylabel="peak memory of the batch, MiB", ylim=(0, most))
    _whole_ticks(axes[2])
    axes[2].grid(alpha=0.25, lw=0.5)
    lines = axes[2].get_lines()
    figure.legend(
        handles=lines, loc="outside lower center", ncols=len(lines), fontsize=9
    )
    return figure


def draw_banana(cells: Cells) -> Any:
    """Decision boundaries after some of the batches, beside the batch model."""
    orders = {"left_to_right": "in order", "random 0": "iid"}
    rows = {label: cells[key] for key, label in orders.items() if key in cells}
    whole = cells.get("one batch")
    if not rows and whole is None:
        return None
    counts = [len(row["panels"]) for row in rows.values()]
    columns = some_of(max(counts)) if counts else []
    figure, axes = _grid(
        max(len(rows), 1), len(columns) + 1, 2.9, 2.9, sharex=True, sharey=True
    )
    for row_axes, (label, row) in zip(axes, rows.items(), strict=False):
        for k, ax in zip(columns, row_axes, strict=False):
            if k >= len(row["panels"]):
                continue
            _boundary(ax, row["span"], row["panels"][: k + 1])
            ax.set_title(f"{label}, batch {k + 1}", fontsize=9)
    for ax in axes[:, -1]:
        if whole is not None:
            _boundary(ax, whole["span"], whole["panels"])
        ax.set_title("all data in one batch", fontsize=9)
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, ls="", marker=".", ms=9, label=f"class {label}")
        for label, colour in CLASSES.items()
    ]
    handles += [
        Line2D([], [], color="black", lw=1.5, label="both as likely"),
        Line2D([], [], **CIRCLE, ls="", label="inducing points"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)
    return figure


CLASSES = {0: "C0", 1: "C1"}
CIRCLE = {"color": "black", "marker": "o", "ms": 3.5, "mfc": "none", "mew": 0.8}


def _boundary(ax: Any, span: list[float], panels: list[Row]) -> None:
    """The line between classes after the last of ``panels``, and all data so far."""
    for age, panel in enumerate(reversed(panels)):
        x, y = np.array(panel["x"]), np.array(panel["y"])
        for label, colour in CLASSES.items():
            of = x[y == label]
            ax.plot(
                of[:, 0], of[:, 1], ".", color=colour, ms=4, alpha=1 if not age else 0.3
            )
    mean, z = np.array(panels[-1]["mean"]).T, np.array(panels[-1]["z"])
    if mean.min() < 0 < mean.max():
        ax.contour(span, span, mean, levels=[0], colors="black", linewidths=1.5)
    ax.plot(z[:, 0], z[:, 1], **CIRCLE, ls="")
    ax.set(xlim=(span[0], span[-1]), ylim=(span[0], span[-1]), aspect="equal")


def draw_equivalence(cells: Cells) -> Any:
    """Streaming curves on top of batch curves, with both bounds."""
    if not cells:
        return None
    names = sorted(cells)
    columns = max(len(row["panels"]) for row in cells.values())
    figure, axes = _grid(len(names), columns, 4.2, 2.7, sharex=True, sharey=True)
    for name, row_axes in zip(names, axes, strict=True):
        other = "exact GP" if "at the data" in name else "batch"
        for k, (panel, ax) in enumerate(
            zip(cells[name]["panels"], row_axes, strict=True)
        ):
            _pair(ax, cells[name]["grid"], panel, other)
            bounds = (panel["online_bound"], panel["batch_bound"])
            evidence = "log evidence" if other == "exact GP" else "batch bound"
            ax.set_title(
                f"online bound {bounds[0]:.4f} / {evidence} {bounds[1]:.4f}", fontsize=9
            )
            if ax in axes[-1]:
                ax.set_xlabel(f"after batch {k + 1}")
        row_axes[0].set_ylabel(name)
        row_axes[0].legend(fontsize=7, loc="upper left")
    return figure


def _pair(ax: Any, grid: list[float], panel: Row, other: str) -> None:
    ax.plot(panel["x"], panel["y"], ".", color="0.6", ms=3)
    curves = (
        ("batch", "C1", "-", 3.0, other),
        ("online", "black", "--", 1.2, "online"),
    )
    for kind, colour, style, width, label in curves:
        mean, std = np.array(panel[f"{kind}_mean"]), np.array(panel[f"{kind}_std"])
        line = {"color": colour, "ls": style, "lw": width}
        ax.plot(grid, mean, **line, label=label)
        for side in (-2, 2):
            ax.plot(grid, mean + side * std, **{**line, "lw": 0.5 * width})
    _ticks(ax, panel["z"])


DRAWINGS: dict[str, Callable[[Cells], Any]] = {
    "toy": draw_toy,
    "alpha": draw_alpha,
    "hyperparameters": draw_hyperparameters,
    "timeseries": draw_compare,
    "terrain": draw_compare,
    "memory": draw_memory,
    "banana": draw_banana,
    "equivalence": draw_equivalence,
}

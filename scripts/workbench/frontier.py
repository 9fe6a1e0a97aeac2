"""The frontier: error against CPU time and against bytes, on whole streams.

    python scripts/benchmark.py frontier --data-dir DIR --workers 2    hours
    python scripts/benchmark.py frontier --streams elevators --seeds 1
    python scripts/benchmark.py frontier --estimate    what is missing, in CPU minutes
    python scripts/benchmark.py frontier --draw        the pictures alone

Every method is run at several sizes: numbers of inducing points, points of a window,
data of a local expert, passes over all data. Batch SGPR climbs to a plateau with
L-BFGS; SVGP is GPyTorch's, on minibatches of 256. Both have all data at once. Local
experts (LoG-GP) learn single points with hyperparameters that are given: those of an
exact GP on 1,000 of all data, whose cost is not counted. A method is on the frontier if
no other is both better and cheaper; how far off it is otherwise is the ratio of its
error to the smallest at no more cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from matplotlib import pyplot

from workbench import runner
from workbench.common import bench_parser, positive, save
from workbench.results import Contents, Jobs, Key, Row, Table, header, read
from workbench.runner import (
    BATCH,
    EXPERTS,
    MINIBATCHES,
    MOVING,
    OURS,
    PAPER,
    POINTS,
    WINDOW,
    Budget,
    Setting,
)

STREAMS = (
    "TrumpApproval",
    "ChickWeights",
    "pseudo-periodic",
    "audio",
    "terrain",
    "elevators",
    "bike",
    "kin40k",
    "protein",
)
INDUCING = (50, 100, 200, 400, 800)


class Line(NamedTuple):
    """How a method is run and drawn, and what it costs about."""

    sizes: tuple[int, ...]  # of inducing points, or what it has in their place
    color: str
    marker: str
    ms: float  # of the processor for a datum, at 200 inducing points
    power: float  # of the size that it costs
    at_most: int = 800  # its largest size on the longest streams, to save hours


LINES = {
    OURS: Line(INDUCING, "C3", "o", 1.5, 1.5),
    MOVING: Line(INDUCING, "C6", "s", 3.0, 1.5, 400),
    POINTS: Line((100, 200, 400), "C1", "D", 3.0, 1.0, 200),
    PAPER: Line(INDUCING, "C9", "v", 1.5, 1.3, 400),
    BATCH: Line(INDUCING, "0.35", "x", 13.0, 1.2, 400),
    MINIBATCHES: Line(INDUCING, "C2", "^", 1.1, 1.3, 400),
    WINDOW: Line((500, 1_000, 2_000), "C0", "P", 0.03, 2.0, 1_000),
    EXPERTS: Line((100, 200, 400), "C4", "*", 0.7, 0.5),
}
LENGTHS = {"TrumpApproval": 800, "ChickWeights": 460, "audio": 9_000, "kin40k": 36_000}
LENGTHS |= {"pseudo-periodic": 12_000, "terrain": 10_000, "elevators": 14_940}
LENGTHS |= {"bike": 15_640, "protein": 41_160}  # data that are learned
LONG = ("elevators", "bike", "kin40k", "protein")
OF_OURS = (OURS, MOVING, POINTS)
COSTS = {"cpu_seconds": "CPU seconds, learning", "bytes": "bytes kept"}


def jobs(
    on: Setting, streams: Iterable[str], methods: Iterable[str], seeds: int
) -> Jobs:
    """Every method at all of its sizes, the cheap ones first."""
    found: Jobs = {}
    for name, method in product(streams, methods):
        line = LINES[method]
        most = line.at_most if name in LONG else max(line.sizes)
        sizes = [size for size in line.sizes if size <= most]
        sizes = sizes[:1] if on.quick else sizes
        found |= runner.jobs(on, [name], [method], sizes, [0], seeds)
    return dict(sorted(found.items(), key=lambda job: job[0][2]))


def estimate(keys: Iterable[Key], rows: Iterable[Row]) -> dict[str, float]:
    """CPU minutes by stream: measured at this or another version, or guessed."""
    took = {tuple(row[name] for name in runner.NAMES): row["took"] for row in rows}
    found: dict[str, float] = {}
    for key in keys:
        name, method, m = key[:3]
        line = LINES[method]
        guess = 1e-3 * LENGTHS[name] * line.ms * (m / 200) ** line.power
        found[name] = found.get(name, 0.0) + took.get(key, guess) / 60
    return found


def medians(rows: list[Row]) -> pd.DataFrame:
    """Medians over seeds, by stream, method and size; what failed is left out."""
    frame = pd.DataFrame(rows)
    if "failure" in frame:
        frame = frame[frame["failure"].isna()]
    by = frame.groupby(["stream", "method", "M"], sort=False)
    return by[["RMSE", "MLL", *COSTS]].median().reset_index()


def on_frontier(frame: pd.DataFrame, cost: str) -> pd.DataFrame:
    """The rows of one stream that no other is both better and cheaper than."""
    frame = frame.sort_values([cost, "RMSE"])
    return frame[frame["RMSE"] < frame["RMSE"].cummin().shift(fill_value=math.inf)]


def farthest(frame: pd.DataFrame, cost: str) -> float:
    """How far ours is off the frontier of one stream, at worst over the costs of ours.

    The smallest error of ours at most at that cost, over the smallest of all methods.
    """
    ours = frame[frame["method"].isin(OF_OURS)]
    worst = 1.0
    for most in ours[cost]:
        least = ours[ours[cost] <= most]["RMSE"].min()
        worst = max(worst, least / frame[frame[cost] <= most]["RMSE"].min())
    return worst


def table(file: Contents) -> list[Row]:
    """For each stream: the least error of every method, its cost, and our place."""
    found = []
    for name, frame in medians(file.rows).groupby("stream", sort=False):
        row: Row = {"stream": name}
        for method in LINES:
            of = frame[frame["method"] == method]
            if len(of):
                best = of.loc[of["RMSE"].idxmin()]
                seconds = best["cpu_seconds"]
                row[method] = f"{best['RMSE']:.3g} ({seconds:.3g} s, {best['M']:.0f})"
        for cost, title in COSTS.items():
            edge = on_frontier(frame, cost)
            share = edge["method"].isin(OF_OURS).sum()
            row[f"ours on it, {title.split()[0]}"] = f"{share} of {len(edge)}"
            row[f"farthest off, {title.split()[0]}"] = f"{farthest(frame, cost):.2f}"
        found.append(row)
    return found


def draw(rows: list[Row], path: Path) -> None:
    """A column for each stream: error against time above, against bytes below."""
    frame = medians(rows)
    names = list(dict.fromkeys(frame["stream"]))
    columns = min(len(names), 3)
    lines = math.ceil(len(names) / columns)
    figure, axes = pyplot.subplots(
        2 * lines,
        columns,
        figsize=(4.2 * columns, 5.4 * lines),
        layout="constrained",
        squeeze=False,
    )
    for ax in axes.flat:
        ax.set_visible(False)
    for k, name in enumerate(names):
        of = frame[frame["stream"] == name]
        for j, (cost, title) in enumerate(COSTS.items()):
            ax = axes[2 * (k // columns) + j, k % columns]
            ax.set_visible(True)
            panel(ax, of, cost)
            ax.set(xlabel=title, ylabel="RMSE" if k % columns == 0 else "")
            if j == 0:
                ax.set_title(name, fontsize=11)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    save(figure, path)


def panel(ax: Any, frame: pd.DataFrame, cost: str) -> None:
    """All methods on one stream, sizes joined by a line, and the frontier."""
    for method, line in LINES.items():
        of = frame[frame["method"] == method].sort_values("M")
        style = {"color": line.color, "marker": line.marker, "ms": 5}
        width = 2.0 if method in OF_OURS else 1.0
        ax.plot(of[cost], of["RMSE"], lw=width, label=method, **style)
    edge = on_frontier(frame, cost)
    ax.step(edge[cost], edge["RMSE"], where="post", color="black", lw=0.6, zorder=0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.grid(alpha=0.25, lw=0.5)


def draw_sizes(rows: list[Row], path: Path) -> None:
    """Error of ours against inducing points, in units of the smallest, by stream."""
    figure, ax = pyplot.subplots(figsize=(7, 4))
    frame = medians(rows)
    for name, of in frame[frame["method"] == OURS].groupby("stream", sort=False):
        of = of.sort_values("M")
        ax.plot(of["M"], of["RMSE"] / of["RMSE"].min(), "o-", ms=4, label=name)
    ax.set(xscale="log", yscale="log")
    ax.set(xlabel="num_inducing", ylabel="RMSE / smallest of the stream")
    ax.set_xticks(INDUCING, [str(size) for size in INDUCING])
    ax.minorticks_off()
    ax.grid(color="0.9")
    ax.legend(fontsize=8)
    save(figure, path)


def main(arguments: list[str]) -> None:
    """Run what is missing, and draw."""
    parser = bench_parser(__doc__, "data/frontier.json")
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=STREAMS)
    parser.add_argument("--methods", nargs="+", choices=LINES, default=[*LINES])
    parser.add_argument("--seeds", type=positive, default=3, help="(3)")
    parser.add_argument("--estimate", action="store_true", help="run nothing")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    chosen = parser.parse_args(arguments)
    if not chosen.draw:
        torch.set_num_threads(1)
        on = Setting(chosen.data_dir, Budget(), chosen.quick)
        made = header(budget=on.budget._asdict(), quick=chosen.quick)
        todo = jobs(on, chosen.streams, chosen.methods, chosen.seeds)
        rows = Table(chosen.out, runner.NAMES, made)
        before = rows.rows()
        missing = [k for k in todo if k not in before or not rows.stays(before[k])]
        minutes = {} if chosen.quick else estimate(missing, before.values())
        for name, each in minutes.items():
            print(f"{name:16} about {each:6.1f} CPU minutes")
        print(
            f"{len(missing)} of {len(todo)} rows, {sum(minutes.values()):.0f} minutes"
        )
        if chosen.estimate:
            return
        rows.run(todo, again=chosen.again, workers=chosen.workers)
    figures = chosen.out.parents[1] / "figures"
    draw(read(chosen.out).rows, figures / "frontier.png")
    draw_sizes(read(chosen.out).rows, figures / "sizes.png")

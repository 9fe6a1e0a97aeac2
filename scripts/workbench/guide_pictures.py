"""The pictures of the guides.

    python -m workbench.guide_pictures sizes      in scripts/; docs/data/sizes.json
    python -m workbench.guide_pictures draw       the pictures from what was written

``sizes`` runs a range that grows with several numbers of inducing points and sizes of
the memory. The other picture is that of ``benchmark.py bayesopt cost``.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from matplotlib import pyplot
from matplotlib.axes import Axes

from torch_ssgp import StreamingGP
from workbench import streams
from workbench.common import DOCS, new_parser
from workbench.pages import listed, median
from workbench.results import Row, Table, header, read
from workbench.running import follow, scores
from workbench.streams.made_up import NOISE

NAMES = ("inducing", "memory", "seed")
INDUCING, MEMORY = (5, 10, 20, 40, 80), (1, 2, 4)  # points; times as many
NUM_BATCHES, BATCH, STEPS, SEEDS = 6, 60, 30, 3


def size(inducing: int, memory: int, seed: int) -> Row:
    """One model over the stream: its errors, and the points it uses."""
    stream = streams.growing_range(batch=BATCH, num_batches=NUM_BATCHES, seed=seed)
    model = StreamingGP(
        ScaleKernel(MaternKernel()),
        num_inducing=inducing,
        memory_size=memory * inducing,
    ).double()
    update = partial(model.update, forget=1.0, num_steps=STEPS)
    ran = follow(update, stream.batches)
    remembered = scores(model, stream, from_memory=True)
    return {
        "used": ran.sizes[-1] if ran.sizes else 0,
        **scores(model, stream),
        "memory RMSE": remembered["RMSE"],
        "failure": ran.failure,
    }


def draw_sizes(rows: list[Row], path: Path) -> None:
    """Error, and points that are used, against the points allowed."""
    figure, (error, used) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for memory, color in zip(MEMORY, ("tab:red", "tab:blue", "tab:green"), strict=True):
        label = f"memory {memory} M" + (", the default" if memory == 2 else "")
        runs = {
            points: [
                row
                for row in rows
                if (row["inducing"], row["memory"]) == (points, memory)
            ]
            for points in INDUCING
        }
        for ax, column in ((error, "RMSE"), (used, "used")):
            values = [median([r[column] for r in runs[points]]) for points in INDUCING]
            ax.plot(INDUCING, values, "o-", color=color, label=label)
    error.axhline(NOISE, color="0.4", ls="--", lw=1, label="the noise")
    used.plot(INDUCING, INDUCING, color="0.4", ls="--", lw=1, label="all")
    error.set_ylabel("RMSE on test points")
    used.set_ylabel("points used")
    for ax in (error, used):
        ax.set_xscale("log")
        ax.set_ylim(bottom=0)
        ticks(ax, INDUCING)
        ax.set_xlabel("num_inducing: points allowed, M")
        ax.legend(fontsize=9)
    figure.suptitle(made_by(rows), fontsize=9, color="0.4")
    save(figure, path)


def draw_crossover(rows: list[Row], path: Path) -> None:
    """Seconds per evaluation, of the streaming and of the exact model."""
    figure, ax = pyplot.subplots(figsize=(6, 3.6))
    for method, color in (("streaming", "tab:blue"), ("exact refit", "tab:red")):
        kept = [r for r in rows if r["table"] == "cost" and r["method"] == method]
        sizes = [int(row["case"].split()[0]) for row in kept]
        seconds = [row["seconds"] for row in kept]
        ax.loglog(sizes, seconds, "o-", color=color, label=method)
    ticks(ax, sizes)
    ax.set_xlabel("evaluations so far")
    ax.set_ylabel("CPU seconds of the next")
    ax.legend(fontsize=9)
    ax.set_title(made_by(rows), fontsize=9, color="0.4")
    save(figure, path)


def made_by(rows: list[Row]) -> str:
    """The version of the library, or versions, that made the rows."""
    return f"torch_ssgp {listed(sorted({row['version'] for row in rows}))}"


def ticks(ax: Axes, values: list[int] | tuple[int, ...]) -> None:
    """Whole numbers on a logarithmic axis, and a light grid."""
    ax.set_xticks(values, [str(value) for value in values])
    ax.minorticks_off()
    ax.grid(color="0.9")


def save(figure: pyplot.Figure, path: Path) -> None:
    """A file that is easy to see on a screen."""
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, or draw."""
    parser = new_parser(__doc__)
    parser.add_argument("command", choices=["sizes", "draw"])
    parser.add_argument("--again", action="store_true", help="replace rows")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder (docs)")
    chosen = parser.parse_args(arguments)
    path = chosen.out / "data" / "sizes.json"
    if chosen.command == "sizes":
        torch.set_num_threads(1)
        made = header(batches=NUM_BATCHES, batch=BATCH, steps=STEPS)
        keys = product(INDUCING, MEMORY, range(SEEDS))
        jobs = {key: partial(size, *key) for key in keys}
        Table(path, NAMES, made).run(jobs, again=chosen.again)
    draw_sizes(read(path).rows, chosen.out / "figures" / "sizes.png")
    rows = read(chosen.out / "data" / "bayesopt.json").rows
    draw_crossover(rows, chosen.out / "figures" / "crossover.png")


if __name__ == "__main__":
    main()

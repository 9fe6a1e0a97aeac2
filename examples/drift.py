"""A function that changes while it is learned: the evidence decides what to forget.

The inputs stay in one range, but the function slowly turns into its negative.
``forget="auto"`` is compared with fixed rates. Run ``python examples/drift.py``: it
prints a table and saves out/drift.png.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

try:
    from matplotlib import pyplot
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(
        f"{__doc__}\n{error}. Install it: pip install -e '.[plot]'"
    ) from None

from torch_ssgp import StreamingGP

NOISE = 0.4

# `forget` is the power of the past's likelihood at each update: a datum that is k
# updates old counts forget**k times. With "auto", the default, the rate of a drift is
# learned by the evidence; a number has to be guessed, and the best one is known in
# hindsight only.
REMEMBERS, AUTO = "remembers all", "auto"
FORGET: dict[str, float | str] = {
    REMEMBERS: 1.0,
    AUTO: "auto",
    "0.9": 0.9,
    "0.6": 0.6,
    "0.3": 0.3,
}
COLORS = {REMEMBERS: "tab:red", AUTO: "tab:blue"}
BEST_COLOR = "tab:green"


def truth(x: Tensor, angle: float) -> Tensor:
    """The function at an angle: 0 at the start, pi for its negative."""
    return math.cos(angle) * torch.sin(1.5 * x) + math.sin(angle) * torch.cos(2 * x)


class Batch(NamedTuple):
    """New data, and the angle of the function they come from."""

    x: Tensor
    y: Tensor
    angle: float


def make_stream(num_batches: int, batch_size: int, turn: float) -> list[Batch]:
    """Batches on [0, 6] while the function moves from the angle 0 to ``turn``."""
    generator = torch.Generator().manual_seed(0)
    stream = []
    for k in range(num_batches):
        angle = turn * k / (num_batches - 1)
        x = 6 * torch.rand(batch_size, generator=generator)
        noise = NOISE * torch.randn(batch_size, generator=generator)
        stream.append(Batch(x, truth(x, angle) + noise, angle))
    return stream


class Track(NamedTuple):
    """One model along the stream: a value for every batch.

    Attributes:
        error: ``(num_batches,)``, RMSE against the function as of then.
        noise: ``(num_batches,)``, standard deviation of the noise it has learned.
        mean: ``(num_batches, 200)``, its fit.
    """

    error: Tensor
    noise: Tensor
    mean: Tensor


@torch.no_grad()
def follow(
    stream: list[Batch], forget: float | str, num_steps: int, grid: Tensor
) -> Track:
    """Learn the stream with a new model."""
    model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=30)
    values = []
    for x, y, angle in tqdm(stream, desc=f"forget={forget}", unit="batch"):
        with torch.enable_grad():
            model.update(x, y, forget=forget, num_steps=num_steps)
        mean = model(grid).mean
        error = (mean - truth(grid, angle)).square().mean().sqrt()
        values.append((error, model.likelihood.noise.sqrt().squeeze(), mean))
    return Track(*(torch.stack(value) for value in zip(*values, strict=True)))


def main(
    num_batches: int = 25,
    batch_size: int = 20,
    num_steps: int = 30,
    out: str | Path = "out",
) -> dict[str, dict[str, Track]]:
    """Learn a stream that drifts and one that does not; the tracks of all models.

    Args:
        num_batches: Batches of each stream.
        batch_size: Data in each.
        num_steps: Budget of the inner loop of each update.
        out: Folder for the figure.
    """
    grid = torch.linspace(0, 6, 200)
    drifting = make_stream(num_batches, batch_size, turn=math.pi)
    still = make_stream(num_batches, batch_size, turn=0.0)
    tracks = {
        name: {
            label: follow(stream, forget, num_steps, grid)
            for label, forget in FORGET.items()
        }
        for name, stream in (("drift", drifting), ("no drift", still))
    }
    print_table(tracks)
    path = Path(out) / "drift.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    best = best_fixed(tracks["drift"])
    shown = {label: tracks["drift"][label] for label in (REMEMBERS, AUTO, best)}
    draw(drifting, shown, grid, path)
    print(f"figure: {path}")
    return tracks


def best_fixed(tracks: dict[str, Track]) -> str:
    """The fixed power that did best, in hindsight."""
    fixed = [label for label in FORGET if label not in (REMEMBERS, AUTO)]
    return min(fixed, key=lambda label: float(tracks[label].error.mean()))


def print_table(tracks: dict[str, dict[str, Track]]) -> None:
    """Errors and noises of all models, every few batches; then without drift."""
    num_batches = len(tracks["drift"][AUTO].error)
    print(
        f"RMSE against the function as of now (noise learned; the true one is {NOISE})"
    )
    print(f"{'batch':>14}" + "".join(f"{label:>20}" for label in FORGET))
    for k in range(num_batches - 1, -1, -max(1, num_batches // 6))[::-1]:
        print_row(str(k + 1), tracks["drift"], slice(k, k + 1))
    second_half = slice(num_batches // 2, None)
    print("averages of the second half:")
    print_row("drift", tracks["drift"], second_half)
    # The price of a fixed power: what is forgotten would still be true.
    print_row("no drift", tracks["no drift"], second_half)
    print(f"best fixed forget in hindsight, with drift: {best_fixed(tracks['drift'])}")


def print_row(title: str, tracks: dict[str, Track], batches: slice) -> None:
    """One line, averaged over batches."""
    print(f"{title:>14}", end="")
    for track in tracks.values():
        error, noise = track.error[batches].mean(), track.noise[batches].mean()
        print(f"{error:12.3f} ({noise:.3f})", end="")
    print()


def draw(
    stream: list[Batch], tracks: dict[str, Track], grid: Tensor, path: Path
) -> None:
    """Three moments of the stream above, the errors along it below."""
    figure, panels = pyplot.subplot_mosaic(
        [["0", "1", "2"], ["error"] * 3], figsize=(10, 6.5)
    )
    last = len(stream) - 1
    error = panels["error"]
    for panel, k in enumerate((last // 6, last // 2, last)):
        ax = panels[str(panel)]
        x, y, angle = stream[k]
        ax.plot(x, y, "o", color="0.6", ms=4, label="new data")
        ax.plot(grid, truth(grid, angle), "k--", lw=1.5, label="function now")
        for label, track in tracks.items():
            text = f"forget={FORGET[label]!r}"
            text += "" if label in COLORS else " (best fixed)"
            color = COLORS.get(label, BEST_COLOR)
            ax.plot(grid, track.mean[k], color=color, label=text)
        ax.set_title(f"batch {k + 1}")
        ax.set_ylim(-2.2, 2.2)
        ax.set_xlabel("x")
        error.axvline(k + 1, color="0.85", lw=1)
    panels["0"].set_ylabel("y")
    handles, labels = panels["0"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=5, fontsize=9)
    batches = torch.arange(1, len(stream) + 1)
    for label, track in tracks.items():
        error.plot(batches, track.error, color=COLORS.get(label, BEST_COLOR))
    error.set_xlim(1, len(stream) + 0.5)
    error.set_ylim(bottom=0)
    error.set_xlabel("batch")
    error.set_ylabel("RMSE against the function now")
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--num-steps",
        type=int,
        default=10,
        help="limit on gradient steps per update (%(default)s)",
    )
    parser.add_argument(
        "--out", default="out", help="folder for the figure (%(default)s)"
    )
    main(**vars(parser.parse_args()))

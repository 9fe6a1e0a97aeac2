"""Three sites with separate streams, joined every hour.

Each site sees a part of the inputs and learns as its data arrive. Every hour, the
models of all sites are merged into one, and each site continues from a branch of it.
A branch keeps what it was given apart from what it adds, so nothing is counted twice.
Run ``python examples/merge.py``: it prints a table and saves out/merge.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

try:
    from matplotlib import pyplot
except ImportError as error:
    raise SystemExit(
        f"{__doc__}\n{error}. Install it: pip install -e '.[plot]'"
    ) from None

from torch_ssgp import StreamingGP, branch, merge

NOISE = 0.3
RANGES = {"north": (0.0, 4.5), "middle": (3.5, 8.0), "south": (7.0, 11.5)}
COLORS = {"north": "tab:blue", "middle": "tab:orange", "south": "tab:green"}
GRID = torch.linspace(-0.5, 12, 300)


def truth(x: Tensor) -> Tensor:
    """What all sites measure."""
    return torch.sin(1.5 * x) + 0.3 * x


class Hour(NamedTuple):
    """What an hour ends with.

    Attributes:
        sites: The model of every site, before they are joined.
        data: What each of them saw in this hour, ``(x, y)``.
        joined: The model that knows what all of them saw.
    """

    sites: dict[str, StreamingGP]
    data: dict[str, tuple[Tensor, Tensor]]
    joined: StreamingGP


def measure(site: str, num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """New data of a site."""
    low, high = RANGES[site]
    x = low + (high - low) * torch.rand(num, generator=generator)
    return x, truth(x) + NOISE * torch.randn(num, generator=generator)


def error_of(model: StreamingGP) -> float:
    """RMSE against the function, over all places that any site sees."""
    x = torch.linspace(0, 11.5, 200)
    return (model(x).mean - truth(x)).square().mean().sqrt().item()


def follow(num_hours: int, num_batches: int, batch_size: int, steps: int) -> list[Hour]:
    """Streams of three sites, joined every hour."""
    generator, hours = torch.Generator().manual_seed(0), []
    base = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=30)
    for _ in range(num_hours):
        # Copies to send to the sites, as pickles or files.
        sites = {name: branch(base) for name in RANGES}
        data = {}
        for name, model in sites.items():
            batches = [measure(name, batch_size, generator) for _ in range(num_batches)]
            for x, y in batches:
                model.update(x, y, num_steps=steps)
            data[name] = (
                torch.cat([x for x, _ in batches]),
                torch.cat([y for _, y in batches]),
            )
        # Hyperparameters are learned once on what all of them saw.
        joined = merge(
            list(sites.values()), base=base, learn_hyperparameters=True, num_steps=steps
        )
        hours.append(Hour(sites, data, joined))
        base = joined
    return hours


def draw(hours: list[Hour], path: Path) -> None:
    """The sites before they were joined for the first time, and what they became."""
    figure, axes = pyplot.subplots(
        3, 1, figsize=(9, 9), sharex=True, sharey=True, layout="constrained"
    )
    first, last = hours[0], hours[-1]
    for name, model in first.sites.items():
        axes[0].plot(*first.data[name], ".", color=COLORS[name], alpha=0.4, ms=4)
        _posterior(axes[0], model, COLORS[name], name)
    axes[0].set_title("Hour 1: each site alone")
    for axis, hour in ((axes[1], first), (axes[2], last)):
        for name, (x, y) in hour.data.items():
            axis.plot(x, y, ".", color=COLORS[name], alpha=0.4, ms=4)
        _posterior(axis, hour.joined, "black", "joined")
        z = hour.joined.summary.inducing_points.squeeze(-1)
        axis.plot(z, torch.full_like(z, -2.2), "k|", label="inducing points")
    num_data = [int(hour.joined.memory.num_data) for hour in (first, last)]
    axes[1].set_title(f"Hour 1: joined, {num_data[0]} data")
    axes[2].set_title(f"Hour {len(hours)}: joined, {num_data[1]} data; dots: this hour")
    for axis in axes:
        axis.plot(GRID, truth(GRID), "k:", lw=1, label="truth")
        axis.set_ylim(-2.5, 6)
        axis.legend(loc="upper left", ncols=5, fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@torch.no_grad()
def _posterior(axis: pyplot.Axes, model: StreamingGP, color: str, label: str) -> None:
    posterior = model(GRID)
    low, high = posterior.confidence_region()
    axis.plot(GRID, posterior.mean, color=color, label=label)
    axis.fill_between(GRID, low, high, color=color, alpha=0.15, lw=0)


def main(
    num_hours: int = 4,
    num_batches: int = 4,
    batch_size: int = 20,
    num_steps: int = 60,
    out: Path = Path("out"),
) -> list[Hour]:
    """Run the streams, print errors, save the picture."""
    hours = follow(num_hours, num_batches, batch_size, num_steps)
    print("RMSE over all places, by hour")
    print(f"{'hour':>4} {'data':>5} " + "".join(f"{n:>8}" for n in (*RANGES, "joined")))
    for k, hour in enumerate(hours, start=1):
        errors = [error_of(model) for model in (*hour.sites.values(), hour.joined)]
        num_data = int(hour.joined.memory.num_data)
        print(f"{k:>4} {num_data:>5} " + "".join(f"{error:8.3f}" for error in errors))
    out.mkdir(parents=True, exist_ok=True)
    draw(hours, out / "merge.png")
    return hours


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()

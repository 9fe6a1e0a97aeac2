"""Classify the banana data as they arrive from left to right.

Every batch is seen once. Run ``python -m examples.classification``: prints the error
after every batch, saves out/classification.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from scripts.streams import banana
from torch_ssgp import StreamingGP
from torch_ssgp.plotting import require_pyplot

COLOURS = ("tab:blue", "tab:orange")


def main(
    num_batches: int = 10,
    num_inducing: int = 30,
    num_steps: int = 100,
    order: str = "left_to_right",
    out: str | Path = "out",
) -> list[dict[str, float]]:
    """Learn the stream; the rows of the printed table.

    Args:
        num_batches: Batches that the 400 training points arrive in.
        num_inducing: Largest number of inducing points.
        num_steps: Budget of the inner loop of each update.
        order: ``"left_to_right"``, ``"right_to_left"`` or ``"random"``.
        out: Folder for the figure.
    """
    stream = banana(order, batches=num_batches)
    model = StreamingGP(
        ScaleKernel(RBFKernel()), BernoulliLikelihood(), num_inducing=num_inducing
    ).double()

    shown = sorted({k * (num_batches - 1) // 5 for k in range(6)})
    figure, panels = require_pyplot().subplots(
        2, (len(shown) + 1) // 2, figsize=(11, 7), sharex=True, sharey=True
    )
    panels = dict(zip(shown, panels.flatten(), strict=False))
    rows: list[dict[str, float]] = []
    print("batch   data    error    bound   M   steps")
    for k, (x, y) in enumerate(stream.batches):
        result = model.update(x, y, num_steps=num_steps)
        wrong = (probability(model, stream.x_test) > 0.5) != stream.y_test.bool()
        rows.append(
            {
                "batch": k + 1,
                "data": int(model.summary.num_data),
                "error": wrong.double().mean().item(),
                "bound": result.bound.item(),
                "M": result.num_inducing,
                "steps": result.num_steps,
            }
        )
        print(
            "{batch:5d} {data:6d} {error:8.3f} {bound:8.1f} {M:3d} {steps:7d}".format(
                **rows[-1]
            )
        )
        if k in panels:
            draw(panels[k], model, stream.batches[: k + 1])
            panels[k].set_title(f"batch {k + 1}: error {rows[-1]['error']:.3f}")
    file = Path(out) / "classification.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    require_pyplot().close(figure)
    print(f"Saved {file}")
    return rows


@torch.no_grad()
def probability(model: StreamingGP, x: Tensor) -> Tensor:
    """Probability of label 1 at ``x`` ``(n, 2)``, in parts that fit in memory."""
    return torch.cat([model.predict(part).probs for part in x.split(1000)])


def draw(ax: Any, model: StreamingGP, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Decision boundary, past data in grey, new data in colour, inducing points."""
    ticks = torch.linspace(-3.2, 3.2, 60, dtype=torch.float64)
    grid = torch.cartesian_prod(ticks, ticks)
    levels = probability(model, grid).view(60, 60).mT
    ax.contourf(
        ticks, ticks, levels, [0, 0.25, 0.5, 0.75, 1], cmap="coolwarm", alpha=0.25
    )
    ax.contour(ticks, ticks, levels, [0.5], colors="black", linewidths=1.5)
    for x, _ in batches[:-1]:
        ax.scatter(*x.mT, s=8, color="0.65", linewidths=0)
    x, y = batches[-1]
    for label, colour in enumerate(COLOURS):
        ax.scatter(*x[y == label].mT, s=14, color=colour, label=f"new, label {label}")
    z = model.summary.inducing_points
    ax.scatter(
        *z.mT,
        s=40,
        marker="o",
        facecolors="none",
        edgecolors="black",
        label="inducing points",
    )
    if len(batches) == 1:
        ax.legend(loc="upper right", fontsize=7)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--order", default="left_to_right")
    parser.add_argument("--out", default="out")
    arguments = parser.parse_args()
    main(order=arguments.order, out=arguments.out)

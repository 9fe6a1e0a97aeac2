"""Classify two crescents that arrive from left to right.

The model sees every batch once. Run ``python examples/classification.py``: it prints
the error after every batch and saves out/classification.png. For the banana data of the
paper, run ``python scripts/reproduce.py banana``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

try:
    from matplotlib import pyplot
except ImportError as error:
    raise SystemExit(
        f"{__doc__}\n{error}. Install it: pip install -e '.[plot]'"
    ) from None

from torch_ssgp import StreamingGP

COLOURS = ("tab:blue", "tab:orange")
ORDERS = ("left_to_right", "right_to_left", "random")


def crescents(num: int, seed: int, spread: float = 0.3) -> tuple[Tensor, Tensor]:
    """Noisy points ``(num, 2)`` of two interlocking half circles, labels 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (num,), generator=generator)
    angle = torch.pi * torch.rand(num, generator=generator, dtype=torch.float64)
    x = torch.stack([angle.cos(), angle.sin()], -1)
    # The second one hangs upside down, half a width to the right.
    x = torch.where(y.bool().unsqueeze(-1), torch.tensor([1.0, 0.4]) - x, x)
    return x + spread * torch.randn(x.shape, generator=generator, dtype=x.dtype), y


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
    x, y = crescents(400, seed=0)
    x_test, y_test = crescents(5000, seed=1)
    if order != "random":
        index = x[:, 0].argsort(descending=order == "right_to_left")
        x, y = x[index], y[index]
    batches = list(zip(x.chunk(num_batches), y.chunk(num_batches), strict=True))
    model = StreamingGP(
        ScaleKernel(RBFKernel()), BernoulliLikelihood(), num_inducing=num_inducing
    ).double()

    shown = sorted({k * (num_batches - 1) // 5 for k in range(6)})
    figure, axes = pyplot.subplots(
        2, (len(shown) + 1) // 2, figsize=(11, 7), sharex=True, sharey=True
    )
    panels = dict(zip(shown, axes.flatten(), strict=False))
    rows: list[dict[str, float]] = []
    print("batch   data    error    bound   M   steps")
    for k, (x_new, y_new) in enumerate(batches):
        result = model.update(x_new, y_new, num_steps=num_steps)
        wrong = (probability(model, x_test) > 0.5) != y_test.bool()
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
            draw(panels[k], model, batches[: k + 1])
            panels[k].set_title(f"batch {k + 1}: error {rows[-1]['error']:.3f}")
    path = Path(out) / "classification.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"figure: {path}")
    return rows


@torch.no_grad()
def probability(model: StreamingGP, x: Tensor) -> Tensor:
    """Probability of label 1 at ``x`` ``(n, 2)``, in parts that fit in memory."""
    return torch.cat([model.predict(part).probs for part in x.split(1000)])


def draw(ax: Any, model: StreamingGP, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Decision boundary, past data in grey, new data in colour, inducing points."""
    across, up = (
        torch.linspace(low, high, 60, dtype=torch.float64)
        for low, high in ((-2.0, 3.0), (-1.6, 2.0))
    )
    grid = torch.cartesian_prod(across, up)
    levels = probability(model, grid).view(60, 60).mT
    ax.contourf(
        across, up, levels, [0, 0.25, 0.5, 0.75, 1], cmap="coolwarm", alpha=0.25
    )
    ax.contour(across, up, levels, [0.5], colors="black", linewidths=1.5)
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--order",
        choices=ORDERS,
        default=ORDERS[0],
        help="order of the points (%(default)s)",
    )
    parser.add_argument(
        "--out", default="out", help="folder for the figure (%(default)s)"
    )
    main(**vars(parser.parse_args()))

"""Online regression on a series that changes its character as it arrives.

Batches arrive from left to right, and the model sees each of them once. Run
``python examples/regression.py``: it prints a table and saves out/regression.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

try:
    from matplotlib import pyplot
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(
        f"{__doc__}\n{error}. Install it: pip install -e '.[plot]'"
    ) from None

from torch_ssgp import StreamingGP
from torch_ssgp.plotting import plot_stream


def function(x: Tensor) -> Tensor:
    """Slow on the left, fast in the middle, a level that drops on the right."""
    middle = torch.sigmoid(4 * (x - 4)) * torch.sigmoid(4 * (7.5 - x))
    drop = torch.sigmoid(6 * (x - 8.5))
    return torch.sin(0.9 * x) + 0.7 * middle * torch.sin(5 * x) - 1.5 * drop


def make_stream(num_batches: int, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Batches ``(x, y)`` that walk over [0, 10], with noise of 0.15."""
    generator = torch.Generator().manual_seed(0)
    stream = []
    for k in range(num_batches):
        x = (k + torch.rand(batch_size, 1, generator=generator)) * 10 / num_batches
        noise = 0.15 * torch.randn(batch_size, generator=generator)
        stream.append((x, function(x[:, 0]) + noise))
    return stream


def main(
    num_batches: int = 6,
    batch_size: int = 100,
    num_steps: int = 100,
    out: str | Path = "out",
) -> list[dict[str, float]]:
    """Learn the stream; the rows of the printed table.

    Args:
        num_batches: Batches of the stream.
        batch_size: Data in each.
        num_steps: Budget of the inner loop of each update.
        out: Folder for the figure.
    """
    stream = make_stream(num_batches, batch_size)
    grid = torch.linspace(0, 10, 500)
    generator = torch.Generator().manual_seed(1)
    y_test = function(grid) + 0.15 * torch.randn(500, generator=generator)

    model = StreamingGP(ScaleKernel(MaternKernel()), num_inducing=40)
    figure, panels = pyplot.subplots(
        (num_batches + 1) // 2,
        2,
        figsize=(10, 1 + num_batches),
        sharex=True,
        sharey=True,
    )
    panels = panels.flatten()
    rows: list[dict[str, float]] = []
    for k, (x, y) in enumerate(tqdm(stream, desc="stream", unit="batch")):
        result = model.update(x, y, num_steps=num_steps)
        seen = grid <= 10 * (k + 1) / num_batches
        prediction = model.predict(grid[seen])
        log_density = torch.distributions.Normal(
            prediction.mean, prediction.stddev
        ).log_prob(y_test[seen])
        rows.append(
            {
                "batch": k + 1,
                "RMSE": (prediction.mean - y_test[seen]).square().mean().sqrt().item(),
                "MLL": log_density.mean().item(),
                "bound": result.bound.item(),
                "M": result.num_inducing,
                "seconds": result.seconds,
            }
        )
        past = [torch.cat(parts) for parts in zip(*stream[:k], strict=True)]
        plot_stream(model, grid, x, y, *past, ax=panels[k])
        panels[k].set_ylim(-3, 3)
        panels[k].set_title(f"batch {k + 1}, {result.num_inducing} inducing points")
    print_table(rows)
    path = Path(out) / "regression.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"figure: {path}")
    return rows


def print_table(rows: list[dict[str, float]]) -> None:
    """One line per batch."""
    print(f"{'batch':>5} {'RMSE':>7} {'MLL':>7} {'bound':>9} {'M':>4} {'seconds':>8}")
    for row in rows:
        print(
            f"{row['batch']:5d} {row['RMSE']:7.4f} {row['MLL']:7.3f} "
            f"{row['bound']:9.1f} {row['M']:4d} {row['seconds']:8.2f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--num-steps",
        type=int,
        default=100,
        help="limit on gradient steps per update (%(default)s)",
    )
    parser.add_argument(
        "--out", default="out", help="folder for the figure (%(default)s)"
    )
    main(**vars(parser.parse_args()))

"""A plain PyTorch loop on a stream: robust regression with one GPyTorch class replaced.

Data arrive in batches from left to right, and each batch is used once. One target in
ten is an outlier. Model, likelihood, objective, optimiser and scheduler are the usual
ones of GPyTorch and PyTorch. Only the strategy is different, with one call of
``absorb`` between batches. Inducing points are added along the way, and the same
optimiser carries on.

Run ``python examples/training_loop.py``: it prints a table and saves
out/training_loop.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.variational import CholeskyVariationalDistribution
from torch import Tensor

try:
    from matplotlib import pyplot
except ImportError as error:
    raise SystemExit(
        f"{__doc__}\n{error}. Install it: pip install -e '.[plot]'"
    ) from None

from torch_ssgp.mlls import StreamingELBO
from torch_ssgp.variational import StreamingVariationalStrategy

GRID = torch.linspace(0, 6, 200)


class Model(gpytorch.models.ApproximateGP):
    """GPyTorch's textbook model; only the strategy is ours."""

    def __init__(self, z: Tensor) -> None:
        q = CholeskyVariationalDistribution(z.size(-2))
        super().__init__(StreamingVariationalStrategy(self, z, q))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Snapshot(NamedTuple):
    """What is drawn of the model after a batch."""

    num_seen: int
    z: Tensor
    mean: Tensor
    stddev: Tensor


def truth(x: Tensor) -> Tensor:
    """The function behind the data."""
    return torch.sin(2 * x) + 0.5 * torch.cos(5 * x) * torch.sigmoid(4 * x - 12)


def make_stream(num_data: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs from left to right, targets with a tenth of gross outliers."""
    x = 6 * torch.rand(num_data, generator=generator).sort().values
    noise = torch.randn(num_data, generator=generator)
    outlier = torch.rand(num_data, generator=generator) < 0.1
    return x, truth(x) + torch.where(outlier, 2.0, 0.1) * noise


def main(
    num_batches: int = 6,
    batch_size: int = 100,
    num_steps: int = 300,
    out: str | Path = "out",
) -> list[dict[str, float]]:
    """Learn the stream; the rows of the printed table.

    Args:
        num_batches: Batches of the stream.
        batch_size: Data in each.
        num_steps: Optimiser steps for each.
        out: Folder for the figure.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = make_stream(num_batches * batch_size, generator)

    model = Model(x[: batch_size : batch_size // 8].unsqueeze(-1))
    likelihood = gpytorch.likelihoods.StudentTLikelihood()
    mll = StreamingELBO(likelihood, model, num_data=batch_size)
    strategy = model.variational_strategy
    optimizer = torch.optim.Adam(
        [
            {"params": model.variational_parameters(), "lr": 0.05},
            {"params": [*model.hyperparameters(), *likelihood.parameters()]},
        ],
        lr=0.01,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, num_steps
    )

    rows: list[dict[str, float]] = []
    snapshots: list[Snapshot] = []
    print("batch   M   ELBO/point   log lik/point   KL prior   old data   RMSE", end="")
    print("   RMSE of batch 1")
    batches = zip(x.unsqueeze(-1).split(batch_size), y.split(batch_size), strict=True)
    for i, (x_new, y_new) in enumerate(batches):
        if i:
            # The past becomes a summary, and the new region gets inducing points, at
            # which q becomes its own prediction.
            z = torch.cat([strategy.inducing_points, x_new[:: batch_size // 5]])
            strategy.absorb(z, optimizer=optimizer)

        # Any training loop of GPyTorch, here with minibatches.
        model.train()
        for _ in range(num_steps):
            index = torch.randperm(batch_size, generator=generator)[: batch_size // 2]
            optimizer.zero_grad()
            loss = -mll(model(x_new[index]), y_new[index])
            loss.backward()
            optimizer.step()
            scheduler.step()

        model.eval()
        with torch.no_grad():
            terms = mll.terms(model(x_new), y_new)
            seen = x[: (i + 1) * batch_size]
            error = model(seen.unsqueeze(-1)).mean - truth(seen)
        row = {
            "batch": i + 1,
            "num_inducing": len(strategy.inducing_points),
            "elbo": terms.elbo.item() / batch_size,
            "log_likelihood": terms.expected_log_likelihood.item() / batch_size,
            "kl_prior": terms.kl_prior.item(),
            "old_data": terms.old_data.item(),
            "rmse": error.square().mean().sqrt().item(),
            "rmse_first": error[:batch_size].square().mean().sqrt().item(),
        }
        rows.append(row)
        print(
            "{batch:5d} {num_inducing:3d} {elbo:12.3f} {log_likelihood:15.3f} "
            "{kl_prior:10.2f} {old_data:10.2f} {rmse:6.3f} {rmse_first:17.3f}".format(
                **row
            )
        )
        snapshots.append(snapshot(model, len(seen)))
    draw(x, y, batch_size, snapshots, Path(out))
    return rows


def snapshot(model: Model, num_seen: int) -> Snapshot:
    """The model as it is now."""
    with torch.no_grad():
        f = model(GRID.unsqueeze(-1))
        z = model.variational_strategy.inducing_points.clone()
        return Snapshot(num_seen, z, f.mean, f.stddev)


def draw(
    x: Tensor, y: Tensor, batch_size: int, snapshots: list[Snapshot], out: Path
) -> None:
    """One panel for each batch, past data in grey."""
    num_rows = (len(snapshots) + 2) // 3
    figure, axes = pyplot.subplots(
        num_rows,
        3,
        figsize=(11, 2.8 * num_rows),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for i, axis in enumerate(axes.flat):
        if i >= len(snapshots):
            axis.set_visible(False)
            continue
        num_seen, z, mean, stddev = snapshots[i]
        past = slice(0, num_seen - batch_size)
        new = slice(num_seen - batch_size, num_seen)
        axis.plot(x[past], y[past], ".", color="0.8", ms=4, label="past data")
        axis.plot(x[new], y[new], ".", color="tab:orange", ms=4, label="new batch")
        axis.plot(GRID, truth(GRID), "--", color="black", lw=1, label="truth")
        axis.plot(GRID, mean, color="tab:blue", label="posterior")
        lower, upper = mean - 2 * stddev, mean + 2 * stddev
        axis.fill_between(GRID, lower, upper, color="tab:blue", alpha=0.2, lw=0)
        axis.plot(
            z,
            torch.full((len(z),), -2.9),
            "|",
            color="tab:red",
            ms=8,
            label="inducing points",
        )
        axis.set_title(f"after batch {i + 1}", fontsize=10)
        axis.set_ylim(-3.1, 3.1)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    out.mkdir(parents=True, exist_ok=True)
    path = out / "training_loop.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"figure: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--num-steps",
        type=int,
        default=300,
        help="optimiser steps per batch (%(default)s)",
    )
    parser.add_argument(
        "--out", default="out", help="folder for the figure (%(default)s)"
    )
    main(**vars(parser.parse_args()))

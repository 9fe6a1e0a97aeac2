"""Where to measure next: a map of terrain from a few well-chosen heights.

Each round chooses the places that would lower the uncertainty of the whole map most
(qNegIntegratedPosteriorVariance, with fantasies). It measures there and updates the
model with these heights alone. Run ``python examples/active_learning.py``: it prints a
table and saves out/active_learning.png.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

try:
    from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
    from botorch.models.utils.gpytorch_modules import (
        get_covar_module_with_dim_scaled_prior,
    )
    from botorch.optim import optimize_acqf
    from botorch.utils.sampling import draw_sobol_samples
    from matplotlib import cbook, pyplot
    from tqdm import trange

    from torch_ssgp.surrogates import SingleTaskStreamingGP
except ImportError as error:
    raise SystemExit(
        f"{__doc__}\n{error}. Install it: pip install -e '.[botorch,plot]'"
    ) from None

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def terrain() -> Tensor:
    """Heights of the Jacksboro fault in metres, 200 x 200, with matplotlib's data."""
    name = "jacksboro_fault_dem.npz"
    with np.load(cbook.get_sample_data(name, asfileobj=False)) as dem:
        return torch.from_numpy(dem["elevation"][70:270, 100:300].astype(np.float64))


def measure(heights: Tensor, X: Tensor) -> Tensor:
    """Heights at ``X`` in the unit square, ``(..., 1)``: that of the nearest cell."""
    index = (X * (heights.size(0) - 1)).round().long()
    return heights[index[..., 0], index[..., 1]].unsqueeze(-1)


def places(size: int, every: int) -> Tensor:
    """A grid over the map, ``(n, 2)``."""
    side = torch.arange(0, size, every, dtype=torch.float64) / (size - 1)
    return torch.cartesian_prod(side, side)


def choose(model: SingleTaskStreamingGP, q: int) -> Tensor:
    """The ``q`` most informative places."""
    everywhere = draw_sobol_samples(BOUNDS, n=1, q=256).squeeze(0)
    acquisition = qNegIntegratedPosteriorVariance(model, mc_points=everywhere)
    with warnings.catch_warnings():
        # BoTorch restarts a line search that ends early.
        warnings.filterwarnings("ignore", "Optimization failed", RuntimeWarning)
        return optimize_acqf(
            acquisition,
            BOUNDS,
            q=q,
            num_restarts=2,
            raw_samples=16,
            options={"maxiter": 15},
        )[0]


def main(
    rounds: int = 30,
    q: int = 4,
    num_initial: int = 30,
    num_inducing: int = 120,
    num_steps: int = 40,
    out: str | Path = "out",
) -> list[dict[str, float]]:
    """Learn the map, and compare with measuring at random.

    Args:
        rounds: Rounds of measurements.
        q: Places measured in each.
        num_initial: Places of a Sobol design to start from.
        num_inducing: Inducing points of the model.
        num_steps: Budget of the inner loop of each update.
        out: Folder for the figure.

    Returns:
        The rows of the printed table.
    """
    torch.manual_seed(0)
    heights = terrain()
    test_X = places(heights.size(0), every=4)
    test_Y = measure(heights, test_X)
    X = draw_sobol_samples(BOUNDS, n=num_initial, q=1, seed=0).squeeze(-2)
    Y = measure(heights, X)

    def new_model() -> SingleTaskStreamingGP:
        model = SingleTaskStreamingGP(
            X,
            Y,
            num_inducing=num_inducing,
            covar_module=get_covar_module_with_dim_scaled_prior(
                ard_num_dims=2, use_rbf_kernel=False
            ),
        )
        model.fit()
        return model

    models = {"active": new_model(), "random": new_model()}
    measured = {name: [X] for name in models}
    rows: list[dict[str, float]] = []
    for step in trange(rounds + 1, desc="rounds"):
        if step:
            for name, model in models.items():
                new_X = choose(model, q) if name == "active" else torch.rand(q, 2)
                new_X = new_X.double()
                model.update(
                    new_X,
                    measure(heights, new_X),
                    restandardize=True,
                    num_steps=num_steps,
                )
                measured[name].append(new_X)
        rows.append(
            {"measured": num_initial + q * step} | errors(models, test_X, test_Y)
        )
    print(f"{'measured':>8} {'active':>8} {'random':>8}   RMSE in metres")
    for row in rows[:: max(1, rounds // 10)]:
        print(f"{row['measured']:8d} {row['active']:8.2f} {row['random']:8.2f}")
    path = Path(out) / "active_learning.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    plot(heights, models["active"], torch.cat(measured["active"]), rows, path)
    print(f"figure: {path}")
    return rows


def errors(
    models: dict[str, SingleTaskStreamingGP], X: Tensor, Y: Tensor
) -> dict[str, float]:
    """Root mean squared error of each model."""
    return {
        name: (model.posterior(X).mean - Y).square().mean().sqrt().item()
        for name, model in models.items()
    }


def plot(
    heights: Tensor,
    model: SingleTaskStreamingGP,
    X: Tensor,
    rows: list[dict[str, float]],
    path: Path,
) -> None:
    """The terrain, the learned map, its uncertainty and the error over time."""
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 8))
    grid = places(heights.size(0), every=4)
    side = round(grid.size(0) ** 0.5)
    posterior = model.posterior(grid)
    mean = posterior.mean.view(side, side)
    deviation = posterior.variance.sqrt().view(side, side)
    low, high = heights.min(), heights.max()
    panels = [
        (axes[0, 0], heights, "terrain", "terrain", low, high),
        (axes[0, 1], mean, f"map from {X.size(0)} heights", "terrain", low, high),
        (axes[1, 0], deviation, "standard deviation", "magma", 0.0, None),
    ]
    for ax, values, title, cmap, smallest, largest in panels:
        image = ax.imshow(
            values.detach().numpy(),
            extent=(0, 1, 0, 1),
            origin="lower",
            cmap=cmap,
            vmin=smallest,
            vmax=largest,
        )
        figure.colorbar(image, ax=ax, label="m", shrink=0.85)
        ax.set_title(title)
        ax.set_xticks([])
        ax.set_yticks([])
    for ax in (axes[0, 1], axes[1, 0]):
        ax.plot(X[:, 1], X[:, 0], ".", color="k", markersize=3)
    axes[1, 0].lines[0].set_color("w")
    measured = [row["measured"] for row in rows]
    for name in ("active", "random"):
        axes[1, 1].plot(measured, [row[name] for row in rows], label=name)
    axes[1, 1].set_xlabel("heights measured")
    axes[1, 1].set_ylabel("RMSE of the map [m]")
    axes[1, 1].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="rounds of measurements (%(default)s)"
    )
    parser.add_argument(
        "--num-inducing",
        type=int,
        default=120,
        help="limit on inducing points (%(default)s)",
    )
    parser.add_argument(
        "--out", default="out", help="folder for the figure (%(default)s)"
    )
    main(**vars(parser.parse_args()))

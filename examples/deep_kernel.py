"""A deep kernel, learned from batches as they arrive.

The function has eight inputs but varies along few directions. A small network turns
the inputs into two features, and the kernel compares those. The same stream is also
learned without a network. GPyTorch's exact model, with the network, is fitted to all
data at once. Run ``python examples/deep_kernel.py``: it takes a minute, prints the
errors and saves out/deep_kernel.png.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor, nn

try:
    from matplotlib import pyplot
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(
        f"{__doc__}\n{error}. Install it: pip install -e '.[plot]'"
    ) from None

from torch_ssgp import StreamingGP
from torch_ssgp.exceptions import BudgetWarning

NUM_INPUTS, NUM_INDUCING, NOISE = 8, 100, 0.1
COLOURS = {"deep kernel": "tab:blue", "no network": "tab:orange"}


class DeepKernel(Kernel):
    """A kernel on features that a network computes from the inputs."""

    def __init__(self, network: nn.Module, base_kernel: Kernel) -> None:
        super().__init__()
        self.network, self.base_kernel = network, base_kernel

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        """The base kernel at the features."""
        features = self.network(x1), self.network(x2)
        return self.base_kernel.forward(*features, diag=diag, **params)


def deep_kernel(seed: int = 0) -> ScaleKernel:
    """Eight inputs, 32 units, two features; the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(NUM_INPUTS, 32), nn.Tanh(), nn.Linear(32, 2))
    return ScaleKernel(DeepKernel(network, RBFKernel()))


class ExactDeepGP(gpytorch.models.ExactGP):
    """The reference: all data at once, no inducing points."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y, GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = deep_kernel()

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Prior at ``x``."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def make_data(num: int, num_test: int = 500) -> tuple[Tensor, ...]:
    """Inputs and noisy targets, test inputs and the function there."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    w, x = draw(NUM_INPUTS, 3), draw(num + num_test, NUM_INPUTS)
    u = x @ (w / w.norm(dim=0))
    f = torch.sin(2 * u[:, 0] + u[:, 1]) + torch.tanh(u[:, 2] * u[:, 0])
    return x[:num], f[:num] + NOISE * draw(num), x[num:], f[num:]


def fit_exact(x: Tensor, y: Tensor, num_steps: int) -> ExactDeepGP:
    """Adam on all data."""
    model = ExactDeepGP(x, y).double()
    model.likelihood.noise = 0.1 * y.var()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with gpytorch.settings.max_cholesky_size(100_000):
        for _ in tqdm(range(num_steps), desc="exact", unit="step"):
            optimizer.zero_grad()
            loss = -mll(model(x), y)
            loss.backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def predicted(model: StreamingGP | ExactDeepGP, x: Tensor) -> Tensor:
    """The mean at ``x``, without iterative algebra."""
    with gpytorch.settings.max_cholesky_size(100_000):
        return model(x).mean


def rmse(a: Tensor, b: Tensor) -> float:
    """Root mean squared difference."""
    return (a - b).square().mean().sqrt().item()


def main(
    num_batches: int = 5,
    batch_size: int = 200,
    num_steps: int = 100,
    exact_steps: int = 120,
    out: str | Path = "out",
) -> dict[str, list[float]]:
    """Learn the stream; the errors after every batch, by model.

    Args:
        num_batches: Batches of the stream.
        batch_size: Data in each.
        num_steps: Budget of the inner loop of each update.
        exact_steps: Steps of Adam for the exact model, which has one error.
        out: Folder for the figure.
    """
    x, y, x_test, f_test = make_data(num_batches * batch_size)
    kernels = {
        "deep kernel": deep_kernel(),
        "no network": ScaleKernel(RBFKernel(ard_num_dims=NUM_INPUTS)),
    }
    models = {
        name: StreamingGP(kernel, num_inducing=NUM_INDUCING).double()
        for name, kernel in kernels.items()
    }
    errors: dict[str, list[float]] = {name: [] for name in models}
    for name, model in models.items():
        batches = zip(x.split(batch_size), y.split(batch_size), strict=True)
        for part in tqdm(batches, desc=name, unit="batch", total=num_batches):
            with warnings.catch_warnings():
                # Without a network eight inputs are too many for the points allowed:
                # that is what the picture shows.
                warnings.simplefilter("ignore", BudgetWarning)
                model.update(*part, num_steps=num_steps)
            errors[name].append(rmse(predicted(model, x_test), f_test))
    exact = fit_exact(x, y, exact_steps)
    errors["exact, deep kernel"] = [rmse(predicted(exact, x_test), f_test)]
    print_table(errors, batch_size)
    path = Path(out) / "deep_kernel.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(path, errors, batch_size, models, x_test, f_test)
    print(f"figure: {path}")
    return errors


def print_table(errors: dict[str, list[float]], batch_size: int) -> None:
    """One line per batch, then the exact model."""
    print(f"RMSE   {'data':>6} {'deep kernel':>12} {'no network':>12}")
    streams = zip(errors["deep kernel"], errors["no network"], strict=True)
    for k, (deep, plain) in enumerate(streams, 1):
        print(f"{k * batch_size:13d} {deep:12.4f} {plain:12.4f}")
    exact = errors["exact, deep kernel"][0]
    print(f"{'exact':>13} {exact:12.4f}")
    print(f"stream / exact: {errors['deep kernel'][-1] / exact:.2f}")


@torch.no_grad()
def draw(
    path: Path,
    errors: dict[str, list[float]],
    batch_size: int,
    models: dict[str, StreamingGP],
    x: Tensor,
    f: Tensor,
) -> None:
    """Errors along the stream, predictions at its end, and what the network learned."""
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    along, scatter, features = panels
    for name, model in reversed(models.items()):  # ours on top
        seen = [batch_size * k for k in range(1, len(errors[name]) + 1)]
        look = {"color": COLOURS[name], "label": f"stream, {name}"}
        along.plot(seen, errors[name], "o-", **look)
        scatter.plot(f, predicted(model, x), ".", ms=4, alpha=0.7, **look)
    exact = errors["exact, deep kernel"][0]
    along.axhline(exact, color="black", ls="--", label="all data at once, exact")
    along.set(ylim=(0, None), xlabel="data seen", ylabel="RMSE")
    along.set_title("error at 500 test inputs", fontsize=10)
    along.legend(fontsize=8)
    ends = f.min().item(), f.max().item()
    scatter.plot(ends, ends, color="black", lw=1)
    scatter.set(xlabel="function", ylabel="prediction")
    scatter.set_title("after the last batch", fontsize=10)
    scatter.legend(fontsize=8)
    network = models["deep kernel"].covar_module.base_kernel.network
    dots = features.scatter(*network(x).mT, c=f, s=12, cmap="coolwarm")
    features.set(xlabel="first feature", ylabel="second feature")
    features.set_title("test inputs as the network sees them", fontsize=10)
    figure.colorbar(dots, ax=features, label="function")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--num-batches", type=int, default=5, help="batches of the stream (%(default)s)"
    )
    parser.add_argument(
        "--exact-steps",
        type=int,
        default=120,
        help="steps of Adam for the exact model (%(default)s)",
    )
    parser.add_argument(
        "--out", default="out", help="folder for the figure (%(default)s)"
    )
    main(**vars(parser.parse_args()))

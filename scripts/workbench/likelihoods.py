"""Tables on likelihoods that are not Gaussian.

    python scripts/likelihoods.py speed    # sites against uncollapsed Adam steps
    python scripts/likelihoods.py digits   # ten classes, one after the other
    python scripts/likelihoods.py robust   # counts, and regression with outliers

Every number is measured in the run that prints it. For the paper's table of the banana
data, run ``scripts/reproduce.py banana``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import ZeroMean
from gpytorch.mlls import VariationalELBO
from torch import Tensor

from torch_ssgp import StreamingGP
from workbench.common import new_parser
from workbench.running import Batches, wrong_labels
from workbench.streams import banana
from workbench.uncollapsed import SVGP

# ------------------------------------------------------------------ classification


def binary_model(num_inducing: int, memory_size: int | None = None) -> StreamingGP:
    """A model of labels 0 and 1 on one smooth function."""
    return StreamingGP(
        ScaleKernel(RBFKernel()),
        BernoulliLikelihood(),
        num_inducing=num_inducing,
        memory_size=memory_size,
    ).double()


def binary_errors(
    model: StreamingGP, batches: Batches, x_test: Tensor, y_test: Tensor
) -> list[float]:
    """Fraction of test labels that are wrong, after each batch."""
    errors = []
    for x, y in batches:
        model.update(x, y)
        errors.append(wrong_labels(model, x_test, y_test))
    return errors


def _kernel() -> ScaleKernel:
    kernel = ScaleKernel(RBFKernel())
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 0.7
    return kernel.double()


def svgp_elbo(
    x: Tensor, y: Tensor, z: Tensor, num_steps: int, lr: float
) -> tuple[float, float]:
    """Best ELBO of uncollapsed Adam steps, and their seconds."""
    prior = SimpleNamespace(
        mean_module=ZeroMean(),
        covar_module=_kernel(),
        likelihood=BernoulliLikelihood(),
    )
    model = SVGP(z.clone(), prior)
    mll = VariationalELBO(model.likelihood, model, num_data=len(y))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    best, start = -np.inf, time.perf_counter()
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        best = max(best, -loss.item() * len(y))
        optimizer.step()
    return best, time.perf_counter() - start


def sites_until(
    x: Tensor, y: Tensor, z: Tensor, target: float, optimizer: str = "adam"
) -> tuple[float, float, int]:
    """Bound, seconds and steps of the cheapest budget of steps that reaches a bound."""
    for num_steps in (5, 10, 15, 20, 30, 40, 60, 80, 120, 200):
        model = StreamingGP(_kernel(), BernoulliLikelihood(), num_inducing=len(z))
        result = model.double().update(
            x, y, inducing_points=z, num_steps=num_steps, optimizer=optimizer, lr=0.1
        )
        if float(result.bound) >= target:
            break
    return float(result.bound), result.seconds, result.num_steps


def table_speed(num_inducing: int = 30) -> float:
    """Seconds to the ELBO of 500 uncollapsed Adam steps, banana in one batch."""
    stream = banana("random")
    x, y = stream.x_train, stream.y_train
    z = x[:num_inducing]
    rates = (0.01, 0.03, 0.1)
    runs = [svgp_elbo(x, y, z, 500, lr) for lr in rates]
    elbo, seconds = max(runs)
    print(f"banana in one batch, M = {num_inducing}, the same kernel to start from")
    for lr, (value, spent) in zip(rates, runs, strict=True):
        print(f"500 uncollapsed Adam steps, lr {lr:4.2f} {value:10.2f} {spent:8.2f} s")
    ratio = np.inf
    for optimizer in ("adam", "lbfgs"):
        bound, spent, steps = sites_until(x, y, z, elbo, optimizer)
        print(
            f"{steps:3d} steps with sites, {optimizer:14s} {bound:10.2f} {spent:8.2f} s"
            f"   {spent / seconds:.2f} of the time"
        )
        ratio = min(ratio, spent / seconds) if bound >= elbo else ratio
    return ratio


# ------------------------------------------------------------------------- classes


def digits(num_train: int = 1000, seed: int = 0) -> tuple[Tensor, ...]:
    """scikit-learn's digits: training and test images and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.from_numpy(data.data / 16.0), torch.from_numpy(data.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    train, test = order[:num_train], order[num_train:]
    return x[train], y[train], x[test], y[test]


def digits_model(
    num_classes: int, num_inducing: int, memory_size: int | None = None
) -> StreamingGP:
    """One function per class, with one kernel for all."""
    return StreamingGP(
        ScaleKernel(RBFKernel()),
        SoftmaxLikelihood(num_classes=num_classes, mixing_weights=False),
        num_inducing=num_inducing,
        memory_size=memory_size,
        batch_shape=torch.Size([num_classes]),
    ).double()


def class_accuracies(model: StreamingGP, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Accuracy on all classes, and on the first."""
    with torch.no_grad():
        right = model(x).mean.argmax(0) == y
    return right.double().mean().item(), right[y == 0].double().mean().item()


def table_digits(num_inducing: int = 100, num_steps: int = 30) -> None:
    """Digits streamed class by class, beside the batch model."""
    x, y, x_test, y_test = digits()
    options = {"num_steps": num_steps, "learn_inducing_points": False}
    print(f"digits, all zeros, then all ones, ...; M = {num_inducing} per class")
    print("after class  accuracy  accuracy on zeros  seconds")
    model = digits_model(10, num_inducing)
    for label in range(10):
        result = model.update(x[y == label], y[y == label], **options)
        every, first = class_accuracies(model, x_test, y_test)
        row = f"{label:11d} {every:9.3f} {first:18.3f} {result.seconds:8.1f}"
        print(row, flush=True)
    model = digits_model(10, num_inducing)
    result = model.update(x, y, **options)
    every, first = class_accuracies(model, x_test, y_test)
    print(f"{'one batch':>11s} {every:9.3f} {first:18.3f} {result.seconds:8.1f}")


# ------------------------------------------------------------ counts and outliers


def held_out(model: StreamingGP, x: Tensor, y: Tensor) -> float:
    """Mean log predictive density of targets, by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(50)
    nodes, weights = torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
    with torch.no_grad():
        latent = model(x)
        f = latent.mean + latent.variance.sqrt() * nodes.unsqueeze(-1)
        log_prob = model.likelihood.forward(f).log_prob(y)
    return (log_prob + weights.log().unsqueeze(-1)).logsumexp(0).mean().item()


def wiggle(num: int, seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Sorted inputs in [0, 10], a smooth function of them, and the generator."""
    gen = torch.Generator().manual_seed(seed)
    x = 10 * torch.rand(num, 1, generator=gen, dtype=torch.float64).sort(0).values
    return x, torch.sin(x[:, 0]) + 0.5 * torch.cos(2.3 * x[:, 0]), gen


def counts(num: int = 600, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Counts with a rate that varies between about 1 and 16."""
    x, f, gen = wiggle(num, seed)
    return x, torch.poisson((1.5 + f).exp(), generator=gen)


def outliers(num: int = 600, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Regression in which one target in ten is grossly wrong."""
    x, f, gen = wiggle(num, seed)
    noise = torch.randn(2, num, generator=gen, dtype=torch.float64)
    gross = torch.rand(num, generator=gen) < 0.1
    y = 3 * f + 0.2 * noise[0]
    return x, torch.where(gross, y + 20 * noise[1], y)


def stream_and_batch(
    make: Callable[[], Likelihood],
    x: Tensor,
    y: Tensor,
    num_batches: int = 6,
    num_inducing: int = 30,
) -> tuple[float, float]:
    """Held-out density of every second point, streamed left to right and in batch."""
    results = []
    for batches in (num_batches, 1):
        model = StreamingGP(ScaleKernel(RBFKernel()), make(), num_inducing=num_inducing)
        model = model.double()
        for part in torch.arange(0, len(y), 2).chunk(batches):
            model.update(x[part], y[part], num_steps=100 if batches > 1 else 300)
        results.append(held_out(model, x[1::2], y[1::2]))
    return results[0], results[1]


def table_robust() -> None:
    """Held-out log densities of streams beside batch models."""
    print("held-out log density   stream    batch   difference")
    for name, make, data in (
        ("counts, Poisson", PoissonLikelihood, counts),
        ("outliers, StudentT", StudentTLikelihood, outliers),
        ("outliers, Gaussian", GaussianLikelihood, outliers),
    ):
        stream, batch = stream_and_batch(make, *data())
        difference = 100 * (stream - batch) / abs(batch)
        row = f"{name:20s} {stream:8.4f} {batch:8.4f} {difference:+10.2f} %"
        print(row, flush=True)


TABLES = {
    "speed": table_speed,
    "digits": table_digits,
    "robust": table_robust,
}


def main(arguments: list[str] | None = None) -> None:
    """Print the tables that were asked for."""
    parser = new_parser(__doc__)
    parser.add_argument("tables", nargs="*", metavar=f"{{{','.join(TABLES)}}}")
    names = parser.parse_args(arguments).tables or list(TABLES)
    if unknown := set(names) - set(TABLES):
        parser.error(f"no table {sorted(unknown)}; there are {list(TABLES)}")
    torch.set_num_threads(1)
    for name in names:
        start = time.perf_counter()
        TABLES[name]()
        print(f"({time.perf_counter() - start:.0f} s)\n")

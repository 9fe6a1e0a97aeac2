"""Models of labels and counts, and data of them, for experiments and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    Likelihood,
    SoftmaxLikelihood,
)
from torch import Tensor

from torch_ssgp import StreamingGP

Batches = Iterable[tuple[Tensor, Tensor]]

# ------------------------------------------------------------------ classification


def binary_model(num_inducing: int) -> StreamingGP:
    """A model of labels 0 and 1 on one smooth function."""
    likelihood = BernoulliLikelihood()
    return StreamingGP(
        ScaleKernel(RBFKernel()), likelihood, num_inducing=num_inducing
    ).double()


@torch.no_grad()
def wrong_labels(model: StreamingGP, x: Tensor, y: Tensor) -> float:
    """Share of labels 0 and 1 that the sign of the latent mean gets wrong."""
    mean = torch.cat([model(part).mean for part in x.split(1_000)])
    return (mean.gt(0) != y.gt(0.5)).double().mean().item()


def binary_errors(
    model: StreamingGP, batches: Batches, x_test: Tensor, y_test: Tensor
) -> list[float]:
    """Fraction of test labels that are wrong, after each batch."""
    errors = []
    for x, y in batches:
        model.update(x, y)
        errors.append(wrong_labels(model, x_test, y_test))
    return errors


# ------------------------------------------------------------------------- classes


def digits(num_train: int = 1000, seed: int = 0) -> tuple[Tensor, ...]:
    """scikit-learn's digits: training and test images and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.from_numpy(data.data / 16.0), torch.from_numpy(data.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    train, test = order[:num_train], order[num_train:]
    return x[train], y[train], x[test], y[test]


def digits_model(num_classes: int, num_inducing: int) -> StreamingGP:
    """One function per class, with one kernel for all."""
    return StreamingGP(
        ScaleKernel(RBFKernel()),
        SoftmaxLikelihood(num_classes=num_classes, mixing_weights=False),
        num_inducing=num_inducing,
        batch_shape=torch.Size([num_classes]),
    ).double()


def class_accuracies(model: StreamingGP, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Accuracy on all classes, and on the first."""
    with torch.no_grad():
        right = model(x).mean.argmax(0) == y
    return right.double().mean().item(), right[y == 0].double().mean().item()


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

"""Data and models that the tests of surrogates share."""

from copy import deepcopy

import torch
from botorch.models import SingleTaskGP
from botorch.posteriors import GPyTorchPosterior
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor

from torch_ssgp.surrogates import SingleTaskStreamingGP

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
TOLERANCE = 1e-8
# Outputs, batch shape, and whether the noise is known.
KINDS = [
    (m, batch, noisy) for m in (1, 2) for batch in ((), (2,)) for noisy in (False, True)
]


def outcomes(X: Tensor, m: int = 1) -> Tensor:
    """A smooth function with noise, ``(..., n, m)``; outputs of unlike scale."""
    clean = [(2 + 3 * i) * torch.sin((3 + i) * X).sum(-1) + 4 * i for i in range(m)]
    Y = torch.stack(clean, -1)
    return Y + 0.05 * torch.randn(Y.shape, dtype=X.dtype)


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(*shape, 2, dtype=dtype)


def data(
    n: int = 12,
    m: int = 1,
    batch: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    X = inputs(*batch, n, dtype=dtype)
    return X, outcomes(X, m)


def pair(
    n: int = 12,
    m: int = 1,
    batch: tuple[int, ...] = (),
    noisy: bool = False,
    num_inducing: int = 100,
    **transforms: object,
) -> tuple[SingleTaskGP, SingleTaskStreamingGP, Tensor | None]:
    """An exact and a streaming model with the same data and hyperparameters."""
    X, Y = data(n, m, batch)
    if "outcome_transform" in transforms:
        Y = (Y - Y.mean(-2, keepdim=True)) / Y.std(-2, keepdim=True)
    Yvar = 0.01 + 0.02 * torch.rand_like(Y) if noisy else None
    exact = SingleTaskGP(X, Y, Yvar, **deepcopy(transforms))
    ours = SingleTaskStreamingGP(X, Y, Yvar, num_inducing=num_inducing, **transforms)
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            if "lengthscale" in name:
                parameter.copy_(0.2 + 0.3 * torch.rand_like(parameter))
            elif "noise" in name:
                parameter.copy_(0.002 + 0.01 * torch.rand_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter))
    copy_hyperparameters(exact, ours)
    exact.eval()
    return exact, ours, Yvar


def copy_hyperparameters(
    source: SingleTaskGP | SingleTaskStreamingGP, target: SingleTaskStreamingGP
) -> None:
    if isinstance(source, SingleTaskStreamingGP):
        source = source.model
    parameters = {
        name: parameter
        for name, parameter in source.named_parameters()
        if not name.startswith("input_transform")
    }
    ours = dict(target.model.named_parameters())
    assert set(parameters) == set(ours)
    with torch.no_grad():
        for name, parameter in parameters.items():
            ours[name].copy_(parameter)


def assert_same_posterior(
    a: GPyTorchPosterior, b: GPyTorchPosterior, tolerance: float = TOLERANCE
) -> None:
    torch.testing.assert_close(a.mean, b.mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        a.distribution.covariance_matrix,
        b.distribution.covariance_matrix,
        rtol=tolerance,
        atol=tolerance,
    )


def sampler(num: int, seed: int = 0) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([num]), seed=seed)


def fitted(m: int = 1, **options: object) -> SingleTaskStreamingGP:
    X, Y = data(12, m)
    ours = SingleTaskStreamingGP(X, Y, num_inducing=10, **options)
    ours.fit(num_steps=20)
    ours.update(*data(2, m), num_steps=5)
    return ours

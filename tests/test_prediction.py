"""Predictions in the dtype of the model, computed in float64."""

from __future__ import annotations

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from linear_operator import to_linear_operator

from torch_ssgp import StreamingGP
from torch_ssgp.prediction import CastLinearOperator


def jittered(A):
    """``add_jitter`` of a tensor."""
    return lambda jitter: A + jitter * torch.eye(5)


SHOWN = {
    "itself": lambda A: A,
    "its diagonal": lambda A: A.diagonal(dim1=-1, dim2=-2),
    "rows": lambda A: A[..., 1:3, :],
    "an entry": lambda A: A[..., 2, 3],
    "a product": lambda A: A @ torch.arange(10.0).view(5, 2),
    "its transpose": lambda A: A.mT,
    "copies": lambda A: A.expand(3, *A.shape),
    "one more dimension": lambda A: A.unsqueeze(0),
    "with jitter": lambda A: getattr(A, "add_jitter", jittered(A))(0.1),
}


@pytest.mark.parametrize("what", SHOWN)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_cast_operator_shows_its_base_in_another_dtype(batch, what):
    root = torch.randn(*batch, 5, 5, dtype=torch.float64)
    dense = root @ root.mT + torch.eye(5, dtype=torch.float64)
    cast = CastLinearOperator(to_linear_operator(dense), dtype=torch.float32)
    assert cast.dtype == torch.float32 and cast.shape == dense.shape
    shown = SHOWN[what](cast)
    shown = shown if isinstance(shown, torch.Tensor) else shown.to_dense()
    torch.testing.assert_close(shown, SHOWN[what](dense.float()))
    mean = torch.zeros(*batch, 5)
    samples = MultivariateNormal(mean, cast).rsample(torch.Size([7]))
    assert samples.dtype == torch.float32 and samples.shape == (7, *batch, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_predicting_many_points_forms_no_square_matrix(dtype):
    x = torch.linspace(0, 5, 50, dtype=dtype).unsqueeze(-1)
    model = StreamingGP(ScaleKernel(RBFKernel())).to(dtype)
    model.update(x, torch.sin(x[:, 0]), num_steps=1)
    # A dense covariance of 100,000 points would need 80 GB.
    prediction = model.predict(torch.linspace(0, 5, 100_000, dtype=dtype))
    assert prediction.variance.shape == prediction.mean.shape == (100_000,)
    assert prediction.variance.dtype == dtype


def test_variances_stay_between_zero_and_the_prior():
    x = torch.linspace(0, 5, 400).double().unsqueeze(-1)
    model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=30).double()
    for rows in torch.arange(400).chunk(4):
        model.update(x[rows], torch.sin(x[rows, 0]), num_steps=20)
    variance = model(torch.linspace(-5, 10, 500).double()).variance
    assert variance.min() >= 0
    assert variance.max() <= model.covar_module.outputscale.item() * (1 + 1e-8)

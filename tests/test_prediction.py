"""Predictions in the dtype of the model, computed in float64."""

from __future__ import annotations

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from linear_operator import to_linear_operator

from torch_ssgp import StreamingGP
from torch_ssgp.prediction import CastLinearOperator


def operator(*batch):
    root = torch.randn(*batch, 5, 5, dtype=torch.float64)
    dense = root @ root.mT + torch.eye(5, dtype=torch.float64)
    return dense, CastLinearOperator(to_linear_operator(dense), dtype=torch.float32)


def test_a_cast_operator_shows_its_base_in_another_dtype():
    for batch in ((), (2,)):
        dense, cast = operator(*batch)
        shown = dense.float()
        assert cast.dtype == torch.float32 and cast.shape == dense.shape
        torch.testing.assert_close(cast.to_dense(), shown)
        torch.testing.assert_close(
            cast.diagonal(dim1=-1, dim2=-2), shown.diagonal(dim1=-1, dim2=-2)
        )
        torch.testing.assert_close(cast[..., 1:3, :].to_dense(), shown[..., 1:3, :])
        torch.testing.assert_close(cast[..., 2, 3], shown[..., 2, 3])
        torch.testing.assert_close(cast @ shown, shown @ shown)
        torch.testing.assert_close(cast.mT.to_dense(), shown.mT)
        torch.testing.assert_close(cast.expand(3, *cast.shape).to_dense()[1], shown)
        torch.testing.assert_close(cast.unsqueeze(0).to_dense()[0], shown)
        torch.testing.assert_close(
            cast.add_jitter(0.1).to_dense(), shown + 0.1 * torch.eye(5)
        )


def test_samples_come_in_the_dtype_of_the_model():
    _, cast = operator()
    samples = MultivariateNormal(torch.zeros(5), cast).rsample(torch.Size([7]))
    assert samples.dtype == torch.float32 and samples.shape == (7, 5)


def test_predicting_many_points_forms_no_square_matrix():
    x = torch.linspace(0, 5, 50).double().unsqueeze(-1)
    for dtype in (torch.float32, torch.float64):
        model = StreamingGP(ScaleKernel(RBFKernel())).to(dtype)
        model.update(x.to(dtype), torch.sin(x[:, 0]).to(dtype), num_steps=1)
        # A dense covariance of 200,000 points would need 320 GB.
        points = torch.linspace(0, 5, 200_000, dtype=dtype).unsqueeze(-1)
        prediction = model.predict(points)
        assert prediction.variance.shape == prediction.mean.shape == (200_000,)
        assert prediction.variance.dtype == dtype


def test_variances_stay_between_zero_and_the_prior():
    x = torch.linspace(0, 5, 400).double().unsqueeze(-1)
    model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=30).double()
    for rows in torch.arange(400).chunk(4):
        model.update(x[rows], torch.sin(x[rows, 0]), num_steps=20)
    variance = model(torch.linspace(-5, 10, 500).double()).variance
    assert variance.min() >= 0
    assert variance.max() <= model.covar_module.outputscale.item() * (1 + 1e-8)

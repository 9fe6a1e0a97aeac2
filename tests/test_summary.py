"""The summary: a posterior that can be shown, discounted, loaded."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from torch_ssgp import PosteriorSummary, StreamingGP, exceptions


def trained(batch_shape=()):
    x = torch.linspace(0, 5, 40).double().unsqueeze(-1)
    y = torch.sin(x[:, 0]).expand(*batch_shape, 40)
    model = StreamingGP(
        ScaleKernel(RBFKernel()), num_inducing=8, batch_shape=torch.Size(batch_shape)
    ).double()
    model.update(x, y, num_steps=3)
    return model


@pytest.mark.parametrize("batch_shape", [(), (2,)])
def test_the_posterior_of_the_inducing_values_is_the_prediction_there(batch_shape):
    model = trained(batch_shape)
    summary = model.summary
    prediction = model(summary.inducing_points)  # of the function without jitter
    torch.testing.assert_close(summary.mean, prediction.mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        summary.covariance, prediction.covariance_matrix, rtol=0, atol=1e-4
    )
    assert summary.num_data == 40
    assert summary.inducing_points.shape == (*batch_shape, 8, 1)


def test_the_evidence_of_the_summary_is_the_bound():
    x = torch.linspace(0, 5, 40).double().unsqueeze(-1)
    model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=8).double()
    result = model.update(x, torch.sin(x[:, 0]), num_steps=3)
    torch.testing.assert_close(model.summary.log_evidence, result.bound)


def test_an_empty_summary_knows_nothing():
    summary = PosteriorSummary(torch.Size([3]))
    assert summary.is_empty and summary.num_data == 0
    assert summary.mean.shape == (3, 0) and summary.covariance.shape == (3, 0, 0)
    assert torch.equal(summary.log_evidence, torch.zeros(3).double())


def test_a_state_of_another_batch_shape_is_refused():
    single, batched = trained(), trained((2,))
    with pytest.raises(exceptions.ShapeError, match="different batch shapes"):
        single.summary.load_state_dict(batched.summary.state_dict())


def test_discounting_scales_the_likelihood():
    summary = trained().summary
    half = summary.pseudo_observations.discount(0.5)
    assert half.n == 20
    torch.testing.assert_close(half.U.square(), 0.5 * summary.U.square())
    torch.testing.assert_close(half.rho, 0.5 * summary.residual)

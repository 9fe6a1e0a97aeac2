"""The summary: the posterior at the points of the memory, as a view."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch.testing import assert_close

from torch_ssgp import StreamingGP, UpdateResult


def trained(*batch: int) -> tuple[StreamingGP, UpdateResult]:
    x = torch.linspace(0, 5, 40).double().unsqueeze(-1)
    y = torch.sin(x[:, 0]).expand(*batch, 40)
    options = {"num_inducing": 8, "batch_shape": torch.Size(batch)}
    model = StreamingGP(ScaleKernel(RBFKernel()), **options).double()
    return model, model.update(x, y, num_steps=3)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_the_summary_is_the_prediction_at_the_points_and_the_bound(batch):
    model, result = trained(*batch)
    summary = model.summary
    prediction = model(summary.inducing_points)  # of the function without jitter
    covariance = prediction.covariance_matrix
    assert_close(summary.mean, prediction.mean, rtol=0, atol=1e-4)
    assert_close(summary.covariance, covariance, rtol=0, atol=1e-4)
    assert_close(summary.log_evidence, result.bound)
    assert summary.num_data == 40
    assert summary.inducing_points.shape == (*batch, 8, 1)


def test_an_empty_summary_knows_nothing():
    summary = StreamingGP(RBFKernel(), batch_shape=torch.Size([3])).summary
    assert summary.is_empty and summary.num_data == 0
    assert summary.mean.shape == (3, 0) and summary.covariance.shape == (3, 0, 0)
    assert torch.equal(summary.log_evidence, torch.zeros(3).double())


def test_the_summary_of_a_model_follows_it():
    model, _ = trained()
    summary, x = model.summary, torch.tensor([9.0]).double()
    model.update(x, x, num_steps=0)
    assert summary.num_updates == 2 and summary.num_data == 41
    assert torch.equal(summary.inducing_points, model.points)
    assert summary.mean[-1] > 1  # that of the new datum


def test_what_is_no_longer_in_the_summary_says_where_it_is():
    with pytest.raises(AttributeError, match="no prior_cholesky.*in model.memory"):
        _ = trained()[0].summary.prior_cholesky

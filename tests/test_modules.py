"""Kernels as tensors: the rule for jitter, and how points are recognised."""

from __future__ import annotations

import warnings

import pytest
import torch
from gpytorch.kernels import (
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.means import ZeroMean
from torch.testing import assert_close

from torch_ssgp import StreamingGP
from torch_ssgp.modules import (
    gram,
    inducing_gram,
    lazy_gram,
    prior_blocks,
    same_points,
    same_variables,
)


def test_a_kept_point_shares_its_jitter():
    z_a = torch.linspace(0, 5, 6).double().unsqueeze(-1)
    z_b = torch.cat([z_a[3:], z_a[:1] + 0.123])
    x = torch.cat([torch.rand(4, 1).double(), z_a[4:5]])
    points = torch.cat([x, z_a])
    kernel = RBFKernel().double()
    same = same_points(z_b, points)
    assert same.nonzero().tolist() == [[0, 8], [1, 4], [1, 9], [2, 10]]
    blocks = prior_blocks(ZeroMean(), kernel, z_b, x, z_a, 1e-3, same)
    assert_close(blocks.K_ba[:, 3:], blocks.K_bb[:, :3], rtol=0, atol=1e-15)
    assert_close(blocks.K_aa.diagonal(), blocks.K_bb[0, 0].expand(6))
    assert_close(blocks.k_ff[-1], blocks.K_bb[0, 0])
    # Nothing is lost about points that stay, and something about those that go.
    explained = blocks.K_ba.T @ torch.linalg.solve(blocks.K_bb, blocks.K_ba)
    residual = blocks.K_aa - explained
    assert residual.diagonal()[3:].abs().max() < 1e-12
    assert residual.diagonal()[1] > 1e-4


def test_matching_is_batched():
    z = torch.randn(2, 5, 3)
    points = torch.stack([z[0, [4, 1]], z[1, [0, 2]]])
    pairs = same_points(points, z).nonzero().tolist()
    assert pairs == [[0, 0, 4], [0, 1, 1], [1, 0, 0], [1, 1, 2]]
    assert same_points(z[:, :0], points).shape == (2, 0, 2)


def test_every_copy_of_a_point_is_a_variable_of_its_own():
    z_a = torch.tensor([[1.0], [2.0], [1.0], [1.0]])
    z_b = torch.tensor([[3.0], [1.0], [1.0]])
    x = torch.tensor([[1.0], [1.0], [2.0]])
    same = same_variables(z_b, x, z_a)
    assert same.nonzero().tolist() == [[1, 0], [1, 1], [1, 3], [2, 5]]
    # Nothing of the copies is lost, and nothing is lost twice.
    same = same_variables(z_a, x, z_a)
    blocks = prior_blocks(ZeroMean(), RBFKernel(), z_a, x, z_a, 1e-3, same)
    assert torch.equal(blocks.K_ba, blocks.K_bb)


def test_the_gram_is_exact_where_gpytorch_would_add_its_own_jitter():
    z = torch.linspace(0, 10, 30).double().unsqueeze(-1)
    kernel = (PeriodicKernel() + LinearKernel()).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        K = inducing_gram(kernel, z, 0.0).K_zz
    expected = sum(
        k(z, torch.cat([z, z[:1]])).to_dense()[:, :-1] for k in kernel.kernels
    )
    assert_close(K, expected, rtol=1e-9, atol=1e-9)


def test_the_diagonal_of_a_rough_kernel_is_exact():
    z = 1000 * torch.rand(60, 2).double()
    K = inducing_gram(MaternKernel(nu=0.5).double(), z, 0.0).K_zz
    assert torch.equal(K.diagonal(), torch.ones(60, dtype=torch.float64))


@pytest.mark.parametrize("unit", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("batch_shape", [(), (2,)])
def test_the_covariance_of_a_prediction_has_no_jitter_of_gpytorch(unit, batch_shape):
    # Square sums and products of low-rank kernels take roots of their parts.
    shape = {"batch_shape": torch.Size(batch_shape)}
    x = unit * torch.linspace(-1, 1, 8).double().expand(*batch_shape, 8).unsqueeze(-1)
    linear, other = LinearKernel(**shape), LinearKernel(**shape)
    rough = MaternKernel(nu=0.5, **shape)
    for kernel in (
        linear + other,
        ScaleKernel(linear + other, **shape),
        ScaleKernel((linear + rough) * other, **shape),
    ):
        kernel = kernel.double().requires_grad_(False)
        K = lazy_gram(kernel, x)
        expected = inducing_gram(kernel, x, 0.0).K_zz
        assert_close(K.to_dense(), expected, rtol=1e-12, atol=0)
        diagonals = (each.diagonal(dim1=-2, dim2=-1) for each in (K, expected))
        assert_close(*diagonals, rtol=1e-12, atol=0)


def test_predictions_at_the_inducing_points_have_no_jitter_of_gpytorch():
    # As many points as inducing points, and the same: a square call, to GPyTorch.
    x = torch.ones(8, 1, dtype=torch.float64)
    kernel = LinearKernel() + LinearKernel()
    model = StreamingGP(kernel, num_inducing=8).double()
    model.update(x[:1], x[:1, 0], num_steps=0, inducing_points=x)
    assert torch.isfinite(model(x).mean).all()  # a warning is an error here
    kernel = kernel.requires_grad_(False)
    rectangle = gram(kernel, x, x[:3])[:, :1].expand(8, 8)
    assert_close(gram(kernel, x, x), rectangle, rtol=1e-12, atol=0)

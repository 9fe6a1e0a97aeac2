"""Kernels at fixed points against those of GPyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpytorch.kernels import (
    ConstantKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)

from torch_ssgp.kernels import read
from torch_ssgp.plain_kernels import cross_covariance, prior_variance

KERNELS: dict[str, Callable[[], Kernel]] = {
    "rbf": lambda: ScaleKernel(RBFKernel(ard_num_dims=3)),
    "matern 1/2": lambda: MaternKernel(0.5),
    "matern 3/2": lambda: ScaleKernel(MaternKernel(1.5, active_dims=[2, 0])),
    "matern 5/2": lambda: MaternKernel(2.5, ard_num_dims=3),
    "rational quadratic": lambda: ScaleKernel(RQKernel()),
    "periodic": lambda: PeriodicKernel(ard_num_dims=3),
    "one period": lambda: PeriodicKernel(active_dims=[0, 1]),
    "linear": lambda: ScaleKernel(LinearKernel(ard_num_dims=3)),
    "constant": lambda: ConstantKernel(),
    "sum": lambda: RBFKernel() + LinearKernel(active_dims=[1]) + ConstantKernel(),
    "product": lambda: (
        RBFKernel() * PeriodicKernel(active_dims=[1]) * MaternKernel() * LinearKernel()
    ),
    "batch": lambda: ScaleKernel(
        RBFKernel(ard_num_dims=3, batch_shape=torch.Size([2])),
        batch_shape=torch.Size([2]),
    ),
}


def drawn(kernel: Kernel) -> Kernel:
    """The kernel with other hyperparameters than those it comes with."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return kernel.double()


@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize("name", KERNELS)
def test_each_kernel_is_that_of_gpytorch(name: str, num_rows: int) -> None:
    kernel = drawn(KERNELS[name]())
    form = read(kernel)
    assert form is not None
    x, z = torch.randn(num_rows, 3).double(), torch.randn(5, 3).double()
    expected = kernel(x, z).to_dense()
    torch.testing.assert_close(cross_covariance(form, z)(x), expected)
    variance = kernel(x, diag=True)
    torch.testing.assert_close(prior_variance(form)(x).expand_as(variance), variance)


def test_inputs_far_from_zero_lose_no_digits() -> None:
    kernel = drawn(ScaleKernel(MaternKernel(1.5)))
    form = read(kernel)
    assert form is not None
    x, z = torch.rand(4, 1).double(), torch.rand(6, 1).double()
    near = cross_covariance(form, z)(x)
    far = cross_covariance(form, z + 2.0**20)(x + 2.0**20)
    torch.testing.assert_close(far, near, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["matern 1/2", "matern 3/2", "matern 5/2"])
def test_gradients_at_a_fixed_point_are_finite(name: str) -> None:
    form = read(drawn(KERNELS[name]()))
    assert form is not None
    z = torch.randn(5, 3).double()
    x = z[:2].clone().requires_grad_()
    cross_covariance(form, z)(x).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert x.grad.abs().sum() > 0


def test_nothing_is_shared_with_what_it_was_made_of() -> None:
    kernel = drawn(KERNELS["sum"]())
    form = read(kernel)
    assert form is not None
    x, z = torch.randn(3, 3).double(), torch.randn(5, 3).double()
    cross, variance = cross_covariance(form, z), prior_variance(form)
    before = cross(x), variance(x)
    z.add_(1)
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter.add_(1)
    for value, expected in zip((cross(x), variance(x)), before, strict=True):
        assert torch.equal(value, expected)
        assert not value.requires_grad

"""Kernels as plain tensors, against GPyTorch."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import (
    ConstantKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from linear_operator import to_dense
from torch import Tensor

from torch_ssgp.kernels import Form, read
from torch_ssgp.modules import Opaque, form_of

BATCH = torch.Size([4])

KERNELS = {
    "rbf": lambda: RBFKernel(),
    "ard": lambda: ScaleKernel(RBFKernel(ard_num_dims=3)),
    "matern 1/2": lambda: MaternKernel(0.5),
    "matern 3/2": lambda: MaternKernel(1.5, ard_num_dims=3),
    "matern 5/2": lambda: ScaleKernel(MaternKernel(2.5)),
    "rational quadratic": lambda: RQKernel(ard_num_dims=3),
    "periodic": lambda: ScaleKernel(PeriodicKernel()),
    "periodic ard": lambda: PeriodicKernel(ard_num_dims=3),
    "linear": lambda: LinearKernel(),
    "linear ard": lambda: ScaleKernel(LinearKernel(ard_num_dims=3)),
    "constant": lambda: ConstantKernel(),
    "sum": lambda: (
        ScaleKernel(RBFKernel(active_dims=[0, 2]) * PeriodicKernel(active_dims=[1]))
        + LinearKernel(active_dims=[2])
        + ConstantKernel()
    ),
    "scale of dims": lambda: ScaleKernel(RBFKernel(active_dims=[1])),
    "product": lambda: RBFKernel() * RQKernel() * MaternKernel(1.5, active_dims=[0]),
    "batch": lambda: ScaleKernel(
        RBFKernel(ard_num_dims=3, batch_shape=BATCH), batch_shape=BATCH
    ),
    "scaled sum in a batch": lambda: ScaleKernel(
        PeriodicKernel(batch_shape=BATCH) + ConstantKernel(batch_shape=BATCH),
        batch_shape=BATCH,
    ),
}


def make(name: str) -> tuple[Kernel, Tensor, Tensor]:
    """A kernel with random hyperparameters, and two sets of inputs."""
    torch.manual_seed(0)
    kernel = KERNELS[name]().double()
    for parameter in kernel.parameters():
        parameter.data.normal_()
    x1, x2 = (5 + 2 * torch.randn(n, 3, dtype=torch.float64) for n in (7, 9))
    return kernel, x1.requires_grad_(), x2.requires_grad_()


def known(kernel: Kernel) -> Form:
    form = read(kernel)
    assert form is not None
    return form


@pytest.mark.parametrize("name", KERNELS)
def test_values_and_gradients_are_those_of_gpytorch(name: str) -> None:
    kernel, x1, x2 = make(name)
    form = known(kernel)
    ours, theirs = form.gram(x1, x2), to_dense(kernel(x1, x2))
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    diagonal = kernel(x1, diag=True)
    torch.testing.assert_close(form.variances(x1).expand_as(diagonal), diagonal)
    weight, inputs = torch.randn_like(ours), [x1, x2, *kernel.parameters()]
    gradients = [
        torch.autograd.grad((weight * K).sum(), inputs, materialize_grads=True)
        for K in (ours, theirs)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_inputs_far_from_zero_lose_no_digits() -> None:
    form = known(MaternKernel(1.5).double())
    x, z = torch.rand(4, 1).double(), torch.rand(6, 1).double()
    near, far = form.gram(x, z), form.gram(x + 2.0**20, z + 2.0**20)
    torch.testing.assert_close(far, near, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
def test_gradients_at_points_that_coincide_are_finite(nu: float) -> None:
    kernel = MaternKernel(nu).double()
    x = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    form = known(kernel)
    (grad,) = torch.autograd.grad(form.gram(x, x.detach()).sum(), x)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
def test_second_derivatives_of_matern_kernels(nu: float) -> None:
    kernel = MaternKernel(nu).double()
    x1, x2 = torch.randn(3, 2).double().requires_grad_(), torch.randn(4, 2).double()

    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: known(kernel).gram(x, x2), (x1,))


class Shifted(RBFKernel):
    """A kernel that computes something else than its base class."""

    def forward(self, x1: Tensor, x2: Tensor, **params: object) -> Tensor:
        return super().forward(x1, x2 + 0 * x2, **params)


@pytest.mark.parametrize(
    "kernel",
    [PolynomialKernel(2), Shifted(), ScaleKernel(Shifted()), RBFKernel() + Shifted()],
    ids=["polynomial", "subclass", "scaled subclass", "sum with a subclass"],
)
def test_other_kernels_go_through_gpytorch(kernel: Kernel) -> None:
    assert read(kernel) is None
    form, x = form_of(kernel.double()), torch.randn(5, 2).double()
    assert isinstance(form, Opaque)
    torch.testing.assert_close(form.gram(x, x), to_dense(kernel(x)))


def test_hyperparameters_are_read_at_the_call() -> None:
    kernel, x = RBFKernel().double(), torch.randn(5, 2).double()
    before = form_of(kernel).gram(x, x)
    kernel.lengthscale = 3.0
    assert (form_of(kernel).gram(x, x) > before).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e10])
@pytest.mark.parametrize("base", [RBFKernel, MaternKernel])
def test_points_far_apart_have_small_covariances_but_no_denormal_ones(
    base, scale, dtype
):
    kernel = ScaleKernel(base()).to(dtype)
    kernel.base_kernel.lengthscale, kernel.outputscale = 1e-3, scale
    x = torch.linspace(0, 1, 50, dtype=dtype).unsqueeze(-1)
    form = known(kernel)
    near, further = (form.gram(x, x2).detach() / scale for x2 in (x, x[:1] + 1e9))
    assert near.min().square() > torch.finfo(dtype).tiny
    assert near.fill_diagonal_(0).max() < torch.finfo(dtype).eps
    assert further.max() <= near.max()

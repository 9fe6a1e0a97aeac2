"""The first batch sets what the user did not."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, PoissonLikelihood
from gpytorch.means import ConstantMean
from gpytorch.priors import NormalPrior

from torch_ssgp import StreamingGP
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.update.initialization import initialize_from_data
from torch_ssgp.update.objective import known_values


def modules(kernel=None, **options):
    kernel = ScaleKernel(kernel or RBFKernel(**options), **options)
    mean = ConstantMean(**options)
    return mean.double(), kernel.double(), GaussianLikelihood(**options).double()


def test_scales_follow_the_data():
    x = torch.linspace(0, 100, 500).double().unsqueeze(-1)
    y = 50 + 30 * torch.sin(x[:, 0] / 3) + torch.randn(500).double()
    mean, kernel, likelihood = modules()
    initialize_from_data(mean, kernel, likelihood, x, y)
    assert mean.constant.item() == pytest.approx(50, abs=3)
    assert kernel.outputscale.item() == pytest.approx(450, rel=0.1)
    assert 1 <= kernel.base_kernel.lengthscale.item() <= 10
    assert likelihood.noise.item() < 20


def test_what_was_set_stays():
    x, y = torch.rand(50, 2).double(), torch.randn(50).double()
    mean, kernel, likelihood = modules(MaternKernel(ard_num_dims=2))
    kernel.outputscale, likelihood.noise = 7.0, 0.3
    kernel.base_kernel.lengthscale = torch.tensor([0.5, 2.0])
    initialize_from_data(mean, kernel, likelihood, x, y)
    assert kernel.outputscale.item() == pytest.approx(7)
    assert likelihood.noise.item() == pytest.approx(0.3)
    assert kernel.base_kernel.lengthscale.squeeze().tolist() == pytest.approx([0.5, 2])


def test_streams_of_a_batch_are_set_one_by_one():
    x = torch.linspace(0, 10, 100).double().unsqueeze(-1).expand(2, 100, 1)
    y = torch.stack([torch.sin(x[0, :, 0]), 100 * torch.sin(5 * x[0, :, 0])])
    mean, kernel, likelihood = modules(batch_shape=torch.Size([2]))
    initialize_from_data(mean, kernel, likelihood, x, y)
    small, large = kernel.outputscale.tolist()
    assert large / small == pytest.approx(1e4, rel=0.2)
    slow, fast = kernel.base_kernel.lengthscale.flatten().tolist()
    assert slow > fast


@pytest.mark.parametrize("y", [torch.zeros(5), torch.full((5,), 3.0), torch.ones(1)])
def test_targets_that_do_not_vary_are_no_problem(y):
    x = torch.linspace(0, 1, len(y)).double().unsqueeze(-1)
    mean, kernel, likelihood = modules()
    initialize_from_data(mean, kernel, likelihood, x, y.double())
    for parameter in (*kernel.parameters(), *likelihood.parameters()):
        assert torch.isfinite(parameter).all()


def test_what_is_frozen_stays_as_it_is():
    x = torch.linspace(0, 6, 50, dtype=torch.float64).unsqueeze(-1)
    gp = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=10).double()
    frozen = {
        name: parameter.detach().clone()
        for name, parameter in gp.named_parameters()
        if "lengthscale" not in name
    }
    assert len(frozen) == 3
    for name in frozen:
        gp.get_parameter(name).requires_grad_(False)
    gp.update(x, 100 * x[:, 0].sin() + 50, num_steps=5)
    for name, value in frozen.items():
        assert torch.equal(gp.get_parameter(name), value)


@pytest.mark.parametrize("likelihood", [None, PoissonLikelihood()], ids=str)
def test_a_constant_with_a_prior_starts_where_it_is(likelihood):
    """0.0 is also the default: a prior says that it is meant, as freezing it does."""
    x = torch.linspace(0, 6, 50, dtype=torch.float64).unsqueeze(-1)
    y = (50 + 30 * x[:, 0].sin()).round()
    constants = []
    for prior in (None, NormalPrior(0.0, 0.1)):
        mean = ConstantMean(constant_prior=prior)
        mean.constant = 0.0
        kernel = ScaleKernel(RBFKernel())
        gp = StreamingGP(kernel, likelihood, mean, num_inducing=10).double()
        gp.update(x, y, num_steps=1, lr=1e-6)
        constants.append(mean.constant.item())
    assert constants[0] > 1 and abs(constants[1]) < 0.01


def test_values_that_a_memory_starts_from_lie_among_what_it_has_seen():
    """Rows that hardly tell two points apart say what both have in common."""
    z = torch.tensor([[0.0], [1.0], [2.0]]).double()
    U = torch.tensor([[3.0, 3.0, 0.0], [0.0, 0.01, 0.0], [0.0, 0.0, 4.0]]).double()
    zero = torch.zeros(()).double()
    exact = U @ torch.tensor([5.0, 5.0, 6.0]).double()
    _, a = known_values(z, PseudoObservations(U, exact, zero, zero))
    wanted = a.new_tensor([5.0, 5.0, 6.0])
    torch.testing.assert_close(a.sort().values, wanted, atol=1e-5, rtol=0)
    off = exact + torch.tensor([0.0, 10.0, 0.0]).double()  # 1,000 if believed
    _, a = known_values(z, PseudoObservations(U, off, zero, zero))
    assert float(a.min()) > 4 and float(a.max()) < 7

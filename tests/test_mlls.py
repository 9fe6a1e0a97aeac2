"""The streaming bound reports terms that add up to its value."""

import doctest

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch import Tensor

from torch_ssgp import mlls
from torch_ssgp.exceptions import ArgumentError
from torch_ssgp.mlls import StreamingELBO
from torch_ssgp.variational import (
    IndependentMultitaskStreamingStrategy,
    StreamingVariationalStrategy,
)


class Model(gpytorch.models.ApproximateGP):
    def __init__(
        self, strategy: type = StreamingVariationalStrategy, num_tasks: int = 0
    ) -> None:
        z = torch.linspace(0, 1, 6, dtype=torch.float64).unsqueeze(-1)
        shape = torch.Size([num_tasks]) if num_tasks else torch.Size()
        q = CholeskyVariationalDistribution(6, batch_shape=shape, mean_init_std=0.5)
        base = strategy(self, z, q.double())
        if num_tasks:
            base = IndependentMultitaskStreamingStrategy(base, num_tasks)
        super().__init__(base)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.RBFKernel().double()
        self.covar_module.lengthscale = 0.2

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def batch(num: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(num, 1, dtype=torch.float64)
    return x, torch.sin(6 * x.squeeze(-1))


def absorb_something(model: Model) -> None:
    model(torch.zeros(1, 1, dtype=torch.float64))  # initialises q
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("chol_variational_covar"):
                parameter.mul_(0.5)
    model.variational_strategy.absorb()
    model.covar_module.lengthscale = 0.3


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_the_terms_add_up_to_the_value(beta: float) -> None:
    model = Model()
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    mll = StreamingELBO(likelihood, model, num_data=20, beta=beta)
    stock = VariationalELBO(likelihood, model, num_data=20, beta=beta)
    x, y = batch(20)

    assert mll.terms(model(x), y).old_data == 0
    absorb_something(model)
    output = model(x)
    terms = mll.terms(output, y)
    assert terms.old_data.abs() > 0.1
    torch.testing.assert_close(terms.elbo / 20, mll(output, y))
    torch.testing.assert_close(mll(output, y), stock(output, y), rtol=0, atol=0)
    kl = model.variational_strategy.kl_divergence()
    torch.testing.assert_close(terms.kl_prior + terms.old_data, kl)
    expected = likelihood.expected_log_prob(y, output).sum()
    torch.testing.assert_close(terms.expected_log_likelihood, expected)


def test_a_minibatch_estimates_the_terms_of_the_batch() -> None:
    model = Model()
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    mll = StreamingELBO(likelihood, model, num_data=20)
    absorb_something(model)
    x, y = batch(20)
    halves = [mll.terms(model(x[i::2]), y[i::2]) for i in (0, 1)]
    whole = mll.terms(model(x), y)
    for name in whole._fields:
        mean = (getattr(halves[0], name) + getattr(halves[1], name)) / 2
        torch.testing.assert_close(mean, getattr(whole, name))


def test_priors_are_not_among_the_terms_but_in_the_value() -> None:
    model = Model()
    prior = gpytorch.priors.GammaPrior(2.0, 3.0)
    model.covar_module.register_prior("p", prior, "lengthscale")
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    mll = StreamingELBO(likelihood, model, num_data=10)
    x, y = batch(10)
    output = model(x)
    log_prior = prior.log_prob(model.covar_module.lengthscale).sum()
    expected = (mll.terms(output, y).elbo + log_prior) / 10
    torch.testing.assert_close(mll(output, y), expected)


def test_terms_of_several_tasks_are_summed() -> None:
    model = Model(num_tasks=2)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2).double()
    mll = StreamingELBO(likelihood, model, num_data=8)
    absorb_something(model)
    x, y = batch(8)
    target = torch.stack([y, -y], -1)
    output = model(x)
    terms = mll.terms(output, target)
    assert all(term.shape == () for term in terms)
    torch.testing.assert_close(terms.elbo / 8, mll(output, target))


def test_a_model_without_memory_is_refused() -> None:
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    with pytest.raises(ArgumentError, match="StreamingVariationalStrategy"):
        StreamingELBO(likelihood, Model(VariationalStrategy), num_data=5)


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(mlls).failed == 0

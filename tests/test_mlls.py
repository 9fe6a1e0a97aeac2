"""The streaming bound reports terms that add up to its value."""

import doctest
import itertools
import warnings
from collections.abc import Iterable

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch import Tensor

from torch_ssgp import mlls
from torch_ssgp.exceptions import ArgumentError, ForgottenAbsorbWarning
from torch_ssgp.mlls import StreamingELBO
from torch_ssgp.variational import (
    IndependentMultitaskStreamingStrategy,
    StreamingVariationalStrategy,
)
from torch_ssgp.variational.watch import SeenData, data_keys


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


# -- a forgotten absorb ---------------------------------------------------------------


class Stream:
    """A model in training; what was warned of is in ``caught``."""

    def __init__(self, num_tasks: int = 0) -> None:
        self.model, self.num_tasks = Model(num_tasks=num_tasks), num_tasks
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        if num_tasks:
            self.likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(
                num_tasks
            ).double()
        parameters = [*self.model.parameters(), *self.likelihood.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=0.01)
        self.caught: list[warnings.WarningMessage] = []

    def train(
        self,
        x: Tensor,
        y: Tensor,
        batches: Iterable[Tensor],
        noise: float = 0.0,
    ) -> None:
        """Steps on some rows each, with a new objective as scripts make it."""
        mll = StreamingELBO(self.likelihood, self.model, num_data=len(y))
        for rows in batches:
            self.optimizer.zero_grad()
            inputs = x[rows] + noise * torch.randn_like(x[rows])
            target = y[rows].unsqueeze(-1).expand(-1, self.num_tasks)
            output = self.model(inputs)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss = -mll(output, target if self.num_tasks else y[rows])
            self.caught += caught
            loss.backward()
            self.optimizer.step()

    def absorb(self) -> None:
        self.model.variational_strategy.absorb(optimizer=self.optimizer)


def orders(num: int) -> dict[str, list[Tensor]]:
    """Ways to go through a batch."""
    every = torch.arange(num)
    minibatches = [torch.randperm(num).split(num // 3) for _ in range(4)]
    return {
        "full batch": [every] * 5,
        "epochs": list(itertools.chain.from_iterable(minibatches)),
        "dropped rests": [m for epoch in minibatches for m in epoch[:-1]],
        "with replacement": [torch.randint(num, (15,)) for _ in range(15)],
        "one minibatch many times": [m for m in every.split(5) for _ in range(4)],
    }


@pytest.mark.parametrize(
    ("order", "num_tasks"), [*((order, 0) for order in orders(10)), ("epochs", 2)]
)
def test_a_forgotten_absorb_is_warned_of_once(order: str, num_tasks: int) -> None:
    stream = Stream(num_tasks)
    for _ in range(2):
        stream.train(*batch(20), orders(20)[order])
    assert [w.category for w in stream.caught] == [ForgottenAbsorbWarning]
    assert "num_data=20" in str(stream.caught[0].message)
    assert "absorb" in str(stream.caught[0].message)
    assert stream.caught[0].filename == __file__
    stream.absorb()
    for _ in range(2):  # forgotten again
        stream.train(*batch(20), orders(20)[order])
    assert len(stream.caught) == 2


@pytest.mark.parametrize(
    ("order", "num_tasks"), [*((order, 0) for order in orders(10)), ("epochs", 2)]
)
def test_a_correct_stream_is_not_warned_of(order: str, num_tasks: int) -> None:
    stream = Stream(num_tasks)
    for num in (20, 30, 10):
        x, y = batch(num)
        for _ in range(2):
            stream.train(x, y, orders(num)[order])
        stream.absorb()
    assert stream.caught == []


def test_the_same_inputs_with_new_targets_are_a_new_batch() -> None:
    stream, (x, y) = Stream(), batch(20)
    stream.train(x, y, orders(20)["full batch"])
    stream.train(x, y + 1, orders(20)["full batch"])
    assert len(stream.caught) == 1


def test_augmented_inputs_are_not_taken_for_new_batches() -> None:
    stream, (x, y) = Stream(), batch(20)
    for _ in range(20):
        stream.train(x, y, orders(20)["epochs"], noise=0.01)
    assert stream.caught == []


def test_looking_at_other_data_is_not_training() -> None:
    stream, (x, y), (x_test, y_test) = Stream(), batch(20), batch(30)
    mll = StreamingELBO(stream.likelihood, stream.model, num_data=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            stream.train(x, y, orders(20)["epochs"])
            mll.terms(stream.model(x_test), y_test)
            with torch.no_grad():
                mll(stream.model(x_test), y_test)
            stream.model.eval()
            mll(stream.model(x_test), y_test)
            stream.model.train()
    assert stream.caught == []


def test_loading_a_state_begins_a_new_count() -> None:
    stream, state = Stream(), Stream().model.state_dict()
    for _ in range(3):
        stream.model.load_state_dict(state)
        stream.train(*batch(20), orders(20)["epochs"])
    assert stream.caught == []


def test_large_batches_are_counted_by_a_sample() -> None:
    num = 20_000
    seen, grid = SeenData(num), torch.arange(2 * num).double().unsqueeze(-1) / 64
    label = (torch.arange(2 * num) % 2).double()  # targets that say nothing
    for _ in range(2):
        seen.add(grid[:num], label[:num])
    assert len(seen.once) < 0.1 * num and not seen.is_more_than(num)
    assert len(seen.twice) * seen.stride == pytest.approx(num, rel=0.15)
    for _ in range(2):
        seen.add(grid[num:], label[num:])
    assert seen.is_more_than(num)


def test_keys_tell_the_points_of_a_grid_apart() -> None:
    axis = torch.arange(100).double() / 16
    x = torch.cartesian_prod(axis, axis)
    y = torch.zeros(len(x))
    keys = data_keys(x, y)
    assert len(keys.unique()) == len(x)
    order = torch.randperm(len(x))
    assert torch.equal(data_keys(x[order].float(), y[order]), keys[order])


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(mlls).failed == 0

"""The GPyTorch-native strategy against GPyTorch's own suite and dense formulas."""

import copy
import doctest
import pickle
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.test.variational_test_case import VariationalTestCase
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    DeltaVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    VariationalStrategy,
)
from torch import Tensor

import oracles
from torch_ssgp.atomic import atomic_change
from torch_ssgp.exceptions import (
    ArgumentError,
    DtypeError,
    FactorizationError,
    NonFiniteError,
    ShapeError,
    StreamingGPWarning,
)
from torch_ssgp.variational import (
    IndependentMultitaskStreamingStrategy,
    LMCStreamingStrategy,
    StreamingVariationalStrategy,
    divide_by_prior,
    strategy,
)

GAUSSIANS = [
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
]


class Model(gpytorch.models.ApproximateGP):
    """A small model with a constant mean and a scaled kernel."""

    def __init__(
        self,
        z: Tensor,
        q: type = CholeskyVariationalDistribution,
        *,
        strategy: Callable[..., Any] = StreamingVariationalStrategy,
        kernel: gpytorch.kernels.Kernel | None = None,
        batch_shape: torch.Size = torch.Size(),
        learn: bool = True,
        jitter: float | None = None,
        wrap: Callable[..., Any] = lambda strategy: strategy,
    ) -> None:
        distribution = q(z.size(-2), batch_shape=batch_shape, mean_init_std=0.0)
        base = strategy(
            self, z, distribution, learn_inducing_locations=learn, jitter_val=jitter
        )
        super().__init__(wrap(base))
        if kernel is None:
            kernel = gpytorch.kernels.MaternKernel(nu=1.5)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel)
        self.to(z.dtype)
        kernel.lengthscale = 0.3
        self.mean_module.initialize(constant=0.4)

    @property
    def strategy(self) -> Any:
        return self.variational_strategy

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def grid(num: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    return torch.linspace(low, high, num, dtype=torch.float64).unsqueeze(-1)


def data(num: int, low: float = 0.0, high: float = 1.0) -> tuple[Tensor, Tensor]:
    x = low + (high - low) * torch.rand(num, 1, dtype=torch.float64)
    y = torch.sin(8 * x.squeeze(-1)) + 0.5 + 0.1 * torch.randn(num, dtype=x.dtype)
    return x, y


def randomize(model: Model, scale: float = 0.5) -> None:
    """Some q that is no optimum, narrower than the prior in whitened space."""
    q = model.strategy._variational_distribution
    shape = q.variational_mean.shape
    with torch.no_grad():
        q.variational_mean.normal_().mul_(scale)
        root = torch.randn(*shape, shape[-1], dtype=q.dtype).tril(-1) * 0.1
        diagonal = 0.2 + 0.4 * torch.rand(shape, dtype=q.dtype)
        q.chol_variational_covar.copy_(root + torch.diag_embed(diagonal))
    model.strategy.variational_params_initialized.fill_(1)
    model.strategy._clear_cache()


def unwhitened(model: Model) -> oracles.SparsePosterior:
    """q(b) in function space, densely."""
    strategy = model.strategy
    with torch.no_grad():
        z = strategy.inducing_points
        q = strategy._variational_distribution()
        L = torch.linalg.cholesky(dense_prior(model, z))
        mean = model.mean_module(z) + (L @ q.mean.unsqueeze(-1)).squeeze(-1)
        return oracles.SparsePosterior(
            torch.tensor(0.0), mean, L @ q.covariance_matrix @ L.mT
        )


def dense_prior(model: Model, z: Tensor) -> Tensor:
    eye = torch.eye(z.size(-2), dtype=z.dtype)
    return model.covar_module(z).to_dense() + model.strategy.jitter_val * eye


def old_posterior(model: Model) -> oracles.OldPosterior:
    """What the paper would store instead of absorbing."""
    z = model.strategy.inducing_points.detach().clone()
    q = unwhitened(model)
    with torch.no_grad():
        prior_mean = model.mean_module(z).clone()
        return oracles.OldPosterior(z, q.mean, q.cov, prior_mean, dense_prior(model, z))


def oracle_functions(model: Model) -> dict[str, Any]:
    """Kernel and mean for the oracles, at the current hyperparameters."""
    frozen = copy.deepcopy(model)
    return {
        "kernel": lambda a, b: frozen.covar_module(a, b).to_dense().detach(),
        "mean": lambda a: frozen.mean_module(a).detach(),
        "jitter": frozen.strategy.jitter_val,
    }


def change_hyperparameters(model: Model, factor: float) -> None:
    model.covar_module.outputscale = model.covar_module.outputscale.detach() * factor
    kernel = model.covar_module.base_kernel
    kernel.lengthscale = kernel.lengthscale.detach() / factor
    with torch.no_grad():
        model.mean_module.constant.add_(factor - 1)


def predict(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    model.eval()
    with torch.no_grad():
        dist = model(x)
        moments = dist.mean.clone(), dist.variance.clone()
    model.train()
    return moments


def natural_step(model: Model, loss: Callable[[], Tensor], num_data: int = 1) -> None:
    """One full natural-gradient step: the optimum, if the objective is conjugate."""
    model.strategy._clear_cache()
    ngd = gpytorch.optim.NGD(model.variational_parameters(), num_data, lr=1.0)
    ngd.zero_grad()
    loss().sum().backward()
    ngd.step()
    model.strategy._clear_cache()


# GPyTorch's conformance suite


class ConformanceBase(VariationalTestCase):
    distribution: type = CholeskyVariationalDistribution
    objective: type = gpytorch.mlls.VariationalELBO
    cholesky_train, cholesky_eval = 2, 1  # what GPyTorch asserts of its own strategy

    batch_shape = property(lambda self: torch.Size())
    distribution_cls = property(lambda self: self.distribution)
    mll_cls = property(lambda self: self.objective)
    strategy_cls = property(lambda self: StreamingVariationalStrategy)

    def test_training_iteration(self, *args: Any, **kwargs: Any) -> None:
        cg, cholesky, ciq = super().test_training_iteration(*args, **kwargs)
        self.assertFalse(cg.called)
        self.assertFalse(ciq.called)
        self.assertEqual(cholesky.call_count, self.cholesky_train)

    def test_eval_iteration(self, *args: Any, **kwargs: Any) -> None:
        cg, cholesky, ciq = super().test_eval_iteration(*args, **kwargs)
        self.assertFalse(cg.called)
        self.assertFalse(ciq.called)
        self.assertEqual(cholesky.call_count, self.cholesky_eval)

    def test_fantasy_call(self, *args: Any, **kwargs: Any) -> None:
        # Refused with a reason, instead of GPyTorch's numbers.
        with self.assertRaisesRegex(NotImplementedError, "condition_on_observations"):
            super().test_fantasy_call(*args, **kwargs)


class TestConformanceCholesky(ConformanceBase, unittest.TestCase):
    pass


class TestConformancePredictive(ConformanceBase, unittest.TestCase):
    objective = gpytorch.mlls.PredictiveLogLikelihood


class TestConformanceRobust(ConformanceBase, unittest.TestCase):
    objective = gpytorch.mlls.GammaRobustVariationalELBO


class TestConformanceMeanField(ConformanceBase, unittest.TestCase):
    distribution = MeanFieldVariationalDistribution


class TestConformanceDelta(ConformanceBase, unittest.TestCase):
    distribution = DeltaVariationalDistribution


class TestConformanceNatural(ConformanceBase, unittest.TestCase):
    distribution = NaturalVariationalDistribution
    cholesky_train, cholesky_eval = 6, 3


class ConformanceWithPast(ConformanceBase):
    """The same suite for a strategy that has absorbed before: same factorisations."""

    def _make_model_and_likelihood(self, *args: Any, **kwargs: Any) -> Any:
        model, likelihood = super()._make_model_and_likelihood(*args, **kwargs)
        strategy = model.variational_strategy
        _randomize_any(strategy)
        strategy.absorb()
        # The suite checks that a fresh q is initialised from the prior.
        strategy.variational_params_initialized.fill_(0)
        with torch.no_grad():
            strategy.inducing_points.add_(0.1)
        return model, likelihood


class TestConformanceWithPastCholesky(ConformanceWithPast, unittest.TestCase):
    pass


class TestConformanceWithPastMeanField(ConformanceWithPast, unittest.TestCase):
    distribution = MeanFieldVariationalDistribution


class TestConformanceWithPastNatural(ConformanceWithPast, unittest.TestCase):
    distribution = NaturalVariationalDistribution
    cholesky_train, cholesky_eval = 6, 3


def _randomize_any(strategy: StreamingVariationalStrategy) -> None:
    q = strategy._variational_distribution
    with torch.no_grad():
        for name, parameter in q.named_parameters():
            if parameter.shape == q.shape() and "stddev" not in name:
                parameter.normal_()  # mean or natural vector
            elif name in ("natural_mat", "natural_tril_mat"):
                parameter.mul_(2.0)
            else:
                parameter.mul_(0.5)


# The objective


@pytest.mark.parametrize("jitter", [0.0, 1e-4])
@pytest.mark.parametrize("new_points", ["same", "moved", "some kept"])
def test_elbo_equals_the_papers_four_terms(jitter: float, new_points: str) -> None:
    model = Model(grid(6), jitter=jitter)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    randomize(model)
    old = old_posterior(model)
    points = {
        "same": None,
        "moved": grid(8, 0.03, 1.2),
        "some kept": torch.cat([grid(6)[2:], grid(3, 1.1, 1.4)]),
    }
    model.strategy.absorb(points[new_points])
    change_hyperparameters(model, 1.3)
    randomize(model)

    x, y = data(15, 0.5, 1.5)
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=15)
    functions = oracle_functions(model)
    expected = oracles.streaming_elbo_four_terms(
        x=x,
        y=y,
        z=model.strategy.inducing_points.detach(),
        noise=likelihood.noise.item(),
        old=old,
        q=unwhitened(model),
        **functions,
    )
    # GPyTorch adds its jitter to the variance at data, the oracle does not.
    expected = expected - 0.5 * 15 * jitter / likelihood.noise.item()
    torch.testing.assert_close(15 * mll(model(x), y), expected, rtol=0, atol=1e-8)


def test_predictive_log_likelihood_streams_unchanged() -> None:
    model = Model(grid(6))
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    randomize(model)
    x, y = data(10)
    mll = gpytorch.mlls.PredictiveLogLikelihood(likelihood, model, num_data=10)
    before = mll(model(x), y)
    model.strategy.absorb()
    change_hyperparameters(model, 1.2)
    terms = model.strategy.kl_terms()
    model.strategy._clear_cache()
    after = mll(model(x), y)
    stock = copy.deepcopy(model)
    stock.variational_strategy.old_U = torch.zeros(0, 0)
    expected = mll.__class__(likelihood, stock, num_data=10)(stock(x), y)
    assert terms.old_data.abs() > 0.1
    torch.testing.assert_close(after, expected - terms.old_data / 10)
    assert before.shape == after.shape


@pytest.mark.parametrize("q", GAUSSIANS)
def test_divergence_is_zero_right_after_absorb(q: type) -> None:
    model = Model(grid(7), q)
    _randomize_any(model.strategy)
    assert model.strategy.absorb().num_clipped == 0
    assert model.strategy.kl_divergence().abs() < 1e-9
    terms = model.strategy.kl_terms()
    torch.testing.assert_close(terms.prior, -terms.old_data)


def test_without_a_past_it_is_gpytorchs_strategy() -> None:
    ours, stock = Model(grid(5)), Model(grid(5), strategy=VariationalStrategy)
    randomize(ours)
    state = ours.variational_strategy._variational_distribution.state_dict()
    stock.variational_strategy._variational_distribution.load_state_dict(state)
    stock.variational_strategy.variational_params_initialized.fill_(1)
    x, _ = data(9)
    for a, b in zip(predict(ours, x), predict(stock, x), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert ours.strategy.kl_divergence() == stock.variational_strategy.kl_divergence()


def test_gradient_of_the_old_data_term_is_right_also_at_kept_points() -> None:
    """A kept point is one variable in value, but the old one does not move."""
    model = Model(grid(5), kernel=gpytorch.kernels.RBFKernel(), jitter=0.0)
    randomize(model)
    model.strategy.absorb()
    change_hyperparameters(model, 1.1)
    randomize(model)
    z = model.strategy.inducing_points

    def old_data() -> Tensor:
        model.strategy._clear_cache()
        return model.strategy.kl_terms().old_data

    (gradient,) = torch.autograd.grad(old_data(), z)
    numeric = torch.zeros_like(z)
    start, h = z.detach().clone(), 1e-5
    for i in range(len(z)):
        values = []
        for step in (h, -h):
            with torch.no_grad():
                z.copy_(start)
                z[i] += step
                values.append(old_data())
        numeric[i] = (values[0] - values[1]) / (2 * h)
    assert numeric.abs().max() > 0.1
    torch.testing.assert_close(gradient, numeric, rtol=1e-4, atol=1e-4)


# Streams


def train(
    model: Model,
    likelihood: Any,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    lr: float,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """A plain training loop; the losses."""
    if optimizer is None:
        parameters = [*model.parameters(), *likelihood.parameters()]
        if "Natural" in type(model.strategy._variational_distribution).__name__:
            parameters = list(model.variational_parameters())
        optimizer = torch.optim.Adam(parameters, lr=lr)
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=y.size(-1))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -mll(model(x), y).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_natural_gradients_reach_the_collapsed_update_over_three_batches() -> None:
    """Gaussian likelihood, theta and Z changed between the batches."""
    model = Model(grid(8), NaturalVariationalDistribution, jitter=0.0)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 0.02
    points = [grid(8), grid(10, -0.05, 1.5), grid(9, 0.1, 2.1)]
    x_test = grid(25, -0.2, 2.2)
    worst = 0.0
    old: oracles.OldPosterior | None = None
    for i, z in enumerate(points):
        if i:
            model.strategy.absorb(z)
            change_hyperparameters(model, (1.0, 1.2, 0.8)[i])
            likelihood.noise = 0.02 * (1 + i)
        x, y = data(30, 0.6 * i, 0.6 * i + 0.8)
        mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=30)
        for _ in range(2):  # the first initialises q from the prior
            natural_step(model, lambda: -mll(model(x), y), num_data=30)  # noqa: B023

        functions = oracle_functions(model)
        arguments = {"x": x, "y": y, "z": z, "noise": likelihood.noise.item()}
        if old is None:
            expected = oracles.batch_vfe(**arguments, **functions)
        else:
            expected = oracles.paper_online_vfe(**arguments, **functions, old=old)
        actual = unwhitened(model)
        mean, variance = predict(model, x_test)
        expected_mean, cov = oracles.predict(
            z=z, q=expected, x_test=x_test, **functions
        )
        bound = 30 * mll(model(x), y)
        for a, b in (
            (actual.mean, expected.mean),
            (actual.cov, expected.cov),
            (mean, expected_mean),
            (variance, cov.diagonal()),
            (bound.detach(), expected.bound),
        ):
            worst = max(worst, (a - b).abs().max().item())
        old = old_posterior(model)
    assert worst < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_hundred_absorbs_leave_the_posterior_unchanged(dtype: torch.dtype) -> None:
    """Same Z and theta: q is found again from the summary alone, each time."""
    kernel = gpytorch.kernels.RBFKernel()
    model = Model(grid(20), NaturalVariationalDistribution, kernel=kernel).to(dtype)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(dtype)
    likelihood.noise = 0.01
    x, y = (tensor.to(dtype) for tensor in data(300))
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=300)
    for _ in range(2):
        natural_step(model, lambda: -mll(model(x), y), num_data=300)
    x_test = grid(40, -0.2, 1.2).to(dtype)
    mean, variance = predict(model, x_test)

    for _ in range(100):
        model.strategy.absorb()
        with torch.no_grad():  # forget q: the prior
            q = model.strategy._variational_distribution
            q.natural_vec.zero_()
            q.natural_mat.copy_(-0.5 * torch.eye(20))
        natural_step(model, model.strategy.kl_divergence)
    mean_after, variance_after = predict(model, x_test)
    tolerance = 1e-8 if dtype == torch.float64 else 5e-3
    torch.testing.assert_close(mean_after, mean, rtol=0, atol=tolerance)
    torch.testing.assert_close(variance_after, variance, rtol=tolerance, atol=0)


def student_t_stream(first_steps: int) -> tuple[Model, list[float], float]:
    """Two batches of a robust regression; the second always has 300 steps."""
    torch.manual_seed(3)
    x, y = data(160)
    outlier = torch.rand(160) < 0.1
    y = torch.where(outlier, y + 3 * torch.randn(160, dtype=y.dtype), y)
    kernel = gpytorch.kernels.RBFKernel()
    model = Model(grid(12), kernel=kernel, learn=False)
    likelihood = gpytorch.likelihoods.StudentTLikelihood().double()
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    steps = {"lr": 0.05, "optimizer": adam}
    train(model, likelihood, x[:80], y[:80], steps=first_steps, **steps)
    before = copy.deepcopy(model)
    model.strategy.absorb()
    losses = train(model, likelihood, x[80:], y[80:], steps=300, **steps)
    x_test, y_test = data(500)
    error = (predict(model, x_test)[0] - y_test).square().mean().sqrt().item()
    return before, losses, error


def test_an_inner_loop_stopped_early_does_no_harm() -> None:
    before, losses, error = student_t_stream(60)
    _, _, converged = student_t_stream(600)
    assert max(map(abs, losses)) < 10
    assert losses[-1] < losses[0]
    assert error < 1.05 * converged

    # The case is the dangerous one: q is wider than the prior in places, ...
    S = before.strategy._variational_distribution().covariance_matrix.detach()
    values, V = torch.linalg.eigh(S)
    assert values[-1] > 1.01
    # ... so q_old / p_old grows without bound along a line, ...
    eye = torch.eye(len(S), dtype=S.dtype)
    assert torch.linalg.eigvalsh(S.inverse() - eye)[0] < -0.01
    # ... and the paper's terms, unclipped, reward a wide q(b) without end.
    old = old_posterior(before)
    clipped = copy.deepcopy(before)
    clipped.strategy.absorb()

    def paper_and_ours(extra: float) -> tuple[float, float]:
        root = torch.linalg.cholesky(S + extra * V[:, -1:] @ V[:, -1:].mT)
        with torch.no_grad():
            clipped.strategy._variational_distribution.chol_variational_covar.copy_(
                root
            )
        clipped.strategy._clear_cache()
        q = unwhitened(clipped)
        paper = oracles.gaussian_kl(q.mean, q.cov, old.mean, old.cov)
        prior = oracles.gaussian_kl(q.mean, q.cov, old.prior_mean, old.prior_cov)
        ours = clipped.strategy.kl_terms().old_data
        return (paper - prior).item(), ours.item()

    (paper_0, ours_0), (paper_1, ours_1) = paper_and_ours(0.0), paper_and_ours(1e8)
    assert paper_1 < paper_0 - 1e3
    assert ours_1 >= ours_0


def test_a_q_wider_than_the_prior_becomes_a_finite_summary() -> None:
    model = Model(grid(6))
    randomize(model)
    with torch.no_grad():
        q = model.strategy._variational_distribution
        q.chol_variational_covar.copy_(torch.diag_embed(torch.rand(6) * 0 + 3.0))
        q.variational_mean[0] = 0.0
    mean, _ = predict(model, grid(9))
    result = model.strategy.absorb()
    assert result.num_clipped == 6
    assert result.information >= 0
    for buffer in ("old_U", "old_g", "old_log_evidence"):
        assert torch.isfinite(getattr(model.strategy, buffer)).all()
    # What is stored says no more than the means show, and keeps them.
    assert result.information < 1
    z = model.strategy.inducing_points.detach()
    U, g = model.strategy.old_U, model.strategy.old_g
    K, m = dense_prior(model, z).detach(), model.mean_module(z).detach()
    gain = K @ U.mT @ torch.linalg.inv(U @ K @ U.mT + torch.eye(6))
    torch.testing.assert_close(m + gain @ (g - U @ m), unwhitened(model).mean)


@pytest.mark.parametrize("variance", [0.0, 1e-30, 1.0, 1 - 1e-15, 1 + 1e-15, 1e30])
@pytest.mark.parametrize("shift", [0.0, 1e-200, 1.0, 1e6])
def test_dividing_by_the_prior_is_finite(variance: float, shift: float) -> None:
    eye = torch.eye(3, dtype=torch.float64)
    mean = torch.full((3,), shift, dtype=torch.float64)
    past = divide_by_prior(eye, 0 * mean, mean, variance**0.5 * eye, 3.0)
    for value in past:
        assert torch.isfinite(value).all()
    # The posterior of the stored rows has the mean of q, wherever q had one.
    gain = past.U.mT @ torch.linalg.inv(past.U @ past.U.mT + eye)
    torch.testing.assert_close(gain @ past.g, mean, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("q", GAUSSIANS)
def test_moving_to_more_points_keeps_predictions(q: type) -> None:
    """The old points are among the new ones, so nothing is lost."""
    model = Model(grid(8), q, jitter=1e-8)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    x, y = data(40)
    train(model, likelihood, x, y, steps=30, lr=0.01)
    x_test = grid(30, -0.3, 1.3)
    mean, variance = predict(model, x_test)
    z = torch.cat([model.strategy.inducing_points, grid(5, 1.05, 1.5)]).detach()
    model.strategy.absorb(z[torch.randperm(13)])
    assert model.strategy._variational_distribution.num_inducing_points == 13
    mean_after, variance_after = predict(model, x_test)
    torch.testing.assert_close(mean_after, mean, rtol=0, atol=1e-5)
    if q is not MeanFieldVariationalDistribution:  # which drops correlations
        torch.testing.assert_close(variance_after, variance, rtol=0, atol=1e-5)


def test_absorbing_the_same_points_changes_no_parameter() -> None:
    model = Model(grid(5))
    randomize(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.strategy.absorb()
    model.strategy.absorb(grid(5))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_minibatches_scale_to_the_new_batch() -> None:
    model = Model(grid(6))
    randomize(model)
    model.strategy.absorb()
    change_hyperparameters(model, 1.1)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    x, y = data(20)
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=20)
    parts = [mll(model(x[i : i + 5]), y[i : i + 5]) for i in range(0, 20, 5)]
    torch.testing.assert_close(torch.stack(parts).mean(), mll(model(x), y))


# Batches, wrappers, kernels


@pytest.mark.parametrize("q", GAUSSIANS)
def test_a_batch_of_models_equals_single_models(q: type) -> None:
    z = torch.stack([grid(5), grid(5, 0.2, 1.4)])
    batch = Model(z, q, batch_shape=torch.Size([2]))
    singles = [Model(z[i], q) for i in range(2)]
    for model in (batch, *singles):
        model.strategy.variational_params_initialized.fill_(1)
    torch.manual_seed(0)
    _randomize_any(batch.strategy)
    q_batch = batch.strategy._variational_distribution
    for i, single in enumerate(singles):
        state = {name: p[i] for name, p in q_batch.state_dict().items()}
        single.strategy._variational_distribution.load_state_dict(state)
    new = torch.stack([grid(7), grid(7, 0.1, 1.2)])
    results = []
    for model, z_c in ((batch, new), (singles[0], new[0]), (singles[1], new[1])):
        result = model.strategy.absorb(z_c)
        change_hyperparameters(model, 1.2)
        x = grid(4) if model is not batch else grid(4).expand(2, 4, 1)
        terms = model.strategy.kl_terms()
        results.append((*predict(model, x), *terms, result.information))
    for together, one, two in zip(*results, strict=True):
        torch.testing.assert_close(together, torch.stack([one, two]))


def test_one_set_of_points_serves_a_batch_of_functions() -> None:
    shape = torch.Size([3])
    model = Model(grid(5), batch_shape=shape)
    randomize(model)
    assert model.strategy.absorb(grid(6)).num_clipped.shape == shape
    assert model.strategy.old_U.shape == (3, 5, 5)
    assert model.strategy.old_inducing_points.shape == (5, 1)
    assert model.strategy.kl_divergence().shape == shape
    assert model(grid(4)).batch_shape == shape


def multitask(task_dim: int = -1) -> Callable[..., Any]:
    return lambda base: IndependentMultitaskStreamingStrategy(base, 2, task_dim)


def lmc() -> Callable[..., Any]:
    return lambda base: LMCStreamingStrategy(base, num_tasks=3, num_latents=2)


@pytest.mark.parametrize("wrap", [multitask(), lmc()], ids=["independent", "lmc"])
def test_wrappers_carry_the_past(wrap: Callable[..., Any]) -> None:
    model = Model(grid(5), batch_shape=torch.Size([2]), wrap=wrap).double()
    base = model.strategy.base_variational_strategy
    _randomize_any(base)
    base.variational_params_initialized.fill_(1)
    result = model.strategy.absorb(grid(6))
    change_hyperparameters(model, 1.2)
    assert result.information.shape == (2,)

    terms = model.strategy.kl_terms()
    assert terms.old_data.abs() > 0.1
    torch.testing.assert_close(terms.prior + terms.old_data, base.kl_divergence().sum())
    torch.testing.assert_close(model.strategy.kl_divergence(), sum(terms))

    output = model(grid(7))
    num_tasks = output.event_shape[-1]
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks).double()
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=7)
    loss = -mll(output, torch.zeros(7, num_tasks, dtype=torch.float64))
    assert loss.shape == ()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    with pytest.raises(NotImplementedError, match="condition_on_observations"):
        model.get_fantasy_model(grid(3), torch.zeros(3, dtype=torch.float64))


def test_the_task_dimension_is_the_one_that_is_summed() -> None:
    shape = torch.Size([2, 3])
    model = Model(grid(4), batch_shape=shape, wrap=multitask(task_dim=-2))
    assert model.strategy.kl_divergence().shape == (3,)
    single = Model(grid(4), wrap=multitask())
    assert single.strategy.kl_divergence().shape == ()


def test_wrappers_refuse_a_strategy_without_memory() -> None:
    with pytest.raises(ArgumentError, match="StreamingVariationalStrategy"):
        Model(
            grid(4),
            strategy=VariationalStrategy,
            batch_shape=torch.Size([2]),
            wrap=multitask(),
        )


class DeepKernelModel(Model):
    """Features of a small network under the kernel."""

    def __init__(self, z: Tensor) -> None:
        super().__init__(z)
        self.features = torch.nn.Sequential(
            torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
        ).to(z.dtype)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return super().forward(self.features(x))


def test_deep_kernels_stream() -> None:
    model = DeepKernelModel(grid(6))
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    for i in range(3):
        x, y = data(20, 0.5 * i, 0.5 * i + 0.5)
        losses = train(model, likelihood, x, y, steps=20, lr=0.02)
        assert losses[-1] < losses[0]
        model.strategy.absorb(grid(6 + 2 * i, 0.0, 0.5 * i + 0.5))
    assert all(p.grad is not None for p in model.features.parameters())


def test_deep_gps_stream() -> None:
    from gpytorch.models.deep_gps import DeepGP, DeepGPLayer

    class Layer(DeepGPLayer):
        def __init__(self) -> None:
            z = torch.randn(2, 5, 1)
            q = CholeskyVariationalDistribution(5, batch_shape=torch.Size([2]))
            strategy = StreamingVariationalStrategy(self, z, q)
            super().__init__(strategy, input_dims=1, output_dims=2)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.RBFKernel()

        def forward(self, x: Tensor) -> MultivariateNormal:
            return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Deep(DeepGP):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: Tensor) -> Any:
            return self.layer(x)

    deep = Deep()
    deep(torch.randn(6, 1))
    strategy = deep.layer.variational_strategy
    _randomize_any(strategy)
    strategy.absorb(torch.randn(2, 7, 1))
    deep(torch.randn(6, 1))
    total = deep.variational_strategy.kl_divergence()
    torch.testing.assert_close(total, strategy.kl_divergence().sum())


def test_a_delta_distribution_trains_but_cannot_be_absorbed() -> None:
    model = Model(grid(4), DeltaVariationalDistribution)
    with pytest.raises(ArgumentError, match="no covariance"):
        model.strategy.absorb()
    source = Model(grid(4))
    randomize(source)
    source.strategy.absorb()
    for name in ("old_inducing_points", "old_U", "old_g", "old_log_evidence"):
        setattr(model.strategy, name, getattr(source.strategy, name))
    assert torch.isfinite(model.strategy.kl_divergence())


# Optimisers go on


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_and_its_scheduler_go_on_over_resizing(name: str) -> None:
    model = Model(grid(5))
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    optimizer = OPTIMIZERS[name]([*model.parameters(), *likelihood.parameters()])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    objects = {id(p) for p in model.parameters()}
    for i in range(3):
        x, y = data(15, 0.5 * i, 0.5 * i + 0.6)
        mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=15)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = -mll(model(x), y)  # noqa: B023
            loss.backward()
            return loss

        for _ in range(5):
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            loss = optimizer.step(closure)  # stays alive during absorb, as in scripts
            scheduler.step()
        for n, p in model.named_parameters():
            assert not torch.equal(before[n], p), n
        model.strategy.absorb(grid(5 + 3 * i, 0.0, 0.5 * i + 0.6), optimizer=optimizer)
        assert loss.isfinite()
        assert {id(p) for p in model.parameters()} == objects
    assert model.strategy.inducing_points.shape == (11, 1)


def test_several_optimizers_are_told() -> None:
    model = Model(grid(5), NaturalVariationalDistribution)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    ngd = gpytorch.optim.NGD(model.variational_parameters(), num_data=15, lr=0.1)
    adam = torch.optim.Adam(
        [*model.hyperparameters(), *likelihood.parameters()], lr=0.01
    )
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=15)
    for num in (9, 4):
        x, y = data(15)
        for _ in range(3):
            ngd.zero_grad()
            adam.zero_grad()
            (-mll(model(x), y)).backward()
            ngd.step()
            adam.step()
        model.strategy.absorb(grid(num), optimizer=[ngd, adam])
        assert model.strategy.inducing_points not in adam.state
        assert model.covar_module.raw_outputscale in adam.state
    assert len(model.strategy.inducing_points) == 4


def test_optimizers_may_come_from_a_generator() -> None:
    model = Model(grid(5))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    model(grid(6)).mean.sum().backward()
    adam.step()
    z = model.strategy.inducing_points
    assert z in adam.state
    model.strategy.absorb(grid(7), optimizer=(one for one in [adam]))
    assert z not in adam.state
    model(grid(6)).mean.sum().backward()
    adam.step()


def test_a_live_graph_is_survived_and_reported() -> None:
    model = Model(grid(5))
    randomize(model)
    x, _ = data(8)
    output = model(x)
    kl = model.strategy.kl_divergence()  # never run backward
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    model.strategy.absorb(grid(7), optimizer=adam)  # the optimiser is told
    held = {id(p) for group in adam.param_groups for p in group["params"]}
    assert {id(p) for p in model.parameters()} <= held
    del output, kl

    output = model(x).mean.sum() + model.strategy.kl_divergence()
    with pytest.warns(StreamingGPWarning, match="new parameter") as caught:
        model.strategy.absorb(grid(6))
    assert {warning.filename for warning in caught} == {__file__}
    assert model(x).mean.shape == (8,)
    del output


def test_fixed_inducing_points_stay_a_buffer() -> None:
    model = Model(grid(5), learn=False)
    randomize(model)
    model.strategy.absorb(grid(8))
    assert "inducing_points" in dict(model.strategy.named_buffers())
    assert model.strategy.inducing_points.shape == (8, 1)
    fresh = Model(grid(5), learn=False)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.strategy.inducing_points, grid(8))


# State


def streamed() -> Model:
    model = Model(grid(5))
    randomize(model)
    model.strategy.absorb(grid(8))
    change_hyperparameters(model, 1.1)
    randomize(model)
    return model


def assert_same(a: Model, b: Model) -> None:
    x = grid(10, -0.2, 1.2)
    for u, v in zip(predict(a, x), predict(b, x), strict=True):
        torch.testing.assert_close(u, v)
    torch.testing.assert_close(a.strategy.kl_divergence(), b.strategy.kl_divergence())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("num", [3, 8])
def test_a_state_with_another_number_of_points_loads(num: int, assign: bool) -> None:
    source, target = streamed(), Model(grid(num))
    predict(target, grid(3))  # something to forget
    before = target.strategy.inducing_points
    target.load_state_dict(source.state_dict(), assign=assign)
    assert_same(source, target)
    if not assign:
        assert target.strategy.inducing_points is before
    # No storage is shared with the source.
    with torch.no_grad():
        source.strategy.inducing_points.add_(1.0)
    if not assign:
        assert target.strategy.inducing_points.max() <= 1


def test_a_state_of_version_0_1_loads() -> None:
    path = Path(__file__).parent / "data" / "strategy_v1.pt"
    saved = torch.load(path, weights_only=True)
    model = Model(grid(4))
    model.load_state_dict(saved["state"])
    mean, variance = predict(model, grid(10, -0.2, 1.2))
    torch.testing.assert_close(mean, saved["mean"])
    torch.testing.assert_close(variance, saved["variance"])
    torch.testing.assert_close(model.strategy.kl_divergence().detach(), saved["kl"])


def test_a_state_without_past_replaces_one_with_past() -> None:
    source, target = Model(grid(4)), streamed()
    randomize(source)
    target.load_state_dict(source.state_dict())
    assert not target.strategy.has_old_posterior
    assert_same(source, target)


def test_a_state_of_gpytorchs_strategy_loads() -> None:
    stock = Model(grid(6), strategy=VariationalStrategy)
    predict(stock, grid(3))
    model = streamed()
    model.load_state_dict(stock.state_dict())
    assert not model.strategy.has_old_posterior
    assert_same(stock, model)


def test_a_state_of_another_dtype_loads() -> None:
    source, target = streamed(), Model(grid(3)).float()
    target.load_state_dict(source.state_dict())
    assert target.strategy.old_inducing_points.dtype == torch.float32
    kl = target.strategy.kl_divergence()
    assert kl.dtype == torch.float32
    expected = source.strategy.kl_divergence()
    torch.testing.assert_close(kl.double(), expected, rtol=1e-2, atol=0)


def test_a_state_of_another_batch_shape_is_refused() -> None:
    model = Model(grid(5))
    batch = Model(grid(5), batch_shape=torch.Size([2]))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(batch.state_dict())


@pytest.mark.parametrize("how", ["missing", "unexpected", "shape", "batch"])
def test_a_state_can_be_loaded_whole_or_not_at_all(how: str) -> None:
    model, reference, state = Model(grid(5)), Model(grid(5)), streamed().state_dict()
    if how == "missing":
        del state["variational_strategy.old_g"]
    elif how == "unexpected":
        state["nonsense"] = torch.zeros(1)
    elif how == "shape":
        state["covar_module.raw_outputscale"] = torch.zeros(4, 5)
    else:
        state = Model(grid(8), batch_shape=torch.Size([2])).state_dict()
    parameters = list(model.parameters())
    with pytest.raises(RuntimeError, match="loading state_dict"):
        atomic_change(lambda: model.load_state_dict(state), [model])
    assert_same(model, reference)
    now, before = model.state_dict(), reference.state_dict()
    assert all(torch.equal(now[name], before[name]) for name in before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_the_state_keeps_an_empty_past() -> None:
    keys = Model(grid(4)).state_dict().keys()
    assert "variational_strategy.old_U" in keys


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "deepcopy after eval"])
def test_copies_are_equal_and_independent(how: str) -> None:
    model = streamed()
    if how == "deepcopy after eval":
        model.eval()
        model(grid(3))  # keeps a factor with a graph
    clone = pickle.loads(pickle.dumps(model)) if how == "pickle" else None
    clone = copy.deepcopy(model) if clone is None else clone
    assert clone.strategy.model is clone
    assert_same(model, clone)
    with torch.no_grad():
        clone.strategy.old_g.add_(1.0)
        assert model.strategy.kl_divergence() != clone.strategy.kl_divergence()


def test_conversion_to_another_dtype() -> None:
    model = streamed()
    mean, variance = predict(model, grid(6))
    kl = model.strategy.kl_divergence().detach()
    model.eval()
    model(grid(3))
    model.float()
    mean_32, variance_32 = predict(model, grid(6).float())
    assert mean_32.dtype == torch.float32
    torch.testing.assert_close(mean_32.double(), mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(variance_32.double(), variance, rtol=0, atol=1e-3)
    torch.testing.assert_close(
        model.strategy.kl_divergence().double(), kl, rtol=1e-2, atol=0
    )
    model.strategy.absorb(grid(4).float())
    assert model.strategy.inducing_points.dtype == torch.float32
    assert model.strategy.kl_divergence().dtype == torch.float32


def test_what_is_stored_does_not_follow_training() -> None:
    model = Model(grid(5))
    randomize(model)
    model.strategy.absorb()
    stored = {n: b.clone() for n, b in model.strategy.named_buffers() if "old" in n}
    assert not any(b.requires_grad for b in stored.values())
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    train(model, likelihood, *data(10), steps=5, lr=0.1)
    for name, buffer in stored.items():
        assert torch.equal(buffer, model.strategy.get_buffer(name)), name


def test_evaluation_with_gradients_can_be_repeated() -> None:
    model = streamed()
    model.eval()
    x = grid(3).requires_grad_()
    for _ in range(2):
        model(x).mean.sum().backward()
    assert torch.isfinite(x.grad).all()


# Refusals leave everything as it was


def test_a_refused_absorb_changes_nothing() -> None:
    model = streamed()
    nan = grid(4) * float("nan")
    cases: list[tuple[type[Exception], dict[str, Any]]] = [
        (ShapeError, {"inducing_points": torch.zeros(4, 2, dtype=torch.float64)}),
        (ShapeError, {"inducing_points": torch.zeros(0, 1, dtype=torch.float64)}),
        (ShapeError, {"inducing_points": torch.zeros(2, 4, 1, dtype=torch.float64)}),
        (ShapeError, {"inducing_points": torch.zeros(4, dtype=torch.float64)}),
        (DtypeError, {"inducing_points": grid(4).float()}),
        (NonFiniteError, {"inducing_points": nan}),
        (ArgumentError, {"max_surprise": 0.0}),
    ]
    before = copy.deepcopy(model.state_dict())
    for error, arguments in cases:
        with pytest.raises(error):
            model.strategy.absorb(**arguments)
    with torch.no_grad():
        model.covar_module.raw_outputscale.fill_(float("nan"))
    with pytest.raises(FactorizationError, match="unchanged"):
        model.strategy.absorb(grid(4))
    with torch.no_grad():
        model.covar_module.raw_outputscale.copy_(before["covar_module.raw_outputscale"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    with torch.no_grad():
        model.strategy._variational_distribution.variational_mean[1] = float("nan")
    with pytest.raises(NonFiniteError, match="unchanged"):
        model.strategy.absorb(grid(4))
    assert torch.equal(model.strategy.old_g, before["variational_strategy.old_g"])


def test_an_unknown_distribution_absorbs_where_it_is() -> None:
    class Own(gpytorch.variational._VariationalDistribution):
        def __init__(self, num: int, batch_shape: Any, mean_init_std: float) -> None:
            super().__init__(num, batch_shape, mean_init_std)
            self.mean = torch.nn.Parameter(torch.ones(num))

        def forward(self) -> MultivariateNormal:
            covar = 0.3 * torch.eye(len(self.mean), dtype=self.mean.dtype)
            return MultivariateNormal(self.mean, covar)

        def initialize_variational_distribution(self, prior: Any) -> None:
            pass

    model = Model(grid(4), Own)
    model.strategy.absorb()
    assert model.strategy.kl_divergence().abs() < 1e-9
    with pytest.raises(ArgumentError, match="Own"):
        model.strategy.absorb(grid(6))


def test_a_shared_q_under_a_batch_of_kernels_cannot_move() -> None:
    kernel = gpytorch.kernels.MaternKernel(batch_shape=torch.Size([2]))
    model = Model(grid(4), kernel=kernel)
    model.covar_module.base_kernel.lengthscale = torch.tensor([[[0.2]], [[0.5]]])
    randomize(model)
    model.strategy.absorb()
    assert model.strategy.kl_divergence().shape == (2,)
    with pytest.raises(ShapeError, match="batch_shape"):
        model.strategy.absorb(grid(6))


@pytest.mark.filterwarnings("ignore:A not p.d.")
def test_coinciding_points_are_survived() -> None:
    z = torch.cat([grid(4), grid(4)])
    model = Model(z, jitter=1e-6)
    randomize(model, 0.01)
    model.strategy.absorb()
    assert model.strategy.kl_divergence().abs() < 1e-6


def test_fantasies_are_refused_with_a_reason() -> None:
    model = Model(grid(4))
    assert not model.strategy.has_fantasy_strategy
    with pytest.raises(NotImplementedError, match="condition_on_observations"):
        model.get_fantasy_model(grid(2), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="condition_on_observations"):
        model.strategy.amortized_exact_gp()


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(strategy).attempted > 0
    assert doctest.testmod(strategy).failed == 0

"""Surrogates learn: construction, memory, fits and options."""

import warnings
from copy import deepcopy
from dataclasses import fields

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import (
    Standardize,
)
from botorch.utils.datasets import SupervisedDataset
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from oracles import batch_vfe, predict
from surrogate_models import assert_same_posterior, data, inputs, pair
from torch_ssgp import UpdateOptions
from torch_ssgp.exceptions import (
    ArgumentError,
    BudgetWarning,
    UnknownOptionError,
)
from torch_ssgp.surrogates import SingleTaskStreamingGP


def test_fit_finds_the_hyperparameters_of_the_exact_fit() -> None:
    X, Y = data(25)
    exact, ours = SingleTaskGP(X, Y), SingleTaskStreamingGP(X, Y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(exact.likelihood, exact))
    mll = ExactMarginalLogLikelihood(ours.likelihood, ours)
    assert fit_gpytorch_mll(mll) is mll
    assert not mll.training
    torch.testing.assert_close(
        ours.covar_module.lengthscale,
        exact.covar_module.lengthscale,
        rtol=0.03,
        atol=0.0,
    )
    test_X = inputs(50)
    torch.testing.assert_close(
        ours.posterior(test_X).mean,
        exact.posterior(test_X).mean,
        rtol=0.0,
        atol=0.02 * float(Y.std()),
    )


def test_streamed_fit_finds_the_hyperparameters_of_the_exact_fit() -> None:
    X, Y = data(40)
    exact = SingleTaskGP(X, Y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(exact.likelihood, exact))
    ours = SingleTaskStreamingGP(X[:10], Y[:10])
    ours.fit()
    for rows in torch.arange(10, 40).split(10):
        ours.update(X[rows], Y[rows], restandardize=True, num_steps=200)
    torch.testing.assert_close(
        ours.covar_module.lengthscale,
        exact.covar_module.lengthscale,
        rtol=0.05,
        atol=0.0,
    )


def test_an_evaluation_that_surprises_is_learned_from_at_once() -> None:
    X, Y = data(30)
    ours = SingleTaskStreamingGP(X, Y)
    ours.fit()
    new_X = inputs(1)
    posterior = ours.posterior(new_X, observation_noise=True)
    for deviations, learned in ((0.5, False), (8.0, True)):
        model = deepcopy(ours)
        new_Y = posterior.mean + deviations * posterior.variance.sqrt()
        assert model.update(new_X, new_Y).learned == learned


def test_an_update_leaves_hyperparameters_that_fit_only_the_past() -> None:
    X, Y = data(30)
    ours = SingleTaskStreamingGP(X[:5], Y[:5])
    ours.fit()
    # A mode far from the data: the lengthscales of another function.
    ours.covar_module.lengthscale = torch.tensor([[0.03, 20.0]], dtype=torch.float64)
    ours.update(X[5:], Y[5:], restandardize=True)
    fresh = SingleTaskStreamingGP(X, Y)
    fresh.fit()
    torch.testing.assert_close(
        ours.covar_module.lengthscale,
        fresh.covar_module.lengthscale,
        rtol=0.1,
        atol=0.0,
    )


def test_memory_is_half_as_large_again_as_a_compression_by_default() -> None:
    X, Y = data(30)
    assert 9 <= SingleTaskStreamingGP(X, Y, num_inducing=6).model.memory_size <= 10
    ours = SingleTaskStreamingGP(X, Y, num_inducing=6, memory_size=9)
    # Nothing is compressed under hyperparameters that nobody has learned.
    assert ours.model.memory.num_raw == 30
    ours.fit(num_steps=5)
    assert (ours.model.memory.num_points, ours.model.memory.num_raw) == (6, 0)
    ours.update(X[:1] + 0.01, Y[:1], num_steps=0)
    assert (ours.model.memory.num_points, ours.model.memory.num_raw) == (7, 1)
    with pytest.raises(ArgumentError, match="at least as many rows"):
        SingleTaskStreamingGP(X, Y, num_inducing=6, memory_size=5)


@pytest.mark.parametrize("memory_size", [8, 12])
def test_data_of_the_constructor_are_compressed_once_they_are_learned_from(
    memory_size: int,
) -> None:
    X, Y = data(40)
    ours = SingleTaskStreamingGP(X, Y, num_inducing=8, memory_size=memory_size)
    bound = ours.fit(num_steps=30).bound
    z, y = ours.inducing_points, ours.outcome_transform(Y)[0].squeeze(-1)

    def kernel(x1: Tensor, x2: Tensor) -> Tensor:
        return ours.covar_module(x1, x2).to_dense()

    with torch.no_grad():
        noise, mean_module = ours.likelihood.noise, ours.mean_module
        expected = batch_vfe(kernel, X, y, z, noise, mean_module, jitter=1e-8)
        mean, covariance = predict(kernel, z, expected, X, mean_module, jitter=1e-8)
    assert z.size(-2) == 8
    torch.testing.assert_close(bound, expected.bound, rtol=1e-5, atol=1e-5)
    latent = ours.model(X)
    torch.testing.assert_close(latent.mean, mean, rtol=1e-5, atol=1e-5)
    covariance = covariance.diagonal()
    torch.testing.assert_close(latent.variance, covariance, rtol=1e-5, atol=1e-5)


def test_losses_are_warned_of_once_and_not_before_anything_is_learned() -> None:
    X = inputs(60)
    Y = torch.sin(40 * X).sum(-1, keepdim=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        ours = SingleTaskStreamingGP(X[:40], Y[:40], num_inducing=5)
    ours.covar_module.lengthscale = 0.05
    with pytest.warns(BudgetWarning, match="onto 5 points") as caught:
        ours.update(X[40:50], Y[40:50], num_steps=0)
    assert "time" not in str(caught[0].message)  # a word of streams, not of BoTorch
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        ours.update(X[50:], Y[50:], num_steps=0)
        ours.fit(num_steps=0)


def test_construct_inputs_returns_the_data() -> None:
    X, Y = data()
    Yvar = torch.full_like(Y, 0.1)
    dataset = SupervisedDataset(
        X, Y, Yvar=Yvar, feature_names=["a", "b"], outcome_names=["y"]
    )
    arguments = SingleTaskStreamingGP.construct_inputs(dataset)
    assert arguments["train_X"] is X or torch.equal(arguments["train_X"], X)
    assert torch.equal(arguments["train_Y"], Y)
    assert torch.equal(arguments["train_Yvar"], Yvar)
    arguments = SingleTaskStreamingGP.construct_inputs(
        dataset, num_inducing=7, memory_size=9
    )
    model = SingleTaskStreamingGP(**arguments)
    assert model.model.num_inducing == 7
    assert model.model.memory_size == 9


def test_custom_modules_are_kept() -> None:
    X, Y = data()
    kernel, mean = ScaleKernel(MaternKernel(ard_num_dims=2)), ConstantMean()
    ours = SingleTaskStreamingGP(X, Y, covar_module=kernel, mean_module=mean)
    assert ours.covar_module is kernel
    assert ours.mean_module is mean


def test_a_young_model_is_exact_with_a_kernel_of_ones_own() -> None:
    X, Y = data(9)
    kernel = ScaleKernel(MaternKernel(ard_num_dims=2))
    ours = SingleTaskStreamingGP(X[:6], Y[:6], covar_module=kernel)
    ours.update(X[6:], Y[6:], restandardize=True)
    exact = SingleTaskGP(X, Y, covar_module=deepcopy(kernel))
    exact.load_state_dict(
        {
            name: ours.model.state_dict().get(name, value)
            for name, value in exact.state_dict().items()
        }
    )
    test_X = inputs(5)
    assert_same_posterior(ours.posterior(test_X), exact.eval().posterior(test_X))


def test_duplicate_inputs_need_no_more_inducing_points() -> None:
    X, Y = data(5)
    ours = SingleTaskStreamingGP(X.repeat(3, 1), Y.repeat(3, 1), num_inducing=8)
    ours.fit(num_steps=0)
    assert ours.inducing_points.size(-2) == 5
    assert torch.isfinite(ours.posterior(X).variance).all()


def test_updates_take_values_and_leave_graphs_alone() -> None:
    X, Y = data(6)
    weight = torch.ones((), dtype=X.dtype, requires_grad=True)
    for transform in (None, Standardize(m=1)):
        ours = SingleTaskStreamingGP(
            weight * X,
            weight * Y,
            covar_module=MaternKernel(),
            outcome_transform=transform,
        )
        ours.update(weight * X + 0.01, weight * Y, num_steps=2, restandardize=transform)
        ours.fit(num_steps=2)
        assert not any(buffer.requires_grad for buffer in ours.buffers())
    assert weight.grad is None


def test_every_option_of_an_update_is_taken() -> None:
    _, ours, _ = pair()
    X, Y = data(2)
    for field in fields(UpdateOptions):
        option = {field.name: getattr(UpdateOptions(num_steps=0), field.name)}
        ours.update(X, Y, **{"num_steps": 0, **option})
        if field.name != "forget":
            ours.fit(**{"num_steps": 0, **option})


@pytest.mark.parametrize("method", ["update", "fit"])
def test_an_unknown_option_is_named_with_those_that_exist(method: str) -> None:
    _, ours, _ = pair()
    arguments = data(2) if method == "update" else ()
    with pytest.raises(UnknownOptionError, match="num_steps") as error:
        getattr(ours, method)(*arguments, num_step=3)
    assert isinstance(error.value, TypeError)
    assert f"{method} has no option 'num_step'. Did you mean" in str(error.value)
    assert "learn_hyperparameters" in str(error.value)


def test_fit_forgets_nothing() -> None:
    _, ours, _ = pair()
    with pytest.raises(UnknownOptionError, match="'forget'"):
        ours.fit(forget=0.9)


@pytest.mark.parametrize("method", ["update", "fit"])
def test_warnings_point_at_the_line_of_the_caller(method: str) -> None:
    X = inputs(50)
    Y = torch.sin(40 * X).sum(-1, keepdim=True)
    ours = SingleTaskStreamingGP(X[:40], Y[:40], num_inducing=5)
    ours.covar_module.lengthscale = 0.05
    with pytest.warns(BudgetWarning) as caught:
        if method == "update":
            ours.update(X[40:], Y[40:], num_steps=0)
        else:
            ours.fit(num_steps=0)
    assert {warning.filename for warning in caught} == {__file__}


class Fragile(MaternKernel):
    """A kernel without finite values at long lengthscales, apart from one."""

    def forward(self, x1: Tensor, x2: Tensor, **params: object) -> Tensor:
        length = self.lengthscale.max()
        broken = (length > 50) & ((length - 60).abs() > 1e-6)
        return torch.where(broken, torch.nan, super().forward(x1, x2, **params))


def fragile() -> SingleTaskStreamingGP:
    X, Y = data(8)
    ours = SingleTaskStreamingGP(X, Y, covar_module=Fragile())
    ours.fit(num_steps=20)
    return ours


@pytest.mark.parametrize("length", [1000.0, 60.0])
def test_a_discarded_restart_does_not_warn(length: float) -> None:
    ours = fragile()
    kernel = ours.covar_module
    raw = kernel.raw_lengthscale_constraint.inverse_transform(torch.tensor(length))
    names = [name for name, _ in ours.model.named_parameters()]
    index = names.index("covar_module.raw_lengthscale")
    # The fresh start breaks down at once, or after its first step.
    getattr(ours.model.start, f"p{index}").fill_(raw.double())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = ours.update(*data(20), learn_hyperparameters=True, num_steps=20)
    assert result.status == "ok" and not bool(result.restarted)
    assert bool(kernel.lengthscale < 50)


def test_a_fresh_start_is_tried_if_the_first_start_breaks_down() -> None:
    ours = fragile()
    ours.covar_module.lengthscale = 1000.0
    result = ours.update(*data(20), learn_hyperparameters=True, num_steps=20)
    assert bool(result.restarted)
    assert bool(ours.covar_module.lengthscale < 50)

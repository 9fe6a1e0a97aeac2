"""Units of the outcomes: transforms, and restandardising."""

import warnings
from copy import deepcopy

import pytest
import torch
from botorch.exceptions.errors import (
    UnsupportedError,
)
from botorch.exceptions.warnings import InputDataWarning
from botorch.models import SingleTaskGP
from botorch.models.transforms import (
    Log,
    Normalize,
)
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from torch import Tensor

from surrogate_models import assert_same_posterior, data, inputs
from torch_ssgp import functional as fn
from torch_ssgp.surrogates import SingleTaskStreamingGP


def test_predictions_are_in_original_units() -> None:
    X, Y = data(40)
    X, Y = 50 * X - 10, 1000 * Y + 5000
    ours = SingleTaskStreamingGP(X[:20], Y[:20], input_transform=Normalize(d=2))
    ours.fit()
    ours.update(X[20:], Y[20:])
    error = (ours.posterior(X).mean - Y).abs().max()
    assert float(error) < 0.1 * float(Y.std())
    centre = X.mean(0, keepdim=True)
    noise = ours.posterior(centre, observation_noise=True).variance
    noise = noise - ours.posterior(centre).variance
    # Outcomes have a noise of 0.05, in units of a thousandth.
    assert 20 < float(noise.sqrt()) < 120


def test_transforms_stay_frozen() -> None:
    X, Y = data()
    ours = SingleTaskStreamingGP(X, Y, input_transform=Normalize(d=2))
    state = {
        key: value.clone()
        for key, value in ours.state_dict().items()
        if "transform" in key
    }
    assert state
    ours.train()
    ours.update(3 * X, 100 * Y + 7, num_steps=2)
    ours.fit(num_steps=2)
    ours.posterior(5 * X)
    for key, value in state.items():
        assert torch.equal(ours.state_dict()[key], value)


def test_a_far_batch_of_another_scale_leaves_earlier_predictions() -> None:
    X, Y = data(15)
    kernel = ScaleKernel(MaternKernel())
    kernel.base_kernel.lengthscale = 0.1
    likelihood = GaussianLikelihood(noise_constraint=GreaterThan(1e-8))
    likelihood.noise = 0.01
    ours = SingleTaskStreamingGP(X, Y, likelihood=likelihood, covar_module=kernel)
    before = ours.posterior(X)
    far = X + 50
    ours.update(far, 30 * Y + 200, learn_hyperparameters=False, num_steps=0)
    assert_same_posterior(ours.posterior(X), before, 1e-6)
    # The new units do not change them either.
    ours.restandardize()
    assert_same_posterior(ours.posterior(X), before, 1e-6)
    assert float(ours.outcome_transform.stdvs) > 10 * float(Y.std())


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("noisy", [False, True])
def test_restandardizing_is_standardizing_all_data(
    m: int, batch: tuple[int, ...], noisy: bool
) -> None:
    X, Y = data(20, m, batch)
    Y[..., 10:, :] = 0.5 * Y[..., 10:, :] + 1
    Yvar = 0.1 + 0.1 * torch.rand_like(Y) if noisy else None

    def part(value: Tensor | None, rows: slice) -> Tensor | None:
        return None if value is None else value[..., rows, :]

    first, second = slice(0, 10), slice(10, 20)
    ours = SingleTaskStreamingGP(X[..., first, :], Y[..., first, :], part(Yvar, first))
    ours.update(X[..., second, :], Y[..., second, :], part(Yvar, second), num_steps=0)
    ours.restandardize()
    whole = SingleTaskGP(X, Y, Yvar)
    torch.testing.assert_close(
        ours.outcome_transform.means, whole.outcome_transform.means
    )
    torch.testing.assert_close(
        ours.outcome_transform.stdvs, whole.outcome_transform.stdvs
    )
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(dict(ours.model.named_parameters())[name])
    whole.eval()
    test_X = inputs(*batch, 5)
    assert_same_posterior(ours.posterior(test_X), whole.posterior(test_X))
    # The same in one call.
    at_once = SingleTaskStreamingGP(
        X[..., first, :], Y[..., first, :], part(Yvar, first)
    )
    at_once.update(
        X[..., second, :],
        Y[..., second, :],
        part(Yvar, second),
        num_steps=0,
        restandardize=True,
    )
    assert_same_posterior(at_once.posterior(test_X), ours.posterior(test_X))


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("noise", ["inferred", "known", "both"])
@pytest.mark.parametrize("memory_size", [40, 12, 8])
def test_restandardizing_is_being_built_in_the_new_units(
    m: int, noise: str, memory_size: int
) -> None:
    X, Y = data(24, m)
    Yvar = None if noise == "inferred" else 0.01 + 0.02 * torch.rand_like(Y)
    outputs = torch.Size([m] if m > 1 else [])
    kernel = ScaleKernel(MaternKernel(batch_shape=outputs), batch_shape=outputs)
    kernel.base_kernel.lengthscale = 0.4
    options = {"num_inducing": 8, "memory_size": memory_size}
    likelihood = None
    if noise == "both":
        likelihood = FixedNoiseGaussianLikelihood(
            torch.ones(*outputs, 1), learn_additional_noise=True, batch_shape=outputs
        )
        likelihood.second_noise = 0.02

    def streamed(model: SingleTaskStreamingGP, Y: Tensor, Yvar: Tensor | None) -> None:
        for rows in (slice(15, 20), slice(20, 24)):
            noise = None if Yvar is None else Yvar[rows]
            model.update(X[rows], Y[rows], noise, num_steps=0)

    def first(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[:15]

    ours = SingleTaskStreamingGP(
        X[:15],
        Y[:15],
        first(Yvar),
        covar_module=kernel,
        likelihood=likelihood,
        **options,
    )
    ours.mean_module.constant = torch.full(outputs, 0.3)
    streamed(ours, Y, Yvar)
    means = torch.linspace(2, 3, m).double().expand(1, m)
    stdvs = torch.linspace(0.5, 7, m).double().expand(1, m)
    test_X = inputs(5)
    before = ours.posterior(test_X)
    ours.restandardize(means, stdvs)
    assert_same_posterior(ours.posterior(test_X), before, 1e-7)

    Y = (Y - means) / stdvs
    Yvar = None if Yvar is None else Yvar / stdvs.square()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InputDataWarning)
        built = SingleTaskStreamingGP(
            X[:15],
            Y[:15],
            first(Yvar),
            covar_module=deepcopy(ours.covar_module),
            mean_module=deepcopy(ours.mean_module),
            likelihood=deepcopy(ours.likelihood),
            outcome_transform=None,
            **options,
        )
    streamed(built, Y, Yvar)
    memories = ours.model.memory, built.model.memory
    assert memories[0].num_points == memories[1].num_points
    for again in (False, True):
        if again:  # in the new units
            ours.fit(num_steps=0)
            built.fit(num_steps=0)
        latents = [model.model(test_X) for model in (ours, built)]
        torch.testing.assert_close(
            latents[0].mean, latents[1].mean, rtol=1e-7, atol=1e-7
        )
        torch.testing.assert_close(
            latents[0].variance, latents[1].variance, rtol=1e-7, atol=1e-7
        )


def test_the_evidence_changes_with_the_units_by_their_jacobian() -> None:
    X, Y = data(15)
    kernel = ScaleKernel(MaternKernel())
    ours = SingleTaskStreamingGP(X, Y, num_inducing=10, covar_module=kernel)
    for form in ("shared", "sites"):
        if form == "sites":
            new_X, new_Y = data(2)
            ours.update(new_X, new_Y, torch.full_like(new_Y, 0.05), num_steps=0)
        before, n = ours.model.log_evidence(), float(ours.num_targets)
        old = ours.outcome_transform.stdvs.clone()
        ours.restandardize(torch.tensor(3.0), torch.tensor(1.5))
        change = ours.model.log_evidence() - before
        expected = -n * (old / 1.5).log().squeeze()
        torch.testing.assert_close(change, expected, rtol=1e-6, atol=1e-6)


def test_fit_after_restandardizing_learns_from_all_data_in_new_units() -> None:
    X, Y = data(20)
    Y[10:] = 4 * Y[10:]
    stepwise = SingleTaskStreamingGP(X[:10], Y[:10])
    stepwise.update(X[10:], Y[10:], num_steps=0)
    stepwise.restandardize()
    stepwise.fit(num_steps=10)
    at_once = SingleTaskStreamingGP(X[:10], Y[:10])
    options = {"num_steps": 10, "learn_hyperparameters": True}  # no step more
    at_once.update(X[10:], Y[10:], restandardize=True, **options)
    assert_same_posterior(stepwise.posterior(X), at_once.posterior(X), 1e-5)


def test_rescaled_rows_say_the_same_about_the_rescaled_function() -> None:
    U, g = torch.randn(2, 4, 3).double(), torch.randn(2, 4).double()
    past = fn.PseudoObservations(U, g, torch.rand(2).double(), torch.tensor(9.0))
    a = torch.randn(2, 3).double()
    c, e = torch.tensor([0.5, 3.0]).double(), torch.tensor([2.0, -1.0]).double()
    for shared in (True, False):
        s = torch.tensor([0.3, 0.7]).double() if shared else torch.ones(2).double()
        new_s = c.square() * s if shared else s

        def log_density(past: fn.PseudoObservations, a: Tensor, s: Tensor) -> Tensor:
            misfit = fn.squared_norm(past.g - fn.matvec(past.U, a)) + past.rho
            return -0.5 * past.n * s.log() - 0.5 * misfit / s

        new = fn.rescale(past, c, e, shared)
        change = log_density(new, c[:, None] * a + e[:, None], new_s)
        change = change - log_density(past, a, s)
        torch.testing.assert_close(change, -past.n * c.log())


def test_only_standardize_can_be_restandardized() -> None:
    X, Y = data()
    ours = SingleTaskStreamingGP(
        X, Y.exp(), covar_module=MaternKernel(), outcome_transform=Log()
    )
    with pytest.raises(UnsupportedError, match="Log"):
        ours.restandardize()


def test_outcomes_may_be_logged() -> None:
    X, Y = data()
    ours = SingleTaskStreamingGP(
        X, Y.exp(), covar_module=MaternKernel(), outcome_transform=Log()
    )
    ours.update(X[:2] + 0.1, Y[:2].exp(), num_steps=2)
    assert (ours.posterior(X).rsample(torch.Size([3])) > 0).all()


def test_forgetting_fades_the_moments_of_the_outcomes_too() -> None:
    X, Y = data(20)
    ours = SingleTaskStreamingGP(X[:15], Y[:15])
    ours.update(X[15:], Y[15:], forget=0.5, num_steps=0)
    weight = torch.cat([torch.full((15, 1), 0.5), torch.ones(5, 1)]).double()
    mean = (weight * Y).sum() / weight.sum()
    torch.testing.assert_close(ours.num_targets, weight.sum())
    torch.testing.assert_close(ours.target_mean.squeeze(), mean)
    squares = (weight * (Y - mean).square()).sum()
    torch.testing.assert_close(ours.target_squares.squeeze(), squares)

"""Surrogates against real BoTorch: agreement, acquisition functions, transforms."""

import importlib
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    PosteriorMean,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
    qMultiStepLookahead,
    qUpperConfidenceBound,
)
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.acquisition.joint_entropy_search import qJointEntropySearch
from botorch.acquisition.max_value_entropy_search import (
    qLowerBoundMaxValueEntropy,
    qMaxValueEntropy,
)
from botorch.acquisition.multi_objective import logei
from botorch.acquisition.multi_objective.logei import (
    qLogExpectedHypervolumeImprovement,
    qLogNoisyExpectedHypervolumeImprovement,
)
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.acquisition.utils import get_optimal_samples
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.exceptions.warnings import InputDataWarning
from botorch.fit import fit_gpytorch_mll
from botorch.generation import MaxPosteriorSampling
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms import (
    Bilog,
    ChainedInputTransform,
    ChainedOutcomeTransform,
    Log,
    Normalize,
    Power,
    Round,
    Standardize,
    Warp,
)
from botorch.models.transforms.input import InputStandardize, Log10
from botorch.optim import optimize_acqf
from botorch.posteriors import GPyTorchPosterior
from botorch.sampling import IIDNormalSampler, SobolQMCNormalSampler
from botorch.sampling.pathwise import draw_matheron_paths
from botorch.utils.datasets import SupervisedDataset
from botorch.utils.multi_objective.box_decompositions import (
    FastNondominatedPartitioning,
)
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood
from torch import Tensor

from torch_ssgp import StreamingGP, UpdateOptions
from torch_ssgp import functional as fn
from torch_ssgp.exceptions import (
    ArgumentError,
    BudgetWarning,
    MissingDependencyError,
    StateError,
    UnknownOptionError,
)
from torch_ssgp.surrogates import SingleTaskStreamingGP

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep BoTorch 0.18 from compiling an extension for qLogEHVI, or warning."""
    monkeypatch.setattr(logei, "_load_attempted", True)


def outcomes(X: Tensor, m: int = 1) -> Tensor:
    """A smooth function with noise, ``(..., n, m)``; outputs of unlike scale."""
    clean = [(2 + 3 * i) * torch.sin((3 + i) * X).sum(-1) + 4 * i for i in range(m)]
    Y = torch.stack(clean, -1)
    return Y + 0.05 * torch.randn(Y.shape, dtype=X.dtype)


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(*shape, 2, dtype=dtype)


def data(
    n: int = 12,
    m: int = 1,
    batch: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    X = inputs(*batch, n, dtype=dtype)
    return X, outcomes(X, m)


def pair(
    n: int = 12, m: int = 1, batch: tuple[int, ...] = (), noisy: bool = False
) -> tuple[SingleTaskGP, SingleTaskStreamingGP, Tensor | None]:
    """An exact and a streaming model with the same data and hyperparameters."""
    X, Y = data(n, m, batch)
    Yvar = 0.01 + 0.02 * torch.rand_like(Y) if noisy else None
    exact, ours = SingleTaskGP(X, Y, Yvar), SingleTaskStreamingGP(X, Y, Yvar)
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            if "lengthscale" in name:
                parameter.copy_(0.2 + 0.3 * torch.rand_like(parameter))
            elif "noise" in name:
                parameter.copy_(0.002 + 0.01 * torch.rand_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter))
    copy_hyperparameters(exact, ours)
    exact.eval()
    return exact, ours, Yvar


def copy_hyperparameters(
    source: SingleTaskGP | SingleTaskStreamingGP, target: SingleTaskStreamingGP
) -> None:
    if isinstance(source, SingleTaskStreamingGP):
        source = source.model
    parameters = dict(source.named_parameters())
    ours = dict(target.model.named_parameters())
    assert set(parameters) == set(ours)
    with torch.no_grad():
        for name, parameter in parameters.items():
            ours[name].copy_(parameter)


def assert_same_posterior(
    a: GPyTorchPosterior, b: GPyTorchPosterior, tolerance: float = TOLERANCE
) -> None:
    torch.testing.assert_close(a.mean, b.mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        a.distribution.covariance_matrix,
        b.distribution.covariance_matrix,
        rtol=tolerance,
        atol=tolerance,
    )


def sampler(num: int, seed: int = 0) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([num]), seed=seed)


# -- agreement with the exact model ---------------------------------------------------

KINDS = [
    (m, batch, noisy) for m in (1, 2) for batch in ((), (2,)) for noisy in (False, True)
]


@pytest.mark.parametrize(("m", "batch", "noisy"), KINDS)
def test_posterior_is_that_of_the_exact_model(
    m: int, batch: tuple[int, ...], noisy: bool
) -> None:
    exact, ours, _ = pair(m=m, batch=batch, noisy=noisy)
    for t_batch in ((), (3,)):
        X = inputs(*t_batch, *batch, 4)
        assert_same_posterior(ours.posterior(X), exact.posterior(X))
        assert_same_posterior(
            ours.posterior(X, observation_noise=True),
            exact.posterior(X, observation_noise=True),
        )
        noise = torch.rand(*t_batch, *batch, 4, m, dtype=torch.float64)
        assert_same_posterior(
            ours.posterior(X, observation_noise=noise),
            exact.posterior(X, observation_noise=noise),
        )


@pytest.mark.parametrize(("m", "batch", "noisy"), KINDS)
def test_conditioning_is_that_of_the_exact_model(
    m: int, batch: tuple[int, ...], noisy: bool
) -> None:
    exact, ours, _ = pair(m=m, batch=batch, noisy=noisy)
    X, Y = data(3, m, batch)
    noise = {"noise": torch.full_like(Y, 0.02)} if noisy else {}
    exact.posterior(X)
    exact_new = exact.condition_on_observations(X, Y, **noise)
    ours_new = ours.condition_on_observations(X, Y, **noise)
    test_X = inputs(*batch, 5)
    assert ours_new.batch_shape == exact_new.batch_shape
    assert_same_posterior(ours_new.posterior(test_X), exact_new.posterior(test_X))


@pytest.mark.parametrize(("m", "batch", "noisy"), KINDS)
def test_fantasies_are_those_of_the_exact_model(
    m: int, batch: tuple[int, ...], noisy: bool
) -> None:
    exact, ours, _ = pair(m=m, batch=batch, noisy=noisy)
    X = inputs(5, *batch, 2)
    exact_new = exact.fantasize(X, sampler(4))
    ours_new = ours.fantasize(X, sampler(4))
    assert type(ours_new) is SingleTaskStreamingGP
    assert ours_new.batch_shape == exact_new.batch_shape == (4, 5, *batch)
    test_X = inputs(4, 5, *batch, 3)
    assert_same_posterior(ours_new.posterior(test_X), exact_new.posterior(test_X))


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


def test_restarting_leaves_hyperparameters_that_fit_only_the_past() -> None:
    X, Y = data(30)
    ours = SingleTaskStreamingGP(X[:5], Y[:5])
    ours.fit()
    # A mode far from the data: the lengthscales of another function.
    ours.covar_module.lengthscale = torch.tensor([[0.03, 20.0]], dtype=torch.float64)
    stuck = deepcopy(ours)
    result = ours.update(X[5:], Y[5:], restandardize=True)
    without = stuck.update(X[5:], Y[5:], restandardize=True, restart=False)
    assert bool(result.restarted) and not bool(without.restarted)
    assert float(result.bound) > float(without.bound) + 5
    fresh = SingleTaskStreamingGP(X, Y)
    fresh.fit()
    torch.testing.assert_close(
        ours.covar_module.lengthscale,
        fresh.covar_module.lengthscale,
        rtol=0.1,
        atol=0.0,
    )


# -- conditioning ---------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_conditioning_equals_an_update_in_closed_form(
    m: int, noisy: bool, add: bool
) -> None:
    _, ours, Yvar = pair(m=m, noisy=noisy)
    X, Y = data(4, m)
    noise = None if Yvar is None else torch.full_like(Y, 0.03)
    before = deepcopy(ours)
    transformed = (
        None if noise is None else noise / ours.outcome_transform.stdvs.square()
    )
    new = ours.condition_on_observations(
        X, Y, noise=transformed, add_inducing_points=add
    )
    z = ours.inducing_points
    z = z[0] if m > 1 else z
    updated = deepcopy(ours)
    updated.update(
        X, Y, noise, num_steps=0, inducing_points=torch.cat([z, X]) if add else z
    )
    test_X = inputs(6)
    assert_same_posterior(new.posterior(test_X), updated.posterior(test_X), 1e-7)
    size = z.size(-2)
    assert new.inducing_points.size(-2) == (size + 4 if add else size)
    # The original is untouched.
    assert_same_posterior(before.posterior(test_X), ours.posterior(test_X), 0.0)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_conditioning_takes_the_average_of_known_noise(
    m: int, batch: tuple[int, ...]
) -> None:
    _, ours, _ = pair(m=m, batch=batch, noisy=True)
    X, Y = data(3, m, batch)
    average = ours.average_noise.unsqueeze(-1) if m == 1 else ours.average_noise.mT
    expected = ours.condition_on_observations(X, Y, noise=average.expand_as(Y))
    new = ours.condition_on_observations(X, Y)
    assert_same_posterior(new.posterior(X), expected.posterior(X), 0.0)


def test_conditioning_one_by_one_equals_conditioning_at_once() -> None:
    _, ours, _ = pair(m=2)
    X, Y = data(4, 2)
    at_once = ours.condition_on_observations(X, Y)
    one_by_one = ours
    for i in range(4):
        one_by_one = one_by_one.condition_on_observations(X[i : i + 1], Y[i : i + 1])
    test_X = inputs(6)
    assert_same_posterior(at_once.posterior(test_X), one_by_one.posterior(test_X), 1e-7)


def test_batched_fantasies_equal_a_loop() -> None:
    _, ours, _ = pair()
    X, Y = inputs(5, 2), torch.randn(16, 5, 2, 1, dtype=torch.float64)
    batched = ours.condition_on_observations(X, Y)
    assert batched.batch_shape == (16, 5)
    # Fantasies at the same inputs share their inducing points and factors.
    assert batched.inducing_points.shape[:-2] == (5,)
    test_X = inputs(3)
    mean = batched.posterior(test_X).mean
    variance = batched.posterior(test_X).variance
    for i in (0, 7, 15):
        for j in (0, 4):
            single = ours.condition_on_observations(X[j], Y[i, j]).posterior(test_X)
            torch.testing.assert_close(mean[i, j], single.mean)
            torch.testing.assert_close(variance[i, j], single.variance)


@pytest.mark.parametrize("shared", [False, True])
def test_conditioning_on_batches_equals_conditioning_on_each(shared: bool) -> None:
    _, ours, _ = pair(m=2)
    X = inputs(3) if shared else inputs(2, 3)
    Y = outcomes(inputs(2, 3), 2)
    batched = ours.condition_on_observations(X, Y)
    each = [
        ours.condition_on_observations(X if shared else X[i], Y[i]) for i in range(2)
    ]
    for test_X in (inputs(4), inputs(2, 4), inputs(3, 1, 4)):
        posterior = batched.posterior(test_X)
        test_X = test_X.expand(*posterior.mean.shape[:-1], 2)
        for i in range(2):
            expected = each[i].posterior(test_X[..., i, :, :])
            torch.testing.assert_close(posterior.mean[..., i, :, :], expected.mean)
            torch.testing.assert_close(
                posterior.variance[..., i, :, :], expected.variance
            )


@pytest.mark.parametrize("add", [False, True])
def test_conditioning_has_the_gradients_of_finite_differences(add: bool) -> None:
    _, ours, _ = pair(n=6)
    X, Y = data(2)
    test_X = inputs(2)

    def predict(X: Tensor, Y: Tensor) -> Tensor:
        new = ours.condition_on_observations(X, Y, add_inducing_points=add)
        posterior = new.posterior(test_X)
        return torch.cat([posterior.mean, posterior.variance])

    arguments = (X.requires_grad_(), Y.requires_grad_())
    assert torch.autograd.gradcheck(predict, arguments, atol=1e-4)


def test_fantasies_of_fantasies_stack_their_batches() -> None:
    _, ours, _ = pair()
    first = ours.fantasize(inputs(5, 1), sampler(3))
    second = first.fantasize(inputs(3, 5, 1), sampler(2))
    assert second.batch_shape == (2, 3, 5)
    assert second.posterior(inputs(2, 3, 5, 4)).mean.shape == (2, 3, 5, 4, 1)


def test_fantasizing_nothing_changes_nothing() -> None:
    _, ours, _ = pair()
    new = ours.fantasize(inputs(0), sampler(3))
    test_X = inputs(4)
    posterior, expected = new.posterior(test_X), ours.posterior(test_X)
    assert posterior.mean.shape == (3, 4, 1)
    torch.testing.assert_close(posterior.mean, expected.mean.expand(3, 4, 1))
    torch.testing.assert_close(posterior.variance, expected.variance.expand(3, 4, 1))


def test_fantasies_see_inputs_through_the_input_transform() -> None:
    X, Y = data()
    X = 7 * X - 3
    ours = SingleTaskStreamingGP(X, Y, input_transform=Normalize(d=2))
    new = ours.fantasize(X[:2], sampler(1))
    added = new.inducing_points[..., -2:, :]
    torch.testing.assert_close(added.squeeze(0), ours.input_transform(X[:2]))


def test_variance_of_fantasies_does_not_depend_on_the_fantasy() -> None:
    _, ours, _ = pair()
    variance = ours.fantasize(inputs(1), sampler(3)).posterior(inputs(4)).variance
    torch.testing.assert_close(variance, variance[:1].expand_as(variance))


# -- the memory -----------------------------------------------------------------------


def test_memory_is_twice_as_fine_as_the_model_by_default() -> None:
    X, Y = data(30)
    assert SingleTaskStreamingGP(X, Y, num_inducing=6).model.memory_size == 12
    ours = SingleTaskStreamingGP(X, Y, num_inducing=6, memory_size=9)
    # Nothing is compressed under hyperparameters that nobody has learned.
    assert ours.model.memory.num_raw == 30
    ours.fit(num_steps=5)
    assert ours.model.memory.num_points == ours.model.memory_size == 9
    ours.update(X[:1] + 0.01, Y[:1], num_steps=0)
    assert (ours.model.memory.num_points, ours.model.memory.num_raw) == (10, 1)
    with pytest.raises(ArgumentError, match="at least as many points"):
        SingleTaskStreamingGP(X, Y, num_inducing=6, memory_size=5)


@pytest.mark.parametrize("memory_size", [8, 40])
def test_data_of_the_constructor_are_learned_from_before_they_are_compressed(
    memory_size: int,
) -> None:
    X, Y = data(40)
    ours = SingleTaskStreamingGP(X, Y, num_inducing=8, memory_size=memory_size)
    whole = SingleTaskStreamingGP(X, Y, num_inducing=8, memory_size=1000)
    bounds = [float(model.fit(num_steps=30).bound) for model in (ours, whole)]
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-9)


@pytest.mark.parametrize("memory_size", [8, 12, 100])
@pytest.mark.parametrize("m", [1, 2])
def test_cost_of_fantasies_does_not_depend_on_the_memory(
    memory_size: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = SingleTaskStreamingGP(*data(20, m), num_inducing=8, memory_size=memory_size)
    ours.fit(num_steps=2)
    ours.update(*data(10, m), num_steps=2)
    sizes, cholesky = [], fn.cholesky

    def count(K: Tensor) -> Tensor:
        sizes.append(K.size(-1))
        return cholesky(K)

    monkeypatch.setattr(fn, "cholesky", count)
    q, test_X = 3, inputs(4, 5, 2)
    fantasy = ours.fantasize(inputs(5, q), sampler(4))
    fantasy.posterior(test_X)
    again = fantasy.fantasize(inputs(4, 5, q), sampler(2))
    again.posterior(test_X)
    for number, model in enumerate((fantasy, again), start=1):
        summary, points = model.model.summary, 8 + number * q
        assert summary.num_inducing == points
        assert summary.U.shape[-2:] == (points, points)
        assert summary.g.size(-1) == points
        assert summary.prior_cholesky.shape[-2:] == (points, points)
    assert max(sizes) == 8 + 2 * q
    # What was fantasised is remembered all the same, should the fantasy come true.
    memory = ours.model.memory
    assert again.model.memory.num_points == memory.num_points + 2 * q


@pytest.mark.parametrize("memory_size", [40, 12])
@pytest.mark.parametrize("noisy", [False, True])
def test_subsets_and_repetitions_keep_the_memory(memory_size: int, noisy: bool) -> None:
    X, Y = data(24, 3)
    Yvar = torch.full_like(Y, 0.01) if noisy else None
    ours = SingleTaskStreamingGP(X, Y, Yvar, num_inducing=8, memory_size=memory_size)
    ours.fit(num_steps=3)
    test_X = inputs(4)
    whole = ours.model(test_X, from_memory=True)
    nothing = ours.fantasize(inputs(0), sampler(2)).model(test_X, from_memory=True)
    torch.testing.assert_close(nothing.mean, whole.mean.expand(2, 3, 4))
    for chosen in ([1], [2, 0]):
        part = ours.subset_output(chosen).model(test_X, from_memory=True)
        expected = whole.mean[chosen], whole.variance[chosen]
        torch.testing.assert_close(part.mean, expected[0].reshape(part.mean.shape))
        torch.testing.assert_close(part.variance, expected[1].reshape(part.mean.shape))


def test_losses_are_warned_of_once_and_not_before_anything_is_learned() -> None:
    X = inputs(60)
    Y = torch.sin(40 * X).sum(-1, keepdim=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        ours = SingleTaskStreamingGP(X[:40], Y[:40], num_inducing=5)
    ours.covar_module.lengthscale = 0.05
    with pytest.warns(BudgetWarning, match="5 inducing points"):
        ours.update(X[40:50], Y[40:50], num_steps=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        ours.update(X[50:], Y[50:], num_steps=0)
        ours.fit(num_steps=0)


# -- what BoTorch's own tests ask of a model ------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("transforms", [False, True])
def test_posteriors_have_the_shapes_of_botorch(
    dtype: torch.dtype, m: int, batch: tuple[int, ...], transforms: bool
) -> None:
    X, Y = data(8, m, batch, dtype)
    if not transforms:
        Y = (Y - Y.mean(-2, keepdim=True)) / Y.std(-2, keepdim=True)
    batch_shape = torch.Size(batch)
    ours = SingleTaskStreamingGP(
        X,
        Y,
        outcome_transform=(
            Standardize(m=m, batch_shape=batch_shape) if transforms else None
        ),
        input_transform=(
            Normalize(d=2, batch_shape=batch_shape) if transforms else None
        ),
    )
    assert ours.num_outputs == m
    assert ours.batch_shape == batch_shape
    assert hasattr(ours, "outcome_transform") == transforms
    assert hasattr(ours, "input_transform") == transforms
    assert isinstance(ours.mean_module, ConstantMean)
    for t_batch in ((), (2,), (4, 2)):
        shape = torch.broadcast_shapes(t_batch, batch)
        test_X = inputs(*t_batch, 3, dtype=dtype)
        posterior = ours.posterior(test_X)
        assert isinstance(posterior, GPyTorchPosterior)
        assert posterior.mean.shape == posterior.variance.shape == (*shape, 3, m)
        assert posterior.mean.dtype == dtype
        assert posterior.rsample(torch.Size([2])).shape == (2, *shape, 3, m)
        noise = torch.full((3, m), 0.3, dtype=dtype)
        noisy = ours.posterior(test_X, observation_noise=noise).variance
        scale = ours.outcome_transform.stdvs.square() if transforms else 1.0
        torch.testing.assert_close(
            noisy, posterior.variance + 0.3 * scale, rtol=1e-3, atol=1e-4
        )
        learned = ours.posterior(test_X, observation_noise=True).variance
        sigma2 = (
            ours.likelihood.noise.unsqueeze(-1)
            if m == 1
            else (ours.likelihood.noise.mT)
        )
        torch.testing.assert_close(
            learned, posterior.variance + sigma2 * scale, rtol=1e-3, atol=1e-4
        )


def test_posterior_transform_is_applied() -> None:
    _, ours, _ = pair(m=2)
    X = inputs(3)
    weights = torch.tensor([1.0, -2.0], dtype=torch.float64)
    scalar = ours.posterior(
        X, posterior_transform=ScalarizedPosteriorTransform(weights)
    )
    torch.testing.assert_close(
        scalar.mean, ours.posterior(X).mean @ weights.unsqueeze(-1)
    )


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("chosen", [[0], [1], [1, 2], [-1, 0], [0, 1, 2]])
def test_subset_output_equals_the_sliced_posterior(
    batch: tuple[int, ...], noisy: bool, chosen: list[int]
) -> None:
    _, ours, _ = pair(m=3, batch=batch, noisy=noisy)
    part = ours.subset_output(chosen)
    test_X = inputs(*batch, 4)
    for noise in (False, True):
        whole = ours.posterior(test_X, observation_noise=noise)
        for posterior in (
            part.posterior(test_X, observation_noise=noise),
            ours.posterior(test_X, output_indices=chosen, observation_noise=noise),
        ):
            torch.testing.assert_close(posterior.mean, whole.mean[..., chosen])
            torch.testing.assert_close(posterior.variance, whole.variance[..., chosen])
    assert part.num_outputs == len(chosen)
    assert part.batch_shape == torch.Size(batch)
    # A copy: it learns on its own.
    X, Y = data(2, 3, batch)
    Yvar = torch.full_like(Y, 0.01) if noisy else None
    before = ours.posterior(test_X).mean
    part.update(
        X,
        Y[..., chosen],
        None if Yvar is None else Yvar[..., chosen],
        num_steps=2,
    )
    torch.testing.assert_close(ours.posterior(test_X).mean, before, rtol=0, atol=0)


def test_subset_output_of_a_fantasy() -> None:
    _, ours, _ = pair(m=2)
    fantasy = ours.fantasize(inputs(5, 1), sampler(3))
    test_X = inputs(3, 5, 4)
    torch.testing.assert_close(
        fantasy.subset_output([1]).posterior(test_X).mean,
        fantasy.posterior(test_X).mean[..., 1:],
    )


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
    assert model.inducing_points.size(-2) == 7
    assert model.model.memory_size == 9


def test_custom_modules_are_kept() -> None:
    X, Y = data()
    kernel, mean = ScaleKernel(MaternKernel(ard_num_dims=2)), ConstantMean()
    ours = SingleTaskStreamingGP(X, Y, covar_module=kernel, mean_module=mean)
    assert ours.covar_module is kernel
    assert ours.mean_module is mean


def test_duplicate_inputs_need_no_more_inducing_points() -> None:
    X, Y = data(5)
    ours = SingleTaskStreamingGP(X.repeat(3, 1), Y.repeat(3, 1))
    assert ours.inducing_points.size(-2) == 5
    assert torch.isfinite(ours.posterior(X).variance).all()


def test_deepcopy_pickle_and_state_dict_keep_the_posterior() -> None:
    _, ours, _ = pair(m=2)
    X, Y = data(3, 2)
    test_X = inputs(4)
    ours.posterior(test_X)
    ours.update(X, Y, num_steps=3)
    expected = ours.posterior(test_X)
    loaded = SingleTaskStreamingGP(*data(5, 2))
    loaded.posterior(test_X)
    loaded.load_state_dict(ours.state_dict())
    for copy in (deepcopy(ours), pickle.loads(pickle.dumps(ours)), loaded):
        assert_same_posterior(copy.posterior(test_X), expected, 0.0)
        copy.update(X, Y, num_steps=0)


@pytest.mark.parametrize("memory_size", [40, 12, 8])
@pytest.mark.parametrize("noisy", [False, True])
def test_fit_after_loading_is_fit_without(memory_size: int, noisy: bool) -> None:
    X, Y = data(24, 2)
    Yvar = torch.full_like(Y, 0.01) if noisy else None
    sizes = {"num_inducing": 8, "memory_size": memory_size}

    def model(n: int) -> SingleTaskStreamingGP:
        return SingleTaskStreamingGP(
            X[:n], Y[:n], None if Yvar is None else Yvar[:n], **sizes
        )

    ours, loaded = model(20), model(3)
    ours.fit(num_steps=3)
    ours.update(X[20:], Y[20:], None if Yvar is None else Yvar[20:], restandardize=True)
    assert (ours.model.memory.num_raw > 0) == (memory_size == 40)
    loaded.load_state_dict(ours.state_dict())
    results = [m.fit(num_steps=10) for m in (ours, loaded)]
    assert torch.equal(results[0].bound, results[1].bound)
    assert (results[0].bound_trace[-1] > results[0].bound_trace[0]).all()
    assert_same_posterior(ours.posterior(X), loaded.posterior(X), 0.0)


def test_a_state_of_version_0_1_loads() -> None:
    path = Path(__file__).parent / "data" / "surrogate_v1.pt"
    saved = torch.load(path, weights_only=True)
    ours = SingleTaskStreamingGP(*data(3), num_inducing=8)
    ours.load_state_dict(saved["state"])
    posterior = ours.posterior(saved["X"])
    torch.testing.assert_close(posterior.mean, saved["mean"])
    torch.testing.assert_close(posterior.variance, saved["variance"])
    ours.update(*data(2), num_steps=2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.filterwarnings("ignore:.*standardized")
@pytest.mark.parametrize("transform", [None, Standardize(m=2)])
def test_every_mode_of_autograd_will_do(mode: Callable, transform: Standardize) -> None:
    X, Y = data(6, 2)
    new_X, new_Y = data(3, 2)
    expected = SingleTaskStreamingGP(X, Y, outcome_transform=deepcopy(transform))
    expected.update(new_X, new_Y, num_steps=3)
    with mode():
        ours = SingleTaskStreamingGP(X, Y, outcome_transform=deepcopy(transform))
        ours.posterior(X)
        ours.update(new_X.clone(), new_Y.clone(), num_steps=3)
        ours.posterior(X)
        fantasy = ours.condition_on_observations(X[:2], Y[:2].clone())
    for model in (ours, fantasy):
        points = X.clone().requires_grad_()
        model.posterior(points).mean.sum().backward()
        assert points.grad is not None and torch.isfinite(points.grad).all()
    assert_same_posterior(ours.posterior(X), expected.posterior(X), 0.0)
    ours.fit(num_steps=2)
    ours.update(X, Y, num_steps=2)


def test_a_look_without_gradients_leaves_those_of_a_fantasy() -> None:
    X, Y = data(6)
    ours, points, gradients = SingleTaskStreamingGP(X, Y), inputs(2), []
    for grad in (True, False):
        new_X = points.clone().requires_grad_()
        fantasy = ours.condition_on_observations(new_X, Y[:2])
        with torch.set_grad_enabled(grad):
            fantasy.posterior(X)
        fantasy.posterior(X).mean.sum().backward()
        gradients.append(new_X.grad)
    torch.testing.assert_close(*gradients)


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


def test_loading_a_state_of_the_same_size_is_seen_at_once() -> None:
    a, b = (SingleTaskStreamingGP(*data()) for _ in range(2))
    X = inputs(4)
    a.posterior(X), b.posterior(X)
    b.load_state_dict(a.state_dict())
    assert_same_posterior(a.posterior(X), b.posterior(X), 0.0)


def test_average_of_known_noise_survives_a_state_dict() -> None:
    X, Y = data()
    first, later = torch.full_like(Y, 0.1), torch.full_like(Y, 0.4)
    ours = SingleTaskStreamingGP(
        X, Y, first, outcome_transform=None, covar_module=(MaternKernel())
    )
    ours.update(X + 0.01, Y, later, num_steps=0)
    torch.testing.assert_close(
        ours.likelihood.noise, torch.full_like(ours.likelihood.noise, 0.25)
    )
    other = SingleTaskStreamingGP(
        X, Y, first, outcome_transform=None, covar_module=MaternKernel()
    )
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other.likelihood.noise, ours.likelihood.noise)


# -- acquisition functions ------------------------------------------------------------


def fitted(m: int = 1, **options: object) -> SingleTaskStreamingGP:
    X, Y = data(12, m)
    ours = SingleTaskStreamingGP(X, Y, num_inducing=10, **options)
    ours.fit(num_steps=20)
    ours.update(*data(2, m), num_steps=5)
    return ours


def pending(q: int = 2) -> Tensor:
    return torch.linspace(0.1, 0.9, q, dtype=torch.float64).unsqueeze(-1).expand(q, 2)


def joint_entropy(model: SingleTaskStreamingGP) -> qJointEntropySearch:
    optimal_X, optimal_Y = get_optimal_samples(
        model, BOUNDS, num_optima=3, raw_samples=16, num_restarts=2
    )
    return qJointEntropySearch(model, optimal_X, optimal_Y, X_pending=pending())


# Name, number of outputs, q, and how it is made.
ACQUISITIONS: list[tuple[str, int, int, Callable]] = [
    ("LogEI", 1, 1, lambda model: LogExpectedImprovement(model, best_f=1.0)),
    (
        "qLogEI",
        1,
        2,
        lambda model: qLogExpectedImprovement(model, 1.0, sampler=sampler(8)),
    ),
    (
        "qLogNEI",
        1,
        2,
        lambda model: qLogNoisyExpectedImprovement(
            model, X_baseline=inputs(6), sampler=sampler(8)
        ),
    ),
    (
        "qUCB",
        1,
        2,
        lambda model: qUpperConfidenceBound(model, beta=0.2, sampler=sampler(8)),
    ),
    ("qKG", 1, 2 + 4, lambda model: qKnowledgeGradient(model, num_fantasies=4)),
    ("qMES", 1, 1, lambda model: qMaxValueEntropy(model, inputs(50), num_fantasies=2)),
    (
        "qMES with pending points",
        1,
        1,
        lambda model: qMaxValueEntropy(
            model, inputs(50), num_fantasies=2, X_pending=pending()
        ),
    ),
    ("GIBBON", 1, 1, lambda model: qLowerBoundMaxValueEntropy(model, inputs(50))),
    (
        "GIBBON with pending points",
        1,
        1,
        lambda model: qLowerBoundMaxValueEntropy(
            model, inputs(50), X_pending=pending()
        ),
    ),
    (
        "qNIPV",
        1,
        2,
        lambda model: qNegIntegratedPosteriorVariance(model, mc_points=inputs(20)),
    ),
    (
        "qMultiStepLookahead",
        1,
        1 + 2 + 2 * 2,
        lambda model: qMultiStepLookahead(
            model, batch_sizes=[1, 1], num_fantasies=[2, 2]
        ),
    ),
    ("JES with pending points", 1, 1, joint_entropy),
    (
        "qLogEHVI",
        2,
        2,
        lambda model: qLogExpectedHypervolumeImprovement(
            model,
            ref_point=[0.0, 0.0],
            partitioning=FastNondominatedPartitioning(
                torch.zeros(2, dtype=torch.float64), outcomes(inputs(6), 2)
            ),
            sampler=sampler(8),
        ),
    ),
    (
        "qLogNEHVI",
        2,
        1,
        lambda model: qLogNoisyExpectedHypervolumeImprovement(
            model,
            ref_point=[0.0, 0.0],
            X_baseline=inputs(5),
            sampler=sampler(8),
            prune_baseline=True,
        ),
    ),
    ("PathwiseTS", 1, 2, lambda model: PathwiseThompsonSampling(model)),
]


# linear_operator 0.6.1 slices the covariance of several outputs by a sparse matrix,
# for SingleTaskGP as for ours.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize(
    ("m", "q", "make"),
    [case[1:] for case in ACQUISITIONS],
    ids=[case[0] for case in ACQUISITIONS],
)
@pytest.mark.parametrize("transforms", [False, True])
def test_acquisition_functions_have_finite_values_and_gradients(
    m: int, q: int, make: Callable, transforms: bool
) -> None:
    options = {"input_transform": Normalize(d=2, bounds=BOUNDS)} if transforms else {}
    model = fitted(m, **options)
    acquisition = make(model)
    X = inputs(3, q).requires_grad_()
    value = acquisition(X)
    assert value.shape == (3,)
    assert torch.isfinite(value).all()
    (gradient,) = torch.autograd.grad(value.sum(), X)
    assert torch.isfinite(gradient).all()
    assert (gradient != 0).any()
    # A second graph through the same model.
    torch.autograd.grad(acquisition(X).sum(), X)
    if transforms:
        return
    candidate, best = optimize_acqf(
        acquisition,
        bounds=BOUNDS,
        q=q if "KnowledgeGradient" not in type(acquisition).__name__ else 2,
        num_restarts=2,
        raw_samples=4,
        options={"maxiter": 3},
    )
    assert torch.isfinite(candidate).all()
    assert torch.isfinite(best)


EXACT = ["LogEI", "qLogEI", "qLogNEI", "qUCB", "qKG", "qNIPV", "qMultiStepLookahead"]


@pytest.mark.parametrize("name", EXACT)
def test_acquisition_values_are_those_of_the_exact_model(name: str) -> None:
    exact, ours, _ = pair()
    q, make = next(case[2:] for case in ACQUISITIONS if case[0] == name)
    X = inputs(3, q)
    values = []
    for model in (exact, ours):
        torch.manual_seed(1)
        values.append(make(model)(X))
    torch.testing.assert_close(values[0], values[1], rtol=1e-4, atol=1e-4)


def test_max_posterior_sampling_picks_candidates() -> None:
    model, X = fitted(), inputs(30)
    chosen = MaxPosteriorSampling(model, replacement=False)(X, num_samples=4)
    assert chosen.shape == (4, 2)
    assert (chosen.unsqueeze(1) == X).all(-1).any(-1).all()


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "transformed", "conditioned", "noisy"])
def test_sample_paths_have_the_moments_of_the_posterior(m: int, kind: str) -> None:
    X, Y = data(10, m)
    Yvar = torch.full_like(Y, 0.01) if kind == "noisy" else None
    transform = Normalize(d=2) if kind == "transformed" else None
    model = SingleTaskStreamingGP(X, Y, Yvar, num_inducing=8, input_transform=transform)
    if kind == "conditioned":
        model = model.condition_on_observations(*data(2, m))
    paths = draw_matheron_paths(model, torch.Size([2000]))
    test_X = inputs(6)
    samples = paths(test_X.unsqueeze(0) if m > 1 else test_X)
    samples = samples.mT if m > 1 else samples.unsqueeze(-1)
    posterior = model.posterior(test_X)
    spread = Y.std(0)
    assert samples.shape == (2000, 6, m)
    error = (samples.mean(0) - posterior.mean).abs() / spread
    assert float(error.max()) < 0.05
    error = (samples.std(0) - posterior.variance.sqrt()).abs() / spread
    assert float(error.max()) < 0.05


def test_model_list_of_streaming_models() -> None:
    X, Y = data(10, 2)
    models = [
        SingleTaskStreamingGP(X, Y[:, i : i + 1], input_transform=Normalize(d=2))
        for i in range(2)
    ]
    model = ModelListGP(*models)
    fit_gpytorch_mll(
        SumMarginalLogLikelihood(model.likelihood, model),
        optimizer_kwargs={"num_steps": 5},
    )
    test_X = inputs(4)
    posterior = model.posterior(test_X)
    torch.testing.assert_close(
        posterior.mean, torch.cat([m.posterior(test_X).mean for m in models], -1)
    )
    fantasy = model.fantasize(inputs(3, 1), sampler(2))
    assert fantasy.posterior(inputs(2, 3, 4)).mean.shape == (2, 3, 4, 2)
    new_X, new_Y = data(2, 2)
    new = model.condition_on_observations([new_X, new_X], new_Y)
    for i, submodel in enumerate(models):
        expected = submodel.condition_on_observations(new_X, new_Y[:, i : i + 1])
        torch.testing.assert_close(
            new.posterior(test_X).mean[..., i].squeeze(),
            expected.posterior(test_X).mean.squeeze(),
        )
    other = ModelListGP(
        *(
            SingleTaskStreamingGP(X, Y[:, :1], input_transform=(Normalize(d=2)))
            for _ in range(2)
        )
    )
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.posterior(test_X).mean, posterior.mean)
    acquisition = qLogExpectedHypervolumeImprovement(
        model,
        ref_point=[0.0, 0.0],
        partitioning=FastNondominatedPartitioning(
            torch.zeros(2, dtype=torch.float64), Y
        ),
        sampler=sampler(8),
    )
    assert torch.isfinite(acquisition(inputs(3, 2))).all()
    paths = draw_matheron_paths(model, torch.Size([3]))
    assert [path.shape for path in paths(test_X)] == [(3, 4), (3, 4)]


# -- transforms -----------------------------------------------------------------------


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
        if again:  # the summary, made anew of what is remembered
            ours.fit(num_steps=0)
            built.fit(num_steps=0)
        for from_memory in (False, True):
            latents = [model.model(test_X, from_memory) for model in (ours, built)]
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
        before, n = ours.model.summary.log_evidence, float(ours.num_targets)
        old = ours.outcome_transform.stdvs.clone()
        ours.restandardize(torch.tensor(3.0), torch.tensor(1.5))
        change = ours.model.summary.log_evidence - before
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
    at_once.update(X[10:], Y[10:], restandardize=True, num_steps=10)
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


# -- options and warnings -------------------------------------------------------------


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


@pytest.mark.parametrize("noisy", [False, True])
def test_each_output_may_forget_what_it_has_to(noisy: bool, tmp_path: Path) -> None:
    X, Y = data(50, 2)
    Yvar = torch.full_like(Y, 0.01) if noisy else None
    ours = SingleTaskStreamingGP(X[:30], Y[:30], None if Yvar is None else Yvar[:30])
    ours.fit(num_steps=30)
    Y[30:, 0] = 10 - 3 * Y[30:, 0]  # another function, of the first output alone
    new = X[30:], Y[30:], None if Yvar is None else Yvar[30:]
    result = ours.update(*new, forget="auto", restandardize=True, num_steps=20)
    assert result.forgot[0] < 0.5 and result.forgot[1] == 1
    number = ours.num_targets.squeeze()
    torch.testing.assert_close(number, ours.model.summary.num_data)
    torch.testing.assert_close(
        ours.target_mean[0],
        number.new_tensor([Y[30:, 0].mean(), Y[:, 1].mean()]),
        rtol=1e-2,
        atol=1e-2,
    )
    ours.save(tmp_path / "model.pt")
    loaded = SingleTaskStreamingGP.load(tmp_path / "model.pt")
    fresh = SingleTaskStreamingGP(X[:3], Y[:3], None if Yvar is None else Yvar[:3])
    fresh.load_state_dict(ours.state_dict())
    for model in (loaded, fresh):
        assert_same_posterior(model.posterior(X), ours.posterior(X), 0.0)
    assert ours.subset_output([1]).num_targets == 50


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


# -- files ----------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "batch", "noisy"), KINDS)
def test_a_saved_model_goes_on_where_it_stopped(
    m: int, batch: tuple[int, ...], noisy: bool, tmp_path: Path
) -> None:
    X, Y = data(20, m, batch)
    Yvar = 0.01 + 0.02 * torch.rand_like(Y) if noisy else None
    ours = SingleTaskStreamingGP(
        X,
        Y,
        Yvar,
        num_inducing=8,
        memory_size=12,
        input_transform=Normalize(d=2, batch_shape=torch.Size(batch)),
    )
    ours.fit(num_steps=3)
    ours.update(X + 0.01, Y, Yvar, restandardize=True, num_steps=3)
    ours.save(tmp_path / "model.pt")
    loaded = SingleTaskStreamingGP.load(tmp_path / "model.pt")
    assert ours.state_dict().keys() == loaded.state_dict().keys()
    results = [model.update(X, Y, Yvar, num_steps=3) for model in (ours, loaded)]
    assert torch.equal(results[0].bound, results[1].bound)
    for noise in (False, True):
        a, b = (model.posterior(X, observation_noise=noise) for model in (ours, loaded))
        assert_same_posterior(a, b, 0.0)
    for model in (ours, loaded):
        assert torch.equal(model.average_noise, ours.average_noise)
        assert model.training is ours.training


def own(transform: type, **attributes: object) -> object:
    """A transform of a class that no file can name."""
    kind = type("Own", (transform,), {"__module__": "nowhere"})
    return kind(**attributes)


TRANSFORMS: list[Callable] = [
    lambda: {"outcome_transform": None},
    lambda: {"outcome_transform": Log()},
    lambda: {"outcome_transform": Power(power=0.5)},
    lambda: {"outcome_transform": Bilog()},
    lambda: {
        "outcome_transform": ChainedOutcomeTransform(log=Log(), unit=Standardize(m=1))
    },
    lambda: {"input_transform": Normalize(d=2, bounds=BOUNDS)},
    lambda: {"input_transform": InputStandardize(d=2)},
    lambda: {"input_transform": Log10(indices=[0])},
    lambda: {
        "input_transform": ChainedInputTransform(
            unit=Normalize(d=2), rounded=Round(integer_indices=[1])
        )
    },
    lambda: {
        "input_transform": Warp(
            d=2, indices=[0], bounds=torch.tensor([[0.0, 0.0], [1.2, 1.2]])
        )
    },
]


@pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.InputDataWarning")
@pytest.mark.parametrize("make", TRANSFORMS)
def test_transforms_of_botorch_are_rebuilt_from_a_file(
    make: Callable, tmp_path: Path
) -> None:
    X, Y = data(10)
    ours = SingleTaskStreamingGP(X, Y.exp(), **make())
    ours.save(tmp_path / "model.pt")
    loaded = SingleTaskStreamingGP.load(tmp_path / "model.pt")
    for model in (ours, loaded):
        model.update(X + 0.1, Y.exp(), num_steps=0)
    samples = []
    for model in (ours, loaded):
        torch.manual_seed(0)
        samples.append(model.posterior(X).rsample(torch.Size([3])))
    assert torch.equal(samples[0], samples[1])
    for name in ("input_transform", "outcome_transform"):
        kinds = [type(getattr(model, name, None)) for model in (ours, loaded)]
        assert kinds[0] is kinds[1]


def test_parts_of_ones_own_are_asked_for_by_name(tmp_path: Path) -> None:
    X, Y = data(10)
    path = tmp_path / "model.pt"
    ours = SingleTaskStreamingGP(
        X, Y, covar_module=own(MaternKernel), input_transform=own(Normalize, d=2)
    )
    ours.save(path)
    with pytest.raises(StateError, match=r"covar_module is a nowhere\.Own"):
        SingleTaskStreamingGP.load(path)
    kernel = own(MaternKernel)
    with pytest.raises(StateError, match=r"input_transform=\.\.\."):
        SingleTaskStreamingGP.load(path, covar_module=kernel)
    with pytest.raises(StateError, match="it is made of Own"):
        SingleTaskStreamingGP.load(
            path, covar_module=kernel, input_transform=Normalize(d=2)
        )
    loaded = SingleTaskStreamingGP.load(
        path, covar_module=kernel, input_transform=own(Normalize, d=2)
    )
    assert_same_posterior(ours.posterior(X), loaded.posterior(X), 0.0)


def test_a_transform_that_the_file_has_not_is_refused(tmp_path: Path) -> None:
    SingleTaskStreamingGP(*data(5)).save(tmp_path / "model.pt")
    with pytest.raises(StateError, match="input_transform was passed, but"):
        SingleTaskStreamingGP.load(
            tmp_path / "model.pt", input_transform=Normalize(d=2)
        )


def test_fantasies_can_be_saved(tmp_path: Path) -> None:
    _, ours, _ = pair(m=2)
    fantasy = ours.fantasize(inputs(3, 1), sampler(4))
    fantasy.save(tmp_path / "fantasy.pt")
    loaded = SingleTaskStreamingGP.load(tmp_path / "fantasy.pt")
    X = inputs(4, 3, 2)
    assert loaded.batch_shape == (4, 3)
    assert_same_posterior(fantasy.posterior(X), loaded.posterior(X), 1e-12)


def test_an_interrupted_save_leaves_the_previous_file_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours, _ = pair()
    path = tmp_path / "model.pt"
    ours.save(path)
    before = path.read_bytes()
    ours.update(*data(3), num_steps=0)

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        ours.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    _, ours, _ = pair()
    path = tmp_path / "model.pt"
    ours.model.save(path)
    with pytest.raises(StateError, match="Use StreamingGP.load"):
        SingleTaskStreamingGP.load(path)
    ours.save(path)
    with pytest.raises(StateError, match="Use SingleTaskStreamingGP.load"):
        StreamingGP.load(path)
    whole = path.read_bytes()
    for position in range(0, len(whole), 997):
        flipped = bytearray(whole)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(StateError, match="not a model saved by|damaged"):
            SingleTaskStreamingGP.load(path)


class Malice(Normalize):
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch evil",)


def test_no_code_of_a_file_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ours = SingleTaskStreamingGP(*data(5), input_transform=Normalize(d=2))
    ours.input_transform.__class__ = Malice
    # A deep copy would run it already: it is made by the same method.
    monkeypatch.setattr(Malice, "__deepcopy__", lambda self, memo: self, raising=False)
    ours.save("model.pt")
    with pytest.raises(StateError, match="input_transform is a"):
        SingleTaskStreamingGP.load("model.pt")
    assert not Path("evil").exists()


# -- errors ---------------------------------------------------------------------------


def bad_calls() -> list[tuple[str, type[Exception], str, Callable]]:
    X, Y = torch.rand(3, 2).double(), torch.rand(3, 1).double()
    nan, inf = Y.clone(), Y.clone()
    nan[1], inf[2] = torch.nan, torch.inf
    shape, value = BotorchTensorDimensionError, InputDataError
    return [
        ("no output dimension", shape, "output dimension", lambda f: f(X, Y[:, 0])),
        ("wrong d", shape, r"\(3, 1\)", lambda f: f(X[:, :1], Y)),
        ("too many outputs", shape, "2 outputs", lambda f: f(X, Y.repeat(1, 2))),
        ("unlike numbers of rows", shape, "rows", lambda f: f(X, Y[:2])),
        ("NaN", value, "NaN", lambda f: f(X, nan)),
        ("infinity", value, "infinite", lambda f: f(X, inf)),
        ("negative noise", value, "above zero", lambda f: f(X, Y, -0.1 * Y - 0.1)),
        ("zero noise", value, "above zero", lambda f: f(X, Y, 0 * Y)),
        ("wrong dtype", value, "dtype", lambda f: f(X.float(), Y.float())),
    ]


@pytest.mark.parametrize("method", ["update", "condition_on_observations"])
@pytest.mark.parametrize(
    ("error", "message", "call"),
    [case[1:] for case in bad_calls()],
    ids=[case[0] for case in bad_calls()],
)
def test_bad_data_raise_errors_of_botorch_and_leave_the_model(
    method: str, error: type[Exception], message: str, call: Callable
) -> None:
    _, ours, _ = pair()
    before = {key: value.clone() for key, value in ours.state_dict().items()}
    with pytest.raises(error, match=message):
        call(getattr(ours, method))
    after = ours.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_a_failed_update_leaves_the_units_too() -> None:
    _, ours, _ = pair()
    before = {key: value.clone() for key, value in ours.state_dict().items()}
    X, Y = data(3)

    def stop(step: int, bound: Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ours.update(X, 10 * Y, restandardize=True, callback=stop)
    assert all(torch.equal(v, before[k]) for k, v in ours.state_dict().items())


def test_bad_constructor_data_raise_errors_of_botorch() -> None:
    X, Y = data()
    with pytest.raises(BotorchTensorDimensionError, match="output dimension"):
        SingleTaskStreamingGP(X, Y.squeeze(-1))
    with pytest.raises(InputDataError, match="NaN"):
        SingleTaskStreamingGP(X, Y * torch.nan)
    with pytest.raises(InputDataError, match="above zero"):
        SingleTaskStreamingGP(X, Y, -Y.square())
    with pytest.raises(BotorchTensorDimensionError, match="Yvar"):
        SingleTaskStreamingGP(X, Y, Y[:, 0])


def test_unstandardized_outcomes_are_warned_about_as_in_botorch() -> None:
    X, Y = data()
    with pytest.warns(InputDataWarning, match="not standardized"):
        SingleTaskStreamingGP(X, 100 * Y, outcome_transform=None)


def test_known_noise_is_asked_for() -> None:
    _, ours, _ = pair(noisy=True)
    with pytest.raises(InputDataError, match="known noise"):
        ours.update(*data(2))


def test_posterior_at_wrong_inputs_raises_an_error_of_botorch() -> None:
    _, ours, _ = pair()
    with pytest.raises(BotorchTensorDimensionError, match=r"\(\.\.\., n, 2\)"):
        ours.posterior(torch.rand(3, 5).double())
    with pytest.raises(BotorchTensorDimensionError, match="output indices"):
        ours.posterior(inputs(3), output_indices=[1])


def test_fit_gpytorch_mll_names_the_options_it_takes() -> None:
    _, ours, _ = pair()
    mll = ExactMarginalLogLikelihood(ours.likelihood, ours)
    with pytest.raises(UnknownOptionError, match="num_steps"):
        fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 3}})
    with pytest.raises(UnsupportedError, match="closure"):
        fit_gpytorch_mll(mll, closure=lambda: None)


def test_missing_botorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name == "botorch" or name.startswith("botorch."):
            monkeypatch.setitem(sys.modules, name, None)
        elif name.startswith("torch_ssgp.surrogates"):
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingDependencyError, match=r"torch_ssgp\[botorch\]"):
        importlib.import_module("torch_ssgp.surrogates")


# -- Bayesian optimisation ------------------------------------------------------------


# Of BoTorch, which then starts again: where all is known, a line search may end at the
# precision of numbers.
@pytest.mark.filterwarnings("ignore:Optimization failed:RuntimeWarning")
def test_optimisation_finds_the_maximum_with_fewer_inducing_points_than_data() -> None:
    X = torch.linspace(0, 1, 4, dtype=torch.float64).unsqueeze(-1)

    def objective(X: Tensor) -> Tensor:
        return -(6 * X - 2).square() * torch.sin(12 * X - 4)

    model = SingleTaskStreamingGP(X, objective(X), num_inducing=8)
    model.fit()
    for _ in range(10):
        acquisition = LogExpectedImprovement(model, best_f=objective(X).max())
        new, _ = optimize_acqf(
            acquisition, BOUNDS[:, :1], q=1, num_restarts=2, raw_samples=32
        )
        model.update(new, objective(new), restandardize=True, num_steps=50)
        X = torch.cat([X, new])
    assert model.inducing_points.size(-2) == 8
    # The maximum of the Forrester function.
    assert float(objective(X).max()) > 6.0207 - 0.05


def test_posterior_mean_of_a_fantasy_can_be_optimised() -> None:
    _, ours, _ = pair()
    fantasy = ours.fantasize(inputs(1), IIDNormalSampler(torch.Size([2]), seed=0))
    value = PosteriorMean(fantasy)(inputs(2, 1))
    assert torch.isfinite(value).all()

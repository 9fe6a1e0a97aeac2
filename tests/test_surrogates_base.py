"""Posteriors, conditioning and states of surrogates, against exact models."""

import pickle
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.models.transforms import (
    Normalize,
    Standardize,
)
from gpytorch.kernels import MaternKernel
from torch import Tensor

from surrogate_models import (
    BOUNDS,
    KINDS,
    assert_same_posterior,
    data,
    inputs,
    outcomes,
    pair,
    sampler,
)
from torch_ssgp.surrogates import SingleTaskStreamingGP


@pytest.mark.parametrize("transforms", ["none", "outcome", "both"])
@pytest.mark.parametrize(("m", "batch", "noisy"), KINDS)
def test_it_is_the_exact_model_until_the_memory_is_full(
    m: int, batch: tuple[int, ...], noisy: bool, transforms: str
) -> None:
    options: dict[str, object] = {}
    if transforms == "none":
        options["outcome_transform"] = None
    elif transforms == "both":
        options["input_transform"] = Normalize(d=2, bounds=3 * BOUNDS - 1)
    exact, ours, _ = pair(30, m, batch, noisy, num_inducing=22, **options)
    assert ours.model.memory.num_raw == 30
    test_X = inputs(*batch, 5)
    assert_same_posterior(ours.posterior(test_X), exact.posterior(test_X), 1e-8)
    X, Y = data(2, m, batch)
    noise = {"noise": torch.full_like(Y, 0.02)} if noisy else {}
    ours_new = ours.condition_on_observations(X, Y, **noise)
    exact_new = exact.condition_on_observations(X, Y, **noise)
    assert_same_posterior(ours_new.posterior(test_X), exact_new.posterior(test_X), 1e-8)
    X = inputs(3, *batch, 2)
    new = [model.fantasize(X, sampler(4)).posterior(test_X) for model in (ours, exact)]
    assert_same_posterior(*new, 1e-8)
    exact.train()
    prior = exact(*exact.train_inputs)
    expected = exact.likelihood(prior, exact.train_inputs).log_prob(exact.train_targets)
    torch.testing.assert_close(
        ours.model.log_evidence(), expected, rtol=1e-8, atol=1e-8
    )


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


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("noisy", [False, True])
def test_conditioning_equals_an_update_in_closed_form(m: int, noisy: bool) -> None:
    _, ours, Yvar = pair(m=m, noisy=noisy)
    X, Y = data(4, m)
    noise = None if Yvar is None else torch.full_like(Y, 0.03)
    before = deepcopy(ours)
    transformed = (
        None if noise is None else noise / ours.outcome_transform.stdvs.square()
    )
    new = ours.condition_on_observations(X, Y, noise=transformed)
    updated = deepcopy(ours)
    updated.update(X, Y, noise, num_steps=0)
    test_X = inputs(6)
    assert_same_posterior(new.posterior(test_X), updated.posterior(test_X), 1e-10)
    assert new.inducing_points.size(-2) == ours.inducing_points.size(-2) + 4
    # The original is untouched.
    assert_same_posterior(before.posterior(test_X), ours.posterior(test_X), 0.0)


@pytest.mark.parametrize("add", [False, True])
def test_observations_that_add_no_points_are_deprecated(add: bool) -> None:
    _, ours, _ = pair()
    X, Y = data(2)
    with pytest.warns(DeprecationWarning, match=r"use update\(X, Y, num_steps=0\)"):
        new = ours.condition_on_observations(X, Y, add_inducing_points=add)
    expected = ours.condition_on_observations(X, Y)
    assert_same_posterior(new.posterior(X), expected.posterior(X), 0.0)


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


def test_conditioning_has_the_gradients_of_finite_differences() -> None:
    _, ours, _ = pair(n=6)
    X, Y = data(2)
    test_X = inputs(2)

    def predict(X: Tensor, Y: Tensor) -> Tensor:
        new = ours.condition_on_observations(X, Y)
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


@pytest.mark.parametrize("memory_size", [8, 12, 100])
@pytest.mark.parametrize("m", [1, 2])
def test_fantasies_factor_nothing_but_themselves(
    memory_size: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = SingleTaskStreamingGP(*data(20, m), num_inducing=8, memory_size=memory_size)
    ours.fit(num_steps=2)
    ours.update(*data(10, m), num_steps=2)
    q, test_X = 3, inputs(4, 5, 2)
    ours.posterior(test_X)
    sizes, cholesky = [], torch.linalg.cholesky_ex

    def count(K: Tensor, **options: object) -> object:
        sizes.append(K.size(-1))
        return cholesky(K, **options)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", count)
    fantasy = ours.fantasize(inputs(5, q), sampler(4))
    fantasy.posterior(test_X)
    again = fantasy.fantasize(inputs(4, 5, q), sampler(2))
    again.posterior(test_X)
    assert max(sizes) == q
    # What was fantasised is remembered all the same, should the fantasy come true.
    memory = ours.model.memory
    assert again.model.memory.num_points == memory.num_points + 2 * q


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
    assert (ours.model.memory.num_raw > 0) == (memory_size > 8)
    assert (ours.model.memory.g.size(-1) > 0) == (memory_size < 40)
    loaded.load_state_dict(ours.state_dict())
    results = [m.fit(num_steps=10) for m in (ours, loaded)]
    assert torch.equal(results[0].bound, results[1].bound)
    assert (results[0].bound_trace[-1] > results[0].bound_trace[0]).all()
    assert_same_posterior(ours.posterior(X), loaded.posterior(X), 0.0)


def test_a_state_of_version_0_2_loads() -> None:
    path = Path(__file__).parent / "data" / "surrogate_v2.pt"
    saved = torch.load(path, weights_only=True)
    ours = SingleTaskStreamingGP(*data(3), num_inducing=8)
    ours.load_state_dict(saved["state"])
    posterior = ours.posterior(saved["X"])
    # The jitter of points of raw data is gone.
    torch.testing.assert_close(posterior.mean, saved["mean"], rtol=0, atol=1e-6)
    torch.testing.assert_close(posterior.variance, saved["variance"], rtol=0, atol=1e-6)
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

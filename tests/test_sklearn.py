"""The estimators are scikit-learn's in manners and StreamingGP in numbers."""

from __future__ import annotations

import doctest
import importlib
import pickle
import sys
from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from gpytorch.means import ZeroMean
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import (
    check_sample_weight_equivalence_on_dense_data,
    parametrize_with_checks,
)

import torch_ssgp.sklearn
from examples import sklearn_pipeline
from torch_ssgp import StreamingGP, UpdateOptions
from torch_ssgp.estimators import default_likelihood, learn
from torch_ssgp.exceptions import ArgumentError, MissingDependencyError
from torch_ssgp.sklearn import StreamingGPClassifier, StreamingGPRegressor

FEW_STEPS = UpdateOptions(num_steps=10)
CLOSED_FORM = UpdateOptions(num_steps=0)
NOISE = 0.04


def regression_data(n=60, d=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, d))
    return X, np.sin(2 * X[:, 0]) + 0.2 * rng.standard_normal(n)


def labelled_data(n=60, num_classes=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, num_classes, (n, 2))
    labels = np.array(["red", "green", "blue"])[X[:, 0].astype(int)]
    return X, labels


def given_hyperparameters(**options):
    """A regressor whose kernel and noise are set, which learns in closed form."""
    kernel = ScaleKernel(MaternKernel(2.5))
    kernel.base_kernel.lengthscale, kernel.outputscale = 0.9, 1.7
    likelihood = GaussianLikelihood()
    likelihood.noise = NOISE
    return StreamingGPRegressor(
        kernel,
        mean=ZeroMean(),
        likelihood=likelihood,
        **{"options": CLOSED_FORM, **options},
    )


# -- scikit-learn's checks ------------------------------------------------------------


@parametrize_with_checks(
    [
        StreamingGPRegressor(num_inducing=15, options=FEW_STEPS),
        StreamingGPClassifier(num_inducing=15, options=FEW_STEPS),
    ]
)
def test_scikit_learn_finds_no_failure(estimator, check):
    check(estimator)


# -- weights --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [StreamingGPRegressor, StreamingGPClassifier])
def test_a_weight_is_as_many_rows_where_hyperparameters_are_given(kind):
    estimator = kind(num_inducing=20, options=CLOSED_FORM)
    check_sample_weight_equivalence_on_dense_data(kind.__name__, estimator)


def test_weights_are_remembered_from_call_to_call():
    X, y = regression_data(20)
    weight = np.arange(20) % 4
    weighted, repeated = given_hyperparameters(), given_hyperparameters()
    for rows in np.array_split(np.arange(20), 3):
        weighted.partial_fit(X[rows], y[rows], sample_weight=weight[rows])
        repeated.partial_fit(
            X[rows].repeat(weight[rows], 0), y[rows].repeat(weight[rows])
        )
    for ours, theirs in zip(
        weighted.predict(X, return_std=True),
        repeated.predict(X, return_std=True),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert float(weighted.model_.summary.num_data) == weight.sum()


@pytest.mark.parametrize("likelihood", [GaussianLikelihood, BernoulliLikelihood])
def test_the_evidence_counts_a_weight_as_so_many_data(likelihood):
    X, y = regression_data(12)
    x, y = torch.from_numpy(X), torch.from_numpy(y)
    if likelihood is BernoulliLikelihood:
        y = (y > 0).double()
    weight = torch.arange(1, 13).double() % 4 + 1
    copies = weight.long()
    bounds, means = [], []
    for data, powers in (
        ((x, y), weight),
        ((x.repeat_interleave(copies, 0), y.repeat_interleave(copies)), None),
    ):
        model = StreamingGP(ScaleKernel(RBFKernel()), likelihood()).double()
        result = learn(model, *data, CLOSED_FORM, weight=powers)
        bounds.append(result.bound)
        means.append(model(x).mean.detach())
        assert float(model.num_data) == weight.sum()
    torch.testing.assert_close(*bounds, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*means, rtol=1e-5, atol=1e-6)


def test_all_targets_of_a_row_have_its_weight():
    X, y = regression_data(20)
    weight = np.arange(20) % 3
    model = given_hyperparameters()
    Y = np.column_stack([y, y**2])
    model.fit(X, Y, sample_weight=weight)
    for k in range(2):
        one = clone(model).fit(X.repeat(weight, 0), Y[:, k].repeat(weight))
        np.testing.assert_allclose(model.predict(X)[:, k], one.predict(X), rtol=1e-6)


def test_a_weight_divides_the_noise():
    X, y = regression_data(30)
    weight = np.random.default_rng(1).uniform(0.2, 5, 30)
    estimator = given_hyperparameters().fit(X, y, sample_weight=weight)
    model = StreamingGP(
        deepcopy(estimator.kernel), deepcopy(estimator.likelihood), ZeroMean()
    ).double()
    noise = torch.from_numpy(NOISE / weight)
    model.update(torch.from_numpy(X), torch.from_numpy(y), noise, num_steps=0)
    latent = model(torch.from_numpy(X))
    mean, std = estimator.predict(X, return_std=True)
    np.testing.assert_allclose(mean, latent.mean.detach(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(std, latent.stddev.detach(), rtol=1e-6)


# -- the same numbers -----------------------------------------------------------------


def test_partial_fit_is_update():
    X, y = regression_data(60)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    estimator = StreamingGPRegressor(kernel, num_inducing=10, options=FEW_STEPS)
    model = StreamingGP(deepcopy(kernel), default_likelihood(), num_inducing=10)
    model = model.double()
    for rows in np.array_split(np.arange(60), 3):
        assert estimator.partial_fit(X[rows], y[rows]) is estimator
        x, t = torch.from_numpy(X[rows]), torch.from_numpy(y[rows])
        result = model.update(x, t, num_steps=10)
    x = torch.from_numpy(X)
    latent, target = model(x).mean.detach(), model.predict(x).stddev.detach()
    mean, std = estimator.predict(X, return_std=True, include_noise=True)
    np.testing.assert_allclose(mean, latent, rtol=1e-12)
    np.testing.assert_allclose(std, target, rtol=1e-12)
    assert torch.equal(estimator.result_.bound, result.bound)


def test_partial_fit_of_labels_is_update():
    X, y = labelled_data(40)
    kernel = ScaleKernel(RBFKernel())
    estimator = StreamingGPClassifier(kernel, num_inducing=10, options=FEW_STEPS)
    model = StreamingGP(deepcopy(kernel), BernoulliLikelihood(), num_inducing=10)
    model = model.double()
    for rows in np.array_split(np.arange(40), 2):
        estimator.partial_fit(X[rows], y[rows], classes=["red", "green"])
        labels = torch.from_numpy(y[rows] == "red")
        model.update(torch.from_numpy(X[rows]), labels, num_steps=10)
    expected = model.predict(torch.from_numpy(X)).mean.detach()
    np.testing.assert_array_equal(estimator.predict_proba(X)[:, 1], expected)
    assert estimator.classes_.tolist() == ["green", "red"]


def test_predictions_have_the_meaning_of_gaussian_process_regressor():
    X, y = regression_data(30)
    X_test, _ = regression_data(10, seed=1)
    theirs = GaussianProcessRegressor(
        ConstantKernel(1.7) * Matern(0.9, nu=2.5), alpha=NOISE, optimizer=None
    ).fit(X, y)
    ours = given_hyperparameters().fit(X, y)
    for options in ({"return_std": True}, {"return_cov": True}):
        for a, b in zip(
            ours.predict(X_test, **options),
            theirs.predict(X_test, **options),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_allclose(ours.predict(X_test), theirs.predict(X_test), atol=1e-5)
    _, std = ours.predict(X_test, return_std=True)
    _, with_noise = ours.predict(X_test, return_std=True, include_noise=True)
    np.testing.assert_allclose(with_noise**2, std**2 + NOISE)
    with pytest.raises(RuntimeError, match="At most one of return_std or return_cov"):
        ours.predict(X_test, return_std=True, return_cov=True)


def test_fit_begins_anew():
    X, y = regression_data()
    fresh = StreamingGPRegressor(num_inducing=10, options=FEW_STEPS).fit(X, y)
    used = clone(fresh).partial_fit(X + 5, 100 * y).fit(X, y)
    np.testing.assert_array_equal(used.predict(X), fresh.predict(X))
    used.fit(X[:, :1], y)
    assert used.n_features_in_ == 1


@pytest.mark.parametrize("unit", [1e-12, 1e-6, 1e-4, 1e-2, 1e4])
def test_units_of_targets_do_not_matter(unit):
    X, y = regression_data()
    usual = StreamingGPRegressor(options=FEW_STEPS).fit(X, y)
    other = clone(usual).fit(X, unit * y)
    expected, deviation = usual.predict(X, return_std=True)
    found, spread = other.predict(X, return_std=True)
    np.testing.assert_allclose(found / unit, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(spread / unit, deviation, rtol=1e-4)


@pytest.mark.parametrize("level", [0.0, 1e-6, 5.0])
def test_constant_targets_are_constant(level):
    X, _ = regression_data(40)
    model = StreamingGPRegressor(num_inducing=20)
    for rows in np.array_split(np.arange(40), 4):
        model.partial_fit(X[rows], np.full(len(rows), level))
        mean, std = model.predict(X, return_std=True, include_noise=True)
        np.testing.assert_allclose(mean, level, rtol=1e-3, atol=1e-9)
        assert (std < 1e-3).all()


def test_units_of_features_do_not_matter():
    X, y = regression_data()
    small = StreamingGPRegressor(num_inducing=20, options=FEW_STEPS).fit(X, y)
    units = np.array([1e-6, 1e6])
    large = clone(small).fit(X * units, y)
    np.testing.assert_allclose(large.predict(X * units), small.predict(X), rtol=1e-6)
    assert small.score(X, y) > 0.8


# -- several targets and classes -------------------------------------------------------


def test_several_targets_are_several_regressors():
    X, y = regression_data()
    Y = np.column_stack([y, 1000 * y[::-1]])
    both = StreamingGPRegressor(num_inducing=60, options=FEW_STEPS)
    for rows in np.array_split(np.arange(60), 2):
        both.partial_fit(X[rows], Y[rows])
    mean, std = both.predict(X, return_std=True)
    assert mean.shape == std.shape == (60, 2)
    assert both.predict(X, return_cov=True)[1].shape == (60, 60, 2)
    assert both.sample_y(X, 3).shape == (60, 2, 3)
    assert both.score(X, Y) > 0.5
    first = clone(both)
    for rows in np.array_split(np.arange(60), 2):
        first.partial_fit(X[rows], Y[rows, 0])
    # Streams that learn together share step and stop: alike, not the same.
    np.testing.assert_allclose(mean[:, 0], first.predict(X), atol=0.05)
    _, covariance = both.predict(X, return_cov=True)
    np.testing.assert_allclose(
        np.sqrt(np.diagonal(covariance)).T, std, rtol=1e-5, atol=1e-8
    )


def test_one_column_of_targets_is_one_target():
    X, y = regression_data()
    model = StreamingGPRegressor(num_inducing=10, options=FEW_STEPS).fit(X, y[:, None])
    assert model.predict(X).shape == (60,)
    model.partial_fit(X, y)


def test_three_classes_in_chunks():
    X, y = labelled_data(120, num_classes=3)
    model = StreamingGPClassifier(num_inducing=20, options=UpdateOptions(num_steps=30))
    for rows in np.array_split(np.arange(120), 2):
        model.partial_fit(X[rows], y[rows], classes=["red", "green", "blue"])
    probabilities = model.predict_proba(X)
    assert probabilities.shape == (120, 3)
    np.testing.assert_allclose(probabilities.sum(-1), 1)
    assert model.score(X, y) > 0.9
    np.testing.assert_allclose(
        np.concatenate([model.predict_proba(row) for row in X[:5, None]]),
        probabilities[:5],
    )


def test_probabilities_of_a_softmax_are_its_expectation():
    X, y = labelled_data(60, num_classes=3)
    model = StreamingGPClassifier(num_inducing=20, options=FEW_STEPS).fit(X, y)
    latent = model.model_(torch.from_numpy(X))
    draws = torch.randn(100_000, 3, 60, dtype=torch.float64)
    with torch.no_grad():
        p = (latent.mean + latent.variance.sqrt() * draws).softmax(-2).mean(0).mT
    np.testing.assert_allclose(model.predict_proba(X), p, atol=5e-3)


def test_classes_are_named_at_the_first_call():
    X, y = labelled_data()
    model = StreamingGPClassifier(num_inducing=10, options=FEW_STEPS)
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        model.partial_fit(X, y)
    model.partial_fit(X[:10], np.full(10, "red"), classes=["red", "green"])
    with pytest.raises(ValueError, match="not the same as on the last call"):
        model.partial_fit(X, y, classes=["red", "blue"])
    with pytest.raises(ValueError, match=r"labels \['blue'\] that are not among"):
        model.partial_fit(X, np.full(60, "blue"))
    with pytest.raises(ValueError, match="greater than one; got 1 class"):
        model.fit(X, np.full(60, "red"))
    assert set(model.predict(X)) == {"red"}


# -- draws ----------------------------------------------------------------------------


def test_draws_have_the_moments_of_the_posterior():
    X, y = regression_data(40)
    model = given_hyperparameters().fit(X, y)
    grid = X[:6] + 0.3
    mean, covariance = model.predict(grid, return_cov=True)
    draws = model.sample_y(grid, 20_000, random_state=0)
    np.testing.assert_allclose(draws.mean(-1), mean, atol=0.02)
    np.testing.assert_allclose(np.cov(draws), covariance, atol=0.02)
    targets = model.sample_y(grid, 20_000, random_state=0, include_noise=True)
    np.testing.assert_allclose(
        np.cov(targets), covariance + NOISE * np.eye(6), atol=0.02
    )


def test_draws_follow_their_random_state_and_leave_others_alone():
    X, y = regression_data(20)
    model = given_hyperparameters().fit(X, y)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    a, b = (model.sample_y(X, 2, random_state=7) for _ in range(2))
    np.testing.assert_array_equal(a, b)
    state = np.random.RandomState(7)
    np.testing.assert_array_equal(model.sample_y(X, 2, random_state=state), a)
    assert not np.array_equal(model.sample_y(X, 2, random_state=state), a)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


# -- manners --------------------------------------------------------------------------


def test_frames_bring_their_names():
    X, y = regression_data()
    frame = pd.DataFrame(X, columns=["wind", "rain"])
    model = StreamingGPRegressor(num_inducing=10, options=FEW_STEPS)
    model.partial_fit(frame[:30], pd.Series(y[:30]))
    model.partial_fit(frame[30:], pd.Series(y[30:]))
    assert model.feature_names_in_.tolist() == ["wind", "rain"]
    mean = model.predict(frame)
    assert type(mean) is np.ndarray and mean.dtype == np.float64
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[["rain", "wind"]])
    with pytest.raises(ValueError, match="feature names should match"):
        model.partial_fit(frame.rename(columns={"rain": "snow"}), y)
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        np.testing.assert_array_equal(model.predict(X), mean)


def test_a_copy_goes_on_as_the_original():
    X, y = regression_data()
    model = StreamingGPRegressor(num_inducing=10, options=FEW_STEPS).fit(X, y)
    copies = [pickle.loads(pickle.dumps(model)), deepcopy(model)]
    model.partial_fit(X + 1, y)
    for copy in copies:
        copy.partial_fit(X + 1, y)
        np.testing.assert_array_equal(copy.predict(X), model.predict(X))


def test_a_clone_has_the_parameters_and_nothing_else():
    X, y = regression_data()
    kernel = ScaleKernel(RBFKernel(lengthscale_constraint=GreaterThan(0.1)))
    model = StreamingGPRegressor(kernel, num_inducing=10, options=FEW_STEPS)
    lengthscale = kernel.base_kernel.lengthscale.item()
    other = clone(model.fit(X, y))
    assert kernel.base_kernel.lengthscale.item() == lengthscale
    assert kernel.base_kernel.lengthscale.dtype == torch.get_default_dtype()
    assert other.get_params().keys() == model.get_params().keys()
    assert other.kernel is not kernel and other.options == FEW_STEPS
    with pytest.raises(NotFittedError):
        other.predict(X)
    np.testing.assert_array_equal(other.fit(X, y).predict(X), model.predict(X))


def test_options_may_change_between_calls():
    X, y = regression_data()
    model = StreamingGPRegressor(num_inducing=10, options=FEW_STEPS).fit(X, y)
    model.set_params(options=UpdateOptions(num_steps=3, learn_hyperparameters=True))
    model.partial_fit(X, y)
    assert model.result_.num_steps <= 3


def test_options_are_parameters_too():
    model = StreamingGPRegressor()
    assert model.get_params()["options__num_steps"] == UpdateOptions().num_steps
    model.set_params(options__num_steps=3, num_inducing=7)
    assert (model.options, model.num_inducing) == (UpdateOptions(num_steps=3), 7)
    model.set_params(options=FEW_STEPS, options__lr=0.2)
    assert clone(model).options == UpdateOptions(num_steps=10, lr=0.2)
    with pytest.raises(ValueError, match="Did you mean num_steps"):
        model.set_params(options__num_step=3)


@pytest.mark.parametrize("kind", [StreamingGPRegressor, StreamingGPClassifier])
def test_a_wrong_name_names_the_right_one(kind):
    with pytest.raises(TypeError, match="'num_inducin'. Did you mean num_inducing"):
        kind(num_inducin=3)
    with pytest.raises(TypeError, match=r"options=UpdateOptions\(num_steps=\.\.\.\)"):
        kind(num_steps=3)
    with pytest.raises(TypeError, match="Did you mean num_steps"):
        UpdateOptions(num_step=3)


def test_from_memory_is_a_word_of_the_past():
    X, y = regression_data(10)
    model = StreamingGPRegressor(from_memory=True, options=CLOSED_FORM)
    with pytest.warns(DeprecationWarning, match="Leave it out"):
        model.fit(X, y)


def test_pipelines_and_searches_take_it():
    X, y = regression_data(45)
    model = StreamingGPRegressor(num_inducing=15, options=FEW_STEPS)
    pipeline = make_pipeline(StandardScaler(), model)
    assert cross_val_score(pipeline, X, y, cv=3).mean() > 0.5
    search = GridSearchCV(
        model, {"options": [CLOSED_FORM, FEW_STEPS], "num_inducing": [5, 15]}, cv=3
    ).fit(X, y)
    assert search.best_params_["num_inducing"] == 15
    search = GridSearchCV(
        pipeline, {"streaminggpregressor__options__num_steps": [1, 9]}
    )
    search.fit(X, y)
    assert search.best_estimator_[-1].options.num_steps in (1, 9)
    X, y = labelled_data(45)
    model = StreamingGPClassifier(num_inducing=15, options=FEW_STEPS)
    assert cross_val_score(model, X, y, cv=3).mean() > 0.8


def test_it_computes_where_it_is_told():
    X, y = regression_data(10)
    model = StreamingGPRegressor(device="cpu", options=FEW_STEPS).fit(X, y)
    assert model.model_.device == torch.device("cpu")


# -- bad input ------------------------------------------------------------------------


def with_nan(X):
    return np.where(np.arange(X.size).reshape(X.shape) == 3, np.nan, X)


BAD_CALLS = {
    "NaN in X": ("Input X contains NaN", lambda X, y: (with_nan(X), y)),
    "infinity in y": (
        "Input y contains infinity",
        lambda X, y: (X, np.where(np.arange(len(y)) == 1, np.inf, y)),
    ),
    "more features": (
        "X has 4 features, but .* is expecting 2 features",
        lambda X, y: (np.column_stack([X, X]), y),
    ),
    "other lengths": ("inconsistent numbers of samples", lambda X, y: (X[:3], y)),
    "no rows": ("0 sample", lambda X, y: (X[:0], y[:0])),
    "text": ("could not convert string", lambda X, y: (X.astype(str) + "a", y)),
    "one dimension": ("Expected 2D array, got 1D array", lambda X, y: (X[:, 0], y)),
    "other targets": (
        r"y has shape \(60, 2\); expected \(60,\)",
        lambda X, y: (X, np.column_stack([y, y])),
    ),
    "negative weights": ("negative", lambda X, y: (X, y, -np.ones(len(y)))),
    "NaN in weights": ("sample_weight contains NaN", lambda X, y: (X, y, y * np.nan)),
    "too few weights": (
        r"has shape \(3,\); expected \(60,\)",
        lambda X, y: (X, y, y[:3]),
    ),
}


@pytest.fixture(scope="module")
def fitted():
    """A regressor that has learned; nothing below changes it."""
    model = StreamingGPRegressor(num_inducing=10, options=FEW_STEPS)
    return model.fit(*regression_data())


@pytest.mark.parametrize("message, make", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_data_are_refused_and_change_nothing(message, make, fitted):
    (X, y), model = regression_data(), deepcopy(fitted)
    expected, attributes = model.predict(X), set(vars(model))
    with pytest.raises(ValueError, match=message):
        model.partial_fit(*make(X, y))
    np.testing.assert_array_equal(model.predict(X), expected)
    assert set(vars(model)) == attributes


BAD_LABELS = {
    **{
        name: BAD_CALLS[name]
        for name in ("NaN in X", "more features", "other lengths", "no rows", "text")
    },
    "a new class": (
        "classes",
        lambda X, y: (X, np.where(np.arange(len(y)) == 1, 7, y)),
    ),
    "numbers": ("Unknown label type", lambda X, y: (X, y + 0.5 * X[:, 0])),
    "NaN as label": (
        "NaN",
        lambda X, y: (X, np.where(np.arange(len(y)) == 1, np.nan, y)),
    ),
}


@pytest.mark.parametrize("message, make", BAD_LABELS.values(), ids=BAD_LABELS)
def test_bad_labels_are_refused_and_change_nothing(message, make):
    X, y = regression_data()
    y = (y > np.median(y)).astype(float)
    model = StreamingGPClassifier(num_inducing=10, options=FEW_STEPS).fit(X, y)
    expected, attributes = model.predict_proba(X), set(vars(model))
    with pytest.raises(ValueError, match=message):
        model.partial_fit(*make(X, y))
    np.testing.assert_array_equal(model.predict_proba(X), expected)
    assert set(vars(model)) == attributes


def test_a_fit_that_fails_leaves_the_model_of_before():
    X, y = regression_data()
    frame = pd.DataFrame(X, columns=["a", "b"])
    model = StreamingGPRegressor(num_inducing=10, options=FEW_STEPS).fit(frame, y)
    expected = model.predict(frame)
    bad = pd.DataFrame(with_nan(X), columns=["c", "d"])
    with pytest.raises(ValueError, match="NaN"):
        model.fit(bad, y)
    assert model.feature_names_in_.tolist() == ["a", "b"]
    np.testing.assert_array_equal(model.predict(frame), expected)


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"options": {"num_steps": 3}}, "options is a dict; expected an UpdateOptions"),
        ({"kernel": "rbf"}, "kernel is a str; expected a Kernel"),
        ({"num_inducing": 0}, "num_inducing is 0"),
        ({"mean": 0.0}, "mean_module is a float"),
        ({"likelihood": BernoulliLikelihood()}, "expected a GaussianLikelihood"),
    ],
)
def test_bad_parameters_are_refused_by_fit(parameters, message):
    X, y = regression_data(10)
    model = StreamingGPRegressor(**parameters)
    with pytest.raises(ArgumentError, match=message):
        model.fit(X, y)
    with pytest.raises(NotFittedError):
        model.predict(X)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "torch_ssgp.sklearn")
    with pytest.raises(MissingDependencyError, match=r"torch_ssgp\[sklearn\]"):
        importlib.import_module("torch_ssgp.sklearn")


def test_examples_in_the_docstrings_run():
    assert doctest.testmod(torch_ssgp.sklearn).failed == 0


def test_the_pipeline_of_the_example_is_as_good_as_an_exact_gp(capsys):
    scores = sklearn_pipeline.main(num_chunks=3, num_steps=20)
    ours, exact, linear = scores["folds"]
    assert ours > min(exact, linear) - 0.02
    assert scores["chunks"][-1] > 0.3
    assert "inside 90 %" in capsys.readouterr().out

"""The estimators are river's in manners and StreamingGP in numbers."""

from __future__ import annotations

import datetime as dt
import doctest
import importlib
import math
import pickle
import sys
from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from river import checks, compose, datasets, evaluate, metrics, preprocessing

import torch_ssgp.river
from examples import river_stream
from torch_ssgp import StreamingGP, UpdateOptions
from torch_ssgp.estimators import default_kernel, default_likelihood
from torch_ssgp.exceptions import (
    ArgumentError,
    BudgetWarning,
    FactorizationError,
    MissingDependencyError,
    StreamingGPWarning,
)
from torch_ssgp.river import StreamingGPClassifier, StreamingGPRegressor

FEW_STEPS = UpdateOptions(num_steps=5)
CLOSED_FORM = UpdateOptions(num_steps=0)


def regression_stream(n=30, seed=0):
    rng = np.random.default_rng(seed)
    for a, b in rng.uniform(-1, 1, (n, 2)).tolist():
        yield {"a": a, "b": b}, math.sin(2 * a) + b


def labelled_stream(n=40, labels=("low", "high"), seed=0):
    rng = np.random.default_rng(seed)
    for a, b in rng.uniform(0, len(labels), (n, 2)).tolist():
        yield {"a": a, "b": b}, labels[int(a)]


def as_frames(stream):
    rows, targets = zip(*stream, strict=True)
    index = [f"row {k}" for k in range(len(rows))]
    return pd.DataFrame(rows, index=index), pd.Series(targets, index=index)


def as_tensors(stream):
    X, y = as_frames(stream)
    return torch.tensor(X.to_numpy()), torch.tensor(y.to_numpy())


def small(kind, **options):
    return kind(**{"num_inducing": 10, "options": FEW_STEPS, **options})


# -- river's checks -------------------------------------------------------------------


def river_checks():
    one_step = UpdateOptions(num_steps=1, restart=False)
    for kind in (StreamingGPRegressor, StreamingGPClassifier):
        model = kind(num_inducing=5, batch_size=100, options=one_step)
        for k, check in enumerate(checks.yield_checks(model)):
            name = f"{kind.__name__}-{k}-{check.__name__}"
            if check.__name__ not in model._unit_test_skips():
                yield pytest.param(model, check, id=name)


@pytest.mark.parametrize("model, check", list(river_checks()))
def test_river_finds_no_failure(model, check):
    check(model.clone())


def test_one_check_of_river_does_not_apply():
    for kind in (StreamingGPRegressor, StreamingGPClassifier):
        assert kind()._unit_test_skips() == {"check_learn_many_matches_learn_one"}


def test_many_are_learned_as_one_by_one_where_hyperparameters_are_fixed():
    one = small(StreamingGPRegressor, num_inducing=30, options=CLOSED_FORM)
    many = one.clone()
    for x, y in regression_stream():
        one.learn_one(x, y)
    many.learn_many(*as_frames(regression_stream()))
    for x, _ in regression_stream(10, seed=1):
        assert one.predict_one(x) == pytest.approx(many.predict_one(x), abs=1e-6)


# -- the same numbers -----------------------------------------------------------------


def test_learning_is_update():
    model = small(StreamingGPRegressor)
    expected = StreamingGP(default_kernel(2), default_likelihood(), num_inducing=10)
    expected = expected.double()
    model.learn_many(*as_frames(regression_stream()))
    x, y = as_tensors(regression_stream())
    expected.update(x, y, num_steps=5)
    for datum, target in regression_stream(3, seed=1):
        model.learn_one(datum, target)
    x, y = as_tensors(regression_stream(3, seed=1))
    for k in range(3):
        expected.update(x[k : k + 1], y[k : k + 1], num_steps=5)
    prediction = expected.predict(x)
    X, _ = as_frames(regression_stream(3, seed=1))
    series = model.predict_many(X)
    assert series.index.equals(X.index)
    np.testing.assert_allclose(series, prediction.mean.detach(), rtol=1e-12)
    for k, (datum, _) in enumerate(regression_stream(3, seed=1)):
        distribution = model.predict_one(datum, with_dist=True)
        assert distribution.mu == pytest.approx(prediction.mean[k].item())
        assert distribution.sigma == pytest.approx(prediction.stddev[k].item())


def test_the_past_is_left_behind_where_the_evidence_is_overwhelming():
    rng = np.random.default_rng(0)
    errors = {}
    for forget in ("default", 1.0):
        options = None if forget == "default" else UpdateOptions(forget=forget)
        model = StreamingGPRegressor(num_inducing=30, options=options)
        for sign in (1, -5):
            x = rng.uniform(0, 6, 120)
            y = sign * np.sin(x) + 0.1 * rng.standard_normal(120)
            for v, t in zip(x.tolist(), y.tolist(), strict=True):
                model.learn_one({"x": v}, t)
        grid = np.linspace(0, 6, 50)
        mean = model.predict_many(pd.DataFrame({"x": grid}))
        errors[forget] = np.abs(mean + 5 * np.sin(grid)).mean()
    assert errors["default"] < 0.3 < errors[1.0]


def test_an_interval_holds_its_share_of_targets():
    rng = np.random.default_rng(0)
    model = StreamingGPRegressor(num_inducing=20, options=UpdateOptions(num_steps=50))
    x = rng.uniform(-1, 1, 600)
    y = np.sin(3 * x) + 0.3 * rng.standard_normal(600)
    model.learn_many(pd.DataFrame({"x": x[:200]}), pd.Series(y[:200]))
    data = list(zip(x[200:].tolist(), y[200:].tolist(), strict=True))
    for level in (0.5, 0.9):
        inside = [t in model.predict_interval_one({"x": v}, level) for v, t in data]
        assert np.mean(inside) == pytest.approx(level, abs=0.06)
    distribution = model.predict_one({"x": 0.0}, with_dist=True)
    interval = model.predict_interval_one({"x": 0.0}, 0.9)
    assert distribution.cdf(interval.upper) == pytest.approx(0.95, abs=1e-6)


@pytest.mark.parametrize("many", [False, True])
def test_intervals_follow_the_errors_of_earlier_predictions(many):
    model = StreamingGPRegressor(options=UpdateOptions(num_steps=0))
    model.learn_one({"x": 0.0}, 0.0)
    model.learn_one({"x": 1.0}, 0.1)
    before = model._calibration
    prediction = model.predict_one({"x": 0.5}, with_dist=True)
    if many:
        model.learn_many(pd.DataFrame({"x": [0.5]}), pd.Series([5.0]))
    else:
        model.learn_one({"x": 0.5}, 5.0)
    distance = (5.0 - prediction.mu) / prediction.sigma
    expected = before.seen([distance])
    assert model._calibration.distances == pytest.approx(expected.distances)
    # The distribution is the model's alone.
    distribution = model.predict_one({"x": 0.2}, with_dist=True)
    half = (model.predict_interval_one({"x": 0.2}).upper - distribution.mu) / (
        distribution.sigma
    )
    assert half == pytest.approx(expected.half_width(0.9))


def test_a_fresh_estimator_has_no_experience():
    model = StreamingGPRegressor(options=UpdateOptions(num_steps=0))
    for k in range(4):
        model.learn_one({"x": float(k)}, float(k))
    assert model._calibration.distances
    assert StreamingGPRegressor()._calibration.distances == ()
    assert model.clone()._calibration.distances == ()


# -- before the first datum, and while data wait ---------------------------------------


def test_before_the_first_datum_the_prior_predicts():
    model = StreamingGPRegressor()
    assert model.predict_one({"a": 3.0}) == 0.0
    assert model.predict_one({}) == 0.0
    assert model.predict_one({"a": 3.0}, with_dist=True).sigma > 0
    assert 0.0 in model.predict_interval_one({"a": 3.0})
    X, _ = as_frames(regression_stream(4))
    assert model.predict_many(X).tolist() == [0.0] * 4
    assert model.model is None and model.feature_names == ()


def test_before_the_first_label_nothing_is_probable():
    model = StreamingGPClassifier()
    assert model.predict_proba_one({"a": 3.0}) == {}
    assert model.predict_one({"a": 3.0}) is None
    X, _ = as_frames(regression_stream(4))
    assert model.predict_many(X).tolist() == [None] * 4
    assert model.predict_proba_many(X).shape == (4, 0)


def test_data_wait_for_each_other():
    model = small(StreamingGPRegressor, options=CLOSED_FORM, batch_size=8)
    known = []
    for x, y in regression_stream(28):
        model.learn_one(x, y)
        known.append(int(model.model.summary.num_data))
    # 1, 1, 2, 4, then 8 at a time.
    assert sorted(set(known)) == [1, 2, 4, 8, 16, 24]
    model.learn_many(*as_frames(regression_stream(2, seed=1)))
    assert int(model.model.summary.num_data) == 30


# -- features -------------------------------------------------------------------------


def test_a_feature_that_appears_had_one_value_before():
    model = small(StreamingGPRegressor, num_inducing=40, options=CLOSED_FORM)
    model.learn_many(*as_frames(regression_stream()))
    before = [model.predict_one(x) for x, _ in regression_stream()]
    model.learn_many(
        pd.DataFrame({"c": [4.0, 6.0], "a": [0.1, 0.2], "b": [0.3, 0.4]}),
        pd.Series([1.0, 2.0]),
    )
    assert model.feature_names == ("a", "b", "c")

    # The same, by a model that saw the column from the start.
    kernel = default_kernel(3)
    kernel.base_kernel.lengthscale = torch.tensor(
        [[*kernel.base_kernel.lengthscale[0, :2].tolist(), 1.0]]
    )
    expected = StreamingGP(kernel, default_likelihood(), num_inducing=40).double()
    x, y = as_tensors(regression_stream())
    seen = torch.cat([x, torch.full((30, 1), 5.0)], -1)
    expected.update(seen, y, num_steps=0)
    np.testing.assert_allclose(before, expected(seen).mean.detach(), rtol=1e-6)
    x_new = torch.tensor([[0.1, 0.3, 4.0], [0.2, 0.4, 6.0]]).double()
    expected.update(x_new, torch.tensor([1.0, 2.0]).double(), num_steps=0)
    for row, mean in zip(seen.tolist(), expected(seen).mean.tolist(), strict=True):
        datum = dict(zip("abc", row, strict=True))
        assert model.predict_one(datum) == pytest.approx(mean, rel=1e-6)


def test_a_feature_that_appears_is_learned():
    rng = np.random.default_rng(0)
    model = small(StreamingGPRegressor, num_inducing=30, options=None)
    a, c = rng.uniform(-1, 1, (2, 120))
    model.learn_many(pd.DataFrame({"a": a[:20]}), pd.Series(np.sin(a[:20])))
    frame = pd.DataFrame({"a": a[20:], "c": 1000 * c[20:]})
    model.learn_many(frame, pd.Series(np.sin(a[20:]) + 5 * c[20:]))
    error = model.predict_many(frame) - np.sin(a[20:]) - 5 * c[20:]
    assert error.abs().mean() < 0.3


@pytest.mark.parametrize("kind", [StreamingGPRegressor, StreamingGPClassifier])
@pytest.mark.parametrize("absent", [None, 7.0])
def test_an_absent_feature_counts_as_its_mean_or_as_told(kind, absent):
    stream = regression_stream if kind is StreamingGPRegressor else labelled_stream
    model = small(kind, absent=absent)
    model.learn_many(*as_frames(stream()))
    infer = getattr(model, "predict_proba_one", model.predict_one)
    mean = sum(x["b"] for x, _ in stream()) / len(list(stream()))
    expected = infer({"a": 0.5, "b": mean if absent is None else absent})
    for x in ({"a": 0.5}, {"a": 0.5, "b": None}, {"b": math.nan, "a": 0.5, "c": 1}):
        assert infer(x) == pytest.approx(expected)
    model.learn_one({"a": 0.4}, next(stream())[1])


def test_a_kernel_given_is_for_the_first_features():
    model = small(StreamingGPRegressor, kernel=ScaleKernel(RBFKernel(ard_num_dims=2)))
    model.learn_many(*as_frames(regression_stream()))
    with pytest.warns(StreamingGPWarning, match="features c, d are ignored") as caught:
        model.learn_one({"a": 0.1, "b": 0.2, "c": 1.0, "d": 1.0}, 0.0)
    assert caught[0].filename == __file__
    model.learn_one({"a": 0.1, "b": 0.2, "c": 1.0}, 0.0)  # said once
    assert model.feature_names == ("a", "b")


# -- labels ---------------------------------------------------------------------------


def test_classes_appear_one_after_the_other():
    model = StreamingGPClassifier(
        num_inducing=20, batch_size=40, options=UpdateOptions(num_steps=20)
    )
    first = [(x, y) for x, y in labelled_stream(30, labels=("low", "high"))]
    low = [(x, y) for x, y in first if y == "low"]
    for x, y in low:
        model.learn_one(x, y)
    assert model.predict_proba_one(low[0][0]) == {"low": 1.0}
    assert model.predict_many(as_frames(low)[0]).tolist() == ["low"] * len(low)
    model.learn_many(*as_frames(first))
    assert model.classes == ("low", "high")
    stream = list(labelled_stream(60, labels=("low", "high", 3)))
    three = next(x for x, y in stream if y == 3)
    model.learn_one(three, 3)  # does not wait
    assert model.classes == ("low", "high", 3)
    for x, y in stream:
        model.learn_one(x, y)
    X, y = as_frames(stream)
    assert (model.predict_many(X) == y).mean() > 0.85
    probabilities = model.predict_proba_many(X)
    assert list(probabilities) == ["low", "high", 3]
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)


def test_what_a_new_class_is_learned_from_is_bounded():
    model = small(StreamingGPClassifier, memory_size=15, options=CLOSED_FORM)
    model.learn_many(*as_frames(labelled_stream(40)))
    model.learn_one({"a": 3.0, "b": 1.0}, "new")
    assert int(model.model.summary.num_data) == 16


# -- manners --------------------------------------------------------------------------


def test_pipelines_and_metrics_take_it():
    model = small(StreamingGPRegressor, batch_size=25)
    pipeline = compose.Select("a", "b") | preprocessing.StandardScaler() | model
    metric = evaluate.progressive_val_score(
        list(regression_stream(150)), pipeline, metrics.MAE()
    )
    assert metric.get() < 0.4
    model = small(StreamingGPClassifier, batch_size=50)
    metric = evaluate.progressive_val_score(
        datasets.Phishing().take(200), model, metrics.Accuracy()
    )
    assert metric.get() > 0.7


def friedman(seed):
    drifting = datasets.synth.FriedmanDrift("gra", (150, 250), seed=seed)
    return list(drifting.take(350))


@pytest.mark.parametrize(
    "streams",
    [
        lambda: [list(datasets.TrumpApproval().take(300))],
        lambda: [friedman(seed) for seed in (1, 2)],
    ],
    ids=["TrumpApproval", "FriedmanDrift"],
)
def test_a_scaler_that_goes_on_learning_does_little_harm(streams):
    plain = scaled = 0.0
    for stream in streams():
        model, pipeline = StreamingGPRegressor(), preprocessing.StandardScaler()
        pipeline = pipeline | StreamingGPRegressor()
        mae = metrics.MAE
        plain += evaluate.progressive_val_score(stream, model, mae()).get()
        scaled += evaluate.progressive_val_score(stream, pipeline, mae()).get()
    assert scaled < 1.15 * plain


def test_too_few_points_are_a_matter_of_its_own_arguments():
    model = StreamingGPRegressor(num_inducing=4, options=CLOSED_FORM)
    x = np.linspace(0, 20, 80)
    with pytest.warns(BudgetWarning, match="Raise num_inducing") as caught:
        model.learn_many(pd.DataFrame({"x": x}), pd.Series(np.sin(3 * x)))
    assert "policy" not in str(caught[0].message)


@pytest.mark.parametrize("kind", [StreamingGPRegressor, StreamingGPClassifier])
def test_a_wrong_name_names_the_right_one(kind):
    with pytest.raises(TypeError, match="'batchsize'. Did you mean batch_size"):
        kind(batchsize=3)
    with pytest.raises(TypeError, match=r"options=UpdateOptions\(num_steps=\.\.\.\)"):
        kind(num_steps=3)


def test_from_memory_is_a_word_of_the_past():
    with pytest.warns(DeprecationWarning, match="Leave it out"):
        StreamingGPRegressor(from_memory=True)


@pytest.mark.parametrize(
    "value, advice",
    [
        (dt.datetime(2026, 1, 1), r"x\['when'\]\.timestamp\(\) / 86400"),
        (dt.date(2026, 1, 1), r"x\['when'\]\.toordinal\(\)"),
        (dt.timedelta(hours=1), r"x\['when'\]\.total_seconds\(\) / 86400"),
    ],
)
def test_a_time_is_to_be_made_a_number(value, advice):
    with pytest.raises(ValueError, match=f"Convert it to days, such as {advice}"):
        StreamingGPRegressor().learn_one({"when": value}, 1.0)


@pytest.mark.parametrize("kind", [StreamingGPRegressor, StreamingGPClassifier])
def test_a_copy_goes_on_as_the_original(kind):
    stream = regression_stream if kind is StreamingGPRegressor else labelled_stream
    model = small(kind, batch_size=4)
    for x, y in stream(10):
        model.learn_one(x, y)
    copies = [
        pickle.loads(pickle.dumps(model)),
        deepcopy(model),
        model.clone(include_attributes=True),
    ]
    for other in (model, *copies):
        for x, y in stream(10, seed=1):
            other.learn_one(x, y)
    for x, _ in stream(5, seed=2):
        assert all(c.predict_one(x) == model.predict_one(x) for c in copies)


def test_a_clone_has_the_parameters_and_nothing_else():
    kernel = ScaleKernel(RBFKernel())
    model = small(StreamingGPRegressor, kernel=kernel, absent=0.0)
    model.learn_many(*as_frames(regression_stream()))
    other = model.clone({"num_inducing": 7})
    assert other.model is None and other.feature_names == ()
    assert (other.num_inducing, other.absent, other.options) == (7, 0.0, FEW_STEPS)
    assert other.kernel is not kernel
    assert kernel.outputscale.item() == ScaleKernel(RBFKernel()).outputscale.item()


def test_an_empty_batch_is_no_batch():
    model = small(StreamingGPRegressor)
    X, y = as_frames(regression_stream())
    model.learn_many(X[:0], y[:0])
    assert model.model is None
    model.learn_many(X, y)
    assert model.predict_many(X[:0]).tolist() == []


# -- bad input ------------------------------------------------------------------------

X, Y = as_frames(regression_stream(4))
BAD_CALLS = {
    "text": (
        "'red' for the feature 'a'; expected a number. Encode it",
        lambda model: model.learn_one({"a": "red"}, 1.0),
    ),
    "no number": (
        "for the feature 'a'; expected a number",
        lambda model: model.learn_one({"a": [1, 2]}, 1.0),
    ),
    "infinity": (
        "inf for the feature 'a'; expected a finite number",
        lambda model: model.learn_one({"a": math.inf}, 1.0),
    ),
    "infinity in a frame": (
        "inf for the feature 'a'",
        lambda model: model.learn_many(X.assign(a=math.inf), Y),
    ),
    "no dictionary": (
        "x is a list; expected a dictionary",
        lambda model: model.learn_one([1.0, 2.0], 1.0),
    ),
    "NaN as target": (
        "y is nan; expected a finite number",
        lambda model: model.learn_one({"a": 1.0}, math.nan),
    ),
    "text as target": (
        "y is 'high'; expected a number",
        lambda model: model.learn_one({"a": 1.0}, "high"),
    ),
    "a bad target in a batch": (
        "y is nan; expected a finite number",
        lambda model: model.learn_many(X, Y.where(Y.index != "row 2")),
    ),
    "other lengths": (
        "X has 4 rows, y has 3 targets",
        lambda model: model.learn_many(X, Y[:3]),
    ),
    "text in a frame": (
        "could not convert string",
        lambda model: model.learn_many(X.assign(a="red"), Y),
    ),
    "text to predict": (
        "'red' for the feature 'a'",
        lambda model: model.predict_one({"a": "red"}),
    ),
    "no probability": (
        "level is 90; expected a probability",
        lambda model: model.predict_interval_one({"a": 1.0}, level=90),
    ),
}


@pytest.fixture(scope="module")
def pickled():
    """A model that has learned, with data that wait."""
    model = small(StreamingGPRegressor, batch_size=20)
    for x, y in regression_stream(25):
        model.learn_one(x, y)
    return pickle.dumps(model)


@pytest.mark.parametrize("message, call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_data_are_refused_and_change_nothing(message, call, pickled):
    model = pickle.loads(pickled)
    before = pickle.dumps(model)
    with pytest.raises(ValueError, match=message):
        call(model)
    assert pickle.dumps(model) == before


BAD_FOR_LABELS = (
    "text",
    "infinity",
    "infinity in a frame",
    "no dictionary",
    "other lengths",
    "text in a frame",
    "text to predict",
)


@pytest.mark.parametrize("name", BAD_FOR_LABELS)
def test_bad_data_with_labels_are_refused_and_change_nothing(name):
    message, call = BAD_CALLS[name]
    model = small(StreamingGPClassifier, batch_size=20)
    for x, y in labelled_stream(25):
        model.learn_one(x, y)
    before = pickle.dumps(model)
    with pytest.raises(ValueError, match=message):
        call(model)
    assert pickle.dumps(model) == before


@pytest.mark.parametrize("label", [None, math.nan, ["low"]])
def test_what_is_no_label_is_refused(label):
    model = small(StreamingGPClassifier)
    with pytest.raises(ValueError, match="expected a label"):
        model.learn_one({"a": 1.0}, label)
    assert model.predict_one({"a": 1.0}) is None


def test_a_first_datum_needs_a_feature():
    model = small(StreamingGPRegressor)
    with pytest.raises(ValueError, match="no features; expected at least one"):
        model.learn_one({"a": None}, 1.0)
    model.learn_one({"a": 1.0}, 1.0)
    model.learn_one({}, 1.0)


@pytest.mark.parametrize("kind", [StreamingGPRegressor, StreamingGPClassifier])
def test_an_update_that_fails_changes_nothing(kind, monkeypatch):
    stream = regression_stream if kind is StreamingGPRegressor else labelled_stream
    model = small(kind, batch_size=4)
    for x, y in stream(11):
        model.learn_one(x, y)
    before = pickle.dumps(model)

    def fail(*args, **kwargs):
        raise FactorizationError("on purpose")

    monkeypatch.setattr(torch_ssgp.river, "learn", fail)
    rows, y = as_frames(stream(3, seed=1))
    with pytest.raises(FactorizationError):
        model.learn_many(rows.assign(c=1.0), y)
    assert pickle.dumps(model) == before


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"options": {"num_steps": 3}}, "options is a dict; expected an UpdateOptions"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_inducing": 1.5}, "num_inducing is 1.5"),
        ({"absent": "zero"}, "absent is 'zero'; expected a number"),
    ],
)
def test_bad_parameters_are_refused(parameters, message):
    with pytest.raises(ArgumentError, match=message):
        StreamingGPRegressor(**parameters)


def test_without_river_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "river", None)
    monkeypatch.delitem(sys.modules, "torch_ssgp.river")
    with pytest.raises(MissingDependencyError, match=r"torch_ssgp\[river\]"):
        importlib.import_module("torch_ssgp.river")


def test_examples_in_the_docstrings_run():
    assert doctest.testmod(torch_ssgp.river).failed == 0


def test_the_example_predicts_better_than_its_neighbours(tmp_path, capsys):
    tracks = river_stream.main(num_data=100, out=tmp_path)
    assert tracks["StreamingGPRegressor"].mae < tracks["KNNRegressor"].mae
    assert tracks["StreamingGPRegressor"].coverage > 0.5
    assert (tmp_path / "river_stream.png").stat().st_size > 10_000
    assert "ms per datum" in capsys.readouterr().out

"""stream() is predict, then update, whatever the batches come in."""

from __future__ import annotations

import doctest
import math
import sys
from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from torch_ssgp import MultiOutputGP, StreamingGP, UpdateOptions, stream, streaming
from torch_ssgp.exceptions import (
    ArgumentError,
    InputError,
    MissingDependencyError,
    ShapeError,
)

FEW_STEPS = UpdateOptions(num_steps=5)
CLOSED_FORM = UpdateOptions(num_steps=0)


def make_model(**options):
    return StreamingGP(ScaleKernel(RBFKernel()), num_inducing=15, **options)


def make_data(n=60):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(n, 1, generator=generator)
    return x, x[:, 0].sin() + 0.1 * torch.randn(n, generator=generator)


def make_batches(n=60, size=20):
    return list(zip(*(t.split(size) for t in make_data(n)), strict=True))


class Singles(IterableDataset):
    """One datum after the other."""

    def __iter__(self):
        return zip(*make_data(6), strict=True)


# -- what it does ---------------------------------------------------------------------


def test_it_is_predict_then_update():
    model, expected = make_model(), make_model()
    records = list(stream(model, make_batches(), FEW_STEPS))
    for k, (x, y) in enumerate(make_batches()):
        record = records[k]
        if k:
            target = expected.predict(x)
            normal = torch.distributions.Normal(target.mean, target.stddev)
            error = y - target.mean
            assert record.rmse == pytest.approx(error.square().mean().sqrt().item())
            assert record.log_density == pytest.approx(normal.log_prob(y).mean().item())
            inside = error.abs() <= 1.6448536 * target.stddev
            assert record.coverage == pytest.approx(inside.float().mean().item())
        result = expected.update(x, y, num_steps=5)
        assert torch.equal(record.result.bound, result.bound)
        assert record.num_inducing == result.num_inducing
        assert record.num_data == 20 and record.forget == 1.0
        assert record.milliseconds > 0 and math.isnan(record.accuracy)
    x, _ = make_data()
    assert torch.equal(model(x).mean, expected(x).mean)


def test_missing_readings_do_not_count():
    x, y = make_data(40)
    two = torch.stack([y, -y])
    two[0, 25], two[1, 30:] = math.nan, math.nan
    batch = torch.Size([2])
    kernel = ScaleKernel(RBFKernel(batch_shape=batch), batch_shape=batch)
    model = StreamingGP(kernel, num_inducing=15, batch_shape=batch)
    expected = deepcopy(model)
    batches = zip(x.split(20), two.split(20, -1), strict=True)
    _, record = stream(model, batches, CLOSED_FORM)
    expected.update(x[:20], two[:, :20], num_steps=0)
    target, y_new = expected.predict(x[20:]), two[:, 20:]
    error = (y_new - target.mean)[~y_new.isnan()]
    assert record.rmse == pytest.approx(error.square().mean().sqrt().item())
    normal = torch.distributions.Normal(target.mean, target.stddev, validate_args=False)
    assert record.log_density == pytest.approx(
        normal.log_prob(y_new).nanmean().item(), rel=1e-5
    )
    assert record.coverage == pytest.approx(
        (error.abs() <= 1.6448536 * target.stddev[~y_new.isnan()]).double().mean()
    )


def test_missing_readings_do_not_count_with_known_noise_several_outputs_or_labels():
    x, y = make_data(40)
    y = torch.stack([y, -y], -1)
    y[25, 0] = y[30:, 1] = math.nan
    noise = torch.where(y.isnan(), math.nan, 0.01)
    shape = torch.Size([2])
    outputs = MultiOutputGP(make_model(batch_shape=shape))
    parts = [t.split(20) for t in (x, y, noise)]
    _, last = stream(outputs, zip(*parts, strict=True), CLOSED_FORM)
    assert last.rmse < 0.5 and math.isfinite(last.log_density)
    labels = make_model(likelihood=BernoulliLikelihood(), batch_shape=shape)
    y = torch.where(y.isnan(), y, (y > 0).to(y)).mT
    batches = zip(x.split(20), y.split(20, -1), strict=True)
    _, last = stream(labels, batches, FEW_STEPS)
    assert last.accuracy > 0.5 and math.isfinite(last.log_density)


def test_what_knew_nothing_has_no_score():
    first, second = stream(make_model(), make_batches()[:2], CLOSED_FORM)
    assert math.isnan(first.rmse) and math.isnan(first.log_density)
    assert second.rmse < 1


def as_numpy(batches):
    return ((x.double().numpy(), y.double().numpy()) for x, y in batches)


def as_frames(batches):
    return ((pd.DataFrame(x.numpy()), pd.Series(y.numpy())) for x, y in batches)


@pytest.mark.parametrize(
    "batches",
    [
        lambda: DataLoader(TensorDataset(*make_data()), batch_size=20),
        lambda: as_numpy(make_batches()),
        lambda: as_frames(make_batches()),
        lambda: ([x[:, 0].tolist(), y.tolist()] for x, y in make_batches()),
    ],
    ids=["DataLoader", "numpy", "pandas", "lists"],
)
def test_batches_come_as_they_are(batches):
    expected = [r.result.bound for r in stream(make_model(), make_batches(), FEW_STEPS)]
    found = [r.result.bound for r in stream(make_model(), batches(), FEW_STEPS)]
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_single_data_are_batches_of_one():
    expected = [
        r.rmse for r in stream(make_model(), make_batches(6, size=1), CLOSED_FORM)
    ]
    records = list(stream(make_model(), Singles(), CLOSED_FORM))
    assert [r.num_data for r in records] == [1] * 6
    np.testing.assert_array_equal([r.rmse for r in records], expected)
    loader = DataLoader(Singles(), batch_size=3)
    assert [r.num_data for r in stream(make_model(), loader, CLOSED_FORM)] == [3, 3]


def test_nothing_is_ahead_of_the_stream():
    taken = []

    def batches():
        for batch in make_batches():
            taken.append(batch)
            yield batch

    model = make_model()
    records = stream(model, batches(), CLOSED_FORM)
    assert not taken
    next(records)
    assert len(taken) == 1 and int(model.summary.num_data) == 20
    records.close()
    list(stream(model, make_batches()[1:], CLOSED_FORM))
    assert int(model.summary.num_data) == 60


def test_options_are_passed_on():
    model = make_model(memory_size=60)
    options = UpdateOptions(num_steps=0, forget=0.5)
    batches = make_batches()
    for _ in stream(model, batches[:2], options):
        pass
    x, y = batches[2]
    (record,) = stream(deepcopy(model), [(x, y)], options)
    error = y - model.predict(x).mean
    assert record.rmse == pytest.approx(error.square().mean().sqrt().item())
    assert record.forget == 0.5
    (wide,) = stream(deepcopy(model), [(x, y)], options, level=0.999999)
    assert wide.coverage == 1.0


# -- likelihoods and outputs -----------------------------------------------------------


def test_labels_have_an_accuracy():
    x, y = make_data(90)
    labels = (y > 0).long()
    batches = list(zip(x.split(30), labels.split(30), strict=True))
    model = make_model(likelihood=BernoulliLikelihood())
    _, _, last = stream(model, batches[:2] + batches[:1], UpdateOptions(num_steps=20))
    assert last.accuracy > 0.8 and math.isnan(last.rmse) and math.isnan(last.coverage)
    model = make_model(likelihood=BernoulliLikelihood())
    model.update(*batches[0], num_steps=5)
    p = model.predict(batches[1][0]).mean
    (record,) = stream(model, batches[1:2], CLOSED_FORM)
    log_p = torch.where(batches[1][1] == 1, p, 1 - p).log()
    assert record.log_density == pytest.approx(log_p.mean().item(), rel=1e-5)


def test_several_classes_have_an_accuracy():
    x, _ = make_data(60)
    labels = (x[:, 0] / 4 * 3).long()
    likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    model = make_model(likelihood=likelihood, batch_shape=torch.Size([3]))
    batches = list(zip(x.split(30), labels.numpy().reshape(2, 30), strict=True))
    _, last = stream(model, batches, UpdateOptions(num_steps=10))
    assert last.accuracy > 0.7 and -2 < last.log_density < 0


def test_heavy_tails_are_scored_by_quadrature():
    model = make_model(likelihood=StudentTLikelihood())
    _, _, last = stream(model, make_batches(), FEW_STEPS)
    assert last.rmse < 0.5 and math.isfinite(last.log_density)
    assert math.isnan(last.coverage)


def test_counts_are_scored_by_quadrature():
    class Counts(_OneDimensionalLikelihood):
        def forward(self, function_samples, *args, **kwargs):
            return torch.distributions.Poisson(function_samples.exp())

    x, _ = make_data(40)
    y = torch.poisson(torch.exp(1 + x[:, 0].sin()))
    model = make_model(likelihood=Counts())
    batches = list(zip(x.split(20), y.split(20), strict=True))
    _, last = stream(model, batches, FEW_STEPS)
    assert last.rmse < 4 and math.isfinite(last.log_density)


def test_known_noise_comes_as_a_third_part():
    noise = FixedNoiseGaussianLikelihood(torch.ones(1))
    model, expected = make_model(likelihood=noise), make_model(likelihood=noise)
    batches = [(x, y, torch.full_like(y, 0.01)) for x, y in make_batches()]
    *_, last = stream(model, batches, CLOSED_FORM)
    for x, y, variance in batches:
        result = expected.update(x, y, variance, num_steps=0)
    assert torch.equal(last.result.bound, result.bound)
    assert last.rmse < 0.5


def test_several_outputs_are_scored_together():
    shape = torch.Size([2])
    model = MultiOutputGP(make_model(batch_shape=shape))
    expected = MultiOutputGP(make_model(batch_shape=shape))
    batches = [(x, torch.stack([y, -y], -1)) for x, y in make_batches()]
    records = list(stream(model, batches, FEW_STEPS))
    for x, y in batches[:2]:
        expected.update(x, y, num_steps=5)
    x, y = batches[2]
    error = y - expected.predict(x).mean
    assert records[2].rmse == pytest.approx(error.square().mean().sqrt().item())
    singles = ((x[0], y[0]) for x, y in batches)
    assert [r.num_data for r in stream(model, singles, CLOSED_FORM)] == [1, 1, 1]


# -- manners --------------------------------------------------------------------------


def test_progress_is_shown(capsys):
    list(stream(make_model(), make_batches(), CLOSED_FORM, progress=True))
    assert "3/3" in capsys.readouterr().err


def test_a_progress_bar_needs_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(MissingDependencyError, match=r"torch_ssgp\[plot\]"):
        next(stream(make_model(), make_batches(), progress=True))


@pytest.mark.parametrize(
    "batch, message",
    [
        (torch.ones(3, 1), "A batch is a Tensor; expected a pair"),
        ((torch.ones(3, 1),), "A batch is a tuple of 1; expected a pair"),
        ((np.full((3, 1), np.nan), np.ones(3)), "x_new has 3 NaN"),
        ((np.ones((3, 2)), np.ones(3)), "2 input dimensions; the model has seen 1"),
        ((np.ones((3, 1)), np.ones(4)), r"y_new has shape \(4,\)"),
    ],
)
def test_a_bad_batch_changes_nothing_and_the_stream_goes_on(batch, message):
    model = make_model()
    list(stream(model, make_batches()[:1], CLOSED_FORM))
    x, _ = make_data()
    before = model(x).mean
    with pytest.raises(InputError, match=message):
        list(stream(model, [batch], CLOSED_FORM))
    assert torch.equal(model(x).mean, before)
    list(stream(model, make_batches()[1:], CLOSED_FORM))


def test_outputs_need_a_column_each():
    model = MultiOutputGP(make_model(batch_shape=torch.Size([2])))
    with pytest.raises(ShapeError, match=r"expected \(n, 2\), one column per output"):
        list(stream(model, [(torch.ones(3, 1), torch.ones(3, 3))]))


@pytest.mark.parametrize(
    "model, options, message",
    [
        ("gp", {}, "model is a str; expected a StreamingGP"),
        (make_model(), {"options": {"num_steps": 3}}, "options is a dict"),
        (make_model(), {"level": 90}, "level is 90; expected a probability"),
        (make_model(), {"progress": "yes"}, "progress is 'yes'"),
    ],
)
def test_bad_arguments_are_refused_at_once(model, options, message):
    with pytest.raises(ArgumentError, match=message):
        stream(model, make_batches(), **options)


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(streaming).failed == 0

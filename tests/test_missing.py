"""A reading that a stream does not have counts for nothing."""

from __future__ import annotations

import math

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)

from torch_ssgp import MultiOutputGP, StreamingGP, exceptions
from torch_ssgp.update import UpdateOptions, initialization

THREE = torch.Size([3])
Z = torch.linspace(0, 6, 8, dtype=torch.float64).unsqueeze(-1)
X_TEST = torch.linspace(-1, 7, 30, dtype=torch.float64).unsqueeze(-1)
NUM_INDUCING = Z.size(-2)


def make(likelihood=None, batch_shape=THREE, memory_size=None, lengthscale=0.9):
    model = StreamingGP(
        ScaleKernel(RBFKernel()),
        likelihood,
        num_inducing=NUM_INDUCING,
        memory_size=memory_size,
        batch_shape=batch_shape,
    ).double()
    model.covar_module.base_kernel.lengthscale = lengthscale
    if likelihood is None:
        model.likelihood.noise = 0.05
        model.mean_module.constant.data.fill_(0.4)
    return model


def draw(n, batch_shape=THREE, share=0.3, seed=0):
    """Inputs, targets with NaN, and which of these are readings."""
    generator = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(*batch_shape, n, 1, dtype=torch.float64, generator=generator)
    y = torch.sin(2 * x.squeeze(-1)) + 0.5
    seen = torch.rand(*batch_shape, n, generator=generator) > share
    return x, y, seen


def batches(likelihood=None):
    """Four batches of 7; the second stream misses the whole of the second one."""
    for k in range(4):
        x, y, seen = draw(7, seed=k)
        if isinstance(likelihood, BernoulliLikelihood):
            y = (y > 0.5).double()
        if k == 1:
            seen[1] = False
        yield x, y, seen


def check_each(together, alone, **tolerance):
    """Every stream predicts as its own model."""
    latent = together(X_TEST)
    for i, model in enumerate(alone):
        expected = model(X_TEST)
        torch.testing.assert_close(latent.mean[i], expected.mean, **tolerance)
        torch.testing.assert_close(latent.variance[i], expected.variance, **tolerance)


@pytest.mark.parametrize("kind", ["gaussian", "known noise", "fixed", "bernoulli"])
@pytest.mark.parametrize("compressed", [False, True])
def test_every_stream_is_that_of_a_model_of_its_readings_alone(kind, compressed):
    def likelihood():
        if kind == "fixed":
            return FixedNoiseGaussianLikelihood(torch.ones(1).double())
        return BernoulliLikelihood() if kind == "bernoulli" else None

    options = {"num_steps": 0, "inducing_points": Z if compressed else None}
    # Sites are iterated until they move by less than 1e-8.
    tolerance = {"rtol": 0, "atol": 1e-7 if kind == "bernoulli" else 1e-9}
    together = make(likelihood(), memory_size=100)
    alone = [make(likelihood(), torch.Size(), 100) for _ in range(3)]
    has_noise = kind in ("known noise", "fixed")
    for x, y, seen in batches(likelihood()):
        values = (y, 0.02 + 0.1 * torch.rand_like(y)) if has_noise else (y,)
        result = together.update(
            x, *(value.where(seen, math.nan) for value in values), **options
        )
        for i, model in enumerate(alone):
            if seen[i].any():
                mine = (value[i][seen[i]] for value in (x, *values))
                single = model.update(*mine, **options)
                torch.testing.assert_close(result.bound[i], single.bound, **tolerance)
    check_each(together, alone, **tolerance)
    for i, model in enumerate(alone):
        assert float(together.num_data[i]) == pytest.approx(float(model.num_data))


def test_single_points_are_appended_where_streams_have_them():
    options = {"memory_size": 100, "lengthscale": 2.0}
    together = make(**options)
    alone = [make(batch_shape=torch.Size(), **options) for _ in range(3)]
    x, y, _ = draw(20)
    together.update(x, y, num_steps=0, inducing_points=Z)
    for i, model in enumerate(alone):
        model.update(x[i], y[i], num_steps=0, inducing_points=Z)
    for k in range(6):
        x, y, _ = draw(1, seed=10 + k)
        seen = torch.tensor([[True], [k % 2 == 0], [k % 3 == 0]])
        together.update(x, y.where(seen, math.nan), num_steps=0)
        for i, model in enumerate(alone):
            if seen[i]:
                model.update(x[i], y[i], num_steps=0)
    assert together.memory.num_raw == 6
    check_each(together, alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("likelihood", [None, BernoulliLikelihood()])
@pytest.mark.parametrize("size", [4, 20])  # of a batch: nine rows fit
def test_the_placeholder_does_not_matter(likelihood, size):
    """Whatever stands for a missing reading, the update that learns is the same."""
    x, y, seen = draw(2 * size)
    y[..., size:] += 3  # an alarm asks for explanations
    y = y if likelihood is None else (y > 0.5).double()
    ends = []
    for value in (0.0, 1.0 if likelihood else 50.0):
        model = StreamingGP(
            ScaleKernel(RBFKernel()), likelihood, num_inducing=6, batch_shape=THREE
        ).double()
        for part in (slice(0, size), slice(size, None)):
            data = model.check_data(
                x[..., part, :], y[..., part].where(seen[..., part], math.nan), None
            )
            data = data._replace(y=data.y.where(data.seen, value))
            model.learn_from(data, UpdateOptions(num_steps=5, forget="auto"))
        ends.append(model)
    tolerance = 1e-12 if size == 4 else 1e-10  # further from the data: larger means
    torch.testing.assert_close(
        ends[0](X_TEST).mean, ends[1](X_TEST).mean, rtol=0, atol=tolerance
    )
    torch.testing.assert_close(ends[0].memory.extremes, ends[1].memory.extremes)


def test_starts_are_those_of_the_readings():
    x, y, seen = draw(12)
    seen[1] = False
    kernel = ScaleKernel(RBFKernel(batch_shape=THREE), batch_shape=THREE).double()
    model = StreamingGP(kernel, batch_shape=THREE).double()
    initialization.initialize_from_data(*model.prior(), x, y.where(seen, 9.0), seen)
    singles = []
    for i in (0, 2):
        single = StreamingGP(ScaleKernel(RBFKernel())).double()
        initialization.initialize_from_data(
            *single.prior(), x[i][seen[i]], y[i][seen[i]]
        )
        singles.append(single)
        for ours, theirs in (
            (model.mean_module.constant[i], single.mean_module.constant),
            (model.likelihood.noise[i], single.likelihood.noise),
            (kernel.outputscale[i], single.covar_module.outputscale),
        ):
            torch.testing.assert_close(ours.squeeze(), theirs.squeeze())
    expected = sum(single.mean_module.constant for single in singles) / 2
    torch.testing.assert_close(model.mean_module.constant[1], expected)


@pytest.mark.parametrize("forget", [1.0, "auto"])
def test_what_is_missing_is_neither_surprising_nor_a_reason_to_forget(forget):
    """A stream's own readings alone say the same, and the rest says nothing."""

    def frozen(batch_shape):
        return make(None, batch_shape, 200).requires_grad_(False)

    together, alone = frozen(THREE), [frozen(torch.Size()) for _ in range(3)]
    alarm, alarmed = torch.zeros(3), torch.zeros(3, dtype=torch.bool)
    for k in range(6):
        x, y, seen = draw(9, seed=k)
        seen[1] = k != 3
        y = y + torch.tensor([[0.0], [0.0], [0.6 * max(k - 2, 0)]])
        result = together.update(x, y.where(seen, math.nan), forget=forget)
        alarmed |= result.alarm > 0
        for i, model in enumerate(alone):
            if not seen[i].any():
                assert result.surprise[i] == 0 and result.forgot[i] == 1
                assert result.alarm[i] == alarm[i]
                continue
            drifts = float(model.memory.rate) > 0  # per datum, those missing too
            single = model.update(x[i][seen[i]], y[i][seen[i]], forget=forget)
            for name in () if drifts else ("surprise", "alarm", "forgot"):
                ours, theirs = getattr(result, name)[i], getattr(single, name)
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        alarm = result.alarm
    assert alarmed[2] and bool(result.rate[2] > 0) == (forget == "auto")


@pytest.mark.parametrize("forget", [1.0, "auto"])
def test_a_stream_may_begin_later_than_the_others(forget):
    model = StreamingGP(
        ScaleKernel(RBFKernel()), num_inducing=6, batch_shape=THREE
    ).double()
    for k in range(4):
        x, y, seen = draw(8, seed=k, share=0.2)
        seen[2] = k > 1
        model.update(x, y.where(seen, math.nan), num_steps=4, forget=forget)
        latent = model(X_TEST)
        assert torch.isfinite(latent.mean).all()
        if k == 1:
            prior = model.covar_module(X_TEST).to_dense().diagonal()
            torch.testing.assert_close(latent.variance[2], prior, rtol=1e-6, atol=0)
    assert torch.isfinite(model.memory.extremes).all()


def test_a_thousand_streams_with_a_fifth_missing_update_in_one_call():
    shape = torch.Size([1000])
    model = make(batch_shape=shape, lengthscale=2.0)
    x, y, _ = draw(5, shape)
    model.update(x, y, num_steps=0, inducing_points=Z)
    x, y, seen = draw(1, shape, share=0.2, seed=1)
    result = model.update(x, y.where(seen, math.nan), num_steps=0)
    assert result.bound.shape == shape and torch.isfinite(result.bound).all()
    assert (model.num_data == 5 + seen.sum(-1)).all()
    silent = ~seen.squeeze(-1)
    assert 100 < int(silent.sum()) < 300
    assert result.increment[silent].abs().max() < 1e-9


def test_states_with_missing_readings_are_saved(tmp_path):
    model = make(memory_size=100)
    x, y, seen = draw(7)
    seen[1] = False
    model.update(x, y.where(seen, math.nan), num_steps=0)
    model.save(tmp_path / "model")
    again = StreamingGP.load(tmp_path / "model")
    for each in (model, again):
        each.update(x, y, num_steps=0)
    torch.testing.assert_close(model(X_TEST).mean, again(X_TEST).mean)


def test_outputs_may_be_missing():
    model = MultiOutputGP(make(batch_shape=torch.Size([2])))
    x, y, _ = draw(9, torch.Size([2]))
    y = y.mT.clone()
    y[:5, 1] = math.nan
    model.update(x[0], y, num_steps=0, inducing_points=Z)
    assert model.model.memory.num_data.tolist() == [9, 4]


def test_what_cannot_be_missing_is_named():
    x, y, seen = draw(5)
    y_new = y.where(seen, math.nan)
    model = make()
    with pytest.raises(exceptions.NonFiniteError, match="Use NaN where a stream has"):
        model.update(x, y / 0)
    with pytest.raises(exceptions.NonFiniteError, match="no stream has a reading"):
        model.update(x, y * math.nan)
    with pytest.raises(exceptions.NonFiniteError, match="Remove these rows"):
        make(batch_shape=torch.Size()).update(x[0], y_new[0] * math.nan)
    with pytest.raises(exceptions.NonFiniteError):
        model.condition_on_observations(x, y_new)
    with pytest.raises(exceptions.UnsupportedLikelihoodError, match="one by one"):
        make(StudentTLikelihood()).update(x, y_new)
    softmax = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    with pytest.raises(exceptions.NonFiniteError, match="a label for every point"):
        make(softmax).update(x[0], y_new[0] * math.nan)
    assert model.memory.is_empty

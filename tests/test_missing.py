"""A reading that a stream does not have counts for nothing."""

from __future__ import annotations

import itertools
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
from torch_ssgp.update.drift import Drift
from torch_ssgp.update.forgetting import POWERS, Judgement, decide, judge

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


@pytest.mark.parametrize(
    ("kind", "memory_size"),
    [
        *itertools.product(
            ["gaussian", "known noise", "fixed"],
            [NUM_INDUCING, 2 * NUM_INDUCING, 100],
        ),
        # Between the two the memory is full earlier: labels become rows earlier.
        *itertools.product(["bernoulli"], [NUM_INDUCING, 100]),
    ],
)
def test_every_stream_is_that_of_a_model_of_its_readings_alone(kind, memory_size):
    def likelihood():
        if kind == "fixed":
            return FixedNoiseGaussianLikelihood(torch.ones(1).double())
        return BernoulliLikelihood() if kind == "bernoulli" else None

    options = {"num_steps": 0, "inducing_points": Z}
    # Sites are iterated until they move by less than 1e-8.
    tolerance = {"rtol": 0, "atol": 1e-7 if kind == "bernoulli" else 1e-9}
    together = make(likelihood(), memory_size=memory_size)
    alone = [make(likelihood(), torch.Size(), memory_size) for _ in range(3)]
    has_noise = kind in ("known noise", "fixed")
    for x, y, seen in batches(likelihood()):
        noise = 0.02 + 0.1 * torch.rand_like(y) if has_noise else None
        if noise is None:
            result = together.update(x, y.where(seen, math.nan), **options)
        else:
            noises = noise.where(seen, math.nan)
            result = together.update(x, y.where(seen, math.nan), noises, **options)
        for i, model in enumerate(alone):
            if not seen[i].any():
                continue
            known = None if noise is None else noise[i][seen[i]]
            single = model.update(x[i][seen[i]], y[i][seen[i]], known, **options)
            torch.testing.assert_close(result.bound[i], single.bound, **tolerance)
    for from_memory in (False, True):
        if from_memory and memory_size == 2 * NUM_INDUCING:
            continue  # its points are chosen for all streams at once
        latent = together(X_TEST, from_memory)
        for i, model in enumerate(alone):
            expected = model(X_TEST, from_memory)
            for name in ("mean", "variance"):
                ours, theirs = getattr(latent, name)[i], getattr(expected, name)
                torch.testing.assert_close(ours, theirs, **tolerance)
    for i, model in enumerate(alone):
        assert float(together.memory.num_data[i]) == pytest.approx(
            float(model.memory.num_data)
        )
        assert float(together.summary.num_data[i]) == pytest.approx(
            float(model.summary.num_data)
        )


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
    torch.testing.assert_close(together.summary.inducing_points, Z.expand(3, -1, -1))
    for i, model in enumerate(alone):
        expected = model(X_TEST)
        torch.testing.assert_close(
            together(X_TEST).mean[i], expected.mean, rtol=0, atol=1e-9
        )
        torch.testing.assert_close(
            together(X_TEST).variance[i], expected.variance, rtol=0, atol=1e-9
        )


@pytest.mark.parametrize("likelihood", [None, BernoulliLikelihood()])
def test_the_placeholder_does_not_matter(likelihood):
    """Whatever stands for a missing reading, the update that learns is the same."""
    x, y, seen = next(iter(batches(likelihood)))
    ends = []
    for value in (0.0, 1.0):
        model = StreamingGP(
            ScaleKernel(RBFKernel()), likelihood, num_inducing=6, batch_shape=THREE
        ).double()
        for part in (slice(0, 4), slice(4, 7)):
            data = model.check_data(
                x[..., part, :], y[..., part].where(seen[..., part], math.nan), None
            )
            data = data._replace(y=data.y.where(data.seen, value))
            model.learn_from(data, UpdateOptions(num_steps=5, forget="auto"))
        ends.append(model)
    torch.testing.assert_close(
        ends[0](X_TEST).mean, ends[1](X_TEST).mean, rtol=0, atol=1e-12
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


@pytest.mark.parametrize("likelihood", [None, BernoulliLikelihood()])
def test_what_is_missing_is_neither_surprising_nor_a_reason_to_forget(likelihood):
    model = make(likelihood)
    x, y, _ = draw(10)
    y = y if likelihood is None else (y > 0.5).double()
    model.update(x, y, num_steps=0, inducing_points=Z)
    x, y, seen = draw(9, seed=5)
    y = y if likelihood is None else (y > 0.5).double()
    seen[1] = False
    data = model.check_data(x, y.where(seen, math.nan), None)
    frozen = model.known(data).frozen
    found = judge(frozen, model.summary, data, model.jitter(y.dtype))
    assert not found.is_followed[1]
    for field in ("gain", "capped", "surprise", "explained"):
        assert not getattr(found, field)[1].any()
    assert not found.is_surprising[1]
    # A stream's own readings alone say the same.
    few = model.check_data(x[:, seen[0]], y[:, seen[0]], None)
    expected = judge(frozen, model.summary, few, model.jitter(y.dtype))
    for field in ("gain", "capped", "surprise", "explained"):
        torch.testing.assert_close(
            getattr(found, field)[0], getattr(expected, field)[0], rtol=1e-9, atol=1e-9
        )


def test_doubt_waits_for_the_next_reading():
    nothing = torch.zeros(2, len(POWERS) + 1)
    loud = torch.full_like(nothing, 50.0)
    judgement = Judgement(
        nothing,
        nothing,
        nothing[:, 0],
        nothing[:, 0] > 0,
        nothing[:, 0] > 0,
        explained=torch.tensor([1.0, 0.0]),
        num_followed=torch.ones(2),
        num_old=torch.ones(2),
        num_new=torch.ones(2),
        leaves_enough=nothing == 0,
    )
    _, alarm, doubt, _ = decide(
        judgement, loud, 1e-3, Drift(torch.zeros(2), torch.zeros(2))
    )
    assert alarm.tolist() == [True, False]
    assert (doubt[1] == 50).all() and (doubt[0] < 50).all()


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
    assert (model.summary.num_data == 5 + seen.sum(-1)).all()
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

"""What an update warns of, once: what a user may not have meant."""

from __future__ import annotations

import warnings

import pytest
import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, SoftmaxLikelihood

from torch_ssgp import StreamingGP, stream
from torch_ssgp.exceptions import (
    BudgetWarning,
    PrecisionWarning,
    SharedHyperparametersWarning,
)

X = torch.linspace(0, 6, 20)


def caught_in(updates, category):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        updates()
    return [str(w.message) for w in caught if issubclass(w.category, category)]


def streams(kernel, likelihood=None, num_streams=2):
    batch = torch.Size([num_streams])
    return StreamingGP(kernel, likelihood, num_inducing=5, batch_shape=batch)


def kernel_of(*batch):
    shape = torch.Size(batch)
    return ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape)


@pytest.mark.parametrize(
    "kernel, likelihood, named",
    [
        (kernel_of(), None, "ScaleKernel and RBFKernel"),
        (ScaleKernel(RBFKernel(), batch_shape=torch.Size([2])), None, "RBFKernel"),
        (kernel_of(2), GaussianLikelihood(), "GaussianLikelihood"),
    ],
    ids=["kernel", "part", "likelihood"],
)
def test_streams_that_share_hyperparameters_are_told_once(kernel, likelihood, named):
    gp = streams(kernel, likelihood)
    y = torch.stack([X.sin(), X.cos()])

    def updates():
        gp.update(X, y, num_steps=0)  # nothing is learned: nothing to say
        for _ in range(2):
            gp.update(X, y, num_steps=2, learn_hyperparameters=True)

    texts = caught_in(updates, SharedHyperparametersWarning)
    assert len(texts) == 1
    assert texts[0].startswith(f"{named} without a batch_shape")
    assert "torch.Size([2])" in texts[0] and "torch.Size([1])" in texts[0]


@pytest.mark.parametrize("num_streams", [2, 3])
@pytest.mark.parametrize("size", ["own", "one"])
def test_streams_with_a_kernel_of_their_own_or_of_size_one_are_not(size, num_streams):
    gp = streams(kernel_of(1 if size == "one" else num_streams), None, num_streams)
    y = torch.stack([(k + 1) * X.sin() for k in range(num_streams)])
    options = {"num_steps": 2}
    assert not caught_in(
        lambda: gp.update(X, y, **options), SharedHyperparametersWarning
    )
    assert gp.covar_module.outputscale.shape == (1 if size == "one" else num_streams,)


def test_classes_may_share_a_kernel():
    softmax = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    gp = streams(kernel_of(), softmax, 3)
    labels = torch.arange(20) % 3
    assert not caught_in(
        lambda: gp.update(X, labels, num_steps=1), SharedHyperparametersWarning
    )


def clock(num_points, spacing):
    return 1.7e9 + spacing * torch.arange(num_points, dtype=torch.float64)


@pytest.mark.parametrize(
    "time, num_batches",
    [
        (clock(60, 1.0), 2),  # all of them are one point
        (clock(60, 1.0), 60),
        (clock(600, 60.0), 3),  # two or three at a time are
        (2460000.5 + torch.arange(400, dtype=torch.float64) / 1440, 50),
    ],
    ids=["seconds", "one by one", "minutes", "days"],
)
def test_inputs_too_large_for_their_spacing_are_told_once(time, num_batches):
    gp = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=5)
    batches = [(t.float(), t.float().sin()) for t in time.chunk(num_batches)]

    def updates():
        for x, y in batches:
            gp.update(x, y, num_steps=0)

    texts = caught_in(updates, PrecisionWarning)
    assert len(texts) == 1
    assert "torch.float32" in texts[0] and "Subtract the first value" in texts[0]


def test_arrays_rounded_to_the_dtype_of_the_model_are_told_too():
    gp = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=5)
    time = clock(60, 1.0).numpy()
    with pytest.warns(PrecisionWarning, match="steps of 128"):
        list(stream(gp, [(time, time % 7)]))


@pytest.mark.parametrize(
    "x",
    [
        torch.rand(5000, 2),
        torch.full((20, 1), 5.0),
        torch.cat([torch.full((20, 1), 2024.0), torch.rand(20, 1)], -1),
        torch.randint(1970, 2030, (5000, 1)).float(),
        clock(200, 3600.0).float().unsqueeze(-1),
        clock(60, 1.0).unsqueeze(-1),
    ],
    ids=["uniform", "constant", "year", "years", "hours", "float64"],
)
def test_inputs_that_the_dtype_can_tell_apart_are_not(x):
    gp = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=5).to(x.dtype)
    updates = [rows for rows in x.chunk(2)]
    assert not caught_in(
        lambda: [gp.update(rows, rows[:, -1].sin(), num_steps=0) for rows in updates],
        PrecisionWarning,
    )


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1e3])
@pytest.mark.parametrize("size", [1, 10, 20])
def test_targets_too_small_for_the_noise_allowed_are_told_once(scale, size):
    def told(likelihood=None):
        gp = StreamingGP(ScaleKernel(RBFKernel()), likelihood, num_inducing=5)
        x, y = X.repeat(2), scale * X.repeat(2).sin()
        parts = torch.arange(40).split(size)
        return caught_in(
            lambda: [gp.update(x[k], y[k], num_steps=10) for k in parts],
            PrecisionWarning,
        )

    texts = told()
    assert len(texts) == (scale < 1)
    assert all("Rescale the targets" in text for text in texts)
    assert not told(GaussianLikelihood(noise_constraint=Positive()))
    # Neither where the noise is what the user says, nor where nothing varies.
    fixed = GaussianLikelihood()
    fixed.noise = 1.01e-4
    fixed.raw_noise.requires_grad_(False)
    assert not told(fixed)
    constant = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=5)
    update = [X, torch.full_like(X, 1e-3)]
    assert not caught_in(lambda: constant.update(*update), PrecisionWarning)


# -- too few points -------------------------------------------------------------------


def test_float32_streams_that_need_more_points_are_told_so_and_enough_are_not():
    batch, hours = torch.Size([100]), torch.linspace(0, 12, 96)
    y = torch.sin(2 * hours + torch.linspace(0, 3, 100).unsqueeze(-1))

    def learn_with(num_inducing):
        likelihood = GaussianLikelihood(batch_shape=batch)
        likelihood.noise = 1e-3
        gp = StreamingGP(
            kernel_of(100), likelihood, num_inducing=num_inducing, batch_shape=batch
        )
        for part in torch.arange(96).split(48):
            gp.update(hours[part], y[:, part], num_steps=0)
        error = (gp(hours).mean - y).square().mean().sqrt()
        errors.append(float(error))

    errors: list[float] = []
    (text,) = caught_in(lambda: learn_with(8), BudgetWarning)
    assert "Raise num_inducing" in text and "policy" not in text
    assert caught_in(lambda: learn_with(32), BudgetWarning) == []
    assert errors[1] < 0.5 * errors[0]


# -- nothing to say -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constraint", [None, Positive()])
def test_a_constant_target_is_no_reason_to_warn(dtype, constraint):
    likelihood = GaussianLikelihood(noise_constraint=constraint)
    gp = StreamingGP(ScaleKernel(RBFKernel()), likelihood, num_inducing=20).to(dtype)

    def updates():
        for x in torch.linspace(0, 1, 60, dtype=dtype).chunk(3):
            gp.update(x, torch.ones_like(x))
            for posterior in (gp(x), gp.predict(x)):
                assert (posterior.variance > 0).all()

    assert caught_in(updates, Warning) == []

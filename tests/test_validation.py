# ruff: noqa: E501
"""Bad input: a named error that says what came and what to do; nothing changes."""

from __future__ import annotations

import copy

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood

from torch_ssgp import StreamingGP, exceptions

X, Y = torch.linspace(0, 1, 10).unsqueeze(-1), torch.linspace(0, 1, 10)
NAN = torch.tensor([float("nan")]).expand(10)

BAD_UPDATES = {
    "trailing dimension": (X, Y[:, None], {}, "ShapeError", r"y_new has shape \(10, 1\); expected \(10,\). Use y_new.squeeze\(-1\)"),
    "lengths differ": (X, Y[:5], {}, "ShapeError", r"y_new has shape \(5,\); expected \(10,\)"),
    "another dimension": (X.expand(10, 3), Y, {}, "ShapeError", "3 input dimensions; the model has seen 1"),
    "empty batch": (X[:0], Y[:0], {}, "ShapeError", "empty batch"),
    "scalar x": (X[0, 0], Y[0], {}, "ShapeError", r"x_new has shape \(\)"),
    "batch shape": (X.expand(4, 10, 1), Y.expand(4, 10), {}, "ShapeError", "batch_shape"),
    "double x": (X.double(), Y, {}, "DtypeError", "x_new has dtype torch.float64, the model torch.float32"),
    "double y": (X, Y.double(), {}, "DtypeError", "y_new has dtype torch.float64"),
    "integer x": (X.long(), Y, {}, "DtypeError", "x_new has dtype torch.int64"),
    "numpy": (X.numpy(), Y, {}, "DtypeError", r"ndarray; expected a torch.Tensor. Use torch.as_tensor"),
    "device x": (X.to("meta"), Y, {}, "DeviceError", "x_new is on meta, the model on cpu"),
    "device y": (X, Y.to("meta"), {}, "DeviceError", "y_new is on meta"),
    "nan x": (X + NAN[:, None], Y, {}, "NonFiniteError", "x_new has 10 NaN or infinite values of 10"),
    "nan y": (X, Y + NAN, {}, "NonFiniteError", "y_new has 10 NaN or infinite"),
    "inf y": (X, Y / 0, {}, "NonFiniteError", "y_new has 10 NaN or infinite"),
    "noise shape": (X, Y, {"noise": Y[:3]}, "ShapeError", r"noise has shape \(3,\); expected \(10,\)"),
    "negative noise": (X, Y, {"noise": -Y - 1}, "ArgumentError", "variances above zero"),
    "steps": (X, Y, {"num_steps": -1}, "ArgumentError", "num_steps is -1"),
    "optimizer": (X, Y, {"optimizer": "sgd"}, "ArgumentError", "'sgd'; expected 'adam' or 'lbfgs'"),
    "forget": (X, Y, {"forget": 0.0}, "ArgumentError", r"forget is 0.0; expected a number in \(0, 1\]"),
    "no points": (X, Y, {"inducing_points": X[:0]}, "ShapeError", "at least one"),
    "points dims": (X, Y, {"inducing_points": X.expand(10, 2)}, "ShapeError", "inducing_points has shape"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    gp = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=5)
    gp.update(X, Y, num_steps=2)
    return gp


@pytest.mark.parametrize("case", BAD_UPDATES)
def test_bad_updates_are_refused_and_change_nothing(model, case):
    x, y, options, name, message = BAD_UPDATES[case]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(getattr(exceptions, name), match=message) as caught:
        model.update(x, y, **options)
    assert isinstance(caught.value, exceptions.StreamingGPError)
    assert isinstance(caught.value, ValueError)
    after = model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_inducing": 0}, "num_inducing is 0; expected an integer of at least 1"),
        ({"num_inducing": 2.5}, "num_inducing is 2.5"),
        ({"alpha": -0.1}, r"alpha is -0.1; expected a number in \[0, 1\]"),
        ({"alpha": 1.5}, "alpha is 1.5"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(exceptions.ArgumentError, match=message):
        StreamingGP(RBFKernel(), **options)


def test_a_likelihood_without_a_use_is_refused():
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
    with pytest.raises(exceptions.UnsupportedLikelihoodError, match="Multitask"):
        StreamingGP(RBFKernel(), likelihood)


def test_fixed_noise_asks_for_the_noise():
    gp = StreamingGP(RBFKernel(), FixedNoiseGaussianLikelihood(torch.ones(1)))
    with pytest.raises(exceptions.ArgumentError, match="Pass noise="):
        gp.update(X, Y)


def test_predictions_check_their_inputs(model):
    with pytest.raises(exceptions.ShapeError, match="the model has seen 1"):
        model(torch.zeros(3, 2))
    with pytest.raises(exceptions.DtypeError, match="float64"):
        model(X.double())


def test_a_vector_of_inputs_is_one_column():
    gp = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=5)
    gp.update(X[:, 0], Y, num_steps=1)
    assert torch.equal(gp(X[:, 0]).mean, gp(X).mean)

"""Bad input: a named error that says what came and what to do; nothing changes."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from botorch.exceptions.errors import BotorchError
from gpytorch.kernels import AdditiveKernel, MaternKernel, RBFKernel, ScaleKernel

from torch_ssgp import AdaptiveBudget, GreedyVariance, StreamingGP, exceptions
from workbench import input_contract

CALLS = [
    (section, call)
    for section, (_, calls) in input_contract.CONTRACT.items()
    for call in calls
]


@pytest.fixture(scope="module")
def objects():
    with torch.random.fork_rng(devices=[]):
        return input_contract.objects()


@pytest.mark.parametrize("section, call", CALLS, ids=[call for _, call in CALLS])
def test_bad_input_is_refused_by_name_and_changes_nothing(objects, section, call):
    kept = [objects[name] for name in input_contract.CONTRACT[section][0]]
    before = [copy.deepcopy(module.state_dict()) for module in kept]
    error = input_contract.error_of(call, objects)
    assert isinstance(error, exceptions.StreamingGPError | BotorchError), error
    for module, state in zip(kept, before, strict=True):
        now = module.state_dict()
        assert all(torch.equal(now[key], state[key]) for key in state)


def test_the_page_says_what_is_raised():
    page = input_contract.PAGE.read_text(encoding="utf-8")
    assert page == input_contract.page(), "run: python scripts/input_contract.py"


def test_errors_about_input_are_value_errors():
    for error in vars(exceptions).values():
        if isinstance(error, type) and issubclass(error, exceptions.InputError):
            assert issubclass(error, ValueError)


def test_integers_of_numpy_are_integers():
    x, three = torch.linspace(0, 1, 10), numpy.int64(3)
    policy = AdaptiveBudget(min_inducing=three, policy=GreedyVariance(three))
    gp = StreamingGP(RBFKernel(), num_inducing=three, inducing_policy=policy)
    result = gp.update(x, x, num_steps=three, learn_hyperparameters=three)
    assert (result.num_inducing, result.num_steps) == (3, 3)
    assert type(policy.min_inducing) is type(policy.policy.max_candidates) is int


def test_a_vector_of_inputs_is_one_column():
    x, y = torch.linspace(0, 1, 10), torch.linspace(0, 1, 10)
    gp = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=5)
    gp.update(x, y, num_steps=1)
    assert torch.equal(gp(x).mean, gp(x.unsqueeze(-1)).mean)


@pytest.mark.parametrize(
    "kernel",
    [
        ScaleKernel(RBFKernel(ard_num_dims=2, active_dims=[0, 2])),
        AdditiveKernel(RBFKernel(active_dims=[1]), MaternKernel(ard_num_dims=3)),
        ScaleKernel(RBFKernel()) * MaternKernel(ard_num_dims=1, active_dims=[2]),
    ],
)
def test_kernels_that_see_some_of_the_inputs_are_accepted(kernel):
    StreamingGP(kernel, num_inducing=5).update(
        torch.rand(8, 3), torch.rand(8), num_steps=0
    )


def test_one_number_for_active_dims_is_named():
    gp = StreamingGP(ScaleKernel(RBFKernel(active_dims=1)), num_inducing=5)
    with pytest.raises(exceptions.ShapeError, match=r"Use active_dims=\[1\]"):
        gp.update(torch.rand(8, 3), torch.rand(8), num_steps=0)


@pytest.mark.parametrize("batch_shape", [(), (2,)])
def test_the_shapes_in_an_error_are_those_that_came(batch_shape):
    x, y = torch.rand(8, 3), torch.rand(*batch_shape, 8)
    gp = StreamingGP(RBFKernel(), num_inducing=5, batch_shape=torch.Size(batch_shape))
    gp.update(x, y, num_steps=0)
    for call in (lambda: gp(x[0]), lambda: gp.update(x[0], y)):
        with pytest.raises(
            exceptions.ShapeError, match=r"shape \(3,\).*unsqueeze\(0\)"
        ):
            call()
    with pytest.raises(exceptions.ShapeError, match=r"x_new of shape \(8, 3\)"):
        gp.update(x, y[..., :4])

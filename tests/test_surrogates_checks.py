"""What surrogates refuse, with the errors of BoTorch."""

import importlib
import sys
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.exceptions.warnings import InputDataWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import ChainedInputTransform, Normalize, Warp
from botorch.models.transforms.input import InputTransform
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from surrogate_models import (
    BOUNDS,
    assert_same_posterior,
    copy_hyperparameters,
    data,
    inputs,
    pair,
)
from torch_ssgp.exceptions import (
    MissingDependencyError,
    UnknownOptionError,
)
from torch_ssgp.surrogates import SingleTaskStreamingGP


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


@pytest.mark.parametrize("chained", [False, True])
def test_an_input_transform_that_would_be_learned_is_named(chained: bool) -> None:
    X, Y = data()

    def transform() -> InputTransform:
        warp = Warp(d=2, indices=[0, 1], bounds=BOUNDS)
        return (
            ChainedInputTransform(unit=Normalize(d=2), warp=warp) if chained else warp
        )

    with pytest.raises(UnsupportedError, match=r"a Warp .*\(concentration0.*Freeze it"):
        SingleTaskStreamingGP(X, Y, input_transform=transform())
    exact = SingleTaskGP(X, Y, input_transform=transform())
    fit_gpytorch_mll(ExactMarginalLogLikelihood(exact.likelihood, exact))
    learned = deepcopy(exact.input_transform).requires_grad_(False)
    ours = SingleTaskStreamingGP(X, Y, input_transform=learned)
    copy_hyperparameters(exact, ours)
    assert_same_posterior(ours.posterior(X), exact.posterior(X), 1e-6)
    ours.fit(num_steps=3)
    for name, value in exact.input_transform.named_parameters():
        assert torch.equal(ours.input_transform.get_parameter(name), value)


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

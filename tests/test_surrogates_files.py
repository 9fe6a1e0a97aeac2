"""Surrogates in files."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from botorch.models.transforms import (
    Bilog,
    ChainedInputTransform,
    ChainedOutcomeTransform,
    Log,
    Normalize,
    Power,
    Round,
    Standardize,
    Warp,
)
from botorch.models.transforms.input import InputStandardize, Log10
from gpytorch.kernels import MaternKernel

from surrogate_models import (
    BOUNDS,
    KINDS,
    assert_same_posterior,
    data,
    inputs,
    pair,
    sampler,
)
from torch_ssgp import StreamingGP
from torch_ssgp.exceptions import (
    StateError,
)
from torch_ssgp.surrogates import SingleTaskStreamingGP


@pytest.mark.parametrize(("m", "batch", "noisy"), KINDS)
def test_a_saved_model_goes_on_where_it_stopped(
    m: int, batch: tuple[int, ...], noisy: bool, tmp_path: Path
) -> None:
    X, Y = data(20, m, batch)
    Yvar = 0.01 + 0.02 * torch.rand_like(Y) if noisy else None
    ours = SingleTaskStreamingGP(
        X,
        Y,
        Yvar,
        num_inducing=8,
        memory_size=12,
        input_transform=Normalize(d=2, batch_shape=torch.Size(batch)),
    )
    ours.fit(num_steps=3)
    ours.update(X + 0.01, Y, Yvar, restandardize=True, num_steps=3)
    ours.save(tmp_path / "model.pt")
    loaded = SingleTaskStreamingGP.load(tmp_path / "model.pt")
    assert ours.state_dict().keys() == loaded.state_dict().keys()
    results = [model.update(X, Y, Yvar, num_steps=3) for model in (ours, loaded)]
    assert torch.equal(results[0].bound, results[1].bound)
    for noise in (False, True):
        a, b = (model.posterior(X, observation_noise=noise) for model in (ours, loaded))
        assert_same_posterior(a, b, 0.0)
    for model in (ours, loaded):
        assert torch.equal(model.average_noise, ours.average_noise)
        assert model.training is ours.training


def own(transform: type, **attributes: object) -> object:
    """A transform of a class that no file can name."""
    kind = type("Own", (transform,), {"__module__": "nowhere"})
    return kind(**attributes)


TRANSFORMS: list[Callable] = [
    lambda: {"outcome_transform": None},
    lambda: {"outcome_transform": Log()},
    lambda: {"outcome_transform": Power(power=0.5)},
    lambda: {"outcome_transform": Bilog()},
    lambda: {
        "outcome_transform": ChainedOutcomeTransform(log=Log(), unit=Standardize(m=1))
    },
    lambda: {"input_transform": Normalize(d=2, bounds=BOUNDS)},
    lambda: {"input_transform": InputStandardize(d=2)},
    lambda: {"input_transform": Log10(indices=[0])},
    lambda: {
        "input_transform": ChainedInputTransform(
            unit=Normalize(d=2), rounded=Round(integer_indices=[1])
        )
    },
    lambda: {
        "input_transform": Warp(
            d=2, indices=[0], bounds=torch.tensor([[0.0, 0.0], [1.2, 1.2]])
        ).requires_grad_(False)
    },
]


@pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.InputDataWarning")
@pytest.mark.parametrize("make", TRANSFORMS)
def test_transforms_of_botorch_are_rebuilt_from_a_file(
    make: Callable, tmp_path: Path
) -> None:
    X, Y = data(10)
    ours = SingleTaskStreamingGP(X, Y.exp(), **make())
    ours.save(tmp_path / "model.pt")
    loaded = SingleTaskStreamingGP.load(tmp_path / "model.pt")
    for model in (ours, loaded):
        model.update(X + 0.1, Y.exp(), num_steps=0)
    samples = []
    for model in (ours, loaded):
        torch.manual_seed(0)
        samples.append(model.posterior(X).rsample(torch.Size([3])))
    assert torch.equal(samples[0], samples[1])
    for name in ("input_transform", "outcome_transform"):
        kinds = [type(getattr(model, name, None)) for model in (ours, loaded)]
        assert kinds[0] is kinds[1]


def test_parts_of_ones_own_are_asked_for_by_name(tmp_path: Path) -> None:
    X, Y = data(10)
    path = tmp_path / "model.pt"
    ours = SingleTaskStreamingGP(
        X, Y, covar_module=own(MaternKernel), input_transform=own(Normalize, d=2)
    )
    ours.save(path)
    with pytest.raises(StateError, match=r"covar_module is a nowhere\.Own"):
        SingleTaskStreamingGP.load(path)
    kernel = own(MaternKernel)
    with pytest.raises(StateError, match=r"input_transform=\.\.\."):
        SingleTaskStreamingGP.load(path, covar_module=kernel)
    with pytest.raises(StateError, match="it is made of Own"):
        SingleTaskStreamingGP.load(
            path, covar_module=kernel, input_transform=Normalize(d=2)
        )
    loaded = SingleTaskStreamingGP.load(
        path, covar_module=kernel, input_transform=own(Normalize, d=2)
    )
    assert_same_posterior(ours.posterior(X), loaded.posterior(X), 0.0)


def test_a_transform_that_the_file_has_not_is_refused(tmp_path: Path) -> None:
    SingleTaskStreamingGP(*data(5)).save(tmp_path / "model.pt")
    with pytest.raises(StateError, match="input_transform was passed, but"):
        SingleTaskStreamingGP.load(
            tmp_path / "model.pt", input_transform=Normalize(d=2)
        )


def test_fantasies_can_be_saved(tmp_path: Path) -> None:
    _, ours, _ = pair(m=2)
    fantasy = ours.fantasize(inputs(3, 1), sampler(4))
    fantasy.save(tmp_path / "fantasy.pt")
    loaded = SingleTaskStreamingGP.load(tmp_path / "fantasy.pt")
    X = inputs(4, 3, 2)
    assert loaded.batch_shape == (4, 3)
    assert_same_posterior(fantasy.posterior(X), loaded.posterior(X), 1e-12)


def test_an_interrupted_save_leaves_the_previous_file_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours, _ = pair()
    path = tmp_path / "model.pt"
    ours.save(path)
    before = path.read_bytes()
    ours.update(*data(3), num_steps=0)

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        ours.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    _, ours, _ = pair()
    path = tmp_path / "model.pt"
    ours.model.save(path)
    with pytest.raises(StateError, match="Use StreamingGP.load"):
        SingleTaskStreamingGP.load(path)
    ours.save(path)
    with pytest.raises(StateError, match="Use SingleTaskStreamingGP.load"):
        StreamingGP.load(path)
    whole = path.read_bytes()
    for position in range(0, len(whole), 997):
        flipped = bytearray(whole)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(StateError, match="not a model saved by|damaged"):
            SingleTaskStreamingGP.load(path)


class Malice(Normalize):
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch evil",)


def test_no_code_of_a_file_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ours = SingleTaskStreamingGP(*data(5), input_transform=Normalize(d=2))
    ours.input_transform.__class__ = Malice
    # A deep copy would run it already: it is made by the same method.
    monkeypatch.setattr(Malice, "__deepcopy__", lambda self, memo: self, raising=False)
    ours.save("model.pt")
    with pytest.raises(StateError, match="input_transform is a"):
        SingleTaskStreamingGP.load("model.pt")
    assert not Path("evil").exists()

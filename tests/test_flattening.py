"""Learning that gives up the function says so; learning that does not is silent."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import StudentTLikelihood
from torch import Tensor

from conftest import FULL
from torch_ssgp import StreamingGP
from torch_ssgp.exceptions import FlattenedWarning

STEPS = 20

Function = Callable[[Tensor], Tensor]


def make(dims: int = 1, **options) -> StreamingGP:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=dims))
    return StreamingGP(kernel, num_inducing=20, **options).double()


def batches(
    f: Function,
    count: int,
    size: int = 20,
    noise: float = 0.05,
    dims: int = 1,
    seed: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = 6 * torch.rand(size, dims, dtype=torch.float64, generator=generator)
        e = torch.randn(size, dtype=torch.float64, generator=generator)
        yield x, f(x[:, 0]) + noise * e


def other(x: Tensor) -> Tensor:
    return 3 - torch.cos(2 * x)


@pytest.mark.parametrize("size", [1, 20])
def test_a_function_that_changes_while_nothing_is_forgotten_is_said_once(size: int):
    model = make()
    for x, y in batches(torch.sin, 80 // size, size):
        assert not model.update(x, y, num_steps=STEPS, forget=1.0).flattened
    flat = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in batches(other, 60 // size, size, seed=1):
            flat.append(bool(model.update(x, y, num_steps=STEPS, forget=1.0).flattened))
        for x, y in batches(lambda x: 50 * x, 100 // size, size, seed=2):
            flat.append(bool(model.update(x, y, num_steps=STEPS, forget=1.0).flattened))
    assert any(flat)
    said = [w for w in caught if w.category is FlattenedWarning]
    assert len(said) == 1
    assert "forget='auto'" in str(said[0].message)
    assert said[0].filename == __file__


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was():
    model = make()
    for x, y in batches(torch.sin, 5):
        model.update(x, y, num_steps=STEPS, forget=1.0)
    with pytest.raises(FlattenedWarning):
        for x, y in batches(other, 5, seed=1):
            before = model.likelihood.noise.item(), float(model.memory.num_data)
            model.update(x, y, forget=1.0)
    after = model.likelihood.noise.item(), float(model.memory.num_data)
    assert after == before


def test_what_is_forgotten_is_not_given_up():
    model = make()
    for x, y in batches(torch.sin, 5):
        model.update(x, y, forget="auto", num_steps=STEPS)
    for x, y in batches(lambda x: 1000 * other(x), 5, seed=1):
        assert not model.update(x, y, forget="auto", num_steps=STEPS).flattened
    assert model.likelihood.noise > 1


def test_streams_of_a_batch_are_told_apart():
    shape = torch.Size([2])
    kernel = ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape)
    model = StreamingGP(kernel, num_inducing=20, batch_shape=shape).double()
    for x, y in batches(torch.sin, 5):
        model.update(x, torch.stack([y, y]), num_steps=STEPS, forget=1.0)
    flat = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlattenedWarning)
        for x, y in batches(torch.sin, 5, seed=1):
            y_new = torch.stack([y, 5 - 3 * y])
            flat.append(model.update(x, y_new, forget=1.0).flattened)
    assert torch.stack(flat).any(0).tolist() == [False, True]


ORDINARY: dict[str, Function] = {
    "sine": torch.sin,
    "fast": lambda x: torch.sin(4 * x),
    "constant": lambda x: 0 * x + 3,
    "linear": lambda x: 2 * x - 1,
    "step": lambda x: (x > 3).to(x),
    "kink": lambda x: (x - 3).abs(),
}


@pytest.mark.parametrize(
    ("name", "noise"),
    [(name, noise) for name in ORDINARY for noise in (0.0, 0.05, 1.0)]
    if FULL
    else [*((name, 0.05) for name in ORDINARY)]
    + [(name, noise) for name in ("sine", "step") for noise in (0.0, 1.0)],
)
def test_ordinary_streams_are_not_warned_of(name: str, noise: float, size: int = 20):
    model, sorted_model = make(), make()
    data = list(batches(ORDINARY[name], 160 // size, size, noise))
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    order = x[:, 0].argsort()
    for k in range(0, 160, size):
        chosen = order[k : k + size]
        steps = {"num_steps": STEPS}
        assert not model.update(x[k : k + size], y[k : k + size], **steps).flattened
        if (name, noise) != ("step", 0.0):
            # Sorted and without noise, a step contradicts all before it, as a change
            # does: it is taken for noise of a tenth of its height, which is said.
            assert not sorted_model.update(x[chosen], y[chosen], **steps).flattened


@pytest.mark.parametrize(
    "model",
    [
        make(dims=4),
        make(dims=4, likelihood=StudentTLikelihood()),
        StreamingGP(LinearKernel(), num_inducing=20).double(),
        StreamingGP(ScaleKernel(MaternKernel()), num_inducing=20).double(),
    ],
    ids=["inputs", "student", "linear", "matern"],
)
def test_other_models_are_not_warned_of(model: StreamingGP):

    for x, y in batches(torch.sin, 8, dims=4, noise=0.2):
        assert not model.update(x, y, num_steps=STEPS).flattened


def test_an_outlier_and_a_gap_are_not_warned_of():
    model = make()
    for i, (x, y) in enumerate(batches(torch.sin, 12)):
        y[0] += 20 * 0.05 * (i == 6)
        shift = 30.0 * (i >= 9)
        assert not model.update(x + shift, y, num_steps=STEPS).flattened

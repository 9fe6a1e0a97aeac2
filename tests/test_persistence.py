"""States survive: dicts, copies, pickles, files, damage, malice and SIGKILL."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import random
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import LinearMean
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior
from torch import Tensor

from conftest import FULL
from torch_ssgp import (
    AdaptiveBudget,
    AllocatorPolicy,
    GreedyInformation,
    MultiOutputGP,
    StreamingGP,
    persistence,
)
from torch_ssgp.exceptions import ShapeError, StateError

ROOT = Path(__file__).resolve().parents[1]
CLASSES = torch.Size([3])
KINDS = ("gaussian", "fixed noise", "bernoulli", "softmax", "batch", "power-ep")


def build(kind: str, num_inducing: int = 8) -> StreamingGP:
    batch = {"softmax": CLASSES, "batch": torch.Size([2])}.get(kind, torch.Size())
    likelihood = {
        "fixed noise": lambda: FixedNoiseGaussianLikelihood(
            torch.ones(1).double(), learn_additional_noise=True
        ),
        "bernoulli": BernoulliLikelihood,
        "softmax": lambda: SoftmaxLikelihood(
            num_features=3, num_classes=3, mixing_weights=False
        ),
    }.get(kind, lambda: GaussianLikelihood(batch_shape=batch))()
    kernel = ScaleKernel(MaternKernel(batch_shape=batch), batch_shape=batch)
    return StreamingGP(
        kernel,
        likelihood,
        num_inducing=num_inducing,
        alpha=0.5 if kind == "power-ep" else 0.0,
        batch_shape=batch,
    ).double()


def data(kind: str, n: int = 12, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(n, 1, dtype=torch.float64, generator=generator)
    y = torch.sin(x[:, 0])
    if kind == "bernoulli":
        return x, (y > 0).double(), None
    if kind == "softmax":
        return x, (1.5 * (y + 0.99)).long(), None
    if kind == "batch":
        return x, torch.stack([y, 2 * y]), None
    return x, y, torch.full_like(y, 0.02) if kind == "fixed noise" else None


def stream(model: StreamingGP, kind: str, seeds: range) -> list[Tensor]:
    """Updates that learn; their bounds."""
    batches = (data(kind, seed=seed) for seed in seeds)
    return [model.update(*batch, num_steps=2).bound for batch in batches]


@cache
def _trained(kind: str, num_updates: int) -> StreamingGP:
    model = build(kind)
    stream(model, kind, range(num_updates))
    return model


def trained(kind: str, num_updates: int = 2) -> StreamingGP:
    """A model in the middle of its stream, of one's own."""
    return copy.deepcopy(_trained(kind, num_updates))


@cache
def continued(kind: str, num_updates: int = 2) -> tuple[list[Tensor], StreamingGP]:
    """The same model after two more batches, and their bounds."""
    model = build(kind)
    stream(model, kind, range(num_updates))
    return stream(model, kind, range(10, 12)), model


X = torch.linspace(-1, 7, 9).double().unsqueeze(-1)


def assert_same(a: Any, b: Any) -> None:
    """States are the same, bit for bit, and predictions to rounding.

    A copy factors all rows anew, where the model itself added some one by one.
    """
    for method in ("mean", "variance"):
        ours, theirs = getattr(a(X), method), getattr(b(X), method)
        tolerance = 1e-12 if ours.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name


def assert_continues(model: StreamingGP, kind: str, num_updates: int = 2) -> None:
    """The model is ``trained``, and goes on as the one that was never interrupted."""
    assert_same(model, _trained(kind, num_updates))
    bounds, expected = continued(kind, num_updates)
    for ours, theirs in zip(stream(model, kind, range(10, 12)), bounds, strict=True):
        assert torch.equal(ours, theirs)
    assert_same(model, expected)


def assert_goes_with(model: StreamingGP, reference: StreamingGP) -> None:
    """Two models are the same, now and after another batch."""
    assert_same(model, reference)
    for each in (model, reference):
        stream(each, "gaussian", range(10, 11))
    assert_same(model, reference)


def torch_bytes(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def through_torch_file(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return torch.load(io.BytesIO(torch_bytes(state)), weights_only=True)


# -- all ways to keep a model --------------------------------------------------------


def through_state(model: StreamingGP, kind: str, path: Path) -> StreamingGP:
    other = trained(kind, num_updates=1)
    other(X)  # a cache to forget
    other.load_state_dict(through_torch_file(model.state_dict()), strict=True)
    return other


def through_file(model: StreamingGP, kind: str, path: Path) -> StreamingGP:
    model.save(path)
    return StreamingGP.load(path)


WAYS: dict[str, Callable[[StreamingGP, str, Path], StreamingGP]] = {
    "state": through_state,
    "file": through_file,
    "deepcopy": lambda model, kind, path: copy.deepcopy(model),
    "pickle": lambda model, kind, path: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("num_updates", [0, 2])
@pytest.mark.parametrize("how", ["state", "file", "pickle"])  # all is a deepcopy
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_as_if_it_had_never_stopped(
    kind: str, how: str, num_updates: int, tmp_path: Path
) -> None:
    model = trained(kind, num_updates)
    model(X)
    again = WAYS[how](model, kind, tmp_path / "model.pt")
    for name in ("num_inducing", "alpha", "share_noise", "batch_shape", "training"):
        assert getattr(again, name) == getattr(model, name)
    assert_continues(again, kind, num_updates)


@pytest.mark.parametrize("how", ["file", "deepcopy", "pickle"])
@pytest.mark.parametrize(
    "kind, batch",
    [*((kind, ()) for kind in KINDS), ("gaussian", (5,)), ("softmax", (5,))],
)
def test_a_fantasy_is_kept_like_any_model(
    kind: str, batch: tuple[int, ...], how: str, tmp_path: Path
) -> None:
    x, y, noise = data(kind, n=4, seed=3)
    if batch:
        x = x.expand(*batch, *((1,) if kind == "softmax" else ()), 4, 1)
        y = y.expand(*batch, 4)
    fantasy = trained(kind).condition_on_observations(x, y, noise)
    fantasy(X)
    again = WAYS[how](fantasy, kind, tmp_path / "model.pt")
    assert_same(again, fantasy)
    if not batch:
        a, b = (m.update(x, y, noise, num_steps=1).bound for m in (again, fantasy))
        assert torch.equal(a, b)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_a_differentiable_fantasy_hold_its_values(
    how: str, tmp_path: Path
) -> None:
    x = torch.rand(5, 2, 1, dtype=torch.float64, requires_grad=True)
    fantasy = trained("gaussian").condition_on_observations(x, x.squeeze(-1))
    copied = WAYS[how](fantasy, "gaussian", tmp_path)
    # Not to the bit: GPyTorch computes distances otherwise where gradients flow.
    torch.testing.assert_close(copied(X).mean, fantasy(X).mean)
    assert not any(buffer.requires_grad for buffer in copied.buffers())
    fantasy(X).mean.sum().backward()
    assert x.grad is not None and bool((x.grad != 0).any())


# -- states --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", "softmax"])
def test_a_state_loads_whatever_the_number_of_points(kind: str) -> None:
    model = trained(kind)
    for num_inducing in (3, 20):
        other = build(kind, num_inducing)
        other.load_state_dict(model.state_dict())
        assert_same(model, other)
        stream(other, kind, range(1))
        assert other.memory.num_rows <= other.memory_size


@pytest.mark.parametrize("kind", ["gaussian", "fixed noise", "bernoulli"])
@pytest.mark.parametrize("source", [torch.float32, torch.float64])
def test_a_state_of_another_dtype_keeps_its_memory(
    kind: str, source: torch.dtype
) -> None:
    target = torch.float64 if source == torch.float32 else torch.float32
    model = trained(kind).to(source)
    other = build(kind).to(target)
    other.load_state_dict(model.state_dict())
    assert other.dtype == target
    copied = other.memory.state_dict()
    for name, value in model.memory.state_dict().items():
        assert torch.equal(value, copied[name]) and value.dtype == copied[name].dtype
    ours, theirs = model(X.to(source)).mean.double(), other(X.to(target)).mean.double()
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=0)
    x, y, noise = (None if t is None else t.to(target) for t in data(kind, seed=5))
    assert torch.isfinite(other.update(x, y, noise, num_steps=2).bound).all()


def broken(state: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    state = dict(state)
    name = next(name for name in state if name.endswith("raw_lengthscale"))
    if how == "missing":
        del state[next(name for name in state if name.endswith("memory.U"))]
    elif how == "unexpected":
        state["nonsense"] = torch.zeros(1)
    else:
        state[name] = torch.zeros(4, 5)
    return state


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("how", ["missing", "unexpected", "shape"])
@pytest.mark.parametrize("kind", ["gaussian", "softmax"])
def test_a_state_that_does_not_fit_changes_nothing(
    kind: str, how: str, assign: bool
) -> None:
    model, other = trained(kind), trained(kind, num_updates=1).state_dict()
    with pytest.raises(RuntimeError):
        model.load_state_dict(broken(other, how), assign=assign)
    assert_same(model, _trained(kind, 2))


def surrogate(num_updates: int) -> Any:
    surrogates = pytest.importorskip("torch_ssgp.surrogates")
    x, y, _ = data("gaussian")
    model = surrogates.SingleTaskStreamingGP(x / 6, y.unsqueeze(-1))
    for seed in range(1, num_updates):
        x, y, _ = data("gaussian", seed=seed)
        model.update(x / 6, y.unsqueeze(-1), num_steps=2)
    return model


@pytest.mark.parametrize(
    "make", [lambda k: MultiOutputGP(trained("batch", k)), surrogate], ids=["out", "bo"]
)
def test_states_of_fronts_load_whole_or_not_at_all(make: Callable[[int], Any]) -> None:
    model, reference, other = make(2), make(2), make(1)
    with pytest.raises(RuntimeError):
        model.load_state_dict(broken(other.state_dict(), "missing"))
    assert_same(model, reference)
    other.load_state_dict(through_torch_file(model.state_dict()))
    assert_same(other, reference)


def test_copies_of_a_surrogate_go_on() -> None:
    model, fresh = surrogate(2), surrogate(1)
    fresh.load_state_dict(model.state_dict())
    x, y, _ = data("gaussian", seed=7)
    for copied in (fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.update(x / 6, y.unsqueeze(-1), num_steps=2)
        assert copied.model.num_data == 36


def test_another_batch_shape_is_refused_also_of_the_same_number_of_dimensions() -> None:
    model, other = build("batch"), StreamingGP(RBFKernel(), batch_shape=CLASSES)
    with pytest.raises(ShapeError, match=r"batch_shape"):
        model.load_state_dict(other.state_dict())


# -- files ---------------------------------------------------------------------------


def test_dtype_mode_and_frozen_parameters_are_kept(tmp_path: Path) -> None:
    model = build("gaussian").float().eval()
    model.covar_module.raw_outputscale.requires_grad_(False)
    x, y, _ = data("gaussian")
    model.update(x.float(), y.float(), num_steps=2)
    model.save(tmp_path / "model.pt")
    loaded = StreamingGP.load(tmp_path / "model.pt", map_location="cpu")
    assert loaded.dtype == torch.float32 and loaded.memory.g.dtype == torch.float64
    assert not loaded.training
    assert not loaded.covar_module.raw_outputscale.requires_grad
    a, b = (m.update(x.float(), y.float(), num_steps=2) for m in (model, loaded))
    assert torch.equal(a.bound, b.bound)


RICH: dict[str, Callable[[], dict[str, Any]]] = {
    "priors": lambda: {
        "covar_module": ScaleKernel(
            RBFKernel(lengthscale_prior=GammaPrior(3.0, 6.0)),
            outputscale_prior=NormalPrior(1.0, 1.0),
        ),
        "likelihood": GaussianLikelihood(noise_prior=LogNormalPrior(-4.0, 1.0)),
    },
    "constraints": lambda: {
        "covar_module": RBFKernel(lengthscale_constraint=Interval(0.1, 5.0))
    },
    "sums": lambda: {
        "covar_module": ScaleKernel(MaternKernel()) + LinearKernel() * RBFKernel(),
        "mean_module": LinearMean(1),
        "inducing_policy": GreedyInformation(max_candidates=12),
    },
    "student": lambda: {
        "covar_module": RBFKernel(),
        "likelihood": StudentTLikelihood(),
    },
}


@pytest.mark.parametrize("modules", RICH)
def test_modules_of_gpytorch_are_rebuilt(modules: str, tmp_path: Path) -> None:
    model = StreamingGP(**RICH[modules](), num_inducing=8).double()
    stream(model, "gaussian", range(1))
    model.save(tmp_path / "model.pt")
    loaded = StreamingGP.load(tmp_path / "model.pt")
    for each in (loaded, model):
        has_policy = each.inducing_policy is not None
        assert has_policy == (modules == "sums")
        assert not has_policy or each.inducing_policy.max_candidates == 12
    assert_goes_with(loaded, model)
    assert_goes_with(copy.deepcopy(loaded), model)


# -- modules of one's own ------------------------------------------------------------


class OwnKernel(RBFKernel):
    """A class no file may name."""


class LambdaKernel(RBFKernel):
    """A class that cannot even be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.function = lambda x: x


class OwnPolicy(GreedyInformation):
    """A policy of one's own."""


@pytest.mark.parametrize("own", [OwnKernel, LambdaKernel])
def test_a_kernel_of_ones_own_is_passed(own: type, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    model = StreamingGP(ScaleKernel(own()), num_inducing=8).double()
    stream(model, "gaussian", range(2))
    model.save(path)
    with pytest.raises(StateError, match=rf"covar_module is .*{own.__name__}.*pass it"):
        StreamingGP.load(path)
    # Built in another dtype, with other values.
    loaded = StreamingGP.load(path, covar_module=ScaleKernel(own()))
    assert_goes_with(loaded, model)


def test_a_policy_of_ones_own_is_passed_and_asked_for_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    allocators = pytest.importorskip("botorch.models.utils.inducing_point_allocators")
    allocator = allocators.GreedyVarianceReduction()
    for policy, name in [
        (OwnPolicy(), "is a .*OwnPolicy"),
        (AllocatorPolicy(allocator), "with .*GreedyVarianceRed"),
        (AdaptiveBudget(policy=OwnPolicy()), "with .*OwnPolicy"),
    ]:
        StreamingGP(RBFKernel(), inducing_policy=policy).save(path)
        with pytest.raises(StateError, match=f"{name}.*used as passed") as caught:
            StreamingGP.load(path)
        assert "builtins" not in str(caught.value)
        assert "replaced" not in str(caught.value)
        assert StreamingGP.load(path, inducing_policy=policy).inducing_policy is policy


def test_a_module_built_otherwise_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    trained("gaussian").save(path)
    with pytest.raises(StateError, match="MaternKernel.*Build it as it was"):
        StreamingGP.load(path, covar_module=ScaleKernel(RBFKernel()))
    with pytest.raises(StateError, match="does not fit the modules that you pass"):
        StreamingGP.load(path, covar_module=ScaleKernel(MaternKernel(ard_num_dims=2)))


# -- what is refused -----------------------------------------------------------------


def seal(content: Any, path: Path) -> Path:
    """Write a file whose tag and checksum are right."""
    if not isinstance(content, bytes):
        content = torch_bytes(content)
    path.write_bytes(persistence._TAG + hashlib.sha256(content).digest() + content)
    return path


def content_of(path: Path) -> dict[str, Any]:
    return persistence._read(path, None)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    trained("gaussian", 1).save(path)
    return path


def test_a_file_that_was_cut_or_changed_is_refused(saved: Path) -> None:
    whole, draw = saved.read_bytes(), random.Random(0)
    lengths = {*range(100), *range(0, len(whole), 97), len(whole) - 1}
    damaged = [whole[:length] for length in sorted(lengths)] + [whole + b"\0"]
    for position in (*range(100), *draw.sample(range(len(whole)), 500)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << draw.randrange(8)
        damaged.append(bytes(flipped))
    for content in damaged:
        saved.write_bytes(content)
        with pytest.raises(StateError, match="not a model saved by|damaged"):
            StreamingGP.load(saved)


def test_other_files_are_refused(tmp_path: Path, saved: Path) -> None:
    other = tmp_path / "other.pt"
    other.write_text("hello")
    with pytest.raises(StateError, match="other.pt is not a model"):
        StreamingGP.load(other)
    torch.save(trained("gaussian", 1).state_dict(), other)
    with pytest.raises(StateError, match="load_state_dict"):
        StreamingGP.load(other)
    with pytest.raises(StateError, match="cannot be read as a model"):
        StreamingGP.load(seal([1, 2], other))
    with pytest.raises(FileNotFoundError):
        StreamingGP.load(tmp_path / "nothing.pt")

    newest = persistence.FORMAT_VERSION
    advice = {newest + 1: "Upgrade torch_ssgp", 1: "Load it with torch_ssgp 0.2"}
    for version, wanted in advice.items():
        content = content_of(saved) | {"format_version": version}
        with pytest.raises(StateError, match=wanted):
            StreamingGP.load(seal(content, other))
    with pytest.raises(StateError, match="Use OtherGP.load"):
        StreamingGP.load(seal(content_of(saved) | {"class": "OtherGP"}, other))


def entries(content: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every entry on every level of a file, apart from its state."""
    for name, value in list(content.items()):
        yield content, name
        if isinstance(value, dict) and name != "state":
            yield from entries(value)


@pytest.mark.parametrize("value", ["gone", "2", None, -1, {}], ids=repr)
def test_a_sealed_file_without_a_whole_model_is_refused(value: Any, saved: Path):
    content = content_of(saved)
    for owner, name in entries(content):
        kept = owner.pop(name)
        if value != "gone":
            owner[name] = value
        with pytest.raises(StateError):
            StreamingGP.load(seal(content, saved))
        owner[name] = kept
    StreamingGP.load(seal(content, saved))


def test_a_file_of_parts_that_do_not_go_together_is_refused(saved: Path) -> None:
    content = content_of(saved)
    content["settings"]["batch_shape"] = torch.Size([2])
    with pytest.raises(StateError, match="is inconsistent"):
        StreamingGP.load(seal(content, saved))


class Malice:
    """Calls a function when it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


MALICIOUS: dict[str, Callable[[Any], bytes]] = {
    "pickle": lambda malice: pickle.dumps(malice, protocol=2),
    "zip": torch_bytes,
    "legacy": lambda malice: torch_bytes(malice, _use_new_zipfile_serialization=False),
}


@pytest.mark.parametrize("how", MALICIOUS)
def test_a_malicious_file_does_not_run(how: str, tmp_path: Path, saved: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "evil.pt"
    command = Malice(os.system, f"touch {marker}")
    # A forbidden method of a known class, and the function that opens all doors.
    sneak = Malice(persistence._method, RBFKernel(), "__init__")
    getter = Malice(getattr, RBFKernel(), "__class__")
    evil = MALICIOUS[how](command)
    path.write_bytes(evil)
    with pytest.raises(StateError):
        StreamingGP.load(path)
    with pytest.raises(StateError, match="cannot be read"):  # tag and checksum right
        StreamingGP.load(seal(evil, path))
    for name in persistence.MODULES:
        content = content_of(saved)
        for malice in (command, sneak, getter):
            content["modules"][name]["blob"] = MALICIOUS[how](malice)
            with pytest.raises(StateError, match=f"{name} is a"):
                StreamingGP.load(seal(content, path))
    assert not marker.exists()
    # The payload would have worked.
    pickle.loads(pickle.dumps(command))
    assert marker.exists()


def test_torchs_list_of_safe_classes_is_left_as_it_was(saved: Path) -> None:
    with torch.serialization.safe_globals([MaternKernel]):  # the user's choice
        before = set(torch.serialization.get_safe_globals())
        StreamingGP.load(saved)
        assert set(torch.serialization.get_safe_globals()) == before


def test_threads_load_at_the_same_time(saved: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(StreamingGP.load, [saved] * 12))
    for model in models:
        assert_same(model, _trained("gaussian", 1))


# -- a file is whole at every moment -------------------------------------------------


def test_a_file_reaches_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        calls.append("sync directory" if directory else "sync file")
        fsync(descriptor)

    def record_replace(a: str, b: str) -> None:
        assert os.path.dirname(a) == os.path.dirname(b)
        calls.append("rename")
        replace(a, b)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    build("gaussian").save(tmp_path / "model.pt")
    assert calls == ["sync file", "rename", "sync directory"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_file_alone(
    function: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="No space"):
        trained("gaussian").save(saved)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    assert saved.read_bytes() == before


def test_a_link_stays_a_link(saved: Path) -> None:
    link = saved.with_name("link.pt")
    link.symlink_to(saved)
    model = trained("gaussian", 2)
    model.save(str(link))
    assert link.is_symlink()
    assert_same(StreamingGP.load(saved), model)


# One interpreter imports torch; victims are forked from it.
NURSERY = """
import json, mmap, os, pathlib, random, signal, sys, time
import torch
from gpytorch.kernels import RBFKernel
from torch_ssgp import StreamingGP

torch.set_num_threads(1)
path, num_victims = sys.argv[1], int(sys.argv[2])
x = torch.linspace(0, 9, 200, dtype=torch.float64)
model = StreamingGP(RBFKernel(), num_inducing=60).double()
model.update(x, x.sin(), num_steps=0)
start = {name: value.clone() for name, value in model.state_dict().items()}


def mark(k):
    "State number k: every tensor says so."
    model.load_state_dict({n: marked(v, k) for n, v in start.items()})


def marked(value, k):
    return value + k if value.is_floating_point() else value


mark(0)
model.save(path)
done = mmap.mmap(-1, 8)  # shared with the victims: the last save that returned
draw, found, torn = random.Random(0), [], 0
for _ in range(num_victims):
    first = int.from_bytes(done[:], "big")
    victim = os.fork()
    if victim == 0:
        for k in range(first + 1, first + 10**6):
            mark(k)
            model.save(path)
            done[:] = k.to_bytes(8, "big")
    time.sleep(draw.uniform(0, 0.05))
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    last = int.from_bytes(done[:], "big")
    state = StreamingGP.load(path).state_dict()
    k = round(float(state["memory.row_data"] - start["memory.row_data"]))
    assert k in (last, last + 1), (k, last)
    for name, value in start.items():
        assert torch.equal(state[name], marked(value, k)), name
    found.append(k)
    for half in pathlib.Path(path).parent.glob(".*.tmp"):
        torn += 1
        half.unlink()
print(json.dumps({"saves": found[-1], "killed": len(found), "while writing": torn}))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_a_process_killed_while_saving_leaves_a_whole_model(tmp_path: Path) -> None:
    num_victims = 200 if FULL else 15
    done = subprocess.run(
        [sys.executable, "-c", NURSERY, str(tmp_path / "model.pt"), str(num_victims)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert json.loads(done.stdout)["killed"] == num_victims


# -- files of version 0.2 ------------------------------------------------------------

OLD = Path(__file__).parent / "data"
OLD_X = torch.tensor([0.5, 2.0, 3.5, 5.0, 8.0]).double()
# What 0.2.0 predicted from its memory with the files that it wrote.
SINGLE = (
    [0.464694137, 0.897844583, -0.390226525, -0.911705835, -0.313973349],
    [0.004415320, 0.002881743, 0.002586777, 0.004029698, 0.570501577],
)
LABELS = (
    [
        [1.182213617, 1.007287293, -0.427302474, -1.201245325, -0.062820436],
        [0.942092499, -0.399465829, -0.676978862, 0.370376662, 0.002276390],
    ],
    [
        [0.301837210, 0.331251425, 0.293427714, 0.298744018, 0.630785013],
        [0.354770921, 0.380156881, 0.453912786, 0.329447102, 0.635014537],
    ],
)


def assert_predicts(model: StreamingGP, expected: tuple[list, list]) -> None:
    """Moments as those of version 0.2, apart from its jitter at raw data."""
    latent = model(OLD_X)
    for ours, values in zip((latent.mean, latent.variance), expected, strict=True):
        theirs = torch.tensor(values).double()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_file_of_version_0_2_loads_and_goes_on() -> None:
    """It had seen 30 readings of a sine, one by one; four of them are raw."""
    model = StreamingGP.load(OLD / "model_v2.pt")
    assert_predicts(model, SINGLE)
    assert model.num_data == 30 and model.memory.num_raw == 4
    assert model.memory_size == 12 and model.inducing_policy is None
    x = torch.linspace(0, 6, 60).double()
    result = model.update(x[:1], x[:1].sin(), num_steps=0)
    # What the update adds is the new datum alone, not all data of before.
    assert abs(float(result.increment)) < 5
    model.update(x[1:], x[1:].sin())
    assert model.num_data == 90
    assert (model(x).mean - x.sin()).abs().max() < 0.1
    # The default of then chose no points; a policy that is passed does.
    given = AdaptiveBudget()
    model = StreamingGP.load(OLD / "model_v2.pt", inducing_policy=given)
    assert model.inducing_policy is given


def test_labels_of_streams_in_a_file_of_version_0_2_load_and_go_on() -> None:
    """Two streams, one of which had missed four of its 17 labels, all raw."""
    model = StreamingGP.load(OLD / "labels_v2.pt")
    assert_predicts(model, LABELS)
    assert model.num_data.tolist() == [17, 13]
    x = torch.linspace(0, 6, 30).double()
    y = (torch.stack([x.sin(), x.cos()]) > 0).double()
    model.update(x, y, num_steps=5)
    assert model.num_data.tolist() == [47, 43]
    assert ((model.predict(x).mean > 0.5) == (y > 0.5)).double().mean() > 0.9


def test_a_state_of_version_0_2_loads_or_says_what_is_missing() -> None:
    state = content_of(OLD / "model_v2.pt")["state"]
    model = StreamingGP(ScaleKernel(MaternKernel()), num_inducing=6).double()
    for name in ("memory.row_data", "summary.U"):
        with pytest.raises(StateError, match="no tensor 'row_data'|no tensor 'U'"):
            model.load_state_dict({k: v for k, v in state.items() if k != name})
        assert model.memory.is_empty
    model.load_state_dict(state)
    assert_predicts(model, SINGLE)


def test_hyperparameters_are_learned_at_the_same_data_after_a_stop(
    tmp_path: Path,
) -> None:
    """Whether learning is due depends on what was learned before."""
    model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=30).double()
    x = 6 * torch.rand(200, 1).double()
    y = x[:, 0].sin() + 0.1 * torch.randn(200).double()
    model.update(x[:60], y[:60])
    model.save(tmp_path / "model.pt")
    loaded = StreamingGP.load(tmp_path / "model.pt")
    learned: list[list[bool]] = [[], []]
    for i in range(60, 200, 5):
        for each, found in zip((model, loaded), learned, strict=True):
            found.append(each.update(x[i : i + 5], y[i : i + 5]).learned)
    assert learned[0] == learned[1]
    assert 0 < sum(learned[0]) < len(learned[0])

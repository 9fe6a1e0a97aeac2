"""Exported models against the models they were exported from."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    ConstantKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import ConstantMean, LinearMean, Mean, ZeroMean
from torch import Tensor, nn
from torch.export import Dim

from examples import deploy
from torch_ssgp import StreamingGP
from torch_ssgp.exceptions import DtypeError, ExportError, ShapeError
from torch_ssgp.export import ExportedGP

KERNELS: dict[str, Callable[[], Kernel]] = {
    "rbf": lambda: RBFKernel(),
    "ard": lambda: ScaleKernel(RBFKernel(ard_num_dims=3)),
    "matern 1/2": lambda: ScaleKernel(MaternKernel(0.5)),
    "matern 3/2": lambda: MaternKernel(1.5, ard_num_dims=3),
    "matern 5/2": lambda: ScaleKernel(MaternKernel(2.5)),
    "rational quadratic": lambda: RQKernel(ard_num_dims=3),
    "periodic": lambda: ScaleKernel(PeriodicKernel()),
    "linear": lambda: ScaleKernel(LinearKernel(ard_num_dims=3)),
    "constant": lambda: ConstantKernel(),
    "active dims": lambda: ScaleKernel(MaternKernel(active_dims=[2, 0])),
    "sum": lambda: (
        ScaleKernel(RBFKernel(active_dims=[0, 2]) * PeriodicKernel(active_dims=[1]))
        + LinearKernel(active_dims=[2])
        + ConstantKernel()
    ),
    "product": lambda: RBFKernel() * RQKernel() * MaternKernel(1.5, active_dims=[0]),
}
MEANS: dict[str, Callable[[], Mean]] = {
    "zero": ZeroMean,
    "constant": ConstantMean,
    "linear": lambda: LinearMean(3),
    "linear without bias": lambda: LinearMean(3, bias=False),
}
LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "gaussian": GaussianLikelihood,
    "bernoulli": BernoulliLikelihood,
    "poisson": PoissonLikelihood,
}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
ROWS = (1, 10_000)


def learned(
    kernel: Kernel,
    likelihood: Likelihood | None = None,
    mean: Mean | None = None,
    dtype: torch.dtype = torch.float64,
) -> StreamingGP:
    """A model of two updates in three inputs."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(60, 3, generator=generator).to(dtype)
    y = torch.sin(x[:, 0]) + 0.5 * x[:, 1] + x[:, 2].cos()
    if isinstance(likelihood, BernoulliLikelihood):
        y = (y > 0).to(dtype)
    if isinstance(likelihood, PoissonLikelihood):
        y = torch.poisson(y.exp(), generator=generator)
    model = StreamingGP(kernel, likelihood, mean, num_inducing=20).to(dtype)
    for half in (slice(0, 30), slice(30, 60)):
        model.update(x[half], y[half], num_steps=5)
    return model


def inputs(num: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Test points among the data and beyond them."""
    generator = torch.Generator().manual_seed(1)
    return 3 * torch.randn(num, 3, generator=generator, dtype=dtype)


def predicted(model: StreamingGP, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of targets through the model."""
    if isinstance(model.likelihood, PoissonLikelihood):
        return counts(model, x)
    prediction = model.predict(x)
    return prediction.mean.detach(), prediction.variance.detach()


def counts(model: StreamingGP, x: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of counts, integrated far more finely than needed.

    GPyTorch draws samples of the rate; these are what the samples tend to.
    """
    latent = model(x)
    mean, deviation = latent.mean.detach(), latent.stddev.detach()
    t = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    weight = torch.softmax(-0.5 * t.square(), 0)
    first, second = [], []
    parts = (t.double().split(100) for t in (mean, deviation))
    for m, s in zip(*parts, strict=True):
        rate = nn.functional.softplus(m[:, None] + s[:, None] * t)
        first.append(rate @ weight)
        second.append(rate.square() @ weight)
    expected = torch.cat(first)
    variance = expected + torch.cat(second) - expected.square()
    return expected.to(x.dtype), variance.to(x.dtype)


def assert_same(
    ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], what: str = ""
) -> None:
    """Mean and variance equal to the tolerance of their dtype."""
    for a, b in zip(ours, theirs, strict=True):
        tolerance = TOLERANCE[b.dtype]
        torch.testing.assert_close(
            a.detach(), b, rtol=tolerance, atol=tolerance, msg=lambda m: what + m
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_each_kernel_predicts_as_the_model(name: str, dtype: torch.dtype) -> None:
    model = learned(KERNELS[name](), dtype=dtype)
    exported = model.export()
    for num in ROWS:
        x = inputs(num, dtype)
        assert_same(exported(x), predicted(model, x), f"{num} rows: ")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_each_likelihood_predicts_as_the_model(name: str, dtype: torch.dtype) -> None:
    kernel = ScaleKernel(MaternKernel(ard_num_dims=3))
    model = learned(kernel, LIKELIHOODS[name](), dtype=dtype)
    exported = model.export()
    for num in ROWS:
        x = inputs(num, dtype)
        assert_same(exported(x), predicted(model, x), f"{num} rows: ")


@pytest.mark.parametrize("name", MEANS)
def test_each_mean_predicts_as_the_model(name: str) -> None:
    model = learned(ScaleKernel(RBFKernel()), mean=MEANS[name]())
    x = inputs(50)
    assert_same(model.export()(x), predicted(model, x))


def test_counts_are_what_the_samples_of_predict_tend_to() -> None:
    model = learned(ScaleKernel(RBFKernel()), PoissonLikelihood())
    x, num = inputs(5), 40_000
    mean, variance = model.export()(x)
    with gpytorch.settings.num_likelihood_samples(num):
        sampled = model.predict(x)  # a Poisson distribution for each sample of f
    expected = sampled.mean.mean(0)
    spread = sampled.mean.var(0)
    six_sigma = 6 * (spread / num).sqrt()
    assert ((mean - expected).abs() < six_sigma).all()
    torch.testing.assert_close(variance, expected + spread, rtol=0.1, atol=0)


@pytest.mark.parametrize("deviation", [1e-3, 1.0, 5.0, 12.0])
def test_moments_of_counts_hold_for_narrow_and_wide_functions(deviation: float) -> None:
    model = StreamingGP(ScaleKernel(RBFKernel()), PoissonLikelihood()).double()
    model.covar_module.outputscale = deviation**2
    x = inputs(1)
    assert_same(model.export()(x), counts(model, x))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_model_without_data_exports_its_prior(name: str) -> None:
    model = StreamingGP(
        ScaleKernel(MaternKernel()), LIKELIHOODS[name](), ConstantMean()
    ).double()
    model.mean_module.constant = 0.7
    x = inputs(7)
    assert_same(model.export()(x), predicted(model, x))


def test_a_batch_of_streams_predicts_as_the_model() -> None:
    shape = torch.Size([2])
    kernel = ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape)
    model = StreamingGP(kernel, num_inducing=15, batch_shape=shape).double()
    x = inputs(40)
    model.update(x, torch.stack([x[:, 0].sin(), x[:, 1].cos()]), num_steps=5)
    exported = model.export()
    for x in (inputs(9), torch.stack([inputs(9), -inputs(9)])):
        assert_same(exported(x), predicted(model, x))


def test_dtype_is_that_of_the_results() -> None:
    model = learned(ScaleKernel(RBFKernel()))
    x = inputs(5)
    for dtype in TOLERANCE:
        mean, variance = model.export(dtype)(x)
        assert mean.dtype == variance.dtype == dtype
        theirs = tuple(t.to(dtype) for t in predicted(model, x))
        assert_same((mean, variance), theirs)
    with pytest.raises(DtypeError, match="expected torch.float32 or torch.float64"):
        model.export(torch.float16)


def test_an_update_does_not_change_what_was_exported() -> None:
    model = learned(ScaleKernel(RBFKernel()))
    exported, x = model.export(), inputs(5)
    before = exported(x)
    model.update(inputs(20), torch.ones(20).double(), num_steps=2)
    assert torch.equal(exported(x)[0], before[0])
    assert not torch.allclose(model.export()(x)[0], before[0])


def test_gradients_flow_to_inputs_and_to_nothing_else() -> None:
    model = learned(ScaleKernel(MaternKernel()))
    exported, x = model.export(), inputs(4).requires_grad_()
    mean, variance = exported(x)
    ours = torch.autograd.grad((mean + variance).sum(), x)[0]
    prediction = model.predict(x)
    theirs = torch.autograd.grad((prediction.mean + prediction.variance).sum(), x)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert list(exported.parameters()) == []


def test_a_fantasy_and_a_fantasy_of_it_predict_as_the_model() -> None:
    model, x = learned(ScaleKernel(RBFKernel())), inputs(9)
    once = model.condition_on_observations(x[:3], x[:3, 0])
    several = torch.stack([x[3:5], -x[3:5]])
    twice = once.condition_on_observations(several, torch.ones(2, 2).double())
    for fantasy in (once, twice):
        assert_same(fantasy.export()(x), predicted(fantasy, x))


def test_a_model_that_forgets_predicts_as_the_model() -> None:
    model, x = learned(ScaleKernel(RBFKernel())), inputs(9)
    model.update(x, x[:, 0], forget=0.8, num_steps=2)
    assert_same(model.export()(x), predicted(model, x))
    model.memory.replace(rate=torch.tensor(0.1).double())  # it drifts
    drifting = predicted(model, x)
    assert_same(model.export()(x), drifting)
    model.memory.replace(rate=torch.tensor(0.0).double())
    assert not torch.allclose(drifting[0], predicted(model, x)[0])


# -- following the model ------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.trace.*deprecated:DeprecationWarning")
def test_what_was_made_of_it_follows_the_model() -> None:
    model, x = learned(ScaleKernel(MaternKernel())), inputs(6)
    exported = model.export()
    rows = {"x": {0: Dim("rows")}}
    program = torch.export.export(exported, (inputs(4),), dynamic_shapes=rows)
    file = io.BytesIO()
    torch.export.save(program, file)
    loaded = torch.export.load(io.BytesIO(file.getvalue())).module()
    compiled = torch.compile(exported, fullgraph=True, backend="aot_eager")
    compiled(x)
    traced = torch.jit.trace(exported, (inputs(4),))
    for num in (5, 40):  # more rows, then a compression
        data = inputs(num)
        model.update(data, data[:, 0].sin(), num_steps=5)
        before = exported(x)
        exported.update_from(model)
        loaded.load_state_dict(exported.state_dict())
        assert not torch.allclose(exported(x)[0], before[0])
        for each in (exported, compiled, program.module(), loaded, traced):
            assert_same(each(x), predicted(model, x))


@pytest.mark.parametrize("batch", [(), (2,)])
def test_sizes_stay_while_the_memory_fills(batch: tuple[int, ...]) -> None:
    model = StreamingGP(RBFKernel(), num_inducing=8, batch_shape=torch.Size(batch))
    exported, sizes = model.export(), set()
    for num in (1, 3, 5, 20):
        x = inputs(num).float()
        model.update(x, x[:, 0].expand(*batch, num), num_steps=0)
        exported.update_from(model)
        sizes.add(exported.factor.shape)
        assert_same(exported(inputs(7).float()), predicted(model, inputs(7).float()))
    assert sizes == {(*batch, model.memory_size, model.memory_size)}


def test_it_grows_with_a_model_of_more_rows_than_there_is_room_for() -> None:
    model, x = learned(ScaleKernel(RBFKernel())), inputs(40)
    exported = model.export()
    fantasy = model.condition_on_observations(x, x[:, 0])
    exported.update_from(fantasy)
    assert_same(exported(x), predicted(fantasy, x))


@pytest.mark.parametrize(
    "other",
    [
        lambda: learned(RBFKernel() * RQKernel()),
        lambda: learned(ScaleKernel(MaternKernel())),
        lambda: learned(ScaleKernel(RBFKernel()), mean=LinearMean(3)),
        lambda: learned(ScaleKernel(RBFKernel()), BernoulliLikelihood()),
    ],
    ids=["product", "kernel", "mean", "likelihood"],
)
def test_a_model_of_other_parts_is_refused(other: Callable[[], StreamingGP]) -> None:
    exported, x = learned(ScaleKernel(RBFKernel())).export(), inputs(5)
    before = exported(x)
    with pytest.raises(ExportError, match="another kernel, mean or likelihood"):
        exported.update_from(other())
    assert torch.equal(exported(x)[0], before[0])


# -- what is inside -----------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_of_gpytorch_is_inside(name: str) -> None:
    exported = learned(KERNELS[name]()).export()
    for module in exported.modules():
        origin = type(module).__module__
        assert origin.startswith(("torch_ssgp", "torch.nn")), origin
    assert b"gpytorch" not in pickle.dumps(exported)
    assert b"linear_operator" not in pickle.dumps(exported)


def test_copies_pickles_and_states_predict_the_same() -> None:
    model, x = learned(KERNELS["sum"]()), inputs(5)
    exported = model.export()
    for other in (copy.deepcopy(exported), pickle.loads(pickle.dumps(exported))):
        assert torch.equal(other(x)[1], exported(x)[1])
    other = learned(KERNELS["sum"](), mean=ZeroMean()).export()
    with torch.no_grad():
        for buffer in other.buffers():
            if buffer.is_floating_point():
                buffer.add_(1)
    other.load_state_dict(exported.state_dict())
    assert torch.equal(other(x)[1], exported(x)[1])


def test_the_wrong_number_of_columns_is_refused() -> None:
    exported = learned(ScaleKernel(RBFKernel())).export()
    with pytest.raises(ShapeError, match=r"\(5, 2\); expected 3 columns"):
        exported(torch.zeros(5, 2).double())


# -- what cannot be exported --------------------------------------------------------


class Shifted(RBFKernel):
    """A kernel that may compute something else than its base class."""


class Tilted(ConstantMean):
    """A mean that may compute something else than its base class."""


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (PolynomialKernel(2), "PolynomialKernel"),
        (ScaleKernel(RBFKernel() + PolynomialKernel(2)), "PolynomialKernel"),
        (RBFKernel() * Shifted(), "Shifted"),
    ],
)
def test_other_kernels_are_named_with_those_that_are_supported(
    kernel: Kernel, name: str
) -> None:
    wanted = rf"covar_module has a {name},.*RBFKernel, MaternKernel.*active_dims"
    with pytest.raises(ExportError, match=wanted):
        StreamingGP(kernel).export()


def test_other_means_are_named_with_those_that_are_supported() -> None:
    model = StreamingGP(RBFKernel(), mean_module=Tilted())
    wanted = "mean_module has a Tilted,.*ZeroMean, ConstantMean, LinearMean"
    with pytest.raises(ExportError, match=wanted):
        model.export()


@pytest.mark.parametrize(
    "likelihood",
    [StudentTLikelihood(), SoftmaxLikelihood(num_classes=2, mixing_weights=False)],
    ids=["student", "softmax"],
)
def test_other_likelihoods_are_named_with_those_that_are_supported(
    likelihood: Likelihood,
) -> None:
    batch = torch.Size([2] if isinstance(likelihood, SoftmaxLikelihood) else [])
    model = StreamingGP(RBFKernel(), likelihood, batch_shape=batch)
    name = type(likelihood).__name__
    wanted = f"likelihood has a {name},.*GaussianLikelihood, Bernoulli.*Poisson"
    with pytest.raises(ExportError, match=wanted):
        model.export()


# -- what reads it ------------------------------------------------------------------


def every_case() -> dict[str, Callable[[], ExportedGP]]:
    """Each kernel, and each likelihood."""

    def with_kernel(name: str) -> Callable[[], ExportedGP]:
        return lambda: learned(KERNELS[name]()).export()

    def with_likelihood(name: str) -> Callable[[], ExportedGP]:
        kernel = ScaleKernel(RBFKernel())
        return lambda: learned(kernel, LIKELIHOODS[name](), LinearMean(3)).export()

    return {
        **{name: with_kernel(name) for name in KERNELS},
        **{name: with_likelihood(name) for name in LIKELIHOODS},
    }


CASES = every_case()
each_case = pytest.mark.parametrize("case", CASES)


@each_case
def test_torch_export_takes_any_number_of_rows(case: str) -> None:
    exported = CASES[case]()
    rows = {"x": {0: Dim("rows")}}
    program = torch.export.export(exported, (inputs(4),), dynamic_shapes=rows)
    for num in ROWS:
        x = inputs(num)
        assert_same(program.module()(x), exported(x))


# torch 2.13 makes an instance of a function's class while it looks through it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@each_case
def test_torch_compile_sees_one_graph(case: str) -> None:
    torch.compiler.reset()  # it counts graphs, whatever they are of
    # The graph is what is tested; a backend that writes C++ needs a compiler for it.
    exported = CASES[case]()
    compiled = torch.compile(exported, fullgraph=True, backend="aot_eager")
    x = inputs(6)
    assert_same(compiled(x), exported(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace.*deprecated:DeprecationWarning")
@each_case
def test_a_trace_takes_any_number_of_rows(case: str) -> None:
    exported = CASES[case]()
    traced = torch.jit.trace(exported, (inputs(4),))
    for num in ROWS:
        x = inputs(num)
        assert_same(traced(x), exported(x))


# The exporter's packages use what torch has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@each_case
def test_onnx_runtime_computes_the_same(case: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    exported = CASES[case]()
    rows = {"x": {0: Dim("rows")}}
    program = torch.onnx.export(
        exported, (inputs(4),), dynamic_shapes=rows, dynamo=True, verbose=False
    )
    # This optimization rounds constants to float32.
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(),
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["MatMulScaleFusion"],
    )
    (given,) = session.get_inputs()
    for num in (1, 50):
        x = inputs(num)
        ours = session.run(None, {given.name: x.numpy()})
        assert_same(tuple(map(torch.as_tensor, ours)), exported(x))


# The exporter's packages use what torch has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_onnx_file_takes_new_values() -> None:
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x = learned(ScaleKernel(MaternKernel())), inputs(6)
    exported = model.export()
    rows = {"x": {0: Dim("rows")}}
    proto = torch.onnx.export(
        exported,
        (inputs(4),),
        dynamic_shapes=rows,
        dynamo=True,
        verbose=False,
        optimize=False,
    ).model_proto
    before = exported(x)
    data = inputs(40)
    model.update(data, data[:, 0].sin(), num_steps=5)
    exported.update_from(model)
    values = exported.state_dict()
    assert {tensor.name for tensor in proto.graph.initializer} >= values.keys()
    for tensor in proto.graph.initializer:
        if tensor.name in values:
            value = values[tensor.name].numpy()
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(),
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["MatMulScaleFusion"],
    )
    ours = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert_same(tuple(map(torch.as_tensor, ours)), predicted(model, x))
    assert not torch.allclose(torch.as_tensor(ours[0]), before[0])


DEPLOYED = """
import sys
import torch

program = torch.export.load(sys.argv[1]).module()
x, mean, variance = torch.load(sys.argv[2])
ours = program(x)
torch.testing.assert_close(ours[0], mean, rtol=1e-6, atol=1e-6)
torch.testing.assert_close(ours[1], variance, rtol=1e-6, atol=1e-6)
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"gpytorch", "linear_operator", "torch_ssgp"}, loaded
print("same")
"""


@pytest.mark.parametrize("case", ["sum", "matern 5/2", "bernoulli"])
def test_a_process_without_gpytorch_loads_it(case: str, tmp_path: Path) -> None:
    exported, x = CASES[case](), inputs(12)
    rows = {"x": {0: Dim("rows")}}
    program = torch.export.export(exported, (inputs(4),), dynamic_shapes=rows)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    (tmp_path / "model.pt2").write_bytes(buffer.getvalue())
    torch.save((x, *exported(x)), tmp_path / "expected.pt")
    script = tmp_path / "deployed.py"
    script.write_text(textwrap.dedent(DEPLOYED), encoding="utf-8")
    files = [str(tmp_path / name) for name in ("model.pt2", "expected.pt")]
    ended = subprocess.run(
        [sys.executable, str(script), *files], capture_output=True, text=True
    )
    assert ended.stdout.strip() == "same", ended.stderr


def test_the_example_deploys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = deploy.main(num_batches=2, num_steps=5, repeats=3, out=tmp_path)
    assert shown.difference < TOLERANCE[torch.float32]
    assert shown.imported == ""
    assert [file.name for file in tmp_path.iterdir()] == ["deploy.pt2"]
    assert "times faster" in capsys.readouterr().out

"""What holds for every stream: kernels, dtypes, scales and histories drawn at random.

Twenty-five streams per claim, the same ones every time; five hundred fresh ones with
``TORCH_SSGP_FULL=1``.

GPyTorch lifts variances below ``gpytorch.settings.min_variance`` (1e-10 in float64,
1e-6 in float32) and warns. Targets of size 1e-8 have prior variances of 1e-16, all of
them below, so variances are read from the diagonal of the covariance itself.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from gpytorch import kernels
from gpytorch.constraints import Positive
from gpytorch.likelihoods import GaussianLikelihood
from hypothesis import example, given
from hypothesis import strategies as st

from torch_ssgp import StreamingGP
from torch_ssgp.modules import Opaque, lazy_gram, variances
from torch_ssgp.prediction import freeze

# An update may fall back, and say so; what it ends with must be in order. Targets may
# be small on purpose.
pytestmark = pytest.mark.filterwarnings(
    "ignore::torch_ssgp.exceptions.NumericalWarning",
    "ignore::torch_ssgp.exceptions.PrecisionWarning",
)

# -- streams -------------------------------------------------------------------------

LEAVES = {
    "rbf": kernels.RBFKernel,
    "matern12": lambda **options: kernels.MaternKernel(nu=0.5, **options),
    "matern32": lambda **options: kernels.MaternKernel(nu=1.5, **options),
    "matern52": lambda **options: kernels.MaternKernel(nu=2.5, **options),
    "rq": kernels.RQKernel,
    "periodic": kernels.PeriodicKernel,
    "linear": kernels.LinearKernel,
}


def build(spec, num_dims, batch_shape, unit):
    """A kernel from nested tuples, with lengths in the given unit (or GPyTorch's)."""
    name, *rest = spec
    shape = {"batch_shape": torch.Size(batch_shape)}
    if name in ("sum", "product"):
        a, b = (build(part, num_dims, batch_shape, unit) for part in rest)
        return a + b if name == "sum" else a * b
    if name == "scale":
        base = build(rest[0], num_dims, batch_shape, unit)
        return kernels.ScaleKernel(base, **shape)
    (is_ard,) = rest
    if is_ard:
        shape["ard_num_dims"] = num_dims
    kernel = LEAVES[name](**shape)
    if unit is not None:
        if name == "linear":
            kernel.variance = unit**-2
        elif name == "periodic":
            kernel.period_length = unit  # its lengthscale has no unit
        else:
            kernel.lengthscale = unit
    return kernel


@dataclass(frozen=True)
class Stream:
    """A model that has seen nothing, and where its data come from."""

    kernel: tuple
    scaled: bool
    dtype: torch.dtype
    batch_shape: tuple
    shared_kernel: bool
    num_dims: int
    x_kind: str
    y_kind: str
    x_scale: float
    y_scale: float
    in_units: bool  # hyperparameters in units of the data, or as GPyTorch has them
    noise: float  # as a fraction of the size of the targets, if in units
    num_inducing: int
    alpha: float
    share_noise: bool
    seed: int
    memory: float | None = None  # its points, for every inducing point

    def model(self):
        shape = () if self.shared_kernel else self.batch_shape
        unit = self.x_scale if self.in_units else None
        kernel = build(self.kernel, self.num_dims, shape, unit)
        likelihood = None
        if self.scaled:
            kernel = kernels.ScaleKernel(kernel, batch_shape=torch.Size(shape))
        if self.in_units:
            if self.scaled:
                kernel.outputscale = self.y_scale**2
            # GPyTorch's own floor of 1e-4 is above targets of size 1e-8.
            likelihood = GaussianLikelihood(
                noise_constraint=Positive(), batch_shape=torch.Size(self.batch_shape)
            )
            likelihood.noise = self.noise * self.y_scale**2
        model = StreamingGP(
            kernel,
            likelihood,
            num_inducing=self.num_inducing,
            memory_size=self.memory and round(self.memory * self.num_inducing),
            alpha=self.alpha,
            share_noise=self.share_noise,
            batch_shape=torch.Size(self.batch_shape),
        )
        return model.to(self.dtype)

    def inputs(self, n, seed):
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        shape = (*self.batch_shape, n, self.num_dims)
        x = 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1
        if self.x_kind == "duplicates":
            x = (2 * x).round() / 2
        elif self.x_kind == "collinear":
            x = x[..., :1] * torch.arange(1, self.num_dims + 1)
        elif self.x_kind == "close":
            x = (2 * x).round() / 2 + 1e-9 * x
        elif self.x_kind == "one point":
            x = torch.ones_like(x)
        return (self.x_scale * x).to(self.dtype)

    def targets(self, x, seed):
        generator = torch.Generator().manual_seed(1000 * self.seed + seed + 500)
        y = torch.sin(3 * x.double().sum(-1) / self.x_scale)
        noise = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        y = {
            "smooth": y + 0.1 * noise,
            "noise": noise,
            "constant": torch.ones_like(y),
            "zero": torch.zeros_like(y),
            "far": 100 + y,
        }[self.y_kind]
        return (self.y_scale * y).to(self.dtype)

    def data(self, n, seed):
        x = self.inputs(n, seed)
        return x, self.targets(x, seed)

    def test_points(self):
        """Unseen inputs, among them such as were seen."""
        return torch.cat([self.inputs(4, 0), self.inputs(4, 999)], -2)

    def variance(self, model):
        """Largest prior variance at the points a prediction is made of."""
        x = self.test_points().double()
        if not model.summary.is_empty:
            x = torch.cat([x, model.summary.inducing_points], -2)
        prior = variances(freeze(model.covar_module, torch.float64), x)
        return prior.expand(*self.batch_shape, -1).amax(-1, keepdim=True)


SCALES = st.integers(-8, 8).map(lambda power: 10.0**power)
LEAF = st.tuples(st.sampled_from(sorted(LEAVES)), st.booleans())
KERNELS = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.tuples(st.just("scale"), inner),
        st.tuples(st.sampled_from(["sum", "product"]), inner, inner),
    ),
    max_leaves=3,
)


def streams(**fixed):
    fields = {
        "kernel": KERNELS,
        "scaled": st.booleans(),
        "dtype": st.sampled_from([torch.float64, torch.float32]),
        "batch_shape": st.sampled_from([(), (2,), (2, 1), (1, 3)]),
        "shared_kernel": st.booleans(),
        "num_dims": st.integers(1, 3),
        "x_kind": st.sampled_from(
            ["random", "duplicates", "collinear", "close", "one point"]
        ),
        "y_kind": st.sampled_from(["smooth", "noise", "constant", "zero", "far"]),
        "x_scale": SCALES,
        "y_scale": SCALES,
        "in_units": st.booleans(),
        "noise": st.sampled_from([1e-4, 1e-2, 1.0]),
        "num_inducing": st.integers(1, 40),
        "alpha": st.sampled_from([0.0, 0.5, 1.0]),
        "share_noise": st.booleans(),
        "seed": st.integers(0, 99),
        "memory": st.sampled_from([None, 1.0, 1.5, 100.0]),
    }
    return st.builds(Stream, **{**fields, **fixed}).map(within_limits)


def within_limits(stream):
    """The same stream, where float64 can follow it; see "Limits" in docs/method.md.

    GPyTorch's default lengthscale is 0.7, so inputs of size 1e8 would lie 1e8
    lengthscales apart, and a linear kernel would be 1e16 times its noise; a kernel
    without scale would be 1e16 times the noise of targets of size 1e-8.
    """
    in_units = stream.in_units or stream.x_scale > 1e2
    return replace(stream, in_units=in_units, scaled=stream.scaled or in_units)


# -- histories -----------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """One thing that happens to a model."""

    kind: str
    size: int = 0
    options: dict = field(default_factory=dict)
    noise: float | None = None

    def __call__(self, model, stream, seed):
        """The model afterwards, and the result of an update."""
        if self.kind == "deepcopy":
            return copy.deepcopy(model), None
        if self.kind == "save":
            return saved_and_loaded(model), None
        x, y = stream.data(self.size, seed)
        noise = None
        if self.noise is not None:
            # Of the size of the other noise, see `within_limits`.
            noise = self.noise * stream.model().likelihood.noise.detach().expand_as(y)
        if self.kind == "condition":
            return model.condition_on_observations(x, y, noise), None
        return model, model.update(x, y, noise, **self.options)


def saved_and_loaded(model):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        model.save(path)
        return StreamingGP.load(path)


# Rarely a large batch: one in forty.
SIZES = st.integers(1, 40).map(lambda n: 2000 if n == 40 else n if n < 20 else n - 19)
KNOWN = st.sampled_from([None, None, None, 0.1])
UPDATES = st.builds(
    Op,
    st.just("update"),
    SIZES,
    st.fixed_dictionaries(
        {
            "num_steps": st.sampled_from([0, 0, 1, 5]),
            "optimizer": st.sampled_from(["adam", "adam", "lbfgs"]),
            "forget": st.sampled_from([1.0, 1.0, 0.9, 0.01]),
        }
    ),
    KNOWN,
)
OTHERS = st.one_of(
    st.builds(Op, st.just("condition"), st.integers(1, 5), noise=KNOWN),
    st.builds(Op, st.sampled_from(["deepcopy", "save"])),
)
HISTORIES = st.lists(st.one_of(UPDATES, UPDATES, OTHERS), min_size=1, max_size=3)


def replay(stream, ops, model=None):
    """The model after a history, and the results of its updates."""
    model = stream.model() if model is None else model
    results = []
    for seed, op in enumerate(ops):
        model, result = op(model, stream, seed)
        if result is not None:
            results.append(result)
    return model, results


def tensors(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def moments(model, x):
    """Mean and covariance in float64, as they are: nothing is lifted."""
    posterior = model(x)
    covariance = posterior.lazy_covariance_matrix.to_dense()
    return posterior.mean.detach().double(), covariance.detach().double()


def diagonal(model, x):
    return model(x).lazy_covariance_matrix.diagonal(dim1=-2, dim2=-1).detach().double()


def assert_same_state(a, b):
    theirs = tensors(b)
    for name, tensor in tensors(a).items():
        assert torch.equal(tensor, theirs[name]), name


def assert_same_bits(a, b, x):
    assert_same_state(a, b)
    for ours, other in zip(moments(a, x), moments(b, x), strict=True):
        assert torch.equal(ours, other)


# -- claims --------------------------------------------------------------------------


# Two inputs 3e-11 apart: lengthscales follow, and then 0.5 is 5e9 of them away.
TINY = Stream(
    kernel=("matern12", False),
    scaled=False,
    dtype=torch.float64,
    batch_shape=(),
    shared_kernel=False,
    num_dims=1,
    x_kind="close",
    y_kind="smooth",
    x_scale=1.0,
    y_scale=1.0,
    in_units=False,
    noise=1e-4,
    num_inducing=1,
    alpha=0.0,
    share_noise=False,
    seed=1,
)


@given(streams(), HISTORIES)
@example(TINY, [Op("update", 2, {"num_steps": 1})])
def test_every_number_is_finite(stream, ops):
    model, results = replay(stream, ops)
    x = stream.test_points()
    for result in results:
        for value in (
            result.bound,
            result.increment,
            result.bound_trace,
            result.projection_loss,
        ):
            assert torch.isfinite(value).all()
    # Not GPyTorch's buffers: upper bounds of constraints are infinite.
    for name, tensor in (*model.named_parameters(), *model.memory.named_buffers()):
        assert torch.isfinite(tensor).all(), name
    for posterior in (model(x), model.predict(x)):
        assert torch.isfinite(posterior.mean).all()
        assert torch.isfinite(posterior.lazy_covariance_matrix.to_dense()).all()
    summary = model.summary
    for value in (summary.mean, summary.covariance, summary.log_evidence):
        assert torch.isfinite(value).all()


# Variances are differences of two numbers as large as the prior variance. The smaller
# one comes from a matrix whose smallest eigenvalue is the jitter, 1e-8 of the prior
# variance, so its relative error is up to 1e-16 / 1e-8 times a small number.
VARIANCE = 1e-7


@given(streams(), HISTORIES)
def test_latent_variances_lie_between_zero_and_the_prior_variance(stream, ops):
    model, _ = replay(stream, ops)
    x = stream.test_points()
    prior = variances(freeze(model.covar_module, torch.float64), x.double())
    tolerance = VARIANCE * stream.variance(model)
    variance = diagonal(model, x)
    assert (variance >= -tolerance).all()
    assert (variance <= prior + tolerance).all()


@given(streams(), HISTORIES)
@example(TINY, [Op("update", 2, {"num_steps": 1})])
@example(replace(TINY, x_scale=10.0, seed=0), [Op("update", 1, {"num_steps": 1})])
def test_covariances_are_positive_semidefinite(stream, ops):
    model, _ = replay(stream, ops)
    x = stream.test_points()
    scale = stream.variance(model).unsqueeze(-1)
    _, covariance = moments(model, x)
    S = covariance / scale
    precision = 10 * torch.finfo(stream.dtype).eps + VARIANCE
    precision = precision + 10 * rounding(model, x) / scale.max()
    assert (S - S.mT).abs().max() <= precision
    assert torch.linalg.eigvalsh((S + S.mT) / 2).min() >= -precision * S.size(-1)


def rounding(model, x):
    """By how much GPyTorch's covariances are wrong.

    Nothing at all for most streams, everything for TINY far from its data; see
    "Limits" in docs/method.md.
    """
    kernel = freeze(model.covar_module, torch.float64)
    x = x.double()
    # Distances from one point are exact: GPyTorch moves the mean of its rows to zero.
    rows = [Opaque(kernel).gram(row, x) for row in x.split(1, -2)]
    return (lazy_gram(kernel, x).to_dense() - torch.cat(rows, -2)).abs().max()


@given(streams(), HISTORIES)
def test_data_and_updates_are_counted(stream, ops):
    model = stream.model()
    num_data = num_updates = 0
    for seed, op in enumerate(ops):
        model, _ = op(model, stream, seed)
        if op.size:
            num_data = op.options.get("forget", 1.0) * num_data + op.size
            num_updates += 1
        assert float(model.summary.num_data) == pytest.approx(num_data, rel=1e-12)
        assert int(model.summary.num_updates) == num_updates


def absorbed(stream, batches, z):
    model = stream.model()
    for x, y in batches:
        result = model.update(x, y, num_steps=0, inducing_points=z)
    return model, result


# Rows are summed in another order, and the posterior solves a system whose condition
# number is at most (data x prior variance / noise) / jitter. Inducing points are given
# here, so nobody merges close ones: see "Limits" in docs/method.md.
SIMPLE = {
    "noise": st.sampled_from([1e-2, 1.0]),
    "x_kind": st.sampled_from(["random", "duplicates", "collinear", "one point"]),
}


def assert_same(a, b, stream, data):
    (a, one), (b, other) = a, b
    x, y = stream.test_points(), data[1].double()
    scale = stream.variance(a)
    noise = a.likelihood.noise.detach().double()
    (mean_a, cov_a), (mean_b, cov_b) = moments(a, x), moments(b, x)
    size = y.abs().amax(-1, keepdim=True) + scale.sqrt()
    precision = 1e-5 if stream.dtype == torch.float32 else 1e-6
    assert ((mean_a - mean_b).abs() <= precision * size).all()
    assert ((cov_a - cov_b).abs() <= precision * scale.unsqueeze(-1)).all()
    # The bound is a sum of terms of this size.
    terms = y.size(-1) + (y.square() + scale).sum(-1) / noise.squeeze(-1)
    assert ((one.bound - other.bound).abs() <= 1e-8 * terms).all()


@given(streams(**SIMPLE), st.lists(SIZES, min_size=2, max_size=4), st.data())
def test_the_order_of_batches_does_not_matter(stream, sizes, draw):
    batches = [stream.data(n, seed) for seed, n in enumerate(sizes)]
    order = draw.draw(st.permutations(range(len(sizes))))
    z = stream.inputs(min(stream.num_inducing, 10), 77)
    data = [
        torch.cat(part, -2 + i) for i, part in enumerate(zip(*batches, strict=True))
    ]
    assert_same(
        absorbed(stream, batches, z),
        absorbed(stream, [batches[i] for i in order], z),
        stream,
        data,
    )


@given(streams(**SIMPLE), SIZES, st.lists(st.floats(0, 1), max_size=4))
def test_how_a_batch_was_split_does_not_matter(stream, size, cuts):
    x, y = stream.data(size, 0)
    z = stream.inputs(min(stream.num_inducing, 10), 77)
    edges = sorted({0, size, *(round(cut * size) for cut in cuts)})
    parts = [(x[..., i:j, :], y[..., i:j]) for i, j in itertools.pairwise(edges)]
    assert_same(
        absorbed(stream, [(x, y)], z), absorbed(stream, parts, z), stream, (x, y)
    )


@given(streams(), HISTORIES, HISTORIES, st.sampled_from(["deepcopy", "save"]))
def test_copies_go_on_with_the_same_bits(stream, before, after, kind):
    """The model itself may differ by rounding: its factor was extended."""
    model, _ = replay(stream, before)
    copies = [copy.deepcopy(model), Op(kind)(model, stream, 0)[0]]
    x = stream.test_points()
    assert_same_state(model, copies[0])
    assert_same_bits(*copies, x)
    copies = [replay(stream, after, each)[0] for each in copies]
    assert_same_bits(*copies, x)


@given(streams(), HISTORIES, st.integers(1, 5), KNOWN)
def test_conditioning_leaves_the_model_as_it_was(stream, ops, size, noise):
    model, _ = replay(stream, ops)
    x = stream.test_points()
    kept, before = tensors(model), moments(model, x)
    Op("condition", size, noise=noise)(model, stream, 50)
    assert all(tensors(model)[name] is tensor for name, tensor in kept.items())
    for ours, theirs in zip(moments(model, x), before, strict=True):
        assert torch.equal(ours, theirs)

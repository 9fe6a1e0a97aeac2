"""One stream of a batch is a model of its own."""

from __future__ import annotations

import pytest
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import (
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import ConstantMean, LinearMean, ZeroMean
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior

from torch_ssgp import StreamingGP, exceptions

TWO, THREE = torch.Size([2]), torch.Size([3])
GRID = torch.Size([2, 3])
Z = torch.rand(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
X_TEST = torch.rand(
    9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
)


def per_stream(shape):
    """Bounds and priors of every stream."""
    rates = torch.arange(1.0, 1 + shape.numel()).view(*shape, 1, 1)
    return ScaleKernel(
        RBFKernel(
            ard_num_dims=2,
            batch_shape=shape,
            lengthscale_prior=GammaPrior(2 * torch.ones_like(rates), rates),
            lengthscale_constraint=Interval(1e-3 * rates, 10.0 * rates),
        ),
        batch_shape=shape,
        outputscale_prior=LogNormalPrior(0.0, 1.0),
    )


MODELS = {
    "own": lambda shape: {"covar_module": per_stream(shape)},
    "shared": lambda shape: {
        "covar_module": ScaleKernel(MaternKernel(active_dims=[1])),
        "likelihood": GaussianLikelihood(),
        "mean_module": ConstantMean(constant_prior=NormalPrior(0.0, 1.0)),
    },
    "scales alone": lambda shape: {
        "covar_module": ScaleKernel(RBFKernel(active_dims=[0, 1]), batch_shape=shape),
        "mean_module": LinearMean(2, batch_shape=shape),
    },
    "sum and product": lambda shape: {
        "covar_module": RBFKernel(batch_shape=shape, active_dims=[0])
        * PeriodicKernel(active_dims=[1])
        + ScaleKernel(MaternKernel(batch_shape=shape), batch_shape=shape),
        "mean_module": LinearMean(2, bias=False),
    },
    "mixture": lambda shape: {
        "covar_module": SpectralMixtureKernel(2, ard_num_dims=2, batch_shape=shape),
    },
    "fixed": lambda shape: {
        "covar_module": per_stream(shape),
        "likelihood": FixedNoiseGaussianLikelihood(
            torch.ones(*shape, 1), learn_additional_noise=True, batch_shape=shape
        ),
    },
    "labels": lambda shape: {
        "covar_module": per_stream(shape),
        "likelihood": BernoulliLikelihood(),
        "mean_module": ZeroMean(batch_shape=shape),
    },
    "heavy tails": lambda shape: {
        "covar_module": per_stream(shape),
        "likelihood": StudentTLikelihood(batch_shape=shape),
    },
}


def draw(shape, n=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(*shape, n, 2, dtype=torch.float64, generator=generator)
    return x, torch.sin(5 * x.sum(-1))


def data_of(kind, shape, seed=0):
    x, y = draw(shape, seed=seed)
    y = (y > 0).double() if kind == "labels" else y
    return (x, y, 0.1 + y.square()) if kind == "fixed" else (x, y)


def make(kind, shape, memory_size=None):
    """A model whose streams all have other hyperparameters, after two updates."""
    torch.manual_seed(0)
    model = StreamingGP(
        **MODELS[kind](shape),
        num_inducing=6,
        memory_size=memory_size,
        batch_shape=shape,
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    for seed in range(2):
        model.update(*data_of(kind, shape, seed), num_steps=0, inducing_points=Z)
    return model


def predictions(model):
    latent = model(X_TEST)
    return torch.stack([latent.mean, latent.variance])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("shape", "index"),
    [(THREE, 1), (THREE, -1), (THREE, slice(1, 3)), (GRID, (1, 2)), (GRID, 0)],
)
def test_it_predicts_as_the_stream_in_the_batch(kind, shape, index):
    model = make(kind, shape)
    stream = model[index]
    assert stream.batch_shape == torch.empty(shape)[index].shape
    for ours, theirs in zip(predictions(stream), predictions(model), strict=True):
        torch.testing.assert_close(ours, theirs[index], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("memory_size", [6, 12])
def test_it_learns_as_the_stream_in_the_batch(kind, memory_size):
    model = make(kind, THREE, memory_size)
    stream = model[1]
    # Sites are iterated until they move by less than 1e-8.
    has_sites = kind in ("labels", "heavy tails")
    tolerance = {"rtol": 0, "atol": 1e-7 if has_sites else 1e-9}
    for seed in (5, 6):
        data = data_of(kind, THREE, seed)
        result = model.update(*data, num_steps=0, inducing_points=Z)
        own = stream.update(*(t[1] for t in data), num_steps=0, inducing_points=Z)
        torch.testing.assert_close(own.bound, result.bound[1], **tolerance)
    for ours, theirs in zip(predictions(stream), predictions(model), strict=True):
        torch.testing.assert_close(ours, theirs[1], **tolerance)


def test_neither_changes_the_other():
    model = make("own", THREE)
    before = predictions(model)
    stream = model[0]
    state = {name: value.clone() for name, value in stream.state_dict().items()}
    stream.update(*draw(torch.Size()), num_steps=3)
    torch.testing.assert_close(predictions(model), before, rtol=0, atol=0)
    stream = model[0]
    model.update(*draw(THREE), num_steps=3)
    for name, value in stream.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_saved_and_loaded(kind, tmp_path):
    stream = make(kind, THREE)[2]
    stream.save(tmp_path / "stream")
    again = StreamingGP.load(tmp_path / "stream")
    torch.testing.assert_close(predictions(again), predictions(stream))


def test_bounds_priors_and_starts_are_those_of_the_stream():
    model = make("own", THREE)
    stream = model[2]
    kernel = stream.covar_module.base_kernel
    assert kernel.raw_lengthscale.shape == (1, 2) and kernel.batch_shape == ()
    assert kernel.lengthscale_prior.rate.squeeze() == 3
    assert kernel.raw_lengthscale_constraint.upper_bound.squeeze() == 30
    starts = zip(stream.start.values, stream.prior().parameters(), strict=True)
    assert all(value.shape == parameter.shape for value, parameter in starts)
    data = draw(torch.Size(), seed=9)
    assert stream.update(*data, num_steps=5, learn_hyperparameters=True).learned


def test_a_new_model_has_streams_too():
    model = StreamingGP(per_stream(THREE), batch_shape=THREE).double()
    stream = model[1]
    stream.update(*draw(torch.Size()), num_steps=2)
    assert model.memory.is_empty and not stream.memory.is_empty


def test_streams_follow_one_another():
    model = make("own", THREE)
    assert [stream.batch_shape for stream in model] == 3 * [torch.Size()]


def test_a_fantasy_has_streams_with_gradients():
    model = make("own", THREE)
    x, y = draw(THREE, n=2, seed=7)
    y.requires_grad_()
    fantasy = model.condition_on_observations(x, y)[1]
    fantasy(X_TEST).mean.sum().backward()
    assert y.grad[1].all() and not y.grad[[0, 2]].any()


@pytest.mark.parametrize("index", [0, (1, 2), (slice(None), 1)])
def test_it_has_counted_and_noticed_what_the_stream_in_the_batch_has(index):
    model = make("own", GRID, memory_size=30)
    model.update(*draw(GRID, seed=5), num_steps=0)
    noticed = {"alarm": (*GRID, 3), "alarmed": (*GRID, 3), "rate": GRID}
    model.memory.replace(**{n: torch.rand(s).double() for n, s in noticed.items()})
    ours, theirs = model[index].memory, model.memory
    assert ours.count() == theirs.count()
    for name in (*noticed, "error", "extremes", "sunk", "bound"):
        values = theirs.get_buffer(name)
        assert values.flatten(0, 1).unique(dim=0).size(0) == 6, name
        assert torch.equal(ours.get_buffer(name), values[index]), name


def test_missing_readings_stay_missing():
    model = make("own", THREE)
    x, y = draw(THREE, seed=8)
    y[1, 3:] = torch.nan
    model.update(x, y, num_steps=0, inducing_points=Z)
    stream = model[1]
    assert float(stream.memory.num_data) == 8 + 8 + 3
    for ours, theirs in zip(predictions(stream), predictions(model), strict=True):
        torch.testing.assert_close(ours, theirs[1], rtol=0, atol=1e-10)


def test_what_has_no_streams_says_so():
    model = make("own", THREE)
    with pytest.raises(IndexError, match="no stream 3"):
        model[3]
    with pytest.raises(IndexError, match="2 parts"):
        model[0, 0]
    with pytest.raises(exceptions.ArgumentError, match="leaves no stream"):
        model[3:]
    for index in (None, 1.5, True, torch.tensor(0), [0, 1]):
        with pytest.raises(exceptions.ArgumentError, match="integers and slices"):
            model[index]
    with pytest.raises(exceptions.ArgumentError, match="a single stream"):
        model[0][0]
    softmax = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    classes = StreamingGP(RBFKernel(), softmax, batch_shape=THREE)
    with pytest.raises(exceptions.UnsupportedLikelihoodError, match="classes"):
        classes[0]

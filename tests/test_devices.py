"""Device discipline: nothing changes its device, and no step makes a device wait.

Most of it needs no GPU: :class:`Elsewhere` is a device that computes on the host, notes
who asks for values, and refuses operations on tensors of two devices. (torch's fake
tensors have no values, and those of CUDA end the process in builds without it.)
"""

from __future__ import annotations

import copy

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_ssgp import (
    GreedyInformation,
    MultiOutputGP,
    StreamingELBO,
    StreamingGP,
    StreamingVariationalStrategy,
    likelihoods,
    settings,
)

CHECK_EVERY = 5  # steps of the inner loop between two looks at a value

aten = torch.ops.aten
DEVICE = torch.device("meta")  # a device that every build of torch knows


class Remote(torch.Tensor):
    """A tensor that says it is elsewhere."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            value.shape,
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=DEVICE,
        )

    def __init__(self, value):
        self.value = value

    def __tensor_flatten__(self):
        return ["value"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Remote(inner["value"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("a tensor of the device was used outside of Elsewhere")


class Elsewhere(TorchDispatchMode):
    """The device: ``waits`` counts how often the host asked for values."""

    def __init__(self):
        super().__init__()
        self.waits, self.factories = 0, Factories()

    def __enter__(self):
        self.factories.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.factories.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        there = any(isinstance(t, Remote) for t in inputs)
        self.waits += there and asks_for_values(func, args)
        if kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]) == DEVICE
            kwargs = {**kwargs, "device": torch.device("cpu")}
        # A scalar of the host may meet a device, as in torch: it is part of the call.
        met = {isinstance(t, Remote) for t in inputs if t.ndim}
        if met and met != {there}:
            # A constant may go there; nothing comes back.
            assert there and func is aten._to_copy.default, f"{func} mixes devices"
        host = tree_map_only(Remote, lambda t: t.value, (args, kwargs))
        out = func(*host[0], **host[1])
        if not there:
            return out
        out = tree_map_only(torch.Tensor, Remote, out)
        return return_and_correct_aliasing(func, args, kwargs, out)


class Factories(TorchFunctionMode):
    """What torch does below its dispatcher, as it is on a GPU.

    ``torch.tensor(..., device=...)`` copies from the host, and ``tolist`` waits for
    values, however many.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") == DEVICE:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        if func is torch.Tensor.new_tensor and isinstance(args[0], Remote):
            kwargs = {"dtype": args[0].dtype, **kwargs, "device": "cpu"}
            return torch.tensor(*args[1:], **kwargs).to(DEVICE)
        if func is torch.Tensor.tolist and isinstance(args[0], Remote):
            args[0].sum().item()  # one wait
            return args[0].value.tolist()
        return func(*args, **kwargs)


def asks_for_values(func, args) -> bool:
    """Whether the host has to wait for the device in this call."""
    if func is aten.equal.default:  # torch decides by shape or storage where it can
        a, b = args
        same = all(
            getattr(a.value, name)() == getattr(b.value, name)()
            for name in ("data_ptr", "stride", "storage_offset")
        )
        return a.shape == b.shape and not same
    if func is aten.index.Tensor:
        return any(i is not None and i.dtype == torch.bool for i in args[1])
    return func in (
        aten._local_scalar_dense.default,
        aten.nonzero.default,
        aten.masked_select.default,
    )


def send(model):
    """Put a model on the device."""
    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, tensor in held.items():
                if isinstance(tensor, torch.Tensor):
                    there = Remote(tensor.detach().clone())
                    if isinstance(tensor, torch.nn.Parameter):
                        there = torch.nn.Parameter(there, tensor.requires_grad)
                    held[name] = there
    return model


def on_device(run, model, *data) -> Elsewhere:
    """``run(model, *data)`` on the device; all of it stays there and is right."""
    likelihoods._nodes.cache_clear()
    torch.manual_seed(0)
    expected = filter(torch.is_tensor, tree_leaves(run(copy.deepcopy(model), *data)))
    torch.manual_seed(0)
    with Elsewhere() as device:
        there = send(copy.deepcopy(model))
        result = run(there, *(Remote(t.clone()) for t in data))
        result = [t for t in tree_leaves(result) if torch.is_tensor(t)]
        left = [*there.parameters(), *there.buffers(), *result]
        assert all(isinstance(t, Remote) for t in left)
        values = [t.detach().value for t in result]
    likelihoods._nodes.cache_clear()
    for value, wanted in zip(values, expected, strict=True):
        torch.testing.assert_close(value, wanted.detach())
    return device


def gp(likelihood=None, batch=torch.Size(), **options):
    kernel = kernels.ScaleKernel(
        kernels.MaternKernel(ard_num_dims=2, batch_shape=batch), batch_shape=batch
    )
    options = {"num_inducing": 5, **options}
    return StreamingGP(kernel, likelihood, batch_shape=batch, **options)


X, Y = torch.rand(24, 2, generator=torch.Generator().manual_seed(0)), torch.arange(24.0)
Y = torch.sin(Y)
TWO, THREE = torch.Size([2]), torch.Size([3])
FIXED = FixedNoiseGaussianLikelihood(torch.ones(1), learn_additional_noise=True)
SOFTMAX = SoftmaxLikelihood(num_features=3, num_classes=3, mixing_weights=False)
STREAMS = {
    "gaussian": (gp(), (X, Y)),
    "known noise": (gp(FIXED), (X, Y, Y.square() + 1)),
    "power EP": (gp(alpha=0.5).double(), (X.double(), Y.double())),
    "outputs": (MultiOutputGP(gp(batch=TWO)), (X, Y.expand(2, 24).mT)),
    "labels": (gp(BernoulliLikelihood()), (X, (Y > 0).long())),
    "classes": (gp(SOFTMAX, batch=THREE), (X, torch.arange(24) % 3)),
    "heavy tails": (gp(StudentTLikelihood()), (X, Y)),
}


def whole_stream(model, x, *y):
    """Every public step of a stream, with all that it returns."""
    core = getattr(model, "model", model)
    first = model.update(x, *y, num_steps=1)
    closed = model.update(x, *y, num_steps=0, forget=0.9)
    second = model.update(x, *y, num_steps=2, inducing_points=x[:5], optimizer="lbfgs")
    latent = model(x)
    fantasy = model.condition_on_observations(x, *y)
    predictive = model.predict(x, *y[1:])
    return [
        *(list(vars(result).values()) for result in (first, closed, second)),
        [latent.mean, latent.variance, latent.covariance_matrix],
        [fantasy(x).mean, list(fantasy.buffers()), list(fantasy.parameters())],
        predictive.probs if hasattr(predictive, "probs") else predictive.mean,
        list(core.state_dict().values()),
    ]


@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_stays_on_its_device(stream):
    model, data = STREAMS[stream]
    on_device(whole_stream, model, *data)


def test_mixed_devices_and_waits_are_seen():
    with Elsewhere() as device:
        there = Remote(torch.ones(2))
        with pytest.raises(AssertionError, match="aten.add.Tensor mixes"):
            there + torch.ones(2)
        with pytest.raises(AssertionError, match="aten._to_copy.default mixes"):
            there.cpu()
        assert isinstance(there + torch.ones(()), Remote) and not device.waits
        assert (there > 0).all() and float(there.sum()) == 2
        assert device.waits == 2 and there.tolist() == [1, 1]
    assert device.waits == 3


def test_gradients_of_predictions_and_fantasies_stay_on_the_device():
    model = gp()
    model.update(X, Y, num_steps=0)

    def run(model, x, y):
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        fantasy = model.condition_on_observations(x[:4], y[:4])
        fantasy = fantasy.condition_on_observations(x, y, inducing_points=x[:3])
        (fantasy(x).mean.sum() + fantasy(x).variance.sum()).backward()
        return x.grad, y.grad

    on_device(run, model, X, Y)


class Variational(gpytorch.models.ApproximateGP):
    def __init__(self, z):
        q = gpytorch.variational.CholeskyVariationalDistribution(len(z))
        super().__init__(StreamingVariationalStrategy(self, z, q))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernels.ScaleKernel(kernels.RBFKernel())
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(
            self.mean_module(x), self.covar_module(x)
        )


def test_a_training_loop_stays_on_the_device():
    def run(model, x, y):
        mll = StreamingELBO(model.likelihood, model, num_data=len(y))
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        results = []
        for z in (x[:7], None):
            sgd.zero_grad()
            (-mll(model(x), y)).backward()
            sgd.step()
            results.append(model.variational_strategy.absorb(z, optimizer=sgd))
        return results

    on_device(run, Variational(X[:5]), X, Y)


# -- who waits ------------------------------------------------------------------------


def waits_of(model, x, y, points=0, **options):
    """How often an update of a copy waits, and how many steps it takes."""
    steps = []

    def run(there, x, y):
        if points:
            options["inducing_points"] = x[:points]
        result = there.update(x, y, **options)
        steps.append(result.num_steps)
        return result.bound

    return on_device(run, model, x, y).waits, steps[-1]


def started(likelihood=None, y=Y, **options):
    """A model with rows and raw data, so that every term of the bound is there."""
    model = gp(likelihood, memory_size=60, **options).double()
    x, y = X.double(), y[..., :24].double()
    model.update(x, y, num_steps=0, inducing_points=x[:5])
    model.update(x[:7], y[..., :7], num_steps=0)
    return model


KINDS = {
    "gaussian": lambda y=Y: (started(y=y), y.double()),
    "power EP": lambda y=Y: (started(y=y, alpha=0.5), y.double()),
    "streams": lambda y=Y: (
        started(y=y.expand(2, -1), batch=TWO),
        y.double().expand(2, -1),
    ),
    "labels": lambda y=Y: (
        started(BernoulliLikelihood(), (y > 0) * 1.0),
        (y > 0).double(),
    ),
}


@pytest.fixture
def unchecked():
    """Distributions without checks of their arguments, each of which waits."""
    Distribution.set_default_validate_args(False)
    yield
    Distribution.set_default_validate_args(__debug__)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compressed", [False, True])
def test_the_inner_loop_waits_at_its_checks_alone(kind, compressed):
    """At most once in so many steps, and not at all between two checks."""
    (model, y), options = KINDS[kind](), {"learn": True, "forget": 1.0, "lr": 0.01}
    if compressed:
        options |= {"points": 6, "learn_inducing_points": True}

    def waits(num_steps):
        return waits_of(model, X.double(), y, num_steps=num_steps, **options)

    few, many = waits(2), waits(CHECK_EVERY - 1)
    assert few[0] == many[0] > 0 and (few[1], many[1]) == (2, CHECK_EVERY - 1)
    if not compressed:
        few, many = waits(10), waits(40)
        steps = many[1] - few[1]
        assert steps >= 20 and many[0] - few[0] <= steps / CHECK_EVERY + 1


@pytest.mark.parametrize("kind", ["gaussian", "streams", "labels"])
@pytest.mark.parametrize("num_steps", [0, 5])
def test_a_single_point_waits_a_small_number_of_times_whatever_is_known(
    kind, num_steps, unchecked
):
    """A point that is not learned, by default when nothing is due."""
    x = torch.cat([X, torch.rand(6, 2)]).double()
    y = torch.sin(2 * x.sum(-1)) + 0.1 * torch.randn(30)  # is no surprise
    model, y = KINDS[kind](y)
    if num_steps:
        model.update(x[:24], y[..., :24], num_steps=num_steps, forget=1.0)
    waits = []
    with Elsewhere() as device:
        there = send(copy.deepcopy(model))
        for point in torch.arange(24, 30).split(1):
            before, data = device.waits, (Remote(x[point]), Remote(y[..., point]))
            result = there.update(*data, num_steps=num_steps, forget=1.0)
            waits.append(device.waits - before)
            assert not result.learned
    # The first one finds no factor: a copy has none.
    assert waits[0] <= 50 and max(waits[1:]) <= 25, waits


def test_e_steps_wait_where_torch_checks_distributions_unless_told_not_to(unchecked):
    model, x = gp(StudentTLikelihood()).double(), X.double()
    few, _ = waits_of(model, x, Y.double(), num_steps=0)
    Distribution.set_default_validate_args(True)
    many, _ = waits_of(model, x, Y.double(), num_steps=0)
    assert few < 0.2 * many


def test_choosing_points_waits_after_every_block():
    def waits(num_inducing):
        model = started(num_inducing=num_inducing, inducing_policy=GreedyInformation())
        model.memory_size = num_inducing  # to be compressed at once
        return waits_of(model, X.double(), Y.double(), num_steps=0)[0]

    # One point at a time at first; from the 16th on blocks of an eighth.
    assert waits(20) - waits(16) == 2


# -- on a GPU -------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="compares a GPU with the host: needs a GPU"
)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stream", ["gaussian", "known noise", "power EP", "labels"])
def test_a_gpu_agrees_with_the_host(stream, dtype):
    model, (x, *y) = STREAMS[stream]
    tolerance = 1e-3 if dtype == torch.float32 else 1e-6
    results = []
    for device in ("cpu", "cuda"):
        like = {"dtype": dtype, "device": device}
        here = copy.deepcopy(model).to(**like)
        x_, y_ = x.to(**like), [t.to(**like) for t in y]
        here.update(x_, *y_, num_steps=10)
        here.update(x_, *y_, num_steps=0)
        fantasy = here.condition_on_observations(x_[:3], *(t[:3] for t in y_))
        predictive = here.predict(x_, *y_[1:])
        results.append((here(x_).mean, here(x_).variance, fantasy(x_).mean))
        results[-1] += (predictive.mean,)
        assert all(t.device.type == device for t in results[-1])
    for host, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu.cpu(), host, rtol=tolerance, atol=tolerance)


@needs_gpu
def test_float32_algebra_runs_on_a_gpu():
    model = gp().cuda()
    with settings.algebra_dtype(None):
        result = model.update(X.cuda(), Y.cuda(), num_steps=5)
    assert result.bound.dtype == torch.float32 and torch.isfinite(result.bound)


@needs_gpu
def test_a_state_saved_on_a_gpu_loads_on_the_host():
    model = gp().cuda()
    model.update(X.cuda(), Y.cuda(), num_steps=5)
    loaded = gp()
    loaded.load_state_dict(model.state_dict())
    assert loaded.device.type == "cpu"
    torch.testing.assert_close(loaded(X).mean, model(X.cuda()).mean.cpu())

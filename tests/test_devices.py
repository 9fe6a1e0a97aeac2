"""Device discipline: nothing changes its device, and no step makes a device wait.

Most of it needs no GPU: :class:`Elsewhere` is a device that computes on the host, notes
who asks for values, and refuses operations on tensors of two devices. (torch's fake
tensors have no values, and those of CUDA end the process in builds without it.)
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import sys
from collections import Counter

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

from torch_ssgp import (
    GreedyInformation,
    MultiOutputGP,
    StreamingELBO,
    StreamingGP,
    StreamingVariationalStrategy,
    functional,
    inducing,
    likelihoods,
    memory,
    models,
    modules,
    prediction,
    settings,
)
from torch_ssgp.update import (
    UpdateOptions,
    ascent,
    initialization,
    learning,
    objective,
    site_initialization,
    sites,
    trial,
    walk,
)

STRATEGY = "variational.strategy.StreamingVariationalStrategy"
# Where the host asks for values on purpose, once per call, and what it asks.
HOST_CHECKS = {
    "validation._check_finite": "whether data are finite",
    "validation._missing": "whether readings are finite, missing or neither",
    "validation.check_noise": "whether known noise is positive",
    "likelihoods.prepare_targets": "whether targets are finite",
    "likelihoods._supported": "whether the likelihood explains the targets",
    "likelihoods.check_support": "whether the likelihood explains the targets",
    "update.initialization.is_default": "whether a hyperparameter was set",
    "update.initialization.search": "which start is the best",
    "greedy.take": "how many points are useful, after every block",
    "inducing.AdaptiveBudget.__call__": "how many points are needed",
    "inducing.AdaptiveBudget.revise": "whether more points are needed",
    "points.merge_duplicates": "whether points coincide",
    "advice._too_few_points": "whether to warn",
    "advice._too_small_memory": "whether to warn",
    "advice._sharing": "the number of updates so far",
    "advice.coarsest_step": "whether to warn",
    "core.StreamingCore.jitter": "the jitter",
    "core.StreamingCore.evidence": "whether the bound of before still holds",
    "update.walk.Update.remember": "the number of updates and of data so far",
    "update.walk.Update.pays": "whether to learn",
    "update.choosing.Choice.has_changed": "whether points are still right",
    "update.forgetting.Judged.of": "whether anything is to be forgotten",
    "update.forgetting.Judged.alarm": "whether anything is to be forgotten",
    "update.forgetting.Judged.is_doubtful": "whether to await more witnesses",
    "update.trial.update_with": "whether anything is to be forgotten",
    "update.forgetting.judge": "whether the posterior is finite",
    "likelihoods.log_predictive": "GPyTorch: whether arguments are valid",
    "inducing.AdaptiveBudget.extend": "how many points are needed",
    "update.walk.Update.is_first": "whether anything was learned before",
    "update.walk.Update.is_due": "whether a fresh start is due",
    "update.walk.Update.run": "whether the points suffice",
    "update.walk.Update.learn": "whether the fresh start is better",
    "update.walk.Update.append": "the form of the summary, and whether it goes on",
    "update.walk.Update.is_one_class": "whether labels differ",
    "update.walk.Update.num_telling": "labels of the second class, once",
    "update.appending.append": "whether all is finite",
    "update.appending._agree": "whether the prior is that of before",
    "inducing.AdaptiveBudget.wants_points": "whether more points are needed",
    "update.clock.outgrown": "whether a time axis outgrew the points",
    "update.clock.moved": "whether all recent data lie beyond half of the points",
    "update.clock.ticking": "whether an input grows with every datum",
    "update.flattening.flattened": "whether learning explained the function as noise",
    "advice._flattened": "whether to warn",
    "advice._small_targets": "whether to warn",
    "update.choosing.Choice.candidates": "the number of updates so far",
    "update.state.recall": "the form of the memory",
    "update.apart.Base.recall": "whether the model is a branch",
    "update.starts.take_better": "whether the fresh start is better",
    "update.state.check_finite": "whether all is finite",
    "compression.first_of_each": "which points coincide",
    "points.least_missed": "how many points can go, in every round",
    "compression.choose_points": "how many points differ",
    "compression._cover": "whether the kernel tells enough points apart",
    "update.objective.known_values": "how many points are known, for a fresh start",
    "update.objective.Objective.check_finite": "whether there is a point to start from",
    "update.sites.SiteObjective.spread": "the size of the function",
    "update.coordinates._is_above_zero": "whether a constraint is positive",
    "update.ascent.Ascent.__init__": "the number of data, once",
    "update.ascent.Ascent.plateau": "whether to stop, every CHECK_EVERY steps",
    "update.ascent.Ascent.is_finite": "whether the optimiser may go on, once",
    "update.ascent.maximize": "whether the last value was finite, once",
    "update.ascent._lbfgs": "the loss, for torch's line search",
    "update.sites.SiteObjective.as_frozen": "whether all labels agree",
    "update.sites.SiteObjective.settle": "whether to stop, every CHECK_EVERY steps",
    "core.StreamingCore.shares_noise": "the form of the summary",
    "conditioning._past": "the form of the summary",
    "core.StreamingCore.predictor": "whether the cache is fresh",
    "core.StreamingCore.frozen_modules": "whether the cache is fresh",
    "prediction.Predictor.build": "whether the factorisation succeeded",
    "modules._LazyGram._diagonal": "GPyTorch: whether x1 is x2",
    "modules._LazyGram.evaluate_kernel": "GPyTorch: whether x1 is x2",
    # GPyTorch looks at covariances that a user reads, and checks distributions.
    "prediction.CastLinearOperator._diagonal": "GPyTorch: whether x1 is x2",
    "prediction.CastLinearOperator.to_dense": "GPyTorch: whether x1 is x2",
    "models.StreamingGP.predict": "GPyTorch: whether variances are positive",
    "likelihoods._expected_log_prob": "torch: whether a distribution is valid",
    "likelihoods.as_likelihood_input": "GPyTorch: whether variances are positive",
    f"{STRATEGY}._whitened_moments": "whether q is finite",
    f"{STRATEGY}._check_inducing_points": "their values",
    "variational.strategy._safe_cholesky": "whether the factorisation succeeded",
    "variational.strategy._check_finite": "whether the past is finite",
    f"{STRATEGY}.__call__": "GPyTorch: the same",
    f"{STRATEGY}._old_data_term": "GPyTorch: the same",
    f"{STRATEGY}._absorb_factor": "GPyTorch: the same",
    "mlls.StreamingELBO.forward": "GPyTorch: the same",
    "variational.watch.SeenData.add": "which data returned, every few evaluations",
}
# Where constants of the host go to the device.
COPIES = {
    "likelihoods._nodes": "nodes of the quadrature, once",
    "update.initialization.search": "the starts that were tried",
    "update.site_initialization._robust_variance": "two quantiles",
    "update.forgetting.judge": "the powers",
    "update.forgetting.decide": "the powers",
    "update.walk.Update.run": "one number",
    "update.walk.Update.store": "one flag",
    "memory.buffers": "one flag",
    "conditioning.condition": "one flag",
}

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
    """The device: ``waits`` counts, by function, who asked for values."""

    def __init__(self):
        super().__init__()
        self.waits, self.copies, self.factories = Counter(), Counter(), Factories()

    def __enter__(self):
        self.factories.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.factories.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = tensors((args, kwargs))
        there = any(isinstance(t, Remote) for t in inputs)
        if there and asks_for_values(func, args):
            self.waits[caller()] += 1
        if kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]) == DEVICE
            kwargs = {**kwargs, "device": torch.device("cpu")}
        # A scalar of the host may meet a device, as in torch: it is part of the call.
        met = {isinstance(t, Remote) for t in inputs if t.ndim}
        if met and met != {there}:
            message = f"{func} in {caller()} mixes devices"
            assert there and func is aten._to_copy.default, message
            self.copies[caller()] += 1
        host = each(lambda t: t.value if isinstance(t, Remote) else t, (args, kwargs))
        out = func(*host[0], **host[1])
        if not there:
            return out
        return return_and_correct_aliasing(func, args, kwargs, each(Remote, out))


class Factories(TorchFunctionMode):
    """``torch.tensor(..., device=...)`` as it is on a GPU: a copy from the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") == DEVICE:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


def each(change, tree):
    """The same containers with changed tensors."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: each(change, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        items = [each(change, value) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def tensors(tree) -> list[torch.Tensor]:
    """All tensors in lists, tuples and dictionaries."""
    found: list[torch.Tensor] = []
    each(found.append, tree)
    return found


def caller() -> str | None:
    """The innermost function of the package that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torch_ssgp."):
            function = frame.f_code.co_qualname.split(".<locals>")[0]
            return f"{name.removeprefix('torch_ssgp.')}.{function}"
        frame = frame.f_back
    return None


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
    expected = tensors(run(copy.deepcopy(model), *data))
    torch.manual_seed(0)
    with Elsewhere() as device:
        there = send(copy.deepcopy(model))
        result = tensors(run(there, *(Remote(t.clone()) for t in data)))
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


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Fewer of everything that is tried: operations without values are slow."""
    monkeypatch.setattr(ascent, "CHECK_EVERY", 2)
    monkeypatch.setattr(ascent, "PATIENCE", 1)
    monkeypatch.setattr(sites, "CHECK_EVERY", 2)
    settle = sites.SiteObjective.settle.__wrapped__
    monkeypatch.setattr(settle, "__defaults__", (2, sites.TOLERANCE))
    monkeypatch.setattr(likelihoods, "_TILT_ITERATIONS", 2)
    monkeypatch.setattr(site_initialization, "NEWTON_STEPS", 2)
    for module in (initialization, site_initialization):
        monkeypatch.setattr(module, "LENGTHSCALES", (0.1, 0.3))
        monkeypatch.setattr(module, "NOISES", (0.1,))


def whole_stream(model, x, *y):
    """Every public step of a stream, with all that it returns."""
    core = getattr(model, "model", model)
    first = model.update(x, *y, num_steps=1)
    closed = model.update(x, *y, num_steps=0, forget=0.9)
    second = model.update(x, *y, num_steps=1, inducing_points=x[:5])
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
    device = on_device(whole_stream, model, *data)
    # None: GPyTorch, when the test reads a variance.
    assert set(device.waits) - {None} <= set(HOST_CHECKS), "a wait that has no reason"
    assert set(device.copies) <= set(COPIES), "a copy that has no reason"


def test_mixed_devices_and_waits_are_seen():
    with Elsewhere() as device:
        there = Remote(torch.ones(2))
        with pytest.raises(AssertionError, match="aten.add.Tensor in None mixes"):
            there + torch.ones(2)
        with pytest.raises(AssertionError, match="aten._to_copy.default in None mixes"):
            there.cpu()
        assert isinstance(there + torch.ones(()), Remote) and not device.waits
        assert (there > 0).all() and float(there.sum()) == 2
    assert device.waits == {None: 2}


def test_line_searches_stay_on_the_device():
    def run(model, x, y):
        return vars(model.update(x, y, num_steps=2, optimizer="lbfgs"))

    on_device(run, gp(), X, Y)


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

    device = on_device(run, Variational(X[:5]), X, Y)
    assert set(device.waits) - {None} <= set(HOST_CHECKS)
    assert not device.copies


def objective_of(model, x, y):
    """The objective of the next update of a model, with points to learn."""
    update = update_of(model, x, y)
    bound = update.objective()
    bound.start_at(update.data.x[..., :6, :], learn=True)
    return bound


def update_of(model, x, y, **options):
    """The next update of a model, before it began."""
    data = model.check_data(x, y, None)
    options = UpdateOptions(**options)
    return walk.Update(model.known(data), data, options, model.limits(data))


def started(likelihood=None, y=Y):
    """A model with a past, so that every term of the bound is there."""
    model = gp(likelihood)
    model.update(X, y, num_steps=0)
    return model


@pytest.mark.parametrize("name", ["gaussian", "labels"])
def test_only_the_look_at_the_plateau_grows_with_the_number_of_steps(name, monkeypatch):
    monkeypatch.setattr(ascent, "TOLERANCE", -math.inf)  # all steps are taken
    labels = name == "labels"
    y = (Y > 0).float() if labels else Y
    model = started(BernoulliLikelihood() if labels else None, y)

    def waits_of(num_steps):
        def run(model, x, y):
            result = ascent.maximize(
                objective_of(model, x, y),
                UpdateOptions(num_steps=num_steps),
                learn_hyperparameters=True,
            )
            assert result.num_steps == num_steps

        return on_device(run, model, X, y).waits

    few, many = waits_of(2), waits_of(4)
    assert many - few == {"update.ascent.Ascent.plateau": 2 // ascent.CHECK_EVERY}
    assert not few - many


def settle(tolerance, num_steps):
    def run(model, x, y):
        objective = objective_of(model, x, y)
        with torch.no_grad():
            rows = sites.basis(objective.prior(), objective.past)
        return objective.settle(rows, num_steps, tolerance=tolerance)

    return run


def test_only_the_look_at_the_residual_grows_with_the_number_of_e_steps():
    y = (Y > 0).float()
    model = started(BernoulliLikelihood(), y)

    def waits_of(num_steps, tolerance):
        return on_device(settle(tolerance, num_steps), model, X, y).waits

    never = 1e-300
    more = waits_of(4, never) - waits_of(2, never)
    assert more == {"update.sites.SiteObjective.settle": 2 // sites.CHECK_EVERY}
    assert waits_of(4, 0.0) == waits_of(2, 0.0)


def test_e_steps_wait_where_torch_checks_distributions_unless_told_not_to():
    model = started(StudentTLikelihood())
    Distribution.set_default_validate_args(True)  # compiling elsewhere turns it off

    def waits_of(num_steps):
        return on_device(settle(0.0, num_steps), model, X, Y).waits

    grown = waits_of(4) - waits_of(2)
    assert set(grown) == {"likelihoods._expected_log_prob"}
    Distribution.set_default_validate_args(False)
    try:
        assert waits_of(4) == waits_of(2)
    finally:
        Distribution.set_default_validate_args(__debug__)


def test_choosing_points_waits_after_every_block():
    def waits_of(num_inducing):
        def run(model, x, y):
            model.num_inducing = num_inducing
            model.inducing_policy = GreedyInformation()
            update = update_of(model, x, y)
            return update.points.choose(objective_of(model, x, y), anew=True)

        return on_device(run, started(), X, Y).waits

    # One point at a time at first; from the 16th on blocks of an eighth.
    assert waits_of(20) - waits_of(16) == {"greedy.take": 2}


@pytest.mark.parametrize(
    "module",
    [
        functional,
        modules,
        memory,
        prediction,
        ascent,
        objective,
        learning,
        walk,
        trial,
        sites,
        inducing,
        models,
    ],
)
def test_no_value_is_fetched_by_name_in_hot_modules(module):
    tree = ast.parse(inspect.getsource(module))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & {"item", "cpu", "tolist", "numpy", "nonzero"}


@pytest.mark.parametrize(
    "kernel",
    [
        kernels.ScaleKernel(kernels.RBFKernel()),
        kernels.MaternKernel(ard_num_dims=2, batch_shape=TWO),
        kernels.PeriodicKernel(active_dims=[1]) + kernels.LinearKernel(),
        kernels.RQKernel() * kernels.PolynomialKernel(2),
        kernels.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=2),
    ],
)
def test_variances_are_the_same_whether_or_not_inputs_are_compared(kernel):
    with modules._TakeAsEqual():
        variances = kernel(X, diag=True)
    assert torch.equal(variances, kernel(X, diag=True))


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

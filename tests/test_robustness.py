"""Updates are atomic: faults, fallbacks, readers in other threads."""

from __future__ import annotations

import contextlib
import copy
import linecache
import pickle
import sys
import threading
import time
import warnings
from collections import Counter
from functools import partial

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, StudentTLikelihood
from gpytorch.variational import CholeskyVariationalDistribution
from linear_operator.utils.errors import NotPSDError

from conftest import FULL
from torch_ssgp import (
    RandomReplace,
    StreamingGP,
    StreamingVariationalStrategy,
    settings,
)
from torch_ssgp.exceptions import (
    ArgumentError,
    FactorizationError,
    NumericalWarning,
)
from torch_ssgp.multioutput import MultiOutputGP
from torch_ssgp.surrogates import SingleTaskStreamingGP


class Fault(Exception):
    """What the tests throw."""


FAULTS = (Fault, KeyboardInterrupt)


def series(n=40, start=0.0, batch_shape=()):
    x = torch.linspace(start, start + 4, n, dtype=torch.float64).unsqueeze(-1)
    return x, torch.sin(2 * x[:, 0]).expand(*batch_shape, n).contiguous()


def regression(kernel=None, **options):
    kernel = ScaleKernel(RBFKernel()) if kernel is None else kernel
    return StreamingGP(kernel, num_inducing=8, **options).double()


def classification():
    return regression(likelihood=BernoulliLikelihood())


def labels(y):
    return (y > 0).to(y.dtype)


def streaming(kind, seen=20, **options):
    """A model that has seen a batch, and how it takes the next one."""
    likelihood = None if kind == "regression" else BernoulliLikelihood()
    model = regression(likelihood=likelihood, **options)
    target = (lambda y: y) if kind == "regression" else labels
    (x, y), (x_new, y_new) = series(20), series(20, start=3.0)
    if seen:
        model.update(x[:seen], target(y[:seen]), num_steps=3)
        model(x)  # fills the caches
    model.likelihood.eval()
    next(model.covar_module.parameters()).requires_grad_(False)

    def update(model, **options):
        options = {"num_steps": 20, **options}
        return model.update(x_new, target(y_new), **options)

    return model, update


def single():
    """A model to which one datum after the other is added, as a row."""
    model = regression(memory_size=100)
    x, y = series(20)
    model.update(x[:15], y[:15], num_steps=3, integrate_hyperparameters=False)

    def update(model, i=17, **options):
        return model.update(x[i : i + 1], y[i : i + 1], **options)

    assert not any(update(model, i).learned for i in (15, 16))
    return model, update


def surrogate(*_):
    x, y = series(16)
    model = SingleTaskStreamingGP(x[:8] / 4, 3 * y[:8, None], num_inducing=6)
    model.fit(num_steps=3)
    model.posterior(x)

    def update(model, **options):
        options = {"num_steps": 3, "restandardize": True, **options}
        return model.update(x[8:] / 4, 3 * y[8:, None], **options)

    return model, update


def variational(optimizer=torch.optim.Adam):
    class Model(gpytorch.models.ApproximateGP):
        def __init__(self, z):
            q = CholeskyVariationalDistribution(len(z))
            super().__init__(StreamingVariationalStrategy(self, z, q))
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = RBFKernel()

        def forward(self, x):
            return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    torch.manual_seed(0)  # GPyTorch starts q at random
    x, y = series(20)
    model = Model(x[::4]).double()
    likelihood = StudentTLikelihood().double()
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    model.optimizer = optimizer(model.parameters(), lr=0.05)

    def step(model):
        def closure():
            model.optimizer.zero_grad()
            loss = -mll(model(x), y)
            loss.backward()
            return loss.detach()

        return model.optimizer.step(closure)

    for _ in range(3):
        step(model)

    def update(model):
        strategy = model.variational_strategy
        z = torch.cat([strategy.inducing_points.detach(), x[1:3]])
        strategy.absorb(z, optimizer=model.optimizer)

    return model, update


def state_of(model, predicts=True):
    """Everything a fault must leave as it was, as bytes and object identities."""
    state = {"rng": torch.get_rng_state().numpy().tobytes()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        state[name] = (
            tensor.detach().numpy().tobytes(),
            tensor.shape,
            tensor.requires_grad,
            None if tensor.grad is None else tensor.grad.numpy().tobytes(),
            id(tensor) if is_parameter else None,
        )
    for name, module in model.named_modules():
        state[f"module {name}"] = (id(module), module.training)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        state["optimizer"] = [
            [id(p) for p in group["params"]] for group in optimizer.param_groups
        ]
        state["moments"] = {id(p): id(m) for p, m in optimizer.state.items()}
    if isinstance(model, StreamingGP) and predicts:
        state["posterior"] = moments(model(series(5)[0]))
    return state


def moments(distribution):
    values = (distribution.mean, distribution.variance)
    return b"".join(v.detach().numpy().tobytes() for v in values)


def assert_twins(model, twin):
    """Two models with the same bits."""
    theirs = dict(twin.named_parameters()) | dict(twin.named_buffers())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(tensor, theirs[name]), name


class Lines:
    """Counts the lines that the package runs, and raises before the k-th.

    Not at a ``with``: its line comes once more before the end of it, between which and
    the body Python lets no signal through.
    """

    def __init__(self, k=None, error=Fault):
        self.k, self.error, self.count = k, error, 0
        self.commits = None  # when the first change of a module began

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def trace(self, frame, event, _):
        name = frame.f_code.co_filename
        if "torch_ssgp" not in name:
            return None
        if frame.f_code.co_name == "atomic_change" and self.commits is None:
            self.commits = self.count
        line = linecache.getline(name, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            self.count += 1
            if self.count == self.k:
                sys.settrace(None)
                raise self.error
        return self.trace


# -- faults --------------------------------------------------------------------------


UPDATES = {
    "regression": lambda: streaming("regression"),
    "with room": lambda: streaming("regression", memory_size=100),
    "first": lambda: streaming("regression", seen=0),
    "a single datum": single,
    "a policy that draws": lambda: streaming(
        "regression", inducing_policy=RandomReplace()
    ),
    "classification": lambda: streaming("classification"),
    "first labels": lambda: streaming("classification", seen=0),
    "surrogate": surrogate,
    "variational": variational,
    "lbfgs": lambda: variational(torch.optim.LBFGS),
}


@pytest.mark.parametrize("kind", UPDATES)
def test_a_fault_at_any_line_leaves_all_as_it_was(kind):
    """Or the new model, where the change was made before; every line of a change."""
    model, update = UPDATES[kind]()
    options = {} if kind in ("variational", "lbfgs") else {"num_steps": 1}
    twin, _ = UPDATES[kind]()
    before, _ = state_of(model), state_of(twin)  # with the same caches
    with Lines() as lines:
        update(twin, **options)
    num_faults = 400 if FULL else 15
    spread = torch.linspace(1, lines.count, num_faults).long().tolist()
    first = lines.commits or 0  # a single datum is one assignment, at the end
    change = range(first + 1, lines.count + 1)
    faults = sorted({*spread, *change[:: max(len(change) // num_faults, 1)]})
    num_old = 0
    for k in faults:
        # What an earlier try has cached may have spared the k-th line.
        with contextlib.suppress(*FAULTS), Lines(k, FAULTS[k % 2]):
            update(model, **options)
        if state_of(model) == before:
            num_old += 1
        else:  # the fault came after the change
            assert k > first
            assert_twins(model, twin)
            model, update = UPDATES[kind]()
            before = state_of(model)
    assert num_old > num_faults
    update(model, **options)
    assert_twins(model, twin)
    update(model, **options)
    update(twin, **options)
    assert_twins(model, twin)


def test_an_error_of_the_callback_is_not_a_reason_to_fall_back():
    model, update = streaming("regression")
    before = state_of(model)
    errors = (torch.linalg.LinAlgError, NotPSDError, ValueError, FactorizationError)
    for error in (*errors, Fault):

        def callback(step, bound, error=error):
            if step == 3:
                raise error

        for optimizer in ("adam", "lbfgs"):
            with pytest.raises(error):
                update(model, callback=callback, optimizer=optimizer)
            assert state_of(model) == before


# -- the ladder ----------------------------------------------------------------------


class Limited(RBFKernel):
    """Has no values, or raises, from a lengthscale on."""

    def __init__(self, limit, error=None, **options):
        super().__init__(**options)
        self.limit, self.error = limit, error

    def forward(self, x1, x2, diag=False, **params):
        K = super().forward(x1, x2, diag=diag, **params)
        beyond = self.lengthscale.squeeze(-1) > self.limit
        if self.error is not None and bool(beyond.any()):
            raise self.error
        return torch.where(beyond if diag else beyond.unsqueeze(-1), torch.nan, K)


class PoisonGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, torch.nan)


class NoGradient(RBFKernel):
    """Finite, with a gradient that is not."""

    def forward(self, x1, x2, diag=False, **params):
        K = super().forward(x1, x2, diag=diag, **params)
        return PoisonGradient.apply(K)


class Indefinite(RBFKernel):
    """Positive definite only with a jitter above ``lack``."""

    def __init__(self, lack=1e-5):
        super().__init__()
        self.lack, self.lengthscale = lack, 2.0

    def forward(self, x1, x2, diag=False, **params):
        K = super().forward(x1, x2, diag=diag, **params)
        return K * (1 - self.lack) if diag else K


class Only(RBFKernel):
    """Has values at one lengthscale alone."""

    def forward(self, x1, x2, diag=False, **params):
        K = super().forward(x1, x2, diag=diag, **params)
        return torch.where(self.lengthscale.mean() == 0.5, K, torch.nan)


def assert_finite(model, x, result):
    for value in (result.bound, result.increment, result.bound_trace):
        assert torch.isfinite(value).all()
    assert torch.isfinite(result.projection_loss).all()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert all(torch.isfinite(b).all() for b in model.memory.buffers())
    latent = model(x)
    assert torch.isfinite(latent.mean).all() and (latent.variance > -1e-3).all()


def limited(error, batch_shape=()):
    shape = torch.Size(batch_shape)
    kernel = Limited(0.55, error, batch_shape=shape)
    kernel.lengthscale = 0.5
    return regression(ScaleKernel(kernel, batch_shape=shape), batch_shape=shape)


@pytest.mark.parametrize("batch_shape", [(), (2,)])
@pytest.mark.parametrize("kind", ["adam", "lbfgs", "error"])
def test_a_loop_turns_back_where_there_is_no_value_and_ends_at_an_error(
    kind, batch_shape
):
    model = limited(NotPSDError("not PSD") if kind == "error" else None, batch_shape)
    x, y = series(batch_shape=batch_shape)
    if kind == "error":
        with pytest.warns(NumericalWarning, match="Lower lr") as caught:
            result = model.update(x, y, num_steps=100, lr=0.05)
        ours = [w for w in caught if w.category is NumericalWarning]
        assert len(ours) == 1 and ours[0].filename == __file__
        assert result.status == "last_iterate" and not result.converged
        assert 1 <= result.num_steps < 30
    else:
        result = model.update(x, y, num_steps=30, optimizer=kind)
        assert result.status == "ok"
    lengthscale = model.covar_module.base_kernel.lengthscale
    assert (0.5 < lengthscale).all() and (lengthscale <= 0.55).all()
    assert_finite(model, x, result)
    x, y = series(start=2.0, batch_shape=batch_shape)
    assert_finite(model, x, model.update(x, y, num_steps=0))


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
@pytest.mark.parametrize("likelihood", [None, BernoulliLikelihood])
@pytest.mark.parametrize("batch_shape", [(), (2,)])
def test_a_gradient_that_is_not_finite_ends_the_loop_at_once(
    optimizer, likelihood, batch_shape
):
    x, y = series(batch_shape=batch_shape)
    model = regression(
        ScaleKernel(NoGradient()),
        likelihood=likelihood and likelihood(),
        batch_shape=torch.Size(batch_shape),
    )
    calls = []
    with pytest.warns(NumericalWarning, match="gradient") as caught:
        result = model.update(
            x,
            labels(y),
            optimizer=optimizer,
            callback=lambda *a: calls.append(a),
        )
    # Streams that share a kernel are told so, too.
    assert [w.category for w in caught].count(NumericalWarning) == 1
    assert result.status == "last_iterate"
    assert len(calls) <= 5
    assert_finite(model, x, result)


def test_an_indefinite_kernel_raises_the_jitter_and_keeps_it():
    model = regression(ScaleKernel(Indefinite()))
    x, y = series()
    with pytest.warns(NumericalWarning, match="jitter") as caught:
        result = model.update(x, y, num_steps=5, inducing_points=x[::4])
    assert len(caught) == 1
    assert result.status == "jitter" and result.num_steps == 5
    assert model.memory.jitter.item() == 1e-4
    assert_finite(model, x, result)
    # From now on it is there: predictions, later updates, copies, loaded states.
    loaded = regression(ScaleKernel(Indefinite()))
    loaded.load_state_dict(model.state_dict())
    mean = loaded(x).mean  # of a fresh factor, as that of a copy
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x).mean, mean)
    torch.testing.assert_close(model(x).mean, mean, rtol=0, atol=1e-12)
    assert_finite(model, x, result)
    result = model.update(*series(start=1.0), num_steps=5, inducing_points=x[::4])
    assert result.status == "ok" and model.memory.jitter.item() == 1e-4
    assert_finite(model, x, result)
    fantasy = model.condition_on_observations(x[:2], y[:2])
    assert fantasy.memory.jitter.item() == 1e-4
    assert torch.isfinite(fantasy(x).variance).all()


@pytest.mark.parametrize("likelihood", [None, BernoulliLikelihood])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_the_closed_form_raises_the_jitter_too(likelihood, num_steps):
    shape = torch.Size([2])
    model = regression(
        ScaleKernel(Indefinite()),
        likelihood=likelihood and likelihood(),
        batch_shape=shape,
    )
    x, y = series(batch_shape=(2,))
    with pytest.warns(NumericalWarning, match="jitter"):
        result = model.update(
            x, labels(y), num_steps=num_steps, inducing_points=x[::4], forget=1.0
        )
    assert result.status == "jitter" and result.bound.shape == (2,)
    assert_finite(model, x, result)


def test_updates_with_a_raised_jitter_lose_nothing():
    x, y = series(60)
    models = [regression(ScaleKernel(Indefinite())) for _ in range(2)]
    for model, parts in zip(models, (1, 6), strict=True):
        with pytest.warns(NumericalWarning):
            for rows in torch.arange(60).chunk(parts):
                model.update(x[rows], y[rows], num_steps=0, inducing_points=x[::8])
    a, b = models
    torch.testing.assert_close(a.summary.log_evidence, b.summary.log_evidence)
    torch.testing.assert_close(a(x).mean, b(x).mean)


def test_the_closed_form_takes_over_where_learning_has_nowhere_to_start():
    # The first batch sets the lengthscale, and there the kernel has no values.
    # GPyTorch's default is the middle of the interval.
    x, y = series()
    interval = gpytorch.constraints.Interval(0.0, 1.0)
    model = regression(ScaleKernel(Only(lengthscale_constraint=interval)))
    assert model.covar_module.base_kernel.lengthscale.item() == 0.5
    with pytest.warns(NumericalWarning, match="old hyperparameters") as caught:
        result = model.update(x, y, num_steps=5)
    assert len(caught) == 1
    assert result.status == "closed_form" and result.num_steps == 0
    assert model.covar_module.base_kernel.lengthscale.item() == 0.5
    assert_finite(model, x, result)


@pytest.mark.parametrize("num_steps", [0, 5])
@pytest.mark.parametrize("likelihood", [None, BernoulliLikelihood])
@pytest.mark.parametrize("error", [None, torch.linalg.LinAlgError("svd")])
def test_where_nothing_helps_the_model_is_unchanged(likelihood, num_steps, error):
    model = regression(likelihood=likelihood and likelihood())
    x, y = series()
    model.update(x, labels(y), num_steps=1)
    kernel = model.covar_module.base_kernel = Limited(1e-3, error=error).double()
    kernel.lengthscale = 0.5
    before = state_of(model, predicts=False)
    with pytest.raises(FactorizationError, match="model is unchanged"):
        model.update(x, labels(y), num_steps=num_steps)
    assert state_of(model, predicts=False) == before
    with pytest.raises(FactorizationError):
        model(x)
    model.covar_module.base_kernel = RBFKernel().double()
    assert_finite(model, x, model.update(x, labels(y), num_steps=1))


class Overflowing(StudentTLikelihood):
    """A likelihood without values from a noise on, or far from the targets."""

    def forward(self, function_samples, *args, **kwargs):
        given_f = super().forward(function_samples, *args, **kwargs)
        original, limit = given_f.log_prob, self.noise.detach() * 0 + 0.05

        def log_prob(value):
            density = original(value)
            return torch.where(self.noise < limit, torch.nan, density)

        given_f.log_prob = log_prob
        return given_f


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_a_likelihood_may_lose_its_values(optimizer):
    model = regression(likelihood=Overflowing())
    model.likelihood.noise = 0.06  # the data have none, so learning leads below
    x, y = series()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = model.update(x, y, num_steps=60, optimizer=optimizer)
    assert len(caught) == (result.status != "ok")
    if optimizer == "adam":
        assert result.status == "last_iterate"
    assert model.likelihood.noise.item() >= 0.05
    assert_finite(model, x, result)


def test_a_warning_that_is_an_error_leaves_all_as_it_was():
    model = limited(NotPSDError("not PSD"))
    x, y = series()
    before = state_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        with pytest.raises(NumericalWarning):
            model.update(x, y)
    assert state_of(model) == before


# -- readers and writers -------------------------------------------------------------


def in_threads(*functions):
    errors = []

    def guarded(function):
        torch.set_num_threads(1)
        try:
            function()
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # no thread keeps the others waiting, and they mix
    threads = [threading.Thread(target=guarded, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not errors, errors


def watched(looks, steps, pause):
    """Look after every step, and from other threads all the time; all that was seen."""
    known, seen, done = [], [Counter() for _ in looks], threading.Event()

    def write():
        try:
            for step in (lambda: None, *steps):
                step()
                known.append([look() for look in looks])
        finally:
            done.set()

    def read():
        while not done.is_set():
            for look, counter in zip(looks, seen, strict=True):
                counter[look()] += 1
            time.sleep(pause)  # so that the writer gets its turn

    in_threads(write, read, read, read, read)
    for states, counter in zip(zip(*known, strict=True), seen, strict=True):
        assert set(counter) <= set(states)
        assert len(set(states)) == len(steps) + 1
    return seen


def test_readers_see_one_of_the_posteriors_and_never_a_mixture():
    model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=5).double()
    x = torch.linspace(0, 6, 5, dtype=torch.float64).unsqueeze(-1)
    num_updates = 200 if FULL else 80

    def update(i):
        z = 6 * torch.rand(4, 1, dtype=torch.float64)
        y = torch.sin(z[:, 0]) * (1 + i / 50)
        model.update(z, y, num_steps=5 * int(i % 20 == 0))

    targets, *_ = watched(
        [
            lambda: moments(model.predict(x)),
            lambda: moments(model(x)),
            lambda: model.summary.mean.numpy().tobytes(),
        ],
        [partial(update, i) for i in range(num_updates)],
        pause=3e-2,
    )
    assert len(targets) > num_updates / 4
    assert gpytorch.settings.lazily_evaluate_kernels.on()


def test_readers_of_a_surrogate_see_outcomes_in_one_unit():
    x, y = series(60)
    model = SingleTaskStreamingGP(x[:10] / 4, y[:10, None], num_inducing=6)

    def update(i):
        scale, rows = 10.0 ** (i % 3), slice(i, i + 2)  # so that the units change
        model.update(
            x[rows] / 4, scale * y[rows, None], num_steps=0, restandardize=True
        )

    def look():
        return moments(model.posterior(x[::20] / 4, observation_noise=True))

    watched([look], [partial(update, i) for i in range(10, 60, 2)], pause=1e-3)


def test_readers_of_one_kernel_do_not_disturb_each_other():
    # GPyTorch takes active_dims away while it evaluates a kernel.
    kernel = RBFKernel(active_dims=[0]) + ScaleKernel(RBFKernel(active_dims=[1]))
    model = StreamingGP(kernel, num_inducing=5).double()
    x = torch.rand(8, 2, dtype=torch.float64)
    model.update(x, x.sum(-1), num_steps=0)
    expected = model(x).covariance_matrix
    wrong = []

    def read():
        for _ in range(50):
            posterior = model(x)
            if not torch.equal(posterior.covariance_matrix, expected):
                wrong.append(posterior)
            posterior.variance  # noqa: B018

    in_threads(read, read, read, read)
    assert not wrong and gpytorch.settings.lazily_evaluate_kernels.on()


def test_two_writers_lose_no_data():
    x, y = series(80)
    z = x[::10]
    model, whole = regression(), regression()
    whole.update(x, y, num_steps=0, inducing_points=z)

    def write(rows):
        for part in rows.chunk(10):
            model.update(x[part], y[part], num_steps=0, inducing_points=z)

    in_threads(*(lambda rows=rows: write(rows) for rows in torch.arange(80).chunk(4)))
    assert model.num_data == 80
    torch.testing.assert_close(model.summary.log_evidence, whole.summary.log_evidence)


def several(*_):
    x, y = series(16)
    model = MultiOutputGP(regression(batch_shape=torch.Size([2])))
    model.update(x[:8], torch.stack([y, 2 * y], -1)[:8], num_steps=3)

    def update(model, **options):
        options = {"num_steps": 3, "forget": 1.0, **options}
        return model.update(x[8:], torch.stack([y, -y], -1)[8:], **options)

    return model, update


LEARNERS = {
    "regression": lambda: streaming("regression"),
    "classification": lambda: streaming("classification"),
    "surrogate": surrogate,
    "outputs": several,
}


def bits(model):
    return b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())


@pytest.mark.parametrize("kind", LEARNERS)
def test_copies_states_and_files_are_made_before_a_change_or_after_it(kind, tmp_path):
    model, update = LEARNERS[kind]()

    def from_file():
        path = tmp_path / str(threading.get_ident())
        model.save(path)
        return bits(StreamingGP.load(path))

    looks = [lambda: bits(model), lambda: bits(copy.deepcopy(model))]
    if isinstance(model, StreamingGP):
        looks.append(from_file)
    twin = copy.deepcopy(model)
    watched(looks, [lambda: update(model)] * 8, pause=1e-3)
    for _ in range(8):
        update(twin)
    assert_twins(model, twin)


@pytest.mark.parametrize("kind", LEARNERS)
def test_changes_in_the_callback_of_an_update_are_refused(kind):
    model, update = LEARNERS[kind]()
    twin, _ = LEARNERS[kind]()
    state, copies = model.state_dict(), []
    changes = [lambda: update(model), lambda: model.load_state_dict(state)]
    if kind == "surrogate":
        changes += [model.fit, model.restandardize]

    def callback(step, bound):
        if not copies:
            copies.append(copy.deepcopy(model))
            update(copies[0])
            for change in changes:
                with pytest.raises(ArgumentError, match="middle of an update"):
                    change()

    update(model, callback=callback)
    update(twin)
    assert len(copies) == 1
    assert_twins(model, twin)
    assert_twins(copies[0], twin)

    def careless(step, bound):
        update(model)

    with pytest.raises(ArgumentError, match="middle of an update"):
        update(model, callback=careless, learn_hyperparameters=True)
    assert_twins(model, twin)
    update(model)


def test_a_state_loaded_during_an_update_is_loaded_after_it():
    model, update = streaming("regression")
    state = model.state_dict()
    thread = threading.Thread(target=model.load_state_dict, args=(state,))
    update(model, callback=lambda step, _: step == 1 and thread.start())
    thread.join()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_a_prediction_that_cannot_be_factored_is_an_error():
    model, _ = streaming("regression")
    x, _ = series()
    model.covar_module.base_kernel = Indefinite(lack=0.5).double()
    with pytest.raises(FactorizationError, match="jitter"):
        model(x)
    with settings.jitter(10.0):
        assert torch.isfinite(model(x).mean).all()

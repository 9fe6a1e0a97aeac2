"""Streams that are hard for a small memory, each against all data at once.

    python scripts/benchmark.py streams --out docs/data/streams.json
    python scripts/benchmark.py streams small --only "batches of 1," --out FILE
    python scripts/benchmark.py streams --methods exact batch --out FILE
    python scripts/benchmark.py streams --again stream --out FILE

``small``    60 stationary streams of 1, 2, 5 or 10 points a batch
``periods``  weekly and daily series, one period a batch; forecast of the next one
``labels``   labels that arrive class by class, or in random order
``deep``     a small network before the kernel

A stream is a new model and ``model.update(x, y)`` for every batch, nothing else; the
digits have the options of ``scripts/likelihoods.py``. What it is compared with:

``batch``    The same model, given all data in one update: 300 steps of Adam, and again
             300 of L-BFGS; the fit with the larger bound counts, and the seconds are
             those of both.
``exact``    GPyTorch's ``ExactGP`` with the same kernel on all data: L-BFGS to a
             plateau from two starts, or 500 steps of Adam at 0.01 for deep kernels.

Rows already in the file are not run again, so a run can be interrupted and resumed.
The references stay when the version changes; streams of another version are run anew.
``--again`` drops the rows of a method first. Seconds are those of the processor.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpytorch
import torch
from gpytorch.constraints import Interval
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    SoftmaxLikelihood,
)
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor, nn
from tqdm import tqdm

from torch_ssgp import StreamingGP
from workbench import likelihoods, streams
from workbench.baselines import new_kernel, small_budget
from workbench.common import markdown, positive

STREAM, BATCH, EXACT = METHODS = ("stream", "batch", "exact")
BATCH_STEPS = 300  # of Adam, and of L-BFGS
NOISE = 0.1  # standard deviation, of all targets that are numbers

# What is asked of a stream.
SMALL_NEAR, SMALL_SHARE, SMALL_WORST = 1.10, 0.95, 1.5
PERIOD_NEAR, PERIOD_STAYS = 1.15, 0.02
LABEL_POINTS = {"banana": 2.0, "digits": 1.0}
DEEP_NEAR = 1.15

Row = dict[str, Any]
Batches = Iterable[tuple[Tensor, Tensor]]


class Key(NamedTuple):
    """What names a row."""

    bench: str
    case: str
    seed: int
    method: str


Jobs = dict[Key, Callable[[], Row]]


# ------------------------------------------------------------------- what all share


def sizes(num_inducing: int, memory_size: int | None) -> dict[str, int]:
    """Arguments of ``StreamingGP``; a memory of the default size is not named."""
    memory = {} if memory_size is None else {"memory_size": memory_size}
    return {"num_inducing": num_inducing, **memory}


def run_stream(model: StreamingGP, batches: Batches, **options: Any) -> Row:
    """Update after update; a failure is a result as well."""
    start, num_updates, failure = time.process_time(), 0, ""
    with small_budget():
        for x, y in tqdm(batches, desc=STREAM, leave=False):
            try:
                model.update(x, y, **options)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
                break
            num_updates += 1
    seconds = time.process_time() - start
    return {"updates": num_updates, "cpu_seconds": seconds, "failure": failure}


def run_batch(
    make: Callable[[], StreamingGP], x: Tensor, y: Tensor, num_steps: int = BATCH_STEPS
) -> tuple[StreamingGP, Row]:
    """All data in one update, by two optimisers; the larger bound wins."""
    start, fits = time.process_time(), []
    for optimizer in ("adam", "lbfgs"):
        model = make()
        with small_budget():
            result = model.update(x, y, num_steps=num_steps, optimizer=optimizer)
        fits.append((result.bound.sum().item(), optimizer, model, result.converged))
    bound, optimizer, model, converged = max(fits, key=lambda fit: fit[0])
    seconds = time.process_time() - start
    end = {"bound": bound, "optimizer": optimizer, "converged": converged}
    return model, {**end, "cpu_seconds": seconds}


@torch.no_grad()
def rmse(model: Callable[[Tensor], MultivariateNormal], x: Tensor, f: Tensor) -> float:
    """Error of the mean against the function without noise, ``(s,)``."""
    with dense():
        return (model(x).mean - f).square().mean().sqrt().item()


class Exact(gpytorch.models.ExactGP):
    """GPyTorch's exact model with a constant mean."""

    def __init__(self, x: Tensor, y: Tensor, kernel: Kernel) -> None:
        super().__init__(x, y, GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel
        self.double()

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Prior at ``x``."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@contextmanager
def dense() -> Iterator[None]:
    """Cholesky factors at any size, with GPyTorch's jitter where it needs some."""
    with gpytorch.settings.max_cholesky_size(100_000), warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        yield


def run_exact(
    kernels: list[Kernel], x: Tensor, y: Tensor, *, num_steps: int, adam: float | None
) -> tuple[Exact, Row]:
    """An exact model on all data, from each kernel; the largest evidence wins.

    Args:
        kernels: Where to start from.
        x: ``(n, d)``.
        y: ``(n,)``.
        num_steps: Of Adam, or the most of L-BFGS, which stops at a plateau.
        adam: Learning rate of Adam; ``None`` for L-BFGS.
    """
    start, fits = time.process_time(), []
    for kernel in kernels:
        model = Exact(x, y, kernel)
        model.likelihood.noise = 0.1 * y.var()
        model.mean_module.constant = y.mean()
        fits.append((_learn(model, y, num_steps, adam), model.eval()))
    seconds = time.process_time() - start
    evidences = [evidence for evidence, _ in fits]
    _, model = max(fits, key=lambda fit: fit[0])
    return model, {"evidences": evidences, "cpu_seconds": seconds}


def _learn(model: Exact, y: Tensor, num_steps: int, adam: float | None) -> float:
    """Steps up the evidence; the best parameters met are kept.

    Steps are those of logarithms where parameters are positive, up the evidence of all
    data: in GPyTorch's own coordinates, and per datum, L-BFGS ends up to 90 nats short
    on sums of kernels.
    """
    moves = list(_coordinates(model))
    etas = [eta for _, eta, _ in moves]
    best, kept = -math.inf, copy.deepcopy(model.state_dict())
    optimizer = (
        torch.optim.Adam(etas, lr=adam)
        if adam
        else torch.optim.LBFGS(
            etas,
            max_iter=num_steps,
            tolerance_change=1e-9,
            line_search_fn="strong_wolfe",
        )
    )

    def closure() -> Tensor:
        nonlocal best, kept
        for parameter, eta, to_parameter in moves:
            parameter.data.copy_(to_parameter(eta.detach()))
        evidence = _ascend(model, y)
        for parameter, eta, to_parameter in moves:
            eta.grad = torch.autograd.grad(to_parameter(eta), eta, parameter.grad)[0]
        if evidence.item() > best:
            best, kept = evidence.item(), copy.deepcopy(model.state_dict())
        return -evidence

    model.train()
    calls = num_steps if adam else 1
    try:
        for _ in tqdm(range(calls), desc=EXACT, leave=False, disable=not adam):
            optimizer.step(closure)
    except torch.linalg.LinAlgError:
        pass  # a step too far; the best before it is kept
    model.load_state_dict(kept)
    return best


def _ascend(model: Exact, y: Tensor) -> Tensor:
    r"""``log N(r; 0, K)``, with minus its gradient left in the parameters.

    .. math::
        -\partial_K = \tfrac12 (K^{-1} - a a^\top), \quad -\partial_r = a = K^{-1} r

    It costs about 0.6 of what GPyTorch's way through the factorisation does.
    """
    model.zero_grad()
    prior = model.likelihood(model(*model.train_inputs))
    K, r = prior.covariance_matrix, y - prior.mean
    with torch.no_grad():
        L = torch.linalg.cholesky(K)  # (n, n)
        a = torch.cholesky_solve(r.unsqueeze(-1), L).squeeze(-1)  # (n,)
        W = 0.5 * (torch.cholesky_inverse(L) - torch.outer(a, a))
        terms = r @ a + 2 * L.diagonal().log().sum() + len(y) * math.log(2 * math.pi)
    torch.autograd.backward([K, r], [W, a])
    return -0.5 * terms


def _coordinates(
    model: Exact,
) -> Iterator[tuple[nn.Parameter, Tensor, Callable[[Tensor], Tensor]]]:
    """Parameters, what the optimiser moves, and the way back."""
    for _, parameter, constraint in model.named_parameters_and_constraints():
        value = parameter.detach().clone()
        if constraint is None:
            yield parameter, value.requires_grad_(), torch.clone
        else:
            floor = 1.01 * constraint.lower_bound + 1e-12
            eta = constraint.transform(value).log().requires_grad_()
            yield parameter, eta, partial(_raw, constraint, floor)


def _raw(constraint: Interval, floor: Tensor, eta: Tensor) -> Tensor:
    return constraint.inverse_transform(eta.exp().maximum(floor))


def gp_draw(
    gen: torch.Generator, num_inputs: int, lengthscale: float, features: int = 500
) -> Callable[[Tensor], Tensor]:
    """A draw from a GP (RBF, variance 1) by random Fourier features."""
    omega = torch.randn(num_inputs, features, generator=gen, dtype=torch.float64)
    phase = 2 * math.pi * torch.rand(features, generator=gen, dtype=torch.float64)
    weight = torch.randn(features, generator=gen, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        waves = torch.cos(x @ omega / lengthscale + phase)  # (n, features)
        return math.sqrt(2 / features) * (waves @ weight)

    return function


def observed(f: Tensor, gen: torch.Generator) -> Tensor:
    """Values with noise."""
    return f + NOISE * torch.randn(f.shape, generator=gen, dtype=f.dtype)


# -------------------------------------------------------------------- small batches


# On the unit cube, so that a few hundred data determine the function.
LENGTHSCALES = {1: 0.15, 2: 0.4, 3: 0.7, 4: 1.0}
SMALL_M, SMALL_TEST = 50, 300


class Small(NamedTuple):
    """A stationary stream of small batches; seed 1 begins with a single point."""

    batch: int
    inputs: int
    arrival: str
    seed: int

    @property
    def case(self) -> str:
        """Its name, without the seed."""
        inputs = f"{self.inputs} input" + "s" * (self.inputs > 1)
        return f"batches of {self.batch}, {inputs}, {self.arrival}"

    @property
    def first(self) -> int:
        """Points of the first batch."""
        return 1 if self.seed else self.batch


def small_streams() -> list[Small]:
    """60 of them: the most expensive ones, of 4 inputs, have one seed only."""
    return [
        Small(batch, inputs, arrival, seed)
        for batch in (1, 2, 5, 10)
        for inputs in LENGTHSCALES
        for arrival in ("sorted", "random")
        for seed in range(1 if batch <= 2 and inputs == 4 else 2)
    ]


class SmallData(NamedTuple):
    """Batches, and the function without noise at test inputs."""

    batches: list[tuple[Tensor, Tensor]]
    x_test: Tensor
    f_test: Tensor


def small_data(case: Small, num: int | None = None) -> SmallData:
    """Uniform inputs, a draw from a GP; sorted streams arrive by the first input.

    Args:
        case: Which.
        num: Number of data; 300, or 500 for batches of 5 and 10.
    """
    num = num or (300 if case.batch <= 2 else 500)
    number = 100 * case.batch + 10 * case.inputs + 2 * case.seed
    gen = torch.Generator().manual_seed(number + (case.arrival == "sorted"))
    function = gp_draw(gen, case.inputs, LENGTHSCALES[case.inputs])
    x, x_test = torch.rand(
        num + SMALL_TEST, case.inputs, generator=gen, dtype=torch.float64
    ).split([num, SMALL_TEST])
    if case.arrival == "sorted":
        x = x[x[:, 0].argsort()]
    y = observed(function(x), gen)
    parts = [case.first]
    while sum(parts) < num:
        parts.append(min(case.batch, num - sum(parts)))
    batches = list(zip(x.split(parts), y.split(parts), strict=True))
    return SmallData(batches, x_test, function(x_test))


def run_small(
    case: Small, method: str, memory_size: int | None, num: int | None = None
) -> Row:
    """A stream of small batches, or all of its data at once."""
    batches, x_test, f_test = small_data(case, num)

    def make() -> StreamingGP:
        kernel = new_kernel(case.inputs)
        return StreamingGP(kernel, **sizes(SMALL_M, memory_size)).double()

    if method == BATCH:
        model, row = run_batch(make, *map(torch.cat, zip(*batches, strict=True)))
    else:
        model = make()
        row = run_stream(model, batches)
    settings = {"batch": case.batch, "inputs": case.inputs, "arrival": case.arrival}
    return {
        **settings,
        "first": case.first,
        "RMSE": rmse(model, x_test, f_test),
        **row,
    }


def small_jobs(memory_size: int | None) -> Jobs:
    """Every stream, and its batch model."""
    return {
        Key("small", case.case, case.seed, method): partial(
            run_small, case, method, memory_size
        )
        for case in small_streams()
        for method in (BATCH, STREAM)
    }


# -------------------------------------------------------------------------- periods


class Series(NamedTuple):
    """A series with one period or two, in days.

    Attributes:
        patterns: Amplitudes of the harmonics of a pattern, by its period. Where all
            methods begin is this period. The first is the longest.
        per_period: Readings in the first period; a batch has so many.
        periods: That are learned; the next one is forecast.
    """

    patterns: dict[float, list[float]]
    per_period: int
    periods: int


SERIES = {
    "weekly, hourly readings": Series({7.0: [0.7, 0.5, 0.3], 1.0: [0.9, 0.4]}, 168, 5),
    "daily, every quarter of an hour": Series({1.0: [1.0, 0.6, 0.4, 0.3, 0.2]}, 96, 8),
}
SERIES_M, SERIES_SEEDS = 100, 5
SWINGS = 0.2  # their size; their lengthscale is 0.3 periods
EXACT_STEPS = 300  # of L-BFGS, at most


def series_data(case: Series, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Times ``(n, 1)``, readings, and the function; the last period is the test."""
    gen = torch.Generator().manual_seed(seed)
    longest = max(case.patterns)
    num = case.per_period * (case.periods + 1)
    x = torch.arange(num, dtype=torch.float64).unsqueeze(-1)
    x = x * longest / case.per_period
    f = SWINGS * gp_draw(gen, 1, 0.3 * longest)(x)
    for period, amplitudes in case.patterns.items():
        for harmonic, amplitude in enumerate(amplitudes, 1):
            phase = torch.rand((), generator=gen, dtype=torch.float64)
            angle = 2 * math.pi * (harmonic * x.squeeze(-1) / period + phase)
            f = f + amplitude * torch.cos(angle)
    return x, observed(f, gen), f


def series_kernel(case: Series) -> Kernel:
    """Swings and the patterns; periods are those a user would set."""
    kernel = ScaleKernel(RBFKernel())
    for period in case.patterns:
        pattern = PeriodicKernel()
        pattern.period_length = period
        kernel = kernel + ScaleKernel(pattern)
    return kernel.double()


def series_starts(case: Series) -> list[Kernel]:
    """Where exact models start: as streams do, and with sharper patterns.

    ``PeriodicKernel`` divides by its lengthscale, not by the square.
    """
    plain, sharp = series_kernel(case), series_kernel(case)
    swings, *patterns = sharp.kernels
    swings.base_kernel.lengthscale = 2 * max(case.patterns)
    for pattern in patterns:
        pattern.base_kernel.lengthscale = 0.2
    return [plain, sharp]


def run_series(name: str, seed: int, method: str, memory_size: int | None) -> Row:
    """A forecast of the next period, and the periods that were learned."""
    case = SERIES[name]
    x, y, f = series_data(case, seed)
    train = slice(0, case.per_period * case.periods)
    test = slice(train.stop, None)

    def make() -> StreamingGP:
        kernel = series_kernel(case)
        return StreamingGP(kernel, **sizes(SERIES_M, memory_size)).double()

    if method == EXACT:
        model, row = run_exact(
            series_starts(case), x[train], y[train], num_steps=EXACT_STEPS, adam=None
        )
    elif method == BATCH:
        model, row = run_batch(make, x[train], y[train])
    else:
        model = make()
        parts = [each[train].split(case.per_period) for each in (x, y)]
        row = run_stream(model, list(zip(*parts, strict=True)))
    learned = [
        each.base_kernel.period_length.item() for each in model.covar_module.kernels[1:]
    ]
    return {
        "RMSE": rmse(model, x[test], f[test]),
        "periods": learned,
        "true_periods": list(case.patterns),
        "noise": model.likelihood.noise.sqrt().item(),
        **row,
    }


def series_jobs(memory_size: int | None) -> Jobs:
    """Every series by every method."""
    return {
        Key("periods", name, seed, method): partial(
            run_series, name, seed, method, memory_size
        )
        for name in SERIES
        for seed in range(SERIES_SEEDS)
        for method in (EXACT, BATCH, STREAM)
    }


# --------------------------------------------------------------------------- labels


BANANA_M, BANANA_SEEDS, BANANA_PARTS = 30, 3, 5
ORDERS = {"class 0 first": False, "class 1 first": True, "random": None}
DIGITS_M = 100
# Those of the table of digits in scripts/likelihoods.py.
DIGITS_OPTIONS = {"num_steps": 30, "learn_inducing_points": False}


def banana_batches(order: str, seed: int) -> tuple[list, Tensor, Tensor]:
    """Batches in an order, test inputs and labels; a class has half of the batches."""
    stream = streams.banana("random", seed, 2 * BANANA_PARTS)
    descending = ORDERS[order]
    if descending is None:
        return stream.batches, stream.x_test, stream.y_test
    x, y = stream.x_train, stream.y_train
    batches = []
    for label in sorted(y.unique().tolist(), reverse=descending):
        x_label, y_label = x[y == label], y[y == label]
        parts = zip(
            x_label.chunk(BANANA_PARTS), y_label.chunk(BANANA_PARTS), strict=True
        )
        batches += list(parts)
    return batches, stream.x_test, stream.y_test


def run_banana(order: str, seed: int, method: str, memory_size: int | None) -> Row:
    """Share of test labels that are wrong."""
    batches, x_test, y_test = banana_batches(order, seed)

    def make() -> StreamingGP:
        kernel, size = ScaleKernel(RBFKernel()), sizes(BANANA_M, memory_size)
        return StreamingGP(kernel, BernoulliLikelihood(), **size).double()

    if method == BATCH:
        model, row = run_batch(make, *map(torch.cat, zip(*batches, strict=True)))
    else:
        model = make()
        row = run_stream(model, batches)
    with torch.no_grad():
        mean = torch.cat([model(part).mean for part in x_test.split(1000)])
    return {"error": (mean.gt(0) != y_test.gt(0.5)).double().mean().item(), **row}


def run_digits(method: str, memory_size: int | None) -> Row:
    """Ten classes, one after the other or at once, with the options of the table."""
    x, y, x_test, y_test = likelihoods.digits()
    model = StreamingGP(
        ScaleKernel(RBFKernel()),
        SoftmaxLikelihood(num_classes=10, mixing_weights=False),
        batch_shape=torch.Size([10]),
        **sizes(DIGITS_M, memory_size),
    ).double()
    parts = [slice(None)] if method == BATCH else [y == label for label in range(10)]
    row = run_stream(model, [(x[part], y[part]) for part in parts], **DIGITS_OPTIONS)
    accuracy, _ = likelihoods.class_accuracies(model, x_test, y_test)
    return {"error": 1 - accuracy, **row}


def label_jobs(memory_size: int | None) -> Jobs:
    """Streams in every order; a batch has none."""
    jobs: Jobs = {
        Key("labels", "banana", 0, BATCH): partial(
            run_banana, "random", 0, BATCH, memory_size
        )
    }
    for order in ORDERS:
        for seed in range(BANANA_SEEDS):
            jobs[Key("labels", f"banana, {order}", seed, STREAM)] = partial(
                run_banana, order, seed, STREAM, memory_size
            )
    jobs[Key("labels", "digits", 0, BATCH)] = partial(run_digits, BATCH, memory_size)
    jobs[Key("labels", "digits, class by class", 0, STREAM)] = partial(
        run_digits, STREAM, memory_size
    )
    return jobs


# --------------------------------------------------------------------- deep kernels


DEEP_INPUTS, DEEP_M, DEEP_SEEDS = 8, 100, 3
DEEP_DATA, DEEP_BATCH, DEEP_TEST = 2_000, 200, 1_000
DEEP_STEPS, DEEP_RATE = 500, 0.01  # of Adam, for exact models


class DeepKernel(Kernel):
    """A kernel of the features that a network makes of the inputs."""

    def __init__(self, network: nn.Module, base_kernel: Kernel) -> None:
        super().__init__()
        self.network, self.base_kernel = network, base_kernel

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        """The base kernel at the features."""
        features = self.network(x1), self.network(x2)
        return self.base_kernel.forward(*features, diag=diag, **params)


def deep_kernel(seed: int) -> Kernel:
    """Eight inputs, 32 units, two features, a smooth kernel; weights by the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(DEEP_INPUTS, 32), nn.Tanh(), nn.Linear(32, 2))
    return ScaleKernel(DeepKernel(network, RBFKernel())).double()


def deep_data(seed: int, num: int = DEEP_DATA) -> tuple[Tensor, ...]:
    """Training inputs and targets, test inputs and the function there.

    The function has two curved directions in eight inputs, which no kernel with a
    lengthscale per input can see.
    """
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(num + DEEP_TEST, DEEP_INPUTS, generator=gen, dtype=torch.float64)
    w = torch.randn(DEEP_INPUTS, 3, generator=gen, dtype=torch.float64)
    u = x @ (w / w.norm(dim=0))  # (n, 3)
    f = torch.sin(2 * u[:, 0] + u[:, 1]) + torch.tanh(u[:, 2] * u[:, 0])
    return x[:num], observed(f[:num], gen), x[num:], f[num:]


def run_deep(
    seed: int, method: str, memory_size: int | None, num: int = DEEP_DATA
) -> Row:
    """A model with a deep kernel; all methods begin with the same weights."""
    x, y, x_test, f_test = deep_data(seed, num)

    def make() -> StreamingGP:
        return StreamingGP(deep_kernel(seed), **sizes(DEEP_M, memory_size)).double()

    if method == EXACT:
        model, row = run_exact(
            [deep_kernel(seed)], x, y, num_steps=DEEP_STEPS, adam=DEEP_RATE
        )
    elif method == BATCH:
        model, row = run_batch(make, x, y)
    else:
        model = make()
        parts = zip(x.split(DEEP_BATCH), y.split(DEEP_BATCH), strict=True)
        row = run_stream(model, list(parts))
    noise = model.likelihood.noise.sqrt().item()
    return {"RMSE": rmse(model, x_test, f_test), "noise": noise, **row}


def deep_jobs(memory_size: int | None) -> Jobs:
    """Every seed by every method."""
    return {
        Key("deep", "deep kernel", seed, method): partial(
            run_deep, seed, method, memory_size
        )
        for seed in range(DEEP_SEEDS)
        for method in (EXACT, BATCH, STREAM)
    }


BENCHES: dict[str, Callable[[int | None], Jobs]] = {
    "small": small_jobs,
    "periods": series_jobs,
    "labels": label_jobs,
    "deep": deep_jobs,
}


# --------------------------------------------------------------------- running, files


def header(memory_size: int | None, threads: int) -> Row:
    """What was run, beside the rows."""
    names = ("torch_ssgp", "torch", "gpytorch")
    versions = {name: importlib.metadata.version(name) for name in names}
    return {"versions": versions, "memory_size": memory_size, "threads": threads}


def read(out: Path) -> dict[Key, Row]:
    """The rows in a file, by what names them."""
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    return {Key(*(row[name] for name in Key._fields)): row for row in rows}


def write(out: Path, head: Row, rows: Iterable[Row]) -> None:
    """JSON with one line for each row; the file is whole at any time."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    text = f'{{"header": {json.dumps(head)},\n"rows": [\n{lines}\n]}}\n'
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, out)


def check_settings(out: Path, head: Row) -> None:
    """Refuse a file whose streams had a memory of another size."""
    if not out.exists():
        return
    old = json.loads(out.read_text(encoding="utf-8"))["header"]["memory_size"]
    if old != head["memory_size"]:
        raise SystemExit(
            f"{out} has memory_size={old}, not {head['memory_size']}. Choose another "
            "file with --out."
        )


def run(
    out: Path,
    head: Row,
    jobs: Jobs,
    again: Iterable[str] = (),
) -> list[Row]:
    """All rows that are not in the file yet; the file after every one of them.

    Args:
        out: The file.
        head: Its header.
        jobs: What to run.
        again: Methods whose rows are dropped first.
    """
    check_settings(out, head)
    version = head["versions"]["torch_ssgp"]

    def stale(key: Key, row: Row) -> bool:
        other = key.method == STREAM and row["version"] != version
        return key in jobs and (other or key.method in again)

    kept = {key: row for key, row in read(out).items() if not stale(key, row)}
    write(out, head, kept.values())
    for key in tqdm([key for key in jobs if key not in kept], desc="rows"):
        row = {**key._asdict(), "version": version, **jobs[key]()}
        # Another process may have written meanwhile.
        write(out, head, {**read(out), key: row}.values())
    return list(read(out).values())


# ----------------------------------------------------------------------------- tables


class Pair(NamedTuple):
    """A stream and what it is compared with."""

    stream: Row
    reference: Row

    @property
    def ratio(self) -> float:
        """Of the errors."""
        return self.stream["RMSE"] / self.reference["RMSE"]

    @property
    def points(self) -> float:
        """Difference of the shares of wrong labels, in percentage points."""
        return 100 * (self.stream["error"] - self.reference["error"])


def pairs(rows: list[Row], bench: str, reference: str, method: str = STREAM) -> list:
    """Rows of a method with those of the reference, where both are there.

    A case that has no reference of its own has that of the name before its comma.
    """
    there = {(row["case"], row["seed"]): row for row in _of(rows, bench, reference)}
    result = []
    for row in _of(rows, bench, method):
        own = row["case"], row["seed"]
        shared = row["case"].split(",")[0], 0
        best = there.get(own, there.get(shared))
        if best is not None:
            result.append(Pair(row, best))
    return result


def _of(rows: list[Row], bench: str, method: str) -> list[Row]:
    return [row for row in rows if (row["bench"], row["method"]) == (bench, method)]


def _verdict(holds: bool) -> str:
    return "yes" if holds else "no"


def _failures(found: list[Pair]) -> int:
    return sum(bool(pair.stream.get("failure")) for pair in found)


def small_table(rows: list[Row]) -> list[Row]:
    """Shares of streams near their batch model: all of them, and by what they are."""
    found = pairs(rows, "small", BATCH)
    groups: dict[str, list[Pair]] = {"all": found}
    for pair in found:
        row = pair.stream
        names = [
            f"batches of {row['batch']}",
            f"inputs: {row['inputs']}",
            f"{row['arrival']} arrival",
        ]
        if row["first"] == 1:
            names.append("first batch of one point")
        for name in names:
            groups.setdefault(name, []).append(pair)
    names = ["all", *sorted(set(groups) - {"all"}, key=_natural)]
    lines = []
    for name in names if found else []:
        group = groups[name]
        ratios = [pair.ratio for pair in group]
        near = sum(ratio <= SMALL_NEAR for ratio in ratios) / len(group)
        holds = near >= SMALL_SHARE and max(ratios) <= SMALL_WORST
        stream, batch = (
            sum(each["cpu_seconds"] for each in side)
            for side in zip(*group, strict=True)
        )
        lines.append(
            {
                "streams": name,
                "number": len(group),
                f"share within {SMALL_NEAR:.2f}": f"{100 * near:.0f} %",
                "median RMSE / batch": statistics.median(ratios),
                "worst RMSE / batch": max(ratios),
                f"{SMALL_SHARE:.0%} within, none above {SMALL_WORST:g}": _verdict(
                    holds
                ),
                "CPU seconds a stream": stream / len(group),
                "CPU seconds a batch model": batch / len(group),
                "failures": _failures(group),
            }
        )
    return lines


def _natural(name: str) -> tuple[list[int], str]:
    """Batches of 2 before batches of 10."""
    numbers = [int(word) for word in name.split() if word.isdecimal()]
    return numbers, name


def ratio_table(rows: list[Row], bench: str, near: float) -> list[Row]:
    """One line a case: errors of streams over those of exact models."""
    found = pairs(rows, bench, EXACT)
    whole = pairs(rows, bench, EXACT, BATCH)
    lines = []
    for case in dict.fromkeys(pair.stream["case"] for pair in found):
        mine = [pair for pair in found if pair.stream["case"] == case]
        batch = [pair.ratio for pair in whole if pair.stream["case"] == case]
        ratios = [pair.ratio for pair in mine]
        middle = statistics.median(ratios)
        line = {
            "stream": case,
            "seeds": len(mine),
            "RMSE of exact GP": statistics.median(p.reference["RMSE"] for p in mine),
            "median RMSE / exact": middle,
            "worst RMSE / exact": max(ratios),
            f"median within {near:.2f}": _verdict(middle <= near),
            "one update / exact": statistics.median(batch) if batch else "–",
        }
        if "periods" in mine[0].stream:
            moved = max(_moved(pair.stream) for pair in mine)
            line["period moved by"] = f"{100 * moved:.2f} %"
            line["it stays"] = _verdict(moved <= PERIOD_STAYS)
        for name, side in (("stream", 0), ("exact", 1)):
            seconds = [pair[side]["cpu_seconds"] for pair in mine]
            line[f"CPU seconds, {name}"] = statistics.median(seconds)
        lines.append({**line, "failures": _failures(mine)})
    return lines


def _moved(row: Row) -> float:
    """The largest relative distance of a period from the true one."""
    both = zip(row["periods"], row["true_periods"], strict=True)
    return max(abs(period / true - 1) for period, true in both)


def label_table(rows: list[Row]) -> list[Row]:
    """One line an order: errors of streams beside that of all labels at once."""
    found = pairs(rows, "labels", BATCH)
    lines = []
    for case in dict.fromkeys(pair.stream["case"] for pair in found):
        mine = [pair for pair in found if pair.stream["case"] == case]
        points = [pair.points for pair in mine]
        limit = LABEL_POINTS[case.split(",")[0]]
        errors = [
            statistics.median(row["error"] for row in side)
            for side in zip(*mine, strict=True)
        ]
        lines.append(
            {
                "stream": case,
                "seeds": len(mine),
                "error": f"{100 * errors[0]:.1f} %",
                "error of batch": f"{100 * errors[1]:.1f} %",
                "worst difference": f"{max(points):+.1f} points",
                "allowed": f"{limit:g}",
                "within": _verdict(max(points) <= limit),
                "CPU seconds": statistics.median(
                    pair.stream["cpu_seconds"] for pair in mine
                ),
                "failures": _failures(mine),
            }
        )
    return lines


def tables(rows: list[Row]) -> dict[str, list[Row]]:
    """The lines of every table."""
    return {
        "small": small_table(rows),
        "periods": ratio_table(rows, "periods", PERIOD_NEAR),
        "labels": label_table(rows),
        "deep": ratio_table(rows, "deep", DEEP_NEAR),
    }


def sections(rows: list[Row]) -> dict[str, str]:
    """What the docs have to say about these streams, by place.

    Args:
        rows: What :func:`run` wrote.
    """
    return {name: markdown(lines) for name, lines in tables(rows).items()}


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benches", nargs="*", metavar=f"{{{','.join(BENCHES)}}}")
    parser.add_argument(
        "--out",
        "--json",
        type=Path,
        default=Path("out/streams.json"),
        help="where results are kept (out/streams.json)",
    )
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--seeds", type=positive, help="only the first seeds")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--again", nargs="+", choices=METHODS, default=())
    parser.add_argument("--memory-size", type=positive, help="of StreamingGP")
    parser.add_argument("--threads", type=positive, default=1, help="of torch (1)")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.benches) - set(BENCHES):
        parser.error(f"no {sorted(unknown)}; there are {list(BENCHES)}")
    torch.set_num_threads(chosen.threads)
    names = chosen.benches or list(BENCHES)
    jobs = {
        key: job
        for name in names
        for key, job in BENCHES[name](chosen.memory_size).items()
        if key.method in chosen.methods
        # A batch of labels is there for all orders: its name is part of theirs.
        and (chosen.only in key.case or key.case in chosen.only)
        and key.seed < (chosen.seeds or math.inf)
    }
    head = header(chosen.memory_size, chosen.threads)
    text = sections(run(chosen.out, head, jobs, chosen.again))
    print(*(text[name] for name in names), sep="\n\n")

"""The experiments of the paper, cut into cells that run on their own.

A cell is a function of plain arguments that returns plain numbers, so it can run in
another process, and its result is kept as JSON. ``scripts/reproduce.py`` runs cells,
``scripts/figures.py`` draws what they returned. Seconds are those of the processor, on
one thread: they do not depend on what else the machine does.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ZeroMean
from torch import Tensor

from torch_ssgp import StreamingGP
from workbench import streams
from workbench.baselines import (
    SVI,
    BatchSGPR,
    Method,
    OnlineConditioning,
    Streaming,
    WindowedGP,
    WindowedSGPR,
    normal_scores,
    small_budget,
)
from workbench.common import peak_mib, reset_peak, resident_mib
from workbench.likelihoods import binary_model
from workbench.streams import Stream

Row = dict[str, Any]


class Cell(NamedTuple):
    """A piece of an experiment.

    Attributes:
        key: Its name in the results.
        function: What runs, at the top of this module.
        options: Its arguments.
        weight: How long it takes, roughly, in seconds.
    """

    key: str
    function: Callable[..., Row]
    options: Row
    weight: float


@dataclass(frozen=True)
class Settings:
    """What the command line asks for.

    Attributes:
        quick: Small versions that take seconds and prove that all runs.
        seeds: Repetitions where something is random; each experiment has a default.
        data_dir: Where ``terrain_os_NT26.npz`` is, to use this tile in place of
            matplotlib's terrain.
    """

    quick: bool = False
    seeds: int | None = None
    data_dir: Path | None = None


# Repetitions of what is random: as a rule, and of tiny versions.
SEEDS = {"alpha": (4, 1), "hyperparameters": (10, 2), "banana": (5, 1)}


def num_seeds(name: str, settings: Settings) -> int:
    """Repetitions in an experiment."""
    return settings.seeds or SEEDS[name][settings.quick]


# ---------------------------------------------------------------------- toy series


def toy_series(quick: bool) -> Stream:
    """A draw from a GP with noise, in six batches from left to right."""
    return streams.growing_range(6, 20 if quick else 60, seed=3, num_test=300)


def shuffled(stream: Stream, seed: int = 0) -> Stream:
    """The same data in random order, in batches of the same sizes."""
    generator = torch.Generator().manual_seed(seed)
    x, y = stream.x_train, stream.y_train
    order = torch.randperm(len(y), generator=generator)
    sizes = [len(y_batch) for _, y_batch in stream.batches]
    batches = list(zip(x[order].split(sizes), y[order].split(sizes), strict=True))
    return Stream(stream.name, batches, stream.x_test, stream.y_test, stream.notes)


def toy(alpha: float, iid: bool, quick: bool) -> Row:
    """Every batch of the toy series, its prediction and its inducing points."""
    stream = toy_series(quick)
    if iid:
        stream = shuffled(stream)
    model = Streaming(1, num_inducing=20, alpha=alpha)
    at_once = BatchSGPR(1, num_inducing=20)
    x, y = stream.x_train, stream.y_train
    at_once.update(x, y)
    grid = torch.linspace(x.min().item(), x.max().item(), 200, dtype=x.dtype)
    panels = []
    for x_new, y_new in stream.batches:
        model.update(x_new, y_new)
        mean, variance = model.predict(grid.unsqueeze(-1))
        panels.append(
            {
                "x": x_new.flatten().tolist(),
                "y": y_new.tolist(),
                "mean": mean.tolist(),
                "std": variance.sqrt().tolist(),
                "z": model.model.summary.inducing_points.flatten().tolist(),
            }
        )
    return {
        "grid": grid.tolist(),
        "panels": panels,
        "batch": normal_scores(*at_once.predict(stream.x_test), stream.y_test),
        **normal_scores(*model.predict(stream.x_test), stream.y_test),
    }


def toy_cells(settings: Settings) -> list[Cell]:
    """Online regression, VFE and Power-EP, in order and shuffled."""
    return [
        Cell(
            f"alpha {alpha:g}, {'iid' if iid else 'in order'}",
            toy,
            {"alpha": alpha, "iid": iid, "quick": settings.quick},
            5,
        )
        for alpha in (0.0, 0.5)
        for iid in (False, True)
    ]


# --------------------------------------------------------------------------- alpha

ALPHAS = (0.0, 0.01, 0.1, 0.5, 0.8, 1.0)


def alpha(alpha: float, share_noise: bool, split: int, quick: bool) -> Row:
    """The pseudo-periodic stream with one alpha on one split of the data."""
    size = {"first": 200, "batch": 100, "num_batches": 4, "thin": 5, "max_test": 500}
    stream = streams.pseudo_periodic(
        **(size if quick else {"first": 1000, "batch": 500}), split=split
    )
    method = Streaming(
        1,
        num_inducing=30 if quick else 100,
        num_steps=20 if quick else 100,
        alpha=alpha,
        share_noise=share_noise,
    )
    row = trace(method, stream)
    z = method.model.summary.inducing_points.flatten().sort().values
    return {**row, "alpha": alpha, "z": z.tolist()}


def alpha_cells(settings: Settings) -> list[Cell]:
    """Alphas x random halves of the pseudo-periodic series.

    The past is kept in the paper's form throughout; noise shared by all data, the
    default where alpha is 0, comes on top.
    """
    splits = num_seeds("alpha", settings)
    forms = [(f"{a:g}", a, False) for a in ALPHAS] + [("0, shared noise", 0.0, True)]
    return [
        Cell(
            f"{name}; split {split}",
            alpha,
            {
                "alpha": value,
                "share_noise": share,
                "split": split,
                "quick": settings.quick,
            },
            30,
        )
        for name, value, share in forms
        for split in range(splits)
    ]


# ----------------------------------------------------------------- hyperparameters

NOISE = 0.1  # standard deviation
LENGTHSCALES = (0.5, 0.8)


def gp_series(lengthscale: float, seed: int, num: int) -> tuple[Tensor, Tensor]:
    """``num`` sorted inputs on [0, 10] and a draw from a GP at them, with noise."""
    generator = torch.Generator().manual_seed(seed)
    x = 10 * torch.rand(num, 1, generator=generator, dtype=torch.float64).sort(0).values
    K = torch.exp(-0.5 * ((x - x.mT) / lengthscale) ** 2)
    values, vectors = torch.linalg.eigh(K)
    white = torch.randn(2, num, generator=generator, dtype=torch.float64)
    f = vectors @ (values.clamp_min(0).sqrt() * white[0])
    return x, f + NOISE * white[1]


def hyperparameters(
    lengthscale: float, num_inducing: int | None, seed: int, quick: bool
) -> Row:
    """Learnt lengthscales, batch after batch; scale and noise are known.

    Without a number of inducing points, the full GP on all data so far: inducing
    points at the data make the bound the log marginal likelihood.
    """
    num, batches = (60, 3) if quick else (300, 10)
    x, y = gp_series(lengthscale, seed, num)
    kernel = ScaleKernel(RBFKernel())
    kernel.outputscale = 1.0
    model = StreamingGP(
        kernel, mean_module=ZeroMean(), num_inducing=num_inducing or num
    ).double()
    model.likelihood.noise = NOISE**2
    kernel.raw_outputscale.requires_grad_(False)
    model.likelihood.raw_noise.requires_grad_(False)
    learnt = []
    for part in torch.arange(num).chunk(batches):
        if num_inducing is None:
            seen = slice(0, int(part[-1]) + 1)
            model.reset()  # what was learned stays, data come again
            model.update(
                x[seen], y[seen], inducing_points=x[seen], learn_inducing_points=False
            )
        else:
            with small_budget():
                model.update(x[part], y[part])
        learnt.append(kernel.base_kernel.lengthscale.item())
    return {"lengthscale": lengthscale, "M": num_inducing, "learnt": learnt}


def hyperparameters_cells(settings: Settings) -> list[Cell]:
    """Lengthscales x sizes x draws."""
    seeds = num_seeds("hyperparameters", settings)
    sizes = (10, None) if settings.quick else (10, 20, 40, 80, None)
    return [
        Cell(
            f"lengthscale {length:g}; {f'M={m}' if m else 'full GP'}; draw {seed}",
            hyperparameters,
            {
                "lengthscale": length,
                "num_inducing": m,
                "seed": seed,
                "quick": settings.quick,
            },
            3,
        )
        for length in LENGTHSCALES
        for m in sizes
        for seed in range(seeds)
    ]


# -------------------------------------------------- accuracy against running time


def trace(method: Method, stream: Stream, max_test: int = 2000) -> Row:
    """Accuracy and running time (training and testing) after every batch.

    After a batch, at most ``max_test`` test points are predicted, evenly chosen among
    those that the stream has come past; after the last batch, all of them.
    """
    rows, seconds, reach = [], 0.0, -math.inf
    last = len(stream) - 1
    for k, (x, y) in enumerate(stream.batches):
        reach = max(reach, x[:, 0].max().item())
        near = stream.x_test[:, 0] <= reach
        x_test, y_test = stream.x_test[near], stream.y_test[near]
        if k < last and len(y_test) > max_test:
            kept = torch.linspace(0, len(y_test) - 1, max_test).long()
            x_test, y_test = x_test[kept], y_test[kept]
        elif k == last:
            x_test, y_test = stream.x_test, stream.y_test
        start = time.process_time()
        method.update(x, y)
        mean, variance = method.predict(x_test)
        seconds += time.process_time() - start
        rows.append({"seconds": seconds, **normal_scores(mean, variance, y_test)})
    return {
        "trace": rows,
        **rows[-1],
        "hyperparameters": method.hyperparameters(),
        "failures": getattr(method, "failures", []),
    }


def spread_points(stream: Stream, num: int) -> Tensor:
    """Points spread evenly over the range of all inputs, ``(num, d)``."""
    low, high = stream.x_train.amin(0), stream.x_train.amax(0)
    num_dims = low.numel()
    per_dim = math.ceil(num ** (1 / num_dims))
    axis = (torch.arange(per_dim, dtype=low.dtype) + 0.5) / per_dim
    grid = torch.cartesian_prod(*[axis] * num_dims).reshape(-1, num_dims)
    kept = torch.linspace(0, len(grid) - 1, num).round().long()
    return low + grid[kept] * (high - low)


class Budget(NamedTuple):
    """How much work every method gets.

    Attributes:
        steps: Adam steps a batch of ours and of the windowed sparse model, and of the
            first batch of online conditioning; all stop at a plateau.
        gp_steps: L-BFGS steps a batch of the exact GP, whose few parameters carry
            over; it stops at a plateau.
        svi_steps: Steps a batch of stochastic variational inference.
        batch_steps: L-BFGS steps of the batch model.
        gp_window: Points of the exact GP.
        sgpr_window: Points of the windowed sparse model.
        gp_first_steps: L-BFGS steps of the exact GP on the first batch.
        batch_first_steps: Adam steps of the batch model, before L-BFGS.
        max_points: Points that online conditioning does not exceed.
    """

    steps: int
    gp_steps: int
    svi_steps: int
    batch_steps: int
    gp_window: int
    sgpr_window: int
    gp_first_steps: int = 50
    batch_first_steps: int = 50
    max_points: int = 3000


SMALL = Budget(10, 3, 10, 10, 200, 300)
TIMESERIES = Budget(100, 10, 100, 300, 3000, 3000)
TERRAIN = Budget(30, 10, 100, 100, 3000, 7500)
MEMORY = Budget(30, 10, 0, 0, 2000, 6000, batch_first_steps=0, max_points=0)
# Whose results depend on what.
SPENDERS = {
    "steps": ("streaming", "windowed SGPR", "online conditioning"),
    "gp_steps": ("windowed GP",),
    "svi_steps": ("SVI",),
    "batch_steps": ("batch SGPR",),
    "gp_window": ("windowed GP",),
    "sgpr_window": ("windowed SGPR",),
    "gp_first_steps": ("windowed GP",),
    "batch_first_steps": ("batch SGPR",),
    "max_points": ("online conditioning",),
}
BUDGETS = {"timeseries": TIMESERIES, "terrain": TERRAIN, "memory": MEMORY}
RATES = (0.001, 0.01, 0.1)


def budget_of(name: str, quick: bool) -> Budget:
    """The budget of an experiment, tiny or not."""
    return SMALL if quick else BUDGETS[name]


def make(name: str, stream: Stream, num_inducing: int, budget: Budget) -> Method:
    """A method by its name in tables."""
    d = stream.x_test.size(-1)
    if name == "streaming":
        return Streaming(d, num_inducing=num_inducing, num_steps=budget.steps)
    if name == "windowed GP":
        return WindowedGP(
            d,
            window=budget.gp_window,
            num_steps=budget.gp_steps,
            first_steps=budget.gp_first_steps,
        )
    if name == "windowed SGPR":
        return WindowedSGPR(
            d,
            num_inducing=num_inducing,
            window=budget.sgpr_window,
            num_steps=budget.steps,
        )
    if name == "online conditioning":
        return OnlineConditioning(
            d,
            num_inducing=num_inducing,
            first_steps=budget.steps,
            max_points=budget.max_points,
        )
    if name == "batch SGPR":
        return BatchSGPR(
            d,
            num_inducing=num_inducing,
            num_steps=budget.batch_steps,
            first_steps=budget.batch_first_steps,
        )
    rate = float(name.removeprefix("SVI "))
    z = spread_points(stream, num_inducing)
    return SVI(d, z=z, lr=rate, num_steps=budget.svi_steps)


def time_series(data: str, batch: int, quick: bool) -> Stream:
    """The pseudo-periodic series or the audio signal."""
    source = {"pseudo-periodic": streams.pseudo_periodic, "audio": streams.audio}[data]
    if quick:
        return source(first=200, batch=100, num_batches=4, thin=4, max_test=500)
    return source(first=1000, batch=batch)


def heights(data: str, batch: int, quick: bool, data_dir: str | None) -> Stream:
    """A terrain, row by row."""
    size: Row = {"first": 1000, "batch": batch}
    if quick:
        size = {"first": 300, "batch": 200, "num_batches": 3, "max_test": 500}
    if data == "terrain OS":
        return streams.terrain_os(data_dir, **size)
    return streams.terrain(**size)


def compare(
    data: str,
    method: str,
    num_inducing: int,
    batch: int,
    quick: bool,
    data_dir: str | None = None,
) -> Row:
    """One method over one stream; ``batch`` is 0 for all data at once."""
    size = batch or 1000
    if data.startswith("terrain"):
        stream = heights(data, size, quick, data_dir)
        budget = budget_of("terrain", quick)
    else:
        stream = time_series(data, size, quick)
        budget = budget_of("timeseries", quick)
    if batch == 0:
        whole = [(stream.x_train, stream.y_train)]
        stream = Stream(stream.name, whole, stream.x_test, stream.y_test, stream.notes)
    runner = make(method, stream, num_inducing, budget)
    row = trace(runner, stream)
    return {**row, "converged": getattr(runner, "converged", None)}


def rough_seconds(data: str, method: str, num_inducing: int) -> float:
    """How long a method takes over a whole stream, about."""
    if data.startswith("terrain"):
        fixed = {"windowed GP": 200, "online conditioning": 30}
        at_400 = {"streaming": 80, "windowed SGPR": 250, "batch SGPR": 140}
        squared = at_400.get(method, 130) * (num_inducing / 400) ** 2
    else:
        fixed = {"windowed GP": 200, "online conditioning": 30}
        fixed |= {"streaming": 50, "windowed SGPR": 60}
        squared = {"batch SGPR": 25}.get(method, 20) * (num_inducing / 100) ** 2
    return fixed.get(method, squared)


def compare_cells(
    datasets: tuple[str, ...],
    batches: tuple[int, ...],
    sizes: tuple[int, ...],
    quick: bool,
    data_dir: Path | None = None,
) -> list[Cell]:
    """Every method where it makes a difference: a full GP has no inducing points, and
    the batch model sees no batches.
    """
    cells = []

    def add(data: str, method: str, m: int, batch: int) -> None:
        size = f"M={m}" if m else "all points"
        arrival = f"batches of {batch}" if batch else "at once"
        cells.append(
            Cell(
                f"{data}; {method}; {size}; {arrival}",
                compare,
                {
                    "data": data,
                    "method": method,
                    "num_inducing": m,
                    "batch": batch,
                    "quick": quick,
                    "data_dir": str(data_dir) if data_dir else None,
                },
                1 if quick else rough_seconds(data, method, m),
            )
        )

    # What the claims rest on comes first.
    for data in datasets:
        for method in ("streaming", "windowed SGPR", "online conditioning"):
            for m in sizes:
                for batch in batches:
                    add(data, method, m, batch)
        for m in sizes:
            add(data, "batch SGPR", m, 0)
        for batch in batches:
            add(data, "windowed GP", 0, batch)
    for rate in RATES:
        for data in datasets:
            # Not with 600 points, to save time.
            for m in [m for m in sizes if m <= 400]:
                for batch in batches:
                    add(data, f"SVI {rate:g}", m, batch)
    return cells


def timeseries_cells(settings: Settings) -> list[Cell]:
    """Both series, both sizes of batches, both numbers of inducing points."""
    batches, sizes = ((100,), (20,)) if settings.quick else ((300, 500), (100, 200))
    return compare_cells(("pseudo-periodic", "audio"), batches, sizes, settings.quick)


def terrain_cells(settings: Settings) -> list[Cell]:
    """Heights in two dimensions, row by row."""
    batches, sizes = ((200,), (30,)) if settings.quick else ((750, 1000), (400, 600))
    data = "terrain OS" if settings.data_dir else "terrain"
    return compare_cells((data,), batches, sizes, settings.quick, settings.data_dir)


# -------------------------------------------------------------------------- memory


def memory(name: str, data: str, quick: bool, data_dir: str | None) -> Row:
    """Peak memory of one method over the terrain, in a process of its own.

    What the process holds before the method exists (libraries, data) is subtracted.
    """
    stream = heights(data, 750, quick, data_dir)
    before = resident_mib()
    runner = make(name, stream, 30 if quick else 600, budget_of("memory", quick))
    method = Watched(runner, before)
    row = trace(method, stream)
    return {**row, "peak_MiB": max(method.peaks), "peaks_MiB": method.peaks}


class Watched:
    """A method whose peaks of memory are noted, one for every batch.

    Args:
        method: What is watched.
        before: What the process held before, in MiB.
    """

    def __init__(self, method: Method, before: float) -> None:
        self.method, self.before = method, before
        self.hyperparameters = method.hyperparameters
        self.peaks: list[float] = []

    def update(self, x: Tensor, y: Tensor) -> None:
        """As the method; a new peak begins."""
        reset_peak()
        self.method.update(x, y)

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As the method; the peak is noted."""
        result = self.method.predict(x)
        self.peaks.append(peak_mib() - self.before)
        return result


def memory_cells(settings: Settings) -> list[Cell]:
    """Ours and both windowed models."""
    options: Row = {
        "data": "terrain OS" if settings.data_dir else "terrain",
        "quick": settings.quick,
        "data_dir": str(settings.data_dir) if settings.data_dir else None,
    }
    seconds = {"streaming": 190, "windowed GP": 80, "windowed SGPR": 500}
    return [
        Cell(method, memory, {"name": method, **options}, weight)
        for method, weight in seconds.items()
    ]


# -------------------------------------------------------------------------- banana


def banana(order: str, seed: int, batches: int, quick: bool) -> Row:
    """Errors after every batch; for the first seed the latent mean on a grid, too."""
    stream = streams.banana(order, seed=seed, batches=batches)
    model = binary_model(num_inducing=30)
    span = torch.linspace(-3, 3, 20 if quick else 40, dtype=torch.float64)
    grid = torch.cartesian_prod(span, span)
    errors, panels = [], []
    for x, y in stream.batches:
        # One batch has to learn at once what a stream learns in ten updates.
        model.update(x, y, num_steps=5 if quick else 100 if batches > 1 else 300)
        mean = torch.cat([model(part).mean for part in stream.x_test.split(1000)])
        wrong = mean.gt(0) != stream.y_test.gt(0.5)
        errors.append(wrong.double().mean().item())
        if seed == 0:
            latent = model(grid).mean.reshape(len(span), -1)
            points = model.summary.inducing_points
            panels.append(
                {
                    "x": x.tolist(),
                    "y": y.tolist(),
                    "z": points.tolist(),
                    "mean": [[_short(f) for f in row] for row in latent.tolist()],
                }
            )
    return {"errors": errors, "span": span.tolist(), "panels": panels}


def _short(value: float) -> float:
    """Three digits: a small number keeps its sign, which is all that a line between
    classes depends on.
    """
    return float(f"{value:.3g}")


def banana_cells(settings: Settings) -> list[Cell]:
    """Orders of arrival, and all data in one batch."""
    seeds = num_seeds("banana", settings)
    orders = [("left_to_right", 0), ("right_to_left", 0)]
    orders += [("random", seed) for seed in range(seeds)]
    batches = 2 if settings.quick else 10
    runs = [(f"{o} {s}" if o == "random" else o, o, s, batches) for o, s in orders]
    return [
        Cell(
            name,
            banana,
            {"order": order, "seed": seed, "batches": num, "quick": settings.quick},
            8,
        )
        for name, order, seed, num in [*runs, ("one batch", "random", 0, 1)]
    ]


# --------------------------------------------------------------------- equivalence


def exact_log_evidence(model: StreamingGP, x: Tensor, y: Tensor) -> float:
    """log N(y; m, K + noise), the textbook formula."""
    with torch.no_grad():
        K = model.covar_module(x).to_dense() + model.likelihood.noise * torch.eye(
            len(y), dtype=y.dtype
        )
        prior = torch.distributions.MultivariateNormal(model.mean_module(x), K)
        return prior.log_prob(y).item()


def equivalence(at_data: bool) -> Row:
    """A stream beside batch inference with the same hyperparameters.

    Inducing points are fixed, or at all data so far; the latter is compared with the
    exact GP. After each batch: both predictions, the sum of the bound's increments and
    the bound of the batch.
    """
    stream = streams.growing_range(3, 30, seed=3, num_test=1)
    x, y = stream.x_train, stream.y_train
    learnt = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=len(y)).double()
    learnt.update(x, y)
    fixed = torch.linspace(x.min().item(), x.max().item(), 8, dtype=x.dtype)
    grid = torch.linspace(-0.5, x.max().item() + 0.5, 200, dtype=x.dtype)
    grid = grid.unsqueeze(-1)

    def fresh() -> StreamingGP:
        model = copy.deepcopy(learnt)
        model.reset()
        return model

    online, total, panels, seen = fresh(), 0.0, [], 0
    for x_new, y_new in stream.batches:
        seen += len(y_new)
        z = x[:seen] if at_data else fixed.unsqueeze(-1)
        result = online.update(x_new, y_new, num_steps=0, inducing_points=z)
        total += result.increment.item()
        panel = {
            "x": x[:seen].flatten().tolist(),
            "y": y[:seen].tolist(),
            "z": z.flatten().tolist(),
            "online_bound": total,
            **_curve("online", online, grid),
        }
        if at_data:
            panel["batch_bound"] = exact_log_evidence(learnt, x[:seen], y[:seen])
            panel |= _exact_curve(learnt, x[:seen], y[:seen], grid)
        else:
            batch = fresh()
            whole = batch.update(x[:seen], y[:seen], num_steps=0, inducing_points=z)
            panel["batch_bound"] = whole.bound.item()
            panel |= _curve("batch", batch, grid)
        panels.append(panel)
    return {"grid": grid.flatten().tolist(), "panels": panels}


def _curve(name: str, model: StreamingGP, grid: Tensor) -> Row:
    latent = model(grid)
    return {
        f"{name}_mean": latent.mean.tolist(),
        f"{name}_std": latent.variance.sqrt().tolist(),
    }


@torch.no_grad()
def _exact_curve(model: StreamingGP, x: Tensor, y: Tensor, grid: Tensor) -> Row:
    """Mean and deviation of the exact posterior of the function."""
    kernel, mean = model.covar_module, model.mean_module
    noise = model.likelihood.noise * torch.eye(len(y), dtype=y.dtype)
    L = torch.linalg.cholesky(kernel(x).to_dense() + noise)
    A = torch.linalg.solve_triangular(L, kernel(x, grid).to_dense(), upper=False)
    r = torch.linalg.solve_triangular(L, (y - mean(x)).unsqueeze(-1), upper=False)
    variance = kernel(grid).to_dense().diagonal() - A.square().sum(0)
    return {
        "batch_mean": (mean(grid) + (A.mT @ r).squeeze(-1)).tolist(),
        "batch_std": variance.clamp_min(0).sqrt().tolist(),
    }


def equivalence_cells(settings: Settings) -> list[Cell]:
    """Streaming = batch VFE, and = exact GP."""
    del settings  # small as it is
    return [
        Cell("fixed inducing points", equivalence, {"at_data": False}, 1),
        Cell("inducing points at the data", equivalence, {"at_data": True}, 1),
    ]


EXPERIMENTS: dict[str, Callable[[Settings], list[Cell]]] = {
    "toy": toy_cells,
    "alpha": alpha_cells,
    "hyperparameters": hyperparameters_cells,
    "timeseries": timeseries_cells,
    "terrain": terrain_cells,
    "memory": memory_cells,
    "banana": banana_cells,
    "equivalence": equivalence_cells,
}
# Memory is measured one process at a time, and a new one for each cell.
ALONE = ("memory",)
ON_TERRAIN = ("terrain", "memory")


def conditions(name: str, settings: Settings) -> Row:
    """What the cells of an experiment depend on besides their names.

    Args:
        name: The experiment.
        settings: How it is run.

    Returns:
        As JSON holds it: whether versions are tiny, and as far as they matter the
        repetitions, the budget, and a checksum of the tile.
    """
    kept: Row = {"quick": settings.quick}
    if name in SEEDS:
        kept["seeds"] = num_seeds(name, settings)
    if name in BUDGETS:
        kept["budget"] = budget_of(name, settings.quick)._asdict()
    if name in ON_TERRAIN:
        tile = settings.data_dir and streams.tile_file(settings.data_dir)
        kept["tile"] = tile and hashlib.sha256(tile.read_bytes()).hexdigest()[:16]
    return kept

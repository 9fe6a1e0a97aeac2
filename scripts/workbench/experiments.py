"""The experiments of the paper, cut into cells that run on their own.

A cell is a function of plain arguments that returns plain numbers, so it can run in
another process, and its result is kept as JSON. Seconds are those of the processor, on
one thread: they do not depend on what else the machine does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ZeroMean
from torch import Tensor

from torch_ssgp import StreamingGP
from workbench import runner, streams
from workbench.baselines import PaperForm, Streaming, normal_scores
from workbench.batch_bound import BatchSGPR
from workbench.likelihoods import binary_model, wrong_labels
from workbench.results import Jobs, Row, rounded
from workbench.runner import BATCH, NAMES, OURS, PAPER, RATES, TWICE, Budget
from workbench.streams import Stream
from workbench.streams.stream import evenly, generator

FEW_STEPS = {"num_steps": 5}  # of an update, where it matters only that all runs


class Settings(NamedTuple):
    """What the command line asks for."""

    quick: bool = False  # small versions that take seconds and prove that all runs
    seeds: int | None = None  # where something is random; each has a default
    data_dir: Path | None = None  # of a tile in place of matplotlib's terrain

    def repetitions(self, usual: int, quick: int) -> int:
        """How often something random is repeated."""
        return self.seeds or (quick if self.quick else usual)


def cells(run: Callable[..., Row], arguments: Mapping[str, tuple]) -> Jobs:
    """Jobs that are named by one word."""
    return {(name,): partial(run, *each) for name, each in arguments.items()}


def some_of(count: int, most: int = 4) -> list[int]:
    """The batches that pictures show, the first and the last among them."""
    return evenly(count, most).tolist()


def shuffled(stream: Stream, seed: int = 0) -> Stream:
    """The same data in random order, in batches of the same sizes."""
    x, y = stream.x_train, stream.y_train
    order = torch.randperm(len(y), generator=generator(seed))
    sizes = [len(y_batch) for _, y_batch in stream.batches]
    batches = list(zip(x[order].split(sizes), y[order].split(sizes), strict=True))
    return replace(stream, batches=batches)


def toy(alpha: float, iid: bool, quick: bool) -> Row:
    """A draw from a GP in six batches: predictions and points after each of them."""
    size, few = (20, FEW_STEPS) if quick else (60, {})
    stream = streams.growing_range(6, size, seed=3, num_test=300)
    stream = shuffled(stream) if iid else stream
    x, y, panels = stream.x_train, stream.y_train, []
    model, batch = Streaming(1, 20, few, alpha=alpha), BatchSGPR(1, 20, **few)
    batch.update(x, y)
    grid = torch.linspace(x.min().item(), x.max().item(), 200, dtype=x.dtype)
    for x_new, y_new in stream.batches:
        model.update(x_new, y_new)
        mean, variance = model.predict(grid.unsqueeze(-1))
        found = {"x": x_new, "y": y_new, "mean": mean, "std": variance.sqrt()}
        found["z"] = model.model.points
        panels.append({name: each.flatten().tolist() for name, each in found.items()})
    return {
        "grid": grid.tolist(),
        "panels": panels,
        "batch": normal_scores(*batch.predict(stream.x_test), stream.y_test),
        **normal_scores(*model.predict(stream.x_test), stream.y_test),
    }


def toy_cells(settings: Settings) -> Jobs:
    """Online regression, VFE and Power-EP, in order and shuffled."""
    pairs = product((0.0, 0.5), (False, True))
    return cells(
        toy,
        {
            f"alpha {alpha:g}, {'iid' if iid else 'in order'}": (
                alpha,
                iid,
                settings.quick,
            )
            for alpha, iid in pairs
        },
    )


ALPHAS = (0.0, 0.01, 0.1, 0.5, 0.8, 1.0)


def alpha(alpha: float, share_noise: bool, split: int, quick: bool) -> Row:
    """The pseudo-periodic stream with one alpha on one split of the data.

    The past is kept in the paper's form throughout; noise shared by all data, the
    default where alpha is 0, comes on top.
    """
    stream = streams.pseudo_periodic(batch=500, split=split)
    stream, size = (runner.small(stream), 30) if quick else (stream, 100)
    few = FEW_STEPS if quick else {}
    method = PaperForm(1, size, alpha=alpha, share_noise=share_noise, **few)
    row = runner.traced(method, stream)
    z = method.model.points.flatten().sort().values
    return {**row, "alpha": alpha, "z": z.tolist()}


def alpha_cells(settings: Settings) -> Jobs:
    """Alphas x random halves of the pseudo-periodic series."""
    forms = [(f"{a:g}", a, False) for a in ALPHAS] + [("0, shared noise", 0.0, True)]
    splits = range(settings.repetitions(4, 1))
    return cells(
        alpha,
        {
            f"{form[0]}; split {k}": (*form[1:], k, settings.quick)
            for form, k in product(forms, splits)
        },
    )


NOISE = 0.1  # standard deviation
LENGTHSCALES = (0.5, 0.8)


def gp_series(lengthscale: float, seed: int, num: int) -> tuple[Tensor, Tensor]:
    """``num`` sorted inputs on [0, 10] and a draw from a GP at them, with noise."""
    gen = generator(seed)
    x = 10 * torch.rand(num, 1, generator=gen, dtype=torch.float64).sort(0).values
    K = torch.exp(-0.5 * ((x - x.mT) / lengthscale) ** 2)
    values, vectors = torch.linalg.eigh(K)
    white = torch.randn(2, num, generator=gen, dtype=torch.float64)
    f = vectors @ (values.clamp_min(0).sqrt() * white[0])
    return x, f + NOISE * white[1]


def hyperparameters(
    lengthscale: float, num_inducing: int | None, seed: int, quick: bool
) -> Row:
    """Learned lengthscales, batch after batch; scale and noise are known.

    Without a number of inducing points, the full GP on all data so far.
    """
    num, batches, few = (60, 3, FEW_STEPS) if quick else (300, 10, {})
    x, y = gp_series(lengthscale, seed, num)
    kernel = ScaleKernel(RBFKernel())
    kernel.outputscale = 1.0
    model = StreamingGP(
        kernel, mean_module=ZeroMean(), num_inducing=num_inducing or num
    ).double()
    model.likelihood.noise = NOISE**2
    kernel.raw_outputscale.requires_grad_(False)
    model.likelihood.raw_noise.requires_grad_(False)
    learned = []
    for part in torch.arange(num).chunk(batches):
        if num_inducing is None:
            seen = slice(0, int(part[-1]) + 1)
            model.reset()  # what was learned stays, data come again
            model.update(x[seen], y[seen], learn=True, **few)
        else:
            model.update(x[part], y[part], learn=True, **few)
        learned.append(kernel.base_kernel.lengthscale.item())
    return {"lengthscale": lengthscale, "M": num_inducing, "learned": learned}


def hyperparameters_cells(settings: Settings) -> Jobs:
    """Lengthscales x sizes x draws."""
    sizes = (10, None) if settings.quick else (10, 20, 40, 80, None)
    draws = range(settings.repetitions(10, 2))
    return cells(
        hyperparameters,
        {
            f"lengthscale {a:g}; M={m or 'all'}; draw {k}": (a, m, k, settings.quick)
            for a, m, k in product(LENGTHSCALES, sizes, draws)
        },
    )


def banana(order: str, seed: int, batches: int, quick: bool, drawn: bool) -> Row:
    """Errors after every batch; where it is drawn, the latent mean on a grid, too."""
    stream = streams.banana(order, seed=seed, batches=batches)
    model = binary_model(num_inducing=30)
    span = torch.linspace(-3, 3, 20 if quick else 40, dtype=torch.float64)
    grid = torch.cartesian_prod(span, span)
    errors, panels = [], []
    for k, (x, y) in enumerate(stream.batches):
        # One batch has to learn at once what a stream learns in ten updates.
        model.update(x, y, num_steps=5 if quick else 100 if batches > 1 else 300)
        errors.append(wrong_labels(model, stream.x_test, stream.y_test))
        if not drawn:
            continue
        panels.append({"x": x.tolist(), "y": y.tolist()})
        if k in some_of(batches):
            latent = model(grid).mean.reshape(len(span), -1)
            # A small number keeps its sign, and the line between classes depends on
            # no more.
            panels[-1]["mean"] = rounded(latent.tolist(), digits=3)
            panels[-1]["z"] = model.points.tolist()
    return {"errors": errors, "span": span.tolist(), "panels": panels}


DRAWN = ("left_to_right", "random 0", "one batch")


def banana_cells(settings: Settings) -> Jobs:
    """Orders of arrival, and all data in one batch."""
    quick, num = settings.quick, 2 if settings.quick else 10
    runs = {order: (order, 0, num) for order in ("left_to_right", "right_to_left")}
    seeds = range(settings.repetitions(5, 1))
    runs |= {f"random {seed}": ("random", seed, num) for seed in seeds}
    runs |= {"one batch": ("random", 0, 1)}
    every = {name: (*each, quick, name in DRAWN) for name, each in runs.items()}
    return cells(banana, every)


METHODS = (OURS, TWICE, PAPER, runner.WINDOWED, BATCH)
MOST_SVI = 400  # inducing points, to save time


def compared(
    settings: Settings, names: list[str], batches: list[int], sizes: list[int]
) -> Jobs:
    """Every method where it makes a difference: a full GP has no inducing points."""
    on = runner.Setting(settings.data_dir, Budget(), settings.quick, trace=True)
    few = [m for m in sizes if m <= MOST_SVI]
    return {
        **runner.jobs(on, names, METHODS, sizes, batches),
        **runner.jobs(on, names, [runner.WINDOW], [0], batches),
        **runner.jobs(on, names, [f"SVI {rate:g}" for rate in RATES], few, batches),
    }


def timeseries_cells(settings: Settings) -> Jobs:
    """Both series, both sizes of batches, both numbers of inducing points."""
    batches, sizes = ([100], [20]) if settings.quick else ([300, 500], [100, 200])
    return compared(settings, ["pseudo-periodic", "audio"], batches, sizes)


def terrain_cells(settings: Settings) -> Jobs:
    """Heights in two dimensions, row by row."""
    batches, sizes = ([200], [30]) if settings.quick else ([750, 1000], [400, 600])
    name = "terrain OS" if settings.data_dir else "terrain"
    return compared(settings, [name], batches, sizes)


EXPERIMENTS: dict[str, Callable[[Settings], Jobs]] = {
    "toy": toy_cells,
    "alpha": alpha_cells,
    "hyperparameters": hyperparameters_cells,
    "timeseries": timeseries_cells,
    "terrain": terrain_cells,
    "banana": banana_cells,
}
COMPARED = ("timeseries", "terrain")


def names_of(experiment: str) -> tuple[str, ...]:
    """The columns that name a row."""
    return NAMES if experiment in COMPARED else ("cell",)


def conditions(experiment: str, settings: Settings) -> dict[str, Any]:
    """What rows depend on besides their names."""
    budget = {"budget": Budget()._asdict()} if experiment in COMPARED else {}
    return {"quick": settings.quick, **budget}

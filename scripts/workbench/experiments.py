"""The experiments of the paper, cut into cells that run on their own.

A cell is a function of plain arguments that returns plain numbers, so it can run in
another process, and its result is kept as JSON. ``scripts/reproduce.py`` runs cells,
``scripts/figures.py`` draws what they returned. Seconds are those of the processor, on
one thread: they do not depend on what else the machine does.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from functools import partial

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ZeroMean
from torch import Tensor

from torch_ssgp import StreamingGP
from workbench import streams
from workbench.baselines import (
    BatchSGPR,
    PaperForm,
    Streaming,
    normal_scores,
    small_budget,
)
from workbench.cells import SEEDS, Cell, Settings, num_seeds, some_of
from workbench.contests import (
    BUDGETS,
    budget_of,
    memory_cells,
    terrain_cells,
    timeseries_cells,
    trace,
)
from workbench.likelihoods import binary_model
from workbench.results import Row, rounded
from workbench.running import wrong_labels
from workbench.streams import Stream

FEW_STEPS = {"num_steps": 5}  # of an update, where it matters only that all runs

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
    few = FEW_STEPS if quick else {}
    model = Streaming(1, num_inducing=20, alpha=alpha, **few)
    at_once = BatchSGPR(1, num_inducing=20, **few)
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
            partial(toy, alpha, iid, settings.quick),
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
    method = PaperForm(
        1,
        num_inducing=30 if quick else 100,
        alpha=alpha,
        share_noise=share_noise,
        **(FEW_STEPS if quick else {}),
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
        Cell(f"{name}; split {k}", partial(alpha, value, share, k, settings.quick))
        for name, value, share in forms
        for k in range(splits)
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
    """Learned lengthscales, batch after batch; scale and noise are known.

    Without a number of inducing points, the full GP on all data so far: inducing
    points at the data make the bound the log marginal likelihood.
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
            model.update(
                x[seen],
                y[seen],
                inducing_points=x[seen],
                learn_inducing_points=False,
                **few,
            )
        else:
            with small_budget():
                model.update(x[part], y[part], **few)
        learned.append(kernel.base_kernel.lengthscale.item())
    return {"lengthscale": lengthscale, "M": num_inducing, "learned": learned}


def hyperparameters_cells(settings: Settings) -> list[Cell]:
    """Lengthscales x sizes x draws."""
    seeds = num_seeds("hyperparameters", settings)
    sizes = (10, None) if settings.quick else (10, 20, 40, 80, None)
    return [
        Cell(
            f"lengthscale {length:g}; {f'M={m}' if m else 'full GP'}; draw {seed}",
            partial(hyperparameters, length, m, seed, settings.quick),
        )
        for length in LENGTHSCALES
        for m in sizes
        for seed in range(seeds)
    ]


# -------------------------------------------------------------------------- banana


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
            panels[-1]["z"] = model.summary.inducing_points.tolist()
    return {"errors": errors, "span": span.tolist(), "panels": panels}


DRAWN = ("left_to_right", "random 0", "one batch")


def banana_cells(settings: Settings) -> list[Cell]:
    """Orders of arrival, and all data in one batch."""
    seeds, num = num_seeds("banana", settings), 2 if settings.quick else 10
    runs = [(order, order, 0, num) for order in ("left_to_right", "right_to_left")]
    runs += [(f"random {seed}", "random", seed, num) for seed in range(seeds)]
    return [
        Cell(name, partial(banana, order, seed, size, settings.quick, name in DRAWN))
        for name, order, seed, size in [*runs, ("one batch", "random", 0, 1)]
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
    learned = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=len(y)).double()
    learned.update(x, y)
    fixed = torch.linspace(x.min().item(), x.max().item(), 8, dtype=x.dtype)
    grid = torch.linspace(-0.5, x.max().item() + 0.5, 200, dtype=x.dtype)
    grid = grid.unsqueeze(-1)

    def fresh() -> StreamingGP:
        model = copy.deepcopy(learned)
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
            panel["batch_bound"] = exact_log_evidence(learned, x[:seen], y[:seen])
            panel |= _exact_curve(learned, x[:seen], y[:seen], grid)
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
        Cell("fixed inducing points", partial(equivalence, False)),
        Cell("inducing points at the data", partial(equivalence, True)),
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

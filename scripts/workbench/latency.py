"""Single points: what each costs, and how well it was predicted.

    python scripts/benchmark.py latency --data-dir DIR
    python scripts/benchmark.py latency --data arm --sizes 100 200

4,000 points in the order of their file, or of a two-link arm at 500 Hz, inputs and
targets standardised by the first 1,000. Each is predicted, mean and variance, and then
learned. All times are those of the processor, in milliseconds. In the same loop two
others are timed, and ratios are to their medians: the floor, in NumPy, which borders an
inverse factor of M rows by one, and GPyTorch's ``get_fantasy_model`` at 400 points.
Percentiles leave out the first 100 points. Scores are those of the last 2,000.

``update`` learns hyperparameters when it is due. ``observe`` never does: ``learn``
runs every 250 points, as another thread would, and is counted apart.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor
from torch.distributions import Normal
from tqdm import tqdm

from torch_ssgp import StreamingGP
from workbench.baselines import new_kernel
from workbench.common import bench_parser, positive
from workbench.exact import Exact
from workbench.experts import LocalExperts
from workbench.results import Row, Table, header
from workbench.streams import arm, moments, uci_rows

NAMES = ("data", "work", "M")
DATA = ("arm", "kin40k", "elevators", "bike_noleak", "protein")
POINTS, SCALED, EXACT = 4_000, 1_000, 400
WARM, RARELY, LEARN = 100, 50, 250  # points
SIZES = (100, 200, 400)
HALF = 1.6448536269514722  # of an interval of 90 %, in standard deviations
Moments = tuple[Any, Any]


def points_of(name: str, data_dir: Path | None, num: int) -> tuple[Tensor, Tensor]:
    """Standardised inputs ``(n, d)`` and targets ``(n,)``."""
    x, y = arm(num) if name == "arm" else uci_rows(name, data_dir)[:2]
    x, y = x[:num], y[:num]
    (x_mean, x_std), (y_mean, y_std) = moments(x[:SCALED]), moments(y[:SCALED])
    return (x - x_mean) / x_std, (y - y_mean) / y_std


class Watch:
    """Milliseconds of what was done, by name."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = defaultdict(list)

    def __call__(self, name: str, job: Callable, *arguments: Any) -> Any:
        """Do it."""
        start = time.process_time()
        value = job(*arguments)
        self.ms[name].append(1e3 * (time.process_time() - start))
        return value

    def median(self, name: str) -> float | None:
        """Of all times after the first points, if there are any."""
        return float(np.median(self.ms[name])) if self.ms[name] else None


class Ours:
    """A model with defaults, by ``update`` or ``observe``."""

    def __init__(self, work: str, x: Tensor, y: Tensor, num: int) -> None:
        self.model = StreamingGP(new_kernel(x.size(-1)), num_inducing=num).double()
        self.learn, self.exported = getattr(self.model, work), None
        self.in_background = work == "observe"

    @torch.no_grad()
    def predict(self, x: Tensor) -> Moments:
        """Mean and variance of the target."""
        prediction = self.model.predict(x)
        return prediction.mean, prediction.variance

    def rarely(self, k: int, x: Tensor, watch: Watch) -> None:
        """Learn what was left undone; predict with the exported model."""
        if self.in_background and k % LEARN == 0:
            watch("learn", self.model.learn)
        if self.exported is None:
            self.exported = self.model.export()
        watch("refresh", self.exported.update_from, self.model)
        with torch.no_grad():
            watch("exported", self.exported, x)


class Forest:
    """River's adaptive random forest, which predicts no variance."""

    def __init__(self, x: Tensor, y: Tensor, num: int) -> None:
        from river import forest

        self.model = forest.ARFRegressor(seed=0)

    def predict(self, x: Tensor) -> Moments:
        """The mean."""
        row = dict(enumerate(x[0].tolist()))
        return self.model.predict_one(row) or 0.0, math.nan

    def learn(self, x: Tensor, y: Tensor) -> None:
        """One datum."""
        self.model.learn_one(dict(enumerate(x[0].tolist())), y.item())


class Experts(LocalExperts):
    """LoG-GP; hyperparameters are learned from the beginning, which is not counted."""

    def __init__(self, x: Tensor, y: Tensor, num: int) -> None:
        prior = StreamingGP(new_kernel(x.size(-1)), num_inducing=num).double()
        some = slice(0, min(2 * num, SCALED))
        prior.update(x[some], y[some])
        super().__init__(prior, num)
        self.learn = self.update


LEARNERS: dict[str, Callable[[Tensor, Tensor, int], Any]] = {
    "update": partial(Ours, "update"),
    "local experts": Experts,
    "river's forest": Forest,
}
if hasattr(StreamingGP, "observe"):
    LEARNERS = {"observe": partial(Ours, "observe"), **LEARNERS}


def bordering(x: Tensor, noise: float = 0.1) -> Callable[[np.ndarray, float], None]:
    """One datum more for an inverse factor ``W`` of the rows ``x``, in NumPy."""
    points = x.numpy()
    n = len(points)
    square = ((points[:, None] - points) ** 2).sum(-1)
    W, e = np.zeros((n + 1, n + 1)), np.zeros(n + 1)
    root = np.linalg.cholesky(np.exp(-0.5 * square) + noise * np.eye(n))
    W[:n, :n] = np.linalg.inv(root)

    def append(x: np.ndarray, y: float) -> None:
        v = W[:n, :n] @ np.exp(-0.5 * ((points - x) ** 2).sum(-1))
        d = math.sqrt(1 + noise - v @ v)
        W[n, :n], W[n, n] = -(v @ W[:n, :n]) / d, 1 / d
        e[n] = (y - v @ e[:n]) / d

    return append


def fantasies(x: Tensor, y: Tensor) -> Callable[[Tensor, Tensor], object]:
    """One datum more for GPyTorch's exact model, which does not keep it."""
    exact = Exact(x, y, ScaleKernel(RBFKernel()).double()).eval()
    with torch.no_grad():
        exact(x[:2])
    return torch.no_grad()(exact.get_fantasy_model)


def run(name: str, work: str, m: int, num: int, data_dir: Path | None) -> Row:
    """One learner over the points of one stream."""
    torch.manual_seed(0)
    x, y = points_of(name, data_dir, num)
    m = min(m, num // 2)
    learner, watch, found = LEARNERS[work](x, y, m), Watch(), [(0.0, math.nan)]
    floor, exact = bordering(x[:m]), fantasies(x[:EXACT], y[:EXACT])
    as_numpy = x.numpy(), y.numpy()
    for k in tqdm(range(len(x)), desc=f"{name}, {work}", leave=False, disable=None):
        one, target = x[k : k + 1], y[k : k + 1]
        if k:
            found.append(watch("predict", learner.predict, one))
        watch("", learner.learn, one, target)
        watch("floor", floor, as_numpy[0][k], as_numpy[1][k])
        if k % RARELY == RARELY - 1 or k == len(x) - 1:
            watch("fantasy", exact, one, target)
            if isinstance(learner, Ours):
                learner.rarely(k + 1, one, watch)
    row = {**costs(watch), **scores(*zip(*found, strict=True), y)}
    return {name: value for name, value in row.items() if value is not None}


def costs(watch: Watch) -> Row:
    """Milliseconds, and what they are in units of the floor and of a fantasy."""
    after = np.array(watch.ms[""][min(WARM, len(watch.ms[""]) // 2) :])
    row: Row = {"mean": float(np.mean(watch.ms[""]))}
    for percent, name in ((50, "p50"), (90, "p90"), (99, "p99"), (100, "max")):
        row[name] = float(np.percentile(after, percent))
    others = ("floor", "fantasy", "predict", "exported", "refresh")
    row |= {name: watch.median(name) for name in others}
    row["learn"] = sum(watch.ms["learn"]) / len(watch.ms[""])  # spread over all points
    row["p50 / floor"] = row["p50"] / row["floor"]
    row["fantasy / p50"] = row["fantasy"] / row["p50"]
    row["fantasy / mean"] = row["fantasy"] / row["mean"]
    return row


def scores(means: tuple, variances: tuple, y: Tensor) -> Row:
    """Errors of the second half, standardised, and the share inside of 90 %."""
    last = slice(len(y) // 2, None)
    mean, variance = (
        torch.tensor(list(map(float, v)))[last] for v in (means, variances)
    )
    y = y[last]
    row: Row = {"SMSE": ((mean - y).square().mean() / y.var()).item()}
    if variance.isnan().any():
        return row
    density = Normal(mean, variance.sqrt()).log_prob(y)
    row["MSLL"] = (Normal(0.0, 1.0).log_prob(y) - density).mean().item()
    inside = (mean - y).abs() < HALF * variance.sqrt()
    return row | {"inside 90 %": 100 * inside.double().mean().item()}


def main(arguments: list[str]) -> None:
    """Run what is missing."""
    parser = bench_parser(__doc__, "data/latency.json")
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA)
    parser.add_argument("--work", nargs="+", choices=LEARNERS, default=[*LEARNERS])
    parser.add_argument("--sizes", nargs="+", type=positive, default=SIZES)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    num = 40 if chosen.quick else POINTS
    jobs = {}
    for data, work, m in product(chosen.data, chosen.work, chosen.sizes):
        # A forest has no size, and experts that of the paper.
        m = {"river's forest": 0, "local experts": 200}.get(work, m)
        if data == "arm" or chosen.data_dir:
            jobs[data, work, m] = partial(
                run, data, work, m or 400, num, chosen.data_dir
            )
    table = Table(chosen.out, NAMES, header(others=["river"], points=num))
    table.run(jobs, again=chosen.again, workers=chosen.workers)

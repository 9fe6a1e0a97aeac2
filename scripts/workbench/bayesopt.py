"""Bayesian optimisation with a streaming surrogate: regret and cost.

    python scripts/benchmark.py bayesopt

Regret is the distance to the known maximum; every method has the same seeds and initial
designs. Times are CPU time on one thread, medians of repetitions in which the methods
take turns; only their ratios are meaningful. Rows of regret that are in the file are
not run again.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
from botorch.acquisition import LogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.exceptions.warnings import OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.models.transforms import Normalize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import Branin, Hartmann
from botorch.test_functions.base import BaseTestProblem
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.mlls import ExactMarginalLogLikelihood
from matplotlib import pyplot
from torch import Tensor

from torch_ssgp.surrogates import SingleTaskStreamingGP
from workbench.common import bench_parser, positive, save
from workbench.results import Row, Table, header, quiet, read
from workbench.timing import median_times

STREAMING, EXACT, RANDOM = "streaming", "exact", "random"
REFIT = "exact refit"
CASE = ["Hartmann-6"]
TINY = ((20, 120), 10, 1)  # arguments of a quick run
NAMES = ("table", "case", "method", "seed")
SIZES = (20, 50, 100, 200, 500, 1000, 2000)  # evaluations, of the cost


class Streaming:
    """A surrogate that sees every evaluation once."""

    def __init__(
        self, X: Tensor, Y: Tensor, bounds: Tensor, num_inducing: int, num_steps: int
    ) -> None:
        self.num_steps = num_steps
        self.model: Model = SingleTaskStreamingGP(
            X,
            Y,
            num_inducing=num_inducing,
            input_transform=Normalize(d=X.size(-1), bounds=bounds),
        )
        self.model.fit(num_steps=2 * num_steps)

    def tell(self, X: Tensor, Y: Tensor) -> None:
        """Learn from new evaluations."""
        self.model.update(X, Y, restandardize=True, num_steps=self.num_steps)


class Refit:
    """BoTorch's exact model, built and fitted again on all data.

    With ``warm_steps``, a fit takes so many steps from where the last one ended.
    """

    def __init__(
        self, X: Tensor, Y: Tensor, bounds: Tensor, warm_steps: int | None = None
    ) -> None:
        self.transform = {"input_transform": Normalize(d=X.size(-1), bounds=bounds)}
        self.warm_steps, self.X, self.Y = warm_steps, X, Y
        self.model: Model = SingleTaskGP(X, Y, **self.transform)
        if warm_steps is None:
            self._fit()

    def tell(self, X: Tensor, Y: Tensor) -> None:
        """Keep the new evaluations, and start over."""
        self.X, self.Y = torch.cat([self.X, X]), torch.cat([self.Y, Y])
        before = self.model.state_dict()
        self.model = SingleTaskGP(self.X, self.Y, **self.transform)
        if self.warm_steps is not None:
            kept = {k: v for k, v in before.items() if "outcome" not in k}
            torch.nn.Module.load_state_dict(self.model, kept, strict=False)
        self._fit()

    def _fit(self) -> None:
        mll = ExactMarginalLogLikelihood(self.model.likelihood, self.model)
        if self.warm_steps is None:
            fit_gpytorch_mll(mll)
            return
        options = {"options": {"maxiter": self.warm_steps}}
        with warnings.catch_warnings():
            # A few steps are no convergence, and are not meant to be.
            warnings.simplefilter("ignore", OptimizationWarning)
            fit_gpytorch_mll(mll, optimizer_kwargs=options, max_attempts=1)


Surrogate = Callable[[Tensor, Tensor, Tensor], Streaming | Refit]


def propose(model: Model, X: Tensor, bounds: Tensor, seed: int) -> Tensor:
    """The next input. LogEI would stall beside its incumbent: noise is inferred."""
    acquisition = qLogNoisyExpectedImprovement(
        model,
        X_baseline=X,
        sampler=SobolQMCNormalSampler(torch.Size([64]), seed=seed),
        prune_baseline=True,
    )
    with warnings.catch_warnings():
        # A line search that ends early is started again elsewhere by BoTorch.
        warnings.filterwarnings("ignore", "Optimization failed", RuntimeWarning)
        candidate, _ = optimize_acqf(
            acquisition,
            bounds=bounds,
            q=1,
            num_restarts=4,
            raw_samples=128,
            options={"maxiter": 60, "seed": seed},
        )
    return candidate


def optimise(
    problem: BaseTestProblem,
    surrogate: Surrogate | None,
    num_initial: int,
    num_evaluations: int,
    seed: int,
) -> Tensor:
    """Simple regret after every evaluation, ``(num_evaluations,)``.

    It starts from a scrambled Sobol design; without a surrogate the search is random.
    """
    bounds = problem.bounds.double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        X = draw_sobol_samples(bounds, n=num_initial, q=1, seed=seed).squeeze(-2)
        if surrogate is None:
            unit = torch.rand(num_evaluations - num_initial, X.size(-1)).double()
            X = torch.cat([X, bounds[0] + (bounds[1] - bounds[0]) * unit])
            Y = problem(X).unsqueeze(-1)
        else:
            Y = problem(X).unsqueeze(-1)
            model = surrogate(X, Y, bounds)
            while X.size(0) < num_evaluations:
                new_X = propose(model.model, X, bounds, seed + X.size(0))
                new_Y = problem(new_X).unsqueeze(-1)
                model.tell(new_X, new_Y)
                X, Y = torch.cat([X, new_X]), torch.cat([Y, new_Y])
    return problem.optimal_value - Y.squeeze(-1).cummax(0).values


# Problems, evaluations at first and in all, and inducing points: fewer.
PROBLEMS: dict[str, tuple[BaseTestProblem, int, int, int]] = {
    "Branin": (Branin(negate=True), 6, 40, 30),
    "Hartmann-6": (Hartmann(dim=6, negate=True), 12, 80, 60),
}


def regret(
    name: str,
    method: str,
    seed: int,
    num_evaluations: int | None = None,
    num_steps: int = 50,
) -> Row:
    """Final simple regret by qLogNEI."""
    problem, num_initial, total, num_inducing = PROBLEMS[name]
    total = num_evaluations or total

    def streaming(X: Tensor, Y: Tensor, bounds: Tensor) -> Streaming:
        return Streaming(X, Y, bounds, num_inducing, num_steps)

    surrogate = {STREAMING: streaming, EXACT: Refit, RANDOM: None}[method]
    start = time.process_time()
    trace = optimise(problem, surrogate, num_initial, total, seed)
    return {
        "inducing": num_inducing if method == STREAMING else "",
        "evaluations": total,
        "regret": float(trace[-1]),
        "seconds": time.process_time() - start,
    }


def cost(
    sizes: tuple[int, ...] = SIZES, num_inducing: int = 100, repeats: int = 5
) -> list[Row]:
    """One update and one acquisition after few and after many evaluations.

    Every method takes one new evaluation, learns its hyperparameters and proposes the
    next input; the streaming model takes the same number of steps each time. The exact
    model starts its fit from the hyperparameters it had.
    """
    jobs: dict[tuple[str, int], Callable[[], object]] = {}
    for size in sizes:
        streaming, exact = cost_jobs(size, num_inducing)
        jobs |= {(STREAMING, size): streaming, (REFIT, size): exact}
    seconds, rows = median_times(jobs, repeats), []
    for method, size in product((STREAMING, REFIT), sizes):
        row = {"table": "cost", "case": f"{size} evaluations", "method": method}
        ratio = seconds[method, size] / seconds[REFIT, size]
        rows.append({**row, "seconds": seconds[method, size], "ratio": ratio})
    return rows


def cost_jobs(size: int, num_inducing: int) -> list[Callable[[], None]]:
    """What both models do after so many evaluations."""
    problem, gen = Hartmann(dim=6, negate=True), torch.Generator().manual_seed(size)
    X, new_X, raw = (
        torch.rand(*shape, 6, dtype=torch.float64, generator=gen)
        for shape in ((size,), (1,), (64, 1))
    )
    Y, new_Y = (problem(x).unsqueeze(-1) for x in (X, new_X))
    bounds = problem.bounds.double()
    # No plateau: 19 steps are the same work at every size.
    ours = Streaming(X[:100], Y[:100], bounds, num_inducing, 25)
    for first in range(100, size, 100):
        ours.model.update(X[first : first + 100], Y[first : first + 100], num_steps=10)
    ours.num_steps = 19
    exact, parameters = (
        Refit(X, Y, bounds, 5),
        dict(ours.model.model.named_parameters()),
    )
    with torch.no_grad():
        for name, parameter in exact.model.named_parameters():
            parameter.copy_(parameters[name])

    def job(surrogate: Streaming | Refit) -> None:
        surrogate = copy.deepcopy(surrogate)
        surrogate.tell(new_X, new_Y)
        acquisition, x = LogExpectedImprovement(surrogate.model, best_f=Y.max()), raw
        for _ in range(10):
            x = x.detach().requires_grad_()
            acquisition(x).sum().backward()

    return [partial(job, ours), partial(job, exact)]


def draw(rows: list[Row], path: Path) -> None:
    """Seconds per evaluation, of the streaming and of the exact model."""
    figure, ax = pyplot.subplots(figsize=(6, 3.6))
    for method, color in ((STREAMING, "tab:blue"), (REFIT, "tab:red")):
        kept = [r for r in rows if r["table"] == "cost" and r["method"] == method]
        sizes = [int(row["case"].split()[0]) for row in kept]
        seconds = [row["seconds"] for row in kept]
        ax.plot(sizes, seconds, "o-", color=color, label=method)
    ax.set(xscale="log", yscale="log")
    ax.set(xlabel="evaluations so far", ylabel="CPU seconds of the next")
    ax.grid(color="0.9")
    ax.legend(fontsize=9)
    save(figure, path)


def main(arguments: list[str]) -> None:
    """Run what is missing; costs are measured in one run, and replaced as a whole."""
    parser = bench_parser(__doc__, "data/bayesopt.json")
    parser.add_argument("--seeds", type=positive, default=10, help="of regret (10)")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=CASE)
    parser.add_argument("--only-regret", action="store_true", help="no costs")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = Table(chosen.out, NAMES, header(others=["botorch"], quick=chosen.quick))
    if not chosen.only_regret:
        with quiet():
            for row in cost(*(TINY if chosen.quick else ())):
                table.add(row)
    few = (14, 5) if chosen.quick else ()
    keys = product(chosen.problems, (STREAMING, EXACT, RANDOM), range(chosen.seeds))
    jobs = {("regret", *key): partial(regret, *key, *few) for key in keys}
    table.run(jobs, again=chosen.again, workers=chosen.workers)
    draw(read(chosen.out).rows, chosen.out.parents[1] / "figures" / "crossover.png")

"""Bayesian optimisation with a streaming surrogate: regret, cost and fantasies.

    python scripts/benchmark.py bayesopt                   all tables but versions
    python scripts/benchmark.py bayesopt regret cost       some of them
    python scripts/benchmark.py bayesopt versions --old PATH

Regret is the distance to the known maximum; every method has the same seeds and initial
designs. ``versions`` compares with another version of the package: PATH is the folder
that contains its ``torch_ssgp``. Times are CPU time on one thread, medians of
repetitions in which the methods take turns; only their ratios are meaningful.

Rows already in the file are not run again, so a run can be interrupted and resumed.
Exact models and random search are kept when the version changes; the rest is run again.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

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
from torch import Tensor

from torch_ssgp.surrogates import SingleTaskStreamingGP
from workbench.baselines import small_budget
from workbench.bench_bayesopt_tables import EXACT, RANDOM, STREAMING, sections
from workbench.bench_core import median_times
from workbench.bench_versions import versions
from workbench.common import new_parser, positive
from workbench.results import Row, Table, header

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
    """BoTorch's exact model, built and fitted again on all data."""

    def __init__(self, X: Tensor, Y: Tensor, bounds: Tensor) -> None:
        self.X, self.Y, self.bounds = X, Y, bounds
        self._fit()

    def tell(self, X: Tensor, Y: Tensor) -> None:
        """Keep the new evaluations, and start over."""
        self.X, self.Y = torch.cat([self.X, X]), torch.cat([self.Y, Y])
        self._fit()

    def _fit(self) -> None:
        transform = Normalize(d=self.X.size(-1), bounds=self.bounds)
        self.model: Model = SingleTaskGP(self.X, self.Y, input_transform=transform)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(self.model.likelihood, self.model))


Surrogate = Callable[[Tensor, Tensor, Tensor], Streaming | Refit]


def propose(
    model: Model, X: Tensor, Y: Tensor, bounds: Tensor, noisy: bool, seed: int
) -> Tensor:
    """The next input, by LogEI or qLogNEI."""
    if noisy:
        acquisition: Any = qLogNoisyExpectedImprovement(
            model,
            X_baseline=X,
            sampler=SobolQMCNormalSampler(torch.Size([64]), seed=seed),
            prune_baseline=True,
        )
    else:
        acquisition = LogExpectedImprovement(model, best_f=Y.max())
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
    noisy: bool = False,
    on_step: Callable[[], object] | None = None,
) -> Tensor:
    """Simple regret after every evaluation, ``(num_evaluations,)``.

    Args:
        problem: What to maximise.
        surrogate: Makes the model from the first data; ``None`` for random search.
        num_initial: Evaluations of a scrambled Sobol design to start from.
        num_evaluations: All evaluations.
        seed: Of the design and of everything after it.
        noisy: Whether to propose by qLogNEI instead of LogEI.
        on_step: Called after every evaluation.
    """
    bounds = problem.bounds.double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        X = draw_sobol_samples(bounds, n=num_initial, q=1, seed=seed).squeeze(-2)
        if surrogate is None:
            unit = torch.rand(
                num_evaluations - num_initial, bounds.size(-1), dtype=torch.float64
            )
            X = torch.cat([X, bounds[0] + (bounds[1] - bounds[0]) * unit])
            Y = problem(X).unsqueeze(-1)
        else:
            Y = problem(X).unsqueeze(-1)
            model = surrogate(X, Y, bounds)
            while X.size(0) < num_evaluations:
                new_X = propose(model.model, X, Y, bounds, noisy, seed + X.size(0))
                new_Y = problem(new_X).unsqueeze(-1)
                model.tell(new_X, new_Y)
                X, Y = torch.cat([X, new_X]), torch.cat([Y, new_Y])
                if on_step is not None:
                    on_step()
    return problem.optimal_value - Y.squeeze(-1).cummax(0).values


Case = tuple[BaseTestProblem, int, int, int]


def cases() -> dict[str, Case]:
    """Problems, evaluations at first and in all, and inducing points: fewer."""
    return {
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
    """Final simple regret by qLogNEI.

    The streaming model has three inducing points for every four evaluations. LogEI
    would not do: with inferred noise it stalls beside its incumbent, for either model.

    Args:
        name: Of :func:`cases`.
        method: Of streaming, exact and random.
        seed: Of the design and of everything after it.
        num_evaluations: If not those of the problem.
        num_steps: Budget of the inner loop of each update.
    """
    problem, num_initial, total, num_inducing = cases()[name]
    total = num_evaluations or total

    def streaming(X: Tensor, Y: Tensor, bounds: Tensor) -> Streaming:
        return Streaming(X, Y, bounds, num_inducing, num_steps)

    surrogate = {STREAMING: streaming, EXACT: Refit, RANDOM: None}[method]
    start = time.process_time()
    trace = optimise(problem, surrogate, num_initial, total, seed, noisy=True)
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
        streaming, exact = _cost_jobs(size, num_inducing)
        jobs |= {(STREAMING, size): streaming, ("exact refit", size): exact}
    medians = median_times(jobs, repeats, time.process_time)
    return [
        {
            "table": "cost",
            "case": f"{size} evaluations",
            "method": method,
            "seconds": medians[method, size],
            "ratio": medians[method, size] / medians["exact refit", size],
        }
        for method in (STREAMING, "exact refit")
        for size in sizes
    ]


def _cost_jobs(
    size: int, num_inducing: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """What both models do after so many evaluations."""
    problem = Hartmann(dim=6, negate=True)
    generator = torch.Generator().manual_seed(size)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, 6, dtype=torch.float64, generator=generator)

    X, new_X = draw(size), draw(1)
    Y, new_Y = (problem(x).unsqueeze(-1) for x in (X, new_X))
    model = SingleTaskStreamingGP(X[:100], Y[:100], num_inducing=num_inducing)
    model.fit(num_steps=50)
    for first in range(100, size, 100):
        model.update(X[first : first + 100], Y[first : first + 100], num_steps=10)
    state = model.state_dict()
    exact = SingleTaskGP(X, Y)
    copy_hyperparameters(model, exact)
    exact_state = {k: v for k, v in exact.state_dict().items() if "outcome" not in k}

    def acquire(model: Model) -> None:
        acquisition = LogExpectedImprovement(model, best_f=Y.max())
        x = draw(64, 1)
        for _ in range(10):
            x = x.detach().requires_grad_()
            acquisition(x).sum().backward()

    def update() -> None:
        model = SingleTaskStreamingGP(X[:2], Y[:2], num_inducing=num_inducing)
        model.load_state_dict(state)
        # No plateau: the same work at every size.
        model.update(new_X, new_Y, num_steps=19)
        acquire(model)

    def refit() -> None:
        model = SingleTaskGP(torch.cat([X, new_X]), torch.cat([Y, new_Y]))
        torch.nn.Module.load_state_dict(model, exact_state, strict=False)
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        options = {"options": {"maxiter": 5}}
        with warnings.catch_warnings():
            # Five steps are no convergence, and are not meant to be.
            warnings.simplefilter("ignore", OptimizationWarning)
            fit_gpytorch_mll(mll, optimizer_kwargs=options, max_attempts=1)
        acquire(model)

    return update, refit


def copy_hyperparameters(source: SingleTaskStreamingGP, target: SingleTaskGP) -> None:
    """Give the exact model the hyperparameters of the streaming one."""
    ours = dict(source.model.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(ours[name])


def fantasies(num_inducing: int = 50, repeats: int = 7) -> list[Row]:
    """16 x 5 x q fantasies in one call against one by one."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    X = draw(num_inducing, 6)
    model = SingleTaskStreamingGP(X, torch.sin(5 * X).sum(-1, keepdim=True))
    test_X = draw(8, 6)
    rows = []
    for q in (1, 4):
        new_X, new_Y = draw(5, q, 6), draw(16, 5, q, 1)

        def batched(new_X: Tensor = new_X, new_Y: Tensor = new_Y) -> Tensor:
            return model.condition_on_observations(new_X, new_Y).posterior(test_X).mean

        def loop(new_X: Tensor = new_X, new_Y: Tensor = new_Y) -> Tensor:
            means = [
                model.condition_on_observations(new_X[j], new_Y[i, j])
                .posterior(test_X)
                .mean
                for i in range(16)
                for j in range(5)
            ]
            return torch.stack(means).unflatten(0, (16, 5))

        torch.testing.assert_close(batched(), loop())
        jobs = {"batched": batched, "loop": loop}
        medians = median_times(jobs, repeats, time.process_time)
        rows.append(
            {
                "table": "fantasies",
                "case": f"16 x 5 x {q}",
                "inducing": num_inducing,
                "batched_ms": 1e3 * medians["batched"],
                "loop_ms": 1e3 * medians["loop"],
                "ratio": medians["loop"] / medians["batched"],
            }
        )
    return rows


# ----------------------------------------------------------------------- the command


MEASURED = {"fantasies": fantasies, "cost": cost}
TABLES = (*MEASURED, "versions", "regret")


def run(
    out: Path,
    tables: Iterable[str],
    *,
    old: Path | None = None,
    problems: Iterable[str] = ("Hartmann-6",),
    seeds: int = 10,
    again: bool = False,
) -> list[Row]:
    """All rows that are not in the file yet; the file after every one of them.

    Args:
        out: The file.
        tables: Of :data:`TABLES`.
        old: Folder of the version to compare with.
        problems: Of the regret.
        seeds: Of the regret.
        again: Whether to run what is in the file, too.

    Returns:
        The rows of these tables.
    """
    tables = list(tables)
    table = Table(out, NAMES, header(others=["botorch"]))
    now = table.header["torch_ssgp"]

    def stale(row: Row) -> bool:
        fixed = row["version"] == now or row.get("method") in (EXACT, RANDOM)
        return row["table"] in tables and (again or not fixed)

    table.drop(stale)
    done = {row["table"] for row in table.rows().values()}
    for name in [name for name in tables if name not in {"regret", *done}]:
        for row in versions(old) if name == "versions" else MEASURED[name]():
            table.add(row)
    if "regret" in tables:
        keys = itertools.product(problems, (STREAMING, EXACT, RANDOM), range(seeds))
        table.run({("regret", *key): partial(regret, *key) for key in keys})
    return [row for row in table.rows().values() if row["table"] in tables]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "tables",
        nargs="*",
        choices=[*TABLES, []],
        default=[],
        metavar="table",
        help="fantasies, cost, versions, regret; by default all but versions",
    )
    parser.add_argument(
        "--out",
        "--json",
        type=Path,
        default=Path("out/bayesopt.json"),
        help="where results are kept (out/bayesopt.json)",
    )
    parser.add_argument("--old", type=Path, help="folder of a version to compare with")
    parser.add_argument("--seeds", type=positive, default=10, help="of regret (10)")
    parser.add_argument(
        "--problems", nargs="+", choices=list(cases()), default=["Hartmann-6"]
    )
    parser.add_argument("--again", action="store_true", help="replace rows of the file")
    chosen = parser.parse_args(arguments)
    tables = chosen.tables or [t for t in TABLES if t != "versions" or chosen.old]
    if "versions" in tables and chosen.old is None:
        parser.error("versions needs --old, the folder of a version to compare with.")
    torch.set_num_threads(1)
    with small_budget():
        rows = run(
            chosen.out,
            tables,
            old=chosen.old,
            problems=chosen.problems,
            seeds=chosen.seeds,
            again=chosen.again,
        )
    print(sections(rows))

"""Bayesian optimisation with a streaming surrogate: regret, cost and fantasies.

    python scripts/bench_bayesopt.py             all three tables
    python scripts/bench_bayesopt.py cost        one of regret, cost, fantasies

Regret is what is left to the known maximum, the same seeds and initial designs for
every method. Times are medians of repetitions in which the methods take turns; only
their ratios mean something.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
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

from common import write_json
from torch_ssgp.surrogates import SingleTaskStreamingGP

Row = dict[str, Any]


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
        # A line search that ends early still gives a candidate.
        warnings.simplefilter("ignore", OptimizationWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
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


def regret(
    seeds: int = 5, branin: int = 40, hartmann: int = 80, num_steps: int = 50
) -> list[Row]:
    """Final simple regret of streaming, exact and random search, by qLogNEI.

    Streaming with the default of 100 inducing points, more than there are evaluations,
    and with three for every four. LogEI would not do: with inferred noise it stalls
    beside its incumbent, for either model.
    """
    rows = []
    cases: list[tuple[str, BaseTestProblem, int, int, int]] = [
        ("Branin", Branin(negate=True), 6, branin, 3 * branin // 4),
        ("Hartmann-6", Hartmann(dim=6, negate=True), 12, hartmann, 3 * hartmann // 4),
    ]
    for name, problem, num_initial, num_evaluations, fewer in cases:

        def streaming(num_inducing: int) -> Surrogate:
            return lambda X, Y, bounds: Streaming(X, Y, bounds, num_inducing, num_steps)

        methods: list[tuple[str, int | str, Surrogate | None]] = [
            ("streaming", 100, streaming(100)),
            ("streaming", fewer, streaming(fewer)),
            ("exact", "", Refit),
            ("random", "", None),
        ]
        for method, num_inducing, surrogate in methods:
            start = time.perf_counter()
            final = [
                float(
                    optimise(
                        problem,
                        surrogate,
                        num_initial,
                        num_evaluations,
                        seed,
                        noisy=True,
                    )[-1]
                )
                for seed in range(seeds)
            ]
            rows.append(
                {
                    "problem": name,
                    "method": method,
                    "evaluations": num_evaluations,
                    "inducing": num_inducing,
                    "median_regret": statistics.median(final),
                    "best": min(final),
                    "worst": max(final),
                    "seconds_per_seed": (time.perf_counter() - start) / seeds,
                }
            )
            print_row(rows[-1])
    return rows


def cost(
    sizes: tuple[int, ...] = (200, 2000), num_inducing: int = 100, repeats: int = 5
) -> list[Row]:
    """One update and one acquisition after few and after many evaluations.

    Every method takes one new evaluation, learns its hyperparameters and proposes the
    next input; the streaming model takes the same number of steps each time. The exact
    model starts its fit from the hyperparameters it had.
    """
    problem = Hartmann(dim=6, negate=True)
    bounds = problem.bounds.double()
    jobs: dict[tuple[str, int], Callable[[], object]] = {}
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        X = torch.rand(size, 6, dtype=torch.float64, generator=generator)
        Y = problem(X).unsqueeze(-1)
        new_X = torch.rand(1, 6, dtype=torch.float64, generator=generator)
        new_Y = problem(new_X).unsqueeze(-1)
        model = SingleTaskStreamingGP(X[:100], Y[:100], num_inducing=num_inducing)
        model.fit(num_steps=50)
        for rows in torch.arange(100, size).split(100):
            model.update(X[rows], Y[rows], num_steps=10)
        state = model.state_dict()
        exact = SingleTaskGP(X, Y)
        copy_hyperparameters(model, exact)
        exact_state = {
            k: v for k, v in exact.state_dict().items() if "outcome" not in k
        }

        def streaming(
            X: Tensor = X,
            Y: Tensor = Y,
            new_X: Tensor = new_X,
            new_Y: Tensor = new_Y,
            state: Any = state,
        ) -> None:
            model = SingleTaskStreamingGP(X[:2], Y[:2], num_inducing=num_inducing)
            model.load_state_dict(state)
            # No plateau: the same work at every size.
            model.update(new_X, new_Y, num_steps=19)
            acquire(model, Y)

        def refit(
            X: Tensor = X,
            Y: Tensor = Y,
            new_X: Tensor = new_X,
            new_Y: Tensor = new_Y,
            state: Any = exact_state,
        ) -> None:
            model = SingleTaskGP(torch.cat([X, new_X]), torch.cat([Y, new_Y]))
            torch.nn.Module.load_state_dict(model, state, strict=False)
            mll = ExactMarginalLogLikelihood(model.likelihood, model)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", OptimizationWarning)
                fit_gpytorch_mll(
                    mll,
                    optimizer_kwargs={"options": {"maxiter": 5}},
                    max_attempts=1,
                )
            acquire(model, Y)

        def acquire(model: Model, Y: Tensor) -> None:
            acquisition = LogExpectedImprovement(model, best_f=Y.max())
            X = bounds[0] + torch.rand(
                64, 1, 6, dtype=torch.float64, generator=generator
            )
            for _ in range(10):
                X = X.detach().requires_grad_()
                acquisition(X).sum().backward()

        jobs["streaming", size] = streaming
        jobs["exact refit", size] = refit
    times: dict[tuple[str, int], list[float]] = {key: [] for key in jobs}
    for repeat in range(repeats + 1):
        for key, job in jobs.items():
            start = time.perf_counter()
            job()
            if repeat:
                times[key].append(time.perf_counter() - start)
    medians = {key: statistics.median(values) for key, values in times.items()}
    rows = []
    for method in ("streaming", "exact refit"):
        first = medians[method, sizes[0]]
        for size in sizes:
            rows.append(
                {
                    "method": method,
                    "evaluations": size,
                    "seconds": medians[method, size],
                    "ratio": medians[method, size] / first,
                }
            )
            print_row(rows[-1])
    return rows


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
        times: dict[str, list[float]] = {"batched": [], "loop": []}
        for _ in range(repeats):
            for name, job in (("batched", batched), ("loop", loop)):
                start = time.perf_counter()
                job()
                times[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(values) for name, values in times.items()}
        rows.append(
            {
                "fantasies": f"16 x 5 x {q}",
                "inducing": num_inducing,
                "batched_ms": 1e3 * medians["batched"],
                "loop_ms": 1e3 * medians["loop"],
                "ratio": medians["loop"] / medians["batched"],
            }
        )
        print_row(rows[-1])
    return rows


TABLES: dict[str, Callable[[], list[Row]]] = {
    "fantasies": fantasies,
    "cost": cost,
    "regret": regret,
}


def run(*names: str) -> dict[str, list[Row]]:
    """Run and print some of the tables, or all.

    Args:
        *names: Of ``fantasies``, ``cost`` and ``regret``.

    Returns:
        The rows by table.
    """
    results = {}
    for name in names or tuple(TABLES):
        print(f"-- {name}")
        results[name] = TABLES[name]()
    return results


def print_row(row: Row) -> None:
    """One line of a table."""
    cells = [
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
        if value != ""
    ]
    print("  " + ", ".join(cells), flush=True)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], default=[])
    parser.add_argument(
        "--out", "--json", type=Path, help="write the rows to this file as JSON"
    )
    chosen = parser.parse_args(arguments)
    results = run(*chosen.tables)
    if chosen.out is not None:
        write_json(chosen.out, results)


if __name__ == "__main__":
    main()

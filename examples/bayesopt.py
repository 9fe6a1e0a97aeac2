"""Bayesian optimisation of Hartmann-6 with a surrogate that sees every value once.

The streaming model takes each evaluation as it comes, with fewer inducing points than
there are evaluations; BoTorch's exact model is fitted again on all of them. Run
``python examples/bayesopt.py``: prints a table, saves out/bayesopt.png.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from botorch.acquisition import qKnowledgeGradient, qLogNoisyExpectedImprovement
from botorch.exceptions.warnings import OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import Hartmann
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from tqdm import trange

from torch_ssgp.plotting import require_pyplot
from torch_ssgp.surrogates import SingleTaskStreamingGP

Learn = Callable[[Tensor, Tensor], Model]
Propose = Callable[[Model, Tensor, Tensor], Tensor]


def streaming(num_inducing: int, num_steps: int) -> Learn:
    """A learner that hands only the newest evaluation to its model."""
    model: SingleTaskStreamingGP | None = None

    def learn(X: Tensor, Y: Tensor) -> Model:
        nonlocal model
        if model is None:
            model = SingleTaskStreamingGP(X, Y, num_inducing=num_inducing)
            model.fit()
        else:
            # Standardised by all outcomes so far: the memory is rescaled exactly.
            model.update(X[-1:], Y[-1:], restandardize=True, num_steps=num_steps)
        return model

    return learn


def exact(X: Tensor, Y: Tensor) -> Model:
    """An exact model of all evaluations."""
    model = SingleTaskGP(X, Y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def noisy_improvement(model: Model, X: Tensor, bounds: Tensor) -> Tensor:
    """The next input by qLogNEI."""
    acquisition = qLogNoisyExpectedImprovement(
        model,
        X_baseline=X,
        sampler=SobolQMCNormalSampler(torch.Size([64])),
        prune_baseline=True,
    )
    return optimize_acqf(
        acquisition,
        bounds,
        q=1,
        num_restarts=3,
        raw_samples=64,
        options={"maxiter": 50},
    )[0]


def knowledge_gradient(model: Model, X: Tensor, bounds: Tensor) -> Tensor:
    """The next input by the knowledge gradient: fantasies, optimised jointly."""
    return optimize_acqf(
        qKnowledgeGradient(model, num_fantasies=8),
        bounds,
        q=1,
        num_restarts=2,
        raw_samples=32,
        options={"maxiter": 20},
    )[0]


def optimise(
    name: str,
    learn: Learn | None,
    propose: Propose,
    num_initial: int,
    num_evaluations: int,
    seed: int,
) -> Tensor:
    """Regret after every evaluation, ``(num_evaluations,)``; random without a model."""
    problem = Hartmann(dim=6, negate=True)
    bounds = problem.bounds.double()
    torch.manual_seed(seed)
    X = draw_sobol_samples(bounds, n=num_initial, q=1, seed=seed).squeeze(-2)
    Y = problem(X).unsqueeze(-1)
    for _ in trange(num_evaluations - num_initial, desc=name, leave=False):
        if learn is None:
            new_X = torch.rand(1, 6, dtype=torch.float64)
        else:
            new_X = propose(learn(X, Y), X, bounds)
        X, Y = torch.cat([X, new_X]), torch.cat([Y, problem(new_X).unsqueeze(-1)])
    return problem.optimal_value - Y.squeeze(-1).cummax(0).values


def main(
    num_evaluations: int = 60,
    num_initial: int = 12,
    num_inducing: int = 45,
    num_steps: int = 50,
    seeds: int = 1,
    out: str | Path = "out",
) -> dict[str, Tensor]:
    """Optimise by every method.

    Args:
        num_evaluations: Evaluations of the objective by each method.
        num_initial: How many of them come from a Sobol design.
        num_inducing: Inducing points of the streaming models.
        num_steps: Budget of the inner loop of each update.
        seeds: Number of repetitions.
        out: Folder for the figure.

    Returns:
        Regret by method, ``(seeds, num_evaluations)``.
    """
    methods: dict[str, tuple[Callable[[], Learn | None], Propose]] = {
        "random search": (lambda: None, noisy_improvement),
        "exact, qLogNEI": (lambda: exact, noisy_improvement),
        "streaming, qLogNEI": (
            lambda: streaming(num_inducing, num_steps),
            noisy_improvement,
        ),
        "streaming, KG": (
            lambda: streaming(num_inducing, num_steps),
            knowledge_gradient,
        ),
    }
    regrets = {}
    print(f"{'method':>20} {'regret':>8} {'seconds':>8}")
    for name, (make, propose) in methods.items():
        start = time.perf_counter()
        with warnings.catch_warnings():
            # A search for a candidate that ends early has still found one.
            warnings.simplefilter("ignore", OptimizationWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            runs = [
                optimise(name, make(), propose, num_initial, num_evaluations, seed)
                for seed in range(seeds)
            ]
        regrets[name] = torch.stack(runs)
        seconds = (time.perf_counter() - start) / seeds
        median = regrets[name][:, -1].median()
        print(f"{name:>20} {median:8.4f} {seconds:8.1f}", flush=True)
    path = Path(out) / "bayesopt.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    plot(regrets, num_initial, path)
    print(f"figure: {path}")
    return regrets


def plot(regrets: dict[str, Tensor], num_initial: int, path: Path) -> None:
    """Regret against evaluations: the median, and all seeds where there are more."""
    figure, ax = require_pyplot().subplots(figsize=(7, 4.5))
    for color, (name, values) in enumerate(regrets.items()):
        evaluations = torch.arange(1, values.size(-1) + 1)
        middle = values.quantile(0.5, 0)
        ax.semilogy(evaluations, middle, color=f"C{color}", label=name)
        if values.size(0) > 1:
            low, high = values.amin(0), values.amax(0)
            ax.fill_between(evaluations, low, high, color=f"C{color}", alpha=0.12)
    ax.axvline(num_initial, color="0.7", linestyle=":", label="end of the Sobol design")
    ax.set_xlabel("evaluations")
    ax.set_ylabel("simple regret")
    ax.set_title("Hartmann-6")
    ax.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-evaluations", type=int, default=60)
    parser.add_argument("--num-inducing", type=int, default=45)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", default="out")
    arguments = parser.parse_args()
    main(
        num_evaluations=arguments.num_evaluations,
        num_inducing=arguments.num_inducing,
        seeds=arguments.seeds,
        out=arguments.out,
    )

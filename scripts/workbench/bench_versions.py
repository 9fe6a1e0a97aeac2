"""This version of the package against another: CPU time of a surrogate's work.

    python scripts/benchmark.py bayesopt versions --old PATH

Each version runs in a process of its own, started with its folder on the path, and
times a job whenever it is asked to.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from botorch.acquisition import LogExpectedImprovement, qKnowledgeGradient
from botorch.test_functions import Hartmann
from torch import Tensor

from torch_ssgp.surrogates import SingleTaskStreamingGP
from workbench.common import ROOT
from workbench.results import Row

SCRIPTS = ROOT / "scripts"


def timed_jobs(num_inducing: int) -> dict[str, Callable[[], object]]:
    """What is timed of one version, on a model that saw 240 evaluations.

    Args:
        num_inducing: Its inducing points, all in use.
    """
    problem = Hartmann(dim=6, negate=True)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    X = draw(240, 6)
    Y = problem(X).unsqueeze(-1)
    model = SingleTaskStreamingGP(X[:120], Y[:120], num_inducing=num_inducing)
    model.covar_module.lengthscale = 0.5
    model.likelihood.noise = 1e-3
    for rows in torch.arange(120, 240).split(40):
        model.update(X[rows], Y[rows], num_steps=0)
    model.fit(num_steps=1)  # later updates are not the first that learns
    assert model.inducing_points.size(-2) == num_inducing
    test_X, one = draw(8, 6), (draw(1, 6), draw(1, 1))
    many = (draw(5, 4, 6), draw(16, 5, 4, 1))
    start, candidates = draw(4, 1 + 8, 6), draw(64, 1, 6)
    new_X = draw(1, 6)
    new_Y = problem(new_X).unsqueeze(-1)
    state = model.state_dict()

    def condition(X: Tensor, Y: Tensor) -> object:
        return model.condition_on_observations(X, Y).posterior(test_X).mean

    def ascend(acquisition: Any, X: Tensor) -> object:
        X = X.clone().requires_grad_()
        return torch.autograd.grad(acquisition(X).sum(), X)

    def update() -> object:
        model.load_state_dict(state)
        return model.update(new_X, new_Y, num_steps=19)

    gradient = qKnowledgeGradient(model, num_fantasies=8)
    improvement = LogExpectedImprovement(model, best_f=Y.max())
    return {
        "posterior, with gradients": lambda: ascend(improvement, candidates),
        "conditioning on one": lambda: condition(*one),
        "16 x 5 x 4 fantasies": lambda: condition(*many),
        "knowledge gradient": lambda: ascend(gradient, start),
        "update of 19 steps": update,  # the last: it changes the model
    }


def serve(num_inducing: int) -> None:
    """Time jobs whose names come in; what is timed is the version of this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    jobs = timed_jobs(num_inducing)
    print(json.dumps(list(jobs)), flush=True)
    for line in sys.stdin:
        start = time.process_time()
        jobs[json.loads(line)]()
        print(json.dumps(time.process_time() - start), flush=True)


class Worker:
    """A process with a version of the package, which times jobs when asked to."""

    def __init__(self, path: Path, num_inducing: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "workbench.bench_versions", str(num_inducing)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(path), str(SCRIPTS)]),
                "OMP_NUM_THREADS": "1",
            },
            cwd=path,  # the first place where Python looks
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.names: list[str] = self._answer()

    def seconds(self, name: str) -> float:
        """CPU time of a job."""
        assert self.process.stdin is not None
        print(json.dumps(name), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("A process that was to time a version has ended.")
        return json.loads(line)


@contextmanager
def workers(paths: Iterable[Path], num_inducing: int) -> Iterator[list[Worker]]:
    """Processes, one for every version, that end with the block."""
    running: list[Worker] = []
    try:
        for path in paths:
            running.append(Worker(path, num_inducing))
        yield running
    finally:
        for worker in running:
            with worker.process:
                worker.process.kill()


def versions(
    old: Path, sizes: tuple[int, ...] = (60, 100), rounds: int = 4, repeats: int = 20
) -> list[Row]:
    """CPU time of this version against another, job by job, in turns.

    Of each the fastest repetition counts: others may use the machine, and where its
    memory happens to lie makes one process faster than the next.

    Args:
        old: The folder of the other version.
        sizes: Numbers of inducing points.
        rounds: Pairs of processes, one after the other.
        repeats: Of every job, in each.
    """
    rows = []
    for num_inducing in sizes:
        best: dict[str, list[float]] = {}
        for _ in range(rounds):
            with workers([ROOT, old], num_inducing) as pair:
                for name, _ in itertools.product(pair[0].names, range(repeats)):
                    seconds = [worker.seconds(name) for worker in pair]
                    known = best.get(name, seconds)
                    best[name] = list(map(min, known, seconds))
        for name, (new, other) in best.items():
            rows.append(
                {
                    "table": "versions",
                    "case": f"{num_inducing} inducing points",
                    "method": name,
                    "ms": 1e3 * new,
                    "old_ms": 1e3 * other,
                    "ratio": new / other,
                }
            )
    return rows


if __name__ == "__main__":
    serve(int(sys.argv[1]))

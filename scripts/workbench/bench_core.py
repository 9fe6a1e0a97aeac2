"""Cost of an update and of choosing inducing points, as ratios.

Absolute times depend on the machine; ratios within one run do not, as far as that is
possible. Every time is the median of repetitions that alternate with its floor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor
from tqdm import tqdm

from torch_ssgp import (
    AdaptiveBudget,
    GreedyInformation,
    GreedyVariance,
    InducingPolicy,
    StreamingGP,
)
from torch_ssgp.update import UpdateOptions
from torch_ssgp.update.ascent import Adam, Ascent
from torch_ssgp.update.coordinates import coordinates
from torch_ssgp.update.objective import Objective
from torch_ssgp.update.walk import Update
from workbench.results import Row

Name = TypeVar("Name")


def median_times(
    jobs: Mapping[Name, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, float]:
    """Median seconds of each job; the jobs take turns, so drifts hit all alike."""
    for job in jobs.values():
        job()
    times: dict[Name, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            start = clock()
            job()
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def stream_state(
    m: int,
    n: int,
    batch_shape: tuple[int, ...],
    memory_size: int | None = None,
    device: torch.device | str = "cpu",
    lengthscale: float = 0.2,
) -> Any:
    """A model in mid-stream with ``m`` inducing points, and the next batch.

    Args:
        m: The number of inducing points.
        n: Data of an update.
        batch_shape: Shape of independent streams.
        memory_size: Points of the memory, all in use; ``m`` by default.
        device: The device to run on.
        lengthscale: That of the kernel; inputs are in the unit square.
    """
    size = m if memory_size is None else memory_size
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.rand(*shape, dtype=torch.float64, generator=generator)
        return values.to(device)

    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    kernel.base_kernel.lengthscale, kernel.outputscale = lengthscale, 1.0
    model = StreamingGP(
        kernel, num_inducing=m, memory_size=size, batch_shape=torch.Size(batch_shape)
    ).double()
    model.likelihood.noise = 0.1
    model.to(device)
    z, x = draw(*batch_shape, m, 2), draw(*batch_shape, n, 2)
    y = torch.sin(6 * x.sum(-1))
    model.update(x, y, num_steps=0, inducing_points=z, forget=1.0)
    while size > m and (model.memory.num_raw or model.memory.num_points < size):
        more = draw(*batch_shape, 2 * size, 2)
        model.update(
            more,
            torch.sin(6 * more.sum(-1)),
            num_steps=0,
            inducing_points=z,
            forget=1.0,
        )
    return model, x, y, z


def next_update(model: StreamingGP, x: Tensor, y: Tensor) -> Update:
    """The next update of a model, before it began."""
    data = model.check_data(x, y, None)
    # With all of the past: data that surprise it would be timed without any.
    options = UpdateOptions(forget=1.0)
    return Update(model.known(data), data, options, model.limits(data))


def gradient_step(update: Update, z: Tensor) -> tuple[Objective, Callable[[], None]]:
    """The objective of an update at ``z``, and one step of its inner loop."""
    objective = update.objective()
    objective.start_at(z, learn=True)
    ascent = Ascent(objective, coordinates(objective, True, True), None)
    optimizer = Adam(ascent.eta)

    def step() -> None:
        ascent.loss()
        optimizer.step(1e-4)

    return objective, step


def core_row(m: int, n: int, batch: int, repeats: int) -> Row:
    """Closed-form update and gradient step against one GEMM and one Cholesky."""
    model, x, y, z = stream_state(m, n, (batch,) if batch > 1 else ())
    A = torch.randn(*x.shape[:-2], m, n, dtype=torch.float64)
    eye = torch.eye(m, dtype=torch.float64)

    _, step = gradient_step(next_update(model, x, y), z)
    times = median_times(
        {
            "floor": lambda: torch.linalg.cholesky(A @ A.mT / n + eye),
            "closed form": lambda: model.update(
                x, y, num_steps=0, inducing_points=z, forget=1.0
            ),
            "gradient step": step,
        },
        repeats,
    )
    floor = times["floor"]
    return {
        "M": m,
        "N": n,
        "batch": batch,
        "floor_ms": 1e3 * floor,
        "closed_form_ratio": times["closed form"] / floor,
        "gradient_step_ratio": times["gradient step"] / floor,
    }


def batching_row(
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
    device: torch.device | str = "cpu",
) -> Row:
    """One update of 32 streams against 32 updates, at M = 50, N = 100."""
    model, x, y, z = stream_state(50, 100, (32,), device=device)
    single, x1, y1, z1 = stream_state(50, 100, (), device=device)

    def loop() -> None:
        for _ in range(32):
            single.update(x1, y1, num_steps=0, inducing_points=z1, forget=1.0)

    times = median_times(
        {
            "batched": lambda: model.update(
                x, y, num_steps=0, inducing_points=z, forget=1.0
            ),
            "loop": loop,
        },
        repeats,
        clock,
    )
    return {"speedup_of_batching_32": times["loop"] / times["batched"]}


def core(repeats: int = 15) -> list[Row]:
    """Cost of an update, as ratios to what no implementation can avoid."""
    sizes = [(100, 300), (200, 500), (600, 1000)]
    cases = [(m, n, b) for b in (1, 32) for m, n in sizes]
    rows = []
    for m, n, b in tqdm(cases, desc="core"):
        # The largest case takes a second a piece; the median needs few of them.
        few = 2 if m * n * b > 3e6 else repeats
        rows.append(core_row(m, n, b, few))
    rows.append(batching_row(repeats))
    return rows


def choice_row(m: int, n: int, repeats: int) -> Row:
    """Choosing inducing points, in units of one gradient step; five are allowed."""
    model, x, y, z = stream_state(m, n, ())
    update = next_update(model, x, y)
    objective, step = gradient_step(update, z)

    def choose(policy: InducingPolicy) -> Callable[[], Tensor]:
        return torch.no_grad()(lambda: policy(update.points.candidates(objective)))

    policies = (GreedyInformation(), GreedyVariance(), AdaptiveBudget())
    jobs = {type(policy).__name__: choose(policy) for policy in policies}
    times = median_times({"step": step, **jobs}, repeats)
    ratios = {f"{name} / step": times[name] / times["step"] for name in jobs}
    return {"M": m, "N": n, **ratios}


def choice(repeats: int = 15) -> list[Row]:
    """Cost of choosing inducing points."""
    return [choice_row(m, n, repeats) for m, n in [(100, 300), (200, 500), (400, 750)]]

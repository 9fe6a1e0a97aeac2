"""Streams x policies x seeds: what each way to choose inducing points ends with.

    python scripts/bench_policies.py --data-dir DIR --out docs/data/policies.json

Every row is one run with default settings, or the batch model of the same size that
has all training data at once. Rows already in the file are not run again, so a run can
be interrupted and resumed, and split over processes by ``--streams``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from tqdm import tqdm

import streams
from streams import Stream
from torch_ssgp import StreamingGP

Row = dict[str, Any]
Make = Callable[[int, Path | None], Stream]


class Case(NamedTuple):
    """A stream, its budget, and whether a seed changes the data.

    Attributes:
        make: From a seed and the directory of the data to the stream.
        num_inducing: Budget of inducing points.
        seeded: Whether the data depend on the seed; otherwise only policies that
            draw random numbers are repeated.
    """

    make: Make
    num_inducing: int
    seeded: bool


CASES: dict[str, Case] = {
    "pseudo-periodic": Case(lambda *_: streams.pseudo_periodic(), 100, False),
    "pseudo-periodic M=200": Case(lambda *_: streams.pseudo_periodic(), 200, False),
    "audio M=100": Case(lambda *_: streams.audio(), 100, False),
    "audio M=200": Case(lambda *_: streams.audio(), 200, False),
    "terrain": Case(lambda *_: streams.terrain(), 400, False),
    "terrain OS": Case(lambda _, d: streams.terrain_os(d), 400, False),
    "bike": Case(lambda k, d: streams.uci("bike_noleak", d, split=k), 200, True),
    "elevators": Case(lambda k, d: streams.uci("elevators", d, split=k), 200, True),
    "kin40k": Case(lambda k, d: streams.uci("kin40k", d, split=k), 200, True),
    "growing range": Case(lambda k, _: streams.growing_range(seed=k), 250, True),
    "revisiting": Case(lambda k, _: streams.revisiting(seed=k), 100, True),
}


def new_model(stream: Stream, num_inducing: int, **options: Any) -> StreamingGP:
    """The model all policies share: a smooth kernel with a lengthscale per input."""
    num_dims = stream.x_test.size(-1)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=num_dims if num_dims > 1 else None))
    return StreamingGP(kernel, num_inducing=num_inducing, **options).double()


def accuracy(model: StreamingGP, stream: Stream) -> Row:
    """RMSE and mean log-likelihood on all test points."""
    prediction = model.predict(stream.x_test)
    density = torch.distributions.Normal(prediction.mean, prediction.stddev)
    return {
        "RMSE": (prediction.mean - stream.y_test).square().mean().sqrt().item(),
        "MLL": density.log_prob(stream.y_test).mean().item(),
    }


def run_batch(stream: Stream, num_inducing: int, num_steps: int = 300) -> Row:
    """The ceiling: all training data at once, all of Z free, L-BFGS."""
    start = time.perf_counter()
    model = new_model(stream, num_inducing)
    x, y = stream.x_train, stream.y_train
    # Adam first finds the basin that L-BFGS then descends.
    model.update(x, y, num_steps=50)
    z = model.summary.inducing_points
    model.summary = type(model.summary)()
    result = model.update(
        x, y, num_steps=num_steps, optimizer="lbfgs", inducing_points=z
    )
    return {
        **accuracy(model, stream),
        "M": model.summary.num_inducing,
        "seconds": time.perf_counter() - start,
        "converged": result.converged,
    }

"""A stream of single points: what an update costs, and how well it predicts."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from torch_ssgp import StreamingGP
from workbench.results import Row

UPDATES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "learning at every tenth point": {"learn_hyperparameters": 10},
}
COMPARED = tuple(UPDATES)
NOISE = 0.1
EVERY = 50  # points between two looks at the peer


def rows(
    peer: Callable[[], object], count: int, clock: Callable[[], float], like: Tensor
) -> list[Row]:
    """One row for every way to update; the peer is timed in between.

    Args:
        peer: A single point more for a peer.
        count: Points of the stream.
        clock: Seconds.
        like: Inputs of the dtype and device to run on.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 2, dtype=torch.float64, generator=generator)
    noise = torch.randn(count, dtype=torch.float64, generator=generator)
    y = torch.sin(6 * x.sum(-1)) + NOISE * noise
    x, y = x.to(like), y.to(like)
    models = {name: _new_model(like) for name in UPDATES}
    spent = dict.fromkeys(UPDATES, 0.0)
    errors: dict[str, list[Tensor]] = {name: [] for name in UPDATES}
    learned = dict.fromkeys(UPDATES, 0)
    peers: list[float] = []
    for i in range(count):
        for name, model in models.items():
            if i:
                with torch.no_grad():
                    ahead = model(x[i : i + 1]).mean
                errors[name].append((ahead - y[i : i + 1]).square())
            start = clock()
            result = model.update(x[i : i + 1], y[i : i + 1], **UPDATES[name])
            spent[name] += clock() - start
            learned[name] += bool(result.num_steps)
        if i % EVERY == 0:
            start = clock()
            peer()
            peers.append(clock() - start)
    unit = statistics.median(peers)
    return [
        {
            "table": "points",
            "updates": name,
            "points": count,
            "ms": 1e3 * spent[name] / count,
            "times get_fantasy_model": spent[name] / count / unit,
            "RMSE one step ahead": torch.cat(errors[name]).mean().sqrt().item(),
            "updates that learned": learned[name],
        }
        for name in UPDATES
    ]


def _new_model(like: Tensor) -> StreamingGP:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    return StreamingGP(kernel, num_inducing=100).to(like)

"""What recipes for Ray and Spark share: one site's work, as a function of bytes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from torch_ssgp import StreamingGP, branch, merge

GRID = torch.linspace(0, 11, 200)


def new_model() -> StreamingGP:
    """A model that has seen nothing."""
    return StreamingGP(ScaleKernel(RBFKernel()), num_inducing=30)


def shard(site: int, hour: int, num: int = 100) -> tuple[Tensor, Tensor]:
    """What a site measures in an hour."""
    generator = torch.Generator().manual_seed(100 * hour + site)
    x = 3.5 * site + 4 * torch.rand(num, generator=generator)
    return x, x.sin() + 0.1 * torch.randn(num, generator=generator)


def work(state: bytes, batches: Iterable[tuple[Tensor, Tensor]]) -> bytes:
    """Continue a model on a site's own data; runs anywhere, knows no framework."""
    torch.set_num_threads(1)
    model = branch(pickle.loads(state))
    for x, y in batches:
        model.update(x, y, num_steps=30)
    return pickle.dumps(model)


def joined(states: Iterable[bytes], base: bytes) -> bytes:
    """One model that knows what all of them saw."""
    torch.set_num_threads(1)
    models = [pickle.loads(state) for state in states]
    return pickle.dumps(merge(models, base=pickle.loads(base)))


def difference(state: bytes, other: bytes) -> float:
    """How far the predictions of two models are apart."""
    one, two = (pickle.loads(each)(GRID) for each in (state, other))
    apart = [one.mean - two.mean, one.variance - two.variance]
    return torch.stack(apart).abs().max().item()


def report(hour: int, state: bytes) -> str:
    """How good the joined model is, and how large."""
    model = pickle.loads(state)
    error = (model(GRID).mean - GRID.sin()).square().mean().sqrt()
    return (
        f"hour {hour}: {int(model.memory.num_data)} data, RMSE {error:.3f}, "
        f"{len(state):,} bytes"
    )

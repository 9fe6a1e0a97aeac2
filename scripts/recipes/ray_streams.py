"""A thousand keyed streams on Ray actors, which are moved while they run.

    pip install 'torch_ssgp[ray]' && python scripts/recipes/ray_streams.py

Every actor holds the models of its keys. Halfway one actor is killed, and its streams
go on in a new one, from the states that were saved after the last round. In the end
some streams are compared with the same ones in one process.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Iterable

import ray
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from torch_ssgp import StreamingGP

GRID = torch.linspace(0, 6, 20)


def batch(key: int, turn: int, num: int = 10) -> tuple[Tensor, Tensor]:
    """What a stream measures in a turn; each has a phase of its own."""
    generator = torch.Generator().manual_seed(1_000_003 * turn + key)
    x = 6 * torch.rand(num, generator=generator)
    return x, (x + key).sin() + 0.1 * torch.randn(num, generator=generator)


class Streams:
    """The models of some keys; knows no framework."""

    def __init__(self, states: dict[int, bytes] | None = None) -> None:
        torch.set_num_threads(1)
        self.models = {k: pickle.loads(s) for k, s in (states or {}).items()}

    def learn(self, keys: Iterable[int], turn: int) -> dict[int, bytes]:
        """A turn of some streams; the states they then have."""
        for key in keys:
            if key not in self.models:
                kernel = ScaleKernel(RBFKernel())
                self.models[key] = StreamingGP(kernel, num_inducing=20)
            x, y = batch(key, turn)
            self.models[key].update(x, y, num_steps=10)
        return {key: pickle.dumps(self.models[key]) for key in keys}

    def error(self, keys: Iterable[int]) -> float:
        """RMSE over all streams."""
        errors = [self.models[k](GRID).mean - (GRID + k).sin() for k in keys]
        return torch.cat(errors).square().mean().sqrt().item()


def difference(state: bytes, other: bytes) -> float:
    """How far the predictions of two models are apart."""
    one, two = (pickle.loads(each)(GRID) for each in (state, other))
    return (one.mean - two.mean).abs().max().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1_000)
    parser.add_argument("--turns", type=int, default=4)
    chosen = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False)
    remote = ray.remote(Streams)
    keys = [range(k, chosen.streams, 2) for k in range(2)]
    actors = [remote.remote() for _ in keys]
    states: list[dict[int, bytes]] = [{}, {}]
    start = time.perf_counter()
    for turn in range(chosen.turns):
        if turn == chosen.turns // 2:  # an actor is lost, and its streams move
            ray.kill(actors[1])
            actors[1] = remote.remote(states[1])
        states = ray.get(
            [a.learn.remote(k, turn) for a, k in zip(actors, keys, strict=True)]
        )
    seconds = time.perf_counter() - start
    ray.shutdown()

    every = {key: state for each in states for key, state in each.items()}
    size = sum(map(len, every.values())) / len(every)
    print(f"{len(every)} streams, {chosen.turns} turns, {seconds:.1f} s")
    print(f"{size:,.0f} bytes per stream, RMSE {Streams(every).error(every):.3f}")
    some, alone = list(range(min(chosen.streams, 20))), Streams()
    for turn in range(chosen.turns):
        expected = alone.learn(some, turn)
    apart = max(difference(expected[key], every[key]) for key in some)
    print(f"{len(some)} of them differ from one process by {apart:.1e}")

"""Models driven over streams, as every benchmark does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from torch_ssgp import StreamingGP
from workbench.baselines import CHUNK, normal_scores, small_budget
from workbench.results import Row
from workbench.streams import Stream

Batches = Iterable[tuple[Tensor, Tensor]]


class Run(NamedTuple):
    """What updates over a stream took.

    Attributes:
        sizes: Inducing points after every update.
        seconds: Of the processor.
        failure: What ended it early, if anything did.
    """

    sizes: list[int]
    seconds: float
    failure: str

    def row(self) -> Row:
        """The columns that all tables of streams have."""
        return {"cpu_seconds": self.seconds, "failure": self.failure}


def follow(update: Callable[[Tensor, Tensor], Any], batches: Batches) -> Run:
    """Update after update; a failure is a result as well.

    Args:
        update: ``model.update``, or something like it with other options.
        batches: ``(x, y)``, one after the other.
    """
    start, sizes, failure = time.process_time(), [], ""
    with small_budget():
        for x, y in tqdm(batches, desc="updates", leave=False):
            try:
                sizes.append(update(x, y).num_inducing)
            except Exception as error:  # what fails is part of the result
                failure = f"{type(error).__name__}: {error}"
                break
    return Run(sizes, time.process_time() - start, failure)


@torch.no_grad()
def scores(model: StreamingGP, stream: Stream, **options: bool) -> Row:
    """RMSE and mean log-likelihood on all test points; options of ``predict``."""
    parts = [model.predict(x, **options) for x in stream.x_test.split(CHUNK)]
    mean, variance = (
        torch.cat([getattr(part, name) for part in parts])
        for name in ("mean", "variance")
    )
    return normal_scores(mean, variance, stream.y_test)


@torch.no_grad()
def wrong_labels(model: StreamingGP, x: Tensor, y: Tensor) -> float:
    """Share of labels 0 and 1 that the sign of the latent mean gets wrong."""
    mean = torch.cat([model(part).mean for part in x.split(CHUNK)])
    return (mean.gt(0) != y.gt(0.5)).double().mean().item()

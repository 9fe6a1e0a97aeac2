"""Streams that change: ``forget="auto"`` beside fixed powers, and nothing that changes.

Cases of :mod:`workbench.bars`. Every batch is predicted, then learned.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from torch_ssgp import StreamingGP
from workbench import exact
from workbench.change_streams import Changing, make, still
from workbench.results import Row

AUTO, NOTHING = "auto", "λ = 1"
FIXED = {f"λ = {power:g}": power for power in (1.0, 0.99, 0.95, 0.9, 0.8, 0.5, 0.2)}
INDUCING = 30
BATCH = 20
BATCHES = 30
STEPS = 50
ALARM = 0.5  # powers below it are a beginning
LAST = 300  # readings of the exact model of a sensor
# Data in a batch, and batches, of streams in which nothing changes.
STILL = {1: 60, 3: 50, 10: 40, 30: 20, 100: 10, 1000: 5}
STILL_SEEDS = 20


class Size(NamedTuple):
    """How much of everything is run."""

    batches: int = BATCHES
    still: dict[int, int] = STILL
    still_seeds: int = STILL_SEEDS


def is_still(name: str) -> bool:
    """Whether nothing changes in a stream."""
    return name.startswith("stationary")


QUICK = Size(batches=6, still={1: 5, 10: 2}, still_seeds=1)


# -------------------------------------------------------------------------- streams


def stream_row(name: str, model: str, seed: int, size: Size) -> Row:
    """One model on one stream: errors of predictions before their data were learned."""
    torch.manual_seed(0)
    stream = make(name, size.batches, BATCH, seed)
    start = time.process_time()
    errors, alarms = streamed(model, stream)
    return {
        "data": size.batches * BATCH,
        "error": average(errors),
        "changes": stream.num_changes,
        "alarms": len(alarms),
        "at": alarms,
        "cpu_seconds": time.process_time() - start,
    }


def streamed(model: str, stream: Changing) -> tuple[list[float], list[int]]:
    """Errors of a streaming model by batch, and the batches at which it began anew."""
    kernel = ScaleKernel(RBFKernel(ard_num_dims=stream.x.size(-1)))
    likelihood = BernoulliLikelihood() if stream.is_labels else None
    gp = StreamingGP(kernel, likelihood, num_inducing=INDUCING).double()
    forget = FIXED.get(model, "auto")
    errors, alarms = [], []
    for k, (x, y, scale) in enumerate(stream.batches()):
        if k:
            mean = gp.predict(x).mean.detach()
            errors.append(error(mean, y, scale, stream.is_labels))
        result = gp.update(x, y, forget=forget, num_steps=STEPS)
        if model == AUTO and float(result.forgot) < ALARM:
            alarms.append(k)
    return errors, alarms


class Predictor(NamedTuple):
    """An exact model in units of its data."""

    gp: exact.Exact
    center: Tensor
    unit: Tensor

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        with exact.dense():
            return self.center + self.unit * self.gp(x).mean


def fit_exact(x: Tensor, y: Tensor, kernel: Any = None, steps: int = 30) -> Predictor:
    """Learn an exact model, targets standardized."""
    center, unit = y.mean(), y.std().clamp_min(1e-9)
    kernel = kernel or ScaleKernel(RBFKernel(ard_num_dims=x.size(-1)))
    with exact.dense():
        gp, _ = exact.run_exact([kernel], x, (y - center) / unit, num_steps=steps)
    return Predictor(gp, center, unit)


def error(mean: Tensor, y: Tensor, scale: float, is_labels: bool) -> float:
    """RMSE of a batch in units of the stream, or the share of wrong labels."""
    if is_labels:
        return float(((mean > 0.5) != (y > 0.5)).double().mean())
    return float((mean - y).square().mean().sqrt()) / scale


def average(values: list[float]) -> float:
    """The mean."""
    return sum(values) / len(values)


# ---------------------------------------------------------------------------- still


def still_row(batch: int, model: str, seed: int, size: Size) -> Row:
    """A stream in which nothing changes: its alarms, and how it ends."""
    torch.manual_seed(0)
    stream = still(batch, size.still[batch], seed)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=stream.x_test.size(-1)))
    gp = StreamingGP(kernel, num_inducing=INDUCING).double()
    start = time.process_time()
    forgot = [
        float(gp.update(x, y, forget=FIXED.get(model, "auto")).forgot)
        for x, y in stream.batches
    ]
    seconds = time.process_time() - start
    square = (gp(stream.x_test).mean.detach() - stream.f_test).square()
    return {
        "updates": len(forgot),
        "alarms": sum(power < ALARM for power in forgot),
        "faded": sum(ALARM <= power < 1 for power in forgot),
        "error": float(square.mean().sqrt()),
        "cpu_seconds": seconds,
    }


# --------------------------------------------------------------------------- sensor


def exact_ahead(t: Tensor, y: Tensor, step: int, begin: int, end: int) -> float:
    """RMSE one step ahead of an exact model of the last readings.

    Its hyperparameters are learned once, where the last tenth begins.
    """
    low = max(begin - LAST, 0)
    kernel = ScaleKernel(MaternKernel())
    fitted = fit_exact(t[low:begin], y[low:begin], kernel, steps=60)
    square = []
    begin -= begin % step  # as the stream was cut
    for k in range(begin, end, step):
        seen = slice(max(k - LAST, 0), k)
        fitted.gp.set_train_data(
            t[seen], (y[seen] - fitted.center) / fitted.unit, strict=False
        )
        square.append((fitted(t[k : k + step]) - y[k : k + step]).square())
    return float(torch.cat(square).mean().sqrt())

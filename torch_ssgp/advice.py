"""Warnings of an update: once per cause, and before the model changes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from torch_ssgp.exceptions import (
    BudgetWarning,
    OutlierWarning,
    PrecisionWarning,
    SharedHyperparametersWarning,
    warn,
)
from torch_ssgp.likelihoods import couples_classes
from torch_ssgp.memory import Data
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.state import Learned

if TYPE_CHECKING:
    from torch_ssgp.core import StreamingCore

LARGE_LOSS = 0.1  # nats per datum whose loss is worth a warning
NOISE_LIMIT = 1e-4  # of a variance, by default in GPyTorch
COARSE = 0.3  # noise that cannot be smaller, in standard deviations of the targets
ENOUGH = 10  # data that show how much the targets vary, or outliers that are many
MANY = 0.1  # share of outliers among all data that is worth a warning


def warn_once(
    model: StreamingCore, learned: Learned, data: Data, options: UpdateOptions
) -> frozenset[str]:
    """Warn about what the user may not have intended, once per cause."""
    causes = {
        "sharing": lambda: _sharing(model, options),
        "rounding": lambda: _rounding(model, data),
        "points": lambda: _too_few_points(model, learned, data, options),
        "scale": lambda: _small_targets(model, learned),
        "outliers": lambda: _many_outliers(learned),
    }
    warned = model.warned
    for cause, find in causes.items():
        found = None if cause in warned else find()
        if found is not None:
            text, category = found
            warn(f"{text} This warning is shown once.", category)
            warned = warned | {cause}
    return warned


Found = tuple[str, type[Warning]] | None


def _too_few_points(
    model: StreamingCore, learned: Learned, data: Data, options: UpdateOptions
) -> Found:
    """A compression that lost much, for each datum that it compressed."""
    state, num_new = learned.state, data.y.size(-1)
    num_compressed = model.memory.num_raw + num_new - state.num_raw
    per_datum = float(learned.lost.max()) / max(num_compressed, 1)
    if per_datum <= LARGE_LOSS or options.inducing_points is not None:
        return None
    policy, count = model.inducing_policy, state.rows.points.size(-2)
    advice = "Raise num_inducing"
    if policy is not None:
        advice = policy.advice(count, model.num_inducing)
    text = (
        f"Compressing {num_compressed} data and what was known onto {count} points "
        f"lost {per_datum:.2g} nats per datum (UpdateResult.projection_loss): the "
        f"function needs more points than that. {advice}."
    )
    return text, BudgetWarning


def _many_outliers(learned: Learned) -> Found:
    """Outliers that are no exceptions."""
    state = learned.state
    out, arrived = state.counts.num_outliers, state.counts.arrived
    if out < ENOUGH or out < MANY * arrived * state.sunk.numel():
        return None
    text = (
        f"{out:.0f} of {arrived:.0f} data were left out as outliers. If so many are "
        "normal, use likelihood=gpytorch.likelihoods.StudentTLikelihood(), which "
        "expects them. To keep every datum, use forget=1.0."
    )
    return text, OutlierWarning


def _small_targets(model: StreamingCore, learned: Learned) -> Found:
    """Targets whose noise would be smaller than GPyTorch lets it be by default.

    A limit that the user set is meant. Four standard deviations are taken for the range
    of the targets.
    """
    state = learned.state
    likelihood, extremes = state.prior.likelihood, state.extremes
    if not isinstance(likelihood, GaussianLikelihood) or extremes.size(-1) == 0:
        return None
    if not model.likelihood.raw_noise.requires_grad:
        return None
    low, high = extremes.unbind(-1)
    spread, limit = high - low, math.sqrt(NOISE_LIMIT)
    least = likelihood.noise_covar.raw_noise_constraint.lower_bound.to(extremes)
    noise = likelihood.noise.detach().squeeze(-1).to(extremes)
    is_small = (
        ((least / NOISE_LIMIT - 1).abs() < 1e-3)
        & (noise < 1.1 * NOISE_LIMIT)
        & (spread > 0)
        & (spread < 4 * limit / COARSE)
        & (state.num_data >= ENOUGH)
    )
    if not bool(is_small.any()):
        return None
    smallest = float(spread.expand(is_small.shape)[is_small].min())
    text = (
        f"All targets lie within {smallest:.2g}, and the likelihood allows no noise "
        f"below a standard deviation of {limit:.2g}: the function is partly taken for "
        "noise. Rescale the targets, or pass "
        "GaussianLikelihood(noise_constraint=gpytorch.constraints.Positive())."
    )
    return text, PrecisionWarning


def _sharing(model: StreamingCore, options: UpdateOptions) -> Found:
    """Streams that share hyperparameters because a module has no batch shape.

    The classes of one target often share them on purpose, and so do modules whose batch
    shape is one.
    """
    batch, num_updates = model.batch_shape, int(model.memory.count().num_updates)
    if batch.numel() == 1 or couples_classes(model.likelihood):
        return None
    if not options.learns_at(num_updates):
        return None
    names = [
        type(part).__name__
        for part in model.covar_module.modules()
        if isinstance(part, Kernel)
        and not part._batch_shape
        and any(p.requires_grad for p in part.parameters(recurse=False))
    ]
    raw_noise = getattr(model.likelihood, "raw_noise", None)
    if raw_noise is not None and raw_noise.ndim == 1 and raw_noise.requires_grad:
        names.append(type(model.likelihood).__name__)
    if not names:
        return None
    text = (
        f"{' and '.join(dict.fromkeys(names))} without a batch_shape in a model with "
        f"batch_shape {tuple(batch)}: all streams share one set of hyperparameters. "
        f"For one set per stream, use batch_shape=torch.Size({list(batch)}) there too. "
        "To share them on purpose, use torch.Size([1])."
    )
    return text, SharedHyperparametersWarning


def _rounding(model: StreamingCore, data: Data) -> Found:
    """Inputs that are too large for their spacing, such as Unix time in float32."""
    points = [data.x.reshape(-1, data.x.size(-1))]
    if not model.memory.is_empty:
        known = model.memory.points.detach()
        points.append(known.reshape(-1, known.size(-1)).to(data.x))
    step = coarsest_step(torch.cat(points), torch.finfo(model.dtype).eps)
    if step is None:
        return None
    text = (
        f"Inputs are so large that {model.dtype} resolves only steps of {step:g}, so "
        "neighbours become one point. Subtract the first value, such as the first "
        "timestamp, before you convert the inputs to that dtype, or use "
        "model.to(torch.float64) with float64 inputs."
    )
    return text, PrecisionWarning


def coarsest_step(points: Tensor, eps: float) -> float | None:
    """The largest spacing of floats that hides that of the inputs, if any."""
    low, high = torch.aminmax(points, dim=0)
    largest, extent = high.maximum(-low).clamp_min(1e-30), high - low
    if not bool((extent <= 2 * points.size(0) * eps * largest).any()):
        return None
    step = eps * largest.log2().floor().exp2()
    is_close = extent <= 2 * points.size(0) * step  # most inputs are not
    if eps < 1e-12:  # a constant that was computed, such as a mean, is no time
        is_close = is_close & ~((extent > 0) & (extent <= 8 * step))
    if not bool(is_close.any()):
        return None
    values = points.sort(0).values
    gaps = values.diff(dim=0, prepend=values[:1])
    gap = gaps.where(gaps > 0, torch.nan).nanmedian(0).values
    is_merged = is_close & torch.where(gap.isnan(), step > 1, gap <= 2 * step)
    return float(step.where(is_merged, 0).max()) or None

"""Predict, then learn: a stream of batches, with a score for each."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch.likelihoods import _OneDimensionalLikelihood
from torch import Tensor

from torch_ssgp import likelihoods
from torch_ssgp import validation as check
from torch_ssgp.estimators import (
    check_level,
    checked_options,
    class_probabilities,
    learn,
    moments,
)
from torch_ssgp.exceptions import ArgumentError, ShapeError
from torch_ssgp.models import StreamingGP
from torch_ssgp.multioutput import MultiOutputGP
from torch_ssgp.update import UpdateOptions, UpdateResult
from torch_ssgp.update.ascent import progress_bar

NAN = float("nan")


class Record(NamedTuple):
    """The report of one batch: how well it was predicted, and what was learned.

    The scores are those of predictions made before the batch was learned. Missing
    readings do not count. A score is NaN if the model had seen no data yet, if no
    reading is there, or if the likelihood does not define it.

    Attributes:
        num_data: Number of data in the batch.
        rmse: Root of the mean squared error of the mean; NaN for labels.
        log_density: Mean log density of targets, or log probability of labels.
        coverage: Share of targets inside the central interval of probability ``level``;
            for Gaussian likelihoods.
        accuracy: Share of labels that were the most probable ones.
        forget: Power to which the likelihood of the past was raised.
        num_inducing: Number of inducing points now.
        milliseconds: Wall-clock time of prediction and update.
        result: The result of the update.
    """

    num_data: int
    rmse: float
    log_density: float
    coverage: float
    accuracy: float
    forget: float
    num_inducing: int
    milliseconds: float
    result: UpdateResult


class Scores(NamedTuple):
    """The scores of a :class:`Record`."""

    rmse: float = NAN
    log_density: float = NAN
    coverage: float = NAN
    accuracy: float = NAN


def stream(
    model: StreamingGP | MultiOutputGP,
    batches: Iterable[Any],
    options: UpdateOptions | None = None,
    *,
    level: float = 0.9,
    from_memory: bool | None = None,
    progress: bool = False,
) -> Iterator[Record]:
    """Run a stream through a model: predict each batch, then learn from it.

    Nothing is read ahead: the next batch is read when the record before it has been
    consumed. Stop at any time, and continue with another call.

    Args:
        model: The model; it learns.
        batches: Pairs ``(x, y)``, or triples ``(x, y, noise)`` with known noise
            variances, of tensors, arrays or data frames. They may come from a
            ``DataLoader``, a list or a generator. Single data points, such as those of
            an ``IterableDataset``, are batches of one. All are converted to the dtype
            and device of the model.
        options: How each update learns, an :class:`~torch_ssgp.UpdateOptions`.
        level: Probability of the intervals whose coverage is counted.
        from_memory: Deprecated: every prediction is made from the whole memory.
        progress: Show a progress bar.

    Yields:
        A :class:`Record` per batch.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from torch_ssgp import StreamingGP, stream
        >>> x = torch.rand(200, 1)
        >>> y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(200)
        >>> model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=20)
        >>> loader = DataLoader(TensorDataset(x, y), batch_size=50)
        >>> records = list(stream(model, loader))
        >>> records[-1].rmse < 0.2
        True
    """
    if not isinstance(model, StreamingGP | MultiOutputGP):
        raise ArgumentError(
            f"model is {check.kind_of(model)}; expected a StreamingGP or a "
            "MultiOutputGP."
        )
    options = checked_options(options)
    check_level(level)
    check.check_flag(progress, "progress")
    check.check_from_memory(from_memory)
    return _run(model, batches, options, level, progress)


def _run(
    model: StreamingGP | MultiOutputGP,
    batches: Iterable[Any],
    options: UpdateOptions,
    level: float,
    progress: bool,
) -> Iterator[Record]:
    for batch in progress_bar("stream", over=batches) if progress else batches:
        core, x, y, noise = _as_data(batch, model)
        start = time.perf_counter()
        core.check_data(x, y, noise)  # before anything is predicted from them
        scores = Scores()
        if not core.memory.is_empty:
            scores = _score(core, x, y, noise, level)
        result = learn(core, x, y, options, noise=noise)
        yield Record(
            num_data=y.size(-1),
            forget=float(result.forgot.mean()),
            num_inducing=result.num_inducing,
            milliseconds=1000 * (time.perf_counter() - start),
            result=result,
            **scores._asdict(),
        )


# -- data ---------------------------------------------------------------------------


def _as_data(
    batch: Any, model: StreamingGP | MultiOutputGP
) -> tuple[StreamingGP, Tensor, Tensor, Tensor | None]:
    """A batch as tensors of the model; a single datum becomes a batch of one."""
    is_several = isinstance(batch, tuple | list)
    if not is_several or len(batch) not in (2, 3):
        size = f" of {len(batch)}" if is_several else ""
        raise ShapeError(
            f"A batch is {check.kind_of(batch)}{size}; expected a pair (x, y), or "
            "(x, y, noise) with known noise variances."
        )
    several = isinstance(model, MultiOutputGP)
    core = model.model if isinstance(model, MultiOutputGP) else model
    x, y = (_as_tensor(value, core) for value in batch[:2])
    noise = _as_tensor(batch[2], core) if len(batch) == 3 else None
    if y.ndim == several:  # one target, or one of each output
        x, y = x.reshape(1, -1), y.unsqueeze(0)
        noise = None if noise is None else noise.unsqueeze(0)
    if several:
        if y.ndim != 2 or y.size(-1) != core.batch_shape[-1]:
            raise ShapeError(
                f"y has shape {tuple(y.shape)}; expected (n, {core.batch_shape[-1]}), "
                "one column per output."
            )
        y, noise = y.mT, None if noise is None else noise.mT
    return core, x, y, noise


def _as_tensor(value: Any, model: StreamingGP) -> Tensor:
    if not isinstance(value, Tensor):
        value = torch.from_numpy(np.array(value, dtype=np.float64))
    return value.to(model.device, model.dtype)


# -- scores -------------------------------------------------------------------------


@torch.no_grad()
def _score(
    model: StreamingGP,
    x: Tensor,
    y: Tensor,
    noise: Tensor | None,
    level: float,
) -> Scores:
    """How well a batch is predicted, on average over the readings that are there."""
    likelihood, seen = model.likelihood, ~y.isnan()
    y = y.nan_to_num()
    if noise is not None:
        noise = torch.where(seen, noise, 1.0)

    def average(value: Tensor) -> float:
        return float(value[seen].mean())

    if likelihoods.takes_labels(likelihood):
        probabilities = class_probabilities(model, x)
        label = y.long()
        log_density = probabilities.gather(-1, label.unsqueeze(-1)).log()
        return Scores(
            log_density=average(log_density.squeeze(-1)),
            accuracy=average((probabilities.argmax(-1) == label).to(y)),
        )
    if likelihoods.is_gaussian(likelihood):
        mean, variance = moments(model, x, include_noise=True, noise=noise)
        std = variance.sqrt()
        width = NormalDist().inv_cdf((1 + level) / 2)
        return Scores(
            rmse=math.sqrt(average((y - mean).square())),
            log_density=average(torch.distributions.Normal(mean, std).log_prob(y)),
            coverage=average(((y - mean).abs() <= width * std).to(y)),
        )
    if isinstance(likelihood, _OneDimensionalLikelihood):
        latent = model(x)
        mean = likelihood.quadrature(lambda f: likelihood.forward(f).mean, latent)
        return Scores(
            rmse=math.sqrt(average((y - mean).square())),
            log_density=average(likelihood.log_marginal(y, latent)),
        )
    return Scores()

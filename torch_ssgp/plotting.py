"""Pictures of a model, in the style of the paper. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from torch_ssgp.exceptions import ArgumentError, MissingDependencyError, ShapeError
from torch_ssgp.likelihoods import is_gaussian

if TYPE_CHECKING:
    from torch_ssgp.models import StreamingGP

WIDE = 1.959964  # standard deviations, either side, that hold 95 %
MARGIN = 0.05  # of the range of inputs, beyond the data
NUM = 200  # places where a curve is drawn


def require_pyplot() -> Any:
    """The module ``matplotlib.pyplot``, or an error that says how to get it."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingDependencyError(
            "Plotting needs matplotlib. Install it with: pip install 'torch_ssgp[plot]'"
        ) from error
    return pyplot


@torch.no_grad()
def plot(
    model: StreamingGP, ax: Any = None, *, inputs: Sequence[int] | None = None
) -> Any:
    """Draw what a model knows.

    A line and a band show the mean and 95 % of the targets, dots the raw data, crosses
    those left out as outliers, and marks at the lower edge the points of compressed
    rows. With several inputs, each panel is a section: the other inputs are at the
    median of all points, and data are shown wherever they are. Where noise is known or
    the likelihood is not Gaussian, line and band are of the function; data of other
    likelihoods are on another scale, and are not drawn.

    Args:
        model: A model with data and no batch shape.
        ax: Matplotlib axes, as many as there are panels; by default the current ones
            for one panel, a new figure for several.
        inputs: Which inputs have a panel; all by default.

    Returns:
        The axes; an array of them if there are several panels.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> from torch_ssgp import StreamingGP
        >>> model = StreamingGP(ScaleKernel(RBFKernel()))
        >>> x = torch.linspace(0, 5, 40)
        >>> result = model.update(x, torch.sin(x))
        >>> ax = model.plot()
        >>> ax.get_legend_handles_labels()[1]
        ['data', 'mean']
    """
    if model.batch_shape or model.memory.is_empty:
        raise ArgumentError(
            f"plot draws one stream that has data; the model has batch_shape "
            f"{tuple(model.batch_shape)} and {model.memory.num_points} points. For one "
            "stream of several use model[0].plot()."
        )
    points = model.points.to(model.dtype)
    num_dims = points.size(-1)
    chosen = list(range(num_dims) if inputs is None else inputs)
    if not chosen or any(i not in range(num_dims) for i in chosen):
        raise ArgumentError(
            f"inputs is {inputs!r}; expected some of 0 to {num_dims - 1}."
        )
    if ax is None:
        pyplot, count = require_pyplot(), len(chosen)
        if count == 1:
            ax = pyplot.gca()
        else:
            size = (4 * count, 3)
            _, ax = pyplot.subplots(1, count, figsize=size, layout="constrained")
    panels = list(getattr(ax, "flat", ax if isinstance(ax, list | tuple) else [ax]))
    if len(panels) != len(chosen):
        raise ArgumentError(f"ax has {len(panels)} axes; expected {len(chosen)}.")
    for panel, i in zip(panels, chosen, strict=True):
        _draw_section(model, panel, points, i)
        if num_dims > 1:
            panel.set_xlabel(f"input {i}")
    return ax


def _draw_section(model: StreamingGP, ax: Any, points: Tensor, i: int) -> None:
    """One panel: along input ``i``, through the median of the others."""
    memory, along = model.memory, points[:, i]
    low, high = along.min(), along.max()
    margin = MARGIN * (high - low) if high > low else torch.ones_like(low)
    x = points.median(0).values.repeat(NUM, 1)
    x[:, i] = torch.linspace(0, 1, NUM).to(x) * (high - low + 2 * margin) + low - margin
    marks, at = along.split([memory.num_points - memory.num_raw, memory.num_raw])
    if is_gaussian(model.likelihood) and len(at):
        at, y, used = at.cpu(), memory.y.cpu(), memory.weight.cpu() > 0
        ax.plot(at[used], y[used], ".", color="0.3", ms=3, label="data")
        if not used.all():
            ax.plot(at[~used], y[~used], "x", color="tab:red", ms=5, label="left out")
    targets = isinstance(model.likelihood, GaussianLikelihood)
    prediction = model.predict(x) if targets else model(x)
    _draw_curve(ax, x[:, i], prediction.mean, WIDE * prediction.stddev)
    if len(marks):
        _draw_marks(ax, marks)


def _draw_curve(ax: Any, grid: Tensor, mean: Tensor, wide: Tensor) -> None:
    """A line, and a band as wide as that on either side."""
    grid, mean, wide = grid.cpu(), mean.cpu(), wide.cpu()
    ax.fill_between(grid, mean - wide, mean + wide, color="tab:blue", alpha=0.2, lw=0)
    ax.plot(grid, mean, color="tab:blue", lw=1.5, label="mean")


def _draw_marks(ax: Any, x: Tensor) -> None:
    """Points, at the lower edge."""
    x, edge = x.cpu(), ax.get_xaxis_transform()
    height = torch.full_like(x, 0.03)
    ax.plot(x, height, "|", color="tab:red", ms=9, transform=edge, label="points")


@torch.no_grad()
def plot_stream(
    model: StreamingGP,
    x: Tensor,
    x_new: Tensor,
    y_new: Tensor,
    x_past: Tensor | None = None,
    y_past: Tensor | None = None,
    ax: Any = None,
) -> Any:
    """Draw a one-dimensional model after an update.

    Past data are grey, new data black; a line and a band show the mean and two
    standard deviations of the targets, marks below the curve the inducing points.

    Args:
        model: A model with one input and no batch shape.
        x: ``(k,)`` where to draw the prediction, in ascending order.
        x_new: ``(n,)`` or ``(n, 1)`` inputs of the last batch.
        y_new: ``(n,)`` its targets.
        x_past: Inputs of earlier batches.
        y_past: Their targets.
        ax: Matplotlib axes; the current ones by default.

    Returns:
        The axes.
    """
    if model.batch_shape or x.squeeze().ndim != 1:
        raise ShapeError(
            f"plot_stream draws one function of one input; got x of shape "
            f"{tuple(x.shape)} and batch_shape {tuple(model.batch_shape)}."
        )
    ax = ax if ax is not None else require_pyplot().gca()
    x = x.squeeze()
    prediction = model.predict(x)
    if x_past is not None and y_past is not None:
        ax.plot(x_past.flatten().cpu(), y_past.cpu(), ".", color="0.8", ms=3)
    ax.plot(x_new.flatten().cpu(), y_new.cpu(), ".", color="0.1", ms=3)
    _draw_curve(ax, x, prediction.mean, 2 * prediction.stddev)
    _draw_marks(ax, model.points.flatten())
    return ax

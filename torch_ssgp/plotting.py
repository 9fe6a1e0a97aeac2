"""Pictures of a stream, in the style of the paper. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_ssgp.exceptions import MissingDependencyError, ShapeError

if TYPE_CHECKING:
    from torch_ssgp.models import StreamingGP


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
    mean, two_sigma = prediction.mean.cpu(), 2 * prediction.stddev.cpu()
    grid = x.cpu()
    if x_past is not None and y_past is not None:
        ax.plot(x_past.flatten().cpu(), y_past.cpu(), ".", color="0.8", ms=3)
    ax.plot(x_new.flatten().cpu(), y_new.cpu(), ".", color="0.1", ms=3)
    ax.fill_between(
        grid, mean - two_sigma, mean + two_sigma, color="tab:blue", alpha=0.2, lw=0
    )
    ax.plot(grid, mean, color="tab:blue", lw=1.5)
    z = model.summary.inducing_points.flatten().cpu()
    ax.plot(
        z,
        torch.full_like(z, 0.03),
        "|",
        color="tab:red",
        ms=9,
        transform=ax.get_xaxis_transform(),
    )
    return ax

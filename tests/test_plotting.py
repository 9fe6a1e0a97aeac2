"""Pictures show what they say."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from matplotlib import pyplot

from torch_ssgp import StreamingGP, exceptions
from torch_ssgp.plotting import plot_stream


def test_a_plot_shows_past_new_prediction_and_inducing_points():
    x = torch.linspace(0, 5, 40).unsqueeze(-1)
    y = torch.sin(x[:, 0])
    model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=7)
    model.update(x, y, num_steps=2)
    figure, ax = pyplot.subplots()
    grid = torch.linspace(0, 5, 30)
    plot_stream(model, grid, x[20:], y[20:], x[:20], y[:20], ax=ax)
    past, new, mean, inducing = ax.get_lines()
    assert len(past.get_xdata()) == len(new.get_xdata()) == 20
    torch.testing.assert_close(torch.as_tensor(mean.get_ydata()), model(grid).mean)
    assert len(inducing.get_xdata()) == model.summary.num_inducing
    assert len(ax.collections) == 1
    pyplot.close(figure)


def test_two_inputs_cannot_be_drawn():
    model = StreamingGP(ScaleKernel(RBFKernel()))
    with pytest.raises(exceptions.ShapeError, match="one function of one input"):
        plot_stream(model, torch.rand(5, 2), torch.rand(3), torch.rand(3))

"""Pictures show what they say."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, FixedNoiseGaussianLikelihood
from matplotlib import pyplot

from torch_ssgp import StreamingGP, exceptions
from torch_ssgp.plotting import plot, plot_stream


@pytest.fixture(autouse=True)
def closed():
    """No figure is left to the next test."""
    yield
    pyplot.close("all")


def labelled(ax):
    """What is drawn, by its label in the legend."""
    return dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))


def test_a_plot_shows_past_new_prediction_and_inducing_points():
    x = torch.linspace(0, 5, 40).unsqueeze(-1)
    y = torch.sin(x[:, 0])
    model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=7)
    model.update(x, y, num_steps=2)
    _, ax = pyplot.subplots()
    grid = torch.linspace(0, 5, 30)
    plot_stream(model, grid, x[20:], y[20:], x[:20], y[:20], ax=ax)
    past, new, mean, inducing = ax.get_lines()
    assert len(past.get_xdata()) == len(new.get_xdata()) == 20
    torch.testing.assert_close(torch.as_tensor(mean.get_ydata()), model(grid).mean)
    assert len(inducing.get_xdata()) == len(model.points)
    assert len(ax.collections) == 1


def test_two_inputs_cannot_be_drawn():
    model = StreamingGP(ScaleKernel(RBFKernel()))
    with pytest.raises(exceptions.ShapeError, match="one function of one input"):
        plot_stream(model, torch.rand(5, 2), torch.rand(3), torch.rand(3))


def test_a_plot_shows_what_a_model_knows():
    x = torch.linspace(0, 5, 40).double()
    model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=8).double()
    model.update(x, x.sin(), num_steps=5)
    model.update(x[:4] + 0.05, x[:4].cos(), num_steps=0)
    _, ax = pyplot.subplots()
    assert model.plot(ax) is ax
    drawn = labelled(ax)
    assert set(drawn) == {"data", "mean", "points"}
    assert drawn["data"].get_ydata().tolist() == x[:4].cos().tolist()
    assert len(drawn["points"].get_xdata()) == 8
    grid, mean = map(torch.as_tensor, drawn["mean"].get_data())
    assert grid[0] < model.points.min() and grid[-1] > model.points.max()
    prediction = model.predict(grid)
    torch.testing.assert_close(mean, prediction.mean)
    (band,) = ax.collections
    edges = torch.as_tensor(band.get_paths()[0].vertices[:, 1])
    upper = prediction.mean + 1.96 * prediction.stddev
    lower = prediction.mean - 1.96 * prediction.stddev
    torch.testing.assert_close(edges.max(), upper.max(), rtol=1e-4, atol=0)
    torch.testing.assert_close(edges.min(), lower.min(), rtol=1e-4, atol=0)


def test_outliers_that_were_left_out_are_marked():
    x = torch.linspace(0, 5, 40).double()
    model = StreamingGP(ScaleKernel(RBFKernel())).double()
    model.update(x, x.sin(), num_steps=5)
    used = torch.ones(40).double()
    used[[3, 17]] = 0
    model.memory.replace(weight=used)
    drawn = labelled(model.plot())
    assert drawn["left out"].get_xdata().tolist() == x[[3, 17]].tolist()
    assert drawn["data"].get_xdata().tolist() == x[used > 0].tolist()
    assert "points" not in drawn


def test_several_inputs_have_a_section_each():
    x = torch.rand(50, 3).double()
    model = StreamingGP(ScaleKernel(RBFKernel())).double()
    model.update(x, x[:, 0] - x[:, 1], num_steps=5)
    panels = plot(model)
    assert [ax.get_xlabel() for ax in panels] == ["input 0", "input 1", "input 2"]
    at = x.median(0).values.repeat(200, 1)
    at[:, 1] = torch.as_tensor(labelled(panels[1])["mean"].get_xdata())
    mean = torch.as_tensor(labelled(panels[1])["mean"].get_ydata())
    torch.testing.assert_close(mean, model.predict(at).mean)
    assert model.plot(inputs=[2]).get_xlabel() == "input 2"


@pytest.mark.parametrize(
    ("likelihood", "noise", "shows_data"),
    [
        (BernoulliLikelihood, None, False),
        (lambda: FixedNoiseGaussianLikelihood(torch.ones(1)), 0.1, True),
    ],
)
def test_other_likelihoods_show_the_function(likelihood, noise, shows_data):
    x = torch.linspace(0, 5, 30)
    noise = noise and torch.full_like(x, noise)
    model = StreamingGP(ScaleKernel(RBFKernel()), likelihood())
    model.update(x, (x.sin() > 0).float(), noise, num_steps=3)
    drawn = labelled(model.plot())
    assert ("data" in drawn) == shows_data
    grid, mean = map(torch.as_tensor, drawn["mean"].get_data())
    torch.testing.assert_close(mean, model(grid).mean)


def test_what_cannot_be_drawn_is_refused():
    batch = torch.Size([2])
    for model in (
        StreamingGP(RBFKernel()),
        StreamingGP(RBFKernel(), batch_shape=batch),
    ):
        with pytest.raises(exceptions.ArgumentError, match=r"model\[0\].plot"):
            model.plot()
    model, x = StreamingGP(RBFKernel()), torch.rand(5, 2)
    model.update(x, x[:, 0], num_steps=0)
    with pytest.raises(exceptions.ArgumentError, match="some of 0 to 1"):
        model.plot(inputs=[2])
    with pytest.raises(exceptions.ArgumentError, match="1 axes; expected 2"):
        model.plot(pyplot.gca())

"""A model says in a few lines what it is."""

from __future__ import annotations

import re

import pytest
import torch
from gpytorch.kernels import (
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import BernoulliLikelihood, FixedNoiseGaussianLikelihood

from torch_ssgp import MultiOutputGP, StreamingGP


def facts(model):
    """The lines of a model, by their first word."""
    first, *lines = repr(model).splitlines()
    assert first == "StreamingGP"
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


def test_a_model_shows_five_lines():
    model = StreamingGP(ScaleKernel(MaternKernel()), num_inducing=8).double()
    model.covar_module.outputscale, model.likelihood.noise = 2.5, 0.04
    x = torch.linspace(0, 5, 40).double()
    model.update(x, x.sin(), num_steps=0)
    model.update(x[:3], x[:3].sin(), num_steps=0)
    assert facts(model) == {
        "kernel": "2.5 * Matern(lengthscale=0.6931)",
        "memory": "11 points; 11 of at most 12 rows, 3 of them raw data",
        "data": "43 seen in 2 updates",
        "noise": "variance 0.04",
        "alarm": "none",
    }


def test_a_model_without_data_shows_its_prior():
    kernel = RBFKernel(ard_num_dims=2) * PeriodicKernel() + LinearKernel()
    kernel.kernels[0].kernels[0].lengthscale = torch.tensor([0.5, 2.0])
    shown = facts(StreamingGP(kernel, BernoulliLikelihood()))
    assert shown["kernel"] == (
        "(RBF(lengthscale=0.5 to 2) * Periodic(lengthscale=0.6931, "
        "period_length=0.6931) + Linear(variance=0.6931))"
    )
    assert shown["memory"].startswith("0 points; 0 of at most 300 rows")
    assert shown["data"] == "0 seen in 0 updates"
    assert shown["noise"] == "that of a BernoulliLikelihood"


def test_an_alarm_and_outliers_are_shown():
    model = StreamingGP(RBFKernel())
    model.update(torch.rand(20), torch.rand(20), num_steps=0)
    memory = model.memory
    alarm, alarmed = torch.tensor([0.0, 7.25, 1.0]), torch.tensor([20.0, 16.0, 3.0])
    counts = memory.counts.new_tensor(memory.count()._replace(num_outliers=1))
    memory.replace(alarm=alarm, alarmed=alarmed, counts=counts)
    assert facts(model)["alarm"] == "7.2 nats, from the last 4 data"
    assert facts(model)["data"].endswith("in 1 update, 1 outlier left out")


@pytest.mark.parametrize(
    ("learned", "wanted"), [(False, "known"), (True, r"known, plus [\d.]+")]
)
def test_known_noise_is_shown_as_known(learned, wanted):
    ones = torch.ones(1)
    likelihood = FixedNoiseGaussianLikelihood(ones, learn_additional_noise=learned)
    assert re.fullmatch(wanted, facts(StreamingGP(RBFKernel(), likelihood))["noise"])


def test_streams_and_outputs_are_shown():
    model = StreamingGP(RBFKernel(), batch_shape=torch.Size([2]))
    x = torch.rand(5)
    y = torch.stack([x, x])
    y[1, 2] = torch.nan
    model.update(x, y, num_steps=0)
    shown = facts(model)
    assert shown["data"] == "4 to 5 seen in 1 update, by streams of shape (2,)"
    assert shown["data"] in repr(MultiOutputGP(model))


def test_a_notebook_shows_a_table_of_the_same():
    model = StreamingGP(ScaleKernel(RBFKernel()))
    table = model._repr_html_()
    assert table.count("<tr>") == 5 and table.startswith("<table>")
    for name, value in facts(model).items():
        assert name in table and value in table

"""What an update asks of a likelihood, beside the sites (see test_sites.py)."""

from __future__ import annotations

import torch
from gpytorch.distributions import Distribution
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import Likelihood

from torch_ssgp import StreamingGP


class Sampled(Likelihood):
    """Poisson counts, whose expectations GPyTorch takes from samples."""

    has_analytic_marginal = False

    def forward(self, function_samples, *args, **kwargs) -> Distribution:
        return torch.distributions.Poisson(function_samples.exp())


def test_samples_of_a_likelihood_leave_the_generators_of_all_devices(monkeypatch):
    """``torch.manual_seed`` would seed every GPU, and nobody would set it back."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    x = torch.linspace(0, 6, 20)
    gp = StreamingGP(ScaleKernel(RBFKernel()), Sampled(), num_inducing=5)
    for rows in (slice(0, 10), slice(10, 20)):
        gp.update(x[rows], x[rows].floor(), num_steps=2, forget="auto")
    assert seeded == []
    assert torch.equal(torch.get_rng_state(), before)

"""The inner loop: coordinates, budget, plateau, best iterate."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood

from torch_ssgp import StreamingGP


def data(n=100, scale=1.0, noise=0.1):
    x = torch.linspace(0, 6, n, dtype=torch.float64).unsqueeze(-1)
    y = torch.sin(2 * x[:, 0]) + noise * torch.randn(n, dtype=torch.float64)
    return x, scale * y


def model(**options):
    options = {"num_inducing": 15, **options}
    return StreamingGP(ScaleKernel(RBFKernel()), **options).double()


def test_the_best_iterate_is_kept():
    x, y = data()
    gp = model()
    # A learning rate far too large makes the last iterate worse than others.
    result = gp.update(x, y, num_steps=40, lr=2.0)
    assert result.bound >= result.bound_trace.max() - 1e-6
    assert result.bound_trace[-1] < result.bound_trace.max()


def test_a_plateau_ends_the_loop_and_is_reported():
    x, y = data()
    gp = model()
    first = gp.update(x, y, num_steps=2000)
    assert first.converged and first.num_steps < 2000
    assert not model().update(x, y, num_steps=11).converged


def test_closed_form_takes_no_step():
    x, y = data()
    result = model().update(x, y, num_steps=0)
    assert result.num_steps == 0 and result.bound_trace.shape == (0,)
    assert result.converged


def test_a_constant_mean_follows_a_stream_that_left_it_far_behind():
    x, y = data()
    gp = model()
    gp.update(x, y + 1000.0, num_steps=20)
    for _ in range(5):
        gp.update(x, y, num_steps=20, forget=0.1)
    assert abs(gp.mean_module.constant.item()) < 100


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_learning_does_not_depend_on_the_unit_of_the_targets(scale):
    torch.manual_seed(1)
    x, y = data(scale=scale)
    gp = model()
    # GPyTorch's own floor of the noise is absolute; without it, units do not matter.
    gp.likelihood = GaussianLikelihood(
        noise_constraint=gpytorch.constraints.Positive()
    ).double()
    for rows in (slice(0, 50), slice(50, 100)):
        gp.update(x[rows], y[rows])
    error = (gp(x).mean / scale - torch.sin(2 * x[:, 0])).square().mean().sqrt()
    assert error < 0.06
    assert gp.likelihood.noise.sqrt().item() / scale == pytest.approx(0.1, rel=0.3)


def test_noise_at_its_floor_grows_back_when_the_stream_changes():
    x, y = data(noise=0.0)
    gp = model()
    gp.update(x, y, num_steps=300)
    assert gp.likelihood.noise.item() < 2e-4
    for _ in range(3):
        x, y = data(noise=1.0)
        gp.update(x, y)
    assert gp.likelihood.noise.item() > 0.3


def test_priors_do_not_enter_the_bound():
    x, y = data()
    bounds = []
    for prior in (None, gpytorch.priors.GammaPrior(3.0, 6.0)):
        gp = model()
        gp.covar_module.base_kernel = RBFKernel(lengthscale_prior=prior).double()
        gp.covar_module.base_kernel.lengthscale = 1.0
        z = x[::10]
        bounds.append(gp.update(x, y, num_steps=0, inducing_points=z).bound)
    assert torch.equal(*bounds)


def test_progress_shows_a_bar_and_is_silent_by_default(capsys):
    x, y = data()
    model().update(x, y, num_steps=3)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""
    model().update(x, y, num_steps=3, progress=True)
    assert "update" in capsys.readouterr().err


def test_adam_looks_at_the_loss_only_now_and_then(monkeypatch):
    # bool(tensor) and .item() make a device wait; the loop may do so every 10 steps.
    x, y = data()
    gp = model()
    gp.update(x, y, num_steps=1)
    waits = []
    from torch_ssgp.fit import _Ascent

    original = _Ascent.plateau
    monkeypatch.setattr(
        _Ascent, "plateau", lambda *a: waits.append(1) or original(*a) and False
    )
    gp.update(x, y, num_steps=45)
    assert len(waits) == 4

"""The inner loop: coordinates, budget, plateau, best iterate."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import gpytorch
import pytest
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ZeroMean

from conftest import FULL
from torch_ssgp import StreamingGP
from torch_ssgp.update import ascent
from workbench import streams


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
    # A learning rate far too large makes some iterates worse than others.
    result = gp.update(x, y, num_steps=4, lr=2.0)
    assert result.bound >= result.bound_trace.max() - 1e-6
    assert result.bound_trace[0] < result.bound_trace.max()


def test_a_plateau_ends_the_loop_and_is_reported():
    x, y = data()
    gp = model()
    first = gp.update(x, y, num_steps=2000)
    assert first.converged and first.num_steps < 2000
    assert not model().update(x, y, num_steps=5).converged


def test_closed_form_takes_no_step():
    x, y = data()
    result = model().update(x, y, num_steps=0)
    assert result.num_steps == 0 and result.bound_trace.shape == (0,)
    assert result.converged


def test_a_constant_mean_follows_a_stream_that_left_it_far_behind():
    x, y = data()
    gp = model()
    gp.update(x, y + 1000.0, num_steps=20)
    distances = []
    for _ in range(5):
        gp.update(x, y, num_steps=20, forget=0.1)
        distances.append(abs(gp.mean_module.constant.item()))
    # Between the two levels as long as data of both count, and then at the new one.
    assert distances[0] < 100 and distances[-1] < 0.1
    assert all(b < a for a, b in itertools.pairwise(distances))


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


def test_steps_are_those_of_adam_with_cosine_annealing():
    class Bowl:
        """What the inner loop needs of an ascent, with a loss of its own."""

        def __init__(self):
            self.eta = torch.tensor([3.0, -2.0, 0.5], requires_grad=True)
            self.floor = torch.tensor(-math.inf)
            self.best, self.path = [], []

        def loss(self, needs_gradient=True):
            self.eta.grad = None
            (self.eta.square() * torch.tensor([1.0, 10.0, 0.1])).sum().backward()

        def report(self):
            self.path.append(self.eta.detach().clone())

        def plateau(self):
            return False

    ours, theirs, num_steps = Bowl(), Bowl(), 25
    assert not ascent._adam(ours, num_steps, 0.05)
    optimizer = torch.optim.Adam([theirs.eta], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, num_steps, eta_min=0.005
    )
    for _ in range(num_steps):
        theirs.loss()
        optimizer.step()
        schedule.step()
        theirs.report()
    torch.testing.assert_close(torch.stack(ours.path), torch.stack(theirs.path))


def test_the_first_update_loads_no_compiler():
    code = """
import sys, torch
from gpytorch.kernels import RBFKernel
from torch_ssgp import StreamingGP
x = torch.linspace(0, 1, 20)
assert StreamingGP(RBFKernel()).update(x, x, num_steps=2).num_steps == 2
assert "torch._dynamo" not in sys.modules  # seconds, before anything is learned
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def log_hyperparameters(gp: StreamingGP) -> torch.Tensor:
    kernel = gp.covar_module
    values = (kernel.base_kernel.lengthscale, kernel.outputscale, gp.likelihood.noise)
    return torch.stack([value.detach().log().squeeze() for value in values])


def test_hyperparameters_are_learned_at_every_kth_update_or_not_at_all():
    gp = model()
    x, y = data()
    changed = []
    for _ in range(5):
        before = log_hyperparameters(gp)
        gp.update(x, y, num_steps=5, learn_hyperparameters=2)
        changed.append(not torch.equal(before, log_hyperparameters(gp)))
    assert changed == [True, False, True, False, True]
    before = log_hyperparameters(gp)
    gp.update(x, y, num_steps=5, learn_hyperparameters=False)
    assert torch.equal(before, log_hyperparameters(gp))


def test_a_trust_region_keeps_hyperparameters_where_they_were():
    """The narrower, the closer."""
    x, y = data()
    moves = []
    for width in (None, 0.1, 0.01):
        gp = model()
        gp.update(x, y, num_steps=20)
        before = log_hyperparameters(gp)
        gp.update(x, 3 * y, num_steps=50, trust_region=width)
        moves.append((log_hyperparameters(gp) - before).norm().item())
    assert moves[0] > 1.2 * moves[1] > 3 * moves[2] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"learn_hyperparameters": True, "trust_region": 0.1},
        {"learn_hyperparameters": 10},
    ],
    ids=str,
)
def test_hyperparameters_do_not_drift_over_many_iid_batches(options):
    """They stay within 0.2 of the batch optimum, in logarithms."""
    stream = streams.repeated_iid(batches=200 if FULL else 100, batch=20)
    batch = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=40).double()
    batch.update(stream.x_train, stream.y_train, num_steps=200)
    gp = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=40).double()
    away = []
    for x, y in stream.batches:
        gp.update(x, y, num_steps=10, learn_inducing_points=False, **options)
        away.append(log_hyperparameters(gp) - log_hyperparameters(batch))
    assert torch.stack(away)[50:].abs().max() < 0.2


@pytest.mark.parametrize("batch_shape", [(), (2,)])
@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_a_noise_that_no_datum_has_stays_where_it_is(batch_shape, optimizer):
    # Known noises replace that of the likelihood, whose gradient is none, not one.
    x, y = data(30)
    y = y.expand(*batch_shape, 30)
    gp = model(batch_shape=torch.Size(batch_shape))
    gp.likelihood.noise = 0.3
    lengthscale = gp.covar_module.base_kernel.lengthscale.item()
    gp.update(x, y, torch.full_like(y, 0.01), num_steps=5, optimizer=optimizer)
    torch.testing.assert_close(
        gp.likelihood.noise, torch.full_like(gp.likelihood.noise, 0.3)
    )
    assert gp.covar_module.base_kernel.lengthscale.item() != lengthscale


def test_every_step_counts():
    x, y = data()
    gp = model()
    gp.update(x, y, num_steps=5)
    before = log_hyperparameters(gp)
    steps = []
    result = gp.update(
        x[::2],  # fewer than before: no fresh start is due
        2 * y[::2],
        num_steps=1,
        forget=1.0,
        callback=lambda step, bound: steps.append((step, bound)),
    )
    assert not torch.equal(log_hyperparameters(gp), before)
    assert result.num_steps == 1 and result.bound_trace.shape == (1,)
    assert steps == [(1, result.bound_trace[0])]
    torch.testing.assert_close(result.bound, result.bound_trace[0])


def test_lbfgs_that_ran_out_of_evaluations_has_not_converged():
    x, y = data()
    ends = [
        model().update(x, y, num_steps=n, optimizer="lbfgs") for n in (3, 5, 10, 300)
    ]
    assert [end.converged for end in ends] == [False, False, False, True]


def batched(num_streams: int) -> StreamingGP:
    shape = torch.Size([num_streams])
    return StreamingGP(
        ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape),
        GaussianLikelihood(batch_shape=shape),
        mean_module=gpytorch.means.ConstantMean(batch_shape=shape),
        num_inducing=15,
        batch_shape=shape,
    ).double()


def test_a_stream_that_jumps_leaves_the_others_alone(monkeypatch):
    # Streams with hyperparameters of their own also have jumps of their own.
    monkeypatch.setattr(ascent, "TOLERANCE", -1.0)  # all take all steps
    x, y = data()
    z = x[::8]
    gp, alone = batched(2), model()
    for scale in (1.0, 1e3, 1e3):
        options = {"inducing_points": z, "num_steps": 10, "learn": True, "forget": 1.0}
        both = gp.update(x, torch.stack([scale * y, y]), **options)
        one = alone.update(x, y, **options)
        own = gp.likelihood.noise[1]
        torch.testing.assert_close(own, alone.likelihood.noise, rtol=1e-6, atol=0)
        # Steps amplify rounding in a scale that hardly matters, but not in the bound.
        traces = both.bound_trace[:, 1], one.bound_trace
        torch.testing.assert_close(*traces, rtol=1e-6, atol=0)
    assert gp.likelihood.noise[0].item() > 1e3 * gp.likelihood.noise[1].item()


def test_streams_with_the_same_kernel_share_its_best_iterate():
    x, y = data()
    gp = model(batch_shape=torch.Size([2]))
    result = gp.update(x, torch.stack([y, -y]), num_steps=4, lr=2.0)
    total = result.bound_trace.sum(-1)
    assert result.bound.sum() >= total.max() - 1e-6 > total[0]


def test_the_function_comes_back_after_a_long_silence():
    # While there is nothing but noise the scale of the function goes to nothing, a
    # little in every update.
    x, y = data()
    gp = model()
    gp.update(x, 0.1 * torch.randn(len(y), dtype=y.dtype))
    gp.covar_module.outputscale = 1e-13
    for _ in range(3):
        gp.update(*data(), num_steps=50, forget=0.5)
    error = (gp(x).mean - torch.sin(2 * x[:, 0])).square().mean().sqrt()
    assert error < 0.1


@pytest.mark.parametrize("offset", [1e6, 1e8])
def test_targets_far_from_zero_are_learned_like_others(offset):
    x, y = data()
    gp = model()
    gp.update(x, y + offset)
    error = (gp(x).mean - offset - torch.sin(2 * x[:, 0])).square().mean().sqrt()
    assert error < 0.06


def test_a_learning_rate_that_is_too_large_is_shortened():
    """Steps that gain nothing are taken back, and shorter ones follow."""
    x, y = data()
    results = [
        model().update(x, y, num_steps=100, lr=lr, learn_inducing_points=False)
        for lr in (0.05, 3.0)
    ]
    assert results[1].bound > results[0].bound - 1.0


def test_a_period_is_learned_over_many_periods():
    """A step of five per cent in a period would shift the end of the data by three."""
    x = torch.linspace(0, 60, 240).double().unsqueeze(-1)
    y = torch.sin(2 * math.pi * x[:, 0]) + 0.1 * torch.randn(240).double()
    kernel = ScaleKernel(PeriodicKernel())
    kernel.base_kernel.period_length = 1.002
    gp = StreamingGP(kernel, num_inducing=30).double()
    for rows in torch.arange(240).split(60):
        gp.update(x[rows], y[rows])
    assert abs(kernel.base_kernel.period_length.item() - 1.0) < 5e-4


def test_a_trust_region_holds_hyperparameters_between_two_bounds():
    """Their logarithms are tied as those of others are, whatever the constraint."""
    x, y = data()
    moves = []
    for width in (None, 0.1, 0.01):
        kernel = RBFKernel(lengthscale_constraint=Interval(1e-3, 100.0))
        kernel.lengthscale = 5.0
        gp = StreamingGP(ScaleKernel(kernel), num_inducing=15).double()
        gp.update(x, y, num_steps=50, trust_region=width)
        moves.append(abs(math.log(kernel.lengthscale.item() / 5.0)))
    assert moves[0] > 2 * moves[1] > 4 * moves[2] > 0
    assert moves[2] < 0.1


def test_nothing_to_learn_is_the_closed_form():
    """A frozen kernel, known noise and no mean leave the inner loop nothing to move."""
    x, y = data(40)
    noise = torch.full_like(y, 0.01)
    for optimizer in ("adam", "lbfgs"):
        posteriors = []
        for num_steps in (10, 0):
            kernel = ScaleKernel(RBFKernel()).requires_grad_(False)
            gp = StreamingGP(kernel, FixedNoiseGaussianLikelihood(noise), ZeroMean())
            for rows in (slice(0, 20), slice(20, 40)):
                result = gp.double().update(
                    x[rows],
                    y[rows],
                    noise[rows],
                    num_steps=num_steps,
                    optimizer=optimizer,
                    learn_hyperparameters=True,
                    learn_inducing_points=False,
                )
            assert result.converged and result.num_steps == 0
            posteriors.append(gp(x).mean)
        torch.testing.assert_close(*posteriors, rtol=0, atol=1e-10)

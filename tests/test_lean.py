"""The bound in few operations, against the one that goes through the modules."""

from __future__ import annotations

from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval, Positive
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, StudentTLikelihood
from gpytorch.means import ConstantMean, LinearMean, ZeroMean
from gpytorch.priors import GammaPrior
from torch import Tensor

from torch_ssgp import StreamingGP
from torch_ssgp.update import UpdateOptions
from torch_ssgp.update.ascent import Ascent
from torch_ssgp.update.coordinates import coordinates
from torch_ssgp.update.objective import Objective
from torch_ssgp.update.walk import Update

NOTHING: dict[str, Any] = {}


def model_of(kernel: Any, **options: Any) -> StreamingGP:
    """A model in float64, at most 6 inducing points."""
    torch.manual_seed(0)
    return StreamingGP(kernel, num_inducing=6, memory_size=9, **options).double()


def batch(shape: tuple[int, ...], n: int, missing: bool = False) -> list[Tensor]:
    """Data in two inputs, far from zero."""
    x = 100 + torch.rand(*shape, n, 2, dtype=torch.float64)
    y = (3 * x).sin().sum(-1) + 0.1 * torch.randn(*shape, n, dtype=torch.float64)
    if missing:
        y[0, ::3] = torch.nan
    return [x, y]


def ascent_of(model: StreamingGP, x: Tensor, y: Tensor) -> Ascent:
    """The inner loop of the next update, away from where it starts."""
    data = model.check_data(x, y, None)
    options = UpdateOptions(forget=1.0, learn_hyperparameters=True)
    update = Update(model.known(data), data, options, model.limits(data))
    objective: Objective = update.objective()
    z = update.points.choose(objective, anew=True)
    objective.start_at(z, learn=True)
    ascent = Ascent(objective, coordinates(objective, True, True))
    with torch.no_grad():
        ascent.eta.add_(0.1 * torch.randn_like(ascent.eta))
    return ascent


def both_ways(ascent: Ascent) -> list[tuple[Tensor, Tensor]]:
    """Value and gradient in few operations, and by the modules."""
    assert ascent.lean is not None
    found = []
    for way in (ascent.lean, None):
        ascent.lean, ascent.uses_modules = way, way is None or ascent.uses_modules
        value = ascent.loss()
        assert ascent.eta.grad is not None
        found.append((value, ascent.eta.grad.clone()))
    return found


@pytest.mark.parametrize(
    ("shape", "missing"), [((), False), ((3,), False), ((3,), True)]
)
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(
    "base",
    [
        lambda b: RBFKernel(batch_shape=b),
        lambda b: RBFKernel(ard_num_dims=2, batch_shape=b),
        lambda b: RBFKernel(active_dims=(1,), batch_shape=b),
        lambda b: MaternKernel(nu=0.5, ard_num_dims=2, batch_shape=b),
        lambda b: MaternKernel(nu=1.5, batch_shape=b),
        lambda b: MaternKernel(nu=2.5, ard_num_dims=2, batch_shape=b),
    ],
)
def test_value_and_gradient_are_those_of_the_modules(base, is_first, missing, shape):
    b = torch.Size(shape)
    model = model_of(
        ScaleKernel(base(b), batch_shape=b),
        likelihood=GaussianLikelihood(batch_shape=b),
        mean_module=ConstantMean(batch_shape=b),
        batch_shape=b,
    )
    if not is_first:
        model.update(*batch(shape, 30, missing), num_steps=5)
    ours, theirs = both_ways(ascent_of(model, *batch(shape, 7, missing)))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-7, atol=1e-7)


def test_streams_may_share_hyperparameters():
    model = model_of(ScaleKernel(RBFKernel()), batch_shape=torch.Size([3]))
    model.update(*batch((3,), 30), num_steps=2)
    ours, theirs = both_ways(ascent_of(model, *batch((3,), 7)))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kernel", [RBFKernel(), ScaleKernel(ScaleKernel(RBFKernel()))])
@pytest.mark.parametrize("mean", [ZeroMean(), ConstantMean()])
def test_scales_and_means_are_optional(kernel, mean):
    model = model_of(kernel, mean_module=mean)
    model.update(*batch((), 30), num_steps=5)
    ours, theirs = both_ways(ascent_of(model, *batch((), 7)))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


def test_priors_count():
    model = model_of(
        ScaleKernel(
            RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0)),
            outputscale_prior=GammaPrior(3.0, 1.0),
        )
    )
    model.update(*batch((), 30), num_steps=5)
    ascent = ascent_of(model, *batch((), 7))
    assert ascent.uses_modules
    ours, theirs = both_ways(ascent)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


def test_what_is_frozen_stays():
    model = model_of(ScaleKernel(RBFKernel()))
    model.update(*batch((), 30), num_steps=5)
    model.covar_module.base_kernel.raw_lengthscale.requires_grad_(False)
    ascent = ascent_of(model, *batch((), 7))
    assert len(ascent.variables) == 4  # mean, scale, noise and points
    ours, theirs = both_ways(ascent)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (PeriodicKernel(), NOTHING),
        (RBFKernel() + MaternKernel(), NOTHING),
        (RBFKernel(), {"mean_module": LinearMean(2)}),
        (RBFKernel(), {"likelihood": StudentTLikelihood()}),
        (RBFKernel(), {"alpha": 0.5, "share_noise": False}),
        (RBFKernel(), {"share_noise": False}),
    ],
)
def test_every_other_model_goes_through_its_modules(kernel, options):
    assert ascent_of(model_of(kernel, **options), *batch((), 7)).lean is None


def test_a_parameter_with_two_owners_goes_through_them():
    kernel = ScaleKernel(
        ScaleKernel(RBFKernel(), outputscale_constraint=Interval(0.2, 2.0))
    )
    kernel.raw_outputscale = kernel.base_kernel.raw_outputscale
    assert ascent_of(model_of(kernel), *batch((), 7)).lean is None


def test_a_mean_with_a_forward_of_its_own_is_asked():
    mean = ConstantMean()
    forward = mean.forward
    mean.forward = lambda x: forward(x) + x.sum(-1)
    model = model_of(RBFKernel(), mean_module=mean)
    assert ascent_of(model, *batch((), 7)).lean is None


class Capped(GreaterThan):
    """A constraint that does not reach every value above its bound."""

    def transform(self, tensor: Tensor) -> Tensor:
        """No more than 0.3."""
        return super().transform(tensor).clamp_max(0.3)


@pytest.mark.parametrize(
    "constraint",
    [
        Capped(1e-3),
        Positive(
            transform=lambda t: 0.3 * torch.sigmoid(t),
            inv_transform=lambda v: torch.logit(v / 0.3),
        ),
        Interval(0.01, 2.0),
        GreaterThan(1e-3, transform=torch.exp, inv_transform=torch.log),
    ],
)
def test_values_are_those_that_constraints_show(constraint):
    kernel = RBFKernel(lengthscale_constraint=constraint)
    kernel.lengthscale = 0.1
    model = model_of(ScaleKernel(kernel))
    ours, theirs = both_ways(ascent_of(model, *batch((), 12)))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


def test_a_subclass_of_a_kernel_goes_through_its_own_code():
    class Doubled(gpytorch.kernels.RBFKernel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().forward(*args, **kwargs)

    assert ascent_of(model_of(Doubled()), *batch((), 7)).lean is None


def test_hyperparameters_learned_are_those_in_the_modules():
    model = model_of(ScaleKernel(RBFKernel()), likelihood=GaussianLikelihood())
    ascent = ascent_of(model, *batch((), 40))
    loss = ascent.loss()
    ascent.restore_best()
    _, bound = ascent.objective.total()
    torch.testing.assert_close(-loss * ascent.num_data, bound, rtol=1e-10, atol=1e-10)

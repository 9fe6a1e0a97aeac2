r"""Sample paths by Matheron's rule: a prior path plus an update from the data.

.. math::
    f(\cdot) + k(\cdot, Z) U^\top (U K U^\top + s I)^{-1}
        (g - U f(Z) - \sqrt s \epsilon)

BoTorch finds these functions by the type of the model, once this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from botorch.sampling.pathwise.features import KernelEvaluationMap, gen_kernel_features
from botorch.sampling.pathwise.paths import GeneralizedLinearPath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths, MatheronPath
from botorch.sampling.pathwise.prior_samplers import DrawKernelFeaturePaths
from botorch.sampling.pathwise.update_strategies import GaussianUpdate
from botorch.sampling.pathwise.utils import get_input_transform, get_output_transform
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.surrogates.model import SingleTaskStreamingGP


@DrawKernelFeaturePaths.register(SingleTaskStreamingGP)
def draw_prior_paths(
    model: SingleTaskStreamingGP,
    sample_shape: torch.Size,
    num_features: int = 1024,
    **ignored: Any,
) -> GeneralizedLinearPath:
    """Paths of the prior from random features of the kernel.

    The paths hold frozen copies of the modules, so they do not change when the model
    learns.

    Args:
        model: The model.
        sample_shape: Shape of the paths.
        num_features: Number of random features.
        **ignored: Options of other prior samplers of BoTorch.
    """
    kernel, mean, _ = model.model.frozen_modules(model.model.dtype)
    features = gen_kernel_features(
        kernel=kernel,
        num_inputs=model.inducing_points.size(-1),
        num_outputs=num_features,
    )
    shape = (*sample_shape, *model.model.batch_shape, features.num_outputs)
    return GeneralizedLinearPath(
        feature_map=features,
        weight=torch.randn(shape, dtype=kernel.dtype, device=kernel.device),
        bias_module=mean,
        input_transform=get_input_transform(model),
        output_transform=get_output_transform(model),
    )


@GaussianUpdate.register(SingleTaskStreamingGP, (Likelihood, NoneType))
def draw_update_paths(
    model: SingleTaskStreamingGP,
    likelihood: Likelihood | None,
    *,
    sample_values: Tensor,
    **ignored: Any,
) -> GeneralizedLinearPath:
    r"""The update of prior paths by the pseudo-observations.

    The inverse is written with :math:`D = I + A A^\top / s`, :math:`A = (U L)^\top`, as
    in predictions: the weights are :math:`L^{-\top} D^{-1} A e / s`.

    Args:
        model: The model.
        likelihood: Not used: the model has one.
        sample_values: Values of the paths at the inducing points.
        **ignored: Options of other update strategies of BoTorch.
    """
    core = model.model
    predictor = core.predictor()
    z, posterior = predictor.z, predictor.posterior
    assert posterior is not None  # there are data from the constructor on
    U, g = core.summary.U, core.summary.g
    shared = bool(core.summary.shared_noise)
    s = core.noise_scale(core.likelihood, g, shared).detach().to(g.dtype)
    f = sample_values.to(g.dtype)
    error = g - fn.matvec(U, f)
    error = error - s.sqrt().unsqueeze(-1) * torch.randn_like(error)
    L, L_D = posterior.L, posterior.L_D
    Ae = L.mT @ (U.mT @ error.unsqueeze(-1)) / s[..., None, None]
    v = torch.cholesky_solve(Ae, L_D)
    weight = torch.linalg.solve_triangular(L.mT, v, upper=True).squeeze(-1)
    return GeneralizedLinearPath(
        feature_map=KernelEvaluationMap(
            kernel=core.frozen_modules(core.dtype)[0],
            points=z.to(sample_values.dtype),
            input_transform=get_input_transform(model),
        ),
        weight=weight.to(sample_values.dtype),
    )


@DrawMatheronPaths.register(SingleTaskStreamingGP)
def draw_posterior_paths(
    model: SingleTaskStreamingGP,
    *,
    sample_shape: torch.Size,
    prior_sampler: Callable,
    update_strategy: Callable,
) -> MatheronPath:
    """Paths of the posterior.

    Args:
        model: The model.
        sample_shape: Shape of the paths.
        prior_sampler: Draws paths of the prior.
        update_strategy: Draws the update from the data.
    """
    with model.model.locks.commit:  # both from one posterior
        z = model.inducing_points.to(model.model.dtype)
        prior = prior_sampler(model=model, sample_shape=sample_shape)
        # Only the sum of both has the units of the outcomes.
        prior.output_transform = None
        update = update_strategy(model=model, sample_values=prior.forward(z))
    return MatheronPath(
        prior_paths=prior,
        update_paths=update,
        output_transform=get_output_transform(model),
    )

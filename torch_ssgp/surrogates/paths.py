r"""Sample paths by Matheron's rule: a prior path plus an update from the data.

With the rows :math:`H f(P) = t + \varepsilon` of :mod:`torch_ssgp.rows` and their
factor :math:`W^\top W = (s I + H K H^\top)^{-1}`,

.. math::
    f(\cdot) + k(\cdot, P) H^\top W^\top W (t - H f(P) - \sqrt s \epsilon).

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
from torch_ssgp.kernels import Drifting
from torch_ssgp.modules import square_gram
from torch_ssgp.prediction import Predictor
from torch_ssgp.rows import Regression, see_vector
from torch_ssgp.surrogates.model import SingleTaskStreamingGP

JITTER = 1e-8  # of what a function has drifted, relative to its variance


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
    r"""The update of prior paths by the rows."""
    core = model.model
    predictor = core.predictor()
    if predictor.tails:  # the factor of all rows, those of fantasies too
        predictor = core.light_copy().predictor()
    rows, factor, points = predictor.rows, predictor.factor, predictor.points
    assert factor is not None  # there are data from the constructor on
    f, decay = sample_values.to(points.dtype), torch.ones_like(points[..., 0])
    if isinstance(predictor.form, Drifting):
        f, decay = values_then(predictor, predictor.form, f)
        points = points[..., :-1]
    error = rows.target - see_vector(rows, f)
    error = error - predictor.s.sqrt().unsqueeze(-1) * torch.randn_like(error)
    weight = seen_from(rows, fn.matvec(factor.W.mT, fn.matvec(factor.W, error)))
    return GeneralizedLinearPath(
        feature_map=KernelEvaluationMap(
            kernel=core.frozen_modules(core.dtype)[0],
            points=points.to(sample_values.dtype),
            input_transform=get_input_transform(model),
        ),
        weight=(decay * weight).to(sample_values.dtype),
    )


def values_then(
    predictor: Predictor, form: Drifting, f: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Values of a function that drifts when its points were data, given those of now.

    .. math::
        f_{then} - m = d (f - m) + e, \quad d = \exp(-w \, age), \quad
        e \sim N(0, K_{then} - d K d^\top)

    Values of now are ``(*sample, *batch, r)``; returns those of then, and ``d``.
    """
    assert predictor.now is not None
    x, time = predictor.points[..., :-1], predictor.points[..., -1]
    d, m = (-form.rate.unsqueeze(-1) * (predictor.now - time)).exp(), predictor.mean(x)
    left = d.unsqueeze(-1) * square_gram(form.base, x) * d.unsqueeze(-2)
    K = square_gram(form, predictor.points, x.size(-2), JITTER) - left
    return m + d * (f - m) + fn.matvec(fn.cholesky(K), torch.randn_like(f)), d


def seen_from(rows: Regression, a: Tensor) -> Tensor:
    """``Hᵀ a`` for a vector ``a`` ``(*batch, p + k)``."""
    num_rows = rows.U.size(-2)
    past, raw = a[..., :num_rows], a[..., num_rows:]
    raw = raw if rows.root is None else rows.root * raw
    return torch.cat([fn.matvec(rows.U.mT, past), raw], -1)


@DrawMatheronPaths.register(SingleTaskStreamingGP)
def draw_posterior_paths(
    model: SingleTaskStreamingGP,
    *,
    sample_shape: torch.Size,
    prior_sampler: Callable,
    update_strategy: Callable,
) -> MatheronPath:
    """Paths of the posterior."""
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

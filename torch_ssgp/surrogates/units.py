r"""Units of the outcomes: changing the standardisation of a memory.

A model remembers standardised outcomes :math:`\tilde y = (y - \mu) / \tau`. Its rows
are linear in them, so other constants :math:`\mu', \tau'` only rescale them:

.. math:: \tilde y' = c \tilde y + e, \quad c = \tau / \tau', \quad
    e = (\mu - \mu') / \tau'.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.models.transforms.outcome import Standardize
from gpytorch.kernels import AdditiveKernel, Kernel, ScaleKernel
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from gpytorch.means import ConstantMean
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.memory import Memory
from torch_ssgp.models import StreamingGP


class Moments(NamedTuple):
    """Count, mean and spread of all outcomes seen, in original units.

    Attributes:
        number: ``()`` or ``batch_shape x 1 x m``, how many; fractional after
            forgetting.
        mean: ``batch_shape x 1 x m``.
        squares: ``batch_shape x 1 x m``, sum of squared deviations from the mean.
    """

    number: Tensor
    mean: Tensor
    squares: Tensor

    def extended(self, Y: Tensor, power: Tensor | float) -> Moments:
        """With new outcomes ``Y``; those before have the weight ``power``."""
        n, old = Y.size(-2), power * self.number
        total = old + n
        mean = Y.mean(-2, keepdim=True)
        squares = (Y - mean).square().sum(-2, keepdim=True)
        delta = mean - self.mean
        return Moments(
            total,
            self.mean + delta * (n / total),
            power * self.squares + squares + delta.square() * (n * old / total),
        )

    def standardization(self) -> tuple[Tensor, Tensor]:
        """Means and standard deviations that ``Standardize`` would learn from all."""
        stdvs = (self.squares / (self.number - 1).clamp_min(1)).sqrt()
        is_large = (stdvs >= 1e-8) & (self.number > 1)
        return self.mean, torch.where(is_large, stdvs, torch.ones_like(stdvs))


def set_standardization(
    transform: Any, means: Tensor, stdvs: Tensor
) -> tuple[Tensor, Tensor]:
    """Change a ``Standardize``; returns scale and shift from old units to new ones."""
    if type(transform) is not Standardize:
        raise UnsupportedError(
            f"The outcome transform is {type(transform).__name__}; only the "
            "constants of Standardize can be changed."
        )
    means = means.to(transform.means).expand_as(transform.means).clone()
    stdvs = stdvs.to(transform.stdvs).expand_as(transform.stdvs).clone()
    if not bool((stdvs > 0).all()):
        raise InputDataError("stdvs has values that are not above zero.")
    scale = transform.stdvs / stdvs
    shift = (transform.means - means) / stdvs
    transform.means, transform.stdvs = means, stdvs
    transform._stdvs_sq = stdvs.square()
    return scale, shift


def rescale(core: StreamingGP, scale: Tensor, shift: Tensor) -> None:
    """Convert a model to other units in place; scale and shift are ``(*batch,)``."""
    _rescale_modules(core, scale, shift)
    core.memory = _rescaled_memory(core.memory, scale, shift)


def _rescale_modules(core: StreamingGP, scale: Tensor, shift: Tensor) -> None:
    """Convert mean, output scale and noise to other units."""
    for module in core.mean_module.modules():
        if isinstance(module, ConstantMean):
            constant = module.constant
            module.constant = _same_shape(scale * constant + shift, constant)
    _rescale_kernel(core.covar_module, scale.square())
    for name in ("noise_covar", "second_noise_covar"):
        covar = getattr(core.likelihood, name, None)
        if isinstance(covar, HomoskedasticNoise):
            value = _same_shape(scale.square().unsqueeze(-1) * covar.noise, covar.noise)
            # Not onto the bound itself, where a transformed parameter is infinite.
            lowest = 1.001 * float(covar.raw_noise_constraint.lower_bound)
            covar.noise = value.clamp_min(lowest)


def _rescale_kernel(kernel: Kernel, variance: Tensor) -> None:
    if isinstance(kernel, ScaleKernel):
        kernel.outputscale = _same_shape(
            variance * kernel.outputscale, kernel.outputscale
        )
    elif isinstance(kernel, AdditiveKernel):
        for part in kernel.kernels:
            _rescale_kernel(part, variance)


def _same_shape(value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape:
        raise UnsupportedError(
            f"A hyperparameter of shape {tuple(like.shape)} is shared by outputs or "
            f"batches whose units change differently, {tuple(value.shape)}. Build the "
            "modules with batch_shape= batch_shape x m."
        )
    return value


def _rescaled_memory(memory: Memory, scale: Tensor, shift: Tensor) -> Memory:
    """The memory in other units, with raw targets and known noise variances."""
    new, dtype = copy(memory), memory.g.dtype
    scale, shift = scale.to(dtype), shift.to(dtype)
    shared = bool(memory.shared_noise)
    units = scale, shift
    past = fn.rescale(memory.compressed.past, *units, shared)
    jacobian = memory.num_data * scale.log()
    scale, shift = scale.unsqueeze(-1), shift.unsqueeze(-1)
    new.replace(
        U=past.U,
        g=past.g,
        row_residual=past.rho,
        y=scale * memory.y + shift,
        target=scale * memory.target + shift,
        noise=scale.square() * memory.noise,
        extremes=scale * memory.extremes + shift,
        bound=memory.bound - jacobian,
    )
    if memory.is_branch:
        base = fn.rescale(memory.of_base, *units, shared)
        rest = memory.inherited[..., 1:]
        new.replace(inherited=torch.cat([base.rho.unsqueeze(-1), rest], -1))
    return new

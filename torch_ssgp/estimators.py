"""What the estimators for scikit-learn and river share: NumPy in, NumPy out."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import Kernel, MaternKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    SoftmaxLikelihood,
)
from gpytorch.means import Mean
from torch import Tensor, nn

from torch_ssgp import validation as check
from torch_ssgp.exceptions import ArgumentError
from torch_ssgp.inducing import InducingPolicy
from torch_ssgp.likelihoods import couples_classes
from torch_ssgp.models import StreamingGP
from torch_ssgp.modules import observation_noise
from torch_ssgp.update import UpdateOptions, UpdateResult

Array = np.ndarray[Any, Any]

_NUM_DRAWS = 512  # of a softmax; its probabilities are then right to three digits
_CHUNK = 4096  # rows whose draws are held at once


def default_kernel(num_dims: int, batch_shape: torch.Size = torch.Size()) -> Kernel:
    """A Matérn 5/2 kernel with one lengthscale per input.

    Inputs need no scaling: the first update reads their units off the data.
    """
    base = MaternKernel(2.5, ard_num_dims=num_dims, batch_shape=batch_shape)
    return ScaleKernel(base, batch_shape=batch_shape)


def class_likelihood(num_classes: int) -> tuple[Likelihood, torch.Size]:
    """The likelihood of so many classes, and the batch shape of its functions."""
    if num_classes == 2:
        return BernoulliLikelihood(), torch.Size()
    likelihood = SoftmaxLikelihood(num_classes=num_classes, mixing_weights=False)
    return likelihood, torch.Size([num_classes])


def checked_options(options: UpdateOptions | None) -> UpdateOptions:
    """The options of an update, or its defaults."""
    if options is None:
        return UpdateOptions()
    check.check_module(
        options, "options", UpdateOptions, "UpdateOptions(num_steps=50) or None"
    )
    return options


def check_level(level: float) -> None:
    """A probability of an interval."""
    if not (check.is_number(level) and 0 < level < 1):
        raise ArgumentError(
            f"level is {level!r}; expected a probability between 0 and 1."
        )


def default_likelihood(batch_shape: torch.Size = torch.Size()) -> GaussianLikelihood:
    """Gaussian, without GPyTorch's lower limit of the noise: targets have any unit."""
    return GaussianLikelihood(noise_constraint=Positive(), batch_shape=batch_shape)


def make_model(
    num_dims: int,
    likelihood: Likelihood | None = None,
    batch_shape: torch.Size = torch.Size(),
    *,
    kernel: Kernel | None = None,
    mean: Mean | None = None,
    num_inducing: int = 100,
    memory_size: int | None = None,
    inducing_policy: InducingPolicy | None = None,
    device: str | torch.device | None = None,
) -> StreamingGP:
    """A new float64 model, built from copies of the arguments."""
    if kernel is None:
        kernel = default_kernel(num_dims, batch_shape)
    check.check_module(kernel, "kernel", Kernel, "ScaleKernel(RBFKernel()) or None")
    if likelihood is None:
        likelihood = default_likelihood(batch_shape)
    device = torch.get_default_device() if device is None else torch.device(device)
    kernel, likelihood, mean = (
        deepcopy(module).to(device) if isinstance(module, nn.Module) else module
        for module in (kernel, likelihood, mean)
    )
    model = StreamingGP(
        kernel,
        likelihood,
        mean,
        num_inducing=num_inducing,
        memory_size=memory_size,
        inducing_policy=deepcopy(inducing_policy),
        batch_shape=batch_shape,
    )
    return model.to(device, torch.float64)


def widen(
    model: StreamingGP, wider: StreamingGP, column: Tensor, lengthscale: Tensor
) -> StreamingGP:
    """The same model with more inputs, each of which was constant so far.

    What it knows is unchanged: all data seen have the same value of the new inputs,
    ``column``. The wider one, a new model with the default kernel, is returned.
    """
    state, new = model.state_dict(), len(column)
    for name, value in wider.state_dict().items():
        known = state[name]
        if name == "memory.points":
            added = column.to(known).expand(*known.shape[:-1], new)
        elif name.startswith(("covar_module.", "start.")) and value.ndim:
            added = value[..., known.size(-1) :]
        else:
            continue
        state[name] = torch.cat([known, added], -1)
    wider.load_state_dict(state)
    wider.warned = model.warned
    base = wider.covar_module.base_kernel
    known = base.lengthscale.detach()[..., :-new]
    base.lengthscale = torch.cat(
        [known, lengthscale.to(known).expand(*known.shape[:-1], new)], -1
    )
    return wider


def as_tensor(value: Array, model: StreamingGP) -> Tensor:
    """A copy of an array, in the dtype and on the device of a model."""
    value = np.array(value, dtype=np.float64, order="C")
    return torch.from_numpy(value).to(model.device, model.dtype)


def as_array(value: Tensor) -> Array:
    """A tensor as an array."""
    return value.detach().cpu().numpy()


def learn(
    model: StreamingGP,
    x: Tensor,
    y: Tensor,
    options: UpdateOptions,
    *,
    noise: Tensor | None = None,
    weight: Tensor | None = None,
) -> UpdateResult:
    r"""Like :meth:`StreamingGP.update`, with options as one object and with weights.

    A weight is the power of the likelihood of a datum:

    .. math:: \log p(y_i \mid f_i)^{w_i} = w_i \log p(y_i \mid f_i),

    what :math:`w_i` equal data say together. With Gaussian noise the posterior is that
    of noise :math:`\sigma^2 / w_i`.

    Args:
        model: The model.
        x: ``(n, d)``.
        y: ``(*batch_shape, n)``.
        options: How to learn.
        noise: Known noise variances ``(*batch_shape, n)``.
        weight: ``(n,)``, above zero.

    Returns:
        What the update did.
    """
    with model.locks.turn(model.device):
        data = model.check_data(x, y, noise)
        if weight is not None:
            data = data._replace(weight=weight.to(data.y))
        return model.learn_from(data, options)


@torch.no_grad()
def moments(
    model: StreamingGP, x: Tensor, *, include_noise: bool, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the function, or of targets with Gaussian noise."""
    latent = model(x)
    variance = latent.variance
    if include_noise:
        variance = variance + observation_noise(model.likelihood, noise)
    return latent.mean, variance


@torch.no_grad()
def class_probabilities(model: StreamingGP, x: Tensor) -> Tensor:
    r"""Probabilities of all classes, ``(n, classes)``.

    For a softmax this is :math:`E\, \mathrm{softmax}(f)` over a fixed quasi-random set
    of normal points: the same in every call, and for every row.
    """
    if not couples_classes(model.likelihood):
        p = model.predict(x).mean
        return torch.stack([1 - p, p], -1)
    latent = model(x)
    mean, std = latent.mean.mT, latent.stddev.mT  # (n, classes)
    draws = _normal_points(mean.size(-1), mean.dtype, mean.device)  # (draws, classes)
    parts = [
        torch.softmax(m.unsqueeze(-2) + s.unsqueeze(-2) * draws, -1).mean(-2)
        for m, s in zip(mean.split(_CHUNK), std.split(_CHUNK), strict=True)
    ]
    return torch.cat(parts)


@lru_cache
def _normal_points(num_dims: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Points of a scrambled Sobol sequence, as normal draws ``(draws, num_dims)``."""
    engine = torch.quasirandom.SobolEngine(num_dims, scramble=True, seed=0)
    uniform = engine.draw(_NUM_DRAWS, dtype=torch.float64).clamp(1e-9, 1 - 1e-9)
    return torch.special.ndtri(uniform).to(device, dtype)

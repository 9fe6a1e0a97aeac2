"""Hyperparameters to start from, read off the first batch.

Only learnable parameters that still have GPyTorch's default (a raw value of exactly
zero) are changed. Values that a user set or froze stay. A constant mean of 0.0 counts
as a default, because it cannot be told from one. To keep it, freeze it, give it a
prior, or use ``ZeroMean``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import AdditiveKernel, Kernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.module import Module
from torch import Tensor, nn

from torch_ssgp import functional as fn
from torch_ssgp.exceptions import breakdowns
from torch_ssgp.modules import inducing_gram
from torch_ssgp.points import evenly

# Lengthscales tried, as fractions of the spread of the inputs; noise tried, as
# fractions of the variance of the targets. The evidence of a subset decides.
LENGTHSCALES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
NOISES = (0.001, 0.03, 0.3)
SUBSET = 200


class Length(NamedTuple):
    """A parameter in units of the inputs, and the extent of the inputs it sees."""

    kernel: Kernel
    name: str
    spread: Tensor


@breakdowns()
@torch.no_grad()
def initialize_from_data(
    mean: Mean,
    kernel: Kernel,
    likelihood: Likelihood,
    x: Tensor,
    y: Tensor,
    seen: Tensor | None = None,
) -> None:
    """Set scale, lengthscales, noise and constant mean, in place.

    From data ``(*batch, n, d)`` and ``(*batch, n)``, those ``seen``. Streams without
    data start from the average of the others.
    """
    if y.size(-1) > SUBSET:
        keep = evenly(x, SUBSET)
        x, y = x[..., keep, :], y[..., keep]
        seen = None if seen is None else seen[..., keep]
    level, variance = average(y, seen), _variance(y, seen)
    if seen is not None:
        seen = seen.expand(y.shape)
        level, variance = (_as_others(t, seen) for t in (level, variance))
    set_constants(mean, level)
    for scaled in scales_of(kernel):
        if is_default(scaled.raw_outputscale):
            set_hyperparameter(scaled, "raw_outputscale", variance)
    lengths = lengths_of(kernel, x)
    noise = None
    if isinstance(likelihood, GaussianLikelihood):
        free = is_default(likelihood.noise_covar.raw_noise)
        noise = Noise(likelihood.noise_covar, variance) if free else None
    if not lengths and noise is None:
        return

    def evidence() -> Tensor:
        sigma2 = getattr(likelihood, "noise", None)
        if sigma2 is None or noise is None and not _is_scalar(sigma2):
            sigma2 = 0.1 * variance.unsqueeze(-1)
        K = inducing_gram(kernel, x, 0.0).K_zz
        return _log_density(y - mean(x), K, sigma2, seen)

    search(lengths, noise, LENGTHSCALES, NOISES, evidence, seen)


def scales_of(kernel: Kernel) -> list[ScaleKernel]:
    """Scales that together scale the kernel: of all terms, of one factor."""
    if isinstance(kernel, ScaleKernel):
        return [kernel]
    inner = getattr(kernel, "base_kernel", None)
    parts = [scales_of(k) for k in getattr(kernel, "kernels", [inner] if inner else [])]
    if isinstance(kernel, AdditiveKernel):
        return sum(parts, [])
    return next(filter(None, parts), [])


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of networks, which are no GPyTorch modules."""
    return [
        parameter
        for part in module.modules()
        if not isinstance(part, Module)
        for parameter in part.parameters(recurse=False)
    ]


def lengths_of(kernel: Kernel, x: Tensor) -> list[Length]:
    """What is in units of the inputs, and nobody set.

    Behind a network that is nothing: the extent of its features is not that of the
    inputs, and features that a short lengthscale takes apart teach a network nothing.
    """
    if weights_of(kernel):
        return []
    return [
        Length(k, name, input_spread(k, name, x))
        for k in kernel.modules()
        if (name := length_name(k)) and is_default(getattr(k, name))
    ]


def set_constants(mean: Mean, level: Tensor) -> None:
    """Set constants that the user has not set to ``level`` ``(*batch,)``."""
    for module in mean.modules():
        if (
            isinstance(module, ConstantMean)
            and not list(module.named_priors())
            and is_default(module.raw_constant)
        ):
            module.raw_constant.copy_(fit_shape(level, module.raw_constant))


class Noise(NamedTuple):
    """A module with a noise to set, and the variance ``(*batch,)`` of the targets."""

    module: nn.Module
    variance: Tensor

    def set_to(self, level: float | Tensor) -> None:
        """Set the noise to a fraction of the variance, one for all or for each."""
        set_hyperparameter(
            self.module, "raw_noise", level * self.variance.unsqueeze(-1)
        )


def search(
    lengths: list[Length],
    noise: Noise | None,
    fractions: tuple[float, ...],
    levels: tuple[float, ...],
    score: Callable[[], Tensor],
    seen: Tensor | None = None,
) -> None:
    """Take the pair of lengthscale and noise with the largest score, per stream.

    ``fractions`` of the extent of the inputs and ``levels``, fractions of the variance
    of the targets, are tried; streams of which nothing was ``seen`` follow the rest.
    """
    fractions = fractions if lengths else (1.0,)
    levels = levels if noise is not None else (1.0,)
    grid = list(itertools.product(fractions, levels))
    scores = []
    for fraction, level in grid:
        for base, name, spread in lengths:
            set_hyperparameter(base, name, fraction * spread)
        if noise is not None:
            noise.set_to(level)
        scores.append(score())
    best = _best(scores, seen)
    table = torch.tensor(grid, dtype=scores[0].dtype, device=best.device)[best]
    for base, name, spread in lengths:
        set_hyperparameter(base, name, table[..., 0, None, None] * spread)
    if noise is not None:
        noise.set_to(table[..., 1, None])


def _best(scores: list[Tensor], seen: Tensor | None) -> Tensor:
    """Which of several tries is the best, ``(*batch,)``."""
    score = torch.stack(scores).nan_to_num(-torch.inf)
    if seen is not None:
        total = score.reshape(len(scores), -1).sum(-1)
        total = total.view(-1, *(1 for _ in scores[0].shape))
        score = torch.where(seen.any(-1), score, total)
    return score.argmax(0)


def average(values: Tensor, seen: Tensor | None) -> Tensor:
    """Mean ``(*batch,)`` of those ``seen``; zero where none is."""
    if seen is None:
        return values.mean(-1)
    return values.where(seen, 0).sum(-1) / seen.sum(-1).clamp_min(1)


def _as_others(value: Tensor, seen: Tensor) -> Tensor:
    """A value ``(*batch,)`` of streams with data; their mean for those without."""
    some = seen.any(-1)
    rest = value.where(some, 0).sum() / some.sum().clamp_min(1)
    return torch.where(some, value, rest)


def _log_density(r: Tensor, K: Tensor, noise: Tensor, seen: Tensor | None) -> Tensor:
    """log N(r; 0, K + noise) of those that count, up to a constant."""
    noise = noise.expand(r.shape)
    if seen is not None:
        K = K.where(seen.unsqueeze(-1) & seen.unsqueeze(-2), 0)
        r, noise = r.where(seen, 0), noise.where(seen, 1)
    L = fn.cholesky(K + torch.diag_embed(noise))
    white = fn.solve_lower(L, r.unsqueeze(-1)).squeeze(-1)
    return -0.5 * (fn.squared_norm(white) + fn.log_det(L))


def _is_scalar(noise: object) -> bool:
    return isinstance(noise, Tensor) and noise.size(-1) == 1


def is_default(raw: Tensor) -> bool:
    """Whether a raw parameter is learnable and still has GPyTorch's default."""
    return raw.requires_grad and bool((raw == 0).all())


def _variance(y: Tensor, seen: Tensor | None) -> Tensor:
    """Variance of the targets, or their size if they vary by no more than rounding."""
    variance = average((y - average(y, seen).unsqueeze(-1)).square(), seen)
    size = average(y.square(), seen)
    rounding = (10 * torch.finfo(y.dtype).eps) ** 2 * size
    variance = torch.where(variance > rounding, variance, size)
    return torch.where(variance > 0, variance, torch.ones_like(variance))


def length_name(module: nn.Module) -> str | None:
    """The parameter in units of the inputs; a periodic kernel's is its period."""
    for name in ("raw_period_length", "raw_lengthscale"):
        if isinstance(module, Kernel) and getattr(module, name, None) is not None:
            return name
    return None


def input_spread(kernel: Kernel, name: str, x: Tensor, nothing: float = 1.0) -> Tensor:
    """Extent of the inputs a kernel sees, ``(*batch, 1, d or 1)``.

    It is in the form of the hyperparameter ``name``, and ``nothing`` where all inputs
    are at one place.
    """
    if kernel.active_dims is not None:
        x = x[..., kernel.active_dims]
    spread = x.amax(-2, keepdim=True) - x.amin(-2, keepdim=True)
    num_dims = getattr(kernel, name).size(-1)
    if num_dims == 1 or num_dims != spread.size(-1):
        spread = spread.square().mean(-1, keepdim=True).sqrt()
    return torch.where(spread > 0, spread, nothing)


def set_hyperparameter(module: Module, name: str, value: Tensor) -> None:
    """Set a hyperparameter by its raw name, within its constraint."""
    raw = getattr(module, name)
    constraint: Interval = module.constraint_for_parameter_name(name)
    value = fit_shape(value, raw)
    margin = 1e-6
    value = value.maximum(constraint.lower_bound * (1 + margin))
    value = value.minimum(constraint.upper_bound * (1 - margin))
    raw.copy_(constraint.inverse_transform(value))


def fit_shape(value: Tensor, like: Tensor) -> Tensor:
    """Average over streams that share a parameter, repeat over those that do not."""
    while value.ndim > like.ndim:
        value = value.mean(0)
    for dim, size in enumerate(like.shape[like.ndim - value.ndim :]):
        if size == 1 and value.size(dim) > 1:
            value = value.mean(dim, keepdim=True)
    return value.expand(like.shape).clone()

r"""Hyperparameters to start from, for likelihoods that are not Gaussian.

As in :mod:`torch_ssgp.update.initialization`, whatever a user set stays. The latent
function is not observed, so its size is read off one Gaussian site per datum:
pseudo-targets :math:`m + \partial_m \log p / |\partial_m^2 \log p|`, in the units of
the function whatever the link.
"""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from torch_ssgp.exceptions import breakdowns
from torch_ssgp.likelihoods import expected_log_prob, takes_labels
from torch_ssgp.memory import Data
from torch_ssgp.points import evenly
from torch_ssgp.update.initialization import (
    Noise,
    is_default,
    lengths_of,
    scales_of,
    search,
    set_constants,
    set_hyperparameter,
)
from torch_ssgp.update.sites import SiteObjective

# Lengthscales tried, as fractions of the diameter of the inputs; noise tried, as
# fractions of the variance of the targets. The bound of a subset decides.
LENGTHSCALES = (0.05, 0.15, 0.5)
NOISES = (0.003, 0.03, 0.3)
SUBSET = 100
NEWTON_STEPS = 30


@breakdowns()
@torch.no_grad()
def initialize_sites(objective: SiteObjective) -> None:
    """Set constant mean, scale, lengthscales and noise of its modules, in place."""
    x, y, seen = objective.data.x, objective.data.y, objective.data.seen
    if y.size(-1) > SUBSET:
        keep = evenly(x, SUBSET)
        x, y = x[..., keep, :], y[..., keep]
        seen = None if seen is None else seen[..., keep]
    if seen is not None:
        seen = seen.expand(y.shape)
    mean, kernel, likelihood = objective.mean, objective.kernel, objective.likelihood
    variance = _robust_variance(y)
    noise = Noise(likelihood, variance) if _has_free_noise(likelihood) else None
    if noise is not None:
        noise.set_to(0.1)
    level = torch.zeros_like(y[..., :1])
    if not takes_labels(likelihood):
        level = _constant(likelihood, y, start=noise is not None)
        set_constants(mean, level.squeeze(-1))
    # A noise of the targets means that they are the function plus noise.
    has_noise = hasattr(likelihood, "raw_noise")
    scale = variance if has_noise else _latent_variance(likelihood, y, level)
    for scaled in scales_of(kernel):
        if is_default(scaled.raw_outputscale):
            set_hyperparameter(scaled, "raw_outputscale", scale)
    lengths = [
        each._replace(spread=each.spread * _diameter(each.kernel, each.name, x))
        for each in lengths_of(kernel, x)
    ]
    if not lengths and noise is None:
        return

    def bound() -> Tensor:
        trial = SiteObjective(
            objective.prior,
            objective.rows,
            Data(x, y, weight=None if seen is None else seen.to(y.dtype)),
            shared_noise=False,
            alpha=0.0,
            jitter=objective.jitter,
        )
        bound = trial.guess_sites(num_iterations=6)
        if trial.coupled:
            bound = bound.sum(-1, keepdim=True).expand(bound.shape)
        return bound

    search(lengths, noise, LENGTHSCALES, NOISES, bound, seen)


def _diameter(kernel: Kernel, name: str, x: Tensor) -> float:
    """Diameter of the inputs a kernel sees, in units of their extent in each."""
    if name == "raw_period_length":  # of each input by itself
        return 1.0
    dims = x.size(-1) if kernel.active_dims is None else len(kernel.active_dims)
    return dims**0.5


def _has_free_noise(likelihood: Likelihood) -> bool:
    """Whether there is a noise of the targets that the user has not set."""
    raw = getattr(likelihood, "raw_noise", None)
    return raw is not None and is_default(raw)


def _robust_variance(y: Tensor) -> Tensor:
    """Variance of the bulk of the targets, ``(*batch,)``."""
    q = torch.tensor([0.25, 0.75], dtype=y.dtype, device=y.device)
    low, high = y.quantile(q, -1)
    variance = ((high - low) / 1.35).square()
    variance = torch.where(variance > 0, variance, y.var(-1, correction=0))
    return torch.where(variance > 0, variance, torch.ones_like(variance))


def _newton(likelihood: Likelihood, y: Tensor, f: Tensor) -> tuple[Tensor, ...]:
    """Log-likelihood, its slope and curvature in magnitude, at known ``f``."""
    with torch.enable_grad():
        f = f.expand(y.shape).clone().requires_grad_()
        v = torch.full_like(f, 1e-6).requires_grad_()
        log_prob = expected_log_prob(likelihood, y, f, v)
        slope, curve = torch.autograd.grad(log_prob.sum(), (f, v))
    return log_prob.detach(), slope, (2 * curve).abs().clamp_min(1e-10)


def _constant(likelihood: Likelihood, y: Tensor, start: bool) -> Tensor:
    """The constant function that explains the targets best, ``(*batch, 1)``."""
    level = y.median(-1, keepdim=True).values if start else torch.zeros_like(y[..., :1])
    step = torch.ones_like(level)
    value, slope, curve = (
        t.sum(-1, keepdim=True) for t in _newton(likelihood, y, level)
    )
    for _ in range(NEWTON_STEPS):
        trial = level + step * slope / curve
        terms = [t.sum(-1, keepdim=True) for t in _newton(likelihood, y, trial)]
        better = terms[0] > value
        level = torch.where(better, trial, level)
        value, slope, curve = (
            torch.where(better, new, old)
            for new, old in zip(terms, (value, slope, curve), strict=True)
        )
        step = torch.where(better, (2 * step).clamp_max(1), step / 4)
    return level


def _latent_variance(likelihood: Likelihood, y: Tensor, level: Tensor) -> Tensor:
    """Size of the function around its level, ``(*batch,)``."""
    _, slope, curve = _newton(likelihood, y, level)
    shift = slope / curve
    total = shift.square().mean(-1)
    if not takes_labels(likelihood):
        total = _robust_variance(shift)
    signal = torch.maximum(total - (1 / curve).median(-1).values, 0.3 * total)
    return signal.clamp(1e-3, 1e6) if takes_labels(likelihood) else signal

"""Stationary kernels as functions of a distance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TINY = 1e-30  # squared distances below which a point is the same


def far(like: Tensor) -> float:
    """The exponent of the smallest covariance, in units of the scale.

    It is lost to rounding, while denormal numbers, which smaller ones and their
    products would be, take a processor ten times as long.
    """
    return -100.0 if like.dtype == torch.float64 else -40.0


def radial(q: Tensor, nu: float | None, alpha: Tensor | None) -> Tensor:
    r"""The exponential of :math:`q = -\tfrac12 r^2`, or a Matérn or RQ kernel of it."""
    if nu is not None:
        # Without a gradient there is nothing to keep for it.
        return _Matern.apply(q, nu) if q.requires_grad else matern(q, nu)[0]
    if alpha is None:
        return q.clamp_min(far(q)).exp()
    alpha = alpha.unsqueeze(-1)
    return (1 - q.clamp_max(0) / alpha).pow(-alpha)


class _Matern(torch.autograd.Function):
    r"""Matérn kernels of :math:`q = -\tfrac12 r^2`, a polynomial times an exponential.

    With :math:`t = \sqrt{2 \nu} r` the derivative in ``q`` has no pole at zero for
    :math:`\nu > \tfrac12`, unlike the square root in between.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, nu: float) -> Tensor:
        k, t, e = matern(q, nu)
        ctx.nu = nu
        ctx.save_for_backward(q, t, e)
        return k

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        q, t, e = ctx.saved_tensors
        nu = ctx.nu
        if torch.is_grad_enabled():  # somebody wants a second derivative
            t = (q * (-4 * nu)).clamp(_TINY, far(q) ** 2).sqrt()
            e = (-t).exp()
        return grad * matern_slope(t, e, nu), None


def matern_slope(t: Tensor, e: Tensor, nu: float) -> Tensor:
    """The derivative of a Matérn kernel in ``q``, from what :func:`matern` returns."""
    if nu == 0.5:
        inside = t > _TINY**0.5
        return torch.where(inside, e / torch.where(inside, t, 1), 0)
    return 3 * e if nu == 1.5 else (5 / 3) * (e + t * e)


def matern(q: Tensor, nu: float) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel, and the ``t`` and ``exp(-t)`` it is made of."""
    t = q.mul(-4 * nu).clamp_(0, far(q) ** 2).sqrt_()
    e = t.neg().exp_()
    if nu == 0.5:
        return e.clone(), t, e
    polynomial = 1 + t if nu == 1.5 else (t / 3 + 1).mul_(t).add_(1)
    return polynomial.mul_(e), t, e

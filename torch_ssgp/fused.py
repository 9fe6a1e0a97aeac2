r"""The variational bound with its gradient in closed form.

:func:`evidence` is what ``functional.project`` and ``functional.evidence`` compute for
:math:`\alpha = 0`, as one operation. With :math:`K_{br}` the covariance of ``b`` with
all rows, :math:`L L^\top = K_{bb}`, :math:`A = L^{-1} K_{br}`,
:math:`D = I + A A^\top / s`, :math:`\gamma = D^{-1} A r / s` and
:math:`W = I - D^{-1} - \gamma \gamma^\top`,

.. math::
    F &= -\tfrac{n}{2} \log 2 \pi s - \tfrac12 \log |D|
        - \tfrac{1}{2s} (\|r\|^2 + t - \|A\|^2) + \tfrac{1}{2s} r^\top A^\top \gamma \\
    \partial F / \partial K_{br} &= L^{-\top} (W A + \gamma r^\top) / s \\
    \partial F / \partial K_{bb} &=
        -\tfrac12 L^{-\top} (D - 2I + D^{-1} + \gamma \gamma^\top) L^{-1} \\
    \partial F / \partial r &= (A^\top \gamma - r) / s, \qquad
    \partial F / \partial t = -1 / (2s) \\
    \partial F / \partial s &= \tfrac{1}{2s} \big[ -n + (\|r\|^2 + t - \|A\|^2) / s
        + m - \mathrm{tr}\, D^{-1} - \|c\|^2 - \|\gamma\|^2 \big],
    \qquad \|c\|^2 = \gamma^\top D \gamma.

Two products and one triangular solve of ``m × m × rows``; the rest is ``m × m × m``.
The gradient is not differentiable: for second derivatives, and for Power-EP, use the
plain formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_ssgp.functional import (
    LOG_2PI,
    broadcast_matrices,
    cholesky,
    log_det,
    squared_norm,
)

SMALL = 128  # inducing points; of fewer, both halves of A Aᵀ are cheaper than one

# Sums over all processes of tensors that are sums over rows.
Sums = Callable[..., list[Tensor]]


def evidence(
    K_bb: Tensor,
    K_br: Tensor,
    r: Tensor,
    t: Tensor,
    s: Tensor,
    n: Tensor,
    sums: Sums | None = None,
) -> Tensor:
    """Lower bound ``(*batch,)`` of the log evidence of a regression on ``b``.

    Args:
        K_bb: ``(*batch, m, m)``, prior covariance of inducing values.
        K_br: ``(*batch, m, rows)``, their covariance with what the rows observe.
        r: ``(*batch, rows)``, residuals from the prior mean.
        t: ``(*batch,)``, prior variance of the rows and residual carried over.
        s: ``(*batch,)``, noise scale of the rows.
        n: ``()``, number of data behind the rows.
        sums: Adds up over rows that other processes have; ``None`` if all are here.
    """
    return _Evidence.apply(K_bb, K_br, r, t, s, n, sums)


class Saved(NamedTuple):
    r"""What the gradient needs of the value: letters as at the top of this file."""

    L: Tensor
    rows: Tensor  # (*batch, m + 1, rows): A with r below it
    D: Tensor
    L_D: Tensor  # its Cholesky factor
    gamma: Tensor  # (*batch, m, 1)
    s: Tensor
    n: Tensor
    misfit: Tensor  # ‖r‖² + t - ‖A‖²
    c2: Tensor  # ‖c‖²


def _value(
    K_bb: Tensor,
    K_br: Tensor,
    r: Tensor,
    t: Tensor,
    s: Tensor,
    n: Tensor,
    sums: Sums | None = None,
) -> tuple[Tensor, Saved]:
    """The bound, and what its gradient needs; see :func:`evidence`."""
    L = cholesky(K_bb)
    A = torch.linalg.solve_triangular(L, K_br, upper=False)
    A, r = broadcast_matrices(A, r.unsqueeze(-2))
    rows, scale = torch.cat([A, r], -2), s[..., None, None]
    D, Ar = products(rows)
    q = squared_norm(r, -1).squeeze(-1) + t
    if sums is not None:
        i, j = torch.tril_indices(*D.shape[-2:], device=D.device)
        lower, Ar, q = sums(D[..., i, j], Ar, q)
        D[..., i, j] = D[..., j, i] = lower
    misfit = q - _diagonal(D).sum(-1)
    D.div_(scale)
    _diagonal(D).add_(1)
    L_D = cholesky(D)
    c = torch.linalg.solve_triangular(L_D, Ar / scale, upper=False)
    gamma = torch.linalg.solve_triangular(L_D.mT, c, upper=True)
    c2 = squared_norm(c, -2).squeeze(-1)
    log_dets = n * (LOG_2PI + s.log()) + log_det(L_D)
    bound = -0.5 * (log_dets + misfit / s - c2)
    return bound, Saved(L, rows, D, L_D, gamma, s, n, misfit, c2)


def _gradient(saved: Saved, grad: Tensor) -> tuple[Tensor, ...]:
    """Derivatives in ``K_bb``, ``K_br``, ``r``, ``t``, ``s``, times ``grad``."""
    L, rows, D, L_D, gamma, s, n, misfit, c2 = saved
    m, weight = L.size(-1), grad / s
    D_inv = torch.cholesky_inverse(L_D)
    W = (D_inv + gamma @ gamma.mT).neg_()
    _diagonal(W).add_(1)
    # L⁻ᵀ [W, γ], and with D γ = A r / s what is left of dK_bb: a product and a
    # solve from the right, since D - 2I + D⁻¹ + γγᵀ = W (D - I) + γ (D γ)ᵀ.
    W = torch.linalg.solve_triangular(L.mT, torch.cat([W, gamma], -1), upper=True)
    below = torch.cat([D, (D @ gamma).mT], -2)
    _diagonal(below[..., :m, :]).sub_(1)
    middle = W @ below
    dK_bb = torch.linalg.solve_triangular(L, middle, upper=False, left=False)
    inner = (
        m
        - n
        + misfit / s
        - _diagonal(D_inv).sum(-1)
        - c2
        - squared_norm(gamma, -2).squeeze(-1)
    )
    dr = gamma.mT @ rows[..., :m, :] - rows[..., m:, :]
    return (
        dK_bb.mul_(-0.5 * grad[..., None, None]),
        (W * weight[..., None, None]) @ rows,
        weight.unsqueeze(-1) * dr.squeeze(-2),
        -0.5 * weight,
        0.5 * weight * inner,
    )


class _Evidence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        K_bb: Tensor,
        K_br: Tensor,
        r: Tensor,
        t: Tensor,
        s: Tensor,
        n: Tensor,
        sums: Sums | None,
    ) -> Tensor:
        bound, saved = _value(K_bb, K_br, r, t, s, n, sums)
        ctx.save_for_backward(*saved)
        return bound

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_gradient(Saved(*ctx.saved_tensors), grad), None, None


def products(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``A Aᵀ`` and ``A r`` of ``rows = [A; rᵀ]``; the first is symmetric."""
    m = rows.size(-2) - 1
    if m < SMALL:
        both = rows @ rows[..., :m, :].mT
        return both[..., :m, :], both[..., m:, :].mT
    half = m // 2
    top, A = rows[..., :half, :], rows[..., :m, :]
    D = rows.new_empty(*rows.shape[:-2], m, m)
    lower = rows[..., half:, :] @ A.mT
    D[..., half:, :] = lower[..., :-1, :]
    D[..., :half, half:] = lower[..., :-1, :half].mT
    D[..., :half, :half] = top @ top.mT
    return D, lower[..., -1:, :].mT


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)

r"""The mathematics of a streaming update, as pure functions of tensors.

The past is a small regression data set: pseudo-observations :math:`(U, g)` of the
function at the old inducing points :math:`Z_a`, with

.. math::
    \log p(y_{old} \mid f) \approx
        -\tfrac{n}{2} \log 2\pi s - \tfrac{1}{2s} [ \|g - U a\|^2 + \rho ].

An update is sparse regression on *new data + pseudo-observations*, and one QR
compresses both into the next pseudo-observations:

    project  ->  evidence                 (the bound, differentiable)
    project  ->  compress  ->  absorb     (the next pseudo-observations)

Letters, in code as in the text: ``a`` old inducing points, ``b`` new ones, ``f`` new
data, ``s`` test points (as an index) or the noise scale (as a value); ``n`` data,
``m`` inducing points, ``p`` pseudo-observations. Every tensor may carry leading batch
dimensions. Nothing in here knows about modules, and nothing waits for a device.

A long file, on purpose: the mathematics of the library, in one place and one notation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)


class PseudoObservations(NamedTuple):
    r"""What the past says about ``a = f(Z_a)``.

    Attributes:
        U: ``(*batch, p, m_a)``, the rows that were observed.
        g: ``(*batch, p)``, their targets, in function space (means not removed).
        rho: ``(*batch,)``, :math:`\rho`: the part of the data no function at
            ``Z_a`` explains, with what earlier projections lost.
        n: ``()``, the number of data behind it (a fraction after forgetting).
    """

    U: Tensor
    g: Tensor
    rho: Tensor
    n: Tensor

    def discount(self, power: float | Tensor) -> PseudoObservations:
        r"""The past with its likelihood raised to a power.

        Args:
            power: :math:`\lambda` in (0, 1], one or ``(*batch,)``; 1 forgets nothing.

        Returns:
            :math:`(\sqrt\lambda U, \sqrt\lambda g, \lambda \rho, \lambda n)`.
        """
        if isinstance(power, Tensor):
            root = power.sqrt().unsqueeze(-1)
            U, g = root.unsqueeze(-1) * self.U, root * self.g
            return PseudoObservations(U, g, power * self.rho, power * self.n)
        if power == 1:
            return self
        root = power**0.5
        return PseudoObservations(
            root * self.U, root * self.g, power * self.rho, power * self.n
        )


class PriorBlocks(NamedTuple):
    """The prior at the points of one update; jitter is already in it.

    Attributes:
        K_bb: ``(*batch, m_b, m_b)``.
        K_bf: ``(*batch, m_b, n)``.
        k_ff: ``(*batch, n)``, the diagonal of ``K_ff``.
        K_ba: ``(*batch, m_b, m_a)``.
        K_aa: ``(*batch, m_a, m_a)``.
        m_b: ``(*batch, m_b)``, prior mean at the new inducing points.
        m_f: ``(*batch, n)``, at the new data.
        m_a: ``(*batch, m_a)``, at the old inducing points.
        L_aa: ``(*batch, m_a, m_a)``, Cholesky factor of ``K_aa`` where what is lost
            is to be known to the last digits, see :func:`whiten`.
    """

    K_bb: Tensor
    K_bf: Tensor
    k_ff: Tensor
    K_ba: Tensor
    K_aa: Tensor
    m_b: Tensor
    m_f: Tensor
    m_a: Tensor
    L_aa: Tensor | None = None


class Projection(NamedTuple):
    r"""New data and pseudo-observations as rows of one regression on ``b``.

    Attributes:
        L: ``(*batch, m_b, m_b)``, Cholesky factor of ``K_bb``.
        A: ``(*batch, m_b, rows)``: row :math:`i` observes :math:`A_i^\top L^{-1} b`.
        r: ``(*batch, rows)``, residuals from the prior mean.
        loss: ``(*batch,)``, :math:`t`: what the projection on ``Z_b`` loses.
        rho: ``(*batch,)``, residual carried over, plus
            :math:`s \sum_i \lambda_i \log(\sigma_i^2 / s)` of the new rows.
        n: ``()``, number of data behind all rows.
        lost: ``(*batch, rows)``, the share of each row in ``t``; ``None`` where rows
            do not lose one by one.
    """

    L: Tensor
    A: Tensor
    r: Tensor
    loss: Tensor
    rho: Tensor
    n: Tensor
    lost: Tensor | None = None


def cholesky(K: Tensor) -> Tensor:
    """Lower Cholesky factor, filled with NaN where ``K`` is not positive definite.

    An exception would make a GPU wait for every factorisation of the inner loop; the
    NaN travels to the bound, where one check sees it.
    """
    L, info = torch.linalg.cholesky_ex(K)
    return torch.where((info == 0)[..., None, None], L, math.nan)


def solve_lower(L: Tensor, B: Tensor) -> Tensor:
    """Solve ``L X = B`` for lower triangular ``L`` and matrix ``B``."""
    return torch.linalg.solve_triangular(L, B, upper=False)


def matvec(A: Tensor, v: Tensor) -> Tensor:
    """``A v`` with broadcasting over leading dimensions."""
    return (A @ v.unsqueeze(-1)).squeeze(-1)


def log_det(L: Tensor) -> Tensor:
    """Log-determinant of ``L Lᵀ``."""
    return 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def squared_norm(v: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """Sum of squares over ``dim``."""
    return v.square().sum(dim)


class Whitened(NamedTuple):
    r"""Data and past in the coordinates :math:`w = L^{-1} (b - m_b)`.

    Attributes:
        L: ``(*batch, m_b, m_b)``, Cholesky factor of ``K_bb``.
        A_f: ``(*batch, m_b, n)``, how data depend on ``w``.
        lost_f: ``(*batch, n)``, the part of their prior variance ``w`` leaves.
        G: ``(*batch, m_b, p)``, how pseudo-observations depend on ``w``.
        lost_a: ``(*batch, p)``, the part of the prior variance of pseudo-observations
            that ``w`` leaves.
        r_a: ``(*batch, p)``, pseudo-observations minus their prior mean.
    """

    L: Tensor
    A_f: Tensor
    lost_f: Tensor
    G: Tensor
    lost_a: Tensor
    r_a: Tensor


def whiten(prior: PriorBlocks, past: PseudoObservations) -> Whitened:
    r"""Data and past as functions of ``b`` with the prior :math:`N(0, I)`.

    With ``L_aa`` the products of ``U`` go through :math:`V = U L_{aa}`, what the rows
    were before they became ``U``: where ``K_aa`` is nearly singular, entries of ``U``
    are large and cancel, those of ``V`` do not.

    Args:
        prior: Prior blocks at ``Z_b``, the data and ``Z_a``.
        past: Pseudo-observations at ``Z_a``.
    """
    L, U = cholesky(prior.K_bb), past.U
    num_new = prior.K_bf.size(-1)
    if prior.L_aa is None:
        A = solve_lower(L, torch.cat([prior.K_bf, prior.K_ba], -1))
        A_f, G = A[..., :num_new], A[..., num_new:] @ U.mT
        seen = (U @ prior.K_aa * U).sum(-1)
    else:
        V = U @ prior.L_aa
        K_bv = solve_lower(prior.L_aa, prior.K_ba.mT).mT @ V.mT
        A = solve_lower(L, torch.cat(broadcast_matrices(prior.K_bf, K_bv), -1))
        A_f, G = A[..., :num_new], A[..., num_new:]
        seen = squared_norm(V)
    return Whitened(
        L=L,
        A_f=A_f,
        lost_f=prior.k_ff - squared_norm(A_f, -2),
        G=G,
        lost_a=seen - squared_norm(G, -2),
        r_a=past.g - matvec(U, prior.m_a),
    )


class Weighed(NamedTuple):
    r"""Data in units of the noise scale of the rows.

    Attributes:
        root: ``(*batch, n)``, :math:`\sqrt{\lambda_i s / \sigma_i^2}`; ``None`` where
            they are ones.
        r: ``(*batch, n)``, residuals times ``root``.
        rho: ``(*batch,)``, :math:`s \sum_i \lambda_i \log(\sigma_i^2 / s)`; or ``0``.
    """

    root: Tensor | None
    r: Tensor
    rho: Tensor | float


def weigh(r: Tensor, noise: Tensor | None, s: Tensor, weight: Tensor | None) -> Weighed:
    """Bring data to the noise scale of the rows.

    Args:
        r: ``(*batch, n)`` residuals.
        noise: ``(*batch, n)`` or broadcastable, their noise variances; ``None`` where
            they are ``s``.
        s: ``(*batch,)`` noise scale of the rows.
        weight: ``(*batch, n)`` or ``(n,)``, powers of their likelihoods; ``None`` for
            ones.
    """
    rho: Tensor | float = 0.0
    w = weight
    if noise is not None:
        precision = (s.unsqueeze(-1) / noise).expand(r.shape)
        logs = precision.log()
        rho = -s * (logs if weight is None else weight * logs).sum(-1)
        w = precision if weight is None else weight * precision
    if w is None:
        return Weighed(None, r, rho)
    root = w.sqrt()
    return Weighed(root, r * root, rho)


def project(
    prior: PriorBlocks,
    past: PseudoObservations,
    y: Tensor,
    noise: Tensor | None,
    s: Tensor,
    alpha: float = 0.0,
    weight: Tensor | None = None,
) -> Projection:
    r"""Write new data and past as one regression on ``b``.

    .. math::
        A_f = L^{-1} K_{bf} W, \quad G = L^{-1} K_{ba} U^\top, \quad
        t = \mathrm{tr}\, W (K_{ff} - Q_{ff}) W
            + \mathrm{tr}\, U (K_{aa} - Q_{aa}) U^\top,

    with :math:`W = \mathrm{diag}(\sqrt{\lambda_i s / \sigma_i^2})`.

    Args:
        prior: Prior blocks at ``Z_b``, the new data and ``Z_a``.
        past: Pseudo-observations at ``Z_a``; ``p = 0`` rows if there is no past.
        y: ``(*batch, n)`` targets.
        noise: ``(*batch, n)`` or broadcastable, noise variance of each target;
            ``None`` where it is ``s`` for all of them.
        s: ``(*batch,)``, noise scale of the rows: the observation noise when it is
            shared with the past, one in site form.
        alpha: Power of Power-EP; 0 is the variational bound.
        weight: ``(*batch, n)`` or ``(n,)``, :math:`\lambda_i`, powers of the
            likelihood of each datum, below one for those that are being forgotten;
            ``None`` for ones.
    """
    L, A_f, lost_f, G, lost_a, r_a = whiten(prior, past)
    lost = None
    root, r_f, rho = weigh(y - prior.m_f, noise, s, weight)
    rho = past.rho + rho
    if root is not None:
        A_f, lost_f = A_f * root.unsqueeze(-2), lost_f * root.square()

    if alpha == 0:
        lost = torch.cat(broadcast_rows(lost_f, lost_a), -1)
        loss = lost.sum(-1)
    else:
        V_a = past.U @ prior.K_aa @ past.U.mT - G.mT @ G
        root_f, L_a, loss = power_ep(lost_f, V_a, s, alpha)
        A_f, r_f = A_f / root_f.unsqueeze(-2), r_f / root_f
        G = solve_lower(L_a, G.mT).mT
        r_a = solve_lower(L_a, r_a.unsqueeze(-1)).squeeze(-1)

    r_f, r_a = broadcast_rows(r_f, r_a)
    return Projection(
        L=L,
        A=torch.cat(broadcast_matrices(A_f, G), -1),
        r=torch.cat([r_f, r_a], -1),
        loss=loss,
        rho=rho,
        n=past.n + (y.size(-1) if weight is None else weight.sum(-1)),
        lost=lost,
    )


def power_ep(
    lost_f: Tensor, V_a: Tensor, s: Tensor, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Roots that whiten rows for Power-EP, and what is lost, ``(*batch,)``.

    .. math::
        \Sigma_y = I + \tfrac{\alpha}{s} \mathrm{diag}\, W (K_{ff} - Q_{ff}) W, \quad
        \Sigma_g = I + \tfrac{\alpha}{s} U (K_{aa} - Q_{aa}) U^\top, \quad
        t = \tfrac{s}{\alpha} (\log |\Sigma_y| + \log |\Sigma_g|)

    tends to the trace as :math:`\alpha \to 0`: one bound serves both.

    Args:
        lost_f: ``(*batch, n)``, the diagonal of what the data lose.
        V_a: ``(*batch, p, p)``, what the rows of the past lose.
        s: ``(*batch,)``, noise scale of the rows.
        alpha: The power, above zero.
    """
    scale = s.unsqueeze(-1)
    v_f = 1 + alpha * lost_f / scale
    eye = torch.eye(V_a.size(-1), dtype=V_a.dtype, device=V_a.device)
    L_a = cholesky(eye + alpha * V_a / scale.unsqueeze(-1))
    return v_f.sqrt(), L_a, s / alpha * (v_f.log().sum(-1) + log_det(L_a))


def temper(projection: Projection, past: PseudoObservations, s: Tensor) -> Projection:
    r"""Forget of each row what the points cannot say of it.

    The likelihood of row :math:`i` is raised to the power

    .. math:: w_i = s / (s + \lambda_i),

    as Power-EP with :math:`\alpha = 1` does, and nothing is left in the trace. For
    inputs that move on without end: what they left makes room, and is no noise.

    Args:
        projection: Rows of new data, then those of the past, not compressed.
        past: The past, for its residual and number of data.
        s: ``(*batch,)`` noise scale of the rows.
    """
    assert projection.lost is not None
    w = s.unsqueeze(-1) / (s.unsqueeze(-1) + projection.lost.clamp_min(0))
    num_old = past.g.size(-1)
    new, old = w[..., : w.size(-1) - num_old], w[..., w.size(-1) - num_old :]
    share = old.mean(-1) if num_old else torch.ones_like(projection.loss)
    num_new = projection.n - past.n
    count = new.mean(-1) * num_new if new.size(-1) else 0 * num_new
    return projection._replace(
        A=projection.A * w.sqrt().unsqueeze(-2),
        r=projection.r * w.sqrt(),
        rho=share * projection.rho,
        n=share * past.n + count,
        loss=torch.zeros_like(projection.loss),
        lost=None,
    )


def broadcast_rows(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two vectors with the batch dimensions of both."""
    if u.shape[:-1] == v.shape[:-1]:
        return u, v
    batch = torch.broadcast_shapes(u.shape[:-1], v.shape[:-1])
    return u.expand(*batch, -1), v.expand(*batch, -1)


def broadcast_matrices(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Two matrices with the batch dimensions of both."""
    if A.shape[:-2] == B.shape[:-2]:
        return A, B
    batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    return A.expand(*batch, -1, -1), B.expand(*batch, -1, -1)


def evidence(projection: Projection, s: Tensor) -> Tensor:
    r"""How well rows are explained, ``(*batch,)``; an approximation for Power-EP.

    .. math::
        F = -\tfrac{n}{2} \log 2\pi s - \tfrac12 \log |D|
            - \tfrac{1}{2s} (\|r\|^2 + \rho + t) + \tfrac12 \|c\|^2, \quad
        D = I + A A^\top / s = L_D L_D^\top, \quad c = L_D^{-1} A r / s

    Args:
        projection: Rows of the regression.
        s: ``(*batch,)`` noise scale of the rows.
    """
    A, r, n = projection.A, projection.r, projection.n
    scale = s[..., None, None]
    eye = torch.eye(A.size(-2), dtype=A.dtype, device=A.device)
    L_D = cholesky(eye + A @ A.mT / scale)
    c = solve_lower(L_D, A @ r.unsqueeze(-1) / scale).squeeze(-1)
    misfit = squared_norm(r) + projection.rho + projection.loss
    log_dets = n * (LOG_2PI + s.log()) + log_det(L_D)
    return -0.5 * (log_dets + misfit / s - squared_norm(c))


def compress(projection: Projection) -> Projection:
    r"""At most ``m_b`` rows that say the same: :math:`[A^\top, r] = Q R`.

    QR rather than :math:`A A^\top`: the condition number is not squared. Only the
    triangular factor is computed, so this step has no gradient.

    Args:
        projection: Rows of the regression.

    Returns:
        The same regression with ``min(rows, m_b)`` rows.
    """
    num_inducing, num_rows = projection.A.shape[-2:]
    if num_rows <= num_inducing:
        return projection
    rows = broadcast_matrices(projection.A, projection.r.unsqueeze(-2))
    R = torch.linalg.qr(torch.cat(rows, -2).mT, mode="r").R
    return projection._replace(
        A=R[..., :num_inducing, :num_inducing].mT,
        r=R[..., :num_inducing, num_inducing],
        rho=projection.rho + R[..., num_inducing, num_inducing].square(),
    )


def absorb(projection: Projection, m_b: Tensor) -> PseudoObservations:
    r"""Pseudo-observations at ``Z_b`` that carry everything the rows said.

    .. math:: U_b = A^\top L^{-1}, \quad g_b = r + U_b m_b, \quad \rho_b = \rho.

    What the projection loses is not residual, which would be paid again at every later
    noise: it is sunk, a constant of the bound.

    Args:
        projection: Rows of the regression, compressed or not.
        m_b: ``(*batch, m_b)`` prior mean at ``Z_b``.

    Returns:
        The next past.
    """
    U = torch.linalg.solve_triangular(
        projection.L, projection.A.mT, upper=False, left=False
    )
    return PseudoObservations(
        U=U.contiguous(),  # as it will be stored: copies go on with the same bits
        g=projection.r + matvec(U, m_b),
        rho=projection.rho,
        n=projection.n,
    )


def recall(past: PseudoObservations, L: Tensor, m_a: Tensor) -> Projection:
    """The pseudo-observations as rows of a regression on their own points.

    The inverse of :func:`absorb`: nothing new, nothing lost.

    Args:
        past: Pseudo-observations at ``Z_a``.
        L: ``(*batch, m_a, m_a)`` Cholesky factor of ``K_aa``.
        m_a: ``(*batch, m_a)`` prior mean at ``Z_a``.

    Returns:
        The rows; ``factorize`` gives q(a), ``evidence`` what the past is worth.
    """
    return Projection(
        L=L,
        A=(past.U @ L).mT,
        r=past.g - matvec(past.U, m_a),
        loss=torch.zeros_like(past.rho),
        rho=past.rho,
        n=past.n,
    )


def to_sites(past: PseudoObservations, s: Tensor) -> PseudoObservations:
    """Shared-noise rows divided by their noise: the same past with ``s = 1``.

    Args:
        past: Pseudo-observations with noise scale ``s``.
        s: ``(*batch,)`` noise scale.

    Returns:
        Pseudo-observations in site form.
    """
    return PseudoObservations(
        U=past.U / s.sqrt()[..., None, None],
        g=past.g / s.sqrt().unsqueeze(-1),
        rho=past.rho / s + past.n * s.log(),
        n=past.n,
    )


def rescale(
    past: PseudoObservations, scale: Tensor, shift: Tensor, shared: bool
) -> PseudoObservations:
    r"""The past in other units: what it says about :math:`c f + e`.

    .. math::
        \|g - U a\|^2 + \rho = c^{-2} ( \|(c g + e U 1) - U (c a + e)\|^2 + c^2 \rho )

    With shared noise, :math:`s` becomes :math:`c^2 s`; in site form it stays one and
    the rows are divided by :math:`c`. Either way the density of the data changes by
    :math:`-n \log c`, as it must.

    Args:
        past: Pseudo-observations.
        scale: ``(*batch,)``, :math:`c > 0`.
        shift: ``(*batch,)``, :math:`e`.
        shared: Whether the rows have the noise of the likelihood.

    Returns:
        Pseudo-observations at the same points.
    """
    ones = past.U.sum(-1)  # U 1
    if shared:
        return PseudoObservations(
            U=past.U,
            g=scale.unsqueeze(-1) * past.g + shift.unsqueeze(-1) * ones,
            rho=scale.square() * past.rho,
            n=past.n,
        )
    return PseudoObservations(
        U=past.U / scale[..., None, None],
        g=past.g + (shift / scale).unsqueeze(-1) * ones,
        rho=past.rho + 2 * past.n * scale.log(),
        n=past.n,
    )

r"""Row space: an exact Gaussian process on the rows of a bounded data set.

What a model knows are rows that observe the function at points :math:`P = [Z; x]`,

.. math:: H f(P) = t + \varepsilon, \quad \varepsilon \sim N(0, s I), \quad
    H = \begin{pmatrix} U & 0 \\ 0 & \mathrm{diag}(w) \end{pmatrix}:

:math:`U` is the compressed past at the points :math:`Z`, and each raw datum is a row of
its own, with :math:`w = 1` where it has the noise :math:`s`. Everything is an exact GP
on these rows:

    fold, see      H K Hᵀ and H k(P, x)
    evidence       log N(t - H m; 0, s I + H K Hᵀ), with its gradient in closed form
    factor         W = L⁻¹ and e = W r, where L Lᵀ = s I + H K Hᵀ
    extend         new rows border W: two products of a matrix and a vector
    predict        v = W H k(P, x): mean m + vᵀ e, variance k - vᵀ v

The entries of :math:`e` are standardised one-step-ahead errors. Neither the prior nor
its jitter is factored, and a row of weight zero changes nothing: readings that are
missing, and data that were left out, are such rows.

Every tensor may carry leading batch dimensions; nothing waits for a device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_ssgp.functional import (
    LOG_2PI,
    PseudoObservations,
    broadcast_matrices,
    broadcast_rows,
    cholesky,
    log_det,
    matvec,
    solve_lower,
    weigh,
)


class Regression(NamedTuple):
    r"""The rows :math:`H f(P) = t + \varepsilon`.

    Attributes:
        U: ``(*batch, p, R)``, rows that observe the points :math:`Z`.
        root: ``(*batch, k)`` or ``(k,)``, :math:`w` of the raw data; ``None`` for ones.
        target: ``(*batch, p + k)``, :math:`t`, in function space.
        rho: ``(*batch,)``, residual :math:`\rho` that no function explains.
        n: ``()`` or ``(*batch,)``, the number of data behind all rows.
    """

    U: Tensor
    root: Tensor | None
    target: Tensor
    rho: Tensor
    n: Tensor


def regression(
    past: PseudoObservations,
    y: Tensor,
    noise: Tensor | None,
    s: Tensor,
    weight: Tensor | None = None,
) -> Regression:
    """The compressed past and raw data as one regression.

    Args:
        past: Pseudo-observations at ``Z``, with noise scale ``s``.
        y: ``(*batch, k)``, targets of the raw data.
        noise: ``(*batch, k)``, their noise variances; ``None`` where they are ``s``.
        s: ``(*batch,)``, noise scale of the rows.
        weight: ``(*batch, k)`` or ``(k,)``, powers of their likelihoods; ``None`` for
            ones.
    """
    data = weigh(y, noise, s, weight)
    target = torch.cat(broadcast_rows(past.g, data.r), -1)
    n = past.n + (y.size(-1) if weight is None else weight.sum(-1))
    return Regression(past.U, data.root, target, past.rho + data.rho, n)


def see(rows: Regression, K: Tensor) -> Tensor:
    """``H K`` for a matrix ``K`` ``(*batch, R + k, n)``."""
    U, root = rows.U, rows.root
    if U.size(-1):
        upper, lower = U @ K[..., : U.size(-1), :], K[..., U.size(-1) :, :]
        if root is not None:
            lower = root.unsqueeze(-1) * lower
        return torch.cat(_same_batch(upper, lower), -2)
    return K if root is None else root.unsqueeze(-1) * K


def see_vector(rows: Regression, m: Tensor) -> Tensor:
    """``H m`` for a vector ``m`` ``(*batch, R + k)``."""
    if rows.U.size(-1) == 0 and rows.root is None:
        return m
    return see(rows, m.unsqueeze(-1)).squeeze(-1)


def fold(rows: Regression, K: Tensor) -> Tensor:
    """``H K Hᵀ`` for a symmetric matrix ``K`` ``(*batch, R + k, R + k)``."""
    U, root, num_points = rows.U, rows.root, rows.U.size(-1)
    if num_points:
        top = U @ K[..., :num_points, :]
        left, right = top[..., :num_points] @ U.mT, top[..., num_points:]
        rest = K[..., num_points:, num_points:]
        if root is not None:
            right = right * root.unsqueeze(-2)
            rest = rest * root.unsqueeze(-2) * root.unsqueeze(-1)
        upper = torch.cat(_same_batch(left, right), -1)
        lower = torch.cat(_same_batch(right.mT, rest), -1)
        return torch.cat(_same_batch(upper, lower), -2)
    return K if root is None else K * root.unsqueeze(-2) * root.unsqueeze(-1)


def _same_batch(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Two blocks with the batch dimensions of both."""
    return broadcast_matrices(A, B)


# -- evidence -----------------------------------------------------------------------


def evidence(rows: Regression, K: Tensor, m: Tensor, s: Tensor) -> Tensor:
    r"""Log evidence of the rows.

    .. math::
        F = \log N(r; 0, B) - \tfrac{n - N}{2} \log 2 \pi s - \tfrac{\rho}{2s}, \quad
        B = s I + H K H^\top, \quad r = t - H m,

    exact until something was compressed.

    Args:
        rows: The regression.
        K: ``(*batch, R + k, R + k)``, prior covariance of the points.
        m: ``(*batch, R + k)``, prior mean there.
        s: ``(*batch,)``, noise scale of the rows.
    """
    A, r = system(rows, K, m)
    rest = (rows.n - r.size(-1)) * (LOG_2PI + s.log()) + rows.rho / s
    return log_density(r, A, s.unsqueeze(-1).expand(*s.shape, r.size(-1))) - 0.5 * rest


def system(rows: Regression, K: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """``H K Hᵀ`` and ``r = t - H m``, of the same batch shape."""
    A, r = fold(rows, K), rows.target - see_vector(rows, m)
    if A.shape[:-2] != r.shape[:-1]:
        batch = torch.broadcast_shapes(A.shape[:-2], r.shape[:-1])
        A, r = A.expand(*batch, *A.shape[-2:]), r.expand(*batch, -1)
    return A, r


def with_noise(A: Tensor, noise: Tensor) -> Tensor:
    """``A + diag(noise)`` as a new tensor, without a graph."""
    B = A.detach().clone(memory_format=torch.contiguous_format)
    B.diagonal(dim1=-2, dim2=-1).add_(noise.detach())
    return B


def log_density(r: Tensor, A: Tensor, noise: Tensor) -> Tensor:
    r"""log N(r; 0, B), B = A + diag(noise), with its gradient in closed form.

    With :math:`\alpha = B^{-1} r`: :math:`\partial F / \partial r = -\alpha` and
    :math:`\partial F / \partial B = \tfrac12 (\alpha \alpha^\top - B^{-1})`.

    Args:
        r: ``(*batch, N)``.
        A: ``(*batch, N, N)``; where ``B`` is not positive definite the result is NaN.
        noise: ``(*batch, N)`` or broadcastable.
    """
    return _LogDensity.apply(r, A, noise)


class _LogDensity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, r: Tensor, A: Tensor, noise: Tensor) -> Tensor:
        L = cholesky(with_noise(A, noise))
        alpha = torch.cholesky_solve(r.unsqueeze(-1), L)
        ctx.save_for_backward(L, alpha)
        ctx.noise_shape = noise.shape
        fit = (r.unsqueeze(-2) @ alpha).squeeze(-1).squeeze(-1)
        return -0.5 * (fit + log_det(L) + r.size(-1) * LOG_2PI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        L, alpha = ctx.saved_tensors
        half = 0.5 * grad[..., None, None]
        dB = torch.cholesky_inverse(L)
        dB = (alpha * alpha.mT).sub_(dB).mul_(half)
        dnoise = dB.diagonal(dim1=-2, dim2=-1).sum_to_size(ctx.noise_shape)
        return -grad.unsqueeze(-1) * alpha.squeeze(-1), dB, dnoise


# -- factor -------------------------------------------------------------------------


class _Storage:
    """Room for a factor that grows; ``used`` rows of it are spoken for."""

    def __init__(self, batch: torch.Size, capacity: int, like: Tensor) -> None:
        self.W = like.new_zeros(*batch, capacity, capacity)
        self.e = like.new_zeros(*batch, capacity)
        self.capacity, self.used = capacity, 0


class Factor:
    """``W = L⁻¹`` and ``e = W r`` of the first ``count`` rows of a storage.

    Rows are written only beyond those that anybody reads. So readers in other threads,
    a failed update and a rollback need no copy: they hold an earlier ``count``. The
    second descendant of a factor gets a storage of its own.

    Args:
        W: ``(*batch, N, N)``, lower triangular.
        e: ``(*batch, N)``.
        capacity: Rows for which there is to be room.
    """

    def __init__(self, W: Tensor, e: Tensor, capacity: int = 0) -> None:
        self.count = W.size(-1)
        self.storage = _Storage(e.shape[:-1], max(capacity, self.count), e)
        self.storage.W[..., : self.count, : self.count] = W
        self.storage.e[..., : self.count] = e
        self.storage.used = self.count

    @classmethod
    def of(cls, A: Tensor, r: Tensor, s: Tensor, capacity: int = 0) -> Factor:
        """Factor ``s I + A = L Lᵀ``; NaN where it is not positive definite.

        Args:
            A: ``(*batch, N, N)``.
            r: ``(*batch, N)``.
            s: ``(*batch,)``, noise scale of the rows.
            capacity: Rows for which there is to be room.
        """
        L = cholesky(with_noise(A, s.unsqueeze(-1)))
        eye = torch.eye(L.size(-1), dtype=L.dtype, device=L.device)
        W = solve_lower(L, eye.expand(L.shape))
        return cls(W, matvec(W, r), capacity)

    @property
    def W(self) -> Tensor:
        """``(*batch, N, N)``."""
        return self.storage.W[..., : self.count, : self.count]

    @property
    def e(self) -> Tensor:
        """``(*batch, N)``, standardised errors of each row given those before it."""
        return self.storage.e[..., : self.count]

    def with_room(self, num_new: int) -> Factor:
        """The same, in a storage with room for so many more rows."""
        store, need = self.storage, self.count + num_new
        if store.used == self.count and store.capacity >= need:
            return self
        return Factor(self.W, self.e, need)

    def append(self, v: Tensor, d: float, error: float) -> Factor:
        """The factor of these rows and one more, without batch dimensions.

        Args:
            v: ``(N,)``, ``W`` times its covariance with the rows.
            d: Its standard deviation given the rows.
            error: Its standardised error.
        """
        n, store = self.count, self.storage
        store.W[n, :n] = torch.mv(self.W.mT, v).mul_(-1 / d)
        store.W[n, n], store.e[n] = 1 / d, error
        grown = object.__new__(Factor)
        grown.storage, grown.count = store, n + 1
        store.used = n + 1
        return grown

    def extend(self, border: Border) -> Factor:
        """The factor of these rows and new ones.

        Args:
            border: The new rows; see :func:`border`.
        """
        old, new = self.count, self.count + border.e.size(-1)
        store = self.storage
        if store.used != old or new > store.capacity:
            capacity = max(store.capacity, new + new // 2)
            return Factor(self.W, self.e, capacity).extend(border)
        store.used = new
        store.W[..., old:new, :old] = -border.L_inv @ (border.V.mT @ self.W)
        store.W[..., old:new, old:new] = border.L_inv
        store.e[..., old:new] = border.e
        grown = object.__new__(Factor)
        grown.storage, grown.count = store, new
        return grown


class Border(NamedTuple):
    """New rows, seen from those that are factored.

    Attributes:
        V: ``(*batch, N, n)``, ``W`` times their covariance with the old rows.
        L_inv: ``(*batch, n, n)``, inverse Cholesky factor of what is left of theirs.
        e: ``(*batch, n)``, their standardised errors, each given all before it.
    """

    V: Tensor
    L_inv: Tensor
    e: Tensor


def border(V: Tensor, S: Tensor, error: Tensor) -> Border:
    """New rows from their predictions by the old ones.

    Args:
        V: ``(*batch, N, n)``, ``W c`` with ``c`` the covariance with the old rows.
        S: ``(*batch, n, n)``, their covariance given the old rows, noise included.
        error: ``(*batch, n)``, targets minus their predictions.
    """
    if S.size(-1) == 1:
        L_inv = S.rsqrt()
        return Border(V, L_inv, L_inv.squeeze(-1) * error)
    L = cholesky(S)
    eye = torch.eye(L.size(-1), dtype=L.dtype, device=L.device)
    L_inv = solve_lower(L, eye.expand(L.shape))
    return Border(V, L_inv, matvec(L_inv, error))

r"""The bound of the usual model, from hyperparameters to value in few operations.

An inner loop evaluates the same bound hundreds of times. By autograd a step is a
thousand small operations, however small the model, and those are most of its cost. For
a constant mean, one scaled RBF or Matérn kernel and a Gaussian likelihood the gradient
is known in closed form all the way to the hyperparameters, and a step takes far fewer
of them. Every other model goes through its modules, see ``ascent.py``; values and
gradients are the same to rounding.

With :math:`q_{ij} = -\tfrac12 \|u_i - u_j\|^2`, :math:`u = x / \ell`, and
:math:`H = \partial F / \partial K \circ \partial K / \partial q`,

.. math::
    \partial F / \partial u_i = \sum_j H_{ij} (u_j - u_i), \qquad
    \ell\, \partial F / \partial \ell = \sum_{ij} H_{ij} (u_i - u_j)^2, \qquad
    \sigma\, \partial F / \partial \sigma = \sum_{ij}
        \partial F / \partial K_{ij} K_{ij}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean, ZeroMean
from gpytorch.module import Module
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_ssgp import fused
from torch_ssgp.kernels import Stationary, read, select, stationary
from torch_ssgp.points import diagonal
from torch_ssgp.radial import far, matern, matern_slope
from torch_ssgp.update.coordinates import Coordinate
from torch_ssgp.update.objective import GaussianObjective, Objective


class Fixed(NamedTuple):
    """What stays as it is in an inner loop, in the batch shape of the streams.

    Attributes:
        others: ``(*batch, n + m_a, d)``, inputs of data and points of the memory, about
            ``center``.
        center: ``(*batch, 1, d)``.
        target: ``(*batch, n + p)``, of the rows, in function space.
        ones: ``(*batch, n + p)``, how the rows see a constant.
        root: ``(*batch, 1, n)``, weights of the data; ``None`` for ones.
        U: ``(*batch, p, m_a)``, the rows of the memory.
        precision: ``(*batch, m_a, m_a)``, ``Uᵀ U``.
        rho: ``(*batch,)``, residual carried over.
        n: ``()`` or ``(*batch,)``, the number of data.
        jitter: Relative to the prior variance.
        nu: Smoothness of a Matérn kernel; ``None`` for RBF.
    """

    others: Tensor
    center: Tensor
    target: Tensor
    ones: Tensor
    root: Tensor | None
    U: Tensor
    precision: Tensor
    rho: Tensor
    n: Tensor
    jitter: float
    nu: float | None


class Lean:
    """The bound as a function of what the optimiser moves; see :func:`lean`.

    Args:
        objective: The bound, at its start.
        variables: All that the optimiser moves.
        kernel: The form of its kernel.
    """

    def __init__(
        self,
        objective: GaussianObjective,
        variables: Sequence[Coordinate],
        kernel: Stationary,
    ) -> None:
        self.objective, self.variables = objective, variables
        self.index = {id(v.parameter): i for i, v in enumerate(variables)}
        self.batch, self.dims = objective.batch_shape, kernel.dims
        past, data = objective.past, objective.data
        U, y, root = past.U, data.y, None
        target, ones = self._all(y, 1), self._all(torch.ones_like(y), 1)
        if data.weight is not None:
            root = self._all(data.weight.sqrt(), 1)
            target, ones, root = root * target, root, root.unsqueeze(-2)
        points = torch.cat([self._all(data.x, 2), self._all(objective.z_a, 2)], -2)
        points = select(points, self.dims)
        center = points.mean(-2, keepdim=True)
        self.fixed = Fixed(
            others=points - center,
            center=center,
            target=torch.cat([target, self._all(past.g, 1)], -1),
            ones=torch.cat([ones, self._all(U.sum(-1), 1)], -1),
            root=root,
            U=self._all(U, 2),
            precision=self._all(objective.past_precision, 2),
            rho=self._all(past.rho, 0),
            n=objective.num_data,
            jitter=objective.jitter,
            nu=kernel.nu,
        )

    def _all(self, value: Tensor, num_dims: int) -> Tensor:
        """A value for each stream; its last ``num_dims`` dimensions are its own."""
        shape = value.shape[value.ndim - num_dims :]
        return value.expand(self.batch + shape)

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """The bound ``(*batch,)``.

        Args:
            parts: The present value of each variable.
        """

        def value(module: Module, name: str) -> Tensor:
            i = self.index.get(id(getattr(module, f"raw_{name}")))
            if i is None:
                return getattr(module, name).detach()
            return self.variables[i].to_value(parts[i])

        mean, kernel, likelihood = self.objective.modules_of_prior
        form = stationary(read(kernel, value))
        assert form is not None
        noise = value(likelihood.noise_covar, "noise").squeeze(-1)
        level = torch.zeros_like(noise)
        if isinstance(mean, ConstantMean):
            level = value(mean, "constant")
        i = self.index[id(self.objective.z)]
        z = select(self.variables[i].to_value(parts[i]), self.dims)
        return _Bound.apply(
            z,
            self._all(form.lengthscale, 2),
            *(self._all(each, 0) for each in (form.scale, noise, level)),
            self.fixed,
        )


def lean(objective: Objective, variables: Sequence[Coordinate]) -> Lean | None:
    """The bound in few operations, if it is that of the usual model.

    Args:
        objective: The bound, at its start.
        variables: All that the optimiser moves, inducing points among them.
    """
    if type(objective) is not GaussianObjective:
        return None
    mean, kernel, likelihood = objective.modules_of_prior
    form = stationary(read(kernel))
    modules = [m for module in (mean, kernel, likelihood) for m in module.modules()]
    owned = [id(p) for m in modules for p in m.parameters(recurse=False)]
    if (
        form is None
        or type(mean) not in (ConstantMean, ZeroMean)
        or "forward" in vars(mean)
        or len(set(owned)) < len(owned)  # each owner may have a constraint of its own
        or type(likelihood) is not GaussianLikelihood
        or not objective.shared_noise
        or objective.alpha
        or not objective.z.requires_grad
    ):
        return None
    return Lean(objective, variables, form)


class _Bound(torch.autograd.Function):
    """:class:`Lean` as a function of points and hyperparameters of all streams."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        lengthscale: Tensor,
        scale: Tensor,
        s: Tensor,
        level: Tensor,
        fixed: Fixed,
    ) -> Tensor:
        m, n = z.size(-2), fixed.others.size(-2) - fixed.U.size(-1)
        u = torch.cat([z - fixed.center, fixed.others], -2) / lengthscale
        q = -0.5 * u.square().sum(-1, keepdim=True)
        one = torch.ones_like(q)
        # Of an RBF kernel the scale is one more term of the exponent.
        shift = scale.log()[..., None, None] if fixed.nu is None else 0.0
        left, right = (
            torch.cat([u, q + shift, one], -1),
            torch.cat([u, one, q], -1),
        )
        K, slope = _covariance(left[..., :m, :], right, scale, fixed.nu)
        left, right_a = left[..., m + n :, :], right[..., m + n :, :]
        K_aa, slope_a = _covariance(left, right_a, scale, fixed.nu)
        # The distance of a point to itself is zero, and jitter is part of its prior.
        variance = ((1 + fixed.jitter) * scale).unsqueeze(-1)
        diagonal(K[..., :m]).copy_(variance)
        diagonal(K_aa).copy_(variance)
        K_bf, K_ba = K[..., m : m + n], K[..., m + n :]
        if fixed.root is not None:
            K_bf = K_bf * fixed.root
        seen_a = fixed.precision * K_aa
        seen = scale * fixed.ones[..., :n].square().sum(-1) + seen_a.sum((-2, -1))
        bound, saved = fused.value(
            K[..., :m],
            torch.cat([K_bf, K_ba @ fixed.U.mT], -1),
            fixed.target - level.unsqueeze(-1) * fixed.ones,
            fixed.rho + seen,
            s,
            fixed.n,
        )
        ctx.fixed = fixed
        pull_a = seen_a if fixed.nu is None else fixed.precision * slope_a
        ctx.save_for_backward(*saved, lengthscale, scale, right, K, slope, pull_a, seen)
        return bound

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        fixed, tensors, count = ctx.fixed, ctx.saved_tensors, len(fused.Saved._fields)
        lengthscale, scale, right, K, slope, pull_a, seen = tensors[count:]
        dK_bb, dK_br, dr, dt, ds = fused.gradient(fused.Saved(*tensors[:count]), grad)
        m, n = K.size(-2), fixed.others.size(-2) - fixed.U.size(-1)
        dK_bf, dK_ba = dK_br[..., :n], dK_br[..., n:] @ fixed.U
        if fixed.root is not None:
            dK_bf = dK_bf * fixed.root
        H = torch.cat([dK_bb, dK_bf, dK_ba], -1)
        HK = H * K
        dscale = (HK.sum((-2, -1)) + dt * seen) / scale
        H = HK if fixed.nu is None else H.mul_(slope)
        diagonal(H[..., :m]).zero_()
        features = right[..., :-1]  # u, and ones
        u, u_b = features[..., :-1], features[..., :m, :-1]
        du_b = _pulled(H @ features, u_b)
        du = _pulled(H.mT @ features[..., :m, :], u)
        features, u_a = features[..., m + n :, :], u[..., m + n :, :]
        du_a = _pulled(pull_a @ features, u_a)
        total = (du_b * u_b).sum(-2, keepdim=True) + (du * u).sum(-2, keepdim=True)
        total = total + 2 * dt[..., None, None] * (du_a * u_a).sum(-2, keepdim=True)
        if lengthscale.size(-1) < total.size(-1):
            total = total.sum(-1, keepdim=True)
        return (
            (du_b + du[..., :m, :]) / lengthscale,
            -total / lengthscale,
            dscale,
            ds,
            -(dr * fixed.ones).sum(-1),
            None,
        )


def _covariance(
    left: Tensor, right: Tensor, scale: Tensor, nu: float | None
) -> tuple[Tensor, Tensor]:
    """``K`` and its derivative in ``q``, which is the same tensor for RBF."""
    q, scale = left @ right.mT, scale[..., None, None]
    if nu is None:
        K = q.clamp_(min=scale.log() + far(q)).exp_()
        return K, K
    k, t, e = matern(q, nu)
    return k.mul_(scale), matern_slope(t, e, nu).mul_(scale)


def _pulled(sums: Tensor, u: Tensor) -> Tensor:
    """The sums of ``H (u_j - u_i)`` from those of ``H u_j`` and of ``H``."""
    return sums[..., :-1] - sums[..., -1:] * u

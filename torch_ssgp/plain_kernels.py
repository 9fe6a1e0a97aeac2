r"""Kernels with one argument fixed, as modules of plain tensors: x -> k(x, z).

The inducing points of an exported model do not change, so the kernel's features of them
are computed once and kept in buffers. For each ``x`` this leaves a matrix product and a
few operations on its result. The formulas are those of :mod:`torch_ssgp.kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torch_ssgp.kernels import (
    Exponential,
    Form,
    Linear,
    Part,
    Product,
    Radial,
    Sum,
    select,
)
from torch_ssgp.radial import radial


def cross_covariance(form: Form, z: Tensor) -> nn.Module:
    """Covariances with fixed points.

    Args:
        form: The kernel.
        z: ``(*batch, m, d)``.

    Returns:
        A module, from x ``(*batch, n, d)`` to ``(*batch, n, m)``.
    """
    if isinstance(form, Sum):
        return _Folded(torch.add, [cross_covariance(term, z) for term in form.terms])
    if isinstance(form, Product):
        return _Folded(torch.mul, [cross_covariance(f, z) for f in form.factors])
    if isinstance(form, Exponential):
        return _Exponential(form, z)
    if isinstance(form, Radial):
        return _Radial(form, z)
    assert isinstance(form, Linear)
    if form.variance is None:
        level = form.scale[..., None, None]
        return _Level(level.expand(*form.scale.shape, 1, z.size(-2)))
    return _Linear(form.dims, form.scale[..., None, None] * form.variance, z)


def prior_variance(form: Form) -> nn.Module:
    """Variances of the prior.

    Args:
        form: The kernel.

    Returns:
        A module, from x ``(*batch, n, d)`` to ``(*batch, n)``, or to ``(*batch, 1)``
        where all inputs have one variance.
    """
    if isinstance(form, Sum):
        return _Folded(torch.add, [prior_variance(term) for term in form.terms])
    if isinstance(form, Product):
        return _Folded(torch.mul, [prior_variance(f) for f in form.factors])
    if isinstance(form, Linear) and form.variance is not None:
        return _Squares(form.dims, form.scale[..., None, None] * form.variance)
    assert isinstance(form, Exponential | Radial | Linear)
    return _Constant(form.scale.unsqueeze(-1))


def own(value: Tensor) -> Tensor:
    """A copy with its own storage, so that it can be written to files."""
    return value.detach().clone(memory_format=torch.contiguous_format)


# -- modules ------------------------------------------------------------------------


class _Plain(nn.Module):
    """A module of buffers.

    Args:
        buffers: Copies of these; ``None`` where a kernel has no such tensor.
    """

    def __init__(self, **buffers: Tensor | None) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, None if value is None else own(value))


class _Folded(nn.Module):
    """Results of several modules, added or multiplied.

    Args:
        operation: Of two results.
        modules: What is combined.
    """

    def __init__(
        self, operation: Callable[[Tensor, Tensor], Tensor], modules: list[nn.Module]
    ) -> None:
        super().__init__()
        self.operation, self.parts = operation, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        """Combined from left to right."""
        first, *others = self.parts
        total = first(x)
        for part in others:
            total = self.operation(total, part(x))
        return total


class _Distances(_Plain):
    r"""Squared distances to fixed points, in lengthscales.

    .. math::
        -\tfrac12 r^2 = 2 a^\top b - |b|^2 - |a|^2, \quad
        a = (x - \bar z) / (\sqrt 2 \ell), \; b = (z - \bar z) / (\sqrt 2 \ell)

    Args:
        part: Lengthscales, and the inputs they are of.
        z: ``(*batch, m, d)``.
    """

    dims: Tensor | None
    center: Tensor
    inverse: Tensor
    points: Tensor
    level: Tensor

    def __init__(self, part: Part, z: Tensor) -> None:
        z = select(z, part.dims)
        center, inverse = z.mean(-2, keepdim=True), math.sqrt(0.5) / part.lengthscale
        b = (z - center) * inverse
        super().__init__(
            dims=part.dims,
            center=center,
            inverse=inverse,
            points=2 * b.mT,  # (*batch, d, m)
            level=-b.square().sum(-1).unsqueeze(-2),  # (*batch, 1, m)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(*batch, n, m)``."""
        a = (select(x, self.dims) - self.center) * self.inverse
        return a @ self.points + self.level - a.square().sum(-1, keepdim=True)


class _Phases(_Plain):
    r"""The exponent of a periodic kernel, :math:`u = 2 \pi x / p`, :math:`v` of ``z``.

    .. math:: \sum_d (\cos u_d \cos v_d + \sin u_d \sin v_d - 1) / \ell_d

    Args:
        part: Lengthscales and periods, and the inputs they are of.
        z: ``(*batch, m, d)``.
    """

    dims: Tensor | None
    frequency: Tensor
    cosines: Tensor
    sines: Tensor
    level: Tensor

    def __init__(self, part: Part, z: Tensor) -> None:
        assert part.period is not None
        z, frequency = select(z, part.dims), 2 * math.pi / part.period
        weight, v = part.lengthscale.reciprocal(), z * frequency
        each = weight.expand(*weight.shape[:-1], z.size(-1))
        super().__init__(
            dims=part.dims,
            frequency=frequency,
            cosines=(weight * v.cos()).mT,  # (*batch, d, m)
            sines=(weight * v.sin()).mT,
            level=-each.sum(-1, keepdim=True),  # (*batch, 1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(*batch, n, m)``."""
        u = select(x, self.dims) * self.frequency
        return u.cos() @ self.cosines + u.sin() @ self.sines + self.level


class _Exponential(_Plain):
    """A scaled product of RBF and periodic kernels.

    Args:
        form: The kernel.
        z: ``(*batch, m, d)``.
    """

    scale: Tensor

    def __init__(self, form: Exponential, z: Tensor) -> None:
        super().__init__(scale=form.scale[..., None, None])
        exponents: list[nn.Module] = [
            _Distances(part, z) if part.period is None else _Phases(part, z)
            for part in form.parts
        ]
        self.exponent = _Folded(torch.add, exponents)

    def forward(self, x: Tensor) -> Tensor:
        """Covariances ``(*batch, n, m)``."""
        return self.scale * self.exponent(x).exp()


class _Radial(_Plain):
    """A scaled Matérn or rational quadratic kernel.

    Args:
        form: The kernel.
        z: ``(*batch, m, d)``.
    """

    scale: Tensor
    alpha: Tensor | None

    def __init__(self, form: Radial, z: Tensor) -> None:
        super().__init__(scale=form.scale[..., None, None], alpha=form.alpha)
        self.nu = form.nu
        self.distances = _Distances(Part(form.dims, form.lengthscale), z)

    def forward(self, x: Tensor) -> Tensor:
        """Covariances ``(*batch, n, m)``."""
        return self.scale * radial(self.distances(x), self.nu, self.alpha)


class _Linear(_Plain):
    """A linear kernel.

    Args:
        dims: Indices of the inputs it sees; ``None`` for all.
        variance: ``(*batch, 1, d)`` or one for all inputs.
        z: ``(*batch, m, d)``.
    """

    dims: Tensor | None
    points: Tensor

    def __init__(self, dims: Tensor | None, variance: Tensor, z: Tensor) -> None:
        super().__init__(dims=dims, points=(variance * select(z, dims)).mT)

    def forward(self, x: Tensor) -> Tensor:
        """Covariances ``(*batch, n, m)``."""
        return select(x, self.dims) @ self.points


class _Level(_Plain):
    """A constant kernel.

    Args:
        level: ``(*batch, 1, m)``.
    """

    level: Tensor

    def __init__(self, level: Tensor) -> None:
        super().__init__(level=level)

    def forward(self, x: Tensor) -> Tensor:
        """Covariances ``(*batch, n, m)``."""
        return self.level + torch.zeros_like(x[..., :1])


class _Squares(_Plain):
    """Variances of a linear kernel.

    Args:
        dims: Indices of the inputs it sees; ``None`` for all.
        variance: ``(*batch, 1, d)`` or one for all inputs.
    """

    dims: Tensor | None
    variance: Tensor

    def __init__(self, dims: Tensor | None, variance: Tensor) -> None:
        super().__init__(dims=dims, variance=variance)

    def forward(self, x: Tensor) -> Tensor:
        """``(*batch, n)``."""
        return (self.variance * select(x, self.dims).square()).sum(-1)


class _Constant(_Plain):
    """One variance for all inputs.

    Args:
        value: ``(*batch, 1)``.
    """

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__(value=value)

    def forward(self, x: Tensor) -> Tensor:
        """``(*batch, 1)``."""
        return self.value

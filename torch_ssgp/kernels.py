r"""GPyTorch's common kernels as a few operations on plain tensors.

GPyTorch's kernels are general, and each call costs dozens of small operations. An
update evaluates one kernel hundreds of times, so the common ones are read into a
:class:`Form`: what a kernel computes, as tensors. Most of them are functions of an
exponent, an inner product of features,

.. math:: k(x, x') = \exp(\phi(x)^\top \psi(x')),

one matrix product and one exponential, whatever the number of inputs; scales and
products of exponentials are features side by side. Values and gradients are those of
GPyTorch to rounding. A kernel that is not known here goes through GPyTorch.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from gpytorch import kernels as gpytorch_kernels
from gpytorch.kernels import Kernel
from torch import Tensor

from torch_ssgp.radial import far, radial


class Form(ABC):
    """What a kernel computes; its tensors are those of the hyperparameters."""

    @abstractmethod
    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Covariance ``(*batch, n1, n2)``."""

    @abstractmethod
    def variances(self, x: Tensor) -> Tensor:
        """Prior variances ``(*batch, n)``."""

    @abstractmethod
    def scaled(self, scale: Tensor) -> Form:
        """The same times ``scale`` ``(*batch,)``."""

    def map(self, function: Callable[[Any], Any]) -> Form:
        """The same with ``function`` of each of its tensors, in a fixed order."""
        return type(self)(*(_mapped(function, part) for part in vars(self).values()))


def _mapped(function: Callable[[Any], Any], part: Any) -> Any:
    if part is None or isinstance(part, bool | float):
        return part
    if isinstance(part, list):
        return [_mapped(function, each) for each in part]
    return part.map(function) if isinstance(part, Form | Factor) else function(part)


class Features(NamedTuple):
    r"""An exponent :math:`\phi(x_1)^\top \psi(x_2) + u(x_1) + v(x_2)`.

    Attributes:
        phi: Columns of :math:`\phi`, ``(*batch, n1, k)`` each.
        psi: Columns of :math:`\psi`, ``(*batch, n2, k)`` each.
        u: ``(*batch, n1, 1)``.
        v: ``(*batch, n2, 1)``.
    """

    phi: list[Tensor]
    psi: list[Tensor]
    u: Tensor
    v: Tensor

    def times(self, other: Features) -> Features:
        """The exponent of a product."""
        return Features(*map(operator.add, self, other))

    def product(self) -> Tensor:
        """``(*batch, n1, n2)``, in one product of matrices."""
        left = _side_by_side([*self.phi, self.u, torch.ones_like(self.u)])
        right = _side_by_side([*self.psi, torch.ones_like(self.v), self.v])
        return left @ right.mT


class Factor(NamedTuple):
    """One factor of an exponential.

    Attributes:
        dims: Indices of the inputs it sees; ``None`` for all.
        lengthscale: ``(*batch, 1, d)`` or one for all inputs.
        period: The same, where the kernel is periodic.
    """

    dims: Tensor | None
    lengthscale: Tensor
    period: Tensor | None = None

    def features(self, x1: Tensor, x2: Tensor) -> Features:
        """Its exponent, as an inner product."""
        x1, x2 = select(x1, self.dims), select(x2, self.dims)
        if self.period is None:
            center = x2.detach().mean(-2, keepdim=True)
            a, b = ((x - center) / self.lengthscale for x in (x1, x2))
            u, v = (-0.5 * each.square().sum(-1, keepdim=True) for each in (a, b))
            return Features([a], [b], u, v)
        # -2 sin²(u - v) = cos 2u cos 2v + sin 2u sin 2v - 1
        root = self.lengthscale.rsqrt()
        angles = (2 * math.pi / self.period * x for x in (x1, x2))
        phi, psi = ([root * w.cos(), root * w.sin()] for w in angles)
        # One lengthscale counts for every input; a trace cannot ask how many.
        each = self.lengthscale.expand(*self.lengthscale.shape[:-1], x1.size(-1))
        zeros = [torch.zeros_like(x[..., :1]) for x in (x1, x2)]
        level = zeros[0] - each.reciprocal().sum(-1, keepdim=True)
        return Features(phi, psi, level, zeros[1])

    def map(self, function: Callable[[Any], Any]) -> Factor:
        """As :meth:`Form.map`."""
        return Factor(*(_mapped(function, part) for part in self))


@dataclass(eq=False)
class Stationary(Form):
    r"""A scaled function of :math:`-\tfrac12 r^2`, the exponential unless it is told.

    Attributes:
        factors: Exponentials that are multiplied; one if it is another function.
        scale: ``(*batch,)``.
        nu: Smoothness of Matérn kernels.
        alpha: ``(*batch, 1)``, exponent of rational quadratic ones.
    """

    factors: list[Factor]
    scale: Tensor
    nu: float | None = None
    alpha: Tensor | None = None

    @property
    def dims(self) -> Tensor | None:
        """Indices of the inputs that its one factor sees; ``None`` for all."""
        return self.factors[0].dims

    @property
    def lengthscale(self) -> Tensor:
        """That of its one factor, ``(*batch, 1, d)`` or one for all inputs."""
        return self.factors[0].lengthscale

    @property
    def is_exponential(self) -> bool:
        """Whether products of it are as simple."""
        return self.nu is None and self.alpha is None

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        features = reduce(Features.times, [f.features(x1, x2) for f in self.factors])
        if not self.is_exponential:
            k = radial(features.product(), self.nu, self.alpha)
            return self.scale[..., None, None] * k
        level = self.scale.log()[..., None, None]
        q = features._replace(u=features.u + level).product()
        return q.clamp(min=level.detach() + far(q)).exp()

    def variances(self, x: Tensor) -> Tensor:
        return _repeated(self.scale, x)

    def scaled(self, scale: Tensor) -> Form:
        return replace(self, scale=scale * self.scale)


@dataclass(eq=False)
class Linear(Form):
    """A linear kernel, scaled; without a variance of inputs, a constant.

    Attributes:
        dims: Indices of the inputs it sees; ``None`` for all.
        variance: ``(*batch, 1, d)`` or one for all inputs; ``None`` for a constant.
        scale: ``(*batch,)``.
    """

    dims: Tensor | None
    variance: Tensor | None
    scale: Tensor

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        scale = self.scale[..., None, None]
        if self.variance is None:
            ones = [torch.ones_like(x[..., :1]) for x in (x1, x2)]
            return (scale * ones[0]) @ ones[1].mT
        x1, x2 = select(x1, self.dims), select(x2, self.dims)
        return (scale * self.variance * x1) @ x2.mT

    def variances(self, x: Tensor) -> Tensor:
        if self.variance is None:
            return _repeated(self.scale, x)
        squares = select(x, self.dims).square()
        return self.scale.unsqueeze(-1) * (self.variance * squares).sum(-1)

    def scaled(self, scale: Tensor) -> Form:
        return replace(self, scale=scale * self.scale)


@dataclass(eq=False)
class Compound(Form):
    """A product of forms, or their sum."""

    forms: list[Form]
    is_sum: bool = False

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self._combined([form.gram(x1, x2) for form in self.forms])

    def variances(self, x: Tensor) -> Tensor:
        return self._combined([form.variances(x) for form in self.forms])

    def _combined(self, values: list[Tensor]) -> Tensor:
        return reduce(torch.add if self.is_sum else torch.mul, values)

    def scaled(self, scale: Tensor) -> Form:
        first, *others = self.forms
        if self.is_sum:
            others = [form.scaled(scale) for form in others]
        return Compound([first.scaled(scale), *others], self.is_sum)


@dataclass(eq=False)
class Drifting(Form):
    r"""A kernel of functions that drift: :math:`k(x, x') \exp(-w |t - t'|)`.

    The last column of inputs is the time.

    Attributes:
        base: The kernel of the inputs.
        rate: ``(*batch,)``, :math:`w`.
    """

    base: Form
    rate: Tensor

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        age = (x1[..., -1].unsqueeze(-1) - x2[..., -1].unsqueeze(-2)).abs()
        decay = (-self.rate[..., None, None] * age).clamp_min(far(age)).exp()
        return self.base.gram(x1[..., :-1], x2[..., :-1]) * decay

    def variances(self, x: Tensor) -> Tensor:
        return self.base.variances(x[..., :-1])

    def scaled(self, scale: Tensor) -> Form:
        return Drifting(self.base.scaled(scale), self.rate)


# -- reading ------------------------------------------------------------------------


# From a kernel and the name of a hyperparameter to its value.
Values = Callable[[Any, str], Tensor]


def read(kernel: Kernel, value: Values = getattr) -> Form | None:
    """The form of a kernel; ``None`` if any part of it is of another class.

    Args:
        kernel: A GPyTorch kernel.
        value: Its hyperparameters; those that it has at present by default.
    """
    return _read(kernel, value, None)


def stationary(form: Form | None) -> Stationary | None:
    """The form if it is one RBF or Matérn kernel; ``None`` if it is another."""
    if not isinstance(form, Stationary) or form.alpha is not None:
        return None
    is_one = len(form.factors) == 1 and form.factors[0].period is None
    return form if is_one else None


def _read(
    kernel: Kernel, value: Values, dims: Tensor | None, called: bool = True
) -> Form | None:
    """As :func:`read`, of a kernel that sees only ``dims`` of the inputs.

    A scale does not call its base kernel, whose active dims it has taken over.
    """
    if kernel._forward_hooks or kernel._forward_pre_hooks:
        return None
    if called and kernel.active_dims is not None:
        dims = kernel.active_dims if dims is None else dims[kernel.active_dims]
    kind: Any = type(kernel)
    if kind is gpytorch_kernels.ScaleKernel:
        base = _read(kernel.base_kernel, value, dims, called=False)
        return None if base is None else base.scaled(value(kernel, "outputscale"))
    if kind in (gpytorch_kernels.AdditiveKernel, gpytorch_kernels.ProductKernel):
        read_all = [_read(part, value, dims) for part in kernel.kernels]
        parts = [form for form in read_all if form is not None]
        if len(parts) < len(read_all):
            return None
        is_sum = kind is gpytorch_kernels.AdditiveKernel
        return Compound(parts, is_sum) if is_sum else _multiply(parts)
    if kind is gpytorch_kernels.LinearKernel:
        variance = value(kernel, "variance")
        return Linear(dims, variance, _one(variance))
    if kind is gpytorch_kernels.ConstantKernel:
        return Linear(dims, None, value(kernel, "constant").squeeze(-1))
    if kind not in _STATIONARY:
        return None
    lengthscale = value(kernel, "lengthscale")
    form = Stationary([Factor(dims, lengthscale)], _one(lengthscale))
    if kind is gpytorch_kernels.MaternKernel:
        form.nu = kernel.nu
    if kind is gpytorch_kernels.RQKernel:
        form.alpha = value(kernel, "alpha")
    if kind is gpytorch_kernels.PeriodicKernel:
        form.factors = [Factor(dims, lengthscale, value(kernel, "period_length"))]
    return form


_STATIONARY = (
    gpytorch_kernels.RBFKernel,
    gpytorch_kernels.MaternKernel,
    gpytorch_kernels.RQKernel,
    gpytorch_kernels.PeriodicKernel,
)


def _multiply(forms: list[Form]) -> Form:
    """Their product; exponentials become one."""
    exponentials, others = [], []
    for form in forms:
        if isinstance(form, Stationary) and form.is_exponential:
            exponentials.append(form)
        else:
            others.append(form)
    if exponentials:
        factors = [factor for form in exponentials for factor in form.factors]
        scale = reduce(torch.mul, [form.scale for form in exponentials])
        others = [Stationary(factors, scale), *others]
    return others[0] if len(others) == 1 else Compound(others)


# -- pieces -------------------------------------------------------------------------


def select(x: Tensor, dims: Tensor | None) -> Tensor:
    """The inputs that a kernel sees."""
    return x if dims is None else x.index_select(-1, dims)


def _one(value: Tensor) -> Tensor:
    """A scale of one for a kernel with this hyperparameter ``(*batch, 1, d)``."""
    return torch.ones_like(value[..., 0, 0]).detach()


def _repeated(scale: Tensor, x: Tensor) -> Tensor:
    return scale.unsqueeze(-1).expand(*_batch(scale.shape, x.shape[:-2]), x.size(-2))


def _side_by_side(columns: list[Tensor]) -> Tensor:
    shapes = [c.shape[:-2] for c in columns]
    batch = _batch(*shapes)
    if shapes.count(batch) < len(shapes):
        columns = [c.expand(*batch, *c.shape[-2:]) for c in columns]
    return torch.cat(columns, -1)


def _batch(*shapes: torch.Size) -> torch.Size:
    """The broadcast of shapes; faster than torch's own."""
    first = shapes[0]
    if shapes.count(first) == len(shapes):
        return first
    return torch.broadcast_shapes(*shapes)

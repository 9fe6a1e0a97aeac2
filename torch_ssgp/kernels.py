r"""GPyTorch's common kernels as a few operations on plain tensors.

GPyTorch's kernels are general, and each call costs dozens of small operations. An
update evaluates one kernel hundreds of times, so the common ones are read into a
:class:`Form`: what a kernel computes, as tensors. Most of them are exponentials of an
inner product of features,

.. math:: k(x, x') = \exp(\phi(x)^\top \psi(x')),

one matrix product and one exponential, whatever the number of inputs; scales and
products of exponentials are features side by side. Values and gradients are those of
GPyTorch to rounding. A kernel that is not known here goes through GPyTorch.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
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

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor]) -> Form:
        """The same with ``function`` of each of its tensors, in a fixed order."""


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
        phi, psi = self.phi + other.phi, self.psi + other.psi
        return Features(phi, psi, self.u + other.u, self.v + other.v)

    def product(self) -> Tensor:
        """``(*batch, n1, n2)``, in one product of matrices."""
        left = _side_by_side([*self.phi, self.u, torch.ones_like(self.u)])
        right = _side_by_side([*self.psi, torch.ones_like(self.v), self.v])
        return left @ right.mT


class Part(NamedTuple):
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
        if self.period is not None:
            # -2 sin²(u - v) = cos 2u cos 2v + sin 2u sin 2v - 1
            root = self.lengthscale.rsqrt()
            u, v = (2 * math.pi / self.period * x for x in (x1, x2))
            # One lengthscale counts for every input; a trace cannot ask how many.
            each = self.lengthscale.expand(*self.lengthscale.shape[:-1], x1.size(-1))
            level = -each.reciprocal().sum(-1, keepdim=True)
            phi, psi = ([root * w.cos(), root * w.sin()] for w in (u, v))
            return Features(phi, psi, _column(level, x1), torch.zeros_like(x2[..., :1]))
        center = x2.detach().mean(-2, keepdim=True)
        a, b = ((x - center) / self.lengthscale for x in (x1, x2))
        return Features([a], [b], -0.5 * _norms(a), -0.5 * _norms(b))

    def map(self, function: Callable[[Tensor], Tensor]) -> Part:
        """As :meth:`Form.map`."""
        dims, period = (_mapped(function, t) for t in (self.dims, self.period))
        return Part(dims, function(self.lengthscale), period)


class Exponential(Form):
    """A scaled product of RBF and periodic kernels.

    Args:
        parts: The factors.
        scale: ``(*batch,)``.
    """

    def __init__(self, parts: list[Part], scale: Tensor) -> None:
        self.parts, self.scale = parts, scale

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Covariance ``(*batch, n1, n2)``."""
        first, *others = (part.features(x1, x2) for part in self.parts)
        features = functools.reduce(Features.times, others, first)
        level = self.scale.log()[..., None, None]
        q = features._replace(u=features.u + level).product()
        return q.clamp(min=level.detach() + far(q)).exp()

    def variances(self, x: Tensor) -> Tensor:
        """Prior variances ``(*batch, n)``: the scale."""
        return _repeated(self.scale, x)

    def scaled(self, scale: Tensor) -> Form:
        """The same times ``scale`` ``(*batch,)``."""
        return Exponential(self.parts, scale * self.scale)

    def map(self, function: Callable[[Tensor], Tensor]) -> Form:
        """The same with ``function`` of each of its tensors."""
        parts = [part.map(function) for part in self.parts]
        return Exponential(parts, function(self.scale))


class Radial(Form):
    """A scaled Matérn or rational quadratic kernel.

    Args:
        dims: Indices of the inputs it sees; ``None`` for all.
        lengthscale: ``(*batch, 1, d)`` or one for all inputs.
        scale: ``(*batch,)``.
        nu: Smoothness of Matérn kernels.
        alpha: ``(*batch, 1)``, exponent of rational quadratic ones.
    """

    def __init__(
        self,
        dims: Tensor | None,
        lengthscale: Tensor,
        scale: Tensor,
        nu: float | None = None,
        alpha: Tensor | None = None,
    ) -> None:
        self.dims, self.lengthscale, self.scale = dims, lengthscale, scale
        self.nu, self.alpha = nu, alpha

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Covariance ``(*batch, n1, n2)``."""
        q = Part(self.dims, self.lengthscale).features(x1, x2).product()
        return self.scale[..., None, None] * radial(q, self.nu, self.alpha)

    def variances(self, x: Tensor) -> Tensor:
        """Prior variances ``(*batch, n)``: the scale."""
        return _repeated(self.scale, x)

    def scaled(self, scale: Tensor) -> Form:
        """The same times ``scale`` ``(*batch,)``."""
        scale = scale * self.scale
        return Radial(self.dims, self.lengthscale, scale, self.nu, self.alpha)

    def map(self, function: Callable[[Tensor], Tensor]) -> Form:
        """The same with ``function`` of each of its tensors."""
        dims, alpha = (_mapped(function, t) for t in (self.dims, self.alpha))
        lengthscale, scale = function(self.lengthscale), function(self.scale)
        return Radial(dims, lengthscale, scale, self.nu, alpha)


class Linear(Form):
    """A linear kernel, scaled; without inputs, a constant.

    Args:
        dims: Indices of the inputs it sees; ``None`` for all.
        variance: ``(*batch, 1, d)`` or one for all inputs; ``None`` for a constant.
        scale: ``(*batch,)``.
    """

    def __init__(
        self, dims: Tensor | None, variance: Tensor | None, scale: Tensor
    ) -> None:
        self.dims, self.variance, self.scale = dims, variance, scale

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Covariance ``(*batch, n1, n2)``."""
        scale = self.scale[..., None, None]
        if self.variance is None:
            ones = [torch.ones_like(x[..., :1]) for x in (x1, x2)]
            return (scale * ones[0]) @ ones[1].mT
        x1, x2 = select(x1, self.dims), select(x2, self.dims)
        return (scale * self.variance * x1) @ x2.mT

    def variances(self, x: Tensor) -> Tensor:
        """Prior variances ``(*batch, n)``."""
        if self.variance is None:
            return _repeated(self.scale, x)
        x = select(x, self.dims)
        return self.scale.unsqueeze(-1) * (self.variance * x.square()).sum(-1)

    def scaled(self, scale: Tensor) -> Form:
        """The same times ``scale`` ``(*batch,)``."""
        return Linear(self.dims, self.variance, scale * self.scale)

    def map(self, function: Callable[[Tensor], Tensor]) -> Form:
        """The same with ``function`` of each of its tensors."""
        dims, variance = (_mapped(function, t) for t in (self.dims, self.variance))
        return Linear(dims, variance, function(self.scale))


class Sum(Form):
    """A sum of forms.

    Args:
        terms: What is added.
    """

    def __init__(self, terms: list[Form]) -> None:
        self.terms = terms

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Covariance ``(*batch, n1, n2)``."""
        total = self.terms[0].gram(x1, x2)
        for term in self.terms[1:]:
            total = total + term.gram(x1, x2)
        return total

    def variances(self, x: Tensor) -> Tensor:
        """Prior variances ``(*batch, n)``."""
        total = self.terms[0].variances(x)
        for term in self.terms[1:]:
            total = total + term.variances(x)
        return total

    def scaled(self, scale: Tensor) -> Form:
        """The same times ``scale`` ``(*batch,)``."""
        return Sum([term.scaled(scale) for term in self.terms])

    def map(self, function: Callable[[Tensor], Tensor]) -> Form:
        """The same with ``function`` of each of its tensors."""
        return Sum([term.map(function) for term in self.terms])


class Product(Form):
    """A product of forms.

    Args:
        factors: What is multiplied.
    """

    def __init__(self, factors: list[Form]) -> None:
        self.factors = factors

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Covariance ``(*batch, n1, n2)``."""
        total = self.factors[0].gram(x1, x2)
        for factor in self.factors[1:]:
            total = total * factor.gram(x1, x2)
        return total

    def variances(self, x: Tensor) -> Tensor:
        """Prior variances ``(*batch, n)``."""
        total = self.factors[0].variances(x)
        for factor in self.factors[1:]:
            total = total * factor.variances(x)
        return total

    def scaled(self, scale: Tensor) -> Form:
        """The same times ``scale`` ``(*batch,)``."""
        return Product([self.factors[0].scaled(scale), *self.factors[1:]])

    def map(self, function: Callable[[Tensor], Tensor]) -> Form:
        """The same with ``function`` of each of its tensors."""
        return Product([factor.map(function) for factor in self.factors])


class Drifting(Form):
    r"""A kernel of functions that drift: :math:`k(x, x') \exp(-w |t - t'|)`.

    Args:
        base: The kernel of the inputs.
        rate: ``(*batch,)``, :math:`w`.
    """

    def __init__(self, base: Form, rate: Tensor) -> None:
        self.base, self.rate = base, rate

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Covariance ``(*batch, n1, n2)``; the last column of inputs is the time."""
        age = (x1[..., -1].unsqueeze(-1) - x2[..., -1].unsqueeze(-2)).abs()
        decay = (-self.rate[..., None, None] * age).clamp_min(far(age)).exp()
        return self.base.gram(x1[..., :-1], x2[..., :-1]) * decay

    def variances(self, x: Tensor) -> Tensor:
        """Prior variances ``(*batch, n)``."""
        return self.base.variances(x[..., :-1])

    def scaled(self, scale: Tensor) -> Form:
        """The same times ``scale`` ``(*batch,)``."""
        return Drifting(self.base.scaled(scale), self.rate)

    def map(self, function: Callable[[Tensor], Tensor]) -> Form:
        """The same with ``function`` of each of its tensors."""
        return Drifting(self.base.map(function), function(self.rate))


# -- reading ------------------------------------------------------------------------


# From a kernel and the name of a hyperparameter to its value.
Values = Callable[[Any, str], Tensor]


def read(kernel: Kernel, value: Values = getattr) -> Form | None:
    """The form of a kernel.

    Args:
        kernel: A GPyTorch kernel.
        value: Its hyperparameters; those that it has at present by default.

    Returns:
        ``None`` if any part of it is of a class that is not known here.
    """
    return _read(kernel, value, None)


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
    if kind is gpytorch_kernels.AdditiveKernel:
        terms = _read_all(kernel, value, dims)
        return None if terms is None else Sum(terms)
    if kind is gpytorch_kernels.ProductKernel:
        factors = _read_all(kernel, value, dims)
        return None if factors is None else _multiply(factors)
    if kind is gpytorch_kernels.LinearKernel:
        variance = value(kernel, "variance")
        return Linear(dims, variance, _one(variance))
    if kind is gpytorch_kernels.ConstantKernel:
        return Linear(dims, None, value(kernel, "constant").squeeze(-1))
    if kind not in _STATIONARY:
        return None
    lengthscale = value(kernel, "lengthscale")
    if kind is gpytorch_kernels.MaternKernel:
        return Radial(dims, lengthscale, _one(lengthscale), nu=kernel.nu)
    if kind is gpytorch_kernels.RQKernel:
        alpha = value(kernel, "alpha")
        return Radial(dims, lengthscale, _one(lengthscale), alpha=alpha)
    period = None
    if kind is gpytorch_kernels.PeriodicKernel:
        period = value(kernel, "period_length")
    return Exponential([Part(dims, lengthscale, period)], _one(lengthscale))


_STATIONARY = (
    gpytorch_kernels.RBFKernel,
    gpytorch_kernels.MaternKernel,
    gpytorch_kernels.RQKernel,
    gpytorch_kernels.PeriodicKernel,
)


def _read_all(kernel: Any, value: Values, dims: Tensor | None) -> list[Form] | None:
    forms = []
    for part in kernel.kernels:
        form = _read(part, value, dims)
        if form is None:
            return None
        forms.append(form)
    return forms


class Stationary(NamedTuple):
    """One RBF or Matérn kernel, scaled.

    Attributes:
        dims: Indices of the inputs it sees; ``None`` for all.
        lengthscale: ``(*batch, 1, d)`` or one for all inputs.
        scale: ``(*batch,)``.
        nu: Smoothness of a Matérn kernel; ``None`` for RBF.
    """

    dims: Tensor | None
    lengthscale: Tensor
    scale: Tensor
    nu: float | None


def stationary(form: Form | None) -> Stationary | None:
    """The form as one RBF or Matérn kernel; ``None`` if it is more, or another."""
    if isinstance(form, Radial) and form.nu is not None:
        return Stationary(form.dims, form.lengthscale, form.scale, form.nu)
    if isinstance(form, Exponential) and len(form.parts) == 1:
        (part,) = form.parts
        if part.period is None:
            return Stationary(part.dims, part.lengthscale, form.scale, None)
    return None


def _multiply(factors: list[Form]) -> Form:
    """Their product; exponentials become one."""
    exponentials = [f for f in factors if isinstance(f, Exponential)]
    others = [f for f in factors if not isinstance(f, Exponential)]
    if len(exponentials) > 1:
        scale = exponentials[0].scale
        for form in exponentials[1:]:
            scale = scale * form.scale
        parts = [part for form in exponentials for part in form.parts]
        exponentials = [Exponential(parts, scale)]
    factors = [*exponentials, *others]
    return factors[0] if len(factors) == 1 else Product(factors)


# -- pieces -------------------------------------------------------------------------


def select(x: Tensor, dims: Tensor | None) -> Tensor:
    """The inputs that a kernel sees."""
    return x if dims is None else x.index_select(-1, dims)


def _one(value: Tensor) -> Tensor:
    """A scale of one for a kernel with this hyperparameter ``(*batch, 1, d)``."""
    return torch.ones_like(value[..., 0, 0]).detach()


def _mapped(
    function: Callable[[Tensor], Tensor], value: Tensor | None
) -> Tensor | None:
    return None if value is None else function(value)


def _norms(a: Tensor) -> Tensor:
    return a.square().sum(-1, keepdim=True)


def _column(value: Tensor, x: Tensor) -> Tensor:
    """A value ``(*batch, 1, 1)`` for each row of ``x``."""
    if value.ndim == 2:
        return value.expand(x.size(-2), 1)
    return value.expand(*_batch(value.shape[:-2], x.shape[:-2]), x.size(-2), 1)


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

r"""A model without its training stack: from x to the mean and variance of targets.

The posterior at test points (see :mod:`torch_ssgp.rows`) is a few products with fixed
matrices,

.. math::
    v = W H k(P, x), \quad
    E f = m(x) + v^\top e, \quad
    \mathrm{var} f = k(x, x) - v^\top v.

:class:`ExportedGP` holds :math:`W H`, :math:`e`, the points and the hyperparameters as
buffers, and evaluates the kernel as the training does (see
:mod:`torch_ssgp.kernels`). It uses nothing from GPyTorch, so ``torch.export``,
``torch.compile``, ``torch.jit.trace`` and ONNX can read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from gpytorch import kernels, likelihoods, means
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from torch import Tensor, nn

from torch_ssgp import functional as fn
from torch_ssgp import rows as row_space
from torch_ssgp.buffers import stored
from torch_ssgp.exceptions import DtypeError, ExportError, ShapeError
from torch_ssgp.kernels import Drifting, Form, read
from torch_ssgp.likelihoods import MIN_VARIANCE
from torch_ssgp.prediction import Predictor

if TYPE_CHECKING:
    from torch_ssgp.models import StreamingGP

KERNELS: tuple[type[Kernel], ...] = (
    kernels.RBFKernel,
    kernels.MaternKernel,
    kernels.RQKernel,
    kernels.PeriodicKernel,
    kernels.LinearKernel,
    kernels.ConstantKernel,
    kernels.ScaleKernel,
    kernels.AdditiveKernel,
    kernels.ProductKernel,
)
MEANS: tuple[type[Mean], ...] = (
    means.ZeroMean,
    means.ConstantMean,
    means.LinearMean,
)
LIKELIHOODS: tuple[type[Likelihood], ...] = (
    likelihoods.GaussianLikelihood,
    likelihoods.BernoulliLikelihood,
    likelihoods.PoissonLikelihood,
)
DTYPES = (torch.float32, torch.float64)


class Seen(NamedTuple):
    r"""What a model has seen, as matrices that predictions are made of.

    There is room for as many rows as the memory may hold, so that their sizes stay when
    rows come: what is free repeats the last point, and its rows are zero.

    Attributes:
        points: ``(*batch, c, d)``, :math:`P`.
        factor: ``(*batch, c, c)``, :math:`H^\top W^\top`.
        errors: ``(*batch, c)``, :math:`e`.
    """

    points: Tensor
    factor: Tensor
    errors: Tensor


class ExportedGP(nn.Module):
    r"""Mean and variance of targets, from tensors alone; see ``StreamingGP.export``.

    It computes in the dtype of its buffers, that of the algebra of the model: float64,
    unless ``settings.algebra_dtype`` says otherwise. Differentiable in ``x``. It has
    the learned hyperparameters alone, also while the model itself is young and averages
    over others.

    Args:
        form: The kernel.
        prior_mean: Prior mean of x, ``(*batch, n)`` or ``(*batch, 1)``.
        observed: Mean and variance of targets, from those of the function.
        seen: What the model has seen; without points if there are no data yet.
        dtype: Of the results.
        num_dims: Number of inputs, if the model knows it.
    """

    points: Tensor
    factor: Tensor
    errors: Tensor

    def __init__(
        self,
        form: Form,
        prior_mean: nn.Module,
        observed: nn.Module,
        seen: Seen,
        dtype: torch.dtype,
        num_dims: int | None,
    ) -> None:
        super().__init__()
        self.prior_mean, self.observed = prior_mean, observed
        self.dtype, self.num_dims = dtype, num_dims
        for name, value in seen._asdict().items():
            self.register_buffer(name, stored(value))

        def registered(value: Tensor) -> Any:
            name = f"kernel_{len(self._buffers)}"
            self.register_buffer(name, stored(value))
            return name

        # The form of the kernel, with the names of buffers in the place of tensors.
        self.kernel = form.map(registered)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Predict targets.

        Args:
            x: ``(*batch, n, d)``; ``(n,)`` is one column.

        Returns:
            Mean and variance of the targets, ``(*batch, n)`` each, noise included.
        """
        x = (x.unsqueeze(-1) if x.ndim == 1 else x).to(self.factor.dtype)
        d, is_traced = self.num_dims, torch.jit.is_tracing()  # then sizes are unknown
        if not is_traced and d is not None and x.size(-1) != d:
            raise ShapeError(
                f"x has shape {tuple(x.shape)}; expected {d} columns, as the data the "
                "model has seen."
            )
        kernel = self.kernel.map(lambda name: getattr(self, str(name)))
        mean, variance = self.prior_mean(x), kernel.variances(x)
        if self.num_dims is not None:
            v = kernel.gram(x, self.points) @ self.factor
            mean = mean + (v @ self.errors.unsqueeze(-1)).squeeze(-1)
            variance = variance - v.square().sum(-1)
        mean, variance = torch.broadcast_tensors(mean, variance)
        mean, variance = self.observed(mean, variance.clamp_min(MIN_VARIANCE))
        return mean.to(self.dtype), variance.to(self.dtype)

    @torch.no_grad()
    def update_from(self, model: StreamingGP) -> None:
        """Take over what a model has learned since it was exported.

        Buffers are changed in place, so what ``torch.compile``, ``torch.jit.trace`` and
        ``torch.export`` made of this module follows. A program that was loaded from a
        file takes ``state_dict()``. Sizes stay, unless the model has more rows than its
        ``memory_size``, or had no data when it was exported; then trace again. Another
        thread that predicts meanwhile may see old and new buffers.

        Args:
            model: The model, or another with the same kernel, mean and likelihood.
        """
        new = model.export(self.dtype)
        if _layout(new) != _layout(self):
            raise ExportError(
                "The model has another kernel, mean or likelihood than the one that "
                "was exported. Export it with model.export() instead."
            )
        self.num_dims = new.num_dims
        for ours, theirs in zip(self.modules(), new.modules(), strict=True):
            for name, value in theirs.named_buffers(recurse=False):
                before = getattr(ours, name)
                if before.shape == value.shape:
                    before.copy_(value)
                else:
                    setattr(ours, name, value.to(before))


def _layout(exported: ExportedGP) -> Any:
    """What of an exported model is no value: two of one layout differ in buffers."""
    kinds = [type(module) for module in exported.modules()]
    names = [name for name, _ in exported.named_buffers()]
    return kinds, names, _outline(exported.kernel)


def _outline(part: Any) -> Any:
    """A form that holds names as plain values, which can be compared."""
    if isinstance(part, list):
        return [_outline(each) for each in part]
    if isinstance(part, Form):
        return type(part), _outline([*vars(part).values()])
    return part


class _PriorMean(nn.Module):
    r"""A linear mean, :math:`x^\top w + c`: ``(*batch, d, 1)`` and ``(*batch, 1)``."""

    constant: Tensor
    weights: Tensor | None

    def __init__(self, constant: Tensor, weights: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("constant", stored(constant))
        self.register_buffer("weights", None if weights is None else stored(weights))

    def forward(self, x: Tensor) -> Tensor:
        """Prior means ``(*batch, n)`` at ``x``; ``(*batch, 1)`` if constant."""
        if self.weights is None:
            return self.constant
        return self.constant + (x @ self.weights).squeeze(-1)


class _Noise(nn.Module):
    """Gaussian noise, its variance ``(*batch, 1)``."""

    noise: Tensor

    def __init__(self, noise: Tensor) -> None:
        super().__init__()
        self.register_buffer("noise", stored(noise))

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Moments of targets from those of the function."""
        return mean, variance + self.noise


class _Probit(nn.Module):
    r"""Labels 0 and 1 with :math:`p = \Phi(\mu / \sqrt{1 + v})`."""

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Moments of labels from those of the function."""
        link = mean / (2 * (1 + variance)).sqrt()
        # ONNX Runtime has this function in float32 only.
        narrow = torch.float32 if torch.onnx.is_in_onnx_export() else link.dtype
        p = 0.5 * (1 + torch.erf(link.to(narrow)).to(link.dtype))
        return p, p * (1 - p)


class _Counts(nn.Module):
    r"""Poisson counts of rate :math:`\lambda = \mathrm{softplus}(f)`.

    .. math:: E y = E \lambda, \quad \mathrm{var}\, y = E \lambda + \mathrm{var} \lambda

    The integrals over ``f`` are sums over equidistant nodes, which converge faster
    than Gauss-Hermite quadrature where the function is wide: softplus has
    singularities at a distance of :math:`\pi` from the real line.
    """

    nodes: Tensor
    node_weights: Tensor

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        nodes = torch.linspace(-_REACH, _REACH, _NODES, dtype=dtype, device=device)
        self.register_buffer("nodes", nodes)
        self.register_buffer("node_weights", torch.softmax(-0.5 * nodes.square(), -1))

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Moments of counts from those of the function."""
        f = mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * self.nodes
        # ONNX Runtime has softplus in float32 only.
        rate = f.clamp_min(0) + (-f.abs()).exp().log1p()
        expected = (rate * self.node_weights).sum(-1)
        spread = ((rate - expected.unsqueeze(-1)).square() * self.node_weights).sum(-1)
        return expected, expected + spread


_REACH = 8.5  # standard deviations; what is beyond weighs less than a rounding
_NODES = 129


# -- making one ---------------------------------------------------------------------


@torch.no_grad()
def export_predictor(
    predictor: Predictor, dtype: torch.dtype, num_dims: int | None, capacity: int
) -> ExportedGP:
    """The plain module of a predictor, with room for ``capacity`` rows."""
    if dtype not in DTYPES:
        raise DtypeError(
            f"dtype is {dtype!r}; expected torch.float32 or torch.float64."
        )
    form = _form(predictor.kernel)
    return ExportedGP(
        form,
        _prior_mean(predictor.mean, predictor.s),
        _observed(predictor.likelihood, predictor.s),
        _seen(predictor, capacity),
        dtype,
        num_dims,
    ).eval()


def _seen(predictor: Predictor, capacity: int) -> Seen:
    if predictor.factor is None:
        nothing = predictor.s.new_zeros(0)
        return Seen(nothing.view(0, 0), nothing.view(0, 0), nothing)
    points, rows, factor = predictor.points, predictor.rows, predictor.factor
    eye = torch.eye(points.size(-2), dtype=points.dtype, device=points.device)
    WH, e = factor.W @ row_space.see(rows, eye), factor.e
    for x, root, (V, L_inv, error) in predictor.tails:
        # The rows of a fantasy border those before it.
        left = -L_inv @ (V.mT @ WH)
        right = L_inv if root is None else L_inv * root.unsqueeze(-2)
        WH = nn.functional.pad(WH, (0, x.size(-2)))
        below = torch.cat(fn.broadcast_matrices(left, right), -1)
        WH = torch.cat(fn.broadcast_matrices(WH, below), -2)
        e = torch.cat(fn.broadcast_rows(e, error), -1)
        points = torch.cat(fn.broadcast_matrices(points, x), -2)
    if isinstance(predictor.form, Drifting):
        # At the time of predictions each point has faded by a factor of its own.
        assert predictor.now is not None
        age = (predictor.now - points[..., -1]).abs()
        WH = WH * (-predictor.form.rate.unsqueeze(-1) * age).exp().unsqueeze(-2)
        points = points[..., :-1]
    num_rows, num_points = WH.shape[-2:]
    free = max(capacity - num_points, 0)
    last = points[..., -1:, :].expand(*points.shape[:-2], free, -1)
    spare = max(capacity - num_rows, 0)
    return Seen(
        torch.cat([points, last], -2),
        nn.functional.pad(WH.mT, (0, spare, 0, free)),
        nn.functional.pad(e, (0, spare)),
    )


def _form(kernel: Kernel) -> Form:
    form = read(kernel)
    if form is not None:
        return form
    parts: list[Any] = [part for part in kernel.modules() if isinstance(part, Kernel)]
    unknown = [part for part in parts if read(part) is None]
    raise _unsupported(
        "covar_module",
        unknown[-1],  # the innermost: those around it are unknown because it is
        KERNELS,
        "with ard_num_dims and active_dims",
    )


def _prior_mean(mean: Mean, like: Tensor) -> nn.Module:
    kind: Any = type(mean)
    if kind is means.ZeroMean:
        return _PriorMean(like.new_zeros(*mean.batch_shape, 1))
    if kind is means.ConstantMean:
        return _PriorMean(mean.constant.unsqueeze(-1))
    if kind is means.LinearMean:
        bias = like.new_zeros(1) if mean.bias is None else mean.bias
        return _PriorMean(bias, mean.weights)
    raise _unsupported("mean_module", mean, MEANS)


def _observed(likelihood: Likelihood, like: Tensor) -> nn.Module:
    kind: Any = type(likelihood)
    if kind is likelihoods.GaussianLikelihood:
        return _Noise(likelihood.noise.to(like.dtype))
    if kind is likelihoods.BernoulliLikelihood:
        return _Probit()
    if kind is likelihoods.PoissonLikelihood:
        return _Counts(like.dtype, like.device)
    raise _unsupported("likelihood", likelihood, LIKELIHOODS)


def _unsupported(
    name: str, part: nn.Module, known: tuple[type, ...], also: str = ""
) -> ExportError:
    hooked = " with hooks" if part._forward_hooks or part._forward_pre_hooks else ""
    listed = ", ".join(kind.__name__ for kind in known)
    return ExportError(
        f"{name} has a {type(part).__name__}{hooked}, which cannot be exported; "
        f"expected {listed}{', ' if also else ''}{also}. Subclasses are not exported, "
        "because they may compute something else. Use the model itself instead."
    )

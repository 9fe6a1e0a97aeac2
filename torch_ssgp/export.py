r"""A model without its training stack: x -> (mean, variance) of targets.

The posterior at test points, see :func:`torch_ssgp.functional.predictive_terms`, is a
few products with matrices that no longer change:

.. math::
    E f_s = m_s + K_{sb} w, \quad
    \mathrm{var} f_s = k_{ss} - \|R K_{bs}\|^2, \quad
    w = L^{-\top} L_D^{-\top} c, \quad
    R^\top R = L^{-\top} (I - D^{-1}) L^{-1}.

:class:`ExportedGP` holds them as buffers, beside the kernel as a
:class:`~torch_ssgp.kernels.Form`. Nothing of GPyTorch is left inside, so that
``torch.export``, ``torch.compile``, ``torch.jit.trace`` and ONNX can read it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch import kernels, likelihoods, means
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from torch import Tensor, nn

from torch_ssgp import functional as fn
from torch_ssgp.exceptions import DtypeError, ExportError, ShapeError
from torch_ssgp.functional import Posterior
from torch_ssgp.kernels import Form, read
from torch_ssgp.likelihoods import MIN_VARIANCE
from torch_ssgp.prediction import Predictor

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


class ExportedGP(nn.Module):
    """Mean and variance of targets, from tensors alone; see ``StreamingGP.export``.

    It computes in the dtype of its buffers, that of the algebra of the model: float64,
    unless ``settings.algebra_dtype`` says otherwise. Differentiable in ``x``.

    Args:
        form: The kernel as tensors.
        prior_mean: Prior mean as a module of tensors.
        observed: Mean and variance of targets, from those of the function.
        z: ``(*batch, m, d)`` inducing points; ``m`` is 0 if there are no data yet.
        weights: ``(*batch, m, 1)``, :math:`w`.
        root: ``(*batch, m, m)``, the transpose of :math:`R`.
        dtype: Of the results.
        num_dims: Number of inputs, if the model knows it.
    """

    z: Tensor
    weights: Tensor
    root: Tensor

    def __init__(
        self,
        form: Form,
        prior_mean: nn.Module,
        observed: nn.Module,
        z: Tensor,
        weights: Tensor,
        root: Tensor,
        dtype: torch.dtype,
        num_dims: int | None,
    ) -> None:
        super().__init__()
        self.prior_mean, self.observed = prior_mean, observed
        self.dtype, self.num_dims = dtype, num_dims
        self.has_data = z.size(-2) > 0
        for name, value in (("z", z), ("weights", weights), ("root", root)):
            self.register_buffer(name, _own(value))
        self.kernel = _KernelTensors(form)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Predict targets.

        Args:
            x: ``(*batch, n, d)``; ``(n,)`` is one column.

        Returns:
            Mean and variance of the targets, ``(*batch, n)`` each, noise included.
        """
        x = (x.unsqueeze(-1) if x.ndim == 1 else x).to(self.z.dtype)
        # While a trace is taken, sizes are not numbers that can be compared.
        if not torch.jit.is_tracing():
            self._check(x)
        form = self.kernel()
        mean, variance = self.prior_mean(x), form.variances(x)
        if self.has_data:
            K_sb = form.gram(x, self.z)
            mean = mean + (K_sb @ self.weights).squeeze(-1)
            variance = variance - (K_sb @ self.root).square().sum(-1)
        mean, variance = self.observed(mean, variance.clamp_min(MIN_VARIANCE))
        return mean.to(self.dtype), variance.to(self.dtype)

    def _check(self, x: Tensor) -> None:
        if self.num_dims is not None and x.size(-1) != self.num_dims:
            raise ShapeError(
                f"x has shape {tuple(x.shape)}; expected {self.num_dims} columns, as "
                "the data the model has seen."
            )


class _KernelTensors(nn.Module):
    """The tensors of a form as buffers: they move, and are saved, with the module.

    Args:
        form: The kernel as tensors.
    """

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.num = 0

        def register(value: Tensor) -> Tensor:
            self.register_buffer(f"tensor_{self.num}", _own(value))
            self.num += 1
            return value.detach().new_empty(0)

        self.empty = form.map(register)

    def forward(self) -> Form:
        """The form with the buffers as they are now."""
        buffers = iter([getattr(self, f"tensor_{k}") for k in range(self.num)])
        return self.empty.map(lambda _: next(buffers))


class _PriorMean(nn.Module):
    r"""A linear mean, :math:`x^\top w + c`.

    Args:
        constant: ``(*batch, 1)``.
        weights: ``(*batch, d, 1)``; ``None`` where the mean is constant.
    """

    constant: Tensor
    weights: Tensor | None

    def __init__(self, constant: Tensor, weights: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("constant", _own(constant))
        self.register_buffer("weights", None if weights is None else _own(weights))

    def forward(self, x: Tensor) -> Tensor:
        """Prior means ``(*batch, n)`` at ``x`` ``(*batch, n, d)``."""
        if self.weights is None:
            return self.constant + torch.zeros_like(x[..., 0])
        return self.constant + (x @ self.weights).squeeze(-1)


class _Noise(nn.Module):
    """Gaussian noise.

    Args:
        noise: ``(*batch, 1)``, its variance.
    """

    noise: Tensor

    def __init__(self, noise: Tensor) -> None:
        super().__init__()
        self.register_buffer("noise", _own(noise))

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Moments of targets from those of the function."""
        return mean, variance + self.noise


class _Probit(nn.Module):
    r"""Labels 0 and 1 with :math:`p = \Phi(\mu / \sqrt{1 + v})`."""

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Moments of labels from those of the function."""
        link = mean / (1 + variance).sqrt()
        p = 0.5 * (1 + torch.erf(link / math.sqrt(2)))
        return p, p * (1 - p)


class _Counts(nn.Module):
    r"""Poisson counts of rate :math:`\lambda = \mathrm{softplus}(f)`.

    .. math:: E y = E \lambda, \quad \mathrm{var}\, y = E \lambda + \mathrm{var} \lambda

    The integrals over ``f`` are sums over equidistant nodes, which converge faster
    than Gauss-Hermite quadrature where the function is wide: softplus has
    singularities at a distance of :math:`\pi` from the real line.

    Args:
        dtype: Dtype of the algebra.
        device: Device of the model.
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
        rate = nn.functional.softplus(f)
        expected = (rate * self.node_weights).sum(-1)
        spread = ((rate - expected.unsqueeze(-1)).square() * self.node_weights).sum(-1)
        return expected, expected + spread


_REACH = 8.5  # standard deviations; what is beyond weighs less than a rounding
_NODES = 129


# -- making one ---------------------------------------------------------------------


@torch.no_grad()
def export_predictor(
    predictor: Predictor, dtype: torch.dtype, num_dims: int | None
) -> ExportedGP:
    """The plain module of a predictor.

    Args:
        predictor: What predicts.
        dtype: Of the results.
        num_dims: Number of inputs, if the model knows it.

    Returns:
        A module that shares nothing with the predictor.
    """
    if dtype not in DTYPES:
        raise DtypeError(
            f"dtype is {dtype!r}; expected torch.float32 or torch.float64."
        )
    z = predictor.z
    if predictor.posterior is None:
        weights, root = z.new_zeros(0, 1), z.new_zeros(0, 0)
    else:
        weights, root = _factors(predictor.posterior)
    return ExportedGP(
        _form(predictor.kernel),
        _prior_mean(predictor.mean, z),
        _observed(predictor.likelihood, z),
        z,
        weights,
        root,
        dtype,
        num_dims,
    ).eval()


def _own(value: Tensor) -> Tensor:
    """A copy whose storage holds nothing else, so that it can be written to files."""
    return value.detach().clone(memory_format=torch.contiguous_format)


def _factors(posterior: Posterior) -> tuple[Tensor, Tensor]:
    """What test points are multiplied with, ``w`` and ``Rᵀ``."""
    L, L_D, c = (value.detach() for value in posterior)
    # w = L⁻ᵀ L_D⁻ᵀ c
    u = torch.linalg.solve_triangular(L_D.mT, c.unsqueeze(-1), upper=True)
    L, u = fn.broadcast_matrices(L, u)
    weights = torch.linalg.solve_triangular(L.mT, u, upper=True)
    # D = Q Λ Qᵀ,   Rᵀ = L⁻ᵀ Q √(I - Λ⁻¹)
    eigenvalues, Q = torch.linalg.eigh(L_D @ L_D.mT)
    known = (1 - eigenvalues.clamp_min(1).reciprocal()).sqrt()
    L, Q = fn.broadcast_matrices(posterior.L.detach(), Q * known.unsqueeze(-2))
    return weights, torch.linalg.solve_triangular(L.mT, Q, upper=True)


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


def _prior_mean(mean: Mean, z: Tensor) -> nn.Module:
    kind: Any = type(mean)
    if kind is means.ZeroMean:
        return _PriorMean(z.new_zeros(*mean.batch_shape, 1))
    if kind is means.ConstantMean:
        return _PriorMean(mean.constant.unsqueeze(-1))
    if kind is means.LinearMean:
        bias = z.new_zeros(1) if mean.bias is None else mean.bias
        return _PriorMean(bias, mean.weights)
    raise _unsupported("mean_module", mean, MEANS)


def _observed(likelihood: Likelihood, z: Tensor) -> nn.Module:
    kind: Any = type(likelihood)
    if kind is likelihoods.GaussianLikelihood:
        return _Noise(likelihood.noise.to(z.dtype))
    if kind is likelihoods.BernoulliLikelihood:
        return _Probit()
    if kind is likelihoods.PoissonLikelihood:
        return _Counts(z.dtype, z.device)
    raise _unsupported("likelihood", likelihood, LIKELIHOODS)


def _unsupported(
    name: str, part: nn.Module, known: tuple[type, ...], also: str = ""
) -> ExportError:
    hooked = " with hooks" if part._forward_hooks or part._forward_pre_hooks else ""
    listed = ", ".join(kind.__name__ for kind in known)
    return ExportError(
        f"{name} has a {type(part).__name__}{hooked}, which cannot be exported; "
        f"expected {listed}{', ' if also else ''}{also}. Subclasses may compute "
        "something else, so they do not count. Use the model itself for the others."
    )

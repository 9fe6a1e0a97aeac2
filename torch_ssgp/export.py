r"""A model without its training stack: from x to the mean and variance of targets.

The posterior at test points (see :func:`torch_ssgp.functional.predictive_terms`) is a
few products with fixed matrices:

.. math::
    E f_s = m_s + K_{sb} w, \quad
    \mathrm{var} f_s = k_{ss} - \|R K_{bs}\|^2, \quad
    w = L^{-\top} L_D^{-\top} c, \quad
    R^\top R = L^{-\top} (I - D^{-1}) L^{-1}.

:class:`ExportedGP` holds them as buffers, together with the kernel at fixed points (see
:mod:`torch_ssgp.plain_kernels`). It uses nothing from GPyTorch, so ``torch.export``,
``torch.compile``, ``torch.jit.trace`` and ONNX can read it.
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
from torch_ssgp.plain_kernels import cross_covariance, own, prior_variance
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
    r"""Mean and variance of targets, from tensors alone; see ``StreamingGP.export``.

    It computes in the dtype of its buffers, that of the algebra of the model: float64,
    unless ``settings.algebra_dtype`` says otherwise. Differentiable in ``x``.

    Args:
        variances: Prior variances of x, see ``plain_kernels.prior_variance``.
        cross: Covariances of x with the inducing points, see
            ``plain_kernels.cross_covariance``; ``None`` if there are no data yet.
        prior_mean: Prior mean of x, ``(*batch, n)`` or ``(*batch, 1)``.
        observed: Mean and variance of targets, from those of the function.
        factor: ``(*batch, m, m + 1)``, :math:`[R^\top, w]`.
        dtype: Of the results.
        num_dims: Number of inputs, if the model knows it.
    """

    factor: Tensor

    def __init__(
        self,
        variances: nn.Module,
        cross: nn.Module | None,
        prior_mean: nn.Module,
        observed: nn.Module,
        factor: Tensor,
        dtype: torch.dtype,
        num_dims: int | None,
    ) -> None:
        super().__init__()
        self.variances, self.cross = variances, cross
        self.prior_mean, self.observed = prior_mean, observed
        self.dtype, self.num_dims = dtype, num_dims
        self.register_buffer("factor", own(factor))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Predict targets.

        Args:
            x: ``(*batch, n, d)``; ``(n,)`` is one column.

        Returns:
            Mean and variance of the targets, ``(*batch, n)`` each, noise included.
        """
        factor = self.factor
        x = (x.unsqueeze(-1) if x.ndim == 1 else x).to(factor.dtype)
        # While a trace is taken, sizes are not numbers that can be compared.
        if not torch.jit.is_tracing():
            self._check(x)
        mean, variance = self.prior_mean(x), self.variances(x)
        if self.cross is None:
            rows = torch.zeros_like(x[..., 0])
            mean, variance = torch.broadcast_tensors(mean + rows, variance + rows)
        else:
            # [K_sb Rᵀ, K_sb w] = K_sb [Rᵀ, w]
            product = self.cross(x) @ factor
            mean = mean + product[..., -1]
            variance = variance - product[..., :-1].square().sum(-1)
        mean, variance = self.observed(mean, variance.clamp_min(MIN_VARIANCE))
        return mean.to(self.dtype), variance.to(self.dtype)

    def _check(self, x: Tensor) -> None:
        if self.num_dims is not None and x.size(-1) != self.num_dims:
            raise ShapeError(
                f"x has shape {tuple(x.shape)}; expected {self.num_dims} columns, as "
                "the data the model has seen."
            )


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
        self.register_buffer("constant", own(constant))
        self.register_buffer("weights", None if weights is None else own(weights))

    def forward(self, x: Tensor) -> Tensor:
        """Prior means ``(*batch, n)`` at ``x``; ``(*batch, 1)`` if constant."""
        if self.weights is None:
            return self.constant
        return self.constant + (x @ self.weights).squeeze(-1)


class _Noise(nn.Module):
    """Gaussian noise.

    Args:
        noise: ``(*batch, 1)``, its variance.
    """

    noise: Tensor

    def __init__(self, noise: Tensor) -> None:
        super().__init__()
        self.register_buffer("noise", own(noise))

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
    form, cross, factor = _form(predictor.kernel), None, z.new_zeros(0, 1)
    if predictor.posterior is not None:
        cross, factor = cross_covariance(form, z), _factor(predictor.posterior)
    return ExportedGP(
        prior_variance(form),
        cross,
        _prior_mean(predictor.mean, z),
        _observed(predictor.likelihood, z),
        factor,
        dtype,
        num_dims,
    ).eval()


def _factor(posterior: Posterior) -> Tensor:
    """What covariances with inducing points are multiplied with, ``[Rᵀ, w]``."""
    L, L_D, c = (value.detach() for value in posterior)
    # w = L⁻ᵀ L_D⁻ᵀ c
    u = torch.linalg.solve_triangular(L_D.mT, c.unsqueeze(-1), upper=True)
    # D = Q Λ Qᵀ,   Rᵀ = L⁻ᵀ Q √(I - Λ⁻¹)
    eigenvalues, Q = torch.linalg.eigh(L_D @ L_D.mT)
    known = (1 - eigenvalues.clamp_min(1).reciprocal()).sqrt()
    Q, u = fn.broadcast_matrices(Q * known.unsqueeze(-2), u)
    L, right = fn.broadcast_matrices(L, torch.cat([Q, u], -1))
    return torch.linalg.solve_triangular(L.mT, right, upper=True)


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
        f"expected {listed}{', ' if also else ''}{also}. Subclasses are not exported, "
        "because they may compute something else. Use the model itself instead."
    )

"""The posterior at test points, from the summary alone."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from linear_operator import to_linear_operator
from linear_operator.operators import LinearOperator, MatmulLinearOperator
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.exceptions import FactorizationError, breakdowns
from torch_ssgp.functional import Posterior, PseudoObservations
from torch_ssgp.modules import Opaque, inducing_gram, lazy_gram


class Predictor(NamedTuple):
    """Everything a prediction needs, factored once and never changed.

    The modules are frozen copies. Predictions carry gradients to the test points (and
    to fantasised data), but not to hyperparameters. Readers in other threads see one
    posterior, not a mixture.

    Attributes:
        mean: Frozen prior mean.
        kernel: Frozen prior covariance.
        likelihood: Frozen likelihood, in the dtype of the predictions.
        z: ``(*batch, m, d)`` inducing points.
        posterior: Factors of q(b); ``None`` if there are no data yet.
    """

    mean: Mean
    kernel: Kernel
    likelihood: Likelihood
    z: Tensor
    posterior: Posterior | None

    @classmethod
    def build(
        cls,
        mean: Mean,
        kernel: Kernel,
        likelihood: Likelihood,
        z: Tensor,
        past: PseudoObservations,
        s: Tensor,
        jitter: float,
    ) -> Predictor:
        """Factor the posterior given pseudo-observations at ``z``.

        Args:
            mean: Prior mean in the dtype of the algebra, frozen.
            kernel: Prior covariance in the dtype of the algebra, frozen.
            likelihood: Likelihood in the dtype of the predictions, frozen.
            z: ``(*batch, m, d)`` inducing points.
            past: Pseudo-observations at ``z``.
            s: ``(*batch,)`` noise scale of the rows.
            jitter: Relative jitter.
        """
        if z.size(-2) == 0:
            return cls(mean, kernel, likelihood, z, None)
        with breakdowns():
            # By GPyTorch, as the covariance of test points: roundings cancel.
            L = fn.cholesky(inducing_gram(Opaque(kernel), z, jitter).K_zz)
        posterior = fn.factorize(fn.recall(past, L, mean(z)), s)
        if not bool(torch.isfinite(posterior.c).all()):
            raise FactorizationError(
                "The posterior could not be factored with the current "
                "hyperparameters. Change them, or raise the jitter: "
                "with torch_ssgp.settings.jitter(1e-6): ..."
            )
        return cls(mean, kernel, likelihood, z, posterior)

    def __call__(self, x: Tensor) -> MultivariateNormal:
        """Latent posterior at ``x`` ``(*batch, n, d)``, in the dtype of ``x``."""
        x_s = x.to(self.z.dtype)
        if self.posterior is None:
            return cast_distribution(
                self.mean(x_s), lazy_gram(self.kernel, x_s), x.dtype
            )
        K_bs = Opaque(self.kernel).gram(self.z, x_s)
        shift, A_s, B_s = fn.predictive_terms(self.posterior, K_bs)
        mean = self.mean(x_s) + shift
        covariance = lazy_gram(self.kernel, x_s) + MatmulLinearOperator(A_s.mT, B_s)
        if covariance.batch_shape != mean.shape[:-1]:
            batch = torch.broadcast_shapes(covariance.batch_shape, mean.shape[:-1])
            mean = mean.expand(*batch, -1)
            covariance = covariance.expand(*batch, *covariance.shape[-2:])
        return cast_distribution(mean, covariance, x.dtype)


def freeze(module: Any, dtype: torch.dtype) -> Any:
    """A copy of a module in ``dtype`` without gradients."""
    return deepcopy(module).to(dtype).requires_grad_(False).eval()


def cast_distribution(
    mean: Tensor, covariance: LinearOperator, dtype: torch.dtype
) -> MultivariateNormal:
    """A distribution in ``dtype``, its covariance still computed in its own."""
    if covariance.dtype != dtype:
        covariance = CastLinearOperator(covariance, dtype=dtype)
    return MultivariateNormal(mean.to(dtype), covariance)


class CastLinearOperator(LinearOperator):
    """A linear operator computed in one dtype and seen in another.

    A posterior covariance is a small difference of large terms. In float32 it could
    have negative variances, so it is evaluated in float64 and cast afterwards.

    Args:
        base: The operator, in the dtype of the algebra.
        dtype: The dtype to show.
    """

    def __init__(self, base: LinearOperator, dtype: torch.dtype) -> None:
        super().__init__(base, dtype=dtype)
        self.base, self._dtype = to_linear_operator(base), dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype shown."""
        return self._dtype

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.base._matmul(rhs.to(self.base.dtype)).to(self._dtype)

    def _size(self) -> torch.Size:
        return self.base.shape

    def _transpose_nonbatch(self) -> LinearOperator:
        return self._wrap(self.base._transpose_nonbatch())

    def _diagonal(self) -> Tensor:
        return self.base._diagonal().to(self._dtype)

    def to_dense(self) -> Tensor:
        """The dense matrix in the dtype shown."""
        return self.base.to_dense().to(self._dtype)

    def _getitem(self, *indices: Any) -> LinearOperator | Tensor:
        return self._wrap(self.base._getitem(*indices))

    def _get_indices(self, *indices: Any) -> Tensor:
        return self.base._get_indices(*indices).to(self._dtype)

    def _expand_batch(self, batch_shape: torch.Size) -> LinearOperator:
        return self._wrap(self.base._expand_batch(batch_shape))

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self._wrap(self.base._permute_batch(*dims))

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._wrap(self.base._unsqueeze_batch(dim))

    def _wrap(self, base: Any) -> Any:
        if isinstance(base, Tensor):
            return base.to(self._dtype)
        return type(self)(base, dtype=self._dtype)

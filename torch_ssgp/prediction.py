"""The posterior at test points, from the rows of a memory."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from linear_operator import to_linear_operator
from linear_operator.operators import (
    DiagLinearOperator,
    LinearOperator,
    MatmulLinearOperator,
)
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import rows as row_space
from torch_ssgp.exceptions import Breakdown, breakdowns
from torch_ssgp.kernels import Drifting, Form, Stationary, select, stationary
from torch_ssgp.memory import Data, GaussianData, Rows
from torch_ssgp.modules import form_of, lazy_gram, square_gram
from torch_ssgp.radial import far, radial
from torch_ssgp.rows import Border, Factor, Regression, border

if TYPE_CHECKING:
    from torch_ssgp.update.young import Mixture


DENSE = 1000  # points whose covariance is formed at once where a model is young
LEAST = (
    1e-2  # share of their variance that the noise of the modules leaves the function
)


class Tail(NamedTuple):
    """Rows behind a factor that several fantasies share, each with its own.

    Attributes:
        x: ``(*batch, n, d)``, their inputs as the kernel sees them.
        root: ``(*batch, n)``, their weights; ``None`` for ones.
        border: How they continue what is before them.
    """

    x: Tensor
    root: Tensor | None
    border: Border


class Near(NamedTuple):
    """Points in units of the lengthscale: their covariance with one more is cheap.

    Attributes:
        kernel: The kernel.
        rate: ``(*batch,)``, rate of drift; ``None`` where nothing drifts.
        points: ``(*batch, r, d)``, scaled.
        time: ``(*batch, r)``, when they came; ``None`` where nothing drifts.
    """

    kernel: Stationary
    rate: Tensor | None
    points: Tensor
    time: Tensor | None

    @classmethod
    def of(cls, form: Form, points: Tensor) -> Near | None:
        """The points of a kernel that is one RBF or Matérn kernel, else ``None``."""
        rate = form.rate if isinstance(form, Drifting) else None
        kernel = stationary(form.base if isinstance(form, Drifting) else form)
        if kernel is None:
            return None
        empty = cls(kernel, rate, points[..., :0, :], None)
        return empty.scaled(points)

    def scaled(self, x: Tensor) -> Near:
        """Other points, in the same units."""
        time = None
        if self.rate is not None:
            x, time = x[..., :-1], x[..., -1]
        x = select(x, self.kernel.dims) / self.kernel.lengthscale
        return self._replace(points=x, time=time)

    def first(self, count: int) -> Near:
        """The first of them, without batch dimensions."""
        time = None if self.time is None else self.time[:count]
        return self._replace(points=self.points[:count], time=time)

    def gram(self, x: Tensor) -> Tensor:
        """Covariance ``(*batch, r, 1)`` with one point, as the kernel sees it."""
        return self.gram_with(self.scaled(x))

    def gram_with(self, new: Near) -> Tensor:
        """Covariance ``(*batch, r, 1)`` with one point in the same units."""
        q = (self.points - new.points).square_().sum(-1, keepdim=True).mul_(-0.5)
        k = radial(q, self.kernel.nu, None) * self.kernel.scale[..., None, None]
        if self.rate is not None:
            assert self.time is not None and new.time is not None
            age = (self.time - new.time).abs_().unsqueeze(-1)
            k = k * (-self.rate[..., None, None] * age).clamp_min_(far(q)).exp_()
        return k


class Predictor:
    """Everything a prediction needs, factored once and never changed.

    The modules are frozen copies. Predictions carry gradients to the test points (and
    to fantasised data), but not to hyperparameters. Readers in other threads see one
    posterior, not a mixture.

    Attributes:
        mean: Frozen prior mean.
        kernel: Frozen prior covariance.
        form: The same as plain tensors; inputs end with the time if it drifts.
        likelihood: Frozen likelihood, in the dtype of the predictions.
        points: ``(*batch, r, d)``, those of the rows, as the kernel sees them.
        rows: The regression.
        s: ``(*batch,)``, noise scale of the rows.
        factor: Of these rows; ``None`` if there are no data yet.
        now: ``()``, the time of predictions; ``None`` where it does not matter.
        jitter: Relative jitter of the points of the compressed rows.
        tails: Rows of fantasies.
        near: Its points, scaled, while single data are added; else ``None``.
        young: A mixture over hyperparameters, and the log odds of those of the modules
            against it; ``None`` where these are trusted.
    """

    points: Tensor
    rows: Regression
    factor: Factor | None
    jitter: float = 0.0
    tails: tuple[Tail, ...] = ()
    near: Near | None = None
    young: tuple[Mixture, Tensor] | None = None

    def __init__(
        self,
        mean: Mean,
        kernel: Kernel,
        likelihood: Likelihood,
        s: Tensor,
        rate: Tensor | None = None,
        now: Tensor | None = None,
    ) -> None:
        self.mean, self.kernel, self.likelihood = mean, kernel, likelihood
        self.form: Form = form_of(kernel)
        if rate is not None:
            self.form = Drifting(self.form, rate)
        self.s, self.now, self.factor = s, now, None

    def fitted(
        self,
        rows: Rows,
        data: Data,
        sites: GaussianData,
        jitter: float,
        capacity: int = 0,
    ) -> Predictor:
        """The predictor of a data set, factored.

        Args:
            rows: What is compressed.
            data: Raw data.
            sites: The same as Gaussian observations.
            jitter: Relative jitter of the points of ``rows``.
            capacity: Rows for which there is to be room.
        """
        past = rows.past._replace(rho=rows.past.rho + sites.offset)
        new = copy(self)
        new.rows = row_space.regression(
            past, sites.target, sites.noise, self.s, data.weight
        )
        z, x = self.with_time(rows.points, rows.time), self.with_time(data.x, data.time)
        new.points = torch.cat(fn.broadcast_matrices(z, x), -2)
        new.jitter = jitter
        with breakdowns():
            K = square_gram(self.form, new.points, z.size(-2), jitter)
            m = self.mean(new.points[..., : rows.points.size(-1)])
            A, r = row_space.system(new.rows, K, m)
        new.factor = Factor.of(A, r, self.s, capacity)
        if not bool(torch.isfinite(new.factor.e).all()):
            raise Breakdown("the posterior is not finite")
        return new

    def with_time(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        """Inputs as the kernel sees them; at the time of predictions by default."""
        if not isinstance(self.form, Drifting):
            return x
        time = self.now if time is None else time
        assert time is not None
        return torch.cat([x, time.expand(x.shape[:-1]).unsqueeze(-1)], -1)

    def cross(self, x: Tensor) -> Tensor:
        """Prior covariance ``(*batch, r, n)`` of its points and ``x``."""
        if self.near is None or x.size(-2) != 1 or x.requires_grad:
            return self.form.gram(self.points, x)
        return self.near.gram(x)

    # -- one more row, or a few -----------------------------------------------------

    def border(
        self, x: Tensor, target: Tensor, root: Tensor | None, time: Tensor | None = None
    ) -> Border:
        """New rows, seen from those that are there.

        Args:
            x: ``(*batch, n, d)``.
            target: ``(*batch, n)``, in function space, times ``root``.
            root: ``(*batch, n)`` or ``(n,)``, weights; ``None`` for ones.
            time: ``(n,)``, when they came.
        """
        x_k, m = self.with_time(x, time), self.mean(x)
        if x.size(-2) == 1:
            K = self.form.variances(x_k).unsqueeze(-1)
        else:
            K = square_gram(self.form, x_k)
        shift, V = self.solve(x_k)
        if root is not None:
            m, shift = root * m, root * shift
            V = [root.unsqueeze(-2) * v for v in V]
            K = root.unsqueeze(-1) * K * root.unsqueeze(-2)
        for v in V:
            K = K - v.mT @ v
        noise = self.s[..., None, None]
        if x.size(-2) > 1:
            noise = noise * torch.eye(x.size(-2), dtype=K.dtype, device=K.device)
        S = K + noise
        together = V[0] if len(V) == 1 else torch.cat(_with_one_batch(V), -2)
        return border(together, S, target - m - shift)

    def extended(
        self,
        x: Tensor,
        target: Tensor,
        root: Tensor | None,
        new: Border,
        time: Tensor | None = None,
    ) -> Predictor:
        """The predictor that has also seen these rows; see :meth:`border`."""
        grown, x_k = copy(self), self.with_time(x, time)
        grown.young = None
        assert self.factor is not None
        grown.points = torch.cat(fn.broadcast_matrices(self.points, x_k), -2)
        grown.near = None
        old = self.rows.root
        if root is not None or old is not None:
            num_raw = self.points.size(-2) - self.rows.U.size(-1)
            ones = target.new_ones(num_raw)
            root = torch.ones_like(target) if root is None else root
            root = torch.cat(fn.broadcast_rows(ones if old is None else old, root), -1)
        grown.rows = self.rows._replace(
            root=root,
            target=torch.cat(fn.broadcast_rows(self.rows.target, target), -1),
            n=self.rows.n + target.size(-1),
        )
        grown.factor = self.factor.extend(new)
        return grown

    def fantasised(self, x: Tensor, root: Tensor | None, new: Border) -> Predictor:
        """The same with a graph, and without a copy of the factor.

        Args:
            x: ``(*batch, n, d)``, where ``batch`` may have leading dimensions.
            root: ``(*batch, n)``; ``None`` for ones.
            new: What :meth:`border` returned.
        """
        grown = copy(self)
        grown.young = None
        grown.tails = (*self.tails, Tail(self.with_time(x), root, new))
        return grown

    def blended(self, mixture: Mixture | None, odds: Tensor) -> Predictor:
        """The same, averaged with a mixture over hyperparameters, if there is one.

        Args:
            mixture: The mixture, of the same data.
            odds: ``(*batch,)``, log odds of the hyperparameters of the modules.
        """
        if mixture is None and self.young is None:
            return self
        new = copy(self)
        new.young = None if mixture is None else (mixture, odds)
        return new

    # -- predicting -----------------------------------------------------------------

    def solve(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """``Vᵀ e`` and the blocks of ``V = W H k(P, x)``, ``x`` as the kernel sees it.

        Where fantasies differ only the last blocks have their batch dimensions.
        """
        assert self.factor is not None
        c = row_space.see(self.rows, self.cross(x))
        V = [self.factor.W @ c]
        shift = (self.factor.e.unsqueeze(-2) @ V[0]).squeeze(-2)
        for tail in self.tails:
            c = self.form.gram(tail.x, x)
            if tail.root is not None:
                c = tail.root.unsqueeze(-1) * c
            before = V[0] if len(V) == 1 else torch.cat(_with_one_batch(V), -2)
            v = tail.border.L_inv @ (c - tail.border.V.mT @ before)
            V.append(v)
            shift = shift + (tail.border.e.unsqueeze(-2) @ v).squeeze(-2)
        return shift, V

    def __call__(self, x: Tensor) -> MultivariateNormal:
        """Latent posterior at ``x`` ``(*batch, n, d)``, in the dtype of ``x``."""
        x_s = x.to(self.s.dtype)
        if x.size(-2) == 1 and self.factor is not None:
            mean, variance = self.moments(x_s)  # a lazy operator would cost far more
            covariance = to_linear_operator(variance.unsqueeze(-1))
        else:
            mean, covariance = self.mean(x_s), lazy_gram(self.kernel, x_s)
            if self.factor is not None:
                shift, V = self.solve(self.with_time(x_s))
                mean = mean + shift
                for v in V:
                    covariance = covariance + MatmulLinearOperator(-v.mT, v)
        if self.young is not None:
            mean, covariance = self._averaged(x_s, mean, covariance)
        if covariance.batch_shape != mean.shape[:-1]:
            batch = torch.broadcast_shapes(covariance.batch_shape, mean.shape[:-1])
            mean = mean.expand(*batch, -1)
            covariance = covariance.expand(*batch, *covariance.shape[-2:])
        return cast_distribution(mean, covariance, x.dtype)

    def _averaged(
        self, x: Tensor, mean: Tensor, covariance: LinearOperator
    ) -> tuple[Tensor, LinearOperator]:
        """Mean and covariance, averaged with the mixture.

        Means and variances are those of the average; correlations stay.
        """
        variance = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0)
        mean, wide = self.average(x, mean, variance)
        tiny = 1e-12 * self.form.variances(x).clamp_min(1e-300)
        scale = ((wide + tiny) / (variance + tiny)).sqrt()
        if x.size(-2) <= DENSE:
            K = scale.unsqueeze(-1) * covariance.to_dense() * scale.unsqueeze(-2)
            return mean, to_linear_operator(K)
        D = DiagLinearOperator(scale)
        return mean, D @ covariance @ D

    def average(
        self, x: Tensor, mean: Tensor, variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Latent means and variances, averaged with those of the mixture.

        Args:
            x: ``(*batch, n, d)``.
            mean: ``(*batch, n)``, by the hyperparameters of the modules.
            variance: ``(*batch, n)``, likewise.
        """
        assert self.young is not None
        mixture, odds = self.young
        noise, p = self.s.unsqueeze(-1), odds.sigmoid().unsqueeze(-1)
        other, total = mixture.moments(x)
        both = p * mean + (1 - p) * other
        spread = p * (mean - both).square() + (1 - p) * (other - both).square()
        latent = p * (variance + noise) + (1 - p) * total + spread - noise
        return both, latent.maximum(LEAST * variance)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Latent mean and variance at ``x`` ``(*batch, n, d)``, in its dtype.

        Args:
            x: In the dtype of the algebra.
        """
        mean, variance = self.mean(x), self.form.variances(self.with_time(x))
        if self.factor is not None:
            shift, V = self.solve(self.with_time(x))
            mean = mean + shift
            for v in V:
                variance = variance - fn.squared_norm(v, -2)
        return mean, variance.clamp_min(0)


def posterior_at_points(predictor: Predictor) -> tuple[Tensor, Tensor]:
    """Mean ``(*batch, r)`` and covariance ``(*batch, r, r)`` of f at its points.

    Points of compressed rows are what was compressed onto, jitter included.

    Args:
        predictor: A predictor with data.
    """
    rows, factor, points = predictor.rows, predictor.factor, predictor.points
    assert factor is not None
    num_inputs = points.size(-1) - isinstance(predictor.form, Drifting)
    num_points = rows.U.size(-1)
    K = square_gram(predictor.form, points, num_points, predictor.jitter)
    V = factor.W @ row_space.see(rows, K)
    shift = (factor.e.unsqueeze(-2) @ V).squeeze(-2)
    return predictor.mean(points[..., :num_inputs]) + shift, K - V.mT @ V


def _with_one_batch(blocks: list[Tensor]) -> list[Tensor]:
    batch = torch.broadcast_shapes(*(block.shape[:-2] for block in blocks))
    return [block.expand(*batch, *block.shape[-2:]) for block in blocks]


def freeze(module: Any, dtype: torch.dtype) -> Any:
    """A copy of a module in ``dtype`` without gradients."""
    return deepcopy(module).to(dtype).requires_grad_(False).eval()


def cast_distribution(
    mean: Tensor, covariance: LinearOperator, dtype: torch.dtype
) -> MultivariateNormal:
    """A distribution in ``dtype``, its covariance still computed in its own."""
    if covariance.dtype != dtype:
        covariance = CastLinearOperator(covariance, dtype=dtype)
    return Posterior(mean.to(dtype), covariance)


class Posterior(MultivariateNormal):
    """A normal distribution whose variances may be as small as they are.

    GPyTorch warns below 1e-10, in float32 below 1e-6, which is not small in every unit.
    """

    @property
    def variance(self) -> Tensor:
        """Variances, above zero."""
        variance = self.lazy_covariance_matrix.diagonal(dim1=-2, dim2=-1)
        tiny = torch.finfo(variance.dtype).tiny
        return variance.expand(self.mean.shape).clamp_min(tiny)


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

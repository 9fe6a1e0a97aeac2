"""The methods that streaming inference is compared with, each as fair as it can be.

All of them share the model: a smooth kernel with a lengthscale per input, a constant
mean and Gaussian noise, set from the first batch by the same search. All of them carry
what they learned over from batch to batch. They differ in what they remember:

* :class:`Streaming` a summary at inducing points, which are free to move,
* :class:`WindowedGP` the last points, without an approximation,
* :class:`WindowedSGPR` the last points, at inducing points,
* :class:`SVI` a variational distribution at inducing points, by gradient steps,
* :class:`OnlineConditioning` the first batch at inducing points, then every point,
* :class:`BatchSGPR` all data at once: the ceiling.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.utils.memoize import add_to_cache, get_from_cache
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor, nn

from torch_ssgp import StreamingGP
from torch_ssgp.exceptions import BudgetWarning
from torch_ssgp.modules import gram, variances
from torch_ssgp.update.initialization import initialize_from_data

CHUNK = 1_000  # test points predicted at once
BREAKDOWNS = (NanError, NotPSDError, torch.linalg.LinAlgError)
MAX_CHOLESKY = 100_000  # more points than anybody has here: no iterative algebra


class Method(Protocol):
    """What a driver of streams needs."""

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from the next batch, ``(n, d)`` and ``(n,)``."""

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of targets at ``x`` ``(s, d)``, noise included."""

    def hyperparameters(self) -> dict[str, float | list[float]]:
        """Lengthscale, outputscale, noise and mean as they are now."""


def new_kernel(num_dims: int) -> ScaleKernel:
    """The kernel of all methods: a lengthscale per input."""
    return ScaleKernel(RBFKernel(ard_num_dims=num_dims if num_dims > 1 else None))


def normal_scores(mean: Tensor, variance: Tensor, y: Tensor) -> dict[str, float]:
    """RMSE, and the mean log density of targets ``y`` ``(s,)``."""
    density = torch.distributions.Normal(mean, variance.sqrt())
    return {
        "RMSE": (mean - y).square().mean().sqrt().item(),
        "MLL": density.log_prob(y).mean().item(),
    }


class _Prior(nn.Module):
    """Mean, kernel and noise that nobody has set yet."""

    def __init__(self, num_dims: int) -> None:
        super().__init__()
        self.mean_module = ConstantMean()
        self.covar_module = new_kernel(num_dims)
        self.likelihood = GaussianLikelihood()
        self.double()

    def initialize_from(self, x: Tensor, y: Tensor) -> None:
        """The search that :class:`StreamingGP` begins with, on the first batch."""
        initialize_from_data(self.mean_module, self.covar_module, self.likelihood, x, y)


class _Baseline:
    """What all methods share: predictions in chunks, and the names of parameters.

    Attributes:
        model: Has ``mean_module``, ``covar_module`` and ``likelihood``.
    """

    model: Any

    @torch.no_grad()
    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of targets at ``x`` ``(s, d)``, noise included."""
        parts = [self._latent(part) for part in x.split(CHUNK)]
        mean, variance = (torch.cat(part) for part in zip(*parts, strict=True))
        return mean, variance + self.model.likelihood.noise

    def _latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the function at ``x``."""
        latent = self.model(x)
        return latent.mean, latent.variance

    def hyperparameters(self) -> dict[str, float | list[float]]:
        """Lengthscale (a list for several inputs), outputscale, noise and mean."""
        kernel = self.model.covar_module
        return {
            "lengthscale": kernel.base_kernel.lengthscale.squeeze().tolist(),
            "outputscale": kernel.outputscale.item(),
            "noise": self.model.likelihood.noise.item(),
            "mean": self.model.mean_module.constant.item(),
        }


# ------------------------------------------------------------- sparse, in closed form


@contextmanager
def small_budget() -> Iterator[None]:
    """Budgets are small on purpose here: no warning about that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        yield


class Streaming(_Baseline):
    """Streaming inference with the default policy.

    Args:
        num_dims: Number of inputs.
        num_inducing: Largest number of inducing points.
        num_steps: Steps of each update.
        alpha: 0 for the variational bound, up to 1 for Power-EP.
        share_noise: One noise for past and new data; ``False`` is the paper's form.
    """

    def __init__(
        self,
        num_dims: int,
        num_inducing: int,
        *,
        num_steps: int = 100,
        alpha: float = 0.0,
        share_noise: bool = True,
    ) -> None:
        self.num_steps = num_steps
        self.model = StreamingGP(
            new_kernel(num_dims),
            num_inducing=num_inducing,
            alpha=alpha,
            share_noise=share_noise,
        ).double()

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from the next batch, ``(n, d)`` and ``(n,)``."""
        with small_budget():
            self.model.update(x, y, num_steps=self.num_steps)


class _Window:
    """The last points of a stream, ``x`` ``(n, d)`` and ``y`` ``(n,)``."""

    def __init__(self, num_dims: int, size: int) -> None:
        self.size = size
        self.x = torch.zeros(0, num_dims, dtype=torch.float64)
        self.y = torch.zeros(0, dtype=torch.float64)

    def append(self, x: Tensor, y: Tensor) -> None:
        self.x = torch.cat([self.x, x])[-self.size :]
        self.y = torch.cat([self.y, y])[-self.size :]


class WindowedSGPR(_Baseline):
    """Collapsed sparse regression on the last points, and nothing else.

    The same code as :class:`Streaming`, so it is as fast: an update on the whole
    window that leaves nothing of the past. Kernel and noise go on from where they
    were, and old inducing points are candidates for new ones.

    Args:
        num_dims: Number of inputs.
        num_inducing: Largest number of inducing points.
        window: Number of points remembered.
        num_steps: Steps of each update.
    """

    FORGET = 1e-12  # power of the past's likelihood

    def __init__(
        self,
        num_dims: int,
        num_inducing: int,
        *,
        window: int = 3_000,
        num_steps: int = 100,
    ) -> None:
        self.num_steps = num_steps
        self.window = _Window(num_dims, window)
        self.model = StreamingGP(
            new_kernel(num_dims), num_inducing=num_inducing
        ).double()

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from the next batch, ``(n, d)`` and ``(n,)``."""
        self.window.append(x, y)
        with small_budget():
            self.model.update(
                self.window.x,
                self.window.y,
                num_steps=self.num_steps,
                forget=self.FORGET,
            )


class BatchSGPR(_Baseline):
    """The ceiling: one update with all data, all of Z free, L-BFGS.

    Args:
        num_dims: Number of inputs.
        num_inducing: Largest number of inducing points.
        num_steps: Largest number of steps of L-BFGS.
        first_steps: Steps of Adam before, which find the basin that L-BFGS descends.

    Attributes:
        converged: Whether L-BFGS ended on a plateau, not on its budget.
        steps: How many steps of L-BFGS it took.
    """

    def __init__(
        self,
        num_dims: int,
        num_inducing: int,
        *,
        num_steps: int = 300,
        first_steps: int = 50,
    ) -> None:
        self.num_steps, self.first_steps = num_steps, first_steps
        self.converged, self.steps = False, 0
        self.model = StreamingGP(
            new_kernel(num_dims), num_inducing=num_inducing
        ).double()

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from all data, ``(n, d)`` and ``(n,)``; called once."""
        if not self.model.summary.is_empty:
            raise RuntimeError("BatchSGPR takes all data in one update.")
        with small_budget():
            self.model.update(x, y, num_steps=self.first_steps)
            z = self.model.summary.inducing_points
            self.model.reset()
            result = self.model.update(
                x, y, num_steps=self.num_steps, optimizer="lbfgs", inducing_points=z
            )
        self.converged, self.steps = result.converged, result.num_steps


# ----------------------------------------------------------------- exact, on a window


class _NegativeLogDensity(torch.autograd.Function):
    r"""``-log N(r; 0, K)``, with a gradient that does not pass a factorisation.

    .. math::
        \partial_K = \tfrac12 (K^{-1} - a a^\top), \quad \partial_r = a = K^{-1} r
    """

    @staticmethod
    def forward(ctx: Any, K: Tensor, r: Tensor) -> Tensor:
        L = torch.linalg.cholesky(K)  # (n, n)
        a = torch.cholesky_solve(r.unsqueeze(-1), L).squeeze(-1)  # (n,)
        ctx.save_for_backward(L, a)
        log_det = 2 * L.diagonal().log().sum()
        return 0.5 * (r @ a + log_det + r.numel() * math.log(2 * math.pi))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        L, a = ctx.saved_tensors
        W = torch.cholesky_inverse(L).sub_(torch.outer(a, a)).mul_(0.5 * grad)
        return W, grad * a


class WindowedGP(_Baseline):
    """An exact Gaussian process on the last points.

    Hyperparameters go on from where they were. The first batch has more steps: there
    they are far from their optimum, and it is smaller than the window. Later batches
    stop at a plateau. L-BFGS, since it ends with more evidence than as many evaluations
    of Adam at any rate we tried.

    Args:
        num_dims: Number of inputs.
        window: Number of points remembered.
        num_steps: Largest number of steps of L-BFGS of each update.
        first_steps: The same for the first update.
    """

    PLATEAU = 1e-4  # change of a step that is not worth another: nats per point
    JITTER = 1e-8  # relative to the prior variance

    def __init__(
        self,
        num_dims: int,
        *,
        window: int = 3_000,
        num_steps: int = 10,
        first_steps: int = 50,
    ) -> None:
        self.num_steps, self.first_steps = num_steps, first_steps
        self.window = _Window(num_dims, window)
        self.model = _Prior(num_dims)

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from the next batch, ``(n, d)`` and ``(n,)``."""
        num_steps, plateau = self.num_steps, self.PLATEAU
        if len(self.window.y) == 0:
            num_steps, plateau = self.first_steps, 1e-9
            self.model.initialize_from(x, y)
        self.window.append(x, y)
        self._learn(num_steps, plateau)
        self._factorize()

    @torch.no_grad()
    def _factorize(self) -> None:
        """What predictions need: ``L`` ``(n, n)`` and ``a = K^-1 r`` ``(n, 1)``."""
        self._L = torch.linalg.cholesky(self._covariance())
        self._a = torch.cholesky_solve(self._residual().unsqueeze(-1), self._L)

    def negative_log_evidence(self) -> Tensor:
        """``-log p(y)`` of the window, differentiable in hyperparameters."""
        return _NegativeLogDensity.apply(self._covariance(), self._residual())

    def _covariance(self) -> Tensor:
        """``K_ff + sigma^2 I`` ``(n, n)``."""
        K = gram(self.model.covar_module, self.window.x, self.window.x)
        jitter = self.JITTER * self.model.covar_module.outputscale.detach()
        noise = self.model.likelihood.noise + jitter
        return K + torch.diag_embed(noise.expand(len(K)))

    def _residual(self) -> Tensor:
        return self.window.y - self.model.mean_module(self.window.x)

    def _learn(self, num_steps: int, plateau: float) -> None:
        """Steps of L-BFGS; the best hyperparameters met are kept.

        Its memory begins anew: curvature of the last window misleads where the
        target changed.
        """
        optimizer = torch.optim.LBFGS(
            self.model.parameters(),
            max_iter=num_steps,
            tolerance_change=plateau,
            line_search_fn="strong_wolfe",
        )
        best, kept = math.inf, copy.deepcopy(self.model.state_dict())

        def closure() -> Tensor:
            nonlocal best, kept
            optimizer.zero_grad()
            loss = self.negative_log_evidence() / len(self.window.y)
            loss.backward()
            if loss.item() < best:
                best, kept = loss.item(), copy.deepcopy(self.model.state_dict())
            return loss

        try:
            optimizer.step(closure)
        except torch.linalg.LinAlgError:
            pass  # a trial step too far; the best before it is kept
        self.model.load_state_dict(kept)

    def _latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the function at ``x``."""
        K_fs = gram(self.model.covar_module, self.window.x, x)  # (n, s)
        white = torch.linalg.solve_triangular(self._L, K_fs, upper=False)
        mean = self.model.mean_module(x) + (K_fs.mT @ self._a).squeeze(-1)
        variance = variances(self.model.covar_module, x) - white.square().sum(0)
        return mean, variance.clamp_min(0)


# ------------------------------------------------------------------------- uncollapsed


class SVGP(gpytorch.models.ApproximateGP):
    """GPyTorch's uncollapsed sparse variational model, inducing points free.

    Args:
        z: ``(m, d)``, where inducing points start.
        prior: Has ``mean_module``, ``covar_module`` and ``likelihood``.
    """

    def __init__(self, z: Tensor, prior: nn.Module | SimpleNamespace) -> None:
        # Without the random numbers that GPyTorch would start from.
        q = gpytorch.variational.CholeskyVariationalDistribution(
            len(z), mean_init_std=0.0
        )
        super().__init__(gpytorch.variational.VariationalStrategy(self, z, q))
        self.mean_module = prior.mean_module
        self.covar_module = prior.covar_module
        self.likelihood = prior.likelihood
        self.double()

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Prior at ``x``."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    @torch.no_grad()
    def set_best_distribution(self, x: Tensor, y: Tensor) -> None:
        r"""Set q to where the bound on ``x, y`` is largest, in closed form.

        .. math::
            S = (I + A A^\top / \sigma^2)^{-1}, \quad m = S A r / \sigma^2, \quad
            A = L^{-1} K_{zf}, \quad L L^\top = K_{zz}
        """
        strategy = self.variational_strategy
        q, z = strategy._variational_distribution, strategy.inducing_points
        noise = self.likelihood.noise
        eye = torch.eye(len(z), dtype=z.dtype)
        L = torch.linalg.cholesky(
            gram(self.covar_module, z, z) + strategy.jitter_val * eye
        )
        K_zf = gram(self.covar_module, z, x)
        A = torch.linalg.solve_triangular(L, K_zf, upper=False)  # (m, n)
        S = torch.cholesky_inverse(torch.linalg.cholesky(eye + A @ A.mT / noise))
        q.variational_mean.copy_(S @ (A @ (y - self.mean_module(x))) / noise)
        q.chol_variational_covar.copy_(torch.linalg.cholesky(S))
        strategy.variational_params_initialized.fill_(1)


class SVI(_Baseline):
    """Stochastic variational inference: gradient steps on each batch as it comes.

    The bound takes each batch for a sample of all data seen so far, which an ordered
    stream is not: what was learned before stays as far as no step changes it. On the
    first batch q starts at its best.

    Args:
        num_dims: Number of inputs.
        lr: Learning rate of Adam, for the caller to tune.
        z: ``(m, d)``, where inducing points start. Points over the whole range of the
            stream are a head start.
        num_steps: Steps on each batch, the whole of it at once.

    Attributes:
        failures: What went wrong; good parameters of a few steps before were kept.
    """

    KEEP = 10  # steps between two copies of parameters: a copy takes time as well

    def __init__(
        self, num_dims: int, *, lr: float, z: Tensor, num_steps: int = 100
    ) -> None:
        self.num_steps = num_steps
        self.num_data = 0
        self.failures: list[str] = []
        self.prior = _Prior(num_dims)
        self.model = SVGP(z, self.prior)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from the next batch, ``(n, d)`` and ``(n,)``."""
        if self.num_data == 0:
            self.prior.initialize_from(x, y)
            self.model.set_best_distribution(x, y)
        self.num_data += len(y)
        self.model.train()
        good = self._state()
        try:
            loss = self.loss(x, y)
            for step in range(self.num_steps):
                if step % self.KEEP == 0:
                    good = self._state()  # the loss is finite here
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                loss = self.loss(x, y)
        except BREAKDOWNS as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            self.model.load_state_dict(good[0])
            self.optimizer.load_state_dict(good[1])
        self.model.eval()  # forgets what it computed from other parameters

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Negative bound per datum; raises where it is not finite."""
        mll = gpytorch.mlls.VariationalELBO(
            self.model.likelihood, self.model, num_data=self.num_data
        )
        loss = -mll(self.model(x), y)
        if not loss.isfinite():
            raise NanError(f"the loss is {loss.item()}")
        return loss

    def _state(self) -> tuple[dict, dict]:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))


class OnlineConditioning(_Baseline):
    """GPyTorch's online variational conditioning, ``get_fantasy_model``.

    A sparse variational model of the first batch becomes pseudo-data of an exact
    model, to which every later point is added: hyperparameters stay, memory grows.
    The first batch is learned as :class:`Streaming` learns it, and q is the best one,
    which gradient steps only come near: where they leave it wider than the prior,
    pseudo-data have a negative variance.

    Args:
        num_dims: Number of inputs.
        num_inducing: Largest number of inducing points of the first batch.
        first_steps: Steps on the first batch.
        max_points: Number of pseudo-data and data that it does not exceed.

    Attributes:
        failures: Why it does not learn any more.
    """

    def __init__(
        self,
        num_dims: int,
        num_inducing: int,
        *,
        first_steps: int = 100,
        max_points: int = 3_000,
    ) -> None:
        self.max_points = max_points
        self.num_points = 0
        self.failures: list[str] = []
        self.first = Streaming(num_dims, num_inducing, num_steps=first_steps)
        self.model = self.first.model

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from the next batch, ``(n, d)`` and ``(n,)``."""
        if self.num_points == 0:
            self.first.update(x, y)
            z = self.first.model.summary.inducing_points
            self.model = SVGP(z, self.first.model).eval()
            self.model.set_best_distribution(x, y)
            self.num_points = len(z)
        elif not self.failures:
            self._condition(x, y)

    def _condition(self, x: Tensor, y: Tensor) -> None:
        num_points = self.num_points + len(y)
        if num_points > self.max_points:
            self.failures.append(
                f"{num_points:,} points: more than {self.max_points:,}"
            )
            return
        try:
            with torch.no_grad(), _dense():
                model = self.model.get_fantasy_model(x, y)
                _use_cached_mean(model)
        except RuntimeError as error:  # whatever it raises is part of the result
            self.failures.append(f"{type(error).__name__}: {error}")
        else:
            self.model, self.num_points = model, num_points

    def _latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the function at ``x``."""
        with _dense():
            return super()._latent(x)


@contextmanager
def _dense() -> Iterator[None]:
    """Cholesky factors at any size, and variances from the cache.

    Without the cache GPyTorch gives pseudo-data the noise of the likelihood.
    """
    with (
        gpytorch.settings.max_cholesky_size(MAX_CHOLESKY),
        gpytorch.settings.fast_computations(False, False, False),
        gpytorch.settings.fast_pred_var(),
        warnings.catch_warnings(),
    ):
        # Pseudo-data of a smooth kernel are not factored without jitter.
        warnings.simplefilter("ignore", NumericalWarning)
        yield


def _use_cached_mean(model: gpytorch.models.ExactGP) -> None:
    """Let predictions find the mean that conditioning computed.

    GPyTorch 1.15 stores it without, and looks it up with, its policy for NaN; what it
    computes instead gives pseudo-data the noise of the likelihood.
    """
    strategy = model.prediction_strategy
    mean = get_from_cache(strategy, "mean_cache")
    if not mean.isfinite().all():
        raise NanError("the conditioned mean is not finite")
    policy = gpytorch.settings.observation_nan_policy.value()
    add_to_cache(strategy, "mean_cache", mean, policy)

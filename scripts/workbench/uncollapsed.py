"""Baselines with an explicit variational distribution: SVI and online conditioning."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.utils.memoize import add_to_cache, get_from_cache
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor, nn

from torch_ssgp.modules import gram
from workbench.baselines import Baseline, Prior, Streaming
from workbench.exact import dense

BREAKDOWNS = (NanError, NotPSDError, torch.linalg.LinAlgError)


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


class SVI(Baseline):
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
        self.prior = Prior(num_dims)
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


class OnlineConditioning(Baseline):
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
            with torch.no_grad(), _cached():
                model = self.model.get_fantasy_model(x, y)
                _use_cached_mean(model)
        except RuntimeError as error:  # whatever it raises is part of the result
            self.failures.append(f"{type(error).__name__}: {error}")
        else:
            self.model, self.num_points = model, num_points

    def _latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the function at ``x``."""
        with _cached():
            return super()._latent(x)


@contextmanager
def _cached() -> Iterator[None]:
    """Dense algebra, and variances from the cache.

    Without the cache GPyTorch gives pseudo-data the noise of the likelihood.
    """
    with dense(), gpytorch.settings.fast_pred_var():
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

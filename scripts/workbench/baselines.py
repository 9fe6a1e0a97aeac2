"""The methods that streaming inference is compared with, each as fair as it can be.

All of them share the model: a smooth kernel with a lengthscale per input, a constant
mean and Gaussian noise, set from the first batch by the same search. All of them carry
what they learned over from batch to batch. They differ in what they remember:

* :class:`Streaming` a summary at the points of a memory, finer than the model,
* :class:`Careful` the same; it learns more from the last batch,
* :class:`PaperForm` a summary at the inducing points themselves,
* :class:`WindowedGP` the last points, without an approximation,
* :class:`WindowedSGPR` the last points, at inducing points,
* :class:`BatchSGPR` all data at once: the ceiling,

and, in :mod:`workbench.uncollapsed`,

* :class:`SVI` a variational distribution at inducing points, by gradient steps,
* :class:`OnlineConditioning` the first batch at inducing points, then every point.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor, nn

from torch_ssgp import StreamingGP
from torch_ssgp.exceptions import BudgetWarning
from torch_ssgp.modules import gram, variances
from torch_ssgp.update.initialization import initialize_from_data
from workbench.exact import NegativeLogDensity

CHUNK = 1_000  # test points predicted at once


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


class Prior(nn.Module):
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


class Baseline:
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


class Streaming(Baseline):
    """Streaming inference with the default policy.

    Args:
        num_dims: Number of inputs.
        num_inducing: Largest number of inducing points.
        num_steps: Steps of each update.
        alpha: 0 for the variational bound, up to 1 for Power-EP.
        share_noise: One noise for past and new data.
        memory_size: Points of the memory; ``None`` for the default.
    """

    OPTIONS: dict[str, Any] = {}  # of every update

    def __init__(
        self,
        num_dims: int,
        num_inducing: int,
        *,
        num_steps: int = 100,
        alpha: float = 0.0,
        share_noise: bool = True,
        memory_size: int | None = None,
    ) -> None:
        self.num_steps = num_steps
        self.model = StreamingGP(
            new_kernel(num_dims),
            num_inducing=num_inducing,
            memory_size=memory_size,
            alpha=alpha,
            share_noise=share_noise,
        ).double()

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from the next batch, ``(n, d)`` and ``(n,)``."""
        with small_budget():
            self.model.update(x, y, num_steps=self.num_steps, **self.OPTIONS)

    @torch.no_grad()
    def predict_from_memory(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As ``predict``, from all points of the memory."""
        parts = [self.model.predict(part, from_memory=True) for part in x.split(CHUNK)]
        mean = torch.cat([part.mean for part in parts])
        return mean, torch.cat([part.variance for part in parts])


# Options of an update with care: it stops early only on a plateau.
CAREFUL: dict[str, Any] = {"learn_hyperparameters": True, "optimizer": "lbfgs"}


class Careful(Streaming):
    """Streaming inference that learns from the last batch until nothing is left.

    Updates of a stream that learns often stop early, since the next one goes on. The
    last one has no next one: it ends with L-BFGS, as the batch model does.

    Args:
        num_dims: Number of inputs.
        num_inducing: Largest number of inducing points.
        num_batches: How many updates there will be.
        num_steps: Steps of each update but the last.
        last_steps: Steps of the last update.
    """

    def __init__(
        self,
        num_dims: int,
        num_inducing: int,
        *,
        num_batches: int,
        num_steps: int = 100,
        last_steps: int = 300,
    ) -> None:
        super().__init__(num_dims, num_inducing, num_steps=num_steps)
        self.num_left, self.last_steps = num_batches, last_steps

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from the next batch, ``(n, d)`` and ``(n,)``."""
        self.num_left -= 1
        if self.num_left > 0:
            super().update(x, y)
            return
        with small_budget():
            self.model.update(x, y, num_steps=self.last_steps, **CAREFUL)


class PaperForm(Streaming):
    """The past at the inducing points themselves, each batch with its own noise.

    Every batch is learned from, and nothing is forgotten.

    Args:
        num_dims: Number of inputs.
        num_inducing: Largest number of inducing points.
        num_steps: Steps of each update.
        alpha: 0 for the variational bound, up to 1 for Power-EP.
        share_noise: One noise for past and new data: ours, on top of the paper's.
    """

    OPTIONS = {"forget": 1.0, "learn_hyperparameters": True}

    def __init__(
        self,
        num_dims: int,
        num_inducing: int,
        *,
        num_steps: int = 100,
        alpha: float = 0.0,
        share_noise: bool = False,
    ) -> None:
        super().__init__(
            num_dims,
            num_inducing,
            num_steps=num_steps,
            alpha=alpha,
            share_noise=share_noise,
            memory_size=num_inducing,
        )


class _Window:
    """The last points of a stream, ``x`` ``(n, d)`` and ``y`` ``(n,)``."""

    def __init__(self, num_dims: int, size: int) -> None:
        self.size = size
        self.x = torch.zeros(0, num_dims, dtype=torch.float64)
        self.y = torch.zeros(0, dtype=torch.float64)

    def append(self, x: Tensor, y: Tensor) -> None:
        self.x = torch.cat([self.x, x])[-self.size :]
        self.y = torch.cat([self.y, y])[-self.size :]


class WindowedSGPR(Baseline):
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


class BatchSGPR(Baseline):
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


class WindowedGP(Baseline):
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
        self.model = Prior(num_dims)

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
        return NegativeLogDensity.apply(self._covariance(), self._residual())

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

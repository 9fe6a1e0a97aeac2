"""The methods that streaming inference is compared with, each as fair as it can be.

All of them share the model: a smooth kernel with a lengthscale per input, a constant
mean and Gaussian noise, set from the first batch by the same search. All of them carry
what they learned over from batch to batch. They differ in what they remember:

* :class:`Streaming` a data set of bounded size; :class:`SinglePoints` the same,
* :class:`Sites` three of them, merged,
* :class:`PaperForm` a summary at the inducing points,
* :class:`WindowedGP` and :class:`WindowedSGPR` the last points,

and elsewhere ``BatchSGPR`` all data at once: the ceiling; ``SVI`` and ``Minibatches`` a
variational distribution, by gradient steps; ``LocalExperts`` a tree of exact models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor, nn

from torch_ssgp import StreamingGP, merge
from torch_ssgp.update.initialization import initialize_from_data
from workbench.exact import Exact, climb, dense

CHUNK = 1_000  # test points predicted at once
Options = Mapping[str, Any]


class Method(Protocol):
    """What a driver of streams needs."""

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from the next batch, ``(n, d)`` and ``(n,)``."""

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of targets at ``x`` ``(s, d)``, noise included."""

    def hyperparameters(self) -> dict[str, float | list[float]]:
        """Lengthscale, outputscale, noise and mean as they are now."""

    def num_bytes(self) -> int:
        """What it has to keep to go on."""


def new_kernel(num_dims: int) -> ScaleKernel:
    """The kernel of all methods: a lengthscale per input."""
    return ScaleKernel(RBFKernel(ard_num_dims=num_dims if num_dims > 1 else None))


def bytes_of(model: nn.Module) -> int:
    """Of all tensors in the state of a model."""
    state = model.state_dict().values()
    tensors = [each for each in state if isinstance(each, Tensor)]
    return sum(each.numel() * each.element_size() for each in tensors)


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
    """What all methods share: predictions in chunks, and the names of parameters."""

    model: Any  # has ``mean_module``, ``covar_module`` and ``likelihood``

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

    def num_bytes(self) -> int:
        """What it has to keep to go on: tensors of its state."""
        return bytes_of(self.model)

    def hyperparameters(self) -> dict[str, float | list[float]]:
        """Lengthscale (a list for several inputs), outputscale, noise and mean."""
        kernel = self.model.covar_module
        return {
            "lengthscale": kernel.base_kernel.lengthscale.squeeze().tolist(),
            "outputscale": kernel.outputscale.item(),
            "noise": self.model.likelihood.noise.item(),
            "mean": self.model.mean_module.constant.item(),
        }


class Streaming(Baseline):
    """Streaming inference with defaults, or these options of updates and model."""

    def __init__(
        self,
        num_dims: int,
        num_inducing: int,
        update: Options | None = None,
        **model: Any,
    ) -> None:
        self.options = dict(update or {})
        self.model = StreamingGP(
            new_kernel(num_dims), num_inducing=num_inducing, **model
        ).double()

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from the next batch, ``(n, d)`` and ``(n,)``."""
        self.model.update(x, y, **self.options)


class SinglePoints(Streaming):
    """The same, point by point."""

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from the next batch, ``(n, d)`` and ``(n,)``."""
        for one in zip(x.split(1), y.split(1), strict=True):
            super().update(*one)


class Sites(Baseline):
    """Models of three sites, merged after the last batch.

    In turns each site has every third datum; else it has a third of the batches, one
    after the other. The merged model may learn its hyperparameters.
    """

    def __init__(
        self,
        num_dims: int,
        num_inducing: int,
        num_steps: int,
        num_batches: int,
        *,
        turns: bool,
        learned: bool,
    ) -> None:
        options = {"num_steps": num_steps}
        self.sites = [Streaming(num_dims, num_inducing, options) for _ in range(3)]
        self.num_batches, self.turns, self.learned, self.k = (
            num_batches,
            turns,
            learned,
            0,
        )

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from the next batch, ``(n, d)`` and ``(n,)``."""
        if self.turns:
            for k, site in enumerate(self.sites):
                site.update(x[k::3], y[k::3])
        else:
            self.sites[3 * self.k // self.num_batches].update(x, y)
        self.k += 1
        if self.k == self.num_batches:
            models = [site.model for site in self.sites]
            self.model = merge(models, learn_hyperparameters=self.learned)


class PaperForm(Streaming):
    """The past at the inducing points themselves, each batch with its own noise.

    Every batch is learned from, inducing points move, and nothing is forgotten. One
    noise for past and new data, ``share_noise``, is ours on top of the paper's.
    """

    def __init__(
        self,
        num_dims: int,
        num_inducing: int,
        *,
        num_steps: int = 100,
        alpha: float = 0.0,
        share_noise: bool = False,
    ) -> None:
        update = {"num_steps": num_steps, "learn_inducing_points": True}
        super().__init__(
            num_dims,
            num_inducing,
            {**update, "learn": True, "forget": 1.0},
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

    def num_bytes(self) -> int:
        return 8 * (self.x.numel() + self.y.numel())


class WindowedSGPR(Baseline):
    """Collapsed sparse regression on the last points, and nothing else.

    The same code as :class:`PaperForm`, so it is as fast: an update on the whole window
    that leaves nothing of the past. Kernel and noise go on from where they were.
    """

    def __init__(
        self,
        num_dims: int,
        num_inducing: int,
        *,
        window: int = 3_000,
        num_steps: int = 100,
    ) -> None:
        self.window = _Window(num_dims, window)
        self.sparse = PaperForm(
            num_dims, num_inducing, num_steps=num_steps, share_noise=True
        )
        self.model = self.sparse.model

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from the next batch, ``(n, d)`` and ``(n,)``."""
        self.window.append(x, y)
        self.model.reset()
        self.sparse.update(self.window.x, self.window.y)

    def num_bytes(self) -> int:
        """With the window."""
        return super().num_bytes() + self.window.num_bytes()


class WindowedGP(Baseline):
    """An exact Gaussian process on the last points.

    Hyperparameters go on from where they were. The first batch has more steps: there
    they are far from their optimum. Later batches stop at a plateau. Steps are the most
    that L-BFGS takes.
    """

    PLATEAU = 1e-4  # change of a step that is not worth another: nats per point

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
        self.prior = self.model = Prior(num_dims)

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from the next batch, ``(n, d)`` and ``(n,)``."""
        steps, plateau = self.num_steps, self.PLATEAU * len(self.window.y)
        if not plateau:
            steps, plateau = self.first_steps, 1e-9
            self.prior.initialize_from(x, y)
        self.window.append(x, y)
        data = self.window.x, self.window.y
        self.model = Exact(*data, self.prior.covar_module, self.prior)
        with dense():
            climb(self.model, self.window.y, steps, plateau=plateau)
        self.model.eval()

    def num_bytes(self) -> int:
        """With the window; its factor can be computed again."""
        return super().num_bytes() + self.window.num_bytes()

    def _latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the function at ``x``."""
        with dense():
            return super()._latent(x)


def learned_from_some(x: Tensor, y: Tensor, num_steps: int, num: int = 1_000) -> Prior:
    """Hyperparameters of an exact GP on some of all data."""
    some = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:num]
    exact = WindowedGP(x.size(-1), window=len(some), first_steps=num_steps)
    exact.update(x[some], y[some])
    return exact.prior

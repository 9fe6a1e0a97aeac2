"""Baselines with an explicit variational distribution, by gradient steps."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor, nn

from torch_ssgp.modules import gram
from workbench.baselines import Baseline, Prior

BREAKDOWNS = (NanError, NotPSDError, torch.linalg.LinAlgError)


class SVGP(gpytorch.models.ApproximateGP):
    """GPyTorch's uncollapsed sparse variational model, inducing points free from z."""

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
    first batch q starts at its best, at inducing points z ``(m, d)``: over the whole
    range of the stream they are a head start. ``failures`` says what went wrong; good
    parameters of a few steps before were kept.
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


class Minibatches(Baseline):
    """Stochastic variational inference as it is meant: minibatches of all data.

    Inducing points start at random data; the learning rate of Adam falls to a tenth.
    """

    def __init__(
        self,
        num_dims: int,
        num_inducing: int,
        *,
        epochs: int = 30,
        size: int = 256,
        lr: float = 0.01,
        seed: int = 0,
    ) -> None:
        self.num_inducing, self.epochs = num_inducing, epochs
        self.size, self.lr = size, lr
        self.gen = torch.Generator().manual_seed(seed)
        self.prior, self.num_data = Prior(num_dims), 0

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from all data, ``(n, d)`` and ``(n,)``; called once."""
        self.num_data = len(y)
        order = torch.randperm(len(y), generator=self.gen)
        some = order[:1_000]
        self.prior.initialize_from(x[some], y[some])
        self.model = SVGP(x[order[: self.num_inducing]].clone(), self.prior)
        self.model.set_best_distribution(x[some], y[some])
        self.model.train()
        bound = gpytorch.mlls.VariationalELBO(
            self.model.likelihood, self.model, num_data=len(y)
        )
        optimizer = torch.optim.Adam(self.model.parameters(), lr=self.lr)
        steps = self.epochs * math.ceil(len(y) / self.size)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1 ** (1 / steps))
        for _ in range(self.epochs):
            order = torch.randperm(len(y), generator=self.gen)
            for part in order.split(self.size):
                optimizer.zero_grad()
                (-bound(self.model(x[part]), y[part])).backward()
                optimizer.step()
                decay.step()
        self.model.eval()

    def num_bytes(self) -> int:
        """It keeps all data, to learn from them again."""
        dims = self.model.variational_strategy.inducing_points.size(-1)
        return super().num_bytes() + 8 * self.num_data * (1 + dims)

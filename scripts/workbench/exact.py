"""Exact Gaussian processes on all data, learned to a plateau."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gpytorch
import torch
from gpytorch.constraints import Interval
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor, nn

from workbench.results import Row

MAX_CHOLESKY = 100_000  # more points than anybody has here: no iterative algebra


class NegativeLogDensity(torch.autograd.Function):
    r"""``-log N(r; 0, K)``, with a gradient that does not pass a factorisation.

    .. math::
        \partial_K = \tfrac12 (K^{-1} - a a^\top), \quad \partial_r = a = K^{-1} r

    It costs about 0.6 of what GPyTorch's way through the factorisation does.
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


@contextmanager
def dense() -> Iterator[None]:
    """Cholesky factors at any size, with GPyTorch's jitter where it needs some."""
    with (
        gpytorch.settings.max_cholesky_size(MAX_CHOLESKY),
        gpytorch.settings.fast_computations(False, False, False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", NumericalWarning)
        yield


class Exact(gpytorch.models.ExactGP):
    """GPyTorch's exact model, with mean and noise of its own or of a prior."""

    def __init__(
        self, x: Tensor, y: Tensor, kernel: Kernel, prior: nn.Module | None = None
    ) -> None:
        likelihood = GaussianLikelihood() if prior is None else prior.likelihood
        super().__init__(x, y, likelihood)
        mean = ConstantMean() if prior is None else prior.mean_module
        self.mean_module, self.covar_module = mean, kernel
        self.double()

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Prior at ``x``."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def run_exact(
    kernels: list[Kernel], x: Tensor, y: Tensor, *, num_steps: int
) -> tuple[Exact, Row]:
    """An exact model on all data, from each kernel; the largest evidence wins."""
    start, fits = time.process_time(), []
    for kernel in kernels:
        model = Exact(x, y, kernel)
        model.likelihood.noise = 0.1 * y.var()
        model.mean_module.constant = y.mean()
        fits.append((climb(model, y, num_steps), model.eval()))
    seconds = time.process_time() - start
    evidences = [evidence for evidence, _ in fits]
    _, model = max(fits, key=lambda fit: fit[0])
    return model, {"evidences": evidences, "cpu_seconds": seconds}


def one_ahead(x: Tensor, y: Tensor, restarts: int) -> tuple[Tensor, Tensor]:
    """Means and deviations of data, each predicted from those before by scikit-learn.

    Learned anew whenever data have grown by a tenth, also from so many random starts.
    The first datum has no prediction.
    """
    from sklearn.gaussian_process import GaussianProcessRegressor, kernels

    found, gp, due = [], None, 1.0
    lengths = kernels.RBF([1.0] * x.size(-1), (1e-2, 1e3))
    kernel = kernels.ConstantKernel() * lengths + kernels.WhiteKernel(0.1, (1e-6, 10))
    for n in range(1, len(y)):
        if n >= due:
            gp, due = GaussianProcessRegressor(kernel), 1.1 * n
            gp.set_params(n_restarts_optimizer=restarts, random_state=0)
        else:
            gp = GaussianProcessRegressor(gp.kernel_, optimizer=None)
        gp.set_params(normalize_y=True).fit(x[:n].numpy(), y[:n].numpy())
        moments = gp.predict(x[n : n + 1].numpy(), return_std=True)
        found.append(tuple(map(torch.from_numpy, moments)))
    mean, deviation = map(torch.cat, zip(*found, strict=True))
    return mean, deviation.clamp_min(1e-9)


def climb(model: Exact, y: Tensor, num_steps: int, plateau: float = 1e-9) -> float:
    """Steps up the evidence; the best parameters met are kept.

    Steps are those of logarithms where parameters are positive, up the evidence of all
    data: in GPyTorch's own coordinates, and per datum, L-BFGS ends up to 90 nats short
    on sums of kernels.
    """
    moves = list(_coordinates(model))
    etas = [eta for _, eta, _ in moves]
    best, kept = -math.inf, copy.deepcopy(model.state_dict())
    optimizer = torch.optim.LBFGS(
        etas,
        max_iter=num_steps,
        tolerance_change=plateau,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        nonlocal best, kept
        for parameter, eta, to_parameter in moves:
            parameter.data.copy_(to_parameter(eta.detach()))
        model.zero_grad()
        prior = model.likelihood(model(*model.train_inputs))
        loss = NegativeLogDensity.apply(prior.covariance_matrix, y - prior.mean)
        loss.backward()
        for parameter, eta, to_parameter in moves:
            eta.grad = torch.autograd.grad(to_parameter(eta), eta, parameter.grad)[0]
        if -loss.item() > best:
            best, kept = -loss.item(), copy.deepcopy(model.state_dict())
        return loss.detach()

    model.train()
    try:
        optimizer.step(closure)
    except torch.linalg.LinAlgError:
        pass  # a step too far; the best before it is kept
    model.load_state_dict(kept)
    return best


def _coordinates(
    model: Exact,
) -> Iterator[tuple[nn.Parameter, Tensor, Callable[[Tensor], Tensor]]]:
    """Parameters, what the optimiser moves, and the way back."""
    for _, parameter, constraint in model.named_parameters_and_constraints():
        value = parameter.detach().clone()
        if constraint is None:
            yield parameter, value.requires_grad_(), torch.clone
        else:
            floor = 1.01 * constraint.lower_bound + 1e-12
            eta = constraint.transform(value).log().requires_grad_()
            yield parameter, eta, partial(_raw, constraint, floor)


def _raw(constraint: Interval, floor: Tensor, eta: Tensor) -> Tensor:
    return constraint.inverse_transform(eta.exp().maximum(floor))

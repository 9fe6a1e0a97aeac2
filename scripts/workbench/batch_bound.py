"""Batch sparse regression to a plateau: what streams are measured against."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from tqdm import tqdm

from torch_ssgp import StreamingGP, settings
from workbench.baselines import BatchSGPR, small_budget

PLATEAU = 1e-4  # nats per datum that 100 evaluations of the bound must gain
MAX_STEPS = 4_000  # evaluations of the bound by a batch model
SNAPSHOT = 50  # evaluations between two looks at a batch model's accuracy


class BatchBound:
    r"""Batch sparse regression: its bound and its gradient, in closed form.

    Written apart from the package: a reference must not share the errors of what it is
    compared with. It takes less than half the time of automatic differentiation, and
    plateaus are thousands of evaluations away. With :math:`L L^\top = K_{bb}`,
    :math:`A = L^{-1} K_{bf}`, :math:`D = I + A A^\top / s`, :math:`r = y - m`,

    .. math::
        F = -\tfrac n2 \log 2\pi s - \tfrac12 \log|D| - \tfrac{1}{2s} \|r\|^2
            + \tfrac12 \|c\|^2 - \tfrac{1}{2s} (\mathrm{tr} K_{ff} - \mathrm{tr} A
            A^\top), \qquad c = L_D^{-1} A r / s

    and, with :math:`\gamma = L_D^{-\top} c`,
    :math:`W = I - D^{-1} - \gamma \gamma^\top`,

    .. math::
        dF/dK_{bf} = L^{-\top} (W A + \gamma r^\top) / s, \qquad
        dF/dK_{bb} = -\tfrac{1}{2s} \mathrm{sym}(
            L^{-\top} [W A A^\top + \gamma (A r)^\top] L^{-1}).

    The variables are one vector: logarithms of lengthscales, scale and noise, the mean,
    and inducing points in units of their spacing.

    Args:
        x: ``(n, d)``, all inputs.
        y: ``(n,)``, all targets.
        model: Where to begin: a model with an RBF kernel and inducing points.
    """

    def __init__(self, x: Tensor, y: Tensor, model: StreamingGP) -> None:
        self.x, self.y, self.start_model = x, y, model
        z = model.summary.inducing_points
        spread = x.amax(0) - x.amin(0)
        spread = torch.where(spread > 0, spread, 1)
        self.spacing = spread * len(z) ** (-1 / x.size(-1))
        self.sizes = [x.size(-1), 1, 1, 1, z.numel()]
        kernel, likelihood = model.covar_module, model.likelihood
        with torch.no_grad():
            parts = [
                kernel.base_kernel.lengthscale.log(),
                kernel.outputscale.log(),
                likelihood.noise.log(),
                model.mean_module.constant,
                z / self.spacing,
            ]
            self.start = torch.cat([part.reshape(-1) for part in parts]).numpy()
        smallest = likelihood.noise_covar.raw_noise_constraint.lower_bound.item()
        self.limits: list[tuple[float | None, None]] = [(None, None)] * len(self.start)
        self.limits[x.size(-1) + 1] = (math.log(1.01 * smallest), None)

    def unpacked(self, variables: np.ndarray) -> list[Tensor]:
        """Log-lengthscales ``(d,)``, log-scale, log-noise, mean, and Z ``(m, d)``."""
        log_l, log_o, log_s, m, z = torch.from_numpy(variables).split(self.sizes)
        scalars = [part.squeeze() for part in (log_o, log_s, m)]
        return [log_l, *scalars, z.view(-1, self.x.size(-1)) * self.spacing]

    @torch.no_grad()
    def __call__(self, variables: np.ndarray) -> tuple[float, np.ndarray]:
        """Bound and gradient, in nats per datum."""
        log_l, log_o, log_s, m, z = self.unpacked(variables)
        lengthscale, o, s = log_l.exp(), log_o.exp(), log_s.exp()
        n, centre = len(self.y), self.x.mean(0)
        X, Z = (self.x - centre) / lengthscale, (z - centre) / lengthscale
        K_bf, K_bb = (o * _correlation(Z, other) for other in (X, Z))  # (m, n), (m, m)
        eye = torch.eye(len(Z), dtype=X.dtype)
        jitter = settings.jitter.of(X.dtype) * o

        L = torch.linalg.cholesky(K_bb + jitter * eye)
        A = torch.linalg.solve_triangular(L, K_bf, upper=False)  # (m, n)
        AA = A @ A.mT
        L_D = torch.linalg.cholesky(eye + AA / s)
        r = self.y - m
        Ar = A @ r
        c = torch.linalg.solve_triangular(L_D, Ar.unsqueeze(-1), upper=False) / s
        unexplained = n * o - AA.trace()
        F = (
            -0.5 * n * (math.log(2 * math.pi) + log_s)
            - L_D.diagonal().log().sum()
            - 0.5 * (r @ r + unexplained) / s
            + 0.5 * c.square().sum()
        )

        g = torch.linalg.solve_triangular(L_D.mT, c, upper=True).squeeze(-1)  # gamma
        D_inv = torch.cholesky_inverse(L_D)
        W = eye - D_inv - torch.outer(g, g)
        G_bf = torch.linalg.solve_triangular(L.mT, (W @ A).addr_(g, r), upper=True) / s
        Q = torch.linalg.solve_triangular(L.mT, W @ AA + torch.outer(g, Ar), upper=True)
        Q = torch.linalg.solve_triangular(L, Q, upper=False, left=False)
        G_bb = -0.25 * (Q + Q.mT) / s

        # Through the kernel: dK = K (x - z) dz, K (x - z)^2 d log l, K d log o.
        H_bf, H_bb = G_bf * K_bf, G_bb * K_bb
        to_z = torch.zeros_like(Z)
        to_l = torch.zeros_like(lengthscale)
        for H, other, sides in ((H_bf, X, 1), (H_bb, Z, 2)):
            H_x, rows, columns = H @ other, H.sum(1), H.sum(0)
            to_z += sides * (H_x - rows.unsqueeze(-1) * Z)
            to_l += columns @ other.square() + rows @ Z.square() - 2 * (Z * H_x).sum(0)
        to_o = H_bf.sum() + H_bb.sum() + jitter * G_bb.trace() - 0.5 * n * o / s
        to_s = -0.5 * n + s * (
            0.5 * (r @ r + unexplained + (D_inv * AA).sum() + g @ AA @ g) / s**2
            - c.square().sum() / s
        )
        to_m = (r.sum() - A.sum(1) @ g) / s
        to_points = to_z / lengthscale * self.spacing
        scalars = torch.stack([to_o, to_s, to_m])
        gradient = torch.cat([to_l, scalars, to_points.reshape(-1)])
        return F.item() / n, (gradient / n).numpy()

    def model(self, variables: np.ndarray) -> StreamingGP:
        """The package's model at these values, with all data, in closed form."""
        log_l, log_o, log_s, m, z = self.unpacked(variables)
        start = self.start_model
        model = StreamingGP(
            copy.deepcopy(start.covar_module),
            likelihood=copy.deepcopy(start.likelihood),
            mean_module=copy.deepcopy(start.mean_module),
            num_inducing=start.num_inducing,
        ).double()
        model.covar_module.base_kernel.lengthscale = log_l.exp()
        model.covar_module.outputscale = log_o.exp()
        model.likelihood.noise = log_s.exp()
        model.mean_module.constant = m
        with small_budget():
            model.update(self.x, self.y, num_steps=0, inducing_points=z)
        return model


def _correlation(z: Tensor, x: Tensor) -> Tensor:
    """``exp(-|z - x|^2 / 2)``, ``(m, n)``."""
    exponent = torch.addmm(-0.5 * x.square().sum(-1), z, x.mT)
    return exponent.sub_(0.5 * z.square().sum(-1, keepdim=True)).clamp_(max=0).exp_()


class Snapshot(NamedTuple):
    """How far L-BFGS is: evaluations, CPU seconds, bound per datum, and variables."""

    steps: int
    seconds: float
    bound: float
    variables: np.ndarray


class Climb:
    """L-BFGS on a bound: counts evaluations, keeps the best, stops on a plateau."""

    def __init__(self, bound: BatchBound, max_steps: int, start: float) -> None:
        self.bound, self.max_steps, self.start = bound, max_steps, start
        self.best = Snapshot(0, 0.0, bound(bound.start)[0], bound.start)
        self.curve = [self.best.bound]  # the best bound after every evaluation
        self.snapshots: list[Snapshot] = []
        self.bar = tqdm(total=max_steps, desc="L-BFGS", leave=False, mininterval=5)

    @property
    def steps(self) -> int:
        """Evaluations so far."""
        return len(self.curve) - 1

    def leg(self) -> float:
        """L-BFGS from the best point; its gain in nats per datum and 100 steps."""
        first, before = self.steps, self.best.bound

        def stop_on_plateau(intermediate_result: object) -> None:
            taken = self.steps - first
            if self.steps >= self.max_steps or (
                taken >= 100 and self.curve[-1] - self.curve[-101] < PLATEAU
            ):
                raise StopIteration

        minimize(
            self._loss,
            self.best.variables,
            jac=True,
            method="L-BFGS-B",
            bounds=self.bound.limits,
            callback=stop_on_plateau,
            options={
                "maxcor": 100,
                "maxiter": self.max_steps,
                "maxfun": self.max_steps,
                "ftol": 1e-13,
                "gtol": 1e-8,
            },
        )
        return (self.best.bound - before) / max((self.steps - first) / 100, 1)

    def _loss(self, variables: np.ndarray) -> tuple[float, np.ndarray]:
        try:
            value, gradient = self.bound(variables)
        except torch.linalg.LinAlgError:  # a line search looked too far
            value, gradient = -1e10, np.zeros_like(variables)
        self.curve.append(max(value, self.curve[-1]))
        self.bar.set_postfix(bound=f"{self.curve[-1]:.5f}", refresh=False)
        self.bar.update()
        seconds = time.process_time() - self.start
        if value > self.best.bound:
            self.best = Snapshot(self.steps, seconds, value, variables.copy())
        if self.steps % SNAPSHOT == 0:
            self.snapshots.append(self.best._replace(steps=self.steps, seconds=seconds))
        return -value, -gradient


class Reference(NamedTuple):
    """A batch model and how it was learned.

    Attributes:
        model: The model, with all data.
        bound: Its bound on the log evidence, per datum.
        converged: Whether it is on a plateau.
        steps: Evaluations of the bound by L-BFGS.
        restarts: How often L-BFGS began anew.
        gain: Nats per datum and 100 evaluations that the last run of L-BFGS gained.
        seconds: CPU seconds it took.
        path: Where it was on the way.
        model_at: From variables of the path to the model there.
    """

    model: StreamingGP
    bound: float
    converged: bool
    steps: int
    restarts: int
    gain: float
    seconds: float
    path: list[Snapshot]
    model_at: Callable[[np.ndarray], StreamingGP]


def batch_reference(
    x: Tensor, y: Tensor, num_inducing: int, max_steps: int = MAX_STEPS
) -> Reference:
    """All data at once, all of Z free, to a plateau.

    L-BFGS may end early, where a line search fails. So it begins anew where it ended,
    and only a restart that gains nothing says that there is no more to learn.

    Args:
        x: ``(n, d)``, all inputs.
        y: ``(n,)``, all targets.
        num_inducing: Largest number of inducing points.
        max_steps: Evaluations of the bound after which it stops.

    Returns:
        The best model met.
    """
    start = time.process_time()
    batch = BatchSGPR(x.size(-1), num_inducing, num_steps=1)  # where to begin
    batch.update(x, y)
    climb = Climb(BatchBound(x, y, batch.model), max_steps, start)
    gain, restarts = climb.leg(), 0
    settled = False
    while not settled and climb.steps < max_steps:
        gain, restarts = climb.leg(), restarts + 1
        settled = gain < PLATEAU
    climb.bar.close()
    seconds = time.process_time() - start
    return Reference(
        climb.bound.model(climb.best.variables),
        climb.best.bound,
        settled,
        climb.steps,
        restarts,
        gain,
        seconds,
        climb.snapshots,
        climb.bound.model,
    )

"""Batch sparse regression to a plateau: what streams are measured against."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import torch
from gpytorch.kernels import Kernel
from scipy.cluster.vq import kmeans2
from scipy.optimize import minimize
from torch import Tensor, nn

from torch_ssgp import StreamingGP, settings
from workbench.baselines import Baseline, bytes_of, learned_from_some

PLATEAU = 1e-4  # nats per datum that 100 evaluations of the bound must gain
MAX_STEPS = 4_000  # evaluations of the bound by a batch model


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
    and inducing points in units of their spacing. It begins where ``model`` is, which
    has an RBF kernel and inducing points.
    """

    def __init__(self, x: Tensor, y: Tensor, model: StreamingGP) -> None:
        self.x, self.y, self.start_model = x, y, model
        z = model.memory.points
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
        parts = start.covar_module, start.num_inducing, start.likelihood
        model = copy.deepcopy(at_once(*parts, start.mean_module))
        model.covar_module.base_kernel.lengthscale = log_l.exp()
        model.covar_module.outputscale = log_o.exp()
        model.likelihood.noise = log_s.exp()
        model.mean_module.constant = m
        model.update(self.x, self.y, num_steps=0, inducing_points=z)
        return model


def _correlation(z: Tensor, x: Tensor) -> Tensor:
    """``exp(-|z - x|^2 / 2)``, ``(m, n)``."""
    exponent = torch.addmm(-0.5 * x.square().sum(-1), z, x.mT)
    return exponent.sub_(0.5 * z.square().sum(-1, keepdim=True)).clamp_(max=0).exp_()


class Climb:
    """L-BFGS on a bound: counts evaluations, keeps the best, stops on a plateau."""

    def __init__(self, bound: BatchBound, max_steps: int) -> None:
        self.bound, self.max_steps = bound, max_steps
        self.best, self.variables = bound(bound.start)[0], bound.start
        self.curve = [self.best]  # the best bound after every evaluation

    @property
    def steps(self) -> int:
        """Evaluations so far."""
        return len(self.curve) - 1

    def leg(self) -> float:
        """L-BFGS from the best point; its gain in nats per datum and 100 steps."""
        first, before = self.steps, self.best

        def stop_on_plateau(intermediate_result: object) -> None:
            taken = self.steps - first
            if self.steps >= self.max_steps or (
                taken >= 100 and self.curve[-1] - self.curve[-101] < PLATEAU
            ):
                raise StopIteration

        limit = self.max_steps
        minimize(
            self._loss,
            self.variables,
            jac=True,
            method="L-BFGS-B",
            bounds=self.bound.limits,
            callback=stop_on_plateau,
            options={"maxcor": 100, "maxiter": limit, "maxfun": limit}
            | {"ftol": 1e-13, "gtol": 1e-8},
        )
        return (self.best - before) / max((self.steps - first) / 100, 1)

    def _loss(self, variables: np.ndarray) -> tuple[float, np.ndarray]:
        try:
            value, gradient = self.bound(variables)
        except torch.linalg.LinAlgError:  # a line search looked too far
            value, gradient = -1e10, np.zeros_like(variables)
        self.curve.append(max(value, self.curve[-1]))
        if value > self.best:
            self.best, self.variables = value, variables.copy()
        return -value, -gradient


class BatchSGPR(Baseline):
    """All data at once, all inducing points free, to a plateau: the ceiling.

    L-BFGS may end early, where a line search fails. So it begins anew where it ended,
    and only a restart that gains nothing says that there is no more to learn:
    ``converged``, if that was before ``num_steps`` evaluations. ``bound`` is per datum.
    It begins at means of clusters, with hyperparameters of an exact GP on some data:
    from where all data look like noise it would not find the way.
    """

    def __init__(
        self, num_dims: int, num_inducing: int, *, num_steps: int = MAX_STEPS
    ) -> None:
        self.num_steps, self.num_inducing = num_steps, num_inducing
        self.converged, self.steps, self.bound = False, 0, -math.inf
        self.num_data = 0

    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from all data, ``(n, d)`` and ``(n,)``; called once."""
        if self.num_data:
            raise RuntimeError("BatchSGPR takes all data in one update.")
        self.num_data = len(y)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a cluster without data
            z, _ = kmeans2(
                x.numpy(), min(self.num_inducing, len(y)), minit="++", seed=0
            )
        p = learned_from_some(x, y, min(self.num_steps, 50))
        model = at_once(p.covar_module, self.num_inducing, p.likelihood, p.mean_module)
        z = torch.from_numpy(z).unique(dim=0)
        model.update(x, y, num_steps=0, inducing_points=z)
        climb = Climb(BatchBound(x, y, model), self.num_steps)
        climb.leg()
        while not self.converged and climb.steps < self.num_steps:
            self.converged = climb.leg() < PLATEAU
        self.model = climb.bound.model(climb.variables)
        self.steps, self.bound = climb.steps, climb.best

    def num_bytes(self) -> int:
        """It keeps all data, to learn from them again."""
        own = bytes_of(self.model)
        return own + 8 * self.num_data * (1 + self.model.memory.points.size(-1))


def at_once(kernel: Kernel, num_inducing: int, *others: nn.Module) -> StreamingGP:
    """A model whose memory is its inducing points: one update is batch inference."""
    return StreamingGP(
        kernel, *others, num_inducing=num_inducing, memory_size=num_inducing
    ).double()

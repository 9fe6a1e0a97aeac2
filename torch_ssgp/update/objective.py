"""The bound of one update, as a function of hyperparameters and inducing points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.means import Mean
from torch import Tensor, nn

from torch_ssgp import functional as fn
from torch_ssgp import fused
from torch_ssgp.exceptions import Breakdown, breakdowns
from torch_ssgp.functional import PriorBlocks, Projection, PseudoObservations
from torch_ssgp.memory import Data, GaussianData, Memory
from torch_ssgp.modules import observation_noise, prior_blocks, same_variables
from torch_ssgp.update.initialization import average, initialize_from_data

JITTERS = (1e-6, 1e-4, 1e-2)  # tried one after the other where a smaller one fails


Result = TypeVar("Result")


class Prior(NamedTuple):
    """The modules of a model, or working copies of them."""

    mean: Mean
    kernel: Kernel
    likelihood: Likelihood

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in a fixed order."""
        return [p for module in self for p in module.parameters()]


class Objective(nn.Module, ABC):
    """The bound of one update, on working copies: the model is not touched.

    Args:
        prior: Working copies of mean, kernel and likelihood.
        data: Raw data of the memory and new data.
        z_a: ``(*batch, m_a, d)`` points of the memory at which the past is known.
        past: Pseudo-observations at ``z_a``.
        shared_noise: Whether the rows of the past have the noise of the likelihood.
        alpha: Power of Power-EP.
        jitter: Relative jitter.
    """

    z: nn.Parameter
    settled: bool = True  # what is not learned by gradients has converged
    revises: bool = False  # whether new data change how old ones are seen
    round_length: int | None = None  # steps of L-BFGS for which the function stays

    def __init__(
        self,
        prior: Prior,
        data: Data,
        z_a: Tensor,
        past: PseudoObservations,
        *,
        shared_noise: bool,
        alpha: float,
        jitter: float,
    ) -> None:
        super().__init__()
        self.mean, self.kernel, self.likelihood = prior
        self.data, self.z_a, self.past = data, z_a, past
        self.shared_noise, self.alpha, self.jitter = shared_noise, alpha, jitter
        self.loss_before: Tensor | None = None  # nats, at the first call of `total`

    # -- what a likelihood decides ----------------------------------------------------

    @property
    def coupled(self) -> bool:
        """Whether the last batch dimension is classes that share their data."""
        return False

    @property
    def num_classes(self) -> int:
        """The number of functions that share their data."""
        return self.batch_shape[-1] if self.coupled else 1

    @abstractmethod
    def initialize(self) -> None:
        """Initialise hyperparameters that nobody set, from data and past, in place."""

    @abstractmethod
    def noises(self) -> tuple[Tensor, Tensor]:
        """Noise of the data ``(*batch, n)`` and noise scale of rows ``(*batch,)``."""

    @abstractmethod
    def total(self) -> tuple[Tensor, Tensor]:
        """What the inner loop maximises and the bounds in it, ``(*batch,)`` each."""

    @abstractmethod
    def as_gaussian(self, prior: PriorBlocks) -> GaussianData:
        """The data as Gaussian observations.

        Args:
            prior: Prior blocks at the final hyperparameters and inducing points.
        """

    def as_frozen(self, prior: PriorBlocks, data: GaussianData) -> GaussianData:
        """The same for data that are compressed now, and never seen again.

        Args:
            prior: As before.
            data: What :meth:`as_gaussian` returned.
        """
        del prior
        return data

    @abstractmethod
    def remembered_noise(self, data: GaussianData) -> Tensor:
        """Noise with which raw data are remembered ``(*batch, n)``.

        Args:
            data: What :meth:`as_gaussian` returned.
        """

    @abstractmethod
    def spread(self) -> Tensor:
        """Typical size of the function ``(*batch,)``, the unit of a constant mean."""

    def recall_sites(self, memory: Memory, num_raw: int) -> None:
        """Begin with the sites that data of the memory had, if they have any.

        Args:
            memory: Where they are.
            num_raw: How many of its raw data, the last ones, are still there.
        """

    def new_round(self) -> None:
        """Called before every round of L-BFGS, see ``round_length``."""

    # -- what processes that share the work agree on, see ``sharding.py`` -------------

    def agree(self, points: Tensor) -> Tensor:
        """A choice that was made, the same in all processes."""
        return points

    def share_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Called after every gradient, which may be that of some rows only."""

    # -- what all share ---------------------------------------------------------------

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of independent streams."""
        return self.data.y.shape[:-1]

    @property
    def modules_of_prior(self) -> Prior:
        """Mean, kernel and likelihood."""
        return Prior(self.mean, self.kernel, self.likelihood)

    @cached_property
    def past_precision(self) -> Tensor:
        """``(*batch, m_a, m_a)``, of the past in units of its noise scale."""
        return self.past.U.mT @ self.past.U

    @property
    def num_data(self) -> Tensor:
        """``()``, data behind data and past."""
        return self.past.n + self.data.num_data

    def start_at(self, z: Tensor, learn: bool = False) -> None:
        """Put the inducing points at ``z`` ``(*batch, m_b, d)``.

        Args:
            z: Inducing points.
            learn: Whether they will move; then none is a point of the memory or the
                data, which stay.
        """
        self.z = nn.Parameter(z.clone(), requires_grad=learn)
        self.same = None if learn else same_variables(z, self.data.x, self.z_a)

    def prior(self) -> PriorBlocks:
        """Prior blocks at the present hyperparameters and inducing points."""
        return self._blocks(self.z, self.same)

    def final_prior(self, z: Tensor, num_inducing: int | None = None) -> PriorBlocks:
        """Prior blocks for what is stored, with losses to the last digit.

        Args:
            z: ``(*batch, m, d)``, the points to store it at.
            num_inducing: How many of them, the first ones, are inducing points; all by
                default. Data at other points observe the function there without the
                jitter, so that what a memory loses does not depend on its points.
        """
        same = same_variables(z, self.data.x, self.z_a)
        if num_inducing is not None:
            same[..., num_inducing:, : self.data.x.size(-2)] = False
        prior = self._blocks(z, same)
        return prior._replace(L_aa=fn.cholesky(prior.K_aa))

    def _blocks(self, z: Tensor, same: Tensor | None) -> PriorBlocks:
        return prior_blocks(
            self.mean, self.kernel, z, self.data.x, self.z_a, self.jitter, same
        )

    def project(
        self, prior: PriorBlocks, data: GaussianData
    ) -> tuple[Projection, Tensor]:
        """Rows of the regression on the points of ``prior``, and their noise scale."""
        _, s = self.noises()
        past = self.past._replace(rho=self.past.rho + data.offset)
        rows = fn.project(
            prior, past, data.target, data.noise, s, self.alpha, self.data.weight
        )
        return rows, s

    @torch.no_grad()
    def check_finite(self) -> None:
        """Raise :class:`Breakdown` unless there is a point to start from."""
        if not bool(torch.isfinite(self.total()[0]).all()):
            raise Breakdown("the bound is not finite before the first step")

    def raise_jitter(self) -> bool:
        """Take the next larger jitter; ``False`` if there is none.

        What was found with the smaller one is dropped.
        """
        larger = [jitter for jitter in JITTERS if jitter > self.jitter]
        self.jitter = larger[0] if larger else self.jitter
        self.loss_before = None
        return bool(larger)

    @breakdowns(ValueError)  # of a distribution, where a hyperparameter is NaN
    def log_prior(self) -> Tensor | float:
        """Log-density of the hyperparameters under GPyTorch priors, ``(*batch,)``.

        Streams that share a hyperparameter share its density.
        """
        batch = self.batch_shape
        total: Tensor | float = 0.0
        for _, owner, prior, closure, _ in self.named_priors:
            density = prior.log_prob(closure(owner))
            if density.shape[: len(batch)] == batch:
                total = total + sum_over(density, len(batch))
            else:
                total = total + density.sum() / batch.numel()
        return total

    @cached_property
    def named_priors(self) -> list[tuple]:
        """Those of all modules, as GPyTorch names them."""
        return [each for m in self.modules_of_prior for each in m.named_priors()]


def sum_over(values: Tensor, num_kept: int) -> Tensor:
    """Sum of all but the first ``num_kept`` dimensions."""
    return values.unsqueeze(-1).flatten(num_kept).sum(-1)


class GaussianObjective(Objective):
    """The bound with Gaussian noise, in closed form."""

    def initialize(self) -> None:
        """Initialise hyperparameters that nobody set, from data and past, in place."""
        x, y, seen = self.data.x, self.data.y, self.data.seen
        if self.z_a.size(-2):
            z, a = known_values(self.z_a, self.past)
            x = torch.cat(fn.broadcast_matrices(z, x), -2)
            y = torch.cat(fn.broadcast_rows(a, y), -1)
            if seen is not None:
                known = (self.past.n > 0).unsqueeze(-1).expand(a.shape)
                seen = torch.cat(fn.broadcast_rows(known, seen), -1)
        initialize_from_data(*self.modules_of_prior, x, y, seen)

    def noises(self) -> tuple[Tensor, Tensor]:
        """Noise of the data ``(*batch, n)`` and noise scale of rows ``(*batch,)``."""
        y = self.data.y
        noise = observation_noise(self.likelihood, self.data.noise)
        if self.shared_noise:
            s = noise.squeeze(-1).expand(y.shape[:-1])
            return s.unsqueeze(-1), s
        return noise.expand(y.shape), y.new_ones(y.shape[:-1])

    def as_gaussian(self, prior: PriorBlocks | None = None) -> GaussianData:
        """The data themselves."""
        noise = None if self.shared_noise else self.noises()[0]
        return GaussianData(self.data.y, noise, torch.zeros_like(self.past.rho))

    def remembered_noise(self, data: GaussianData) -> Tensor:
        """Zero where it follows the likelihood; else what is known, or was learned."""
        if data.noise is None:
            return torch.zeros_like(data.target)
        known = self.data.noise
        if known is None or not isinstance(
            self.likelihood, FixedNoiseGaussianLikelihood
        ):
            return data.noise
        return known.expand(data.target.shape)

    @breakdowns()
    def total(self) -> tuple[Tensor, Tensor]:
        """What the inner loop maximises and the bounds in it, ``(*batch,)`` each."""
        if self.alpha or self.loss_before is None:
            rows, s = self.project(self.prior(), self.as_gaussian())
            if self.loss_before is None:
                self.loss_before = (rows.loss / (2 * s)).detach()
            bound = fn.evidence(rows, s)
        else:
            bound = self._fused_bound()
        return bound + self.log_prior(), bound

    def _fused_bound(self) -> Tensor:
        """The same bound as one operation with a gradient in closed form."""
        return fused.evidence(*self.terms(), self.num_data)

    def terms(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """``K_bb``, ``K_br``, ``r``, ``t`` and ``s`` of the bound, see ``fused``."""
        prior, past, data = self.prior(), self.past, self.data
        noise, s = self.noises()
        rows = fn.weigh(
            data.y - prior.m_f,
            None if self.shared_noise else noise,
            s,
            data.weight,
        )
        K_bf, k_ff = prior.K_bf, prior.k_ff
        if rows.root is not None:
            K_bf, k_ff = K_bf * rows.root.unsqueeze(-2), k_ff * rows.root.square()
        U = past.U
        t = past.rho + rows.rho + k_ff.sum(-1)
        K_br, r = K_bf, rows.r
        if U.size(-1):
            t = t + (self.past_precision * prior.K_aa).sum((-2, -1))
            K_br = torch.cat(fn.broadcast_matrices(K_bf, prior.K_ba @ U.mT), -1)
            r_a = past.g - fn.matvec(U, prior.m_a)
            r = torch.cat(fn.broadcast_rows(r, r_a), -1)
        return prior.K_bb, K_br, r, t, s

    @torch.no_grad()
    def spread(self) -> Tensor:
        """Size of the targets about the prior mean, ``(*batch,)``.

        Not about their own mean: a level that the stream has left far behind would
        need thousands of steps to follow in units of a small spread.
        """
        square = (self.data.y - self.mean(self.data.x)).square()
        size = average(square, self.data.seen).sqrt()
        return torch.where(size > 0, size, 1)  # NaN where there are no data


def known_values(z: Tensor, past: PseudoObservations) -> tuple[Tensor, Tensor]:
    """Points that pseudo-observations say much about, and the values they say.

    Args:
        z: ``(*batch, m, d)``.
        past: Pseudo-observations at ``z``.

    Returns:
        ``(*batch, k, d)`` and ``(*batch, k)``; all streams have the same number.
    """
    batch = torch.broadcast_shapes(z.shape[:-2], past.g.shape[:-1])
    z = z.expand(*batch, *z.shape[-2:])
    weight = past.U.square().sum(-2).expand(*batch, -1)
    # All of a stream that has no reading yet, not to hold back the others.
    known = weight >= KNOWN * weight.amax(-1, keepdim=True)
    count = int(known.sum(-1).min())
    best = weight.topk(count, -1).indices
    # Least squares by the pseudo-inverse, about one level for all: what rows say little
    # about stays there.
    ones, g = past.U.sum(-1, keepdim=True), past.g.unsqueeze(-1)
    size = fn.squared_norm(ones, -2)
    level = (ones * g).sum(-2) / torch.where(size > 0, size, 1)
    inverse = torch.linalg.pinv(past.U, rtol=FAINT)
    a = (level.unsqueeze(-1) + inverse @ (g - ones * level.unsqueeze(-1))).squeeze(-1)
    z = z.gather(-2, best.unsqueeze(-1).expand(*best.shape, z.size(-1)))
    return z, a.expand(*batch, -1).gather(-1, best)


KNOWN = 0.25  # share of the largest weight that a point must have to count as known
FAINT = 0.1  # share of the largest singular value below which rows say little


def with_enough_jitter(objective: Objective, attempt: Callable[[], Result]) -> Result:
    """Retry with larger and larger jitter, until nothing breaks down."""
    while True:
        try:
            return attempt()
        except Breakdown:
            if not objective.raise_jitter():
                raise

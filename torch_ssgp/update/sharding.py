r"""The bound of one update, its rows divided among processes.

Every sum over rows is computed where the rows are, and then added up:

.. math:: A A^\top, \quad A r, \quad \|r\|^2 + t

in every step of the inner loop, then the gradients of hyperparameters and inducing
points. Every process computes the rest (the factor of :math:`K_{bb}`, the solution,
priors of hyperparameters) from the same numbers, and its gradient counts once. Stored
rows are compressed by a QR in every process and then one QR of all their factors, so no
condition number is squared here either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_ssgp import functional as fn
from torch_ssgp import fused
from torch_ssgp.exceptions import breakdowns
from torch_ssgp.functional import PriorBlocks, Projection, PseudoObservations
from torch_ssgp.memory import Data, GaussianData
from torch_ssgp.update.objective import GaussianObjective, Prior


class Team(ABC):
    """Processes that share the work of an update; all make the same calls.

    Attributes:
        rank: The number of this process, from zero.
        size: How many there are.
    """

    rank: int
    size: int

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, the same bits in each."""

    @abstractmethod
    def gather(self, values: Tensor) -> list[Tensor]:
        """The tensors of all processes, which may differ in their last size."""

    @abstractmethod
    def first(self, values: Tensor) -> Tensor:
        """The tensor of the first process; those of others have the same shape."""

    @abstractmethod
    def agree(self, values: Tensor) -> Tensor:
        """The tensor of the first process, whatever the shape of the others."""

    def sum_all(self, *values: Tensor) -> list[Tensor]:
        """Sums of several tensors, in one message.

        Args:
            *values: Tensors of one dtype.
        """
        total = self.sum(torch.cat([v.reshape(-1) for v in values]))
        parts = total.split([v.numel() for v in values])
        return [p.view(v.shape) for p, v in zip(parts, values, strict=True)]

    def share(self, num_data: int, num_rows: int) -> tuple[int, int]:
        """Where the data of this process begin, and how many they are.

        The first process has the rows of the past, and so fewer data.

        Args:
            num_data: The number of all data.
            num_rows: The number of rows of the past.
        """
        first = max((num_data + num_rows) // self.size - num_rows, 0)
        first = first if self.size > 1 else num_data
        rest, others = num_data - first, max(self.size - 1, 1)
        ends = [first + rest * k // others for k in range(self.size)]
        start = 0 if self.rank == 0 else ends[self.rank - 1]
        return start, ends[self.rank] - start


class _Once(torch.autograd.Function):
    """A value that all processes know; its gradient counts on the first one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, is_first: bool) -> Tensor:
        ctx.is_first = is_first
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if ctx.is_first else torch.zeros_like(grad), None


class ShardedObjective(GaussianObjective):
    """The bound with Gaussian noise, of which this process has a share of the rows.

    Args:
        prior: Working copies of mean, kernel and likelihood.
        data: All data: choices look at them.
        z_a: Points of the memory.
        past: Pseudo-observations there.
        shared_noise: Whether the rows of the past have the noise of the likelihood.
        jitter: Relative jitter.
        team: The processes that share the work.
    """

    def __init__(
        self,
        prior: Prior,
        data: Data,
        z_a: Tensor,
        past: PseudoObservations,
        *,
        shared_noise: bool,
        jitter: float,
        team: Team,
    ) -> None:
        forms = {"shared_noise": shared_noise, "alpha": 0.0, "jitter": jitter}
        super().__init__(prior, data, z_a, past, **forms)  # type: ignore[arg-type]
        self.team = team
        start, count = team.share(data.y.size(-1), past.g.size(-1))
        self.rows = slice(start, start + count)
        if team.rank:
            z_a = z_a[..., :0, :]
            past = PseudoObservations(
                past.U[..., :0, :0], past.g[..., :0], 0 * past.rho, 0 * past.n
            )
        mine = data.narrow(start, count)
        self.local = GaussianObjective(prior, mine, z_a, past, **forms)  # type: ignore[arg-type]

    def _once(self, value: Tensor) -> Tensor:
        return _Once.apply(value, self.team.rank == 0)

    # -- what goes to the rows of this process ----------------------------------------

    def start_at(self, z: Tensor, learn: bool = False) -> None:
        """Put the inducing points where the first process has them."""
        self.local.start_at(self.team.agree(z), learn)
        self.z = self.local.z

    def prior(self) -> PriorBlocks:
        """Prior blocks of the rows of this process."""
        return self.local.prior()

    def final_prior(self, z: Tensor, num_inducing: int | None = None) -> PriorBlocks:
        """Prior blocks of the rows of this process, for what is stored."""
        return self.local.final_prior(z, num_inducing)

    def raise_jitter(self) -> bool:
        """Take the next larger jitter; ``False`` if there is none."""
        raised = super().raise_jitter()
        self.local.jitter = self.jitter
        return raised

    # -- what comes from the rows of all ----------------------------------------------

    def agree(self, points: Tensor) -> Tensor:
        """The choice of the first process."""
        return self.team.agree(points)

    def initialize(self) -> None:
        """Initialise hyperparameters that the user has not set, in place."""
        super().initialize()
        with torch.no_grad():
            for parameter in self.modules_of_prior.parameters():
                parameter.copy_(self.team.first(parameter.detach()))

    def project(
        self, prior: PriorBlocks, data: GaussianData
    ) -> tuple[Projection, Tensor]:
        """Rows that say the same as those of all processes, and their noise scale."""
        noise = data.noise
        mine = GaussianData(
            data.target[..., self.rows],
            None if noise is None else noise[..., self.rows],
            data.offset if self.team.rank == 0 else 0 * data.offset,
        )
        rows, s = self.local.project(prior, mine)
        rows = fn.compress(rows)
        loss, rho = self.team.sum_all(rows.loss, rows.rho)
        A, r = fn.broadcast_matrices(rows.A, rows.r.unsqueeze(-2))
        every = torch.cat(self.team.gather(torch.cat([A, r], -2)), -1)
        rows = rows._replace(
            A=every[..., :-1, :], r=every[..., -1, :], loss=loss, rho=rho
        )
        return rows._replace(n=self.num_data), s

    @breakdowns()
    def total(self) -> tuple[Tensor, Tensor]:
        """What the inner loop maximises and the bounds in it, ``(*batch,)`` each."""
        if self.loss_before is None:
            with torch.no_grad():
                rows, s = self.local.project(
                    self.local.prior(), self.local.as_gaussian()
                )
                self.loss_before = self.team.sum(rows.loss) / (2 * s)
        K_bb, K_br, r, t, s = self.local.terms()
        bound = fused.evidence(
            self._once(K_bb),
            K_br,
            r,
            t,
            self._once(s),
            self.num_data,
            self.team.sum_all,
        )
        # Every decision of the inner loop is made by this number.
        same = self.team.first(bound.detach())
        bound = bound + (same - bound.detach())
        density = self.log_prior()
        if isinstance(density, Tensor):
            density = self._once(density)
        return bound + density, bound

    def share_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all processes."""
        used = [p for p in parameters if p.grad is not None]
        grads = [p.grad for p in used if p.grad is not None]
        for parameter, grad in zip(used, self.team.sum_all(*grads), strict=True):
            parameter.grad = grad.to(parameter)

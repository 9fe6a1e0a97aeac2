r"""The bound of one update, its rows divided among processes.

In every step of the inner loop, sums over rows are computed where the rows are, and
then added up:

.. math:: A A^\top, \quad A r, \quad \|r\|^2 + t,

and then the gradients of hyperparameters and inducing points. Every process computes
the rest (the factor of :math:`K_{bb}`, the solution, priors of hyperparameters) from
the same numbers, and its gradient counts once. What happens once per update, such as
the projection of a compression, every process does in full.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_ssgp import fused
from torch_ssgp.exceptions import PeerError
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.kernels import Values
from torch_ssgp.memory import Data, Rows
from torch_ssgp.update.objective import GaussianObjective, Prior


class Team:
    """The processes of a group of ``torch.distributed``; all make the same calls.

    Args:
        group: The group; ``None`` for all processes.
        device: Where tensors are exchanged.

    Attributes:
        rank: The number of this process, from zero.
        size: How many there are.
        num_bytes: Bytes of all messages so far, each counted once.
        num_messages: The number of messages.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.num_bytes = self.num_messages = 0

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Count a message, and turn errors of the network into a :class:`PeerError`."""
        self.num_messages += 1
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                "A rank was lost, or did not answer within the timeout of the process "
                "group. The model of this rank is unchanged. Stop all ranks and "
                "restart them, from a saved file if there is one. The network error "
                f"was: {str(error).splitlines()[0]}"
            ) from error

    def sum_all(self, *values: Tensor) -> list[Tensor]:
        """Sums over all processes of tensors of one dtype, the same bits in each."""
        total = torch.cat([v.detach().reshape(-1) for v in values])
        with self._sending():
            dist.all_reduce(total, group=self.group)
        self.num_bytes += total.nbytes
        parts = total.split([v.numel() for v in values])
        return [p.view(v.shape) for p, v in zip(parts, values, strict=True)]

    def everyones(self, value: Any) -> list[Any]:
        """Objects of all processes, in the order of ranks, tensors on this device."""
        file, packed = io.BytesIO(), [b""] * self.size
        torch.save(value, file)
        with self._sending():
            dist.all_gather_object(packed, file.getvalue(), group=self.group)
        self.num_bytes += sum(map(len, packed))
        device = str(self.device)
        return [
            torch.load(io.BytesIO(each), map_location=device, weights_only=False)
            for each in packed
        ]

    def agree(self, value: Any) -> Any:
        """The object of the first process."""
        return self.everyones(None if self.rank else value)[0]


class ShardedObjective(GaussianObjective):
    """The bound with Gaussian noise, of which this process has a share of the rows.

    Without inducing points it is the evidence, which every process computes in full.
    Choices look at all data.
    """

    def __init__(
        self, prior: Prior, rows: Rows, data: Data, *, team: Team, **options: Any
    ) -> None:
        super().__init__(prior, rows, data, **options)
        self.team, past = team, rows.past

        def share(num: int) -> slice:
            ends = (num * k // team.size for k in (team.rank, team.rank + 1))
            return slice(*ends)

        mine, once = share(past.g.size(-1)), float(team.rank == 0)
        past = PseudoObservations(
            past.U[..., mine, :], past.g[..., mine], past.rho * once, past.n * once
        )
        mine = share(data.y.size(-1))
        data = data.narrow(mine.start, mine.stop - mine.start)
        self.local = GaussianObjective(prior, rows._replace(past=past), data, **options)
        self.local.log_rate = self.log_rate

    @property
    def is_readable(self) -> bool:
        """Not where gradients are shared, which the modules have."""
        return self.z is None and super().is_readable

    def start_at(self, z: Tensor | None, learn: bool = False) -> None:
        """Put inducing points at ``z``, in all processes."""
        super().start_at(z, learn)
        self.local.start_at(z, learn)
        self.local.z = self.z

    def agree(self, points: Tensor) -> Tensor:
        """The choice of the first process."""
        return self.team.agree(points)

    def bound(self, value: Values | None = None) -> Tensor:
        """The evidence of all rows, or its bound from the rows of all processes."""
        if self.z is None:
            return super().bound(value)
        self.local.jitter = self.jitter
        K_bb, K_br, r, t, s = self.local.terms(self.evaluate())
        n, sums = self.num_data, self.team.sum_all
        bound = fused.evidence(self._once(K_bb), K_br, r, t, self._once(s), n, sums)
        # Every decision of the inner loop is made by this number.
        own = bound.detach()
        (same,) = sums(torch.zeros_like(own) if self.team.rank else own)
        return bound + (same - own) - self.sunk

    def log_prior(self) -> Tensor | float:
        """Log-density of the hyperparameters, whose gradient counts once."""
        density = super().log_prior()
        if self.z is None or not isinstance(density, Tensor):
            return density
        return self._once(density)

    def _once(self, value: Tensor) -> Tensor:
        """A value that all processes know; its gradient counts on the first one."""
        known = value.detach()
        return known + (self.team.rank == 0) * (value - known)

    def share_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all processes, if each has a share."""
        used = [p for p in parameters if p.grad is not None]
        if self.z is not None:
            grads = self.team.sum_all(*(p.grad for p in used if p.grad is not None))
            for parameter, grad in zip(used, grads, strict=True):
                parameter.grad = grad.to(parameter)

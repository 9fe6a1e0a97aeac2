r"""What a branch inherited, kept apart from what it has seen since.

The memory of a branch (see :func:`torch_ssgp.branch`) has two parts: that of the base
and its own. Projection and forgetting act on each row and each datum separately, and
losses and residuals are sums over them. Only the QR that compresses rows mixes them. So
it runs twice, once for each part. Then what was added equals, up to rounding, the
memory of a model with the same points and hyperparameters that never saw the base.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.buffers import stored
from torch_ssgp.functional import PriorBlocks, PseudoObservations
from torch_ssgp.memory import GaussianData, Rows
from torch_ssgp.update.objective import Objective
from torch_ssgp.update.state import Known


class Base(NamedTuple):
    """The base's part of what an update recalls.

    Attributes:
        past: Its rows, the first ones.
        num_raw: The number of its raw data, the first ones.
        power: What forgetting has left of it.
    """

    past: PseudoObservations
    num_raw: int
    power: Tensor

    @classmethod
    def recall(
        cls,
        known: Known,
        past: PseudoObservations,
        num_raw: int,
        power: float | Tensor,
        shared_noise: bool,
    ) -> Base | None:
        """The base's part, in the form and dtype of the coming update.

        Args:
            known: What the model knows before the update.
            past: All rows as the update recalls them.
            num_raw: The number of raw data that the update recalls, the last ones.
            power: Power that the past was raised to, one or ``(*batch,)``.
            shared_noise: Whether the rows have the noise of the likelihood.

        Returns: ``None`` if the model is not a branch.
        """
        memory = known.memory
        if int(memory.base_key) == 0:
            return None
        g = past.g
        part = PseudoObservations(*(t.detach().to(g.dtype) for t in memory.of_base))
        if bool(memory.shared_noise) and not shared_noise:
            sigma2 = known.frozen.likelihood.noise.detach().to(g.dtype).squeeze(-1)
            part = fn.to_sites(part, sigma2.expand(past.rho.shape))
        part = part.discount(power)
        num_rows = min(part.g.size(-1), g.size(-1))  # none where all was forgotten
        part = PseudoObservations(
            past.U[..., :num_rows, :],
            g[..., :num_rows],
            part.rho.expand(past.rho.shape) if g.size(-1) else 0 * past.rho,
            part.n if g.size(-1) else 0 * past.n,
        )
        num_gone = memory.num_raw - num_raw
        left = memory.base_power.to(g.dtype) * power
        return cls(part, max(int(memory.base_raw) - num_gone, 0), torch.as_tensor(left))

    def compress(
        self,
        objective: Objective,
        points: Tensor,
        prior: PriorBlocks,
        data: GaussianData,
    ) -> tuple[Rows, Base]:
        """All rows at ``points``; those of the base come first, separately.

        Args:
            objective: What is known, the base's rows and raw data first.
            points: ``(*batch, m, d)``, where to store it.
            prior: Prior blocks there.
            data: The data as Gaussian observations.

        Returns:
            The next rows, and the base's part of them.
        """
        past, num_raw = objective.past, self.num_raw
        num_rows, num_data = self.past.g.size(-1), data.target.size(-1)
        share = num_raw / max(num_data, 1)  # of what sites add to the bound
        added = PseudoObservations(
            past.U[..., num_rows:, :],
            past.g[..., num_rows:],
            past.rho - self.past.rho + (1 - share) * data.offset,
            past.n - self.past.n,
        )
        base = self.past._replace(rho=self.past.rho + share * data.offset)
        parts = [
            _absorb(objective, prior, data, rows, raw)
            for rows, raw in (
                (base, slice(0, num_raw)),
                (added, slice(num_raw, num_data)),
            )
        ]
        joined = PseudoObservations(
            torch.cat(fn.broadcast_matrices(parts[0].U, parts[1].U), -2),
            torch.cat(fn.broadcast_rows(parts[0].g, parts[1].g), -1),
            parts[0].rho + parts[1].rho,
            parts[0].n + parts[1].n,
        )
        return Rows(points, joined), self._replace(past=parts[0], num_raw=0)

    def buffers(self) -> dict[str, Tensor]:
        """Buffers of a memory; its ``base_key`` stays."""
        past, power = self.past, self.power
        counts = torch.tensor([past.g.size(-1), self.num_raw], device=past.g.device)
        return {
            "base_rows": counts[0].clone(),
            "base_raw": counts[1].clone(),
            "base_residual": stored(past.rho),
            "base_data": stored(past.n),
            "base_power": stored(power.to(past.rho)),
        }


def _absorb(
    objective: Objective,
    prior: PriorBlocks,
    data: GaussianData,
    past: PseudoObservations,
    raw: slice,
) -> PseudoObservations:
    """Some rows and some data at the points of ``prior``."""
    weight = objective.data.weight
    blocks = prior._replace(
        K_bf=prior.K_bf[..., raw], k_ff=prior.k_ff[..., raw], m_f=prior.m_f[..., raw]
    )
    rows = fn.project(
        blocks,
        past,
        data.target[..., raw],
        None if data.noise is None else data.noise[..., raw],
        objective.noises()[1],
        objective.alpha,
        None if weight is None else weight[..., raw],
    )
    return fn.absorb(fn.compress(rows), prior.m_b)

"""Where an update puts its inducing points, before and after the inner loop."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp import validation as check
from torch_ssgp.exceptions import breakdowns
from torch_ssgp.inducing import Candidates
from torch_ssgp.modules import gram
from torch_ssgp.points import merge_duplicates
from torch_ssgp.summary import PosteriorSummary
from torch_ssgp.update.objective import Objective
from torch_ssgp.update.state import Limits


class Choice(NamedTuple):
    """Asks the policy of a model.

    Attributes:
        summary: The old posterior.
        limits: What may be used.
        num_new: The number of new data.
    """

    summary: PosteriorSummary
    limits: Limits
    num_new: int

    def candidates(self, objective: Objective) -> Candidates:
        """Where inducing points may lie, and what relies on them."""
        x = objective.data.x
        return Candidates(
            kernel=objective.kernel,
            z_a=self.points_of_before(x),
            z_s=objective.z_a,
            past=objective.past,
            x=x,
            weight=precision(objective),
            s=objective.noises()[1],
            jitter=objective.jitter,
            num_inducing=self.limits.num_inducing,
            num_updates=int(self.summary.num_updates),
            num_new=self.num_new,
        )

    def points_of_before(self, x: Tensor) -> Tensor:
        """Inducing points of before, ``(*batch, m_a, d)``, perhaps none."""
        if self.summary.is_empty:
            return x[..., :0, :]
        z_a = self.summary.inducing_points.detach().to(x)
        return z_a.expand(*x.shape[:-2], *z_a.shape[-2:])

    @breakdowns()
    def choose(self, objective: Objective, *, anew: bool) -> Tensor:
        """The choice of the policy; a cheaper one unless all is chosen again."""
        policy = self.limits.policy
        choice = policy if anew or self.has_changed(objective) else policy.extend
        z = choice(self.candidates(objective))
        check.check_choice(z, policy, objective.data.x)
        return merge_duplicates(objective.kernel, z, objective.jitter)

    def has_changed(self, objective: Objective) -> bool:
        """Whether the prior differs from that under which points were chosen."""
        summary, x = self.summary, objective.data.x
        if summary.is_empty:
            return True
        z, L = (t.to(x) for t in (summary.inducing_points, summary.prior_cholesky))
        old = L[..., :1, :1] * L[..., 1:, :1]  # covariance with the first of them
        new = gram(objective.kernel, z[..., 1:, :], z[..., :1, :])
        return not bool(torch.allclose(new, old.expand(new.shape), rtol=1e-6))

    def revise(self, objective: Objective, loss: Tensor) -> bool:
        """Let the policy choose again if it wants to; whether anything changed."""
        z, policy = objective.z.detach(), self.limits.policy
        revised = policy.revise(self.candidates(objective), z, loss)
        if revised is not z:
            check.check_choice(revised, policy, objective.data.x)
        revised = merge_duplicates(objective.kernel, revised, objective.jitter)
        if revised is not z:
            objective.start_at(revised)
        return revised is not z


def precision(objective: Objective) -> Tensor:
    """Precision of the data in units of the rows, ``(*batch, n)``."""
    noise, s = objective.noises()
    precision = (s.unsqueeze(-1) / noise).expand(objective.data.y.shape)
    weight = objective.data.weight
    return precision if weight is None else weight * precision

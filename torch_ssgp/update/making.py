"""Which bound goes with which likelihood."""

from __future__ import annotations

from torch import Tensor

from torch_ssgp import likelihoods
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.memory import Data
from torch_ssgp.update.objective import GaussianObjective, Objective, Prior
from torch_ssgp.update.sharding import ShardedObjective, Team
from torch_ssgp.update.sites import SiteObjective


def make_objective(
    prior: Prior,
    data: Data,
    z_a: Tensor,
    past: PseudoObservations,
    *,
    shared_noise: bool,
    alpha: float,
    jitter: float,
    team: Team | None = None,
) -> Objective:
    """The bound that goes with the likelihood; see :class:`Objective`."""
    gaussian = likelihoods.is_gaussian(prior.likelihood)
    if team is not None and gaussian and alpha == 0:
        return ShardedObjective(
            prior,
            data,
            z_a,
            past,
            shared_noise=shared_noise,
            jitter=jitter,
            team=team,
        )
    return (GaussianObjective if gaussian else SiteObjective)(
        prior,
        data,
        z_a,
        past,
        shared_noise=shared_noise,
        alpha=alpha,
        jitter=jitter,
    )

r"""Policies that choose inducing points among the points of the memory and new inputs.

A policy is asked when a memory is compressed, and maps :class:`Candidates` to points.
What its choice costs is measured in nats: with :math:`E = K - Q` the prior covariance
of all candidates that the chosen points leave unexplained, and :math:`W` the rows that
observe the candidates (``U`` of the past, the data),

.. math:: t / 2s = \mathrm{tr}\, W E W^\top / 2s

is what the bound loses by projecting past and data on the chosen points.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from torch_ssgp.exceptions import ArgumentError, warn
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.modules import inducing_gram, variances
from torch_ssgp.points import Observed, evenly, information, pick, take, thinned
from torch_ssgp.validation import (
    check_module,
    check_positive_int,
    is_number,
    kind_of,
    wrong,
)

OF_VERSION_02 = ("revise", "wants_points", "extend")


class Candidates(NamedTuple):
    """Where the next inducing points may lie, and what relies on them.

    Attributes:
        kernel: Prior covariance with the hyperparameters known so far.
        z_a: ``(*batch, m_a, d)`` old inducing points.
        z_s: ``(*batch, m_s, d)`` points of the memory at which the past is known.
        past: Pseudo-observations at ``z_s``.
        x: ``(*batch, n, d)`` inputs of data: raw ones of the memory, then new ones.
        weight: ``(*batch, n)``, precision of each datum in units of the rows of
            the past: one when the noise is shared.
        s: ``(*batch,)`` noise scale of the rows.
        jitter: Relative jitter of inducing points.
        num_inducing: The largest number of points allowed.
        num_updates: Updates of the stream so far.
        num_new: How many of the data, the last ones, are new; ``None`` for all.
    """

    kernel: Kernel
    z_a: Tensor
    z_s: Tensor
    past: PseudoObservations
    x: Tensor
    weight: Tensor
    s: Tensor
    jitter: float
    num_inducing: int
    num_updates: int = 0
    num_new: int | None = None

    @property
    def points(self) -> Tensor:
        """All candidates, ``(*batch, m_s + n, d)``."""
        return torch.cat([self.z_s, self.x], -2)

    @property
    def x_new(self) -> Tensor:
        """New inputs alone."""
        num_new = self.x.size(-2) if self.num_new is None else self.num_new
        return self.x[..., self.x.size(-2) - num_new :, :]


class InducingPolicy(ABC):
    """Chooses the points that a compression leaves."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in OF_VERSION_02:
            if name in vars(cls):
                warn(
                    f"{cls.__name__}.{name} is never called: policies are asked at "
                    "compressions only. Leave it out; __call__ chooses the points.",
                    DeprecationWarning,
                )

    @abstractmethod
    def __call__(self, candidates: Candidates) -> Tensor:
        """Choose inducing points ``(*batch, m_b, d)`` among the candidates."""

    def advice(self, num_inducing: int, budget: int) -> str:
        """What to change where ``num_inducing`` points of a budget lost too much."""
        del num_inducing, budget
        return "Raise num_inducing"


class KeepOld(InducingPolicy):
    """Keep every old point; new inputs, evenly thinned, fill what room is left."""

    def __call__(self, candidates: Candidates) -> Tensor:
        x, old = candidates.x_new, candidates.z_a[..., : candidates.num_inducing, :]
        room = min(candidates.num_inducing - old.size(-2), x.size(-2))
        return torch.cat([old, x[..., evenly(x, room), :]], -2)


class RandomReplace(InducingPolicy):
    """Replace a fraction of the old points by random new inputs, as the paper does.

    Args:
        fraction: Share of the budget that new inputs take.
        seed: Seed; what is drawn depends on it and on the number of updates so far,
            so a stream that was saved and loaded goes on as it would have.
    """

    def __init__(self, fraction: float = 0.3, seed: int = 0) -> None:
        if not (is_number(fraction) and 0 <= fraction <= 1):
            raise wrong("fraction", fraction, "a number in [0, 1]")
        self.fraction = float(fraction)
        self.seed = check_positive_int(seed, "seed", at_least=0)

    def __call__(self, candidates: Candidates) -> Tensor:
        z_a, x, budget = candidates.z_a, candidates.x_new, candidates.num_inducing
        seed = self.seed * 1_000_003 + candidates.num_updates
        generator = torch.Generator().manual_seed(seed % 2**63)
        least = min(round(self.fraction * budget), x.size(-2))
        num_old = min(z_a.size(-2), budget - least)
        num_new = min(x.size(-2), budget - num_old)
        old = torch.randperm(z_a.size(-2), generator=generator)[:num_old].sort().values
        new = torch.randperm(x.size(-2), generator=generator)[:num_new]
        old, new = old.to(x.device), new.to(x.device)
        return torch.cat([z_a[..., old, :], x[..., new, :]], -2)


class Ranking(NamedTuple):
    """Candidates in the order in which a greedy policy takes them.

    Attributes:
        points: ``(*batch, m, d)``.
        loss: ``(*batch, m)``, nats lost by projecting on the points up to this one.
    """

    points: Tensor
    loss: Tensor


class GreedyPolicy(InducingPolicy):
    """Takes one point after the other, the one with the best score first.

    Args:
        max_candidates: New inputs beyond this number are thinned out evenly.
    """

    def __init__(self, max_candidates: int = 1000) -> None:
        self.max_candidates = check_positive_int(max_candidates, "max_candidates")

    @abstractmethod
    def score(self, e: Tensor, h: Tensor) -> Tensor:
        r"""Scores ``(*batch, k)`` of all candidates.

        Args:
            e: ``(*batch, k)``, their unexplained variance, the diagonal of :math:`E`.
            h: ``(*batch, k)``, the diagonal of :math:`E W^\top W E`.
        """

    def __call__(self, candidates: Candidates) -> Tensor:
        return self.rank(candidates).points

    def rank(self, candidates: Candidates) -> Ranking:
        """At most ``num_inducing`` points that differ by more than rounding."""
        limit = max(self.max_candidates, 2 * candidates.num_inducing)
        x, weight = thinned(candidates.x, candidates.weight, limit)
        points, U = torch.cat([candidates.z_s, x], -2), candidates.past.U
        # Jitter is part of the prior at inducing points, and of what is lost there.
        K, _, jitter = inducing_gram(candidates.kernel, points, candidates.jitter)
        old = torch.zeros_like(jitter[..., : U.size(-1)])
        is_new = torch.cat([old, torch.ones_like(weight)], -1)
        taken = take(
            K,
            Observed(U.mT @ U, weight),
            min(candidates.num_inducing, points.size(-2)),
            self.score,
            # Jitter may hide a new point behind others, never an old one.
            floor=3 * jitter * is_new,
        )
        # New data are observed without jitter, unless they are inducing points.
        excess = jitter * torch.cat([old, weight], -1)
        t = taken.t - excess.sum(-1)
        gain = taken.gain - excess.gather(-1, taken.order) * taken.useful
        left = (t.unsqueeze(-1) - gain.cumsum(-1)).clamp_min(0)
        loss = left / (2 * candidates.s.unsqueeze(-1))
        return Ranking(pick(points, taken.order), loss)


class GreedyVariance(GreedyPolicy):
    """Take the candidate whose value is least certain given those taken.

    Pivoted Cholesky of the prior covariance: points spread over all inputs, old and
    new, whatever was observed there.

    Args:
        max_candidates: New inputs beyond this number are thinned out evenly.
    """

    def score(self, e: Tensor, h: Tensor) -> Tensor:
        """The unexplained variance."""
        return e


class GreedyInformation(GreedyPolicy):
    r"""Take the candidate that lowers the loss :math:`t` of the bound most.

    Candidate :math:`j` lowers it by :math:`\|W E_{:j}\|^2 / E_{jj}`: points the past
    relies on stay, and useless ones go.

    Args:
        max_candidates: New inputs beyond this number are thinned out evenly.
    """

    def score(self, e: Tensor, h: Tensor) -> Tensor:
        """What the loss falls by."""
        return information(e, h)


class AdaptiveBudget(InducingPolicy):
    """Take points until what is lost no longer matters.

    The number of points grows in new territory, stays where a stream repeats itself,
    and shrinks when the kernel grows smoother.

    Args:
        tolerance: Nats per datum that may be lost; where data say less than a nat
            each, this fraction of what they say.
        min_inducing: Smallest number of points, if there are so many to tell apart.
        max_inducing: Largest number, if ``num_inducing`` of the model is not less.
        policy: The order in which points are taken; ``GreedyInformation`` by default.
    """

    def __init__(
        self,
        tolerance: float = 1e-3,
        min_inducing: int = 1,
        max_inducing: int | None = None,
        policy: GreedyPolicy | None = None,
    ) -> None:
        if not (is_number(tolerance) and tolerance > 0):
            raise wrong("tolerance", tolerance, "nats per datum above zero")
        least = check_positive_int(min_inducing, "min_inducing")
        if max_inducing is not None:
            max_inducing = check_positive_int(max_inducing, "max_inducing", least)
        if policy is not None:
            check_module(policy, "policy", GreedyPolicy, "GreedyInformation()")
        self.tolerance = float(tolerance)
        self.min_inducing, self.max_inducing = least, max_inducing
        self.policy = policy or GreedyInformation()

    def __call__(self, candidates: Candidates) -> Tensor:
        budget = candidates.num_inducing
        most = min(self.max_inducing or budget, budget)
        points, loss = self.policy.rank(candidates._replace(num_inducing=most))
        enough = self._enough(candidates).unsqueeze(-1)
        count = int((loss > enough).sum(-1).max()) + 1
        return points[..., : max(count, self.min_inducing), :]

    def advice(self, num_inducing: int, budget: int) -> str:
        """The limit that was met: the tolerance, if there was room."""
        if num_inducing < min(self.max_inducing or budget, budget):
            return "Lower tolerance of the inducing_policy"
        if self.max_inducing and self.max_inducing < budget:
            return "Raise max_inducing of the inducing_policy"
        return super().advice(num_inducing, budget)

    def _enough(self, candidates: Candidates) -> Tensor:
        """Nats that may be lost, ``(*batch,)``."""
        U, kernel = candidates.past.U, candidates.kernel
        said = (candidates.weight * variances(kernel, candidates.x)).sum(-1)
        if candidates.z_s.size(-2):
            K_ss = inducing_gram(kernel, candidates.z_s, candidates.jitter).K_zz
            said = said + ((U @ K_ss) * U).sum((-2, -1))
        num_data = candidates.past.n + (candidates.weight > 0).sum(-1)
        return self.tolerance * (said / (2 * candidates.s)).minimum(num_data)


class AllocatorPolicy(InducingPolicy):
    """Let one of BoTorch's ``InducingPointAllocator`` objects choose.

    Args:
        allocator: Anything with BoTorch's ``allocate_inducing_points``, such as
            ``GreedyVarianceReduction()``.
    """

    def __init__(self, allocator: Any) -> None:
        allocate = getattr(allocator, "allocate_inducing_points", None)
        if isinstance(allocator, type) or not callable(allocate):
            raise ArgumentError(
                f"allocator is {kind_of(allocator)}; expected an object with "
                "allocate_inducing_points, as BoTorch's InducingPointAllocator."
            )
        self.allocator = allocator

    def __call__(self, candidates: Candidates) -> Tensor:
        points = candidates.points
        return self.allocator.allocate_inducing_points(
            inputs=points,
            covar_module=candidates.kernel,
            num_inducing=min(candidates.num_inducing, points.size(-2)),
            input_batch_shape=points.shape[:-2],
        )

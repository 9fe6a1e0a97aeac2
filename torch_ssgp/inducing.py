"""Policies that choose the next inducing points from the old ones and the new data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from torch_ssgp.exceptions import Breakdown
from torch_ssgp.functional import PseudoObservations, matvec
from torch_ssgp.modules import inducing_gram


class Candidates(NamedTuple):
    """Where the next inducing points may lie, and what relies on them.

    Attributes:
        kernel: Prior covariance with the hyperparameters known so far.
        z_a: ``(*batch, m_a, d)`` old inducing points.
        past: Pseudo-observations at ``z_a``.
        x: ``(*batch, n, d)`` new inputs.
        weight: ``(*batch, n)``, precision of each new datum in units of the rows of
            the past: one when the noise is shared.
        s: ``(*batch,)`` noise scale of the rows.
        num_inducing: The largest number of points allowed.
    """

    kernel: Kernel
    z_a: Tensor
    past: PseudoObservations
    x: Tensor
    weight: Tensor
    s: Tensor
    num_inducing: int


class InducingPolicy(ABC):
    """Chooses ``Z_b``; called once per update, before the inner loop."""

    @abstractmethod
    def __call__(self, candidates: Candidates) -> Tensor:
        """Choose inducing points ``(*batch, m_b, d)`` among the candidates."""


class GreedyInformation(InducingPolicy):
    r"""Greedily minimise what the bound loses by projecting on the chosen points.

    With :math:`E = K - Q` the residual prior covariance of all candidates and
    :math:`W` the rows that observe them (``U`` of the past, the new data), the loss
    is :math:`t = \mathrm{tr}\, W E W^\top` and candidate :math:`j` lowers it by

    .. math:: \|W E_{:j}\|^2 / E_{jj},

    so points the past relies on stay and useless ones go.

    Args:
        max_candidates: New inputs beyond this number are thinned out evenly.
    """

    def __init__(self, max_candidates: int = 1000) -> None:
        self.max_candidates = max_candidates

    def __call__(self, candidates: Candidates) -> Tensor:
        """Choose inducing points ``(*batch, m_b, d)`` among the candidates."""
        x, weight = candidates.x, candidates.weight
        num_new = x.size(-2)
        limit = max(self.max_candidates, 2 * candidates.num_inducing)
        if num_new > limit:
            keep = torch.linspace(0, num_new - 1, limit, device=x.device).long()
            x, weight = x[..., keep, :], weight[..., keep] * (num_new / limit)
        points = torch.cat([candidates.z_a, x], -2)
        chosen = _greedy(
            inducing_gram(candidates.kernel, points, 0.0).K_zz,
            candidates.past.U,
            weight,
            min(candidates.num_inducing, points.size(-2)),
        )
        index = chosen.unsqueeze(-1).expand(*chosen.shape, points.size(-1))
        return points.gather(-2, index)


def _greedy(K: Tensor, U: Tensor, weight: Tensor, num_inducing: int) -> Tensor:
    """Indices ``(*batch, m)`` of the candidates that lower the loss most."""
    num_old = U.size(-1)
    e = K.diagonal(dim1=-2, dim2=-1).clone()  # diagonal of E
    floor = 1e-8 * e
    W = torch.cat(
        [_gram_weight(U, K[..., :num_old, :]), weight[..., None] * K[..., num_old:, :]],
        -2,
    )
    h = (K * W).sum(-2)  # diagonal of E Wᵀ W E
    columns = K.new_zeros(*K.shape[:-1], num_inducing)
    chosen, useful = [], []
    for k in range(num_inducing):
        score = torch.where(e > floor, h.clamp_min(0) / e, -torch.inf)
        best, j = score.max(-1, keepdim=True)
        if k % 10 == 0 and bool((best == -torch.inf).all()):
            break
        chosen.append(j)
        useful.append(best > -torch.inf)
        C = columns[..., :k]
        column = K.gather(-1, j.unsqueeze(-2).expand(*K.shape[:-1], 1)).squeeze(-1)
        row_j = C.gather(-2, j.unsqueeze(-1).expand(*C.shape[:-2], 1, k))
        pivot = e.gather(-1, j).clamp_min(1e-300)
        c = (column - (C @ row_j.mT).squeeze(-1)) / pivot.sqrt()
        v = torch.cat(
            [
                _gram_weight(U, c[..., :num_old, None]).squeeze(-1),
                weight * c[..., num_old:],
            ],
            -1,
        )
        Ev = matvec(K, v) - matvec(C, matvec(C.mT, v))
        h = h - 2 * c * Ev + c.square() * (c * v).sum(-1, keepdim=True)
        e = (e - c.square()).scatter(-1, j, 0.0)
        columns[..., k] = c
    # Steps after the last useful candidate chose copies of what is already there.
    used = torch.cat(useful, -1).reshape(-1, len(useful)).any(0) if useful else None
    if used is None or not bool(used.any()):
        raise Breakdown("the prior covariance of the candidates is NaN or zero")
    return torch.cat(chosen, -1)[..., : int(used.sum())]


def _gram_weight(U: Tensor, V: Tensor) -> Tensor:
    return U.mT @ (U @ V)

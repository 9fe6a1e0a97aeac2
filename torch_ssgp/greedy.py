r"""Take one point after the other, the best first.

With :math:`W` the rows that observe the candidates and :math:`E` their prior covariance
that the points taken so far leave unexplained, projecting on these points loses
:math:`t / 2s` nats, :math:`t = \mathrm{tr}\, W E W^\top`. Candidate :math:`j` lowers
:math:`t` by :math:`(E W^\top W E)_{jj} / E_{jj}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp.exceptions import Breakdown

BLOCK = 16  # choices between two looks at what is left, at most: a device waits there


class Observed(NamedTuple):
    r"""What rows say about candidates: :math:`W^\top W`, block by block.

    Attributes:
        old: ``(*batch, m, m)``, of the first candidates.
        weight: ``(*batch, n)``, of the others, each observed alone.
    """

    old: Tensor
    weight: Tensor

    def __matmul__(self, V: Tensor) -> Tensor:
        """``Wᵀ W V``."""
        num_old = self.old.size(-1)
        new = self.weight.unsqueeze(-1) * V[..., num_old:, :]
        return torch.cat([self.old @ V[..., :num_old, :], new], -2)


class Taken(NamedTuple):
    """Candidates in the order in which they were taken.

    Attributes:
        order: ``(*batch, m)``, their indices.
        t: ``(*batch, m)``, what is lost with the points up to this one.
        useful: ``(*batch, m)``, whether it was a new point, or a copy because a stream
            had no more to tell apart.
    """

    order: Tensor
    t: Tensor
    useful: Tensor


def information(e: Tensor, h: Tensor) -> Tensor:
    """What ``t`` falls by.

    Args:
        e: ``(*batch, k)``, unexplained variance of the candidates, the diagonal of E.
        h: ``(*batch, k)``, the diagonal of ``E Wᵀ W E``.
    """
    return h / e


def take(
    K: Tensor,
    observed: Observed,
    count: int,
    score: Callable[[Tensor, Tensor], Tensor],
    *,
    floor: Tensor,
    excess: Tensor,
    enough: Tensor | None = None,
    at_least: int = 1,
    first: Tensor | None = None,
) -> Taken:
    """At most ``count`` candidates, the one with the best score first.

    Args:
        K: ``(*batch, k, k)``, prior covariance of the candidates, with jitter.
        observed: What rows say about them.
        count: How many to take.
        score: From the diagonals of ``E`` and ``E Wᵀ W E``, see :func:`information`.
        floor: ``(*batch, k)``, unexplained variance of what cannot be told apart.
        excess: ``(*batch, k)``, the part of ``t`` that is jitter alone.
        enough: ``(*batch,)``, values of ``t`` below which no more are needed.
        at_least: Number of points to take in any case.
        first: ``(*batch, k)``, candidates to be taken before all others.
    """
    E = K.clone()
    e = K.diagonal(dim1=-2, dim2=-1).clone()  # diagonal of E
    WK = observed @ K
    h = (K * WK).sum(-2)  # diagonal of E Wᵀ W E
    t = WK.diagonal(dim1=-2, dim2=-1).sum(-1) - excess.sum(-1)
    chosen: list[Tensor] = []
    losses: list[Tensor] = []
    useful: list[Tensor] = []
    while len(chosen) < count:
        # E and h follow after every block of points, in one product. Within it
        # e is exact, and h falls with its square as that of a neighbour does.
        shape = h.clamp_min(0) / torch.where(e > 0, e, 1).square()
        size = max(min(len(chosen) // 8, BLOCK, count - len(chosen)), 1)
        C = K.new_zeros(*K.shape[:-2], size, K.size(-1))
        for k in range(size):
            scores = score(e, shape * e.square())
            if first is not None:
                scores = torch.where(first, torch.inf, scores)
            best, j = torch.where(e > floor, scores, -torch.inf).max(-1, keepdim=True)
            row = E.gather(-2, j.unsqueeze(-1).expand(*j.shape, E.size(-1)))
            done = C[..., :k, :]
            at_j = done.gather(-1, j.unsqueeze(-2).expand(*done.shape[:-1], 1))
            # A stream that has no more to tell apart takes a copy, which says nothing.
            is_new = best > -torch.inf
            pivot = torch.where(is_new, e.gather(-1, j), torch.inf)
            c = (row - at_j.mT @ done).squeeze(-2) * pivot.rsqrt()
            e = e.addcmul(c, c, value=-1).scatter(-1, j, 0.0)
            C[..., k, :] = c
            chosen.append(j)
            useful.append(is_new)
        V = observed @ C.mT
        CV = C @ V
        h = h + (C * (CV @ C - 2 * (E @ V).mT)).sum(-2)
        E -= C.mT @ C
        spent = excess.gather(-1, torch.cat(chosen[-size:], -1))
        gain = CV.diagonal(dim1=-2, dim2=-1) - spent
        gain = torch.where(torch.cat(useful[-size:], -1), gain, 0)
        losses += (t.unsqueeze(-1) - gain.cumsum(-1)).clamp_min(0).unbind(-1)
        t = losses[-1]
        stop = ~useful[-1].squeeze(-1)
        if enough is not None and len(chosen) >= at_least:
            stop = stop | (t <= enough)
        if bool(stop.all()):
            break
    # Steps after the last useful candidate chose copies of what is already there.
    num_useful = 0
    if useful:
        num_useful = int(torch.cat(useful, -1).reshape(-1, len(useful)).any(0).sum())
    if num_useful == 0:
        if not bool(torch.isfinite(K).all()):
            raise Breakdown("the prior covariance of the candidates is not finite")
        # The function is known there, as that of a linear kernel is at zero.
        none = torch.zeros_like(e[..., :1], dtype=torch.long)
        return Taken(none, t.unsqueeze(-1), none.bool())
    parts = torch.cat(chosen, -1), torch.stack(losses, -1), torch.cat(useful, -1)
    return Taken(*(part[..., :num_useful] for part in parts))

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

    def after(self, V: Tensor) -> Tensor:
        """``V Wᵀ W``."""
        num_old = self.old.size(-1)
        new = self.weight.unsqueeze(-2) * V[..., num_old:]
        return torch.cat([V[..., :num_old] @ self.old, new], -1)


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
    e = K.diagonal(dim1=-2, dim2=-1).clone()  # diagonal of E
    KW = observed.after(K)
    h = (K * KW).sum(-1)  # diagonal of E Wᵀ W E
    t = KW.diagonal(dim1=-2, dim2=-1).sum(-1) - excess.sum(-1)
    # E = K - CᵀC is never formed: a row, or a product with a few vectors, is cheaper.
    C = K.new_zeros(*K.shape[:-2], count, K.size(-1))
    chosen: list[Tensor] = []
    losses: list[Tensor] = []
    useful: list[Tensor] = []
    while len(chosen) < count:
        # h follows after every block of points, in one product. Within it e is exact,
        # and h falls with its square as that of a neighbour does.
        num_before = len(chosen)
        shape = h.clamp_min(0) / torch.where(e > 0, e, 1).square()
        size = max(min(num_before // 8, BLOCK, count - num_before), 1)
        for k in range(num_before, num_before + size):
            scores = score(e, shape * e.square())
            if first is not None:
                scores = torch.where(first, torch.inf, scores)
            best, j = torch.where(e > floor, scores, -torch.inf).max(-1, keepdim=True)
            row = K.gather(-2, j.unsqueeze(-1).expand(*j.shape, K.size(-1)))
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
        before, new = C[..., :num_before, :], C[..., num_before : num_before + size, :]
        # Few rows times a matrix: its transpose takes twice the time.
        V = observed.after(new)
        VC = V @ new.mT
        VE = V @ K - (V @ before.mT) @ before
        h = h + (new * (VC @ new - 2 * VE)).sum(-2)
        spent = excess.gather(-1, torch.cat(chosen[-size:], -1))
        gain = VC.diagonal(dim1=-2, dim2=-1) - spent
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

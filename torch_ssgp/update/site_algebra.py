"""The algebra of Gaussian sites: q from sites, and where its gradient points.

Letters are those of :mod:`torch_ssgp.update.sites`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import likelihoods
from torch_ssgp.functional import PriorBlocks, PseudoObservations

# A site's pseudo-target lies at most this many prior standard deviations from the mean
# it was made at: beyond, the site is linear for all purposes, and no row can be.
MAX_DISTANCE = 1e3
MIN_PRECISION = 1e-30  # of a site that says nothing


class Sites(NamedTuple):
    r"""Natural parameters of the sites of one batch.

    Attributes:
        linear: ``(*batch, n)``, :math:`\lambda_i`.
        precision: ``(*batch, n)``, :math:`\beta_i \ge 0`.
    """

    linear: Tensor
    precision: Tensor

    @property
    def target(self) -> Tensor:
        r"""Pseudo-targets :math:`\lambda_i / \beta_i`, ``(*batch, n)``."""
        return self.linear / self.precision.clamp_min(MIN_PRECISION)

    def move(self, other: Sites, step: Tensor) -> Sites:
        """Go the fraction ``step`` ``(*batch,)`` of the way to ``other``.

        A site stays where the other one is not finite.
        """
        good = torch.isfinite(other.linear) & torch.isfinite(other.precision)
        return Sites(
            torch.lerp(self.linear, other.linear, step),
            torch.lerp(self.precision, other.precision, step),
        ).where(good, self)

    def where(self, condition: Tensor, other: Sites) -> Sites:
        """These sites where ``condition`` holds, else ``other``."""
        return Sites(
            torch.where(condition, self.linear, other.linear),
            torch.where(condition, self.precision, other.precision),
        )


class Basis(NamedTuple):
    r"""New data and past in the coordinates :math:`w = L^{-1} (b - m_b)`.

    Attributes:
        A_f: ``(*batch, m, n)``, how data depend on ``w``.
        k_f: ``(*batch, n)``, prior variance of the data.
        lost_f: ``(*batch, n)``, the part of it that ``w`` does not explain.
        m_f: ``(*batch, n)``, prior mean at the data.
        G: ``(*batch, m, p)``, how pseudo-observations depend on ``w``.
        r_a: ``(*batch, p)``, pseudo-observations minus their prior mean.
        lost_a: ``(*batch,)``, what projecting the past loses.
        rest: ``(*batch,)``, what else does not depend on q: residual, and the constant
            of the data of the past.
    """

    A_f: Tensor
    k_f: Tensor
    lost_f: Tensor
    m_f: Tensor
    G: Tensor
    r_a: Tensor
    lost_a: Tensor
    rest: Tensor


class Marginals(NamedTuple):
    r"""q at the new data, and what it costs.

    Attributes:
        mean: ``(*batch, n)``.
        variance: ``(*batch, n)``.
        cost: ``(*batch,)``, :math:`KL(q \| p) - E_q \log p(past \mid a)`.
    """

    mean: Tensor
    variance: Tensor
    cost: Tensor


def basis(prior: PriorBlocks, past: PseudoObservations) -> Basis:
    """The coordinates of data and past, which is in site form."""
    white = fn.whiten(prior, past)
    return Basis(
        A_f=white.A_f,
        k_f=prior.k_ff,
        lost_f=white.lost_f,
        m_f=prior.m_f,
        G=white.G,
        r_a=white.r_a,
        lost_a=white.lost_a.sum(-1),
        rest=past.rho + past.n * fn.LOG_2PI,
    )


def marginals(basis: Basis, sites: Sites) -> Marginals:
    r"""The posterior of sites and past, at the data.

    .. math::
        KL - E \log p(past) = \tfrac12 [\log |D| + \|\mu\|^2
            - \textstyle\sum_i \beta_i \|L_D^{-1} A_{fi}\|^2
            + \|r_a - G^\top \mu\|^2 + rest].

    Nothing is divided by a precision, so sites may be uninformative.
    """
    A_f, G = fn.broadcast_matrices(basis.A_f, basis.G)
    eye = torch.eye(A_f.size(-2), dtype=A_f.dtype, device=A_f.device)
    weighted = A_f * sites.precision.unsqueeze(-2)
    L_D = fn.cholesky(eye + weighted @ A_f.mT + G @ G.mT)
    shift = fn.matvec(A_f, sites.linear - sites.precision * basis.m_f)
    h = (shift + fn.matvec(G, basis.r_a)).unsqueeze(-1)
    solved = fn.solve_lower(L_D, torch.cat(fn.broadcast_matrices(A_f, h), -1))
    B_f, c = solved[..., :-1], solved[..., -1:]
    mu = torch.linalg.solve_triangular(L_D.mT, c, upper=True).squeeze(-1)
    explained = fn.squared_norm(B_f, -2)
    cost = (
        fn.log_det(L_D)
        + fn.squared_norm(mu)
        - (sites.precision * explained).sum(-1)
        + fn.squared_norm(basis.r_a - fn.matvec(G.mT, mu))
        + basis.lost_a
        + basis.rest
    )
    return Marginals(
        mean=basis.m_f + fn.matvec(A_f.mT, mu),
        variance=(basis.lost_f + explained).clamp_min(likelihoods.MIN_VARIANCE),
        cost=0.5 * cost,
    )


class EStep(NamedTuple):
    """Sites, their bound ``(*batch,)``, and where the natural gradient points."""

    sites: Sites
    bound: Tensor
    goal: Sites


def natural_gradient(
    basis: Basis, q: Marginals, log_prob: Tensor, seen: Tensor | None = None
) -> Sites:
    """Where a natural-gradient step of size one would put the sites.

    The expected log-likelihood ``log_prob`` ``(*batch, n)`` is a function of ``q``.
    Data that count, those ``seen``, get precisions above zero.
    """
    slope, curve = torch.autograd.grad(
        log_prob.sum(), (q.mean, q.variance), retain_graph=True
    )
    k_f = basis.k_f.detach()
    # Where a likelihood curves upwards its magnitude takes the place of a negative
    # precision: for heavy tails that is the weight of reweighted least squares.
    floor = slope.abs() / (MAX_DISTANCE * k_f.sqrt()) + 1e-12 / k_f
    precision = (-2 * curve).abs().maximum(floor)
    if seen is not None:
        precision = precision.where(seen, 0)
    return Sites(slope + precision * q.mean.detach(), precision)


def gap(basis: Basis, now: EStep) -> Tensor:
    """Size of the natural gradient ``(*batch,)``, in units of the prior."""
    linear = (now.goal.linear - now.sites.linear) * basis.k_f.sqrt()
    precision = (now.goal.precision - now.sites.precision) * basis.k_f
    size = torch.maximum(linear.abs(), precision.abs())
    return size.amax(-1) if size.size(-1) else size.sum(-1)

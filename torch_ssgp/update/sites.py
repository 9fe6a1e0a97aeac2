r"""Gaussian sites: streaming with any likelihood.

Each new datum gets a Gaussian site in its function value,

.. math:: \log t_i(f_i) = \lambda_i f_i - \tfrac12 \beta_i f_i^2, \quad \beta_i > 0,

and q(b) is the posterior of *sites + pseudo-observations*: with
:math:`A_f = L^{-1} K_{bf}`, :math:`G = L^{-1} K_{ba} U^\top`,

.. math::
    D = I + A_f \mathrm{diag}(\beta) A_f^\top + G G^\top, \quad
    \mu = D^{-1} [A_f (\lambda - \beta m_f) + G r_a], \quad
    q(b) = N(m_b + L \mu, L D^{-1} L^\top).

The bound is the evidence lower bound of that q, for any sites:

.. math::
    F = \sum_i E_q \log p(y_i \mid f_i) - KL(q(b) \| p(b)) + E_q \log p(past \mid a).

*E-step* (natural gradients of q, Khan & Lin 2017): move the sites towards

.. math::
    \beta_i^* = -2\, \partial_{v_i} E_q \log p(y_i \mid f_i), \quad
    \lambda_i^* = \partial_{m_i} E_q \log p(y_i \mid f_i) + \beta_i^* m_i,

where they stay if and only if F is stationary in q. *M-step*: gradient steps on
hyperparameters and inducing points with the sites held, which is tighter than holding q
(Adam, Chang, Khan & Solin 2021). What is absorbed are rows of a regression with noise
:math:`1 / \beta_i`, so the past looks the same whatever the likelihood was.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import likelihoods
from torch_ssgp.kernels import Values
from torch_ssgp.memory import Data, GaussianData, Rows, extremes
from torch_ssgp.modules import variances
from torch_ssgp.points import evenly
from torch_ssgp.prediction import Predictor
from torch_ssgp.rows import log_density
from torch_ssgp.update.objective import Evaluated, Objective, Prior
from torch_ssgp.update.site_algebra import (
    MIN_PRECISION,
    Basis,
    EStep,
    Marginals,
    Sites,
    basis,
    gap,
    marginals,
    natural_gradient,
)
from torch_ssgp.update.young import Grid

SECANT_LENGTH = 2.0  # standard deviations, see `secant_sites`
TOLERANCE = 1e-8  # of natural gradients, in units of the prior
MAX_ITERATIONS = 200
ROUND = 10  # steps of L-BFGS between two E-phases
CHECK_EVERY = 5  # iterations between two looks at the residual: a device waits there


class SiteObjective(Objective):
    """The bound of one update with a likelihood that is not Gaussian.

    :meth:`bound` takes an E-step, so a loop over gradient steps alternates E and M;
    :meth:`as_gaussian` ends with E-steps until the sites converge. Data in the memory
    start from their earlier sites.
    """

    round_length = ROUND
    sites: Sites | None = None
    known: Sites | None = None  # sites of the first data, from earlier updates
    step: Tensor  # size of E-steps, (*batch,); lasts from one E-step to the next
    moving: bool = True
    _last_bound: Tensor | None = None

    @property
    def coupled(self) -> bool:
        """Whether the last batch dimension is classes that share their data."""
        return likelihoods.couples_classes(self.likelihood)

    def initialize(self, grid: Grid | None = None) -> None:
        """Initialise hyperparameters that the user has not set, in place."""
        # Here, since that module needs this one.
        from torch_ssgp.update.site_initialization import initialize_sites

        self.sites = None
        initialize_sites(self)

    def recall_sites(self, old: GaussianData) -> None:
        """Start from the earlier sites of the first data."""
        if old.target.size(-1) == 0:
            return
        assert old.noise is not None
        precision = 1 / old.noise
        if self.data.weight is not None:
            precision = precision * self.data.weight[..., : precision.size(-1)]
        self.known = Sites(precision * old.target, precision)

    @property
    def is_readable(self) -> bool:
        """It is not: the likelihood has hyperparameters of its own."""
        return False

    def basis(self) -> Basis:
        """Coordinates of data and past at the present hyperparameters and points."""
        return basis(self.blocks(self.evaluate()), self.past)

    def noises(self, now: Evaluated) -> tuple[Tensor, Tensor]:
        """Noise of the sites of data of weight one ``(*batch, n)``; scale one."""
        if self.sites is None:
            self.guess_sites()
        assert self.sites is not None
        return self._noise(self.sites), self.data.y.new_ones(self.batch_shape)

    def _noise(self, sites: Sites) -> Tensor:
        noise = 1 / sites.precision.clamp_min(MIN_PRECISION)
        weight = self.data.weight
        if weight is None:
            return noise
        # What has no weight has no precision either: any noise will do.
        return torch.where(weight > 0, noise * weight, 1.0)

    @torch.no_grad()
    def spread(self) -> Tensor:
        """Typical size of the function ``(*batch,)``, the unit of a constant mean."""
        k_ff = variances(self.kernel, self.data.x)
        return k_ff.mean(-1).sqrt().expand(self.batch_shape)

    def raise_jitter(self) -> bool:
        """Take the next larger jitter; ``False`` if there is none."""
        self.sites = self._last_bound = None
        return super().raise_jitter()

    # -- E-steps --------------------------------------------------------------------

    @torch.no_grad()
    def guess_sites(self, num_points: int = 50, num_iterations: int = 10) -> Tensor:
        """Sites from a few E-steps with provisional inducing points, and their bound.

        Points are the old inducing points and ``num_points`` of the new inputs.
        """
        x = self.x
        keep = evenly(x, min(num_points, x.size(-2)))
        self.start_at(torch.cat([self.z_a, x[..., keep, :]], -2))
        return self.settle(self.basis(), num_iterations, tolerance=0.0)[-1]

    def expected_log_prob(self, q: Marginals) -> Tensor:
        """Shares of the expected log-likelihood, ``(*batch, n)``, times weights."""
        log_prob = likelihoods.expected_log_prob(
            self.likelihood, self.data.y, q.mean, q.variance
        )
        return log_prob if self.data.weight is None else self.data.weight * log_prob

    @torch.no_grad()
    def evaluate_sites(self, basis: Basis, sites: Sites) -> EStep:
        """Bound and natural gradient at the given sites."""
        q = marginals(basis, sites)
        with torch.enable_grad():
            q = q._replace(
                mean=q.mean.requires_grad_(), variance=q.variance.requires_grad_()
            )
            log_prob = self.expected_log_prob(q)
            goal = natural_gradient(basis, q, log_prob, self.data.seen)
        return EStep(sites, log_prob.detach().sum(-1) - q.cost, goal)

    def first_step(self, basis: Basis) -> EStep:
        """Evaluate the sites there are; at first, new ones that say nothing."""
        if self.sites is None:
            nothing = torch.zeros_like(basis.m_f.expand(self.data.y.shape))
            self.sites = Sites(nothing, nothing)
            if self.known is not None:
                rest = nothing[..., self.known.linear.size(-1) :]
                self.sites = Sites(*(torch.cat([k, rest], -1) for k in self.known))
            self.step = nothing.new_ones(nothing.shape[:-1])
        return self.evaluate_sites(basis, self.sites)

    def next_step(self, basis: Basis, now: EStep) -> EStep:
        """Go where the natural gradient points, unless the bound would decrease.

        This does not wait for the device: a rejected step changes nothing but halves
        the next one.
        """
        step = self.step.unsqueeze(-1)
        trial = self.evaluate_sites(basis, now.sites.move(now.goal, step))
        change = trial.bound - now.bound
        slack = 1e-13 * now.bound.abs()
        if self.coupled:
            change = change.sum(-1, keepdim=True).expand(change.shape)
            slack = slack.sum(-1, keepdim=True)
        better = change >= -slack
        # Near the end the bound is too flat to tell that steps are too long.
        closer = gap(basis, trial) <= gap(basis, now)
        if self.coupled:
            closer = closer.all(-1, keepdim=True).expand(closer.shape)
        longer = torch.where(
            closer, (1.5 * self.step).clamp_max(1), (0.7 * self.step).clamp_min(0.3)
        )
        self.step = torch.where(better, longer, self.step / 2)

        per_site = better.unsqueeze(-1)
        return EStep(
            trial.sites.where(per_site, now.sites),
            torch.where(better, trial.bound, now.bound),
            trial.goal.where(per_site, now.goal),
        )

    @torch.no_grad()
    def settle(
        self,
        basis: Basis,
        max_iterations: int = MAX_ITERATIONS,
        tolerance: float = TOLERANCE,
    ) -> Tensor:
        """E-steps until the natural gradient is below ``tolerance``.

        Returns the bound along the way, ``(iterations + 1, *batch)``.
        """
        now = self.first_step(basis)
        trace = [now.bound]
        self.settled = False
        for i in range(1, max_iterations + 1):
            now = self.next_step(basis, now)
            trace.append(now.bound)
            if i % CHECK_EVERY == 0 and tolerance > 0:
                self.settled = bool((gap(basis, now) < tolerance).all())
                if self.settled:
                    break
        self.sites = now.sites
        return torch.stack(trace)

    def secant_sites(self, basis: Basis, sites: Sites) -> Sites:
        r"""Sites that still hold when later data move the function.

        A datum that q explains well has a site with almost no precision, and later
        updates would not know about it. So the precision is at least that of the secant

        .. math:: \beta_i = \frac{g_i(m_i - d_i) - g_i(m_i)}{d_i}, \quad
            g_i = \partial_{m_i} E_q \log p(y_i \mid f_i),

        over a move :math:`d_i` back towards the prior mean, by at most
        ``SECANT_LENGTH`` standard deviations of q. Slopes at :math:`m_i` stay, hence
        so does the mean of q.
        """
        q = marginals(basis, sites)
        back = basis.m_f - q.mean
        limit = SECANT_LENGTH * q.variance.sqrt()
        move = torch.maximum(torch.minimum(back, limit), -limit)
        far = move.abs() > 1e-3 * basis.k_f.sqrt()
        now = self._slope(q.mean, q.variance)
        then = self._slope(q.mean + move, q.variance)
        secant = torch.where(far, (now - then) / torch.where(far, move, 1), 0)
        precision = sites.precision.maximum(secant)
        return Sites(now + precision * q.mean, precision)

    @torch.enable_grad()
    def _slope(self, mean: Tensor, variance: Tensor) -> Tensor:
        mean = mean.detach().requires_grad_()
        q = Marginals(mean, variance, mean)
        return torch.autograd.grad(self.expected_log_prob(q).sum(), mean)[0]

    # -- what the inner loop and the model see --------------------------------------

    def bound(self, value: Values | None = None) -> Tensor:
        """The bound ``(*batch,)``, after which the sites take an E-step.

        One evaluation of the likelihood serves both. Steps halve when the bound falls
        from one call to the next. Without gradients, or when not ``moving``, the sites
        stay.
        """
        rows = self.basis()
        if self.sites is None:
            self.settle(Basis(*(t.detach() for t in rows)), 10, tolerance=0.0)
        assert self.sites is not None
        q = marginals(rows, self.sites)
        log_prob = self.expected_log_prob(q)
        bound = log_prob.sum(-1) - q.cost
        if self.moving and torch.is_grad_enabled():
            goal = natural_gradient(rows, q, log_prob, self.data.seen)
            self._adapt_step(bound.detach())
            self.sites = self.sites.move(goal, self.step.unsqueeze(-1))
        return bound - self.sunk

    def _adapt_step(self, bound: Tensor) -> None:
        if self.coupled:
            bound = bound.sum(-1, keepdim=True).expand(bound.shape)
        if self._last_bound is not None:
            better = bound >= self._last_bound
            self.step = torch.where(
                better, (1.5 * self.step).clamp_max(1), 0.5 * self.step
            )
        self._last_bound = bound

    @torch.no_grad()
    def new_round(self) -> None:
        """Settle the sites, which stay until the next round."""
        self.settle(self.basis())
        self.moving = False

    @torch.no_grad()
    def given(self, mean: Tensor, covariance: Tensor) -> GaussianData:
        """Sites of data of whose function values mean and covariance are known."""
        k_f = covariance.diagonal(dim1=-2, dim2=-1)
        L = fn.cholesky(covariance + torch.diag_embed(self.jitter * k_f))
        nothing, zero = mean[..., :0], torch.zeros_like(mean[..., 0])
        rows = Basis(
            A_f=L.mT,
            k_f=k_f,
            lost_f=torch.zeros_like(k_f),
            m_f=mean,
            G=L.mT[..., :0],
            r_a=nothing,
            lost_a=zero,
            rest=zero,
        )
        self.settle(rows)
        assert self.sites is not None
        bound = self.evaluate_sites(rows, self.sites).bound
        noise, target = self._noise(self.sites), self.sites.target
        B = covariance + torch.diag_embed(noise)
        seen = self.data.seen
        if seen is not None:
            B = B.where(seen.unsqueeze(-1) & seen.unsqueeze(-2), 0)
            B = B + torch.diag_embed((~seen).to(B) / (2 * math.pi))
        r = target - mean if seen is None else (target - mean).where(seen, 0)
        evidence = log_density(r, B, torch.zeros_like(r))
        return GaussianData(target, noise, 2 * (evidence - bound))

    @torch.no_grad()
    def as_gaussian(self) -> GaussianData:
        """Rows of the settled sites.

        Their offset is the constant for which the evidence of the rows is the bound:
        :math:`2 \\sum_i E_q [\\log t_i(f_i) - \\log p(y_i | f_i)]`, up to the
        normalisation of the rows. As long as q stays, nothing changes when data
        become rows, and increments of the bound add up.
        """
        rows = self.basis()
        self.settle(rows)
        assert self.sites is not None
        bound = self.evaluate_sites(rows, self.sites).bound
        return self._rows_of(self.sites, bound)

    @torch.no_grad()
    def as_frozen(self, data: GaussianData) -> GaussianData:
        """Rows of secants for classes, which often arrive one after the other.

        Two classes do where all labels at hand agree.
        """
        y, seen = self.data.y, self.data.seen
        if not likelihoods.takes_labels(self.likelihood) or y.size(-1) == 0:
            return data
        seen = torch.ones_like(y, dtype=torch.bool) if seen is None else seen
        low, high = extremes(y[..., :0], self.data).unbind(-1)
        changes = seen & ((low == high).unsqueeze(-1) | self.coupled)
        if not bool(changes.any()):
            return data
        rows = self.basis()
        assert self.sites is not None
        bound = self.evaluate_sites(rows, self.sites).bound
        pairs = zip(self.secant_sites(rows, self.sites), self.sites, strict=True)
        sites = Sites(*(torch.where(changes, new, old) for new, old in pairs))
        return self._rows_of(sites, bound)

    def _rows_of(self, sites: Sites, bound: Tensor) -> GaussianData:
        nothing, now = torch.zeros_like(self.past.rho), self.evaluate()
        data = GaussianData(sites.target, self._noise(sites), nothing)
        arguments = (self.blocks(now), data, now, self.past, self.data.weight)
        excess = fn.evidence(*self.project(*arguments)) - bound
        return data._replace(offset=2 * excess)


@torch.no_grad()
def sites_ahead(
    prior: Prior, predictor: Predictor, new: Data, nothing: Rows, jitter: float
) -> GaussianData:
    """Sites of new data, given what the rows so far predict of them."""
    latent = predictor(new.x)
    objective = SiteObjective(
        prior, nothing, new, shared_noise=False, alpha=0.0, jitter=jitter
    )
    batch = new.y.shape[:-1]
    mean, covariance = latent.mean, latent.covariance_matrix
    return objective.given(
        mean.expand(*batch, -1), covariance.expand(*batch, *covariance.shape[-2:])
    )


def joined_sites(old: GaussianData, new: GaussianData) -> GaussianData:
    """Sites of old and of new data, side by side."""
    assert old.noise is not None and new.noise is not None
    return GaussianData(
        torch.cat(fn.broadcast_rows(old.target, new.target), -1),
        torch.cat(fn.broadcast_rows(old.noise, new.noise), -1),
        old.offset + new.offset,
    )

"""The dense oracles agree among themselves and with definitions evaluated directly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import oracles
from oracles import SparsePosterior

JITTER = 1e-8
ALPHAS = [0.1, 0.5, 1.0]


def matern(lengthscale: float = 1.0, scale: float = 1.0):
    """Matérn-3/2: rough enough that the paper's D_a keeps its digits."""

    def kernel(x1: Tensor, x2: Tensor) -> Tensor:
        r = math.sqrt(3) * (x1.unsqueeze(-2) - x2.unsqueeze(-3)).abs().sum(-1)
        return scale * (1 + r / lengthscale) * torch.exp(-r / lengthscale)

    return kernel


def linear_mean(x: Tensor) -> Tensor:
    return 0.3 + 0.2 * x[..., 0]


def other_mean(x: Tensor) -> Tensor:
    return -0.1 + 0.4 * x[..., 0]


@pytest.fixture
def data():
    """Two batches, per-point noise, and inducing points before and after."""
    gen = torch.Generator().manual_seed(0)

    def draw(n: int, low: float, high: float):
        x = low + (high - low) * torch.rand(n, 1, generator=gen, dtype=torch.float64)
        noise = 0.05 + 0.1 * torch.rand(n, generator=gen, dtype=torch.float64)
        eps = torch.randn(n, generator=gen, dtype=torch.float64)
        return x, torch.sin(2 * x[:, 0]) + 0.5 * x[:, 0] + noise.sqrt() * eps, noise

    z_a = torch.linspace(0, 3, 6, dtype=torch.float64).unsqueeze(-1)
    z_b = torch.linspace(0.3, 4.8, 8, dtype=torch.float64).unsqueeze(-1)
    z_b[0] = z_a[1]  # one point is kept, so jitter must be shared with K_ab
    x_test = torch.linspace(-1, 6, 15, dtype=torch.float64).unsqueeze(-1)
    return draw(25, 0.0, 3.0), draw(20, 2.0, 5.0), z_a, z_b, x_test


@pytest.fixture
def changed(data):
    """An update where mean, kernel, noise and inducing points all change."""
    (x1, y1, n1), (x2, y2, n2), z_a, z_b, _ = data
    k_old, k_new = matern(0.9, 1.2), matern(0.6, 0.8)
    q_old = oracles.batch_vfe(k_old, x1, y1, z_a, n1, linear_mean, JITTER)
    old = oracles.remember(k_old, z_a, q_old, linear_mean, JITTER)
    return k_new, x2, y2, z_b, 1.3 * n2, old


def assert_same(actual: SparsePosterior, expected: SparsePosterior, tol: float = 1e-9):
    for name in SparsePosterior._fields:
        torch.testing.assert_close(
            getattr(actual, name), getattr(expected, name), rtol=tol, atol=tol
        )


def test_exact_gp_equals_conditioning_the_joint_gaussian(data):
    (x, y, noise), _, _, _, x_test = data
    kernel = matern()
    exact = oracles.exact_gp(kernel, x, y, noise, x_test, linear_mean)
    # p(y) p(f_s | y) = p(y, f_s) at any f_s.
    f_s = torch.cos(x_test[:, 0])
    x_all = torch.cat([x, x_test])
    C = kernel(x_all, x_all)
    C[: len(y), : len(y)] += noise.diag()
    joint = oracles.mvn_log_density(torch.cat([y, f_s]), linear_mean(x_all), C)
    conditional = oracles.mvn_log_density(f_s, exact.mean, exact.cov)
    torch.testing.assert_close(exact.log_marginal + conditional, joint)


def test_inducing_points_at_the_data_give_the_exact_gp(data):
    (x, y, noise), _, _, _, x_test = data
    kernel = matern()
    exact = oracles.exact_gp(kernel, x, y, noise, x_test, linear_mean)
    for q in (
        oracles.batch_vfe(kernel, x, y, x, noise, linear_mean),
        oracles.batch_power_ep(kernel, x, y, x, noise, 0.5, linear_mean),
        oracles.fitc(kernel, x, y, x, noise, linear_mean),
    ):
        mean, cov = oracles.predict(kernel, x, q, x_test, linear_mean)
        found = SparsePosterior(q.bound, mean, cov)
        assert_same(found, SparsePosterior(*exact), 1e-7)


def test_vfe_is_below_and_power_ep_between(data):
    (x, y, noise), _, z_a, _, x_test = data
    kernel = matern()
    exact = oracles.exact_gp(kernel, x, y, noise, x_test)
    vfe = oracles.batch_vfe(kernel, x, y, z_a, noise)
    assert vfe.bound < exact.log_marginal
    assert_same(oracles.batch_power_ep(kernel, x, y, z_a, noise, 1e-6), vfe, 1e-4)
    # FITC is written as conditioning a Gaussian, Power-EP as in Titsias: two routes.
    assert_same(
        oracles.batch_power_ep(kernel, x, y, z_a, noise, 1.0, linear_mean, JITTER),
        oracles.fitc(kernel, x, y, z_a, noise, linear_mean, JITTER),
    )


def test_compressed_data_alone_are_vfe_and_points_at_the_data_lose_nothing(data):
    (x, y, noise), (x_new, y_new, _), z, _, x_test = data
    kernel, nothing = matern(), (x_test[:0], y[:0])
    past = oracles.compress(kernel, x, z, 0.1, linear_mean, JITTER)
    gp = oracles.gp_on_compressed(
        kernel, z, past, y, *nothing, 0.1, x_test, linear_mean, JITTER
    )
    vfe = oracles.batch_vfe(kernel, x, y, z, 0.1, linear_mean, JITTER)
    mean, cov = oracles.predict(kernel, z, vfe, x_test, linear_mean, JITTER)
    assert_same(SparsePosterior(*gp), SparsePosterior(vfe.bound, mean, cov), 1e-7)
    past = oracles.compress(kernel, x, x, 0.1, linear_mean)
    other = matern(0.6, 0.8)  # what was compressed is still exact
    gp = oracles.gp_on_compressed(
        other, x, past, y, x_new, y_new, 0.2, x_test, other_mean
    )
    x_all, y_all = torch.cat([x, x_new]), torch.cat([y, y_new])
    exact = oracles.exact_gp(other, x_all, y_all, 0.2, x_test, other_mean)
    assert_same(SparsePosterior(*gp), SparsePosterior(*exact), 1e-7)


@pytest.mark.parametrize("alpha", [0.0, *ALPHAS])
@pytest.mark.parametrize("mean", [oracles.zero_mean, linear_mean])
def test_first_bound_plus_online_bound_is_the_batch_bound(data, alpha, mean):
    """With unchanged hyperparameters and inducing points nothing is lost.

    Then R_a = 0, so the old block is exact, and the ratio q_old(a) / p_old(a) is the
    old (approximate) likelihood divided by its evidence.
    """
    (x1, y1, n1), (x2, y2, n2), z, _, x_test = data
    kernel = matern()
    x, y, noise = torch.cat([x1, x2]), torch.cat([y1, y2]), torch.cat([n1, n2])
    at_once, streamed = oracles.batch_vfe, oracles.paper_online_vfe
    power = (alpha,) if alpha else ()
    if alpha:
        at_once, streamed = oracles.batch_power_ep, oracles.paper_online_power_ep
    first = at_once(kernel, x1, y1, z, n1, *power, mean, JITTER)
    old = oracles.remember(kernel, z, first, mean, JITTER)
    online = streamed(kernel, x2, y2, z, n2, old, *power, mean, JITTER)
    batch = at_once(kernel, x, y, z, noise, *power, mean, JITTER)
    assert_same(online._replace(bound=first.bound + online.bound), batch, 1e-8)


def test_online_bound_is_the_four_term_objective_at_its_optimum(changed):
    """All of mean, kernel, noise and Z change; the collapsed bound must still be it."""
    kernel, x, y, z, noise, old = changed
    q = oracles.paper_online_vfe(kernel, x, y, z, noise, old, other_mean, JITTER)

    def objective(q_mean: Tensor, root: Tensor) -> Tensor:
        candidate = SparsePosterior(q.bound, q_mean, root @ root.mT)
        return oracles.streaming_elbo_four_terms(
            kernel, x, y, z, noise, old, candidate, other_mean, JITTER
        )

    q_mean = q.mean.clone().requires_grad_()
    root = torch.linalg.cholesky(q.cov).requires_grad_()
    value = objective(q_mean, root)
    torch.testing.assert_close(value, q.bound, rtol=1e-9, atol=1e-9)
    # Stationary there ...
    for grad in torch.autograd.grad(value, [q_mean, root]):
        assert grad.abs().max() < 1e-6
    # ... and lower elsewhere.
    gen = torch.Generator().manual_seed(1)
    for size in (1e-2, 1e-1):
        step = size * torch.randn(q.mean.shape, generator=gen, dtype=torch.float64)
        assert objective(q.mean + step, root) < q.bound
        assert objective(q.mean, (1 + size) * root) < q.bound


def test_four_terms_take_another_expected_log_prob(changed):
    kernel, x, y, z, noise, old = changed
    q = oracles.paper_online_vfe(kernel, x, y, z, noise, old, other_mean, JITTER)

    def quadrature(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        t = torch.linspace(-9, 9, 4001, dtype=y.dtype).unsqueeze(-1)
        f = mean + variance.sqrt() * t
        log_p = torch.distributions.Normal(f, noise.sqrt()).log_prob(y)
        weight = torch.exp(-0.5 * t**2) / math.sqrt(2 * math.pi)
        return torch.trapezoid(weight * log_p, t.squeeze(-1), dim=0)

    value = oracles.streaming_elbo_four_terms(
        kernel, x, y, z, None, old, q, other_mean, JITTER, quadrature
    )
    torch.testing.assert_close(value, q.bound, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_online_power_ep_is_the_fixed_point_and_energy_of_its_definition(
    changed, alpha
):
    r"""Evaluate Power-EP's own definition: no D_a, no (1 - alpha) / (2 alpha) term.

    There is a site t_i(b) per datum and one for the old posterior. The fixed point is
    reached when replacing t_i^alpha in q by \int p(h_i | b) l_i(h_i)^alpha dh_i changes
    no moment. All is Gaussian, so t_i is that integral to the power 1 / alpha, scale
    included; q is the normalised p(b) \prod_i t_i(b), the energy its log normaliser.
    """
    kernel, x, y, z, noise, old = changed
    mean = other_mean
    energy = oracles.paper_online_power_ep(
        kernel, x, y, z, noise, old, alpha, mean, JITTER
    )
    K_bb = oracles.inducing_cov(kernel, z, z, JITTER)
    K_ab = oracles.inducing_cov(kernel, old.z, z, JITTER)
    K_aa = oracles.inducing_cov(kernel, old.z, old.z, JITTER)
    K_fb = kernel(x, z)

    # Each factor l(h) = exp(c + eta h - h Lam h / 2) of values h with
    # p(h | b) = N(shift + P b, R).
    factors = []
    for i in range(len(y)):
        P = K_fb[i : i + 1] @ K_bb.inverse()
        R = kernel(x[i : i + 1], x[i : i + 1]) - P @ K_fb[i : i + 1].mT
        Lam = (1 / noise[i]).reshape(1, 1)
        eta = (y[i] / noise[i]).reshape(1)
        c = -0.5 * (math.log(2 * math.pi) + noise[i].log() + y[i] ** 2 / noise[i])
        factors.append((P, mean(x[i : i + 1]) - P @ mean(z), R, c, eta, Lam))
    S_inv, K_inv = old.cov.inverse(), old.prior_cov.inverse()
    P = K_ab @ K_bb.inverse()
    c = 0.5 * (
        old.prior_cov.logdet()
        - old.cov.logdet()
        - old.mean @ S_inv @ old.mean
        + old.prior_mean @ K_inv @ old.prior_mean
    )
    eta = S_inv @ old.mean - K_inv @ old.prior_mean
    shift = mean(old.z) - P @ mean(z)
    factors.append((P, shift, K_aa - P @ K_ab.mT, c, eta, S_inv - K_inv))

    def log_normaliser(eta: Tensor, Lam: Tensor) -> Tensor:
        """The log of the integral of exp(eta b - b Lam b / 2)."""
        quad = eta @ Lam.inverse() @ eta
        return 0.5 * (len(eta) * math.log(2 * math.pi) - Lam.logdet() + quad)

    q_Lam = energy.cov.inverse()
    q_eta = q_Lam @ energy.mean
    p_Lam, p_eta = K_bb.inverse(), K_bb.inverse() @ mean(z)
    total = log_normaliser(q_eta, q_Lam) - log_normaliser(p_eta, p_Lam)
    sum_eta, sum_Lam = p_eta, p_Lam
    for P, shift, R, c, eta, Lam in factors:
        # \int N(h; mu, R) l(h)^alpha dh is Gaussian in mu, by completing the square.
        eye = torch.eye(len(eta), dtype=eta.dtype)
        G = (eye + alpha * Lam @ R).inverse()
        t_Lam = alpha * G @ Lam  # = (Lam^-1 / alpha + R)^-1
        t_eta = alpha * G @ eta
        t_c = alpha * c + 0.5 * G.logdet() + 0.5 * alpha**2 * eta @ R @ G @ eta
        # In b, where mu = shift + P b.
        b_Lam = P.mT @ t_Lam @ P
        b_eta = P.mT @ (t_eta - t_Lam @ shift)
        b_c = t_c + t_eta @ shift - 0.5 * shift @ t_Lam @ shift
        sum_eta, sum_Lam = sum_eta + b_eta / alpha, sum_Lam + b_Lam / alpha
        total = total + b_c / alpha
    torch.testing.assert_close(sum_Lam, q_Lam, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(sum_eta, q_eta, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(total, energy.bound, rtol=1e-8, atol=1e-8)


def test_online_power_ep_tends_to_online_vfe(changed):
    kernel, x, y, z, noise, old = changed
    args = (kernel, x, y, z, noise, old)
    vfe = oracles.paper_online_vfe(*args, mean=other_mean, jitter=JITTER)
    errors = [
        oracles.paper_online_power_ep(*args, alpha, other_mean, JITTER).bound
        - vfe.bound
        for alpha in (1e-3, 1e-4)
    ]
    # The difference is linear in alpha: a wrong constant would not shrink tenfold.
    assert errors[1].abs() < 0.11 * errors[0].abs()


def test_two_updates_with_all_data_informed_equal_the_exact_gp(data):
    """Z_a at the first inputs and Z_b at all inputs: streaming is exact inference."""
    (x1, y1, n1), (x2, y2, n2), _, _, x_test = data
    x1, y1, n1, x2, y2, n2 = x1[:8], y1[:8], n1[:8], x2[:6], y2[:6], n2[:6]
    kernel = matern()
    x, y, noise = torch.cat([x1, x2]), torch.cat([y1, y2]), torch.cat([n1, n2])
    first = oracles.batch_vfe(kernel, x1, y1, x1, n1, linear_mean)
    old = oracles.remember(kernel, x1, first, linear_mean)
    online = oracles.paper_online_vfe(kernel, x2, y2, x, n2, old, linear_mean)
    exact = oracles.exact_gp(kernel, x, y, noise, x_test, linear_mean)
    mean, cov = oracles.predict(kernel, x, online, x_test, linear_mean)
    found = SparsePosterior(first.bound + online.bound, mean, cov)
    assert_same(found, SparsePosterior(*exact), 1e-6)

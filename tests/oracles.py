r"""Dense textbook formulas that the library must agree with.

Written for clarity and in the letters of the papers: full matrices, explicit inverses,
no Cholesky tricks. Nothing here is imported from the library, so that an error cannot
be made twice. Use float64, few points and well conditioned kernels: the paper's
:math:`D_a` is an inverse of a difference of inverses and loses digits quickly (about
1e-13 where the condition number of ``K_bb`` is 10, 1e-7 at 1e5, nothing left at 1e9).

Letters: ``f`` new data, ``a`` old inducing points, ``b`` new ones, ``s`` test points;
:math:`Q_{xy} = K_{xb} K_{bb}^{-1} K_{by}` is the Nyström part. The paper's
:math:`Q_f, Q_a` (the other part, :math:`K - K_{xb} K_{bb}^{-1} K_{bx}`) is written
``R_f, R_a`` here, the residual, so that one letter has one meaning.

Arguments shared by all functions:

* ``kernel(x1, x2)``: dense covariance ``(n1, n2)`` of inputs ``(n1, d), (n2, d)``;
* ``mean(x)``: prior mean ``(n,)``; zero unless given;
* ``noise``: a number, or ``(n,)`` for a variance per point;
* ``jitter``: absolute variance of white noise that the prior has at inducing points,
  so it is in :math:`K_{bb}`, in :math:`K_{aa}`, and in :math:`K_{ab}` where the same
  point is in both sets; data and test points do not see it;
* ``x, y``: data, ``(n, d), (n,)``, online those of the new batch; ``x_test``: ``(n_s,
  d)``; ``z``: inducing points ``(m_b, d)``; ``old``: the old posterior with its prior;
  ``alpha``: power of Power-EP, 0 < alpha <= 1. Hyperparameters are the new ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor], Tensor]
Mean = Callable[[Tensor], Tensor]

LOG_2PI = math.log(2 * math.pi)


class ExactPosterior(NamedTuple):
    """Exact GP regression: evidence, and the latent posterior at the test points."""

    log_marginal: Tensor
    mean: Tensor  # (n_s,)
    cov: Tensor  # (n_s, n_s)


class SparsePosterior(NamedTuple):
    """A sparse approximation: its bound (or energy) and q(b), in function space.

    The bound is lower (VFE) or approximates (Power-EP, FITC) the log marginal
    likelihood; online, the log predictive density of the batch.
    """

    bound: Tensor
    mean: Tensor  # (m_b,)
    cov: Tensor  # (m_b, m_b)


class OldPosterior(NamedTuple):
    """What the paper keeps of the past; priors are under the OLD hyperparameters."""

    z: Tensor  # (m_a, d), old inducing points
    mean: Tensor  # the paper's m_a
    cov: Tensor  # S_a
    prior_mean: Tensor  # of a; zero in the paper
    prior_cov: Tensor  # K'_aa


def zero_mean(x: Tensor) -> Tensor:
    """The zero mean function, ``(n, d)`` to ``(n,)``."""
    return x.new_zeros(x.shape[:-1])


def inducing_cov(kernel: Kernel, z1: Tensor, z2: Tensor, jitter: float) -> Tensor:
    """Covariance ``(m1, m2)`` of inducing values: equal points share their jitter."""
    same_point = (z1.unsqueeze(-2) == z2.unsqueeze(-3)).all(-1)
    return kernel(z1, z2) + jitter * same_point


def mvn_log_density(y: Tensor, mean: Tensor, cov: Tensor) -> Tensor:
    """log N(y; mean, cov) for ``y`` and ``mean`` ``(n,)``, ``cov`` ``(n, n)``."""
    return -0.5 * (
        y.shape[-1] * LOG_2PI + cov.logdet() + _quad(cov.inverse(), y - mean)
    )


def gaussian_kl(mean_1: Tensor, cov_1: Tensor, mean_2: Tensor, cov_2: Tensor) -> Tensor:
    """KL(N(mean_1, cov_1) || N(mean_2, cov_2)), means ``(n,)``, covariances (n, n)."""
    precision_2 = cov_2.inverse()
    return 0.5 * (
        _trace(precision_2 @ cov_1)
        + _quad(precision_2, mean_2 - mean_1)
        - mean_1.shape[-1]
        + cov_2.logdet()
        - cov_1.logdet()
    )


def exact_gp(
    kernel: Kernel,
    x: Tensor,
    y: Tensor,
    noise: Tensor | float,
    x_test: Tensor,
    mean: Mean = zero_mean,
) -> ExactPosterior:
    """Exact GP regression."""
    C = kernel(x, x) + _noise_matrix(noise, y)
    K_sf = kernel(x_test, x)
    return ExactPosterior(
        log_marginal=mvn_log_density(y, mean(x), C),
        mean=mean(x_test) + _mv(K_sf @ C.inverse(), y - mean(x)),
        cov=kernel(x_test, x_test) - K_sf @ C.inverse() @ K_sf.mT,
    )


def batch_vfe(
    kernel: Kernel,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    noise: Tensor | float,
    mean: Mean = zero_mean,
    jitter: float = 0.0,
) -> SparsePosterior:
    r"""Titsias' collapsed bound and its optimal q(b).

    .. math::
        F = \log N(y; m, Q_{ff} + N)
            - \tfrac12 \textstyle\sum_i (k_{ii} - q_{ii}) / \sigma_i^2, \qquad
        q(b) = N(m_b + K_{bb} P K_{bf} N^{-1} (y - m_f),\ K_{bb} P K_{bb}), \quad
        P = (K_{bb} + K_{bf} N^{-1} K_{fb})^{-1}
    """
    N = _noise_matrix(noise, y)
    Q_ff, r_ff = _nystrom(kernel, x, z, jitter)
    bound = mvn_log_density(y, mean(x), Q_ff + N) - 0.5 * (r_ff / N.diagonal()).sum(-1)
    return SparsePosterior(bound, *_titsias_q(kernel, x, y, z, N, mean, jitter))


def batch_power_ep(
    kernel: Kernel,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    noise: Tensor | float,
    alpha: float,
    mean: Mean = zero_mean,
    jitter: float = 0.0,
) -> SparsePosterior:
    r"""Sparse Power-EP (Bui, Yan & Turner 2017), one site per datum.

    .. math::
        F_\alpha = \log N(y; m, Q_{ff} + \alpha\,\mathrm{diag}(K_{ff} - Q_{ff}) + N)
            - \tfrac{1-\alpha}{2\alpha} \textstyle\sum_i
              \log(1 + \alpha (k_{ii} - q_{ii}) / \sigma_i^2)
    """
    N = _noise_matrix(noise, y)
    Q_ff, r_ff = _nystrom(kernel, x, z, jitter)
    Sigma_y = N + alpha * torch.diag_embed(r_ff)
    log_terms = torch.log1p(alpha * r_ff / N.diagonal()).sum(-1)
    bound = (
        mvn_log_density(y, mean(x), Q_ff + Sigma_y)
        - (1 - alpha) / (2 * alpha) * log_terms
    )
    return SparsePosterior(bound, *_titsias_q(kernel, x, y, z, Sigma_y, mean, jitter))


def fitc(
    kernel: Kernel,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    noise: Tensor | float,
    mean: Mean = zero_mean,
    jitter: float = 0.0,
) -> SparsePosterior:
    r"""FITC (Snelson & Ghahramani 2006): exact regression with another prior.

    Given b the training values are taken as independent, so their prior covariance is
    :math:`Q_{ff} + \mathrm{diag}(K_{ff} - Q_{ff})` while their covariance with b is
    unchanged; the rest is conditioning a Gaussian.
    """
    Q_ff, r_ff = _nystrom(kernel, x, z, jitter)
    C = Q_ff + torch.diag_embed(r_ff) + _noise_matrix(noise, y)
    K_bb, K_bf = inducing_cov(kernel, z, z, jitter), kernel(z, x)
    return SparsePosterior(
        bound=mvn_log_density(y, mean(x), C),
        mean=mean(z) + _mv(K_bf @ C.inverse(), y - mean(x)),
        cov=K_bb - K_bf @ C.inverse() @ K_bf.mT,
    )


def predict(
    kernel: Kernel,
    z: Tensor,
    q: SparsePosterior,
    x_test: Tensor,
    mean: Mean = zero_mean,
    jitter: float = 0.0,
) -> tuple[Tensor, Tensor]:
    r"""Latent prediction :math:`q(f_s) = \int p(f_s | b) q(b) db`."""
    P = kernel(x_test, z) @ inducing_cov(kernel, z, z, jitter).inverse()
    return _project(kernel(x_test, x_test), P, kernel(z, x_test), q, z, x_test, mean)


def remember(
    kernel: Kernel,
    z: Tensor,
    q: SparsePosterior,
    mean: Mean = zero_mean,
    jitter: float = 0.0,
) -> OldPosterior:
    """Turn today's q(b) into the old posterior of the next update."""
    K_aa_old = inducing_cov(kernel, z, z, jitter)
    return OldPosterior(z, q.mean, q.cov, mean(z), K_aa_old)


def paper_online_vfe(
    kernel: Kernel,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    noise: Tensor | float,
    old: OldPosterior,
    mean: Mean = zero_mean,
    jitter: float = 0.0,
) -> SparsePosterior:
    r"""The paper's streaming collapsed bound and q(b), for new hyperparameters and Z_b.

    The old posterior enters only through the ratio to its prior, a Gaussian in a,

    .. math::
        \frac{q_{old}(a)}{p_{old}(a)} = e^{c_a} N(\hat y_a; a, D_a), \quad
        D_a = (S_a^{-1} - K_{aa}'^{-1})^{-1}, \quad \hat y_a = D_a S_a^{-1} m_a,

    .. math::
        2 c_a = \log |K_{aa}'| - \log |S_a| + \log |D_a| + M_a \log 2\pi
            + m_a^\top S_a^{-1} D_a S_a^{-1} m_a - m_a^\top S_a^{-1} m_a .

    With :math:`\hat f = [f; a]`, :math:`\hat y = [y; \hat y_a]` and
    :math:`\Sigma_{\hat y} = \mathrm{blkdiag}(N, D_a)` the bound is

    .. math::
        F = \log N(\hat y; 0, K_{\hat f b} K_{bb}^{-1} K_{b \hat f} + \Sigma_{\hat y})
            - \tfrac12 \mathrm{tr}(N^{-1} R_f) + \Delta_a, \qquad
        \Delta_a = c_a - \tfrac12 \mathrm{tr}(D_a^{-1} R_a),

    and :math:`q(b) = N(K_{b\hat f} C^{-1} \hat y,
    K_{bb} - K_{b\hat f} C^{-1} K_{\hat f b})` with the covariance C of the density
    above. A prior mean m (and m' at the time of the old posterior), which the paper
    takes as zero, changes :math:`\hat y_a` to
    :math:`D_a (S_a^{-1} m_a - K_{aa}'^{-1} m_a')`, the quadratic terms of
    :math:`c_a` accordingly, and centres the density on m.

    ``D_a`` exists only if the old data informed every old inducing point, so the old
    data must be at least as many as those.
    """
    site = _old_site(old)
    blocks = _joint_blocks(kernel, x, z, old, jitter)
    N = _noise_matrix(noise, y)
    bound, q_mean, q_cov = _collapse(
        blocks, x, y, z, old, site, torch.block_diag(N, site.D_a), mean
    )
    trace_f = (blocks.R_f.diagonal() / N.diagonal()).sum(-1)
    trace_a = _trace(site.D_a.inverse() @ blocks.R_a)
    Delta_a = site.log_scale - 0.5 * trace_a
    return SparsePosterior(bound - 0.5 * trace_f + Delta_a, q_mean, q_cov)


def paper_online_power_ep(
    kernel: Kernel,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    noise: Tensor | float,
    old: OldPosterior,
    alpha: float,
    mean: Mean = zero_mean,
    jitter: float = 0.0,
) -> SparsePosterior:
    r"""The paper's streaming Power-EP energy and q(b).

    One site per new datum and one site for the whole ratio
    :math:`q_{old}(a) / p_{old}(a)`, letters as in :func:`paper_online_vfe`:

    .. math::
        \Sigma_{\hat y} = \mathrm{blkdiag}(N + \alpha\,\mathrm{diag}(R_f),
            D_a + \alpha R_a),

    .. math::
        F_\alpha = \log N(\hat y; 0, K_{\hat f b} K_{bb}^{-1} K_{b \hat f}
                + \Sigma_{\hat y}) + c_a
            - \tfrac{1-\alpha}{2\alpha} \big[
                \log |I + \alpha N^{-1} \mathrm{diag}(R_f)|
                + \log |I + \alpha D_a^{-1} R_a| \big].
    """
    site = _old_site(old)
    blocks = _joint_blocks(kernel, x, z, old, jitter)
    N = _noise_matrix(noise, y)
    r_f = blocks.R_f.diagonal()
    Sigma = torch.block_diag(
        N + alpha * torch.diag_embed(r_f), site.D_a + alpha * blocks.R_a
    )
    bound, q_mean, q_cov = _collapse(blocks, x, y, z, old, site, Sigma, mean)
    eye = torch.eye(len(old.z), dtype=y.dtype)
    log_det_f = torch.log1p(alpha * r_f / N.diagonal()).sum(-1)
    log_det_a = (eye + alpha * site.D_a.inverse() @ blocks.R_a).logdet()
    penalty = (1 - alpha) / (2 * alpha) * (log_det_f + log_det_a)
    return SparsePosterior(bound + site.log_scale - penalty, q_mean, q_cov)


def streaming_elbo_four_terms(
    kernel: Kernel,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    noise: Tensor | float | None,
    old: OldPosterior,
    q: SparsePosterior,
    mean: Mean = zero_mean,
    jitter: float = 0.0,
    expected_log_prob: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    r"""The paper's uncollapsed streaming objective, for any Gaussian q(b).

    .. math::
        E_{q(f)} \log p(y | f) - KL(q(b) \| p(b))
            - KL(q(a) \| q_{old}(a)) + KL(q(a) \| p_{old}(a)),

    with :math:`q(a) = \int p(a | b) q(b) db` under the NEW hyperparameters; the bound
    of ``q`` is not used. ``expected_log_prob`` is that of other likelihoods, of ``(y,
    mean, variance)``, each ``(n,)``.
    """
    K_bb = inducing_cov(kernel, z, z, jitter)
    K_ab = inducing_cov(kernel, old.z, z, jitter)
    K_aa = inducing_cov(kernel, old.z, old.z, jitter)

    mean_f, cov_f = predict(kernel, z, q, x, mean, jitter)
    mean_a, cov_a = _project(K_aa, K_ab @ K_bb.inverse(), K_ab.mT, q, z, old.z, mean)
    var_f = cov_f.diagonal()
    if expected_log_prob is None:
        n = _noise_matrix(noise, y).diagonal()
        log_prob = -0.5 * (LOG_2PI + n.log() + ((y - mean_f) ** 2 + var_f) / n)
    else:
        log_prob = expected_log_prob(y, mean_f, var_f)
    return (
        log_prob.sum(-1)
        - gaussian_kl(q.mean, q.cov, mean(z), K_bb)
        - gaussian_kl(mean_a, cov_a, old.mean, old.cov)
        + gaussian_kl(mean_a, cov_a, old.prior_mean, old.prior_cov)
    )


class Compressed(NamedTuple):
    """What a compression keeps of data: y = offset + P f(z) + noise, less ``lost``."""

    P: Tensor  # (n, m), projection on the points under the hyperparameters of then
    offset: Tensor  # (n,), what the prior mean of then adds
    lost: Tensor  # nats of the trace, at the noise of then: a constant from now on


def compress(
    kernel: Kernel,
    x: Tensor,
    z: Tensor,
    noise: Tensor | float,
    mean: Mean = zero_mean,
    jitter: float = 0.0,
) -> Compressed:
    r"""Replace the likelihood of data by one of the function at points.

    .. math::
        \log p(y | f) \to \log N(y; m_f + P (f_b - m_b), N)
            - \tfrac12 \textstyle\sum_i (k_{ii} - q_{ii}) / \sigma_i^2, \qquad
        P = K_{fb} K_{bb}^{-1}
    """
    P = kernel(x, z) @ inducing_cov(kernel, z, z, jitter).inverse()
    left = (kernel(x, x) - P @ kernel(z, x)).diagonal()
    lost = 0.5 * (left / torch.as_tensor(noise, dtype=x.dtype)).sum(-1)
    return Compressed(P, mean(x) - _mv(P, mean(z)), lost)


def gp_on_compressed(
    kernel: Kernel,
    z: Tensor,
    past: Compressed,
    y_past: Tensor,
    x: Tensor,
    y: Tensor,
    noise: Tensor | float,
    x_test: Tensor,
    mean: Mean = zero_mean,
    jitter: float = 0.0,
) -> ExactPosterior:
    """Exact GP regression on compressed data and raw data, under one noise."""
    H = torch.block_diag(past.P, torch.eye(len(x), dtype=y.dtype))
    points, target = torch.cat([z, x]), torch.cat([y_past - past.offset, y])
    white = jitter * (torch.arange(len(points)) < len(z)).to(y.dtype).diag()
    C = H @ (kernel(points, points) + white) @ H.mT + _noise_matrix(noise, target)
    K_sp = kernel(x_test, points) @ H.mT
    r = target - _mv(H, mean(points))
    return ExactPosterior(
        log_marginal=mvn_log_density(r, torch.zeros_like(r), C) - past.lost,
        mean=mean(x_test) + _mv(K_sp @ C.inverse(), r),
        cov=kernel(x_test, x_test) - K_sp @ C.inverse() @ K_sp.mT,
    )


class _OldSite(NamedTuple):
    """q_old(a) / p_old(a) = exp(log_scale) N(y_a; a, D_a)."""

    y_a: Tensor
    D_a: Tensor
    log_scale: Tensor


class _JointBlocks(NamedTuple):
    """New-hyperparameter covariances: K_bb, K_fhat_b, and the residuals R_f, R_a."""

    K_bb: Tensor
    K_fhat_b: Tensor
    R_f: Tensor
    R_a: Tensor


def _old_site(old: OldPosterior) -> _OldSite:
    S_inv, K_inv = old.cov.inverse(), old.prior_cov.inverse()
    D_a = (S_inv - K_inv).inverse()
    y_a = _mv(D_a, _mv(S_inv, old.mean) - _mv(K_inv, old.prior_mean))
    log_scale = 0.5 * (
        old.prior_cov.logdet()
        - old.cov.logdet()
        + D_a.logdet()
        + old.mean.shape[-1] * LOG_2PI
        + _quad(D_a.inverse(), y_a)
        - _quad(S_inv, old.mean)
        + _quad(K_inv, old.prior_mean)
    )
    return _OldSite(y_a, D_a, log_scale)


def _joint_blocks(
    kernel: Kernel, x: Tensor, z: Tensor, old: OldPosterior, jitter: float
) -> _JointBlocks:
    K_bb = inducing_cov(kernel, z, z, jitter)
    K_fb = kernel(x, z)
    K_ab = inducing_cov(kernel, old.z, z, jitter)
    K_aa = inducing_cov(kernel, old.z, old.z, jitter)
    return _JointBlocks(
        K_bb=K_bb,
        K_fhat_b=torch.cat([K_fb, K_ab], dim=-2),
        R_f=kernel(x, x) - K_fb @ K_bb.inverse() @ K_fb.mT,
        R_a=K_aa - K_ab @ K_bb.inverse() @ K_ab.mT,
    )


def _collapse(
    blocks: _JointBlocks,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    old: OldPosterior,
    site: _OldSite,
    Sigma: Tensor,
    mean: Mean,
) -> tuple[Tensor, Tensor, Tensor]:
    """log N(yhat; m, K_fhat_b K_bb^-1 K_b_fhat + Sigma), and mean and cov of q(b)."""
    yhat = torch.cat([y, site.y_a], dim=-1)
    mean_hat = torch.cat([mean(x), mean(old.z)], dim=-1)
    K_fhat_b, K_bb = blocks.K_fhat_b, blocks.K_bb
    C = K_fhat_b @ K_bb.inverse() @ K_fhat_b.mT + Sigma
    return (
        mvn_log_density(yhat, mean_hat, C),
        mean(z) + _mv(K_fhat_b.mT @ C.inverse(), yhat - mean_hat),
        K_bb - K_fhat_b.mT @ C.inverse() @ K_fhat_b,
    )


def _titsias_q(
    kernel: Kernel,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    Sigma_y: Tensor,
    mean: Mean,
    jitter: float,
) -> tuple[Tensor, Tensor]:
    K_bb, K_bf = inducing_cov(kernel, z, z, jitter), kernel(z, x)
    P = (K_bb + K_bf @ Sigma_y.inverse() @ K_bf.mT).inverse()
    q_mean = mean(z) + _mv(K_bb @ P @ K_bf @ Sigma_y.inverse(), y - mean(x))
    return q_mean, K_bb @ P @ K_bb


def _nystrom(
    kernel: Kernel, x: Tensor, z: Tensor, jitter: float
) -> tuple[Tensor, Tensor]:
    """Q_ff ``(n, n)`` and the diagonal of K_ff - Q_ff ``(n,)``."""
    K_fb = kernel(x, z)
    Q_ff = K_fb @ inducing_cov(kernel, z, z, jitter).inverse() @ K_fb.mT
    return Q_ff, (kernel(x, x) - Q_ff).diagonal()


def _project(
    K_ss: Tensor,
    P: Tensor,
    K_bs: Tensor,
    q: SparsePosterior,
    z: Tensor,
    x: Tensor,
    mean: Mean,
) -> tuple[Tensor, Tensor]:
    """Moments of f(x) under p(f(x) | b) q(b), with P = K_sb K_bb^-1."""
    return (mean(x) + _mv(P, q.mean - mean(z)), K_ss - P @ K_bs + P @ q.cov @ P.mT)


def _noise_matrix(noise: Tensor | float, y: Tensor) -> Tensor:
    """``(n, n)`` diagonal noise covariance from a number or one value per point."""
    return torch.diag_embed(torch.as_tensor(noise, dtype=y.dtype).expand(y.shape))


def _mv(A: Tensor, v: Tensor) -> Tensor:
    return (A @ v.unsqueeze(-1)).squeeze(-1)


def _quad(A: Tensor, v: Tensor) -> Tensor:
    return (v * _mv(A, v)).sum(-1)


def _trace(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1).sum(-1)

"""The bound of the paper, as it is written there: what peers compute."""

from __future__ import annotations

from copy import deepcopy

import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn

from torch_ssgp import StreamingGP


class PaperBound(nn.Module):
    r"""The online bound of Bui, Nguyen and Turner (2017), as it is written there.

    With :math:`D_a^{-1} = S_a^{-1} - K_{aa}'^{-1}`, a difference of two inverses, and
    plain autograd,

    .. math::
        F = \log N(\hat y; 0, K_{\hat f b} K_{bb}^{-1} K_{b \hat f} + \Sigma_{\hat y})
            - \tfrac{1}{2 \sigma^2} \mathrm{tr}(K_{ff} - Q_{ff})
            - \tfrac12 \mathrm{tr}\, D_a^{-1} (K_{aa} - Q_{aa}) + \Delta_a,

    :math:`\hat y = [y;\, D_a S_a^{-1} m_a]`, :math:`\Sigma_{\hat y}` block-diagonal
    with :math:`\sigma^2 I` and :math:`D_a`, prior means zero.

    Args:
        kernel: Prior covariance.
        noise: Noise variance to start from.
        z_b: ``(m_b, d)``, where new inducing points start.
        z_a: ``(m_a, d)``, old inducing points.
        m_a: ``(m_a,)``, mean of the old posterior.
        S_a: ``(m_a, m_a)``, its covariance.
        K_old: ``(m_a, m_a)``, old prior covariance.
        jitter: Relative jitter.
    """

    def __init__(
        self,
        kernel: Kernel,
        noise: Tensor,
        z_b: Tensor,
        z_a: Tensor,
        m_a: Tensor,
        S_a: Tensor,
        K_old: Tensor,
        jitter: float,
    ) -> None:
        super().__init__()
        self.kernel, self.z_a, self.jitter = kernel, z_a, jitter
        self.z_b = nn.Parameter(z_b.clone())
        self.log_noise = nn.Parameter(noise.detach().log().squeeze())
        S_inv = torch.cholesky_inverse(torch.linalg.cholesky(S_a))
        K_inv = torch.cholesky_inverse(torch.linalg.cholesky(K_old))
        self.D_inv, self.linear = S_inv - K_inv, S_inv @ m_a
        # Of Gaussians that do not depend on anything that is learned.
        log_dets = torch.logdet(S_a) - torch.logdet(K_old)
        self.constant = 0.5 * (log_dets + m_a @ S_inv @ m_a)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The bound of new data."""
        z, z_a, noise = self.z_b, self.z_a, self.log_noise.exp()
        eye = torch.eye(len(z), dtype=z.dtype, device=z.device)
        eye_a = torch.eye(len(z_a), dtype=z.dtype, device=z.device)
        K_bb, K_aa = self.gram(z, z), self.gram(z_a, z_a)
        K_bb = K_bb + self.jitter * K_bb.diagonal() * eye
        K_aa = K_aa + self.jitter * K_aa.diagonal() * eye_a
        L = torch.linalg.cholesky(K_bb)
        A_f = torch.linalg.solve_triangular(L, self.gram(z, x), upper=False)
        A_a = torch.linalg.solve_triangular(L, self.gram(z, z_a), upper=False)
        from_old = A_a @ self.D_inv @ A_a.mT
        L_D = torch.linalg.cholesky(eye + A_f @ A_f.mT / noise + from_old)
        shift = A_f @ y / noise + A_a @ self.linear
        c = torch.linalg.solve_triangular(L_D, shift.unsqueeze(-1), upper=False)
        trace_f = self.kernel(x, diag=True).sum() - A_f.square().sum()
        trace_a = (self.D_inv * K_aa).sum() - from_old.diagonal().sum()
        return (
            -0.5 * len(y) * (2 * torch.pi * noise).log()
            - 0.5 * y.square().sum() / noise
            + 0.5 * c.square().sum()
            - L_D.diagonal().log().sum()
            - 0.5 * trace_f / noise
            - 0.5 * trace_a
            - self.constant
        )

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Covariance, by GPyTorch."""
        return self.kernel(x1, x2).to_dense()


def paper_bound(model: StreamingGP, z: Tensor, jitter: float) -> PaperBound:
    """The paper's bound of the next update of a model, at inducing points ``z``."""
    summary = model.summary
    L = summary.prior_cholesky
    return PaperBound(
        deepcopy(model.covar_module),
        model.likelihood.noise,
        z,
        summary.inducing_points,
        summary.mean,
        summary.covariance,
        L @ L.mT,
        jitter,
    )

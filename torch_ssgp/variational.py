r"""Streaming for hand-written GPyTorch training loops.

A GPyTorch user keeps the model, the likelihood, the loop and the optimiser, and
replaces one class: :class:`StreamingVariationalStrategy` instead of GPyTorch's
``VariationalStrategy``. Its ``kl_divergence`` carries the past, so that the stock
``VariationalELBO`` and ``PredictiveLogLikelihood`` become streaming objectives, and
``absorb`` closes an update.

The past is kept in site form: pseudo-observations :math:`(U, g)` with unit noise of
the function at the old inducing points, :math:`a = f(Z_a)`,

.. math::
    \log \frac{q_{old}(a)}{p_{old}(a)} = -\tfrac12 \|g - U a\|^2 - \log E, \qquad
    E = \int p_{old}(a)\, e^{-\frac12 \|g - U a\|^2} da,

so the two terms that the paper adds to the usual objective are one expected square,
positive semi-definite by construction:

.. math::
    KL(q(a) \| q_{old}(a)) - KL(q(a) \| p_{old}(a))
        = \tfrac12 \big( \|g - U \mu_a\|^2 + \mathrm{tr}\, U \Sigma_a U^\top \big)
          + \log E .

Letters: ``a`` old inducing points, ``b`` current ones, ``c`` those of the next update;
:math:`b = m_b + L v` with :math:`L L^\top = K_{bb}` and
:math:`q(v) = N(\mu, S)`, the whitened variational distribution.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from gpytorch.distributions import Delta, MultivariateNormal
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    VariationalStrategy,
    _VariationalDistribution,
)
from linear_operator import to_dense
from linear_operator.operators import (
    CholLinearOperator,
    DiagLinearOperator,
    LinearOperator,
)
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from torch_ssgp import settings
from torch_ssgp import validation as check
from torch_ssgp.atomic import atomic_change
from torch_ssgp.exceptions import (
    ArgumentError,
    FactorizationError,
    NonFiniteError,
    ShapeError,
    StreamingGPWarning,
)
from torch_ssgp.functional import matvec, solve_lower, squared_norm

# A whitened variance below this is taken as this: a standard deviation of 1e-6 of the
# prior's, the least that float64 algebra can still tell from certainty.
_MIN_VARIANCE = 1e-12
# In standard deviations. Keeps targets finite where q moved and did not narrow at all.
_MAX_SURPRISE = 1e6


class SitePast(NamedTuple):
    r"""A Gaussian q(b) divided by its prior, as pseudo-observations with unit noise.

    Attributes:
        U: ``(*batch, m, m)``, observed rows; a row of zeros says nothing.
        g: ``(*batch, m)``, their targets, in function space.
        log_evidence: ``(*batch,)``, :math:`\log E`, what the rows were worth under
            the prior they were made with (without the factor :math:`(2\pi)^{-m/2}`).
        num_clipped: ``(*batch,)``, directions in which q is wider than the prior.
    """

    U: Tensor
    g: Tensor
    log_evidence: Tensor
    num_clipped: Tensor


class KLTerms(NamedTuple):
    r"""The parts of a streaming KL divergence.

    Attributes:
        prior: ``(*batch,)``, :math:`KL(q(b) \| p(b))`.
        old_data: ``(*batch,)``,
            :math:`KL(q(a) \| q_{old}(a)) - KL(q(a) \| p_{old}(a))`; zero if there is
            no past. May be negative: it is a difference.
    """

    prior: Tensor
    old_data: Tensor


class AbsorbResult(NamedTuple):
    r"""What :meth:`StreamingVariationalStrategy.absorb` did.

    Attributes:
        num_clipped: ``(*batch,)``, directions in which q was wider than the prior.
            Many of them mean that the inner loop stopped far from convergence.
        information: ``(*batch,)``, :math:`\tfrac12 \log |I + U K_{bb} U^\top|`, nats
            that the stored past holds about the inducing values.
    """

    num_clipped: Tensor
    information: Tensor


def match_inducing_points(z_b: Tensor, z_a: Tensor) -> Tensor:
    """For each row of ``z_a``, the row of ``z_b`` that is the same point, or -1.

    One row matches at most one row, also where a set holds a point twice: the k-th
    copy matches the k-th copy.

    Args:
        z_b: ``(*batch, m_b, d)``.
        z_a: ``(*batch, m_a, d)``.

    Returns:
        ``(*batch, m_a)`` integer tensor.
    """
    batch = torch.broadcast_shapes(z_b.shape[:-2], z_a.shape[:-2])
    same = torch.ones(
        *batch, z_b.size(-2), z_a.size(-2), dtype=torch.bool, device=z_b.device
    )
    for i in range(z_b.size(-1)):  # by input dimension: m_b x m_a numbers at a time
        same &= z_b[..., :, None, i] == z_a[..., None, :, i]
    # Down a column the copies in z_b are counted, along a row those in z_a.
    same &= same.cumsum(-2) == same.cumsum(-1)
    found, index = same.to(torch.int8).max(-2)
    return torch.where(found > 0, index, -1)


def cross_covariance(K_ba: Tensor, L: Tensor, matches: Tensor) -> Tensor:
    r"""``K_ba`` in which a point that was kept is the same variable, jitter included.

    The column of a kept point takes the value of its column in
    :math:`K_{bb} = L L^\top`, without which every absorb would leak information. Its
    gradient stays that of the kernel, because old points do not move with new ones.

    Args:
        K_ba: ``(*batch, m_b, m_a)``, the kernel alone.
        L: ``(*batch, m_b, m_b)``, Cholesky factor of ``K_bb``.
        matches: ``(*batch, m_a)``, see :func:`match_inducing_points`.

    Returns:
        ``(*batch, m_b, m_a)``.
    """
    K_bb = (L @ L.mT).detach()
    kept = (matches >= 0).unsqueeze(-2)
    columns = matches.clamp_min(0).unsqueeze(-2).expand(K_ba.shape)
    correction = K_bb.expand(*K_ba.shape[:-1], -1).gather(-1, columns) - K_ba.detach()
    return K_ba + torch.where(kept, correction, 0.0)


def expected_misfit(
    L: Tensor,
    K_ba: Tensor,
    K_aa: Tensor,
    m_a: Tensor,
    matches: Tensor,
    U: Tensor,
    g: Tensor,
    mean: Tensor,
    covariance: Tensor | None,
) -> Tensor:
    r"""How badly q(b) explains the pseudo-observations of the past.

    .. math::
        \tfrac12 E_{q(a)} \|g - U a\|^2 = \tfrac12 \big( \|g - U m_a - G^\top \mu\|^2
            + \mathrm{tr}\, U (K_{aa} - A_a^\top A_a) U^\top
            + \mathrm{tr}\, G^\top S G \big),

    with :math:`A_a = L^{-1} K_{ba}` and :math:`G = A_a U^\top`.

    Args:
        L: ``(*batch, m_b, m_b)``, Cholesky factor of ``K_bb``.
        K_ba: ``(*batch, m_b, m_a)``, see :func:`cross_covariance`.
        K_aa: ``(*batch, m_a, m_a)``, jitter included.
        m_a: ``(*batch, m_a)``, prior mean at the old inducing points.
        matches: ``(*batch, m_a)``, see :func:`match_inducing_points`.
        U: ``(*batch, p, m_a)``.
        g: ``(*batch, p)``.
        mean: ``(*batch, m_b)``, whitened mean :math:`\mu` of q(b).
        covariance: ``(*batch, m_b, m_b)``, whitened covariance :math:`S` of q(b);
            ``None`` if q is a point.

    Returns:
        ``(*batch,)``, not negative.
    """
    A_a = solve_lower(L, K_ba)
    G = A_a @ U.mT
    # A kept point is known given b: its residual is zero, whatever rounding says.
    moved = (matches < 0).to(K_aa.dtype)
    R_a = (K_aa - A_a.mT @ A_a) * moved.unsqueeze(-1) * moved.unsqueeze(-2)
    misfit = squared_norm(g - matvec(U, m_a) - matvec(G.mT, mean))
    misfit = misfit + ((U @ R_a) * U).sum((-2, -1))
    if covariance is not None:
        misfit = misfit + ((covariance @ G) * G).sum((-2, -1))
    return 0.5 * misfit


def divide_by_prior(
    L: Tensor, m_b: Tensor, mean: Tensor, root: Tensor, max_surprise: float
) -> SitePast:
    r"""The data that would turn the prior into q(b): ``q(b) / p(b)`` in site form.

    With :math:`S = V \mathrm{diag}(\sigma_i) V^\top` in whitened space and
    :math:`\mu_i = (V^\top \mu)_i`, direction :math:`i` was observed with precision
    :math:`\lambda_i = 1/\sigma_i - 1` and residual :math:`r_i`,

    .. math::
        U = \mathrm{diag}(\sqrt{\lambda_i})\, V^\top L^{-1}, \quad
        r_i = \frac{\mu_i}{\sqrt{\sigma_i (1 - \sigma_i)}}, \quad
        g = r + U m_b, \quad
        \log E = \tfrac12 \sum_i \Big( \log \sigma_i
            - \frac{\mu_i^2}{1 - \sigma_i} \Big).

    No data make a Gaussian wider than its prior; a q that has not converged may be
    (:math:`\sigma_i > 1`), and its mean has moved all the same. As no data move a mean
    without making it more certain either, such a direction keeps its mean and gets the
    precision of an observation that was surprising by ``max_surprise`` standard
    deviations, :math:`1 - \sigma_i = \mu_i^2 / z_{max}^2`, at most a half. Where the
    mean has not moved this is no observation at all.

    Args:
        L: ``(*batch, m, m)``, Cholesky factor of ``K_bb``.
        m_b: ``(*batch, m)``, prior mean.
        mean: ``(*batch, m)``, whitened mean :math:`\mu` of q.
        root: ``(*batch, m, m)``, any root of the whitened covariance, ``S = R Rᵀ``.
        max_surprise: :math:`z_{max}`, for directions in which q is too wide.

    Returns:
        The past; exact where nothing was clipped.
    """
    # Singular values of the root, not eigenvalues of S: small ones keep their digits.
    V, root_variance, _ = torch.linalg.svd(root)
    variance = root_variance.square().clamp_min(_MIN_VARIANCE)
    mu = matvec(V.mT, mean)

    least = torch.where(variance < 1, mu / _MAX_SURPRISE, mu / max_surprise)
    least = least.square().clamp_max(0.5)
    gain = torch.maximum(1 - variance, least)  # 1 - sigma
    informed = gain > torch.finfo(gain.dtype).tiny
    gain = torch.where(informed, gain, 1.0)
    num_clipped = (variance > 1 + 1e-6).sum(-1)  # not what rounding explains
    variance = torch.where(gain > 1 - variance, 1 - gain, variance)
    variance = torch.where(informed, variance, 1.0)

    # sqrt(lambda), r and the evidence of directions that say nothing are zero.
    scale = torch.where(informed, (gain / variance).sqrt(), 0.0)
    r = torch.where(informed, mu / (gain * variance).sqrt(), 0.0)
    surprise = torch.where(informed, mu.square() / gain, 0.0)
    U = solve_upper_transposed(L, V * scale.unsqueeze(-2)).mT
    return SitePast(
        U=U,
        g=r + matvec(U, m_b),
        log_evidence=0.5 * (variance.log() - surprise).sum(-1),
        num_clipped=num_clipped,
    )


def solve_upper_transposed(L: Tensor, B: Tensor) -> Tensor:
    """Solve ``Lᵀ X = B`` for lower triangular ``L`` and matrix ``B``."""
    return torch.linalg.solve_triangular(L.mT, B, upper=True)


def predict_whitened(
    L: Tensor, L_c: Tensor, K_bc: Tensor, mean: Tensor, root: Tensor
) -> tuple[Tensor, Tensor]:
    r"""q at other inducing points, in the whitened coordinates of those.

    .. math::
        \mu_c = B^\top \mu, \quad S_c = I - B^\top B + B^\top S B, \quad
        B = L^{-1} K_{bc} L_c^{-\top}

    Args:
        L: ``(*batch, m_b, m_b)``, Cholesky factor of ``K_bb``.
        L_c: ``(*batch, m_c, m_c)``, Cholesky factor of ``K_cc``.
        K_bc: ``(*batch, m_b, m_c)``, see :func:`cross_covariance`.
        mean: ``(*batch, m_b)``, whitened mean :math:`\mu`.
        root: ``(*batch, m_b, m_b)``, root of the whitened covariance.

    Returns:
        :math:`\mu_c` ``(*batch, m_c)`` and the Cholesky factor of :math:`S_c`.
    """
    B = solve_lower(L_c, solve_lower(L, K_bc).mT).mT
    eye = torch.eye(B.size(-1), dtype=B.dtype, device=B.device)
    S = eye - B.mT @ B + B.mT @ root @ (root.mT @ B)
    # Eigenvalues, not a Cholesky factorisation: what is nearly certain must not fail.
    values, vectors = torch.linalg.eigh(0.5 * (S + S.mT))
    half = vectors * values.clamp_min(_MIN_VARIANCE).sqrt().unsqueeze(-2)
    R = torch.linalg.qr(half.mT).R
    sign = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(R.dtype)
    return matvec(B.mT, mean), (R * sign.unsqueeze(-1)).mT


class StreamingVariationalStrategy(VariationalStrategy):
    r"""GPyTorch's whitened variational strategy with a memory.

    Between two calls of :meth:`absorb` it is GPyTorch's ``VariationalStrategy``; only
    ``kl_divergence`` has more in it:

    .. math::
        KL(q(b) \| p(b)) + KL(q(a) \| q_{old}(a)) - KL(q(a) \| p_{old}(a)),

    with :math:`q(a) = \int p(a \mid b)\, q(b)\, db` under the current
    hyperparameters and inducing points. GPyTorch's ``VariationalELBO``,
    ``PredictiveLogLikelihood`` and deep GPs therefore stream unchanged, with
    ``num_data`` the size of the **new** batch, and minibatches of it scale as usual.

    Works with Cholesky, mean-field, natural and tril-natural variational
    distributions. (A delta distribution trains, but has no covariance to absorb.)

    An optimiser goes on over :meth:`absorb`, because parameters keep their identity
    when they change their size; pass it to ``absorb``, which forgets its moments for
    those. Set ``num_data`` of the objective (and of GPyTorch's ``NGD``) to the size
    of the next batch.

    A state with another number of inducing points loads. If ``load_state_dict`` of the
    model raises, torch has loaded what fits; whole or not at all it loads by
    ``atomic.atomic_change(lambda: model.load_state_dict(state), [model])``.

    Args:
        model: The model this strategy belongs to.
        inducing_points: ``(*batch, m, d)``, the first inducing points.
        variational_distribution: q, in whitened coordinates.
        learn_inducing_locations: Whether inducing points are parameters.
        jitter_val: White noise of the prior at inducing points; ``None`` for
            GPyTorch's setting ``variational_cholesky_jitter``.

    Attributes:
        old_inducing_points: ``(*batch, m_a, d)``; empty if there is no past.
        old_U: ``(*batch, p, m_a)``, rows of the past.
        old_g: ``(*batch, p)``, their targets.
        old_log_evidence: ``(*batch,)``, the constant of the old-data term.

    Example:
        >>> import gpytorch, torch
        >>> from torch_ssgp.variational import StreamingVariationalStrategy
        >>> class Model(gpytorch.models.ApproximateGP):
        ...     def __init__(self, z):
        ...         q = gpytorch.variational.CholeskyVariationalDistribution(len(z))
        ...         super().__init__(StreamingVariationalStrategy(self, z, q))
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.RBFKernel()
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(
        ...             self.mean_module(x), self.covar_module(x))
        >>> model = Model(torch.linspace(0, 1, 8).unsqueeze(-1))
        >>> likelihood = gpytorch.likelihoods.StudentTLikelihood()
        >>> mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=20)
        >>> parameters = [*model.parameters(), *likelihood.parameters()]
        >>> adam = torch.optim.Adam(parameters, lr=0.05)
        >>> for x in torch.linspace(0, 2, 40).split(20):  # two batches
        ...     for _ in range(5):
        ...         adam.zero_grad()
        ...         loss = -mll(model(x), torch.sin(6 * x))
        ...         loss.backward()
        ...         adam.step()
        ...     strategy = model.variational_strategy
        ...     z = torch.cat([strategy.inducing_points, x[::5, None]])
        ...     _ = strategy.absorb(z, optimizer=adam)
        >>> strategy.inducing_points.shape
        torch.Size([16, 1])
    """

    inducing_points: Tensor
    old_inducing_points: Tensor
    old_U: Tensor
    old_g: Tensor
    old_log_evidence: Tensor

    _OLD = ("old_inducing_points", "old_U", "old_g", "old_log_evidence")

    def __init__(
        self,
        model: Any,
        inducing_points: Tensor,
        variational_distribution: _VariationalDistribution,
        learn_inducing_locations: bool = True,
        jitter_val: float | None = None,
    ) -> None:
        _check_strategy(inducing_points, variational_distribution, jitter_val)
        super().__init__(
            model,
            inducing_points,
            variational_distribution,
            learn_inducing_locations,
            jitter_val=jitter_val,
        )
        # GPyTorch's fantasies solve with the wrong noise; see get_fantasy_model.
        self.has_fantasy_strategy = False
        z = self.inducing_points.detach()
        # Empty tensors, not None: None would be missing in the state_dict.
        self.register_buffer("old_inducing_points", z[..., :0, :].clone())
        self.register_buffer("old_U", z.new_zeros(0, 0))
        self.register_buffer("old_g", z.new_zeros(0))
        self.register_buffer("old_log_evidence", z.new_zeros(()))

    @property
    def has_old_posterior(self) -> bool:
        """Whether there is a past."""
        return self.old_U.size(-2) > 0

    # The objective

    def kl_divergence(self) -> Tensor:
        r"""Divergence from the prior and from the past, ``(*batch,)``.

        Equal to :math:`KL(q(b) \| p(b)) + KL(q(a) \| q_{old}(a)) - KL(q(a) \|
        p_{old}(a))`, and not computed as a difference of divergences.
        """
        terms = self.kl_terms()
        return terms.prior + terms.old_data if self.has_old_posterior else terms.prior

    def kl_terms(self) -> KLTerms:
        """The parts of :meth:`kl_divergence`."""
        if not self.training and torch.is_grad_enabled():
            self._clear_cache()
        prior = super().kl_divergence()
        if not self.has_old_posterior:
            return KLTerms(prior, torch.zeros_like(prior))
        return KLTerms(prior, self._old_data_term().to(prior.dtype))

    def _old_data_term(self) -> Tensor:
        z_b, z_a = _broadcast_points(self.inducing_points, self.old_inducing_points)
        num_b = z_b.size(-2)
        prior = self.model.forward(torch.cat([z_b, z_a], -2))
        K = prior.lazy_covariance_matrix
        # In a training step the factor is there already, from the forward pass.
        L = self._factor(K[..., :num_b, :num_b])
        dtype = L.dtype
        K_ba = to_dense(K[..., :num_b, num_b:]).to(dtype)
        K_aa = to_dense(K[..., num_b:, num_b:].add_jitter(self.jitter_val)).to(dtype)

        q = self.variational_distribution
        is_normal = isinstance(q, MultivariateNormal)
        S = to_dense(q.lazy_covariance_matrix).to(dtype) if is_normal else None
        matches = match_inducing_points(z_b.detach(), z_a)
        misfit = expected_misfit(
            L,
            cross_covariance(K_ba, L, matches),
            K_aa,
            prior.mean[..., num_b:].to(dtype),
            matches,
            self.old_U.to(dtype),
            self.old_g.to(dtype),
            q.mean.to(dtype),
            S,
        )
        return misfit + self.old_log_evidence.to(dtype)

    def _factor(self, K_bb: LinearOperator) -> Tensor:
        kept = getattr(self, "_memoize_cache", {}).get("cholesky_factor")
        if kept is None:
            L = self._cholesky_factor(K_bb.add_jitter(self.jitter_val))
            return L.to_dense()
        # Batch dimensions of the inputs repeat the factor; one copy is enough.
        L = kept.to_dense()
        L = L[(0,) * (L.dim() - K_bb.dim())]
        for dim, size in enumerate(K_bb.batch_shape):
            L = L.narrow(dim, 0, size)
        return L

    # The end of an update

    @torch.no_grad()
    def absorb(
        self,
        inducing_points: Tensor | None = None,
        *,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        max_surprise: float = 3.0,
    ) -> AbsorbResult:
        r"""Make the current q the old posterior.

        Stores :math:`q(b) / p(b)` as pseudo-observations at the current inducing
        points; what was stored before is already in q. If anything raises, the state
        is as it was.

        Args:
            inducing_points: ``(*batch, m_c, d)``, inducing points of the next update,
                of any number; q becomes its own prediction there. ``None`` keeps the
                points, q, and with it every parameter, as they are.
            optimizer: Optimisers that hold the parameters. Moments of parameters that
                change are dropped. Without this, an optimiser with moments raises
                after a change of the number of points; drop them by
                ``optimizer.state.pop(parameter, None)``.
            max_surprise: What becomes of directions in which q is wider than the
                prior, because it has not converged; see :func:`divide_by_prior`.

        Returns:
            How many directions were clipped, and how much is stored.
        """
        check.check_positive(max_surprise, "max_surprise")
        optimizers = _as_tuple(optimizer)
        z_b = self.inducing_points.detach()
        z_c = self._check_inducing_points(inducing_points)
        dtype = settings.algebra_dtype.of(z_b.dtype)
        mean, root = self._whitened_moments(dtype)

        prior = self.model.forward(z_b)
        L = self._absorb_factor(prior.lazy_covariance_matrix, dtype)
        m_b = prior.mean.to(dtype)
        past = divide_by_prior(L, m_b, mean, root, max_surprise)
        _check_finite(past.U, past.g, past.log_evidence)

        parameters: dict[str, Tensor] = {}
        if z_c is not None:
            parameters = self._predicted_parameters(z_b, z_c, L, mean, root)
            _check_finite(*parameters.values())

        information = 0.5 * torch.log1p(squared_norm(past.U @ L, -1)).sum(-1)
        optimizers, q = _as_tuple(optimizer), self._variational_distribution

        @torch.no_grad()
        def change() -> None:
            self.old_inducing_points = z_b.clone()
            self.old_U, self.old_g = past.U.contiguous(), past.g
            self.old_log_evidence = past.log_evidence
            self.variational_params_initialized.fill_(1)
            if z_c is not None:
                if isinstance(self.inducing_points, nn.Parameter):
                    replace_parameter(self, "inducing_points", z_c, optimizers)
                else:
                    self.inducing_points = z_c.clone()
                for name, value in parameters.items():
                    replace_parameter(q, name, value, optimizers)
                q.num_inducing_points = z_c.size(-2)
            self._clear_cache()

        atomic_change(change, [self], optimizers)
        return AbsorbResult(past.num_clipped, information)

    def _check_inducing_points(self, z_c: Tensor | None) -> Tensor | None:
        """The next inducing points, or ``None`` if they stay."""
        if z_c is None:
            return None
        z_b = self.inducing_points
        check.check_tensor(z_c, "inducing_points")
        num_dims = z_c.dim()
        z_c = check.check_inputs(
            z_c,
            name="inducing_points",
            num_dims=z_b.size(-1),
            dtype=z_b.dtype,
            device=z_b.device,
        )
        batch, m = z_b.shape[:-2], z_c.size(-2)
        if num_dims < 2 or m == 0 or not check.expands_to(z_c.shape[:-2], batch):
            raise ShapeError(
                f"inducing_points has shape {tuple(z_c.shape)}; expected "
                f"{(*batch, max(m, 1), z_b.size(-1))}, or another number above zero."
            )
        z_c = z_c.detach().expand(*batch, *z_c.shape[-2:])
        return None if torch.equal(z_c, z_b) else z_c

    def _whitened_moments(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        q = self._variational_distribution()
        if isinstance(q, Delta) or not isinstance(q, MultivariateNormal):
            raise ArgumentError(
                f"{type(self._variational_distribution).__name__} has no covariance, "
                "so there is no posterior to absorb. Use "
                "CholeskyVariationalDistribution or another Gaussian one."
            )
        mean = q.mean.to(dtype)
        covariance = q.lazy_covariance_matrix
        if isinstance(covariance, CholLinearOperator):
            root = covariance.root.to_dense().to(dtype)
        elif isinstance(covariance, DiagLinearOperator):
            root = torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1)).to(dtype)
            root = root.sqrt()
        else:
            root = _safe_cholesky(to_dense(covariance).to(dtype))
        if not (torch.isfinite(mean).all() and torch.isfinite(root).all()):
            raise NonFiniteError(
                "q has NaN or infinity in it, so it cannot be absorbed; the state is "
                "unchanged. Restore parameters from before training diverged, or "
                "train with a smaller learning rate."
            )
        return mean, root

    def _absorb_factor(self, K: LinearOperator, dtype: torch.dtype) -> Tensor:
        return _safe_cholesky(to_dense(K.add_jitter(self.jitter_val)).to(dtype))

    def _predicted_parameters(
        self, z_b: Tensor, z_c: Tensor, L: Tensor, mean: Tensor, root: Tensor
    ) -> dict[str, Tensor]:
        """Parameters of the variational distribution that predicts at ``z_c``."""
        num_b, dtype = z_b.size(-2), L.dtype
        K = self.model.forward(torch.cat([z_b, z_c], -2)).lazy_covariance_matrix
        L_c = self._absorb_factor(K[..., num_b:, num_b:], dtype)
        K_bc = to_dense(K[..., :num_b, num_b:]).to(dtype)
        K_bc = cross_covariance(K_bc, L, match_inducing_points(z_b, z_c))
        mean_c, chol_c = predict_whitened(L, L_c, K_bc, mean, root)
        q = self._variational_distribution
        if mean_c.shape[:-1] != q.batch_shape:
            # One whitened q shared by a batch of kernels is not one q elsewhere.
            raise ShapeError(
                f"The kernel has batch shape {tuple(mean_c.shape[:-1])}, q has "
                f"{tuple(q.batch_shape)}: q cannot be moved to new inducing points. "
                "Give the variational distribution the batch_shape of the kernel."
            )
        return whitened_parameters(q, mean_c, chol_c)

    # GPyTorch's machinery

    def __call__(
        self, x: Tensor, prior: bool = False, diag: bool = True, **kwargs: Any
    ) -> MultivariateNormal:
        """See GPyTorch; in evaluation mode gradients are computed anew each time."""
        if not self.training and torch.is_grad_enabled():
            # The graph behind a kept factor is gone after the first backward pass.
            self._clear_cache()
        return super().__call__(x, prior=prior, diag=diag, **kwargs)

    def get_fantasy_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not offered: GPyTorch 1.15 computes fantasies with the wrong noise."""
        _raise_no_fantasies(self)

    def amortized_exact_gp(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not offered, as :meth:`get_fantasy_model`."""
        _raise_no_fantasies(self)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # What was kept has the old dtype or device.
        self._clear_cache()
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # What was kept may have a graph, which can be neither copied nor pickled.
        state = self.__dict__.copy()
        state.pop("_memoize_cache", None)
        return state

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Take the number of inducing points, and the past, of what is loaded.

        A state of GPyTorch's ``VariationalStrategy`` loads too, as one without past.
        """
        if prefix + "inducing_points" in state_dict:
            if not any(prefix + name in state_dict for name in self._OLD):
                z = state_dict[prefix + "inducing_points"]
                state_dict[prefix + "old_inducing_points"] = z[..., :0, :]
                state_dict[prefix + "old_U"] = z.new_zeros(0, 0)
                state_dict[prefix + "old_g"] = z.new_zeros(0)
                state_dict[prefix + "old_log_evidence"] = z.new_zeros(())
        for name in self._OLD:
            value = state_dict.get(prefix + name)
            if value is not None:
                # Points have the dtype of the model, rows that of the algebra.
                z = self.inducing_points
                dtype = z.dtype if name == "old_inducing_points" else value.dtype
                empty = torch.empty_like(value, dtype=dtype, device=z.device)
                setattr(self, name, empty)
        self._resize_like(self, state_dict, prefix)
        q = self._variational_distribution
        self._resize_like(q, state_dict, prefix + "_variational_distribution.")
        q.num_inducing_points = self.inducing_points.size(-2)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _resize_like(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str
    ) -> None:
        """Change sizes, never the number of batch dimensions."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = state_dict.get(prefix + name)
            if value is None or value.shape == parameter.shape:
                continue
            if value.dim() == parameter.dim():
                replace_parameter(module, name, torch.empty_like(value))
        value = state_dict.get(prefix + "inducing_points")
        if module is self and value is not None and "inducing_points" in self._buffers:
            if value.dim() == self.inducing_points.dim():
                self.inducing_points = self.inducing_points.new_empty(value.shape)


class _StreamingWrapper:
    """What GPyTorch's wrappers of a strategy need in order not to drop the past."""

    base_variational_strategy: StreamingVariationalStrategy

    def _sum_latents(self, value: Tensor) -> Tensor:
        raise NotImplementedError

    def kl_divergence(self) -> Tensor:
        """The divergence of the wrapped strategy, summed over its functions."""
        return self._sum_latents(self.base_variational_strategy.kl_divergence())

    def kl_terms(self) -> KLTerms:
        """The parts of :meth:`kl_divergence`."""
        terms = self.base_variational_strategy.kl_terms()
        return KLTerms(*(self._sum_latents(term) for term in terms))

    def absorb(
        self,
        inducing_points: Tensor | None = None,
        *,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        max_surprise: float = 3.0,
    ) -> AbsorbResult:
        """See :meth:`StreamingVariationalStrategy.absorb`.

        Args:
            inducing_points: ``(*batch, m_c, d)``, of the next update, or ``None``.
            optimizer: Optimisers that hold the parameters.
            max_surprise: For directions in which q is wider than the prior.

        Returns:
            One entry for each latent function.
        """
        return self.base_variational_strategy.absorb(
            inducing_points, optimizer=optimizer, max_surprise=max_surprise
        )

    def get_fantasy_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not offered: GPyTorch 1.15 computes fantasies with the wrong noise."""
        _raise_no_fantasies(self)


class IndependentMultitaskStreamingStrategy(
    _StreamingWrapper, IndependentMultitaskVariationalStrategy
):
    """GPyTorch's ``IndependentMultitaskVariationalStrategy`` with a memory.

    GPyTorch's own would compute the divergence anew from q and the prior, and so
    drop the past in silence.

    Args:
        base_variational_strategy: A :class:`StreamingVariationalStrategy` with a
            batch of functions.
        num_tasks: Number of tasks, the size of ``task_dim``.
        task_dim: The batch dimension that holds the tasks.
    """

    def __init__(
        self,
        base_variational_strategy: StreamingVariationalStrategy,
        num_tasks: int,
        task_dim: int = -1,
    ) -> None:
        _check_base(base_variational_strategy)
        check.check_positive_int(num_tasks, "num_tasks")
        super().__init__(base_variational_strategy, num_tasks, task_dim=task_dim)

    def _sum_latents(self, value: Tensor) -> Tensor:
        if not -value.dim() <= self.task_dim < value.dim():
            return value  # one function, repeated for every task
        return value.sum(self.task_dim)


class LMCStreamingStrategy(_StreamingWrapper, LMCVariationalStrategy):
    """GPyTorch's ``LMCVariationalStrategy`` with a memory.

    The past of the latent functions is kept; the coefficients that mix them are
    parameters like others, so a change of them changes what the past says about the
    tasks.

    Args:
        base_variational_strategy: A :class:`StreamingVariationalStrategy` with a
            batch of latent functions.
        num_tasks: Number of tasks.
        num_latents: Number of latent functions.
        latent_dim: The batch dimension that holds the latent functions, negative.
        jitter_val: Jitter of the covariance between tasks.
    """

    def __init__(
        self,
        base_variational_strategy: StreamingVariationalStrategy,
        num_tasks: int,
        num_latents: int = 1,
        latent_dim: int = -1,
        jitter_val: float | None = None,
    ) -> None:
        _check_base(base_variational_strategy)
        check.check_positive_int(num_tasks, "num_tasks")
        super().__init__(
            base_variational_strategy,
            num_tasks,
            num_latents=num_latents,
            latent_dim=latent_dim,
            jitter_val=jitter_val,
        )

    def _sum_latents(self, value: Tensor) -> Tensor:
        return value.sum(self.latent_dim)


def whitened_parameters(
    q: _VariationalDistribution, mean: Tensor, chol: Tensor
) -> dict[str, Tensor]:
    """Values of the parameters of ``q`` that make it ``N(mean, chol cholᵀ)``.

    A mean-field distribution takes the marginal variances.

    Args:
        q: One of GPyTorch's Gaussian variational distributions.
        mean: ``(*batch, m)``.
        chol: ``(*batch, m, m)``, lower triangular.

    Returns:
        Tensors by the names of the parameters.
    """
    if isinstance(q, CholeskyVariationalDistribution):
        return {"variational_mean": mean, "chol_variational_covar": chol}
    if isinstance(q, MeanFieldVariationalDistribution):
        stddev = squared_norm(chol, -1).sqrt()
        return {"variational_mean": mean, "_variational_stddev": stddev}
    eye = torch.eye(chol.size(-1), dtype=chol.dtype, device=chol.device)
    inverse = solve_lower(chol, eye)
    precision = inverse.mT @ inverse
    natural_vec = matvec(precision, mean)
    if isinstance(q, NaturalVariationalDistribution):
        return {"natural_vec": natural_vec, "natural_mat": -0.5 * precision}
    if isinstance(q, TrilNaturalVariationalDistribution):
        return {"natural_vec": natural_vec, "natural_tril_mat": inverse}
    raise ArgumentError(
        f"{type(q).__name__} cannot be moved to new inducing points; expected "
        "CholeskyVariationalDistribution, MeanFieldVariationalDistribution, "
        "NaturalVariationalDistribution or TrilNaturalVariationalDistribution. "
        "absorb() without inducing_points works."
    )


def replace_parameter(
    module: nn.Module,
    name: str,
    value: Tensor,
    optimizers: tuple[Optimizer, ...] = (),
) -> None:
    """Give a parameter another value, of any shape, and keep the object.

    An optimiser that holds the parameter then goes on with it. Where PyTorch refuses
    (a graph that uses the parameter is alive and has not been run backward), the
    parameter becomes a new object; optimisers passed here get it, others cannot.

    Args:
        module: The module that owns the parameter.
        name: Name of the parameter.
        value: The new value.
        optimizers: Optimisers that drop what they remember of the parameter.
    """
    old = module.get_parameter(name)
    # Contiguous, because L-BFGS calls grad.view(-1).
    value = value.detach().to(old).clone(memory_format=torch.contiguous_format)
    new = old
    if value.shape == old.shape:
        with torch.no_grad():
            old.copy_(value)
        old.grad = None
    else:
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        try:
            torch.utils.swap_tensors(old, new)
            new = old
        except RuntimeError:
            setattr(module, name, new)
    held = False
    for optimizer in optimizers:
        held |= _forget(optimizer, old, new)
    if new is not old and not held:
        warnings.warn(
            f"{name} had to become a new parameter, because a graph that uses the old "
            "one is still alive; your optimiser holds the old one. Pass optimizer= to "
            "absorb, or del the loss and the output before it.",
            StreamingGPWarning,
            stacklevel=3,
        )


def _forget(optimizer: Optimizer, old: Tensor, new: Tensor) -> bool:
    """Drop what an optimiser remembers of a parameter; whether it holds it."""
    held = False
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            if parameter is old:
                group["params"][i] = new
                held = True
    optimizer.state.pop(old, None)
    if held and isinstance(optimizer, LBFGS):
        # One flat history for all parameters, and a remembered size.
        optimizer.state.clear()
        optimizer._numel_cache = None
    return held


def _as_tuple(
    optimizer: Optimizer | Iterable[Optimizer] | None,
) -> tuple[Optimizer, ...]:
    if optimizer is None:
        return ()
    found = (optimizer,) if not isinstance(optimizer, Iterable) else tuple(optimizer)
    for one in found:
        check.check_module(one, "optimizer", Optimizer, "torch.optim.Adam(...)")
    return found


def _broadcast_points(z_b: Tensor, z_a: Tensor) -> tuple[Tensor, Tensor]:
    batch = torch.broadcast_shapes(z_b.shape[:-2], z_a.shape[:-2])
    return z_b.expand(*batch, *z_b.shape[-2:]), z_a.expand(*batch, *z_a.shape[-2:])


def _safe_cholesky(K: Tensor) -> Tensor:
    try:
        return psd_safe_cholesky(K)
    except (NotPSDError, NanError) as error:
        raise FactorizationError(
            f"The covariance of the inducing points could not be factored ({error}); "
            "the state is unchanged. Raise jitter_val, or move apart inducing points "
            "that nearly coincide."
        ) from error


def _check_finite(*values: Tensor) -> None:
    if not all(bool(torch.isfinite(value).all()) for value in values):
        raise NonFiniteError(
            "The posterior to absorb has NaN or infinity in it; the state is "
            "unchanged. Check the hyperparameters of the model for NaN."
        )


def _check_strategy(
    z: Tensor, q: _VariationalDistribution, jitter_val: float | None
) -> None:
    check.check_tensor(z, "inducing_points")
    z = check.check_inputs(
        z, name="inducing_points", num_dims=None, dtype=z.dtype, device=z.device
    )
    check.check_module(
        q,
        "variational_distribution",
        _VariationalDistribution,
        "CholeskyVariationalDistribution(m)",
    )
    if z.size(-2) == 0 or q.num_inducing_points != z.size(-2):
        raise ShapeError(
            f"inducing_points has shape {tuple(z.shape)}, the variational "
            f"distribution has num_inducing_points={q.num_inducing_points}; expected "
            "the same number, above zero."
        )
    if jitter_val is not None:
        check.check_positive(jitter_val, "jitter_val", or_zero=True)


def _check_base(base: Any) -> None:
    if not hasattr(base, "kl_terms"):
        raise ArgumentError(
            f"base_variational_strategy is a {type(base).__name__}, which has no past "
            "to keep; expected a StreamingVariationalStrategy."
        )


def _raise_no_fantasies(strategy: Any) -> NoReturn:
    raise NotImplementedError(
        f"{type(strategy).__name__} makes no fantasy models: GPyTorch's conditioning "
        "of variational models solves with the noise of the likelihood instead of "
        "that of its pseudo-points. Use StreamingGP.condition_on_observations, which "
        "is exact for a Gaussian likelihood."
    )

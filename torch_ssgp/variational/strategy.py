"""GPyTorch's whitened variational strategy with a past, and wrappers of it."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from gpytorch.distributions import Delta, MultivariateNormal
from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
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
from torch.optim import Optimizer

from torch_ssgp import settings
from torch_ssgp import validation as check
from torch_ssgp.atomic import atomic_change
from torch_ssgp.exceptions import (
    ArgumentError,
    FactorizationError,
    NonFiniteError,
    ShapeError,
)
from torch_ssgp.functional import broadcast_matrices, matvec, squared_norm
from torch_ssgp.modules import same_variables
from torch_ssgp.variational.parameters import (
    Optimizers,
    as_tuple,
    replace_parameter,
    resize_like,
    whitened_parameters,
)
from torch_ssgp.variational.sites import (
    KLTerms,
    cross_covariance,
    divide_by_prior,
    expected_misfit,
    predict_whitened,
)
from torch_ssgp.variational.watch import SeenData, label


class AbsorbResult(NamedTuple):
    r"""The report of :meth:`StreamingVariationalStrategy.absorb`.

    Attributes:
        num_clipped: ``(*batch,)``, directions in which q was wider than the prior. If
            there are many, the inner loop stopped far from convergence.
        information: ``(*batch,)``, :math:`\tfrac12 \log |I + U K_{bb} U^\top|`, nats
            that the stored past holds about the inducing values.
    """

    num_clipped: Tensor
    information: Tensor


class StreamingVariationalStrategy(VariationalStrategy):
    r"""GPyTorch's whitened variational strategy with a past.

    Between two calls of :meth:`absorb` it is GPyTorch's ``VariationalStrategy``, apart
    from one term of ``kl_divergence``:

    .. math::
        KL(q(b) \| p(b)) + KL(q(a) \| q_{old}(a)) - KL(q(a) \| p_{old}(a)),

    with :math:`q(a) = \int p(a \mid b)\, q(b)\, db` under the current
    hyperparameters and inducing points. GPyTorch's ``VariationalELBO``,
    ``PredictiveLogLikelihood`` and deep GPs therefore stream unchanged, with
    ``num_data`` the size of the **new** batch, and minibatches of it scale as usual.

    Call :meth:`absorb` before each new batch. Without it the model trains like
    GPyTorch's own, and the new batch replaces the old one.
    :class:`~torch_ssgp.StreamingELBO` warns about this; GPyTorch's objectives cannot.
    Then set ``num_data`` of the objective (and of GPyTorch's ``NGD``) to the size of
    the new batch.

    Cholesky, mean-field, natural and tril-natural variational distributions work. A
    delta distribution trains, but has no covariance to absorb.

    Parameters keep their identity when ``absorb`` changes their size, so an optimiser
    stays valid. Pass it to ``absorb``, which drops its moments for those parameters.

    A state with a different number of inducing points can be loaded. If a state does
    not fit, torch loads a part of it before ``load_state_dict`` of the model raises. To
    load atomically, use ``atomic.atomic_change(lambda: model.load_state_dict(state),
    [model])``.

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

    seen: SeenData | None = None  # what an objective counts, see watch.py

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
        for name, value in _no_past(self.inducing_points.detach()).items():
            self.register_buffer(name, value)

    @property
    def has_old_posterior(self) -> bool:
        """Whether there is a past."""
        return self.old_U.size(-2) > 0

    # -- the objective --------------------------------------------------------------

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
        z_b, z_a = broadcast_matrices(self.inducing_points, self.old_inducing_points)
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
        same = _same_points(z_b.detach(), z_a)
        U, m_a = self.old_U.to(dtype), prior.mean[..., num_b:].to(dtype)
        misfit = expected_misfit(
            L,
            cross_covariance(K_ba, L, same),
            K_aa,
            same,
            U,
            self.old_g.to(dtype) - matvec(U, m_a),
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

    # -- the end of an update -------------------------------------------------------

    @torch.no_grad()
    def absorb(
        self,
        inducing_points: Tensor | None = None,
        *,
        optimizer: Optimizers = None,
        max_surprise: float = 3.0,
    ) -> AbsorbResult:
        r"""Make the current q the old posterior.

        Stores :math:`q(b) / p(b)` as pseudo-observations at the current inducing
        points. What was stored before is already in q. The change is atomic.

        Args:
            inducing_points: ``(*batch, m_c, d)``, inducing points of the next update,
                in any number; q becomes its own prediction there. ``None`` leaves all
                parameters unchanged.
            optimizer: Optimisers that hold the parameters. Their moments for parameters
                that change are dropped. If you do not pass an optimiser with moments,
                it raises after the number of points changes; drop its moments with
                ``optimizer.state.pop(parameter, None)``.
            max_surprise: For directions in which q is wider than the prior because it
                has not converged; see :func:`divide_by_prior`.

        Returns:
            How many directions were clipped, and how much is stored.
        """
        check.check_positive(max_surprise, "max_surprise")
        optimizers = as_tuple(optimizer)
        z_b = self.inducing_points.detach()
        z_c = self._check_inducing_points(inducing_points)
        mean, root = self._whitened_moments(settings.algebra_dtype.of(z_b.dtype))

        prior = self.model.forward(z_b)
        L = self._cholesky(prior.lazy_covariance_matrix, mean.dtype)
        past = divide_by_prior(L, prior.mean.to(L), mean, root, max_surprise)
        parameters: dict[str, Tensor] = {}
        if z_c is not None:
            parameters = self._predicted_parameters(z_b, z_c, L, mean, root)
        _check_finite(past.U, past.g, past.log_evidence, *parameters.values())

        @torch.no_grad()
        def change() -> None:
            self.old_inducing_points = z_b.clone()
            self.old_U, self.old_g = past.U.contiguous(), past.g
            self.old_log_evidence = past.log_evidence
            self.variational_params_initialized.fill_(1)
            if z_c is not None:
                self._move(z_c, parameters, optimizers)
            self.seen = None
            self._clear_cache()

        atomic_change(change, [self], optimizers)
        information = 0.5 * torch.log1p(squared_norm(past.U @ L, -1)).sum(-1)
        return AbsorbResult(past.num_clipped, information)

    def _move(
        self,
        z_c: Tensor,
        parameters: dict[str, Tensor],
        optimizers: tuple[Optimizer, ...],
    ) -> None:
        """Take other inducing points, and the parameters of q there."""
        if isinstance(self.inducing_points, nn.Parameter):
            replace_parameter(self, "inducing_points", z_c, optimizers)
        else:
            self.inducing_points = z_c.clone()
        q = self._variational_distribution
        for name, value in parameters.items():
            replace_parameter(q, name, value, optimizers)
        q.num_inducing_points = z_c.size(-2)

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
        _check_finite(mean, root)
        return mean, root

    def _cholesky(self, K: LinearOperator, dtype: torch.dtype) -> Tensor:
        return _safe_cholesky(to_dense(K.add_jitter(self.jitter_val)).to(dtype))

    def _predicted_parameters(
        self, z_b: Tensor, z_c: Tensor, L: Tensor, mean: Tensor, root: Tensor
    ) -> dict[str, Tensor]:
        """Parameters of the variational distribution that predicts at ``z_c``."""
        num_b, dtype = z_b.size(-2), L.dtype
        K = self.model.forward(torch.cat([z_b, z_c], -2)).lazy_covariance_matrix
        L_c = self._cholesky(K[..., num_b:, num_b:], dtype)
        K_bc = to_dense(K[..., :num_b, num_b:]).to(dtype)
        K_bc = cross_covariance(K_bc, L, _same_points(z_b, z_c))
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

    # -- GPyTorch's machinery -------------------------------------------------------

    def __call__(
        self, x: Tensor, prior: bool = False, diag: bool = True, **kwargs: Any
    ) -> MultivariateNormal:
        """See GPyTorch; in evaluation mode gradients are recomputed each time."""
        if not self.training and torch.is_grad_enabled():
            # The graph behind a kept factor is gone after the first backward pass.
            self._clear_cache()
        return label(super().__call__(x, prior=prior, diag=diag, **kwargs), x)

    def get_fantasy_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not offered: GPyTorch 1.15 computes fantasies with the wrong noise."""
        raise NotImplementedError(
            f"{type(self).__name__} makes no fantasy models: GPyTorch's conditioning "
            "of variational models solves with the noise of the likelihood instead of "
            "that of its pseudo-points. Use StreamingGP.condition_on_observations, "
            "which is exact for a Gaussian likelihood."
        )

    amortized_exact_gp = get_fantasy_model

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # What was kept has the old dtype or device.
        self._clear_cache()
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # What was kept may have a graph, which can be neither copied nor pickled.
        dropped = ("_memoize_cache", "seen")
        return {k: v for k, v in self.__dict__.items() if k not in dropped}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Take the number of inducing points and the past from the state.

        A state of GPyTorch's ``VariationalStrategy`` can be loaded too; it has no past.
        """
        z, ours = state_dict.get(prefix + "inducing_points"), self.inducing_points
        past = {prefix + name: value for name, value in _no_past(ours).items()}
        if z is not None and past.keys().isdisjoint(state_dict):
            new = _no_past(z)
            state_dict |= {prefix + name: value for name, value in new.items()}
        for key in past.keys() & state_dict.keys():
            # Points have the dtype of the model, rows that of the algebra.
            name, value = key.removeprefix(prefix), state_dict[key]
            dtype = ours.dtype if name == "old_inducing_points" else value.dtype
            empty = torch.empty_like(value, dtype=dtype, device=ours.device)
            setattr(self, name, empty)
        resize_like(self, ["inducing_points"], state_dict, prefix)
        q = self._variational_distribution
        names = [name for name, _ in q.named_parameters(recurse=False)]
        resize_like(q, names, state_dict, prefix + "_variational_distribution.")
        q.num_inducing_points = self.inducing_points.size(-2)
        self.seen = None
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _no_past(z: Tensor) -> dict[str, Tensor]:
    """Buffers without a past: empty tensors, because a state_dict leaves out None."""
    return {
        "old_inducing_points": z[..., :0, :].clone(),
        "old_U": z.new_zeros(0, 0),
        "old_g": z.new_zeros(0),
        "old_log_evidence": z.new_zeros(()),
    }


def _same_points(z_b: Tensor, z_a: Tensor) -> Tensor:
    """Which of the points ``z_b`` are which of ``z_a``, ``(*batch, m_b, m_a)``."""
    return same_variables(z_b, z_b[..., :0, :], z_a)


def _safe_cholesky(K: Tensor) -> Tensor:
    try:
        return psd_safe_cholesky(K)
    except (NotPSDError, NanError) as error:
        raise FactorizationError(
            f"The covariance of the inducing points could not be factored ({error}); "
            "the state is unchanged. Raise jitter_val, or remove inducing points that "
            "nearly coincide."
        ) from error


def _check_finite(*values: Tensor) -> None:
    if not all(bool(torch.isfinite(value).all()) for value in values):
        raise NonFiniteError(
            "q or the hyperparameters have NaN or infinite values and cannot be "
            "absorbed; the state is unchanged. Restore parameters from before training "
            "diverged, or train with a smaller learning rate."
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


class StreamingWrapper:
    """What GPyTorch's wrappers of a strategy need to keep the past."""

    base_variational_strategy: StreamingVariationalStrategy

    def sum_latents(self, value: Tensor) -> Tensor:
        """Sum over the functions of the wrapped strategy, ``(*batch,)``."""
        raise NotImplementedError

    def kl_divergence(self) -> Tensor:
        """The divergence of the wrapped strategy, summed over its functions."""
        return self.sum_latents(self.base_variational_strategy.kl_divergence())

    def kl_terms(self) -> KLTerms:
        """The parts of :meth:`kl_divergence`."""
        terms = self.base_variational_strategy.kl_terms()
        return KLTerms(*(self.sum_latents(term) for term in terms))

    def absorb(
        self,
        inducing_points: Tensor | None = None,
        *,
        optimizer: Optimizers = None,
        max_surprise: float = 3.0,
    ) -> AbsorbResult:
        """See :meth:`StreamingVariationalStrategy.absorb`, for each function."""
        return self.base_variational_strategy.absorb(
            inducing_points, optimizer=optimizer, max_surprise=max_surprise
        )

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See GPyTorch."""
        return label(super().__call__(x, *args, **kwargs), x)  # type: ignore[misc]

    get_fantasy_model = StreamingVariationalStrategy.get_fantasy_model


class IndependentMultitaskStreamingStrategy(
    StreamingWrapper, IndependentMultitaskVariationalStrategy
):
    """GPyTorch's ``IndependentMultitaskVariationalStrategy`` with a past.

    GPyTorch's version computes the divergence from q and the prior alone, which
    silently drops the past.

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

    def sum_latents(self, value: Tensor) -> Tensor:
        """Sum over tasks."""
        if not -value.dim() <= self.task_dim < value.dim():
            return value  # one function, repeated for every task
        return value.sum(self.task_dim)


class LMCStreamingStrategy(StreamingWrapper, LMCVariationalStrategy):
    """GPyTorch's ``LMCVariationalStrategy`` with a past.

    The past of the latent functions is kept. The coefficients that mix them are
    ordinary parameters: when they change, so does what the past says about the tasks.

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

    def sum_latents(self, value: Tensor) -> Tensor:
        """Sum over latent functions."""
        return value.sum(self.latent_dim)


def _check_base(base: Any) -> None:
    if not hasattr(base, "kl_terms"):
        raise ArgumentError(
            f"base_variational_strategy is a {type(base).__name__}, which has no past "
            "to keep; expected a StreamingVariationalStrategy."
        )

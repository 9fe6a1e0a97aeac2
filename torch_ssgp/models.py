"""The front door: a Gaussian process that learns from data as they arrive."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import (
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    Likelihood,
)
from gpytorch.means import Mean
from gpytorch.models import GP
from torch import Tensor

from torch_ssgp import functional as F
from torch_ssgp import likelihoods, persistence, settings
from torch_ssgp import validation as check
from torch_ssgp.exceptions import (
    ArgumentError,
    Breakdown,
    BudgetWarning,
    FactorizationError,
    NumericalWarning,
    ShapeError,
    breakdowns,
)
from torch_ssgp.fit import (
    Callback,
    FitResult,
    NewData,
    StreamingObjective,
    UpdateResult,
)
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.inducing import (
    AdaptiveBudget,
    Candidates,
    InducingPolicy,
    merge_duplicates,
)
from torch_ssgp.initialization import initialize_from_data
from torch_ssgp.modules import (
    has_shared_noise,
    inducing_gram,
    observation_noise,
    prior_blocks,
    same_variables,
    usable,
)
from torch_ssgp.prediction import Predictor, freeze
from torch_ssgp.rollback import Whole, all_or_nothing
from torch_ssgp.site_initialization import initialize_sites
from torch_ssgp.sites import SiteObjective, maximize_any
from torch_ssgp.summary import PosteriorSummary

NUM_LANDMARKS = 100  # inputs kept to judge hyperparameters by
LARGE_LOSS = 0.1  # nats per new datum lost by projection that are worth a warning

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])


def one_at_a_time(update: Method) -> Method:
    """Let updates of a model wait for each other, see :meth:`StreamingGP._turn`."""

    @wraps(update)
    def in_turn(self: StreamingGP, *args: Any, **options: Any) -> Any:
        with self._turn():
            return update(self, *args, **options)

    return cast(Method, in_turn)


class StreamingGP(Whole, GP):
    r"""Sparse Gaussian process regression on a stream.

    Every :meth:`update` fits hyperparameters and inducing points to the new data and a
    summary of the past, then replaces the summary. Data are seen once and not stored;
    with fixed hyperparameters and inducing points the result is that of batch
    inference on all data.

    Args:
        covar_module: A GPyTorch kernel.
        likelihood: A GPyTorch likelihood; Gaussian noise by default. Gaussian ones are
            handled in closed form, all others through Gaussian sites (see
            :mod:`torch_ssgp.sites`). Softmax takes one function per class:
            ``batch_shape`` ends in the number of classes, targets are labels
            ``(n,)``.
        mean_module: A GPyTorch mean; a constant by default, zero for labels.
        num_inducing: Largest number of inducing points.
        inducing_policy: Chooses the inducing points of an update;
            ``AdaptiveBudget`` by default, which takes as many as the stream needs.
        alpha: 0 for the variational bound, up to 1 for Power-EP.
        share_noise: Learn one noise from all data ever seen, where the likelihood has
            one noise and ``alpha`` is 0. ``False`` gives the form of the paper, in
            which the past keeps the noise it had.
        batch_shape: Shape of independent streams, updated in one go.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> from torch_ssgp import StreamingGP
        >>> model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=20)
        >>> x = torch.linspace(0, 6, 200).unsqueeze(-1)
        >>> for x_new in x.chunk(4):
        ...     result = model.update(x_new, torch.sin(x_new).squeeze(-1))
        >>> model(x).mean.shape
        torch.Size([200])
    """

    def __init__(
        self,
        covar_module: Kernel,
        likelihood: Likelihood | None = None,
        mean_module: Mean | None = None,
        num_inducing: int = 100,
        inducing_policy: InducingPolicy | None = None,
        alpha: float = 0.0,
        share_noise: bool = True,
        batch_shape: torch.Size = torch.Size(),
    ) -> None:
        super().__init__()
        check.check_module(covar_module, "covar_module", Kernel, "RBFKernel()")
        num_inducing = check.check_positive_int(num_inducing, "num_inducing")
        check.check_alpha(alpha)
        batch_shape = check.check_batch_shape(batch_shape)
        if likelihood is None:
            likelihood = GaussianLikelihood(batch_shape=batch_shape)
        likelihoods.check_likelihood(likelihood, batch_shape, alpha)
        if mean_module is None:
            mean_module = likelihoods.default_mean(likelihood, batch_shape)
        check.check_module(mean_module, "mean_module", Mean, "ConstantMean()")
        check.check_modules(covar_module, mean_module, likelihood, batch_shape)
        if inducing_policy is not None:
            check.check_module(
                inducing_policy, "inducing_policy", InducingPolicy, "AdaptiveBudget()"
            )
        self.covar_module = covar_module
        self.mean_module = mean_module
        self.likelihood = likelihood
        self.num_inducing = num_inducing
        self.inducing_policy = inducing_policy or AdaptiveBudget()
        self.alpha = alpha
        self.share_noise = share_noise
        self.batch_shape = batch_shape
        self.summary = PosteriorSummary(batch_shape)
        self._predictor: tuple[tuple, Tensor, Predictor] | None = None
        self._frozen: tuple[torch.dtype, Tensor, tuple] | None = None
        self._make_locks()

    # -- learning -------------------------------------------------------------------

    @one_at_a_time
    def update(
        self,
        x_new: Tensor,
        y_new: Tensor,
        noise: Tensor | None = None,
        *,
        num_steps: int = 100,
        lr: float | None = None,
        optimizer: str = "adam",
        learn_hyperparameters: bool | int = True,
        learn_inducing_points: bool = True,
        inducing_points: Tensor | None = None,
        trust_region: float | None = None,
        forget: float = 1.0,
        progress: bool = False,
        callback: Callback | None = None,
    ) -> UpdateResult:
        """Learn from new data; the model changes at the very end, or not at all.

        Other threads may predict meanwhile: they see the posterior of before or the
        new one, never a mixture. Where numbers stop being finite an update falls
        back step by step, see ``status`` of the result. Data are values: gradients
        do not flow to them, and modes such as ``torch.no_grad`` change nothing.

        Args:
            x_new: ``(*batch_shape, n, d)`` or ``(n, d)``; ``(n,)`` is one column.
            y_new: ``(*batch_shape, n)``.
            noise: Known noise variances ``(*batch_shape, n)``. From then on the past
                keeps the noise it has (site form).
            num_steps: Budget of the inner loop; 0 for the closed form alone.
            lr: Learning rate, in units of log-hyperparameters and of the spacing of
                inducing points; by default 0.05 for Adam, 1 for L-BFGS.
            optimizer: ``"adam"`` or ``"lbfgs"``.
            learn_hyperparameters: Whether the inner loop moves hyperparameters; a
                number k for every k-th update only, beginning with the first.
            learn_inducing_points: Whether it moves new inducing points.
            inducing_points: ``(*batch_shape, m, d)``, the new inducing points (or
                where the inner loop starts). Otherwise the policy chooses.
            trust_region: Width of a region around the hyperparameters of before: a
                move of their logarithms by so much costs half a nat, twice as much
                two nats. ``None`` lets the data alone decide.
            forget: Power of the past's likelihood, in (0, 1]; 1 forgets nothing.
            progress: Show a progress bar.
            callback: Called as ``callback(step, bound)`` in the inner loop; it may
                look at the model, condition and copy it, but not change it.

        Returns:
            What happened.
        """
        start = time.perf_counter()
        check.check_update_options(
            num_steps=num_steps,
            lr=lr,
            optimizer=optimizer,
            learn_hyperparameters=learn_hyperparameters,
            trust_region=trust_region,
            forget=forget,
            callback=callback,
        )
        data = self._check_data(x_new, y_new, noise)
        z_given = self._check_inducing_points(inducing_points, data.x)
        past = self.summary.discount(forget)
        evidence_before = self._evidence(past)
        every, num_steps = int(learn_hyperparameters), int(num_steps)
        learn = partial(
            self._learn,
            data,
            past,
            z_given,
            lr=lr,
            optimizer=optimizer,
            learn_hyperparameters=every > 0
            and int(self.summary.num_updates) % every == 0,
            learn_inducing_points=learn_inducing_points,
            trust_region=trust_region,
            progress=progress,
            callback=callback,
        )
        try:
            try:
                learned = learn(num_steps=num_steps)
            except Breakdown:
                if num_steps == 0:
                    raise
                learned = learn(num_steps=0)._replace(status="closed_form")
        except Breakdown as error:
            raise FactorizationError(
                f"Nothing could be learned from the data ({error}); the model is "
                "unchanged. Check kernel and likelihood for values that are not "
                "finite, or raise the jitter: with torch_ssgp.settings.jitter(1e-4): "
                "..."
            ) from error
        objective, fit, loss = learned.objective, learned.fit, learned.loss
        num_old, num_inducing = objective.z_a.size(-2), objective.z.size(-2)
        loss_before = objective.loss_before
        result = UpdateResult(
            bound=learned.bound,
            increment=learned.bound - evidence_before,
            bound_trace=fit.bound_trace,
            num_steps=fit.num_steps,
            converged=fit.converged and objective.settled,
            projection_loss=loss,
            projection_loss_before=loss if loss_before is None else loss_before,
            num_inducing=num_inducing,
            num_kept=learned.num_kept,
            num_added=num_inducing - learned.num_kept,
            num_dropped=num_old - learned.num_kept,
            seconds=time.perf_counter() - start,
            status=learned.status,
        )
        # Before the change: a warning may be an error.
        if learned.status != "ok":
            warnings.warn(_ADVICE[learned.status], NumericalWarning, stacklevel=3)
        is_large = loss > LARGE_LOSS * data.y.size(-1)
        if z_given is None and bool(is_large.any()):
            advice = self.inducing_policy.advice(num_inducing, self.num_inducing)
            text = _TOO_FEW.format(num_inducing, advice)
            warnings.warn(text, BudgetWarning, stacklevel=3)
        self._commit(objective, learned.state)
        return result

    def _learn(
        self,
        data: NewData,
        past: PseudoObservations,
        z_given: Tensor | None,
        *,
        num_steps: int,
        lr: float | None,
        optimizer: str,
        learn_hyperparameters: bool,
        learn_inducing_points: bool,
        trust_region: float | None,
        progress: bool,
        callback: Callback | None,
    ) -> Learned:
        """An update on working copies; the model stays as it is."""
        objective = self._objective(data, past, learn=num_steps > 0)
        jitter = objective.jitter
        if self.summary.is_empty and learn_hyperparameters and num_steps:
            if isinstance(objective, SiteObjective):
                initialize_sites(objective)
            else:
                initialize_from_data(
                    objective.mean,
                    objective.kernel,
                    objective.likelihood,
                    data.x,
                    data.y,
                )
        with torch.no_grad():
            z = self._choose(objective) if z_given is None else z_given
        objective.start_at(z, learn=learn_inducing_points and num_steps > 0)
        if num_steps:
            _with_enough_jitter(objective, objective.check_finite)
        fit = maximize_any(
            objective,
            num_steps=num_steps,
            lr=lr,
            optimizer=optimizer,
            learn_hyperparameters=learn_hyperparameters,
            learn_inducing_points=learn_inducing_points,
            trust_region=trust_region,
            progress=progress,
            callback=callback,
        )
        with torch.no_grad():
            absorb = partial(self._absorb, objective, revise=z_given is None)
            learned = _with_enough_jitter(objective, absorb)
        if objective.jitter > jitter:
            raised = torch.full_like(self.summary.jitter, objective.jitter)
            learned.state["jitter"] = raised
            return learned._replace(fit=fit, status="jitter")
        return learned._replace(fit=fit, status=fit.status)

    def condition_on_observations(
        self,
        x: Tensor,
        y: Tensor,
        noise: Tensor | None = None,
        *,
        inducing_points: Tensor | None = None,
    ) -> StreamingGP:
        """A new model that has also seen ``(x, y)``; this one is untouched.

        The inputs join the inducing points, so conditioning is exact given the
        summary, in closed form, and differentiable in ``x``, ``y`` and ``noise``.
        Hyperparameters stay. The next :meth:`update` of the new model brings the
        number of inducing points back to its budget.

        With a likelihood that is not Gaussian the new data are replaced by their
        Gaussian sites, found by E-steps with fixed hyperparameters; gradients do not
        see how the sites depend on ``x`` and ``y``.

        Args:
            x: ``(*batch, n, d)``, where ``batch`` may add leading dimensions to
                ``batch_shape``.
            y: ``(*batch, n)``, or with further leading dimensions.
            noise: Known noise variances, of the shape of ``y``.
            inducing_points: ``(*batch_shape, m, d)``, where the new model keeps what
                it knows: a number that does not grow, at the price of a projection,
                as an update with ``num_steps=0`` at these points.

        Returns:
            A model whose ``batch_shape`` is that of ``x`` and ``y`` together.
        """
        is_grad_enabled = torch.is_grad_enabled()
        # The new model may be used in other modes than the one it is made in.
        with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
            with self._lock:
                return self._condition(x, y, noise, inducing_points)

    def _condition(
        self,
        x: Tensor,
        y: Tensor,
        noise: Tensor | None,
        inducing_points: Tensor | None,
    ) -> StreamingGP:
        data = self._check_data(x, y, noise, fantasy=True)
        offset: Tensor | float = 0.0
        if not likelihoods.is_gaussian(self.likelihood):
            data, offset = self._as_sites(data)
        shared = self._shares_noise(data.noise)
        kernel, mean, likelihood = self._frozen_modules(data.y.dtype)
        s = self._noise_scale(likelihood, data.y, shared)
        past = self._past(self.summary.pseudo_observations, data, shared)
        past = past._replace(rho=past.rho + offset)
        sigma2 = observation_noise(likelihood, data.noise)
        jitter = self._jitter(data.y.dtype)
        z_a, x_b = F.broadcast_matrices(self._old_points(data.x), data.x)
        if inducing_points is None:
            past = F.observe(past, data.y, sigma2, s)
            z = torch.cat([z_a, x_b], -2)
            m_b = mean(z)
            L = F.cholesky(inducing_gram(kernel, z, jitter).K_zz)
        else:
            points = self._check_inducing_points(inducing_points, data.x)
            assert points is not None
            z = points.expand(*x_b.shape[:-2], *points.shape[-2:])
            same = same_variables(z, x_b, z_a)
            prior = prior_blocks(mean, kernel, z, x_b, z_a, jitter, same)
            # Not compressed: the triangular factor alone has no gradient.
            rows = F.project(prior, past, data.y, sigma2, s, self.alpha)
            past, m_b, L = F.absorb(rows, prior.m_b), prior.m_b, rows.L

        model = self._copy()
        model.batch_shape = data.y.shape[:-1]
        model.summary = PosteriorSummary(model.batch_shape)
        now = self.summary
        kept = (now.landmarks, now.num_updates + 1, now.jitter)
        model.summary.set(z, past, m_b, L, s, shared, *kept)
        return model

    # -- predicting -----------------------------------------------------------------

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Latent posterior at ``x`` ``(*batch, n, d)``; the same in train and eval.

        Differentiable in ``x``, not in hyperparameters. Nothing is factored again
        until hyperparameters or the summary change.
        """
        x = self._check_inputs(x, "x", self.batch_shape)
        return self._current_predictor()(x)

    def predict(self, x: Tensor, noise: Tensor | None = None) -> Any:
        """Posterior predictive of targets at ``x``: the likelihood of ``model(x)``.

        Args:
            x: ``(*batch, n, d)``.
            noise: Known noise variances at ``x``, for likelihoods that need them.
        """
        likelihoods.check_takes_noise(self.likelihood, noise)
        x = self._check_inputs(x, "x", self.batch_shape)
        predictor = self._current_predictor()
        latent, likelihood = predictor(x), copy(predictor.likelihood)
        # In training mode GPyTorch samples function values one by one, else jointly.
        likelihood.training = self.likelihood.training
        if noise is not None:
            check.check_noise(noise, latent.mean)
            return likelihood(latent, noise=noise)
        return likelihood(likelihoods.as_likelihood_input(likelihood, latent))

    # -- states ---------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a file, for :meth:`load`.

        The file is replaced at once, when the new one is on the disk: a process that
        is killed meanwhile leaves the old one.

        Args:
            path: Where to.
        """
        persistence.save(deepcopy(self), path)  # which nobody changes meanwhile

    @classmethod
    @torch.inference_mode(False)
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        map_location: persistence.MapLocation = None,
        covar_module: Kernel | None = None,
        likelihood: Likelihood | None = None,
        mean_module: Mean | None = None,
        inducing_policy: InducingPolicy | None = None,
    ) -> StreamingGP:
        """Read a model that :meth:`save` wrote; it goes on as if it had never stopped.

        No code of the file is run: GPyTorch's modules and the policies of this
        package are rebuilt from it, classes of your own are passed.

        Args:
            path: The file.
            map_location: Device to load to, as in ``torch.load``.
            covar_module: A kernel built as the saved one; its values are replaced.
            likelihood: A likelihood, likewise.
            mean_module: A mean, likewise.
            inducing_policy: A policy, taken as it is.

        Returns:
            The model, in the dtype and on the device it was saved from.
        """
        given = {
            "covar_module": covar_module,
            "likelihood": likelihood,
            "mean_module": mean_module,
            "inducing_policy": inducing_policy,
        }
        return persistence.load(cls, path, map_location, given)

    # -- properties -----------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of data and predictions: that of the hyperparameters."""
        return self._reference().dtype

    @property
    def device(self) -> torch.device:
        """Device of data and predictions."""
        return self._reference().device

    def _reference(self) -> Tensor:
        modules = (self.covar_module, self.likelihood, self.mean_module)
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point():
                    return tensor
        return self.summary.g

    @property
    def _core(self) -> StreamingGP:
        return self

    @property
    def _num_dims(self) -> int | None:
        return None if self.summary.is_empty else self.summary.inducing_points.size(-1)

    # -- steps of an update ---------------------------------------------------------

    def _check_data(
        self, x: Tensor, y: Tensor, noise: Tensor | None, fantasy: bool = False
    ) -> NewData:
        """Checked data in the dtype of the algebra, with all batch dimensions."""
        names = ("x", "y") if fantasy else ("x_new", "y_new")
        likelihoods.check_takes_noise(self.likelihood, noise)
        x = self._check_inputs(x, names[0])
        check.check_tensor(y, names[1])
        batch = self.batch_shape
        if not likelihoods.is_gaussian(self.likelihood):
            y = likelihoods.prepare_targets(self.likelihood, y, x, batch, names)
        try:
            if fantasy:
                batch = torch.broadcast_shapes(batch, x.shape[:-2], y.shape[:-1])
                x_batch = torch.broadcast_shapes(self.batch_shape, x.shape[:-2])
            else:
                x_batch = batch
            x = x.expand(*x_batch, *x.shape[-2:])
        except RuntimeError:
            if fantasy:
                raise ShapeError(
                    f"x has shape {tuple(x.shape)}, y {tuple(y.shape)}, the model "
                    f"batch_shape {tuple(self.batch_shape)}; expected batch dimensions "
                    "that broadcast."
                ) from None
            raise ShapeError(
                f"{names[0]} has shape {tuple(x.shape)}, which does not go with "
                f"batch_shape {tuple(self.batch_shape)}. Expected "
                f"{(*self.batch_shape, x.size(-2), x.size(-1))} or (n, d)."
            ) from None
        check.check_targets(y, x, name=names[1], x_name=names[0], batch_shape=batch)
        if noise is not None:
            check.check_noise(noise, y)
        dtype = settings.algebra_dtype.of(x.dtype)

        def prepared(value: Tensor) -> Tensor:
            return usable((value if fantasy else value.detach()).to(dtype))

        return NewData(
            prepared(x), prepared(y), None if noise is None else prepared(noise)
        )

    def _check_inputs(
        self, x: Tensor, name: str, batch_shape: torch.Size = torch.Size()
    ) -> Tensor:
        x = check.check_inputs(
            x,
            name=name,
            num_dims=self._num_dims,
            dtype=self.dtype,
            device=self.device,
            batch_shape=batch_shape,
        )
        if self.summary.is_empty and x.size(-2):
            dtype = settings.algebra_dtype.of(x.dtype)
            kernel = freeze(self.covar_module, dtype)  # it may remember the call
            check.check_prior(kernel, freeze(self.mean_module, dtype), x.to(dtype))
            made = kernel.state_dict().keys() - self.covar_module.state_dict().keys()
            if made:
                raise ArgumentError(
                    f"covar_module draws {', '.join(sorted(made))} at its first call, "
                    "so that every copy of it would have others. Pass what makes it "
                    f"draw them at once, for RFFKernel num_dims={x.size(-1)}."
                )
        return x

    def _check_inducing_points(self, z: Tensor | None, x: Tensor) -> Tensor | None:
        if z is None:
            return None
        z = check.check_inputs(
            z,
            name="inducing_points",
            num_dims=x.size(-1),
            dtype=self.dtype,
            device=self.device,
        )
        if z.size(-2) == 0:
            raise ShapeError(
                f"inducing_points has shape {tuple(z.shape)}; expected at least one."
            )
        if not check.expands_to(z.shape[:-2], self.batch_shape):
            expected = (*self.batch_shape, *z.shape[-2:])
            raise ShapeError(
                f"inducing_points has shape {tuple(z.shape)}; expected {expected} for "
                f"batch_shape {tuple(self.batch_shape)}."
            )
        return usable(z.to(x.dtype)).expand(*self.batch_shape, *z.shape[-2:])

    def _shares_noise(self, noise: Tensor | None) -> bool:
        """Whether past and new data have the one noise of the likelihood."""
        return (
            self.share_noise
            and self.alpha == 0
            and noise is None
            and has_shared_noise(self.likelihood)
            and (self.summary.is_empty or bool(self.summary.shared_noise))
        )

    def _past(
        self, past: PseudoObservations, data: NewData, shared: bool
    ) -> PseudoObservations:
        """The past in the form of the coming update, in the dtype of the algebra."""
        if self.summary.is_empty:
            y = data.y
            batch = self.batch_shape
            return PseudoObservations(
                y.new_zeros(*batch, 0, 0),
                y.new_zeros(*batch, 0),
                y.new_zeros(batch),
                y.new_zeros(()),
            )
        past = PseudoObservations(*(t.to(data.y.dtype) for t in past))
        if bool(self.summary.shared_noise) and not shared:
            noise = self.likelihood.noise.detach().to(data.y.dtype)
            past = F.to_sites(past, noise.squeeze(-1).expand(self.batch_shape))
        return past

    def _old_points(self, x: Tensor) -> Tensor:
        if self.summary.is_empty:
            return x.new_zeros(*self.batch_shape, 0, x.size(-1))
        return self.summary.inducing_points.to(x.dtype)

    def _objective(
        self, data: NewData, past: PseudoObservations, learn: bool = False
    ) -> StreamingObjective:
        """The bound of this update, on working copies of all modules if they learn."""
        dtype = data.y.dtype
        shared = self._shares_noise(data.noise)
        # A fantasy may have a graph, and not all batch dimensions everywhere.
        z_a, landmarks = (
            t.detach().to(dtype).expand(*data.x.shape[:-2], *t.shape[-2:])
            for t in (self._old_points(data.x), self.summary.landmarks)
        )
        past = PseudoObservations(*(t.detach() for t in self._past(past, data, shared)))
        kernel, mean, likelihood = self._frozen_modules(dtype)
        if learn:
            kernel, mean, likelihood = (
                deepcopy(module).to(dtype)
                for module in (self.covar_module, self.mean_module, self.likelihood)
            )
        gaussian = likelihoods.is_gaussian(self.likelihood)
        return (StreamingObjective if gaussian else SiteObjective)(
            mean,
            kernel,
            likelihood,
            data,
            z_a,
            past,
            shared_noise=shared,
            alpha=self.alpha,
            jitter=self._jitter(dtype),
            landmarks=landmarks,
        )

    @torch.no_grad()
    def _as_sites(self, data: NewData) -> tuple[NewData, Tensor]:
        """Gaussian data that say the same, and what to add to the residual for it."""
        x, past = data.x.detach(), self.summary.pseudo_observations
        _, x = F.broadcast_matrices(self._old_points(x), x)
        objective = self._objective(NewData(x, data.y.detach(), None), past)
        objective.start_at(torch.cat([objective.z_a, x], -2))
        rows, _ = objective.project(objective.prior())
        assert isinstance(objective, SiteObjective) and objective.sites is not None
        noise, _ = objective.noises()
        offset = rows.rho - objective.past.rho - noise.log().sum(-1)
        return NewData(data.x, objective.sites.target, noise), offset

    @torch.no_grad()
    def _evidence(self, past: PseudoObservations) -> Tensor:
        if self.summary.is_empty:
            return self.summary.residual
        summary = self.summary
        rows = F.recall(past, summary.prior_cholesky, summary.prior_mean)
        return F.evidence(rows, summary.noise_scale)

    def _candidates(self, objective: StreamingObjective) -> Candidates:
        noise, s = objective.noises()
        return Candidates(
            kernel=objective.kernel,
            z_a=objective.z_a,
            past=objective.past,
            x=objective.data.x,
            weight=(s.unsqueeze(-1) / noise).expand(objective.data.y.shape),
            s=s,
            jitter=objective.jitter,
            num_inducing=self.num_inducing,
            num_updates=int(self.summary.num_updates),
        )

    @breakdowns()
    def _choose(self, objective: StreamingObjective) -> Tensor:
        z = self.inducing_policy(self._candidates(objective))
        check.check_choice(z, self.inducing_policy, objective.data.x)
        return merge_duplicates(objective.kernel, z, objective.jitter)

    def _revise(self, objective: StreamingObjective, loss: Tensor) -> bool:
        """Choose again where the policy wants to; whether anything changed."""
        z = objective.z.detach()
        candidates = self._candidates(objective)
        revised = self.inducing_policy.revise(candidates, z, loss)
        if revised is not z:
            check.check_choice(revised, self.inducing_policy, objective.data.x)
        revised = merge_duplicates(objective.kernel, revised, objective.jitter)
        if revised is not z:
            objective.start_at(revised)
        return revised is not z

    @breakdowns()
    def _absorb(self, objective: StreamingObjective, revise: bool) -> Learned:
        """What the update ends with; nothing of the model changes yet."""
        data = objective.data
        _round_parameters(objective, self.dtype)
        if objective.z.requires_grad:
            # Where they came to rest, points may coincide.
            objective.start_at(objective.z.detach())
        prior = objective.prior()
        rows, s = objective.project(prior)
        if revise and self._revise(objective, rows.loss / (2 * s)):
            prior = objective.prior()
            rows, s = objective.project(prior)
        loss = rows.loss / (2 * s)
        rows = F.compress(rows)
        bound = F.evidence(rows, s)
        past = F.absorb(rows, prior.m_b)
        finite = [torch.isfinite(value).all() for value in (bound, *past)]
        if not bool(torch.stack(finite).all()):
            raise Breakdown("the new posterior is not finite")
        state = {
            "inducing_points": _stored(objective.z),
            "past": PseudoObservations(*map(_stored, past)),
            "prior_mean": _stored(prior.m_b),
            "prior_cholesky": _stored(rows.L),
            "noise_scale": _stored(s),
            "shared_noise": objective.shared_noise,
            "landmarks": _stored(
                self.summary.with_landmarks(
                    data.x, NUM_LANDMARKS, float(objective.past.n)
                )
            ),
            "num_updates": self.summary.num_updates + 1,
            "jitter": self.summary.jitter,
        }
        num_kept = objective.same[..., data.y.size(-1) :].any(-1).sum(-1)
        return Learned(objective, bound, loss, num_kept, state)

    def _commit(self, objective: StreamingObjective, state: dict) -> None:
        """Make the working copies and the new summary those of the model, at once."""
        pairs = (
            (self.mean_module, objective.mean),
            (self.covar_module, objective.kernel),
            (self.likelihood, objective.likelihood),
        )

        @torch.no_grad()
        def change() -> None:
            for ours, theirs in pairs:
                for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                    a.copy_(b)
                for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
                    a.copy_(b)
            self.summary.set(**state)

        with self._lock:
            all_or_nothing(change, (*(ours for ours, _ in pairs), self.summary))

    # -- caches and copies ----------------------------------------------------------

    def _make_locks(self) -> None:
        self._writing = threading.Lock()  # held by an update, all along
        self._writer: int | None = None  # the thread that holds it
        self._lock = threading.RLock()  # held for a moment: to change, or to look

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for others that change the model: each begins where another ended.

        Whatever the mode of the caller, gradients can be taken in there. If it fails,
        torch's random numbers are as if it had not begun.
        """
        if self._writing.locked() and self._writer == threading.get_ident():
            raise ArgumentError(
                "The model is in the middle of an update, at whose end this change "
                "would be lost. Do it after the update and not in its callback, or to "
                "a copy: copy.deepcopy(model)."
            )
        with self._writing, torch.inference_mode(False):
            device = self.device
            on_host = torch.get_rng_state()
            on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
            try:
                self._writer = threading.get_ident()
                yield
            except BaseException:
                torch.set_rng_state(on_host)
                if on_gpu is not None:
                    torch.cuda.set_rng_state(on_gpu, device)
                raise
            finally:
                self._writer = None

    def _jitter(self, dtype: torch.dtype) -> float:
        """The jitter of the settings, or what an update had to raise it to."""
        return max(settings.jitter.of(dtype), float(self.summary.jitter))

    @torch.inference_mode(False)
    def _frozen_modules(self, dtype: torch.dtype) -> tuple[Kernel, Mean, Likelihood]:
        """Copies that nobody changes; made again when hyperparameters have changed."""
        with self._lock:
            now = self._fingerprint()
            if self._frozen is not None:
                cached_dtype, fingerprint, modules = self._frozen
                if cached_dtype == dtype and torch.equal(fingerprint, now):
                    return modules
            modules = (
                freeze(self.covar_module, dtype),
                freeze(self.mean_module, dtype),
                freeze(self.likelihood, dtype),
            )
            self._frozen = (dtype, now, modules)
            return modules

    def _noise_scale(self, likelihood: Likelihood, y: Tensor, shared: bool) -> Tensor:
        if shared:
            return likelihood.noise.squeeze(-1).expand(self.batch_shape)
        return y.new_ones(self.batch_shape)

    def _fingerprint(self) -> Tensor:
        """All hyperparameters as one vector; a change makes the cache stale."""
        modules = (self.covar_module, self.mean_module, self.likelihood)
        tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            tensors.append(self.likelihood.noise_covar.noise)  # a plain attribute
        return torch.cat([t.detach().flatten().double() for t in tensors])

    @torch.inference_mode(False)
    def _current_predictor(self) -> Predictor:
        """What predicts; made again when the summary, hyperparameters or jitter change.

        With the graph of a fantasy, whether the first to ask for it needs it or not.
        """
        with self._lock:
            summary = self.summary
            dtype = summary.g.dtype
            if summary.is_empty:
                dtype = settings.algebra_dtype.of(self.dtype)
            key = (
                summary.U,
                summary.g,
                summary.inducing_points,
                summary.jitter,
                dtype,
                settings.jitter.of(dtype),
            )
            now = self._fingerprint()
            if self._predictor is not None:
                cached_key, fingerprint, predictor = self._predictor
                same = all(a is b for a, b in zip(key, cached_key, strict=True))
                if same and torch.equal(fingerprint, now):
                    return predictor
            past, shared = summary.pseudo_observations, bool(summary.shared_noise)
            kernel, mean, likelihood = self._frozen_modules(dtype)
            predictor = Predictor.build(
                mean,
                kernel,
                likelihood
                if dtype == self.dtype
                else freeze(self.likelihood, self.dtype),
                summary.inducing_points.to(dtype),
                past,
                # Not repeated over fantasies: one factorisation serves them all.
                likelihood.noise.squeeze(-1) if shared else past.g.new_ones(()),
                self._jitter(dtype),
            )
            self._predictor = (key, now, predictor)
            return predictor

    def _copy(self) -> StreamingGP:
        """A model with copies of all modules, and no summary yet."""
        model = deepcopy(self, {id(self.summary): PosteriorSummary()})
        model._frozen = self._frozen  # the same hyperparameters
        return model

    def __getstate__(self) -> dict:
        """Leave caches and locks out of copies and pickles."""
        state = {**self.__dict__, "_predictor": None, "_frozen": None}
        del state["_writing"], state["_writer"], state["_lock"]
        return state

    def __setstate__(self, state: dict) -> None:
        """A copy has locks of its own."""
        super().__setstate__(state)
        self._make_locks()


class Learned(NamedTuple):
    """What an update ends with, before the model becomes it.

    Attributes:
        objective: Its working copies.
        bound: ``(*batch,)``, bound on the evidence of all data seen.
        loss: ``(*batch,)``, nats lost by the projection.
        num_kept: ``(*batch,)``, old inducing points that are still there.
        state: The next state of the summary.
        fit: What the inner loop did.
        status: How far it had to fall back.
    """

    objective: StreamingObjective
    bound: Tensor
    loss: Tensor
    num_kept: Tensor
    state: dict[str, Any]
    fit: FitResult = FitResult(torch.empty(0), 0, True)
    status: str = "ok"


# The same text for the same number: Python shows a warning once for each text.
_TOO_FEW = (
    f"An update lost more than {LARGE_LOSS} nats per new datum by projecting data and "
    "past on {} inducing points, see UpdateResult.projection_loss. {} to keep what is "
    "lost."
)
_ADVICE = {
    "last_iterate": (
        "The inner loop met a value or a gradient that is not finite; the best "
        "hyperparameters before were kept. Lower lr, or keep hyperparameters where the "
        "kernel is finite by constraints or priors."
    ),
    "jitter": (
        "The covariance of the inducing points could not be factored; the jitter was "
        "raised, see model.summary.jitter, and stays there. Check that the kernel is "
        "positive definite, or set the jitter: with torch_ssgp.settings.jitter(1e-6): "
        "..."
    ),
    "closed_form": (
        "Nothing finite came out of learning; the new data were absorbed with the old "
        "hyperparameters. Check that kernel and likelihood are finite near them, and "
        "bound hyperparameters by constraints or priors."
    ),
}


def _with_enough_jitter(
    objective: StreamingObjective, attempt: Callable[[], Result]
) -> Result:
    """Try with larger and larger jitter, until nothing breaks down."""
    while True:
        try:
            return attempt()
        except Breakdown:
            if not objective.raise_jitter():
                raise


def _stored(value: Tensor) -> Tensor:
    """A tensor of its own, laid out as a loaded one would be: same bits afterwards."""
    return value.detach().clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def _round_parameters(objective: StreamingObjective, dtype: torch.dtype) -> None:
    """Hyperparameters as the model will store them, before the summary is made."""
    for module in (objective.mean, objective.kernel, objective.likelihood):
        for parameter in module.parameters():
            parameter.copy_(parameter.to(dtype))

"""The front door: a Gaussian process that learns from data as they arrive."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

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
    BudgetWarning,
    NumericalWarning,
    ShapeError,
)
from torch_ssgp.inducing import AdaptiveBudget, InducingPolicy
from torch_ssgp.memory import (
    Data,
    GaussianData,
    Memory,
    Start,
    buffers,
    memory_of,
    remember,
)
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
from torch_ssgp.summary import PosteriorSummary
from torch_ssgp.update.learning import (
    Known,
    Learned,
    Limits,
    learn,
    make_objective,
    recall,
)
from torch_ssgp.update.objective import Prior
from torch_ssgp.update.options import Callback, UpdateOptions
from torch_ssgp.update.result import Status, UpdateResult

MEMORY = 2  # points of the memory for every inducing point, by default
LARGE_LOSS = 0.1  # nats per datum whose loss is worth a warning

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

    Every :meth:`update` remembers the new data, learns hyperparameters and inducing
    points from all that is remembered, and stores the posterior. The memory is finer
    than the model and of bounded size: as long as it has room an update is batch
    inference on all data; afterwards it keeps what ``memory_size`` points can say. With
    fixed hyperparameters and inducing points the result is that of batch inference in
    any case.

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
        memory_size: Number of points of the memory; twice ``num_inducing`` by default.
            With ``num_inducing`` the past is kept at the inducing points themselves,
            as in the paper.

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
        memory_size: int | None = None,
    ) -> None:
        super().__init__()
        check.check_module(covar_module, "covar_module", Kernel, "RBFKernel()")
        num_inducing = check.check_positive_int(num_inducing, "num_inducing")
        check.check_alpha(alpha)
        check.check_flag(share_noise, "share_noise")
        if memory_size is None:
            memory_size = MEMORY * num_inducing
        memory_size = check.check_positive_int(memory_size, "memory_size")
        if memory_size < num_inducing:
            raise ArgumentError(
                f"memory_size is {memory_size} with num_inducing={num_inducing}; "
                "expected at least as many points as inducing points."
            )
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
        self.memory_size = memory_size
        self.memory = Memory(batch_shape)
        self.summary = PosteriorSummary(batch_shape)
        self.start = Start(self._prior().parameters())
        self._warned: frozenset[str] = frozenset()
        self._predictors: dict[bool, tuple[tuple, Tensor, Predictor]] = {}
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
            learn_inducing_points: Whether it moves inducing points.
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
        options = UpdateOptions(
            num_steps=num_steps,
            lr=lr,
            optimizer=optimizer,
            learn_hyperparameters=learn_hyperparameters,
            learn_inducing_points=learn_inducing_points,
            inducing_points=inducing_points,
            trust_region=trust_region,
            forget=forget,
            progress=progress,
            callback=callback,
        )
        return self._update(self._check_data(x_new, y_new, noise), options)

    def _update(self, data: Data, options: UpdateOptions) -> UpdateResult:
        """Learn from checked data, which may be none: from what is remembered."""
        start = time.perf_counter()
        points = self._check_inducing_points(options.inducing_points, data.x)
        options = replace(options, inducing_points=points)
        evidence_before = self._evidence(options.forget)
        learned = learn(self._known(data), data, options, self._limits(data))
        num_old = self.summary.num_inducing
        num_inducing = learned.summary["inducing_points"].size(-2)
        result = UpdateResult(
            bound=learned.bound,
            increment=learned.bound - evidence_before,
            bound_trace=learned.ascended.bound_trace,
            num_steps=learned.ascended.num_steps,
            converged=learned.ascended.converged and learned.settled,
            projection_loss=learned.loss,
            projection_loss_before=learned.loss_before,
            memory_loss=learned.memory_loss,
            num_inducing=num_inducing,
            num_kept=learned.num_kept,
            num_added=num_inducing - learned.num_kept,
            num_dropped=num_old - learned.num_kept,
            num_remembered=learned.memory["points"].size(-2),
            restarted=learned.restarted,
            seconds=time.perf_counter() - start,
            status=learned.status,
        )
        # Before the change: a warning may be an error.
        if learned.status is not Status.OK:
            warnings.warn(learned.status.advice, NumericalWarning, stacklevel=4)
        warned = self._warn_of_losses(learned, data, points is not None)
        self._commit(learned)
        self._warned = warned
        return result

    def _warn_of_losses(
        self, learned: Learned, data: Data, points_given: bool
    ) -> frozenset[str]:
        """Say once of each limit that it loses much; what was said so far."""
        num_data = float(learned.summary["num_data"])
        warned = self._warned
        loss = float(learned.loss.max()) / num_data
        if loss > LARGE_LOSS and not points_given and "points" not in warned:
            num_inducing = learned.summary["inducing_points"].size(-2)
            advice = self.inducing_policy.advice(num_inducing, self.num_inducing)
            text = _TOO_FEW_POINTS.format(num_inducing, loss, advice)
            warnings.warn(text, BudgetWarning, stacklevel=5)
            warned = warned | {"points"}
        loss = float(learned.memory_loss.max()) / max(data.y.size(-1), 1)
        if loss > LARGE_LOSS and "memory" not in warned:
            num_points = learned.memory["points"].size(-2)
            text = _TOO_SMALL_MEMORY.format(num_points, loss)
            warnings.warn(text, BudgetWarning, stacklevel=5)
            warned = warned | {"memory"}
        return warned

    @one_at_a_time
    def reset(self) -> None:
        """Forget all data; hyperparameters stay where they are."""
        batch_shape, device = self.batch_shape, self.device

        def change() -> None:
            self.memory = Memory(batch_shape).to(device)
            self.summary = PosteriorSummary(batch_shape).to(device)

        with self._lock:
            all_or_nothing(change, (self,))

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
        labels, offset = data.y, torch.zeros_like(data.y[..., 0])
        if not likelihoods.is_gaussian(self.likelihood):
            data, offset = self._as_sites(data)
        shared = self._shares_noise(data.noise)
        kernel, mean, likelihood = self._frozen_modules(data.y.dtype)
        s = self._noise_scale(likelihood, data.y, shared)
        past = self._past(data, shared)
        past = past._replace(rho=past.rho + offset)
        sigma2 = data.noise
        if likelihoods.is_gaussian(likelihood):
            sigma2 = observation_noise(likelihood, data.noise)
        assert sigma2 is not None  # sites have one
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
        known = None if shared else sigma2.expand(data.y.shape)
        if data.noise is not None:  # without what is learned on top of it
            known = data.noise
        sites = GaussianData(data.y, known, offset)
        model.memory = self._memory_with(data.x, labels, sites, shared)
        model.summary = PosteriorSummary(model.batch_shape)
        model.summary.replace(
            inducing_points=z,
            U=past.U,
            g=past.g,
            residual=past.rho,
            num_data=past.n,
            num_updates=self.summary.num_updates + 1,
            prior_mean=m_b,
            prior_cholesky=L,
            noise_scale=s,
            shared_noise=torch.tensor(shared, device=z.device),
            jitter=self.summary.jitter,
        )
        return model

    @torch.no_grad()
    def _memory_with(
        self, x: Tensor, y: Tensor, sites: GaussianData, shared: bool
    ) -> Memory:
        """A memory that has also seen new data, as values; nothing is projected."""
        new = Data(x.detach(), y.detach(), sites.noise)
        rows, raw = recall(self._known(new), new, shared)
        every, target = remember(raw, new), sites.target
        if raw.y.size(-1):
            old = self.memory.target.to(target.dtype)
            target = torch.cat(F.broadcast_rows(old, target), -1)
        offset = self.memory.offset.to(sites.offset) + sites.offset
        batch = every.y.shape[:-1]
        past = rows.past._replace(
            g=rows.past.g.expand(*batch, -1), rho=rows.past.rho.expand(batch)
        )
        rows, memory = rows._replace(past=past), Memory(batch)
        memory.replace(
            **buffers(rows, every, GaussianData(target, every.noise, offset), shared),
            started_at=self.memory.started_at,
            since_start=self.memory.since_start + new.y.size(-1),
        )
        return memory

    # -- predicting -----------------------------------------------------------------

    def forward(self, x: Tensor, from_memory: bool = False) -> MultivariateNormal:
        """Latent posterior at ``x``; the same in train and eval mode.

        Differentiable in ``x``, not in hyperparameters. Nothing is factored again
        until hyperparameters or what is known change.

        Args:
            x: ``(*batch, n, d)``.
            from_memory: Whether to predict from all points of the memory, which is
                more accurate and costs more, rather than from the inducing points.
        """
        x = self._check_inputs(x, "x", self.batch_shape)
        return self._current_predictor(from_memory)(x)

    def predict(
        self, x: Tensor, noise: Tensor | None = None, *, from_memory: bool = False
    ) -> Any:
        """Posterior predictive of targets at ``x``: the likelihood of ``model(x)``.

        Args:
            x: ``(*batch, n, d)``.
            noise: Known noise variances at ``x``, for likelihoods that need them.
            from_memory: As in ``model(x, from_memory=True)``.
        """
        likelihoods.check_takes_noise(self.likelihood, noise)
        x = self._check_inputs(x, "x", self.batch_shape)
        predictor = self._current_predictor(from_memory)
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
    ) -> Data:
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

        return Data(
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

    def _no_data(self) -> Data:
        """An empty batch, to learn from what is remembered alone."""
        points = self.memory.points
        return Data(points[..., :0, :], points.new_zeros(*self.batch_shape, 0))

    def _shares_noise(self, noise: Tensor | None) -> bool:
        """Whether past and new data have the one noise of the likelihood."""
        return (
            self.share_noise
            and self.alpha == 0
            and noise is None
            and has_shared_noise(self.likelihood)
            and (self.summary.is_empty or bool(self.summary.shared_noise))
        )

    def _past(self, data: Data, shared: bool) -> F.PseudoObservations:
        """The summary in the form of a conditioned model, in the dtype of the data."""
        summary, y = self.summary, data.y
        if summary.is_empty:
            batch = self.batch_shape
            return F.PseudoObservations(
                y.new_zeros(*batch, 0, 0),
                y.new_zeros(*batch, 0),
                y.new_zeros(batch),
                y.new_zeros(()),
            )
        past = F.PseudoObservations(
            *(t.to(y.dtype) for t in summary.pseudo_observations)
        )
        if bool(summary.shared_noise) and not shared:
            noise = self.likelihood.noise.detach().to(y.dtype)
            past = F.to_sites(past, noise.squeeze(-1).expand(self.batch_shape))
        return past

    def _old_points(self, x: Tensor) -> Tensor:
        if self.summary.is_empty:
            return x.new_zeros(*self.batch_shape, 0, x.size(-1))
        return self.summary.inducing_points.to(x.dtype)

    def _prior(self) -> Prior:
        return Prior(self.mean_module, self.covar_module, self.likelihood)

    def _known(self, data: Data) -> Known:
        """All that an update starts from."""
        kernel, mean, likelihood = self._frozen_modules(data.y.dtype)
        start = self.start.values
        if self.memory.is_empty:
            start = list(self.start.named(self._prior().parameters()).values())
        return Known(
            self._prior(),
            Prior(mean, kernel, likelihood),
            start,
            copy(self.memory),
            copy(self.summary),
        )

    def _limits(self, data: Data) -> Limits:
        return Limits(
            num_inducing=self.num_inducing,
            memory_size=self.memory_size,
            policy=self.inducing_policy,
            alpha=self.alpha,
            shared_noise=self._shares_noise(data.noise),
            jitter=self._jitter(data.y.dtype),
            dtype=self.dtype,
        )

    @torch.no_grad()
    def _as_sites(self, data: Data) -> tuple[Data, Tensor]:
        """Gaussian data that say the same, and what to add to the residual for it."""
        x, past = data.x.detach(), self._past(data, shared=False)
        z_a, x = F.broadcast_matrices(self._old_points(x).detach(), x)
        kernel, mean, likelihood = self._frozen_modules(data.y.dtype)
        objective = make_objective(
            Prior(mean, kernel, likelihood),
            Data(x, data.y.detach()),
            z_a,
            F.PseudoObservations(*(t.detach() for t in past)),
            shared_noise=False,
            alpha=self.alpha,
            jitter=self._jitter(data.y.dtype),
        )
        objective.start_at(torch.cat([z_a, x], -2))
        sites = objective.as_gaussian(objective.prior(), freeze=True)
        return Data(data.x, sites.target, sites.noise), sites.offset

    @torch.no_grad()
    def _evidence(self, power: float) -> Tensor:
        """The bound of before, with the past raised to a power."""
        if self.summary.is_empty:
            return self.summary.residual
        summary = copy(self.summary)
        past = summary.pseudo_observations.discount(power)
        rows = F.recall(past, summary.prior_cholesky, summary.prior_mean)
        return F.evidence(rows, summary.noise_scale)

    def _commit(self, learned: Learned) -> None:
        """Make what was learned the model, all at once."""
        prior, is_first = self._prior(), self.memory.is_empty
        pairs = list(zip(prior, learned.prior, strict=True))

        @torch.no_grad()
        def change() -> None:
            if is_first:
                for name, value in self.start.named(prior.parameters()).items():
                    setattr(self.start, name, value)
            for ours, theirs in pairs:
                for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                    a.copy_(b)
                for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
                    a.copy_(b)
            self.memory.replace(**learned.memory)
            self.summary.replace(**learned.summary)

        with self._lock:
            all_or_nothing(change, (*prior, self.memory, self.summary, self.start))

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
    def _current_predictor(self, from_memory: bool = False) -> Predictor:
        """What predicts; made again when what it is made of, or the jitter, changes.

        With the graph of a fantasy, whether the first to ask for it needs it or not.
        """
        with self._lock:
            summary, source = self.summary, self.memory if from_memory else self.summary
            dtype = summary.g.dtype
            if summary.is_empty:
                dtype = settings.algebra_dtype.of(self.dtype)
            key = (*source.buffers(), summary.jitter, dtype, settings.jitter.of(dtype))
            now = self._fingerprint()
            if from_memory in self._predictors:
                cached_key, fingerprint, predictor = self._predictors[from_memory]
                same = all(a is b for a, b in zip(key, cached_key, strict=True))
                if same and torch.equal(fingerprint, now):
                    return predictor
            shared = bool(summary.shared_noise)
            kernel, mean, likelihood = self._frozen_modules(dtype)
            # Not repeated over fantasies: one factorisation serves them all.
            s = likelihood.noise.squeeze(-1) if shared else summary.g.new_ones(())
            z, past = summary.inducing_points, summary.pseudo_observations
            if from_memory and not summary.is_empty:
                noise = self.memory.noise.to(dtype)
                if likelihoods.is_gaussian(likelihood):
                    noise = observation_noise(likelihood, noise)
                z, past = self.memory.points, self.memory.pseudo_observations(noise, s)
            predictor = Predictor.build(
                mean,
                kernel,
                likelihood
                if dtype == self.dtype
                else freeze(self.likelihood, self.dtype),
                z.to(dtype),
                past,
                s,
                self._jitter(dtype),
            )
            self._predictors = {
                **self._predictors,
                from_memory: (key, now, predictor),
            }
            return predictor

    def _copy(self) -> StreamingGP:
        """A model with copies of all modules, and no summary yet."""
        memo: dict[int, Any] = {
            id(self.summary): PosteriorSummary(),
            id(self.memory): Memory(),
        }
        model = deepcopy(self, memo)
        model._frozen = self._frozen  # the same hyperparameters
        return model

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """A state of version 0.1 has a summary and no memory: the two were one."""
        if prefix + "summary.landmarks" in state_dict:
            del state_dict[prefix + "summary.landmarks"]
            old = {
                name: state_dict[f"{prefix}summary.{name}"]
                for name in self.summary.SIZES
                if f"{prefix}summary.{name}" in state_dict
            }
            if old.keys() == self.summary.SIZES.keys():
                memory = memory_of(old)
                state_dict |= {f"{prefix}memory.{n}": v for n, v in memory.items()}
            names = self.start.named(self._prior().parameters())
            own = dict(self.named_parameters())
            by_id = {id(value): name for name, value in own.items()}
            for name, parameter in zip(names, self._prior().parameters(), strict=True):
                loaded = state_dict.get(prefix + by_id[id(parameter)], parameter)
                state_dict[f"{prefix}start.{name}"] = loaded.detach().clone()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict:
        """Leave caches and locks out of copies and pickles."""
        state = {**self.__dict__, "_predictors": {}, "_frozen": None}
        del state["_writing"], state["_writer"], state["_lock"]
        return state

    def __setstate__(self, state: dict) -> None:
        """A copy has locks of its own."""
        super().__setstate__(state)
        self._make_locks()


_TOO_FEW_POINTS = (
    "Computing with {} inducing points loses {:.2g} nats per datum, see "
    "UpdateResult.projection_loss. {}, or predict with from_memory=True. This is said "
    "once."
)
_TOO_SMALL_MEMORY = (
    "Compressing the memory to {} points lost {:.2g} nats per new datum, see "
    "UpdateResult.memory_loss. Raise memory_size, or num_inducing; on a time axis that "
    "grows, let the past fade: forget=0.99. This is said once."
)

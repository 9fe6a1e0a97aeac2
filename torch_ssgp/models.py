"""The front door: a Gaussian process that learns from data as they arrive."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import (
    GaussianLikelihood,
    Likelihood,
)
from gpytorch.means import Mean
from torch import Tensor

from torch_ssgp import likelihoods, persistence
from torch_ssgp import validation as check
from torch_ssgp.advice import warn_once
from torch_ssgp.atomic import atomic_change
from torch_ssgp.conditioning import condition
from torch_ssgp.core import StreamingCore
from torch_ssgp.exceptions import (
    ArgumentError,
    NumericalWarning,
    warn,
)
from torch_ssgp.export import ExportedGP, export_predictor
from torch_ssgp.indexing import streams_of
from torch_ssgp.inducing import AdaptiveBudget, InducingPolicy
from torch_ssgp.memory import (
    Data,
    Memory,
)
from torch_ssgp.summary import PosteriorSummary
from torch_ssgp.update.learning import learn
from torch_ssgp.update.objective import Prior
from torch_ssgp.update.options import Callback, UpdateOptions
from torch_ssgp.update.result import Status, UpdateResult
from torch_ssgp.update.state import Learned

MEMORY = 2  # points of the memory for every inducing point, by default

Method = TypeVar("Method", bound=Callable[..., Any])


def one_at_a_time(update: Method) -> Method:
    """Make updates of a model wait for each other; see ``atomic.Locks``."""

    @wraps(update)
    def in_turn(self: StreamingGP, *args: Any, **options: Any) -> Any:
        with self.locks.turn(self.device):
            return update(self, *args, **options)

    return cast(Method, in_turn)


class StreamingGP(StreamingCore):
    r"""Sparse Gaussian process regression on a stream.

    Every :meth:`update` adds the new data to a memory, learns hyperparameters and
    inducing points from the whole memory, and stores the posterior. The memory has more
    points than the model, and its size is bounded. While it has room, an update is
    batch inference on all data. Afterwards it keeps what ``memory_size`` points can
    express. With fixed hyperparameters and inducing points, the result always equals
    batch inference.

    Args:
        covar_module: A GPyTorch kernel.
        likelihood: A GPyTorch likelihood; Gaussian noise by default. Gaussian ones are
            handled in closed form, all others through Gaussian sites (see
            :mod:`torch_ssgp.update.sites`). Softmax takes one function per class:
            ``batch_shape`` ends in the number of classes, and targets are labels
            ``(n,)``.
        mean_module: A GPyTorch mean; a constant by default, zero for labels. The first
            batch sets a constant of 0.0, unless it is frozen or has a prior. For a mean
            that stays at zero use ``ZeroMean``.
        num_inducing: Largest number of inducing points.
        inducing_policy: Chooses the inducing points of an update;
            ``AdaptiveBudget`` by default, which takes as many as the stream needs.
        alpha: 0 for the variational bound, up to 1 for Power-EP.
        share_noise: Whether to learn one noise from all data seen, if the likelihood
            has one noise and ``alpha`` is 0. ``False`` gives the form of the paper, in
            which the past keeps the noise it had.
        batch_shape: Shape of independent streams, updated together.
        memory_size: Number of points of the memory; twice ``num_inducing`` by default.
            If it equals ``num_inducing``, the past is kept at the inducing points, as
            in the paper.

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
        super().__init__(
            Prior(mean_module, covar_module, likelihood),
            num_inducing,
            memory_size,
            inducing_policy or AdaptiveBudget(),
            alpha,
            share_noise,
            batch_shape,
        )

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
        learn_hyperparameters: bool | int | str = "auto",
        learn_inducing_points: bool | None = None,
        inducing_points: Tensor | None = None,
        trust_region: float | None = None,
        forget: float | str | None = None,
        change_odds: float = 1e-3,
        restart: bool = True,
        progress: bool = False,
        callback: Callback | None = None,
    ) -> UpdateResult:
        """Learn from new data. Updates are atomic, even under Ctrl-C.

        Other threads may predict during an update. They see the old posterior or the
        new one, never a mixture. If numbers stop being finite, the update falls back
        step by step; see ``status`` of the result. Gradients do not flow to the data,
        and modes such as ``torch.no_grad`` change nothing.

        Args:
            x_new: ``(*batch_shape, n, d)`` or ``(n, d)``; ``(n,)`` is one column.
            y_new: ``(*batch_shape, n)``. In a batch of streams, NaN marks a missing
                reading.
            noise: Known noise variances ``(*batch_shape, n)``. From then on, past data
                keep the noise they have (site form).
            num_steps: Budget of the inner loop; 0 for the closed form alone. Steps stop
                when they no longer pay. With ``learn_hyperparameters="auto"`` they stop
                earlier the more often a stream learns.
            lr: Learning rate, in units of log-hyperparameters and of the spacing of
                inducing points; by default 0.05 for Adam, 1 for L-BFGS.
            optimizer: ``"adam"`` or ``"lbfgs"``.
            learn_hyperparameters: Whether the inner loop moves hyperparameters; a
                number k for every k-th update only, starting with the first. ``"auto"``
                runs the inner loop when it pays: when there are many more data than the
                last time, when the new data are surprising, or when points, noise and
                scale no longer suit all data. Other updates only remember.
            learn_inducing_points: Whether it moves inducing points; by default
                whenever it moves hyperparameters.
            inducing_points: ``(*batch_shape, m, d)``, the new inducing points (or where
                the inner loop starts). By default the policy chooses them.
            trust_region: Width of a region around the previous hyperparameters. Moving
                a log-hyperparameter by this width costs half a nat, by twice the width
                two nats. ``None`` for no trust region.
            forget: Power of the past's likelihood, in (0, 1]; 1 forgets nothing.
                ``"auto"`` lets the evidence of the new data decide: 1 while the model
                predicts them well, less if the function drifts, 0 if it has changed;
                hyperparameters then start over. The default is ``"auto"`` if
                hyperparameters are learned. It is 1 if they are fixed, if only every
                k-th update learns, and in a branch.
            change_odds: Prior odds that the stream changes at an update, for
                ``"auto"``.
            restart: Whether to learn hyperparameters from a fresh start too when the
                amount of data has doubled; the better bound wins.
            progress: Show a progress bar.
            callback: Called as ``callback(step, bound)`` in the inner loop. It may
                read, condition and copy the model, but not change it.

        Returns:
            What the update did.
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
            change_odds=change_odds,
            restart=restart,
            progress=progress,
            callback=callback,
        )
        return self.learn_from(self.check_data(x_new, y_new, noise), options)

    def learn_from(
        self,
        data: Data,
        options: UpdateOptions,
        walk: Callable[..., Learned] = learn,
    ) -> UpdateResult:
        """Learn from checked data, or from the memory alone if there are none.

        Args:
            data: The data.
            options: How to learn.
            walk: Performs the update: :func:`~torch_ssgp.update.learning.learn`, or the
                same in several processes.
        """
        start = time.perf_counter()
        if options.inducing_points is not None:
            points = self.check_inducing_points(options.inducing_points, data.x)
            options = replace(options, inducing_points=points)
        learned = walk(self.known(data), data, options, self.limits(data))
        evidence_before = self.evidence(learned.forgot)
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
            forgot=learned.forgot,
            surprise=learned.surprise,
            flattened=learned.flattened,
            learned=learned.learned,
            seconds=time.perf_counter() - start,
            status=learned.status,
        )
        # Before the change: a warning may be an error.
        if learned.status is not Status.OK:
            warn(learned.status.advice, NumericalWarning)
        warned = warn_once(self, learned, data, options)
        self.commit(learned)
        self.warned = warned
        return result

    @one_at_a_time
    def reset(self) -> None:
        """Forget all data but keep the hyperparameters."""
        batch_shape, device = self.batch_shape, self.device

        def change() -> None:
            self.memory = Memory(batch_shape).to(device)
            self.summary = PosteriorSummary(batch_shape).to(device)

        with self.locks.commit:
            atomic_change(change, (self,))

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

        With a likelihood that is not Gaussian, the new data are replaced by their
        Gaussian sites, found by E-steps with fixed hyperparameters. Gradients ignore
        how the sites depend on ``x`` and ``y``.

        Args:
            x: ``(*batch, n, d)``, where ``batch`` may add leading dimensions to
                ``batch_shape``.
            y: ``(*batch, n)``, or with further leading dimensions.
            noise: Known noise variances, of the shape of ``y``.
            inducing_points: ``(*batch_shape, m, d)``, the inducing points of the new
                model. Their number need not grow, at the price of a projection, as in
                an update with ``num_steps=0`` at these points.

        Returns:
            A model whose ``batch_shape`` is that of ``x`` and ``y`` together.
        """
        is_grad_enabled = torch.is_grad_enabled()
        # The new model may be used in other modes than the one it is made in.
        with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
            with self.locks.commit:
                return condition(self, x, y, noise, inducing_points)

    # -- predicting -----------------------------------------------------------------

    def forward(self, x: Tensor, from_memory: bool = False) -> MultivariateNormal:
        """Latent posterior at ``x``; the same in train and eval mode.

        Differentiable in ``x``, not in hyperparameters. Factorisations are reused until
        hyperparameters or data change.

        Args:
            x: ``(*batch, n, d)``.
            from_memory: Whether to predict from all points of the memory, which is
                more accurate and costs more, rather than from the inducing points.
        """
        x = self.check_inputs(x, "x", self.batch_shape)
        return self.predictor(from_memory)(x)

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
        x = self.check_inputs(x, "x", self.batch_shape)
        predictor = self.predictor(from_memory)
        latent, likelihood = predictor(x), copy(predictor.likelihood)
        # In training mode GPyTorch samples function values one by one, else jointly.
        likelihood.training = self.likelihood.training
        if noise is not None:
            check.check_noise(noise, latent.mean)
            return likelihood(latent, noise=noise)
        return likelihood(likelihoods.as_likelihood_input(likelihood, latent))

    def export(
        self, dtype: torch.dtype | None = None, *, from_memory: bool = False
    ) -> ExportedGP:
        """The model as a plain module: x -> (mean, variance) of :meth:`predict`.

        It consists of tensors and closed-form expressions, for ``torch.export``,
        ``torch.compile``, ``torch.jit.trace`` and ONNX. It is a snapshot: later updates
        do not change it.

        Args:
            dtype: Dtype of the results; that of the model by default.
            from_memory: As in ``model(x, from_memory=True)``.

        Returns:
            A module; see :mod:`torch_ssgp.export` for what can be exported.
        """
        return export_predictor(
            self.predictor(from_memory),
            self.dtype if dtype is None else dtype,
            self.num_dims,
        )

    # -- streams of a batch ---------------------------------------------------------

    @torch.inference_mode(False)
    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> StreamingGP:
        """One or several streams of a batch, as a separate model.

        The result is a copy, and neither model changes the other.
        ``for stream in model`` iterates over all streams.

        Args:
            index: An integer, a slice, or a tuple of these for several batch
                dimensions.

        Example:
            >>> import torch
            >>> from gpytorch.kernels import RBFKernel
            >>> from torch_ssgp import StreamingGP
            >>> model = StreamingGP(RBFKernel(), batch_shape=torch.Size([3]))
            >>> model[0].batch_shape, model[1:].batch_shape
            (torch.Size([]), torch.Size([2]))
        """
        with self.locks.commit:
            return streams_of(self, index)

    # -- states ---------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a file, for :meth:`load`.

        The file is replaced atomically: an interrupted save leaves the previous file
        intact.

        Args:
            path: The file to write.
        """
        persistence.save(deepcopy(self), path)  # a copy, which no other thread changes

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
        """Read a model that :meth:`save` wrote; it continues where it stopped.

        No code in the file is run. GPyTorch's modules and the policies of this package
        are rebuilt from it. Pass modules of your own classes.

        Args:
            path: The file.
            map_location: Device to load to, as in ``torch.load``.
            covar_module: A kernel built like the saved one; its values are replaced.
            likelihood: A likelihood, likewise.
            mean_module: A mean, likewise.
            inducing_policy: A policy, used as given.

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

"""The front door: a Gaussian process that learns from data as they arrive."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
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

from torch_ssgp import likelihoods, persistence, plotting
from torch_ssgp import validation as check
from torch_ssgp.advice import warn_once
from torch_ssgp.atomic import atomic_change
from torch_ssgp.conditioning import condition, evidence_of
from torch_ssgp.core import StreamingCore
from torch_ssgp.exceptions import ArgumentError, NumericalWarning, StateError, warn
from torch_ssgp.export import ExportedGP, export_predictor
from torch_ssgp.indexing import streams_of
from torch_ssgp.inducing import InducingPolicy
from torch_ssgp.live import Now
from torch_ssgp.memory import Data, Memory
from torch_ssgp.update.objective import Prior
from torch_ssgp.update.options import DEFAULTS, UpdateOptions, resolve
from torch_ssgp.update.result import Status, UpdateResult
from torch_ssgp.update.state import Learned
from torch_ssgp.update.walk import caught_up, surprise
from torch_ssgp.update.walk import update as update_walk

Method = TypeVar("Method", bound=Callable[..., Any])
LATER = UpdateOptions(learn_hyperparameters="later")
CATCH_UP = 2  # rounds of catching up with data that came while the model learned


def one_at_a_time(update: Method) -> Method:
    """Make updates of a model wait for each other; see ``atomic.Locks``."""

    @wraps(update)
    def in_turn(self: StreamingGP, *args: Any, **options: Any) -> Any:
        with self.locks.turn(self.device):
            return update(self, *args, **options)

    return cast(Method, in_turn)


class StreamingGP(StreamingCore):
    r"""A Gaussian process on a data set of bounded size.

    Until ``memory_size`` rows have come it is the exact Gaussian process on all data.
    When it is full, the past is compressed onto ``num_inducing`` points by the step of
    the paper, and goes on as rows of the same data set. Every :meth:`update` adds the
    new data; when it is due it learns hyperparameters. With fixed hyperparameters and
    inducing points, the result always equals batch inference.

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
        num_inducing: Number of points that a compression leaves.
        inducing_policy: Chooses these points; by default they cover all inputs.
        alpha: 0 for the variational bound, up to 1 for Power-EP.
        share_noise: Whether to learn one noise from all data seen, if the likelihood
            has one noise and ``alpha`` is 0. ``False`` gives the form of the paper, in
            which the past keeps the noise it had.
        batch_shape: Shape of independent streams, updated together.
        memory_size: Largest number of rows; one and a half times ``num_inducing`` by
            default. If it equals ``num_inducing``, every update compresses, as in the
            paper.

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
        num_inducing: int = 200,
        memory_size: int | None = None,
        inducing_policy: InducingPolicy | None = None,
        alpha: float = 0.0,
        share_noise: bool = True,
        batch_shape: torch.Size = torch.Size(),
    ) -> None:
        check.check_module(covar_module, "covar_module", Kernel, "RBFKernel()")
        num_inducing = check.check_positive_int(num_inducing, "num_inducing")
        check.check_alpha(alpha)
        check.check_flag(share_noise, "share_noise")
        memory_size = check.check_memory_size(memory_size, num_inducing)
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
                inducing_policy,
                "inducing_policy",
                InducingPolicy,
                "GreedyInformation()",
            )
        super().__init__(
            Prior(mean_module, covar_module, likelihood),
            num_inducing,
            memory_size,
            inducing_policy,
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
        learn: bool | int | str | None = None,
        forget: float | str | None = None,
        options: UpdateOptions | None = None,
        **keywords: Any,
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
            learn: Whether to learn hyperparameters; a number k for every k-th update
                only, starting with the first. ``"auto"``, the default, learns when
                there are many more data than the last time or an alarm asks for it,
                and a Newton step promises half a nat.
            forget: Power of the past's likelihood, in (0, 1]; 1 takes every datum at
                its word: nothing is left out, faded or reset. ``"auto"``, the default,
                lets the evidence decide; it is 1 if hyperparameters are fixed or only
                every k-th update learns, and in a branch.
            options: All other options, and defaults of these.
            **keywords: Fields of :class:`UpdateOptions` that differ from ``options``,
                such as ``num_steps=50``.

        Returns:
            What the update did.
        """
        if isinstance(noise, UpdateOptions):
            raise ArgumentError(
                "noise is an UpdateOptions; expected noise variances. Write "
                "model.update(x, y, options=UpdateOptions(...))."
            )
        if forget is not None:
            keywords["forget"] = forget
        chosen = resolve(options, learn, keywords)
        return self.learn_from(self.check_data(x_new, y_new, noise), chosen)

    def observe(
        self, x_new: Tensor, y_new: Tensor, noise: Tensor | None = None
    ) -> UpdateResult:
        """Add new data in closed form, in bounded time: ``update(learn="later")``.

        Hyperparameters stay, until :meth:`learn` is called. Alarms are counted, and
        explained there.

        Args:
            x_new: As in :meth:`update`.
            y_new: As in :meth:`update`.
            noise: As in :meth:`update`.

        Returns:
            What the update did.
        """
        return self.update(x_new, y_new, noise, options=LATER)

    def learn(self, options: UpdateOptions | None = None) -> UpdateResult:
        """Do what :meth:`observe` left undone; perhaps in another thread.

        It learns from the data so far while others may observe and predict. What it
        learned is committed atomically, with the data that came meanwhile. A memory
        with room for few more data is compressed, so that :meth:`observe` need not.

        Args:
            options: How to learn.

        Returns:
            What it did.

        Example:
            >>> import torch
            >>> from gpytorch.kernels import RBFKernel, ScaleKernel
            >>> from torch_ssgp import StreamingGP
            >>> model = StreamingGP(ScaleKernel(RBFKernel()))
            >>> for x in torch.linspace(0, 5, 30).split(1):
            ...     result = model.observe(x, torch.sin(x))
            >>> model.learn().learned
            True
        """
        if self.memory.is_empty:
            raise StateError("The model has no data yet. Call observe or update first.")
        start, options = time.perf_counter(), options or DEFAULTS
        with torch.inference_mode(False), torch.enable_grad():
            with self.locks.commit:
                data, hyperparameters = self.no_data(), self.fingerprint()
                known, limits = self.known(data), self.limits(data)
            # Room for data to come, so that no observe has to compress.
            half = (limits.num_inducing + limits.memory_size) // 2
            roomy = limits._replace(memory_size=half)
            learned = update_walk(known, data, options, roomy)
            result = self._result(learned, options, start)
            then = known.memory
            if not result.learned and result.num_rows == then.num_rows:
                if learned.state.counts.since_learning == then.count().since_learning:
                    return result  # there was nothing to do
            for _ in range(CATCH_UP):  # few data are left to catch up with under a lock
                with self.locks.commit:
                    now = self.known(data)
                state = caught_up(learned, then, now, limits)
                learned, then = learned._replace(state=state), now.memory
            with self.locks.turn(self.device), self.locks.commit:
                if not torch.equal(hyperparameters, self.fingerprint()):
                    return replace(result, learned=False)  # others have learned
                state = caught_up(learned, then, self.known(data), limits)
                learned = learned._replace(state=state)
                self.commit(learned, limits.shared_noise)
        return result

    def learn_from(
        self,
        data: Data,
        options: UpdateOptions,
        walk: Callable[..., Learned] = update_walk,
    ) -> UpdateResult:
        """Learn from checked data, or from the memory alone if there are none.

        Args:
            data: The data.
            options: How to learn.
            walk: Performs the update: :func:`~torch_ssgp.update.walk.update`, or the
                same in several processes.
        """
        start = time.perf_counter()
        now = self.add_row(data, options) if walk is update_walk else None
        if now is not None:
            return result_of_row(now, time.perf_counter() - start)
        if options.inducing_points is not None:
            points = self.check_inducing_points(options.inducing_points, data.x)
            options = replace(options, inducing_points=points)
        if self.memory.is_branch and options.forgets_by_evidence:
            options = replace(options, forget=1.0)  # what is inherited stays apart
        limits = self.limits(data)
        learned = walk(self.known(data), data, options, limits)
        result = self._result(learned, options, start)
        # Before the change: a warning may be an error.
        if learned.status is not Status.OK:
            warn(learned.status.advice, NumericalWarning)
        warned = warn_once(self, learned, data, options)
        self.commit(learned, limits.shared_noise)
        self.warned = warned
        return result

    def _result(
        self, learned: Learned, options: UpdateOptions, start: float
    ) -> UpdateResult:
        """The result of an update that went the whole way."""
        state, power = learned.state, learned.forgot * options.power
        rate = torch.zeros_like(learned.bound) if state.rate is None else state.rate
        alarm, kind = state.alarm.max(-1)
        since = state.alarmed.gather(-1, kind.unsqueeze(-1)).squeeze(-1)
        return UpdateResult(
            bound=learned.bound,
            increment=learned.increment,
            bound_trace=learned.ascended.bound_trace,
            num_steps=learned.ascended.num_steps,
            converged=learned.ascended.converged and learned.settled,
            projection_loss=learned.lost,
            num_inducing=state.rows.points.size(-2) + state.num_raw,
            num_rows=state.num_rows,
            restarted=learned.restarted,
            forgot=power,
            rate=rate.expand(learned.bound.shape),
            surprise=learned.surprise,
            alarm=alarm.expand(learned.bound.shape),
            alarm_since=(state.num_raw - since).expand(learned.bound.shape),
            num_outliers=int(state.counts.num_outliers),
            learned=learned.prior is not None,
            seconds=time.perf_counter() - start,
            status=learned.status,
        )

    @one_at_a_time
    def reset(self) -> None:
        """Forget all data but keep the hyperparameters."""
        batch_shape, device = self.batch_shape, self.device

        def change() -> None:
            self.memory = Memory(batch_shape).to(device)

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

        The data become rows, so conditioning is exact, in closed form, and
        differentiable in ``x``, ``y`` and ``noise``. Hyperparameters stay. The next
        :meth:`update` of the new model brings the number of rows back to its limit.

        With a likelihood that is not Gaussian, the new data are replaced by their
        Gaussian sites, found by E-steps with fixed hyperparameters. Gradients ignore
        how the sites depend on ``x`` and ``y``.

        Args:
            x: ``(*batch, n, d)``, where ``batch`` may add leading dimensions to
                ``batch_shape``.
            y: ``(*batch, n)``, or with further leading dimensions.
            noise: Known noise variances, of the shape of ``y``.
            inducing_points: ``(*batch_shape, m, d)``, points onto which the new model
                is compressed, as in an update with ``num_steps=0`` at these points.

        Returns:
            A model whose ``batch_shape`` is that of ``x`` and ``y`` together.
        """
        is_grad_enabled = torch.is_grad_enabled()
        # The new model may be used in other modes than the one it is made in.
        with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
            with self.locks.commit:
                return condition(self, x, y, noise, inducing_points)

    def get_fantasy_model(
        self, inputs: Tensor, targets: Tensor, noise: Tensor | None = None
    ) -> StreamingGP:
        """As :meth:`condition_on_observations`, by the name that GPyTorch uses.

        Args:
            inputs: ``(*batch, n, d)``.
            targets: ``(*batch, n)``.
            noise: Known noise variances, of the shape of ``targets``.
        """
        return self.condition_on_observations(inputs, targets, noise)

    # -- predicting -----------------------------------------------------------------

    def surprise(self, x: Tensor, y: Tensor, noise: Tensor | None = None) -> Tensor:
        """How surprising data would be, before the model learns them.

        Nats per datum by which they are less probable than the model expects, on the
        scale of ``UpdateResult.surprise``: about zero for data as before, so that one
        threshold serves every stream. Zero as long as nothing was learned.

        Args:
            x: ``(*batch_shape, n, d)``.
            y: ``(*batch_shape, n)``; NaN for readings that are missing.
            noise: Known noise variances, of the shape of ``y``.

        Returns:
            ``(*batch_shape,)``.

        Example:
            >>> import torch
            >>> from gpytorch.kernels import RBFKernel, ScaleKernel
            >>> from torch_ssgp import StreamingGP
            >>> model = StreamingGP(ScaleKernel(RBFKernel()))
            >>> x = torch.linspace(0, 6, 60)
            >>> result = model.update(x, torch.sin(x) + 0.1 * torch.randn(60))
            >>> bool(model.surprise(x[:5], torch.sin(x[:5]) + 3) > 10)
            True
        """
        data = self.check_data(x, y, noise)
        with torch.inference_mode(False), self.locks.commit:
            value = surprise(self.known(data), data, self.limits(data))
        return value.to(self.dtype)

    def log_evidence(self) -> Tensor:
        """Log evidence of all rows ``(*batch_shape,)``, differentiable in parameters.

        For a training loop of your own: ``loss = -model.log_evidence().sum()``.
        """
        return evidence_of(self)

    def forward(self, x: Tensor, from_memory: bool | None = None) -> MultivariateNormal:
        """Latent posterior at ``x``; the same in train and eval mode.

        Differentiable in ``x``, not in hyperparameters. Factorisations are reused until
        hyperparameters or data change.

        Args:
            x: ``(*batch, n, d)``.
            from_memory: Deprecated: every prediction is made from the whole memory.
        """
        check.check_from_memory(from_memory)
        x = self.check_inputs(x, "x", self.batch_shape)
        return self.predictor()(x)

    def predict(
        self, x: Tensor, noise: Tensor | None = None, *, from_memory: bool | None = None
    ) -> Any:
        """Posterior predictive of targets at ``x``: the likelihood of ``model(x)``.

        Args:
            x: ``(*batch, n, d)``.
            noise: Known noise variances at ``x``, for likelihoods that need them.
            from_memory: Deprecated, as in ``model(x)``.
        """
        likelihoods.check_takes_noise(self.likelihood, noise)
        x = self.check_inputs(x, "x", self.batch_shape)
        check.check_from_memory(from_memory)
        predictor = self.predictor()
        latent, likelihood = predictor(x), copy(predictor.likelihood)
        # In training mode GPyTorch samples function values one by one, else jointly.
        likelihood.training = self.likelihood.training
        if noise is not None:
            check.check_noise(noise, latent.mean)
            return likelihood(latent, noise=noise)
        return likelihood(likelihoods.as_likelihood_input(likelihood, latent))

    def export(
        self, dtype: torch.dtype | None = None, *, from_memory: bool | None = None
    ) -> ExportedGP:
        """The model as a plain module: x -> (mean, variance) of :meth:`predict`.

        It consists of tensors and closed-form expressions, for ``torch.export``,
        ``torch.compile``, ``torch.jit.trace`` and ONNX. It is a snapshot: later updates
        do not change it.

        Args:
            dtype: Dtype of the results; that of the model by default.
            from_memory: Deprecated, as in ``model(x)``.

        Returns:
            A module; see :mod:`torch_ssgp.export` for what can be exported.
        """
        check.check_from_memory(from_memory)
        return export_predictor(
            self.predictor(),
            self.dtype if dtype is None else dtype,
            self.num_dims,
            self.memory_size,
        )

    def plot(self, ax: Any = None, *, inputs: Sequence[int] | None = None) -> Any:
        """Draw mean, 95 % band, data and points; see :func:`torch_ssgp.plotting.plot`.

        Needs matplotlib.

        Args:
            ax: Matplotlib axes, as many as inputs; made if ``None``.
            inputs: Which inputs have a panel; all by default.

        Returns:
            The axes.
        """
        return plotting.plot(self, ax, inputs=inputs)

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


def result_of_row(now: Now, seconds: float) -> UpdateResult:
    """The result of an update that added one row.

    Args:
        now: The model after it.
        seconds: How long it took.
    """
    live, loudest = now.live, max(now.alarm)
    count = now.num_raw - now.alarmed[now.alarm.index(loudest)]
    surprise = 0.5 * (now.error**2 - 1)
    numbers = [now.bound, now.increment, surprise, loudest, count]
    all_as_one = live.zero.new_tensor(numbers)
    bound, increment, surprised, alarm, since = all_as_one.unbind()
    return UpdateResult(
        bound=bound,
        increment=increment,
        bound_trace=live.nothing,
        num_steps=0,
        converged=True,
        projection_loss=live.zero,
        num_inducing=now.num_points,
        num_rows=now.factor.count,
        restarted=live.never,
        forgot=live.one,
        rate=live.before["rate"],
        surprise=surprised,
        alarm=alarm,
        alarm_since=since,
        num_outliers=int(now.counts.num_outliers),
        learned=False,
        seconds=seconds,
    )

"""The state of a streaming model: modules, buffers, checks, caches and locks.

:class:`StreamingCore` holds a model together. Its public methods are for other modules
of the package; :class:`~torch_ssgp.StreamingGP` is for users.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy, deepcopy
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.means import Mean
from gpytorch.models import GP
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import likelihoods, settings
from torch_ssgp import validation as check
from torch_ssgp.atomic import AtomicModule, Locks, atomic_change
from torch_ssgp.buffers import Start
from torch_ssgp.exceptions import ArgumentError, ShapeError
from torch_ssgp.inducing import InducingPolicy
from torch_ssgp.memory import Data, Memory, memory_of
from torch_ssgp.modules import (
    has_shared_noise,
    leave_inference_mode,
    observation_noise,
)
from torch_ssgp.prediction import Predictor, freeze
from torch_ssgp.summary import PosteriorSummary
from torch_ssgp.update.objective import Prior
from torch_ssgp.update.state import Known, Learned, Limits


class StreamingCore(AtomicModule, GP):
    """The state of a streaming model, as other modules reach it.

    Args:
        prior: Mean, kernel and likelihood.
        num_inducing: Largest number of inducing points.
        memory_size: Number of points of the memory.
        inducing_policy: Chooses the inducing points of an update.
        alpha: Power of Power-EP.
        share_noise: Whether one noise is learned from all data, where there is one.
        batch_shape: Shape of independent streams.
    """

    def __init__(
        self,
        prior: Prior,
        num_inducing: int,
        memory_size: int,
        inducing_policy: InducingPolicy,
        alpha: float,
        share_noise: bool,
        batch_shape: torch.Size,
    ) -> None:
        super().__init__()
        self.mean_module, self.covar_module, self.likelihood = prior
        self.num_inducing = num_inducing
        self.inducing_policy = inducing_policy
        self.alpha = alpha
        self.share_noise = share_noise
        self.batch_shape = batch_shape
        self.memory_size = memory_size
        self.memory = Memory(batch_shape)
        self.summary = PosteriorSummary(batch_shape)
        self.start = Start(self.prior().parameters())
        # The dtype of a model whose modules have no tensor; follows model.to(dtype).
        self.register_buffer("_like", torch.empty(0), persistent=False)
        self.warned: frozenset[str] = frozenset()  # limits that were warned of
        self.locks = Locks()
        self._predictors: dict[bool, tuple[tuple, Tensor, Predictor]] = {}
        self._frozen: tuple[torch.dtype, Tensor, tuple] | None = None
        self._bound: tuple[tuple[Tensor, ...], Tensor] | None = None  # of a summary

    # -- what it is -----------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of data and predictions: that of the hyperparameters, if any."""
        floating = (t for t in self._prior_tensors() if t.is_floating_point())
        return next(floating, self._like).dtype

    @property
    def device(self) -> torch.device:
        """Device of data and predictions."""
        return next(self._prior_tensors(), self.summary.g).device

    def _prior_tensors(self) -> Iterator[Tensor]:
        """All tensors of kernel, likelihood and mean."""
        for module in (self.covar_module, self.likelihood, self.mean_module):
            yield from module.parameters()
            yield from module.buffers()
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            yield self.likelihood.noise_covar.noise  # a plain attribute

    @property
    def core(self) -> StreamingCore:
        return self

    @property
    def num_dims(self) -> int | None:
        return None if self.summary.is_empty else self.summary.inducing_points.size(-1)

    def prior(self) -> Prior:
        return Prior(self.mean_module, self.covar_module, self.likelihood)

    # -- checks ---------------------------------------------------------------------

    def check_data(
        self, x: Tensor, y: Tensor, noise: Tensor | None, fantasy: bool = False
    ) -> Data:
        """Checked data in the dtype of the algebra, with all batch dimensions."""
        names = ("x", "y") if fantasy else ("x_new", "y_new")
        likelihoods.check_takes_noise(self.likelihood, noise)
        came = x
        x = self.check_inputs(x, names[0])
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
                f"{names[0]} has shape {tuple(x.shape)}, which does not fit "
                f"batch_shape {tuple(self.batch_shape)}. Expected "
                f"{(*self.batch_shape, x.size(-2), x.size(-1))} or (n, d)."
            ) from None
        missing = check.check_targets(
            y,
            x,
            name=names[1],
            x_name=names[0],
            x_shape=came.shape,
            batch_shape=batch,
            may_miss=bool(batch) and not fantasy,
        )
        if missing is not None:
            y = likelihoods.fill_missing(self.likelihood, y, missing, names[1])
        if noise is not None:
            noise = check.check_noise(noise, y, missing)
        dtype = settings.algebra_dtype.of(x.dtype)

        def prepared(value: Tensor) -> Tensor:
            return leave_inference_mode(
                (value if fantasy else value.detach()).to(dtype)
            )

        return Data(
            prepared(x),
            prepared(y),
            None if noise is None else prepared(noise),
            None if missing is None else prepared((~missing).to(dtype)),
        )

    def check_inputs(
        self, x: Tensor, name: str, batch_shape: torch.Size = torch.Size()
    ) -> Tensor:
        x = check.check_inputs(
            x,
            name=name,
            num_dims=self.num_dims,
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
                    "so every copy would draw different values. Pass the argument that "
                    "makes it draw them in its constructor; for RFFKernel that is "
                    f"num_dims={x.size(-1)}."
                )
        return x

    def check_inducing_points(self, z: Tensor, x: Tensor) -> Tensor:
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
        return leave_inference_mode(z.to(x.dtype)).expand(
            *self.batch_shape, *z.shape[-2:]
        )

    def no_data(self) -> Data:
        """An empty batch, to learn from the memory alone."""
        points = self.memory.points
        return Data(points[..., :0, :], points.new_zeros(*self.batch_shape, 0))

    # -- what an update starts from, and how it ends --------------------------------

    def known(self, data: Data) -> Known:
        """All that an update starts from."""
        kernel, mean, likelihood = self.frozen_modules(data.y.dtype)
        start = self.start.values
        if self.memory.is_empty:
            start = list(self.start.named(self.prior().parameters()).values())
        return Known(
            self.prior(),
            Prior(mean, kernel, likelihood),
            start,
            copy(self.memory),
            copy(self.summary),
        )

    def limits(self, data: Data) -> Limits:
        return Limits(
            num_inducing=self.num_inducing,
            memory_size=self.memory_size,
            policy=self.inducing_policy,
            alpha=self.alpha,
            shared_noise=self.shares_noise(data.noise),
            jitter=self.jitter(data.y.dtype),
            dtype=self.dtype,
        )

    def shares_noise(self, noise: Tensor | None) -> bool:
        """Whether past and new data share the noise of the likelihood."""
        return (
            self.share_noise
            and self.alpha == 0
            and noise is None
            and has_shared_noise(self.likelihood)
            and (self.summary.is_empty or bool(self.summary.shared_noise))
        )

    def noise_scale(self, likelihood: Likelihood, y: Tensor, shared: bool) -> Tensor:
        if shared:
            return likelihood.noise.squeeze(-1).expand(self.batch_shape)
        return y.new_ones(self.batch_shape)

    def jitter(self, dtype: torch.dtype) -> float:
        """The jitter of the settings, or the larger one that an update had to use."""
        return max(settings.jitter.of(dtype), float(self.summary.jitter))

    @torch.no_grad()
    def evidence(self, power: Tensor) -> Tensor:
        """The bound before an update, with the past raised to a power."""
        if self.summary.is_empty:
            return self.summary.residual
        summary = copy(self.summary)
        if self._bound is not None and bool((power == 1).all()):
            buffers, bound = self._bound
            if all(a is b for a, b in zip(summary.buffers(), buffers, strict=True)):
                return bound
        past = summary.pseudo_observations.discount(power)
        rows = fn.recall(past, summary.prior_cholesky, summary.prior_mean)
        return fn.evidence(rows, summary.noise_scale)

    def commit(self, learned: Learned) -> None:
        """Make what was learned the state of the model, atomically."""
        prior, is_first = self.prior(), self.memory.is_empty
        frozen = () if self._frozen is None else self._frozen[2]
        pairs = [
            (ours, theirs)
            for ours, theirs in zip(prior, learned.prior, strict=True)
            if not any(theirs is module for module in frozen)  # nothing was learned
        ]
        changed = [*(ours for ours, _ in pairs), self.memory, self.summary]
        changed += [self.start] if is_first else []

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

        with self.locks.commit:
            atomic_change(change, changed)
            self._bound = (tuple(self.summary.buffers()), learned.bound.clone())

    # -- caches ---------------------------------------------------------------------

    @torch.inference_mode(False)
    def frozen_modules(self, dtype: torch.dtype) -> tuple[Kernel, Mean, Likelihood]:
        """Frozen copies of the modules, renewed when hyperparameters change."""
        with self.locks.commit:
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

    def _fingerprint(self) -> Tensor:
        """All hyperparameters as one vector; a change makes the cache stale."""
        tensors = (*self._prior_tensors(), self._like)
        with torch.no_grad():
            return torch.cat([t.flatten().double() for t in tensors])

    @torch.inference_mode(False)
    def predictor(self, from_memory: bool = False) -> Predictor:
        """The cached predictor, rebuilt when its inputs or the jitter change.

        It keeps the graph of a fantasy, even if its first caller needs no gradients.
        """
        with self.locks.commit:
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
            kernel, mean, likelihood = self.frozen_modules(dtype)
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
                self.jitter(dtype),
            )
            self._predictors = {
                **self._predictors,
                from_memory: (key, now, predictor),
            }
            return predictor

    # -- copies and states ----------------------------------------------------------

    def forget_frozen_modules(self) -> None:
        """Drop the frozen copies; call this after changing hyperparameters in place."""
        self._frozen = None

    def light_copy(self) -> StreamingCore:
        """A copy that shares what is never changed in place, graphs included.

        Buffers of memory and summary are replaced, never changed.
        """
        shared = (self.summary, self.memory)
        model = deepcopy(self, {id(part): copy(part) for part in shared})
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
            names = self.start.named(self.prior().parameters())
            own = dict(self.named_parameters())
            by_id = {id(value): name for name, value in own.items()}
            for name, parameter in zip(names, self.prior().parameters(), strict=True):
                loaded = state_dict.get(prefix + by_id[id(parameter)], parameter)
                state_dict[f"{prefix}start.{name}"] = loaded.detach().clone()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict:
        """Leave caches and locks out of copies and pickles."""
        state = {**self.__dict__, "_predictors": {}, "_frozen": None, "_bound": None}
        del state["locks"]
        return state

    def __setstate__(self, state: dict) -> None:
        """A copy has its own locks."""
        super().__setstate__(state)
        self.locks = Locks()

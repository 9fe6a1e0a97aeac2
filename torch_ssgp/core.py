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

from torch_ssgp import display, likelihoods, settings
from torch_ssgp import validation as check
from torch_ssgp.atomic import AtomicModule, Locks, atomic_change
from torch_ssgp.buffers import Start, stored
from torch_ssgp.exceptions import (
    ArgumentError,
    Breakdown,
    FactorizationError,
    ShapeError,
)
from torch_ssgp.inducing import InducingPolicy
from torch_ssgp.live import Live, Now, can_be_live
from torch_ssgp.memory import Data, Memory, from_version_02
from torch_ssgp.modules import has_shared_noise, leave_inference_mode, tensors_of
from torch_ssgp.prediction import Predictor, freeze
from torch_ssgp.summary import PosteriorSummary
from torch_ssgp.update.objective import Prior
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.state import Known, Learned, Limits, fitted, recall


class StreamingCore(AtomicModule, GP):
    """The state of a streaming model, as other modules reach it.

    Args:
        prior: Mean, kernel and likelihood.
        num_inducing: Number of points that a compression leaves.
        memory_size: Largest number of rows.
        inducing_policy: Chooses the points of a compression; ``None`` for points that
            cover the inputs.
        alpha: Power of Power-EP.
        share_noise: Whether one noise is learned from all data, where there is one.
        batch_shape: Shape of independent streams.
    """

    def __init__(
        self,
        prior: Prior,
        num_inducing: int,
        memory_size: int,
        inducing_policy: InducingPolicy | None,
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
        self.start = Start(self.prior().parameters())
        # The dtype of a model whose modules have no tensor; follows model.to(dtype).
        self.register_buffer("_like", torch.empty(0), persistent=False)
        self.warned: frozenset[str] = frozenset()  # limits that were warned of
        self.locks = Locks()
        self._predictor: tuple[tuple, Tensor, Predictor] | None = None
        self._live: Live | None = None
        self._frozen: tuple[torch.dtype, Tensor, tuple] | None = None

    # -- what it is -----------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of data and predictions: that of the hyperparameters, if any."""
        floating = (t for t in self._prior_tensors() if t.is_floating_point())
        return next(floating, self._like).dtype

    @property
    def device(self) -> torch.device:
        """Device of data and predictions."""
        return next(self._prior_tensors(), self.memory.before["g"]).device

    def _prior_tensors(self) -> Iterator[Tensor]:
        """All tensors of kernel, likelihood and mean."""
        for module in (self.covar_module, self.likelihood, self.mean_module):
            yield from tensors_of(module)
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            yield self.likelihood.noise_covar.noise  # a plain attribute

    @property
    def core(self) -> StreamingCore:
        return self

    @property
    def num_dims(self) -> int | None:
        return self.memory.num_dims

    @property
    def summary(self) -> PosteriorSummary:
        """The posterior at the points of the memory: a view."""
        return PosteriorSummary(self)

    @property
    def points(self) -> Tensor:
        """Points of the memory ``(*batch_shape, r, d)``: of rows, then of raw data."""
        return self.memory.points

    @property
    def num_data(self) -> Tensor:
        """Data seen: ``()``, or ``(*batch_shape,)`` where streams differ."""
        return self.memory.num_data

    @property
    def num_outliers(self) -> int:
        """Data that were left out as outliers, ever."""
        return int(self.memory.count().num_outliers)

    def prior(self) -> Prior:
        return Prior(self.mean_module, self.covar_module, self.likelihood)

    def __repr__(self) -> str:
        return display.as_text(self)

    def _repr_html_(self) -> str:
        return display.as_html(self)

    # -- checks ---------------------------------------------------------------------

    def check_data(
        self, x: Tensor, y: Tensor, noise: Tensor | None, fantasy: bool = False
    ) -> Data:
        """Checked data in the dtype of the algebra, with all batch dimensions."""
        live = None if fantasy or noise is not None else self._live
        if live is not None and live.takes(x, y, self.dtype):
            dtype = live.base.s.dtype
            return Data(x.detach().to(dtype), y.detach().to(dtype))
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
            value = value if fantasy else value.detach()
            return leave_inference_mode(value.to(dtype))

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
        if self.memory.is_empty and x.size(-2):
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
        """An empty batch in the dtype of the algebra."""
        points = self.memory.points.to(settings.algebra_dtype.of(self.dtype))
        return Data(points[..., :0, :], points.new_zeros(*self.batch_shape, 0))

    # -- what an update starts from, and how it ends --------------------------------

    def known(self, data: Data) -> Known:
        """All that an update starts from."""
        kernel, mean, likelihood = self.frozen_modules(data.y.dtype)
        start, predictor = self.start.values, None
        if not self.memory.is_empty:
            predictor = self.current_predictor()
        if predictor is not None and predictor.tails:
            predictor = None  # fantasies are rows like others from now on
        if self.memory.is_empty:
            start = list(self.start.named(self.prior().parameters()).values())
        return Known(
            self.prior(),
            Prior(mean, kernel, likelihood),
            start,
            copy(self.memory),
            predictor,
            self.memory.curvature if self.memory.curvature.numel() else None,
        )

    def limits(self, data: Data) -> Limits:
        """What an update may use, and in which form."""
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
            and (self.memory.is_empty or bool(self.memory.shared_noise))
        )

    def jitter(self, dtype: torch.dtype) -> float:
        """The jitter of the settings, or the larger one that an update had to use."""
        return max(settings.jitter.of(dtype), float(self.memory.jitter))

    def commit(self, learned: Learned, shared_noise: bool) -> None:
        """Make what was learned the state of the model, atomically."""
        prior, is_first = self.prior(), self.memory.is_empty
        memory = learned.state.buffers(shared_noise)
        if learned.state.jitter > settings.jitter.of(learned.bound.dtype):
            memory["jitter"] = torch.full_like(self.memory.jitter, learned.state.jitter)
        if learned.ascended.curvature is not None:
            memory["curvature"] = stored(learned.ascended.curvature)
        pairs: list[tuple[Any, Any]] = []
        if learned.prior is not None:
            pairs = list(zip(prior, learned.prior, strict=True))
        changed = [*(ours for ours, _ in pairs), self.memory]
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
            self.memory.replace(**memory)

        with self.locks.commit:
            atomic_change(change, changed)
            predictor = learned.state.predictor
            self._predictor = None
            if predictor is not None:
                now = self.keep(predictor)
                kernel, mean, likelihood = (
                    learned.state.prior.kernel,
                    learned.state.prior.mean,
                    learned.state.prior.likelihood,
                )
                modules = (kernel, mean, likelihood)
                self._frozen = (learned.bound.dtype, now, modules)

    # -- caches ---------------------------------------------------------------------

    @torch.inference_mode(False)
    def frozen_modules(self, dtype: torch.dtype) -> tuple[Kernel, Mean, Likelihood]:
        """Frozen copies of the modules, renewed when hyperparameters change."""
        with self.locks.commit:
            now = self.fingerprint()
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

    def fingerprint(self) -> Tensor:
        """All hyperparameters as one vector; a change makes the cache stale."""
        tensors = [t.detach().reshape(-1) for t in self._prior_tensors()]
        kinds = {t.dtype for t in (*tensors, self._like)}
        if len(kinds) > 1:
            tensors = [t.double() for t in tensors]
        return torch.cat([*tensors, self._like.new_empty(0)])

    def _key(self) -> tuple:
        """What a predictor depends on, besides hyperparameters."""
        dtype = self.memory.g.dtype
        if self.memory.is_empty:
            dtype = settings.algebra_dtype.of(self.dtype)
        return (*self.memory.buffers(), dtype, settings.jitter.of(dtype))

    def current_predictor(self) -> Predictor | None:
        """The predictor of this state, if it is at hand."""
        with self.locks.commit:
            live = self.current_live()
            if live is not None:
                return live.predictor
            if self._predictor is None:
                return None
            key, fingerprint, predictor = self._predictor
            same = all(a is b for a, b in zip(self._key(), key, strict=True))
            same = same and torch.equal(fingerprint, self.fingerprint())
            return predictor if same else None

    def current_live(self) -> Live | None:
        """The model to which single data are added, if it is this one."""
        live = self._live
        return live if live is not None and live.is_of(self) else None

    @torch.inference_mode(False)
    @torch.no_grad()
    def add_row(self, data: Data, options: UpdateOptions) -> Now | None:
        """Add a single datum as a row; ``None`` if it has to go another way.

        Args:
            data: New data, checked.
            options: How to learn.
        """
        plain = data.noise is None and data.weight is None and options.power == 1
        if data.y.size(-1) != 1 or not plain or options.inducing_points is not None:
            return None
        if options.learns_always:
            return None
        live = self.current_live()
        if live is None:
            if not can_be_live(self):
                return None
            live = Live(self, self.predictor())
        now = live.add(data, options)
        if now is not None:
            with self.locks.commit:
                self._live, live.now = live, now
                self.memory.later(now)
        return now

    def keep(self, predictor: Predictor) -> Tensor:
        """Take a predictor for that of this state; returns the hyperparameters."""
        now = self.fingerprint()
        self._predictor = (self._key(), now, predictor)
        return now

    @torch.inference_mode(False)
    def predictor(self) -> Predictor:
        """The cached predictor, rebuilt when its inputs or the jitter change.

        It keeps the graph of a fantasy, even if its first caller needs no gradients.
        """
        with self.locks.commit:
            predictor = self.current_predictor()
            if predictor is not None:
                return predictor
            dtype = self._key()[-2]
            if self.memory.is_empty:
                kernel, mean, likelihood = self.frozen_modules(dtype)
                predictor = Predictor(
                    mean,
                    kernel,
                    likelihood,
                    torch.ones((), dtype=dtype, device=self.device),
                )
            else:
                nothing = Data(*(t.to(dtype) for t in self.no_data()[:2]))
                limits = self.limits(nothing)._replace(
                    shared_noise=bool(self.memory.shared_noise)
                )
                try:
                    with torch.no_grad():
                        state = recall(self.known(nothing), nothing, limits)
                        predictor = fitted(state, limits).predictor
                except Breakdown as error:
                    raise FactorizationError(
                        f"The posterior could not be factored ({error}). Change the "
                        "hyperparameters, or raise the jitter: "
                        "with torch_ssgp.settings.jitter(1e-6): ..."
                    ) from error
            assert predictor is not None
            self.keep(predictor)
            return predictor

    # -- copies and states ----------------------------------------------------------

    def forget_frozen_modules(self) -> None:
        """Drop the frozen copies; call this after changing hyperparameters in place."""
        self._frozen = None

    def light_copy(self) -> StreamingCore:
        """A copy that shares what is never changed in place, graphs included.

        Buffers of the memory are replaced, never changed.
        """
        model = deepcopy(self, {id(self.memory): copy(self.memory)})
        model._frozen = self._frozen  # the same hyperparameters
        return model

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """A state of version 0.2 has a summary."""
        if prefix + "summary.num_updates" in state_dict:
            from_version_02(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict:
        """Leave caches and locks out of copies and pickles."""
        state = {**self.__dict__, "_predictor": None, "_frozen": None, "_live": None}
        del state["locks"]
        return state

    def __setstate__(self, state: dict) -> None:
        """A copy has its own locks."""
        super().__setstate__(state)
        self.locks = Locks()

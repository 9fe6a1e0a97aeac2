r"""BoTorch models whose cost does not grow with the number of evaluations.

:class:`SingleTaskStreamingGP` is a BoTorch model around a
:class:`~torch_ssgp.StreamingGP`: evaluations are absorbed as they come in, and every
acquisition function that needs a posterior, a fantasy or a sample path can use it.

Transforms are learned from the first data and then frozen, since what is remembered is
written in their units; :meth:`SingleTaskStreamingGP.restandardize` changes the units
exactly, when the scale of the outcomes turned out to be another.

This is the only module that needs BoTorch: ``pip install 'torch_ssgp[botorch]'``.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from types import NoneType
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import AdditiveKernel, Kernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from gpytorch.means import ConstantMean, Mean
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import GP
from linear_operator import to_linear_operator
from torch import Tensor, nn

from torch_ssgp import functional as fn
from torch_ssgp.atomic import AtomicModule, atomic_change
from torch_ssgp.exceptions import MissingDependencyError
from torch_ssgp.inducing import GreedyInformation, InducingPolicy
from torch_ssgp.memory import Memory
from torch_ssgp.models import StreamingGP
from torch_ssgp.modules import inducing_gram, leave_inference_mode
from torch_ssgp.summary import PosteriorSummary
from torch_ssgp.update import UpdateOptions, UpdateResult
from torch_ssgp.update.options import Callback

try:
    from botorch.acquisition.objective import PosteriorTransform
    from botorch.exceptions.errors import (
        BotorchTensorDimensionError,
        InputDataError,
        UnsupportedError,
    )
    from botorch.models.gpytorch import GPyTorchModel
    from botorch.models.model import FantasizeMixin
    from botorch.models.transforms.input import InputTransform
    from botorch.models.transforms.outcome import OutcomeTransform, Standardize
    from botorch.models.utils import validate_input_scaling
    from botorch.models.utils.gpytorch_modules import (
        get_covar_module_with_dim_scaled_prior,
        get_gaussian_likelihood_with_lognormal_prior,
    )
    from botorch.posteriors import Posterior
    from botorch.posteriors.gpytorch import GPyTorchPosterior
    from botorch.sampling.pathwise.features import (
        KernelEvaluationMap,
        gen_kernel_features,
    )
    from botorch.sampling.pathwise.paths import GeneralizedLinearPath
    from botorch.sampling.pathwise.posterior_samplers import (
        DrawMatheronPaths,
        MatheronPath,
    )
    from botorch.sampling.pathwise.prior_samplers import DrawKernelFeaturePaths
    from botorch.sampling.pathwise.update_strategies import GaussianUpdate
    from botorch.sampling.pathwise.utils import (
        get_input_transform,
        get_output_transform,
    )
    from botorch.utils.datasets import SupervisedDataset
    from botorch.utils.types import DEFAULT
except ImportError as error:
    raise MissingDependencyError(
        "torch_ssgp.surrogates needs BoTorch. Install it with: "
        "pip install 'torch_ssgp[botorch]'"
    ) from error

# Joint posteriors of more points stay lazy. Smaller ones are dense: acquisition
# functions slice them, which a lazily evaluated kernel does slowly, and in GPyTorch
# 1.15 not at all if it has fewer batch dimensions than its inputs.
DENSE = 512

FIT_OPTIONS = (
    "restart",
    "num_steps",
    "lr",
    "optimizer",
    "learn_hyperparameters",
    "learn_inducing_points",
    "progress",
    "callback",
)


class SingleTaskStreamingGP(AtomicModule, GPyTorchModel, GP, FantasizeMixin):
    r"""A single-task BoTorch model that learns from evaluations as they arrive.

    It starts from the data of its constructor and takes more by :meth:`update`. While
    there are no more data than inducing points it is the exact GP that BoTorch's
    ``SingleTaskGP`` is; after that its cost stays where it is. Hyperparameters are
    trained by :meth:`update`, and without new data by ``fit_gpytorch_mll`` (or
    :meth:`fit`), each time on all that the memory holds. The data of the constructor
    are compressed to the size of the memory only after that was done once.

    With ``m`` outputs there are ``m`` independent processes, computed as one batch.

    Args:
        train_X: ``batch_shape x n x d`` inputs.
        train_Y: ``batch_shape x n x m`` outcomes.
        train_Yvar: ``batch_shape x n x m`` known noise variances.
        likelihood: A Gaussian likelihood; by default BoTorch's, with inferred noise,
            or with fixed noise if ``train_Yvar`` is given.
        covar_module: A kernel; by default BoTorch's RBF kernel with dimension-scaled
            priors.
        mean_module: A mean; constant by default.
        num_inducing: Largest number of inducing points.
        outcome_transform: ``Standardize`` by default, ``None`` for none. Learned from
            ``train_Y``, then frozen; see :meth:`restandardize`.
        input_transform: Learned from ``train_X``, then frozen: give ``Normalize`` its
            ``bounds`` if later inputs lie outside those of ``train_X``.
        inducing_policy: Chooses inducing points; ``GreedyInformation`` by default,
            so that the model is exact as long as ``num_inducing`` suffices.
        alpha: 0 for the variational bound, up to 1 for Power-EP.
        share_noise: Whether one noise is learned from all data ever seen.
        memory_size: Number of points of the memory, from which hyperparameters are
            learned; twice ``num_inducing`` by default. Posteriors and fantasies cost
            the same whatever it is.

    Example:
        >>> import torch
        >>> from botorch.fit import fit_gpytorch_mll
        >>> from gpytorch.mlls import ExactMarginalLogLikelihood
        >>> from torch_ssgp.surrogates import SingleTaskStreamingGP
        >>> X = torch.rand(20, 2, dtype=torch.float64)
        >>> Y = torch.sin(6 * X).sum(-1, keepdim=True)
        >>> model = SingleTaskStreamingGP(X[:10], Y[:10])
        >>> mll = fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> result = model.update(X[10:], Y[10:])
        >>> model.posterior(X).mean.shape
        torch.Size([20, 1])
    """

    num_targets: Tensor
    target_mean: Tensor
    target_squares: Tensor
    average_noise: Tensor

    @torch.inference_mode(False)
    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        likelihood: Likelihood | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        num_inducing: int = 100,
        outcome_transform: OutcomeTransform | None = DEFAULT,
        input_transform: InputTransform | None = None,
        inducing_policy: InducingPolicy | None = None,
        alpha: float = 0.0,
        share_noise: bool = True,
        memory_size: int | None = None,
    ) -> None:
        super().__init__()
        _check_data(train_X, train_Y, train_Yvar)
        num_outputs = train_Y.size(-1)
        batch_shape = train_X.shape[:-2]
        if train_Y.shape[:-2] != batch_shape:
            raise BotorchTensorDimensionError(
                f"train_Y has batch shape {tuple(train_Y.shape[:-2])}, train_X "
                f"{tuple(batch_shape)}; expected the same."
            )
        self._num_outputs = num_outputs
        aug_batch_shape = torch.Size(
            (*batch_shape, num_outputs) if num_outputs > 1 else batch_shape
        )
        self._parameter_batch = aug_batch_shape
        if outcome_transform == DEFAULT:
            outcome_transform = Standardize(m=num_outputs, batch_shape=batch_shape)
        _check_transform(outcome_transform, "outcome_transform", OutcomeTransform)
        _check_transform(input_transform, "input_transform", InputTransform)
        X, Y, Yvar = train_X, train_Y, train_Yvar
        with torch.no_grad():
            if input_transform is not None:
                X = input_transform.to(X).train()(X)
                self.input_transform = input_transform.eval()
            if outcome_transform is not None:
                Y, Yvar = outcome_transform.to(Y).train()(Y, Yvar, X=X)
                self.outcome_transform = outcome_transform.eval()
        validate_input_scaling(
            train_X=X,
            train_Y=Y,
            train_Yvar=Yvar,
            check_nans_only=covar_module is not None,
        )
        if likelihood is None and Yvar is None:
            likelihood = get_gaussian_likelihood_with_lognormal_prior(aug_batch_shape)
        elif likelihood is None:
            likelihood = FixedNoiseGaussianLikelihood(
                noise=X.new_ones(*aug_batch_shape, 1), batch_shape=aug_batch_shape
            )
        if covar_module is None:
            covar_module = get_covar_module_with_dim_scaled_prior(
                ard_num_dims=X.size(-1), batch_shape=aug_batch_shape
            )
        self.model = StreamingGP(
            covar_module,
            likelihood,
            mean_module or ConstantMean(batch_shape=aug_batch_shape),
            num_inducing=num_inducing,
            # As long as the budget suffices, the exact model.
            inducing_policy=inducing_policy or GreedyInformation(),
            alpha=alpha,
            share_noise=share_noise,
            batch_shape=aug_batch_shape,
            memory_size=memory_size,
        ).to(X)
        self._num_dims = train_X.size(-1)
        zeros = train_Y.new_zeros(*batch_shape, 1, num_outputs)
        self.register_buffer("num_targets", train_Y.new_zeros(()))
        self.register_buffer("target_mean", zeros)
        self.register_buffer("target_squares", zeros.clone())
        self.register_buffer("average_noise", X.new_ones(*aug_batch_shape, 1))
        self._begin(train_X, train_Y, train_Yvar)
        self.eval()

    def _begin(self, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> None:
        """Take the first data, under hyperparameters that nobody has learned yet.

        Under these nothing is compressed, nor is there a loss to warn of.
        """
        core = self.model
        memory_size, warned = core.memory_size, core.warned
        core.memory_size = max(memory_size, core.num_inducing + 1, X.size(-2))
        core.warned = frozenset({"points", "memory"})
        self._absorb(X, Y, Yvar, UpdateOptions(num_steps=0))
        core.memory_size, core.warned = memory_size, warned

    # -- what BoTorch asks of a model -----------------------------------------------

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the streaming model."""
        return self.model.likelihood

    @property
    def covar_module(self) -> Kernel:
        """The kernel of the streaming model."""
        return self.model.covar_module

    @property
    def mean_module(self) -> Mean:
        """The mean of the streaming model."""
        return self.model.mean_module

    @property
    def num_outputs(self) -> int:
        """The number of outputs, ``m``."""
        return self._num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of independent models, outputs not counted; fantasies come first."""
        batch = self.model.batch_shape
        return batch[:-1] if self._num_outputs > 1 else batch

    @property
    def inducing_points(self) -> Tensor:
        """Inducing points ``(*batch, m, d)``, in the space of transformed inputs."""
        return self.model.summary.inducing_points

    @classmethod
    def construct_inputs(
        cls,
        training_data: SupervisedDataset,
        *,
        num_inducing: int | None = None,
        memory_size: int | None = None,
    ) -> dict[str, Any]:
        """Arguments of the constructor for a data set.

        Args:
            training_data: The data set.
            num_inducing: Largest number of inducing points, if not the default.
            memory_size: Number of points of the memory, if not the default.
        """
        inputs = super().construct_inputs(training_data=training_data)
        sizes = {"num_inducing": num_inducing, "memory_size": memory_size}
        return inputs | {name: n for name, n in sizes.items() if n is not None}

    def train(self, mode: bool = True) -> SingleTaskStreamingGP:
        """Set the mode; transforms stay frozen in either."""
        super().train(mode)
        for name in ("input_transform", "outcome_transform"):
            transform = getattr(self, name, None)
            if transform is not None:
                transform.eval()
        return self

    def eval(self) -> SingleTaskStreamingGP:
        """Set the mode to evaluation."""
        return self.train(False)

    def _set_transformed_inputs(self) -> None:
        """Nothing to transform: data are remembered as transformed."""

    def _revert_to_original_inputs(self) -> None:
        """Nothing to revert: data are remembered as transformed."""

    # -- learning -------------------------------------------------------------------

    def update(
        self,
        X: Tensor,
        Y: Tensor,
        Yvar: Tensor | None = None,
        *,
        restandardize: bool = False,
        restart: bool = True,
        num_steps: int = 100,
        lr: float | None = None,
        optimizer: str = "adam",
        learn_hyperparameters: bool = True,
        learn_inducing_points: bool = False,
        inducing_points: Tensor | None = None,
        forget: float = 1.0,
        progress: bool = False,
        callback: Callback | None = None,
    ) -> UpdateResult:
        """Learn from new evaluations, in place; all or nothing.

        Args:
            X: ``batch_shape x n x d`` new inputs.
            Y: ``batch_shape x n x m`` new outcomes, in original units.
            Yvar: ``batch_shape x n x m`` known noise variances, in original units;
                required if the model has fixed noise.
            restandardize: Standardise by all outcomes seen, these included, before
                learning; see :meth:`restandardize`.
            restart: Whether to learn twice whenever the data have doubled, from the
                hyperparameters as they are and from those of a new model, and keep
                what has the larger bound. What fits the first few evaluations may be
                far from what fits all.
            num_steps: Budget of the inner loop; 0 for the closed form alone.
            lr: Learning rate.
            optimizer: ``"adam"`` or ``"lbfgs"``.
            learn_hyperparameters: Whether the inner loop moves hyperparameters.
            learn_inducing_points: Whether it moves inducing points away from the
                data. As long as they stay, and all data have one, nothing is lost.
            inducing_points: ``batch_shape x m x d`` explicit inducing points, in the
                space of ``X``. Otherwise the policy chooses.
            forget: Power of the past's likelihood, in (0, 1]; 1 forgets nothing.
            progress: Show a progress bar.
            callback: Called as ``callback(step, bound)`` in the inner loop.

        Returns:
            What happened.
        """
        options = UpdateOptions(
            num_steps=num_steps,
            lr=lr,
            optimizer=optimizer,
            learn_hyperparameters=learn_hyperparameters,
            learn_inducing_points=learn_inducing_points,
            forget=forget,
            restart=restart,
            progress=progress,
            callback=callback,
        )
        self._check_new_data(X, Y, Yvar)
        with self.model.locks.turn(self.model.device):
            work = self._working_copy()
            if restandardize:
                moments = work._moments_with(Y, forget)
                work._standardize_by(*_standardization(*moments))
            if inducing_points is not None:
                work._check_inputs(inducing_points, "inducing_points")
                inducing_points = work._training_inputs(inducing_points)
                if self._num_outputs > 1:
                    inducing_points = inducing_points.unsqueeze(-3)
                options = replace(options, inducing_points=inducing_points)
            result = work._absorb(X, Y, Yvar, options)
            self._become(work)
        return result

    def fit(
        self,
        *,
        restart: bool = True,
        num_steps: int = 200,
        lr: float | None = None,
        optimizer: str = "adam",
        learn_hyperparameters: bool = True,
        learn_inducing_points: bool = False,
        progress: bool = False,
        callback: Callback | None = None,
    ) -> UpdateResult:
        """Learn once more from all that is remembered, without new data.

        Args:
            restart: As in :meth:`update`.
            num_steps: Budget of the inner loop.
            lr: Learning rate.
            optimizer: ``"adam"`` or ``"lbfgs"``.
            learn_hyperparameters: Whether the inner loop moves hyperparameters.
            learn_inducing_points: Whether it moves inducing points.
            progress: Show a progress bar.
            callback: Called as ``callback(step, bound)`` in the inner loop.

        Returns:
            What happened.
        """
        options = UpdateOptions(
            num_steps=num_steps,
            lr=lr,
            optimizer=optimizer,
            learn_hyperparameters=learn_hyperparameters,
            learn_inducing_points=learn_inducing_points,
            restart=restart,
            progress=progress,
            callback=callback,
        )
        with self.model.locks.turn(self.model.device):
            work = self._working_copy()
            result = work._learn_again(options)
            self._become(work)
        return result

    def _learn_again(self, options: UpdateOptions) -> UpdateResult:
        return self.model.learn_from(self.model.no_data(), options)

    def custom_fit(
        self,
        mll: MarginalLogLikelihood,
        closure: Callable | None = None,
        optimizer: Callable | None = None,
        closure_kwargs: dict[str, Any] | None = None,
        optimizer_kwargs: dict[str, Any] | None = None,
        **ignored: Any,
    ) -> MarginalLogLikelihood:
        """What ``fit_gpytorch_mll(mll)`` does with this model: :meth:`fit`.

        Args:
            mll: A marginal log likelihood of this model; the objective is always the
                streaming bound with the priors of the hyperparameters.
            closure: Not supported.
            optimizer: Not supported.
            closure_kwargs: Not supported.
            optimizer_kwargs: Options of :meth:`fit`.
            **ignored: Options of BoTorch's own fitting, such as ``max_attempts``.

        Returns:
            The ``mll``, in evaluation mode.
        """
        if closure is not None or closure_kwargs or optimizer is not None:
            raise UnsupportedError(
                "A streaming model maximises its own bound: closure, closure_kwargs "
                "and optimizer cannot be replaced. Pass options of "
                "SingleTaskStreamingGP.fit as optimizer_kwargs."
            )
        options = optimizer_kwargs or {}
        unknown = sorted(set(options) - set(FIT_OPTIONS))
        if unknown:
            raise UnsupportedError(
                f"optimizer_kwargs has {unknown}; expected options of "
                f"SingleTaskStreamingGP.fit: {list(FIT_OPTIONS)}."
            )
        self.fit(**options)
        return mll.eval()

    def restandardize(
        self, means: Tensor | None = None, stdvs: Tensor | None = None
    ) -> None:
        r"""Change the units in which outcomes are stored, exactly.

        Memory and summary are linear in the outcomes, so they can be written in other
        units: afterwards they are what they would be, had all data been standardised
        this way.
        Constant mean, output scale and noise (down to its lower bound) follow, so that
        predictions stay the same. A kernel without an output scale, BoTorch's default,
        has variance one in the new units, as in a ``SingleTaskGP`` built on all data
        at this moment.

        Args:
            means: ``batch_shape x 1 x m``; the mean of all outcomes seen by default.
            stdvs: ``batch_shape x 1 x m``; their standard deviation by default.
        """
        with self.model.locks.turn(self.model.device):
            work = self._working_copy()
            seen = _standardization(
                self.num_targets, self.target_mean, self.target_squares
            )
            work._standardize_by(
                seen[0] if means is None else means, seen[1] if stdvs is None else stdvs
            )
            self._become(work)

    def _working_copy(self) -> SingleTaskStreamingGP:
        """A copy to learn on; it shares what nobody changes in place."""
        core = self.model
        shared = {
            id(core.summary): copy(core.summary),
            id(core.memory): copy(core.memory),
        }
        work = deepcopy(self, shared)
        work.model._frozen = core._frozen  # the same hyperparameters
        return work

    def _become(self, work: SingleTaskStreamingGP) -> None:
        """Take over what a copy of this model has learned, all of it or nothing."""

        @torch.no_grad()
        def change() -> None:
            for ours, theirs in zip(self.parameters(), work.parameters(), strict=True):
                ours.copy_(theirs)
            # Buffers are replaced as a whole, also those of the summary and of the
            # transforms, so that readers see all of them or none.
            for mine, copied in zip(self.modules(), work.modules(), strict=True):
                mine.__dict__["_buffers"] = copied._buffers
            self.model.warned = work.model.warned
            self._sync_noise()

        with self.model.locks.commit:
            atomic_change(change, [self])

    def _absorb(
        self, X: Tensor, Y: Tensor, Yvar: Tensor | None, options: UpdateOptions
    ) -> UpdateResult:
        """Hand transformed data to the core."""
        if self._has_fixed_noise and Yvar is None:
            raise InputDataError(
                "The noise variances are missing, but the model has known noise; pass "
                f"them for Y, of shape {tuple(Y.shape)}."
            )
        X, Y = leave_inference_mode(X.detach()), leave_inference_mode(Y.detach())
        Yvar = None if Yvar is None else leave_inference_mode(Yvar.detach())
        moments = self._moments_with(Y, options.forget)
        with torch.no_grad():
            X = self._training_inputs(X)
            if hasattr(self, "outcome_transform"):
                Y, Yvar = self.outcome_transform(Y, Yvar, X=X)
        x, y, noise = self._to_core(X, Y, Yvar)
        core = self.model
        result = core.learn_from(core.check_data(x, y, noise), options)
        if noise is not None and self._has_fixed_noise:
            weight = y.size(-1) / moments[0]
            average = noise.mean(-1, keepdim=True)
            self.average_noise = self.average_noise.lerp(average, weight)
            self._sync_noise()
        self.num_targets, self.target_mean, self.target_squares = moments
        return result

    def _training_inputs(self, X: Tensor) -> Tensor:
        if hasattr(self, "input_transform"):
            return self.input_transform.preprocess_transform(X)
        return X

    def _to_core(
        self, X: Tensor, Y: Tensor, Yvar: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Outputs become the last batch dimension."""
        if self._num_outputs == 1:
            return X, Y.squeeze(-1), None if Yvar is None else Yvar.squeeze(-1)
        return X.unsqueeze(-3), Y.mT, None if Yvar is None else Yvar.mT

    @property
    def _has_fixed_noise(self) -> bool:
        return isinstance(self.likelihood, FixedNoiseGaussianLikelihood)

    def _sync_noise(self) -> None:
        """Show the average noise where BoTorch looks for it."""
        if self._has_fixed_noise:
            self.likelihood.noise_covar.noise = self.average_noise

    def _check_new_data(self, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> None:
        self._check_inputs(X)
        _check_data(X, Y, Yvar)
        if Y.size(-1) != self._num_outputs:
            raise BotorchTensorDimensionError(
                f"Y has shape {tuple(Y.shape)}: {Y.size(-1)} outputs; the model has "
                f"{self._num_outputs}."
            )
        if (X.shape[:-2], Y.shape[:-2]) != (self.batch_shape, self.batch_shape):
            raise BotorchTensorDimensionError(
                f"X and Y have batch shapes {tuple(X.shape[:-2])} and "
                f"{tuple(Y.shape[:-2])}; expected that of the model, "
                f"{tuple(self.batch_shape)}."
            )

    def _check_inputs(self, X: Tensor, name: str = "X") -> None:
        _check_tensor(X, name)
        core = self.model
        if X.ndim < 2 or X.size(-1) != self._num_dims:
            raise BotorchTensorDimensionError(
                f"{name} has shape {tuple(X.shape)}; expected (..., n, "
                f"{self._num_dims})."
            )
        if X.dtype != core.dtype:
            raise InputDataError(
                f"{name} has dtype {X.dtype}, the model {core.dtype}; expected the "
                "same."
            )
        if X.device != core.device:
            raise InputDataError(
                f"{name} is on {X.device}, the model on {core.device}; expected the "
                "same."
            )

    def _moments_with(self, Y: Tensor, forget: float) -> tuple[Tensor, ...]:
        """Count, mean and sum of squares of the outcomes, with those of ``Y``."""
        n = Y.size(-2)
        old = forget * self.num_targets
        total = old + n
        mean = Y.mean(-2, keepdim=True)
        squares = (Y - mean).square().sum(-2, keepdim=True)
        delta = mean - self.target_mean
        return (
            total,
            self.target_mean + delta * (n / total),
            forget * self.target_squares + squares + delta.square() * (n * old / total),
        )

    # -- units ----------------------------------------------------------------------

    @torch.no_grad()
    def _standardize_by(self, means: Tensor, stdvs: Tensor) -> None:
        transform: Any = getattr(self, "outcome_transform", None)
        if type(transform) is not Standardize:
            raise UnsupportedError(
                f"The outcome transform is {type(transform).__name__}; only the "
                "constants of Standardize can be changed."
            )
        # y = μ + τ ỹ = μ' + τ' ỹ', so ỹ' = (τ / τ') ỹ + (μ - μ') / τ'
        means = means.to(transform.means).expand_as(transform.means).clone()
        stdvs = stdvs.to(transform.stdvs).expand_as(transform.stdvs).clone()
        if not bool((stdvs > 0).all()):
            raise InputDataError("stdvs has values that are not above zero.")
        scale = self._as_batch(transform.stdvs / stdvs)
        shift = self._as_batch((transform.means - means) / stdvs)
        transform.means, transform.stdvs = means, stdvs
        transform._stdvs_sq = stdvs.square()

        core = self.model
        _rescale_modules(core, scale, shift)
        core.summary = _rescaled_summary(core.summary, core, scale, shift)
        core.memory = _rescaled_memory(core.memory, scale, shift)
        self.average_noise = self.average_noise * scale.square().unsqueeze(-1)
        self._sync_noise()

    def _as_batch(self, value: Tensor) -> Tensor:
        """From ``batch_shape x 1 x m`` to the batch of the core."""
        value = value.squeeze(-2)
        return value.squeeze(-1) if self._num_outputs == 1 else value

    # -- predicting -----------------------------------------------------------------

    def forward(self, X: Tensor) -> MultivariateNormal:
        """The joint posterior at ``X`` in original units: ``posterior(X)``."""
        mvn = self.posterior(X).distribution
        return _dense(mvn) if self._num_outputs == 1 else mvn

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Posterior:
        """The joint posterior of the outputs at ``X``, in original units.

        Args:
            X: ``(batch_shape) x q x d``, with any t-batch in front.
            output_indices: The outputs wanted; all by default.
            observation_noise: Whether to add the noise of the likelihood (the average
                noise so far if it is known), or the variances to add,
                ``(batch_shape) x q x m``, in transformed units.
            posterior_transform: Applied to the posterior.

        Returns:
            A posterior over ``broadcast(t-batch, batch_shape) x q x m`` values.
        """
        self._check_inputs(X)
        self.eval()
        X = self.transform_inputs(X)
        with self.model.locks.commit:  # of one posterior
            predictor = self.model.predictor()
            variances = self._noise_variances(observation_noise)
            transform = copy(getattr(self, "outcome_transform", None))
        x = X.unsqueeze(-3) if self._num_outputs > 1 else X
        mvn = predictor(self.model.check_inputs(x, "x", self.model.batch_shape))
        mvn = _dense(mvn, always=self._num_outputs > 1)
        if variances is not None:
            mvn = _with_noise(mvn, variances)
        chosen = self._output_indices(output_indices)
        if self._num_outputs > 1:
            mvn = _stack_outputs(mvn, chosen)
        posterior = GPyTorchPosterior(distribution=mvn)
        if transform is not None:
            if chosen != list(range(self._num_outputs)):
                transform = transform.subset_output(chosen)
            posterior = transform.untransform_posterior(posterior, X=X)
        if posterior_transform is not None:
            return posterior_transform(posterior=posterior, X=X)
        return posterior

    def _output_indices(self, indices: list[int] | None) -> list[int]:
        m = self._num_outputs
        if indices is None:
            return list(range(m))
        if not indices or not all(-m <= i < m for i in indices):
            raise BotorchTensorDimensionError(
                f"output indices are {indices}; expected some of 0 to {m - 1}."
            )
        return [i % m for i in indices]

    def _noise_variances(self, noise: bool | Tensor) -> Tensor | None:
        """Variances to add to a posterior, outputs first."""
        if noise is False:
            return None
        likelihood = self.likelihood
        if isinstance(noise, Tensor):
            _check_variances(noise, "observation_noise")
            variances = noise.mT if self._num_outputs > 1 else noise.squeeze(-1)
        elif self._has_fixed_noise:
            variances = self.average_noise
        else:
            variances = likelihood.noise.detach().clone()
        if getattr(likelihood, "second_noise_covar", None) is not None:
            variances = variances + likelihood.second_noise.detach()
        return variances

    # -- conditioning ---------------------------------------------------------------

    def condition_on_observations(
        self,
        X: Tensor,
        Y: Tensor,
        noise: Tensor | None = None,
        *,
        add_inducing_points: bool = True,
    ) -> SingleTaskStreamingGP:
        """A new model that has also seen ``(X, Y)``; this one is untouched.

        In closed form, for any number of fantasies at once, differentiable in ``X``
        and ``Y``. Hyperparameters and transforms stay.

        Args:
            X: ``(batch_shape) x n x d`` inputs.
            Y: ``(fantasies) x (batch_shape) x n x m`` outcomes, in original units.
            noise: Variances of ``Y``, in transformed units as everywhere in BoTorch.
                By default the noise of the likelihood, or the average noise so far if
                it is known.
            add_inducing_points: Whether the inputs become inducing points, which
                makes conditioning exact given the summary. Otherwise the number of
                inducing points stays, as in an :meth:`update`.

        Returns:
            A model whose ``batch_shape`` is that of ``X`` and ``Y`` together.
        """
        self._check_inputs(X)
        _check_shape(X, Y, "Y")
        if Y.size(-1) != self._num_outputs:
            raise BotorchTensorDimensionError(
                f"Y has shape {tuple(Y.shape)}: {Y.size(-1)} outputs; the model has "
                f"{self._num_outputs}."
            )
        _check_finite(Y.detach(), "Y")
        self.eval()
        X = self.transform_inputs(X)
        with self.model.locks.commit:
            if hasattr(self, "outcome_transform"):
                Y, _ = self.outcome_transform(Y, X=X)
            return self._condition(X, Y, noise, add_inducing_points)

    def get_fantasy_model(
        self,
        inputs: Tensor | list[Tensor],
        targets: Tensor,
        noise: Tensor | None = None,
        **ignored: Any,
    ) -> SingleTaskStreamingGP:
        """Condition on data as ``ModelListGP`` passes them.

        Args:
            inputs: ``(batch_shape) x n x d``, before the input transform.
            targets: ``(fantasies) x (batch_shape) x n`` (outputs before ``n``), after
                the outcome transform.
            noise: Variances of the targets, after the outcome transform.
            **ignored: Options of GPyTorch's own fantasies.

        Returns:
            A model that has also seen the data; this one is untouched.
        """
        X = inputs[0] if isinstance(inputs, list | tuple) else inputs
        self._check_inputs(X)
        self.eval()

        def outputs_last(value: Tensor) -> Tensor:
            return value.mT if self._num_outputs > 1 else value.unsqueeze(-1)

        with self.model.locks.commit:
            return self._condition(
                self.transform_inputs(X),
                outputs_last(targets),
                None if noise is None else outputs_last(noise),
            )

    def _condition(
        self,
        X: Tensor,
        Y: Tensor,
        noise: Tensor | None,
        add_inducing_points: bool = True,
    ) -> SingleTaskStreamingGP:
        if noise is not None:
            _check_variances(noise.detach(), "noise")
        elif self._has_fixed_noise:
            noise = self.average_noise.mT
            noise = noise if self._num_outputs > 1 else noise.unsqueeze(-1)
        try:
            batch = torch.broadcast_shapes(self.batch_shape, X.shape[:-2], Y.shape[:-2])
            Y = Y.expand(*batch, *Y.shape[-2:])
            if noise is not None:
                noise = noise.expand(
                    *noise.shape[:-2],
                    *torch.broadcast_shapes(noise.shape[-2:], Y.shape[-2:]),
                )
        except RuntimeError:
            raise BotorchTensorDimensionError(
                f"X has shape {tuple(X.shape)}, Y {tuple(Y.shape)}, the batch shape is "
                f"{tuple(self.batch_shape)}; expected batch dimensions that broadcast."
            ) from None
        x, y, variances = self._to_core(X, Y, noise)
        if y.size(-1) == 0:
            core = _repeated(self.model, y.shape[:-1])
        else:
            z = None
            if not add_inducing_points:
                z = self.inducing_points.to(x.dtype)
            core = self.model.condition_on_observations(
                x, y, variances, inducing_points=z
            )
        return self._with_core(core)

    def _with_core(self, core: StreamingGP) -> SingleTaskStreamingGP:
        """A copy of this model around another streaming model."""
        return deepcopy(self, {id(self.model): core})

    def subset_output(self, idcs: list[int]) -> SingleTaskStreamingGP:
        """A copy of this model with some of its outputs.

        Args:
            idcs: The outputs to keep.
        """
        with self.model.locks.commit:
            return self._subset_output(self._output_indices(idcs))

    def _subset_output(self, chosen: list[int]) -> SingleTaskStreamingGP:
        if chosen == list(range(self._num_outputs)):
            return deepcopy(self)
        core = _select_outputs(
            self.model, self._parameter_batch, chosen, self._num_outputs
        )
        model = self._with_core(core)
        model._num_outputs = len(chosen)
        tail = (len(chosen),) if len(chosen) > 1 else ()
        model._parameter_batch = torch.Size((*self._parameter_batch[:-1], *tail))
        model.target_mean = self.target_mean[..., chosen]
        model.target_squares = self.target_squares[..., chosen]
        model.average_noise = _select(self.average_noise, -2, chosen)
        model._sync_noise()
        if hasattr(self, "outcome_transform"):
            model.outcome_transform = self.outcome_transform.subset_output(chosen)
        return model.eval()

    # -- copies and states ----------------------------------------------------------

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Any,
        strict: bool = True,
        keep_transforms: bool = True,
        assign: bool = False,
    ) -> Any:
        """Load hyperparameters, memory, summary and transforms, of any number of data.

        If it raises, the model is as it was.

        Args:
            state_dict: The state of a model built with the same arguments.
            strict: Whether the keys must be the same.
            keep_transforms: For compatibility; the transforms are always those
                loaded, since what is remembered is in their units.
            assign: See ``torch.nn.Module.load_state_dict``.
        """
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """The noise shown is the one loaded."""
        super()._load_from_state_dict(*args, **kwargs)
        self._sync_noise()


# -- data ---------------------------------------------------------------------------


def _check_tensor(value: Tensor, name: str) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise InputDataError(
            f"{name} is {kind}; expected a tensor of floating-point numbers."
        )


def _check_transform(value: object, name: str, expected: type) -> None:
    if value is not None and not isinstance(value, expected):
        raise UnsupportedError(
            f"{name} is a {type(value).__name__}; expected a BoTorch "
            f"{expected.__name__} or None."
        )


def _check_shape(X: Tensor, Y: Tensor, name: str) -> None:
    _check_tensor(Y, name)
    if Y.ndim < 2 or (Y.ndim == X.ndim - 1 and Y.shape == X.shape[:-1]):
        raise BotorchTensorDimensionError(
            f"{name} has shape {tuple(Y.shape)} for X of shape {tuple(X.shape)}; "
            f"expected an explicit output dimension. Use {name}.unsqueeze(-1)."
        )
    if Y.size(-2) != X.size(-2):
        raise BotorchTensorDimensionError(
            f"{name} has shape {tuple(Y.shape)}, X {tuple(X.shape)}; expected "
            f"{X.size(-2)} rows in both."
        )


def _check_finite(value: Tensor, name: str) -> None:
    if not bool(torch.isfinite(value).all()):
        raise InputDataError(
            f"{name} has NaN or infinite values. Remove these rows first."
        )


def _check_variances(value: Tensor, name: str) -> None:
    _check_finite(value, name)
    if not bool((value > 0).all()):
        raise InputDataError(
            f"{name} has a smallest value of {value.min():g}; expected variances "
            "above zero."
        )


def _check_data(X: Tensor, Y: Tensor, Yvar: Tensor | None) -> None:
    _check_tensor(X, "X")
    if X.ndim < 2 or X.size(-2) == 0:
        raise BotorchTensorDimensionError(
            f"X has shape {tuple(X.shape)}; expected (..., n, d) with n >= 1."
        )
    _check_shape(X, Y, "Y")
    dtypes, devices = {X.dtype, Y.dtype}, {X.device, Y.device}
    if Yvar is not None:
        _check_tensor(Yvar, "Yvar")
        if Yvar.shape != Y.shape:
            raise BotorchTensorDimensionError(
                f"Yvar has shape {tuple(Yvar.shape)}; expected that of Y, "
                f"{tuple(Y.shape)}."
            )
        dtypes.add(Yvar.dtype)
        devices.add(Yvar.device)
    for name, found in (("dtypes", dtypes), ("devices", devices)):
        if len(found) > 1:
            raise InputDataError(
                f"The data have {name} {sorted(map(str, found))}; expected one."
            )
    _check_finite(X, "X")
    _check_finite(Y, "Y")
    if Yvar is not None:
        _check_variances(Yvar, "Yvar")


def _standardization(
    count: Tensor, mean: Tensor, squares: Tensor
) -> tuple[Tensor, Tensor]:
    """The constants that ``Standardize`` would learn from all outcomes seen."""
    stdvs = (squares / (count - 1).clamp_min(1)).sqrt()
    is_large = (stdvs >= 1e-8) & (count > 1)
    return mean, torch.where(is_large, stdvs, torch.ones_like(stdvs))


# -- outputs ------------------------------------------------------------------------


def _dense(mvn: MultivariateNormal, always: bool = False) -> MultivariateNormal:
    if mvn.mean.size(-1) > DENSE and not always:
        return mvn
    covariance = to_linear_operator(mvn.lazy_covariance_matrix.to_dense())
    return MultivariateNormal(mvn.mean, covariance)


def _with_noise(mvn: MultivariateNormal, variances: Tensor) -> MultivariateNormal:
    try:
        variances = variances.expand(mvn.mean.shape)
    except RuntimeError:
        raise BotorchTensorDimensionError(
            f"observation_noise has shape {tuple(variances.shape)} (outputs "
            f"first); expected {tuple(mvn.mean.shape)} or broadcastable."
        ) from None
    covariance = mvn.lazy_covariance_matrix
    return MultivariateNormal(mvn.mean, covariance.add_diagonal(variances))


def _stack_outputs(mvn: MultivariateNormal, chosen: list[int]) -> MultivariateNormal:
    """The last batch dimension as outputs of a multitask distribution."""
    mean, covariance = mvn.mean, mvn.lazy_covariance_matrix
    parts = [
        MultivariateNormal(mean[..., i, :], covariance[..., i, :, :]) for i in chosen
    ]
    if len(parts) == 1:
        return parts[0]
    return MultitaskMultivariateNormal.from_independent_mvns(mvns=parts)


def _select(value: Tensor, dim: int, chosen: list[int]) -> Tensor:
    if len(chosen) == 1:
        return value.select(dim, chosen[0]).clone()
    return value.index_select(dim, torch.tensor(chosen, device=value.device))


def _select_outputs(
    core: StreamingGP, parameter_batch: torch.Size, chosen: list[int], m: int
) -> StreamingGP:
    """A streaming model of some of the processes in the last batch dimension."""
    new = core.bare_copy()
    for module in (new.mean_module, new.covar_module, new.likelihood, new.start):
        _select_parameters(module, parameter_batch, chosen)
    tail = (len(chosen),) if len(chosen) > 1 else ()
    new.batch_shape = torch.Size((*core.batch_shape[:-1], *tail))
    new.summary, new.memory = PosteriorSummary(new.batch_shape), Memory(new.batch_shape)
    # Not a deepcopy: buffers of a fantasy may carry gradients.
    for old, store in ((core.summary, new.summary), (core.memory, new.memory)):
        for name, value in old.named_buffers():
            num_dims = len(old.SIZES[name])
            if value.ndim > num_dims and value.size(-1 - num_dims) == m:
                value = _select(value, -1 - num_dims, chosen)
            setattr(store, name, value)
    return new


def _select_parameters(module: nn.Module, batch: torch.Size, chosen: list[int]) -> None:
    """Keep some of the outputs in parameters that have one value per output."""
    dim = len(batch) - 1
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.shape[: len(batch)] == batch:
            tensor.data = _select(tensor.data, dim, chosen)
    tail = (len(chosen),) if len(chosen) > 1 else ()
    for part in module.modules():
        if getattr(part, "batch_shape", None) == batch:
            setattr(part, "batch_shape", torch.Size((*batch[:-1], *tail)))  # noqa: B010


def _repeated(core: StreamingGP, batch: torch.Size) -> StreamingGP:
    """A copy for more fantasies, none of which observed anything."""
    new, summary = core.bare_copy(), core.summary
    new.batch_shape = batch
    new.summary, new.memory = copy(summary), copy(core.memory)
    new.summary.replace(g=summary.g.expand(*batch, -1))
    memory = new.memory
    memory.replace(
        g=memory.g.expand(*batch, -1),
        y=memory.y.expand(*batch, -1),
        target=memory.target.expand(*batch, -1),
    )
    return new


# -- units --------------------------------------------------------------------------


def _rescale_modules(core: StreamingGP, scale: Tensor, shift: Tensor) -> None:
    """Let mean, output scale and noise follow a change of units."""
    for module in core.mean_module.modules():
        if isinstance(module, ConstantMean):
            constant = module.constant
            module.constant = _same_shape(scale * constant + shift, constant)
    _rescale_kernel(core.covar_module, scale.square())
    likelihood = core.likelihood
    for name in ("noise_covar", "second_noise_covar"):
        covar = getattr(likelihood, name, None)
        if isinstance(covar, HomoskedasticNoise):
            value = _same_shape(scale.square().unsqueeze(-1) * covar.noise, covar.noise)
            # Not onto the bound itself, where a transformed parameter is infinite.
            lowest = 1.001 * float(covar.raw_noise_constraint.lower_bound)
            covar.noise = value.clamp_min(lowest)


def _rescale_kernel(kernel: Kernel, variance: Tensor) -> None:
    if isinstance(kernel, ScaleKernel):
        kernel.outputscale = _same_shape(
            variance * kernel.outputscale, kernel.outputscale
        )
    elif isinstance(kernel, AdditiveKernel):
        for part in kernel.kernels:
            _rescale_kernel(part, variance)


def _same_shape(value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape:
        raise UnsupportedError(
            f"A hyperparameter of shape {tuple(like.shape)} is shared by outputs or "
            f"batches whose units change differently, {tuple(value.shape)}. Build the "
            "modules with batch_shape= batch_shape x m."
        )
    return value


def _rescaled_summary(
    summary: PosteriorSummary, core: StreamingGP, scale: Tensor, shift: Tensor
) -> PosteriorSummary:
    """The summary in other units, under the modules as they are now."""
    if summary.is_empty:
        return summary
    past, shared = summary.pseudo_observations, bool(summary.shared_noise)
    dtype, z = past.g.dtype, summary.inducing_points
    kernel, mean, likelihood = core.frozen_modules(dtype)
    past = fn.rescale(past, scale.to(dtype), shift.to(dtype), shared)
    new = copy(summary)
    new.replace(
        U=past.U,
        g=past.g,
        residual=past.rho,
        prior_mean=mean(z),
        prior_cholesky=fn.cholesky(inducing_gram(kernel, z, core.jitter(dtype)).K_zz),
        noise_scale=core.noise_scale(likelihood, past.g, shared),
    )
    return new


def _rescaled_memory(memory: Memory, scale: Tensor, shift: Tensor) -> Memory:
    """The memory in other units: raw targets too, and what is known of their noise."""
    new, dtype = copy(memory), memory.g.dtype
    scale, shift = scale.to(dtype), shift.to(dtype)
    past = fn.rescale(memory.compressed.past, scale, shift, bool(memory.shared_noise))
    scale, shift = scale.unsqueeze(-1), shift.unsqueeze(-1)
    new.replace(
        U=past.U,
        g=past.g,
        row_residual=past.rho,
        y=scale * memory.y + shift,
        target=scale * memory.target + shift,
        noise=scale.square() * memory.noise,
    )
    return new


# -- sample paths -------------------------------------------------------------------


@DrawKernelFeaturePaths.register(SingleTaskStreamingGP)
def _draw_prior_paths(
    model: SingleTaskStreamingGP,
    sample_shape: torch.Size,
    num_features: int = 1024,
    **ignored: Any,
) -> GeneralizedLinearPath:
    """Paths of the prior from random features of the kernel.

    Of frozen copies of the modules: paths stay what they are when the model learns.
    """
    kernel, mean, _ = model.model.frozen_modules(model.model.dtype)
    features = gen_kernel_features(
        kernel=kernel,
        num_inputs=model.inducing_points.size(-1),
        num_outputs=num_features,
    )
    shape = (*sample_shape, *model.model.batch_shape, features.num_outputs)
    return GeneralizedLinearPath(
        feature_map=features,
        weight=torch.randn(shape, dtype=kernel.dtype, device=kernel.device),
        bias_module=mean,
        input_transform=get_input_transform(model),
        output_transform=get_output_transform(model),
    )


@GaussianUpdate.register(SingleTaskStreamingGP, (Likelihood, NoneType))
def _draw_update_paths(
    model: SingleTaskStreamingGP,
    likelihood: Likelihood | None,
    *,
    sample_values: Tensor,
    **ignored: Any,
) -> GeneralizedLinearPath:
    r"""From prior paths to posterior paths, by the pseudo-observations.

    .. math:: k(\cdot, Z) U^\top (U K U^\top + s I)^{-1} (g - U f(Z) - \sqrt s \epsilon)

    The inverse is written with :math:`D = I + A A^\top / s`, :math:`A = (U L)^\top`, as
    in predictions: the weights are :math:`L^{-\top} D^{-1} A e / s`.
    """
    core = model.model
    predictor = core.predictor()
    z, posterior = predictor.z, predictor.posterior
    assert posterior is not None  # there are data from the constructor on
    U, g = core.summary.U, core.summary.g
    shared = bool(core.summary.shared_noise)
    s = core.noise_scale(core.likelihood, g, shared).detach().to(g.dtype)
    f = sample_values.to(g.dtype)
    error = g - fn.matvec(U, f)
    error = error - s.sqrt().unsqueeze(-1) * torch.randn_like(error)
    L, L_D = posterior.L, posterior.L_D
    Ae = L.mT @ (U.mT @ error.unsqueeze(-1)) / s[..., None, None]
    v = torch.cholesky_solve(Ae, L_D)
    weight = torch.linalg.solve_triangular(L.mT, v, upper=True).squeeze(-1)
    return GeneralizedLinearPath(
        feature_map=KernelEvaluationMap(
            kernel=core.frozen_modules(core.dtype)[0],
            points=z.to(sample_values.dtype),
            input_transform=get_input_transform(model),
        ),
        weight=weight.to(sample_values.dtype),
    )


@DrawMatheronPaths.register(SingleTaskStreamingGP)
def _draw_posterior_paths(
    model: SingleTaskStreamingGP,
    *,
    sample_shape: torch.Size,
    prior_sampler: Callable,
    update_strategy: Callable,
) -> MatheronPath:
    """Paths of the posterior: a path of the prior, and what the data change."""
    with model.model.locks.commit:  # both of one posterior
        z = model.inducing_points.to(model.model.dtype)
        prior = prior_sampler(model=model, sample_shape=sample_shape)
        # The sum of both is what has the units of the outcomes.
        prior.output_transform = None
        update = update_strategy(model=model, sample_values=prior.forward(z))
    return MatheronPath(
        prior_paths=prior,
        update_paths=update,
        output_transform=get_output_transform(model),
    )

"""What every surrogate has: its parts, posteriors and conditioning.

Nothing here changes a model; :mod:`torch_ssgp.surrogates.model` does.
"""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any, Self

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.gpytorch import GPyTorchModel
from botorch.models.model import FantasizeMixin
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.posteriors import Posterior
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.means import Mean
from gpytorch.models import GP
from torch import Tensor

from torch_ssgp.atomic import AtomicModule
from torch_ssgp.exceptions import warn
from torch_ssgp.models import StreamingGP
from torch_ssgp.surrogates import checks, outputs
from torch_ssgp.surrogates.units import Moments

TRANSFORMS = ("input_transform", "outcome_transform")  # a model may have either


class StreamingSurrogate(AtomicModule, GPyTorchModel, GP, FantasizeMixin):
    """A streaming model behind the interface of BoTorch.

    Attributes:
        model: The streaming model. Outputs are its last batch dimension.
        num_targets: ``()`` or ``batch_shape x 1 x m``, outcomes seen; fractional
            after forgetting.
        target_mean: ``batch_shape x 1 x m``, their mean in original units.
        target_squares: ``batch_shape x 1 x m``, their squared deviations, summed.
        average_noise: Average of known noise variances, in the batch of ``model``.
    """

    num_targets: Tensor
    target_mean: Tensor
    target_squares: Tensor
    average_noise: Tensor

    def assemble(
        self,
        core: StreamingGP,
        num_dims: int,
        moments: Moments,
        average_noise: Tensor,
        **transforms: InputTransform | OutcomeTransform | None,
    ) -> None:
        """Put the parts together; the last step of construction and loading.

        Args:
            core: The streaming model.
            num_dims: The number of inputs, before transforms.
            moments: Moments of the outcomes seen.
            average_noise: Average of known noise variances, in the batch of the core.
            **transforms: ``input_transform`` and ``outcome_transform``, if any.
        """
        super().__init__()
        for name, transform in transforms.items():
            if transform is not None:
                setattr(self, name, transform)
        self.model, self._num_dims = core, num_dims
        self.register_buffer("num_targets", moments.number)
        self.register_buffer("target_mean", moments.mean)
        self.register_buffer("target_squares", moments.squares)
        self.register_buffer("average_noise", average_noise)

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
        return self.target_mean.size(-1)

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape without outputs; dimensions of fantasies come first."""
        batch = self.model.batch_shape
        return batch[:-1] if self.num_outputs > 1 else batch

    @property
    def inducing_points(self) -> Tensor:
        """Points of the memory ``(*batch, r, d)``, in the space of transformed inputs.

        They are the inputs seen until the memory was full, and points that stand for
        them afterwards.
        """
        return self.model.points

    def train(self, mode: bool = True) -> Self:
        """Set the mode; transforms stay frozen in either."""
        super().train(mode)
        for name in TRANSFORMS:
            if hasattr(self, name):
                getattr(self, name).eval()
        return self

    def eval(self) -> Self:
        """Set the mode to evaluation."""
        return self.train(False)

    def _set_transformed_inputs(self) -> None:
        """Nothing to transform: the memory holds transformed inputs."""

    def _revert_to_original_inputs(self) -> None:
        """Nothing to revert: the memory holds transformed inputs."""

    # -- predicting -----------------------------------------------------------------

    def forward(self, X: Tensor) -> MultivariateNormal:
        """The joint posterior at ``X`` in original units: ``posterior(X)``."""
        mvn = self.posterior(X).distribution
        return outputs.dense(mvn) if self.num_outputs == 1 else mvn

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
            output_indices: Indices of the outputs; all by default.
            observation_noise: Whether to add the noise of the likelihood (its average
                so far if noise is known). Or the variances to add,
                ``(batch_shape) x q x m``, in transformed units.
            posterior_transform: Applied to the posterior.

        Returns:
            A posterior over ``broadcast(t-batch, batch_shape) x q x m`` values.
        """
        self._check_inputs(X)
        self.eval()
        X, m = self.transform_inputs(X), self.num_outputs
        with self.model.locks.commit:  # all from one posterior
            predictor = self.model.predictor()
            variances = self._noise_variances(observation_noise)
            transform = copy(getattr(self, "outcome_transform", None))
        x = outputs.inputs_to_core(X, m)
        mvn = predictor(self.model.check_inputs(x, "x", self.model.batch_shape))
        mvn = outputs.dense(mvn, always=m > 1)
        if variances is not None:
            mvn = outputs.with_noise(mvn, variances)
        chosen = outputs.output_indices(output_indices, m)
        if m > 1:
            mvn = outputs.stack_outputs(mvn, chosen)
        posterior = GPyTorchPosterior(distribution=mvn)
        if transform is not None:
            if chosen != list(range(m)):
                transform = transform.subset_output(chosen)
            posterior = transform.untransform_posterior(posterior, X=X)
        if posterior_transform is not None:
            return posterior_transform(posterior=posterior, X=X)
        return posterior

    def _noise_variances(self, noise: bool | Tensor) -> Tensor | None:
        """Variances to add to a posterior, in the layout of the core."""
        if noise is False:
            return None
        likelihood = self.likelihood
        if isinstance(noise, Tensor):
            checks.check_variances(noise, "observation_noise")
            variances = outputs.to_core(noise, self.num_outputs)
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
        add_inducing_points: bool | None = None,
    ) -> Self:
        """A new model that has also seen ``(X, Y)``; this one is untouched.

        Conditioning is exact, in closed form, for any number of fantasies at once. It
        is differentiable in ``X`` and ``Y``. Hyperparameters and transforms do not
        change.

        Args:
            X: ``(batch_shape) x n x d`` inputs.
            Y: ``(fantasies) x (batch_shape) x n x m`` outcomes, in original units.
            noise: Variances of ``Y``, in transformed units as everywhere in BoTorch.
                The default is the noise of the likelihood, or its average so far if
                noise is known.
            add_inducing_points: Deprecated: observations become rows of the memory.

        Returns:
            A model whose ``batch_shape`` is that of ``X`` and ``Y`` together.
        """
        if add_inducing_points is not None:
            warn(
                "add_inducing_points is deprecated: observations become rows of the "
                "memory, and conditioning is exact. Leave it out. For a model of "
                "bounded size use update(X, Y, num_steps=0).",
                DeprecationWarning,
            )
        self._check_inputs(X)
        checks.check_outputs(X, Y, self.num_outputs)
        checks.check_finite(Y.detach(), "Y")
        self.eval()
        X = self.transform_inputs(X)
        with self.model.locks.commit:
            if hasattr(self, "outcome_transform"):
                Y, _ = self.outcome_transform(Y, X=X)
            return self._condition(X, Y, noise)

    def get_fantasy_model(
        self,
        inputs: Tensor | list[Tensor],
        targets: Tensor,
        noise: Tensor | None = None,
        **ignored: Any,
    ) -> Self:
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
        m = self.num_outputs
        self._check_inputs(X)
        self.eval()
        with self.model.locks.commit:
            return self._condition(
                self.transform_inputs(X),
                outputs.from_core(targets, m),
                None if noise is None else outputs.from_core(noise, m),
            )

    def _condition(self, X: Tensor, Y: Tensor, noise: Tensor | None) -> Self:
        m, core = self.num_outputs, self.model
        if noise is not None:
            checks.check_variances(noise.detach(), "noise")
        elif self._has_fixed_noise:
            noise = outputs.from_core(self.average_noise, m)
        Y, noise = checks.broadcast_observations(X, Y, noise, self.batch_shape)
        y = outputs.to_core(Y, m)
        if y.size(-1) == 0:
            return self._with_core(outputs.repeated(core, y.shape[:-1]))
        new = core.condition_on_observations(
            outputs.inputs_to_core(X, m),
            y,
            None if noise is None else outputs.to_core(noise, m),
        )
        return self._with_core(new)

    def subset_output(self, idcs: list[int]) -> Self:
        """A copy of this model with some of its outputs.

        Args:
            idcs: The outputs to keep.
        """
        m = self.num_outputs
        chosen = outputs.output_indices(idcs, m)
        if chosen == list(range(m)):
            return deepcopy(self)
        with self.model.locks.commit:
            model = self._with_core(outputs.select_outputs(self.model, chosen))
            if self.num_targets.ndim:
                model.num_targets = self.num_targets[..., chosen]
            model.target_mean = self.target_mean[..., chosen]
            model.target_squares = self.target_squares[..., chosen]
            model.average_noise = outputs.select(self.average_noise, -2, chosen)
            model._sync_noise()
            if hasattr(self, "outcome_transform"):
                model.outcome_transform = self.outcome_transform.subset_output(chosen)
        return model.eval()

    # -- states ---------------------------------------------------------------------

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Any,
        strict: bool = True,
        keep_transforms: bool = True,
        assign: bool = False,
    ) -> Any:
        """Load hyperparameters, memory and transforms. Loading is atomic.

        Args:
            state_dict: The state of a model built with the same arguments; it may have
                seen any number of data.
            strict: Whether the keys must be the same.
            keep_transforms: Ignored: the transforms are always those of the state,
                because its memory is in their units.
            assign: See ``torch.nn.Module.load_state_dict``.
        """
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        number = state_dict.get(prefix + "num_targets")
        if number is not None:  # one for all outputs, or one for each
            self.num_targets = self.num_targets.new_empty(number.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._sync_noise()

    # -- helpers ---------------------------------------------------------------------

    def _with_core(self, core: StreamingGP) -> Self:
        """A copy of this model around another streaming model."""
        return deepcopy(self, {id(self.model): core})

    def _training_inputs(self, X: Tensor) -> Tensor:
        if hasattr(self, "input_transform"):
            return self.input_transform.preprocess_transform(X)
        return X

    @property
    def _moments(self) -> Moments:
        return Moments(self.num_targets, self.target_mean, self.target_squares)

    @property
    def _has_fixed_noise(self) -> bool:
        return isinstance(self.likelihood, FixedNoiseGaussianLikelihood)

    def _sync_noise(self) -> None:
        """Put the average noise where BoTorch looks for it."""
        if self._has_fixed_noise:
            self.likelihood.noise_covar.noise = self.average_noise

    def _check_inputs(self, X: Tensor, name: str = "X") -> None:
        core = self.model
        checks.check_inputs(X, name, self._num_dims, core.dtype, core.device)

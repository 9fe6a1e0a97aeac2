"""The BoTorch model: learn from evaluations, predict, condition, save."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import fields, replace
from typing import Any, Self

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import InputDataError, UnsupportedError
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
from botorch.utils.datasets import SupervisedDataset
from botorch.utils.types import DEFAULT
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import GP
from torch import Tensor

from torch_ssgp import persistence, validation
from torch_ssgp.atomic import AtomicModule, atomic_change
from torch_ssgp.exceptions import warn
from torch_ssgp.inducing import GreedyInformation, InducingPolicy
from torch_ssgp.models import StreamingGP
from torch_ssgp.modules import leave_inference_mode
from torch_ssgp.surrogates import checks, outputs
from torch_ssgp.surrogates.units import Moments, rescale, set_standardization
from torch_ssgp.update import UpdateOptions, UpdateResult
from torch_ssgp.update.options import resolve

TRANSFORMS = ("input_transform", "outcome_transform")  # a model may have either
BUFFERS = ("num_targets", "target_mean", "target_squares", "average_noise")


class SingleTaskStreamingGP(AtomicModule, GPyTorchModel, GP, FantasizeMixin):
    r"""A single-task BoTorch model that learns from evaluations as they arrive.

    It starts with the data of its constructor; :meth:`update` adds more. Until there
    are more than ``memory_size`` of them, it is BoTorch's exact ``SingleTaskGP``. Then
    they are compressed onto ``num_inducing`` points, and its cost stays constant.
    :meth:`update` trains the hyperparameters. Without new data, :meth:`fit` or
    ``fit_gpytorch_mll`` does. The data of the constructor are not compressed until
    hyperparameters have been learned once.

    Transforms are learned from the first data and then frozen, because the memory is
    in their units. :meth:`restandardize` changes these units exactly.

    With ``m`` outputs there are ``m`` independent functions, computed as one batch.

    Args:
        train_X: ``batch_shape x n x d`` inputs.
        train_Y: ``batch_shape x n x m`` outcomes.
        train_Yvar: ``batch_shape x n x m`` known noise variances.
        likelihood: A Gaussian likelihood. The default is BoTorch's: inferred noise, or
            fixed noise if ``train_Yvar`` is given.
        covar_module: A kernel; by default BoTorch's RBF kernel with dimension-scaled
            priors.
        mean_module: A mean; constant by default.
        num_inducing: Number of points that a compression leaves.
        outcome_transform: ``Standardize`` by default, ``None`` for none.
        input_transform: Pass ``bounds`` to ``Normalize`` if later inputs lie outside
            the range of ``train_X``. Freeze one with parameters of its own, such as
            ``Warp``: it is not learned.
        inducing_policy: Chooses these points; ``GreedyInformation`` by default.
        alpha: 0 for the variational bound, up to 1 for Power-EP.
        share_noise: Whether one noise is learned from all data seen.
        memory_size: Largest number of rows; one and a half times ``num_inducing`` by
            default.

    Attributes:
        model: The streaming model. Outputs are its last batch dimension.
        num_targets: ``()`` or ``batch_shape x 1 x m``, outcomes seen; fractional
            after forgetting.
        target_mean: ``batch_shape x 1 x m``, their mean in original units.
        target_squares: ``batch_shape x 1 x m``, their squared deviations, summed.
        average_noise: Average of known noise variances, in the batch of ``model``.

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
        checks.check_data(train_X, train_Y, train_Yvar)
        batch_shape, m = train_X.shape[:-2], train_Y.size(-1)
        if outcome_transform == DEFAULT:
            outcome_transform = Standardize(m=m, batch_shape=batch_shape)
        checks.check_transform(outcome_transform, "outcome_transform", OutcomeTransform)
        checks.check_transform(input_transform, "input_transform", InputTransform)
        checks.check_is_fixed(input_transform)
        X, Y, Yvar = train_X, train_Y, train_Yvar
        with torch.no_grad():
            if input_transform is not None:
                X = input_transform.to(X).train()(X)
            if outcome_transform is not None:
                Y, Yvar = outcome_transform.to(Y).train()(Y, Yvar, X=X)
        is_given = covar_module is not None
        validate_input_scaling(X, Y, Yvar, check_nans_only=is_given)
        batch = torch.Size((*batch_shape, m) if m > 1 else batch_shape)
        noise, zeros = X.new_ones(*batch, 1), Y.new_zeros(*batch_shape, 1, m)
        core = StreamingGP(
            covar_module or get_covar_module_with_dim_scaled_prior(X.size(-1), batch),
            likelihood or _default_likelihood(batch, None if Yvar is None else noise),
            mean_module or ConstantMean(batch_shape=batch),
            num_inducing=num_inducing,
            inducing_policy=inducing_policy or GreedyInformation(),
            alpha=alpha,
            share_noise=share_noise,
            batch_shape=batch,
            memory_size=memory_size,
        )
        self._assemble(
            core.to(X),
            train_X.size(-1),
            Moments(Y.new_zeros(()), zeros, zeros.clone()),
            noise.clone(),
            input_transform=input_transform,
            outcome_transform=outcome_transform,
        )
        self.eval()
        self._begin(train_X, train_Y, train_Yvar)

    def _assemble(
        self,
        core: StreamingGP,
        num_dims: int,
        moments: Moments,
        average_noise: Tensor,
        **transforms: InputTransform | OutcomeTransform | None,
    ) -> None:
        """Put the parts together; ``num_dims`` inputs before transforms."""
        super().__init__()
        for name, transform in transforms.items():
            if transform is not None:
                setattr(self, name, transform)
        self.model, self._num_dims = core, num_dims
        for name, value in zip(BUFFERS, (*moments, average_noise), strict=True):
            self.register_buffer(name, value)

    def _begin(self, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> None:
        """Take the first data, uncompressed until hyperparameters are learned."""
        core = self.model
        memory_size = core.memory_size
        core.memory_size = max(memory_size, core.num_inducing + 1, X.size(-2))
        self._absorb(X, Y, Yvar, UpdateOptions(num_steps=0))
        core.memory_size = memory_size

    @classmethod
    def construct_inputs(
        cls,
        training_data: SupervisedDataset,
        *,
        num_inducing: int | None = None,
        memory_size: int | None = None,
    ) -> dict[str, Any]:
        """Arguments of the constructor for a data set, and sizes if not the default."""
        inputs = super().construct_inputs(training_data=training_data)
        sizes = {"num_inducing": num_inducing, "memory_size": memory_size}
        return inputs | {name: n for name, n in sizes.items() if n is not None}

    # -- learning -------------------------------------------------------------------

    def update(
        self,
        X: Tensor,
        Y: Tensor,
        Yvar: Tensor | None = None,
        *,
        restandardize: bool = False,
        options: UpdateOptions | None = None,
        **keywords: Any,
    ) -> UpdateResult:
        """Learn from new evaluations, in place. Updates are atomic.

        Args:
            X: ``batch_shape x n x d`` new inputs.
            Y: ``batch_shape x n x m`` new outcomes, in original units.
            Yvar: ``batch_shape x n x m`` known noise variances, in original units;
                required if the model has fixed noise.
            restandardize: Whether to standardise by all outcomes seen, these included,
                before learning; see :meth:`restandardize`.
            options: All options at once.
            **keywords: Fields of :class:`~torch_ssgp.UpdateOptions` that differ from
                them, such as ``num_steps``. The defaults of three are other ones:
                ``forget`` is 1, because an objective does not change;
                ``integrate_hyperparameters`` and ``learn_inducing_points`` are
                ``False``. ``inducing_points`` are ``batch_shape x m x d`` in the space
                of ``X``.

        Returns:
            The report of the update.
        """
        chosen = _options(keywords, "update", options)
        self._check_inputs(X)
        checks.check_data(X, Y, Yvar, self.num_outputs)
        checks.check_batch(X, self.batch_shape)
        with self.model.locks.turn(self.model.device):
            work = self._working_copy()
            if restandardize:
                moments = self._moments.extended(Y, chosen.power)
                work._standardize(*moments.standardization())
            result = work._absorb(X, Y, Yvar, work._with_points(chosen))
            self._become(work)
        return result

    def fit(self, **options: Any) -> UpdateResult:
        """Learn again from the memory, without new data.

        Args:
            **options: As in :meth:`update`, apart from ``forget``. By default there
                are 200 steps, and hyperparameters are learned.

        Returns:
            The report of the update.
        """
        options = {"num_steps": 200, "learn_hyperparameters": True, **options}
        chosen = _options(options, "fit", None, but="forget")
        with self.model.locks.turn(self.model.device):
            work = self._working_copy()
            core = work.model
            result = core.learn_from(core.no_data(), work._with_points(chosen))
            self._become(work)
        return result

    def custom_fit(
        self,
        mll: MarginalLogLikelihood,
        closure: Callable | None = None,
        optimizer: Callable | None = None,
        closure_kwargs: dict[str, Any] | None = None,
        optimizer_kwargs: dict[str, Any] | None = None,
        **ignored: Any,
    ) -> MarginalLogLikelihood:
        """Called by ``fit_gpytorch_mll(mll)``: the same as :meth:`fit`.

        The objective is always the streaming bound with the priors of the
        hyperparameters. Options of :meth:`fit` are passed as ``optimizer_kwargs``;
        those of BoTorch's own fitting, such as ``max_attempts``, are ignored.
        """
        if closure is not None or closure_kwargs or optimizer is not None:
            raise UnsupportedError(
                "A streaming model maximises its own bound: closure, closure_kwargs "
                "and optimizer cannot be replaced. Pass options of "
                "SingleTaskStreamingGP.fit as optimizer_kwargs."
            )
        self.fit(**(optimizer_kwargs or {}))
        return mll.eval()

    def restandardize(
        self, means: Tensor | None = None, stdvs: Tensor | None = None
    ) -> None:
        r"""Change the units in which outcomes are remembered, exactly.

        Afterwards, the memory is what it would be if all data had been standardised
        this way. Constant mean, output scale and noise (down to its lower
        bound) are rescaled too, so predictions stay the same. A kernel without an
        output scale, BoTorch's default, has variance one in the new units, as in a
        ``SingleTaskGP`` built on all data now.

        Args:
            means: ``batch_shape x 1 x m``; the mean of all outcomes seen by default.
            stdvs: ``batch_shape x 1 x m``; their standard deviation by default.
        """
        with self.model.locks.turn(self.model.device):
            work = self._working_copy()
            seen = self._moments.standardization()
            work._standardize(
                seen[0] if means is None else means, seen[1] if stdvs is None else stdvs
            )
            self._become(work)

    @torch.no_grad()
    def _standardize(self, means: Tensor, stdvs: Tensor) -> None:
        transform = getattr(self, "outcome_transform", None)
        scale, shift = (
            outputs.to_core(value, self.num_outputs).squeeze(-1)
            for value in set_standardization(transform, means, stdvs)
        )
        rescale(self.model, scale, shift)
        self.average_noise = self.average_noise * scale.square().unsqueeze(-1)
        self._sync_noise()

    def _working_copy(self) -> Self:
        """A copy to learn on."""
        return self._with_core(self.model.light_copy())

    def _become(self, work: Self) -> None:
        """Take over what a working copy has learned, atomically."""

        @torch.no_grad()
        def change() -> None:
            for ours, theirs in zip(self.parameters(), work.parameters(), strict=True):
                ours.copy_(theirs)
            # All buffers of a module in one assignment, those of memory and transforms
            # too: a reader sees the old ones or the new ones.
            for mine, copied in zip(self.modules(), work.modules(), strict=True):
                mine._buffers = copied._buffers
            self.model.warned = work.model.warned
            self._sync_noise()

        with self.model.locks.commit:
            atomic_change(change, [self])

    def _absorb(
        self, X: Tensor, Y: Tensor, Yvar: Tensor | None, options: UpdateOptions
    ) -> UpdateResult:
        """Transform data and pass them to the core."""
        if self._has_fixed_noise and Yvar is None:
            raise InputDataError(
                "The noise variances are missing, but the model has known noise; pass "
                f"them for Y, of shape {tuple(Y.shape)}."
            )
        core, m, n = self.model, self.num_outputs, Y.size(-2)
        X, Y = leave_inference_mode(X.detach()), leave_inference_mode(Y.detach())
        Yvar = None if Yvar is None else leave_inference_mode(Yvar.detach())
        outcomes = Y
        with torch.no_grad():
            X = self._training_inputs(X)
            if hasattr(self, "outcome_transform"):
                Y, Yvar = self.outcome_transform(Y, Yvar, X=X)
        noise = None if Yvar is None else outputs.to_core(Yvar, m)
        data = core.check_data(
            outputs.inputs_to_core(X, m), outputs.to_core(Y, m), noise
        )
        before = core.num_data
        result = core.learn_from(data, options)
        # How much was forgotten, the update may have decided: for each function.
        power = (core.num_data - n) / torch.where(before > 0, before, 1.0)
        if power.ndim:
            power = outputs.from_core(power.unsqueeze(-1), m)
        moments = self._moments.extended(outcomes, power.to(outcomes))
        self.num_targets, self.target_mean, self.target_squares = moments
        if noise is not None and self._has_fixed_noise:
            number = moments.number
            share = n / (outputs.to_core(number, m) if number.ndim else number)
            average = noise.mean(-1, keepdim=True)
            self.average_noise = self.average_noise.lerp(average, share)
            self._sync_noise()
        return result

    def _with_points(self, options: UpdateOptions) -> UpdateOptions:
        """Options whose explicit inducing points are those of the core."""
        z = options.inducing_points
        if z is None:
            return options
        self._check_inputs(z, "inducing_points")
        z = outputs.inputs_to_core(self._training_inputs(z), self.num_outputs)
        return replace(options, inducing_points=z)

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
        """Nothing to transform, nor to revert: the memory holds transformed inputs."""

    _revert_to_original_inputs = _set_transformed_inputs

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

        Inputs ``(batch_shape) x n x d`` come before the input transform, targets
        ``(fantasies) x (batch_shape) x n`` (outputs before ``n``) and their noise after
        the outcome transform.
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
        """A copy of this model with some of its outputs."""
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
        """Load the state of a model built with the same arguments. Loading is atomic.

        ``keep_transforms`` is ignored: the transforms are always those of the state,
        because its memory is in their units.
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

    # -- files ----------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a file; see :meth:`torch_ssgp.StreamingGP.save`."""
        model = deepcopy(self)  # a copy, which no other thread changes
        modules = {name: getattr(model.model, name) for name in persistence.MODULES}
        has = [name for name in TRANSFORMS if hasattr(model, name)]
        modules |= {name: getattr(model, name) for name in has}
        settings = persistence.core_settings(model.model) | {"num_dims": self._num_dims}
        persistence.write(path, model, settings, modules)

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
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
    ) -> Self:
        """Read a model that :meth:`save` wrote.

        As :meth:`torch_ssgp.StreamingGP.load`; transforms of BoTorch are rebuilt too.
        Pass your own, built like the saved ones.
        """
        given = {
            "covar_module": covar_module,
            "likelihood": likelihood,
            "mean_module": mean_module,
            "inducing_policy": inducing_policy,
            "input_transform": input_transform,
            "outcome_transform": outcome_transform,
        }
        return persistence.load(cls, path, map_location, given, SETTINGS, _build)

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


def _default_likelihood(batch: torch.Size, noise: Tensor | None) -> Likelihood:
    if noise is None:
        return get_gaussian_likelihood_with_lognormal_prior(batch)
    return FixedNoiseGaussianLikelihood(noise, batch_shape=batch)


DEFAULTS = UpdateOptions(
    forget=1.0, integrate_hyperparameters=False, learn_inducing_points=False
)


def _options(
    keywords: dict[str, Any], where: str, options: UpdateOptions | None, but: str = ""
) -> UpdateOptions:
    known = [each.name for each in fields(UpdateOptions) if each.name != but]
    validation.check_options(keywords, known, f"SingleTaskStreamingGP.{where}")
    return resolve(options or DEFAULTS, None, keywords)


def _build(cls: Any, parts: dict[str, Any], content: dict[str, Any]) -> Any:
    """A model from its modules and the content of a file."""
    settings, state = dict(content["settings"]), content["state"]
    num_dims = settings.pop("num_dims")
    core_parts = {name: parts.pop(name) for name in persistence.MODULES}
    core = StreamingGP(**core_parts, **settings)
    model = object.__new__(cls)
    *moments, average_noise = (torch.zeros_like(state[name]) for name in BUFFERS)
    model._assemble(core, num_dims, Moments(*moments), average_noise, **parts)
    return model


SETTINGS = persistence.SETTINGS | {"num_dims": int}

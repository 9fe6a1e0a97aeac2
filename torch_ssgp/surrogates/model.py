"""The BoTorch model: learn from evaluations, predict, condition, save."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform, Standardize
from botorch.models.utils import validate_input_scaling
from botorch.models.utils.gpytorch_modules import (
    get_covar_module_with_dim_scaled_prior,
    get_gaussian_likelihood_with_lognormal_prior,
)
from botorch.utils.datasets import SupervisedDataset
from botorch.utils.types import DEFAULT
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from torch_ssgp import persistence, validation
from torch_ssgp.atomic import atomic_change
from torch_ssgp.inducing import GreedyInformation, InducingPolicy
from torch_ssgp.models import StreamingGP
from torch_ssgp.modules import leave_inference_mode
from torch_ssgp.persistence import MapLocation
from torch_ssgp.surrogates import checks, files, outputs
from torch_ssgp.surrogates.base import StreamingSurrogate
from torch_ssgp.surrogates.units import Moments, rescale, set_standardization
from torch_ssgp.update import UpdateOptions, UpdateResult

OPTIONS = tuple(field.name for field in fields(UpdateOptions))


class SingleTaskStreamingGP(StreamingSurrogate):
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
        validate_input_scaling(
            train_X=X,
            train_Y=Y,
            train_Yvar=Yvar,
            check_nans_only=covar_module is not None,
        )
        batch = torch.Size((*batch_shape, m) if m > 1 else batch_shape)
        noise = X.new_ones(*batch, 1)
        if likelihood is None and Yvar is None:
            likelihood = get_gaussian_likelihood_with_lognormal_prior(batch)
        elif likelihood is None:
            likelihood = FixedNoiseGaussianLikelihood(noise, batch_shape=batch)
        if covar_module is None:
            covar_module = get_covar_module_with_dim_scaled_prior(
                ard_num_dims=X.size(-1), batch_shape=batch
            )
        core = StreamingGP(
            covar_module,
            likelihood,
            mean_module or ConstantMean(batch_shape=batch),
            num_inducing=num_inducing,
            inducing_policy=inducing_policy or GreedyInformation(),
            alpha=alpha,
            share_noise=share_noise,
            batch_shape=batch,
            memory_size=memory_size,
        )
        zeros = train_Y.new_zeros(*batch_shape, 1, m)
        self.assemble(
            core.to(X),
            train_X.size(-1),
            Moments(train_Y.new_zeros(()), zeros, zeros.clone()),
            noise.clone(),
            input_transform=input_transform,
            outcome_transform=outcome_transform,
        )
        self.eval()
        self._begin(train_X, train_Y, train_Yvar)

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
        """Arguments of the constructor for a data set.

        Args:
            training_data: The data set.
            num_inducing: Number of points of a compression, if not the default.
            memory_size: Largest number of rows, if not the default.
        """
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
        **options: Any,
    ) -> UpdateResult:
        """Learn from new evaluations, in place. Updates are atomic.

        Args:
            X: ``batch_shape x n x d`` new inputs.
            Y: ``batch_shape x n x m`` new outcomes, in original units.
            Yvar: ``batch_shape x n x m`` known noise variances, in original units;
                required if the model has fixed noise.
            restandardize: Whether to standardise by all outcomes seen, these included,
                before learning; see :meth:`restandardize`.
            **options: Options of :class:`~torch_ssgp.UpdateOptions`, such as
                ``num_steps`` and ``restart``. Four differ: ``forget`` is 1 by default,
                because an objective does not change; ``integrate_hyperparameters`` and
                ``learn_inducing_points`` are ``False``; ``inducing_points`` are
                ``batch_shape x m x d`` in the space of ``X``.

        Returns:
            The report of the update.
        """
        chosen = _options(options, OPTIONS, "update")
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
        known = [name for name in OPTIONS if name != "forget"]
        options = {"num_steps": 200, "learn_hyperparameters": True, **options}
        chosen = _options(options, known, "fit")
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

        Args:
            mll: A marginal log likelihood of this model. The objective is always the
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

    def _working_copy(self) -> SingleTaskStreamingGP:
        """A copy to learn on."""
        return self._with_core(self.model.light_copy())

    def _become(self, work: SingleTaskStreamingGP) -> None:
        """Take over what a working copy has learned, atomically."""

        @torch.no_grad()
        def change() -> None:
            for ours, theirs in zip(self.parameters(), work.parameters(), strict=True):
                ours.copy_(theirs)
            # All buffers of a module in one assignment, those of memory and transforms
            # too: a reader sees the old ones or the new ones.
            for mine, copied in zip(self.modules(), work.modules(), strict=True):
                mine.__dict__["_buffers"] = copied._buffers
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

    # -- files ----------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a file atomically; :meth:`load` reads it.

        Args:
            path: The file. An interrupted save leaves the previous file intact.
        """
        files.save(deepcopy(self), self._num_dims, path)

    @classmethod
    @torch.inference_mode(False)
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        map_location: MapLocation = None,
        covar_module: Kernel | None = None,
        likelihood: Likelihood | None = None,
        mean_module: Mean | None = None,
        inducing_policy: InducingPolicy | None = None,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
    ) -> SingleTaskStreamingGP:
        """Read a model that :meth:`save` wrote.

        No code in the file is run. Modules and transforms of GPyTorch and BoTorch and
        the policies of this package are rebuilt from it. Pass your own modules and
        transforms, built like the saved ones; their values are replaced.

        Args:
            path: The file.
            map_location: Device to load to, as in ``torch.load``.
            covar_module: Your own kernel.
            likelihood: Your own likelihood.
            mean_module: Your own mean.
            inducing_policy: Your own policy; it is used as passed.
            input_transform: Your own input transform.
            outcome_transform: Your own outcome transform.

        Returns:
            The model, in the dtype and on the device it was saved from.
        """
        given = {
            "covar_module": covar_module,
            "likelihood": likelihood,
            "mean_module": mean_module,
            "inducing_policy": inducing_policy,
            "input_transform": input_transform,
            "outcome_transform": outcome_transform,
        }
        return persistence.load(cls, path, map_location, given, files.LAYOUT)


def _options(given: dict[str, Any], known: Iterable[str], where: str) -> UpdateOptions:
    validation.check_options(given, known, f"SingleTaskStreamingGP.{where}")
    defaults = {
        "forget": 1.0,
        "integrate_hyperparameters": False,
        "learn_inducing_points": False,
    }
    return UpdateOptions(**{**defaults, **given})

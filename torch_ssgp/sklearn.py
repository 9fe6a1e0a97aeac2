"""Estimators for scikit-learn: ``fit``, ``partial_fit``, ``predict``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Self

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import Mean

from torch_ssgp import validation as check
from torch_ssgp.estimators import (
    Array,
    as_array,
    as_tensor,
    checked_options,
    class_likelihood,
    class_probabilities,
    learn,
    make_model,
    moments,
)
from torch_ssgp.exceptions import MissingDependencyError
from torch_ssgp.inducing import InducingPolicy
from torch_ssgp.models import StreamingGP
from torch_ssgp.update import UpdateOptions, UpdateResult
from torch_ssgp.update.options import names_keywords, resolve

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_array, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise MissingDependencyError(
        "torch_ssgp.sklearn needs scikit-learn 1.6 or newer. Install it with: "
        "pip install 'torch_ssgp[sklearn]'"
    ) from error

__all__ = ["StreamingGPClassifier", "StreamingGPRegressor"]

_OPTION = "options__"  # before the name of a field of the options


@dataclass(eq=False, repr=False)
class _StreamingGP(BaseEstimator):
    """What regressor and classifier share: the model, and how it gets its data."""

    kernel: Kernel | None = None
    _: KW_ONLY
    mean: Mean | None = None
    num_inducing: int = 100
    memory_size: int | None = None
    inducing_policy: InducingPolicy | None = None
    options: UpdateOptions | None = None
    from_memory: bool | None = None
    device: str | torch.device | None = None

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name; with ``deep``, the fields of ``options`` too."""
        params = super().get_params(deep)
        options = UpdateOptions() if self.options is None else self.options
        if deep and isinstance(options, UpdateOptions):
            for each in fields(options):
                params[_OPTION + each.name] = getattr(options, each.name)
        return params

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name, such as ``options__num_steps``."""
        own = {k: v for k, v in params.items() if not k.startswith(_OPTION)}
        nested = {k.removeprefix(_OPTION): params[k] for k in params.keys() - own}
        super().set_params(**own)
        if nested:
            self.options = resolve(self.options, None, nested)
        return self

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Discard what was learned before, and learn from these data.

        Args:
            X: ``(n, d)`` array or data frame.
            y: ``(n,)`` targets, or labels of two classes at least. Several targets are
                ``(n, targets)``.
            sample_weight: ``(n,)``, powers of the likelihoods of rows.

        Returns:
            Itself.
        """
        return self._learn(X, y, sample_weight, first=True)

    def _learn(
        self, X: Any, y: Any, sample_weight: Any, *, first: bool, classes: Any = None
    ) -> Self:
        with _all_or_nothing(self):
            X, y = self._checked(X, y, first)
            X, y, weight = _weighted(X, y, sample_weight)
            model = self._new_model(X, y, classes) if first else self.model_
            x, y = as_tensor(X, model), as_tensor(self._as_targets(y, model), model)
            weight = None if weight is None else as_tensor(weight, model)
            options = checked_options(self.options)
            self.result_: UpdateResult = learn(model, x, y, options, weight=weight)
            self.model_: StreamingGP = model
        return self

    def _new_model(self, X: Array, y: Array, classes: Any) -> StreamingGP:
        check.check_from_memory(self.from_memory)
        likelihood, batch_shape = self._likelihood(y, classes)
        return make_model(
            X.shape[1],
            likelihood,
            batch_shape,
            kernel=self.kernel,
            mean=self.mean,
            num_inducing=self.num_inducing,
            memory_size=self.memory_size,
            inducing_policy=self.inducing_policy,
            device=self.device,
        )

    def _checked(self, X: Any, y: Any, first: bool) -> tuple[Array, Array]:
        """Data that scikit-learn finds nothing wrong with."""
        raise NotImplementedError

    def _likelihood(
        self, y: Array, classes: Any
    ) -> tuple[Likelihood | None, torch.Size]:
        """The likelihood of a new model, and its batch shape."""
        raise NotImplementedError

    def _as_targets(self, y: Array, model: StreamingGP) -> Array:
        """Targets as the model takes them."""
        raise NotImplementedError

    def _inputs(self, X: Any) -> torch.Tensor:
        check_is_fitted(self, "model_")
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return as_tensor(X, self.model_)


@contextmanager
def _all_or_nothing(estimator: Any) -> Iterator[None]:
    """Leave an estimator unchanged if anything is wrong with the data."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise


def _weighted(X: Array, y: Array, sample_weight: Any) -> tuple[Array, Array, Any]:
    """Rows that count, their targets and their weights; equal rows are one of them.

    So as many equal rows, and one of that weight, are learned in the same way.
    """
    weight: Array = np.ones(len(X))
    if sample_weight is not None:
        weight = check_array(
            sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight"
        )
    if weight.shape != (len(X),):
        raise ValueError(
            f"sample_weight has shape {weight.shape}; expected ({len(X)},), one "
            "weight per row."
        )
    if (weight < 0).any():
        raise ValueError("sample_weight has negative values; expected zero or above.")
    if not (weight > 0).any():
        raise ValueError("Sample weights must contain at least one non-zero number.")
    labels = np.unique(y, return_inverse=True)[1] if y.dtype.kind not in "fiu" else y
    rows = np.column_stack([X, labels])
    _, first, row = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    weight = np.bincount(row.reshape(-1), weight)
    first, weight = first[weight > 0], weight[weight > 0]
    order = first.argsort()  # as they came
    first, weight = first[order], weight[order]
    return X[first], y[first], None if (weight == 1).all() else weight


@names_keywords
@dataclass(eq=False, repr=False)
class StreamingGPRegressor(RegressorMixin, _StreamingGP):
    r"""Gaussian process regression that keeps learning.

    ``fit`` starts over; ``partial_fit`` continues. Each call runs one
    :meth:`~torch_ssgp.StreamingGP.update` on a float64 model with learned Gaussian
    noise. Rows may arrive in batches of any size; the model remembers them in a memory
    of bounded size. Inputs and targets need no scaling.

    Several targets are independent functions of the same inputs. By default each has
    its own hyperparameters. A kernel that you pass is shared, unless its
    ``batch_shape`` is the number of targets.

    ``sample_weight`` raises the likelihood of a row to a power. A weight of two is
    equivalent to two equal rows, and gives the posterior of half the noise. Rows of
    weight zero are left out.

    Args:
        kernel: A GPyTorch kernel; by default Matérn 5/2 with one lengthscale per
            feature, whose units are read off the first data.
        mean: A GPyTorch mean; a constant by default.
        likelihood: A GPyTorch ``GaussianLikelihood``, such as one with a prior.
        num_inducing: Number of points that a compression leaves.
        memory_size: Largest number of rows; see :class:`~torch_ssgp.StreamingGP`.
        inducing_policy: Chooses inducing points; by default they cover all inputs.
        options: How an update learns, an :class:`~torch_ssgp.UpdateOptions`. Its fields
            are parameters too, such as ``options__num_steps`` in a grid.
        from_memory: Deprecated: every prediction is made from the whole memory.
        device: Where to compute, such as ``"cuda"``; the default of torch otherwise.

    Attributes:
        model_: The model, a :class:`~torch_ssgp.StreamingGP`. Several targets are its
            batch dimension.
        result_: The result of the last update.
        n_features_in_: Number of features.
        feature_names_in_: Their names, if all are strings.

    Example:
        >>> import numpy as np
        >>> from torch_ssgp.sklearn import StreamingGPRegressor
        >>> X = np.linspace(0, 6, 100).reshape(-1, 1)
        >>> y = np.sin(X).ravel()
        >>> model = StreamingGPRegressor(num_inducing=20)
        >>> for rows in np.array_split(np.arange(100), 2):
        ...     model = model.partial_fit(X[rows], y[rows])
        >>> mean, std = model.predict(X, return_std=True)
        >>> bool(model.score(X, y) > 0.99)
        True
    """

    likelihood: GaussianLikelihood | None = field(default=None, kw_only=True)

    def __sklearn_tags__(self) -> Any:
        """Several targets are supported."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Continue with these data, as in ``fit``; the first call starts a model."""
        return self._learn(X, y, sample_weight, first=not hasattr(self, "model_"))

    def _checked(self, X: Any, y: Any, first: bool) -> tuple[Array, Array]:
        kinds = {"dtype": np.float64, "multi_output": True, "y_numeric": True}
        X, y = validate_data(self, X, y, reset=first, **kinds)
        return X, y[:, 0] if y.shape[1:] == (1,) else y  # as GaussianProcessRegressor

    def _likelihood(
        self, y: Array, classes: Any
    ) -> tuple[Likelihood | None, torch.Size]:
        if self.likelihood is not None:
            check.check_module(
                self.likelihood,
                "likelihood",
                GaussianLikelihood,
                "GaussianLikelihood(); for others use StreamingGP itself",
            )
        return self.likelihood, torch.Size(y.shape[1:])

    def _as_targets(self, y: Array, model: StreamingGP) -> Array:
        if model.batch_shape != y.shape[1:]:
            raise ValueError(
                f"y has shape {y.shape}; expected {(len(y), *model.batch_shape)}, the "
                "targets of the first call. Call fit to start over."
            )
        return np.moveaxis(y, 0, -1)

    def predict(
        self,
        X: Any,
        return_std: bool = False,
        return_cov: bool = False,
        include_noise: bool = False,
    ) -> Any:
        """Mean of the function, with its standard deviation or covariance.

        As in ``GaussianProcessRegressor``, these describe the function. For intervals
        of new targets, set ``include_noise``.

        Args:
            X: ``(n, d)`` array or data frame.
            return_std: Whether to return the standard deviation too.
            return_cov: Whether to return the covariance too.
            include_noise: Whether the noise is part of them.

        Returns:
            The mean ``(n,)``, and the standard deviation ``(n,)`` or the covariance
            ``(n, n)`` where asked for; with several targets, these are the last
            dimension of each.
        """
        if return_std and return_cov:
            raise RuntimeError(
                "At most one of return_std or return_cov can be requested."
            )
        if return_cov:
            distribution = self._distribution(X, include_noise)
            covariance = distribution.covariance_matrix.movedim((-2, -1), (0, 1))
            return as_array(distribution.mean.movedim(-1, 0)), as_array(covariance)
        x = self._inputs(X)
        both = moments(self.model_, x, include_noise=include_noise)
        mean, variance = (as_array(moment.movedim(-1, 0)) for moment in both)
        return (mean, np.sqrt(variance)) if return_std else mean

    @torch.no_grad()
    def sample_y(
        self,
        X: Any,
        n_samples: int = 1,
        random_state: Any = 0,
        include_noise: bool = False,
    ) -> Array:
        """Draw functions, or targets if noise is included, evaluated at ``X``.

        The draws are ``(n, n_samples)``, or ``(n, targets, n_samples)``.
        """
        rng = check_random_state(random_state)
        distribution = self._distribution(X, include_noise)
        mean = distribution.mean  # (*targets, n)
        # A root that exists where the covariance has no full rank, too.
        values, vectors = torch.linalg.eigh(distribution.covariance_matrix)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        normal = rng.standard_normal((*mean.shape, n_samples))
        draws = mean.unsqueeze(-1) + root @ as_tensor(normal, self.model_)
        return as_array(draws.movedim(-2, 0))

    def _distribution(self, X: Any, include_noise: bool) -> Any:
        x = self._inputs(X)
        if include_noise:
            return self.model_.predict(x)
        return self.model_(x)


@names_keywords
@dataclass(eq=False, repr=False)
class StreamingGPClassifier(ClassifierMixin, _StreamingGP):
    """Gaussian process classification that keeps learning.

    ``fit`` starts over; ``partial_fit`` continues. Each call runs one
    :meth:`~torch_ssgp.StreamingGP.update` on a float64 model. Two classes use one
    function and a probit link. More classes use one function each and a softmax. Inputs
    need no scaling.

    ``sample_weight`` raises the likelihood of a row to a power. A weight of two is
    equivalent to two equal rows. Rows of weight zero are left out.

    Args:
        kernel: A GPyTorch kernel; by default Matérn 5/2 with one lengthscale per
            feature, whose units are read off the first data, and hyperparameters for
            each function. One without a ``batch_shape`` is shared by the functions.
        mean: A GPyTorch mean; zero by default.
        num_inducing: See :class:`StreamingGPRegressor`, as for ``memory_size``,
            ``inducing_policy``, ``options`` and ``device``.

    Attributes:
        classes_: The labels, sorted.
        model_: The model, a :class:`~torch_ssgp.StreamingGP`.
        result_: The result of the last update.
        n_features_in_: Number of features.
        feature_names_in_: Their names, if all are strings.

    Example:
        >>> import numpy as np
        >>> from torch_ssgp.sklearn import StreamingGPClassifier
        >>> X = np.linspace(0, 6, 60).reshape(-1, 1)
        >>> y = np.where(np.sin(X).ravel() > 0, "up", "down")
        >>> model = StreamingGPClassifier(num_inducing=10)
        >>> for rows in np.arange(60).reshape(30, 2).T:
        ...     model = model.partial_fit(X[rows], y[rows], classes=["up", "down"])
        >>> bool(model.score(X, y) > 0.9)
        True
    """

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> Self:
        """Continue with these data, as in :meth:`fit`; the first call starts a model.

        ``classes`` are all labels that will ever occur, required in the first call.
        """
        first = not hasattr(self, "model_")
        if first and classes is None:
            raise ValueError(
                "classes must be passed on the first call to partial_fit: all labels "
                "that will ever occur."
            )
        if not first and classes is not None:
            if not np.array_equal(np.unique(classes), self.classes_):
                raise ValueError(
                    f"classes is {classes!r}; it is not the same as on the last call "
                    f"to partial_fit, which had {self.classes_!r}."
                )
        return self._learn(X, y, sample_weight, first=first, classes=classes)

    def _checked(self, X: Any, y: Any, first: bool) -> tuple[Array, Array]:
        X, y = validate_data(self, X, y, reset=first, dtype=np.float64)
        check_classification_targets(y)
        return X, y

    def _likelihood(
        self, y: Array, classes: Any
    ) -> tuple[Likelihood | None, torch.Size]:
        self.classes_: Array = np.unique(y if classes is None else classes)
        if len(self.classes_) < 2:
            raise ValueError(
                "The number of classes has to be greater than one; got "
                f"{len(self.classes_)} class."
            )
        return class_likelihood(len(self.classes_))

    def _as_targets(self, y: Array, model: StreamingGP) -> Array:
        """Labels as their places in ``classes_``."""
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(
                f"y has labels {unknown.tolist()} that are not among the classes "
                f"{self.classes_.tolist()}. Pass all classes at the first call."
            )
        return np.searchsorted(self.classes_, y)

    def predict_proba(self, X: Any) -> Array:
        """Probabilities ``(n, classes)``, in the order of ``classes_``."""
        x = self._inputs(X)
        return as_array(class_probabilities(self.model_, x))

    def predict(self, X: Any) -> Array:
        """The most probable labels, ``(n,)``."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(-1)]

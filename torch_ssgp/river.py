"""Estimators for river: ``learn_one``, ``predict_one``, mini-batches."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
from gpytorch.kernels import Kernel

from torch_ssgp import validation as check
from torch_ssgp.calibration import Calibration
from torch_ssgp.estimators import (
    Array,
    as_array,
    as_tensor,
    class_likelihood,
    class_probabilities,
    moments,
)
from torch_ssgp.exceptions import (
    ArgumentError,
    DtypeError,
    MissingDependencyError,
    NonFiniteError,
)
from torch_ssgp.features import Columns, Row, as_row
from torch_ssgp.models import StreamingGP
from torch_ssgp.update import UpdateOptions
from torch_ssgp.update.options import names_keywords

try:
    from river import base, conf, proba
    from river.utils.dataframe import into_frame, to_native_frame, to_native_series

    from torch_ssgp.river_base import StreamingEstimator, as_rows
except ImportError as error:
    raise MissingDependencyError(
        "torch_ssgp.river needs river 0.26 or newer. Install it with: "
        "pip install 'torch_ssgp[river]'"
    ) from error

__all__ = ["StreamingGPClassifier", "StreamingGPRegressor"]


@names_keywords
class StreamingGPRegressor(StreamingEstimator, base.MiniBatchRegressor):
    """Gaussian process regression on a stream of dictionaries.

    Features need no scaling; behind a scaler that goes on learning the model is a
    little less accurate, as inputs of the past move. Before the first datum, the
    prediction is the prior mean, 0.

    Features may appear and vanish. The model treats a feature that appears later as if
    it had been constant before, so what was learned does not change. A feature that is
    missing, ``None`` or NaN is replaced by its mean so far, or by ``absent``. A kernel
    that you pass sees only the features of the first data. Later features are ignored,
    with a warning.

    Args:
        kernel: A GPyTorch kernel; by default Matérn 5/2 with one lengthscale per
            feature.
        num_inducing: Number of points that a compression leaves.
        memory_size: Largest number of rows; see :class:`~torch_ssgp.StreamingGP`.
        options: How an update learns, an :class:`~torch_ssgp.UpdateOptions`; by default
            ``UpdateOptions(change_odds=1e-9, outliers=False)``, so that a drift is
            followed, and the past is left behind only where the evidence is
            overwhelming. To forget nothing, use ``UpdateOptions(forget=1.0)``.
        batch_size: Number of data that ``learn_one`` collects for an update; at first
            fewer: 1, 1, 2, 4, ... Predictions ignore data that still wait.
        absent: Value of a missing feature; by default its mean so far.
        from_memory: Deprecated: every prediction is made from the whole memory.

    Example:
        >>> import math
        >>> from torch_ssgp.river import StreamingGPRegressor
        >>> model = StreamingGPRegressor(num_inducing=20, batch_size=10)
        >>> for k in range(60):
        ...     x = {"time": 0.1 * k}
        ...     prediction = model.predict_one(x)
        ...     model.learn_one(x, math.sin(x["time"]))
        >>> abs(model.predict_one({"time": 5.0}) - math.sin(5.0)) < 0.05
        True
        >>> math.sin(5.0) in model.predict_interval_one({"time": 5.0}, level=0.99)
        True
    """

    _calibration = Calibration()  # of intervals; replaced, never changed

    def learn_one(self, x: dict[Hashable, Any], y: float) -> None:
        """Learn a datum, or let it wait until there are ``batch_size`` of them.

        Args:
            x: Features.
            y: Target.
        """
        row, target = as_row(x), self._as_target(y)
        calibration = self._checked_against([row], [target])
        super().learn_one(row, target)
        self._calibration = calibration

    def learn_many(self, X: Any, y: Any) -> None:
        """Learn a batch, and what waits, in one update.

        Args:
            X: Data frame of features.
            y: Series of targets.
        """
        rows, targets = as_rows(into_frame(X)), [self._as_target(t) for t in y]
        calibration = self._checked_against(rows, targets)
        super().learn_many(X, y)
        self._calibration = calibration

    def _checked_against(self, rows: list[Row], targets: list[float]) -> Calibration:
        """The calibration after targets that were not learned yet."""
        if self._model is None or len(rows) != len(targets):
            return self._calibration
        mean, std = self._predict(rows)
        distances = np.abs(np.array(targets) - mean) / std.clip(_TINY)
        return self._calibration.seen(distances.tolist())

    def _as_target(self, y: Any) -> float:
        try:
            target = float(y)
        except (TypeError, ValueError):
            raise DtypeError(f"y is {y!r}; expected a number.") from None
        if not math.isfinite(target):
            raise NonFiniteError(f"y is {target}; expected a finite number.")
        return target

    def _learn(self, data: list[tuple[Row, Any]]) -> None:
        rows = [row for row, _ in data]
        columns = self._seen(rows)
        x = columns.place(rows)
        if self._model is None:
            model = self._make_model(len(columns.names))
        else:
            model = self._widened(self._model, columns, x)
        self._update(model, x, [y for _, y in data])
        self._model, self._columns = model, columns

    def predict_one(self, x: dict[Hashable, Any], with_dist: bool = False) -> Any:
        """Predict the target of a datum.

        Args:
            x: Features.
            with_dist: Whether to return a distribution of the target,
                ``river.proba.Gaussian``, noise included.

        Returns:
            The mean, or the distribution.
        """
        mean, std = self._predict([as_row(x)])
        return _gaussian(mean[0], std[0]) if with_dist else float(mean[0])

    def predict_interval_one(
        self, x: dict[Hashable, Any], level: float = 0.9
    ) -> conf.Interval:
        """An interval that contains the target with probability ``level``.

        It is calibrated on the distances of recent targets from their predictions; see
        :mod:`torch_ssgp.calibration`. Distributions are not calibrated.

        Args:
            x: Features.
            level: The probability, between 0 and 1.
        """
        if not (check.is_number(level) and 0 < level < 1):
            raise ArgumentError(
                f"level is {level!r}; expected a probability between 0 and 1."
            )
        mean, std = self._predict([as_row(x)])
        half = self._calibration.half_width(level) * float(std[0])
        return conf.Interval(lower=float(mean[0]) - half, upper=float(mean[0]) + half)

    def predict_many(self, X: Any) -> Any:
        """Predict the targets of a batch.

        Args:
            X: Data frame of features.

        Returns:
            A series of means.
        """
        frame = into_frame(X)
        mean, _ = self._predict(as_rows(frame))
        return to_native_series(mean, name=None, like=frame)

    def _predict(self, rows: list[Row]) -> tuple[Array, Array]:
        """Mean and standard deviation of targets."""
        if not rows:
            return np.zeros(0), np.zeros(0)
        model, columns = self._model, self._columns
        if model is None:  # the prior, at the features that came
            columns = columns.seen([*rows, {"": 0.0}], grow=True)
            model = self._make_model(len(columns.names))
        x = columns.place(rows)
        mean, variance = moments(model, as_tensor(x, model), include_noise=True)
        return as_array(mean), as_array(variance.sqrt())


_TINY = 1e-300


def _gaussian(mean: float, std: float) -> proba.Gaussian:
    """River's distribution, which is built from data: two are enough."""
    distribution = proba.Gaussian()
    for sign in (-1, 1):
        distribution.update(float(mean) + sign * float(std) / math.sqrt(2))
    return distribution


@names_keywords
class StreamingGPClassifier(StreamingEstimator, base.MiniBatchClassifier):
    """Gaussian process classification on a stream of dictionaries.

    Labels need not be known in advance. Two classes use one function and a probit link.
    More classes use one function each and a softmax. A class that appears later needs a
    model with one more function. A new model then learns from the last ``memory_size``
    data, which are kept for this purpose.

    Features need no scaling. New and missing features are treated as in
    :class:`StreamingGPRegressor`. Before the first datum there is no class to predict:
    probabilities are empty and the label is ``None``.

    The arguments are those of :class:`StreamingGPRegressor`.

    Example:
        >>> from torch_ssgp.river import StreamingGPClassifier
        >>> model = StreamingGPClassifier(num_inducing=10)
        >>> for k in range(60):
        ...     x = {"time": 0.7 * k % 6}
        ...     label = model.predict_one(x)
        ...     model.learn_one(x, "late" if x["time"] > 3 else "early")
        >>> model.predict_one({"time": 5.0})
        'late'
        >>> model.predict_proba_one({"time": 1.0})["early"] > 0.9
        True
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        num_inducing: int = 100,
        memory_size: int | None = None,
        options: UpdateOptions | None = None,
        batch_size: int = 10,
        absent: float | None = None,
        from_memory: bool | None = None,
    ) -> None:
        super().__init__(
            kernel, num_inducing, memory_size, options, batch_size, absent, from_memory
        )
        self._classes: tuple[Hashable, ...] = ()
        self._recent: list[tuple[Row, Any]] = []  # what a new class is learned from

    @property
    def classes(self) -> tuple[Hashable, ...]:
        """The labels seen so far, in the order of their first appearance."""
        return self._classes

    @property
    def _multiclass(self) -> bool:
        return True

    def learn_one(self, x: dict[Hashable, Any], y: Hashable) -> None:
        """Learn a datum, or let it wait; one of a new class does not wait.

        Args:
            x: Features.
            y: Label.
        """
        row, label = as_row(x), self._as_target(y)
        if label in self._classes:
            super().learn_one(row, label)
        else:
            self._learn_now([*self._waiting, (row, label)])

    def _as_target(self, y: Any) -> Hashable:
        if y is None or (isinstance(y, float) and math.isnan(y)):
            raise DtypeError(f"y is {y!r}; expected a label.")
        if not isinstance(y, Hashable):
            raise DtypeError(f"y is {check.kind_of(y)}; expected a label.")
        return y

    def _learn(self, data: list[tuple[Row, Any]]) -> None:
        columns = self._seen([row for row, _ in data])
        classes = tuple(dict.fromkeys((*self._classes, *(y for _, y in data))))
        capacity = check.check_memory_size(self.memory_size, self.num_inducing)
        model = self._model
        if len(classes) > max(len(self._classes), 1):
            model = self._make_model(
                len(columns.names), *class_likelihood(len(classes))
            )
            self._tell(model, columns, classes, [*self._recent, *data])
        elif model is not None:
            x = columns.place([row for row, _ in data])
            model = self._widened(model, columns, x)
            self._tell(model, columns, classes, data)
        self._recent = [*self._recent, *data][-capacity:]
        self._model, self._columns, self._classes = model, columns, classes

    def _tell(
        self,
        model: StreamingGP,
        columns: Columns,
        classes: tuple[Hashable, ...],
        data: list[tuple[Row, Any]],
    ) -> None:
        numbers = {label: k for k, label in enumerate(classes)}
        x = columns.place([row for row, _ in data])
        self._update(model, x, [numbers[y] for _, y in data])

    def predict_proba_one(
        self, x: dict[Hashable, Any], **kwargs: Any
    ) -> dict[Hashable, float]:
        """Predict the probabilities of all labels seen so far.

        Args:
            x: Features.
            **kwargs: Unused; part of river's interface.
        """
        (probabilities,) = self._predict([as_row(x)]).tolist()
        return dict(zip(self._classes, probabilities, strict=True))

    def predict_proba_many(self, X: Any) -> Any:
        """Predict the probabilities of all labels, for a batch.

        Args:
            X: Data frame of features.

        Returns:
            A data frame with one column per label.
        """
        frame = into_frame(X)
        probabilities = self._predict(as_rows(frame))
        return to_native_frame(
            dict(zip(self._classes, probabilities.T, strict=True)), like=frame
        )

    def predict_many(self, X: Any) -> Any:
        """Predict the labels of a batch.

        Args:
            X: Data frame of features.

        Returns: A series of labels; all ``None`` before the first datum.
        """
        frame = into_frame(X)
        rows = as_rows(frame)
        labels: list[Any] = [None] * len(rows)
        if self._classes:
            best = self._predict(rows).argmax(-1)
            labels = [self._classes[k] for k in best]
        return to_native_series(labels, name=None, like=frame)

    def _predict(self, rows: list[Row]) -> Array:
        """Probabilities ``(n, classes)``; certain while there is one class."""
        if self._model is None or not rows:
            return np.ones((len(rows), len(self._classes)))
        x = as_tensor(self._columns.place(rows), self._model)
        return as_array(class_probabilities(self._model, x))

"""Estimators for river: ``learn_one``, ``predict_one``, mini-batches."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood

from torch_ssgp import validation as check
from torch_ssgp.calibration import Calibration
from torch_ssgp.estimators import (
    Array,
    as_array,
    as_tensor,
    check_level,
    checked_options,
    class_likelihood,
    class_probabilities,
    learn,
    make_model,
    moments,
    widen,
)
from torch_ssgp.exceptions import (
    ArgumentError,
    DtypeError,
    MissingDependencyError,
    NonFiniteError,
    ShapeError,
    StreamingGPWarning,
    warn,
)
from torch_ssgp.features import Columns, Row, as_row
from torch_ssgp.models import StreamingGP
from torch_ssgp.update import UpdateOptions
from torch_ssgp.update.options import names_keywords

try:
    from river import base, conf, proba
    from river.utils.dataframe import (
        into_frame,
        to_native_frame,
        to_native_series,
        to_numpy,
    )
except ImportError as error:
    raise MissingDependencyError(
        "torch_ssgp.river needs river 0.26 or newer. Install it with: "
        "pip install 'torch_ssgp[river]'"
    ) from error

__all__ = ["StreamingGPClassifier", "StreamingGPRegressor"]

Datum = tuple[Row, Any]  # features and target

# A rate of drift is learned where the evidence asks for one: a scaler before the model
# goes on learning, and moves its inputs. Every datum is asked whether the function has
# changed, so the odds of that are small. What is far off stays: the errors of such
# streams often grow with their level.
_DEFAULTS = UpdateOptions(change_odds=1e-9, outliers=False)


def _as_rows(frame: Any) -> list[Row]:
    """The rows of a data frame; missing values count as absent."""
    names, matrix = frame.columns, to_numpy(frame)
    return [as_row(dict(zip(names, values, strict=True))) for values in matrix]


@dataclass(eq=False, repr=False)
class _StreamingGP(base.Estimator):
    """What regressor and classifier share: columns, waiting data, one model."""

    kernel: Kernel | None = None
    num_inducing: int = 100
    memory_size: int | None = None
    options: UpdateOptions | None = None
    batch_size: int = 1
    absent: float | None = None
    from_memory: bool | None = None

    def __post_init__(self) -> None:
        check.check_positive_int(self.num_inducing, "num_inducing")
        check.check_positive_int(self.batch_size, "batch_size")
        absent = self.absent
        if absent is not None and not (
            check.is_number(absent) and math.isfinite(absent)
        ):
            raise ArgumentError(
                f"absent is {absent!r}; expected a number, or None for the mean of a "
                "feature so far."
            )
        checked_options(self.options)
        check.check_from_memory(self.from_memory)
        self._model: StreamingGP | None = None
        self._columns = Columns(absent)
        self._waiting: list[Datum] = []
        self._num_learned = 0
        self._warned = False

    @property
    def model(self) -> StreamingGP | None:
        """The model, a :class:`~torch_ssgp.StreamingGP`; none before the first data."""
        return self._model

    @property
    def feature_names(self) -> tuple[Hashable, ...]:
        """The features, in the order of the columns of the model."""
        return self._columns.names

    def _unit_test_skips(self) -> set[str]:
        # `learn_many` is one update of all rows. Hyperparameters that are learned after
        # every row take another path; with fixed ones the two agree.
        return {"check_learn_many_matches_learn_one"}

    def learn_one(self, x: dict[Hashable, Any], y: Any) -> None:
        """Learn a datum, or let it wait until there are ``batch_size`` of them."""
        self._take([(as_row(x), self._as_target(y))])

    def learn_many(self, X: Any, y: Any) -> None:
        """Learn a data frame and its series of targets, and what waits, at once."""
        rows, targets = _as_rows(into_frame(X)), [self._as_target(t) for t in y]
        if len(rows) != len(targets):
            raise ShapeError(
                f"X has {len(rows)} rows, y has {len(targets)} targets; expected as "
                "many targets as rows."
            )
        self._take(list(zip(rows, targets, strict=True)), at_once=True)

    def _take(self, data: list[Datum], at_once: bool = False) -> None:
        """Learn data with those that wait, or let them wait too."""
        waiting = [*self._waiting, *data]
        # Fewer at first, so that predictions are soon useful.
        enough = 0 if at_once else min(self.batch_size, max(self._num_learned, 1))
        if waiting and len(waiting) >= enough:
            self._learn(waiting)
            self._num_learned += len(waiting)
            waiting = []
        self._waiting = waiting

    def _as_target(self, y: Any) -> Any:
        raise NotImplementedError

    def _learn(self, data: list[Datum]) -> None:
        """Learn the waiting data, atomically."""
        raise NotImplementedError

    def _seen(self, rows: list[Row]) -> Columns:
        """The columns after new data; no new ones where a kernel was passed."""
        grow = self.kernel is None or not self._columns.names
        columns = self._columns.seen(rows, grow=grow)
        if not columns.names:
            raise ShapeError(
                "The first datum has no features; expected at least one number."
            )
        if not grow and not self._warned:
            known = set(columns.names)
            extra = {str(name) for row in rows for name in row if name not in known}
            if extra:
                warn(
                    f"The features {', '.join(sorted(extra))} are ignored: your kernel "
                    f"is for {', '.join(map(str, columns.names))}. Use kernel=None if "
                    "features appear later. This warning is shown once.",
                    StreamingGPWarning,
                )
                self._warned = True
        return columns

    def _make_model(
        self,
        num_dims: int,
        likelihood: Likelihood | None = None,
        batch_shape: torch.Size = torch.Size(),
    ) -> StreamingGP:
        return make_model(
            num_dims,
            likelihood,
            batch_shape,
            kernel=self.kernel,
            num_inducing=self.num_inducing,
            memory_size=self.memory_size,
        )

    def _widened(self, model: StreamingGP, columns: Columns, x: Array) -> StreamingGP:
        """The model with new columns, for features that were constant so far."""
        known = len(self._columns.names)
        if len(columns.names) == known:
            return model
        wider = self._make_model(
            len(columns.names), model.likelihood, model.batch_shape
        )
        column = columns.fill[known:]
        spread = np.abs(x[:, known:] - column).max(0)
        size = np.where(column == 0, 1.0, np.abs(column))
        lengthscale = np.where(spread > 0, spread, size)
        return widen(
            model, wider, as_tensor(column, wider), as_tensor(lengthscale, wider)
        )

    def _update(self, model: StreamingGP, x: Array, y: Any) -> None:
        options = checked_options(self.options or _DEFAULTS)
        learn(model, as_tensor(x, model), as_tensor(y, model), options)


@names_keywords
@dataclass(eq=False, repr=False)
class StreamingGPRegressor(_StreamingGP, base.MiniBatchRegressor):
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

    def _take(self, data: list[Datum], at_once: bool = False) -> None:
        calibration = self._calibration
        if self._model is not None:
            mean, std = self._predict([row for row, _ in data])
            distances = np.abs([y for _, y in data] - mean) / std
            calibration = calibration.seen(distances.tolist())
        super()._take(data, at_once)
        self._calibration = calibration

    def _as_target(self, y: Any) -> float:
        try:
            target = float(y)
        except (TypeError, ValueError):
            raise DtypeError(f"y is {y!r}; expected a number.") from None
        if not math.isfinite(target):
            raise NonFiniteError(f"y is {target}; expected a finite number.")
        return target

    def _learn(self, data: list[Datum]) -> None:
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
        """The mean of a target, or its ``river.proba.Gaussian``, noise included."""
        mean, std = self._predict([as_row(x)])
        return _gaussian(mean[0], std[0]) if with_dist else float(mean[0])

    def predict_interval_one(
        self, x: dict[Hashable, Any], level: float = 0.9
    ) -> conf.Interval:
        """An interval that contains the target with probability ``level``.

        It is calibrated on the distances of recent targets from their predictions; see
        :mod:`torch_ssgp.calibration`. Distributions are not calibrated.
        """
        check_level(level)
        mean, std = self._predict([as_row(x)])
        half = self._calibration.half_width(level) * float(std[0])
        return conf.Interval(lower=float(mean[0]) - half, upper=float(mean[0]) + half)

    def predict_many(self, X: Any) -> Any:
        """A series of the means of targets, for a data frame."""
        frame = into_frame(X)
        mean, _ = self._predict(_as_rows(frame))
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


def _gaussian(mean: float, std: float) -> proba.Gaussian:
    """River's distribution, which is built from data: two are enough."""
    distribution = proba.Gaussian()
    for sign in (-1, 1):
        distribution.update(float(mean) + sign * float(std) / math.sqrt(2))
    return distribution


@names_keywords
@dataclass(eq=False, repr=False)
class StreamingGPClassifier(_StreamingGP, base.MiniBatchClassifier):
    """Gaussian process classification on a stream of dictionaries.

    Labels need not be known in advance. Two classes use one function and a probit link.
    More classes use one function each and a softmax. A class that appears later needs a
    model with one more function. A new model then learns from the last ``memory_size``
    data, which are kept for this purpose.

    Features need no scaling. New and missing features are treated as in
    :class:`StreamingGPRegressor`. Before the first datum there is no class to predict:
    probabilities are empty and the label is ``None``.

    The arguments are those of :class:`StreamingGPRegressor`; ``batch_size`` is 10 by
    default.

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

    batch_size: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._classes: tuple[Hashable, ...] = ()
        self._recent: list[Datum] = []  # what a new class is learned from

    @property
    def classes(self) -> tuple[Hashable, ...]:
        """The labels seen so far, in the order of their first appearance."""
        return self._classes

    @property
    def _multiclass(self) -> bool:
        return True

    def _take(self, data: list[Datum], at_once: bool = False) -> None:
        is_new = any(label not in self._classes for _, label in data)
        super()._take(data, at_once or is_new)

    def _as_target(self, y: Any) -> Hashable:
        if y is None or (isinstance(y, float) and math.isnan(y)):
            raise DtypeError(f"y is {y!r}; expected a label.")
        if not isinstance(y, Hashable):
            raise DtypeError(f"y is {check.kind_of(y)}; expected a label.")
        return y

    def _learn(self, data: list[Datum]) -> None:
        columns = self._seen([row for row, _ in data])
        classes = tuple(dict.fromkeys((*self._classes, *(y for _, y in data))))
        capacity = check.check_memory_size(self.memory_size, self.num_inducing)
        model, recent = self._model, [*self._recent, *data]
        if len(classes) > max(len(self._classes), 1):
            likelihood = class_likelihood(len(classes))
            model, data = self._make_model(len(columns.names), *likelihood), recent
        x = columns.place([row for row, _ in data])
        if model is not None:
            if model is self._model:
                model = self._widened(model, columns, x)
            self._update(model, x, [classes.index(y) for _, y in data])
        self._recent = recent[-capacity:]
        self._model, self._columns, self._classes = model, columns, classes

    def predict_proba_one(
        self, x: dict[Hashable, Any], **kwargs: Any
    ) -> dict[Hashable, float]:
        """The probabilities of all labels seen so far."""
        (probabilities,) = self._predict([as_row(x)]).tolist()
        return dict(zip(self._classes, probabilities, strict=True))

    def predict_proba_many(self, X: Any) -> Any:
        """The probabilities of all labels, as columns, for a data frame."""
        frame = into_frame(X)
        probabilities = self._predict(_as_rows(frame))
        return to_native_frame(
            dict(zip(self._classes, probabilities.T, strict=True)), like=frame
        )

    def predict_many(self, X: Any) -> Any:
        """A series of labels for a data frame; ``None`` before the first datum."""
        frame = into_frame(X)
        rows = _as_rows(frame)
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

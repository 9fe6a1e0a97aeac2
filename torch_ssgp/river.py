"""Estimators for river: ``learn_one``, ``predict_one``, mini-batches. Needs it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood

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
from torch_ssgp.models import StreamingGP
from torch_ssgp.update import UpdateOptions

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

Row = dict[Hashable, float]

# Streams change; the evidence says when.
DEFAULTS = UpdateOptions(forget="auto")


@dataclass(frozen=True)
class Columns:
    """The features of a stream as columns, in the order of their first appearance.

    Attributes:
        absent: Value of a feature that a datum lacks; ``None`` for its mean so far.
        names: The features.
        count: ``(d,)``, how often each was there.
        total: ``(d,)``, the sum of its values.
    """

    absent: float | None
    names: tuple[Hashable, ...] = ()
    count: Array = field(default_factory=lambda: np.zeros(0))
    total: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def fill(self) -> Array:
        """``(d,)``, the values that absent features count as."""
        if self.absent is not None:
            return np.full(len(self.names), float(self.absent))
        return self.total / self.count.clip(1)

    def seen(self, rows: Sequence[Row], *, grow: bool) -> Columns:
        """The columns after these data.

        Args:
            rows: New data.
            grow: Whether features that are not known yet become columns.
        """
        names = list(self.names)
        if grow:
            new = {name for row in rows for name in row} - set(names)
            # The order of a dictionary must not matter.
            names += sorted(new, key=lambda name: (str(name), repr(name)))
        new_columns = len(names) - len(self.names)
        count = np.append(self.count, np.zeros(new_columns))
        total = np.append(self.total, np.zeros(new_columns))
        for row in rows:
            for j, name in enumerate(names):
                if name in row:
                    count[j] += 1
                    total[j] += row[name]
        return Columns(self.absent, tuple(names), count, total)

    def place(self, rows: Sequence[Row]) -> Array:
        """Data as a matrix ``(n, d)``; features that are no column are left out."""
        x = np.tile(self.fill, (len(rows), 1))
        for i, row in enumerate(rows):
            for j, name in enumerate(self.names):
                x[i, j] = row.get(name, x[i, j])
        return x


def as_row(x: Mapping[Hashable, Any]) -> Row:
    """The features of a datum that are there, as numbers.

    Args:
        x: Features; those that are ``None`` or NaN count as absent.
    """
    if not isinstance(x, Mapping):
        raise DtypeError(
            f"x is {check.kind_of(x)}; expected a dictionary of features, or a data "
            "frame for learn_many and predict_many."
        )
    row = {}
    for name, value in x.items():
        try:
            # Text that looks like a number is text.
            number = math.nan if value is None else float(_no_text(value))
        except (TypeError, ValueError):
            raise DtypeError(
                f"x has {value!r} for the feature {name!r}; expected a number. Encode "
                "it first: compose.SelectType(str) | preprocessing.OneHotEncoder()."
            ) from None
        if math.isinf(number):
            raise NonFiniteError(
                f"x has {number} for the feature {name!r}; expected a finite number."
            )
        if not math.isnan(number):
            row[name] = number
    return row


def _no_text(value: Any) -> Any:
    if isinstance(value, str | bytes):
        raise TypeError
    return value


def as_rows(frame: Any) -> list[Row]:
    """The rows of a data frame; values that are missing count as absent."""
    names, matrix = frame.columns, to_numpy(frame)
    return [as_row(dict(zip(names, values, strict=True))) for values in matrix]


class _StreamingGP(base.Estimator):
    """What regressor and classifier share: columns, waiting data, one model."""

    def __init__(
        self,
        kernel: Kernel | None = None,
        num_inducing: int = 100,
        memory_size: int | None = None,
        options: UpdateOptions | None = None,
        batch_size: int = 1,
        absent: float | None = None,
        from_memory: bool = False,
    ) -> None:
        check.check_positive_int(num_inducing, "num_inducing")
        check.check_positive_int(batch_size, "batch_size")
        if absent is not None and not (
            check.is_number(absent) and math.isfinite(absent)
        ):
            raise ArgumentError(
                f"absent is {absent!r}; expected a number, or None for the mean of a "
                "feature so far."
            )
        checked_options(options)
        self.kernel = kernel
        self.num_inducing = num_inducing
        self.memory_size = memory_size
        self.options = options
        self.batch_size = batch_size
        self.absent = absent
        self.from_memory = from_memory
        self._model: StreamingGP | None = None
        self._columns = Columns(absent)
        self._waiting: list[tuple[Row, Any]] = []
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

    # -- learning -------------------------------------------------------------------

    def learn_one(self, x: dict[Hashable, Any], y: Any) -> None:
        """Learn a datum, or let it wait until there are ``batch_size`` of them.

        Args:
            x: Features.
            y: Target.
        """
        waiting = [*self._waiting, (as_row(x), self._as_target(y))]
        # At first as many as are known: a stream begins with useful predictions.
        if len(waiting) >= min(self.batch_size, max(self._num_learned, 1)):
            self._learn_now(waiting)
        else:
            self._waiting = waiting

    def learn_many(self, X: Any, y: Any) -> None:
        """Learn a batch, and what waits, in one update.

        Args:
            X: Data frame of features.
            y: Series of targets.
        """
        rows, targets = as_rows(into_frame(X)), [self._as_target(t) for t in y]
        if len(rows) != len(targets):
            raise ShapeError(
                f"X has {len(rows)} rows, y has {len(targets)} targets; expected as "
                "many targets as rows."
            )
        waiting = [*self._waiting, *zip(rows, targets, strict=True)]
        if waiting:
            self._learn_now(waiting)

    def _learn_now(self, data: list[tuple[Row, Any]]) -> None:
        self._learn(data)
        self._waiting = []
        self._num_learned += len(data)

    def _as_target(self, y: Any) -> Any:
        raise NotImplementedError

    def _learn(self, data: list[tuple[Row, Any]]) -> None:
        """Learn data that waited; everything changes at the end, or nothing."""
        raise NotImplementedError

    def _seen(self, rows: list[Row]) -> Columns:
        """The columns after new data; a kernel given is for the first features."""
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
                    f"The features {', '.join(sorted(extra))} are ignored: the kernel "
                    f"given is for {', '.join(map(str, columns.names))}. Use "
                    "kernel=None for features that appear later. This is said once.",
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
            kernel=self.kernel,
            likelihood=likelihood,
            num_inducing=self.num_inducing,
            memory_size=self.memory_size,
            batch_shape=batch_shape,
        )

    def _widened(self, model: StreamingGP, columns: Columns, x: Array) -> StreamingGP:
        """The model with a column for every feature, which had one value so far."""
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
        options = checked_options(self.options or DEFAULTS)
        learn(model, as_tensor(x, model), as_tensor(y, model), options)


class StreamingGPRegressor(_StreamingGP, base.MiniBatchRegressor):
    """Gaussian process regression on a stream of dictionaries.

    Features need no scaling. Before the first datum the prediction is the prior's: 0.

    Features may come and go. A feature that appears later had, for all the model knows,
    one value before: what was learned stays exactly as it was. A feature that a datum
    lacks, or that is ``None`` or NaN, counts as its mean so far, or as ``absent``. A
    kernel given is for the features of the first data: later ones are ignored, with a
    warning.

    Args:
        kernel: A GPyTorch kernel; by default Matérn 5/2 with one lengthscale per
            feature.
        num_inducing: Largest number of inducing points.
        memory_size: Number of points of the memory; twice ``num_inducing`` by default.
        options: How an update learns, an :class:`~torch_ssgp.UpdateOptions`; by default
            ``UpdateOptions(forget="auto")``, which notices when the stream changes.
        batch_size: Number of data that ``learn_one`` collects for an update; at first
            fewer, 1, 1, 2, 4, ... Predictions do not know those that wait.
        absent: Value of a feature that is not there; by default its mean so far.
        from_memory: Whether to predict from all points of the memory, which is more
            accurate and costs more.

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
            with_dist: Whether to return a distribution, ``river.proba.Gaussian``, of
                the target: noise is part of it.

        Returns:
            The mean, or the distribution.
        """
        mean, std = self._predict([as_row(x)])
        return _gaussian(mean[0], std[0]) if with_dist else float(mean[0])

    def predict_interval_one(
        self, x: dict[Hashable, Any], level: float = 0.9
    ) -> conf.Interval:
        """An interval that holds the target with a probability of ``level``.

        Args:
            x: Features.
            level: The probability, between 0 and 1.
        """
        if not (check.is_number(level) and 0 < level < 1):
            raise ArgumentError(
                f"level is {level!r}; expected a probability between 0 and 1."
            )
        mean, std = self._predict([as_row(x)])
        half = NormalDist().inv_cdf((1 + level) / 2) * float(std[0])
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

    @torch.no_grad()
    def _predict(self, rows: list[Row]) -> tuple[Array, Array]:
        """Mean and standard deviation of targets."""
        if not rows:
            return np.zeros(0), np.zeros(0)
        model, columns = self._model, self._columns
        if model is None:  # the prior, at the features that came
            columns = columns.seen([*rows, {"": 0.0}], grow=True)
            model = self._make_model(len(columns.names))
        x = columns.place(rows)
        target = model.predict(as_tensor(x, model), from_memory=self.from_memory)
        return as_array(target.mean), as_array(target.variance.clamp_min(0).sqrt())


def _gaussian(mean: float, std: float) -> proba.Gaussian:
    """River's distribution; it is made of data, and two say it all."""
    distribution = proba.Gaussian()
    for sign in (-1, 1):
        distribution.update(float(mean) + sign * float(std) / math.sqrt(2))
    return distribution


class StreamingGPClassifier(_StreamingGP, base.MiniBatchClassifier):
    """Gaussian process classification on a stream of dictionaries.

    Labels need not be known in advance. Two classes are one function behind a probit,
    more are one function each behind a softmax. A class that appears later asks for a
    model with one more function: it is made anew and learns the last ``memory_size``
    data, which are kept for that.

    Features need no scaling; those that appear later or are absent are treated as in
    :class:`StreamingGPRegressor`. Before the first datum there is no class to predict:
    probabilities are empty and the label is ``None``.

    Args:
        kernel: A GPyTorch kernel; by default Matérn 5/2 with one lengthscale per
            feature.
        num_inducing: Largest number of inducing points.
        memory_size: Number of points of the memory; twice ``num_inducing`` by default.
        options: How an update learns, an :class:`~torch_ssgp.UpdateOptions`; by default
            ``UpdateOptions(forget="auto")``, which notices when the stream changes.
        batch_size: Number of data that ``learn_one`` collects for an update; at first
            fewer, 1, 1, 2, 4, ... Predictions do not know those that wait.
        absent: Value of a feature that is not there; by default its mean so far.
        from_memory: Whether to predict from all points of the memory, which is more
            accurate and costs more.

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
        from_memory: bool = False,
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
        capacity = self.memory_size or 2 * self.num_inducing
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
            **kwargs: Nothing; river's interface has it.
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

        Returns:
            A series of labels; of ``None`` before the first datum.
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
        return as_array(class_probabilities(self._model, x, self.from_memory))

"""What the estimators for river share. Needs river; see :mod:`torch_ssgp.river`."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from river import base
from river.utils.dataframe import into_frame, to_numpy

from torch_ssgp import validation as check
from torch_ssgp.estimators import (
    Array,
    as_tensor,
    checked_options,
    learn,
    make_model,
    widen,
)
from torch_ssgp.exceptions import ArgumentError, ShapeError, StreamingGPWarning, warn
from torch_ssgp.features import Columns, Row, as_row
from torch_ssgp.models import StreamingGP
from torch_ssgp.update import UpdateOptions

# A rate of drift is learned where the evidence asks for one: a scaler before the model
# goes on learning, and moves its inputs. Every datum is asked whether the function has
# changed, so the odds of that are small. What is far off stays: the errors of such
# streams often grow with their level.
DEFAULTS = UpdateOptions(change_odds=1e-9, outliers=False)


def as_rows(frame: Any) -> list[Row]:
    """The rows of a data frame; missing values count as absent."""
    names, matrix = frame.columns, to_numpy(frame)
    return [as_row(dict(zip(names, values, strict=True))) for values in matrix]


class StreamingEstimator(base.Estimator):
    """What regressor and classifier share: columns, waiting data, one model."""

    def __init__(
        self,
        kernel: Kernel | None = None,
        num_inducing: int = 100,
        memory_size: int | None = None,
        options: UpdateOptions | None = None,
        batch_size: int = 1,
        absent: float | None = None,
        from_memory: bool | None = None,
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
        check.check_from_memory(from_memory)
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
        # Fewer at first, so that predictions are soon useful.
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
            kernel=self.kernel,
            likelihood=likelihood,
            num_inducing=self.num_inducing,
            memory_size=self.memory_size,
            batch_shape=batch_shape,
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
        options = checked_options(self.options or DEFAULTS)
        learn(model, as_tensor(x, model), as_tensor(y, model), options)

"""Features that appear and vanish, as columns of a matrix."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torch_ssgp import validation as check
from torch_ssgp.estimators import Array
from torch_ssgp.exceptions import DtypeError, NonFiniteError

Row = dict[Hashable, float]


@dataclass(frozen=True)
class Columns:
    """The features of a stream as columns, in the order of their first appearance.

    Attributes:
        absent: Value of a feature that a datum lacks; ``None`` for its mean so far.
        names: The features.
        count: ``(d,)``, how often each was present.
        total: ``(d,)``, the sum of its values.
    """

    absent: float | None
    names: tuple[Hashable, ...] = ()
    count: Array = field(default_factory=lambda: np.zeros(0))
    total: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def fill(self) -> Array:
        """``(d,)``, the values that replace missing features."""
        if self.absent is not None:
            return np.full(len(self.names), float(self.absent))
        return self.total / self.count.clip(1)

    def seen(self, rows: Sequence[Row], *, grow: bool) -> Columns:
        """The columns after these data."""
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
        """Data as a matrix ``(n, d)``; features without a column are left out."""
        x = np.tile(self.fill, (len(rows), 1))
        for i, row in enumerate(rows):
            for j, name in enumerate(self.names):
                x[i, j] = row.get(name, x[i, j])
        return x


def as_row(x: Mapping[Hashable, Any]) -> Row:
    """The features that are present in a datum, as numbers.

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
            number = math.nan if value is None else _number(value)
        except (TypeError, ValueError):
            raise DtypeError(
                f"x has {value!r} for the feature {name!r}; expected a number. "
                + _advice(value, name)
            ) from None
        if math.isinf(number):
            raise NonFiniteError(
                f"x has {number} for the feature {name!r}; expected a finite number."
            )
        if not math.isnan(number):
            row[name] = number
    return row


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):  # text that looks like a number is text
        raise TypeError
    return float(value)


def _advice(value: Any, name: Hashable) -> str:
    """How to make a number of a feature that is none."""
    for kind, conversion in _TIMES.items():
        if isinstance(value, kind):
            return f"Convert it to days, such as x[{name!r}]{conversion}."
    return "Encode it first: compose.SelectType(str) | preprocessing.OneHotEncoder()."


_TIMES = {
    dt.datetime: ".timestamp() / 86400",
    dt.date: ".toordinal()",
    dt.timedelta: ".total_seconds() / 86400",
    np.datetime64: '.astype("datetime64[D]").astype(float)',
}

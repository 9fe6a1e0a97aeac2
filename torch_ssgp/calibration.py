r"""Prediction intervals that are calibrated on earlier errors.

A model that learns its hyperparameters from few data is overconfident, and a stream
that changes surprises any model. Predictions can be checked as soon as their targets
arrive, so the width of the next interval can follow the distances

.. math:: r_i = |y_i - \mu_i| / \sigma_i

of targets from predictions made before they were learned. The interval of level
:math:`p` is :math:`\mu \pm q \sigma`, where a share :math:`p` of recent distances is
below ``q`` (split conformal prediction on a sliding window, Vovk et al. 2005; Barber et
al. 2023). Until there are enough of them, the distances are taken to be normal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

WINDOW = 100  # distances that are remembered
PRIOR = 5  # how many distances the belief in a normal distribution counts for
_NORMAL = NormalDist()
_HALVINGS = 60


@dataclass(frozen=True)
class Calibration:
    """How far targets were from their predictions.

    Attributes:
        distances: The most recent distances, in standard deviations.
    """

    distances: tuple[float, ...] = ()

    def seen(self, distances: Iterable[float]) -> Calibration:
        """The calibration after more distances."""
        new = (d for d in distances if math.isfinite(d))
        return Calibration((*self.distances, *new)[-WINDOW:])

    def half_width(self, level: float) -> float:
        """Half the width of an interval, in standard deviations of its prediction."""
        normal = _NORMAL.inv_cdf((1 + level) / 2)
        if not self.distances:
            return normal
        wanted = level * (PRIOR + len(self.distances))
        low, high = 0.0, max(normal, *self.distances)
        for _ in range(_HALVINGS):
            q = (low + high) / 2
            below = PRIOR * (2 * _NORMAL.cdf(q) - 1)
            below += sum(distance <= q for distance in self.distances)
            low, high = (q, high) if below < wanted else (low, q)
        return high

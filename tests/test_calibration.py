"""Intervals that learn from how earlier ones did."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from torch_ssgp.calibration import WINDOW, Calibration

LEVELS = (0.01, 0.2, 0.5, 0.8, 0.9, 0.95, 0.999)


def test_without_experience_distances_are_normal() -> None:
    expected = [NormalDist().inv_cdf((1 + level) / 2) for level in LEVELS]
    found = [Calibration().half_width(level) for level in LEVELS]
    assert found == pytest.approx(expected)
    # Distances that are not numbers are none.
    assert Calibration().seen([math.nan, math.inf]) == Calibration()


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_intervals_hold_their_share_whatever_the_scale_of_errors(scale: float) -> None:
    rng = np.random.default_rng(0)
    calibration, inside = Calibration(), []
    for distance in np.abs(scale * rng.standard_t(3, 2000)).tolist():
        inside.append(distance <= calibration.half_width(0.9))
        calibration = calibration.seen([distance])
    assert np.mean(inside) == pytest.approx(0.9, abs=0.02)
    widths = [calibration.half_width(level) for level in LEVELS]
    assert widths == sorted(widths)


def test_the_past_is_forgotten() -> None:
    wide = Calibration().seen([10.0] * WINDOW)
    assert wide.half_width(0.5) == pytest.approx(10.0)
    assert wide.seen([0.1] * WINDOW).half_width(0.5) < 0.2
    assert len(wide.seen([0.1] * 7).distances) == WINDOW

"""The examples of streams that change run, draw, and say what was forgotten."""

from __future__ import annotations

from examples import drift, sensor


def test_the_evidence_follows_a_drift_and_keeps_what_stays(tmp_path, capsys):
    tracks = drift.main(num_batches=10, batch_size=20, num_steps=30, out=tmp_path)
    drifting, still = tracks["drift"], tracks["no drift"]
    error = drifting[drift.AUTO].error[-1]
    assert 1.25 * error < drifting[drift.REMEMBERS].error[-1]
    best = drifting[drift.best_fixed(drifting)].error[-4:].mean()
    assert drifting[drift.AUTO].error[-4:].mean() < 1.5 * best
    # A rate that has to be guessed costs something where nothing drifts.
    remembered = still[drift.REMEMBERS].error[-4:].mean()
    assert remembered <= still["0.6"].error[-4:].mean()
    assert still[drift.AUTO].error[-4:].mean() <= 1.1 * remembered
    assert (tmp_path / "drift.png").stat().st_size > 10_000
    assert "no drift" in capsys.readouterr().out


def test_a_sensor_is_followed_through_gaps_and_a_calibration(tmp_path, capsys):
    series, track = sensor.main(days=12, num_inducing=20, num_steps=5, out=tmp_path)
    assert series.t.diff().max() > 0.2  # a gap
    later = slice(len(series.t) // 3, None)
    error = (series.y - track.mean)[later].square().mean().sqrt()
    assert error < 1.5  # readings have a standard deviation of 3
    # After the recalibration errors are those of before, sparse as readings are.
    last = slice(-len(series.t) // 10, None)
    assert (series.y - track.mean)[last].square().mean().sqrt() < 1.3
    assert (tmp_path / "sensor.png").stat().st_size > 10_000
    assert "one reading ahead" in capsys.readouterr().out

"""The example of a function that drifts runs, draws, and says what forgetting does."""

from __future__ import annotations

from examples import drift


def test_forgetting_follows_a_drift_and_costs_something_without_one(tmp_path, capsys):
    tracks = drift.main(num_batches=8, batch_size=20, num_steps=5, out=tmp_path)
    drifting, still = tracks["drift"], tracks["no drift"]
    # Measured: 2.5 times (4.1 in the 25 batches of the example).
    error = drifting["forgets"].error[-1]
    assert 1.25 * error < drifting["remembers all"].error[-1]
    # Measured: 0.12 and 0.17.
    error = still["forgets"].error[-4:].mean()
    assert still["remembers all"].error[-4:].mean() <= error
    assert (tmp_path / "drift.png").stat().st_size > 10_000
    assert "no drift" in capsys.readouterr().out

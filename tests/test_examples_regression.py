"""The demo runs, learns and draws."""

from __future__ import annotations

from examples import regression


def test_the_demo_learns_the_stream(tmp_path, capsys):
    rows = regression.main(out=tmp_path, num_steps=40)
    assert (tmp_path / "regression.png").stat().st_size > 10_000
    # The noise is 0.15: no model can do better on noisy targets.
    assert all(0.13 < row["RMSE"] < 0.2 for row in rows)
    assert rows[-1]["MLL"] > 0.3
    assert "RMSE" in capsys.readouterr().out

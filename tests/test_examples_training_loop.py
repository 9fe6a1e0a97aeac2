"""The example of a plain training loop runs and learns the stream."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "training_loop.py"


def test_training_loop_learns_the_stream_and_draws_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("training_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    rows = example.main(num_batches=3, batch_size=40, num_steps=80, out=tmp_path)
    assert [row["num_inducing"] for row in rows] == [8, 13, 18]
    assert rows[0]["old_data"] == 0
    assert rows[1]["old_data"] != 0
    # Nothing of the first batch is forgotten, and outliers (2.0) do no harm.
    assert rows[-1]["rmse"] < 0.25
    assert rows[-1]["rmse_first"] < rows[0]["rmse_first"] + 0.05
    assert (tmp_path / "training_loop.png").stat().st_size > 0
    assert "RMSE" in capsys.readouterr().out

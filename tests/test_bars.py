"""Acceptance bars: every case runs, is kept beside other versions, and is judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("river")
pytest.importorskip("sklearn")

from workbench import bars
from workbench.results import read


@pytest.mark.parametrize("case", bars.CASES)
def test_every_case_runs_and_is_judged(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, data = tmp_path / "bars.json", []
    if case == "first":  # the one case whose streams all come from files
        x, mask = np.random.default_rng(0).normal(size=(60, 2)), np.zeros((60, 1), bool)
        file = tmp_path / f"uci_{bars.FIRST[0]}.npz"
        np.savez(file, X=x, y=np.sin(x[:, 0]), test_mask=mask)
        data = ["--data-dir", str(tmp_path)]
    bars.main([case, "--quick", "--out", str(out), *data])
    rows = read(out).rows
    assert len(rows) == len(bars.CASES[case][1])
    assert not [row for row in rows if "failure" in row]
    assert all(row["cpu_seconds"] > 0 for row in rows)
    text = capsys.readouterr().out
    assert f"{case}, quick, " in text and ("met" in text or "MISSED" in text)


def test_versions_stay_side_by_side_and_what_is_exact_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--quick", "--out", str(tmp_path / "bars.json")]
    bars.main(["periods", "table", *quick, "--label", "first"])
    monkeypatch.setattr(bars, "run_exact", None)
    bars.main(["periods", "table", *quick, "--label", "second", "--old", "first"])
    rows = read(tmp_path / "bars.json").rows
    assert [row["version"] for row in rows] == 2 * ["first"] + 2 * ["second"]
    assert not [row for row in rows if "failure" in row]
    assert "mean CPU / goal / old" in capsys.readouterr().out


def test_a_bar_is_the_best_fixed_rate_of_all_seeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = pd.DataFrame(
        [
            {"stream": "gradual", "auto": 1.0, "λ = 1": 2.0, "λ = 0.5": 1.0},
            {"stream": "gradual", "auto": 3.0, "λ = 1": 2.0, "λ = 0.5": 4.0},
            {"stream": "stationary", "auto": 1.0, "λ = 1": 1.0, "λ = 0.5": 9.0},
        ]
    )
    bars.bars("changes", rows)
    text = " ".join(capsys.readouterr().out.split())
    assert "gradual: auto / best λ (2) 1 met at most 1.1" in text
    assert text.endswith("geometric mean of auto / best λ 1, at most 0.85")

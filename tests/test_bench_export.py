"""Speed of exported models: the command runs, and the docs say what its rows say."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench import bench_export, benchmark
from workbench.common import DOCS
from workbench.results import Contents, Row, read


def test_the_command_writes_rows_and_their_place_in_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_export, "SIZES", (5,))
    (tmp_path / "export.md").write_text("\n".join(["a", *bench_export.MARKS, "b"]))
    benchmark.main(["export", "--repeats", "1", "--out", str(tmp_path)])
    rows = read(tmp_path / "data" / "export.json").rows
    assert {row["kernel"] for row in rows} == set(bench_export.CASES)
    assert {row["rows"] for row in rows} == set(bench_export.ROWS)
    assert all(row["ratio"] > 0 for row in rows)
    text = (tmp_path / "export.md").read_text(encoding="utf-8")
    assert text.startswith("a\n") and text.endswith("\nb")
    assert "| Matérn 5/2, labels | 5 | 1 |" in text
    assert "| Matérn 5/2, labels | 5 | 1 |" in capsys.readouterr().out


def test_what_is_said_of_speed_is_what_the_rows_say() -> None:
    made = {"torch_ssgp": "1", "torch": "2", "repeats": 3}
    rows: list[Row] = [
        {"kernel": "k", "rows": 1, "ratio": 4.0},
        {"kernel": "k", "rows": 1, "ratio": 6.0},
        {"kernel": "k", "rows": 1000, "ratio": 9.0},
    ]
    text = " ".join(bench_export.section(Contents(made, rows)).split())
    assert "4.0 to 6.0 times faster" in text
    assert "at least 5 times in 1 of 2 cases" in text


def test_the_docs_are_those_of_the_file() -> None:
    page = (DOCS / "export.md").read_text(encoding="utf-8")
    file = read(DOCS / "data" / "export.json")
    assert bench_export.placed(page, bench_export.section(file)) == page

"""Predict-then-learn: it runs, resumes, and its page says what the rows say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("river")
pytest.importorskip("matplotlib")

from workbench import benchmark, prequential, prequential_page
from workbench.prequential_page import OURS
from workbench.results import Contents, Row, read

QUICK = ["prequential", "--quick", "--streams", "TrumpApproval", "Phishing"]
MODELS = ["--models", OURS, "KNN", "mean", "frequencies"]


def test_the_command_writes_rows_a_page_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prequential, "QUICK", 8)
    benchmark.main([*QUICK, *MODELS, "--out", str(tmp_path)])
    file = read(tmp_path / "data" / "prequential.json")
    assert file.header["length"] == 8
    assert len(file.rows) == 3 + 3
    for row in file.rows:
        assert row["data"] == 8
        assert row["ms"] > 0
        assert math.isfinite(row["log density"])
    assert (tmp_path / "figures" / "prequential.png").stat().st_size > 5_000
    text = (tmp_path / "prequential.md").read_text(encoding="utf-8")
    assert "### TrumpApproval" in text
    assert "### Phishing" in text

    def no_run(*args: object) -> Row:
        raise AssertionError("a row that is there was run again")

    monkeypatch.setattr(prequential, "run", no_run)
    benchmark.main([*QUICK, *MODELS, "--out", str(tmp_path)])


def rows(ours: float, others: dict[str, float], inside: float = 0.9) -> list[Row]:
    """A regression stream on which models have these errors."""
    return [
        {"task": "regression", "stream": "s", "model": name, "data": 10}
        | {"MAE": mae, "RMSE": mae, "log density": 0.0, "inside": inside, "ms": 1.0}
        for name, mae in {OURS: ours, **others}.items()
    ]


@pytest.mark.parametrize(
    ("ours", "inside", "said"),
    [
        (1.01, 0.9, ["within 2 % of it, on 1 of 1", "hold 87 to 93 % on 1 of 1"]),
        (1.03, 0.8, ["within 2 % of it, on 0 of 1", "hold 87 to 93 % on 0 of 1"]),
    ],
)
def test_the_page_counts_the_streams_that_reach_the_bar(
    ours: float, inside: float, said: list[str]
) -> None:
    made = {"torch_ssgp": "1", "river": "2", "length": 10}
    found = rows(ours, {"KNN": 1.0, "mean": 2.0}, inside)
    text = " ".join(prequential_page.page(Contents(made, found)).split())
    for words in said:
        assert words in text
    assert "| KNN | 1.0" in text
    assert "Log density is below the best of river's models on 0 of 1" in text


def test_every_packaged_stream_gives_numbers() -> None:
    for name, source in prequential.SOURCES.items():
        if source.file:
            continue
        x, y = list(source.data(None))[0]
        assert all(isinstance(value, int | float) for value in x.values()), name
        assert source.task == "classification" or isinstance(y, int | float), name


def test_streams_without_their_file_are_left_out(tmp_path: Path) -> None:
    streams = {stream for _, stream, _ in prequential.jobs(10, tmp_path)}
    assert streams == set(prequential.SOURCES) - {"bike", "elevators"}

"""Predict-then-learn: it runs, resumes, and its page says what the rows say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("river")
pytest.importorskip("matplotlib")

from workbench import benchmark, prequential, prequential_page
from workbench.common import DOCS
from workbench.prequential_page import FORGETTING, OURS
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
        | {"early MAE": mae, "late MAE": mae}
        for name, mae in {OURS: ours, **others}.items()
    ]


@pytest.mark.parametrize(
    ("ours", "inside", "said"),
    [
        (
            1.01,
            0.9,
            [
                "within 2 % of it, on 1 of 1",
                "the targets on 1 of 1",
            ],
        ),
        (
            1.03,
            0.8,
            [
                "within 2 % of it, on 0 of 1",
                "the targets on 0 of 1",
            ],
        ),
    ],
)
def test_the_page_counts_the_streams_that_reach_the_bar(
    ours: float, inside: float, said: list[str]
) -> None:
    text = page_of(rows(ours, {"KNN": 1.0, "mean": 2.0}, inside))
    for words in said:
        assert words in text
    assert "| KNN | 1.0" in text
    assert "Log density is below the best of river's models on 0 of 1" in text


def page_of(found: list[Row], length: int = 10) -> str:
    """The page of these rows, on one line."""
    made = {"torch_ssgp": "1", "river": "2", "length": length}
    return " ".join(prequential_page.page(Contents(made, found)).split())


def test_the_page_says_where_another_model_is_ahead_and_what_the_rows_say_of_it() -> (
    None
):
    found = rows(1.2, {"tree": 1.0, "mean": 1.04})
    text = page_of(found)
    assert "On s tree is ahead, by 20.0 % of its MAE." in text
    assert "The mean of all targets so far is within 4.0 % of it" in text
    assert "in the last third" not in text
    found[0]["late MAE"] = 3 * found[0]["early MAE"]
    found[2]["MAE"] = 9.0
    text = page_of(found)
    assert "in the last third are 3.0 times those in the first, tree's 1.0" in text
    assert "The mean of all targets" not in text
    assert "None of river's models is ahead" in page_of(rows(0.9, {"tree": 1.0}))


def test_our_other_settings_are_no_rival() -> None:
    text = page_of(rows(1.0, {"tree": 2.0, FORGETTING: 0.5}))
    assert "None of river's models is ahead" in text
    assert "s 0.50" in text


def test_the_page_names_streams_with_fewer_data() -> None:
    assert "cut at 10 data, to keep" in page_of(rows(1.0, {"tree": 2.0}))
    assert "cut at 20 data (s 10), to keep" in page_of(rows(1.0, {"tree": 2.0}), 20)


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


def test_the_docs_are_those_of_the_file() -> None:
    file = read(DOCS / "data" / "prequential.json")
    text = (DOCS / "prequential.md").read_text(encoding="utf-8")
    assert text == prequential_page.page(file)

"""Tables are those of the files, and sentences quote numbers that the files have."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("river")

from workbench import figures, frontier, picture, tables
from workbench.results import Contents, Row
from workbench.runner import BATCH, OURS, PAPER, WINDOW

PAGES = tables.pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_show_what_the_files_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.filled(text) == text, "run: python scripts/benchmark.py tables"


# README.md has versions of Python, too; its tables quote nothing.
@pytest.mark.parametrize("page", PAGES[1:], ids=lambda path: path.stem)
def test_every_number_that_a_sentence_quotes_is_in_a_file(page: Path) -> None:
    assert tables.strangers(page.read_text(encoding="utf-8")) == []


def test_every_table_has_its_place() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert {match[1] for match in tables.BLOCK.finditer(text)} == {*tables.TABLES}


def test_a_number_that_no_file_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "numbers_in", lambda file: [0.2345, 12.0])
    page = "<!-- table: toy -->\n| a |\n|---|\n| 7.25 |\n<!-- end -->\n\n"
    known = "It is 0.23, or 0.2345, and 7.25; see `9.99` and [here](page-9.8.md)."
    assert tables.strangers(page + known) == []
    assert tables.strangers(page + "It is 0.24 and 3.14.") == ["0.24", "3.14"]


def test_only_what_is_between_the_marks_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    page = "Before.\n\n<!-- table: toy -->\nold\n<!-- end -->\n\nAfter.\n"
    text = tables.filled(page)
    assert "old" not in text and "Not measured yet" in text
    assert text.startswith("Before.\n\n<!-- table: toy -->\n")
    assert text.endswith("<!-- end -->\n\nAfter.\n") and tables.filled(text) == text


def test_a_row_without_a_column_has_a_dash() -> None:
    text = tables.markdown([{"a": 1.23456, "b": 12_345.0}, {"a": float("nan")}])
    assert text.splitlines()[2:] == ["| 1.235 | 12,345 |", "| – | – |"]


def row(method: str, seconds: float, rmse: float, **others: object) -> Row:
    row = {"stream": "s", "method": method, "M": 10, "batch": 5, "seed": 0}
    return {**row, "seconds": seconds, "RMSE": rmse, "MLL": -rmse, **others}


def test_methods_without_points_or_batches_join_every_setting() -> None:
    rows = [row(OURS, 1, 1.0), row(OURS, 1, 1.0, batch=7), row(BATCH, 9, 0.5, batch=0)]
    rows += [row(WINDOW, 3, 2.0, M=0), row("SVI 0.1", 1, 4.0), row("SVI 1", 1, 3.0)]
    every = figures.contests(rows)
    assert [*every] == [("s", 10, 5), ("s", 10, 7)]
    assert {*every["s", 10, 5]} == {OURS, BATCH, WINDOW, "SVI"}
    assert every["s", 10, 5]["SVI"]["RMSE"] == 3.0  # the best rate
    assert {*every["s", 10, 7]} == {OURS, BATCH}


def test_the_frontier_of_a_contest_leaves_out_who_waits_for_the_last_datum() -> None:
    contest = {OURS: row(OURS, 2, 1.0), PAPER: row(PAPER, 3, 2.0)}
    contest |= {WINDOW: row(WINDOW, 1, 3.0), BATCH: row(BATCH, 0.1, 0.1)}
    ends = figures.frontier(contest, "RMSE")
    assert [end["method"] for end in ends] == [WINDOW, OURS]


def test_a_frontier_rises_with_cost_and_ours_is_so_far_off_it() -> None:
    columns = ("method", "cpu_seconds", "RMSE")
    values = [(OURS, 2.0, 1.0), (BATCH, 1.0, 0.8), (WINDOW, 3.0, 0.9), (OURS, 8.0, 0.5)]
    frame = pd.DataFrame(values, columns=columns)
    edge = frontier.on_frontier(frame, "cpu_seconds")
    assert edge["RMSE"].tolist() == [0.8, 0.5]
    assert frontier.farthest(frame, "cpu_seconds") == pytest.approx(1.0 / 0.8)


def test_the_picture_shows_the_best_of_river_only() -> None:
    def of(model: str, error: float) -> Row:
        return {"model": model, "y": [1.0, 2.0, 3.0], "mean": [0, 2 + error, 3 + error]}

    rows = [of("StreamingGP", 1.0), of("KNN", 3.0), of("tree", 2.0), of("batch", 0.5)]
    errors, _ = picture.table(Contents({}, rows))
    assert [*errors.values()] == ["mean absolute error", "0.50", "1.00", "2.00"]
    assert [*errors][-1] == "best of river: tree"
    assert picture.running(pd.Series([1.0, 3.0]).to_numpy()) == [1.0, 2.0]

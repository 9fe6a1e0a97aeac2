"""Streams that change: the benchmark runs, resumes, and its page says what rows say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("river")

from workbench import benchmark, change_streams, changes, changes_page
from workbench.changes_page import AUTO, FIXED, WINDOW
from workbench.common import DOCS
from workbench.results import Contents, Row, read


def test_the_command_writes_rows_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "STEPS", 3)
    monkeypatch.setattr(changes, "QUICK", changes.Size(3, 36, 20, {1: 3, 3: 2}, 1))
    monkeypatch.setattr(changes, "SERIES", ("RunLog",))
    quick = ["changes", "--quick", "--streams", "abrupt", "--out", str(tmp_path)]
    benchmark.main(quick)
    rows = read(tmp_path / "data" / "changes.json").rows
    tables = [row["table"] for row in rows]
    names = ("streams", "points", "sensor", "still")
    assert [tables.count(name) for name in names] == [9, 4, 2, 4]
    text = (tmp_path / "changes.md").read_text(encoding="utf-8")
    for words in (
        "| abrupt |",
        "| RunLog |",
        "batches of 12",
        "these are fewer",
        "false alarms",
    ):
        assert words in text

    def no_run(*args: object) -> Row:
        raise AssertionError("a row that is there was run again")

    for name in ("stream_row", "points_row", "sensor_row", "still_row"):
        monkeypatch.setattr(changes, name, no_run)
    benchmark.main(quick)


@pytest.mark.parametrize("name", change_streams.NAMES)
def test_streams_have_their_changes(name: str) -> None:
    stream = change_streams.make(name, 12, 20, seed=0)
    assert len(list(stream.batches())) == 12
    assert torch.equal(stream.y, change_streams.make(name, 12, 20, seed=0).y)
    assert not torch.equal(stream.y, change_streams.make(name, 12, 20, seed=1).y)
    if stream.is_labels:
        assert set(stream.y.tolist()) == {0.0, 1.0}
    else:
        assert 0.1 < (stream.y / stream.scale).std() < 5


@pytest.mark.parametrize("name", changes.SERIES)
def test_annotations_lie_in_their_series(name: str) -> None:
    series = change_streams.annotated(name)
    whole = getattr(change_streams.datasets, name)().annotations
    assert series.changes == [*whole.values()]  # none was cut off
    assert series.y.mean().abs() < 1e-9


def test_a_mark_is_found_by_one_alarm_within_the_margin() -> None:
    assert changes.agreement([], [[]], 5) == (1, 1)
    assert changes.agreement([52, 54], [[50]], 5) == (2 / 3, 1)
    assert changes.agreement([60], [[50]], 5) == (1 / 2, 1 / 2)
    assert changes.agreement([50], [[50], []], 5) == (1, 1)
    assert changes.agreement([50], [[50, 90], [20]], 5) == (1, (2 / 3 + 1 / 2) / 2)


def rows(stream: str, auto: float, fixed: float, one: float) -> list[Row]:
    """A stream on which models have these errors."""
    errors = {AUTO: auto, **dict.fromkeys(FIXED, fixed), "λ = 1": one, WINDOW: 1.0}
    return [
        {"table": "streams", "stream": stream, "model": name, "seed": 0}
        | {"error": error, "changes": 1, "alarms": 2}
        for name, error in errors.items()
    ]


def test_the_page_judges_by_the_best_fixed_power() -> None:
    made = {"torch_ssgp": "1", "river": "2", "batches": 3, "batch": 4, "inducing": 5}
    made |= {"steps": 6, "window": 7}
    found = rows("abrupt", 0.5, 1.0, 2.0) + rows("gradual", 1.2, 1.0, 2.0)
    found += rows("stationary", 1.0, 1.5, 0.8)
    text = " ".join(changes_page.page(Contents(made, found)).split())
    assert "on 1 of 2 streams that change, ahead of it on 1" in text
    assert "not on gradual (1.20)" in text
    assert "auto 0.77, λ = 1 2.00" in text
    assert "1.250 (stationary)" in text


def test_the_page_says_what_as_many_seeds_as_others_have_say() -> None:
    more = [row | {"seed": 1} for row in rows("gradual", 1.0, 1.0, 2.0)]
    found = rows("abrupt", 0.5, 1.0, 2.0) + rows("gradual", 1.2, 1.0, 2.0)
    assert changes_page.seeds_of(found) == "1 seed"
    assert changes_page.more_seeds(found) == ""
    assert changes_page.seeds_of(found + more) == "1 to 2 seeds"
    assert "of gradual is 1.200" in changes_page.more_seeds(found + more)


def test_the_page_is_that_of_the_data() -> None:
    page = changes_page.page(read(DOCS / "data" / "changes.json"))
    assert (DOCS / "changes.md").read_text(encoding="utf-8") == page

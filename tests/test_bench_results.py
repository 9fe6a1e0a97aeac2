"""Files of results are small, whole at any time, and say what made them."""

from __future__ import annotations

import json
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

from workbench import results
from workbench.common import DOCS
from workbench.results import Table

FILES = sorted([*DOCS.glob("data/*.json"), *DOCS.glob("reproduction/*.json")])


def test_a_file_has_a_header_and_a_line_for_each_row(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    rows = [{"name": "a", "values": [1.0, 2.0]}, {"name": "b", "values": []}]
    results.write(path, {"torch_ssgp": "1"}, rows)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line.rstrip(",")) for line in lines[2:4]] == rows
    assert results.read(path) == ({"torch_ssgp": "1"}, rows)
    assert [each.name for each in path.parent.iterdir()] == ["file.json"]


def test_floats_keep_six_digits_and_nothing_else_changes() -> None:
    value = {"a": [1 / 3, -2e-9 / 3, (12345678, True)], "b": None, "c": "0.123456789"}
    short = [0.333333, -6.66667e-10, [12345678, True]]
    assert results.rounded(value) == {**value, "a": short}
    assert results.rounded(1 / 3, digits=9) == 0.333333333


def test_a_header_has_versions_threads_and_settings() -> None:
    header = results.header(others=["botorch"], seeds=3)
    assert header["seeds"] == 3 and header["threads"] == 1
    assert all(header[name][0].isdigit() for name in ("torch_ssgp", "torch", "botorch"))


def test_references_have_no_version() -> None:
    apart = [{"version": "1", "variant": "batch SGPR"}]
    apart += [{"version": "1", "method": "exact"}]
    rows = [*apart, {"version": "2", "method": "stream"}, {"method": "stream"}]
    assert results.versions(results.Contents({"torch_ssgp": "3"}, rows)) == ["2", "3"]
    assert results.versions(results.Contents({"torch_ssgp": "3"}, apart)) == ["3"]


@pytest.mark.parametrize("text", ['{"header": ', "[]", '{"header": {}}'])
def test_a_file_without_results_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="toy.json is not .*--out"):
        results.read(path)


def test_only_missing_rows_are_made_and_each_is_kept_at_once(tmp_path: Path) -> None:
    made: list[str] = []
    table = Table(tmp_path / "rows.json", ["name", "seed"], {"torch_ssgp": "1"})

    def job(name: str) -> results.Row:
        made.append(name)
        if name == "c":
            raise KeyboardInterrupt
        if name == "b":  # another process writes meanwhile
            other = Table(table.path, table.names, table.header)
            other.add({"name": "other", "seed": 0})
        return {"value": 1 / 3}

    jobs = {(name, 0): lambda name=name: job(name) for name in "abc"}
    with pytest.raises(KeyboardInterrupt):
        table.run(jobs)
    kept = table.rows()
    assert list(kept) == [("a", 0), ("other", 0), ("b", 0)]
    assert kept["a", 0].pop("took") >= 0
    assert kept["a", 0] == {"version": "1", "name": "a", "seed": 0, "value": 0.333333}
    made.clear()
    assert len(table.run({key: jobs[key] for key in list(jobs)[:2]})) == len(kept)
    assert made == []
    table.drop(lambda row: row["name"] == "a")
    assert ("a", 0) not in table.rows()


def test_rows_of_another_version_are_made_again_references_apart(
    tmp_path: Path,
) -> None:
    jobs = {("streaming",): dict, ("batch SGPR",): dict}  # empty rows

    def versions(version: str, size: int) -> list[str]:
        header = {"torch_ssgp": version, "size": size}
        rows = Table(tmp_path / "rows.json", ["method"], header).run(jobs)
        return [row["version"] for row in sorted(rows, key=lambda row: row["method"])]

    assert versions("1", 3) == ["1", "1"]
    assert versions("2", 3) == ["1", "2"]
    with pytest.raises(SystemExit, match="other settings: size was 3, is 4"):
        versions("2", 4)
    assert versions("3", 4) == ["3", "3"]


def test_several_processes_make_the_same_rows(tmp_path: Path) -> None:
    jobs = {(k,): partial(dict, value=k) for k in range(3)}
    table = Table(tmp_path / "rows.json", ["name"], {"torch_ssgp": "1"})
    rows = table.run(jobs, workers=2)
    assert sorted(row["value"] for row in rows) == [0, 1, 2]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_files_say_what_made_them_and_have_a_line_for_each_row(
    path: Path,
) -> None:
    header, rows = results.read(path)
    assert header["torch_ssgp"][0].isdigit()
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(rows) + 3


def test_committed_results_are_of_this_version_or_of_the_release_before() -> None:
    """Those of 0.2.0 are to be made anew; every page says of what version its are."""
    for path in FILES:
        found = set(results.versions(results.read(path)))
        assert found in ({"0.2.0"}, {version("torch_ssgp")}), (path.name, found)

"""A short soak: no exception, no NaN, no memory that grows; the page is the run's."""

import math
from importlib.metadata import version
from pathlib import Path

import pytest

from conftest import FULL
from workbench import results, soak, soak_page
from workbench.soak_stream import CHANGES

UPDATES = 300 if FULL else 66


@pytest.fixture(scope="module")
def report() -> soak.Row:
    """Every change of the stream once, with a few looks at the side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "CONDITION_EVERY", UPDATES // 4)
        patch.setattr(soak, "SAVE_EVERY", UPDATES // 2)
        return soak.run(UPDATES, seed=1, batch_steps=5, progress=False)


def test_no_update_raises_or_leaves_nan(report: soak.Row) -> None:
    assert report["exceptions"] == 0, report["first_traceback"]
    assert report["not_finite"] == 0, report["not_finite_in"]
    assert sum(report["status"].values()) == UPDATES


def test_the_run_meets_every_change_and_every_batch(report: soak.Row) -> None:
    assert {row["change"] for row in report["regimes"]} == {
        change.name for change in CHANGES
    }
    assert set(report["batches"]) == {
        "plain",
        "one point",
        "outlier",
        "identical inputs",
        "same batch again",
    }
    assert report["conditioned"] and report["loaded"]


def test_conditioning_and_files_leave_the_model_alone(report: soak.Row) -> None:
    assert report["conditioned_and_changed"] == 0
    assert report["loaded_and_differs"] == 0


def test_memory_and_inducing_points_stay_bounded(report: soak.Row) -> None:
    first, last = report["samples"][0], report["samples"][-1]
    if not math.isnan(first["resident_MiB"]):
        assert last["resident_MiB"] <= 1.1 * first["resident_MiB"]
    assert last["tensors"] <= first["tensors"] + 200
    assert report["M"]["max"] <= report["num_inducing"]


def test_an_exception_is_counted_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(soak.Soak, "step", broken)
    report = soak.run(4, regime=2, batch_steps=0, progress=False)
    assert report["exceptions_by_class"]["ValueError"] == 4
    assert "on purpose" in report["first_traceback"]


def test_the_page_is_that_of_the_data() -> None:
    report = soak.load(soak.DATA)
    assert soak.PAGE.read_text(encoding="utf-8") == soak.page(report)


def test_a_report_comes_back_from_its_file(report: soak.Row, tmp_path: Path) -> None:
    soak.save(tmp_path / "soak.json", report)
    loaded = soak.load(tmp_path / "soak.json")
    assert loaded.pop("version") == version("torch_ssgp")
    assert loaded == results.rounded(report)


def test_a_run_does_not_overwrite_the_file_of_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = []
    monkeypatch.setattr(soak, "run", lambda *_, out, **__: written.append(out))
    soak.main(["--quick"])
    soak.main(["--updates", "5"])
    assert written == [Path("out/soak.json")] * 2


@pytest.mark.parametrize("value", ["0", "-3"])
def test_a_run_has_updates(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main([f"--updates={value}"])
    assert "whole number above 0" in capsys.readouterr().err


def test_the_page_counts_the_regimes_that_recovered(report: soak.Row) -> None:
    regimes = [
        {**row, "ratio": 1.4 + 0.2 * (i % 2), "recovered_after": 5 if i else None}
        for i, row in enumerate(report["regimes"])
    ]
    text = soak_page.page({**report, "version": "1", "regimes": regimes})
    count = (len(regimes) + 1) // 2
    assert f"| {count} of {len(regimes)} | 90 of 100 |" in text
    assert f"{len(regimes) - 1} of {len(regimes)} regimes" in text

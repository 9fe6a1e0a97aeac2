"""A short soak: no exception, no NaN, no memory that grows; the page is the run's."""

import json
import math

import pytest

import soak


@pytest.fixture(scope="module")
def report() -> soak.Row:
    """Every change of the stream once, in 300 updates."""
    return soak.run(300, seed=1, batch_steps=5, progress=False)


def test_no_update_raises_or_leaves_nan(report: soak.Row) -> None:
    assert report["exceptions"] == 0, report["first_traceback"]
    assert report["not_finite"] == 0, report["not_finite_in"]
    assert sum(report["status"].values()) == 300


def test_the_run_meets_every_change_and_every_batch(report: soak.Row) -> None:
    assert {row["change"] for row in report["regimes"]} == {
        change.name for change in soak.CHANGES
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
    report = json.loads(soak.DATA.read_text(encoding="utf-8"))
    assert soak.PAGE.read_text(encoding="utf-8") == soak.page(report)

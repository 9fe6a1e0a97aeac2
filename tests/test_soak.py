"""A short soak: no exception, no NaN, no memory that grows."""

import math
from pathlib import Path

import pytest

from conftest import FULL
from workbench import results, soak

UPDATES = 300 if FULL else 66


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> results.Contents:
    """Every change of the stream once, with a few looks at the side."""
    path: Path = tmp_path_factory.mktemp("soak") / "soak.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "CONDITION_EVERY", UPDATES // 4)
        patch.setattr(soak, "SAVE_EVERY", UPDATES // 2)
        soak.Soak(UPDATES, seed=1, batch_steps=5).run(path)
    return results.read(path)


def rows(report: results.Contents, kind: str) -> list[results.Row]:
    return [row for row in report.rows if row["kind"] == kind]


def test_no_update_raises_or_leaves_nan(report: results.Contents) -> None:
    (total,) = rows(report, "totals")
    assert total["exceptions"] == 0, total["first_traceback"]
    assert total["not_finite"] == 0, total["not_finite_in"]
    assert sum(total["status"].values()) == UPDATES


def test_the_run_meets_every_change_and_every_batch(report: results.Contents) -> None:
    met = {row["change"] for row in rows(report, "regime")}
    assert met == {change.name for change in soak.CHANGES}
    (total,) = rows(report, "totals")
    odd = {"outlier", "identical inputs", "same batch again"}
    assert set(total["batches"]) == {"plain", "one point", *odd}
    assert total["conditioned"] and total["loaded"]


def test_conditioning_and_files_leave_the_model_alone(
    report: results.Contents,
) -> None:
    (total,) = rows(report, "totals")
    assert total["conditioned_and_changed"] == total["loaded_and_differs"] == 0


def test_memory_and_points_stay_bounded(report: results.Contents) -> None:
    first, *_, last = rows(report, "sample")
    if not math.isnan(first["resident_MiB"]):
        assert last["resident_MiB"] <= 1.1 * first["resident_MiB"]
    assert last["tensors"] <= first["tensors"] + 200
    (total,) = rows(report, "totals")
    model = soak.new_model(2, report.header["num_inducing"])
    assert total["most_points"] <= model.memory_size


def test_an_exception_is_counted_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, seen = soak.Soak(4, batch_steps=2), []

    def update(*args: object, **options: object) -> None:
        seen.append(args)
        raise ArithmeticError("no")

    monkeypatch.setattr(run.model, "update", update)
    total = run.run()
    assert total["exceptions_by_class"]["ArithmeticError"] == 4 == len(seen)
    assert "ArithmeticError: no" in total["first_traceback"]

"""A short soak: no exception, no NaN, no memory that grows."""

import math
from pathlib import Path

import pytest

from conftest import FULL
from workbench import results, soak

UPDATES = 300 if FULL else 66
Kinds = dict[str, list[results.Row]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    """Every change of the stream once, with a few looks at the side."""
    path: Path = tmp_path_factory.mktemp("soak") / "soak.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "CONDITION_EVERY", UPDATES // 4)
        patch.setattr(soak, "SAVE_EVERY", UPDATES // 2)
        soak.Soak(UPDATES, seed=1, batch_steps=5).run(path)
    rows = results.read(path).rows
    kinds = {row["kind"] for row in rows}
    return {kind: [row for row in rows if row["kind"] == kind] for kind in kinds}


@pytest.fixture(scope="module")
def total(report: Kinds) -> results.Row:
    return report["totals"][0]


def test_no_update_raises_or_leaves_nan(total: results.Row) -> None:
    assert total["exceptions"] == 0, total["first_traceback"]
    assert total["not_finite"] == 0, total["not_finite_in"]
    assert sum(total["status"].values()) == UPDATES


def test_conditioning_and_files_leave_the_model_alone(total: results.Row) -> None:
    assert total["conditioned"] and total["loaded"]
    assert total["conditioned_and_changed"] == total["loaded_and_differs"] == 0


def test_the_run_meets_every_change_and_every_batch(
    report: Kinds, total: results.Row
) -> None:
    met = {row["change"] for row in report["regime"]}
    assert met == {change.name for change in soak.CHANGES}
    odd = {"outlier", "identical inputs", "same batch again"}
    assert set(total["batches"]) == {"plain", "one point", *odd}


def test_memory_and_points_stay_bounded(report: Kinds, total: results.Row) -> None:
    first, *_, last = report["sample"]
    if not math.isnan(first["resident_MiB"]):
        assert last["resident_MiB"] <= 1.1 * first["resident_MiB"]
    assert last["tensors"] <= first["tensors"] + 200
    assert total["most_points"] <= soak.new_model(2, soak.Soak.num_inducing).memory_size


def test_an_exception_is_counted_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = soak.Soak(4, batch_steps=2)

    def update(*args: object, **options: object) -> None:
        raise ArithmeticError("no")

    monkeypatch.setattr(run.model, "update", update)
    total = run.run()
    assert total["exceptions_by_class"]["ArithmeticError"] == 4
    assert "ArithmeticError: no" in total["first_traceback"]

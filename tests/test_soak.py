"""A short soak: no exception, no NaN, no memory that grows; the page is the run's."""

import math
from importlib.metadata import version
from pathlib import Path

import pytest

from conftest import FULL
from workbench import results, soak, soak_page
from workbench.soak_stream import CHANGES

UPDATES = 300 if FULL else 99


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


def regime(change: str, forget: float, noise: float, recovered: bool) -> soak.Row:
    """How a regime may have ended, with y of scale 1."""
    return {
        "change": change,
        "forget": forget,
        "scale": 1.0,
        "learned_noise_std": noise,
        "recovered_after": 5 if recovered else None,
        "lengthscale": 1.0,
        "learned_lengthscale": 1.0 if recovered else 1e3,
    }


SMALLER = "range moves, y 1000x smaller", "function changes, y 1000x smaller"


@pytest.mark.parametrize(
    ("noise", "recovered", "verdict"),
    [
        (0.1, True, "`forget` below 1 is the cure."),
        (0.1, False, "`forget` below 1 cures the noise, not the fit."),
        (1.0, False, "`forget` below 1 brings the noise down, though not to the true"),
        (600.0, True, "`forget` below 1 is no cure for the noise here."),
    ],
)
def test_forgetting_is_judged_by_the_numbers(
    noise: float, recovered: bool, verdict: str
) -> None:
    regimes = [
        regime(SMALLER[0], 1.0, 687.0, False),
        regime(SMALLER[1], 0.8, noise, recovered),
        regime("function changes", 0.9, 0.1, recovered),
    ]
    text = soak_page.forgetting(regimes)
    assert text.startswith(verdict)
    count = "2 of 2" if recovered else "0 of 2"
    assert f"{count} regimes recovered with `forget` below 1, 0 of 1 with 1." in text


def test_lost_inducing_points_are_told_only_where_they_are_lost() -> None:
    sizes = {500: 25, 1_000: 1, 1_500: 4, 2_000: 1, 2_500: 1}
    samples = [{"update": update, "M": m} for update, m in sizes.items()]
    lost = [regime("function changes", 0.9, 1.0, False)]
    report = {"num_inducing": 25, "samples": samples, "regimes": lost}
    assert "end: 1 of 25 allowed, and 1 at every look since update 2,000." in (
        soak_page.points(report)
    )
    assert "slow recovery" in soak_page.collapse(report)
    assert "slow recovery" in soak_page.reading(report)
    samples[-1]["M"] = 20
    assert soak_page.points(report).startswith(
        "Inducing points at the end: 20 of 25 allowed."
    )
    assert soak_page.collapse(report) == ""
    samples[-1]["M"] = 1
    report["regimes"] = [regime("function changes", 0.9, 1.0, True)]
    assert soak_page.collapse(report) == ""


def test_a_run_may_leave_what_to_forget_to_the_evidence() -> None:
    report = soak.run(4, regime=2, batch_steps=2, auto=True, progress=False)
    assert report["exceptions"] == 0, report["first_traceback"]
    assert {row["forget"] for row in report["regimes"]} == {"auto"}
    text = " ".join(soak_page.page({"version": "0", **report}).split())
    assert 'the library\'s defaults and `forget="auto"`' in text
    assert "regimes are within 1.5 times the error of the batch model" in text

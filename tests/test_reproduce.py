"""The experiments of the paper run, resume and are drawn; the page is the files'."""

import itertools
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from conftest import FULL
from workbench import (
    contest_page,
    contests,
    experiment_page,
    experiments,
    figures,
    reproduce,
    reproduction_page,
    results,
    streams,
    verdicts,
)
from workbench.cells import Cell, Settings
from workbench.experiment_results import Results
from workbench.experiments import EXPERIMENTS, conditions
from workbench.results import Row
from workbench.verdicts import Setting

ROOT = Path(__file__).resolve().parents[1]
PNG = b"\x89PNG\r\n\x1a\n"
FIXED, AT_DATA = "fixed inducing points", "inducing points at the data"


def cells_of(path: Path) -> verdicts.Cells:
    """The cells in a file, by name."""
    return {row["cell"]: row for row in results.read(path).rows}


# ---------------------------------------------------------------------- runs of it all


# Ten steps a batch are not enough to learn with; here it matters only that all runs.
@pytest.mark.filterwarnings("ignore::torch_ssgp.exceptions.FlattenedWarning")
def test_all_quick_leaves_files_pictures_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One test and no fixture: two workers would run all of it twice.
    if not FULL:  # a process takes longer to start than what it runs; see below
        monkeypatch.setattr(reproduce, "ALONE", ())
        # Here peaks are those of other tests, and may be none: any number will do.
        peaks = itertools.count(10_000.0, 10.0)
        monkeypatch.setattr(contests, "peak_mib", lambda: next(peaks))
    out = tmp_path / "reproduction"
    # Of those left out in CI every cell is drawn and told below.
    long = () if FULL else ("alpha", "hyperparameters", "terrain")
    names = [name for name in EXPERIMENTS if name not in long]
    wanted = names if long else ["all"]
    reproduce.main([*wanted, "--quick", "--out", str(out), "--jobs", "1"])
    for name in names:
        path, cells = out / f"{name}.json", EXPERIMENTS[name](Settings(quick=True))
        assert results.read(path).header["quick"]
        assert set(cells_of(path)) == {cell.key for cell in cells}
        picture = (out / f"{name}.png").read_bytes()
        assert picture.startswith(PNG) and len(picture) > 10_000, name

    cells = cells_of(out / "timeseries.json")
    remembers = [key for key, row in cells.items() if "memory RMSE" in row]
    assert remembers == [key for key in cells if "; streaming" in key] != []

    reproduce.main(["report", "--out", str(out)])
    page = (tmp_path / "reproduction.md").read_text(encoding="utf-8")
    for name in names:
        assert f"## {reproduction_page.SECTIONS[name].title}\n" in page
        assert f"(reproduction/{name}.png)" in page
    assert page.count("**Measured.**") == len(names)
    assert ("Not run" in page) == bool(long)
    assert not re.search(r"\b(nan|inf)\b", page)
    assert "Tiny versions" in page


def process() -> Row:
    """A cell that says where it ran."""
    return {"process": os.getpid()}


def test_peaks_of_memory_are_measured_in_a_process_of_their_own() -> None:
    assert "memory" in reproduce.ALONE
    job = ("memory", Cell("where", process))
    ((_, row),) = reproduce.outcomes([job], jobs=1, alone=True)
    assert row["process"] != os.getpid()
    ((_, row),) = reproduce.outcomes([job], jobs=1, alone=False)
    assert row["process"] == os.getpid()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the smallest of the experiments."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    reproduce.main(["equivalence", "--quick", "--out", str(out)])
    return out


def test_only_missing_cells_run_again(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    path = out / "equivalence.json"
    before = cells_of(path)
    results.write(path, results.read(path).header, [before[FIXED]], digits=9)
    calls = []

    def counted(at_data: bool) -> Row:
        calls.append(at_data)
        return before[AT_DATA]

    monkeypatch.setattr(experiments, "equivalence", counted)
    reproduce.main(["equivalence", "--quick", "--out", str(out)])
    assert calls == [True]
    after = cells_of(path)
    assert after[FIXED] == before[FIXED]
    assert after[AT_DATA]["panels"] == before[AT_DATA]["panels"]

    reproduce.main(["equivalence", "--quick", "--out", str(out)])
    assert calls == [True]


def test_an_interrupt_keeps_what_is_finished(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = cells_of(finished / "equivalence.json")[FIXED]

    def interrupted(at_data: bool) -> Row:
        if at_data:
            raise KeyboardInterrupt
        return row

    monkeypatch.setattr(experiments, "equivalence", interrupted)
    with pytest.raises(SystemExit, match="same command goes on"):
        reproduce.main(["equivalence", "--quick", "--out", str(tmp_path)])
    cells = cells_of(tmp_path / "equivalence.json")
    assert list(cells) == [FIXED] and cells[FIXED]["panels"] == row["panels"]


def test_quick_and_full_results_are_not_mixed(finished: Path) -> None:
    with pytest.raises(SystemExit, match="other settings.*--out"):
        reproduce.main(["equivalence", "--out", str(finished)])


@pytest.mark.parametrize("name", contests.BUDGETS)
def test_another_budget_drops_the_cells_that_had_it(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = Results(name, tmp_path)
    first.go_on(Settings())
    every = [cell.key for cell in first.planned()]
    for key in every:
        first.add(key, {})
    Results(name, tmp_path).go_on(Settings())
    assert not Results(name, tmp_path).missing() and not capsys.readouterr().out

    other = contests.BUDGETS[name]._replace(gp_steps=99)
    monkeypatch.setitem(contests.BUDGETS, name, other)
    Results(name, tmp_path).go_on(Settings())
    left = Results(name, tmp_path)
    assert left.missing() == [key for key in every if "windowed GP" in key] != []
    assert left.conditions["budget"]["gp_steps"] == 99
    assert f"{name}: gp_steps changed" in capsys.readouterr().out


def test_every_budget_has_its_spenders() -> None:
    assert set(contests.SPENDERS) == set(contests.Budget._fields)
    methods = {method for users in contests.SPENDERS.values() for method in users}
    assert methods == set(verdicts.METHODS)


def test_only_the_terrain_depends_on_the_tile(tmp_path: Path) -> None:
    tile = tmp_path / "terrain_os_NT26.npz"
    tile.write_bytes(b"heights")
    with_tile = Settings(data_dir=tmp_path)
    for name in EXPERIMENTS:
        first = Results(name, tmp_path)
        first.go_on(with_tile)
        first.add("a cell", {})
        if name in ("terrain", "memory"):
            with pytest.raises(SystemExit, match="tile was [0-9a-f]{16}, is None"):
                Results(name, tmp_path).go_on(Settings())
        else:
            Results(name, tmp_path).go_on(Settings())
    tile.write_bytes(b"other heights")
    with pytest.raises(SystemExit, match="tile was"):
        Results("terrain", tmp_path).go_on(with_tile)


def test_a_tile_is_no_hindrance_to_the_others(finished: Path, tmp_path: Path) -> None:
    options = ["--quick", "--out", str(finished), "--data-dir", str(tmp_path)]
    reproduce.main(["equivalence", *options])


def test_fewer_seeds_show_fewer_cells(tmp_path: Path) -> None:
    first = Results("banana", tmp_path)
    first.go_on(Settings())
    for cell in first.planned():
        first.add(cell.key, {})
    Results("banana", tmp_path).go_on(Settings(seeds=2))
    fewer = Results("banana", tmp_path)
    assert len(fewer.kept) == 8 and fewer.missing() == []
    assert [key for key in fewer.cells if "random" in key] == ["random 0", "random 1"]
    fewer.go_on(Settings(seeds=6))
    assert fewer.missing() == ["random 5"]


# ------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("absent", "experiment"),
    [("matplotlib", "toy"), ("river", "banana")],
)
def test_what_is_not_installed_is_said_before_anything_runs(
    absent: str, experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        reproduce, "find_spec", lambda name: None if name == absent else object()
    )
    with pytest.raises(SystemExit, match=f"Not installed: {absent}. .*pip install"):
        reproduce.main(["equivalence", experiment, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    reproduce.check(["equivalence"] if absent == "river" else [], Settings())


def test_a_tile_that_is_not_there_is_said_before_anything_runs(tmp_path: Path) -> None:
    for name in ("terrain", "memory"):
        with pytest.raises(SystemExit, match="terrain_os_NT26.npz does not exist"):
            reproduce.main([name, "--data-dir", str(tmp_path), "--out", str(tmp_path)])


@pytest.mark.parametrize("option", ["--jobs", "--seeds"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_numbers_of_the_command_line_are_positive(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        reproduce.main(["toy", f"{option}={value}"])
    assert "is not a whole number above 0" in capsys.readouterr().err


def test_an_experiment_named_twice_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(reproduce, "run", lambda names, *_: runs.append(names))
    reproduce.main(["toy", "banana", "toy"])
    assert runs == [["toy", "banana"]]


def test_report_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="There is no folder .*missing"):
        reproduce.main(["report", "--out", str(tmp_path / "missing")])


def test_report_draws_what_is_missing_and_keeps_the_name(
    finished: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "run.v1"))
    (out / "equivalence.png").unlink()
    reproduce.main(["report", "--out", str(out)])
    assert (out / "equivalence.png").read_bytes().startswith(PNG)
    page = (tmp_path / "run.v1.md").read_text(encoding="utf-8")
    assert "(run.v1/equivalence.png)" in page


@pytest.mark.parametrize("text", ['{"header": fal', '{"header": {}, "rows": []}'])
def test_a_file_of_another_kind_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "toy.json").write_text(text)
    for arguments in (["report"], ["toy", "--quick"]):
        with pytest.raises(SystemExit, match="toy.json is not"):
            reproduce.main([*arguments, "--out", str(tmp_path)])


def test_report_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reproduce.main(["toy", "report"])
    assert "report stands alone" in capsys.readouterr().err


def test_all_data_at_once_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Full size: tiny streams have sizes of their own.
    monkeypatch.setattr(contests, "trace", lambda _, stream: {"stream": stream})
    for data, num in (("audio", 9_000), ("terrain", 10_000)):
        row = contests.compare(data, "batch SGPR", 5, 0, quick=False)
        assert [len(y) for _, y in row["stream"].batches] == [num]


def test_streaming_equals_batch_inference(finished: Path) -> None:
    cells = cells_of(finished / "equivalence.json")
    for panel in (panel for row in cells.values() for panel in row["panels"]):
        assert panel["online_bound"] == pytest.approx(panel["batch_bound"], abs=1e-6)
        assert verdicts.curve_gap(panel, "mean") < 1e-6
        assert verdicts.curve_gap(panel, "std") < 1e-6
    assert verdicts.bounds_agree(cells)


def test_the_page_is_that_of_the_files() -> None:
    out = ROOT / "docs" / "reproduction"
    page = out.with_suffix(".md").read_text(encoding="utf-8")
    assert page == reproduction_page.page(out)
    for name in reproduction_page.load(out):
        assert (out / f"{name}.png").read_bytes().startswith(PNG), name


# ---------------------------------------------------- verdicts, on rows made by hand


def end(seconds: float, rmse: float, mll: float = 0.0, **others: object) -> Row:
    """A stream of two batches that ends like this."""
    last = {"seconds": seconds, "RMSE": rmse, "MLL": mll}
    first = {"seconds": seconds / 2, "RMSE": 2 * rmse, "MLL": mll - 1}
    row = {"trace": [first, last], **last, "failures": [], "converged": None}
    return {**row, **others}


def test_a_baseline_dominates_if_it_is_faster_and_better() -> None:
    contest = {
        "streaming": end(10, 0.5, 1.0),
        "windowed GP": end(9, 0.4, 0.5),  # faster, better in RMSE only
        "windowed SGPR": end(11, 0.1, 2.0),  # better, but slower
        "SVI 0.1": end(1, 0.9, -3.0),  # faster, but worse
        "SVI 0.01": end(1, math.nan, math.nan),
        "batch SGPR": end(1, 0.01, 3.0),  # the ceiling does not count
    }
    assert verdicts.dominators(contest, "RMSE") == ["windowed GP"]
    assert verdicts.dominators(contest, "MLL") == []
    every = {Setting("audio", 100, 300): contest}
    sentence = contest_page.frontier_sentence(every)
    assert sentence.endswith("windowed GP by RMSE in 1 of 1 settings.")
    del contest["windowed GP"]
    assert contest_page.frontier_sentence(every).startswith("No baseline is both")
    del contest["streaming"]
    assert contest_page.frontier_sentence(every) == "Our method was not run."


def test_the_papers_form_is_a_baseline_and_a_careful_last_batch_is_none() -> None:
    contest = {
        "streaming": end(10, 0.5),
        "the paper's form": end(9, 0.4),
        "streaming, last batch with care": end(8, 0.3),
        "windowed GP": end(7, 0.45),
        "SVI 0.1": end(6, 0.35),
    }
    ahead = verdicts.dominators(contest, "RMSE")
    assert ahead == ["the paper's form", "windowed GP", "SVI 0.1"]
    # Nor are ours rivals of the paper's form.
    assert verdicts.dominators(contest, "RMSE", verdicts.PAPER) == ["SVI 0.1"]
    assert [row["seconds"] for row in verdicts.frontier(contest, "RMSE")] == [6, 8]


def test_every_form_of_streaming_is_run_in_the_same_settings() -> None:
    for name in ("timeseries", "terrain"):
        keys = [cell.key for cell in EXPERIMENTS[name](Settings())]
        of = {
            form: [
                key.replace(f"; {form};", ";") for key in keys if f"; {form};" in key
            ]
            for form in (verdicts.OURS, verdicts.PAPER, verdicts.CARE)
        }
        assert of[verdicts.OURS] == of[verdicts.PAPER] == of[verdicts.CARE] != []


def form_contests() -> verdicts.Contests:
    """Two settings with all forms, one of an older run, one without batch SGPR."""
    memory = {"memory RMSE": 1.04, "memory MLL": 0.0}
    better = {"memory RMSE": 0.9, "memory MLL": 0.0}
    noise = {"hyperparameters": {"noise": 1e-4}}
    whole = {
        "streaming": end(1, 1.2, **memory, **noise),
        "the paper's form": end(1, 3.0, **noise),
        "streaming, last batch with care": end(1, 1.05, **better, **noise),
        "batch SGPR": end(1, 1.0),
    }
    old = {"streaming": end(1, 1.0, **noise), "batch SGPR": end(1, 1.0)}
    # A careful last batch that helps nothing.
    other = {**whole, "streaming, last batch with care": end(1, 1.1, **noise)}
    alone = {"streaming": end(1, 1.0, **memory, **noise)}
    kinds = {100: whole, 200: other, 300: old, 400: alone}
    return {Setting("audio", m, 1500): contest for m, contest in kinds.items()}


def test_forms_of_streaming_are_shown_as_far_as_they_were_run() -> None:
    lines = contest_page.form_table(form_contests()).splitlines()
    care = "streaming, last batch with care"
    forms = f"streaming | streaming, from memory | {care} | {care}, from memory"
    assert lines[0] == f"| data | M | batches of | {forms} | the paper's form |"
    assert lines[2:] == [
        "| audio | 100 | 1,500 | 1.200 | 1.040 | 1.050 | 0.900 | 3.000 |",
        "| audio | 200 | 1,500 | 1.200 | 1.040 | 1.100 | – | 3.000 |",
        "| audio | 300 | 1,500 | 1.000 | – | – | – | – |",
        "| audio | 400 | 1,500 | – | – | – | – | – |",
    ]


def test_forms_near_the_batch_model_are_counted_where_both_were_run() -> None:
    every = form_contests()
    assert contest_page.form_sentence(every) == (
        "At most 1.05 times the RMSE of batch SGPR: streaming in 1 of 3 settings; "
        "streaming, from memory in 2 of 2 settings; streaming, last batch with care in "
        "1 of 2 settings; streaming, last batch with care, from memory in 1 of 1 "
        "settings; the paper's form in 0 of 2 settings."
    )
    reason = contest_page.compare_reasons(every)[0]
    assert "falls short of batch SGPR, in RMSE or MLL, in 2 of 3 settings" in reason
    assert reason.endswith(
        "ours meets both limits with predictions from memory in 2 of 2 settings, with "
        "a careful last batch in 1 of 2 settings and with both in 1 of 1 settings."
    )
    alone = {Setting("audio", 400, 1500): {"streaming": end(1, 1.0)}}
    assert contest_page.form_sentence(alone) == ""


def test_both_forms_are_told_beside_the_batch_model() -> None:
    every = form_contests()
    assert contest_page.paper_sentence(every) == (
        "RMSE / batch is 1.2 for ours and 3 for the paper's form. Against the paper's "
        "form, ours has a lower RMSE in 2 of 2 settings, and a higher MLL in 0 of 2 "
        "settings."
    )
    first, *_, last = contest_page.verdict_table(every).splitlines()[2:]
    assert "| 1.200, missed by 0.150 | +0.000, met | 3.000 |" in first
    assert "| – | – | – |" in last


def test_a_batch_model_behind_ours_is_no_ceiling() -> None:
    noise = {"hyperparameters": {"noise": 1e-4}}
    batch = end(1, 1.0, 0.0)
    # The second is no better in MLL, as where errors are far below the noise.
    every = {
        Setting("audio", m, 300): {"streaming": ours, "batch SGPR": batch}
        for m, ours in {
            100: end(1, 0.9, 0.06, **noise),
            200: end(1, 0.5, 0.01, **noise),
        }.items()
    }
    (reason,) = [text for text in contest_page.compare_reasons(every) if "no c" in text]
    assert reason.startswith("Batch SGPR is no ceiling in 1 of 2 settings")
    assert "L-BFGS" not in reason
    # Where ours is better, a careful last batch leads to the batch model.
    for contest in every.values():
        contest["streaming, last batch with care"] = end(1, 1.001, 0.0, **noise)
    (reason,) = [text for text in contest_page.compare_reasons(every) if "no c" in text]
    assert reason.endswith("ours ends with the RMSE of batch SGPR in 1 of 1 settings.")


def test_equal_is_not_better() -> None:
    contest = {"streaming": end(10, 0.5, 1.0), "windowed GP": end(9, 0.5, 1.0)}
    assert not verdicts.dominators(contest, "RMSE")
    contest["windowed GP"] = end(10, 0.4, 2.0)
    assert not verdicts.dominators(contest, "RMSE")


def test_the_frontier_rises_with_time() -> None:
    contest = {
        "streaming": end(10, 0.5),
        "windowed GP": end(5, 0.6),
        "windowed SGPR": end(7, 0.8),
        "online conditioning": end(1, math.nan),
        "batch SGPR": end(2, 0.1),
    }
    ends = verdicts.frontier(contest, "RMSE")
    assert [row["seconds"] for row in ends] == [1, 5, 10]


def test_near_the_batch_model_is_judged_by_both_scores() -> None:
    batch = end(1, 1.0, 1.0)
    assert verdicts.gap(end(1, 1.05, 0.96), batch).near == (True, True)
    assert verdicts.gap(end(1, 1.06, 0.94), batch).near == (False, False)
    assert verdicts.gap(end(1, math.nan, math.nan), batch).near == (False, False)
    assert math.isnan(verdicts.gap(batch, None).ratio)
    assert verdicts.gap(batch, None).near == (False, False)


def test_methods_without_points_or_batches_join_every_setting() -> None:
    row = end(1, 1)
    cells = {
        "audio; windowed GP; all points; batches of 300": row,
        "audio; batch SGPR; M=100; at once": row,
        "audio; SVI 0.1; M=100; batches of 300": row,
        "audio; streaming; M=100; batches of 300": row,
        "audio; streaming; M=200; batches of 300": row,
        "audio; streaming; M=100; batches of 500": row,
        "pseudo-periodic; streaming; M=100; batches of 500": row,
    }
    every = verdicts.contests(cells)
    assert {tuple(setting): list(contest) for setting, contest in every.items()} == {
        ("audio", 100, 300): ["streaming", "windowed GP", "SVI 0.1", "batch SGPR"],
        ("audio", 100, 500): ["streaming", "batch SGPR"],
        ("audio", 200, 300): ["streaming", "windowed GP"],
        ("pseudo-periodic", 100, 500): ["streaming"],
    }


def test_keys_of_experiments_are_understood() -> None:
    for name in ("timeseries", "terrain"):
        cells = {cell.key: end(1, 1) for cell in EXPERIMENTS[name](Settings())}
        every = verdicts.contests(cells)
        assert len(every) == (8 if name == "timeseries" else 4)
        assert all(len(contest) >= 5 for contest in every.values())
        found = {id(row) for contest in every.values() for row in contest.values()}
        assert len(found) == len(cells)


def test_the_best_rate_is_that_of_the_lowest_error() -> None:
    contest = {
        "SVI 0.001": end(1, 0.5, -9.0),
        "SVI 0.01": end(1, 0.6, 9.0),
        "SVI 0.1": end(1, math.nan, math.nan),
    }
    assert list(verdicts.shown(contest)) == ["SVI 0.001"]


def test_windowed_models_are_beaten_only_if_both_are() -> None:
    contest = {
        "streaming": end(10, 0.5, 1.0),
        "windowed GP": end(10, 0.6, 1.1),
        "windowed SGPR": end(10, 0.7, 0.9),
    }
    every = {Setting("terrain", 400, 750): contest}
    assert verdicts.beats_windows(every, "RMSE") == [True]
    assert verdicts.beats_windows(every, "MLL") == [False]
    del contest["windowed SGPR"]
    assert verdicts.beats_windows(every, "RMSE") == []


@pytest.mark.parametrize(
    ("rmse", "mll", "verdict"),
    [(0.5, 0.8, "As"), (0.5, 1.2, "Not as"), (0.65, 0.8, "Not as")],
)
def test_the_claim_on_the_terrain_is_judged_in_the_papers_form(
    rmse: float, mll: float, verdict: str
) -> None:
    methods = {
        "the paper's form": end(10, rmse, mll),
        "windowed GP": end(10, 0.6, 1.1),
        "windowed SGPR": end(10, 0.7, 0.9),
    }
    cells = {
        f"terrain; {method}; M=400; batches of 750": row
        for method, row in methods.items()
    }
    text = contest_page.terrain_differences(cells)
    assert f"- {verdict} in the paper, the paper's form has a lower RMSE" in text


def test_a_difference_is_clear_beyond_students_interval() -> None:
    assert verdicts.estimate([1.0, 1.1, 0.9]).clear
    assert not verdicts.estimate([1.0, -1.0, 0.9]).clear
    # Of four values 3.18 standard errors, not two; of many about two.
    for mean, clear in ((3.1, False), (3.3, True)):
        assert verdicts.Estimate(mean, 1.0, count=4).clear == clear
    assert verdicts.Estimate(2.3, 1.0, count=100).clear
    one = verdicts.estimate([-1.0])
    assert not one.clear and str(one) == "−1.000"
    assert str(verdicts.estimate([1.0, 3.0])) == "2.000 ± 1.000"


def alpha_cells(*means: float) -> verdicts.Cells:
    """Two splits of each of alpha 0, 0.1, 0.5 and 1, with the MLL of ``means``."""
    return {
        f"{alpha:g}; split {split}": end(
            1, 1, mean + 0.01 * split, alpha=alpha, z=[0, 1, 2 + split, 4 + alpha]
        )
        for alpha, mean in zip((0.0, 0.1, 0.5, 1.0), means, strict=True)
        for split in range(2)
    }


@pytest.mark.parametrize(
    ("means", "order", "verdict"),
    [
        ((3, 3, 2, 1), "falls with α; it is highest at α = 0", "As in the paper"),
        ((2, 2, 3, 1), "is not monotone in α; it is highest at α = 0.5", "As in the"),
        ((1, 1, 2, 3), "it is highest at α = 1", "Not as in the paper"),
        ((1, 1, 2, 1), "is not monotone in α", "neither reproduced nor refuted"),
        # VFE alone decides nothing: it is judged on its own.
        ((1, 3, 2, 2), "it is highest at α = 0.1", "As in the paper, small α is"),
    ],
)
def test_the_order_of_alpha_is_judged(
    means: tuple[float, ...], order: str, verdict: str
) -> None:
    cells = alpha_cells(*means)
    assert order in experiment_page.alpha_measured(cells)
    assert verdict in experiment_page.alpha_differences(cells)


def test_vfe_has_a_sentence_of_its_own() -> None:
    text = experiment_page.alpha_differences(alpha_cells(1, 3, 2, 2))
    assert "α = 0.1, the best of those up to 0.1, is 1.000 ± 0.000 above α = 1" in text
    assert "α = 0, is number 4 of 4 over the stream, and 1.000 ± 0.000 below" in text


def test_clumps_are_gaps_far_below_the_mean() -> None:
    spread = [0.1 * k for k in range(11)]
    assert verdicts.clumped({"z": spread}) == 0
    pairs = [z + tiny for z in spread for tiny in (0, 1e-4)]
    assert verdicts.clumped({"z": pairs}) == pytest.approx(11 / 21)


def test_memory_is_flat_or_not() -> None:
    peaks = [1, 9, 10, 50, 10, 11, 11, 11]
    assert verdicts.flatness({"peaks_MiB": peaks}) == pytest.approx(1.1)
    assert math.isnan(verdicts.flatness({"peaks_MiB": [1, 9, 9]}))


# ------------------------------------------- any subset of cells can be drawn and told


def curve(*names: str) -> Row:
    return {name: [0.0, 1.0, 0.5] for name in names}


def made(key: str, name: str) -> Row:
    """A row as the experiment returns it, with made-up numbers that differ by key."""
    x = 1 + sum(map(ord, key)) % 17 / 17
    if name == "toy":
        panel = {"x": [0.0, 1.0], "y": [0.0, x], "z": [0.5], **curve("mean", "std")}
        row = end(1, x, batch=end(1, 1))
        return {**row, "grid": [0, 1, 2], "panels": [panel, panel]}
    if name == "alpha":
        alpha = float(key.split(";")[0].split(",")[0])
        return end(x, x, -x, alpha=alpha, z=[0.0, x, 3.0, 3.1])
    if name == "hyperparameters":
        true, m, _ = key.split("; ")
        m = None if m == "full GP" else int(m.removeprefix("M="))
        return {"lengthscale": float(true.split()[1]), "M": m, "learned": [x, x / 2]}
    if name == "memory":
        return end(x, x, -x, peak_MiB=10 * x, peaks_MiB=[1.0, 9.0, 10 * x])
    if name == "banana":
        panel = {
            "x": [[0.0, 1.0]],
            "y": [1.0],
            "z": [[0.0, 0.0]],
            "mean": [[-1, x]] * 2,
        }
        panels = [panel, panel] if "random" not in key or key.endswith("0") else []
        return {"errors": [x / 5, x / 10], "span": [-3, 3], "panels": panels}
    if name == "equivalence":
        curves = curve("online_mean", "online_std", "batch_mean", "batch_std")
        panel = {"x": [0.0], "y": [x], "z": [0.5], **curves}
        panel |= {"online_bound": x, "batch_bound": x}
        return {"grid": [0, 1, 2], "panels": [panel]}
    converged = False if "batch" in key else None
    row = end(x, x, -x, converged=converged, hyperparameters={"noise": 0.01})
    return {**row, "memory RMSE": x, "memory MLL": -x} if "; streaming;" in key else row


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_any_part_of_an_experiment_can_be_drawn_and_told(
    name: str, tmp_path: Path
) -> None:
    out = tmp_path / "part"
    out.mkdir()
    keys = [cell.key for cell in EXPERIMENTS[name](Settings())]
    cells = {key: made(key, name) for key in keys}
    parts = [{key: cells[key]} for key in keys] + [
        {key: row for key, row in cells.items() if key != left_out} for left_out in keys
    ]
    for part in [*parts, {}]:
        rows = [{"cell": key, **row} for key, row in part.items()]
        header = {"torch_ssgp": "1", **conditions(name, Settings())}
        results.write(out / f"{name}.json", header, rows)
        page = reproduction_page.page(out)
        assert reproduction_page.SECTIONS[name].title in page
        assert f"Not run, {len(keys) - len(part)} cells" in page
        assert "**Not run**: " in page  # the other experiments
    # Drawing takes longer: a few parts only.
    for k, part in enumerate([{}, parts[0], parts[-1], cells]):
        path = out / f"{k}.png"
        figures.draw(name, part, path)
        assert path.exists() or len(part) < 2
    assert path.read_bytes().startswith(PNG)


def test_svi_is_said_to_be_left_out_only_where_it_is() -> None:
    cells = {
        f"terrain; streaming; M={m}; batches of 750": end(1, 1) for m in (400, 600)
    }
    text = contest_page.terrain_differences(cells)
    assert "SVI was not run with M=600, to save time." in text


def test_a_folder_without_results_gives_a_page(tmp_path: Path) -> None:
    page = " ".join(reproduction_page.page(tmp_path).split())
    assert f"**Not run**: {reproduction_page.listed(list(EXPERIMENTS))}." in page


def test_budgets_on_the_page_are_those_of_the_runs(tmp_path: Path) -> None:
    page = reproduction_page.page(tmp_path)
    assert "| at most | timeseries | terrain | memory |" in page
    for field, title in reproduction_page.BUDGET_LINES.items():
        values = [getattr(budget, field) for budget in contests.BUDGETS.values()]
        cells = " | ".join(f"{value:,}" if value else "–" for value in values)
        assert f"| {title} | {cells} |" in page
    assert set(reproduction_page.BUDGET_LINES) == set(contests.Budget._fields)

    first = Results("terrain", tmp_path)
    first.go_on(Settings(quick=True))
    first.add("a cell", {})
    assert "| L-BFGS steps after them: batch SGPR | 300 | 10 | – |" in (
        reproduction_page.page(tmp_path)
    )


# ------------------------------------------------------------- facts about experiments


def test_a_shuffled_stream_has_the_same_rows() -> None:
    stream = experiments.toy_series(quick=True)
    other = experiments.shuffled(stream)
    assert [len(y) for _, y in other.batches] == [len(y) for _, y in stream.batches]
    order = other.x_train.flatten().argsort()
    assert not torch.equal(other.x_train, stream.x_train)
    before = stream.x_train.flatten().argsort()
    assert torch.equal(other.x_train[order], stream.x_train[before])
    assert torch.equal(other.y_train[order], stream.y_train[before])
    assert torch.equal(other.x_test, stream.x_test)


@pytest.mark.parametrize(("num_dims", "num"), [(1, 100), (2, 30), (2, 36), (3, 20)])
def test_spread_points_cover_the_range(num_dims: int, num: int) -> None:
    x = torch.rand(200, num_dims, dtype=torch.float64) * 5 - 2
    stream = streams.Stream("test", [(x, x[:, 0])], x, x[:, 0], "")
    z = contests.spread_points(stream, num)
    low, high = x.amin(0), x.amax(0)
    assert z.shape == (num, num_dims) and len(z.unique(dim=0)) == num
    assert (z > low).all() and (z < high).all()
    step = (high - low) / math.ceil(num ** (1 / num_dims))
    assert (z.amin(0) < low + step).all() and (z.amax(0) > high - step).all()


@pytest.mark.parametrize("lengthscale", experiments.LENGTHSCALES)
def test_a_drawn_series_has_its_lengthscale_and_noise(lengthscale: float) -> None:
    lag, squares, neighbours = 0.25, [], []
    for seed in range(20):
        x, y = experiments.gp_series(lengthscale, seed, 400)
        assert x.min() >= 0 and x.max() <= 10 and (x.diff(dim=0) >= 0).all()
        apart = (x - x.mT - lag).abs() < 0.01
        squares.append((y.unsqueeze(-1) - y)[apart].square().mean())
        close = x.flatten().diff() < 0.01
        neighbours.append(y.diff()[close].square().mean())
    noise = torch.stack(neighbours).mean().div(2).sqrt().item()
    assert noise == pytest.approx(experiments.NOISE, rel=0.1)
    # E (y - y')^2 = 2 (1 - exp(-lag^2 / 2 l^2)) + 2 noise^2
    smooth = 1 - torch.stack(squares).mean() / 2 + experiments.NOISE**2
    assert lag / math.sqrt(-2 * math.log(smooth)) == pytest.approx(lengthscale, rel=0.1)


def test_splits_are_disjoint_halves_of_the_series() -> None:
    first, second = (streams.pseudo_periodic(split=split) for split in (0, 1))
    for stream in (first, second):
        train, test = stream.x_train.flatten(), stream.x_test.flatten()
        assert len(train) == len(test) == 12_000
        assert len(torch.cat([train, test]).unique()) == 24_000
        assert (train.diff() > 0).all()
    assert not torch.equal(first.x_train, second.x_train)

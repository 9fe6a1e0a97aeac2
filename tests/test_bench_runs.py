"""Every benchmark runs on its smallest size, keeps its rows, and does not run twice."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("river")
pytest.importorskip("botorch")

from workbench import (
    bayesopt,
    benchmark,
    example_pages,
    experiments,
    frontier,
    merging,
    messages,
    runner,
    timing,
)
from workbench.common import DOCS, ROOT
from workbench.results import Row, read
from workbench.streams import Stream


def rows_of(tmp_path: Path, *arguments: str) -> list[Row]:
    """What a quick run of a benchmark leaves."""
    out = tmp_path / "data" / "rows.json"
    benchmark.main([*arguments, "--quick", "--out", str(out)])
    rows = read(out).rows
    assert not [row for row in rows if "failure" in row]
    return rows


def test_methods_are_run_over_streams_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = [runner.OURS, runner.MINIBATCHES]
    asked = ["run", "--streams", "growing range", "--methods", *methods]
    rows = rows_of(tmp_path, *asked, "--sizes", "5", "10")
    assert len(rows) == 4 and {row["method"] for row in rows} == {*methods}
    assert all(row["cpu_seconds"] > 0 and row["bytes"] > 0 for row in rows)
    monkeypatch.setattr(runner, "run", lambda *key: pytest.fail(f"{key} again"))
    assert len(rows_of(tmp_path, *asked, "--sizes", "5", "10")) == 4


def test_the_frontier_has_every_method_and_a_picture(tmp_path: Path) -> None:
    asked = ["frontier", "--streams", "revisiting", "--seeds", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontier, "STREAMS", ("revisiting",))
        rows = rows_of(tmp_path, *asked)
    assert {row["method"] for row in rows} == {*frontier.LINES}
    (line,) = frontier.table(rows)
    assert line["stream"] == "revisiting" and {*frontier.LINES} < {*line}
    made = {path.name for path in (tmp_path / "figures").iterdir()}
    assert made == {"frontier.png", "sizes.png"}


def test_work_is_timed_in_ratios(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "timing", "--repeats", "1")
    by_case = {case: [r for r in rows if r["case"] == case] for case in timing.CASES}
    assert all(by_case.values())
    assert min(row["ms"] for row in by_case["steps"]) > 0
    assert {row["work"] for row in by_case["points"]} > {"update", "local experts"}
    again = rows_of(tmp_path, "timing", "export", "--repeats", "1")
    assert len(again) == len(rows)  # rows of a case are replaced


def test_our_estimators_and_those_of_river_predict_then_learn(tmp_path: Path) -> None:
    asked = ["--streams", "ChickWeights", "Phishing"]
    rows = rows_of(tmp_path, "prequential", *asked)
    assert {row["stream"] for row in rows} == {"ChickWeights", "Phishing"}
    assert all(row["data"] == 30 and row["cpu_seconds"] > 0 for row in rows)


def test_the_picture_of_the_readme_is_drawn(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "picture")
    assert {len(row["mean"]) for row in rows} == {40}
    assert (tmp_path / "figures" / "picture.png").stat().st_size > 1000


def test_a_surrogate_optimises_beside_botorchs(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "bayesopt", "--problems", "Branin", "--seeds", "1")
    methods = {row["method"] for row in rows if row["table"] == "regret"}
    assert methods == {bayesopt.STREAMING, bayesopt.EXACT, bayesopt.RANDOM}
    assert (tmp_path / "figures" / "crossover.png").exists()


def test_three_sites_are_merged(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "merge")
    assert len(rows) == 5 and all(0 < row["data"] <= 180 for row in rows)


@pytest.mark.parametrize("how", ["all", *merging.PARTS])
def test_every_datum_is_at_one_site(how: str) -> None:
    x = torch.arange(70.0).unsqueeze(-1)
    batches = [(part, part.squeeze(-1)) for part in x.split(10)]
    parts = merging.parts_of(Stream("s", batches, x, x.squeeze(-1)), how)
    seen = torch.cat([y for part in parts for _, y in part])
    assert sorted(seen.tolist()) == list(range(70))


def test_one_process_is_timed_and_ranks_are_started() -> None:
    row = messages.measure(messages.Case(5, 60), 0, 1)
    assert row["ms"] > 0 and (row["M"], row["N"], row["ranks"]) == (5, 60, 1)
    (two,) = messages.run([messages.Case(5, 60)], 2)
    assert two["messages / step"] > 0 and two["bytes / step"] > 8 * 5 * 3


def test_the_experiments_of_the_paper_run_and_are_drawn(tmp_path: Path) -> None:
    from workbench import reproduce

    asked = ["all", "--quick", "--seeds", "1", "--out", str(tmp_path)]
    reproduce.main(asked)
    for name in experiments.EXPERIMENTS:
        rows = read(tmp_path / f"{name}.json").rows
        assert rows and not [row for row in rows if "failure" in row]
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    for row in read(tmp_path / "equivalence.json").rows:
        for panel in row["panels"]:
            bounds = panel["online_bound"], panel["batch_bound"]
            assert bounds[0] == pytest.approx(bounds[1], abs=1e-4)
            apart = torch.tensor(panel["online_mean"]) - torch.tensor(
                panel["batch_mean"]
            )
            assert apart.abs().max() < 1e-5


def test_without_a_gpu_the_check_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    timing.gpu_check()
    assert "There is no GPU" in capsys.readouterr().out


def test_a_command_names_the_extra_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "river", None)
    monkeypatch.delitem(sys.modules, "workbench.prequential", raising=False)
    with pytest.raises(SystemExit, match="river.*pip install"):
        benchmark.main(["prequential", "--help"])


def test_recipes_do_their_work_without_a_framework(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "recipes"))
    sites = importlib.import_module("sites")
    base = pickle.dumps(sites.new_model())
    for hour in range(2):
        states = [sites.work(base, [sites.shard(k, hour, 30)]) for k in range(2)]
        base = sites.joined(states, base)
    assert "120 data" in sites.report(1, base)


def test_the_scripts_start_from_any_folder(tmp_path: Path) -> None:
    for name in ("benchmark", "reproduce", "soak", "gpu_check"):
        done = subprocess.run(
            [sys.executable, str(ROOT / f"scripts/{name}.py"), "--help"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ pages of examples


def test_the_page_of_an_example_has_its_words_its_output_and_its_figure(
    tmp_path: Path,
) -> None:
    ran = example_pages.Ran("a line", [b"figure"], "1.0")
    text = example_pages.page("drift", ran)
    title, about = example_pages.title_and_text("drift")
    assert text.startswith(f"# {title}\n\n{about}\n\n![{title}](drift.png)\n")
    assert "```text\na line\n```" in text and "``python" not in about
    (tmp_path / "drift.md").write_text(text, encoding="utf-8")
    (tmp_path / "drift.png").write_bytes(b"figure")
    assert example_pages.ran_before("drift", tmp_path) == ran


@pytest.mark.parametrize("name", example_pages.names())
def test_pages_of_examples_say_what_the_examples_say(name: str) -> None:
    folder = DOCS / "examples"
    page = example_pages.page(name, example_pages.ran_before(name, folder))
    assert (folder / f"{name}.md").read_text(encoding="utf-8") == page
    index = (folder / "index.md").read_text(encoding="utf-8")
    assert index == example_pages.index() and f"({name}.md)" in index

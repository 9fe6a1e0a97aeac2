"""Every benchmark runs on its smallest size, keeps its rows, and does not run twice."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("river")
pytest.importorskip("botorch")

from conftest import FULL
from workbench import (
    benchmark,
    example_pages,
    experiments,
    frontier,
    how,
    latency,
    messages,
    reproduce,
    timing,
)
from workbench.baselines import Sites
from workbench.common import DOCS, ROOT
from workbench.results import Row, read
from workbench.runner import MINIBATCHES, OURS

# Arguments of each benchmark, how many rows it makes, and its pictures.
RUNS: dict[str, tuple[list[str], int, set[str]]] = {
    "run": (
        "--streams;growing range;--sizes;5;10;--methods".split(";")
        + [OURS, MINIBATCHES],
        4,
        set(),
    ),
    "frontier": (
        ["--streams", "revisiting", "--seeds", "1"],
        len(frontier.LINES),
        {"frontier.png", "sizes.png"},
    ),
    "latency": (["--data", "arm", "--sizes", "9"], len(latency.LEARNERS), set()),
    "timing": (["--repeats", "1"], 22, set()),
    "prequential": (["--streams", "ChickWeights", "Phishing"], 15, set()),
    "picture": ([], 10, {"picture.png"}),
    "bayesopt": (["--problems", "Branin", "--seeds", "1"], 7, {"crossover.png"}),
    "merge": ([], 5, set()),
    "alarms": ([], 6, set()),
}


def rows_of(tmp_path: Path, name: str) -> list[Row]:
    """What a quick run of a benchmark leaves."""
    out = tmp_path / "data" / "rows.json"
    benchmark.main([name, *RUNS[name][0], "--quick", "--out", str(out)])
    return read(out).rows


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_runs_once_and_draws(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontier, "STREAMS", ("revisiting",))
    rows = rows_of(tmp_path, name)
    assert len(rows) == RUNS[name][1]
    for row in rows:
        assert "failure" not in row
        assert all(value > 0 for key, value in row.items() if "seconds" in key)
    figures = {path.name for path in tmp_path.glob("figures/*")}
    assert figures == RUNS[name][2]
    assert all(path.stat().st_size > 1000 for path in tmp_path.glob("figures/*"))
    if name in ("frontier", "latency", "merge"):  # others, too, but slowly
        assert rows_of(tmp_path, name) == rows
    if name == "frontier":
        (line,) = frontier.table(read(tmp_path / "data" / "rows.json"))
        assert line["stream"] == "revisiting" and {*frontier.LINES} < {*line}


def test_all_benchmarks_and_all_commands_of_the_docs_exist() -> None:
    elsewhere = {"bars", "distributed", "tables"}  # tested below, or in their own file
    assert {*RUNS} | elsewhere == {*benchmark.COMMANDS}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert {*re.findall(r"scripts/benchmark\.py (\w+)", text)} <= {*benchmark.COMMANDS}
    for path in re.findall(r"scripts/\w[\w/.]*\b", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m workbench\.(\w+)", text):
        assert (ROOT / f"scripts/workbench/{module}.py").exists(), module


@pytest.mark.parametrize("turns", [True, False])
def test_every_datum_is_at_one_site(turns: bool) -> None:
    sites = Sites(1, 20, 1, 7, turns=turns, learned=False)
    for x in torch.arange(70.0).double().unsqueeze(-1).split(10):
        sites.update(x, x.squeeze(-1).sin())
    counts = [int(site.model.num_data) for site in sites.sites]
    assert counts == ([28, 21, 21] if turns else [30, 20, 20])
    assert sites.model.num_data == 70


def test_one_process_is_timed_and_ranks_are_started() -> None:
    row = messages.measure(messages.Case(5, 60), 0, 1)
    assert row["ms"] > 0 and (row["M"], row["N"], row["ranks"]) == (5, 60, 1)
    (two,) = messages.run([messages.Case(5, 60)], 2)
    assert two["messages / step"] > 0 and two["bytes / step"] > 8 * 5 * 3


def test_the_experiments_of_the_paper_run_and_are_drawn(tmp_path: Path) -> None:
    reproduce.main(["all", "--quick", "--seeds", "1", "--out", str(tmp_path)])
    for name in experiments.EXPERIMENTS:
        rows = read(tmp_path / f"{name}.json").rows
        assert rows and not [row for row in rows if "failure" in row]
        assert (tmp_path / f"{name}.png").stat().st_size > 1000


def test_pictures_of_how_it_works_are_drawn_from_models(tmp_path: Path) -> None:
    how.main(["rows", "bordering", "compression", "--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir() if path.stat().st_size > 1000} == {
        f"how-{name}.png" for name in ("rows", "bordering", "compression")
    }
    page = (DOCS / "how.md").read_text(encoding="utf-8")
    assert all(f"(figures/how-{name}.png)" in page for name in how.PICTURES)


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


@pytest.mark.parametrize(
    "name", ["benchmark", "reproduce", "soak", "gpu_check"] if FULL else ["benchmark"]
)
def test_the_scripts_start_from_any_folder(name: str, tmp_path: Path) -> None:
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


def test_the_index_lists_every_example() -> None:
    index = (DOCS / "examples" / "index.md").read_text(encoding="utf-8")
    assert index == example_pages.index()
    assert all(f"({name}.md)" in index for name in example_pages.names())

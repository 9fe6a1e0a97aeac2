"""Examples run, learn, draw, explain themselves and name what is missing."""

from __future__ import annotations

import importlib
import re
import runpy
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))
each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def run(
    path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str
) -> None:
    """What ``python path arguments`` does in a folder, in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path[1:]])
    runpy.run_path(str(path), run_name="__main__")


@each_example
def test_help_says_what_an_example_shows_and_runs_nothing(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(path, monkeypatch, tmp_path, "--help")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"python examples/{path.name}" in text
    assert list(tmp_path.iterdir()) == []


@each_example
def test_an_example_imports_installed_packages_only(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    roots = re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE)
    assert not {*roots} & {"scripts", "workbench", "tests", "examples"}


EXTRAS = {"matplotlib": "plot", "tqdm": "plot", "botorch": "botorch"}
EXTRAS |= {"river": "river", "sklearn": "sklearn"}
NEEDED = [
    pytest.param(path, package, id=f"{path.stem}-{package}")
    for path in EXAMPLES
    for package in EXTRAS
    if re.search(rf"^ +from {package}\b", path.read_text("utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize(("path", "package"), NEEDED)
def test_a_missing_extra_is_named(
    path: Path, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    wanted = rf"{package}.*pip install -e '\.\[.*{EXTRAS[package]}.*\]'"
    with pytest.raises(SystemExit, match=wanted):
        run(path, monkeypatch, tmp_path, "--help")


def regression(rows: list[dict]) -> None:
    # The noise is 0.15: no model can do better on noisy targets.
    assert all(0.13 < row["RMSE"] < 0.2 for row in rows) and rows[-1]["MLL"] > 0.3


def crescents(rows: list[dict]) -> None:
    assert rows[-1]["error"] < 0.115 and rows[-1]["data"] == 400


def counts(rows: list[dict]) -> None:
    assert rows[-1]["error"] < 0.25


def training_loop(rows: list[dict]) -> None:
    assert [row["num_inducing"] for row in rows] == [8, 13, 18]
    assert rows[0]["old_data"] == 0 != rows[1]["old_data"]
    # Nothing of the first batch is forgotten, and outliers (2.0) do no harm.
    assert rows[-1]["rmse"] < 0.25
    assert rows[-1]["rmse_first"] < rows[0]["rmse_first"] + 0.05


def sites(hours: list[Any]) -> None:
    """Joined, they know what all of them saw."""
    error_of = importlib.import_module("examples.merge").error_of
    assert [int(hour.joined.memory.num_data) for hour in hours] == [90, 180]
    alone = min(error_of(model) for model in hours[0].sites.values())
    # Measured: 0.85 and 0.1.
    assert 2 * error_of(hours[0].joined) < alone
    assert error_of(hours[1].joined) < 0.2


# Options of a short run, what it learned, and a word of what it prints.
LEARNED: dict[str, tuple[dict[str, int], Callable[[Any], None], str]] = {
    "regression": ({"num_steps": 40}, regression, "RMSE"),
    "classification": ({"num_batches": 4, "num_steps": 50}, crescents, "error"),
    "counts": ({"num_batches": 3, "num_steps": 40}, counts, "bound"),
    "training_loop": (
        {"num_batches": 3, "batch_size": 40, "num_steps": 80},
        training_loop,
        "RMSE",
    ),
    "merge": (
        {"num_hours": 2, "num_batches": 2, "batch_size": 15, "num_steps": 15},
        sites,
        "joined",
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_an_example_learns_prints_and_draws(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, learned, printed = LEARNED[name]
    learned(importlib.import_module(f"examples.{name}").main(**options, out=tmp_path))
    assert printed in capsys.readouterr().out
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_the_distributed_example_runs_in_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**group, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    example = importlib.import_module("examples.distributed")
    error = example.main(num_batches=2, batch_size=300, num_steps=3)
    assert error == pytest.approx(0, abs=0.3)
    assert "same model: True" in capsys.readouterr().out

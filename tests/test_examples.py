"""Examples run from any folder, explain themselves and name what is missing."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

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
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {
        alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    roots = {str(name).partition(".")[0] for name in modules}
    assert not roots & {"scripts", "workbench", "tests", "examples"}


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

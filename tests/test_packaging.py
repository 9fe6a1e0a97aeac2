"""The package as users meet it: its metadata, its files and the commands."""

import ast
import configparser
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torch_ssgp"

# `functional.py`, or a path that starts at one of our folders.
MODULE = re.compile(r"(?<![\w/.-])\w+\.py\b")
PATH = re.compile(
    r"(?<![\w/.-])(?:torch_ssgp|tests|examples|scripts|docs)/[\w./-]*[\w/]"
)


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def tour() -> str:
    """The docstring of the package, read without importing it."""
    source = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def run_python(code: str, cwd: Path) -> str:
    # -P keeps cwd off the path: what is imported is what is installed.
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """A wheel built from a copy, so that nothing is left in the work tree."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("torch_ssgp", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    code = "from setuptools import build_meta; build_meta.build_wheel('out')"
    run_python(code, cwd=copy)
    (path,) = (copy / "out").glob("*.whl")
    return zipfile.Path(path)


def test_installed_version_is_that_of_setup_cfg() -> None:
    expected = setup_cfg()["metadata"]["version"]
    assert importlib.metadata.version("torch_ssgp") == expected


def test_wheel_ships_every_module_and_py_typed_and_no_tests(
    wheel: zipfile.Path,
) -> None:
    shipped = {
        name
        for name in wheel.root.namelist()
        if not name.endswith("/") and ".dist-info/" not in name
    }
    modules = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    assert shipped == modules | {"torch_ssgp/py.typed"}


def test_required_packages_are_torch_gpytorch_and_linear_operator(
    wheel: zipfile.Path,
) -> None:
    (info,) = (p for p in wheel.iterdir() if p.name.endswith(".dist-info"))
    text = (info / "METADATA").read_text(encoding="utf-8")
    required = {
        match[1].replace("-", "_")
        for match in re.finditer(r"^Requires-Dist: ([\w-]+)(.*)$", text, re.MULTILINE)
        if "extra ==" not in match[2]
    }
    assert required == {"torch", "gpytorch", "linear_operator"}


def test_import_needs_no_extra(tmp_path: Path) -> None:
    # torch itself imports tqdm where it finds it, so only the difference counts.
    code = """
import sys
import gpytorch
before = set(sys.modules)
import torch_ssgp
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new & {"botorch", "matplotlib", "tqdm", "sklearn", "river"}))
"""
    assert run_python(code, cwd=tmp_path).split() == []


def test_constraints_pin_every_package_setup_cfg_names() -> None:
    config = setup_cfg()
    lists = [config["options"]["install_requires"]]
    lists += config["options.extras_require"].values()
    named = set(re.findall(r"^[\w-]+(?=[<>=~!])", "\n".join(lists), re.MULTILINE))
    constraints = (ROOT / "scripts/constraints.txt").read_text(encoding="utf-8")
    pinned = set(re.findall(r"^([\w-]+)==\S+$", constraints, re.MULTILINE))
    assert named - pinned == set()


SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_a_few_lines_and_its_help_runs_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 10
    if "__main__" in source:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path), "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        assert ended.value.code == 0 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["scripts/demo", "scripts/test"])
def test_readme_gives_the_command_and_it_is_executable(command: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^\s*{command}\b", readme, re.MULTILINE)
    assert os.access(ROOT / command, os.X_OK)


def test_ci_calls_scripts_test_and_nothing_else() -> None:
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.strip() and not line.startswith("#")]
    assert len(commands) == 1
    assert commands[0].endswith('/../scripts/test"')
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_every_path_in_the_tour_exists() -> None:
    text = tour()
    named = {PACKAGE / name for name in MODULE.findall(text)}
    named |= {ROOT / path for path in PATH.findall(text)}
    assert named, "The docstring of torch_ssgp/__init__.py names no file."
    assert sorted(str(path) for path in named if not path.exists()) == []


def test_tour_names_every_room() -> None:
    rooms = {
        path.stem
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" or path.is_dir()) and not path.name.startswith("_")
    }
    assert rooms - set(re.findall(r"\w+", tour())) == set()


def test_every_path_in_the_readme_exists() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path for path in PATH.findall(readme) if not (ROOT / path).exists()] == []

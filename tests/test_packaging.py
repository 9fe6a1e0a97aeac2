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
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from torch import nn

import torch_ssgp

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


def build(kind: str, source: Path, out: Path) -> Path:
    """A ``wheel`` or an ``sdist`` of a source tree, without asking an index."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    before = set(out.glob("*"))
    run_python(code, cwd=source)
    (path,) = set(out.glob("*")) - before
    return path


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel and sdist of a copy, so that nothing is left in the work tree."""
    copy, out = (tmp_path_factory.mktemp(name) for name in ("source", "dist"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("torch_ssgp", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    return {kind: build(kind, copy, out) for kind in ("sdist", "wheel")}


@pytest.fixture(scope="module")
def wheel(archives: dict[str, Path]) -> zipfile.Path:
    return zipfile.Path(archives["wheel"])


def new_environment(folder: Path) -> Path:
    """The interpreter of an environment that has nothing in it."""
    venv.create(folder, with_pip=False)
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(python: Path, *arguments: str, tools: Path | None = None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *arguments],
        env={**os.environ, "PYTHONPATH": str(tools)} if tools else None,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


STREAM = """
import importlib.metadata, torch, torch_ssgp
from gpytorch.kernels import RBFKernel
model = torch_ssgp.StreamingGP(RBFKernel(), num_inducing=5)
x = torch.linspace(0, 1, 10)
model.update(x, x.sin(), num_steps=2)
assert model(x).mean.shape == (10,)
print(torch_ssgp.__file__, importlib.metadata.version("torch_ssgp"))
"""


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel, without the list of their checksums."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
        return {name: archive.read(name) for name in names}


def test_the_wheel_of_the_sdist_is_the_wheel(
    archives: dict[str, Path], tmp_path: Path
) -> None:
    shutil.unpack_archive(archives["sdist"], tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    (tmp_path / "out").mkdir()
    again = build("wheel", source, tmp_path / "out")
    assert contents(again) == contents(archives["wheel"])


def copy_of_setuptools(folder: Path) -> Path:
    """A folder with nothing else in it, to build from source without an index."""
    distribution = importlib.metadata.distribution("setuptools")
    for name in {file.parts[0] for file in distribution.files or ()}:
        path = Path(str(distribution.locate_file(name)))
        if path.is_dir():
            shutil.copytree(path, folder / name)
    return folder


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_archive_works_in_an_empty_environment(
    kind: str, archives: dict[str, Path], tmp_path: Path
) -> None:
    python = new_environment(tmp_path / "env")
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    tools = copy_of_setuptools(tmp_path / "tools") if kind == "sdist" else None
    install(python, *offline, str(archives[kind]), tools=tools)
    # What it needs is borrowed. This does not bring the package itself: that one is
    # installed editable, by a .pth file that only its own environment reads.
    borrowed = importlib.metadata.distribution("torch").locate_file("")
    done = subprocess.run(
        [str(python), "-c", STREAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(borrowed), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    file, version = done.stdout.split()
    assert Path(file).is_relative_to(tmp_path / "env")
    assert version == setup_cfg()["metadata"]["version"]


@pytest.mark.skipif(
    os.environ.get("TORCH_SSGP_FULL") != "1", reason="downloads torch; full run only"
)
def test_the_sdist_installs_with_all_it_needs(
    archives: dict[str, Path], tmp_path: Path
) -> None:
    python = new_environment(tmp_path / "env")
    constraints = ROOT / "scripts/constraints.txt"
    install(python, "-c", str(constraints), "torch", "gpytorch", "linear_operator")
    install(python, "-c", str(constraints), str(archives["sdist"]))
    done = subprocess.run([str(python), "-P", "-c", STREAM], cwd=tmp_path)
    assert done.returncode == 0


def test_twine_finds_nothing_wrong_with_the_metadata(
    archives: dict[str, Path],
) -> None:
    files = [str(path) for path in archives.values()]
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_citation_has_the_version_and_licence_of_setup_cfg() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    metadata = setup_cfg()["metadata"]
    for name in ("version", "license"):
        assert re.search(rf"^{name}: {re.escape(metadata[name])}$", text, re.MULTILINE)


def test_citation_has_what_the_format_requires() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["title"] and citation["message"]
    entries = [citation, *citation["references"]]
    for author in (author for entry in entries for author in entry["authors"]):
        assert author.keys() in ({"name"}, {"family-names", "given-names"})
    for reference in citation["references"]:
        assert reference["type"] and reference["title"]


def test_the_last_release_of_the_changelog_is_the_version_of_setup_cfg() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    assert releases[0] == setup_cfg()["metadata"]["version"]


def test_load_has_a_security_note() -> None:
    page = (ROOT / "docs/guides/saving.md").read_text(encoding="utf-8")
    (note,) = re.findall(r"^## Security\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    for words in ("`load` runs no code", "weights_only=True", "untrusted", "Pickles"):
        assert words in note
    assert "No code in the file is run" in (torch_ssgp.StreamingGP.load.__doc__ or "")


def test_versions_in_the_readme_are_those_of_setup_cfg() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    needs = dict(
        re.findall(r"^(\w+)>=(\S+)$", setup_cfg()["options"]["install_requires"], re.M)
    )
    pythons = re.findall(r"Python :: (3\.\d+)", setup_cfg()["metadata"]["classifiers"])
    assert f"torch >= {needs['torch']}, gpytorch >= {needs['gpytorch']}" in readme
    assert f"Python {pythons[0]} to {pythons[-1]}" in readme


def test_installed_version_is_that_of_setup_cfg() -> None:
    expected = setup_cfg()["metadata"]["version"]
    assert importlib.metadata.version("torch_ssgp") == expected
    assert torch_ssgp.__version__ == expected


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


def test_constraints_keep_the_bounds_of_setup_cfg() -> None:
    config = setup_cfg()
    lists = [config["options"]["install_requires"]]
    lists += config["options.extras_require"].values()
    constraints = (ROOT / "scripts/constraints.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", constraints, re.MULTILINE))
    for line in filter(None, "\n".join(lists).splitlines()):
        needed = Requirement(line)
        if needed.name != "torch_ssgp":
            assert needed.specifier.contains(pins[needed.name]), line


PYTHONS = re.findall(r"Python :: (3\.\d+)", setup_cfg()["metadata"]["classifiers"])


def interpreter(version: str) -> str | None:
    """An interpreter of that version on this machine, be it pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [str(path) for path in pyenv.glob(f"versions/{version}.*/bin/python")]
    for candidate in filter(None, [shutil.which(f"python{version}"), *found]):
        # The shims of pyenv are there for versions that are not.
        asked = subprocess.run([candidate, "-V"], capture_output=True, text=True)
        if asked.stdout.startswith(f"Python {version}."):
            return candidate
    return None


@pytest.mark.parametrize("version", PYTHONS)
def test_every_file_compiles_without_a_warning(version: str) -> None:
    """Syntax only: what the package needs is installed for one Python."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"There is no Python {version} here.")
    code = """
import pathlib, sys
for path in pathlib.Path(sys.argv[1]).rglob("*.py"):
    compile(path.read_bytes(), path, "exec")
"""
    for folder in ("torch_ssgp", "examples", "scripts"):
        done = subprocess.run(
            [python, "-I", "-W", "error", "-c", code, str(ROOT / folder)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize("command", ["scripts/demo", "scripts/test", "scripts/docs"])
def test_readme_gives_the_command_and_it_is_executable(command: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^[\s`]*{command}\b", readme, re.MULTILINE)
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


@pytest.mark.parametrize("folder", ["update", "variational", "surrogates"])
def test_the_tour_of_a_folder_names_every_file(folder: str) -> None:
    text = (PACKAGE / folder / "__init__.py").read_text(encoding="utf-8")
    tour = ast.get_docstring(ast.parse(text)) or ""
    files = {path.name for path in (PACKAGE / folder).glob("[!_]*.py")}
    assert files == set(re.findall(r"^``(\w+\.py)``", tour, re.MULTILINE))


SOURCES = sorted(PACKAGE.rglob("*.py"))
each_source = pytest.mark.parametrize(
    "path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE))
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_members(path: Path) -> set[str]:
    """Private methods and attributes of the classes in a file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            names |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) == "self":
                names.add(node.attr)
    return {name for name in names if is_private(name)}


@each_source
def test_no_file_uses_what_is_private_in_another(path: Path) -> None:
    """Classes may use what they inherit; private names of other packages are theirs."""
    ours = set().union(*map(private_members, SOURCES)) - private_members(path)
    ours -= set(dir(nn.Module()))  # torch's, also where a class overrides it
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in ours:
            if ast.unparse(node.value) not in ("self", "cls", "super()"):
                found.append(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and "torch_ssgp" in str(node.module):
            found += [name.name for name in node.names if is_private(name.name)]
    assert found == []


@each_source
def test_functions_fit_on_a_screen(path: Path) -> None:
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    lines = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: n for name, n in lines.items() if n > 60} == {}


def test_every_path_in_the_readme_exists() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path for path in PATH.findall(readme) if not (ROOT / path).exists()] == []

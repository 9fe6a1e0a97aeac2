"""Examples as pages: what they say, what they print, what they draw, and their code.

    python -m workbench.example_pages            in scripts/; all of them, 15 minutes
    python -m workbench.example_pages drift      some of them

Pages go to docs/examples. Code is added to them when the site is built, see
scripts/site/pages.py; output and figure are of the version that the page names.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from workbench.common import DOCS, ROOT, new_parser
from workbench.pages import paragraphs

EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


class Ran(NamedTuple):
    """What an example printed, and its figures."""

    text: str
    figures: list[bytes]


def names() -> list[str]:
    """All examples."""
    return sorted(path.stem for path in EXAMPLES.glob("*.py"))


def run(name: str) -> Ran:
    """The example with its defaults, in an empty folder."""
    before = TORCHRUN if name == "distributed" else ()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *before, str(EXAMPLES / f"{name}.py")],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr}")
        figures = [path.read_bytes() for path in sorted(Path(folder).rglob("*.png"))]
    return Ran(done.stdout.strip("\n"), figures)


def title_and_text(name: str) -> tuple[str, str]:
    """The docstring: its first line without the full stop, and the rest as Markdown."""
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or name
    title, _, text = docstring.partition("\n")
    return title.rstrip("."), text.strip("\n").replace("``", "`")


def page(name: str, text: str, num_figures: int) -> str:
    """The page of an example."""
    title, about = title_and_text(name)
    pictures = [f"![{title}]({file})" for file in figure_names(name, num_figures)]
    return paragraphs(
        f"# {title}",
        about,
        *pictures,
        f"It prints (torch_ssgp {version('torch_ssgp')}; times are of a busy machine):",
        f"```text\n{text}\n```\n",
    )


def figure_names(name: str, count: int) -> list[str]:
    """Files of the figures of an example."""
    return [f"{name}{k or ''}.png" for k in range(count)]


def index() -> str:
    """The list of all examples."""
    lines = "\n".join(
        f"- [{title_and_text(name)[0]}]({name}.md): `examples/{name}.py`"
        for name in names()
    )
    return paragraphs(
        "# Examples",
        "Each is one file that runs from any folder, with what it printed and drew.",
        lines + "\n",
    )


def main(arguments: list[str] | None = None) -> None:
    """Run examples, and write their pages."""
    parser = new_parser(__doc__)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--out", type=Path, default=DOCS / "examples")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in tqdm(chosen.names or names()):
        ran = run(name)
        files = figure_names(name, len(ran.figures))
        for file, figure in zip(files, ran.figures, strict=True):
            (chosen.out / file).write_bytes(figure)
        text = page(name, ran.text, len(ran.figures))
        (chosen.out / f"{name}.md").write_text(text, encoding="utf-8")
    (chosen.out / "index.md").write_text(index(), encoding="utf-8")


if __name__ == "__main__":
    main()

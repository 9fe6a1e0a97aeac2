"""Examples as pages: what they say, what they print, what they draw, and their code.

    python -m workbench.example_pages            in scripts/; all of them, 15 minutes
    python -m workbench.example_pages drift      some of them
    python -m workbench.example_pages --page     new words around the old output

Pages go to docs/examples. scripts/site/pages.py adds the code when it builds the site.
Output and figures come from the version that the page names.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from workbench.common import DOCS, ROOT, new_parser

EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


class Ran(NamedTuple):
    """What an example printed, its figures, and the version that ran."""

    text: str
    figures: list[bytes]
    version: str


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
    return Ran(done.stdout.strip("\n"), figures, version("torch_ssgp"))


def ran_before(name: str, folder: Path) -> Ran:
    """What the page of an example shows."""
    text = (folder / f"{name}.md").read_text(encoding="utf-8")
    printed = re.search(r"^```text\n(.*)\n```$", text, re.MULTILINE | re.DOTALL)
    by = re.search(r"\(torch_ssgp ([^;,) ]+)", text)
    files = re.findall(r"^!\[.*\]\((.*)\)$", text, re.MULTILINE)
    figures = [(folder / file).read_bytes() for file in files]
    return Ran(printed[1] if printed else "", figures, by[1] if by else "")


def title_and_text(name: str) -> tuple[str, str]:
    """The docstring: its first line without the full stop, and the rest as Markdown."""
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or name
    title, _, text = docstring.partition("\n")
    return title.rstrip("."), text.strip("\n").replace("``", "`")


def page(name: str, ran: Ran) -> str:
    """The page of an example."""
    title, about = title_and_text(name)
    pictures = [f"![{title}]({file})" for file in figure_names(name, len(ran.figures))]
    output = [
        f"Output (torch_ssgp {ran.version}, timed on a busy machine):",
        f"```text\n{ran.text}\n```",
    ]
    parts = [f"# {title}", about, *pictures, *(output if ran.text else [])]
    return "\n\n".join(part for part in parts if part) + "\n"


def figure_names(name: str, count: int) -> list[str]:
    """Files of the figures of an example."""
    return [f"{name}{k or ''}.png" for k in range(count)]


def index() -> str:
    """The list of all examples."""
    lines = "\n".join(
        f"- [{title_and_text(name)[0]}]({name}.md): `examples/{name}.py`"
        for name in names()
    )
    about = (
        "Each example is one file and runs from any folder. Its page shows the output."
    )
    return f"# Examples\n\n{about}\n\n{lines}\n"


def main(arguments: list[str] | None = None) -> None:
    """Run examples, and write their pages."""
    parser = new_parser(__doc__)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=DOCS / "examples", help="folder")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in tqdm(chosen.names or names()):
        ran = ran_before(name, chosen.out) if chosen.page else run(name)
        files = figure_names(name, len(ran.figures))
        for file, figure in zip(files, ran.figures, strict=True):
            (chosen.out / file).write_bytes(figure)
        text = page(name, ran)
        (chosen.out / f"{name}.md").write_text(text, encoding="utf-8")
    (chosen.out / "index.md").write_text(index(), encoding="utf-8")


if __name__ == "__main__":
    main()

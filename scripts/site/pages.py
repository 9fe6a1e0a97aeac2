"""A hook of MkDocs: pages that are made of files which are not in ``docs``."""

from __future__ import annotations

import logging
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
BLOCK = re.compile(
    r"^(?P<indent> *)```(?:python|py)\b[^\n]*\n(?P<code>.*?)^(?P=indent)``` *$",
    re.MULTILINE | re.DOTALL,
)
CELL = re.compile(r"<td[^>]*>[^<]*</td>")
ERROR = re.compile(r"(?<=\d) (±|to) (?=[-+−]?\d)")
PICTURE = re.compile(r'<img [^>]*src="([^"]+)"[^>]*>')


def code_blocks(text: str) -> list[str]:
    """The blocks of a page, each padded so that its line numbers are the page's."""
    return [
        "\n" * text.count("\n", 0, match.start("code")) + textwrap.dedent(match["code"])
        for match in BLOCK.finditer(text)
    ]


def moved(text: str) -> str:
    """A page whose links lead to the same places from within ``docs``."""
    text = re.sub(r"\]\(docs/", "](", text)
    text = re.sub(r"\]\(examples/(\w+)\.py\)", r"](examples/\1.md)", text)
    for name, page in PAGES.items():
        text = text.replace(f"]({name})", f"]({page})")
    return text


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for name, page in PAGES.items():
        text = moved((ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Add the code of an example to its page."""
    path = Path(page.file.src_uri)
    if path.parent.name != "examples" or path.stem == "index":
        return markdown
    code = (ROOT / "examples" / f"{path.stem}.py").read_text(encoding="utf-8")
    return f"{markdown}\n## Code\n\n```python\n{code}```\n"


def on_page_content(html: str, **kwargs: Any) -> str:
    """Keep numbers and their errors on one line; a tap on a picture shows it large."""
    html = CELL.sub(lambda cell: ERROR.sub("\u00a0\\1\u00a0", cell[0]), html)
    return PICTURE.sub(r'<a href="\1">\g<0></a>', html)


def on_post_build(config: MkDocsConfig) -> None:
    """Say what was built."""
    docs = Path(config.docs_dir)
    sources = [ROOT / "README.md", *docs.rglob("*.md")]
    blocks = sum(len(code_blocks(path.read_text(encoding="utf-8"))) for path in sources)
    pages = len(list(Path(config.site_dir).rglob("index.html")))
    guides, examples = (
        len([page for page in (docs / name).glob("*.md") if page.stem != "index"])
        for name in ("guides", "examples")
    )
    logging.getLogger("mkdocs.site").info(
        f"{pages} pages: {guides} guides, {examples} executed examples; the tests run "
        f"{blocks} blocks of code"
    )

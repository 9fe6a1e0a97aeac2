"""Python blocks of README.md and docs/ run, page by page, and the site is built."""

import os
import re
import runpy
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path

import pytest

import torch_ssgp
from workbench import tables

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
GUIDES = sorted((DOCS / "guides").glob("*.md"))

# MkDocs loads its hook by path, and so do we: `site` is a module of Python.
code_blocks = runpy.run_path(str(ROOT / "scripts/site/pages.py"))["code_blocks"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A real module, because dataclasses and pickle look their module up by name.
    module = types.ModuleType("docs_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in code_blocks(page.read_text(encoding="utf-8")):
        exec(compile(code, str(page), "exec"), module.__dict__)


def test_blocks_are_found_where_they_stand() -> None:
    page = """Text.

```python
x = 1
```

```text
not code
```

- in a list:

  ```python
  if x:
      y = 2
  ```
"""
    first, second = code_blocks(page)
    assert first == "\n" * 3 + "x = 1\n"
    assert second == "\n" * 13 + "if x:\n    y = 2\n"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_begins_with_a_question_and_ends_with_limits(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.stem == "index":
        listed = set(re.findall(r"\]\((\w+\.md)\)", text))
        assert listed == {path.name for path in GUIDES} - {"index.md"}
    else:
        assert re.match(r"# [^\n]+\n\n\*[^*]+[.?]\*\n\n[A-Z`]", text)
        assert code_blocks(text) and "\n## Limits\n" in text


# ---------------------------------------------------------------------------- the site


class Page(HTMLParser):
    """The text of a page, its pictures, and what it would fetch from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.pictures, self.fetched = "", [], []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        address = names.get("src") or (names.get("href") if tag == "link" else None)
        if tag == "img":
            self.pictures.append(str(address))
        if address and "//" in address and names.get("rel") != "canonical":
            self.fetched.append(address)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The site, built as scripts/docs does; strict, so that a broken link fails.

    Also what the build says.
    """
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(out)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stderr


@pytest.fixture(scope="module")
def site(built: tuple[Path, str]) -> Path:
    """The folder of the site."""
    return built[0]


def read_page(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def test_every_page_is_on_the_site_and_fetches_nothing(site: Path) -> None:
    pages = {
        path.relative_to(DOCS).with_suffix("").as_posix().removesuffix("index")
        for path in DOCS.rglob("*.md")
    } | {"", "changelog", "contributing"}
    for name in pages:
        file = site / name / "index.html"
        assert file.is_file(), name
        page = read_page(file)
        assert page.fetched == [], name
        assert all((file.parent / picture).is_file() for picture in page.pictures), name


def test_the_build_says_how_much_there_is(built: tuple[Path, str]) -> None:
    blocks = sum(len(code_blocks(path.read_text(encoding="utf-8"))) for path in PAGES)
    guides, examples = len(GUIDES) - 1, len(list((ROOT / "examples").glob("*.py")))
    pages = len(PAGES) + 2  # the changelog, and how to contribute
    said = (
        f"{pages} pages: {guides} guides, {examples} executed examples; the tests run "
        f"{blocks} blocks of code"
    )
    assert said in built[1]


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    html = "".join(path.read_text("utf-8") for path in site.glob("api/*/index.html"))
    anchors = set(re.findall(r'id="(torch_ssgp[\w.]*)"', html))
    modules = {"exceptions", "settings"}
    names = {f"torch_ssgp.{name}" for name in set(torch_ssgp.__all__) - modules}
    assert names - anchors == set()


def test_pages_of_examples_show_their_code(site: Path) -> None:
    for path in (ROOT / "examples").glob("*.py"):
        page = read_page(site / "examples" / path.stem / "index.html")
        assert 'if __name__ == "__main__":' in page.text


def test_docstrings_are_shown_as_text_and_formulas(site: Path) -> None:
    markup = re.compile(r":(math|meth|class|func|mod):|\.\. math::|={5}")
    for path in site.glob("api/*/index.html"):
        assert markup.search(read_page(path).text) is None
    functional = (site / "api/functional/index.html").read_text("utf-8")
    assert functional.count('<math xmlns="http://www.w3.org/1998/Math/MathML"') > 20


# --------------------------------------------------------------------------- the README


def test_readme_is_short_and_shows_what_the_files_say() -> None:
    text = tables.README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    assert tables.filled(text) == text, "Run scripts/benchmark.py tables."


def test_no_text_says_that_the_memory_stores_no_data() -> None:
    """It keeps raw data while it has room, and inducing points are inputs."""
    sources = [*(ROOT / "torch_ssgp").rglob("*.py"), *PAGES]
    claim = re.compile(r"data\s+are\s+not\s+stored|forgets?\s+them|stores\s+no\s+data")
    found = [p.name for p in sources if claim.search(p.read_text(encoding="utf-8"))]
    assert found == []

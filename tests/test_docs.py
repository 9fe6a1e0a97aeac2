"""The python blocks in README.md and docs/ run, in order, file by file."""

import re
import sys
import textwrap
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.is_file()
]

BLOCK = re.compile(
    r"^(?P<indent> *)```(?:python|py)\b[^\n]*\n(?P<code>.*?)^(?P=indent)``` *$",
    re.MULTILINE | re.DOTALL,
)


def code_blocks(text: str) -> list[str]:
    """The blocks of a page, each padded so that its line numbers are the page's."""
    return [
        "\n" * text.count("\n", 0, match.start("code")) + textwrap.dedent(match["code"])
        for match in BLOCK.finditer(text)
    ]


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

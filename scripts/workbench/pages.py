"""Markdown: tables of rows, ranges, lists and prose."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

from workbench.results import LIBRARY, Contents, Row, versions


def markdown(rows: Sequence[Row], hide: Sequence[str] = ()) -> str:
    """Rows as Markdown tables, one for each set of columns, some of them hidden."""
    lines: list[str] = []
    header: list[str] = []
    for full in rows:
        row = {name: value for name, value in full.items() if name not in hide}
        if list(row) != header:
            header = list(row)
            lines += ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        lines.append("| " + " | ".join(_cell(v) for v in row.values()) + " |")
    return "\n".join(lines[1:])


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def median(values: Sequence[float]) -> float:
    """The median, as a whole number where all are."""
    return statistics.median(values) if len(values) > 1 else values[0]


def reach(values: Sequence[float], form: str) -> str:
    """The smallest and the largest of several values; the one there is."""
    ends = dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values)))
    return " to ".join(ends)


def listed(names: Sequence[object]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    words = [str(name) for name in names]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def wrapped(page: str) -> str:
    """The page with lines of prose that fit on a screen; tables stay as they are."""
    blocks = [
        block
        if block[0] in "|<!#`"
        else "\n".join(map(_filled, re.split(r"\n(?=- )", block)))
        for block in re.split(r"\n\n+", page.strip("\n"))
    ]
    return "\n\n".join(blocks) + "\n"


def _filled(prose: str) -> str:
    return textwrap.fill(
        " ".join(prose.split()),
        width=88,
        subsequent_indent="  " if prose.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def paragraphs(*parts: str) -> str:
    """Parts that are not empty, apart from each other."""
    return "\n\n".join(part for part in parts if part)


def bullets(*parts: str) -> str:
    """Parts that are not empty, as a list."""
    return "\n".join(f"- {part}" for part in parts if part)


def made_with(file: Contents) -> str:
    """The library, and the versions of it that made the rows of a file."""
    return f"{LIBRARY} {listed(versions(file))}"

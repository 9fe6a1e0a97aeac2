"""The one way in which scripts write tables and files of results."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def markdown(rows: list[Row]) -> str:
    """Rows as Markdown tables, one for each set of columns."""
    lines: list[str] = []
    header: list[str] = []
    for row in rows:
        if list(row) != header:
            header = list(row)
            lines += ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        lines.append("| " + " | ".join(_cell(v) for v in row.values()) + " |")
    return "\n".join(lines[1:])


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def listed(names: Sequence[object]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    words = [str(name) for name in names]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def write_json(path: Path, value: Any, indent: int = 1) -> None:
    """A file that is whole at any time: the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")
    os.replace(draft, path)

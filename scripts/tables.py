"""The one way in which scripts write tables."""

from __future__ import annotations

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

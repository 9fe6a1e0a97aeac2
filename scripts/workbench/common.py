"""What scripts share: tables, pages, files of results, arguments, memory."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


# ----------------------------------------------------------------------------- pages


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


# ------------------------------------------------------------------ files, arguments


def write_json(path: Path, value: Any, indent: int = 1) -> None:
    """A file that is whole at any time: the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")
    os.replace(draft, path)


def positive(text: str) -> int:
    """A number of the command line that is at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


# ---------------------------------------------------------------------------- memory


def resident_mib() -> float:
    """Memory this process holds now; NaN where the system does not tell, as here only
    Linux does.
    """
    return _status_mib("VmRSS")


def peak_mib() -> float:
    """The most it held since :func:`reset_peak`."""
    return _status_mib("VmHWM")


def reset_peak() -> None:
    """Begin a new peak; Linux only."""
    Path("/proc/self/clear_refs").write_text("5")


def _status_mib(field: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    return next(int(line.split()[1]) / 1024 for line in lines if field in line)

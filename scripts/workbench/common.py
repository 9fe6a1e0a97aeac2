"""Arguments of command lines, and what the process holds."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def new_parser(text: str) -> argparse.ArgumentParser:
    """A parser whose help is a docstring as it stands."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def bench_parser(text: str, file: str) -> argparse.ArgumentParser:
    """One with what all benchmarks take, and the file of ``docs`` that they write."""
    parser = new_parser(text)
    path = DOCS / file
    parser.add_argument("--out", type=Path, default=path, help=f"(docs/{file})")
    parser.add_argument("--quick", action="store_true", help="does it run?")
    parser.add_argument("--again", action="store_true", help="replace rows")
    parser.add_argument("--workers", type=positive, default=1, help="processes (1)")
    parser.add_argument("--data-dir", type=Path, help="where UCI and OS files are")
    return parser


def positive(text: str) -> int:
    """A number of the command line that is at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def resident_mib() -> float:
    """Memory this process holds now; NaN where the system does not tell, as here only
    Linux does.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    return next(int(line.split()[1]) / 1024 for line in lines if "VmRSS" in line)


def save(figure: Any, path: Path) -> None:
    """A picture that is easy to see on a screen."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)

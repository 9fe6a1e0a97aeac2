"""Arguments of command lines, and what the process holds."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def new_parser(text: str) -> argparse.ArgumentParser:
    """A parser whose help is a docstring as it stands."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def positive(text: str) -> int:
    """A number of the command line that is at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


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

"""Files of results, all of one form: a header, then a line for every row.

    {"header": {"torch_ssgp": "0.2.0", "torch": ..., "threads": 1, ...settings},
    "rows": [
    {"stream": "audio M=100", "seed": 0, "RMSE": 0.0583},
    ...
    ]}

Floats have six digits, more than any table shows, so that files stay small and changes
of them can be read. A file is replaced as a whole: an interrupted write leaves the one
before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

Row = dict[str, Any]
Key = tuple[Any, ...]
Jobs = Mapping[Any, Callable[[], Row]]  # from the names of a row to what makes it

LIBRARY = "torch_ssgp"
DIGITS = 6


class Contents(NamedTuple):
    """What a file holds: its header and its rows."""

    header: Row
    rows: list[Row]


def header(*, others: Sequence[str] = (), **settings: Any) -> Row:
    """What made a file: versions, threads and settings.

    Args:
        others: Packages whose version matters as well.
        settings: Whatever else the rows depend on.
    """
    packages = (LIBRARY, "torch", "gpytorch", *others)
    versions = {name: version(name) for name in packages}
    return {**versions, "threads": torch.get_num_threads(), **settings}


def read(path: Path) -> Contents:
    """Header and rows of a file; an end with a message where it is another."""
    advice = "Delete it, or choose another place with --out."
    try:
        file = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SystemExit(f"{path} is not JSON: {error}. {advice}") from None
    if not isinstance(file, dict) or set(file) != {"header", "rows"}:
        raise SystemExit(
            f"{path} is not a file of results: it should have a header and rows. "
            f"{advice}"
        )
    return Contents(**file)


def write(
    path: Path, header: Row, rows: Iterable[Row], *, digits: int = DIGITS
) -> None:
    """Replace a file; ``digits`` are those of floats that are significant."""
    lines = ",\n".join(json.dumps(rounded(row, digits)) for row in rows)
    text = f'{{"header": {json.dumps(header)},\n"rows": [\n{lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """A value with all its floats rounded to so many significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {name: rounded(item, digits) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value


# Rows that no code of the library makes: references, kept when its version changes.
APART = {"batch SGPR", "exact", "exact refit", "random"}


def versions(file: Contents) -> list[str]:
    """The versions of the library that made the rows, references left out."""
    default = file.header[LIBRARY]
    rows = [row for row in file.rows if row.get("method") not in APART]
    rows = [row for row in rows if row.get("variant") not in APART]
    return sorted({row.get("version", default) for row in rows} or {default})


class Table:
    """Rows with names in a file, which runs add to.

    Rows in the file are not run again, so a run can be interrupted and resumed, and
    several processes can share a file.

    Args:
        path: The file.
        names: The columns that name a row; where a row has none of them, ``None``.
        header: What the file begins with from now on.
        digits: Significant digits of floats, if not the usual ones.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str],
        header: Row,
        digits: int | None = None,
    ) -> None:
        self.path, self.names, self.header = path, tuple(names), header
        self.digits = digits or DIGITS

    def key(self, row: Row) -> Key:
        """The names of a row."""
        return tuple(row.get(name) for name in self.names)

    def rows(self) -> dict[Key, Row]:
        """What is in the file, by name."""
        rows = read(self.path).rows if self.path.exists() else []
        return {self.key(row): row for row in rows}

    def add(self, row: Row) -> None:
        """Keep a row, with the version that made it."""
        row = {"version": self.header[LIBRARY], **row}
        # Another process may have written meanwhile.
        self._write({**self.rows(), self.key(row): row}.values())

    def drop(self, stale: Callable[[Row], bool]) -> None:
        """Forget rows."""
        self._write(row for row in self.rows().values() if not stale(row))

    def _write(self, rows: Iterable[Row]) -> None:
        write(self.path, self.header, rows, digits=self.digits)

    def run(self, jobs: Jobs, *, again: bool = False) -> list[Row]:
        """All rows, after those that were missing were made, one after the other.

        Args:
            jobs: What makes the rows.
            again: Whether to replace rows that are there.
        """
        done = {} if again else self.rows()
        bar = tqdm([key for key in jobs if tuple(key) not in done], desc="rows")
        for key in bar:
            bar.set_description(", ".join(map(str, key)))
            self.add({**dict(zip(self.names, key, strict=True)), **jobs[key]()})
        return list(self.rows().values())

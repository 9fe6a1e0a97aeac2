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
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from torch_ssgp.exceptions import StreamingGPWarning

Row = dict[str, Any]
Key = tuple[Any, ...]
Jobs = Mapping[Any, Callable[[], Row]]  # from the names of a row to what makes it

LIBRARY = "torch_ssgp"
PACKAGES = (LIBRARY, "torch", "gpytorch", "river", "botorch")
DIGITS = 6


class Contents(NamedTuple):
    """What a file holds."""

    header: Row
    rows: list[Row]


def header(*, others: Sequence[str] = (), **settings: Any) -> Row:
    """What made a file: versions, also of other packages, threads and settings."""
    versions = {name: version(name) for name in (*PACKAGES[:3], *others)}
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


def write(path: Path, header: Row, rows: Iterable[Row]) -> None:
    """Replace a file."""
    lines = ",\n".join(json.dumps(rounded(row)) for row in rows)
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
    several processes can share a file. ``names`` are the columns that name a row.
    """

    def __init__(self, path: Path, names: Sequence[str], header: Row) -> None:
        self.path, self.names, self.header = path, tuple(names), header

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
        write(self.path, self.header, rows)

    def run(self, jobs: Jobs, *, again: bool = False, workers: int = 1) -> list[Row]:
        """All rows, after those that were missing were made.

        Rows of another version are made again, references apart. A row also has the
        seconds of the processor that it ``took``. Workers are processes, each on one
        thread: for them jobs are partials of functions at the top of a module.
        """
        self.check_settings()
        done = set() if again else {k for k, r in self.rows().items() if self.stays(r)}
        missing = [key for key in jobs if tuple(key) not in done]
        bar = tqdm(total=len(missing), desc="rows", disable=None)
        if workers == 1:
            made = ((key, timed(jobs[key])) for key in missing)
        else:
            made = side_by_side({key: jobs[key] for key in missing}, workers)
        for key, row in made:
            self.add({**dict(zip(self.names, key, strict=True)), **row})
            bar.set_postfix_str(", ".join(map(str, key)), refresh=False)
            bar.update()
        bar.close()
        return list(self.rows().values())

    def stays(self, row: Row) -> bool:
        """Whether a row need not be made again."""
        current = row.get("version") == self.header[LIBRARY]
        return current or not APART.isdisjoint(map(str, row.values()))

    def check_settings(self) -> None:
        """End with a message where rows of this version have other settings."""
        if not self.path.exists():
            return
        before = read(self.path).header
        names = {*before, *self.header} - {*PACKAGES, "threads"}
        differ = [
            f"{name} was {before.get(name)}, is {self.header.get(name)}"
            for name in sorted(names)
            if before.get(name) != json.loads(json.dumps(self.header.get(name)))
        ]
        if differ and before[LIBRARY] == self.header[LIBRARY]:
            raise SystemExit(
                f"{self.path} was written with other settings: {'; '.join(differ)}. "
                "Delete it, or choose another place with --out."
            )
        if differ:  # another version, and not even its references can be compared
            self._write([])


@contextmanager
def quiet() -> Iterator[None]:
    """Budgets are small on purpose here: our own warnings say nothing new."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StreamingGPWarning)
        yield


def timed(job: Callable[[], Row]) -> Row:
    """A row, and the seconds of the processor that it took."""
    start = time.process_time()
    with quiet():
        row = job()
    return {**row, "took": time.process_time() - start}


def _alone(job: Callable[[], Row]) -> Row:
    torch.set_num_threads(1)
    return timed(job)


def side_by_side(jobs: Jobs, workers: int) -> Iterator[tuple[Any, Row]]:
    """Rows as they come from so many processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = {pool.submit(_alone, job): key for key, job in jobs.items()}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise

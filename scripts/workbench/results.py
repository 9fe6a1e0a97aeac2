"""Results of experiments on disk, one JSON file for each experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.common import write_json
from workbench.experiments import EXPERIMENTS, SPENDERS, Cell, Row, Settings, conditions


class Results:
    """The results of one experiment, in a file that is always whole.

    Args:
        experiment: Its name.
        out: The folder.

    Attributes:
        conditions: What cells depend on besides their names, see
            :func:`experiments.conditions`; empty if there is no file.
        kept: All cells in the file, by name.
    """

    def __init__(self, experiment: str, out: Path) -> None:
        self.experiment, self.path = experiment, out / f"{experiment}.json"
        self.conditions: Row = {}
        self.kept: dict[str, Row] = {}
        if self.path.exists():
            self.conditions = self._read()
            self.kept = self.conditions.pop("cells")

    def go_on(self, settings: Settings) -> None:
        """Let what comes next be run with these settings, if that is not a mixture.

        The number of seeds may change: each has its own cells. The budget of a method
        may change, too: its cells are dropped, to run again.
        """
        before, now = self.conditions, conditions(self.experiment, settings)
        differ = [
            f"{name} was {before.get(name)}, is {now.get(name)}"
            for name in {**now, **before}
            if before and name in ("quick", "tile")
            if before.get(name) != now.get(name)
        ]
        if differ:
            raise SystemExit(
                f"{self.path} was written with other settings: {'; '.join(differ)}. "
                "Choose another folder with --out, or delete the file."
            )
        self.conditions = now
        if before and before != now:
            self._drop(before.get("budget", {}))
            self._write()

    def _drop(self, budget: Row) -> None:
        """Drop cells of methods that had another budget."""
        now = self.conditions.get("budget", {})
        changed = [name for name in now if now[name] != budget.get(name)]
        methods = {method for name in changed for method in SPENDERS[name]}
        stale = [key for key in self.kept if any(name in key for name in methods)]
        for key in stale:
            del self.kept[key]
        if stale:
            print(
                f"{self.experiment}: {', '.join(changed)} changed; of the results so "
                f"far, {len(stale)} are dropped."
            )

    @property
    def quick(self) -> bool:
        """Whether these are tiny versions."""
        return self.conditions["quick"]

    def planned(self) -> list[Cell]:
        """The cells of a whole run under these conditions."""
        tile = Path() if self.conditions.get("tile") else None
        seeds = self.conditions.get("seeds")
        return EXPERIMENTS[self.experiment](Settings(self.quick, seeds, tile))

    @property
    def cells(self) -> dict[str, Row]:
        """Results of planned cells; others may be in the file."""
        keys = [cell.key for cell in self.planned()]
        return {key: self.kept[key] for key in keys if key in self.kept}

    def missing(self) -> list[str]:
        """Planned cells without a result."""
        return [cell.key for cell in self.planned() if cell.key not in self.kept]

    def add(self, key: str, row: Row) -> None:
        """Keep a result, on disk before anything else happens."""
        self.kept[key] = rounded(row)
        self._write()

    def _read(self) -> Row:
        """The whole file, or an end with a message."""
        advice = "Delete it, or choose another folder with --out."
        try:
            file = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SystemExit(f"{self.path} is not JSON: {error}. {advice}") from None
        wanted = {"cells", *conditions(self.experiment, Settings())}
        if not isinstance(file, dict) or set(file) != wanted:
            raise SystemExit(
                f"{self.path} is not a file of this version of reproduce.py: it should "
                f"have {', '.join(sorted(wanted))}. {advice}"
            )
        return file

    def _write(self) -> None:
        write_json(self.path, {**self.conditions, "cells": self.kept}, indent=0)


def rounded(value: Any) -> Any:
    """Floats to nine digits: more than any figure shows, and files stay small."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value

"""What an experiment has brought so far, in a file of its own."""

from __future__ import annotations

from pathlib import Path

from workbench import results
from workbench.cells import Cell, Settings
from workbench.contests import SPENDERS
from workbench.experiments import EXPERIMENTS, conditions
from workbench.results import Row, Table

# Curves that agree to rounding are shown to agree.
DIGITS = {"equivalence": 9}


class Results:
    """The results of one experiment.

    Args:
        experiment: Its name.
        out: The folder.

    Attributes:
        conditions: What cells depend on besides their names, see
            :func:`experiments.conditions`; empty if there is no file.
        kept: All cells in the file, by name.
        versions: Of the library, that made them.
    """

    def __init__(self, experiment: str, out: Path) -> None:
        self.experiment, self.path = experiment, out / f"{experiment}.json"
        self.conditions: Row = {}
        self.kept: dict[str, Row] = {}
        self.versions: set[str] = set()
        if self.path.exists():
            header, rows = results.read(self.path)
            names = list(conditions(experiment, Settings()))
            if missing := [name for name in names if name not in header]:
                raise SystemExit(
                    f"{self.path} is not of this version: its header has no "
                    f"{', '.join(missing)}. Delete it, or choose another folder with "
                    "--out."
                )
            self.conditions = {name: header[name] for name in names}
            self.kept = {row["cell"]: row for row in rows}
            made = header[results.LIBRARY]
            self.versions = {row.get("version", made) for row in rows} or {made}

    @property
    def table(self) -> Table:
        """The file, under the present conditions."""
        header = results.header(**self.conditions)
        return Table(self.path, ["cell"], header, DIGITS.get(self.experiment))

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

    def _drop(self, budget: Row) -> None:
        """Drop cells of methods that had another budget."""
        now = self.conditions.get("budget", {})
        changed = [name for name in now if now[name] != budget.get(name)]
        methods = {method for name in changed for method in SPENDERS[name]}
        stale = [key for key in self.kept if any(name in key for name in methods)]
        for key in stale:
            del self.kept[key]
        self.table.drop(lambda row: row["cell"] in stale)
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
        self.table.add({"cell": key, **row})
        self.kept[key] = {"cell": key, **row}

"""Every experiment of "Streaming Sparse Gaussian Process Approximations" (2017).

    python scripts/reproduce.py all --jobs 2           # everything
    python scripts/reproduce.py timeseries terrain     # some of it
    python scripts/reproduce.py all --quick            # all of it, tiny: does it run?
    python scripts/reproduce.py report                 # the page from what was run

Each experiment writes a JSON file and a picture to ``--out``. Interrupt it as you like:
the same command goes on where it stopped. ``report`` turns the files into a Markdown
page beside the folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import figures
import reproduction_page
from experiments import ALONE, EXPERIMENTS, Cell, Row, Settings
from torch_ssgp.plotting import require_pyplot

OUT = Path("out/reproduction")


class Results:
    """The results of one experiment, in a file that is always whole.

    Args:
        experiment: Its name.
        settings: How it is run; results of other settings are not mixed with these.
        out: The folder.
    """

    def __init__(self, experiment: str, settings: Settings, out: Path) -> None:
        self.path = out / f"{experiment}.json"
        self.settings = {
            "quick": settings.quick,
            "tile": settings.data_dir is not None,  # which terrain
        }
        self.cells: dict[str, Row] = {}
        if self.path.exists():
            kept = json.loads(self.path.read_text())
            self.cells = kept.pop("cells")
            if kept != self.settings:
                raise SystemExit(
                    f"{self.path} was written with other settings ({kept}, now "
                    f"{self.settings}). Choose another folder with --out, or delete "
                    "the file."
                )

    def add(self, key: str, row: Row) -> None:
        """Keep a result, on disk before anything else happens."""
        self.cells[key] = rounded(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = json.dumps({**self.settings, "cells": self.cells}, indent=0)
        draft = self.path.with_suffix(".tmp")
        draft.write_text(whole + "\n")
        os.replace(draft, self.path)


def rounded(value: Any) -> Any:
    """Floats to nine digits: more than any figure shows, and files stay small."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value


Job = tuple[str, Cell]  # of which experiment


def work(cell: Cell) -> Row:
    """Run a cell; one thread, since cells run side by side."""
    torch.set_num_threads(1)
    start = time.process_time()
    row = cell.function(**cell.options)
    return {**row, "took": time.process_time() - start}


def outcomes(work_list: list[Job], jobs: int, alone: bool) -> Iterator[tuple[Job, Row]]:
    """Results as they come; long cells begin first."""
    if jobs == 1 and not alone:
        for name, cell in work_list:
            yield (name, cell), work(cell)
        return
    with ProcessPoolExecutor(
        1 if alone else jobs,
        mp_context=multiprocessing.get_context("spawn"),
        max_tasks_per_child=1 if alone else None,
    ) as pool:
        longest_first = sorted(work_list, key=lambda job: -job[1].weight)
        waiting: dict[Future[Row], Job] = {
            pool.submit(work, cell): (name, cell) for name, cell in longest_first
        }
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def run(names: list[str], settings: Settings, out: Path, jobs: int) -> None:
    """Run what is not in the files yet, then draw.

    Args:
        names: Experiments.
        settings: How to run them.
        out: Folder for files and figures.
        jobs: Processes side by side.
    """
    require_pyplot()  # now, not after hours
    results = {name: Results(name, settings, out) for name in names}
    work_list = [
        (name, cell)
        for name in names
        for cell in EXPERIMENTS[name](settings)
        if cell.key not in results[name].cells
    ]
    total = sum(cell.weight for _, cell in work_list)
    with tqdm(total=total, unit="s", desc="reproduce", disable=None) as bar:
        for alone in (False, True):
            part = [job for job in work_list if (job[0] in ALONE) == alone]
            for (name, cell), row in outcomes(part, jobs, alone):
                results[name].add(cell.key, row)
                bar.set_postfix_str(f"{name}: {cell.key}")
                bar.update(cell.weight)
    for name in names:
        figures.draw(name, results[name].cells, out / f"{name}.png")


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "experiments", nargs="+", choices=[*EXPERIMENTS, "all", "report"]
    )
    parser.add_argument("--quick", action="store_true", help="tiny versions")
    parser.add_argument("--seeds", type=int, help="repetitions of what is random")
    parser.add_argument(
        "--data-dir", type=Path, help="terrain: where terrain_os_NT26.npz is"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    chosen = parser.parse_args(arguments)
    if "report" in chosen.experiments:
        if len(chosen.experiments) > 1:
            parser.error("report stands alone: it reads what was run before.")
        print(reproduction_page.report(chosen.out))
        return
    names = list(EXPERIMENTS) if "all" in chosen.experiments else chosen.experiments
    settings = Settings(chosen.quick, chosen.seeds, chosen.data_dir)
    try:
        run(names, settings, chosen.out, chosen.jobs)
    except KeyboardInterrupt:
        raise SystemExit(
            "\nInterrupted; what was finished is kept. The same command goes on."
        ) from None


if __name__ == "__main__":
    main()

"""Every experiment of "Streaming Sparse Gaussian Process Approximations" (2017).

    python scripts/reproduce.py all --jobs 2           # everything
    python scripts/reproduce.py timeseries terrain     # some of it
    python scripts/reproduce.py all --quick            # tiny versions of all
    python scripts/reproduce.py report                 # writes the page

Each experiment writes a JSON file and a picture to ``--out``. You can interrupt a run;
the same command resumes it. ``report`` writes a Markdown page next to the folder from
the files, and draws pictures that are missing.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path

import torch
from tqdm import tqdm

from torch_ssgp.exceptions import MissingDependencyError
from workbench import figures, reproduction_page, streams
from workbench.cells import SEEDS, Cell, Settings
from workbench.common import new_parser, positive
from workbench.experiment_results import Results
from workbench.experiments import ALONE, EXPERIMENTS, ON_TERRAIN
from workbench.results import Row

OUT = Path("out/reproduction")


# What is not among the requirements of the library, and who needs it.
PACKAGES = {
    "matplotlib": list(EXPERIMENTS),
    "river": ["banana"],
}


def check(names: list[str], settings: Settings) -> None:
    """End with a message if anything is missing; now, not after hours.

    Args:
        names: Experiments.
        settings: How they are to be run.
    """
    absent = [
        package
        for package, users in PACKAGES.items()
        if set(names) & set(users) and find_spec(package) is None
    ]
    if absent:
        raise SystemExit(
            f"Not installed: {', '.join(absent)}. Install all that the experiments "
            "need with: pip install -e '.[plot,river]'"
        )
    if settings.data_dir is not None and set(names) & set(ON_TERRAIN):
        try:
            streams.tile_file(settings.data_dir)
        except FileNotFoundError as error:
            raise SystemExit(f"--data-dir: {error}") from None


Job = tuple[str, Cell]  # of which experiment


def work(cell: Cell) -> Row:
    """Run a cell; one thread, since cells run side by side."""
    torch.set_num_threads(1)
    start = time.process_time()
    row = cell.run()
    return {**row, "took": time.process_time() - start}


def outcomes(work_list: list[Job], jobs: int, alone: bool) -> Iterator[tuple[Job, Row]]:
    """Results as they come."""
    if jobs == 1 and not alone:
        for name, cell in work_list:
            yield (name, cell), work(cell)
        return
    with ProcessPoolExecutor(
        1 if alone else jobs,
        mp_context=multiprocessing.get_context("spawn"),
        max_tasks_per_child=1 if alone else None,
    ) as pool:
        waiting: dict[Future[Row], Job] = {
            pool.submit(work, cell): (name, cell) for name, cell in work_list
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
    check(names, settings)
    results = {name: Results(name, out) for name in names}
    for name in names:
        results[name].go_on(settings)
    work_list = [
        (name, cell)
        for name in names
        for cell in EXPERIMENTS[name](settings)
        if cell.key not in results[name].kept
    ]
    with tqdm(total=len(work_list), desc="reproduce", disable=None) as bar:
        for alone in (False, True):
            part = [job for job in work_list if (job[0] in ALONE) == alone]
            for (name, cell), row in outcomes(part, jobs, alone):
                results[name].add(cell.key, row)
                bar.set_postfix_str(f"{name}: {cell.key}")
                bar.update()
    for name in names:
        figures.draw(name, results[name].cells, out / f"{name}.png")


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "experiments",
        nargs="+",
        choices=[*EXPERIMENTS, "all", "report"],
        metavar="experiment",
        help=f"any of {', '.join(EXPERIMENTS)}; all; or report, which runs nothing",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny versions, as a smoke test"
    )
    parser.add_argument(
        "--seeds",
        type=positive,
        help="repetitions in "
        + ", ".join(f"{name} ({usual})" for name, (usual, _) in SEEDS.items()),
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="terrain and memory: the folder of terrain_os_NT26.npz, a tile to use in "
        "place of matplotlib's terrain",
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, help=f"folder of results ({OUT})"
    )
    parser.add_argument(
        "--jobs", type=positive, default=1, help="number of processes (1)"
    )
    chosen = parser.parse_args(arguments)
    if "report" in chosen.experiments:
        if len(chosen.experiments) > 1:
            parser.error("report stands alone: it reads what was run before.")
        try:
            print(reproduction_page.report(chosen.out))
        except MissingDependencyError as error:  # to draw what is missing
            raise SystemExit(str(error)) from None
        return
    asked = dict.fromkeys(chosen.experiments)  # each once
    names = list(EXPERIMENTS if "all" in asked else asked)
    settings = Settings(chosen.quick, chosen.seeds, chosen.data_dir)
    try:
        run(names, settings, chosen.out, chosen.jobs)
    except KeyboardInterrupt:
        raise SystemExit(
            "\nInterrupted; what was finished is kept. The same command goes on."
        ) from None

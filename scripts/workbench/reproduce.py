"""The experiments of "Streaming Sparse Gaussian Process Approximations" (2017).

    python scripts/reproduce.py all --workers 2        # everything
    python scripts/reproduce.py timeseries terrain     # some of it
    python scripts/reproduce.py all --quick            # tiny versions of all
    python scripts/reproduce.py draw                   # pictures from the files

Each experiment writes a JSON file and a picture to ``--out``. You can interrupt a run;
the same command resumes it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from workbench import figures
from workbench.common import DOCS, new_parser, positive
from workbench.experiments import EXPERIMENTS, Settings, conditions, names_of
from workbench.results import Table, header, read

OUT = DOCS / "reproduction"


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and draw."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "experiments",
        nargs="+",
        choices=[*EXPERIMENTS, "all", "draw"],
        metavar="experiment",
        help=f"any of {', '.join(EXPERIMENTS)}; all; or draw, which runs nothing",
    )
    parser.add_argument("--quick", action="store_true", help="does it run?")
    parser.add_argument("--seeds", type=positive, help="of alpha, hyperparameters, ...")
    parser.add_argument(
        "--data-dir", type=Path, help="where terrain_os_NT26.npz is, for terrain"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="(docs/reproduction)")
    parser.add_argument("--workers", type=positive, default=1, help="processes (1)")
    parser.add_argument("--again", action="store_true", help="replace rows")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settings = Settings(chosen.quick, chosen.seeds, chosen.data_dir)
    every = {"all", "draw"} & {*chosen.experiments}
    for name in EXPERIMENTS if every else dict.fromkeys(chosen.experiments):
        path = chosen.out / f"{name}.json"
        if "draw" not in chosen.experiments:
            made = header(**conditions(name, settings))
            table = Table(path, names_of(name), made)
            jobs = EXPERIMENTS[name](settings)
            table.run(jobs, again=chosen.again, workers=chosen.workers)
        if path.exists():
            figures.draw(name, read(path).rows, path.with_suffix(".png"))

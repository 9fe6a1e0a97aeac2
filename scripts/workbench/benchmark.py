"""Speed and accuracy, as rows of JSON files.

    python scripts/benchmark.py run          methods over streams, any of them
    python scripts/benchmark.py frontier     error against CPU time and bytes; hours
    python scripts/benchmark.py timing       what work costs, beside floors and peers
    python scripts/benchmark.py latency      single points: percentiles, and errors
    python scripts/benchmark.py prequential  our river estimators and river's models
    python scripts/benchmark.py picture      the picture of README.md
    python scripts/benchmark.py bayesopt     cost, fantasies and regret with BoTorch
    python scripts/benchmark.py merge        three sites, a hundred models
    python scripts/benchmark.py distributed  messages and times of several ranks
    python scripts/benchmark.py bars         acceptance bars, for any version
    python scripts/benchmark.py alarms       false alarms of thresholds
    python scripts/benchmark.py tables       tables of docs and README.md, from files

Each has its own arguments: see ``timing --help``. For the experiments of the paper, see
``scripts/reproduce.py``; for ten thousand hard updates, ``scripts/soak.py``.
"""

from __future__ import annotations

import importlib
import sys

from workbench.common import DOCS, new_parser

COMMANDS = {
    "run": "runner",
    "frontier": "frontier",
    "timing": "timing",
    "latency": "latency",
    "prequential": "prequential",
    "picture": "picture",
    "bayesopt": "bayesopt",
    "merge": "runner",
    "distributed": "messages",
    "bars": "bars",
    "alarms": "alarms",
    "tables": "tables",
}
MERGE = ["--out", str(DOCS / "data/merge.json"), "--streams", "elevators", "terrain"]
MERGE += [
    "--methods",
    "streaming",
    "three sites in turns",
    "three sites in turns, learned",
]
MERGE += ["three sites in regions", "three sites in regions, learned"]
PRESETS = {"merge": MERGE}
EXTRAS = ("botorch", "river", "sklearn", "pandas")


def main(arguments: list[str] | None = None) -> None:
    """Run one benchmark."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = new_parser(__doc__)
    parser.add_argument("command", choices=COMMANDS, help="see above")
    name = parser.parse_args(arguments[:1]).command
    try:
        module = importlib.import_module(f"workbench.{COMMANDS[name]}")
    except ModuleNotFoundError as error:
        extra = str(error.name).partition(".")[0]
        if extra not in EXTRAS:
            raise
        raise SystemExit(f"{error}. Install it: pip install -e '.[test]'") from None
    module.main([*PRESETS.get(name, ()), *arguments[1:]])

"""The inner loop: how soon each way to climb comes near the end.

    python scripts/benchmark.py loop            docs/data/loop.json
    python scripts/benchmark.py loop --streams revisiting --out FILE

A stream is learned with default settings. Before two of its updates, early and late,
the model is copied, and every copy learns the next batch in another way. The end is the
best bound that any of them met. What counts is the processor time until the bound is
within 0.01 nats per datum of the end, the choice of points included, and how much is
missing where a way stops. Streams that are in the file are not run again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from tqdm import tqdm

from torch_ssgp import StreamingGP
from torch_ssgp.update import UpdateOptions, ascent
from workbench.baselines import new_kernel, small_budget
from workbench.bench_cases import CASES
from workbench.common import DOCS, new_parser, positive
from workbench.pages import markdown
from workbench.results import Row, Table, header

STEPS = 300  # enough for a plateau, mostly
NEAR = 0.01  # nats per datum
STREAMS = (
    "pseudo-periodic M=100",
    "audio M=100",
    "growing range",
    "revisiting",
    "elevators",
)
NAMES = ("stream", "update", "way")
OUT = DOCS / "data" / "loop.json"


class Way(NamedTuple):
    """A way to climb.

    Attributes:
        options: Of the update.
        shorter: Learning rates tried after one that was too large, relative to it.
        cold: Whether hyperparameters start from those of a new model.
    """

    options: dict[str, Any]
    shorter: tuple[float, ...] = ascent.SHORTER
    cold: bool = False


DEFAULT = "Adam, 0.05 (default)"
WAYS = {
    DEFAULT: Way({}),
    "Adam, 0.02": Way({"lr": 0.02}),
    "Adam, 0.1": Way({"lr": 0.1}),
    "Adam, 0.2": Way({"lr": 0.2}),
    "Adam, no shorter steps": Way({}, shorter=()),
    "Adam, cold start": Way({}, cold=True),
    "L-BFGS": Way({"optimizer": "lbfgs"}),
    "L-BFGS, cold start": Way({"optimizer": "lbfgs"}, cold=True),
}


class Climb(NamedTuple):
    """Seconds since the update began, and the best bound so far, after every step."""

    seconds: list[float]
    best: list[float]

    def first_within(self, end: float, near: float) -> int | None:
        """The first step that is so near the end; ``None`` where none is."""
        return next((i for i, v in enumerate(self.best) if v >= end - near), None)


def climb(model: StreamingGP, x: Tensor, y: Tensor, way: Way, steps: int) -> Climb:
    """Learn a batch with a copy of a model."""
    model, found, best = deepcopy(model), Climb([], []), -math.inf

    def look(_: int, bound: Tensor) -> None:
        nonlocal best
        best = max(best, bound.item())
        found.seconds.append(time.process_time() - start)
        found.best.append(best)

    if way.cold and not model.memory.is_empty:
        with torch.no_grad():
            pairs = zip(model.prior().parameters(), model.start.values, strict=True)
            for parameter, value in pairs:
                parameter.copy_(value)
    options = UpdateOptions(
        num_steps=steps,
        learn_hyperparameters=True,
        forget=1.0,
        restart=False,
        callback=look,
        **way.options,
    )
    data = model.check_data(x, y, None)
    with mock.patch.object(ascent, "SHORTER", way.shorter), small_budget():
        start = time.process_time()
        model.learn_from(data, options)
    return found


def rows_at(
    model: StreamingGP, x: Tensor, y: Tensor, steps: int = STEPS
) -> Iterator[Row]:
    """A row for every way to learn a batch."""
    climbs = {name: climb(model, x, y, way, steps) for name, way in WAYS.items()}
    num_data = float(model.memory.num_data) + y.size(-1)
    end = max(each.best[-1] for each in climbs.values())
    for name, each in climbs.items():
        first = each.first_within(end, NEAR * num_data)
        yield {
            "way": name,
            "steps": len(each.best),
            "cpu_seconds": each.seconds[-1],
            "missing": (end - each.best[-1]) / num_data,
            "near_step": None if first is None else first + 1,
            "near_seconds": None if first is None else each.seconds[first],
        }


def run(
    names: list[str], out: Path, data_dir: Path | None = None, steps: int = STEPS
) -> list[Row]:
    """All rows; those that are missing are made.

    Args:
        names: Of :data:`CASES`.
        out: The file.
        data_dir: Where UCI files are.
        steps: The most that an update takes.
    """
    torch.optim.LBFGS([torch.zeros(1, requires_grad=True)])  # imports for seconds
    table = Table(out, NAMES, header(steps=steps, near=NEAR))
    for name in tqdm(names, desc="loop"):
        case = CASES[name]
        batches = case.stream(0, data_dir).batches
        looked_at = {1, len(batches) - 1}
        done = {(row["stream"], row["update"]) for row in table.rows().values()}
        if {(name, k) for k in looked_at} <= done:
            continue
        kernel = new_kernel(batches[0][0].size(-1))
        model = StreamingGP(kernel, num_inducing=case.num_inducing).double()
        for k, (x, y) in enumerate(batches):
            for row in rows_at(model, x, y, steps) if k in looked_at else ():
                table.add({"stream": name, "update": k, **row})
            with small_budget():
                model.update(x, y, forget=1.0)
    return list(table.rows().values())


def lines(rows: list[Row]) -> list[Row]:
    """One line for every way, against the default."""
    places = {(row["stream"], row["update"]) for row in rows}
    default = {(r["stream"], r["update"]): r for r in rows if r["way"] == DEFAULT}

    def ratio(own: list[Row], name: str) -> str:
        found = [
            row[name] / base[name]
            for row in own
            if row[name] and (base := default[row["stream"], row["update"]])[name]
        ]
        return f"{median(found):.2f}" if found else "–"

    table = []
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        near = [row for row in own if row["near_step"] is not None]
        table.append(
            {
                "way": way,
                "near the end": f"{len(near)} of {len(places)}",
                "steps until then": f"{median(row['near_step'] for row in near):.0f}"
                if near
                else "–",
                "time until then": ratio(own, "near_seconds"),
                "steps in all": f"{median(row['steps'] for row in own):.0f}",
                "time in all": ratio(own, "cpu_seconds"),
                "most missing": f"{max(row['missing'] for row in own):.3g}",
            }
        )
    return table


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing and print the table."""
    parser = new_parser(__doc__)
    parser.add_argument("--streams", nargs="*", choices=[*CASES], default=[*STREAMS])
    parser.add_argument("--data-dir", type=Path, help="where UCI files are")
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"({STEPS})")
    parser.add_argument("--out", type=Path, default=OUT, help=f"({OUT.name})")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = run(chosen.streams, chosen.out, chosen.data_dir, chosen.steps)
    print(markdown(lines(rows)))

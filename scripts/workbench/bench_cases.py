"""The streams that the benchmarks of policies and of the memory share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from workbench import streams
from workbench.common import positive
from workbench.pages import listed
from workbench.results import Jobs, Row
from workbench.streams import Stream

BATCH = "batch SGPR"


class Case(NamedTuple):
    """A stream, its budget, and whether a seed changes the data.

    Attributes:
        make: From a seed and the directory of the data to the stream.
        num_inducing: Budget of inducing points, M.
        seeded: Whether the data depend on the seed; otherwise other seeds are other
            roundings of the targets, see :func:`streams.rounded`, with one batch model.
    """

    make: Callable[[int, Path | None], Stream]
    num_inducing: int
    seeded: bool

    def stream(self, seed: int, data_dir: Path | None = None) -> Stream:
        """The stream of a seed."""
        made = self.make(seed, data_dir)
        return made if self.seeded else streams.rounded(made, seed)

    def reference(self, seed: int) -> int:
        """The seed of the batch model that a run is compared with."""
        return seed if self.seeded else 0


def _uci(name: str) -> Callable[[int, Path | None], Stream]:
    return lambda _, data_dir: streams.uci(name, data_dir)


# The cheap ones first.
CASES: dict[str, Case] = {
    "pseudo-periodic M=100": Case(lambda *_: streams.pseudo_periodic(), 100, False),
    "pseudo-periodic M=200": Case(lambda *_: streams.pseudo_periodic(), 200, False),
    "audio M=100": Case(lambda *_: streams.audio(), 100, False),
    "audio M=200": Case(lambda *_: streams.audio(), 200, False),
    "growing range": Case(lambda seed, _: streams.growing_range(seed=seed), 250, True),
    "revisiting": Case(lambda seed, _: streams.revisiting(seed=seed), 100, True),
    "elevators": Case(_uci("elevators"), 200, False),
    "bike": Case(_uci("bike_noleak"), 200, False),
    "terrain": Case(lambda *_: streams.terrain(), 400, False),
    "terrain OS": Case(lambda _, d: streams.terrain_os(d), 400, False),
    "kin40k": Case(_uci("kin40k"), 200, False),
}


def case_jobs(
    run: Callable[[str, str, int], Row],
    methods: Iterable[str],
    num_seeds: int,
    only_streams: Iterable[str] = (),
    only_methods: Iterable[str] = (),
) -> Jobs:
    """Streams x methods x seeds, each a job; a batch model once where data are one.

    Args:
        run: From stream, method and seed to a row.
        methods: What to compare with the batch model.
        num_seeds: Splits, draws or roundings.
        only_streams: Names of :data:`CASES`; all if there are none.
        only_methods: The same of methods, :data:`BATCH` among them.
    """
    methods, only_methods = list(methods), list(only_methods)
    only_streams = list(only_streams)
    return {
        (name, method, seed): partial(run, name, method, seed)
        for name, case in CASES.items()
        if name in (only_streams or CASES)
        for method in [BATCH, *methods]
        if method in (only_methods or [BATCH, *methods])
        for seed in range(num_seeds)
        if method != BATCH or case.reference(seed) == seed
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Arguments that both benchmarks take."""
    parser.add_argument("--data-dir", type=Path, help="where UCI and OS files are")
    parser.add_argument(
        "--seeds", type=positive, default=3, help="splits, draws or roundings (3)"
    )
    parser.add_argument("--streams", nargs="*", choices=[*CASES], help="only these")
    parser.add_argument("--threads", type=positive, default=1, help="of torch (1)")


def not_run(
    rows: list[Row], column: str, methods: Iterable[str], names: Iterable[str] = CASES
) -> str:
    """Streams, and in brackets the methods that have no row yet."""
    done, methods = {(row["stream"], row[column]) for row in rows}, [BATCH, *methods]
    left: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        some = tuple(method for method in methods if (name, method) not in done)
        left.setdefault(some, []).append(name)
    parts = [
        f"{listed(some)} ({', '.join(what)})" for what, some in left.items() if what
    ]
    return "; ".join(parts)

"""The streams that benchmarks share, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from workbench.streams import made_up, recorded
from workbench.streams.stream import Stream, rounded, split_rows


class Asked(NamedTuple):
    """What a stream is made of."""

    seed: int = 0  # of data that are drawn; targets of others are :func:`rounded`
    batch: int = 0  # size of batches; 0 for the usual one
    data_dir: Path | None = None


def _uci(name: str) -> Callable[[Asked], Stream]:
    return lambda on: recorded.uci(name, on.data_dir, on.batch or 500)


def _river(name: str) -> Callable[[Asked], Stream]:
    def make(on: Asked) -> Stream:
        whole, size = recorded.river_series(name), on.batch or 50
        return replace(whole, batches=split_rows(*whole.batches[0], size, size))

    return make


# The cheap ones first.
STREAMS: dict[str, Callable[[Asked], Stream]] = {
    "TrumpApproval": _river("TrumpApproval"),
    "ChickWeights": _river("ChickWeights"),
    "pseudo-periodic": lambda on: recorded.pseudo_periodic(batch=on.batch or 300),
    "audio": lambda on: recorded.audio(batch=on.batch or 300),
    "growing range": lambda on: made_up.growing_range(
        batch=on.batch or 100, seed=on.seed
    ),
    "revisiting": lambda on: made_up.revisiting(batch=on.batch or 100, seed=on.seed),
    "elevators": _uci("elevators"),
    "bike": _uci("bike_noleak"),
    "terrain": lambda on: recorded.terrain(batch=on.batch or 750),
    "terrain OS": lambda on: recorded.terrain_os(on.data_dir, batch=on.batch or 750),
    "kin40k": _uci("kin40k"),
    "protein": _uci("protein"),
}
SERIES = ("pseudo-periodic", "audio")
DRAWN = ("growing range", "revisiting")
FILES = {"elevators", "bike", "terrain OS", "kin40k", "protein"}  # in ``data_dir``


def stream_of(name: str, on: Asked) -> Stream:
    """A stream by its name."""
    made = STREAMS[name](on)
    return made if name in DRAWN else rounded(made, on.seed)


class Case(NamedTuple):
    """A stream and a number of inducing points."""

    name: str
    num_inducing: int

    def stream(self, seed: int, data_dir: Path | None = None) -> Stream:
        """The stream of a seed."""
        return stream_of(self.name, Asked(seed, data_dir=data_dir))


CASES = {f"{name} M={m}": Case(name, m) for name in SERIES for m in (100, 200)}
CASES |= {name: Case(name, 200) for name in ("elevators", "bike", "kin40k")}
CASES |= {name: Case(name, 400) for name in ("terrain", "terrain OS")}
CASES |= {"growing range": Case("growing range", 250)}
CASES |= {"revisiting": Case("revisiting", 100)}

"""The pieces that experiments are cut into, and how they are asked to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from workbench.results import Row
from workbench.streams.stream import evenly


class Cell(NamedTuple):
    """A piece of an experiment.

    Attributes:
        key: Its name in the results.
        run: What makes its row; a partial of a function at the top of a module, so that
            it can run in another process.
    """

    key: str
    run: Callable[[], Row]


@dataclass(frozen=True)
class Settings:
    """What the command line asks for.

    Attributes:
        quick: Small versions that take seconds and prove that all runs.
        seeds: Repetitions where something is random; each experiment has a default.
        data_dir: Where ``terrain_os_NT26.npz`` is, to use this tile in place of
            matplotlib's terrain.
    """

    quick: bool = False
    seeds: int | None = None
    data_dir: Path | None = None


# Repetitions of what is random: as a rule, and of tiny versions.
SEEDS = {"alpha": (4, 1), "hyperparameters": (10, 2), "banana": (5, 1)}


def num_seeds(name: str, settings: Settings) -> int:
    """Repetitions in an experiment."""
    return settings.seeds or SEEDS[name][settings.quick]


def some_of(count: int, most: int = 4) -> list[int]:
    """The batches that pictures show, the first and the last among them."""
    return evenly(count, most).tolist()

"""The data streams that benchmarks, experiments and tests run on.

Every function returns a :class:`Stream`: float64 batches in the order in which they
arrive, already scaled, and a test set. Nothing downloads by itself: data come from a
formula, from the ``river`` and ``matplotlib`` packages, from ``scripts/data``, or from
files in a directory that the caller names.
"""

from workbench.streams.made_up import (
    arm,
    gp_draw,
    growing_range,
    repeated_iid,
    revisiting,
    with_noise,
)
from workbench.streams.recorded import (
    UCI_SOURCES,
    audio,
    banana,
    pseudo_periodic,
    pseudo_periodic_values,
    river_series,
    terrain,
    terrain_os,
    tile_file,
    uci,
    uci_rows,
)
from workbench.streams.stream import Stream, moments, rounded, split_rows

__all__ = [
    "UCI_SOURCES",
    "Stream",
    "arm",
    "audio",
    "banana",
    "gp_draw",
    "growing_range",
    "moments",
    "pseudo_periodic",
    "pseudo_periodic_values",
    "repeated_iid",
    "revisiting",
    "river_series",
    "rounded",
    "split_rows",
    "terrain",
    "terrain_os",
    "tile_file",
    "uci",
    "uci_rows",
    "with_noise",
]

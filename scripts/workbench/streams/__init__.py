"""The data streams that benchmarks, experiments and tests run on.

Every function returns a :class:`Stream`: float64 batches in the order in which they
arrive, already scaled, and a test set. Nothing downloads by itself: data come from a
formula, from the ``river`` and ``matplotlib`` packages, from ``scripts/data``, or from
files in a directory that the caller names.
"""

from workbench.streams.made_up import *  # noqa: F403
from workbench.streams.recorded import *  # noqa: F403
from workbench.streams.stream import *  # noqa: F403

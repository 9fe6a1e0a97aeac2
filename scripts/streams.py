"""The old name of ``workbench.streams``, for tests that still use it."""

from workbench.streams import *  # noqa: F403

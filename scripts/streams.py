"""The old name of ``workbench.streams``, for tests that still use it."""

import importlib  # noqa: F401

from workbench.streams import *  # noqa: F403

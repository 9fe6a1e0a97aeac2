"""The old name of ``workbench.baselines``, for tests that still use it."""

from workbench.baselines import *  # noqa: F403

"""What every test gets: one thread, a fixed seed, and torch's defaults left alone."""

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# Before anything imports pyplot: the tests draw on machines without a screen.
os.environ.setdefault("MPLBACKEND", "Agg")

# Matrices in tests are small, and the workers of pytest-xdist share the cores.
torch.set_num_threads(1)

# No test depends on the clock or on a previous run; the full run looks further.
FULL = os.environ.get("TORCH_SSGP_FULL") == "1"
only_full = pytest.mark.skipif(not FULL, reason="in the full run: TORCH_SSGP_FULL=1")
hypothesis.settings.register_profile(
    "torch_ssgp",
    max_examples=500 if FULL else 25,
    derandomize=not FULL,
    print_blob=FULL,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("torch_ssgp")


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays to the end: a million imported objects.

    To look at them again and again took a tenth of the time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Seed torch for the test, and give back the generator's state after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(autouse=True)
def torch_defaults_stay() -> Iterator[None]:
    """Fail a test that leaves another default dtype or device behind."""
    before = torch.get_default_dtype(), torch.get_default_device()
    yield
    after = torch.get_default_dtype(), torch.get_default_device()
    if after != before:
        # Put back first, so that one test's slip fails one test.
        torch.set_default_dtype(before[0])
        if after[1] != before[1]:
            torch.set_default_device(before[1])
        pytest.fail(f"The test left torch's defaults at {after}; they were {before}.")

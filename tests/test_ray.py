"""The recipes for Ray, with Ray itself: workers die, and the result stays."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import only_full

ROOT = Path(__file__).resolve().parents[1]
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install -e '.[ray]' (240 MB)",
)


def run(recipe: str, *arguments: str, home: Path) -> list[str]:
    """What a recipe prints, on a cluster of this machine that is its own."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "recipes" / recipe), *arguments],
        # Ray keeps a token of its cluster in the home directory.
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def apart(line: str) -> float:
    assert "one process by" in line
    return float(line.split()[-1])


@only_full
@needs_ray
def test_sites_are_joined_as_in_one_process_though_a_worker_is_killed(tmp_path: Path):
    *_, killed, last = run("ray_sites.py", "--hours", "2", "--kill", home=tmp_path)
    assert killed == "a worker was killed: True"
    assert apart(last) < 1e-10


@only_full
@needs_ray
def test_streams_go_on_in_another_actor_as_if_nothing_had_happened(tmp_path: Path):
    first, second, last = run("ray_streams.py", home=tmp_path)[-3:]
    assert first.startswith("1000 streams")
    assert float(second.split()[-1]) < 0.1
    assert apart(last) < 1e-10

"""Three sites as Ray tasks on two workers, joined every hour.

    pip install 'torch_ssgp[ray]' && python scripts/recipes/ray_sites.py

With ``--kill`` a worker dies in the middle of its first hour. Ray runs its task again,
from the same bytes, so the result is that of one process, which is computed as well.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import tempfile
from pathlib import Path

import ray
import sites


@ray.remote(max_retries=3)
def learn(state: bytes, site: int, hour: int, accident: str | None) -> bytes:
    """One site, one hour; where a file does not exist yet, its first worker dies."""
    if accident and not Path(accident).exists():
        Path(accident).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sites.work(state, [sites.shard(site, hour)])


def in_ray(hours: int, accident: str | None) -> bytes:
    """The model after some hours, every site a task."""
    base = pickle.dumps(sites.new_model())
    for hour in range(hours):
        sent = ray.put(base)  # once per machine, not once per task
        tasks = [
            learn.remote(sent, site, hour, accident if site == 1 else None)
            for site in range(3)
        ]
        base = sites.joined(ray.get(tasks), base)
        print(sites.report(hour, base))
    return base


def in_one_process(hours: int) -> bytes:
    """The same, one site after the other."""
    base = pickle.dumps(sites.new_model())
    for hour in range(hours):
        states = [sites.work(base, [sites.shard(site, hour)]) for site in range(3)]
        base = sites.joined(states, base)
    return base


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=int, default=3)
    parser.add_argument("--kill", action="store_true", help="let a worker die")
    chosen = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        accident = Path(folder) / "accident" if chosen.kill else None
        base = in_ray(chosen.hours, accident and str(accident))
        if accident:
            print(f"a worker was killed: {accident.exists()}")
    ray.shutdown()
    apart = sites.difference(base, in_one_process(chosen.hours))
    print(f"differs from one process by {apart:.1e}")

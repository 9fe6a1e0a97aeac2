"""Three sites as Ray tasks, joined every hour.

pip install ray && python scripts/recipes/ray_sites.py
"""

from __future__ import annotations

import pickle

import ray
import sites


@ray.remote
def learn(state: bytes, site: int, hour: int) -> bytes:
    """One site, one hour."""
    return sites.work(state, [sites.shard(site, hour)])


if __name__ == "__main__":
    ray.init(num_cpus=2)
    base = pickle.dumps(sites.new_model())
    for hour in range(3):
        sent = ray.put(base)  # once per machine, not once per task
        states = ray.get([learn.remote(sent, site, hour) for site in range(3)])
        base = sites.joined(states, base)
        print(sites.report(hour, base))
    ray.shutdown()

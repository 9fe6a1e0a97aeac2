"""Models of three sites merged.

    python scripts/benchmark.py merge --data-dir DIR

Three models with default settings each learn a part of a stream and are merged. They
are compared with one model that saw the whole stream. In "regions" each site has a
third of the batches, one after the other, so it knows a third of the inputs. In "turns"
it has every third datum. Seconds are processor time.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from torch_ssgp import merge
from workbench.baselines import Streaming, normal_scores
from workbench.common import bench_parser, positive
from workbench.results import Row, Table, header
from workbench.runner import small
from workbench.streams import Stream
from workbench.streams.cases import FILES, Asked, stream_of

NAMES = ("stream", "parts", "method", "seed")
SITES, INDUCING = 3, 100
STREAMS = ("elevators", "terrain")
ALL, MERGED, LEARNED = "one stream", "merged", "merged and learned"
PARTS = ("regions", "turns")


def parts_of(stream: Stream, how: str) -> list[list[tuple[Tensor, Tensor]]]:
    """The batches of every site."""
    if how == "all":
        return [stream.batches]
    if how == "turns":
        return [
            [(x[k::SITES], y[k::SITES]) for x, y in stream.batches]
            for k in range(SITES)
        ]
    ends = [len(stream) * k // SITES for k in range(SITES + 1)]
    return [stream.batches[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]


def site_row(
    name: str, how: str, method: str, seed: int, data_dir: Path | None, quick: bool
) -> Row:
    """One model of a whole stream, or three that were merged."""
    stream = stream_of(name, Asked(seed, 0, data_dir))
    stream = small(stream) if quick else stream
    parts, start = parts_of(stream, how), time.process_time()
    size = stream.x_test.size(-1), 20 if quick else INDUCING
    sites = [Streaming(*size) for _ in parts]
    for site, batches in zip(sites, parts, strict=True):
        for x, y in batches:
            site.update(x, y)
    merging = time.process_time()
    if method != ALL:
        learns = {"learn_hyperparameters": method == LEARNED}
        sites[0].model = merge([site.model for site in sites], **learns)
    end = time.process_time()
    return {
        "data": int(sites[0].model.num_data),
        "M": INDUCING,
        **normal_scores(*sites[0].predict(stream.x_test), stream.y_test),
        "cpu_seconds": end - start,
        "merge_seconds": end - merging,
    }


def main(arguments: list[str]) -> None:
    """Run what is missing."""
    parser = bench_parser(__doc__, "data/merge.json")
    parser.add_argument("--seeds", type=positive, default=1, help="(1)")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    pairs = [("all", ALL), *product(PARTS, (MERGED, LEARNED))]
    jobs = {
        (name, *pair, seed): partial(
            site_row, name, *pair, seed, chosen.data_dir, chosen.quick
        )
        for name in STREAMS
        if name not in FILES or chosen.data_dir
        for pair in pairs
        for seed in range(chosen.seeds)
    }
    made = header(sites=SITES, inducing=INDUCING, quick=chosen.quick)
    table = Table(chosen.out, NAMES, made)
    table.run(jobs, again=chosen.again, workers=chosen.workers)

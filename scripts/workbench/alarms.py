"""False alarms of thresholds on ``surprise`` and ``alarm``, and what they find.

    python scripts/benchmark.py alarms

Streams of :func:`workbench.change_streams.still`, single points and batches: nothing
changes in them, so whatever is above a threshold is a false alarm. Then one datum more,
off by some noise levels: whether its surprise is above it. The first data of a stream,
while hyperparameters are integrated out, are not counted.
"""

from __future__ import annotations

from pathlib import Path

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from torch_ssgp import StreamingGP
from workbench.change_streams import still
from workbench.common import DOCS, new_parser
from workbench.results import Row, Table, header

SIZES = {1: 120, 10: 20}  # data in a batch, and batches
EARLY = 30  # data that are not counted
OFFSET = 7.0  # noise levels of a bad reading
THRESHOLDS = (2.0, 5.0, 10.0)  # nats


def stream_rows(batch: int, seed: int, batches: int) -> list[Row]:
    """One stream: counts by threshold.

    Args:
        batch: Data in a batch.
        seed: Of the stream.
        batches: Before something changes.
    """
    stream = still(batch, batches, seed)
    dims, noise = stream.x_test.size(-1), (0.1, 0.5)[seed // 2 % 2]
    model = StreamingGP(ScaleKernel(RBFKernel(ard_num_dims=dims)), num_inducing=30)
    model, quiet = model.double(), []
    for x, y in stream.batches:
        result = model.update(x, y)
        if int(model.num_data) > EARLY:
            quiet.append((float(result.surprise), float(result.alarm)))
    surprise = float(
        model.surprise(stream.x_test[:1], stream.f_test[:1] + OFFSET * noise)
    )
    rows = []
    for nats in THRESHOLDS:
        every = zip(*quiet, strict=True)
        surprised, alarmed = (sum(v > nats for v in each) for each in every)
        rows.append(
            {
                "nats": nats,
                "updates": len(quiet),
                "surprise above": surprised,
                "alarm above": alarmed,
                "bad reading above": float(surprise > nats),
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write the rows."""
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=12, help="streams of each kind")
    parser.add_argument("--quick", action="store_true", help="as small as can be")
    parser.add_argument("--out", default=str(DOCS / "data/alarms.json"), help="file")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = Table(Path(chosen.out), ["batch", "seed", "nats"], header())
    for batch, batches in SIZES.items():
        for seed in range(1 if chosen.quick else chosen.seeds):
            torch.manual_seed(0)
            count = max(batches // 3, 5) if chosen.quick else batches
            for row in stream_rows(batch, seed, count):
                table.add({"batch": batch, "seed": seed, **row})
                print(row, flush=True)

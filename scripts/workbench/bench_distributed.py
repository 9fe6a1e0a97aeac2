"""Messages between processes that share an update, and their cost.

    python scripts/benchmark.py distributed --out docs/data/distributed.json
    python scripts/benchmark.py distributed --cases 100,200,4000 --ranks 1 2

The cases are numbers of inducing points M, sizes of the memory R and batches of N data,
with two inputs. For each, the script counts the bytes and messages of a step of the
inner loop and of the rest of an update. It also measures the time of a step with 1
process (a plain model) and with more, each on one thread: the processor time of the
slowest rank, and the wall-clock time. ``ratio`` is the processor time with 1 process
divided by that with several. Ranks are processes on this machine, so ``clock ratio`` is
only meaningful with as many free cores as ranks.

The estimate takes the time of a step at 1 process as t0 + N t1. All of the time with
the smallest batch is counted as t0, which no rank can divide. Ranks are as fast as that
process, with a link of 10 Gbit/s and 50 microseconds of latency:

    t0 + N t1 / P + 2 (P - 1) / P bytes / link + 2 messages log2(P) latency
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_ssgp.distributed import DistributedStreamingGP
from workbench.baselines import small_budget
from workbench.bench_memory import Budget, new_model
from workbench.common import ROOT, new_parser, positive
from workbench.pages import markdown
from workbench.results import Row, Table, header, read

NAMES = ("table", "M", "R", "N", "ranks")
DIMS = 2
STEPS = 12  # of which the first and the last are not counted
LINK = 1.25e9  # bytes per second: 10 Gbit/s
LATENCY = 50e-6  # seconds per message
FUTURE = 64  # ranks of the estimate


class Case(NamedTuple):
    """Sizes: inducing points, points of the memory, data of a batch."""

    M: int
    R: int
    N: int


CASES = tuple(
    Case(M, R, N)
    for M, R in ((50, 100), (100, 200), (100, 400), (200, 400))
    for N in (500, 4_000, 16_000)
)


def draw(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Data of a smooth function with noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num, DIMS, generator=generator, dtype=torch.float64)
    noise = torch.randn(num, generator=generator, dtype=torch.float64)
    return x, (6 * x).sin().sum(-1) + 0.1 * noise


def measure(case: Case, rank: int, size: int) -> Row:
    """One update with a memory that is full; what its steps took and sent."""
    model = new_model(DIMS, Budget(case.M, case.R))
    x, y = draw(2 * case.R, 0)
    z = x[: case.M]
    with small_budget():
        model.update(x, y, num_steps=0, inducing_points=z)
    x, y = draw(case.N, 1)
    ticks: list[tuple[float, float, int, int]] = []
    wrapped = DistributedStreamingGP(model, shard_above=1) if size > 1 else None

    def tick(step: int, bound: Tensor) -> None:
        ranks = wrapped.ranks if wrapped else None
        sent = (ranks.num_bytes, ranks.num_messages) if ranks else (0, 0)
        ticks.append((time.perf_counter(), time.process_time(), *sent))

    options = {
        "num_steps": STEPS,
        "learn_hyperparameters": True,
        "inducing_points": z,
        "callback": tick,
    }
    start = (wrapped.ranks.num_bytes, wrapped.ranks.num_messages) if wrapped else (0, 0)
    mine = slice(case.N * rank // size, case.N * (rank + 1) // size)
    update = wrapped.update if wrapped else model.update
    with small_budget():
        update(x[mine], y[mine], **options)  # type: ignore[operator]
    clock, cpu = (
        1e3 * statistics.median([b[k] - a[k] for a, b in pairwise(ticks[1:-1])])
        for k in (0, 1)
    )
    first, second = ticks[1], ticks[2]
    if wrapped:
        cpu = max(wrapped.ranks.everyones(cpu))
    row: Row = {**case._asdict(), "ranks": size}
    row |= {"ms_per_step": cpu, "clock ms": clock}
    if wrapped:
        per_step = second[2] - first[2]
        every = wrapped.ranks.num_bytes - start[0]
        row |= {
            "bytes_per_step": per_step,
            "messages_per_step": second[3] - first[3],
            "bytes_per_update": every - STEPS * per_step,
        }
    return row


def worker(cases: list[Case]) -> None:
    """What every rank does; the first one prints rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for case in cases:
        row = measure(case, rank, size)
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def run(cases: list[Case], size: int) -> list[Row]:
    """Rows of so many processes."""
    text = [",".join(map(str, case)) for case in cases]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={size}", str(ROOT / "scripts/benchmark.py")]
    command += ["distributed", "worker", "--cases", *text]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def predicted_bytes(M: int, num_hyperparameters: int = DIMS + 3) -> int:
    """Bytes of a step: half of a symmetric matrix, a vector, gradients, the bound."""
    products = M * (M + 1) // 2 + M + 1
    gradients = num_hyperparameters + M * DIMS
    return 8 * (products + gradients + 1)


def estimate(rows: list[Row], num_ranks: int = FUTURE) -> list[Row]:
    """What many ranks with a fast link would do, from what was measured."""
    alone = {(r["M"], r["R"], r["N"]): r for r in rows if r["ranks"] == 1}
    sent = {(r["M"], r["R"]): r for r in rows if r["ranks"] == 2}
    found = []
    for M, R in dict.fromkeys((key[0], key[1]) for key in alone):
        sizes = sorted(key[2] for key in alone if key[:2] == (M, R))
        if len(sizes) < 2 or (M, R) not in sent:
            continue
        low, high = (alone[M, R, N]["ms_per_step"] for N in (sizes[0], sizes[-1]))
        per_datum = max(high - low, 0.0) / (sizes[-1] - sizes[0])
        fixed = low
        row = sent[M, R]
        share = 2 * (num_ranks - 1) / num_ranks
        talk = share * row["bytes_per_step"] / LINK
        talk += 2 * row["messages_per_step"] * math.log2(num_ranks) * LATENCY
        for N in (16_000, 160_000, 1_600_000):
            one = fixed + per_datum * N
            many = fixed + per_datum * N / num_ranks + 1e3 * talk
            found.append(
                {
                    "M": M,
                    "R": R,
                    "N": N,
                    "ranks": num_ranks,
                    "ms_at_1": one,
                    "ms_talking": 1e3 * talk,
                    "ms_at_64": many,
                    "speedup": one / many,
                }
            )
    return found


def with_ratios(rows: list[Row]) -> list[Row]:
    """Times at more than one process, as ratios to those at one."""
    alone = {(r["M"], r["R"], r["N"]): r for r in rows if r["ranks"] == 1}
    for row in rows:
        one = alone.get((row["M"], row["R"], row["N"]))
        if row["ranks"] > 1 and one is not None:
            row["ratio"] = one["ms_per_step"] / row["ms_per_step"]
            row["clock ratio"] = one["clock ms"] / row["clock ms"]
            row["predicted_bytes"] = predicted_bytes(row["M"])
    return rows


def case_of(text: str) -> Case:
    """Sizes of the command line: ``M,R,N``."""
    return Case(*(positive(part) for part in text.split(",")))


def main(arguments: list[str] | None = None) -> None:
    """Measure, estimate, keep and print."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "command",
        nargs="?",
        choices=["measure", "worker", "tables"],
        default="measure",
        help="measure, be one of the ranks, or print the tables",
    )
    parser.add_argument("--out", type=Path, default=Path("out/distributed.json"))
    parser.add_argument("--cases", nargs="*", type=case_of, default=list(CASES))
    parser.add_argument("--ranks", nargs="*", type=positive, default=[1, 2])
    chosen = parser.parse_args(arguments)
    if chosen.command == "worker":
        return worker(chosen.cases)
    if chosen.command == "measure":
        rows = [row for size in chosen.ranks for row in run(chosen.cases, size)]
        settings = {"steps": STEPS, "inputs": DIMS, "link": LINK, "latency": LATENCY}
        table = Table(chosen.out, NAMES, header(backend="gloo", **settings))
        for row in with_ratios(rows):
            table.add({"table": "measured", **row})
        for row in estimate(rows):
            table.add({"table": "estimated", **row})
    print(markdown(read(chosen.out).rows, hide=("version", "table")))

"""Messages between processes that share an update, and their cost.

    python scripts/benchmark.py distributed
    python scripts/benchmark.py distributed --cases 100,4000 --ranks 1 2

The cases are numbers of inducing points M and batches of N data, with two inputs. For
each, bytes and messages of a step of the inner loop and of the rest of an update are
counted where they are sent, and a step is timed with 1 process (a plain model) and with
more, each on one thread: the processor time of the slowest rank, and the wall-clock
time. Ranks are processes on this machine, so the clock is only meaningful with as many
free cores as ranks.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise, product
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_ssgp.distributed import DistributedStreamingGP
from workbench.baselines import new_kernel
from workbench.batch_bound import at_once
from workbench.common import ROOT, bench_parser, positive
from workbench.results import Row, Table, header, quiet
from workbench.streams import generator, with_noise

NAMES = ("M", "N", "ranks")
STEPS = 12  # of which the first and the last are not counted


class Case(NamedTuple):
    """Sizes: inducing points and data of a batch."""

    M: int
    N: int


CASES = [Case(*each) for each in product((50, 100, 200), (500, 4_000, 16_000))]


def measure(case: Case, rank: int, size: int) -> Row:
    """One update of a model that has been compressed: its steps, and what they sent."""
    gen = generator(0)
    x = torch.rand(2 * case.M + case.N, 2, generator=gen, dtype=torch.float64)
    y = with_noise((6 * x).sin().sum(-1), 0.1, gen)
    model, z, first = at_once(new_kernel(2), case.M), x[: case.M], 2 * case.M
    model.update(x[:first], y[:first], num_steps=0, inducing_points=z)
    wrapped = DistributedStreamingGP(model, shard_above=1) if size > 1 else None
    ticks: list[tuple[float, ...]] = []  # clock, processor, bytes, messages

    def tick(*_: object) -> None:
        sent = (0, 0)
        if wrapped:
            sent = (wrapped.ranks.num_bytes, wrapped.ranks.num_messages)
        ticks.append((time.perf_counter(), time.process_time(), *sent))

    tick()
    mine = slice(first + case.N * rank // size, first + case.N * (rank + 1) // size)
    options = {"learn_hyperparameters": True, "inducing_points": z, "callback": tick}
    update = wrapped.update if wrapped else model.update
    update(x[mine], y[mine], num_steps=STEPS, **options)
    tick()
    start, *inner, end = ticks
    clock, cpu = (
        1e3 * statistics.median([b[k] - a[k] for a, b in pairwise(inner[1:-1])])
        for k in (0, 1)
    )
    row: Row = {**case._asdict(), "ranks": size, "clock ms": clock, "ms": cpu}
    if wrapped:
        row["ms"] = max(wrapped.ranks.everyones(cpu))
        row["bytes / step"] = inner[2][2] - inner[1][2]
        row["messages / step"] = inner[2][3] - inner[1][3]
        row["bytes / update"] = end[2] - start[2] - len(inner) * row["bytes / step"]
    return row


def worker(cases: list[Case]) -> None:
    """What every rank does; the first one prints rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for case in cases:
        with quiet():
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


def case_of(text: str) -> Case:
    """Sizes of the command line: ``M,N``."""
    return Case(*(positive(part) for part in text.split(",")))


def main(arguments: list[str]) -> None:
    """Measure, and keep; times at more than one process are ratios to those at one."""
    parser = bench_parser(__doc__, "data/distributed.json")
    parser.add_argument("command", nargs="?", choices=["measure", "worker"])
    parser.add_argument("--cases", nargs="*", type=case_of, default=CASES)
    parser.add_argument("--ranks", nargs="*", type=positive, default=[1, 2])
    chosen = parser.parse_args(arguments)
    cases = [Case(5, 60)] if chosen.quick else chosen.cases
    if chosen.command == "worker":
        return worker(cases)
    table = Table(chosen.out, NAMES, header(backend="gloo", steps=STEPS))
    for size in chosen.ranks:
        for row in run(cases, size):
            alone = table.rows().get((row["M"], row["N"], 1))
            if size > 1 and alone:
                row["times faster"] = alone["ms"] / row["ms"]
            table.add(row)

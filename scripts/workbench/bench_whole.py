"""Whole streams: this version, another one, and all data at once.

Each version runs in a process of its own, started with its folder on the path, batch by
batch in turns with the other: what else the machine does hits both alike.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from tqdm import tqdm

from torch_ssgp import StreamingGP
from workbench import streams
from workbench.common import ROOT
from workbench.results import Row

SCRIPTS = ROOT / "scripts"
CHUNK = 1000  # test points predicted at once


class Case(NamedTuple):
    """A stream and a number of inducing points."""

    stream: str
    M: int
    N: int

    def data(self) -> streams.Stream:
        """The stream, in batches of ``N``."""
        make = {"pseudo-periodic": streams.pseudo_periodic, "audio": streams.audio}
        return make[self.stream](batch=self.N)


CASES = tuple(
    Case(*case)
    for case in itertools.product(("pseudo-periodic", "audio"), (100, 200), (300, 500))
)


def whole(old: Path, count: int | None = None) -> list[Row]:
    """Processor seconds and errors of whole streams with defaults.

    Args:
        old: The folder of the other version.
        count: How many of the cases; all by default.
    """
    rows: list[Row] = []
    for case in tqdm(CASES[:count], desc="whole streams"):
        with ExitStack() as stack:
            ours, theirs = (Worker(path, case, stack) for path in (ROOT, old))
            for _ in range(len(case.data())):
                ours.ask("next")
                theirs.ask("next")
            new, other = ours.ask("done"), theirs.ask("done")
            batch = Worker(ROOT, case, stack).ask("batch")
        row: Row = {"table": "whole", **case._asdict()}
        for name, found in (("", new), ("old ", other), ("batch ", batch)):
            row[f"{name}seconds"], row[f"{name}RMSE"] = found
        row["times old"] = new[0] / other[0]
        row["times batch"] = new[0] / batch[0]
        rows.append(row)
    return rows


class Worker:
    """A process with a version of the package, which follows a stream when asked to.

    Args:
        path: The folder of the version.
        case: The stream.
        stack: Ends the process.
    """

    def __init__(self, path: Path, case: Case, stack: ExitStack) -> None:
        paths = os.pathsep.join([str(path), str(SCRIPTS)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "workbench.bench_whole", *map(str, case)],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            cwd=path,  # the first place where Python looks
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(self.process)
        stack.callback(self.process.kill)

    def ask(self, what: str) -> Any:
        """Processor seconds so far and the error on test data, if all is done."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("A process that was to follow a stream has ended.")
        return json.loads(line)


def serve(case: Case) -> None:
    """Follow a stream, batch by batch; the version is that of this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data, seconds = case.data(), 0.0
    model, batches = _new_model(case), iter(data.batches)
    for line in sys.stdin:
        answer: Any = None
        start = time.process_time()
        if line.strip() == "next":
            model.update(*next(batches))
        elif line.strip() == "batch":
            # As workbench.baselines.BatchSGPR.
            all_data = data.x_train, data.y_train
            model.update(*all_data, num_steps=50)
            z = model.summary.inducing_points
            model = _new_model(case)
            model.update(*all_data, num_steps=300, optimizer="lbfgs", inducing_points=z)
        seconds += time.process_time() - start
        if line.strip() != "next":
            with torch.no_grad():
                mean = torch.cat([model(x).mean for x in data.x_test.split(CHUNK)])
            answer = seconds, (mean - data.y_test).square().mean().sqrt().item()
        print(json.dumps(answer), flush=True)


def _new_model(case: Case) -> StreamingGP:
    return StreamingGP(ScaleKernel(RBFKernel()), num_inducing=case.M).double()


if __name__ == "__main__":
    name, *sizes = sys.argv[1:]
    serve(Case(name, *map(int, sizes)))

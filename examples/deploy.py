"""Train with GPyTorch, predict without it.

The example learns a stream, exports the model as plain tensors, and writes it to a
file. A second process loads the file and imports only torch. Run
``python examples/deploy.py``: it prints how much the predictions differ and how much
faster one row is, and saves out/deploy.pt2.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

from torch_ssgp import StreamingGP

# What runs elsewhere. It gets the file, inputs, and where to write its answer.
SERVER = """
import sys
import torch

predict = torch.export.load(sys.argv[1]).module()
mean, variance = predict(torch.load(sys.argv[2]))
torch.save((mean, variance), sys.argv[3])
packages = {name.partition(".")[0] for name in sys.modules}
print(",".join(sorted(packages & {"gpytorch", "linear_operator", "torch_ssgp"})))
"""


class Deployed(NamedTuple):
    """What the example shows.

    Attributes:
        difference: Largest difference of means and variances of both processes.
        imported: Packages of the training stack that the second process imported.
        ratio: Time of one row through the model, over that of the exported one.
    """

    difference: float
    imported: str
    ratio: float


def main(
    num_batches: int = 5,
    num_steps: int = 50,
    repeats: int = 50,
    out: str | Path = "out",
) -> Deployed:
    """Learn, export, save, load elsewhere, compare.

    Args:
        num_batches: Batches of 100 data.
        num_steps: Budget of the inner loop of each update.
        repeats: Repetitions of what is timed.
        out: Folder for the file.
    """
    model = learn(num_batches, num_steps)
    exported = model.export()

    path = Path(out) / "deploy.pt2"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = torch.export.Dim("rows")
    program = torch.export.export(
        exported, (torch.zeros(2, 2),), dynamic_shapes={"x": {0: rows}}
    )
    torch.export.save(program, path)
    print(f"file: {path}, {path.stat().st_size / 1000:.0f} kB")

    x = torch.rand(1000, 2, generator=torch.Generator().manual_seed(1)) * 6
    prediction = model.predict(x)
    (mean, variance), imported = elsewhere(path, x)
    difference = max(
        (mean - prediction.mean).abs().max().item(),
        (variance - prediction.variance).abs().max().item(),
    )
    print(f"largest difference to the model, {len(x)} rows: {difference:.1e}")
    print(f"of the training stack the second process imported: {imported or 'nothing'}")

    row = x[:1]
    with torch.no_grad():
        through_model, plain = alternate(
            [lambda: moments(model.predict(row)), lambda: exported(row)], repeats
        )
    ratio = through_model / plain
    print(
        f"one row: {1e3 * through_model:.2f} ms through the model, "
        f"{1e3 * plain:.2f} ms exported, {ratio:.1f} times faster"
    )
    return Deployed(difference, imported, ratio)


def learn(num_batches: int, num_steps: int) -> StreamingGP:
    """A model of a stream of two inputs."""
    generator = torch.Generator().manual_seed(0)
    model = StreamingGP(ScaleKernel(MaternKernel(ard_num_dims=2)), num_inducing=100)
    for _ in range(num_batches):
        x = 6 * torch.rand(100, 2, generator=generator)
        noise = 0.1 * torch.randn(100, generator=generator)
        y = torch.sin(2 * x[:, 0]) + 0.3 * x[:, 1] + noise
        model.update(x, y, num_steps=num_steps)
    return model


def elsewhere(path: Path, x: Tensor) -> tuple[tuple[Tensor, Tensor], str]:
    """Mean and variance from another process, and what it had to import."""
    asked, answered = path.with_suffix(".x.pt"), path.with_suffix(".y.pt")
    torch.save(x, asked)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", SERVER, str(path), str(asked), str(answered)],
            capture_output=True,
            text=True,
        )
        if ended.returncode:
            raise SystemExit(f"The second process failed:\n{ended.stderr}")
        return torch.load(answered), ended.stdout.strip()
    finally:
        for file in (asked, answered):
            file.unlink(missing_ok=True)


def moments(prediction: Any) -> tuple[Tensor, Tensor]:
    """Mean and variance, which a distribution computes when it is asked."""
    return prediction.mean, prediction.variance


def alternate(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median processor seconds of each call; they take turns, on the same machine."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, seconds in zip(calls, times, strict=True):
            start = time.process_time()
            call()
            seconds.append(time.process_time() - start)
    return [median(seconds) for seconds in times]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--num-steps",
        type=int,
        default=50,
        help="limit on gradient steps per update (%(default)s)",
    )
    parser.add_argument(
        "--out", default="out", help="folder for the file (%(default)s)"
    )
    main(**vars(parser.parse_args()))

"""Ten thousand updates of one model: do bytes, time and resident memory stay flat?

    python scripts/benchmark.py flat --out docs/data/flat.json

Single points with default settings, of a function that stays. The first 100 updates
fill the memory; what comes after is cut into ten windows. Updates that learn are rare
and dear, so the time of a window is the median of its updates, and the mean beside it.
"""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path

import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor
from tqdm import tqdm

from torch_ssgp import StreamingGP
from workbench.common import DOCS, new_parser, positive, resident_mib
from workbench.pages import markdown, paragraphs
from workbench.results import Contents, Row, header, write

UPDATES, WARM, WINDOWS = 10_000, 100, 10
INDUCING = 20
OUT = DOCS / "data" / "flat.json"


def live_bytes() -> int:
    """Bytes of all tensors that the process can reach."""
    gc.collect()
    tensors = (obj for obj in gc.get_objects() if issubclass(type(obj), Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def run(updates: int = UPDATES) -> list[Row]:
    """A row for each window."""
    gen = torch.Generator().manual_seed(0)
    model = StreamingGP(ScaleKernel(MaternKernel()), num_inducing=INDUCING).double()
    edges = torch.linspace(WARM, updates, WINDOWS + 1).long().tolist()[1:]
    rows: list[Row] = []
    seconds: list[float] = []
    for k in tqdm(range(1, updates + 1), desc="flat"):
        x = 4 * torch.rand(1, 2, generator=gen, dtype=torch.float64)
        noise = 0.1 * torch.randn(1, generator=gen, dtype=torch.float64)
        start = time.process_time()
        model.update(x, torch.sin(2 * x[:, 0]) + x[:, 1].cos() + noise)
        if k > WARM:
            seconds.append(time.process_time() - start)
        if k in edges:
            rows.append(
                {
                    "updates": k,
                    "live_bytes": live_bytes(),
                    "median_ms": 1e3 * statistics.median(seconds),
                    "mean_ms": 1e3 * statistics.mean(seconds),
                    "resident_MiB": resident_mib(),
                }
            )
            seconds = []
    return rows


def section(file: Contents) -> str:
    """The part of the page."""
    first, last = file.rows[0], file.rows[-1]
    ratios = {
        name: last[name] / first[name]
        for name in ("live_bytes", "median_ms", "resident_MiB")
    }
    return paragraphs(
        "## Ten thousand updates",
        f"Written by `scripts/benchmark.py flat` (torch_ssgp "
        f"{file.header['torch_ssgp']}): single points with default settings, "
        f"{INDUCING} inducing points, by windows of the stream. From the first window "
        f"to the last, the bytes of all live tensors change by a factor of "
        f"{ratios['live_bytes']:.3f}, the median time of an update by "
        f"{ratios['median_ms']:.2f}, and resident memory by "
        f"{ratios['resident_MiB']:.3f}.",
        markdown(file.rows),
    )


def main(arguments: list[str] | None = None) -> None:
    """Run, write the file and print it."""
    parser = new_parser(__doc__)
    parser.add_argument("--updates", type=positive, default=UPDATES)
    parser.add_argument("--out", type=Path, default=OUT, help=f"({OUT.name})")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = run(chosen.updates)
    write(chosen.out, header(inducing=INDUCING, warm=WARM), rows)
    print(markdown(rows))

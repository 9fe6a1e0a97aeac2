"""One row through a model, and through its exported module.

    python scripts/benchmark.py export              the table, and its place in the docs
    python scripts/benchmark.py export --page       its place in the docs alone

Both compute the mean and variance of targets, in turns, on one thread. Times are
medians of processor time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gpytorch.kernels import (
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood
from torch import Tensor

from torch_ssgp import StreamingGP
from workbench.baselines import small_budget
from workbench.bench_core import median_times
from workbench.common import DOCS, new_parser, positive
from workbench.pages import markdown, paragraphs, wrapped
from workbench.results import Contents, Row, header, read, write

REPEATS = 50  # turns
CALLS = 10  # of each in a turn, as where rows are served one after the other
BAR = 5  # times faster: what was asked for
NUM_DIMS = 2
SIZES = (20, 100)  # inducing points
ROWS = (1, 1000)
KERNELS: dict[str, Callable[[], Kernel]] = {
    "RBF": lambda: ScaleKernel(RBFKernel(ard_num_dims=NUM_DIMS)),
    "Matérn 5/2": lambda: ScaleKernel(MaternKernel(ard_num_dims=NUM_DIMS)),
    "RBF x periodic + linear": lambda: (
        ScaleKernel(RBFKernel(active_dims=[0]) * PeriodicKernel(active_dims=[1]))
        + LinearKernel()
    ),
}
CASES: dict[str, tuple[str, Callable[[], Likelihood]]] = {
    **{name: (name, GaussianLikelihood) for name in KERNELS},
    "Matérn 5/2, labels": ("Matérn 5/2", BernoulliLikelihood),
}
MARKS = ("<!-- speed -->", "<!-- end of speed -->")


def learned(case: str, num_inducing: int) -> StreamingGP:
    """A model of a few hundred data with as many inducing points as it may have."""
    name, likelihood = CASES[case]
    generator = torch.Generator().manual_seed(0)
    x = 6 * torch.rand(4 * num_inducing, NUM_DIMS, generator=generator)
    y = torch.sin(2 * x[:, 0]) + 0.3 * x[:, 1].cos()
    if likelihood is BernoulliLikelihood:
        y = (y > 0).to(x)
    else:
        y = y + 0.1 * torch.randn(len(y), generator=generator)
    model = StreamingGP(KERNELS[name](), likelihood(), num_inducing=num_inducing)
    with small_budget():
        model.update(x, y, num_steps=5)
    return model


def through_model(model: StreamingGP, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance, which a distribution computes when it is asked."""
    prediction = model.predict(x)
    return prediction.mean, prediction.variance


def call(job: Callable[[], object], times: int) -> None:
    """So many times in a row."""
    for _ in range(times):
        job()


@torch.no_grad()
def compare(case: str, num_inducing: int, rows: int, repeats: int) -> Row:
    """Both ways, in turns."""
    model = learned(case, num_inducing)
    exported = model.export()
    x = 6 * torch.rand(rows, NUM_DIMS, generator=torch.Generator().manual_seed(1))
    jobs = {"model": partial(through_model, model, x), "exported": partial(exported, x)}
    times = median_times(
        {name: partial(call, job, CALLS) for name, job in jobs.items()},
        repeats,
        time.process_time,
    )
    return {
        "kernel": case,
        "M": model.num_inducing,
        "rows": rows,
        "model, µs": round(1e6 * times["model"] / CALLS),
        "exported, µs": round(1e6 * times["exported"] / CALLS),
        "ratio": round(times["model"] / times["exported"], 1),
    }


def section(file: Contents) -> str:
    """What the docs say of speed."""
    single = [row["ratio"] for row in file.rows if row["rows"] == 1]
    reached = sum(ratio >= BAR for ratio in single)
    return wrapped(
        paragraphs(
            "Written by `scripts/benchmark.py export` (torch_ssgp "
            f"{file.header['torch_ssgp']}, torch {file.header['torch']}, one thread, "
            f"median of {file.header['repeats']} turns of {CALLS} calls, processor "
            "time). One row is "
            f"{min(single):.1f} to {max(single):.1f} times faster than through the "
            f"model, at least {BAR} times in {reached} of {len(single)} cases. The "
            "cost of one row is the overhead of starting its operations.",
            markdown(file.rows),
        )
    )


def placed(page: str, text: str) -> str:
    """The page with the text between its marks."""
    begin, end = MARKS
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n\n{text}\n{end}", page)


def main(arguments: list[str]) -> None:
    """Measure, print, write the rows and their place in the docs."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--repeats", type=positive, default=REPEATS, help=f"({REPEATS})"
    )
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder (docs)")
    chosen = parser.parse_args(arguments)
    path, page = chosen.out / "data" / "export.json", chosen.out / "export.md"
    if not chosen.page:
        torch.set_num_threads(1)
        rows = [
            compare(case, num_inducing, num_rows, chosen.repeats)
            for num_rows in ROWS
            for case in CASES
            for num_inducing in SIZES
        ]
        print(markdown(rows))
        write(path, header(repeats=chosen.repeats, clock="process_time"), rows)
    if page.exists():
        text = placed(page.read_text(encoding="utf-8"), section(read(path)))
        page.write_text(text, encoding="utf-8")

"""The picture of the README: one real stream that changes, predicted and then learned.

    python -m workbench.picture            in scripts/; writes docs/data/picture.json
    python -m workbench.picture --draw     the picture from what was written

Every model predicts a reading before it learns it. Ours is ``torch_ssgp.river`` with
its defaults. The paper's form keeps the past at the inducing points, with the noise it
had, and forgets nothing; when it learns is our choice, for both. Batch is an exact GP
with the same kernel and all data so far, its hyperparameters learned anew every
``EVERY`` readings. Of river's models the one with the smallest error is drawn.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from torch_ssgp import StreamingGP, UpdateOptions, stream
from torch_ssgp.estimators import default_kernel
from torch_ssgp.exceptions import StreamingGPWarning
from torch_ssgp.river import StreamingGPRegressor
from workbench import picture_page
from workbench.common import DOCS, new_parser, positive
from workbench.exact import dense, run_exact
from workbench.picture_page import BATCH, OURS, PAPER
from workbench.prequential import LEVEL, MODELS, SOURCES, Datum
from workbench.prequential_page import FORGETTING
from workbench.results import Row, header, read, write

STREAM, UNIT = "TrumpApproval", "approval, per cent"
LENGTH, FIRST, EVERY, INDUCING = 300, 10, 25, 50


def as_tensors(data: list[Datum]) -> tuple[Tensor, Tensor]:
    """Inputs ``(n, d)`` and targets ``(n,)``."""
    x = torch.tensor([[float(v) for v in x.values()] for x, _ in data])
    return x.double(), torch.tensor([float(y) for _, y in data]).double()


def ours(data: list[Datum]) -> Iterator[Row]:
    """Means, and intervals."""
    model = StreamingGPRegressor(num_inducing=INDUCING)
    for x, y in data:
        interval = model.predict_interval_one(x, LEVEL)
        yield {
            "mean": model.predict_one(x),
            "lower": interval.lower,
            "upper": interval.upper,
        }
        model.learn_one(x, y)


def rivers(name: str, data: list[Datum]) -> Iterator[Row]:
    """One of river's models."""
    model = MODELS["regression"][name]()
    for x, y in data:
        yield {"mean": float(model.predict_one(x) or 0.0)}
        model.learn_one(x, y)


def paper(data: list[Datum]) -> Iterator[Row]:
    """The past at the inducing points, with its noise; nothing is forgotten."""
    x, y = as_tensors(data)
    model = StreamingGP(
        default_kernel(x.size(-1)),
        num_inducing=INDUCING,
        memory_size=INDUCING,
        share_noise=False,
    ).double()
    options = UpdateOptions(forget=1.0)
    for x_new, y_new in zip(x, y, strict=True):
        with torch.no_grad():
            yield {"mean": float(model(x_new.unsqueeze(0)).mean)}
        next(stream(model, [(x_new.unsqueeze(0), y_new.unsqueeze(0))], options))


def batch(data: list[Datum]) -> Iterator[Row]:
    """All data so far; of the first readings their mean."""
    x, y = as_tensors(data)
    yield {"mean": 0.0}
    for n in range(1, len(data)):
        if n < FIRST:
            yield {"mean": float(y[:n].mean())}
            continue
        if n == FIRST or n % EVERY == 0:
            level, scale = y[:n].mean(), y[:n].std()
            kernel = default_kernel(x.size(-1)).double()
            kernel.base_kernel.lengthscale = x[:n].std(0).clamp(min=1e-3)
            target = (y - level) / scale
            model, _ = run_exact([kernel], x[:n], target[:n], num_steps=50, adam=None)
        with dense(), torch.no_grad():
            model.set_train_data(x[:n], target[:n], strict=False)
            yield {"mean": float(model(x[n : n + 1]).mean * scale + level)}


def run(name: str, data: list[Datum]) -> list[Row]:
    """The rows of one model."""
    torch.manual_seed(0)
    makers = {OURS: ours, PAPER: paper, BATCH: batch}
    maker = makers[name](data) if name in makers else rivers(name, data)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StreamingGPWarning)
        for k, row in enumerate(tqdm(maker, desc=name, total=len(data))):
            rows.append({"model": name, "k": k, "y": data[k][1], **row})
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and draw."""
    parser = new_parser(__doc__)
    parser.add_argument("--length", type=positive, default=LENGTH, help=f"({LENGTH})")
    parser.add_argument("--again", action="store_true", help="replace what there is")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder (docs)")
    chosen = parser.parse_args(arguments)
    path = chosen.out / "data" / "picture.json"
    if not chosen.draw:
        torch.set_num_threads(1)
        data = list(SOURCES[STREAM].data(None))[: chosen.length]
        settings = {"inducing": INDUCING, "every": EVERY, "length": len(data)}
        made = header(others=["river"], stream=STREAM, unit=UNIT, **settings)
        rows = [] if chosen.again or not path.exists() else read(path).rows
        done = {row["model"] for row in rows}
        for name in [*MODELS["regression"], BATCH, PAPER]:
            if name not in (*done, FORGETTING):
                rows += run(name, data)
                write(path, made, rows)
    picture_page.draw(read(path), chosen.out / "figures" / "picture.png")


if __name__ == "__main__":
    main()

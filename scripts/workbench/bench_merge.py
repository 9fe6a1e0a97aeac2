"""Models of three sites merged, and a hundred models merged.

    python scripts/benchmark.py merge --data-dir DIR --out docs/data/merge.json
    python scripts/benchmark.py merge many

``sites``: three models with default settings each learn a part of a stream and are
merged. They are compared with one model that saw the whole stream. In "regions" each
site has a third of the batches, one after the other, so it knows a third of the inputs.
In "turns" it has every third datum. ``many``: a hundred models in one call and as a
tree of pairs, with fixed hyperparameters and common inducing points; both give the same
numbers. Seconds are processor time. Memory is the peak beyond the level before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from torch_ssgp import StreamingGP, merge
from workbench import bench_cases, streams
from workbench.bench_memory import Budget, new_model
from workbench.common import new_parser, peak_mib, positive, reset_peak, resident_mib
from workbench.pages import markdown
from workbench.results import Row, Table, header
from workbench.running import follow, scores
from workbench.streams import Stream

NAMES = ("table", "stream", "parts", "method", "seed")
SITES = 3
ALL, MERGED, LEARNED = "one stream", "merged", "merged and learned"
PARTS = ("regions", "turns")
# Smaller than elsewhere, so that all of it takes minutes.
BUDGETS = {"elevators": 100, "terrain": 100}


def stream_of(name: str, seed: int, data_dir: Path | None) -> Stream:
    """The stream of a name; of the terrain every point, of its tests some."""
    if name == "terrain":
        return streams.rounded(streams.terrain(max_test=5_000), seed)
    return bench_cases.CASES[name].stream(seed, data_dir)


def parts_of(stream: Stream, how: str) -> list[list[tuple]]:
    """The batches of every site."""
    if how == "turns":
        return [
            [(x[k::SITES], y[k::SITES]) for x, y in stream.batches]
            for k in range(SITES)
        ]
    ends = [len(stream) * k // SITES for k in range(SITES + 1)]
    return [stream.batches[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]


def sites(
    name: str, seed: int, data_dir: Path | None, parts: Iterable[str] = PARTS
) -> Iterator[Row]:
    """Rows of the one stream, and of models merged."""
    stream = stream_of(name, seed, data_dir)
    budget, num_dims = Budget(BUDGETS[name], None), stream.x_test.size(-1)
    one = new_model(num_dims, budget)
    run = follow(one.update, stream.batches)
    key = {"table": "sites", "stream": name, "seed": seed}
    alone = _row(one, stream, run.seconds)
    yield {**key, "parts": "all", "method": ALL, **alone}
    for how in parts:
        models, spent = [], 0.0
        for batches in parts_of(stream, how):
            models.append(new_model(num_dims, budget))
            spent += follow(models[-1].update, batches).seconds
        for method, learns in ((MERGED, False), (LEARNED, True)):
            start = time.process_time()
            merged = merge(models, learn_hyperparameters=learns)
            seconds = time.process_time() - start
            row = _row(merged, stream, spent + seconds)
            yield {
                **key,
                "parts": how,
                "method": method,
                **row,
                "RMSE ratio": row["RMSE"] / alone["RMSE"],
                "MLL gain": row["MLL"] - alone["MLL"],
                "merge_seconds": seconds,
            }


def _row(model: StreamingGP, stream: Stream, seconds: float) -> Row:
    return {
        "data": int(model.memory.num_data.round()),
        "M": model.summary.num_inducing,
        "R": model.memory.num_points,
        **scores(model, stream),
        "cpu_seconds": seconds,
    }


def many(num_models: int = 100, num_inducing: int = 100, num_data: int = 300) -> Row:
    """Merge many models in one call and as a tree, and compare the ends."""
    generator = torch.Generator().manual_seed(0)
    z = torch.rand(num_inducing, 2, generator=generator, dtype=torch.float64)
    models = []
    for _ in range(num_models):
        x = torch.rand(num_data, 2, generator=generator, dtype=torch.float64)
        y = (6 * x).sin().sum(-1)
        y = y + 0.1 * torch.randn(num_data, generator=generator, dtype=torch.float64)
        model = new_model(2, Budget(num_inducing, None))
        model.covar_module.base_kernel.lengthscale = 0.3
        model.likelihood.noise = 0.01
        model.update(x, y, num_steps=0, inducing_points=z)
        models.append(model)

    def tree() -> StreamingGP:
        level = models
        while len(level) > 1:
            level = [merge(level[i : i + 2]) for i in range(0, len(level), 2)]
        return level[0]

    (once, *first), (pairs, *second) = (
        _measured(make) for make in (lambda: merge(models), tree)
    )
    x = torch.rand(1_000, 2, generator=generator, dtype=torch.float64)
    bounds = [model.summary.log_evidence for model in (once, pairs)]
    return {
        "models": num_models,
        "M": num_inducing,
        "data": int(once.memory.num_data),
        "mean differs": (once(x).mean - pairs(x).mean).abs().max().item(),
        "variance differs": (once(x).variance - pairs(x).variance).abs().max().item(),
        "bound differs": (bounds[0] / bounds[1] - 1).abs().item(),
        "one call, s": first[0],
        "one call, MiB": first[1],
        "tree, s": second[0],
        "tree, MiB": second[1],
    }


def _measured(make: Callable[[], StreamingGP]) -> tuple[StreamingGP, float, float]:
    """What comes out, seconds of the processor and the most memory it took."""
    reset_peak()
    start, before = time.process_time(), resident_mib()
    made = make()
    return made, time.process_time() - start, peak_mib() - before


def main(arguments: list[str] | None = None) -> None:
    """Run what is asked for, and keep it."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "command", nargs="?", choices=["sites", "many", "all"], default="all"
    )
    parser.add_argument("--out", type=Path, default=Path("out/merge.json"))
    parser.add_argument("--data-dir", type=Path, help="where UCI files are")
    parser.add_argument("--seeds", type=positive, default=1, help="splits (1)")
    parser.add_argument("--streams", nargs="*", choices=[*BUDGETS], help="only these")
    parser.add_argument("--parts", nargs="*", choices=PARTS, help="only these")
    parser.add_argument("--threads", type=positive, default=1, help="of torch (1)")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    table = Table(chosen.out, NAMES, header(budgets=BUDGETS, sites=SITES))
    if chosen.command != "sites":
        table.add({"table": "many", **many()})
    if chosen.command != "many":
        for name in chosen.streams or BUDGETS:
            for seed in range(chosen.seeds):
                some = chosen.parts or PARTS
                for row in sites(name, seed, chosen.data_dir, some):
                    table.add(row)
    print(markdown(list(table.rows().values()), hide=("version", "table")))

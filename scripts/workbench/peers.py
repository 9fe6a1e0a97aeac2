"""What our work costs beside that of peers, in units of a floor.

    python scripts/benchmark.py peers            docs/data/peers.json, docs/peers.md
    python scripts/benchmark.py peers --quick    small sizes, to see that all runs
    python scripts/benchmark.py peers --page     the page alone
    python scripts/benchmark.py peers streams --old PATH    whole streams, by this
        version and the one in PATH in turns, and all data at once; the rows join
        the file
    python scripts/gpu_check.py                  the same on a GPU, printed

The floor is what no sparse method avoids: one product A Aᵀ with A of M x N and one
Cholesky factorisation of M x M. Every time is the median of repetitions in which all
jobs take turns, on one thread; on a CPU it is time of the processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, nn
from tqdm import tqdm

from torch_ssgp import StreamingGP
from torch_ssgp.compression import OVERFLOW
from workbench import bench_core, bench_points
from workbench.baselines import small_budget
from workbench.bench_whole import whole
from workbench.common import DOCS, new_parser, positive
from workbench.pages import markdown, paragraphs, wrapped
from workbench.paper_form import paper_bound
from workbench.results import Contents, Row, header, read, write
from workbench.uncollapsed import SVGP

Job = Callable[[], object]
Device = torch.device | str

SIZES = ((100, 300), (200, 500), (600, 1000))
QUICK_SIZES = ((10, 20),)
NUM_EXACT = 400  # points of the exact GP that is conditioned
NUM_TEST = 1000  # points of a prediction
FANTASIES = (16, 4)  # sets, and points in each
MANY, MANY_INDUCING = 1000, 20
NUM_POINTS = 3000  # of a stream of single points

FLOOR = "floor"
STEP, STEP_2M = "gradient step, memory M", "gradient step, memory 2M"
PAPER, SVGP_STEP = "gradient step, the paper's form", "gradient step, GPyTorch SVGP"
CLOSED, SINGLE = "closed-form update", "single point, num_steps=0"
FANTASY_MODEL = f"single point, get_fantasy_model at {NUM_EXACT}"
CONDITION = "16 fantasies of 4 points"
CONDITION_EXACT = f"16 fantasies of 4 points, get_fantasy_model at {NUM_EXACT}"
PREDICT, PREDICT_SVGP = "1000 predictions", "1000 predictions, GPyTorch SVGP"


# ------------------------------------------------------------------------- the jobs


class Peer(NamedTuple):
    """Something to time.

    Attributes:
        run: What is timed.
        count: How often the work is done in it.
    """

    run: Job
    count: int = 1


def step_of(loss: Callable[[], Tensor], parameters: Iterator[nn.Parameter]) -> Job:
    """One step of Adam."""
    optimizer = torch.optim.Adam(parameters, lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


class Exact(gpytorch.models.ExactGP):
    """GPyTorch's exact GP."""

    def __init__(self, x: Tensor, y: Tensor, model: StreamingGP) -> None:
        mean, kernel, likelihood = deepcopy(model).prior()
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = mean, kernel
        self.eval()

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Prior at ``x``."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@torch.no_grad()
def exact_model(model: StreamingGP, x: Tensor) -> Exact:
    """An exact GP with the prior of a model, ready to be conditioned."""
    points = _some(NUM_EXACT, x)
    exact = Exact(points, _targets(points), model)
    exact(_some(10, x))
    return exact


def exact_job(model: StreamingGP, x: Tensor) -> Job:
    """A single point more for an exact GP."""
    exact, one = exact_model(model, x), _some(1, x)
    return torch.no_grad()(lambda: exact.get_fantasy_model(one, _targets(one)))


def peers_of(m: int, n: int, device: Device) -> dict[str, Peer]:
    """All that is timed at one size."""
    state = bench_core.stream_state(m, n, (), device=device)
    model, x, y, z = state
    finer = bench_core.stream_state(m, n, (), 2 * m, device)[0]
    A = torch.randn(m, n, dtype=x.dtype, device=device)
    eye = torch.eye(m, dtype=x.dtype, device=device)
    steps = [
        bench_core.gradient_step(bench_core.next_update(each, x, y), z)[1]
        for each in (model, finer)
    ]
    paper = paper_bound(model, z, 1e-6)
    svgp = SVGP(z.cpu(), _copy(model)).to(device)
    elbo = gpytorch.mlls.VariationalELBO(svgp.likelihood, svgp, num_data=n)
    exact = exact_model(model, x)
    x_test, four = _some(NUM_TEST, x), _some(FANTASIES[1], x)
    few = _some(10, x)
    values = _targets(four).expand(*FANTASIES)
    own, single = _copy(model), _copy(finer)
    stream = iter(_points(x))
    per_round = int(OVERFLOW * 2 * m)  # points that wait for one compression

    @torch.no_grad()
    def fantasies() -> Tensor:
        return model.condition_on_observations(four, values)(few).mean

    @torch.no_grad()
    def exact_fantasies() -> Tensor:
        return exact.get_fantasy_model(four, values)(few).mean

    def points() -> None:
        for _ in range(per_round):
            point = next(stream)
            single.update(point, _targets(point), num_steps=0, forget=1.0)

    @torch.no_grad()
    def predictions() -> tuple[Tensor, Tensor]:
        latent = model(x_test)
        return latent.mean, latent.variance

    predictor = SVGP(z.cpu(), _copy(model)).to(device).eval()

    @torch.no_grad()
    def svgp_predictions() -> tuple[Tensor, Tensor]:
        latent = predictor(x_test)
        return latent.mean, latent.variance

    return {
        FLOOR: Peer(lambda: torch.linalg.cholesky(A @ A.mT / n + eye)),
        STEP: Peer(steps[0]),
        STEP_2M: Peer(steps[1]),
        PAPER: Peer(step_of(lambda: -paper(x, y) / n, paper.parameters())),
        SVGP_STEP: Peer(step_of(lambda: -elbo(svgp(x), y), svgp.parameters())),
        CLOSED: Peer(
            lambda: own.update(x, y, num_steps=0, inducing_points=z, forget=1.0)
        ),
        SINGLE: Peer(points, per_round),
        FANTASY_MODEL: Peer(exact_job(model, x)),
        CONDITION: Peer(fantasies),
        CONDITION_EXACT: Peer(exact_fantasies),
        PREDICT: Peer(predictions),
        PREDICT_SVGP: Peer(svgp_predictions),
    }


def _copy(model: StreamingGP) -> StreamingGP:
    """A model that a job may change."""
    return deepcopy(model)


def _some(count: int, like: Tensor) -> Tensor:
    """Inputs in the unit square, others for every number."""
    generator = torch.Generator().manual_seed(count)
    return torch.rand(count, 2, dtype=like.dtype, generator=generator).to(like.device)


def _points(like: Tensor) -> Iterator[Tensor]:
    """Single points without end."""
    while True:
        yield from _some(10_000, like).unsqueeze(-2)


def _targets(x: Tensor) -> Tensor:
    return torch.sin(6 * x.sum(-1))


# ------------------------------------------------------------------------- the rows


def clock_of(device: Device) -> Callable[[], float]:
    """Time of the processor; of the wall where a GPU works, when it is done."""
    if torch.device(device).type == "cpu":
        return time.process_time

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock


def size_rows(m: int, n: int, repeats: int, device: Device) -> list[Row]:
    """All work of one size, as ratios to its floor."""
    peers = peers_of(m, n, device)
    jobs = {name: peer.run for name, peer in peers.items()}
    medians = bench_core.median_times(jobs, repeats, clock_of(device))
    each = {name: medians[name] / peers[name].count for name in peers}
    return [
        {
            "table": "sizes",
            "work": name,
            "M": m,
            "N": n,
            "ms": 1e3 * seconds,
            "ratio": seconds / each[FLOOR],
        }
        for name, seconds in each.items()
    ]


def many_rows(num_streams: int, repeats: int, device: Device) -> list[Row]:
    """Streams of one reading per update, in one call, against a single stream.

    A repetition is as many updates as wait for one compression of the memory.
    """
    m, missing = MANY_INDUCING, 0.2
    count = m // 2

    def job(batch: tuple[int, ...], share: float) -> Job:
        model = bench_core.stream_state(m, 2 * m, batch, 2 * m, device, 1.0)[0]
        generator = torch.Generator().manual_seed(0)

        def updates() -> None:
            for _ in range(count):
                x = torch.rand(*batch, 1, 2, dtype=model.dtype, generator=generator)
                y = _targets(x)
                if share:
                    silent = torch.rand(*batch, 1, generator=generator) < share
                    y = y.masked_fill(silent, torch.nan)
                model.update(x.to(device), y.to(device), num_steps=0, forget=1.0)

        return updates

    batch = (num_streams,)
    jobs = {
        "a single stream": job((), 0.0),
        "all have a reading": job(batch, 0.0),
        "20 % are missing": job(batch, missing),
    }
    times = bench_core.median_times(jobs, repeats, clock_of(device))
    alone = times["a single stream"] / count
    return [
        {
            "table": "many",
            "update of": f"{num_streams} streams, {name}",
            "M": m,
            "ms": 1e3 * times[name] / count,
            "single / stream": alone * num_streams / (times[name] / count),
        }
        for name in jobs
        if name != "a single stream"
    ]


def rows_of(
    sizes: tuple[tuple[int, int], ...],
    num_streams: int,
    repeats: int,
    device: Device = "cpu",
    num_points: int = NUM_POINTS,
) -> list[Row]:
    """All rows, in one run."""
    rows: list[Row] = []
    with small_budget():
        for m, n in tqdm(sizes, desc="peers"):
            rows += size_rows(m, n, repeats, device)
        batched = bench_core.batching_row(repeats, clock_of(device), device)
        rows.append({"table": "batch", "M": 50, "N": 100, "streams": 32, **batched})
        rows += many_rows(num_streams, repeats, device)
        model, x = bench_core.stream_state(100, 300, (), 200, device)[:2]
        fantasy_model = exact_job(model, x)
        return rows + bench_points.rows(fantasy_model, num_points, clock_of(device), x)


# ------------------------------------------------------------------------- the page


class Bar(NamedTuple):
    """What is to be shown, and what was.

    Attributes:
        text: The claim.
        found: The number behind it.
        met: Whether it holds.
    """

    text: str
    found: float
    met: bool


def at_most(text: str, found: float, limit: float) -> Bar:
    """A bar from above."""
    return Bar(f"{text} ≤ {limit:g}", found, found <= limit)


def at_least(text: str, found: float, limit: float) -> Bar:
    """A bar from below."""
    return Bar(f"{text} ≥ {limit:g}", found, found >= limit)


# Most times the floor that each size may take.
LIMITS = {
    (100, 300): {STEP: 20, CLOSED: 12},
    (200, 500): {STEP: 9, CLOSED: 6},
    (600, 1000): {STEP: 7, CLOSED: 4},
}
# Ours, the same work of a peer.
RIVALS = (
    (STEP, PAPER),
    (STEP, SVGP_STEP),
    (CONDITION, CONDITION_EXACT),
    (SINGLE, FANTASY_MODEL),
)


def bars(rows: list[Row]) -> list[Bar]:
    """What was to be reached, from the numbers of a run."""
    found: list[Bar] = []
    by_size: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        if row["table"] == "sizes":
            size = (row["M"], row["N"])
            by_size.setdefault(size, {})[row["work"]] = row["ratio"]
    for size, ratio in by_size.items():
        for work, limit in LIMITS.get(size, {}).items():
            found.append(at_most(f"{work} at {size}, floors", ratio[work], limit))
        text = f"the same with a memory of 2M at {size}, times that"
        found.append(at_most(text, ratio[STEP_2M] / ratio[STEP], 1.7))
        if size == SIZES[0]:
            text = f"{SINGLE} at {size}, times get_fantasy_model"
            found.append(at_most(text, ratio[SINGLE] / ratio[FANTASY_MODEL], 0.15))
        for ours, theirs in RIVALS:
            text = f"{theirs} at {size}, times ours"
            found.append(at_least(text, ratio[theirs] / ratio[ours], 3))
    for row in rows:
        if row["table"] == "batch":
            speedup = row["speedup_of_batching_32"]
            found.append(at_least("speedup of batching 32 streams", speedup, 6))
        if row["table"] == "many":
            text = f"{row['update of']}: a single update over one stream's share"
            found.append(at_least(text, row["single / stream"], 50))
    by_updates = {row["updates"]: row for row in rows if row["table"] == "points"}
    if by_updates:
        ours, tenth = (by_updates[name] for name in bench_points.COMPARED)
        text = f"single points, {ours['updates']}, times get_fantasy_model"
        found.append(at_most(text, ours["times get_fantasy_model"], 0.4))
        ratio = ours["RMSE one step ahead"] / tenth["RMSE one step ahead"]
        found.append(at_most(f"their error, times {tenth['updates']}", ratio, 1.01))
    whole_rows = [row for row in rows if row["table"] == "whole"]
    for row in whole_rows:
        text = f"{row['stream']}, M = {row['M']}, batches of {row['N']}: CPU time"
        found.append(at_most(f"{text}, times version 0.1.0", row["times old"], 0.4))
    if whole_rows:
        count = sum(row["times batch"] < 1 for row in whole_rows)
        text = "whole streams cheaper than all data at once, of 8"
        found.append(at_least(text, count, 7))
    return found


def tables(rows: list[Row]) -> list[str]:
    """All tables of a run."""
    pivot: dict[str, Row] = {}
    for row in rows:
        if row["table"] == "sizes":
            line = pivot.setdefault(row["work"], {"work": row["work"]})
            is_floor = row["work"] == FLOOR
            cell = f"{row['ms']:.3g} ms" if is_floor else f"{row['ratio']:.3g}"
            line[f"({row['M']}, {row['N']})"] = cell
    others = [row for row in rows if row["table"] != "sizes"]
    return [markdown(list(pivot.values())), markdown(others, hide=("table",))]


def bar_table(rows: list[Row]) -> str:
    """What was to be reached, and what was."""
    return markdown(
        [
            {"bar": bar.text, "found": bar.found, "met": "yes" if bar.met else "no"}
            for bar in bars(rows)
        ]
    )


def page(file: Contents) -> str:
    """The page of the docs, from its file."""
    sizes, others = tables(file.rows)
    reached = bars(file.rows)
    num_met = sum(bar.met for bar in reached)
    return wrapped(
        paragraphs(
            "# Cost compared with peers",
            "Written by `scripts/benchmark.py peers` (torch_ssgp "
            f"{file.header['torch_ssgp']}, GPyTorch {file.header['gpytorch']}) in one "
            f"run on {file.header['threads']} thread. The floor is one product `A @ "
            "A.T` of `A` (M x N) and one Cholesky factorisation (M x M); every other "
            "number is a ratio to it, of processor times, each the median of "
            f"{file.header['repeats']} repetitions in which all jobs take turns.",
            "The paper's form subtracts two inverses to get the precision of the past "
            "and leaves gradients to autograd. SVGP is GPyTorch's, a step on all N "
            "data. Single points are amortised over the updates between two "
            "compressions of a memory of 2M. Conditioning includes the mean at 10 "
            "points, predictions are means and variances.",
            sizes,
            "Many streams: an update of 32 streams at once against 32 updates, and "
            f"streams of one reading per update with {MANY_INDUCING} inducing points "
            "each, against the update of a single stream. `single / stream` is the "
            "time of a single stream's update over the share of one stream in the "
            "batch. Then single points in the unit square, one per update, defaults "
            "otherwise: processor time per update, learning included, in units of "
            "`get_fantasy_model` timed in between, and the error of the mean one step "
            "ahead, of targets with a noise of 0.1. Last, if it was run, whole streams "
            "with defaults: processor seconds of this version, of version 0.1.0, and "
            "of all data at once.",
            others,
            f"Of {len(reached)} bars {num_met} are met:",
            bar_table(file.rows),
        )
    )


# ---------------------------------------------------------------------- the commands


def main(arguments: list[str]) -> None:
    """Time all, write the file and the page."""
    parser = new_parser(__doc__)
    parser.add_argument("what", nargs="?", choices=["streams"], help="whole streams")
    parser.add_argument("--old", type=Path, help="folder of version 0.1.0")
    parser.add_argument("--cases", type=positive, help="of the streams, the first ones")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--repeats", type=positive, default=7, help="of each job (7)")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder (docs)")
    chosen = parser.parse_args(arguments)
    path = chosen.out / "data" / "peers.json"
    if chosen.what == "streams":
        torch.set_num_threads(1)
        if chosen.old is None:
            parser.error("streams needs --old, the folder of version 0.1.0")
        file = read(path)
        rows = whole(chosen.old, chosen.cases)
        kept = [row for row in file.rows if row["table"] != "whole"]
        write(path, file.header, kept + rows)
    elif not chosen.page:
        torch.set_num_threads(1)
        sizes, streams, points = SIZES, MANY, NUM_POINTS
        if chosen.quick:
            sizes, streams, points = QUICK_SIZES, 5, 20
        rows = rows_of(sizes, streams, chosen.repeats, num_points=points)
        write(path, header(repeats=chosen.repeats, clock="process_time"), rows)
    file = read(path)
    (chosen.out / "peers.md").write_text(page(file), encoding="utf-8")
    print("\n\n".join(tables(file.rows)))


def gpu_check(
    sizes: tuple[tuple[int, int], ...] = SIZES, num_streams: int = MANY
) -> None:
    """Print the same benchmark on a GPU, or that there is none."""
    if not torch.cuda.is_available():
        print("There is no GPU that torch can use: nothing was timed.")
        return
    print(torch.cuda.get_device_name())
    rows = rows_of(sizes, num_streams, repeats=7, device="cuda")
    print("\n\n".join([*tables(rows), bar_table(rows)]))

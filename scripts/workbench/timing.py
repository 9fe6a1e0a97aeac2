"""What work costs: one bench with cases, ratios in one run.

    python scripts/benchmark.py timing                      all cases
    python scripts/benchmark.py timing steps streams        some of them
    python scripts/benchmark.py timing --quick --out FILE

Times are those of the processor on one thread, medians of repetitions in which all jobs
take turns. A floor is what nobody avoids: one product A Aᵀ with A of M x N and one
Cholesky factorisation of M x M. Rows of a case replace those that are in the file. The
cases:

"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeVar

import gpytorch
import torch
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, PeriodicKernel
from gpytorch.kernels import RBFKernel as RBF
from gpytorch.kernels import ScaleKernel as Scaled
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor, nn

from torch_ssgp import StreamingGP
from workbench.common import bench_parser, positive
from workbench.exact import Exact
from workbench.results import Row, Table, header, quiet
from workbench.streams.stream import generator
from workbench.uncollapsed import SVGP

Name = TypeVar("Name")
Job = Callable[[], object]
Device = torch.device | str

SIZES = ((100, 300), (200, 500), (600, 1000))
NUM_EXACT = 400  # points of the exact GP that is conditioned
FLOOR = "floor"


class On(NamedTuple):
    """Where and how much: repetitions of every job, tiny sizes, a device."""

    repeats: int = 7
    quick: bool = False
    device: Device = "cpu"

    def clock(self) -> float:
        """Time of the processor; of the wall where a GPU works, when it is done."""
        if torch.device(self.device).type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def size(self, full: Any, quick: Any) -> Any:
        """The one that was asked for."""
        return quick if self.quick else full


def median_times(
    jobs: Mapping[Name, Job],
    repeats: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[Name, float]:
    """Median seconds of each job; the jobs take turns, so drifts hit all alike."""
    for job in jobs.values():
        job()
    times: dict[Name, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            start = clock()
            job()
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def some(count: int, device: Device, *batch: int) -> Tensor:
    """Inputs in the unit square, others for every number."""
    gen = generator(count)
    x = torch.rand(*batch, count, 2, dtype=torch.float64, generator=gen)
    return x.to(device)


def targets(x: Tensor) -> Tensor:
    """A smooth function of them."""
    return torch.sin(6 * x.sum(-1))


def in_stream(m: int, device: Device = "cpu", *batch: int) -> StreamingGP:
    """A model in mid-stream: compressed onto ``m`` points, and its memory half full."""
    kernel = Scaled(RBF(ard_num_dims=2))
    kernel.base_kernel.lengthscale, kernel.outputscale = 0.2 if not batch else 1.0, 1.0
    shape = torch.Size(batch)
    model = StreamingGP(kernel, num_inducing=m, batch_shape=shape).double()
    model.likelihood.noise = 0.1
    model.to(device)
    for count in (2 * m, m // 4):
        x = some(count, device, *batch)
        model.update(x, targets(x), num_steps=0, forget=1.0)
    return model


def step_of(loss: Callable[[], Tensor], parameters: Iterable[nn.Parameter]) -> Job:
    """One step of Adam."""
    optimizer = torch.optim.Adam(parameters, lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def learning_step(model: StreamingGP, x: Tensor, y: Tensor, on: On) -> float:
    """Median seconds of a step up the bound, within one update."""
    ticks: list[float] = []
    options = {"learn": True, "learn_inducing_points": False, "restart": False}
    model.update(
        x, y, num_steps=12, callback=lambda *_: ticks.append(on.clock()), **options
    )
    return statistics.median(b - a for a, b in pairwise(ticks))


def steps(on: On) -> list[Row]:
    """Updates, steps, conditioning and predictions beside floors and peers."""
    rows: list[Row] = []
    for m, n in on.size(SIZES, ((10, 20),)):
        times = median_times(closed(m, n, on) | climbs(m, n, on), on.repeats, on.clock)
        x = some(n, on.device)
        model = in_stream(m, on.device)
        times["learning step"] = learning_step(model, x, targets(x), on)
        rows += [
            {
                "work": name,
                "M": m,
                "N": n,
                "ms": 1e3 * each,
                "ratio": each / times[FLOOR],
            }
            for name, each in times.items()
        ]
    return rows


def closed(m: int, n: int, on: On) -> dict[str, Job]:
    """All without a gradient; conditioning includes a mean at 10 points."""
    model, x, z = in_stream(m, on.device), some(n, on.device), some(m, on.device)
    y, few, test = targets(x), some(10, on.device), some(1_000, on.device)
    one, four = some(1, on.device), some(4, on.device)
    values = targets(four).expand(16, 4)
    at_points, chosen = deepcopy(model), deepcopy(model)
    data = some(NUM_EXACT, on.device)
    exact = Exact(data, targets(data), deepcopy(model.covar_module)).to(on.device)
    svgp = SVGP(z.clone(), deepcopy(model)).to(on.device).eval()
    A = torch.randn(m, n, dtype=x.dtype, device=on.device)
    eye = torch.eye(m, dtype=x.dtype, device=on.device)
    exact.eval()(few)

    def moments(latent: Any) -> tuple[Tensor, Tensor]:
        return latent.mean, latent.variance

    jobs: dict[str, Job] = {
        FLOOR: lambda: torch.linalg.cholesky(A @ A.mT / n + eye),
        "closed-form update, at points": lambda: at_points.update(
            x, y, num_steps=0, inducing_points=z, forget=1.0
        ),
        "closed-form update": lambda: chosen.update(x, y, num_steps=0, forget=1.0),
        "16 fantasies of 4": lambda: (
            model.condition_on_observations(four, values)(few).mean
        ),
        f"16 fantasies of 4, GPyTorch at {NUM_EXACT}": lambda: (
            exact.get_fantasy_model(four, values)(few).mean
        ),
        f"one point, GPyTorch at {NUM_EXACT}": lambda: exact.get_fantasy_model(
            one, targets(one)
        ),
        "1,000 predictions": lambda: moments(model(test)),
        "1,000 predictions, GPyTorch SVGP": lambda: moments(svgp(test)),
    }
    return {name: torch.no_grad()(job) for name, job in jobs.items()}


def climbs(m: int, n: int, on: On) -> dict[str, Job]:
    """A gradient of ours, and a step of GPyTorch's SVGP."""
    model, x, z = in_stream(m, on.device), some(n, on.device), some(m, on.device)
    svgp = SVGP(z.clone(), deepcopy(model)).to(on.device)
    elbo = gpytorch.mlls.VariationalELBO(svgp.likelihood, svgp, num_data=n)
    return {
        "evidence and gradient": step_of(
            lambda: -model.log_evidence(), model.parameters()
        ),
        "SVGP step, GPyTorch": step_of(
            lambda: -elbo(svgp(x), targets(x)), svgp.parameters()
        ),
    }


def streams(on: On) -> list[Row]:
    """Many streams, one reading per update, in one call beside a single stream."""
    m, num, rounds = 20, on.size(1_000, 5), 10  # as many as wait for one compression

    def job(batch: tuple[int, ...], share: float) -> Job:
        model, gen = in_stream(m, on.device, *batch), generator(0)

        def updates() -> None:
            for _ in range(rounds):
                x = torch.rand(*batch, 1, 2, dtype=model.dtype, generator=gen)
                y = targets(x)
                if share:
                    silent = torch.rand(*batch, 1, generator=gen) < share
                    y = y.masked_fill(silent, torch.nan)
                model.update(x.to(on.device), y.to(on.device), num_steps=0, forget=1.0)

        return updates

    jobs = {
        "a single stream": job((), 0.0),
        f"{num:,} streams": job((num,), 0.0),
        f"{num:,} streams, 20 % missing": job((num,), 0.2),
    }
    times = median_times(jobs, on.repeats, on.clock)
    return [
        {
            "work": name,
            "M": m,
            "ms": 1e3 * seconds / rounds,
            "times faster": times["a single stream"] * num / seconds if k else 1.0,
        }
        for k, (name, seconds) in enumerate(times.items())
    ]


# ---------------------------------------------------------------------------- export

LABELS = "Matérn 5/2, labels"
KERNELS: dict[str, Callable[[], Kernel]] = {
    "RBF": lambda: Scaled(RBF(ard_num_dims=2)),
    "Matérn 5/2": lambda: Scaled(MaternKernel(ard_num_dims=2)),
    "RBF x periodic + linear": lambda: (
        Scaled(RBF(active_dims=[0]) * PeriodicKernel(active_dims=[1])) + LinearKernel()
    ),
    LABELS: lambda: Scaled(MaternKernel(ard_num_dims=2)),
}


@torch.no_grad()
def export(on: On) -> list[Row]:
    """Rows through a model and through its exported module."""
    rows, calls = [], 10  # of each in a turn, as where rows are served one by one

    def often(job: Job) -> None:
        for _ in range(calls):
            job()

    for count, name, m in product((1, 1_000), KERNELS, on.size((20, 100), (10,))):
        x = 6 * torch.rand(4 * m, 2, generator=generator(0))
        y = torch.sin(2 * x[:, 0]) + 0.3 * x[:, 1].cos()
        y = (y > 0).to(x) if name == LABELS else y
        likelihood = BernoulliLikelihood() if name == LABELS else None
        model = StreamingGP(KERNELS[name](), likelihood, num_inducing=m)
        model.update(x, y, num_steps=5)
        exported, test = model.export(), 6 * torch.rand(count, 2)

        def through(model: StreamingGP = model, test: Tensor = test) -> object:
            prediction = model.predict(test)
            return prediction.mean, prediction.variance

        jobs = {"model": partial(often, through)}
        jobs["exported"] = partial(often, partial(exported, test))
        times = median_times(jobs, 7 * on.repeats)
        micro = {f"{key}, µs": 1e6 * times[key] / calls for key in jobs}
        ratio = times["model"] / times["exported"]
        rows.append({"work": name, "M": m, "N": count, **micro, "ratio": ratio})
    return rows


# ----------------------------------------------------------------------- the command

CASES: dict[str, Callable[[On], list[Row]]] = {
    case.__name__: case for case in (steps, streams, export)
}
NAMES = ("case", "work", "M", "N")


def main(arguments: list[str]) -> None:
    """Run cases, and replace their rows."""
    lines = "\n".join(f"{name:10}{case.__doc__}" for name, case in CASES.items())
    parser = bench_parser(f"{__doc__}{lines}", "data/timing.json")
    parser.add_argument("cases", nargs="*", help="all of them, if there are none")
    parser.add_argument("--repeats", type=positive, default=7, help="of each job (7)")
    chosen = parser.parse_args(arguments)
    if unknown := {*chosen.cases} - {*CASES}:
        parser.error(f"no {sorted(unknown)}; there are {list(CASES)}")
    torch.set_num_threads(1)
    on = On(chosen.repeats, chosen.quick)
    made = header(repeats=chosen.repeats, quick=chosen.quick)
    table = Table(chosen.out, NAMES, made)
    for name in chosen.cases or CASES:
        with quiet():
            rows = CASES[name](on)
        if chosen.out.exists():
            table.drop(lambda row, name=name: row["case"] == name)
        for row in rows:
            table.add({"case": name, **row})


def gpu_check() -> None:
    """Print the same on a GPU, or that there is none."""
    if not torch.cuda.is_available():
        print("There is no GPU that torch can use: nothing was timed.")
        return
    print(torch.cuda.get_device_name())
    for case in (steps, streams):
        with quiet():
            rows = case(On(device="cuda"))
        print(*rows, sep="\n")

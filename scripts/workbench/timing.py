"""What work costs: one bench with cases, ratios in one run.

    python scripts/benchmark.py timing                      all cases
    python scripts/benchmark.py timing steps points --data-dir DIR
    python scripts/benchmark.py timing --quick --out FILE

Times are those of the processor on one thread, medians of repetitions in which all jobs
take turns. A floor is what nobody avoids: one product A Aᵀ with A of M x N and one
Cholesky factorisation of M x M. Rows of a case replace those that are in the file. The
cases:

"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, PeriodicKernel
from gpytorch.kernels import RBFKernel as RBF
from gpytorch.kernels import ScaleKernel as Scaled
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from torch import Tensor, nn
from tqdm import tqdm

from torch_ssgp import StreamingGP
from workbench.common import bench_parser, positive
from workbench.exact import Exact
from workbench.experts import LocalExperts
from workbench.results import Row, Table, header, quiet
from workbench.streams import uci
from workbench.streams.stream import generator
from workbench.uncollapsed import SVGP

Name = TypeVar("Name")
Job = Callable[[], object]
Device = torch.device | str

SIZES = ((100, 300), (200, 500), (600, 1000))
NUM_EXACT = 400  # points of the exact GP that is conditioned
FLOOR = "floor"


class On(NamedTuple):
    """Where and how much.

    Attributes:
        repeats: Of every job.
        quick: Whether sizes are tiny.
        device: The device to run on.
        data_dir: Where UCI files are.
    """

    repeats: int = 7
    quick: bool = False
    device: Device = "cpu"
    data_dir: Path | None = None

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


def ratios(times: Mapping[str, float], floor: str, **others: Any) -> list[Row]:
    """A row for every job, in units of one of them."""
    return [
        {"work": name, **others, "ms": 1e3 * seconds, "ratio": seconds / times[floor]}
        for name, seconds in times.items()
    ]


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


# ----------------------------------------------------------------------------- steps


def step_of(loss: Callable[[], Tensor], parameters: Iterable[nn.Parameter]) -> Job:
    """One step of Adam."""
    optimizer = torch.optim.Adam(parameters, lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def exact_model(model: StreamingGP) -> Exact:
    """An exact GP with the prior of a model, ready to be conditioned."""
    x = some(NUM_EXACT, model.device)
    exact = Exact(x, targets(x), deepcopy(model.covar_module)).to(x.device).eval()
    exact(x[:10])
    return exact


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
        jobs = jobs_of(m, n, on)
        times = median_times(jobs, on.repeats, on.clock)
        x = some(n, on.device)
        learned = in_stream(m, on.device)
        times["learning step"] = learning_step(learned, x, targets(x), on)
        rows += ratios(times, FLOOR, M=m, N=n)
    return rows


def jobs_of(m: int, n: int, on: On) -> dict[str, Job]:
    """All that is timed at one size; conditioning includes a mean at 10 points."""
    model, x, z = in_stream(m, on.device), some(n, on.device), some(m, on.device)
    y, few, test = targets(x), some(10, on.device), some(1_000, on.device)
    one, four = some(1, on.device), some(4, on.device)
    values = targets(four).expand(16, 4)
    exact, at_points, chosen = exact_model(model), deepcopy(model), deepcopy(model)
    svgp = SVGP(z.clone(), deepcopy(model)).to(on.device)
    learner = SVGP(z.clone(), deepcopy(model)).to(on.device)
    elbo = gpytorch.mlls.VariationalELBO(learner.likelihood, learner, num_data=n)
    svgp.eval()
    evidence = deepcopy(model)
    A = torch.randn(m, n, dtype=x.dtype, device=on.device)
    eye = torch.eye(m, dtype=x.dtype, device=on.device)

    def moments(latent: Any) -> tuple[Tensor, Tensor]:
        return latent.mean, latent.variance

    closed: dict[str, Job] = {
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
    return {
        FLOOR: lambda: torch.linalg.cholesky(A @ A.mT / n + eye),
        **{name: torch.no_grad()(job) for name, job in closed.items()},
        "evidence and gradient": step_of(
            lambda: -evidence.log_evidence(), evidence.parameters()
        ),
        "SVGP step, GPyTorch": step_of(
            lambda: -elbo(learner(x), y), learner.parameters()
        ),
    }


# ---------------------------------------------------------------------------- points


class Clocked(NamedTuple):
    """Predictions of data before they were learned, and seconds of both."""

    means: list[float]
    predicted: list[float]
    learned: list[float]


Pair = tuple[Callable[[Tensor], Any], Callable[[Tensor, Tensor], object]]


def ours(num_dims: int, learn: str) -> Pair:
    """Predict and learn, by ``update`` or ``observe``."""
    kernel = Scaled(RBF(ard_num_dims=num_dims))
    model = StreamingGP(kernel, num_inducing=200).double()
    return torch.no_grad()(lambda x: model.predict(x).mean), getattr(model, learn)


def river_forest() -> Pair:
    """River's adaptive random forest."""
    from river import forest

    model = forest.ARFRegressor(seed=0)

    def row(x: Tensor) -> dict[int, float]:
        return dict(enumerate(x[0].tolist()))

    return (
        lambda x: model.predict_one(row(x)) or 0.0,
        lambda x, y: model.learn_one(row(x), y.item()),
    )


def local_experts(x: Tensor, y: Tensor) -> Pair:
    """LoG-GP, its hyperparameters learned from the beginning, which costs nothing."""
    learned = StreamingGP(Scaled(RBF(ard_num_dims=x.size(-1))), num_inducing=200)
    learned.double().update(x, y)
    model = LocalExperts(learned)
    return lambda x: model.predict(x)[0], model.update


def conditioned(x: Tensor, y: Tensor) -> Pair:
    """One point more for GPyTorch's exact model, which does not keep it."""
    n = min(NUM_EXACT, len(y) // 2)
    exact = Exact(x[:n], y[:n], Scaled(RBF()).double()).eval()
    mean = torch.no_grad()(lambda x: exact(x).mean)
    mean(x[:2])
    return mean, torch.no_grad()(exact.get_fantasy_model)


def bordering(x: Tensor, noise: float = 0.1) -> Pair:
    """The floor of one datum more: a row of the inverse factor ``W``, in NumPy."""
    points = x[:NUM_EXACT].numpy()
    n = len(points)

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.exp(-0.5 * ((a[:, None] - b) ** 2).sum(-1))

    W, e, K = np.zeros((n + 1, n + 1)), np.zeros(n + 1), kernel(points, points)
    W[:n, :n] = np.linalg.inv(np.linalg.cholesky(K + noise * np.eye(n)))

    def append(x: Tensor, y: Tensor) -> None:
        v = W[:n, :n] @ kernel(points, x.numpy())[:, 0]
        d = np.sqrt(1 + noise - v @ v)
        W[n, :n], W[n, n] = -(v @ W[:n, :n]) / d, 1 / d
        e[n] = (y.item() - v @ e[:n]) / d

    return lambda x: (W[:n, :n] @ kernel(points, x.numpy())[:, 0]) @ e[:n], append


def clocked(pair: Pair, x: Tensor, y: Tensor) -> Clocked:
    """Every datum predicted, then learned."""
    predict, learn = pair
    found = Clocked([], [], [])
    for k in tqdm(range(len(x)), leave=False, disable=None):
        one, target = x[k : k + 1], y[k : k + 1]
        begin = time.process_time()
        found.means.append(float(predict(one)) if k else 0.0)
        middle = time.process_time()
        learn(one, target)
        found.predicted.append(middle - begin)
        found.learned.append(time.process_time() - middle)
    return found


def latencies(seconds: list[float]) -> Row:
    """Milliseconds: their mean and percentiles."""
    ms = 1e3 * np.array(seconds)
    row = {f"p{p:g}": float(np.percentile(ms, p)) for p in (50, 90, 99, 100)}
    return {"mean": float(ms.mean()), **row}


def points(on: On) -> list[Row]:
    """Single points: percentiles of milliseconds, and errors of the second half."""
    num, rows = on.size(4_000, 30), []
    names = ("kin40k", "elevators", "bike_noleak", "protein") if on.data_dir else ()
    for name in ("unit square", *names):
        x, y = some(num, "cpu"), None
        if name == "unit square":
            y = targets(x) + 0.1 * torch.randn(num, generator=generator(0))
        else:
            stream = uci(name, on.data_dir)
            x, y = stream.x_train[:num], stream.y_train[:num]
        learners = {"update": ours(x.size(-1), "update")}
        if hasattr(StreamingGP, "observe"):
            learners["observe"] = ours(x.size(-1), "observe")
        learners["local experts"] = local_experts(x[:500], y[:500])
        learners["river's forest"] = river_forest()
        learners[f"get_fantasy_model at {NUM_EXACT}"] = conditioned(x, y)
        learners[f"NumPy bordering at {NUM_EXACT}"] = bordering(x)
        half, spread = num // 2, y[num // 2 :].var().item()
        for work, pair in learners.items():
            fixed = work.endswith(str(NUM_EXACT))  # the same work at every point
            found = clocked(pair, x[: 50 if fixed else None], y)
            error = (torch.tensor(found.means) - y[: len(found.means)])[half:]
            for what, seconds in (("", found.learned), (", predict", found.predicted)):
                row = {"data": name, "work": work + what, **latencies(seconds)}
                if not fixed:
                    row["SMSE"] = error.square().mean().item() / spread
                rows.append(row)
    return rows


# --------------------------------------------------------------------------- streams


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

KERNELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "RBF": (lambda: Scaled(RBF(ard_num_dims=2)), GaussianLikelihood),
    "Matérn 5/2": (lambda: Scaled(MaternKernel(ard_num_dims=2)), GaussianLikelihood),
    "RBF x periodic + linear": (
        lambda: (
            Scaled(RBF(active_dims=[0]) * PeriodicKernel(active_dims=[1]))
            + LinearKernel()
        ),
        GaussianLikelihood,
    ),
    "Matérn 5/2, labels": (
        lambda: Scaled(MaternKernel(ard_num_dims=2)),
        BernoulliLikelihood,
    ),
}


@torch.no_grad()
def export(on: On) -> list[Row]:
    """Rows through a model and through its exported module."""
    rows, calls = [], 10  # of each in a turn, as where rows are served one by one

    def often(job: Job) -> None:
        for _ in range(calls):
            job()

    for count, name, m in product((1, 1_000), KERNELS, on.size((20, 100), (10,))):
        kernel, likelihood = (make() for make in KERNELS[name])
        x = 6 * torch.rand(4 * m, 2, generator=generator(0))
        y = torch.sin(2 * x[:, 0]) + 0.3 * x[:, 1].cos()
        y = (y > 0).to(x) if isinstance(likelihood, BernoulliLikelihood) else y
        model = StreamingGP(kernel, likelihood, num_inducing=m)
        model.update(x, y, num_steps=5)
        exported, test = model.export(), 6 * torch.rand(count, 2)

        def through(model: StreamingGP = model, test: Tensor = test) -> object:
            prediction = model.predict(test)
            return prediction.mean, prediction.variance

        jobs = {"model": through, "exported": partial(exported, test)}
        times = median_times(
            {key: partial(often, job) for key, job in jobs.items()}, 7 * on.repeats
        )
        micro = {f"{key}, µs": 1e6 * times[key] / calls for key in jobs}
        ratio = times["model"] / times["exported"]
        rows.append({"work": name, "M": m, "N": count, **micro, "ratio": ratio})
    return rows


# ----------------------------------------------------------------------- the command

CASES: dict[str, Callable[[On], list[Row]]] = {
    "steps": steps,
    "points": points,
    "streams": streams,
    "export": export,
}
NAMES = ("case", "data", "work", "M", "N")


def lines() -> Iterator[str]:
    """What the cases are."""
    for name, case in CASES.items():
        yield f"{name:10}{str(case.__doc__).splitlines()[0]}"


def main(arguments: list[str]) -> None:
    """Run cases, and replace their rows."""
    parser = bench_parser(str(__doc__) + "\n".join(lines()), "data/timing.json")
    parser.add_argument("cases", nargs="*", help="all of them, if there are none")
    parser.add_argument("--repeats", type=positive, default=7, help="of each job (7)")
    chosen = parser.parse_args(arguments)
    if unknown := {*chosen.cases} - {*CASES}:
        parser.error(f"no {sorted(unknown)}; there are {list(CASES)}")
    torch.set_num_threads(1)
    on = On(chosen.repeats, chosen.quick, data_dir=chosen.data_dir)
    made = header(others=["river"], repeats=chosen.repeats, quick=chosen.quick)
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

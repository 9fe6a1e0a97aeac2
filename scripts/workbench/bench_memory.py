"""Streams x memory sizes x seeds: what a memory finer than the model gains and costs.

    python scripts/benchmark.py memory --data-dir DIR --out docs/data/memory.json
    python scripts/benchmark.py memory --streams bike --variants "batch SGPR" default
    python scripts/benchmark.py memory tables --out docs/data/memory.json

Every row is one run with default settings, or the batch model of the same number of
inducing points that has all training data at once. ``tables`` runs nothing and prints
what is there. Rows already in the file are not run again, so a run can be interrupted
and resumed, and split over processes by ``--streams``; ``--again`` replaces them.

Batch models run to a plateau: L-BFGS begins anew where it ended until 100 evaluations
of the bound gain less than 0.01 nats per 100 data. Seconds are those of the processor,
for learning alone. A batch model's are those to the plateau; it is good enough long
before, and ``cpu_seconds_near`` says when: within 1.02 and 0.02 of its end.
Ratios of errors take an RMSE below 0.01 for 0.01, the likelihood's smallest noise.

Does the memory pay, or would more inducing points do the same? R points of a memory
store their rows (a triangle, taken as R x R), their inputs (R x d) and their targets
(R); M inducing points likewise. "No memory, same storage" has M' of them, with

    M' (M' + d + 1) = M (M + d + 1) + R (R + d + 1).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from tqdm import tqdm

from torch_ssgp import StreamingGP, settings
from workbench import streams
from workbench.baselines import (
    CHUNK,
    BatchSGPR,
    new_kernel,
    normal_scores,
    small_budget,
)
from workbench.common import listed, markdown, positive
from workbench.streams import Stream
from workbench.verdicts import Gap, gap

BATCH, DEFAULT, STORAGE = "batch SGPR", "default", "no memory, same storage"
PLATEAU = 1e-4  # nats per datum that 100 evaluations of the bound must gain
MAX_STEPS = 4_000  # evaluations of the bound by a batch model
SNAPSHOT = 50  # evaluations between two looks at a batch model's accuracy
# The likelihood's smallest noise, as a standard deviation: the model takes smaller
# errors for noise, so that their ratios say nothing.
FLOOR = 0.01
FROM_Q, FROM_MEMORY = "q(b)", "memory"

Row = dict[str, Any]
Make = Callable[[int, Path | None], Stream]
Job = tuple[str, str, int]  # stream, variant, seed


class Bar(NamedTuple):
    """What the default has to reach in every seed, against the batch model.

    Attributes:
        ratio: Largest RMSE / batch.
        margin: How far the mean log-likelihood may be below.
        memory_counts: Whether predictions from the memory's points may reach it.
    """

    ratio: float
    margin: float
    memory_counts: bool

    def __str__(self) -> str:
        text = f"RMSE x {self.ratio:g}"
        if self.margin < math.inf:
            text += f", MLL - {self.margin:g}"
        return text + (", or from memory" if self.memory_counts else "")


STRICT, LOOSE = Bar(1.02, 0.02, False), Bar(1.05, math.inf, True)


class Case(NamedTuple):
    """A stream, its budget, and whether a seed changes the data.

    Attributes:
        make: From a seed and the directory of the data to the stream.
        num_inducing: Budget of inducing points, M.
        seeded: Whether the data depend on the seed; otherwise other seeds are other
            roundings of the targets, see :func:`streams.rounded`, with one batch model.
        bar: What the default has to reach.
    """

    make: Make
    num_inducing: int
    seeded: bool
    bar: Bar | None


def _uci(name: str) -> Make:
    return lambda seed, data_dir: streams.uci(name, data_dir, split=seed)


# The cheap ones first.
CASES: dict[str, Case] = {
    "pseudo-periodic M=100": Case(
        lambda *_: streams.pseudo_periodic(), 100, False, STRICT
    ),
    "pseudo-periodic M=200": Case(
        lambda *_: streams.pseudo_periodic(), 200, False, STRICT
    ),
    "audio M=100": Case(lambda *_: streams.audio(), 100, False, STRICT),
    "audio M=200": Case(lambda *_: streams.audio(), 200, False, LOOSE),
    "growing range": Case(
        lambda seed, _: streams.growing_range(seed=seed), 250, True, STRICT
    ),
    "revisiting": Case(
        lambda seed, _: streams.revisiting(seed=seed), 100, True, STRICT
    ),
    "elevators": Case(_uci("elevators"), 200, True, STRICT),
    "bike": Case(_uci("bike_noleak"), 200, True, STRICT),
    "terrain": Case(lambda *_: streams.terrain(), 400, False, LOOSE),
    "terrain OS": Case(lambda _, d: streams.terrain_os(d), 400, False, LOOSE),
    "kin40k": Case(_uci("kin40k"), 200, True, None),
}


# ----------------------------------------------------------------------- the variants


class Budget(NamedTuple):
    """Points of a model: inducing ones, and those of its memory (``None``: default)."""

    num_inducing: int
    memory_size: int | None


SIZES: dict[str, float] = {
    "memory M": 1,
    "memory 1.5M": 1.5,
    "memory 2M": 2,
    "memory 3M": 3,
}
VARIANTS = (DEFAULT, *SIZES, STORAGE)


def new_model(num_dims: int, budget: Budget) -> StreamingGP:
    """The model of all variants: a smooth kernel with a lengthscale per input."""
    return StreamingGP(
        new_kernel(num_dims),
        num_inducing=budget.num_inducing,
        memory_size=budget.memory_size,
    ).double()


def budget_of(variant: str, num_inducing: int, num_dims: int) -> Budget:
    """How many points a variant has where the batch model has ``num_inducing``."""
    if variant == DEFAULT:
        return Budget(num_inducing, None)
    if variant in SIZES:
        return Budget(num_inducing, round(SIZES[variant] * num_inducing))
    size = new_model(num_dims, Budget(num_inducing, None)).memory_size
    num = same_storage(num_inducing, size, num_dims)
    return Budget(num, num)


def same_storage(num_inducing: int, memory_size: int, num_dims: int) -> int:
    """M' of ``M' (M' + d + 1) = M (M + d + 1) + R (R + d + 1)``, to the nearest."""
    c = num_dims + 1
    numbers = sum(size * (size + c) for size in (num_inducing, memory_size))
    return round((math.sqrt(c**2 + 4 * numbers) - c) / 2)


# ----------------------------------------------------------------------------- runs


@torch.no_grad()
def accuracy(model: StreamingGP, stream: Stream, **options: bool) -> Row:
    """RMSE and mean log-likelihood on all test points; options of ``predict``."""
    parts = [model.predict(x, **options) for x in stream.x_test.split(CHUNK)]
    mean, variance = (
        torch.cat([getattr(part, name) for part in parts])
        for name in ("mean", "variance")
    )
    return normal_scores(mean, variance, stream.y_test)


def run_stream(stream: Stream, budget: Budget) -> Row:
    """Default updates over a stream, and how they end; a failure is a row as well."""
    start = time.process_time()
    model = new_model(stream.x_test.size(-1), budget)
    failure = ""
    with small_budget():
        for x, y in tqdm(stream.batches, desc="updates", leave=False):
            try:
                model.update(x, y)
            except Exception as error:  # what fails is part of the result
                failure = f"{type(error).__name__}: {error}"
                break
    seconds = time.process_time() - start
    memory = accuracy(model, stream, from_memory=True)
    return {
        "num_inducing": budget.num_inducing,
        "memory_size": budget.memory_size,
        **accuracy(model, stream),
        **{f"memory {name}": value for name, value in memory.items()},
        "M": model.summary.num_inducing,
        "R": model.memory.points.size(-2),
        "cpu_seconds": seconds,
        "failure": failure,
    }


# -------------------------------------------------------------------- the batch model


class BatchBound:
    r"""Batch sparse regression: its bound and its gradient, in closed form.

    Written apart from the package: a reference must not share the errors of what it is
    compared with. It takes less than half the time of automatic differentiation, and
    plateaus are thousands of evaluations away. With :math:`L L^\top = K_{bb}`,
    :math:`A = L^{-1} K_{bf}`, :math:`D = I + A A^\top / s`, :math:`r = y - m`,

    .. math::
        F = -\tfrac n2 \log 2\pi s - \tfrac12 \log|D| - \tfrac{1}{2s} \|r\|^2
            + \tfrac12 \|c\|^2 - \tfrac{1}{2s} (\mathrm{tr} K_{ff} - \mathrm{tr} A
            A^\top), \qquad c = L_D^{-1} A r / s

    and, with :math:`\gamma = L_D^{-\top} c`,
    :math:`W = I - D^{-1} - \gamma \gamma^\top`,

    .. math::
        dF/dK_{bf} = L^{-\top} (W A + \gamma r^\top) / s, \qquad
        dF/dK_{bb} = -\tfrac{1}{2s} \mathrm{sym}(
            L^{-\top} [W A A^\top + \gamma (A r)^\top] L^{-1}).

    The variables are one vector: logarithms of lengthscales, scale and noise, the mean,
    and inducing points in units of their spacing.

    Args:
        x: ``(n, d)``, all inputs.
        y: ``(n,)``, all targets.
        model: Where to begin: a model with an RBF kernel and inducing points.
    """

    def __init__(self, x: Tensor, y: Tensor, model: StreamingGP) -> None:
        self.x, self.y, self.start_model = x, y, model
        z = model.summary.inducing_points
        spread = x.amax(0) - x.amin(0)
        spread = torch.where(spread > 0, spread, 1)
        self.spacing = spread * len(z) ** (-1 / x.size(-1))
        self.sizes = [x.size(-1), 1, 1, 1, z.numel()]
        kernel, likelihood = model.covar_module, model.likelihood
        with torch.no_grad():
            parts = [
                kernel.base_kernel.lengthscale.log(),
                kernel.outputscale.log(),
                likelihood.noise.log(),
                model.mean_module.constant,
                z / self.spacing,
            ]
            self.start = torch.cat([part.reshape(-1) for part in parts]).numpy()
        smallest = likelihood.noise_covar.raw_noise_constraint.lower_bound.item()
        self.limits: list[tuple[float | None, None]] = [(None, None)] * len(self.start)
        self.limits[x.size(-1) + 1] = (math.log(1.01 * smallest), None)

    def unpacked(self, variables: np.ndarray) -> list[Tensor]:
        """Log-lengthscales ``(d,)``, log-scale, log-noise, mean, and Z ``(m, d)``."""
        log_l, log_o, log_s, m, z = torch.from_numpy(variables).split(self.sizes)
        scalars = [part.squeeze() for part in (log_o, log_s, m)]
        return [log_l, *scalars, z.view(-1, self.x.size(-1)) * self.spacing]

    @torch.no_grad()
    def __call__(self, variables: np.ndarray) -> tuple[float, np.ndarray]:
        """Bound and gradient, in nats per datum."""
        log_l, log_o, log_s, m, z = self.unpacked(variables)
        lengthscale, o, s = log_l.exp(), log_o.exp(), log_s.exp()
        n, centre = len(self.y), self.x.mean(0)
        X, Z = (self.x - centre) / lengthscale, (z - centre) / lengthscale
        K_bf, K_bb = (o * _correlation(Z, other) for other in (X, Z))  # (m, n), (m, m)
        eye = torch.eye(len(Z), dtype=X.dtype)
        jitter = settings.jitter.of(X.dtype) * o

        L = torch.linalg.cholesky(K_bb + jitter * eye)
        A = torch.linalg.solve_triangular(L, K_bf, upper=False)  # (m, n)
        AA = A @ A.mT
        L_D = torch.linalg.cholesky(eye + AA / s)
        r = self.y - m
        Ar = A @ r
        c = torch.linalg.solve_triangular(L_D, Ar.unsqueeze(-1), upper=False) / s
        unexplained = n * o - AA.trace()
        F = (
            -0.5 * n * (math.log(2 * math.pi) + log_s)
            - L_D.diagonal().log().sum()
            - 0.5 * (r @ r + unexplained) / s
            + 0.5 * c.square().sum()
        )

        g = torch.linalg.solve_triangular(L_D.mT, c, upper=True).squeeze(-1)  # gamma
        D_inv = torch.cholesky_inverse(L_D)
        W = eye - D_inv - torch.outer(g, g)
        G_bf = torch.linalg.solve_triangular(L.mT, (W @ A).addr_(g, r), upper=True) / s
        Q = torch.linalg.solve_triangular(L.mT, W @ AA + torch.outer(g, Ar), upper=True)
        Q = torch.linalg.solve_triangular(L, Q, upper=False, left=False)
        G_bb = -0.25 * (Q + Q.mT) / s

        # Through the kernel: dK = K (x - z) dz, K (x - z)^2 d log l, K d log o.
        H_bf, H_bb = G_bf * K_bf, G_bb * K_bb
        to_z = torch.zeros_like(Z)
        to_l = torch.zeros_like(lengthscale)
        for H, other, sides in ((H_bf, X, 1), (H_bb, Z, 2)):
            H_x, rows, columns = H @ other, H.sum(1), H.sum(0)
            to_z += sides * (H_x - rows.unsqueeze(-1) * Z)
            to_l += columns @ other.square() + rows @ Z.square() - 2 * (Z * H_x).sum(0)
        to_o = H_bf.sum() + H_bb.sum() + jitter * G_bb.trace() - 0.5 * n * o / s
        to_s = -0.5 * n + s * (
            0.5 * (r @ r + unexplained + (D_inv * AA).sum() + g @ AA @ g) / s**2
            - c.square().sum() / s
        )
        to_m = (r.sum() - A.sum(1) @ g) / s
        to_points = to_z / lengthscale * self.spacing
        scalars = torch.stack([to_o, to_s, to_m])
        gradient = torch.cat([to_l, scalars, to_points.reshape(-1)])
        return F.item() / n, (gradient / n).numpy()

    def model(self, variables: np.ndarray) -> StreamingGP:
        """The package's model at these values, with all data, in closed form."""
        log_l, log_o, log_s, m, z = self.unpacked(variables)
        start = self.start_model
        model = StreamingGP(
            copy.deepcopy(start.covar_module),
            likelihood=copy.deepcopy(start.likelihood),
            mean_module=copy.deepcopy(start.mean_module),
            num_inducing=start.num_inducing,
        ).double()
        model.covar_module.base_kernel.lengthscale = log_l.exp()
        model.covar_module.outputscale = log_o.exp()
        model.likelihood.noise = log_s.exp()
        model.mean_module.constant = m
        with small_budget():
            model.update(self.x, self.y, num_steps=0, inducing_points=z)
        return model


def _correlation(z: Tensor, x: Tensor) -> Tensor:
    """``exp(-|z - x|^2 / 2)``, ``(m, n)``."""
    exponent = torch.addmm(-0.5 * x.square().sum(-1), z, x.mT)
    return exponent.sub_(0.5 * z.square().sum(-1, keepdim=True)).clamp_(max=0).exp_()


class Snapshot(NamedTuple):
    """How far L-BFGS is: evaluations, CPU seconds, bound per datum, and variables."""

    steps: int
    seconds: float
    bound: float
    variables: np.ndarray


class Climb:
    """L-BFGS on a bound: counts evaluations, keeps the best, stops on a plateau."""

    def __init__(self, bound: BatchBound, max_steps: int, start: float) -> None:
        self.bound, self.max_steps, self.start = bound, max_steps, start
        self.best = Snapshot(0, 0.0, bound(bound.start)[0], bound.start)
        self.curve = [self.best.bound]  # the best bound after every evaluation
        self.snapshots: list[Snapshot] = []
        self.bar = tqdm(total=max_steps, desc="L-BFGS", leave=False, mininterval=5)

    @property
    def steps(self) -> int:
        """Evaluations so far."""
        return len(self.curve) - 1

    def leg(self) -> float:
        """L-BFGS from the best point; its gain in nats per datum and 100 steps."""
        first, before = self.steps, self.best.bound

        def stop_on_plateau(intermediate_result: object) -> None:
            taken = self.steps - first
            if self.steps >= self.max_steps or (
                taken >= 100 and self.curve[-1] - self.curve[-101] < PLATEAU
            ):
                raise StopIteration

        minimize(
            self._loss,
            self.best.variables,
            jac=True,
            method="L-BFGS-B",
            bounds=self.bound.limits,
            callback=stop_on_plateau,
            options={
                "maxcor": 100,
                "maxiter": self.max_steps,
                "maxfun": self.max_steps,
                "ftol": 1e-13,
                "gtol": 1e-8,
            },
        )
        return (self.best.bound - before) / max((self.steps - first) / 100, 1)

    def _loss(self, variables: np.ndarray) -> tuple[float, np.ndarray]:
        try:
            value, gradient = self.bound(variables)
        except torch.linalg.LinAlgError:  # a line search looked too far
            value, gradient = -1e10, np.zeros_like(variables)
        self.curve.append(max(value, self.curve[-1]))
        self.bar.set_postfix(bound=f"{self.curve[-1]:.5f}", refresh=False)
        self.bar.update()
        seconds = time.process_time() - self.start
        if value > self.best.bound:
            self.best = Snapshot(self.steps, seconds, value, variables.copy())
        if self.steps % SNAPSHOT == 0:
            self.snapshots.append(self.best._replace(steps=self.steps, seconds=seconds))
        return -value, -gradient


class Reference(NamedTuple):
    """A batch model and how it was learned.

    Attributes:
        model: The model, with all data.
        bound: Its bound on the log evidence, per datum.
        converged: Whether it is on a plateau.
        steps: Evaluations of the bound by L-BFGS.
        restarts: How often L-BFGS began anew.
        gain: Nats per datum and 100 evaluations that the last run of L-BFGS gained.
        seconds: CPU seconds it took.
        path: Where it was on the way.
        model_at: From variables of the path to the model there.
    """

    model: StreamingGP
    bound: float
    converged: bool
    steps: int
    restarts: int
    gain: float
    seconds: float
    path: list[Snapshot]
    model_at: Callable[[np.ndarray], StreamingGP]


def batch_reference(
    x: Tensor, y: Tensor, num_inducing: int, max_steps: int = MAX_STEPS
) -> Reference:
    """All data at once, all of Z free, to a plateau.

    L-BFGS may end early, where a line search fails. So it begins anew where it ended,
    and only a restart that gains nothing says that there is no more to learn.

    Args:
        x: ``(n, d)``, all inputs.
        y: ``(n,)``, all targets.
        num_inducing: Largest number of inducing points.
        max_steps: Evaluations of the bound after which it stops.

    Returns:
        The best model met.
    """
    start = time.process_time()
    batch = BatchSGPR(x.size(-1), num_inducing, num_steps=1)  # where to begin
    batch.update(x, y)
    climb = Climb(BatchBound(x, y, batch.model), max_steps, start)
    gain, restarts = climb.leg(), 0
    settled = False
    while not settled and climb.steps < max_steps:
        gain, restarts = climb.leg(), restarts + 1
        settled = gain < PLATEAU
    climb.bar.close()
    seconds = time.process_time() - start
    return Reference(
        climb.bound.model(climb.best.variables),
        climb.best.bound,
        settled,
        climb.steps,
        restarts,
        gain,
        seconds,
        climb.snapshots,
        climb.bound.model,
    )


def run_batch(stream: Stream, num_inducing: int, max_steps: int = MAX_STEPS) -> Row:
    """The reference on a stream, and how it ends."""
    found = batch_reference(stream.x_train, stream.y_train, num_inducing, max_steps)
    end = accuracy(found.model, stream)
    trace = [
        {
            "steps": at.steps,
            "cpu_seconds": at.seconds,
            "bound": at.bound,
            **accuracy(found.model_at(at.variables), stream),
        }
        for at in found.path
    ]
    gaps = [gap(_floored(each), _floored(end)) for each in trace]
    near = [
        each["cpu_seconds"]
        for each, away in zip(trace, gaps, strict=True)
        if away.ratio <= STRICT.ratio and away.difference >= -STRICT.margin
    ]
    return {
        "num_inducing": num_inducing,
        **end,
        "M": found.model.summary.num_inducing,
        "cpu_seconds": found.seconds,
        "cpu_seconds_near": min([*near, found.seconds]),
        "bound": found.bound,
        "converged": found.converged,
        "steps": found.steps,
        "restarts": found.restarts,
        "gain": found.gain,
        "failure": "",
        "trace": trace,
    }


# ---------------------------------------------------------------------- all the runs


def run(
    out: Path,
    data_dir: Path | None,
    num_seeds: int,
    only_streams: Iterable[str] = (),
    only_variants: Iterable[str] = (),
    max_steps: int = MAX_STEPS,
    again: bool = False,
) -> list[Row]:
    """All rows that are not in the file yet; the file after every one of them."""
    only_streams, only_variants = set(only_streams), set(only_variants)
    jobs = [
        (name, variant, seed)
        for name, case in CASES.items()
        if not only_streams or name in only_streams
        for variant in [BATCH, *VARIANTS]
        if not only_variants or variant in only_variants
        for seed in range(num_seeds)
        if seed == 0 or case.seeded or variant != BATCH
    ]
    done = set() if again else set(read(out))
    header = _header(max_steps)
    bar = tqdm([job for job in jobs if job not in done])
    for name, variant, seed in bar:
        bar.set_description(f"{name}, {variant}, {seed}")
        case = CASES[name]
        stream = case.make(seed, data_dir)
        if variant == BATCH:
            result = run_batch(stream, case.num_inducing, max_steps)
        else:
            stream = stream if case.seeded else streams.rounded(stream, seed)
            num_dims = stream.x_test.size(-1)
            budget = budget_of(variant, case.num_inducing, num_dims)
            result = run_stream(stream, budget)
        key = {"stream": name, "variant": variant, "seed": seed}
        row = {**key, "version": header["torch_ssgp"], **result}
        # Another process may have written meanwhile.
        write(out, header, {**read(out), (name, variant, seed): row}.values())
    return list(read(out).values())


def _header(max_steps: int) -> Row:
    """What a file begins with: versions, and how rows are made."""
    return {
        **{name: version(name) for name in ("torch_ssgp", "torch", "gpytorch")},
        "threads": torch.get_num_threads(),
        "batch": {"plateau": PLATEAU, "max_steps": max_steps},
        "streams": "StreamingGP and update with default settings",
    }


# ------------------------------------------------------------------------- the file


def read(out: Path) -> dict[Job, Row]:
    """The rows in a file, by stream, variant and seed."""
    if not out.exists():
        return {}
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    return {(row["stream"], row["variant"], row["seed"]): row for row in rows}


def write(out: Path, header: Row, rows: Iterable[Row]) -> None:
    """A line for the header and one for every row; whole at any time."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = f'{{"header": {json.dumps(header)},\n"rows": [\n{lines}\n]}}\n'
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, out)


# ----------------------------------------------------------------------- the tables


class Run(NamedTuple):
    """A row against the batch model of its data.

    Attributes:
        row: The run.
        q: RMSE / batch and MLL - batch from q(b); an RMSE below :data:`FLOOR` is taken
            for it.
        memory: The same from the memory's points.
        cpu: CPU seconds / batch.
    """

    row: Row
    q: Gap
    memory: Gap
    cpu: float


def compared(rows: list[Row]) -> dict[tuple[str, str], list[Run]]:
    """Runs that have a batch model, by stream and variant, in the order of tables."""
    ceiling = {
        (row["stream"], row["seed"]): row for row in rows if row["variant"] == BATCH
    }
    result: dict[tuple[str, str], list[Run]] = {
        (name, variant): [] for name in CASES for variant in VARIANTS
    }
    for row in sorted(rows, key=lambda row: row["seed"]):
        name, variant = row["stream"], row["variant"]
        best = ceiling.get((name, row["seed"] if CASES[name].seeded else 0))
        if variant == BATCH or best is None:
            continue
        q, memory = (
            gap(_floored(row, source), _floored(best))
            for source in (FROM_Q, FROM_MEMORY)
        )
        cpu = row["cpu_seconds"] / best["cpu_seconds"]
        result[name, variant].append(Run(row, q, memory, cpu))
    return {key: runs for key, runs in result.items() if runs}


def _floored(row: Row, source: str = FROM_Q) -> Row:
    """Scores from q(b) or from the memory, with an RMSE of no less than the floor."""
    prefix = "memory " if source == FROM_MEMORY else ""
    rmse, mll = row[f"{prefix}RMSE"], row[f"{prefix}MLL"]
    return {"RMSE": max(rmse, FLOOR), "MLL": mll}


def table(rows: list[Row]) -> list[Row]:
    """One line per stream and variant: ranges over seeds, against the batch model."""
    return [
        {
            "stream": name,
            "variant": variant,
            "seeds": len(runs),
            "M": _median([run.row["M"] for run in runs]),
            "R": _median([run.row["R"] for run in runs]),
            "RMSE": _median([run.row["RMSE"] for run in runs]),
            "RMSE / batch": _range([run.q.ratio for run in runs], ".3f"),
            "MLL - batch": _range([run.q.difference for run in runs], "+.3f"),
            "memory RMSE / batch": _range([run.memory.ratio for run in runs], ".3f"),
            "memory MLL - batch": _range(
                [run.memory.difference for run in runs], "+.3f"
            ),
            "CPU seconds": _median([run.row["cpu_seconds"] for run in runs]),
            "CPU / batch": _range([run.cpu for run in runs], ".2f"),
            "failures": sum(bool(run.row["failure"]) for run in runs),
        }
        for (name, variant), runs in compared(rows).items()
    ]


def references(rows: list[Row]) -> list[Row]:
    """One line per batch model: where it ends, and whether that is a plateau."""
    order = {name: place for place, name in enumerate(CASES)}
    return [
        {
            "stream": row["stream"],
            "seed": row["seed"],
            **{name: row[name] for name in ("M", "RMSE", "MLL")},
            "bound per datum": row["bound"],
            "evaluations": row["steps"],
            "restarts": row["restarts"],
            "plateau": "yes" if row["converged"] else "no",
            "CPU seconds": row["cpu_seconds"],
            "until near": row["cpu_seconds_near"],
        }
        for row in sorted(rows, key=lambda row: (order[row["stream"]], row["seed"]))
        if row["variant"] == BATCH
    ]


def bars(rows: list[Row]) -> list[Row]:
    """One line per stream that has a bar: the default's worst seed, and who met it."""
    lines = []
    for (name, variant), runs in compared(rows).items():
        bar = CASES[name].bar
        if variant != DEFAULT or bar is None:
            continue
        source, met = FROM_Q, _meets(runs, bar, FROM_Q)
        if not met and bar.memory_counts and _meets(runs, bar, FROM_MEMORY):
            source, met = FROM_MEMORY, True
        gaps = [run.q if source == FROM_Q else run.memory for run in runs]
        lines.append(
            {
                "stream": name,
                "bar": str(bar),
                "seeds": len(runs),
                "from": source,
                "worst RMSE / batch": max(each.ratio for each in gaps),
                "worst MLL - batch": min(each.difference for each in gaps),
                "met": "yes" if met else "no",
            }
        )
    return lines


def _meets(runs: list[Run], bar: Bar, source: str) -> bool:
    """Whether every seed meets the bar; what failed does not."""
    ends = [(run.row, run.q if source == FROM_Q else run.memory) for run in runs]
    return all(
        not row["failure"] and end.ratio <= bar.ratio and end.difference >= -bar.margin
        for row, end in ends
    )


def sizes(rows: list[Row]) -> list[Row]:
    """One line per memory size, over the streams that have them all: what R buys."""
    runs = compared(rows)
    names = [name for name in CASES if all((name, size) in runs for size in SIZES)]
    lines = []
    for variant in SIZES if names else ():
        middles = [_middle(runs[name, variant]) for name in names]
        line: Row = {"variant": variant, "streams": len(names)}
        for label, gaps in [
            ("", [middle.q for middle in middles]),
            ("memory ", [middle.memory for middle in middles]),
        ]:
            ratios = [each.ratio for each in gaps]
            differences = [each.difference for each in gaps]
            line |= {
                f"{label}RMSE / batch, median": statistics.median(ratios),
                f"{label}RMSE / batch, worst": max(ratios),
                f"{label}MLL - batch, median": statistics.median(differences),
                f"{label}MLL - batch, worst": min(differences),
            }
        cpu = [middle.cpu for middle in middles]
        lines.append({**line, "CPU / batch, median": statistics.median(cpu)})
    return lines


def storage(rows: list[Row]) -> list[Row]:
    """One line per stream: the default, and its storage spent on inducing points."""
    runs = compared(rows)
    lines = []
    for name in CASES:
        pair = [runs.get((name, variant)) for variant in (DEFAULT, STORAGE)]
        if not all(pair):
            continue
        ours, other = (_middle(each) for each in pair)
        first, second = pair[0][0].row, pair[1][0].row
        lines.append(
            {
                "stream": name,
                "M, R": f"{first['M']}, {first['R']}",
                "M'": second["M"],
                "RMSE / batch": ours.q.ratio,
                "from memory": ours.memory.ratio,
                "with M'": other.q.ratio,
                "MLL - batch": ours.q.difference,
                "MLL from memory": ours.memory.difference,
                "MLL with M'": other.q.difference,
                "CPU / batch": ours.cpu,
                "CPU with M'": other.cpu,
            }
        )
    return lines


class Middle(NamedTuple):
    """Medians over seeds, as in :class:`Run`."""

    q: Gap
    memory: Gap
    cpu: float


def _middle(runs: list[Run]) -> Middle:
    def median(gaps: list[Gap]) -> Gap:
        return Gap(
            statistics.median(each.ratio for each in gaps),
            statistics.median(each.difference for each in gaps),
        )

    return Middle(
        median([run.q for run in runs]),
        median([run.memory for run in runs]),
        statistics.median(run.cpu for run in runs),
    )


def _median(values: list[float]) -> float:
    """As a whole number where all are."""
    return statistics.median(values) if len(values) > 1 else values[0]


def _range(values: list[float], form: str) -> str:
    """Smallest and largest of several values; the one there is."""
    ends = dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values)))
    return " to ".join(ends)


# -------------------------------------------------------------------------- the page


def sections(rows: list[Row]) -> dict[str, str]:
    """What ``docs/benchmarks.md`` has to say about the memory, by place.

    Args:
        rows: What :func:`run` wrote.
    """
    return {
        "memory_bars": markdown(bars(rows)),
        "memory_streams": markdown(table(rows)),
        "memory_sizes": markdown(sizes(rows)),
        "memory_storage": markdown(storage(rows)),
        "memory_references": markdown(references(rows)),
        "memory_remarks": remarks(rows),
        "memory_floor": f"{FLOOR:g}",
    }


def remarks(rows: list[Row]) -> str:
    """Which runs were not made yet, which failed, and which references fall short."""
    done = {(row["stream"], row["variant"]) for row in rows}
    gaps = [
        f"{name} ({', '.join(left)})"
        for name in CASES
        if (left := [each for each in [BATCH, *VARIANTS] if (name, each) not in done])
    ]
    short = [
        f"{row['stream']} ({row['seed']})"
        for row in rows
        if row["variant"] == BATCH and not row["converged"]
    ]
    failed = [
        f"{row['stream']}, {row['variant']} ({row['seed']})"
        for row in rows
        if row["failure"]
    ]
    versions = sorted({row["version"] for row in rows})
    return " ".join(
        f"{text}: {joined}."
        for text, joined in [
            ("Not run yet", "; ".join(gaps)),
            ("Batch models that are on no plateau (seed)", "; ".join(short)),
            ("Runs that failed (seed)", "; ".join(failed)),
            ("Versions of torch_ssgp", listed(versions)),
        ]
        if joined
    )


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "command",
        nargs="?",
        choices=["streams", "tables"],
        default="streams",
        help="run what is missing (streams), or print what is there",
    )
    parser.add_argument(
        "--out",
        "--json",
        type=Path,
        default=Path("out/memory.json"),
        help="where results are kept (out/memory.json)",
    )
    parser.add_argument("--data-dir", type=Path, help="where UCI and OS files are")
    parser.add_argument(
        "--seeds", type=positive, default=3, help="splits, draws or roundings (3)"
    )
    parser.add_argument("--streams", nargs="*", choices=[*CASES], help="only these")
    parser.add_argument(
        "--variants", nargs="*", choices=[BATCH, *VARIANTS], help="only these"
    )
    parser.add_argument(
        "--max-steps",
        type=positive,
        default=MAX_STEPS,
        help=f"evaluations of the bound by a batch model ({MAX_STEPS})",
    )
    parser.add_argument("--again", action="store_true", help="replace rows of the file")
    parser.add_argument("--threads", type=positive, default=1, help="of torch (1)")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    if chosen.command == "tables":
        rows = list(read(chosen.out).values())
    else:
        rows = run(
            chosen.out,
            chosen.data_dir,
            chosen.seeds,
            chosen.streams or (),
            chosen.variants or (),
            chosen.max_steps,
            chosen.again,
        )
    print("\n\n".join(text for text in sections(rows).values() if text))

"""Ten thousand updates of one model on a stream that is hard on purpose.

    python scripts/soak.py --out docs/data/soak.json   # takes minutes
    python scripts/soak.py --report                    # docs/soak.md from that file
    python scripts/soak.py --quick                     # a short one: does it run?

Learning stays on. The stream changes its function, range, scale and noise at once, has
gaps, outliers and copies; now and then the model is conditioned on the side, saved and
loaded. What is looked for: exceptions, NaN, fallbacks, memory or time that grow, and
how far the predictions are from those of a model that sees the present regime only.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import tempfile
import time
import traceback
import warnings
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor, nn
from tqdm import tqdm

from torch_ssgp import StreamingGP, UpdateResult
from workbench.common import markdown, positive, resident_mib, wrapped, write_json

ROOT = Path(__file__).resolve().parents[2]
DATA, PAGE = ROOT / "docs" / "data" / "soak.json", ROOT / "docs" / "soak.md"
OUT = Path("out/soak.json")  # of a run that is not meant for the docs

NOISE = 0.1  # standard deviation, in units of that of the function
OUTLIER = 20.0  # in units of the noise
WIDTH = 4.0  # of the input range
NUM_TEST = 100
RECOVERED = 1.5  # times the error of the batch model that count as recovered

Row = dict[str, Any]


# ------------------------------------------------------------------------ the stream


class Change(NamedTuple):
    """What happens when a regime begins.

    Attributes:
        name: What to call it.
        forget: ``forget`` of the updates in this regime.
        new_range: Whether inputs move to where none has been.
        factor: What the scale of y is multiplied by.
        noise: Noise, in units of the scale.
        gap: Whether the middle of the range is never observed.
    """

    name: str
    forget: float = 1.0
    new_range: bool = False
    factor: float = 1.0
    noise: float = NOISE
    gap: bool = False


# In this order, again and again: the scale is back where it was after one round.
CHANGES = (
    Change("range moves", new_range=True),
    Change("range moves, no noise", new_range=True, noise=0.0),
    Change("range moves, gap", new_range=True, gap=True),
    Change("function changes"),
    Change("function changes", forget=0.9),
    Change("function changes, y 1000x larger", forget=0.9, factor=1e3),
    Change("function changes, y 1000x smaller", forget=0.8, factor=1e-3),
    Change("function changes, no noise", forget=0.9, noise=0.0),
    Change("range moves, y 1000x larger", new_range=True, factor=1e3),
    Change("range moves, y 1000x smaller", new_range=True, factor=1e-3),
    Change("function changes", forget=0.8),
)


class Regime:
    """A function on a range, with its scale and noise.

    Args:
        change: How it differs from the regime before.
        low: Where its inputs begin.
        scale: Its standard deviation.
        num_dims: Number of inputs.
        rng: Source of all random numbers.
    """

    def __init__(
        self,
        change: Change,
        low: float,
        scale: float,
        num_dims: int,
        rng: torch.Generator,
    ) -> None:
        self.change, self.low, self.scale = change, low, scale
        self.rng, self.num_dims = rng, num_dims
        self.lengthscale = 2 ** (2 * float(self.uniform(())) - 1)  # 0.5 to 2
        self.w = self.normal((num_dims, 100)) / self.lengthscale
        self.b = 2 * math.pi * self.uniform((100,))

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """Numbers in [0, 1)."""
        return torch.rand(shape, generator=self.rng, dtype=torch.float64)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.rng, dtype=torch.float64)

    def f(self, x: Tensor) -> Tensor:
        """The function, a draw from a GP with an RBF kernel, ``(n,)``."""
        features = (x @ self.w + self.b).cos()
        return self.scale * features.mean(-1) * math.sqrt(2 * len(self.b))

    def inputs(self, n: int) -> Tensor:
        """Inputs ``(n, d)`` of the range; first third or last third if it has a gap."""
        u = self.uniform((n, self.num_dims))
        if self.change.gap:
            u[:, 0] = torch.where(u[:, 0] < 0.5, u[:, 0] * 2 / 3, (2 * u[:, 0] + 1) / 3)
        return self.low + WIDTH * u

    def observe(self, x: Tensor) -> Tensor:
        """Noisy values ``(n,)``."""
        return self.f(x) + self.scale * self.change.noise * self.normal((len(x),))

    def batch(
        self, previous: tuple[Tensor, Tensor] | None
    ) -> tuple[str, Tensor, Tensor]:
        """A batch of 1 to 20 points, one in eight of them odd, and what it is."""
        size = (1, 2 + int(4 * self.uniform(())), 5 + int(16 * self.uniform(())))
        n = size[int(self.uniform(()).mul(4).clamp_max(2))]
        x = self.inputs(n)
        odd = float(self.uniform(()))
        if odd < 0.03 and previous is not None:
            return "same batch again", *previous
        if 0.03 <= odd < 0.06:
            x = x[:1].expand(20, -1).clone()
            return "identical inputs", x, self.observe(x)
        y = self.observe(x)
        if 0.06 <= odd < 0.12:
            y[0] += OUTLIER * NOISE * self.scale * (1 if odd < 0.09 else -1)
            return "outlier", x, y
        return ("one point" if n == 1 else "plain"), x, y


def options(regime: Regime, fresh: bool) -> dict[str, Any]:
    """Options of an update: few steps as a rule, now and then something else.

    Args:
        regime: The present regime.
        fresh: Whether it has just begun: then every update learns hyperparameters.
    """
    u = float(regime.uniform(()))
    chosen: dict[str, Any] = {
        "num_steps": 4,
        "learn_hyperparameters": True if fresh else 8,
        "learn_inducing_points": False,
        "forget": regime.change.forget,
    }
    if u < 0.05:
        chosen["num_steps"] = 0
    elif u < 0.10:
        chosen["num_steps"] = 20
    elif u < 0.12:
        chosen["optimizer"] = "lbfgs"
    elif u < 0.20:
        chosen["trust_region"] = 0.3
    elif u < 0.24:
        chosen["learn_inducing_points"] = True
    return chosen


# ----------------------------------------------------------------------- the checks


def new_model(num_dims: int, num_inducing: int) -> StreamingGP:
    """Float64, default policy, a lengthscale per input."""
    kernel = ScaleKernel(RBFKernel(ard_num_dims=num_dims))
    return StreamingGP(kernel, num_inducing=num_inducing).double()


def noise_std(model: StreamingGP) -> float:
    """Standard deviation of the noise, as learned."""
    return float(model.likelihood.noise.detach().sqrt())


def lengthscale(model: StreamingGP) -> float:
    """Geometric mean of the lengthscales, as learned."""
    kernel = model.covar_module.base_kernel
    return float(kernel.lengthscale.detach().log().mean().exp())


def rmse(model: StreamingGP, x: Tensor, f: Tensor) -> float:
    """Error of the mean against the function without noise."""
    return float((model(x).mean.detach() - f).square().mean().sqrt())


def batch_rmse(
    data: tuple[Tensor, Tensor],
    x: Tensor,
    f: Tensor,
    num_inducing: int,
    num_steps: int,
) -> float:
    """The same of a model with the same budget that sees ``data`` alone, at once."""
    model = new_model(x.size(-1), num_inducing)
    model.update(*data, num_steps=num_steps)
    return rmse(model, x, f)


def sample(k: int, model: StreamingGP) -> Row:
    """What the process and the model hold after ``k`` updates."""
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(type(obj) in (Tensor, nn.Parameter) for obj in objects)
    return {
        "update": k,
        "resident_MiB": round(resident_mib(), 2),
        "objects": len(objects),
        "tensors": tensors,
        "M": model.summary.num_inducing,
        "noise_std": noise_std(model),
    }


class Soak:
    """One model on its way through the stream, and what was seen of it.

    Args:
        updates: Number of updates.
        seed: Seed of the stream.
        num_dims: Number of inputs.
        num_inducing: Budget of inducing points.
        regime: Updates between two changes.
        batch_steps: Steps that a batch model learns.
    """

    def __init__(
        self,
        updates: int,
        seed: int,
        num_dims: int,
        num_inducing: int,
        regime: int,
        batch_steps: int,
    ) -> None:
        self.batch_steps = batch_steps
        self.seed = seed
        self.updates, self.num_inducing, self.length = updates, num_inducing, regime
        self.num_dims, self.rng = num_dims, torch.Generator().manual_seed(seed)
        self.model = new_model(num_dims, num_inducing)
        # Of fixed size from the start: the memory that is measured is the model's.
        self.seconds = array("d", bytes(8 * updates))
        self.num_inducing_now = array("d", bytes(8 * updates))
        self.counts: dict[str, Counter[str]] = {
            name: Counter()
            for name in ("batches", "status", "warnings", "exceptions", "not_finite")
        }
        self.side = Counter(
            conditioned=0, conditioned_and_changed=0, loaded=0, loaded_and_differs=0
        )
        self.first_traceback: str | None = None
        self.regimes: list[Row] = []
        self.samples: list[Row] = []

    def run(self, progress: bool, out: Path | None) -> Row:
        """All updates, and the report; ``out`` holds what is known so far."""
        first = min(500, max(self.updates // 4, 1))
        looks = {round(first + (self.updates - first) * i / 20) for i in range(21)}
        start, low, scale = time.perf_counter(), 0.0, 1.0
        regime: Regime | None = None
        previous: tuple[Tensor, Tensor] | None = None
        for k in tqdm(range(self.updates), desc="soak", disable=not progress):
            if k % self.length == 0:
                if regime is not None:
                    self.end(regime)
                change = CHANGES[k // self.length % len(CHANGES)]
                low += 1.5 * WIDTH * change.new_range
                scale *= change.factor
                regime = Regime(change, low, scale, self.num_dims, self.rng)
                self.begin(regime, k)
            assert regime is not None
            name, x, y = regime.batch(previous)
            self.counts["batches"][name] += 1
            previous = x, y
            self.latest.append(previous)
            self.attempt(lambda k=k, x=x, y=y, r=regime: self.step(k, x, y, r))
            if k + 1 in looks:
                self.samples.append(sample(k + 1, self.model))
                if out is not None:
                    write_json(out, self.report(k + 1, time.perf_counter() - start))
        assert regime is not None
        self.end(regime)
        return self.report(self.updates, time.perf_counter() - start)

    def attempt(self, action: Callable[[], None]) -> None:
        """Act; an exception is counted, and the run goes on."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                action()
            except Exception as error:
                self.counts["exceptions"][type(error).__name__] += 1
                self.first_traceback = self.first_traceback or traceback.format_exc()
        self.counts["warnings"].update(w.category.__name__ for w in caught)

    def check(self, name: str, *tensors: Tensor) -> None:
        """Count what is not finite."""
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            self.counts["not_finite"][name] += 1

    def step(self, k: int, x: Tensor, y: Tensor, regime: Regime) -> None:
        """One update, predictions after it, and now and then more."""
        chosen = options(regime, 20 * (k - self.begun) < self.length)
        start = time.process_time()  # others may use the machine as well
        result: UpdateResult = self.model.update(x, y, **chosen)
        self.seconds[k] = time.process_time() - start
        self.num_inducing_now[k] = result.num_inducing
        self.counts["status"][result.status] += 1
        self.check(
            "result",
            result.bound,
            result.increment,
            result.projection_loss,
            result.bound_trace,
        )
        with torch.no_grad():
            prediction = self.model.predict(self.x_test)
            self.check("prediction", prediction.mean, prediction.variance.log())
            summary = self.model.summary.state_dict().values()
            self.check("state", *self.model.parameters(), *summary)
            if k % 5 == 4:
                error = rmse(self.model, self.x_test, self.f_test)
                self.trace.append((k + 1 - self.begun, error))
            if k % 97 == 96:
                self.condition(x, y)
            if k % 199 == 198:
                self.save_and_load()

    def condition(self, x: Tensor, y: Tensor) -> None:
        """Condition on data that were not seen: finite, and the model as it was."""
        self.side["conditioned"] += 1
        before = {name: v.clone() for name, v in self.model.state_dict().items()}
        other = self.model.condition_on_observations(x + 0.01, y)
        prediction = other.predict(self.x_test)
        self.check("conditioned", prediction.mean, prediction.variance.log())
        after = self.model.state_dict()
        same = all(torch.equal(value, after[name]) for name, value in before.items())
        self.side["conditioned_and_changed"] += not same

    def save_and_load(self) -> None:
        """Go on with a model from a file."""
        self.side["loaded"] += 1
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.pt"
            self.model.save(path)
            loaded = StreamingGP.load(path)
        a, b = self.model(self.x_test).mean, loaded(self.x_test).mean
        self.side["loaded_and_differs"] += not torch.equal(a, b)
        self.model = loaded

    def begin(self, regime: Regime, k: int) -> None:
        """Keep what the end of the regime is judged by."""
        self.x_test = regime.inputs(NUM_TEST)
        self.f_test = regime.f(self.x_test)
        self.begun = k
        self.trace: list[tuple[int, float]] = []
        self.latest: list[tuple[Tensor, Tensor]] = []

    def end(self, regime: Regime) -> None:
        """Compare with a batch model of a sample of the regime's data."""
        x = torch.cat([x for x, _ in self.latest])[-200:]
        y = torch.cat([y for _, y in self.latest])[-200:]
        row: Row = {
            "change": regime.change.name,
            "forget": regime.change.forget,
            "from_update": self.begun,
            "scale": regime.scale,
            "noise_std": regime.change.noise * regime.scale,
            "learned_noise_std": noise_std(self.model),
            "lengthscale": regime.lengthscale,
            "learned_lengthscale": lengthscale(self.model),
            "M": self.model.summary.num_inducing,
        }

        def compare() -> None:
            stream = rmse(self.model, self.x_test, self.f_test)
            batch = batch_rmse(
                (x, y), self.x_test, self.f_test, self.num_inducing, self.batch_steps
            )
            good = [n for n, error in self.trace if error <= RECOVERED * batch]
            row.update(
                RMSE=stream / regime.scale,
                batch_RMSE=batch / regime.scale,
                ratio=stream / batch,
                recovered_after=good[0] if good else None,
            )

        self.attempt(compare)
        self.regimes.append(row)

    def report(self, updates: int, seconds: float) -> Row:
        """All that was seen in the updates so far, as plain values."""
        first, last = self.samples[0], self.samples[-1]
        times, sizes = self.seconds[:updates], self.num_inducing_now[:updates]
        tenth = max(updates // 10, 1)
        early = statistics.median(times[tenth : 2 * tenth])
        late = statistics.median(times[-tenth:])
        return {
            "updates": updates,
            "seed": self.seed,
            "num_dims": self.num_dims,
            "num_inducing": self.num_inducing,
            "regime": self.length,
            "seconds": seconds,
            "cpu_seconds_per_update": {
                "mean": statistics.fmean(times),
                "median": statistics.median(times),
                "max": max(times),
                "early": early,
                "late": late,
                "late_over_early": late / early if early else None,
            },
            "exceptions": sum(self.counts["exceptions"].values()),
            "exceptions_by_class": dict(self.counts["exceptions"]),
            "first_traceback": self.first_traceback,
            "not_finite": sum(self.counts["not_finite"].values()),
            "not_finite_in": dict(self.counts["not_finite"]),
            "status": dict(self.counts["status"]),
            "warnings": dict(self.counts["warnings"]),
            "batches": dict(self.counts["batches"]),
            **self.side,
            "memory_growth": last["resident_MiB"] / first["resident_MiB"],
            "M": {
                "min": min(sizes),
                "median": statistics.median(sizes),
                "max": max(sizes),
            },
            "samples": self.samples,
            "regimes": self.regimes,
        }


def run(
    updates: int = 10_000,
    *,
    seed: int = 0,
    num_dims: int = 2,
    num_inducing: int = 25,
    regime: int | None = None,
    batch_steps: int = 20,
    progress: bool = True,
    out: Path | None = None,
) -> Row:
    """Drive one model through the stream.

    Args:
        updates: Number of updates, at least 1.
        seed: Seed of the stream.
        num_dims: Number of inputs.
        num_inducing: Budget of inducing points.
        regime: Updates between two changes; by default 100, or fewer if the run is
            too short to meet every change.
        batch_steps: Steps that the batch models learn, which the stream is compared
            with.
        progress: Whether to show a progress bar.
        out: File for the report, written at every sample: an interrupted run leaves
            what it saw.

    Returns:
        What happened, see :meth:`Soak.report`.
    """
    if regime is None:
        regime = min(100, max(updates // len(CHANGES), 1))
    soak = Soak(updates, seed, num_dims, num_inducing, regime, batch_steps)
    report = soak.run(progress, out)
    if out is not None:
        write_json(out, report)
    return report


# ------------------------------------------------------------------------- the page


def by_change(regimes: list[Row]) -> list[Row]:
    """Medians over the regimes that began with the same change."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in regimes:
        if "ratio" in row:  # otherwise an exception came between
            groups.setdefault((row["change"], row["forget"]), []).append(row)
    return [
        {
            "change": change,
            "forget": forget,
            "regimes": len(rows),
            "recovered": sum(row["recovered_after"] is not None for row in rows),
            "recovered_after": _median(
                [row["recovered_after"] for row in rows if row["recovered_after"]]
            ),
            **{
                name: _median([row[name] for row in rows])
                for name in ("RMSE", "batch_RMSE", "ratio", "M")
            },
            "noise_ratio": _median(
                [row["learned_noise_std"] / row["scale"] for row in rows]
            ),
            "lengthscale_ratio": _median(
                [row["learned_lengthscale"] / row["lengthscale"] for row in rows]
            ),
        }
        for (change, forget), rows in groups.items()
    ]


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else math.nan


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.3g}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def page(report: Row) -> str:
    """The report as Markdown."""
    seconds = report["cpu_seconds_per_update"]
    return wrapped(f"""# {report["updates"]:,} updates of one model

Written by `scripts/soak.py --report` from `data/soak.json`; run it again with
`scripts/soak.py --out docs/data/soak.json`.

One `StreamingGP` (float64, {report["num_dims"]} inputs, default policy, at most
{report["num_inducing"]} inducing points) goes through a stream that is hard on purpose.
Every {report["regime"]} updates the function changes, the inputs move to a new range,
y grows or shrinks by a factor of 1,000, or the noise stops. Batches have 1 to 20
points: {_counts(report["batches"])}. An outlier is {OUTLIER:g} standard deviations of
the noise off. Hyperparameters are learned in the first twentieth of a regime by every
update, then by every eighth, mostly in 4 Adam steps; some updates take none or 20,
L-BFGS, a trust region, or move inducing points.

{markdown(verdicts(report))}

An update took {1e3 * seconds["median"]:.0f} ms of CPU time in the median,
{1e3 * seconds["mean"]:.0f} ms in the mean, on a machine that had other work as well.

## Memory

After `gc.collect()`:

{markdown(memory(report["samples"]))}

## Against a batch model of the present regime

At the end of every regime: error of the mean at {NUM_TEST} points of the present range
against the function without noise, beside a new model with the same budget that gets
the last 200 data of the regime at once. Errors and learned noise are in units of the
standard deviation of the function, the lengthscale is the one learned over the true
one, all columns are medians over regimes; the true noise is {NOISE:g} or 0, outliers
not counted. A regime has recovered at the first look, one every 5 updates, at which
the error is at most {RECOVERED:g} times that of the batch model.

{markdown(accuracy(report["regimes"]))}

How to read it:

{reading(report)}
""")


def verdicts(report: Row) -> list[Row]:
    """What the run was made for, beside what it should be."""
    first, last = report["samples"][0], report["samples"][-1]
    sizes = report["M"]
    lines = [
        ("exceptions", f"{report['exceptions']:,}", "0"),
        ("updates with NaN or infinity", f"{report['not_finite']:,}", "0"),
        (
            f"resident memory, update {last['update']:,} / {first['update']:,}",
            f"{report['memory_growth']:.3f}",
            "1.05",
        ),
        ("status", _counts(report["status"]), ""),
        ("warnings", _counts(report["warnings"]), ""),
        (
            "conditioned on the side, model changed by it",
            f"{report['conditioned']:,}, {report['conditioned_and_changed']:,}",
            "0 changed",
        ),
        (
            "saved and loaded, predictions differ",
            f"{report['loaded']:,}, {report['loaded_and_differs']:,}",
            "0 differ",
        ),
        (
            "inducing points: least, median, most",
            ", ".join(f"{sizes[name]:.0f}" for name in ("min", "median", "max")),
            f"{report['num_inducing']}",
        ),
        (
            "CPU time per update, last tenth / second tenth",
            _number(report["cpu_seconds_per_update"]["late_over_early"] or math.nan),
            "",
        ),
    ]
    return [dict(zip(("what", "measured", "bar"), line, strict=True)) for line in lines]


def memory(samples: list[Row]) -> list[Row]:
    """Some of the looks at the process."""
    return [
        {
            "update": f"{row['update']:,}",
            "resident MiB": f"{row['resident_MiB']:.1f}",
            "Python objects": f"{row['objects']:,}",
            "tensors": row["tensors"],
            "M": row["M"],
        }
        for row in [*samples[:-1:4], samples[-1]]
    ]


def accuracy(regimes: list[Row]) -> list[Row]:
    """How regimes ended, by what they began with."""
    return [
        {
            "change": row["change"],
            "forget": f"{row['forget']:g}",
            "RMSE": _number(row["RMSE"]),
            "batch RMSE": _number(row["batch_RMSE"]),
            "ratio": _number(row["ratio"]),
            "learned noise": _number(row["noise_ratio"]),
            "lengthscale": _number(row["lengthscale_ratio"]),
            "M": f"{row['M']:.0f}",
            "recovered": f"{row['recovered']} of {row['regimes']}",
            "after updates": _number(row["recovered_after"])
            if row["recovered"]
            else "never",
        }
        for row in by_change(regimes)
    ]


# ------------------------------------------------------- sentences, from the numbers


class Recovery(NamedTuple):
    """How many regimes came near the batch model."""

    recovered: int
    regimes: int

    def __str__(self) -> str:
        return f"{self.recovered} of {self.regimes}"

    @property
    def most(self) -> bool:
        """Whether it is more than half of them."""
        return 2 * self.recovered > self.regimes


def recovery(regimes: list[Row]) -> Recovery:
    """Of regimes that were compared."""
    after = [row["recovered_after"] for row in regimes if "recovered_after" in row]
    return Recovery(sum(n is not None for n in after), len(after))


def reading(report: Row) -> str:
    """What the table says, as a list; sentences that do not apply are left out."""
    regimes = report["regimes"]
    parts = [
        f"Recovered: {recovery(regimes)} regimes.",
        "With `forget=1` all data ever seen count, as they should if there is one "
        "function and one noise. Where a stream contradicts its past, the past is "
        "explained as noise, which is shared by all data. " + forgetting(regimes),
        "With `forget` the past fades by that factor per update. What was 1,000 times "
        "larger has 10⁶ times the variance, and takes ln 10⁶ / ln(1 / forget) updates "
        f"to fade: {_fading(0.9):.0f} at 0.9, {_fading(0.8):.0f} at 0.8.",
        points(report),
        collapse(report),
        "The batch model knows nothing of the past. The stream has the same budget of "
        "inducing points for the present range and, unless it forgets, all ranges "
        "before.",
    ]
    return "\n".join(f"- {part}" for part in parts if part)


def forgetting(regimes: list[Row]) -> str:
    """Whether ``forget`` below 1 helps: against noise that is too large, in the fit."""
    kept = [row for row in regimes if row["forget"] == 1]
    faded = [row for row in regimes if row["forget"] < 1]
    with_it, without = recovery(faded), recovery(kept)
    if not with_it.regimes or not without.regimes:
        return ""
    shrunk = {change.name for change in CHANGES if change.factor < 1}
    noise, noise_kept = (
        _median(
            [r["learned_noise_std"] / r["scale"] for r in rows if r["change"] in shrunk]
        )
        for rows in (faded, kept)
    )
    numbers = f"{with_it} regimes recovered with `forget` below 1, {without} with 1."
    if math.isnan(noise) or math.isnan(noise_kept):
        return numbers
    numbers = (
        f"After y became 1,000 times smaller, the learned noise is {_number(noise)} "
        f"with `forget` below 1, {_number(noise_kept)} with 1, in the median. {numbers}"
    )
    if noise <= 3 * NOISE:
        verdict = "is the cure" if with_it.most else "cures the noise, not the fit"
    elif noise < 0.1 * noise_kept:
        verdict = f"brings the noise down, though not to the true {NOISE:g}"
    else:
        verdict = "is no cure for the noise here"
    return f"`forget` below 1 {verdict}. {numbers}"


def points(report: Row) -> str:
    """Inducing points and the lengthscale at the end."""
    samples, regimes = report["samples"], report["regimes"]
    last = samples[-1]
    text = (
        f"Inducing points at the end: {last['M']} of {report['num_inducing']} allowed"
    )
    if last["M"] == 1:
        before = max((row["update"] for row in samples if row["M"] > 1), default=0)
        since = next(row["update"] for row in samples if row["update"] > before)
        text += f", and 1 at every look since update {since:,}"
    if regimes:
        true, learned = (regimes[-1][k] for k in ("lengthscale", "learned_lengthscale"))
        text += (
            f". The lengthscale is {_number(learned)}; that of the function is "
            f"{_number(true)}"
        )
    return text + "."


def collapse(report: Row) -> str:
    """How we read a run that lost its lengthscale and its inducing points."""
    ratios = [r["learned_lengthscale"] / r["lengthscale"] for r in report["regimes"]]
    few = 5 * report["samples"][-1]["M"] <= report["num_inducing"]
    if recovery(report["regimes"]).most or not few or _median(ratios) < 10:
        return ""
    return (
        "How we read the slow recovery, without a test of it: while the noise of a "
        "larger past hides the function, nothing says what its hyperparameters are: "
        "the lengthscale drifts upwards, and inducing points that seem to be of no "
        "use are dropped. When the noise has faded, both have to come back, from "
        "batches of few points, each of which says little about a lengthscale. That "
        "takes longer than a regime lasts here, and the regimes after it suffer as "
        "well; it is the weakest spot that this run shows. After a fall of that size a "
        "new model is the better choice: the batch model beside it is one."
    )


def _fading(forget: float) -> float:
    return math.log(1e6) / -math.log(forget)


def main(arguments: list[str] | None = None) -> None:
    """Run, or write the page from a run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--updates", type=positive, default=10_000, help="how many (10,000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the stream (0)")
    parser.add_argument("--dims", type=positive, default=2, help="number of inputs (2)")
    parser.add_argument(
        "--out", type=Path, help=f"where what was seen is kept ({OUT}), or read from"
    )
    parser.add_argument("--quick", action="store_true", help="300 updates")
    parser.add_argument(
        "--report",
        action="store_true",
        help="no run: docs/soak.md from --out (docs/data/soak.json)",
    )
    chosen = parser.parse_args(arguments)
    if chosen.report:
        report = json.loads((chosen.out or DATA).read_text(encoding="utf-8"))
        PAGE.write_text(page(report), encoding="utf-8")
        return
    torch.set_num_threads(1)
    updates = 300 if chosen.quick else chosen.updates
    run(updates, seed=chosen.seed, num_dims=chosen.dims, out=chosen.out or OUT)

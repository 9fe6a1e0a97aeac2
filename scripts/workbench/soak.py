"""Ten thousand updates of one model on a stream that is hard on purpose.

    python scripts/soak.py --out docs/data/soak.json   # half an hour
    python scripts/soak.py --report                    # docs/soak.md from that file
    python scripts/soak.py --quick                     # a short one: does it run?

Updates have the library's defaults and ``forget="auto"``. The stream changes its
function, range, scale and noise at once, has gaps, outliers and copies; now and then
the model is conditioned on the side, saved and loaded. What is looked for: exceptions,
NaN, fallbacks, memory or time that grow, and how far the predictions are from those of
a model that sees the present regime only.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
import traceback
import warnings
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor, nn
from tqdm import tqdm

from torch_ssgp import StreamingGP, UpdateResult
from workbench.common import DOCS, new_parser, positive, resident_mib
from workbench.results import Row, header, read, write
from workbench.soak_page import NUM_TEST, RECOVERED, page
from workbench.soak_stream import CHANGES, WIDTH, Regime

DATA, PAGE = DOCS / "data" / "soak.json", DOCS / "soak.md"
OUT = Path("out/soak.json")  # of a run that is not meant for the docs
CONDITION_EVERY, SAVE_EVERY = 97, 199  # updates between two looks at the side


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
            self.attempt(lambda k=k, x=x, y=y: self.step(k, x, y))
            if k + 1 in looks:
                self.samples.append(sample(k + 1, self.model))
                if out is not None:
                    save(out, self.report(k + 1, time.perf_counter() - start))
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

    def step(self, k: int, x: Tensor, y: Tensor) -> None:
        """One update, predictions after it, and now and then more."""
        start = time.process_time()  # others may use the machine as well
        result: UpdateResult = self.model.update(x, y, forget="auto")
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
            if k % CONDITION_EVERY == CONDITION_EVERY - 1:
                self.condition(x, y)
            if k % SAVE_EVERY == SAVE_EVERY - 1:
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
        save(out, report)
    return report


# ------------------------------------------------------------------------- the file

SETTINGS = ("updates", "seed", "num_dims", "num_inducing", "regime")


def save(path: Path, report: Row) -> None:
    """Settings in the header, then a line of totals and one for each look or regime."""
    report = {name: value for name, value in report.items() if name != "version"}
    settings = {name: report.pop(name) for name in SETTINGS}
    lists = [(kind, report.pop(f"{kind}s")) for kind in ("sample", "regime")]
    rows = [{"kind": kind, **row} for kind, each in lists for row in each]
    write(path, header(**settings), [{"kind": "totals", **report}, *rows])


def load(path: Path) -> Row:
    """The report in a file."""
    file = read(path)
    of: dict[str, list[Row]] = {"totals": [], "sample": [], "regime": []}
    for row in file.rows:
        of[row.pop("kind")].append(row)
    settings = {name: file.header[name] for name in SETTINGS}
    (totals,) = of["totals"]
    return {
        "version": file.header["torch_ssgp"],
        **settings,
        **totals,
        "samples": of["sample"],
        "regimes": of["regime"],
    }


def main(arguments: list[str] | None = None) -> None:
    """Run, or write the page from a run."""
    parser = new_parser(__doc__)
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
        PAGE.write_text(page(load(chosen.out or DATA)), encoding="utf-8")
        return
    torch.set_num_threads(1)
    updates = 300 if chosen.quick else chosen.updates
    run(
        updates,
        seed=chosen.seed,
        num_dims=chosen.dims,
        out=chosen.out or OUT,
    )

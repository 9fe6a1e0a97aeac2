"""Ten thousand updates of one model on a stream that is hard on purpose.

    python scripts/soak.py                     # half an hour; docs/data/soak.json
    python scripts/soak.py --quick --out FILE  # a short one: does it run?

Updates have the library's defaults. The stream changes its function, range, scale and
noise at once, has gaps, outliers and copies; now and then the model is conditioned on
the side, saved and loaded. What is looked for: exceptions, NaN, fallbacks, memory or
time that grow, and how far the predictions are from those of a model that sees the
present regime only.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import time
import traceback
import warnings
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from tqdm import tqdm

from torch_ssgp import StreamingGP
from workbench.baselines import new_kernel
from workbench.common import bench_parser, positive, resident_mib
from workbench.results import Row, header, write

NOISE = 0.1  # standard deviation, in units of that of the function
OUTLIER = 20.0  # in units of the noise
WIDTH = 4.0  # of the input range


class Change(NamedTuple):
    """What happens when a regime begins."""

    name: str
    new_range: bool = False  # inputs move to where none has been
    factor: float = 1.0  # of the scale of y
    noise: float = NOISE  # in units of the scale
    gap: bool = False  # the middle of the range is never observed


# In this order, again and again: the scale is back where it was after one round.
CHANGES = (
    Change("range moves", new_range=True),
    Change("range moves, no noise", new_range=True, noise=0.0),
    Change("range moves, gap", new_range=True, gap=True),
    Change("function changes"),
    Change("function changes"),
    Change("function changes, y 1000x larger", factor=1e3),
    Change("function changes, y 1000x smaller", factor=1e-3),
    Change("function changes, no noise", noise=0.0),
    Change("range moves, y 1000x larger", new_range=True, factor=1e3),
    Change("range moves, y 1000x smaller", new_range=True, factor=1e-3),
    Change("function changes"),
)


class Regime:
    """A function on a range that begins at ``low``, with its scale and noise."""

    def __init__(
        self, change: Change, low: float, scale: float, num_dims: int, rng: Generator
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


NUM_TEST = 100  # points of the present range
RECOVERED = 1.5  # times the error of a new model
CONDITION_EVERY, SAVE_EVERY = 97, 199  # updates between two looks at the side


def new_model(num_dims: int, num_inducing: int) -> StreamingGP:
    """Float64, a lengthscale per input."""
    return StreamingGP(new_kernel(num_dims), num_inducing=num_inducing).double()


@torch.no_grad()
def rmse(model: StreamingGP, x: Tensor, f: Tensor) -> float:
    """Error of the mean against the function without noise."""
    return float((model(x).mean - f).square().mean().sqrt())


def sample(k: int, model: StreamingGP) -> Row:
    """What the process and the model hold after ``k`` updates."""
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(type(obj) in (Tensor, nn.Parameter) for obj in objects)
    row = {"update": k, "resident_MiB": round(resident_mib(), 2)}
    return {**row, "objects": len(objects), "tensors": tensors}


class Soak:
    """One model on its way through the stream, and what was seen of it.

    A regime has 100 updates; fewer if the run is too short to meet all changes. A batch
    model learns for so many steps.
    """

    num_inducing = 25

    def __init__(
        self, updates: int, seed: int = 0, num_dims: int = 2, batch_steps: int = 20
    ) -> None:
        self.updates, self.seed, self.batch_steps = updates, seed, batch_steps
        self.num_dims = num_dims
        self.length = min(100, max(updates // len(CHANGES), 1))
        self.rng = torch.Generator().manual_seed(seed)
        self.model = new_model(num_dims, self.num_inducing)
        # Of fixed size from the start: the memory that is measured is the model's.
        self.seconds, self.sizes = (array("d", bytes(8 * updates)) for _ in "ab")
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

    def run(self, out: Path | None = None) -> Row:
        """All updates, and the totals; ``out`` holds what is known so far."""
        first = min(500, max(self.updates // 4, 1))
        looks = {round(first + (self.updates - first) * i / 20) for i in range(21)}
        low, scale = 0.0, 1.0
        previous: list[Tensor] | None = None
        regime: Any = None
        for k in tqdm(range(self.updates), desc="soak", disable=None):
            if k % self.length == 0:
                if regime:
                    self.end(regime)
                change = CHANGES[k // self.length % len(CHANGES)]
                low += 1.5 * WIDTH * change.new_range
                scale *= change.factor
                regime = Regime(change, low, scale, self.num_dims, self.rng)
                self.begin(regime, k)
            name, *previous = regime.batch(previous)
            self.counts["batches"][name] += 1
            self.latest.append(previous)
            self.attempt(partial(self.step, k, *previous))
            if k + 1 in looks:
                self.samples.append(sample(k + 1, self.model))
                if out is not None:
                    self.save(out, k + 1)
        self.end(regime)
        if out is not None:
            self.save(out, self.updates)
        return self.totals(self.updates)

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

    @torch.no_grad()
    def step(self, k: int, x: Tensor, y: Tensor) -> None:
        """One update, predictions after it, and now and then more."""
        start = time.process_time()  # others may use the machine as well
        result = self.model.update(x, y)
        self.seconds[k] = time.process_time() - start
        self.sizes[k] = self.model.points.size(-2)
        self.counts["status"][result.status] += 1
        self.check("result", result.bound, result.increment, result.bound_trace)
        prediction = self.model.predict(self.x_test)
        self.check("prediction", prediction.mean, prediction.variance.log())
        state = [*self.model.memory.state_dict().values(), *self.model.parameters()]
        self.check("state", *state)
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
        # A loaded model factorises anew what was bordered before.
        close = torch.allclose(a, b, rtol=1e-9, atol=1e-9 * float(a.abs().max()))
        self.side["loaded_and_differs"] += not close
        self.model = loaded

    def begin(self, regime: Regime, k: int) -> None:
        """Keep what the end of the regime is judged by."""
        self.x_test = regime.inputs(NUM_TEST)
        self.f_test = regime.f(self.x_test)
        self.begun = k
        self.trace: list[tuple[int, float]] = []
        self.latest: list[list[Tensor]] = []

    def end(self, regime: Regime) -> None:
        """Compare with a batch model of a sample of the regime's data."""
        data = [torch.cat(part)[-200:] for part in zip(*self.latest, strict=True)]
        kernel, noise = self.model.covar_module, self.model.likelihood.noise
        row: Row = {
            "change": regime.change.name,
            "from_update": self.begun,
            "scale": regime.scale,
            "noise_std": regime.change.noise * regime.scale,
            "learned_noise_std": float(noise.detach().sqrt()),
            "lengthscale": regime.lengthscale,
            "learned_lengthscale": float(
                kernel.base_kernel.lengthscale.detach().log().mean().exp()
            ),
        }

        def compare() -> None:
            new = new_model(self.num_dims, self.num_inducing)
            new.update(*data, num_steps=self.batch_steps)
            stream, batch = (
                rmse(model, self.x_test, self.f_test) for model in (self.model, new)
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

    def totals(self, updates: int) -> Row:
        """All that was counted in the updates so far."""
        first, last = self.samples[0], self.samples[-1]
        times, sizes = self.seconds[:updates], self.sizes[:updates]
        tenth = max(updates // 10, 1)
        early = statistics.median(times[tenth : 2 * tenth])
        late = statistics.median(times[-tenth:])
        return {
            "cpu_seconds_per_update": {
                "mean": statistics.fmean(times),
                "median": statistics.median(times),
                "max": max(times),
                "late_over_early": late / early if early else None,
            },
            "exceptions": sum(self.counts["exceptions"].values()),
            "exceptions_by_class": dict(self.counts["exceptions"]),
            "first_traceback": self.first_traceback,
            "not_finite": sum(self.counts["not_finite"].values()),
            "not_finite_in": dict(self.counts["not_finite"]),
            **{name: dict(self.counts[name]) for name in ("status", "warnings")},
            "batches": dict(self.counts["batches"]),
            **self.side,
            "memory_growth": last["resident_MiB"] / first["resident_MiB"],
            "most_points": max(sizes),
        }

    def save(self, path: Path, updates: int) -> None:
        """Totals, then a line for each look and regime."""
        settings = {"updates": self.updates, "seed": self.seed, "regime": self.length}
        settings |= {"num_dims": self.num_dims, "num_inducing": self.num_inducing}
        rows = [{"kind": "totals", **self.totals(updates)}]
        rows += [{"kind": "sample", **row} for row in self.samples]
        rows += [{"kind": "regime", **row} for row in self.regimes]
        write(path, header(**settings), rows)


def main(arguments: list[str] | None = None) -> None:
    """Run, and write what was seen."""
    parser = bench_parser(__doc__, "data/soak.json")
    parser.add_argument(
        "--updates", type=positive, default=10_000, help="how many (10,000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the stream (0)")
    parser.add_argument("--dims", type=positive, default=2, help="number of inputs (2)")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    updates = 66 if chosen.quick else chosen.updates
    Soak(updates, chosen.seed, chosen.dims).run(chosen.out)

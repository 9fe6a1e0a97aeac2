"""Effect of the constants of the package: other values of each, on cheap streams.

    python scripts/benchmark.py ablation --out docs/data/ablation.json
    python scripts/benchmark.py ablation --only PATIENCE restart --streams revisiting
    python scripts/benchmark.py ablation tables --out docs/data/ablation.json

A row is one stream with one constant changed, or with none: the default. Constants are
attributes of modules, patched for a run; options are those of an update. The list is
:data:`KNOBS`; add a line to it for a new constant. Rows in the file are not run again,
so a run can be interrupted and resumed, and split over processes with ``--streams``.
Seconds are processor time.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean as average
from typing import Any, NamedTuple
from unittest import mock

import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from torch_ssgp import StreamingGP
from torch_ssgp.update import UpdateOptions
from workbench import change_streams, hard_streams, likelihoods, soak, streams
from workbench.baselines import new_kernel, normal_scores
from workbench.bench_cases import CASES
from workbench.common import new_parser, positive
from workbench.hard_streams import SERIES, Small
from workbench.pages import markdown, median
from workbench.results import Row, Table, header, read
from workbench.running import follow
from workbench.soak_stream import CHANGES, WIDTH, Regime

NAMES = ("knob", "value", "stream", "seed")
DEFAULT = "default"
SENSOR_READINGS, LONG_READINGS = 1200, 3600  # the long one outgrows its budget
OPTION = "UpdateOptions"


# ------------------------------------------------------------------------- constants


class Knob(NamedTuple):
    """A constant or an option, and what else it might be.

    Attributes:
        where: ``module.NAME``, ``module.NAME["key"]`` or ``UpdateOptions.name``.
        alternatives: Other values.
        on: Streams that it can matter on.
    """

    where: str
    alternatives: tuple[Any, ...]
    on: tuple[str, ...]

    @property
    def name(self) -> str:
        """Short, for tables."""
        return self.where.removeprefix("torch_ssgp.")

    def target(self) -> tuple[Any, str, str | None]:
        """What holds it, its name there, and its key if it is in a dictionary."""
        found = re.fullmatch(r'(.+)\.(\w+)(?:\["(\w+)"\])?', self.where)
        if found is None:
            raise ValueError(f"{self.where!r} names no constant of a module.")
        holder, name, key = found.groups()
        if holder == OPTION:
            return UpdateOptions, name, key
        return importlib.import_module(holder), name, key

    def default(self) -> Any:
        """Its value as it ships."""
        holder, name, key = self.target()
        value = getattr(holder, name)
        return value if key is None else value[key]

    @contextmanager
    def set_to(self, value: Any) -> Iterator[UpdateOptions]:
        """The options of updates, while the constant has another value."""
        holder, name, key = self.target()
        if holder is UpdateOptions:
            yield UpdateOptions(**{name: value})
        elif key is None:
            with mock.patch.object(holder, name, value):
                yield UpdateOptions()
        else:
            with mock.patch.dict(getattr(holder, name), {key: value}):
                yield UpdateOptions()


REAL, LARGE = ("audio",), ("revisiting",)  # batches of hundreds
SMALL = ("batches of 2", "batches of 5, sorted")
PERIODS, LABELS, DEEP = ("weekly period",), ("labels",), ("deep kernel",)
LEARNING = (*SMALL, *PERIODS, "revisiting", *LABELS)
CHANGING = ("abrupt", "gradual", "noise x 3")
SENSOR, OUTGROWN = ("sensor",), ("sensor that goes on",)
MOVING = ("ranges that move",)

KNOBS = (
    Knob("torch_ssgp.models.MEMORY", (1, 3), (*REAL, *SMALL, *PERIODS)),
    Knob("torch_ssgp.compression.OVERFLOW", (0.0, 1.0), (*LARGE, *SMALL)),
    Knob("torch_ssgp.update.appending.WAITING", (0.0, 1.0), SMALL),
    Knob("torch_ssgp.compression.SPACINGS", (0.75, 3.0), (*REAL, *LARGE, *SMALL)),
    Knob("torch_ssgp.compression.MAX_CANDIDATES", (200, 3000), LARGE),
    Knob("torch_ssgp.points.ALIKE", (0.0, 0.9), (*LARGE, *SMALL)),
    Knob("torch_ssgp.inducing.NEEDED", (0.005, 0.1), (*SMALL, *SENSOR)),
    Knob("torch_ssgp.inducing.FEW", (0, 32), (*SMALL, *SENSOR)),
    Knob("torch_ssgp.update.initialization.LENGTHSCALES", ((0.3,),), LEARNING),
    Knob("torch_ssgp.update.initialization.NOISES", ((0.03,),), LEARNING),
    Knob("torch_ssgp.update.initialization.SUBSET", (50, 400), ("revisiting",)),
    Knob("torch_ssgp.update.site_initialization.LENGTHSCALES", ((0.15,),), LABELS),
    Knob("torch_ssgp.update.site_initialization.NOISES", ((0.03,),), LABELS),
    Knob("torch_ssgp.update.sites.SECANT_LENGTH", (0.5, 5.0), LABELS),
    Knob("torch_ssgp.update.objective.KNOWN", (0.05, 0.5), SMALL),
    Knob("torch_ssgp.update.objective.FAINT", (0.001, 0.5), SMALL),
    Knob('torch_ssgp.update.ascent.LEARNING_RATES["adam"]', (0.02, 0.1), LEARNING),
    Knob("torch_ssgp.update.ascent.PATIENCE", (3, 20), (*REAL, *LEARNING)),
    Knob("torch_ssgp.update.ascent.TOLERANCE", (2e-5, 5e-3), (*REAL, *LEARNING)),
    Knob("torch_ssgp.update.ascent.LEAST", (0.0, 0.5), (*SMALL, *LABELS)),
    Knob("torch_ssgp.update.ascent.SHORTER", ((), (0.5, 0.25)), LEARNING),
    Knob("torch_ssgp.update.ascent.CHECK_EVERY", (1, 20), SMALL),
    Knob("torch_ssgp.update.paying.GROWTH", (0.05, 1.0), (*REAL, *LEARNING)),
    Knob("torch_ssgp.update.paying.LOSS", (0.001, 0.1), (*REAL, *SMALL, *SENSOR)),
    Knob("torch_ssgp.update.coordinates.WEIGHT", (0.05, 1.0), DEEP),
    Knob("torch_ssgp.update.forgetting.SLACK", (0.0, 0.5), CHANGING),
    Knob("torch_ssgp.update.trial.APART", (0.05, 2.0), CHANGING),
    Knob("torch_ssgp.update.forgetting.QUIET", (0.01, 0.5), ("scale down",)),
    Knob("torch_ssgp.update.forgetting.ANEW", (0.1, 0.85), CHANGING),
    Knob("torch_ssgp.update.forgetting.OUTLIER", (2.3, 100.0), CHANGING),
    Knob("torch_ssgp.update.forgetting.WITNESS", (0.5, 6.0), CHANGING),
    Knob("torch_ssgp.update.forgetting.FADING", (0.9, 1.0), CHANGING),
    Knob("torch_ssgp.update.forgetting.LIKELY", (0.0, 2.0), CHANGING),
    Knob("torch_ssgp.update.forgetting.SURPRISING", (2.0, 8.0), CHANGING),
    Knob("torch_ssgp.update.forgetting.FOLLOWED", (0.0, 0.9), (*CHANGING, *SENSOR)),
    Knob("torch_ssgp.update.drift.SHARE", (0.1, 0.4), CHANGING),
    Knob("torch_ssgp.update.drift.REGAINED", (0.1, 1.0), CHANGING),
    Knob("torch_ssgp.update.clock.STARVED", (0.001, 0.1), OUTGROWN),
    Knob("torch_ssgp.update.clock.UNRELATED", (0.01, 0.5), OUTGROWN),
    Knob("torch_ssgp.update.clock.TICKS", (2, 20), OUTGROWN),
    Knob("torch_ssgp.update.clock.MOVED", (8, 10_000), MOVING),
    Knob("UpdateOptions.change_odds", (1e-5, 1e-1), CHANGING),
    Knob("UpdateOptions.forget", (1.0,), (*CHANGING, *OUTGROWN)),
    Knob("UpdateOptions.restart", (False,), (*LEARNING, "abrupt")),
    Knob("UpdateOptions.learn_hyperparameters", (True,), LEARNING),
)


# --------------------------------------------------------------------------- streams


class Task(NamedTuple):
    """A new model, the batches it gets, and what it is judged by.

    Attributes:
        model: It learns.
        batches: Inputs and targets.
        x_test: Test set; ``None`` where every batch is predicted before it is learned.
        y_test: Its targets.
    """

    model: StreamingGP
    batches: list[tuple[Tensor, Tensor]]
    x_test: Tensor | None = None
    y_test: Tensor | None = None


SCORES = ("RMSE", "MLL")


def _case(name: str, seed: int) -> Task:
    case = CASES[name]
    stream = case.stream(seed)
    model = StreamingGP(
        new_kernel(stream.x_test.size(-1)), num_inducing=case.num_inducing
    )
    return Task(model.double(), stream.batches, stream.x_test, stream.y_test)


def _noisy(seed: int, f: Tensor) -> Tensor:
    """Test targets for a stream whose test values have no noise."""
    return hard_streams.observed(f, torch.Generator().manual_seed(10_000 + seed))


def _small(batch: int, arrival: str, seed: int) -> Task:
    data = hard_streams.small_data(Small(batch, 2, arrival, seed))
    model = StreamingGP(new_kernel(2), num_inducing=50).double()
    return Task(model, data.batches, data.x_test, _noisy(seed, data.f_test))


def _weekly(seed: int) -> Task:
    case = SERIES["weekly, hourly readings"]
    x, y, f = hard_streams.series_data(case, seed)
    num = case.per_period * case.periods
    batches = streams.split_rows(x[:num], y[:num], case.per_period, case.per_period)
    model = StreamingGP(hard_streams.series_kernel(case), num_inducing=100).double()
    return Task(model, batches, x[num:], _noisy(seed, f[num:]))


def _labels(seed: int) -> Task:
    batches, x_test, y_test = hard_streams.banana_batches("random", seed)
    return Task(likelihoods.binary_model(30), batches, x_test, y_test)


def _deep(seed: int) -> Task:
    x, y, x_test, f_test = hard_streams.deep_data(seed, 1_000)
    model = StreamingGP(hard_streams.deep_kernel(seed), num_inducing=100).double()
    batches = streams.split_rows(x, y, 200, 200)
    return Task(model, batches, x_test, _noisy(seed, f_test))


def _changing(name: str, seed: int) -> Task:
    stream = change_streams.make(name, 30, 20, seed)
    model = StreamingGP(new_kernel(stream.x.size(-1)), num_inducing=30).double()
    return Task(model, [(x, y) for x, y, _ in stream.batches()])


def _scale_down(seed: int) -> Task:
    task = _changing("stationary", seed)
    loud = [(x, 1e3 * y) for x, y in task.batches[:15]]
    x, y = (torch.cat(part) for part in zip(*task.batches[25:], strict=True))
    return Task(task.model, loud + task.batches[15:25], x, y)


def _sensor(num_readings: int, seed: int) -> Task:
    t, y = change_streams.sensor(num_readings)
    model = StreamingGP(ScaleKernel(MaternKernel()), num_inducing=30).double()
    return Task(model, streams.split_rows(t, y, 12, 12))


def _moving(seed: int) -> Task:
    rng, batches = torch.Generator().manual_seed(seed), []
    for place in range(4):
        regime = Regime(CHANGES[0], 1.5 * WIDTH * place, 1.0, 2, rng)
        inputs = [regime.inputs(8) for _ in range(25)]
        batches += [(x, regime.observe(x)) for x in inputs]
    return Task(soak.new_model(2, 25), batches)


STREAMS: dict[str, Callable[[int], Task]] = {
    "audio": partial(_case, "audio M=100"),
    "revisiting": partial(_case, "revisiting"),
    "weekly period": _weekly,
    "batches of 2": partial(_small, 2, "random"),
    "batches of 5, sorted": partial(_small, 5, "sorted"),
    "labels": _labels,
    "deep kernel": _deep,
    **{name: partial(_changing, name) for name in CHANGING},
    "scale down": _scale_down,
    "sensor": partial(_sensor, SENSOR_READINGS),
    "sensor that goes on": partial(_sensor, LONG_READINGS),
    "ranges that move": _moving,
}


@torch.no_grad()
def judged(model: StreamingGP, x: Tensor, y: Tensor) -> Row:
    """RMSE and mean log-likelihood; of labels, those of their probabilities."""
    parts = [model.predict(part) for part in x.split(1_000)]
    if isinstance(model.likelihood, BernoulliLikelihood):
        p = torch.cat([part.probs for part in parts])
        labels = torch.distributions.Bernoulli(p)
        return {
            "RMSE": (p - y).square().mean().sqrt().item(),
            "MLL": labels.log_prob(y).mean().item(),
        }
    mean, variance = (
        torch.cat([getattr(part, name) for part in parts])
        for name in ("mean", "variance")
    )
    return normal_scores(mean, variance, y)


def run_one(knob: Knob | None, value: Any, stream: str, seed: int) -> Row:
    """One stream with one constant changed; ``None`` for the default."""

    def under(options: UpdateOptions) -> Row:
        model, batches, x_test, y_test = STREAMS[stream](seed)
        ahead: list[Row] = []

        def update(x: Tensor, y: Tensor) -> Any:
            if x_test is None and not model.summary.is_empty:
                ahead.append(judged(model, x, y))
            return model.learn_from(model.check_data(x, y, None), options)

        run = follow(update, batches)
        if x_test is None:
            found = {name: average(row[name] for row in ahead) for name in SCORES}
        else:
            found = judged(model, x_test, y_test)
        return {**found, **run.row()}

    if knob is None:
        return under(UpdateOptions())
    with knob.set_to(value) as options:
        return under(options)


# ---------------------------------------------------------------------- files, tables


def run(
    out: Path,
    num_seeds: int,
    only: Iterable[str] = (),
    only_streams: Iterable[str] = (),
    again: bool = False,
) -> list[Row]:
    """All rows that are not in the file yet; the file after every one of them.

    Args:
        out: The file.
        num_seeds: Draws, splits or roundings of every stream.
        only: Parts of names of constants; all if there are none.
        only_streams: Names of :data:`STREAMS`; all if there are none.
        again: Whether to replace rows that are there.
    """
    defaults = {knob.name: repr(knob.default()) for knob in KNOBS}
    old = read(out).header["defaults"] if out.exists() else {}
    changed = [name for name in old if defaults.get(name, old[name]) != old[name]]
    if changed and not again:
        raise SystemExit(
            f"{out} has other defaults of {', '.join(changed)}. Choose another file "
            "with --out, or run it --again."
        )
    wanted, places = list(only), list(only_streams) or list(STREAMS)
    chosen = [
        knob
        for knob in KNOBS
        if not wanted or any(part in knob.name for part in wanted)
    ]
    jobs = {}
    for stream in places:
        here = [knob for knob in chosen if stream in knob.on]
        for seed in range(num_seeds if here else 0):
            jobs[DEFAULT, "", stream, seed] = partial(run_one, None, None, stream, seed)
            for knob in here:
                for value in knob.alternatives:
                    key = (knob.name, repr(value), stream, seed)
                    jobs[key] = partial(run_one, knob, value, stream, seed)
    table = Table(out, NAMES, header(defaults={**old, **defaults}))
    return table.run(jobs, again=again)


def lines(rows: list[Row], defaults: Row) -> list[Row]:
    """One line for each value of each constant, against the default.

    Ratios of RMSE are medians over seeds, stream by stream; the last columns are the
    worst difference of the log-likelihood and the median ratio of processor time over
    the streams of the line.

    Args:
        rows: What :func:`run` wrote.
        defaults: Values as they shipped, by name.
    """
    base = {(row["stream"], row["seed"]): row for row in rows if row["knob"] == DEFAULT}
    groups: dict[tuple[str, str], list[tuple[Row, Row]]] = {}
    for row in rows:
        default = base.get((row["stream"], row["seed"]))
        if row["knob"] != DEFAULT and default is not None:
            groups.setdefault((row["knob"], row["value"]), []).append((row, default))
    order = list(defaults)
    result = []
    for (knob, value), pairs in sorted(
        groups.items(), key=lambda group: order.index(group[0][0])
    ):
        ratios = {
            name: [a["RMSE"] / b["RMSE"] for a, b in pairs if a["stream"] == name]
            for name in dict.fromkeys(a["stream"] for a, _ in pairs)
        }
        result.append(
            {
                "constant": f"`{knob}`",
                "default": f"`{defaults[knob]}`",
                "instead": f"`{value}`",
                "RMSE / default": ", ".join(
                    f"{name} {median(each):.3f}" for name, each in ratios.items()
                ),
                "worst MLL": f"{min(a['MLL'] - b['MLL'] for a, b in pairs):+.3f}",
                "CPU": f"{median([_cpu(a) / _cpu(b) for a, b in pairs]):.2f}",
                "failures": sum(bool(row["failure"]) for row, _ in pairs),
            }
        )
    return result


def _cpu(row: Row) -> float:
    return row["cpu_seconds"]


def section(path: Path) -> str:
    """The table of the page; empty without a file."""
    if not path.exists():
        return ""
    file = read(path)
    return markdown(lines(file.rows, file.header["defaults"]))


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing and print the table."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "command",
        nargs="?",
        choices=["run", "tables"],
        default="run",
        help="run what is missing, or print the tables",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/ablation.json"),
        help="where results are kept (out/ablation.json)",
    )
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--streams", nargs="*", choices=[*STREAMS], default=[])
    parser.add_argument("--seeds", type=positive, default=1, help="of each stream (1)")
    parser.add_argument("--again", action="store_true", help="replace rows of the file")
    parser.add_argument("--threads", type=positive, default=1, help="of torch (1)")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    if chosen.command == "run":
        run(chosen.out, chosen.seeds, chosen.only, chosen.streams, chosen.again)
    print(section(chosen.out))

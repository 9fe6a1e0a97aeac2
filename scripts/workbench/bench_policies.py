"""Streams x policies x seeds: the final result of each way to choose inducing points.

    python scripts/benchmark.py policies --data-dir DIR --out docs/data/policies.json
    python scripts/benchmark.py policies --gap "audio M=200" --out docs/data/gap.json

Every row is one run with default settings. The default policy and the batch model on
all training data are those of ``scripts/benchmark.py memory``. Rows already in the file
are not run again, so a run can be interrupted and resumed, and split over processes
with ``--streams``. ``--gap`` examines why the default falls behind the batch model on
one stream. Seconds are processor time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from torch_ssgp import (
    GreedyInformation,
    GreedyVariance,
    InducingPolicy,
    KeepOld,
    RandomReplace,
    StreamingGP,
)
from workbench import bench_cases, bench_memory_tables
from workbench.baselines import new_kernel
from workbench.bench_cases import BATCH, CASES, not_run
from workbench.common import new_parser
from workbench.pages import listed, markdown, median, reach
from workbench.results import Contents, Row, Table, header, write
from workbench.running import follow, scores
from workbench.streams import Stream
from workbench.verdicts import MARGIN, RATIO, gap, median_gap

DEFAULT = "AdaptiveBudget (default)"
GREEDY = (DEFAULT, "GreedyInformation", "GreedyVariance")
SECONDS = "CPU seconds"
NEAR = f"within {RATIO:g} and {MARGIN:g}"
NAMES = ("stream", "policy", "seed")
# Those left out have more points than they need, or are like another and take long.
LEFT_OUT = ("pseudo-periodic M=200", "terrain OS", "kin40k")
STREAMS = [name for name in CASES if name not in LEFT_OUT]


def new_model(
    stream: Stream, num_inducing: int, policy: InducingPolicy | None = None
) -> StreamingGP:
    """The model all policies share: a smooth kernel with a lengthscale per input."""
    return StreamingGP(
        new_kernel(stream.x_test.size(-1)),
        num_inducing=num_inducing,
        inducing_policy=policy,
    ).double()


POLICIES: dict[str, Callable[[int], InducingPolicy]] = {
    "GreedyInformation": lambda _: GreedyInformation(),
    "GreedyVariance": lambda _: GreedyVariance(),
    "RandomReplace": lambda seed: RandomReplace(0.3, seed=seed),
    "KeepOld": lambda _: KeepOld(),
}
ALL = (DEFAULT, *POLICIES)


def run_stream(stream: Stream, num_inducing: int, policy: InducingPolicy) -> Row:
    """Default updates over a stream, and how they end."""
    model = new_model(stream, num_inducing, policy)
    run = follow(model.update, stream.batches)
    return {
        **scores(model, stream),
        "M": model.summary.num_inducing,
        **run.row(),
    }


def run_gap(stream: Stream, num_inducing: int, num_steps: int = 200) -> list[Row]:
    """Where a stream falls behind batch inference: its memory, or what it chose?

    After the stream, all data at once: first with its inducing points and
    hyperparameters, then with either or both of them free.
    """
    model = new_model(stream, num_inducing)
    follow(model.update, stream.batches)
    rows = [{"after": "the stream", **scores(model, stream)}]
    for name, steps, theta, points in [
        ("all data, points and hyperparameters of the stream", 0, False, False),
        ("all data, hyperparameters free", num_steps, True, False),
        ("all data, points free", num_steps, False, True),
        ("all data, both free", num_steps, True, True),
    ]:
        batch = copy.deepcopy(model)
        batch.reset()
        batch.update(
            stream.x_train,
            stream.y_train,
            num_steps=steps,
            optimizer="lbfgs",
            inducing_points=model.summary.inducing_points,
            learn_hyperparameters=theta,
            learn_inducing_points=points,
        )
        rows.append({"after": name, **scores(batch, stream)})
    return rows


def run(
    out: Path,
    data_dir: Path | None,
    num_seeds: int,
    only_streams: Iterable[str] = (),
    only_policies: Iterable[str] = (),
) -> list[Row]:
    """All rows that are not in the file yet; the file after every one of them."""

    def one(name: str, policy: str, seed: int) -> Row:
        case = CASES[name]
        stream, chosen = case.stream(seed, data_dir), POLICIES[policy](seed)
        return run_stream(stream, case.num_inducing, chosen)

    table = Table(out, NAMES, header())
    only = list(only_streams) or STREAMS
    methods = list(only_policies) or [*POLICIES]
    return table.run(bench_cases.case_jobs(one, POLICIES, num_seeds, only, methods))


def rows_of_memory(rows: Iterable[Row]) -> list[Row]:
    """The default policy and the batch models, from the benchmark of the memory."""
    names = {BATCH: BATCH, bench_memory_tables.DEFAULT: DEFAULT}
    return [
        {**row, "policy": names[row["variant"]]}
        for row in rows
        if row["variant"] in names and row["stream"] in STREAMS
    ]


# ------------------------------------------------------------------------ the tables


def table(rows: list[Row]) -> list[Row]:
    """One line per stream and policy: medians over seeds, against the batch model."""
    lines: list[Row] = []
    of = {(row["stream"], row["policy"], row["seed"]): row for row in rows}
    for name, policy in [(name, policy) for name in STREAMS for policy in ALL]:
        runs = [
            (row, of[name, BATCH, CASES[name].reference(seed)])
            for (stream, method, seed), row in of.items()
            if (stream, method) == (name, policy)
            and (name, BATCH, CASES[name].reference(seed)) in of
        ]
        if not runs:
            continue
        gaps = [gap(row, best) for row, best in runs]
        middle = median_gap(gaps)
        lines.append(
            {
                "stream": name,
                "policy": policy,
                "seeds": len(runs),
                "budget": CASES[name].num_inducing,
                **{key: _median(runs, key) for key in ("M", "RMSE", "MLL")},
                "RMSE / batch": middle.ratio,
                "RMSE range": _range([each.ratio for each in gaps], ".3f"),
                "MLL - batch": middle.difference,
                "MLL range": _range([each.difference for each in gaps], "+.3f"),
                NEAR: "yes" if all(middle.near) else "no",
                SECONDS: _median(runs, "cpu_seconds"),
                "failures": sum(bool(row["failure"]) for row, _ in runs),
            }
        )
    return lines


def _range(values: list[float], form: str) -> str:
    """Smallest and largest of several values."""
    return reach(values, form) if len(values) > 1 else "–"


def _median(runs: list[tuple[Row, Row]], key: str) -> float:
    """Over seeds."""
    return median([row[key] for row, _ in runs])


def ranking(lines: list[Row]) -> list[Row]:
    """Policies over the streams that all were run on: how often close to batch."""
    ran = {(line["stream"], line["policy"]) for line in lines}
    found = {policy for _, policy in ran}
    shared = [name for name in STREAMS if all((name, each) in ran for each in found)]
    lines = [line for line in lines if line["stream"] in shared]
    result = []
    for policy in ALL:
        mine = [line for line in lines if line["policy"] == policy]
        if not mine:
            continue
        ratios = [line["RMSE / batch"] for line in mine]
        differences = [line["MLL - batch"] for line in mine]
        result.append(
            {
                "policy": policy,
                "streams": len(mine),
                NEAR: sum(line[NEAR] == "yes" for line in mine),
                "median RMSE / batch": median(ratios),
                "worst RMSE / batch": max(ratios),
                "median MLL - batch": median(differences),
                "worst MLL - batch": min(differences),
                SECONDS: sum(line[SECONDS] for line in mine),
                "failures": sum(line["failures"] for line in mine),
            }
        )
    return result


# -------------------------------------------------------------------------- the page


def sections(rows: list[Row], memory: list[Row], gap_file: Contents) -> dict[str, str]:
    """What ``docs/benchmarks.md`` has to say about policies, by place.

    Args:
        rows: What :func:`run` wrote.
        memory: What the benchmark of the memory wrote.
        gap_file: What ``--gap`` wrote.
    """
    rows = [*rows, *rows_of_memory(memory)]
    lines = table(rows)
    return {
        "ranking": markdown(ranking(lines)),
        "policies": markdown(lines),
        "remarks": remarks(rows),
        "reading": "\n\n".join([careless(lines), gap_reading(gap_file)]),
    }


def careless(lines: list[Row]) -> str:
    """Where policies that do not look at what points are worth fall behind."""
    score = {(line["stream"], line["policy"]): line for line in lines}
    parts, ahead = [], []
    for policy in [name for name in POLICIES if name not in GREEDY]:
        both = [
            (line, score[line["stream"], DEFAULT])
            for line in lines
            if line["policy"] == policy and (line["stream"], DEFAULT) in score
        ]
        twice = [a["stream"] for a, b in both if a["RMSE"] > 2 * b["RMSE"]]
        if twice:
            parts.append(f"{policy} on {listed(twice)}")
        ahead += [
            f"{policy} on {a['stream']} by {name}"
            for a, b in both
            for name, sign in (("RMSE", -1), ("MLL", 1))
            if sign * a[name] > sign * b[name] and a[NEAR] == b[NEAR] == "no"
        ]
    if not parts:
        return ""
    text = (
        f"More than twice the RMSE of the default: {'; '.join(parts)}. Our "
        "interpretation: a random swap drops points that the past relies on, and "
        "keeping all points leaves no room for new ones."
    )
    if ahead:
        text += (
            " There are exceptions. Ahead of the default, where both miss the batch "
            f"model: {listed(ahead)}."
        )
    return text


def gap_reading(gap_file: Contents) -> str:
    """What batch inference gains that begins where a stream ended."""
    name, rows = gap_file.header["stream"], gap_file.rows
    stream, kept, theta, points, both = (row["RMSE"] for row in rows)
    text = (
        "Is the gap due to what was forgotten, or to the points chosen? The table "
        f"shows {name}: first the stream, then batch inference that starts where the "
        f"stream ended.\n\n{markdown(rows)}\n\nWith all data, the RMSE is "
        f"{kept / stream:.3f} times that of the stream if nothing else may change, "
        f"and {both / stream:.3f} times if inducing points and hyperparameters are "
        "free."
    )
    if stream - kept < 0.1 * (stream - both):
        text += (
            " So little of this gap is due to forgetting. It is due to the inducing "
            "points and the hyperparameters."
        )
    if both < 0.9 * min(theta, points):
        text += (
            " Neither does as much alone: both have to move together, with all data "
            "available, which a stream cannot do."
        )
    return text


def remarks(rows: list[Row]) -> str:
    """Which runs were not made yet."""
    missing = not_run(rows, "policy", ALL, STREAMS)
    return f"Not run yet: {missing}." if missing else ""


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--out",
        "--json",
        type=Path,
        help="where results are kept (out/policies.json; out/gap.json with --gap)",
    )
    bench_cases.add_options(parser)
    parser.add_argument("--policies", nargs="*", choices=[*POLICIES], help="only these")
    parser.add_argument("--gap", choices=[*CASES], help="the gap on this stream only")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    if chosen.gap:
        case = CASES[chosen.gap]
        rows = run_gap(case.stream(0, chosen.data_dir), case.num_inducing)
        print(markdown(rows))
        write(chosen.out or Path("out/gap.json"), header(stream=chosen.gap), rows)
        return
    run(
        chosen.out or Path("out/policies.json"),
        chosen.data_dir,
        chosen.seeds,
        chosen.streams or (),
        chosen.policies or (),
    )

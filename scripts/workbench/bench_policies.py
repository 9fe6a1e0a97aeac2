"""Streams x policies x seeds: the final result of each way to choose inducing points.

    python scripts/benchmark.py policies --data-dir DIR --out docs/data/policies.json
    python scripts/benchmark.py policies --gap "audio M=200" --out docs/data/gap.json

Every row is one run with default settings, or the batch model of the same size on all
training data at once. Rows already in the file are not run again, so a run can be
interrupted and resumed, and split over processes with ``--streams``. ``--gap`` examines
why the default falls behind the batch model on one stream. Seconds are processor time.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from torch_ssgp import (
    AdaptiveBudget,
    GreedyInformation,
    GreedyVariance,
    InducingPolicy,
    KeepOld,
    RandomReplace,
    StreamingGP,
)
from workbench import bench_cases
from workbench.baselines import BatchSGPR, new_kernel
from workbench.bench_cases import BATCH, CASES, not_run
from workbench.common import new_parser
from workbench.pages import listed, markdown, median, reach
from workbench.results import Contents, Row, Table, header, write
from workbench.running import follow, scores
from workbench.streams import Stream
from workbench.verdicts import MARGIN, RATIO, gap, median_gap

DEFAULT = "AdaptiveBudget (default)"
GREEDY = (DEFAULT, "GreedyInformation", "GreedyVariance")
BATCH_STEPS = 1_000  # of L-BFGS; it is to end on a plateau
SECONDS = "CPU seconds"
NEAR = f"within {RATIO:g} and {MARGIN:g}"
NAMES = ("stream", "policy", "seed")
STREAMS = [name for name in CASES if name != "pseudo-periodic M=200"]


def new_model(
    stream: Stream, num_inducing: int, policy: InducingPolicy | None = None
) -> StreamingGP:
    """The model all policies share: a smooth kernel with a lengthscale per input."""
    return StreamingGP(
        new_kernel(stream.x_test.size(-1)),
        num_inducing=num_inducing,
        inducing_policy=policy,
    ).double()


def run_batch(stream: Stream, num_inducing: int) -> Row:
    """The ceiling: all training data at once, all of Z free, L-BFGS."""
    start = time.process_time()
    batch = BatchSGPR(stream.x_test.size(-1), num_inducing, num_steps=BATCH_STEPS)
    batch.update(stream.x_train, stream.y_train)
    return {
        **scores(batch.model, stream),
        "M": batch.model.summary.num_inducing,
        "cpu_seconds": time.process_time() - start,
        "converged": batch.converged,
        "steps": batch.steps,
        "max_steps": BATCH_STEPS,
    }


POLICIES: dict[str, Callable[[int], InducingPolicy]] = {
    DEFAULT: lambda _: AdaptiveBudget(),
    "GreedyInformation": lambda _: GreedyInformation(),
    "GreedyVariance": lambda _: GreedyVariance(),
    "RandomReplace": lambda seed: RandomReplace(0.3, seed=seed),
    "KeepOld": lambda _: KeepOld(),
}


def run_stream(stream: Stream, num_inducing: int, policy: InducingPolicy) -> Row:
    """Default updates over a stream, and how they end."""
    model = new_model(stream, num_inducing, policy)
    run = follow(model.update, stream.batches)
    return {
        **scores(model, stream),
        "M": model.summary.num_inducing,
        "sizes": run.sizes,
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
        stream, budget = case.stream(seed, data_dir), case.num_inducing
        if policy == BATCH:
            return {"budget": budget, **run_batch(stream, budget)}
        return {"budget": budget, **run_stream(stream, budget, POLICIES[policy](seed))}

    table = Table(out, NAMES, header())
    only = list(only_streams) or STREAMS
    return table.run(
        bench_cases.case_jobs(one, POLICIES, num_seeds, only, only_policies)
    )


# ------------------------------------------------------------------------ the tables


def table(rows: list[Row]) -> list[Row]:
    """One line per stream and policy: medians over seeds, against the batch model."""
    lines: list[Row] = []
    timed = any("cpu_seconds" in row for row in rows)
    of = {(row["stream"], row["policy"], row["seed"]): row for row in rows}
    for name, policy in [(name, policy) for name in STREAMS for policy in POLICIES]:
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
                **({SECONDS: _median(runs, "cpu_seconds")} if timed else {}),
                "failures": sum(bool(row["failure"]) for row, _ in runs),
            }
        )
    return lines


def _range(values: list[float], form: str) -> str:
    """Smallest and largest of several values."""
    return reach(values, form) if len(values) > 1 else "–"


def _median(runs: list[tuple[Row, Row]], key: str) -> float | str:
    """Over seeds; a dash where not all rows know, as old ones had no CPU time."""
    values = [row[key] for row, _ in runs if key in row]
    return median(values) if len(values) == len(runs) else "–"


def ranking(lines: list[Row]) -> list[Row]:
    """Policies over all streams: how often close to batch, and how far off."""
    result = []
    timed = bool(lines) and all(line.get(SECONDS, "–") != "–" for line in lines)
    for policy in POLICIES:
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
                **({SECONDS: sum(line[SECONDS] for line in mine)} if timed else {}),
                "failures": sum(line["failures"] for line in mine),
            }
        )
    return result


# -------------------------------------------------------------------------- the page


def sections(rows: list[Row], gap_file: Contents) -> dict[str, str]:
    """What ``docs/benchmarks.md`` has to say about policies, by place.

    Args:
        rows: What :func:`run` wrote.
        gap_file: What ``--gap`` wrote.
    """
    lines = table(rows)
    steps = sorted({row["max_steps"] for row in rows if row["policy"] == BATCH})
    return {
        "ranking": markdown(ranking(lines)),
        "policies": markdown(lines),
        "remarks": remarks(rows),
        "steps": listed([f"{num:,}" for num in steps]),
        "reading": "\n\n".join(
            [careless(lines), used_up(rows, lines), gap_reading(gap_file)]
        ),
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


def used_up(rows: list[Row], lines: list[Row]) -> str:
    """When the default had no points left, where it falls behind batch inference."""
    behind = [
        line["stream"]
        for line in lines
        if line["policy"] == DEFAULT and line[NEAR] == "no"
    ]
    firsts = {}
    for row in rows:
        if row["policy"] == DEFAULT and row["stream"] in behind and row["seed"] == 0:
            full = [k for k, m in enumerate(row["sizes"], 1) if m >= row["budget"]]
            firsts[row["stream"]] = full[0] if full else None, len(row["sizes"])
    parts = [
        f"{name} after batch {first} of {num}"
        for name, (first, num) in firsts.items()
        if first
    ]
    spare = [name for name, (first, _) in firsts.items() if not first]
    if not firsts:
        return ""
    text = "Where the default misses the batch model, "
    text += f"its inducing points were used up: {listed(parts)}. " if parts else ""
    text += f"It had points left on {listed(spare)}. " if spare else ""
    return text + (
        "An update that loses much of what was known because it has too few points "
        "issues a `BudgetWarning`."
    )


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
    """Which runs were not made yet, and which batch models did not converge."""
    short = [row["stream"] for row in rows if row.get("converged") is False]
    return " ".join(
        f"{text}: {joined}."
        for text, joined in [
            ("Not run yet", not_run(rows, "policy", POLICIES, STREAMS)),
            ("Batch models that used up their budget of steps", ", ".join(short)),
        ]
        if joined
    )


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing and print both tables."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--out",
        "--json",
        type=Path,
        help="where results are kept (out/policies.json; out/gap.json with --gap)",
    )
    bench_cases.add_options(parser)
    parser.add_argument(
        "--policies", nargs="*", choices=[BATCH, *POLICIES], help="only these"
    )
    parser.add_argument("--gap", choices=[*CASES], help="the gap on this stream only")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    if chosen.gap:
        case = CASES[chosen.gap]
        rows = run_gap(case.stream(0, chosen.data_dir), case.num_inducing)
        print(markdown(rows))
        write(chosen.out or Path("out/gap.json"), header(stream=chosen.gap), rows)
        return
    rows = run(
        chosen.out or Path("out/policies.json"),
        chosen.data_dir,
        chosen.seeds,
        chosen.streams or (),
        chosen.policies or (),
    )
    print(markdown(table(rows)), markdown(ranking(table(rows))), sep="\n\n")

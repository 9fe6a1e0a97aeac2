"""Streams x policies x seeds: what each way to choose inducing points ends with.

    python scripts/benchmark.py policies --data-dir DIR --out docs/data/policies.json
    python scripts/benchmark.py policies --gap "audio M=200" --out docs/data/gap.json

Every row is one run with default settings, or the batch model of the same size that
has all training data at once. Rows already in the file are not run again, so a run can
be interrupted and resumed, and split over processes by ``--streams``. ``--gap`` asks
why the default falls behind the batch model on one stream. Seconds are those of the
processor.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from torch_ssgp import (
    AdaptiveBudget,
    GreedyInformation,
    GreedyVariance,
    InducingPolicy,
    KeepOld,
    RandomReplace,
    StreamingGP,
)
from workbench import streams
from workbench.baselines import BatchSGPR, new_kernel, normal_scores, small_budget
from workbench.common import listed, markdown, write_json
from workbench.streams import Stream
from workbench.verdicts import MARGIN, RATIO, Gap, gap

DEFAULT, BATCH = "AdaptiveBudget (default)", "batch SGPR"
GREEDY = (DEFAULT, "GreedyInformation", "GreedyVariance")
BATCH_STEPS = 1_000  # of L-BFGS; it is to end on a plateau
SECONDS = "CPU seconds"
NEAR = f"within {RATIO:g} and {MARGIN:g}"

Row = dict[str, Any]
Make = Callable[[int, Path | None], Stream]
Job = tuple[str, str, int]  # stream, policy, seed


class Case(NamedTuple):
    """A stream, its budget, and whether a seed changes the data.

    Attributes:
        make: From a seed and the directory of the data to the stream.
        num_inducing: Budget of inducing points.
        seeded: Whether the data depend on the seed; otherwise other seeds are other
            roundings of the targets, see :func:`streams.rounded`, with one batch model.
    """

    make: Make
    num_inducing: int
    seeded: bool


CASES: dict[str, Case] = {
    "pseudo-periodic": Case(lambda *_: streams.pseudo_periodic(), 100, False),
    "audio M=100": Case(lambda *_: streams.audio(), 100, False),
    "audio M=200": Case(lambda *_: streams.audio(), 200, False),
    "terrain": Case(lambda *_: streams.terrain(), 400, False),
    "terrain OS": Case(lambda _, d: streams.terrain_os(d), 400, False),
    "bike": Case(lambda k, d: streams.uci("bike_noleak", d, split=k), 200, True),
    "elevators": Case(lambda k, d: streams.uci("elevators", d, split=k), 200, True),
    "kin40k": Case(lambda k, d: streams.uci("kin40k", d, split=k), 200, True),
    "growing range": Case(lambda k, _: streams.growing_range(seed=k), 250, True),
    "revisiting": Case(lambda k, _: streams.revisiting(seed=k), 100, True),
}


def new_model(
    stream: Stream, num_inducing: int, policy: InducingPolicy | None = None
) -> StreamingGP:
    """The model all policies share: a smooth kernel with a lengthscale per input."""
    return StreamingGP(
        new_kernel(stream.x_test.size(-1)),
        num_inducing=num_inducing,
        inducing_policy=policy,
    ).double()


def accuracy(model: StreamingGP, stream: Stream) -> Row:
    """RMSE and mean log-likelihood on all test points."""
    prediction = model.predict(stream.x_test)
    return normal_scores(prediction.mean, prediction.variance, stream.y_test)


def run_batch(stream: Stream, num_inducing: int) -> Row:
    """The ceiling: all training data at once, all of Z free, L-BFGS."""
    start = time.process_time()
    batch = BatchSGPR(stream.x_test.size(-1), num_inducing, num_steps=BATCH_STEPS)
    batch.update(stream.x_train, stream.y_train)
    return {
        **accuracy(batch.model, stream),
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
    """Default updates over a stream, and how they end; a failure is a row as well."""
    start = time.process_time()
    model = new_model(stream, num_inducing, policy)
    sizes, failure = [], ""
    with small_budget():
        for x, y in tqdm(stream.batches, desc=type(policy).__name__, leave=False):
            try:
                sizes.append(model.update(x, y).num_inducing)
            except Exception as error:  # what fails is part of the result
                failure = f"{type(error).__name__}: {error}"
                break
    return {
        **accuracy(model, stream),
        "M": model.summary.num_inducing,
        "sizes": sizes,
        "cpu_seconds": time.process_time() - start,
        "failure": failure,
    }


def run_gap(stream: Stream, num_inducing: int, num_steps: int = 200) -> list[Row]:
    """Where a stream falls behind batch inference: its memory, or what it chose?

    After the stream, all data at once: first with its inducing points and
    hyperparameters, then with either or both of them free.
    """
    model = new_model(stream, num_inducing)
    with small_budget():
        for x, y in tqdm(stream.batches, desc="stream", leave=False):
            model.update(x, y)
    rows = [{"after": "the stream", **accuracy(model, stream)}]
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
        rows.append({"after": name, **accuracy(batch, stream)})
    return rows


def run(
    out: Path,
    data_dir: Path | None,
    num_seeds: int,
    only_streams: list[str] | None = None,
    only_policies: list[str] | None = None,
) -> list[Row]:
    """All rows that are not in the file yet; the file after every one of them."""
    jobs = [
        (name, policy, seed)
        for name, case in CASES.items()
        if not only_streams or name in only_streams
        for policy in [BATCH, *POLICIES]
        if not only_policies or policy in only_policies
        for seed in range(num_seeds)
        if seed == 0 or case.seeded or policy != BATCH
    ]
    for name, policy, seed in tqdm([job for job in jobs if job not in read(out)]):
        case = CASES[name]
        stream = case.make(seed, data_dir)
        if policy == BATCH:
            result = run_batch(stream, case.num_inducing)
        else:
            stream = stream if case.seeded else streams.rounded(stream, seed)
            chosen = POLICIES[policy](seed)
            result = run_stream(stream, case.num_inducing, chosen)
        key = {"stream": name, "policy": policy, "seed": seed}
        row = {**key, "budget": case.num_inducing, **result}
        # Another process may have written meanwhile.
        write_json(out, list({**read(out), (name, policy, seed): row}.values()))
    return list(read(out).values())


def read(out: Path) -> dict[Job, Row]:
    """The rows in a file, by stream, policy and seed."""
    rows = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    return {(row["stream"], row["policy"], row["seed"]): row for row in rows}


def table(rows: list[Row]) -> list[Row]:
    """One line per stream and policy: medians over seeds, against the batch model."""
    lines: list[Row] = []
    timed = any("cpu_seconds" in row for row in rows)
    for name, case in CASES.items():
        ceiling = {
            row["seed"]: row
            for row in rows
            if row["stream"] == name and row["policy"] == BATCH
        }
        for policy in POLICIES:
            runs = [
                (row, ceiling[row["seed"] if case.seeded else 0])
                for row in rows
                if row["stream"] == name
                and row["policy"] == policy
                and (row["seed"] if case.seeded else 0) in ceiling
            ]
            if not runs:
                continue
            gaps = [gap(row, best) for row, best in runs]
            middle = Gap(
                statistics.median(each.ratio for each in gaps),
                statistics.median(each.difference for each in gaps),
            )
            lines.append(
                {
                    "stream": name,
                    "policy": policy,
                    "seeds": len(runs),
                    "budget": case.num_inducing,
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
    if len(values) < 2:
        return "–"
    return f"{min(values):{form}}, {max(values):{form}}"


def _median(runs: list[tuple[Row, Row]], key: str) -> float | str:
    """Over seeds; a dash where not all rows know, as old ones had no CPU time."""
    values = [row[key] for row, _ in runs if key in row]
    return statistics.median(values) if len(values) == len(runs) else "–"


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
                "median RMSE / batch": statistics.median(ratios),
                "worst RMSE / batch": max(ratios),
                "median MLL - batch": statistics.median(differences),
                "worst MLL - batch": min(differences),
                **({SECONDS: sum(line[SECONDS] for line in mine)} if timed else {}),
                "failures": sum(line["failures"] for line in mine),
            }
        )
    return result


# -------------------------------------------------------------------------- the page


def sections(rows: list[Row], gap_file: Row) -> dict[str, str]:
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
        f"More than twice the RMSE of the default: {'; '.join(parts)}. How we read it: "
        "a random swap drops points that the past relies on, and points that are all "
        "kept leave no room for what is new."
    )
    if ahead:
        text += (
            " It is not so everywhere. Ahead of the default, where both miss the batch "
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
        "An update that loses much of what was known, for lack of points, says so by a "
        "`BudgetWarning`."
    )


def gap_reading(gap_file: Row) -> str:
    """What batch inference gains that begins where a stream ended."""
    rows = gap_file["rows"]
    stream, kept, theta, points, both = (row["RMSE"] for row in rows)
    text = (
        f"Is it what was remembered, or what was chosen? Here is {gap_file['stream']}, "
        "first the stream, then batch inference that begins where the stream ended."
        f"\n\n{markdown(rows)}\n\n"
        f"With all data at hand the RMSE is {kept / stream:.3f} times that of the "
        "stream where nothing else may change, and "
        f"{both / stream:.3f} times where inducing points and hyperparameters are free."
    )
    if stream - kept < 0.1 * (stream - both):
        text += (
            " So little of this gap is what was forgotten; it is where points are and "
            "what the hyperparameters are."
        )
    if both < 0.9 * min(theta, points):
        text += (
            " Neither does as much alone: both have to move together, with all data at "
            "hand, which a stream cannot."
        )
    return text


def remarks(rows: list[Row]) -> str:
    """Which runs were not made yet, and which batch models did not converge."""
    done = {(row["stream"], row["policy"]) for row in rows}
    gaps = [
        f"{name} ({', '.join(left)})"
        for name in CASES
        if (left := [p for p in [BATCH, *POLICIES] if (name, p) not in done])
    ]
    short = [row["stream"] for row in rows if row.get("converged") is False]
    return " ".join(
        f"{text}: {', '.join(names)}."
        for text, names in [
            ("Not run yet", gaps),
            ("Batch models that their budget of steps stopped", short),
        ]
        if names
    )


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out",
        "--json",
        type=Path,
        help="where results are kept (out/policies.json; out/gap.json with --gap)",
    )
    parser.add_argument("--data-dir", type=Path, help="where the UCI files are")
    parser.add_argument(
        "--seeds", type=int, default=3, help="splits, draws or roundings (3)"
    )
    parser.add_argument("--streams", nargs="*", choices=[*CASES], help="only these")
    parser.add_argument(
        "--policies", nargs="*", choices=[BATCH, *POLICIES], help="only these"
    )
    parser.add_argument("--gap", choices=[*CASES], help="the gap on this stream only")
    parser.add_argument("--threads", type=int, default=1, help="of torch (1)")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    if chosen.gap:
        case = CASES[chosen.gap]
        rows = run_gap(case.make(0, chosen.data_dir), case.num_inducing)
        print(markdown(rows))
        out = chosen.out or Path("out/gap.json")
        write_json(out, {"stream": chosen.gap, "rows": rows})
        return
    rows = run(
        chosen.out or Path("out/policies.json"),
        chosen.data_dir,
        chosen.seeds,
        chosen.streams,
        chosen.policies,
    )
    print(markdown(table(rows)), markdown(ranking(table(rows))), sep="\n\n")

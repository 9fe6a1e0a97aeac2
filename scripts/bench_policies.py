"""Streams x policies x seeds: what each way to choose inducing points ends with.

    python scripts/bench_policies.py --data-dir DIR --out docs/data/policies.json
    python scripts/bench_policies.py --gap "audio M=200" --out docs/data/gap.json

Every row is one run with default settings, or the batch model of the same size that
has all training data at once. Rows already in the file are not run again, so a run can
be interrupted and resumed, and split over processes by ``--streams``. ``--gap`` asks
why the default falls behind the batch model on one stream.
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

import streams
from baselines import BatchSGPR, new_kernel, normal_scores, small_budget
from streams import Stream
from torch_ssgp import (
    AdaptiveBudget,
    GreedyInformation,
    GreedyVariance,
    InducingPolicy,
    KeepOld,
    PosteriorSummary,
    RandomReplace,
    StreamingGP,
)

Row = dict[str, Any]
Make = Callable[[int, Path | None], Stream]


class Case(NamedTuple):
    """A stream, its budget, and whether a seed changes the data.

    Attributes:
        make: From a seed and the directory of the data to the stream.
        num_inducing: Budget of inducing points.
        seeded: Whether the data depend on the seed; otherwise only policies that
            draw random numbers are repeated.
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
    start = time.perf_counter()
    batch = BatchSGPR(stream.x_test.size(-1), num_inducing)
    batch.update(stream.x_train, stream.y_train)
    return {
        **accuracy(batch.model, stream),
        "M": batch.model.summary.num_inducing,
        "seconds": time.perf_counter() - start,
        "converged": batch.converged,
    }


POLICIES: dict[str, Callable[[int], InducingPolicy]] = {
    "AdaptiveBudget (default)": lambda _: AdaptiveBudget(),
    "GreedyInformation": lambda _: GreedyInformation(),
    "GreedyVariance": lambda _: GreedyVariance(),
    "RandomReplace": lambda seed: RandomReplace(0.3, seed=seed),
    "KeepOld": lambda _: KeepOld(),
}
BATCH = "batch SGPR"


def run_stream(stream: Stream, num_inducing: int, policy: InducingPolicy) -> Row:
    """Default updates over a stream, and how they end; a failure is a row as well."""
    start = time.perf_counter()
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
        "seconds": time.perf_counter() - start,
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
        batch.summary = PosteriorSummary()
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
    rows: list[Row] = json.loads(out.read_text()) if out.exists() else []
    done = {(row["stream"], row["policy"], row["seed"]) for row in rows}
    jobs = [
        (name, policy, seed)
        for name, case in CASES.items()
        if not only_streams or name in only_streams
        for policy in [BATCH, *POLICIES]
        if not only_policies or policy in only_policies
        for seed in range(num_seeds)
        # Without random numbers another seed is the same run.
        if seed == 0 or case.seeded or policy == "RandomReplace"
    ]
    for name, policy, seed in tqdm([job for job in jobs if job not in done]):
        case = CASES[name]
        stream = case.make(seed, data_dir)
        if policy == BATCH:
            result = run_batch(stream, case.num_inducing)
        else:
            chosen = POLICIES[policy](seed)
            result = run_stream(stream, case.num_inducing, chosen)
        key = {"stream": name, "policy": policy, "seed": seed}
        rows.append({**key, "budget": case.num_inducing, **result})
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def table(rows: list[Row]) -> list[Row]:
    """One line per stream and policy: medians over seeds, against the batch model."""
    lines: list[Row] = []
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

            def median(values: list[float]) -> float:
                return statistics.median(values)

            ratio = median([row["RMSE"] / best["RMSE"] for row, best in runs])
            gap = median([row["MLL"] - best["MLL"] for row, best in runs])
            lines.append(
                {
                    "stream": name,
                    "policy": policy,
                    "seeds": len(runs),
                    "budget": case.num_inducing,
                    "M": median([row["M"] for row, _ in runs]),
                    "RMSE": median([row["RMSE"] for row, _ in runs]),
                    "MLL": median([row["MLL"] for row, _ in runs]),
                    "RMSE / batch": ratio,
                    "MLL - batch": gap,
                    "within 1.05 and 0.05": "yes" if _is_close(ratio, gap) else "no",
                    "seconds": median([row["seconds"] for row, _ in runs]),
                    "failures": sum(bool(row["failure"]) for row, _ in runs),
                }
            )
    return lines


def _is_close(ratio: float, gap: float) -> bool:
    return ratio <= 1.05 and gap >= -0.05


def ranking(lines: list[Row]) -> list[Row]:
    """Policies over all streams: how often close to batch, and how far off."""
    result = []
    for policy in POLICIES:
        mine = [line for line in lines if line["policy"] == policy]
        if mine:
            ratios = [line["RMSE / batch"] for line in mine]
            result.append(
                {
                    "policy": policy,
                    "streams": len(mine),
                    "within 1.05 and 0.05": sum(
                        line["within 1.05 and 0.05"] == "yes" for line in mine
                    ),
                    "median RMSE / batch": statistics.median(ratios),
                    "worst RMSE / batch": max(ratios),
                    "median MLL - batch": statistics.median(
                        line["MLL - batch"] for line in mine
                    ),
                    "worst MLL - batch": min(line["MLL - batch"] for line in mine),
                    "seconds": sum(line["seconds"] for line in mine),
                    "failures": sum(line["failures"] for line in mine),
                }
            )
    return result


READING = """\
Only greedy policies survive streams whose inputs move on: a random swap drops points
that the past relies on, and points that are all kept leave no room for what is new.

Where the default falls behind batch inference its budget was used up early, which every
update says by a `BudgetWarning`. What is missing then is the place of the points, not
what was remembered: here is {stream}, first the stream, then batch inference that
begins where the stream ended.

{gap}

The batch model gains by moving all inducing points, and with them hyperparameters, with
all data at hand, which a stream cannot. Where many inputs arrive sorted by one of them
(kin40k), what the first slices could not explain also stays in the noise. Seconds
include whatever else the machine did.
"""


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


def main() -> None:
    """Run what is missing and print both tables."""
    from benchmark import print_rows

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/policies.json"))
    parser.add_argument("--data-dir", type=Path, help="where the UCI files are")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--streams", nargs="*", choices=[*CASES])
    parser.add_argument("--policies", nargs="*", choices=[BATCH, *POLICIES])
    parser.add_argument("--gap", choices=[*CASES])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.gap:
        case = CASES[arguments.gap]
        gap = run_gap(case.make(0, arguments.data_dir), case.num_inducing)
        print_rows(gap)
        arguments.out.write_text(
            json.dumps({"stream": arguments.gap, "rows": gap}, indent=1) + "\n"
        )
        return
    rows = run(
        arguments.out,
        arguments.data_dir,
        arguments.seeds,
        arguments.streams,
        arguments.policies,
    )
    print_rows(table(rows))
    print_rows(ranking(table(rows)))


if __name__ == "__main__":
    main()

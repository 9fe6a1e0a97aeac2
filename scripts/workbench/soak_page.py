"""The page on the soak, written from what was seen."""

from __future__ import annotations

import math
import statistics

from workbench.pages import markdown, wrapped
from workbench.results import Row
from workbench.soak_stream import NOISE, OUTLIER

NUM_TEST = 100
RECOVERED = 1.5  # times the error of the batch model that count as recovered


def by_change(regimes: list[Row]) -> list[Row]:
    """Medians over the regimes that began with the same change."""
    groups: dict[str, list[Row]] = {}
    for row in regimes:
        if "ratio" in row:  # otherwise an exception came between
            groups.setdefault(row["change"], []).append(row)
    return [
        {
            "change": change,
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
        for change, rows in groups.items()
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

Written by `scripts/soak.py --report` from `data/soak.json`, which torch_ssgp
{report["version"]} made; run it again with `scripts/soak.py --out docs/data/soak.json`.

One `StreamingGP` (float64, {report["num_dims"]} inputs, default policy, at most
{report["num_inducing"]} inducing points) goes through a stream that is hard on purpose.
Every {report["regime"]} updates the function changes, the inputs move to a new range,
y grows or shrinks by a factor of 1,000, or the noise stops. Batches have 1 to 20
points: {_counts(report["batches"])}. Outliers are off by {OUTLIER:g} standard
deviations of the noise. Updates have the library's
defaults and `forget="auto"`.

{markdown(verdicts(report))}

An update took {1e3 * seconds["median"]:.0f} ms of CPU time in the median,
{1e3 * seconds["mean"]:.0f} ms in the mean.

## Memory

After `gc.collect()`:

{markdown(memory(report["samples"]))}

## Against a batch model of the present regime

At the end of every regime, the mean at {NUM_TEST} points of the present range is
compared with the function without noise, and with a new model of the same budget that
gets the last 200 data of the regime at once. Errors and learned noise are in units of
the standard deviation of the function; `lengthscale` is the learned one over the true
one. All columns are medians over regimes. The true noise is {NOISE:g} or 0, outliers
not counted. A regime has recovered as soon as the error is at most {RECOVERED:g} times
that of the batch model, at a look every 5 updates.

{markdown(accuracy(report["regimes"]))}

How to read it:

{reading(report)}
""")


def verdicts(report: Row) -> list[Row]:
    """What the run was made for, beside what it should be."""
    first, last = report["samples"][0], report["samples"][-1]
    sizes, ratios = report["M"], [r["ratio"] for r in report["regimes"] if "ratio" in r]
    lines = [
        (
            f"regimes that end within {RECOVERED:g} times the error of a new model",
            f"{sum(ratio <= RECOVERED for ratio in ratios)} of {len(ratios)}",
            "90 of 100",
        ),
        ("error / that of a new model, median", _number(_median(ratios)), "1"),
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


def reading(report: Row) -> str:
    """What the table says, as a list."""
    after = [row["recovered_after"] for row in report["regimes"] if "ratio" in row]
    count = sum(updates is not None for updates in after)
    parts = [
        f"Recovered at some time: {count} of {len(after)} regimes.",
        points(report),
        "The batch model knows nothing of the past. The stream has the same budget of "
        "inducing points for the present range and for what it has kept of those "
        "before.",
    ]
    return "\n".join(f"- {part}" for part in parts)


def points(report: Row) -> str:
    """Inducing points and the lengthscale at the end."""
    samples, regimes = report["samples"], report["regimes"]
    last = samples[-1]
    text = (
        f"Inducing points at the end: {last['M']} of {report['num_inducing']} allowed"
    )
    if regimes:
        true, learned = (regimes[-1][k] for k in ("lengthscale", "learned_lengthscale"))
        text += (
            f". The lengthscale is {_number(learned)}; that of the function is "
            f"{_number(true)}"
        )
    return text + "."

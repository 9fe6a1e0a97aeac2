"""The page on the soak, written from what was seen."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from workbench.pages import markdown, wrapped
from workbench.results import Row
from workbench.soak_stream import CHANGES, NOISE, OUTLIER

NUM_TEST = 100
RECOVERED = 1.5  # times the error of the batch model that count as recovered


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

Written by `scripts/soak.py --report` from `data/soak.json`, which torch_ssgp
{report["version"]} made; run it again with `scripts/soak.py --out docs/data/soak.json`.

One `StreamingGP` (float64, {report["num_dims"]} inputs, default policy, at most
{report["num_inducing"]} inducing points) goes through a stream that is hard on purpose.
Every {report["regime"]} updates the function changes, the inputs move to a new range,
y grows or shrinks by a factor of 1,000, or the noise stops. Batches have 1 to 20
points: {_counts(report["batches"])}. Outliers are off by {OUTLIER:g} standard
deviations of the noise. {how_updated(report["regimes"])}

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


def is_auto(regimes: list[Row]) -> bool:
    """Whether the evidence decided what to forget."""
    return any(row["forget"] == "auto" for row in regimes)


def how_updated(regimes: list[Row]) -> str:
    """The options of updates."""
    if is_auto(regimes):
        return 'Updates have the library\'s defaults and `forget="auto"`.'
    return (
        "In the first twentieth of a regime every update learns hyperparameters, then "
        "every eighth, mostly in 4 steps of Adam. Some updates take 0 or 20 steps, use "
        "L-BFGS or a trust region, or move inducing points."
    )


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
            "forget": row["forget"] if is_auto([row]) else f"{row['forget']:g}",
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
    if is_auto(regimes):
        good = [r["ratio"] <= RECOVERED for r in regimes if "ratio" in r]
        middle = _median([r["ratio"] for r in regimes if "ratio" in r])
        at_end = (
            f"At their end {sum(good)} of {len(good)} regimes are within {RECOVERED:g} "
            f"times the error of the batch model; their median is {_number(middle)}."
        )
        parts = [f"Recovered: {recovery(regimes)} regimes.", at_end, points(report)]
        return "\n".join(f"- {part}" for part in parts)
    parts = [
        f"Recovered: {recovery(regimes)} regimes.",
        "With `forget=1` all data ever seen count, as they should if there is one "
        "function and one noise. Where a stream contradicts its past, the model takes "
        "the past for noise, which all data share. " + forgetting(regimes),
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
        "How we read the slow recovery; we did not test it. While the noise of a "
        "larger past hides the function, nothing determines its hyperparameters: the "
        "lengthscale drifts upwards, and inducing points that seem useless are "
        "dropped. When the noise has faded, both have to come back, from batches of "
        "few points, each of which says little about a lengthscale. That takes longer "
        "than a regime lasts here, and the next regimes suffer as well. It is the "
        "weakest spot that this run shows. After a fall of that size, start a new "
        "model, as the batch model does."
    )


def _fading(forget: float) -> float:
    return math.log(1e6) / -math.log(forget)

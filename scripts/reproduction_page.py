"""The page on the experiments of the paper, written from their results.

Every figure in it is computed from the JSON files of ``scripts/reproduce.py``, and so
is every verdict. Cells and files may be missing; the page says which.
"""

from __future__ import annotations

import inspect
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import experiments
from benchmark import markdown
from experiments import EXPERIMENTS, Budget, Row, Settings
from figures import (
    BATCH,
    OURS,
    Cells,
    Setting,
    alpha_forms,
    contests,
    gaps,
    is_svi,
    learnt,
    merit,
    shown,
)

RATIO, MARGIN = 1.05, 0.05  # how near to batch SGPR is near: of RMSE, of MLL
CLOSE = 0.1  # gaps below this fraction of the median count as clumps
SCORES = ("RMSE", "MLL")
WINDOWED = ("windowed GP", "windowed SGPR")


# --------------------------------------------------------------------------- verdicts


def dominators(contest: Cells, score: str) -> list[str]:
    """Baselines that end both faster and better than ours.

    The batch model is none of them: it has to wait for the last datum.

    Args:
        contest: Results by method, ours among them.
        score: ``RMSE`` or ``MLL``.
    """
    ours = contest[OURS]
    return [
        method
        for method, row in contest.items()
        if method not in (OURS, BATCH)
        and row["seconds"] < ours["seconds"]
        and merit(row, score) > merit(ours, score)
    ]


class Shortfall(NamedTuple):
    """How far a row ends from the batch model.

    Attributes:
        ratio: RMSE over that of the batch model.
        difference: MLL minus that of the batch model.
    """

    ratio: float
    difference: float

    @property
    def near(self) -> tuple[bool, bool]:
        """Whether RMSE and MLL are as near as they should be."""
        return self.ratio <= RATIO, self.difference >= -MARGIN


def shortfall(row: Row, batch: Row | None) -> Shortfall | None:
    """A row against the batch model, if there is one."""
    if batch is None:
        return None
    return Shortfall(row["RMSE"] / batch["RMSE"], row["MLL"] - batch["MLL"])


def better_than(ours: Row, others: Sequence[Row], score: str) -> bool:
    """Whether ours ends better than all others."""
    return all(merit(ours, score) > merit(other, score) for other in others)


class Estimate(NamedTuple):
    """A mean and its standard error, NaN where there is one value only."""

    mean: float
    error: float

    def __str__(self) -> str:
        if math.isnan(self.error):
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ± {self.error:.3f}"

    @property
    def clear(self) -> bool:
        """Whether the mean is more than two standard errors from zero."""
        return abs(self.mean) > 2 * self.error


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error of values."""
    few = len(values) < 2
    error = math.nan if few else statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(statistics.fmean(values), error)


def falls(values: Sequence[float]) -> bool:
    """Whether each value is at most the one before."""
    return all(b <= a for a, b in zip(values, values[1:], strict=False))


# ------------------------------------------------------------------------------ words


def listed(names: Sequence[object]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    words = [str(name) for name in names]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def share(flags: Sequence[bool]) -> str:
    """How many of them hold."""
    if len(flags) == 1:
        return "in the one setting" if flags[0] else "not in the one setting"
    return f"in {sum(flags)} of {len(flags)} settings"


def number(value: float | None, form: str = ".4f") -> str:
    """A figure, or a dash where there is none."""
    missing = value is None or math.isnan(value)
    return "–" if missing else f"{value:{form}}".replace("-", "−")


def ending(row: Row) -> str:
    """How a method stopped, where not as planned."""
    if row["failures"]:
        first = row["failures"][0].splitlines()[0].replace("|", "/")
        more = len(row["failures"]) - 1
        return first + (f" (and {more} more)" if more else "")
    return "at its budget of steps" if row.get("converged") is False else ""


def paragraphs(*parts: str) -> str:
    """Parts that are not empty, apart from each other."""
    return "\n\n".join(part for part in parts if part)


# ---------------------------------------------------- accuracy against running time


def _score_row(method: str, row: Row, batch: Row | None) -> dict[str, str]:
    gap = shortfall(row, batch)
    return {
        "method": f"**{method}**" if method == OURS else method,
        "RMSE": number(row["RMSE"]),
        "MLL": number(row["MLL"]),
        "seconds": number(row["seconds"], ",.1f"),
        "RMSE / batch": number(gap.ratio if gap else None, ".3f"),
        "MLL − batch": number(gap.difference if gap else None, "+.3f"),
        "stopped": ending(row),
    }


def score_tables(every: dict[Setting, Cells]) -> str:
    """What each method ends with, setting by setting."""
    parts = []
    for setting, contest in every.items():
        batch = contest.get(BATCH)
        rows = [_score_row(m, row, batch) for m, row in shown(contest).items()]
        parts.append(paragraphs(f"{str(setting).capitalize()}:", markdown(rows)))
        rates = {m: row for m, row in contest.items() if is_svi(m)}
        if len(rates) > 1:
            table = markdown([_score_row(m, row, batch) for m, row in rates.items()])
            parts.append(
                f"<details><summary>All rates of SVI</summary>\n\n{table}\n\n</details>"
            )
    return paragraphs(*parts)


def verdict_table(every: dict[Setting, Cells]) -> str:
    """Ours against the batch model, and against the frontier."""
    rows = []
    for setting, contest in every.items():
        if OURS not in contest:
            continue
        gap = shortfall(contest[OURS], contest.get(BATCH))
        row = {"setting": str(setting)}
        if gap:
            over, under = gap.ratio - RATIO, -MARGIN - gap.difference
            near = gap.near
            row[f"RMSE ≤ {RATIO:g} x batch"] = number(gap.ratio, ".3f") + (
                ", met" if near[0] else f", missed by {number(over, '.3f')}"
            )
            row[f"MLL ≥ batch − {MARGIN:g}"] = number(gap.difference, "+.3f") + (
                ", met" if near[1] else f", missed by {number(under, '.3f')}"
            )
        for score in SCORES:
            winners = dominators(contest, score)
            row[f"{score} frontier"] = (
                f"behind {listed(winners)}" if winners else "on it"
            )
        rows.append(row)
    return markdown(rows)


def frontier_sentence(every: dict[Setting, Cells]) -> str:
    """Who is both faster and better than ours, if anybody."""
    met = {s: contest for s, contest in every.items() if OURS in contest}
    if not met:
        return "Our method was not run."
    beaten = [
        f"{listed(winners)} ({score}; {setting})"
        for setting, contest in met.items()
        for score in SCORES
        if (winners := dominators(contest, score))
    ]
    if not beaten:
        return (
            "No baseline is both faster and more accurate than ours at the end, "
            "neither by RMSE nor by MLL, in any setting."
        )
    return f"Both faster and more accurate than ours at the end: {'; '.join(beaten)}."


def batch_sentences(every: dict[Setting, Cells]) -> str:
    """How near the batch model is, and what it costs."""
    pairs = [c for c in every.values() if OURS in c and BATCH in c]
    if not pairs:
        return ""
    nears = [shortfall(c[OURS], c[BATCH]).near for c in pairs]
    faster = [c[BATCH]["seconds"] < c[OURS]["seconds"] for c in pairs]
    return (
        f"Ours ends with at most {RATIO:g} times the RMSE of batch SGPR "
        f"{share([rmse for rmse, _ in nears])}, and with an MLL at most {MARGIN:g} "
        f"below it {share([mll for _, mll in nears])}. Trained once, after the last "
        f"datum, batch SGPR takes less time than the whole stream {share(faster)}; it "
        "is a ceiling and no contestant, since it has no prediction before that."
    )


def missed_sentence(every: dict[Setting, Cells]) -> str:
    """Why the batch model is out of reach, where it is."""
    missed = [
        str(setting)
        for setting, contest in every.items()
        if OURS in contest
        and BATCH in contest
        and not all(shortfall(contest[OURS], contest[BATCH]).near)
    ]
    if not missed:
        return ""
    return (
        f"- Batch SGPR is out of reach in: {'; '.join(missed)}. It moves all inducing "
        "points with all data at hand. A stream chooses points as data come, and what "
        "it drops or does not yet need cannot be had later. We read the gap as the "
        "price of that."
    )


def forgotten_sentence(every: dict[Setting, Cells]) -> str:
    """What windows cost, where they cost."""
    ratios = [
        contest[method]["RMSE"] / contest[OURS]["RMSE"]
        for contest in every.values()
        for method in WINDOWED
        if OURS in contest and method in contest
    ]
    if not ratios or min(ratios) <= 1:
        return ""
    return (
        "- The test set at the end covers the whole stream, and windowed models have "
        f"forgotten what left the window: their RMSE is {min(ratios):.2f} to "
        f"{max(ratios):.3g} times ours."
    )


def stopped_sentence(every: dict[Setting, Cells]) -> str:
    """Which baselines broke off."""
    stopped = [
        str(setting)
        for setting, contest in every.items()
        if contest.get("online conditioning", {"failures": []})["failures"]
    ]
    if not stopped:
        return ""
    return (
        "- Online conditioning, which the paper does not have, keeps every point "
        f"after the first batch. It stopped early in {len(stopped)} of {len(every)} "
        "settings and predicts from what it had; its seconds are few for that reason."
    )


def without_svi_sentence(every: dict[Setting, Cells]) -> str:
    """Sizes at which SVI has no results."""
    sizes = sorted({s.num_inducing for s in every if not any(map(is_svi, every[s]))})
    if not sizes:
        return ""
    return (
        f"- SVI was not run with M = {listed(sizes)}: its steps are the slowest of "
        "all, and it is far behind where it was run."
        if _svi_is_behind(every)
        else f"- SVI was not run with M = {listed(sizes)}: its steps are the slowest."
    )


def _svi_is_behind(every: dict[Setting, Cells]) -> bool:
    pairs = [
        (contest[method], contest[OURS])
        for contest in map(shown, every.values())
        for method in contest
        if is_svi(method) and OURS in contest
    ]
    return bool(pairs) and all(svi["RMSE"] > 2 * ours["RMSE"] for svi, ours in pairs)


def compare_measured(cells: Cells) -> str:
    """Tables and verdicts of a comparison."""
    every = contests(cells)
    if not every:
        return ""
    return paragraphs(
        score_tables(every),
        "Verdicts on ours:",
        verdict_table(every),
        frontier_sentence(every),
        batch_sentences(every),
    )


def timeseries_differences(cells: Cells) -> str:
    """Time series: agreement and reasons."""
    every = contests(cells)
    ours = {s: contest for s, contest in every.items() if OURS in contest}
    if not ours:
        return ""
    free = not any(dominators(c, score) for c in ours.values() for score in SCORES)
    return "\n".join(
        filter(
            None,
            (
                "- The claim holds: ours is on the frontier in every setting."
                if free
                else "- The claim does not hold everywhere, see the last columns of "
                "the table of verdicts.",
                missed_sentence(every),
                forgotten_sentence(every),
                stopped_sentence(every),
                without_svi_sentence(every),
                "- The audio signal is not the paper's. Seconds are those of another "
                "machine and other code; only their order can be compared.",
            ),
        )
    )


def windowed_table(every: dict[Setting, Cells]) -> str:
    """Ours against both windowed models."""
    rows = []
    for setting, contest in every.items():
        if OURS not in contest:
            continue
        row = {"setting": str(setting)}
        for method in WINDOWED:
            gap = shortfall(contest[OURS], contest.get(method))
            row[f"RMSE / {method}"] = number(gap.ratio if gap else None, ".3f")
            row[f"MLL − {method}"] = number(gap.difference if gap else None, "+.3f")
        rows.append(row)
    return markdown(rows)


def beats_windows(every: dict[Setting, Cells], score: str) -> list[bool]:
    """Whether ours is better than both, in settings where all three were run."""
    return [
        better_than(contest[OURS], [contest[m] for m in WINDOWED], score)
        for contest in every.values()
        if OURS in contest and all(m in contest for m in WINDOWED)
    ]


def terrain_measured(cells: Cells) -> str:
    """Tables and verdicts, and ours against the windowed models."""
    every = contests(cells)
    flags = {score: beats_windows(every, score) for score in SCORES}
    if not flags["RMSE"]:
        return compare_measured(cells)
    return paragraphs(
        compare_measured(cells),
        "Ours against the windowed models; below 1 and above 0 ours is better:",
        windowed_table(every),
        f"Ours has a lower RMSE than both windowed models {share(flags['RMSE'])}, and "
        f"a higher MLL than both {share(flags['MLL'])}.",
    )


def terrain_differences(cells: Cells) -> str:
    """Terrain: agreement and reasons."""
    every = contests(cells)
    flags = {score: beats_windows(every, score) for score in SCORES}
    reasons = [missed_sentence(every), forgotten_sentence(every)]
    reasons += [stopped_sentence(every), without_svi_sentence(every)]
    if flags["MLL"] and all(flags["MLL"]):
        reasons.insert(
            0,
            "- The paper's method was behind the windowed models in MLL; ours is "
            "ahead. Ours differs from it in three ways: one noise is shared by all "
            "data, so that what early batches thought of the noise can be revised; "
            "inducing points are chosen anew among old ones and new data by what "
            "they are worth to the bound; and each input has a lengthscale. We did "
            "not separate what each of them does.",
        )
    elif flags["MLL"]:
        reasons.insert(
            0,
            "- As in the paper, the MLL of windowed models is not beaten everywhere. "
            "A window is dense where the last data are, and knows that it knows "
            "nothing elsewhere: there it predicts its prior, which is wide. Ours "
            "spreads the same inducing points over everything it has seen.",
        )
    if not any("OS" in setting.data for setting in every):
        reasons.append(
            "- The terrain is matplotlib's sample, not the paper's. With `--data-dir` "
            "a tile of OS Terrain 50 takes its place."
        )
    return "\n".join(filter(None, reasons))


# ----------------------------------------------------------------- other experiments


def toy_measured(cells: Cells) -> str:
    """Ends of all four streams beside batch SGPR."""
    gaps_to_batch = {name: shortfall(row, row["batch"]) for name, row in cells.items()}
    rows = [
        {
            "stream": name.replace("alpha", "α ="),
            "RMSE": number(row["RMSE"]),
            "MLL": number(row["MLL"]),
            "batch RMSE": number(row["batch"]["RMSE"]),
            "batch MLL": number(row["batch"]["MLL"]),
        }
        for name, row in sorted(cells.items())
    ]
    ratio = max(gap.ratio for gap in gaps_to_batch.values())
    difference = min(gap.difference for gap in gaps_to_batch.values())
    return paragraphs(
        markdown(rows),
        "Batch SGPR has as many inducing points. At worst, a stream ends with "
        f"{number(ratio, '.3f')} times its RMSE and an MLL {number(difference, '+.4f')} "
        "relative to it.",
    )


def toy_differences(cells: Cells) -> str:
    """Toy: whether all streams are near the batch model."""
    far = [
        name
        for name, row in sorted(cells.items())
        if not all(shortfall(row, row["batch"]).near)
    ]
    verdict = (
        f"- Not as near to the batch model as {RATIO:g} times its RMSE and {MARGIN:g} "
        f"below its MLL: {'; '.join(far)}."
        if far
        else "- We agree: in order or shuffled, with either bound, the end is that of "
        "the batch model."
    )
    return verdict + (
        "\n- The series is a draw from a GP, not the paper's. Ours decides itself how "
        "many of the inducing points it needs."
    )


def alpha_measured(cells: Cells) -> str:
    """Scores and gaps by alpha, over splits."""
    forms = alpha_forms(cells)
    rows = []
    for form, splits in forms.items():
        apart = [gaps(row) for row in splits.values()]
        ratios = [np.median(g) / max(g.min(), 1e-12) for g in apart]
        clumps = [float((g < CLOSE * np.median(g)).mean()) for g in apart]
        rows.append(
            {
                "α": form,
                "splits": str(len(splits)),
                "MLL over the stream": str(estimate(stream_scores(splits))),
                "MLL at the end": str(estimate([r["MLL"] for r in splits.values()])),
                "RMSE at the end": str(estimate([r["RMSE"] for r in splits.values()])),
                "median / smallest gap": f"{statistics.geometric_mean(ratios):.3g}",
                f"gaps < {CLOSE:g} median": f"{statistics.fmean(clumps):.0%}",
            }
        )
    return paragraphs(
        "Mean ± standard error over random halves of the series. The MLL over the "
        "stream is the mean over all batches. Forms with a number only are the "
        "paper's; in the last one all data share one noise, the default here.",
        markdown(rows),
        alpha_order_sentence(forms),
        clump_sentence(forms),
    )


def stream_scores(splits: dict[int, Row]) -> list[float]:
    """The MLL averaged over the stream, split by split."""
    return [statistics.fmean(r["MLL"] for r in row["trace"]) for row in splits.values()]


def paired(a: dict[int, Row], b: dict[int, Row], score: Callable[[Row], float]) -> list:
    """Differences ``a - b`` of a score on splits that both have."""
    return [score(a[split]) - score(b[split]) for split in a if split in b]


def over_stream(row: Row) -> float:
    """The MLL averaged over the stream."""
    return statistics.fmean(r["MLL"] for r in row["trace"])


def alpha_order_sentence(forms: dict[str, dict[int, Row]]) -> str:
    """Whether small alpha is best over the stream, and how sure that is."""
    plain = {form: splits for form, splits in forms.items() if "noise" not in form}
    if "0" not in plain or len(plain) < 2:
        return ""
    means = [statistics.fmean(stream_scores(splits)) for splits in plain.values()]
    best = list(plain)[means.index(max(means))]
    changes = {
        form: estimate(values)
        for form, splits in plain.items()
        if form != "0" and (values := paired(splits, plain["0"], over_stream))
    }
    order = "falls with every step of α" if falls(means) else "is not monotone in α"
    listed_changes = listed([f"{change} at {a}" for a, change in changes.items()])
    text = (
        f"Averaged over the stream, the MLL {order}; it is highest at α = {best}. "
        f"Against α = 0 on the same splits it changes by {listed_changes}."
    )
    worse = [a for a, change in changes.items() if change.clear and change.mean < 0]
    higher = [a for a, change in changes.items() if change.clear and change.mean > 0]
    if worse:
        text += f" Lower by more than two standard errors: α = {listed(worse)}."
    if higher:
        text += f" Higher by more than two standard errors: α = {listed(higher)}."
    if not worse and not higher:
        text += " None of these is more than two standard errors."
    return text.replace(" -", " −")


def clump_sentence(forms: dict[str, dict[int, Row]]) -> str:
    """Whether inducing points clump for large alpha."""
    plain = [splits for form, splits in forms.items() if "noise" not in form]
    if len(plain) < 2:
        return ""
    closest = [
        statistics.fmean(
            float((gaps(row) < CLOSE * np.median(gaps(row))).mean())
            for row in splits.values()
        )
        for splits in (plain[0], plain[-1])
    ]
    low, high = (f"{value:.0%}" for value in closest)
    verdict = (
        "inducing points clump as α grows"
        if closest[1] > closest[0]
        else "inducing points do not clump as α grows"
    )
    return (
        f"By the share of gaps below {CLOSE:g} of the median gap, {verdict}: {low} at "
        f"the smallest α, {high} at the largest."
    )


def alpha_differences(cells: Cells) -> str:
    """Alpha: the order of the paper, and what shared noise changes."""
    forms = alpha_forms(cells)
    plain = {form: splits for form, splits in forms.items() if "noise" not in form}
    lines = []
    if "0" in plain and "1" in plain:
        change = estimate(paired(plain["1"], plain["0"], over_stream) or [math.nan])
        means = [statistics.fmean(stream_scores(splits)) for splits in plain.values()]
        if change.clear and change.mean < 0:
            lines.append(
                "- The order of the paper is reproduced: small α is best over the "
                "stream"
                + ("." if falls(means) else ", though not every step of α costs.")
            )
        elif change.clear:
            lines.append("- The order of the paper is refuted: large α is best here.")
        else:
            lines.append(
                "- The order of the paper is neither reproduced nor refuted: the "
                "difference between both ends is within two standard errors."
            )
    shared = forms.get("0, shared noise")
    if shared and "0" in plain:
        gain = estimate(paired(shared, plain["0"], lambda r: r["MLL"]) or [math.nan])
        highest, last = (
            statistics.fmean(f(row) for row in plain["0"].values())
            for f in (lambda r: max(t["MLL"] for t in r["trace"]), lambda r: r["MLL"])
        )
        if gain.mean > MARGIN and (gain.clear or math.isnan(gain.error)):
            size = max(len(row["z"]) for row in plain["0"].values())
            lines.append(
                "- In the paper's form each batch keeps the noise that it had when it "
                f"came. Once {size} inducing points are used up, what they cannot "
                "follow has to become noise, and the noise of the past cannot be "
                f"revised: at α = 0 the MLL falls from {number(highest, '.2f')} to "
                f"{number(last, '.2f')}. With one noise shared by all data the end is "
                f"{gain} higher."
            )
        elif gain.clear and gain.mean < 0:
            lines.append(
                f"- One noise shared by all data ends {gain} from the paper's form "
                "here: early batches are easier to follow than late ones, and noise "
                "of their own suits them."
            )
    return "\n".join(lines).replace(" -", " −").replace("\n−", "\n-")


def hyperparameters_measured(cells: Cells) -> str:
    """Learnt - true at the end."""
    rows = []
    for true, group in learnt(cells).items():
        full = group.get(None)
        for m, errors in group.items():
            end = errors[:, -1]
            row = {
                "lengthscale": f"{true:g}",
                "M": str(m) if m else "full GP",
                "draws": str(len(end)),
                "learnt − true, mean": number(end.mean(), "+.4f"),
                "std": number(_std(end)),
            }
            bias = None if full is None else end.mean() - full[:, -1].mean()
            row["mean − that of the full GP"] = number(bias if m else None, "+.4f")
            row["within its std"] = (
                "–" if m is None or full is None else _yes(within_full(end, full))
            )
            rows.append(row)
    return paragraphs(
        "After the last batch, over draws of the series:",
        markdown(rows),
        hyperparameters_sentence(cells),
    )


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else math.nan


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def within_full(end: np.ndarray, full: np.ndarray) -> bool:
    """Whether means differ by less than the full GP's spread over draws."""
    return abs(end.mean() - full[:, -1].mean()) <= _std(full[:, -1])


def hyperparameters_sentence(cells: Cells) -> str:
    """From which M on the full GP's lengthscale is learnt."""
    parts = []
    for true, group in learnt(cells).items():
        full, sizes = group.get(None), [m for m in group if m]
        if full is None or not sizes:
            continue
        good = [m for m in sizes if within_full(group[m][:, -1], full)]
        parts.append(
            f"With lengthscale {true:g}, the mean is within the spread of the full "
            f"GP's for {f'M = {listed(good)}' if good else 'no M'} out of "
            f"{listed(sizes)}."
        )
    return " ".join(parts)


def hyperparameters_differences(cells: Cells) -> str:
    """Hyperparameters: whether the bias goes away."""
    lines = []
    for true, group in learnt(cells).items():
        full, sizes = group.get(None), [m for m in group if m]
        if full is None or len(sizes) < 2:
            continue
        biases = [abs(group[m][:, -1].mean() - full[:, -1].mean()) for m in sizes]
        small, large = (number(value) for value in (biases[0], biases[-1]))
        if biases[-1] < biases[0]:
            lines.append(
                f"- Lengthscale {true:g}: as in the paper, there is a bias at small M "
                f"({small} from the full GP at M = {sizes[0]}) that more points "
                f"remove ({large} at M = {sizes[-1]})."
            )
        else:
            lines.append(
                f"- Lengthscale {true:g}: no bias that more points would remove "
                f"({small} from the full GP at M = {sizes[0]}, {large} at "
                f"M = {sizes[-1]})."
            )
    return "\n".join(lines)


def memory_measured(cells: Cells) -> str:
    """Peaks, accuracy, flatness."""
    rows = [
        {
            "method": f"**{method}**" if method == OURS else method,
            "peak MiB": number(row["peak_MiB"], ",.0f"),
            "RMSE": number(row["RMSE"]),
            "MLL": number(row["MLL"]),
            "last peak / third peak": number(flatness(row), ".3f"),
        }
        for method, row in sorted(cells.items())
    ]
    return paragraphs(
        "Peak of the resident memory above what the process held before, each method "
        "in a process of its own. Two batches are left to fill windows and budgets "
        "before memory should be flat.",
        markdown(rows),
        memory_sentence(cells),
    )


def flatness(row: Row) -> float:
    """The last peak over the first one after two batches."""
    peaks = row["peaks_MiB"]
    return peaks[-1] / peaks[2] if len(peaks) > 2 else math.nan


def memory_sentence(cells: Cells) -> str:
    """Whether ours needs no more memory at no more error."""
    others = {method: row for method, row in cells.items() if method != OURS}
    if OURS not in cells or not others:
        return ""
    ours, parts = cells[OURS], []
    for method, row in sorted(others.items()):
        parts.append(
            f"{ours['peak_MiB'] / row['peak_MiB']:.2f} times the peak of {method} at "
            f"{ours['RMSE'] / row['RMSE']:.3f} times its RMSE"
        )
    frugal = all(
        ours["peak_MiB"] <= row["peak_MiB"] and ours["RMSE"] <= row["RMSE"]
        for row in others.values()
    )
    return f"Ours has {listed(parts)}: " + (
        "no baseline needs less memory or ends with a lower error."
        if frugal
        else "it is not ahead in both of all baselines."
    )


def memory_differences(cells: Cells) -> str:
    """Memory: whether it is comparable or smaller."""
    others = [row["peak_MiB"] for method, row in cells.items() if method != OURS]
    if OURS not in cells or not others:
        return ""
    peak = cells[OURS]["peak_MiB"]
    if peak <= min(others):
        return "- We agree: the peak is the smallest of all."
    return (
        "- The peak is not the smallest: the smallest is "
        f"{min(others) / peak:.2f} times ours. It is a matter of the sizes chosen: ours "
        "holds M x (M + batch) numbers several times over for its gradients, an exact "
        "GP the square of its window, a windowed sparse model M x window."
    )


def banana_measured(cells: Cells) -> str:
    """Errors after every batch, by order of arrival."""
    randoms = [row["errors"] for key, row in cells.items() if key.startswith("random")]
    orders = {
        name: cells[key]["errors"]
        for key, name in BANANA_ORDERS.items()
        if key in cells
    }
    count = max((len(errors) for errors in [*orders.values(), *randoms]), default=0)
    rows = []
    for k in range(count):
        row = {"batch": str(k + 1)}
        for name, errors in orders.items():
            row[name] = number(errors[k], ".2%")
        if randoms:
            at = [errors[k] for errors in randoms]
            spread = f" ± {_std(np.array(at)):.2%}" if len(at) > 1 else ""
            row[f"random, mean of {len(at)}"] = number(np.mean(at), ".2%") + spread
        rows.append(row)
    whole = cells.get("one batch")
    return paragraphs(
        "Test errors; ± is the standard deviation over random orders:"
        if randoms
        else "Test errors:",
        markdown(rows),
        f"All data in one batch: {whole['errors'][-1]:.2%}." if whole else "",
    )


BANANA_ORDERS = {"left_to_right": "left to right", "right_to_left": "right to left"}


def banana_ends(cells: Cells) -> dict[str, float]:
    """Errors at the end, the mean over random orders among them."""
    ends = {
        name: cells[key]["errors"][-1]
        for key, name in BANANA_ORDERS.items()
        if key in cells
    }
    randoms = [
        row["errors"][-1] for key, row in cells.items() if key.startswith("random")
    ]
    return ends | ({"random": statistics.fmean(randoms)} if randoms else {})


def banana_differences(cells: Cells) -> str:
    """Banana: whether all orders end alike."""
    ends, whole = banana_ends(cells), cells.get("one batch")
    if len(ends) < 2:
        return ""
    spread = max(ends.values()) - min(ends.values())
    alike = spread <= BANANA_ALIKE
    text = (
        f"- {'We agree: all' if alike else 'Not all'} orders end with about the same "
        f"error; they are {100 * spread:.2f} percentage points apart."
    )
    if whole:
        off = max(ends.values()) - whole["errors"][-1]
        text += f" The worst is {100 * off:+.2f} points from the batch model."
    return (
        text.replace(" -", " −")
        if not text.startswith("- ")
        else ("- " + text[2:].replace(" -", " −"))
    )


BANANA_ALIKE = 0.02  # errors no further apart count as about the same


def equivalence_measured(cells: Cells) -> str:
    """Bounds, and the largest differences of curves."""
    rows = []
    for name, cell in sorted(cells.items()):
        for k, panel in enumerate(cell["panels"]):
            rows.append(
                {
                    "inducing points": name.removeprefix(
                        "inducing points "
                    ).removesuffix(" inducing points"),
                    "after batch": str(k + 1),
                    "online bound": number(panel["online_bound"]),
                    "batch bound": number(panel["batch_bound"]),
                    "largest difference of means": f"{curve_gap(panel, 'mean'):.1e}",
                    "of standard deviations": f"{curve_gap(panel, 'std'):.1e}",
                }
            )
    return paragraphs(
        "The online bound is the sum of what each update adds. Where inducing points "
        "are at the data, the batch bound is the log evidence of the exact GP.",
        markdown(rows),
        equivalence_sentence(cells),
    )


def curve_gap(panel: Row, kind: str) -> float:
    """Largest difference between both curves."""
    a, b = (np.array(panel[f"{name}_{kind}"]) for name in ("online", "batch"))
    return float(np.abs(a - b).max())


def bounds_agree(cells: Cells) -> bool:
    """Whether bounds agree in every digit that is printed."""
    return all(
        number(panel["online_bound"]) == number(panel["batch_bound"])
        for cell in cells.values()
        for panel in cell["panels"]
    )


def equivalence_sentence(cells: Cells) -> str:
    """Whether the figures agree as printed."""
    worst = max(
        abs(panel["online_bound"] - panel["batch_bound"])
        for cell in cells.values()
        for panel in cell["panels"]
    )
    agree = "agree in" if bounds_agree(cells) else "do not agree in"
    return f"Bounds {agree} every printed digit; the largest difference is {worst:.1e}."


def equivalence_differences(cells: Cells) -> str:
    """Equivalence: whether it holds."""
    if bounds_agree(cells):
        return "- We agree. What is left is rounding and the jitter of the prior."
    return "- The bounds differ by more than rounding; this should not be."


# --------------------------------------------------------------------------- the page


class Section(NamedTuple):
    """What the page says about an experiment.

    Attributes:
        title: Its heading.
        claim: What the paper says.
        measured: Tables and sentences from the cells.
        differences: Where the cells differ from the claim, and why.
    """

    title: str
    claim: str
    measured: Callable[[Cells], str]
    differences: Callable[[Cells], str]


SECTIONS = {
    "toy": Section(
        "Online regression on a toy series",
        "Updated batch by batch, the model follows new data, keeps what it knew of old "
        "data, and ends about where batch inference ends; for data in order and "
        "shuffled, for the variational bound (VFE, α = 0) and for Power-EP (α = 0.5).",
        toy_measured,
        toy_differences,
    ),
    "alpha": Section(
        "The power of Power-EP",
        "As data arrive, small α predicts best, VFE among the best; with large α "
        "inducing points clump, and what the summary can say suffers.",
        alpha_measured,
        alpha_differences,
    ),
    "hyperparameters": Section(
        "Learning hyperparameters online",
        "The lengthscale of series drawn from GPs is learnt well online. With few "
        "inducing points it is biased; with more of them the trace is that of the full "
        "GP.",
        hyperparameters_measured,
        hyperparameters_differences,
    ),
    "timeseries": Section(
        "Time series: accuracy against running time",
        "On both time series the streaming model is on the frontier: no method is as "
        "accurate in less time.",
        compare_measured,
        timeseries_differences,
    ),
    "terrain": Section(
        "Terrain: accuracy against running time",
        "In two dimensions the streaming model has a lower RMSE than a GP or a sparse "
        "GP on a window, but not a higher log-likelihood.",
        terrain_measured,
        terrain_differences,
    ),
    "memory": Section(
        "Memory",
        "For the accuracy it reaches, the streaming model needs as much memory as "
        "windowed models or less.",
        memory_measured,
        memory_differences,
    ),
    "banana": Section(
        "Classification",
        "In order or shuffled, decision boundaries come close to those of the batch "
        "model. From left to right, from right to left and in random order, the error "
        "at the end is about the same.",
        banana_measured,
        banana_differences,
    ),
    "equivalence": Section(
        "Equivalence with batch inference",
        "With hyperparameters and inducing points fixed, streaming is batch VFE; with "
        "inducing points at the data, it is the exact GP.",
        equivalence_measured,
        equivalence_differences,
    ),
}

INTRODUCTION = """\
# The paper, reproduced

The experiments of "Streaming Sparse Gaussian Process Approximations" (Bui, Nguyen and
Turner, 2017), figure by figure: what the paper claims, what we measured, where we
differ and why. `python scripts/reproduce.py all --out DIR` runs them,
`python scripts/reproduce.py report --out DIR` writes this page: every figure and every
verdict on it comes from the JSON files in `{folder}/`.

RMSE is the root mean squared error, MLL the mean log density of test targets with their
noise; both in units of scaled targets. During a stream they are taken on up to
{max_test:,} of the test points that the stream has come past, at the end on all of
them. Seconds are processor time of one thread, training and testing of all batches so
far. All methods share kernel, start and what they learnt before:

- streaming: this library with its default policy;
- windowed GP: an exact GP on the last points;
- windowed SGPR: collapsed sparse regression on the last points, with the same code;
- SVI: stochastic variational inference with learning rates {rates}, of which the one
  with the lowest RMSE at the end is shown; its inducing points start spread over the
  range of the whole stream, which is a head start;
- online conditioning: GPyTorch's `get_fantasy_model`, hyperparameters from the first
  batch;
- batch SGPR: all data at once, the ceiling.

What each of them may do:

{budgets}"""

BUDGET_COLUMNS = {
    "steps": "steps a batch: streaming, windowed SGPR",
    "gp_steps": "windowed GP (L-BFGS)",
    "svi_steps": "SVI",
    "batch_steps": "steps in all: batch SGPR (L-BFGS)",
    "gp_window": "points: windowed GP",
    "sgpr_window": "windowed SGPR",
}


class Results(NamedTuple):
    """A file of results: whether it is of tiny runs, and its cells."""

    quick: bool
    cells: Cells


def load(out: Path) -> dict[str, Results]:
    """The files in a folder, by experiment."""
    found = {}
    for name in EXPERIMENTS:
        path = out / f"{name}.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            found[name] = Results(kept["quick"], kept["cells"])
    return found


def not_run(name: str, results: Results) -> list[str]:
    """Cells that a whole run with default settings would have."""
    other_terrain = any(key.startswith("terrain OS") for key in results.cells)
    settings = Settings(results.quick, data_dir=Path() if other_terrain else None)
    return [
        cell.key
        for cell in EXPERIMENTS[name](settings)
        if cell.key not in results.cells
    ]


def introduction(folder: str, found: dict[str, Results]) -> str:
    """How all of it was made."""
    budgets: dict[str, Budget] = {
        name: experiments.SMALL
        if name in found and found[name].quick
        else getattr(experiments, name.upper())
        for name in ("timeseries", "terrain", "memory")
    }
    rows = [
        {
            "experiment": name,
            **{
                title: f"{value:,}" if (value := getattr(budget, field)) else "–"
                for field, title in BUDGET_COLUMNS.items()
            },
        }
        for name, budget in budgets.items()
    ]
    max_test = inspect.signature(experiments.trace).parameters["max_test"].default
    text = INTRODUCTION.format(
        folder=folder,
        max_test=max_test,
        rates=listed([f"{rate:g}" for rate in experiments.RATES]),
        budgets=markdown(rows),
    )
    quick = [name for name, results in found.items() if results.quick]
    absent = [name for name in EXPERIMENTS if name not in found]
    return paragraphs(
        text,
        f"**Tiny versions** (`--quick`), whose figures only prove that all runs: "
        f"{listed(quick)}."
        if quick
        else "",
        f"**Not run**: {listed(absent)}." if absent else "",
    )


def section(name: str, folder: str, results: Results) -> str:
    """What the page says about one experiment."""
    title, claim, measured, differences = SECTIONS[name]
    missing = not_run(name, results)
    some = "; ".join(missing[:5]) + ("; and others" if missing[5:] else "")
    note = f"Not run, {len(missing)} cells: {some}." if missing else ""
    head = paragraphs(f"## {title}", f"**The paper.** {claim}")
    if not results.cells:
        return paragraphs(head, note)
    reasons = differences(results.cells)
    return paragraphs(
        head,
        f"![{title}]({folder}/{name}.png)",
        f"**Measured.** {CAPTIONS[name]}",
        measured(results.cells),
        note,
        f"**Where we differ and why.**\n\n{reasons}" if reasons else "",
    )


CAPTIONS = {
    "toy": "New data are black, data before grey; line and band are the mean and two "
    "standard deviations of targets, ticks inducing points.",
    "alpha": "Left: bands are one standard error; heights are logarithms of the "
    "distance to the best, so that small differences show. Right: gaps between "
    "neighbouring inducing points at the end, all splits together.",
    "hyperparameters": "Bands are one standard deviation over draws; scale and noise "
    "are known.",
    "timeseries": "A dot for every batch, a star at the end. Heights of MLL are "
    "logarithms of the distance to the best, so that small differences show.",
    "terrain": "As above.",
    "memory": "One point for each method, and the peak of every batch.",
    "banana": "The line is where both classes are as likely; new data are bright, "
    "data before pale, circles inducing points.",
    "equivalence": "Thick lines are batch inference, dashes the stream on top of "
    "them: means and two standard deviations of the function.",
}


def page(out: Path) -> str:
    """The page on the files in ``out``, as Markdown."""
    found = load(out)
    sections = [section(name, out.name, found[name]) for name in found]
    return paragraphs(introduction(out.name, found), *sections) + "\n"


def report(out: Path) -> Path:
    """Write the page beside the folder of results.

    Args:
        out: The folder; ``docs/reproduction`` gives ``docs/reproduction.md``.

    Returns:
        Where the page is.
    """
    path = out.with_suffix(".md")
    path.write_text(page(out), encoding="utf-8")
    return path

"""What the results of ``scripts/reproduce.py`` say: which belong together, who wins.

Functions of cells as the JSON files hold them. Cells may be missing.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from workbench.results import Row

Cells = dict[str, Row]

OURS, BATCH, SVI = "streaming", "batch SGPR", "SVI"
PAPER, CARE = "the paper's form", "streaming, last batch with care"
FROM_MEMORY, CARE_FROM_MEMORY = f"{OURS}, from memory", f"{CARE}, from memory"
WINDOWED = ("windowed GP", "windowed SGPR")
FORMS = (OURS, FROM_MEMORY, CARE, CARE_FROM_MEMORY, PAPER)
METHODS = (OURS, PAPER, CARE, *WINDOWED, SVI, "online conditioning", BATCH)
SCORES = ("RMSE", "MLL")

RATIO, MARGIN = 1.05, 0.05  # how near the batch model is near: in RMSE, in MLL
CLOSE = 0.1  # inducing points closer than this fraction of the mean gap are a clump
FLAT = 1.05  # memory that grows no more than this is flat
ALIKE = 0.02  # errors of classification no further apart are about the same


# ---------------------------------------------------- accuracy against running time


class Setting(NamedTuple):
    """What all methods of a comparison have in common.

    Attributes:
        data: Name of the stream.
        num_inducing: Number of inducing points.
        batch: Points in a batch.
    """

    data: str
    num_inducing: int
    batch: int

    def __str__(self) -> str:
        return f"{self.data}, M={self.num_inducing}, batches of {self.batch:,}"


Contests = dict[Setting, Cells]

_KEY = re.compile(
    r"(?P<data>[^;]+); (?P<method>[^;]+); (?:M=(?P<m>\d+)|all points); "
    r"(?:batches of (?P<batch>\d+)|at once)"
)


def contests(cells: Cells) -> Contests:
    """The results of all methods in each setting, by method.

    A full GP, which has no inducing points, and the batch model, which sees no batches,
    belong to every setting of their data that they do not contradict.
    """
    matches = {key: _KEY.fullmatch(key) for key in cells}
    runs = [(match.groupdict(), cells[key]) for key, match in matches.items() if match]
    runs.sort(key=lambda run: _rank(run[0]["method"]))
    settings = sorted(
        Setting(run["data"], int(run["m"]), int(run["batch"]))
        for run, _ in runs
        if run["m"] and run["batch"]
    )
    return {
        setting: {
            run["method"]: row
            for run, row in runs
            if run["data"] == setting.data
            and run["m"] in (None, str(setting.num_inducing))
            and run["batch"] in (None, str(setting.batch))
        }
        for setting in settings
    }


def _rank(method: str) -> tuple[int, str]:
    return METHODS.index(family(method)), method


def family(method: str) -> str:
    """The method without its learning rate."""
    return SVI if is_svi(method) else method


def is_svi(method: str) -> bool:
    """Whether it is stochastic variational inference, at any rate."""
    return method.startswith(SVI)


def merit(row: Row, score: str) -> float:
    """``RMSE`` or ``MLL`` of a row, such that more is better and NaN is worst."""
    value = row[score] if score == "MLL" else -row[score]
    return -math.inf if math.isnan(value) else value


def shown(contest: Cells) -> Cells:
    """A contest with one rate of SVI: that with the lowest error at the end."""
    rates = [method for method in contest if is_svi(method)]
    best = max(rates, key=lambda method: merit(contest[method], "RMSE"), default=None)
    return {
        method: row
        for method, row in contest.items()
        if not is_svi(method) or method == best
    }


def frontier(contest: Cells, score: str) -> list[Row]:
    """Ends of streams that no other is both faster and better than, by time."""
    kept: list[Row] = []
    rivals = [row for method, row in contest.items() if method != BATCH]
    for row in sorted(rivals, key=lambda row: row["seconds"]):
        if not kept or merit(row, score) > merit(kept[-1], score):
            kept.append(row)
    return kept


def dominators(contest: Cells, score: str, form: str = OURS) -> list[str]:
    """Baselines that end both faster and better than ours.

    The batch model is none of them: it has to wait for the last datum. Nor is ours with
    another last batch. The paper's form is one.

    Args:
        contest: Results by method, ours among them.
        score: ``RMSE`` or ``MLL``.
        form: Whose; the paper's form has no rival in ours.
    """
    ours = contest[form]
    return [
        method
        for method, row in contest.items()
        if method not in (form, OURS, CARE, BATCH)
        and row["seconds"] < ours["seconds"]
        and merit(row, score) > merit(ours, score)
    ]


class Gap(NamedTuple):
    """How far a row ends from another one.

    Attributes:
        ratio: RMSE over the other's.
        difference: MLL minus the other's.
    """

    ratio: float
    difference: float

    @property
    def near(self) -> tuple[bool, bool]:
        """Whether RMSE and MLL are as near the batch model as they should be."""
        return self.ratio <= RATIO, self.difference >= -MARGIN

    @property
    def beyond(self) -> bool:
        """Whether the row is better by both, and by more than what counts as near."""
        return self.ratio < 1 / RATIO and self.difference > MARGIN


def gap(row: Row, other: Row | None) -> Gap:
    """A row against another; NaN where there is none."""
    if other is None:
        return Gap(math.nan, math.nan)
    return Gap(row["RMSE"] / other["RMSE"], row["MLL"] - other["MLL"])


def median_gap(gaps: Sequence[Gap]) -> Gap:
    """Medians of both over seeds."""
    ratios, differences = zip(*gaps, strict=True)
    return Gap(statistics.median(ratios), statistics.median(differences))


def with_methods(every: Contests, *methods: str) -> Contests:
    """The settings in which all of these methods were run."""
    return {
        setting: contest
        for setting, contest in every.items()
        if all(method in contest for method in methods)
    }


def beats_windows(every: Contests, score: str, form: str = OURS) -> list[bool]:
    """Whether ours is better than both windowed models, setting by setting."""
    return [
        all(merit(contest[form], score) > merit(contest[m], score) for m in WINDOWED)
        for contest in with_methods(every, form, *WINDOWED).values()
    ]


def stream_forms(contest: Cells) -> dict[str, Row | None]:
    """The rows of every form of streaming, ``None`` where it was not run.

    What the memory of ours predicts is in the row of ours; older files have none of it.
    """
    ours, care = contest.get(OURS), contest.get(CARE)
    return {
        OURS: ours,
        FROM_MEMORY: _from_memory(ours),
        CARE: care,
        CARE_FROM_MEMORY: _from_memory(care),
        PAPER: contest.get(PAPER),
    }


def _from_memory(row: Row | None) -> Row | None:
    """The row with the scores of the memory; ``None`` without them."""
    if row is None or "memory RMSE" not in row:
        return None
    return {**row, **{score: row[f"memory {score}"] for score in SCORES}}


def beside_batch(every: Contests) -> dict[str, dict[Setting, tuple[Row, Gap]]]:
    """Rows of each form and their gaps to the batch model, where both were run."""
    ran = with_methods(every, BATCH)
    forms = {setting: stream_forms(contest) for setting, contest in ran.items()}
    return {
        form: {
            setting: (row, gap(row, ran[setting][BATCH]))
            for setting, rows in forms.items()
            if (row := rows[form]) is not None
        }
        for form in FORMS
    }


# ------------------------------------------------------------------------------ alpha

Splits = dict[int, Row]


# Student's t: so many standard errors hold 95 % of it, by degrees of freedom. Beyond
# the table the last entry, a little too strict.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Estimate(NamedTuple):
    """A mean and its standard error, NaN where there is one value only.

    Attributes:
        mean: The mean.
        error: Its standard error.
        count: Of how many values.
    """

    mean: float
    error: float
    count: int

    def __str__(self) -> str:
        return self.text(".3f")

    def text(self, form: str) -> str:
        """Both numbers, as far as they exist."""
        both = (self.mean, self.error)
        return " ± ".join(number(v, form) for v in both if not math.isnan(v))

    @property
    def clear(self) -> bool:
        """Whether zero is outside of the 95 % interval of Student's t."""
        if self.count < 2:
            return False
        return abs(self.mean) > self.error * STUDENT[min(self.count - 2, 8)]


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error of values."""
    num = len(values)
    error = statistics.stdev(values) / math.sqrt(num) if num > 1 else math.nan
    return Estimate(statistics.fmean(values), error, num)


def number(value: float, form: str = ".4f") -> str:
    """A number with a real minus, or a dash where there is none."""
    return "–" if math.isnan(value) else f"{value:{form}}".replace("-", "−")


def alpha_forms(cells: Cells) -> dict[str, Splits]:
    """Rows of the experiment on alpha, by form and split.

    Forms are in order of alpha; the one with shared noise, which is ours, is last.
    """
    forms: dict[str, Splits] = {}
    for key in sorted(cells, key=lambda k: ("noise" in k, cells[k]["alpha"], k)):
        form, split = key.split("; split ")
        forms.setdefault(form, {})[int(split)] = cells[key]
    return forms


def paper_forms(cells: Cells) -> dict[str, Splits]:
    """The same without ours."""
    forms = alpha_forms(cells)
    return {form: splits for form, splits in forms.items() if "noise" not in form}


def gaps(row: Row) -> np.ndarray:
    """Distances between neighbouring inducing points on a line."""
    return np.diff(np.sort(np.array(row["z"])))


def stream_mll(row: Row) -> float:
    """The MLL averaged over the stream."""
    return statistics.fmean(step["MLL"] for step in row["trace"])


def clumped(row: Row) -> float:
    """The share of gaps that are far smaller than the mean gap.

    The mean is that of points spread evenly; the median would be the gap in a clump
    where most points are in clumps.
    """
    apart = gaps(row)
    return float((apart < CLOSE * apart.mean()).mean())


def over(splits: Splits, score: Callable[[Row], float]) -> Estimate:
    """A score over splits."""
    return estimate([score(row) for row in splits.values()])


def change(a: Splits, b: Splits, score: Callable[[Row], float]) -> Estimate:
    """``a - b`` of a score over the splits that both have."""
    both = [split for split in a if split in b]
    values = [score(a[split]) - score(b[split]) for split in both]
    return estimate(values) if values else Estimate(math.nan, math.nan, 0)


def falls(values: Sequence[float]) -> bool:
    """Whether each value is at most the one before."""
    return all(b <= a for a, b in zip(values, values[1:], strict=False))


# -------------------------------------------------------------------- hyperparameters


def learned(cells: Cells) -> dict[float, dict[int | None, np.ndarray]]:
    """Learned - true, draws x batches, by lengthscale and M; the full GP is last."""
    groups: dict[float, dict[int | None, list[list[float]]]] = {}
    for row in sorted(
        cells.values(),
        key=lambda row: (row["lengthscale"], row["M"] is None, row["M"] or 0),
    ):
        sizes = groups.setdefault(row["lengthscale"], {})
        sizes.setdefault(row["M"], []).append(row["learned"])
    return {
        true: {m: np.array(rows) - true for m, rows in sizes.items()}
        for true, sizes in groups.items()
    }


def spread(values: np.ndarray) -> float:
    """Standard deviation; NaN of one value."""
    return float(values.std(ddof=1)) if len(values) > 1 else math.nan


def bias(errors: np.ndarray, full: np.ndarray) -> float:
    """How far the mean at the end is from the full GP's."""
    return float(errors[:, -1].mean() - full[:, -1].mean())


def within_full(errors: np.ndarray, full: np.ndarray) -> bool:
    """Whether that is less than the spread of the full GP over draws."""
    return abs(bias(errors, full)) <= spread(full[:, -1])


# ----------------------------------------------------------------------------- others


def flatness(row: Row) -> float:
    """Growth of peaks of memory: the median of the second half over the first.

    Without the first two batches, while inducing points are still being added. Single
    peaks scatter, as the allocator keeps more or less of what was freed.
    """
    peaks = row["peaks_MiB"][2:]
    half = len(peaks) // 2
    if half == 0:
        return math.nan
    return statistics.median(peaks[-half:]) / statistics.median(peaks[:half])


def banana_errors(cells: Cells) -> dict[str, np.ndarray]:
    """Errors by order of arrival, ``(repetitions, batches)``."""
    kept = {
        name: [row["errors"] for key, row in cells.items() if key.startswith(order)]
        for order, name in (
            ("left_to_right", "left to right"),
            ("right_to_left", "right to left"),
            ("random", "random"),
        )
    }
    return {name: np.array(errors) for name, errors in kept.items() if errors}


def curve_gap(panel: Row, kind: str) -> float:
    """Largest difference between the online and the batch curve, mean or std."""
    a, b = (np.array(panel[f"{name}_{kind}"]) for name in ("online", "batch"))
    return float(np.abs(a - b).max())


def bounds_agree(cells: Cells) -> bool:
    """Whether bounds agree in every digit that is printed."""
    return all(
        number(panel["online_bound"]) == number(panel["batch_bound"])
        for cell in cells.values()
        for panel in cell["panels"]
    )

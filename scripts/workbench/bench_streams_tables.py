"""Tables of the hard streams: each against all data at once."""

from __future__ import annotations

from typing import NamedTuple

from workbench.pages import markdown, median
from workbench.results import Row

NAMES = ("bench", "case", "seed", "method")
STREAM, BATCH, EXACT, KEPT, CARE = METHODS = (
    "stream",
    "batch",
    "exact",
    "forget=1",
    "last update with care",
)

# What is asked of a stream.
SMALL_NEAR, SMALL_SHARE, SMALL_WORST = 1.10, 0.95, 1.5
KEPT_NEAR = 1.01
PERIOD_NEAR, PERIOD_STAYS = 1.15, 0.02
LABEL_POINTS = {"banana": 2.0, "digits": 1.0}
DEEP_NEAR = 1.15


class Pair(NamedTuple):
    """A stream and what it is compared with."""

    stream: Row
    reference: Row

    @property
    def ratio(self) -> float:
        """Of the errors."""
        return self.stream["RMSE"] / self.reference["RMSE"]

    @property
    def points(self) -> float:
        """Difference of the shares of wrong labels, in percentage points."""
        return 100 * (self.stream["error"] - self.reference["error"])


def pairs(rows: list[Row], bench: str, reference: str, method: str = STREAM) -> list:
    """Rows of a method with those of the reference, where both are there.

    A case that has no reference of its own has that of the name before its comma.
    """
    there = {(row["case"], row["seed"]): row for row in _of(rows, bench, reference)}
    result = []
    for row in _of(rows, bench, method):
        best = there.get((row["case"], row["seed"]))
        name, comma, _ = row["case"].partition(",")
        if best is None and comma:
            best = there.get((name, 0))
        if best is not None:
            result.append(Pair(row, best))
    return result


def _of(rows: list[Row], bench: str, method: str) -> list[Row]:
    return [row for row in rows if (row["bench"], row["method"]) == (bench, method)]


def _verdict(holds: bool) -> str:
    return "yes" if holds else "no"


def _failures(found: list[Pair]) -> int:
    return sum(bool(pair.stream.get("failure")) for pair in found)


def small_table(rows: list[Row]) -> list[Row]:
    """Shares of streams near their batch model: all of them, and by what they are."""
    found = pairs(rows, "small", BATCH)
    kept = {id(pair.stream): pair.ratio for pair in pairs(rows, "small", KEPT)}
    groups: dict[str, list[Pair]] = {"all": found}
    for pair in found:
        row = pair.stream
        names = [
            f"batches of {row['batch']}",
            f"inputs: {row['inputs']}",
            f"{row['arrival']} arrival",
        ]
        if row["first"] == 1:
            names.append("first batch of one point")
        for name in names:
            groups.setdefault(name, []).append(pair)
    names = ["all", *sorted(set(groups) - {"all"}, key=_natural)]
    lines = []
    for name in names if found else []:
        group = groups[name]
        ratios = [pair.ratio for pair in group]
        near = sum(ratio <= SMALL_NEAR for ratio in ratios) / len(group)
        holds = near >= SMALL_SHARE and max(ratios) <= SMALL_WORST
        stream, batch = (
            sum(each["cpu_seconds"] for each in side)
            for side in zip(*group, strict=True)
        )
        lines.append(
            {
                "streams": name,
                "number": len(group),
                f"share within {SMALL_NEAR:.2f}": f"{100 * near:.0f} %",
                "median RMSE / batch": median(ratios),
                "worst RMSE / batch": max(ratios),
                f"{SMALL_SHARE:.0%} within, none above {SMALL_WORST:g}": _verdict(
                    holds
                ),
                **_beside_kept([kept[id(p.stream)] for p in group if kept]),
                "CPU seconds a stream": stream / len(group),
                "CPU seconds a batch model": batch / len(group),
                "failures": _failures(group),
            }
        )
    return lines


def _beside_kept(ratios: list[float]) -> Row:
    """Errors relative to streams of which nothing is forgotten, if there are any."""
    if not ratios:
        return {}
    near = sum(ratio <= KEPT_NEAR for ratio in ratios)
    return {
        f"RMSE / forget=1, within {KEPT_NEAR:g}": f"{near} of {len(ratios)}",
        "worst RMSE / forget=1": max(ratios),
    }


def _natural(name: str) -> tuple[list[int], str]:
    """Batches of 2 before batches of 10."""
    numbers = [int(word) for word in name.split() if word.isdecimal()]
    return numbers, name


def ratio_table(rows: list[Row], bench: str, near: float) -> list[Row]:
    """One line a case: errors of streams over those of exact models."""
    found = pairs(rows, bench, EXACT)
    whole, careful = (pairs(rows, bench, EXACT, method) for method in (BATCH, CARE))
    lines = []
    for case in dict.fromkeys(pair.stream["case"] for pair in found):
        mine = [pair for pair in found if pair.stream["case"] == case]
        batch, care = (
            [pair.ratio for pair in others if pair.stream["case"] == case]
            for others in (whole, careful)
        )
        ratios = [pair.ratio for pair in mine]
        middle = median(ratios)
        line = {
            "stream": case,
            "seeds": len(mine),
            "RMSE of exact GP": median([p.reference["RMSE"] for p in mine]),
            "median RMSE / exact": middle,
            "worst RMSE / exact": max(ratios),
            f"median within {near:.2f}": _verdict(middle <= near),
            **({f"{CARE} / exact": median(care)} if care else {}),
            "one update / exact": median(batch) if batch else "–",
        }
        if "periods" in mine[0].stream:
            moved = max(_moved(pair.stream) for pair in mine)
            line["period moved by"] = f"{100 * moved:.2f} %"
            line["it stays"] = _verdict(moved <= PERIOD_STAYS)
        for name, side in (("stream", 0), ("exact", 1)):
            seconds = [pair[side]["cpu_seconds"] for pair in mine]
            line[f"CPU seconds, {name}"] = median(seconds)
        lines.append({**line, "failures": _failures(mine)})
    return lines


def _moved(row: Row) -> float:
    """The largest relative distance of a period from the true one."""
    both = zip(row["periods"], row["true_periods"], strict=True)
    return max(abs(period / true - 1) for period, true in both)


def label_table(rows: list[Row]) -> list[Row]:
    """One line an order: errors of streams beside that of all labels at once."""
    found = pairs(rows, "labels", BATCH)
    lines = []
    for case in dict.fromkeys(pair.stream["case"] for pair in found):
        mine = [pair for pair in found if pair.stream["case"] == case]
        points = [pair.points for pair in mine]
        limit = LABEL_POINTS[case.split(",")[0]]
        errors = [
            median([row["error"] for row in side]) for side in zip(*mine, strict=True)
        ]
        lines.append(
            {
                "stream": case,
                "seeds": len(mine),
                "error": f"{100 * errors[0]:.1f} %",
                "error of batch": f"{100 * errors[1]:.1f} %",
                "worst difference": f"{max(points):+.1f} points",
                "allowed": f"{limit:g}",
                "within": _verdict(max(points) <= limit),
                "CPU seconds": median([p.stream["cpu_seconds"] for p in mine]),
                "failures": _failures(mine),
            }
        )
    return lines


def tables(rows: list[Row]) -> dict[str, list[Row]]:
    """The lines of every table."""
    return {
        "small": small_table(rows),
        "periods": ratio_table(rows, "periods", PERIOD_NEAR),
        "labels": label_table(rows),
        "deep": ratio_table(rows, "deep", DEEP_NEAR),
    }


def sections(rows: list[Row]) -> dict[str, str]:
    """What the docs have to say about these streams, by place."""
    return {name: markdown(lines) for name, lines in tables(rows).items()}

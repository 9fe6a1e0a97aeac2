"""Tables of Bayesian optimisation: regret, cost and fantasies."""

from __future__ import annotations

import itertools
import math
import statistics

from workbench.pages import markdown
from workbench.results import Row

STREAMING, EXACT, RANDOM = "streaming", "exact", "random"
ORDER = ("regret", "fantasies", "cost", "versions")


def summary(rows: list[Row]) -> list[Row]:
    """Median regret of each method, and that against the exact model's."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["method"]), []).append(row)

    def middle(runs: list[Row], column: str = "regret") -> float:
        return statistics.median(row[column] for row in runs)

    lines = []
    for (problem, method), runs in groups.items():
        exact = groups.get((problem, EXACT), [])
        same = {row["seed"] for row in exact} == {row["seed"] for row in runs}
        lines.append(
            {
                "problem": problem,
                "method": method,
                "inducing": runs[0]["inducing"],
                "evaluations": runs[0]["evaluations"],
                "seeds": len(runs),
                "median_regret": middle(runs),
                "best": min(row["regret"] for row in runs),
                "worst": max(row["regret"] for row in runs),
                "to_exact": middle(runs) / middle(exact) if same else "",
                "seconds": middle(runs, "seconds"),
            }
        )
    return lines


def sections(rows: list[Row]) -> str:
    """The tables of a page, in Markdown."""
    parts = []
    for name in ORDER:
        found = [row for row in rows if row["table"] == name]
        if found:
            lines = summary(found) if name == "regret" else found
            parts.append(markdown(lines, hide=("table", "version", "seed")))
    return "\n\n".join(parts)


def crossing(rows: list[Row]) -> str:
    """From where on the exact model costs more, by lines between logarithms."""
    costs: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["table"] == "cost":
            size = int(row["case"].split()[0])
            costs.setdefault(row["method"], {})[size] = math.log(row["seconds"])
    if not costs:
        return ""
    ours, exact = costs["streaming"], costs["exact refit"]
    gaps = [(math.log(size), exact[size] - ours[size]) for size in sorted(ours)]
    for (before, a), (after, b) in itertools.pairwise(gaps):
        if a <= 0 < b:
            size = round(math.exp(before - a * (after - before) / (b - a)), -2)
            return f"The exact model costs more from about {size:.0f} evaluations on."
    return "The two do not cross between these sizes."

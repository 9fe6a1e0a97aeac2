"""The page on the experiments of the paper, written from their results.

Every number in it is computed from the files of ``scripts/reproduce.py``, and so is
every verdict. Cells and files may be missing; the page says which.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from workbench import contests, figures
from workbench.contest_page import (
    compare_measured,
    terrain_differences,
    terrain_measured,
    timeseries_differences,
)
from workbench.experiment_page import (
    alpha_differences,
    alpha_measured,
    banana_differences,
    banana_measured,
    equivalence_differences,
    equivalence_measured,
    hyperparameters_differences,
    hyperparameters_measured,
    memory_differences,
    memory_measured,
    toy_differences,
    toy_measured,
)
from workbench.experiment_results import Results
from workbench.experiments import EXPERIMENTS
from workbench.pages import listed, markdown, paragraphs, wrapped
from workbench.results import Row
from workbench.verdicts import Cells


class Section(NamedTuple):
    """What the page says about an experiment.

    Attributes:
        title: Its heading.
        claim: What the paper says.
        caption: How to read the picture.
        measured: Tables and sentences from the cells.
        differences: Where the cells differ from the claim, and why.
    """

    title: str
    claim: str
    caption: str
    measured: Callable[[Cells], str]
    differences: Callable[[Cells], str]


RACE = (
    "Dots are batches, stars the end of the stream; stars differ in size so that "
    "none hides another. The MLL axis is logarithmic in the distance to the best, so "
    "that small differences are visible."
)
SECTIONS = {
    "toy": Section(
        "Online regression on a toy series",
        "Updated batch by batch, the model follows new data, keeps what it knew "
        "about old data, and ends close to batch inference. This holds for data in "
        "order and shuffled, for the variational bound (VFE, α = 0) and for "
        "Power-EP (α = 0.5).",
        "New data are black, earlier data grey; the line and the band show the mean "
        "and two standard deviations of the targets; ticks mark the inducing points.",
        toy_measured,
        toy_differences,
    ),
    "alpha": Section(
        "The power of Power-EP",
        "As data arrive, small α predicts best, with VFE among the best. With large "
        "α inducing points clump, and the summary holds less information.",
        "Left: bands are one standard error; the axis is logarithmic in the "
        "distance to the best, so that small differences are visible. Right: gaps "
        "between neighbouring inducing points at the end, all splits together.",
        alpha_measured,
        alpha_differences,
    ),
    "hyperparameters": Section(
        "Learning hyperparameters online",
        "The lengthscale of series drawn from GPs is learned well online. With few "
        "inducing points it is biased. With more, the trace follows that of the "
        "full GP.",
        "Bands are one standard deviation over draws; scale and noise are known.",
        hyperparameters_measured,
        hyperparameters_differences,
    ),
    "timeseries": Section(
        "Time series: accuracy against running time",
        "On both time series the streaming model is on the frontier: no method is as "
        "accurate in less time.",
        RACE,
        compare_measured,
        timeseries_differences,
    ),
    "terrain": Section(
        "Terrain: accuracy against running time",
        "In two dimensions the streaming model has a lower RMSE than a GP or a sparse "
        "GP on a window, but not a higher log-likelihood.",
        RACE,
        terrain_measured,
        terrain_differences,
    ),
    "memory": Section(
        "Memory",
        "For its accuracy, the streaming model needs no more memory than windowed "
        "models.",
        "One point for each method, and the peak of every batch.",
        memory_measured,
        memory_differences,
    ),
    "banana": Section(
        "Classification",
        "In order or shuffled, decision boundaries come close to those of the batch "
        "model. From left to right, from right to left and in random order, the error "
        "at the end is about the same.",
        "The line is where both classes are equally likely; new data are bright, "
        "earlier data pale.",
        banana_measured,
        banana_differences,
    ),
    "equivalence": Section(
        "Equivalence with batch inference",
        "With hyperparameters and inducing points fixed, streaming is batch VFE; with "
        "inducing points at the data, it is the exact GP.",
        "Thick lines are batch inference, dashed lines the stream on top of them: "
        "means and two standard deviations of the function.",
        equivalence_measured,
        equivalence_differences,
    ),
}

INTRODUCTION = """\
# The paper, reproduced

The experiments of "Streaming Sparse Gaussian Process Approximations" (Bui, Nguyen and
Turner, 2017): what the paper claims, what we measured, where we differ and why. Every
number and every verdict below is computed from the JSON files in `{folder}/`.

```sh
python scripts/reproduce.py all --out DIR     # runs everything
python scripts/reproduce.py report --out DIR  # writes this page
```

RMSE is the root mean squared error, MLL the mean log density of test targets with their
noise, both in units of the scaled targets. During a stream they are computed on up to
{max_test:,} test points in the range seen so far, at the end on all test points.
Seconds are CPU time on one thread, for training and testing on all batches so far. All
methods have the same kernel. Batch SGPR starts with all data. The others start from the
same search on the first batch, and carry over what they learned from batch to batch:

- streaming: this library with its default policy and its default memory, which is finer
  than the model; "from memory" are predictions from all points of that memory;
- streaming, last batch with care: the same, but it always learns from the last batch,
  with more steps, of L-BFGS ([why](guides/points.md));
- the paper's form: this library as the paper has it. The past is kept at the inducing
  points themselves, each batch keeps its own noise, every batch is learned from, and
  nothing is forgotten. It counts as a baseline;
- windowed GP: an exact GP on the last points;
- windowed SGPR: collapsed sparse regression on the last points, with the same code;
- SVI: stochastic variational inference at learning rates {rates}; tables show the rate
  with the lowest RMSE at the end. Its inducing points start out spread over the range
  of the whole stream, which gives it a head start;
- online conditioning: GPyTorch's `get_fantasy_model`, with hyperparameters from the
  first batch and two fixes, without which it is far worse: q is optimal, and
  predictions use the mean from conditioning (see `scripts/workbench/uncollapsed.py`);
- batch SGPR: all data at once; what streams are measured against.

Their budgets:

{budgets}"""

BUDGET_LINES = {
    "steps": "Adam steps per batch: streaming, the paper's form, windowed SGPR; first "
    "batch of online conditioning",
    "last_steps": "L-BFGS steps of the last batch: streaming, last batch with care",
    "gp_first_steps": "L-BFGS steps, first batch: windowed GP",
    "gp_steps": "L-BFGS steps per later batch: windowed GP",
    "svi_steps": "Adam steps per batch: SVI",
    "batch_first_steps": "Adam steps in all: batch SGPR",
    "batch_steps": "L-BFGS steps after them: batch SGPR",
    "gp_window": "points: windowed GP",
    "sgpr_window": "points: windowed SGPR",
    "max_points": "points: online conditioning",
}


def load(out: Path) -> dict[str, Results]:
    """The files in a folder, by experiment."""
    every = {name: Results(name, out) for name in EXPERIMENTS}
    return {name: results for name, results in every.items() if results.conditions}


def budget_table(found: dict[str, Results]) -> str:
    """What each method may do, by experiment; as it was run, if it was."""
    budgets: dict[str, Row] = {
        name: found[name].conditions["budget"] if name in found else budget._asdict()
        for name, budget in contests.BUDGETS.items()
    }
    rows = [
        {
            "at most": title,
            **{
                # Files of older runs do not have all of them.
                name: f"{budget[field]:,}" if budget.get(field) else "–"
                for name, budget in budgets.items()
            },
        }
        for field, title in BUDGET_LINES.items()
    ]
    return markdown(rows)


def version_sentence(found: dict[str, Results]) -> str:
    """Which versions of the library made the files."""
    versions = sorted({each for results in found.values() for each in results.versions})
    return f"Made with torch_ssgp {listed(versions)}." if versions else ""


def time_sentence(found: dict[str, Results]) -> str:
    """How long it took, if all cells know."""
    minutes = {
        name: sum(row.get("took", math.nan) for row in results.cells.values()) / 60
        for name, results in found.items()
    }
    total = sum(minutes.values())
    if not minutes or math.isnan(total):
        return ""
    parts = [f"{name} {part:,.1f}" for name, part in minutes.items()]
    return f"CPU minutes: {listed(parts)}; {total:,.1f} in all."


def introduction(folder: str, found: dict[str, Results]) -> str:
    """How all of it was made."""
    max_test = inspect.signature(contests.trace).parameters["max_test"].default
    quick = [name for name, results in found.items() if results.quick]
    absent = [name for name in EXPERIMENTS if name not in found]
    return paragraphs(
        INTRODUCTION.format(
            folder=folder,
            max_test=max_test,
            rates=listed([f"{rate:g}" for rate in contests.RATES]),
            budgets=budget_table(found),
        ),
        version_sentence(found),
        time_sentence(found),
        "**Tiny versions** (`--quick`), whose numbers only show that everything "
        f"runs: {listed(quick)}."
        if quick
        else "",
        f"**Not run**: {listed(absent)}." if absent else "",
    )


def section(name: str, folder: str, results: Results) -> str:
    """What the page says about one experiment."""
    title, claim, caption, measured, differences = SECTIONS[name]
    missing = results.missing()
    some = ", ".join(f"`{key}`" for key in missing[:5])
    head = paragraphs(f"## {title}", f"**The paper.** {claim}")
    others = " and others" if missing[5:] else ""
    note = f"Not run, {len(missing)} cells: {some}{others}." if missing else ""
    if not results.cells:
        return paragraphs(head, note)
    reasons = differences(results.cells)
    return paragraphs(
        head,
        f"![{title}]({folder}/{name}.png)",
        f"**Measured.** {caption}",
        measured(results.cells),
        note,
        f"**Where we differ and why.**\n\n{reasons}" if reasons else "",
    )


def page(out: Path) -> str:
    """The page on the files in ``out``, as Markdown."""
    found, folder = load(out), out.resolve().name
    sections = [section(name, folder, results) for name, results in found.items()]
    return wrapped(paragraphs(introduction(folder, found), *sections))


def report(out: Path) -> Path:
    """Write the page beside the folder of results; draw pictures that are missing.

    Args:
        out: The folder; ``docs/reproduction`` gives ``docs/reproduction.md``.

    Returns:
        Where the page is.
    """
    if not out.is_dir():
        raise SystemExit(f"There is no folder {out}. Run experiments with --out first.")
    for name, results in load(out).items():
        picture = out / f"{name}.png"
        if not picture.exists():
            figures.draw(name, results.cells, picture)
    path = out.resolve().with_name(out.resolve().name + ".md")
    path.write_text(page(out), encoding="utf-8")
    return path

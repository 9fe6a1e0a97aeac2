"""What the page says about contests: accuracy against running time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.cells import Settings
from workbench.experiments import EXPERIMENTS
from workbench.pages import bullets, listed, markdown, paragraphs, reach
from workbench.results import Row
from workbench.verdicts import (
    BATCH,
    CARE,
    CARE_FROM_MEMORY,
    FROM_MEMORY,
    MARGIN,
    OURS,
    PAPER,
    RATIO,
    SCORES,
    WINDOWED,
    Cells,
    Contests,
    beats_windows,
    beside_batch,
    contests,
    dominators,
    gap,
    is_svi,
    merit,
    number,
    shown,
    stream_forms,
    with_methods,
)

SAME = 0.01  # difference of errors, relative to them, of what ends in one place


def share(flags: Sequence[bool]) -> str:
    """In how many settings something holds."""
    return f"in {sum(flags)} of {len(flags)} settings"


def bold(method: str) -> str:
    """Ours stands out."""
    return f"**{method}**" if method == OURS else method


def ending(row: Row) -> str:
    """How a method stopped, where not as planned."""
    if row["failures"]:
        first = row["failures"][0].splitlines()[0].replace("|", "/")
        more = len(row["failures"]) - 1
        return first + (f" (and {more} more)" if more else "")
    return "at its budget of steps" if row.get("converged") is False else ""


def score_table(contest: Cells, batch: Row | None) -> str:
    """What each method ends with."""
    rows = []
    for method, row in contest.items():
        ratio, difference = gap(row, batch)
        rows.append(
            {
                "method": bold(method),
                "RMSE": number(row["RMSE"], ".4g"),
                "MLL": number(row["MLL"]),
                "seconds": number(row["seconds"], ",.1f"),
                "RMSE / batch": number(ratio, ".4g"),
                "MLL − batch": number(difference, "+.3f"),
                "stopped": ending(row),
            }
        )
    return markdown(rows)


def score_tables(every: Contests) -> str:
    """What each method ends with, setting by setting."""
    parts = []
    for setting, contest in every.items():
        batch = contest.get(BATCH)
        parts += [f"*{setting}*", score_table(shown(contest), batch)]
        rates = {method: row for method, row in contest.items() if is_svi(method)}
        if len(rates) > 1:
            parts += ["<details><summary>All rates of SVI</summary>"]
            parts += [score_table(rates, batch), "</details>"]
    return paragraphs(*parts)


def verdict_table(every: Contests) -> str:
    """Ours and the paper's form against the batch model; ours and the frontier."""
    rows = []
    for setting, contest in with_methods(every, OURS).items():
        to_batch = gap(contest[OURS], contest.get(BATCH))
        missed = to_batch.ratio - RATIO, -MARGIN - to_batch.difference
        marks = [
            "" if math.isnan(by) else ", met" if by <= 0 else f", missed by {by:.3f}"
            for by in missed
        ]
        row = {
            "setting": str(setting),
            f"RMSE ≤ {RATIO:g} x batch": number(to_batch.ratio, ".3f") + marks[0],
            f"MLL ≥ batch − {MARGIN:g}": number(to_batch.difference, "+.3f") + marks[1],
            f"{PAPER}, RMSE / batch": _ratio(contest.get(PAPER), contest.get(BATCH)),
        }
        for score in SCORES:
            winners = dominators(contest, score)
            behind = f"behind {listed(winners)}" if winners else "on it"
            row[f"frontier of {score}"] = behind
        rows.append(row)
    return markdown(rows)


def _ratio(row: Row | None, batch: Row | None) -> str:
    """RMSE / batch, or a dash where one of them was not run."""
    return number(math.nan if row is None else gap(row, batch).ratio, ".3f")


def frontier_sentence(every: Contests) -> str:
    """Who is both faster and better than ours, if anybody."""
    ran = with_methods(every, OURS)
    if not ran:
        return "Our method was not run."
    beaten = {
        (method, score): [method in dominators(c, score) for c in ran.values()]
        for score in SCORES
        for contest in ran.values()
        for method in dominators(contest, score)
    }
    if not beaten:
        return (
            "No baseline is both faster and more accurate than ours in the end, "
            "neither by RMSE nor by MLL, in any setting."
        )
    parts = [f"{m} by {score} {share(flags)}" for (m, score), flags in beaten.items()]
    return f"Both faster and more accurate than ours in the end: {listed(parts)}."


def batch_sentence(every: Contests) -> str:
    """How near the batch model is, and what it costs."""
    ran = with_methods(every, OURS, BATCH).values()
    if not ran:
        return ""
    near = [gap(contest[OURS], contest[BATCH]).near for contest in ran]
    faster = [contest[BATCH]["seconds"] < contest[OURS]["seconds"] for contest in ran]
    ahead = [
        is_faster and contest[BATCH]["RMSE"] < contest[OURS]["RMSE"]
        for is_faster, contest in zip(faster, ran, strict=True)
    ]
    budget = [contest[BATCH]["converged"] is False for contest in ran]
    text = (
        f"Ours ends with at most {RATIO:g} times the RMSE of batch SGPR "
        f"{share([rmse for rmse, _ in near])}, and with an MLL at most {MARGIN:g} "
        f"below it {share([mll for _, mll in near])}. Trained once, after the last "
        f"datum, batch SGPR takes less time than the whole stream {share(faster)}, "
        f"and has a lower RMSE as well {share(ahead)}. It is not counted above, "
        "because it cannot predict before the last datum."
    )
    if any(budget):
        text += (
            f" It used up its budget of steps {share(budget)}; with more steps it may "
            "end somewhat better there."
        )
    return text


def paper_sentence(every: Contests) -> str:
    """Ours beside the paper's form: both against the batch model, and each other."""
    ran = with_methods(every, OURS, PAPER, BATCH).values()
    if not ran:
        return ""
    ratios = {
        form: reach(
            [gap(contest[form], contest[BATCH]).ratio for contest in ran], ".3g"
        )
        for form in (OURS, PAPER)
    }
    lower, higher = (
        [merit(c[OURS], score) > merit(c[PAPER], score) for c in ran]
        for score in SCORES
    )
    return (
        f"RMSE / batch is {ratios[OURS]} for ours and {ratios[PAPER]} for {PAPER}. "
        f"Against {PAPER}, ours has a lower RMSE {share(lower)}, and a higher MLL "
        f"{share(higher)}."
    )


def form_table(every: Contests) -> str:
    """RMSE / batch of every form of streaming, a line per setting."""
    rows = [
        {
            "data": setting.data,
            "M": str(setting.num_inducing),
            "batches of": f"{setting.batch:,}",
            **{
                form: _ratio(row, contest.get(BATCH))
                for form, row in stream_forms(contest).items()
            },
        }
        for setting, contest in every.items()
    ]
    return markdown(rows)


def form_sentence(every: Contests) -> str:
    """In how many settings each form of streaming is near the batch model."""
    parts = [
        f"{form} {share([each.near[0] for _, each in found.values()])}"
        for form, found in beside_batch(every).items()
        if found
    ]
    if not parts:
        return ""
    return f"At most {RATIO:g} times the RMSE of batch SGPR: {'; '.join(parts)}."


def compare_measured(cells: Cells) -> str:
    """Tables and verdicts of a comparison."""
    every = contests(cells)
    if not every:
        return ""
    return paragraphs(
        "How ours compares:",
        verdict_table(every),
        frontier_sentence(every),
        batch_sentence(every),
        paper_sentence(every),
        "RMSE / batch SGPR of the same M, for every form of streaming:",
        form_table(every),
        form_sentence(every),
        "Final results of each method:",
        score_tables(every),
    )


def compare_reasons(every: Contests) -> list[str]:
    """Reasons that hold in one and two dimensions, each where it applies."""
    windows = with_methods(every, OURS, *WINDOWED).values()
    ratios = [gap(c[m], c[OURS]).ratio for c in windows for m in WINDOWED]
    online = with_methods(every, "online conditioning").values()
    stopped = [bool(contest["online conditioning"]["failures"]) for contest in online]
    without_svi = [m for m in sorted({s.num_inducing for s in every}) if _no_svi(m)]
    reasons = [_shortfall(every), _no_ceiling(every), _below_noise(every)]
    if ratios and min(ratios) > 1:
        reasons.append(
            "The test set at the end covers the whole stream, and windowed models have "
            f"forgotten what left the window: their RMSE is {min(ratios):.3g} to "
            f"{max(ratios):.3g} times ours."
        )
    if any(stopped):
        reasons.append(
            "Online conditioning, which is not in the paper, keeps every point after "
            f"the first batch. It stopped early {share(stopped)}, and after that "
            "predicts from what it had learned."
        )
    if without_svi:
        reasons.append(f"SVI was not run with M={listed(without_svi)}, to save time.")
    return reasons


def _shortfall(every: Contests) -> str:
    """Where ours misses a limit, and what meets both limits there."""
    found = beside_batch(every)
    missed = {s: not all(each.near) for s, (_, each) in found[OURS].items()}
    if not any(missed.values()):
        return ""
    text = (
        f"Ours falls short of batch SGPR, in RMSE or MLL, {share([*missed.values()])}. "
        "Batch SGPR moves all inducing points with all data available. A stream "
        "chooses points as data arrive, and cannot recover what its memory dropped."
    )
    remedies = {
        "with predictions from memory": found[FROM_MEMORY],
        "with a careful last batch": found[CARE],
        "with both": found[CARE_FROM_MEMORY],
    }
    met = {
        remedy: [all(each.near) for s, (_, each) in rows.items() if missed.get(s)]
        for remedy, rows in remedies.items()
    }
    parts = [f"{remedy} {share(flags)}" for remedy, flags in met.items() if flags]
    if not parts:
        return f"{text} We attribute the difference to this."
    return f"{text} Of these settings, ours meets both limits {listed(parts)}."


def _no_ceiling(every: Contests) -> str:
    """Where the batch model is worse than a stream."""
    found = beside_batch(every)
    beyond = {s: each.beyond for s, (_, each) in found[OURS].items()}
    if not any(beyond.values()):
        return ""
    text = (
        f"Batch SGPR is no ceiling {share([*beyond.values()])}: there its RMSE is more "
        f"than {RATIO:g} times ours, and its MLL more than {MARGIN:g} below ours. It "
        "is trained from one start and may end in a poor optimum; we did not try "
        "others."
    )
    same = [
        abs(each.ratio - 1) < SAME
        for s, (_, each) in found[CARE].items()
        if beyond.get(s)
    ]
    if any(same):
        text += (
            " L-BFGS leads there even from the end of ours: with a careful last batch, "
            f"ours ends with the RMSE of batch SGPR {share(same)}."
        )
    return text


def _below_noise(every: Contests) -> str:
    """Where an RMSE misses its limit and hardly matters."""
    flags = {
        form: [
            row["RMSE"] < 0.1 * row["hyperparameters"]["noise"] ** 0.5
            and not each.near[0]
            for row, each in found.values()
        ]
        for form, found in beside_batch(every).items()
    }
    parts = [f"{form} {share(each)}" for form, each in flags.items() if any(each)]
    if not parts:
        return ""
    return (
        "The RMSE misses the limit but is less than a tenth of the noise that the "
        f"model assumes: {'; '.join(parts)}. GPyTorch sets a lower limit for that "
        "noise, and errors so far below it hardly change the bound."
    )


def _no_svi(num_inducing: int) -> bool:
    """Whether SVI is not meant to run with so many points."""
    planned = [
        cell.key
        for name in ("timeseries", "terrain")
        for quick in (False, True)
        for cell in EXPERIMENTS[name](Settings(quick))
    ]
    return not any(f"; M={num_inducing};" in key for key in planned if "; SVI" in key)


def timeseries_differences(cells: Cells) -> str:
    """Time series: agreement and reasons."""
    every = contests(cells)
    ours, paper = (
        [
            not any(dominators(contest, score, form) for score in SCORES)
            for contest in with_methods(every, form).values()
        ]
        for form in (OURS, PAPER)
    )
    verdict = (
        "The claim holds: ours is on the frontier in every setting."
        if all(ours)
        else "The claim does not hold in every setting: see the last columns of the "
        "first table."
    )
    among = (
        f"Without ours, {PAPER} is on the frontier of both scores {share(paper)}."
        if paper
        else ""
    )
    return bullets(
        verdict if ours else "",
        among,
        *compare_reasons(every),
        "Each setting was run once. Once inducing points are used up, rounding "
        "errors in the targets decide which ones a stream keeps, and so affect the "
        "final result. The table of the default memory in "
        "[benchmarks](benchmarks.md#memory) shows the range over several runs.",
        "The audio signal is not the paper's. Seconds come from another machine and "
        "other code, so only their order can be compared.",
    )


def windowed_table(every: Contests) -> str:
    """Ours against both windowed models."""
    rows = []
    for setting, contest in with_methods(every, OURS).items():
        row = {"setting": str(setting)}
        for method in WINDOWED:
            ratio, difference = gap(contest[OURS], contest.get(method))
            row[f"RMSE / {method}"] = number(ratio, ".4g")
            row[f"MLL − {method}"] = number(difference, "+.3f")
        rows.append(row)
    return markdown(rows)


def terrain_measured(cells: Cells) -> str:
    """Tables and verdicts, and ours against the windowed models."""
    every = contests(cells)
    lower, higher = (beats_windows(every, score) for score in SCORES)
    if not lower:
        return compare_measured(cells)
    return paragraphs(
        compare_measured(cells),
        "Ours against the windowed models. Ours is better if the RMSE ratio is "
        "below 1 and the MLL difference above 0:",
        windowed_table(every),
        f"Ours has a lower RMSE than both windowed models {share(lower)}, and a higher "
        f"MLL than both {share(higher)}.",
    )


def _paper_claim(every: Contests) -> str:
    """The claim on the terrain, for the form that the paper makes it of."""
    lower, higher = (beats_windows(every, score, PAPER) for score in SCORES)
    if not lower:
        return ""
    agrees = all(lower) and not any(higher)
    return (
        f"{'As' if agrees else 'Not as'} in the paper, {PAPER} has a lower RMSE than "
        f"both windowed models {share(lower)}, and a higher MLL than both "
        f"{share(higher)}."
    )


def terrain_differences(cells: Cells) -> str:
    """Terrain: agreement and reasons."""
    every = contests(cells)
    higher = beats_windows(every, "MLL")
    if not higher:
        verdict = ""
    elif all(higher):
        verdict = (
            "The paper's model was behind the windowed models in MLL; ours is ahead. "
            "Ours has a memory finer than the model, and all data share one noise, so "
            "the noise level of early batches can be revised. Every update chooses "
            "inducing points again among old ones and new data, by their value for "
            "the bound, and each input has its own lengthscale. The last two hold for "
            f"{PAPER} as we run it, too. We did not separate their effects."
        )
    else:
        verdict = (
            "As in the paper, ours does not beat the windowed models in MLL "
            "everywhere. They follow their window closely. Outside it they predict "
            "the prior, which is wide and so costs little. Ours has the same "
            "inducing points for everything it has seen. We did not test this "
            "explanation."
        )
    same = any("OS" in setting.data for setting in every)
    return bullets(
        _paper_claim(every),
        verdict,
        *compare_reasons(every),
        ""
        if same
        else "The terrain is matplotlib's sample, not the paper's. With `--data-dir`, "
        "a tile of OS Terrain 50 replaces it.",
    )

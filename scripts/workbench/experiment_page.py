"""What the page says about the experiments that are no contests."""

from __future__ import annotations

import math

import numpy as np

from workbench.contest_page import bold
from workbench.pages import bullets, listed, markdown, paragraphs
from workbench.results import Row
from workbench.verdicts import (
    ALIKE,
    CLOSE,
    FLAT,
    MARGIN,
    OURS,
    RATIO,
    SCORES,
    Cells,
    Estimate,
    Splits,
    alpha_forms,
    banana_errors,
    bias,
    bounds_agree,
    change,
    clumped,
    curve_gap,
    falls,
    flatness,
    gap,
    gaps,
    learned,
    number,
    over,
    paper_forms,
    spread,
    stream_mll,
    within_full,
)

SMALL = 0.1  # α up to this is small


def toy_measured(cells: Cells) -> str:
    """Ends of all four streams beside batch SGPR."""
    rows = [
        {
            "stream": name.replace("alpha", "α ="),
            **{score: number(row[score]) for score in SCORES},
            **{f"batch {score}": number(row["batch"][score]) for score in SCORES},
        }
        for name, row in sorted(cells.items())
    ]
    to_batch = [gap(row, row["batch"]) for row in cells.values()]
    ratio = number(max(each.ratio for each in to_batch), ".3f")
    difference = number(min(each.difference for each in to_batch), "+.4f")
    return paragraphs(
        "Against batch SGPR with the same budget of inducing points:",
        markdown(rows),
        f"In the worst case, a stream ends with {ratio} times its RMSE, and with an "
        f"MLL that differs by {difference}.",
    )


def toy_differences(cells: Cells) -> str:
    """Toy: whether all streams are near the batch model."""
    far = [
        name.replace("alpha", "α =")
        for name, row in sorted(cells.items())
        if not all(gap(row, row["batch"]).near)
    ]
    return bullets(
        f"More than {RATIO:g} times the RMSE of the batch model, or {MARGIN:g} below "
        f"its MLL: {'; '.join(far)}."
        if far
        else "We agree: in order or shuffled, every stream ends near the batch model.",
        "The series is a draw from a GP, not the paper's. The library itself decides "
        "how many of the allowed inducing points it uses.",
    )


def alpha_measured(cells: Cells) -> str:
    """Scores and gaps by alpha, over splits."""
    rows = [
        {
            "α": form,
            "splits": str(len(splits)),
            "MLL over the stream": str(over(splits, stream_mll)),
            "MLL at the end": str(over(splits, lambda row: row["MLL"])),
            "RMSE at the end": over(splits, lambda row: row["RMSE"]).text(".4f"),
            "mean / smallest gap": f"{np.exp(over(splits, log_gaps).mean):.3g}",
            f"gaps < {CLOSE:g} x mean": f"{over(splits, clumped).mean:.1%}",
        }
        for form, splits in alpha_forms(cells).items()
    ]
    return paragraphs(
        "Mean ± standard error over random halves of the series. The MLL over the "
        "stream is its mean over batches; gaps are those between neighbouring "
        "inducing points at the end. All rows are the paper's form: the past is kept "
        "at the inducing points themselves (`memory_size=num_inducing`), every batch "
        "is learned from, and nothing is forgotten. In rows with only a number each "
        "batch keeps its own noise. In the last row all data share one noise, the "
        "default here.",
        markdown(rows),
        order_sentence(paper_forms(cells)),
        clump_sentence(paper_forms(cells)),
    )


def log_gaps(row: Row) -> float:
    """Logarithm of the mean gap over the smallest one."""
    apart = gaps(row)
    return float(np.log(apart.mean() / max(apart.min(), 1e-12)))


def order_sentence(forms: dict[str, Splits]) -> str:
    """Whether small alpha is best over the stream, and how sure that is."""
    if "0" not in forms or len(forms) < 2:
        return ""
    means = {form: over(splits, stream_mll).mean for form, splits in forms.items()}
    changes = {
        form: change(splits, forms["0"], stream_mll)
        for form, splits in forms.items()
        if form != "0"
    }
    order = "falls with α" if falls(list(means.values())) else "is not monotone in α"
    text = (
        f"Averaged over the stream, the MLL {order}; it is highest at α = "
        f"{max(means, key=means.get)}. Against α = 0 on the same splits it changes by "
        f"{listed([f'{value} at {form}' for form, value in changes.items()])}."
    )
    if all(math.isnan(value.error) for value in changes.values()):
        return f"{text} One split says nothing about how sure that is."
    lower = [form for form, v in changes.items() if v.clear and v.mean < 0]
    higher = [form for form, v in changes.items() if v.clear and v.mean > 0]
    clear = [
        f"{word} at α = {listed(found)}"
        for found, word in ((lower, "lower"), (higher, "higher"))
        if found
    ]
    return (
        f"{text} By Student's t at 95 % it is {listed(clear)}."
        if clear
        else f"{text} None of this is clear by Student's t at 95 %."
    )


def clump_sentence(forms: dict[str, Splits]) -> str:
    """Whether inducing points clump for large alpha."""
    if len(forms) < 2:
        return ""
    small, large = list(forms)[0], list(forms)[-1]
    more = change(forms[large], forms[small], clumped)
    verdict = (
        "more inducing points are in clumps"
        if more.mean > 0 and more.clear
        else "fewer inducing points are in clumps"
        if more.mean < 0 and more.clear
        else "there is no clear difference in clumps of inducing points"
    )
    shares = [f"{over(forms[form], clumped).mean:.1%}" for form in (large, small)]
    return (
        f"At α = {large}, {verdict}: {shares[0]} of gaps are below {CLOSE:g} of the "
        f"mean gap, {shares[1]} at α = {small}."
    )


def alpha_differences(cells: Cells) -> str:
    """Alpha: the order of the paper, and what shared noise changes."""
    forms = paper_forms(cells)
    shared = alpha_forms(cells).get("0, shared noise")
    return bullets(
        _order_verdict(forms),
        _exact_vfe(forms),
        _shared_noise(shared, forms["0"]) if shared and "0" in forms else "",
        _no_clumps(forms),
    )


def _order_verdict(forms: dict[str, Splits]) -> str:
    """The best small alpha against alpha 1, which is where the paper's order ends."""
    small = {form: splits for form, splits in forms.items() if float(form) <= SMALL}
    if not small or "1" not in forms:
        return ""
    best = max(small, key=lambda form: over(small[form], stream_mll).mean)
    lead = change(small[best], forms["1"], stream_mll)
    compared = f"α = {best}, the best of those up to {SMALL:g}, is {_beside(lead)}"
    if not lead.clear:
        return f"The order of the paper is neither reproduced nor refuted: {compared}."
    if lead.mean > 0:
        return f"As in the paper, small α is better than large: {compared}."
    return f"Not as in the paper: {compared}."


def _exact_vfe(forms: dict[str, Splits]) -> str:
    """Alpha 0 on its own: it need not be like a small alpha."""
    if "0" not in forms or "1" not in forms:
        return ""
    lead = change(forms["0"], forms["1"], stream_mll)
    means = {form: over(splits, stream_mll).mean for form, splits in forms.items()}
    place = sorted(means, key=means.get, reverse=True).index("0") + 1
    return (
        f"VFE itself, α = 0, is number {place} of {len(forms)} over the stream, and "
        f"{_beside(lead)}."
    )


def _beside(lead: Estimate) -> str:
    """A lead over alpha 1 in words."""
    where = "below" if lead.mean < 0 else "above"
    size = lead._replace(mean=abs(lead.mean))
    sure = "" if lead.clear else ", which is not clear by Student's t at 95 %"
    return f"{size} {where} α = 1 on the same splits{sure}"


def _no_clumps(forms: dict[str, Splits]) -> str:
    """Why inducing points keep their distance, where they do."""
    if any(over(splits, clumped).mean > 0.01 for splits in forms.values()):
        return ""
    return (
        "No clumps at any α: inducing points start from a greedy choice among old "
        "points and new data, and points too close to be told apart are merged."
    )


def _shared_noise(shared: Splits, paper: Splits) -> str:
    """What one noise for all data changes at alpha 0."""
    gain = change(shared, paper, lambda row: row["MLL"])
    if not gain.clear:
        return ""
    if gain.mean < 0:
        return f"One noise shared by all data changes the MLL at the end by {gain}."
    highest = over(paper, lambda row: max(step["MLL"] for step in row["trace"]))
    size = max(len(row["z"]) for row in paper.values())
    return (
        f"In the paper's form each batch keeps its original noise. Once {size} "
        "inducing points are too few, the noise has to explain what they cannot "
        "follow, but the noise of past batches is fixed. At α = 0 the MLL falls from "
        f"{number(highest.mean, '.2f')}, where it is highest, to "
        f"{number(over(paper, lambda row: row['MLL']).mean, '.2f')} at the end. With "
        f"one noise shared by all data it is {gain} higher at the end."
    )


def hyperparameters_measured(cells: Cells) -> str:
    """Learned - true at the end."""
    rows, sentences = [], []
    for true, group in learned(cells).items():
        full = group.get(None)
        good: dict[bool, list[int]] = {True: [], False: []}
        for m, errors in group.items():
            row = {
                "lengthscale": f"{true:g}",
                "M": str(m) if m else "full GP",
                "draws": str(len(errors)),
                "learned − true": number(errors[:, -1].mean(), "+.4f"),
                "std": number(spread(errors[:, -1])),
                "mean − full GP's": "–",
                "within its std": "–",
            }
            if m and full is not None:
                within = within_full(errors, full)
                good[within].append(m)
                row["mean − full GP's"] = number(bias(errors, full), "+.4f")
                row["within its std"] = "yes" if within else "no"
            rows.append(row)
        if full is not None and (good[True] or good[False]):
            sentences.append(
                f"With lengthscale {true:g}, the mean is within the spread of the full "
                f"GP's for {_sizes(good[True])}, and not for {_sizes(good[False])}."
            )
    return paragraphs(
        "After the last batch, over draws of the series:",
        markdown(rows),
        " ".join(sentences),
    )


def _sizes(sizes: list[int]) -> str:
    return f"M={listed(sizes)}" if sizes else "no M"


def hyperparameters_differences(cells: Cells) -> str:
    """Hyperparameters: whether the bias goes away."""
    lines, smoother = [], []
    for true, group in learned(cells).items():
        full, sizes = group.get(None), [m for m in group if m]
        if full is None or len(sizes) < 2:
            continue
        few, many = (bias(group[m], full) for m in (sizes[0], sizes[-1]))
        smoother.append(few > 0 and not within_full(group[sizes[0]], full))
        lines.append(
            f"Lengthscale {true:g}: "
            + ("as in the paper, " if abs(many) < abs(few) else "not as in the paper, ")
            + f"the mean is {number(abs(few))} from the full GP's at M={sizes[0]} and "
            f"{number(abs(many))} at M={sizes[-1]}."
        )
    if smoother and all(smoother):
        lines.append(
            "With few points the bias is towards long lengthscales, because the "
            "model cannot follow anything less smooth."
        )
    return bullets(*lines)


def memory_measured(cells: Cells) -> str:
    """Peaks, accuracy, flatness."""
    rows = [
        {
            "method": bold(method),
            "peak MiB": number(row["peak_MiB"], ",.0f"),
            **{score: number(row[score]) for score in SCORES},
            "second half / first half": number(flatness(row), ".3f"),
        }
        for method, row in sorted(cells.items())
    ]
    return paragraphs(
        "Peak resident memory above the level before the run, with each method in a "
        "separate process. The last column is the median peak in the second half of "
        "the stream divided by that in the first half. It leaves out the first two "
        "batches, in which inducing points are added.",
        markdown(rows),
        memory_sentence(cells),
    )


def memory_sentence(cells: Cells) -> str:
    """Whether ours needs no more memory at no more error, and stays flat."""
    others = {m: row for m, row in sorted(cells.items()) if m != OURS}
    if OURS not in cells or not others:
        return ""
    ours = cells[OURS]
    parts = [
        f"{ours['peak_MiB'] / row['peak_MiB']:.2f} times the peak of {method} at "
        f"{gap(ours, row).ratio:.3f} times its RMSE"
        for method, row in others.items()
    ]
    better = [
        method
        for method, row in others.items()
        if row["peak_MiB"] < ours["peak_MiB"] or row["RMSE"] < ours["RMSE"]
    ]
    verdict = (
        f"{listed(better)} has less memory or a lower error"
        if better
        else "no baseline has less memory or a lower error"
    )
    growth = flatness(ours)
    flat = (
        ""
        if math.isnan(growth)
        else f" Over the stream it is {'flat' if growth <= FLAT else 'not flat'}."
    )
    return f"Ours has {listed(parts)}; {verdict}.{flat}"


def memory_differences(cells: Cells) -> str:
    """Memory: whether it is comparable or smaller."""
    others = [row["peak_MiB"] for method, row in cells.items() if method != OURS]
    if OURS not in cells or not others:
        return ""
    peak = cells[OURS]["peak_MiB"]
    return bullets(
        "We agree: our peak is the smallest."
        if peak <= min(others)
        else f"The smallest peak is {min(others) / peak:.2f} times ours. That depends "
        "on the sizes chosen: gradients need some copies of M x (M + batch) numbers "
        "here, of window x window in an exact GP, of M x window in a windowed sparse "
        "model."
    )


def banana_measured(cells: Cells) -> str:
    """Errors after every batch, by order of arrival."""
    orders = banana_errors(cells)
    rows = []
    for k in range(max((e.shape[1] for e in orders.values()), default=0)):
        row = {"batch": str(k + 1)}
        for name, errors in orders.items():
            mean, std = errors[:, k].mean(), spread(errors[:, k])
            title = name if len(errors) == 1 else f"{name}, mean of {len(errors)}"
            row[title] = f"{mean:.2%}" + ("" if math.isnan(std) else f" ± {std:.2%}")
        rows.append(row)
    whole = cells.get("one batch")
    return paragraphs(
        "Test errors; ± is the standard deviation over random orders.",
        markdown(rows),
        f"All data in one batch: {whole['errors'][-1]:.2%}." if whole else "",
    )


def banana_differences(cells: Cells) -> str:
    """Banana: whether all orders end alike."""
    ends = [errors[:, -1].mean() for errors in banana_errors(cells).values()]
    if len(ends) < 2:
        return ""
    apart = max(ends) - min(ends)
    text = (
        f"{'We agree: all' if apart <= ALIKE else 'Not all'} orders end with about the "
        f"same error; they are {100 * apart:.2f} percentage points apart."
    )
    if "one batch" in cells:
        off = 100 * (max(ends) - cells["one batch"]["errors"][-1])
        text += f" The worst is {number(off, '+.2f')} points from the batch model."
    return bullets(text)


def equivalence_measured(cells: Cells) -> str:
    """Bounds, and the largest differences of curves."""
    rows = [
        {
            "inducing points": name.replace("inducing points", "").strip(),
            "after batch": str(k + 1),
            "online bound": number(panel["online_bound"]),
            "batch bound": number(panel["batch_bound"]),
            "means differ by": f"{curve_gap(panel, 'mean'):.1g}",
            "standard deviations by": f"{curve_gap(panel, 'std'):.1g}",
        }
        for name, cell in sorted(cells.items())
        for k, panel in enumerate(cell["panels"])
    ]
    worst = max(
        abs(panel["online_bound"] - panel["batch_bound"])
        for cell in cells.values()
        for panel in cell["panels"]
    )
    agree = "agree" if bounds_agree(cells) else "do not agree"
    return paragraphs(
        "The online bound is the sum of the increments of all updates. With "
        "inducing points at the data, the batch bound is the log evidence of the "
        "exact GP. Results are stored with nine digits.",
        markdown(rows),
        f"Bounds {agree} in every printed digit; the largest difference is "
        f"{worst:.1g}.",
    )


def equivalence_differences(cells: Cells) -> str:
    """Equivalence: whether it holds."""
    return bullets(
        "We agree. The remaining differences are rounding and the jitter of the prior."
        if bounds_agree(cells)
        else "The bounds differ by more than rounding. They should not."
    )

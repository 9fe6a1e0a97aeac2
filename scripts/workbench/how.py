"""The pictures of docs/how.md, each drawn from a model that runs for a few seconds.

    python -m workbench.how              in scripts/; all six
    python -m workbench.how rows merge   some of them

They go to docs/figures/how-*.png.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from matplotlib import pyplot
from torch import Tensor

from torch_ssgp import StreamingGP, UpdateOptions, merge
from torch_ssgp.exceptions import BudgetWarning
from workbench.common import DOCS, new_parser, save

NOISE = 0.15
ODDS = np.log(1 / UpdateOptions().change_odds)  # nats at which an alarm asks
OURS, PAST, NEW, BAD = "tab:blue", "0.6", "black", "tab:red"
STYLE = {"font.size": 12, "axes.titlesize": 12, "legend.fontsize": 10}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}


def wave(x: Tensor) -> Tensor:
    """A function of one input, ``(n, 1)``."""
    return torch.sin(2 * x[:, 0]) + 0.4 * torch.cos(5 * x[:, 0])


def arrays(*values: Tensor) -> list[np.ndarray]:
    """Tensors as matplotlib takes them; inputs ``(n, 1)`` as a vector."""
    return [v.detach().reshape(v.numel()).numpy() for v in values]


def noisy(f: Tensor, noise: float = NOISE) -> Tensor:
    """Values with noise."""
    return f + noise * torch.randn(len(f), dtype=f.dtype)


def column(low: float, high: float, count: int) -> Tensor:
    """Inputs ``(count, 1)``, evenly spaced."""
    return torch.linspace(low, high, count, dtype=torch.float64).unsqueeze(-1)


def new_model(num_inducing: int, memory_size: int | None = None) -> StreamingGP:
    """A plain model."""
    kernel = ScaleKernel(RBFKernel())
    return StreamingGP(kernel, None, None, num_inducing, memory_size).double()


@torch.no_grad()
def band(ax: Any, model: StreamingGP, x: Tensor, color: str, label: str) -> None:
    """Mean and 95 % band of the function."""
    latent = model(x)
    at, mean, low, high = arrays(x, latent.mean, *latent.confidence_region())
    ax.plot(at, mean, color=color, lw=1.8, label=label)
    ax.fill_between(at, low, high, color=color, alpha=0.2, lw=0)


def ticks(ax: Any, x: Tensor, label: str) -> None:
    """Points, at the foot of the axes."""
    foot = ax.get_xaxis_transform()
    style = {"color": BAD, "ms": 10, "mew": 1.6, "label": label}
    ax.plot(*arrays(x), [0.04] * len(x), "|", transform=foot, **style)


def panels(count: int, height: float, **options: Any) -> tuple[Any, Any]:
    """Panels below one another: they are read on a phone, too."""
    size = (6.4, height * count)
    return pyplot.subplots(count, figsize=size, layout="constrained", **options)


def shown(ax: Any, matrix: Tensor, largest: float) -> None:
    """A matrix, red above zero and blue below."""
    limits = {"vmin": -largest, "vmax": largest}
    ax.imshow(matrix.detach().numpy(), cmap="RdBu_r", interpolation="nearest", **limits)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(True)


# -- the six pictures -----------------------------------------------------------------


def rows() -> Any:
    """A memory: compressed rows and raw data, as one regression."""
    model, x = new_model(12, 20), column(0, 6, 46)
    y = noisy(wave(x))
    model.update(x[:40], y[:40])
    model.update(x[40:], y[40:], num_steps=0)
    memory = model.memory
    past = memory.compressed
    figure, (above, below) = panels(2, 3.1, height_ratios=(1, 1.1))
    above.plot(*arrays(x[:40], y[:40]), ".", color=PAST, label="compressed data")
    above.plot(*arrays(memory.raw_x, memory.y), "o", color=NEW, ms=4, label="raw data")
    band(above, model, column(-0.3, 6.3, 200), OURS, "posterior")
    ticks(above, past.points, "points $Z$ of the compressed data")
    above.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    U, count = past.past.U, memory.num_raw
    H = torch.block_diag(U / U.abs().max(), torch.eye(count, dtype=U.dtype))
    shown(below, H, 1)
    p, m = U.shape
    below.axhline(p - 0.5, color="0.5", lw=0.8)
    below.axvline(m - 0.5, color="0.5", lw=0.8)
    below.set_xlabel(f"{m} points $Z$, then {count} inputs $x$")
    below.set_ylabel(f"{p} rows $U$,\nthen {count} raw data")
    below.set_title("$H$: what each row sees of the function")
    return figure


def bordering() -> Any:
    """A new datum is a new row of the factor; its entry of e is its error."""
    model, x = new_model(40), 6 * torch.rand(24, 1, dtype=torch.float64)
    y = noisy(wave(x))
    y[23] -= 0.6
    model.update(x[:23], y[:23])
    before = deepcopy(model)
    model.update(x[23:], y[23:], num_steps=0)
    factor = model.predictor().factor
    assert factor is not None
    figure, (above, left, below) = panels(3, 2.6, height_ratios=(1, 1.25, 0.7))
    above.plot(*arrays(x[:23], y[:23]), ".", color=PAST, ms=7, label="data so far")
    band(above, before, column(0, 6, 200), OURS, "what they predict")
    above.plot(*arrays(x[23:], y[23:]), "o", color=BAD, label="the new datum")
    above.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    shown(left, factor.W, float(factor.W.abs().quantile(0.98)))
    left.add_patch(
        pyplot.Rectangle((-0.5, 22.5), 24, 1, fill=False, ec=BAD, lw=2, clip_on=False)
    )
    left.set_title("$W = L^{-1}$: the new datum is the last row, nothing else changes")
    colors = [PAST] * 23 + [BAD]
    below.bar(range(24), *arrays(factor.e), color=colors)
    below.axhline(0, color="0.5", lw=0.8)
    below.set_ylabel("$e$")
    below.set_xlabel("datum: its error, in standard deviations, given all before it")
    return figure


def compression() -> Any:
    """The same posterior from all data, and from few points."""
    x = 6 * torch.rand(150, 1, dtype=torch.float64).sort(0).values
    y, grid = noisy(wave(x)), column(0, 6, 300)
    exact = new_model(150)
    exact.update(x, y)
    figure, axes = panels(4, 1.9, sharex=True)
    axes[0].plot(*arrays(x, y), ".", color=PAST, ms=4)
    band(axes[0], exact, grid, OURS, "")
    axes[0].set_title(f"all {len(x)} data: the exact GP")
    for ax, count in zip(axes[1:], (20, 15, 10), strict=True):
        model = new_model(count)
        for mine, its in zip(model.parameters(), exact.parameters(), strict=True):
            mine.data.copy_(its.data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)  # on purpose
            result = model.update(x, y, num_steps=0)
        band(ax, model, grid, "tab:orange", "")
        ax.plot(*arrays(grid, exact(grid).mean), color=OURS, lw=1.2, ls="--")
        ticks(ax, model.points, "")
        lost = float(result.projection_loss)
        ax.set_title(f"{count} points; the compression lost {lost:.1f} nats")
    return figure


def alarm() -> Any:
    """Outliers, and a change: alarms ask, and the evidence answers."""
    x = 6 * torch.rand(120, 1, dtype=torch.float64)
    f = torch.sin(2 * x[:, 0])
    f[90:] = 1 - f[90:]
    y = noisy(f)
    y[[20, 28]] += torch.tensor([3.0, -4.0], dtype=y.dtype)
    model, alarms, out, resets = new_model(100), [], [], []
    ahead = []
    for k in range(len(x)):
        now = x[k : k + 1], y[k : k + 1]
        with torch.no_grad():
            latent = model.predict(now[0])
        ahead.append((float(latent.mean), 1.96 * float(latent.stddev)))
        # What the alarm was before it was explained.
        alarms.append(float(deepcopy(model).observe(*now).alarm))
        before, result = model.num_outliers, model.update(*now)
        if result.num_outliers > before:
            out.append(k)
        if float(result.forgot) == 0:
            resets.append(k)
    figure, (above, below) = panels(2, 2.8, sharex=True)
    mean, width = zip(*ahead, strict=True)
    bars = {"ecolor": OURS, "elinewidth": 1.2, "fmt": "none", "alpha": 0.5}
    above.errorbar(range(len(x)), mean, width, label="predicted one ahead", **bars)
    above.plot(*arrays(y), ".", color=NEW, ms=5, label="data")
    above.plot(out, *arrays(y[out]), "o", mfc="none", mec="tab:orange", ms=9, mew=1.6)
    above.plot([], [], "o", mfc="none", mec="tab:orange", label="left out as outliers")
    above.set_ylim(float(y.min()) - 0.5, float(y.max()) + 0.5)
    below.plot(alarms, color=NEW, drawstyle="steps-mid")
    below.axhline(ODDS, color=PAST, ls="--")
    below.text(0, 1.03 * ODDS, "from here on it asks", color="0.4", fontsize=10)
    for ax in (above, below):
        ax.axvline(89.5, color=PAST, lw=1.5, ls=":", label="the function changes")
        for k in resets:
            ax.axvline(k, color=BAD, lw=1.8, label="reset")
    above.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    below.set(ylabel="alarm, nats", xlabel="datum")
    return figure


def rate() -> Any:
    """A function that drifts, and one that stays: the rate that the evidence finds."""
    x = torch.rand(400, 1, dtype=torch.float64)
    still = torch.sin(6 * x[:, 0])
    phase = torch.linspace(0, 8, 400, dtype=torch.float64)
    noise = 0.3 * torch.randn(400, dtype=torch.float64)
    streams = {"drifts": torch.sin(6 * x[:, 0] + phase) + noise, "stays": still + noise}
    figure, (above, below) = panels(2, 2.7)
    grid, ends = column(0, 1, 200), range(20, 401, 20)
    for (name, y), color in zip(streams.items(), (OURS, "tab:green"), strict=True):
        model, rates = new_model(60), []
        for end in ends:
            result = model.update(x[end - 20 : end], y[end - 20 : end])
            rates.append(float(result.rate))
        below.plot(ends, rates, ".-", color=color, label=f"a function that {name}")
        if name == "drifts":
            above.plot(
                *arrays(x[:320], y[:320]), ".", color="0.85", ms=4, label="old data"
            )
            above.plot(
                *arrays(x[320:], y[320:]), ".", color=NEW, ms=4, label="the last 80"
            )
            band(above, model, grid, color, "posterior now")
            now = torch.sin(6 * grid[:, 0] + phase[-1])
            above.plot(*arrays(grid, now), "--", color=BAD, label="the function now")
    above.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    below.set(xlabel="data so far", ylabel="rate, per datum")
    below.legend(frameon=False)
    return figure


def merged() -> Any:
    """Two sites, and what both know."""
    x = 6 * torch.rand(160, 1, dtype=torch.float64).sort(0).values
    y, grid = noisy(wave(x)), column(0, 6, 300)
    models = [new_model(20), new_model(20)]
    parts = [slice(0, 90), slice(70, 160)]
    figure, axes = panels(3, 2.1, sharex=True, sharey=True)
    for ax, model, part, site in zip(axes, models, parts, "AB", strict=False):
        model.update(x[part], y[part])
        ax.plot(*arrays(x[part], y[part]), ".", color=PAST, ms=4)
        band(ax, model, grid, OURS, "")
        ticks(ax, model.points, "")
        ax.set_title(f"site {site}: {part.stop - part.start} data")
    model = merge(models, learn_hyperparameters=True)
    band(axes[2], model, grid, "tab:orange", "")
    axes[2].plot(*arrays(grid, wave(grid)), "--", color=BAD, lw=1.2)
    ticks(axes[2], model.points, "")
    count = int(model.num_data)
    title = f"merged: {count} data on {len(model.points)} points"
    axes[2].set_title(f"{title}; dashed: the function")
    return figure


PICTURES: dict[str, Callable[[], Any]] = {
    "rows": rows,
    "bordering": bordering,
    "compression": compression,
    "alarm": alarm,
    "rate": rate,
    "merge": merged,
}


def main(arguments: list[str] | None = None) -> None:
    """Draw some of the pictures."""
    parser = new_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="picture", help=", ".join(PICTURES))
    parser.add_argument("--out", type=Path, default=DOCS / "figures")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in chosen.names or PICTURES:
        torch.manual_seed(0)
        with pyplot.rc_context(STYLE):
            save(PICTURES[name](), chosen.out / f"how-{name}.png")


if __name__ == "__main__":
    main()

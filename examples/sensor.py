"""Months of sensor data, reading by reading: gaps, a drift, a recalibration.

Nothing is tuned. As the time axis outgrows the inducing points, old stretches fade and
recent ones stay sharp. The recalibration is a change that the evidence finds where
readings are dense enough to contradict the prediction; otherwise it is a steep place
that soon lies behind. Run ``python examples/sensor.py``: it prints a table and saves
out/sensor.png. In the table, "reset" counts updates that began anew.
"""

from __future__ import annotations

import argparse
import math
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

try:
    from matplotlib import pyplot
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(
        f"{__doc__}\n{error}. Install it: pip install -e '.[plot]'"
    ) from None

from torch_ssgp import StreamingGP
from torch_ssgp.exceptions import BudgetWarning

NOISE = 0.3  # degrees
JUMP = 8.0  # degrees that the recalibration takes away
GAPS = ((0.18, 0.22), (0.55, 0.58))  # in lengths of the series
DRIFT_FROM, CALIBRATED_AT = 0.3, 0.75


class Series(NamedTuple):
    """Readings that arrived.

    Attributes:
        t: ``(n,)``, days.
        y: ``(n,)``, degrees.
        calibrated: Day of the recalibration.
    """

    t: Tensor
    y: Tensor
    calibrated: float


def make_series(days: float, every_hours: float) -> Series:
    """A daily wave and slow weather; the sensor drifts until it is calibrated."""
    generator = torch.Generator().manual_seed(0)
    t = torch.arange(0, days, every_hours / 24, dtype=torch.float64)
    share = t / days
    y = 15 + 3 * torch.sin(2 * math.pi * t)
    y += 2 * torch.sin(2 * math.pi * t / 9) + torch.sin(2 * math.pi * t / 3.7 + 1)
    drifts = (share > DRIFT_FROM) & (share < CALIBRATED_AT)
    y += drifts * JUMP * (share - DRIFT_FROM) / (CALIBRATED_AT - DRIFT_FROM)
    y += NOISE * torch.randn(len(t), generator=generator, dtype=torch.float64)
    arrived = torch.ones_like(t, dtype=torch.bool)
    for low, high in GAPS:
        arrived &= (share < low) | (share > high)
    return Series(t[arrived], y[arrived], CALIBRATED_AT * days)


class Track(NamedTuple):
    """What was predicted and learned, a value for every reading.

    Attributes:
        mean: ``(n,)``, of the reading, before it arrived.
        std: ``(n,)``, of the same.
        forgot: ``(n,)``, power of the past, 1 where nothing was forgotten.
        noise: ``(n,)``, standard deviation as learned.
    """

    mean: Tensor
    std: Tensor
    forgot: Tensor
    noise: Tensor


def follow(series: Series, num_inducing: int, num_steps: int) -> Track:
    """Predict each reading, then learn it."""
    model = StreamingGP(ScaleKernel(MaternKernel()), num_inducing=num_inducing).double()
    values = []
    for t, y in zip(tqdm(series.t, unit="reading"), series.y, strict=True):
        x = t.reshape(1, 1)
        with torch.no_grad():
            target = model.predict(x)
        with warnings.catch_warnings():
            # That points get too few is what this is about.
            warnings.simplefilter("ignore", BudgetWarning)
            result = model.update(x, y.reshape(1), forget="auto", num_steps=num_steps)
        noise = model.likelihood.noise.detach().sqrt().squeeze()
        mean, std = target.mean.squeeze(), target.variance.sqrt().squeeze()
        values.append((mean, std, result.forgot, noise))
    return Track(*(torch.stack(value) for value in zip(*values, strict=True)))


def main(
    days: float = 60,
    every_hours: float = 2,
    num_inducing: int = 40,
    num_steps: int = 30,
    out: str | Path = "out",
) -> tuple[Series, Track]:
    """Follow the sensor; the readings, and what was made of them.

    Args:
        days: Length of the series.
        every_hours: Time between readings; 1/12 for every five minutes.
        num_inducing: Inducing points: a few days of readings, not all.
        num_steps: Budget of the inner loop of each update.
        out: Folder for the figure.
    """
    series = make_series(days, every_hours)
    track = follow(series, num_inducing, num_steps)
    print_table(series, track)
    path = Path(out) / "sensor.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(series, track, path)
    print(f"figure: {path}")
    return series, track


def print_table(series: Series, track: Track) -> None:
    """Errors one step ahead by tenths, new beginnings, and the noise."""
    error, inside = series.y - track.mean, 1.645 * track.std
    print(f"one reading ahead (the noise is {NOISE})")
    print(f"{'days':>14}{'RMSE':>8}{'in 90 %':>9}{'reset':>7}{'noise':>8}")
    for part in torch.arange(1, len(series.t)).chunk(10):
        rmse = error[part].square().mean().sqrt()
        share = (error[part].abs() < inside[part]).double().mean()
        days = f"{series.t[part[0]]:.0f} to {series.t[part[-1]]:.0f}"
        print(
            f"{days:>14}{rmse:8.3f}{100 * share:8.0f}%"
            f"{int((track.forgot[part] == 0).sum()):7d}"
            f"{track.noise[part].mean():8.3f}"
        )


def draw(series: Series, track: Track, path: Path) -> None:
    """The band of predictions, what was forgotten, and the noise, over time."""
    figure, (band, power, noise) = pyplot.subplots(
        3, figsize=(11, 7.5), sharex=True, height_ratios=(3, 1, 1)
    )
    t, mean, half = series.t[1:], track.mean[1:], 1.645 * track.std[1:]
    # Lines do not cross gaps.
    gap = torch.where(t.diff(prepend=t[:1]) > 5 * t.diff().median(), torch.nan, 0.0)
    band.plot(series.t, series.y, ".", color="0.6", ms=2, label="readings")
    band.fill_between(
        t, mean - half + gap, mean + half + gap, color="tab:blue", alpha=0.3, lw=0
    )
    band.plot(t, mean + gap, color="tab:blue", lw=0.8, label="predicted, 90 % band")
    low, high = series.y.aminmax()
    band.set_ylim(float(low) - 3, float(high) + 3)
    band.set_ylabel("degrees")
    power.plot(series.t, track.forgot, color="tab:red", lw=0.8)
    power.set_ylim(-0.05, 1.05)
    power.set_ylabel("forgot (λ)")
    noise.axhline(NOISE, color="k", ls="--", lw=1, label="true noise")
    noise.plot(series.t, track.noise, color="tab:green", label="learned noise")
    noise.set_ylim(0, 4 * NOISE)
    noise.set_ylabel("degrees")
    noise.set_xlabel("days")
    length = series.calibrated / CALIBRATED_AT
    for ax in (band, power, noise):
        label = "recalibration" if ax is band else None
        ax.axvline(series.calibrated, color="tab:orange", lw=1, label=label)
        for begin, end in GAPS:
            ax.axvspan(begin * length, end * length, color="0.92", lw=0)
    start = DRIFT_FROM * length
    band.axvline(start, color="tab:orange", ls=":", lw=1, label="drift begins")
    band.legend(loc="upper left", fontsize=8, ncols=2)
    noise.legend(loc="upper left", fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--days", type=float, default=60, help="length of the series (%(default)s)"
    )
    parser.add_argument(
        "--every-hours",
        type=float,
        default=2,
        help="hours between readings (%(default)s)",
    )
    parser.add_argument(
        "--num-inducing",
        type=int,
        default=40,
        help="limit on inducing points (%(default)s)",
    )
    parser.add_argument(
        "--num-steps",
        type=int,
        default=10,
        help="limit on gradient steps per update (%(default)s)",
    )
    parser.add_argument(
        "--out", default="out", help="folder for the figure (%(default)s)"
    )
    main(**vars(parser.parse_args()))

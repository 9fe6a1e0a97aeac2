"""A Gaussian process in river: predict each point, then learn from it.

The stream is the approval of a president, estimated from polls, day by day. Every model
predicts each point before it learns from it. Run ``python examples/river_stream.py``:
it prints a table and saves out/river_stream.png.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

try:
    from matplotlib import pyplot
    from river import datasets, linear_model, metrics, neighbors, preprocessing
except ImportError as error:
    raise SystemExit(
        f"{__doc__}\n{error}. Install it: pip install -e '.[plot,river]'"
    ) from None

from torch_ssgp.river import StreamingGPRegressor

LEVEL = 0.9


class Track(NamedTuple):
    """How a model did: mean absolute error, share inside intervals, predictions."""

    mae: float
    coverage: float | None
    milliseconds: float
    means: list[float]
    intervals: list[Any]


def main(
    num_data: int = 1_001,
    batch_size: int = 1,
    out: str | Path = "out",
) -> dict[str, Track]:
    """Run all models over the stream; what the table shows.

    Args:
        num_data: Length of the stream, at most 1,001.
        batch_size: Data that our model collects for an update.
        out: Folder for the figure.
    """
    stream = list(datasets.TrumpApproval().take(num_data))
    models = {
        "StreamingGPRegressor": StreamingGPRegressor(
            num_inducing=50, batch_size=batch_size
        ),
        "KNNRegressor": preprocessing.StandardScaler() | neighbors.KNNRegressor(),
        "LinearRegression": preprocessing.StandardScaler()
        | linear_model.LinearRegression(),
    }
    print(f"{'':22s}    MAE   inside {100 * LEVEL:.0f} %   ms per datum")
    tracks = {}
    for name, model in models.items():
        track = tracks[name] = predict_then_learn(model, stream)
        inside = "" if track.coverage is None else f"{100 * track.coverage:.0f}%"
        print(f"{name:22s} {track.mae:6.3f} {inside:>11s} {track.milliseconds:14.1f}")
    draw(stream, tracks["StreamingGPRegressor"], Path(out) / "river_stream.png")
    return tracks


def predict_then_learn(model: Any, stream: list[tuple[dict, float]]) -> Track:
    """Progressive validation."""
    metric, means, intervals = metrics.MAE(), [], []
    start = time.perf_counter()
    for x, y in stream:
        means.append(model.predict_one(x))
        if hasattr(model, "predict_interval_one"):
            intervals.append(model.predict_interval_one(x, LEVEL))
        metric.update(y, means[-1])
        model.learn_one(x, y)
    milliseconds = 1000 * (time.perf_counter() - start) / len(stream)
    coverage = None
    if intervals:
        pairs = zip(stream, intervals, strict=True)
        coverage = sum(y in interval for (_, y), interval in pairs) / len(stream)
    return Track(metric.get(), coverage, milliseconds, means, intervals)


def draw(stream: list[tuple[dict, float]], track: Track, path: Path) -> None:
    """The stream, and what was predicted before each datum was seen."""
    figure, ax = pyplot.subplots(figsize=(9, 3.5))
    days = range(1, len(stream))  # the first prediction is the prior's
    lower = [track.intervals[k].lower for k in days]
    upper = [track.intervals[k].upper for k in days]
    ax.fill_between(days, lower, upper, color="tab:blue", alpha=0.2, lw=0)
    ax.plot(days, track.means[1:], color="tab:blue", lw=1, label="predicted")
    ax.plot(days, [y for _, y in stream][1:], "k.", ms=2, label="approval")
    targets = [y for _, y in stream]
    ax.set_ylim(min(targets) - 2, max(targets) + 2)
    ax.set_xlabel("datum")
    ax.legend(loc="upper right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"figure: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--num-data", type=int, default=1_001, help="length of the stream (%(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=1, help="points per batch (%(default)s)"
    )
    parser.add_argument(
        "--out", default="out", help="folder for the figure (%(default)s)"
    )
    main(**vars(parser.parse_args()))

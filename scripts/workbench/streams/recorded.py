"""Streams of recorded data: time series, terrains, UCI sets, labels.

``first`` and ``batch`` are the sizes of the first and of the following batches. Time
series and terrains arrive in the order of their first input, scaled to [0, 10].
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from workbench.streams.stream import Stream, cut, evenly, generator, moments

SHIPPED = Path(__file__).resolve().parents[2] / "data"

# r_3 .. r_7 of column 1 of UCI data set 136, "Pseudo Periodic Synthetic Time Series".
# The numbers were drawn at random when the file was made; these give it back.
PSEUDO_PERIODIC_INTEGERS = (6, 11, 25, 43, 114)

UCI = ("bike_noleak", "elevators", "kin40k", "protein")


def pseudo_periodic_values(steps: int = 24_000) -> Tensor:
    r"""The UCI pseudo-periodic series, from its formula.

    .. math::
        y(t) = \sum_{i=3}^{7} 2^{-i} \sin(2\pi (2^i + r_i) t),
        \qquad t = 0, 10^{-5}, 2 \cdot 10^{-5}, \dots

    UCI's page prints :math:`2^{2+i}`, which is not what made its file.
    """
    t = torch.arange(steps, dtype=torch.float64) * 1e-5
    y = torch.zeros_like(t)
    for i, r in zip(range(3, 8), PSEUDO_PERIODIC_INTEGERS, strict=True):
        y += 2.0**-i * torch.sin(2 * math.pi * (2**i + r) * t)
    return y


def pseudo_periodic(
    first: int = 1_000, batch: int = 300, *, split: int | None = None
) -> Stream:
    """The paper's pseudo-periodic series: even steps train, odd steps test.

    With ``split``, a seed, a random half of the steps trains in place of every second.
    """
    series = pseudo_periodic_values()
    is_train = torch.arange(len(series)) % 2 == 0
    if split is not None:
        is_train[:] = False
        is_train[torch.randperm(len(series), generator=generator(split))[::2]] = True
    return _time_series("pseudo_periodic", series, is_train, first, batch)


def audio(first: int = 1_000, batch: int = 300) -> Stream:
    """A speech signal at baseband, 18,000 samples: even train, odd test.

    Loud and silent parts alternate: after scaling by the first batch, the standard
    deviation of a batch of 300 is anything from 0.03 to 3.3.
    """
    series = torch.from_numpy(np.load(SHIPPED / "audio_baseband.npy")).double()
    is_train = torch.arange(len(series)) % 2 == 0
    return _time_series("audio", series, is_train, first, batch)


def terrain(first: int = 1_000, batch: int = 750) -> Stream:
    """Heights of the Jacksboro fault, 200 x 200, from matplotlib's sample data.

    Every second row and column trains (10,000 points), the rest tests (30,000).
    Points arrive row by row: by the first coordinate, then the second.
    """
    cbook = _optional("matplotlib.cbook", "matplotlib")
    file = cbook.get_sample_data("jacksboro_fault_dem.npz", asfileobj=False)
    with np.load(file) as dem:
        heights = dem["elevation"][70:270, 100:300]
    return _terrain("terrain", heights, first, batch)


def terrain_os(
    data_dir: str | Path | None = None, first: int = 1_000, batch: int = 750
) -> Stream:
    """As :func:`terrain`, from a 200 x 200 tile of OS Terrain 50.

    Contains OS data (c) Crown copyright and database right 2013, Open Government
    Licence v3.
    """
    with np.load(_file(data_dir, "terrain_os_NT26.npz")) as tile:
        heights = tile["z"]
    return _terrain("terrain_os", heights, first, batch)


def uci_rows(
    name: str, data_dir: str | Path | None = None, split: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, targets, which rows test, and their order of arrival, as in the file."""
    if name not in UCI:
        raise ValueError(f"name is {name!r}; expected one of {UCI}.")
    with np.load(_file(data_dir, f"uci_{name}.npz")) as arrays:
        x = torch.from_numpy(arrays["X"]).double()
        y = torch.from_numpy(arrays["y"]).double().reshape(-1)
        is_test = torch.from_numpy(arrays["test_mask"][:, split]).bool()
        if name == "bike_noleak":
            order = torch.from_numpy(arrays["time_order"]).long()
        else:
            # Ties keep the order of the file, so the stream is the same everywhere.
            order = x[:, 0].argsort(stable=True)
    return x, y, is_test, order


def uci(
    name: str, data_dir: str | Path | None = None, batch: int = 500, *, split: int = 0
) -> Stream:
    """A UCI regression set as a stream that is far from iid.

    ``bike_noleak`` arrives in order of time, the others sorted by their first input.
    Inputs are standardised by the whole training set: scaled by its first batch, a
    sorted input would be one batch wide and the rest would land hundreds of standard
    deviations away. ``split`` is a column of the file's test mask.
    """
    x, y, is_test, order = uci_rows(name, data_dir, split)
    x, y, is_test = x[order], y[order], is_test[order]
    centre, scale = moments(x[~is_test])
    return cut(name, (x - centre) / scale, y, ~is_test, batch, batch)


def river_series(name: str, every: int = 5) -> Stream:
    """A regression set of river in its own order, in one batch.

    Inputs and targets are standardised by the training set; of every so many data, one
    is a test.
    """
    datasets = _optional("river.datasets", "river")
    x, y = _tensors((list(row.values()), y) for row, y in getattr(datasets, name)())
    is_train = torch.arange(len(y)) % every != every - 1
    centre, scale = moments(x[is_train])
    return cut(name, (x - centre) / scale, y, is_train, len(y), len(y))


def banana(
    order: str = "left_to_right",
    seed: int = 0,
    batches: int = 10,
    *,
    max_test: int | None = None,
) -> Stream:
    """The banana classification data, labels 0 and 1, 400 train and 4,900 test.

    Inputs are standardised as they come, over all 5,300 rows. Arrival is by the first
    input, ``"left_to_right"`` or ``"right_to_left"``, or ``"random"`` by the seed.
    """
    datasets = _optional("river.datasets", "river")
    file = SHIPPED / "banana_train_rows.csv"
    rows = torch.from_numpy(np.loadtxt(file, dtype=int))
    x, y = _tensors(([row["1"], row["2"]], y) for row, y in datasets.Bananas())
    is_test = torch.ones(len(y), dtype=torch.bool)
    is_test[rows] = False
    x_train, y_train = x[rows], y[rows]
    if order == "random":
        index = torch.randperm(len(rows), generator=generator(seed))
    elif order in ("left_to_right", "right_to_left"):
        descending = order == "right_to_left"
        index = x_train[:, 0].argsort(descending=descending, stable=True)
    else:
        raise ValueError(
            f"order is {order!r}; expected 'left_to_right', 'right_to_left' or "
            "'random'."
        )
    parts = [each[index].chunk(batches) for each in (x_train, y_train)]
    kept = evenly(int(is_test.sum()), max_test)
    return Stream(
        name=f"banana_{order}",
        batches=list(zip(*parts, strict=True)),
        x_test=x[is_test][kept],
        y_test=y[is_test][kept],
    )


def _tensors(pairs: Iterable[tuple[list, float]]) -> list[Tensor]:
    """Inputs and targets, float64."""
    return [torch.tensor(v).double() for v in zip(*pairs, strict=True)]


def _time_series(
    name: str, series: Tensor, is_train: Tensor, first: int, batch: int
) -> Stream:
    """A series with inputs scaled to [0, 10]."""
    step = torch.arange(len(series), dtype=torch.float64)
    x = 10 * step.unsqueeze(-1) / (len(series) - 1)
    return cut(name, x, series, is_train, first, batch)


def _terrain(name: str, heights: np.ndarray, first: int, batch: int) -> Stream:
    """A grid of heights: every second row and column trains, row by row."""
    z = torch.from_numpy(heights.astype(np.float64))
    index = torch.cartesian_prod(*map(torch.arange, z.shape))  # by row, then by column
    # One scale for both axes: a cell is square on the ground and stays square.
    x = 10 * index.double() / (max(z.shape) - 1)
    return cut(name, x, z.reshape(-1), (index % 2 == 0).all(-1), first, batch)


def _optional(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"This stream needs {package}: pip install {package}"
        ) from error


def _file(data_dir: str | Path | None, name: str) -> Path:
    """The file, or an error that says which file is missing and how to get it."""
    hint = "scripts/data/README.md says how to make it"
    if data_dir is None:
        raise FileNotFoundError(
            f"{name} is not shipped and data_dir is not set: {hint}; then pass its "
            "directory as data_dir."
        )
    file = Path(data_dir) / name
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: {hint}.")
    return file

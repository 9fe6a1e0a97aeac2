"""The data streams that benchmarks, tests and examples run on.

Every function returns a :class:`Stream`: float64 batches in the order in which they
arrive, already scaled, and a test set. Nothing downloads by itself: data come from a
formula, from the ``river`` and ``matplotlib`` packages, from ``scripts/data``, or from
files in a directory that the caller names.

Options that most functions share, for quick runs:

* ``num_batches``: only the first batches. Where a stream arrives in the order of its
  first input, test rows beyond the last input seen are dropped too, since they would
  only measure extrapolation.
* ``thin``: every ``thin``-th training row, before batches are formed.
* ``max_test``: at most so many test rows, evenly spaced.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

SHIPPED = Path(__file__).resolve().parents[1] / "data"

# r_3 .. r_7 of the ten columns of UCI data set 136, "Pseudo Periodic Synthetic Time
# Series". The numbers were drawn at random when the file was made; these give it back.
PSEUDO_PERIODIC_INTEGERS = (
    (6, 11, 25, 43, 114),
    (3, 7, 7, 3, 11),
    (7, 6, 15, 59, 30),
    (7, 11, 29, 32, 128),
    (3, 9, 6, 33, 55),
    (6, 11, 31, 13, 15),
    (5, 16, 1, 56, 4),
    (5, 4, 23, 17, 120),
    (2, 9, 29, 61, 43),
    (4, 8, 5, 9, 69),
)

_UCI_DATASETS = (
    "clone github.com/treforevans/uci_datasets (needs git-lfs), take "
    "`d = uci_datasets.Dataset({name!r})` and save it with "
    "`np.savez(file, X=d.x, y=d.y[:, 0], test_mask=d.test_mask)`"
)
_OPENML = (
    "get the data with `sklearn.datasets.fetch_openml({openml!r}, version={version})`"
    "{other} and save them with `np.savez(file, X=..., y=..., test_mask=...{extra})`: "
    "X is n x d, y is n, test_mask is boolean, n x splits"
)
UCI_SOURCES = {
    "bike_noleak": _OPENML.format(
        openml="Bike_Sharing_Demand",
        version=2,
        other=" (or hour.csv of UCI data set 275, which has the day of the month too)",
        extra=", time_order=row numbers in order of time",
    )
    + "; y is the log of the count, and the columns it is the sum of are left out",
    "elevators": _OPENML.format(openml="elevators", version=1, other="", extra="")
    + "; or, for the usual splits, "
    + _UCI_DATASETS.format(name="elevators"),
    "kin40k": _UCI_DATASETS.format(name="kin40k"),
    "protein": _UCI_DATASETS.format(name="protein"),
    "skillcraft": _UCI_DATASETS.format(name="skillcraft"),
}


@dataclass(frozen=True)
class Stream:
    """A stream of batches with a test set, all float64 and scaled.

    Attributes:
        name: A short name for tables.
        batches: ``(x, y)`` in order of arrival, ``(n, d)`` and ``(n,)``.
        x_test: ``(n_s, d)``, test inputs.
        y_test: ``(n_s,)``, test targets, with noise.
        notes: How it was made and scaled.
        test_batches: For a target that moves, the test set ``(x, y)`` as of the time
            of each batch; ``x_test, y_test`` is then the last one.
    """

    name: str
    batches: list[tuple[Tensor, Tensor]]
    x_test: Tensor
    y_test: Tensor
    notes: str
    test_batches: list[tuple[Tensor, Tensor]] | None = None

    @property
    def x_train(self) -> Tensor:
        """All training inputs in order of arrival, ``(n, d)``."""
        return torch.cat([x for x, _ in self.batches])

    @property
    def y_train(self) -> Tensor:
        """All training targets in order of arrival, ``(n,)``."""
        return torch.cat([y for _, y in self.batches])

    def __len__(self) -> int:
        return len(self.batches)


ROUNDING = 1e-12  # relative, of targets


def rounded(stream: Stream, seed: int) -> Stream:
    """The stream with targets that differ by roundings; as it is for seed zero.

    A greedy choice may tip over by a rounding, and what follows is another run: where
    a budget is used up, the ends show how far that reaches.

    Args:
        stream: Any stream.
        seed: Which roundings.

    Returns:
        A stream with the same inputs and the same tests.
    """
    if seed == 0:
        return stream
    gen = _generator(seed)
    batches = [
        (x, y * (1 + ROUNDING * torch.randn(y.shape, generator=gen, dtype=y.dtype)))
        for x, y in stream.batches
    ]
    return replace(stream, batches=batches)


# --------------------------------------------------------------------- real data


def pseudo_periodic_values(column: int = 1, steps: int = 24_000) -> Tensor:
    r"""The UCI pseudo-periodic series, from its formula.

    .. math::
        y(t) = \sum_{i=3}^{7} 2^{-i} \sin(2\pi (2^i + r_i) t),
        \qquad t = 0, 10^{-5}, 2 \cdot 10^{-5}, \dots

    UCI's page prints :math:`2^{2+i}`, which is not what made its file.

    Args:
        column: Column of the file, 1 to 10.
        steps: Number of values, up to 100,001 in the file.

    Returns:
        The series, ``(steps,)``.
    """
    t = torch.arange(steps, dtype=torch.float64) * 1e-5
    y = torch.zeros_like(t)
    for i, r in zip(range(3, 8), PSEUDO_PERIODIC_INTEGERS[column - 1], strict=True):
        y += 2.0**-i * torch.sin(2 * math.pi * (2**i + r) * t)
    return y


def pseudo_periodic(
    column: int = 1,
    steps: int = 24_000,
    first: int = 1_000,
    batch: int = 300,
    *,
    split: int | None = None,
    num_batches: int | None = None,
    thin: int = 1,
    max_test: int | None = None,
) -> Stream:
    """The paper's pseudo-periodic series: even steps train, odd steps test.

    Args:
        column: Column of the UCI file, 1 to 10; the paper uses 1.
        steps: Length of the series before it is split.
        first: Size of the first batch.
        batch: Size of the following batches.
        split: Seed of a random half of the steps that trains, in place of every
            second step.
        num_batches: Only so many batches.
        thin: Every ``thin``-th training row.
        max_test: At most so many test rows.

    Returns:
        The stream; inputs scaled to [0, 10], y standardised by the first batch.
    """
    series = pseudo_periodic_values(column, steps)
    is_train = None
    if split is not None:
        is_train = torch.zeros(steps, dtype=torch.bool)
        is_train[torch.randperm(steps, generator=_generator(split))[::2]] = True
    return _time_series(
        f"pseudo_periodic_{column}",
        series,
        first,
        batch,
        num_batches,
        thin,
        max_test,
        is_train,
    )


def audio(
    first: int = 1_000,
    batch: int = 300,
    *,
    data_dir: str | Path | None = None,
    num_batches: int | None = None,
    thin: int = 1,
    max_test: int | None = None,
) -> Stream:
    """A speech signal at baseband, 18,000 samples: even train, odd test.

    Loud and silent parts alternate: after scaling by the first batch, the standard
    deviation of a batch of 300 is anything from 0.03 to 3.3.

    Args:
        first: Size of the first batch.
        batch: Size of the following batches.
        data_dir: Where ``audio_baseband.npy`` is; beside the script by default.
        num_batches: Only so many batches.
        thin: Every ``thin``-th training row.
        max_test: At most so many test rows.

    Returns:
        The stream; inputs scaled to [0, 10], y standardised by the first batch.
    """
    file = _file(data_dir or SHIPPED, "audio_baseband.npy", _shipped_hint())
    series = torch.from_numpy(np.load(file)).double()
    return _time_series("audio", series, first, batch, num_batches, thin, max_test)


def terrain(
    first: int = 1_000,
    batch: int = 750,
    *,
    num_batches: int | None = None,
    thin: int = 1,
    max_test: int | None = None,
) -> Stream:
    """Heights of the Jacksboro fault, 200 x 200, from matplotlib's sample data.

    Every second row and column trains (10,000 points), the rest tests (30,000).
    Points arrive row by row: by the first coordinate, then the second.

    Args:
        first: Size of the first batch.
        batch: Size of the following batches.
        num_batches: Only so many batches.
        thin: Every ``thin``-th training row.
        max_test: At most so many test rows.

    Returns:
        The stream; both coordinates scaled to [0, 10], y standardised by the first
        batch.
    """
    cbook = _optional("matplotlib.cbook", "matplotlib")
    with np.load(
        cbook.get_sample_data("jacksboro_fault_dem.npz", asfileobj=False)
    ) as dem:
        heights = dem["elevation"][70:270, 100:300]
    return _terrain("terrain", heights, first, batch, num_batches, thin, max_test)


def terrain_os(
    data_dir: str | Path | None = None,
    first: int = 1_000,
    batch: int = 750,
    *,
    num_batches: int | None = None,
    thin: int = 1,
    max_test: int | None = None,
) -> Stream:
    """As :func:`terrain`, from a 200 x 200 tile of OS Terrain 50.

    Contains OS data (c) Crown copyright and database right 2013, Open Government
    Licence v3.

    Args:
        data_dir: Where ``terrain_os_NT26.npz`` is.
        first: Size of the first batch.
        batch: Size of the following batches.
        num_batches: Only so many batches.
        thin: Every ``thin``-th training row.
        max_test: At most so many test rows.

    Returns:
        The stream, scaled as in :func:`terrain`.
    """
    with np.load(tile_file(data_dir)) as tile:
        heights = tile["z"]
    return _terrain("terrain_os", heights, first, batch, num_batches, thin, max_test)


def tile_file(data_dir: str | Path | None) -> Path:
    """The tile of :func:`terrain_os`, or an error that says how to make it."""
    hint = (
        "download tile NT26 of OS Terrain 50 (ASCII grid) from osdatahub.os.uk, skip "
        "its header lines and save it with `np.savez(file, z=heights)`"
    )
    return _file(data_dir, "terrain_os_NT26.npz", hint)


def uci(
    name: str,
    data_dir: str | Path | None = None,
    batch: int = 500,
    *,
    split: int = 0,
    num_batches: int | None = None,
    thin: int = 1,
    max_test: int | None = None,
) -> Stream:
    """A UCI regression set as a stream that is far from iid.

    ``bike_noleak`` arrives in order of time, the others sorted by their first input.
    Inputs are standardised by the whole training set: scaled by its first batch, a
    sorted input would be one batch wide and the rest would land hundreds of standard
    deviations away. y, which is what is learnt, is standardised by the first batch.

    Args:
        name: ``bike_noleak``, ``elevators``, ``kin40k``, ``protein``, ``skillcraft``.
        data_dir: Where ``uci_<name>.npz`` is.
        batch: Size of every batch.
        split: Column of the file's test mask.
        num_batches: Only so many batches; in order of the first input, test rows
            beyond them are dropped, in order of time all test rows stay.
        thin: Every ``thin``-th training row.
        max_test: At most so many test rows.

    Returns:
        The stream.
    """
    if name not in UCI_SOURCES:
        raise ValueError(f"name is {name!r}; expected one of {sorted(UCI_SOURCES)}.")
    by_time = name == "bike_noleak"
    with np.load(_file(data_dir, f"uci_{name}.npz", UCI_SOURCES[name])) as arrays:
        x = torch.from_numpy(arrays["X"]).double()
        y = torch.from_numpy(arrays["y"]).double().reshape(-1)
        is_test = torch.from_numpy(arrays["test_mask"][:, split]).bool()
        if by_time:
            order = torch.from_numpy(arrays["time_order"]).long()
        else:
            # Ties keep the order of the file, so the stream is the same everywhere.
            order = x[:, 0].argsort(stable=True)
    x, y, is_test = x[order], y[order], is_test[order]
    x_train, y_train = x[~is_test][::thin], y[~is_test][::thin]
    centre, scale = _moments(x_train)
    return _stream(
        name,
        (x_train - centre) / scale,
        y_train,
        (x[is_test] - centre) / scale,
        y[is_test],
        first=batch,
        batch=batch,
        num_batches=num_batches,
        max_test=max_test,
        ordered=not by_time,
        notes="in order of "
        + ("time" if by_time else "the first input")
        + "; x standardised by the training set, y by the first batch",
    )


def banana(
    order: str = "left_to_right",
    seed: int = 0,
    batches: int = 10,
    *,
    data_dir: str | Path | None = None,
    num_batches: int | None = None,
    max_test: int | None = None,
) -> Stream:
    """The banana classification data, labels 0 and 1, 400 train and 4,900 test.

    Args:
        order: Arrival by the first input, ``"left_to_right"`` or ``"right_to_left"``,
            or ``"random"``.
        seed: Seed of the random order.
        batches: Number of batches.
        data_dir: Where ``banana_train_rows.csv`` is; beside the script by default.
        num_batches: Only so many of the batches; all test rows stay.
        max_test: At most so many test rows.

    Returns:
        The stream; inputs are standardised as they come (over all 5,300 rows).
    """
    datasets = _optional("river.datasets", "river")
    rows = np.loadtxt(
        _file(data_dir or SHIPPED, "banana_train_rows.csv", _shipped_hint()), dtype=int
    )
    x, y = [], []
    for features, label in datasets.Bananas():
        x.append([features["1"], features["2"]])
        y.append(float(label))
    x_all = torch.tensor(x, dtype=torch.float64)
    y_all = torch.tensor(y, dtype=torch.float64)
    is_test = torch.ones(len(y_all), dtype=torch.bool)
    is_test[torch.from_numpy(rows)] = False
    x_train, y_train = x_all[rows], y_all[rows]
    if order == "random":
        index = torch.randperm(len(rows), generator=_generator(seed))
    elif order in ("left_to_right", "right_to_left"):
        descending = order == "right_to_left"
        index = x_train[:, 0].argsort(descending=descending, stable=True)
    else:
        raise ValueError(
            f"order is {order!r}; expected 'left_to_right', 'right_to_left' or "
            "'random'."
        )
    x_train, y_train = x_train[index], y_train[index]
    parts = list(zip(x_train.chunk(batches), y_train.chunk(batches), strict=True))
    kept = _evenly(int(is_test.sum()), max_test)
    return Stream(
        name=f"banana_{order}",
        batches=parts[:num_batches],
        x_test=x_all[is_test][kept],
        y_test=y_all[is_test][kept],
        notes=f"{order}, {batches} batches; labels 0 and 1",
    )


# ---------------------------------------------------------------- made-up streams


def growing_range(
    factor: int = 50,
    batch: int = 100,
    *,
    width: float = 2.0,
    noise: float = 0.1,
    seed: int = 0,
    num_batches: int | None = None,
    num_test: int = 1_000,
) -> Stream:
    """A 1-D stream whose input range grows ``factor``-fold, one piece per batch.

    The target is a draw from a GP with lengthscale 1 and variance 1, as irregular at
    the end as at the start, so the inducing points needed grow with the range.

    Args:
        factor: Number of batches; batch k covers ``[k, k + 1] * width``.
        batch: Size of every batch.
        width: Width of the range of one batch.
        noise: Standard deviation of the noise.
        seed: Seed of function, inputs and noise.
        num_batches: Only so many batches; the test set covers their range.
        num_test: Number of test rows, uniform over the range.

    Returns:
        The stream, not scaled further.
    """
    gen = _generator(seed)
    function = _gp_draw(gen)
    batches = []
    for k in range(factor):
        x = (k + _uniform(batch, gen)) * width
        batches.append(_observe(function, x, noise, gen))
    batches = batches[:num_batches]
    x_test = _uniform(num_test, gen) * width * len(batches)
    return Stream(
        "growing_range",
        batches,
        *_observe(function, x_test, noise, gen),
        notes=f"range grows {len(batches)}-fold; lengthscale 1, noise std {noise}",
    )


def revisiting(
    passes: int = 50,
    batch: int = 100,
    *,
    batches_per_pass: int = 2,
    width: float = 10.0,
    noise: float = 0.1,
    seed: int = 0,
    num_batches: int | None = None,
    num_test: int = 1_000,
) -> Stream:
    """A 1-D stream that sweeps the same range from left to right again and again.

    Args:
        passes: Number of sweeps.
        batch: Size of every batch.
        batches_per_pass: Batches in one sweep.
        width: The range is ``[0, width]``.
        noise: Standard deviation of the noise.
        seed: Seed of function, inputs and noise.
        num_batches: Only so many batches; the test set stays.
        num_test: Number of test rows, uniform over the range.

    Returns:
        The stream, not scaled further; the target is a draw from a GP with
        lengthscale 1 and variance 1.
    """
    gen = _generator(seed)
    function = _gp_draw(gen)
    batches = []
    for _ in range(passes):
        for part in range(batches_per_pass):
            x = (part + _uniform(batch, gen)) * width / batches_per_pass
            batches.append(_observe(function, x, noise, gen))
    return Stream(
        "revisiting",
        batches[:num_batches],
        *_observe(function, _uniform(num_test, gen) * width, noise, gen),
        notes=f"{batches_per_pass} batches a pass; lengthscale 1, noise std {noise}",
    )


def repeated_iid(
    batches: int = 200,
    batch: int = 50,
    *,
    width: float = 10.0,
    noise: float = 0.1,
    seed: int = 0,
    num_batches: int | None = None,
    num_test: int = 1_000,
) -> Stream:
    """A 1-D stream of iid batches: nothing changes, so nothing may drift.

    Args:
        batches: Number of batches.
        batch: Size of every batch.
        width: Inputs are uniform on ``[0, width]``.
        noise: Standard deviation of the noise.
        seed: Seed of function, inputs and noise.
        num_batches: Only so many batches.
        num_test: Number of test rows.

    Returns:
        The stream, not scaled further; the target is a draw from a GP with
        lengthscale 1 and variance 1.
    """
    gen = _generator(seed)
    function = _gp_draw(gen)
    parts = [
        _observe(function, _uniform(batch, gen) * width, noise, gen)
        for _ in range(batches)
    ]
    return Stream(
        "repeated_iid",
        parts[:num_batches],
        *_observe(function, _uniform(num_test, gen) * width, noise, gen),
        notes=f"iid; lengthscale 1, noise std {noise}",
    )


def drift(
    batches: int = 40,
    batch: int = 50,
    *,
    turn: float = 0.5,
    width: float = 6.0,
    noise: float = 0.1,
    seed: int = 0,
    num_batches: int | None = None,
    num_test: int = 300,
) -> Stream:
    r"""A function that changes over time while its inputs stay in one range.

    .. math:: f_t(x) = \cos(2\pi c\,t) f_0(x) + \sin(2\pi c\,t) f_1(x)

    for two independent draws :math:`f_0, f_1` from the same GP and t from 0 to 1: at
    any time it looks alike, but after half a turn (c = 0.5) it is :math:`-f_0`, and
    all that was learnt at the start is wrong.

    Args:
        batches: Number of batches; t goes from 0 at the first to 1 at the last.
        batch: Size of every batch, inputs uniform on ``[0, width]``.
        turn: c, the turns made from the first batch to the last.
        width: Width of the input range.
        noise: Standard deviation of the noise.
        seed: Seed of functions, inputs and noise.
        num_batches: Only so many batches; the test set is as of the last one kept.
        num_test: Number of test rows at every time.

    Returns:
        The stream with ``test_batches``, not scaled further.
    """
    gen = _generator(seed)
    f_0, f_1 = _gp_draw(gen), _gp_draw(gen)

    def at_batch(k: int) -> Callable[[Tensor], Tensor]:
        angle = 2 * math.pi * turn * k / max(batches - 1, 1)
        return lambda x: math.cos(angle) * f_0(x) + math.sin(angle) * f_1(x)

    parts, tests = [], []
    for k in range(batches):
        parts.append(_observe(at_batch(k), _uniform(batch, gen) * width, noise, gen))
        tests.append(_observe(at_batch(k), _uniform(num_test, gen) * width, noise, gen))
    parts, tests = parts[:num_batches], tests[:num_batches]
    return Stream(
        "drift",
        parts,
        *tests[-1],
        notes=f"{turn} turns over {batches} batches; noise std {noise}",
        test_batches=tests,
    )


# ------------------------------------------------------------------------ helpers


def _stream(
    name: str,
    x: Tensor,
    y: Tensor,
    x_test: Tensor,
    y_test: Tensor,
    *,
    first: int,
    batch: int,
    num_batches: int | None,
    max_test: int | None,
    ordered: bool,
    notes: str,
) -> Stream:
    """Cut rows into batches, scale y by the first, and keep the test rows they reach.

    ``ordered`` says that rows arrive in order of their first input.
    """
    sizes = [min(first, len(y))]
    while sum(sizes) < len(y):
        sizes.append(min(batch, len(y) - sum(sizes)))
    mean, std = _moments(y[: sizes[0]])
    y, y_test = (y - mean) / std, (y_test - mean) / std
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    if num_batches is not None and num_batches < len(batches):
        batches = batches[:num_batches]
        if ordered:
            reached = x_test[:, 0] <= batches[-1][0][-1, 0]
            x_test, y_test = x_test[reached], y_test[reached]
    kept = _evenly(len(y_test), max_test)
    return Stream(name, batches, x_test[kept], y_test[kept], notes)


def _time_series(
    name: str,
    series: Tensor,
    first: int,
    batch: int,
    num_batches: int | None,
    thin: int,
    max_test: int | None,
    is_train: Tensor | None = None,
) -> Stream:
    """A series with inputs scaled to [0, 10]; by default every second step trains."""
    step = torch.arange(len(series))
    x = 10 * step.double().unsqueeze(-1) / (len(series) - 1)
    if is_train is None:
        is_train = step % 2 == 0
    return _stream(
        name,
        x[is_train][::thin],
        series[is_train][::thin],
        x[~is_train],
        series[~is_train],
        first=first,
        batch=batch,
        num_batches=num_batches,
        max_test=max_test,
        ordered=True,
        notes="in order of time; x scaled to [0, 10], y standardised by the first "
        "batch",
    )


def _terrain(
    name: str,
    heights: np.ndarray,
    first: int,
    batch: int,
    num_batches: int | None,
    thin: int,
    max_test: int | None,
) -> Stream:
    """A grid of heights: every second row and column trains, row by row."""
    z = torch.from_numpy(heights.astype(np.float64))
    rows, columns = (torch.arange(n) for n in z.shape)
    index = torch.cartesian_prod(rows, columns)  # by row, then by column
    # One scale for both axes: a cell is square on the ground and stays square.
    x, y = 10 * index.double() / (max(z.shape) - 1), z.reshape(-1)
    is_train = (index % 2 == 0).all(-1)
    return _stream(
        name,
        x[is_train][::thin],
        y[is_train][::thin],
        x[~is_train],
        y[~is_train],
        first=first,
        batch=batch,
        num_batches=num_batches,
        max_test=max_test,
        ordered=True,
        notes="row by row; x scaled to [0, 10] x [0, 10], y standardised by the first "
        "batch",
    )


def _gp_draw(gen: torch.Generator, features: int = 500) -> Callable[[Tensor], Tensor]:
    """A draw from a GP (RBF, lengthscale 1, variance 1) by random Fourier features."""
    omega = torch.randn(features, generator=gen, dtype=torch.float64)
    phase = 2 * math.pi * _uniform(features, gen).squeeze(-1)
    weight = torch.randn(features, generator=gen, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return math.sqrt(2 / features) * (torch.cos(x * omega + phase) @ weight)

    return function


def _observe(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    noise: float,
    gen: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Inputs ``(n, 1)`` with noisy values ``(n,)`` of ``function``."""
    y = function(x).reshape(-1)
    return x, y + noise * torch.randn(y.shape, generator=gen, dtype=y.dtype)


def _uniform(n: int, gen: torch.Generator) -> Tensor:
    """Uniform on [0, 1), ``(n, 1)``."""
    return torch.rand(n, 1, generator=gen, dtype=torch.float64)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over rows; a constant column is not scaled."""
    mean, std = values.mean(0), values.std(0, correction=0)
    return mean, torch.where(std > 0, std, torch.ones_like(std))


def _evenly(n: int, most: int | None) -> Tensor:
    """Indices of at most ``most`` of ``n`` rows, evenly spaced."""
    if most is None or most >= n:
        return torch.arange(n)
    return torch.linspace(0, n - 1, most, dtype=torch.float64).round().long()


def _optional(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"This stream needs {package}: pip install {package}"
        ) from error


def _file(data_dir: str | Path | None, name: str, hint: str) -> Path:
    """The file, or an error that says which file is missing and how to get it."""
    if data_dir is None:
        raise FileNotFoundError(
            f"{name} is not shipped and data_dir is not set. To make it, {hint}; then "
            "pass its directory as data_dir."
        )
    file = Path(data_dir) / name
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist. To make it, {hint}.")
    return file


def _shipped_hint() -> str:
    return "take it from scripts/data of the repository"

r"""The memory of a stream: a regression data set of bounded size.

* *raw data*, as they came: nothing about them is approximated, and those of other
  likelihoods can still be read anew;
* *rows*, pseudo-observations :math:`U f(Z) \approx g` of the function at points
  :math:`Z` (see :mod:`torch_ssgp.functional`), once there was more than the memory may
  hold.

Until then a model is the exact Gaussian process on all data. It stores likelihoods, not
a posterior: the prior is counted once, and hyperparameters may change at any time.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.buffers import Buffers, stored
from torch_ssgp.exceptions import StateError
from torch_ssgp.functional import PseudoObservations


class Data(NamedTuple):
    r"""Raw data, those of the memory first.

    Attributes:
        x: ``(*batch, n, d)``.
        y: ``(*batch, n)``, targets as they came.
        noise: ``(*batch, n)``, known noise variances, zero where there is none.
        weight: ``(n,)`` or ``(*batch, n)``, powers of their likelihoods, zero where a
            stream has no reading; ``None`` where all are one.
        time: ``(n,)`` or ``(*batch, n)``, how many data had come before each; ``None``
            where that does not matter.
    """

    x: Tensor
    y: Tensor
    noise: Tensor | None = None
    weight: Tensor | None = None
    time: Tensor | None = None

    @property
    def num_data(self) -> Tensor | int:
        """The number of data, each counted with its weight."""
        return self.y.size(-1) if self.weight is None else self.weight.sum(-1)

    @property
    def seen(self) -> Tensor | None:
        """Where there is a reading, ``(n,)`` or ``(*batch, n)``; ``None``: all."""
        return None if self.weight is None else self.weight > 0

    def detached(self) -> Data:
        """The same without a graph."""
        x, *others = (None if t is None else t.detach() for t in self)
        assert x is not None and others[0] is not None
        return Data(x, others[0], *others[1:])

    def narrow(self, start: int, count: int) -> Data:
        """``count`` of the data, from ``start`` on."""
        rest = (
            None if each is None else each.narrow(-1, start, count) for each in self[2:]
        )
        return Data(
            self.x.narrow(-2, start, count), self.y.narrow(-1, start, count), *rest
        )

    def joined(self, new: Data) -> Data:
        """These and new data; what only one of them has gets its default."""
        if self.y.size(-1) == 0 and self.weight is None and self.noise is None:
            return new
        parts = (self, new)
        noise = weight = time = None
        if any(d.noise is not None for d in parts):
            both = (
                torch.zeros_like(d.y) if d.noise is None else d.noise for d in parts
            )
            noise = _side_by_side(*both)
        if any(d.weight is not None for d in parts):
            ones = (d.y.new_ones(d.y.size(-1)) for d in parts)
            both = (
                one if d.weight is None else d.weight
                for d, one in zip(parts, ones, strict=True)
            )
            weight = _side_by_side(*both)
        if self.time is not None and new.time is not None:
            time = _side_by_side(self.time, new.time)
        x = torch.cat(fn.broadcast_matrices(self.x, new.x), -2)
        return Data(x, _side_by_side(self.y, new.y), noise, weight, time)


def _side_by_side(u: Tensor, v: Tensor) -> Tensor:
    return torch.cat(fn.broadcast_rows(u, v), -1)


class GaussianData(NamedTuple):
    """Data as Gaussian observations, whatever their likelihood.

    Attributes:
        target: ``(*batch, n)``, the targets, or those of their sites.
        noise: ``(*batch, n)`` variances, or ``None`` if it is the noise that all rows
            share.
        offset: ``(*batch,)``, what is to be added to the residual so that the evidence
            stays the bound.
    """

    target: Tensor
    noise: Tensor | None
    offset: Tensor


class Rows(NamedTuple):
    """The compressed part of a memory.

    Attributes:
        points: ``(*batch, m, d)``.
        past: Pseudo-observations at these points.
        time: ``(m,)`` or ``(*batch, m)``, when the points were data.
    """

    points: Tensor
    past: PseudoObservations
    time: Tensor | None = None


class Counts(NamedTuple):
    """What a stream has counted, in data unless it says otherwise.

    Attributes:
        num_updates: Updates so far.
        arrived: Data that came, forgotten ones too.
        started_at: Data behind the last fresh start of hyperparameters; zero if nothing
            was learned yet.
        since_start: Data that came after it.
        since_learning: Data that came after hyperparameters were last learned.
        num_outliers: Data that were left out as outliers, ever.
        question_at: Raw data that came before an alarm that is still open.
        question_due: Raw data at which it is asked again; zero if none is open.
    """

    num_updates: float = 0.0
    arrived: float = 0.0
    started_at: float = 0.0
    since_start: float = 0.0
    since_learning: float = 0.0
    num_outliers: float = 0.0
    question_at: float = 0.0
    question_due: float = 0.0

    def after(self, num_new: int) -> Counts:
        """These after an update with so many data."""
        return self._replace(
            num_updates=self.num_updates + 1,
            arrived=self.arrived + num_new,
            since_start=self.since_start + num_new,
            since_learning=self.since_learning + num_new,
        )


TRUSTED = 50.0  # log odds of hyperparameters that are not young
ALARMS = 3  # kinds, see :mod:`torch_ssgp.update.change`


class Memory(Buffers):
    r"""What a stream has said, of a size that does not grow with it.

    Args:
        batch_shape: Shape of independent streams.

    Attributes:
        points: ``(*batch, r, d)``: those of the rows, then the inputs of raw data.
        time: ``(r,)`` or ``(*batch, r)``, how many data had come before each.
        U: ``(*batch, p, m)``, rows observed at the first ``m`` points.
        g: ``(*batch, p)``, their targets.
        row_residual: ``(*batch,)``, what no function at those points explains.
        row_data: ``()`` or ``(*batch,)``, data behind the rows; fractional after
            forgetting.
        y: ``(*batch, k)``, targets of the raw data, as they came.
        target: ``(*batch, k)``, the same as Gaussian observations: their sites.
        noise: ``(*batch, k)``, noise variances of these; zero where it is the noise
            of the likelihood.
        weight: ``(k,)`` or ``(*batch, k)``, powers of their likelihoods, below one
            after forgetting, zero where a stream had no reading or it was left out.
        error: ``(*batch, k)``, their standardised errors when they came.
        offset: ``(*batch,)``, residual that belongs to the sites.
        sunk: ``(*batch,)``, nats that compressions have lost.
        bound: ``(*batch,)``, bound on the evidence that the last update reported.
        shared_noise: Whether the noise of the rows follows the likelihood.
        extremes: ``(*batch, e)``, smallest and largest target seen, if any was; of a
            stream without a reading infinity and its opposite.
        odds: ``(*batch,)``, log odds of the learned hyperparameters against a mixture,
            see :mod:`torch_ssgp.update.young`; 50 where the model is not young.
        rate: ``(*batch,)``, at which the function drifts, per datum; zero where it does
            not.
        alarm: ``(*batch, 3)``, log Bayes factors against the model so far.
        alarmed: ``(*batch, 3)``, how many raw data came before each of them began.
        counts: ``(8,)``, see :class:`Counts`.
        jitter: ``()``, the relative jitter that an update had to raise; else zero. From
            then on it replaces a smaller ``settings.jitter``.
        curvature: ``(*batch, h, h)``, inverse Hessian that learning met last; it tells
            what more learning would win. Without elements if nothing was learned.
        base: ``(3,)``, of a branch (:func:`torch_ssgp.branch`): the key of the model
            that it continues, and how many of the first rows and of the first raw data
            it has from there. They are never mixed with those that were added. Without
            elements where the memory is no branch.
        inherited: ``(*batch, 4)``, their parts of ``row_residual``, ``row_data`` and
            ``sunk``, and what forgetting has left of them.
    """

    SIZES = {
        "points": "rd",
        "time": "r",
        "U": "pm",
        "g": "p",
        "row_residual": "",
        "row_data": "",
        "y": "k",
        "target": "k",
        "noise": "k",
        "weight": "k",
        "error": "k",
        "offset": "",
        "sunk": "",
        "bound": "",
        "shared_noise": "",
        "extremes": "e",
        "odds": "",
        "rate": "",
        "alarm": "q",
        "alarmed": "q",
        "counts": "c",
        "jitter": "",
        "curvature": "hh",
        "base": "b",
        "inherited": "i",
    }

    def __init__(self, batch_shape: torch.Size = torch.Size()) -> None:
        super().__init__()
        for name, value in nothing_known(batch_shape).items():
            self.register_buffer(name, value)

    def _check_sizes(self, values: dict[str, Tensor], prefix: str) -> None:
        super()._check_sizes(values, prefix)
        num_points, parts = values["points"].size(-2), (values["U"], values["y"])
        if num_points != sum(part.size(-1) for part in parts):
            raise StateError(
                f"{prefix}points has {num_points} points in the state loaded, which "
                "does not go with the rest of the Memory; nothing was loaded. Use a "
                "state as it came from state_dict()."
            )

    # -- what is in it --------------------------------------------------------------

    @property
    def num_points(self) -> int:
        """The number of points, those of raw data included."""
        return self.points.size(-2)

    @property
    def num_raw(self) -> int:
        """The number of raw data."""
        return self.y.size(-1)

    @property
    def num_rows(self) -> int:
        """The number of rows, raw data included: what ``memory_size`` bounds."""
        return self.g.size(-1) + self.y.size(-1)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was remembered yet."""
        return self.before["points"].size(-2) == 0

    @property
    def num_dims(self) -> int | None:
        """The number of inputs, if any was remembered."""
        return None if self.is_empty else self.before["points"].size(-1)

    @property
    def num_data(self) -> Tensor:
        """``()``, data seen; ``(*batch,)`` where streams forgot or missed some."""
        now = copy(self)
        return now.row_data + now.weight.sum(-1)

    @property
    def compressed(self) -> Rows:
        """The rows, and the points they observe."""
        now = copy(self)
        past = PseudoObservations(now.U, now.g, now.row_residual, now.row_data)
        count = now.U.size(-1)
        return Rows(now.points[..., :count, :], past, now.time[..., :count])

    @property
    def is_branch(self) -> bool:
        """Whether it continues another model, see :func:`torch_ssgp.branch`."""
        return self.base.numel() > 0

    @property
    def of_base(self) -> PseudoObservations:
        """Those of the rows that are of the base of a branch."""
        now = copy(self)
        num_rows, (rho, n, *_) = int(now.base[1]), now.inherited.unbind(-1)
        n = n if now.row_data.ndim else n.flatten()[0]  # of all streams
        return PseudoObservations(
            now.U[..., :num_rows, :], now.g[..., :num_rows], rho, n
        )

    @property
    def raw_x(self) -> Tensor:
        """Inputs of the raw data, ``(*batch, k, d)``."""
        now = copy(self)
        return now.points[..., now.U.size(-1) :, :]

    @property
    def residual(self) -> Tensor:
        """``(*batch,)``, what no function at the points explains."""
        now = copy(self)
        return now.row_residual + now.offset

    def count(self) -> Counts:
        """What the stream has counted, as numbers: a device waits here."""
        return Counts(*self.counts.tolist())


def nothing_known(batch_shape: torch.Size) -> dict[str, Tensor]:
    """Buffers of a memory that is empty."""
    shapes: dict[str, tuple[int, ...]] = {
        "points": (*batch_shape, 0, 0),
        "time": (0,),
        "U": (*batch_shape, 0, 0),
        "g": (*batch_shape, 0),
        "row_residual": batch_shape,
        "row_data": (),
        "y": (*batch_shape, 0),
        "target": (*batch_shape, 0),
        "noise": (*batch_shape, 0),
        "weight": (0,),
        "error": (*batch_shape, 0),
        "offset": batch_shape,
        "sunk": batch_shape,
        "bound": batch_shape,
        "extremes": (*batch_shape, 0),
        "rate": batch_shape,
        "alarm": (*batch_shape, ALARMS),
        "alarmed": (*batch_shape, ALARMS),
        "counts": (len(Counts()),),
        "jitter": (),
        "curvature": (0, 0),
        "inherited": (*batch_shape, 0),
    }
    values = {
        name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()
    }
    values["odds"] = torch.full(batch_shape, TRUSTED, dtype=torch.float64)
    values["base"] = torch.zeros(0, dtype=torch.int64)
    values["shared_noise"] = torch.tensor(False)
    return values


def from_version_02(state: dict[str, Any], prefix: str) -> None:
    """Bring the state of a model of version 0.2 into the form of now, in place.

    It has a summary besides its memory, of which little is left to know.

    Args:
        state: The state.
        prefix: Of the names that are the model's.
    """

    def taken(part: str) -> dict[str, Tensor]:
        names = [name for name in state if name.startswith(prefix + part)]
        return {name.removeprefix(prefix + part): state.pop(name) for name in names}

    try:
        new = _from_version_02(taken("summary."), taken("memory."))
    except KeyError as error:
        raise StateError(
            f"The state is of version 0.2 and has no tensor {error}; nothing was "
            "loaded. Pass a state with all its tensors."
        ) from error
    state.update({f"{prefix}memory.{name}": value for name, value in new.items()})


def _from_version_02(
    summary: dict[str, Tensor], old: dict[str, Tensor]
) -> dict[str, Tensor]:
    g, arrived = old["g"], (old["row_data"] + old["weight"].sum(-1)).max()
    counts = Counts(
        num_updates=float(summary["num_updates"]),
        arrived=float(arrived),
        started_at=float(old["started_at"]),
        since_start=float(old["since_start"]),
        since_learning=float(old["since_learning"]),
    )
    names = ("U", "g", "residual", "num_data")
    past = PseudoObservations(*(summary[name] for name in names))
    rows = fn.recall(past, summary["prior_cholesky"], summary["prior_mean"])
    new = nothing_known(g.shape[:-1]) | {
        "time": arrived + torch.arange(-old["points"].size(-2), 0).to(g),
        "error": torch.zeros_like(old["y"]),
        "bound": fn.evidence(rows, summary["noise_scale"]),
        "jitter": summary["jitter"],
        "counts": g.new_tensor(counts),
    }
    if int(old["base_key"]):
        parts = (old[f"base_{name}"].to(g) for name in ("residual", "data", "power"))
        rho, n, power = (part.expand(g.shape[:-1]) for part in parts)
        key = [old[f"base_{name}"] for name in ("key", "rows", "raw")]
        new["base"] = torch.stack(key)
        new["inherited"] = torch.stack([rho, n, torch.zeros_like(n), power], -1)
    return {
        name: new[name] if name in _SINCE_VERSION_02 else old[name]
        for name in Memory.SIZES
    }


_SINCE_VERSION_02 = (
    "time",
    "error",
    "sunk",
    "bound",
    "odds",
    "rate",
    "alarm",
    "alarmed",
    "counts",
    "jitter",
    "curvature",
    "base",
    "inherited",
)


def buffers(
    rows: Rows, data: Data, sites: GaussianData, shared_noise: bool
) -> dict[str, Tensor]:
    """Buffers of the data set, as tensors of their own.

    Args:
        rows: The compressed part.
        data: Raw data.
        sites: The same as Gaussian observations, with the noise to remember.
        shared_noise: Whether the noise of the rows follows the likelihood.
    """
    past, weight, noise = rows.past, data.weight, sites.noise
    if weight is None:
        weight = past.g.new_ones(data.y.size(-1))
    if noise is None:
        noise = torch.zeros_like(sites.target)
    assert rows.time is not None and data.time is not None
    values = {
        "points": torch.cat(fn.broadcast_matrices(rows.points, data.x), -2),
        "time": _side_by_side(rows.time, data.time),
        "U": past.U,
        "g": past.g,
        "row_residual": past.rho,
        "row_data": past.n,
        "y": data.y,
        "target": sites.target,
        "noise": noise.expand(sites.target.shape),
        "weight": weight,
        "offset": sites.offset,
        "shared_noise": torch.tensor(shared_noise, device=past.g.device),
    }
    return {name: stored(value) for name, value in values.items()}


def with_raw(before: dict[str, Tensor], new: Data, error: Tensor) -> dict[str, Tensor]:
    """Buffers that change when raw data of the noise of all rows are added.

    Args:
        before: All buffers.
        new: The data, with noises of zero, weights and times.
        error: ``(*batch, n)``, their standardised errors.
    """
    added = {"y": new.y, "target": new.y, "noise": new.noise, "weight": new.weight}
    added |= {"time": new.time, "error": error}
    values = {
        name: _side_by_side(before[name], value)
        for name, value in added.items()
        if value is not None
    }
    values["points"] = torch.cat(fn.broadcast_matrices(before["points"], new.x), -2)
    values["extremes"] = extremes(before["extremes"], new)
    return values


def extremes(before: Tensor, data: Data) -> Tensor:
    """Smallest and largest target so far, ``(*batch, 2)``; as before if none came."""
    y, seen = data.y, data.seen
    if y.size(-1) == 0:
        return before
    low, high = y, y
    if seen is not None:
        low, high = y.where(seen, torch.inf), y.where(seen, -torch.inf)
    low, high = low.amin(-1), high.amax(-1)
    if before.numel():
        low, high = low.minimum(before[..., 0]), high.maximum(before[..., 1])
    return torch.stack([low, high], -1)

r"""The memory of a stream: a small regression data set, finer than the model.

A model computes with its inducing points. What was seen is kept apart from them, so
that neither their number nor the current hyperparameters decide what is remembered:

* *raw data*, as they came: nothing about them is approximated, and those of other
  likelihoods can still be read anew;
* *rows*, pseudo-observations :math:`U f(Z_s) \approx g` of the function at the first
  points of the memory (see :mod:`torch_ssgp.functional`), once there are more points
  than the memory may hold.

    remember   append data: exact
    compress   choose points, project data and rows on them, one QR

While a stream has no more data than the memory has room for, every update is batch
inference on all data. Afterwards only what that many points cannot say is lost.
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
    r"""Data as an update sees them: raw data of the memory first.

    Attributes:
        x: ``(*batch, n, d)``.
        y: ``(*batch, n)``, targets as they came.
        noise: ``(*batch, n)``, known noise variances, zero where there is none.
        weight: ``(n,)`` or ``(*batch, n)``, powers of their likelihoods, zero where a
            stream has no reading; ``None`` where all are one.
    """

    x: Tensor
    y: Tensor
    noise: Tensor | None = None
    weight: Tensor | None = None

    @property
    def num_data(self) -> Tensor | int:
        """The number of data, each counted with its weight."""
        return self.y.size(-1) if self.weight is None else self.weight.sum(-1)

    @property
    def seen(self) -> Tensor | None:
        """Where there is a reading, ``(n,)`` or ``(*batch, n)``; ``None``: all."""
        return None if self.weight is None else self.weight > 0

    def narrow(self, start: int, count: int) -> Data:
        """``count`` of the data, from ``start`` on."""
        return Data(
            self.x.narrow(-2, start, count),
            self.y.narrow(-1, start, count),
            None if self.noise is None else self.noise.narrow(-1, start, count),
            None if self.weight is None else self.weight.narrow(-1, start, count),
        )


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
    """The compressed part of a memory: pseudo-observations ``past`` at ``points``."""

    points: Tensor
    past: PseudoObservations


class Memory(Buffers):
    r"""What a stream has said, of a size that does not grow with it.

    Args:
        batch_shape: Shape of independent streams.

    Attributes:
        points: ``(*batch, r, d)``: those of the rows, then the inputs of raw data.
        U: ``(*batch, p, m)``, rows observed at the first ``m`` points.
        g: ``(*batch, p)``, their targets.
        row_residual: ``(*batch,)``, what no function at those points explains.
        row_data: ``()``, data behind the rows; fractional after forgetting.
        y: ``(*batch, k)``, targets of the raw data, as they came.
        target: ``(*batch, k)``, the same as Gaussian observations: their sites.
        noise: ``(*batch, k)``, noise variances of these; zero where it is the noise
            of the likelihood.
        weight: ``(k,)`` or ``(*batch, k)``, powers of their likelihoods, below one
            after forgetting, zero where a stream had no reading.
        offset: ``(*batch,)``, residual that belongs to the sites.
        shared_noise: Whether the noise of the rows follows the likelihood.
        extremes: ``(*batch, e)``, smallest and largest target seen, if any was; of a
            stream without a reading infinity and its opposite.
        started_at: ``()``, data behind the last fresh start of hyperparameters; zero
            if nothing was learned yet.
        since_start: ``()``, data that came after it.
        since_learning: ``()``, data that came after hyperparameters were last learned.
        loss: ``(*batch,)``, nats per datum that were still to be won then.
        lost: ``(*batch,)``, nats that they lose now, over all data.
        doubt: ``(*batch, q)``, evidence that the stream has changed, in nats, for every
            power of forgetting; see :mod:`torch_ssgp.update.forgetting`.
        doubted: ``()``, data that came since there is a doubt.
        waiting: ``()``, data until a new beginning may be tried again.
        noticed: ``(*batch,)``, data that it took to notice a drift; zero without one.
        since_noticed: ``(*batch,)``, data that came after it.
        base_key: ``()``, names the model that a branch continues, see
            :func:`torch_ssgp.branch`; zero where the memory is no branch. What that
            model knew is kept apart from what was added, and never mixed with it:
        base_rows: ``()``, how many rows are of the base, the first ones.
        base_raw: ``()``, how many raw data are of the base, the first ones.
        base_residual: ``(*batch,)``, its part of ``row_residual``.
        base_data: ``()``, its part of ``row_data``.
        base_power: ``()``, what forgetting has left of it.
    """

    SIZES = {
        "points": "rd",
        "U": "pm",
        "g": "p",
        "row_residual": "",
        "row_data": "",
        "y": "k",
        "target": "k",
        "noise": "k",
        "weight": "k",
        "offset": "",
        "shared_noise": "",
        "extremes": "e",
        "started_at": "",
        "since_start": "",
        "since_learning": "",
        "loss": "",
        "lost": "",
        "doubt": "q",
        "doubted": "",
        "waiting": "",
        "noticed": "",
        "since_noticed": "",
        "base_key": "",
        "base_rows": "",
        "base_raw": "",
        "base_residual": "",
        "base_data": "",
        "base_power": "",
    }

    def __init__(self, batch_shape: torch.Size = torch.Size()) -> None:
        super().__init__()
        empty = {
            "points": torch.zeros(*batch_shape, 0, 0),
            "U": torch.zeros(*batch_shape, 0, 0),
            "g": torch.zeros(*batch_shape, 0),
            "row_residual": torch.zeros(batch_shape),
            "row_data": torch.zeros(()),
            "y": torch.zeros(*batch_shape, 0),
            "target": torch.zeros(*batch_shape, 0),
            "noise": torch.zeros(*batch_shape, 0),
            "weight": torch.zeros(0),
            "offset": torch.zeros(batch_shape),
            "extremes": torch.zeros(*batch_shape, 0),
            "started_at": torch.zeros(()),
            "since_start": torch.zeros(()),
            "since_learning": torch.zeros(()),
            "loss": torch.zeros(batch_shape),
            "lost": torch.zeros(batch_shape),
            "doubt": torch.zeros(*batch_shape, 0),
            "doubted": torch.zeros(()),
            "waiting": torch.zeros(()),
            "noticed": torch.zeros(batch_shape),
            "since_noticed": torch.zeros(batch_shape),
        }
        for name, value in empty.items():
            self.register_buffer(name, value.double())
        self.register_buffer("shared_noise", torch.tensor(False))
        for name, value in no_base(self.offset).items():
            self.register_buffer(name, value)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """A state saved before branches existed is none, and waits for nothing.

        Nor does it drift.
        """
        if prefix + "doubted" in state_dict:
            nothing = torch.zeros_like(state_dict[prefix + "doubted"])
            state_dict.setdefault(prefix + "waiting", nothing)
            offset = state_dict[prefix + "offset"]
            for name in ("noticed", "since_noticed"):
                state_dict.setdefault(prefix + name, torch.zeros_like(offset))
            state_dict.pop(prefix + "drifts", None)
            for name, value in no_base(offset).items():
                state_dict.setdefault(prefix + name, value)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

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
    def is_empty(self) -> bool:
        """Whether nothing was remembered yet."""
        return self.num_points == 0

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
        return Rows(now.points[..., : now.U.size(-1), :], past)

    @property
    def of_base(self) -> PseudoObservations:
        """Those of the rows that are of the base of a branch."""
        now = copy(self)
        num_rows = int(now.base_rows)
        return PseudoObservations(
            now.U[..., :num_rows, :],
            now.g[..., :num_rows],
            now.base_residual,
            now.base_data,
        )

    @property
    def raw_x(self) -> Tensor:
        """Inputs of the raw data, ``(*batch, k, d)``."""
        now = copy(self)
        return now.points[..., now.U.size(-1) :, :]

    def pseudo_observations(self, noise: Tensor, s: Tensor) -> PseudoObservations:
        """All of it as pseudo-observations at ``points``.

        Args:
            noise: ``(*batch, k)`` or broadcastable, noise variances of raw data.
            s: ``(*batch,)`` noise scale of the rows.
        """
        now = copy(self)
        _, past = now.compressed
        past = past._replace(rho=past.rho + now.offset)
        if now.num_raw == 0:
            return past
        return fn.observe(past, now.target, noise, s, now.weight)

    @property
    def rows(self) -> Tensor:
        """``(*batch, rows, r)``: what was observed, one row per observation.

        In units of the noise that all share, or of each row's own noise.
        """
        now = copy(self)
        noise = torch.where(now.noise == 0, 1.0, now.noise)
        return now.pseudo_observations(noise, torch.ones_like(now.residual)).U

    @property
    def residual(self) -> Tensor:
        """``(*batch,)``, what no function at the points explains."""
        now = copy(self)
        return now.row_residual + now.offset


def buffers(
    rows: Rows, data: Data, sites: GaussianData, shared_noise: bool
) -> dict[str, Tensor]:
    """Buffers of a memory, as tensors of their own.

    Args:
        rows: The compressed part.
        data: Raw data.
        sites: The same as Gaussian observations, with the noise to remember.
        shared_noise: Whether the noise of the rows follows the likelihood.
    """
    past, weight, noise = rows.past, data.weight, sites.noise
    if weight is None:
        weight = past.g.new_ones(data.x.size(-2))
    if noise is None:
        noise = torch.zeros_like(sites.target)
    values = {
        "points": torch.cat(fn.broadcast_matrices(rows.points, data.x), -2),
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


def memory_of(summary: dict[str, Tensor]) -> dict[str, Tensor]:
    """Buffers of a memory that knows what a summary knows, at its inducing points.

    Args:
        summary: Buffers of a summary.
    """
    past = PseudoObservations(
        summary["U"], summary["g"], summary["residual"], summary["num_data"]
    )
    z, nothing = summary["inducing_points"], summary["g"][..., :0]
    sites = GaussianData(nothing, None, torch.zeros_like(past.rho))
    shared_noise = bool(summary["shared_noise"])
    values = buffers(Rows(z, past), Data(z[..., :0, :], nothing), sites, shared_noise)
    return {
        **values,
        "extremes": past.rho.new_zeros(*past.rho.shape, 0),
        "started_at": past.n.clone(),
        "since_start": torch.zeros_like(past.n),
        "since_learning": torch.zeros_like(past.n),
        "loss": torch.zeros_like(past.rho),
        "lost": torch.zeros_like(past.rho),
        "doubt": past.rho.new_zeros(*past.rho.shape, 0),
        "doubted": torch.zeros_like(past.n),
        "waiting": torch.zeros_like(past.n),
        "noticed": torch.zeros_like(past.rho),
        "since_noticed": torch.zeros_like(past.rho),
        **no_base(past.rho),
    }


def no_base(residual: Tensor) -> dict[str, Tensor]:
    """The buffers that begin with ``base`` of a memory that is no branch.

    Args:
        residual: ``(*batch,)``, any tensor of that shape.
    """
    zero = torch.zeros((), dtype=torch.int64, device=residual.device)
    return {
        "base_key": zero,
        "base_rows": zero.clone(),
        "base_raw": zero.clone(),
        "base_residual": torch.zeros_like(residual),
        "base_data": residual.new_zeros(()),
        "base_power": residual.new_ones(()),
    }


# -- remembering ------------------------------------------------------------------


def remember(old: Data, new: Data) -> Data:
    """Append new data to the raw ones; if any has a noise of its own, all get one.

    Args:
        old: Raw data of the memory.
        new: New data.
    """
    if old.y.size(-1) == 0:
        return new
    noise = None
    if old.noise is not None or new.noise is not None:
        noise = _joined(
            *(torch.zeros_like(d.y) if d.noise is None else d.noise for d in (old, new))
        )
    weight = None
    if old.weight is not None or new.weight is not None:
        weight = _joined(
            *(
                d.y.new_ones(d.y.size(-1)) if d.weight is None else d.weight
                for d in (old, new)
            )
        )
    return Data(
        torch.cat(fn.broadcast_matrices(old.x, new.x), -2),
        _joined(old.y, new.y),
        noise,
        weight,
    )


def _joined(u: Tensor, v: Tensor) -> Tensor:
    return torch.cat(fn.broadcast_rows(u, v), -1)


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


def no_raw_data(data: Data) -> tuple[Data, GaussianData]:
    """No raw data, in the shape of these."""
    nothing = data.y[..., :0]
    residual = data.y.new_zeros(data.y.shape[:-1])
    return Data(data.x[..., :0, :], nothing), GaussianData(nothing, None, residual)

r"""The memory of a stream: a small regression data set, finer than the model.

A model computes with its inducing points. What was seen is kept apart from them, so
that neither their number nor the hyperparameters of the moment decide what is
remembered:

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
from gpytorch.kernels import RBFKernel
from torch import Tensor, nn

from torch_ssgp import functional as fn
from torch_ssgp.exceptions import ShapeError, StateError
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.inducing import Candidates, GreedyInformation
from torch_ssgp.validation import expands_to

# Raw data that may wait for the next compression, as a share of the memory: a stream of
# single points is then compressed once for many updates.
OVERFLOW = 0.25
# Lengthscale under which points are judged, in units of their spacing.
ROUGHNESS = 1.5


class Data(NamedTuple):
    r"""Data as an update sees them, old raw ones first.

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
        """Only ``count`` of them, from ``start`` on."""
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


class Buffers(nn.Module):
    """Buffers that change their size, keep their dtype, and are replaced all at once.

    Subclasses say in ``SIZES`` which dimensions each buffer has after those of the
    batch: the same letter stands for the same size.
    """

    SIZES: dict[str, str]
    g: Tensor

    def replace(self, **buffers: Tensor) -> None:
        """Take new buffers in one assignment: a reader sees the old ones, or these."""
        self.__dict__["_buffers"] = self._buffers | buffers

    def __copy__(self) -> Any:
        """The same buffers, which stay when those of this one are replaced."""
        new = type(self).__new__(type(self))
        new.__dict__ = {**self.__dict__, "_buffers": dict(self._buffers)}
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Deep copies and pickles hold values: a fantasy's graph can be neither."""
        buffers = {name: buffer.detach() for name, buffer in self.named_buffers()}
        return {**self.__dict__, "_buffers": buffers}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move with the model, but stay in the dtype of the algebra."""
        buffers = {}
        for name, buffer in self.named_buffers():
            device = fn(buffer.new_empty(0)).device
            buffers[name] = buffer if device == buffer.device else buffer.to(device)
        self.replace(**buffers)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Take sizes and dtypes of what is loaded; the default would insist on its own.

        Buffers are in the dtype of the algebra, whatever that of the model.
        """
        g = state_dict.get(prefix + "g", self.g)
        if g.shape[:-1] != self.g.shape[:-1]:
            raise ShapeError(
                f"{prefix}g has shape {tuple(g.shape)} in the state loaded, "
                f"{tuple(self.g.shape)} here: the two models have different batch "
                "shapes. Build the model with the batch_shape of the saved one."
            )
        found = {
            name: state_dict[prefix + name]
            for name in self.SIZES
            if prefix + name in state_dict
        }
        if found:
            self._check_sizes(found, prefix)
        for name, value in found.items():
            # Also where the sizes agree: caches know their buffers by identity.
            setattr(self, name, torch.empty_like(value, device=self.g.device))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _check_sizes(self, values: dict[str, Tensor], prefix: str) -> None:
        """Raise unless these are the buffers of one object."""
        missing = [prefix + name for name in self.SIZES if name not in values]
        what = type(self).__name__
        if missing:
            raise StateError(
                f"The state has a {what} without {', '.join(missing)}; nothing was "
                "loaded. It is loaded with all its tensors, or not at all."
            )
        batch_shape = values["g"].shape[:-1]
        sizes: dict[str, int] = {}
        for name, letters in self.SIZES.items():
            shape = values[name].shape
            cut = len(shape) - len(letters)
            if not (
                cut >= 0
                and expands_to(shape[:cut], batch_shape)
                and all(
                    sizes.setdefault(letter, size) == size
                    for letter, size in zip(letters, shape[cut:], strict=True)
                )
            ):
                raise StateError(
                    f"{prefix}{name} has shape {tuple(shape)} in the state loaded, "
                    f"which does not go with the rest of the {what}; nothing was "
                    "loaded. Use a state as it came from state_dict()."
                )


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
        loss: ``(*batch,)``, nats per datum that the inducing points lost then.
        lost: ``(*batch,)``, nats that they lose now, over all data.
        doubt: ``(*batch, q)``, evidence that the stream has changed, in nats, for every
            power of forgetting; see :mod:`torch_ssgp.update.forgetting`.
        doubted: ``()``, data that came since there is a doubt.
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
        "base_key": "",
        "base_rows": "",
        "base_raw": "",
        "base_residual": "",
        "base_data": "",
        "base_power": "",
    }

    points: Tensor
    U: Tensor
    g: Tensor
    row_residual: Tensor
    row_data: Tensor
    y: Tensor
    target: Tensor
    noise: Tensor
    weight: Tensor
    offset: Tensor
    shared_noise: Tensor
    extremes: Tensor
    started_at: Tensor
    since_start: Tensor
    since_learning: Tensor
    loss: Tensor
    lost: Tensor
    doubt: Tensor
    doubted: Tensor
    base_key: Tensor
    base_rows: Tensor
    base_raw: Tensor
    base_residual: Tensor
    base_data: Tensor
    base_power: Tensor

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
        }
        for name, value in empty.items():
            self.register_buffer(name, value.double())
        self.register_buffer("shared_noise", torch.tensor(False))
        for name, value in no_base(self.offset).items():
            self.register_buffer(name, value)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """A state from before there were branches is none."""
        if prefix + "doubted" in state_dict:
            for name, value in no_base(state_dict[prefix + "offset"]).items():
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


def stored(value: Tensor) -> Tensor:
    """A tensor of its own, laid out as a loaded one would be: same bits afterwards."""
    return value.detach().clone(memory_format=torch.contiguous_format)


# -- remembering ------------------------------------------------------------------


def remember(old: Data, new: Data) -> Data:
    """New data below the raw ones of before; with a noise each, where any has one.

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


# -- compressing ------------------------------------------------------------------


def is_full(num_points: int, capacity: int) -> bool:
    """Whether so many points are more than a memory of this capacity lets wait."""
    return num_points > capacity + int(OVERFLOW * capacity)


def choose_points(
    rows: Rows, x: Tensor, weight: Tensor, capacity: int, jitter: float, kept: Tensor
) -> Tensor:
    """The points that a memory goes on with.

    They are judged under a rough kernel of our own, with lengthscales of the spacing
    that so many points have: what the present hyperparameters believe must not throw
    away what would refute them. Inputs that coincide share a point.

    Args:
        rows: The compressed part so far.
        x: ``(*batch, n, d)``, inputs of raw data.
        weight: ``(*batch, n)``, their precision in units of the rows.
        capacity: Number of points allowed.
        jitter: Relative jitter.
        kept: ``(*batch, m, d)``, points to keep in any case; perhaps none.

    Returns:
        ``(*batch, at most capacity, d)``, those to be kept first.
    """
    if kept.size(-2) >= capacity:
        return kept
    points = torch.cat([kept, rows.points, x], -2)
    distinct = points[..., first_of_each(points), :]
    if distinct.size(-2) <= capacity:
        return distinct
    candidates = Candidates(
        kernel=_rough_kernel(points, capacity),
        z_a=kept,
        z_s=rows.points,
        past=rows.past,
        x=x,
        weight=weight,
        s=weight.new_ones(weight.shape[:-1]),
        jitter=jitter,
        num_inducing=capacity - kept.size(-2),
    )
    chosen = GreedyInformation().rank(candidates, given=kept).points
    return torch.cat([kept, chosen], -2)


def first_of_each(points: Tensor) -> Tensor:
    """Indices of the points that no earlier one equals in all streams.

    Args:
        points: ``(*batch, n, d)``.
    """
    flat = points.movedim(-2, 0).flatten(1)  # streams side by side
    distinct, inverse = torch.unique(flat, dim=0, return_inverse=True)
    order = torch.arange(len(flat), device=flat.device)
    first = order.new_full((len(distinct),), len(flat))
    return first.scatter_reduce(0, inverse, order, "amin").sort().values


def _rough_kernel(points: Tensor, capacity: int) -> RBFKernel:
    num_dims = points.size(-1)
    span = points.amax(-2, keepdim=True) - points.amin(-2, keepdim=True)
    span = torch.where(span > 0, span, torch.ones_like(span))
    kernel = RBFKernel(ard_num_dims=num_dims, batch_shape=points.shape[:-2]).to(points)
    kernel.lengthscale = ROUGHNESS * span / capacity ** (1 / num_dims)
    return kernel.requires_grad_(False)


# -- forgetting a stretch ---------------------------------------------------------


def older_half(points: Tensor, dim: int, sign: int) -> Tensor:
    """The earlier half of the points, ``(*batch, r // 2, d)``; see below."""
    order = (sign * points[..., dim]).argsort(-1)[..., : points.size(-2) // 2]
    index = order.unsqueeze(-1).expand(*order.shape, points.size(-1))
    return points.gather(-2, index)


def recent_half(rows: Rows, dim: int, sign: int) -> Rows:
    r"""What rows say about the later half of their points.

    The values at the others are integrated out of the likelihood, with nothing known
    about them: with :math:`[U_{old}, U_{new}] = Q R`, the rows of :math:`R` below the
    first block. Data and residual are counted in proportion to the precision that is
    left.

    Args:
        rows: Pseudo-observations at points.
        dim: The input that tells earlier from later.
        sign: 1 if it grows with time, -1 if it falls.
    """
    points, (U, g, rho, n) = rows
    count = points.size(-2) // 2
    order = (sign * points[..., dim]).argsort(-1)
    ordered = points.gather(-2, order.unsqueeze(-1).expand(points.shape))
    batch = torch.broadcast_shapes(order.shape[:-1], U.shape[:-2])
    index = order.unsqueeze(-2).expand(*batch, U.size(-2), -1)
    U = U.expand(*batch, -1, -1).gather(-1, index)
    size = fn.squared_norm(U, (-2, -1))  # zero of a stream that has no reading yet
    share = fn.squared_norm(U[..., count:], (-2, -1)) / torch.where(size > 0, size, 1)
    g = g.expand(*batch, -1).unsqueeze(-1)
    R = torch.linalg.qr(torch.cat([U, g], -1), mode="r").R[..., count:, :]
    num_left = points.size(-2) - count
    U, g = R[..., :num_left, count:-1], R[..., :num_left, -1]
    residual = fn.squared_norm(R[..., num_left:, -1])
    past = PseudoObservations(U, g, share * (rho + residual), share * n)
    return Rows(ordered[..., count:, :], past)


class Start(nn.Module):
    """Hyperparameters as they were before the first update: what a user set is in them.

    Args:
        parameters: The parameters of a new model.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        for name, value in self.named(parameters).items():
            self.register_buffer(name, value)

    @staticmethod
    def named(parameters: list[nn.Parameter]) -> dict[str, Tensor]:
        """Copies of their values, with the names of the buffers."""
        return {f"p{i}": p.detach().clone() for i, p in enumerate(parameters)}

    @property
    def values(self) -> list[Tensor]:
        """In the order of the parameters."""
        return list(self.buffers())

r"""One more datum: a new row of the factor and of the alarms, and nothing else.

Between two updates that learn or compress, hyperparameters and compressed rows stay
what they are, and a datum costs two products of a matrix and a vector:

.. math::
    c = H k(P, x), \quad v = W c, \quad d^2 = k + s - v^\top v, \quad
    \epsilon = (y - m - v^\top e) / d, \quad
    F \leftarrow F - \tfrac12 \epsilon^2 - \log d - \tfrac12 \log 2 \pi.

All else are a few numbers of Python. A datum that asks for more (learning, an
explanation, a compression) goes through ``update/walk.py``, which starts from what is
known without it; so do batches of data and of streams.
"""

from __future__ import annotations

import math
from copy import copy
from operator import is_
from typing import TYPE_CHECKING, NamedTuple

import torch
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor

from torch_ssgp import memory as remembered
from torch_ssgp import settings
from torch_ssgp.functional import LOG_2PI
from torch_ssgp.memory import TRUSTED, Counts, Data
from torch_ssgp.modules import tensors_of
from torch_ssgp.prediction import Near, Predictor
from torch_ssgp.rows import Factor
from torch_ssgp.update import change
from torch_ssgp.update.learn import GROWTH
from torch_ssgp.update.options import UpdateOptions

if TYPE_CHECKING:
    from torch_ssgp.core import StreamingCore


class Now(NamedTuple):
    """What changes with every datum.

    Attributes:
        live: What does not.
        factor: Of all rows.
        counts: What the stream has counted.
        num_new: Data that were added.
        bound: Bound on the evidence of all data.
        alarm: Log Bayes factors against the model.
        alarmed: Raw data before each of them.
        error: Standardised error of the last datum.
        increment: Its log density.
    """

    live: Live
    factor: Factor
    counts: Counts
    num_new: int
    bound: float
    alarm: tuple[float, ...]
    alarmed: tuple[float, ...]
    error: float = 0.0
    increment: float = 0.0

    @property
    def num_raw(self) -> int:
        """The number of raw data."""
        return self.live.num_raw + self.num_new

    @property
    def num_points(self) -> int:
        """The number of points, those of raw data included."""
        return self.live.num_points + self.num_new

    def buffers(self) -> dict[str, Tensor]:
        """Those of a memory that differ from those before."""
        live, n, before = self.live, self.num_new, self.live.before
        x = live.points[live.num_points : self.num_points, : before["points"].size(-1)]
        y = live.target[live.num_rows : live.num_rows + n]
        time = torch.arange(n, dtype=y.dtype, device=y.device) - n + self.counts.arrived
        new = Data(x, y, torch.zeros_like(y), torch.ones_like(y), time)
        return {
            **remembered.with_raw(before, new, self.factor.e[live.num_rows :]),
            "bound": torch.full_like(before["bound"], self.bound),
            "alarm": y.new_tensor(self.alarm),
            "alarmed": y.new_tensor(self.alarmed),
            "counts": y.new_tensor(self.counts),
        }


class Live:
    """A model to which single data are added, between two walks.

    Arrays have room for as many rows as a memory holds. They are written only beyond
    the rows of ``now``, which is replaced in one assignment.

    Args:
        core: A model for which :func:`can_be_live` holds.
        predictor: Its factor.
    """

    def __init__(self, core: StreamingCore, predictor: Predictor) -> None:
        memory = copy(core.memory)
        self.before, self.base = dict(memory.named_buffers()), predictor
        self.tables = [
            (table, list(table.values()))
            for part in core.prior()
            for module in part.modules()
            for table in (module._modules, module._parameters, module._buffers)
            if table
        ]
        tensors = [t for part in core.prior() for t in tensors_of(part)]
        self.hyperparameters = [(t, t.detach().clone()) for t in tensors]
        self.zero = memory.g.new_zeros(())
        self.one, self.never = self.zero + 1, self.zero > 0
        self.nothing = memory.g.new_empty(0)
        self.jitter = settings.jitter.of(memory.g.dtype)
        self.s, self.rate = float(predictor.s), float(memory.rate)
        self.falls = bool(change.can_fall(core.likelihood, predictor.likelihood))
        self.is_constant = type(predictor.mean) is ConstantMean
        self.level = float(predictor.mean.constant) if self.is_constant else 0.0
        self.num_data = float(memory.num_data)
        self.num_raw, self.num_rows = memory.num_raw, memory.num_rows
        self.room = core.memory_size - self.num_rows
        alarm, alarmed = memory.alarm.tolist(), memory.alarmed.tolist()
        assert predictor.factor is not None
        self.now = Now(
            self,
            predictor.factor.with_room(max(self.room, 0)),
            memory.count(),
            0,
            float(memory.bound),
            tuple(alarm),
            tuple(alarmed),
        )
        self._make_room()

    def _make_room(self) -> None:
        base, rows, room = self.base, self.base.rows, max(self.room, 0)
        self.num_points = base.points.size(-2)

        def longer(value: Tensor) -> Tensor:
            return torch.cat([value, value.new_ones(room, *value.shape[1:])])

        self.points, self.target = longer(base.points), longer(rows.target)
        self.root = None if rows.root is None else longer(rows.root)
        near = Near.of(base.form, base.points)
        self.variance = None if near is None else float(near.kernel.scale)
        if near is not None:
            time = None if near.time is None else longer(near.time)
            near = near._replace(points=longer(near.points), time=time)
        self.near = near

    # -- one more -------------------------------------------------------------------

    def add(self, data: Data, options: UpdateOptions) -> Now | None:
        """What one more datum makes of it; ``None`` if it asks for more than a row.

        Args:
            data: The datum, checked, in the dtype of the algebra.
            options: How to learn.
        """
        now = self.now
        if now.num_new >= self.room or self._is_due(options):
            return None
        num_points, factor = now.num_points, now.factor
        x = self.base.with_time(data.x, data.y.new_tensor([now.counts.arrived]))
        k = self._gram(x, num_points)
        c, R = k, self.base.rows.U.size(-1)
        if self.root is not None:
            k[R:] *= self.root[: num_points - R]
        if R:
            c = torch.cat([self.base.rows.U @ k[:R], k[R:]])
        v, y = torch.mv(factor.W, c), float(data.y)
        level = self.level if self.is_constant else float(self.base.mean(data.x))
        prior = self.variance or float(self.base.form.variances(x))
        left = prior - float(torch.dot(v, v))
        error, square = y - level - float(torch.dot(v, factor.e)), left + self.s
        if not square > 0 or not math.isfinite(error):
            return None
        d = math.sqrt(square)
        new = self._judged(x, error / d, math.log(d), prior, left, y - level, options)
        if new is None:
            return None
        self.points[num_points], self.target[factor.count] = x[0], data.y[0]
        return new._replace(factor=factor.append(v, d, error / d))

    def _gram(self, x: Tensor, num_points: int) -> Tensor:
        """Prior covariance of ``x`` and the points, ``(r,)``."""
        if self.near is None:
            return self.base.form.gram(self.points[:num_points], x).squeeze(-1)
        new = self.near.scaled(x)
        self.near.points[num_points] = new.points[0]
        if self.near.time is not None and new.time is not None:
            self.near.time[num_points] = new.time[0]
        return self.near.first(num_points).gram_with(new).squeeze(-1)

    def _is_due(self, options: UpdateOptions) -> bool:
        """Whether one more datum makes it time to learn."""
        counts = self.now.counts
        if not options.learns_at(int(counts.num_updates)):
            return False
        if not options.learns_when_due or counts.started_at == 0:
            return True
        num_data = self.num_data + self.now.num_new + 1
        return counts.since_learning + 1 >= GROWTH * num_data

    # -- alarms ---------------------------------------------------------------------

    def _judged(
        self,
        x: Tensor,
        error: float,
        log_d: float,
        prior: float,
        left: float,
        residual: float,
        options: UpdateOptions,
    ) -> Now | None:
        """The numbers after a datum; ``None`` if an alarm asks for an explanation."""
        now = self.now
        counts, num_raw = now.counts, now.num_raw
        increment = -0.5 * (error * error + LOG_2PI) - log_d
        new = now._replace(
            counts=counts.after(1),
            num_new=now.num_new + 1,
            bound=now.bound + increment,
            error=error,
            increment=increment,
        )
        if not options.watches or counts.started_at == 0:
            return new
        gains = change.gains_of_one(
            error,
            log_d,
            -0.5 * (residual**2 / (prior + self.s) + math.log(prior + self.s)),
            left < change.KNOWN * max(prior, self.s),
            self.falls,
        )
        sums = [a + gain for a, gain in zip(now.alarm, gains, strict=True)]
        alarm = tuple(max(total, 0.0) for total in sums)
        begun = [
            since if a > 0 else float(num_raw)
            for a, since in zip(now.alarm, now.alarmed, strict=True)
        ]
        alarmed = tuple(
            since if total > 0 else num_raw + 1.0
            for total, since in zip(sums, begun, strict=True)
        )
        asks = abs(error) > change.GROSS
        for value, since in zip(alarm, alarmed, strict=True):
            asks = asks or (value > options.price and num_raw + 1 - since >= 2)
        asks = asks or bool(counts.question_due and num_raw + 1 >= counts.question_due)
        if asks and not options.postpones:
            return None
        return new._replace(alarm=alarm, alarmed=alarmed)

    # -- what others read -----------------------------------------------------------

    def is_of(self, core: StreamingCore) -> bool:
        """Whether it is the present state of a model."""
        if core.memory.source is not self.now:
            return False
        if self.jitter != settings.jitter.of(self.base.s.dtype):
            return False
        for table, values in self.tables:
            if len(table) != len(values) or not all(map(is_, table.values(), values)):
                return False
        return all(torch.equal(now, then) for now, then in self.hyperparameters)

    def takes(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> bool:
        """Whether these are a single datum, with nothing to complain about."""
        like = self.before["points"]
        return (
            type(x) is type(y) is Tensor
            and x.shape == (1, like.size(-1))
            and y.shape == (1,)
            and x.dtype == y.dtype == dtype
            and x.device == y.device == like.device
            and not (x.is_inference() or y.is_inference())
            and math.isfinite(x.sum() + y)
        )

    @property
    def predictor(self) -> Predictor:
        """The predictor with the data so far."""
        now, rows, new = self.now, self.base.rows, copy(self.base)
        new.points, new.factor = self.points[: now.num_points], now.factor
        num_raw = now.num_points - rows.U.size(-1)
        new.rows = rows._replace(
            target=self.target[: now.factor.count],
            root=None if self.root is None else self.root[:num_raw],
            n=rows.n + now.num_new,
        )
        if self.near is not None:
            new.near = self.near.first(now.num_points)
        if new.now is not None:
            new.now = torch.full_like(new.now, now.counts.arrived)
        return new


def can_be_live(core: StreamingCore) -> bool:
    """Whether single data can be added to a model as rows of the noise of all."""
    memory = core.memory
    if core.batch_shape or type(core.likelihood) is not GaussianLikelihood:
        return False
    if memory.is_empty or core.memory_size <= core.num_inducing:
        return False
    if not core.shares_noise(None) or memory.is_branch:
        return False
    predictor = core.predictor()
    return (
        predictor.young is None
        and not predictor.tails
        and float(memory.odds) >= TRUSTED
    )

r"""One more datum: a new row of the factor and of the alarms, and nothing else.

Between two updates that learn or compress, hyperparameters and compressed rows stay
what they are, and a datum costs two products of a matrix and a vector:

.. math::
    c = H k(P, x), \quad v = W c, \quad d^2 = k + s - v^\top v, \quad
    \epsilon = (y - m - v^\top e) / d, \quad
    F \leftarrow F - \tfrac12 \epsilon^2 - \log d - \tfrac12 \log 2 \pi.

A datum that asks for more (learning, an explanation, a compression) goes through
``update/walk.py``, which starts from what is known without it.
"""

from __future__ import annotations

import math
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

import torch
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import memory as remembered
from torch_ssgp import settings
from torch_ssgp.functional import LOG_2PI
from torch_ssgp.memory import TRUSTED, Data
from torch_ssgp.modules import square_gram
from torch_ssgp.prediction import Predictor
from torch_ssgp.rows import Border, Factor
from torch_ssgp.update import change
from torch_ssgp.update.learn import GROWTH, SURPRISE
from torch_ssgp.update.options import UpdateOptions

if TYPE_CHECKING:
    from torch_ssgp.core import StreamingCore


class Seen(NamedTuple):
    """What one datum was to a model.

    Attributes:
        live: The model with it.
        increment: ``(*batch,)``, its log density given all before it.
        surprise: ``(*batch,)``, as in :class:`~torch_ssgp.UpdateResult`.
    """

    live: Live
    increment: Tensor
    surprise: Tensor


class Live:
    """A model between two walks. It never changes: one more datum makes another.

    Args:
        core: A model with data of one Gaussian noise.
        predictor: Its factor.
        hyperparameters: All of them as one vector: if they change, this is over.
    """

    def __init__(
        self, core: StreamingCore, predictor: Predictor, hyperparameters: Tensor
    ) -> None:
        memory = copy(core.memory)
        self.hyperparameters = hyperparameters
        self.before = dict(memory.named_buffers())
        self.predictor, self.num_new = predictor.for_single_data(), 0
        self.counts, self.bound = memory.count(), memory.bound
        self.jitter = settings.jitter.of(self.bound.dtype)
        self.rate = memory.rate
        self.nothing, self.never = 0 * self.bound, self.bound != self.bound
        self.alarm, self.alarmed = memory.alarm, memory.alarmed
        self.is_challenged = bool((self.alarm[..., 0] > 0).any())
        self.num_data = float(memory.num_data.max())
        self.num_raw, self.num_rows = memory.num_raw, memory.num_rows
        self.room = core.memory_size - self.num_rows
        present = predictor.likelihood
        self.can_fall = change.can_fall(core.likelihood, present)

    def add(self, data: Data, options: UpdateOptions) -> Seen | None:
        """One more datum; ``None`` if it asks for more than a row.

        Args:
            data: The datum, checked, in the dtype of the algebra.
            options: How to learn.
        """
        counts = self.counts
        if self.room < 1 or self._is_due(options):
            return None
        old, time = self.predictor, data.y.new_tensor([counts.arrived])
        border = old.border(data.x, data.y, None, time)
        e, log_d = border.e, -border.L_inv.squeeze(-1).log()
        increment = (-0.5 * (e.square() + LOG_2PI) - log_d).squeeze(-1)
        new = copy(self)
        if options.watches and counts.started_at:
            if not new._judge(old, border, data, options):
                return None
        elif options.learns_when_due and self._is_surprised(e):
            return None
        new.predictor = old.extended(data.x, data.y, None, border, time)
        new.predictor.now = time.squeeze(-1) + 1
        new.bound = self.bound + increment
        new.num_new, new.room = self.num_new + 1, self.room - 1
        new.num_raw, new.num_rows = self.num_raw + 1, self.num_rows + 1
        new.num_data = self.num_data + 1
        new.counts = counts.after(1)
        if not math.isfinite(increment.sum()):
            return None
        return Seen(new, increment, 0.5 * (e.square().squeeze(-1) - 1))

    def _is_due(self, options: UpdateOptions) -> bool:
        """Whether one more datum makes it time to learn."""
        if not options.learns_at(int(self.counts.num_updates)):
            return False
        if not options.learns_when_due or self.counts.started_at == 0:
            return True
        return self.counts.since_learning + 1 >= GROWTH * (self.num_data + 1)

    def _is_surprised(self, e: Tensor) -> bool:
        """As :func:`torch_ssgp.update.learn.surprised`, with one more error."""
        assert self.predictor.factor is not None
        num_new = min(int(self.counts.since_learning), self.num_raw)
        error = self.predictor.factor.e[..., self.num_rows - num_new :]
        total = (error.square() - 1).sum(-1) + (e.square() - 1).squeeze(-1)
        return float(0.5 * total.max()) > SURPRISE

    def _judge(
        self, old: Predictor, border: Border, data: Data, options: UpdateOptions
    ) -> bool:
        """Add the datum to the alarms; ``False`` if one asks for an explanation."""
        e, d = border.e, border.L_inv.squeeze(-1).reciprocal()
        s = old.s.unsqueeze(-1)
        k = old.form.variances(old.with_time(data.x, old.now))
        is_known = d.square() - s < change.KNOWN * k.maximum(s)
        alone = self._alone(old, data, k + s)
        gains = change.gains_of(e, d.log(), alone, is_known, self.can_fall)
        sums = self.alarm + gains.squeeze(-1)
        restarts = sums <= 0
        self.alarm = sums.clamp_min(0)
        self.alarmed = torch.where(restarts, self.num_raw + 1.0, self.alarmed)
        loud = (self.alarm > options.price) & (self.num_raw - self.alarmed >= 1)
        gross = e.abs() > change.GROSS
        flags = torch.stack([self.alarm[..., 0].gt(0).any(), loud.any(), gross.any()])
        self.is_challenged, is_loud, is_gross = flags.tolist()  # a device waits here
        asks = is_loud or (is_gross and options.leaves_out)
        due = self.counts.question_due
        asks = asks or bool(due and self.num_raw + 1 >= due)
        return not asks or options.postpones

    def _alone(self, old: Predictor, data: Data, variance: Tensor) -> Tensor:
        """Log density of the datum without the past, up to a constant."""
        r = data.y - old.mean(data.x)
        if not self.is_challenged:
            return -0.5 * (r.square() / variance + variance.log())
        since = self.alarmed[..., 0].clamp_max(self.num_raw)
        num_raw = min(self.num_raw - int(since.min()), change.MANY)
        index = torch.arange(self.num_raw - num_raw, self.num_raw, device=r.device)
        raw = slice(old.points.size(-2) - num_raw, None)
        points, target, root = old.points[..., raw, :], old.rows.target, old.rows.root
        w = (index >= since.unsqueeze(-1)).to(r)
        if root is not None:
            w = w * root[..., root.size(-1) - num_raw :].gt(0)
        m = old.mean(points[..., : data.x.size(-1)])
        known = w * (target[..., self.num_rows - num_raw :] - m)
        points = torch.cat([points, old.with_time(data.x, old.now)], -2)
        w = torch.cat([w, torch.ones_like(r)], -1)
        K = w.unsqueeze(-1) * square_gram(old.form, points) * w.unsqueeze(-2)
        both = Factor.of(K, torch.cat(fn.broadcast_rows(known, r), -1), old.s)
        last = both.W[..., -1:, -1].log() - 0.5 * both.e[..., -1:].square()
        return last

    def buffers(self) -> dict[str, Tensor]:
        """Those of the memory that it is."""
        before, p, n = self.before, self.predictor, self.num_new
        y = p.rows.target[..., self.num_rows - n :]
        num_inputs = before["points"].size(-1)
        x = p.points[..., p.points.size(-2) - n :, :num_inputs]
        arrived = self.counts.arrived - n
        time = torch.arange(n, dtype=y.dtype, device=y.device) + arrived
        assert p.factor is not None
        new = Data(x, y, torch.zeros_like(y), y.new_ones(n), time)
        error = p.factor.e[..., self.num_rows - n :]
        rows = remembered.with_raw(before, new, error)
        return {
            **rows,
            "bound": self.bound,
            "alarm": self.alarm,
            "alarmed": self.alarmed,
            "counts": y.new_tensor(self.counts),
        }


def can_be_live(core: StreamingCore) -> bool:
    """Whether single data can be added to a model as rows."""
    if type(core.likelihood) is not GaussianLikelihood or core.memory.is_empty:
        return False
    if core.memory_size <= core.num_inducing or not core.shares_noise(None):
        return False
    predictor = core.predictor()
    plain = predictor.young is None and not predictor.tails
    plain = plain and not core.memory.is_branch
    return plain and bool((core.memory.odds >= TRUSTED).all())

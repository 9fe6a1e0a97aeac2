r"""A stream that drifts: how much of its past is kept, and for how long.

A power weakens all of the past alike, but a function that moves has left its older data
further behind. So the power that predicts new data best says that a stream drifts, not
how much of it to keep. The number of data :math:`n_0` that it took to notice does.

Let the function move by :math:`r` per datum, let the noise have variance
:math:`\sigma^2`, and let :math:`p` coefficients describe the function. Of data weighted
by age, :math:`n` of them in all, the mean lags :math:`n` data behind, and

.. math:: error^2 = r^2 n^2 + \sigma^2 p / 2n
    \quad\Rightarrow\quad n^3 = \sigma^2 p / 4 r^2.

Without weights it lags :math:`n_0 / 2` behind. It is noticed when the last of these
data, say a third, have lost as many nats as an alarm takes, some 10 with what a model
that is not quite right may lose:

.. math:: \frac{n_0}{3} \frac{(r n_0 / 2)^2}{2 \sigma^2} = 10
    \quad\Rightarrow\quad n_0^3 = 240 \sigma^2 / r^2.

The best :math:`n` is a fifth of :math:`n_0` for :math:`p = 8`, and depends on :math:`p`
by its cube root only. Neither noise nor rate have to be known. A drift ends without a
sign. So more and more is kept again, until all is that had been: unless the evidence
asks for less, the drift is over by then.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp.buffers import stored
from torch_ssgp.memory import Memory

SHARE = 0.2  # of the data that it took to notice a drift: what is kept beside new ones
REGAINED = 0.3  # of new data, by which more is kept again


class Drift(NamedTuple):
    """Which streams drift, and since when.

    Attributes:
        noticed: ``(*batch,)``, data that it took to notice; zero without a drift.
        since: ``(*batch,)``, data that came since then.
    """

    noticed: Tensor
    since: Tensor

    @classmethod
    def of(cls, memory: Memory, like: Tensor) -> Drift:
        """As remembered, in the shape and dtype of a tensor."""
        noticed, since = memory.noticed, memory.since_noticed
        return cls(noticed.to(like).expand_as(like), since.to(like).expand_as(like))

    def buffers(self) -> dict[str, Tensor]:
        """As a memory keeps it."""
        return {"noticed": stored(self.noticed), "since_noticed": stored(self.since)}

    @property
    def goes_on(self) -> Tensor:
        """``(*batch,)``, which streams drift."""
        return self.noticed > 0

    @property
    def horizon(self) -> Tensor:
        """``(*batch,)``, data of the past to keep."""
        kept = SHARE * self.noticed + REGAINED * self.since
        return torch.where(self.goes_on, kept, torch.inf)

    def limit(self, power: Tensor, num_old: Tensor) -> Tensor:
        """A power of the past that leaves no more than is to be kept.

        Args:
            power: ``(*batch,)``, what the evidence of new data asks for.
            num_old: ``(*batch,)``, data of the past.
        """
        return power.minimum(self.horizon / num_old.clamp_min(1))

    def where(self, condition: Tensor, other: Drift) -> Drift:
        """This one in streams of which a condition holds, else another one.

        Args:
            condition: ``(*batch,)``.
            other: What holds else.
        """
        pairs = zip(self, other, strict=True)
        return Drift(*(torch.where(condition, mine, theirs) for mine, theirs in pairs))

    def go_on(self, num_new: Tensor) -> Drift:
        """So many data later; it is over where all is kept that had been.

        Args:
            num_new: ``(*batch,)``.
        """
        since = torch.where(self.goes_on, self.since + num_new, 0.0)
        later = self._replace(since=since)
        return later.end(later.horizon > later.noticed)

    def begin(self, where: Tensor, num_data: Tensor) -> Drift:
        """It is noticed now.

        Args:
            where: ``(*batch,)``, in which streams.
            num_data: ``(*batch,)``, data that it took.
        """
        noticed = torch.where(where, num_data, self.noticed)
        return Drift(noticed, torch.where(where, 0.0, self.since))

    def end(self, where: Tensor) -> Drift:
        """It is over.

        Args:
            where: ``(*batch,)``, in which streams.
        """
        return Drift(*(torch.where(where, 0.0, value) for value in self))

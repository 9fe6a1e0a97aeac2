"""The posterior at the points of a memory, as a view of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_ssgp.prediction import posterior_at_points

if TYPE_CHECKING:
    from torch_ssgp.core import StreamingCore


class PosteriorSummary:
    r"""q(f(Z)) at the points of the memory: computed when asked for, stored nowhere.

    Args:
        core: The model.
    """

    def __init__(self, core: StreamingCore) -> None:
        self._core = core

    @property
    def inducing_points(self) -> Tensor:
        """Points of the memory, ``(*batch, m, d)``."""
        return self._core.memory.points

    @property
    def num_inducing(self) -> int:
        """The number of these points, ``m``."""
        return self._core.memory.num_points

    @property
    def is_empty(self) -> bool:
        """Whether nothing was learned yet."""
        return self._core.memory.is_empty

    @property
    def num_data(self) -> Tensor:
        """Data seen; see :attr:`torch_ssgp.Memory.num_data`."""
        return self._core.memory.num_data

    @property
    def num_updates(self) -> int:
        """Updates so far."""
        return int(self._core.memory.count().num_updates)

    @property
    def jitter(self) -> Tensor:
        """The relative jitter that an update had to raise; else zero."""
        return self._core.memory.jitter

    @property
    def mean(self) -> Tensor:
        """Mean of q, ``(*batch, m)``, in the dtype of the algebra."""
        return self._moments()[0]

    @property
    def covariance(self) -> Tensor:
        """Covariance of q, ``(*batch, m, m)``, in the dtype of the algebra."""
        return self._moments()[1]

    def _moments(self) -> tuple[Tensor, Tensor]:
        predictor = self._core.predictor()
        if predictor.factor is None:
            nothing = predictor.s.new_zeros(*self._core.batch_shape, 0)
            return nothing, nothing.new_zeros(*nothing.shape, 0)
        return posterior_at_points(predictor)

    @property
    def log_evidence(self) -> Tensor:
        """Bound on the log evidence of the data seen, ``(*batch,)``."""
        if self.is_empty:
            return self._core.memory.bound
        return self._core.log_evidence().detach()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"The summary has no {name}: it is a view of the posterior at its "
            "inducing_points, with their mean and covariance. Rows and raw data are in "
            "model.memory."
        )

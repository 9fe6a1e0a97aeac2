"""What predictions need: q(b) as pseudo-observations, in detached buffers."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.buffers import Buffers
from torch_ssgp.functional import Posterior, PseudoObservations


class PosteriorSummary(Buffers):
    r"""The posterior at the inducing points, for prediction and conditioning.

    It is kept as pseudo-observations ``U b ≈ g`` of the function at the inducing points
    (see :mod:`torch_ssgp.functional`), together with the prior they were made under, so
    that :math:`q(b) = N(\texttt{mean}, \texttt{covariance})` can be shown. Buffers
    change their size during a stream and when a state is loaded. An update replaces all
    of them in one assignment, so ``copy.copy(summary)`` is a snapshot that does not
    change. Later updates learn from the finer :class:`~torch_ssgp.memory.Memory`, not
    from the summary.

    Args:
        batch_shape: Shape of independent streams.

    Attributes:
        inducing_points: ``(*batch, m, d)``.
        U: ``(*batch, p, m)``, observed rows.
        g: ``(*batch, p)``, their targets.
        residual: ``(*batch,)``, what no function at the inducing points explains.
        num_data: ``()``, data seen; fractional after forgetting.
        num_updates: ``()``, updates so far.
        prior_mean: ``(*batch, m)``, prior mean when the summary was stored.
        prior_cholesky: ``(*batch, m, m)``, factor of the prior covariance then.
        noise_scale: ``(*batch,)``, noise of the rows: the observation noise then if
            it is shared with the future, else one.
        shared_noise: Whether the noise of the rows follows the likelihood.
        jitter: ``()``, the relative jitter that an update had to raise; else zero. From
            then on it replaces a smaller ``settings.jitter``.
    """

    SIZES = {
        "inducing_points": "md",
        "U": "pm",
        "g": "p",
        "residual": "",
        "num_data": "",
        "num_updates": "",
        "prior_mean": "m",
        "prior_cholesky": "mm",
        "noise_scale": "",
        "shared_noise": "",
        "jitter": "",
    }

    def __init__(self, batch_shape: torch.Size = torch.Size()) -> None:
        super().__init__()
        empty = {
            "inducing_points": torch.zeros(*batch_shape, 0, 0),
            "U": torch.zeros(*batch_shape, 0, 0),
            "g": torch.zeros(*batch_shape, 0),
            "residual": torch.zeros(batch_shape),
            "num_data": torch.zeros(()),
            "prior_mean": torch.zeros(*batch_shape, 0),
            "prior_cholesky": torch.zeros(*batch_shape, 0, 0),
            "noise_scale": torch.ones(batch_shape),
            "jitter": torch.zeros(()),
        }
        for name, value in empty.items():
            self.register_buffer(name, value.double())
        self.register_buffer("shared_noise", torch.tensor(False))
        self.register_buffer("num_updates", torch.tensor(0))

    @property
    def num_inducing(self) -> int:
        """The number of inducing points, ``m``."""
        return self.inducing_points.size(-2)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was stored yet."""
        return self.num_inducing == 0

    @property
    def pseudo_observations(self) -> PseudoObservations:
        """The past, as the functions of :mod:`torch_ssgp.functional` take it."""
        now = copy(self)
        return PseudoObservations(now.U, now.g, now.residual, now.num_data)

    @property
    def posterior(self) -> Posterior:
        """Factors of q(b) under the prior the summary was stored with."""
        now = copy(self)
        return fn.factorize(now._rows(), now.noise_scale)

    @property
    def mean(self) -> Tensor:
        """Mean of q(b), ``(*batch, m)``."""
        now = copy(self)
        return fn.moments(now.posterior, now.prior_mean)[0]

    @property
    def covariance(self) -> Tensor:
        """Covariance of q(b), ``(*batch, m, m)``."""
        now = copy(self)
        return fn.moments(now.posterior, now.prior_mean)[1]

    @property
    def log_evidence(self) -> Tensor:
        """Bound on the log evidence of the data seen, ``(*batch,)``."""
        now = copy(self)
        return fn.evidence(now._rows(), now.noise_scale)

    def _rows(self) -> fn.Projection:
        return fn.recall(self.pseudo_observations, self.prior_cholesky, self.prior_mean)

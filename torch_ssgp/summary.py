"""What survives an update: pseudo-observations as detached buffers."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from torch_ssgp import functional as F
from torch_ssgp.exceptions import ShapeError, StateError
from torch_ssgp.functional import Posterior, PseudoObservations
from torch_ssgp.validation import check_forget, expands_to

# Sizes of the buffers after their batch dimensions: m inducing points and r landmarks
# in d dimensions, p rows.
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
    "landmarks": "rd",
    "jitter": "",
}


class PosteriorSummary(nn.Module):
    r"""All that a stream leaves behind, of a size that does not grow with it.

    The past is kept as pseudo-observations ``U a ≈ g`` of the function at the inducing
    points (see :mod:`torch_ssgp.functional`), together with the prior they were made
    under, so that :math:`q(a) = N(\texttt{mean}, \texttt{covariance})` can be shown.
    Buffers change their size during a stream and when a state is loaded. An update
    replaces all of them in one assignment, so ``copy.copy(summary)`` is a snapshot that
    stays as it is.

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
        landmarks: ``(*batch, r, d)``, a few of the inputs seen, spread evenly over
            the stream: where new hyperparameters must not interpolate worse.
        jitter: ``()``, the relative jitter that an update had to raise; else zero. It
            holds from then on, where ``settings.jitter`` is smaller.
    """

    inducing_points: Tensor
    U: Tensor
    g: Tensor
    residual: Tensor
    num_data: Tensor
    num_updates: Tensor
    prior_mean: Tensor
    prior_cholesky: Tensor
    noise_scale: Tensor
    shared_noise: Tensor
    landmarks: Tensor
    jitter: Tensor

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
            "landmarks": torch.zeros(*batch_shape, 0, 0),
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
        """Factors of q(a) under the prior the summary was stored with."""
        now = copy(self)
        return F.factorize(now._rows(), now.noise_scale)

    @property
    def mean(self) -> Tensor:
        """Mean of q(a), ``(*batch, m)``."""
        now = copy(self)
        return F.moments(now.posterior, now.prior_mean)[0]

    @property
    def covariance(self) -> Tensor:
        """Covariance of q(a), ``(*batch, m, m)``."""
        now = copy(self)
        return F.moments(now.posterior, now.prior_mean)[1]

    @property
    def log_evidence(self) -> Tensor:
        """Bound on the log evidence of the data seen, ``(*batch,)``."""
        now = copy(self)
        return F.evidence(now._rows(), now.noise_scale)

    def _rows(self) -> F.Projection:
        return F.recall(self.pseudo_observations, self.prior_cholesky, self.prior_mean)

    def set(
        self,
        inducing_points: Tensor,
        past: PseudoObservations,
        prior_mean: Tensor,
        prior_cholesky: Tensor,
        noise_scale: Tensor,
        shared_noise: bool,
        landmarks: Tensor,
        num_updates: Tensor,
        jitter: Tensor,
    ) -> None:
        """Replace what is stored, all at once; the arguments are the buffers."""
        buffers = {
            "inducing_points": inducing_points,
            "U": past.U,
            "g": past.g,
            "residual": past.rho,
            "num_data": past.n,
            "prior_mean": prior_mean,
            "prior_cholesky": prior_cholesky,
            "noise_scale": noise_scale,
            "shared_noise": torch.tensor(shared_noise, device=inducing_points.device),
            "landmarks": landmarks,
            "num_updates": num_updates,
            "jitter": jitter,
        }
        # One assignment: a reader sees the buffers of before, or these.
        self.__dict__["_buffers"] = self._buffers | buffers

    def with_landmarks(self, x: Tensor, count: int, num_old: float) -> Tensor:
        """Landmarks of the stream so far, new inputs included.

        Old and new inputs are thinned evenly, in proportion to the data they stand
        for; no random numbers are drawn.

        Args:
            x: ``(*batch, n, d)`` new inputs.
            count: Number of landmarks.
            num_old: Data the old landmarks stand for, fewer after forgetting.

        Returns:
            ``(*batch, at most count, d)``.
        """
        old, num_new = self.landmarks, x.size(-2)
        if old.size(-2) == 0:
            return _thin(x, count)
        share = num_new / (num_new + num_old)
        new = _thin(x, min(max(1, round(count * share)), num_new))
        kept = _thin(old.to(x.dtype), max(1, count - new.size(-2)))
        return torch.cat([kept.expand(*new.shape[:-2], -1, -1), new], -2)

    def discount(self, forget: float) -> PseudoObservations:
        r"""The past with its likelihood raised to the power ``forget``.

        Args:
            forget: :math:`\lambda` in (0, 1]; 1 forgets nothing.

        Returns:
            :math:`(\sqrt\lambda U, \sqrt\lambda g, \lambda \rho, \lambda n)`.
        """
        check_forget(forget)
        past = self.pseudo_observations
        if forget == 1:
            return past
        root = forget**0.5
        return PseudoObservations(
            root * past.U, root * past.g, forget * past.rho, forget * past.n
        )

    def __copy__(self) -> PosteriorSummary:
        """The same buffers, which stay when those of this one are replaced."""
        new = type(self).__new__(type(self))
        new.__dict__ = {**self.__dict__, "_buffers": dict(self._buffers)}
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Deep copies and pickles hold values: a fantasy's graph can be neither."""
        buffers = {name: buffer.detach() for name, buffer in self.named_buffers()}
        return {**self.__dict__, "_buffers": buffers}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Take sizes and dtypes of what is loaded; the default would insist on its own.

        The summary is in the dtype of the algebra, whatever that of the model.
        """
        g = state_dict.get(prefix + "g", self.g)
        if g.shape[:-1] != self.g.shape[:-1]:
            raise ShapeError(
                f"{prefix}g has shape {tuple(g.shape)} in the state loaded, "
                f"{tuple(self.g.shape)} here: the two models have different batch "
                "shapes. Build the model with the batch_shape of the saved one."
            )
        found = {n: state_dict[prefix + n] for n in SIZES if prefix + n in state_dict}
        if found:
            _check_sizes(found, prefix)
        for name, value in found.items():
            # Also where the sizes agree: caches know their buffers by identity.
            setattr(self, name, torch.empty_like(value, device=self.g.device))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _check_sizes(values: dict[str, Tensor], prefix: str) -> None:
    """Raise unless these are the buffers of one summary."""
    missing = [prefix + name for name in SIZES if name not in values]
    if missing:
        raise StateError(
            f"The state has a summary without {', '.join(missing)}; nothing was "
            "loaded. A summary is loaded with all its tensors, or not at all."
        )
    batch_shape = values["g"].shape[:-1]
    sizes: dict[str, int] = {}
    for name, letters in SIZES.items():
        shape = values[name].shape
        cut = len(shape) - len(letters)
        if name == "landmarks" and 0 in shape[cut:]:
            continue  # none yet, of no dimension yet
        if not (
            cut >= 0
            and expands_to(shape[:cut], batch_shape)
            and all(
                sizes.setdefault(letter, size) == size
                for letter, size in zip(letters, shape[cut:], strict=True)
            )
        ):
            raise StateError(
                f"{prefix}{name} has shape {tuple(shape)} in the state loaded, which "
                "does not go with the rest of the summary; nothing was loaded. Use a "
                "state as it came from state_dict()."
            )


def _thin(x: Tensor, count: int) -> Tensor:
    """At most ``count`` rows, evenly spread."""
    if x.size(-2) <= count:
        return x
    rows = torch.linspace(0, x.size(-2) - 1, count, device=x.device).round().long()
    return x[..., rows, :]

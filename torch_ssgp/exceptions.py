"""Named errors and warnings: what was passed, what was expected, what to do."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from linear_operator.utils.errors import NanError, NotPSDError


class StreamingGPError(Exception):
    """Base class of everything this package raises on purpose."""


class InputError(StreamingGPError, ValueError):
    """Data or an argument that cannot be used; the model is unchanged."""


class ShapeError(InputError):
    """A tensor of the wrong shape."""


class DtypeError(InputError):
    """Tensors or a model of different dtypes."""


class DeviceError(InputError):
    """Tensors or a model on different devices."""


class NonFiniteError(InputError):
    """NaN or infinity in data."""


class ArgumentError(InputError):
    """An option outside its range."""


class UnknownOptionError(ArgumentError, TypeError):
    """A keyword that is not the name of an option."""


class MergeError(ArgumentError):
    """Models that cannot be merged."""


class SupportError(InputError):
    """Targets outside the support of the likelihood, such as unknown labels."""


class UnsupportedLikelihoodError(StreamingGPError, TypeError):
    """A likelihood that this call does not support."""


class ExportError(StreamingGPError, TypeError):
    """A kernel, mean or likelihood that cannot be exported."""


class FactorizationError(StreamingGPError, RuntimeError):
    """A covariance that could not be factored with any jitter."""


class StateError(StreamingGPError, RuntimeError):
    """A file or state that is not a complete model; nothing was loaded."""


class Breakdown(FactorizationError):
    """Hyperparameters at which results are not finite; an update falls back."""


class PeerError(StreamingGPError, RuntimeError):
    """A process that was lost, or failed, during a shared update."""


class MissingDependencyError(StreamingGPError, ImportError):
    """An optional package that is not installed."""


class StreamingGPWarning(UserWarning):
    """Base class of the warnings of this package."""


class NumericalWarning(StreamingGPWarning):
    """An update that had to fall back to safer settings."""


class BudgetWarning(StreamingGPWarning):
    """Too few inducing points to represent what the stream said."""


class SharedHyperparametersWarning(StreamingGPWarning):
    """Streams that share hyperparameters because a module has no batch shape."""


class PrecisionWarning(StreamingGPWarning):
    """Inputs too close together for their dtype, or targets for the noise allowed."""


class OutlierWarning(StreamingGPWarning):
    """So many outliers that a likelihood with heavy tails suits the stream better."""


class FlattenedWarning(StreamingGPWarning):
    """Learning that explained the function as noise."""


class ForgottenAbsorbWarning(StreamingGPWarning):
    """A second batch trained on before the first was absorbed."""


def warn(message: str, category: type[Warning]) -> None:
    """Issue a warning that points at the line of the user's code."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package(frame) in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


# This package, and those that may stand between it and the user's code.
_LIBRARIES = ("torch_ssgp", "torch", "gpytorch", "botorch", "sklearn", "river")


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


@contextmanager
def breakdowns(*errors: type[Exception]) -> Iterator[None]:
    """Turn errors of linear algebra, and further ones, into a :class:`Breakdown`."""
    try:
        yield
    except (torch.linalg.LinAlgError, NotPSDError, NanError, *errors) as error:
        raise Breakdown(f"{type(error).__name__}: {error}") from error

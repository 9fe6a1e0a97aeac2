"""Numerical settings, used like GPyTorch's: ``with settings.jitter(1e-6): ...``."""

from __future__ import annotations

import torch
from linear_operator.settings import _value_context

_JITTER = {torch.float64: 1e-8, torch.float32: 1e-5}


class jitter(_value_context):
    """White noise of the prior at inducing points, relative to its variance.

    ``None`` stands for 1e-8 when the algebra runs in float64, 1e-5 in float32.
    """

    _global_value: float | None = None

    @classmethod
    def of(cls, dtype: torch.dtype) -> float:
        """The jitter that goes with the dtype of the algebra."""
        value = cls.value()
        return _JITTER.get(dtype, 1e-5) if value is None else value


class algebra_dtype(_value_context):
    """The dtype of kernels, factorisations and stored posteriors.

    The default is float64, even for float32 models, because float32 cannot factor the
    covariance of a smooth kernel. ``None`` follows the dtype of the model, for devices
    on which float64 is slow.
    """

    _global_value: torch.dtype | None = torch.float64

    @classmethod
    def of(cls, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the algebra for a model of the given dtype."""
        value = cls.value()
        return dtype if value is None else value

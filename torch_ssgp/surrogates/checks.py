"""Validation of data and transforms; the errors are those of BoTorch."""

from __future__ import annotations

import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from torch import Tensor, nn


def check_tensor(value: Tensor, name: str) -> None:
    """Require a tensor of floating-point numbers."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise InputDataError(
            f"{name} is {kind}; expected a tensor of floating-point numbers."
        )


def check_transform(value: object, name: str, expected: type) -> None:
    """Require a transform of BoTorch, or ``None``."""
    if value is not None and not isinstance(value, expected):
        raise UnsupportedError(
            f"{name} is a {type(value).__name__}; expected a BoTorch "
            f"{expected.__name__} or None."
        )


def check_is_fixed(transform: nn.Module | None) -> None:
    """Refuse an input transform that is to be learned: the memory has its results."""
    if transform is None:
        return
    for part in transform.modules():
        own = part.named_parameters(recurse=False)
        names = [name for name, parameter in own if parameter.requires_grad]
        if names:
            raise UnsupportedError(
                f"input_transform has a {type(part).__name__} with parameters to learn "
                f"({', '.join(names)}). A streaming model keeps its transforms: its "
                "memory holds transformed inputs. Freeze it with "
                "input_transform.requires_grad_(False), at values that you choose or "
                "that a SingleTaskGP has learned from the first data."
            )


def check_inputs(
    X: Tensor, name: str, num_dims: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Require inputs ``(..., n, d)`` that go with a model."""
    check_tensor(X, name)
    if X.ndim < 2 or X.size(-1) != num_dims:
        raise BotorchTensorDimensionError(
            f"{name} has shape {tuple(X.shape)}; expected (..., n, {num_dims})."
        )
    if X.dtype != dtype:
        raise InputDataError(
            f"{name} has dtype {X.dtype}, the model {dtype}; expected the same."
        )
    if X.device != device:
        raise InputDataError(
            f"{name} is on {X.device}, the model on {device}; expected the same."
        )


def check_outputs(X: Tensor, Y: Tensor, num_outputs: int | None = None) -> None:
    """Require outcomes ``(..., n, m)`` for inputs ``(..., n, d)``."""
    check_tensor(Y, "Y")
    if Y.ndim < 2 or (Y.ndim == X.ndim - 1 and Y.shape == X.shape[:-1]):
        raise BotorchTensorDimensionError(
            f"Y has shape {tuple(Y.shape)} for X of shape {tuple(X.shape)}; expected "
            "an explicit output dimension. Use Y.unsqueeze(-1)."
        )
    if Y.size(-2) != X.size(-2):
        raise BotorchTensorDimensionError(
            f"Y has shape {tuple(Y.shape)}, X {tuple(X.shape)}; expected "
            f"{X.size(-2)} rows in both."
        )
    if num_outputs is not None and Y.size(-1) != num_outputs:
        raise BotorchTensorDimensionError(
            f"Y has shape {tuple(Y.shape)}: {Y.size(-1)} outputs; the model has "
            f"{num_outputs}."
        )


def check_data(
    X: Tensor, Y: Tensor, Yvar: Tensor | None, num_outputs: int | None = None
) -> None:
    """Require training data of one dtype, device and batch shape."""
    check_tensor(X, "X")
    if X.ndim < 2 or X.size(-2) == 0:
        raise BotorchTensorDimensionError(
            f"X has shape {tuple(X.shape)}; expected (..., n, d) with n >= 1."
        )
    check_outputs(X, Y, num_outputs)
    if Y.shape[:-2] != X.shape[:-2]:
        raise BotorchTensorDimensionError(
            f"Y has batch shape {tuple(Y.shape[:-2])}, X {tuple(X.shape[:-2])}; "
            "expected the same."
        )
    dtypes, devices = {X.dtype, Y.dtype}, {X.device, Y.device}
    if Yvar is not None:
        check_tensor(Yvar, "Yvar")
        if Yvar.shape != Y.shape:
            raise BotorchTensorDimensionError(
                f"Yvar has shape {tuple(Yvar.shape)}; expected that of Y, "
                f"{tuple(Y.shape)}."
            )
        dtypes.add(Yvar.dtype)
        devices.add(Yvar.device)
    for name, found in (("dtypes", dtypes), ("devices", devices)):
        if len(found) > 1:
            raise InputDataError(
                f"The data have {name} {sorted(map(str, found))}; expected one."
            )
    check_finite(X, "X")
    check_finite(Y, "Y")
    if Yvar is not None:
        check_variances(Yvar, "Yvar")


def check_batch(X: Tensor, batch_shape: torch.Size) -> None:
    """Require the batch shape of the model."""
    if X.shape[:-2] != batch_shape:
        raise BotorchTensorDimensionError(
            f"X has batch shape {tuple(X.shape[:-2])}; expected that of the model, "
            f"{tuple(batch_shape)}."
        )


def check_finite(value: Tensor, name: str) -> None:
    """Require finite values."""
    if not bool(torch.isfinite(value).all()):
        raise InputDataError(
            f"{name} has NaN or infinite values. Remove these rows first."
        )


def check_variances(value: Tensor, name: str) -> None:
    """Require finite values above zero."""
    check_finite(value, name)
    if not bool((value > 0).all()):
        raise InputDataError(
            f"{name} has a smallest value of {value.min():g}; expected variances "
            "above zero."
        )


def broadcast_observations(
    X: Tensor, Y: Tensor, noise: Tensor | None, batch_shape: torch.Size
) -> tuple[Tensor, Tensor | None]:
    """Outcomes, and their noise, with the batch dimensions of all arguments."""
    try:
        batch = torch.broadcast_shapes(batch_shape, X.shape[:-2], Y.shape[:-2])
        Y = Y.expand(*batch, *Y.shape[-2:])
        if noise is not None:
            event = torch.broadcast_shapes(noise.shape[-2:], Y.shape[-2:])
            noise = noise.expand(*noise.shape[:-2], *event)
    except RuntimeError:
        raise BotorchTensorDimensionError(
            f"X has shape {tuple(X.shape)}, Y {tuple(Y.shape)}, the batch shape is "
            f"{tuple(batch_shape)}; expected batch dimensions that broadcast."
        ) from None
    return Y, noise

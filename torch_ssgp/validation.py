"""The input contract: checked once, at the front door."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ssgp.exceptions import (
    ArgumentError,
    DeviceError,
    DtypeError,
    NonFiniteError,
    ShapeError,
)


def check_inputs(
    x: Tensor,
    *,
    name: str,
    num_dims: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Inputs ``(*batch, n, d)``; a vector becomes one column.

    Args:
        x: What came.
        name: What to call it in messages.
        num_dims: Input dimension known so far.
        dtype: Dtype of the model.
        device: Device of the model.

    Returns:
        The inputs, at least two-dimensional.
    """
    _check_tensor(x, name, dtype, device)
    if x.ndim == 1:
        x = x.unsqueeze(-1)
    if x.ndim < 2 or x.size(-1) == 0:
        raise ShapeError(
            f"{name} has shape {tuple(x.shape)}; expected (n, d) with d >= 1."
        )
    if num_dims is not None and x.size(-1) != num_dims:
        raise ShapeError(
            f"{name} has shape {tuple(x.shape)}: {x.size(-1)} input dimensions; the "
            f"model has seen {num_dims}. Expected (..., n, {num_dims})."
        )
    _check_finite(x, name)
    return x


def check_targets(
    y: Tensor, x: Tensor, *, name: str, x_name: str, batch_shape: torch.Size
) -> None:
    """Targets ``(*batch, n)`` for inputs ``(*batch, n, d)``.

    Args:
        y: What came.
        x: Inputs, checked before.
        name: What to call the targets in messages.
        x_name: What to call the inputs.
        batch_shape: Batch shape of the model.
    """
    _check_tensor(y, name, x.dtype, x.device)
    num_new = x.size(-2)
    expected = (*batch_shape, num_new)
    if y.ndim and y.shape[-1:] == (1,) and y.shape[:-1] == expected:
        raise ShapeError(
            f"{name} has shape {tuple(y.shape)}; expected {expected}. "
            f"Use {name}.squeeze(-1)."
        )
    if tuple(y.shape) != expected:
        raise ShapeError(
            f"{name} has shape {tuple(y.shape)}; expected {expected} for {x_name} of "
            f"shape {tuple(x.shape)} and batch_shape {tuple(batch_shape)}."
        )
    if num_new == 0:
        raise ShapeError(
            f"{x_name} has shape {tuple(x.shape)}: an empty batch. "
            "Skip the update when nothing arrived."
        )
    _check_finite(y, name)


def check_noise(noise: Tensor, y: Tensor) -> None:
    """Noise variances, one per target."""
    _check_tensor(noise, "noise", y.dtype, y.device)
    try:
        noise.expand(y.shape)
    except RuntimeError:
        raise ShapeError(
            f"noise has shape {tuple(noise.shape)}; expected {tuple(y.shape)}, one "
            "variance per target."
        ) from None
    _check_finite(noise, "noise")
    if bool((noise <= 0).any()):
        raise ArgumentError(
            f"noise has a smallest value of {noise.min().item():g}; expected "
            "variances above zero."
        )


def check_positive_int(value: int, name: str, at_least: int = 1) -> None:
    """An integer option with a lower limit."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ArgumentError(
            f"{name} is {value!r}; expected an integer of at least {at_least}."
        )


def check_trust_region(width: float | None) -> None:
    """The width of the trust region."""
    if width is not None and not width > 0:
        raise ArgumentError(
            f"trust_region is {width!r}; expected a width above zero, or None for "
            "no trust region."
        )


def check_alpha(alpha: float) -> None:
    """The power of Power-EP."""
    if not 0 <= alpha <= 1:
        raise ArgumentError(
            f"alpha is {alpha!r}; expected a number in [0, 1]: 0 for the variational "
            "bound, 1 for EP."
        )


def _check_tensor(
    value: Tensor, name: str, dtype: torch.dtype, device: torch.device
) -> None:
    if not isinstance(value, Tensor):
        raise DtypeError(
            f"{name} is a {type(value).__name__}; expected a torch.Tensor. "
            f"Use torch.as_tensor({name})."
        )
    if value.dtype != dtype:
        kind = str(dtype).removeprefix("torch.")
        raise DtypeError(
            f"{name} has dtype {value.dtype}, the model {dtype}. Use "
            f"{name}.to(torch.{kind}) or model.to({value.dtype})."
        )
    if value.device != device:
        raise DeviceError(
            f"{name} is on {value.device}, the model on {device}. Use "
            f"{name}.to('{device}') or model.to('{value.device}')."
        )


def _check_finite(value: Tensor, name: str) -> None:
    bad = ~torch.isfinite(value)
    if bool(bad.any()):
        raise NonFiniteError(
            f"{name} has {int(bad.sum())} NaN or infinite values of {value.numel()}. "
            "Remove these rows before the update."
        )

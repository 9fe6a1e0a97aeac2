"""The input contract: checked once, at the front door."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any, SupportsIndex

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel
from gpytorch.means import Mean
from linear_operator import to_dense
from torch import Tensor, nn

from torch_ssgp.exceptions import (
    ArgumentError,
    DeviceError,
    DtypeError,
    NonFiniteError,
    ShapeError,
    UnknownOptionError,
    warn,
)


def check_inputs(
    x: Tensor,
    *,
    name: str,
    num_dims: int | None,
    dtype: torch.dtype,
    device: torch.device,
    batch_shape: torch.Size = torch.Size(),
) -> Tensor:
    """Inputs ``(*batch, n, d)`` as a model needs them; a vector becomes one column.

    Args:
        x: The argument, of any type.
        name: Its name in messages.
        num_dims: Input dimension known so far.
        dtype: That of the model.
        device: That of the model.
        batch_shape: The batch shape that they must broadcast with.
    """
    _check_tensor(x, name, dtype, device)
    came = tuple(x.shape)
    if x.ndim == 1:
        x = x.unsqueeze(-1)
    if x.ndim < 2 or x.size(-1) == 0:
        raise ShapeError(f"{name} has shape {came}; expected (n, d) with d >= 1.")
    if num_dims is not None and x.size(-1) != num_dims:
        found = f"{x.size(-1)} input dimension" + ("s" if x.size(-1) > 1 else "")
        one_point = f" For one point use {name}.unsqueeze(0)."
        raise ShapeError(
            f"{name} has shape {came}: {found}; the model has seen {num_dims}. "
            f"Expected (..., n, {num_dims}).{one_point if came == (num_dims,) else ''}"
        )
    if _go_together(x.shape[:-2], batch_shape) is None:
        expected = (*batch_shape, *x.shape[-2:])
        raise ShapeError(
            f"{name} has shape {tuple(x.shape)}, which does not fit batch_shape "
            f"{tuple(batch_shape)}. Expected {expected} or {tuple(x.shape[-2:])}."
        )
    _check_finite(x, name)
    return x


def check_targets(
    y: Tensor,
    x: Tensor,
    *,
    name: str,
    x_name: str,
    x_shape: torch.Size,
    batch_shape: torch.Size,
    may_miss: bool = False,
) -> Tensor | None:
    """Targets ``(*batch, n)`` for inputs: which readings are missing, if any is.

    Args:
        y: The argument, of any type.
        x: ``(*batch, n, d)`` inputs, checked before.
        name: What to call the targets in messages.
        x_name: What to call the inputs.
        x_shape: The shape in which the inputs came.
        batch_shape: Batch shape of the model.
        may_miss: Whether NaN is a reading that a stream does not have.
    """
    _check_tensor(y, name, x.dtype, x.device)
    expected = (*batch_shape, x.size(-2))
    if y.shape != expected:
        advice = (
            f" for {x_name} of shape {tuple(x_shape)} and batch_shape "
            f"{tuple(batch_shape)}."
        )
        if y.shape == (*expected, 1):
            advice = f". Use {name}.squeeze(-1)."
        raise ShapeError(
            f"{name} has shape {tuple(y.shape)}; expected {expected}{advice}"
        )
    if x.size(-2) == 0:
        raise ShapeError(
            f"{x_name} has shape {tuple(x_shape)}: an empty batch. "
            "Skip the update when nothing arrived."
        )
    if not may_miss:
        _check_finite(y, name)
    if not may_miss or y.is_meta or bool(torch.isfinite(y).all()):
        return None
    num_infinite, missing = int(torch.isinf(y).sum()), torch.isnan(y)
    if num_infinite:
        raise NonFiniteError(
            f"{name} has {num_infinite} infinite values of {y.numel()}. Use NaN where "
            "a stream has no reading."
        )
    if bool(missing.all()):
        raise NonFiniteError(
            f"{name} is NaN in all {y.numel()} places: no stream has a reading. Skip "
            "the update when nothing arrived."
        )
    return missing


def check_noise(noise: Tensor, y: Tensor, missing: Tensor | None = None) -> Tensor:
    """Noise variances like ``y``; one where a target is missing, whatever came."""
    _check_tensor(noise, "noise", y.dtype, y.device)
    try:
        noise = noise.expand(y.shape)
    except RuntimeError:
        raise ShapeError(
            f"noise has shape {tuple(noise.shape)}; expected {tuple(y.shape)}, one "
            "variance per target."
        ) from None
    if missing is not None:
        noise = torch.where(missing, 1.0, noise)
    _check_finite(noise, "noise")
    if bool((noise <= 0).any()):
        raise ArgumentError(
            f"noise has a smallest value of {noise.min().item():g}; expected "
            "variances above zero."
        )
    return noise


def check_tensor(value: Any, name: str) -> None:
    """Raise unless this is a tensor."""
    if not isinstance(value, Tensor):
        advice = "" if value is None else f" Use torch.as_tensor({name})."
        raise DtypeError(
            f"{name} is {kind_of(value)}; expected a torch.Tensor.{advice}"
        )


def check_module(value: Any, name: str, expected: type, example: str) -> None:
    """An object of the expected class."""
    if not isinstance(value, expected):
        kind = _with_article(expected.__name__.lstrip("_"))
        raise ArgumentError(
            f"{name} is {kind_of(value)}; expected {kind}, such as {example}."
        )


def check_choice(z: Any, policy: object, x: Tensor) -> None:
    """Inducing points that a policy chose: ``(*batch, m, d)`` that go with inputs."""
    name = f"The choice of {type(policy).__name__}"
    expected = ", ".join(map(str, (*x.shape[:-2], "m", x.size(-1))))
    came, fits = kind_of(z), False
    if isinstance(z, Tensor):
        came = f"{z.dtype} of shape {tuple(z.shape)} on {z.device}"
        fits = (z.dtype, z.device, z.ndim) == (x.dtype, x.device, x.ndim)
        fits = fits and z[..., :0, :].shape == x[..., :0, :].shape and z.size(-2) > 0
    if not fits:
        raise ArgumentError(
            f"{name} is {came}; expected {x.dtype} of shape ({expected}) on "
            f"{x.device}, at least one point, as candidates.points."
        )
    _check_finite(z, name)


def check_modules(
    kernel: Kernel, mean: Mean, likelihood: nn.Module, batch_shape: torch.Size
) -> None:
    """Modules that go with the batch shape of the model and with each other."""
    raw_noise = getattr(likelihood, "raw_noise", None)
    shapes = {
        "covar_module": kernel.batch_shape,
        "mean_module": getattr(mean, "batch_shape", torch.Size()),
        "likelihood": torch.Size() if raw_noise is None else raw_noise.shape[:-1],
    }
    for name, shape in shapes.items():
        if not expands_to(shape, batch_shape):
            raise ShapeError(
                f"{name} has batch_shape {tuple(shape)}, the model "
                f"{tuple(batch_shape)}. Use the same for both. All streams share a "
                f"{name} with an empty batch_shape."
            )
    devices = {
        tensor.device
        for module in (kernel, mean, likelihood)
        for tensor in (*module.parameters(), *module.buffers())
    }
    if len(devices) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise DeviceError(
            f"covar_module, mean_module and likelihood are on {names}; expected one "
            "device. Move them with .to(device)."
        )


def check_prior(kernel: Kernel, mean: Mean, x: Tensor) -> None:
    """A prior that has one value per row of the inputs ``(*batch, n, d)``."""
    num_dims = x.size(-1)
    _check_ard(kernel, num_dims)
    one = x.reshape(-1, num_dims)[:1]
    two = one.expand(2, -1)  # of another shape: nothing to compare on the device
    for name, values, expected in (
        ("covar_module", lambda: to_dense(kernel(one, two)), (1, 2)),
        ("mean_module", lambda: mean(one), (1,)),
    ):
        try:
            found = tuple(values().shape[-len(expected) :])
        except (RuntimeError, IndexError) as error:
            raise ShapeError(
                f"{name} cannot be evaluated at inputs of shape (1, {num_dims}); see "
                f"the error above. Expected a {name} for (..., n, {num_dims})."
            ) from error
        if found != expected:
            raise ShapeError(
                f"{name} has values of shape {found} where {expected} was expected: "
                "several per point. Use batch_shape for several outputs."
            )


def _check_ard(kernel: Kernel, num_dims: int) -> None:
    """A kernel, and its parts, for as many inputs as there are."""
    dims, kind = kernel.active_dims, type(kernel).__name__
    if dims is not None and dims.ndim == 0:
        raise ShapeError(
            f"{kind} has active_dims={int(dims)}; expected a sequence. "
            f"Use active_dims=[{int(dims)}]."
        )
    seen, ard = num_dims if dims is None else len(dims), kernel.ard_num_dims
    if ard not in (None, seen):
        raise ShapeError(
            f"{kind} has ard_num_dims={ard}; its inputs have d = {seen}. Use "
            f"ard_num_dims={seen}, or pass inputs of shape (n, {ard}); a single point "
            f"has shape (1, {ard})."
        )
    if isinstance(kernel, ScaleKernel):  # has the active_dims of its base
        _check_ard(kernel.base_kernel, num_dims)
    elif isinstance(kernel, AdditiveKernel | ProductKernel):
        for part in kernel.kernels:
            _check_ard(part, seen)


# -- options ------------------------------------------------------------------------


def wrong(name: str, value: object, expected: str) -> ArgumentError:
    """The error of an option: what came, and what was expected."""
    return ArgumentError(f"{name} is {value!r}; expected {expected}.")


def check_options(options: Iterable[str], known: Iterable[str], where: str) -> None:
    """Keywords that ``where`` takes: names of known options."""
    known = sorted(known)
    for name in [option for option in options if option not in known]:
        close = difflib.get_close_matches(name, known, n=1)
        advice = f" Did you mean {close[0]}?" if close else ""
        raise UnknownOptionError(
            f"{where} has no option {name!r}.{advice} Known options: "
            f"{', '.join(known)}."
        )


def check_flag(value: bool, name: str) -> None:
    """True or False: a string such as "no" would count as true."""
    if not isinstance(value, bool):
        raise wrong(name, value, "True or False")


def check_forget(forget: float | str | None) -> None:
    """The power of the past's likelihood."""
    if forget is None or (isinstance(forget, str) and forget == "auto"):
        return
    if isinstance(forget, str) or not (is_number(forget) and 0 < forget <= 1):
        raise wrong(
            "forget",
            forget,
            "a number in (0, 1], 1 to keep all, or 'auto' to let the evidence decide",
        )


def check_alpha(alpha: float) -> None:
    """The power of Power-EP."""
    if not (is_number(alpha) and 0 <= alpha <= 1):
        expected = "a number in [0, 1]: 0 for the variational bound, 1 for EP"
        raise wrong("alpha", alpha, expected)


def check_positive(value: float, name: str, or_zero: bool = False) -> None:
    """A finite number above zero, or zero too."""
    good = is_number(value) and 0 <= value < math.inf
    if not good or (value == 0 and not or_zero):
        raise wrong(
            name, value, f"a number {'zero or above' if or_zero else 'above zero'}"
        )


def check_positive_int(value: SupportsIndex, name: str, at_least: int = 1) -> int:
    """An integer option with a lower limit, such as one of NumPy, as an ``int``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < at_least:
        raise wrong(name, value, f"an integer of at least {at_least}")
    return number


def check_batch_shape(value: Iterable[int]) -> torch.Size:
    """Positive sizes, as ``torch.Size``."""
    try:
        shape = torch.Size(value)
    except TypeError:
        shape = None
    if shape is None or any(size < 1 for size in shape):
        raise wrong(
            "batch_shape",
            value,
            "sizes of at least 1, such as torch.Size([2]); torch.Size() for a single "
            "stream",
        )
    return shape


MEMORY = 1.5  # rows of a memory for every point that a compression leaves, by default


def check_memory_size(value: int | None, num_inducing: int) -> int:
    """The largest number of rows: room for the points, and for data besides."""
    if value is None:
        return max(int(MEMORY * num_inducing), num_inducing + 1)
    size = check_positive_int(value, "memory_size")
    if size < num_inducing:
        raise ArgumentError(
            f"memory_size is {size} with num_inducing={num_inducing}; expected at "
            "least as many rows as points that a compression leaves."
        )
    return size


def check_from_memory(value: bool | None) -> None:
    """A keyword of version 0.2.0, which had two sets of points."""
    if value is not None:
        warn(
            "from_memory is deprecated: every prediction is made from the whole "
            "memory. Leave it out.",
            DeprecationWarning,
        )


# -- pieces -------------------------------------------------------------------------


def _check_tensor(
    value: Tensor, name: str, dtype: torch.dtype, device: torch.device
) -> None:
    check_tensor(value, name)
    if value.dtype != dtype:
        other = f" or model.to({value.dtype})" if value.is_floating_point() else ""
        raise DtypeError(
            f"{name} has dtype {value.dtype}, the model {dtype}. Use "
            f"{name}.to({dtype}){other}."
        )
    if value.device != device:
        raise DeviceError(
            f"{name} is on {value.device}, the model on {device}. Use "
            f"{name}.to('{device}') or model.to('{value.device}')."
        )


def _check_finite(value: Tensor, name: str) -> None:
    # A sum is finite only where all of it is, and asks once.
    if value.is_meta or math.isfinite(value.detach().sum()):
        return
    bad = ~torch.isfinite(value)
    if bool(bad.any()):
        raise NonFiniteError(
            f"{name} has {int(bad.sum())} NaN or infinite values of {value.numel()}. "
            "Remove these rows first."
        )


def expands_to(shape: torch.Size, batch_shape: torch.Size) -> bool:
    """Whether a batch shape can be repeated to another."""
    return _go_together(shape, batch_shape) == batch_shape


def _go_together(*shapes: torch.Size) -> torch.Size | None:
    """The batch shape of several together, if they can be broadcast."""
    if shapes.count(shapes[0]) == len(shapes):  # torch takes its time
        return shapes[0]
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return None


def is_number(value: Any) -> bool:
    """A real number, such as one of NumPy."""
    if type(value) in (int, float):  # asking an abstract class takes its time
        return True
    return isinstance(value, Real) and not isinstance(value, bool)


def kind_of(value: Any) -> str:
    """The kind of a value, in words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else _with_article(type(value).__name__)


def _with_article(word: str) -> str:
    vowel = word == "ndarray" or word[0].lower() in "aeiou"
    return f"{'an' if vowel else 'a'} {word}"

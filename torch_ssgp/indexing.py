"""Some streams of a batch as a separate model: ``model[i]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.noise_models import FixedGaussianNoise, HomoskedasticNoise
from gpytorch.means import LinearMean, Mean
from gpytorch.priors import Prior as Density
from torch import Tensor, nn

from torch_ssgp import likelihoods
from torch_ssgp import validation as check
from torch_ssgp.core import StreamingCore
from torch_ssgp.exceptions import ArgumentError, UnsupportedLikelihoodError
from torch_ssgp.kernels import Drifting
from torch_ssgp.memory import Memory
from torch_ssgp.prediction import Predictor, Tail, freeze
from torch_ssgp.rows import Factor

Core = TypeVar("Core", bound=StreamingCore)
Index = tuple[int | slice | list[int], ...]
Take = Callable[[Tensor, int], Tensor]


def streams_of(core: Core, index: Any) -> Core:
    """A new model of some streams; this one is untouched.

    Values that all streams share are copied. Values per stream are indexed: parameters,
    their constraints and priors, memory, and starting hyperparameters.

    Args:
        core: A model with a batch shape.
        index: An integer, a slice, or a tuple of these: one for each of the first
            batch dimensions.
    """
    return taken(core, _as_index(core, index))


def taken(core: Core, index: Index) -> Core:
    """The same for an index that was checked; it may also hold a list of integers."""
    batch = core.batch_shape
    shape = torch.empty(batch, device="meta")[index].shape
    if 0 in shape:
        raise ArgumentError(
            f"The index leaves no stream of batch_shape {tuple(batch)}; expected at "
            "least one."
        )
    model = cast(Core, core.light_copy())
    model.forget_frozen_modules()  # they have the hyperparameters of all streams
    model.batch_shape = shape

    def take(value: Tensor, num_own: int) -> Tensor:
        """A new tensor of these streams; ``num_own`` of its dimensions are streams."""
        if num_own:
            value = value.expand(*batch, *value.shape[num_own:])[index]
        return value.clone(memory_format=torch.contiguous_format)

    num_own: dict[int, int] = {}
    for module in [m for root in model.prior() for m in root.modules()]:
        num_own |= _take_streams(module, shape, take)
    starts = zip(model.start.named_buffers(), model.prior().parameters(), strict=True)
    for (name, value), parameter in list(starts):
        setattr(model.start, name, take(value, num_own.get(id(parameter), 0)))
    model.memory = Memory(shape)
    sizes, buffers = Memory.SIZES, dict(core.memory.named_buffers())
    model.memory.replace(
        **{name: take(t, t.ndim - len(sizes[name])) for name, t in buffers.items()}
    )
    mean, kernel, likelihood = model.prior()
    check.check_modules(kernel, mean, likelihood, shape)
    fantasy = core.current_predictor()
    if fantasy is not None and fantasy.tails:  # which the memory has without a graph
        model.keep(_predictor_of(fantasy, model, take))
    return model


def _as_index(core: StreamingCore, index: Any) -> Index:
    """A tuple of integers and slices that fits the batch shape."""
    batch = tuple(core.batch_shape)
    if not batch:
        raise ArgumentError(
            "The model is a single stream and cannot be indexed. For several streams, "
            "give it a batch_shape."
        )
    if likelihoods.couples_classes(core.likelihood):
        raise UnsupportedLikelihoodError(
            f"batch_shape {batch} ends in the classes of "
            f"{type(core.likelihood).__name__}, which share their data; expected "
            "independent streams. Use the model itself."
        )
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | slice):
            raise ArgumentError(
                f"The index has {check.kind_of(part)}; expected integers and slices, "
                "such as model[0] or model[:2]."
            )
    if len(parts) > len(batch):
        raise IndexError(
            f"The index has {len(parts)} parts; the model has batch_shape {batch}."
        )
    for part, size in zip(parts, batch, strict=False):
        if isinstance(part, int) and not -size <= part < size:
            raise IndexError(f"There is no stream {part} in batch_shape {batch}.")
    return parts


def _predictor_of(old: Predictor, model: StreamingCore, take: Take) -> Predictor:
    """The predictor of some streams, graphs included."""

    def kept(value: Any, *num_kept: int) -> Any:
        """A tensor, or several, whose last ``num_kept`` dimensions are no streams."""
        if isinstance(value, tuple):
            parts = zip(value, num_kept, strict=True)
            return type(value)(*(kept(part, num) for part, num in parts))
        return None if value is None else take(value, value.ndim - num_kept[0])

    assert old.factor is not None
    kernel, mean, _ = model.frozen_modules(old.s.dtype)
    likelihood = freeze(model.likelihood, model.dtype)
    rate = kept(old.form.rate, 0) if isinstance(old.form, Drifting) else None
    new = Predictor(mean, kernel, likelihood, kept(old.s, 0), rate, old.now)
    new.jitter, new.points = old.jitter, kept(old.points, 2)
    new.rows = kept(old.rows, 2, 1, 1, 0, 0)
    new.factor = Factor(kept(old.factor.W, 2), kept(old.factor.e, 1))
    new.tails = tuple(
        Tail(kept(tail.x, 2), kept(tail.root, 1), kept(tail.border, 2, 2, 1))
        for tail in old.tails
    )
    return new


def _take_streams(module: nn.Module, shape: torch.Size, take: Take) -> dict[int, int]:
    """Leave some streams of the tensors of a module itself; by id, their batch dims."""
    counts = {id(t): _num_own(module, t) for t in _tensors(module)}
    num_own = max(counts.values(), default=0) or len(_batch_shape(module))
    if num_own == 0:
        return {}
    tensors = [t for t in _tensors(module) if counts[id(t)] == num_own]
    changed = [(module, tensors)]
    for child in module.children():
        # Bounds and priors are numbers, or have the shape of what they are for.
        if tensors and isinstance(child, Interval | Density):
            own = tensors[0].shape[:num_own]
            like = [t for t in _tensors(child) if t.shape[:num_own] == own]
            changed += [(child, like)] if like else []
    for each, values in changed:
        for tensor in values:
            tensor.data = take(tensor.data, num_own)
        name = "batch_shape" if isinstance(each, Mean) else "_batch_shape"
        if hasattr(each, name):
            setattr(each, name, shape + getattr(each, name)[num_own:])
    return {id(tensor): num_own for tensor in tensors}


def _tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a module itself."""
    own: list[Tensor | None] = [*module._parameters.values()]
    own += [t for name, t in module._buffers.items() if name != "active_dims"]
    if isinstance(module, FixedGaussianNoise):
        own.append(module.noise)  # a plain attribute
    return [t for t in own if t is not None]


def _batch_shape(module: Any) -> torch.Size:
    """The batch shape of a kernel or a mean itself, without that of its parts."""
    name = "_batch_shape" if isinstance(module, Kernel) else "batch_shape"
    is_known = isinstance(module, Kernel | Mean)
    return getattr(module, name, torch.Size()) if is_known else torch.Size()


def _num_own(module: nn.Module, tensor: Tensor) -> int:
    """How many of the first dimensions of a tensor run over streams."""
    if isinstance(module, LinearMean):
        return tensor.ndim - (2 if tensor is module.weights else 1)
    if isinstance(module, Likelihood | HomoskedasticNoise | FixedGaussianNoise):
        return max(tensor.ndim - 1, 0)
    own = _batch_shape(module)
    return len(own) if tensor.shape[: len(own)] == own else 0

"""Some streams of a batch as a separate model: ``model[i]``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, cast

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
    owned = [own for root in model.prior() for own in _owned(root)]
    num_own = {id(tensor): each.num_own for each in owned for tensor in each.tensors}
    parameters = model.prior().parameters()
    starts = list(model.start.named_buffers())
    for (name, value), parameter in zip(starts, parameters, strict=True):
        taken = _taken(value, num_own.get(id(parameter), 0), batch, index)
        setattr(model.start, name, taken)
    for each in owned:
        for tensor in each.tensors:
            tensor.data = _taken(tensor.data, each.num_own, batch, index)
        _set_batch_shape(each.module, each.num_own, shape)
    model.memory = _buffers_of(core.memory, Memory(shape), batch, index)
    mean, kernel, likelihood = model.prior()
    check.check_modules(kernel, mean, likelihood, shape)
    fantasy = core.current_predictor()
    if fantasy is not None and fantasy.tails:  # which the memory has without a graph
        model.keep(_predictor_of(fantasy, model, batch, index))
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


def _taken(value: Tensor, num_own: int, batch: torch.Size, index: Index) -> Tensor:
    """Values of some streams, as a new tensor.

    Args:
        value: A tensor whose first ``num_own`` dimensions run over streams.
        num_own: The number of these dimensions; zero if all streams share the value.
        batch: Batch shape of the model.
        index: Which streams.
    """
    if num_own:
        value = value.expand(*batch, *value.shape[num_own:])[index]
    return value.clone(memory_format=torch.contiguous_format)


def _buffers_of(old: Memory, new: Memory, batch: torch.Size, index: Index) -> Memory:
    """A memory of some streams, put into an empty one."""
    new.replace(
        **{
            name: _taken(value, value.ndim - len(old.SIZES[name]), batch, index)
            for name, value in old.named_buffers()
        }
    )
    return new


def _predictor_of(
    old: Predictor, model: StreamingCore, batch: torch.Size, index: Index
) -> Predictor:
    """The predictor of some streams, graphs included.

    Args:
        old: That of all streams.
        model: The model of these streams.
        batch: Batch shape of all streams.
        index: Which streams.
    """

    def take(value: Any, num_own: int) -> Any:
        if value is None:
            return None
        return _taken(value, value.ndim - num_own, batch, index)

    def take_all(values: Any, dims: tuple[int, ...]) -> Any:
        pairs = zip(values, dims, strict=True)
        return type(values)(*(take(value, num_own) for value, num_own in pairs))

    assert old.factor is not None
    kernel, mean, _ = model.frozen_modules(old.s.dtype)
    likelihood = freeze(model.likelihood, model.dtype)
    rate = take(old.form.rate, 0) if isinstance(old.form, Drifting) else None
    new = Predictor(mean, kernel, likelihood, take(old.s, 0), rate, old.now)
    new.jitter, new.points = old.jitter, take(old.points, 2)
    new.rows = take_all(old.rows, (2, 1, 1, 0, 0))
    new.factor = Factor(take(old.factor.W, 2), take(old.factor.e, 1))
    new.tails = tuple(
        Tail(take(tail.x, 2), take(tail.root, 1), take_all(tail.border, (2, 2, 1)))
        for tail in old.tails
    )
    return new


class Owned(NamedTuple):
    """Tensors of a module that have a value per stream.

    Attributes:
        module: Where they are.
        tensors: Parameters, buffers and what else it holds.
        num_own: How many of their first dimensions run over streams.
    """

    module: nn.Module
    tensors: list[Tensor]
    num_own: int


def _owned(root: nn.Module) -> Iterator[Owned]:
    """The tensors with a value per stream, in a module and its submodules."""
    for module in root.modules():
        by_count: dict[int, list[Tensor]] = {}
        for tensor in _tensors(module):
            by_count.setdefault(_num_own(module, tensor), []).append(tensor)
        num_own = max(by_count, default=0) or len(_batch_shape(module))
        if num_own == 0:
            continue
        tensors = by_count.get(num_own, [])
        yield Owned(module, tensors, num_own)
        # Bounds and priors are numbers, or have the shape of what they are for.
        for child in module.children():
            if tensors and isinstance(child, Interval | Density):
                own = tensors[0].shape[:num_own]
                like = [t for t in _tensors(child) if t.shape[:num_own] == own]
                if like:
                    yield Owned(child, like, num_own)


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


def _set_batch_shape(module: Any, num_own: int, shape: torch.Size) -> None:
    """Set the batch shape of a module that stores one."""
    if isinstance(module, Kernel):
        module._batch_shape = shape
    elif isinstance(module, Mean) and hasattr(module, "batch_shape"):
        module.batch_shape = shape
    elif isinstance(module, Density):
        module._batch_shape = shape + module._batch_shape[num_own:]

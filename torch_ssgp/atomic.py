"""Atomic changes of modules: all at once or not at all, never seen halfway."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_ssgp.buffers import Buffers
from torch_ssgp.exceptions import ArgumentError

Result = TypeVar("Result")


def atomic_change(
    change: Callable[[], Result],
    modules: Iterable[nn.Module],
    optimizers: Iterable[Optimizer] = (),
) -> Result:
    """Change modules atomically: any exception, even Ctrl-C, restores them.

    Parameters must keep their identity, because optimisers hold them. So they change
    one after the other, and an exception may occur in between.

    Args:
        change: Makes the change.
        modules: The modules it may change, with all their submodules.
        optimizers: Optimisers whose state it may change.

    Returns:
        What ``change`` returns.
    """
    undo = _Snapshot(modules, optimizers)
    try:
        return change()
    except BaseException:
        undo.restore()
        raise


class Locks:
    """Which thread may change a model, and which may read it.

    Attributes:
        commit: Held briefly, to change a model or to read all of it.
    """

    def __init__(self) -> None:
        self.commit = threading.RLock()
        self._writing = threading.Lock()  # held by an update, all along
        self._writer: int | None = None  # the thread that holds it

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Wait until other changes of the model are done, so that changes are serial.

        Gradients are enabled inside, whatever the mode of the caller. If the change
        fails, torch's generators are restored.

        Args:
            device: Device of the model.
        """
        if self._writing.locked() and self._writer == threading.get_ident():
            raise ArgumentError(
                "The model is in the middle of an update, which would overwrite this "
                "change. Change the model after the update, not in its callback, or "
                "change a copy: copy.deepcopy(model)."
            )
        with self._writing, torch.inference_mode(False):
            on_host = torch.get_rng_state()
            on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
            try:
                self._writer = threading.get_ident()
                yield
            except BaseException:
                torch.set_rng_state(on_host)
                if on_gpu is not None:
                    torch.cuda.set_rng_state(on_gpu, device)
                raise
            finally:
                self._writer = None


class AtomicModule:
    """A module that other threads see before a change or after it, never halfway."""

    @property
    def core(self: Any) -> Any:
        """The streaming model in it, which has the locks."""
        return self.model

    @torch.inference_mode(False)
    def state_dict(
        self: Any,
        *args: Any,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> Any:
        """Like that of ``torch.nn.Module``, but with copies of the values.

        Args:
            *args: As there.
            destination: As there.
            prefix: As there.
            keep_vars: Whether to return parameters and buffers themselves.
        """
        with self.core.locks.commit:
            state = nn.Module.state_dict(
                self, *args, destination=destination, prefix=prefix, keep_vars=keep_vars
            )
            for name, value in state.items():
                if name.startswith(prefix) and isinstance(value, Tensor):
                    state[name] = value if keep_vars else value.clone()
            return state

    def load_state_dict(
        self: Any,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        """Like that of ``torch.nn.Module``; if it raises, the model is unchanged.

        Args:
            state_dict: The state of a model with any number of inducing points.
            strict: Whether the keys must be the same.
            assign: Whether to take the tensors themselves, not their values.
        """
        load = partial(nn.Module.load_state_dict, self, state_dict, strict, assign)
        with self.core.locks.turn(self.core.device), self.core.locks.commit:
            return atomic_change(load, (self,))

    @torch.inference_mode(False)
    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Python's deep copy, made while no thread changes the module."""
        with self.core.locks.commit:
            new = memo[id(self)] = object.__new__(type(self))
            new.__setstate__(deepcopy(self.__getstate__(), memo))
            return new


class _Snapshot:
    """Attributes, values and gradients of modules, and the state of optimisers."""

    def __init__(
        self, modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]
    ) -> None:
        parts = {part: None for module in modules for part in module.modules()}
        self.attributes = [(vars(part), _shallow(vars(part))) for part in parts]
        tensors = {
            id(tensor): tensor
            for part in parts
            if not isinstance(part, Buffers)  # replaced, never changed in place
            for tensor in (*part._parameters.values(), *part._buffers.values())
            if tensor is not None
        }
        self.values = [(t, t.detach().clone(), _grad(t)) for t in tensors.values()]
        self.optimizers = [
            (
                optimizer,
                dict(optimizer.state),
                [(group, list(group["params"])) for group in optimizer.param_groups],
                getattr(optimizer, "_numel_cache", None),
            )
            for optimizer in optimizers
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything in place; the objects stay the same."""
        for now, before in self.attributes:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for tensor, value, grad in self.values:
            if tensor.shape == value.shape:
                # Not where a graph needs the tensor as it is, and it is.
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
            else:
                old = nn.Parameter(value, requires_grad=tensor.requires_grad)
                torch.utils.swap_tensors(tensor, old)
            if _grad(tensor) is not grad:
                tensor.grad = grad
        for optimizer, state, groups, numel in self.optimizers:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, parameters in groups:
                group["params"] = parameters
            if hasattr(optimizer, "_numel_cache"):
                optimizer._numel_cache = numel


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy that does not see entries replaced in parameters and buffers."""
    tables = ("_parameters", "_buffers", "_modules")
    return {
        name: value.copy() if name in tables else value
        for name, value in attributes.items()
    }


def _grad(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.is_leaf else None

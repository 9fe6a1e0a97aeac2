"""State in buffers that may change their size and are replaced atomically."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from torch_ssgp.exceptions import ShapeError, StateError
from torch_ssgp.validation import expands_to


class Later(Protocol):
    """Rows that came, and that buffers are made of only when somebody reads them."""

    def buffers(self) -> dict[str, Tensor]:
        """Buffers that differ from those before."""


class Buffers(nn.Module):
    """Buffers that change their size, keep their dtype, and are replaced atomically.

    Rows may be added :meth:`later`, in one assignment: a reader makes buffers of them.
    Subclasses list in ``SIZES`` the dimensions of each buffer after those of the batch.
    The same letter stands for the same size.
    """

    SIZES: dict[str, str]

    @property
    def _buffers(self) -> dict[str, Tensor | None]:
        """What ``torch.nn.Module`` calls by this name; here it waits for its reader."""
        held, rows = self.__dict__["_held"]
        if rows is not None:
            new: dict[str, Any] = {k: stored(v) for k, v in rows.buffers().items()}
            held = held | new
            with _SETTLING:
                if self.__dict__["_held"][1] is rows:
                    self.__dict__.update(_buffers=held, _held=(held, None))
        return held

    @_buffers.setter
    def _buffers(self, value: dict[str, Tensor | None]) -> None:
        # The first is what torch looks for, the second what counts here.
        self.__dict__.update(_buffers=value, _held=(value, None), _source=None)

    @property
    def before(self) -> dict[str, Tensor]:
        """Buffers without rows that came later, of the same device, dtype and batch."""
        return self.__dict__["_held"][0]

    @property
    def source(self) -> Later | None:
        """The rows that these buffers are, if they were not replaced since."""
        return self.__dict__["_source"]

    def __getattr__(self, name: str) -> Tensor:
        """Attributes are buffers, of the names in ``SIZES``."""
        found = self._buffers.get(name)
        return cast(Tensor, super().__getattr__(name) if found is None else found)

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace one buffer."""
        if name in self.SIZES and isinstance(value, Tensor):
            self.replace(**{name: value})
        else:
            super().__setattr__(name, value)

    def replace(self, **buffers: Tensor) -> None:
        """Replace buffers in one assignment: a reader sees the old ones or these."""
        self._buffers = {**self._buffers, **buffers}

    def later(self, rows: Later) -> None:
        """Let buffers be those of these rows, once somebody reads them."""
        with _SETTLING:
            self.__dict__["_held"] = self.__dict__["_held"][0], rows
            self.__dict__["_source"] = rows

    def __copy__(self) -> Any:
        """A copy that keeps these buffers when the original replaces its own."""
        new = type(self).__new__(type(self))
        vars(new).update(self.__dict__)
        new._buffers = dict(self._buffers)
        return new

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """All of them; there are no submodules to look into.

        Args:
            recurse: As in ``torch.nn.Module``.
        """
        return (buffer for buffer in self._buffers.values() if buffer is not None)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold values: a graph can be neither copied nor pickled."""
        buffers = {name: buffer.detach() for name, buffer in self.named_buffers()}
        held = {"_buffers": buffers, "_held": (buffers, None), "_source": None}
        return {**self.__dict__, **held}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move with the model, but stay in the dtype of the algebra."""
        buffers = {}
        for name, buffer in self.named_buffers():
            device = fn(buffer.new_empty(0)).device
            buffers[name] = buffer if device == buffer.device else buffer.to(device)
        self.replace(**buffers)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Take the sizes of the loaded state; torch would require the current ones.

        Buffers have the dtype of the algebra, whatever the dtype of the model.
        """
        g = state_dict.get(prefix + "g", self.g)
        if g.shape[:-1] != self.g.shape[:-1]:
            raise ShapeError(
                f"{prefix}g has shape {tuple(g.shape)} in the state loaded, "
                f"{tuple(self.g.shape)} here: the two models have different batch "
                "shapes. Build the model with the batch_shape of the saved one."
            )
        found = {
            name: state_dict[prefix + name]
            for name in self.SIZES
            if prefix + name in state_dict
        }
        if found:
            self._check_sizes(found, prefix)
        for name, value in found.items():
            # Also where the sizes agree: caches know their buffers by identity.
            setattr(self, name, torch.empty_like(value, device=self.g.device))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _check_sizes(self, values: dict[str, Tensor], prefix: str) -> None:
        """Raise unless these are the buffers of one object."""
        missing = [prefix + name for name in self.SIZES if name not in values]
        what = type(self).__name__
        if missing:
            raise StateError(
                f"The state has a {what} without {', '.join(missing)}; nothing was "
                "loaded. Pass a state with all its tensors."
            )
        batch_shape = values["g"].shape[:-1]
        sizes: dict[str, int] = {}
        for name, letters in self.SIZES.items():
            shape = values[name].shape
            cut = len(shape) - len(letters)
            if not (
                cut >= 0
                and expands_to(shape[:cut], batch_shape)
                and all(
                    sizes.setdefault(letter, size) == size
                    for letter, size in zip(letters, shape[cut:], strict=True)
                )
            ):
                raise StateError(
                    f"{prefix}{name} has shape {tuple(shape)} in the state, which "
                    f"does not fit the rest of the {what}; nothing was loaded. Pass a "
                    "state as returned by state_dict()."
                )


_SETTLING = Lock()  # held for two assignments


class Start(nn.Module):
    """Hyperparameters as they were before the first update, as set by the user.

    Args:
        parameters: The parameters of a new model.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        for name, value in self.named(parameters).items():
            self.register_buffer(name, value)

    @staticmethod
    def named(parameters: list[nn.Parameter]) -> dict[str, Tensor]:
        """Copies of their values, with the names of the buffers."""
        return {f"p{i}": p.detach().clone() for i, p in enumerate(parameters)}

    @property
    def values(self) -> list[Tensor]:
        """In the order of the parameters."""
        return list(self.buffers())


def stored(value: Tensor) -> Tensor:
    """A contiguous copy, as a loaded one would be: later results agree bit by bit."""
    value = value.detach() if value.requires_grad else value
    return value.clone(memory_format=torch.contiguous_format)

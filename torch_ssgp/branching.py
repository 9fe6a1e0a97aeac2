"""Copies of a model that keep what they inherited apart from what they saw."""

from __future__ import annotations

import hashlib
from copy import deepcopy
from typing import Any, TypeVar

import torch

from torch_ssgp.exceptions import ArgumentError
from torch_ssgp.memory import Memory
from torch_ssgp.models import StreamingGP
from torch_ssgp.multioutput import MultiOutputGP
from torch_ssgp.update.state import Base
from torch_ssgp.validation import kind_of

Model = TypeVar("Model", StreamingGP, MultiOutputGP)


def branch(base: Model) -> Model:
    """Make a copy for a worker, which can later be merged with other copies.

    It predicts, learns and forgets like any copy. Its memory keeps what the base knew
    separate from what is added, so that :func:`torch_ssgp.merge` counts the base once,
    whatever was learned or compressed in between. The price is at most ``num_inducing``
    more rows in the memory.

    Args:
        base: The model to continue; it is unchanged.

    Returns:
        A model of the same class.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> from torch_ssgp import StreamingGP, branch, merge
        >>> base = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=20)
        >>> x = torch.linspace(0, 9, 90).unsqueeze(-1)
        >>> y = x.sin().squeeze(-1)
        >>> result = base.update(x[::3], y[::3], num_steps=20)
        >>> workers = [branch(base), branch(base)]
        >>> for k, worker in enumerate(workers, start=1):
        ...     result = worker.update(x[k::3], y[k::3], num_steps=0)
        >>> int(merge(workers, base=base).memory.num_data)
        90
    """
    if isinstance(base, MultiOutputGP):
        several: Any = MultiOutputGP(branch(base.model))
        return several
    if not isinstance(base, StreamingGP):
        raise ArgumentError(
            f"base is {kind_of(base)}; expected a StreamingGP or a MultiOutputGP."
        )
    model = deepcopy(base)
    memory = model.memory
    if not memory.is_empty:
        past, whole = memory.compressed.past, memory.row_data.new_ones(())
        inherited = Base(key_of(memory), past, memory.num_raw, whole, memory.sunk)
        memory.replace(**inherited.buffers())
    return model


def key_of(memory: Memory) -> int:
    """A hash of what a model knows, never zero."""
    digest = hashlib.sha256()
    for tensor in (memory.points, memory.U, memory.g, memory.y, memory.weight):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest()[:7], "big") + 1

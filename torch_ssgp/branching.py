"""Copies of a model that keep what they inherited apart from what they saw."""

from __future__ import annotations

import hashlib
from copy import deepcopy
from typing import Any, TypeVar

import torch

from torch_ssgp.core import StreamingCore
from torch_ssgp.exceptions import ArgumentError
from torch_ssgp.memory import Memory
from torch_ssgp.models import StreamingGP
from torch_ssgp.multioutput import MultiOutputGP
from torch_ssgp.validation import kind_of

Model = TypeVar("Model", StreamingGP, MultiOutputGP)


def branch(base: Model) -> Model:
    """Make a copy for a worker, which can later be merged with other copies.

    It predicts, learns and forgets like any copy. Its memory keeps what the base knew
    separate from what is added, so that :func:`torch_ssgp.merge` counts the base once,
    whatever was learned or compressed in between. The price is at most ``memory_size``
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
    if not model.memory.is_empty:
        mark(model, key_of(base))
    return model


def mark(model: StreamingCore, key: int) -> None:
    """Mark everything a model knows as inherited from a base.

    Args:
        model: The model; no other thread may use it at the same time.
        key: The key of the base, see :func:`key_of`.
    """
    memory = model.memory
    device = memory.g.device
    memory.replace(
        base_key=torch.tensor(key, device=device),
        base_rows=torch.tensor(memory.g.size(-1), device=device),
        base_raw=torch.tensor(memory.num_raw, device=device),
        base_residual=memory.row_residual.clone(),
        base_data=memory.row_data.clone(),
        base_power=memory.row_data.new_ones(()),
    )


def key_of(base: StreamingCore) -> int:
    """A hash of what a model knows.

    Args:
        base: The model.
    """
    with base.locks.commit:
        memory: Memory = base.memory
        digest = hashlib.sha256()
        for tensor in (memory.points, memory.U, memory.g, memory.y, memory.weight):
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest()[:7], "big") + 1

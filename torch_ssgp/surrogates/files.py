"""Surrogates in files, with their transforms; see :mod:`torch_ssgp.persistence`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from torch_ssgp import persistence
from torch_ssgp.models import StreamingGP
from torch_ssgp.persistence import MODULES, Layout
from torch_ssgp.surrogates.base import TRANSFORMS
from torch_ssgp.surrogates.units import Moments

if TYPE_CHECKING:
    from torch_ssgp.surrogates.model import SingleTaskStreamingGP


def save(
    model: SingleTaskStreamingGP, num_dims: int, path: str | os.PathLike[str]
) -> None:
    """Write a surrogate to a file.

    Args:
        model: A model that no other thread changes.
        num_dims: The number of inputs, before transforms.
        path: The file; an existing one is replaced.
    """
    modules = {name: getattr(model.model, name) for name in MODULES}
    for name in TRANSFORMS:
        if hasattr(model, name):
            modules[name] = getattr(model, name)
    settings = {**persistence.core_settings(model.model), "num_dims": num_dims}
    persistence.write(path, model, settings, modules)


def _build(cls: Any, parts: dict[str, Any], content: dict[str, Any]) -> Any:
    settings, state = dict(content["settings"]), content["state"]
    num_dims = settings.pop("num_dims")
    core = StreamingGP(**{name: parts.pop(name) for name in MODULES}, **settings)
    model = object.__new__(cls)
    names = ("num_targets", "target_mean", "target_squares", "average_noise")
    *moments, average_noise = (torch.zeros_like(state[name]) for name in names)
    model.assemble(core, num_dims, Moments(*moments), average_noise, **parts)
    return model


LAYOUT = Layout(
    {**persistence.SETTINGS, "num_dims": int}, MODULES, "model.memory.g", _build
)

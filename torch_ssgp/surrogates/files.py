"""Surrogates in files, with their transforms; see :mod:`torch_ssgp.persistence`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from torch_ssgp import persistence
from torch_ssgp.exceptions import StateError
from torch_ssgp.models import StreamingGP
from torch_ssgp.persistence import MODULES, Layout, MapLocation
from torch_ssgp.surrogates.base import TRANSFORMS
from torch_ssgp.surrogates.units import Moments

if TYPE_CHECKING:
    from torch_ssgp.surrogates.model import SingleTaskStreamingGP

LAYOUT = Layout(
    {**persistence.SETTINGS, "num_dims": int}, MODULES, tensor="model.summary.g"
)


def save(
    model: SingleTaskStreamingGP, num_dims: int, path: str | os.PathLike[str]
) -> None:
    """Write a surrogate to a file.

    Args:
        model: A model that nobody changes meanwhile.
        num_dims: The number of inputs, before transforms.
        path: The file; an existing one is replaced.
    """
    modules = {name: getattr(model.model, name) for name in MODULES}
    for name in TRANSFORMS:
        if hasattr(model, name):
            modules[name] = getattr(model, name)
    settings = {**persistence.core_settings(model.model), "num_dims": num_dims}
    persistence.write(path, model, settings, modules)


def load(
    cls: type[SingleTaskStreamingGP],
    path: str | os.PathLike[str],
    map_location: MapLocation,
    given: dict[str, Any],
) -> SingleTaskStreamingGP:
    """Read a surrogate; see :meth:`SingleTaskStreamingGP.load`.

    Args:
        cls: The class the file must hold.
        path: A file that :func:`save` wrote.
        map_location: As in ``torch.load``.
        given: Built modules and transforms by name; None where the file has one.
    """
    content = persistence.read(path, cls, map_location, LAYOUT)
    for name in TRANSFORMS:
        if given[name] is not None and name not in content["modules"]:
            raise StateError(
                f"{name} was passed, but the model in {path} has none. Load it without."
            )
    parts = persistence.rebuild(path, content, map_location, LAYOUT, given)
    settings, state = dict(content["settings"]), content["state"]
    with persistence.fitting_together(path):
        num_dims = settings.pop("num_dims")
        core = StreamingGP(**{name: parts.pop(name) for name in MODULES}, **settings)
        model = object.__new__(cls)
        names = ("num_targets", "target_mean", "target_squares", "average_noise")
        *moments, average_noise = (torch.zeros_like(state[name]) for name in names)
        model.assemble(core, num_dims, Moments(*moments), average_noise, **parts)
        model.load_state_dict(state)
    return model.train(content["training"])

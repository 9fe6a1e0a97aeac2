"""Models in files.

A file is a tag, the SHA-256 of all that follows (torch does not check the CRCs of its
own files), and a ``torch.save`` of plain values and tensors. Every module is stored as
its own blob of bytes, so that one unknown class leaves the rest readable. No code in a
file is run: ``torch.load(weights_only=True)`` builds GPyTorch's classes and ours.
Modules of other classes are passed to ``load``.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import isfunction
from types import BuiltinFunctionType, MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from gpytorch.means import constant_mean
from gpytorch.module import Module
from gpytorch.utils.transforms import inv_sigmoid, inv_softplus
from torch import Tensor, nn
from torch.nn.modules.module import _WrappedHook

from torch_ssgp.exceptions import StateError
from torch_ssgp.inducing import AdaptiveBudget, InducingPolicy
from torch_ssgp.validation import kind_of

if TYPE_CHECKING:
    from torch_ssgp.models import StreamingGP

FORMAT_VERSION = 3  # version 2 is that of 0.2.0, with a summary besides the memory
OLDEST = 2
MODULES = ("covar_module", "likelihood", "mean_module", "inducing_policy")
ENTRIES = {
    "class": str,
    "settings": dict,
    "dtype": torch.dtype,
    "training": bool,
    "state": dict,
    "modules": dict,
}
SETTINGS = {
    "num_inducing": int,
    "alpha": float,
    "share_noise": bool,
    "batch_shape": torch.Size,
    "memory_size": int,
}

_TAG = b"torch_ssgp model\n"
_DIGEST_SIZE = hashlib.sha256().digest_size

MapLocation = str | torch.device | dict[str, str] | Callable[[Any, str], Any] | None


def core_settings(core: StreamingGP) -> dict[str, Any]:
    """Arguments of the constructor of a streaming model, apart from its modules."""
    return {name: kind(getattr(core, name)) for name, kind in SETTINGS.items()}


def save(model: StreamingGP, path: str | os.PathLike[str]) -> None:
    """Write a model to a file; see :meth:`torch_ssgp.StreamingGP.save`."""
    modules = {name: getattr(model, name) for name in MODULES}
    write(path, model, core_settings(model), modules)


def write(
    path: str | os.PathLike[str],
    model: Any,
    settings: dict[str, Any],
    modules: dict[str, Any],
) -> None:
    """Write a model of any class to a file atomically.

    Args:
        path: The file; an existing one is replaced.
        model: An :class:`~torch_ssgp.atomic.AtomicModule` that no other thread changes.
        settings: Plain arguments of its constructor.
        modules: Its modules by name.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "class": type(model).__name__,
        "settings": settings,
        "dtype": model.core.dtype,
        "training": model.training,
        "state": model.state_dict(),
        "modules": {
            name: {"classes": _classes(module), "blob": _pack(module)}
            for name, module in modules.items()
        },
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    payload = buffer.getvalue()
    _replace_file(path, _TAG + hashlib.sha256(payload).digest() + payload)


def _build(cls: Any, modules: dict[str, Any], content: dict[str, Any]) -> Any:
    return cls(**modules, **content["settings"])


def load(
    cls: type,
    path: str | os.PathLike[str],
    map_location: MapLocation,
    given: dict[str, Any],
    settings: dict[str, type] = SETTINGS,
    build: Callable[[Any, dict[str, Any], dict[str, Any]], Any] = _build,
) -> Any:
    """Read a model; see :meth:`torch_ssgp.StreamingGP.load`.

    Args:
        cls: The class the file must hold.
        path: A file that :func:`write` wrote.
        map_location: As in ``torch.load``.
        given: Built modules by name; None where the file has one.
        settings: Arguments of the constructor that it must hold, with their types.
        build: Makes a model of a class from its modules and the content of the file.
    """
    content = _read(path, map_location)
    if content["class"] != cls.__name__:
        raise StateError(
            f"{path} holds a {content['class']}; expected a {cls.__name__}. "
            f"Use {content['class']}.load."
        )
    with _state_errors(f"{path} cannot be read as a model:"):
        _check_kinds(content["settings"], settings)
        for name in {*MODULES, *content["modules"]}:
            _check_kinds(content["modules"][name], {"classes": list})
        state = content["state"]
        device = [state[key] for key in state if key.endswith("memory.g")][0].device
    modules = _rebuild(path, content, map_location, device, given)
    with _state_errors(
        f"The content of {path} is inconsistent, or does not fit the modules that you "
        "pass. Build them as they were when the model was saved."
    ):
        model = build(cls, modules, content)
        model.core.to(content["dtype"])  # for a model whose modules have no tensor
        model.load_state_dict(state)
    return model.train(content["training"])


def _rebuild(
    path: str | os.PathLike[str],
    content: dict[str, Any],
    map_location: MapLocation,
    device: torch.device,
    given: dict[str, Any],
) -> dict[str, Any]:
    """All modules of a file by name: rebuilt from it, or given by the caller."""
    for name, module in given.items():
        if module is not None and name not in content["modules"]:
            raise StateError(
                f"{name} was passed, but the model in {path} has none. Load it without."
            )
    modules = {}
    for name, saved in content["modules"].items():
        module = given.get(name)
        if module is None:
            module = _unpack(saved, name, path, map_location)
            if content["format_version"] == 2 and _was_default(module):
                module = None
        elif isinstance(module, nn.Module):
            _check_same_classes(module, saved, name, path)
            module.to(dtype=content["dtype"], device=device)
        modules[name] = module
    return modules


def _was_default(policy: Any) -> bool:
    """Whether it is the policy of version 0.2 if none was given.

    It chose the points of predictions, and not what was remembered.
    """

    def plain(value: Any) -> Any:
        if not isinstance(value, InducingPolicy):
            return value
        return type(value), {name: plain(part) for name, part in vars(value).items()}

    return plain(policy) == plain(AdaptiveBudget())


# -- files --------------------------------------------------------------------------


def _replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a new file, then rename it: no reader ever sees half a file."""
    path = os.path.realpath(path)  # a link stays a link
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if os.name == "posix":  # elsewhere a directory cannot be opened
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(path: str | os.PathLike[str], map_location: MapLocation) -> dict[str, Any]:
    """The content of a file with a valid checksum and format."""
    with open(path, "rb") as file:
        data = file.read()
    if not data.startswith(_TAG):
        raise StateError(
            f"{path} is not a model saved by model.save. A state_dict is loaded with "
            "model.load_state_dict(torch.load(path, weights_only=True))."
        )
    start = len(_TAG) + _DIGEST_SIZE
    if hashlib.sha256(data[start:]).digest() != data[len(_TAG) : start]:
        raise StateError(
            f"{path} is damaged: its checksum does not match its content. It was "
            "truncated or changed after it was written. Use another copy."
        )
    with _state_errors(f"{path} cannot be read as a model:"):
        buffer = io.BytesIO(data[start:])
        content = torch.load(buffer, map_location=map_location, weights_only=True)
        version = content["format_version"]
        is_known = OLDEST <= version <= FORMAT_VERSION
        if is_known:
            _check_kinds(content, ENTRIES)
    if not is_known:
        advice = "Upgrade torch_ssgp."
        if version < OLDEST:
            advice = "Load it with torch_ssgp 0.2 and save it again."
        raise StateError(
            f"{path} has format version {version}; this torch_ssgp reads versions "
            f"{OLDEST} to {FORMAT_VERSION}. {advice}"
        )
    return content


@contextmanager
def _state_errors(message: str) -> Iterator[None]:
    """Turn any error into a :class:`StateError` that begins with a message."""
    try:
        yield
    except Exception as error:
        raise StateError(f"{message} {type(error).__name__}, {error}") from error


def _check_kinds(entries: dict[str, Any], kinds: dict[str, type]) -> None:
    """Raise unless these entries exist and have these types."""
    for name, kind in kinds.items():
        if not isinstance(entries[name], kind):
            raise TypeError(f"{name} is {kind_of(entries[name])}")


# -- modules ------------------------------------------------------------------------


def _classes(module: Any) -> list[str]:
    """Full names of the classes a module or policy is made of, itself first."""
    if module is None:
        return ["None"]
    is_module = isinstance(module, nn.Module)
    parts = module.modules() if is_module else [module, *vars(module).values()]
    kinds = [kind for kind in map(type, parts) if kind.__module__ != "builtins"]
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]


def _check_same_classes(
    module: nn.Module, saved: dict[str, Any], name: str, path: Any
) -> None:
    """Raise unless a module that was passed is built like the saved one."""
    # Without their modules: classes may have moved since.
    ours, theirs = (
        [full_name.rpartition(".")[2] for full_name in names]
        for names in (_classes(module), saved["classes"])
    )
    if ours != theirs:
        raise StateError(
            f"{name} is made of {', '.join(ours)}; in {path} it is made of "
            f"{', '.join(theirs)}. Build it as it was when the model was saved."
        )


def _pack(module: Any) -> bytes | None:
    """A module as bytes, or None if it cannot be pickled: then it is passed to load."""
    buffer = io.BytesIO()
    pickle_module = SimpleNamespace(__name__="pickle", Pickler=_Pickler)
    try:
        torch.save(module, buffer, pickle_module=pickle_module)
    except Exception:
        return None
    return buffer.getvalue()


def _unpack(
    saved: dict[str, Any], name: str, path: Any, map_location: MapLocation
) -> Any:
    """The module in a blob, if it is made of classes that are known."""
    try:
        buffer = io.BytesIO(saved["blob"])  # empty if there is none: that raises too
        with _only_known():
            return torch.load(buffer, map_location=map_location, weights_only=True)
    except Exception as error:
        known = {f"{obj.__module__}.{obj.__qualname__}" for obj in _known()}
        first, *rest = saved["classes"]
        own = [full_name for full_name in rest if full_name not in known]
        fate = f"its values are then replaced by those in {path}"
        if name == "inducing_policy":
            fate = "it is used as passed"
        raise StateError(
            f"{name} is a {first}{' with ' if own else ''}{', '.join(own)}, which "
            "cannot be rebuilt from a file: only classes of GPyTorch, BoTorch and "
            "torch_ssgp can, if they contain no lambda. Build it again and pass it, "
            f"{name}=...; {fate}."
        ) from error


class _Pickler(pickle.Pickler):
    """Writes functions so that reading them back needs no ``getattr``."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, MethodType):
            return _method, (obj.__self__, obj.__name__)
        if isinstance(obj, BuiltinFunctionType) and obj in _TRANSFORMS.values():
            return _transform, (obj.__name__,)
        return NotImplemented


_TRANSFORMS = {f.__name__: f for f in (torch.exp, torch.log, torch.sigmoid)}


def _transform(name: str) -> Callable[[Tensor], Tensor]:
    """A function of a constraint that cannot be imported by name."""
    return _TRANSFORMS[name]


def _method(module: Module, name: str) -> MethodType:
    """A method that GPyTorch keeps in a module: hooks, and what priors look at."""
    if not isinstance(module, Module) or not (
        name == "_load_state_hook_ignore_shapes"
        or name.endswith(("_param", "_closure"))
    ):
        raise pickle.UnpicklingError(f"{name} of {type(module).__name__} is not known.")
    return MethodType(getattr(type(module), name), module)


_KNOWN_PACKAGES = (
    "gpytorch.kernels.",
    "gpytorch.means.",
    "gpytorch.likelihoods.",
    "gpytorch.constraints.",
    "gpytorch.priors.",
    "gpytorch.utils.quadrature",
    "torch.distributions.",  # priors are made of them
    "torch_ssgp.inducing",
    "botorch.models.kernels.",
    "botorch.models.transforms.",
)
_lock = threading.Lock()


def _known() -> set[Any]:
    """Everything a file may refer to: the classes of these packages and their parts."""
    classes = {
        value
        for package, module in list(sys.modules.items())
        if package.startswith(_KNOWN_PACKAGES)
        for value in list(vars(module).values())
        if isinstance(value, type) and value.__module__ == package
    }
    containers = {nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict}
    functions = {nn.Softplus, inv_softplus, inv_sigmoid, _method, _transform}
    # ConstantMean reads states of older versions.
    hooks = {_WrappedHook, *filter(isfunction, vars(constant_mean).values())}
    return classes | containers | functions | hooks


@contextmanager
def _only_known() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` build known classes."""
    # torch's list is global: one at a time, and what others put there stays.
    with _lock:
        new = _known() - set(torch.serialization.get_safe_globals())
        with torch.serialization.safe_globals(list(new)):
            yield

"""A model in a few lines, for prompts and notebooks."""

from __future__ import annotations

from copy import copy
from html import escape
from typing import TYPE_CHECKING, Any

from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from torch import Tensor

from torch_ssgp.likelihoods import is_gaussian
from torch_ssgp.memory import Memory

if TYPE_CHECKING:
    from torch_ssgp.core import StreamingCore


def as_text(core: StreamingCore) -> str:
    """Five lines, the name of the class before the first."""
    lines = [f"{name:<8}{value}" for name, value in _facts(core).items()]
    return f"{type(core).__name__}\n  " + "\n  ".join(lines)


def as_html(core: StreamingCore) -> str:
    """A small table."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{name}</th>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for name, value in _facts(core).items()
    )
    return f"<table><caption>{type(core).__name__}</caption>{rows}</table>"


def _facts(core: StreamingCore) -> dict[str, str]:
    with core.locks.commit:
        memory = copy(core.memory)
        return {
            "kernel": _kernel(core.covar_module),
            "memory": f"{_count(memory.num_points, 'point')}; {memory.num_rows} of at "
            f"most {core.memory_size} rows, {memory.num_raw} of them raw data",
            "data": _data(memory, core.batch_shape),
            "noise": _noise(core.likelihood),
            "alarm": _alarm(memory),
        }


def _kernel(kernel: Any) -> str:
    """A formula, such as ``1.3 * Matern(lengthscale=0.8)``."""
    if isinstance(kernel, ScaleKernel):
        return f"{_value(kernel.outputscale)} * {_kernel(kernel.base_kernel)}"
    if isinstance(kernel, AdditiveKernel):
        return "(" + " + ".join(map(_kernel, kernel.kernels)) + ")"
    if isinstance(kernel, ProductKernel):
        return " * ".join(map(_kernel, kernel.kernels))
    parts = [_kernel(each) for each in kernel.children() if isinstance(each, Kernel)]
    for name, _ in kernel.named_parameters(recurse=False):
        name = name.removeprefix("raw_")
        parts.append(f"{name}={_value(getattr(kernel, name))}")
    return f"{type(kernel).__name__.removesuffix('Kernel')}({', '.join(parts)})"


def _data(memory: Memory, batch_shape: tuple[int, ...]) -> str:
    counts = memory.count()
    text = f"{_value(memory.num_data)} seen in {_count(counts.num_updates, 'update')}"
    if batch_shape:
        text += f", by streams of shape {tuple(batch_shape)}"
    if counts.num_outliers:
        text += f", {_count(counts.num_outliers, 'outlier')} left out"
    return text


def _noise(likelihood: Likelihood) -> str:
    if isinstance(likelihood, FixedNoiseGaussianLikelihood):
        if likelihood.second_noise_covar is None:
            return "known"
        return f"known, plus {_value(likelihood.second_noise)}"
    if is_gaussian(likelihood):
        return f"variance {_value(likelihood.noise)}"
    return f"that of a {type(likelihood).__name__}"


def _alarm(memory: Memory) -> str:
    largest, place = memory.alarm.flatten().max(0)
    if not largest > 0.05:
        return "none"
    began = float(memory.alarmed.expand_as(memory.alarm).flatten()[place])
    return f"{float(largest):.1f} nats, from the last {memory.num_raw - began:.0f} data"


def _value(value: Tensor) -> str:
    """One number, or the range of several."""
    value = value.detach()
    low, high = (f"{float(v):.4g}" for v in (value.min(), value.max()))
    return low if low == high else f"{low} to {high}"


def _count(number: float, what: str) -> str:
    return f"{number:.0f} {what}{'' if number == 1 else 's'}"

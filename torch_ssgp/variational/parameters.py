"""Parameters that change their size while an optimiser holds them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    _VariationalDistribution,
)
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from torch_ssgp import validation as check
from torch_ssgp.exceptions import ArgumentError, StreamingGPWarning, warn
from torch_ssgp.functional import matvec, solve_lower, squared_norm

Optimizers = Optimizer | Iterable[Optimizer] | None


def whitened_parameters(
    q: _VariationalDistribution, mean: Tensor, chol: Tensor
) -> dict[str, Tensor]:
    """Values of the parameters of ``q`` that make it ``N(mean, chol cholᵀ)``.

    A mean-field distribution takes the marginal variances.
    """
    if isinstance(q, CholeskyVariationalDistribution):
        return {"variational_mean": mean, "chol_variational_covar": chol}
    if isinstance(q, MeanFieldVariationalDistribution):
        stddev = squared_norm(chol, -1).sqrt()
        return {"variational_mean": mean, "_variational_stddev": stddev}
    eye = torch.eye(chol.size(-1), dtype=chol.dtype, device=chol.device)
    inverse = solve_lower(chol, eye)
    precision = inverse.mT @ inverse
    natural_vec = matvec(precision, mean)
    if isinstance(q, NaturalVariationalDistribution):
        return {"natural_vec": natural_vec, "natural_mat": -0.5 * precision}
    if isinstance(q, TrilNaturalVariationalDistribution):
        return {"natural_vec": natural_vec, "natural_tril_mat": inverse}
    raise ArgumentError(
        f"{type(q).__name__} cannot be moved to new inducing points; expected "
        "CholeskyVariationalDistribution, MeanFieldVariationalDistribution, "
        "NaturalVariationalDistribution or TrilNaturalVariationalDistribution. "
        "absorb() without inducing_points works."
    )


def replace_parameter(
    module: nn.Module,
    name: str,
    value: Tensor,
    optimizers: tuple[Optimizer, ...] = (),
) -> None:
    """Give a parameter another value, of any shape, and keep the object.

    An optimiser that holds the parameter can then continue with it. PyTorch does not
    allow this while a graph that uses the parameter is alive and has not been run
    backward. In that case the parameter is replaced by a new object, also in the
    optimisers passed here; these drop their state of the parameter in any case.
    """
    old = module.get_parameter(name)
    # Contiguous, because L-BFGS calls grad.view(-1).
    value = value.detach().to(old).clone(memory_format=torch.contiguous_format)
    new = old
    if value.shape == old.shape:
        with torch.no_grad():
            old.copy_(value)
        old.grad = None
    else:
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        try:
            torch.utils.swap_tensors(old, new)
            new = old
        except RuntimeError:
            setattr(module, name, new)
    held = [_drop_state(optimizer, old, new) for optimizer in optimizers]
    if new is not old and not any(held):
        warn(
            f"{name} was replaced by a new parameter, because a graph that uses the "
            "old one is still alive, and your optimiser still holds the old one. Pass "
            "optimizer= to absorb, or delete the loss and the output first.",
            StreamingGPWarning,
        )


def _drop_state(optimizer: Optimizer, old: Tensor, new: Tensor) -> bool:
    """Drop the state that an optimiser has of a parameter; whether it holds it."""
    held = False
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            if parameter is old:
                group["params"][i] = new
                held = True
    optimizer.state.pop(old, None)
    if held and isinstance(optimizer, LBFGS):
        # One flat history for all parameters, and a remembered size.
        optimizer.state.clear()
        optimizer._numel_cache = None
    return held


def as_tuple(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    """All optimisers, checked; an iterator is consumed here and nowhere else."""
    if optimizer is None:
        return ()
    found = tuple(optimizer) if isinstance(optimizer, Iterable) else (optimizer,)
    for one in found:
        check.check_module(one, "optimizer", Optimizer, "torch.optim.Adam(...)")
    return found


def resize_like(
    module: nn.Module, names: Iterable[str], state_dict: dict[str, Tensor], prefix: str
) -> None:
    """Give parameters or buffers the sizes they have in a state, before it is loaded.

    The number of dimensions never changes: torch refuses another one by name.
    """
    for name in names:
        ours, value = getattr(module, name), state_dict.get(prefix + name)
        if value is None or value.shape == ours.shape or value.dim() != ours.dim():
            continue
        if isinstance(ours, nn.Parameter):
            replace_parameter(module, name, torch.empty_like(value))
        else:
            setattr(module, name, ours.new_empty(value.shape))

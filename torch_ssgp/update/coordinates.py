"""Variables in which one learning rate suits every parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from gpytorch.constraints import GreaterThan, Interval, Positive
from gpytorch.means import ConstantMean
from gpytorch.module import Module
from torch import Tensor, nn

from torch_ssgp import functional as fn
from torch_ssgp.update.initialization import fit_shape, weights_of
from torch_ssgp.update.objective import Objective

WEIGHT = 0.2  # unit of the weights of a network before a kernel
SLOWEST = 1e-2  # share of the function that drifts away over all data
TINY = 1e-30  # a positive hyperparameter is at least so large, for its logarithm
QUIET = 1e-10  # least noise, in variances of the targets: smaller ones ruin the factor


class Coordinate(NamedTuple):
    """One parameter, and the variable the optimiser sees instead.

    Attributes:
        parameter: What the modules read.
        eta: What the optimiser moves, where it starts.
        to_parameter: ``parameter = to_parameter(eta)``.
        to_value: What the modules show, once the constraint of the parameter is met, as
            a function of ``eta``.
        floor: Smallest value of ``eta``, below which gradients would vanish.
        to_log: The logarithm of the hyperparameter, up to a unit, as a function of
            ``eta``; ``None`` where it may be negative.
    """

    parameter: nn.Parameter
    eta: Tensor
    to_parameter: Callable[[Tensor], Tensor]
    to_value: Callable[[Tensor], Tensor]
    floor: Tensor | None = None
    to_log: Callable[[Tensor], Tensor] | None = None


def coordinates(
    objective: Objective,
    learn_hyperparameters: bool,
    learn_inducing_points: bool,
) -> list[Coordinate]:
    """Variables in which one learning rate suits every parameter.

    Positive hyperparameters move in log space, whatever transform their constraint
    uses, so that they neither crawl when large nor get stuck when small; constants of
    the mean in units of the spread of the targets; inducing points in units of their
    spacing; weights of networks in units of their usual size; periods by how far they
    shift the end of the data, in periods.
    """
    result = []
    if learn_hyperparameters:
        for module in (objective.mean, objective.kernel, objective.likelihood):
            result += _hyperparameters(module, objective)
        rate = objective.log_rate
        if rate is not None and rate.requires_grad:
            floor = _slowest(objective).expand(rate.shape)
            eta = rate.detach().clone().maximum(floor)
            result.append(Coordinate(rate, eta, _same, _same, floor, to_log=_same))
    if learn_inducing_points:
        z = objective.z
        assert z is not None
        start, spacing = z.detach().clone(), _spacing(z.detach(), objective.x)
        result.append(_linear(z, torch.zeros_like(start), spacing, start))
    return result


def _spacing(z: Tensor, x: Tensor) -> Tensor:
    """Typical distance of neighbouring inducing points, ``(*batch, 1, d)``."""
    points = torch.cat([z, x], -2)
    spread = points.amax(-2, keepdim=True) - points.amin(-2, keepdim=True)
    spread = torch.where(spread > 0, spread, 1)
    return spread * z.size(-2) ** (-1.0 / z.size(-1))


def _slowest(objective: Objective) -> Tensor:
    """The logarithm of a rate at which nothing would be seen of a drift."""
    return (SLOWEST / objective.num_data.clamp_min(1)).log()


def _hyperparameters(module: Module, objective: Objective) -> list[Coordinate]:
    spread = objective.spread()
    periods = {
        id(part.raw_period_length)
        for part in module.modules()
        if hasattr(part, "raw_period_length")
    }
    constants = {
        id(m.raw_constant) for m in module.modules() if isinstance(m, ConstantMean)
    }
    weights = set(map(id, weights_of(module)))
    result = []
    for _, parameter, constraint in module.named_parameters_and_constraints():
        if not parameter.requires_grad:
            continue
        raw = parameter.detach().clone()
        if _is_positive(constraint):
            unit = None
            if id(parameter) in periods:
                length = constraint.transform(raw)
                unit = (length / _extent(objective)).clamp_max(1)
            least = torch.full_like(raw, TINY)
            if parameter is getattr(module, "raw_noise", None):
                least = fit_shape(QUIET * spread.square().unsqueeze(-1), raw)
            result.append(_log_coordinate(parameter, constraint, unit, least))
        elif id(parameter) in constants and constraint is None:
            unit = fit_shape(spread, raw)
            result.append(_linear(parameter, raw / unit, unit))
        elif id(parameter) in weights:
            result.append(_linear(parameter, raw / WEIGHT, WEIGHT))
        else:
            to_log = _log_of(constraint) if _is_above_zero(constraint) else None
            shown = _same if constraint is None else constraint.transform
            result.append(Coordinate(parameter, raw, _same, shown, to_log=to_log))
    return result


def _same(eta: Tensor) -> Tensor:
    return eta


def _linear(
    parameter: nn.Parameter,
    eta: Tensor,
    unit: Tensor | float,
    start: Tensor | float = 0.0,
) -> Coordinate:
    def to_parameter(eta: Tensor) -> Tensor:
        return start + unit * eta

    return Coordinate(parameter, eta, to_parameter, to_parameter)


def _is_positive(constraint: Interval | None) -> bool:
    return isinstance(constraint, GreaterThan) and _is_above_zero(constraint)


def _is_above_zero(constraint: Interval | None) -> bool:
    return constraint is not None and bool((constraint.lower_bound >= 0).all())


def _log_of(constraint: Interval) -> Callable[[Tensor], Tensor]:
    """The logarithm of a value between two bounds, from its raw parameter."""
    return lambda raw: constraint.transform(raw).clamp_min(TINY).log()


def _extent(objective: Objective) -> Tensor:
    """Largest extent of data and memory, ``()``; one where they are at one place."""
    rows, data = objective.rows, objective.data
    points = torch.cat(fn.broadcast_matrices(rows.points, data.x), -2)
    extent = (points.amax(-2) - points.amin(-2)).max()
    return torch.where(extent > 0, extent, 1)


def _log_coordinate(
    parameter: nn.Parameter,
    constraint: GreaterThan,
    unit: Tensor | None,
    least: Tensor,
) -> Coordinate:
    # The logarithm of the value, not of its distance to the bound: the gradient does
    # not vanish there, so a parameter at a bound can leave it again.
    floor = least.maximum(constraint.lower_bound * 1.01).clamp_min(TINY).log()
    eta = constraint.transform(parameter.detach()).log()
    if unit is not None:
        floor, eta = floor / unit, eta / unit
    eta = eta.maximum(floor)

    def to_value(eta: Tensor) -> Tensor:
        # A line search may look below the floor, where the inverse has no value.
        value = eta.clamp(min=floor)
        return (value if unit is None else unit * value).exp()

    def to_parameter(eta: Tensor) -> Tensor:
        return constraint.inverse_transform(to_value(eta))

    def shown(eta: Tensor) -> Tensor:
        return constraint.transform(to_parameter(eta))

    # The usual transform reaches every value above its bound.
    usual = type(constraint) in (GreaterThan, Positive)
    if usual and isinstance(constraint._transform, nn.Softplus):
        shown = to_value
    return Coordinate(parameter, eta, to_parameter, shown, floor, to_log=_same)

"""Conditioning on data in closed form: fantasies and known hyperparameters."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_ssgp import likelihoods
from torch_ssgp.core import StreamingCore
from torch_ssgp.exceptions import FactorizationError
from torch_ssgp.memory import Data, GaussianData
from torch_ssgp.modules import observation_noise
from torch_ssgp.prediction import Predictor
from torch_ssgp.update import walk, young
from torch_ssgp.update.objective import GaussianObjective, is_readable
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.sites import joined_sites, sites_ahead
from torch_ssgp.update.state import (
    Known,
    Limits,
    appended,
    fitted,
    make_objective,
    no_rows,
    recall,
)

Core = TypeVar("Core", bound=StreamingCore)


def condition(
    core: Core,
    x: Tensor,
    y: Tensor,
    noise: Tensor | None,
    inducing_points: Tensor | None,
) -> Core:
    """A new model that has also seen ``(x, y)``, in closed form.

    Args:
        core: The model to condition; it is unchanged.
        x: ``(*batch, n, d)``.
        y: ``(*batch, n)``, or with further leading dimensions.
        noise: Known noise variances, of the shape of ``y``.
        inducing_points: Points onto which it is compressed; ``None`` keeps all rows.
    """
    data = core.check_data(x, y, noise, fantasy=True)
    limits, known = core.limits(data), core.known(data)
    batch = data.y.shape[:-1]
    model = core.light_copy()
    model.batch_shape = batch
    if inducing_points is not None:
        points = core.check_inducing_points(inducing_points, data.x)
        points = points.expand(*batch, *points.shape[-2:])
        data = data._replace(x=data.x.expand(*batch, *data.x.shape[-2:]))
        options = UpdateOptions(num_steps=0, forget=1.0, inducing_points=points)
        learned = walk.update(known._replace(predictor=None), data, options, limits)
        model.commit(learned, limits.shared_noise)
        return model
    predictor = _predictor(core, known, data, limits)
    sites = _sites(known, predictor, data, limits)
    target, root = sites.target, None
    if sites.noise is not None:
        root = sites.noise.rsqrt().expand(target.shape)
        target = root * target
    border = predictor.border(data.x, target, root)
    if not bool(torch.isfinite(border.e).all()):
        raise FactorizationError(
            "The new data could not be added: the noise is too small beside the "
            "function. Raise it, or the jitter: "
            "with torch_ssgp.settings.jitter(1e-6): ..."
        )
    grown = predictor.fantasised(data.x, root, border)
    with torch.no_grad():
        new = data.detached()
        before = recall(known, new, limits)
        time = before.counts.arrived + torch.arange(new.y.size(-1)).to(new.y)
        every = None if before.sites is None else joined_sites(before.sites, sites)
        error = border.e.detach()
        if predictor.young is not None:
            odds, error, _ = young.one_ahead(predictor, new, before.num_data)
            before = before._replace(odds=odds)
        state = appended(before, new._replace(time=time), every, error)
        model.memory.replace(**state.buffers(limits.shared_noise))
    # A mixture over hyperparameters sees the new data as well, with their graph.
    state = state._replace(data=before.data.joined(data), predictor=grown)
    blended = fitted(state, limits).predictor
    assert blended is not None
    model.keep(blended)
    return model


def _predictor(
    core: StreamingCore, known: Known, data: Data, limits: Limits
) -> Predictor:
    """The factor of what is known, in the form of the new rows."""
    if not core.memory.is_empty:
        if bool(core.memory.shared_noise) == limits.shared_noise:
            return known.predictor or core.predictor()
        data = core.no_data()
    x, y = data.x.detach(), data.y.detach()
    shape = (*core.batch_shape, 0)
    nothing = Data(
        x.new_zeros(*shape, x.size(-1), dtype=data.y.dtype), y.new_zeros(shape)
    )
    with torch.no_grad():
        predictor = fitted(recall(known, nothing, limits), limits).predictor
    assert predictor is not None
    return predictor


def _sites(
    known: Known, predictor: Predictor, data: Data, limits: Limits
) -> GaussianData:
    """The new data as Gaussian observations; gradients ignore how sites come about."""
    likelihood = known.frozen.likelihood
    if likelihoods.is_gaussian(likelihood):
        noise = None
        if not limits.shared_noise:
            noise = observation_noise(likelihood, data.noise)
        return GaussianData(data.y, noise, torch.zeros_like(data.y[..., 0]).detach())
    new = Data(data.x.detach(), data.y.detach())
    new = new._replace(x=new.x.expand(*new.y.shape[:-1], *new.x.shape[-2:]))
    empty = no_rows(recall(known, new, limits))
    return sites_ahead(known.frozen, predictor, new, empty, limits.jitter)


def evidence_of(core: StreamingCore) -> Tensor:
    """Log evidence of all rows, as a function of the parameters of the model."""
    nothing = core.no_data()
    dtype = core.memory.g.dtype
    with torch.no_grad():
        empty = Data(*(t.to(dtype) for t in nothing[:2]))
        limits = core.limits(empty)
        if not core.memory.is_empty:
            limits = limits._replace(shared_noise=bool(core.memory.shared_noise))
        state = recall(core.known(empty), empty, limits)
    prior = core.prior()
    if is_readable(prior) and limits.shared_noise:

        def value(module: Any, name: str) -> Tensor:
            return getattr(module, name).to(dtype)

        objective = make_objective(state, limits, prior)
        return objective.bound(value)
    if core.dtype != dtype:
        prior = state.prior  # no gradient, rather than one in a coarser dtype
    objective = make_objective(state, limits, prior)
    if not isinstance(objective, GaussianObjective):
        objective.start_at(objective.points)
    return objective.bound()

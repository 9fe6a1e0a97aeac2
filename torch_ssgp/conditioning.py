"""Conditioning on data in closed form: fantasies and known hyperparameters."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import likelihoods
from torch_ssgp.core import StreamingCore
from torch_ssgp.memory import Data, GaussianData, buffers, no_base, remember
from torch_ssgp.modules import (
    inducing_gram,
    observation_noise,
    prior_blocks,
    same_variables,
)
from torch_ssgp.update.objective import Prior
from torch_ssgp.update.state import Known, recall
from torch_ssgp.update.walk import make_objective

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
        inducing_points: Inducing points of the new model; all old ones and ``x`` by
            default.
    """
    data = core.check_data(x, y, noise, fantasy=True)
    labels, offset = data.y, torch.zeros_like(data.y[..., 0])
    if not likelihoods.is_gaussian(core.likelihood):
        data, offset = _as_sites(core, data)
    shared = core.shares_noise(data.noise)
    known = core.known(data)
    mean, kernel, likelihood = known.frozen
    s = core.noise_scale(likelihood, data.y, shared)
    past = _past(core, data, shared)
    past = past._replace(rho=past.rho + offset)
    sigma2 = data.noise
    if likelihoods.is_gaussian(likelihood):
        sigma2 = observation_noise(likelihood, data.noise)
    assert sigma2 is not None  # sites have one
    jitter = core.jitter(data.y.dtype)
    z_a, x_b = fn.broadcast_matrices(_old_points(core, data.x), data.x)
    if inducing_points is None:
        past = fn.observe(past, data.y, sigma2, s)
        z = torch.cat([z_a, x_b], -2)
        m_b = mean(z)
        L = fn.cholesky(inducing_gram(kernel, z, jitter).K_zz)
    else:
        points = core.check_inducing_points(inducing_points, data.x)
        z = points.expand(*x_b.shape[:-2], *points.shape[-2:])
        same = same_variables(z, x_b, z_a)
        prior = prior_blocks(mean, kernel, z, x_b, z_a, jitter, same)
        # Not compressed: the triangular factor alone has no gradient.
        rows = fn.project(prior, past, data.y, sigma2, s, core.alpha)
        past, m_b, L = fn.absorb(rows, prior.m_b), prior.m_b, rows.L

    model = core.light_copy()
    model.batch_shape = data.y.shape[:-1]
    noise = None if shared else sigma2.expand(data.y.shape)
    if data.noise is not None:  # without what is learned on top of it
        noise = data.noise
    sites = GaussianData(data.y, noise, offset)
    model.memory.replace(**_memory_with(known, data.x, labels, sites, shared))
    model.summary.replace(
        inducing_points=z,
        U=past.U,
        g=past.g,
        residual=past.rho,
        num_data=past.n,
        num_updates=core.summary.num_updates + 1,
        prior_mean=m_b,
        prior_cholesky=L,
        noise_scale=s,
        shared_noise=torch.tensor(shared, device=z.device),
        jitter=core.summary.jitter,
    )
    return model


@torch.no_grad()
def _memory_with(
    known: Known, x: Tensor, y: Tensor, sites: GaussianData, shared: bool
) -> dict[str, Tensor]:
    """A memory that has also seen new data, detached; nothing is projected."""
    new, memory = Data(x.detach(), y.detach(), sites.noise), known.memory
    rows, raw = recall(known, new, shared)
    every, target = remember(raw, new), sites.target
    if raw.y.size(-1):
        old = memory.target.to(target.dtype)
        target = torch.cat(fn.broadcast_rows(old, target), -1)
    offset = memory.offset.to(sites.offset) + sites.offset
    batch = every.y.shape[:-1]
    past = rows.past._replace(
        g=rows.past.g.expand(*batch, -1), rho=rows.past.rho.expand(batch)
    )
    both = GaussianData(target, every.noise, offset)
    return {
        **buffers(rows._replace(past=past), every, both, shared),
        "since_start": memory.since_start + new.y.size(-1),
        "since_learning": memory.since_learning + new.y.size(-1),
        "extremes": memory.extremes.expand(*batch, -1),
        "loss": memory.loss.expand(batch),
        "lost": memory.lost.expand(batch),
        "doubt": memory.doubt.expand(*batch, -1),
        "noticed": memory.noticed.expand(batch),
        "since_noticed": memory.since_noticed.expand(batch),
        **no_base(past.rho),
    }


@torch.no_grad()
def _as_sites(core: StreamingCore, data: Data) -> tuple[Data, Tensor]:
    """Equivalent Gaussian data, and the correction of the residual."""
    x, past = data.x.detach(), _past(core, data, shared=False)
    z_a, x = fn.broadcast_matrices(_old_points(core, x).detach(), x)
    kernel, mean, likelihood = core.frozen_modules(data.y.dtype)
    objective = make_objective(
        Prior(mean, kernel, likelihood),
        Data(x, data.y.detach()),
        z_a,
        fn.PseudoObservations(*(t.detach() for t in past)),
        shared_noise=False,
        alpha=core.alpha,
        jitter=core.jitter(data.y.dtype),
    )
    objective.start_at(torch.cat([z_a, x], -2))
    sites = objective.as_gaussian(objective.prior())
    return Data(data.x, sites.target, sites.noise), sites.offset


def _past(core: StreamingCore, data: Data, shared: bool) -> fn.PseudoObservations:
    """The summary in the form of a conditioned model, in the dtype of the data."""
    summary, y = core.summary, data.y
    if summary.is_empty:
        batch = core.batch_shape
        return fn.PseudoObservations(
            y.new_zeros(*batch, 0, 0),
            y.new_zeros(*batch, 0),
            y.new_zeros(batch),
            y.new_zeros(()),
        )
    past = fn.PseudoObservations(*(t.to(y.dtype) for t in summary.pseudo_observations))
    if bool(summary.shared_noise) and not shared:
        noise = core.likelihood.noise.detach().to(y.dtype)
        past = fn.to_sites(past, noise.squeeze(-1).expand(core.batch_shape))
    return past


def _old_points(core: StreamingCore, x: Tensor) -> Tensor:
    if core.summary.is_empty:
        return x.new_zeros(*core.batch_shape, 0, x.size(-1))
    return core.summary.inducing_points.to(x.dtype)

"""What models have seen, as states of an update that are joined.

A memory is a regression data set, so rows and raw data of several are put below one
another: nothing is projected, and no prior is involved. What came in addition to a base
is what comes behind its rows and its raw data, which a :func:`~torch_ssgp.branch` keeps
apart for good, and a plain copy until it compresses its memory.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from torch_ssgp import functional as fn
from torch_ssgp.compression import first_of_each
from torch_ssgp.core import StreamingCore
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.memory import GaussianData, Rows
from torch_ssgp.update.sites import joined_sites
from torch_ssgp.update.state import Base, Limits, State, make_objective, recall
from torch_ssgp.update.walk import discounted

CLOSE = 1e-9  # relative difference of rows that are the same


def known_to(core: StreamingCore, shared_noise: bool, now: float) -> State:
    """All that a model has seen.

    Args:
        core: The model, with something in its memory.
        shared_noise: Whether rows are to have the noise of the likelihood.
        now: The time at which its stream is to end, on the clock of all models.
    """
    nothing = core.no_data()
    limits = core.limits(nothing)._replace(shared_noise=shared_noise)
    state = recall(core.known(nothing), nothing, limits)
    late = now - state.counts.arrived
    assert state.rows.time is not None and state.data.time is not None
    return state._replace(
        rows=state.rows._replace(time=state.rows.time + late),
        data=state.data._replace(time=state.data.time + late),
    )


def base_in(state: State, base: State, key: int) -> Base | None:
    """What a model inherited from a base; ``None`` if that cannot be told apart.

    Args:
        state: What the model knows.
        base: What the base knows.
        key: The key of the base.
    """
    if state.base is not None:
        return state.base if state.base.key == key else None
    count, past = base.num_raw, state.rows.past
    if count > state.num_raw or past.U.shape != base.rows.past.U.shape:
        return None
    first = state._replace(data=state.data.narrow(0, count))
    left = first.num_data / base.num_data
    power = torch.where(base.num_data > 0, left, 1.0)  # streams may have no reading
    then = discounted(base, power)
    weight, weight_then = (
        torch.ones_like(s.data.y) if s.data.weight is None else s.data.weight
        for s in (first, then)
    )
    same = (
        torch.equal(state.rows.points, base.rows.points)
        and torch.equal(first.data.x, base.data.x)
        and torch.equal(first.data.y, base.data.y)
        and torch.allclose(past.U, then.rows.past.U, CLOSE, CLOSE)
        and torch.allclose(past.g, then.rows.past.g, CLOSE, CLOSE)
        and torch.allclose(weight, weight_then, CLOSE, CLOSE)
    )
    return Base(key, then.rows.past, count, power, then.sunk) if same else None


def after(state: State, base: Base) -> State:
    """What a model has seen in addition to a base."""
    num_rows, first = base.past.g.size(-1), base.num_raw
    past, sites = state.rows.past, state.sites
    past = PseudoObservations(
        past.U[..., num_rows:, :],
        past.g[..., num_rows:],
        past.rho - base.past.rho,
        past.n - base.past.n,
    )
    if sites is not None and sites.noise is not None:
        target, noise = sites.target[..., first:], sites.noise[..., first:]
        sites = GaussianData(target, noise, sites.offset)
    return state._replace(
        rows=state.rows._replace(past=past),
        data=state.data.narrow(first, state.num_raw - first),
        sites=sites,
        error=state.error[..., first:],
        sunk=state.sunk - base.sunk,
        base=None,
    )


def join(first: State, second: State) -> State:
    """One data set of two, the first one's rows and raw data first.

    Hyperparameters, rate, counts and base are those of the first.

    Args:
        first: A state.
        second: Another, of the same form, dtype and batch shape.
    """
    sites = first.sites
    if sites is not None and second.sites is not None:
        sites = joined_sites(sites, second.sites)
    return first._replace(
        rows=_joined_rows(first.rows, second.rows, first.rate is not None),
        data=first.data.joined(second.data),
        sites=sites,
        error=torch.cat(fn.broadcast_rows(first.error, second.error), -1),
        sunk=first.sunk + second.sunk,
        predictor=None,
    )


def _joined_rows(first: Rows, second: Rows, drifts: bool) -> Rows:
    """Rows below one another; points that are the same in all streams are shared."""
    a, b = first.past, second.past
    U, below = pad(a.U, (0, b.U.size(-1))), pad(b.U, (a.U.size(-1), 0))
    past = PseudoObservations(
        torch.cat(fn.broadcast_matrices(U, below), -2),
        torch.cat(fn.broadcast_rows(a.g, b.g), -1),
        a.rho + b.rho,
        a.n + b.n,
    )
    points = torch.cat(fn.broadcast_matrices(first.points, second.points), -2)
    assert first.time is not None and second.time is not None
    time = torch.cat(fn.broadcast_rows(first.time, second.time), -1)
    used = (past.U != 0).flatten(0, -2).any(0)
    points, time, U = points[..., used, :], time[..., used], past.U[..., used]
    if points.size(-2):
        seen = points  # as the kernel sees them
        if drifts:
            late = time.expand(points.shape[:-1]).unsqueeze(-1)
            seen = torch.cat([points, late], -1)
        index, column = first_of_each(seen)
        shared = U.new_zeros(*U.shape[:-1], len(index))
        points, time = points[..., index, :], time[..., index]
        U = shared.index_add_(-1, column, U)
    return Rows(points, past._replace(U=U), time)


def settled(state: State, limits: Limits) -> State:
    """The state with the sites of all raw data found together."""
    if state.sites is None or not state.num_raw:
        return state
    objective = make_objective(state, limits, state.prior)
    objective.start_at(objective.points)
    return state._replace(sites=objective.as_gaussian())

r"""Compress rows and raw data onto points: the step of the paper.

With :math:`L L^\top = K_{zz}` and :math:`A = L^{-1} K_{zP} H^\top`,

.. math::
    A^\top = Q R, \quad U' = R L^{-1}, \quad g' = Q^\top r + U' m(z), \quad
    \rho' = \rho + \|r\|^2 - \|Q^\top r\|^2.

The trace :math:`\sum_i \lambda_i / 2s`, with :math:`\lambda_i` the prior variance of
row :math:`i` that the points leave, is a constant of the bound: paid once, at the noise
of now. Paid again at every later noise it would become noise itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import validation as check
from torch_ssgp.exceptions import breakdowns
from torch_ssgp.functional import PriorBlocks, PseudoObservations
from torch_ssgp.inducing import Candidates
from torch_ssgp.memory import Data, GaussianData, Rows
from torch_ssgp.modules import same_points, square_gram
from torch_ssgp.points import choose_points, merge_duplicates
from torch_ssgp.update import young
from torch_ssgp.update.objective import Evaluated, Objective
from torch_ssgp.update.sites import SiteObjective
from torch_ssgp.update.state import Base, Limits, State, check_finite, make_objective

BLURRED = 0.1  # nats of each row that points on a time axis may lose
SHARE = 0.005  # of the prior variance, besides: what has no noise loses nats anyway
DRIFTED = 0.03  # what has to have drifted away, in logarithms


def is_full(state: State, limits: Limits) -> bool:
    """Whether there are more rows than a memory may hold, besides those of a base."""
    if state.num_raw and limits.memory_size == limits.num_inducing:
        return True  # the form of the paper
    inherited = 0 if state.base is None else state.base.past.g.size(-1)
    return state.num_rows - inherited > limits.memory_size


# -- which points ---------------------------------------------------------------------


@breakdowns()
@torch.no_grad()
def choose(
    objective: Objective, limits: Limits, num_new: int, num_updates: int = 0
) -> Tensor:
    """Points that a compression leaves, ``(*batch, m, d)``, as the kernel sees them."""
    policy = limits.policy
    weight = precision(objective)
    if policy is None:
        rows, capacity = Rows(objective.z_a, objective.past), limits.num_inducing
        x, jitter = objective.x, objective.jitter
        z = choose_points(rows, x, weight, capacity, jitter, x[..., :0, :])
        if moves_on(objective, limits) and blurs(objective, z, weight):
            newest = x[..., x.size(-2) - min(capacity // 2, x.size(-2)) :, :]
            z = choose_points(rows, x, weight, capacity, jitter, newest)
        return objective.agree(z)
    now = objective.evaluate()
    candidates = Candidates(
        kernel=objective.kernel,
        z_a=objective.rows.points,
        z_s=objective.rows.points,
        past=objective.past,
        x=objective.data.x,
        weight=weight,
        s=objective.noises(now)[1],
        jitter=objective.jitter,
        num_inducing=limits.num_inducing,
        num_updates=num_updates,
        num_new=num_new,
    )
    z = policy(candidates)
    check.check_choice(z, policy, objective.data.x)
    z = merge_duplicates(objective.kernel, z, objective.jitter)
    time = times_of(z, objective.rows, objective.data)
    return objective.agree(objective.with_time(z, time))


def moves_on(objective: Objective, limits: Limits) -> bool:
    """Whether inputs move on in pieces smaller than the memory: a time axis.

    The only input is later in every datum than in all points before; or the function
    drifts, and time itself is such an input. Larger pieces are those of a map, and so
    are several inputs of which one is sorted.
    """
    old, x = objective.rows.points, objective.data.x
    if not limits.num_inducing < limits.memory_size > x.size(-2):
        return False
    drifts = bool(drifted(objective).any())
    if drifts or 0 in (old.size(-2), x.size(-2)) or old.size(-1) > 1:
        return drifts
    for sign in (1, -1):
        step, last = sign * x.diff(dim=-2), (sign * old).amax(-2)
        grows = (step >= 0).all(-2) & (sign * x[..., 0, :] >= last)
        grows = grows & (step > 0).any(-2)  # what is constant goes nowhere
        if bool(grows.reshape(-1, x.size(-1)).all(0).any()):
            return True
    return False


def drifted(objective: Objective) -> Tensor:
    """``(*batch,)``, whether the function has changed since the stream began."""
    rate = torch.zeros(()) if objective.rate is None else objective.rate
    return rate * objective.num_data.to(rate.device) > DRIFTED


def blurs(objective: Objective, z: Tensor, weight: Tensor) -> bool:
    r"""Whether points lose too many nats :math:`\lambda / 2s` of each row, and more."""
    if bool(drifted(objective).any()):
        return True
    now, U, x = objective.evaluate(), objective.past.U, objective.x
    form, root, (_, s) = now.form, weight.sqrt(), objective.noises(now)
    L = fn.cholesky(square_gram(form, z, z.size(-2), objective.jitter))
    old = square_gram(form, objective.z_a, objective.z_a.size(-2), objective.jitter)
    G = fn.solve_lower(L, form.gram(z, objective.z_a) @ U.mT)
    A = fn.solve_lower(L, form.gram(z, x) * root.unsqueeze(-2))
    every = (weight * form.variances(x)).sum(-1) + ((U @ old) * U).sum((-2, -1))
    lost = every - fn.squared_norm(A, (-2, -1)) - fn.squared_norm(G, (-2, -1))
    many = lost / (2 * s) > BLURRED * (U.size(-2) + x.size(-2))
    return bool((many & (lost > SHARE * every)).any())


def precision(objective: Objective) -> Tensor:
    """Precision of the data in units of the rows, ``(*batch, n)``."""
    noise, s = objective.noises(objective.evaluate())
    weight, y = objective.data.weight, objective.data.y
    if noise is None:
        ones = torch.ones_like(y)
        return ones if weight is None else weight * ones
    result = (s.unsqueeze(-1) / noise).expand(y.shape)
    return result if weight is None else weight * result


def times_of(z: Tensor, rows: Rows, data: Data) -> Tensor:
    """When points were data, the latest time if there are several; else that of now."""
    points = torch.cat(fn.broadcast_matrices(rows.points, data.x), -2)
    assert rows.time is not None and data.time is not None
    time = torch.cat(fn.broadcast_rows(rows.time, data.time), -1)
    same = same_points(z, points)
    found = torch.where(same, time.unsqueeze(-2), -torch.inf).amax(-1)
    return torch.where(same.any(-1), found, time.max())


# -- projecting -----------------------------------------------------------------------


@breakdowns()
@torch.no_grad()
def compress(
    state: State, limits: Limits, z: Tensor | None, num_new: int
) -> tuple[State, Tensor]:
    """The state without raw data, and the nats that were lost.

    Points ``z`` are ``(*batch, m, d)``, as the kernel sees them; chosen if ``None``.
    What a branch inherited and what it has seen since are compressed separately: then
    what was added equals the memory of a model that never saw the base.
    """
    objective = make_objective(state, limits, state.prior)
    if z is None:
        z = choose(objective, limits, num_new, int(state.counts.num_updates))
    data = state.observations(limits.shared_noise)
    objective.start_at(z)
    if isinstance(objective, SiteObjective):
        data = objective.as_frozen(objective.as_gaussian())
    now = objective.evaluate()
    blocks = objective.blocks(now, to_the_last_digit=True)
    base, parts = state.base, [Part(objective.past, slice(None), 1.0)]
    if base is not None:
        parts = _parts(base, objective.past, state.num_raw)
    weight = precision(objective)
    outgrown = moves_on(objective, limits) and blurs(objective, z, weight)
    done = [_project(objective, blocks, data, part, now, outgrown) for part in parts]
    past, lost = done[-1].past, torch.stack([each.lost for each in done]).sum(0)
    if base is not None:
        sunk = base.sunk + done[0].lost
        base = base._replace(past=done[0].past, num_raw=0, sunk=sunk)
        past = _stacked(done[0].past, past)
    check_finite(*past)
    points = z[..., : state.data.x.size(-1)]
    return (
        state._replace(
            rows=Rows(points, past, times_of(points, state.rows, state.data)),
            data=state.data.narrow(0, 0)._replace(weight=None),
            sites=None if state.sites is None else _no_sites(data),
            error=state.error[..., :0],
            sunk=state.sunk + lost,
            alarm=torch.zeros_like(state.alarm),
            alarmed=torch.zeros_like(state.alarmed),
            odds=torch.full_like(state.odds, young.TRUSTED),
            grid=None,
            counts=state.counts._replace(question_at=0.0, question_due=0.0),
            base=base,
            predictor=None,
        ),
        lost,
    )


def _no_sites(data: GaussianData) -> GaussianData:
    nothing = data.target[..., :0]
    return GaussianData(nothing, nothing, torch.zeros_like(data.offset))


class Part(NamedTuple):
    """What is compressed on its own."""

    past: PseudoObservations
    raw: slice  # its raw data
    share: float  # in what sites add to the bound


def _parts(base: Base, past: PseudoObservations, num_raw: int) -> list[Part]:
    """What a branch inherited, and what it added."""
    count, share = base.past.g.size(-1), base.num_raw / max(num_raw, 1)
    inherited = base.past._replace(U=past.U[..., :count, :], g=past.g[..., :count])
    return [
        Part(inherited, slice(0, base.num_raw), share),
        Part(base.added(past), slice(base.num_raw, num_raw), 1 - share),
    ]


class Compressed(NamedTuple):
    """Rows at the points of a compression; they lose ``(*batch,)`` nats."""

    past: PseudoObservations
    lost: Tensor


def _project(
    objective: Objective,
    blocks: PriorBlocks,
    data: GaussianData,
    part: Part,
    now: Evaluated,
    outgrown: bool,
) -> Compressed:
    """Some rows and some data at the points of ``blocks``."""
    raw, offset = part.raw, part.share * data.offset
    part_of_data = GaussianData(
        data.target[..., raw],
        None if data.noise is None else data.noise[..., raw],
        offset,
    )
    blocks = blocks._replace(
        K_bf=blocks.K_bf[..., raw], k_ff=blocks.k_ff[..., raw], m_f=blocks.m_f[..., raw]
    )
    weight = objective.data.weight
    weight = None if weight is None else weight[..., raw]
    rows, s = objective.project(blocks, part_of_data, now, part.past, weight)
    if outgrown and rows.lost is not None:
        rows = fn.temper(rows, part.past, s)  # forgotten, not lost
    return Compressed(fn.absorb(fn.compress(rows), blocks.m_b), rows.loss / (2 * s))


def _stacked(
    first: PseudoObservations, second: PseudoObservations
) -> PseudoObservations:
    """The rows of two parts at the same points."""
    return PseudoObservations(
        torch.cat(fn.broadcast_matrices(first.U, second.U), -2),
        torch.cat(fn.broadcast_rows(first.g, second.g), -1),
        first.rho + second.rho,
        first.n + second.n,
    )

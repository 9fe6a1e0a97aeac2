r"""What a model has seen, as a part of what several have seen together.

A memory is a regression data set: rows :math:`U f(Z) \approx g` and raw data. To join
two of them, stack their rows, at the points of both, and append their raw data. This
projects nothing and involves no prior.

What a model saw *in addition to* a base is found in one of three ways:

* The model is a :func:`~torch_ssgp.branch` of the base: its memory keeps both apart.
* It is a plain copy whose memory has not been compressed since: its first rows and raw
  data are exactly those of the base.
* It is a plain copy that was compressed, with fixed hyperparameters and inducing
  points, in memories that hold these points. With :math:`A` the rows of the model and
  :math:`A_0` those of the base, both on the inducing points and in units of the prior,

  .. math:: P = A A^\top - A_0 A_0^\top, \quad h = A r - A_0 r_0

  are the precision and the shift of what was added, for these are sums over data.
  With :math:`P = Q \Lambda Q^\top` its rows are :math:`\Lambda^{1/2} Q^\top`.

The first two are exact, whatever was learned on the way. So is the third if it applies;
otherwise it raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import likelihoods, settings
from torch_ssgp.branching import key_of
from torch_ssgp.compression import first_of_each
from torch_ssgp.core import StreamingCore
from torch_ssgp.exceptions import MergeError
from torch_ssgp.functional import Projection, PseudoObservations
from torch_ssgp.memory import Data, GaussianData, Rows
from torch_ssgp.modules import same_points
from torch_ssgp.update.making import make_objective
from torch_ssgp.update.objective import Objective
from torch_ssgp.update.state import recall

CLOSE = 1e-9  # relative difference of rows that are the same


class Part(NamedTuple):
    """Rows and raw data, in the form in which models are merged.

    Attributes:
        rows: Pseudo-observations and their points.
        data: Raw data.
        target: ``(*batch, k)``, the raw data as Gaussian observations.
        noise: ``(*batch, k)``, noise variances of these; zero where it is the noise of
            the likelihood.
    """

    rows: Rows
    data: Data
    target: Tensor
    noise: Tensor

    @property
    def size(self) -> int:
        """The number of points or of observations, whichever is larger."""
        num_points, num_rows = self.rows.points.size(-2), self.rows.past.g.size(-1)
        return max(num_points, num_rows) + self.data.y.size(-1)

    @property
    def weight(self) -> Tensor:
        """``(k,)`` or ``(*batch, k)``, powers of the likelihoods of raw data."""
        weight = self.data.weight
        return self.data.y.new_ones(self.data.y.size(-1)) if weight is None else weight

    @property
    def sites(self) -> GaussianData:
        """The raw data as Gaussian observations; an update finds their offset."""
        offset = torch.zeros_like(self.rows.past.rho)
        return GaussianData(self.target, self.noise, offset)

    def discount(self, power: Tensor) -> Part:
        """The part with its likelihood raised to a power, one or ``(*batch,)``."""
        if bool((power == 1).all()):
            return self
        weight = power.unsqueeze(-1) * self.weight
        return self._replace(
            rows=self.rows._replace(past=self.rows.past.discount(power)),
            data=self.data._replace(weight=weight),
        )

    def after(self, num_rows: int, num_raw: int) -> Part:
        """What comes after so many rows, with all residuals, and so many raw data."""
        past = self.rows.past
        past = past._replace(U=past.U[..., num_rows:, :], g=past.g[..., num_rows:])
        num_left = self.data.y.size(-1) - num_raw
        return self._replace(
            rows=self.rows._replace(past=past),
            data=self.data.narrow(num_raw, num_left),
            target=self.target[..., num_raw:],
            noise=self.noise[..., num_raw:],
        )


def part_of(core: StreamingCore, shared_noise: bool) -> Part:
    """All that a model has seen.

    Args:
        core: The model, with something in its memory.
        shared_noise: Whether rows are to have the noise of the likelihood.
    """
    memory, empty = core.memory, core.no_data()
    dtype = settings.algebra_dtype.of(core.dtype)
    empty = Data(empty.x.to(dtype), empty.y.to(dtype))
    rows, data = recall(core.known(empty), empty, shared_noise)
    noise = torch.zeros_like(data.y) if data.noise is None else data.noise
    target = memory.target.to(dtype).expand(data.y.shape)
    if not likelihoods.is_gaussian(core.likelihood):
        noise = memory.noise.to(dtype).expand(data.y.shape)
    return Part(rows, data, target, noise)


class Added(NamedTuple):
    """What a model saw in addition to its base.

    Attributes:
        part: Rows and raw data.
        power: ``()`` or ``(*batch,)``, what it has left of the base.
    """

    part: Part
    power: Tensor


def added_to(
    base: StreamingCore, core: StreamingCore, shared_noise: bool, name: str
) -> Added:
    """What a model saw in addition to the base; see the top of this file.

    Args:
        base: The model that it continued from, with something in its memory.
        core: The model.
        shared_noise: Whether rows are to have the noise of the likelihood.
        name: What to call the model in errors.
    """
    old, new = part_of(base, shared_noise), part_of(core, shared_noise)
    memory = core.memory
    if int(memory.base_key) == key_of(base):
        part = new.after(int(memory.base_rows), int(memory.base_raw))
        of_base = memory.of_base
        if bool(memory.shared_noise) and not shared_noise:
            sigma2 = core.likelihood.noise.detach().to(of_base.g).squeeze(-1)
            of_base = fn.to_sites(of_base, sigma2.expand(of_base.rho.shape))
        return Added(_less(part, of_base), memory.base_power)
    power = _power_of_first(old, new)
    if power is not None:
        part = new.after(old.rows.past.g.size(-1), old.data.y.size(-1))
        return Added(_less(part, old.rows.past.discount(power)), power)
    _check_fixed(base, core, name)
    return Added(_difference(base, core, shared_noise, name), new.target.new_ones(()))


def _less(part: Part, base: PseudoObservations) -> Part:
    """A part without the residual and the data of the base's rows."""
    past = part.rows.past
    if past.g.size(-1) == 0:  # and so no residual, but for rounding
        past = past._replace(
            U=past.U[..., :0],
            rho=torch.zeros_like(past.rho),
            n=torch.zeros_like(past.n),
        )
        points = part.rows.points[..., :0, :]
        return part._replace(rows=Rows(points, past))
    past = past._replace(rho=past.rho - base.rho, n=past.n - base.n)
    return part._replace(rows=part.rows._replace(past=past))


def _power_of_first(old: Part, new: Part) -> Tensor | None:
    """The power to which a base is literally there, at the beginning; or ``None``."""
    num_raw, rows = old.data.y.size(-1), (old.rows, new.rows)
    if num_raw > new.data.y.size(-1) or rows[0].past.U.shape != rows[1].past.U.shape:
        return None
    first = new.data.narrow(0, num_raw)
    same = (
        torch.equal(rows[0].points, rows[1].points)
        and torch.equal(old.data.x, first.x)
        and torch.equal(old.data.y, first.y)
    )
    if not same:
        return None
    if num_raw:
        now, before = new.weight[..., :num_raw], old.weight
        ratio = now / before
    else:
        ratio = (rows[1].past.n / rows[0].past.n).unsqueeze(-1)
    power = ratio.mean(-1)
    then = rows[0].past.discount(power)
    is_near = bool((ratio - power.unsqueeze(-1)).abs().max() <= CLOSE) and all(
        torch.allclose(a, b, rtol=CLOSE, atol=CLOSE)
        for a, b in ((then.U, rows[1].past.U), (then.g, rows[1].past.g))
    )
    return power if is_near else None


def _check_fixed(base: StreamingCore, core: StreamingCore, name: str) -> None:
    """Raise unless what was added can be found by a difference."""
    gaussian = likelihoods.is_gaussian(core.likelihood)
    z = base.summary.inducing_points
    reasons = {
        "its hyperparameters were learned since": not all(
            torch.equal(a, b)
            for a, b in zip(
                base.prior().parameters(), core.prior().parameters(), strict=True
            )
        ),
        "its inducing points have moved": not torch.equal(
            z, core.summary.inducing_points
        ),
        "its memory does not hold the inducing points": not all(
            _holds(model, z) for model in (base, core)
        ),
        "alpha is not zero": core.alpha != 0,
        "the likelihood is not Gaussian": not gaussian and base.memory.num_raw > 0,
    }
    for reason, holds in reasons.items():
        if holds:
            raise MergeError(
                f"What {name} saw can no longer be separated from what base knew: its "
                f"memory was compressed, and {reason}. Start workers with "
                "torch_ssgp.branch(base), which keeps the two apart."
            )


def _holds(core: StreamingCore, z: Tensor) -> bool:
    """Whether the points of the rows, if there are any, contain all inducing points."""
    points = core.memory.compressed.points
    return points.size(-2) == 0 or bool(same_points(z, points.to(z)).any(-1).all())


def _difference(
    base: StreamingCore, core: StreamingCore, shared_noise: bool, name: str
) -> Part:
    """What was added, as rows at the inducing points; later raw data as they are."""
    new, old = part_of(core, shared_noise), part_of(base, shared_noise)
    no_data = new.data.narrow(0, 0)
    objective, prior = _objective(core, new.rows, no_data, shared_noise), None
    z = core.summary.inducing_points.to(new.target)
    z = z.expand(*new.data.x.shape[:-2], *z.shape[-2:])
    ours, prior = _projected(objective, z)
    theirs, _ = _projected(_objective(base, old.rows, old.data, shared_noise), z)
    P = ours.A @ ours.A.mT - theirs.A @ theirs.A.mT
    h = fn.matvec(ours.A, ours.r) - fn.matvec(theirs.A, theirs.r)
    values, Q = torch.linalg.eigh(0.5 * (P + P.mT))
    size = torch.linalg.matrix_norm(ours.A).square().unsqueeze(-1)
    num_added = ours.n - theirs.n
    if bool((values < -CLOSE * size).any()) or bool((num_added < -CLOSE).any()):
        raise MergeError(
            f"{name} knows less than base: it has forgotten some of it, or continued "
            "from another model. Pass the base that it continued from. Start workers "
            "that forget with torch_ssgp.branch(base)."
        )
    eps = torch.finfo(values.dtype).eps * values.size(-1)
    known = values > eps * size
    root = torch.where(known, values, 0).sqrt()
    r = torch.where(known, (Q.mT @ h.unsqueeze(-1)).squeeze(-1) / root, 0)
    residual = (
        fn.squared_norm(ours.r) + ours.rho + ours.loss - fn.squared_norm(theirs.r)
    )
    rows = Projection(
        L=ours.L,
        A=Q * root.unsqueeze(-2),
        r=r,
        loss=torch.zeros_like(residual),
        rho=residual - theirs.rho - theirs.loss - fn.squared_norm(r),
        n=num_added,
    )
    return new._replace(rows=Rows(z, fn.absorb(rows, prior)))


def _objective(
    core: StreamingCore, rows: Rows, data: Data, shared_noise: bool
) -> Objective:
    return make_objective(
        core.known(data).frozen,
        data,
        rows.points,
        rows.past,
        shared_noise=shared_noise,
        alpha=core.alpha,
        jitter=core.jitter(data.y.dtype),
    )


def _projected(objective: Objective, z: Tensor) -> tuple[Projection, Tensor]:
    """Rows of a regression on ``z``, and the prior mean there."""
    with torch.no_grad():
        prior = objective.final_prior(z)
        if objective.data.y.size(-1):
            data = objective.as_gaussian(prior)
        else:
            none = objective.data.y
            data = GaussianData(none, None, torch.zeros_like(objective.past.rho))
        rows, _ = objective.project(prior, data)
        return rows, prior.m_b


def join(parts: Sequence[Part]) -> Part:
    """Parts below one another, those of the first one first.

    Args:
        parts: At least one; all of the same form, dtype and batch shape.
    """
    if len(parts) == 1:
        return parts[0]
    blocks = [part.rows.past for part in parts]
    points = torch.cat([part.rows.points for part in parts], -2)
    num_rows = sum(past.g.size(-1) for past in blocks)
    U = points.new_zeros(*blocks[0].g.shape[:-1], num_rows, points.size(-2))
    row = column = 0
    for past in blocks:
        p, m = past.U.shape[-2:]
        U[..., row : row + p, column : column + m] = past.U
        row, column = row + p, column + m
    points, U = _shared(points, U)
    rho, n = blocks[0].rho, blocks[0].n
    for past in blocks[1:]:
        rho, n = rho + past.rho, n + past.n
    past = PseudoObservations(U, torch.cat([past.g for past in blocks], -1), rho, n)
    weights = torch.broadcast_tensors(
        *(part.weight.new_empty(part.weight.shape[:-1]) for part in parts)
    )
    weight = torch.cat(
        [
            part.weight.expand(*like.shape, -1)
            for part, like in zip(parts, weights, strict=True)
        ],
        -1,
    )
    data = Data(
        torch.cat([part.data.x for part in parts], -2),
        torch.cat([part.data.y for part in parts], -1),
        None,
        weight,
    )
    return Part(
        Rows(points, past),
        data,
        torch.cat([part.target for part in parts], -1),
        torch.cat([part.noise for part in parts], -1),
    )


def _shared(points: Tensor, U: Tensor) -> tuple[Tensor, Tensor]:
    """Each point once, where it is the same in all streams; unused ones dropped."""
    used = (U != 0).any(-2).flatten(0, -2).any(0) if U.ndim > 2 else (U != 0).any(0)
    points, U = points[..., used, :], U[..., used]
    if points.size(-2) == 0:
        return points, U
    first, column = first_of_each(points)
    if first.size(0) == points.size(-2):
        return points, U
    shared = U.new_zeros(*U.shape[:-1], first.size(0))
    return points[..., first, :], shared.index_add_(-1, column, U)

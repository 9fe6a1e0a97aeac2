"""What an update starts from, what it may use, and what it ends with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.compression import recent_half
from torch_ssgp.exceptions import Breakdown
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.inducing import InducingPolicy
from torch_ssgp.memory import Data, Memory, Rows
from torch_ssgp.summary import PosteriorSummary
from torch_ssgp.update.ascent import Ascended
from torch_ssgp.update.objective import Prior
from torch_ssgp.update.result import Status
from torch_ssgp.update.sharding import Team

GONE = 1e-9  # power of a past that is forgotten


class Known(NamedTuple):
    """What a model knows before an update.

    Attributes:
        prior: Its modules; they are copied before anything changes.
        frozen: Copies of them that do not learn, in the dtype of the algebra.
        start: What their parameters were before the first update.
        memory: What the stream has said so far.
        summary: The posterior at the inducing points.
    """

    prior: Prior
    frozen: Prior
    start: list[Tensor]
    memory: Memory
    summary: PosteriorSummary


class Limits(NamedTuple):
    """What a model may use, and in which form.

    Attributes:
        num_inducing: Largest number of inducing points.
        memory_size: Number of points that the memory is compressed to.
        policy: Chooses inducing points.
        alpha: Power of Power-EP.
        shared_noise: Whether all rows have the noise of the likelihood.
        jitter: Relative jitter.
        dtype: Dtype of the model.
        team: Processes that share the work on rows; ``None`` where there is one.
    """

    num_inducing: int
    memory_size: int
    policy: InducingPolicy
    alpha: float
    shared_noise: bool
    jitter: float
    dtype: torch.dtype
    team: Team | None = None


class Learned(NamedTuple):
    """What an update ends with, before the model becomes it.

    Attributes:
        prior: Modules with the hyperparameters learned.
        summary: The next buffers of the summary.
        memory: The next buffers of the memory.
        bound: ``(*batch,)``, bound on the evidence of all data seen.
        loss: ``(*batch,)``, nats lost by the inducing points.
        to_win: ``(*batch,)``, nats per datum that learning more would gain.
        loss_before: ``(*batch,)``, what points lost before the inner loop.
        memory_loss: ``(*batch,)``, nats lost by compressing the memory.
        num_kept: ``(*batch,)``, old inducing points that are still there.
        restarted: ``(*batch,)``, where a fresh start won.
        forgot: ``(*batch,)``, power that the past was raised to.
        surprise: ``(*batch,)``, nats per datum below what the model expected.
        flattened: ``(*batch,)``, where learning explained the function as noise.
        learned: Whether the inner loop ran.
        ascended: What the inner loop did.
        settled: Whether what is not learned by gradients has converged.
        status: How far it had to fall back.
    """

    prior: Prior
    summary: dict[str, Tensor]
    memory: dict[str, Tensor]
    bound: Tensor
    loss: Tensor
    to_win: Tensor
    loss_before: Tensor
    memory_loss: Tensor
    num_kept: Tensor
    restarted: Tensor
    forgot: Tensor
    surprise: Tensor
    flattened: Tensor
    learned: bool
    ascended: Ascended
    settled: bool
    status: Status

    @classmethod
    def of(
        cls,
        prior: Prior,
        summary: dict[str, Tensor],
        memory: dict[str, Tensor],
        bound: Tensor,
        loss: Tensor,
        to_win: Tensor,
        *,
        num_kept: Tensor,
        ascended: Ascended,
        loss_before: Tensor | None = None,
        memory_loss: Tensor | None = None,
        settled: bool = True,
    ) -> Learned:
        """The state to store; the report is filled in later."""
        nothing = torch.zeros_like(loss)
        return cls(
            prior=prior,
            summary=summary,
            memory=memory,
            bound=bound,
            loss=loss,
            to_win=to_win,
            loss_before=loss if loss_before is None else loss_before,
            memory_loss=nothing if memory_loss is None else memory_loss,
            num_kept=num_kept,
            restarted=nothing > 0,
            forgot=nothing + 1,
            surprise=nothing,
            flattened=nothing > 0,
            learned=False,
            ascended=ascended,
            settled=settled,
            status=ascended.status,
        )


def recall(
    known: Known,
    new: Data,
    shared_noise: bool,
    power: float | Tensor = 1.0,
    pending: int = 0,
    clock: tuple[int, int] | None = None,
) -> tuple[Rows, Data]:
    """Rows and raw data of a memory, in the form and dtype of the coming update.

    Args:
        known: What the model knows.
        new: New data, for their dtype and batch dimensions.
        shared_noise: Whether the noise of all rows is that of the likelihood.
        power: Power to which the likelihood of the past is raised, one for all or
            ``(*batch,)``.
        pending: The number of raw data, the last ones, that keep their weight.
        clock: Input and direction along which the older half of the rows is dropped.

    Returns:
        Rows with all batch dimensions, and raw data; both may be empty.
    """
    memory, y, batch = known.memory, new.y, new.y.shape[:-1]
    num_dims = new.x.size(-1)
    anew = isinstance(power, Tensor) and bool((power == 0).all())
    if memory.is_empty or (anew and pending == 0):
        past = PseudoObservations(
            y.new_zeros(*batch, 0, 0),
            y.new_zeros(*batch, 0),
            y.new_zeros(batch),
            y.new_zeros(()),
        )
        nothing = y.new_zeros(*batch, 0)
        rows = Rows(y.new_zeros(*new.x.shape[:-2], 0, num_dims), past)
        return rows, Data(new.x[..., :0, :], nothing)

    def prepared(value: Tensor) -> Tensor:
        return value.detach().to(y.dtype)

    z_a, past = memory.compressed
    past = PseudoObservations(*map(prepared, past))
    x = prepared(memory.raw_x)
    targets, known_noise = prepared(memory.y), prepared(memory.noise)
    weight = prepared(memory.weight)
    num_old = weight.size(-1) - pending
    if isinstance(power, Tensor):
        power = power.clamp_min(GONE)  # if other streams of the batch keep their past
        faded = power.unsqueeze(-1) * weight[..., :num_old]
        kept = weight[..., num_old:].expand(*faded.shape[:-1], pending)
        weight = torch.cat([faded, kept], -1)
    else:
        weight = torch.cat([power * weight[..., :num_old], weight[..., num_old:]], -1)
    if bool(memory.shared_noise) and not shared_noise:
        sigma2 = prepared(known.frozen.likelihood.noise)
        past = fn.to_sites(past, sigma2.squeeze(-1).expand(batch))
        known_noise = torch.where(known_noise == 0, sigma2, known_noise)
    z_a = prepared(z_a)
    z_a = z_a.expand(*new.x.shape[:-2], *z_a.shape[-2:])
    raw = Data(
        x.expand(*new.x.shape[:-2], *x.shape[-2:]),
        targets.expand(*batch, -1),
        None if shared_noise else known_noise.expand(*batch, -1),
        None if bool((weight == 1).all()) else weight,
    )
    past = past.discount(power)
    if anew:
        past = PseudoObservations(
            past.U[..., :0, :0], past.g[..., :0], 0 * past.rho, 0 * past.n
        )
        z_a = z_a[..., :0, :]
        raw = raw.narrow(num_old, pending)
    rows = Rows(z_a, past)
    return rows if clock is None else recent_half(rows, *clock), raw


def check_finite(*values: Tensor) -> None:
    """Raise :class:`Breakdown` unless all are."""
    finite = [torch.isfinite(value).all() for value in values]
    if not bool(torch.stack(finite).all()):
        raise Breakdown("the new posterior is not finite")

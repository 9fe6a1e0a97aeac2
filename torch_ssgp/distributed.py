r"""One stream over many processes, in the style of ``DistributedDataParallel``.

    check     every rank checks its shard; an error on one rank is raised on all
    gather    all ranks get the whole batch: ``n (d + 1)`` numbers, once per update
    learn     the same walk on every rank; in the steps of learning on a large batch,
              each computes its share of the rows, and products and gradients are summed
    agree     all ranks take over what the first rank learned, bit by bit

Only these steps are divided, ``n m²`` operations each. What happens once per update
(predicting the batch, compressing it), and all of the exact regime, every rank does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_ssgp import likelihoods
from torch_ssgp import validation as check
from torch_ssgp.exceptions import (
    ArgumentError,
    PeerError,
    ShapeError,
    StreamingGPError,
)
from torch_ssgp.memory import Data
from torch_ssgp.models import StreamingGP
from torch_ssgp.prediction import freeze
from torch_ssgp.update import UpdateOptions, UpdateResult
from torch_ssgp.update.objective import Prior
from torch_ssgp.update.options import resolve
from torch_ssgp.update.sharding import Team
from torch_ssgp.update.state import Known, Learned, Limits, recall
from torch_ssgp.update.walk import update as learn_alone

# Options that must be the same on all ranks.
NAMES = [field.name for field in fields(UpdateOptions)]
SHARED = [name for name in NAMES if name not in ("progress", "callback")]


# n m² of a step at which two processes are as fast as one: measured on one machine by
# scripts/benchmark.py distributed.
WORTH = 25_000_000


class DistributedStreamingGP(nn.Module):
    """A model whose updates are shared by all ranks of a process group.

    Every rank builds the same model, wraps it, and calls :meth:`update` with its shard
    of the batch. Shards may differ in size, and all but one may be empty. Afterwards
    all ranks hold bit-identical models. Up to rounding, they equal the model of a
    single process that sees the whole batch, with shards in the order of ranks.

    It is faster than one process where steps of learning dominate: batches of many
    times ``memory_size`` that are learned from, with Gaussian noise and ``alpha=0``.
    Otherwise every rank does all the work of an update: in the exact regime and for
    small batches, in closed form (``num_steps=0``), with another likelihood, with
    Power-EP, and in a :func:`~torch_ssgp.branch`. Then use it for data that arrive in
    several places.

    Predictions need no other rank: ``model(x)`` and ``model.predict(x)`` are those of
    ``model.module``.

    Args:
        model: The model, on the device of this rank. It takes the state of the first
            rank.
        process_group: The processes that take part; all by default.
        shard_above: Size of the smallest batch whose learning is divided; for smaller
            ones messages cost more than they save. By default it depends on the number
            of inducing points.

    Attributes:
        module: The model.
        ranks: The ranks that take part, with a count of what was sent.

    Example:
        Run it by ``torchrun --nproc-per-node=2``::

            torch.distributed.init_process_group("gloo")
            model = DistributedStreamingGP(StreamingGP(ScaleKernel(RBFKernel())))
            for x_shard, y_shard in stream_of_this_rank:
                model.update(x_shard, y_shard)
    """

    def __init__(
        self,
        model: StreamingGP,
        process_group: Any = None,
        shard_above: int | None = None,
    ) -> None:
        super().__init__()
        check.check_module(model, "model", StreamingGP, "StreamingGP(kernel, ...)")
        if not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError(
                "There is no process group. Start the program by torchrun, and call "
                "torch.distributed.init_process_group('gloo'), or 'nccl' on GPUs."
            )
        if shard_above is None:
            shard_above = max(model.memory_size, WORTH // model.num_inducing**2)
        self.shard_above = check.check_positive_int(shard_above, "shard_above")
        self.module = model
        self.ranks = Team(process_group, model.device)
        self._take_state_of_first()

    def _take_state_of_first(self) -> None:
        """Start from the model of the first rank, as DistributedDataParallel does."""
        state = self.module.state_dict()
        parts = {name: value.dtype for name, value in state.items()}
        if any(other != parts for other in self.ranks.everyones(parts)):
            raise ArgumentError(
                "The ranks have different models. Build the same one on every rank."
            )
        self.module.load_state_dict(self.ranks.agree(state))

    def forward(self, x: Tensor, from_memory: bool | None = None) -> Any:
        """Latent posterior at ``x``, as :meth:`StreamingGP.forward`.

        Args:
            x: ``(*batch, n, d)``.
            from_memory: Deprecated, as there.
        """
        return self.module(x, from_memory)

    def predict(self, x: Tensor, noise: Tensor | None = None, **options: Any) -> Any:
        """Posterior predictive of targets, as :meth:`StreamingGP.predict`.

        Args:
            x: ``(*batch, n, d)``.
            noise: Known noise variances at ``x``.
            **options: As there.
        """
        return self.module.predict(x, noise, **options)

    def update(
        self,
        x_shard: Tensor,
        y_shard: Tensor,
        noise: Tensor | None = None,
        *,
        learn: bool | int | str | None = None,
        options: UpdateOptions | None = None,
        **keywords: Any,
    ) -> UpdateResult:
        """Learn from a batch of which every rank has a shard; all ranks call it.

        If the shard of one rank is invalid, all ranks raise the error. If a rank is
        lost, the others raise :class:`~torch_ssgp.exceptions.PeerError` within the
        timeout of the process group. In both cases no model changes.

        Args:
            x_shard: ``(*batch_shape, n, d)`` or ``(n, d)``; ``n`` may be zero.
            y_shard: ``(*batch_shape, n)``.
            noise: Known noise variances ``(*batch_shape, n)``, on all ranks or none.
            learn: As in :meth:`StreamingGP.update`.
            options: As there, the same on all ranks; ``callback`` and ``progress`` may
                differ.
            **keywords: Fields of :class:`~torch_ssgp.UpdateOptions` that differ from
                ``options``, such as ``forget=1``.

        Returns:
            The report of the update, the same on all ranks except for ``seconds``.
        """
        core = self.module
        with core.locks.turn(core.device):
            data, chosen = self._gathered(
                x_shard, y_shard, noise, lambda: resolve(options, learn, keywords)
            )
            is_divided = (
                data.y.size(-1) >= self.shard_above
                and likelihoods.is_gaussian(core.likelihood)
                and core.alpha == 0
                and not core.memory.is_branch
            )
            if self.ranks.rank:
                chosen = replace(chosen, progress=False)
            return core.learn_from(data, chosen, self._walk(is_divided))

    def _gathered(
        self,
        x: Tensor,
        y: Tensor,
        noise: Tensor | None,
        resolved: Callable[[], UpdateOptions],
    ) -> tuple[Data, UpdateOptions]:
        """The whole batch, in the order of ranks, and options, if all are valid."""
        shard, options, facts = None, UpdateOptions(), dict[str, Any]()
        problem: StreamingGPError | None = None
        try:
            options = resolved()
            check.check_tensor(x, "x_shard")
            check.check_tensor(y, "y_shard")
            for name in SHARED:
                value = getattr(options, name)
                if isinstance(value, Tensor):
                    value = (*value.shape, value.sum().item())
                facts[f"option {name}"] = value
            if x.numel() and y.numel():
                parts = self.module.check_data(x, y, noise)
                # Of slices and expanded tensors torch would send all that they view.
                more = (None if t is None else t.clone() for t in parts[2:])
                shard = Data(parts.x.clone(), parts.y.clone(), *more)
                facts["number of inputs"] = x.size(-1) if x.ndim > 1 else 1
                facts["use of noise"] = noise is not None
            elif x.shape[:-1].numel() != 0 and y.numel() != 0:
                raise ShapeError(
                    f"x_shard has shape {tuple(x.shape)} and y_shard "
                    f"{tuple(y.shape)}; expected as many targets as inputs."
                )
        except StreamingGPError as error:
            problem = error
        reports = self.ranks.everyones((problem, facts, shard))
        _raise_first([problem for problem, _, _ in reports], " No model was changed.")
        _check_same([facts for _, facts, _ in reports])
        shards = [shard for _, _, shard in reports if shard is not None]
        if not shards:
            raise ShapeError(
                "The shards of all ranks are empty. Skip the update when nothing "
                "arrived."
            )
        return reduce(Data.joined, shards), options

    def _walk(self, is_divided: bool) -> Callable[..., Learned]:
        """An update in which all ranks take over what the first one learned."""

        def walk(
            known: Known, data: Data, options: UpdateOptions, limits: Limits
        ) -> Learned:
            learned, problem = None, None
            team = self.ranks if is_divided else None
            try:
                team_limits = limits._replace(team=team)
                learned = learn_alone(known, data, options, team_limits)
            except PeerError:
                raise
            except StreamingGPError as error:
                problem = error
            except Exception as error:
                if is_divided:
                    raise  # others are in the middle of it, and will hear nothing
                problem = PeerError(str(error))
            _raise_first(self.ranks.everyones(problem))
            assert learned is not None
            same = self._same(known, learned, limits)
            self.ranks.everyones(None)  # wait until all ranks have it
            return same

        return walk

    @torch.no_grad()
    def _same(self, known: Known, learned: Learned, limits: Limits) -> Learned:
        """What the first rank learned; its factor is made anew, from the same bits."""
        state, prior, *report = learned
        own = None if prior is None else [module.state_dict() for module in prior]
        jitter, buffers = state.jitter, state.buffers(limits.shared_noise)
        jitter, buffers, own, report = self.ranks.agree((jitter, buffers, own, report))
        memory, frozen, dtype = copy(known.memory), known.frozen, state.sunk.dtype
        memory.replace(**buffers)
        if own is None:
            prior = None
        else:
            prior = prior or Prior(*map(deepcopy, known.prior))
            for module, values in zip(prior, own, strict=True):
                module.load_state_dict(values)
            frozen = Prior(*(freeze(module, dtype) for module in prior))
        known = known._replace(memory=memory, frozen=frozen, predictor=None)
        nothing = Data(state.data.x[..., :0, :], state.data.y[..., :0])
        state = recall(known, nothing, limits)._replace(jitter=jitter)
        return Learned(state, prior, *report)


def _raise_first(problems: Sequence[Exception | None], end: str = "") -> None:
    """Raise the error of one rank on all ranks."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise type(problem)(f"On rank {rank}: {problem}{end}")


def _check_same(reports: list[dict[str, Any]]) -> None:
    """Raise if ranks differ in a fact that several of them know."""
    for name in dict.fromkeys(name for report in reports for name in report):
        given = {report[name] for report in reports if name in report}
        if len(given) > 1:
            shown = ", ".join(sorted(map(str, given)))
            raise ArgumentError(
                f"The ranks differ in their {name}: {shown}. Pass the same on every "
                "rank."
            )

r"""One stream over many processes, in the style of ``DistributedDataParallel``.

    check     every rank checks its shard; an error on one rank is raised on all
    gather    all ranks get the whole batch: ``n (d + 1)`` numbers, once per update
    learn     the same walk on every rank, each with its share of the rows: products
              over rows and gradients are summed; the first rank makes all choices
    agree     all ranks take over what the first rank learned, bit by bit

The ranks divide the work that grows with the batch: ``n m²`` operations and ``n m``
numbers in every step. A rank holds the inputs of the whole batch, but not its
covariances.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_ssgp import exceptions, likelihoods, settings
from torch_ssgp import validation as check
from torch_ssgp.exceptions import (
    ArgumentError,
    InputError,
    PeerError,
    ShapeError,
    StreamingGPError,
)
from torch_ssgp.memory import Data
from torch_ssgp.models import StreamingGP
from torch_ssgp.update import UpdateOptions, UpdateResult
from torch_ssgp.update.learning import learn
from torch_ssgp.update.sharding import Team
from torch_ssgp.update.state import Known, Learned, Limits

# Options in which ranks must not differ.
OPTIONS = [
    field.name
    for field in fields(UpdateOptions)
    if field.name not in ("progress", "callback")
]


class Ranks(Team):
    """The processes of a group of ``torch.distributed``.

    Args:
        group: The group; ``None`` for all processes.
        device: Where tensors are exchanged.

    Attributes:
        num_bytes: Bytes of all messages so far, each counted once.
        num_messages: The number of messages.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.first_rank = 0 if group is None else dist.get_global_rank(group, 0)
        self.num_bytes = self.num_messages = 0

    def _count(self, values: Tensor, times: int = 1) -> None:
        self.num_bytes += values.numel() * values.element_size() * times
        self.num_messages += 1

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, the same bits in each."""
        total = values.detach().contiguous().clone()
        self._count(total)
        with _talking():
            dist.all_reduce(total, group=self.group)
        return total

    def gather(self, values: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which may differ in their last size."""
        mine = torch.tensor([values.size(-1)], device=values.device)
        counts = [torch.empty_like(mine) for _ in range(self.size)]
        with _talking():
            dist.all_gather(counts, mine, group=self.group)
        sizes = [int(count) for count in counts]
        padded = values.new_zeros(*values.shape[:-1], max(sizes))
        padded[..., : values.size(-1)] = values.detach()
        every = [torch.empty_like(padded) for _ in sizes]
        self._count(padded, self.size)
        with _talking():
            dist.all_gather(every, padded, group=self.group)
        return [t[..., :size] for t, size in zip(every, sizes, strict=True)]

    def first(self, values: Tensor) -> Tensor:
        """The tensor of the first rank; those of others have the same shape."""
        same = values.detach().contiguous().clone()
        self._count(same)
        with _talking():
            dist.broadcast(same, self.first_rank, group=self.group)
        return same

    def agree(self, values: Tensor) -> Tensor:
        """The tensor of the first rank, whatever the shape of the others."""
        shape = torch.tensor(values.shape, dtype=torch.int64, device=values.device)
        sizes = self.first(shape).tolist()
        return self.first(values.new_empty(sizes) if self.rank else values)

    def agree_all(self, values: list[Tensor]) -> list[Tensor]:
        """The tensors of the first rank, of any dtypes, in one message.

        Args:
            values: As many on every rank, of the same dtypes.
        """
        shapes = self.everyones([tuple(v.shape) for v in values])[0]
        likes = [v.new_empty(s) for v, s in zip(values, shapes, strict=True)]
        sizes = [v.numel() * v.element_size() for v in likes]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            parts = [v.detach().contiguous().view(-1) for v in values]
            packed = torch.cat([p.view(torch.uint8) for p in parts])
        self._count(packed)
        with _talking():
            dist.broadcast(packed, self.first_rank, group=self.group)
        return [
            part.clone().view(like.dtype).reshape(like.shape)
            for part, like in zip(packed.split(sizes), likes, strict=True)
        ]

    def everyones(self, value: Any) -> list[Any]:
        """Small objects of all ranks, in the order of ranks."""
        values: list[Any] = [None] * self.size
        with _talking():
            dist.all_gather_object(values, value, group=self.group)
        return values


@contextmanager
def _talking() -> Iterator[None]:
    """Turn errors of the network into a :class:`PeerError`."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            "A rank was lost, or did not answer within the timeout of the process "
            "group. The model of this rank is unchanged. Stop all ranks and restart "
            "them, from a saved file if there is one. The network error was: "
            f"{str(error).splitlines()[0]}"
        ) from error


class Report(NamedTuple):
    """The report of a rank before an update.

    Attributes:
        problem: Name and message of what is wrong with its arguments, if anything.
        num_dims: The number of inputs; zero where its shard is empty.
        num_data: The size of its shard.
        has_noise: Whether it passes noise variances.
        options: Values of ``OPTIONS``.
    """

    problem: tuple[str, str] | None
    num_dims: int = 0
    num_data: int = 0
    has_noise: bool = False
    options: tuple = ()


class DistributedStreamingGP(nn.Module):
    """A model whose updates are shared by all ranks of a process group.

    Every rank builds the same model, wraps it, and calls :meth:`update` with its shard
    of the batch. Shards may differ in size, and all but one may be empty. Afterwards
    all ranks hold bit-identical models. Up to rounding, they equal the model of a
    single process that sees the whole batch, with shards in the order of ranks.

    Predictions need no other rank: ``model(x)`` and ``model.predict(x)`` are those of
    ``model.module``. With a likelihood that is not Gaussian, with Power-EP, and in a
    :func:`~torch_ssgp.branch`, every rank does all the work of an update.

    Args:
        model: The model, on the device of this rank. It takes the state of the first
            rank.
        process_group: The processes that take part; all by default.
        shard_above: Size of the smallest batch whose work is divided; the size of the
            memory by default. For smaller ones, every rank does all the work, because
            that costs less than messages.

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
            shard_above = model.memory_size
        self.shard_above = check.check_positive_int(shard_above, "shard_above")
        self.module = model
        self.ranks = Ranks(process_group, model.device)
        self._take_state_of_first()

    def _take_state_of_first(self) -> None:
        """Start from the model of the first rank, as DistributedDataParallel does."""
        state = self.module.state_dict()
        parts = {name: value.dtype for name, value in state.items()}
        if any(other != parts for other in self.ranks.everyones(parts)):
            raise ArgumentError(
                "The ranks have different models. Build the same one on every rank."
            )
        same = self.ranks.agree_all(list(state.values()))
        state.update(zip(state, same, strict=True))
        self.module.load_state_dict(state)

    # -- predicting -------------------------------------------------------------------

    def forward(self, x: Tensor, from_memory: bool = False) -> Any:
        """Latent posterior at ``x``, as :meth:`StreamingGP.forward`.

        Args:
            x: ``(*batch, n, d)``.
            from_memory: Whether to predict from all points of the memory.
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

    # -- learning ---------------------------------------------------------------------

    def update(
        self,
        x_shard: Tensor,
        y_shard: Tensor,
        noise: Tensor | None = None,
        **options: Any,
    ) -> UpdateResult:
        """Learn from a batch of which every rank has a shard; all ranks call it.

        If the shard of one rank is invalid, all ranks raise the error. If a rank is
        lost, the others raise :class:`~torch_ssgp.exceptions.PeerError` within the
        timeout of the process group. In both cases no model changes.

        Args:
            x_shard: ``(*batch_shape, n, d)`` or ``(n, d)``; ``n`` may be zero.
            y_shard: ``(*batch_shape, n)``.
            noise: Known noise variances ``(*batch_shape, n)``, on all ranks or none.
            **options: Options of :class:`~torch_ssgp.UpdateOptions`, the same on all
                ranks; ``callback`` and ``progress`` may differ.

        Returns:
            The report of the update, the same on all ranks except for ``seconds``.
        """
        core = self.module
        with core.locks.turn(core.device):
            shard, chosen = self._checked(x_shard, y_shard, noise, options)
            data = self._gathered(shard)
            divided = (
                data.y.size(-1) >= self.shard_above
                and likelihoods.is_gaussian(core.likelihood)
                and core.alpha == 0
                and int(core.memory.base_key) == 0
            )
            if self.ranks.rank:
                chosen = replace(chosen, progress=False)
            return core.learn_from(data, chosen, self._walk(divided))

    def _checked(
        self, x: Tensor, y: Tensor, noise: Tensor | None, given: dict[str, Any]
    ) -> tuple[Data, UpdateOptions]:
        """Shard and options, if they are valid on every rank."""
        known = [field.name for field in fields(UpdateOptions)]
        shard: Data | None
        shard, options = None, UpdateOptions()
        try:
            check.check_options(given, known, "DistributedStreamingGP.update")
            options = UpdateOptions(**given)
            check.check_tensor(x, "x_shard")
            check.check_tensor(y, "y_shard")
            if x.numel() and y.numel():
                shard = self.module.check_data(x, y, noise)
                if options.inducing_points is not None:
                    self.module.check_inducing_points(options.inducing_points, shard.x)
            elif x.shape[:-1].numel() != 0 and y.numel() != 0:
                raise ShapeError(
                    f"x_shard has shape {tuple(x.shape)} and y_shard "
                    f"{tuple(y.shape)}; expected as many targets as inputs."
                )
            report = Report(
                None,
                0 if shard is None else shard.x.size(-1),
                0 if shard is None else shard.y.size(-1),
                noise is not None,
                tuple(_plain(getattr(options, name)) for name in OPTIONS),
            )
        except StreamingGPError as error:
            report = Report((type(error).__name__, str(error)))
        reports = self.ranks.everyones(report)
        self._check_reports(reports)
        num_dims = max(report.num_dims for report in reports)
        if shard is None:
            like = self.module.no_data()
            dtype = settings.algebra_dtype.of(self.module.dtype)
            batch = self.module.batch_shape
            nothing = like.y.new_zeros(*batch, 0, dtype=dtype)
            shard = Data(
                like.y.new_zeros(*batch, 0, num_dims, dtype=dtype),
                nothing,
                nothing if any(report.has_noise for report in reports) else None,
            )
        return shard, options

    def _check_reports(self, reports: list[Report]) -> None:
        """Raise the error of one rank on all ranks."""
        for rank, report in enumerate(reports):
            if report.problem is not None:
                name, message = report.problem
                kind = getattr(exceptions, name, InputError)
                raise kind(f"On rank {rank}: {message} No model was changed.")
        full = [report for report in reports if report.num_data]
        if not full:
            raise ShapeError(
                "The shards of all ranks are empty. Skip the update when nothing "
                "arrived."
            )
        facts: dict[str, set] = {
            "number of inputs": {report.num_dims for report in full},
            "use of noise": {report.has_noise for report in full},
        }
        for name, *given in zip(OPTIONS, *(r.options for r in reports), strict=True):
            facts[f"option {name}"] = set(given)
        for what, values in facts.items():
            if len(values) > 1:
                raise ArgumentError(
                    f"The ranks differ in their {what}: "
                    f"{', '.join(map(str, sorted(values, key=str)))}. Pass the same on "
                    "every rank."
                )

    def _gathered(self, shard: Data) -> Data:
        """The whole batch, in the order of ranks."""
        columns = [shard.x, shard.y.unsqueeze(-1)]
        if shard.noise is not None:
            columns.append(shard.noise.expand(shard.y.shape).unsqueeze(-1))
        packed = torch.cat(columns, -1).mT
        whole = torch.cat(self.ranks.gather(packed), -1).mT.contiguous()
        num_dims = shard.x.size(-1)
        noise = None if shard.noise is None else whole[..., num_dims + 1].contiguous()
        return Data(
            whole[..., :num_dims].contiguous(), whole[..., num_dims].contiguous(), noise
        )

    def _walk(self, divided: bool) -> Callable[..., Learned]:
        """An update in which all ranks take over what the first one learned."""

        def walk(
            known: Known, data: Data, options: UpdateOptions, limits: Limits
        ) -> Learned:
            if divided:
                limits = limits._replace(team=self.ranks)
            problem, learned = None, None
            try:
                learned = learn(known, data, options, limits)
            except PeerError:
                raise
            except StreamingGPError as error:
                problem = (type(error).__name__, str(error))
            except Exception as error:
                if divided:  # others are in the middle of it, and will hear nothing
                    raise
                problem = (type(error).__name__, str(error))
            for rank, other in enumerate(self.ranks.everyones(problem)):
                if other is not None:
                    kind = getattr(exceptions, other[0], PeerError)
                    raise kind(f"On rank {rank}: {other[1]}")
            assert learned is not None
            same = self._same(learned)
            self.ranks.everyones(None)  # wait until all ranks have it
            return same

        return walk

    @torch.no_grad()
    def _same(self, learned: Learned) -> Learned:
        """What the first rank learned."""
        own = [t for m in learned.prior for t in (*m.parameters(), *m.buffers())]
        facts = {k: v for k, v in learned._asdict().items() if isinstance(v, Tensor)}
        tables = [facts, learned.summary, learned.memory]
        values = [*own, *(value for table in tables for value in table.values())]
        same = iter(self.ranks.agree_all(values))
        for tensor in own:
            tensor.copy_(next(same))
        # In the order in which they were packed.
        new: list[Any] = [{name: next(same) for name in table} for table in tables]
        return learned._replace(summary=new[1], memory=new[2], **new[0])


def _plain(value: Any) -> Any:
    """An option in a form that can be compared across ranks."""
    if isinstance(value, Tensor):
        digest = hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes())
        return (*value.shape, digest.hexdigest()[:8])
    return value

r"""``branch`` copies a model for a worker; ``merge`` joins what several models saw.

A memory is a regression data set that holds only likelihoods. So merging puts the rows
and raw data of all models below one another, without counting the prior twice, and
compresses once, like an update without new data. What a worker saw in addition to a
base comes behind the rows and raw data of that base. A branch keeps the two apart for
good, a plain copy until it compresses its memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_ssgp import functional as fn
from torch_ssgp import validation as check
from torch_ssgp.exceptions import ArgumentError, MergeError, NumericalWarning, warn
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.memory import Counts, Memory, Rows
from torch_ssgp.models import StreamingGP
from torch_ssgp.multioutput import MultiOutputGP
from torch_ssgp.points import first_of_each
from torch_ssgp.update import walk
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.result import Status
from torch_ssgp.update.sites import joined_sites
from torch_ssgp.update.state import Base, State, make_objective, recall

# Rows that are joined before they are compressed, per row of the memory: many models
# are merged in rounds, whose matrices have a bounded size.
AT_ONCE = 4
CLOSE = 1e-9  # relative difference of rows that are the same

Model = TypeVar("Model", StreamingGP, MultiOutputGP)


def branch(base: Model) -> Model:
    """Make a copy for a worker, which can later be merged with other copies.

    It predicts, learns and forgets like any copy. Its memory keeps what the base knew
    separate from what is added, so that :func:`torch_ssgp.merge` counts the base once,
    whatever was learned or compressed in between. The price is at most ``num_inducing``
    more rows in the memory.

    Args:
        base: The model to continue; it is unchanged.

    Returns:
        A model of the same class.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> from torch_ssgp import StreamingGP, branch, merge
        >>> base = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=20)
        >>> x = torch.linspace(0, 9, 90).unsqueeze(-1)
        >>> y = x.sin().squeeze(-1)
        >>> result = base.update(x[::3], y[::3], num_steps=20)
        >>> workers = [branch(base), branch(base)]
        >>> for k, worker in enumerate(workers, start=1):
        ...     result = worker.update(x[k::3], y[k::3], num_steps=0)
        >>> int(merge(workers, base=base).memory.num_data)
        90
    """
    if isinstance(base, MultiOutputGP):
        several: Any = MultiOutputGP(branch(base.model))
        return several
    if not isinstance(base, StreamingGP):
        raise ArgumentError(
            f"base is {check.kind_of(base)}; expected a StreamingGP or a MultiOutputGP."
        )
    model = deepcopy(base)
    memory = model.memory
    if not memory.is_empty:
        past, whole = memory.compressed.past, memory.row_data.new_ones(())
        inherited = Base(_key(memory), past, memory.num_raw, whole, memory.sunk)
        memory.replace(**inherited.buffers())
    return model


def merge(
    models: Sequence[Model],
    base: Model | None = None,
    *,
    learn_hyperparameters: bool = False,
    num_steps: int = 100,
) -> Model:
    """Merge models into one that knows what all of them saw; they are unchanged.

    Models that saw separate data need nothing in common but their structure. Models
    that continued from one ``base`` all share its knowledge, which must be counted
    once. Create them with :func:`torch_ssgp.branch`, which keeps the base separate in
    their memories. Plain copies of the base also work, as long as their memories have
    not been compressed since.

    Inducing points that all models have in common are kept; otherwise the policy
    chooses. If models have forgotten some of the base, it counts with the smallest
    power that any of them has left.

    Args:
        models: The models to merge, at least one; some may be empty.
        base: The model that all of them continued from.
        learn_hyperparameters: Whether to learn hyperparameters from the merged memory.
            Otherwise they are those of the model with the most data.
        num_steps: Budget of gradient steps for it.

    Returns: A new model of the same class. With a ``base`` it is a branch of that base,
        so it can be merged again.

    Raises:
        MergeError: If the models differ in likelihood, kernel, inputs or batch shape,
            or if what was added cannot be separated from the base.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> from torch_ssgp import StreamingGP, merge
        >>> sites = [StreamingGP(ScaleKernel(RBFKernel())) for _ in range(3)]
        >>> x = torch.linspace(0, 9, 90).unsqueeze(-1)
        >>> for k, site in enumerate(sites):
        ...     result = site.update(x[k::3], x[k::3].sin().squeeze(-1), num_steps=20)
        >>> together = merge(sites)
        >>> int(together.memory.num_data)
        90
    """
    # Copies, each made atomically: other threads may update the models.
    cores = [deepcopy(_core(model, f"models[{i}]")) for i, model in enumerate(models)]
    if not cores:
        raise MergeError("models is empty; expected at least one model.")
    check.check_flag(learn_hyperparameters, "learn_hyperparameters")
    num_steps = check.check_positive_int(num_steps, "num_steps")
    root = None if base is None else deepcopy(_core(base, "base"))
    for i, core in enumerate(cores[1:], start=1):
        _check_alike(cores[0], core, f"models[{i}]")
    if root is not None:
        _check_alike(cores[0], root, "base")
    with torch.inference_mode(False), torch.no_grad():
        merged = _merge(cores, root, num_steps if learn_hyperparameters else 0)
    several = isinstance(models[0], MultiOutputGP)
    return cast(Model, MultiOutputGP(merged) if several else merged)


def _merge(
    cores: list[StreamingGP], root: StreamingGP | None, num_steps: int
) -> StreamingGP:
    everyone = cores if root is None else [*cores, root]
    full = [core for core in everyone if not core.memory.is_empty]
    # Of those with as many data the first: the result must not depend on chance.
    lead = max(full or everyone, key=lambda core: float(core.memory.num_data.max()))
    result = deepcopy(lead)
    if not full:
        return result
    result.num_inducing = max(core.num_inducing for core in everyone)
    result.memory_size = max(core.memory_size for core in everyone)
    result.memory.replace(jitter=max(core.memory.jitter for core in full))
    shared_noise = all(bool(core.memory.shared_noise) for core in full)
    counts = _counted(cores, root, lead)
    known = {id(core): _known(core, shared_noise, counts.arrived) for core in full}
    base, states = None, {i: known[id(c)] for i, c in enumerate(cores) if c in full}
    if root is None or root.memory.is_empty:
        _check_no_common_base(cores)
    else:
        states, base = _apart(states, known[id(root)], _key(root.memory))
    first, low_high = known[id(lead)], [core.memory.extremes for core in full]
    low, high = torch.stack(low_high).unbind(-1)
    joined, *others = (
        state._replace(
            prior=first.prior,
            rate=first.rate,
            jitter=first.jitter,
            extremes=torch.stack([low.amin(0), high.amax(0)], -1),
            alarm=torch.zeros_like(first.alarm),
            alarmed=torch.zeros_like(first.alarmed),
            counts=counts,
            base=base,
        )
        for state in states.values()
    )
    for state in others:
        if joined.num_rows > AT_ONCE * result.memory_size:
            joined = _walk(result, joined, 0, shared_noise)
        joined = _join(joined, state)
    _walk(result, joined, num_steps, shared_noise)
    return result


def _counted(
    cores: list[StreamingGP], root: StreamingGP | None, lead: StreamingGP
) -> Counts:
    """The counts of the lead, to which the data of all others came in addition."""
    counts = lead.memory.count()
    before = 0 * lead.memory.counts if root is None else root.memory.counts
    added = [c.memory.counts - before for c in cores if not c.memory.is_empty]
    total = Counts(*(before + sum(added)).tolist())
    return counts.after(int(total.arrived - counts.arrived))._replace(
        num_outliers=total.num_outliers, question_at=0.0, question_due=0.0
    )


def _walk(
    result: StreamingGP, joined: State, num_steps: int, shared_noise: bool
) -> State:
    """An update without new data: learn if asked to, and compress what is too much."""
    nothing = result.no_data()
    limits = result.limits(nothing)._replace(shared_noise=shared_noise)
    if joined.sites is not None and joined.num_raw:  # are found anew, together
        objective = make_objective(joined, limits, joined.prior)
        objective.start_at(objective.points)
        joined = joined._replace(sites=objective.as_gaussian())
    result.memory.replace(**joined.buffers(shared_noise))
    learns = num_steps > 0
    options = UpdateOptions(num_steps, learn_hyperparameters=learns, outliers=False)
    with torch.enable_grad():
        learned = walk.update(result.known(nothing), nothing, options, limits)
    if learned.status is not Status.OK:
        warn(learned.status.advice, NumericalWarning)
    result.commit(learned, shared_noise)
    return learned.state


# -- what each model saw --------------------------------------------------------------


def _known(core: StreamingGP, shared_noise: bool, now: float) -> State:
    """All that a model has seen, on a clock by which its stream ends at ``now``."""
    nothing = core.no_data()
    limits = core.limits(nothing)._replace(shared_noise=shared_noise)
    state = recall(core.known(nothing), nothing, limits)
    late, rows, data = now - state.counts.arrived, state.rows, state.data
    assert rows.time is not None and data.time is not None
    return state._replace(
        rows=rows._replace(time=rows.time + late),
        data=data._replace(time=data.time + late),
    )


def _key(memory: Memory) -> int:
    """A hash of what a model knows."""
    digest = hashlib.sha256()
    for tensor in (memory.points, memory.U, memory.g, memory.y, memory.weight):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest()[:7], "big") + 1


def _apart(
    states: dict[int, State], root: State, key: int
) -> tuple[dict[int, State], Base]:
    """The base and what each model saw in addition; the base as what is inherited."""
    power, added = root.sunk.new_ones(()), {}
    for i, state in states.items():
        inherited = _inherited(state, root, key)
        if inherited is None:
            raise MergeError(
                f"What models[{i}] saw cannot be separated from what base knew: it is "
                "no branch of this base, and its memory does not begin with the "
                "data of base, perhaps because they were compressed since. Start "
                "workers with torch_ssgp.branch(base), which keeps the two apart."
            )
        power = torch.minimum(power, inherited.power)
        added[i] = _after(state, inherited)
    root = walk.discounted(root._replace(base=None), power)
    base = Base(key, root.rows.past, root.num_raw, power, root.sunk)
    return {-1: root, **added}, base


def _inherited(state: State, root: State, key: int) -> Base | None:
    """What a model has from a base; ``None`` if that cannot be told apart."""
    if state.base is not None:
        return state.base if state.base.key == key else None
    count, U = root.num_raw, state.rows.past.U
    if count > state.num_raw or U.shape[-2:] != root.rows.past.U.shape[-2:]:
        return None
    first = state._replace(data=state.data.narrow(0, count))
    left = first.num_data / root.num_data
    power = torch.where(root.num_data > 0, left, 1.0)  # streams may have no reading
    then = walk.discounted(root, power)
    pairs = zip(_said(first), _said(then), strict=True)
    if not all(torch.allclose(a, b, CLOSE, CLOSE) for a, b in pairs):
        return None
    return Base(key, then.rows.past, count, power, then.sunk)


def _said(state: State) -> tuple[Tensor, ...]:
    """Rows and raw data as tensors."""
    (points, past, _), (x, y, _, weight, _) = state.rows, state.data
    weight = torch.ones_like(y) if weight is None else weight
    return points, past.U, past.g, x, y, weight


def _after(state: State, base: Base) -> State:
    """What a model has seen in addition to a base."""
    sites, first = state.sites, base.num_raw
    if sites is not None and sites.noise is not None:
        target, noise = sites.target[..., first:], sites.noise[..., first:]
        sites = sites._replace(target=target, noise=noise)
    return state._replace(
        rows=state.rows._replace(past=base.added(state.rows.past)),
        data=state.data.narrow(first, state.num_raw - first),
        sites=sites,
        error=state.error[..., first:],
        sunk=state.sunk - base.sunk,
    )


def _join(first: State, second: State) -> State:
    """One data set of two; what is no row and no raw datum is that of the first."""
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
    U = torch.cat(fn.broadcast_matrices(U, below), -2)
    g = torch.cat(fn.broadcast_rows(a.g, b.g), -1)
    points = torch.cat(fn.broadcast_matrices(first.points, second.points), -2)
    assert first.time is not None and second.time is not None
    time = torch.cat(fn.broadcast_rows(first.time, second.time), -1)
    used = (U != 0).flatten(0, -2).any(0)
    points, time, U = points[..., used, :], time[..., used], U[..., used]
    if points.size(-2):
        seen = points  # as the kernel sees them
        if drifts:
            late = time.expand(points.shape[:-1]).unsqueeze(-1)
            seen = torch.cat([points, late], -1)
        index, column = first_of_each(seen)
        points, time = points[..., index, :], time[..., index]
        U = U.new_zeros(*U.shape[:-1], len(index)).index_add_(-1, column, U)
    return Rows(points, PseudoObservations(U, g, a.rho + b.rho, a.n + b.n), time)


# -- checks ---------------------------------------------------------------------------


def _core(model: Any, name: str) -> StreamingGP:
    if isinstance(model, MultiOutputGP):
        return model.model
    if not isinstance(model, StreamingGP):
        raise MergeError(
            f"{name} is {check.kind_of(model)}; expected a StreamingGP or a "
            "MultiOutputGP. For BoTorch, scikit-learn or river, merge the StreamingGP "
            "inside each model, if all have the same units."
        )
    return model


def _check_no_common_base(cores: list[StreamingGP]) -> None:
    """Raise if a base would be counted more than once."""
    owners: dict[int, int] = {}
    for i, core in enumerate(cores):
        if not core.memory.is_branch:
            continue
        first = owners.setdefault(int(core.memory.base[0]), i)
        if first != i:
            raise MergeError(
                f"models[{first}] and models[{i}] continue the same base, which "
                "would be counted twice. Pass it: merge(models, base=base)."
            )


def _check_alike(first: StreamingGP, other: StreamingGP, name: str) -> None:
    """Raise unless a model has the structure and units of the first."""
    ours, theirs = _facts(first), _facts(other)
    for what in ours | theirs:
        expected, found = ours.get(what, "nothing"), theirs.get(what, "nothing")
        if expected != found and None not in (expected, found):
            raise MergeError(
                f"{name} has a different {what} from models[0]: {found} instead of "
                f"{expected}. Build models to be merged alike, with data in the same "
                "units."
            )


def _facts(core: StreamingGP) -> dict[str, Any]:
    """What models to be merged have in common; ``None`` where it is not known yet.

    Of modules all that makes them the same function of their parameters.
    """
    facts: dict[str, Any] = {}
    for root in ("likelihood", "covar_module", "mean_module"):
        for name, part in getattr(core, root).named_modules(prefix=root):
            if "constraint" in name or "prior" in name:
                continue  # limits of parameters, which are not the function
            facts[name] = type(part).__name__
            for key, value in vars(part).items():
                is_plain = isinstance(value, (bool, int, float, str, torch.Size))
                if is_plain and key != "training" and not key.startswith("_"):
                    facts[f"{name}.{key}"] = value
            for key, parameter in part.named_parameters(name, recurse=False):
                facts[key] = tuple(parameter.shape)
            for key, buffer in part.named_buffers(name, recurse=False):
                facts[key] = buffer.tolist()
    for name in ("batch_shape", "alpha", "share_noise", "dtype", "device"):
        facts[name] = getattr(core, name)
    return {**facts, "number of inputs": core.num_dims}

r"""Merge several models into one that knows what all of them saw.

    known_to, after   what each model saw, without what a common base knew
    join              all of it as one regression data set: exact
    walk              an update without new data: learn if asked to, and compress if
                      there are more rows than a memory holds

A memory holds only likelihoods, so the prior is not counted twice, and the order of
models does not matter. While everything is raw, the result is the model of all data.
With fixed hyperparameters, and inducing points that all memories hold, it still is one
model that saw everything, in any order and for any tree of merges. Otherwise it is what
one memory of that size can express.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from torch_ssgp import validation as check
from torch_ssgp.branching import key_of
from torch_ssgp.core import StreamingCore
from torch_ssgp.exceptions import MergeError, NumericalWarning, warn
from torch_ssgp.models import StreamingGP
from torch_ssgp.multioutput import MultiOutputGP
from torch_ssgp.parts import after, base_in, join, known_to, settled
from torch_ssgp.update import walk
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.result import Status
from torch_ssgp.update.state import Base, State

# Rows that are joined before they are compressed, per row of the memory: many models
# are merged in rounds, whose matrices have a bounded size.
AT_ONCE = 4

Model = TypeVar("Model", StreamingGP, MultiOutputGP)


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
        learn_hyperparameters: Whether to learn hyperparameters and inducing points from
            the merged memory. Otherwise hyperparameters are those of the model with the
            most data.
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
        _check_alike(cores[0], core, "models[0]", f"models[{i}]")
    if root is not None:
        _check_alike(cores[0], root, "models[0]", "base")
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
    raised = torch.stack([core.memory.jitter for core in full]).max()
    result.memory.replace(jitter=raised)

    shared_noise = all(bool(core.memory.shared_noise) for core in full)
    arrived = _total(cores, root, "arrived")
    known = partial(known_to, shared_noise=shared_noise, now=arrived)
    base, states = None, [known(c) for c in cores if not c.memory.is_empty]
    if root is None or root.memory.is_empty:
        _check_no_common_base(cores)
    else:
        states, base = _without_base(states, known(root), cores, key_of(root.memory))
    first = known(lead)
    counts, num_new = first.counts, arrived - first.counts.arrived
    joined = states[0]._replace(
        prior=first.prior,
        rate=first.rate,
        extremes=_extremes(full),
        alarm=torch.zeros_like(first.alarm),
        alarmed=torch.zeros_like(first.alarmed),
        base=base,
        jitter=first.jitter,
        counts=counts._replace(
            arrived=arrived,
            since_start=counts.since_start + num_new,
            since_learning=counts.since_learning + num_new,
            num_outliers=_total(cores, root, "num_outliers"),
            question_at=0.0,
            question_due=0.0,
        ),
    )
    for state in states[1:]:
        if joined.num_rows > AT_ONCE * result.memory_size:
            joined = _walk(result, joined, 0, shared_noise)
        joined = join(joined, state)
    _walk(result, joined, num_steps, shared_noise)
    return result


def _without_base(
    states: list[State], root: State, cores: list[StreamingGP], key: int
) -> tuple[list[State], Base]:
    """The base, then what each model saw in addition; the mark of the base.

    It counts with the smallest power that any model has left of it.
    """
    power, added = root.sunk.new_ones(()), []
    full = [i for i, core in enumerate(cores) if not core.memory.is_empty]
    for i, state in zip(full, states, strict=True):
        inherited = base_in(state, root, key)
        if inherited is None:
            raise MergeError(
                f"What models[{i}] saw cannot be separated from what base knew: it is "
                "no branch of this base, and its memory does not begin with the "
                "data of base, perhaps because they were compressed since. Start "
                "workers with torch_ssgp.branch(base), which keeps the two apart."
            )
        power = torch.minimum(power, inherited.power)
        added.append(after(state, inherited))
    root = walk.discounted(root._replace(base=None), power)
    base = Base(key, root.rows.past, root.num_raw, power, root.sunk)
    return [root, *added], base


def _total(cores: list[StreamingGP], root: StreamingGP | None, name: str) -> float:
    """A count over all models, that of their base once."""
    before = 0.0 if root is None else getattr(root.memory.count(), name)
    full = [core.memory for core in cores if not core.memory.is_empty]
    return before + sum(getattr(m.count(), name) - before for m in full)


def _extremes(cores: list[StreamingGP]) -> Tensor:
    """Smallest and largest target that any model has seen, ``(*batch, 2)``."""
    low, high = torch.stack([core.memory.extremes for core in cores]).unbind(-1)
    return torch.stack([low.amin(0), high.amax(0)], -1)


def _walk(
    result: StreamingGP, joined: State, num_steps: int, shared_noise: bool
) -> State:
    """An update without new data: learn if asked to, and compress what is too much."""
    nothing = result.no_data()
    limits = result.limits(nothing)._replace(shared_noise=shared_noise)
    result.memory.replace(**settled(joined, limits).buffers(shared_noise))
    options = UpdateOptions(
        num_steps=num_steps, learn_hyperparameters=num_steps > 0, forget=1.0
    )
    with torch.enable_grad():
        learned = walk.update(result.known(nothing), nothing, options, limits)
    if learned.status is not Status.OK:
        warn(learned.status.advice, NumericalWarning)
    result.commit(learned, shared_noise)
    return learned.state


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


# -- checks ---------------------------------------------------------------------------


def _check_no_common_base(cores: list[StreamingGP]) -> None:
    """Raise if a base would be counted more than once."""
    owners: dict[int, int] = {}
    for i, core in enumerate(cores):
        if not core.memory.is_branch:
            continue
        key = int(core.memory.base[0])
        if key in owners:
            raise MergeError(
                f"models[{owners[key]}] and models[{i}] continue the same base, which "
                "would be counted twice. Pass it: merge(models, base=base)."
            )
        owners[key] = i


def _check_alike(a: StreamingCore, b: StreamingCore, first: str, second: str) -> None:
    """Raise unless two models have the same structure and units."""
    theirs = _facts(b)
    for name, one in _facts(a).items():
        other = theirs[name]
        if one != other and None not in (one, other):
            raise MergeError(
                f"{second} has a different {name} from {first}: {_shown(other)} "
                f"instead of {_shown(one)}. Build models to be merged alike, with "
                "data in the same units."
            )


def _facts(core: StreamingCore) -> dict[str, Any]:
    """What models to be merged have in common; ``None`` where it is not known yet."""
    modules = ("likelihood", "covar_module", "mean_module")
    values = ("batch_shape", "alpha", "share_noise", "dtype", "device")
    return {
        **{name: _structure(getattr(core, name)) for name in modules},
        **{name: getattr(core, name) for name in values},
        "number of inputs": core.num_dims,
    }


def _structure(module: nn.Module) -> list[tuple]:
    """Everything that makes two modules the same function of their parameters."""
    facts: list[tuple] = []
    for name, part in module.named_modules():
        if "constraint" in name or "prior" in name:
            continue  # limits of parameters, which are not the function
        plain = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, (bool, int, float, str, torch.Size))
            and not key.startswith("_")
            and key != "training"
        }
        shapes = [(k, tuple(p.shape)) for k, p in part.named_parameters(recurse=False)]
        values = [(k, b.tolist()) for k, b in part.named_buffers(recurse=False)]
        facts.append((name, type(part), plain, shapes, values))
    return facts


def _shown(fact: Any) -> str:
    """A fact for an error message; of modules, the shapes of their parameters too."""
    if not isinstance(fact, list):
        return str(fact)
    parts = [(kind.__name__, *(s for _, s in shapes)) for _, kind, _, shapes, _ in fact]
    return "/".join(" ".join(map(str, part)) for part in parts)

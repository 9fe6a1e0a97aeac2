r"""Merge several models into one that knows what all of them saw.

    part_of, added_to   what each model saw, without what a common base knew
    join                all of it as one regression data set: exact
    learn               an update without new data: choose inducing points, compress if
                        there are more points than a memory holds, summarise

A memory holds only likelihoods, so the prior is not counted twice, and the order of
models does not matter. With fixed hyperparameters, and inducing points that the
memories hold, every step is exact: the result equals one model that saw everything, in
any order and for any tree of merges. Otherwise it is what one memory of that size can
express.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from torch_ssgp import settings
from torch_ssgp import validation as check
from torch_ssgp.branching import key_of
from torch_ssgp.core import StreamingCore
from torch_ssgp.exceptions import MergeError, NumericalWarning, warn
from torch_ssgp.memory import Data, buffers, no_base
from torch_ssgp.models import StreamingGP
from torch_ssgp.multioutput import MultiOutputGP
from torch_ssgp.parts import Part, added_to, join, part_of
from torch_ssgp.points import merge_duplicates
from torch_ssgp.update.learning import learn
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.result import Status
from torch_ssgp.update.walk import Update

# Points that are joined before they are compressed, per point of the memory: many
# models are merged in rounds, whose matrices have a bounded size.
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
    not been compressed since, or their hyperparameters and inducing points stayed
    fixed.

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
    shared_noise = all(bool(core.memory.shared_noise) for core in full)
    raised = torch.stack([core.summary.jitter for core in full]).max()
    flag = torch.tensor(shared_noise, device=result.summary.g.device)
    result.summary.replace(shared_noise=flag, jitter=raised)

    # What the leading model kept apart is not the first part of what is joined.
    result.memory.replace(**no_base(result.memory.offset))
    if root is None or root.memory.is_empty:
        _check_no_common_base(cores)
        parts = [part_of(c, shared_noise) for c in cores if not c.memory.is_empty]
    else:
        added = [
            added_to(root, core, shared_noise, f"models[{i}]")
            for i, core in enumerate(cores)
            if not core.memory.is_empty
        ]
        first = part_of(root, shared_noise)
        power = first.target.new_ones(())
        for each in added:
            power = torch.minimum(power, each.power.to(power))
        parts = [first.discount(power), *(each.part for each in added)]
        _mark(result, parts[0], key_of(root), power)

    joined, at_once = parts[0], AT_ONCE * result.memory_size
    _store(result, joined, shared_noise)
    seen = torch.cat([core.memory.extremes for core in full], -1)
    if seen.size(-1):
        seen = torch.stack(seen.aminmax(dim=-1), -1)
    result.memory.replace(extremes=seen)
    z = _common_points(full)
    for i, part in enumerate(parts[1:], start=1):
        joined = join([joined, part])
        _store(result, joined, shared_noise)
        if joined.size > at_once and i + 1 < len(parts):
            _summarise(result, z, 0)
            joined = part_of(result, shared_noise)
    _count(result, lead)
    _summarise(result, z, num_steps)
    return result


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


def _common_points(cores: list[StreamingGP]) -> Tensor | None:
    """The inducing points, if all models have the same ones."""
    z = cores[0].summary.inducing_points
    others = (core.summary.inducing_points for core in cores[1:])
    return z if all(torch.equal(z, other) for other in others) else None


# -- what is remembered ---------------------------------------------------------------


def _store(result: StreamingGP, part: Part, shared_noise: bool) -> None:
    """Replace the memory of a model by a part; marks of a base stay."""
    values = buffers(part.rows, part.data, part.sites, shared_noise)
    result.memory.replace(**values)


def _mark(result: StreamingGP, base: Part, key: int, power: Tensor) -> None:
    """Mark the first rows and data as those of a base, of which a power is left."""
    past, device = base.rows.past, base.target.device
    counts = torch.tensor([key, past.g.size(-1), base.data.y.size(-1)], device=device)
    result.memory.replace(
        base_key=counts[0].clone(),
        base_rows=counts[1].clone(),
        base_raw=counts[2].clone(),
        base_residual=past.rho.clone(),
        base_data=past.n.clone(),
        base_power=power.clone(),
    )


def _count(result: StreamingGP, lead: StreamingGP) -> None:
    """Count the data of other models as new since hyperparameters were learned."""
    memory, old = result.memory, lead.memory
    num_new = (memory.num_data.max() - old.num_data.max()).clamp_min(0)
    memory.replace(
        started_at=old.started_at,
        since_start=old.since_start + num_new,
        since_learning=old.since_learning + num_new,
        loss=old.loss,
        doubt=old.doubt[..., :0],
        doubted=torch.zeros_like(old.doubted),
        waiting=torch.zeros_like(old.waiting),
        noticed=torch.zeros_like(old.noticed),
        since_noticed=torch.zeros_like(old.since_noticed),
    )


def _summarise(result: StreamingGP, z: Tensor | None, num_steps: int) -> None:
    """An update without new data: what is remembered becomes the model."""
    dtype = settings.algebra_dtype.of(result.dtype)
    nothing = Data(*(t.to(dtype) for t in result.no_data()[:2]))
    options = UpdateOptions(
        num_steps=num_steps,
        learn_hyperparameters=num_steps > 0,
        learn_inducing_points=num_steps > 0,
    )
    known, limits = result.known(nothing), result.limits(nothing)
    if z is None:
        update = Update(known, nothing, options, limits)
        objective = update.objective()
        # To the policy all data are new, and no point is an old one.
        candidates = update.points.candidates(objective)._replace(num_new=None)
        z = limits.policy(candidates)
        check.check_choice(z, limits.policy, objective.data.x)
        z = merge_duplicates(objective.kernel, z, objective.jitter)
    points = z.to(dtype).expand(*result.batch_shape, *z.shape[-2:])
    options = replace(options, inducing_points=points)
    with torch.enable_grad():
        learned = learn(known, nothing, options, limits)
    if learned.status is not Status.OK:
        warn(learned.status.advice, NumericalWarning)
    result.commit(learned)


# -- checks ---------------------------------------------------------------------------


def _check_no_common_base(cores: list[StreamingGP]) -> None:
    """Raise if a base would be counted more than once."""
    owners: dict[int, int] = {}
    for i, core in enumerate(cores):
        key = int(core.memory.base_key)
        if key and key in owners:
            raise MergeError(
                f"models[{owners[key]}] and models[{i}] continue the same base, which "
                "would be counted twice. Pass it: merge(models, base=base)."
            )
        owners[key] = i


def _check_alike(a: StreamingCore, b: StreamingCore, first: str, second: str) -> None:
    """Raise unless two models have the same structure and units."""
    facts: dict[str, tuple[Any, Any]] = {
        "likelihood": (_structure(a.likelihood), _structure(b.likelihood)),
        "covar_module": (_structure(a.covar_module), _structure(b.covar_module)),
        "mean_module": (_structure(a.mean_module), _structure(b.mean_module)),
        "batch_shape": (tuple(a.batch_shape), tuple(b.batch_shape)),
        "alpha": (a.alpha, b.alpha),
        "share_noise": (a.share_noise, b.share_noise),
        "dtype": (a.dtype, b.dtype),
        "device": (a.device, b.device),
    }
    if a.num_dims is not None and b.num_dims is not None:
        facts["number of inputs"] = (a.num_dims, b.num_dims)
    for name, (one, other) in facts.items():
        if one != other:
            raise MergeError(
                f"{second} has a different {name} from {first}: "
                f"{_shown(b, name, other)} instead of {_shown(a, name, one)}. Build "
                "models to be merged alike, with data in the same units."
            )


def _structure(module: nn.Module) -> list[Any]:
    """Everything that makes two modules the same function of their parameters."""
    facts: list[Any] = []
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


def _shown(core: StreamingCore, name: str, fact: Any) -> str:
    """A fact for an error message."""
    if hasattr(core, name) and isinstance(getattr(core, name), nn.Module):
        parts = [f"{type(p).__name__}" for p in getattr(core, name).modules()]
        kinds = [p for p in parts if not p.endswith(("Than", "Positive", "List"))]
        shapes = [tuple(p.shape) for p in getattr(core, name).parameters()]
        return f"{'/'.join(kinds)} with parameters of shapes {shapes}"
    return str(fact)

"""Outputs as the last batch dimension of the streaming model, and back.

With one output there is no such dimension.
"""

from __future__ import annotations

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from torch_ssgp.indexing import taken
from torch_ssgp.models import StreamingGP

# Joint posteriors of more points stay lazy. Smaller ones are dense: acquisition
# functions slice them, which a lazily evaluated kernel does slowly, and in GPyTorch
# 1.15 not at all if it has fewer batch dimensions than its inputs.
DENSE = 512

# -- data ---------------------------------------------------------------------------


def inputs_to_core(X: Tensor, num_outputs: int) -> Tensor:
    """Inputs ``... x n x d``, shared by all outputs."""
    return X.unsqueeze(-3) if num_outputs > 1 else X


def to_core(value: Tensor, num_outputs: int) -> Tensor:
    """Values ``... x n x m`` as those of the core: ``... x m x n``, or ``... x n``."""
    return value.mT if num_outputs > 1 else value.squeeze(-1)


def from_core(value: Tensor, num_outputs: int) -> Tensor:
    """The inverse of :func:`to_core`."""
    return value.mT if num_outputs > 1 else value.unsqueeze(-1)


def output_indices(indices: list[int] | None, num_outputs: int) -> list[int]:
    """Indices of outputs, not negative; all of them by default."""
    m = num_outputs
    if indices is None:
        return list(range(m))
    if not indices or not all(-m <= i < m for i in indices):
        raise BotorchTensorDimensionError(
            f"output indices are {indices}; expected some of 0 to {m - 1}."
        )
    return [i % m for i in indices]


# -- distributions ------------------------------------------------------------------


def dense(mvn: MultivariateNormal, always: bool = False) -> MultivariateNormal:
    """The same distribution with a dense covariance, unless it has many points."""
    if mvn.mean.size(-1) > DENSE and not always:
        return mvn
    covariance = to_linear_operator(mvn.lazy_covariance_matrix.to_dense())
    return MultivariateNormal(mvn.mean, covariance)


def with_noise(mvn: MultivariateNormal, variances: Tensor) -> MultivariateNormal:
    """The distribution with noise, whose variances have the layout of the core."""
    try:
        variances = variances.expand(mvn.mean.shape)
    except RuntimeError:
        raise BotorchTensorDimensionError(
            f"observation_noise has shape {tuple(variances.shape)} (outputs "
            f"first); expected {tuple(mvn.mean.shape)} or broadcastable."
        ) from None
    covariance = mvn.lazy_covariance_matrix
    return MultivariateNormal(mvn.mean, covariance.add_diagonal(variances))


def stack_outputs(mvn: MultivariateNormal, chosen: list[int]) -> MultivariateNormal:
    """Some entries of the last batch dimension as outputs of one distribution."""
    mean, covariance = mvn.mean, mvn.lazy_covariance_matrix
    parts = [
        MultivariateNormal(mean[..., i, :], covariance[..., i, :, :]) for i in chosen
    ]
    if len(parts) == 1:
        return parts[0]
    return MultitaskMultivariateNormal.from_independent_mvns(mvns=parts)


# -- models -------------------------------------------------------------------------


def select(value: Tensor, dim: int, chosen: list[int]) -> Tensor:
    """Some entries of a dimension; a single one has no dimension left."""
    if len(chosen) == 1:
        return value.select(dim, chosen[0]).clone()
    return value.index_select(dim, torch.tensor(chosen, device=value.device))


def select_outputs(core: StreamingGP, chosen: list[int]) -> StreamingGP:
    """A streaming model of some of the functions in the last batch dimension."""
    before = (slice(None),) * (len(core.batch_shape) - 1)
    return taken(core, (*before, chosen[0] if len(chosen) == 1 else chosen))


def repeated(core: StreamingGP, batch: torch.Size) -> StreamingGP:
    """A copy for several fantasies that have observed nothing."""
    new = core.light_copy()
    names = ("g", "y", "target")
    values = {name: getattr(new.memory, name).expand(*batch, -1) for name in names}
    new.memory.replace(**values)
    new.batch_shape = batch
    return new

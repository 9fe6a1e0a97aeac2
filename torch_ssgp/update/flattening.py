r"""Detect learning that explains the function as noise.

One function fits the data of two badly: its best noise is large, its best lengthscale
exceeds the range of the data, and what was known is lost without an error. There are
two signs:

- the variance of the noise multiplies in one update, although enough data supported the
  earlier one, and is no longer small compared with the range of the targets. Less
  growth is enough if the new data are surprising, as one update may not go all the way;
- every lengthscale leaves the range of the data, while the noise grows or, if there is
  none, the data are surprising. A linear function has such lengthscales too, so they
  alone prove nothing.

Lengthscales are judged by the prior, whatever its kernel: it is flat where the
correlation of the two inducing points that are furthest apart exceeds that of points
one lengthscale apart.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_ssgp import likelihoods
from torch_ssgp.modules import gram
from torch_ssgp.update.objective import Prior
from torch_ssgp.update.state import Known

GROWTH = 10.0  # of the variance of the noise
GROWN = 3.0  # the same, where data surprise or lengthscales leave the range too
VOUCHED = 50  # data behind the noise of before: a few of them tell little
SMALL = 0.05  # standard deviation of a noise that is small, in ranges of the targets
FLAT = math.exp(-0.5)  # correlation of points one lengthscale apart


@torch.no_grad()
def flattened(
    known: Known, after: Prior, extremes: Tensor, is_surprising: Tensor
) -> Tensor:
    """Where learning explained the function as noise.

    Args:
        known: What was known before.
        after: The modules as learned.
        extremes: ``(*batch, 2)``, smallest and largest target so far.
        is_surprising: ``(*batch,)``, whether the new data were.

    Returns:
        ``(*batch,)``, booleans.
    """
    memory, batch = known.memory, is_surprising.shape
    nowhere = torch.zeros_like(is_surprising)
    if float(memory.num_data.max()) - float(memory.since_learning) < VOUCHED:
        return nowhere
    growth, is_large = torch.ones_like(extremes[..., 0]), nowhere
    if likelihoods.is_gaussian(after.likelihood):
        old, new = (_noise(p, extremes) for p in (known.frozen, after))
        growth = (new / old).expand(batch)
        is_large = (new.sqrt() > SMALL * (extremes[..., 1] - extremes[..., 0])).expand(
            batch
        )
        suspect = is_large & (growth > GROWN)
    else:
        suspect = is_surprising
    if not bool(suspect.any()):
        return nowhere
    z = known.summary.inducing_points.to(extremes)
    was_flat, is_flat = (_is_flat(p, z).expand(batch) for p in (known.frozen, after))
    multiplied = growth > torch.where(is_surprising, GROWN, GROWTH)
    return (is_large & multiplied) | (suspect & is_flat & ~was_flat)


def _noise(prior: Prior, like: Tensor) -> Tensor:
    """Variance of the noise that all data share, ``(*batch,)`` or one for all."""
    noise = prior.likelihood.noise.to(like)
    return noise[..., 0] if noise.size(-1) == 1 else noise.mean(-1)


def _is_flat(prior: Prior, z: Tensor) -> Tensor:
    """Whether the prior is flat over all inducing points, ``(*batch,)``."""
    K = gram(prior.kernel, z, z)
    std = K.diagonal(dim1=-2, dim2=-1).sqrt()
    correlation = K / (std.unsqueeze(-1) * std.unsqueeze(-2))
    return correlation.amin((-2, -1)) > FLAT

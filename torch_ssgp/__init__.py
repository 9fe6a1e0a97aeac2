"""Streaming sparse Gaussian processes on GPyTorch.

The past is kept as a small regression data set: pseudo-observations of the function at
the inducing points. An update is sparse regression on new data and pseudo-observations,
followed by one QR that compresses both into the next pseudo-observations. Data walk
through the rooms once:

    update(x, y) -> inducing -> fit -> functional -> summary -> prediction

===========================  ==========================================================
``models.py``                ``StreamingGP``, the front door
``validation.py``            the input contract: what is refused, and how it is said
``initialization.py``        hyperparameters to start from, read off the first batch
``inducing.py``              policies that choose the next inducing points
``fit.py``                   the inner loop, its objective and its ``UpdateResult``
``modules.py``               where GPyTorch kernels and noises become tensors; jitter
``functional.py``            the mathematics, as pure functions of tensors
``summary.py``               ``PosteriorSummary``: the buffers that survive an update
``prediction.py``            the posterior at test points
``rollback.py``              change modules all at once, or not at all
``likelihoods.py``           what an update asks of a likelihood
``sites.py``                 Gaussian sites for likelihoods that are not Gaussian
``site_initialization.py``   the first batch of such a stream
``multioutput.py``           several outputs as a batch of streams
``variational.py``           the same idea as a GPyTorch variational strategy
``mlls.py``                  ``StreamingELBO`` for hand-written training loops
``surrogates.py``            BoTorch models (needs the extra ``botorch``)
``plotting.py``              pictures of a stream (needs the extra ``plot``)
``persistence.py``           models in files, and loads that fail without a trace
``settings.py``              jitter and the dtype of the algebra
``exceptions.py``            named errors and warnings
===========================  ==========================================================
"""

from torch_ssgp import exceptions, settings
from torch_ssgp.inducing import (
    AdaptiveBudget,
    AllocatorPolicy,
    GreedyInformation,
    GreedyPolicy,
    GreedyVariance,
    InducingPolicy,
    KeepOld,
    RandomReplace,
)
from torch_ssgp.memory import Memory
from torch_ssgp.mlls import StreamingELBO
from torch_ssgp.models import StreamingGP
from torch_ssgp.multioutput import MultiOutputGP
from torch_ssgp.summary import PosteriorSummary
from torch_ssgp.update import Status, UpdateOptions, UpdateResult
from torch_ssgp.variational import (
    IndependentMultitaskStreamingStrategy,
    LMCStreamingStrategy,
    StreamingVariationalStrategy,
)

__all__ = [
    "AdaptiveBudget",
    "AllocatorPolicy",
    "GreedyInformation",
    "GreedyPolicy",
    "GreedyVariance",
    "IndependentMultitaskStreamingStrategy",
    "InducingPolicy",
    "KeepOld",
    "LMCStreamingStrategy",
    "Memory",
    "MultiOutputGP",
    "PosteriorSummary",
    "RandomReplace",
    "Status",
    "StreamingELBO",
    "StreamingGP",
    "StreamingVariationalStrategy",
    "UpdateOptions",
    "UpdateResult",
    "exceptions",
    "settings",
]

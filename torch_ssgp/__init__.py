"""Streaming sparse Gaussian processes on GPyTorch.

The memory of a model is a small regression data set: raw data, and pseudo-observations
of the function at more points than the model has. An update is sparse regression on the
whole memory. Its result is the posterior at the inducing points. Data flow through the
package once:

    update(x, y) -> remember -> learn -> summarise -> compress -> predict

===========================  ==========================================================
``models.py``                ``StreamingGP``, the front door
``core.py``                  its state, checks and caches
``conditioning.py``          data in closed form: fantasies
``validation.py``            the input contract: checks and their error messages
``memory.py``                ``Memory``: raw data and rows, of a bounded size
``compression.py``           the points it keeps, and the stretch it drops
``buffers.py``               state in buffers that are replaced atomically
``inducing.py``              policies that choose inducing points
``greedy.py``                the best point first, one after the other
``points.py``                sets of points: thin, merge, drop
``update/``                  one update, as a function; its ``__init__.py`` is its tour
``modules.py``               GPyTorch kernels and noises as tensors; jitter
``kernels.py``               GPyTorch's common kernels as plain tensors
``radial.py``                Matérn and rational quadratic kernels of a distance
``functional.py``            the mathematics, as pure functions of tensors
``fused.py``                 the bound with its gradient in closed form
``summary.py``               ``PosteriorSummary``: the posterior at inducing points
``prediction.py``            the posterior at test points
``advice.py``                warnings of an update, once for each cause
``atomic.py``                atomic changes of modules
``likelihoods.py``           what an update needs from a likelihood
``merging.py``               ``merge``: several models into one
``parts.py``                 what each of them saw
``branching.py``             ``branch``: copies that can be merged again
``distributed.py``           one stream over many processes
``indexing.py``              ``model[i]``: one stream of a batch
``multioutput.py``           several outputs as a batch of streams
``streaming.py``             ``stream``: predict, then learn, batch by batch
``variational/``             the same idea as a GPyTorch variational strategy
``mlls.py``                  ``StreamingELBO`` for hand-written training loops
``surrogates/``              BoTorch models (needs the extra ``botorch``)
``sklearn.py``               scikit-learn estimators (needs the extra ``sklearn``)
``river.py``                 river estimators (needs the extra ``river``)
``estimators.py``            what these two share: NumPy in, NumPy out
``river_base.py``            what the estimators for river share
``features.py``              features that appear and vanish, as columns
``calibration.py``           intervals calibrated on earlier errors
``export.py``                a model as plain tensors, for deployment
``plain_kernels.py``         kernels at fixed points, for exported models
``plotting.py``              pictures of a stream (needs the extra ``plot``)
``persistence.py``           models in files: atomic saving, checked loading
``settings.py``              jitter and the dtype of the algebra
``exceptions.py``            named errors and warnings
===========================  ==========================================================
"""

from torch_ssgp import exceptions, settings
from torch_ssgp.branching import branch
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
from torch_ssgp.merging import merge
from torch_ssgp.mlls import StreamingELBO
from torch_ssgp.models import StreamingGP
from torch_ssgp.multioutput import MultiOutputGP
from torch_ssgp.streaming import stream
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
    "branch",
    "exceptions",
    "merge",
    "settings",
    "stream",
]

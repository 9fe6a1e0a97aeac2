"""Streaming sparse Gaussian processes on GPyTorch.

A model is a Gaussian process on a regression data set of bounded size, its memory.
Until ``memory_size`` rows have come it is the exact Gaussian process on all data. When
it is full, the past is compressed onto ``num_inducing`` points by the step of the
paper, and goes on as rows of the same data set. Data flow through the package once:

    update(x, y) -> extend -> judge -> learn -> compress -> predict

===========================  ==========================================================
``models.py``                ``StreamingGP``, the front door
``core.py``                  its state, checks and caches
``live.py``                  single data, each a new row and a few numbers
``conditioning.py``          data in closed form: fantasies
``validation.py``            the input contract: checks and their error messages
``memory.py``                ``Memory``: raw data and rows, of a bounded size
``rows.py``                  row space: an exact Gaussian process on these rows
``functional.py``            the formulas of the paper, as pure functions of tensors
``fused.py``                 its bound with a gradient in closed form
``update/``                  one update, as a function; its ``__init__.py`` is its tour
``prediction.py``            the posterior at test points
``summary.py``               ``PosteriorSummary``: a view of it at the points
``inducing.py``              policies that choose them instead
``points.py``                points: thin, merge, take the best, cover all inputs
``modules.py``               GPyTorch kernels and noises as tensors; jitter
``kernels.py``               GPyTorch's common kernels as plain tensors
``radial.py``                stationary kernels as functions of a distance
``buffers.py``               state in buffers that are replaced atomically
``advice.py``                warnings of an update, once for each cause
``atomic.py``                atomic changes of modules
``likelihoods.py``           what an update needs from a likelihood
``merging.py``               ``branch`` copies a model, ``merge`` joins several
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
``features.py``              features that appear and vanish, as columns
``calibration.py``           intervals calibrated on earlier errors
``export.py``                a model as plain tensors, for deployment
``plotting.py``              pictures of a model (needs the extra ``plot``)
``display.py``               ``repr(model)``, also as a table
``persistence.py``           models in files: atomic saving, checked loading
``settings.py``              jitter and the dtype of the algebra
``exceptions.py``            named errors and warnings
===========================  ==========================================================
"""

from importlib.metadata import version as _version

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
from torch_ssgp.merging import branch, merge
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

__version__ = _version("torch_ssgp")

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

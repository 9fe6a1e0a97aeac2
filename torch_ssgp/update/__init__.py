"""One update of a stream, as a function: remember new data and learn from them.

    judge -> remember -> choose points -> ascend -> summarise -> compress

===========================  ==========================================================
``learning.py``              an update as a function: ``learn``
``state.py``                 what it starts from, may use, and ends with
``walk.py``                  remember, learn, summarise, compress
``paying.py``                when it pays to learn
``appending.py``             updates that only add rows
``choosing.py``              where inducing points go
``starts.py``                the better of two starts
``apart.py``                 the memory of a branch: its base, and what it added
``options.py``               its options: defaults and checks
``result.py``                what it reports: ``UpdateResult``, ``Status``
``forgetting.py``            what the evidence of new data says about the past
``drift.py``                 how much of a drifting stream is kept, and how long
``clock.py``                 inputs that move on, past the inducing points
``witnesses.py``             data that bear no witness of a change
``trial.py``                 one function for all data, or a new one
``flattening.py``            detects learning that explains the function as noise
``objective.py``             the bound, as a function of hyperparameters and points
``making.py``                which bound goes with which likelihood
``sharding.py``              the bound, its rows divided among processes
``sites.py``                 the same for likelihoods that are not Gaussian
``site_algebra.py``          its algebra
``initialization.py``        hyperparameters to start from
``site_initialization.py``   the same for likelihoods that are not Gaussian
``coordinates.py``           variables in which one learning rate suits every parameter
``ascent.py``                the inner loop
``lean.py``                  the bound of the usual model, in few operations
===========================  ==========================================================
"""

from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.result import Status, UpdateResult

__all__ = ["Status", "UpdateOptions", "UpdateResult"]

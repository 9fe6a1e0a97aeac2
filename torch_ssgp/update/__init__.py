"""One update of a stream, as a function of what is known, new data and options.

    extend -> judge -> learn -> compress -> finish

===========================  ==========================================================
``walk.py``                  these five steps
``state.py``                 what an update starts from, may use, and ends with
``change.py``                alarms, and the three explanations of one
``learn.py``                 when to learn, from which starts, and rates of drift
``compress.py``              rows and raw data onto points: the step of the paper
``objective.py``             the evidence or its bound, of hyperparameters
``ascent.py``                the inner loop
``coordinates.py``           variables in which one learning rate suits every parameter
``initialization.py``        hyperparameters to start from
``young.py``                 hyperparameters integrated out, where data are few
``sites.py``                 likelihoods that are not Gaussian
``site_algebra.py``          their algebra
``site_initialization.py``   their hyperparameters to start from
``sharding.py``              the bound, its rows divided among processes
``options.py``               ``UpdateOptions``: defaults and checks
``result.py``                ``UpdateResult``, ``Status``
===========================  ==========================================================
"""

from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.result import Status, UpdateResult

__all__ = ["Status", "UpdateOptions", "UpdateResult"]

r"""An update: a function of the model's knowledge, new data and options.

    judge       how well the past predicts the new data: what to forget, and whether
                it pays to learn (``forgetting.py``)
    remember    new data join the raw data of the memory: exact
    learn       maximise the bound on the whole memory over hyperparameters and
                inducing points; from a fresh start too when the data have doubled
    summarise   q(b), as pseudo-observations at the inducing points
    compress    if the memory is over its capacity: choose points, project, one QR
                (all four in ``walk.py``)

The model does not change here. It takes over the result, or discards it.
"""

from __future__ import annotations

from dataclasses import replace

from torch_ssgp.exceptions import Breakdown, FactorizationError
from torch_ssgp.memory import Data
from torch_ssgp.update.forgetting import Judged
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.result import Status
from torch_ssgp.update.state import Known, Learned, Limits
from torch_ssgp.update.trial import update_with


def learn(known: Known, data: Data, options: UpdateOptions, limits: Limits) -> Learned:
    """One update; in closed form if numbers stop being finite.

    Args:
        known: What the model knows before.
        data: New data, checked, in the dtype of the algebra.
        options: How to learn.
        limits: What may be used.

    Returns:
        What the model is to become.
    """
    judged = Judged.of(known, data, options, limits)
    try:
        try:
            return update_with(known, data, options, limits, judged)
        except Breakdown:
            if options.num_steps == 0:
                raise
            closed_form = replace(options, num_steps=0)
            learned = update_with(known, data, closed_form, limits, judged)
            return learned._replace(status=Status.CLOSED_FORM)
    except Breakdown as error:
        raise FactorizationError(
            f"Nothing could be learned from the data ({error}); the model is "
            "unchanged. Check kernel and likelihood for values that are not "
            "finite, or raise the jitter: with torch_ssgp.settings.jitter(1e-4): "
            "..."
        ) from error

"""What an update reports: numbers, and a status that carries its advice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor


class Status(StrEnum):
    """How far an update had to fall back; equal to its name as a string."""

    OK = "ok"
    LAST_ITERATE = "last_iterate"
    JITTER = "jitter"
    CLOSED_FORM = "closed_form"

    @property
    def advice(self) -> str:
        """What happened, and what to do about it."""
        return _ADVICE[self]


_ADVICE = {
    Status.OK: "",
    Status.LAST_ITERATE: (
        "The inner loop met a value or a gradient that is not finite, and kept the "
        "best hyperparameters so far. Lower lr, or use constraints or priors to keep "
        "hyperparameters where the kernel is finite."
    ),
    Status.JITTER: (
        "The covariance of the points could not be factored, so the jitter "
        "was raised permanently (model.memory.jitter). Check that the kernel is "
        "positive definite, or set the jitter: with torch_ssgp.settings.jitter(1e-6): "
        "..."
    ),
    Status.CLOSED_FORM: (
        "Learning gave no finite result, so the new data were absorbed with the old "
        "hyperparameters. Check that kernel and likelihood are finite near them, and "
        "use constraints or priors to bound hyperparameters."
    ),
}


@dataclass(frozen=True)
class UpdateResult:
    """What one update did.

    Attributes:
        bound: ``(*batch,)``, bound on the log evidence of all data seen; the evidence
            itself until something was compressed.
        increment: ``(*batch,)``, the change of ``bound``: the online bound on log p(new
            data | earlier data). Increments add up to ``bound`` as long as nothing is
            forgotten.
        bound_trace: ``(steps, *batch)``, the bound after every step.
        num_steps: Evaluations of the inner loop.
        converged: Whether the inner loop ended on a plateau before it used up its
            budget.
        projection_loss: ``(*batch,)``, nats lost permanently by a compression; zero
            while the memory has room.
        num_inducing: Number of points now, those of raw data included.
        num_rows: Number of rows now, raw data included: what ``memory_size`` bounds.
        restarted: ``(*batch,)``, whether hyperparameters learned from a fresh start
            won; ``False`` if no fresh start was due.
        forgot: ``(*batch,)``, power that the likelihood of the past was raised to: 1 if
            nothing was forgotten, 0 if the stream started over.
        rate: ``(*batch,)``, rate of drift per datum that the evidence has found; zero
            if there is none.
        surprise: ``(*batch,)``, nats per datum by which the new data were less
            probable than the model expected; about zero while all is well.
        alarm: ``(*batch,)``, log Bayes factor against the model so far: the sum of what
            the latest data say.
        alarm_since: ``(*batch,)``, how many data that sum is over.
        num_outliers: Data that were left out as outliers, in the whole stream.
        learned: Whether the inner loop ran.
        seconds: Wall-clock time of the update.
        status: ``"ok"``, or how far the update had to fall back, as a
            ``NumericalWarning`` says too: ``"last_iterate"`` (the inner loop met a
            value that is not finite and ended at the best point so far), ``"jitter"``
            (the jitter was raised, and stays), ``"closed_form"`` (no learning: the data
            were absorbed with the old hyperparameters).
    """

    bound: Tensor
    increment: Tensor
    bound_trace: Tensor = field(repr=False)
    num_steps: int
    converged: bool
    projection_loss: Tensor
    num_inducing: int
    num_rows: int
    restarted: Tensor
    forgot: Tensor
    rate: Tensor
    surprise: Tensor
    alarm: Tensor
    alarm_since: Tensor
    num_outliers: int
    learned: bool
    seconds: float
    status: Status = Status.OK

    def __getattr__(self, name: str) -> Any:
        """Fields of version 0.2.0 that mean nothing any more say what to read."""
        if name not in _GONE:
            raise AttributeError(f"UpdateResult has no field {name!r}.")
        new, value = _GONE[name]
        warnings.warn(
            f"UpdateResult.{name} is deprecated; read {new} instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        return value(self)


# Fields of version 0.2.0: what to read instead, and what they are now.
_GONE: dict[str, tuple[str, Callable[[UpdateResult], Any]]] = {
    "memory_loss": ("projection_loss", lambda r: r.projection_loss),
    "projection_loss_before": ("projection_loss", lambda r: r.projection_loss),
    "num_remembered": ("num_inducing", lambda r: r.num_inducing),
    "num_kept": ("num_inducing", lambda r: r.forgot.long() * r.num_inducing),
    "num_added": ("num_inducing", lambda r: 0),
    "num_dropped": ("num_inducing", lambda r: 0 * r.forgot.long()),
    "flattened": ("alarm", lambda r: r.forgot < 0),
}

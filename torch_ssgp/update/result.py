"""What an update reports: numbers, and a status that carries its advice."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

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
        "The covariance of the inducing points could not be factored, so the jitter "
        "was raised permanently (model.summary.jitter). Check that the kernel is "
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
        bound: ``(*batch,)``, bound on the log evidence of all data seen.
        increment: ``(*batch,)``, the change of ``bound``: the online bound on log p(new
            data | earlier data). Increments add up to ``bound`` as long as nothing is
            forgotten.
        bound_trace: ``(steps, *batch)``, the bound after every step.
        num_steps: Steps taken. For L-BFGS, evaluations of the bound, which may exceed
            the budget by a quarter.
        converged: Whether the inner loop ended on a plateau before it used up its
            budget.
        projection_loss: ``(*batch,)``, nats that the bound loses because the model
            computes with its inducing points, not with the whole memory.
        projection_loss_before: ``(*batch,)``, the same before the inner loop, with its
            first inducing points and the old hyperparameters.
        memory_loss: ``(*batch,)``, nats lost permanently because the memory was
            compressed; zero while it has room.
        num_inducing: Number of inducing points now.
        num_kept: ``(*batch,)``, how many of the old inducing points are among them.
        num_added: ``(*batch,)``, how many are new.
        num_dropped: ``(*batch,)``, how many of the old ones are gone.
        num_remembered: Number of points in the memory now.
        restarted: ``(*batch,)``, whether hyperparameters learned from a fresh start
            won; ``False`` if no fresh start was due.
        forgot: ``(*batch,)``, power that the likelihood of the past was raised to: 1 if
            nothing was forgotten, 0 if the stream started over.
        surprise: ``(*batch,)``, nats per datum by which the new data were less
            probable than the model expected; about zero while all is well.
        flattened: ``(*batch,)``, whether learning explained the function as noise
            although nothing was forgotten. The variance of the noise grew by a factor
            of 10 (3 with surprising data), or every lengthscale left the range of the
            data. Usually the stream has changed; a ``FlattenedWarning`` says so once.
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
    projection_loss_before: Tensor
    memory_loss: Tensor
    num_inducing: int
    num_kept: Tensor
    num_added: Tensor
    num_dropped: Tensor
    num_remembered: int
    restarted: Tensor
    forgot: Tensor
    surprise: Tensor
    flattened: Tensor
    learned: bool
    seconds: float
    status: Status = Status.OK

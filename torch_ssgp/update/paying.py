"""When it pays to learn, where the model decides."""

from __future__ import annotations

from torch import Tensor

GROWTH = 0.2  # share of the data since the last learning that makes it pay again
LOSS = 0.01  # nats per datum to win by learning, in addition, that make it pay before


class Unsuited(Exception):
    """Points or hyperparameters of before no longer suit all data: learn."""


def to_win(
    loss: Tensor, misfit: Tensor, count: Tensor, num_data: float, is_scaled: bool
) -> Tensor:
    """Nats per datum that better points, noise and scale would gain, ``(*batch,)``.

    Of the last two together the optimum is known: where squared residuals are ``c``
    times their predicted variance, multiplying noise and scale by ``c`` gains
    ``(c - 1 - log c) / 2``.

    Args:
        loss: ``(*batch,)``, nats lost by the inducing points.
        misfit: ``(*batch,)``, see :class:`~torch_ssgp.functional.Fit`.
        count: ``()`` or ``(*batch,)``, data behind both.
        num_data: The largest number of all streams.
        is_scaled: Whether noise and scale count.
    """
    lost = loss / num_data
    if not is_scaled:
        return lost
    c = (misfit / count.clamp_min(1)).clamp_min(1)
    return lost + 0.5 * (c - 1 - c.log())


def check_suits(now: Tensor, before: Tensor) -> None:
    """Raise :class:`Unsuited` if there is too much to win.

    Args:
        now: What is to win, see :func:`to_win`.
        before: The same when the model learned last.
    """
    if bool((now > before.to(now) + LOSS).any()):
        raise Unsuited

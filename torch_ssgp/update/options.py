"""The options of an update: defaults and checks, once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from torch import Tensor

from torch_ssgp.exceptions import ArgumentError, UnknownOptionError
from torch_ssgp.validation import (
    check_flag,
    check_forget,
    check_options,
    check_positive_int,
    is_number,
    kind_of,
)

Callback = Callable[[int, Tensor], Any]
Class = TypeVar("Class", bound=type)


def names_keywords(cls: Class) -> Class:
    """A class whose constructor names the right keyword in place of a wrong one."""
    init = cls.__init__  # type: ignore[misc]
    known = list(signature(init).parameters)[1:]

    @wraps(init)
    def checked(self: Any, *args: Any, **keywords: Any) -> None:
        for field in fields(UpdateOptions):
            if field.name in keywords and field.name not in known:
                raise UnknownOptionError(
                    f"{cls.__name__} has no option {field.name!r} of its own. Pass "
                    f"options=UpdateOptions({field.name}=...)."
                )
        check_options(keywords, known, cls.__name__)
        init(self, *args, **keywords)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


@names_keywords
@dataclass(frozen=True)
class UpdateOptions:
    """How an update learns; see :meth:`torch_ssgp.StreamingGP.update`.

    Attributes:
        num_steps: Budget of gradient steps; 0 for the closed form alone.
        lr: Learning rate, in units of log-hyperparameters and of the spacing of
            inducing points; ``None`` for the default of the optimiser.
        optimizer: ``"adam"`` or ``"lbfgs"``.
        learn_hyperparameters: Whether the inner loop moves hyperparameters; a number k
            for every k-th update only, starting with the first; ``"auto"`` to run the
            inner loop when it pays; ``"later"`` to leave that to ``model.learn()``.
        learn_inducing_points: Whether it moves inducing points as well, where an update
            compresses; ``None`` is ``False``.
        inducing_points: ``(*batch_shape, m, d)``, explicit inducing points.
        trust_region: Width of the region around log-hyperparameters; leaving it costs
            nats. ``None`` for no trust region.
        forget: Power of the past's likelihood, in (0, 1]; ``"auto"`` lets the evidence
            of the new data decide, and forgets nothing if hyperparameters are fixed.
        change_odds: Prior odds that a stream changes, for ``"auto"``.
        integrate_hyperparameters: Whether a young model integrates its hyperparameters
            out until the data decide, if the user has said nothing of them, see
            :mod:`torch_ssgp.update.young`.
        outliers: Whether data that are far off may be left out; ``None`` if the
            evidence decides what to forget, and only then.
        restart: Whether hyperparameters are also learned from a fresh start when the
            amount of data has doubled.
        budget: Most evaluations of the inner loop in one update; where that is too few,
            the next updates go on. ``None`` for ``num_steps``.
        progress: Whether to show a progress bar.
        callback: Called with the step and the bound after every step.
    """

    num_steps: int = 100
    lr: float | None = None
    optimizer: str = "adam"
    learn_hyperparameters: bool | int | str = "auto"
    learn_inducing_points: bool | None = None
    inducing_points: Tensor | None = None
    trust_region: float | None = None
    forget: float | str | None = "auto"
    change_odds: float = 1e-3
    integrate_hyperparameters: bool = True
    outliers: bool | None = None
    restart: bool = True
    budget: int | None = None
    progress: bool = False
    callback: Callback | None = None

    def __post_init__(self) -> None:
        check_positive_int(self.num_steps, "num_steps", at_least=0)
        object.__setattr__(self, "num_steps", int(self.num_steps))
        if self.budget is not None:
            check_positive_int(self.budget, "budget")
        lr, trust_region = self.lr, self.trust_region
        if lr is not None and not (is_number(lr) and 0 < lr < math.inf):
            raise ArgumentError(
                f"lr is {lr!r}; expected a number above zero, or None for the default "
                "of the optimizer."
            )
        if self.optimizer not in ("adam", "lbfgs"):
            raise ArgumentError(
                f"optimizer is {self.optimizer!r}; expected 'adam' or 'lbfgs'."
            )
        check_forget(self.forget)
        if not (is_number(self.change_odds) and 0 < self.change_odds < 1):
            raise ArgumentError(
                f"change_odds is {self.change_odds!r}; expected the prior odds of a "
                "change per update, between zero and one."
            )
        learn = self.learn_hyperparameters
        if isinstance(learn, str) and learn not in ("auto", "later"):
            raise ArgumentError(
                f"learn_hyperparameters is {learn!r}; expected True, False, a number k "
                "for every k-th update, 'auto' or 'later'."
            )
        if not isinstance(learn, (bool, str)):
            check_positive_int(learn, "learn_hyperparameters", at_least=0)
        if self.learn_inducing_points is not None:
            check_flag(self.learn_inducing_points, "learn_inducing_points")
        check_flag(self.restart, "restart")
        if self.outliers is not None:
            check_flag(self.outliers, "outliers")
        check_flag(self.integrate_hyperparameters, "integrate_hyperparameters")
        if trust_region is not None and not (
            is_number(trust_region) and trust_region > 0
        ):
            raise ArgumentError(
                f"trust_region is {trust_region!r}; expected a width above zero, or "
                "None for no trust region."
            )
        if self.callback is not None and not callable(self.callback):
            raise ArgumentError(
                f"callback is {kind_of(self.callback)}; expected a function of the "
                "step and the bound, callback(step, bound)."
            )

    @property
    def power(self) -> float:
        """The power of the past's likelihood, if the evidence does not choose it."""
        return self.forget if isinstance(self.forget, int | float) else 1.0

    @property
    def watches(self) -> bool:
        """Whether new data are added to the alarms, which say when to learn, at least.

        Fixed hyperparameters cannot tell a change from noise.
        """
        return self.num_steps > 0 and self.learn_hyperparameters in ("auto", "later", 1)

    @property
    def forgets_by_evidence(self) -> bool:
        """Whether the evidence decides what to forget, in this update."""
        return self.watches and not self.postpones and self.forget in (None, "auto")

    @property
    def postpones(self) -> bool:
        """Whether learning and explanations are left to ``model.learn()``."""
        return self.learn_hyperparameters == "later"

    @property
    def price(self) -> float:
        """Nats that a change has to win, for its odds."""
        return -math.log(self.change_odds)

    @property
    def leaves_out(self) -> bool:
        """Whether data that are far off may be left out."""
        if self.outliers is None:
            return self.forgets_by_evidence
        return self.outliers and self.watches and not self.postpones

    @property
    def integrates(self) -> bool:
        """Whether hyperparameters of a young model are integrated out."""
        if self.trust_region is not None or not self.integrate_hyperparameters:
            return False
        return self.learns_when_due or self.postpones

    @property
    def learns_when_due(self) -> bool:
        """Whether the inner loop runs only when it pays."""
        return self.learn_hyperparameters == "auto" and self.num_steps > 0

    @property
    def learns_always(self) -> bool:
        """Whether every update learns."""
        return self.num_steps > 0 and self.learn_hyperparameters is True

    def learns_at(self, num_updates: int) -> bool:
        """Whether hyperparameters are learned after so many updates, if it pays."""
        if isinstance(self.learn_hyperparameters, str):
            return self.learns_when_due
        every = int(self.learn_hyperparameters)
        return self.num_steps > 0 and every > 0 and num_updates % every == 0


def resolve(
    options: UpdateOptions | None, learn: bool | int | str | None, keywords: dict
) -> UpdateOptions:
    """Options of one update, from an object, from keywords, or from both.

    Args:
        options: Where to start; the defaults if ``None``.
        learn: A short name of ``learn_hyperparameters``; ``None`` if not given.
        keywords: Fields of :class:`UpdateOptions` that differ.
    """
    if options is not None and not isinstance(options, UpdateOptions):
        raise ArgumentError(
            f"options is {kind_of(options)}; expected UpdateOptions, such as "
            "UpdateOptions(num_steps=50)."
        )
    if learn is not None:
        keywords = {"learn_hyperparameters": learn, **keywords}
    if not keywords:
        return options or DEFAULTS
    known = [field.name for field in fields(UpdateOptions)]
    check_options(keywords, known, "update")
    return replace(options or DEFAULTS, **keywords)


DEFAULTS = UpdateOptions()

"""Strategies for several tasks that keep the past."""

from __future__ import annotations

from typing import Any, NoReturn

from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
)
from torch import Tensor

from torch_ssgp import validation as check
from torch_ssgp.exceptions import ArgumentError
from torch_ssgp.variational.parameters import Optimizers
from torch_ssgp.variational.sites import KLTerms
from torch_ssgp.variational.strategy import (
    AbsorbResult,
    StreamingVariationalStrategy,
    raise_no_fantasies,
)
from torch_ssgp.variational.watch import label


class StreamingWrapper:
    """What GPyTorch's wrappers of a strategy need to keep the past."""

    base_variational_strategy: StreamingVariationalStrategy

    def sum_latents(self, value: Tensor) -> Tensor:
        """Sum over the functions of the wrapped strategy, ``(*batch,)``."""
        raise NotImplementedError

    def kl_divergence(self) -> Tensor:
        """The divergence of the wrapped strategy, summed over its functions."""
        return self.sum_latents(self.base_variational_strategy.kl_divergence())

    def kl_terms(self) -> KLTerms:
        """The parts of :meth:`kl_divergence`."""
        terms = self.base_variational_strategy.kl_terms()
        return KLTerms(*(self.sum_latents(term) for term in terms))

    def absorb(
        self,
        inducing_points: Tensor | None = None,
        *,
        optimizer: Optimizers = None,
        max_surprise: float = 3.0,
    ) -> AbsorbResult:
        """See :meth:`StreamingVariationalStrategy.absorb`.

        Returns:
            One entry for each latent function.
        """
        return self.base_variational_strategy.absorb(
            inducing_points, optimizer=optimizer, max_surprise=max_surprise
        )

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See GPyTorch."""
        return label(super().__call__(x, *args, **kwargs), x)  # type: ignore[misc]

    def get_fantasy_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not offered: GPyTorch 1.15 computes fantasies with the wrong noise."""
        raise_no_fantasies(self)


class IndependentMultitaskStreamingStrategy(
    StreamingWrapper, IndependentMultitaskVariationalStrategy
):
    """GPyTorch's ``IndependentMultitaskVariationalStrategy`` with a past.

    GPyTorch's version computes the divergence from q and the prior alone, which
    silently drops the past.

    Args:
        base_variational_strategy: A :class:`StreamingVariationalStrategy` with a
            batch of functions.
        num_tasks: Number of tasks, the size of ``task_dim``.
        task_dim: The batch dimension that holds the tasks.
    """

    def __init__(
        self,
        base_variational_strategy: StreamingVariationalStrategy,
        num_tasks: int,
        task_dim: int = -1,
    ) -> None:
        _check_base(base_variational_strategy)
        check.check_positive_int(num_tasks, "num_tasks")
        super().__init__(base_variational_strategy, num_tasks, task_dim=task_dim)

    def sum_latents(self, value: Tensor) -> Tensor:
        """Sum over tasks."""
        if not -value.dim() <= self.task_dim < value.dim():
            return value  # one function, repeated for every task
        return value.sum(self.task_dim)


class LMCStreamingStrategy(StreamingWrapper, LMCVariationalStrategy):
    """GPyTorch's ``LMCVariationalStrategy`` with a past.

    The past of the latent functions is kept. The coefficients that mix them are
    ordinary parameters: when they change, so does what the past says about the tasks.

    Args:
        base_variational_strategy: A :class:`StreamingVariationalStrategy` with a
            batch of latent functions.
        num_tasks: Number of tasks.
        num_latents: Number of latent functions.
        latent_dim: The batch dimension that holds the latent functions, negative.
        jitter_val: Jitter of the covariance between tasks.
    """

    def __init__(
        self,
        base_variational_strategy: StreamingVariationalStrategy,
        num_tasks: int,
        num_latents: int = 1,
        latent_dim: int = -1,
        jitter_val: float | None = None,
    ) -> None:
        _check_base(base_variational_strategy)
        check.check_positive_int(num_tasks, "num_tasks")
        super().__init__(
            base_variational_strategy,
            num_tasks,
            num_latents=num_latents,
            latent_dim=latent_dim,
            jitter_val=jitter_val,
        )

    def sum_latents(self, value: Tensor) -> Tensor:
        """Sum over latent functions."""
        return value.sum(self.latent_dim)


def _check_base(base: Any) -> None:
    if not hasattr(base, "kl_terms"):
        raise ArgumentError(
            f"base_variational_strategy is a {type(base).__name__}, which has no past "
            "to keep; expected a StreamingVariationalStrategy."
        )

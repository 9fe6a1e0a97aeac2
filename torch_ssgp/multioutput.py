"""Several outputs at once: independent functions behind one multitask interface."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from torch import Tensor, nn

from torch_ssgp import validation as check
from torch_ssgp.atomic import AtomicModule
from torch_ssgp.exceptions import ArgumentError, ShapeError, UnsupportedLikelihoodError
from torch_ssgp.likelihoods import couples_classes
from torch_ssgp.models import StreamingGP
from torch_ssgp.update import UpdateResult
from torch_ssgp.update.options import Callback


class MultiOutputGP(AtomicModule, nn.Module):
    """Targets of shape ``n x q`` on a model with one function per output.

    The outputs are the last batch dimension of a :class:`StreamingGP`: each has its own
    function, memory and inducing points, and its own hyperparameters where kernel, mean
    and likelihood have that batch shape. All are updated in one go. Only shapes
    change here: targets are ``(*batch, n, q)`` and posteriors are GPyTorch's
    ``MultitaskMultivariateNormal``.

    Args:
        model: A model whose ``batch_shape`` ends in the number of outputs.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> from torch_ssgp import StreamingGP
        >>> from torch_ssgp.multioutput import MultiOutputGP
        >>> outputs = torch.Size([2])
        >>> kernel = ScaleKernel(RBFKernel(batch_shape=outputs), batch_shape=outputs)
        >>> model = MultiOutputGP(StreamingGP(kernel, batch_shape=outputs))
        >>> x = torch.linspace(0, 6, 50).unsqueeze(-1)
        >>> y = torch.cat([x.sin(), x.cos()], -1)
        >>> result = model.update(x, y, num_steps=5)
        >>> model(x).mean.shape
        torch.Size([50, 2])
    """

    def __init__(self, model: StreamingGP) -> None:
        super().__init__()
        check.check_module(model, "model", StreamingGP, "StreamingGP(kernel, ...)")
        if not model.batch_shape:
            raise ArgumentError(
                "model has no batch shape; expected a StreamingGP with one function "
                "per output, such as batch_shape=torch.Size([2])."
            )
        if couples_classes(model.likelihood):
            raise UnsupportedLikelihoodError(
                f"{type(model.likelihood).__name__} takes one label per point, not one "
                "target per output. Use the model itself."
            )
        self.model = model

    @property
    def num_outputs(self) -> int:
        """The number of outputs, ``q``."""
        return self.model.batch_shape[-1]

    @property
    def likelihood(self) -> Any:
        """The likelihood of the model, with one noise per output."""
        return self.model.likelihood

    def update(
        self,
        x_new: Tensor,
        y_new: Tensor,
        noise: Tensor | None = None,
        *,
        num_steps: int = 100,
        lr: float | None = None,
        optimizer: str = "adam",
        learn_hyperparameters: bool | int = True,
        learn_inducing_points: bool = True,
        inducing_points: Tensor | None = None,
        trust_region: float | None = None,
        forget: float = 1.0,
        progress: bool = False,
        callback: Callback | None = None,
    ) -> UpdateResult:
        """As :meth:`StreamingGP.update`, for several outputs.

        Args:
            x_new: ``(*batch, n, d)`` or ``(n, d)``, shared by the outputs.
            y_new: ``(*batch, n, q)``.
            noise: Known noise variances ``(*batch, n, q)``.
            num_steps: Budget of the inner loop; 0 for the closed form alone.
            lr: Learning rate.
            optimizer: ``"adam"`` or ``"lbfgs"``.
            learn_hyperparameters: Whether, or at every which update, the inner loop
                moves hyperparameters.
            learn_inducing_points: Whether it moves inducing points.
            inducing_points: ``(m, d)`` or one set per output, ``(*batch, q, m, d)``.
            trust_region: Width of the region log-hyperparameters do not leave lightly.
            forget: Power of the past's likelihood, in (0, 1].
            progress: Show a progress bar.
            callback: Called as ``callback(step, bound)`` in the inner loop.

        Returns:
            What happened, with one bound per output.
        """
        return self.model.update(
            self._shared(x_new),
            self._by_output(y_new, "y_new", x_new),
            None if noise is None else self._by_output(noise, "noise", x_new),
            num_steps=num_steps,
            lr=lr,
            optimizer=optimizer,
            learn_hyperparameters=learn_hyperparameters,
            learn_inducing_points=learn_inducing_points,
            inducing_points=inducing_points,
            trust_region=trust_region,
            forget=forget,
            progress=progress,
            callback=callback,
        )

    def condition_on_observations(
        self, x: Tensor, y: Tensor, noise: Tensor | None = None
    ) -> MultiOutputGP:
        """As :meth:`StreamingGP.condition_on_observations`, for several outputs.

        Args:
            x: ``(*batch, n, d)``.
            y: ``(*batch, n, q)``.
            noise: Known noise variances ``(*batch, n, q)``.

        Returns:
            A new model that has also seen the data.
        """
        noise = None if noise is None else self._by_output(noise, "noise", x)
        y = self._by_output(y, "y", x)
        return type(self)(
            self.model.condition_on_observations(self._shared(x), y, noise)
        )

    def forward(
        self, x: Tensor, from_memory: bool = False
    ) -> MultitaskMultivariateNormal:
        """Latent posterior of ``n`` points and ``q`` outputs.

        Args:
            x: ``(*batch, n, d)``.
            from_memory: Whether to predict from all points of the memory, as in
                :meth:`StreamingGP.forward`.
        """
        latent = self.model(self._shared(x), from_memory)
        return MultitaskMultivariateNormal.from_batch_mvn(latent, task_dim=-1)

    def predict(
        self, x: Tensor, noise: Tensor | None = None, *, from_memory: bool = False
    ) -> Any:
        """Posterior predictive of targets at ``x``.

        Args:
            x: ``(*batch, n, d)``.
            noise: Known noise variances ``(*batch, n, q)`` at ``x``.
            from_memory: As in ``model(x, from_memory=True)``.

        Returns:
            A multitask distribution where the likelihood is Gaussian; else whatever
            the likelihood returns, with outputs as its last batch dimension.
        """
        noise = None if noise is None else self._by_output(noise, "noise", x)
        predictive = self.model.predict(self._shared(x), noise, from_memory=from_memory)
        if hasattr(predictive, "lazy_covariance_matrix"):
            return MultitaskMultivariateNormal.from_batch_mvn(predictive, task_dim=-1)
        return predictive

    def _shared(self, x: Tensor) -> Tensor:
        """Inputs that all outputs share, ``(*batch, 1, n, d)``."""
        if isinstance(x, Tensor) and x.ndim > 2:
            return x.unsqueeze(-3)
        return x

    def _by_output(self, y: Tensor, name: str, x: Tensor) -> Tensor:
        """Targets ``(*batch, n, q)`` of inputs ``x``, as ``(*batch, q, n)``."""
        check.check_tensor(y, name)
        if y.ndim < 2 or y.size(-1) != self.num_outputs:
            raise ShapeError(
                f"{name} has shape {tuple(y.shape)}; expected (n, {self.num_outputs}), "
                "one column per output."
            )
        if isinstance(x, Tensor) and x.ndim > 1 and y.size(-2) != x.size(-2):
            raise ShapeError(
                f"{name} has shape {tuple(y.shape)} for inputs of shape "
                f"{tuple(x.shape)}; expected {x.size(-2)} rows in both."
            )
        return torch.transpose(y, -1, -2)

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
from torch_ssgp.update import UpdateOptions, UpdateResult


class MultiOutputGP(AtomicModule, nn.Module):
    """Targets of shape ``n x q`` on a model with one function per output.

    The outputs are the last batch dimension of a :class:`StreamingGP`. Each has its own
    function and memory. It has its own hyperparameters if kernel, mean and likelihood
    have that batch shape. All outputs are updated together.

    This class only changes shapes: targets are ``(*batch, n, q)``, and posteriors are
    GPyTorch's ``MultitaskMultivariateNormal``. ``model.memory`` holds the data: as raw
    data while it has room, then as rows. To save the model, save ``model`` and load it
    with ``MultiOutputGP(StreamingGP.load(path))``.

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
        learn: bool | int | str | None = None,
        forget: float | str | None = None,
        options: UpdateOptions | None = None,
        **keywords: Any,
    ) -> UpdateResult:
        """Learn from new data; see :meth:`StreamingGP.update`.

        Args:
            x_new: ``(*batch, n, d)`` or ``(n, d)``, shared by the outputs.
            y_new: ``(*batch, n, q)``, NaN where an output was not measured.
            noise: Known noise variances ``(*batch, n, q)``.
            learn: Whether to learn hyperparameters.
            forget: Power of the past's likelihood.
            options: All other options, and defaults of these.
            **keywords: Fields of :class:`~torch_ssgp.UpdateOptions`. Their
                ``inducing_points`` are ``(m, d)``, or one set per output,
                ``(*batch, q, m, d)``.

        Returns:
            The report of the update, with one bound per output.
        """
        y = self._by_output(y_new, "y_new", x_new)
        if isinstance(noise, Tensor):
            noise = self._by_output(noise, "noise", x_new)
        chosen: dict[str, Any] = {"learn": learn, "forget": forget, "options": options}
        return self.model.update(self._shared(x_new), y, noise, **chosen, **keywords)

    def condition_on_observations(
        self, x: Tensor, y: Tensor, noise: Tensor | None = None
    ) -> MultiOutputGP:
        """A new model that has also seen the data; this one is untouched.

        See :meth:`StreamingGP.condition_on_observations`.
        """
        noise = None if noise is None else self._by_output(noise, "noise", x)
        y = self._by_output(y, "y", x)
        return type(self)(
            self.model.condition_on_observations(self._shared(x), y, noise)
        )

    def forward(
        self, x: Tensor, from_memory: bool | None = None
    ) -> MultitaskMultivariateNormal:
        """Latent posterior of ``n`` points and ``q`` outputs."""
        latent = self.model(self._shared(x), from_memory)
        return MultitaskMultivariateNormal.from_batch_mvn(latent, task_dim=-1)

    def predict(
        self, x: Tensor, noise: Tensor | None = None, *, from_memory: bool | None = None
    ) -> Any:
        """Posterior predictive of targets at ``x``, with their known noise if any.

        A multitask distribution if the likelihood is Gaussian. Otherwise what the
        likelihood returns, with outputs as its last batch dimension.
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

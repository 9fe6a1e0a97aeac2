"""GPyTorch modules as tensors: kernels, means, noises.

Only this file calls a kernel during an update, so the rule for jitter is here: jitter
is white noise of the prior at inducing points. An inducing point that is kept is the
*same variable* before and after an update, so its jitter appears in ``K_ba`` too.
Otherwise every update would leak information.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import (
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    Likelihood,
)
from gpytorch.means import Mean
from linear_operator import to_dense, to_linear_operator
from linear_operator.operators import LinearOperator
from linear_operator.utils.memoize import cached
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_ssgp.functional import PriorBlocks
from torch_ssgp.kernels import Compound, Form, Linear, read

# While GPyTorch evaluates a covariance it takes active_dims away from the kernel and
# changes a global setting: two threads at once would see that, or make it last.
KERNELS = threading.RLock()


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, quicker than by their names; shared ones twice."""
    for table in (module._parameters, module._buffers):
        yield from (tensor for tensor in table.values() if tensor is not None)
    for child in module._modules.values():
        if child is not None:
            yield from tensors_of(child)


def leave_inference_mode(value: Tensor) -> Tensor:
    """A tensor that autograd can save; it cannot save those of inference mode."""
    return value.clone() if value.is_inference() else value


class Opaque(Form):
    """A kernel that can only be called."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Dense covariance ``(*batch, n1, n2)``, never by a square call.

        GPyTorch adds its own jitter to square sums with a low-rank kernel, and compares
        the two inputs of a square call on the host.
        """
        n2 = x2.size(-2)
        if n2 == x1.size(-2):
            x2 = torch.cat([x2, x2[..., :1, :]], -2)
        with KERNELS:
            return to_dense(self.kernel(x1, x2))[..., :n2]

    def variances(self, x: Tensor) -> Tensor:
        with KERNELS:
            if x.device.type == "cpu":  # nothing to wait for
                return self.kernel(x, diag=True)
            with _TakeAsEqual():
                return self.kernel(x, diag=True)

    def scaled(self, scale: Tensor) -> Form:
        return Compound([Linear(None, None, scale), self])

    def map(self, function: Callable[[Any], Any]) -> Form:
        """Its tensors are those of the kernel, which keeps them to itself."""
        return self


def form_of(kernel: Kernel | Form) -> Form:
    """What a kernel computes, at its current hyperparameters."""
    if isinstance(kernel, Form):
        return kernel
    return read(kernel) or Opaque(kernel)


def gram(kernel: Kernel | Form, x1: Tensor, x2: Tensor) -> Tensor:
    """Dense covariance ``(*batch, n1, n2)``."""
    return form_of(kernel).gram(x1, x2)


def variances(kernel: Kernel | Form, x: Tensor) -> Tensor:
    """Prior variances ``(*batch, n)``: the diagonal of the covariance at ``x``."""
    return form_of(kernel).variances(x)


def lazy_gram(kernel: Kernel, x: Tensor) -> LinearOperator:
    """Covariance ``(*batch, n, n)``, computed on demand."""
    with KERNELS:
        K = kernel(x)
    if type(K) is not LazyEvaluatedKernelTensor:
        return K
    return _LazyGram(
        K.x1,
        K.x2,
        kernel=K.kernel,
        last_dim_is_batch=K.last_dim_is_batch,
        **K.params,
    )


class _LazyGram(LazyEvaluatedKernelTensor):
    """GPyTorch's lazy covariance, made thread-safe."""

    @cached(name="kernel_eval")
    def evaluate_kernel(self) -> LinearOperator:
        with KERNELS, torch.set_grad_enabled(self._is_grad_enabled):
            if self._is_square_compound():
                return self._evaluate_rectangle()
            return super().evaluate_kernel()

    def _is_square_compound(self) -> bool:
        """Whether GPyTorch would take roots of low-rank parts.

        It adds jitter of a fixed size to square sums with them, whatever the scale of
        the kernel. Square products with them cannot be scaled in batches.
        """
        compound = (AdditiveKernel, ProductKernel)
        return (
            any(isinstance(part, compound) for part in self.kernel.modules())
            and self.x1.shape == self.x2.shape
            and torch.equal(self.x1, self.x2)
        )

    def _evaluate_rectangle(self) -> LinearOperator:
        wide = LazyEvaluatedKernelTensor(
            self.x1,
            torch.cat([self.x2, self.x2[..., :1, :]], -2),
            kernel=self.kernel,
            last_dim_is_batch=self.last_dim_is_batch,
            **self.params,
        )
        K = wide.to_dense()[..., :-1]
        eye = torch.eye(K.size(-1), dtype=torch.bool, device=K.device)
        return to_linear_operator(torch.where(eye, self._diagonal().unsqueeze(-1), K))

    def _diagonal(self) -> Tensor:
        with KERNELS:
            return super()._diagonal()


class _TakeAsEqual(TorchFunctionMode):
    """GPyTorch's distances ask the device whether ``x1`` equals ``x2``.

    In the call for a diagonal it does, and a GPU need not wait for the answer.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.equal:
            return args[0].shape == args[1].shape
        return func(*args, **(kwargs or {}))


class InducingGram(NamedTuple):
    """Prior covariance of inducing values.

    Attributes:
        K_zz: ``(*batch, m, m)``, among themselves, jitter included.
        K_zo: ``(*batch, m, k)``, with the function at other points.
        jitter: ``(*batch, m)``, variance of the jitter: of each point in proportion to
            its own prior variance, so that it does not depend on the other points.
    """

    K_zz: Tensor
    K_zo: Tensor
    jitter: Tensor


def inducing_gram(
    kernel: Kernel | Form, z: Tensor, jitter: float, others: Tensor | None = None
) -> InducingGram:
    """Covariance of inducing values with themselves and with other values, in one call.

    Args:
        kernel: Prior covariance.
        z: ``(*batch, m, d)`` inducing points.
        jitter: Jitter relative to the prior variance.
        others: ``(*batch, k, d)`` other points.
    """
    num_inducing, form = z.size(-2), form_of(kernel)
    K = form.gram(z, z if others is None else torch.cat([z, others], -2))
    k = form.variances(z)
    white = _white_noise(k, jitter)
    K_zz, K_zo = K.split([num_inducing, K.size(-1) - num_inducing], -1)
    return InducingGram(_with_diagonal(K_zz, k + white), K_zo, white)


def square_gram(
    kernel: Kernel | Form, points: Tensor, num_inducing: int = 0, jitter: float = 0.0
) -> Tensor:
    """Covariance ``(*batch, n, n)`` of points, of which the first have jitter.

    Args:
        kernel: Prior covariance.
        points: ``(*batch, n, d)``.
        num_inducing: How many of them, the first ones, are inducing points.
        jitter: Their jitter, relative to the prior variance.
    """
    form = form_of(kernel)
    K, k = form.gram(points, points), form.variances(points)
    if num_inducing:
        old, new = k[..., :num_inducing], k[..., num_inducing:]
        k = torch.cat([old + _white_noise(old, jitter), new], -1)
    return _with_diagonal(K, k)


def _white_noise(k: Tensor, jitter: float) -> Tensor:
    """Variances of the jitter of points with prior variances ``k``.

    Where the function is known, as that of a linear kernel at zero, there is none.
    """
    return jitter * torch.where(k == 0, 1.0, k)


def _with_diagonal(K: Tensor, k: Tensor) -> Tensor:
    """Distances of a point to itself are not exactly zero in a rectangular call."""
    return torch.diagonal_scatter(K, k.expand(K.shape[:-1]), dim1=-2, dim2=-1)


def same_points(z: Tensor, points: Tensor) -> Tensor:
    """Which rows of ``z`` equal which of ``points``, ``(*batch, m, k)``."""
    pairs = zip(z.unbind(-1), points.unbind(-1), strict=True)
    equal = (p.unsqueeze(-1) == q.unsqueeze(-2) for p, q in pairs)
    return functools.reduce(Tensor.logical_and_, equal)


def same_variables(z: Tensor, x: Tensor, z_a: Tensor) -> Tensor:
    """Which inducing values at ``z`` are which of those at inputs and old points.

    Inducing points may coincide, and each copy has its own jitter. The second copy is
    the same variable as the second copy before. An observation there is of the first.

    Args:
        z: ``(*batch, m_b, d)``.
        x: ``(*batch, n, d)`` new inputs.
        z_a: ``(*batch, m_a, d)`` old inducing points.

    Returns:
        ``(*batch, m_b, n + m_a)``, at most one in a column.
    """
    copy_b = same_points(z, z).tril(-1).sum(-1)
    same_f = same_points(z, x) & (copy_b == 0).unsqueeze(-1)
    if z_a.size(-2) == 0:
        return same_f
    copy_a = same_points(z_a, z_a).tril(-1).sum(-1)
    same_a = same_points(z, z_a) & (copy_b.unsqueeze(-1) == copy_a.unsqueeze(-2))
    return torch.cat([same_f, same_a], -1)


def prior_blocks(
    mean: Mean,
    kernel: Kernel,
    z_b: Tensor,
    x: Tensor,
    z_a: Tensor,
    jitter: float,
    same: Tensor | None,
) -> PriorBlocks:
    """The prior at new inducing points, new data and old inducing points.

    Args:
        mean: Prior mean.
        kernel: Prior covariance.
        z_b: ``(*batch, m_b, d)`` new inducing points.
        x: ``(*batch, n, d)`` new inputs.
        z_a: ``(*batch, m_a, d)`` old inducing points; ``m_a`` may be 0.
        jitter: Relative jitter.
        same: ``(*batch, m_b, n + m_a)``, which rows of ``z_b`` are which of
            ``[x; z_a]``, see :func:`same_variables`; ``None`` where none is.
    """
    sizes, form = [x.size(-2), z_a.size(-2)], form_of(kernel)
    K_bb, K_bo, variance = inducing_gram(form, z_b, jitter, torch.cat([x, z_a], -2))
    k_ff = form.variances(x)
    if same is not None:
        # A point that is an inducing point is that variable, jitter included.
        K_bo = torch.where(same, K_bb.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), K_bo)
        added = variance.unsqueeze(-2) @ same[..., : sizes[0]].to(variance.dtype)
        k_ff = k_ff + added.squeeze(-2)
    K_bf, K_ba = K_bo.split(sizes, -1)
    if z_a.size(-2):
        K_aa = inducing_gram(form, z_a, jitter).K_zz
    else:
        K_aa = K_bb.new_zeros(*K_bb.shape[:-2], 0, 0)
    means = mean(torch.cat([z_b, x, z_a], -2))
    m_b, m_f, m_a = means.split([z_b.size(-2), *sizes], -1)
    return PriorBlocks(K_bb, K_bf, k_ff, K_ba, K_aa, m_b, m_f, m_a)


def has_shared_noise(likelihood: Likelihood) -> bool:
    """Whether all data, past and future, share the noise of the likelihood."""
    return isinstance(likelihood, GaussianLikelihood)


def observation_noise(likelihood: Likelihood, noise: Tensor | None) -> Tensor:
    """Noise variance of new data, ``(*batch, n)`` or broadcastable to it.

    Args:
        likelihood: A Gaussian likelihood.
        noise: Known variances of the data, zero where there is none. They replace the
            noise of a ``GaussianLikelihood``; a learned additional noise of a
            ``FixedNoiseGaussianLikelihood`` is added to them.
    """
    if isinstance(likelihood, FixedNoiseGaussianLikelihood):
        assert noise is not None  # checked at the front door
        return noise + likelihood.second_noise
    if noise is None:
        return likelihood.noise
    return torch.where(noise == 0, likelihood.noise, noise)

"""The bound as one operation, against the plain formulas."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from torch_ssgp import StreamingGP, fused
from torch_ssgp import functional as fn
from torch_ssgp.update import UpdateOptions
from torch_ssgp.update.walk import Update


def rows(batch: tuple[int, ...] = (), m: int = 4, n: int = 7) -> list[Tensor]:
    """Random arguments of the bound."""
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn((*batch, *shape), dtype=torch.float64)

    B = draw(m, m)
    K_bb = B @ B.mT + torch.eye(m, dtype=torch.float64)
    t, s = 50 + draw().abs(), 0.5 + draw().abs()
    return [K_bb, draw(m, n), draw(n), t, s]


def plain(K_bb: Tensor, K_br: Tensor, r: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """The same by the formulas of ``functional``."""
    L = fn.cholesky((K_bb + K_bb.mT) / 2)
    A = fn.solve_lower(L, K_br)
    loss, n = t - fn.squared_norm(A, (-2, -1)), torch.tensor(9.0).double()
    return fn.evidence(fn.Projection(L, A, r, loss, torch.zeros_like(t), n), s)


@pytest.mark.parametrize("m", [1, 2, 4, 5])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_value_and_gradient_are_those_of_the_formulas(
    batch: tuple[int, ...], m: int
) -> None:
    inputs = [t.requires_grad_() for t in rows(batch, m)]
    n = torch.tensor(9.0).double()
    ours, theirs = fused.evidence(*inputs, n), plain(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    weight = torch.randn(batch, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((weight * ours).sum(), inputs),
        torch.autograd.grad((weight * theirs).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_gradcheck() -> None:
    K_bb, *others = rows()
    n = torch.tensor(9.0).double()

    def bound(half: Tensor, *args: Tensor) -> Tensor:
        return fused.evidence((half + half.mT) / 2, *args, n)

    inputs = [t.requires_grad_() for t in (K_bb, *others)]
    assert torch.autograd.gradcheck(bound, inputs)


def test_there_is_no_second_derivative() -> None:
    inputs = [t.requires_grad_() for t in rows()]
    value = fused.evidence(*inputs, torch.tensor(9.0).double())
    (grad,) = torch.autograd.grad(value, inputs[1], create_graph=True)
    assert not grad.requires_grad or _refuses(grad)


def _refuses(grad: Tensor) -> bool:
    """Whether another derivative is refused, not wrong."""
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    return True


@pytest.mark.parametrize("share_noise", [True, False])
def test_the_inner_loop_sees_the_same_bound(share_noise: bool) -> None:
    """With a past, raw data, weights and noises of their own."""
    torch.manual_seed(0)
    model = StreamingGP(
        ScaleKernel(RBFKernel()), num_inducing=8, share_noise=share_noise
    ).double()
    model.covar_module.base_kernel.lengthscale = 0.1  # well conditioned
    for _ in range(4):
        x = torch.rand(10, 1).double()
        model.update(x, torch.sin(6 * x).squeeze(-1), num_steps=0)
    x = torch.rand(10, 1).double()
    data = model.check_data(x, torch.sin(6 * x).squeeze(-1), None)
    options = UpdateOptions(forget=0.9)
    update = Update(model.known(data), data, options, model.limits(data))
    objective = update.objective()
    objective.start_at(model.summary.inducing_points, learn=True)
    parameters = [p for p in objective.parameters() if p.requires_grad]
    values, grads = [], []
    for _ in range(2):  # the first call takes the plain formulas, for what is lost
        value = objective.total()[1]
        values.append(value)
        grads.append(torch.autograd.grad(value, parameters))
    torch.testing.assert_close(values[1], values[0], rtol=1e-12, atol=1e-12)
    largest = max(float(g.abs().max()) for g in grads[0])
    for a, b in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9 * largest)

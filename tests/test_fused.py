"""The bound as one operation, against the plain formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import fused

N = torch.tensor(9.0).double()  # data


def rows(batch: tuple[int, ...] = (), m: int = 4, n: int = 7) -> list[Tensor]:
    """Random arguments of the bound, which need gradients."""

    def draw(*shape: int) -> Tensor:
        return torch.randn((*batch, *shape), dtype=torch.float64)

    B = draw(m, m)
    K_bb = B @ B.mT + torch.eye(m, dtype=torch.float64)
    every = [K_bb, draw(m, n), draw(n), 50 + draw().abs(), 0.5 + draw().abs()]
    return [each.requires_grad_() for each in every]


def plain(K_bb: Tensor, K_br: Tensor, r: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """The same by the formulas of ``functional``."""
    L = fn.cholesky((K_bb + K_bb.mT) / 2)
    A = fn.solve_lower(L, K_br)
    loss = t - fn.squared_norm(A, (-2, -1))
    return fn.evidence(fn.Projection(L, A, r, loss, torch.zeros_like(t), N), s)


@pytest.mark.parametrize("m", [1, 2, 4, 5])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_value_and_gradient_are_those_of_the_formulas(
    batch: tuple[int, ...], m: int
) -> None:
    inputs = rows(batch, m)
    ours, theirs = fused.evidence(*inputs, N), plain(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    weight = torch.randn(batch, dtype=torch.float64)
    gradients = (
        torch.autograd.grad((weight * value).sum(), inputs) for value in (ours, theirs)
    )
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_a_second_derivative_is_refused_not_wrong() -> None:
    inputs = rows()
    value = fused.evidence(*inputs, N)
    (grad,) = torch.autograd.grad(value, inputs[1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        grad.sum().backward()

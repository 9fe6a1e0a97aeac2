"""The bound as one operation, against the plain formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import fused


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

"""The pure functions: gradients, and the identities the updates rest on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torch_ssgp import functional as fn
from torch_ssgp.functional import PriorBlocks, PseudoObservations


def rbf(x1: Tensor, x2: Tensor, theta: Tensor) -> Tensor:
    d2 = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).square().sum(-1)
    return theta[0] * torch.exp(-0.5 * d2 / theta[1].square())


def blocks(theta: Tensor, z_b: Tensor, x: Tensor, z_a: Tensor) -> PriorBlocks:
    def jitter(z: Tensor) -> Tensor:
        return 1e-6 * torch.eye(len(z), dtype=z.dtype, device=z.device)

    return PriorBlocks(
        rbf(z_b, z_b, theta) + jitter(z_b),
        rbf(z_b, x, theta),
        theta[0].expand(len(x)),
        rbf(z_b, z_a, theta),
        rbf(z_a, z_a, theta) + jitter(z_a),
        *(theta[2] * v.sum(-1) for v in (z_b, x, z_a)),
    )


THETA = torch.tensor([1.3, 0.6, 0.4], dtype=torch.float64)
S = torch.tensor(0.2, dtype=torch.float64)


@pytest.fixture
def problem():
    """New points, inputs and targets, old points, and the past at them."""
    z_b, x, z_a = (torch.rand(n, 2).double() for n in (4, 6, 3))
    past = PseudoObservations(
        torch.randn(5, 3).double(),
        torch.randn(5).double(),
        torch.tensor(0.7).double(),
        torch.tensor(9.0).double(),
    )
    return z_b, x, z_a, torch.randn(6).double(), past


def projected(problem, alpha=0.0):
    z_b, x, z_a, y, past = problem
    prior = blocks(THETA, z_b, x, z_a)
    return fn.project(prior, past, y, S.expand(6), S, alpha), prior


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_gradients_of_the_bound(problem, alpha):
    z_b, x, z_a, y, past = problem

    def bound(theta, z_b, x, s):
        rows = fn.project(blocks(theta, z_b, x, z_a), past, y, s.expand(6), s, alpha)
        return fn.evidence(rows, s)

    inputs = [t.clone().requires_grad_() for t in (THETA, z_b, x, S)]
    assert torch.autograd.gradcheck(bound, inputs)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_compressing_changes_neither_evidence_nor_posterior(problem, alpha):
    rows, prior = projected(problem, alpha)
    small = fn.compress(rows)
    assert small.A.shape[-1] == 4 < rows.A.shape[-1]
    assert_close(fn.evidence(small, S), fn.evidence(rows, S))
    # All that the posterior needs:
    assert_close(small.A @ small.A.mT, rows.A @ rows.A.mT)
    assert_close(small.A @ small.r, rows.A @ rows.r)


def test_recall_is_the_inverse_of_absorb(problem):
    rows, prior = projected(problem)
    past = fn.absorb(fn.compress(rows), prior.m_b)
    again = fn.recall(past, rows.L, prior.m_b)
    lost = rows.loss / (2 * S)  # sunk: a constant of the bound, and no residual
    assert_close(fn.evidence(again, S) - lost, fn.evidence(rows, S))


def test_sites_say_the_same_as_shared_rows(problem):
    *_, y, past = problem
    rows, prior = projected(problem)
    one = torch.ones_like(S)
    site = fn.project(prior, fn.to_sites(past, S), y, S.expand(6), one)
    assert_close(fn.evidence(site, one), fn.evidence(rows, S))


def test_small_alpha_tends_to_the_variational_bound(problem):
    bounds = [fn.evidence(projected(problem, a)[0], S) for a in (0.0, 1e-3, 1e-6)]
    assert abs(bounds[2] - bounds[0]) < 1e-3 * abs(bounds[1] - bounds[0]) + 1e-8


def test_uninformed_points_carry_exactly_zero_information():
    # Data at one end of the range: rows at far inducing points stay zero, whatever
    # the number of updates; nothing is ever subtracted.
    z, x = torch.tensor([[0.0], [100.0]]).double(), torch.randn(10, 1).double()
    theta = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    empty = PseudoObservations(*(x.new_zeros(shape) for shape in ((0, 2), 0, (), ())))
    rows = fn.project(blocks(theta, z, x, z), empty, x[:, 0], S.expand(10), S)
    past = fn.absorb(fn.compress(rows), x.new_zeros(2))
    assert torch.equal(past.U[:, 1], torch.zeros(2, dtype=torch.float64))


def test_an_indefinite_matrix_gives_nan_in_its_own_stream_only():
    L = fn.cholesky(torch.stack([torch.eye(3), -torch.eye(3)]))
    assert torch.equal(L[0], torch.eye(3))
    assert L[1].isnan().all()


def test_the_functions_run_on_another_device_without_touching_the_cpu(problem):
    # Meta tensors have no data: anything that looks at a value would raise.
    z_b, x, z_a, y = (t.to("meta") for t in problem[:-1])
    past = PseudoObservations(*(t.to("meta") for t in problem[-1]))
    prior, s = blocks(THETA.to("meta"), z_b, x, z_a), S.to("meta")
    rows = fn.project(prior, past, y, s.expand(6), s, 0.5)
    assert fn.evidence(rows, s).device.type == "meta"
    assert fn.absorb(fn.compress(rows), prior.m_b).U.device.type == "meta"


def test_the_misfit_says_what_a_better_scale_would_gain():
    """Noise and function times c: the optimum is known in closed form."""
    m, n, s = 5, 30, torch.tensor(0.1).double()
    A, r = torch.randn(m, n).double(), 3 * torch.randn(n).double()
    loss, rho = torch.tensor(0.7).double(), torch.tensor(0.2).double()
    rows = fn.Projection(torch.eye(m).double(), A, r, loss, rho, torch.tensor(n))
    covariance = A.mT @ A + s * torch.eye(n)
    c = (r @ torch.linalg.solve(covariance, r) + rho / s) / n
    scaled = fn.evidence(rows._replace(A=c.sqrt() * A, loss=c * loss), c * s)
    assert_close(scaled - fn.evidence(rows, s), 0.5 * n * (c - 1 - c.log()))

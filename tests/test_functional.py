"""The pure functions: gradients, and the identities the updates rest on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp.functional import PriorBlocks, PseudoObservations


def rbf(x1: Tensor, x2: Tensor, theta: Tensor) -> Tensor:
    d2 = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).square().sum(-1)
    return theta[0] * torch.exp(-0.5 * d2 / theta[1].square())


def blocks(theta: Tensor, z_b: Tensor, x: Tensor, z_a: Tensor) -> PriorBlocks:
    eye_b = 1e-6 * torch.eye(len(z_b), dtype=z_b.dtype)
    eye_a = 1e-6 * torch.eye(len(z_a), dtype=z_a.dtype)
    means = [theta[2] * v.sum(-1) for v in (z_b, x, z_a)]
    return PriorBlocks(
        rbf(z_b, z_b, theta) + eye_b,
        rbf(z_b, x, theta),
        theta[0].expand(len(x)),
        rbf(z_b, z_a, theta),
        rbf(z_a, z_a, theta) + eye_a,
        *means,
    )


@pytest.fixture
def problem():
    z_b, x, z_a = (torch.rand(n, 2).double() for n in (4, 6, 3))
    past = PseudoObservations(
        torch.randn(5, 3).double(),
        torch.randn(5).double(),
        torch.tensor(0.7).double(),
        torch.tensor(9.0).double(),
    )
    return z_b, x, z_a, torch.randn(6).double(), past


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_gradients_of_the_bound(problem, alpha):
    z_b, x, z_a, y, past = problem
    theta = torch.tensor([1.3, 0.6, 0.4], dtype=torch.float64)
    s = torch.tensor(0.2, dtype=torch.float64)

    def bound(theta, z_b, x, s):
        rows = fn.project(blocks(theta, z_b, x, z_a), past, y, s.expand(6), s, alpha)
        return fn.evidence(rows, s)

    inputs = [t.clone().requires_grad_() for t in (theta, z_b, x, s)]
    assert torch.autograd.gradcheck(bound, inputs)


def _projection(problem, alpha=0.0, s=0.2):
    z_b, x, z_a, y, past = problem
    theta = torch.tensor([1.3, 0.6, 0.4], dtype=torch.float64)
    s = torch.tensor(s, dtype=torch.float64)
    prior = blocks(theta, z_b, x, z_a)
    return fn.project(prior, past, y, s.expand(6), s, alpha), prior, s


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_compressing_changes_neither_evidence_nor_posterior(problem, alpha):
    rows, prior, s = _projection(problem, alpha)
    small = fn.compress(rows)
    assert small.A.shape[-1] == 4 < rows.A.shape[-1]
    torch.testing.assert_close(fn.evidence(small, s), fn.evidence(rows, s))
    for a, b in zip(
        fn.moments(fn.factorize(small, s), prior.m_b),
        fn.moments(fn.factorize(rows, s), prior.m_b),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_recall_is_the_inverse_of_absorb(problem):
    rows, prior, s = _projection(problem)
    past = fn.absorb(fn.compress(rows), prior.m_b)
    again = fn.recall(past, rows.L, prior.m_b)
    lost = rows.loss / (2 * s)  # sunk: a constant of the bound, and no residual
    torch.testing.assert_close(fn.evidence(again, s) - lost, fn.evidence(rows, s))


def test_sites_say_the_same_as_shared_rows(problem):
    z_b, x, z_a, y, past = problem
    _, prior, s = _projection(problem)
    sites = fn.to_sites(past, s)
    one = torch.ones_like(s)
    shared = fn.project(prior, past, y, s.expand(6), s)
    site = fn.project(prior, sites, y, s.expand(6), one)
    torch.testing.assert_close(fn.evidence(site, one), fn.evidence(shared, s))


def test_small_alpha_tends_to_the_variational_bound(problem):
    bounds = [fn.evidence(*_projection(problem, a)[::2]) for a in (0.0, 1e-3, 1e-6)]
    assert abs(bounds[2] - bounds[0]) < 1e-3 * abs(bounds[1] - bounds[0]) + 1e-8


def test_uninformed_points_carry_exactly_zero_information():
    # Data at one end of the range: rows at far inducing points stay zero, whatever
    # the number of updates; nothing is ever subtracted.
    z = torch.tensor([[0.0], [100.0]], dtype=torch.float64)
    x = torch.randn(10, 1).double()
    theta = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    s = torch.tensor(0.1, dtype=torch.float64)
    empty = PseudoObservations(
        x.new_zeros(0, 2), x.new_zeros(0), x.new_zeros(()), x.new_zeros(())
    )
    rows = fn.project(blocks(theta, z, x, z), empty, x[:, 0], s.expand(10), s)
    past = fn.absorb(fn.compress(rows), x.new_zeros(2))
    assert torch.equal(past.U[:, 1], torch.zeros(2, dtype=torch.float64))


def test_an_indefinite_matrix_gives_nan_in_its_own_stream_only():
    K = torch.stack([torch.eye(3), -torch.eye(3)])
    L = fn.cholesky(K)
    assert torch.equal(L[0], torch.eye(3))
    assert L[1].isnan().all()


def test_the_functions_run_on_another_device_without_touching_the_cpu(problem):
    # Meta tensors have no data: anything that looks at a value would raise.
    z_b, x, z_a, y, past = (
        PseudoObservations(*(v.to("meta") for v in t))
        if isinstance(t, tuple)
        else t.to("meta")
        for t in problem
    )
    theta = torch.ones(3, dtype=torch.float64, device="meta")
    s = torch.ones((), dtype=torch.float64, device="meta")
    means = [t[:, 0] for t in (z_b, x, z_a)]
    prior = PriorBlocks(
        rbf(z_b, z_b, theta),
        rbf(z_b, x, theta),
        x[:, 0],
        rbf(z_b, z_a, theta),
        rbf(z_a, z_a, theta),
        *means,
    )
    rows = fn.project(prior, past, y, s.expand(6), s, 0.5)
    assert fn.evidence(rows, s).device.type == "meta"
    assert fn.absorb(fn.compress(rows), means[0]).U.device.type == "meta"


def test_the_misfit_says_what_a_better_scale_would_gain():
    """Noise and function times c: the optimum is known in closed form."""
    m, n, s = 5, 30, torch.tensor(0.1).double()
    A, r = torch.randn(m, n).double(), 3 * torch.randn(n).double()
    loss, rho = torch.tensor(0.7).double(), torch.tensor(0.2).double()
    rows = fn.Projection(torch.eye(m).double(), A, r, loss, rho, torch.tensor(n))
    bound, misfit = fn.fit(rows, s)
    covariance = A.mT @ A + s * torch.eye(n)
    torch.testing.assert_close(misfit, r @ torch.linalg.solve(covariance, r) + rho / s)
    c = misfit / n
    scaled = rows._replace(A=c.sqrt() * A, loss=c * loss)
    gain = fn.evidence(scaled, c * s) - bound
    torch.testing.assert_close(gain, 0.5 * n * (c - 1 - c.log()))

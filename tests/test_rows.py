"""Row space: a model is an exact GP on its rows, however they came."""

from __future__ import annotations

import copy

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor
from torch.testing import assert_close

import oracles
from torch_ssgp import StreamingGP, rows, settings
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.rows import Factor, border

KERNELS = {
    "rbf": RBFKernel,
    "matern": lambda **options: MaternKernel(nu=2.5, ard_num_dims=2, **options),
}


def draw(n: int, *batch: int, dims: int = 2) -> tuple[Tensor, Tensor]:
    x = 3 * torch.rand(*batch, n, dims, dtype=torch.float64)
    return x, torch.sin(x.sum(-1)) + 1 + 0.1 * torch.randn(*batch, n).double()


def make(kernel: str = "rbf", batch: tuple[int, ...] = (), **options) -> StreamingGP:
    shape = torch.Size(batch)
    base = KERNELS[kernel](batch_shape=shape)
    model = StreamingGP(
        ScaleKernel(base, batch_shape=shape),
        GaussianLikelihood(batch_shape=shape),
        ConstantMean(batch_shape=shape),
        batch_shape=shape,
        **{"num_inducing": 60, **options},
    ).double()
    model.likelihood.noise = 0.05
    model.covar_module.outputscale = 1.3
    model.mean_module.initialize(constant=0.8)
    return model


def cut(n: int, split: str) -> list[Tensor]:
    """Which data come together: all, one by one, or any number of them."""
    if split == "any":
        inner = (torch.randperm(n - 1)[:12] + 1).sort().values
        return list(torch.arange(n).tensor_split(inner))
    return list(torch.arange(n).split(n if split == "all" else 1))


def assert_same_posterior(a, b, x: Tensor, tolerance: float) -> None:
    p, q = a(x), b(x)
    assert_close(p.mean, q.mean, rtol=0, atol=tolerance)
    assert_close(p.variance, q.variance, rtol=0, atol=tolerance)


class Exact(gpytorch.models.ExactGP):
    """GPyTorch's exact GP with copies of the modules of a model."""

    def __init__(self, model: StreamingGP, x: Tensor, y: Tensor) -> None:
        modules = (model.likelihood, model.mean_module, model.covar_module)
        likelihood, mean, kernel = copy.deepcopy(modules)
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = mean, kernel

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        mean, covariance = self.mean_module(x), self.covar_module(x)
        return gpytorch.distributions.MultivariateNormal(mean, covariance)


@pytest.mark.parametrize("split", ["all", "one by one", "any"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("num_steps", [0, 4])
def test_until_the_memory_is_full_a_model_is_the_exact_gp(
    split, kernel, batch, num_steps
):
    """Evidence with its gradient, mean and variance, learned on the way or not."""
    n = 80
    x, y = draw(n, *batch)
    model = make(kernel, batch)
    for part in cut(n, split):
        options = {"num_steps": num_steps * int(part[0] % 20 == 0), "forget": 1.0}
        result = model.update(x[..., part, :], y[..., part], **options)
    assert not result.projection_loss.any() and result.num_rows == n
    exact = Exact(model, x, y)
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(exact.likelihood, exact)
    expected = n * evidence(exact(x), y)
    ours = model.log_evidence()
    assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    assert_close(result.bound, ours.detach(), rtol=1e-9, atol=1e-9)
    expected.sum().backward()
    ours.sum().backward()
    theirs = dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, theirs[name].grad, rtol=1e-8, atol=1e-8, msg=name)
    exact.eval()
    x_test, _ = draw(15, *batch)
    with torch.no_grad(), gpytorch.settings.fast_pred_var(False):
        assert_same_posterior(model, exact, x_test, 1e-9)


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize(
    "batch, missing", [((), False), ((3,), False), ((3,), True)], ids=str
)
@pytest.mark.parametrize("share_noise", [True, False])
def test_bordering_equals_refactoring_over_a_full_memory(
    size, batch, missing, share_noise
):
    """A copy starts from a fresh factor, so it shows what a factorisation gives."""
    model = make(batch=batch, num_inducing=20, memory_size=40, share_noise=share_noise)
    x_test, _ = draw(10, *batch)
    compressed = 0
    while compressed < 2:
        x, y = draw(size, *batch)
        if missing:
            y[0] = torch.where(torch.rand(size) < 0.5, torch.nan, y[0])
        result = model.update(x, y, num_steps=0)
        compressed += int((result.projection_loss > 0).any())
        again = copy.deepcopy(model)
        assert_same_posterior(model, again, x_test, 1e-10)
        evidence = again.log_evidence().detach()
        assert_close(result.bound, evidence, rtol=1e-10, atol=1e-9)


def problem(n: int = 9, p: int = 4, r: int = 3, *batch: int):
    """Rows ``U`` at points and raw data, their prior, and a noise scale."""
    z, x = draw(r, *batch)[0], draw(n, *batch)[0]
    past = PseudoObservations(
        torch.randn(*batch, p, r).double(),
        torch.randn(*batch, p).double(),
        torch.rand(batch).double(),
        torch.full(batch, 11.0).double(),
    )
    y, s = torch.randn(*batch, n).double(), 0.1 + torch.rand(batch).double()
    points = torch.cat([z, x], -2)
    K = RBFKernel().double()(points).to_dense().detach()
    m = 0.3 * points.sum(-1)
    return past, y, K, m, s


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("known_noise", [False, True])
def test_the_evidence_is_that_of_the_dense_formula(batch, known_noise):
    past, y, K, m, s = problem(9, 4, 3, *batch)
    noise = 0.1 + torch.rand_like(y) if known_noise else None
    ours = rows.evidence(rows.regression(past, y, noise, s), K, m, s)
    for i in range(max(1, len(ours.reshape(-1)))):
        one = (lambda t, i=i: t[i]) if batch else (lambda t: t)
        scale = one(s)
        H = torch.block_diag(one(past.U), torch.eye(9).double())
        variances = scale.expand(9) if noise is None else one(noise)
        N = torch.cat([scale.expand(4), variances]).diag()
        density = oracles.mvn_log_density(
            torch.cat([one(past.g), one(y)]), H @ one(m), H @ one(K) @ H.mT + N
        )
        # Eleven data are behind four rows, and a residual that nothing explains.
        rest = (11 - 4) * (oracles.LOG_2PI + scale.log()) + one(past.rho) / scale
        assert_close(one(ours), density - 0.5 * rest)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_the_gradient_of_the_log_density_in_closed_form(batch):
    r, s = torch.randn(*batch, 5).double(), 0.2 + torch.rand(*batch, 5).double()
    root = torch.randn(*batch, 5, 4).double()

    def density(r: Tensor, root: Tensor, s: Tensor) -> Tensor:
        return rows.log_density(r, root @ root.mT, s)

    inputs = [t.requires_grad_() for t in (r, root, s)]
    assert torch.autograd.gradcheck(density, inputs)
    one = s[..., :1].detach().requires_grad_()  # one noise for all rows
    assert torch.autograd.gradcheck(density, [r, root, one])


def test_where_a_matrix_is_not_positive_definite_its_stream_alone_is_nan():
    A = torch.stack([torch.eye(3), -torch.eye(3)]).double()
    value = rows.log_density(torch.ones(2, 3).double(), A, torch.full((2, 3), 0.5))
    assert torch.isfinite(value).tolist() == [True, False]


def grown(factor: Factor, A: Tensor, r: Tensor, s: Tensor, new: int) -> Factor:
    """A factor with the next rows of ``s I + A``."""
    old = factor.count
    V = factor.W @ A[..., :old, old : old + new]
    S = A[..., old : old + new, old : old + new] - V.mT @ V
    S = S + s[..., None, None] * torch.eye(new)
    error = r[..., old : old + new] - (factor.e.unsqueeze(-2) @ V).squeeze(-2)
    return factor.extend(border(V, S, error))


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("capacity", [0, 30])
def test_a_factor_grows_into_that_of_all_rows_and_stays_as_it_was(batch, capacity):
    past, y, K, m, s = problem(20, 4, 3, *batch)
    A, r = rows.system(rows.regression(past, y, None, s), K, m)
    parent = factor = Factor.of(A[..., :10, :10], r[..., :10], s, capacity)
    before = parent.W.clone(), parent.e.clone()
    for new in (1, 3, 1, 9):
        factor = grown(factor, A, r, s, new)
    kept = factor.W.clone(), factor.e.clone()
    order = [*range(10), *range(14, 20)]  # another descendant, of other rows
    A_other, r_other = A[..., order, :][..., order], r[..., order]
    other = grown(parent, A_other, r_other, s, 6)
    for each, whole in (
        (factor, Factor.of(A, r, s)),
        (other, Factor.of(A_other, r_other, s)),
    ):
        assert_close(each.W, whole.W, rtol=0, atol=1e-10)
        assert_close(each.e, whole.e, rtol=0, atol=1e-10)
    assert torch.equal(factor.W, kept[0]) and torch.equal(factor.e, kept[1])
    assert torch.equal(parent.W, before[0]) and torch.equal(parent.e, before[1])


def test_evidence_after_a_compression_is_the_dense_bound_with_the_trace_sunk():
    """At other hyperparameters, with raw data on top, and with its gradient."""
    x, y = draw(50, dims=1)
    z = torch.linspace(0.05, 2.95, 6).double().unsqueeze(-1)
    model = make(num_inducing=20, memory_size=40)
    model.covar_module.base_kernel.lengthscale = 0.8

    def dense(parameters) -> tuple:
        raw_scale, raw_length, raw_noise, constant = parameters
        softplus = torch.nn.functional.softplus
        scale, length = softplus(raw_scale), softplus(raw_length).squeeze()

        def kernel(x1: Tensor, x2: Tensor) -> Tensor:
            square = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).square().sum(-1)
            return scale * torch.exp(-0.5 * square / length.square())

        noise = 1e-4 + softplus(raw_noise).squeeze()
        return kernel, noise, lambda x: constant.expand(x.shape[:-1])

    parameters = [
        model.covar_module.raw_outputscale,
        model.covar_module.base_kernel.raw_lengthscale,
        model.likelihood.noise_covar.raw_noise,
        model.mean_module.raw_constant,
    ]
    relative = settings.jitter.of(torch.float64)
    k, noise, mean = dense([p.detach().clone() for p in parameters])
    jitter = relative * model.covar_module.outputscale.item()
    first = model.update(x[:35], y[:35], num_steps=0, inducing_points=z)
    past = oracles.compress(k, x[:35], z, noise, mean, jitter)
    assert_close(first.projection_loss, past.lost, rtol=1e-6, atol=0)
    with torch.no_grad():
        for parameter, move in zip(parameters, (0.3, -0.2, 1.0, 0.4), strict=True):
            parameter += move
    result = model.update(x[35:], y[35:], num_steps=0)
    assert model.memory.num_raw == 15
    copies = [p.detach().clone().requires_grad_() for p in parameters]
    k, noise, mean = dense(copies)
    jitter = relative * torch.nn.functional.softplus(copies[0])
    x_test = torch.linspace(-0.5, 3.5, 9).double().unsqueeze(-1)
    expected = oracles.gp_on_compressed(
        k, z, past, y[:35], x[35:], y[35:], noise, x_test, mean, jitter
    )
    evidence = model.log_evidence()
    assert_close(evidence, expected.log_marginal, rtol=1e-8, atol=1e-8)
    assert_close(result.bound, evidence.detach(), rtol=1e-10, atol=0)
    posterior = model(x_test)
    variance = expected.cov.diagonal()
    assert_close(posterior.mean, expected.mean, rtol=0, atol=1e-7)
    assert_close(posterior.variance, variance, rtol=0, atol=1e-7)
    evidence.backward()
    expected.log_marginal.backward()
    for ours, theirs in zip(parameters, copies, strict=True):
        assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)


def moments(predictor, x: Tensor) -> bytes:
    latent = predictor(x)
    both = torch.stack([latent.mean, latent.variance])
    return both.detach().numpy().tobytes()


def test_a_predictor_that_is_held_keeps_its_numbers_while_the_model_goes_on():
    model = make(num_inducing=20, memory_size=60)
    model.update(*draw(10), num_steps=0)
    x_test, _ = draw(5)
    held = model.predictor()
    before = moments(held, x_test)
    for i in range(60):  # borders, compressions, and single points among batches
        model.update(*draw(1 + i % 3), num_steps=0)
        assert moments(held, x_test) == before != moments(model, x_test)


def failed(model: StreamingGP, x: Tensor, y: Tensor) -> None:
    """An update that is interrupted, which leaves the factor where it was."""

    def stop(step: int, bound: Tensor) -> None:
        raise KeyboardInterrupt

    factor = model.predictor().factor
    kept = [part.clone() for part in (factor.W, factor.e)]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model.update(x, y, learn=True, callback=stop)
    factor = model.predictor().factor
    assert torch.equal(factor.W, kept[0]) and torch.equal(factor.e, kept[1])


BESIDE = {
    "a copy": lambda model, x, y: copy.deepcopy(model),
    "a fantasy": lambda model, x, y: model.condition_on_observations(x, y),
    "a failed update": failed,
}


@pytest.mark.parametrize("what", BESIDE)
def test_what_happens_beside_a_model_does_not_disturb_it(what):
    model, twin, x_test = make(), make(), draw(5)[0]
    model.update(*draw(20), num_steps=0)
    twin.load_state_dict(model.state_dict())
    before, (x, y), (x_new, y_new) = moments(model, x_test), draw(6), draw(9)
    other = BESIDE[what](model, *draw(2))
    for i in range(6 if other else 0):
        other.update(x[i : i + 1], y[i : i + 1] + 9, num_steps=0)
    assert moments(model, x_test) == before
    kept = moments(other, x_test) if other else b""
    for each in (model, twin):
        for i in range(9):
            each.update(x_new[i : i + 1], y_new[i : i + 1], num_steps=0)
    assert_same_posterior(model, twin, x_test, 1e-12)
    assert not other or moments(other, x_test) == kept

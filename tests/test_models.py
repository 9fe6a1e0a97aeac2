"""StreamingGP: updates equal batch inference exactly when they should."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    RFFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import ConstantMean, LinearMean, ZeroMean
from torch import Tensor

import oracles
from conftest import FULL, only_full
from torch_ssgp import StreamingGP, settings
from torch_ssgp.exceptions import ArgumentError, StateError

# Most of their time goes to compressing the memory, the same again and again.
MANY = 1000 if FULL else 50
KERNELS = {
    "rbf": lambda: RBFKernel(),
    "matern12": lambda: MaternKernel(nu=0.5),
    "matern52": lambda: MaternKernel(nu=2.5),
    "periodic+linear": lambda: PeriodicKernel() + LinearKernel(),
    "rq*rbf": lambda: RQKernel() * RBFKernel(),
}


def draw(n: int, batch_shape: tuple[int, ...] = (), dims: int = 1, top: float = 8.0):
    x = top * torch.rand(*batch_shape, n, dims, dtype=torch.float64)
    y = torch.sin(x.sum(-1)) + 2 + 0.1 * torch.randn(*batch_shape, n).double()
    return x, y


def make(kernel, alpha=0.0, batch_shape=(), noise=0.05, constant=1.5, **options):
    model = StreamingGP(
        ScaleKernel(kernel), alpha=alpha, batch_shape=torch.Size(batch_shape), **options
    ).double()
    if isinstance(model.likelihood, GaussianLikelihood):
        model.likelihood.noise = noise
    if isinstance(model.mean_module, ConstantMean):
        model.mean_module.initialize(constant=constant)
    return model


def dense(model: StreamingGP):
    """Kernel and mean of a model as the oracles take them."""
    kernel, mean = copy.deepcopy((model.covar_module, model.mean_module))

    def k(x1: Tensor, x2: Tensor) -> Tensor:
        padded = torch.cat([x2, x2[:1]])  # rectangular: no square-only shortcuts
        return kernel(x1, padded).to_dense()[..., :-1].detach()

    return k, lambda x: mean(x).detach()


def stream(model, x, y, z, cuts, order, noise=None):
    """Closed-form updates on the pieces of a shuffled data set."""
    results = []
    for i, j in zip(cuts, cuts[1:], strict=False):
        rows = order[i:j]
        results.append(
            model.update(
                x[..., rows, :],
                y[..., rows],
                noise=None if noise is None else noise[..., rows],
                num_steps=0,
                inducing_points=z,
            )
        )
    return results


def random_cuts(n: int, pieces: int) -> list[int]:
    inner = (torch.randperm(n - 1)[: pieces - 1] + 1).sort().values.tolist()
    return [0, *inner, n]


def assert_same_posterior(a, b, x, tolerance):
    p, q = a(x), b(x)
    torch.testing.assert_close(p.mean, q.mean, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(p.variance, q.variance, atol=tolerance, rtol=tolerance)


# -- fixed hyperparameters and inducing points ---------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("share_noise", [True, False])
def test_any_split_and_order_equals_one_batch(kernel, alpha, share_noise):
    x, y = draw(2000)
    z = torch.linspace(0, 8, 20, dtype=torch.float64).unsqueeze(-1)
    x_test = torch.linspace(-1, 9, 30, dtype=torch.float64).unsqueeze(-1)
    # The smaller the memory, the sooner it is compressed, and the faster.
    options = {"share_noise": share_noise, "num_inducing": 100 if FULL else 20}
    batch = make(KERNELS[kernel](), alpha, **options)
    whole = batch.update(x, y, num_steps=0, inducing_points=z)
    # A hundred updates take five times as long: for one kernel, or in the full run.
    for pieces in (2, 17, 100) if FULL or kernel == "rbf" else (2, 17):
        model = make(KERNELS[kernel](), alpha, **options)
        cuts, order = random_cuts(2000, pieces), torch.randperm(2000)
        results = stream(model, x, y, z, cuts, order)
        total = sum(result.increment for result in results)
        torch.testing.assert_close(total, whole.bound, rtol=1e-9, atol=0)
        torch.testing.assert_close(results[-1].bound, whole.bound, rtol=1e-9, atol=0)
        assert_same_posterior(model, batch, x_test, 1e-8)
        assert model.summary.num_data == 2000


@pytest.mark.parametrize("batch_shape", [(3,), (2, 2)])
@pytest.mark.parametrize("alpha", [0.0, 0.01, 0.5, 1.0])
def test_batched_streams_with_own_noise_per_point_equal_one_batch(batch_shape, alpha):
    x, y = draw(500, batch_shape)
    noise = 0.02 + 0.1 * torch.rand_like(y)
    z = torch.linspace(0, 8, 15, dtype=torch.float64).unsqueeze(-1)

    def model():
        kernel = MaternKernel(nu=1.5, batch_shape=torch.Size(batch_shape))
        kernel.lengthscale = torch.rand(*batch_shape, 1, 1) + 0.5
        return StreamingGP(
            ScaleKernel(kernel, batch_shape=torch.Size(batch_shape)),
            FixedNoiseGaussianLikelihood(torch.ones(1)),
            mean_module=LinearMean(1, batch_shape=torch.Size(batch_shape)),
            alpha=alpha,
            batch_shape=torch.Size(batch_shape),
        ).double()

    batch = model()
    online = copy.deepcopy(batch)
    whole = batch.update(x, y, noise=noise, num_steps=0, inducing_points=z)
    results = stream(
        online, x, y, z, random_cuts(500, 9), torch.randperm(500), noise=noise
    )
    assert whole.bound.shape == batch_shape
    total = sum(result.increment for result in results)
    torch.testing.assert_close(total, whole.bound, rtol=1e-9, atol=0)
    assert_same_posterior(online, batch, x[..., :10, :], 1e-8)


def test_batched_streams_equal_separate_streams():
    x, y = draw(200, (3,))
    z = torch.linspace(0, 8, 12, dtype=torch.float64).unsqueeze(-1)
    together = make(RBFKernel(), batch_shape=(3,))
    together.update(x[:, :120], y[:, :120], num_steps=0, inducing_points=z)
    result = together.update(x[:, 120:], y[:, 120:], num_steps=0, inducing_points=z)
    x_test = torch.linspace(0, 8, 9, dtype=torch.float64).unsqueeze(-1)
    for i in range(3):
        alone = make(RBFKernel())
        alone.update(x[i, :120], y[i, :120], num_steps=0, inducing_points=z)
        one = alone.update(x[i, 120:], y[i, 120:], num_steps=0, inducing_points=z)
        torch.testing.assert_close(result.bound[i], one.bound, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(together(x_test).mean[i], alone(x_test).mean)


@pytest.mark.parametrize("alpha", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("share_noise", [True, False])
def test_one_batch_is_the_textbook_sparse_gp(alpha, share_noise):
    x, y = draw(60)
    z = torch.linspace(0, 8, 10, dtype=torch.float64).unsqueeze(-1)
    x_test = torch.linspace(-1, 9, 15, dtype=torch.float64).unsqueeze(-1)
    model = make(MaternKernel(nu=1.5), alpha, share_noise=share_noise)
    result = model.update(x, y, num_steps=0, inducing_points=z)
    k, m = dense(model)
    noise, jitter = model.likelihood.noise.detach(), _jitter(model)
    if alpha == 0:
        q = oracles.batch_vfe(k, x, y, z, noise, m, jitter)
    else:
        q = oracles.batch_power_ep(k, x, y, z, noise, alpha, m, jitter)
    torch.testing.assert_close(result.bound, q.bound, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.summary.mean, q.mean, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(model.summary.covariance, q.cov, rtol=1e-6, atol=1e-9)
    mean, cov = oracles.predict(k, z, q, x_test, m, jitter)
    torch.testing.assert_close(model(x_test).mean, mean, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(
        model(x_test).covariance_matrix, cov, rtol=1e-7, atol=1e-8
    )


def test_alpha_one_on_one_batch_is_fitc():
    x, y = draw(60)
    z = torch.linspace(0, 8, 10, dtype=torch.float64).unsqueeze(-1)
    model = make(RBFKernel(), alpha=1.0)
    result = model.update(x, y, num_steps=0, inducing_points=z)
    k, m = dense(model)
    q = oracles.fitc(k, x, y, z, model.likelihood.noise.detach(), m, _jitter(model))
    torch.testing.assert_close(result.bound, q.bound, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.summary.mean, q.mean, rtol=1e-7, atol=1e-7)


def test_inducing_points_at_all_inputs_equal_exact_gp():
    x, y = draw(120, dims=2, top=3.0)
    x_test = 3 * torch.rand(25, 2, dtype=torch.float64)
    model = make(MaternKernel(nu=2.5), noise=0.1)
    for i in range(0, 120, 40):
        z = x[: i + 40]
        result = model.update(
            x[i : i + 40], y[i : i + 40], num_steps=0, inducing_points=z
        )

    class Exact(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, y, copy.deepcopy(model.likelihood))
            self.mean_module = copy.deepcopy(model.mean_module)
            self.covar_module = copy.deepcopy(model.covar_module)

        def forward(self, inputs):
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(inputs), self.covar_module(inputs)
            )

    exact = Exact().double()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(exact.likelihood, exact)
    log_marginal = mll(exact(x), y) * len(y)
    torch.testing.assert_close(result.bound, log_marginal.detach(), rtol=1e-6, atol=0)
    exact.eval()
    with torch.no_grad():
        expected = exact(x_test)
    actual = model(x_test)
    torch.testing.assert_close(actual.mean, expected.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        actual.covariance_matrix, expected.covariance_matrix, rtol=0, atol=1e-6
    )


# -- hyperparameters and inducing points that change ---------------------------------


def _jitter(model) -> float:
    """The absolute jitter the model uses: relative to the prior variance."""
    return settings.jitter.of(torch.float64) * model.covar_module.outputscale.item()


def _change_everything(model: StreamingGP) -> None:
    model.covar_module.base_kernel.lengthscale = 0.7
    model.covar_module.outputscale = 1.4
    model.likelihood.noise = 0.09
    model.mean_module.initialize(constant=1.8)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 1.0])
def test_paper_form_equals_the_papers_dense_formulas(alpha):
    x, y = draw(70)
    z_a = torch.linspace(0, 5, 8, dtype=torch.float64).unsqueeze(-1)
    z_b = torch.cat([z_a[2:5], torch.linspace(3.1, 8, 7).double().unsqueeze(-1)])
    model = make(
        MaternKernel(nu=1.5), alpha, share_noise=False, num_inducing=10, memory_size=10
    )
    model.covar_module.base_kernel.lengthscale = 1.1
    model.update(x[:40], y[:40], num_steps=0, inducing_points=z_a)
    k_old, m_old = dense(model)
    jitter = _jitter(model)
    q_old = oracles.SparsePosterior(
        torch.zeros(()), model.summary.mean, model.summary.covariance
    )
    old = oracles.remember(k_old, z_a, q_old, m_old, jitter)

    _change_everything(model)
    # The oracle's jitter is one number for old and new prior.
    with settings.jitter(jitter / model.covar_module.outputscale.item()):
        result = model.update(x[40:], y[40:], num_steps=0, inducing_points=z_b)
    k, m = dense(model)
    noise = model.likelihood.noise.detach()
    if alpha == 0:
        q = oracles.paper_online_vfe(k, x[40:], y[40:], z_b, noise, old, m, jitter)
    else:
        q = oracles.paper_online_power_ep(
            k, x[40:], y[40:], z_b, noise, old, alpha, m, jitter
        )
    torch.testing.assert_close(result.increment, q.bound, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(model.summary.mean, q.mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(model.summary.covariance, q.cov, rtol=1e-7, atol=1e-7)


def test_small_alpha_agrees_with_vfe():
    x, y = draw(80)
    z_a, z_b = torch.linspace(0, 4, 8).double(), torch.linspace(0, 8, 12).double()
    bounds, means = [], []
    for alpha in (0.0, 1e-4):
        model = make(RBFKernel(), alpha, share_noise=False)
        model.update(x[:40], y[:40], num_steps=0, inducing_points=z_a)
        _change_everything(model)
        result = model.update(x[40:], y[40:], num_steps=0, inducing_points=z_b)
        bounds.append(result.increment)
        means.append(model(x).mean)
    torch.testing.assert_close(bounds[0], bounds[1], rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(means[0], means[1], rtol=1e-3, atol=1e-3)


def test_shared_noise_bounds_the_evidence_of_all_data_under_any_noise():
    # With Z at all inputs nothing is projected away, so the bound with a new noise
    # is the exact evidence of all data under that noise; the paper's form is not.
    x, y = draw(40)
    shared, paper = (make(MaternKernel(nu=1.5), share_noise=s) for s in (True, False))
    for model in (shared, paper):
        model.update(x[:20], y[:20], num_steps=0, inducing_points=x[:20])
        model.likelihood.noise = 0.3
        result = model.update(x[20:], y[20:], num_steps=0, inducing_points=x)
        k, m = dense(model)
        exact = oracles.exact_gp(k, x, y, model.likelihood.noise.detach(), x, m)
        error = (result.bound - exact.log_marginal).abs()
        assert error < 1e-4 if model is shared else error > 1


def test_known_noise_moves_a_shared_summary_to_sites_without_loss():
    x, y = draw(60)
    z = torch.linspace(0, 8, 12).double().unsqueeze(-1)
    model = make(RBFKernel())
    model.update(x[:30], y[:30], num_steps=0, inducing_points=z)
    reference = copy.deepcopy(model)
    before = model.summary.log_evidence
    noise = model.likelihood.noise.detach().expand(30)
    result = model.update(x[30:], y[30:], noise=noise, num_steps=0, inducing_points=z)
    expected = reference.update(x[30:], y[30:], num_steps=0, inducing_points=z)
    assert not model.memory.shared_noise and reference.memory.shared_noise
    torch.testing.assert_close(result.bound, expected.bound, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        result.increment, expected.bound - before, rtol=1e-8, atol=1e-8
    )
    assert_same_posterior(model, reference, x, 1e-9)


# -- long streams --------------------------------------------------------------------


def _tensor_bytes() -> int:
    gc.collect()
    kinds = (Tensor, torch.nn.Parameter)
    tensors = [o for o in gc.get_objects() if type(o) in kinds]
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("memory_size", [50, None])
def test_many_updates_lose_nothing_and_keep_nothing(memory_size):
    num_updates = 1000 if FULL else 300 if memory_size == 50 else MANY
    x, y = draw(100 * num_updates)
    z = torch.linspace(0, 8, 50, dtype=torch.float64).unsqueeze(-1)
    batch = make(MaternKernel(nu=1.5), num_inducing=50)
    whole = batch.update(x, y, num_steps=0, inducing_points=z)
    model = make(MaternKernel(nu=1.5), num_inducing=50, memory_size=memory_size)
    sizes = {}
    for i in range(num_updates):
        rows = slice(100 * i, 100 * i + 100)
        result = model.update(x[rows], y[rows], num_steps=0, inducing_points=z)
        if i + 1 in (10, num_updates):
            del result
            sizes[i + 1] = _tensor_bytes()
            result = None
    torch.testing.assert_close(
        model.summary.log_evidence, whole.bound, rtol=1e-9, atol=0
    )
    assert sizes[num_updates] == sizes[10]
    x_test = x[:50]
    torch.testing.assert_close(
        model(x_test).mean, batch(x_test).mean, rtol=0, atol=1e-8
    )
    torch.testing.assert_close(
        model(x_test).variance, batch(x_test).variance, rtol=1e-6, atol=0
    )


def test_many_float32_updates_are_as_accurate_as_float64():
    x, y = draw(100 * MANY)
    z = torch.linspace(0, 8, 50, dtype=torch.float64).unsqueeze(-1)
    rmse = []
    for dtype in (torch.float64, torch.float32):
        model = make(RBFKernel(), num_inducing=50).to(dtype)
        for i in range(0, 100 * MANY, 100):
            model.update(
                x[i : i + 100].to(dtype),
                y[i : i + 100].to(dtype),
                num_steps=0,
                inducing_points=z.to(dtype),
            )
        error = model(x[:2000].to(dtype)).mean.double() - y[:2000]
        rmse.append(error.square().mean().sqrt())
    torch.testing.assert_close(rmse[1], rmse[0], rtol=0.01, atol=0)
    assert rmse[0] == pytest.approx(0.1, rel=0.05)


def test_float32_learns_as_accurately_as_float64():
    num_data = 3000 if FULL else 1200
    x, _ = draw(num_data)
    y = torch.sin(3 * x[:, 0]) + 0.1 * torch.randn(num_data).double()
    rmse = []
    for dtype in (torch.float64, torch.float32):
        model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=40).to(dtype)
        for i in range(0, num_data, 300):
            rows = slice(i, i + 300)
            model.update(x[rows].to(dtype), y[rows].to(dtype), num_steps=30)
        prediction = model(x.to(dtype))
        assert prediction.mean.dtype == prediction.variance.dtype == dtype
        assert prediction.variance.min() > 0
        rmse.append(
            (prediction.mean.double() - torch.sin(3 * x[:, 0])).square().mean().sqrt()
        )
    noise_level = 0.1
    total = [(r.square() + noise_level**2).sqrt() for r in rmse]
    torch.testing.assert_close(total[1], total[0], rtol=0.01, atol=0)


# -- learning ------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_learning_recovers_the_noise_of_all_data(optimizer):
    x, _ = draw(1200)
    y = torch.sin(2 * x[:, 0]) + 0.2 * torch.randn(1200).double()
    model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=30).double()
    for i in range(0, 1200, 200):
        result = model.update(x[i : i + 200], y[i : i + 200], optimizer=optimizer)
    noise = model.likelihood.noise.sqrt().item()
    assert noise == pytest.approx(0.2, rel=0.08)
    error = (model(x).mean - torch.sin(2 * x[:, 0])).square().mean().sqrt()
    assert error < 0.03
    assert result.bound_trace.shape == (result.num_steps,)


def test_the_repr_of_a_result_leaves_out_its_trace():
    x, y = draw(40)
    model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=5).double()
    result = model.update(x, y, num_steps=20, learn_hyperparameters=True)
    assert len(result.bound_trace) > 1
    assert "bound_trace" not in repr(result)
    assert "num_steps=" in repr(result) and len(repr(result)) < 1000


@pytest.mark.parametrize("kernel", [*KERNELS, "ard", "deep"])
def test_any_kernel_learns_on_a_stream(kernel):
    class Deep(gpytorch.kernels.Kernel):
        def __init__(self):
            super().__init__()
            self.features = torch.nn.Sequential(
                torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
            )
            self.base_kernel = RBFKernel()

        def forward(self, x1, x2, diag=False, **params):
            return self.base_kernel.forward(
                self.features(x1), self.features(x2), diag=diag, **params
            )

    extra = {"ard": lambda: RBFKernel(ard_num_dims=2), "deep": Deep}
    base = {**KERNELS, **extra}[kernel]()
    x, y = draw(240, dims=2 if kernel in extra else 1, top=4.0)
    model = StreamingGP(ScaleKernel(base), num_inducing=25).double()
    for i in range(0, 240, 80):
        result = model.update(x[i : i + 80], y[i : i + 80], num_steps=25)
        # What is maximised is not the bound alone, see StreamingObjective.total.
        if result.num_steps:
            assert result.bound >= result.bound_trace[0] - 0.01
    prior_error = (y - y.mean()).square().mean()
    assert (model(x).mean - y).square().mean() < 0.5 * prior_error


def test_learnable_mean_may_change_between_updates():
    x = torch.linspace(0, 10, 300).double().unsqueeze(-1)
    y = 3 * x[:, 0] + torch.sin(x[:, 0])
    model = StreamingGP(
        ScaleKernel(RBFKernel()), mean_module=LinearMean(1), num_inducing=30
    ).double()
    for rows in torch.arange(300).chunk(5):
        model.update(x[rows], y[rows], num_steps=60)
    assert (model(x).mean - y).abs().max() < 0.1


def test_priors_and_constraints_are_honoured():
    x, y = draw(100)
    kernel = RBFKernel(
        lengthscale_prior=gpytorch.priors.LogNormalPrior(0.0, 0.01),
    )
    model = StreamingGP(
        ScaleKernel(kernel),
        GaussianLikelihood(noise_constraint=gpytorch.constraints.Interval(0.5, 0.6)),
        num_inducing=20,
    ).double()
    model.update(x, y, num_steps=100, lr=0.1)
    assert kernel.lengthscale.item() == pytest.approx(1.0, abs=0.1)
    assert 0.5 <= model.likelihood.noise.item() <= 0.6


def test_what_the_user_set_is_where_learning_starts():
    x, y = draw(50)
    model = StreamingGP(ScaleKernel(RBFKernel())).double()
    model.covar_module.base_kernel.lengthscale = 1.2345
    traces = []
    model.update(x, y, num_steps=1, lr=1e-9, callback=lambda *a: traces.append(a))
    assert model.covar_module.base_kernel.lengthscale.item() == pytest.approx(1.2345)
    assert model.likelihood.noise.item() != pytest.approx(0.6932, abs=1e-3)
    assert [step for step, _ in traces] == [1]


def test_frozen_parts_stay_where_they_are():
    x, y = draw(100)
    z = torch.linspace(0, 8, 10).double().unsqueeze(-1)
    model = make(RBFKernel())
    state = copy.deepcopy(model.covar_module.state_dict())
    frozen = {"learn_hyperparameters": False, "learn_inducing_points": True}
    model.update(x, y, num_steps=20, **frozen, inducing_points=z)
    for name, value in model.covar_module.state_dict().items():
        assert torch.equal(value, state[name])
    assert not torch.equal(model.summary.inducing_points, z)
    model = make(RBFKernel())
    model.update(x, y, num_steps=20, learn_inducing_points=False, inducing_points=z)
    assert torch.equal(model.summary.inducing_points, z)
    assert model.covar_module.outputscale.item() != state["raw_outputscale"].item()


def test_every_point_of_a_compression_may_move():
    x, y = draw(200)
    z = torch.linspace(0, 8, 15).double().unsqueeze(-1)
    model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=15).double()
    fixed = copy.deepcopy(model).update(x, y, num_steps=40, inducing_points=z)
    moved = model.update(
        x, y, num_steps=40, inducing_points=z, learn_inducing_points=True
    )
    assert not (model.points == z).any()
    assert moved.bound > fixed.bound


def test_forgetting_discounts_the_past():
    x, y = draw(100)
    z = torch.linspace(0, 8, 10).double().unsqueeze(-1)
    model = make(RBFKernel())
    model.update(x[:60], y[:60], num_steps=0, inducing_points=z)
    model.update(x[60:], y[60:], num_steps=0, inducing_points=z, forget=0.5)
    assert model.summary.num_data == 70
    kept = make(RBFKernel())
    weights = torch.cat([torch.full((60,), 0.05 / 0.5), torch.full((40,), 0.05)])
    kept.update(x, y, noise=weights.double(), num_steps=0, inducing_points=z)
    assert_same_posterior(model, kept, x[:10], 1e-8)


# -- conditioning --------------------------------------------------------------------


def test_conditioning_equals_a_closed_form_update_and_leaves_the_model_alone():
    x, y = draw(60)
    model = make(RBFKernel(), num_inducing=50, memory_size=50)
    model.update(x[:40], y[:40], num_steps=0)
    before, state = model(x).mean, copy.deepcopy(model.state_dict())
    conditioned = model.condition_on_observations(x[40:], y[40:])
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert torch.equal(model(x).mean, before)
    z = torch.cat([model.summary.inducing_points, x[40:]])
    model.update(x[40:], y[40:], num_steps=0, inducing_points=z)
    assert_same_posterior(conditioned, model, x, 1e-8)


def test_conditioning_one_by_one_equals_at_once():
    x, y = draw(40)
    model = make(MaternKernel(nu=1.5))
    model.update(x[:30], y[:30], num_steps=0)
    once = model.condition_on_observations(x[30:], y[30:])
    stepwise = model
    for i in range(30, 40):
        stepwise = stepwise.condition_on_observations(x[i : i + 1], y[i : i + 1])
    assert_same_posterior(once, stepwise, x, 1e-8)


def test_conditioning_is_batched_and_differentiable():
    x, y = draw(40)
    model = make(MaternKernel(nu=2.5))
    model.update(x, y, num_steps=0)
    x_new = torch.rand(5, 3, 1, dtype=torch.float64, requires_grad=True)
    y_new = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    x_test = torch.linspace(0, 8, 6).double().unsqueeze(-1)
    fantasy = model.condition_on_observations(x_new, y_new)
    assert fantasy.batch_shape == (4, 5)
    posterior = fantasy(x_test)
    assert posterior.mean.shape == (4, 5, 6)
    alone = model.condition_on_observations(x_new[2], y_new[1, 2])
    torch.testing.assert_close(posterior.mean[1, 2], alone(x_test).mean)
    torch.testing.assert_close(posterior.variance[1, 2], alone(x_test).variance)

    def predict(x_new, y_new):
        posterior = model.condition_on_observations(x_new, y_new)(x_test)
        return posterior.mean, posterior.variance

    assert torch.autograd.gradcheck(predict, (x_new[:2], y_new[:1, :2]), atol=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_look_without_gradients_leaves_those_of_a_fantasy(mode):
    x, y = draw(40)
    model = make(MaternKernel(nu=2.5))
    model.update(x, y, num_steps=0)
    gradients = []
    for first_look in (contextlib.nullcontext, mode):
        x_new = torch.tensor([[1.0], [9.0]]).double().requires_grad_()
        y_new = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        fantasy = model.condition_on_observations(x_new, y_new)
        with first_look():
            fantasy(x)
        fantasy(x).mean.sum().backward()
        gradients.append((x_new.grad, y_new.grad))
    torch.testing.assert_close(*gradients)


def test_a_fantasy_made_in_inference_mode_can_be_used_in_any():
    x, y = draw(40)
    model = make(MaternKernel(nu=2.5))
    model.update(x, y, num_steps=0)
    with torch.inference_mode():
        fantasy = model.condition_on_observations(x[:3] + 1, y[:3].clone())
    with torch.no_grad():
        plain = model.condition_on_observations(x[:3] + 1, y[:3])
    assert not any(buffer.requires_grad for buffer in plain.buffers())
    torch.testing.assert_close(fantasy(x).mean, plain(x).mean, rtol=0, atol=1e-12)
    points = x.clone().requires_grad_()
    fantasy(points).mean.sum().backward()
    assert points.grad is not None
    fantasy.update(x, y, num_steps=2)


@pytest.mark.parametrize("likelihood", [GaussianLikelihood, BernoulliLikelihood])
@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("x_batch", [(), (4,)])
def test_batched_fantasies_can_be_updated(likelihood, num_steps, x_batch):
    x, y = draw(40)
    y = (y > y.mean()).to(y)
    model = StreamingGP(RBFKernel(), likelihood(), num_inducing=8).double()
    model.update(x, y, num_steps=0)
    x_new = 8 * torch.rand(*x_batch, 3, 1, dtype=torch.float64)
    y_new = torch.randint(2, (4, 3)).to(y)
    fantasies = model.condition_on_observations(x_new.requires_grad_(), y_new)
    alone = model.condition_on_observations(x_new.expand(4, 3, 1)[1], y_new[1])
    z = torch.linspace(0, 8, 8).double().unsqueeze(-1) if num_steps == 0 else None
    options = {"num_steps": num_steps, "inducing_points": z}
    result = fantasies.update(x, y.expand(4, 40), **options)
    expected = alone.update(x, y, **options)
    assert result.bound.shape == (4,) and fantasies(x).mean.shape == (4, 40)
    assert not result.bound.requires_grad and not result.increment.requires_grad
    if num_steps == 0:
        torch.testing.assert_close(result.bound[1], expected.bound)
        torch.testing.assert_close(fantasies(x).mean[1], alone(x).mean)


def test_conditioning_the_prior_is_exact_inference():
    x, y = draw(30)
    model = make(RBFKernel()).condition_on_observations(x, y)
    k, m = dense(model)
    exact = oracles.exact_gp(k, x, y, model.likelihood.noise.detach(), x, m)
    torch.testing.assert_close(model(x).mean, exact.mean, rtol=0, atol=1e-6)
    model.update(x, y, num_steps=2)  # goes on as any model


# -- predicting ----------------------------------------------------------------------


def test_prediction_before_any_data_is_the_prior():
    model = make(RBFKernel(), mean_module=ZeroMean())
    x = torch.linspace(0, 1, 5).double()
    prior = model(x)
    assert torch.equal(prior.mean, torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(
        prior.covariance_matrix, model.covar_module(x).to_dense().detach()
    )


def test_gradients_of_predictions_reach_the_inputs_only():
    x, y = draw(50, dims=2)
    model = make(MaternKernel(nu=2.5))
    model.update(x, y, num_steps=3)
    points = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)

    def predict(points):
        posterior = model(points)
        return posterior.mean, posterior.variance, posterior.covariance_matrix

    assert torch.autograd.gradcheck(predict, (points,), atol=1e-4)
    for _ in range(2):  # a second plain backward goes through too
        model(points).mean.sum().backward()
    assert points.grad is not None
    assert all(p.grad is None for p in model.parameters())


def test_repeated_predictions_factor_nothing(monkeypatch):
    x, y = draw(50)
    model = make(RBFKernel())
    model.update(x, y, num_steps=0)
    calls = []
    original = torch.linalg.cholesky_ex
    monkeypatch.setattr(
        torch.linalg,
        "cholesky_ex",
        lambda *a, **k: calls.append(1) or original(*a, **k),
    )
    first = model(x).mean
    assert len(calls) == 0  # the factor of the update
    for mode in (True, False):
        model.train(mode)
        assert torch.equal(model(x).mean, first)
        model(x).variance  # noqa: B018
    assert len(calls) == 0
    model.covar_module.base_kernel.lengthscale = 2.0
    assert not torch.allclose(model(x).mean, first)
    assert len(calls) == 1


def test_predictions_have_the_jitter_that_is_set():
    x, y = draw(50)
    model = make(RBFKernel())
    model.update(x, y, num_steps=0, inducing_points=x[::5])
    with settings.jitter(1e-2):
        large = copy.deepcopy(model)(x).mean
    small = model(x).mean
    assert not torch.allclose(large, small)
    with settings.jitter(1e-2):
        torch.testing.assert_close(model(x).mean, large, rtol=0, atol=1e-10)
    torch.testing.assert_close(model(x).mean, small, rtol=0, atol=1e-10)


def test_predict_adds_the_noise_of_the_likelihood():
    x, y = draw(50)
    model = make(RBFKernel(), noise=0.3)
    model.update(x, y, num_steps=0)
    torch.testing.assert_close(model.predict(x).variance, model(x).variance + 0.3)


# -- state ---------------------------------------------------------------------------


def _trained():
    x, y = draw(80)
    model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=12).double()
    model.update(x[:40], y[:40], num_steps=5)
    model.update(x[40:], y[40:], num_steps=5)
    return model, x, y


def test_state_dict_loads_into_a_model_with_another_number_of_points():
    model, x, y = _trained()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    fresh = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=12).double()
    fresh.load_state_dict(state)
    other, _, _ = _trained()
    other.update(x[:5], y[:5], num_steps=0, inducing_points=x[:3])
    other.load_state_dict(state)
    for copied in (fresh, other):
        assert_same_posterior(copied, model, x, 1e-10)
        result = copied.update(x, y, num_steps=3)
        expected = copy.deepcopy(model).update(x, y, num_steps=3)
        torch.testing.assert_close(result.bound, expected.bound, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "damage",
    [
        {"memory.g": None},
        {"memory.g": lambda g: g[:5]},
        {"memory.points": lambda z: z.squeeze(-1)},
        {"memory.row_residual": lambda rho: rho.expand(3)},
    ],
)
def test_a_memory_that_is_not_whole_is_not_loaded(damage):
    model, x, _ = _trained()
    state, before = model.state_dict(), model(x).mean
    for name, change in damage.items():
        if change is None:
            del state[name]
        else:
            state[name] = change(state[name])
    fresh = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=12).double()
    for strict in (True, False):
        for loading in (fresh, model):
            with pytest.raises(StateError, match=next(iter(damage))):
                loading.load_state_dict(state, strict=strict)
    assert torch.equal(model(x).mean, before)
    assert fresh.summary.is_empty and not fresh(x).mean.any()
    rest = {name: t for name, t in state.items() if not name.startswith("memory.")}
    fresh.load_state_dict(rest, strict=False)
    assert fresh.likelihood.noise == model.likelihood.noise


def test_a_state_stays_when_the_model_goes_on():
    model, x, y = _trained()
    state, before = model.state_dict(), model(x).mean
    model.update(x, 2 * y, num_steps=5)
    fresh = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=12).double()
    fresh.load_state_dict(state)
    torch.testing.assert_close(fresh(x).mean, before, rtol=0, atol=1e-10)
    assert model.state_dict(keep_vars=True)["likelihood.noise_covar.raw_noise"] is (
        model.likelihood.raw_noise
    )


def test_a_pickle_keeps_what_others_share_with_the_model():
    model = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=5)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer, kernel = pickle.loads(
        pickle.dumps((model, optimizer, model.covar_module))
    )
    assert model.covar_module is kernel
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())


def test_copies_and_pickles_keep_the_posterior():
    model, x, _ = _trained()
    before = model(x)  # fills the cache
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(copied(x).mean, before.mean, rtol=0, atol=1e-10)


def test_nothing_in_the_memory_asks_for_gradients():
    model, _, _ = _trained()
    assert not any(b.requires_grad for b in model.buffers())
    assert all(b.grad_fn is None for b in model.buffers())


# -- what data may be ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "optimizer"),
    [
        (GaussianLikelihood, "adam"),
        (GaussianLikelihood, "lbfgs"),
        (BernoulliLikelihood, "adam"),
        (BernoulliLikelihood, "lbfgs"),
        (StudentTLikelihood, "adam"),
        pytest.param(StudentTLikelihood, "lbfgs", marks=only_full),
    ],
)
def test_updates_are_the_same_in_every_mode(likelihood, optimizer):
    x, y = draw(40)
    y = (y > y.mean()).to(y)
    expected = None
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        model = StreamingGP(ScaleKernel(RBFKernel()), likelihood(), num_inducing=8)
        model.double()
        options = {"num_steps": 2, "optimizer": optimizer}
        with mode():
            model.predict(x)
            model.update(x, y.clone(), **options)
            model.predict(x)
            data = x + 8, y.clone()  # in inference mode autograd refuses these
        model.update(*data, inducing_points=data[0][:5], **options)
        model.update(*data, num_steps=0)
        bound = model.update(*data, **options).bound
        expected = bound if expected is None else expected
        assert torch.equal(bound, expected)
        points = x.clone().requires_grad_()
        model(points).mean.sum().backward()
        assert torch.isfinite(points.grad).all()


def test_states_loaded_in_inference_mode_can_be_used_in_any(tmp_path):
    model, x, y = _trained()
    model.save(tmp_path / "model.pt")
    fresh = StreamingGP(ScaleKernel(RBFKernel()), num_inducing=12).double()
    with torch.inference_mode():
        fresh.load_state_dict(model.state_dict())
        loaded = [fresh, copy.deepcopy(model), StreamingGP.load(tmp_path / "model.pt")]
    for other in loaded:
        points = x.clone().requires_grad_()
        other(points).mean.sum().backward()
        assert torch.isfinite(points.grad).all()
        other.update(x, y, num_steps=2)


@pytest.mark.parametrize("num_steps", [0, 4])
@pytest.mark.parametrize("likelihood", [GaussianLikelihood, StudentTLikelihood])
def test_updates_take_values_and_leave_graphs_alone(likelihood, num_steps):
    x, y = draw(40)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    leaf = y.clone().requires_grad_()
    noise = weight * torch.ones_like(y) if likelihood is GaussianLikelihood else None
    results = []
    for data in ((x, y), (weight * x, leaf), (x, (weight * y).exp().log())):
        torch.manual_seed(0)
        model = StreamingGP(RBFKernel(), likelihood(), num_inducing=8).double()
        for _ in range(2):
            result = model.update(*data, noise, num_steps=num_steps)
        results.append(result)
        assert not result.bound.requires_grad
        assert not any(buffer.requires_grad for buffer in model.buffers())
    assert weight.grad is None and leaf.grad is None
    assert torch.equal(results[0].bound, results[1].bound)
    torch.testing.assert_close(results[0].bound, results[2].bound)


def test_kernels_that_draw_at_their_first_call_are_refused():
    x, y = draw(40)
    model = make(ScaleKernel(RFFKernel(20)))
    with pytest.raises(ArgumentError, match="randn_weights.*num_dims=1"):
        model.update(x, y)
    model = make(ScaleKernel(RFFKernel(20, num_dims=1)))
    model.update(x, y, num_steps=2)


def test_updates_leave_the_global_generator_alone():
    torch.manual_seed(0)
    draw(80)
    after_data = torch.get_rng_state()
    torch.manual_seed(0)
    _trained()  # the same draw, then two updates
    assert torch.equal(torch.get_rng_state(), after_data)


def test_copies_among_the_inducing_points_leak_nothing():
    # A copy that was taken for the original had a covariance above its variance.
    z = torch.tensor([[0.0], [0.0], [1.0], [1.0], [1.0], [2.0]]).double()
    x = torch.linspace(0, 2, 60).double().unsqueeze(-1)
    y = torch.sin(3 * x[:, 0])
    whole, parts = (StreamingGP(ScaleKernel(RBFKernel())).double() for _ in range(2))
    for model in (whole, parts):
        model.likelihood.noise = 1e-3
    expected = whole.update(x, y, num_steps=0, inducing_points=z)
    for rows in torch.arange(60).chunk(20):
        result = parts.update(x[rows], y[rows], num_steps=0, inducing_points=z)
        assert (result.projection_loss >= -1e-9).all()
    torch.testing.assert_close(result.bound, expected.bound, rtol=1e-9, atol=0)
    torch.testing.assert_close(parts(x).mean, whole(x).mean, rtol=0, atol=1e-9)


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("batch_shape", [(), (2,)])
@pytest.mark.parametrize("given", [True, False])
def test_data_where_the_function_is_known_are_data(num_steps, batch_shape, given):
    # A linear kernel has no variance at zero; nothing can be learned but the noise.
    model = StreamingGP(
        LinearKernel(), mean_module=ZeroMean(), batch_shape=torch.Size(batch_shape)
    ).double()
    x = torch.zeros(2, 1).double()
    y = torch.tensor([1.0, -1.0]).double().expand(*batch_shape, 2)
    z = x[:1] if given else None
    first = model.update(x, y, num_steps=num_steps, inducing_points=z)
    assert torch.isfinite(first.bound).all()
    posterior = model(x)
    assert posterior.mean.abs().max() == 0
    assert posterior.lazy_covariance_matrix.to_dense().abs().max() == 0
    x = torch.linspace(-1, 1, 5).double().unsqueeze(-1)
    result = model.update(x, x[:, 0].expand(*batch_shape, 5), num_steps=num_steps)
    assert torch.isfinite(result.bound).all()
    assert model.summary.num_data == 7


class Fixed(Kernel):
    """A kernel without parameters."""

    def forward(self, x1, x2, diag=False, **params):
        return self.covar_dist(x1, x2, square_dist=True, diag=diag).neg().exp()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_without_parameters_learn_in_their_dtype(dtype, tmp_path):
    """That of torch at first, then what ``model.to`` says."""
    x = torch.linspace(0, 6, 20, dtype=dtype)
    model = StreamingGP(Fixed(), BernoulliLikelihood(), ZeroMean(), num_inducing=10)
    assert model.dtype == torch.float32
    model.to(dtype).update(x, x > 3, num_steps=2)
    assert model.dtype == model(x).mean.dtype == dtype
    model.save(tmp_path / "model.pt")
    loaded = StreamingGP.load(tmp_path / "model.pt", covar_module=Fixed())
    assert torch.equal(loaded(x).mean, model(x).mean)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_noise_variance_may_stand_for_all(shape):
    x, y = torch.rand(20, 1).double(), torch.rand(20).double()
    noise = torch.full_like(y, 0.01)
    one, each = make(MaternKernel()), make(MaternKernel())
    for rows in torch.arange(20).split(5):
        one.update(x[rows], y[rows], noise=noise[0].expand(shape), num_steps=2)
        each.update(x[rows], y[rows], noise=noise[rows], num_steps=2)
    assert torch.equal(one(x).mean, each(x).mean)

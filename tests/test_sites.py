"""Gaussian sites: the same stream with likelihoods that are not Gaussian."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    BetaLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    MultitaskGaussianLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
    _OneDimensionalLikelihood,
)
from gpytorch.means import ConstantMean, ZeroMean

from oracles import (
    OldPosterior,
    SparsePosterior,
    inducing_cov,
    streaming_elbo_four_terms,
)
from torch_ssgp import StreamingGP, exceptions, settings
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.likelihoods import expected_log_prob, softmax_bound
from torch_ssgp.memory import Data, Rows
from torch_ssgp.update.objective import GaussianObjective, Prior
from torch_ssgp.update.sites import ROUND, SiteObjective
from workbench import likelihoods as tables
from workbench.streams import banana

JITTER = 1e-6


class OwnPoisson(_OneDimensionalLikelihood):
    """A user's own likelihood: counts with a log link."""

    def forward(self, function_samples, *args, **kwargs):
        return torch.distributions.Poisson(function_samples.exp(), validate_args=False)


def scaled_rbf(outputscale=1.0, lengthscale=1.0):
    kernel = ScaleKernel(RBFKernel())
    kernel.outputscale, kernel.base_kernel.lengthscale = outputscale, lengthscale
    return kernel.double()


def targets_for(likelihood, x):
    """Targets that the likelihood can explain, and that depend on ``x``."""
    f = torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(len(x), dtype=x.dtype)
    if isinstance(likelihood, BernoulliLikelihood):
        return (f > 0).to(x.dtype)
    if isinstance(likelihood, BetaLikelihood):
        return torch.sigmoid(f)
    if isinstance(likelihood, PoissonLikelihood | OwnPoisson):
        return torch.poisson(f.exp())
    return f


def objective_for(likelihood, num_data=40, num_inducing=8, kernel=None):
    """The first update of a stream, at fixed hyperparameters and points."""
    x = torch.rand(num_data, 1, dtype=torch.float64) * 5
    data = Data(x, targets_for(likelihood, x))
    past = PseudoObservations(
        x.new_zeros(0, 0), x.new_zeros(0), x.new_zeros(()), x.new_zeros(())
    )
    objective = SiteObjective(
        Prior(ZeroMean(), kernel or scaled_rbf(), likelihood.double()),
        Rows(x.new_zeros(0, 1), past),
        data,
        shared_noise=False,
        alpha=0.0,
        jitter=1e-8,
    )
    objective.start_at(torch.linspace(0, 5, num_inducing, dtype=x.dtype).unsqueeze(-1))
    return objective


# ------------------------------------------------------------------------- E-steps


@pytest.mark.parametrize(
    "likelihood", [BernoulliLikelihood(), PoissonLikelihood(), OwnPoisson()]
)
@pytest.mark.parametrize("outputscale", [1.0, 25.0])
def test_e_steps_never_decrease_the_bound(likelihood, outputscale):
    objective = objective_for(likelihood, kernel=scaled_rbf(outputscale))
    with torch.no_grad():
        trace = objective.settle(objective.basis())
    assert objective.settled
    assert (trace.diff() >= -1e-10 * trace[-1].abs()).all()
    assert trace[-1] > trace[0] + 1


@pytest.mark.parametrize(
    "likelihood", [StudentTLikelihood(), LaplaceLikelihood(), BetaLikelihood()]
)
def test_sites_of_any_likelihood_have_positive_precision(likelihood):
    objective = objective_for(likelihood)
    with torch.no_grad():
        objective.data.y[::7] = targets_for(BetaLikelihood(), objective.data.x)[::7]
        trace = objective.settle(objective.basis())
    assert (objective.sites.precision > 0).all()
    assert torch.isfinite(trace).all()
    assert trace[-1] > trace[0]


def test_outliers_of_a_student_t_get_little_weight():
    likelihood = StudentTLikelihood()
    likelihood.noise, likelihood.deg_free = 0.01, 4.0
    objective = objective_for(likelihood)
    objective.data.y[5] += 20.0
    with torch.no_grad():
        objective.settle(objective.basis())
    precision = objective.sites.precision
    assert 0 < precision[5] < 1e-2 * precision.median()
    # Where the density curves upwards the site is that of reweighted least squares.
    assert objective.sites.target[5] == pytest.approx(
        float(objective.data.y[5]), rel=0.1
    )


def test_gaussian_sites_give_the_closed_form():
    likelihood = GaussianLikelihood()
    likelihood.noise = 0.1
    objective = objective_for(likelihood)
    closed = GaussianObjective(
        Prior(objective.mean, objective.kernel, likelihood),
        objective.rows,
        objective.data,
        shared_noise=False,
        alpha=0.0,
        jitter=1e-8,
    )
    closed.start_at(objective.z.detach())
    with torch.no_grad():
        trace = objective.settle(objective.basis())
        expected = closed.total()[1]
    torch.testing.assert_close(trace[1], expected, rtol=1e-10, atol=1e-8)
    torch.testing.assert_close(objective.sites.target, objective.data.y)


# ----------------------------------------------------------------------- streaming


def bernoulli_stream(num_batches=3, num_data=30):
    for k in range(num_batches):
        x = torch.rand(num_data, 1, dtype=torch.float64) * 2 + k
        yield x, targets_for(BernoulliLikelihood(), x).long()


def dense(kernel):
    return lambda a, b: kernel(a, b).to_dense().detach()


def oracle_elbo(kernel, x, y, z, old, mean, cov):
    likelihood = BernoulliLikelihood().double()
    return streaming_elbo_four_terms(
        dense(kernel),
        x,
        y.double(),
        z,
        None,
        old,
        SparsePosterior(mean.new_zeros(()), mean, cov),
        jitter=JITTER,
        expected_log_prob=lambda y, m, v: expected_log_prob(likelihood, y, m, v),
    )


def test_streaming_bernoulli_is_stationary_in_q_and_equals_the_papers_objective():
    """Over batches with other inducing points each, at fixed hyperparameters."""
    kernel = scaled_rbf(lengthscale=0.8)
    model = StreamingGP(kernel, BernoulliLikelihood()).double()
    old = None
    with settings.jitter(JITTER):
        for k, (x, y) in enumerate(bernoulli_stream()):
            z = torch.linspace(0, 2 + k, 5 + k, dtype=torch.float64).unsqueeze(-1)
            result = model.update(x, y, num_steps=0, inducing_points=z)
            assert result.converged
            summary = model.summary
            prior_cov = inducing_cov(dense(kernel), z, z, JITTER)
            if old is not None:
                # In whitened coordinates, b = L w, q(w) = N(mu, S).
                L = torch.linalg.cholesky(prior_cov)
                mu = torch.linalg.solve(L, summary.mean).requires_grad_()
                S = torch.linalg.solve(L, torch.linalg.solve(L, summary.covariance).mT)
                S.requires_grad_()
                elbo = oracle_elbo(kernel, x, y, z, old, L @ mu, L @ S @ L.mT)
                torch.testing.assert_close(elbo, result.increment, rtol=1e-8, atol=1e-7)
                for gradient in torch.autograd.grad(elbo, (mu, S)):
                    assert gradient.abs().max() < 1e-6
            nothing = torch.zeros_like(summary.mean)
            old = OldPosterior(z, summary.mean, summary.covariance, nothing, prior_cov)


def test_increments_add_up_to_the_bound():
    model = StreamingGP(scaled_rbf(), BernoulliLikelihood(), num_inducing=10).double()
    results = [model.update(x, y, num_steps=5) for x, y in bernoulli_stream(4)]
    total = sum(r.increment for r in results)
    torch.testing.assert_close(total, results[-1].bound)
    torch.testing.assert_close(model.summary.log_evidence, results[-1].bound)


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_learning_raises_the_bound(optimizer):
    x, y = next(bernoulli_stream(1, 100))
    fixed = StreamingGP(scaled_rbf(), BernoulliLikelihood(), num_inducing=10).double()
    before = fixed.update(x, y, num_steps=0).bound
    model = StreamingGP(scaled_rbf(), BernoulliLikelihood(), num_inducing=10).double()
    result = model.update(x, y, num_steps=40, optimizer=optimizer)
    assert result.bound > before + 0.5
    assert result.bound_trace.shape == (result.num_steps,)
    # The last E-steps can only add to the best bound of the loop.
    assert result.bound >= result.bound_trace.max() - 1e-3


@pytest.mark.parametrize(
    "likelihood",
    [
        BernoulliLikelihood(),
        BetaLikelihood(),
        StudentTLikelihood(),
        LaplaceLikelihood(),
        PoissonLikelihood(),
        OwnPoisson(),
    ],
    ids=lambda likelihood: type(likelihood).__name__,
)
def test_any_likelihood_streams(likelihood):
    model = StreamingGP(ScaleKernel(RBFKernel()), likelihood, num_inducing=10)
    for k in range(3):
        x = torch.rand(25, 1) * 2 + k
        result = model.update(x, targets_for(likelihood, x), num_steps=5)
    assert torch.isfinite(result.bound)
    latent = model(x)
    assert latent.mean.dtype == torch.float32
    assert (latent.variance > 0).all()
    assert torch.isfinite(model.predict(x).mean).all()
    assert model.summary.num_data == 75
    # Never an indefinite past: q is narrower than its prior.
    z = model.summary.inducing_points.double()
    prior = inducing_cov(dense(model.covar_module.double()), z, z, 1e-8)
    assert torch.linalg.eigvalsh(prior - model.summary.covariance).min() > -1e-8


def test_parameters_of_the_likelihood_are_learned():
    x, y = tables.outliers(200)
    model = StreamingGP(
        ScaleKernel(RBFKernel()), StudentTLikelihood(), num_inducing=30
    ).double()
    model.update(x, y, num_steps=50)
    assert 0.01 < model.likelihood.noise.item() < 0.2  # 0.04 made the data
    assert model.likelihood.deg_free.item() < 4


def test_conditioning_equals_an_update_with_the_same_points():
    (x, y), (x_new, y_new) = bernoulli_stream(2, 12)
    model = StreamingGP(
        scaled_rbf(), BernoulliLikelihood(), num_inducing=8, memory_size=8
    ).double()
    model.update(x, y, num_steps=0)
    conditioned = model.condition_on_observations(x_new, y_new)
    z = torch.cat([model.summary.inducing_points, x_new])
    result = model.update(x_new, y_new, num_steps=0, inducing_points=z)
    x_test = torch.linspace(0, 3, 20, dtype=torch.float64).unsqueeze(-1)
    torch.testing.assert_close(conditioned(x_test).mean, model(x_test).mean)
    torch.testing.assert_close(conditioned(x_test).variance, model(x_test).variance)
    torch.testing.assert_close(conditioned.summary.log_evidence, result.bound)


def test_conditioning_takes_several_fantasies():
    (x, y), (x_new, y_new) = bernoulli_stream(2, 12)
    model = StreamingGP(scaled_rbf(), BernoulliLikelihood(), num_inducing=8).double()
    model.update(x, y, num_steps=0)
    both = model.condition_on_observations(x_new, torch.stack([y_new, 1 - y_new]))
    one = model.condition_on_observations(x_new, 1 - y_new)
    torch.testing.assert_close(both(x).mean[1], one(x).mean)


# -------------------------------------------------------------------------- classes


def test_softmax_bound_is_below_the_expectation_and_close():
    labels = torch.tensor([0, 2, 1])
    mean = torch.randn(3, 4, dtype=torch.float64)
    for size, slack in ((1e-4, 1e-6), (1.0, 0.05), (9.0, 1.5)):
        variance = size * torch.rand(3, 4, dtype=torch.float64)
        bound = softmax_bound(labels, mean, variance)
        noise = torch.randn(100_000, 3, 4, dtype=torch.float64)
        samples = (mean + variance.sqrt() * noise).log_softmax(-1)
        expected = samples.mean(0).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        error = 4 * samples.std() / len(samples) ** 0.5
        assert (bound < expected + error).all()
        assert (expected - bound < slack + error).all()


def test_softmax_bound_with_mixing_weights_of_the_identity_is_the_same():
    labels = torch.tensor([0, 2])
    mean = torch.randn(2, 3, dtype=torch.float64)
    variance = torch.rand(2, 3, dtype=torch.float64)
    with_weights = softmax_bound(labels, mean, variance, torch.eye(3).double())
    torch.testing.assert_close(softmax_bound(labels, mean, variance), with_weights)


def softmax_model(num_classes=3, num_inducing=10):
    return tables.digits_model(num_classes, num_inducing)


def test_two_classes_of_softmax_are_mirror_images():
    x, y = next(bernoulli_stream(1, 40))
    model = StreamingGP(
        scaled_rbf(),
        SoftmaxLikelihood(num_classes=2, mixing_weights=False),
        num_inducing=10,
        batch_shape=torch.Size([2]),
    ).double()
    result = model.update(x, y, num_steps=0)
    assert result.converged
    mean = model(x).mean
    torch.testing.assert_close(mean[0], -mean[1], rtol=1e-5, atol=1e-5)
    assert ((mean[1] > mean[0]).long() == y).double().mean() > 0.8
    assert model.predict(x).probs.shape[-2:] == (40, 2)


def test_digits_streamed_class_by_class_are_not_forgotten():
    """A reduced form of the table in scripts/likelihoods.py: four classes."""
    x, y, x_test, y_test = tables.digits(num_train=400)
    train, test = y < 4, y_test < 4
    x, y, x_test, y_test = x[train], y[train], x_test[test], y_test[test]
    options = {"num_steps": 8, "learn_inducing_points": False}
    model = softmax_model(4, 30)
    firsts = []
    for label in range(4):
        model.update(x[y == label], y[y == label], **options)
        streamed, first = tables.class_accuracies(model, x_test, y_test)
        firsts.append(first)
    model = softmax_model(4, 30)
    model.update(x, y, **options)
    batch, _ = tables.class_accuracies(model, x_test, y_test)
    assert streamed > batch - 0.03
    assert min(firsts) > max(firsts) - 0.03


# ----------------------------------------------------------- streams against batch


@pytest.mark.parametrize("first", [0, 1])
def test_labels_may_come_class_by_class(first):
    """With learned hyperparameters, as well as in random order."""

    def crescents(n: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        t, u = torch.rand(2, n, dtype=torch.float64, generator=generator)
        upper = torch.stack([torch.cos(3.14 * t), torch.sin(3.14 * t)], -1)
        lower = torch.stack([1 - upper[:, 0], 0.5 - upper[:, 1]], -1)
        x = torch.where((u < 0.5).unsqueeze(-1), lower, upper)
        e = torch.randn(n, 2, dtype=torch.float64, generator=generator)
        return x + 0.15 * e, (u < 0.5).double()

    x, y = crescents(240, seed=2)
    order = ((y - first).abs()).argsort(stable=True)
    x_test, y_test = crescents(1000, seed=3)
    model = StreamingGP(
        ScaleKernel(RBFKernel(ard_num_dims=2)),
        likelihood=BernoulliLikelihood(),
        num_inducing=40,
    ).double()
    learned = [model.update(x[i], y[i], num_steps=40).learned for i in order.split(40)]
    assert not learned[0]  # one class says nothing about the kernel
    assert learned[-1] or any(learned)
    error = ((model.predict(x_test).mean > 0.5).double() != y_test).double().mean()
    assert error < 0.035  # 0.01 to 0.02 in random order


def test_banana_streams_as_well_as_a_batch():
    """A reduced form of the table of scripts/reproduce.py: one order."""
    stream = banana("left_to_right", batches=4, max_test=1000)
    errors = tables.binary_errors(
        tables.binary_model(30), stream.batches, stream.x_test, stream.y_test
    )
    whole = [(stream.x_train, stream.y_train)]
    batch = tables.binary_errors(
        tables.binary_model(30), whole, stream.x_test, stream.y_test
    )
    assert errors[-1] < batch[-1] + 0.015
    assert errors[-1] < 0.12


def test_counts_stream_as_well_as_a_batch():
    stream, batch = tables.stream_and_batch(PoissonLikelihood, *tables.counts(300), 3)
    assert stream == pytest.approx(batch, rel=0.02)


def test_student_t_streams_as_well_as_a_batch_and_beats_gaussian():
    x, y = tables.outliers(600)
    stream, batch = tables.stream_and_batch(StudentTLikelihood, x, y, 2, 20)
    gaussian, _ = tables.stream_and_batch(GaussianLikelihood, x, y, 1, 20)
    assert stream == pytest.approx(batch, rel=0.02)
    assert stream > gaussian + 1


# ------------------------------------------------------------------ what is refused


def data(num=12):
    x = torch.rand(num, 1)
    return x, torch.arange(num) % 3


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (BernoulliLikelihood(), torch.tensor([0.0, 1.0, 2.0])),
        (BernoulliLikelihood(), torch.tensor([-1.0, 1.0, 1.0])),
        (PoissonLikelihood(), torch.tensor([0.0, 1.0, -1.0])),
        (PoissonLikelihood(), torch.tensor([0.0, 1.0, 0.5])),
        (BetaLikelihood(), torch.tensor([0.0, 0.3, 0.5])),
        (BetaLikelihood(), torch.tensor([0.2, 0.3, 1.5])),
    ],
)
def test_targets_outside_the_support_are_refused(likelihood, y):
    model = StreamingGP(ScaleKernel(RBFKernel()), likelihood)
    with pytest.raises(exceptions.SupportError, match="y_new has 1 of 3"):
        model.update(torch.rand(3, 1), y)
    assert model.summary.is_empty


@pytest.mark.parametrize("shift", [1, -1, 0.5])
def test_labels_of_no_class_are_refused(shift):
    model = softmax_model(3)
    x, y = data()
    with pytest.raises(exceptions.SupportError, match="labels 0 to 2"):
        model.update(x.double(), (y + shift).double())


@pytest.mark.parametrize("batch_shape", [[], [2], [3, 1]])
def test_a_wrong_number_of_classes_is_refused(batch_shape):
    likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    with pytest.raises(exceptions.ShapeError, match="one function per class"):
        StreamingGP(RBFKernel(), likelihood, batch_shape=torch.Size(batch_shape))


def test_labels_of_a_wrong_shape_are_refused():
    model = softmax_model(3)
    x, y = data()
    with pytest.raises(
        exceptions.ShapeError, match=r"expected labels of shape \(12,\)"
    ):
        model.update(x.double(), y[:-1])
    with pytest.raises(exceptions.ShapeError, match="y_new"):
        model.update(x.double(), y.expand(2, 12))


@pytest.mark.parametrize("likelihood", [MultitaskGaussianLikelihood(2), "Bernoulli"])
def test_likelihoods_of_several_targets_are_refused(likelihood):
    with pytest.raises(
        exceptions.UnsupportedLikelihoodError, match="expected_log_prob"
    ):
        StreamingGP(RBFKernel(), likelihood)


def test_power_ep_and_noise_are_for_gaussian_likelihoods():
    with pytest.raises(exceptions.UnsupportedLikelihoodError, match="alpha=0"):
        StreamingGP(RBFKernel(), BernoulliLikelihood(), alpha=0.5)
    model = StreamingGP(RBFKernel(), BernoulliLikelihood())
    x, y = data()
    with pytest.raises(exceptions.ArgumentError, match="Leave noise out"):
        model.update(x, y.clamp_max(1), torch.ones(12))


def test_labels_of_one_class_give_a_finite_model():
    model = StreamingGP(ScaleKernel(RBFKernel()), BernoulliLikelihood())
    x, y = data()
    result = model.update(x, torch.ones_like(y))
    assert torch.isfinite(result.bound)
    assert (model.predict(x).probs > 0.5).all()


def test_a_mean_is_learned_unless_targets_are_labels():
    assert isinstance(StreamingGP(RBFKernel()).mean_module, ConstantMean)
    counts = StreamingGP(RBFKernel(), PoissonLikelihood())
    assert isinstance(counts.mean_module, ConstantMean)
    labels = StreamingGP(RBFKernel(), BernoulliLikelihood())
    assert isinstance(labels.mean_module, ZeroMean)


def test_a_lengthscale_in_periods_is_not_set_to_the_range_of_the_inputs():
    """The period has the unit of the inputs; the lengthscale of the kernel has none."""
    x = torch.linspace(0, 600, 60, dtype=torch.float64).unsqueeze(-1)
    y = (torch.sin(2 * torch.pi * x[:, 0] / 90) > 0).double()
    kernel = PeriodicKernel()
    gp = StreamingGP(ScaleKernel(kernel), BernoulliLikelihood(), num_inducing=20)
    gp.double().update(x, y, num_steps=1)
    assert 0.5 < kernel.lengthscale.item() < 1
    assert kernel.period_length.item() == pytest.approx(90, rel=0.1)


def test_rounds_of_lbfgs_are_one_ascent():
    """One anchor of the trust region, steps that count on, and the whole trace."""
    x = torch.linspace(0, 6, 60, dtype=torch.float64).unsqueeze(-1)
    y = (torch.sin(2 * x[:, 0]) > 0).double()
    counts, moves = [], []
    for num_steps in (ROUND, 6 * ROUND):
        kernel = ScaleKernel(RBFKernel()).double()
        kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 1.0
        gp = StreamingGP(kernel, BernoulliLikelihood(), num_inducing=15).double()
        steps: list[int] = []
        result = gp.update(
            x,
            y,
            num_steps=num_steps,
            optimizer="lbfgs",
            trust_region=0.3,
            learn_inducing_points=False,
            callback=lambda step, bound, steps=steps: steps.append(step),
        )
        assert steps == list(range(1, len(steps) + 1))
        assert result.num_steps == len(result.bound_trace) == len(steps)
        counts.append(len(steps))
        moves.append(kernel.outputscale.log().item())
    assert counts[1] > counts[0]  # more than one round
    # Anchored anew in every round, they would go on.
    assert 0 < moves[1] < 1.5 * moves[0]

"""The memory: exact while it has room, independent of the model when it has not."""

from __future__ import annotations

import copy
import gc
import warnings
from unittest import mock

import pytest
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
)
from gpytorch.priors import GammaPrior

import oracles
from conftest import FULL
from torch_ssgp import StreamingGP, compression, settings
from torch_ssgp.compression import choose_points, first_of_each, recent_half
from torch_ssgp.exceptions import ArgumentError, BudgetWarning
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.memory import Memory, Rows
from torch_ssgp.points import ALIKE, least_missed

SIZES = {"M": 1, "2M": 2, "larger than the stream": 100}


def draw(n: int, dims: int = 1, top: float = 8.0):
    x = top * torch.rand(n, dims, dtype=torch.float64)
    y = torch.sin(x.sum(-1)) + 0.1 * torch.randn(n, dtype=torch.float64)
    return x, y


def make(num_inducing: int = 20, kernel=None, **options) -> StreamingGP:
    kernel = ScaleKernel(kernel or RBFKernel())
    return StreamingGP(kernel, num_inducing=num_inducing, **options).double()


def dense(model: StreamingGP):
    """Kernel and mean of a model as the oracles take them."""
    kernel, mean = copy.deepcopy((model.covar_module, model.mean_module))

    def k(x1, x2):
        padded = torch.cat([x2, x2[:1]])  # rectangular: no square-only shortcuts
        return kernel(x1, padded).to_dense()[..., :-1].detach()

    return k, lambda x: mean(x).detach()


# -- exactness ------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", [RBFKernel, MaternKernel])
@pytest.mark.parametrize("share_noise", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_any_split_equals_one_batch_whatever_the_memory(
    size, kernel, share_noise, alpha
):
    num_data = 600 if FULL else 300
    x, y = draw(num_data)
    z = torch.linspace(0, 8, 20).double().unsqueeze(-1)
    options = {"share_noise": share_noise, "alpha": alpha}
    batch = make(kernel=kernel(), **options)
    whole = batch.update(x, y, num_steps=0, inducing_points=z)
    model = make(kernel=kernel(), memory_size=20 * SIZES[size], **options)
    order, increments = torch.randperm(num_data), []
    for rows in order.split(37):
        result = model.update(x[rows], y[rows], num_steps=0, inducing_points=z)
        increments.append(result.increment)
    torch.testing.assert_close(result.bound, whole.bound, rtol=1e-9, atol=0)
    torch.testing.assert_close(sum(increments), whole.bound, rtol=1e-9, atol=0)
    torch.testing.assert_close(model(x).mean, batch(x).mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(model(x).variance, batch(x).variance, rtol=0, atol=1e-8)
    assert model.memory.num_data == model.summary.num_data == num_data


@pytest.mark.parametrize("size", SIZES)
def test_known_noises_equal_one_batch_whatever_the_memory(size):
    x, y = draw(300)
    noise = 0.01 + 0.1 * torch.rand_like(y)
    z = torch.linspace(0, 8, 20).double().unsqueeze(-1)

    def model(memory_size=None):
        likelihood = FixedNoiseGaussianLikelihood(torch.ones(1))
        return make(likelihood=likelihood, memory_size=memory_size)

    batch, stream = model(), model(20 * SIZES[size])
    whole = batch.update(x, y, noise, num_steps=0, inducing_points=z)
    for rows in torch.arange(300).split(23):
        result = stream.update(
            x[rows], y[rows], noise[rows], num_steps=0, inducing_points=z
        )
    torch.testing.assert_close(result.bound, whole.bound, rtol=1e-9, atol=0)
    torch.testing.assert_close(stream(x).mean, batch(x).mean, rtol=0, atol=1e-8)


def test_until_it_is_full_an_update_is_batch_inference_on_all_data():
    """With hyperparameters and inducing points learned on the way."""
    x, y = draw(90)
    model = make(num_inducing=8, memory_size=100)
    z = torch.linspace(0, 8, 8).double()
    for rows in torch.arange(90).split(15):
        result = model.update(x[rows], y[rows], num_steps=15, inducing_points=z)
        z = model.summary.inducing_points
        seen = slice(0, int(rows[-1]) + 1)
        k, m = dense(model)
        jitter = settings.jitter.of(torch.float64) * model.covar_module.outputscale
        q = oracles.batch_vfe(
            k,
            x[seen],
            y[seen],
            model.summary.inducing_points,
            model.likelihood.noise.detach(),
            m,
            jitter.item(),
        )
        torch.testing.assert_close(result.bound, q.bound, rtol=1e-9, atol=1e-9)
        assert result.memory_loss == 0


def test_the_posterior_from_a_memory_with_room_is_exact():
    x, y = draw(60)
    model = make(num_inducing=5, memory_size=100)
    for rows in torch.arange(60).split(20):
        model.update(x[rows], y[rows], num_steps=10)
    k, m = dense(model)
    x_test = torch.linspace(-1, 9, 20).double().unsqueeze(-1)
    exact = oracles.exact_gp(k, x, y, model.likelihood.noise.detach(), x_test, m)
    posterior = model(x_test, from_memory=True)
    torch.testing.assert_close(posterior.mean, exact.mean, rtol=0, atol=1e-6)
    variance = exact.cov.diagonal()
    torch.testing.assert_close(posterior.variance, variance, rtol=0, atol=1e-6)
    # Five inducing points cannot say as much.
    assert (model(x_test).mean - exact.mean).abs().max() > 1e-4
    torch.testing.assert_close(
        model.predict(x_test, from_memory=True).variance,
        variance + model.likelihood.noise,
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize("likelihood", [GaussianLikelihood, BernoulliLikelihood])
def test_forgetting_weighs_raw_data_like_rows(likelihood):
    """Whether the past is still raw or already rows, half of it is forgotten alike."""
    x, y = draw(80)
    y = (y > 0).double() if likelihood is BernoulliLikelihood else y
    z = torch.linspace(0, 8, 12).double().unsqueeze(-1)
    means, bounds = [], []
    for memory_size in (12, 500):
        model = make(12, likelihood=likelihood(), memory_size=memory_size)
        model.update(x[:50], y[:50], num_steps=0, inducing_points=z)
        result = model.update(
            x[50:], y[50:], num_steps=0, inducing_points=z, forget=0.5
        )
        assert model.summary.num_data == model.memory.num_data == 55
        means.append(model(x).mean)
        bounds.append(result.bound)
    # Sites that are rows cannot be read anew: close, not equal.
    tolerance = 1e-8 if likelihood is GaussianLikelihood else 0.05
    torch.testing.assert_close(*means, rtol=0, atol=tolerance)
    if likelihood is GaussianLikelihood:
        torch.testing.assert_close(*bounds, rtol=1e-9, atol=0)


def test_a_site_stays_revisable_while_its_datum_is_raw():
    """Labels in any order and split end where one batch ends."""
    x = torch.linspace(0, 8, 60).double().unsqueeze(-1)
    y = (torch.sin(x[:, 0]) > 0).double()
    z = x[::5]
    batch = make(12, likelihood=BernoulliLikelihood())
    whole = batch.update(x, y, num_steps=0, inducing_points=z)
    stream = make(12, likelihood=BernoulliLikelihood(), memory_size=100)
    for label in (0.0, 1.0):  # class by class
        rows = y == label
        result = stream.update(x[rows], y[rows], num_steps=0, inducing_points=z)
    torch.testing.assert_close(result.bound, whole.bound, rtol=1e-6, atol=0)
    torch.testing.assert_close(stream(x).mean, batch(x).mean, rtol=0, atol=1e-5)


def test_conditioning_remembers_as_an_update_does():
    x, y = draw(80)
    model = make(10, memory_size=200)
    model.update(x[:40], y[:40], num_steps=10)
    updated = copy.deepcopy(model)
    updated.update(x[40:], y[40:], num_steps=0)
    conditioned = model.condition_on_observations(x[40:], y[40:])
    for name in ("points", "y", "target", "noise", "weight", "U", "g"):
        ours, theirs = getattr(conditioned.memory, name), getattr(updated.memory, name)
        assert torch.equal(ours, theirs), name
    a, b = (m(x, from_memory=True).mean for m in (conditioned, updated))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


# -- which points ---------------------------------------------------------------------


def test_inputs_that_coincide_share_a_point_and_cost_no_capacity():
    points = torch.linspace(0, 8, 30).double().unsqueeze(-1)
    x = points.repeat(40, 1)[torch.randperm(1200)]
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(1200).double()
    model = make(15, memory_size=30)
    for rows in torch.arange(1200).split(100):
        result = model.update(x[rows], y[rows], num_steps=5)
        assert result.memory_loss < 1e-3
    assert model.memory.num_points <= 37  # the capacity and what may wait
    k, m = dense(model)
    exact = oracles.exact_gp(k, x, y, model.likelihood.noise.detach(), points, m)
    mean = model(points, from_memory=True).mean
    torch.testing.assert_close(mean, exact.mean, rtol=0, atol=1e-5)


def test_the_first_of_each_point_is_found_in_all_streams():
    points = torch.tensor([[[0.0], [1], [0], [2]], [[5.0], [5], [5], [5]]])
    first, copy_of = first_of_each(points)
    assert first.tolist() == [0, 1, 3] and copy_of.tolist() == [0, 1, 0, 2]
    points[1, 2] = 6.0  # no longer the same in both
    first, copy_of = first_of_each(points)
    assert first.tolist() == [0, 1, 2, 3] == copy_of.tolist()


def test_which_points_are_kept_does_not_depend_on_hyperparameters():
    x, y = draw(300)
    kept = []
    for lengthscale in (0.01, 1.0, 100.0):
        model = make(10, memory_size=30)
        model.covar_module.base_kernel.lengthscale = lengthscale
        model.update(x, y, num_steps=0, learn_inducing_points=True)
        kept.append(model.memory.points)
    z = [points[points[:, 0].argsort()] for points in kept]
    # Inducing points that do not learn are kept too, so compare what covers the range.
    for points in z:
        gaps = points[1:, 0] - points[:-1, 0]
        assert len(points) == 30 and gaps.max() < 1.0


def test_points_that_are_given_stay_in_front():
    x = torch.rand(50, 2).double()
    z = torch.rand(4, 2).double()
    nothing = x.new_zeros(())
    past = PseudoObservations(x.new_zeros(0, 0), x.new_zeros(0), nothing, nothing)
    points = choose_points(Rows(x[:0], past), x, torch.ones(50).double(), 10, 1e-8, z)
    assert points.shape == (10, 2) and torch.equal(points[:4], z)
    assert len(points.unique(dim=0)) == 10


@pytest.mark.parametrize("capacity", [15, 8])
def test_the_point_that_lowers_the_loss_most_is_kept_first(capacity):
    points, x = draw(12, 2)[0], draw(8, 2)[0]
    U, weight = torch.randn(15, 12).double(), torch.rand(8).double()
    past = PseudoObservations(U, U[:, 0], U.new_zeros(()), U.new_zeros(()))
    chosen = choose_points(Rows(points, past), x, weight, capacity, 1e-8, x[:1])

    every = torch.cat([x[:1], points, x[1:]])
    span = every.amax(0) - every.amin(0)
    scaled = every / (compression.SPACINGS * span / capacity**0.5)
    K = (-0.5 * torch.cdist(scaled, scaled).square()).exp() + 1e-8 * torch.eye(20)
    W = torch.zeros(23, 20).double()
    W[:15, 1:13], W[15, 0] = U, weight[0].sqrt()
    W[16:, 13:] = weight[1:].sqrt().diag()
    taken = [0]

    def loss(j: int) -> float:
        some = [*taken, j]
        Q = K[:, some] @ torch.linalg.solve(K[some][:, some], K[some])
        return float((W @ (K - Q) @ W.mT).trace())

    while len(taken) < capacity:
        taken.append(min(set(range(20)) - {*taken}, key=loss))
    torch.testing.assert_close(chosen, every[taken], rtol=0, atol=0)


def test_points_of_many_data_leave_room_for_those_of_few():
    old, new = torch.linspace(0, 1, 40).double(), torch.linspace(1.01, 2, 40).double()
    U = 10 * torch.eye(40).double()  # a hundred data each
    past = PseudoObservations(U, old, U.new_zeros(()), U.new_zeros(()))
    rows, x = Rows(old.unsqueeze(-1), past), new.unsqueeze(-1)
    chosen = choose_points(rows, x, torch.ones(40).double(), 40, 1e-6, x[:0])
    assert (chosen > 1).sum() > 15


@pytest.mark.parametrize("far", [1e2, 1e6])
def test_an_outlier_among_the_inputs_leaves_the_memory_as_fine_as_it_was(far):
    x = torch.cat([torch.rand(59, 1), torch.tensor([[far]])]).double()
    nothing = x.new_zeros(())
    past = PseudoObservations(x.new_zeros(0, 0), x.new_zeros(0), nothing, nothing)
    args = (Rows(x[:0], past), x, torch.ones(60).double(), 40, 1e-6, x[:0])
    points = choose_points(*args)[:, 0].sort().values
    assert len(points.unique()) == 40 and points[-1] == far
    assert points[1:-1].diff().max() < 0.15


def test_streams_of_a_batch_choose_as_each_would_alone():
    x = torch.stack([8 * torch.rand(60, 1), 1e3 * torch.rand(60, 1) ** 3]).double()
    nothing = x.new_zeros(2)
    past = PseudoObservations(x.new_zeros(2, 0, 0), x.new_zeros(2, 0), nothing, nothing)
    rows, weight = Rows(x[:, :0], past), torch.ones(2, 60).double()
    both = choose_points(rows, x, weight, 40, 1e-6, x[:, :0])
    for i in range(2):
        alone = Rows(x[i, :0], PseudoObservations(*(t[i] for t in past)))
        points = choose_points(alone, x[i], weight[i], 40, 1e-6, x[i, :0])
        assert {*points.flatten().tolist()} == {*both[i].flatten().tolist()}


@pytest.mark.parametrize("num_left", [19, 12])
def test_one_after_the_other_the_point_goes_that_is_missed_least(num_left, monkeypatch):
    monkeypatch.setattr("torch_ssgp.points.ALIKE", 0.0)  # all stand in for each other
    x = draw(20, 2)[0]
    K = ScaleKernel(MaternKernel()).double()(x).to_dense().detach()
    W = torch.randn(23, 20).double()
    chosen, left = least_missed(K, W.mT @ W, num_left), list(range(20))

    def missed(j: int) -> float:
        rest = [i for i in left if i != j]
        Q = K[:, rest] @ torch.linalg.solve(K[rest][:, rest], K[rest])
        return float((W @ (K - Q) @ W.mT).trace())

    while len(left) > num_left:
        left.remove(min(left, key=missed))
    assert chosen.tolist() == left


def test_points_that_go_together_are_missed_little_more():
    x = draw(120, 2)[0]
    K = MaternKernel().double()(x).to_dense().detach()
    weight = torch.cat([x.new_full((60,), 4.0), x.new_ones(60)])

    def missed(alike: float) -> float:
        with mock.patch("torch_ssgp.points.ALIKE", alike):
            some = least_missed(K, weight.diag(), 60)
        Q = K[:, some] @ torch.linalg.solve(K[some][:, some], K[some])
        return float(weight @ (K - Q).diagonal())

    assert missed(ALIKE) < 1.1 * missed(0.0)


# -- second starts --------------------------------------------------------------------


def test_a_bad_first_batch_costs_nothing_later():
    """One point says nothing about lengthscale and noise; sixty-four say all."""
    torch.manual_seed(3)
    x, y = draw(64)
    model, restarts = make(15, memory_size=100), 0
    for i in range(64):
        result = model.update(x[i : i + 1], y[i : i + 1], num_steps=20)
        restarts += int(result.restarted)
    batch = make(15)
    batch.update(x, y)
    error, best = (
        (m(x).mean - torch.sin(x[:, 0])).square().mean().sqrt() for m in (model, batch)
    )
    assert restarts > 0
    assert error < 1.1 * best


def test_a_fresh_start_is_tried_whenever_the_data_have_doubled(monkeypatch):
    from torch_ssgp.update.walk import Update

    fresh = []
    original = Update.fresh_objective
    monkeypatch.setattr(
        Update, "fresh_objective", lambda u: fresh.append(u.num_data) or original(u)
    )
    x, y = draw(40)
    model = make(5)
    for i in range(40):
        model.update(
            x[i : i + 1], y[i : i + 1], num_steps=1, learn_hyperparameters=True
        )
    assert fresh == [1, 2, 4, 8, 16, 32]


def test_a_fresh_start_respects_what_the_user_set_and_froze():
    x, y = draw(64)
    kernel = ScaleKernel(
        RBFKernel(
            lengthscale_constraint=Interval(0.5, 2.0),
            lengthscale_prior=GammaPrior(3.0, 3.0),
        )
    )
    model = StreamingGP(kernel, num_inducing=10).double()
    model.likelihood.noise = 0.3
    model.likelihood.noise_covar.raw_noise.requires_grad_(False)
    model.covar_module.outputscale = 7.0  # set, and free to learn
    start = copy.deepcopy(model.covar_module.raw_outputscale.detach())
    for i in range(0, 64, 4):
        model.update(x[i : i + 4], y[i : i + 4], num_steps=3)
        assert 0.5 < model.covar_module.base_kernel.lengthscale.item() < 2.0
        assert model.likelihood.noise.item() == pytest.approx(0.3)
    # A fresh start begins where the user did.
    names = [name for name, _ in model.covar_module.named_parameters()]
    position = len(list(model.mean_module.parameters())) + names.index(
        "raw_outputscale"
    )
    assert torch.equal(model.start.values[position], start)


def test_streams_of_a_batch_restart_on_their_own():
    shape = torch.Size([2])
    model = StreamingGP(
        ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape),
        num_inducing=10,
        batch_shape=shape,
    ).double()
    x, y = draw(40)
    both = torch.stack([y, torch.zeros_like(y)])
    seen = set()
    for i in range(0, 40, 4):
        result = model.update(x[i : i + 4], both[:, i : i + 4], num_steps=10)
        assert result.restarted.shape == (2,)
        seen.add(tuple(result.restarted.tolist()))
    assert torch.isfinite(model(x).mean).all()
    assert (model(x).mean[1]).abs().max() < 0.1


# -- bounds ---------------------------------------------------------------------------


def test_a_memory_stays_within_its_size():
    num_data = 400 if FULL else 150
    x, y = draw(num_data)
    model = make(8, memory_size=24)
    for i in range(0, num_data, 3):
        result = model.update(x[i : i + 3], y[i : i + 3], num_steps=0)
        assert result.num_remembered == model.memory.points.size(-2) <= 36
        assert model.memory.rows.shape[-1] == model.memory.num_points


def live_bytes() -> int:
    return sum(
        obj.numel() * obj.element_size()
        for obj in gc.get_objects()
        if issubclass(type(obj), torch.Tensor)
    )


def test_bytes_stay_where_they_are():
    model = make(8, memory_size=16)
    sizes = []
    model.update(*draw(40))
    for i in range(120):
        model.update(*draw(5), num_steps=2 if i % 20 == 0 else 0)
        if i % 20 == 19:
            gc.collect()
            sizes.append(live_bytes())
    assert max(sizes[1:]) <= 1.05 * sizes[1]


def test_a_warning_of_each_limit_comes_once():
    x = torch.linspace(0, 200, 2000).double().unsqueeze(-1)
    y = torch.sin(3 * x[:, 0])
    model = make(6, memory_size=12)
    model.covar_module.base_kernel.lengthscale = 0.5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in torch.arange(2000).split(200):
            model.update(x[rows], y[rows], num_steps=0)
    texts = [str(w.message) for w in caught if w.category is BudgetWarning]
    assert len(texts) == 2
    assert "num_inducing" in texts[0] and "nats per datum" in texts[0]
    assert "memory_size" in texts[1] and "forget" in texts[1]
    assert all(w.filename == __file__ for w in caught if w.category is BudgetWarning)


@pytest.mark.parametrize("size", [0, 5, 2.5, "many"])
def test_a_memory_smaller_than_the_model_is_refused(size):
    with pytest.raises(ArgumentError, match="memory_size"):
        make(10, memory_size=size)


def test_the_dtype_of_the_model_leaves_what_is_known_alone():
    x, y = draw(60)
    model = make(10)
    model.update(x, y, num_steps=10)
    before, variance = model.summary.covariance, model(x).variance
    model.float()
    assert model.summary.g.dtype == model.memory.g.dtype == torch.float64
    assert torch.equal(model.summary.covariance, before)
    assert model(x.float()).mean.dtype == torch.float32
    # Rounded hyperparameters and inputs alone; a rounded summary was off by two thirds.
    torch.testing.assert_close(
        model(x.float()).variance.double(), variance, rtol=1e-3, atol=1e-7
    )


def test_options_that_are_no_flags_are_refused():
    model = make(10)
    with pytest.raises(ArgumentError, match="learn_inducing_points"):
        model.update(*draw(5), learn_inducing_points="no")
    with pytest.raises(ArgumentError, match="share_noise"):
        make(10, share_noise="no")


def test_a_reset_forgets_data_and_keeps_hyperparameters():
    x, y = draw(60)
    model = make(10)
    model.update(x, y, num_steps=20)
    before = copy.deepcopy(model.covar_module.state_dict())
    model.reset()
    assert model.memory.is_empty and model.summary.is_empty
    assert model.covar_module.state_dict() == before
    result = model.update(x[:30], y[:30], num_steps=0)
    assert model.summary.num_data == 30
    torch.testing.assert_close(result.increment, result.bound)


# -- forgetting a stretch -------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
def test_the_recent_half_of_rows_is_their_marginal_likelihood(sign):
    """With values of old points integrated out: a Schur complement of the precision."""
    points = torch.rand(6, 2, dtype=torch.float64)
    U, g = torch.randn(9, 6).double(), torch.randn(9).double()
    rho, n = torch.tensor(0.7).double(), torch.tensor(50.0).double()
    rows = recent_half(Rows(points, PseudoObservations(U, g, rho, n)), 1, sign)
    order = (sign * points[:, 1]).argsort()
    old, new = order[:3], order[3:]
    assert torch.equal(rows.points, points[new])
    P, h = U.mT @ U, U.mT @ g
    gain = P[new][:, old] @ torch.linalg.inv(P[old][:, old])
    precision = P[new][:, new] - gain @ P[old][:, new]
    shift = h[new] - gain @ h[old]
    torch.testing.assert_close(rows.past.U.mT @ rows.past.U, precision)
    torch.testing.assert_close(rows.past.U.mT @ rows.past.g, shift)
    torch.testing.assert_close(rows.past.n, precision.sum() / P.sum() * n)
    assert rows.past.rho > 0


def test_data_are_counted_whatever_the_points_they_are_kept_at():
    x = torch.linspace(0, 1, 9).double().unsqueeze(-1)
    z = x.clone()
    z[1] = z[0] + 1e-4  # a pair of points: differences between them say a lot
    K = RBFKernel().double()
    K.lengthscale = 0.1
    weights = torch.linalg.solve(K(z).to_dense(), K(z, x).to_dense()).mT.detach()
    zero = x.new_zeros(())
    past = PseudoObservations(weights, x[:, 0], zero, zero + 9)
    assert float(recent_half(Rows(z, past), 0, 1).past.n) == pytest.approx(5, abs=0.5)


def test_a_state_of_a_stream_that_drifts_in_an_older_form_loads():
    """It said that a stream drifts, not since when: the evidence may say so again."""
    memory = Memory(torch.Size([2]))
    state = memory.state_dict()
    for name in ("noticed", "since_noticed"):
        del state[name]
    state["drifts"] = torch.tensor([True, False])
    memory.load_state_dict(state)
    assert not memory.noticed.any() and memory.noticed.shape == (2,)

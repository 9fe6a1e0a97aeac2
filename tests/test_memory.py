"""The memory: exact while it has room, independent of the model when it has not."""

from __future__ import annotations

import copy
import gc
import warnings

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
from torch_ssgp import StreamingGP
from torch_ssgp.exceptions import ArgumentError, BudgetWarning
from torch_ssgp.functional import PseudoObservations
from torch_ssgp.memory import Rows
from torch_ssgp.points import SPACINGS, choose_points, first_of_each


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


@pytest.mark.parametrize("kernel", [RBFKernel, MaternKernel])
@pytest.mark.parametrize("share_noise", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("every", [1, 3, 100])
def test_any_split_equals_one_batch_whenever_it_is_compressed(
    every, kernel, share_noise, alpha
):
    num_data = 600 if FULL else 300
    x, y = draw(num_data)
    z = torch.linspace(0, 8, 20).double().unsqueeze(-1)
    options = {"share_noise": share_noise, "alpha": alpha, "memory_size": 1000}
    batch = make(kernel=kernel(), **options)
    whole = batch.update(x, y, num_steps=0, inducing_points=z)
    model = make(kernel=kernel(), **options)
    parts, increments = torch.randperm(num_data).split(37), []
    for i, rows in enumerate(parts, 1):
        compresses = i % every == 0 or i == len(parts)
        points = z if compresses else None
        result = model.update(x[rows], y[rows], num_steps=0, inducing_points=points)
        increments.append(result.increment)
        assert model.memory.num_raw == 0 if compresses else result.projection_loss == 0
    torch.testing.assert_close(result.bound, whole.bound, rtol=1e-9, atol=0)
    torch.testing.assert_close(sum(increments), whole.bound, rtol=1e-9, atol=0)
    torch.testing.assert_close(model(x).mean, batch(x).mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(model(x).variance, batch(x).variance, rtol=0, atol=1e-8)
    assert model.memory.num_data == model.num_data == num_data


@pytest.mark.parametrize("every", [1, 3, 100])
def test_known_noises_equal_one_batch_whenever_they_are_compressed(every):
    x, y = draw(300)
    noise = 0.01 + 0.1 * torch.rand_like(y)
    z = torch.linspace(0, 8, 20).double().unsqueeze(-1)

    def model():
        likelihood = FixedNoiseGaussianLikelihood(torch.ones(1))
        return make(likelihood=likelihood, memory_size=1000)

    batch, stream = model(), model()
    whole = batch.update(x, y, noise, num_steps=0, inducing_points=z)
    parts = torch.arange(300).split(23)
    for i, rows in enumerate(parts, 1):
        points = z if i % every == 0 or i == len(parts) else None
        result = stream.update(
            x[rows], y[rows], noise[rows], num_steps=0, inducing_points=points
        )
    torch.testing.assert_close(result.bound, whole.bound, rtol=1e-9, atol=0)
    torch.testing.assert_close(stream(x).mean, batch(x).mean, rtol=0, atol=1e-8)


def test_known_noises_are_exact_until_the_memory_is_full():
    x, y = draw(60)
    noise = 0.01 + 0.1 * torch.rand_like(y)
    model = make(likelihood=FixedNoiseGaussianLikelihood(torch.ones(1)), memory_size=60)
    for rows in torch.arange(60).split(7):
        result = model.update(x[rows], y[rows], noise[rows], num_steps=0)
    k, m = dense(model)
    x_test = torch.linspace(-1, 9, 20).double().unsqueeze(-1)
    exact = oracles.exact_gp(k, x, y, noise, x_test, m)
    torch.testing.assert_close(result.bound, exact.log_marginal, rtol=1e-9, atol=0)
    posterior = model(x_test)
    torch.testing.assert_close(posterior.mean, exact.mean, rtol=0, atol=1e-9)
    variance = exact.cov.diagonal()
    torch.testing.assert_close(posterior.variance, variance, rtol=0, atol=1e-9)


@pytest.mark.parametrize("likelihood", [GaussianLikelihood, BernoulliLikelihood])
def test_forgetting_weighs_raw_data_like_rows(likelihood):
    """Whether the past is still raw or already rows, half of it is forgotten alike."""
    x, y = draw(80)
    y = (y > 0).double() if likelihood is BernoulliLikelihood else y
    z = torch.linspace(0, 8, 12).double().unsqueeze(-1)
    means, bounds = [], []
    for points in (z, None):  # those of the first update
        model = make(12, likelihood=likelihood(), memory_size=500)
        model.update(x[:50], y[:50], num_steps=0, inducing_points=points)
        assert model.memory.num_raw == (50 if points is None else 0)
        result = model.update(
            x[50:], y[50:], num_steps=0, inducing_points=z, forget=0.5
        )
        assert model.num_data == model.memory.num_data == 55
        means.append(model(x).mean)
        bounds.append(result.bound)
    # Sites that are rows cannot be read anew: close, not equal.
    tolerance = 1e-8 if likelihood is GaussianLikelihood else 0.05
    torch.testing.assert_close(*means, rtol=0, atol=tolerance)
    if likelihood is GaussianLikelihood:
        torch.testing.assert_close(*bounds, rtol=1e-9, atol=0)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_site_stays_revisable_while_its_datum_is_raw(compressed):
    """Labels in any order and split end where one batch ends."""
    x = torch.linspace(0, 8, 60).double().unsqueeze(-1)
    y = (torch.sin(x[:, 0]) > 0).double()
    z = x[::5] if compressed else None
    batch = make(12, likelihood=BernoulliLikelihood(), memory_size=100)
    whole = batch.update(x, y, num_steps=0, inducing_points=z)
    stream = make(12, likelihood=BernoulliLikelihood(), memory_size=100)
    stream.update(x[y == 0], y[y == 0], num_steps=0)  # class by class
    result = stream.update(x[y == 1], y[y == 1], num_steps=0, inducing_points=z)
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
    torch.testing.assert_close(conditioned(x).mean, updated(x).mean, rtol=0, atol=1e-10)


# -- which points ---------------------------------------------------------------------


def test_inputs_that_coincide_share_a_point():
    """Forty data at each of thirty inputs: thirty points lose nothing, ever."""
    points = torch.linspace(0, 8, 30).double().unsqueeze(-1)
    x = points.repeat(40, 1)[torch.randperm(1200)]
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(1200).double()
    model = make(30, memory_size=45)
    for rows in torch.arange(1200).split(100):
        result = model.update(x[rows], y[rows], num_steps=5, forget=1.0)
        assert result.projection_loss < 1e-3
    assert model.points.size(-2) == 30
    k, m = dense(model)
    exact = oracles.exact_gp(k, x, y, model.likelihood.noise.detach(), points, m)
    torch.testing.assert_close(model(points).mean, exact.mean, rtol=0, atol=1e-5)
    variance = exact.cov.diagonal()
    torch.testing.assert_close(model(points).variance, variance, rtol=0, atol=1e-5)


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
        model = make(30)
        model.covar_module.base_kernel.lengthscale = lengthscale
        model.update(x, y, num_steps=0)
        kept.append(model.points[:, 0].sort().values)
    assert torch.equal(kept[0], kept[1]) and torch.equal(kept[1], kept[2])
    assert len(kept[0]) == 30 and kept[0].diff().max() < 1.0


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
    scaled = every / (SPACINGS * span / capacity**0.5)
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


def test_a_fresh_start_is_tried_whenever_the_data_have_doubled():
    x, y = draw(40)
    model, fresh = make(5), []
    for i in range(40):
        model.update(x[i : i + 1], y[i : i + 1], num_steps=1, learn=True, forget=1.0)
        fresh.append(int(model.memory.count().started_at))
    assert sorted(set(fresh)) == [1, 2, 4, 8, 16, 32]


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


@pytest.mark.parametrize("memory_size", [8, 12, 24])
@pytest.mark.parametrize("size", [1, 3, 40])
def test_a_memory_stays_within_its_size(memory_size, size):
    num_data = 400 if FULL else 120
    x, y = draw(num_data)
    model = make(8, memory_size=memory_size)
    for rows in torch.arange(num_data).split(size):
        result = model.update(x[rows], y[rows], num_steps=0)
        assert result.num_rows == model.memory.num_rows <= memory_size
        assert result.num_inducing == model.points.size(-2) <= memory_size


def live_bytes() -> int:
    gc.collect()
    return sum(
        obj.numel() * obj.element_size()
        for obj in gc.get_objects()
        if issubclass(type(obj), torch.Tensor)
    )


def test_bytes_stay_where_they_are():
    """Of single points, some of them learned from, at the same fill of the memory."""
    num_updates = 10_000 if FULL else 2_000
    model, sizes = make(8, memory_size=16), []
    x, y = draw(num_updates)
    for i in range(num_updates):
        options = {"num_steps": 2 if i % 100 == 50 else 0, "forget": 1.0}
        model.update(x[i : i + 1], y[i : i + 1], **options)
        if i % 198 == 197:  # a multiple of the nine data between two compressions
            sizes.append(live_bytes())
    assert max(sizes) == min(sizes[1:]) and len(sizes) > 9


def test_a_warning_of_a_compression_that_loses_much_comes_once():
    x = torch.linspace(0, 200, 2000).double().unsqueeze(-1)
    y = torch.sin(3 * x[:, 0])
    model = make(6, memory_size=12)
    model.covar_module.base_kernel.lengthscale = 0.5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in torch.arange(2000).split(200):
            model.update(x[rows], y[rows], num_steps=0)
    ours = [w for w in caught if w.category is BudgetWarning]
    assert len(ours) == 1 and ours[0].filename == __file__
    text = str(ours[0].message)
    assert "Raise num_inducing" in text and "nats per datum" in text


@pytest.mark.parametrize("size", [0, 5, 2.5, "many"])
def test_a_memory_smaller_than_the_model_is_refused(size):
    with pytest.raises(ArgumentError, match="memory_size"):
        make(10, memory_size=size)


def test_the_dtype_of_the_model_leaves_what_is_known_alone():
    x, y = draw(60)
    model = make(10)
    model.update(x, y, num_steps=10)
    before, variance = dict(model.memory.named_buffers()), model(x).variance
    model.float()
    for name, buffer in model.memory.named_buffers():
        assert buffer.dtype == before[name].dtype and torch.equal(buffer, before[name])
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
    assert model.num_data == 30
    torch.testing.assert_close(result.increment, result.bound)

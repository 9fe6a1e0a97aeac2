"""Policies choose points the bound agrees with, and no more than needed."""

from __future__ import annotations

import copy
import math
import warnings

import numpy
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from conftest import FULL
from torch_ssgp import (
    AdaptiveBudget,
    AllocatorPolicy,
    GreedyInformation,
    GreedyPolicy,
    GreedyVariance,
    InducingPolicy,
    KeepOld,
    RandomReplace,
    StreamingGP,
)
from torch_ssgp.exceptions import ArgumentError, BudgetWarning, InputError
from torch_ssgp.inducing import Candidates
from torch_ssgp.points import merge_duplicates
from torch_ssgp.validation import check_choice
from workbench import streams

POLICIES: list[InducingPolicy] = [
    KeepOld(),
    RandomReplace(0.3),
    GreedyVariance(),
    GreedyInformation(),
    AdaptiveBudget(),
    AdaptiveBudget(policy=GreedyVariance()),
]
GREEDY: list[GreedyPolicy] = [GreedyVariance(), GreedyInformation()]


def name(policy: object) -> str:
    return type(policy).__name__


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, dtype=torch.float64, generator=generator)


def make_model(
    policy: InducingPolicy | None = None,
    num_inducing: int = 10,
    lengthscale: float = 0.2,
    batch_shape: tuple[int, ...] = (),
    memory_size: int | None = None,
) -> StreamingGP:
    """A model that compresses at every update, unless its memory is larger."""
    kernel = ScaleKernel(RBFKernel())
    model = StreamingGP(
        kernel,
        num_inducing=num_inducing,
        memory_size=memory_size or num_inducing,
        inducing_policy=policy,
        batch_shape=torch.Size(batch_shape),
    ).double()
    kernel.base_kernel.lengthscale, model.likelihood.noise = lengthscale, 0.01
    return model


class Recorded(InducingPolicy):
    """Remembers what a policy sees."""

    def __call__(self, candidates: Candidates) -> Tensor:
        self.seen = candidates
        return candidates.x[..., :1, :]


def candidates_of(model: StreamingGP, x: Tensor) -> Candidates:
    """What a policy sees in the next update."""
    other, policy = copy.deepcopy(model), Recorded()
    other.inducing_policy = policy
    other.update(x, torch.zeros(x.shape[:-1]).double(), num_steps=0)
    return policy.seen


def loss_of(model: StreamingGP, x: Tensor, z: Tensor) -> Tensor:
    """Nats that the next update loses at given points."""
    other, y = copy.deepcopy(model), torch.zeros(x.shape[:-1]).double()
    return other.update(x, y, num_steps=0, inducing_points=z).projection_loss


def places(z: Tensor) -> set[float]:
    return set(z.flatten().tolist())


@pytest.mark.parametrize("policy", GREEDY, ids=name)
@pytest.mark.parametrize("batch_shape", [(), (2,)], ids=str)
def test_the_loss_of_a_ranking_is_that_of_the_bound(policy, batch_shape):
    """For any number of points taken, jitter and past included."""
    model = make_model(GreedyInformation(), 15, batch_shape=batch_shape)
    x = draw(*batch_shape, 40, 1)
    model.update(x, torch.sin(9 * x[..., 0]), num_steps=0)
    x = draw(*batch_shape, 30, 1, seed=1)
    with torch.no_grad():
        ranking = policy.rank(candidates_of(model, x))
    for count in (1, 5, 12):
        lost = loss_of(model, x, ranking.points[..., :count, :])
        torch.testing.assert_close(
            ranking.loss[..., count - 1], lost, rtol=1e-4, atol=1e-6
        )


def test_greedy_information_takes_the_point_that_lowers_the_loss_most():
    model = make_model(GreedyInformation(), 6)
    x = draw(30, 1)
    model.update(x, torch.sin(9 * x[:, 0]), num_steps=0)
    x = draw(20, 1, seed=1)
    candidates = candidates_of(model, x)
    with torch.no_grad():
        points = GreedyInformation().rank(candidates).points
    for k in range(4):
        ours = loss_of(model, x, points[: k + 1])
        best = min(
            loss_of(model, x, torch.cat([points[:k], other[None]]))
            for other in candidates.points
            if not (points[:k] == other).all(-1).any()
        )
        assert ours <= best * (1 + 1e-6) + 1e-9


def test_greedy_variance_is_pivoted_cholesky():
    """Every point is the least certain one given those before it."""
    model = make_model()
    candidates = candidates_of(model, draw(50, 1))
    kernel = model.covar_module
    with torch.no_grad():
        points = GreedyVariance().rank(candidates).points
        for k in (1, 4, 8):
            z, x = points[:k], candidates.x
            K_zz = kernel(z).to_dense() + 1e-8 * torch.eye(k).double()
            K_zx = kernel(z, x).to_dense()
            left = kernel(x, diag=True) - (K_zx * torch.linalg.solve(K_zz, K_zx)).sum(0)
            assert torch.equal(points[k], x[left.argmax()])


def test_information_keeps_what_the_past_relies_on_and_variance_does_not():
    """A thousand data on the left, one far outlier of an input on the right."""
    x_left, x_right = draw(1000, 1), torch.tensor([[50.0]]).double()
    losses = {}
    for policy in GREEDY:
        model = make_model(policy, 4, lengthscale=0.4)
        model.update(x_left, torch.sin(3 * x_left[:, 0]), num_steps=0)
        result = model.update(x_right, torch.zeros(1).double(), num_steps=0)
        losses[name(policy)] = float(result.projection_loss)
    assert losses["GreedyInformation"] < 0.5 * losses["GreedyVariance"]


def test_keep_old_keeps_all_and_fills_the_room():
    model = make_model(KeepOld(), 10)
    first = model.update(draw(6, 1), torch.zeros(6).double(), num_steps=0)
    old = model.points
    second = model.update(2 + draw(20, 1), torch.zeros(20).double(), num_steps=0)
    assert first.num_inducing == 6 and second.num_inducing == 10
    kept = model.points
    assert torch.equal(kept[:6], old)
    model.update(4 + draw(20, 1), torch.zeros(20).double(), num_steps=0)
    assert torch.equal(model.points, kept)


def test_random_replace_swaps_its_fraction_and_repeats_itself():
    def run(seed: int) -> Tensor:
        model = make_model(RandomReplace(0.3, seed=seed), 10, lengthscale=0.02)
        model.update(draw(50, 1), torch.zeros(50).double(), num_steps=0)
        old = places(model.points)
        model.update(draw(50, 1, seed=1), torch.zeros(50).double(), num_steps=0)
        assert len(places(model.points)) == 10
        assert len(places(model.points) & old) == 7
        return model.points

    state = torch.get_rng_state()
    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("policy", POLICIES, ids=name)
@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(30, 2),
        torch.tensor([[0.0, 0.0], [1.0, 1.0]]).repeat(15, 1),
        torch.cat([torch.zeros(1, 2), torch.full((1, 2), 1e-7)]).repeat(15, 1),
        torch.ones(1, 2),
    ],
    ids=["identical", "two places", "nearly identical", "one point"],
)
def test_copies_count_once(policy, x):
    x = x.double()
    num_places = 2 if bool((x == 1).any()) and len(x) > 1 else 1
    model = make_model(policy, 20)
    for _ in range(3):
        result = model.update(
            x, torch.ones(len(x)).double(), num_steps=5, learn_inducing_points=False
        )
        assert result.num_inducing == num_places
        assert bool(torch.isfinite(model(x).variance).all())


@pytest.mark.parametrize("policy", POLICIES, ids=name)
def test_fewer_candidates_than_the_budget_are_all_that_is_taken(policy):
    model = make_model(policy, 50, lengthscale=0.01)
    result = model.update(draw(7, 1), torch.zeros(7).double(), num_steps=0)
    assert result.num_inducing == 7


def test_merging_keeps_points_that_are_only_close_to_merged_ones():
    """Of a chain of tiny steps one point per distance that jitter can tell stays."""
    kernel = RBFKernel().double()
    kernel.lengthscale = 1.0
    z = torch.linspace(0, 1e-2, 1001).double().unsqueeze(-1)
    with torch.no_grad():
        merged = merge_duplicates(kernel, z, 1e-8)
    # var(f(z) - f(z')) = distance² for short distances
    assert merged.diff(dim=0).min() > math.sqrt(2e-8)
    assert merged.diff(dim=0).max() < math.sqrt(2e-8) + 2e-5
    assert torch.equal(merged[0], z[0])


def test_merging_leaves_streams_of_a_batch_the_same_number():
    kernel = RBFKernel().double()
    z = torch.stack([torch.zeros(4, 1), torch.tensor([[0.0], [1.0], [1.0], [2.0]])])
    with torch.no_grad():
        merged = merge_duplicates(kernel, z.double(), 1e-8)
    assert merged.shape == (2, 3, 1)
    assert merged[1].flatten().tolist() == [0.0, 1.0, 2.0]


# -- the number of points -----------------------------------------------------------


def test_the_budget_grows_with_the_range_and_the_error_stays():
    stream = streams.growing_range(factor=15, num_test=500)
    model = make_model(AdaptiveBudget(), 200, lengthscale=1.0)
    counts = [
        model.update(x, y, learn_hyperparameters=False, num_steps=10).num_inducing
        for x, y in stream.batches
    ]
    # Linear after the first batches: as many points per batch early and late.
    early, late = counts[7] - counts[2], counts[14] - counts[9]
    assert 10 <= early <= 25 and abs(late - early) <= 2
    error = model.predict(stream.x_test).mean - stream.y_test
    halves = error.square().chunk(2)
    rmse = [half.mean().sqrt().item() for half in halves]
    assert max(rmse) < 0.115  # the noise is 0.1


def test_the_budget_stays_where_a_stream_repeats_itself():
    stream = streams.revisiting(passes=20, batch=50)
    model = make_model(AdaptiveBudget(), 100, lengthscale=1.0)
    counts = [model.update(x, y, num_steps=20).num_inducing for x, y in stream.batches]
    second_pass, last = counts[3], counts[-1]
    assert 0.8 * second_pass <= last <= 1.1 * second_pass


def test_the_budget_shrinks_when_the_kernel_grows_smoother():
    model = make_model(AdaptiveBudget(), 100, lengthscale=0.05)
    x = draw(200, 1)
    y = torch.sin(3 * x[:, 0])
    rough = model.update(x, y, num_steps=0).num_inducing
    model.covar_module.base_kernel.lengthscale = 0.5
    smooth = model.update(x, y, num_steps=0).num_inducing
    assert smooth < rough / 3


def test_the_loss_stays_below_the_tolerance_where_there_is_room():
    for tolerance in (1e-1, 1e-3):
        model = make_model(AdaptiveBudget(tolerance), 100)
        for seed in range(3):
            x = seed + draw(60, 1, seed=seed)
            y = torch.sin(5 * x[:, 0])
            result = model.update(x, y)
            assert result.projection_loss <= tolerance * model.num_data
    assert result.num_inducing < 100


def test_limits_of_the_budget_hold():
    x = draw(100, 1)
    y = torch.sin(5 * x[:, 0])
    least = make_model(AdaptiveBudget(1e3, min_inducing=7), 20, lengthscale=0.05)
    assert least.update(x, y, num_steps=0).num_inducing == 7
    for limit, num_inducing in ((10, 20), (20, 10)):  # the smaller one holds
        most = make_model(AdaptiveBudget(1e-9, 1, limit), num_inducing, 0.01)
        assert most.update(x, y, num_steps=0).num_inducing == 10
    model = make_model(AdaptiveBudget(1e-9), 20, lengthscale=0.01)
    assert model.update(x, y, num_steps=0).num_inducing == 20


def test_bad_settings_of_policies_are_named():
    for make, message in [
        (lambda: AdaptiveBudget(0.0), "tolerance is 0.0"),
        (lambda: AdaptiveBudget(min_inducing=5, max_inducing=3), "max_inducing is 3"),
        (lambda: AdaptiveBudget("a"), "tolerance is 'a'"),
        (lambda: AdaptiveBudget(policy=KeepOld()), "policy is a KeepOld"),
        (lambda: AdaptiveBudget(policy=GreedyVariance), "the class GreedyVariance"),
        (lambda: RandomReplace(1.5), "fraction is 1.5"),
        (lambda: RandomReplace("a"), "fraction is 'a'"),
        (lambda: RandomReplace(seed=1.5), "seed is 1.5"),
        (lambda: GreedyVariance(0), "max_candidates is 0"),
        (lambda: AllocatorPolicy(object()), "allocator is an object"),
        (lambda: AllocatorPolicy(Allocator), "allocator is the class Allocator"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            make()


class Allocator:
    """Returns what it was given, like a policy or an allocator of a user."""

    def __init__(self, chosen: object) -> None:
        self.chosen = chosen

    def allocate_inducing_points(self, **options: object) -> object:
        return self.chosen


@pytest.mark.parametrize(
    "chosen, message",
    [
        (None, "is None; expected torch.float64 of shape (2, m, 1)"),
        ([0.0], "is a list"),
        (torch.zeros(3).double(), "of shape (3,)"),
        (torch.zeros(4, 1).double(), "of shape (4, 1)"),
        (torch.zeros(2, 0, 1).double(), "of shape (2, 0, 1)"),
        (torch.zeros(2, 4, 2).double(), "of shape (2, 4, 2)"),
        (torch.zeros(2, 4, 1), "is torch.float32"),
        (torch.full((2, 4, 1), math.nan).double(), "has 8 NaN"),
    ],
    ids=str,
)
def test_a_choice_that_cannot_be_used_is_named(chosen, message):
    policy, x = AllocatorPolicy(Allocator(chosen)), draw(2, 5, 1)
    with pytest.raises(InputError, match="The choice of AllocatorPolicy") as caught:
        check_choice(chosen, policy, x)
    assert message in str(caught.value)
    check_choice(x[:, :1], policy, x)


# -- what an update says ------------------------------------------------------------


def test_one_warning_says_that_there_are_too_few_points():
    model = make_model(num_inducing=3, lengthscale=0.05)
    x = draw(60, 1)
    y = torch.sin(20 * x[:, 0])
    with pytest.warns(BudgetWarning, match="Raise num_inducing") as caught:
        model.update(x, y, num_steps=0)
        model.update(x, y, num_steps=0)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        enough = make_model(num_inducing=60, lengthscale=0.05)
        enough.update(x, y, num_steps=0)
        # The choice of the caller is not a matter of budget.
        result = enough.update(x, y, num_steps=0, inducing_points=x[:3])
    assert result.projection_loss > 120


def test_advice_names_the_limit_that_was_met():
    assert KeepOld().advice(3, 20) == "Raise num_inducing"
    assert AdaptiveBudget().advice(20, 20) == "Raise num_inducing"
    assert "tolerance" in AdaptiveBudget(0.9).advice(8, 20)
    assert "max_inducing" in AdaptiveBudget(max_inducing=8).advice(8, 20)
    assert AdaptiveBudget(max_inducing=30).advice(20, 20) == "Raise num_inducing"


def test_allocators_of_botorch_plug_in():
    allocators = pytest.importorskip("botorch.models.utils.inducing_point_allocators")
    allocator = allocators.GreedyVarianceReduction()
    x = draw(40, 1)
    chosen = {}
    for policy in (AllocatorPolicy(allocator), GreedyVariance()):
        model = make_model(policy, 8)
        for part in (x, 1 + x):
            model.update(part, torch.sin(5 * part[:, 0]), num_steps=0)
        chosen[name(policy)] = model.points
    assert chosen["AllocatorPolicy"].shape == (8, 1)
    batched = make_model(AllocatorPolicy(allocator), 8, batch_shape=(2,))
    batched.update(x, torch.sin(5 * x[:, 0]).expand(2, -1), num_steps=0)
    assert batched.points.shape == (2, 8, 1)


# -- long and strange streams -------------------------------------------------------


def test_many_single_points():
    """The fit of a batch."""
    num_points = 2000 if FULL else 300
    stream = streams.repeated_iid(batches=1, batch=num_points)
    x, y = stream.batches[0]
    model = make_model(None, 100, lengthscale=1.0, memory_size=150)
    batch = make_model(None, 100, lengthscale=1.0)
    for x_new, y_new in zip(x.split(1), y.split(1), strict=True):
        model.update(x_new, y_new, num_steps=0)
    batch.update(x, y, num_steps=0)
    assert model.num_data == num_points
    error = {
        key: (m.predict(stream.x_test).mean - stream.y_test).square().mean().sqrt()
        for key, m in (("stream", model), ("batch", batch))
    }
    assert error["stream"] < 1.02 * error["batch"]


def test_single_points_with_learning():
    stream = streams.repeated_iid(batches=40, batch=1)
    model = StreamingGP(ScaleKernel(MaternKernel()), num_inducing=30).double()
    for x, y in stream.batches:
        result = model.update(x, y, num_steps=5)
        assert bool(torch.isfinite(result.bound))
    assert model.num_data == 40


def test_an_update_refuses_a_choice_that_cannot_be_used():
    class Bad(KeepOld):
        def __call__(self, candidates):
            return None

    model, x = make_model(Bad()), draw(20, 1)
    with pytest.raises(InputError, match="The choice of Bad"):
        model.update(x, x[:, 0], num_steps=0)
    assert model.memory.is_empty


def test_a_policy_is_asked_only_when_the_memory_is_full():
    class Counted(GreedyInformation):
        num_calls = 0

        def __call__(self, candidates):
            self.num_calls += 1
            return super().__call__(candidates)

    policy = Counted()
    model, x = make_model(policy, 10, memory_size=30), draw(40, 1)
    for i in range(40):
        model.update(x[i : i + 1], x[i : i + 1, 0], num_steps=0)
        assert policy.num_calls == (i >= 30)


def test_the_warning_speaks_of_the_tolerance_where_there_is_room():
    model, x = make_model(AdaptiveBudget(0.9), 20, lengthscale=0.05), draw(60, 1)
    with pytest.warns(BudgetWarning, match="Lower tolerance"):
        result = model.update(x, torch.sin(20 * x[:, 0]), num_steps=0)
    assert result.num_inducing < 20


def test_numbers_of_steps_may_be_numpys():
    model, x = make_model(num_inducing=numpy.int64(5)), draw(20, 1)
    assert model.update(x, x[:, 0], num_steps=numpy.int64(3)).num_steps == 3

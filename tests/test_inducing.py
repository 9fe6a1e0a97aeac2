"""Policies choose points the bound agrees with, and no more than needed."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
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
from torch_ssgp.exceptions import BudgetWarning, InputError
from torch_ssgp.inducing import Candidates
from torch_ssgp.points import merge_duplicates
from workbench import streams

GREEDY: list[GreedyPolicy] = [GreedyVariance(), GreedyInformation()]
ADAPTIVE = [AdaptiveBudget(), AdaptiveBudget(policy=GreedyVariance())]
POLICIES: list[InducingPolicy] = [KeepOld(), RandomReplace(0.3), *GREEDY, *ADAPTIVE]


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


def condition(model: StreamingGP, x: Tensor, frequency: float = 5.0, **options):
    """An update that learns nothing, with a sine of the first input."""
    return model.update(x, torch.sin(frequency * x[..., 0]), num_steps=0, **options)


class Recorded(InducingPolicy):
    """Remembers what a policy sees."""

    def __call__(self, candidates: Candidates) -> Tensor:
        self.seen = candidates
        return candidates.x[..., :1, :]


def candidates_of(model: StreamingGP, x: Tensor) -> Candidates:
    """What a policy sees in the next update."""
    other, policy = copy.deepcopy(model), Recorded()
    other.inducing_policy = policy
    condition(other, x)
    return policy.seen


def loss_of(model: StreamingGP, x: Tensor, z: Tensor) -> Tensor:
    """Nats that the next update loses at given points."""
    return condition(copy.deepcopy(model), x, inducing_points=z).projection_loss


@pytest.mark.parametrize("policy", GREEDY, ids=name)
@pytest.mark.parametrize("batch_shape", [(), (2,)], ids=str)
def test_the_loss_of_a_ranking_is_that_of_the_bound(policy, batch_shape):
    """For any number of points taken, jitter and past included."""
    model = make_model(GreedyInformation(), 15, batch_shape=batch_shape)
    condition(model, draw(*batch_shape, 40, 1))
    x = draw(*batch_shape, 30, 1, seed=1)
    with torch.no_grad():
        points, loss = policy.rank(candidates_of(model, x))
    for k in (1, 5, 12):
        lost = loss_of(model, x, points[..., :k, :])
        torch.testing.assert_close(loss[..., k - 1], lost, rtol=1e-4, atol=1e-6)


def test_greedy_information_takes_the_point_that_lowers_the_loss_most():
    model, x = make_model(GreedyInformation(), 6), draw(20, 1, seed=1)
    condition(model, draw(30, 1))
    candidates = candidates_of(model, x)
    with torch.no_grad():
        points = GreedyInformation().rank(candidates).points
    for k in range(4):
        best = min(
            loss_of(model, x, torch.cat([points[:k], other[None]]))
            for other in candidates.points
            if not (points[:k] == other).all(-1).any()
        )
        assert loss_of(model, x, points[: k + 1]) <= best * (1 + 1e-6) + 1e-9


def test_greedy_variance_is_pivoted_cholesky():
    """Every point is the least certain one given those before it."""
    model = make_model()
    candidates, kernel = candidates_of(model, draw(50, 1)), model.covar_module
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
    losses = []
    for policy in GREEDY:
        model = make_model(policy, 4, lengthscale=0.4)
        condition(model, draw(1000, 1), 3)
        result = condition(model, torch.tensor([[50.0]]).double())
        losses.append(float(result.projection_loss))
    variance, information = losses
    assert information < 0.5 * variance


def test_keep_old_keeps_all_and_fills_the_room():
    model = make_model(KeepOld(), 10)
    assert condition(model, draw(6, 1)).num_inducing == 6
    old = model.points
    assert condition(model, 2 + draw(20, 1)).num_inducing == 10
    kept = model.points
    assert torch.equal(kept[:6], old)
    condition(model, 4 + draw(20, 1))
    assert torch.equal(model.points, kept)


def test_random_replace_swaps_its_fraction_and_repeats_itself():
    def run(seed: int) -> Tensor:
        model = make_model(RandomReplace(0.3, seed=seed), 10, lengthscale=0.02)
        places = []
        for stream in (0, 1):
            condition(model, draw(50, 1, seed=stream))
            places.append(set(model.points.flatten().tolist()))
        assert len(places[1]) == 10 and len(places[0] & places[1]) == 7
        return model.points

    state = torch.get_rng_state()
    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("policy", POLICIES, ids=name)
@pytest.mark.parametrize(
    "places, count",
    [([0.0], 30), ([0.0, 1.0], 15), ([0.0, 1e-7], 15), ([1.0], 1)],
    ids=["identical", "two places", "nearly identical", "one point"],
)
def test_copies_count_once(policy, places, count):
    x = torch.tensor(places).double().repeat(count).unsqueeze(-1).expand(-1, 2)
    model = make_model(policy, 20)
    for _ in range(3):
        y = torch.ones(len(x)).double()
        result = model.update(x, y, num_steps=5, learn_inducing_points=False)
        assert result.num_inducing == (2 if 1.0 in places[1:] else 1)
        assert bool(torch.isfinite(model(x).variance).all())


@pytest.mark.parametrize("policy", POLICIES, ids=name)
def test_fewer_candidates_than_the_budget_are_all_that_is_taken(policy):
    model = make_model(policy, 50, lengthscale=0.01)
    assert condition(model, draw(7, 1)).num_inducing == 7


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
    z = torch.stack([torch.zeros(4, 1), torch.tensor([[0.0], [1.0], [1.0], [2.0]])])
    with torch.no_grad():
        merged = merge_duplicates(RBFKernel().double(), z.double(), 1e-8)
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
    for half in error.chunk(2):
        assert half.square().mean().sqrt() < 0.115  # the noise is 0.1


def test_the_budget_stays_where_a_stream_repeats_itself():
    stream = streams.revisiting(passes=20, batch=50)
    model = make_model(AdaptiveBudget(), 100, lengthscale=1.0)
    counts = [model.update(x, y, num_steps=20).num_inducing for x, y in stream.batches]
    second_pass, last = counts[3], counts[-1]
    assert 0.8 * second_pass <= last <= 1.1 * second_pass


def test_the_budget_shrinks_when_the_kernel_grows_smoother():
    model, x = make_model(AdaptiveBudget(), 100, lengthscale=0.05), draw(200, 1)
    rough = condition(model, x, 3).num_inducing
    model.covar_module.base_kernel.lengthscale = 0.5
    assert condition(model, x, 3).num_inducing < rough / 3


@pytest.mark.parametrize("tolerance", [1e-1, 1e-3])
def test_the_loss_stays_below_the_tolerance_where_there_is_room(tolerance):
    model = make_model(AdaptiveBudget(tolerance), 100)
    for seed in range(3):
        x = seed + draw(60, 1, seed=seed)
        result = model.update(x, torch.sin(5 * x[:, 0]))
        assert result.projection_loss <= tolerance * model.num_data
    assert result.num_inducing < 100


@pytest.mark.parametrize(
    "policy, num_inducing, lengthscale, count",
    [
        (AdaptiveBudget(1e3, min_inducing=7), 20, 0.05, 7),
        (AdaptiveBudget(1e-9, 1, 10), 20, 0.01, 10),  # the smaller limit holds
        (AdaptiveBudget(1e-9, 1, 20), 10, 0.01, 10),
        (AdaptiveBudget(1e-9), 20, 0.01, 20),
    ],
)
def test_limits_of_the_budget_hold(policy, num_inducing, lengthscale, count):
    model = make_model(policy, num_inducing, lengthscale)
    assert condition(model, draw(100, 1)).num_inducing == count


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
    model = make_model(AllocatorPolicy(Allocator(chosen)), batch_shape=(2,))
    with pytest.raises(InputError, match="The choice of AllocatorPolicy") as caught:
        condition(model, draw(2, 5, 1))
    assert message in str(caught.value)
    assert model.memory.is_empty


def test_methods_of_version_02_that_nobody_calls_are_named():
    with pytest.warns(DeprecationWarning, match="Late.revise is never called"):

        class Late(KeepOld):
            def revise(self, candidates, z, loss):
                return z


# -- what an update says ------------------------------------------------------------


def test_one_warning_says_that_there_are_too_few_points():
    model, x = make_model(num_inducing=3, lengthscale=0.05), draw(60, 1)
    with pytest.warns(BudgetWarning, match="Raise num_inducing") as caught:
        condition(model, x, 20)
        condition(model, x, 20)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        enough = make_model(num_inducing=60, lengthscale=0.05)
        condition(enough, x, 20)
        # The choice of the caller is not a matter of budget.
        result = condition(enough, x, 20, inducing_points=x[:3])
    assert result.projection_loss > 120


def test_advice_names_the_limit_that_was_met():
    assert KeepOld().advice(3, 20) == "Raise num_inducing"
    assert AdaptiveBudget().advice(20, 20) == "Raise num_inducing"
    assert "max_inducing" in AdaptiveBudget(max_inducing=8).advice(8, 20)
    assert AdaptiveBudget(max_inducing=30).advice(20, 20) == "Raise num_inducing"
    model = make_model(AdaptiveBudget(0.9), 20, lengthscale=0.05)
    with pytest.warns(BudgetWarning, match="Lower tolerance"):
        assert condition(model, draw(60, 1), 20).num_inducing < 20


def test_allocators_of_botorch_plug_in():
    allocators = pytest.importorskip("botorch.models.utils.inducing_point_allocators")
    policy, x = AllocatorPolicy(allocators.GreedyVarianceReduction()), draw(40, 1)
    model, batch = make_model(policy, 8), make_model(policy, 8, batch_shape=(2,))
    for part in (x, 1 + x):
        condition(model, part)
    assert model.points.shape == (8, 1)
    condition(batch, x.expand(2, 40, 1))
    assert batch.points.shape == (2, 8, 1)


def test_a_policy_is_asked_only_when_the_memory_is_full():
    class Counted(GreedyInformation):
        num_calls = 0

        def __call__(self, candidates):
            self.num_calls += 1
            return super().__call__(candidates)

    policy = Counted()
    model, x = make_model(policy, 10, memory_size=30), draw(40, 1)
    for i in range(40):
        condition(model, x[i : i + 1])
        assert policy.num_calls == (i >= 30)


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
    rmse, best = (
        (m.predict(stream.x_test).mean - stream.y_test).square().mean().sqrt()
        for m in (model, batch)
    )
    assert rmse < 1.02 * best

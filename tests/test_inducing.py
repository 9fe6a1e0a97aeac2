"""Policies choose points the bound agrees with, and no more than needed."""

from __future__ import annotations

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
from torch_ssgp.update import UpdateOptions
from torch_ssgp.update.walk import Update
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
) -> StreamingGP:
    kernel = ScaleKernel(RBFKernel())
    model = StreamingGP(
        kernel,
        num_inducing=num_inducing,
        inducing_policy=policy,
        batch_shape=torch.Size(batch_shape),
    ).double()
    kernel.base_kernel.lengthscale, model.likelihood.noise = lengthscale, 0.01
    return model


def candidates_of(model: StreamingGP, x: Tensor) -> tuple[Candidates, object]:
    """What a policy would see in the next update, and the objective behind it."""
    data = model.check_data(x, torch.zeros(x.shape[:-1]).double(), None)
    options = UpdateOptions(num_steps=0)
    update = Update(model.known(data), data, options, model.limits(data))
    objective = update.objective()
    with torch.no_grad():
        return update.points.candidates(objective), objective


@pytest.mark.parametrize("policy", GREEDY, ids=name)
@pytest.mark.parametrize("batch_shape", [(), (2,)], ids=str)
def test_the_loss_of_a_ranking_is_that_of_the_bound(policy, batch_shape):
    """For any number of points taken, jitter and past included."""
    model = make_model(GreedyInformation(), 15, batch_shape=batch_shape)
    x = draw(*batch_shape, 40, 1)
    model.update(x, torch.sin(9 * x[..., 0]), num_steps=0)
    candidates, objective = candidates_of(model, draw(*batch_shape, 30, 1, seed=1))
    with torch.no_grad():
        ranking = policy.rank(candidates)
        for count in (1, 5, 12):
            objective.start_at(ranking.points[..., :count, :])
            rows, s = objective.project(objective.prior(), objective.as_gaussian())
            torch.testing.assert_close(
                ranking.loss[..., count - 1], rows.loss / (2 * s), rtol=1e-4, atol=1e-6
            )


def test_greedy_information_takes_the_point_that_lowers_the_loss_most():
    model = make_model(GreedyInformation(), 6)
    x = draw(30, 1)
    model.update(x, torch.sin(9 * x[:, 0]), num_steps=0)
    candidates, objective = candidates_of(model, draw(20, 1, seed=1))
    candidates = candidates._replace(num_inducing=6)  # no room: nobody is preferred

    def loss(z: Tensor) -> float:
        objective.start_at(z)
        rows, s = objective.project(objective.prior(), objective.as_gaussian())
        return (rows.loss / (2 * s)).item()

    with torch.no_grad():
        points = GreedyInformation().rank(candidates).points
        for k in range(4):
            ours = loss(points[: k + 1])
            best = min(
                loss(torch.cat([points[:k], other[None]]))
                for other in candidates.points
                if not (points[:k] == other).all(-1).any()
            )
            assert ours <= best * (1 + 1e-6) + 1e-9


def test_greedy_variance_is_pivoted_cholesky():
    """Every point is the least certain one given those before it."""
    model = make_model()
    candidates, _ = candidates_of(model, draw(50, 1))
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
    old = model.summary.inducing_points
    second = model.update(2 + draw(20, 1), torch.zeros(20).double(), num_steps=0)
    third = model.update(4 + draw(20, 1), torch.zeros(20).double(), num_steps=0)
    assert first.num_inducing == 6 and second.num_inducing == 10
    assert torch.equal(model.summary.inducing_points[:6], old)
    assert (third.num_kept, third.num_added, third.num_dropped) == (10, 0, 0)


def test_random_replace_swaps_its_fraction_and_repeats_itself():
    def run(seed: int) -> Tensor:
        model = make_model(RandomReplace(0.3, seed=seed), 10, lengthscale=0.02)
        model.update(draw(50, 1), torch.zeros(50).double(), num_steps=0)
        result = model.update(
            draw(50, 1, seed=1), torch.zeros(50).double(), num_steps=0
        )
        assert (result.num_kept, result.num_added, result.num_dropped) == (7, 3, 3)
        return model.summary.inducing_points

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
    places = 2 if bool((x == 1).any()) and len(x) > 1 else 1
    model = make_model(policy, 20)
    for _ in range(3):
        result = model.update(
            x, torch.ones(len(x)).double(), num_steps=5, learn_inducing_points=False
        )
        assert result.num_inducing == places
        assert bool(torch.isfinite(model(x).variance).all())


@pytest.mark.parametrize("policy", POLICIES, ids=name)
def test_fewer_candidates_than_the_budget_are_all_that_is_taken(policy):
    model = make_model(policy, 50, lengthscale=0.01)
    result = model.update(draw(7, 1), torch.zeros(7).double(), num_steps=0)
    assert result.num_inducing == 7
    assert (result.num_added, result.num_kept, result.num_dropped) == (7, 0, 0)


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
    model = make_model(num_inducing=200, lengthscale=1.0)
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
    model = make_model(num_inducing=100, lengthscale=1.0)
    counts = [model.update(x, y, num_steps=20).num_inducing for x, y in stream.batches]
    second_pass, last = counts[3], counts[-1]
    assert 0.8 * second_pass <= last <= 1.1 * second_pass


def test_the_budget_shrinks_when_the_kernel_grows_smoother():
    model = make_model(num_inducing=100, lengthscale=0.05)
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
            assert result.projection_loss <= tolerance * 60
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


def test_an_update_reports_what_became_of_the_points():
    model = make_model(GreedyInformation(), 8)
    x = draw(40, 1)
    model.update(x, torch.sin(9 * x[:, 0]), num_steps=0)
    old = model.summary.inducing_points
    x = 1 + draw(40, 1)
    result = model.update(x, torch.sin(9 * x[:, 0]))
    new = model.summary.inducing_points
    kept = (old.unsqueeze(0) == new.unsqueeze(1)).all(-1).any(0).sum()
    assert result.num_kept == kept
    assert result.num_added == len(new) - kept
    assert result.num_dropped == len(old) - kept
    assert 0 < result.projection_loss < result.projection_loss_before


def test_one_warning_says_that_the_budget_is_too_small():
    model = make_model(num_inducing=3, lengthscale=0.05)
    model.memory_size = 200  # large enough: the limit is the number of points
    x = draw(60, 1)
    y = torch.sin(20 * x[:, 0])
    with pytest.warns(BudgetWarning, match="Raise num_inducing") as caught:
        model.update(x, y, num_steps=0)
        model.update(x, y, num_steps=0)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        make_model(num_inducing=60, lengthscale=0.05).update(x, y, num_steps=0)
        # The choice of the caller is not a matter of budget.
        model.update(x, y, num_steps=0, inducing_points=x[:3])


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
        chosen[name(policy)] = model.summary.inducing_points
    assert chosen["AllocatorPolicy"].shape == (8, 1)
    batched = make_model(AllocatorPolicy(allocator), 8, batch_shape=(2,))
    batched.update(x, torch.sin(5 * x[:, 0]).expand(2, -1), num_steps=0)
    assert batched.summary.inducing_points.shape == (2, 8, 1)


# -- long and strange streams -------------------------------------------------------


def test_many_single_points():
    """As many inducing points as a batch would need, and the batch's fit."""
    num_points = 2000 if FULL else 300
    stream = streams.repeated_iid(batches=1, batch=num_points)
    x, y = stream.batches[0]
    model = make_model(num_inducing=100, lengthscale=1.0)
    batch = make_model(num_inducing=100, lengthscale=1.0)
    for x_new, y_new in zip(x.split(1), y.split(1), strict=True):
        result = model.update(x_new, y_new, num_steps=0)
    whole = batch.update(x, y, num_steps=0)
    assert model.summary.num_data == num_points
    assert result.num_inducing <= 1.5 * whole.num_inducing
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
    assert model.summary.num_data == 40


@pytest.mark.parametrize("when", ["choose", "revise"])
def test_an_update_refuses_a_choice_that_cannot_be_used(when):
    class Bad(KeepOld):
        def __call__(self, candidates):
            return None if when == "choose" else super().__call__(candidates)

        def revise(self, candidates, z, loss):
            return math.nan * z

    model, x = make_model(Bad()), draw(20, 1)
    with pytest.raises(InputError, match="The choice of Bad"):
        model.update(x, x[:, 0], num_steps=0)
    assert model.summary.is_empty


def test_the_warning_speaks_of_the_tolerance_where_there_is_room():
    model, x = make_model(AdaptiveBudget(0.9), 20, lengthscale=0.05), draw(60, 1)
    with pytest.warns(BudgetWarning, match="Lower tolerance"):
        result = model.update(x, torch.sin(20 * x[:, 0]), num_steps=0)
    assert result.num_inducing < 20


def test_numbers_of_steps_may_be_numpys():
    model, x = make_model(num_inducing=numpy.int64(5)), draw(20, 1)
    assert model.update(x, x[:, 0], num_steps=numpy.int64(3)).num_steps == 3


class Anew(AdaptiveBudget):
    """Chooses all points at every update."""

    def extend(self, candidates):
        return self(candidates)


def test_points_that_learning_has_placed_stay_where_they_lose_less():
    torch.manual_seed(0)
    x = 20 * torch.rand(300, 1, dtype=torch.float64)
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(300, dtype=torch.float64)
    lost = {}
    for policy in (AdaptiveBudget(), Anew()):
        kernel = ScaleKernel(RBFKernel())
        model = StreamingGP(kernel, num_inducing=10, inducing_policy=policy).double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)  # ten points are too few
            model.update(x[:260], y[:260])
            z = model.summary.inducing_points
            result = model.update(x[260:], y[260:], num_steps=0)
        lost[type(policy)] = float(result.projection_loss)
        stays = torch.equal(model.summary.inducing_points, z)
        assert stays is not isinstance(policy, Anew)
    assert lost[AdaptiveBudget] < lost[Anew]

"""Single data: rows that are added without a walk."""

import math
import threading
from copy import deepcopy

import pytest
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.means import LinearMean
from torch.testing import assert_close

from torch_ssgp import StreamingGP, UpdateOptions
from torch_ssgp.exceptions import NonFiniteError, StateError
from torch_ssgp.update import walk

KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "matern": lambda: ScaleKernel(MaternKernel(nu=1.5)),
    "one input": lambda: ScaleKernel(RBFKernel(active_dims=[1])),
    "a sum": lambda: ScaleKernel(RBFKernel()) + ScaleKernel(PeriodicKernel()),
}
LATER = UpdateOptions(learn_hyperparameters="later")


def data(num: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(num, 2, generator=g, dtype=torch.float64)
    return x, torch.sin(2 * x).sum(-1) + 0.1 * torch.randn(
        num, generator=g, dtype=torch.float64
    )


def started(kernel: str = "matern", num: int = 90, **options) -> StreamingGP:
    """A model past its youth, with room for more rows."""
    model = StreamingGP(KERNELS[kernel](), num_inducing=60, **options).double()
    model.update(*data(num), num_steps=20)
    return model


def both_ways(model: StreamingGP, num: int, options: UpdateOptions) -> tuple:
    """Two copies that see the same data, as rows and by a walk."""
    quick, slow = deepcopy(model), deepcopy(model)
    x, y = data(num, seed=1)
    results = []
    for i in range(num):
        one = slice(i, i + 1)
        quick_result = quick.update(x[one], y[one], options=options)
        checked = slow.check_data(x[one], y[one], None)
        slow_result = slow.learn_from(
            checked, options, lambda *arguments: walk.update(*arguments)
        )
        results.append((quick_result, slow_result))
    return quick, slow, results


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_row_is_what_a_walk_would_have_made(kernel, compressed):
    model = started(kernel, 95 if compressed else 60)
    assert (model.memory.g.numel() > 0) == compressed
    quick, slow, results = both_ways(model, 20, LATER)
    for a, b in results:
        for name in ("bound", "increment", "alarm", "alarm_since", "surprise"):
            assert_close(getattr(a, name), getattr(b, name), rtol=1e-6, atol=1e-7)
        assert (a.num_rows, a.num_inducing) == (b.num_rows, b.num_inducing)
    for (name, one), other in zip(
        quick.memory.named_buffers(), slow.memory.buffers(), strict=True
    ):
        assert_close(one, other, rtol=1e-6, atol=1e-7, msg=name)
    x = data(7, seed=2)[0]
    assert_close(quick(x).mean, slow(x).mean)
    assert_close(quick(x[:1]).variance, slow(x[:1]).variance)


def test_prior_means_and_drift_are_seen():
    model = started(mean_module=LinearMean(2))
    model.memory.rate = torch.full_like(model.memory.rate, 1e-3)
    quick, slow, _ = both_ways(model, 10, LATER)
    x = data(3, seed=3)[0]
    assert_close(quick(x).mean, slow(x).mean)
    assert_close(quick(x[:1]).mean, slow(x[:1]).mean)


def test_data_that_were_left_out_stay_out():
    model = started()
    weight = torch.ones_like(model.memory.weight)
    weight[-3] = 0
    model.memory.weight = weight
    quick, slow, _ = both_ways(model, 10, LATER)
    x = data(3, seed=3)[0]
    assert_close(quick(x).mean, slow(x).mean)


def test_a_change_of_hyperparameters_is_seen_at_the_next_datum():
    model = started()
    x, y = data(4, seed=1)
    model.observe(x[:1], y[:1])
    model.covar_module.outputscale = 7.0
    model.likelihood.noise = 0.5
    model.observe(x[1:2], y[1:2])
    fresh = deepcopy(model)  # its factor is made anew
    assert_close(model(x).mean, fresh(x).mean)
    assert_close(model(x).variance, fresh(x).variance)


def test_a_loaded_memory_is_seen_at_the_next_datum():
    model = started()
    state, (x, y) = model.state_dict(), data(4, seed=1)
    model.observe(x[:1], y[:1])
    model.load_state_dict(state)
    model.observe(x[1:2], y[1:2])
    assert int(model.num_data) == 91


def test_bad_data_change_nothing():
    model = started()
    x, y = data(4, seed=1)
    model.observe(x[:1], y[:1])
    before = model.state_dict()
    with pytest.raises(NonFiniteError):
        model.observe(x[1:2], y[1:2] * math.nan)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_caller_may_overwrite_what_it_passed():
    model = started()
    x, y = data(3, seed=1)
    model.observe(x[:1], y[:1])
    here, there = x[1:2].clone(), y[1:2].clone()
    model.observe(here, there)
    before = model(x).mean
    here.zero_(), there.zero_()
    assert_close(model(x).mean, before)


def test_a_reader_keeps_the_posterior_that_it_read():
    model = started()
    x, y = data(30, seed=1)
    model.observe(x[:1], y[:1])
    predictor = model.predictor()
    before = predictor(x).mean
    for i in range(1, 8):
        model.observe(x[i : i + 1], y[i : i + 1])
    assert_close(predictor(x).mean, before)


def test_memory_stays_within_its_size():
    model = started()
    x, y = data(80, seed=1)
    for i in range(80):
        result = model.observe(x[i : i + 1], y[i : i + 1])
        assert result.num_rows <= model.memory_size
        assert not result.learned
    assert int(model.num_data) == 170


def test_observe_learns_nothing_and_learn_does():
    model = StreamingGP(KERNELS["matern"](), num_inducing=60).double()
    x, y = data(120)
    for i in range(120):
        model.observe(x[i : i + 1], y[i : i + 1])
    x_test, y_test = data(50, seed=5)
    assert (model(x_test).mean - y_test).square().mean().sqrt() < 0.5
    assert model.learn().learned
    assert (model(x_test).mean - y_test).square().mean().sqrt() < 0.2
    assert not model.learn().learned  # nothing was left undone


def test_learning_leaves_room_for_data_to_come():
    model = started()
    assert model.memory.num_rows == 90
    model.learn()
    x, y = data(15, seed=1)
    rows = [model.observe(x[i : i + 1], y[i : i + 1]).num_rows for i in range(15)]
    assert rows == list(range(61, 76))  # none compressed


@pytest.mark.parametrize("num_new", [1, 2])
def test_what_learning_compressed_stays_when_data_come_meanwhile(num_new):
    model, (x, y) = started(num=80), data(num_new, seed=1)

    def callback(step: int, bound: torch.Tensor) -> None:
        if step == 1:
            model.observe(x, y)

    model.learn(UpdateOptions(learn_hyperparameters=True, callback=callback))
    assert model.memory.num_rows == 60 + num_new
    assert int(model.num_data) == 80 + num_new
    fresh = deepcopy(model)
    assert_close(model(x).mean, fresh(x).mean)


def test_nothing_changes_where_there_is_nothing_to_learn():
    model = started(num=60)
    model.learn()
    before = model.state_dict()
    assert not model.learn().learned
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_there_is_nothing_to_learn_from_before_the_first_datum():
    with pytest.raises(StateError, match="no data yet"):
        StreamingGP(KERNELS["rbf"]()).learn()


def test_data_that_come_while_another_thread_learns_are_kept():
    model = started()
    x, y = data(100, seed=1)
    learners = [threading.Thread(target=model.learn) for _ in range(3)]
    for i in range(100):
        if i % 40 == 0:
            learners[i // 40].start()
        model.observe(x[i : i + 1], y[i : i + 1])
    for learner in learners:
        learner.join()
    assert int(model.num_data) == 190
    x_test, y_test = data(50, seed=5)
    assert (model(x_test).mean - y_test).square().mean().sqrt() < 0.2


def test_a_change_that_was_observed_is_explained_when_learned():
    model = started(num=50)  # with room for what comes: compressed data cannot be told
    x, y = data(50)
    for i in range(30):
        model.observe(x[i : i + 1], 6 - 3 * y[i : i + 1])
    assert model.learn().forgot == 0


def test_a_budget_is_kept_and_the_next_updates_go_on():
    model = StreamingGP(KERNELS["matern"](), num_inducing=60).double()
    x, y = data(60)
    options, steps = UpdateOptions(budget=6), []
    for i in range(60):
        steps.append(
            model.update(x[i : i + 1], y[i : i + 1], options=options).num_steps
        )
    assert max(steps) <= 6
    x_test, y_test = data(50, seed=5)
    assert (model(x_test).mean - y_test).square().mean().sqrt() < 0.3


def test_a_fantasy_by_the_name_of_gpytorch_is_conditioning():
    model = started()
    x, y = data(4, seed=1)
    one, other = (
        condition(x, y).forward(x)
        for condition in (model.get_fantasy_model, model.condition_on_observations)
    )
    assert_close(one.mean, other.mean)
    assert_close(one.variance, other.variance)

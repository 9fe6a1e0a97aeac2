"""Merged models know what all of them saw, and count nothing twice."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import NamedTuple

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    PoissonLikelihood,
)
from gpytorch.means import ZeroMean

from torch_ssgp import KeepOld, MultiOutputGP, StreamingGP, branch, merge
from torch_ssgp.exceptions import ArgumentError, MergeError

Z = torch.linspace(0, 8, 15).double().unsqueeze(-1)
RAW = {"num_steps": 0}
FIXED = {"num_steps": 0, "inducing_points": Z}  # compressed at once
COPIES = {"branch": branch, "plain copy": copy.deepcopy}


class Sizes(NamedTuple):
    """How much the base and each worker see, and what becomes of it."""

    base: int
    each: int
    base_options: dict
    options: dict


CASES = {
    "all raw": Sizes(6, 5, RAW, RAW),
    "only the base is raw": Sizes(6, 90, RAW, FIXED),
    "only the base is compressed": Sizes(120, 5, FIXED, RAW),
    "all compressed": Sizes(120, 90, FIXED, FIXED),
}
# A plain copy must not have compressed its memory since.
SEPARABLE = [("branch", case) for case in CASES]
SEPARABLE += [("plain copy", case) for case in CASES if CASES[case].options is RAW]
TREES = {
    "one call": lambda w, b: merge(w, base=b),
    "backwards": lambda w, b: merge(w[::-1], base=b),
    "left": lambda w, b: merge([merge(w[:2], base=b), w[2]], base=b),
    "right": lambda w, b: merge([w[0], merge(w[1:], base=b)], base=b),
    "one by one": lambda w, b: merge([merge([m], base=b) for m in w], base=b),
}


def draw(n: int, *batch: int):
    x = 8 * torch.rand(n, 1, dtype=torch.float64)
    y = torch.sin(x.squeeze(-1)) + 0.1 * torch.randn(*batch, n, dtype=torch.float64)
    return x, y


def make(size: int = 30, kernel=None, **options) -> StreamingGP:
    batch = options.get("batch_shape", torch.Size())
    kernel = kernel or MaternKernel(batch_shape=batch)
    kernel = ScaleKernel(kernel, batch_shape=batch)
    options = {"num_inducing": 15, "memory_size": size, **options}
    return StreamingGP(kernel, **options).double()


def learn(model, x, y, noise=None, options=FIXED):
    """Everything in a few updates."""
    for rows in torch.arange(len(x)).split(45):
        known = None if noise is None else noise[..., rows]
        model.update(x[rows], y[..., rows], known, **options)
    return model


def spread(base, x, y, sizes, copied, noise=None):
    """A base, and three models that continued from it."""

    def taught(model, start, count, options):
        rows = slice(start, start + count)
        known = noise if noise is None else noise[..., rows]
        return learn(model, x[rows], y[..., rows], known, options)

    taught(base, 0, sizes.base, sizes.base_options)
    starts = [sizes.base + k * sizes.each for k in range(3)]
    return [taught(copied(base), k, sizes.each, sizes.options) for k in starts]


def at_once(model, x, y, sizes, noise=None):
    """One model that saw the same; raw data last, since they stay."""
    first, last = slice(0, sizes.base), slice(sizes.base, None)
    parts = [(first, sizes.base_options), (last, sizes.options)]
    for rows, options in parts[:: -1 if sizes.options is FIXED else 1]:
        known = noise if noise is None else noise[..., rows]
        learn(model, x[rows], y[..., rows], known, options)
    return model


def outcomes(likelihood, f):
    """Labels or counts."""
    return (
        (f > 0).double() if likelihood is BernoulliLikelihood else (2 * f).exp().round()
    )


def check_same(a, b, tolerance=1e-8):
    x = torch.linspace(-1, 9, 40).double().unsqueeze(-1)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(a(x).mean, b(x).mean, **close)
    torch.testing.assert_close(a(x).variance, b(x).variance, **close)
    bounds = [model.summary.log_evidence for model in (a, b)]
    torch.testing.assert_close(*bounds, **close)
    for part in ("summary", "memory"):
        counts = [getattr(model, part).num_data for model in (a, b)]
        torch.testing.assert_close(*counts, **close)


# -- exactness ------------------------------------------------------------------------


@pytest.mark.parametrize(("copied", "case"), SEPARABLE)
def test_three_workers_of_one_base_equal_one_model_that_saw_everything(copied, case):
    sizes = CASES[case]
    x, y = draw(sizes.base + 3 * sizes.each)
    base, one = make(60), at_once(make(60), x, y, sizes)
    workers = spread(base, x, y, sizes, COPIES[copied])
    for tree in TREES.values():
        check_same(tree(workers, base), one)


@pytest.mark.parametrize(("copied", "case"), SEPARABLE)
def test_batches_of_streams_with_a_noise_per_point_are_merged_exactly(copied, case):
    batch, sizes = torch.Size([2]), CASES[case]
    x, y = draw(sizes.base + 3 * sizes.each, 2)
    noise = 0.01 + 0.1 * torch.rand_like(y)

    def model():
        likelihood = FixedNoiseGaussianLikelihood(torch.ones(2, 1))
        mean = ZeroMean(batch_shape=batch)
        return make(60, likelihood=likelihood, batch_shape=batch, mean_module=mean)

    base, one = model(), at_once(model(), x, y, sizes, noise)
    workers = spread(base, x, y, sizes, COPIES[copied], noise)
    for tree in ("backwards", "left"):
        check_same(TREES[tree](workers, base), one)


@pytest.mark.parametrize("memory_size", [100, 15])
def test_models_of_separate_data_equal_the_exact_gaussian_process(memory_size):
    """While everything is raw; the merged model holds as much as its largest part."""
    x, y = draw(90)
    models = [learn(make(100), x[k::3], y[k::3], options=RAW) for k in range(3)]
    models.append(make(memory_size))
    one = learn(make(100), x, y, options=RAW)
    merged = merge(models)
    assert merged.memory.num_raw == 90
    check_same(merged, one)


@pytest.mark.parametrize("memory_size", [15, 30])
@pytest.mark.parametrize("num", [3, 16])
def test_independent_models_equal_one_that_saw_everything(memory_size, num):
    """In any order, in one call or by a tree of pairs; memories stay small."""
    x, y = draw(80 * num // (num // 3))
    models = [learn(make(memory_size), x[k::num], y[k::num]) for k in range(num)]
    one, level = learn(make(), x, y), models
    for order in itertools.islice(itertools.permutations(models), 6):
        check_same(merge(order), one)
    while len(level) > 1:
        level = [merge(level[i : i + 2]) for i in range(0, len(level), 2)]
    check_same(level[0], one)
    assert merge(models).memory.g.size(-1) <= 2 * 30


def test_a_branch_and_an_independent_model_are_merged_in_any_order():
    x, y = draw(300)
    base = learn(make(), x[:100], y[:100])
    worker = learn(branch(base), x[100:200], y[100:200])
    other = learn(make(), x[200:], y[200:])
    one = learn(make(), x, y)
    for models in ([worker, other], [other, worker]):
        merged = merge(models)
        assert not merged.memory.is_branch
        check_same(merged, one)
        merged.update(x, y, **FIXED)
        assert merged.memory.num_data == 600


@pytest.mark.parametrize("memory_size", [15, 30])
def test_a_branch_keeps_its_base_apart_whatever_an_update_does(memory_size):
    """Also one that adds rows only, or that would let go of its oldest stretch."""
    x = torch.linspace(0, 40, 400).double().unsqueeze(-1)
    y = x.squeeze(-1).sin() + 0.05 * torch.randn(400, dtype=torch.float64)
    base = make(memory_size)
    base.update(x[:100], y[:100], num_steps=5)
    worker = branch(base)
    for rows in torch.arange(100, 400).split(20):
        worker.update(x[rows], y[rows], num_steps=0)
    check_base_counts_once(worker, base)
    for rows in torch.arange(100, 400).split(60):
        worker.update(x[rows], y[rows], num_steps=5, forget="auto")
    check_base_counts_once(worker, base)
    worker.update(x[300:], y[300:], num_steps=0, forget=0.5)
    check_base_counts_once(worker, base)


def check_base_counts_once(worker, base):
    """With the power left of it; what compressions let go of is the worker's."""
    memory = worker.memory
    inherited = memory.inherited[1] + memory.weight[: int(memory.base[2])].sum()
    added, power = worker.num_data - inherited, memory.inherited[3]
    merged = merge([worker, branch(base)], base=base)
    assert 0 < power <= 1 and 0 < inherited <= power * 100 + 1e-6
    torch.testing.assert_close(merged.num_data, power * 100 + added)


def test_known_noises_and_a_learned_one_are_merged():
    """Rows that share a noise become rows with a noise of their own."""
    x, y = draw(160)
    noise = torch.full_like(y, 0.3)
    one, other = learn(make(), x[:80], y[:80]), make()
    learn(other, x[80:], y[80:], noise[80:])
    both = learn(learn(make(), x[:80], y[:80]), x[80:], y[80:], noise[80:])
    check_same(merge([one, other]), both)
    check_same(merge([other, one]), both)


def test_a_worker_that_learned_adds_what_a_model_does_that_never_saw_the_base():
    x, y = draw(130)
    base = make()
    base.update(x[:30], y[:30], num_steps=5)
    worker = branch(base)
    worker.update(x[30:], y[30:], num_steps=5, learn_hyperparameters=True)
    assert not torch.equal(worker.likelihood.noise, base.likelihood.noise)
    alone = copy.deepcopy(worker)
    alone.reset()
    alone.update(x[30:], y[30:], num_steps=0, inducing_points=worker.points)
    check_same(merge([worker], base=base), merge([base, alone]))


# -- other models ---------------------------------------------------------------------


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("likelihood", [BernoulliLikelihood, PoissonLikelihood])
def test_raw_data_of_any_likelihood_are_read_anew(likelihood, copied):
    x, f = draw(60)
    y = outcomes(likelihood, f)
    base = make(200, likelihood=likelihood())
    workers = spread(base, x, y, Sizes(15, 15, RAW, RAW), COPIES[copied])
    one = learn(make(200, likelihood=likelihood()), x, y, options=RAW)
    check_same(merge(workers, base=base), one, tolerance=1e-6)


@pytest.mark.parametrize("likelihood", [BernoulliLikelihood, PoissonLikelihood])
def test_compressed_data_of_any_likelihood_are_counted_once(likelihood):
    x, f = draw(300)
    y = outcomes(likelihood, f)
    base = make(likelihood=likelihood())
    workers = spread(base, x, y, Sizes(60, 80, FIXED, FIXED), branch)
    merged = merge(workers, base=base)
    one = learn(make(likelihood=likelihood()), x, y)
    assert merged.memory.num_data == one.memory.num_data == 300
    # Sites were frozen with what each worker knew: near, not equal.
    assert (merged(Z).mean - one(Z).mean).abs().max() < 0.2
    assert (merged(Z).variance / one(Z).variance - 1).abs().max() < 0.3
    twice = merge([merge(workers, base=base), branch(base)], base=base)
    torch.testing.assert_close(twice(Z).mean, merged(Z).mean, rtol=0, atol=1e-6)


def test_several_outputs_are_merged_as_batches_are():
    batch = torch.Size([2])
    x, y = draw(160, 2)

    def model():
        return MultiOutputGP(make(batch_shape=batch))

    def taught(model, rows):
        for part in torch.arange(160)[rows].split(20):
            model.update(x[part], y[:, part].T, **FIXED)
        return model

    base = taught(model(), slice(0, 40))
    workers = [taught(branch(base), slice(40 * k, 40 * k + 40)) for k in (1, 2, 3)]
    merged = merge(workers, base=base)
    assert isinstance(merged, MultiOutputGP)
    check_same(merged.model, taught(model(), slice(0, 160)).model)


def test_models_in_single_precision_are_merged_in_double():
    x, y = (t.float() for t in draw(240))
    z = Z.float()
    models = []
    for part in torch.arange(240).split(80):
        models.append(make().float())
        models[-1].update(x[part], y[part], num_steps=0, inducing_points=z)
    one = make().float()
    one.update(x, y, num_steps=0, inducing_points=z)
    merged = merge(models)
    assert merged.dtype == torch.float32 and merged.memory.U.dtype == torch.float64
    torch.testing.assert_close(merged(x).mean, one(x).mean, rtol=1e-5, atol=1e-5)
    bounds = [model.summary.log_evidence for model in (merged, one)]
    torch.testing.assert_close(*bounds, rtol=1e-7, atol=1e-7)


# -- what is learned ------------------------------------------------------------------


def test_hyperparameters_are_those_of_the_model_with_most_data():
    x, y = draw(200)
    small, large = make(), make()
    small.update(x[:50], y[:50], num_steps=20)
    large.update(x[50:], y[50:], num_steps=20)
    merged = merge([small, large])
    for a, b in zip(merged.parameters(), large.parameters(), strict=True):
        assert torch.equal(a, b)
    assert merged.memory.num_data == 200
    error = (merged(x).mean - x.squeeze(-1).sin()).square().mean().sqrt()
    assert error < 0.05


def test_hyperparameters_can_be_learned_once_on_all_that_is_remembered():
    x, y = draw(200)
    models = [make(), make()]
    for model, rows in zip(models, torch.arange(200).split(100), strict=True):
        model.update(x[rows], y[rows], num_steps=3)
    merged = merge(models, learn_hyperparameters=True, num_steps=60)
    plain = merge(models)
    assert merged.summary.log_evidence > plain.summary.log_evidence
    noise = merged.likelihood.noise.item()
    assert 0.005 < noise < 0.02
    since = [model.memory.count().since_learning for model in (merged, plain)]
    assert since[0] == 0 < since[1]


def test_models_of_other_places_are_merged_into_one_of_all_places():
    x = 30 * torch.rand(600, 1, dtype=torch.float64)
    y = x.squeeze(-1).sin() + 0.1 * torch.randn(600, dtype=torch.float64)
    models = []
    for rows in x.squeeze(-1).argsort().split(200):
        models.append(make(60, kernel=RBFKernel(), num_inducing=30))
        models[-1].update(x[rows], y[rows], num_steps=40)
    merged = merge(models)
    error = (merged(x).mean - x.squeeze(-1).sin()).square().mean().sqrt()
    assert error < 0.06


def test_points_are_chosen_whatever_the_policy():
    x, y = draw(120)
    models = []
    for rows in torch.arange(120).split(40):
        models.append(make(inducing_policy=KeepOld()))
        models[-1].update(x[rows], y[rows], num_steps=0)
    merged = merge(models)
    assert 0 < merged.summary.num_inducing <= 15


# -- afterwards -----------------------------------------------------------------------


def test_a_merged_model_goes_on_and_forgets():
    x, y = draw(400)
    base = learn(make(), x[:100], y[:100])
    workers = [branch(base) for _ in range(2)]
    for k, worker in enumerate(workers, start=1):
        learn(worker, x[100 * k : 100 * k + 100], y[100 * k : 100 * k + 100])
    merged, one = merge(workers, base=base), learn(make(), x[:300], y[:300])
    for model in (merged, one):
        model.update(x[300:], y[300:], forget=0.5, **FIXED)
    check_same(merged, one)
    assert merged.memory.num_data == 250


@pytest.mark.parametrize(
    ("copied", "options"), [("branch", FIXED), ("branch", RAW), ("plain copy", RAW)]
)
def test_the_base_counts_what_the_most_forgetful_worker_left(copied, options):
    x, y = draw(40)
    base = learn(make(200), x[:20], y[:20], options=options)
    workers = [COPIES[copied](base) for _ in range(2)]
    workers[0].update(x[20:30], y[20:30], forget=0.5, **options)
    workers[1].update(x[30:], y[30:], forget=0.8, **options)
    merged = merge(workers, base=base)
    assert merged.memory.num_data == pytest.approx(30)
    one = learn(make(200), x[:20], y[:20], options=options)
    one.update(x[20:], y[20:], forget=0.5, **options)
    check_same(merged, one)
    check_same(merge([workers[0]], base=base), workers[0])


def test_the_next_base_is_what_was_merged():
    """Joined every hour: nothing is counted twice, and memories stay small."""
    x, y = draw(600)
    base = learn(make(), x[:60], y[:60])
    for hour in range(1, 4):
        workers = []
        for k in range(3):
            start = 180 * hour - 120 + 60 * k
            rows = slice(start, start + 60)
            workers.append(learn(branch(base), x[rows], y[rows]))
        base = merge(workers, base=base)
        check_same(base, learn(make(), x[: 180 * hour + 60], y[: 180 * hour + 60]))
        assert base.memory.num_points <= 1.5 * 30
        assert base.memory.g.size(-1) <= 4 * 30


@pytest.mark.parametrize("how", ["pickle", "save"])
def test_a_branch_survives_the_journey_to_its_worker(how, tmp_path):
    x, y = draw(200)
    base = learn(make(), x[:80], y[:80])
    worker = branch(base)
    if how == "pickle":
        worker = pickle.loads(pickle.dumps(worker))
        base = pickle.loads(pickle.dumps(base))
    else:
        worker.save(tmp_path / "worker")
        worker = StreamingGP.load(tmp_path / "worker")
        base.save(tmp_path / "base")
        base = StreamingGP.load(tmp_path / "base")
    learn(worker, x[80:], y[80:])
    check_same(merge([worker], base=base), learn(make(), x, y))


def test_models_that_are_merged_stay_as_they_are():
    x, y = draw(200)
    base = learn(make(), x[:100], y[:100])
    worker = learn(branch(base), x[100:], y[100:])
    before = [copy.deepcopy(m.state_dict()) for m in (base, worker)]
    merged = merge([worker], base=base)
    merged.update(x, y, num_steps=2)
    for model, state in zip((base, worker), before, strict=True):
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), name


def test_empty_models_add_nothing():
    x, y = draw(80)
    model = learn(make(), x, y)
    check_same(merge([make(), model, make()]), model)
    check_same(merge([model], base=make()), model)
    assert merge([make(), make()]).memory.is_empty
    base = learn(make(), x, y)
    check_same(merge([branch(base), branch(base)], base=base), base)
    empty = make()
    workers = [learn(branch(empty), x[k::2], y[k::2]) for k in range(2)]
    check_same(merge(workers, base=empty), base)


# -- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: make(likelihood=BernoulliLikelihood()), "different likelihood"),
        (lambda: make(kernel=RBFKernel()), "different covar_module"),
        (lambda: make(kernel=MaternKernel(nu=0.5)), "different covar_module"),
        (lambda: make(kernel=MaternKernel(ard_num_dims=2)), "different covar_module"),
        (lambda: make(mean_module=ZeroMean()), "different mean_module"),
        (lambda: make(batch_shape=torch.Size([2])), "different likelihood"),
        (lambda: make(alpha=0.5), "different alpha"),
        (lambda: make().float(), "different dtype"),
        (lambda: "a string", "expected a StreamingGP"),
    ],
)
def test_models_that_differ_are_refused_by_name(other, message):
    with pytest.raises(MergeError, match=message):
        merge([make(), other()])
    assert issubclass(MergeError, ArgumentError)


def test_models_of_other_inputs_or_batch_shapes_are_refused():
    x, y = draw(40)
    one, two = make(), make()
    one.update(x, y, num_steps=0)
    two.update(torch.cat([x, x], -1), y, num_steps=0)
    with pytest.raises(MergeError, match="different number of inputs.*2 instead of 1"):
        merge([one, two])
    kernel = ScaleKernel(MaternKernel())
    batched = StreamingGP(
        kernel, GaussianLikelihood(), ZeroMean(), batch_shape=torch.Size([3])
    )
    with pytest.raises(MergeError, match="different batch_shape"):
        merge([StreamingGP(kernel, mean_module=ZeroMean()), batched])
    with pytest.raises(MergeError, match="models is empty"):
        merge([])


def test_a_base_that_would_count_twice_is_asked_for():
    x, y = draw(60)
    base = learn(make(), x, y)
    with pytest.raises(MergeError, match="continue the same base.*base=base"):
        merge([branch(base), branch(base)])


@pytest.mark.parametrize(
    ("copied", "is_other", "options"),
    [("plain copy", False, FIXED), ("plain copy", True, RAW), ("branch", True, RAW)],
)
def test_what_cannot_be_told_apart_is_refused_with_advice(copied, is_other, options):
    """A copy that was compressed, and what continues another base."""
    x, y = draw(300)
    base, other = (learn(make(), x[:n], y[:n], options=RAW) for n in (20, 10))
    worker = COPIES[copied](other if is_other else base)
    learn(worker, x[100:], y[100:], options=options)
    advice = r"models\[0\].*no branch of this base.*torch_ssgp.branch\(base\)"
    with pytest.raises(MergeError, match=advice):
        merge([worker], base=base)


def test_a_branch_keeps_raw_data_as_long_as_any_model():
    """What it inherited takes no room from what it adds."""
    x, y = draw(200)
    base = learn(make(30), x[:100], y[:100])
    worker = branch(base)
    for k in range(100, 130):
        worker.update(x[k : k + 1], y[k : k + 1], **RAW)
    assert worker.memory.num_raw == 30
    worker.update(x[130:131], y[130:131], **RAW)
    assert worker.memory.num_raw == 0
    assert worker.memory.num_data == 131


def test_models_that_drift_are_merged_on_one_clock():
    """What came last to each came last to all, and data of the same place differ."""
    x, y = draw(60)
    models = [learn(make(100), x[k::2], y[k::2], options=RAW) for k in range(2)]
    for model in models:
        rate = torch.full_like(model.memory.rate, 0.02)
        model.memory.replace(rate=rate)
    merged = merge(models)
    assert merged.memory.rate == 0.02
    time, now = merged.memory.time, merged.memory.count().arrived
    assert now == 60
    for part in time.split(30):
        assert torch.equal(part, torch.arange(30, 60).double())
    kernel = merged.covar_module
    gap = (time - time.unsqueeze(-1)).abs()

    def k(a, b, late):
        return (kernel(a, b).to_dense() * torch.exp(-0.02 * late)).detach()

    both = torch.cat([x[0::2], x[1::2]])
    C = k(both, both, gap) + merged.likelihood.noise.detach() * torch.eye(60).double()
    weights = torch.linalg.solve(C, torch.cat([y[0::2], y[1::2]]))
    mean = k(Z, both, now - time) @ weights
    torch.testing.assert_close(merged(Z).mean, mean, rtol=1e-8, atol=1e-8)

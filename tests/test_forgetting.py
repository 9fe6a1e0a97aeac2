"""What the evidence forgets and leaves out, and when an update learns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from torch import Tensor

from torch_ssgp import StreamingGP, UpdateOptions, branch
from torch_ssgp.exceptions import ArgumentError, OutlierWarning
from torch_ssgp.update import ascent

Function = Callable[[Tensor], Tensor]

STEPS = 20  # of the inner loop: enough here, and tests are to be short


def make(num_inducing: int = 20, dims: int = 1, **options) -> StreamingGP:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=dims))
    return StreamingGP(kernel, num_inducing=num_inducing, **options).double()


def batches(
    f: Function, count: int, size: int, noise: float = 0.05, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = 6 * torch.rand(size, 1, dtype=torch.float64, generator=generator)
        e = torch.randn(size, dtype=torch.float64, generator=generator)
        yield x, f(x.squeeze(-1)) + noise * e


def rmse(model: StreamingGP, f: Function) -> float:
    x = torch.linspace(0, 6, 100, dtype=torch.float64)
    return float((model(x.unsqueeze(-1)).mean - f(x)).square().mean().sqrt())


# -- streams that change --------------------------------------------------------------


def test_labels_that_arrive_class_by_class_are_no_change():
    model = StreamingGP(
        ScaleKernel(RBFKernel()), likelihood=BernoulliLikelihood(), num_inducing=15
    ).double()
    x = torch.linspace(0, 6, 160).double().unsqueeze(-1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    labels = (torch.sin(x.squeeze(-1)) > 0).double()
    order = order[labels[order].argsort(stable=True)]
    for rows in order.split(16):
        result = model.update(x[rows], labels[rows], num_steps=STEPS)
        assert float(result.forgot) == 1
    wrong = (model(x).mean > 0) != (labels > 0)
    assert float(wrong.double().mean()) < 0.1


def test_one_of_several_classes_may_come_late_and_labels_may_change():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 2, generator=generator).double()
    labels = (x[:, 0] > 0.5).long() + (x[:, 1] > 0).long()
    model = StreamingGP(
        ScaleKernel(RBFKernel()),
        SoftmaxLikelihood(num_classes=3, mixing_weights=False),
        num_inducing=40,
        batch_shape=torch.Size([3]),
    ).double()
    for rows in labels.argsort(stable=True).split(30):
        result = model.update(x[rows], labels[rows], num_steps=15)
        assert (result.forgot == 1).all()
    assert (model(x).mean.argmax(0) != labels).double().mean() < 0.15
    others = [
        model.update(x[k::5], (labels[k::5] + 1) % 3, num_steps=15).forgot.tolist()
        for k in (0, 1)
    ]
    assert [0.0, 0.0, 0.0] in others  # classes share their data


def test_by_default_the_evidence_decides_where_the_model_learns():
    assert UpdateOptions().forgets_by_evidence
    assert UpdateOptions(learn_hyperparameters=True).forgets_by_evidence
    assert not UpdateOptions(learn_hyperparameters=3).forgets_by_evidence
    assert not UpdateOptions(num_steps=0).forgets_by_evidence
    assert not UpdateOptions(learn_hyperparameters=False).forgets_by_evidence
    assert not UpdateOptions(forget=1.0).forgets_by_evidence
    assert not UpdateOptions(forget="auto", num_steps=0).forgets_by_evidence
    model = make()
    for x, y in batches(torch.sin, 4, 20):
        model.update(x, y, num_steps=STEPS)
    copy_ = copy.deepcopy(model)
    x, y = next(batches(lambda x: 5 + torch.cos(2 * x), 1, 20, seed=1))
    assert float(model.update(x, y, num_steps=STEPS).forgot) == 0
    assert float(copy_.update(x, y, num_steps=0).forgot) == 1


def test_a_branch_keeps_all_by_default():
    model = make()
    for x, y in batches(torch.sin, 4, 20):
        model.update(x, y, num_steps=STEPS)
    worker = branch(model)
    x, y = next(batches(lambda x: 5 + torch.cos(2 * x), 1, 20, seed=1))
    assert float(worker.update(x, y, num_steps=STEPS).forgot) == 1


@pytest.mark.filterwarnings("ignore::torch_ssgp.exceptions.OutlierWarning")
def test_copies_of_an_input_are_one_witness():
    model = make()
    for x, y in batches(torch.sin, 4, 20):
        model.update(x, y, num_steps=STEPS)
    x = torch.full((20, 1), 3.0).double()
    result = model.update(x, 5 + 0 * x.squeeze(-1), num_steps=STEPS)
    assert float(result.forgot) == 1


def test_a_stream_without_noise_is_no_change():
    model = make()
    for x, y in batches(torch.sin, 12, 10, noise=0.0):
        assert float(model.update(x, y, num_steps=STEPS).forgot) == 1


@pytest.mark.parametrize("size", [1, 5, 40])
def test_a_new_function_is_found_at_once_and_followed(size: int):
    model, count = make(), max(60 // size, 6)

    def other(x: Tensor) -> Tensor:
        return 3 - torch.cos(2 * x)

    for x, y in batches(torch.sin, count, size):
        result = model.update(x, y, forget="auto", num_steps=STEPS)
        assert float(result.forgot) == 1
    forgot = [
        float(model.update(x, y, forget="auto", num_steps=STEPS).forgot)
        for x, y in batches(other, count, size, seed=1)
    ]
    assert 0 in forgot[: max(8 // size, 2)]
    assert set(forgot) <= {0.0, 1.0} and forgot.count(0.0) == 1
    assert rmse(model, other) < 0.1


@pytest.mark.parametrize("before, after", [(1.0, 1e3), (1e3, 1.0)])
def test_a_change_of_scale_is_found_and_followed(before: float, after: float):
    model = make()
    for x, y in batches(torch.sin, 10, 8):
        model.update(x, before * y, forget="auto", num_steps=STEPS)
    for x, y in batches(torch.sin, 10, 8, seed=1):
        model.update(x, after * y, forget="auto", num_steps=STEPS)
    assert rmse(model, lambda x: after * torch.sin(x)) < 0.1 * after


def test_an_outlier_is_no_change():
    model = make()
    for i, (x, y) in enumerate(batches(torch.sin, 60, 1)):
        y = y + 20 * 0.05 * (i == 40)
        assert float(model.update(x, y, forget="auto", num_steps=STEPS).forgot) == 1


def test_a_new_range_and_an_empty_stretch_are_no_change():
    model = make(num_inducing=40)
    for offset, seed in ((0.0, 0), (6.0, 1), (30.0, 2)):
        for x, y in batches(lambda x, o=offset: torch.sin(x + o), 8, 10, seed=seed):
            assert (
                float(
                    model.update(x + offset, y, forget="auto", num_steps=STEPS).forgot
                )
                == 1
            )


def test_a_slow_drift_is_followed():
    """Better than nothing forgotten, without a number to guess: by a rate."""
    models, rates = {"auto": make(), 1.0: make()}, {}
    for i in range(20):

        def f(x: Tensor, i: int = i) -> Tensor:
            return torch.sin(x + 0.08 * i)

        x, y = next(batches(f, 1, 10, seed=i))
        for name, model in models.items():
            result = model.update(x, y, forget=name, num_steps=STEPS)
            rates[name] = float(result.rate)
    errors = {name: rmse(model, f) for name, model in models.items()}
    assert errors["auto"] < 0.5 * errors[1.0]
    assert rates["auto"] > 0 == rates[1.0]
    # At its word: every datum counts in full, from then on.
    assert float(models["auto"].update(x, y, forget=1.0).rate) == 0


def test_streams_of_a_batch_forget_on_their_own():
    model = StreamingGP(
        ScaleKernel(
            RBFKernel(batch_shape=torch.Size([2])), batch_shape=torch.Size([2])
        ),
        num_inducing=20,
        batch_shape=torch.Size([2]),
    ).double()
    for x, y in batches(torch.sin, 8, 10):
        model.update(x, torch.stack([y, y]), forget="auto", num_steps=STEPS)
    forgot = []
    for x, y in batches(torch.sin, 6, 10, seed=1):
        result = model.update(
            x, torch.stack([y, 5 - 3 * y]), forget="auto", num_steps=STEPS
        )
        forgot.append(result.forgot)
    powers = torch.stack(forgot)
    assert (powers[:, 0] == 1).all()
    assert (powers[:2, 1] < 0.5).any()
    x = torch.linspace(0.2, 5.8, 50).double()
    mean = model(x.unsqueeze(-1)).mean
    torch.testing.assert_close(mean[0], torch.sin(x), atol=0.15, rtol=0)
    torch.testing.assert_close(mean[1], 5 - 3 * torch.sin(x), atol=0.4, rtol=0)


def test_a_boundary_that_jumps_is_followed():
    model = StreamingGP(
        ScaleKernel(RBFKernel()), likelihood=BernoulliLikelihood(), num_inducing=15
    ).double()
    for sign, seed in ((1, 0), (-1, 1)):
        for x, _ in batches(torch.sin, 10, 20, seed=seed):
            labels = (sign * (x.squeeze(-1) - 3) > 0).double()
            model.update(x, labels, forget="auto", num_steps=STEPS)
    x = torch.linspace(0, 6, 61).double()
    predicted = model.predict(x.unsqueeze(-1)).mean > 0.5
    assert float(model.memory.num_data) == 200  # those since it jumped
    assert (predicted == (x < 3)).double().mean() > 0.9


def test_after_a_change_hyperparameters_start_anew_but_for_frozen_ones():
    model = make()
    model.likelihood.noise = 0.01
    model.likelihood.raw_noise.requires_grad_(False)
    for x, y in batches(torch.sin, 6, 20):
        model.update(x, y, forget="auto", num_steps=STEPS)
    before = model.covar_module.outputscale.item()
    for x, y in batches(torch.sin, 6, 20, seed=1):
        model.update(x, 100 * y, forget="auto", num_steps=STEPS)
    assert model.covar_module.outputscale.item() > 100 * before
    assert model.likelihood.noise.item() == pytest.approx(0.01)


def test_odds_and_powers_are_checked():
    model = make()
    x, y = next(batches(torch.sin, 1, 5))
    with pytest.raises(ArgumentError, match="'auto' to let the evidence decide"):
        model.update(x, y, forget="sometimes")
    with pytest.raises(ArgumentError, match="change_odds is 0"):
        model.update(x, y, forget="auto", change_odds=0)


def test_a_batch_that_arrives_again_is_no_change():
    torch.manual_seed(0)
    model = make(num_inducing=30, memory_size=200)
    for x, y in batches(torch.sin, 10, 8):
        model.update(x, y, num_steps=STEPS)
    x, y = next(batches(torch.sin, 1, 4, seed=1))
    y[0] += 3  # an outlier
    for _ in range(3):
        assert float(model.update(x, y, num_steps=STEPS).forgot) == 1
    assert float(model.memory.num_data) + model.num_outliers == 10 * 8 + 3 * 4
    assert rmse(model, torch.sin) < 0.1


def test_outliers_are_no_drift():
    """Any doubt about the past explains them better, if not by much."""
    torch.manual_seed(0)
    model, known = make(), 0
    for i, (x, y) in enumerate(batches(torch.sin, 24, 8)):
        known += len(y)
        if i >= 14 and i % 2:
            y[0] += (-1) ** (i // 2) * 1.0  # 20 standard deviations of the noise
        result = model.update(x, y, num_steps=STEPS)
        assert float(result.forgot) == 1 and float(result.rate) == 0
    assert float(model.memory.num_data) + model.num_outliers == known
    assert model.num_outliers <= 6 and rmse(model, torch.sin) < 0.1


# -- learning when it pays ------------------------------------------------------------


def test_an_update_learns_when_the_data_have_grown():
    """A Newton step has to promise something: often it does not."""
    model = make()
    learned = [
        model.update(x, y, num_steps=STEPS).learned
        for x, y in batches(torch.sin, 80, 1)
    ]
    assert learned[0] and any(learned[30:]) and sum(learned) < 40


def test_an_update_learns_from_surprising_data():
    model = make()
    for x, y in batches(torch.sin, 12, 20):
        model.update(x, y, num_steps=STEPS)
    x, y = next(batches(torch.sin, 1, 10, seed=5))
    calm = copy.deepcopy(model).update(x, y)
    assert not calm.learned and abs(float(calm.surprise)) < 1
    loud = copy.deepcopy(model).update(x, y + 1)
    assert loud.learned and float(loud.surprise) > 10


def test_an_update_that_does_not_learn_still_knows_the_data():
    model = make()
    for x, y in batches(torch.sin, 12, 20):
        model.update(x, y, num_steps=STEPS)
    x, y = torch.tensor([[8.0]]).double(), torch.tensor([1.5]).double()
    result = model.update(x, y, learn_hyperparameters=False)
    assert not result.learned and result.num_steps == 0
    assert float(model(x).mean) == pytest.approx(1.5, abs=0.2)


def test_an_update_that_learns_takes_no_more_steps_than_it_may(monkeypatch):
    monkeypatch.setattr(ascent, "TOLERANCE", -1.0)  # there is no plateau
    model = make()
    results = [model.update(x, y, num_steps=4) for x, y in batches(torch.sin, 16, 10)]
    steps, learned = [r.num_steps for r in results], [r.learned for r in results]
    assert learned[:2] == [True, True] and not all(learned)
    assert steps == [4 if flag else 0 for flag in learned]


def test_no_learning_is_no_step():
    model = make()
    for x, y in batches(torch.sin, 3, 20):
        result = model.update(x, y, learn_hyperparameters=False)
        assert result.num_steps == 0
    result = model.update(x, y, learn_hyperparameters=False, learn_inducing_points=True)
    assert result.num_steps > 0  # asked for by name


@pytest.mark.parametrize("fits", [True, False])
def test_noise_that_no_longer_fits_is_learned(fits):
    first, second = batches(torch.sin, 2, 200)
    model = make()
    model.update(*first)
    if not fits:
        model.likelihood.noise = model.likelihood.noise.detach() / 9
    x, y = second
    result = model.update(x[:10], y[:10], forget=1.0)  # a twentieth more data
    assert result.learned is not fits


# -- a time axis that grows -----------------------------------------------------------


def follow(model: StreamingGP, num_data: int, step: float = 0.15, **options):
    """One datum after the other on a time axis; errors of forecasts, and results."""
    generator = torch.Generator().manual_seed(0)
    errors, results = [], []
    for i in range(num_data):
        x = torch.full((1, 1), step * i, dtype=torch.float64)
        f = torch.sin(x.squeeze(-1))
        if i:
            errors.append((model(x).mean - f).abs())
        y = f + 0.1 * torch.randn(1, dtype=torch.float64, generator=generator)
        results.append(model.update(x, y, num_steps=STEPS, **options))
    return torch.cat(errors), results


@pytest.mark.filterwarnings("ignore::torch_ssgp.exceptions.BudgetWarning")
def test_a_time_axis_may_grow_past_the_budget():
    model = make(num_inducing=12)
    errors, results = follow(model, 160, step=0.3, forget="auto")
    second, last = errors[32:64], errors[-32:]
    assert last.square().mean().sqrt() < 1.3 * second.square().mean().sqrt() + 0.02
    assert {float(result.forgot) for result in results} == {1.0}
    assert model.memory.num_data < 120  # what the points cannot say is forgotten
    assert (model.points > 40).sum() >= 6  # of a stream that ends at 48


def test_a_map_that_comes_in_large_pieces_keeps_its_whole_range():
    model = make(num_inducing=20)
    t = torch.arange(200, dtype=torch.float64).unsqueeze(-1) / 10
    for part in t.split(40):  # on a time axis in small ones, the oldest would fade
        y = torch.sin(part[:, 0])
        assert float(model.update(part, y, num_steps=STEPS).forgot) == 1
    assert int(model.memory.num_data) == 200
    error = (model(t).mean - torch.sin(t[:, 0])).square().mean().sqrt()
    assert error < 0.1


def test_ranges_that_inputs_have_left_make_room():
    def data(place: int):
        x = 6 * place + 4 * torch.rand(10, 2).double()
        return x, torch.sin(1.5 * x[:, 0]) * torch.cos(x[:, 1])

    torch.manual_seed(0)
    model = make(num_inducing=20, dims=2)
    for place in (0, 1, 2):
        for _ in range(8):
            x, y = data(place)
            model.update(x, y + 0.05 * torch.randn(10), num_steps=STEPS)
    x, f = data(2)
    assert (model(x).mean - f).square().mean().sqrt() < 0.4


# -- what an update reports, and what may be switched --------------------------------


def learned_from(f: Function = torch.sin, count: int = 60) -> StreamingGP:
    model = make()
    model.update(*next(batches(f, 1, count)), num_steps=STEPS)
    return model


def test_stationary_streams_are_learned_as_if_nothing_could_change():
    models = {"auto": make(), 1.0: make()}
    for x, y in batches(torch.sin, 12, 8, noise=0.3):
        for forget, model in models.items():
            model.update(x, y, forget=forget, num_steps=STEPS)
    x = torch.linspace(0, 6, 50).double()
    auto, word = (model(x.unsqueeze(-1)).mean for model in models.values())
    assert torch.equal(auto, word)


def test_an_alarm_is_a_sum_since_a_datum():
    model = learned_from()
    x = torch.tensor([[3.0]]).double()
    off = 3.5 * (model.predict(x).variance.sqrt().detach())
    y = model.predict(x).mean.detach() + off
    result = model.update(x, y, num_steps=STEPS)
    assert 1 < float(result.alarm) < 4.6 and float(result.alarm_since) == 1
    again = model.update(x + 0.5, torch.sin(x[:, 0] + 0.5), num_steps=STEPS)
    assert float(again.alarm) < float(result.alarm)


@pytest.mark.parametrize("labels", [False, True])
def test_surprise_before_learning_is_that_of_the_update(labels: bool):
    x, y = next(batches(torch.sin, 1, 40))
    x_new, y_new = next(batches(torch.sin, 1, 6, seed=1))
    likelihood = None
    if labels:
        likelihood = BernoulliLikelihood()
        y, y_new = (y > 0).double(), (y_new > 0).double()
    model = make(likelihood=likelihood)
    assert float(model.surprise(x, y)) == 0  # nothing was learned yet
    model.update(x, y, num_steps=STEPS)
    before = model.surprise(x_new, y_new)
    off = model.surprise(x_new, 1 - y_new if labels else y_new + 1)
    torch.testing.assert_close(model.update(x_new, y_new).surprise, before)
    assert abs(float(before)) < 1 and float(off) > 2


def test_what_is_left_out_may_be_switched_apart_from_forgetting():
    x, y = next(batches(torch.sin, 1, 1, seed=1))
    for forget, outliers, count in (
        ("auto", None, 1),
        ("auto", False, 0),
        (1.0, None, 0),
        (1.0, True, 1),
    ):
        model = learned_from()
        options = UpdateOptions(forget=forget, outliers=outliers, num_steps=STEPS)
        result = model.update(x, y + 3, options=options)
        assert model.num_outliers == result.num_outliers == count
        assert float(model.memory.num_data) == 61 - count


def test_many_outliers_are_warned_of():
    model = learned_from(count=40)
    with pytest.warns(OutlierWarning, match="StudentTLikelihood"):
        for k, (x, y) in enumerate(batches(torch.sin, 14, 5, seed=1)):
            y[2] += 3 + k
            model.update(x, y, num_steps=STEPS)
    assert 14 <= model.num_outliers <= 16


def test_heavy_tails_and_counts_fade_only_if_something_changes():
    generator = torch.Generator().manual_seed(0)
    for kind in (StudentTLikelihood, PoissonLikelihood):
        model, forgot = make(15, likelihood=kind()), []
        for k, (x, y) in enumerate(batches(torch.sin, 8, 20)):
            f = y + 3 if k < 5 else 3 - y
            if kind is PoissonLikelihood:
                f = torch.poisson(2 * f.clamp_min(0), generator=generator)
            else:
                f[0] += 2.0  # outliers are normal
            forgot.append(float(model.update(x, f, num_steps=STEPS).forgot))
        assert forgot[:5] == [1.0] * 5 and 0.0 in forgot[5:]

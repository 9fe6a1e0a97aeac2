"""What the evidence forgets, and when an update learns."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from gpytorch.kernels import PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor
from torch_ssgp.update.clock import moved, outgrown, ticking
from torch_ssgp.update.drift import REGAINED, SHARE, Drift
from torch_ssgp.update.forgetting import (
    ANEW,
    OUTLIER,
    POWERS,
    QUIET,
    SLACK,
    WITNESS,
    Judgement,
    Verdict,
    decide,
    fading,
    judge,
    of_beginning,
)

import oracles
from torch_ssgp import StreamingGP, UpdateOptions, branch
from torch_ssgp.exceptions import ArgumentError
from torch_ssgp.memory import Data
from torch_ssgp.update import ascent, forgetting, trial

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


# -- evidence -------------------------------------------------------------------------


def test_the_evidence_of_every_power_is_that_of_an_exact_gp():
    x, y = next(batches(torch.sin, 1, 12))
    model = make(num_inducing=40)
    model.update(x, y, num_steps=5)
    model.update(x[:1], y[:1], num_steps=0, inducing_points=x)  # inputs as points
    x_new, y_new = next(batches(torch.cos, 1, 6, seed=1))
    data = model.check_data(x_new, y_new, None)
    known = model.known(data)
    judged = judge(known.frozen, known.summary, data, 1e-10)
    assert judged is not None
    kernel, mean = copy.deepcopy((model.covar_module, model.mean_module))
    old_x, old_y = torch.cat([x, x[:1]]), torch.cat([y, y[:1]])
    predicted = [
        oracles.errors_given_tempered(
            lambda a, b: kernel(a, b).to_dense().detach(),
            old_x,
            old_y,
            x_new,
            y_new,
            model.likelihood.noise.item(),
            power,
            lambda a: mean(a).detach(),
        )
        for power in POWERS
    ]
    errors, log_probs = map(torch.stack, zip(*predicted, strict=True))
    gain = log_probs - log_probs[-1]
    torch.testing.assert_close(judged.gain[:-1], gain.sum(-1), rtol=1e-5, atol=1e-5)
    # For a drift, errors beyond the limit are brought back to it, in all explanations.
    assert (errors[-1] > 2 * OUTLIER).any() and (errors[-1] < 2 * OUTLIER).any()
    scale = (2 * OUTLIER / errors[-1]).clamp_max(1)
    drift = log_probs + 0.5 * (1 - scale) * errors
    gain[1:-1] = (drift - drift[-1])[1:-1]
    capped = gain.clamp_max(OUTLIER).sum(-1)
    torch.testing.assert_close(judged.capped[:-1], capped, rtol=1e-5, atol=1e-5)


def test_data_about_which_the_past_says_little_do_not_contradict_it():
    model = make()
    x, y = next(batches(torch.sin, 1, 60))
    model.update(x, y, num_steps=STEPS)
    x, y = next(batches(torch.cos, 1, 8, seed=1))
    far = torch.cat([x, x + 1000]), torch.cat([y, 5 * y])
    known, both = (
        judge(
            model.known(data).frozen, model.summary, data, model.jitter(torch.float64)
        )
        for data in (model.check_data(x, y, None), model.check_data(*far, None))
    )
    assert known.num_followed == both.num_followed == 8
    torch.testing.assert_close(both.capped[:-1], known.capped[:-1])  # of all powers
    assert known.capped[0] > 5 and known.is_refuted and both.is_refuted


def test_a_scale_that_falls_is_heard_where_nothing_was_known():
    # Else later data hide in what used to be noise, and become part of the past.
    model = make(num_inducing=15)
    for x, y in batches(torch.sin, 6, 10):
        model.update(x, 1000 * y + 100 * torch.randn(10).double(), num_steps=STEPS)
    assert model.likelihood.noise > 50**2
    forgot = []
    for x, y in batches(torch.sin, 4, 10, seed=1):
        forgot.append(float(model.update(x + 1000, y, num_steps=STEPS).forgot))
    assert 0.0 in forgot and model.likelihood.noise < 1


NO_DRIFT = Drift(torch.zeros(()).double(), torch.zeros(()).double())


def judgement_of(
    gain: Tensor, capped: Tensor, num_data: int = 0, num_old: float = 100.0
) -> Judgement:
    zero = torch.zeros(()).double()
    known = (zero + 1, zero + num_data, zero + num_old, zero + num_data)
    return Judgement(gain, capped, zero, zero > 0, zero > 0, *known, gain == gain)


def test_an_alarm_takes_the_log_odds_and_more_than_one_witness():
    columns = len(POWERS) + 1
    nothing = torch.zeros(0, dtype=torch.float64)

    def judged(capped: float, gain: float) -> Judgement:
        gains = torch.zeros(2, columns, dtype=torch.float64)
        gains[0, 0], gains[1, 0] = capped, gain
        return judgement_of(gains[1], gains[0])

    one = decide(judged(OUTLIER, 200.0), nothing, 1e-3, NO_DRIFT)
    assert not one.alarm  # an outlier, whatever its size
    two = decide(judged(OUTLIER, 200.0), one.doubt, 1e-3, NO_DRIFT)
    assert two.alarm
    bold = decide(judged(OUTLIER, 200.0), nothing, 0.1, NO_DRIFT)
    assert bold.alarm
    assert {float(each.power) for each in (one, two, bold)} == {1.0}
    assert (
        float(decide(judged(-20.0, -20.0), one.doubt, 1e-3, NO_DRIFT).doubt.max()) == 0
    )


def test_errors_too_good_to_be_true_speak_for_a_change(monkeypatch):
    """log N(e; 0, c²) - log N(e; 0, 1), e the errors of one datum after the other."""
    monkeypatch.setattr("torch_ssgp.update.forgetting.FOLLOWED", 0.0)  # all count
    model = make(num_inducing=40)
    model.likelihood.noise = 0.04
    for x, y in batches(torch.sin, 1, 12):
        model.update(x, y, num_steps=0, inducing_points=x)
    x_new, y_new = next(batches(torch.sin, 1, 5, noise=0.0, seed=1))
    data = model.check_data(x_new, y_new, None)
    known = model.known(data)
    judged = judge(known.frozen, known.summary, data, 1e-10)
    kernel, mean = model.covar_module, model.mean_module

    square, log_probs = oracles.errors_given_tempered(
        lambda a, b: kernel(a, b).to_dense().detach(),
        x,
        next(batches(torch.sin, 1, 12))[1],
        x_new,
        y_new,
        0.04,
        1.0,
        lambda a: mean(a).detach(),
    )
    log_v = -2 * log_probs - square - math.log(2 * math.pi)
    assert bool((1e-4 / log_v.exp() < QUIET**2).all())  # far from the smallest noise
    expected = -math.log(QUIET) - 0.5 * square * (QUIET**-2 - 1)
    torch.testing.assert_close(judged.gain[-1], expected.sum(), rtol=1e-4, atol=1e-4)


def test_what_a_model_not_quite_right_loses_is_not_counted():
    capped = torch.full((len(POWERS) + 1,), 8.0).double()
    few, many = (judgement_of(capped, capped, num) for num in (5, 50))
    torch.testing.assert_close(few.convincing, capped - 5 * SLACK)
    nothing = torch.zeros(0).double()
    assert decide(few, nothing, 1e-3, NO_DRIFT).alarm
    assert not decide(many, nothing, 1e-3, NO_DRIFT).alarm


def test_the_past_fades_where_the_data_at_hand_bear_witness():
    gain = torch.zeros(len(POWERS) + 1).double()
    gain[2], gain[0], gain[-1] = 9.0, 20.0, 20.0
    judgement = judgement_of(gain, gain)
    assert float(fading(judgement, gain, odds=1e-3)) == POWERS[2]  # no beginning
    assert float(fading(judgement, 0.3 * gain, odds=1e-3)) == 1  # too little in all
    less = judgement._replace(gain=0.2 * gain, capped=0.2 * gain)  # no witness
    assert float(fading(less, gain, odds=1e-3)) == 1
    few = judgement._replace(leaves_enough=judgement.gain != gain[2])
    assert float(fading(few, gain, odds=1e-3)) == 1


def test_a_power_leaves_more_data_than_hyperparameters():
    model = make(num_inducing=10)
    (first, second) = batches(torch.sin, 2, 12)
    model.update(*first, num_steps=STEPS)
    data = model.check_data(*second, None)
    known = model.known(data)
    for few, expected in ((12, True), (2, False)):
        some = data.narrow(0, few)
        found = judge(known.frozen, known.summary, some, 1e-10)
        assert bool(found.leaves_enough[1]) is expected  # 12 * 0.05 + few
        assert bool(found.leaves_enough[[0, *range(3, len(POWERS) + 1)]].all())


def test_data_in_doubt_stay_as_they_came():
    """What is compressed is one with the past, and could not begin anew."""
    model, sizes = make(num_inducing=8), []
    stream = list(batches(torch.sin, 40, 1))
    stream += list(batches(lambda x: 4 + torch.cos(3 * x), 7, 1, seed=1))
    for x, y in stream:
        is_doubtful = float(of_beginning(model.memory.doubt, NO_DRIFT)) > WITNESS
        num_raw = model.memory.y.size(-1)
        result = model.update(x, y, num_steps=STEPS)
        if is_doubtful and float(result.forgot) == 1:
            sizes.append(result.num_remembered)
            assert model.memory.y.size(-1) == num_raw + 1
        assert result.num_remembered <= 2 * model.memory_size
    assert max(sizes) > 1.5 * model.memory_size


def test_evidence_for_more_of_a_drift_is_counted_in_full():
    zero = torch.zeros(()).double()
    gain = torch.zeros(len(POWERS) + 1).double()
    gain[2], gain[3], gain[0] = 0.5, 0.2, -8.0  # less than is not counted otherwise
    step = judgement_of(gain, gain, num_data=20)
    assert 0.5 < SLACK * 20
    start = torch.zeros_like(gain)
    still = decide(step, start, 1e-3, NO_DRIFT)
    assert float(still.power) == 1 and not still.drift.goes_on
    doubt, drift = start, Drift(zero + 1000, zero)
    powers = []
    for _ in range(20):
        power, alarm, doubt, drift = decide(step, doubt, 1e-3, drift)
        powers.append(float(power))
        assert not alarm and bool(drift.goes_on)
    assert powers[0] == 1 and powers[-1] == POWERS[2]
    unheard = decide(step._replace(explained=zero), start, 1e-3, drift)
    assert float(unheard.power) > POWERS[2]  # nothing was heard of it
    other = step._replace(gain=gain + 0, capped=gain + 0)
    other.gain[0] = other.capped[0] = 20.0
    assert decide(other, doubt, 1e-3, drift).alarm  # a drift may end in a change


def test_a_drift_limits_what_is_kept_and_ends_without_a_sign():
    gain = torch.zeros(len(POWERS) + 1).double()
    step = judgement_of(gain, gain, num_data=20, num_old=100.0)
    zero = torch.zeros(()).double()
    doubt, drift, kept = torch.zeros_like(gain), Drift(zero + 200, zero), []
    while bool(drift.goes_on):
        power, alarm, doubt, drift = decide(step, doubt, 1e-3, drift)
        assert not alarm and power == 1
        kept.append(100 * float(drift.limit(power, step.num_old)))
    assert kept[0] == pytest.approx(SHARE * 200 + REGAINED * 20)
    assert kept[1] - kept[0] == pytest.approx(REGAINED * 20)
    assert kept[-1] == 100  # all of what there is
    assert len(kept) == pytest.approx((1 - SHARE) * 200 / (REGAINED * 20), abs=1.01)


def test_a_drift_that_is_noticed_says_how_much_to_keep():
    gain = torch.zeros(len(POWERS) + 1).double()
    gain[3] = 8.0  # for half of the past
    step = judgement_of(gain, gain, num_data=20, num_old=100.0)
    power, alarm, _, drift = decide(step, torch.zeros_like(gain), 1e-3, NO_DRIFT)
    assert not alarm and float(drift.noticed) == 120
    limited = drift.limit(power, step.num_old)
    assert 100 * float(limited) == pytest.approx(SHARE * 120)


def drifting(noticed: float = 25.0) -> StreamingGP:
    """A model of 80 data, said to drift."""
    model = make()
    for x, y in batches(torch.sin, 4, 20):
        model.update(x, y, num_steps=STEPS)
    zero = torch.zeros(()).double()
    model.memory.replace(noticed=zero + noticed, since_noticed=zero)
    return model


@pytest.mark.parametrize("options", [{"forget": 1.0}, {"num_steps": 0}])
def test_a_drift_is_over_where_the_evidence_is_not_asked(options):
    """Else the next update that asks would drop what was kept on purpose."""
    model = drifting()
    x, y = next(batches(torch.sin, 1, 20, seed=1))
    assert float(model.update(x, y, **{"num_steps": STEPS, **options}).forgot) == 1
    assert float(model.memory.noticed) == 0
    x, y = next(batches(torch.sin, 1, 20, seed=2))
    assert float(model.update(x, y, num_steps=STEPS).forgot) == 1


@pytest.mark.parametrize("noticed", [0.0, 1000.0])
def test_evidence_is_spent_where_a_drift_is_noticed(noticed):
    model = drifting(noticed)
    doubt = torch.zeros(len(POWERS) + 1).double()
    doubt[POWERS.index(0.8)] = 20.0
    model.memory.replace(doubt=doubt)
    x, y = next(batches(torch.sin, 1, 20, seed=1))
    result = model.update(x, y, num_steps=STEPS)
    assert float(result.forgot) == pytest.approx(SHARE * 100 / 80)
    assert float(model.memory.noticed) == 100 and not model.memory.doubt.any()


def test_labels_of_one_class_leave_a_drift_and_its_evidence_alone():
    model = StreamingGP(
        ScaleKernel(RBFKernel()), BernoulliLikelihood(), num_inducing=15
    ).double()
    for x, _ in batches(torch.sin, 4, 40):
        model.update(x, (x[:, 0] > 3).double(), num_steps=STEPS)
    zero = torch.zeros(()).double()
    doubt = torch.zeros(len(POWERS) + 1).double()
    doubt[4:9] = 9.0  # enough for a drift
    one = torch.ones(1).double()
    model.memory.replace(doubt=doubt)
    model.update(3.5 * one, one, num_steps=STEPS)
    assert float(model.memory.noticed) == 0
    assert float(model.memory.doubt[4:9].min()) > 6
    model.memory.replace(noticed=zero + 160, since_noticed=zero + 10, doubt=0 * doubt)
    model.update(3.6 * one, one, num_steps=STEPS)
    assert float(model.memory.noticed) == 160


def test_a_stream_that_drifts_does_not_stop_the_clock(monkeypatch):
    """What a drift keeps is limited at every update; a time axis may end meanwhile."""
    model, asked, zero = drifting(), [], torch.zeros(()).double()
    monkeypatch.setattr(forgetting, "outgrown", lambda *_: asked.append(True))

    def calm(judgement, *_):
        drift = Drift(zero + 100, zero + 20)
        return Verdict(zero + 1, zero > 0, 0 * judgement.gain, drift)

    monkeypatch.setattr(forgetting, "decide", calm)
    x, y = next(batches(torch.sin, 1, 20, seed=1))
    assert float(model.update(x, y, num_steps=STEPS).forgot) < 1
    assert asked


def test_what_a_trial_fades_is_on_top_of_what_a_drift_keeps(monkeypatch):
    """In a batch, one stream fades after its trial while another one drifts."""
    streams = torch.Size([2])
    kernel = ScaleKernel(RBFKernel(batch_shape=streams), batch_shape=streams)
    model = StreamingGP(kernel, num_inducing=20, batch_shape=streams).double()
    for x, y in batches(torch.sin, 5, 20):
        model.update(x, torch.stack([y, y]), num_steps=STEPS)
    noticed = torch.tensor([150.0, 0.0]).double()
    model.memory.replace(noticed=noticed, since_noticed=0 * noticed)

    def alarmed(judgement, *arguments):
        drift = Drift(noticed, 0 * noticed + 20)
        return Verdict(torch.ones(2).double(), alarm, judgement.gain, drift)

    alarm = torch.tensor([False, True])
    monkeypatch.setattr(forgetting, "decide", alarmed)
    faded = torch.tensor([1.0, 0.5]).double()
    monkeypatch.setattr(trial, "fading", lambda *_: faded)
    x, y = next(batches(torch.sin, 1, 20, seed=1))
    result = model.update(x, torch.stack([y, y]), num_steps=STEPS)
    kept = SHARE * 150 + REGAINED * 20
    assert float(result.forgot[0]) == pytest.approx(kept / 100)
    assert float(result.forgot[1]) == pytest.approx(SHARE * 120 / 100)


def test_a_beginning_has_to_explain_more_than_the_drift():
    zero = torch.zeros(()).double()
    gain = torch.zeros(len(POWERS) + 1).double()
    gain[0], gain[1] = 9.0, 9.5
    doubt, drift = torch.zeros_like(gain), Drift(zero + 200, zero)
    for _ in range(10):
        step = judgement_of(gain, gain, num_data=20)
        power, alarm, doubt, drift = decide(step, doubt, 1e-3, drift)
        assert not alarm and float(power) <= POWERS[1]
    assert float(doubt.max()) <= math.log(1e3) + 1e-9
    gain[0] = 20.0
    power, alarm, doubt, drift = decide(judgement_of(gain, gain), doubt, 1e-3, drift)
    assert alarm and float(power) <= POWERS[1]  # should it lose, the drift goes on


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


# -- streams that change --------------------------------------------------------------


def test_by_default_the_evidence_decides_where_the_model_learns():
    assert UpdateOptions().forgets_by_evidence
    assert UpdateOptions(learn_hyperparameters=True).forgets_by_evidence
    assert not UpdateOptions(learn_hyperparameters=3).forgets_by_evidence
    assert not UpdateOptions(num_steps=0).forgets_by_evidence
    assert not UpdateOptions(learn_hyperparameters=False).forgets_by_evidence
    assert not UpdateOptions(forget=1.0).forgets_by_evidence
    assert UpdateOptions(forget="auto", num_steps=0).forgets_by_evidence
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


def test_a_beginning_that_lost_waits_and_the_past_may_only_fade():
    model = make()
    for x, y in batches(torch.sin, 4, 20):
        model.update(x, y, num_steps=STEPS)
    model.memory.replace(waiting=torch.tensor(30.0).double())
    x, y = next(batches(lambda x: 5 + torch.cos(2 * x), 1, 20, seed=1))
    free = copy.deepcopy(model)
    free.memory.replace(waiting=torch.tensor(20.0).double())
    assert 0 < float(model.update(x, y, num_steps=STEPS).forgot) < 1
    assert float(model.memory.waiting) == 10
    assert float(free.update(x, y, num_steps=STEPS).forgot) == 0


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
    """Better than nothing forgotten, without a number to guess."""
    models, forgot = {"auto": make(), 1.0: make()}, {"auto": [], 1.0: []}
    for i in range(30):

        def f(x: Tensor, i: int = i) -> Tensor:
            return torch.sin(x + 0.08 * i)

        x, y = next(batches(f, 1, 10, seed=i))
        for name, model in models.items():
            forgot[name].append(
                float(model.update(x, y, forget=name, num_steps=STEPS).forgot)
            )
    errors = {name: rmse(model, f) for name, model in models.items()}
    assert errors["auto"] < 0.5 * errors[1.0]
    assert min(forgot["auto"]) < 1 == min(forgot[1.0])


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
    assert (powers[:2, 1] < ANEW).any()
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


def test_a_change_that_was_found_leaves_no_doubt_where_nothing_is_learned():
    model = make()
    for x, y in batches(torch.sin, 6, 20):
        model.update(x, y, num_steps=STEPS)
    x, y = next(batches(torch.sin, 1, 20, seed=1))
    result = model.update(x, y + 3, forget="auto", num_steps=0)
    assert float(result.forgot) == 0
    assert float(model.memory.doubt.max()) == 0


def test_odds_and_powers_are_checked():
    model = make()
    x, y = next(batches(torch.sin, 1, 5))
    with pytest.raises(ArgumentError, match="'auto' to let the evidence decide"):
        model.update(x, y, forget="sometimes")
    with pytest.raises(ArgumentError, match="change_odds is 0"):
        model.update(x, y, forget="auto", change_odds=0)


# -- learning when it pays ------------------------------------------------------------


def test_an_update_learns_when_the_data_have_grown():
    model, learned = make(), []
    for x, y in batches(torch.sin, 80, 1):
        learned.append(model.update(x, y, num_steps=STEPS).learned)
    assert learned[0]
    gaps = [b - a for a, b in itertools.pairwise(_where(learned))]
    assert sum(learned) < 40
    assert max(gaps) <= 0.25 * 80 + 1


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


def _where(flags: list[bool]) -> list[int]:
    return [i for i, flag in enumerate(flags) if flag]


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
    errors, results = follow(model, 240, step=0.3, forget="auto")
    second, last = errors[48:96], errors[-48:]
    assert last.square().mean().sqrt() < 1.3 * second.square().mean().sqrt() + 0.02
    forgot = [float(result.forgot) for result in results]
    assert 0 < min(forgot) < 1  # a stretch is dropped, nothing begins anew
    assert model.memory.num_data < 200
    assert model.summary.inducing_points.amin() > 10  # where the stream began


def test_a_map_that_comes_in_large_pieces_keeps_its_whole_range():
    model = make(num_inducing=6)
    t = torch.arange(200, dtype=torch.float64).unsqueeze(-1) / 10
    for k, part in enumerate(t.split(20)):
        y = torch.sin(part[:, 0]) + 3 * (k > 5)  # on a time axis, one function
        assert float(model.update(part, y, num_steps=STEPS).forgot) == 1
    assert int(model.memory.num_data) == 200


@pytest.mark.parametrize("sign", [1, -1])
def test_a_clock_is_an_input_that_only_grows_or_only_falls(sign):
    model = make(num_inducing=10)
    model.covar_module.base_kernel.lengthscale = 0.3
    kernel = model.covar_module
    t = sign * torch.arange(50, dtype=torch.float64).unsqueeze(-1) / 10
    model.update(t[:40], torch.sin(t[:40, 0]), num_steps=0)
    model.memory.replace(lost=torch.tensor(30.0).double())
    known = torch.tensor(True)
    data = Data(t[40:], torch.sin(t[40:, 0]))
    assert outgrown(kernel, model.memory, data, known) == (0, sign)
    assert outgrown(kernel, model.memory, data, ~known) is None  # far ahead: a map
    shuffled = Data(data.x.flip(-2), data.y)
    assert outgrown(kernel, model.memory, shuffled, known) is None
    repeated = Data(torch.cat([data.x[:-1], data.x[-2:-1]]), data.y)
    assert outgrown(kernel, model.memory, repeated, known) is None
    model.memory.replace(lost=torch.tensor(0.1).double())
    assert outgrown(kernel, model.memory, data, known) is None  # points suffice
    model.memory.replace(lost=torch.tensor(30.0).double())
    related = PeriodicKernel().double()  # what is old is needed
    assert outgrown(related, model.memory, data, known) is None


def test_points_that_moved_past_the_last_datum_leave_the_clock_alone():
    """Or the next piece of a map could seem to contradict it, and all be forgotten."""
    t = torch.arange(40, dtype=torch.float64).unsqueeze(-1) / 10
    model = make(num_inducing=10, memory_size=10)
    model.update(t[:30], torch.sin(t[:30, 0]), num_steps=0, inducing_points=t[2:30:3])
    data = Data(t[30:], torch.sin(t[30:, 0]))
    assert ticking(model.memory, data) == (0, 1)
    points = model.memory.points
    model.memory.replace(points=points + 0.2)
    assert ticking(model.memory, data) == (0, 1)
    model.memory.replace(points=points + 1.0)
    assert ticking(model.memory, data) is None


def test_rows_of_a_map_may_have_ties():
    """A map that is filled row by row; every row has one value of the first input."""
    first, second = torch.meshgrid(torch.arange(8.0), torch.arange(5.0), indexing="ij")
    x = torch.stack([first.flatten(), second.flatten()], -1).double()
    y = torch.sin(x.sum(-1))
    model = make(num_inducing=10, dims=2)
    model.update(x[:22], y[:22], num_steps=0)
    data = Data(x[22:], y[22:])  # from the middle of a row
    assert ticking(model.memory, data) is None
    assert ticking(model.memory, data, ties=True) == (0, 1)
    assert ticking(model.memory, Data(x[:18], y[:18]), ties=True) is None


def test_inputs_that_move_on_are_told_from_those_that_are_everywhere():
    model = make(num_inducing=10, dims=2)
    x = 4 * torch.rand(40, 2).double()
    x[20:, 0] += 6  # a second range, which has a part of the points by now
    model.update(x, torch.sin(x.sum(-1)), num_steps=0)
    compressed = model.memory.compressed.points[:, 0]
    assert 0.25 < (compressed > 5).double().mean() <= 0.5

    def seen(x):
        return moved(model.memory, Data(x, x[:, 0]))

    there = x[20:]
    assert seen(x) is None and seen(there) == (0, 1)
    assert seen(there[:3]) is None  # by chance, perhaps
    assert seen(there[:1].expand(20, -1)) is None  # one place is no range
    assert seen(there + 20) is None  # nothing is known there that could be left
    # A starved model may be too coarse to follow anything.
    data, unknown = Data(there, there[:, 0]), torch.tensor(False)
    model.covar_module.base_kernel.lengthscale = 0.3
    for lost, clock in ((30.0, (0, 1)), (0.1, None)):
        model.memory.replace(lost=torch.tensor(lost).double())
        assert outgrown(model.covar_module, model.memory, data, unknown) == clock


def test_ranges_that_inputs_have_left_make_room():
    def data(place: int):
        x = 6 * place + 4 * torch.rand(10, 2).double()
        return x, torch.sin(1.5 * x[:, 0]) * torch.cos(x[:, 1])

    errors = {}
    for forget in ("auto", 1.0):
        torch.manual_seed(0)
        model = make(num_inducing=20, dims=2)
        for place in (0, 1, 2):
            for _ in range(15):
                x, y = data(place)
                y = y + 0.05 * torch.randn(10)
                model.update(x, y, forget=forget, num_steps=20)
        x, f = data(2)
        errors[forget] = (model(x).mean - f).square().mean().sqrt()
    assert errors["auto"] < 0.5 * errors[1.0]


@pytest.mark.parametrize("fits", [True, False])
def test_noise_and_scale_that_no_longer_fit_are_learned(fits, monkeypatch):
    monkeypatch.setattr("torch_ssgp.update.forgetting.SURPRISING", math.inf)
    first, second = batches(torch.sin, 2, 200)
    model = make()
    model.update(*first)
    if not fits:
        model.likelihood.noise = model.likelihood.noise.detach() / 9
    x, y = second
    result = model.update(x[:10], y[:10], forget=1.0)  # a twentieth more data
    assert result.learned is not fits


def test_a_batch_that_arrives_again_is_no_witness():
    torch.manual_seed(0)
    model = make(num_inducing=30, memory_size=200)
    for x, y in batches(torch.sin, 15, 8):
        model.update(x, y)
    x, y = next(batches(torch.sin, 1, 4, seed=1))
    y[0] += 3  # an outlier
    results = [model.update(x, y)]
    doubt = model.memory.doubt
    assert float(doubt.max()) > 0
    for _ in range(2):
        results.append(model.update(x, y))
        assert torch.equal(model.memory.doubt, doubt)
    assert all(float(result.forgot) == 1 for result in results)
    assert float(model.memory.num_data) == 15 * 8 + 3 * 4


def test_outliers_are_no_drift():
    """Any doubt about the past explains them better, if not by much."""
    torch.manual_seed(0)
    model, known = make(), 0
    for i, (x, y) in enumerate(batches(torch.sin, 30, 8)):
        known += len(y)
        if i >= 20 and i % 2:
            y[0] += (-1) ** (i // 2) * 1.0  # 20 standard deviations of the noise
        result = model.update(x, y)
        assert float(result.forgot) == 1
    assert float(model.memory.num_data) == known and rmse(model, torch.sin) < 0.1

"""The baselines are what they are said to be: comparisons with them are fair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.utils.errors import NotPSDError
from torch import Tensor
from torch.testing import assert_close

import oracles
from torch_ssgp import StreamingGP
from workbench import baselines
from workbench.baselines import (
    BatchSGPR,
    Careful,
    Method,
    PaperForm,
    Streaming,
    WindowedGP,
    WindowedSGPR,
    normal_scores,
)
from workbench.uncollapsed import SVI, OnlineConditioning

NOISE = 0.1


def wave(num: int, num_dims: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs in [0, 6] sorted by the first, and noisy values of a smooth function."""
    gen = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(num, num_dims, generator=gen, dtype=torch.float64)
    x = x[x[:, 0].argsort()]
    noise = torch.randn(num, generator=gen, dtype=torch.float64)
    return x, torch.sin(x).sum(-1) + NOISE * noise


def grid(num: int = 40, last: float = 6.0) -> Tensor:
    return torch.linspace(0, last, num, dtype=torch.float64).unsqueeze(-1)


def batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


# ------------------------------------------------------------------------- interface

METHODS: dict[str, Callable[[], Method]] = {
    "streaming": lambda: Streaming(2, 15, num_steps=20),
    "the paper's form": lambda: PaperForm(2, 15, num_steps=20),
    "streaming, care": lambda: Careful(2, 15, num_batches=3, num_steps=20),
    "windowed GP": lambda: WindowedGP(2, window=50, num_steps=5, first_steps=10),
    "windowed SGPR": lambda: WindowedSGPR(2, 15, window=50, num_steps=20),
    "SVI": lambda: SVI(2, lr=0.02, z=wave(15, 2, seed=1)[0], num_steps=20),
    "conditioning": lambda: OnlineConditioning(2, 15, first_steps=20),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_follows_a_stream(name: str) -> None:
    x, y = wave(90, 2)
    method = METHODS[name]()
    for batch in batches(x, y, 30):
        method.update(*batch)
    x_test = wave(30, 2, seed=2)[0].requires_grad_()
    mean, variance = method.predict(x_test)
    values = method.hyperparameters()
    assert mean.shape == variance.shape == (30,)
    assert not mean.requires_grad and not variance.requires_grad
    assert mean.isfinite().all()
    assert (variance >= values["noise"]).all()
    assert set(values) == {"lengthscale", "outputscale", "noise", "mean"}
    assert len(values["lengthscale"]) == 2
    assert getattr(method, "failures", []) == []
    # The last batch, which all of them remember, is not predicted by a constant.
    assert normal_scores(*method.predict(x[60:]), y[60:])["RMSE"] < 0.8 * y[60:].std()


def test_predictions_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    method = WindowedGP(1, first_steps=2)
    method.update(*wave(30))
    whole = method.predict(grid())
    monkeypatch.setattr(baselines, "CHUNK", 7)
    assert_close(method.predict(grid()), whole)


def test_scores_are_those_of_the_definition() -> None:
    mean, variance, y = torch.rand(3, 20, dtype=torch.float64).unbind()
    scores = normal_scores(mean, variance, y)
    each = MultivariateNormal(mean, torch.diag(variance)).log_prob(y) / 20
    assert scores["MLL"] == pytest.approx(each.item())
    assert scores["RMSE"] == pytest.approx(((mean - y) ** 2).mean().item() ** 0.5)


# ----------------------------------------------------------- with our own closed form


def test_streaming_is_the_model_with_its_defaults() -> None:
    model = StreamingGP(baselines.new_kernel(1), num_inducing=12).double()
    method = Streaming(1, 12)
    for batch in batches(*wave(60), 30):
        model.update(*batch)
        method.update(*batch)
    expected = model.predict(grid())
    mean, variance = method.predict(grid())
    assert_close(mean, expected.mean)
    assert_close(variance, expected.variance)


def test_predictions_from_memory_are_those_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = Streaming(1, 8, num_steps=5)
    for batch in batches(*wave(60), 30):
        method.update(*batch)
    expected = method.model.predict(grid(), from_memory=True)
    monkeypatch.setattr(baselines, "CHUNK", 7)
    mean, variance = method.predict_from_memory(grid())
    assert_close(mean, expected.mean)
    assert_close(variance, expected.variance)
    assert not torch.equal(mean, method.predict(grid())[0])


def asked(
    method: Streaming, num: int, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """The options of ``num`` updates."""
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(
        method.model, "update", lambda x, y, **given: options.append(given)
    )
    for _ in range(num):
        method.update(*wave(5))
    return options


def test_the_papers_form_keeps_the_past_at_its_inducing_points() -> None:
    paper, ours = PaperForm(1, 12).model, Streaming(1, 12).model
    assert paper.memory_size == paper.num_inducing == ours.num_inducing == 12
    assert ours.memory_size > ours.num_inducing
    assert not paper.share_noise and ours.share_noise
    assert PaperForm(1, 12, share_noise=True).model.share_noise


def test_the_papers_form_learns_from_every_batch_and_forgets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"num_steps": 9, "forget": 1.0, "learn_hyperparameters": True}
    assert asked(PaperForm(1, 5, num_steps=9), 3, monkeypatch) == [options] * 3
    assert asked(Streaming(1, 5, num_steps=9), 3, monkeypatch) == [{"num_steps": 9}] * 3


def test_only_the_last_batch_is_learned_from_with_care(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = Careful(1, 5, num_batches=3, num_steps=9, last_steps=99)
    last = {"num_steps": 99, "learn_hyperparameters": True, "optimizer": "lbfgs"}
    plain = {"num_steps": 9}
    assert asked(method, 3, monkeypatch) == [plain, plain, last]


def test_batch_ends_at_an_optimum_of_the_model() -> None:
    x, y = wave(80)
    method = BatchSGPR(1, 10)
    method.update(x, y)
    assert method.converged
    # The model, where the method ended, finds nothing better and predicts the same.
    ours = method.model
    model = StreamingGP(
        ours.covar_module, ours.likelihood, ours.mean_module, num_inducing=10
    ).double()
    z = ours.summary.inducing_points
    before = model.update(x, y, inducing_points=z, num_steps=0).bound
    assert_close(model.predict(grid()).mean, method.predict(grid())[0])
    model.reset()
    result = model.update(x, y, inducing_points=z, num_steps=50, optimizer="lbfgs")
    assert result.bound - before < 1e-2


def test_batch_takes_data_once() -> None:
    method = BatchSGPR(1, 5, num_steps=2)
    method.update(*wave(20))
    with pytest.raises(RuntimeError, match="one update"):
        method.update(*wave(20))


# ----------------------------------------------------------------------------- windows


@pytest.mark.parametrize(
    "make",
    [
        lambda: WindowedGP(1, window=25, num_steps=1, first_steps=1),
        lambda: WindowedSGPR(1, 5, window=25, num_steps=1),
    ],
)
def test_window_holds_the_last_points(
    make: Callable[[], WindowedGP | WindowedSGPR],
) -> None:
    x, y = wave(60)
    method = make()
    for batch in batches(x, y, 20):
        method.update(*batch)
    assert_close(method.window.x, x[-25:], rtol=0, atol=0)
    assert_close(method.window.y, y[-25:], rtol=0, atol=0)


class _ExactGP(gpytorch.models.ExactGP):
    def __init__(self, method: WindowedGP) -> None:
        window, model = method.window, method.model
        super().__init__(window.x, window.y, model.likelihood)
        self.mean_module, self.covar_module = model.mean_module, model.covar_module

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_evidence_of_the_window_and_its_gradient_are_those_of_gpytorch() -> None:
    method = WindowedGP(2, window=40, num_steps=2, first_steps=2)
    method.JITTER = 0.0  # GPyTorch has none
    for batch in batches(*wave(60, 2), 30):
        method.update(*batch)
    parameters = list(method.model.parameters())
    ours = -method.negative_log_evidence()
    gradient = torch.autograd.grad(ours, parameters)
    exact = _ExactGP(method).train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(method.model.likelihood, exact)
    theirs = mll(exact(method.window.x), method.window.y) * 40
    assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    assert len(gradient) == 4
    for a, b in zip(gradient, torch.autograd.grad(theirs, parameters), strict=True):
        assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_windowed_gp_predicts_as_gpytorch_and_is_at_an_optimum() -> None:
    method = WindowedGP(1)
    x, y = wave(60)
    method.update(x, y)
    exact = _ExactGP(method).eval()
    method.model.likelihood.eval()
    with torch.no_grad():
        expected = method.model.likelihood(exact(grid()))
    mean, variance = method.predict(grid())
    assert_close(mean, expected.mean, rtol=1e-5, atol=1e-6)
    assert_close(variance, expected.variance, rtol=1e-5, atol=1e-6)
    loss = method.negative_log_evidence()
    for gradient in torch.autograd.grad(loss, list(method.model.parameters())):
        assert gradient.abs().max() < 0.1  # nats per unit, of 60 points


def test_windowed_gp_stops_where_nothing_is_left_to_gain() -> None:
    x, y = wave(60)
    method = WindowedGP(1, num_steps=50)
    method.update(x, y)
    evidence, calls = method.negative_log_evidence, []

    def counted() -> Tensor:
        calls.append(evidence())
        return calls[-1]

    method.negative_log_evidence = counted
    method.update(x[:1], y[:1])
    assert len(calls) < 10


def test_windowed_gp_keeps_the_best_when_a_trial_step_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = WindowedGP(1, first_steps=5)
    evidence, losses = method.negative_log_evidence, []

    def fails_later() -> Tensor:
        if len(losses) == 4:
            raise torch.linalg.LinAlgError("not positive definite")
        losses.append(evidence())
        return losses[-1]

    monkeypatch.setattr(method, "negative_log_evidence", fails_later)
    method.update(*wave(40))
    assert len(losses) == 4
    assert_close(evidence(), min(losses))
    assert method.predict(grid())[0].isfinite().all()


def test_windowed_sgpr_is_fresh_sgpr_on_the_window() -> None:
    x, y = wave(120)
    method = WindowedSGPR(1, 10, window=50, num_steps=20)
    for batch in batches(x, y, 40):
        method.update(*batch)
    model = method.model
    fresh = StreamingGP(
        model.covar_module, model.likelihood, model.mean_module, num_inducing=10
    ).double()
    z = model.summary.inducing_points
    fresh.update(x[-50:], y[-50:], inducing_points=z, num_steps=0)
    expected = fresh.predict(grid())
    mean, variance = method.predict(grid())
    assert_close(mean, expected.mean, rtol=1e-6, atol=1e-6)
    assert_close(variance, expected.variance, rtol=1e-6, atol=1e-6)


def test_windowed_sgpr_forgets_what_left_the_window() -> None:
    x, y = wave(120)
    method = WindowedSGPR(1, 12, window=40, num_steps=20)
    method.update(x[:40], y[:40])
    _, known = method.predict(x[:10])
    for batch in batches(x[40:], y[40:], 40):
        method.update(*batch)
    _, forgotten = method.predict(x[:10])
    values = method.hyperparameters()
    prior = values["outputscale"] + values["noise"]
    assert (known < 0.1).all()
    assert (forgotten > 0.5 * prior).all()


# ------------------------------------------------------------------------- uncollapsed


def collapsed_bound(
    model: gpytorch.models.GP, z: Tensor, x: Tensor, y: Tensor
) -> float:
    """Titsias' bound at the hyperparameters of a model."""
    with torch.no_grad():
        return oracles.batch_vfe(
            lambda a, b: model.covar_module(a, b).to_dense(),
            x,
            y,
            z,
            model.likelihood.noise,
            model.mean_module,
            jitter=1e-6,
        ).bound.item()


def test_svi_comes_near_the_collapsed_bound() -> None:
    x, y = wave(50)
    batch = BatchSGPR(1, 7)
    batch.update(x, y)
    svi = SVI(1, lr=0.05, z=grid(7), num_steps=300)
    svi.update(x, y)
    best = collapsed_bound(batch.model, batch.model.summary.inducing_points, x, y)
    svi.model.train()
    reached = -len(y) * svi.loss(x, y).item()
    svi.model.eval()
    assert best - 4 < reached < best + 1e-2
    ours, theirs = (normal_scores(*m.predict(x), y)["RMSE"] for m in (svi, batch))
    assert ours == pytest.approx(theirs, rel=0.05)


def test_best_distribution_reaches_the_collapsed_bound() -> None:
    x, y = wave(50)
    svi = SVI(1, lr=0.05, z=grid(7), num_steps=20)
    svi.update(x, y)
    svi.model.set_best_distribution(x, y)
    svi.model.train()
    z = svi.model.variational_strategy.inducing_points
    best = collapsed_bound(svi.model, z, x, y)
    # GPyTorch adds its jitter to the variance of the function at the data, too.
    lost = len(y) * 1e-6 / (2 * svi.model.likelihood.noise.item())
    assert -len(y) * svi.loss(x, y).item() == pytest.approx(best - lost, abs=1e-4)


def test_svi_keeps_good_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = wave(40)
    short, long = (SVI(1, lr=0.02, z=grid(8), num_steps=num) for num in (10, 30))
    short.update(x, y)
    loss, calls = long.loss, []

    def fails_later(x: Tensor, y: Tensor) -> Tensor:
        calls.append(loss(x, y))
        if len(calls) == 18:  # after 17 steps, seven after the last copy
            raise NotPSDError("no factor")
        return calls[-1]

    monkeypatch.setattr(long, "loss", fails_later)
    long.update(x, y)
    assert long.failures == ["NotPSDError: no factor"]
    assert_close(long.predict(grid()), short.predict(grid()))
    # It goes on from there as if nothing had happened.
    long.num_steps = short.num_steps
    for svi in (short, long):
        svi.update(x, y)
    assert len(long.failures) == 1
    assert_close(long.predict(grid()), short.predict(grid()))


def test_svi_survives_parameters_that_are_not_finite() -> None:
    x, y = wave(40)
    svi = SVI(1, lr=0.02, z=grid(8), num_steps=5)
    svi.update(x, y)
    before = svi.predict(grid())
    svi.update(x, torch.full_like(y, torch.nan))
    assert len(svi.failures) == 1 and "nan" in svi.failures[0].lower()
    assert_close(svi.predict(grid()), before)


# ------------------------------------------------------------------ online conditioning


def test_conditioning_comes_near_the_exact_model() -> None:
    x, y = wave(60)
    method = OnlineConditioning(1, 20)
    method.update(x[:20], y[:20])
    model = method.model
    for batch in batches(x[20:], y[20:], 20):
        method.update(*batch)
    assert method.num_points == len(model.variational_strategy.inducing_points) + 40
    exact = WindowedGP(1)
    exact.model = model
    exact.window.append(x, y)
    exact._factorize()
    mean, variance = exact.predict(grid())
    got, got_variance = method.predict(grid())
    assert_close(got, mean, rtol=0, atol=2e-3)
    assert_close(got_variance, variance, rtol=2e-3, atol=0)


def test_conditioning_learns_where_new_data_are() -> None:
    x, y = wave(60)
    method = OnlineConditioning(1, 10)
    method.update(x[:30], y[:30])
    _, before = method.predict(x[30:])
    old, _ = method.predict(x[:15])
    method.update(x[30:], y[30:])
    mean, after = method.predict(x[30:])
    assert (after < before).all()
    assert after.max() < 0.2 * before.max()
    assert (mean - y[30:]).square().mean().sqrt() < 2 * NOISE
    assert (method.predict(x[:15])[0] - old).abs().max() < NOISE


def test_conditioning_stops_at_its_limit() -> None:
    x, y = wave(90)
    method = OnlineConditioning(1, 10, first_steps=20, max_points=50)
    method.update(x[:30], y[:30])
    method.update(x[30:60], y[30:60])
    assert method.failures == []
    before = method.predict(grid())
    method.update(x[60:], y[60:])
    method.update(x[60:], y[60:])
    assert method.failures == [f"{method.num_points + 30} points: more than 50"]
    assert_close(method.predict(grid()), before)


def test_conditioning_records_what_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = wave(60)
    method = OnlineConditioning(1, 10, first_steps=20)
    method.update(x[:30], y[:30])
    before = method.predict(grid())

    def fails(*_: Tensor) -> None:
        raise NotPSDError("no factor")

    monkeypatch.setattr(method.model, "get_fantasy_model", fails)
    method.update(x[30:], y[30:])
    assert method.failures == ["NotPSDError: no factor"]
    assert_close(method.predict(grid()), before)

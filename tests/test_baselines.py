"""The baselines are what they are said to be: comparisons with them are fair."""

from __future__ import annotations

from typing import Any

import gpytorch
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import oracles
from torch_ssgp import StreamingGP
from workbench import baselines, runner, uncollapsed
from workbench.baselines import (
    Method,
    PaperForm,
    Prior,
    Streaming,
    WindowedGP,
    WindowedSGPR,
    normal_scores,
)
from workbench.batch_bound import BatchBound, BatchSGPR, at_once
from workbench.exact import Exact, dense
from workbench.experts import LocalExperts
from workbench.streams import Stream
from workbench.uncollapsed import SVI, Minibatches

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


def follow(method: Any, x: Tensor, y: Tensor, size: int) -> Any:
    """A method or model after all batches."""
    for batch in zip(x.split(size), y.split(size), strict=True):
        method.update(*batch)
    return method


def assert_predicts(method: Method, model: Any, x: Tensor, tol: float = 1e-6) -> None:
    """What a model predicts; GPyTorch's exact ones too."""
    with torch.no_grad(), dense():
        expected = model.likelihood(model(x))
    mean, variance = method.predict(x)
    assert_close(mean, expected.mean, rtol=tol, atol=tol)
    assert_close(variance, expected.variance, rtol=tol, atol=tol)


def given(num_dims: int) -> Prior:
    """A prior that fits the wave."""
    prior = Prior(num_dims)
    prior.covar_module.base_kernel.lengthscale = 1.5
    prior.covar_module.outputscale = 1.0
    prior.likelihood.noise = NOISE**2
    return prior


BUDGET = runner.Budget(20, 5, 60, 50, 60)


@pytest.mark.parametrize("name", runner.METHODS)
def test_every_method_follows_a_stream(name: str) -> None:
    x, y = wave(90, 2)
    size = 90 if name in runner.AT_ONCE else 30
    batches = list(zip(x.split(size), y.split(size), strict=True))
    x_test = wave(30, 2, seed=2)[0].requires_grad_()
    stream = Stream("wave", batches, x_test, x_test.sum(-1))
    method = runner.METHODS[name](stream, 50 if name == runner.WINDOW else 15, BUDGET)
    for batch in batches:
        method.update(*batch)
    mean, variance = method.predict(x_test)
    assert mean.shape == variance.shape == (30,)
    assert not mean.requires_grad and not variance.requires_grad
    assert mean.isfinite().all() and (variance > 0).all()
    assert method.num_bytes() > 8 * 15
    assert getattr(method, "failures", []) == []
    # The last batch, which all of them remember, is not predicted by a constant.
    if not name.startswith("SVI 0.0"):  # too slow for three batches
        error = normal_scores(*method.predict(x[60:]), y[60:])["RMSE"]
        assert error < 0.8 * y[60:].std()


@pytest.mark.parametrize(
    "method", [BatchSGPR(2, 15, num_steps=60), Minibatches(2, 15, epochs=60, lr=0.05)]
)
def test_methods_that_see_all_data_at_once_learn_and_keep_them(method: Method) -> None:
    method.update(*wave(200, 2))
    x, y = wave(50, 2, seed=2)
    assert normal_scores(*method.predict(x), y)["RMSE"] < 2 * NOISE
    assert method.num_bytes() > 8 * 200 * 3


def test_predictions_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    method = WindowedGP(1, first_steps=2)
    method.update(*wave(30))
    whole = method.predict(grid())
    monkeypatch.setattr(baselines, "CHUNK", 7)
    assert_close(method.predict(grid()), whole)


def test_scores_are_those_of_the_definition() -> None:
    mean, variance, y = torch.rand(3, 20, dtype=torch.float64).unbind()
    scores = normal_scores(mean, variance, y)
    density = oracles.mvn_log_density(y, mean, torch.diag(variance)) / 20
    assert scores["MLL"] == pytest.approx(density.item())
    assert scores["RMSE"] == pytest.approx(((mean - y) ** 2).mean().item() ** 0.5)


def test_streaming_is_the_model_with_its_defaults() -> None:
    model = StreamingGP(baselines.new_kernel(1), num_inducing=12).double()
    method = follow(Streaming(1, 12), *wave(60), 30)
    follow(model, *wave(60), 30)
    assert_predicts(method, model, grid(), 1e-12)


def test_the_papers_form_learns_from_every_batch_at_its_inducing_points() -> None:
    method, found = PaperForm(1, 8, num_steps=5), []
    for _ in range(3):
        follow(method, *wave(30), 30)
        found.append(method.hyperparameters()["lengthscale"])
        assert method.model.points.size(-2) == 8
    assert len(set(found)) == 3


def test_windowed_sgpr_is_batch_inference_on_the_window() -> None:
    x, y = wave(120)
    method = follow(WindowedSGPR(1, 10, window=50, num_steps=20), x, y, 40)
    model = method.model
    fresh = at_once(model.covar_module, 10, model.likelihood, model.mean_module)
    fresh.update(x[-50:], y[-50:], inducing_points=model.points, num_steps=0)
    assert_predicts(method, fresh, grid())


def test_batch_ends_where_the_package_says_the_same_bound() -> None:
    x, y = wave(80)
    batch = BatchSGPR(1, 10)
    batch.update(x, y)
    assert batch.converged and batch.steps > 10
    evidence = batch.model.log_evidence().item()
    assert batch.bound * len(y) == pytest.approx(evidence, abs=1e-5)
    model = batch.model
    q = oracles.batch_vfe(
        lambda a, b: model.covar_module(a, b).to_dense(),
        x,
        y,
        model.points,
        model.likelihood.noise,
        model.mean_module,
        jitter=1e-8,
    )
    assert evidence == pytest.approx(q.bound.item(), abs=1e-3)
    with pytest.raises(RuntimeError, match="in one update"):
        batch.update(x, y)


def test_the_gradient_of_the_batch_bound_is_that_of_differences() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.rand(40, 2, generator=gen).double() * torch.tensor([1.0, 5.0])
    y = 3 + torch.sin(4 * x[:, 0]) + 0.3 * torch.randn(40, generator=gen)
    model = at_once(baselines.new_kernel(2), 6)
    model.update(x, y, num_steps=5, inducing_points=x[:6] + 0.1)
    bound = BatchBound(x, y, model)
    _, gradient = bound(bound.start)
    differences = [
        (bound(bound.start + step)[0] - bound(bound.start - step)[0]) / 2e-5
        for step in 1e-5 * np.eye(len(bound.start))
    ]
    assert len(gradient) == 2 + 1 + 1 + 1 + 6 * 2
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-8)


def test_a_batch_model_that_its_cap_stopped_is_on_no_plateau() -> None:
    batch = BatchSGPR(1, 10, num_steps=1)
    batch.update(*wave(80))
    assert not batch.converged


def test_windowed_gp_is_the_exact_model_of_the_last_points() -> None:
    x, y = wave(90)
    method = WindowedGP(1, window=50, num_steps=5, first_steps=10)
    follow(method, x, y, 30)
    exact = Exact(x[-50:], y[-50:], method.model.covar_module, method.prior).eval()
    assert_predicts(method, exact, grid(), 1e-9)
    assert method.num_bytes() >= 50 * 2 * 8


def test_windowed_gp_climbs_the_evidence() -> None:
    x, y = wave(60)
    ends = []
    for steps in (1, 30):
        method = WindowedGP(1, first_steps=steps)
        method.update(x, y)
        with torch.no_grad(), dense():
            model = method.model.train()
            ends.append(model.likelihood(model(x)).log_prob(y).item())
    assert ends[1] > ends[0] + 0.1


def test_the_best_distribution_reaches_the_collapsed_bound() -> None:
    x, y = wave(50)
    batch = BatchSGPR(1, 7)
    batch.update(x, y)
    svgp = uncollapsed.SVGP(batch.model.points, batch.model)
    svgp.set_best_distribution(x, y)
    elbo = gpytorch.mlls.VariationalELBO(svgp.likelihood, svgp, num_data=len(y))
    with torch.no_grad():
        assert elbo(svgp(x), y).item() == pytest.approx(batch.bound, abs=1e-3)


def test_svi_keeps_good_parameters_where_numbers_stop_being_finite() -> None:
    svi = SVI(1, lr=0.05, z=grid(7), num_steps=5)
    svi.update(*wave(30))
    before = svi.predict(grid())
    x, y = wave(30, seed=1)
    svi.update(x, y * torch.nan)
    assert svi.failures and "nan" in svi.failures[0]
    assert_close(svi.predict(grid()), before)


def test_one_expert_is_the_exact_model() -> None:
    x, y = wave(40, 2)
    experts = follow(LocalExperts(given(2), capacity=50), x, y, 40)
    exact = Exact(x, y, given(2).covar_module, given(2)).eval()
    assert_predicts(experts, exact, wave(20, 2, seed=3)[0])


def test_experts_are_cut_keep_all_data_and_their_shares_add_up() -> None:
    x, y = wave(200, 2)
    experts = LocalExperts(given(2), capacity=30)
    experts.update(x, y)
    shares = experts.root.shares(x, x.new_ones(200))
    assert len(shares) > 6 and all(leaf.num <= 30 for leaf, _ in shares)
    assert sum(leaf.num for leaf, _ in shares) == 200
    assert_close(sum(chance for _, chance in shares), x.new_ones(200))

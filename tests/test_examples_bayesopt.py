"""Quick runs of the examples that use BoTorch."""

from __future__ import annotations

import warnings

import pytest
import torch

from conftest import FULL
from examples import active_learning, bayesopt

BY, MODELS = ("qLogNEI", "KG"), ("exact", "streaming")
NUM = 14 if FULL else 12  # evaluations


def test_bayesian_optimisation_beats_random_search(tmp_path, capsys, monkeypatch):
    full = bayesopt.optimize_acqf

    def brief(acquisition, bounds, q, **_):
        options = {"maxiter": 10}
        return full(acquisition, bounds, q, 1, raw_samples=16, options=options)

    monkeypatch.setattr(bayesopt, "optimize_acqf", brief)
    regrets = bayesopt.main(
        num_evaluations=NUM, num_initial=8, num_inducing=12, num_steps=20, out=tmp_path
    )
    pairs = [f"{model}, {by}" for by in BY for model in MODELS]
    assert list(regrets) == ["random search", *pairs]
    for values, _ in regrets.values():
        assert values.shape == (1, NUM)
        assert (values.diff() <= 0).all()
        assert (values > -1e-6).all()
    random = regrets["random search"].evaluated[0, -1]
    for end in regrets["streaming, qLogNEI"]:
        assert end[0, -1] < random
    assert regrets["random search"].recommended.numel() == 0
    for pair in pairs:  # with the control beside ours
        assert regrets[pair].recommended.shape == (1, NUM - 8 + 1)
    assert (tmp_path / "bayesopt.png").stat().st_size > 10_000
    assert "KG: the streaming model's recommendation is" in capsys.readouterr().out


def test_a_recommendation_ahead_of_its_evaluations_is_explained():
    def regret(evaluated: float, recommended: float) -> bayesopt.Regret:
        return bayesopt.Regret(*torch.tensor([[[evaluated]], [[recommended]]]))

    regrets = {f"{model}, {by}": regret(0.1, 0.2) for model in MODELS for by in BY}
    assert "KG evaluates where it learns most" not in bayesopt.reading(regrets)
    regrets |= {f"{model}, KG": regret(0.3, 0.01) for model in MODELS}
    text = bayesopt.reading(regrets)
    assert "KG evaluates where it learns most" in text
    assert "KG: the streaming model's recommendation is 0.0100" in text


def test_restarted_line_searches_do_not_warn_over_the_progress_bar():
    with bayesopt.expected_warnings_ignored():
        text = "Optimization failed in `gen_candidates_scipy` with the following."
        warnings.warn(text, RuntimeWarning, stacklevel=1)
    with (
        pytest.warns(RuntimeWarning, match="other"),
        bayesopt.expected_warnings_ignored(),
    ):
        warnings.warn("another cause", RuntimeWarning, stacklevel=1)


def test_active_learning_lowers_the_error_of_the_map(tmp_path, capsys):
    rows = active_learning.main(
        rounds=5, q=4, num_initial=20, num_inducing=30, num_steps=15, out=tmp_path
    )
    assert [row["measured"] for row in rows] == [20, 24, 28, 32, 36, 40]
    assert rows[-1]["active"] < 0.9 * rows[0]["active"]
    assert (tmp_path / "active_learning.png").stat().st_size > 10_000
    assert "RMSE" in capsys.readouterr().out

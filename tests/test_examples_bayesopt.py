"""Quick runs of the examples that use BoTorch."""

from __future__ import annotations

from examples import active_learning, bayesopt


def test_bayesian_optimisation_beats_random_search(tmp_path, capsys):
    regrets = bayesopt.main(
        num_evaluations=18, num_initial=10, num_inducing=14, num_steps=20, out=tmp_path
    )
    assert set(regrets) == {
        "random search",
        "exact, qLogNEI",
        "streaming, qLogNEI",
        "streaming, KG",
    }
    for values in regrets.values():
        assert values.shape == (1, 18)
        assert (values.diff() <= 0).all()
        assert (values > -1e-6).all()
    random = regrets["random search"][0, -1]
    assert regrets["streaming, qLogNEI"][0, -1] < random
    assert (tmp_path / "bayesopt.png").stat().st_size > 10_000
    assert "streaming, KG" in capsys.readouterr().out


def test_active_learning_lowers_the_error_of_the_map(tmp_path, capsys):
    rows = active_learning.main(
        rounds=5, q=4, num_initial=20, num_inducing=30, num_steps=15, out=tmp_path
    )
    assert [row["measured"] for row in rows] == [20, 24, 28, 32, 36, 40]
    assert rows[-1]["active"] < 0.9 * rows[0]["active"]
    assert (tmp_path / "active_learning.png").stat().st_size > 10_000
    assert "RMSE" in capsys.readouterr().out

"""Quick runs of the examples and the benchmark that use BoTorch."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from examples import active_learning, bayesopt

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "bench_bayesopt", raising=False)
    return importlib.import_module("bench_bayesopt")


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


def test_benchmark_optimises_branin_with_fewer_inducing_points(benchmark):
    problem = benchmark.Branin(negate=True)

    def streaming(X, Y, bounds):
        return benchmark.Streaming(X, Y, bounds, num_inducing=12, num_steps=25)

    ours = benchmark.optimise(problem, streaming, 6, 20, seed=0)
    random = benchmark.optimise(problem, None, 6, 20, seed=0)
    assert torch.equal(ours[:6], random[:6])
    assert ours[-1] < 0.3 < random[-1] + 0.3
    assert ours[-1] < random[-1]


def test_benchmark_prints_ratios_of_fantasies(benchmark, capsys):
    rows = benchmark.fantasies(num_inducing=10, repeats=1)
    assert len(rows) == 2
    assert "16 x 5 x 4" in capsys.readouterr().out


def test_benchmark_goes_on_where_it_was_interrupted(benchmark, tmp_path, monkeypatch):
    out, calls = tmp_path / "bayesopt.json", []

    def regret(problem, method, seed):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append((problem, method, seed))
        row = benchmark.named(problem, method, seed)
        value = {"streaming": 0.2, "exact": 0.1, "random": 1.0}[method] + seed
        return {**row, "inducing": "", "evaluations": 80, "regret": value, "seconds": 2}

    monkeypatch.setattr(benchmark, "regret", regret)
    with pytest.raises(KeyboardInterrupt):
        benchmark.run(out, ["regret"], seeds=2)
    first, calls = calls, []
    rows = benchmark.run(out, ["regret"], seeds=2)
    assert len(first) == 4
    assert calls == [("Hartmann-6", "exact", 1), ("Hartmann-6", "random", 1)]
    assert benchmark.run(out, ["regret"], seeds=2) == rows
    lines = {line["method"]: line for line in benchmark.summary(rows)}
    assert lines["streaming"]["median_regret"] == pytest.approx(0.7)
    assert lines["streaming"]["to_exact"] == pytest.approx(0.7 / 0.6)
    file = json.loads(out.read_text())
    assert file["rows"] == rows
    assert set(file["header"]["versions"]) >= {"torch_ssgp", "botorch"}
    assert len(out.read_text().splitlines()) == 3 + len(rows)
    # Of another version, only what does not depend on it stays.
    monkeypatch.setattr(benchmark, "version", lambda name: "9.9")
    calls.clear()
    benchmark.run(out, ["regret"], seeds=2)
    assert {method for _, method, _ in calls} == {"streaming"}


def test_benchmark_compares_two_versions_of_the_package(benchmark):
    rows = benchmark.versions(ROOT, sizes=(20,), rounds=1, repeats=1)
    assert {row["what"] for row in rows} >= {
        "conditioning on one",
        "16 x 5 x 4 fantasies",
    }
    assert all(row["ratio"] > 0 for row in rows)
    assert "| what | inducing |" in benchmark.sections(rows)

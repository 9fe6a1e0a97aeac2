"""The benchmark of Bayesian optimisation runs, resumes and compares versions."""

from __future__ import annotations

import pytest
import torch

from workbench import bench_bayesopt as bench
from workbench import bench_bayesopt_tables as tables
from workbench import results
from workbench.bench_versions import versions
from workbench.common import ROOT


def test_benchmark_optimises_branin_with_fewer_inducing_points():
    problem = bench.Branin(negate=True)

    def streaming(X, Y, bounds):
        return bench.Streaming(X, Y, bounds, num_inducing=12, num_steps=75)

    ours = bench.optimise(problem, streaming, 6, 20, seed=0)
    random = bench.optimise(problem, None, 6, 20, seed=0)
    assert torch.equal(ours[:6], random[:6])
    assert ours[-1] < 0.3 < random[-1] + 0.3
    assert ours[-1] < random[-1]


def test_a_batch_of_fantasies_is_measured_against_a_loop():
    rows = bench.fantasies(num_inducing=10, repeats=1)
    assert [row["case"] for row in rows] == ["16 x 5 x 1", "16 x 5 x 4"]
    assert all(row["ratio"] > 1 for row in rows)
    assert tables.sections(rows).startswith("| case | inducing |")


def test_benchmark_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    out, calls = tmp_path / "bayesopt.json", []

    def regret(problem, method, seed):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append((problem, method, seed))
        value = {"streaming": 0.2, "exact": 0.1, "random": 1.0}[method] + seed
        return {"inducing": "", "evaluations": 80, "regret": value, "seconds": 2}

    monkeypatch.setattr(bench, "regret", regret)
    with pytest.raises(KeyboardInterrupt):
        bench.run(out, ["regret"], seeds=2)
    first, calls = calls, []
    rows = bench.run(out, ["regret"], seeds=2)
    assert len(first) == 4
    assert calls == [("Hartmann-6", "random", 0), ("Hartmann-6", "random", 1)]
    assert bench.run(out, ["regret"], seeds=2) == rows
    lines = {line["method"]: line for line in tables.summary(rows)}
    assert lines["streaming"]["median_regret"] == pytest.approx(0.7)
    assert lines["streaming"]["to_exact"] == pytest.approx(0.7 / 0.6)
    assert set(results.read(out).header) >= {"torch_ssgp", "botorch"}
    # Of another version, only what does not depend on it stays.
    monkeypatch.setattr(results, "version", lambda name: "9.9")
    calls.clear()
    bench.run(out, ["regret"], seeds=2)
    assert {method for _, method, _ in calls} == {"streaming"}


def test_benchmark_compares_two_versions_of_the_package():
    rows = versions(ROOT, sizes=(20,), rounds=1, repeats=1)
    assert {row["method"] for row in rows} >= {
        "conditioning on one",
        "16 x 5 x 4 fantasies",
    }
    assert all(row["ratio"] > 0 for row in rows)
    assert "| case | method |" in tables.sections(rows)

"""Benchmarks of merged and distributed models count, split and estimate as they say."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path

import pytest
import torch

from workbench import bench_distributed, bench_merge
from workbench import bench_scale_tables as tables
from workbench.streams import Stream

RECIPES = Path(__file__).resolve().parents[1] / "scripts" / "recipes"


@pytest.mark.parametrize("how", bench_merge.PARTS)
def test_every_datum_is_at_one_site(how: str) -> None:
    x = torch.arange(70.0).unsqueeze(-1)
    batches = [(part, part.squeeze(-1)) for part in x.split(10)]
    stream = Stream("s", batches, x, x.squeeze(-1), "")
    parts = bench_merge.parts_of(stream, how)
    assert len(parts) == 3
    seen = torch.cat([y for part in parts for _, y in part])
    assert sorted(seen.tolist()) == list(range(70))


def test_many_models_in_one_call_are_those_of_a_tree() -> None:
    row = bench_merge.many(num_models=5, num_inducing=10, num_data=40)
    assert row["data"] == 200
    for what in ("mean differs", "variance differs", "bound differs"):
        assert row[what] < 1e-6


def test_one_process_is_measured_and_bytes_are_those_of_the_formula() -> None:
    row = bench_distributed.measure(bench_distributed.Case(5, 10, 60), 0, 1)
    assert row["ms_per_step"] > 0 and row["M"] == 5
    assert bench_distributed.predicted_bytes(50) == 11456  # as counted, with two ranks


def test_an_estimate_divides_what_grows_with_the_batch_and_nothing_else() -> None:
    rows = [
        {"M": 9, "R": 9, "N": 100, "ranks": 1, "ms_per_step": 5.0},
        {"M": 9, "R": 9, "N": 1100, "ranks": 1, "ms_per_step": 15.0},
        {"M": 9, "R": 9, "N": 100, "ranks": 2, "ms_per_step": 5.0}
        | {"bytes_per_step": 0, "messages_per_step": 0},
    ]
    first = bench_distributed.estimate(rows)[0]
    assert first["ms_at_1"] == pytest.approx(5 + 0.01 * 16_000)
    assert first["ms_at_64"] == pytest.approx(5 + 0.01 * 16_000 / 64)


def test_a_file_that_is_not_there_has_no_section(tmp_path: Path) -> None:
    assert tables.section(tmp_path / "merge.json") == ""


def test_recipes_do_their_work_without_a_framework(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    sites = importlib.import_module("sites")
    base = pickle.dumps(sites.new_model())
    for hour in range(2):
        states = [sites.work(base, [sites.shard(k, hour, 30)]) for k in range(2)]
        base = sites.joined(states, base)
    assert "120 data" in sites.report(1, base)

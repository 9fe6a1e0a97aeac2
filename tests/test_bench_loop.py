"""The benchmark of the inner loop compares ways to learn one batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torch_ssgp import StreamingGP
from torch_ssgp.update import ascent
from workbench import bench_loop, streams
from workbench.baselines import new_kernel
from workbench.bench_cases import Case
from workbench.bench_loop import DEFAULT, WAYS, Climb
from workbench.results import Row
from workbench.streams import Stream


def test_a_climb_is_near_the_end_at_its_first_step_that_is():
    climb = Climb([0.1, 0.2, 0.3], [-5.0, -1.5, -1.0])
    assert climb.first_within(-1.0, 0.5) == 1
    assert climb.first_within(-1.0, 0.0) == 2
    assert climb.first_within(0.0, 0.5) is None


def test_every_way_learns_the_same_batches_and_a_run_resumes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def make(seed: int, data_dir: Path | None) -> Stream:
        stream = streams.growing_range(seed=seed)
        batches = [(x[:20], y[:20]) for x, y in stream.batches[:3]]
        return replace(stream, batches=batches)

    monkeypatch.setitem(bench_loop.CASES, "small", Case(make, 10, True))
    out, rates = tmp_path / "loop.json", ascent.SHORTER
    rows = bench_loop.run(["small"], out, steps=30)
    assert ascent.SHORTER == rates
    assert {row["way"] for row in rows} == set(WAYS)
    assert {row["update"] for row in rows} == {1, 2}
    assert all(row["missing"] >= 0 for row in rows)
    for update in (1, 2):  # one of them came to the end
        own = [row for row in rows if row["update"] == update]
        assert min(row["missing"] for row in own) == 0
        for row in own:
            is_near = row["near_step"] is not None
            assert is_near == (row["missing"] <= bench_loop.NEAR)
            assert not is_near or row["near_seconds"] <= row["cpu_seconds"]
    monkeypatch.setattr(bench_loop, "rows_at", None)
    assert bench_loop.run(["small"], out, steps=30) == rows


def test_lines_are_ratios_to_the_default():
    def row(way: str, update: int, **others: object) -> Row:
        return {"stream": "a", "update": update, "way": way, "missing": 0.0, **others}

    slow = {"steps": 20, "cpu_seconds": 4.0, "near_step": 10, "near_seconds": 2.0}
    short = {"steps": 5, "cpu_seconds": 1.0, "near_step": None, "near_seconds": None}
    rows = [row(DEFAULT, 1, **slow), row(DEFAULT, 2, **slow)]
    rows += [row("other", 1, **short), row("other", 2, **{**slow, "near_seconds": 1.0})]
    rows[2]["missing"] = 0.3
    default, other = bench_loop.lines(rows)
    assert default["near the end"] == "2 of 2" and default["time until then"] == "1.00"
    assert other["near the end"] == "1 of 2" and other["time until then"] == "0.50"
    assert other["time in all"] == "0.62" and other["most missing"] == "0.3"


def test_a_cold_start_forgets_what_was_learned() -> None:
    x = torch.linspace(0, 6, 40, dtype=torch.float64).unsqueeze(-1)
    y = torch.sin(x[:, 0])
    model = StreamingGP(new_kernel(1), num_inducing=10).double()
    model.update(x[::2], y[::2])
    before = [p.detach().clone() for p in model.prior().parameters()]
    warm, cold = (
        bench_loop.climb(model, x[1::2], y[1::2], WAYS[name], 2)
        for name in (DEFAULT, "Adam, cold start")
    )
    assert warm.best[0] > cold.best[0]
    after = model.prior().parameters()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))

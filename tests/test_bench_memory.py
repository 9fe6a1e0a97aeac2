"""The tables of the memory's benchmark are those of its rows, and so are its bars."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

import oracles
from torch_ssgp import StreamingGP, settings
from workbench import (
    batch_bound,
    bench_flat,
    bench_memory,
    benchmark,
    results,
    running,
    streams,
)
from workbench import bench_memory_tables as tables
from workbench.baselines import new_kernel
from workbench.batch_bound import BatchBound, Snapshot
from workbench.bench_memory import Budget
from workbench.bench_memory_tables import (
    BATCH,
    CARE,
    DEFAULT,
    FLOOR,
    KEPT,
    SIZES,
    STORAGE,
    VARIANTS,
    Row,
)
from workbench.streams import Stream


def row(
    stream: str,
    variant: str,
    rmse: float,
    mll: float,
    memory: tuple[float, float] = (9.0, -9.0),
    **others: object,
) -> Row:
    """A run; ``memory`` is RMSE and MLL from the memory's points."""
    key = {"stream": stream, "variant": variant, "seed": 0, "version": "1"}
    end = {"RMSE": rmse, "MLL": mll, "M": 100, "cpu_seconds": 2.0, "failure": ""}
    if variant == BATCH:
        end |= {
            "bound": 0.5,
            "converged": True,
            "steps": 7,
            "restarts": 1,
            "cpu_seconds_near": 1.0,
        }
    else:
        end |= {"R": 200, "memory RMSE": memory[0], "memory MLL": memory[1]}
    return {**key, **end, **others}


class FakeModel:
    """Predicts one number, another one from its memory; fails at an update."""

    summary = SimpleNamespace(num_inducing=10, forgot=1.0)
    memory = SimpleNamespace(points=torch.zeros(25, 1))
    memory_size = 200

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.num_updates = fails_at, 0
        self.asked: list[dict[str, Any]] = []

    def update(self, x: Tensor, y: Tensor, **options: Any) -> SimpleNamespace:
        self.asked.append(options)
        self.num_updates += 1
        if self.num_updates == self.fails_at:
            raise RuntimeError("no more")
        return self.summary

    def predict(self, x: Tensor, from_memory: bool = False) -> Any:
        mean = torch.full((len(x),), 3.0 if from_memory else 2.0)
        return torch.distributions.Normal(mean, torch.ones(len(x)))


# ----------------------------------------------------------------------- the budgets


@pytest.mark.parametrize(("m", "r", "d"), [(100, 200, 1), (200, 600, 18), (7, 7, 3)])
def test_the_same_storage_is_as_near_as_whole_points_can_be(
    m: int, r: int, d: int
) -> None:
    def numbers(size: int) -> int:
        return size * (size + d + 1)

    found = bench_memory.same_storage(m, r, d)
    distance = abs(numbers(found) - numbers(m) - numbers(r))
    for other in (found - 1, found + 1):
        assert distance <= abs(numbers(other) - numbers(m) - numbers(r))


def test_variants_share_the_inducing_points_or_the_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_memory, "new_model", lambda *_: FakeModel())
    budgets = {name: bench_memory.budget_of(name, 100, 1) for name in VARIANTS}
    assert budgets == {
        DEFAULT: (100, None),
        KEPT: (100, None),
        CARE: (100, None),
        "memory M": (100, 100),
        "memory 1.5M": (100, 150),
        "memory 3M": (100, 300),
        STORAGE: (224, 224),  # 224 x 226 = 50,624, and 100 x 102 + 200 x 202 = 50,600
    }


# -------------------------------------------------------------------------- the runs


def test_a_batch_reference_is_batch_regression_on_a_plateau() -> None:
    stream = streams.revisiting(num_batches=1, num_test=20)
    x, y = stream.x_train, stream.y_train
    found = batch_bound.batch_reference(x, y, num_inducing=8)
    model = found.model
    assert found.converged and found.restarts > 0 and found.gain < batch_bound.PLATEAU

    def kernel(x1: Tensor, x2: Tensor) -> Tensor:
        return model.covar_module(x1, x2).to_dense()

    with torch.no_grad():
        z, mean = model.summary.inducing_points, model.mean_module
        noise, scale = model.likelihood.noise, model.covar_module.outputscale.item()
        jitter = settings.jitter.of(torch.float64) * scale
        q = oracles.batch_vfe(kernel, x, y, z, noise, mean, jitter)
        expected, covariance = oracles.predict(
            kernel, z, q, stream.x_test, mean, jitter
        )
        ours = model(stream.x_test)
    assert found.bound * len(y) == pytest.approx(q.bound.item(), abs=1e-5)
    torch.testing.assert_close(ours.mean, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.variance, covariance.diag(), atol=1e-6, rtol=0)


def test_the_gradient_of_the_batch_bound_is_that_of_differences() -> None:
    x = torch.rand(40, 2, dtype=torch.float64) * torch.tensor([1.0, 5.0])
    y = 3 + torch.sin(4 * x[:, 0]) + 0.3 * torch.randn(40)
    model = StreamingGP(new_kernel(2), num_inducing=6).double()
    model.update(x, y, num_steps=5, inducing_points=x[:6] + 0.1)
    bound = BatchBound(x, y, model)
    _, gradient = bound(bound.start)
    steps = 1e-5 * np.eye(len(bound.start))
    differences = [
        (bound(bound.start + step)[0] - bound(bound.start - step)[0]) / 2e-5
        for step in steps
    ]
    assert len(gradient) == 2 + 1 + 1 + 1 + 6 * 2 and np.abs(gradient).min() > 1e-6
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-8)


def test_a_reference_that_its_cap_stopped_is_on_no_plateau() -> None:
    stream = streams.revisiting(num_batches=1, num_test=20)
    result = bench_memory.run_batch(stream, 10, max_steps=1)
    assert not result["converged"] and result["restarts"] == 0
    assert result["gain"] > batch_bound.PLATEAU
    rows = [{**row("revisiting", BATCH, 1.0, 1.0), **result}]
    assert "no plateau (seed): revisiting (0)." in tables.remarks(rows)


def test_a_batch_model_is_near_where_its_scores_are_those_of_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = {"start": (0.05, 1.0), "near": (0.0405, 1.99), "end": (0.04, 2.0)}
    path = [Snapshot(1, 1.0, -9.0, "start"), Snapshot(50, 6.0, -1.0, "near")]
    model = SimpleNamespace(name="end", summary=SimpleNamespace(num_inducing=5))
    found = batch_bound.Reference(
        model, -1.0, True, 60, 1, 0.0, 7.0, path, lambda at: SimpleNamespace(name=at)
    )

    def accuracy(model: Any, _: Stream) -> Row:
        return dict(zip(("RMSE", "MLL"), scores[model.name], strict=True))

    monkeypatch.setattr(bench_memory, "batch_reference", lambda *_: found)
    monkeypatch.setattr(bench_memory, "scores", accuracy)
    stream = streams.revisiting(num_batches=1, num_test=1)
    result = bench_memory.run_batch(stream, 5)
    assert (result["cpu_seconds"], result["cpu_seconds_near"]) == (7.0, 6.0)
    scores["near"] = (0.04, 1.97)
    assert bench_memory.run_batch(stream, 5)["cpu_seconds_near"] == 7.0


def test_a_run_says_what_its_points_and_its_memory_end_with() -> None:
    stream = streams.growing_range(1, width=10.0, num_test=100)
    paper = bench_memory.run_stream(stream, Budget(8, 8))
    assert (paper["M"], paper["R"], paper["failure"]) == (8, 8, "")
    assert paper["memory RMSE"] == pytest.approx(paper["RMSE"], rel=1e-6)
    finer = bench_memory.run_stream(stream, Budget(8, 40))
    assert finer["M"] == 8 and finer["R"] >= 40
    # Where 8 points cannot say what was seen, 40 can.
    assert finer["memory RMSE"] < 0.9 * finer["RMSE"]


def test_only_the_last_update_is_made_with_care(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = FakeModel()
    monkeypatch.setattr(bench_memory, "new_model", lambda *_: model)
    batches = [(torch.zeros(2, 1), torch.zeros(2))] * 3
    stream = Stream("", batches, torch.zeros(4, 1), torch.zeros(4), "")
    bench_memory.run_stream(stream, Budget(10, None), CARE)
    plain = {"forget": None}
    last = {"learn_hyperparameters": True, "optimizer": "lbfgs", "num_steps": 300}
    assert model.asked == [plain, plain, {**plain, **last}]
    model.asked.clear()
    bench_memory.run_stream(stream, Budget(10, None), KEPT)
    assert model.asked == [{"forget": 1.0}] * 3


def test_a_failure_is_a_row_with_both_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(fails_at=2)
    monkeypatch.setattr(bench_memory, "new_model", lambda *_: model)
    batches = [(torch.zeros(2, 1), torch.zeros(2))] * 4
    num_test = running.CHUNK + 1
    stream = Stream("", batches, torch.zeros(num_test, 1), torch.zeros(num_test), "")
    result = bench_memory.run_stream(stream, Budget(10, None))
    assert model.num_updates == 2 and result["failure"] == "RuntimeError: no more"
    assert (result["RMSE"], result["memory RMSE"]) == (2.0, 3.0)
    assert result["MLL"] - result["memory MLL"] == pytest.approx((9 - 4) / 2)
    assert (result["M"], result["R"]) == (10, 25)


# -------------------------------------------------------------------------- the file


def test_a_run_is_resumed_and_shares_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "memory.json"
    other = row("bike", DEFAULT, 1.0, 1.0)
    seen: list[Stream] = []

    def runs_meanwhile(stream: Stream, *_: object) -> Row:
        if not seen:
            results.write(out, {}, [other])
        seen.append(stream)
        return {"RMSE": float(len(seen))}

    monkeypatch.setattr(bench_memory, "run_stream", runs_meanwhile)
    options = (["audio M=100", "revisiting"], [DEFAULT])
    rows = bench_memory.run(out, None, 2, *options)
    key = ("stream", "variant", "seed")
    assert [tuple(each[name] for name in key) for each in rows] == [
        ("bike", DEFAULT, 0),
        ("audio M=100", DEFAULT, 0),
        ("audio M=100", DEFAULT, 1),
        ("revisiting", DEFAULT, 0),
        ("revisiting", DEFAULT, 1),
    ]
    assert rows == bench_memory.run(out, None, 2, *options) and len(seen) == 4
    # Seeds are roundings of a stream that has none, and draws of one that has.
    roundings = (seen[0].y_train - seen[1].y_train).abs().max()
    assert 0 < roundings < 1e-9
    assert (seen[2].y_train - seen[3].y_train).abs().max() > 0.1
    again = bench_memory.run(out, None, 1, *options, again=True)
    assert [each["RMSE"] for each in again] == [1.0, 5.0, 2.0, 6.0, 4.0]
    assert list(tmp_path.iterdir()) == [out]


def test_a_batch_model_is_run_once_where_seeds_are_roundings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_memory, "run_batch", lambda *_: {"RMSE": 1.0})
    options = (["audio M=100", "growing range"], [BATCH])
    rows = bench_memory.run(tmp_path / "memory.json", None, 3, *options)
    seeds = [(each["stream"], each["seed"]) for each in rows]
    assert seeds == [("audio M=100", 0)] + [("growing range", k) for k in range(3)]


# ------------------------------------------------------------------------ the tables


def test_a_line_has_ranges_over_seeds_against_the_right_batch_model() -> None:
    rows = [
        row("audio M=100", BATCH, 2.0, 1.0, cpu_seconds=4.0),
        row("audio M=100", DEFAULT, 2.2, 0.9, (1.0, 1.5)),
        row("audio M=100", DEFAULT, 2.0, 1.1, (1.5, 1.2), seed=1, cpu_seconds=8.0),
        row("revisiting", BATCH, 1.0, 0.0, seed=1),
        row("revisiting", DEFAULT, 9.0, 0.0),  # this draw has no batch model yet
        row("revisiting", DEFAULT, 3.0, 0.5, seed=1),
    ]
    audio, drawn = tables.table(rows)
    assert (audio["stream"], audio["seeds"], audio["failures"]) == ("audio M=100", 2, 0)
    assert audio["RMSE / batch"] == "1.000 to 1.100"
    assert audio["MLL - batch"] == "-0.100 to +0.100"
    assert audio["memory RMSE / batch"] == "0.500 to 0.750"
    assert audio["memory MLL - batch"] == "+0.200 to +0.500"
    assert (audio["CPU seconds"], audio["CPU / batch"]) == (5.0, "0.50 to 2.00")
    assert (drawn["seeds"], drawn["RMSE / batch"]) == (1, "3.000")


def test_a_bar_is_met_in_every_seed_or_not_at_all() -> None:
    def met(stream: str, *runs: Row) -> tuple[str, str]:
        batch = row(stream, BATCH, 1.0, 1.0)
        (line,) = tables.bars([batch, *runs])
        return line["met"], line["from"]

    def end(stream: str, rmse: float, mll: float, **others: Any) -> Row:
        return row(stream, DEFAULT, rmse, mll, **others)

    strict, loose = "audio M=100", "audio M=200"
    assert met(strict, end(strict, 1.019, 0.981)) == ("yes", "q(b)")
    assert met(strict, end(strict, 1.021, 1.0)) == ("no", "q(b)")
    assert met(strict, end(strict, 1.0, 0.979)) == ("no", "q(b)")
    assert met(strict, end(strict, 1.1, 1.0, memory=(1.0, 1.0))) == ("no", "q(b)")
    assert met(strict, end(strict, 1.0, 1.0, failure="gone")) == ("no", "q(b)")
    runs = [end(strict, 1.0, 1.0), end(strict, 1.03, 1.0, seed=1)]
    assert met(strict, *runs) == ("no", "q(b)")
    assert met(loose, end(loose, 1.04, -5.0)) == ("yes", "q(b)")
    assert met(loose, end(loose, 1.1, 1.0, memory=(1.04, 1.0))) == ("yes", "memory")
    assert met(loose, end(loose, 1.1, 1.0, memory=(1.06, 1.0))) == ("no", "q(b)")


def test_errors_below_the_noise_floor_count_as_the_floor() -> None:
    name = "pseudo-periodic M=200"
    smallest = GaussianLikelihood().noise_covar.raw_noise_constraint.lower_bound
    assert FLOOR**2 == pytest.approx(smallest.item())

    def met(rmse: float) -> str:
        batch = row(name, BATCH, FLOOR / 4, 1.0)
        (line,) = tables.bars([batch, row(name, DEFAULT, rmse, 1.0)])
        return line["met"]

    assert [met(FLOOR / 2), met(1.03 * FLOOR)] == ["yes", "no"]


def test_sizes_are_compared_on_streams_that_have_them_all() -> None:
    rows = [row(name, BATCH, 1.0, 1.0) for name in ("bike", "elevators", "terrain")]
    by_size = ["memory M", "memory 1.5M", DEFAULT, "memory 3M"]
    assert {*by_size} == {*SIZES, DEFAULT}
    for place, size in enumerate(by_size):
        rows.append(row("bike", size, 1.5 - 0.1 * place, 1.0, (1.0, 2.0)))
        rows.append(row("elevators", size, 1.1, 0.5, (1.0, 2.0), cpu_seconds=4.0))
    rows.append(row("terrain", "memory M", 99.0, -99.0))
    rows.append(row("bike", DEFAULT, 99.0, -99.0, seed=1))  # only one size has it
    lines = tables.sizes(rows)
    names = ["memory M", "memory 1.5M", "memory 2M, the default", "memory 3M"]
    assert [line["variant"] for line in lines] == names
    assert {line["streams"] for line in lines} == {2}
    worst = [line["RMSE / batch, worst"] for line in lines]
    assert worst == pytest.approx([1.5, 1.4, 1.3, 1.2])
    assert lines[0]["RMSE / batch, median"] == pytest.approx(1.3)
    assert lines[0]["MLL - batch, worst"] == -0.5
    assert lines[0]["memory MLL - batch, worst"] == 1.0
    assert lines[0]["CPU / batch, median"] == 1.5
    assert tables.sizes(rows[:3]) == []


def test_the_default_is_compared_with_one_that_forgets_nothing() -> None:
    rows = [
        row("bike", DEFAULT, 2.2, 0.9, (2.1, 1.1), cpu_seconds=3.0),
        row("bike", KEPT, 2.0, 0.9, (2.0, 1.1), cpu_seconds=2.0),
        row("bike", DEFAULT, 9.9, 0.9, (9.9, 1.1)) | {"seed": 1},
        row("elevators", DEFAULT, 1.0, 1.0),
    ]
    assert tables.kept(rows) == [
        {
            "stream": "bike",
            "seeds": 1,
            "RMSE / forget=1": "1.1000",
            "from memory": "1.0500",
            "CPU / forget=1": "1.5000",
        }
    ]


def test_the_same_storage_stands_beside_the_default() -> None:
    rows = [
        row("bike", BATCH, 2.0, 1.0),
        row("bike", DEFAULT, 2.2, 0.9, (2.1, 1.1), cpu_seconds=3.0),
        row("elevators", BATCH, 1.0, 1.0),
        row("elevators", DEFAULT, 1.0, 1.0),
    ]
    assert tables.storage(rows) == []
    rows.append(row("bike", STORAGE, 2.4, 0.7, M=224, R=224, cpu_seconds=8.0))
    (line,) = tables.storage(rows)
    assert (line["stream"], line["M, R"], line["M'"]) == ("bike", "100, 200", 224)
    ratios = [line[name] for name in ("RMSE / batch", "from memory", "with M'")]
    assert ratios == pytest.approx([1.1, 1.05, 1.2])
    names = ("MLL - batch", "MLL from memory", "MLL with M'")
    assert [line[name] for name in names] == pytest.approx([-0.1, 0.1, -0.3])
    assert (line["CPU / batch"], line["CPU with M'"]) == (1.5, 4.0)


def test_remarks_name_what_is_missing_and_what_went_wrong() -> None:
    rows = [row("bike", variant, 1.0, 1.0) for variant in [BATCH, *VARIANTS]]
    text = tables.remarks(rows)
    assert "Not run yet: pseudo-periodic M=100, pseudo-periodic M=200, audio" in text
    assert "terrain OS and kin40k (batch SGPR, default, forget=1, last update" in text
    assert "bike" not in text and "plateau" not in text and "failed" not in text
    rows[0]["converged"], rows[1]["failure"] = False, "gone"
    text = tables.remarks(rows)
    assert "no plateau (seed): bike (0)." in text
    assert text.endswith("failed (seed): bike, default (0).")


def test_sections_are_the_tables_and_do_not_clash_with_those_of_policies() -> None:
    rows = [row("bike", variant, 1.0, 1.0) for variant in [BATCH, *VARIANTS]]
    places = tables.sections(rows)
    assert all(name.startswith("memory_") and text for name, text in places.items())
    assert places["memory_streams"].count("\n") == 1 + len(VARIANTS)
    assert places["memory_references"].splitlines()[2].startswith("| bike | 0 | 100 |")


# ------------------------------------------------------------------ the command line


def test_memory_gets_its_arguments_and_tables_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "memory.json"
    rows = [row("bike", BATCH, 1.0, 1.0), row("bike", DEFAULT, 1.25, 1.0)]
    results.write(out, {}, rows)
    calls: list[tuple] = []

    def run(*arguments: object) -> list[Row]:
        calls.append(arguments)
        return rows

    monkeypatch.setattr(bench_memory, "run", run)
    benchmark.main(["memory", "tables", "--out", str(out)])
    assert "1.250" in capsys.readouterr().out and not calls
    benchmark.main(["memory", "--out", str(out), "--streams", "bike", "--seeds", "2"])
    assert "1.250" in capsys.readouterr().out
    assert calls == [(out, None, 2, ["bike"], (), batch_bound.MAX_STEPS, False)]


def test_windows_of_a_long_stream_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "flat.json"
    bench_flat.main(["--updates", "110", "--out", str(out)])
    file = results.read(out)
    assert [row["updates"] for row in file.rows] == list(range(101, 111))
    assert all(row["live_bytes"] > 0 for row in file.rows)
    assert "change by a factor of" in bench_flat.section(file)

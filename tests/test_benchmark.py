"""The tables of benchmarks are those of the files, and so is what is said of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workbench import bench_bayesopt_tables, bench_policies, benchmark, results
from workbench.bench_policies import BATCH, DEFAULT, NEAR, Row

PAGE = benchmark.DOCS / "benchmarks.md"


def row(stream: str, policy: str, rmse: float, mll: float, **others: object) -> Row:
    """A run of a stream with 100 inducing points at most."""
    key = {"stream": stream, "policy": policy, "seed": 0, "budget": 100}
    end = {"RMSE": rmse, "MLL": mll, "M": 100, "failure": "", "cpu_seconds": 1.0}
    return {**key, **end, **others}


def test_the_page_is_that_of_the_files() -> None:
    assert PAGE.read_text(encoding="utf-8") == benchmark.page()


def test_near_the_batch_model_is_what_reproductions_call_near() -> None:
    rows = [
        row("audio M=100", BATCH, 1.0, 1.0),
        row("audio M=100", DEFAULT, 1.05, 0.96),
        row("audio M=100", "KeepOld", 1.06, 2.0),
    ]
    lines = bench_policies.table(rows)
    assert [line[NEAR] for line in lines] == ["yes", "no"]
    assert NEAR == "within 1.05 and 0.05"


def test_batch_models_and_the_default_policy_are_those_of_the_memory() -> None:
    def of(variant: str, stream: str = "bike") -> Row:
        return {**row(stream, "", 1.0, 1.0), "variant": variant, "seed": 0}

    memory = [of("batch SGPR"), of("default"), of("forget=1"), of("default", "kin40k")]
    found = bench_policies.rows_of_memory(memory)
    assert [(each["stream"], each["policy"]) for each in found] == [
        ("bike", BATCH),
        ("bike", DEFAULT),
    ]
    lines = bench_policies.table([*found, row("bike", "KeepOld", 2.0, 1.0)])
    assert [line["RMSE / batch"] for line in lines] == [1.0, 2.0]
    assert not set(bench_policies.POLICIES) & {BATCH, DEFAULT}


def test_policies_are_ranked_on_the_streams_that_they_share() -> None:
    rows = [
        *(row(name, BATCH, 1.0, 1.0) for name in ("bike", "terrain")),
        *(row(name, DEFAULT, 2.0, 0.0) for name in ("bike", "terrain")),
        row("bike", "KeepOld", 3.0, 0.0),
    ]
    lines = bench_policies.ranking(bench_policies.table(rows))
    assert [(line["policy"], line["streams"]) for line in lines] == [
        (DEFAULT, 1),
        ("KeepOld", 1),
    ]


def test_what_is_said_of_policies_is_what_the_table_shows() -> None:
    rows = [
        *(row(name, BATCH, 1.0, 1.0) for name in ("bike", "terrain")),
        *(row(name, DEFAULT, 2.0, 0.0) for name in ("bike", "terrain")),
        row("bike", "KeepOld", 2.1, 0.5),
        row("terrain", "KeepOld", 9.0, -9.0),
    ]
    lines = bench_policies.table(rows)
    text = bench_policies.careless(lines)
    assert "twice the RMSE of the default: KeepOld on terrain." in text
    assert text.endswith("KeepOld on bike by MLL.")
    assert bench_policies.careless([x for x in lines if x["policy"] == DEFAULT]) == ""


def test_a_gap_is_read_from_its_numbers() -> None:
    def text(*values: float) -> str:
        rows = [{"after": str(value), "RMSE": value} for value in values]
        file = results.Contents({"stream": "audio"}, rows)
        return bench_policies.gap_reading(file)

    chosen = text(1.0, 0.99, 0.9, 0.9, 0.5)
    assert "is 0.990 times" in chosen and "0.500 times" in chosen
    assert "little of this gap is due to forgetting" in chosen
    assert "both have to move together" in chosen
    forgotten = text(1.0, 0.6, 0.55, 0.5, 0.5)
    assert "little of this gap" not in forgotten and "together" not in forgotten


def test_two_processes_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "policies.json"
    other = row("audio M=100", "KeepOld", 1, 1)

    def runs_meanwhile(*_: object) -> Row:
        results.write(out, {}, [other])
        return {"RMSE": 1.0}

    monkeypatch.setattr(bench_policies, "run_stream", runs_meanwhile)
    options = (["revisiting"], ["GreedyVariance"])
    rows = bench_policies.run(out, None, 1, *options)
    assert [each["policy"] for each in rows] == ["KeepOld", "GreedyVariance"]
    assert results.read(out).rows == rows
    assert list(tmp_path.iterdir()) == [out]


def test_policies_and_bayesopt_get_their_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []
    monkeypatch.setattr(bench_policies, "main", calls.append)
    benchmark.main(["policies", "--gap", "bike"])
    assert calls == [["--gap", "bike"]]
    with pytest.raises(SystemExit):
        benchmark.main(["--threads", "2", "policies"])
    assert "arguments of policies come after it" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        benchmark.main(["bayesopt", "--help"])
    assert "fantasies" in capsys.readouterr().out


def test_a_command_names_the_extra_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "workbench.bench_bayesopt", raising=False)
    for name in [name for name in sys.modules if name.startswith("botorch")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "botorch.acquisition", None)
    with pytest.raises(SystemExit, match=r"botorch.*pip install -e '.\[botorch\]'"):
        benchmark.main(["bayesopt", "--help"])


def test_a_gap_does_not_overwrite_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_policies, "run_gap", lambda *_: [{"RMSE": 1.0}])
    bench_policies.main(["--gap", "revisiting"])
    assert [path.name for path in Path("out").iterdir()] == ["gap.json"]


@pytest.mark.parametrize(
    ("exact", "said"),
    [
        ((0.1, 10.0), "costs more from about 1000 evaluations on"),
        ((2.0, 10.0), "do not cross"),
    ],
)
def test_the_page_says_from_where_on_exact_models_cost_more(exact, said):
    rows = [
        {"table": "cost", "case": f"{size} evaluations", "method": method, "seconds": t}
        for method, times in (("streaming", (1.0, 1.0)), ("exact refit", exact))
        for size, t in zip((100, 10_000), times, strict=True)
    ]
    assert said in bench_bayesopt_tables.crossing(rows)

"""The peers: they run, and their page says what the rows say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_ssgp import StreamingGP
from workbench import bench_core, benchmark, peers
from workbench.results import read

PAGE = benchmark.DOCS / "peers.md"


def test_the_page_is_that_of_the_file() -> None:
    file = read(benchmark.DATA / "peers.json")
    assert PAGE.read_text(encoding="utf-8") == peers.page(file)
    assert file.header["repeats"] >= 5 and file.header["threads"] == 1


def test_the_command_writes_rows_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "NUM_EXACT", 20)
    benchmark.main(["peers", "--quick", "--repeats", "1", "--out", str(tmp_path)])
    rows = read(tmp_path / "data" / "peers.json").rows
    works = [row["work"] for row in rows if row["table"] == "sizes"]
    assert works[0] == peers.FLOOR and len(works) == 12
    assert all(row["ms"] > 0 for row in rows if "ms" in row)
    assert "# Cost compared with peers" in (tmp_path / "peers.md").read_text("utf-8")


def test_the_papers_form_is_the_same_bound() -> None:
    """Its value is the increment of our bound, up to rounding of the subtraction."""
    model, x, y, z = bench_core.stream_state(5, 12, ())
    kernel = model.covar_module
    own = StreamingGP(kernel, num_inducing=5, memory_size=5, share_noise=False)
    own.double().likelihood.noise = 0.1
    own.update(x, y, num_steps=0, inducing_points=z)
    paper = peers.paper_bound(own, z + 0.1, own.jitter(x.dtype))
    result = own.update(x.flip(-1), y, num_steps=0, inducing_points=z + 0.1)
    torch.testing.assert_close(
        paper(x.flip(-1), y), result.increment, rtol=1e-5, atol=1e-5
    )


def test_bars_are_read_from_the_rows() -> None:
    ratios = dict.fromkeys(
        (peers.STEP_2M, peers.PAPER, peers.SVGP_STEP, peers.CONDITION_EXACT), 30.0
    )
    ratios |= {peers.STEP: 10.0, peers.CLOSED: 13.0, peers.CONDITION: 9.0}
    ratios |= {peers.SINGLE: 1.0, peers.FANTASY_MODEL: 5.0}
    rows = [
        {"table": "sizes", "work": work, "M": 100, "N": 300, "ratio": ratio}
        for work, ratio in ratios.items()
    ]
    rows += [{"table": "batch", "speedup_of_batching_32": 7.0}]
    rows += [{"table": "many", "update of": "9 streams", "single / stream": 40.0}]
    met = {bar.text: bar.met for bar in peers.bars(rows)}
    assert len(met) == 10
    missed = [text for text, is_met in met.items() if not is_met]
    assert len(missed) == 4 and missed[0].startswith(peers.CLOSED)


def test_without_a_gpu_the_check_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    peers.gpu_check()
    assert "There is no GPU" in capsys.readouterr().out

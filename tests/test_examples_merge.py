"""The examples of many sites and of many processes run, and say what they show."""

from __future__ import annotations

import socket

import pytest

from examples import distributed, merge


def test_sites_that_are_joined_know_what_all_of_them_saw(tmp_path, capsys):
    hours = merge.main(
        num_hours=2, num_batches=2, batch_size=15, num_steps=15, out=tmp_path
    )
    assert [int(hour.joined.memory.num_data) for hour in hours] == [90, 180]
    first, last = hours
    alone = min(merge.error_of(model) for model in first.sites.values())
    # Measured: 0.85 and 0.1.
    assert 2 * merge.error_of(first.joined) < alone
    assert merge.error_of(last.joined) < 0.2
    assert (tmp_path / "merge.png").stat().st_size > 10_000
    assert "joined" in capsys.readouterr().out


def test_the_distributed_example_runs_in_one_process(monkeypatch, capsys):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**group, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    error = distributed.main(num_batches=2, batch_size=300, num_steps=3)
    assert error == pytest.approx(0, abs=0.3)
    assert "same model: True" in capsys.readouterr().out

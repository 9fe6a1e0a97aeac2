"""The example of a deep kernel runs, learns and draws."""

from __future__ import annotations

from examples import deep_kernel


def test_the_network_is_learned_along_the_stream(tmp_path, capsys):
    errors = deep_kernel.main(
        num_batches=4, batch_size=60, exact_steps=60, out=tmp_path
    )
    assert [len(values) for values in errors.values()] == [4, 4, 1]
    deep, exact = errors["deep kernel"], errors["exact, deep kernel"][0]
    # The function has a standard deviation of 0.83.
    assert exact < 0.5
    assert deep[-1] < 0.83
    assert deep[-1] < deep[0]
    assert (tmp_path / "deep_kernel.png").stat().st_size > 10_000
    assert "stream / exact" in capsys.readouterr().out

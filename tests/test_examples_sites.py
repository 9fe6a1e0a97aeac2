"""The examples with likelihoods that are not Gaussian run, learn and draw."""

from __future__ import annotations

from examples import classification, counts


def test_crescents_are_classified_from_left_to_right(tmp_path, capsys):
    rows = classification.main(num_batches=4, num_steps=50, out=tmp_path)
    assert rows[-1]["error"] < 0.115
    assert rows[-1]["data"] == 400
    assert (tmp_path / "classification.png").stat().st_size > 10_000
    assert "error" in capsys.readouterr().out


def test_counts_are_learned_with_a_likelihood_of_ones_own(tmp_path, capsys):
    rows = counts.main(num_batches=3, num_steps=40, out=tmp_path)
    assert rows[-1]["error"] < 0.25
    assert (tmp_path / "counts.png").stat().st_size > 10_000
    assert "bound" in capsys.readouterr().out

"""When it pays to learn, and for how long."""

from __future__ import annotations

import copy

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from torch_ssgp import StreamingGP
from torch_ssgp.update import paying
from torch_ssgp.update.walk import Update


def stream(num_batches: int, size: int):
    generator = torch.Generator().manual_seed(0)
    x = torch.arange(num_batches * size, dtype=torch.float64).unsqueeze(-1) / 20
    noise = torch.randn(len(x), dtype=torch.float64, generator=generator)
    y = torch.sin(x[:, 0]) + 0.1 * noise
    return list(zip(x.split(size), y.split(size), strict=True))


def model(num_inducing: int = 12) -> StreamingGP:
    return StreamingGP(ScaleKernel(RBFKernel()), num_inducing=num_inducing).double()


def test_what_noise_and_scale_would_win_is_what_they_win():
    # -n/2 log 2πs - q/2s at s = 1, and at its best, s = q / n.
    n, q = torch.tensor(50.0), torch.tensor(80.0)

    def evidence(s):
        return -0.5 * n * torch.log(2 * torch.pi * s) - 0.5 * q / s

    gain = (evidence(q / n) - evidence(torch.tensor(1.0))) / n
    nothing = torch.tensor(0.0)
    found = paying.to_win(nothing, q, n, 50.0, is_scaled=True)
    torch.testing.assert_close(found, gain)
    assert paying.to_win(nothing, q, n, 50.0, is_scaled=False) == 0
    # Residuals that are smaller than expected may also be those of few data.
    assert paying.to_win(nothing, n / 2, n, 50.0, is_scaled=True) == 0


def test_what_points_lose_is_to_win():
    nothing = torch.tensor(0.0)
    found = paying.to_win(torch.tensor(5.0), nothing, torch.tensor(50.0), 50.0, True)
    assert found == pytest.approx(0.1)


def test_more_to_win_than_before_calls_for_learning():
    before = torch.tensor([0.1, 0.1])
    paying.check_suits(before + 0.9 * paying.LOSS, before)
    with pytest.raises(paying.Unsuited):
        paying.check_suits(torch.tensor([0.1, 0.1 + 1.1 * paying.LOSS]), before)


def test_an_update_that_has_to_learn_compresses_once(monkeypatch):
    compressed, runs = [], []
    compress, run = Update.compress, Update.run
    monkeypatch.setattr(
        Update, "compress", lambda *a: compressed.append(1) or compress(*a)
    )
    monkeypatch.setattr(Update, "run", lambda self: runs.append(1) or run(self))
    gp = model()
    batches = stream(12, 60)
    for x, y in batches:
        gp.update(x, y, num_steps=10, forget=1.0)
    assert len(runs) > len(batches)  # some found out that they have to learn
    assert len(compressed) <= len(batches)


@pytest.mark.filterwarnings("ignore::torch_ssgp.exceptions.BudgetWarning")
def test_steps_are_fewer_where_more_are_taken_soon_but_not_where_they_are_asked_for(
    monkeypatch,
):
    gp = model()
    *first, (x, y) = stream(20, 60)
    for batch in first:
        gp.update(*batch, forget=1.0)
    monkeypatch.setattr(paying, "LOSS", -10.0)  # there is always more to win
    default = copy.deepcopy(gp).update(x, y, forget=1.0)
    asked = gp.update(x, y, forget=1.0, learn_hyperparameters=True)
    assert default.learned and default.num_steps < asked.num_steps
    assert asked.bound > default.bound


def test_learning_again_from_no_new_data_has_an_end(monkeypatch):
    from torch_ssgp.surrogates import SingleTaskStreamingGP

    X = torch.rand(30, 2, dtype=torch.float64)
    surrogate = SingleTaskStreamingGP(X, torch.sin(4 * X.sum(-1, keepdim=True)))
    surrogate.fit(num_steps=5)
    monkeypatch.setattr(paying, "LOSS", -10.0)  # there is always more to win
    result = surrogate.fit(num_steps=5, learn_hyperparameters="auto")
    assert result.num_steps > 0

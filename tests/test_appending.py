"""Updates that only add rows equal those that look at all that is remembered."""

from __future__ import annotations

import copy

import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, FixedNoiseGaussianLikelihood

from torch_ssgp import StreamingGP, settings
from torch_ssgp.update import UpdateOptions, appending
from torch_ssgp.update.choosing import Choice
from torch_ssgp.update.walk import Update

BATCH = torch.Size([3])


def draw(n: int, batch: torch.Size = torch.Size()):
    x = 6 * torch.rand(*batch, n, 1, dtype=torch.float64)
    y = torch.sin(x.squeeze(-1))
    return x, y + 0.1 * torch.randn(y.shape, dtype=torch.float64)


def known_model(batch: torch.Size = torch.Size(), kernel=None, **options):
    kernel = ScaleKernel(kernel or RBFKernel(batch_shape=batch), batch_shape=batch)
    model = StreamingGP(kernel, num_inducing=25, batch_shape=batch, **options).double()
    noise = None
    if isinstance(model.likelihood, FixedNoiseGaussianLikelihood):
        noise = torch.full((*batch, 40), 0.02, dtype=torch.float64)
    model.update(*draw(40, batch), noise, num_steps=5)
    return model


def is_appended(model: StreamingGP, x, y, *args, **options) -> bool:
    """Update, and see whether points were looked for."""
    looked = []
    choose = Choice.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Choice, "choose", lambda *a, **k: looked.append(1) or choose(*a, **k)
        )
        model.update(x, y, *args, num_steps=0, **options)
    return not looked


def test_rows_wait_for_a_qr_and_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    waiting, counts = known_model(), []
    at_once = copy.deepcopy(waiting)
    m, most = waiting.summary.num_inducing, 0
    for x, y in zip(*(part.split(1) for part in draw(2 * m)), strict=True):
        result = waiting.update(x, y, num_steps=0)
        with monkeypatch.context() as patch:
            patch.setattr(appending, "WAITING", 0.0)
            expected = at_once.update(x, y, num_steps=0)
        assert_same(waiting, at_once, result, expected)
        assert at_once.summary.g.size(-1) <= at_once.summary.num_inducing
        counts.append(waiting.summary.g.size(-1))
        most = max(most, waiting.summary.num_inducing)
    assert most < max(counts) <= 1.25 * most


def assert_same(model: StreamingGP, other: StreamingGP, result, expected) -> None:
    x = torch.linspace(-1, 7, 30, dtype=torch.float64).unsqueeze(-1)
    close = {"rtol": 1e-9, "atol": 1e-9}
    a, b = model(x), other(x)
    torch.testing.assert_close(a.mean, b.mean, **close)
    torch.testing.assert_close(a.covariance_matrix, b.covariance_matrix, **close)
    torch.testing.assert_close(result.bound, expected.bound, **close)
    torch.testing.assert_close(
        result.projection_loss, expected.projection_loss, rtol=1e-6, atol=1e-8
    )
    a, b = (m(x, from_memory=True) for m in (model, other))
    torch.testing.assert_close(a.mean, b.mean, **close)
    assert model.summary.num_data == other.summary.num_data


@pytest.mark.parametrize("memory_size", [25, None, 400])
@pytest.mark.parametrize("batch", [torch.Size(), BATCH])
@pytest.mark.parametrize("share_noise", [True, False])
def test_new_rows_give_the_posterior_of_all_data(memory_size, batch, share_noise):
    model = known_model(batch, memory_size=memory_size, share_noise=share_noise)
    other = copy.deepcopy(model)
    for n in (1, 2, 3):
        x, y = draw(n, batch)
        # Points in another order are other points: all data are projected on them.
        expected = other.update(
            x, y, num_steps=0, inducing_points=other.summary.inducing_points.flip(-2)
        )
        result = model.update(x, y, num_steps=0)
        assert_same(model, other, result, expected)


def test_updates_append_where_nothing_else_has_to_change():
    model = known_model()
    z = model.summary.inducing_points
    assert is_appended(model, *draw(1))
    assert model.summary.inducing_points is z or torch.equal(
        model.summary.inducing_points, z
    )


@pytest.mark.parametrize("at", ["an inducing point", "an old datum"])
def test_data_where_points_are_count_as_they_do_elsewhere(at):
    model = known_model()
    x = model.summary.inducing_points[:1] if at != "an old datum" else None
    x = model.memory.raw_x[:1] if x is None else x
    y = torch.zeros(1, dtype=torch.float64)
    other = copy.deepcopy(model)
    expected = other.update(
        x, y, num_steps=0, inducing_points=other.summary.inducing_points.flip(-2)
    )
    assert_same(model, other, model.update(x, y, num_steps=0), expected)


def test_known_noises_append():
    likelihood = FixedNoiseGaussianLikelihood(torch.ones(1))
    model = known_model(likelihood=likelihood)
    other = copy.deepcopy(model)
    noise = torch.tensor([0.3, 0.01], dtype=torch.float64)
    x, y = draw(2)
    expected = other.update(
        x, y, noise, num_steps=0, inducing_points=other.summary.inducing_points.flip(-2)
    )
    assert_same(model, other, model.update(x, y, noise, num_steps=0), expected)
    assert is_appended(model, *draw(1), noise[:1])


def test_a_changed_prior_is_noticed():
    x, y = draw(1)
    for change in ("kernel", "mean", "jitter"):
        model = known_model()
        if change == "kernel":
            model.covar_module.base_kernel.lengthscale *= 1.001
        elif change == "mean":
            model.mean_module.constant = model.mean_module.constant + 0.01
        with settings.jitter(1e-5 if change == "jitter" else None):
            assert not is_appended(model, x, y)


def test_what_needs_more_than_rows_is_not_appended():
    far = torch.full((1, 1), 30.0, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    assert not is_appended(known_model(), far, one)  # needs a point
    assert not is_appended(known_model(), *draw(1), forget=0.9)
    assert not is_appended(known_model(alpha=0.5), *draw(1))
    full = known_model(memory_size=33)
    full.update(*draw(1), num_steps=0)
    assert not is_appended(full, *draw(40))


@pytest.mark.parametrize("kernel", [MaternKernel(2.5), LinearKernel()])
def test_other_kernels_append_too(kernel):
    model = known_model(kernel=kernel)
    other = copy.deepcopy(model)
    x, y = draw(2)
    expected = other.update(
        x, y, num_steps=0, inducing_points=other.summary.inducing_points.flip(-2)
    )
    assert_same(model, other, model.update(x, y, num_steps=0), expected)


def test_sites_are_found_for_all_data_again():
    model = StreamingGP(
        ScaleKernel(RBFKernel()), likelihood=BernoulliLikelihood(), num_inducing=10
    ).double()
    x, y = draw(20)
    model.update(x, (y > 0).double(), num_steps=2)
    before = model.memory.target.clone()
    model.update(x[:1] + 0.01, (y[:1] <= 0).double(), num_steps=0)
    assert not torch.equal(model.memory.target[:20], before)


@pytest.mark.parametrize("noise", [0.02, 30.0], ids=["telling", "vague"])
@pytest.mark.parametrize("memory_size", [25, 50])
def test_what_may_be_lost_is_known_without_the_memory(noise, memory_size):
    model = known_model(memory_size=memory_size)
    model.likelihood.noise = noise
    model.update(*draw(3), num_steps=0)  # a summary with this noise
    policy, asked = model.inducing_policy, []
    x, y = draw(2)
    data = model.check_data(x, y, None)
    options, limits = UpdateOptions(num_steps=0), model.limits(data)
    update = Update(model.known(data), data, options, limits)
    objective = update.objective()
    enough = policy._enough(update.points.candidates(objective))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(policy), "wants_points", lambda _, lost, *__: asked.append(lost)
        )
        result = model.update(x, y, num_steps=0)
    (lost,) = asked
    found = policy.tolerance * lost.said.minimum(lost.num_data)
    torch.testing.assert_close(found, enough, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(lost.total, result.projection_loss)

"""Several outputs: shapes, and models of some of them."""

from pathlib import Path

import pytest
import torch
from botorch.models.transforms import (
    Normalize,
    Standardize,
)
from botorch.posteriors import GPyTorchPosterior
from gpytorch.means import ConstantMean

from surrogate_models import assert_same_posterior, data, inputs, pair, sampler
from torch_ssgp.surrogates import SingleTaskStreamingGP


@pytest.mark.parametrize("memory_size", [40, 12])
@pytest.mark.parametrize("noisy", [False, True])
def test_subsets_and_repetitions_keep_the_memory(memory_size: int, noisy: bool) -> None:
    X, Y = data(24, 3)
    Yvar = torch.full_like(Y, 0.01) if noisy else None
    ours = SingleTaskStreamingGP(X, Y, Yvar, num_inducing=8, memory_size=memory_size)
    ours.fit(num_steps=3)
    test_X = inputs(4)
    whole = ours.model(test_X)
    nothing = ours.fantasize(inputs(0), sampler(2)).model(test_X)
    torch.testing.assert_close(nothing.mean, whole.mean.expand(2, 3, 4))
    for chosen in ([1], [2, 0]):
        part = ours.subset_output(chosen).model(test_X)
        expected = whole.mean[chosen], whole.variance[chosen]
        torch.testing.assert_close(part.mean, expected[0].reshape(part.mean.shape))
        torch.testing.assert_close(part.variance, expected[1].reshape(part.mean.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("transforms", [False, True])
def test_posteriors_have_the_shapes_of_botorch(
    dtype: torch.dtype, m: int, batch: tuple[int, ...], transforms: bool
) -> None:
    X, Y = data(8, m, batch, dtype)
    if not transforms:
        Y = (Y - Y.mean(-2, keepdim=True)) / Y.std(-2, keepdim=True)
    batch_shape = torch.Size(batch)
    ours = SingleTaskStreamingGP(
        X,
        Y,
        outcome_transform=(
            Standardize(m=m, batch_shape=batch_shape) if transforms else None
        ),
        input_transform=(
            Normalize(d=2, batch_shape=batch_shape) if transforms else None
        ),
    )
    assert ours.num_outputs == m
    assert ours.batch_shape == batch_shape
    assert hasattr(ours, "outcome_transform") == transforms
    assert hasattr(ours, "input_transform") == transforms
    assert isinstance(ours.mean_module, ConstantMean)
    for t_batch in ((), (2,), (4, 2)):
        shape = torch.broadcast_shapes(t_batch, batch)
        test_X = inputs(*t_batch, 3, dtype=dtype)
        posterior = ours.posterior(test_X)
        assert isinstance(posterior, GPyTorchPosterior)
        assert posterior.mean.shape == posterior.variance.shape == (*shape, 3, m)
        assert posterior.mean.dtype == dtype
        assert posterior.rsample(torch.Size([2])).shape == (2, *shape, 3, m)
        noise = torch.full((3, m), 0.3, dtype=dtype)
        noisy = ours.posterior(test_X, observation_noise=noise).variance
        scale = ours.outcome_transform.stdvs.square() if transforms else 1.0
        torch.testing.assert_close(
            noisy, posterior.variance + 0.3 * scale, rtol=1e-3, atol=1e-4
        )
        learned = ours.posterior(test_X, observation_noise=True).variance
        sigma2 = (
            ours.likelihood.noise.unsqueeze(-1)
            if m == 1
            else (ours.likelihood.noise.mT)
        )
        torch.testing.assert_close(
            learned, posterior.variance + sigma2 * scale, rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("chosen", [[0], [1], [1, 2], [-1, 0], [0, 1, 2]])
def test_subset_output_equals_the_sliced_posterior(
    batch: tuple[int, ...], noisy: bool, chosen: list[int]
) -> None:
    _, ours, _ = pair(m=3, batch=batch, noisy=noisy)
    part = ours.subset_output(chosen)
    test_X = inputs(*batch, 4)
    for noise in (False, True):
        whole = ours.posterior(test_X, observation_noise=noise)
        for posterior in (
            part.posterior(test_X, observation_noise=noise),
            ours.posterior(test_X, output_indices=chosen, observation_noise=noise),
        ):
            torch.testing.assert_close(posterior.mean, whole.mean[..., chosen])
            torch.testing.assert_close(posterior.variance, whole.variance[..., chosen])
    assert part.num_outputs == len(chosen)
    assert part.batch_shape == torch.Size(batch)
    # A copy: it learns on its own.
    X, Y = data(2, 3, batch)
    Yvar = torch.full_like(Y, 0.01) if noisy else None
    before = ours.posterior(test_X).mean
    part.update(
        X,
        Y[..., chosen],
        None if Yvar is None else Yvar[..., chosen],
        num_steps=2,
    )
    torch.testing.assert_close(ours.posterior(test_X).mean, before, rtol=0, atol=0)


def test_subset_output_of_a_fantasy() -> None:
    _, ours, _ = pair(m=2)
    fantasy = ours.fantasize(inputs(5, 1), sampler(3))
    test_X = inputs(3, 5, 4)
    torch.testing.assert_close(
        fantasy.subset_output([1]).posterior(test_X).mean,
        fantasy.posterior(test_X).mean[..., 1:],
    )


@pytest.mark.parametrize("noisy", [False, True])
def test_each_output_may_forget_what_it_has_to(noisy: bool, tmp_path: Path) -> None:
    X, Y = data(50, 2)
    Yvar = torch.full_like(Y, 0.01) if noisy else None
    ours = SingleTaskStreamingGP(X[:30], Y[:30], None if Yvar is None else Yvar[:30])
    ours.fit(num_steps=30)
    Y[30:, 0] = 10 - 3 * Y[30:, 0]  # another function, of the first output alone
    new = X[30:], Y[30:], None if Yvar is None else Yvar[30:]
    result = ours.update(*new, forget="auto", restandardize=True, num_steps=20)
    assert result.forgot[0] < 0.5 and result.forgot[1] == 1
    number = ours.num_targets.squeeze()
    torch.testing.assert_close(number, ours.model.num_data)
    torch.testing.assert_close(
        ours.target_mean[0],
        number.new_tensor([Y[30:, 0].mean(), Y[:, 1].mean()]),
        rtol=1e-2,
        atol=1e-2,
    )
    ours.save(tmp_path / "model.pt")
    loaded = SingleTaskStreamingGP.load(tmp_path / "model.pt")
    fresh = SingleTaskStreamingGP(X[:3], Y[:3], None if Yvar is None else Yvar[:3])
    fresh.load_state_dict(ours.state_dict())
    for model in (loaded, fresh):
        assert_same_posterior(model.posterior(X), ours.posterior(X), 0.0)
    assert ours.subset_output([1]).num_targets == 50

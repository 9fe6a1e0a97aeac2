"""Sample paths of surrogates."""

import pytest
import torch
from botorch.models.transforms import (
    Normalize,
)
from botorch.sampling.pathwise import draw_matheron_paths

from surrogate_models import data, inputs
from torch_ssgp.surrogates import SingleTaskStreamingGP

KINDS = ["plain", "transformed", "conditioned", "noisy", "compressed", "drifting"]


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_sample_paths_have_the_moments_of_the_posterior(m: int, kind: str) -> None:
    X, Y = data(10, m)
    Yvar = torch.full_like(Y, 0.01) if kind == "noisy" else None
    transform = Normalize(d=2) if kind == "transformed" else None
    model = SingleTaskStreamingGP(X, Y, Yvar, num_inducing=8, input_transform=transform)
    if kind == "conditioned":
        model = model.condition_on_observations(*data(2, m))
    if kind in ("compressed", "drifting"):
        model.update(*data(20, m), num_steps=0)
        assert model.model.memory.num_rows == 8
        model.update(*data(2, m), num_steps=0)
    if kind == "drifting":
        memory = model.model.memory
        memory.replace(rate=torch.full_like(memory.rate, 0.02))
    paths = draw_matheron_paths(model, torch.Size([2000]))
    test_X = inputs(6)
    samples = paths(test_X.unsqueeze(0) if m > 1 else test_X)
    samples = samples.mT if m > 1 else samples.unsqueeze(-1)
    posterior = model.posterior(test_X)
    spread = Y.std(0)
    assert samples.shape == (2000, 6, m)
    error = (samples.mean(0) - posterior.mean).abs() / spread
    assert float(error.max()) < 0.05
    error = (samples.std(0) - posterior.variance.sqrt()).abs() / spread
    assert float(error.max()) < 0.05

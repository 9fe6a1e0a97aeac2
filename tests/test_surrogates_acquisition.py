"""Acquisition functions of BoTorch on surrogates, and optimisation with them."""

from collections.abc import Callable

import pytest
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    PosteriorMean,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
    qMultiStepLookahead,
    qUpperConfidenceBound,
)
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.acquisition.joint_entropy_search import qJointEntropySearch
from botorch.acquisition.max_value_entropy_search import (
    qLowerBoundMaxValueEntropy,
    qMaxValueEntropy,
)
from botorch.acquisition.multi_objective import logei
from botorch.acquisition.multi_objective.logei import (
    qLogExpectedHypervolumeImprovement,
    qLogNoisyExpectedHypervolumeImprovement,
)
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.acquisition.utils import get_optimal_samples
from botorch.fit import fit_gpytorch_mll
from botorch.generation import MaxPosteriorSampling
from botorch.models import ModelListGP
from botorch.models.transforms import (
    Normalize,
)
from botorch.optim import optimize_acqf
from botorch.sampling import IIDNormalSampler
from botorch.sampling.pathwise import draw_matheron_paths
from botorch.utils.multi_objective.box_decompositions import (
    FastNondominatedPartitioning,
)
from gpytorch.mlls import SumMarginalLogLikelihood
from torch import Tensor

from surrogate_models import BOUNDS, data, fitted, inputs, outcomes, pair, sampler
from torch_ssgp.surrogates import SingleTaskStreamingGP


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep BoTorch 0.18 from compiling an extension for qLogEHVI, or warning."""
    monkeypatch.setattr(logei, "_load_attempted", True)


def pending(q: int = 2) -> Tensor:
    return torch.linspace(0.1, 0.9, q, dtype=torch.float64).unsqueeze(-1).expand(q, 2)


def joint_entropy(model: SingleTaskStreamingGP) -> qJointEntropySearch:
    optimal_X, optimal_Y = get_optimal_samples(
        model, BOUNDS, num_optima=3, raw_samples=16, num_restarts=2
    )
    return qJointEntropySearch(model, optimal_X, optimal_Y, X_pending=pending())


# Name, number of outputs, q, and how it is made.
ACQUISITIONS: list[tuple[str, int, int, Callable]] = [
    ("LogEI", 1, 1, lambda model: LogExpectedImprovement(model, best_f=1.0)),
    (
        "qLogEI",
        1,
        2,
        lambda model: qLogExpectedImprovement(model, 1.0, sampler=sampler(8)),
    ),
    (
        "qLogNEI",
        1,
        2,
        lambda model: qLogNoisyExpectedImprovement(
            model, X_baseline=inputs(6), sampler=sampler(8)
        ),
    ),
    (
        "qUCB",
        1,
        2,
        lambda model: qUpperConfidenceBound(model, beta=0.2, sampler=sampler(8)),
    ),
    ("qKG", 1, 2 + 4, lambda model: qKnowledgeGradient(model, num_fantasies=4)),
    ("qMES", 1, 1, lambda model: qMaxValueEntropy(model, inputs(50), num_fantasies=2)),
    (
        "qMES with pending points",
        1,
        1,
        lambda model: qMaxValueEntropy(
            model, inputs(50), num_fantasies=2, X_pending=pending()
        ),
    ),
    ("GIBBON", 1, 1, lambda model: qLowerBoundMaxValueEntropy(model, inputs(50))),
    (
        "GIBBON with pending points",
        1,
        1,
        lambda model: qLowerBoundMaxValueEntropy(
            model, inputs(50), X_pending=pending()
        ),
    ),
    (
        "qNIPV",
        1,
        2,
        lambda model: qNegIntegratedPosteriorVariance(model, mc_points=inputs(20)),
    ),
    (
        "qMultiStepLookahead",
        1,
        1 + 2 + 2 * 2,
        lambda model: qMultiStepLookahead(
            model, batch_sizes=[1, 1], num_fantasies=[2, 2]
        ),
    ),
    ("JES with pending points", 1, 1, joint_entropy),
    (
        "qLogEHVI",
        2,
        2,
        lambda model: qLogExpectedHypervolumeImprovement(
            model,
            ref_point=[0.0, 0.0],
            partitioning=FastNondominatedPartitioning(
                torch.zeros(2, dtype=torch.float64), outcomes(inputs(6), 2)
            ),
            sampler=sampler(8),
        ),
    ),
    (
        "qLogNEHVI",
        2,
        1,
        lambda model: qLogNoisyExpectedHypervolumeImprovement(
            model,
            ref_point=[0.0, 0.0],
            X_baseline=inputs(5),
            sampler=sampler(8),
            prune_baseline=True,
        ),
    ),
    ("PathwiseTS", 1, 2, lambda model: PathwiseThompsonSampling(model)),
]


# linear_operator 0.6.1 slices the covariance of several outputs by a sparse matrix,
# for SingleTaskGP as for ours.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize(
    ("m", "q", "make"),
    [case[1:] for case in ACQUISITIONS],
    ids=[case[0] for case in ACQUISITIONS],
)
@pytest.mark.parametrize("transforms", [False, True])
def test_acquisition_functions_have_finite_values_and_gradients(
    m: int, q: int, make: Callable, transforms: bool
) -> None:
    options = {"input_transform": Normalize(d=2, bounds=BOUNDS)} if transforms else {}
    model = fitted(m, **options)
    acquisition = make(model)
    X = inputs(3, q).requires_grad_()
    value = acquisition(X)
    assert value.shape == (3,)
    assert torch.isfinite(value).all()
    (gradient,) = torch.autograd.grad(value.sum(), X)
    assert torch.isfinite(gradient).all()
    assert (gradient != 0).any()
    # A second graph through the same model.
    torch.autograd.grad(acquisition(X).sum(), X)
    if transforms:
        return
    candidate, best = optimize_acqf(
        acquisition,
        bounds=BOUNDS,
        q=q if "KnowledgeGradient" not in type(acquisition).__name__ else 2,
        num_restarts=2,
        raw_samples=4,
        options={"maxiter": 3},
    )
    assert torch.isfinite(candidate).all()
    assert torch.isfinite(best)


EXACT = ["LogEI", "qLogEI", "qLogNEI", "qUCB", "qKG", "qNIPV", "qMultiStepLookahead"]


@pytest.mark.parametrize("name", EXACT)
def test_acquisition_values_are_those_of_the_exact_model(name: str) -> None:
    exact, ours, _ = pair()
    q, make = next(case[2:] for case in ACQUISITIONS if case[0] == name)
    X = inputs(3, q)
    values = []
    for model in (exact, ours):
        torch.manual_seed(1)
        values.append(make(model)(X))
    torch.testing.assert_close(values[0], values[1], rtol=1e-4, atol=1e-4)


def test_max_posterior_sampling_picks_candidates() -> None:
    model, X = fitted(), inputs(30)
    chosen = MaxPosteriorSampling(model, replacement=False)(X, num_samples=4)
    assert chosen.shape == (4, 2)
    assert (chosen.unsqueeze(1) == X).all(-1).any(-1).all()


def test_model_list_of_streaming_models() -> None:
    X, Y = data(10, 2)
    models = [
        SingleTaskStreamingGP(X, Y[:, i : i + 1], input_transform=Normalize(d=2))
        for i in range(2)
    ]
    model = ModelListGP(*models)
    fit_gpytorch_mll(
        SumMarginalLogLikelihood(model.likelihood, model),
        optimizer_kwargs={"num_steps": 5},
    )
    test_X = inputs(4)
    posterior = model.posterior(test_X)
    torch.testing.assert_close(
        posterior.mean, torch.cat([m.posterior(test_X).mean for m in models], -1)
    )
    fantasy = model.fantasize(inputs(3, 1), sampler(2))
    assert fantasy.posterior(inputs(2, 3, 4)).mean.shape == (2, 3, 4, 2)
    new_X, new_Y = data(2, 2)
    new = model.condition_on_observations([new_X, new_X], new_Y)
    for i, submodel in enumerate(models):
        expected = submodel.condition_on_observations(new_X, new_Y[:, i : i + 1])
        torch.testing.assert_close(
            new.posterior(test_X).mean[..., i].squeeze(),
            expected.posterior(test_X).mean.squeeze(),
        )
    other = ModelListGP(
        *(
            SingleTaskStreamingGP(X, Y[:, :1], input_transform=(Normalize(d=2)))
            for _ in range(2)
        )
    )
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.posterior(test_X).mean, posterior.mean)
    acquisition = qLogExpectedHypervolumeImprovement(
        model,
        ref_point=[0.0, 0.0],
        partitioning=FastNondominatedPartitioning(
            torch.zeros(2, dtype=torch.float64), Y
        ),
        sampler=sampler(8),
    )
    assert torch.isfinite(acquisition(inputs(3, 2))).all()
    paths = draw_matheron_paths(model, torch.Size([3]))
    assert [path.shape for path in paths(test_X)] == [(3, 4), (3, 4)]


# Of BoTorch, which then starts again: where all is known, a line search may end at the
# precision of numbers.
@pytest.mark.filterwarnings("ignore:Optimization failed:RuntimeWarning")
def test_optimisation_finds_the_maximum_with_fewer_inducing_points_than_data() -> None:
    X = torch.linspace(0, 1, 4, dtype=torch.float64).unsqueeze(-1)

    def objective(X: Tensor) -> Tensor:
        return -(6 * X - 2).square() * torch.sin(12 * X - 4)

    model = SingleTaskStreamingGP(X, objective(X), num_inducing=8)
    model.fit()
    for _ in range(10):
        acquisition = LogExpectedImprovement(model, best_f=objective(X).max())
        new, _ = optimize_acqf(
            acquisition, BOUNDS[:, :1], q=1, num_restarts=2, raw_samples=32
        )
        model.update(new, objective(new), restandardize=True, num_steps=50)
        X = torch.cat([X, new])
    assert 8 <= model.inducing_points.size(-2) <= 12 < len(X)
    # The maximum of the Forrester function.
    assert float(objective(X).max()) > 6.0207 - 0.05


def test_posterior_mean_of_a_fantasy_can_be_optimised() -> None:
    _, ours, _ = pair()
    fantasy = ours.fantasize(inputs(1), IIDNormalSampler(torch.Size([2]), seed=0))
    value = PosteriorMean(fantasy)(inputs(2, 1))
    assert torch.isfinite(value).all()

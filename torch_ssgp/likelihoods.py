r"""What an update needs from a GPyTorch likelihood.

Gaussian likelihoods have a noise (see :mod:`torch_ssgp.modules`). Any other likelihood
must provide only two things: :math:`E_q \log p(y_i \mid f_i)` as a function of
the marginal mean and variance of :math:`f_i`, and the targets it can explain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    Likelihood,
    LikelihoodList,
    SoftmaxLikelihood,
    _GaussianLikelihoodBase,
    _OneDimensionalLikelihood,
)
from gpytorch.means import ConstantMean, Mean, ZeroMean
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from torch_ssgp.exceptions import (
    ArgumentError,
    NonFiniteError,
    ShapeError,
    SupportError,
    UnsupportedLikelihoodError,
    breakdowns,
)
from torch_ssgp.validation import kind_of

MIN_VARIANCE = 1e-10  # below this GPyTorch warns, and quadrature has nothing to do
_TILT_ITERATIONS = 20
_SEED = 0
_DRAWS = 100  # of targets, for expectations


def is_gaussian(likelihood: Likelihood) -> bool:
    """Whether the likelihood has a noise in closed form."""
    return isinstance(likelihood, GaussianLikelihood | FixedNoiseGaussianLikelihood)


def takes_labels(likelihood: Likelihood) -> bool:
    """Whether targets are labels of classes."""
    return isinstance(likelihood, BernoulliLikelihood | SoftmaxLikelihood)


def couples_classes(likelihood: Likelihood) -> bool:
    """Whether one target depends on all functions of the last batch dimension."""
    return isinstance(likelihood, SoftmaxLikelihood)


def check_likelihood(
    likelihood: Likelihood, batch_shape: torch.Size, alpha: float
) -> None:
    """Raise unless a model can learn with this likelihood, an argument of any type."""
    if is_gaussian(likelihood):
        return
    joint = isinstance(likelihood, _GaussianLikelihoodBase | LikelihoodList)
    if joint or not (
        isinstance(likelihood, Likelihood) and hasattr(likelihood, "expected_log_prob")
    ):
        raise UnsupportedLikelihoodError(
            f"likelihood is {kind_of(likelihood)}; expected a GPyTorch likelihood of "
            "one target per point with expected_log_prob, such as "
            "GaussianLikelihood() or BernoulliLikelihood(). For several outputs give "
            "the model a batch_shape and use a likelihood with that batch_shape."
        )
    name = type(likelihood).__name__
    if alpha != 0:
        raise UnsupportedLikelihoodError(
            f"alpha is {alpha} with {name}; Power-EP is for Gaussian likelihoods. "
            "Use alpha=0, the variational bound."
        )
    if not couples_classes(likelihood):
        return
    num = likelihood.num_features
    if tuple(batch_shape[-1:]) != (num,):
        raise ShapeError(
            f"batch_shape is {tuple(batch_shape)} with {name} of {num} latent "
            f"functions; expected one function per class in its last dimension. "
            f"Use batch_shape=torch.Size([{num}])."
        )


def default_mean(likelihood: Likelihood, batch_shape: torch.Size) -> Mean:
    """A constant mean; for labels zero.

    A mean learned from a batch of one class would explain that class. Its data would
    leave no trace in the memory, and the next class would undo what was learned.
    """
    kind = ZeroMean if takes_labels(likelihood) else ConstantMean
    return kind(batch_shape=batch_shape)


def prepare_targets(
    likelihood: Likelihood,
    y: Tensor,
    x: Tensor,
    batch_shape: torch.Size,
    names: tuple[str, str],
) -> Tensor:
    """Targets of a likelihood that is not Gaussian, in the dtype of the inputs.

    What is wrong with other targets too is left to the general checks.

    Args:
        likelihood: The likelihood.
        y: ``(*batch, n)`` targets, or integer labels. For Softmax they come without
            the batch dimension of the classes, and are repeated over it.
        x: ``(*batch, n, d)`` inputs.
        batch_shape: Batch shape of the model.
        names: What to call inputs and targets in messages.
    """
    if not (y.is_floating_point() or y.is_complex()):
        y = y.to(x.dtype)
    if y.dtype != x.dtype or y.device != x.device:
        return y
    is_finite, joint = bool(y.isfinite().all()), couples_classes(likelihood)
    if not is_finite and joint:
        raise NonFiniteError(
            f"{names[1]} has NaN or infinite values; expected a label for every "
            "point. Remove these rows first."
        )
    if joint and y.shape[-1:] != x.shape[-2:-1]:
        raise ShapeError(
            f"{names[1]} has shape {tuple(y.shape)}; expected labels of shape "
            f"{(*batch_shape[:-1], x.size(-2))} for {names[0]} of shape "
            f"{tuple(x.shape)}."
        )
    if is_finite:
        _check_support(likelihood, y, names[1])
    if joint:
        y = y.unsqueeze(-2).expand(*y.shape[:-1], batch_shape[-1], y.size(-1))
    return y


def fill_missing(
    likelihood: Likelihood, y: Tensor, missing: Tensor, name: str
) -> Tensor:
    """Targets with missing readings filled in; these get weight zero later."""
    y = y.masked_fill(missing, 0.0)
    if is_gaussian(likelihood):
        return y
    if not isinstance(likelihood, BernoulliLikelihood):
        raise UnsupportedLikelihoodError(
            f"{name} has {int(missing.sum())} NaN values with "
            f"{type(likelihood).__name__}; missing readings are for Gaussian and "
            "Bernoulli likelihoods. Update such streams one by one."
        )
    _check_support(likelihood, y, name)
    return y


@torch.no_grad()
def _check_support(likelihood: Likelihood, y: Tensor, name: str) -> None:
    """Raise unless every target ``(*batch, n)`` has a positive density."""
    if couples_classes(likelihood):
        num = likelihood.num_classes
        good = (y >= 0) & (y < num) & (y == y.round())
        expected = f"labels 0 to {num - 1}, as the likelihood has {num} classes"
    else:
        given_f = likelihood.forward(torch.zeros_like(y))
        good = torch.ones_like(y, dtype=torch.bool)
        expected = "values with a positive density"
        if getattr(type(given_f), "support", None) is not None:
            good = given_f.support.check(y).expand(y.shape)
            expected = f"values of positive density in {given_f.support}"
        if bool(good.any()):
            # torch's distributions raise for values outside their support.
            inside = torch.where(good, y, y[good][0])
            good = good & torch.isfinite(given_f.log_prob(inside))
        if isinstance(likelihood, BernoulliLikelihood):
            expected = "labels 0 and 1. Use y.clamp_min(0) for labels -1 and 1"
    if not bool(good.all()):
        bad = y[~good]
        raise SupportError(
            f"{name} has {bad.numel()} of {y.numel()} values that "
            f"{type(likelihood).__name__} cannot explain, such as {bad[0].item():g}; "
            f"expected {expected}."
        )


def check_takes_noise(likelihood: Likelihood, noise: Tensor | None) -> None:
    """Raise if noise variances are missing, or given to a likelihood without noise."""
    if noise is None and isinstance(likelihood, FixedNoiseGaussianLikelihood):
        raise ArgumentError(
            "FixedNoiseGaussianLikelihood needs the noise variance of every point; got "
            "noise=None. Pass noise=, one variance per target."
        )
    if noise is not None and not is_gaussian(likelihood):
        raise ArgumentError(
            f"noise was given with {type(likelihood).__name__}; only Gaussian "
            "likelihoods take noise variances. Leave noise out."
        )


def expected_log_prob(
    likelihood: Likelihood, y: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    r"""Each function's share of :math:`E_q \log p(y_i \mid f_i)`.

    One-dimensional likelihoods use quadrature, or whatever they define themselves.
    Softmax uses :func:`softmax_bound`. Everything else is sampled by GPyTorch, with
    the same base samples in every call, so that an inner loop sees one function.

    Classes that share data get equal shares: the sum over the last batch dimension is
    the expectation.

    Args:
        likelihood: A likelihood.
        y: ``(*batch, n)`` targets.
        mean: ``(*batch, n)`` marginal means of the function.
        variance: ``(*batch, n)`` marginal variances.
    """
    # torch's distributions raise for NaN; here it has to travel on to the bound.
    good = torch.isfinite(mean) & torch.isfinite(variance)
    mean, variance = mean.where(good, 0.0), variance.where(good, 1.0)
    variance = variance.clamp_min(MIN_VARIANCE)
    with breakdowns(ValueError):  # for NaN in parameters of the likelihood too
        log_prob = _expected_log_prob(likelihood, y, mean, variance)
    return log_prob.where(good, math.nan)


def log_predictive(
    likelihood: Likelihood, y: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """Log-probability of each target, given the marginals of its function.

    Arguments as in :func:`expected_log_prob`. Classes that share data get equal shares
    of a bound on it.
    """
    if couples_classes(likelihood):
        return expected_log_prob(likelihood, y, mean, variance)
    variance = variance.clamp_min(MIN_VARIANCE)
    latent = MultivariateNormal(mean, DiagLinearOperator(variance))
    with _seeded(mean.device):
        return likelihood.log_marginal(y, latent)


def expected_log_predictive(
    likelihood: Likelihood, y: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """What :func:`log_predictive` is expected to be of targets that are not seen yet.

    Labels are enumerated, other targets drawn, the same in every call. Of ``y`` only
    the shape counts.
    """
    if takes_labels(likelihood):
        coupled = couples_classes(likelihood)
        labels = range(likelihood.num_classes if coupled else 2)
        every = (torch.full_like(y, label) for label in labels)
        shares = torch.stack(
            [log_predictive(likelihood, label, mean, variance) for label in every]
        )
        log_p = shares.sum(-2, keepdim=True) if coupled else shares
        return (log_p.softmax(0) * shares).sum(0)
    with _seeded(mean.device):
        noise = torch.randn(_DRAWS, *mean.shape).to(mean)
        f = mean + variance.clamp_min(MIN_VARIANCE).sqrt() * noise
        drawn = likelihood.forward(f).sample()
    mean, variance = mean.expand_as(drawn), variance.expand_as(drawn)
    return log_predictive(likelihood, drawn, mean, variance).mean(0)


def _expected_log_prob(
    likelihood: Likelihood, y: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    if couples_classes(likelihood):
        bound = softmax_bound(
            y[..., 0, :].long(), mean.mT, variance.mT, likelihood.mixing_weights
        )
        return (bound.unsqueeze(-2) / mean.size(-2)).expand(mean.shape)
    method = type(likelihood).expected_log_prob
    is_probit = method is BernoulliLikelihood.expected_log_prob
    if is_probit or method is _OneDimensionalLikelihood.expected_log_prob:
        nodes, weights = (
            each.view(-1, *(1 for _ in mean.shape))
            for each in _nodes(likelihood.quadrature.num_locs, mean.dtype, mean.device)
        )
        f = mean + variance.sqrt() * nodes
        # GPyTorch's log_normal_cdf is accurate to six digits, and so is its slope.
        if is_probit:
            log_p = torch.special.log_ndtr(f * (2 * y - 1))
        else:
            log_p = likelihood.forward(f).log_prob(y)
        return (weights * log_p).sum(0)
    latent = MultivariateNormal(mean, DiagLinearOperator(variance))
    if isinstance(likelihood, _OneDimensionalLikelihood):
        return likelihood.expected_log_prob(y, latent)
    with _seeded(mean.device):
        return likelihood.expected_log_prob(y, latent)


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Draw the same samples in every call, then restore the generators.

    Only those of the CPU and of ``device`` are touched: ``torch.manual_seed`` would
    also seed every other GPU, and not restore it.
    """
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        torch.default_generator.manual_seed(_SEED)
        if is_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(_SEED)
        yield


@lru_cache
def _nodes(num: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights for expectations under N(0, 1), copied to a device once.

    In full precision, unlike GPyTorch's.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(num)
    like = torch.empty(0, dtype=dtype, device=device)
    return like.new_tensor(nodes), like.new_tensor(weights / weights.sum())


def softmax_bound(
    labels: Tensor, mean: Tensor, variance: Tensor, weights: Tensor | None = None
) -> Tensor:
    r"""Lower bound of the expected log-softmax, without sampling.

    With logits :math:`h = W f`, :math:`E h = \mu`, :math:`\mathrm{cov}\, h = \Sigma`,
    and any vector :math:`a` (Knowles & Minka 2011, the tilted bound),

    .. math::
        E \log \sum_j e^{h_j} \le \tfrac12 a^\top \Sigma a
            + \log \sum_j \exp(\mu_j + \tfrac12 \Sigma_{jj} - (\Sigma a)_j),

    tightest at :math:`a = \mathrm{softmax}(\mu + \tfrac12 \mathrm{diag}\,\Sigma
    - \Sigma a)`, where its derivatives with respect to means and variances are
    those of a softmax with probabilities :math:`a`: precisions
    :math:`a_j (1 - a_j)`, never negative. That is why it is preferred to samples.

    Args:
        labels: ``(*batch, n)`` integer labels.
        mean: ``(*batch, n, k)`` means of the functions.
        variance: ``(*batch, n, k)`` variances of the functions.
        weights: ``(num_classes, k)``, :math:`W`; the identity if not given.
    """
    mu, diagonal = mean, variance
    if weights is not None:
        mu, diagonal = mean @ weights.mT, variance @ weights.square().mT

    def tilt(a: Tensor) -> Tensor:
        """``Σ a``."""
        if weights is None:
            return variance * a
        return (variance * (a @ weights)) @ weights.mT

    with torch.no_grad():
        # The map turns around with a slope of at most diagonal / 2: damped, it settles.
        damping = 1 / (1 + 0.25 * diagonal.amax(-1, keepdim=True))
        a = torch.softmax(mu, -1)
        for _ in range(_TILT_ITERATIONS):
            fixed = torch.softmax(mu + 0.5 * diagonal - tilt(a), -1)
            a = a + damping * (fixed - a)
    tilted = tilt(a)
    normaliser = (mu + 0.5 * diagonal - tilted).logsumexp(-1)
    chosen = mu.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return chosen - normaliser - 0.5 * (a * tilted).sum(-1)


def as_likelihood_input(
    likelihood: Likelihood, latent: MultivariateNormal
) -> MultivariateNormal:
    """A latent distribution ``(*batch, n)`` in the form that a likelihood's call takes.

    For Softmax, a multitask distribution of ``n`` points and one task per function,
    uncorrelated across points, as only marginals count.
    """
    if not couples_classes(likelihood):
        return latent
    mean, variance = latent.mean.mT, latent.variance.mT
    return MultitaskMultivariateNormal(mean, DiagLinearOperator(variance.flatten(-2)))

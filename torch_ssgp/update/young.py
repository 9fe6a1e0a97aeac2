r"""Young models: hyperparameters integrated out until the data decide.

With few data the evidence has no sharp maximum, and the hyperparameters at the highest
point say that there is no noise, or no function. So they are integrated out over a
grid of lengthscales :math:`\ell` and ratios of noise to signal :math:`q`. In a cell,
mean and scale are integrated out as well: with :math:`k = \sigma^2 R_\ell`, noise
:math:`\sigma^2 q`, a level :math:`N(\bar y, \nu \sigma^2)` and
:math:`\sigma^2 \sim \mathrm{InvGamma}(a_0, b_0)`,

.. math::
    B &= R + q I + \nu 1 1^\top = L L^\top, \quad u = L^{-1} (y - \bar y), \quad
        a = a_0 + n/2, \quad b = b_0 + \tfrac12 \|u\|^2 \\
    \log p(y \mid c) &= \log \tfrac{\Gamma(a)}{\Gamma(a_0)} + a_0 \log b_0 - a \log b
        - \tfrac12 \log |B| - \tfrac n2 \log 2 \pi

and a prediction is Student's t with :math:`2a` degrees of freedom. Cells have
log-normal priors. The mixture is matched by its moments, its variance widened to the
95 % quantile of t.

**Handover.** Every new datum is predicted by the mixture and by learned
hyperparameters. Their odds are those of the switch distribution: all begin with the
mixture, and one in :math:`n` may change over to what was learned. Predictions are
averaged by the same odds; once they are clear, the mixture is dropped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    ProductKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor, nn

from torch_ssgp import functional as fn
from torch_ssgp.kernels import Form, read
from torch_ssgp.memory import TRUSTED, Data
from torch_ssgp.modules import square_gram
from torch_ssgp.update.initialization import (
    fit_shape,
    input_spread,
    scales_of,
    set_hyperparameter,
)

if TYPE_CHECKING:
    from torch_ssgp.prediction import Predictor

# The grid: lengthscales in units of the diameter of the inputs, noise in units of the
# scale; and the priors of both, log-normal.
LENGTHSCALES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
RATIOS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
CENTRES, WIDTHS = (0.4, 0.03), (1.0, 2.0)
LEVEL = 10.0  # variance of the level, in units of the scale
SHAPE = 0.5  # a_0
JITTER = 1e-8
FAINT = 1e-3  # weight below which a cell does not predict
ODDS = math.log(1e3)  # at which learned hyperparameters are trusted
LARGEST = 100  # rows of a young model
CAP = 4.6  # nats by which one datum may move the odds
GROWN = 0.2  # share of new data for which the units of the cells are kept
FEW = 8  # data from which hyperparameters are learned


class Grid(NamedTuple):
    """The hyperparameters that nobody set: they may be integrated out.

    Attributes:
        names: Of free parameters of the kernel.
        level: Whether the mean is a free constant.
        is_all: Whether the kernel has no hyperparameters besides.
    """

    names: frozenset[str]
    level: bool
    is_all: bool


def grid_of(prior: Any, start: list[Tensor]) -> Grid | None:
    """What may be integrated out; ``None`` if the user said anything about it.

    That is so where a scale, a noise or a lengthscale is frozen, was set before the
    ``start`` or has a prior, where there is no scale, or where the class of the kernel
    is not known here.
    """
    mean, kernel, likelihood = prior
    if type(likelihood) is not GaussianLikelihood or not _is_scaled(kernel):
        return None
    if any(True for m in prior for _ in m.named_priors()) or read(kernel) is None:
        return None
    starts = dict(zip(map(id, prior.parameters()), start, strict=True))

    def is_free(parameter: Tensor) -> bool:
        known = starts[id(parameter)]
        return parameter.requires_grad and bool((known == 0).all())

    if not is_free(likelihood.raw_noise):
        return None
    scales = {id(k.raw_outputscale) for k in scales_of(kernel)}
    names, count = [], 0
    for name, parameter in kernel.named_parameters():
        count += 1
        if name.endswith("raw_lengthscale") or id(parameter) in scales:
            if not is_free(parameter):
                return None
            names.append(name)
    level = type(mean) is ConstantMean and is_free(mean.raw_constant)
    return Grid(frozenset(names), level, len(names) == count)


def any_function(num_dims: int) -> tuple[Kernel, Grid]:
    """A kernel for data of which nothing is known, and its grid."""
    kernel = ScaleKernel(MaternKernel(ard_num_dims=num_dims))
    names = frozenset(name for name, _ in kernel.named_parameters())
    return kernel, Grid(names, True, True)


def _is_scaled(kernel: Kernel) -> bool:
    """Whether one factor of all scales is a factor of the kernel."""
    if isinstance(kernel, AdditiveKernel):
        return all(_is_scaled(part) for part in kernel.kernels)
    if isinstance(kernel, ProductKernel):
        return any(_is_scaled(part) for part in kernel.kernels)
    return isinstance(kernel, ScaleKernel)


class Cells(NamedTuple):
    """Cells of a grid, for the inputs at hand.

    Attributes:
        form: ``(cells, *batch)``, the kernel with a scale of one.
        form_at: From lengthscales ``(cells,)`` to such a form.
        lengthscale: ``(cells,)``, in units of the diameter of the inputs.
        ratio: ``(cells,)``.
        log_prior: ``(cells,)``.
    """

    form: Form
    form_at: Callable[[Tensor], Form]
    lengthscale: Tensor
    ratio: Tensor
    log_prior: Tensor


def cells_of(kernel: Kernel, grid: Grid, x: Tensor) -> Cells:
    """The grid in units of these inputs ``(*batch, n, d)``."""
    pairs = x.new_tensor(list(itertools.product(LENGTHSCALES, RATIOS)))
    centres, widths = x.new_tensor(CENTRES), x.new_tensor(WIDTHS)
    log_prior = (-0.5 * ((pairs / centres).log() / widths).square()).sum(-1)
    lengthscale, ratio = pairs.unbind(-1)
    paths = {id(module): path for path, module in kernel.named_modules()}

    def form_at(lengthscale: Tensor) -> Form:
        def value(module: Any, name: str) -> Tensor:
            now = getattr(module, name).detach().to(x)
            path = f"{paths[id(module)]}.raw_{name}".lstrip(".")
            if path not in grid.names:
                return now
            if name == "outputscale":
                return torch.ones_like(now)
            unit = _diameter(module, x)
            return lengthscale.view(-1, *(1 for _ in unit.shape)) * unit

        form = read(kernel, value)
        assert form is not None
        return form

    form = form_at(lengthscale)
    return Cells(form, form_at, lengthscale, ratio, log_prior.log_softmax(0))


def _diameter(kernel: Kernel, x: Tensor) -> Tensor:
    """Diameter of the inputs a kernel sees, ``(*batch, 1, d or 1)``.

    Inputs that are all at one place say nothing of others: the unit is tiny.
    """
    dims = x.size(-1) if kernel.active_dims is None else len(kernel.active_dims)
    spread = input_spread(kernel, "raw_lengthscale", x, nothing=0.0)
    tiny = 1e-6 * x.abs().amax((-1, -2), keepdim=True).clamp_min(1e-300)
    return torch.where(spread > 0, math.sqrt(dims) * spread, tiny)


class Mixture(NamedTuple):
    """A young model: its data under every cell.

    Attributes:
        cells: The grid.
        x: ``(*batch, n, d)``, inputs.
        y: ``(*batch, n)``, targets.
        weight: ``(*batch, n)``, powers of their likelihoods; ``None`` for ones.
        mean: Prior mean; ``None`` where a level is integrated out.
        L: ``(cells, *batch, n, n)``, Cholesky factor of ``B``.
        u: ``(cells, *batch, n)``.
        a: ``(*batch,)``.
        b: ``(cells, *batch)``.
        log_evidence: ``(cells, *batch)``.
        num_made: The number of data for which the units of the cells were made.
    """

    cells: Cells
    x: Tensor
    y: Tensor
    weight: Tensor | None
    mean: Callable[[Tensor], Tensor] | None
    L: Tensor
    u: Tensor
    a: Tensor
    b: Tensor
    log_evidence: Tensor
    num_made: int

    @property
    def nu(self) -> float:
        """Variance of the level, in units of the scale."""
        return LEVEL if self.mean is None else 0.0

    @property
    def root(self) -> Tensor | None:
        """Weights of the rows, ``(*batch, n)``; ``None`` for ones."""
        return None if self.weight is None else self.weight.sqrt()

    def level(self, x: Tensor) -> Tensor:
        """Prior mean ``(*batch, n)``."""
        if self.mean is not None:
            return self.mean(x)
        return average(self.y, self.weight).unsqueeze(-1)

    @property
    def evidence(self) -> Tensor:
        """Log evidence of the data, with all integrated out, ``(*batch,)``."""
        return (self.log_evidence + _along(self.cells.log_prior, self.b)).logsumexp(0)

    @property
    def weights(self) -> Tensor:
        """Posterior of the cells, ``(cells, *batch)``."""
        return (self.log_evidence + _along(self.cells.log_prior, self.b)).softmax(0)

    def take(self, index: Tensor) -> Mixture:
        """Some of the cells, weighted as before."""
        cells = self.cells
        chosen = cells._replace(
            form=cells.form_at(cells.lengthscale[index]),
            lengthscale=cells.lengthscale[index],
            ratio=cells.ratio[index],
            log_prior=cells.log_prior[index],
        )
        return self._replace(
            cells=chosen,
            L=self.L[index],
            u=self.u[index],
            b=self.b[index],
            log_evidence=self.log_evidence[index],
        )

    def extended(self, new: Data) -> Mixture | None:
        """The same with new data, in the same units; ``None`` if these are old."""
        num_data = self.y.size(-1) + new.y.size(-1)
        if num_data > (1 + GROWN) * self.num_made:
            return None
        weight = None
        if self.weight is not None or new.weight is not None:
            pair = (self.y, self.weight), (new.y, new.weight)
            ones = [torch.ones_like(y) if w is None else w for y, w in pair]
            weight = torch.cat(fn.broadcast_rows(*ones), -1).expand(
                *new.y.shape[:-1], -1
            )
        x_new = new.x.expand(*new.y.shape, -1)
        c = self.cells.form.gram(self.x, x_new) + self.nu
        R, noise = _noisy(self.cells, x_new, new, self.nu)
        if self.root is not None:
            c = self.root.unsqueeze(-1) * c
        if new.weight is not None:
            c = c * new.weight.sqrt().unsqueeze(-2)
        V = fn.solve_lower(self.L, c)
        L_new = fn.cholesky(R + torch.diag_embed(noise) - V.mT @ V)
        top = torch.cat([self.L, torch.zeros_like(V)], -1)
        L = torch.cat([top, torch.cat([V.mT, L_new], -1)], -2)
        x, y = torch.cat([self.x, x_new], -2), torch.cat([self.y, new.y], -1)
        return _integrated(
            self.cells, Data(x, y, None, weight), self.mean, L, self.num_made
        )

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of targets at ``x`` ``(*batch, n, d)``, ``(*batch, n)``.

        The variance is that of a normal with the same 95 % interval.
        """
        form, ratio = self.cells.form, _along(self.cells.ratio, self.b)
        c = form.gram(self.x, x) + self.nu
        if self.root is not None:
            c = self.root.unsqueeze(-1) * c
        V = fn.solve_lower(self.L, c)
        shift = (self.u.unsqueeze(-2) @ V).squeeze(-2)
        left = (
            form.variances(x) + self.nu + ratio.unsqueeze(-1) - fn.squared_norm(V, -2)
        )
        variance = (self.b / self.a).unsqueeze(-1) * left.clamp_min(0)
        w = self.weights.unsqueeze(-1)
        mean = (w * shift).sum(0)
        variance = (w * (variance + (shift - mean).square())).sum(0)
        wide = _widening(2 * self.a).unsqueeze(-1)
        return self.level(x) + mean, variance * wide


def _along(value: Tensor, like: Tensor) -> Tensor:
    """One value per cell, beside ``(cells, *batch)``."""
    return value.view(-1, *(1 for _ in like.shape[1:]))


def _widening(freedom: Tensor) -> Tensor:
    """Squared ratio of the 97.5 % quantiles of t and of a normal distribution.

    The expansion of Cornish and Fisher; 3 % too small at two degrees of freedom.
    """
    z, v = 1.959964, freedom
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    t = z + terms[0] / v + terms[1] / v**2 + terms[2] / v**3
    return (t / z) ** 2


def mix(
    mean: nn.Module,
    kernel: Kernel,
    grid: Grid,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None = None,
) -> Mixture:
    """Data ``(*batch, n, d)`` and ``(*batch, n)`` under every cell of the grid.

    A ``weight`` ``(*batch, n)`` or ``(n,)`` is the power of their likelihoods.
    """
    cells = cells_of(kernel, grid, x)
    if weight is not None:
        weight = weight.expand(y.shape)
    data, nu = Data(x, y, None, weight), LEVEL if grid.level else 0.0
    R, noise = _noisy(cells, x, data, nu)
    L = fn.cholesky(R + torch.diag_embed(noise))
    return _integrated(cells, data, None if grid.level else mean, L, y.size(-1))


def _noisy(cells: Cells, x: Tensor, data: Data, nu: float) -> tuple[Tensor, Tensor]:
    """``R + nu`` of weighted data and their noise, in units of the scale."""
    y, w = data.y, data.weight
    R = square_gram(cells.form, x) + nu
    R = R.expand(len(cells.ratio), *y.shape, y.size(-1))
    noise = (
        _along(cells.ratio + JITTER, R[..., 0, 0]).unsqueeze(-1).expand(R.shape[:-1])
    )
    if w is None:
        return R, noise
    root = w.sqrt()
    return root.unsqueeze(-1) * R * root.unsqueeze(-2), noise.where(w > 0, 1.0)


def _integrated(
    cells: Cells,
    data: Data,
    mean: Callable[[Tensor], Tensor] | None,
    L: Tensor,
    num_made: int,
) -> Mixture:
    """The mixture of data whose ``B`` is factored, level and scale integrated out."""
    x, y, weight = data.x, data.y, data.weight
    w = torch.ones_like(y) if weight is None else weight
    n, level = w.sum(-1), average(y, weight)
    r = y - (level.unsqueeze(-1) if mean is None else mean(x))
    # One or two data say nothing of the scale; their size does.
    lone = 0.25 * level.square() * torch.exp(-2 * (n - 1))
    b_0 = SHAPE * ((w * r.square()).sum(-1) / n.clamp_min(1) + lone)
    b_0 = b_0.clamp_min(1e-30)
    r = (r if weight is None else w.sqrt() * r).expand(L.shape[:-1])
    u = fn.solve_lower(L, r.unsqueeze(-1)).squeeze(-1)
    a, b = SHAPE + n / 2, b_0 + 0.5 * fn.squared_norm(u)
    log_evidence = torch.lgamma(a) - math.lgamma(SHAPE) + SHAPE * b_0.log()
    log_evidence = log_evidence - a * b.log() - 0.5 * fn.log_det(L)
    log_evidence = (log_evidence - 0.5 * n * fn.LOG_2PI).nan_to_num(-torch.inf)
    return Mixture(cells, x, y, weight, mean, L, u, a, b, log_evidence, num_made)


def average(y: Tensor, weight: Tensor | None) -> Tensor:
    """Weighted mean of targets, ``(*batch,)``."""
    if weight is None:
        return y.sum(-1) / max(y.size(-1), 1)
    return (weight * y).sum(-1) / weight.sum(-1).clamp_min(1)


def pruned(mixture: Mixture) -> Mixture:
    """The mixture without cells that hardly count in any stream."""
    weights = mixture.weights.flatten(1) if mixture.b.ndim > 1 else mixture.weights
    most = weights.amax(1) if mixture.b.ndim > 1 else weights
    return mixture.take((most > FAINT).nonzero().squeeze(-1))


@torch.no_grad()
def set_best(prior: Any, grid: Grid, mixture: Mixture) -> None:
    """Set hyperparameters to the cell with the largest weight, in place."""
    mean, kernel, likelihood = prior
    cells, best = mixture.cells, mixture.weights.argmax(0, keepdim=True)
    at = best.squeeze(0)
    scale = mixture.b.gather(0, best).squeeze(0) / mixture.a
    for path, module in kernel.named_modules():
        names = [
            n.rpartition(".")[2] for n in grid.names if n.rpartition(".")[0] == path
        ]
        if "raw_outputscale" in names:
            set_hyperparameter(module, "raw_outputscale", scale)
        if "raw_lengthscale" in names:
            unit = _diameter(module, mixture.x)
            length = cells.lengthscale[at][..., None, None] * unit
            set_hyperparameter(module, "raw_lengthscale", length)
    noise = (cells.ratio[at] * scale).unsqueeze(-1)
    set_hyperparameter(likelihood.noise_covar, "raw_noise", noise)
    if grid.level:
        # E[level] = nu 1ᵀ B⁻¹ (y - average), the root of a weight in both factors.
        ones = torch.ones_like(mixture.u) if mixture.root is None else mixture.root
        side = fn.solve_lower(mixture.L, ones.expand(mixture.u.shape).unsqueeze(-1))
        shift = mixture.nu * (side.squeeze(-1) * mixture.u).sum(-1)
        value = mixture.level(mixture.x)[..., 0] + shift.gather(0, best).squeeze(0)
        mean.raw_constant.copy_(fit_shape(value, mean.raw_constant))


@torch.no_grad()
def one_ahead(
    predictor: Predictor, new: Data, num_data: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log odds of learned hyperparameters after new data ``(*batch,)``.

    With standardised errors of these one step ahead, and their scale ``(*batch, n)``.
    """
    assert predictor.young is not None
    mixture, odds = predictor.young
    mean, variance = predictor.moments(new.x)
    noise = predictor.s.unsqueeze(-1)
    other, total = mixture.moments(new.x)
    gain = _log_normal(new.y - mean, variance + noise)
    gain = (gain - _log_normal(new.y - other, total)).clamp(-CAP, CAP)
    both, latent = predictor.average(new.x, mean, variance)
    scale = (latent + noise).sqrt().expand(new.y.shape)
    error = ((new.y - both) / scale).expand(new.y.shape)
    if new.seen is not None:
        gain, error = gain.where(new.seen, 0), error.where(new.seen, 0)
    p = (odds + gain.sum(-1)).sigmoid()
    p = p + (1 - p) / (num_data + 2)
    # Before, those of the modules are those of a cell.
    odds = torch.where(num_data < FEW, -TRUSTED, p.logit(eps=1e-12))
    return odds, error, scale


def _log_normal(error: Tensor, variance: Tensor) -> Tensor:
    """Log density of errors, up to a constant."""
    return -0.5 * (error.square() / variance + variance.log())

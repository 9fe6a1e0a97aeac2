"""The inner loop: maximise the streaming bound over hyperparameters and points."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.module import Module
from torch import Tensor, nn

from torch_ssgp import functional as F
from torch_ssgp.exceptions import (
    Breakdown,
    FactorizationError,
    MissingDependencyError,
    breakdowns,
)
from torch_ssgp.functional import PriorBlocks, Projection, PseudoObservations
from torch_ssgp.initialization import fit_shape
from torch_ssgp.modules import (
    observation_noise,
    prior_blocks,
    same_variables,
)

Callback = Callable[[int, Tensor], Any]

LEARNING_RATES = {"adam": 0.05, "lbfgs": 1.0}
CHECK_EVERY = 10  # steps between two looks at the loss: a device waits only there
FAR = 100.0  # spreads of the targets from the mean that are no part of the function
PATIENCE = 20  # steps without progress that make a plateau
JITTERS = (1e-6, 1e-4, 1e-2)  # tried one after the other where a smaller one fails


class NewData(NamedTuple):
    """What arrives: ``x`` ``(*batch, n, d)``, ``y`` ``(*batch, n)``, known noise."""

    x: Tensor
    y: Tensor
    noise: Tensor | None


@dataclass(frozen=True)
class UpdateResult:
    """What one update did.

    Attributes:
        bound: ``(*batch,)``, bound on the log evidence of all data seen.
        increment: ``(*batch,)``, by how much the new data changed it: the online
            bound on log p(new data | data before). Increments add up to ``bound`` as
            long as nothing is forgotten.
        bound_trace: ``(steps, *batch)``, the bound after every step.
        num_steps: Steps taken; of L-BFGS, evaluations of the bound, which may exceed
            its budget by a quarter.
        converged: Whether the inner loop ended on a plateau, not on its budget.
        projection_loss: ``(*batch,)``, nats lost by projecting data and past on the
            inducing points.
        projection_loss_before: ``(*batch,)``, the same before the inner loop, with
            the inducing points it began with and the hyperparameters of before.
        num_inducing: Number of inducing points now.
        num_kept: ``(*batch,)``, how many of the old inducing points are among them.
        num_added: ``(*batch,)``, how many are new.
        num_dropped: ``(*batch,)``, how many of the old ones are gone.
        seconds: Wall-clock time of the update.
        status: ``"ok"``, or how far the update had to fall back, which a
            ``NumericalWarning`` says too: ``"last_iterate"`` (the inner loop met a
            value that is not finite and ended at the best point before),
            ``"jitter"`` (the jitter was raised, and stays), ``"closed_form"`` (no
            learning: the data were absorbed with the old hyperparameters).
    """

    bound: Tensor
    increment: Tensor
    bound_trace: Tensor
    num_steps: int
    converged: bool
    projection_loss: Tensor
    projection_loss_before: Tensor
    num_inducing: int
    num_kept: Tensor
    num_added: Tensor
    num_dropped: Tensor
    seconds: float
    status: str = "ok"


class FitResult(NamedTuple):
    """What the inner loop did."""

    bound_trace: Tensor
    num_steps: int
    converged: bool
    status: str = "ok"


class StreamingObjective(nn.Module):
    """The bound of one update, as a function of hyperparameters and ``Z_b``.

    Holds working copies: whatever happens to them, the model is not touched.

    Args:
        mean: Prior mean.
        kernel: Prior covariance.
        likelihood: Gaussian likelihood.
        data: New data.
        z_a: ``(*batch, m_a, d)`` old inducing points.
        past: Pseudo-observations at ``z_a``.
        shared_noise: Whether the rows of the past have the noise of the likelihood.
        alpha: Power of Power-EP.
        jitter: Relative jitter.
        landmarks: ``(*batch, r, d)``, inputs the past has seen, see
            :meth:`hidden_loss`.
    """

    z: nn.Parameter
    settled: bool = True  # what is not learned by gradients has converged

    def __init__(
        self,
        mean: Mean,
        kernel: Kernel,
        likelihood: Likelihood,
        data: NewData,
        z_a: Tensor,
        past: PseudoObservations,
        *,
        shared_noise: bool,
        alpha: float,
        jitter: float,
        landmarks: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.mean, self.kernel, self.likelihood = mean, kernel, likelihood
        self.data, self.z_a, self.past = data, z_a, past
        self.shared_noise, self.alpha, self.jitter = shared_noise, alpha, jitter
        remembers = shared_noise and landmarks is not None and landmarks.size(-2) > 0
        self.landmarks = landmarks if remembers else None
        self.blur_before: Tensor | None = None
        self.loss_before: Tensor | None = None  # nats, at the first call of `total`

    @property
    def coupled(self) -> bool:
        """Whether the last batch dimension is classes that share their data."""
        return False

    def noises(self) -> tuple[Tensor, Tensor]:
        """Noise of the new data ``(*batch, n)`` and noise scale ``(*batch,)``."""
        y = self.data.y
        noise = observation_noise(self.likelihood, self.data.noise)
        if self.shared_noise:
            s = noise.squeeze(-1).expand(y.shape[:-1])
            return s.unsqueeze(-1), s
        return noise.expand(y.shape), torch.ones_like(y[..., 0])

    def start_at(self, z: Tensor, learn: bool = False) -> None:
        """Put the inducing points at ``z`` ``(*batch, m_b, d)``.

        Points kept from the past never move: moving one would project what is known
        about it, and loses; new ones are free, as the new data are still at hand.
        """
        self.z = nn.Parameter(z.clone(), requires_grad=learn)
        self.same = same_variables(z, self.data.x, self.z_a)
        if learn:
            self.is_new = ~self.same[..., self.data.x.size(-2) :].any(-1)
            self.same = self.same & ~self.is_new.unsqueeze(-1)

    def prior(self) -> PriorBlocks:
        """Prior blocks at the present hyperparameters and inducing points."""
        return prior_blocks(
            self.mean,
            self.kernel,
            self.z,
            self.data.x,
            self.z_a,
            self.jitter,
            self.same,
            self.landmarks,
        )

    def project(self, prior: PriorBlocks) -> tuple[Projection, Tensor]:
        """Rows of the regression, and their noise scale."""
        noise, s = self.noises()
        known = None if self.shared_noise else noise
        return F.project(prior, self.past, self.data.y, known, s, self.alpha), s

    def forward(self) -> Tensor:
        """The bound, ``(*batch,)``."""
        return F.evidence(*self.project(self.prior()))

    def hidden_loss(self, rows: Projection, s: Tensor) -> Tensor | float:
        r"""Nats that hyperparameters cost the past and the bound does not see.

        The past knows the function at ``Z_a``; between those points it trusts the
        interpolation of its time. Under a kernel that interpolates worse, the true
        bound on the evidence of the old data falls by about

        .. math:: \tfrac{n}{2s} [\ell(\theta) - \ell(\theta_{old})]_+,

        with :math:`\ell` the prior variance at the landmarks that the inducing points
        leave unexplained. Where they resolve the data this is nothing; where they do
        not, the bound alone would walk off to short lengthscales. It guides the inner
        loop only: the bound reported and stored is the bound.
        """
        if rows.blur is None:
            return 0.0
        if self.blur_before is None:  # the first call is at the old hyperparameters
            self.blur_before = rows.blur.detach()
        rise = (rows.blur - self.blur_before).clamp_min(0)
        return 0.5 * self.past.n * rise / s

    @breakdowns()
    def total(self) -> tuple[Tensor, Tensor]:
        """What the inner loop maximises and the bounds in it, ``(*batch,)`` each."""
        rows, s = self.project(self.prior())
        if self.loss_before is None:
            self.loss_before = (rows.loss / (2 * s)).detach()
        bound = F.evidence(rows, s)
        return bound + self.log_prior() - self.hidden_loss(rows, s), bound

    @torch.no_grad()
    def check_finite(self) -> None:
        """Raise :class:`Breakdown` unless there is a point to start from."""
        if not bool(torch.isfinite(self.total()[0]).all()):
            raise Breakdown("the bound is not finite before the first step")

    def raise_jitter(self) -> bool:
        """Take a larger jitter, if there is one; whether there was.

        What was found with the smaller one is forgotten.
        """
        larger = [jitter for jitter in JITTERS if jitter > self.jitter]
        self.jitter = larger[0] if larger else self.jitter
        self.blur_before = self.loss_before = None
        return bool(larger)

    def no_trace(self) -> Tensor:
        """The bound along no step, ``(0, *batch)``."""
        return self.data.y.new_empty(0, *self.data.y.shape[:-1])

    def spread(self) -> Tensor:
        """Spread of the targets ``(*batch,)``, the unit of a constant mean.

        Or how far the stream has left the mean behind, if that is far more: in units
        of a small spread the mean would need thousands of steps to follow.
        """
        spread, distance = self.data.y.std(-1, correction=0), self.distance()
        spread = torch.where(distance > FAR * spread, distance, spread)
        return torch.where(spread > 0, spread, 1)

    @torch.no_grad()
    def size(self) -> Tensor:
        """Root mean square ``(*batch,)`` of the targets about the prior mean."""
        return (self.data.y - self.mean(self.data.x)).square().mean(-1).sqrt()

    @torch.no_grad()
    def distance(self) -> Tensor:
        """Distance ``(*batch,)`` of the targets, on average, from the prior mean."""
        away = (self.data.y - self.mean(self.data.x)).mean(-1).abs()
        return away.nan_to_num(0.0, 0.0)

    @breakdowns(ValueError)  # of a distribution, where a hyperparameter is NaN
    def log_prior(self) -> Tensor | float:
        """Log-density of the hyperparameters under GPyTorch priors, ``(*batch,)``.

        Streams that share a hyperparameter share its density.
        """
        batch = self.data.y.shape[:-1]
        total: Tensor | float = 0.0
        for module in (self.mean, self.kernel, self.likelihood):
            for _, owner, prior, closure, _ in module.named_priors():
                density = prior.log_prob(closure(owner))
                if density.shape[: len(batch)] == batch:
                    total = total + _sum_over(density, len(batch))
                else:
                    total = total + density.sum() / batch.numel()
        return total


def _sum_over(values: Tensor, num_kept: int) -> Tensor:
    """Sum of all but the first ``num_kept`` dimensions."""
    return values.unsqueeze(-1).flatten(num_kept).sum(-1)


class Coordinate(NamedTuple):
    """One parameter, and the variable the optimiser sees instead.

    Attributes:
        parameter: What the modules read.
        eta: What the optimiser moves.
        to_parameter: ``parameter = to_parameter(eta)``.
        floor: Smallest value of ``eta``, below which gradients would vanish.
    """

    parameter: nn.Parameter
    eta: Tensor
    to_parameter: Callable[[Tensor], Tensor]
    floor: Tensor | None = None

    def move(self, eta: Tensor) -> None:
        """Go there."""
        self.eta.copy_(eta)
        self.parameter.copy_(self.to_parameter(eta))


def coordinates(
    objective: StreamingObjective,
    learn_hyperparameters: bool,
    learn_inducing_points: bool,
) -> list[Coordinate]:
    """Variables in which one learning rate suits every parameter.

    Positive hyperparameters are moved in their logarithm, whatever transform their
    constraint uses, so that they neither crawl when large nor get stuck when small;
    constants of the mean in units of the spread of the targets; inducing points in
    units of their spacing.
    """
    result = []
    if learn_hyperparameters:
        for module in (objective.mean, objective.kernel, objective.likelihood):
            result += _hyperparameters(module, objective.spread())
    if learn_inducing_points:
        z = objective.z
        start, spacing = z.detach().clone(), _spacing(z.detach(), objective.data.x)
        spacing = spacing * objective.is_new.unsqueeze(-1)
        result.append(
            Coordinate(z, torch.zeros_like(start), lambda eta: start + spacing * eta)
        )
    return [c._replace(eta=c.eta.requires_grad_()) for c in result]


def _spacing(z: Tensor, x: Tensor) -> Tensor:
    """Typical distance of neighbouring inducing points, ``(*batch, 1, d)``."""
    points = torch.cat([z, x], -2)
    spread = points.amax(-2, keepdim=True) - points.amin(-2, keepdim=True)
    spread = torch.where(spread > 0, spread, 1)
    return spread * z.size(-2) ** (-1.0 / z.size(-1))


def _hyperparameters(module: Module, spread: Tensor) -> list[Coordinate]:
    constants = {
        id(m.raw_constant) for m in module.modules() if isinstance(m, ConstantMean)
    }
    result = []
    for _, parameter, constraint in module.named_parameters_and_constraints():
        if not parameter.requires_grad:
            continue
        raw = parameter.detach().clone()
        if _is_positive(constraint):
            result.append(_log_coordinate(parameter, constraint))
        elif id(parameter) in constants and constraint is None:
            unit = fit_shape(spread, raw)
            result.append(Coordinate(parameter, raw / unit, unit.mul))
        else:
            result.append(Coordinate(parameter, raw, lambda eta: eta))
    return result


def _is_positive(constraint: Interval | None) -> bool:
    return isinstance(constraint, GreaterThan) and bool(
        (constraint.lower_bound >= 0).all()
    )


def _log_coordinate(parameter: nn.Parameter, constraint: GreaterThan) -> Coordinate:
    # The logarithm of the value, not of its distance to the bound: the gradient does
    # not vanish there, so what came to rest at a bound can leave it again.
    floor = (constraint.lower_bound * 1.01).clamp_min(1e-30).log()
    eta = constraint.transform(parameter.detach()).log().maximum(floor)

    def to_parameter(eta: Tensor) -> Tensor:
        # A line search may look below the floor, where the inverse has no value.
        value = torch.where(eta < floor, floor, eta).exp()
        return constraint.inverse_transform(value)

    return Coordinate(parameter, eta, to_parameter, floor)


# Factors of noise and scale tried before the first step, and the nats per new datum
# that a jump must gain.
JUMPS = (1 / 16, 1 / 4, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
JUMP_GAIN = 1.0


@torch.no_grad()
def _jump(ascent: _Ascent) -> None:
    """Let noise and scale jump where the stream did, before small steps begin.

    Small steps need many batches to follow a stream whose scale changes at once, and
    what is projected away in the meantime is gone. A scale may have gone far below all
    factors while there was nothing to see; it is tried at the size of the targets too.
    """
    objective = ascent.objective
    names = {
        id(parameter): name.rsplit(".", 1)[-1]
        for owner in (objective.likelihood, objective.kernel)
        for name, parameter in owner.named_parameters()
    }
    for variable in ascent.variables:
        name = names.get(id(variable.parameter))
        if variable.floor is None or name not in ("raw_noise", "raw_outputscale"):
            continue
        start = variable.eta.clone()
        places = [start + math.log(factor) for factor in JUMPS]
        if name == "raw_outputscale":
            places.append((2 * fit_shape(objective.size(), start).log()).maximum(start))
        best, best_eta = ascent.score() + JUMP_GAIN * objective.data.y.size(-1), start
        for place in places:
            eta = place.maximum(variable.floor)
            variable.move(eta)
            try:
                score = ascent.score()
            except Breakdown:  # too far
                continue
            better = score > best
            best = torch.where(better, score, best)
            best_eta = _choose(better, eta, best_eta)
        variable.move(best_eta)


def _choose(condition: Tensor, eta: Tensor, other: Tensor) -> Tensor:
    """``eta`` of the streams for which ``condition`` holds, else ``other``."""
    return torch.where(
        condition.reshape(condition.shape + (1,) * (eta.ndim - condition.ndim)),
        eta,
        other,
    )


class _Ascent:
    """Evaluates the objective at the present ``eta`` and remembers the best.

    Streams that share no variable are independent: each has a best of its own.
    """

    def __init__(
        self,
        objective: StreamingObjective,
        variables: list[Coordinate],
        callback: Callback | None = None,
        trust_region: float | None = None,
    ) -> None:
        self.objective, self.variables, self.callback = objective, variables, callback
        self.etas = [v.eta for v in variables]
        self.trust_region = trust_region
        self.tied = [  # logarithms of hyperparameters, and where they were
            (v.eta, v.eta.detach().clone()) for v in variables if v.floor is not None
        ]
        batch = objective.data.y.shape[:-1]
        independent = not objective.coupled and all(
            eta.shape[: len(batch)] == batch for eta in self.etas
        )
        self.batch = batch if independent else torch.Size()
        self.best_etas = [eta.detach().clone() for eta in self.etas]
        self.trace: list[Tensor] = []
        self.best: list[Tensor] = []

    def leash(self) -> Tensor | float:
        r"""Cost of leaving the trust region :math:`\tau`, in nats.

        .. math:: \tfrac12 \sum_i (\log \theta_i / \theta_i^{old})^2 / \tau^2
        """
        if self.trust_region is None:
            return 0.0
        moves = [
            _sum_over((eta - old).square(), len(self.batch)) for eta, old in self.tied
        ]
        return 0.5 * sum(moves) / self.trust_region**2

    def score(self) -> Tensor:
        """What to maximise: of each stream, or the mean of streams that share."""
        total, self.bound = self.objective.total()
        num_sharing = total.numel() // self.batch.numel()
        return (_sum_over(total, len(self.batch)) - self.leash()) / num_sharing

    def loss(self, needs_gradient: bool = True) -> Tensor:
        """Negative score per new datum; leaves its gradient in every ``eta``."""
        raws = [v.to_parameter(v.eta) for v in self.variables]
        with torch.no_grad():
            for variable, raw in zip(self.variables, raws, strict=True):
                variable.parameter.copy_(raw)
                variable.parameter.grad = None
                variable.eta.grad = None
        with torch.set_grad_enabled(needs_gradient):
            score = self.score()
        loss = -score.sum() / self.objective.data.y.size(-1)
        if needs_gradient:
            with breakdowns():
                loss.backward()
            # A noise that no datum has, since theirs are known, has no gradient.
            grads = [v.parameter.grad for v in self.variables]
            used = [i for i, grad in enumerate(grads) if grad is not None]
            torch.autograd.backward([raws[i] for i in used], [grads[i] for i in used])
        self._remember(score.detach())
        return loss.detach()

    def _remember(self, score: Tensor) -> None:
        self.last = score
        previous = self.best[-1] if self.best else torch.full_like(score, -torch.inf)
        better = (score > previous) & torch.isfinite(score)
        for best, eta in zip(self.best_etas, self.etas, strict=True):
            best.copy_(_choose(better, eta.detach(), best))
        self.best.append(torch.where(better, score, previous))

    def report(self) -> None:
        """Tell what the bound is after a step."""
        bound = self.bound.detach()
        self.trace.append(bound)
        if self.callback is not None:
            try:
                self.callback(len(self.trace), bound)
            except Breakdown as error:  # of another model, not of this loop
                raise FactorizationError(str(error)) from error

    @torch.no_grad()
    def restore_best(self) -> None:
        """Leave the best iterate in the parameters."""
        for variable, eta in zip(self.variables, self.best_etas, strict=True):
            variable.move(eta)

    def plateau(self, tolerance: float) -> bool:
        """Whether the last steps gained less than ``tolerance`` nats per new datum.

        So they do once a step met NaN, which an optimiser does not forget.
        """
        stop = ~torch.isfinite(self.last).all()
        if len(self.best) > PATIENCE:
            gain = self.best[-1] - self.best[-1 - PATIENCE]
            stop = stop | (gain / self.objective.data.y.size(-1) < tolerance).all()
        return bool(stop)

    def is_finite(self) -> bool:
        """Whether the optimiser is where it could go on from."""
        return bool(torch.stack([torch.isfinite(e).all() for e in self.etas]).all())


def maximize(
    objective: StreamingObjective,
    *,
    num_steps: int,
    lr: float | None,
    optimizer: str,
    learn_hyperparameters: bool,
    learn_inducing_points: bool,
    trust_region: float | None = None,
    tolerance: float = 1e-4,
    progress: bool = False,
    callback: Callback | None = None,
) -> FitResult:
    """Maximise the objective in place and leave it at the best point met.

    Args:
        objective: The bound of one update.
        num_steps: Budget of gradient steps.
        lr: Learning rate, in the units of :func:`coordinates`; by default 0.05 for
            Adam and 1 for L-BFGS.
        optimizer: ``"adam"`` or ``"lbfgs"``.
        learn_hyperparameters: Whether to move hyperparameters.
        learn_inducing_points: Whether to move inducing points.
        trust_region: Width of the region that log-hyperparameters do not leave
            lightly.
        tolerance: Nats per new datum that count as progress.
        progress: Whether to show a progress bar.
        callback: Called with the step and the bound after every step.

    Returns:
        Trace of the bound, steps taken and whether they ended on a plateau.
    """
    variables = (
        coordinates(objective, learn_hyperparameters, learn_inducing_points)
        if num_steps
        else []
    )
    if not variables:
        return FitResult(objective.no_trace(), 0, True)
    bar = _progress_bar(num_steps) if progress else None
    ascent = _Ascent(objective, variables, _chain(callback, bar), trust_region)
    _jump(ascent)
    ascent.best_etas = [eta.detach().clone() for eta in ascent.etas]
    run = {"adam": _adam, "lbfgs": _lbfgs}[optimizer]
    try:
        converged = run(ascent, num_steps, lr or LEARNING_RATES[optimizer], tolerance)
        good = ascent.is_finite() and bool(torch.isfinite(ascent.last).all())
    except Breakdown:
        converged = good = False
    finally:
        if bar is not None:
            bar.close()
    ascent.restore_best()
    status = "ok" if good else "last_iterate"
    if not ascent.trace:
        return FitResult(objective.no_trace(), 0, False, status)
    trace = torch.stack(ascent.trace)
    trace = trace[torch.isfinite(trace).reshape(len(trace), -1).all(-1)]
    return FitResult(trace, len(trace), converged and good, status)


def _adam(ascent: _Ascent, num_steps: int, lr: float, tolerance: float) -> bool:
    optimizer = torch.optim.Adam(ascent.etas, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, num_steps, eta_min=0.1 * lr
    )
    ascent.loss()
    for step in range(1, num_steps + 1):
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for variable in ascent.variables:
                if variable.floor is not None:
                    variable.eta.clamp_(min=variable.floor)
        ascent.loss(needs_gradient=step < num_steps)
        ascent.report()
        if step % CHECK_EVERY == 0 and ascent.plateau(tolerance):
            return True
    return False


def _lbfgs(ascent: _Ascent, num_steps: int, lr: float, _: float) -> bool:
    max_eval = max(num_steps * 5 // 4, 1)
    optimizer = torch.optim.LBFGS(
        ascent.etas,
        lr=lr,
        max_iter=num_steps,
        max_eval=max_eval,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        loss = ascent.loss()
        ascent.report()
        if not ascent.is_finite():  # no more waiting: L-BFGS looks at every loss
            raise Breakdown("L-BFGS went where no number is")
        # From infinity a line search turns back; NaN would lead it astray.
        return torch.where(torch.isfinite(loss), loss, math.inf)

    optimizer.step(closure)
    ascent.last = ascent.best[-1]  # a line search may end with a look too far
    state = optimizer.state[ascent.etas[0]]
    return state["n_iter"] < num_steps and state["func_evals"] < max_eval


def _chain(callback: Callback | None, bar: Any) -> Callback | None:
    if bar is None:
        return callback

    def both(step: int, bound: Tensor) -> None:
        bar.update()
        if callback is not None:
            callback(step, bound)

    return both


def _progress_bar(total: int) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise MissingDependencyError(
            "progress=True needs tqdm. Install it with: pip install 'torch_ssgp[plot]'"
        ) from error
    return tqdm(total=total, desc="update", leave=False)

"""The inner loop: maximise the bound over hyperparameters and inducing points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from torch_ssgp import functional as fn
from torch_ssgp.exceptions import (
    Breakdown,
    FactorizationError,
    MissingDependencyError,
    breakdowns,
)
from torch_ssgp.update.coordinates import Coordinate, coordinates
from torch_ssgp.update.objective import Objective, sum_over
from torch_ssgp.update.options import Callback, UpdateOptions
from torch_ssgp.update.result import Status

LEARNING_RATES = {"adam": 0.1, "lbfgs": 1.0}
CHECK_EVERY = 5  # steps between two looks at the loss: a device waits only there
HOPE = 5.0  # times the last gain: more will not be won by a climb
FAR = 10.0  # nats below its goal, where quasi-Newton steps would not help
PATIENCE = 10  # steps of Adam without progress that make a plateau
SHORTER = (0.2, 0.04)  # learning rates after one that was too large, relative to it
TOLERANCE = 0.05  # nats in total that count as progress
MANY = 100  # variables of which there is no curvature to keep
FIRST = 0.5  # share of the steps after which Adam leaves the rest to quasi-Newton
SHRINK = 0.25  # of a step that lost
FIRST_STEP = 0.1  # of quasi-Newton, in units of the variables
LONGEST = 3.0  # step of quasi-Newton, in units of the variables
WORTH = 0.5  # nats that a Newton step must promise
NEAR = 10.0  # nats: a maximum that promises more is not near
WIDE = 3.0  # units to within which every variable is known
SHORTEST = 1e-4  # of a Newton step that still may win
ENOUGH = 0.1  # share of the tolerance that a Newton step must promise


class Ascended(NamedTuple):
    """What the inner loop did.

    Attributes:
        bound_trace: ``(steps, *batch)``, the bound after every step.
        num_steps: Steps taken.
        converged: Whether they ended on a plateau.
        status: Whether anything went wrong.
        curvature: ``(*batch, k, k)``, inverse Hessian of the loss in nats, where steps
            were of quasi-Newton.
    """

    bound_trace: Tensor
    num_steps: int
    converged: bool
    status: Status = Status.OK
    curvature: Tensor | None = None


class Ascent:
    """Evaluates the objective at the present ``eta`` and remembers the best.

    All variables are one tensor for the optimiser, ``(*batch, k)``: a step then costs
    the same few operations however many they are. Streams that share no variable are
    independent: each has a best of its own.
    """

    def __init__(
        self,
        objective: Objective,
        variables: list[Coordinate],
        callbacks: Sequence[Callback | None] = (),
        trust_region: float | None = None,
    ) -> None:
        self.objective, self.variables = objective, variables
        self.callbacks = [each for each in callbacks if each is not None]
        self.num_data = max(float(objective.num_data.max()), 1.0)
        self.trust_region = trust_region
        self.tied = [  # variables with a logarithm, and where it was
            (i, v.to_log, v.to_log(v.eta).detach().clone())
            for i, v in enumerate(variables)
            if v.to_log is not None
        ]
        batch = objective.batch_shape
        independent = not objective.coupled and all(
            v.eta.shape[: len(batch)] == batch for v in variables
        )
        self.batch = batch if independent else torch.Size()
        self.eta = self._joined([v.eta for v in variables]).requires_grad_()
        self.best_eta = self.eta.detach().clone()
        floors = [-torch.inf if v.floor is None else v.floor for v in variables]
        pairs = zip(variables, floors, strict=True)
        self.floor = self._joined([torch.zeros_like(v.eta) + low for v, low in pairs])
        self.index = {id(v.parameter): i for i, v in enumerate(variables)}
        self.reads = objective.is_readable
        # What the objective itself holds, such as inducing points, is no module's.
        own = [id(objective.z), id(objective.log_rate)]
        self.own = [i for i, v in enumerate(variables) if id(v.parameter) in own]
        self.uses_modules = (
            not self.reads or bool(objective.named_priors) or bool(self.own)
        )
        self.trace: list[Tensor] = []
        self.best: list[Tensor] = []
        self.goal: Tensor | None = None  # score of a climb that went before
        self.window = 0  # where the present search for a plateau began
        self.curvature: Tensor | None = None

    def _joined(self, values: list[Tensor]) -> Tensor:
        """One value for each variable, as one tensor."""
        return torch.cat([v.detach().reshape(*self.batch, -1) for v in values], -1)

    def _apart(self, eta: Tensor) -> list[Tensor]:
        """The inverse: one tensor for each variable."""
        shapes, count = [v.eta.shape for v in self.variables], self.batch.numel()
        parts = eta.split([shape.numel() // count for shape in shapes], -1)
        return [part.reshape(s) for part, s in zip(parts, shapes, strict=True)]

    def leash(self) -> Tensor | float:
        r"""Cost of leaving the trust region :math:`\tau`, in nats.

        .. math:: \tfrac12 \sum_i (\log \theta_i / \theta_i^{old})^2 / \tau^2
        """
        if self.trust_region is None:
            return 0.0
        moves = [
            sum_over((to_log(self.parts[i]) - old).square(), len(self.batch))
            for i, to_log, old in self.tied
        ]
        return 0.5 * sum(moves) / self.trust_region**2

    def score(self) -> Tensor:
        """What to maximise: of each stream, or the mean of streams that share."""
        total, self.bound = self.objective.total(self.value if self.reads else None)
        num_sharing = total.numel() // self.batch.numel()
        return (sum_over(total, len(self.batch)) - self.leash()) / num_sharing

    def value(self, module: Any, name: str) -> Tensor:
        """The present value of a hyperparameter, as part of the graph."""
        i = self.index.get(id(getattr(module, f"raw_{name}")))
        if i is None:
            return getattr(module, name).detach()
        return self.variables[i].to_value(self.parts[i])

    def loss(self, needs_gradient: bool = True) -> Tensor:
        """Negative score per datum; leaves its gradient in ``eta``."""
        self.eta.grad, self.parts = None, self._apart(self.eta)
        raws = self._give_parameters() if self.uses_modules else []
        with torch.set_grad_enabled(needs_gradient):
            score = self.score()
            loss = -score.sum() / self.num_data
        if needs_gradient and loss.requires_grad:
            with breakdowns():
                loss.backward()
        if needs_gradient and raws:
            self.objective.share_gradients([v.parameter for v in self.variables])
            # A noise that no datum has, since theirs are known, has no gradient.
            grads = [v.parameter.grad for v in self.variables]
            used = [i for i, grad in enumerate(grads) if grad is not None]
            torch.autograd.backward([raws[i] for i in used], [grads[i] for i in used])
        self._remember(score.detach())
        return loss.detach()

    def slope(self) -> Tensor:
        """Gradient of the negative score in nats, zero where a floor stops it."""
        assert self.eta.grad is not None
        g = self.eta.grad * self.num_data
        return torch.where((self.eta <= self.floor) & (g > 0), 0, g)

    def _give_parameters(self) -> list[Tensor]:
        """Leave the present point in the modules, and return it with its graph."""
        pairs = zip(self.variables, self.parts, strict=True)
        raws = [variable.to_parameter(part) for variable, part in pairs]
        with torch.no_grad():
            for variable, raw in zip(self.variables, raws, strict=True):
                variable.parameter.copy_(raw)
                variable.parameter.grad = None
        return raws

    def _remember(self, score: Tensor) -> None:
        self.last = score
        previous = self.best[-1] if self.best else torch.full_like(score, -torch.inf)
        better = (score > previous) & torch.isfinite(score)
        now = self.eta.detach()
        self.best_eta = torch.where(better.unsqueeze(-1), now, self.best_eta)
        self.best.append(torch.where(better, score, previous))

    def report(self) -> None:
        """Report the bound after a step."""
        bound = self.bound.detach()
        self.trace.append(bound)
        try:
            for callback in self.callbacks:
                callback(len(self.trace), bound)
        except Breakdown as error:  # of another model, not of this loop
            raise FactorizationError(str(error)) from error

    @torch.no_grad()
    def restore_best(self) -> None:
        """Leave the best iterate in the parameters."""
        parts = self._apart(self.best_eta)
        for variable, eta in zip(self.variables, parts, strict=True):
            variable.parameter.copy_(variable.to_parameter(eta))

    def plateau(self) -> bool:
        """Whether the last steps gained next to nothing.

        This also holds once a step has met NaN, which stays in the optimiser.
        """
        stop = ~torch.isfinite(self.last).all()
        if len(self.best) - self.window > PATIENCE:
            gain = self.best[-1] - self.best[-1 - PATIENCE]
            stop = stop | ((gain < self.tolerance) | self._is_hopeless(gain)).all()
        return bool(stop)

    def _is_hopeless(self, gain: Tensor) -> Tensor:
        """Where gains like the last one would not reach what is known already."""
        if self.goal is None:
            return torch.zeros_like(gain, dtype=torch.bool)
        return self.best[-1] + HOPE * gain < self.goal

    def is_below_its_best(self) -> bool:
        """Whether steps that are too long cause the plateau, not convergence."""
        finite = torch.isfinite(self.last).all()
        return bool(finite & (self.best[-1] - self.last > self.tolerance).any())

    def go_back(self) -> None:
        """Return the optimiser to the best point."""
        self.eta.data.copy_(self.best_eta)

    @property
    def tolerance(self) -> float:
        """Nats that count as progress; classes that share their data share them."""
        return TOLERANCE / self.objective.num_classes

    def is_finite(self) -> bool:
        """Whether the optimiser can continue from where it is."""
        return bool(torch.isfinite(self.eta).all())


def maximize(
    objective: Objective,
    options: UpdateOptions,
    learn_hyperparameters: bool,
    curvature: Tensor | None = None,
    goal: Tensor | None = None,
) -> Ascended:
    """Maximise the objective in place and leave it at the best point met.

    With the ``curvature`` of a maximum that is near, quasi-Newton steps begin at once.
    A climb that will not come near its ``goal`` ``(*batch,)`` is given up.
    """
    num_steps, name = options.num_steps, options.optimizer
    nothing = objective.data.y.new_empty(0, *objective.batch_shape)
    moves = objective.z is not None and objective.z.requires_grad
    variables = coordinates(
        objective, learn_hyperparameters and num_steps > 0, moves and num_steps > 0
    )
    if not variables:
        return Ascended(nothing, 0, True)
    bar = progress_bar("update", num_steps) if options.progress else None
    callbacks = [options.callback, bar and (lambda *_: bar.update())]
    ascent = Ascent(objective, variables, callbacks, options.trust_region)
    if goal is not None:
        num_sharing = goal.numel() // ascent.batch.numel()
        ascent.goal = sum_over(goal, len(ascent.batch)) / num_sharing
    run = {"adam": _adam_and_newton, "lbfgs": _lbfgs}[name]
    H = _fitted(curvature, ascent.eta)
    try:
        if H is not None:
            converged = _newton(ascent, num_steps, H)
        else:
            converged = run(ascent, num_steps, options.lr or LEARNING_RATES[name])
        good = ascent.is_finite() and bool(torch.isfinite(ascent.last).all())
    except Breakdown:
        converged = good = False
    finally:
        if bar is not None:
            bar.close()
    ascent.restore_best()
    status = Status.OK if good else Status.LAST_ITERATE
    if not ascent.trace:
        return Ascended(nothing, 0, False, status)
    trace = torch.stack(ascent.trace)
    trace = trace[torch.isfinite(trace).reshape(len(trace), -1).all(-1)]
    return Ascended(trace, len(trace), converged and good, status, ascent.curvature)


def promise(objective: Objective, curvature: Tensor) -> float:
    r"""Nats that a Newton step would win: :math:`\tfrac12 g^\top H^{-1} g`.

    With the ``curvature`` :math:`H^{-1}` that learning met last; the most that any
    stream would win, infinity if that cannot be told.
    """
    variables = coordinates(objective, True, False)
    ascent = Ascent(objective, variables)
    if not variables or ascent.eta.shape != curvature.shape[:-1]:
        return math.inf if variables else 0.0
    ascent.loss()
    g = ascent.slope()
    nats = 0.5 * (g * fn.matvec(curvature, g)).sum(-1)
    return float(nats.nan_to_num(math.inf).max())


def _fitted(curvature: Tensor | None, eta: Tensor) -> Tensor | None:
    """The curvature of these variables; the last one may be new, or gone: a rate."""
    k = eta.size(-1)
    if curvature is None or curvature.shape[:-2] != eta.shape[:-1]:
        return None
    if abs(k - curvature.size(-1)) > 1:
        return None
    H = torch.eye(k, dtype=eta.dtype, device=eta.device).repeat(*eta.shape[:-1], 1, 1)
    both = min(k, curvature.size(-1))
    H[..., :both, :both] = curvature[..., :both, :both]
    return H


def damped(H: Tensor) -> Tensor:
    r"""An inverse Hessian that knows every variable to within a few units.

    .. math:: (H + I / \tau^2)^{-1}, \quad H^{-1} \text{ given}

    Where the evidence is flat, as in the lengthscale of an input that does not matter,
    a Newton step would go on for ever, and never come back when the input matters.
    """
    eye = torch.eye(H.size(-1), dtype=H.dtype, device=H.device)
    return torch.linalg.solve(H / WIDE**2 + eye, H)


def _adam_and_newton(ascent: Ascent, num_steps: int, lr: float) -> bool:
    """Adam finds the valley, quasi-Newton steps its bottom.

    Where the function changes from one call to the next, or has many variables, Adam
    takes all steps.
    """
    fixed = ascent.objective.round_length is None and ascent.eta.size(-1) <= MANY
    if not fixed:
        return _adam(ascent, num_steps, lr)
    num_first = max(int(FIRST * num_steps), 1)
    _adam(ascent, num_first, lr)
    if ascent.goal is not None and bool((ascent.best[-1] < ascent.goal - FAR).all()):
        return False
    ascent.go_back()
    return _newton(ascent, num_steps - len(ascent.trace))


@torch.no_grad()
def _newton(ascent: Ascent, num_steps: int, H: Tensor | None = None) -> bool:
    r"""BFGS with a dense inverse Hessian for each stream, backtracking one by one.

    With the step :math:`s` and the change of the gradient :math:`y`,

    .. math::
        H^{-1} \leftarrow (I - \rho s y^\top) H^{-1} (I - \rho y s^\top)
            + \rho s s^\top, \quad \rho = 1 / s^\top y.
    """
    eta, k = ascent.eta, ascent.eta.size(-1)
    eye = torch.eye(k, dtype=eta.dtype, device=eta.device).expand(*eta.shape, k)
    with torch.enable_grad():
        ascent.loss()
    g, value, start = ascent.slope(), ascent.last, eta.detach().clone()
    stuck = ~torch.isfinite(g).all(-1)  # no direction to go
    g = torch.where(stuck.unsqueeze(-1), 0, g)
    # The first step is one tenth in units of the variables, or a Newton step of one.
    size = g.abs().amax(-1).clamp_min(1.0)
    near, cold = stuck & False, eye * (FIRST_STEP / size)[..., None, None]
    ended = stuck
    if H is not None:  # of a maximum that is near, stream by stream
        near = 0.5 * (g * fn.matvec(H, g)).sum(-1) < NEAR
    H = cold if H is None else torch.where(near[..., None, None], H, cold)
    num_before, is_first = torch.where(near, 0, k), ~stuck & ~near
    length = torch.where(stuck, 0.0, 1.0).to(value)
    step, converged, won = 0, bool(stuck.all()), torch.full_like(value, math.inf)
    while step < num_steps and not converged:
        step += 1
        p = -fn.matvec(torch.where(near[..., None, None], damped(H), H), g)
        gain = -(g * p).sum(-1) / 2
        if step % CHECK_EVERY == 0:
            small = (gain < ENOUGH * ascent.tolerance) & (won < ascent.tolerance)
            done = (length < SHORTEST) | (small & (step > num_before))
            ended = ended | done  # and stays, whatever the other streams do
            length = length.where(~ended, 0)
            if bool(ended.all()):
                converged = True
                break
        p = p * (LONGEST / p.abs().amax(-1, keepdim=True)).clamp_max(1)
        eta.copy_((start + length.unsqueeze(-1) * p).maximum(ascent.floor))
        with torch.enable_grad():
            ascent.loss()
        ascent.report()
        new, moved = ascent.slope(), eta - start
        better = ascent.last >= value - 1e-12 * value.abs()
        better = better & torch.isfinite(new).all(-1)
        y = new - g
        curve = (moved * y).sum(-1)
        H = _updated(H, moved, y, curve, better & (curve > 1e-12), is_first)
        is_first = is_first & ~(better & (curve > 1e-12))
        start = torch.where(better.unsqueeze(-1), eta, start)
        g = torch.where(better.unsqueeze(-1), new, g)
        won = torch.where(better, ascent.last - value, won)
        value = torch.where(better, ascent.last, value)
        length = torch.where(better & ~ended, 1.0, SHRINK * length)
    eta.copy_(start)
    ascent.last = ascent.best[-1].where(~stuck, torch.nan)
    ascent.curvature = damped(H)
    return converged


def _updated(
    H: Tensor, s: Tensor, y: Tensor, curve: Tensor, where: Tensor, is_first: Tensor
) -> Tensor:
    """The next inverse Hessian where the last step allows for one."""
    rho = torch.where(where, 1 / torch.where(where, curve, 1), 0)[..., None, None]
    # Before the first update the unknown scale is that of the first step.
    scale = (curve / fn.squared_norm(y).clamp_min(1e-300))[..., None, None]
    eye = torch.eye(s.size(-1), dtype=s.dtype, device=s.device)
    H = torch.where((where & is_first)[..., None, None], scale * eye, H)
    s, y = s.unsqueeze(-1), y.unsqueeze(-1)
    left = eye - rho * s @ y.mT
    return torch.where(where[..., None, None], left @ H @ left.mT + rho * s @ s.mT, H)


def _adam(ascent: Ascent, num_steps: int, lr: float) -> bool:
    """Adam; where steps were too long to gain anything, it retries shorter ones."""
    step = 0
    for rate in (lr, *(lr * factor for factor in SHORTER)):
        optimizer, first, length = Adam(ascent.eta), step, num_steps - step
        ascent.window = len(ascent.best)
        ascent.loss()
        while step < num_steps:
            # Cosine annealing, down to a tenth of the rate.
            annealed = (1 + math.cos(math.pi * (step - first) / length)) / 2
            optimizer.step(rate * (0.1 + 0.9 * annealed))
            step += 1
            with torch.no_grad():
                ascent.eta.clamp_(min=ascent.floor)
            ascent.loss(needs_gradient=step < num_steps)
            ascent.report()
            if step % CHECK_EVERY == 0 and ascent.plateau():
                break
        else:
            return False
        if step == num_steps or not ascent.is_below_its_best():
            return True
        ascent.go_back()
    return True


class Adam:
    """PyTorch's Adam as a function: its class imports a compiler first, for seconds."""

    def __init__(self, eta: Tensor) -> None:
        self.eta = eta
        self.mean, self.square = torch.zeros_like(eta), torch.zeros_like(eta)
        self.count = torch.zeros((), dtype=torch.float32)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step along the gradient."""
        if self.eta.grad is None:
            return
        adam(
            [self.eta],
            [self.eta.grad],
            [self.mean],
            [self.square],
            [],
            [self.count],
            fused=self.eta.is_cpu,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=lr,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )


def _lbfgs(ascent: Ascent, num_steps: int, lr: float) -> bool:
    """L-BFGS needs a fixed function: where it changes, L-BFGS runs in rounds."""

    def closure() -> Tensor:
        loss = ascent.loss()
        ascent.report()
        if not ascent.is_finite():  # no more waiting: L-BFGS looks at every loss
            raise Breakdown("L-BFGS left the finite numbers")
        # From infinity a line search turns back; NaN would lead it astray.
        return torch.where(torch.isfinite(loss), loss, math.inf)

    length = ascent.objective.round_length or num_steps
    for num_left in range(num_steps, 0, -length):
        num_iterations = min(length, num_left)
        max_eval = max(num_iterations * 5 // 4, 1)
        ascent.objective.new_round()
        num_before = len(ascent.trace)
        optimizer = torch.optim.LBFGS(
            [ascent.eta],
            lr=lr,
            max_iter=num_iterations,
            max_eval=max_eval,
            tolerance_change=1e-9,
            line_search_fn="strong_wolfe",
        )
        optimizer.step(closure)
        ascent.last = ascent.best[-1]  # a line search may end with a look too far
        state = optimizer.state[ascent.eta]
        if ascent.objective.round_length is None:
            return state["n_iter"] < num_iterations and state["func_evals"] < max_eval
        gain = (ascent.trace[-1] - ascent.trace[num_before]).sum()
        if bool(gain < ascent.tolerance):
            return True
        ascent.go_back()
    return False


def progress_bar(what: str, total: int | None = None, over: Any = None) -> Any:
    """A bar of ``total`` steps, or over an iterable. Needs tqdm."""
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise MissingDependencyError(
            "progress=True needs tqdm. Install it with: pip install 'torch_ssgp[plot]'"
        ) from error
    return tqdm(over, desc=what, total=total, leave=over is not None)

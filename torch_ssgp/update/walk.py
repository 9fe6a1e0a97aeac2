"""One update, step by step: remember, learn, summarise, compress."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from torch_ssgp import functional as fn
from torch_ssgp import likelihoods
from torch_ssgp.buffers import stored
from torch_ssgp.compression import choose_points, is_full
from torch_ssgp.exceptions import Breakdown, breakdowns
from torch_ssgp.memory import (
    Data,
    GaussianData,
    Rows,
    buffers,
    extremes,
    no_raw_data,
    remember,
)
from torch_ssgp.modules import same_points
from torch_ssgp.update import paying
from torch_ssgp.update.apart import Base
from torch_ssgp.update.appending import append
from torch_ssgp.update.ascent import Ascended, maximize
from torch_ssgp.update.choosing import Choice, precision
from torch_ssgp.update.flattening import flattened
from torch_ssgp.update.forgetting import Judged
from torch_ssgp.update.making import make_objective
from torch_ssgp.update.objective import Objective, Prior, with_enough_jitter
from torch_ssgp.update.options import UpdateOptions
from torch_ssgp.update.paying import Unsuited
from torch_ssgp.update.result import Status
from torch_ssgp.update.starts import take_better
from torch_ssgp.update.state import Known, Learned, Limits, check_finite, recall


class Update:
    """One update, step by step."""

    def __init__(
        self,
        known: Known,
        data: Data,
        options: UpdateOptions,
        limits: Limits,
        judged: Judged | None = None,
        must_learn: bool = False,
        points: Tensor | None = None,
    ) -> None:
        self.known, self.new, self.limits = known, data, limits
        self.judged = judged or Judged.of(known, data, options, limits)
        self.asked = self.options = options
        self.points = Choice(known.summary, limits, data.y.size(-1))
        self.first_points = options.inducing_points if points is None else points
        self.must_learn, self.pending, self.begins = must_learn, 0, False
        self.remember()

    def remember(self) -> None:
        """What is known, with the new data."""
        known, data = self.known, self.new
        self.past, raw = recall(
            known,
            data,
            self.limits.shared_noise,
            self.judged.power,
            self.pending,
            self.judged.clock,
        )
        self.num_raw = raw.y.size(-1)
        recalled = (known, self.past.past, self.num_raw)
        self.base = Base.recall(*recalled, self.judged.power, self.limits.shared_noise)
        self.data = remember(raw, data) if data.y.size(-1) else raw
        self.extremes = extremes(known.memory.extremes.to(data.y), data)
        num_data = self.past.past.n + self.data.num_data
        self.num_data = float(num_data.max())
        count = data.num_data
        self.num_new = float(count.max()) if isinstance(count, Tensor) else count
        self.since_start = float(known.memory.since_start) + self.num_new
        self.since_learning = float(known.memory.since_learning) + self.num_new
        self.growth = min(self.since_learning / max(self.num_data, 1), 1.0)
        self.waits = not self.pays()
        num_steps, moves = self.options.num_steps, self.options.learn_inducing_points
        if self.waits:
            num_steps = 0
        num_updates = int(known.summary.num_updates)
        self.learns = num_steps > 0 and self.options.learns_at(num_updates)
        if moves is None:
            moves, num_steps = self.learns, num_steps if self.learns else 0
        self.options = replace(
            self.options, num_steps=num_steps, learn_inducing_points=moves
        )

    @property
    def arguments(self) -> tuple[Known, Data, UpdateOptions, Limits]:
        """What it was asked to do."""
        return self.known, self.new, self.asked, self.limits

    def restart(self) -> Update:
        """Begin anew with the data since the doubt, hyperparameters included."""
        self.begins = True
        self.remember()
        return self

    def num_pending(self, judged: Judged) -> int:
        """Raw data of the memory that came since the doubt, without the new ones."""
        return min(int(judged.doubted) - self.new.y.size(-1), self.num_raw)

    def pays(self) -> bool:
        """Whether the inner loop is to run, where the model decides."""
        return (
            not self.options.learns_when_due
            or self.must_learn
            or self.is_first
            or self.growth >= 2 * paying.GROWTH
            # In doubt more witnesses are awaited, but not for ever.
            or (self.growth >= paying.GROWTH and not self.judged.is_doubtful)
            or bool(self.judged.is_surprising.any())
        )

    def run(self) -> Learned:
        """All steps; see the top of this file."""
        old, judged = self.known.memory, self.judged
        try:
            learned = self.append() or self.learn()
        except Unsuited:
            return Update(*self.arguments, judged, True, self.first_points).run()
        # A past that faded is young again, and so is what was learned from it.
        started_at = old.started_at.clamp_max(self.num_data)
        since_start = self.since_start
        if self.is_due() or (self.is_first and self.learns and not self.is_one_class):
            started_at = torch.full_like(started_at, self.num_telling())
            since_start = 0
        memory = {
            **learned.memory,
            "extremes": stored(self.extremes),
            "started_at": started_at,
            "since_start": torch.full_like(started_at, since_start),
            "since_learning": torch.full_like(
                started_at, 0 if self.learns else self.since_learning
            ),
            "loss": stored(learned.to_win if self.learns else old.loss),
            "lost": stored(learned.loss),
            "doubt": stored(judged.doubt),
            "doubted": torch.full_like(started_at, judged.doubted),
            "waiting": torch.full_like(started_at, judged.waiting),
            **judged.drift.buffers(),
        }
        power = torch.as_tensor(judged.power, dtype=learned.bound.dtype)
        if judged.clock is not None:
            power = (self.num_data - self.num_new) / old.num_data
        forgot = power.to(learned.bound.device).expand(learned.bound.shape)
        flat = torch.zeros_like(forgot, dtype=torch.bool)
        if self.learns and not self.is_first:
            surprising = judged.is_surprising
            flat = flattened(self.known, learned.prior, self.extremes, surprising)
        return learned._replace(
            memory=memory,
            forgot=forgot,
            surprise=judged.surprise,
            flattened=flat & (forgot == 1),
            learned=self.options.num_steps > 0 and not self.is_one_class,
        )

    def to_win(
        self, loss: Tensor, misfit: Tensor, count: Tensor, converged: bool
    ) -> Tensor:
        """What more learning would gain; :class:`Unsuited` if it has to.

        Noise and scale do not count where steps ran out, or where more witnesses are
        awaited.
        """
        settled = converged if self.learns else not self.judged.is_doubtful
        is_scaled = self.limits.shared_noise and settled
        nats = paying.to_win(loss, misfit, count, self.num_data, is_scaled)
        if self.waits:
            paying.check_suits(nats, self.known.memory.loss)
        return nats

    def append(self) -> Learned | None:
        """Add rows to the posterior of before, if that is all there is to do."""
        summary, limits, options = self.known.summary, self.limits, self.options
        num_new = self.new.y.size(-1)
        if (
            summary.is_empty
            or num_new == 0
            or options.num_steps
            or self.judged.clock is not None
            or isinstance(self.judged.power, Tensor)
            or self.judged.power != 1
            or limits.alpha
            or bool(summary.shared_noise) != limits.shared_noise
            or limits.team is not None
            or (self.base is not None and not self.is_finer)
        ):
            return None
        z, policy = options.inducing_points, limits.policy
        if z is not None and not torch.equal(z, summary.inducing_points.to(z)):
            return None
        objective = self.objective()
        if objective.revises or (self.is_finer and self.compresses(objective)):
            return None
        wants_points = policy.wants_points if z is None else None
        added = append(
            summary,
            objective,
            num_new,
            wants_points,
            limits.num_inducing,
            # Of a memory that is not finer, what was lost before is part of the rows.
            self.known.memory.lost if self.is_finer else None,
            self.judged.recalled,
        )
        if added is None:
            return None
        loss = added.loss
        to_win = self.to_win(loss, added.misfit, added.past.n, converged=True)
        rows, raw = Rows(objective.z_a, objective.past), objective.data
        noise = None if limits.shared_noise else objective.noises()[0]
        sites = GaussianData(raw.y, noise, torch.zeros_like(added.loss))
        sites = sites._replace(noise=objective.remembered_noise(sites))
        if not self.is_finer:
            rows = Rows(summary.inducing_points, added.past)
            raw, sites = no_raw_data(raw)
        return Learned.of(
            prior=objective.modules_of_prior,
            summary={
                **dict(summary.named_buffers()),
                "U": stored(added.past.U),
                "g": stored(added.past.g),
                "residual": stored(added.past.rho),
                "num_data": stored(added.past.n),
                "noise_scale": stored(added.s),
                "num_updates": summary.num_updates + 1,
            },
            memory=buffers(rows, raw, sites, limits.shared_noise),
            bound=added.bound,
            loss=loss,
            to_win=to_win,
            num_kept=torch.full_like(loss, summary.num_inducing, dtype=torch.long),
            ascended=Ascended(loss.new_empty(0, *loss.shape), 0, True),
        )

    def learn(self) -> Learned:
        """Choose points, climb from every start, and keep the best."""
        start = self.fresh_objective if self.is_first else self.objective
        starts, is_due = [(start, self.is_first)], self.is_due()
        if is_due:
            starts.append((self.fresh_objective, True))
        attempts: list[tuple[Objective, Ascended] | None] = []
        for make, fresh in starts:
            try:
                attempts.append(self.attempt(make(), fresh=fresh))
            except Breakdown:
                if len(attempts) + 1 == len(starts) and not any(attempts):
                    raise
                attempts.append(None)
        first, second = (*attempts, None)[:2]
        batch = self.new.y.shape[:-1]
        restarted = torch.full(batch, first is None, device=self.new.y.device)
        if first and second:
            restarted = take_better(first[0], second[0])
        objective, ascended = second if second and bool(restarted.all()) else first  # type: ignore[misc]
        return self.finish(objective, ascended)._replace(restarted=restarted)

    # -- starts -----------------------------------------------------------------------

    def objective(self) -> Objective:
        """The bound, on working copies of the modules."""
        prior = self.known.frozen
        if self.options.num_steps:
            prior = self.working_copy()
        objective = self.objective_on(prior, self.data)
        objective.recall_sites(self.known.memory, self.num_raw)
        return objective

    def working_copy(self) -> Prior:
        """Modules that may learn, as they are in the model."""
        modules = self.known.prior
        return Prior(*(deepcopy(m).to(self.new.y.dtype) for m in modules))

    def objective_on(self, prior: Prior, data: Data) -> Objective:
        """The bound on the rows of the memory and these data."""
        z_a, past = self.past
        return make_objective(
            prior,
            data,
            z_a,
            past,
            shared_noise=self.limits.shared_noise,
            alpha=self.limits.alpha,
            jitter=self.limits.jitter,
            team=self.limits.team,
        )

    @property
    def is_first(self) -> bool:
        """Whether hyperparameters were never learned."""
        return float(self.known.memory.started_at) == 0

    @property
    def is_one_class(self) -> bool:
        """Whether data are labels that all agree: any constant explains them.

        A kernel learned from them would be one, and could not tell classes that come
        later apart.
        """
        if not (self.is_first and self.takes_labels):
            return False
        low, high = self.extremes.unbind(-1)
        return bool((low >= high).all())

    @property
    def takes_labels(self) -> bool:
        """Whether data are labels."""
        return likelihoods.takes_labels(self.known.prior.likelihood)

    def num_telling(self) -> float:
        """Data behind a start; of labels no more than those of the rarer class.

        The first few of a second class say little: the next start comes soon.
        """
        before = self.known.memory.extremes.to(self.extremes)
        if not (self.is_first and before.numel() and self.takes_labels):
            return self.num_data
        others, seen = self.new.y != before[..., :1], self.new.seen
        others = others if seen is None else others & seen
        return min(2 * int(others.sum()), self.num_data)

    def is_due(self) -> bool:
        """Whether a fresh start is: as many data came since the last one as it had."""
        return (
            self.learns
            and self.options.restart
            and self.options.trust_region is None
            and not self.is_first
            and (self.begins or self.since_start >= float(self.known.memory.started_at))
        )

    def fresh_objective(self) -> Objective:
        """The bound, at the hyperparameters of a new model; what is frozen stays."""
        objective = self.objective()
        parameters = objective.modules_of_prior.parameters()
        with torch.no_grad():
            for parameter, value in zip(parameters, self.known.start, strict=True):
                if parameter.requires_grad:
                    parameter.copy_(value)
        return objective

    def attempt(
        self, objective: Objective, *, fresh: bool
    ) -> tuple[Objective, Ascended]:
        """Choose points, then the inner loop, from where the objective is."""
        options = self.options
        if fresh and self.learns:
            objective.initialize()
        if fresh and not self.is_first:  # the callback has seen one loop
            options = replace(options, callback=None, progress=False)
        with torch.no_grad():
            z = options.inducing_points if fresh else self.first_points
            if z is None:
                anew = options.num_steps > 0 or self.judged.clock is not None
                z = self.points.choose(objective, anew=anew)
            self.first_points = z
        moves = bool(options.learn_inducing_points) and options.num_steps > 0
        if self.is_one_class:
            objective.start_at(z)
            nothing = objective.data.y.new_empty(0, *objective.batch_shape)
            return objective, Ascended(nothing, 0, True)
        objective.start_at(z, learn=moves)
        if options.num_steps:
            with_enough_jitter(objective, objective.check_finite)
        # Where it is asked for, or a fresh start is due, learning is thorough.
        growth = 1.0 if not options.learns_when_due or self.is_due() else self.growth
        return objective, maximize(objective, options, self.learns, growth)

    # -- what is kept -----------------------------------------------------------------

    @torch.no_grad()
    def finish(self, objective: Objective, ascended: Ascended) -> Learned:
        """Summary and memory at the hyperparameters learned."""
        learned = with_enough_jitter(objective, lambda: self.store(objective, ascended))
        if objective.jitter > self.limits.jitter:
            raised = torch.full_like(self.known.summary.jitter, objective.jitter)
            summary = {**learned.summary, "jitter": raised}
            return learned._replace(summary=summary, status=Status.JITTER)
        return learned

    @breakdowns()
    def store(self, objective: Objective, ascended: Ascended) -> Learned:
        """The next buffers; nothing of the model changes yet."""
        if self.options.num_steps:
            for parameter in objective.modules_of_prior.parameters():
                # As the model will store it, before anything is made with it.
                parameter.copy_(parameter.to(self.limits.dtype))
        if objective.z.requires_grad:
            # Where they came to rest, points may coincide.
            objective.start_at(objective.z.detach())
        prior = objective.final_prior(objective.z.detach())
        data = objective.as_gaussian(prior)
        rows, s = objective.project(prior, data)
        if self.options.inducing_points is None and self.points.revise(
            objective, rows.loss / (2 * s)
        ):
            prior = objective.final_prior(objective.z.detach())
            data = objective.as_gaussian(prior)
            rows, s = objective.project(prior, data)
        loss = rows.loss / (2 * s)
        rows = fn.compress(rows)
        bound, misfit = fn.fit(rows, s)
        past = fn.absorb(rows, prior.m_b)
        check_finite(bound, *past)
        to_win = self.to_win(loss, misfit, past.n, ascended.converged)
        memory_loss = torch.zeros_like(loss)
        kept, raw = Rows(objective.z_a, objective.past), objective.data
        sites = data._replace(noise=objective.remembered_noise(data))
        base = self.base
        if self.compresses(objective):
            frozen = objective.as_frozen(prior, data)
            kept = Rows(objective.z.detach(), past)
            if self.is_finer or frozen is not data or base is not None:
                kept, base, lost = self.compress(objective, frozen)
                memory_loss = lost if self.is_finer else memory_loss
            raw, sites = no_raw_data(raw)
        shared_noise = self.limits.shared_noise
        old = self.points.points_of_before(objective.data.x)
        return Learned.of(
            prior=objective.modules_of_prior,
            summary={
                "inducing_points": stored(objective.z),
                "U": stored(past.U),
                "g": stored(past.g),
                "residual": stored(past.rho),
                "num_data": stored(past.n),
                "prior_mean": stored(prior.m_b),
                "prior_cholesky": stored(rows.L),
                "noise_scale": stored(s),
                "shared_noise": torch.tensor(shared_noise, device=bound.device),
                "num_updates": self.known.summary.num_updates + 1,
                "jitter": self.known.summary.jitter,
            },
            memory={
                **buffers(kept, raw, sites, shared_noise),
                **({} if base is None else base.buffers()),
            },
            bound=bound,
            loss=loss,
            to_win=to_win,
            loss_before=objective.loss_before,
            memory_loss=memory_loss,
            num_kept=same_points(objective.z.detach(), old).any(-1).sum(-1),
            ascended=ascended,
            settled=objective.settled,
        )

    @property
    def is_finer(self) -> bool:
        """Whether the memory may have more points than the model, or is the model's."""
        return self.limits.memory_size > self.limits.num_inducing

    def compresses(self, objective: Objective) -> bool:
        """Whether the memory is over its capacity, or is to be the summary."""
        num_points = objective.z_a.size(-2) + objective.data.x.size(-2)
        size, num_rows = self.limits.memory_size, objective.past.g.size(-1)
        if not self.is_finer or num_rows > 2 * size or num_points > 2 * size:
            return True
        # What may be of a new beginning must not become one with the past.
        return is_full(num_points, size) and not self.judged.is_doubtful

    def compress(
        self, objective: Objective, data: GaussianData
    ) -> tuple[Rows, Base | None, Tensor]:
        """Rows at the points that the memory goes on with, and the nats they lose.

        It contains inducing points that do not learn: as long as these stay, updates
        equal batch inference.
        """
        z = objective.z.detach()
        if self.options.learn_inducing_points and self.options.num_steps:
            z = z[..., :0, :]
        points, fixed = z, z.size(-2)
        if not self.is_finer:
            points, fixed = objective.z.detach(), objective.z.size(-2)
        # Power-EP projects diagonally, once: more points in between would change it.
        elif not (fixed and self.limits.alpha):
            known, x = Rows(objective.z_a, objective.past), objective.data.x
            size, jitter = self.limits.memory_size, objective.jitter
            points = choose_points(known, x, precision(objective), size, jitter, z)
            points = objective.agree(points)
        prior = objective.final_prior(points, num_inducing=fixed)
        rows, s = objective.project(prior, data)
        kept, base = Rows(points, fn.absorb(fn.compress(rows), prior.m_b)), self.base
        if base is not None:
            kept, base = base.compress(objective, points, prior, data)
        check_finite(*kept.past)
        return kept, base, rows.loss / (2 * s)

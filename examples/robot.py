"""The dynamics of an arm, learned at 500 Hz while it moves.

A controller asks, before each step: which torques does the motion I want need? Two
models answer, one for each joint, from angles, velocities and accelerations. Then they
``observe`` the torques that were measured, in closed form. Another thread calls
``learn()``, for hyperparameters and compression. The same path is then learned without
a clock, by ``update``, which does everything at once.

Run ``python examples/robot.py``: it prints how long steps took and how far torques were
off, and saves out/robot.png. ``--seconds 60`` makes the path longer. Where other
programs keep all cores busy, deadlines are missed; processor time tells what a step
itself takes.
"""

from __future__ import annotations

import argparse
import gc
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

try:
    from matplotlib import pyplot
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(
        f"{__doc__}\n{error}. Install it: pip install -e '.[plot]'"
    ) from None

from torch_ssgp import StreamingGP, UpdateOptions

NOISE = 0.3  # Nm
WAVES = 5  # of each joint
WARM_UP = 1.0  # seconds of the path that are known before the clock starts
PAUSE = 0.02  # seconds that the learner rests
JOINTS = ("shoulder", "elbow")
# Short calls, so that the memory does not fill up meanwhile; the next call goes on.
LEARN = UpdateOptions(budget=20)


class Motion(NamedTuple):
    """An arm on its path.

    Attributes:
        x: ``(n, 6)``, angles, velocities and accelerations of both joints.
        torque: ``(n, 2)``, what the motion takes, in Nm.
        measured: ``(n, 2)``, the same with noise.
    """

    x: Tensor
    torque: Tensor
    measured: Tensor

    def part(self, some: slice) -> Motion:
        """Some moments of it."""
        return Motion(*(value[some] for value in self))


def make_motion(seconds: float, rate: float) -> Motion:
    """Slow waves of both joints, and the torques that they take.

    Links have 1 kg and 1 m, their masses are at their middles, gravity pulls down.
    """
    generator = torch.Generator().manual_seed(0)

    def uniform() -> Tensor:
        return torch.rand(2, WAVES, generator=generator, dtype=torch.float64)

    t = torch.arange(round(seconds * rate), dtype=torch.float64) / rate
    omega = 2 * math.pi * (0.05 + 0.45 * uniform())  # (2, 5), 0.05 to 0.5 Hz
    size, phase = uniform(), 2 * math.pi * uniform()
    angle = t[:, None, None] * omega + phase  # (n, 2, 5)
    q = (size * angle.sin()).sum(-1)
    v = (size * omega * angle.cos()).sum(-1)
    a = (-size * omega.square() * angle.sin()).sum(-1)
    torque = torques(q, v, a)
    noise = torch.randn(torque.shape, generator=generator, dtype=torch.float64)
    return Motion(torch.cat([q, v, a], -1), torque, torque + NOISE * noise)


def torques(q: Tensor, v: Tensor, a: Tensor) -> Tensor:
    """M(q) a + c(q, v) + g(q), ``(n, 2)``."""
    cos, sin = q[:, 1].cos(), q[:, 1].sin()
    coupled = 1 / 3 + cos / 2
    shoulder = (5 / 3 + cos) * a[:, 0] + coupled * a[:, 1]
    elbow = coupled * a[:, 0] + a[:, 1] / 3
    shoulder -= sin * (v[:, 0] * v[:, 1] + v[:, 1].square() / 2)
    elbow += sin * v[:, 0].square() / 2
    weight = 9.81 / 2 * (q[:, 0] + q[:, 1]).cos()  # of the lower link
    shoulder += 9.81 * 1.5 * q[:, 0].cos() + weight
    return torch.stack([shoulder, elbow + weight], -1)


# -- learning -------------------------------------------------------------------------


def make_models(known: Motion, num_inducing: int) -> list[StreamingGP]:
    """One for each joint, that has learned some moments of what is known.

    The first data of a model cost more than later ones, because it averages over
    hyperparameters. So they come before the clock starts.
    """
    some = known.part(slice(None, None, max(len(known.x) // 150, 1)))
    models = []
    for joint in range(2):
        model = StreamingGP(
            ScaleKernel(RBFKernel(ard_num_dims=6)),
            num_inducing=num_inducing,
            # Room for what comes while the other thread learns.
            memory_size=4 * num_inducing,
        ).double()
        for x, y in zip(some.x.split(20), some.measured.split(20), strict=True):
            model.update(x, y[:, joint])
        models.append(model)
    return models


class Track(NamedTuple):
    """What was predicted, and how long it took, a value for every step.

    Attributes:
        torque: ``(n, 2)``, predicted before it was measured.
        seconds: ``(n,)``, for predicting and observing, both joints, by the clock.
        work: ``(n,)``, the same in processor time of this thread.
        late: ``(n,)``, whether the next step was due before this one was done.
        num_learned: How often hyperparameters were learned.
    """

    torque: Tensor
    seconds: Tensor
    work: Tensor
    late: Tensor
    num_learned: int


def keep_learning(models: list[StreamingGP], done: threading.Event) -> int:
    """Learn what is due, until it is done; how often that was."""
    count = 0
    while not done.wait(PAUSE):
        count += sum(model.learn(LEARN).learned for model in models)
    return count


def step(models: list[StreamingGP], x: Tensor, measured: Tensor) -> Tensor:
    """The torques of a motion ``(1, 6)`` before they are measured, ``(1, 2)``."""
    torque = torch.stack([model(x).mean for model in models], -1)
    for model, y in zip(models, measured.unbind(-1), strict=True):
        model.observe(x, y)
    return torque


def by_the_clock(models: list[StreamingGP], motion: Motion, rate: float) -> Track:
    """Control the arm: steps come at their time, whether the last is done or not."""
    done, period, values = threading.Event(), 1 / rate, []
    gc.collect()
    gc.freeze()  # the garbage collector need not look at all of torch again
    with ThreadPoolExecutor(1) as pool:
        learner = pool.submit(keep_learning, models, done)
        try:
            due = time.perf_counter()
            for x, y in zip(motion.x.split(1), motion.measured.split(1), strict=True):
                due += period
                time.sleep(max(due - time.perf_counter(), 0))
                start, started = time.perf_counter(), time.thread_time()
                torque = step(models, x, y)
                end, work = time.perf_counter(), time.thread_time() - started
                values.append((torque[0], end - start, work, end > due + period))
        finally:
            done.set()
            gc.unfreeze()
    torque, *others = zip(*values, strict=True)
    return Track(
        torch.stack(torque), *(torch.tensor(each) for each in others), learner.result()
    )


def at_every_update(models: list[StreamingGP], motion: Motion) -> Tensor:
    """Torques predicted by models that learn whenever it is due; the clock waits."""
    torque = []
    data = zip(motion.x.split(1), motion.measured.split(1), strict=True)
    for x, measured in tqdm(data, total=len(motion.x), unit="step"):
        torque.append(torch.stack([model(x).mean for model in models], -1))
        for model, y in zip(models, measured.unbind(-1), strict=True):
            model.update(x, y)
    return torch.cat(torque)


def main(
    seconds: float = 6,
    rate: float = 500,
    num_inducing: int = 100,
    out: str | Path = "out",
) -> tuple[Motion, Track, Tensor]:
    """Learn the dynamics by the clock, and at every update.

    Args:
        seconds: Length of the path by the clock.
        rate: Steps per second.
        num_inducing: Inducing points of each joint.
        out: Folder for the figure.

    Returns:
        The motion, what was made of it by the clock, and ``(n, 2)`` torques predicted
        without.
    """
    torch.set_num_threads(1)  # more threads only make matrices of this size late
    motion = make_motion(WARM_UP + seconds, rate)
    known = motion.part(slice(round(WARM_UP * rate)))
    motion = motion.part(slice(len(known.x), None))
    track = by_the_clock(make_models(known, num_inducing), motion, rate)
    reference = at_every_update(make_models(known, num_inducing), motion)
    print_table(motion, track, reference, rate)
    path = Path(out) / "robot.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(motion, track, reference, rate, path)
    print(f"figure: {path}")
    return motion, track, reference


# -- what came out --------------------------------------------------------------------


def error_of(torque: Tensor, motion: Motion) -> Tensor:
    """RMSE against torques without noise, in their standard deviations, ``(2,)``."""
    return (torque - motion.torque).square().mean(0).sqrt() / motion.torque.std(0)


def print_table(motion: Motion, track: Track, reference: Tensor, rate: float) -> None:
    """Times and errors."""
    print(
        f"{len(motion.x)} steps at {rate:g} Hz, {1000 / rate:g} ms each; "
        f"hyperparameters learned {track.num_learned} times"
    )
    print(f"{'ms per step':>24}{'median':>9}{'99 %':>9}{'max':>9}")
    named = {"by the clock": track.seconds, "processor time": track.work}
    for name, values in named.items():
        some = values.quantile(torch.tensor([0.5, 0.99, 1.0], dtype=values.dtype))
        print(f"{name:>24}" + "".join(f"{1000 * v:9.2f}" for v in some.tolist()))
    print(f"deadlines missed: {int(track.late.sum())}")
    print(f"{'error / std of torque':>24}" + "".join(f"{name:>10}" for name in JOINTS))
    named = {"observe, and a thread": track.torque, "update": reference}
    errors = {name: error_of(torque, motion) for name, torque in named.items()}
    errors["ratio"] = errors["observe, and a thread"] / errors["update"]
    for name, error in errors.items():
        print(f"{name:>24}" + "".join(f"{e:10.4f}" for e in error))


def draw(
    motion: Motion, track: Track, reference: Tensor, rate: float, path: Path
) -> None:
    """Torques at the end, errors along the path, and how long steps took."""
    figure, panels = pyplot.subplot_mosaic(
        [["0", "0"], ["1", "1"], ["error", "time"]], figsize=(11, 8)
    )
    panels["0"].sharex(panels["1"])
    panels["0"].tick_params(labelbottom=False)
    t = WARM_UP + torch.arange(len(motion.x), dtype=torch.float64) / rate
    last = slice(-round(4 * rate), None)
    for k, name in enumerate(JOINTS):
        ax = panels[str(k)]
        ax.plot(t[last], motion.measured[last, k], ".", color="0.7", ms=2)
        ax.plot(t[last], motion.torque[last, k], "k--", lw=1.5, label="true")
        ax.plot(t[last], track.torque[last, k], color="tab:blue", label="predicted")
        ax.set_ylabel(f"{name} (Nm)")
    panels["0"].plot([], [], ".", color="0.7", label="measured")
    panels["0"].legend(loc="best", fontsize=8, ncols=3)
    panels["1"].set_xlabel("seconds")

    ax, num = panels["error"], max(round(rate / 4), 1)  # a quarter of a second
    named = {"observe, and a thread that learns": track.torque, "update": reference}
    for (name, torque), style in zip(named.items(), ("-", "--"), strict=True):
        error = ((torque - motion.torque) / motion.torque.std(0)).square()
        parts = error.mean(-1).split(num)
        middle = torch.stack([part.mean() for part in t.split(num)])
        rmse = torch.stack([part.mean().sqrt() for part in parts])
        ax.plot(middle, rmse, style, label=name)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("seconds")
    ax.set_ylabel("error / std of torque")
    ax.legend(fontsize=8)

    ax = panels["time"]
    both = 1000 * torch.stack([track.seconds, track.work])
    low, high = both.log10().aminmax()
    bins = torch.logspace(float(low) - 0.01, float(high) + 0.01, 60).tolist()
    for values, name in zip(both, ("by the clock", "processor time"), strict=True):
        ax.hist(values, bins, histtype="step", lw=1.5, label=name)
    ax.axvline(1000 / rate, color="tab:red", ls=":", label="deadline")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("ms per step: both joints, predicted and observed")
    ax.set_ylabel("steps")
    ax.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=6, help="length of the path (%(default)s)"
    )
    parser.add_argument(
        "--rate", type=float, default=500, help="steps per second (%(default)s)"
    )
    parser.add_argument(
        "--num-inducing",
        type=int,
        default=100,
        help="inducing points of each joint (%(default)s)",
    )
    parser.add_argument(
        "--out", default="out", help="folder for the figure (%(default)s)"
    )
    main(**vars(parser.parse_args()))

"""What every rank does in the tests of distributed updates; see test_distributed.py.

Run by torchrun, or as forks of one process. The first rank prints one line of JSON per
scenario.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood

from torch_ssgp import StreamingGP
from torch_ssgp.distributed import DistributedStreamingGP
from torch_ssgp.exceptions import StreamingGPError

Z = torch.linspace(0, 8, 20).double().unsqueeze(-1)


def draw(n: int, *batch: int):
    generator = torch.Generator().manual_seed(n)
    x = 8 * torch.rand(n, 1, generator=generator, dtype=torch.float64)
    y = torch.randn(*batch, n, generator=generator, dtype=torch.float64)
    return x, x.squeeze(-1).sin() + 0.1 * y


def make(kernel=None, **options) -> StreamingGP:
    batch = options.get("batch_shape", torch.Size())
    kernel = ScaleKernel(kernel or MaternKernel(), batch_shape=batch)
    options = {"num_inducing": 20, "memory_size": 40, **options}
    return StreamingGP(kernel, **options).double()


def shard(n: int) -> slice:
    """Shards of different sizes; that of the second rank is empty."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ends = [n, n] if size < 3 else [n // 3, n // 3, n]
    return slice(ends[rank - 1] if rank else 0, ends[rank])


def uneven(n: int) -> slice:
    """Shards of different sizes, none of them empty."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ends = [n * k * (k + 1) // (size * (size + 1)) for k in range(size + 1)]
    return slice(ends[rank], ends[rank + 1])


def digest(model: StreamingGP) -> str:
    """All bits of a model."""
    hashed = hashlib.sha256()
    for name, value in model.state_dict().items():
        hashed.update(name.encode() + value.contiguous().numpy().tobytes())
    return hashed.hexdigest()


def everyones(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def difference(a: StreamingGP, b: StreamingGP) -> dict:
    x = torch.linspace(-1, 9, 50).double().unsqueeze(-1)
    x = x.expand(*a.batch_shape, *x.shape)
    bounds = [m.summary.log_evidence for m in (a, b)]
    return {
        "mean": (a(x).mean - b(x).mean).abs().max().item(),
        "variance": (a(x).variance - b(x).variance).abs().max().item(),
        "bound": (bounds[0] / bounds[1] - 1).abs().max().item(),
        "identical": len(set(everyones(digest(a)))) == 1,
    }


def run(
    split,
    batches: int = 3,
    size: int = 150,
    noise: bool = False,
    missing: bool = False,
    **options,
):
    """The same stream, in all ranks together and in each alone."""
    made = options.pop("made", {})
    batch = made.get("batch_shape", torch.Size())
    alone = make(**copy.deepcopy(made))
    together = DistributedStreamingGP(make(**copy.deepcopy(made)), shard_above=1)
    x, y = draw(batches * size, *batch)
    if isinstance(alone.likelihood, BernoulliLikelihood):
        y = (y > 0).double()
    if missing:
        y[..., 0, ::7] = torch.nan
    variances = 0.01 + 0.1 * torch.rand(y.shape, generator=torch.Generator()).to(y)
    for k in range(batches):
        rows = torch.arange(k * size, (k + 1) * size)
        mine = rows[split(size)]
        first = variances[..., rows] if noise else None
        second = variances[..., mine] if noise else None
        alone.update(x[rows], y[..., rows], first, **options)
        result = together.update(x[mine], y[..., mine], second, **options)
    return {
        **difference(together.module, alone),
        "learned": result.learned,
        "messages": together.ranks.num_messages,
    }


def error_of(call) -> str:
    try:
        call()
    except StreamingGPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(spoil=None, **options):
    """An update that one rank, or all of them, cannot do."""
    model = DistributedStreamingGP(make(), shard_above=1)
    x, y = draw(90)
    model.update(x[shard(90)], y[shard(90)], num_steps=0)
    before = digest(model.module)
    rows = uneven(90)
    x, y = x[rows], y[rows].clone()
    if spoil is not None and dist.get_rank() == dist.get_world_size() - 1:
        y[spoil] = torch.nan
    errors = everyones(error_of(lambda: model.update(x, y, **options)))
    after = everyones(digest(model.module) == before)
    goes_on = error_of(lambda: model.update(*draw(40), num_steps=0)) == "nothing"
    return {"errors": errors, "unchanged": all(after), "goes_on": goes_on}


def copied():
    """Ranks that were built differently begin with the model of the first."""
    model = make()
    model.covar_module.outputscale = 1.0 + dist.get_rank()
    wrapped = DistributedStreamingGP(model)
    return {
        "identical": len(set(everyones(digest(wrapped.module)))) == 1,
        "scale": wrapped.module.covar_module.outputscale.item(),
    }


def killed():
    """One rank dies in the middle of the inner loop."""
    model = DistributedStreamingGP(make(), shard_above=1)
    x, y = draw(200)
    model.update(x[uneven(200)], y[uneven(200)], num_steps=0)
    before, start = digest(model.module), time.monotonic()

    def die(step, bound):
        if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    error = error_of(
        lambda: model.update(x[uneven(200)], y[uneven(200)], callback=die, num_steps=30)
    )
    print(
        json.dumps(
            {
                "scenario": "killed",
                "error": error,
                "unchanged": digest(model.module) == before,
                "seconds": time.monotonic() - start,
            }
        ),
        flush=True,
    )
    os._exit(3)  # the group cannot be taken down with a rank missing


FIXED = {"num_steps": 0, "inducing_points": Z}
LEARN = {"num_steps": 12, "learn_hyperparameters": True}
TWO = {"batch_shape": torch.Size([2])}
SCENARIOS = {
    "closed form": lambda: run(uneven, **FIXED),
    "empty shard": lambda: run(shard, **FIXED),
    "own points": lambda: run(uneven, num_steps=0),
    "batch shapes": lambda: run(uneven, made=TWO, noise=True, **FIXED),
    "missing": lambda: run(uneven, size=20, made=TWO, missing=True, num_steps=0),
    "exact": lambda: run(uneven, batches=2, size=12, **LEARN),
    "learning": lambda: run(uneven, batches=1, size=300, **LEARN),
    "learning twice": lambda: run(shard, batches=2, size=120, **LEARN),
    "L-BFGS": lambda: run(
        uneven,
        batches=1,
        size=300,
        optimizer="lbfgs",
        made={"kernel": RBFKernel()},
        **{**LEARN, "num_steps": 6},
    ),
    "labels": lambda: run(
        uneven,
        batches=2,
        size=60,
        num_steps=3,
        made={"likelihood": BernoulliLikelihood()},
    ),
    "nan": lambda: refused(spoil=0),
    "option": lambda: refused(num_steps=dist.get_rank()),
    "unknown option": lambda: refused(steps=3),
    "copied": copied,
    "killed": killed,
}


def main(names: list[str]) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    for name in names:
        facts = SCENARIOS[name]()
        if dist.get_rank() == 0:
            print(json.dumps({"scenario": name, **facts}), flush=True)
    dist.destroy_process_group()


def forked(folder: Path, size: int, names: list[str]) -> None:
    """Ranks that are copies of this process: the imports, which take longest, once.

    Each prints to a file of its number; in the end their exit codes are printed.
    """
    ranks = []
    for rank in range(size):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.environ["RANK"] = str(rank)
            with open(folder / str(rank), "w") as file:
                os.dup2(file.fileno(), 1)
            try:
                main(names)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    print(json.dumps(codes))


if __name__ == "__main__":
    if sys.argv[1] == "--fork":
        forked(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        main(sys.argv[1:])
        # Threads of gloo may outlive their group, and abort the process at its end.
        sys.stdout.flush()
        os._exit(0)

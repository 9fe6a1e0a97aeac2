"""One stream over several processes: every rank has a shard of each batch.

Run ``torchrun --standalone --nproc-per-node=2 examples/distributed.py``, or
``python examples/distributed.py`` for a single process. It prints the error after every
batch, the amount of data sent, and whether all ranks hold the same model.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

from torch_ssgp import StreamingGP
from torch_ssgp.distributed import DistributedStreamingGP


def truth(x: Tensor) -> Tensor:
    """The function that is learned."""
    return torch.sin(3 * x[:, 0]) * torch.cos(2 * x[:, 1])


def shard(num: int, batch: int, rank: int) -> tuple[Tensor, Tensor]:
    """The shard of a batch on one rank; no two ranks share data."""
    generator = torch.Generator().manual_seed(1_000 * batch + rank)
    x = 3 * torch.rand(num, 2, generator=generator)
    return x, truth(x) + 0.1 * torch.randn(num, generator=generator)


def digest(model: StreamingGP) -> str:
    """A hash of all values of a model."""
    values = model.state_dict().values()
    data = b"".join(value.cpu().contiguous().numpy().tobytes() for value in values)
    return hashlib.sha256(data).hexdigest()[:12]


def main(num_batches: int = 4, batch_size: int = 2_000, num_steps: int = 30) -> float:
    """Learn from a stream; the error at the end."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:  # not started by torchrun
        os.environ.update(alone, MASTER_PORT="29511")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = "cuda" if torch.cuda.is_available() else "cpu"

    kernel = ScaleKernel(MaternKernel(ard_num_dims=2))
    model = DistributedStreamingGP(StreamingGP(kernel, num_inducing=100).to(device))
    x_test = 3 * torch.rand(500, 2, generator=torch.Generator().manual_seed(0))
    for k in range(num_batches):
        x, y = shard(batch_size // size, k, rank)
        result = model.update(x.to(device), y.to(device), num_steps=num_steps)
        mean = model(x_test.to(device)).mean.cpu()
        error = (mean - truth(x_test)).square().mean().sqrt().item()
        if rank == 0:
            steps = f"{result.num_steps} steps" if result.learned else "no learning"
            print(f"batch {k}: RMSE {error:.4f}, {steps}, {result.seconds:.1f} s")

    names: list[str] = [""] * size
    dist.all_gather_object(names, digest(model.module))
    if rank == 0:
        sent = model.ranks.num_bytes / 2**20
        print(f"{size} ranks, {sent:.1f} MiB sent; same model: {len(set(names)) == 1}")
    dist.destroy_process_group()
    return error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--num-batches", type=int, default=4, help="batches of the stream (%(default)s)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=2_000,
        help="points per batch, over all ranks (%(default)s)",
    )
    parser.add_argument(
        "--num-steps",
        type=int,
        default=30,
        help="limit on gradient steps per update (%(default)s)",
    )
    chosen = parser.parse_args()
    main(chosen.num_batches, chosen.batch_size, chosen.num_steps)

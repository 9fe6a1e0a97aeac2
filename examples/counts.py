"""Daily event counts with drift and bursts, as a Poisson stream.

GPyTorch's Poisson likelihood has a softplus link. This example shows how to write your
own, with a log link. Run ``python examples/counts.py``: it prints a table and saves
out/counts.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import _OneDimensionalLikelihood
from torch import Tensor
from torch.distributions import Poisson

try:
    from matplotlib import pyplot
except ImportError as error:
    raise SystemExit(
        f"{__doc__}\n{error}. Install it: pip install -e '.[plot]'"
    ) from None

from torch_ssgp import StreamingGP


class LogPoissonLikelihood(_OneDimensionalLikelihood):
    """Counts with rate ``exp(f)``. This is all that a new likelihood needs."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Poisson:
        """Counts given the function."""
        return Poisson(function_samples.exp(), validate_args=False)


def true_rate(day: Tensor) -> Tensor:
    """Weekly rhythm, slow growth, and one burst."""
    burst = 1.5 * torch.exp(-0.5 * ((day - 60) / 3).square())
    return torch.exp(
        1.0 + 0.008 * day + 0.5 * torch.sin(2 * torch.pi * day / 28) + burst
    )


def main(
    num_batches: int = 5,
    num_steps: int = 100,
    num_inducing: int = 30,
    out: str | Path = "out",
) -> list[dict[str, float]]:
    """Learn the stream; the rows of the printed table.

    Args:
        num_batches: Batches that 120 days of four counts each arrive in.
        num_steps: Budget of the inner loop of each update.
        num_inducing: Largest number of inducing points.
        out: Folder for the figure.
    """
    generator = torch.Generator().manual_seed(0)
    days = torch.arange(0, 120, 0.25, dtype=torch.float64)
    events = torch.poisson(true_rate(days), generator=generator)

    model = StreamingGP(
        ScaleKernel(MaternKernel()), LogPoissonLikelihood(), num_inducing=num_inducing
    ).double()
    figure, panels = pyplot.subplots(
        num_batches, 1, figsize=(9, 1 + 1.8 * num_batches), sharex=True, sharey=True
    )
    rows: list[dict[str, float]] = []
    print("batch   data   log-rate error      bound")
    batches = zip(days.chunk(num_batches), events.chunk(num_batches), strict=True)
    for k, (x, y) in enumerate(batches):
        result = model.update(x, y, num_steps=num_steps)
        seen = days <= x.max()
        with torch.no_grad():
            latent = model(days[seen])
        error = latent.mean - true_rate(days[seen]).log()
        rows.append(
            {
                "batch": k + 1,
                "data": int(model.summary.num_data),
                "error": error.square().mean().sqrt().item(),
                "bound": result.bound.item(),
            }
        )
        print("{batch:5d} {data:6d} {error:16.3f} {bound:10.1f}".format(**rows[-1]))
        draw(panels[k], model, days, events, x)
    panels[0].legend(loc="upper left", fontsize=7, ncols=3)
    panels[-1].set_xlabel("day")
    path = Path(out) / "counts.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"figure: {path}")
    return rows


@torch.no_grad()
def draw(ax: Any, model: StreamingGP, days: Tensor, events: Tensor, x: Tensor) -> None:
    """Rate with a band, past counts in grey, new ones in colour, inducing points."""
    latent = model(days)
    mean, deviation = latent.mean, latent.stddev
    past, new = days < x.min(), (days >= x.min()) & (days <= x.max())
    ax.plot(days[past], events[past], ".", color="0.75", ms=3, label="past counts")
    ax.plot(days[new], events[new], ".", color="tab:blue", ms=4, label="new counts")
    ax.plot(days, true_rate(days), "--", color="black", lw=1, label="true rate")
    ax.plot(days, mean.exp(), color="tab:orange", label="rate")
    low, high = (mean - 2 * deviation).exp(), (mean + 2 * deviation).exp()
    ax.fill_between(days, low, high, color="tab:orange", alpha=0.25, lw=0)
    z = model.summary.inducing_points.squeeze(-1)
    ax.plot(z, torch.full_like(z, -1.0), "|", color="tab:red", ms=8)
    ax.set_ylim(-2, 1.1 * float(events.max()))
    ax.set_ylabel("events")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", default="out", help="folder for the figure (%(default)s)"
    )
    main(**vars(parser.parse_args()))

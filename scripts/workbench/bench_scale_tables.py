"""Sections of the page on merged models and on models of many processes."""

from __future__ import annotations

from pathlib import Path

from workbench.pages import markdown, paragraphs
from workbench.results import Contents, Row, read

HIDDEN = ("version", "table")


def section(path: Path) -> str:
    """The section of a file; nothing where there is none."""
    if not path.exists():
        return ""
    return {"merge": merge, "distributed": distributed}[path.stem](read(path))


def table(file: Contents, name: str, hide: tuple[str, ...] = ()) -> str:
    """The rows of a table in a file."""
    rows: list[Row] = [row for row in file.rows if row["table"] == name]
    return markdown(rows, hide=(*HIDDEN, *hide))


def merge(file: Contents) -> str:
    """Three sites, and a hundred models."""
    return paragraphs(
        "## Merged models",
        "Written by `scripts/benchmark.py merge` (torch_ssgp "
        f"{file.header['torch_ssgp']}). Three independent models with default "
        "settings each learn a part of a stream and are merged. They are compared "
        "with one model that saw the whole stream. In `regions` each site has a "
        "third of the batches, one after the other: a third of the map, or of the "
        "first input. In `turns` it has every third datum. `merged` takes the "
        "hyperparameters of the model with the most data; `merged and learned` is "
        "`merge(models, learn_hyperparameters=True)`.",
        table(file, "sites"),
        "A hundred models with common inducing points, merged in one call and as a "
        "tree of pairs: processor seconds, and memory beyond the level before the "
        "call.",
        table(file, "many"),
    )


def distributed(file: Contents) -> str:
    """What ranks send and wait for."""
    facts = file.header
    return paragraphs(
        "## Many processes",
        "Written by `scripts/benchmark.py distributed` (torch_ssgp "
        f"{facts['torch_ssgp']}, {facts['backend']}, one thread each, "
        f"{facts['inputs']} inputs). Bytes and messages are counted where they are "
        "sent. A step sends 8 (M (M + 1) / 2 + M + M d + hyperparameters + 2) "
        "bytes, independent of R, N and the number of ranks. The rest of an update "
        "sends the batch, one triangular factor per rank and the new state. "
        "`ms_per_step` is the processor time of the slowest rank, and `ratio` that "
        "of one process divided by it. `clock ratio` is the same in wall-clock "
        "time. The machine had two cores, shared with other work, so it is not "
        "reliable.",
        table(file, "measured"),
        "An estimate from these numbers, for ranks as fast as the single process "
        f"above, {8 * facts['link'] / 1e9:.0f} Gbit/s and "
        f"{1e6 * facts['latency']:.0f} microseconds per message. On faster devices, "
        "the same speedup needs a batch that is larger by the same factor.",
        table(file, "estimated"),
    )

"""One stream over many processes is the stream of one process, on every rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpytorch.kernels import RBFKernel

import ranks
from torch_ssgp import StreamingGP
from torch_ssgp.distributed import DistributedStreamingGP
from torch_ssgp.exceptions import ArgumentError

RANKS = ranks.__file__
EXACT = (
    "closed form",
    "empty shard",
    "own points",
    "batch shapes",
    "missing",
    "labels",
)
LEARNED = ("exact", "learning", "learning twice", "L-BFGS")
ERRORS = ("nan", "option", "unknown option")
# One start per number of processes: it takes longer than what is tested.
SCENARIOS = {
    1: ("closed form", "learning"),
    2: (*EXACT, *LEARNED, *ERRORS, "copied"),
    3: ("closed form", "empty shard", "learning", "nan", "killed"),
}


def start(*command: str, **environment: str) -> str:
    """What a program prints."""
    ended = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def forked(folder: Path, size: int, codes: list[int]) -> list[str]:
    """What each rank prints, without torchrun, which ends all when one is killed."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    ended = start(RANKS, "--fork", str(folder), str(size), *SCENARIOS[size], **group)
    assert json.loads(ended) == codes
    return [(folder / str(rank)).read_text() for rank in range(size)]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[int, list[str]]:
    """What the ranks say, by their number; by torchrun the first alone."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return {
        1: forked(tmp_path_factory.mktemp("one"), 1, [0]),
        2: [start(*torchrun, RANKS, *SCENARIOS[2])],
        3: forked(tmp_path_factory.mktemp("three"), 3, [3, 3, -9]),  # see `killed`
    }


@pytest.fixture(scope="module")
def facts(outputs) -> dict[int, dict]:
    """What the first rank says of every scenario."""
    found = {}
    for size, printed in outputs.items():
        lines = [json.loads(line) for line in printed[0].splitlines()]
        found[size] = {line["scenario"]: line for line in lines}
    return found


def cases(names):
    return [(size, n) for size, known in SCENARIOS.items() for n in known if n in names]


@pytest.mark.parametrize(("size", "name"), cases(EXACT))
def test_ranks_together_do_in_closed_form_what_one_process_does(facts, size, name):
    found = facts[size][name]
    assert found["identical"]
    for what in ("mean", "variance", "bound"):
        assert found[what] < 1e-10, what


@pytest.mark.parametrize(("size", "name"), cases(LEARNED))
def test_ranks_together_learn_what_one_process_learns(facts, size, name):
    found = facts[size][name]
    assert found["identical"] and found["learned"]
    assert found["bound"] < 1e-6
    assert found["mean"] < 1e-5


@pytest.mark.parametrize("size", [2, 3])
def test_a_nan_on_one_rank_is_the_same_error_on_all_and_changes_nothing(facts, size):
    found = facts[size]["nan"]
    assert len(found["errors"]) == size
    assert len(set(found["errors"])) == 1
    assert found["errors"][0].startswith(f"NonFiniteError: On rank {size - 1}:")
    assert found["unchanged"] and found["goes_on"]


OPTIONS = {
    "option": "ArgumentError: The ranks differ in their option num_steps: 0, 1.",
    "unknown option": "UnknownOptionError: On rank 0: update has no option 'steps'",
}


@pytest.mark.parametrize(("name", "message"), OPTIONS.items())
def test_options_must_be_the_same_on_all_ranks(facts, name, message):
    found = facts[2][name]
    assert all(error.startswith(message) for error in found["errors"])
    assert found["unchanged"] and found["goes_on"]


def test_all_ranks_begin_with_the_model_of_the_first(facts):
    assert facts[2]["copied"]["identical"]
    assert facts[2]["copied"]["scale"] == pytest.approx(1.0)


def test_when_a_rank_is_killed_the_others_end_with_an_error_and_their_models_stay(
    outputs,
):
    for output in outputs[3][:2]:
        said = json.loads(output.splitlines()[-1])
        assert said["scenario"] == "killed"
        assert said["error"].startswith("PeerError: A rank was lost")
        assert said["unchanged"]
        assert said["seconds"] < 25  # the timeout is 20


def test_without_a_process_group_the_error_says_how_to_get_one():
    with pytest.raises(ArgumentError, match="torchrun.*init_process_group"):
        DistributedStreamingGP(StreamingGP(RBFKernel()))
    with pytest.raises(ArgumentError, match="expected a StreamingGP"):
        DistributedStreamingGP(torch.nn.Linear(1, 1))  # type: ignore[arg-type]

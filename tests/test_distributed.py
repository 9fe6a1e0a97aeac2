"""One stream over many processes is the stream of one process, on every rank."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from gpytorch.kernels import RBFKernel

import ranks
from conftest import FULL
from torch_ssgp import StreamingGP
from torch_ssgp.distributed import DistributedStreamingGP
from torch_ssgp.exceptions import ArgumentError

RANKS = Path(ranks.__file__)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
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


def by_torchrun(size: int) -> list[str]:
    """What each of so many ranks prints; the first alone says something."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={size}", str(RANKS), *SCENARIOS[size]]
    for _ in range(2):
        ended = subprocess.run(
            command,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        # Once seen on a busy machine: a thread of gloo, torn down while it runs. That
        # is torch's, so it is tried once more; anything else fails at once.
        if "terminate called without an active exception" not in ended.stderr:
            break
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [ended.stdout]


def group_of(size: int) -> dict[str, str]:
    """What torchrun tells its ranks, apart from their number."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**group, "WORLD_SIZE": str(size)}


def in_this_process() -> list[str]:
    """The same of one rank, without the seconds in which two processes start."""
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        for name, value in {**group_of(1), "RANK": "0"}.items():
            patch.setenv(name, value)
        ranks.main(SCENARIOS[1])
    return [printed.getvalue()]


def one_by_one(folder: Path, size: int) -> list[str]:
    """The same without torchrun, which ends all ranks as soon as one is killed."""
    command = [sys.executable, str(RANKS), "--fork", str(folder), str(size)]
    ended = subprocess.run(
        [*command, *SCENARIOS[size]],
        env={**ENVIRONMENT, **group_of(size)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    # See `killed` in ranks.py.
    assert json.loads(ended.stdout) == [3, 3, -9], ended.stderr[-3000:]
    return [(folder / str(rank)).read_text() for rank in range(size)]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[int, list[str]]:
    """What the ranks say, by their number."""
    one = by_torchrun(1) if FULL else in_this_process()
    three = one_by_one(tmp_path_factory.mktemp("ranks"), 3)
    return {1: one, 2: by_torchrun(2), 3: three}


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("option", "ArgumentError: The ranks differ in their option num_steps: 0, 1."),
        (
            "unknown option",
            "UnknownOptionError: On rank 0: update has no option 'steps'",
        ),
    ],
)
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

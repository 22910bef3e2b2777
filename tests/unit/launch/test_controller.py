"""Slurm's answer on whether and when a job would start."""

import re
from pathlib import Path

import pytest

from recipes.core.errors import MachineError
from recipes.core.launch import controller
from tests.unit.launch.stand_ins import Stubs, describe

# The output of sinfo. In main, the default, n2 may be away. In small, a job may have 15 minutes and one node.
MAIN, SMALL = "main*|infinite|1-infinite|%s|1 x (8 CPUs, gpu:2, %s)", "small|15:00|1|idle|2 x (2 CPUs, gpu:2, idle)"
REFUSES = 'echo "sbatch: error: Requested node configuration is not available" >&2; exit 1'


@pytest.mark.parametrize(
    ("sbatch", "state", "words", "answer"),
    [
        ("exit 0", "idle", ("time=50",), ""),
        ("exit 0", "idle", ("time=50", "partition=main,small"), ""),
        ("exit 0", "idle", ("time=50", "partition=small", "qos=long"), ""),
        ("exit 0", "idle", ("time=50", "partition=small"), "!accept this job but never start it: time= is 50 minutes, partition small allows 15:00; "),
        ("exit 0", "idle", ("time=5", "nodes=2", "partition=small"), "!never start it: nodes=2, a job in partition small must have 1; "),
        *((REFUSES, state, ("nodes=2",), f"cannot start now: Requested node configuration is not available; partition main: at most infinite, "
           f"1-infinite nodes for a job; main has 1 x (8 CPUs, gpu:2, idle); main has 1 x (8 CPUs, gpu:2, {state})")
          for state in ("drain", "drng", "idle*")),
        (REFUSES, "idle~", ("nodes=2",), "!Slurm refuses this job: Requested node"),
        ("echo bad account >&2; exit 1", "drain", ("nodes=2",), "!Slurm refuses this job: bad account; partition main: "),
    ],
)  # fmt: skip
def test_slurms_answer_is_checked_against_limits_and_nodes(
    tmp_path: Path, stubs: Stubs, sbatch: str, state: str, words: tuple[str, ...], answer: str
) -> None:
    """sbatch --test-only refuses a job that waits for a drained node, and may accept a job that never starts."""
    stubs.add("sbatch", sbatch)
    stubs.add("sinfo", f"echo '{SMALL}'; echo '{MAIN % ('idle', 'idle')}'; echo '{MAIN % (state, state)}'")
    job = describe("device=cpu", *words, root=tmp_path)
    if answer.startswith("!"):
        with pytest.raises(MachineError, match=re.escape(answer[1:])):
            controller.expected_start(job, "")
    else:
        assert controller.expected_start(job, "") == answer

"""Slurm's answer on whether and when a job would start."""

import re
from pathlib import Path

import pytest

from recipes.core.errors import MachineError
from recipes.core.launch import controller
from tests.unit.launch.stand_ins import Stubs, describe

# The output of sinfo. main, the default, has two nodes of 8 CPUs. In small, a job may have 15 minutes and 2 CPUs per node.
PARTITIONS = "main*|infinite|1-infinite|2|8|UNLIMITED|gpu:2|n[1-2]\nsmall|15:00|1|2|8|2|gpu:2|n[1-2]\n"


REFUSES = 'echo "sbatch: error: Requested node configuration is not available" >&2; exit 1'


@pytest.mark.parametrize(
    ("sbatch", "away", "words", "answer"),
    [
        ("exit 0", "", ("time=50",), ""),
        ("exit 0", "", ("time=50", "partition=main,small"), ""),
        ("exit 0", "", ("time=50", "partition=small", "qos=long"), ""),
        ("exit 0", "", ("time=50", "partition=small"), "!accept this job but never start it: time= is 50 minutes, partition small allows 15:00; "),
        (REFUSES, "main*|infinite|1-infinite|1|8|UNLIMITED|gpu:2|n2|drain", ("nodes=2",), "waits for nodes that are down, drained or not responding: n2"),
        (REFUSES, "main*|infinite|1-infinite|1|8|UNLIMITED|gpu:2|n2|idle*", ("nodes=2",), "waits for nodes that are down, drained or not responding: n2"),
        (REFUSES, "main*|infinite|1-infinite|1|8|UNLIMITED|gpu:2|n2|idle~", ("nodes=2",), "!Slurm refuses this job: Requested node"),
        (REFUSES, "main*|infinite|1-infinite|1|8|UNLIMITED|gpu:2|n2|drng", ("nodes=1",), "!Slurm refuses this job: Requested node"),
        (REFUSES, "main*|infinite|1-infinite|1|8|UNLIMITED|gpu:2|n2|drain", ("nodes=3",), "!Slurm refuses this job: Requested node"),
        (REFUSES, "", ("nodes=2",), "!Slurm refuses this job: Requested node"),
        (REFUSES, "", ("time=5", "partition=small", "ranks_per_node=4"), "!partition small has 2 nodes of 2 CPUs"),
        (REFUSES, "", ("gpus=20",), "!gpus=20 (CPUs of each: 1), partition main has 2 nodes of 8 CPUs"),
    ],
)  # fmt: skip
def test_slurms_answer_is_checked_against_limits_and_nodes(
    tmp_path: Path, stubs: Stubs, sbatch: str, away: str, words: tuple[str, ...], answer: str
) -> None:
    """sbatch --test-only refuses a job that waits for a drained node, and may accept a job that never starts."""
    stubs.add("sbatch", sbatch)
    stubs.add(
        "sinfo",
        f"case $* in *%t*) echo '{away}' ;; *) printf '%b' '{PARTITIONS}' ;; esac",
    )
    job = describe("device=cpu", *words, root=tmp_path)
    if answer.startswith("!"):
        with pytest.raises(MachineError, match=re.escape(answer[1:])):
            controller.expected_start(job, "")
    else:
        assert controller.expected_start(job, "") == answer


def test_a_missing_default_partition_is_reported(tmp_path: Path, stubs: Stubs) -> None:
    stubs.add("sbatch", "echo no partition >&2; exit 1")
    stubs.add("sinfo", f"printf '%b' '{PARTITIONS.replace('main*', 'main')}'")
    with pytest.raises(MachineError, match="there is no default partition: give partition=, one of main, small"):
        controller.expected_start(describe("device=cpu", root=tmp_path), "")

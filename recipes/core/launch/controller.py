"""Asks Slurm's controller whether and when a job would start."""

import contextlib
import os
import re
import subprocess
from typing import NamedTuple

from recipes.core.errors import MachineError
from recipes.core.launch import allocation, scripts
from recipes.core.launch.jobs import Job
from recipes.core.place import durations

ROW = "%P|%l|%s|%t|%D x (%c CPUs, %G, %t)"  # the format for sinfo -o: the fields of `Row`
# sinfo's short names of the states in which Slurm starts no job on a node. "*" after any state means that the node does
# not respond.
UNAVAILABLE = re.compile(r"(down|drain|drng|failg?|inval|maint|unk)\W*|.*\*")


class Row(NamedTuple):
    """Nodes of a partition in the same state. time_limit, size: the partition's limits for a job, in sinfo's format."""

    partition: str
    time_limit: str
    size: str
    state: str
    nodes: str

    def exceeded_limits(self, job: Job) -> list[str]:
        """One phrase for each request of ``job`` that exceeds a limit of the partition."""
        phrases = []
        limit_s = durations.seconds(self.time_limit)
        if limit_s is not None and 60 * job.minutes > limit_s:
            phrases.append(f"time= is {job.minutes} minutes, partition {self.partition} allows {self.time_limit}")
        smallest, _, largest = self.size.rpartition("-")
        smallest = smallest or largest  # sinfo shows a single number if both are equal
        too_many = largest.isdecimal() and job.nodes > int(largest)
        if too_many or (smallest.isdecimal() and 0 < job.nodes < int(smallest)):
            phrases.append(f"nodes={job.nodes}, a job in partition {self.partition} must have {self.size}")
        return phrases


def expected_start(job: Job, text: str) -> str:
    """Slurm's answer on when ``job`` would start. text: the script to submit.

    Raises MachineError if Slurm refuses the job, or would accept it and never start it.
    """
    try:
        answer = subprocess.run(
            ["sbatch", "--test-only"],
            input=text, env=allocation.clean_environment(os.environ, scripts.directives(job)), cwd=job.root,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise MachineError("Slurm's controller has not answered within 120 s: test it with scontrol ping") from None
    rows = _rows(job)
    if answer.returncode != 0:
        # --test-only counts only the nodes that are up now. sbatch accepts a job that has to wait for the others.
        some_are_away = any(UNAVAILABLE.fullmatch(row.state) for row in rows)
        if some_are_away and "node configuration is not available" in answer.stderr:
            return f"cannot start now: {_reason(answer.stderr, rows)}"
        raise MachineError(refusal(answer.stderr, job))
    exceeded = [row.exceeded_limits(job) for row in rows]
    if exceeded and all(exceeded) and not (dict(job.directives).get("qos") or os.environ.get("SBATCH_QOS")):
        # Slurm accepts such a job with EnforcePartLimits=NO, its default.
        phrases = "; ".join(dict.fromkeys(phrase for phrases in exceeded for phrase in phrases))
        raise MachineError(
            f"Slurm would accept this job but never start it: {phrases}; if a QOS raises that limit, give qos="
        )
    return _one_line(answer.stderr)


def refusal(output: str, job: Job) -> str:
    """One line on why Slurm refuses ``job``. output: the stderr of sbatch."""
    return f"Slurm refuses this job: {_reason(output, _rows(job))}"


def _reason(output: str, rows: list[Row]) -> str:
    """The output of sbatch, and the limits and nodes of the requested partitions."""
    limits = [f"partition {row.partition}: at most {row.time_limit}, {row.size} nodes for a job" for row in rows]
    nodes = [f"{row.partition} has {row.nodes}" for row in rows]
    return "; ".join([_one_line(output)[:300] or "sbatch gave no reason", *dict.fromkeys([*limits, *nodes])])


def _one_line(output: str) -> str:
    """The output of sbatch in one line, without its prefixes."""
    return " ".join(re.sub(r"sbatch: |error: |Job \d+ ", "", output).split())


def _rows(job: Job) -> list[Row]:
    """The nodes of the partitions that ``job`` requests, else of the default partition. [] if Slurm does not answer."""
    requested = dict(job.directives).get("partition") or os.environ.get("SBATCH_PARTITION", "")
    command = ["sinfo", "--noheader", "--exact", "--all", "-o", ROW]
    found = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        for line in (line for line in output.splitlines() if "|" in line):
            row = Row(*line.split("|"))
            name = row.partition.rstrip("*")
            if name in requested.split(",") or (not requested and name != row.partition):  # * marks the default
                found.append(row._replace(partition=name))
    return found

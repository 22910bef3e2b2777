"""Asks Slurm's controller whether and when a job would start, and explains why Slurm refuses a job."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from recipes.core.errors import MachineError
from recipes.core.launch import allocation, scripts
from recipes.core.launch.jobs import Job
from recipes.core.place import durations
from recipes.core.run import queue

ROW = "%P|%l|%s|%D|%c|%B|%G|%N"  # the format for sinfo -o
# sinfo's short names of the states in which Slurm starts no job on a node. "*" after any state means that the node does
# not respond.
UNAVAILABLE = re.compile(r"(down|drain|drng|failg?|inval|maint|unk)\W*|.*\*")


@dataclass(frozen=True)
class Nodes:
    """Nodes of a partition with the same resources.

    count: number of nodes. cpus: CPUs of each node that a job may use. gres: resources of each node, including GPUs
    ("gpu:a100:4"). names: a list of hosts.
    """

    count: int
    cpus: int
    gres: str
    names: str

    def __str__(self) -> str:
        gpus = "" if self.gres == "(null)" else f" and {self.gres}"
        return f"{self.count} node{'s' if self.count > 1 else ''} of {self.cpus} CPUs{gpus}"

    def gpus(self, kind: str) -> int:
        """The number of GPUs of each node. kind: count only GPUs of this type; "" counts all."""
        pattern = rf"\bgpu:{re.escape(kind)}:(\d+)" if kind else r"\bgpu(?::[^:,()]+)?:(\d+)"
        return sum(map(int, re.findall(pattern, self.gres)))

    def fits(self, job: Job) -> bool:
        """Whether each of these nodes has the CPUs and GPUs that ``job`` requests per node."""
        return self.gpus(job.gpu_type) >= job.gpus_per_node and self.cpus >= job.ranks_per_node * job.cpus_per_rank


@dataclass(frozen=True)
class Partition:
    """A partition.

    time_limit, size: the limits for a job, in sinfo's format.
    """

    name: str
    time_limit: str
    size: str
    is_default: bool
    nodes: tuple[Nodes, ...] = ()

    def exceeded_limits(self, job: Job) -> list[str]:
        """One phrase for each request of ``job`` that exceeds a limit for jobs."""
        phrases = []
        limit_s = durations.seconds(self.time_limit)
        if limit_s is not None and 60 * job.minutes > limit_s:
            phrases.append(f"time= is {job.minutes} minutes, partition {self.name} allows {self.time_limit}")
        smallest, _, largest = self.size.rpartition("-")
        smallest = smallest or largest  # sinfo shows a single number if both are equal
        if largest.isdecimal() and job.nodes > int(largest):
            phrases.append(f"nodes={job.nodes}, partition {self.name} allows {largest} for a job")
        if smallest.isdecimal() and 0 < job.nodes < int(smallest):
            phrases.append(f"nodes={job.nodes}, a job in partition {self.name} must have at least {smallest}")
        return phrases

    def missing_nodes(self, job: Job) -> str:
        """A phrase on the request of ``job`` that the nodes cannot satisfy; "" if they can."""
        kind, has = job.gpu_type, f"partition {self.name} has {', '.join(map(str, self.nodes))}"
        if job.ranks and job.gpus_per_node and job.ranks > sum(nodes.count * nodes.gpus(kind) for nodes in self.nodes):
            return f"gpus={job.ranks}, {has}"
        if job.ranks and job.ranks > sum(nodes.count * (nodes.cpus // job.cpus_per_rank) for nodes in self.nodes):
            return f"gpus={job.ranks} (CPUs of each: {job.cpus_per_rank}), {has}"
        if sum(nodes.count for nodes in self.nodes if nodes.fits(job)) < max(1, job.nodes):
            gpus = f"{kind + ' ' if kind else ''}GPUs: {job.gpus_per_node}, " if job.gpus_per_node else ""
            cpus = job.ranks_per_node * job.cpus_per_rank
            return f"nodes={max(1, job.nodes)} (of each: {gpus}CPUs: {cpus}), {has}"
        return ""


def expected_start(job: Job, text: str) -> str:
    """Slurm's answer on when ``job`` would start. text: the script to submit.

    Raises MachineError if the job could never start.
    """
    try:
        answer = subprocess.run(
            ["sbatch", "--test-only"],
            input=text, env=allocation.clean_environment(os.environ, scripts.directives(job)), cwd=job.root,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise MachineError("Slurm's controller has not answered within 120 s: test it with scontrol ping") from None
    partitions = _partitions()
    if answer.returncode != 0:
        # --test-only checks only the nodes that are up now. sbatch also accepts a job that has to wait for other nodes.
        if names := _unavailable_nodes(job, partitions):
            return f"waits for nodes that are down, drained or not responding: {names}"
        raise MachineError(refusal(answer.stderr, "sbatch --test-only", job))
    names_requested = _requested(job, partitions)
    requested = [partitions[name] for name in names_requested if name in partitions]
    all_known = len(requested) == len(names_requested)  # sinfo does not show hidden partitions
    exceeded = [partition.exceeded_limits(job) for partition in requested]
    if exceeded and all(exceeded) and all_known and not _qos(job):
        # Slurm accepts such a job with EnforcePartLimits=NO, its default.
        phrases = "; ".join(phrase for phrases in exceeded for phrase in phrases)
        raise MachineError(
            f"Slurm would accept this job but never start it: {phrases}; if a QOS raises that limit, give qos="
        )
    start = _one_line(answer.stderr)
    for unknown in _unknown_dependencies(job):
        start += f"; Slurm does not know job {unknown}, so this dependency counts as met"
    return start


def refusal(output: str, command: str, job: Job) -> str:
    """One line on why Slurm refuses ``job``. output: the stderr of ``command``, which submits or tests the job."""
    reasons = [_one_line(output)[:300] or f"{command} gave no reason"]
    reasons += _impossible_requests(job, _partitions())
    return f"Slurm refuses this job: {'; '.join(reasons)}"


def of_jobs_cluster(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for a command that asks about a job.

    sbatch reads SBATCH_CLUSTERS; the other commands read SLURM_CLUSTERS.
    """
    cluster = environ.get("SBATCH_CLUSTERS", "")
    is_one = bool(cluster) and "," not in cluster and cluster != "all"
    return {**({"SLURM_CLUSTERS": cluster} if is_one else {}), **environ}


def _one_line(output: str) -> str:
    """The output of sbatch in one line, without its prefixes."""
    return " ".join(re.sub(r"sbatch: |error: |Job \d+ ", "", output).split())


def _output(*command: str) -> str:
    """The stdout of a Slurm command; "" if it fails or does not answer within 60 s."""
    environ = {k: v for k, v in of_jobs_cluster(os.environ).items() if not k.startswith("SINFO_")}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True).stdout
    return ""


def _partitions(unavailable: bool = False) -> dict[str, Partition]:
    """All partitions by name; {} if Slurm does not answer. unavailable: list only the nodes that are unavailable."""
    found: dict[str, Partition] = {}
    output = _output("sinfo", "-h", "-e", "-o", f"{ROW}|%t" if unavailable else ROW)
    for row in filter(None, output.splitlines()):
        name, limit, size, count, cpus, most, gres, names, *node_state = row.split("|")
        if unavailable and not UNAVAILABLE.fullmatch(node_state[0]):
            continue
        of_each = min(int(cpus.rstrip("+")), int(most) if most.isdecimal() else sys.maxsize)  # "64+" where nodes differ
        key = name.rstrip("*")
        partition = found.setdefault(key, Partition(key, limit, size, name.endswith("*")))
        found[key] = replace(partition, nodes=(*partition.nodes, Nodes(int(count), of_each, gres, names)))
    return found


def _requested(job: Job, partitions: Mapping[str, Partition]) -> Sequence[str]:
    """The names of the partitions that ``job`` requests, else of the default partition; [] if there is none."""
    default = next((partition.name for partition in partitions.values() if partition.is_default), "")
    names = dict(job.directives).get("partition") or os.environ.get("SBATCH_PARTITION") or default
    return names.split(",") if names else []


def _qos(job: Job) -> str:
    return dict(job.directives).get("qos") or os.environ.get("SBATCH_QOS", "")


def _unknown_dependencies(job: Job) -> list[str]:
    """The jobs that ``job`` depends on and that Slurm does not know or no longer knows.

    Slurm 22.05 treats such a dependency as met.
    """
    ids = re.findall(r":(\d+)", dict(job.directives).get("dependency", ""))
    return [one for one in ids if not queue.find(one, of_jobs_cluster(os.environ))]


def _impossible_requests(job: Job, partitions: Mapping[str, Partition]) -> list[str]:
    """One phrase for each request of ``job`` that its partitions cannot satisfy; [] if Slurm does not answer."""
    if not partitions:
        return []
    requested = _requested(job, partitions)
    if not requested:
        return [f"there is no default partition: give partition=, one of {', '.join(partitions)}"]
    phrases = []
    for name in requested:
        if partition := partitions.get(name):
            phrases += [*partition.exceeded_limits(job), *filter(None, [partition.missing_nodes(job)])]
        else:
            phrases.append(f"there is no partition {name}, only {', '.join(partitions)}")
    return phrases


def _unavailable_nodes(job: Job, partitions: Mapping[str, Partition]) -> str:
    """The nodes that are down, drained or not responding, if ``job`` needs them to start.

    Returns "" if it does not need them or could not start even with them.
    """
    if not partitions or _impossible_requests(job, partitions):
        return ""
    unavailable = _partitions(unavailable=True)
    found: list[str] = []
    for name in _requested(job, partitions):
        away = unavailable[name].nodes if name in unavailable else ()
        without = (*partitions[name].nodes, *(replace(nodes, count=-nodes.count) for nodes in away))
        if not replace(partitions[name], nodes=without).missing_nodes(job):
            return ""
        found += [nodes.names for nodes in away]
    return ", ".join(dict.fromkeys(found))

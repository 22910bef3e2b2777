"""What Slurm says about a job: its state, what follows, and what its reason means."""

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from recipes.core.errors import Next
from recipes.core.slurm import durations

# States after which a job does not start again. REVOKED is not one of them: in a federation,
# another cluster runs that job.
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}
# States between two starts of a requeued job, or before the first start.
WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
COMPLETING = "COMPLETING"  # the last start is ending; other fields show what happens next
# in a shorter job, the 120 s of the scripts' signal are more than a quarter of its time
SHORT_S = 480.0
# Fields whose value may contain spaces and "=". Each of them has its own line or is at the end of a
# line.
_TEXT_FIELD = re.compile(
    r"(?:JobId=\S+ .*?)?\b(JobName|Command|WorkDir|StdErr|StdIn|StdOut|SubmitLine|"
    r"(?:Admin|System)?Comment|Extra)=(.*)"
)
# What a reason of Slurm for a pending job means. The pattern matches the whole reason.
ADVICE = {
    "PartitionTimeLimit": (
        "its time limit exceeds that of the partition, so it never starts: cancel it, "
        "and give a shorter time="
    ),
    "PartitionNodeLimit": (
        "the partition does not allow so many nodes, so it never starts: cancel it, "
        "and give another nodes="
    ),
    "PartitionDown|PartitionInactive": (
        "the partition accepts no jobs now: give another partition=, or wait"
    ),
    "BadConstraints": "no node has the resources that it requests, so it never starts: cancel it",
    "ReqNodeNotAvail.*|Reservation": (
        "nodes are down or reserved, for example for maintenance: a shorter time= may start earlier"
    ),
    "(Assoc|QOS)(Grp|Max).*": (
        "a limit of your account or QOS is reached: it starts when other jobs have ended"
    ),
    "InvalidAccount|InvalidQOS": "it never starts: cancel it, and give a valid account= or qos=",
    "JobLaunchFailure": "its batch script did not start: the folder of its log (-o) must exist",
    "JobHeldAdmin": "an administrator holds it",
    # scontrol prints _ in place of the spaces
    "launch[ _]failed[ _]requeued[ _]held": (
        "a node failed at its start: scontrol release lets it start again"
    ),
}
WORD = re.compile(r"(\S+?)=(\S*)")


@dataclass(frozen=True)
class Job:
    """One job, one array task, or one component of a heterogeneous job.

    id: ``<job>`` or ``<array>_<task>``. state: Slurm's name of the state (PENDING, RUNNING, …).
    reason: why the job is pending or has ended; "" if there is none. exit_status: 0 while the job
    runs; 128 + N for a job that signal N ended. restarts: how often the job was requeued. start:
    when it started or is expected to start, as YYYY-MM-DDTHH:MM:SS; "" if unknown. submitted: when
    it came into the queue last, as time.time(); None if unknown. limit_s: its time limit; inf means
    no limit, None means unknown. run_s: how long it has run. log, error_log: the files of its
    output; "" if unknown. number: its own number, also for an array task. gpus_per_task: whether it
    has requested its GPUs per task. options: the options of sbatch that describe its size, time
    and nodes, by their long names without dashes, as far as they are set.
    """

    id: str
    state: str
    reason: str = ""
    exit_status: int = 0
    restarts: int = 0
    start: str = ""
    submitted: float | None = None
    limit_s: float | None = None
    run_s: float | None = None
    log: str = ""
    error_log: str = ""
    number: str = ""
    gpus_per_task: bool = False
    is_array: bool = False
    has_script: bool = True  # False for a job of salloc
    is_preempted: bool = False
    has_no_priority: bool = False
    options: Mapping[str, str] = field(repr=False, default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def never_starts(self) -> bool:
        """Whether the dependency of the job can never be met. Slurm leaves it in the queue."""
        return self.state == "PENDING" and self.reason == "DependencyNeverSatisfied"

    @property
    def waiting(self) -> bool:
        return self.state in WAITING

    @property
    def held(self) -> bool:
        """Whether Slurm starts the job only after ``scontrol release``."""
        return (self.waiting or self.state == COMPLETING) and self.has_no_priority

    @property
    def left_s(self) -> float | None:
        """Seconds until the time limit of a job that has started. inf means no limit, None means
        unknown.
        """
        if self.limit_s is None or self.run_s is None:
            return None
        return self.limit_s - self.run_s

    @property
    def is_short(self) -> bool:
        """Whether the time limit is below SHORT_S. The ready scripts' signal, meant for jobs of
        hours, would then come soon after the start.
        """
        return self.limit_s is not None and self.limit_s < SHORT_S

    @property
    def is_over_time(self) -> bool:
        """Whether Slurm is ending the job at its time limit. It can still be requeued (seen with
        Slurm 22.05).
        """
        is_ending = self.state == COMPLETING and not self.is_preempted
        return is_ending and self.left_s is not None and self.left_s <= 0

    def after_start(self, restarts: int) -> Next | None:
        """What Slurm does with the job after the start with this number (from 0). None while that
        start runs.
        """
        if self.held:
            return Next.held
        if self.ended:
            return Next.cancelled if self.state == "CANCELLED" else Next.not_requeued
        if self.waiting or self.restarts > restarts:
            return Next.requeued
        if self.state == COMPLETING:  # Slurm hides the state that follows
            return Next.not_requeued if self.is_preempted or self.is_over_time else Next.cancelled
        return None


def describe(job: Job) -> str:
    """One line on the state of a job in the queue."""
    reason = f" ({with_advice(job.reason)})" if job.reason else ""
    if job.held:
        return f"job {job.id} is held{reason}: scontrol release {job.id} lets it start"
    when = f", expected to start at {job.start}" if job.waiting and job.start else ""
    return f"job {job.id} is {job.state.lower()}{reason}{when}"


def with_advice(reason: str) -> str:
    """Slurm's reason for a pending job, and what it means if `ADVICE` knows it."""
    for pattern, advice in ADVICE.items():
        if re.fullmatch(pattern, reason):
            return f"{reason}: {advice}"
    return reason


def parse(text: str) -> list[Job]:
    """The jobs in the output of ``scontrol show job`` (without ``-o``). Checked with Slurm 22.05,
    24.11 and 26.05.
    """
    return [_job(block) for block in re.split(r"\n\s*\n", text) if "JobId=" in block]


def _gpus(tres: str) -> str:
    """The GPUs in a list of resources, in the format of sbatch's options: ``2`` or ``a100:2``; ""
    if there are none.

    tres: such as gres:gpu:2 (Slurm 22.05), gres/gpu:2 or cpu=4,gres/gpu:a100=2 (24.11).
    """
    gpu = re.compile(r"(?:^|,)(?:gres[:/])?gpu[:=]([^,]+)")
    return ",".join(gpu.findall(tres)).replace("=", ":")


def _job(block: str) -> Job:
    fields = defaultdict[str, str](str)  # "" for a field that is missing
    for line in block.splitlines():
        text_field = _TEXT_FIELD.match(line.strip())
        words = line[: line.index(f"{text_field[1]}=")] if text_field else line
        fields |= dict(WORD.findall(words))
        if text_field:
            fields[text_field[1]] = text_field[2]
    array = fields["ArrayJobId"]
    task = fields["ArrayTaskId"]
    status, number = map(int, fields.get("ExitCode", "0:0").split(":"))
    start = fields["StartTime"]
    return Job(
        id=f"{array}_{task}" if array and task else fields["JobId"],
        state=fields["JobState"],
        reason=reason_of(fields["Reason"]),
        exit_status=status or (number and 128 + number),
        restarts=int(fields.get("Restarts", "0")),
        start=start if start[:1].isdecimal() else "",
        submitted=moment(fields["SubmitTime"]),
        limit_s=durations.seconds(fields["TimeLimit"]),
        run_s=durations.seconds(fields["RunTime"]),
        log=fields["StdOut"],
        error_log=fields["StdErr"],
        number=fields["JobId"],
        gpus_per_task=bool(_gpus(fields["TresPerTask"]))
        or re.match("[1-9]", fields["NtasksPerTRES"]) is not None,
        is_array=bool(array),
        has_script=fields["BatchFlag"] != "0",
        is_preempted=fields.get("PreemptTime", "None") != "None",
        has_no_priority=fields["Priority"] == "0",
        options=_options(fields),
    )


def _options(fields: defaultdict[str, str]) -> dict[str, str]:
    """The options of sbatch that describe a job, from the fields that scontrol printed."""
    per_node = fields.get("NtasksPerN:B:S:C", "0").partition(":")[0]
    is_total = per_node == "0"
    options = {
        "nodes": fields["NumNodes"],
        "ntasks": fields["NumTasks"] if is_total else "",
        "ntasks-per-node": "" if is_total else per_node,
        "gpus-per-node": _gpus(fields["TresPerNode"]),
        "cpus-per-task": fields["CPUs/Task"],
        "time": fields["TimeLimit"],
        "partition": fields["Partition"],
        "account": fields["Account"],
        "qos": fields["QOS"],
        "constraint": fields["Features"],
        "mem": "" if fields["MemPerTres"] else fields["MinMemoryNode"],
        "mem-per-cpu": fields["MinMemoryCPU"],
        "mem-per-gpu": fields["MemPerTres"].rpartition(":")[2],
        "reservation": fields["Reservation"],
        "exclude": fields["ExcNodeList"],
        "dependency": fields["Dependency"],
    }
    unset = ("", "(null)", "N/A")
    return {name: value for name, value in options.items() if value not in unset}


def moment(text: str) -> float | None:
    """A time that Slurm prints, YYYY-MM-DDTHH:MM:SS, as time.time(); None if it is not one."""
    with contextlib.suppress(ValueError):
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return None


def reason_of(text: str) -> str:
    """Slurm's reason; "" if it gives none."""
    return "" if text in ("None", "(null)") else text

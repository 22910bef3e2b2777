"""Calls ``scontrol show job`` and parses its output. No other module does this. Standard library only."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from recipes.core.errors import MachineError, Next
from recipes.core.place import durations

# States after which a job does not start again. REVOKED is not one of them: in a federation, another cluster runs that
# job.
ENDED = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)
# States between two starts of a requeued job, or before the first start.
WAITING = frozenset(["PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"])
COMPLETING = "COMPLETING"  # the last start is ending; other fields show what happens next
ANSWER_S = 60.0
# Fields whose value may contain spaces and "=". Each of them has its own line or is at the end of a line.
_TEXT_FIELD = re.compile(
    r"(?:JobId=\S+ .*?)?\b(JobName|Command|WorkDir|StdErr|StdIn|StdOut|SubmitLine|(?:Admin|System)?Comment|Extra)=(.*)"
)
_WORD = re.compile(r"(\S+?)=(\S*)")


@dataclass(frozen=True)
class Job:
    """One job, one array task, or one component of a heterogeneous job.

    id: ``<job>`` or ``<array>_<task>``. state: Slurm's name of the state (PENDING, RUNNING, …). reason: why the job is
    pending or has ended; "" if there is none. exit_status: 0 while the job runs; 128 + N for a job that signal N ended.
    restarts: how often the job was requeued. fields: all fields that ``scontrol`` printed, by their names.
    """

    id: str
    state: str
    reason: str
    exit_status: int
    restarts: int
    fields: Mapping[str, str] = field(repr=False, default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def never_starts(self) -> bool:
        """Whether the dependency of the job can never be met. Slurm leaves such a job in the queue."""
        return self.state == "PENDING" and self.reason == "DependencyNeverSatisfied"

    @property
    def waiting(self) -> bool:
        return self.state in WAITING

    @property
    def held(self) -> bool:
        """Whether Slurm starts the job only after ``scontrol release``."""
        return (self.waiting or self.state == COMPLETING) and self.fields.get("Priority") == "0"

    def after_start(self, restarts: int) -> Next | None:
        """What Slurm does with the job after the start with this number (from 0). None while that start runs."""
        if self.held:
            return Next.held
        if self.ended:
            return Next.cancelled if self.state == "CANCELLED" else Next.not_requeued
        if self.waiting or self.restarts > restarts:
            return Next.requeued
        if self.state == COMPLETING:  # Slurm hides the state that follows
            by_slurm = self.fields.get("PreemptTime", "None") != "None" or self._reached_its_limit()
            return Next.not_requeued if by_slurm else Next.cancelled
        return None

    def _reached_its_limit(self) -> bool:
        limit_s = durations.seconds(self.fields.get("TimeLimit", ""))
        try:
            start, end = (datetime.fromisoformat(self.fields[name]) for name in ("StartTime", "EndTime"))
        except (KeyError, ValueError):
            return False
        return limit_s is not None and (end - start).total_seconds() >= limit_s


class Queue:
    """Finds several jobs. Asks the controller once per job, and never again after it has failed to answer."""

    def __init__(self, environ: Mapping[str, str] = os.environ, timeout_s: float = 10.0) -> None:
        self._environ, self._timeout_s = environ, timeout_s
        self._known: dict[str, Job | None] = {}
        self._failure: MachineError | None = None

    def find(self, job_id: str) -> Job | None:
        """The same as the function `find`. Raises MachineError."""
        if self._failure:
            raise self._failure
        if job_id not in self._known:
            try:
                self._known[job_id] = next(iter(show(job_id, self._environ, self._timeout_s)), None)
            except MachineError as error:
                self._failure = error
                raise
        return self._known[job_id]


def show(job_id: str, environ: Mapping[str, str] = os.environ, timeout_s: float = ANSWER_S) -> list[Job]:
    """The job as the controller describes it, with one entry per array task or component.

    The list is empty if Slurm does not know the job. The function asks the controller and not the accounting, since a
    site may not have accounting. environ: the environment of scontrol. Raises MachineError if the controller cannot be
    asked.
    """
    try:
        asked = subprocess.run(
            ["scontrol", "show", "job", job_id], env=dict(environ), capture_output=True, text=True, timeout=timeout_s,
            encoding="utf-8", errors="surrogateescape",  # the output may contain job names and paths of any user
        )  # fmt: skip
    except FileNotFoundError:
        raise MachineError("scontrol is not on the PATH, so Slurm cannot be asked about the job") from None
    except subprocess.TimeoutExpired:
        raise MachineError(f"Slurm's controller has not answered within {timeout_s:g} s") from None
    except OSError as error:
        raise MachineError(f"scontrol show job {job_id} failed: {error}") from None
    if asked.returncode:
        # Only these two texts show that Slurm does not know the job: the first for a job ID (stderr), the second (on
        # stdout) for an element of an array that Slurm knows.
        if "Invalid job id" in asked.stderr or re.fullmatch(r"Job \S+ not found\s*", asked.stdout):
            return []
        raise MachineError(f"Slurm's controller does not answer: {' '.join(asked.stderr.split())[:200]}")
    return parse(asked.stdout)


def find(job_id: str, environ: Mapping[str, str] = os.environ, timeout_s: float = ANSWER_S) -> Job | None:
    """The first entry of `show`; None if Slurm does not know the job. Raises MachineError."""
    return next(iter(show(job_id, environ, timeout_s)), None)


def describe(job: Job) -> str:
    """One line on the state of a job in the queue."""
    reason = f" ({job.reason})" if job.reason else ""
    if job.held:
        return f"job {job.id} is held{reason}: scontrol release {job.id} starts it"
    if job.waiting:
        start = job.fields.get("StartTime", "")
        when = "" if start in ("", "Unknown", "N/A", "None") else f", expected to start at {start}"
        return f"job {job.id} is pending{reason}{when}"
    if job.ended:
        return f"job {job.id} has ended: {job.state}{reason}"
    again = f", restart {job.restarts}" if job.restarts else ""
    return f"job {job.id} is {job.state.lower()}{again}"


def parse(text: str) -> list[Job]:
    """The jobs in the output of ``scontrol show job`` (without ``-o``). Checked with Slurm 22.05, 24.11 and 26.05."""
    return [_job(block) for block in re.split(r"\n\s*\n", text) if "JobId=" in block]


def gpus(tres: str) -> str:
    """The GPUs in a list of resources, in the format of sbatch's options: ``2`` or ``a100:2``; "" if there are none.

    tres: a list from ``scontrol`` or SLURM_TRES_PER_TASK, for example gres:gpu:2 (Slurm 22.05), gres/gpu:2 or
    cpu=4,gres/gpu:a100=2 (24.11).
    """
    found = (re.fullmatch(r"(?:gres[:/])?gpu[:=](.+)", one) for one in tres.split(","))
    return ",".join(one[1].replace("=", ":") for one in found if one)


def _job(block: str) -> Job:
    fields: dict[str, str] = {}
    for line in block.splitlines():
        text_field = _TEXT_FIELD.match(line.strip())
        words = line[: line.index(f"{text_field[1]}=")] if text_field else line
        fields |= dict(_WORD.findall(words))
        if text_field:
            fields[text_field[1]] = text_field[2]
    array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId")
    status, _, number = fields.get("ExitCode", "0:0").partition(":")
    reason = fields.get("Reason", "")
    return Job(
        id=f"{array}_{task}" if array and task else fields.get("JobId", ""),
        state=fields.get("JobState", ""),
        reason="" if reason in ("None", "(null)") else reason,
        exit_status=int(status) or (128 + int(number) if int(number or 0) else 0),
        restarts=int(fields.get("Restarts", "0")),
        fields=fields,
    )

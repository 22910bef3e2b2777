"""Asks Slurm about jobs: their state, their time limit, and what happens to them next. Standard
library only.

No other module calls ``scontrol``. A call that fails is repeated, since a busy controller may not
answer.
"""

import contextlib
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.core import files
from recipes.core.errors import MachineError, Next, next_of, shown
from recipes.core.place import durations
from recipes.core.run import attempt as attempts
from recipes.core.run import directory

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
ANSWER_S = 60.0
# in a shorter job, the 120 s of the scripts' signal are more than a quarter of its time
SHORT_S = 480.0
AGAIN_S = (1.0, 4.0)  # pauses before a failed call is repeated
OWN_JOB_S = 10.0  # timeout if a job that may have little time left, or a user, waits for the answer
HOW_TO_RESUME = "to resume, start the run again with the same run_dir="
# Why nothing starts the run again, for each outcome without a requeue.
NOT_REQUEUED: dict[Next | None, str] = {
    Next.cancelled: f"the job was cancelled: {HOW_TO_RESUME}",
    Next.max_requeues: f"not requeued, since max_requeues= is reached: {HOW_TO_RESUME}",
    Next.no_progress: (
        f"not requeued, since its last start completed no step or saved no file: {HOW_TO_RESUME}"
    ),
    Next.requeue_failed: f"not requeued, since scontrol requeue failed: {HOW_TO_RESUME}",
    Next.not_requeued: f"not requeued by Slurm: {HOW_TO_RESUME}",
}
# Fields whose value may contain spaces and "=". Each of them has its own line or is at the end of a
# line.
_TEXT_FIELD = re.compile(
    r"(?:JobId=\S+ .*?)?\b(JobName|Command|WorkDir|StdErr|StdIn|StdOut|SubmitLine|"
    r"(?:Admin|System)?Comment|Extra)=(.*)"
)
# What a reason of Slurm for a pending job means. The pattern matches the whole reason.
ADVICE = {
    "PartitionTimeLimit": (
        "its time limit is above that of the partition, so it never starts: cancel it, "
        "and give a shorter time="
    ),
    "PartitionNodeLimit": (
        "the partition does not allow so many nodes, so it never starts: cancel it, "
        "and give another nodes="
    ),
    "PartitionDown|PartitionInactive": (
        "the partition accepts no jobs now: give another partition=, or wait"
    ),
    "BadConstraints": "no node has what it asks for, so it never starts: cancel it",
    "ReqNodeNotAvail.*|Reservation": (
        "nodes are down or reserved, for example for maintenance: a shorter time= may start earlier"
    ),
    "(Assoc|QOS)(Grp|Max).*": (
        "a limit of your account or QOS is reached: it starts when other jobs have ended"
    ),
    "InvalidAccount|InvalidQOS": "it never starts: cancel it, and give a valid account= or qos=",
    "JobLaunchFailure": "its batch script did not start: the folder of its log (-o) must exist",
    "JobHeldAdmin": "an administrator holds it",
    "launch failed requeued held": (
        "a node failed at its start: scontrol release lets it start again"
    ),
}
# Variables that replace options of Slurm's commands, or change the form of the times that they
# print.
OF_COMMANDS = re.compile("(SQUEUE|SINFO|SCANCEL|SCONTROL|SACCT)_|SLURM_TIME_FORMAT$")
_WORD = re.compile(r"(\S+?)=(\S*)")


@dataclass(frozen=True)
class Job:
    """One job, one array task, or one component of a heterogeneous job.

    id: ``<job>`` or ``<array>_<task>``. state: Slurm's name of the state (PENDING, RUNNING, …).
    reason: why the job is pending or has ended; "" if there is none. exit_status: 0 while the job
    runs; 128 + N for a job that signal N ended. restarts: how often the job was requeued. fields:
    all fields that ``scontrol`` printed, by their names.
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
        """Whether the dependency of the job can never be met. Slurm leaves it in the queue."""
        return self.state == "PENDING" and self.reason == "DependencyNeverSatisfied"

    @property
    def waiting(self) -> bool:
        return self.state in WAITING

    @property
    def held(self) -> bool:
        """Whether Slurm starts the job only after ``scontrol release``."""
        return (self.waiting or self.state == COMPLETING) and self.fields.get("Priority") == "0"

    @property
    def is_over_time(self) -> bool:
        """Whether Slurm is ending the job at its time limit. It can still be requeued (seen with
        Slurm 22.05).
        """
        left_s = time_left_s(self.fields)
        return (
            self.state == COMPLETING
            and not self._is_preempted
            and left_s is not None
            and left_s <= 0
        )

    @property
    def _is_preempted(self) -> bool:
        return self.fields.get("PreemptTime", "None") != "None"

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
            return Next.not_requeued if self._is_preempted or self.is_over_time else Next.cancelled
        return None


def show(job_id: str, timeout_s: float = ANSWER_S) -> list[Job]:
    """The job as the controller describes it (a site may have no accounting): one entry per array
    task or component.

    The list is empty if Slurm does not know the job. Raises MachineError if it cannot be asked.
    """
    try:
        asked = _call("scontrol", "show", "job", job_id, timeout_s=timeout_s)
    except FileNotFoundError:
        raise MachineError(
            "scontrol is not on the PATH, so Slurm cannot be asked about the job"
        ) from None
    except subprocess.TimeoutExpired:
        raise MachineError(f"Slurm's controller has not answered within {timeout_s:g} s") from None
    except OSError as error:
        raise MachineError(f"scontrol show job {job_id} failed: {error}") from None
    if not asked.returncode:
        return parse(asked.stdout)
    if _is_unknown(asked):
        return []
    raise MachineError(
        f"Slurm's controller does not answer: {' '.join(asked.stderr.split())[:200]}"
    )


def _call(
    *command: str, timeout_s: float = ANSWER_S, again: bool = True
) -> "subprocess.CompletedProcess[str]":
    """Runs a command of Slurm, and ``again`` after each of AGAIN_S if it fails. Raises OSError and
    subprocess.TimeoutExpired.

    A user's defaults for these commands, such as SQUEUE_PARTITION, have no effect.
    """
    end = time.monotonic() + timeout_s
    environ = {name: value for name, value in os.environ.items() if not OF_COMMANDS.match(name)}
    for pause_s in (*(AGAIN_S if again else ()), math.inf):
        done = subprocess.run(
            command,
            env=environ,
            capture_output=True,
            text=True,
            timeout=max(1.0, end - time.monotonic()),
            encoding="utf-8",
            errors="surrogateescape",  # the output may contain job names and paths of any user
        )
        if not done.returncode or _is_unknown(done) or time.monotonic() + pause_s > end:
            break
        time.sleep(pause_s)
    return done


def _is_unknown(done: "subprocess.CompletedProcess[str]") -> bool:
    """Whether Slurm does not know the job ID (as stderr says), or the element of an array that it
    knows (stdout).
    """
    not_found = re.fullmatch(r"Job \S+ not found\s*", done.stdout)
    return "Invalid job id" in done.stderr or not_found is not None


def change(*arguments: str) -> None:
    """Calls ``scontrol`` with ``arguments``, such as requeue and a job ID. Raises OSError and
    subprocess.SubprocessError.
    """
    _call("scontrol", *arguments).check_returncode()


def _answer(*command: str) -> str:
    """The stdout of a command of Slurm; "" if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = _call(*command)
        done.check_returncode()
        return done.stdout
    return ""


def find_by_comment(comment: str) -> str:
    """The ID of this user's job with that comment; "" if there is none, or if Slurm does not
    answer.
    """
    answer = _answer("squeue", "--me", "--noheader", "--states=all", "--format=%F %k")
    jobs = (line.split() for line in answer.splitlines() if line.strip())
    return next((job for job, *words in jobs if words == [comment]), "")


@dataclass(frozen=True)
class Line:
    """A job of this user in the queue. start: the expected start of a pending one. left_s: until
    its time limit; None if unknown.
    """

    state: str
    start: str
    nodes: str
    left_s: float | None
    held: bool
    reason: str


def mine(timeout_s: float = OWN_JOB_S) -> dict[str, Line] | None:
    """This user's jobs that Slurm still knows, by their IDs; one call. None if Slurm is not there
    or does not answer.
    """
    try:
        asked = _call(
            "squeue",
            "--me",
            "--noheader",
            "--array",
            "--states=all",
            "--format=%i|%T|%S|%N|%L|%Q|%r",
            timeout_s=timeout_s,
            again=False,
        )
    except OSError:
        return None
    except subprocess.TimeoutExpired:
        print(
            f"Slurm has not answered within {timeout_s:g} s: the states of jobs are not known",
            file=sys.stderr,
        )
        return None
    if asked.returncode:
        return None
    jobs = {}
    for line in asked.stdout.splitlines():
        job, state, start, nodes, left, priority, reason = line.split("|", 6)
        left_s = durations.seconds(left)
        jobs[job] = Line(state, start, nodes, left_s, priority == "0", _reason(reason))
    return jobs


def _reason(text: str) -> str:
    return "" if text in ("None", "(null)") else text


def said(error: Exception) -> str:
    """What a command of Slurm that failed has said, in one line."""
    return shown(" ".join(str(getattr(error, "stderr", "") or error).split()), 300)


def requeue(job_id: str, restarts: int) -> None:
    """Requeues a job that has been requeued ``restarts`` times. Raises OSError and SubprocessError,
    unless Slurm has done it anyway.
    """
    try:
        change("requeue", job_id)
    except subprocess.SubprocessError:
        with contextlib.suppress(MachineError):
            job = find(job_id)
            if job and job.after_start(restarts) in (Next.requeued, Next.held):
                return
        raise


def nodes() -> set[str]:
    """The names of all nodes of the cluster."""
    return set(_answer("sinfo", "--noheader", "--Node", "--format=%N").split())


def partition(name: str) -> dict[str, str]:
    """The fields of a partition by their names, such as MaxTime; {} if Slurm does not answer. name:
    "" for the default one.
    """
    blocks = _answer("scontrol", "show", "partition", *filter(None, [name])).split("\n\n")
    partitions = (dict(_WORD.findall(block)) for block in blocks)
    return next((fields for fields in partitions if name or fields.get("Default") == "YES"), {})


def cancel(job_id: str) -> None:
    """Cancels a job. Raises OSError and subprocess.SubprocessError."""
    _call("scancel", job_id).check_returncode()


def cluster_name() -> str:
    """This cluster's name, which is SLURM_CLUSTER_NAME in its jobs; "" if Slurm does not answer."""
    config = _answer("scontrol", "show", "config")
    name = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
    return name[1] if name else ""


def find(job_id: str, timeout_s: float = ANSWER_S) -> Job | None:
    """The first entry of `show`; None if Slurm does not know the job. Raises MachineError."""
    return next(iter(show(job_id, timeout_s)), None)


def describe(job: Job) -> str:
    """One line on the state of a job in the queue."""
    reason = f" ({with_advice(job.reason)})" if job.reason else ""
    if job.held:
        return f"job {job.id} is held{reason}: scontrol release {job.id} lets it start"
    start = job.fields.get("StartTime", "")
    when = f", expected to start at {start}" if job.waiting and start[:1].isdecimal() else ""
    return f"job {job.id} is {job.state.lower()}{reason}{when}"


def early_log(job: Job | None, job_id: str, root: Path) -> Path | None:
    """The log of a job that ended before it had a run directory; None if it has not ended, or if
    the log is not known.

    job: None if Slurm does not know it any more. Then the log is looked for in the repository
    ``root``, by the name that the ready scripts choose.
    """
    if job and not job.ended:
        return None
    logs = [Path(job.fields.get("StdOut", ""))] if job else root.glob(f"*-{job_id}.out")
    return next((log for log in logs if log.is_file()), None)


def with_advice(reason: str) -> str:
    """Slurm's reason for a pending job, and what it means if `ADVICE` knows it."""
    advice = next((text for pattern, text in ADVICE.items() if re.fullmatch(pattern, reason)), "")
    return f"{reason}: {advice}" if advice else reason


def parse(text: str) -> list[Job]:
    """The jobs in the output of ``scontrol show job`` (without ``-o``). Checked with Slurm 22.05,
    24.11 and 26.05.
    """
    return [_job(block) for block in re.split(r"\n\s*\n", text) if "JobId=" in block]


def gpus(tres: str) -> str:
    """The GPUs in a list of resources, in the format of sbatch's options: ``2`` or ``a100:2``; ""
    if there are none.

    tres: such as gres:gpu:2 (Slurm 22.05), gres/gpu:2 or cpu=4,gres/gpu:a100=2 (24.11).
    """
    gpu = re.compile(r"(?:^|,)(?:gres[:/])?gpu[:=]([^,]+)")
    return ",".join(gpu.findall(tres)).replace("=", ":")


def _job(block: str) -> Job:
    fields: dict[str, str] = {}
    for line in block.splitlines():
        text_field = _TEXT_FIELD.match(line.strip())
        words = line[: line.index(f"{text_field[1]}=")] if text_field else line
        fields |= dict(_WORD.findall(words))
        if text_field:
            fields[text_field[1]] = text_field[2]
    array = fields.get("ArrayJobId")
    task = fields.get("ArrayTaskId")
    status, number = map(int, fields.get("ExitCode", "0:0").split(":"))
    return Job(
        id=f"{array}_{task}" if array and task else fields.get("JobId", ""),
        state=fields.get("JobState", ""),
        reason=_reason(fields.get("Reason", "")),
        exit_status=status or (number and 128 + number),
        restarts=int(fields.get("Restarts", "0")),
        fields=fields,
    )


def time_left_s(fields: Mapping[str, str]) -> float | None:
    """Seconds until the time limit of a job that has started, from `Job.fields`. inf means no
    limit, None means unknown.
    """
    limit = limit_s(fields)
    run_s = durations.seconds(fields.get("RunTime", ""))
    return None if limit is None or run_s is None else limit - run_s


def is_short(fields: Mapping[str, str]) -> bool:
    """Whether the time limit is below SHORT_S. The ready scripts' signal, meant for jobs of hours,
    would then come soon after the start.
    """
    seconds = limit_s(fields)
    return seconds is not None and seconds < SHORT_S


def limit_s(fields: Mapping[str, str]) -> float | None:
    """The time limit of a job, from `Job.fields`. inf means no limit, None means unknown."""
    return durations.seconds(fields.get("TimeLimit", ""))


def seconds_left(environ: Mapping[str, str]) -> float | None:
    """Seconds until Slurm ends this job, within OWN_JOB_S. inf means no limit, None means unknown;
    no exception is raised.

    The source is the controller, else SLURM_JOB_END_TIME, the end time that Slurm set when the job
    began.
    """
    job_id = directory.job_id(environ)
    if not job_id:
        return None
    with contextlib.suppress(MachineError):
        job = find(job_id, OWN_JOB_S)
        left_s = time_left_s(job.fields) if job else None
        if left_s is not None:
            return left_s
    end = environ.get("SLURM_JOB_END_TIME", "")
    return int(end) - time.time() if end.isdecimal() else None


@dataclass(frozen=True)
class Outlook:
    """The job of a run. id: "" outside Slurm. job: None if it is unknown. asked: whether Slurm
    answered. line: one line about the job.
    """

    id: str
    job: Job | None
    asked: bool
    line: str

    @property
    def is_active(self) -> bool:
        """Whether the job has processes now, according to Slurm."""
        return self.job is not None and not self.job.ended and not self.job.waiting


def of_run(run_dir: Path) -> Outlook:
    """The job that was submitted last, or the job that started the run last if only that one has
    not ended.
    """
    attempt = attempts.facts(run_dir)
    described = files.read_json(run_dir / "job.yaml") or {}
    of_attempt = attempt.get("job") or str(attempt.get("launch", "")).rpartition(".")[0]
    ids = [
        job_id
        for job_id in (str(described.get("job_id")), str(of_attempt))
        if re.fullmatch(r"\d+(_\d+)?", job_id)
    ]
    if not ids:
        return Outlook("", None, False, "it is not a Slurm job")
    try:
        jobs = {job_id: job for job_id in ids if (job := find(job_id, timeout_s=OWN_JOB_S))}
    except MachineError as error:
        return Outlook(ids[0], None, False, str(error))
    chosen = newest(ids, {job_id: job.ended for job_id, job in jobs.items()})
    if not jobs:
        return Outlook(chosen, None, True, f"Slurm no longer knows job {chosen}")
    return Outlook(chosen, jobs[chosen], True, describe(jobs[chosen]))


def newest(ids: Sequence[str], ended: Mapping[str, bool]) -> str:
    """Of the job that was submitted last, and the one that started the run last: the first that has
    not ended, else the first that Slurm knows, else the last. "" if there are no ``ids``. ended: of
    those that Slurm knows.
    """
    active = [job_id for job_id in ids if not ended.get(job_id, True)]
    known = [job_id for job_id in ids if job_id in ended]
    return next(iter([*active, *known, *reversed(ids)]), "")


def after_stop(run_dir: Path, status: Mapping[str, Any]) -> str:
    """One line on a run that was stopped: what stopped it, the step at which it was saved, and what
    happens next.
    """
    outlook = of_run(run_dir)
    job = outlook.job
    why = NOT_REQUEUED.get(next_of(status))
    line = f"stopped by {status.get('reason') or 'a signal'}"
    if status.get("step"):
        line += f", saved at step {status['step']}"
    if outlook.id:
        line += f"; {outlook.line}"

    if job and job.ended:
        why = why or NOT_REQUEUED[job.after_start(0)]
    elif job and job.fields.get("BatchFlag") != "0" and not (job.state == COMPLETING and why):
        return line  # the job continues, or its batch script decides
    return f"{line}; {why or HOW_TO_RESUME}"

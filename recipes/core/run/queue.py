"""Asks Slurm about jobs: their state, what happens to them next, and whether a run is still in use. Standard library only.

No other module calls ``scontrol show job`` or ``squeue``, or decides whether a run is alive. If Slurm does not know, the process of the
run decides, else its heartbeat.
"""

import contextlib
import os
import re
import shlex
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from recipes.core import files
from recipes.core.errors import MachineError, Next, next_of
from recipes.core.place import durations
from recipes.core.run import attempt as attempts
from recipes.core.run import directory
from recipes.core.run.attempt import Attempt

# States after which a job does not start again. REVOKED is not one of them: in a federation, another cluster runs that
# job.
ENDED = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)
# States between two starts of a requeued job, or before the first start.
WAITING = frozenset(["PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"])
COMPLETING = "COMPLETING"  # the last start is ending; other fields show what happens next
ANSWER_S = 60.0
ENDING_S = 60.0  # how long to wait for a job that Slurm is ending
HEARTBEAT_S = 5.0  # time between two heartbeats of a run
WATCH_S = 4 * HEARTBEAT_S  # an attempt without a heartbeat for this long is not alive
OLD_S = 300.0  # if the last heartbeat is older, there is no wait for the next one; clocks differ by less than this
ASK_S = 20.0  # how long to wait for an answer of the controller
SHORT_S = 480.0  # in a shorter job, the 120 s of the scripts' signal are more than a quarter of its time
SQUEUE_S = 10.0  # timeout for squeue, so that waiting for an answer does not use up the remaining time
HOW_TO_RESUME = "to resume, start it again with the same run_dir="
# Why nothing starts the run again, for each outcome without a requeue.
NOT_REQUEUED = {
    Next.cancelled: f"the job was cancelled: {HOW_TO_RESUME}",
    Next.max_requeues: f"not requeued, since max_requeues= is reached: {HOW_TO_RESUME}",
    Next.no_progress: f"not requeued, since its last start completed no step: {HOW_TO_RESUME}",
    Next.requeue_failed: f"not requeued, since scontrol requeue failed: {HOW_TO_RESUME}",
    Next.not_requeued: f"not requeued by Slurm: {HOW_TO_RESUME}",
}
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


def seconds_left(environ: Mapping[str, str]) -> float | None:
    """Seconds until Slurm ends this job. inf means no limit, None means unknown.

    The source is the controller, else SLURM_JOB_END_TIME, the end time that Slurm set when the job began. The function
    raises no exception, since a controller that does not answer is no reason to end the run. It takes up to SQUEUE_S
    seconds.
    """
    if not directory.job_id(environ):
        return None
    left, end = _ask(environ, "%L"), environ.get("SLURM_JOB_END_TIME", "")
    return int(end) - time.time() if left is None and end.isdecimal() else left


def is_short(environ: Mapping[str, str]) -> bool:
    """Whether the time limit of this job is below SHORT_S.

    The ready scripts request their signal for jobs of hours. In such a short job, the signal would come soon after the
    start.
    """
    limit = _ask(environ, "%l")
    return limit is not None and limit < SHORT_S


def _ask(environ: Mapping[str, str], field: str) -> float | None:
    """A time of this job in seconds. field: the format of squeue for it. None if squeue does not give it."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(
            ["squeue", "--noheader", "--jobs", str(directory.job_id(environ)), f"--format={field}"],
            capture_output=True, text=True, timeout=SQUEUE_S,
        )  # fmt: skip
        if asked.returncode == 0 and (words := asked.stdout.split()):
            return durations.seconds(words[0])
    return None


@dataclass(frozen=True)
class Outlook:
    """The job of a run.

    id: the job ID; "" outside Slurm. job: None if Slurm does not know the job or could not be asked. asked: whether
    Slurm answered. line: one line about the job. next: what happens to the job after the newest start of the run; None
    while that start runs, or if nothing is known. submitted_since: whether this job was submitted after the job that
    started the run last.
    """

    id: str
    job: Job | None
    asked: bool
    line: str
    next: Next | None
    submitted_since: bool = False

    @property
    def is_active(self) -> bool:
        """Whether the job has processes now, according to Slurm."""
        return self.job is not None and not self.job.ended and not self.job.waiting


def of_run(run_dir: Path, queue: Queue) -> Outlook:
    """The outlook of the job that was submitted last.

    If that job has ended and the job that started the run last has not, it is the outlook of the latter.
    """
    attempt, described = attempts.facts(run_dir), files.read_json(run_dir / "job.yaml") or {}
    of_attempt = str(attempt.get("job") or str(attempt.get("launch", "")).rpartition(".")[0])
    if attempt.get("cluster", "") is None:  # outside Slurm, a number is the --rdzv-id of torchrun
        of_attempt = ""
    ids = [one for one in (str(described.get("job_id") or ""), of_attempt) if re.fullmatch(r"\d+(_\d+)?", one)]
    if not ids:
        return Outlook("", None, False, "it is not a Slurm job", None)
    try:
        found = {one: job for one in ids if (job := queue.find(one))}
    except MachineError as error:
        return Outlook(ids[0], None, False, str(error), None)
    if not found:
        return Outlook(ids[-1], None, True, f"Slurm no longer knows job {ids[-1]}", None)
    chosen, job = next(((one, job) for one, job in found.items() if not job.ended), next(iter(found.items())))
    number = str(attempt.get("launch", "")).rpartition(".")[2]
    since = bool(of_attempt) and chosen != of_attempt
    after = job.after_start(int(number) if number.isdecimal() and not since else -1)
    return Outlook(chosen, job, True, describe(job), after, since)


def after_stop(run_dir: Path, status: Mapping[str, Any], queue: Queue) -> str:
    """One line on a run that was stopped: what stopped it, the step at which it was saved, and what happens next."""
    found, recorded = of_run(run_dir, queue), next_of(status)
    saved = f"stopped by {status.get('reason') or 'a signal'}, saved at step {status.get('step')}"
    if found.job is None:  # only the status of the run is known
        why = f" ({found.line})" if found.id else ""
        if recorded in (Next.requeued, Next.held):
            lost = f": {HOW_TO_RESUME}" if found.asked else ""
            return f"{saved}; job {found.id} was requeued, and its state now is unknown{why}{lost}"
        return f"{saved}; {NOT_REQUEUED[recorded] if recorded else HOW_TO_RESUME}{'' if recorded else why}"
    if found.next in (Next.requeued, Next.held):
        return f"{saved}; {'submitted again' if found.submitted_since else 'requeued'}: {found.line}"
    if found.next:
        # The batch script has recorded why it did not requeue the job. While the script ends, Slurm shows the job like
        # a cancelled one.
        is_final = recorded not in (None, Next.requeued, Next.held) and not found.submitted_since
        return f"{saved}; {found.line}; {NOT_REQUEUED[recorded if recorded and is_final else found.next]}"
    if found.job.fields.get("BatchFlag") == "0":  # a job of salloc or srun, which nothing requeues
        return f"{saved}; {HOW_TO_RESUME}"
    return f"{saved}; {found.line}, and its batch script has not ended yet"


@dataclass(frozen=True)
class Usage:
    """Who else uses a run directory.

    problem: a line on the user, with the fix; "" if nobody uses it. note: an assumption of the check, for the log.
    """

    problem: str = ""
    note: str = ""


def check(attempt: Attempt, environ: Mapping[str, str], takeover: bool, patience_s: float = ENDING_S) -> Usage:
    """Finds who else uses the run directory of ``attempt``. An earlier start of this same job does not count.

    takeover: whether only other elements of this job's array count. A requeued job does not take over again.
    patience_s: how long to wait for a job that is ending and for a heartbeat.
    """
    takes_over = takeover and not int(environ.get("SLURM_RESTART_COUNT") or 0)
    note = ""
    for earlier in _last_attempts(attempt.run_dir, attempt.number):
        if not takes_over or share_array(directory.job_id(environ), earlier.facts().get("job")):
            found = _check_attempt(earlier, environ, patience_s)
            if found.problem:
                return found
            note = note or found.note
    return Usage(note=note)


def queued(run_dir: Path, dependency: str, environ: Mapping[str, str]) -> str:
    """For a submission: a line on the pending or running job that uses ``run_dir``. "" if no such job is known.

    Jobs that ``dependency`` waits for do not count.
    """
    found = re.findall(r"after\w+((?::\d+[\d_*]*)+)", dependency)
    awaited = {job for jobs_of in found for job in re.findall(r"\d+(?:_\d+)?", jobs_of)}

    def is_awaited(job: object) -> bool:
        return "singleton" in dependency or not {str(job), str(job).partition("_")[0]}.isdisjoint(awaited)

    submitted = (files.read_json(run_dir / "job.yaml") or {}).get("job_id")
    if submitted and not is_awaited(submitted):
        with contextlib.suppress(MachineError):
            if problem := _check_by_slurm(str(submitted), run_dir, environ, 0.0, saved=False).problem:
                return problem
    for attempt in _last_attempts(run_dir):
        job = attempt.facts().get("job")
        is_submitted = submitted is not None and job == submitted
        if not is_submitted and not is_awaited(job) and (problem := _check_attempt(attempt, environ, 0.0).problem):
            return problem
    return ""


def _last_attempts(run_dir: Path, below: int | None = None) -> list[Attempt]:
    """The attempts that may still run: the last one that has begun, and those that were opened later.

    An attempt begins only when those before it have ended. below: only attempts with lower numbers count.
    """
    found = []
    for number in attempts.numbers(run_dir):
        if below is None or number < below:
            found.append(attempt := Attempt(run_dir, number))
            if attempt.has_begun:
                break
    return found


def share_array(job: str | None, other: object) -> bool:
    """Whether two jobs are different elements of one job array."""
    mine, theirs = str(job or "").split("_"), str(other or "").split("_")
    return len(mine) == len(theirs) == 2 and mine[0] == theirs[0] and mine[1] != theirs[1]


def used_by_element(run_dir: Path, other: object) -> Usage:
    """The refusal of a run directory that another element of this job array uses."""
    return Usage(
        f"run_dir={run_dir}: element {other} of this job array uses it, and each element needs its own: "
        "launch.py makes such an array (sweep.KEY=A,B)"
    )


def _check_attempt(attempt: Attempt, environ: Mapping[str, str], patience_s: float) -> Usage:
    """Checks whether the job or the process of one attempt still runs."""
    run_dir, facts = attempt.run_dir, attempt.facts()
    own_job, job = directory.job_id(environ), facts.get("job")
    if share_array(own_job, job):
        return used_by_element(run_dir, job)
    judged = files.read_json(attempt.folder / "ended.json")
    if judged and judged.get("state") != "preempted":  # the job of a saved run may be requeued
        return Usage()
    status = directory.read_status(run_dir) or {}
    state = status.get("state") if status.get("attempt") == attempt.number else None
    if state in ("done", "failed", "incomplete"):
        return Usage()
    is_running = _is_running(facts)
    if own_job is not None and own_job == job:
        # The attempt is an earlier start of this job or another step of it. Only the process shows whether that step
        # still runs.
        if facts.get("launch") == directory.launch_id(environ) and is_running:
            return _used(run_dir, f"another step of this job (process {facts['process']['pid']})", "wait for its end")
        return Usage()
    cluster, own_cluster = facts.get("cluster"), environ.get("SLURM_CLUSTER_NAME", "")
    if cluster is not None:
        reason = f"it is a job of cluster {cluster}"
        if not own_cluster or cluster in ("", own_cluster):
            try:
                return _check_by_slurm(str(job), run_dir, environ, patience_s, saved=state == "preempted")
            except MachineError as error:
                reason = str(error)
    elif is_running is not None:
        pid, host = facts["process"]["pid"], facts["process"]["host"]
        return _used(run_dir, f"process {pid} on {host}", f"end it (kill {pid})") if is_running else Usage()
    elif job is not None and job == environ.get("TORCHELASTIC_RUN_ID"):
        return Usage()  # torchrun has restarted its ranks
    else:
        reason = "it runs on another host"
    return Usage() if state == "preempted" else _check_by_heartbeat(attempt, patience_s, reason)


def _is_running(facts: Mapping[str, Any]) -> bool | None:
    """Whether the process of an attempt runs. None if this cannot be seen from this machine or process namespace."""
    process = facts.get("process") or {}
    if not process.get("place") or process["place"] != attempts.namespace():
        return None
    started, pid = process["started"], int(process["pid"])
    return bool(started) and attempts.start_time(pid) == started and pid != os.getpid()


def _check_by_slurm(job: str, run_dir: Path, environ: Mapping[str, str], patience_s: float, saved: bool) -> Usage:
    """Checks by the state of the job in Slurm. saved: whether the attempt was stopped and saved.

    Nothing requeues a stopped attempt in an allocation of salloc, although the job itself continues, so the attempt
    counts as ended. Raises MachineError if Slurm cannot be asked.
    """
    deadline = time.monotonic() + patience_s
    while True:
        found = find(job, environ, ASK_S)
        if not found or found.ended or (found.state == COMPLETING and not patience_s):
            return Usage()
        if saved and found.fields.get("BatchFlag") == "0":
            return Usage()
        if found.state != COMPLETING or time.monotonic() > deadline:
            break
        time.sleep(1.0)
    end = f"cancel it (scancel {job})"
    if found.waiting:
        state = "was requeued and is pending" if found.restarts else "is pending"
        return _used(run_dir, f"job {job}, which {state},", end, "will use it")
    return _used(run_dir, f"job {job} ({found.state.lower()})", end)


def _check_by_heartbeat(attempt: Attempt, patience_s: float, reason: str) -> Usage:
    """Checks by the heartbeat, if no other check is possible. Takes up to `WATCH_S` seconds."""
    facts = attempt.facts()
    job, host = facts.get("job"), (facts.get("hosts") or ["unknown"])[0]
    who = f"job {job} on {host}" if job else f"a process on {host}"
    first, begin = attempts.newest_heartbeat(attempt), time.monotonic()
    while patience_s and time.time() - first < OLD_S and time.monotonic() - begin < min(WATCH_S, patience_s):
        time.sleep(1.0)
        if attempts.newest_heartbeat(attempt) > first:
            return _used(attempt.run_dir, f"{who} (its heartbeat advances; {reason})", "end it")
    return Usage(
        note=f"{attempt.run_dir}: {who} has used it, and counts as ended, since it has no heartbeat ({reason})"
    )


def _used(run_dir: Path, who: str, end: str, does: str = "uses it") -> Usage:
    return Usage(
        f"run_dir={shlex.quote(str(run_dir))}: {who} {does}: {end}, or give another run_dir; takeover=true starts anyway"
    )

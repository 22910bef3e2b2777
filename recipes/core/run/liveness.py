"""Checks whether another job or process still uses a run directory. Standard library only.

The check uses the state of the job in Slurm if it is available, else the process, else the heartbeat.
"""

import os
import re
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.core import files
from recipes.core.errors import MachineError
from recipes.core.run import rundir, scontrol

ENDING_S = 60.0  # how long to wait for a job that Slurm is ending
HEARTBEAT_S = 5.0  # time between two heartbeats of a run; the fence of the session writes them
WATCH_S = 4 * HEARTBEAT_S  # an attempt without a heartbeat for this long is not alive
OLD_S = 300.0  # if the last heartbeat is older, there is no wait for the next one; clocks differ by less than this
ASK_S = 20.0  # how long to wait for an answer of the controller


@dataclass(frozen=True)
class Usage:
    """Who else uses a run directory.

    problem: a line on the user, with the fix; "" if nobody uses it. note: an assumption of the check, for the log.
    """

    problem: str = ""
    note: str = ""


def describe_process(environ: Mapping[str, str]) -> dict[str, Any]:
    """The facts about this process that `rundir.open_attempt` records for `check`. ``cluster`` is None outside Slurm."""
    process = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
        "place": _namespace(),
    }
    return {"process": process, "cluster": environ.get("SLURM_CLUSTER_NAME", "") if rundir.job_id(environ) else None}


def _start_time(pid: int) -> str:
    """The start time of a process in kernel clock ticks. "" if there is no such process or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _namespace() -> str:
    """The boot ID of this machine and the process namespace. Process IDs can be compared only if both are the same."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def heartbeat(run_dir: Path) -> None:
    """Updates the heartbeat of the run. Rank 0 calls it every `HEARTBEAT_S` seconds. Raises OSError."""
    os.utime(run_dir / "attempt.json")


def check(run_dir: Path, environ: Mapping[str, str], takeover: bool, patience_s: float = ENDING_S) -> Usage:
    """Finds who else uses ``run_dir``. An earlier start of this same job does not count.

    takeover: whether only other elements of this job's array count. A requeued job does not take over again.
    patience_s: how long to wait for a job that is ending and for a heartbeat; 0 on a login node.
    """
    takes_over = takeover and not int(environ.get("SLURM_RESTART_COUNT") or 0)
    note = ""
    for record in rundir.attempts(run_dir):
        if not takes_over or share_array(rundir.job_id(environ), record.get("job")):
            found = _check_attempt(record, run_dir, environ, patience_s)
            if found.problem:
                return found
            note = note or found.note
    return Usage(note=note)


def queued(run_dir: Path, dependency: str, environ: Mapping[str, str]) -> str:
    """For a submission: a line on the pending or running job that uses ``run_dir``. "" if no such job is known.

    Jobs that ``dependency`` waits for do not count.
    """
    awaited = {
        job
        for jobs_of in re.findall(r"after\w+((?::\d+[\d_*]*)+)", dependency)
        for job in re.findall(r"\d+(?:_\d+)?", jobs_of)
    }
    submitted = (files.read_json(run_dir / "job.yaml") or {}).get("job_id")
    records = rundir.attempts(run_dir)
    if submitted:
        records = [{"job": submitted, "cluster": ""}, *(one for one in records if one.get("job") != submitted)]
    for record in records:
        job = str(record.get("job") or "")
        if "singleton" in dependency or {job, job.partition("_")[0]} & awaited:
            continue
        if found := _check_attempt(record, run_dir, environ, 0.0).problem:
            return found
    return ""


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


def _check_attempt(record: Mapping[str, Any], run_dir: Path, environ: Mapping[str, str], patience_s: float) -> Usage:
    """Checks one attempt of ``run_dir``. record: its content in ``attempt.json``, or the job in ``job.yaml``."""
    own_job, job = rundir.job_id(environ), record.get("job")
    if share_array(own_job, job):
        return used_by_element(run_dir, job)
    status = rundir.read_status(run_dir) or {}
    state = status.get("state") if status.get("attempt") == record.get("attempt") else None
    if state in ("done", "failed", "incomplete"):
        return Usage()
    is_running = _is_running(record)
    if own_job is not None and own_job == job:
        # The attempt is an earlier start of this job or another step of it. Only the process shows whether that step
        # still runs.
        if record.get("launch") == rundir.launch_id(environ) and is_running:
            return _used(run_dir, f"another step of this job (process {record['process']['pid']})", "wait for its end")
        return Usage()
    cluster, own_cluster = record.get("cluster"), environ.get("SLURM_CLUSTER_NAME", "")
    if cluster is not None:
        reason = f"it is a job of cluster {cluster}"
        if not own_cluster or cluster in ("", own_cluster):
            try:
                return _check_by_slurm(str(job), run_dir, environ, patience_s, saved=state == "preempted")
            except MachineError as error:
                reason = str(error)
    elif is_running is not None:
        pid, host = record["process"]["pid"], record["process"]["host"]
        return _used(run_dir, f"process {pid} on {host}", f"end it (kill {pid})") if is_running else Usage()
    elif job is not None and job == environ.get("TORCHELASTIC_RUN_ID"):
        return Usage()  # torchrun has restarted its ranks
    else:
        reason = "it runs on another host"
    return Usage() if state == "preempted" else _check_by_heartbeat(record, run_dir, patience_s, reason)


def _is_running(record: Mapping[str, Any]) -> bool | None:
    """Whether the process of an attempt runs. None if this cannot be seen from this machine or process namespace."""
    process = record.get("process") or {}
    if not process.get("place") or process["place"] != _namespace():
        return None
    started, pid = process["started"], int(process["pid"])
    return bool(started) and _start_time(pid) == started and pid != os.getpid()


def _check_by_slurm(job: str, run_dir: Path, environ: Mapping[str, str], patience_s: float, saved: bool) -> Usage:
    """Checks by the state of the job in Slurm. saved: whether the attempt was stopped and saved.

    Nothing requeues a stopped attempt in an allocation of salloc, although the job itself continues, so the attempt
    counts as ended. Raises MachineError if Slurm cannot be asked.
    """
    deadline = time.monotonic() + patience_s
    while True:
        found = scontrol.find(job, environ, ASK_S)
        if not found or found.ended or (found.state == scontrol.COMPLETING and not patience_s):
            return Usage()
        if saved and found.fields.get("BatchFlag") == "0":
            return Usage()
        if found.state != scontrol.COMPLETING or time.monotonic() > deadline:
            break
        time.sleep(1.0)
    end = f"cancel it (scancel {job})"
    if found.waiting:
        state = "was requeued and is pending" if found.restarts else "is pending"
        return _used(run_dir, f"job {job}, which {state},", end, "will use it")
    return _used(run_dir, f"job {job} ({found.state.lower()})", end)


def _check_by_heartbeat(record: Mapping[str, Any], run_dir: Path, patience_s: float, reason: str) -> Usage:
    """Checks by the heartbeat, if no other check is possible. Takes up to `WATCH_S` seconds."""
    job, host = record.get("job"), (record.get("hosts") or ["unknown"])[0]
    who = f"job {job} on {host}" if job else f"a process on {host}"
    first, begin = newest_heartbeat(run_dir), time.monotonic()
    while patience_s and time.time() - first < OLD_S and time.monotonic() - begin < min(WATCH_S, patience_s):
        time.sleep(1.0)
        if newest_heartbeat(run_dir) > first:
            return _used(run_dir, f"{who} (its heartbeat advances; {reason})", "end it")
    return Usage(note=f"{run_dir}: {who} has used it, and counts as ended, since it has no heartbeat ({reason})")


def newest_heartbeat(run_dir: Path) -> float:
    """The time of the newest heartbeat, as time.time(); 0 if there is none.

    Opening the file makes a network file system ask its server for the current time stamp.
    """
    try:
        with open(run_dir / "attempt.json", "rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0


def _used(run_dir: Path, who: str, end: str, does: str = "uses it") -> Usage:
    return Usage(
        f"run_dir={shlex.quote(str(run_dir))}: {who} {does}: {end}, or give another run_dir; takeover=true starts anyway"
    )

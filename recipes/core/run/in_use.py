"""Whether another job or process uses a run directory. Standard library only.

Slurm decides, else the process of the run, else its heartbeat.
"""

import contextlib
import os
import shlex
import time
from pathlib import Path

from recipes.core import files
from recipes.core.errors import MachineError
from recipes.core.run import attempt as attempts
from recipes.core.run import directory
from recipes.core.run.attempt import Attempt
from recipes.core.slurm import client, environment, jobstate

ENDING_S = 60.0  # how long to wait for a job that Slurm is ending
HEARTBEAT_S = 5.0  # time between two heartbeats of a run
WATCH_S = 4 * HEARTBEAT_S  # an attempt without a heartbeat for this long is not alive
# the same as seen from a machine on which a network file system shows changes later
SEEN_S = 120.0
ASK_S = 20.0  # how long to wait for an answer of the controller


def check(attempt: Attempt, environ: environment.Environ, patience_s: float = ENDING_S) -> str:
    """A line on who else uses the run directory of ``attempt``, with the fix; "" if nobody does.

    An earlier start of this same job does not count. patience_s: how long to wait for a job that is
    ending and for a heartbeat.
    """
    for earlier in attempts.every(attempt.run_dir):
        if earlier.number >= attempt.number:
            continue
        problem = _check_attempt(earlier, environ, patience_s)
        if problem or earlier.has_begun:  # it began only when those before it had ended
            return problem
    return ""


def _check_attempt(attempt: Attempt, environ: environment.Environ, patience_s: float) -> str:
    """Checks whether the job or the process of one attempt still runs."""
    run_dir = attempt.run_dir
    facts = attempt.facts()
    own_job = environment.job_id(environ)
    job = facts.get("job")
    judged = attempt.read("ended.json") or attempt.only_own(directory.read_status(run_dir))
    state = judged.get("state")
    is_saved = state == "preempted"  # its job may be requeued
    if state not in (None, "running") and not is_saved:
        return ""
    runs = is_running(facts)
    if own_job is not None and own_job == job:
        # The attempt is an earlier start of this job or another step of it. Only the process shows
        # whether that step still runs.
        if facts.get("launch") == directory.launch_id(environ) and runs:
            who = f"another Slurm step of this job (process {facts['process']['pid']})"
            return _used(run_dir, who, "wait until it ends")
        return ""
    cluster = facts.get("cluster")
    own_cluster = environment.cluster(environ)
    if cluster is not None and (not own_cluster or cluster in ("", own_cluster)):
        with contextlib.suppress(MachineError):
            return _check_by_slurm(str(job), run_dir, patience_s, is_saved)
    if cluster is None and runs is not None:
        pid = facts["process"]["pid"]
        host = facts["process"]["host"]
        return _used(run_dir, f"process {pid} on {host}", f"end it (kill {pid})") if runs else ""
    return "" if is_saved else _check_by_heartbeat(attempt, patience_s)


def is_running(facts: files.Json) -> bool | None:
    """Whether the process of an attempt runs. None if this cannot be seen from this machine or
    process namespace.
    """
    process = facts.get("process") or {}
    if not process.get("place") or process["place"] != attempts.namespace():
        return None
    started = attempts.start_time(process["pid"])
    is_same = started != "" and started == process["started"]
    return is_same and process["pid"] != os.getpid()


def is_alive(run_dir: Path, facts: files.Json, by_slurm: bool | None) -> bool:
    """Whether an attempt of a run has a process. facts: of the attempt. by_slurm: whether its job
    has processes; None if Slurm does not know, or if the job outlives its steps, as with salloc.
    """
    if by_slurm is not None:
        return by_slurm
    runs = is_running(facts)
    if runs is not None:
        return runs
    attempt = attempts.owner(run_dir) or attempts.newest(run_dir)
    beat = attempts.newest_heartbeat(attempt) if attempt else 0.0
    return time.time() - beat < SEEN_S


def _check_by_slurm(job: str, run_dir: Path, patience_s: float, saved: bool) -> str:
    """Checks by the job's state in Slurm. saved: whether it was saved; salloc does not start it
    again. Raises MachineError.
    """
    deadline = time.monotonic() + patience_s
    while (other := client.find(job, ASK_S)) and other.state == jobstate.COMPLETING:
        if time.monotonic() >= deadline:
            break
        time.sleep(1.0)
    if not other or other.ended or (other.state == jobstate.COMPLETING and not patience_s):
        return ""
    if saved and not other.has_script:
        return ""
    return _used(run_dir, f"job {job} ({other.state.lower()})", f"cancel it (scancel {job})")


def _check_by_heartbeat(attempt: Attempt, patience_s: float) -> str:
    """Checks by the heartbeat, if no other check is possible. Takes up to `WATCH_S` seconds."""
    facts = attempt.facts()
    first = attempts.newest_heartbeat(attempt)
    end = time.monotonic() + min(WATCH_S, patience_s)
    while time.monotonic() < end:
        time.sleep(1.0)
        if attempts.newest_heartbeat(attempt) > first:
            who = f"job {facts['job']}" if facts.get("job") else "a process"
            host = (facts.get("hosts") or ["unknown"])[0]
            return _used(attempt.run_dir, f"{who} on {host} (it still writes heartbeats)", "end it")
    return ""


def _used(run_dir: Path, who: str, end: str) -> str:
    return f"run_dir={shlex.quote(str(run_dir))}: {who} uses it: {end}, or give another run_dir"

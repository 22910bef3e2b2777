"""Asks Slurm about jobs, nodes and partitions, and submits, requeues and cancels jobs. Standard
library only.

No other module calls a command of Slurm. A question that fails is repeated, since a busy controller
may not answer.
"""

import contextlib
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core.errors import MachineError, Next, shown
from recipes.core.files import ROOT
from recipes.core.slurm import durations, environment, jobstate
from recipes.core.slurm.jobstate import Job
from recipes.core.variables import Environ

ANSWER_S = 60.0
AGAIN_S = (1.0, 4.0)  # pauses before a failed call is repeated
ANSWER_OF_NODE_S = 8.0
TRY_S = 120.0  # timeout for sbatch --test-only
OWN_JOB_S = 10.0  # timeout if a job that may have little time left, or a user, waits for the answer
# Variables that replace options of Slurm's commands, or change the form of the times that they
# print.
OF_COMMANDS = re.compile("(SQUEUE|SINFO|SCANCEL|SCONTROL|SACCT)_|SLURM_TIME_FORMAT$")


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
        return jobstate.parse(asked.stdout)
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
    job = re.search(rf"^(\d+) {re.escape(comment)}$", answer, re.MULTILINE)
    return job[1] if job else ""


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
        held = priority == "0"
        # the first component of a heterogeneous job, on which the run is
        job_id = job.removesuffix("+0")
        jobs[job_id] = Line(state, start, nodes, left_s, held, jobstate.reason_of(reason))
    return jobs


def said(error: Exception) -> str:
    """What a command of Slurm that failed has said, in one line."""
    return shown(" ".join(str(getattr(error, "stderr", "") or error).split()), 300)


def requeue(environ: Environ) -> None:
    """Requeues the job of this process. Raises OSError and SubprocessError, unless Slurm has done
    it anyway.
    """
    job_id = environment.job_id(environ)
    try:
        _call("scontrol", "requeue", job_id).check_returncode()
    except subprocess.SubprocessError:
        with contextlib.suppress(MachineError):
            job = find(job_id)
            next_step = job and job.after_start(environment.restarts(environ))
            if next_step in (Next.requeued, Next.held):
                return
        raise


def exclude(job_id: str, nodes: str) -> None:
    """Replaces the list of nodes that a pending job does not use. Raises OSError and
    SubprocessError.
    """
    _call("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={nodes}").check_returncode()


def nodes() -> set[str]:
    """The names of all nodes of the cluster."""
    return set(_answer("sinfo", "--noheader", "--Node", "--format=%N").split())


@dataclass(frozen=True)
class Partition:
    """What a partition allows. max_time: as Slurm prints it; "" if unknown. max_nodes: None means
    no limit, or unknown.
    """

    name: str
    max_time: str
    max_nodes: int | None


def partition(name: str) -> Partition | None:
    """The limits of a partition; None if Slurm does not answer. name: "" for the default one."""
    answer = _answer("scontrol", "show", "partition", *filter(None, [name]))
    for block in answer.split("\n\n"):
        fields = dict(jobstate.WORD.findall(block))
        if name or fields.get("Default") == "YES":
            nodes = fields.get("MaxNodes", "")
            return Partition(
                fields.get("PartitionName", ""),
                fields.get("MaxTime", ""),
                int(nodes) if nodes.isdecimal() else None,
            )
    return None


def cancel(job_id: str) -> None:
    """Cancels a job. Raises OSError and subprocess.SubprocessError."""
    _call("scancel", job_id).check_returncode()


def kill_step_later(environ: Environ) -> None:
    """Ends the step of this process one second later, also if this process has ended by then. Does
    nothing if Slurm cannot be called.
    """
    kill = 'sleep 1; exec scancel --signal=KILL "$0"'
    with contextlib.suppress(OSError):
        subprocess.Popen(["sh", "-c", kill, environment.step(environ)], start_new_session=True)


def kill_steps(job_id: str) -> None:
    """Ends all steps of a job, but not its batch script, soon after this call: scancel waits ten
    seconds for a node that does not answer. Does nothing if Slurm does not answer.
    """
    answer = _answer("squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i")
    steps = [step for step in answer.split() if step.rpartition(".")[2].isdecimal()]
    with contextlib.suppress(OSError):
        if steps:
            subprocess.Popen(["scancel", "--signal=KILL", *steps], start_new_session=True)


def silent_nodes(nodes: Sequence[str]) -> set[str]:
    """The nodes of this job that start no task within ANSWER_OF_NODE_S. Slurm may believe for
    minutes that they are up. If not even one node starts a task, none of them counts as silent: the
    controller may be busy.
    """
    command = ["timeout", "--foreground", "--signal=KILL", f"{ANSWER_OF_NODE_S}", "srun"]
    command += ["--overlap", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=0"]
    command += ["--gres=none", "--export=ALL", "--quiet"]
    calls = {
        node: subprocess.Popen([*command, f"--nodelist={node}", "true"], stderr=subprocess.DEVNULL)
        for node in nodes
    }
    silent = {node for node, call in calls.items() if call.wait()}
    return silent if len(silent) < len(calls) else set()


def can_submit() -> bool:
    """Whether this machine can submit jobs."""
    return shutil.which("sbatch") is not None


def require_commands() -> None:
    """Raises MachineError if a command that submits and runs jobs is missing."""
    for program in ("sbatch", "srun"):
        if shutil.which(program) is None:
            raise MachineError(
                f"{program} is not on the PATH: use a login node of the cluster, "
                "or launcher=local to run on this machine"
            )


def try_script(
    text: str, options: Sequence[str] = (), names: Container[str] = (), cwd: Path | None = None
) -> str:
    """What Slurm would do with a script, in one line; nothing is submitted. Raises OSError and
    subprocess.SubprocessError, with `said`.

    names: the options that the script sets itself, as for `environment.clean`. Only nodes that are
    up now count.
    """
    done = subprocess.run(
        ["sbatch", "--test-only", *options],
        input=text,
        env=environment.clean(os.environ, names),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TRY_S,
        check=True,
    )
    return one_line(done.stderr)


def submit_open_file(
    descriptor: int,
    words: Sequence[str],
    options: Sequence[str],
    variables: Mapping[str, str],
    cwd: str,
) -> str:
    """Submits the script in an open file, with its arguments ``words``, and with ``variables`` in
    its environment. Returns the ID of the job. Raises OSError and subprocess.SubprocessError.
    """
    script = f"/proc/self/fd/{descriptor}"
    done = subprocess.run(
        ["sbatch", "--parsable", *options, script, *words],
        cwd=cwd,
        env={**environment.clean(os.environ), **variables},
        capture_output=True,
        text=True,
        check=True,
        pass_fds=[descriptor],
    )
    return done.stdout.strip().partition(";")[0]


def refusal(output: str) -> str:
    """One line on why Slurm refuses a job. output: the stderr of sbatch."""
    return f"Slurm refuses this job: {one_line(output)[:300] or 'sbatch gave no reason'}"


def one_line(output: str) -> str:
    """The output of sbatch in one line, without its prefixes."""
    return " ".join(re.sub(r"sbatch: |error: |Job \d+ ", "", output).split())


def on_each_node(environ: Environ, nodes: Sequence[str] = ()) -> list[str]:
    """The beginning of a command that starts one task on each node of the job, in the folder of the
    code. The command of the task follows. nodes: only these; () for all.
    """
    count = len(nodes) or environment.num_nodes(environ)
    return _step(environ, nodes, [f"--ntasks={count}", "--ntasks-per-node=1"])


def with_all_gpus(environ: Environ, nodes: Sequence[str], options: Sequence[str]) -> list[str]:
    """As `on_each_node`, with all GPUs of each node. If the job has requested them per task, the
    node has a task for each, of which the command must end all but the first one. nodes: only
    these; () for all. options: further ones of srun.
    """
    count = len(nodes) or environment.num_nodes(environ)
    size = [f"--ntasks={count}", "--ntasks-per-node=1"]
    if own(environ).gpus_per_task:
        # Fewer tasks have only their own GPUs. With --gpus= and --overlap, the first nodes have one
        # GPU each, and after the loss of a node, srun refuses the GPUs of all (seen with 22.05).
        size = [f"--ntasks={environment.count_tasks(environ, nodes)}", "--gpu-bind=none"]
        size.append("--wait=0")  # the first tasks end much later
    return _step(environ, nodes, [*size, *options])


def _step(environ: Environ, nodes: Sequence[str], options: Sequence[str]) -> list[str]:
    count = len(nodes) or environment.num_nodes(environ)
    command = ["srun", f"--nodes={count}", "--export=ALL", "--wait=60", "--mem=0"]
    if nodes:
        command += [f"--nodelist={','.join(nodes)}", "--overlap"]
    command.append(f"--cpus-per-task={environment.cpus_per_task(environ) or 1}")
    # on a node that does not see the folder, srun alone would start the task in /tmp
    return [*command, *options, "env", "-C", str(ROOT)]


def broadcast(source: Path, target: Path) -> None:
    """Copies a file to the disk of each node of the job, from node to node. Raises MachineError."""
    done = subprocess.run(
        ["sbcast", "--force", source, target], capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        raise MachineError(f"sbcast {source}: {shown(one_line(done.stderr), 300)}")


def cluster_name() -> str:
    """This cluster's name, which is SLURM_CLUSTER_NAME in its jobs; "" if Slurm does not answer."""
    config = _answer("scontrol", "show", "config")
    name = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
    return name[1] if name else ""


def find(job_id: str, timeout_s: float = ANSWER_S) -> Job | None:
    """The first entry of `show`; None if Slurm does not know the job. Raises MachineError."""
    return next(iter(show(job_id, timeout_s)), None)


def own(environ: Environ) -> Job:
    """The job of this process; one without ID and state outside a job, or if the controller does
    not answer.
    """
    job_id = environment.allocation_id(environ)
    jobs: list[Job] = []
    if job_id:
        with contextlib.suppress(MachineError):
            jobs = show(job_id)
    # by its own number, since the variables of an array may belong to another job
    return next((job for job in jobs if job.number == job_id), Job("", ""))


def seconds_left(environ: Environ) -> float | None:
    """Seconds until Slurm ends this job, within OWN_JOB_S. inf means no limit, None means unknown;
    no exception is raised.

    The source is the controller, else SLURM_JOB_END_TIME, the end time that Slurm set when the job
    began.
    """
    job_id = environment.job_id(environ)
    if not job_id:
        return None
    with contextlib.suppress(MachineError):
        job = find(job_id, OWN_JOB_S)
        if job and job.left_s is not None:
            return job.left_s
    end = environment.end_time(environ)
    return None if end is None else end - time.time()

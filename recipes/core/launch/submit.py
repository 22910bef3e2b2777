"""Submits a job to Slurm through submitit and waits for its result, with or without accounting.

Does not import torch.
"""

import contextlib
import dataclasses
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.core import errors, files
from recipes.core.config import job_keys
from recipes.core.errors import MachineError
from recipes.core.launch import scripts
from recipes.core.launch.jobs import Job
from recipes.core.run import outlook, rundir, scontrol

if TYPE_CHECKING:
    import submitit

# Variables that users and sites set for sbatch, with the option of sbatch that each stands for ("" for none). Such a
# variable takes precedence over a directive in a script.
KEPT = {
    "SLURM_CONF": "",
    "SLURM_CLUSTERS": "clusters",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu",
    "SBATCH_MEM_PER_GPU": "mem-per-gpu",
    "SBATCH_MEM_PER_NODE": "mem",
    **{
        f"SBATCH_{name.upper()}": name
        for name in ("account", "clusters", "constraint", "partition", "qos", "reservation")
    },
}
LEFT = re.compile(
    r"(SLURM|SRUN|SBATCH|PMI|PMIX(?!_MCA)|OMPI_COMM|TORCHELASTIC)_.*|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))|NODE_RANK|MASTER_ADDR"
    r"|RECIPES_(BATCH|BY_CLOCK|CODE|LAUNCH|LEFT_OUT|LISTEN_FD|RESUBMITS|SCRIPT|SOURCE)"
)


@dataclass(frozen=True)
class Submitted:
    """A job that Slurm has accepted.

    log: the file with the output of rank 0 and srun's own messages. elements: the elements of a job array; run_dir and
    log are then those of the first element.
    """

    job_id: str
    run_dir: Path
    log: Path
    elements: tuple["Submitted", ...] = ()


def clean_environment(environ: Mapping[str, str], said: Container[str] = ()) -> dict[str, str]:
    """``environ`` without the variables of an outer allocation or of a launcher in it. The variables in `KEPT` remain.

    said: the options of sbatch that the job sets itself; a variable for such an option is removed.
    """
    kept = {name for name, option in KEPT.items() if option not in said}
    return {name: value for name, value in environ.items() if name in kept or not LEFT.fullmatch(name)}


@contextlib.contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Replaces the environment of this process within the ``with`` block, since submitit starts sbatch with it."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def ask_controller(job: Job, text: str) -> str:
    """Slurm's answer on when ``job`` would start. text: the script to submit.

    Raises MachineError if the job could never start.
    """
    try:
        asked = subprocess.run(
            ["sbatch", "--test-only"],
            input=text, env=clean_environment(os.environ, scripts.directives(job)), cwd=job.root, capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise MachineError(
            "Slurm's controller has not answered within 120 s: ask for its state with scontrol ping"
        ) from None
    every = _nodes()
    if asked.returncode != 0:
        # --test-only checks only the nodes that are up now. sbatch also accepts a job that has to wait for other nodes.
        if waits := _waits_for(job, every):
            return f"to start when nodes that are down, drained or do not answer are back: {waits}"
        raise MachineError(_refusal(asked.stderr, "sbatch --test-only", job))
    partitions = [[nodes for nodes in every if nodes.partition == name] for name in _partitions(job, every)]
    over = [phrase for there in partitions for phrase in _over_limits(job, there)]
    if over and all(_over_limits(job, there) for there in partitions) and not _qos(job):
        # Slurm accepts such a job with EnforcePartLimits=NO, its default.
        raise MachineError(
            f"Slurm would take this job and never start it: {'; '.join(over)}; where a QOS lifts that limit, give qos="
        )
    closed = [there[0] for there in partitions if there and there[0].state != "up"]
    shut = f"; but partition {closed[0].partition} is {closed[0].state}: the job waits until it is up" if closed else ""
    unknown = (f"; Slurm does not know job {one}, whose dependency counts as met" for one in _unknown_dependencies(job))
    return _words(asked.stderr) + shut * (len(closed) == len(partitions)) + "".join(unknown)


def _qos(job: Job) -> str:
    return dict(job.directives).get("qos") or os.environ.get("SBATCH_QOS", "")


def _unknown_dependencies(job: Job) -> list[str]:
    """The jobs that ``job`` depends on and that Slurm does not know or no longer knows.

    Slurm 22.05 treats such a dependency as met.
    """
    ids = re.findall(r":(\d+)", dict(job.directives).get("dependency", ""))
    return [one for one in ids if not scontrol.find(one, _of_its_cluster(os.environ))]


def _words(said: str) -> str:
    """The output of sbatch in one line, without its prefixes."""
    return " ".join(re.sub(r"sbatch: |error: |Job \d+ ", "", said).split())


def _refusal(said: str, by: str, job: Job) -> str:
    reasons = [_words(said)[:300] or f"{by} gave no reason", *_beyond_limits(job, _nodes()), *_beyond_arrays(job)]
    return f"Slurm refuses this job: {'; '.join(reasons)}"


@dataclass(frozen=True)
class Nodes:
    """Nodes of a partition with the same resources.

    state: the state of the partition in sinfo's format: up, down, drain or inact. time_limit, size: the limits for a
    job in the partition, in sinfo's format. count: number of nodes. cpus: CPUs of each node that a job may use. gres:
    resources of each node, including GPUs ("gpu:a100:4"). names: a list of hosts.
    """

    partition: str
    state: str
    time_limit: str
    size: str
    count: int
    cpus: int
    gres: str
    names: str
    is_default: bool = False

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


NODES = "%P|%a|%l|%s|%D|%c|%B|%G|%N"  # the format for sinfo -o


def _ask(*command: str) -> str:
    """The stdout of a Slurm command; "" if it fails or does not answer within 60 s."""
    environ = {k: v for k, v in _of_its_cluster(os.environ).items() if not k.startswith("SINFO_")}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True).stdout
    return ""


# sinfo's short names of the states in which Slurm starts no job on a node. "*" after any state means that the node does
# not answer.
AWAY = re.compile(r"(down|drain|drng|failg?|inval|maint|unk)\W*|.*\*")


def _nodes(away: bool = False) -> list[Nodes]:
    """All nodes of all partitions, or with ``away`` only those that are not available; [] if Slurm does not answer."""
    rows = [line.split("|") for line in _ask("sinfo", "-h", "-e", "-o", f"{NODES}|%t" if away else NODES).splitlines()]
    if away:
        rows = [row[:-1] for row in rows if AWAY.fullmatch(row[-1])]
    found = []
    for name, state, limit, size, count, cpus, most, gres, names in (row for row in rows if len(row) == 9):
        of_each = min(int(cpus.rstrip("+")), int(most) if most.isdecimal() else sys.maxsize)  # "64+" where nodes differ
        found.append(Nodes(name.rstrip("*"), state, limit, size, int(count), of_each, gres, names, name.endswith("*")))
    return found


def _partitions(job: Job, every: list[Nodes]) -> list[str]:
    """The partitions that ``job`` requests, else the default partition; [] if there is none."""
    default = next((nodes.partition for nodes in every if nodes.is_default), "")
    asked = dict(job.directives).get("partition") or os.environ.get("SBATCH_PARTITION") or default
    return asked.split(",") if asked else []


def _over_limits(job: Job, there: list[Nodes]) -> list[str]:
    """One phrase for each request of ``job`` that exceeds a job limit of the partition.

    there: the nodes of the partition.
    """
    if not there:
        return []
    found, name = [], there[0].partition
    limit, (least, _, most) = there[0].time_limit, there[0].size.rpartition("-")
    if re.fullmatch(job_keys.TIME, limit) and job.minutes > job_keys.minutes(limit):
        found.append(f"time= is {job.minutes} minutes, partition {name} allows {limit}")
    if most.isdecimal() and job.nodes > int(most):
        found.append(f"nodes={job.nodes}, partition {name} allows {most} for a job")
    least = least or most  # sinfo shows a single number if both are equal
    if least.isdecimal() and 0 < job.nodes < int(least):
        found.append(f"nodes={job.nodes}, a job in partition {name} must have at least {least}")
    return found


def _beyond_nodes(job: Job, name: str, there: list[Nodes]) -> str:
    """A phrase on the request of ``job`` that the nodes of a partition cannot satisfy; "" if they can.

    name, there: the partition.
    """
    kind, has = job.gpu_type, f"partition {name} has {', '.join(map(str, there))}"
    if job.ranks and job.gpus_per_node and job.ranks > sum(nodes.count * nodes.gpus(kind) for nodes in there):
        return f"gpus={job.ranks}, {has}"
    if job.ranks and job.ranks > sum(nodes.count * (nodes.cpus // job.cpus_per_rank) for nodes in there):
        return f"gpus={job.ranks} (CPUs of each: {job.cpus_per_rank}), {has}"
    if sum(nodes.count for nodes in there if nodes.fits(job)) < max(1, job.nodes):
        gpus = f"{kind + ' ' if kind else ''}GPUs: {job.gpus_per_node}, " if job.gpus_per_node else ""
        cpus = job.ranks_per_node * job.cpus_per_rank
        return f"nodes={max(1, job.nodes)} (of each: {gpus}CPUs: {cpus}), {has}"
    return ""


def _beyond_limits(job: Job, every: list[Nodes]) -> list[str]:
    """One phrase for each request of ``job`` that exceeds its partitions; [] if Slurm does not answer."""
    known = dict.fromkeys(nodes.partition for nodes in every)
    if every and not _partitions(job, every):
        return [f"there is no default partition: give partition=, one of {', '.join(known)}"]
    found = []
    for name in _partitions(job, every) if every else ():
        there = [nodes for nodes in every if nodes.partition == name]
        if not there:
            found.append(f"there is no partition {name}, only {', '.join(known)}")
            continue
        found += _over_limits(job, there)
        found += filter(None, [_beyond_nodes(job, name, there)])
    return found


def _beyond_arrays(job: Job) -> list[str]:
    largest = re.search(
        r"^MaxArraySize\s*= (\d+)", _ask("scontrol", "show", "config") if job.elements else "", re.MULTILINE
    )
    if largest and len(job.elements) > int(largest[1]):
        return [f"the sweep has {len(job.elements)} runs, and an array may have {largest[1]} here"]
    return []


def _waits_for(job: Job, every: list[Nodes]) -> str:
    """The nodes that are down, drained or do not answer, if ``job`` needs them to start.

    Returns "" if it does not need them or could not start even with them.
    """
    if not every or _beyond_limits(job, every):
        return ""
    away = _nodes(away=True)
    asked = _partitions(job, every)
    for name in asked:
        up = [nodes for nodes in every if nodes.partition == name]
        up += [dataclasses.replace(nodes, count=-nodes.count) for nodes in away if nodes.partition == name]
        if not _beyond_nodes(job, name, up):
            return ""
    return ", ".join(dict.fromkeys(nodes.names for nodes in away if nodes.partition in asked))


def submit(job: Job, python: str, run_dir: str) -> Submitted:
    """Submits ``job`` through submitit and does not wait.

    run_dir: the given run directory as an absolute path; "" for the default. Each task of submitit replaces itself with
    the recipe through exec. Therefore neither its signal handler nor the objects that it unpickles remain between Slurm
    and the ranks. Raises MachineError with Slurm's reason.
    """
    import submitit

    folder = files.private_folder(job.root, "submitit")  # the job files in it are pickles, which a job executes
    parent = Path(run_dir) if run_dir else job.root / "runs" / job.recipe
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"run_dir={parent}: cannot be made ({error.strerror}); give another run_dir=") from None
    _, inside = scripts.enter(job, python)
    commands = [
        [*inside, "-u", "-m", f"recipes.{job.recipe}", *job.arguments, *words] for words in job.elements or [()]
    ]
    with _environment(clean_environment(os.environ, scripts.directives(job))), files.umask(0o077):
        try:
            executor = _executor(job, python)
            with contextlib.redirect_stderr(io.StringIO()):  # submitit also prints the errors that it raises
                if job.elements:
                    taken = executor.map_array(os.execvp, [inside[0]] * len(commands), commands)
                else:
                    taken = [executor.submit(os.execvp, inside[0], commands[0])]
        except (submitit.core.utils.FailedSubmissionError, submitit.core.utils.FailedJobError) as error:
            raise MachineError(_refusal(str(error), "sbatch", job)) from None
        except OSError as error:
            raise MachineError(f"{folder}: cannot be written ({error.strerror}): {rundir.FIX_JOB_FILES}") from None
    script, found = Path(taken[0].paths.submission_file), []
    for number, (one, command) in enumerate(zip(taken, commands, strict=True)):
        each = job
        if job.elements:
            each = dataclasses.replace(job, arguments=(*job.arguments, *job.elements[number]), elements=(), parallel=0)
        typed = f"{run_dir}/{number}" if run_dir and job.elements else run_dir
        found.append(
            Submitted(
                str(one.job_id),
                _note(each, str(one.job_id), typed, script, command, Path(one.paths.stdout)),
                Path(one.paths.stdout),
            )
        )
    if not job.elements:
        return found[0]
    return dataclasses.replace(found[0], job_id=found[0].job_id.partition("_")[0], elements=tuple(found))


def submission_text(job: Job, python: str) -> str:
    """The text of the script that `submit` submits."""
    executor = _executor(job, python)
    if job.elements:
        executor.parameters["map_count"] = len(job.elements)
    # submitit 1.5 has no public function that returns the text without submitting it.
    return str(executor._make_submission_file_text(executor._submitit_command_str, ""))


def _executor(job: Job, python: str) -> "submitit.SlurmExecutor":
    import submitit

    for program in ("sbatch", "srun"):
        if shutil.which(program) is None:
            raise MachineError(
                f"there is no Slurm on this machine (no {program} on the PATH): launcher=local runs the recipe here"
            )
    # With pyxis, submitit's own process runs in the container too.
    inside = scripts.enter(job, python)[1] if job.container and job.container.runtime == "pyxis" else [python]
    executor = submitit.SlurmExecutor(folder=job.root / "runs/submitit", python=shlex.join(inside))
    executor.update_parameters(**scripts.submitit_parameters(job, python))
    return executor


def _note(job: Job, job_id: str, run_dir: str, script: Path, command: list[str], log: Path) -> Path:
    """Writes the submitted script and job.yaml, with the path of the log, to the run directory.

    Returns the run directory.
    """
    where = rundir.choose(run_dir, job.recipe, job_id, job.root)
    where = rundir.for_examination(where) if job.recipe == "doctor" else where
    described = {
        "job_id": job_id,
        **dataclasses.asdict(job),
        "root": str(job.root),
        "command": command,
        "log": str(log),
    }
    described["code"] = str(job.code) if job.code else None
    try:
        where.mkdir(parents=True, exist_ok=True)
        text = script.read_bytes()
        files.write_whole(where / "job.sh", lambda file: file.write(text))  # replaces a planted symbolic link
        files.write_json(where / "job.yaml", described)
    except OSError as error:  # the job is already in the queue and will fail with the same error
        print(f"run_dir={where}: cannot be written ({error.strerror}); job {job_id} will fail there", file=sys.stderr)
    return where


def _of_its_cluster(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for a command that asks about a job.

    sbatch reads SBATCH_CLUSTERS; the other commands read SLURM_CLUSTERS.
    """
    cluster = environ.get("SBATCH_CLUSTERS", "")
    is_one = bool(cluster) and "," not in cluster and cluster != "all"
    return {**({"SLURM_CLUSTERS": cluster} if is_one else {}), **environ}


def wait_for_all(submitted: Submitted) -> int:
    """Waits for each element of an array.

    Returns the exit status of the first element whose exit status is not 0, else 0.
    """
    codes = [wait(element, show=False) for element in submitted.elements]
    return next((code for code in codes if code), errors.EXIT_DONE)


def wait(submitted: Submitted, patience_s: float = 300.0, show: bool = True) -> int:
    """Waits for the job to end and returns its exit status. show: whether to print rank 0's log while waiting.

    patience_s: how long to ask again, in seconds, if the controller does not answer. Raises MachineError after this
    time.
    """
    shown, interval_s, silent_since, waits = 0, 0.5, 0.0, (False, 0)
    while True:
        job = None
        try:
            job = scontrol.find(submitted.job_id, _of_its_cluster(os.environ))
            state, code = (job.state, job.exit_status) if job else ("", 0)
            silent_since = 0.0
            if job and job.never_starts:
                why = f"its dependency {job.fields.get('Dependency')} cannot be met"
                print(
                    f"job {submitted.job_id} never starts: {why}; remove it: scancel {submitted.job_id}",
                    file=sys.stderr,
                )
                return errors.EXIT_MACHINE
        except MachineError as error:
            if not silent_since:
                print(f"{error}; the job goes on, and is asked after for {patience_s:g} s more", file=sys.stderr)
            state, code, silent_since = "UNKNOWN", 0, silent_since or time.monotonic()
            if time.monotonic() - silent_since > patience_s:
                raise MachineError(f"job {submitted.job_id} goes on, but {error}") from None
        shown = _follow(submitted.log, shown) if show else 0
        if job and job.waiting and (job.held, job.restarts) != waits:
            waits = (job.held, job.restarts)
            print(scontrol.describe(job), file=sys.stderr)
        if state in scontrol.ENDED or state == "":
            break
        time.sleep(interval_s)
        interval_s = min(5.0, interval_s * 1.1)  # reduces the load on the controller
    if show:
        time.sleep(0.2)
        _follow(submitted.log, shown)
    status = _status(submitted)
    if state == "COMPLETED" or (not state and status and status["state"] == "done"):
        print(f"job {submitted.job_id}: completed; run directory {submitted.run_dir}")
        return rundir.exit_code(status, code)
    reason = f": {status['reason']}" if status and status["reason"] else ""
    if status and status["state"] == "preempted":
        reason = f": {outlook.after_stop(submitted.run_dir, status, scontrol.Queue(_of_its_cluster(os.environ)))}"
    print(f"job {submitted.job_id}: {state.lower() or 'ended'}{reason}; log {submitted.log}", file=sys.stderr)
    return rundir.exit_code(status, code) or errors.EXIT_CRASH


def _status(submitted: Submitted) -> dict[str, Any] | None:
    """The content of ``status.json`` if it is of this job; else None. The run directory may contain an older status."""
    for run_dir in (submitted.run_dir, submitted.run_dir / rundir.EVALUATION):
        attempt = rundir.owner(run_dir)
        if attempt and str(attempt["launch"]).startswith(f"{submitted.job_id}."):
            return rundir.read_status(run_dir)
    return None


def _follow(log: Path, shown: int) -> int:
    """Copies the content of ``log`` after byte ``shown`` to stdout. Returns the new position."""
    try:
        with open(log, "rb") as file:
            file.seek(shown)
            text = file.read()
    except FileNotFoundError:
        return shown
    sys.stdout.flush()
    sys.stdout.buffer.write(text)
    sys.stdout.flush()
    return shown + len(text)

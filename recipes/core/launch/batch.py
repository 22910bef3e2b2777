"""The steps of a batch script before and after srun.

Command: ``python -m recipes.core.launch.batch begin|examine|finish RECIPE …``.

``begin RECIPE WORDS`` checks the keys before any rank starts. An invalid key gives one line and exit status 2.
Otherwise it records what was submitted, and writes lines for the script's shell to the file descriptor $RECIPES_LINES.
These lines change to the folder of the snapshot, and set the words with absolute paths and the command prefix of the
ranks.
``examine RECIPE RESUBMITS WORDS`` runs the doctor on the nodes of the job. If some nodes are bad, it submits the job
again without them if resubmits are left, and exits with status 3.
``finish RECIPE STATUS WORDS`` reads the run's ``status.json``, since srun's own status can be masked. It requeues a
preempted job, prints how the run ended, and exits with the exit status of the run.

This module does not import torch.
"""

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from recipes.core import errors, files
from recipes.core.config import job_keys, parser, profiles, recipe_conf
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.run_keys import Device, RunKeys
from recipes.core.errors import Next
from recipes.core.files import ROOT
from recipes.core.launch import allocation, container, jobs, snapshot
from recipes.core.run import command_line, entry, liveness, outlook, rundir, scontrol, signals, source

DOCTOR_S = 240.0  # timeout for the doctor, which ends by itself after half of this time


def begin(recipe: str, words: list[str], environ: Mapping[str, str]) -> int:
    """Checks the keys and prepares the job. Returns 0, or 2 after one line for the first invalid key."""
    said = _said_of(environ)
    left_over = allocation.left_over(environ, said)
    environ = {name: value for name, value in environ.items() if name not in left_over}
    try:
        jobs.want_printable(ROOT, source.home(ROOT))
        settings = command_line.parse(words, recipe=recipe)
        here, folder = container_of(settings, environ), source.home(ROOT)
        typed = parser.absolute(settings.typed, (RunKeys, recipe_conf.load(recipe)[0]), folder)
        bound = jobs.container_folders(settings, typed, folder) if here else []
    except errors.ConfigError as error:
        print(f"{recipe}: {error}", file=sys.stderr)
        entry.note_refusal_of(recipe, words, errors.EXIT_CONFIG, str(error), environ)
        return errors.EXIT_CONFIG
    os.umask(int(settings.run.umask, 8))
    job, script = rundir.job_id(environ), environ.get("RECIPES_SCRIPT")
    run_dir = _run_dir(settings, environ)
    if "SLURM_JOB_ID_HET_GROUP_0" in environ and job:
        line = (
            f"this heterogeneous job has {environ.get('SLURM_HET_SIZE')} components, and its step would run on the first alone. For nodes"
            f" with different numbers of GPUs: python launch.py recipe={recipe} gpus=NUMBER, the number over all nodes"
        )
        rundir.refuse(run_dir, rundir.launch_id(environ), errors.EXIT_CONFIG, line)
        print(f"{recipe}: {line}", file=sys.stderr)
        return errors.EXIT_CONFIG
    if job and (problem := _used_by_another(settings, run_dir, job, environ)):
        print(f"{recipe}: {problem}", file=sys.stderr)
        return errors.EXIT_CONFIG
    code = _code(environ) if job else ROOT
    if job and script:
        with contextlib.suppress(OSError):  # the recipe reports a run directory that cannot be written
            run_dir.mkdir(parents=True, exist_ok=True)
            text = Path(script).read_bytes()
            # The atomic rename replaces a symbolic link that another user may have planted.
            files.write_whole(run_dir / "job.sh", lambda file: file.write(text))
            described = {
                "job_id": job,
                "recipe": recipe,
                "arguments": words,
                "code": str(code),
                "log": said.get("StdOut"),
            }
            files.write_json(run_dir / "job.yaml", described)
    by_clock = job and settings.run.stop_before_s and signals.is_short(environ)
    if by_clock:
        print(f"{recipe}: a job of a few minutes goes by the clock: saved ahead of its end, and not by SIGUSR2")
    lines = [f"cd {shlex.quote(str(code))} || exit", f"export RECIPES_SOURCE={shlex.quote(str(code))}"]
    lines += [shlex.join(["set", "--", *(f"{name}={value}" for name, value in typed.items())])]
    lines += ["export RECIPES_BY_CLOCK=1" if by_clock else "unset RECIPES_BY_CLOCK"]
    if by_clock and (left := signals.seconds_left(environ)):  # the ranks cannot ask Slurm inside a container
        lines += [f"export SLURM_JOB_END_TIME={int(time.time() + left)}"]
    lines += [f"unset {name}" for name in (*left_over, *allocation.foreign_gpu_requests(environ, said))]
    if here:
        step, inside = _enter(here, settings, bound, code, environ)
        lines += container.exports(here, profiles.env_variables(settings.run.network, settings.job.cluster))
        lines += [f"step=({shlex.join(step)})", f"inside=({shlex.join(inside)})"]
    with open(int(environ.get("RECIPES_LINES", 1)), "w", closefd=False) as shell:
        print("\n".join(lines), file=shell)
    return errors.EXIT_DONE


def _used_by_another(settings: parser.Settings, run_dir: Path, job: str, environ: Mapping[str, str]) -> str:
    """A line on who else uses the run directory, which is also recorded as a refusal; "" if nobody uses it.

    The ranks check this again, but in a container they may have no scontrol.
    """
    if not settings.config.starts_a_run:
        return ""
    place = rundir.for_evaluation(run_dir) if settings.config.evaluate else run_dir
    submitted = (files.read_json(run_dir / "job.yaml") or {}).get("job_id")
    if liveness.of_array(job, submitted):  # the other element has started, but its run has not begun yet
        found = liveness.element(run_dir, submitted)
    else:
        found = liveness.look(place, environ, settings.run.takeover)
    if found.note:
        print(f"{settings.recipe}: {found.note}")
    if found.problem:
        rundir.refuse(run_dir, rundir.launch_id(environ), errors.EXIT_CONFIG, found.problem)
    return found.problem


def _run_dir(settings: parser.Settings, environ: Mapping[str, str]) -> Path:
    """The folder that contains the status of this job's run."""
    run_dir = rundir.choose(settings.run.run_dir, settings.recipe, rundir.job_id(environ), ROOT)
    return rundir.for_examination(run_dir) if settings.recipe == "doctor" else run_dir


def container_of(settings: parser.Settings, environ: Mapping[str, str]) -> container.Container | None:
    """The container for a job's ranks, from the environment variables, else from the site's profile.

    Returns None if there is none. Raises ConfigError.
    """
    cluster = settings.job.cluster
    profile = profiles.cluster_profile(cluster) if cluster else {}
    values = {name: profile[name] for name in job_keys.IN_IMAGE if name in profile} | profiles.in_image(environ)
    keys = parser.parse_keys(JobKeys, [f"{name}={value}" for name, value in values.items()])
    image = container.whole(keys.container, source.home(ROOT))
    return container.chosen(image, keys.container_runtime.name, keys.container_mounts)


def _enter(
    here: container.Container, settings: parser.Settings, bound: list[str], code: Path, environ: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """The options of srun for the container, and the command before a rank's Python arguments.

    The rank starts in ``code``. Raises ConfigError.
    """
    variables = profiles.env_variables(settings.run.network, settings.job.cluster)
    return container.step(here, code, bound, variables, environ, settings.run.device is not Device.cpu)


def _code(environ: Mapping[str, str]) -> Path:
    """The code that this job runs: this code if it is a snapshot, else a new snapshot of the repository.

    A link lets a requeued job find its snapshot again. The job runs the repository itself with ``snapshot=false`` or if
    no snapshot can be made.
    """
    if source.stamp(ROOT) or environ.get("RECIPES_SNAPSHOT") == "false":
        return ROOT
    try:
        code = snapshot.take(ROOT)
        snapshot.keep_for(code, environ["SLURM_JOB_ID"])
    except errors.MachineError as error:
        print(f"{error}; the job runs the code as it is, and edits of it will show", file=sys.stderr)
        return ROOT
    return code


def examine(recipe: str, resubmits: int, words: list[str], environ: Mapping[str, str]) -> int:
    """Runs the doctor on the nodes of the job.

    Returns 0 if the nodes are healthy; else 3, after submitting the job again without the bad nodes if it may. A script
    that is submitted again does not change. Therefore ``$RECIPES_RESUBMITS`` takes precedence over ``resubmits``, and
    ``$RECIPES_LEFT_OUT`` contains the nodes excluded so far.
    """
    try:
        settings = command_line.parse(words, recipe=recipe, to_start=False)
    except errors.ConfigError as error:  # begin has accepted the keys: an env file was removed since then
        print(f"{recipe}: {error}", file=sys.stderr)
        return errors.EXIT_CONFIG
    run_dir = rundir.choose(settings.run.run_dir, recipe, rundir.job_id(environ), ROOT)
    keys = {"device": settings.run.device.name, "network": settings.run.network}
    if data_dir := getattr(settings.config, "data_dir", ""):
        keys["data_dir"] = data_dir
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    options: list[str] = []
    inside = [sys.executable]
    if here := container_of(settings, environ):
        bound = jobs.container_folders(settings, settings.typed, source.home(ROOT))
        options, inside = _enter(here, settings, bound, ROOT, environ)
    step = [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--export=ALL",
        "--wait=60",
        "--mem=0",
        *options,
    ]
    if gpus := allocation.all_gpus(_said_of(environ)):  # each task of the doctor tests all GPUs of its node
        step.append(f"--gpus={gpus}")
    step += [f"--cpus-per-task={environ.get('SLURM_CPUS_PER_TASK') or 1}", *inside, "-u", "-m", "recipes.doctor"]
    try:
        (run_dir / "doctor" / "doctor.json").unlink(missing_ok=True)  # an older verdict is not valid for these nodes
    except OSError as error:
        print(
            f"{recipe}: run_dir={run_dir}: cannot be written ({error.strerror}): give another run_dir", file=sys.stderr
        )
        return errors.EXIT_MACHINE
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [*step, f"run_dir={run_dir}/doctor", *(f"{name}={value}" for name, value in keys.items() if value)],
            env={name: value for name, value in environ.items() if name not in allocation.ASKS_FOR_GPUS},
            timeout=DOCTOR_S,
            cwd=ROOT,
        )
    found = files.read_json(run_dir / "doctor" / "doctor.json")
    if found and found["healthy"]:
        return errors.EXIT_DONE
    told = environ.get("RECIPES_RESUBMITS", "")
    left = int(told) if told.isdecimal() else resubmits
    if not found:
        what = "the doctor gave no verdict, so nothing was trained: the lines above say why"
    elif not found["exclude"]:
        what = "not healthy, and no node can be left out to mend it: the lines above say what to do"
    elif left <= 0:
        what = f"bad nodes: {','.join(found['exclude'])}; not submitted again, since max_resubmits is used up"
    else:
        what = f"bad nodes: {','.join(found['exclude'])}; {_submit_without(found['exclude'], run_dir, words, left - 1, environ)}"
    rundir.refuse(run_dir, rundir.launch_id(environ), errors.EXIT_MACHINE, what)
    print(f"{recipe}: {what}", file=sys.stderr)
    return errors.EXIT_MACHINE


def _submit_without(bad: list[str], run_dir: Path, words: list[str], left: int, environ: Mapping[str, str]) -> str:
    """Submits this job again without the ``bad`` nodes. Returns a short phrase on the result."""
    from recipes.core.launch import submit  # imported here because no other job needs submitit

    described = files.read_json(run_dir / "job.yaml") or {}
    try:
        if "directives" in described:  # launch.py submitted this job
            names = {f.name for f in dataclasses.fields(jobs.Job)}
            job = jobs.Job(**{name: value for name, value in described.items() if name in names})
            options = dict(job.directives)
            options.pop("dependency", None)  # it was met, or this would not run
            options["exclude"] = ",".join(filter(None, [options.get("exclude", ""), *bad]))
            typed = command_line.parse(words, recipe=job.recipe, to_start=False).run.run_dir
            again = dataclasses.replace(
                job, root=Path(str(job.root)), code=Path(str(job.code)) if job.code else None, arguments=tuple(job.arguments), modules=tuple(job.modules),
                directives=tuple(options.items()), resubmits=left,
            )  # fmt: skip
            job_id = submit.submit(again, sys.executable, typed).job_id
        else:
            told = _as_submitted(environ)
            excluded = ",".join(filter(None, [told.get("exclude") or environ.get("RECIPES_LEFT_OUT", ""), *bad]))
            again_as = [f"--{name}={value}" for name, value in {**told, "exclude": excluded}.items()]
            asked = subprocess.run(
                ["sbatch", "--parsable", *again_as, str(run_dir / "job.sh"), *words],
                capture_output=True, text=True, timeout=120, check=True, cwd=source.home(ROOT),
                env={
                    **submit.clean_environment(environ), "RECIPES_RESUBMITS": str(left), "RECIPES_LEFT_OUT": excluded,
                    "RECIPES_CODE": str(ROOT),
                },
            )  # fmt: skip
            job_id = asked.stdout.strip().partition(";")[0]
    except (OSError, errors.MachineError, errors.ConfigError, subprocess.SubprocessError) as error:
        why = " ".join((getattr(error, "stderr", "") or str(error)).split())[:200]
        return f"not submitted again ({why}): submit it with exclude={','.join(bad)}"
    return f"submitted again without them, as job {job_id} ({left} more at most)"


# Options on sbatch's command line are known only from the job's variables, which also contain the values of the
# script's directives.
TOLD = {
    "SLURM_JOB_PARTITION": "partition",
    "SLURM_JOB_ACCOUNT": "account",
    "SLURM_JOB_QOS": "qos",
    "SLURM_JOB_RESERVATION": "reservation",
    "SLURM_JOB_NAME": "job-name",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
}


# The key is the name of scontrol's field, the value sbatch's option.
SAID = {"TimeLimit": "time", "Features": "constraint", "MinMemoryNode": "mem", "MinMemoryCPU": "mem-per-cpu", "ExcNodeList": "exclude", "Nice": "nice"}  # fmt: skip
# The value of --exclusive= for each value of scontrol's field Exclusive. Before Slurm 26.05, the field is
# OverSubscribe, with NO for NODE.
EXCLUSIVE = {"NODE": "exclusive", "USER": "user", "MCS": "mcs", "TOPO": "topo"}
LOGS = {"StdOut": "output", "StdErr": "error"}


def _as_submitted(environ: Mapping[str, str]) -> dict[str, str]:
    """The options of sbatch for a job with the same size, partition, account, time limit and logs as this job."""
    known = {option: environ.get(name, "") for name, option in TOLD.items()}
    said = _said_of(environ)
    known |= {option: said.get(name, "") for name, option in SAID.items()}
    if "MemPerTres" in said or known["mem-per-cpu"] == "0":
        known["mem"] = known["mem-per-cpu"] = ""
    if of_gpu := re.search(r"\bgpu:(\d+)", said.get("MemPerTres", "")):
        known["mem-per-gpu"] = f"{of_gpu[1]}M"
    if known["nice"] == "0":
        known["nice"] = ""
    shared = said.get("OverSubscribe", "")
    known["exclusive"] = EXCLUSIVE.get(said.get("Exclusive", "NODE" if shared == "NO" else shared), "")
    known["gpus"] = scontrol.gpus(said.get("TresPerJob", ""))
    known["gpus-per-task"] = scontrol.gpus(said.get("TresPerTask", ""))
    of_node = [re.sub(r"^gres[:/]", "", one) for one in said.get("TresPerNode", "").split(",")]
    known["gres"] = ",".join(one for one in of_node if not (known["gpus-per-node"] and one.startswith("gpu:")))
    known |= _logs_of(said, environ)
    if known["ntasks-per-node"]:
        known["ntasks"] = ""
    elif known["gpus-per-task"]:
        known["nodes"] = ""  # Slurm chose this number of nodes, and may choose another
    known["array"] = environ.get("SLURM_ARRAY_TASK_ID", "")  # only this run of a sweep
    return {name: value for name, value in known.items() if value not in ("", "(null)")}


def _logs_of(said: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The options of sbatch for logs beside those of this job. A log whose name contains no job ID is appended to."""
    array = environ.get("SLURM_ARRAY_JOB_ID", "")
    numbers = {f"{array}_{environ.get('SLURM_ARRAY_TASK_ID')}": "%A_%a", array: "%A"} if array else {}
    numbers |= {job: "%j"} if (job := environ.get("SLURM_JOB_ID")) else {}
    logs: dict[str, str] = {}
    for name, option in LOGS.items():
        folder, slash, file = said.get(name, "").rpartition("/")
        for number, pattern in numbers.items():
            file = re.sub(rf"(?<!\d){number}(?!\d)", pattern, file)
        path = f"{folder}{slash}{file}"
        if path and path not in logs.values():
            logs[option] = path
    if any("%" not in path for path in logs.values()):
        logs["open-mode"] = "append"
    return logs


def _said_of(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The fields of this job, by scontrol's names. Empty outside a job, or if the controller cannot be asked."""
    job = environ.get("SLURM_JOB_ID")  # not the variables of the array, which may belong to another job
    with contextlib.suppress(errors.MachineError):
        return (
            next((found.fields for found in scontrol.show(job) if found.fields.get("JobId") == job), {}) if job else {}
        )
    return {}


def finish(recipe: str, srun_status: int, words: list[str], environ: Mapping[str, str]) -> int:
    """Closes the run after its step has ended with ``srun_status``, and requeues a preempted job.

    Returns the exit status.
    """
    try:
        settings = command_line.parse(words, recipe=recipe, to_start=False)
    except errors.ConfigError as error:  # the keys were valid when the job began: an env file was removed since then
        print(f"{recipe}: ended with status {srun_status}, and is not queued again: {error}", file=sys.stderr)
        return srun_status or errors.EXIT_CONFIG
    os.umask(int(settings.run.umask, 8))
    run_dir = _run_dir(settings, environ)
    launch = rundir.launch_id(environ)
    status = rundir.close(run_dir, launch, all_ended_well=srun_status == 0)
    if refused := rundir.refusal(run_dir, launch):
        print(f"{recipe}: {refused['line']}", file=sys.stderr)
        return int(refused["exit_status"])
    if status is None and (by := rundir.taken_over_by(run_dir, launch)):
        print(f"{recipe}: {run_dir} was taken over by {by}; this job is not queued again", file=sys.stderr)
        return errors.EXIT_MACHINE
    if status is None:
        where = "the lines above"
        if "SUBMITIT_EXECUTOR" in environ:  # each rank has its own log
            where += f", or in {source.home(ROOT)}/runs/submitit/{rundir.job_id(environ)}_*_log.out,"
        print(f"{recipe}: ended with status {srun_status} before the run began; {where} say why", file=sys.stderr)
        return srun_status or errors.EXIT_CRASH
    code = rundir.exit_code(status, srun_status)
    if status["state"] == "done":
        accuracy = rundir.accuracy(rundir.of_launch(run_dir, launch))
        print(f"{recipe}: done{accuracy}; run directory {run_dir}")
    elif status["state"] == "preempted":
        line = requeue(rundir.of_launch(run_dir, launch), status["attempt"], settings.run.max_requeues, environ)
        print(f"{recipe}: saved at step {status['step']}; {line}; run directory {run_dir}")
    else:
        print(f"{recipe}: {status['state']}: {status['reason']}; logs in {run_dir}/logs", file=sys.stderr)
    return code


def requeue(run_dir: Path, attempt: int, max_requeues: int, environ: Mapping[str, str]) -> str:
    """Requeues this job if it may be requeued.

    Records what happens next in ``status.json``, and returns it as a short phrase. If Slurm has already decided, the
    function does not requeue: a cancelled job stays cancelled, and Slurm itself requeues a preempted job.
    """
    job, restarts = rundir.job_id(environ), int(environ.get("SLURM_RESTART_COUNT") or 0)
    found, failure = None, ""
    try:
        found = scontrol.find(str(job))
    except errors.MachineError as error:
        failure = str(error)
    word = found.after_start(restarts) if found else None
    if found and word in (Next.requeued, Next.held):
        rundir.note_next(run_dir, word, attempt)
        return "requeued by Slurm" if word is Next.requeued else f"requeued, but {scontrol.describe(found)}"
    if not word and restarts >= max_requeues:
        word = Next.max_requeues
    elif not word and restarts and rundir.gained_nothing(run_dir, rundir.launch_id(environ)):
        word = Next.no_progress
    if word or not found:
        rundir.note_next(run_dir, word or Next.requeue_failed, attempt)
        why = failure or f"Slurm does not know job {job}"
        return outlook.WORDS[word] if word else f"not requeued ({why}): {outlook.AGAIN}"
    is_held = found.fields.get("Priority") == "0"
    # Recorded before the requeue, since the requeue ends this job and the next attempt may begin a moment later.
    rundir.note_next(run_dir, Next.held if is_held else Next.requeued, attempt)
    try:
        subprocess.run(["scontrol", "requeue", str(job)], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        rundir.note_next(run_dir, Next.requeue_failed, attempt)
        why = " ".join((getattr(error, "stderr", "") or str(error)).split())
        return f"not requeued ({why[:200]}): {outlook.AGAIN}"
    held = f", but held: scontrol release {job} starts it" if is_held else ""
    return f"requeued (restart {restarts + 1} of at most {max_requeues}){held}"


def main(argv: list[str]) -> int:
    if other := source.other_code(ROOT, os.environ):
        print(other, file=sys.stderr)
        return errors.EXIT_CONFIG
    source.go_home(ROOT)
    if len(argv) >= 2 and argv[0] == "begin":
        return begin(argv[1], argv[2:], os.environ)
    if len(argv) >= 3 and argv[0] == "examine" and argv[2].isdecimal():
        return examine(argv[1], int(argv[2]), argv[3:], os.environ)
    if len(argv) >= 3 and argv[0] == "finish" and argv[2].isdecimal():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a requeue ends this job immediately, and finish has to print
        return finish(argv[1], int(argv[2]), argv[3:], os.environ)
    print(
        "usage: python -m recipes.core.launch.batch begin RECIPE WORDS | examine RECIPE RESUBMITS WORDS | finish RECIPE STATUS WORDS",
        file=sys.stderr,
    )
    return errors.EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The steps of a batch script before and after srun.

Command: ``python -m recipes.core.launch.batch begin|examine|finish RECIPE …``.

``begin RECIPE WORDS`` checks the keys before any rank starts. An invalid key gives one line and exit status 2.
Otherwise it records what was submitted, and writes lines for the script's shell to the file descriptor $RECIPES_LINES.
These lines change to the folder of the snapshot, and set the words with absolute paths and the command prefix of the
ranks.
``examine RECIPE RESUBMITS WORDS`` runs the doctor on the nodes of the job. If some nodes are bad, it requeues the job
without them, at most RESUBMITS times, and exits with status 3.
``finish RECIPE STATUS WORDS`` reads the run's ``status.json``, since srun's own status can be masked. It requeues a
preempted job, prints how the run ended, and exits with the exit status of the run.

This module does not import torch.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from recipes.core import errors, files
from recipes.core.config import parser, profiles, recipe_conf
from recipes.core.config.parser import Settings
from recipes.core.config.run_keys import RunKeys
from recipes.core.errors import Next
from recipes.core.files import ROOT
from recipes.core.launch import allocation, container, examination, jobs, snapshot
from recipes.core.run import command_line, entry, liveness, outlook, rundir, scontrol, signals, source


def begin(recipe: str, words: list[str], environ: Mapping[str, str]) -> int:
    """Checks the keys and prepares the job. Returns 0, or 2 after one line for the first invalid key."""
    fields = allocation.fields_of_job(environ)
    left_over = allocation.left_over(environ, fields)
    environ = {name: value for name, value in environ.items() if name not in left_over}
    repository = source.home(ROOT)
    try:
        jobs.require_printable(ROOT, repository)
        settings = command_line.parse(words, recipe=recipe)
        image = container.of_job(settings, environ)
        typed = parser.absolute(settings.typed, (RunKeys, recipe_conf.load(recipe)[0]), repository)
        bound = container.folders_of_run(settings, typed, repository) if image else []
    except errors.ConfigError as error:
        print(f"{recipe}: {error}", file=sys.stderr)
        entry.note_refusal_of(recipe, words, errors.EXIT_CONFIG, str(error), environ)
        return errors.EXIT_CONFIG
    os.umask(int(settings.run.umask, 8))
    job, run_dir = rundir.job_id(environ), _run_dir(settings, environ)
    if job and (problem := _several_components(recipe, environ) or _other_user(settings, run_dir, job, environ)):
        rundir.refuse(run_dir, rundir.launch_id(environ), errors.EXIT_CONFIG, problem)
        print(f"{recipe}: {problem}", file=sys.stderr)
        return errors.EXIT_CONFIG
    code = _code(environ) if job else ROOT
    if job and (script := environ.get("RECIPES_SCRIPT")):
        described = {"job_id": job, "recipe": recipe, "arguments": words, "root": str(repository), "code": str(code)}
        with contextlib.suppress(OSError):  # the recipe reports a run directory that cannot be written
            jobs.record(run_dir, Path(script).read_bytes(), {**described, "log": fields.get("StdOut")})
    lines = [f"cd {shlex.quote(str(code))} || exit", f"export RECIPES_SOURCE={shlex.quote(str(code))}"]
    lines += [shlex.join(["set", "--", *(f"{name}={value}" for name, value in typed.items())])]
    by_clock = job and settings.run.stop_before_s and signals.is_short(environ)
    lines += _clock_lines(recipe, environ) if by_clock else ["unset RECIPES_BY_CLOCK"]
    lines += [f"unset {name}" for name in (*left_over, *allocation.foreign_gpu_requests(environ, fields))]
    if image:
        step, inside = container.enter(image, settings, bound, code, environ)
        lines += container.exports(image, profiles.env_variables(settings.run.network, settings.job.cluster))
        lines += [f"step=({shlex.join(step)})", f"inside=({shlex.join(inside)})"]
    with open(int(environ.get("RECIPES_LINES", 1)), "w", closefd=False) as shell:
        print("\n".join(lines), file=shell)
    return errors.EXIT_DONE


def _several_components(recipe: str, environ: Mapping[str, str]) -> str:
    """A line that refuses a heterogeneous job; "" for any other job."""
    if "SLURM_JOB_ID_HET_GROUP_0" not in environ:
        return ""
    return (
        f"this heterogeneous job has {environ.get('SLURM_HET_SIZE')} components, but its step would run only on the first. For nodes"
        f" with different numbers of GPUs: python launch.py recipe={recipe} gpus=NUMBER, the total number of GPUs"
    )


def _other_user(settings: Settings, run_dir: Path, job: str, environ: Mapping[str, str]) -> str:
    """A line on the other job that uses the run directory; "" if no other job uses it.

    The ranks check this again, but in a container they may have no scontrol.
    """
    if not settings.config.starts_a_run:
        return ""
    submitted = (files.read_json(run_dir / "job.yaml") or {}).get("job_id")
    if liveness.share_array(job, submitted):  # the other element has started, but its run has not begun yet
        found = liveness.used_by_element(run_dir, submitted)
    else:
        folder = rundir.for_evaluation(run_dir) if settings.config.evaluate else run_dir
        found = liveness.check(folder, environ, settings.run.takeover)
    if found.note:
        print(f"{settings.recipe}: {found.note}")
    return found.problem


def _clock_lines(recipe: str, environ: Mapping[str, str]) -> list[str]:
    """Lines for the shell that make the ranks of a job of a few minutes stop by the clock.

    The signal of its script would stop such a job at its start.
    """
    print(f"{recipe}: this job has only a few minutes: it saves by the clock shortly before its end, not on SIGUSR2")
    lines = ["export RECIPES_BY_CLOCK=1"]
    if left := signals.seconds_left(environ):  # the ranks cannot ask Slurm inside a container
        lines += [f"export SLURM_JOB_END_TIME={int(time.time() + left)}"]
    return lines


def _run_dir(settings: Settings, environ: Mapping[str, str]) -> Path:
    """The folder that contains the status of this job's run."""
    run_dir = rundir.choose(settings.run.run_dir, settings.recipe, rundir.job_id(environ), ROOT)
    return rundir.for_examination(run_dir) if settings.recipe == "doctor" else run_dir


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
        print(f"{error}; the job runs the repository itself, so later edits affect it", file=sys.stderr)
        return ROOT
    return code


def finish(recipe: str, srun_status: int, words: list[str], environ: Mapping[str, str]) -> int:
    """Closes the run after its step has ended with ``srun_status``, and requeues a preempted job.

    Returns the exit status.
    """
    try:
        settings = command_line.parse(words, recipe=recipe, to_start=False)
    except errors.ConfigError as error:  # the keys were valid when the job began: an env file was removed since then
        print(f"{recipe}: ended with status {srun_status} and is not requeued: {error}", file=sys.stderr)
        return srun_status or errors.EXIT_CONFIG
    os.umask(int(settings.run.umask, 8))
    run_dir = _run_dir(settings, environ)
    launch = rundir.launch_id(environ)
    status = rundir.close(run_dir, launch, all_ended_well=srun_status == 0)
    if refused := rundir.refusal(run_dir, launch):
        print(f"{recipe}: {refused['line']}", file=sys.stderr)
        return int(refused["exit_status"])
    if status is None and (by := rundir.taken_over_by(run_dir, launch)):
        print(f"{recipe}: {run_dir} was taken over by {by}; this job is not requeued", file=sys.stderr)
        return errors.EXIT_MACHINE
    if status is None:
        line = f"ended with status {srun_status} before the run began; the lines above say why"
        print(f"{recipe}: {line}", file=sys.stderr)
        return srun_status or errors.EXIT_CRASH
    code = rundir.exit_code(status, srun_status)
    if status["state"] == "done":
        accuracy = rundir.accuracy(rundir.of_launch(run_dir, launch))
        print(f"{recipe}: done{accuracy}; run directory {run_dir}")
    elif status["state"] == "preempted":
        most = settings.run.max_requeues + examination.requeues(run_dir, environ)
        line = requeue(rundir.of_launch(run_dir, launch), status["attempt"], most, environ)
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
    decided = found.after_start(restarts) if found else None
    if found and decided in (Next.requeued, Next.held):
        rundir.note_next(run_dir, decided, attempt)
        return "requeued by Slurm" if decided is Next.requeued else f"requeued, but {scontrol.describe(found)}"
    if not decided and restarts >= max_requeues:
        decided = Next.max_requeues
    elif not decided and restarts and rundir.gained_nothing(run_dir, rundir.launch_id(environ)):
        decided = Next.no_progress
    if decided or not found:
        rundir.note_next(run_dir, decided or Next.requeue_failed, attempt)
        why = failure or f"Slurm does not know job {job}"
        return outlook.NOT_REQUEUED[decided] if decided else f"not requeued ({why}): {outlook.HOW_TO_RESUME}"
    is_held = found.fields.get("Priority") == "0"
    # Recorded before the requeue, since the requeue ends this job and the next attempt may begin a moment later.
    rundir.note_next(run_dir, Next.held if is_held else Next.requeued, attempt)
    try:
        subprocess.run(["scontrol", "requeue", str(job)], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        rundir.note_next(run_dir, Next.requeue_failed, attempt)
        why = " ".join((getattr(error, "stderr", "") or str(error)).split())
        return f"not requeued ({why[:200]}): {outlook.HOW_TO_RESUME}"
    held = f", but held: scontrol release {job} starts it" if is_held else ""
    return f"requeued (restart {restarts + 1} of at most {max_requeues}){held}"


def main(argv: list[str]) -> int:
    if other := source.other_code(ROOT, os.environ):
        print(other, file=sys.stderr)
        return errors.EXIT_CONFIG
    source.go_home(ROOT)
    if argv[:1] != ["begin"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent by a requeue, before its result is recorded and printed
    if len(argv) >= 2 and argv[0] == "begin":
        return begin(argv[1], argv[2:], os.environ)
    if len(argv) >= 3 and argv[0] == "examine" and argv[2].isdecimal():
        return examination.examine(argv[1], int(argv[2]), argv[3:], os.environ)
    if len(argv) >= 3 and argv[0] == "finish" and argv[2].isdecimal():
        return finish(argv[1], int(argv[2]), argv[3:], os.environ)
    print(
        "usage: python -m recipes.core.launch.batch begin RECIPE WORDS | examine RECIPE RESUBMITS WORDS | finish RECIPE STATUS WORDS",
        file=sys.stderr,
    )
    return errors.EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The steps of a batch script before and after srun. Never imports torch.

python -m recipes.core.launch.batch begin RECIPE SCRIPT WORD…   `begin`, before any rank starts
python -m recipes.core.launch.batch examine RECIPE RESUBMITS    `examination.examine`, with
                                                                doctor=true
python -m recipes.core.launch.batch stop RECIPE SIGNAL          `ask_to_stop`, when the batch shell
                                                                gets a signal
python -m recipes.core.launch.batch watch RECIPE PID            `restart.watch`, with restarts=; PID
                                                                of srun
python -m recipes.core.launch.batch step-ended RECIPE STATUS    `step_ended`, with the status of
                                                                srun
python -m recipes.core.launch.batch finish RECIPE STATUS        `finish`: the same for a script that
                                                                has only one step
"""

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

from recipes.core import files
from recipes.core.config import key_value, profiles
from recipes.core.config.parser import Settings
from recipes.core.errors import (
    EXIT_DONE,
    EXIT_MACHINE,
    ConfigError,
    Kind,
    MachineError,
    Next,
)
from recipes.core.files import ROOT
from recipes.core.launch import admission, container, examination, jobs, restart, snapshot, unpack
from recipes.core.run import attempt as attempts
from recipes.core.run import (
    command_line,
    directory,
    in_use,
    judge,
    outlook,
    saves,
    source,
    stop_note,
)
from recipes.core.run import spec as specs
from recipes.core.run.attempt import Attempt
from recipes.core.run.logs import say
from recipes.core.run.spec import Spec
from recipes.core.slurm import client, environment, jobstate
from recipes.core.slurm.jobstate import Job
from recipes.core.variables import Environ

FOR_SHELL = 3  # the file descriptor that the script's shell reads
Shell = list[tuple[str, str]]  # what the script's shell does: pairs of a verb and a value
SEEN_S = 2 * in_use.HEARTBEAT_S  # the wrappers of all nodes have read a stop note after this time
UNSAVED_REQUEUES = 2
EARLY_S = 60.0  # Slurm may send the signal before the time limit this much early


def begin(recipe: str, script: Path, words: list[str], environ: Environ) -> Shell:
    """Checks the keys, records what was submitted, and opens the attempt.

    script: the batch script. Returns what `follow` in sbatch/job.sh does. Raises ConfigError if a
    key is invalid or the job is refused, MachineError if the run directory cannot be written.
    """
    job = client.own(environ)
    left_over = environment.left_over(environ, job)
    environ = {name: value for name, value in environ.items() if name not in left_over}
    repository = source.home(ROOT)
    jobs.require_printable(ROOT, repository)
    settings = command_line.parse(words, recipe=recipe)
    umask = int(settings.run.umask, 8)
    os.umask(umask)
    _restrict_log(job, umask)

    code = ROOT
    exported: dict[str, str] = {}
    job_id = environment.job_id(environ)
    try:
        if job_id:
            run_dir = directory.choose(settings.run.run_dir, recipe, job_id, ROOT)
            attempt = _open_attempt(settings, run_dir, job, environ)
            exported[attempts.VARIABLE] = str(attempt.folder)
            admission.require_unused(settings, attempt, job, environ)
            code = _code(environ, attempt.run_dir)
            _describe(settings, run_dir, script, code, job, environ)
            if settings.config.program:
                _prepare_program(settings, attempt, job)
        spec, variables = _resolve(settings, code, job, {**environ, **exported})
        in_reserve = restart.first_nodes(spec, environ) if job_id else []
    except (ConfigError, MachineError) as error:
        attempts.refuse(exported, error)
        raise
    exported |= variables
    # bash cannot hold others
    unset = [name for name in left_over if re.fullmatch(r"\w+", name, re.ASCII)]
    unset += [] if job_id else [attempts.VARIABLE]
    shell = [("unset", name) for name in unset]
    shell += [("export", f"{name}={value}") for name, value in exported.items()]
    shell += [("cd", str(code)), *(("word", word) for word in spec.words)]
    shell += [("step", option) for option in (*spec.step, *in_reserve)]
    shell += [("watched", "1")] if spec.settings.run.restarts else []
    shell += _of_program(settings)
    return [*shell, *(("inside", word) for word in spec.inside)]


def _of_program(settings: Settings) -> Shell:
    """What the script's shell does before the ranks of a program, which need not end together."""
    if not settings.config.program:
        return []
    return [("program", settings.recipe), ("step", "--wait=0")]


def _describe(
    settings: Settings, run_dir: Path, script: Path, code: Path, job: Job, environ: Environ
) -> None:
    """Writes job.sh and job.yaml. The recipe reports a run directory that cannot be written."""
    with contextlib.suppress(OSError):
        text = script.read_bytes()
        options = jobs.options_of(job, text.decode(errors="replace"))
        if settings.run.spare or settings.run.min_nodes:  # Slurm does not show this option
            options.append("--no-kill")
        jobs.record(
            run_dir,
            text,
            environment.job_id(environ),
            settings.recipe,
            key_value.words_of(settings.typed),
            root=str(source.home(ROOT)),
            code=str(code),
            log=job.log,
            options=options,
            variables=jobs.of_site(environ),
        )


def _resolve(
    settings: Settings, code: Path, job: Job, environ: Environ
) -> tuple[Spec, dict[str, str]]:
    """What the ranks run, and the variables to export for them. code: the folder in which they
    start. environ: that of the ranks. Raises ConfigError and MachineError.
    """
    exported: dict[str, str] = {}
    image = container.of_job(settings, environ)
    step, inside = container.step(image, code, environ) if image else ([], [])
    if settings.run.environment:
        unpacked = unpack.on_all_nodes(settings.run.environment, bool(image), environ)
        inside = ["env", "-C", str(code), unpacked]
    by_clock = _is_by_clock(settings, job)
    if by_clock and job.left_s:
        exported |= environment.with_end_time(time.time() + job.left_s)
    if by_clock:  # the signal may reach a rank before Python can block it
        python = inside or ["env", "-C", str(code), sys.executable]
        inside = ["sh", "-c", 'trap "" USR2; exec "$@"', "sh", *python]
    variables = profiles.env_variables(settings.run.network, settings.job.cluster)
    words = tuple(key_value.words_of(settings.typed))
    spec = Spec(settings, words, variables, tuple(step), tuple(inside), by_clock)
    exported[specs.VARIABLE] = specs.to_text(spec)
    if image:
        exported |= container.exports(image, {**environ, **exported})
    return spec, exported


def _open_attempt(settings: Settings, run_dir: Path, job: Job, environ: Environ) -> Attempt:
    """Opens the attempt of this start of the job."""
    folder = run_dir
    if settings.config.evaluate:
        folder = directory.inside(run_dir, directory.EVALUATION)
    return attempts.open_next(folder, settings.recipe, environ, submitted=job.submitted)


def _restrict_log(job: Job, umask: int) -> None:
    """Applies the umask to the log of the job, which Slurm has made with the umask of the user's
    shell.
    """
    for path in (job.log, job.error_log):
        with contextlib.suppress(OSError), open(path, "rb", opener=files.without_links) as log:
            mode = os.fstat(log.fileno()).st_mode
            os.fchmod(log.fileno(), stat.S_IMODE(mode) & ~umask)


def _prepare_program(settings: Settings, attempt: Attempt, job: Job) -> None:
    """Writes the stop note of a program's job, and what is saved. Raises ConfigError if the keys do
    not fit the tasks.
    """
    through = jobs.through(settings)
    per_node = job.options.get("ntasks-per-node", "1")
    if through and per_node != "1":  # a ready script may start several tasks per node
        raise ConfigError(
            f"through={through}: starts one task per node, but this job has {per_node} tasks per "
            "node: submit it with --ntasks-per-node=1 before the script, and --cpus-per-task= for "
            "all ranks of a node"
        )
    with files.writing_to(attempt.run_dir, "run_dir"):
        before_s = jobs.notice_s(settings, job.limit_s)
        stop_note.write(attempt, stop_note.StopNote(before_s=before_s))
        saves.note(attempt, settings.config.saves)


def ask_to_stop(recipe: str, name: str, environ: Environ) -> int:
    """Leaves a stop note for the wrappers of a program, since the batch shell has received a
    signal. name: such as USR2.

    Slurm may send the signal before the time limit up to a minute early. The note then says when it
    is time.
    """
    attempt = attempts.given(environ)
    spec = specs.of_job(environ)
    if not attempt or not spec:
        return EXIT_DONE
    settings = spec.settings
    if not jobs.signal_s(settings):
        say(f"{recipe}: SIG{name} is ignored, since stop_before_s=0 is given", 1)
        return EXIT_DONE
    left_s = client.seconds_left(environ)
    # unknown if Slurm did not answer when the job began
    notice_s = stop_note.read(attempt).before_s or jobs.signal_s(settings)
    early_s = (left_s or 0.0) - notice_s
    is_of_limit = SEEN_S < early_s <= jobs.signal_s(settings) - notice_s + EARLY_S
    at = time.time() + (early_s if is_of_limit else SEEN_S)
    limit_at = time.time() + left_s if left_s else None
    stop_note.write(attempt, stop_note.StopNote(notice_s, f"SIG{name}", at, limit_at=limit_at))
    return EXIT_DONE


def _is_by_clock(settings: Settings, job: Job) -> bool:
    """Whether the ranks stop by the clock: the script's signal would stop a job of a few minutes at
    its start. A program of the user receives that signal itself.
    """
    if not settings.run.stop_before_s or not job.is_short or settings.config.program:
        return False
    say(
        f"{settings.recipe}: this job has only a few minutes: it ignores SIGUSR2, which comes too "
        "early, and saves shortly before its time limit",
        1,
    )
    return True


def _code(environ: Environ, run_dir: Path) -> Path:
    """The snapshot that this job runs; the repository itself with ``snapshot=false`` or if no
    snapshot can be made.
    """
    if environ.get("RECIPES_SNAPSHOT") == "false":
        return ROOT
    try:
        code = ROOT if source.stamp(ROOT) else snapshot.take(ROOT)
        snapshot.keep_for(code, environment.allocation_id(environ), run_dir)
    except MachineError as error:
        say(f"{error}; the job runs the repository itself, so later edits affect it")
        return ROOT
    return code


def finish(recipe: str, srun_status: int, environ: Environ) -> int:
    """Judges the run after the only step of its script. Returns the exit status of the run."""
    return step_ended(recipe, srun_status, environ, may_restart=False)[0]


def step_ended(
    recipe: str, srun_status: int, environ: Environ, may_restart: bool = True
) -> tuple[int, Shell]:
    """Judges the run after a step, prints how it ended, and requeues a preempted job. Returns the
    exit status of the run, and what the script's shell does.

    srun_status: may be masked, so the run's own records decide. may_restart: whether the script can
    start the ranks again.
    """
    opened = attempts.given(environ)
    spec = specs.of_job(environ)
    if not opened or not spec:  # only in a script of your own that does not call begin
        return srun_status, []
    settings = spec.settings
    os.umask(int(settings.run.umask, 8))
    job_id = environment.job_id(environ)
    run_dir = directory.choose(settings.run.run_dir, recipe, job_id, ROOT)
    # The script may have several steps.
    attempt = attempts.newest(opened.run_dir, directory.launch_id(environ)) or opened
    # what Slurm does next, if it ends this job: cancelled, preempted, requeued, time limit
    by_slurm = None
    if not attempt.has_begun:
        by_slurm = client.own(environ).after_start(environment.restarts(environ))

    outcome = judge.close(attempt, judge.End(srun_status, stopped=by_slurm is not None))
    after = ""
    has_failed = outcome.state in ("failed", "incomplete", judge.NOT_BEGUN)
    is_owner = not attempts.taken_over_by(attempt)
    if may_restart and settings.run.restarts and has_failed and is_owner:
        following = restart.plan(attempt, outcome, spec, run_dir, environ)
        after = following.line and f"; {following.line}"
        if following.attempt:
            directory.note_next(attempt.run_dir, Next.restarted, attempt.number)
            say(f"{recipe}: {outcome.state}: {outcome.reason}{after}", 1)
            say("\f", 1)  # separates the attempts in the log of the job too
            return EXIT_DONE, _again(spec, following, environ)
    most = _max_requeues(settings, attempt) + examination.requeues(run_dir, environ)
    of_hang = outcome.kind is Kind.hang and settings.config.restart_on_hang
    if of_hang and not after:
        after = f"; {requeue(attempt, outcome.step, most, environ)}"
    if outcome.state == "done":
        say(f"{recipe}: done{directory.results(attempt.run_dir)}; run directory {run_dir}", 1)
    elif outcome.state == "preempted":
        how = f"saved at step {outcome.step}" if outcome.step else "stopped"
        line = requeue(attempt, outcome.step, most, environ)
        say(f"{recipe}: {how}; {line}; run directory {run_dir}", 1)
    elif outcome.kind is Kind.stopped and by_slurm:
        after = outlook.NOT_REQUEUED.get(by_slurm, f"{by_slurm.value} by Slurm")
        say(f"{recipe}: {outcome.line}; {after}")
    elif outcome.state == judge.NOT_BEGUN or outcome.is_of_all:
        say(f"{recipe}: {outcome.line}{after}")
    else:
        logs = f"; logs in {run_dir}/logs" if (run_dir / "logs").exists() else ""
        say(f"{recipe}: {outcome.state}: {outcome.reason}{after}{logs}")
    return outcome.exit_status, []


def _again(spec: Spec, following: restart.Restart, environ: Environ) -> Shell:
    """What the script's shell does to start the ranks again."""
    attempt = following.attempt
    assert attempt
    if spec.settings.config.program:
        _prepare_program(spec.settings, attempt, client.own(environ))
    options = [*spec.step, *following.options]
    shell = [("export", f"{attempts.VARIABLE}={attempt.folder}"), ("again", "1")]
    shell += [("step", option) for option in options]
    return shell + _of_program(spec.settings)


def _max_requeues(settings: Settings, attempt: Attempt) -> int:
    """The value of ``max_requeues``. The default is UNSAVED_REQUEUES for a program that catches no
    signal and has saved nothing.
    """
    catches = files.read_json(attempt.folder / attempts.CATCHES)
    is_unsaved = catches.get("signals") == [] and saves.has_changed(attempt) is None
    if is_unsaved and "max_requeues" not in settings.typed:
        return UNSAVED_REQUEUES
    return settings.run.max_requeues


def requeue(attempt: Attempt, step: int, max_requeues: int, environ: Environ) -> str:
    """Requeues this job if it may be requeued. step: at which the attempt was saved.

    Records what happens next in ``status.json``, and returns it as a short phrase. If Slurm has
    already decided, the function does not requeue: a cancelled job stays cancelled, and Slurm
    itself requeues a preempted job.
    """
    job_id = environment.job_id(environ)
    restarts = environment.restarts(environ)
    # restarts= may have started the ranks several times since the job began
    begun = [each for each in restart.of_this_start(attempt, environ) if each.has_begun]
    first = begun[-1] if begun else attempt
    try:
        job = client.find(job_id)
        if not job:
            raise MachineError(f"Slurm does not know job {job_id}")
        decided = None if job.is_over_time else job.after_start(restarts)
        if not decided and restarts >= max_requeues:
            decided = Next.max_requeues
        elif not decided and restarts and first.number and not saves.has_progress(first, step):
            decided = Next.no_progress
        # Recorded before the requeue, since the requeue ends this job and the next attempt may
        # begin a moment later.
        directory.note_next(attempt.run_dir, decided or Next.requeued, attempt.number)
        if not decided:
            client.requeue(environ)
            return f"requeued (restart {restarts + 1} of at most {max_requeues})"
    except (MachineError, OSError, subprocess.SubprocessError) as error:
        directory.note_next(attempt.run_dir, Next.requeue_failed, attempt.number)
        return f"not requeued ({client.said(error)}): {outlook.HOW_TO_RESUME}"
    if decided is Next.held:
        return f"requeued, but {jobstate.describe(job)}"
    return outlook.NOT_REQUEUED.get(decided, "requeued by Slurm")


def _tell_shell(shell: Shell) -> None:
    with open(FOR_SHELL, "w", errors="surrogateescape") as output:
        output.write("".join(f"{verb}\0{value}\0" for verb, value in shell))


def main(argv: list[str]) -> int:
    source.go_home(ROOT)
    step, recipe, *words = argv
    if step != "begin":
        # sent by a requeue, before its result is recorded and printed
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        if step == "begin":
            _tell_shell(begin(recipe, Path(words[0]), words[1:], os.environ))
            return EXIT_DONE
        if step == "step-ended":
            status, shell = step_ended(recipe, int(words[0]), os.environ)
            _tell_shell(shell)
            return status
        if step == "watch":
            attempt = attempts.given(os.environ)
            if attempt:
                restart.watch(attempt, int(words[0]), os.environ)
            return EXIT_DONE
        if step == "stop":
            return ask_to_stop(recipe, words[0], os.environ)
        if step == "examine":
            return examination.examine(recipe, int(words[0]), os.environ)
        return finish(recipe, int(words[0]), os.environ)
    except (ConfigError, MachineError, OSError) as error:
        say(f"{recipe}: {error}")
        return getattr(error, "exit_status", EXIT_MACHINE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

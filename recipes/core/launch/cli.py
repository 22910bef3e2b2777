"""The commands of launch.py: check, print, submit, and run on this machine."""

import dataclasses
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

from recipes.core import errors, files
from recipes.core.config import help, parser, profiles, recipe_conf
from recipes.core.config.job_keys import Launcher
from recipes.core.config.parser import Settings
from recipes.core.config.run_keys import Device, RunKeys
from recipes.core.errors import ConfigError, InputError, MachineError
from recipes.core.files import ROOT
from recipes.core.launch import checks, jobs, local, scripts, snapshot, submit
from recipes.core.launch.jobs import Job
from recipes.core.launch.local import Layout
from recipes.core.place import gpus
from recipes.core.run import command_line, liveness, rundir, source, table

# The job keys that have an effect with launcher=local.
OF_LOCAL = (
    "recipe", "launcher", "cluster", "nodes", "gpus_per_node", "ranks_per_node", "gpus", "node_rank", "master",
    "container", "container_runtime", "container_mounts",
)  # fmt: skip
JOB_FILES_BYTES = 1 << 20  # free space that `check` requires for the files of a submission


def main(argv: list[str], active: str) -> int:
    """Runs one command line of launch.py and returns its exit status.

    active: the folder of the active Python environment, or "".
    """
    if not argv or {"-h", "--help", "help"} & set(argv):
        return _help(argv)
    checked = argv[:1] == ["check"]
    try:
        settings = command_line.parse(argv[1:] if checked else argv)
        spawn, home = getattr(settings.config, "spawn", 0), source.home(ROOT)
        if spawn:
            fix = f"python -m recipes.{settings.recipe} spawn={spawn}, or ranks_per_node={spawn} here"
            raise ConfigError(f"spawn={spawn}: launch.py starts the ranks itself: {fix}")
        if home != ROOT:
            raise ConfigError(f"{ROOT} is the copy of the code that a job runs: use launch.py in {home}")
        os.umask(int(settings.run.umask, 8))
        if words := settings.words_from_run():
            print(f"from the run {settings.resumes}: {words}", file=sys.stderr, flush=True)
        if os.environ.get("RECIPES_DATA"):  # the ranks start in the repository
            os.environ["RECIPES_DATA"] = os.path.abspath(_here() / os.environ["RECIPES_DATA"])
        if checked:
            return check(settings, active)
        if unlike_profile := environment(settings, active):
            print(f"launch.py: {unlike_profile}", file=sys.stderr)
        run = {Launcher.print: show, Launcher.local: run_here, Launcher.slurm: submit_job}[settings.job.launcher]
        return run(settings)
    except (ConfigError, InputError) as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return errors.EXIT_CONFIG
    except MachineError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return errors.EXIT_MACHINE
    finally:
        if checked:
            print("nothing was submitted", flush=True)


def _help(argv: list[str]) -> int:
    """Prints the keys, including those of a recipe if ``argv`` contains a valid recipe=. Returns the exit status."""
    recipe = next((word.partition("=")[2] for word in argv if word.startswith("recipe=")), "")
    try:
        errors.show(help.help_text(recipe, of_launch=True))
    except ConfigError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return errors.EXIT_CONFIG
    return 0 if argv else errors.EXIT_CONFIG


def environment(settings: Settings, active: str) -> str:
    """A phrase on the Python environment that is used instead of the profile's.

    Returns "" if the profile's environment is used or the profile names none. Raises MachineError if the profile's
    environment does not exist.
    """
    cluster = settings.job.cluster
    named = str(profiles.cluster_profile(cluster).get("environment", "")) if cluster else ""
    if not named or os.path.realpath(sys.prefix) == os.path.realpath(named):
        return ""
    if active:
        return f"the active environment {active} is used, not environment: {named} of cluster={cluster}"
    missing = (
        f"cluster={cluster}: environment: {named} has no bin/python on this machine: make that environment, or correct"
        f" env/clusters/{cluster}.yaml"
    )
    if settings.job.launcher is Launcher.print:
        return f"{missing}, where this script is used"
    raise MachineError(missing)


def check(settings: Settings, active: str) -> int:
    """launch.py check: validates the job without submitting it, and prints one line per part.

    Returns 0, or the exit status of the first failed part.
    """
    here = _here()
    job = None if settings.job.launcher is Launcher.local else jobs.describe(settings, ROOT, here)
    ranks = (job.ranks or job.nodes * job.ranks_per_node) if job else _ranks_here(settings)
    print(f"keys:   ok: {settings.recipe}, {ranks} rank{'s' if ranks > 1 else ''}", flush=True)
    copied = python = loaded = 0
    if settings.job.cluster and "environment" in profiles.cluster_profile(settings.job.cluster):
        python, _ = checks.part("python", lambda: environment(settings, active) or sys.prefix)
    if job and job.modules:
        loaded, _ = checks.part("module", lambda: checks.load_modules(ROOT, job.modules, os.environ))
    if job and settings.job.snapshot:
        copied, _ = checks.part("code", lambda: snapshot.size(ROOT))
    run_dir = _run_dir(settings)
    if settings.sweep:
        first = shlex.join(f"{name}={value}" for name, value in settings.sweep[0].items())
        print(f"sweep:  the first of {len(settings.sweep)} runs is checked: {first}", flush=True)
        run_dir = run_dir and f"{run_dir}/0"
    place, keep = rundir.choose(run_dir, settings.recipe, None, ROOT), settings.run.keep_checkpoints
    try:
        if settings.job.container:
            started, found = 0, None
            print("recipe: not tried: its Python is that of container=", flush=True)
        else:
            started, found = checks.part("recipe", lambda: checks.start(settings, place, ranks, ROOT, here))
        disk, _ = checks.part("disk", lambda: checks.room(place, keep, found))
        if job:
            taken, _ = checks.part("slurm", lambda: _ask(job, settings))
        else:
            taken, _ = checks.part("here", lambda: _said_of(local_layout(settings)))
        return python or loaded or copied or started or disk or taken
    except KeyboardInterrupt:
        return 130


def _ask(job: Job, settings: Settings) -> str:
    """Slurm's answer about the job that would be submitted or printed.

    Raises MachineError if it could not be submitted.
    """
    if settings.job.launcher is Launcher.print:
        if shutil.which("sbatch"):
            return submit.ask_controller(job, scripts.sbatch_script(job))
        return "not asked: there is no sbatch on this machine"
    _want_free(settings)
    expected = submit.ask_controller(job, submit.submission_text(job, sys.executable))
    for name in ("submitit", "code") if settings.job.snapshot else ("submitit",):
        folder = ROOT / "runs" / name
        if folder.exists():
            files.private_folder(ROOT, name)
        checks.want_writable(folder, f"runs/{name}", rundir.FIX_JOB_FILES, JOB_FILES_BYTES)
    return expected


def _want_free(settings: Settings) -> None:
    """Raises ConfigError if another pending or running job uses the given run directory."""
    run_dir = _run_dir(settings)
    if not run_dir or settings.run.takeover or not settings.config.starts_a_run:
        return
    for number in range(len(settings.sweep)) or [None]:
        path = Path(run_dir) if number is None else Path(run_dir) / str(number)
        if settings.config.evaluate:
            path = rundir.for_evaluation(path)
        problem = liveness.queued(path, settings.job.dependency, os.environ)
        if problem:
            raise ConfigError(problem)


def _said_of(layout: Layout) -> str:
    """A phrase on the ranks of launcher=local."""
    mine, every = layout.ranks[layout.node_rank], sum(layout.ranks)
    return f"{mine} of {every} ranks on this machine" if mine < every else "all ranks on this machine"


def _ranks_here(settings: Settings) -> int:
    """The number of ranks of launcher=local; 1 if this machine cannot run them, which `check` reports elsewhere."""
    try:
        return sum(local_layout(settings).ranks)
    except MachineError:
        return 1


def show(settings: Settings) -> int:
    """launcher=print: prints the sbatch script. Returns 0."""
    job = jobs.describe(settings, ROOT, _here())
    header = ["Made by launch.py. Options of sbatch before the script's name take precedence over these."]
    errors.show(scripts.sbatch_script(job, header=header).rstrip("\n"))
    return 0


def submit_job(settings: Settings) -> int:
    """launcher=slurm: asks Slurm whether it would accept the job, submits it, and prints its run directory and log.

    Returns the exit status: 0, or that of the job with ``wait=true``.
    """
    _want_free(settings)
    job = jobs.describe(settings, ROOT, _here())
    expected = submit.ask_controller(job, submit.submission_text(job, sys.executable))
    not_seen = checks.look_for_data(settings, ROOT, _here())
    if not_seen:
        print(f"launch.py: {not_seen}", file=sys.stderr)
    if settings.job.snapshot:
        job = dataclasses.replace(job, code=snapshot.take(ROOT))
    submitted = submit.submit(job, sys.executable, _run_dir(settings))
    print(f"job {submitted.job_id}: {expected}")
    elements = submitted.elements
    if elements:
        for element, words in zip(elements, job.elements, strict=True):
            print(f"{element.job_id}: {shlex.join(words)}")
        folders = shlex.join(str(element.run_dir) for element in elements)
        print(f"table of the runs: python -m recipes.report {folders}")
    else:
        print(f"run directory: {submitted.run_dir}")
        print(f"log: tail -F {shlex.quote(str(submitted.log))}")
    sys.stdout.flush()
    if not settings.job.wait:
        return 0
    try:
        if not elements:
            return submit.wait(submitted)
        code = submit.wait_for_all(submitted)
        print("\n".join(table.table([table.look(element.run_dir, time.time()) for element in elements])))
        return code
    except KeyboardInterrupt:
        print(f"\njob {submitted.job_id} continues; cancel it with: scancel {submitted.job_id}", file=sys.stderr)
        return 130


def run_here(settings: Settings) -> int:
    """launcher=local: runs one process per rank on this machine, or this machine's ranks of gpus=8,2.

    Returns the exit status.
    """
    layout = local_layout(settings)
    if settings.job.container:
        print(
            f"launch.py: container={settings.job.container}: launcher=local uses this Python, not the image",
            file=sys.stderr,
        )
    unused = [f"{name}=" for name in settings.of_job if name not in OF_LOCAL]
    if unused:
        print(f"launch.py: launcher=local does not use Slurm: {', '.join(unused)} has no effect", file=sys.stderr)
    recipe_class, _ = recipe_conf.load(settings.recipe)
    words = parser.absolute(settings.typed, (RunKeys, recipe_class), _here())
    run_dir = None
    if layout.node_rank == 0:
        run_dir = rundir.choose(_run_dir(settings), settings.recipe, None, ROOT)
        words["run_dir"] = str(run_dir)
    command = [sys.executable, "-u", "-m", f"recipes.{settings.recipe}", *(f"{k}={v}" for k, v in words.items())]
    environ = dict(os.environ, RECIPES_CLUSTER=settings.job.cluster) if settings.job.cluster else dict(os.environ)
    environ["RECIPES_SOURCE"] = str(ROOT)
    environ.pop("PYTHONSAFEPATH", None)  # python -m imports from the working directory, ROOT
    return local.run(command, layout, run_dir, ROOT, environ)


def local_layout(settings: Settings) -> Layout:
    """The number of ranks of each machine, from the keys and the GPUs of this machine.

    Raises ConfigError or MachineError.
    """
    job, on_cpu = settings.job, settings.run.device is Device.cpu
    if settings.sweep:
        raise ConfigError(
            f"{', '.join(command_line.SWEEP + name for name in settings.sweep[0])}: a sweep is a Slurm job array; with launcher=local give one value each"
        )
    if job.nodes not in (None, 1):
        raise ConfigError(
            f"nodes={job.nodes}: launcher=local starts ranks on this machine only; for several machines give gpus=8,8 node_rank= master="
        )
    if job.gpus:
        ranks = tuple(int(n) for n in job.gpus.split(","))
        if 0 in ranks:
            raise ConfigError(
                f"gpus={job.gpus}: each machine must have at least one rank; leave machines without ranks out"
            )
        if job.node_rank >= len(ranks):
            raise ConfigError(f"node_rank={job.node_rank}: gpus={job.gpus} names machines 0 to {len(ranks) - 1}")
        if len(ranks) > 1 and not job.master:
            raise ConfigError(
                f"gpus={job.gpus}: several machines require master=HOST:PORT of the first machine, the same on each"
            )
    else:
        if job.node_rank or job.master:
            raise ConfigError("node_rank= and master= require gpus=8,2, the number of ranks of each machine")
        ranks = (jobs.ranks_per_node(job, settings.run.device),)
    seen = gpus.visible_gpus(os.environ)
    if not job.gpus and job.gpus_per_node is None and job.ranks_per_node is None and seen and not on_cpu:
        ranks = (seen,)
    if not on_cpu and (job.gpus or job.gpus_per_node or seen) and ranks[job.node_rank] > seen:
        raise MachineError(
            f"{ranks[job.node_rank]} ranks need one GPU each, and {seen} are visible on {os.uname().nodename}: give fewer ranks,"
            " device=cpu, or list the GPUs in CUDA_VISIBLE_DEVICES"
        )
    host, _, port = job.master.rpartition(":")
    if job.master and not 1 <= int(port) <= 65535:
        raise ConfigError(f"master={job.master}: the port must be 1 to 65535")
    return local.Layout(ranks, job.node_rank, host.strip("[]") or "127.0.0.1", int(port or 0))


def _here() -> Path:
    """The current folder. Raises MachineError if it no longer exists."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise MachineError("the current folder no longer exists: cd to another folder") from None


def _run_dir(settings: Settings) -> str:
    """The given run directory, resolved and absolute; "" for the default."""
    return parser.absolute({"run_dir": settings.run.run_dir}, (RunKeys,), _here())["run_dir"]

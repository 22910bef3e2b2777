"""The commands of launch.py: check, print, submit, and run on this machine."""

import dataclasses
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from recipes.core import errors
from recipes.core.config import help
from recipes.core.config.job_keys import IN_IMAGE, JobKeys, Launcher
from recipes.core.config.parser import Settings
from recipes.core.config.run_keys import Device
from recipes.core.errors import ConfigError, InputError, MachineError
from recipes.core.files import ROOT
from recipes.core.launch import bad_nodes, checks, jobs, local, new, runs, scale, snapshot, submit
from recipes.core.launch.local import Layout
from recipes.core.place import gpus
from recipes.core.run import command_line, directory, source

# The job keys that have an effect with launcher=local.
LOCAL_KEYS = (
    "recipe",
    "launcher",
    "cluster",
    "nodes",
    "gpus_per_node",
    "ranks_per_node",
    "gpus",
    "node_rank",
    "master",
    *IN_IMAGE,
)


def main(argv: list[str], python: str) -> int:
    """Runs one command line of launch.py and returns its exit status. python: the Python of the
    job.
    """
    if argv[:1] == ["runs"]:  # a line of JSON for each run
        return _main(argv, python, {})
    return command_line.with_json(argv, lambda words, told: _main(words, python, told))


def _main(argv: list[str], python: str, told: dict[str, Any]) -> int:
    """Runs a command line without ``--json``. told: gets its results."""
    checked = argv[:1] == ["check"]
    try:
        own = command_line.before_dashes(argv)
        if not argv or {"-h", "--help", "help"} & set(own):
            given = dict(word.partition("=")[::2] for word in own)
            recipe = (
                command_line.SCRIPT if command_line.SCRIPT in given else given.get("recipe", "")
            )
            print(help.help_text(recipe, with_job_keys=True))
            return errors.EXIT_DONE if argv else errors.EXIT_CONFIG
        if argv[0] == "new":
            return new.new(argv[1:], ROOT)
        if argv[0] == "scale":
            return scale.scale(argv[1:], source.home(ROOT), lambda words: main(words, python))
        if argv[0] in runs.COMMANDS:
            return runs.command(argv, source.home(ROOT))
        settings = command_line.parse(argv[1:] if checked else argv)
        if (home := source.home(ROOT)) != ROOT:
            raise ConfigError(
                f"{ROOT} is a snapshot of the code for a job: use launch.py in {home}"
            )
        os.umask(int(settings.run.umask, 8))
        if words := settings.words_from_run():
            print(f"keys from the run {settings.resumes}: {words}", file=sys.stderr, flush=True)
        # the other commands of Slurm read SLURM_CLUSTERS
        if cluster := os.environ.get("SBATCH_CLUSTERS"):
            os.environ.setdefault("SLURM_CLUSTERS", cluster)
        if os.environ.get("RECIPES_DATA"):  # the ranks start in the repository
            os.environ["RECIPES_DATA"] = os.path.abspath(os.environ["RECIPES_DATA"])
        if checked:
            return check(settings, told)
        if settings.job.launcher is Launcher.slurm:
            return submit_job(settings, python, told)
        if settings.job.launcher is Launcher.local:
            return run_here(settings)
        told["script"] = jobs.sbatch_script(jobs.describe(settings, ROOT, Path.cwd()))
        print(told["script"], end="")
        return errors.EXIT_DONE
    except (ConfigError, InputError, MachineError) as error:
        told["error"] = str(error)
        print(f"launch.py: {error}", file=sys.stderr)
        return errors.EXIT_MACHINE if isinstance(error, MachineError) else errors.EXIT_CONFIG
    except KeyboardInterrupt:
        return 130
    finally:
        if checked:
            print("nothing was submitted", flush=True)


def check(settings: Settings, told: dict[str, Any]) -> int:
    """Prints one line per part of the job, and adds it to the ``parts`` of ``told``. Returns 0, or
    the exit status of the first failed part.
    """
    base = Path.cwd()
    parts = told.setdefault("parts", [])
    job = None
    if settings.job.launcher is not Launcher.local:
        job = bad_nodes.exclude(jobs.describe(settings, ROOT, base))
    ranks = job.ranks if job else sum(local_layout(settings).ranks)
    print(f"keys:   ok: {settings.recipe}, {ranks} rank{'s' if ranks > 1 else ''}", flush=True)
    run_dir = settings.run.run_dir
    if settings.sweep:
        first = shlex.join(f"{name}={value}" for name, value in settings.sweep[0].items())
        print(f"sweep:  the first of {len(settings.sweep)} runs is checked: {first}", flush=True)
        run_dir = run_dir and f"{run_dir}/0"
    place = directory.choose(run_dir, settings.recipe, None, ROOT)
    keep = settings.run.keep_checkpoints
    recipe = 0
    found = None
    if settings.job.container and job:
        print("recipe: not checked: the job uses the Python of the container's image", flush=True)
    elif program := getattr(settings.config, "program", ""):
        print(f"script: not checked: launch.py check does not start {program}", flush=True)
    else:
        recipe, found = checks.part(
            parts, "recipe", lambda: checks.start(settings, place, ranks, ROOT, base)
        )
    memory = 0
    gpu_gb = settings.job.gpu_memory_gb
    on_gpus = settings.run.device is not Device.cpu and (job or gpus.visible_gpus(os.environ))
    if gpu_gb and on_gpus and found and found.rank_bytes:
        is_divided = settings.config.strategy == "fsdp" and ranks > 1
        memory, _ = checks.part(parts, "memory", lambda: checks.memory(found, is_divided, gpu_gb))
    disk, _ = checks.part(parts, "disk", lambda: checks.disk_space(place, keep, found))
    slurm = 0
    if job and settings.job.launcher is Launcher.print and not shutil.which("sbatch"):
        print("slurm:  not checked: there is no sbatch on this machine", flush=True)
    elif job:
        slurm, _ = checks.part(parts, "slurm", lambda: checks.expected_start(job))
    return recipe or memory or disk or slurm


def submit_job(settings: Settings, python: str, told: dict[str, Any]) -> int:
    """Submits the job, and prints its run directory and log, also into ``told``. Returns 0, or the
    exit status of the job with ``wait=true``.
    """
    job = bad_nodes.exclude(jobs.describe(settings, ROOT, Path.cwd()))
    not_checked = checks.find_data(settings, ROOT, Path.cwd())
    if not_checked:
        print(f"launch.py: {not_checked}", file=sys.stderr)
    if settings.job.snapshot:
        job = dataclasses.replace(
            job, variables={**job.variables, "RECIPES_CODE": str(snapshot.take(ROOT))}
        )
    if settings.job.forget:
        bad_nodes.forget(ROOT, settings.job.forget)
    runs = submit.submit(job, python, settings.run.run_dir)
    job_id = runs[0].job_id.partition("_")[0]
    print(f"job {job_id}: submitted")
    told |= {
        "job": job_id,
        "runs": [{"job": run.job_id, "run_dir": run.run_dir, "log": run.log} for run in runs],
    }
    if job.elements:
        for run, words in zip(runs, job.elements, strict=True):
            print(f"{run.job_id}: {shlex.join(words)}")
        print(
            f"table of the runs: python -m recipes.report {shlex.join(str(run.run_dir) for run in runs)}"
        )
    else:
        print(f"run directory: {runs[0].run_dir}")
        print(f"log: tail -F {shlex.quote(str(runs[0].log))}")
    sys.stdout.flush()
    if not settings.job.wait:
        return errors.EXIT_DONE
    try:
        return submit.wait(runs)
    except KeyboardInterrupt:  # ends the wait, not the job
        print(f"\njob {job_id} continues; cancel it with: scancel {job_id}", file=sys.stderr)
        return 130


def run_here(settings: Settings) -> int:
    """launcher=local: runs one process per rank on this machine. Returns the exit status of the
    run.
    """
    layout = local_layout(settings)
    unused = [f"{name}=" for name in settings.of_job if name not in LOCAL_KEYS]
    if settings.job.container:  # perhaps from the site's profile
        unused = [*unused, f"container={settings.job.container}"]
    if unused:
        print(f"launch.py: launcher=local does not use {', '.join(unused)}", file=sys.stderr)
    words = settings.absolute(settings.typed, Path.cwd()) | jobs.own_words(settings)
    run_dir = (
        None
        if layout.node_rank
        else directory.choose(settings.run.run_dir, settings.recipe, None, ROOT)
    )
    environ = (
        dict(os.environ, RECIPES_CLUSTER=settings.job.cluster)
        if settings.job.cluster
        else dict(os.environ)
    )
    environ.pop("PYTHONSAFEPATH", None)  # python -m imports from the working directory, ROOT
    words |= {"run_dir": str(run_dir)} if run_dir else {}
    command = [
        sys.executable,
        "-u",
        "-m",
        f"recipes.{settings.recipe}",
        *(f"{k}={v}" for k, v in words.items()),
    ]
    folder = (
        directory.inside(run_dir, directory.EVALUATION)
        if run_dir and settings.config.evaluate
        else run_dir
    )
    return local.run(
        command, layout, folder if settings.config.starts_a_run else None, settings.recipe, environ
    )


def local_layout(settings: Settings) -> Layout:
    """The ranks of each machine, by the keys and the GPUs of this machine. Raises ConfigError or
    MachineError.
    """
    job = settings.job
    on_cpu = settings.run.device is Device.cpu
    if settings.sweep:
        name = next(iter(settings.sweep[0]))
        fix = f"give one value in {name}=, and start each run separately"
        raise ConfigError(f"sweep.{name}=: launcher=local starts only one run: {fix}")
    if job.nodes not in (None, 1):
        fix = "leave it out, and give gpus= (such as 8,8), node_rank= and master= on each machine"
        raise ConfigError(f"nodes={job.nodes}: is not for launcher=local: {fix}")
    seen = gpus.visible_gpus(os.environ)
    if jobs.through(settings):
        return local.Layout((1,))
    if job.gpus:
        ranks = _ranks_of_machines(job)
    elif job.node_rank or job.master:
        fix = "give the number of ranks of each machine, such as gpus=8,2"
        raise ConfigError(f"node_rank= and master= require gpus=: {fix}")
    elif job.gpus_per_node is None and job.ranks_per_node is None and seen and not on_cpu:
        ranks = (seen,)
    else:
        ranks = (jobs.ranks_per_node(job, settings.run.device),)
    if not on_cpu and (job.gpus or job.gpus_per_node or seen) and ranks[job.node_rank] > seen:
        raise MachineError(
            f"{ranks[job.node_rank]} ranks need one GPU each, and {seen} are visible on {os.uname().nodename}: give fewer ranks,"
            " device=cpu, or list the GPUs in CUDA_VISIBLE_DEVICES"
        )
    host, _, port = job.master.rpartition(":")
    if job.master and not 1 <= int(port) <= 65535:
        raise ConfigError(f"master={job.master}: the port must be 1 to 65535")
    return local.Layout(ranks, job.node_rank, host.strip("[]") or "127.0.0.1", int(port or 0))


def _ranks_of_machines(job: JobKeys) -> tuple[int, ...]:
    """The number of ranks of each machine from gpus=8,2. Raises ConfigError."""
    ranks = tuple(int(n) for n in job.gpus.split(","))
    if 0 in ranks:
        raise ConfigError(
            f"gpus={job.gpus}: each machine must have at least one rank; leave out the 0"
        )
    if job.node_rank >= len(ranks):
        limit = f"{len(ranks)}, the number of machines in gpus={job.gpus}"
        raise ConfigError(f"node_rank={job.node_rank}: must be less than {limit}")
    if len(ranks) > 1 and not job.master:
        fix = "give the same master=HOST:PORT on all machines, with the address of the first one"
        raise ConfigError(f"gpus={job.gpus}: is for several machines: {fix}")
    return ranks

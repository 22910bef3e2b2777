"""The commands of launch.py: check, print, submit, and run on this machine."""

import dataclasses
import os
import shlex
import sys
from functools import partial
from typing import Any

from recipes.core.config import help, key_value
from recipes.core.config.job_keys import IN_IMAGE, JobKeys, Launcher
from recipes.core.config.parser import Settings
from recipes.core.errors import (
    ConfigError,
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_MACHINE,
    InputError,
    MachineError,
)
from recipes.core.files import ROOT
from recipes.core.launch import (
    bad_nodes,
    checks,
    jobs,
    local,
    new,
    run_commands,
    scale,
    snapshot,
    submit,
)
from recipes.core.launch.local import Layout
from recipes.core.place import gpus
from recipes.core.run import command_line, directory, source
from recipes.core.slurm import client, environment

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
# The run keys that have none.
SLURM_KEYS = ("restarts", "spare", "min_nodes", "environment")


def main(argv: list[str], python: str) -> int:
    """Runs one command line of launch.py and returns its exit status. python: the Python of the
    job.
    """
    if argv[:1] == ["runs"]:  # a line of JSON for each run
        return _main(argv, {}, python)

    def run(words: list[str], told: dict[str, Any]) -> int:
        # logs becomes tail, whose output is no JSON: it gets --json too, and refuses it
        return _main(argv if argv[:1] == ["logs"] else words, told, python)

    return command_line.with_json(argv, run)


def _main(argv: list[str], told: dict[str, Any], python: str) -> int:
    """Runs a command line without ``--json``. told: gets its results."""
    checked = argv[:1] == ["check"]
    try:
        before_dashes = command_line.before_dashes(argv)
        if not argv or {"-h", "--help", "help"} & set(before_dashes):
            keys = dict(word.partition("=")[::2] for word in before_dashes)
            is_script = command_line.SCRIPT in keys
            recipe = command_line.SCRIPT if is_script else keys.get("recipe", "")
            print(help.help_text(recipe, with_job_keys=True))
            return EXIT_DONE if argv else EXIT_CONFIG
        home = source.home(ROOT)
        environment.use_cluster_of_sbatch(os.environ)
        if argv[0] == "new":
            return new.new(argv[1:], ROOT)
        if argv[0] == "scale":
            return scale.scale(argv[1:], home, partial(_main, python=python), told)
        if argv[0] in run_commands.COMMANDS:
            return run_commands.command(argv, home, told)
        settings = command_line.parse(argv[1:] if checked else argv)
        if home != ROOT:
            raise ConfigError(
                f"{ROOT} is a snapshot of the code for a job: use launch.py in {home}"
            )
        os.umask(int(settings.run.umask, 8))
        inherited = settings.words_from_run()
        if inherited:
            print(f"keys from the run {settings.resumes}: {inherited}", file=sys.stderr, flush=True)
        if os.environ.get("RECIPES_DATA"):  # the ranks start in the repository
            os.environ["RECIPES_DATA"] = os.path.abspath(os.environ["RECIPES_DATA"])
        if checked:
            return check(settings, told)
        if settings.job.launcher is Launcher.slurm:
            return submit_job(settings, python, told)
        if settings.job.launcher is Launcher.local:
            return run_here(settings)
        told["script"] = jobs.sbatch_script(jobs.describe(settings, ROOT))
        print(told["script"], end="")
        return EXIT_DONE
    except BrokenPipeError:  # of a reader such as head
        raise
    except (ConfigError, InputError, MachineError, OSError) as error:
        told["error"] = str(error)
        print(f"launch.py: {error}", file=sys.stderr)
        return getattr(error, "exit_status", EXIT_MACHINE)
    except KeyboardInterrupt:
        return 130
    finally:
        if checked:
            print("nothing was submitted", flush=True)


def check(settings: Settings, told: dict[str, Any]) -> int:
    """Prints one line per part of the job, and adds it to the ``parts`` of ``told``. Returns 0, or
    the exit status of the first failed part.
    """
    parts = told.setdefault("parts", [])
    job = None
    if settings.job.launcher is not Launcher.local:
        job = bad_nodes.exclude(jobs.describe(settings, ROOT))
    ranks = job.ranks if job else sum(local_layout(settings).ranks)
    print(f"keys:   ok: {settings.recipe}, {ranks} rank{'s' if ranks > 1 else ''}", flush=True)
    run_dir = settings.run.run_dir
    if settings.sweep:
        first = shlex.join(key_value.words_of(settings.sweep[0]))
        print(f"sweep:  the first of {len(settings.sweep)} runs is checked: {first}", flush=True)
        run_dir = run_dir and f"{run_dir}/0"
    place = directory.choose(run_dir, settings.recipe, None, ROOT)

    recipe = memory = slurm = 0
    findings = None
    if settings.job.container and job:
        print("recipe: not checked: the job uses the Python of the container's image", flush=True)
    elif settings.config.program:
        program = settings.config.program
        print(f"script: not checked: launch.py check does not start {program}", flush=True)
    else:
        recipe, findings = checks.part(
            parts, "recipe", lambda: checks.start(settings, place, ranks, ROOT)
        )
    gpu_gb = settings.job.gpu_memory_gb
    on_gpus = not settings.run.on_cpu and (job or gpus.visible_gpus(os.environ))
    if gpu_gb and on_gpus and findings and findings.rank_bytes:
        is_divided = settings.config.strategy == "fsdp" and ranks > 1
        memory, _ = checks.part(
            parts, "memory", lambda: checks.memory(findings, is_divided, gpu_gb)
        )
    keep = settings.run.keep_checkpoints
    disk, _ = checks.part(parts, "disk", lambda: checks.disk_space(place, keep, findings))
    if job and settings.job.launcher is Launcher.print and not client.can_submit():
        print("slurm:  not checked: there is no sbatch on this machine", flush=True)
    elif job:
        slurm, _ = checks.part(parts, "slurm", lambda: checks.expected_start(job))
    return recipe or memory or disk or slurm


def submit_job(settings: Settings, python: str, told: dict[str, Any]) -> int:
    """Submits the job, and prints its run directory and log, also into ``told``. Returns 0, or the
    exit status of the job with ``wait=true``.
    """
    job = bad_nodes.exclude(jobs.describe(settings, ROOT))
    not_checked = checks.find_data(settings, ROOT)
    if not_checked:
        print(f"launch.py: {not_checked}", file=sys.stderr)
    if settings.job.snapshot:
        variables = {**job.variables, "RECIPES_CODE": str(snapshot.take(ROOT))}
        job = dataclasses.replace(job, variables=variables)
    if settings.job.forget:
        bad_nodes.forget(ROOT, settings.job.forget)
    runs = submit.submit(job, python, settings.run.run_dir)
    job_id = runs[0].job.partition("_")[0]
    print(f"job {job_id}: submitted")
    told |= {"job": job_id, "runs": list(map(dataclasses.asdict, runs))}
    if job.elements:
        for run, words in zip(runs, job.elements, strict=True):
            print(f"{run.job}: {shlex.join(words)}")
        folders = shlex.join(str(run.run_dir) for run in runs)
        print(f"table of the runs: python -m recipes.report {folders}")
    else:
        print(f"run directory: {runs[0].run_dir}")
        print(f"log: tail -F {shlex.quote(str(runs[0].log))}")
    sys.stdout.flush()
    if not settings.job.wait:
        return EXIT_DONE
    try:
        return submit.wait(runs)
    except KeyboardInterrupt:  # ends the wait, not the job
        print(f"\njob {job_id} continues; cancel it with: scancel {job_id}", file=sys.stderr)
        return 130


def run_here(settings: Settings) -> int:
    """launcher=local: starts this machine's ranks, or with through= the launcher that starts them,
    and waits for their end. Returns the exit status of the run.
    """
    layout = local_layout(settings)
    unused = [f"{name}=" for name in settings.of_job if name not in LOCAL_KEYS]
    unused += [f"{name}=" for name in SLURM_KEYS if name in settings.typed]
    if settings.job.container:  # perhaps from the site's profile
        unused.append(f"container={settings.job.container}")
    if unused:
        print(f"launch.py: launcher=local does not use {', '.join(unused)}", file=sys.stderr)

    keys = settings.typed | jobs.own_words(settings)
    to_judge = None  # the folder of the attempt, for the first machine
    if layout.node_rank == 0:
        run_dir = directory.choose(settings.run.run_dir, settings.recipe, None, ROOT)
        keys["run_dir"] = str(run_dir)
        if settings.config.starts_a_run:
            is_part = settings.config.evaluate
            to_judge = directory.inside(run_dir, directory.EVALUATION) if is_part else run_dir
    environ = dict(os.environ)
    if settings.job.cluster:
        environ["RECIPES_CLUSTER"] = settings.job.cluster
    environ.pop("PYTHONSAFEPATH", None)  # python -m imports from the working directory, ROOT
    command = [sys.executable, "-u", "-m", f"recipes.{settings.recipe}"]
    command += key_value.words_of(keys)
    return local.run(command, layout, to_judge, settings.recipe, environ)


def local_layout(settings: Settings) -> Layout:
    """The ranks of each machine, by the keys and the GPUs of this machine. Raises ConfigError or
    MachineError.
    """
    job = settings.job
    on_cpu = settings.run.on_cpu
    if settings.sweep:
        name = next(iter(settings.sweep[0]))
        raise ConfigError(
            f"sweep.{name}=: launcher=local starts only one run: "
            f"give one value in {name}=, and start each run separately"
        )
    if job.nodes not in (None, 1):
        raise ConfigError(
            f"nodes={job.nodes}: is not for launcher=local: leave it out, "
            "and give gpus= (such as 8,8), node_rank= and master= on each machine"
        )
    if jobs.through(settings):
        return Layout((1,))
    visible = 0 if on_cpu else gpus.visible_gpus(os.environ)
    if job.gpus:
        ranks = _ranks_of_machines(job)
    elif job.node_rank or job.master:
        raise ConfigError(
            "node_rank= and master= require gpus=: "
            "give the number of ranks of each machine, such as gpus=8,2"
        )
    elif job.gpus_per_node is None and job.ranks_per_node is None and visible:
        ranks = (visible,)
    else:
        ranks = (jobs.ranks_per_node(settings),)
    here = ranks[job.node_rank]
    if not on_cpu and (job.gpus or job.gpus_per_node or visible) and here > visible:
        raise MachineError(
            f"{here} ranks need one GPU each, and {visible} are visible on {os.uname().nodename}: "
            "give fewer ranks, device=cpu, or list the GPUs in CUDA_VISIBLE_DEVICES"
        )
    host, _, port = job.master.rpartition(":")
    if job.master and not 1 <= int(port) <= 65535:
        raise ConfigError(f"master={job.master}: the port must be 1 to 65535")
    return Layout(ranks, job.node_rank, host.strip("[]") or "127.0.0.1", int(port or 0))


def _ranks_of_machines(job: JobKeys) -> tuple[int, ...]:
    """The number of ranks of each machine from gpus=8,2. Raises ConfigError."""
    ranks = tuple(map(int, job.gpus.split(",")))
    if 0 in ranks:
        raise ConfigError(
            f"gpus={job.gpus}: each machine must have at least one rank; leave out the 0"
        )
    if job.node_rank >= len(ranks):
        raise ConfigError(
            f"node_rank={job.node_rank}: must be less than {len(ranks)}, "
            f"the number of machines in gpus={job.gpus}"
        )
    if len(ranks) > 1 and not job.master:
        raise ConfigError(
            f"gpus={job.gpus}: is for several machines: give the same master=HOST:PORT on all "
            "machines, with the address of the first one"
        )
    return ranks

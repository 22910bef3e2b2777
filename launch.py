"""Submits a recipe to Slurm, runs it here, or shows the sbatch script: ``python launch.py recipe=mnist nodes=2``.

``launcher=slurm`` (default) submits through submitit and does not wait; ``launcher=local`` starts the ranks on this machine;
``launcher=print`` writes the sbatch script to stdout. Every key is checked here, on the login node, without torch.
``python launch.py check recipe=mnist …`` does all of that short of submitting, and tries data, model, checkpoint and disk.
``python launch.py --help`` lists the keys. Exit status: 0 done or submitted; 2 a wrong key; 3 this machine, or Slurm, cannot run it.
"""

import importlib.util
import os
import re
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.core import files
from recipes.core.place import gpus
from recipes.core.run import source

if TYPE_CHECKING:
    from recipes.core.config.parser import Settings
    from recipes.core.launch.local import Layout
    from recipes.core.launch.slurm import Job

# This file is read by Python 3.6 too, the oldest that login nodes have, up to where it goes on in another.
ROOT = Path(__file__).resolve().parent
# A job's keys that launcher=local goes by, or says more about.
OF_LOCAL = (
    "recipe", "launcher", "cluster", "nodes", "gpus_per_node", "ranks_per_node", "gpus", "node_rank", "master",
    "container", "container_runtime", "container_mounts",
)  # fmt: skip
JOB_FILES_BYTES = 1 << 20  # of free space that `check` requires for the files of a submission
sys.path.insert(0, str(ROOT))


def main(argv: "list[str]") -> int:
    _use_project_python(argv)
    from recipes.core import errors
    from recipes.core.config import parser

    if not argv or {"-h", "--help", "help"} & set(argv):
        errors.show(parser.help_text())
        return 0 if argv else errors.EXIT_CONFIG
    checked = argv[:1] == ["check"]
    try:
        settings = parser.parse(argv[1:] if checked else argv)
        spawn, home = getattr(settings.config, "spawn", 0), source.home(ROOT)
        if spawn:
            mend = f"python -m recipes.{settings.recipe} spawn={spawn}, or ranks_per_node={spawn} here"
            raise errors.ConfigError(
                f"spawn={spawn}: is for plain python, and launch.py starts the ranks itself: {mend}"
            )
        if home != ROOT:
            raise errors.ConfigError(f"{ROOT} is the copy of the code that a job runs: type it in {home}")
        os.umask(int(settings.run.umask, 8))
        words = settings.words_from_run()
        if words:
            print(f"from the run {settings.resumes}: {words}", file=sys.stderr, flush=True)
        if os.environ.get("RECIPES_DATA"):  # the ranks start in the repository
            os.environ["RECIPES_DATA"] = os.path.abspath(_here() / os.environ["RECIPES_DATA"])
        unlike_profile = "" if checked else environment(settings)
        if unlike_profile:
            print(f"launch.py: {unlike_profile}", file=sys.stderr)
        run = {"print": show, "local": run_here, "slurm": submit}[settings.job.launcher.name]
        return check(settings) if checked else run(settings)
    except (errors.ConfigError, errors.InputError) as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return errors.EXIT_CONFIG
    except errors.MachineError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return errors.EXIT_MACHINE
    finally:
        if checked:
            print("nothing was submitted", flush=True)


def environment(settings: "Settings") -> str:
    """Which Python environment is used in place of the profile's, in words; "" if the profile's is used, or it names none.

    Raises MachineError where the profile's is missing.
    """
    from recipes.core.config import parser
    from recipes.core.errors import MachineError

    cluster = settings.job.cluster
    named = str(parser.cluster_profile(cluster).get("environment", "")) if cluster else ""
    if not named or os.path.realpath(sys.prefix) == os.path.realpath(named):
        return ""
    active = _active_environment()
    if active:
        return f"the active environment {active} is used, not environment: {named} of cluster={cluster}"
    if settings.job.launcher is parser.Launcher.print:
        return f"{_no_python(cluster, named)}, where this script is used"
    raise MachineError(_no_python(cluster, named))


def _no_python(cluster: str, named: str) -> str:
    return (
        f"cluster={cluster}: environment: {named} has no bin/python on this machine: make that environment, or correct"
        f" env/clusters/{cluster}.yaml"
    )


def _active_environment() -> str:
    """The folder of the venv or conda environment that is active, or whose Python this is; "" for none, or conda's base."""
    conda = "" if _in_conda_base() else os.environ.get("CONDA_PREFIX")
    own = sys.prefix if sys.prefix != sys.base_prefix else ""
    return os.environ.get("VIRTUAL_ENV") or conda or own


def _in_conda_base() -> bool:
    """Whether conda's base is active. conda activates it in every shell, so it is not the user's choice."""
    return os.environ.get("CONDA_DEFAULT_ENV") == "base"


def check(settings: "Settings") -> int:
    """check: what can be known without submitting, a line each. Gives 0, or the exit status of the first that is wrong."""
    from recipes.core.config import parser
    from recipes.core.launch import checks, slurm, snapshot
    from recipes.core.run import rundir

    here = _here()
    job = None if settings.job.launcher is parser.Launcher.local else slurm.describe(settings, ROOT, here)
    ranks = (job.ranks or job.nodes * job.ranks_per_node) if job else _ranks_here(settings)
    print(f"keys:   right: {settings.recipe}, {ranks} rank{'s' if ranks > 1 else ''}", flush=True)
    copied = python = loaded = 0
    if settings.job.cluster and "environment" in parser.cluster_profile(settings.job.cluster):
        python, _ = checks.part("python", lambda: environment(settings) or sys.prefix)
    if job and job.modules:
        loaded, _ = checks.part("module", lambda: checks.load_modules(slurm.MODULES, job.modules, os.environ))
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


def _ask(job: "Job", settings: "Settings") -> str:
    """Slurm's word on a job that would be submitted, or printed. Raises MachineError where it could not be submitted."""
    from recipes.core.config import parser
    from recipes.core.launch import checks, submit
    from recipes.core.run import rundir

    if settings.job.launcher is parser.Launcher.print:
        return submit.ask_controller(job) if shutil.which("sbatch") else "not asked, there is none on this machine"
    _want_free(settings)
    expected = submit.ask_controller(job)
    for name in ("submitit", "code") if settings.job.snapshot else ("submitit",):
        folder = ROOT / "runs" / name
        if folder.exists():
            files.private_folder(ROOT, name)
        checks.want_writable(folder, f"runs/{name}", rundir.FIX_JOB_FILES, JOB_FILES_BYTES)
    return expected


def _want_free(settings: "Settings") -> None:
    """Raises ConfigError where another job that is queued or running uses the run directory that was typed."""
    from recipes.core import errors
    from recipes.core.run import liveness, rundir

    run_dir = _run_dir(settings)
    if not run_dir or settings.run.takeover or not settings.config.starts_a_run:
        return
    for number in range(len(settings.sweep)) or [None]:
        path = Path(run_dir) if number is None else Path(run_dir) / str(number)
        if settings.config.evaluate:
            path = rundir.for_evaluation(path)
        problem = liveness.queued(path, settings.job.dependency, os.environ)
        if problem:
            raise errors.ConfigError(problem)


def _said_of(layout: "Layout") -> str:
    """The ranks of launcher=local, in words."""
    mine, every = layout.ranks[layout.node_rank], sum(layout.ranks)
    return f"{mine} of {every} ranks on this machine" if mine < every else "all ranks on this machine"


def _ranks_here(settings: "Settings") -> int:
    """The ranks of launcher=local; one where this machine cannot run them, which is said where it is asked."""
    from recipes.core.errors import MachineError

    try:
        return sum(local_layout(settings).ranks)
    except MachineError:
        return 1


def show(settings: "Settings") -> int:
    """launcher=print: the sbatch script on stdout; nothing is submitted."""
    from recipes.core import errors
    from recipes.core.launch import slurm

    job = slurm.describe(settings, ROOT, _here())
    header = ["Made by launch.py; options of sbatch before the script's name win over these."]
    errors.show(slurm.script(job, header=header).rstrip("\n"))
    return 0


def submit(settings: "Settings") -> int:
    """launcher=slurm: asks the controller, submits, and says where to look."""
    import dataclasses

    from recipes.core.launch import checks, slurm, snapshot, submit
    from recipes.core.run import table

    _want_free(settings)
    job = slurm.describe(settings, ROOT, _here())
    expected = submit.ask_controller(job)
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
        print(f"a table of what came of them: python -m recipes.report {folders}")
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
        print(f"\njob {submitted.job_id} goes on; to end it: scancel {submitted.job_id}", file=sys.stderr)
        return 130


def run_here(settings: "Settings") -> int:
    """launcher=local: one process a rank on this machine, or this machine's share of gpus=8,2."""
    from recipes.core.config import parser
    from recipes.core.launch import local
    from recipes.core.run import rundir

    layout = local_layout(settings)
    if settings.job.container:
        print(
            f"launch.py: container={settings.job.container}: launcher=local runs in this Python, not in the image",
            file=sys.stderr,
        )
    unused = [f"{name}=" for name in settings.of_job if name not in OF_LOCAL]
    if unused:
        print(f"launch.py: launcher=local asks Slurm for nothing: {', '.join(unused)} without effect", file=sys.stderr)
    recipe_class, _ = parser.recipe_conf(settings.recipe)
    words = parser.absolute(settings.typed, (parser.RunKeys, recipe_class), _here())
    run_dir = None
    if layout.node_rank == 0:
        run_dir = rundir.choose(_run_dir(settings), settings.recipe, None, ROOT)
        words["run_dir"] = str(run_dir)
    command = [sys.executable, "-u", "-m", f"recipes.{settings.recipe}", *(f"{k}={v}" for k, v in words.items())]
    environ = dict(os.environ, RECIPES_CLUSTER=settings.job.cluster) if settings.job.cluster else dict(os.environ)
    environ["RECIPES_SOURCE"] = str(ROOT)
    environ.pop("PYTHONSAFEPATH", None)  # python -m imports from the working directory, ROOT
    return local.run(command, layout, run_dir, ROOT, environ)


def local_layout(settings: "Settings") -> "Layout":
    """Ranks of each machine, from the keys and the GPUs that are here. Raises ConfigError or MachineError."""
    from recipes.core import errors
    from recipes.core.config import parser
    from recipes.core.errors import MachineError
    from recipes.core.launch import local, slurm

    job, on_cpu = settings.job, settings.run.device is parser.Device.cpu
    if settings.sweep:
        raise errors.ConfigError(
            f"{', '.join(parser.SWEEP + name for name in settings.sweep[0])}: a sweep is a job array of Slurm's; here give one value each"
        )
    if job.nodes not in (None, 1):
        raise errors.ConfigError(
            f"nodes={job.nodes}: launcher=local is this machine; for several by hand give gpus=8,8 node_rank= master="
        )
    if job.gpus:
        ranks = tuple(int(n) for n in job.gpus.split(","))
        if 0 in ranks:
            raise errors.ConfigError(f"gpus={job.gpus}: a machine without a rank has no part in the run; leave it out")
        if job.node_rank >= len(ranks):
            raise errors.ConfigError(f"node_rank={job.node_rank}: gpus={job.gpus} names machines 0 to {len(ranks) - 1}")
        if len(ranks) > 1 and not job.master:
            raise errors.ConfigError(
                f"gpus={job.gpus}: several machines want master=HOST:PORT of the first, the same on each"
            )
    else:
        if job.node_rank or job.master:
            raise errors.ConfigError("node_rank= and master= want gpus=8,2 beside them, the ranks of each machine")
        ranks = (slurm.ranks_per_node(job, settings.run.device),)
    seen = gpus.visible_gpus(os.environ)
    if not job.gpus and job.gpus_per_node is None and job.ranks_per_node is None and seen and not on_cpu:
        ranks = (seen,)
    if not on_cpu and (job.gpus or job.gpus_per_node or seen) and ranks[job.node_rank] > seen:
        raise MachineError(
            f"{ranks[job.node_rank]} ranks want a GPU each and {seen} are visible on {os.uname().nodename}; give device=cpu, or fewer,"
            " or name those that are there in CUDA_VISIBLE_DEVICES"
        )
    host, _, port = job.master.rpartition(":")
    if job.master and not 1 <= int(port) <= 65535:
        raise errors.ConfigError(f"master={job.master}: a port is 1 to 65535")
    return local.Layout(ranks, job.node_rank, host.strip("[]") or "127.0.0.1", int(port or 0))


def _here() -> Path:
    """The folder that this was typed in. Raises MachineError where that is gone."""
    from recipes.core.errors import MachineError

    try:
        return Path.cwd()
    except FileNotFoundError:
        raise MachineError("the folder that you are in is not there any more: cd to one that is") from None


def _run_dir(settings: "Settings") -> str:
    """The run directory that was typed, resolved and absolute; empty for the default."""
    from recipes.core.config import parser

    return parser.absolute({"run_dir": settings.run.run_dir}, (parser.RunKeys,), _here())["run_dir"]


def _use_project_python(argv: "list[str]") -> None:
    """Goes on in the Python of the profile's environment, or of .venv, where that is there and no environment is active."""
    if sys.getfilesystemencoding().lower() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # In a locale such as POSIX or ISO-8859-1 this Python would misread paths; keys, scripts and logs are UTF-8.
        os.execve(sys.executable, [sys.executable, str(ROOT / "launch.py"), *argv], dict(os.environ, PYTHONUTF8="1"))
    words = dict(word.partition("=")[::2] for word in argv)
    cluster = words.get("cluster") or os.environ.get("RECIPES_CLUSTER", "")
    profile, python = ROOT / "env" / "clusters" / f"{cluster}.yaml", ROOT / ".venv" / "bin" / "python"
    text = profile.read_text(errors="replace") if re.fullmatch("[A-Za-z0-9_-]+", cluster) and profile.is_file() else ""
    named = re.search(r"^environment: *([^\s#]+)", text, re.MULTILINE)
    if named:
        python = Path(named[1]) / "bin" / "python"
    active = _active_environment()
    here = os.path.realpath(sys.prefix) == os.path.realpath(str(python.parents[1]))
    # An image has all that is wanted, and may not be able to run what is outside.
    enough = all(importlib.util.find_spec(name) for name in ("omegaconf", "submitit", "torch"))
    if named and not active and not here and not enough and not python.exists():
        print(f"launch.py: {_no_python(cluster, named[1])}", file=sys.stderr)
        sys.exit(3)
    if not active and not here and (named or not enough or _in_conda_base()) and python.exists():
        os.execv(str(python), [str(python), str(ROOT / "launch.py"), *argv])
    if sys.version_info < (3, 10):  # noqa: UP036
        version = ".".join(map(str, sys.version_info[:2]))
        print(
            f"launch.py: wants Python 3.10 or later, this is {version}: activate your environment, or type make install",
            file=sys.stderr,
        )
        sys.exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

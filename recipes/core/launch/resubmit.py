"""Examines the nodes of a job with the doctor, and submits the job again without bad nodes."""

import contextlib
import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.core import errors, files
from recipes.core.config.parser import Settings
from recipes.core.files import ROOT
from recipes.core.launch import allocation, container
from recipes.core.launch.jobs import Job
from recipes.core.run import command_line, rundir, scontrol, source

JUDGE = (sys.executable, "-m", "recipes.doctor", "judge")
DOCTOR_S = 240.0  # timeout for the doctor, which ends by itself after half of this time

# Options on sbatch's command line are known only from the job's variables and from scontrol. Both also contain the
# values of the script's directives.
OPTION_OF_VARIABLE = {
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
    "SLURM_ARRAY_TASK_ID": "array",  # only this run of a sweep
}
OPTION_OF_FIELD = {
    "TimeLimit": "time",
    "Features": "constraint",
    "MinMemoryNode": "mem",
    "MinMemoryCPU": "mem-per-cpu",
    "ExcNodeList": "exclude",
    "Nice": "nice",
}
# The value of --exclusive= for each value of scontrol's field Exclusive. Before Slurm 26.05, the field is
# OverSubscribe, with NO for NODE.
EXCLUSIVE = {"NODE": "exclusive", "USER": "user", "MCS": "mcs", "TOPO": "topo"}


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
    try:
        (run_dir / "doctor" / "doctor.json").unlink(missing_ok=True)  # an older verdict is not valid for these nodes
    except OSError as error:
        print(
            f"{recipe}: run_dir={run_dir}: cannot be written ({error.strerror}): give another run_dir", file=sys.stderr
        )
        return errors.EXIT_MACHINE
    shutil.rmtree(run_dir / "doctor" / "reports", ignore_errors=True)
    _run_doctor(settings, run_dir / "doctor", environ)
    subprocess.run([*JUDGE, f"run_dir={run_dir / 'doctor'}"], cwd=ROOT, env=dict(environ))
    verdict = files.read_json(run_dir / "doctor" / "doctor.json")
    if verdict and verdict["healthy"]:
        return errors.EXIT_DONE
    set_before = environ.get("RECIPES_RESUBMITS", "")
    left = int(set_before) if set_before.isdecimal() else resubmits
    if not verdict:
        line = "the doctor gave no verdict, so nothing was trained: the lines above say why"
    elif not verdict["exclude"]:
        line = "not healthy, but excluding nodes would not fix it: the lines above say what to do"
    else:
        line = f"bad nodes: {','.join(verdict['exclude'])}; "
        if left > 0:
            line += _submit_without(verdict["exclude"], run_dir, words, left - 1, environ)
        else:
            line += "not submitted again, since max_resubmits is used up"
    rundir.refuse(run_dir, rundir.launch_id(environ), errors.EXIT_MACHINE, line)
    print(f"{recipe}: {line}", file=sys.stderr)
    return errors.EXIT_MACHINE


def _run_doctor(settings: Settings, run_dir: Path, environ: Mapping[str, str]) -> None:
    """Runs the doctor with one task on each node of the job, with the keys of the run that concern the nodes."""
    keys = {"device": settings.run.device.name, "network": settings.run.network}
    keys["data_dir"] = getattr(settings.config, "data_dir", "")
    options: list[str] = []
    inside = [sys.executable]
    if image := container.of_job(settings, environ):
        bound = container.folders_of_run(settings, settings.typed, source.home(ROOT))
        options, inside = container.enter(image, settings, bound, ROOT, environ)
    if gpus := allocation.all_gpus(allocation.fields_of_job(environ)):  # each task tests all GPUs of its node
        options = [*options, f"--gpus={gpus}"]
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    command = [
        *("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        *("--export=ALL", "--wait=60", "--mem=0", f"--cpus-per-task={environ.get('SLURM_CPUS_PER_TASK') or 1}"),
        *options,
        *(*inside, "-u", "-m", "recipes.doctor", "report", f"run_dir={run_dir}"),
        *(f"{name}={value}" for name, value in keys.items() if value),
    ]
    variables = {name: value for name, value in environ.items() if name not in allocation.GPU_VARIABLES}
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, env=variables, timeout=DOCTOR_S, cwd=ROOT)


def _submit_without(bad: list[str], run_dir: Path, words: list[str], left: int, environ: Mapping[str, str]) -> str:
    """Submits this job again without the ``bad`` nodes. left: how often it may then be submitted again.

    Returns a short phrase on the result.
    """
    description = files.read_json(run_dir / "job.yaml") or {}
    try:
        if "directives" in description:
            job_id = _submit_job(description, bad, words, left)
        else:
            job_id = _submit_script(run_dir / "job.sh", bad, words, left, environ)
    except (OSError, errors.MachineError, errors.ConfigError, subprocess.SubprocessError) as error:
        why = " ".join((getattr(error, "stderr", "") or str(error)).split())[:200]
        return f"not submitted again ({why}): submit it with exclude={','.join(bad)}"
    return f"submitted again without them, as job {job_id} ({left} more at most)"


def _submit_job(description: Mapping[str, Any], bad: Sequence[str], words: list[str], left: int) -> str:
    """Submits a job of launch.py again. Returns the ID of the new job. description: the content of job.yaml."""
    from recipes.core.launch import submit  # imported here because no other job needs submitit

    job = Job.from_json(description)
    options = dict(job.directives)
    options.pop("dependency", None)  # it was met, or this job would not run
    options["exclude"] = ",".join(filter(None, [options.get("exclude", ""), *bad]))
    run_dir = command_line.parse(words, recipe=job.recipe, to_start=False).run.run_dir
    again = dataclasses.replace(job, directives=tuple(options.items()), resubmits=left)
    return submit.submit(again, sys.executable, run_dir).job_id


def _submit_script(
    script: Path, bad: Sequence[str], words: Sequence[str], left: int, environ: Mapping[str, str]
) -> str:
    """Submits a ready script, or the script of launcher=print, again. Returns the ID of the new job."""
    options = options_as_submitted(environ, allocation.fields_of_job(environ))
    excluded = ",".join(filter(None, [options.get("exclude") or environ.get("RECIPES_LEFT_OUT", ""), *bad]))
    command = ["sbatch", "--parsable"]
    command += [f"--{name}={value}" for name, value in {**options, "exclude": excluded}.items()]
    state = {"RECIPES_RESUBMITS": str(left), "RECIPES_LEFT_OUT": excluded, "RECIPES_CODE": str(ROOT)}
    done = subprocess.run(
        [*command, str(script), *words],
        capture_output=True, text=True, timeout=120, check=True, cwd=source.home(ROOT),
        env={**allocation.clean_environment(environ), **state},
    )  # fmt: skip
    return done.stdout.strip().partition(";")[0]


def options_as_submitted(environ: Mapping[str, str], fields: Mapping[str, str]) -> dict[str, str]:
    """The options of sbatch for a job with the same size, partition, account, time limit and logs as this job.

    fields: the fields of this job, by scontrol's names.
    """
    options = {option: environ.get(name, "") for name, option in OPTION_OF_VARIABLE.items()}
    options |= {option: fields.get(name, "") for name, option in OPTION_OF_FIELD.items()}
    if options["nice"] == "0":
        del options["nice"]
    shared = fields.get("OverSubscribe", "")
    options["exclusive"] = EXCLUSIVE.get(fields.get("Exclusive", "NODE" if shared == "NO" else shared), "")
    # Memory
    per_gpu = re.search(r"\bgpu:(\d+)", fields.get("MemPerTres", ""))
    if "MemPerTres" in fields or options["mem-per-cpu"] == "0":
        options |= {"mem": "", "mem-per-cpu": "", "mem-per-gpu": f"{per_gpu[1]}M" if per_gpu else ""}
    # GPUs and other resources
    options["gpus"] = scontrol.gpus(fields.get("TresPerJob", ""))
    options["gpus-per-task"] = scontrol.gpus(fields.get("TresPerTask", ""))
    of_node = [re.sub(r"^gres[:/]", "", one) for one in fields.get("TresPerNode", "").split(",")]
    options["gres"] = ",".join(one for one in of_node if not (options["gpus-per-node"] and one.startswith("gpu:")))
    # Tasks and nodes
    if options["ntasks-per-node"]:
        del options["ntasks"]
    elif options["gpus-per-task"]:
        del options["nodes"]  # Slurm chose this number of nodes, and may choose another
    options |= _log_options(environ, fields)
    return {name: value for name, value in options.items() if value not in ("", "(null)")}


def _log_options(environ: Mapping[str, str], fields: Mapping[str, str]) -> dict[str, str]:
    """The options of sbatch for logs beside those of this job. A log whose name contains no job ID is appended to."""
    array = environ.get("SLURM_ARRAY_JOB_ID", "")
    patterns = {f"{array}_{environ.get('SLURM_ARRAY_TASK_ID')}": "%A_%a", array: "%A"} if array else {}
    patterns |= {job: "%j"} if (job := environ.get("SLURM_JOB_ID")) else {}
    options: dict[str, str] = {}
    for field, option in (("StdOut", "output"), ("StdErr", "error")):
        folder, slash, file = fields.get(field, "").rpartition("/")
        for number, pattern in patterns.items():
            file = re.sub(rf"(?<!\d){number}(?!\d)", pattern, file)
        path = f"{folder}{slash}{file}"
        if path and path not in options.values():
            options[option] = path
    if any("%" not in path for path in options.values()):
        options["open-mode"] = "append"
    return options

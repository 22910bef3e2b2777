"""Examines the nodes of a job with the doctor, and requeues the job without bad nodes."""

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.core import files, trust
from recipes.core.errors import EXIT_DONE, EXIT_MACHINE, MachineError, Next
from recipes.core.files import ROOT
from recipes.core.launch import bad_nodes, jobs
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, source
from recipes.core.run import spec as specs
from recipes.core.run.logs import say
from recipes.core.slurm import client, environment
from recipes.core.slurm.jobstate import Job
from recipes.core.variables import Environ

JUDGE = (sys.executable, "-m", "recipes.doctor", "judge")
DOCTOR_S = 240.0  # timeout for the doctor, which ends by itself after half of this time
# in the run directory: how often the job was requeued without bad nodes
COUNT = "doctor/requeues.json"


def examine(recipe: str, resubmits: int, environ: Environ) -> int:
    """Runs the doctor on the nodes of the job.

    resubmits: how often the job may be requeued without bad nodes. Returns 0 if the nodes are
    healthy; else 3, after noting the bad nodes and requeueing the job without them, if it may.
    """
    spec = specs.of_job(environ)
    if not spec:
        raise MachineError("doctor=true: the script must call begin first")
    settings = spec.settings
    run_dir = directory.choose(settings.run.run_dir, recipe, environment.job_id(environ), ROOT)
    folder = run_dir / "doctor"
    verdict = examine_nodes(spec, folder, (), environ)
    if not verdict:
        line = "the doctor gave no verdict, so nothing was trained: the lines above say why"
    elif verdict["healthy"]:
        return EXIT_DONE
    elif not verdict["exclude"]:
        line = "the doctor found a fault that excluding nodes would not fix: see the lines above"
    else:
        bad = ",".join(verdict["exclude"])
        with contextlib.suppress(OSError):
            bad_nodes.remember(source.home(ROOT), environment.cluster(environ), verdict["exclude"])
        requeued = requeue_without(bad, resubmits, run_dir, environ)
        line = f"bad nodes: {bad}; {requeued}"
    attempts.refuse(environ, MachineError(line))
    say(f"{recipe}: {line}")
    return EXIT_MACHINE


def examine_nodes(
    spec: specs.Spec, folder: Path, nodes: Sequence[str], environ: Environ
) -> dict[str, Any]:
    """The doctor's verdict on some nodes of the job, without bandwidths, to save time, or on all
    nodes with (); {} if it gave none. folder: for its reports.
    """
    trust.own_folder(folder)
    # an older verdict is not valid for these nodes
    (folder / "doctor.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "reports", ignore_errors=True)
    _run_doctor(spec, folder, nodes, environ)
    of_nodes = environment.with_nodes(environ, nodes) if nodes else environ
    command = [*JUDGE, f"run_dir={folder}", f"umask={spec.settings.run.umask}"]
    subprocess.run(command, cwd=ROOT, env=of_nodes)
    return files.read_json(folder / "doctor.json")


def _run_doctor(spec: specs.Spec, run_dir: Path, nodes: Sequence[str], environ: Environ) -> None:
    """Runs the doctor on each node, with the keys of the run that concern nodes and its files."""
    command = client.with_all_gpus(environ, nodes, spec.step)
    settings = spec.settings
    command += spec.inside or [sys.executable]
    command += ["-u", "-m", "recipes.doctor", "report", f"run_dir={run_dir}"]
    keys = {
        "device": settings.run.device.name,
        "network": settings.run.network,
        "data_dir": settings.config.data_dir,
        "umask": settings.run.umask,
        "bandwidth": "false" if nodes else "",
    }
    command += [f"{name}={value}" for name, value in keys.items() if value]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, env=environ, timeout=DOCTOR_S, cwd=ROOT)


def requeues(run_dir: Path, environ: Environ) -> int:
    """How often this job was requeued because its nodes were bad. ``max_requeues=`` does not count
    these requeues.
    """
    noted = files.read_json(run_dir / COUNT)
    return noted["count"] if noted.get("job_id") == environment.job_id(environ) else 0


def requeue_without(bad: str, most: int, run_dir: Path, environ: Environ) -> str:
    """Requeues this job without the nodes ``bad``, at most ``most`` times. Returns a short phrase
    on the result.

    Slurm accepts another list of excluded nodes only for a pending job. It does not start the job
    before this process has ended. The requeue sends SIGTERM to this process, which ignores it.
    """
    job_id = environment.job_id(environ)
    count = requeues(run_dir, environ)
    job = client.own(environ)
    excluded = ",".join(filter(None, (job.options.get("exclude"), bad)))
    by_hand = f"submit the job with exclude={excluded} (sbatch: --exclude={excluded})"
    if count >= most:
        return f"not requeued, since max_resubmits= is reached: {by_hand}"
    try:
        _require_other_nodes(run_dir / "job.sh", excluded, job)
        files.write_json(run_dir / COUNT, {"job_id": job_id, "count": count + 1})
        client.requeue(environ)
    except (OSError, subprocess.SubprocessError) as error:
        return f"a requeue that excludes them failed ({client.said(error)}): {by_hand}"
    attempt = attempts.given(environ)
    if attempt:
        directory.note_next(attempt.run_dir, Next.requeued, attempt.number)
    try:
        client.exclude(job_id, excluded)
    except (OSError, subprocess.SubprocessError) as error:
        by_hand = f"type scontrol update JobId={job_id} ExcNodeList={excluded}"
        return f"requeued, but not without them ({client.said(error)}): {by_hand}"
    return f"requeued without them (requeues left: {most - count - 1})"


def _require_other_nodes(script: Path, excluded: str, job: Job) -> None:
    """Asks Slurm whether ``script`` could run without the nodes ``excluded``: otherwise the job
    would stay pending.

    job: this one, whose options may have been typed, and are not in the script then. Raises OSError
    or SubprocessError if the script cannot run.
    """
    # the job began when its dependency was met
    text = re.sub(r"^#SBATCH --dependency=.*\n", "", script.read_text(), flags=re.MULTILINE)
    # with a range, Slurm may choose another number of nodes than before
    is_range = re.search(r"^#SBATCH --nodes=\d+-", text, re.MULTILINE)
    words = jobs.options_of(job, text)
    words = [word for word in words if not (is_range and word.startswith("--nodes="))]
    client.try_script(text, [*words, f"--exclude={excluded}"])

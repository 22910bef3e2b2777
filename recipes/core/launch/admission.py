"""Whether a job may use its run directory. Never imports torch."""

import os
from pathlib import Path

from recipes.core.config.parser import Settings
from recipes.core.errors import ConfigError
from recipes.core.files import ROOT
from recipes.core.launch import snapshot
from recipes.core.run import directory, in_use, source
from recipes.core.run.attempt import Attempt
from recipes.core.slurm import environment, jobstate
from recipes.core.slurm.jobstate import Job
from recipes.core.variables import Environ

SKEW_S = 60.0  # between the clocks of a node and of the controller


def require_unused(settings: Settings, attempt: Attempt, job: Job, environ: Environ) -> None:
    """Raises ConfigError if the job may not use the run directory."""
    folder = attempt.run_dir
    repository = source.home(ROOT)
    problem = ""
    if not attempt.number and snapshot.was_begun(
        repository, environment.allocation_id(environ), folder
    ):
        problem = (
            f"run_dir={folder}: this job was started before, but this folder does not have its "
            "files: give a folder that all nodes share"
        )
    elif not settings.run.run_dir and (
        _is_of_earlier_job(attempt, job, environ) or _has_other_files(attempt, job)
    ):
        problem = (
            f"run_dir={folder}: holds the run of an earlier job with this ID, or a copy of one: "
            "give run_dir="
        )
    elif settings.config.starts_a_run:
        # the ranks check this again, but in a container they may have no scontrol
        problem = in_use.check(attempt, environ)
    if problem:
        raise ConfigError(problem)


def _is_of_earlier_job(attempt: Attempt, job: Job, environ: Environ) -> bool:
    """Whether the attempts before this one are older than this job, or were copied: its ID was used
    before, and it was never requeued.
    """
    if not attempt.number or environment.restarts(environ):
        return False
    first = Attempt(attempt.run_dir, 0).read("opened.json")
    start = jobstate.moment(job.start) or 0.0
    return not directory.is_marked(attempt.run_dir, first) or first["time"] < start - SKEW_S


def _has_other_files(attempt: Attempt, job: Job) -> bool:
    """Whether the run directory of a job that has never begun holds more than the files of its
    submission, such as checkpoints in a folder that was copied.
    """
    if attempt.number:
        return False
    logs = {Path(path).name for path in (job.log, job.error_log)}
    names = set(os.listdir(attempt.run_dir)) - logs - {"job.sh", "job.yaml", "attempts"}
    return not all(name.startswith(".") for name in names)  # of an unfinished write

"""Sites that accept only some ways to request resources: jobs follow the profile. On a real Slurm with plugins that refuse the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import jobs
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(300)

KEYS = ("recipe=toy", "nodes=1", "gpus_per_node=2", "cpus_per_rank=1", "cluster=here")
SITE = "extra: --exclusive --mem=0 --switches=1@00:00:01\n"
WAYS = ("--gres", "--gpus-per-node", "--gpus-per-task")
# sbatch asks the first of these, the controller the second.
CLI_FILTER = """
function slurm_cli_setup_defaults(options, early) return slurm.SUCCESS end
function slurm_cli_post_submit(offset, job, step) return slurm.SUCCESS end
function slurm_cli_pre_submit(options, offset)
    if options["type"] ~= "sbatch" then return slurm.SUCCESS end -- a step has the GPUs of its job
    for _, way in ipairs({"gres", "gpus-per-node", "gpus-per-task"}) do
        if (options[way] ~= nil) ~= (way == "WAY") then
            slurm.log_error("this site takes GPUs by --WAY alone")
            return slurm.ERROR
        end
    end
    return slurm.SUCCESS
end
"""
JOB_SUBMIT = """
function slurm_job_modify(job, record, partitions, user) return slurm.SUCCESS end
function slurm_job_submit(job, partitions, user)
    if job.shared == 0 and job.pn_min_memory == 0 and job.req_switch == 1 then return slurm.SUCCESS end
    slurm.log_user("this site takes jobs with --exclusive --mem=0 --switches=1 alone")
    return slurm.ERROR
end
return slurm.SUCCESS
"""


@pytest.fixture
def strict(slurm: Cluster) -> Iterator[Cluster]:
    """The cluster with those plugins; its own configuration comes back."""
    before = slurm.conf.read_text()
    (slurm.conf.parent / "job_submit.lua").write_text(JOB_SUBMIT)
    try:
        slurm.conf.write_text(f"{before}JobSubmitPlugins=lua\nCliFilterPlugins=lua\n")
        slurm.run("scontrol", "reconfigure", check=True)
        yield slurm
    finally:
        slurm.conf.write_text(before)
        slurm.run("scontrol", "reconfigure", check=True)
        jobs.leave_no_job(slurm)


@pytest.mark.long
def test_jobs_request_resources_as_the_site_requires(strict: Cluster, tmp_path: Path) -> None:
    repo, log, run_dir = jobs.copy_repository(tmp_path / "clone"), tmp_path / "log", tmp_path / "run"
    profile, script = repo / "env/clusters/here.yaml", tmp_path / "toy.sh"

    def launch(*words: str) -> tuple[int, str, str]:
        done = strict.run(sys.executable, "launch.py", *KEYS, *words, cwd=repo, env=jobs.PYTHON, timeout=120)
        return done.returncode, done.stdout, done.stderr

    for way in WAYS:
        (strict.conf.parent / "cli_filter.lua").write_text(CLI_FILTER.replace("WAY", way.removeprefix("--")))
        profile.write_text(f"gpus: {way}\n{SITE}")
        status, text, stderr = launch("launcher=print")
        assert status == 0, stderr
        script.write_text(text)
        asked = strict.run("sbatch", "--test-only", script, cwd=repo)
        assert asked.returncode == 0, f"{way}: {asked.stderr}"
    # A ready script, whose directives are its own, is not taken; the one that launcher=print shows runs to its end.
    asked = strict.run("sbatch", "--test-only", "sbatch/mnist_2x8.sh", cwd=repo)
    assert "this site takes GPUs by --gpus-per-task alone" in asked.stderr
    words = ("device=cpu", "cpu_threads=1", "max_steps=2", f"run_dir={run_dir}")
    job = jobs.sbatch(strict, repo, log, "--ntasks-per-node=1", str(script), *words)  # one rank, which is quicker
    assert jobs.ended(strict, job, log) == ("COMPLETED", "0:0"), jobs.tail(log)
    assert jobs.read(run_dir / "summary.json")["world_size"] == 1
    assert strict.jobs(job)[0]["TresPerTask"] in ("gres:gpu:1", "cpu=1,gres/gpu=1")  # Slurm 22.05; 24.11
    # Through submitit; and without the profile's keys the site's own words.
    status, text, stderr = launch("time=5", "extra=--begin=now+1hour")
    assert status == 0, stderr
    profile.write_text(SITE)
    status, _, stderr = launch()
    assert (status, len(stderr.splitlines())) == (3, 1), stderr
    assert "this site takes GPUs by --gpus-per-task alone" in stderr
    profile.write_text("gpus: --gpus-per-task\n")
    assert "this site takes jobs with --exclusive --mem=0 --switches=1 alone" in launch()[2]

"""A job on a bad node is examined, and requeued without that node."""

import json
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipes.core import errors
from recipes.core.launch import bad_nodes, examination
from recipes.core.run import attempt as attempts
from recipes.core.run import directory
from recipes.core.run import spec as specs
from tests import helpers
from tests.helpers import ROOT
from tests.unit.launch.stand_ins import Stubs, describe

# as launch.py submits it
SCRIPT = "#SBATCH --nodes=2\n{}#SBATCH --requeue\nexport RECIPES_PYTHON=/python\n"


def doctor_finds(*bad: str, healthy: bool = False) -> str:
    """The body of a stub of srun whose doctor reports these nodes to exclude."""
    verdict = shlex.quote(json.dumps({"healthy": healthy, "exclude": bad}))
    find_folder = "for word; do [[ $word != run_dir=* ]] || folder=${word#run_dir=}; done"
    return f"{find_folder}; mkdir -p $folder; echo {verdict} > $folder/doctor.json"


@pytest.fixture(autouse=True)
def no_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub of srun writes the verdict itself."""
    monkeypatch.setattr(examination, "JUDGE", ("true",))


@dataclass(frozen=True)
class ScriptJob:
    """A job of two nodes, in which the doctor finds that the nodes n2 and n3 are bad."""

    run_dir: Path
    environ: dict[str, str]

    def examine(self, resubmits: int = 2, **environ: str) -> int:
        return examination.examine("mnist", resubmits, {**self.environ, **environ})


@pytest.fixture
def script_job(tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> ScriptJob:
    helpers.use_root(monkeypatch, tmp_path)
    for name in ("recipes", "env"):
        (tmp_path / name).symlink_to(ROOT / name)
    # Slurm 26.05 describes a job of 4 tasks with a GPU each like this.
    asked = "Partition=gpu Account=(null) QOS=high Reservation=r1 Features=a100"
    fields = (
        f"JobId=7 TimeLimit=00:07:00 ExcNodeList=n1 NumNodes=2 {asked} NumTasks=4 "
        "TresPerTask=cpu=5,gres/gpu=1"
    )
    stubs.add("scontrol", f"[ $1 != show ] || echo '{fields}'")
    stubs.add("srun", doctor_finds("n2", "n3"))
    stubs.add("sbatch", "cat > $NOTES/asked; env > $NOTES/sbatch.env")
    environ = {
        **os.environ,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n[2-3]",
        "SLURM_TASKS_PER_NODE": "3,1",
        "SLURM_CPUS_PER_TASK": "5",
        "SLURM_NTASKS": "4",
    }
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "job.sh").write_text(SCRIPT.format("#SBATCH --dependency=afterok:3\n"))
    words = [
        "epochs=3",
        f"run_dir={run_dir}",
        "device=cpu",
        "network=ethernet",
        "data_dir=/d",
        "umask=027",
    ]
    return ScriptJob(run_dir, environ | helpers.in_job("mnist", words))


def test_a_requeue_leaves_out_bad_nodes(
    script_job: ScriptJob, stubs: Stubs, capfd: pytest.CaptureFixture[str]
) -> None:
    """First Slurm is asked whether the job could run without them."""
    (stubs.folder / "runs").mkdir()
    attempt = helpers.attempt(script_job.run_dir, step=None)
    directory.write_status(attempt.run_dir, "failed", attempt=0, step=3)  # with restarts=
    refused = {attempts.VARIABLE: str(attempt.folder)}
    assert script_job.examine(SLURM_CLUSTER_NAME="c", **refused) == errors.EXIT_MACHINE
    assert directory.read_status(attempt.run_dir)["next"] == "requeued"
    line = "bad nodes: n2,n3; requeued without them (requeues left: 1)"
    assert line in capfd.readouterr().err
    assert line in helpers.failure(script_job.run_dir, 0)["error"]
    assert set(bad_nodes.known(stubs.folder, "c")) == {"n2", "n3"}
    assert stubs.calls("sbatch") == [["--test-only", "--exclude=n1,n2,n3"]]
    assert (stubs.folder / "asked").read_text() == SCRIPT.format("")
    assert "SLURM_NTASKS" not in (stubs.folder / "sbatch.env").read_text()
    asked = [call for call in stubs.calls("scontrol") if call[0] != "show"]
    assert asked == [["requeue", "7"], ["update", "JobId=7", "ExcNodeList=n1,n2,n3"]]


def test_max_resubmits_limits_the_requeues(
    script_job: ScriptJob, stubs: Stubs, capfd: pytest.CaptureFixture[str]
) -> None:
    for left in (1, 0):
        script_job.examine()
        assert f"requeued without them (requeues left: {left})" in capfd.readouterr().err
    assert examination.requeues(script_job.run_dir, {"SLURM_JOB_ID": "7"}) == 2
    assert examination.requeues(script_job.run_dir, {"SLURM_JOB_ID": "8"}) == 0
    assert script_job.examine() == errors.EXIT_MACHINE
    line = (
        "bad nodes: n2,n3; not requeued, since max_resubmits= is reached: "
        "submit the job with exclude=n1,n2,n3"
    )
    assert f"{line} " in capfd.readouterr().err
    assert len(stubs.calls("sbatch")) == 2


def test_a_job_whose_number_of_nodes_is_a_range_may_get_another_number(
    script_job: ScriptJob, stubs: Stubs
) -> None:
    (script_job.run_dir / "job.sh").write_text("#SBATCH --nodes=10-12\n")
    script_job.examine()
    [call] = stubs.calls("sbatch")
    assert "--nodes=2" not in call


def test_a_ready_script_is_tried_with_the_size_that_was_typed(
    script_job: ScriptJob, stubs: Stubs
) -> None:
    """On nodes of four GPUs, Slurm would refuse the eight of the script."""
    (script_job.run_dir / "job.sh").write_text("#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\n")
    size = "NumNodes=2 CPUs/Task=5 NtasksPerN:B:S:C=4:0:*:* TresPerNode=gres/gpu:4"
    nodes = "Partition=gpu QOS=high Reservation=r1 Features=a100 TimeLimit=00:07:00"
    stubs.add("scontrol", f"[ $1 != show ] || echo 'JobId=7 {size} {nodes}'")
    script_job.examine()
    [call] = stubs.calls("sbatch")
    typed = ["--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=5"]
    typed += ["--time=00:07:00", "--partition=gpu", "--qos=high"]
    typed += ["--constraint=a100", "--reservation=r1"]
    assert call == ["--test-only", *typed, "--exclude=n2,n3"]


@pytest.mark.parametrize("refusing", ["sbatch", "scontrol"])
def test_a_refused_requeue_is_reported_in_one_line(
    script_job: ScriptJob, stubs: Stubs, capfd: pytest.CaptureFixture[str], refusing: str
) -> None:
    show = "echo JobId=7 JobState=RUNNING Restarts=1"
    stubs.add(refusing, f"if [ $1 = show ]; then {show}; else echo not allowed >&2; exit 1; fi")
    assert script_job.examine(SLURM_RESTART_COUNT="1") == errors.EXIT_MACHINE
    excluded = "n2,n3" if refusing == "scontrol" else "n1,n2,n3"
    line = (
        "mnist: bad nodes: n2,n3; a requeue that excludes them failed (not allowed): "
        f"submit the job with exclude={excluded} (sbatch: --exclude={excluded})\n"
    )
    assert capfd.readouterr().err == line
    assert not [call for call in stubs.calls("scontrol") if call[0] == "update"]


def test_a_requeue_that_cannot_exclude_the_nodes_is_no_reason_to_submit_the_job_again(
    script_job: ScriptJob, stubs: Stubs, capfd: pytest.CaptureFixture[str]
) -> None:
    stubs.add("scontrol", "if [ $1 = update ]; then echo not allowed >&2; exit 1; fi")
    assert script_job.examine() == errors.EXIT_MACHINE
    line = (
        "mnist: bad nodes: n2,n3; requeued, but not without them (not allowed): "
        "type scontrol update JobId=7 ExcNodeList=n2,n3\n"
    )
    assert capfd.readouterr().err == line


def test_the_doctor_gets_all_gpus_and_the_keys_of_the_run(
    script_job: ScriptJob, stubs: Stubs
) -> None:
    script_job.examine()
    [call] = stubs.calls("srun")
    assert call[-5:] == [
        f"run_dir={script_job.run_dir}/doctor",
        "device=cpu",
        "network=ethernet",
        "data_dir=/d",
        "umask=027",
    ]
    size = {"--nodes=2", "--ntasks=4", "--cpus-per-task=5", "--mem=0", "--gpu-bind=none"}
    assert {*size, "--export=ALL", "recipes.doctor"} <= set(call)
    assert "--ntasks-per-node=1" not in call
    assert call.index("--wait=60") < call.index("--wait=0")
    of_run = [f"run_dir={script_job.run_dir}"]
    image = helpers.in_job("mnist", of_run, step=("--x",), inside=("run", "docker://x"))
    script_job.examine(**image)
    call = stubs.calls("srun")[-1]
    at = call.index("env")
    assert call[at - 1] == "--x"  # an option of srun, and not of env
    assert call[at + 3 : at + 5] == ["run", "docker://x"]
    assert "--nv" not in call
    stubs.add("scontrol", "echo JobId=7 NumTasks=4 TresPerNode=gres/gpu:4")
    script_job.examine()
    assert {"--ntasks=2", "--ntasks-per-node=1"} <= set(stubs.calls("srun")[-1])


def test_the_nodes_of_a_restart_are_examined_without_the_others(
    script_job: ScriptJob, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs.add("judge", "echo $SLURM_JOB_NODELIST $2 >> $NOTES/judged")
    monkeypatch.setattr(examination, "JUDGE", ("judge",))
    spec = specs.of_job(script_job.environ)
    folder = script_job.run_dir / "doctor"
    of_job = {"SLURM_JOB_NODELIST": "n[2-5]", "SLURM_TASKS_PER_NODE": "1,2,3,1"}
    examination.examine_nodes(spec, folder, ["n2", "n4", "n5"], script_job.environ | of_job)
    [call] = stubs.calls("srun")
    assert {"--nodes=3", "--ntasks=5", "--nodelist=n2,n4,n5", "--overlap"} <= set(call)
    assert "bandwidth=false" in call
    assert (stubs.folder / "judged").read_text() == "n2,n4,n5 umask=027\n"


def test_no_training_without_a_verdict(
    script_job: ScriptJob, stubs: Stubs, capfd: pytest.CaptureFixture[str]
) -> None:
    """A verdict of an earlier job does not count."""
    (script_job.run_dir / "doctor/reports").mkdir(parents=True)
    (script_job.run_dir / "doctor/doctor.json").write_text('{"healthy": true}')
    stubs.add("srun", "true")
    assert script_job.examine() == errors.EXIT_MACHINE
    assert "the doctor gave no verdict" in capfd.readouterr().err
    assert not (script_job.run_dir / "doctor/reports").exists()
    stubs.add("srun", doctor_finds())
    assert script_job.examine() == errors.EXIT_MACHINE
    assert "the doctor found a fault that excluding nodes would not fix" in capfd.readouterr().err
    stubs.add("srun", doctor_finds(healthy=True))
    assert script_job.examine() == errors.EXIT_DONE


def test_bad_nodes_are_known_for_a_day_in_their_cluster(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    ago = {
        "n1": time.time() - 25 * 3600,
        "n2": time.time() - 23 * 3600,
        "n3": "today",
        "n4": time.time() + 3600,
    }
    (tmp_path / "runs/bad-nodes.json").write_text(json.dumps({"a": ago, "b": 3}))
    bad_nodes.remember(tmp_path, "b", ["n9"])
    assert set(bad_nodes.known(tmp_path, "a")) == {"n2"}
    bad_nodes.remember(tmp_path, "a", ["n2"])
    assert bad_nodes.known(tmp_path, "a")["n2"] > time.time() - 3600
    assert set(bad_nodes.known(tmp_path, "b")) == {"n9"}
    assert bad_nodes.known(tmp_path, "c") == {}


def test_jobs_avoid_bad_nodes_until_forgotten(
    tmp_path: Path, stubs: Stubs, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    stubs.add("scontrol", "echo ClusterName = a")
    stubs.add("sinfo", "echo n1; echo n2; echo n3")
    for cluster, node in (("a", "n1"), ("a", "gone"), ("a", "n2"), ("b", "n3")):
        bad_nodes.remember(tmp_path, cluster, [node])
    for but, excluded in (("", "n9,n1,n2"), ("n1", "n9,n2"), ("all", "n9")):
        job = describe("exclude=n9", f"forget={but}", root=tmp_path)
        nodes = bad_nodes.exclude(job).directives["exclude"]
        assert nodes == excluded
        assert ("n2 (" in capsys.readouterr().out) == (but != "all")
    for node, left in (("n1", {"gone", "n2"}), ("all", set())):
        bad_nodes.forget(tmp_path, node)
        assert set(bad_nodes.known(tmp_path, "a")) == left
        assert set(bad_nodes.known(tmp_path, "b")) == {"n3"}

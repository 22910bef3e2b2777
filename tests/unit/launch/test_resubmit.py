"""A job on a bad node is examined, and submitted again without that node."""

import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipes.core import errors
from recipes.core.launch import allocation, batch, resubmit, submit
from tests import helpers
from tests.helpers import ROOT
from tests.unit.launch.stand_ins import Stubs, describe, directives


def options_as_submitted(environ: dict[str, str]) -> dict[str, str]:
    return resubmit.options_as_submitted(environ, allocation.fields_of_job(environ))


def test_a_resubmitted_job_has_the_options_and_logs_of_the_first(stubs: Stubs) -> None:
    fields = "JobId=75 Nice=0\n   OverSubscribe=OK TimeLimit=01:00:00\n   StdErr=/a 75/x-75.175.out\n   StdOut=/a 75/x-75.175.out\n"
    stubs.add("scontrol", f"printf {shlex.quote(fields + '   TresPerNode=gres/gpu:2,gres/shard:1')}")
    assert options_as_submitted({"SLURM_JOB_ID": "75"}) == {
        "time": "01:00:00", "gres": "gpu:2,shard:1", "output": "/a 75/x-%j.175.out",
    }  # fmt: skip
    stubs.add(
        "scontrol",
        "printf 'JobId=9\nStdErr=/x/err\nStdOut=/x/7_3.out\nOverSubscribe=USER MemPerTres=gres:gpu:100 TresPerJob=gres:gpu:4 TresPerNode=gres:gpu:2,gres:nvme:1\n\nStdOut=/y\n'",
    )
    array = {
        "SLURM_JOB_ID": "9",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_GPUS": "9",
        "SLURM_GPUS_PER_NODE": "2",
    }
    assert options_as_submitted(array) == {
        "array": "3", "gpus": "4", "gpus-per-node": "2", "gres": "nvme:1", "mem-per-gpu": "100M", "exclusive": "user", "output": "/x/%A_%a.out", "error": "/x/err",
        "open-mode": "append",
    }  # fmt: skip
    stubs.add(
        "scontrol",
        "echo JobId=9 Features=a100 MinMemoryNode=1G MinMemoryCPU=2G ExcNodeList=n1 Nice=7 OverSubscribe=NO",
    )
    size = {"NUM_NODES": "2", "PARTITION": "gpu", "ACCOUNT": "a", "QOS": "q", "RESERVATION": "r", "NAME": "x"}
    environ = {f"SLURM_JOB_{name}": value for name, value in {**size, "ID": "9"}.items()}
    assert options_as_submitted({**environ, "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "5"}) == {
        "nodes": "2", "partition": "gpu", "account": "a", "qos": "q", "reservation": "r", "job-name": "x", "ntasks-per-node": "4",
        "cpus-per-task": "5", "constraint": "a100", "mem": "1G", "mem-per-cpu": "2G", "exclude": "n1", "nice": "7", "exclusive": "exclusive",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("OverSubscribe=OK", {}),  # up to 24.11
        ("OverSubscribe=NO", {"exclusive": "exclusive"}),
        ("OverSubscribe=TOPO", {"exclusive": "topo"}),
        ("OverSubscribe=NO Exclusive=NO", {}),  # 26.05
        ("OverSubscribe=YES Exclusive=NO", {}),
        ("OverSubscribe=NO Exclusive=NODE", {"exclusive": "exclusive"}),
        ("OverSubscribe=NO Exclusive=USER", {"exclusive": "user"}),
        ("TresPerTask=cpu=2", {}),
        ("TresPerTask=cpu=2,gres/gpu:a100=1", {"gpus-per-task": "a100:1"}),
        ("TresPerTask=gres:gpu:1", {"gpus-per-task": "1"}),
    ],
)
def test_exclusive_nodes_and_gpus_per_task_are_requested_again(
    stubs: Stubs, fields: str, expected: dict[str, str]
) -> None:
    stubs.add("scontrol", f"echo JobId=9 {fields}; echo StdErr=; echo StdOut=/x/9.out")
    assert options_as_submitted({"SLURM_JOB_ID": "9"}) == {**expected, "output": "/x/%j.out"}


def doctor_finds(*bad: str, healthy: bool = False) -> str:
    """The body of a stub of srun whose doctor reports these nodes to exclude."""
    verdict = shlex.quote(json.dumps({"healthy": healthy, "exclude": bad}))
    find_folder = "for word; do [[ $word != run_dir=* ]] || folder=${word#run_dir=}; done"
    return f"env > $NOTES/srun.env; {find_folder}; mkdir -p $folder; echo {verdict} > $folder/doctor.json"


@pytest.fixture(autouse=True)
def no_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub of srun writes the verdict itself."""
    monkeypatch.setattr(resubmit, "JUDGE", ("true",))


@dataclass(frozen=True)
class ScriptJob:
    """A job of a ready script, in which the doctor finds that the nodes n2 and n3 are bad."""

    run_dir: Path
    words: list[str]
    environ: dict[str, str]

    def examine(self, resubmits: int = 2, **environ: str) -> int:
        return resubmit.examine("mnist", resubmits, self.words, {**self.environ, **environ})


@pytest.fixture
def script_job(tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> ScriptJob:
    helpers.use_root(monkeypatch, tmp_path)
    for name in ("recipes", "env"):
        (tmp_path / name).symlink_to(ROOT / name)
    # Slurm 26.05 describes a job of 4 tasks with a GPU each like this. Only SLURM_TRES_PER_TASK has the number of GPUs.
    fields = "JobId=7 TimeLimit=00:07:00 ExcNodeList=n1 OverSubscribe=NO Exclusive=NO NumTasks=4 TresBind=gres/gpu:per_task:1 TresPerTask=cpu=5,gres/gpu=1 StdErr="
    stubs.add("scontrol", f"printf {shlex.quote(fields.replace(' ', chr(10)))}")
    stubs.add("srun", doctor_finds("n2", "n3"))
    stubs.add("sbatch", "env > $NOTES/sbatch.env; echo 8")
    environ = {
        **os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_PARTITION": "gpu", "SLURM_CPUS_PER_TASK": "5",
        "SLURM_TRES_PER_TASK": "cpu=5,gres/gpu=1", "SLURM_TRES_BIND": "gres/gpu:per_task:1", "SLURM_NTASKS": "4",
    }  # fmt: skip
    run_dir = tmp_path / "run"
    words = ["epochs=3", f"run_dir={run_dir}", "device=cpu", "network=ethernet", "data_dir=/d"]
    return ScriptJob(run_dir, words, environ)


def test_max_resubmits_limits_the_resubmissions(
    script_job: ScriptJob, stubs: Stubs, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same script is submitted again, with the remaining number in a variable."""
    for number, left in (("", "1"), ("1", "0")):
        assert script_job.examine(RECIPES_RESUBMITS=number) == errors.EXIT_MACHINE
        line = f"bad nodes: n2,n3; submitted again without them, as job 8 ({left} more at most)"
        assert line in capsys.readouterr().err
        assert f"RECIPES_RESUBMITS={left}\n" in (stubs.folder / "sbatch.env").read_text()
    assert script_job.examine(RECIPES_RESUBMITS="0") == errors.EXIT_MACHINE
    assert "not submitted again, since max_resubmits is used up" in capsys.readouterr().err
    assert script_job.examine(resubmits=0) == errors.EXIT_MACHINE
    assert len(stubs.calls("sbatch")) == 2
    assert batch.finish("mnist", 0, script_job.words, script_job.environ) == errors.EXIT_MACHINE


def test_a_script_is_submitted_again_with_its_options(script_job: ScriptJob, stubs: Stubs) -> None:
    script_job.examine()
    assert stubs.calls("sbatch") == [[
        "--parsable", "--partition=gpu", "--ntasks=4", "--cpus-per-task=5", "--time=00:07:00", "--exclude=n1,n2,n3", "--gpus-per-task=1",
        f"{script_job.run_dir}/job.sh", *script_job.words,
    ]]  # fmt: skip
    variables = dict(line.partition("=")[::2] for line in (stubs.folder / "sbatch.env").read_text().splitlines())
    assert (variables["RECIPES_LEFT_OUT"], variables["RECIPES_CODE"]) == ("n1,n2,n3", str(stubs.folder))
    assert "SLURM_NTASKS" not in variables


def test_the_doctor_gets_all_gpus_and_the_keys_of_the_run(script_job: ScriptJob, stubs: Stubs) -> None:
    script_job.examine()
    [call] = stubs.calls("srun")
    assert call[-4:] == [f"run_dir={script_job.run_dir}/doctor", "device=cpu", "network=ethernet", "data_dir=/d"]
    size = {
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=5",
        "--mem=0",
        "--export=ALL",
        "--gpus=4",
    }
    assert {*size, "recipes.doctor"} <= set(call)
    assert "SLURM_TRES_" not in (stubs.folder / "srun.env").read_text()  # it would give each task only one GPU


def test_nothing_is_trained_without_a_verdict(
    script_job: ScriptJob, stubs: Stubs, capsys: pytest.CaptureFixture[str]
) -> None:
    """A verdict of an earlier job does not count."""
    (script_job.run_dir / "doctor").mkdir(parents=True)
    (script_job.run_dir / "doctor/doctor.json").write_text('{"healthy": true}')
    stubs.add("srun", "true")
    assert script_job.examine() == errors.EXIT_MACHINE
    assert "the doctor gave no verdict" in capsys.readouterr().err
    stubs.add("srun", doctor_finds(healthy=True))
    assert script_job.examine() == errors.EXIT_DONE


def test_a_job_of_launch_py_is_resubmitted_with_all_its_options(
    tmp_path: Path, stubs: Stubs, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    stubs.add("sbatch", "cp $1 $NOTES/again.sh; echo Submitted batch job 7")
    stubs.add("srun", doctor_finds("n2"))
    words = [
        "exclude=n1",
        "dependency=afterok:3",
        "doctor=true",
        "max_resubmits=3",
        "qos=high",
        "gpus=10",
        "cluster=example",
    ]
    run_dir = submit.submit(describe(*words, "epochs=3", root=tmp_path), sys.executable, f"{tmp_path}/run").run_dir
    first = directives((tmp_path / "again.sh").read_text())
    assert resubmit.examine("mnist", 3, [f"run_dir={run_dir}", "epochs=3"], {**os.environ, "SLURM_JOB_ID": "7"}) == 3
    assert "as job 7 (2 more at most)" in capsys.readouterr().err
    assert first.pop("--dependency") == "afterok:3"  # it was met
    text = (tmp_path / "again.sh").read_text()
    assert directives(text) == {**first, "--exclude": "n1,n2"}
    assert "examine mnist 2 epochs=3" in text
    assert "load gcc/12 cuda/12.4" in text.splitlines()


def test_a_failed_examination_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    environ = {"SLURM_JOB_ID": "7"}
    for words, status, expected in (
        (["epoch=3"], 2, "mnist: epoch=3: recipe mnist has no key 'epoch'"),
        ([f"run_dir={tmp_path}/file"], 3, f"mnist: run_dir={tmp_path}/file: cannot be written (Not a directory)"),
    ):
        assert resubmit.examine("mnist", 2, words, environ) == status
        line = capsys.readouterr().err
        assert line.startswith(expected)
        assert line.count("\n") == 1

"""The sbatch script that is made from a job."""

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from recipes.core import errors
from recipes.core.config.job_keys import JobKeys
from recipes.core.launch import jobs, submit
from tests import helpers
from tests.unit.launch.stand_ins import (
    HOSTILE,
    HOSTILE_ROOT,
    MODULE,
    READY,
    SHARED,
    Bench,
    describe,
    directives,
)

JOBS: tuple[tuple[str, ...], ...] = (
    ("nodes=2", "gpus_per_node=8"),
    ("device=cpu", "gpus_per_node=2", "cpu_threads=3"),
    ("gpus=10", "nodes=2", "cluster=example"),
    ("sweep.lr=0.1,0.2,0.4", "sweep.seed=1,2", "parallel=2"),
    ("sweep.lr=0.1,0.2", "run_dir=/srv/sweep"),
    (
        "constraint=[a|b]&c*2",
        "exclude=node[1-3],x7",
        "extra=--mem=0 --exclusive --comment=$(x);y&z",
        "mail=me",
    ),
    ("data_dir=/" + "".join(word.removeprefix("data_dir=/") for word in HOSTILE),),
)

FINISHED = (
    r"""#!/bin/bash
# Made by launch.py. Options of sbatch before the script's name override these.
#SBATCH --job-name=mnist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR2@120
#SBATCH --chdir=/repo
#SBATCH --output=%x-%j.out

export RECIPES_CONTAINER=''
export RECIPES_CONTAINER_RUNTIME=auto
export RECIPES_CONTAINER_MOUNTS=''
. /repo/sbatch/job.sh || exit
set -- epochs=5 "$@"
begin mnist "$@"
while next_step; do
    srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --export=ALL --kill-on-bad-exit=1 """
    r"""--wait=60 --mem=0 "${step[@]}" \
        "${inside[@]}" -u -m recipes.mnist "${words[@]}"
    step_ended $?
done
"""
)


def test_a_finished_script() -> None:
    job = describe("nodes=2", "gpus_per_node=8", "epochs=5", root=Path("/repo"))
    assert jobs.sbatch_script(job) == FINISHED
    assert job.ranks == 16


@pytest.mark.parametrize("words", JOBS, ids=" ".join)
def test_submitit_has_the_directives_of_the_script(words: tuple[str, ...]) -> None:
    job = describe(*words, root=HOSTILE_ROOT)
    executor = submit._executor(job, "/py thon", job.root / "runs/submitit")
    if job.elements:
        executor.parameters["map_count"] = len(job.elements)
    # submitit 1.5 has no public function that returns the text without submitting it.
    text = executor._make_submission_file_text(executor._submitit_command_str, "")
    ours = directives(jobs.sbatch_script(job))
    theirs = directives(text)
    number = "%A_%a" if job.elements else "%j"
    assert ours.pop("--output") == f"%x-{number}.out"
    assert theirs.pop("--output") == f"{HOSTILE_ROOT}/runs/submitit/{number}_0_log.out"
    assert ours == theirs
    assert ours["--chdir"] == str(HOSTILE_ROOT)


def test_submitit_adds_no_signal_for_a_program_that_gets_none() -> None:
    """Its own one would ask the program to stop."""
    job = describe("recipe=script", "program=/a.py", "stop_before_s=0", root=HOSTILE_ROOT)
    assert "--signal" not in directives(jobs.sbatch_script(job))
    executor = submit._executor(job, "/py thon", job.root / "runs/submitit")
    text = executor._make_submission_file_text(executor._submitit_command_str, "")
    assert directives(text)["--signal"] == "B:CONT@1"


@pytest.mark.parametrize(
    ("option", "words", "expected"),
    [
        ("--gres", ("nodes=2", "gpu_type=a100"), {"--gres": "gpu:a100:4"}),
        ("--gpus-per-task", ("nodes=2", "gpu_type=a100"), {"--gpus-per-task": "a100:1"}),
        ("--gpus-per-task", ("gpus=10",), {"--gpus-per-task": "1"}),
        (
            "--gpus-per-task",
            ("recipe=script", "program=/a.py", "through=torchrun"),
            {"--gpus-per-task": "4"},
        ),
        ("--gres", ("extra=--gres=nvme:100G",), {"--gres": "gpu:4,nvme:100G"}),
        ("--gres", ("device=cpu",), {}),
    ],
)
def test_the_profile_chooses_the_options_for_gpus_and_nodes(
    site: Path, option: str, words: tuple[str, ...], expected: dict[str, str]
) -> None:
    nodes = {"--exclusive": "", "--mem": "0", "--switches": "1@30:00"}
    count = "" if "gpus=10" in words else "gpus_per_node: 4\n"
    site.write_text(f"gpus: {option}\n{count}extra: --exclusive --mem=0 --switches=1@30:00\n")
    text = jobs.sbatch_script(describe("cluster=here", *words))
    asked = directives(text)
    assert {name: asked[name] for name in asked if "gpu" in name or name == "--gres"} == expected
    assert {name: asked[name] for name in nodes} == nodes
    assert ("--gpu-bind=none" in text) == ("--gpus-per-task" in expected)


PROGRAM = ("recipe=script", "program=/a.py")  # a program of the user
ASKED: tuple[tuple[tuple[str, ...], dict[str, str | None]], ...] = (
    (
        (),
        {
            "--nodes": "1",
            "--ntasks-per-node": "1",
            "--gpus-per-node": "1",
            "--cpus-per-task": "8",
            "--time": "60",
        },
    ),
    (
        ("nodes=2", "gpus_per_node=8", "restarts=1", "spare=1"),
        {"--nodes": "3", "--ntasks-per-node": "8", "--gpus-per-node": "8", "--no-kill": ""},
    ),
    (
        ("nodes=3", "ranks_per_node=2", "restarts=1", "min_nodes=2"),
        {"--nodes": "3", "--ntasks-per-node": "2", "--gpus-per-node": "2", "--no-kill": ""},
    ),
    (
        (*PROGRAM, "device=cpu", "through=torchrun", "nproc_per_node=8", "cpus_per_rank=2"),
        {"--ntasks-per-node": "1", "--cpus-per-task": "16"},
    ),
    (
        ("device=cpu", "gpus_per_node=8", "ranks_per_node=3"),
        {"--ntasks-per-node": "3", "--gpus-per-node": None, "--cpus-per-task": "1"},
    ),
    (("device=cpu", "gpus_per_node=2"), {"--ntasks-per-node": "2", "--gpus-per-node": None}),
    (
        ("gpus=10",),
        {
            "--nodes": "1-10",
            "--ntasks": "10",
            "--gpus-per-task": "1",
            "--ntasks-per-node": None,
            "--gpus-per-node": None,
        },
    ),
    (("gpus=2", "nodes=2"), {"--nodes": "2", "--ntasks": "2", "--gpus-per-task": "1"}),
    (
        ("gpus=6", "device=cpu"),
        {"--nodes": "1-6", "--ntasks": "6", "--gpus-per-task": None, "--gpus-per-node": None},
    ),
    (
        ("gpus_per_node=4", "ranks_per_node=4", "gpu_type=a100"),
        {"--ntasks-per-node": "4", "--gpus-per-node": "a100:4"},
    ),
    (("gpus=10", "gpu_type=a100"), {"--ntasks": "10", "--gpus-per-task": "a100:1"}),
    (("recipe=imagenet", "device=cpu", "cpu_threads=4", "num_workers=3"), {"--cpus-per-task": "7"}),
    (("recipe=imagenet", "device=cpu"), {"--cpus-per-task": "7"}),
    (
        ("cluster=example",),
        {
            "--ntasks-per-node": "4",
            "--gpus-per-node": "4",
            "--partition": "gpu",
            "--account": "my-project",
        },
    ),
    (("dependency=afterany:7?after:8_3+5",), {"--dependency": "afterany:7?after:8_3+5"}),
    (("mail=a@b.org",), {"--mail-user": "a@b.org", "--mail-type": "END,FAIL,REQUEUE"}),
    (
        ("mail=a@b.org", "extra=--mail-type=ALL --switches=1"),
        {"--mail-type": "ALL", "--switches": "1"},
    ),
    (("extra=--mem-per-cpu=2G --hold",), {"--mem-per-cpu": "2G", "--hold": ""}),
    (("time=1:30",), {"--time": "2"}),
    (
        (),
        {
            "--requeue": "",
            "--open-mode": "append",
            "--signal": "USR2@120",
            "--job-name": "mnist",
            "--partition": None,
            "--no-kill": None,
        },
    ),
    (("time=2",), {"--signal": "USR2@30"}),
    (("stop_before_s=300",), {"--signal": "USR2@120"}),
    (
        (*PROGRAM, "nodes=2", "gpus_per_node=8"),
        {"--ntasks-per-node": "8", "--cpus-per-task": "8", "--signal": "B:USR2@120"},
    ),
    ((*PROGRAM, "stop_before_s=300"), {"--signal": "B:USR2@300"}),
    ((*PROGRAM, "stop_before_s=300", "time=10"), {"--signal": "B:USR2@150"}),
    ((*PROGRAM, "stop_before_s=0"), {"--signal": None}),
    (
        (*PROGRAM, "through=node", "nodes=2", "gpus_per_node=8"),
        {"--nodes": "2", "--ntasks-per-node": "1", "--gpus-per-node": "8", "--cpus-per-task": "64"},
    ),
    (
        (*PROGRAM, "through=torchrun", "device=cpu", "ranks_per_node=3", "cpu_threads=2"),
        {"--ntasks-per-node": "1", "--gpus-per-node": None, "--cpus-per-task": "6"},
    ),
    (
        ("exclude=node[1-3],x7", "constraint=[a|b]&c*2"),
        {"--exclude": "node[1-3],x7", "--constraint": "[a|b]&c*2"},
    ),
    (
        ("partition=gpu,long", "account=me", "qos=high", "reservation=r1"),
        {"--partition": "gpu,long", "--account": "me", "--qos": "high", "--reservation": "r1"},
    ),
    (
        ("name=a.job@x:y=z", "cpus_per_rank=6"),
        {"--job-name": "a.job@x:y=z", "--cpus-per-task": "6"},
    ),
    (("sweep.lr=0.1,0.2,0.4", "parallel=2"), {"--array": "0-2%2"}),
    (("sweep.lr=0.1,0.2,0.4", "parallel=9"), {"--array": "0-2%3"}),
)
# Keys that are not an option of sbatch, with a line of the script; "" for keys that do not concern
# the job.
IN_SCRIPT = {
    "cluster=example": "export RECIPES_CLUSTER=example",
    "container=docker://x": "export RECIPES_CONTAINER=docker://x",
    "container_runtime=pyxis": "export RECIPES_CONTAINER_RUNTIME=pyxis",
    "container_mounts=/a:/b:ro": "export RECIPES_CONTAINER_MOUNTS=/a:/b:ro",
    "snapshot=false": "export RECIPES_SNAPSHOT=false",
    "doctor=true": "examine mnist 2",
    "max_resubmits=5": "examine mnist 5",
    **dict.fromkeys(
        ("recipe=mnist", "launcher=print", "node_rank=0", "master=", "wait=true", "forget=node1"),
        "",
    ),
}


def test_every_job_key_reaches_slurm() -> None:
    in_script = {word.split("=")[0] for word in IN_SCRIPT}
    for field in dataclasses.fields(JobKeys):
        options = set(re.findall(r"--[a-z-]+", field.metadata["instead"]))
        expectations = [
            asked
            for words, asked in ASKED
            for word in words
            if word.split("=")[0].endswith(field.name)
        ]
        known = options and any(asked.get(option) for asked in expectations for option in options)
        assert known or field.name in {"extra", "gpu_memory_gb", *in_script}, field.name
    for word, line in IN_SCRIPT.items():
        job = describe(word, *(["doctor=true"] if "max_resubmits" in word else []))
        assert line in jobs.sbatch_script(job), word


@pytest.mark.parametrize(("words", "expected"), ASKED)
def test_each_job_key_becomes_an_option_of_sbatch(
    words: tuple[str, ...], expected: dict[str, str | None]
) -> None:
    options = directives(jobs.sbatch_script(describe(*words)))
    assert {name: options.get(name) for name in expected} == expected
    assert not {"--mem", "--gres"} & set(options)
    assert ("--ntasks" in options) != ("--ntasks-per-node" in options)


def elements(text: str, count: int, *typed: str) -> list[list[str]]:
    """The arguments that a script sets in bash for each element of an array. typed: those of
    sbatch.
    """
    begin = text.index("\nset -- ") if "\nset -- " in text else text.index("\ncase $")
    lines = text[begin : text.index("\nesac", begin) + len("\nesac")]
    arrays = []
    for number in range(count):
        shell = ["bash", "-c", f"{lines}\nprintf '%s\\0' \"$@\"", "script", *typed]
        done = subprocess.run(
            shell, env={"SLURM_ARRAY_TASK_ID": str(number)}, capture_output=True, check=True
        )
        arrays.append(done.stdout.decode().split("\0")[:-1])
    return arrays


def test_each_run_of_a_sweep_has_its_own_values() -> None:
    hostile = [word for word in HOSTILE if "," not in word]
    folders = f"sweep.data_dir={','.join(word.partition('=')[2] for word in hostile)}"
    text = jobs.sbatch_script(describe(folders, "sweep.seed=1,2", "epochs=3"))
    wanted = [[word, f"seed={seed}", "epochs=3"] for word in hostile for seed in (1, 2)]
    assert elements(text, 2 * len(hostile)) == wanted
    # of `launch.py resume`: of equal keys, the last one counts
    assert elements(text, 1, "seed=7") == [[*wanted[0], "seed=7"]]
    case = text[text.index("\ncase $") : text.index("\nesac") + 5]
    outside = subprocess.run(["bash", "-c", case], capture_output=True, text=True)
    assert outside.stderr == "mnist: this sweep has no run \n"
    assert outside.returncode == 2


def test_shellcheck_accepts_every_script(tmp_path: Path) -> None:
    """The name of the repository needs quoting."""
    helpers.need(
        "" if shutil.which("shellcheck") else "shellcheck is not there: apt-get install shellcheck"
    )
    scripts = [SHARED, READY[0]]  # the others differ only in names and numbers
    for number, words in enumerate(JOBS):
        path = tmp_path / f"{number}.sh"
        path.write_text(jobs.sbatch_script(describe(*words, root=HOSTILE_ROOT)))
        scripts.append(path)
    # SC1091: a file of the site; SC2016: $( in single quotes is what is wanted; SC2154: set in
    # job.sh
    options = ["--severity=style", "--exclude=SC1091,SC2016,SC2154"]
    helpers.run(["shellcheck", *options, *map(str, scripts)]).expect(0)


def test_a_script_runs_no_command_from_a_folder_name_or_value(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tmp_path / HOSTILE_ROOT.name)
    job = describe(HOSTILE[0], "cluster=example", "device=cpu", root=bench.root)
    (tmp_path / "job.sh").write_text(jobs.sbatch_script(job))
    status, stderr = bench.run(tmp_path / "job.sh", **MODULE)
    assert status == errors.EXIT_CRASH, stderr
    assert "before the run began" in stderr
    assert bench.srun[-2:] == [HOSTILE[0], "device=cpu"]
    assert (tmp_path / "modules").read_text() == "load gcc/12\nload cuda/12.4\n"
    assert (tmp_path / "cluster").read_text() == "example\n"
    assert "canary" not in bench.files

"""One job description, two ways to submit it, and the batch scripts as bash runs them: with stubs for what Slurm brings."""

import ast
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from submitit.slurm.slurm import _make_sbatch_string

import launch
from recipes.core import errors, files
from recipes.core.config import profiles, recipe_conf
from recipes.core.config.job_keys import JobKeys
from recipes.core.errors import ConfigError, MachineError
from recipes.core.launch import allocation, batch, checks, cli, jobs, local, scripts, snapshot, submit
from recipes.core.launch.jobs import Job
from recipes.core.run import command_line, dryrun, rundir, scontrol, source
from recipes.core.run.dryrun import Asked
from tests import helpers

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT / "sbatch/job.sh"
READY = sorted(set((ROOT / "sbatch").glob("*.sh")) - {SHARED})
HOSTILE_ROOT = Path('/srv/it\'s a "repo"; $(touch canary) `touch canary` $HOME & <x> #y')
HOSTILE = (
    "data_dir=/$(touch canary)", "data_dir=/`touch canary`", "data_dir=/a b", "data_dir=/it's", 'data_dir=/"x"', "data_dir=/;touch canary",
    "data_dir=/a&b|c>d<e", "data_dir=/*?[a]{b,c}", "data_dir=/~", "data_dir=/\\\\n", "data_dir=/é ü 中", "data_dir=/!!", "data_dir=/#x",
)  # fmt: skip
JOBS: tuple[tuple[str, ...], ...] = (
    (),
    ("nodes=2", "gpus_per_node=8"),
    ("device=cpu", "ranks_per_node=3"),
    ("device=cpu", "gpus_per_node=2", "num_workers=3"),
    ("device=cpu", "cpu_threads=4"),
    ("gpus_per_node=4", "cpus_per_rank=6", "time=1-02:30:01"),
    ("ranks_per_node=2", "time=90"),
    ("gpus=10",),
    ("gpus=10", "nodes=2", "cluster=example"),
    ("gpus=6", "device=cpu"),
    ("sweep.lr=0.1,0.2,0.4", "sweep.seed=1,2", "parallel=2"),
    ("sweep.lr=0.1,0.2", "run_dir=/srv/sweep"),
    ("partition=gpu,long", "account=my-project", "qos=high", "reservation=r1"),
    ("constraint=[a|b]&c*2", "exclude=node[1-3],x7"),
    ("dependency=afterok:12_3:4+5?singleton", "mail=a.b+c@d.org"),
    ("extra=--mem=0 --exclusive --comment=$(x);y&z", "mail=me"),
    ("name=a.job@x:y=z",),
    ("cluster=example", "gpus_per_node=2"),
    ("cluster=example", "device=cpu", "nodes=3"),
    *((word,) for word in HOSTILE),
)


def describe(*words: str, root: Path = ROOT, base: Path = Path("/base")) -> Job:
    return jobs.describe(command_line.parse(["recipe=mnist", *words], environ={}), root, base)


def directives(text: str) -> dict[str, str]:
    """The #SBATCH lines of a script as sbatch reads them: option and value, unquoted."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            name, _, value = word.partition("=")
            assert name not in found
            found[name] = value
    assert found
    return found


def submitit_text(job: Job) -> str:
    parameters: dict[str, Any] = scripts.submitit_parameters(job, "/py thon")
    return str(_make_sbatch_string(command="x", folder="/f", map_count=len(job.elements) or None, **parameters))


# --- one description


@pytest.mark.parametrize("words", JOBS, ids=" ".join)
@pytest.mark.parametrize("root", [ROOT, HOSTILE_ROOT], ids=["plain", "hostile"])
def test_submitit_asks_for_the_same_as_the_script(words: tuple[str, ...], root: Path) -> None:
    job = describe(*words, root=root)
    ours, theirs = directives(scripts.sbatch_script(job)), directives(submitit_text(job))
    number = "%A_%a" if job.elements else "%j"
    assert ours.pop("--output") == f"%x-{number}.out"
    assert theirs.pop("--output") == f"/f/{number}_0_log.out"
    assert ours == theirs
    assert ours["--chdir"] == str(root)


@pytest.fixture
def site(bench: "Bench", monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile, cluster=here, to be written."""
    helpers.use_root(monkeypatch, bench.root)
    return bench.root / "env/clusters/here.yaml"


@pytest.mark.parametrize(
    ("way", "words", "expected"),
    [
        ("--gres", ("nodes=2", "gpu_type=a100"), {"--gres": "gpu:a100:4"}),
        ("--gpus-per-task", ("nodes=2", "gpu_type=a100"), {"--gpus-per-task": "a100:1"}),
        ("--gpus-per-task", ("gpus=10",), {"--gpus-per-task": "1"}),
        ("--gpus-per-node", ("nodes=2",), {"--gpus-per-node": "4"}),
        ("--gres", ("device=cpu",), {}),
        ("--gres", ("gpus=10", "device=cpu"), {}),
    ],
)
def test_the_profile_says_how_gpus_and_nodes_are_asked_for(
    site: Path, way: str, words: tuple[str, ...], expected: dict[str, str]
) -> None:
    nodes = {"--exclusive": "", "--mem": "0", "--segment": "4", "--switches": "1@30:00"}
    count = "" if "gpus=10" in words else "gpus_per_node: 4\n"
    site.write_text(f"gpus: {way}\n{count}exclusive: true\nmem: 0\nsegment: 4\nswitches: 1@30:00\n")
    job = describe("cluster=here", *words)
    for text in (scripts.sbatch_script(job), submitit_text(job)):
        asked = directives(text)
        assert {name: asked[name] for name in asked if "gpu" in name or name == "--gres"} == expected
        assert {name: asked[name] for name in nodes} == nodes
        assert ("--gpu-bind=none" in text) == ("--gpus-per-task" in expected)


def test_what_is_typed_wins_over_the_profiles_options(site: Path) -> None:
    site.write_text("exclusive: user\nmem: 64G\nswitches: 2\n")
    assert dict(describe("cluster=here").directives) == {"exclusive": "user", "mem": "64G", "switches": "2"}
    typed = describe("cluster=here", "extra=--mem-per-cpu=2G --exclusive --switches=1")
    assert dict(typed.directives) == {"exclusive": "", "mem-per-cpu": "2G", "switches": "1"}
    site.write_text("gpus: --gres\nexclusive: false\n")
    assert describe("cluster=here").directives == ()
    with pytest.raises(
        ConfigError, match=r"gpus=10: needs --gpus-per-task, and cluster=here asks for GPUs by --gres: "
    ):
        describe("cluster=here", "gpus=10")


def test_submitits_job_starts_and_ends_as_the_script_does() -> None:
    job = describe("cluster=example", "device=cpu", "data_dir=/a b")
    ours, theirs = scripts.sbatch_script(job), submitit_text(job)
    shared = f". {shlex.quote(str(job.root / 'sbatch/job.sh'))} || exit"
    for line in ("export RECIPES_CLUSTER=example", shared):
        assert line in ours.splitlines()
        assert line in theirs.splitlines()
    assert "load gcc/12 cuda/12.4" in theirs.splitlines()
    srun = next(line for line in theirs.splitlines() if line.startswith("srun "))
    options = {"--export=ALL", "--kill-on-bad-exit=1", "--wait=60", "--mem=0"}
    assert {*options, "--cpus-per-task=8"} <= set(shlex.split(srun))
    assert {*options, '--cpus-per-task="${SLURM_CPUS_PER_TASK:-1}"'} <= set(ours[ours.index("\nsrun ") :].split())
    for words in (
        ("gpus=10",),
        ("gpus=10", "device=cpu"),
        (),
    ):  # NCCL could not copy between GPUs that are shown to one task alone
        job = describe(*words)
        is_bound = "--gpu-bind=none" in scripts.sbatch_script(job), "--gpu-bind=none" in submitit_text(job)
        assert is_bound == (words == ("gpus=10",),) * 2
    last = shlex.split(theirs.splitlines()[-1])
    assert last == [
        "/py thon", "-m", "recipes.core.launch.batch", "finish", "mnist", "$?", "device=cpu", "data_dir=/a b",
    ]  # fmt: skip


ASKED: tuple[tuple[tuple[str, ...], dict[str, str | None]], ...] = (
        ((), {"--nodes": "1", "--ntasks-per-node": "1", "--gpus-per-node": "1", "--cpus-per-task": "8", "--time": "60"}),
        (("nodes=2", "gpus_per_node=8"), {"--nodes": "2", "--ntasks-per-node": "8", "--gpus-per-node": "8"}),
        (("ranks_per_node=2",), {"--ntasks-per-node": "2", "--gpus-per-node": "2"}),
        (("device=cpu", "ranks_per_node=3"), {"--ntasks-per-node": "3", "--gpus-per-node": None, "--cpus-per-task": "1"}),
        (("device=cpu", "gpus_per_node=2"), {"--ntasks-per-node": "2", "--gpus-per-node": None}),
        (("device=cpu", "gpus_per_node=4", "ranks_per_node=2"), {"--ntasks-per-node": "2", "--gpus-per-node": None}),
        (("gpus=10",), {"--nodes": "1-10", "--ntasks": "10", "--gpus-per-task": "1", "--ntasks-per-node": None, "--gpus-per-node": None}),
        (("gpus=8", "nodes=1"), {"--nodes": "1", "--ntasks": "8"}),
        (("gpus=10", "nodes=2"), {"--nodes": "2", "--ntasks": "10", "--gpus-per-task": "1"}),
        (("gpus=6", "device=cpu"), {"--nodes": "1-6", "--ntasks": "6", "--gpus-per-task": None, "--gpus-per-node": None}),
        (("gpus_per_node=4", "gpu_type=a100"), {"--ntasks-per-node": "4", "--gpus-per-node": "a100:4"}),
        (("gpus=10", "gpu_type=a100"), {"--ntasks": "10", "--gpus-per-task": "a100:1"}),
        (("gpus=6", "cluster=example"), {"--ntasks": "6", "--gpus-per-task": "1", "--gpus-per-node": None}),
        (("device=cpu", "cpu_threads=4", "num_workers=3"), {"--cpus-per-task": "7"}),
        (("cluster=example",), {"--ntasks-per-node": "4", "--gpus-per-node": "4", "--partition": "gpu", "--account": "my-project"}),
        (("cluster=example", "partition=x"), {"--partition": "x"}),
        (("dependency=afterany:7,singleton",), {"--dependency": "afterany:7,singleton"}),
        (("mail=a@b.org",), {"--mail-user": "a@b.org", "--mail-type": "END,FAIL,REQUEUE"}),
        (("mail=a@b.org", "extra=--mail-type=ALL --switches=1"), {"--mail-type": "ALL", "--switches": "1"}),
        (("extra=--mem-per-cpu=2G --hold",), {"--mem-per-cpu": "2G", "--hold": ""}),
        (("time=1:30",), {"--time": "2"}),
        ((), {"--requeue": "", "--open-mode": "append", "--signal": "USR2@120", "--job-name": "mnist", "--partition": None}),
        (("time=2",), {"--signal": "USR2@30"}),
        (("exclude=node[1-3],x7",), {"--exclude": "node[1-3],x7"}),
        (("constraint=[a|b]&c*2",), {"--constraint": "[a|b]&c*2"}),
        (("partition=gpu,long", "account=me", "qos=high", "reservation=r1"),
         {"--partition": "gpu,long", "--account": "me", "--qos": "high", "--reservation": "r1"}),
        (("name=a.job@x:y=z", "cpus_per_rank=6"), {"--job-name": "a.job@x:y=z", "--cpus-per-task": "6"}),
        (("sweep.lr=0.1,0.2,0.4", "parallel=2"), {"--array": "0-2%2"}),
)  # fmt: skip
# Keys that are no option of sbatch: a line of the script and of submitit's. "" where they say nothing to Slurm.
IN_SCRIPT = {
    "cluster=example": "export RECIPES_CLUSTER=example",
    "container=docker://x": "export RECIPES_CONTAINER=docker://x",
    "container_runtime=pyxis": "export RECIPES_CONTAINER_RUNTIME=pyxis",
    "container_mounts=/a:/b": "export RECIPES_CONTAINER_MOUNTS=/a:/b",
    "snapshot=false": "export RECIPES_SNAPSHOT=false",
    "doctor=true": "examine mnist 2",
    "max_resubmits=5": "examine mnist 5",
    **dict.fromkeys(("recipe=mnist", "launcher=print", "node_rank=0", "master=", "wait=true"), ""),
}


def test_every_key_of_a_job_reaches_slurm() -> None:
    """A key that is forgotten on the way is not seen where two ways forget it alike."""
    for field in dataclasses.fields(JobKeys):
        options = set(re.findall(r"--[a-z-]+", field.metadata["sbatch"]))
        said = [asked for words, asked in ASKED for word in words if word.split("=")[0].endswith(field.name)]
        known = options and any(asked.get(option) for asked in said for option in options)
        assert known or field.name == "extra" or field.name in {word.split("=")[0] for word in IN_SCRIPT}, field.name
    for word, line in IN_SCRIPT.items():
        job = describe(word, *(["doctor=true"] if "max_resubmits" in word else []))
        assert line in scripts.sbatch_script(job), word
        assert line in submitit_text(job), word


@pytest.mark.parametrize(("words", "expected"), ASKED)
def test_what_a_job_asks_for(words: tuple[str, ...], expected: dict[str, str | None]) -> None:
    found = directives(scripts.sbatch_script(describe(*words)))
    assert {name: found.get(name) for name in expected} == expected
    assert not {"--mem", "--gres"} & set(found)
    assert ("--ntasks" in found) != ("--ntasks-per-node" in found)


def elements(text: str, count: int) -> list[list[str]]:
    """The arguments that bash has for each element of an array, by the lines of a script that set them."""
    begin = text.index("\nset -- ") if "\nset -- " in text else text.index("\ncase $")
    lines = text[begin : text.index("\nesac", begin) + len("\nesac")]
    found = []
    for number in range(count):
        shell = ["bash", "-c", f"{lines}\nprintf '%s\\0' \"$@\"", "script"]
        done = subprocess.run(shell, env={"SLURM_ARRAY_TASK_ID": str(number)}, capture_output=True, check=True)
        found.append(done.stdout.decode().split("\0")[:-1])
    return found


@pytest.mark.parametrize("make", [scripts.sbatch_script, submitit_text])
def test_each_run_of_a_sweep_has_its_own_values_whatever_is_in_them(make: Any, tmp_path: Path) -> None:
    hostile = [word for word in HOSTILE if "," not in word]
    given = f"sweep.data_dir={','.join(word.partition('=')[2] for word in hostile)}"
    text = make(describe(given, "sweep.seed=1,2", "epochs=3"))
    assert elements(text, 2 * len(hostile)) == [
        ["epochs=3", word, f"seed={seed}"] for word in hostile for seed in (1, 2)
    ]
    assert "finish mnist $?" in text.splitlines()[-1]
    outside = subprocess.run(
        ["bash", "-c", text[text.index("\ncase $") : text.index("\nesac") + 5]], capture_output=True, text=True
    )
    assert (outside.returncode, outside.stderr) == (2, "mnist: no run of this sweep has the number \n")


def test_a_sweeps_runs_have_folders_of_their_own() -> None:
    job = describe("sweep.lr=0.1,0.2", "run_dir=rel", "device=cpu")
    assert job.arguments == ("device=cpu",)
    assert job.elements == (("lr=0.1", "run_dir=/base/rel/0"), ("lr=0.2", "run_dir=/base/rel/1"))
    assert directives(scripts.sbatch_script(job))["--array"] == "0-1%2"
    assert directives(scripts.sbatch_script(describe("sweep.lr=0.1,0.2,0.3", "parallel=2")))["--array"] == "0-2%2"
    one = describe("sweep.lr=0.1")
    assert (one.elements, one.arguments) == ((), ("lr=0.1",))


def test_paths_are_made_absolute_against_the_folder_that_one_submits_from() -> None:
    job = describe("data_dir=d", "run_dir=../r", "network=infiniband", "resume=c.pt", base=Path("/base/sub"))
    assert job.arguments == ("data_dir=/base/sub/d", "run_dir=/base/r", "network=infiniband", "resume=/base/sub/c.pt")


@pytest.mark.parametrize("bad", ["/a\nb", "/a\rb", "/a\x1b[0m", "/\udcff"])
def test_a_folder_whose_name_would_end_a_directive_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="cannot be printed"):
        describe(root=Path(bad))
    with pytest.raises(ConfigError, match="cannot be printed"):
        describe("data_dir=d", base=Path(bad))


# --- the scripts are bash


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Scripts of all jobs, in a hostile repository, as files."""
    paths = [tmp_path_factory.mktemp("scripts") / f"{i}.sh" for i in range(len(JOBS))]
    for path, words in zip(paths, JOBS, strict=True):
        path.write_text(scripts.sbatch_script(describe(*words, root=HOSTILE_ROOT), header=["a comment"]))
    return paths


def test_bash_accepts_every_script(written: list[Path]) -> None:
    assert READY
    check = 'for file; do bash -n "$file" || exit; done'
    ran = subprocess.run(
        ["bash", "-c", check, "bash", *written, *READY, SHARED], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_shellcheck_accepts_every_script(written: list[Path]) -> None:
    helpers.need("" if shutil.which("shellcheck") else "shellcheck is not there: apt-get install shellcheck")
    ran = subprocess.run(
        ["shellcheck", "--severity=style", "--exclude=SC1091,SC2016,SC2154", *written, *READY, SHARED], capture_output=True, text=True, check=False
    )  # fmt: skip  # SC1091: a file of the site; SC2016: $( in single quotes is what is wanted; SC2154: set in job.sh
    assert ran.returncode == 0, ran.stdout


# --- scripts as they run: srun and module are stubs, python is this one


class Bench:
    """A copy of the repository, and stubs on the PATH that note how they were called."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        shutil.copytree(ROOT / "recipes", root / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "env", root / "env")
        shutil.copytree(ROOT / "sbatch", root / "sbatch")
        self.stub("srun", 'printf "%s\\0" "$@" > "$NOTES/srun"; echo "${RECIPES_CLUSTER-none}" > "$NOTES/cluster"; pwd > "$NOTES/pwd"; trap : USR1; for s in ${SIGNALS:-}; do kill -$s $PPID; sleep 0.2; done; exit "${STEP_ENDS:-0}"')  # fmt: skip
        self.stub("python", f'exec {shlex.quote(sys.executable)} "$@"')

    def stub(self, name: str, body: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def run(self, script: Path | str, *words: str, cwd: str = "", **environ: str) -> tuple[int, str]:
        """Runs a script as a job would be run, and gives its status and stderr."""
        variables = {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin", "NOTES": str(self.folder), "VIRTUAL_ENV": str(self.folder), "LC_ALL": "C.UTF-8",
            "SLURM_JOB_ID": "7", "HOME": str(self.folder), **environ,
        }  # fmt: skip
        ran = subprocess.run(
            ["bash", script, *words], cwd=cwd or self.root, env=variables, capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip
        return ran.returncode, ran.stderr

    @property
    def srun(self) -> list[str] | None:
        """How srun was called; None where it was not."""
        path = self.folder / "srun"
        return path.read_bytes().decode().split("\0")[:-1] if path.exists() else None

    @property
    def files(self) -> set[str]:
        return set(os.listdir(self.folder)) | set(os.listdir(self.root))


MODULE = {"BASH_FUNC_module%%": '() { echo "$*" >> "$NOTES/modules"; return "${MODULE_ENDS:-0}"; }'}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, tmp_path / "repository")


def test_a_ready_script_hands_its_words_on_as_they_are(bench: Bench) -> None:
    """One of them: they differ in the recipe and the size alone."""
    word = "data_dir=/" + "".join(word.removeprefix("data_dir=/") for word in HOSTILE)
    status, stderr = bench.run("sbatch/imagenet_2x8.sh", word, "run_dir=/nosuch", SLURM_CPUS_PER_TASK="5")
    assert "before the run began" in stderr  # nothing ran: srun is a stub
    assert status == errors.EXIT_CRASH
    assert bench.srun == [
        "--cpus-per-task=5", *scripts.SRUN_OPTIONS, f"{bench.folder}/bin/python", "-u", "-m", "recipes.imagenet", word, "run_dir=/nosuch",
    ]  # fmt: skip
    assert not {"canary", "d", "x"} & bench.files


def test_launchs_script_in_a_hostile_repository_runs_nothing_but_the_recipe(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tmp_path / HOSTILE_ROOT.name)
    job = describe(HOSTILE[0], "cluster=example", "device=cpu", root=bench.root)
    (tmp_path / "job.sh").write_text(scripts.sbatch_script(job))
    status, stderr = bench.run(tmp_path / "job.sh", **MODULE)
    assert (status, "before the run began" in stderr) == (errors.EXIT_CRASH, True), stderr
    assert bench.srun
    assert bench.srun[-2:] == [HOSTILE[0], "device=cpu"]
    assert (tmp_path / "modules").read_text() == "load gcc/12\nload cuda/12.4\n"
    assert (tmp_path / "cluster").read_text() == "example\n"
    assert "canary" not in bench.files


def test_the_batch_jobs_status_is_the_runs_not_sruns(bench: Bench) -> None:
    run_dir = bench.folder / "run"
    run_dir.mkdir()
    attempt = rundir.open_attempt(run_dir, ["a"], "7.0", "7")
    for state, expected in (("done", 0), ("failed", 143), ("running", 143)):
        rundir.write_status(run_dir, state, attempt=attempt, step=3)
        # A signal to all of the job's processes, the batch shell among them, ends the step alone.
        status, stderr = bench.run("sbatch/mnist_1x1.sh", f"run_dir={run_dir}", STEP_ENDS="143", SIGNALS="TERM USR2")
        assert status == expected, stderr
    status_now = rundir.read_status(run_dir)
    assert status_now
    assert status_now["state"] == "failed"


def test_what_an_outer_allocation_left_does_not_reach_srun(bench: Bench) -> None:
    bench.stub("srun", 'env > "$NOTES/env"')
    bench.run("sbatch/mnist_1x1.sh", "run_dir=/nosuch", SRUN_CPU_BIND="x", SLURM_CPU_BIND_TYPE="x", SLURM_CPU_BIND="x")
    names = {line.split("=")[0] for line in (bench.folder / "env").read_text().splitlines()}
    assert {"SLURM_JOB_ID", "RECIPES_BATCH"} <= names
    assert not {name for name in names if name.startswith(("SRUN_", "SLURM_CPU_BIND"))}


def test_what_asks_for_gpus_in_an_outer_allocation_does_not_reach_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the job itself was told stays."""
    stub(tmp_path, monkeypatch, "scontrol", "echo JobId=7 TresPerNode=gres:gpu:2 TresBind=gpu:none")
    with open(tmp_path / "lines", "w") as lines:
        environ = {"SLURM_JOB_ID": "7", "RECIPES_LINES": str(lines.fileno()), "RECIPES_SNAPSHOT": "false"}
        environ |= {"SLURM_GPUS": "9", "SLURM_GPUS_PER_NODE": "2", "SLURM_GPUS_PER_TASK": "9", "SLURM_GPU_BIND": "none"}
        assert batch.begin("mnist", [f"run_dir={tmp_path}/run"], environ) == 0
    unset = {line for line in (tmp_path / "lines").read_text().splitlines() if line.startswith("unset SLURM_")}
    assert unset == {"unset SLURM_GPUS", "unset SLURM_GPUS_PER_TASK"}


# What a job that is submitted in another one has of that one's variables, recorded with Slurm 22.05. Its own id is 7.
@pytest.mark.parametrize(
    ("fields", "environ", "unset"),
    [
        ("Restarts=0", "SLURM_ARRAY_JOB_ID=5 SLURM_ARRAY_TASK_ID=4", "SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID"),
        ("ArrayJobId=5 ArrayTaskId=4 Restarts=0", "SLURM_ARRAY_JOB_ID=5 SLURM_ARRAY_TASK_ID=4", ""),
        ("Restarts=0", "SLURM_RESTART_COUNT=1", "SLURM_RESTART_COUNT"),
        ("Restarts=1", "SLURM_RESTART_COUNT=1", ""),
        ("", "SLURM_ARRAY_JOB_ID=5 SLURM_RESTART_COUNT=1", ""),  # the controller does not answer
        (
            "Restarts=0",
            "SLURM_HET_SIZE=2 SLURM_JOB_ID_HET_GROUP_0=5 SLURM_NTASKS_HET_GROUP_1=1",
            "SLURM_HET_SIZE SLURM_JOB_ID_HET_GROUP_0 SLURM_NTASKS_HET_GROUP_1",
        ),
    ],
)
def test_variables_of_the_job_that_it_was_submitted_in_are_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: str, environ: str, unset: str
) -> None:
    stub(tmp_path, monkeypatch, "scontrol", f"echo JobId=7 {fields}" if fields else "exit 1")
    variables = dict(word.split("=") for word in environ.split())
    with open(tmp_path / "lines", "w") as lines:
        own = {"SLURM_JOB_ID": "7", "RECIPES_LINES": str(lines.fileno()), "RECIPES_SNAPSHOT": "false"}
        assert batch.begin("mnist", [f"run_dir={tmp_path}/run"], own | variables) == 0
    found = re.findall("^unset (SLURM_.*)$", (tmp_path / "lines").read_text(), re.MULTILINE)
    assert sorted(found) == sorted(unset.split())


# Recorded in batch scripts: what the job's fields are, its variables, and of these what must not reach srun.
GPU_REQUESTS = {
    "22.05 --gpus-per-task": ("TresPerTask=gres:gpu:1", "SLURM_GPUS_PER_TASK=1", "SLURM_GPUS_PER_TASK"),
    "22.05 --gpu-bind": ("TresBind=gpu:single:1 TresPerNode=gres:gpu:2", "SLURM_GPU_BIND=single:1 SLURM_GPUS_PER_NODE=2", ""),
    "22.05 --gpus": ("TresPerJob=gres:gpu:4", "SLURM_GPUS=4", ""),
    "22.05 --ntasks-per-gpu": ("NtasksPerTRES=1", "SLURM_NTASKS_PER_GPU=1", ""),
    "24.11 --gpus-per-node": ("TresPerNode=gres/gpu:2 TresPerTask=cpu=2", "SLURM_GPUS_PER_NODE=2 SLURM_TRES_PER_TASK=cpu=2", "SLURM_TRES_PER_TASK"),
    "24.11 --gpus-per-node=a100:2": ("TresPerNode=gres/gpu:a100:2", "SLURM_GPUS_PER_NODE=a100:2", ""),
    "24.11 --gpus-per-task": (
        "TresBind=gres/gpu:per_task:1 TresPerTask=cpu=2,gres/gpu=1", "SLURM_TRES_BIND=gres/gpu:per_task:1 SLURM_TRES_PER_TASK=cpu=2,gres/gpu=1",
        "SLURM_TRES_BIND SLURM_TRES_PER_TASK",
    ),
    "24.11 --gpu-bind": (
        "TresBind=gres/gpu:single:1 TresPerNode=gres/gpu:2 TresPerTask=cpu=2",
        "SLURM_TRES_BIND=gres/gpu:single:1 SLURM_GPUS_PER_NODE=2 SLURM_TRES_PER_TASK=cpu=2", "SLURM_TRES_PER_TASK",
    ),
    "24.11 --ntasks-per-gpu": ("TresPerTask=cpu=2 NtasksPerTRES=1", "SLURM_NTASKS_PER_GPU=1 SLURM_TRES_PER_TASK=cpu=2", "SLURM_TRES_PER_TASK"),
    "24.11 left over, each by itself": (
        "TresPerNode=gres/gpu:2 TresPerTask=cpu=2",
        "SLURM_GPUS_PER_NODE=2 SLURM_TRES_PER_TASK=cpu=2 SLURM_TRES_BIND=gres/gpu:single:1 SLURM_GPU_BIND=single:1 SLURM_GPUS_PER_TASK=9 "
        "SLURM_NTASKS_PER_GPU=1 SLURM_GPUS=9 SLURM_GPUS_PER_SOCKET=9",
        "SLURM_TRES_PER_TASK SLURM_TRES_BIND SLURM_GPU_BIND SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU SLURM_GPUS SLURM_GPUS_PER_SOCKET",
    ),
    "24.11 another bind is left over": ("TresBind=gres/gpu:closest", "SLURM_TRES_BIND=gres/gpu:closest SLURM_GPU_BIND=single:1", "SLURM_GPU_BIND"),
    "24.11 --gres=gpu:4, and another count is left over": ("TresPerNode=gres/gpu:4", "SLURM_GPUS_PER_NODE=2", "SLURM_GPUS_PER_NODE"),
    "not known": ("", "SLURM_GPUS_PER_NODE=2 SLURM_GPU_BIND=none", "SLURM_GPUS_PER_NODE SLURM_GPU_BIND"),
}  # fmt: skip


@pytest.mark.parametrize("case", GPU_REQUESTS)
def test_requests_for_gpus_that_would_hide_the_jobs_own_are_unset(case: str) -> None:
    fields, environ, unset = GPU_REQUESTS[case]
    variables = dict(word.split("=", 1) for word in environ.split())
    found = allocation.foreign_gpu_requests(variables, dict(word.split("=", 1) for word in fields.split()))
    assert set(found) == set(unset.split())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("NumTasks=10 TresPerTask=gres:gpu:1", "10"),
        ("NumTasks=4 TresPerTask=cpu=2,gres/gpu=2", "8"),
        ("NumTasks=4 TresPerTask=cpu=2,gres/gpu:a100=1", "a100:4"),
        ("NumTasks=4 TresPerTask=cpu=2 NtasksPerTRES=2", "2"),
        ("NumTasks=4 TresPerTask=cpu=2 TresPerNode=gres/gpu:2", ""),
        ("", ""),
    ],
)
def test_the_doctors_step_asks_for_all_gpus_that_were_asked_for_by_the_task(fields: str, expected: str) -> None:
    assert allocation.all_gpus(dict(word.split("=", 1) for word in fields.split())) == expected


def test_the_doctor_beside_a_run_has_its_own_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, environ = tmp_path / "run", {"SLURM_JOB_ID": "7"}
    (run_dir / "doctor").mkdir(parents=True)
    (run_dir / "config.yaml").touch()
    rundir.write_status(run_dir, "failed", attempt=rundir.open_attempt(run_dir, ["a"], "3.0"), step=1)
    attempt = rundir.open_attempt(run_dir / "doctor", ["a"], "7.0")
    rundir.write_status(run_dir / "doctor", "done", attempt=attempt, step=0)
    assert batch.finish("doctor", 0, [f"run_dir={run_dir}"], environ) == 0
    assert capsys.readouterr().out == f"doctor: done; run directory {run_dir}/doctor\n"
    assert batch.finish("mnist", 1, [f"run_dir={run_dir}"], environ) == 1


def test_a_job_that_is_submitted_again_has_its_options_and_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "JobId=75 Nice=0\n   OverSubscribe=OK TimeLimit=01:00:00\n   StdErr=/a 75/x-75.175.out\n   StdOut=/a 75/x-75.175.out\n"
    stub(tmp_path, monkeypatch, "scontrol", f"printf {shlex.quote(said + '   TresPerNode=gres/gpu:2,gres/shard:1')}")
    assert batch._as_submitted({"SLURM_JOB_ID": "75"}) == {
        "time": "01:00:00", "gres": "gpu:2,shard:1", "output": "/a 75/x-%j.175.out",
    }  # fmt: skip
    stub(
        tmp_path,
        monkeypatch,
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
    assert batch._as_submitted(array) == {
        "array": "3", "gpus": "4", "gpus-per-node": "2", "gres": "nvme:1", "mem-per-gpu": "100M", "exclusive": "user", "output": "/x/%A_%a.out", "error": "/x/err",
        "open-mode": "append",
    }  # fmt: skip
    stub(
        tmp_path,
        monkeypatch,
        "scontrol",
        "echo JobId=9 Features=a100 MinMemoryNode=1G MinMemoryCPU=2G ExcNodeList=n1 Nice=7 OverSubscribe=NO",
    )
    size = {"NUM_NODES": "2", "PARTITION": "gpu", "ACCOUNT": "a", "QOS": "q", "RESERVATION": "r", "NAME": "x"}
    environ = {f"SLURM_JOB_{name}": value for name, value in {**size, "ID": "9"}.items()}
    assert batch._as_submitted({**environ, "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "5"}) == {
        "nodes": "2", "partition": "gpu", "account": "a", "qos": "q", "reservation": "r", "job-name": "x", "ntasks-per-node": "4",
        "cpus-per-task": "5", "constraint": "a100", "mem": "1G", "mem-per-cpu": "2G", "exclude": "n1", "nice": "7", "exclusive": "exclusive",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "expected"),
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
def test_exclusive_nodes_and_gpus_of_a_task_are_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, expected: dict[str, str]
) -> None:
    stub(tmp_path, monkeypatch, "scontrol", f"echo JobId=9 {said}; echo StdErr=; echo StdOut=/x/9.out")
    assert batch._as_submitted({"SLURM_JOB_ID": "9"}) == {**expected, "output": "/x/%j.out"}


@pytest.mark.parametrize(("limit", "words", "expected"), [("2:00", (), True), ("8:00", (), False), ("2:00", ("stop_before_s=0",), False)])  # fmt: skip
def test_a_job_of_a_few_minutes_goes_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, words: Sequence[str], expected: bool
) -> None:
    """Its script's signal, 120 s ahead of the limit, would stop it as it begins."""
    stub(tmp_path, monkeypatch, "squeue", f"echo {limit}")
    with open(tmp_path / "lines", "w") as lines:
        environ = {"SLURM_JOB_ID": "7", "RECIPES_LINES": str(lines.fileno()), "RECIPES_SNAPSHOT": "false"}
        assert batch.begin("mnist", [f"run_dir={tmp_path}/run", *words], environ) == 0
    said = (tmp_path / "lines").read_text()
    assert ("export RECIPES_BY_CLOCK=1" in said.splitlines(), "export SLURM_JOB_END_TIME=" in said) == (
        expected,
        expected,
    )


def test_a_job_of_another_cluster_is_asked_after_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(
        tmp_path,
        monkeypatch,
        "scontrol",
        'echo "JobId=7 JobState=COMPLETED ExitCode=0:0 $SLURM_CLUSTERS" > "$NOTES/asked"; cat "$NOTES/asked"',
    )
    monkeypatch.setenv("SBATCH_CLUSTERS", "far")
    submit.wait(submit.Submitted("7", tmp_path, tmp_path / "log"))
    assert (tmp_path / "asked").read_text().split()[-1] == "far"


# Whatever else a profile may be like is in tests/faults/test_fuzz.py.
PROFILES = (
    "partition: gpu\nmodules: # the site's\n\n  - gcc/12   # the compiler\n# between\n  - cuda/12.4",
    "modules:\n#  - gcc/12\npartition: gpu\n",
)


@pytest.mark.parametrize("text", PROFILES)
def test_a_ready_script_loads_the_modules_that_the_profile_names(
    bench: Bench, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = bench.root / "env" / "clusters"
    (clusters / "here.yaml").write_text(text)
    (clusters / "here.env").write_text("T_X=1\n")
    helpers.use_root(monkeypatch, bench.root)
    named = profiles.cluster_profile("here").get("modules", [])
    bench.run("sbatch/mnist_2x8.sh", "epochs=2", "cluster=here", "run_dir=/nosuch", **MODULE)
    log = bench.folder / "modules"
    loaded = log.read_text().splitlines() if log.exists() else []
    assert loaded == [f"load {module}" for module in named]
    assert len(named) == (2 if "gcc/12\n" in text.replace("#  - gcc", "") or "gcc/12 " in text else 0)
    assert bench.srun
    assert bench.srun[-2:] == ["epochs=2", "run_dir=/nosuch"]  # cluster= is the script's own
    assert (bench.folder / "cluster").read_text() == "here\n"


def test_the_profiles_environment_is_taken_where_none_is_active(bench: Bench) -> None:
    environment = bench.folder / "envs" / "torch"
    (environment / "bin").mkdir(parents=True)
    shutil.copy(bench.folder / "bin" / "python", environment / "bin" / "python")
    (bench.root / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(bench.folder / "bin" / "python", bench.root / ".venv" / "bin" / "python")
    (bench.root / "env/clusters/here.yaml").write_text(f"environment:   {environment}   # ours\n")
    for script, active, expected in (
        ("sbatch/mnist_1x1.sh", "", f"{environment}/bin/python"),
        ("sbatch/mnist_1x1.sh", str(bench.folder), f"{bench.folder}/bin/python"),
    ):
        bench.run(script, "cluster=here", "run_dir=/nosuch", VIRTUAL_ENV=active)
        assert bench.srun
        assert expected in bench.srun
    (environment / "bin/python").unlink()
    status, stderr = bench.run("sbatch/mnist_1x1.sh", "cluster=here", VIRTUAL_ENV="")
    assert (status, f"there is no {environment}/bin/python on " in stderr) == (3, True), stderr


def test_launch_goes_on_in_the_profiles_environment(tmp_path: Path) -> None:
    copied = tmp_path / "clone"
    shutil.copytree(ROOT / "recipes", copied / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "env", copied / "env")
    shutil.copy(ROOT / "launch.py", copied)
    (tmp_path / "envs/bin").mkdir(parents=True)
    (tmp_path / "envs/bin/python").write_text('#!/bin/sh\necho "taken: $*"\n')
    (tmp_path / "envs/bin/python").chmod(0o755)
    (copied / "env/clusters/here.yaml").write_text(f"environment: {tmp_path}/envs\n")
    environ = {"PATH": "/usr/bin:/bin", "RECIPES_CLUSTER": "here"}
    base = os.path.realpath(sys.executable)
    done = subprocess.run(
        [base, copied / "launch.py", "recipe=toy"], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"taken: {copied}/launch.py recipe=toy\n"
    # One of conda's is no venv: what runs it is there already.
    (copied / "env/clusters/here.yaml").write_text(f"environment: {Path(base).parents[1]}\n")
    environ["PYTHONPATH"] = ":".join(sys.path[1:])
    done = subprocess.run(
        [base, copied / "launch.py", "recipe=toy", "launcher=print"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith("#!/bin/bash"), done.stderr
    # .venv is for a Python that has not what is wanted.
    shutil.copytree(tmp_path / "envs", copied / ".venv")
    enough = {"PYTHONPATH": environ["PYTHONPATH"]}
    for variables, first in (
        ({}, "taken: "),
        (enough, "#!/bin/bash"),
        ({"CONDA_PREFIX": "/conda", "CONDA_DEFAULT_ENV": "base"}, "taken: "),  # each shell of conda's users has it
        ({**enough, "CONDA_PREFIX": "/conda", "CONDA_DEFAULT_ENV": "base"}, "taken: "),
        ({**enough, "CONDA_PREFIX": "/conda", "CONDA_DEFAULT_ENV": "torch"}, "#!/bin/bash"),
    ):
        done = subprocess.run(
            [base, copied / "launch.py", "recipe=toy", "launcher=print"], env={"PATH": "/usr/bin:/bin", **variables},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.stdout.startswith(first), done.stderr


def test_a_profiles_environment_that_is_missing_or_not_used_is_named(bench: Bench) -> None:
    shutil.copy(ROOT / "launch.py", bench.root)
    (bench.root / "env/clusters/here.yaml").write_text(f"environment: {bench.folder}/envs\n")
    base, missing = (
        os.path.realpath(sys.executable),
        f"cluster=here: environment: {bench.folder}/envs has",
    )

    def launch_py(*words: str, **environ: str) -> tuple[int, str, str]:
        variables = {"PATH": "/usr/bin:/bin", "RECIPES_CLUSTER": "here", **environ}
        argv = [base, bench.root / "launch.py", *words]
        done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    here = {"PYTHONPATH": ":".join(sys.path[1:])}
    for environ in ({}, here):  # a Python without and one with what launch.py imports
        status, _, stderr = launch_py("recipe=toy", "launcher=local", **environ)
        assert (status, stderr.startswith(f"launch.py: {missing}"), len(stderr.splitlines())) == (3, True, 1), stderr
    status, _, stderr = launch_py("check", "recipe=doctor", "launcher=local", "device=cpu", **here)
    assert (status, stderr) == (
        3,
        f"python: failed: {missing} no bin/python on this machine: make that environment, or correct env/clusters/here.yaml\n",
    )
    status, stdout, stderr = launch_py("recipe=toy", "launcher=print", **here)
    assert (status, stdout[:2]) == (0, "#!")
    assert missing in stderr
    unused = f"the active environment {bench.folder} is used, not environment: {bench.folder}/envs of cluster=here\n"
    assert launch_py("recipe=toy", "launcher=print", VIRTUAL_ENV=str(bench.folder), **here)[2] == f"launch.py: {unused}"
    _, stderr = bench.run("sbatch/mnist_1x1.sh", "run_dir=/nosuch", RECIPES_CLUSTER="here")
    assert unused in stderr


def test_check_loads_the_profiles_modules(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"PATH": "/usr/bin:/bin", "NOTES": str(bench.folder), "RECIPES_CLUSTER": "here", **MODULE}
    assert checks.load_modules(ROOT, ("gcc/12", "x"), environ) == "gcc/12, x"
    assert (bench.folder / "modules").read_text() == "load gcc/12\nload x\n"
    with pytest.raises(MachineError, match=r"^cluster=here: module load gcc/12 failed on "):
        checks.load_modules(ROOT, ("gcc/12", "x"), {**environ, "MODULE_ENDS": "1"})
    del environ["BASH_FUNC_module%%"]
    expected = "not tried, this machine has no command module: gcc/12"
    assert checks.load_modules(ROOT, ("gcc/12",), environ) == expected


def test_launch_can_be_read_by_an_older_python() -> None:
    tree = ast.parse((ROOT / "launch.py").read_text(), feature_version=(3, 6))
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"importlib.util", "os", "re", "sys"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for hint in (node.returns, *(argument.annotation for argument in node.args.args)):
            assert isinstance(hint, (ast.Constant, ast.Name)), ast.unparse(node)


def test_the_environments_cluster_counts_in_a_ready_script(bench: Bench) -> None:
    bench.run("sbatch/mnist_2x8.sh", "run_dir=/nosuch", RECIPES_CLUSTER="example", **MODULE)
    assert (bench.folder / "modules").read_text() == "load gcc/12\nload cuda/12.4\n"


def refused(bench: Bench, ran: tuple[int, str], *said: str) -> None:
    """It ended with status 2 and one line that has these words, and srun was never called."""
    status, stderr = ran
    assert len(stderr.splitlines()) == 1, stderr
    assert all(word in stderr for word in said), stderr
    assert status == errors.EXIT_CONFIG
    assert bench.srun is None


def test_a_folder_whose_name_ends_a_line_runs_nothing(bench: Bench) -> None:
    """What a link leads to is not what was typed."""
    bad = bench.folder / "x\ntouch canary;#"
    bad.mkdir()
    (bench.folder / "link").symlink_to(bad)
    refused(bench, bench.run("sbatch/mnist_1x1.sh", f"data_dir={bench.folder}/link"), "data_dir=", "cannot be printed")
    assert "canary" not in bench.files
    moved = bad / "repository"
    shutil.copytree(bench.root, moved)
    refused(bench, bench.run("sbatch/mnist_1x1.sh", cwd=str(moved)), "cannot be printed")
    assert not list(bench.folder.rglob("canary"))


def test_what_a_site_has_python_print_is_not_run(bench: Bench) -> None:
    (bench.folder / "sitecustomize.py").write_text(
        "import atexit\nprint('hello; touch canary')\natexit.register(print, 'bye; touch canary')\n"
    )
    bench.run("sbatch/mnist_1x1.sh", "run_dir=/nosuch", PYTHONPATH=str(bench.folder))
    assert bench.srun
    assert bench.srun[-1] == "run_dir=/nosuch"
    assert not list(bench.folder.rglob("canary"))


def test_a_job_that_imports_other_code_is_refused(bench: Bench) -> None:
    """Python's own startup puts another clone ahead of the job's code: the batch script finds it, and so does each rank."""
    other = bench.folder / "other"
    shutil.copytree(bench.root / "recipes", other / "recipes")
    finder = f"""
import sys
from importlib.machinery import PathFinder

class Finder:
    def find_spec(name, *rest):
        return PathFinder.find_spec(name, ["{other}"]) if name == "recipes" else None

sys.meta_path.insert(0, Finder)
"""
    (bench.folder / "sitecustomize.py").write_text(finder)
    environ = {"PYTHONPATH": str(bench.folder)}
    refused(bench, bench.run("sbatch/mnist_1x1.sh", **environ), f"recipes from {other}, ", f"runs {bench.root}: ")
    variables = {**os.environ, **environ, "RECIPES_SOURCE": str(bench.root)}
    argv = [sys.executable, "-m", "recipes.toy", "device=cpu", "max_steps=1", f"run_dir={bench.folder}/run"]
    done = subprocess.run(argv, cwd=bench.root, env=variables, capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"recipes from {other}, but this job runs {bench.root}: " in done.stderr


def test_queued_again_words_are_relative_to_the_repository_still(bench: Bench) -> None:
    (bench.root / "mine.yaml").write_text("epochs: 7\n")
    (bench.root / "mine.env").write_text("NCCL_DEBUG=INFO\n")
    words = ("config=mine.yaml", "network=mine.env", "run_dir=here", "umask=027")
    ran_in = set()
    for restarts in ("0", "1"):
        bench.run("sbatch/mnist_1x1.sh", *words, SLURM_RESTART_COUNT=restarts, CDPATH=str(bench.folder))
        ran_in.add((bench.folder / "pwd").read_text())
        (bench.root / "recipes/toy.py").write_text("edited")
        assert bench.srun
        whole = {"epochs=7", f"network={bench.root}/mine.env", f"run_dir={bench.root}/here", "umask=027"}
        assert set(bench.srun[-4:]) == whole
        (bench.folder / "srun").unlink()
    # From these a job on a bad node is submitted again.
    assert (bench.root / "here/job.sh").read_text() == (bench.root / "sbatch/mnist_1x1.sh").read_text()
    assert json.loads((bench.root / "here/job.yaml").read_text())["arguments"] == list(words)
    assert (bench.root / "here/job.yaml").stat().st_mode & 0o777 == 0o640
    [copy] = ran_in  # queued again it runs the code that it began with
    assert "edited" not in Path(copy.strip(), "recipes/toy.py").read_text()


def test_a_ready_script_from_another_folder_says_where_to_go(bench: Bench) -> None:
    elsewhere = bench.folder / "elsewhere"
    elsewhere.mkdir()
    ran = bench.run(bench.root / "sbatch" / "mnist_1x1.sh", cwd=str(elsewhere))
    refused(bench, ran, str(elsewhere), "is not the repository", "run sbatch there")


def test_a_ready_script_without_python_says_how_to_make_one(bench: Bench) -> None:
    refused(bench, bench.run("sbatch/mnist_1x1.sh", VIRTUAL_ENV=""), "no Python environment", "make install")


def test_a_ready_script_takes_the_repositorys_own_python(bench: Bench) -> None:
    (bench.root / ".venv" / "bin").mkdir(parents=True)
    (bench.folder / "bin" / "python").rename(bench.root / ".venv" / "bin" / "python")
    bench.run("sbatch/mnist_1x1.sh", "run_dir=/nosuch", VIRTUAL_ENV="")
    assert bench.srun
    assert f"{bench.root}/.venv/bin/python" in bench.srun


def test_a_ready_script_takes_the_active_conda_environment(bench: Bench) -> None:
    """But conda's own base, which is active in each of its users' shells, only where there is no other."""
    conda, venv, own = (bench.folder / name / "bin/python" for name in ("conda", "venv", "repository/.venv"))
    for path in (conda, venv):
        path.parent.mkdir(parents=True)
        shutil.copy(bench.folder / "bin" / "python", path)

    def chosen(**environ: str) -> str:
        bench.run("sbatch/mnist_1x1.sh", "run_dir=/nosuch", CONDA_PREFIX=str(bench.folder / "conda"), **environ)
        assert bench.srun
        return bench.srun[bench.srun.index("-u") - 1]

    assert chosen(VIRTUAL_ENV="", CONDA_DEFAULT_ENV="torch") == str(conda)
    assert chosen(VIRTUAL_ENV="", CONDA_DEFAULT_ENV="base") == str(conda)
    own.parent.mkdir(parents=True)
    shutil.copy(conda, own)
    assert chosen(VIRTUAL_ENV="", CONDA_DEFAULT_ENV="torch") == str(conda)
    assert chosen(VIRTUAL_ENV="", CONDA_DEFAULT_ENV="base") == str(own)
    both = {"VIRTUAL_ENV": str(bench.folder / "venv"), "CONDA_DEFAULT_ENV": "torch"}
    path = f"{bench.folder}/bin:/usr/bin:/bin"
    assert chosen(**both, PATH=f"{venv.parent}:{conda.parent}:{path}") == str(venv)
    assert chosen(**both, PATH=f"{conda.parent}:{venv.parent}:{path}") == str(conda)


def test_a_ready_script_with_a_wrong_word_never_calls_srun(bench: Bench) -> None:
    refused(bench, bench.run("sbatch/mnist_1x1.sh", "epoch=$(touch canary)"), "'epochs'")
    assert "canary" not in bench.files


def test_a_ready_script_names_a_cluster_that_is_not_there(bench: Bench) -> None:
    refused(bench, bench.run("sbatch/mnist_1x1.sh", "cluster=nosuch"), "cluster=nosuch")
    refused(bench, bench.run("sbatch/mnist_1x1.sh", RECIPES_CLUSTER="nosuch"), "cluster=nosuch")


def test_a_module_that_does_not_load_ends_the_job(bench: Bench) -> None:
    ran = bench.run("sbatch/mnist_1x1.sh", "cluster=example", MODULE_ENDS="1", **MODULE)
    refused(bench, ran, "cluster=example", "gcc/12")
    (bench.folder / "job.sh").write_text(scripts.sbatch_script(describe("cluster=example", root=bench.root)))
    refused(bench, bench.run(bench.folder / "job.sh", MODULE_ENDS="1", **MODULE), "cluster=example", "gcc/12")
    refused(bench, bench.run("sbatch/mnist_1x1.sh", "cluster=example"), "cluster=example", "has no command module")


def test_the_repository_itself_is_run_where_that_is_asked_for(bench: Bench) -> None:
    (bench.folder / "job.sh").write_text(scripts.sbatch_script(describe("snapshot=false", root=bench.root)))
    bench.run(bench.folder / "job.sh", "run_dir=/nosuch")
    bench.run("sbatch/mnist_1x1.sh", "run_dir=/nosuch", RECIPES_SNAPSHOT="false")
    assert not (bench.root / "runs/code").exists()
    bench.run("sbatch/mnist_1x1.sh", "run_dir=/nosuch")
    assert (bench.root / "runs/code").exists()


def test_a_modules_python_is_not_the_environments(bench: Bench) -> None:
    """Modules put theirs ahead of an environment that is active."""
    theirs = bench.folder / "module"
    theirs.mkdir()
    (theirs / "python").symlink_to("/bin/false")
    module = {"BASH_FUNC_module%%": "() { PATH=$NOTES/module:$PATH; }"}
    bench.stub("srun", 'command -v python > "$NOTES/which"')
    (bench.folder / "job.sh").write_text(scripts.sbatch_script(describe("cluster=example", root=bench.root)))
    for script in ("sbatch/mnist_1x1.sh", bench.folder / "job.sh"):
        bench.run(script, RECIPES_CLUSTER="example", **module)
        assert (bench.folder / "which").read_text() == f"{bench.folder}/bin/python\n"
        (bench.folder / "which").unlink()


# --- ready scripts


def test_ready_scripts_are_there() -> None:
    assert len(READY) >= 7
    assert all(re.fullmatch(r"[a-z]+_\d+x\d+\.sh", path.name) for path in READY)
    assert {path.name.split("_")[0] for path in READY} <= set(recipe_conf.names())


@pytest.mark.parametrize("path", READY, ids=lambda p: p.name)
def test_ready_scripts_differ_in_the_recipe_and_the_size_alone(path: Path) -> None:
    def commands(path: Path) -> str:
        text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
        return re.sub(rf"\b{path.name.split('_')[0]}(?=[_ ]|$)", "RECIPE", text, flags=re.MULTILINE).replace(
            path.stem, "SIZE"
        )

    name = path.name.split("_")[0]
    assert commands(path).replace(path.name.removeprefix(name), "") == commands(READY[0]).replace(
        READY[0].name.removeprefix(READY[0].name.split("_")[0]), ""
    )
    made = scripts.sbatch_script(describe(f"recipe={name}", "gpus_per_node=8")).splitlines()
    assert path.read_text().splitlines()[-3:] == made[-3:]


@pytest.mark.parametrize("path", READY, ids=lambda p: p.name)
def test_a_ready_scripts_directives_can_be_overridden_one_by_one(path: Path) -> None:
    found = directives(path.read_text())
    nodes, gpus = re.fullmatch(r"[a-z]+_(\d+)x(\d+)\.sh", path.name).groups()  # type: ignore[union-attr]
    size = {name: value for name, value in found.items() if re.search("node|task|gpu|cpu|mem|gres|exclusive", name)}
    assert set(size) == {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task"}
    assert (size["--nodes"], size["--ntasks-per-node"], size["--gpus-per-node"]) == (nodes, gpus, gpus)
    assert int(size["--cpus-per-task"]) <= 8
    assert not {"--chdir", "--partition", "--account"} & set(found)
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize("path", READY, ids=lambda p: p.name)
def test_a_ready_scripts_log_goes_to_a_folder_that_a_fresh_clone_has(path: Path) -> None:
    folder = os.path.dirname(directives(path.read_text())["--output"])
    if not folder:
        return  # the repository itself
    kept = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    assert kept.stdout, f"{folder} is not in the repository: a job would fail without a word"


# --- submitting


def test_clean_environment_keeps_what_sites_prescribe() -> None:
    kept = {
        "SLURM_CONF": "/etc/x", "SBATCH_CONSTRAINT": "a100", "SBATCH_MEM_PER_NODE": "0", "SBATCH_ACCOUNT": "a", "SBATCH_PARTITION": "p", "SBATCH_QOS": "q", "SBATCH_RESERVATION": "r",
        "SLURM_CLUSTERS": "x", "SBATCH_CLUSTERS": "x", "SBATCH_MEM_PER_CPU": "1", "SBATCH_MEM_PER_GPU": "1", "PMIX_MCA_gds": "hash",
        "PATH": "/bin", "MY_SLURM_X": "1", "MASTER_PORT": "29400", "RECIPES_DATA": "/d", "RECIPES_CLUSTER": "c", "MY_RANK": "1", "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    scrubbed = {
        "SLURM_JOB_ID": "1", "SLURM_CPU_BIND": "x", "SLURM_NTASKS": "4", "SRUN_CPUS_PER_TASK": "1", "SBATCH_EXCLUSIVE": "1",
        "SBATCH_GRES": "gpu:8", "RANK": "0", "LOCAL_WORLD_SIZE": "8", "PMIX_RANK": "1", "OMPI_COMM_WORLD_RANK": "1",
        "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "node9", "PMI_RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "0",
        "NODE_RANK": "1",
        **{f"RECIPES_{name}": "1" for name in ("BATCH", "BY_CLOCK", "CODE", "LAUNCH", "LEFT_OUT", "LISTEN_FD", "RESUBMITS", "SCRIPT")},
    }  # fmt: skip
    assert submit.clean_environment({**kept, **scrubbed}) == kept


def test_what_a_job_says_itself_is_not_the_environments() -> None:
    environ = {"SBATCH_PARTITION": "p", "SBATCH_ACCOUNT": "a", "SBATCH_MEM_PER_NODE": "1G"}
    job = describe("partition=q", "extra=--mem=0")
    assert submit.clean_environment(environ, scripts.directives(job)) == {"SBATCH_ACCOUNT": "a"}


def test_a_link_for_runs_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    with pytest.raises(MachineError, match=f"runs: is a link to {tmp_path}/gone, which is not there: make that folder"):
        files.private_folder(tmp_path, "code")


def test_a_private_folder_is_private(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    before = os.umask(0)
    try:
        folder = files.private_folder(tmp_path, "submitit")
    finally:
        os.umask(before)
    assert folder == tmp_path / "runs" / "submitit"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert files.private_folder(tmp_path, "submitit") == folder


def test_a_private_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(MachineError, match="runs/submitit: cannot be made"):
        files.private_folder(tmp_path, "submitit")


def test_a_run_directory_that_cannot_be_made_is_found_before_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").write_text("")
    stub(tmp_path, monkeypatch, "sbatch", "echo Submitted batch job 7")
    with pytest.raises(MachineError, match="cannot be made"):
        submit.submit(describe(root=tmp_path), sys.executable, str(tmp_path / "file" / "run"))
    assert calls(tmp_path, "sbatch") == []


def test_submission_leaves_the_script_and_the_description_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    stub(tmp_path, monkeypatch, "sbatch", 'env > "$NOTES/env"; echo Submitted batch job 7')
    monkeypatch.setenv("SLURM_NTASKS", "9")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    job = describe("data_dir=/$(touch canary)", "nodes=2", root=tmp_path)
    submitted = submit.submit(job, sys.executable, "")
    assert (submitted.job_id, submitted.run_dir) == ("7", tmp_path / "runs" / "mnist" / "7")
    text = (submitted.run_dir / "job.sh").read_text()
    ours = directives(scripts.sbatch_script(job))
    theirs = directives(text)
    for found in (ours, theirs):
        del found["--output"]
    assert ours == theirs
    described = json.loads((submitted.run_dir / "job.yaml").read_text())
    assert (described["job_id"], described["nodes"], described["arguments"]) == ("7", 2, ["data_dir=/$(touch canary)"])
    environ = (tmp_path / "env").read_text()
    assert "SBATCH_ACCOUNT=mine" in environ
    assert "SLURM_NTASKS" not in environ
    assert os.environ["SLURM_NTASKS"] == "9"
    for path in (tmp_path / "runs" / "submitit").iterdir():
        assert path.stat().st_mode & 0o077 == 0, path
    assert not list(tmp_path.rglob("canary"))


def test_a_run_directory_that_cannot_be_written_after_submission_is_said_beside_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "mnist").mkdir(parents=True)
    (tmp_path / "runs" / "mnist" / "7").write_text("in the way")
    stub(tmp_path, monkeypatch, "sbatch", "echo Submitted batch job 7")
    submitted = submit.submit(describe(root=tmp_path), sys.executable, "")
    assert submitted.job_id == "7"
    err = capsys.readouterr().err
    assert f"run_dir={tmp_path}/runs/mnist/7: cannot be written" in err
    assert len(err.splitlines()) == 1


def test_a_refusal_that_comes_at_submission_alone_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    stub(
        tmp_path, monkeypatch, "sbatch", "echo 'sbatch: error: Batch job submission failed: too many jobs' >&2\nexit 1"
    )
    for job in (describe(root=tmp_path), describe("sweep.lr=0.1,0.2", root=tmp_path)):
        with pytest.raises(MachineError) as caught:
            submit.submit(job, sys.executable, "")
        assert str(caught.value) == "Slurm refuses this job: Batch job submission failed: too many jobs"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("swept", [False, True])
def test_a_submission_is_noted_in_the_run_directory_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swept: bool
) -> None:
    (tmp_path / "runs").mkdir()
    stub(tmp_path, monkeypatch, "sbatch", "echo Submitted batch job 7")
    job = describe(f"run_dir={tmp_path}/s/r", *(["sweep.lr=0.1,0.2"] if swept else []), root=tmp_path)
    submitted = submit.submit(job, sys.executable, f"{tmp_path}/s/r")
    found = [one.run_dir for one in submitted.elements or (submitted,)]
    assert found == ([tmp_path / "s/r/0", tmp_path / "s/r/1"] if swept else [tmp_path / "s/r"])
    noted = [json.loads((folder / "job.yaml").read_text())["arguments"] for folder in found]
    assert ["lr=0.2" in words for words in noted] == ([False, True] if swept else [False])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "s", "sbatch.calls", "stubs"]


def test_local_makes_paths_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(command: Sequence[str], layout: Any, run_dir: Path, root: Path, environ: Any) -> int:
        seen.update(command=command, run_dir=run_dir, environ=environ)
        return 0

    monkeypatch.setattr(local, "run", run)
    monkeypatch.setenv("RECIPES_DATA", "data")
    monkeypatch.chdir(tmp_path)
    words = ["recipe=mnist", "launcher=local", "device=cpu", "data_dir=d", "cluster=example"]
    assert launch.main([*words, "run_dir=r"]) == 0
    assert seen["run_dir"] == tmp_path / "r"
    # The ranks start in the repository.
    assert {f"run_dir={tmp_path}/r", f"data_dir={tmp_path}/d", "device=cpu"} <= set(seen["command"])
    assert seen["environ"]["RECIPES_DATA"] == f"{tmp_path}/data"
    assert seen["environ"]["RECIPES_CLUSTER"] == "example"


def test_local_tells_which_keys_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "run", lambda *given: 0)
    words = ["recipe=mnist", "launcher=local", "device=cpu", f"run_dir={tmp_path}/r"]
    assert launch.main([*words, "ranks_per_node=2", "epochs=1"]) == 0
    assert capsys.readouterr().err == ""
    assert launch.main([*words, "partition=gpu", "epochs=1", "doctor=true"]) == 0
    told = "launch.py: launcher=local does not use Slurm: partition=, doctor= has no effect\n"
    assert capsys.readouterr().err == told


def test_the_second_machine_by_hand_makes_no_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        local, "run", lambda command, layout, run_dir, *_: run_dir is None and "run_dir=" not in " ".join(command)
    )
    words = ("launcher=local", "gpus=2,1", "master=h:29400", "node_rank=1", "device=cpu")
    assert launch.main(["recipe=mnist", *words]) is True


def test_a_machine_by_hand_has_its_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("launcher=local", "gpus=2,1", "master=[fd00::1]:29400")
    found = cli.local_layout(command_line.parse(["recipe=mnist", "device=cpu", "node_rank=1", *words], environ={}))
    assert found == local.Layout((2, 1), 1, "fd00::1", 29400)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert cli.local_layout(command_line.parse(["recipe=mnist", "node_rank=1", *words], environ={})) == found
    with pytest.raises(MachineError, match="2 ranks need one GPU each, and 1 are visible"):
        cli.local_layout(command_line.parse(["recipe=mnist", *words], environ={}))


# What sinfo says of partitions: main, the default, has two nodes of 8 CPUs; in small a job may have 15 minutes and 2 CPUs of a node.
PARTITIONS = "main*|up|infinite|1-infinite|2|8|UNLIMITED|gpu:2|n[1-2]\nsmall|up|15:00|1|2|8|2|gpu:2|n[1-2]\n"
REFUSES = 'echo "sbatch: error: Requested node configuration is not available" >&2; exit 1'


@pytest.mark.parametrize(
    ("sbatch", "away", "words", "said"),
    [
        ("exit 0", "", ("time=50",), ""),
        ("exit 0", "", ("time=50", "partition=main,small"), ""),
        ("exit 0", "", ("time=50", "partition=small", "qos=long"), ""),
        ("exit 0", "", ("time=50", "partition=small"), "!never start it: time= is 50 minutes, partition small allows 15:00; "),
        (REFUSES, "main*|up|infinite|1-infinite|1|8|UNLIMITED|gpu:2|n2|drain", ("nodes=2",), "to start when nodes that are down, drained or do not answer are back: n2"),
        (REFUSES, "main*|up|infinite|1-infinite|1|8|UNLIMITED|gpu:2|n2|idle*", ("nodes=2",), "to start when nodes that are down, drained or do not answer are back: n2"),
        (REFUSES, "main*|up|infinite|1-infinite|1|8|UNLIMITED|gpu:2|n2|idle~", ("nodes=2",), "!Slurm refuses this job: Requested node"),
        (REFUSES, "main*|up|infinite|1-infinite|1|8|UNLIMITED|gpu:2|n2|drng", ("nodes=1",), "!Slurm refuses this job: Requested node"),
        (REFUSES, "main*|up|infinite|1-infinite|1|8|UNLIMITED|gpu:2|n2|drain", ("nodes=3",), "!Slurm refuses this job: Requested node"),
        (REFUSES, "", ("nodes=2",), "!Slurm refuses this job: Requested node"),
        (REFUSES, "", ("time=5", "partition=small", "ranks_per_node=4"), "!partition small has 2 nodes of 2 CPUs"),
        (REFUSES, "", ("gpus=20",), "!gpus=20 (CPUs of each: 1), partition main has 2 nodes of 8 CPUs"),
    ],
)  # fmt: skip
def test_slurms_word_is_checked_against_the_partitions_limits_and_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, away: str, words: tuple[str, ...], said: str
) -> None:
    """sbatch --test-only refuses what waits for a drained node, and with EnforcePartLimits=NO takes what never starts."""
    stub(tmp_path, monkeypatch, "sbatch", sbatch)
    stub(
        tmp_path,
        monkeypatch,
        "sinfo",
        f"case $* in *%t*) echo '{away}' ;; *) printf '%b' '{PARTITIONS}' ;; esac",
    )
    job = describe("device=cpu", *words, root=tmp_path)
    if said.startswith("!"):
        with pytest.raises(MachineError, match=re.escape(said[1:])):
            submit.ask_controller(job, "")
    else:
        assert submit.ask_controller(job, "") == said


@pytest.mark.parametrize(
    ("of_small", "partition", "said"),
    [("down", "small", "; but partition small is down: the job waits until it is up"), ("down", "main,small", "")],
)
def test_a_partition_that_starts_no_job_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_small: str, partition: str, said: str
) -> None:
    stub(tmp_path, monkeypatch, "sbatch", "")
    stub(tmp_path, monkeypatch, "sinfo", f"printf '%b' '{PARTITIONS.replace('small|up', f'small|{of_small}')}'")
    assert submit.ask_controller(describe("device=cpu", "time=5", f"partition={partition}", root=tmp_path), "") == said


def test_without_a_default_partition_one_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch, "sbatch", "echo no partition >&2; exit 1")
    stub(tmp_path, monkeypatch, "sinfo", f"printf '%b' '{PARTITIONS.replace('main*', 'main')}'")
    with pytest.raises(MachineError, match="there is no default partition: give partition=, one of main, small"):
        submit.ask_controller(describe("device=cpu", root=tmp_path), "")


def test_launch_submits_a_copy_of_the_code_and_says_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/toy.py").write_text("as submitted")
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    asked = 'if [ "$1" = --test-only ]; then cat > $NOTES/asked; env > $NOTES/env; echo "sbatch: Job 9 to start soon" >&2; exit; fi'
    stub(tmp_path, monkeypatch, "sbatch", f"{asked}\ncp $1 $NOTES/job.sh; echo Submitted batch job 7")
    stub(tmp_path, monkeypatch, "scontrol", "echo JobId=7 JobState=FAILED ExitCode=3:0")
    monkeypatch.setenv("SLURM_NTASKS", "9")  # typed in another allocation
    words = ["recipe=mnist", "data_dir=d", "epochs=1", "umask=027"]
    assert launch.main(words) == 0
    assert "SLURM_NTASKS" not in (tmp_path / "env").read_text()
    assert (tmp_path / "runs/mnist/7/job.yaml").stat().st_mode & 0o777 == 0o640
    said = capsys.readouterr().out.splitlines()
    log = f"{tmp_path}/runs/submitit/7_0_log.out"
    assert said == ["job 7: to start soon", f"run directory: {tmp_path}/runs/mnist/7", f"log: tail -F {log}"]
    [copy] = (tmp_path / "runs/code").iterdir()
    assert (copy / "recipes/toy.py").read_text() == "as submitted"
    submitted = (tmp_path / "job.sh").read_text()
    assert f"cd {copy} || exit" in submitted.splitlines()
    wanted, found = directives((tmp_path / "asked").read_text()), directives(submitted)
    assert {**wanted, "--output": ""} == {**found, "--output": ""}
    command = json.loads((tmp_path / "runs/mnist/7/job.yaml").read_text())["command"]
    assert command == [
        sys.executable,
        "-u",
        "-m",
        "recipes.mnist",
        f"data_dir={tmp_path}/here/d",
        "epochs=1",
        "umask=027",
    ]
    assert launch.main([*words, "wait=true", "snapshot=false"]) == 3
    assert str(copy) not in (tmp_path / "job.sh").read_text()
    assert launch.main([*words, "sweep.lr=0.1,0.2", "wait=true"]) == 3
    said = capsys.readouterr().out.splitlines()
    assert {"7_0: lr=0.1", "7_1: lr=0.2"} <= set(said)


@pytest.mark.parametrize(
    ("wrong", "error", "status"),
    [
        ("", None, 0), ("size", MachineError("x"), 3), ("start", errors.InputError("x"), 2), ("start", errors.RunError("x"), 1),
        ("room", MachineError("x"), 3), ("_ask", MachineError("x"), 3),
    ],
)  # fmt: skip
def test_check_fails_of_whatever_part_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str, error: Exception, status: int
) -> None:
    for owner, name in ((snapshot, "size"), (checks, "start"), (checks, "room"), (cli, "_ask")):

        def answer(*given: Any, name: str = name) -> str:
            if name == wrong:
                raise error
            return "fine"

        monkeypatch.setattr(owner, name, answer)
    assert launch.main(["check", "recipe=mnist", "nodes=2", "gpus_per_node=8"]) == status
    said = capsys.readouterr()
    assert said.out.startswith("keys:   ok: mnist, 16 ranks\n")
    assert said.out.endswith("nothing was submitted\n")
    assert said.err.count("failed: x") == bool(wrong)


def test_check_of_a_sweep_looks_at_its_first_run_and_print_needs_no_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked: list[Path] = []
    monkeypatch.setattr(checks, "start", lambda settings, run_dir, *_: looked.append(run_dir))
    monkeypatch.setattr(checks, "room", lambda run_dir, *_: looked.append(run_dir))
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["recipe=mnist", "sweep.lr=0.5,0.1", f"run_dir={tmp_path}/s"]
    assert launch.main(["check", "launcher=print", *words]) == 0
    assert looked == [tmp_path / "s/0"] * 2
    assert "the first of 2 runs is checked: lr=0.5" in capsys.readouterr().out
    assert launch.main(["check", *words]) == 3
    assert "there is no Slurm on this machine" in capsys.readouterr().err


def test_check_starts_the_recipe_as_one_rank_of_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_JOB_ID", "PMI_RANK", "MASTER_ADDR", "RECIPES_BATCH"):
        monkeypatch.setenv(name, "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("RECIPES_DATA", "/d")
    words = [
        "recipe=imagenet",
        "cluster=example",
        "stage_dir=$TMPDIR/x",
        "backend=nccl",
        "resume=c.pt",
        "sweep.lr=0.5,0.1",
    ]
    settings = command_line.parse(words, environ={})
    environ = checks._environment(settings, Asked("/f", 16, True))
    assert not {"RANK", "SLURM_JOB_ID", "PMI_RANK", "MASTER_ADDR", "RECIPES_BATCH"} & set(environ)
    asked = dryrun.asked(environ)
    assert (environ["RECIPES_DATA"], environ["RECIPES_CLUSTER"], asked) == (
        "/d",
        "example",
        Asked("/f", 16, True),
    )
    assert (environ["CUDA_VISIBLE_DEVICES"], environ["NCCL_SOCKET_IFNAME"], environ["GLOO_SOCKET_IFNAME"]) == (
        "",
        "lo",
        "lo",
    )
    assert checks._words(settings, Path("/t/run"), Path("/base")) == {
        "lr": "0.5", "stage_dir": "", "backend": "auto", "resume": "/base/c.pt", "device": "cpu", "run_dir": "/t/run",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "code", "left", "expected"),
    [
        ("COMPLETED", 0, "done", 0), ("COMPLETED", 0, "", 1), ("FAILED", 3, "", 3), ("FAILED", 75, "preempted", 75), ("FAILED", 143, "done", 1), ("", 0, "done", 0),
        ("", 0, "", 1), ("COMPLETED", 0, "failed", 1),
        *((state, 0, "", 1) for state in ["CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"]),
    ],
)  # fmt: skip
def test_waiting_ends_with_the_jobs_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, code: int, left: str, expected: int
) -> None:  # fmt: skip
    states = iter([("PENDING", 0), None, ("RUNNING", 0), ("COMPLETING", 0), (state, code)])

    def ask(job: str, environ: Mapping[str, str]) -> scontrol.Job | None:
        if (answer := next(states)) is None:
            raise MachineError("a controller that is started again does not answer")
        return scontrol.Job(job, answer[0], "", answer[1], 0) if answer[0] else None

    monkeypatch.setattr(scontrol, "find", ask)
    monkeypatch.setattr(submit.time, "sleep", lambda s: None)
    job = "7" if left else "71"  # its run directory may hold an older run's end
    rundir.write_status(tmp_path, left or "done", attempt=rundir.open_attempt(tmp_path, ["a"], f"{job}.0"), step=1)
    (tmp_path / "log").write_text("rank 0's words\n")
    assert submit.wait(submit.Submitted("7", tmp_path, tmp_path / "log")) == expected
    assert capsys.readouterr().out.count("rank 0's words") == 1


def test_waiting_says_that_a_requeued_job_is_held_and_what_came_of_the_saved_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = scontrol.Job("7", "PENDING", "JobHeldUser", 0, 1, {"Priority": "0"})
    cancelled = scontrol.Job("7", "CANCELLED", "", 75, 1)
    answers = iter([scontrol.Job("7", "RUNNING", "", 0, 0), held, held, cancelled])
    monkeypatch.setattr(scontrol, "find", lambda job, environ: next(answers))
    monkeypatch.setattr(scontrol, "show", lambda *asked: [cancelled])
    monkeypatch.setattr(submit.time, "sleep", lambda s: None)
    rundir.write_status(
        tmp_path, "preempted", attempt=rundir.open_attempt(tmp_path, ["a"], "7.0"), step=5, reason="SIGUSR2"
    )
    assert submit.wait(submit.Submitted("7", tmp_path, tmp_path / "log")) == 75
    first, last = capsys.readouterr().err.splitlines()
    assert first == "job 7 is held (JobHeldUser): scontrol release 7 starts it"
    assert last.startswith(
        "job 7: cancelled: stopped by SIGUSR2, saved at step 5; job 7 has ended: CANCELLED; the job was cancelled:"
    )


def test_a_sweep_ends_with_the_first_status_that_is_not_good(monkeypatch: pytest.MonkeyPatch) -> None:
    one = submit.Submitted("7", Path("/r"), Path("/l"))
    for codes, expected in (((0, 3, 1), 3), ((0, 0), 0)):
        ends = iter(codes)
        monkeypatch.setattr(submit, "wait", lambda *_, ends=ends, **__: next(ends))
        assert submit.wait_for_all(dataclasses.replace(one, elements=(one,) * len(codes))) == expected


# --- after the step: finish and requeue

RUNNING = "JobId=7 JobName=mnist\n   JobState=RUNNING Reason=None"


def stub(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str) -> None:
    """A command on the PATH that notes how it was called and then does ``body``."""
    (folder / "stubs").mkdir(exist_ok=True)
    path = folder / "stubs" / name
    path.write_text(
        f'#!/bin/bash\nprintf "%s\\0" "$@" >> "$NOTES/{name}.calls"; echo >> "$NOTES/{name}.calls"\n{body}\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("NOTES", str(folder))
    monkeypatch.setenv("PATH", f"{folder}/stubs:/usr/bin:/bin")


def calls(folder: Path, name: str) -> list[list[str]]:
    path = folder / f"{name}.calls"
    return [line.split("\0")[:-1] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def preempted(tmp_path: Path) -> Path:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    rundir.write_status(run_dir, "preempted", attempt=rundir.open_attempt(run_dir, ["a"], "7.0"), step=12)
    return run_dir


def finish(run_dir: Path, *words: str, srun_status: int = 0, **environ: str) -> int:
    """batch.finish, in the job and launch that has left what there is in ``run_dir``."""
    environ = {"SLURM_JOB_ID": "7", **environ}
    if attempt := files.read_json(run_dir / "attempt.json"):
        files.write_json(run_dir / "attempt.json", {**attempt, "launch": rundir.launch_id(environ)})
    return batch.finish("mnist", srun_status, [f"run_dir={run_dir}", *words], environ)


def stub_scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, state: str = RUNNING, requeue: str = "true") -> None:
    stub(folder, monkeypatch, "scontrol", f"if [ $1 = show ]; then echo {shlex.quote(state)}; else {requeue}; fi")


def test_a_preempted_run_is_queued_again(
    tmp_path: Path, preempted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_scontrol(tmp_path, monkeypatch)
    assert finish(preempted, srun_status=143) == errors.EXIT_REQUEUE
    assert calls(tmp_path, "scontrol") == [["show", "job", "7"], ["requeue", "7"]]
    said = capsys.readouterr().out
    assert "saved at step 12" in said
    assert "saved at step 12; requeued (restart 1 of at most 20); run directory" in said
    assert (rundir.read_status(preempted) or {})["next"] == "requeued"


def test_an_array_task_queues_itself_alone(
    tmp_path: Path, preempted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_scontrol(tmp_path, monkeypatch, f"{RUNNING} Restarts=4")
    finish(preempted, SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="3", SLURM_RESTART_COUNT="4")
    assert calls(tmp_path, "scontrol") == [["show", "job", "5_3"], ["requeue", "5_3"]]
    assert "restart 5 of at most 20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "words", "next_word"),
    [
        ("JobState=COMPLETING Restarts=0", "the job was cancelled: to resume", "cancelled"),
        ("JobState=CANCELLED Restarts=0", "the job was cancelled: to resume", "cancelled"),
        ("JobState=COMPLETING Restarts=1", "requeued by Slurm;", "requeued"),
        ("JobState=PENDING Restarts=1", "requeued by Slurm;", "requeued"),
        ("Priority=0\nJobState=COMPLETING Reason=JobHeldUser Restarts=1",
         "requeued, but job 7 is held (JobHeldUser): scontrol release 7 starts it", "held"),
        ("JobState=COMPLETING Restarts=0\nPreemptTime=2026-11-23T13:49:29", "not requeued by Slurm: to resume", "not-requeued"),
        ("JobState=COMPLETING Restarts=0\nTimeLimit=00:01:00\nStartTime=2026-11-23T13:49:29 EndTime=2026-11-23T13:50:29",
         "not requeued by Slurm: to resume", "not-requeued"),
        ("JobState=COMPLETING Restarts=0\nTimeLimit=00:01:00\nStartTime=2026-11-23T13:49:29 EndTime=2026-11-23T13:50:09",
         "the job was cancelled: to resume", "cancelled"),
        ("JobState=PREEMPTED Restarts=0", "not requeued by Slurm: to resume", "not-requeued"),
    ],
)  # fmt: skip
def test_a_job_whose_end_slurm_has_decided_is_not_requeued(
    tmp_path: Path, preempted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, words: str,
    next_word: str,
) -> None:  # fmt: skip
    stub_scontrol(tmp_path, monkeypatch, f"JobId=7 JobName=x\n{state}")
    assert finish(preempted) == errors.EXIT_REQUEUE
    assert [call[0] for call in calls(tmp_path, "scontrol")] == ["show"]
    assert f"saved at step 12; {words}" in capsys.readouterr().out
    assert (rundir.read_status(preempted) or {})["next"] == next_word


def test_a_job_that_is_held_while_it_runs_is_requeued_and_held(
    tmp_path: Path, preempted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_scontrol(tmp_path, monkeypatch, RUNNING + "\nPriority=0")
    finish(preempted)
    assert calls(tmp_path, "scontrol")[-1] == ["requeue", "7"]
    assert "requeued (restart 1 of at most 20), but held: scontrol release 7 starts it;" in capsys.readouterr().out
    assert (rundir.read_status(preempted) or {})["next"] == "held"


@pytest.mark.parametrize(("words", "restarts"), [((), "20"), (("max_requeues=0",), ""), (("max_requeues=3",), "3")])
def test_a_job_is_queued_again_so_often_and_no_more(
    tmp_path: Path, preempted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: Sequence[str], restarts: str
) -> None:  # fmt: skip
    stub_scontrol(tmp_path, monkeypatch, f"{RUNNING} Restarts={restarts or 0}")
    assert finish(preempted, *words, SLURM_RESTART_COUNT=restarts) == errors.EXIT_REQUEUE
    assert [call[0] for call in calls(tmp_path, "scontrol")] == ["show"]
    assert "not requeued, since max_requeues= is reached: to resume" in capsys.readouterr().out
    assert (rundir.read_status(preempted) or {})["next"] == "max-requeues"


def test_one_requeue_below_the_limit_is_still_done(
    tmp_path: Path, preempted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_scontrol(tmp_path, monkeypatch, f"{RUNNING} Restarts=2")
    finish(preempted, "max_requeues=3", SLURM_RESTART_COUNT="2")
    assert calls(tmp_path, "scontrol")[-1] == ["requeue", "7"]


def test_a_job_that_gains_no_step_is_not_queued_again_for_ever(
    tmp_path: Path, preempted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_scontrol(tmp_path, monkeypatch, f"{RUNNING} Restarts=1")
    monkeypatch.setattr(rundir, "gained_nothing", lambda run_dir, launch: True)
    assert finish(preempted, SLURM_RESTART_COUNT="1") == errors.EXIT_REQUEUE
    assert [call[0] for call in calls(tmp_path, "scontrol")] == ["show"]
    assert "not requeued, since its last start completed no step: to resume" in capsys.readouterr().out
    assert (rundir.read_status(preempted) or {})["next"] == "no-progress"
    stub_scontrol(tmp_path, monkeypatch)
    finish(preempted)  # the first start may be stopped before its first step
    assert calls(tmp_path, "scontrol")[-1] == ["requeue", "7"]


def test_a_requeue_does_not_cut_off_the_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "go_home", lambda root: None)
    monkeypatch.setattr(batch, "finish", lambda *given: signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert batch.main(["finish", "mnist", "0"]) is True
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_scontrol_is_said_and_the_status_still_asks_for_a_requeue(
    tmp_path: Path, preempted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert finish(preempted) == errors.EXIT_REQUEUE
    assert "not requeued (scontrol is not on the PATH" in capsys.readouterr().out
    assert (rundir.read_status(preempted) or {})["next"] == "requeue-failed"


def test_a_failing_scontrol_is_said_in_one_line(
    tmp_path: Path, preempted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_scontrol(tmp_path, monkeypatch, requeue="printf 'slurm_update error:\\nAccess denied\\n' >&2; exit 1")
    assert finish(preempted) == errors.EXIT_REQUEUE
    said = capsys.readouterr().out
    assert "not requeued (slurm_update error: Access denied): to resume, start it again" in said
    assert (rundir.read_status(preempted) or {})["next"] == "requeue-failed"
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("state", "srun_status", "expected"),
    [("done", 0, 0), ("done", 143, 0), ("failed", 143, 143), ("running", 137, 137), ("running", 0, 1)],
)
def test_finish_gives_what_the_run_came_to_and_queues_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, srun_status: int, expected: int
) -> None:
    stub_scontrol(tmp_path, monkeypatch)
    rundir.write_status(tmp_path, state, attempt=rundir.open_attempt(tmp_path, ["a"], "7.0"), step=1)
    assert finish(tmp_path, srun_status=srun_status) == expected
    assert calls(tmp_path, "scontrol") == []
    status = rundir.read_status(tmp_path)
    assert status
    assert status["state"] != "running"


def test_finish_of_a_refused_run_says_why_and_leaves_the_status(
    preempted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (preempted / "status.json").read_bytes()
    rundir.refuse(preempted, "7.1", 2, "host: no data in /d")
    assert finish(preempted, srun_status=143, SLURM_RESTART_COUNT="1") == 2
    assert capsys.readouterr().err == "mnist: host: no data in /d\n"
    assert (preempted / "status.json").read_bytes() == before


def test_a_file_of_keys_that_has_changed_since_is_one_line_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys.yaml").write_text("epoch: 3\n")
    assert finish(tmp_path, f"config={tmp_path}/keys.yaml", srun_status=75) == 75
    assert finish(tmp_path, f"config={tmp_path}/gone.yaml") == errors.EXIT_CONFIG
    first, second = capsys.readouterr().err.splitlines()
    assert "epoch=3" in first
    assert "not queued again" in second


def test_finish_of_a_run_that_never_began_gives_sruns_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finish(tmp_path, srun_status=2) == 2
    assert capsys.readouterr() == ("", "mnist: ended with status 2 before the run began; the lines above say why\n")
    assert finish(tmp_path) == errors.EXIT_CRASH
    assert "before the run began" in capsys.readouterr().err
    assert finish(tmp_path, srun_status=2, SUBMITIT_EXECUTOR="slurm", SLURM_JOB_ID="7") == 2
    logs = f"{ROOT}/runs/submitit/7_*_log.out"
    line = f"mnist: ended with status 2 before the run began; the lines above, or in {logs}, say why\n"
    assert capsys.readouterr().err == line


def sick(bad: str) -> str:
    """The body of a stub of srun in which the doctor finds ``bad`` nodes; "" for none that could be left out."""
    verdict = json.dumps({"healthy": False, "exclude": bad.split()})
    return f"for word; do [[ $word != run_dir=* ]] || folder=${{word#run_dir=}}; done; mkdir -p $folder; echo {shlex.quote(verdict)} > $folder/doctor.json"


def test_a_job_on_a_bad_node_is_submitted_again_so_often_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same script is submitted again: how often still, and the nodes so far, go with it in variables."""
    helpers.use_root(monkeypatch, tmp_path)
    for name in ("recipes", "env"):
        (tmp_path / name).symlink_to(ROOT / name)
    # As Slurm 26.05 describes a job of 4 tasks with a GPU each: the number is in no variable but SLURM_TRES_PER_TASK.
    described = "JobId=7 TimeLimit=00:07:00 ExcNodeList=n1 OverSubscribe=NO Exclusive=NO NumTasks=4 TresBind=gres/gpu:per_task:1 TresPerTask=cpu=5,gres/gpu=1 StdErr="
    stub(tmp_path, monkeypatch, "scontrol", f"printf {shlex.quote(described.replace(' ', chr(10)))}")
    stub(tmp_path, monkeypatch, "srun", "env > $NOTES/srun.env; " + sick("n2 n3"))
    stub(tmp_path, monkeypatch, "sbatch", "env > $NOTES/sbatch.env; echo 8")
    run_dir, environ = tmp_path / "run", {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    environ |= {
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_CPUS_PER_TASK": "5",
        "SLURM_TRES_PER_TASK": "cpu=5,gres/gpu=1",
        "SLURM_TRES_BIND": "gres/gpu:per_task:1",
        "SLURM_NTASKS": "4",
    }
    words = ["epochs=3", f"run_dir={run_dir}", "device=cpu", "network=ethernet", "data_dir=/d"]
    for told, left in (("", "1"), ("1", "0")):
        assert batch.examine("mnist", 2, words, {**environ, "RECIPES_RESUBMITS": told}) == errors.EXIT_MACHINE
        assert (
            f"bad nodes: n2,n3; submitted again without them, as job 8 ({left} more at most)" in capsys.readouterr().err
        )
        given = dict(line.partition("=")[::2] for line in (tmp_path / "sbatch.env").read_text().splitlines())
        assert (given["RECIPES_RESUBMITS"], given["RECIPES_LEFT_OUT"]) == (left, "n1,n2,n3")
        assert (given["RECIPES_CODE"], given.get("SLURM_NTASKS")) == (str(tmp_path), None)
    assert calls(tmp_path, "sbatch")[0] == [
        "--parsable", "--partition=gpu", "--ntasks=4", "--cpus-per-task=5", "--time=00:07:00", "--exclude=n1,n2,n3", "--gpus-per-task=1",
        f"{run_dir}/job.sh", *words,
    ]  # fmt: skip
    asked = calls(tmp_path, "srun")[0]
    assert asked[-4:] == [f"run_dir={run_dir}/doctor", "device=cpu", "network=ethernet", "data_dir=/d"]
    wanted = {
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=5",
        "--mem=0",
        "--export=ALL",
        "--gpus=4",
    }
    assert {*wanted, "recipes.doctor"} <= set(asked)
    assert "SLURM_TRES_" not in (tmp_path / "srun.env").read_text()  # the doctor sees all GPUs of a node
    # Refused for good: the job's status says so.
    assert batch.examine("mnist", 2, words, {**environ, "RECIPES_RESUBMITS": "0"}) == errors.EXIT_MACHINE
    assert "not submitted again, since max_resubmits is used up" in capsys.readouterr().err
    assert batch.examine("mnist", 0, words, environ) == errors.EXIT_MACHINE
    assert len(calls(tmp_path, "sbatch")) == 2
    assert batch.finish("mnist", 0, words, environ) == errors.EXIT_MACHINE
    # Without a verdict on these nodes nothing is trained, whatever an older one says.
    (run_dir / "doctor/doctor.json").write_text('{"healthy": true}')
    stub(tmp_path, monkeypatch, "srun", "true")
    assert batch.examine("mnist", 2, words, environ) == errors.EXIT_MACHINE
    assert "the doctor gave no verdict" in capsys.readouterr().err
    stub(tmp_path, monkeypatch, "srun", sick("").replace("false", "true"))
    assert batch.examine("mnist", 2, words, environ) == 0


def test_a_job_of_launchs_is_submitted_again_with_all_that_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    stub(tmp_path, monkeypatch, "sbatch", "cp $1 $NOTES/again.sh; echo Submitted batch job 7")
    stub(tmp_path, monkeypatch, "srun", sick("n2"))
    words = (
        "exclude=n1",
        "dependency=afterok:3",
        "doctor=true",
        "max_resubmits=3",
        "qos=high",
        "gpus=10",
        "cluster=example",
    )
    run_dir = submit.submit(describe(*words, "epochs=3", root=tmp_path), sys.executable, f"{tmp_path}/run").run_dir
    first = directives((tmp_path / "again.sh").read_text())
    assert batch.examine("mnist", 3, [f"run_dir={run_dir}", "epochs=3"], {**os.environ, "SLURM_JOB_ID": "7"}) == 3
    assert "as job 7 (2 more at most)" in capsys.readouterr().err
    assert first.pop("--dependency") == "afterok:3"  # it was met
    text = (tmp_path / "again.sh").read_text()
    assert directives(text) == {**first, "--exclude": "n1,n2"}
    assert "examine mnist 2 epochs=3" in text
    assert "load gcc/12 cuda/12.4" in text.splitlines()


def test_a_job_that_cannot_be_examined_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    environ = {"SLURM_JOB_ID": "7"}
    for words, status, expected in (
        (["epoch=3"], 2, "mnist: epoch=3: recipe mnist has no key 'epoch'"),
        ([f"run_dir={tmp_path}/file"], 3, f"mnist: run_dir={tmp_path}/file: cannot be written (Not a directory)"),
    ):
        assert batch.examine("mnist", 2, words, environ) == status
        said = capsys.readouterr().err
        assert said.startswith(expected)
        assert said.count("\n") == 1


def test_a_job_that_resumes_a_run_on_the_cpu_asks_for_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "config.yaml").write_text(f"device: cpu\ndata_dir: {tmp_path}/data\n")
    job = describe(f"run_dir={tmp_path}", "gpus_per_node=2")
    assert (job.gpus_per_node, job.ranks_per_node) == (0, 2)
    assert job.arguments == (f"run_dir={tmp_path}",)
    settings = command_line.parse(["recipe=mnist", f"run_dir={tmp_path}"], environ={})
    assert f"{tmp_path}/data" in jobs.container_folders(settings, {}, ROOT)

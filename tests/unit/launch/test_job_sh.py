"""sbatch/job.sh as bash runs it in a job. The commands of Slurm and of the site are stubs."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.core import errors
from recipes.core.config import profiles
from recipes.core.launch import jobs
from recipes.core.run import directory, source
from recipes.core.slurm.script import STEP_OPTIONS
from tests import helpers
from tests.unit.launch.stand_ins import HOSTILE, MODULE, Bench, describe, executable


def made_script(bench: Bench, *words: str) -> Path:
    """The script of a job with these keys."""
    script = bench.folder / "job.sh"
    script.write_text(jobs.sbatch_script(describe(*words, root=bench.root)))
    return script


def test_arguments_reach_the_recipe_unchanged(bench: Bench) -> None:
    word = "data_dir=/" + "".join(word.removeprefix("data_dir=/") for word in HOSTILE)
    status, stderr = bench.run(
        "sbatch/imagenet_2x8.sh", word, bench.run_dir, SLURM_CPUS_PER_TASK="5"
    )
    assert "before the run began" in stderr  # nothing ran: srun is a stub
    assert status == errors.EXIT_CRASH
    assert bench.srun == [
        "--cpus-per-task=5",
        *STEP_OPTIONS,
        "env",
        "-C",
        str((bench.root / "runs/code/job-7").resolve()),
        f"{bench.folder}/bin/python",
        "-u",
        "-m",
        "recipes.imagenet",
        word,
        bench.run_dir,
    ]
    assert not {"canary", "d", "x"} & bench.files


def test_the_arguments_of_a_program_are_no_keys_of_the_job(bench: Bench) -> None:
    bench.run(
        "sbatch/script_2x8.sh",
        f"script={__file__}",
        bench.run_dir,
        "--",
        "cluster=mine",
        "$(touch canary)",
    )
    keys = [bench.run_dir, f"program={__file__}", "args=cluster=mine '$(touch canary)'"]
    assert bench.srun[-4:] == [f"workdir={bench.root}", *keys]
    assert (bench.folder / "cluster").read_text() == "none\n"
    assert "canary" not in bench.files


def test_the_batch_status_is_the_runs_status(bench: Bench) -> None:
    run_dir = bench.folder / "run"
    run_dir.mkdir()
    for number, (state, expected) in enumerate((("done", 0), ("failed", 143), ("running", 143))):
        # by the attempt that `begin` opens
        directory.write_status(run_dir, state, attempt=number, step=3)
        # A signal to all processes of the job, including the batch shell, ends only the step.
        ends = {"STEP_ENDS": "143", "SIGNALS": "TERM USR1 USR2"}
        status, stderr = bench.run("sbatch/mnist_1x1.sh", f"run_dir={run_dir}", **ends)
        assert status == expected, stderr
    assert directory.read_status(run_dir)["state"] == "failed"
    bench.stub("scontrol", "echo JobId=7 JobState=RUNNING")
    directory.write_status(run_dir, "preempted", attempt=3, step=3)
    status, stderr = bench.run("sbatch/mnist_1x1.sh", f"run_dir={run_dir}", "max_requeues=0")
    assert status == 75, stderr
    assert (directory.read_status(run_dir) or {})["next"] == "max-requeues"


# before bash 5.1, the builtin `command` forks once more
OLD_BASH = 'command() { builtin command "$@"; }; '


@pytest.mark.parametrize("version", ["", OLD_BASH])
def test_a_signal_that_only_the_batch_shell_receives_reaches_the_ranks(
    tmp_path: Path, version: str
) -> None:
    executable(
        tmp_path / "srun",
        f"#!/bin/bash\ntrap 'touch {tmp_path}/asked; sleep 1; exit 75' USR1\necho ready\n"
        "while :; do sleep 0.05; done\n",
    )
    script = f"{version}. sbatch/job.sh; srun; echo status $?"
    environ = helpers.clean_environment() | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(
        ["bash", "-c", script],
        cwd=helpers.ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            assert shell.stdout.readline() == "ready\n"

            def is_asked() -> bool:
                # Again, since the shell may not have noted the process ID of srun yet.
                asked = (tmp_path / "asked").exists()
                if not asked:
                    shell.send_signal(signal.SIGUSR2)
                return asked

            helpers.wait_until(is_asked, 20, "the signal in srun")
            assert shell.stdout.read() == "status 75\n"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)


@pytest.mark.parametrize("moment", ["begin", "srun"])
def test_a_signal_that_only_the_batch_shell_receives_leaves_a_stop_note(
    bench: Bench, moment: str
) -> None:
    """In a job of a few minutes, Slurm sends it while the job begins."""
    python = shlex.quote(sys.executable)
    signals = 'kill -USR2 "$SHELL_PID"'
    bench.stub(
        "python",
        f'case "{moment} $*" in begin*"batch begin"*) {signals} ;; esac; exec {python} "$@"',
    )
    bench.stub("srun", f'trap : USR1; [ {moment} = begin ] || {signals}; touch "$NOTES/not_killed"')
    (bench.folder / "job.sh").write_text("export SHELL_PID=$$\n. sbatch/script_2x8.sh")
    _, stderr = bench.run(bench.folder / "job.sh", f"script={__file__}", bench.run_dir)
    note = json.loads((bench.folder / "run/attempts/0000/stop.json").read_text())
    assert note["reason"] == "SIGUSR2", stderr
    assert "not_killed" in bench.files


def test_a_signal_that_comes_between_two_starts_is_for_the_second(bench: Bench) -> None:
    """A restart examines the nodes for half a minute."""
    second = bench.folder / "run/attempts/0001"
    again = f'printf "%s\\0" export RECIPES_ATTEMPT={second} again 1 step --x program script >&3'
    first_end = f'touch "$NOTES/ended"; mkdir {second}; kill -USR2 "$SHELL_PID"; sleep 0.3; {again}'
    bench.stub(
        "python",
        f'case "$*" in *"batch step-ended"*) [ -e "$NOTES/ended" ] || {{ {first_end}; }}; exit ;; '
        f'esac; exec {shlex.quote(sys.executable)} "$@"',
    )
    (bench.folder / "job.sh").write_text("export SHELL_PID=$$\n. sbatch/script_2x8.sh")
    _, stderr = bench.run(bench.folder / "job.sh", f"script={__file__}", bench.run_dir)
    reasons = [
        json.loads((bench.folder / f"run/attempts/{number}/stop.json").read_text())["reason"]
        for number in ("0000", "0001")
    ]
    assert reasons == ["", "SIGUSR2"], stderr
    assert "--x" in bench.srun
    assert "--wait=0" not in bench.srun  # an option of the first start


def test_a_users_options_of_the_shell_have_no_effect(bench: Bench) -> None:
    options = "errexit:nounset:noglob:noclobber:posix"
    bench.stub("srun", 'echo "${SHELLOPTS-}" > "$NOTES/options"; exit 75')
    _, stderr = bench.run("sbatch/mnist_1x1.sh", bench.run_dir, SHELLOPTS=options)
    assert "before the run began" in stderr  # `finish` has run
    in_force = (bench.folder / "options").read_text().strip().split(":")
    assert not set(options.split(":")) & set(in_force)


def test_python_uses_utf8_in_every_locale() -> None:
    command = ["bash", "-c", ". sbatch/job.sh; python3 -c 'import sys; print(sys.flags.utf8_mode)'"]
    environ = helpers.clean_environment(PYTHONUTF8="0", LC_ALL="POSIX")
    assert subprocess.check_output(command, cwd=helpers.ROOT, env=environ, text=True) == "1\n"


def test_srun_variables_of_an_outer_allocation_are_unset(bench: Bench) -> None:
    bench.stub("srun", 'env > "$NOTES/env"')
    of_gpus = (
        "GPUS GPUS_PER_NODE GPUS_PER_SOCKET GPUS_PER_TASK GPU_BIND NTASKS_PER_GPU TRES_BIND "
        "TRES_PER_TASK"
    )
    gpus = {f"SLURM_{name}": "9" for name in of_gpus.split()}
    cpus = {"SRUN_CPU_BIND": "x", "SLURM_CPU_BIND_TYPE": "x", "SLURM_CPU_BIND": "x"}
    of_profile = {"SLURM_WORKING_DIR": "/tmp", "SLURM_TIMELIMIT": "1", "PYTHONSAFEPATH": "1"}
    of_profile |= {f"SLURM_STD{name}MODE": "/tmp/x" for name in ("IN", "OUT", "ERR")}
    switches = "GRES STEP_GRES CPUS_PER_GPU NO_KILL EXCLUSIVE EXACT"
    of_step = {f"SLURM_{name}": "1" for name in switches.split()}
    paths = "HOSTFILE PROLOG EPILOG TASK_PROLOG TASK_EPILOG"
    of_step |= {f"SLURM_{name}": "/x" for name in paths.split()}
    bench.run("sbatch/mnist_1x1.sh", bench.run_dir, **cpus, **gpus, **of_profile, **of_step)
    names = {line.split("=")[0] for line in (bench.folder / "env").read_text().splitlines()}
    assert {"SLURM_JOB_ID", "RECIPES_SPEC"} <= names
    assert not names & {*cpus, *gpus, *of_profile, *of_step}
    # Neighbouring ranks are on one socket, unless the user asks for another distribution.
    assert "SLURM_DISTRIBUTION=block:block" in (bench.folder / "env").read_text()
    bench.run("sbatch/mnist_1x1.sh", bench.run_dir, SLURM_DISTRIBUTION="cyclic")
    assert "SLURM_DISTRIBUTION=cyclic" in (bench.folder / "env").read_text()


TWO = (
    "partition: gpu\nmodules: # the site's\n\n  - gcc/12   # the compiler\n# between\n  - cuda/12.4"
)
WINDOWS = "partition: gpu\r\nmodules:\r\n  - gcc/12\r\n  - cuda/12.4 \r\n"
PROFILES = {
    TWO: ["gcc/12", "cuda/12.4"],
    WINDOWS: ["gcc/12", "cuda/12.4"],
    "modules:\n#  - gcc/12\npartition: gpu\n": [],
}


@pytest.mark.parametrize("text", PROFILES)
def test_the_profiles_modules_are_loaded(
    bench: Bench, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = bench.root / "env" / "clusters"
    (clusters / "here.yaml").write_text(text)
    (clusters / "here.env").write_text("T_X=1\n")
    helpers.use_root(monkeypatch, bench.root)
    assert profiles.cluster_profile("here").get("modules", []) == PROFILES[text]
    bench.run("sbatch/mnist_2x8.sh", "epochs=2", "cluster=here", bench.run_dir, **MODULE)
    log = bench.folder / "modules"
    loaded = log.read_text().splitlines() if log.exists() else []
    assert loaded == [f"load {module}" for module in PROFILES[text]]
    assert bench.srun[-2:] == ["epochs=2", bench.run_dir]  # the script uses cluster= itself
    assert (bench.folder / "cluster").read_text() == "here\n"


def chosen_python(bench: Bench, *words: str, **environ: str) -> str:
    """The Python that job.sh chooses, which is a stub."""
    (bench.folder / "chosen").unlink(missing_ok=True)
    bench.run("sbatch/mnist_1x1.sh", *words, **environ)
    return (bench.folder / "chosen").read_text().strip()


def make_python(path: Path) -> str:
    """Makes a stub of Python that only records that it was chosen."""
    return executable(path, '#!/bin/bash\necho "$0" > "$NOTES/chosen"; exit 1\n')


def test_the_profiles_environment_is_used_if_none_is_active(bench: Bench) -> None:
    folders = (bench.folder / "envs/torch", bench.folder / "active", bench.root / ".venv")
    of_profile, active, venv = (make_python(folder / "bin/python") for folder in folders)
    (bench.root / "env/clusters/here.yaml").write_text(
        f"environment:   {bench.folder}/envs/torch   # ours\n"
    )
    assert chosen_python(bench, "cluster=here", VIRTUAL_ENV="") == of_profile
    assert chosen_python(bench, "cluster=here", VIRTUAL_ENV=str(bench.folder / "active")) == active
    assert chosen_python(bench, VIRTUAL_ENV="") == venv
    Path(of_profile).unlink()
    status, stderr = bench.run("sbatch/mnist_1x1.sh", "cluster=here", VIRTUAL_ENV="")
    assert status == 3, stderr
    assert f"there is no {of_profile} on " in stderr


def test_the_active_conda_environment_is_used(bench: Bench) -> None:
    """conda's base comes last, since conda activates it in each shell of its users."""
    conda, venv = (make_python(bench.folder / name / "bin/python") for name in ("conda", "venv"))
    active = {
        "VIRTUAL_ENV": "",
        "CONDA_PREFIX": str(bench.folder / "conda"),
        "CONDA_DEFAULT_ENV": "torch",
    }
    base = {**active, "CONDA_DEFAULT_ENV": "base"}
    assert chosen_python(bench, **active) == conda
    assert chosen_python(bench, **base) == conda
    of_repository = make_python(bench.root / ".venv/bin/python")
    assert chosen_python(bench, **active) == conda
    assert chosen_python(bench, **base) == of_repository
    both = {**active, "VIRTUAL_ENV": str(bench.folder / "venv")}
    for first, second in ((venv, conda), (conda, venv)):
        folders = f"{Path(first).parent}:{Path(second).parent}:{bench.folder}/bin:/usr/bin:/bin"
        assert chosen_python(bench, **both, PATH=folders) == first


def test_the_environments_python_comes_before_a_modules(bench: Bench) -> None:
    """Modules put their Python at the start of PATH."""
    theirs = bench.folder / "module"
    theirs.mkdir()
    (theirs / "python").symlink_to("/bin/false")
    module = {"BASH_FUNC_module%%": "() { PATH=$NOTES/module:$PATH; }"}
    bench.stub("srun", 'command -v python > "$NOTES/which"')
    for script in ("sbatch/mnist_1x1.sh", made_script(bench, "cluster=example")):
        bench.run(script, RECIPES_CLUSTER="example", **module)
        assert (bench.folder / "which").read_text() == f"{bench.folder}/bin/python\n"
        (bench.folder / "which").unlink()


def refused(bench: Bench, ran: tuple[int, str], *words: str) -> None:
    """Checks that a job ended with status 2 and one line with these words, before srun."""
    status, stderr = ran
    assert len(stderr.splitlines()) == 1, stderr
    assert all(word in stderr for word in words), stderr
    assert status == errors.EXIT_CONFIG
    assert bench.srun is None


def test_a_line_break_in_a_folder_name_runs_no_command(bench: Bench) -> None:
    """The name may also come from the target of a link."""
    bad = bench.folder / "x\ntouch canary;#"
    bad.mkdir()
    (bench.folder / "link").symlink_to(bad)
    ran = bench.run("sbatch/mnist_1x1.sh", f"data_dir={bench.folder}/link")
    refused(bench, ran, "data_dir=", "cannot be printed")
    assert "canary" not in bench.files
    moved = bad / "repository"
    shutil.copytree(bench.root, moved)
    refused(bench, bench.run("sbatch/mnist_1x1.sh", cwd=str(moved)), "cannot be printed")
    assert not list(bench.folder.rglob("canary"))


def test_output_of_a_sites_python_is_not_executed(bench: Bench) -> None:
    (bench.folder / "sitecustomize.py").write_text(
        "import atexit\nprint('hello; touch canary')\natexit.register(print, 'bye; touch canary')\n"
    )
    bench.run("sbatch/mnist_1x1.sh", bench.run_dir, PYTHONPATH=str(bench.folder))
    assert bench.srun[-1] == bench.run_dir
    assert not list(bench.folder.rglob("canary"))


def test_a_requeued_job_runs_the_same_code_with_the_same_paths(bench: Bench) -> None:
    (bench.root / "mine.yaml").write_text("epochs: 7\n")
    (bench.root / "mine.env").write_text("NCCL_DEBUG=INFO\n")
    words = ("config=mine.yaml", "network=mine.env", "run_dir=here", "umask=027")
    ran_in = set()
    for restarts in ("0", "1"):
        bench.run(
            "sbatch/mnist_1x1.sh", *words, SLURM_RESTART_COUNT=restarts, CDPATH=str(bench.folder)
        )
        ran_in.add((bench.folder / "pwd").read_text())
        (bench.root / "recipes/toy.py").write_text("edited")
        whole = {
            "epochs=7",
            f"network={bench.root}/mine.env",
            f"run_dir={bench.root}/here",
            "umask=027",
        }
        assert set(bench.srun[-4:]) == whole
        (bench.folder / "srun").unlink()
    # From these a job on a bad node is submitted again.
    script = (bench.root / "sbatch/mnist_1x1.sh").read_text()
    assert (bench.root / "here/job.sh").read_text() == script
    described = json.loads((bench.root / "here/job.yaml").read_text())
    assert (bench.root / "here/job.yaml").stat().st_mode & 0o777 == 0o640
    [copy] = ran_in  # the requeued job runs the same snapshot
    assert set(described["arguments"]) == whole
    assert described["code"] == copy.strip()
    assert "edited" not in Path(copy.strip(), "recipes/toy.py").read_text()


def test_a_script_outside_the_repository_is_refused(bench: Bench) -> None:
    elsewhere = bench.folder / "elsewhere"
    elsewhere.mkdir()
    ran = bench.run(bench.root / "sbatch" / "mnist_1x1.sh", cwd=str(elsewhere))
    refused(bench, ran, str(elsewhere), "is not a clone of yours", "run sbatch there")


def test_a_missing_python_environment_is_refused(bench: Bench) -> None:
    bench.stub("python", "exit 1")
    ran = bench.run("sbatch/mnist_1x1.sh", VIRTUAL_ENV="")
    refused(bench, ran, "no Python environment: activate yours", "make install")
    # Slurm sets this variable if sbatch passes on only a part of the environment.
    ran = bench.run("sbatch/mnist_1x1.sh", VIRTUAL_ENV="", SLURM_EXPORT_ENV="NONE")
    line = "no Python environment: --export=NONE or SBATCH_EXPORT hides the active one"
    refused(bench, ran, line, "submit with --export=ALL")


@pytest.mark.parametrize("name", ["python", "python3"])
def test_a_python_with_torch_that_is_only_on_the_path_is_used(bench: Bench, name: str) -> None:
    bench.stub("python", "exit 1")
    real = 'case "$*" in *find_spec*) exit 0 ;; esac; echo "$0" > "$NOTES/chosen"; exit 1'
    bench.stub(name, real)
    assert chosen_python(bench, VIRTUAL_ENV="") == f"{bench.folder}/bin/{name}"


def test_an_unknown_key_or_cluster_ends_the_job_before_srun(bench: Bench) -> None:
    refused(bench, bench.run("sbatch/mnist_1x1.sh", "epoch=$(touch canary)"), "'epochs'")
    assert "canary" not in bench.files
    refused(bench, bench.run("sbatch/mnist_1x1.sh", "cluster=nosuch"), "cluster=nosuch")


def test_a_module_that_does_not_load_ends_the_job(bench: Bench) -> None:
    ran = bench.run("sbatch/mnist_1x1.sh", "cluster=example", MODULE_ENDS="1", **MODULE)
    refused(bench, ran, "cluster=example", "gcc/12")
    ran = bench.run(made_script(bench, "cluster=example"), MODULE_ENDS="1", **MODULE)
    refused(bench, ran, "cluster=example", "gcc/12")
    ran = bench.run("sbatch/mnist_1x1.sh", "cluster=example")
    refused(bench, ran, "cluster=example", "has no command 'module'")


def test_snapshot_false_runs_the_repository(bench: Bench) -> None:
    bench.run(made_script(bench, "snapshot=false"), bench.run_dir)
    bench.run("sbatch/mnist_1x1.sh", bench.run_dir, RECIPES_SNAPSHOT="false")
    assert not (bench.root / "runs/code").exists()
    bench.run("sbatch/mnist_1x1.sh", bench.run_dir)
    assert (bench.root / "runs/code").exists()


def test_a_requeued_job_runs_job_sh_and_the_recipe_of_its_snapshot(bench: Bench) -> None:
    """Also if the recipe has left the repository since then."""
    code = bench.root / "runs/code/0123"
    shutil.copytree(bench.root / "recipes", code / "recipes")
    (bench.root / "runs/code/job-7").symlink_to(code)
    shutil.copytree(bench.root / "env", code / "env")
    (code / "sbatch").mkdir()
    (code / "sbatch/job.sh").write_text(
        (bench.root / "sbatch/job.sh").read_text() + "\necho of the snapshot >&2\n"
    )
    (code / source.STAMP).write_text(json.dumps({"root": str(bench.root), "commit": None}))
    (bench.root / "recipes/mnist.py").unlink()
    words = ("sbatch/mnist_1x1.sh", bench.run_dir)
    assert bench.run(*words)[0] == errors.EXIT_CONFIG
    _, stderr = bench.run(*words, SLURM_RESTART_COUNT="1")
    assert (bench.folder / "pwd").read_text() == f"{code}\n", stderr
    assert stderr.count("of the snapshot") == 1
    (code / "sbatch/job.sh").unlink()
    status, stderr = bench.run(*words, SLURM_RESTART_COUNT="1")
    assert stderr.startswith(f"{code} is incomplete: ")
    assert status == errors.EXIT_MACHINE


@pytest.mark.parametrize(
    ("kind", "variable", "is_used"),
    [("link", "", True), ("folder", "", False), ("link", "false", False)],
)
def test_a_requeued_job_uses_only_the_link_that_its_first_start_has_made(
    bench: Bench, kind: str, variable: str, is_used: bool
) -> None:
    """A folder, or with snapshot=false a link, came with a copied folder `runs/`."""
    code = bench.root / "runs/code"
    copy = code / ("job-7" if kind == "folder" else "0123")
    (copy / "sbatch").mkdir(parents=True)
    (copy / "sbatch/job.sh").write_text("echo of the copy >&2; exit 5\n")
    if kind == "link":
        (code / "job-7").symlink_to("0123")
    words = ("sbatch/mnist_1x1.sh", bench.run_dir)
    _, stderr = bench.run(*words, SLURM_RESTART_COUNT="1", RECIPES_SNAPSHOT=variable)
    assert ("of the copy" in stderr) == is_used, stderr


def test_a_python_that_is_gone_at_the_end_is_named(bench: Bench) -> None:
    bench.stub("srun", 'rm "$NOTES/bin/python"; exit 75')
    status, stderr = bench.run("sbatch/mnist_1x1.sh", bench.run_dir)
    assert status == 75
    line = f"mnist: ended with status 75 and is not requeued, since {bench.folder}/bin/python no"
    assert stderr.splitlines()[-1].startswith(line)

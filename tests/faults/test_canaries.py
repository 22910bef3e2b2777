"""Attempts to have something run, written or told that must not be: each leaves a canary where it succeeds: none does.

Every kind of attempt is first made on something that does not guard against it, and there it succeeds: a trap that
cannot shut would show nothing.
"""

from __future__ import annotations

import copyreg
import dataclasses
import gzip
import hashlib
import importlib
import io
import json
import os
import pickle
import secrets
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
import yaml
from torch import nn

import launch
from recipes import prepare
from recipes.core import batch, checkpoint, config, datafiles, envfile, models, packing, rundir, slurm, submit
from recipes.core.config import ConfigError, JobKeys
from recipes.core.datafiles import CIFAR10, DataFile, DataFileError
from recipes.core.envfile import EnvFileError
from recipes.core.rundir import InputError, MachineError
from tests import helpers

ROOT = Path(__file__).resolve().parents[2]
READY = sorted((ROOT / "sbatch").glob("*.sh"))
RECIPE = "mnist"

# What a shell would run where a value is pasted into it. {c}: the canary, a path of plain characters.
PASTED = (
    "a\ntouch {c}", "a\r\ntouch {c}\r", "a\n#SBATCH --wrap=x\ntouch {c}", "a;touch {c}", "a; touch {c} #",
    "a&touch {c}", "a|touch {c}", "a&&touch {c}",
    "a$(touch {c})", "a`touch {c}`", "${{x:=$(touch {c})}}", "$((a[$(touch {c})]))", '"; touch {c}; "',
    "'; touch {c}; '", "'\"; touch {c}; \"'", "\\'; touch {c}; \\'",
    "'$(touch {c})'", '"$(touch {c})"', "a <(touch {c})", "a >{c}", "a\\\n;touch {c}", "$'\\n'; touch {c}",
    ") ; touch {c}; (:", "-x; touch {c}", "--wrap=$(touch {c})",
    "%x;touch {c}", "a b c;touch {c}", "#\ntouch {c}", "!!;touch {c}", "{{a,$(touch {c})}}", "~$(touch {c})",
)  # fmt: skip
# What no shell takes for the end of a line, and other readers of a script or log do.
SEPARATED = tuple(
    f"a{separator}touch {{c}}"
    for separator in ("\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
)
PAYLOADS = PASTED + SEPARATED

pytestmark = [pytest.mark.fault(34, 35, 37, 38), pytest.mark.filterwarnings("ignore")]  # torch warns of odd pickles


class Trap:
    """A folder to make attempts in: scripts run in ``work``, with stubs on the PATH that note how they are called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work, self.bin, self.notes = folder, folder / "work", folder / "bin", folder / "notes"
        self.canary = folder / "canary"
        for path in (self.work, self.bin, self.notes):
            path.mkdir()
        self.stub("srun", 'printf "%s\\0" "$@" > "$NOTES/srun"')
        self.stub("python", 'printf "%s\\0" "$@" > "$NOTES/python"')

    def stub(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{body}\n")
        (self.bin / name).chmod(0o755)

    @property
    def environ(self) -> dict[str, str]:
        module = '() { echo "$*" >> "$NOTES/modules"; case "$*" in *evil*) touch "$CANARY" ;; esac; }'
        return {
            "PATH": f"{self.bin}:/usr/bin:/bin", "NOTES": str(self.notes), "CANARY": str(self.canary),
            "VIRTUAL_ENV": str(self.folder), "HOME": str(self.work),
            "LC_ALL": "C.UTF-8", "SLURM_JOB_ID": "7", "BASH_FUNC_module%%": module,
        }  # fmt: skip

    def bash(self, *words: str | Path, **added: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", *words], cwd=self.work, env={**self.environ, **added}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True,
            errors="backslashreplace", timeout=60, check=False,
        )  # fmt: skip

    def said(self, name: str) -> list[str] | None:
        """The words that a stub was called with; None where it was not."""
        path = self.notes / name
        return path.read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1] if path.exists() else None

    def fired(self) -> bool:
        """Whether an attempt has succeeded; the next begins anew."""
        found = [p for p in self.folder.rglob("canary*") if p.name.startswith("canary")]
        for path in found:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        return bool(found)


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(tmp_path)


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """Commands that are run in this process set theirs."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def at_work(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> Trap:
    """The trap, with this process in it."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SRUN_", "SBATCH_", "RECIPES_"))]:
        monkeypatch.delenv(name)
    for name, value in trap.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.chdir(trap.work)
    return trap


def payloads(trap: Trap, among: Sequence[str] = PAYLOADS) -> Iterator[str]:
    assert among
    for text in among:
        yield text.format(c=trap.canary)


# --- values in scripts


def test_each_payload_fires_where_it_is_pasted(trap: Trap) -> None:
    naive = ("#SBATCH --partition={}", "set -- key={}", 'set -- "key={}"', "set -- 'key={}'", "(set -- key={})")
    for payload in payloads(trap, PASTED):
        fired = []
        for line in naive:
            (trap.work / "naive.sh").write_text("#!/bin/bash\n" + line.format(payload) + "\n:\n")
            trap.bash("naive.sh")
            fired.append(trap.fired())
        assert any(fired), payload
    for payload in payloads(trap, SEPARATED):
        assert len(f"#SBATCH --partition={payload}".splitlines()) == 2, ascii(payload)


OPTIONS = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "partition", "account", "qos",
    "constraint", "exclude",
    "dependency", "mail-user", "mail-type", "comment", "reservation", "requeue", "open-mode", "signal", "chdir", "output", "error", "no-requeue",
}  # fmt: skip


def well_formed(script: str) -> None:
    """Lines are lines to any reader, and each directive is one option of ours with one value, ahead of any command."""
    lines = script.split("\n")
    assert lines == [*script.splitlines(), ""]
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert directives
    last = lines.index(directives[-1])
    assert all(line.startswith("#") for line in lines[:last])
    for line in directives:
        (word,) = shlex.split(line.removeprefix("#SBATCH "))
        assert word.startswith("--")
        assert word.removeprefix("--").partition("=")[0] in OPTIONS, line


def attempt(trap: Trap, words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether launch.py makes a script of these words, which bash then runs. Nothing else may come of it."""
    status = launch.main([f"recipe={RECIPE}", "launcher=print", *words])
    out, err = capsys.readouterr()
    if status == 0:
        well_formed(out)
        (trap.work / "job.sh").write_text(out)
        (trap.notes / "srun").unlink(missing_ok=True)
        ran = trap.bash("job.sh")
        assert trap.said("srun"), ran.stderr
    else:
        assert (status, out) == (2, "")
        assert err[:-1].isprintable(), ascii(err)
    assert not trap.fired(), words
    return status == 0


JOB_KEYS = [field.name for field in dataclasses.fields(JobKeys)]
JOB_TEXTS = (
    "gpus", "master", "time", "partition", "account", "qos", "constraint", "exclude", "reservation", "name",
    "cluster", "dependency", "mail", "extra",
)  # fmt: skip


@pytest.mark.parametrize("key", JOB_KEYS)
def test_a_jobs_key_runs_nothing(key: str, at_work: Trap, capsys: pytest.CaptureFixture[str]) -> None:
    for payload in payloads(at_work):
        assert not attempt(at_work, [f"{key}={payload}"], capsys)


def test_an_option_of_ones_own_runs_nothing(at_work: Trap, capsys: pytest.CaptureFixture[str]) -> None:
    touch = f"touch$IFS{at_work.canary}"
    for payload in (f"$({touch})", f"a;{touch}", f"`{touch}`", f"a|{touch}&"):
        assert attempt(at_work, [f"extra=--comment={payload}"], capsys), payload
    for payload in payloads(at_work):
        attempt(at_work, [f"extra=--comment={payload}"], capsys)


@pytest.mark.parametrize("key", JOB_TEXTS)
def test_a_jobs_key_in_a_file_or_a_variable_runs_nothing(
    key: str, at_work: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for payload in payloads(at_work, PAYLOADS[::3]):
        (at_work.work / "keys.yaml").write_text(f"{key}: {json.dumps(payload)}\n")
        monkeypatch.setenv("T_CANARY", payload)
        monkeypatch.setenv("RECIPES_CLUSTER", payload if key == "cluster" else "")
        for word in ("config=keys.yaml", f"{key}=${{oc.env:T_CANARY}}"):
            assert not attempt(at_work, [word], capsys)


def test_values_of_a_sites_profile_run_nothing(
    at_work: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = site(at_work)
    monkeypatch.setattr(config, "ROOT", root)
    here = root / "env" / "clusters" / "here.yaml"
    keys = (
        "partition", "account", "qos", "constraint", "reservation", "gpus_per_node", "cpus_per_rank", "time",
        "network", "modules", "env_files",
    )  # fmt: skip
    for key in keys:
        for payload in payloads(at_work, PAYLOADS[::2]):
            text = json.dumps(payload)
            here.write_text(f"{key}:\n  - {text}\n" if key in ("modules", "env_files") else f"{key}: {text}\n")
            assert not attempt(at_work, ["cluster=here"], capsys)
    here.write_text("modules:\n  - gcc/12\n")
    assert attempt(at_work, ["cluster=here"], capsys)
    assert (at_work.notes / "modules").read_text() == "load gcc/12\n"


def site(trap: Trap) -> Path:
    """A repository, as far as scripts and profiles go."""
    root = trap.folder / "repository"
    (root / "env" / "clusters").mkdir(parents=True)
    (root / "recipes").symlink_to(ROOT / "recipes")
    for path in (ROOT / "env").glob("*.env"):
        shutil.copy(path, root / "env")
    shutil.copytree(ROOT / "sbatch", root / "sbatch")
    return root


PATHS = ("data_dir", "run_dir", "resume")


@pytest.mark.parametrize("key", PATHS)
def test_a_path_of_any_name_reaches_the_recipe_as_it_is(
    key: str, at_work: Trap, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = 0
    for payload in payloads(at_work):
        word = f"{key}={at_work.work}/{payload}"
        if attempt(at_work, [word], capsys):
            settings = config.parse([f"recipe={RECIPE}", word, "launcher=print"], environ={})
            (there,) = slurm.describe(settings, ROOT, at_work.work).arguments
            assert (at_work.said("srun") or [])[-1] == there
            taken += 1
    assert taken > 15


@pytest.mark.parametrize("key", ["config", "network"])
def test_a_file_of_any_name_is_read_and_nothing_is_run(
    key: str, at_work: Trap, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = 0
    for payload in payloads(at_work):
        name = payload.replace("/", "_") + (".env" if key == "network" else "")
        (at_work.work / name).write_text("T_X=1\n" if key == "network" else "epochs: 1\n")
        taken += attempt(at_work, [f"{key}={name}"], capsys)
    assert taken > 15


def test_submitits_script_runs_nothing(
    at_work: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The repository's own path, and every path among the keys: the stub of sbatch runs what is submitted."""
    at_work.stub(
        "sbatch",
        'if [ "$1" = --test-only ]; then bash; else bash "$1"; fi >> "$NOTES/ran" 2>&1\necho Submitted batch job 7',
    )
    names = [payload.replace("/", "_") for payload in payloads(at_work, PASTED[::2]) if config_takes(payload)]
    assert len(names) > 8
    for name in names:
        root = at_work.folder / "roots" / name[:200]
        (root / "runs").mkdir(parents=True)
        monkeypatch.setattr(launch, "ROOT", root)
        words = ["recipe=mnist", "device=cpu", f"data_dir={name}", f"run_dir={at_work.work}/{name}/run"]
        assert launch.main(words) == 0, capsys.readouterr().err
        assert "submitit" in " ".join(at_work.said("srun") or [])
        told = capsys.readouterr().out
        shown = next(line for line in told.splitlines() if line.startswith("log: ")).removeprefix("log: ")
        at_work.bash("-c", shown.replace("tail -F", ": "))  # as a person pastes it
        assert not at_work.fired(), name


def config_takes(value: str) -> bool:
    try:
        config.parse([f"recipe={RECIPE}", f"data_dir={value}"], environ={})
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("script", [path.name for path in READY])
def test_words_behind_a_ready_script_run_nothing(script: str, at_work: Trap) -> None:
    root = site(at_work)
    some = PAYLOADS if script == READY[0].name else PAYLOADS[::6]
    for payload in payloads(at_work, some):
        for word in (f"data_dir={payload}", payload, f"cluster={payload}"):
            at_work.bash("-c", f'cd {root} && exec bash sbatch/{script} "$@"', "bash", word)
            assert not at_work.fired(), word
            if not word.startswith("cluster="):
                # The stub of Python takes any; the real one is asked below.
                assert (at_work.said("srun") or [])[-1] == word


@pytest.mark.parametrize("recipe", sorted({path.name.split("_")[0] for path in READY}))
def test_words_behind_a_ready_script_are_refused_or_taken_as_they_are(
    recipe: str, at_work: Trap, capsys: pytest.CaptureFixture[str]
) -> None:
    for payload in payloads(at_work, PAYLOADS if recipe == RECIPE else PAYLOADS[::4]):
        assert batch.main(["begin", recipe, payload]) == 2
        assert batch.main(["begin", recipe, f"epochs={payload}"]) == 2
        status = batch.main(["begin", recipe, f"data_dir={payload}"])
        refused = (
            any(c < " " for c in payload) or payload in payloads(at_work, SEPARATED) or payload.startswith(("~", "${"))
        )
        assert status == (2 if refused else 0), ascii(payload)
        assert all(line.isprintable() for line in capsys.readouterr().err.split("\n"))
        assert not at_work.fired()


@pytest.mark.parametrize("given", ["behind the script", "in the environment"])
def test_a_profile_outside_of_the_sites_folder_is_not_read(given: str, at_work: Trap) -> None:
    root = site(at_work)
    (root / "env" / "clusters" / "here.yaml").write_text("modules:\n  - gcc/12\n")
    places = [at_work.folder / "evil.yaml", root / "evil.yaml", root / "env" / "evil.yaml", at_work.work / "evil.yaml"]
    for place in places:
        place.write_text("modules:\n  - evil\n")
    (root / "env" / "clusters" / "folder").mkdir()
    names = [os.path.relpath(place, root / "env" / "clusters").removesuffix(".yaml") for place in places]
    names += [f"folder/{name}" for name in names] + [
        f"here/../{names[0]}",
        f"./{names[0]}",
        str(places[0]),
        "../clusters/here",
        "here.yaml/..",
        "here\n",
        "*",
        "-",
    ]
    for name in names:
        words, added = ([f"cluster={name}"], {}) if given == "behind the script" else ([], {"RECIPES_CLUSTER": name})
        ran = at_work.bash("-c", f'cd {root} && exec bash sbatch/mnist_1x1.sh "$@"', "bash", *words, **added)
        assert ran.returncode == 2
        assert ran.stderr.rstrip("\n").isprintable()
        assert "cluster=" in ran.stderr
        assert not at_work.fired(), name
        assert at_work.said("srun") is None
        assert not (at_work.notes / "modules").exists()
        with pytest.raises(ConfigError, match="cluster="):
            config.parse([f"recipe={RECIPE}"], environ={"RECIPES_CLUSTER": name})
    at_work.bash("-c", f"cd {root} && exec bash sbatch/mnist_1x1.sh cluster=here")
    assert (at_work.notes / "modules").read_text() == "load gcc/12\n"


def test_a_command_that_a_message_offers_can_be_pasted(at_work: Trap) -> None:
    """Messages name the command that mends: with folders of any name in it, it is that command and nothing else."""
    for payload in payloads(at_work, PASTED):
        folder = at_work.work / payload.replace("/", "_")
        if not str(folder).isprintable():
            continue
        for find in (datafiles.find_mnist, datafiles.find_cifar10):
            with pytest.raises(DataFileError) as caught:
                find(folder)
            command = str(caught.value).rpartition("run ")[2]
            at_work.bash("-c", command)
            assert at_work.said("python") == ["-m", "recipes.prepare", command.split()[3], f"data_dir={folder}"]
        folder.mkdir()
        (folder / "runs" / "submitit").mkdir(parents=True)
        (folder / "runs" / "submitit").chmod(0o777)
        with pytest.raises(MachineError) as refused:
            rundir.private_folder(folder, "submitit")
        at_work.bash("-c", "chmod 700 " + str(refused.value).rpartition("chmod 700 ")[2])
        assert stat.S_IMODE((folder / "runs" / "submitit").stat().st_mode) == 0o700
        assert not at_work.fired(), payload


# --- what a key or a file stands for

EVIL_MODULE = "from pathlib import Path\nPath({!r}).touch()\nx = int\n"


@pytest.mark.parametrize("name", ["evil_module_1.x", "evil_module_2.x.y"])
def test_an_interpolation_imports_nothing(
    name: str, at_work: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(at_work.work))
    module = name.partition(".")[0]
    (at_work.work / f"{module}.py").write_text(EVIL_MODULE.format(str(at_work.canary)))
    importlib.invalidate_caches()
    word = f"${{oc.coerce:{name},1}}"
    (at_work.work / "keys.yaml").write_text(f"epochs: {word}\n")
    monkeypatch.setenv("T_X", word)
    for words in (
        [f"epochs={word}"],
        ["epochs=${oc.env:T_X}"],
        ["epochs=${oc.env:T_NONE,${oc.env:T_X}}"],
        [f"data_dir={word}"],
        ["config=keys.yaml"],
        [f"seed=${{oc.decode:'{word}'}}"],
        [f"seed=${{${{oc.env:T_X,oc}}.coerce:{name},1}}"],
    ):
        assert not attempt(at_work, words, capsys)
    assert module not in sys.modules
    importlib.import_module(module)
    assert at_work.fired()  # or the trap above was none


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.mkdir",
        "!!python/object/new:os.mkdir",
        "!!python/name:os.mkdir",
        "!!python/module:evil_module_3",
    ],
)
def test_a_file_of_keys_makes_no_objects(
    tag: str, at_work: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = site(at_work)
    (at_work.work / "evil_module_3.py").write_text(EVIL_MODULE.format(str(at_work.canary)))
    text = (
        f"account: {tag} [{json.dumps(str(at_work.canary))}]\n"
        if "apply" in tag or "new" in tag
        else f"account: {tag} ''\n"
    )
    (at_work.work / "keys.yaml").write_text(text)
    (root / "env" / "clusters" / "here.yaml").write_text(text)
    attempt(at_work, ["config=keys.yaml"], capsys)
    monkeypatch.setattr(config, "ROOT", root)
    attempt(at_work, ["cluster=here"], capsys)
    if "apply" in tag:
        yaml.unsafe_load(text)
        assert at_work.fired()


# --- env files

EVIL_LINES = (
    "A=$(touch {c})", 'A="$(touch {c})"', "A=`touch {c}`", 'A="`touch {c}`"', "A=b; touch {c}", "A=b&&touch {c}",
    "A=b & touch {c}", "A=b | touch {c}", "A=b touch {c}",
    "touch {c}", "A=b\n\ttouch {c}", ". ./evil.sh", "source ./evil.sh", "export A=$(touch {c})", "A=b >{c}",
    "A[$(touch {c})]=1", "trap 'touch {c}' EXIT", "eval touch {c}",
    "A=b\rB=1\ntouch {c}", "A=<(touch {c})", "A=${{x:=$(touch {c})}}", "A=\"\n\"\ntouch {c}",
    "f() {{ touch {c}; }}\nf", "if true; then touch {c}; fi", "# a\\\ntouch {c}",
)  # fmt: skip


@pytest.mark.parametrize("line", EVIL_LINES)
def test_an_env_file_runs_nothing(line: str, at_work: Trap, capsys: pytest.CaptureFixture[str]) -> None:
    file = at_work.work / "evil.env"
    file.write_text(line.format(c=at_work.canary) + "\n")
    (at_work.work / "evil.sh").write_text(f"touch {at_work.canary}\n")
    assert batch.main(["begin", RECIPE, "network=evil.env"]) == 2
    assert "evil.env:" in capsys.readouterr().err
    assert not at_work.fired()
    at_work.bash("-c", "set -a; . ./evil.env")
    assert at_work.fired()  # or the trap above was none


PRELOADED = "#include <fcntl.h>\n__attribute__((constructor)) static void fire(void) { creat(CANARY, 0600); }\n"


def code_of_ones_own(trap: Trap) -> dict[str, tuple[dict[str, str], list[str]]]:
    """Variables that bring code of one's own into a process, and the process."""
    there = trap.work / "there"
    there.mkdir()
    (there / "sitecustomize.py").write_text(EVIL_MODULE.format(str(trap.canary)))
    (there / "evil.sh").write_text(f"touch {trap.canary}\n")
    for name in ("tee", "git"):  # what a recipe starts
        shutil.copy(trap.bin / "python", there / name)
        (there / name).write_text(f"#!/bin/sh\ntouch {trap.canary}\n")
    found = {
        "PYTHONPATH": ({"PYTHONPATH": str(there)}, [sys.executable, "-c", "pass"]),
        "PATH": ({"PATH": f"{there}:/usr/bin:/bin"}, ["sh", "-c", "tee --version"]),
        "BASH_ENV": ({"BASH_ENV": str(there / "evil.sh")}, ["bash", "-c", ":"]),
    }
    if shutil.which("git", path="/usr/bin:/bin"):
        subprocess.run(["git", "init", "-q", str(trap.work / "repo")], check=True, env=trap.environ)
        fsmonitor = {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "core.fsmonitor",
            "GIT_CONFIG_VALUE_0": f"touch {trap.canary};:",
        }
        found["GIT"] = (fsmonitor, ["git", "-C", str(trap.work / "repo"), "status"])
    if cc := shutil.which("cc"):
        (there / "evil.c").write_text(PRELOADED)
        subprocess.run(
            [cc, "-shared", "-fPIC", f'-DCANARY="{trap.canary}"', "-o", there / "evil.so", there / "evil.c"], check=True
        )
        found["LD_PRELOAD"] = ({"LD_PRELOAD": str(there / "evil.so")}, ["/bin/true"])
    return found


@pytest.mark.parametrize("name", ["PYTHONPATH", "PATH", "BASH_ENV", "GIT", "LD_PRELOAD"])
def test_an_env_file_brings_in_no_code(name: str, at_work: Trap) -> None:
    ways = code_of_ones_own(at_work)
    if name not in ways:
        pytest.skip("no git here" if name == "GIT" else "no C compiler here")
    variables, command = ways[name]
    file = at_work.work / "evil.env"
    file.write_text("".join(f'{name}="{value}"\n' for name, value in variables.items()))
    plain = {"PATH": "/usr/bin:/bin", "HOME": str(at_work.work)}
    environ = dict(plain)
    with pytest.raises(EnvFileError, match=r"evil\.env:1: "):
        envfile.apply(envfile.read(file), environ)
    subprocess.run(command, env=environ, capture_output=True, check=False)
    assert not at_work.fired()
    subprocess.run(command, env=plain | variables, capture_output=True, check=False)
    assert at_work.fired()  # or the trap above was none


# --- pickles


class Evil:
    """A pickle that makes a folder when it is loaded without care."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.canary),)


class EvilCall(Evil):
    def __reduce__(self) -> tuple[object, ...]:
        return eval, (f"__import__('os').mkdir({str(self.canary)!r})",)


class EvilState(Evil):
    """The call is in what an allowed type is filled with."""

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (), None, None, iter([("a", Evil(self.canary))])


class EvilModule(nn.Linear):
    """A whole module, as some save it; what makes it is the test's own class."""

    def __init__(self, canary: Path) -> None:
        super().__init__(1, 1)
        self.canary = canary

    def __setstate__(self, state: dict[str, Any]) -> None:
        os.mkdir(state["canary"])


KEYS = ("model", "optimizer", "scheduler", "ema", "sampler", "rng", "meta")
PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "instead": lambda good, evil: evil,
    "inside": lambda good, evil: {**good, "x": evil} if isinstance(good, dict) else [*(good or []), evil],
    "as a name": lambda good, evil: {evil: 1},
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a checkpoint holds, as it is written."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    state = checkpoint.State(
        model, optimizer, scheduler, ema=nn.Linear(2, 2), step=1, meta={"recipe": RECIPE, "config": {"seed": 1}}
    )
    content = checkpoint.content_of(state, {"samples": 3}, [checkpoint.rng_state(torch.device("cpu"))])
    folder = tmp_path_factory.mktemp("good")
    assert checkpoint.read(checkpoint.write(folder, content))["meta"] == content["meta"]
    (folder / "sealed.pt").write_bytes(sealed(saved(content)))
    # Or what follows is refused for another reason.
    assert checkpoint.read(folder / "sealed.pt")["meta"] == content["meta"]
    return content


def saved(content: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def sealed(content: bytes) -> bytes:
    """A file that is whole as far as its SHA-256 goes, whatever is in it: the sum is no secret."""
    end = zipfile.is_zipfile(io.BytesIO(content)) and content.endswith(b"\0\0")
    body = content[:-2] if end else content
    comment = b"sha256:" + hashlib.sha256(body).hexdigest().encode()
    return body + len(comment).to_bytes(2, "little") + comment


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("key", KEYS)
def test_a_checkpoint_with_code_in_it_is_refused(key: str, place: str, good: dict[str, Any], trap: Trap) -> None:
    assert set(KEYS) <= set(good)
    path = trap.work / "step-00000001.pt"
    for evil in (Evil(trap.canary), EvilCall(trap.canary), EvilState(trap.canary), EvilModule(trap.canary)):
        for options, why in (({}, "UnpicklingError"), ({"_use_new_zipfile_serialization": False}, "BadZipFile")):
            path.write_bytes(sealed(saved({**good, key: PLACES[place](good[key], evil)}, **options)))
            with pytest.raises(InputError, match=rf"step-00000001\.pt: is damaged or no checkpoint \({why}\)$"):
                checkpoint.read(path)
            assert not trap.fired()
    path.write_bytes(sealed(saved({**good, key: PLACES[place](good[key], Evil(trap.canary))})))
    torch.load(path, weights_only=False)
    assert trap.fired()  # or the trap above was none


@pytest.mark.parametrize("protocol", range(6))
def test_a_bare_pickle_for_a_checkpoint_is_refused(protocol: int, trap: Trap) -> None:
    for evil in (Evil(trap.canary), EvilCall(trap.canary)):
        (trap.work / "step-00000001.pt").write_bytes(sealed(pickle.dumps(evil, protocol=protocol)))
        with pytest.raises(InputError, match=r"step-00000001\.pt: is damaged or no checkpoint \(BadZipFile\)$"):
            checkpoint.read(trap.work / "step-00000001.pt")
        assert not trap.fired()
    pickle.loads((trap.work / "step-00000001.pt").read_bytes())
    assert trap.fired()


def test_a_checkpoint_that_would_unpack_to_much_more_is_refused(good: dict[str, Any], trap: Trap) -> None:
    """torch.save packs nothing, and torch.load unpacks what it is given: 1 MB can become 1 GB."""
    plain, packed = io.BytesIO(saved({**good, "model": {"w": torch.zeros(5_000_000)}})), io.BytesIO()
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as small:
        for name in archive.namelist():
            small.writestr(name, archive.read(name))
    path = trap.work / "step-00000001.pt"
    path.write_bytes(sealed(packed.getvalue()))
    assert path.stat().st_size < 1_000_000
    with pytest.raises(InputError, match=r"step-00000001\.pt: is no checkpoint \(it would unpack to more than it is\)"):
        checkpoint.read(path)
    assert torch.load(path, weights_only=True)["model"]["w"].nbytes == 20_000_000  # or the trap above was none


ARCH = "squeezenet1_1"  # a small one


def weights_of_ones_own(content: bytes, trap: Trap, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file where torch keeps ARCH's weights, with its hash in its name: eight digits are soon found by trying."""
    chosen = models.find_weights(ARCH, "IMAGENET1K_V1")
    name = f"{ARCH}-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    monkeypatch.setattr(chosen.value, "url", f"https://127.0.0.1:9/{name}")
    monkeypatch.setenv("TORCH_HOME", str(trap.work / "torch"))
    path = models.cached(chosen)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def zipped(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "kind", ["zip", "old format", "old format in a zip", "weights in front of a zip", "bare pickle"]
)
def test_a_file_of_weights_with_code_in_it_is_refused(kind: str, trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision itself runs what a pickle says, and unpacks what ends as a zip: it may not be let near these."""
    state, old = torchvision.models.get_model(ARCH).state_dict(), {"_use_new_zipfile_serialization": False}
    evil = {**state, "x": Evil(trap.canary)}
    content = {
        "zip": saved(evil),
        "old format": saved(evil, **old),
        "old format in a zip": zipped("weights.pth", saved(evil, **old)),
        "weights in front of a zip": saved(state, **old) + zipped("weights.pth", saved(evil, **old)),
        "bare pickle": pickle.dumps(evil),
    }[kind]
    path = weights_of_ones_own(content, trap, monkeypatch)
    if kind == "weights in front of a zip":  # what is in front is read, and good
        net = models.classifier(ARCH, "true", 1000)
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    else:
        with pytest.raises(MachineError, match="pretrained=true"):
            models.classifier(ARCH, "true", 1000)
    assert not trap.fired()
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing was unpacked beside it
    if kind != "bare pickle":
        torch.hub.load_state_dict_from_url(
            "https://127.0.0.1:9/" + path.name, check_hash=True, progress=False, weights_only=False
        )
        assert trap.fired()  # or the trap above was none


def opcodes(canary: Path) -> dict[str, bytes]:
    """A call of os.mkdir in each way that a pickle has to ask for one."""
    text = str(canary).encode()
    unicode = b"\x8c" + bytes([len(text)]) + text
    line = b"V" + text + b"\n"
    return {
        "GLOBAL, REDUCE": b"cposix\nmkdir\n(" + line + b"tR.",
        "INST": b"(" + line + b"iposix\nmkdir\n.",
        "OBJ": b"(cposix\nmkdir\n" + line + b"o.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93" + unicode + b"\x85R.",
        "EXT1": b"\x80\x02\x82\xf0(" + line + b"tR.",
        "attribute of an allowed name": b"\x80\x04\x8c\x05numpy\x8c\x0adtype.type\x93.",
        "by getattr": b"cbuiltins\ngetattr\n(cposix\nmkdir\nV__call__\ntR(" + line + b"tR.",
        "by eval": b"cbuiltins\neval\n(V__import__('os').mkdir('" + text + b"')\ntR.",
        "state of an allowed name": b"cnumpy\nndarray\n)R(cposix\nmkdir\n(" + line + b"tRtb.",
    }


def digits(trap: Trap, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes) -> int:
    """What prepare makes of a source whose batch is this pickle, with the right MD5 in its place."""
    source = trap.work / "source" / "cifar-10-batches-py"
    source.mkdir(parents=True, exist_ok=True)
    for batch_name in prepare.PICKLE_MD5:
        (source / batch_name).write_bytes(content)
    monkeypatch.setattr(prepare, "PICKLE_MD5", dict.fromkeys(prepare.PICKLE_MD5, hashlib.md5(content).hexdigest()))
    return prepare.main(["cifar10", f"data_dir={trap.work / 'data'}", f"source={source}"])


@pytest.mark.parametrize("way", opcodes(Path("/x")))
def test_a_batch_of_cifar_with_code_in_it_is_refused(
    way: str, trap: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = opcodes(trap.canary)[way]
    if way == "EXT1":
        copyreg.add_extension("posix", "mkdir", 0xF0)
    try:
        assert digits(trap, monkeypatch, way, content) == 2
        err = capsys.readouterr().err
        assert "is no batch of CIFAR-10" in err
        assert err.count("\n") == 1
        assert not trap.fired()
        if "of an allowed name" not in way:
            pickle.loads(content)
            assert trap.fired()  # or the trap above was none
    finally:
        if way == "EXT1":
            copyreg.remove_extension("posix", "mkdir", 0xF0)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04r\xff\xff\xff\x7fN.",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",
        b"(" * 100_000 + b"t" * 100_000 + b".",
        b"]" * 50_000 + b"a" * 49_999 + b".",
    ],
)
def test_a_batch_of_cifar_that_asks_for_memory_is_refused(
    content: bytes, trap: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert digits(trap, monkeypatch, "memory", content) == 2
    assert "is no batch of CIFAR-10" in capsys.readouterr().err


@pytest.mark.parametrize(
    "plant", ["somebody else's folder", "a link to one", "a folder that others may write", "a folder of the group's"]
)
def test_job_files_are_not_put_where_others_can_change_them(
    plant: str, at_work: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """submitit's job files are pickles that the job loads: whoever can change them runs code as the job's owner."""
    if ("else" in plant or "link" in plant) and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    at_work.stub("sbatch", 'echo Submitted batch job 7; touch "$CANARY"')
    root, folder = at_work.folder / "root", at_work.folder / "root" / "runs" / "submitit"
    theirs = at_work.folder / "theirs" if "link" in plant else folder
    theirs.mkdir(parents=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if "others" in plant or "group" in plant:
        theirs.chmod(0o702 if "others" in plant else 0o770)
    else:
        os.chown(theirs, 65534, 65534)
    if "link" in plant:
        folder.symlink_to(theirs)
    monkeypatch.setattr(launch, "ROOT", root)
    monkeypatch.setattr(submit, "ask_controller", lambda job: "to start at once")
    assert launch.main([f"recipe={RECIPE}", "device=cpu"]) == 3
    mend = "chmod 700" if "others" in plant or "group" in plant else "use a clone of your own"
    assert mend in capsys.readouterr().err
    assert not at_work.fired()
    assert list(theirs.iterdir()) == []


# --- archives


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(content)
    return info, content


def archive(members: Sequence[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


FEW = 3  # images of a batch here
BATCH = bytes(FEW * 3073)
BATCHES = [member(f"cifar-10-batches-bin/{name}.bin", content=BATCH) for name in (*prepare.TRAIN_BATCHES, "test_batch")]
FIRST = BATCHES[0][0].name


def hostile(canary: Path, secret: Path) -> dict[str, list[tuple[tarfile.TarInfo, bytes]]]:
    """Archives with all batches in them but, in some, the first; and what none may have."""
    up = "../" * 30 + str(canary).lstrip("/")
    return {
        "up": [*BATCHES, member(up, content=b"x")],
        "absolute": [*BATCHES, member(str(canary), content=b"x")],
        "through a link": [
            *BATCHES,
            member("out", tarfile.SYMTYPE, str(canary.parent)),
            member("out/canary", content=b"x"),
        ],
        "a folder outside": [*BATCHES, member(up, tarfile.DIRTYPE)],
        "a device": [*BATCHES, member(up, tarfile.FIFOTYPE)],
        "a batch that is a link": [member(FIRST, tarfile.SYMTYPE, str(secret)), *BATCHES[1:]],
        "a batch that is a hard link": [member(FIRST, tarfile.LNKTYPE, str(secret)), *BATCHES[1:]],
        "a batch that is a folder": [member(FIRST, tarfile.DIRTYPE), *BATCHES[1:]],
        "a batch that is a pipe": [member(FIRST, tarfile.FIFOTYPE), *BATCHES[1:]],
        "a batch of nothing but size": [member(FIRST, content=bytes(20 << 20)), *BATCHES[1:]],
        "a batch that links to itself": [member(FIRST, tarfile.SYMTYPE, Path(FIRST).name), *BATCHES[1:]],
    }


@pytest.mark.parametrize("kind", hostile(Path("/c"), Path("/s")))
def test_an_archive_writes_nothing_outside_and_reads_nothing_of_ours(
    kind: str, trap: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the right SHA-256 for each, since a wrong one ends it before it is looked into."""
    secret = trap.folder / "secret"
    secret.write_bytes(b"\x01" * len(BATCH))
    content = archive(hostile(trap.canary, secret)[kind])
    file = DataFile(CIFAR10.files[0].name, len(content), hashlib.sha256(content).hexdigest(), keep_packed=True)
    for module in (prepare, datafiles):
        monkeypatch.setattr(module, "CIFAR10", replace(CIFAR10, files=(file,)))
    monkeypatch.setattr(prepare, "BATCH_IMAGES", FEW)
    (trap.work / file.name).write_bytes(content)
    before = set(trap.folder.rglob("*"))
    status = prepare.main(["cifar10", f"data_dir={trap.work / 'data'}", f"source={trap.work / file.name}"])
    err = capsys.readouterr().err
    data = trap.work / "data" / "cifar10"
    if kind.startswith("a batch"):
        assert status == 2
        assert file.name in err
        assert err.count("\n") == 1
        with pytest.raises(DataFileError):
            datafiles.find_cifar10(trap.work / "data")
    else:
        assert (status, err) == (0, "")
        assert sorted(path.name for path in data.iterdir()) == sorted(
            [*datafiles.CIFAR10_IDX, "index.json", "prepare.lock"]
        )
    assert not trap.fired()
    assert {path for path in trap.folder.rglob("*") if data not in path.parents} - before <= {trap.work / "data", data}
    assert all(b"\x01" * 100 not in path.read_bytes() for path in data.iterdir())
    if kind in ("up", "absolute", "through a link", "a folder outside"):
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            # Python before 3.11.4 has no filters, and trusts fully.
            trusting = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(trap.work / "naive", **trusting)
        assert trap.fired()  # or the trap above was none


def test_the_name_inside_a_gz_is_not_taken(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes([0, 0, 8, 1]) + struct.pack(">I", 3) + b"abc"
    buffer = io.BytesIO()
    with gzip.GzipFile(str(trap.canary), "wb", fileobj=buffer) as packed:
        packed.write(content)
    raw = buffer.getvalue()
    assert trap.canary.name.encode() in raw
    source = trap.work / "source"
    source.mkdir()
    (source / "t.gz").write_bytes(raw.replace(b"canary\0", b"../../canary\0"))
    tiny = datafiles.Dataset(
        "tiny", RECIPE, "tiny", (DataFile("t", len(content), hashlib.sha256(content).hexdigest()),), ()
    )
    monkeypatch.setitem(prepare.DATASETS, "tiny", lambda keys: prepare.prepare_files(tiny, keys))
    assert prepare.main(["tiny", f"data_dir={trap.work / 'data'}", f"source={source}"]) == 0
    assert (trap.work / "data" / "tiny" / "t").read_bytes() == content
    assert not trap.fired()


# --- links that lie in wait


def test_a_link_at_a_temporary_files_name_is_not_followed(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name cannot be guessed; here it is known, and a link to somebody's file lies there."""
    monkeypatch.setattr(secrets, "token_hex", lambda count=None: "0" * 8)
    victim, target = trap.work / "victim", trap.work / "status.json"
    victim.write_text("mine")
    name = f".status.json.{os.uname().nodename}.{os.getpid()}.00000000"
    (trap.work / name).symlink_to(victim)
    with pytest.raises(FileExistsError):
        rundir.write_json(target, {"a": 1})
    assert victim.read_text() == "mine"
    assert not target.exists()
    part = trap.work / f".t.{os.uname().nodename}.00000000.part"
    part.symlink_to(trap.canary)
    with pytest.raises(FileExistsError):
        datafiles.install(
            str(victim), DataFile("t", 4, hashlib.sha256(b"mine").hexdigest()), trap.work, lambda done: None
        )
    assert not trap.fired()


@pytest.mark.parametrize("by", ["launch.py", "a ready script"])
def test_a_link_in_a_run_directory_to_come_is_not_written_through(
    by: str, at_work: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next job's number, and so its run directory, is easily guessed."""
    at_work.stub("sbatch", "echo Submitted batch job 7")
    root, victim = at_work.folder / "root", at_work.work / "victim"
    run_dir = root / "runs" / RECIPE / "7"
    run_dir.mkdir(parents=True)
    victim.write_text("mine")
    for name in ("job.sh", "job.yaml"):
        (run_dir / name).symlink_to(victim)
    if by == "launch.py":
        monkeypatch.setattr(launch, "ROOT", root)
        monkeypatch.setattr(submit, "ask_controller", lambda job: "to start at once")
        assert launch.main([f"recipe={RECIPE}", "device=cpu"]) == 0
    else:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("RECIPES_SCRIPT", str(READY[0]))
        assert batch.main(["begin", RECIPE, f"run_dir={run_dir}"]) == 0
    assert victim.read_text() == "mine"
    assert "srun" in (run_dir / "job.sh").read_text()
    assert json.loads((run_dir / "job.yaml").read_text())["job_id"] == "7"


def test_a_link_for_a_lock_makes_no_file_elsewhere(trap: Trap) -> None:
    (trap.work / "prepare.lock").symlink_to(trap.canary)
    with (
        pytest.raises(OSError, match="symbolic link"),
        packing.exclusive(trap.work / "prepare.lock", lambda text: None),
    ):
        pass
    assert not trap.fired()


# --- secrets

NAMES = ("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD", "MY_PASS", "SITE_SECRET", "GITHUB_TOKEN")
SECRETS = {name: secrets.token_hex(16) for name in NAMES}
PLACE = secrets.token_hex(16)


@pytest.mark.parametrize("name", NAMES)
def test_no_key_takes_a_secret(
    name: str, at_work: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value ends up in logs, messages and names of folders: what is a secret by its name does not get that far."""
    monkeypatch.setenv(name, SECRETS[name])
    monkeypatch.setenv("T_NAME", name)
    for word in (
        f"data_dir=/x/${{oc.env:{name}}}", f"run_dir=${{oc.env:{name}}}", f"partition=${{oc.env:{name}}}",
        f"epochs=${{oc.env:{name}}}", f"data_dir=${{oc.env:T_NONE,${{oc.env:{name}}}}}",
        f"network=${{oc.env:{name}}}", f"dataset=${{oc.env:{name}}}", "data_dir=${oc.env:${oc.env:T_NAME}}",
        f"resume=${{oc.env:{name}}}", f"exclude=${{oc.env:{name}}}",
    ):  # fmt: skip
        assert launch.main([f"recipe={RECIPE}", "launcher=print", word]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert SECRETS[name] not in err
        assert word.partition("=")[0] + "=" in err


def test_a_variables_value_that_does_not_fit_is_not_shown(
    at_work: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("T_X", f"{PLACE} !")
    for key in (
        "epochs", "lr", "partition", "name", "exclude", "time", "dataset", "variant", "cluster", "device",
        "optimizer", "compile", "master", "gpus",
    ):  # fmt: skip
        assert launch.main([f"recipe={RECIPE}", "launcher=print", f"{key}=${{oc.env:T_X}}"]) == 2
        err = capsys.readouterr().err
        assert f"{key}=${{oc.env:T_X}}" in err
        assert PLACE not in err


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A short run with secrets around it, in a folder with a hostile name: that folder, and all that it said."""
    run_dir = tmp_path_factory.mktemp("run") / 'it\'s "a" $(touch canary) `touch canary`; touch canary & -x é ü 中 #'
    words = [
        *helpers.LOCAL, "max_steps=2", "ranks_per_node=2", f"run_dir={run_dir}",
        "data_dir=/nosuch/${oc.env:T_PLACE}",
    ]  # fmt: skip
    ended = helpers.run(words, environ=helpers.clean_environment(**SECRETS, T_PLACE=PLACE))
    assert ended.status == 0, ended.out
    return run_dir, ended.out


@pytest.mark.long
def test_a_run_tells_no_secret(told: tuple[Path, str]) -> None:
    run_dir, said = told
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {
        "config.yaml", "status.json", "summary.json", "metrics.jsonl", "attempt.json", "rank0.log", "rank1.log",
        "latest",
    } <= names  # fmt: skip
    for secret in (*SECRETS.values(), PLACE):
        assert secret not in said
        for path in files:
            assert secret.encode() not in path.read_bytes(), path
            assert secret not in str(path)
    for path in run_dir.glob("checkpoints/*.pt"):
        with zipfile.ZipFile(path) as parts:
            text = b"".join(parts.read(name) for name in parts.namelist())
        assert b"data_dir" in text
        assert not any(secret.encode() in text for secret in (*SECRETS.values(), PLACE))
    assert "data_dir: /nosuch/${oc.env:T_PLACE}" in (run_dir / "config.yaml").read_text()
    for name in NAMES:
        assert name not in said


@pytest.mark.long
def test_a_run_in_a_folder_of_any_name_runs_nothing(told: tuple[Path, str]) -> None:
    run_dir, _ = told
    assert helpers.read(run_dir, "status")["state"] == "done"
    assert not list(run_dir.parent.rglob("canary*"))
    assert not (ROOT / "canary").exists()


@pytest.mark.long
def test_a_runs_files_are_its_owners_alone(told: tuple[Path, str]) -> None:
    for path in (told[0], *told[0].rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_there_are_enough_of_them() -> None:
    kinds = (
        len(JOB_KEYS) * len(PAYLOADS)
        + len(EVIL_LINES)
        + len(KEYS) * len(PLACES)
        + len(opcodes(Path("/x")))
        + len(hostile(Path("/c"), Path("/s")))
    )
    assert kinds > 500
    assert len(PAYLOADS) + len(EVIL_LINES) + len(KEYS) * len(PLACES) + len(opcodes(Path("/x"))) >= 60

"""Attempts to run code, write files or show secrets: each would leave a canary file, and none does.

Most attempts are also made on something unguarded, where they succeed: a trap that cannot shut would show nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import secrets
import shlex
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import launch
from recipes import prepare
from recipes.core import files
from recipes.core.data import datasets
from recipes.core.data.datasets import DataFileError
from recipes.core.errors import ConfigError, InputError, MachineError
from recipes.core.files import private_folder, write_json
from recipes.core.launch import batch, cli, controller
from recipes.core.run import command_line
from recipes.core.train import checkpoint, models
from tests import helpers

ROOT = Path(__file__).resolve().parents[2]
READY = sorted((ROOT / "sbatch").glob("*x*.sh"))
RECIPE = "mnist"

# What a shell would run where a value is pasted into it; one for each way out of a word, quotes or a line. {c}: the canary's path.
PASTED = (
    "a\ntouch {c}", "a\n#SBATCH --wrap=x\ntouch {c}", "a; touch {c} #", "a&&touch {c}", "a$(touch {c})", "a`touch {c}`",
    "${{x:=$(touch {c})}}", "$((a[$(touch {c})]))", '"; touch {c}; "', "'; touch {c}; '", "\\'; touch {c}; \\'", "a <(touch {c})",
    ") ; touch {c}; (:", "a\\\n;touch {c}",
)  # fmt: skip
# Ends of a line for some readers of scripts and logs, though for no shell.
SEPARATED = tuple(f"a{separator}touch {{c}}" for separator in ("\r", "\x0b", "\x1c", "\x85", "\u2028"))
PAYLOADS = PASTED + SEPARATED

pytestmark = [pytest.mark.fault(34, 35, 37, 38), pytest.mark.filterwarnings("ignore")]  # torch warns of odd pickles


class Trap:
    """A folder to make attempts in: scripts run in ``work``, with stubs on the PATH that note how they are called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work, self.bin, self.notes = folder, folder / "work", folder / "bin", folder / "notes"
        self.canary = folder / "canary"
        for path in (self.work, self.bin, self.notes):
            path.mkdir()
        (self.work / "recipes").symlink_to(ROOT / "recipes")  # what a batch script looks for
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
        """Whether an attempt has succeeded; the next starts from the beginning."""
        found = [p for p in self.folder.rglob("canary*") if p.name.startswith("canary")]
        for path in found:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        return bool(found)


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(tmp_path)


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


JOB_TEXTS = (
    "gpus", "master", "time", "partition", "account", "qos", "constraint", "exclude", "reservation", "name",
    "cluster", "dependency", "mail", "extra", "gpu_type", "container_mounts",
)  # fmt: skip


def test_a_job_keys_value_runs_nothing(
    at_work: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the command line and in a file of keys."""
    for key in JOB_TEXTS:
        for payload in payloads(at_work, PAYLOADS if key == "account" else PAYLOADS[::4]):
            assert not attempt(at_work, [f"{key}={payload}"], capsys)
        (at_work.work / "keys.yaml").write_text(f"{key}: {json.dumps(payload)}\n")
        assert not attempt(at_work, ["config=keys.yaml"], capsys)


def test_a_users_sbatch_option_runs_nothing(at_work: Trap, capsys: pytest.CaptureFixture[str]) -> None:
    for payload in ("$(touch$IFS{c})", "a;touch$IFS{c}"):
        assert attempt(at_work, [f"extra=--comment={payload.format(c=at_work.canary)}"], capsys), payload


def test_values_of_a_sites_profile_run_nothing(
    at_work: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = site(at_work)
    helpers.use_root(monkeypatch, root)
    here = root / "env" / "clusters" / "here.yaml"
    for key in (
        "partition",
        "constraint",
        "gpus_per_node",
        "network",
        "modules",
        "env_files",
        "environment",
        "container",
    ):
        for payload in payloads(at_work, PAYLOADS[::3]):
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
    (trap.work / "env").symlink_to(root / "env")
    return root


def test_submitits_script_runs_nothing(
    at_work: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The repository's own path, and every path among the keys: the stub of sbatch runs submitit's script."""
    monkeypatch.setattr(sys, "executable", str(at_work.bin / "python"))
    at_work.stub(
        "sbatch",
        'if [ "$1" = --test-only ]; then bash; else bash "$1"; fi >> "$NOTES/ran" 2>&1\necho Submitted batch job 7',
    )
    names = ("a$(touch {c})", "a; touch {c} #", "'; touch {c}; '", '"; touch {c}; "')
    for name in [name.format(c=at_work.canary).replace("/", "_") for name in names]:
        root = at_work.folder / "roots" / name[:200]
        (root / "runs").mkdir(parents=True)
        (root / "sbatch").symlink_to(ROOT / "sbatch")
        monkeypatch.setattr(cli, "ROOT", root)
        words = ["recipe=mnist", "device=cpu", f"data_dir={name}", f"run_dir={at_work.work}/{name}/run"]
        assert launch.main(words) == 0, capsys.readouterr().err
        assert "submitit.core._submit" in (at_work.said("python") or [])
        told = capsys.readouterr().out
        shown = next(line for line in told.splitlines() if line.startswith("log: ")).removeprefix("log: ")
        at_work.bash("-c", shown.replace("tail -F", ": "))  # as a person pastes it
        assert not at_work.fired(), name


def test_a_profile_outside_of_the_sites_folder_is_not_read(at_work: Trap) -> None:
    """The batch script reads the profile's modules before there is any Python."""
    root = site(at_work)
    (root / "env" / "clusters" / "here.yaml").write_text("modules:\n  - gcc/12\n")
    for place in (at_work.folder / "evil.yaml", root / "env" / "evil.yaml"):
        place.write_text("modules:\n  - evil\n")
    (root / "env" / "clusters" / "folder").mkdir()
    names = ["../evil", "folder/../../evil", str(at_work.folder / "evil"), "../clusters/here", "here\n", "*"]
    for number, name in enumerate(names):
        words, added = ([f"cluster={name}"], {}) if number % 2 == 0 else ([], {"RECIPES_CLUSTER": name})
        ran = at_work.bash("-c", f'cd {root} && exec bash sbatch/mnist_1x1.sh "$@"', "bash", *words, **added)
        assert ran.returncode == 2
        assert ran.stderr.rstrip("\n").isprintable()
        assert "cluster=" in ran.stderr
        assert not at_work.fired(), name
        assert at_work.said("srun") is None
        assert not (at_work.notes / "modules").exists()
        with pytest.raises(ConfigError, match="cluster="):
            command_line.parse([f"recipe={RECIPE}"], environ={"RECIPES_CLUSTER": name})
    at_work.bash("-c", f"cd {root} && exec bash sbatch/mnist_1x1.sh cluster=here")
    assert (at_work.notes / "modules").read_text() == "load gcc/12\n"


def test_a_command_that_a_message_offers_can_be_pasted(at_work: Trap) -> None:
    """A command in a message runs nothing else, whatever the name of a folder in it."""
    for payload in payloads(at_work, PASTED[2:]):
        folder = at_work.work / payload.replace("/", "_")
        if not str(folder).isprintable():
            continue
        for find in (datasets.find_mnist, datasets.find_cifar10):
            with pytest.raises(DataFileError) as caught:
                find(folder)
            command = str(caught.value).rpartition("run ")[2]
            at_work.bash("-c", command)
            assert at_work.said("python") == ["-m", "recipes.prepare", command.split()[3], f"data_dir={folder}"]
        folder.mkdir()
        (folder / "runs" / "submitit").mkdir(parents=True)
        (folder / "runs" / "submitit").chmod(0o777)
        with pytest.raises(MachineError) as refused:
            private_folder(folder, "submitit")
        at_work.bash("-c", "chmod 700 " + str(refused.value).rpartition("chmod 700 ")[2])
        assert stat.S_IMODE((folder / "runs" / "submitit").stat().st_mode) == 0o700
        assert not at_work.fired(), payload


# --- what a key or a file stands for

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
    path = tmp_path_factory.mktemp("good") / "saved.pt"
    path.write_bytes(saved(content))
    # Or what follows is refused for another reason.
    assert checkpoint.read(path)["meta"] == content["meta"]
    return content


def saved(content: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_with_code_in_it_is_refused(place: str, good: dict[str, Any], trap: Trap) -> None:
    path = trap.work / "step-00000001.pt"
    for evil in (Evil(trap.canary), EvilCall(trap.canary), EvilState(trap.canary), EvilModule(trap.canary)):
        content = {**good, "rng": PLACES[place](good["rng"], evil)}
        for options, why in (({}, "UnpicklingError"), ({"_use_new_zipfile_serialization": False}, "BadZipFile")):
            path.write_bytes(saved(content, **options))
            with pytest.raises(InputError, match=rf"step-00000001\.pt: is damaged or no checkpoint \({why}\)$"):
                checkpoint.read(path)
            assert not trap.fired()
    path.write_bytes(saved({**good, "rng": PLACES[place](good["rng"], Evil(trap.canary))}))
    torch.load(path, weights_only=False)
    assert trap.fired()  # or the trap above was none


def test_a_checkpoint_that_would_unpack_to_much_more_is_refused(good: dict[str, Any], trap: Trap) -> None:
    """torch.save packs nothing, and torch.load unpacks what it is given: 1 MB can become 1 GB."""
    plain, packed = io.BytesIO(saved({**good, "model": {"w": torch.zeros(5_000_000)}})), io.BytesIO()
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as small:
        for name in archive.namelist():
            small.writestr(name, archive.read(name))
    path = trap.work / "step-00000001.pt"
    path.write_bytes(packed.getvalue())
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


@pytest.mark.parametrize("kind", ["zip", "old format in a zip", "weights in front of a zip"])
def test_a_file_of_weights_with_code_in_it_is_refused(kind: str, trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision itself runs what a pickle says, and unpacks what ends as a zip: it may not be let near these."""
    state, old = torchvision.models.get_model(ARCH).state_dict(), {"_use_new_zipfile_serialization": False}
    evil = {**state, "x": Evil(trap.canary)}
    content = {
        "zip": saved(evil),
        "old format in a zip": zipped("weights.pth", saved(evil, **old)),
        "weights in front of a zip": saved(state, **old) + zipped("weights.pth", saved(evil, **old)),
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
    torch.hub.load_state_dict_from_url(
        "https://127.0.0.1:9/" + path.name, check_hash=True, progress=False, weights_only=False
    )
    assert trap.fired()  # or the trap above was none


def test_a_batch_of_cifar_with_code_in_it_is_never_unpickled(trap: Trap, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the file with the published MD5 is unpickled, and nobody can make another pickle with that sum."""
    content = b"cbuiltins\neval\n(V__import__('os').mkdir('" + str(trap.canary).encode() + b"')\ntR."
    source = trap.work / "source" / "cifar-10-batches-py"
    source.mkdir(parents=True)
    theirs = torchvision.datasets.CIFAR10
    for batch_name, _ in (*theirs.train_list, *theirs.test_list, (theirs.meta["filename"], "")):
        (source / batch_name).write_bytes(content)
    assert prepare.main(["cifar10", f"data_dir={trap.work / 'data'}", f"source={source.parent}"]) == 2
    err = capsys.readouterr().err
    assert "cifar-10-batches-py is incomplete or damaged" in err
    assert err.count("\n") == 1
    assert not trap.fired()
    pickle.loads(content)
    assert trap.fired()  # or the trap above was none


@pytest.mark.parametrize("plant", ["a link to somebody else's folder", "a folder that others may write"])
def test_job_files_are_not_put_where_others_can_change_them(
    plant: str, at_work: Trap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """submitit's job files are pickles that the job loads: whoever can change them runs code as the job's owner."""
    at_work.stub("sbatch", 'echo Submitted batch job 7; touch "$CANARY"')
    root, folder = at_work.folder / "root", at_work.folder / "root" / "runs" / "submitit"
    folder.parent.mkdir(parents=True)
    if "link" in plant:
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        theirs = at_work.folder / "theirs"
        theirs.mkdir()
        os.chown(theirs, 65534, 65534)
        folder.symlink_to(theirs)
    else:
        folder.mkdir()
        folder.chmod(0o702)
    monkeypatch.setattr(cli, "ROOT", root)
    monkeypatch.setattr(controller, "expected_start", lambda job, text: "to start at once")
    assert launch.main([f"recipe={RECIPE}", "dataset=fake", "device=cpu"]) == 3
    assert ("use a clone of your own" if "link" in plant else "chmod 700") in capsys.readouterr().err
    assert not at_work.fired()
    assert list(folder.iterdir()) == []


# --- links that lie in wait


def test_a_link_at_a_temporary_files_name_is_not_followed(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name cannot be guessed; here it is known, and a link to somebody's file lies there."""
    monkeypatch.setattr(secrets, "token_hex", lambda count=None: "0" * 8)
    victim, target = trap.work / "victim", trap.work / "status.json"
    victim.write_text("mine")
    name = f".status.json.{os.uname().nodename}.{os.getpid()}.00000000"
    (trap.work / name).symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_json(target, {"a": 1})
    assert victim.read_text() == "mine"
    assert not target.exists()
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
        monkeypatch.setattr(cli, "ROOT", root)
        monkeypatch.setattr(controller, "expected_start", lambda job, text: "to start at once")
        assert launch.main([f"recipe={RECIPE}", "dataset=fake", "device=cpu"]) == 0
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
        files.locked(trap.work / "prepare.lock"),
    ):
        pass
    assert not trap.fired()


# --- secrets

NAMES = ("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD", "MY_PASS", "SITE_SECRET")
SECRETS = {name: secrets.token_hex(16) for name in NAMES}
PLACE = secrets.token_hex(16)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
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
def test_a_run_logs_no_secret(finished_run: tuple[Path, str]) -> None:
    run_dir, said = finished_run
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {
        "config.yaml", "status.json", "summary.json", "metrics.jsonl", "opened.json", "begun.json", "rank0.log", "rank1.log",
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
def test_a_run_in_a_folder_of_any_name_runs_nothing(finished_run: tuple[Path, str]) -> None:
    run_dir, _ = finished_run
    assert helpers.read(run_dir, "status")["state"] == "done"
    assert not list(run_dir.parent.rglob("canary*"))
    assert not (ROOT / "canary").exists()


@pytest.mark.long
def test_only_the_owner_can_read_a_runs_files(finished_run: tuple[Path, str]) -> None:
    for path in (finished_run[0], *finished_run[0].rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path

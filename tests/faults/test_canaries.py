"""Attempts to run code, write files or show secrets: each would leave a canary file, and none
does.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import launch
from recipes.core import files
from recipes.core.errors import InputError
from recipes.core.train import checkpoint
from tests import helpers
from tests.helpers import ROOT

# What a shell would run if a value were pasted into a script; one for each way out of a word,
# quotes or a line. {c}: the path of the canary. The last ones are ends of a line for some readers
# of scripts and logs, but not for a shell.
PAYLOADS = (
    "a\ntouch {c}",
    "a\n#SBATCH --wrap=x\ntouch {c}",
    "a; touch {c} #",
    "a$(touch {c})",
    "a`touch {c}`",
    "${{x:=$(touch {c})}}",
    '"; touch {c}; "',
    "'; touch {c}; '",
    "a\\\n;touch {c}",
    "a\rtouch {c}",
    "a\u2028touch {c}",
)

# torch warns of odd pickles
pytestmark = [
    pytest.mark.fault(34, 35, 37, 38),
    pytest.mark.filterwarnings("ignore"),
]


class Trap:
    """A folder in which a script of launch.py runs; srun and module are stubs that note how they
    are called.
    """

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys
        self.canary = folder / "canary"
        (folder / "recipes").symlink_to(ROOT / "recipes")  # what a batch script looks for
        (folder / "bin").mkdir()
        for name in ("srun", "python"):
            (folder / "bin" / name).write_text(
                f'#!/bin/sh\nprintf "%s\\0" "$@" > "{folder}/{name}-was-called"\n'
            )
            (folder / "bin" / name).chmod(0o755)

    def attempt(self, *words: str) -> bool:
        """Whether launch.py makes a script of these words, which bash then runs. Nothing else may
        happen.
        """
        status = launch.main(["recipe=mnist", "launcher=print", *words])
        out, err = self.capsys.readouterr()
        if status == 0:
            (self.folder / "job.sh").write_text(out)
            module = f'() {{ echo "$*" >> {shlex.quote(str(self.folder))}/modules; }}'
            environ = {
                "PATH": f"{self.folder}/bin:/usr/bin:/bin",
                "VIRTUAL_ENV": str(self.folder),
                "HOME": str(self.folder),
            }
            environ |= {"LC_ALL": "C.UTF-8", "SLURM_JOB_ID": "7", "BASH_FUNC_module%%": module}
            subprocess.run(
                ["bash", "job.sh"], cwd=self.folder, env=environ, timeout=60, capture_output=True
            )
            assert (self.folder / "srun-was-called").exists()
        else:
            assert status == 2
            assert out == ""
            assert err[:-1].isprintable(), ascii(err)
        assert not self.canary.exists(), words
        return status == 0


@pytest.fixture
def trap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Trap:
    for name in [
        name for name in os.environ if name.startswith(("SLURM_", "SRUN_", "SBATCH_", "RECIPES_"))
    ]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return Trap(tmp_path, capsys)


TEXTS = (
    "gpus",
    "master",
    "time",
    "partition",
    "account",
    "qos",
    "constraint",
    "exclude",
    "reservation",
    "name",
    "cluster",
    "dependency",
    "mail",
    "extra",
    "gpu_type",
    "container_mounts",
)


def test_a_job_keys_value_runs_nothing(trap: Trap) -> None:
    """On the command line and in a file of keys."""
    for number, key in enumerate(TEXTS):
        for payload in PAYLOADS if key == "account" else PAYLOADS[number % 4 :: 4]:
            text = payload.format(c=trap.canary)
            assert not trap.attempt(f"{key}={text}")
        (trap.folder / "keys.yaml").write_text(f"{key}: {json.dumps(text)}\n")
        assert not trap.attempt("config=keys.yaml")
    for text in (f"$(touch$IFS{trap.canary})", f"a;touch$IFS{trap.canary}"):
        assert trap.attempt(f"extra=--comment={text}"), text  # quoted


def test_values_of_a_sites_profile_run_nothing(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    here = trap.folder / "env/clusters/here.yaml"
    here.parent.mkdir(parents=True)
    shutil.copytree(ROOT / "sbatch", trap.folder / "sbatch")
    for path in (ROOT / "env").glob("*.env"):
        shutil.copy(path, trap.folder / "env")
    helpers.use_root(monkeypatch, trap.folder)
    for key in (
        "partition",
        "gpus_per_node",
        "network",
        "modules",
        "env_files",
        "environment",
        "container",
    ):
        for payload in PAYLOADS[::3]:
            text = json.dumps(payload.format(c=trap.canary))
            here.write_text(
                f"{key}:\n  - {text}\n" if key in ("modules", "env_files") else f"{key}: {text}\n"
            )
            assert not trap.attempt("cluster=here")
    here.write_text("modules:\n  - gcc/12\n")
    assert trap.attempt("cluster=here")
    assert (trap.folder / "modules").read_text() == "load gcc/12\n"


class Evil:
    """A pickle that makes a folder when it is loaded without care."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.canary),)


class EvilState(Evil):
    """The call is in what an allowed type is filled with."""

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (), None, None, iter([("a", Evil(self.canary))])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The content of a valid checkpoint."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    meta = {"recipe": "mnist", "config": {"seed": 1}}
    ema = AveragedModel(nn.Linear(2, 2))
    state = checkpoint.State(model, optimizer, scheduler, ema, step=1, meta=meta)
    content = checkpoint.content_of(
        state, {"samples": 3}, [checkpoint.rng_state(torch.device("cpu"))]
    )
    path = tmp_path_factory.mktemp("good") / "saved.pt"
    torch.save(content, path)
    # or what follows is refused for another reason
    assert checkpoint.read(path)["meta"] == content["meta"]
    return content


def test_a_checkpoint_with_code_in_it_is_refused(good: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "step-00000001.pt"
    canary = tmp_path / "canary"
    for evil in (EvilState(canary), Evil(canary)):
        content = {**good, "rng": [*good["rng"], evil]}
        for is_zip, why in ((False, "BadZipFile"), (True, "UnpicklingError")):
            torch.save(content, path, _use_new_zipfile_serialization=is_zip)
            line = rf"step-00000001\.pt: is damaged or not a checkpoint \({why}\)$"
            with pytest.raises(InputError, match=line):
                checkpoint.read(path)
            assert not canary.exists()
    torch.load(path, weights_only=False)
    assert canary.exists()  # or the trap above was none


def test_a_checkpoint_that_would_unpack_to_much_more_is_refused(
    good: dict[str, Any], tmp_path: Path
) -> None:
    """torch.save packs nothing, and torch.load unpacks what it is given: 1 MB can become 1 GB."""
    plain = io.BytesIO()
    path = tmp_path / "step-00000001.pt"
    torch.save({**good, "model": {"w": torch.zeros(5_000_000)}}, plain)
    with (
        zipfile.ZipFile(plain) as archive,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in archive.namelist():
            small.writestr(name, archive.read(name))
        for part in small.infolist():
            part.external_attr = 0  # as torch.save writes it
    assert path.stat().st_size < 1_000_000
    line = r"step-00000001\.pt: is damaged or not a checkpoint \(BadZipFile\)"
    with pytest.raises(InputError, match=line):
        checkpoint.read(path)


def test_links_at_the_names_of_a_temporary_file_and_a_lock_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary name cannot be guessed; here it is known, and a link to another file lies
    there.
    """
    monkeypatch.setattr(secrets, "token_hex", lambda count=None: "0" * 8)
    (tmp_path / "victim").write_text("mine")
    name = f".status.json.{os.uname().nodename}.{os.getpid()}.00000000"
    (tmp_path / name).symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        files.write_json(tmp_path / "status.json", {"a": 1})
    assert (tmp_path / "victim").read_text() == "mine"
    (tmp_path / "prepare.lock").symlink_to(tmp_path / "canary")
    with pytest.raises(OSError, match="symbolic link"), files.locked(tmp_path / "prepare.lock"):
        pass
    assert not (tmp_path / "canary").exists()


NAMES = (
    "AWS_SECRET_ACCESS_KEY",
    "WANDB_API_KEY",
    "HF_TOKEN",
    "DB_PASSWORD",
    "MY_PASS",
    "SITE_SECRET",
    "T_PLACE",
)
SECRETS = {name: secrets.token_hex(16) for name in NAMES}


def test_a_run_in_a_folder_of_any_name_runs_nothing_and_logs_no_secret(tmp_path: Path) -> None:
    run_dir = tmp_path / 'it\'s "a" $(touch canary) `touch canary`; touch canary & -x é ü 中 #'
    words = [
        "-m",
        "recipes.mnist",
        "device=cpu",
        "dataset=digits",
        "max_steps=2",
        "data_dir=/nosuch/${oc.env:T_PLACE}",
    ]
    ended = helpers.run_fork(
        [sys.executable, *words, f"run_dir={run_dir}"], environ=helpers.clean_environment(**SECRETS)
    ).expect(0)
    assert helpers.read(run_dir, "status")["state"] == "done"
    assert not list(tmp_path.rglob("canary*"))
    assert "data_dir: /nosuch/${oc.env:T_PLACE}" in (run_dir / "config.yaml").read_text()
    contents = {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for path in run_dir.glob("checkpoints/*.pt"):
        with zipfile.ZipFile(path) as parts:
            contents |= {f"{path}/{name}": parts.read(name) for name in parts.namelist()}
    assert any(b"data_dir" in content and ".pt/" in name for name, content in contents.items())
    for secret in SECRETS.values():
        assert secret not in ended.out
        assert [name for name, content in contents.items() if secret.encode() in content] == []
    for path in (run_dir, *run_dir.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path  # only the owner can read it

"""Nothing is written through what another user has made."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from recipes import export, predict, prepare, report, script
from recipes.core import errors, files, trust
from recipes.core.data import pillow, text
from recipes.core.doctor.reports import Reports, Stage
from recipes.core.errors import InputError, MachineError
from recipes.core.launch import examination, jobs, run_commands
from recipes.core.run import attempt as attempts
from recipes.core.run import (
    command_line,
    directory,
    logs,
    trackers,
)
from recipes.core.train import causal, resume, session, trained
from tests import helpers
from tests.unit.other_users.common import FAILED, STRANGER, as_root, set_list, umask

ANY: Any = None
NEW = trackers.New(Path(), "", "", "7", True, {}, [], {})


@as_root
@pytest.mark.parametrize("name", ["", "attempts", "logs"])
def test_a_run_directory_that_another_user_has_made_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run" / name
    folder.mkdir(parents=True)
    os.chown(folder, STRANGER, STRANGER)
    refused = pytest.raises(MachineError, match=r"belongs to another user; .*give another run_dir=")
    if name == "logs":
        with refused:
            trust.own_folder(folder)
    else:
        with refused:
            attempts.open_next(tmp_path / "run", "toy", {})


@as_root
def test_a_run_directory_that_a_group_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, -1, STRANGER)
    tmp_path.chmod(0o2775)
    with pytest.raises(MachineError, match=r"run_dir: .*: its group can write to it \(run chmod"):
        attempts.open_next(tmp_path, "toy", {})
    trust.own_folder(tmp_path, "data_dir")
    monkeypatch.setenv("RECIPES_TRUST_GROUP", "1")
    attempts.open_next(tmp_path, "toy", {})


@as_root
@pytest.mark.parametrize("name", ["model", "attempts/0000", "checkpoints/best", "doctor/reports"])
def test_a_link_from_when_others_could_write_to_a_run_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run_dir = tmp_path / "run"
    link = run_dir / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    problem = f"run_dir: {link} belongs to another user; remove it \\(rm -r {link}\\), or give"
    with pytest.raises(MachineError, match=problem):
        trust.own_folder(link.parent)
    trust.own_folder(link.parent, is_listed=False)
    trust.own_folder(link.parent, "data_dir")
    # with a group that may write, its members may have files there, and nobody else
    os.chown(link.parent, -1, pwd.getpwuid(STRANGER).pw_gid)
    link.parent.chmod(0o2775)
    monkeypatch.setenv("RECIPES_TRUST_GROUP", "1")
    trust.own_folder(link.parent)
    os.chown(link.parent, -1, 1)
    with pytest.raises(MachineError, match=problem):
        trust.own_folder(link.parent)


@as_root
@pytest.mark.parametrize(
    "opens",
    [
        lambda run_dir: attempts.open_next(run_dir, "toy", {}),
        lambda run_dir: jobs.record(run_dir, b"", "7", "toy", []),
        lambda run_dir: export.main([str(run_dir), "hf"]),
        lambda run_dir: export.main([str(run_dir), "to=tensorboard"]),
        lambda run_dir: run_commands.to_resume(replace(FAILED, folder=str(run_dir)), []),
    ],
)
def test_what_opens_a_run_directory_refuses_a_planted_file(
    tmp_path: Path, opens: Callable[[Path], object]
) -> None:
    jobs.record(tmp_path / "run", b"", "7", "toy", [])
    planted = tmp_path / "run/config.yaml"
    planted.write_text("lr: 9\n")
    os.chown(planted, STRANGER, STRANGER)
    with pytest.raises(MachineError, match=r"config\.yaml belongs to another user; remove it"):
        opens(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("attempts", lambda run_dir: attempts.open_next(run_dir, "toy", {})),
        ("checkpoints/.0", lambda run_dir: attempts.begin(attempts.Attempt(run_dir, 0), 0, False)),
        ("evaluation", lambda run_dir: attempts.open_next(run_dir / "evaluation", "toy", {})),
        ("logs", lambda run_dir: script._copied_to(run_dir / "logs/rank0.log")),
        ("doctor", lambda run_dir: examination.examine_nodes(ANY, run_dir / "doctor", (), {})),
        (
            "doctor/reports",
            lambda run_dir: Reports(run_dir / "doctor/reports", 0).write({}, Stage.final),
        ),
        ("tensorboard", lambda run_dir: trackers._tensorboard(replace(NEW, folder=run_dir))),
    ],
)
def test_nothing_is_written_through_a_link_in_a_copied_run(
    tmp_path: Path, name: str, write: Callable[[Path], object]
) -> None:
    """`cp -r` of a colleague's run makes the links in it this user's own."""
    (tmp_path / "mine/reports").mkdir(parents=True)
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "mine")
    problem = f"run_dir: {link} is a link to {tmp_path}/mine; remove this link, or give another"
    with pytest.raises(MachineError, match=problem):
        write(tmp_path / "run")
    assert os.listdir(tmp_path / "mine") == ["reports"]


@pytest.mark.parametrize("name", ["model", "model/config.json"])
def test_the_files_of_a_model_replace_links_in_a_copied_run(tmp_path: Path, name: str) -> None:
    class Part:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "config.json").write_text("new")

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text("mine")
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "mine" / link.relative_to(tmp_path / "run/model"))
    net = SimpleNamespace(config=Part(), generation_config=Part())
    for _ in range(2):
        causal.keep(tmp_path / "run", net, Part())
        assert os.listdir(tmp_path / "run") == ["model"]
        assert not link.is_symlink()
        assert (tmp_path / "run/model/config.json").read_text() == "new"
    assert (tmp_path / "mine/config.json").read_text() == "mine"


def test_a_run_whose_files_everybody_can_write_to_is_refused(tmp_path: Path) -> None:
    """`cp -a` keeps their mode."""
    (tmp_path / "checkpoint").touch()
    (tmp_path / "link").symlink_to("checkpoint")  # links have mode 777
    trust.own_folder(tmp_path)
    (tmp_path / "checkpoint").chmod(0o666)
    with pytest.raises(MachineError, match=r"write to .*/checkpoint; run (chmod -R o-w .*)$") as no:
        trust.own_folder(tmp_path)
    subprocess.run(shlex.split(str(no.value).partition("; run ")[2]), check=True)
    trust.own_folder(tmp_path)


def test_data_are_not_written_through_a_link_in_a_copied_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/text").symlink_to(tmp_path / "mine")
    (tmp_path / "source.txt").write_text("a text")
    words = ["text", f"data_dir={tmp_path}/data", f"source={tmp_path}/source.txt"]
    assert prepare.main(words) == errors.EXIT_MACHINE
    assert not os.listdir(tmp_path / "mine")


@as_root
def test_metrics_are_not_exported_into_a_folder_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "run/attempts").mkdir(parents=True)
    (tmp_path / "run/summary.json").symlink_to(tmp_path / "secret.json")
    os.chown(tmp_path / "run", STRANGER, STRANGER)
    with pytest.raises(MachineError, match="belongs to another user"):
        export.main([str(tmp_path / "run"), "to=tensorboard"])
    assert sorted(os.listdir(tmp_path / "run")) == ["attempts", "summary.json"]


def test_predictions_are_not_written_through_a_planted_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".bashrc").write_text("mine")
    (tmp_path / "out.csv").symlink_to(tmp_path / ".bashrc")
    model = SimpleNamespace(classes=["a"], path="x")
    monkeypatch.setattr(trained, "load", lambda run, device: model)
    (tmp_path / "a.png").touch()
    monkeypatch.setattr(predict, "answers", lambda model, paths, faults: [(paths[0], [1.0])])
    predict.main(["run", str(tmp_path / "a.png"), "--csv", str(tmp_path / "out.csv")])
    assert (tmp_path / ".bashrc").read_text() == "mine"
    assert (tmp_path / "out.csv").read_text().splitlines()[0] == "file,class,a"
    end, pipe = os.pipe()  # as with --csv /dev/stdout
    predict.main(["run", str(tmp_path / "a.png"), "--csv", f"/dev/fd/{pipe}"])
    assert os.read(end, 100).startswith(b"file,class,a")


@as_root
@pytest.mark.parametrize("kind", ["html", "csv", "safetensors"])
def test_a_typed_file_is_not_written_through_a_folder_link_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    attempts.open_next(tmp_path / "run", "toy", {})
    (tmp_path / "mine").mkdir()
    link = tmp_path / "shared"
    link.symlink_to(tmp_path / "mine")
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    out = f"{link}/out.{kind}"
    monkeypatch.setattr(trained, "load", lambda *_: SimpleNamespace(classes=["a"], path="x"))
    monkeypatch.setattr(export, "to_safetensors", lambda model: b"")
    run = str(tmp_path / "run")
    write, words = {
        "html": (report.main, [run, f"html={out}"]),
        "csv": (predict.main, [run, str(tmp_path / "a.png"), "--csv", out]),
        "safetensors": (export.main, [run, kind, f"out={out}"]),
    }[kind]
    with pytest.raises(MachineError, match="shared: is a link of another user"):
        write(words)
    assert not [*(tmp_path / "mine").iterdir()]


def test_a_log_is_not_written_through_a_planted_link(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").symlink_to(tmp_path / "authorized_keys")
    with (
        pytest.raises(MachineError, match=r"rank0\.log cannot be written"),
        logs.copied_to(tmp_path / "rank0.log"),
    ):
        pass
    assert not (tmp_path / "authorized_keys").exists()


@as_root
def test_a_log_of_another_user_is_not_written(tmp_path: Path) -> None:
    """From when others could write to logs/. Its owner could read what the program prints."""
    log = tmp_path / "rank0.log"
    log.touch()
    os.chown(log, STRANGER, STRANGER)
    with (
        pytest.raises(MachineError, match=f"{log}: belongs to another user; remove it"),
        logs.copied_to(log),
    ):
        pass
    settings = SimpleNamespace(run=SimpleNamespace(run_dir=str(tmp_path)), recipe="toy")
    ranks = SimpleNamespace(rank=0, run_id=None, num_nodes=1, in_slurm=False)
    start: Any = SimpleNamespace(settings=settings, ranks=ranks)
    sent = [str(tmp_path), False, 0, False]
    world: Any = SimpleNamespace(rank=0, from_rank_0=lambda purpose, work: sent)
    (tmp_path / "logs").mkdir()
    log.rename(tmp_path / "logs/rank0.log")
    with pytest.raises(MachineError, match=r"rank0\.log: belongs to another user"):
        session.open_run_dir(start, world)


@pytest.mark.parametrize("name", ["../../home/me/.ssh", "/etc/cron.d", "..", "a-run-of-mine"])
def test_what_rank_0_sends_names_no_folder(tmp_path: Path, name: str) -> None:
    """With run_dir= each rank knows its run directory."""
    settings = SimpleNamespace(run=SimpleNamespace(run_dir=f"{tmp_path}/run"), recipe="toy")
    ranks = SimpleNamespace(rank=1, run_id=None, num_nodes=1, in_slurm=False)
    start: Any = SimpleNamespace(settings=settings, ranks=ranks)
    sent = [name, False, 3, False]
    world: Any = SimpleNamespace(rank=1, from_rank_0=lambda purpose, work: sent)
    attempt, _ = session.open_run_dir(start, world)
    assert attempt.folder == tmp_path / "run/attempts/0003"
    settings.run.run_dir = ""
    for sent[0] in (name, str(files.ROOT / "runs/toy" / name)):
        problem = r"^run_dir=.* here, run_dir=.* on rank 0: give the same"
        with pytest.raises(InputError, match=problem):
            session.open_run_dir(start, world)


@pytest.mark.parametrize("name", ["../x.pt", "/x/step-00000001.pt", "config.yaml"])
def test_what_rank_0_sends_names_no_file(tmp_path: Path, name: str) -> None:
    settings = SimpleNamespace(run=SimpleNamespace(resume=f"{tmp_path}/mine.pt"))
    checkpoints = tmp_path / "run/checkpoints"
    context: Any = SimpleNamespace(settings=settings, folder=checkpoints)
    assert resume.at(context, 0, "step-00000001.pt") == checkpoints / "step-00000001.pt"
    assert resume.at(context, 3, "mine.pt") == tmp_path / "mine.pt"
    with pytest.raises(InputError, match="which is not a checkpoint"):
        resume.at(context, 0, name)


@as_root
def test_a_link_of_another_user_does_not_lead_a_run_elsewhere(tmp_path: Path) -> None:
    for place in (tmp_path / "mine", tmp_path / "theirs"):
        place.symlink_to(tmp_path / "target")
    os.chown(tmp_path / "theirs", STRANGER, STRANGER, follow_symlinks=False)
    chosen = directory.choose(str(tmp_path / "mine/run"), "toy", None, tmp_path)
    assert chosen == tmp_path / "target/run"
    for path in ("theirs", "theirs/run"):
        with pytest.raises(MachineError, match=r"theirs: is a link of another user"):
            directory.choose(str(tmp_path / path), "toy", None, tmp_path)
    second = f"{tmp_path}/second"
    Path(second).symlink_to("theirs")
    with pytest.raises(MachineError, match="is a link of another user"):
        command_line.parse([f"run_dir={second}"], recipe="toy")


def test_a_new_run_directory_follows_the_umask_and_not_the_list_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_list(tmp_path, 7, 7, 7, 0, kind="default")
    with monkeypatch.context() as before_removal, umask(0o077):
        before_removal.setattr(trust, "_remove_lists", lambda folder: None)
        trust.own_folder(tmp_path / "at first", "data_dir")
    assert (tmp_path / "at first").stat().st_mode & 0o777 == 0o700  # also the most of the list
    with umask(0o077):
        trust.own_folder(tmp_path / "run")
        (tmp_path / "run/file").touch()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "run/file").stat().st_mode & 0o777 == 0o600
    assert os.listxattr(tmp_path / "run") == []


def test_a_run_directory_whose_new_files_get_an_access_control_list_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_list(tmp_path, 7, 7, 5, 5, kind="default")
    tmp_path.chmod(0o755)
    trust.own_folder(tmp_path, "data_dir")
    monkeypatch.setenv("RECIPES_TRUST_GROUP", "1")  # of a group, not of the users in a list
    with pytest.raises(MachineError, match=r"its access control list .* \(run setfacl -R -b on it"):
        trust.own_folder(tmp_path)
    os.removexattr(tmp_path, "system.posix_acl_default")  # as setfacl -b does
    trust.own_folder(tmp_path)


@pytest.mark.parametrize("kind", ["a link", "a folder"])
def test_the_mode_of_a_private_folder_is_kept_if_it_replaces_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    set_list(tmp_path, 7, 7, 7, 0, kind="default")
    private = tmp_path / "private"
    private.mkdir()
    private.chmod(0o700)
    (private / "file").touch()
    lists = os.listxattr(private)
    remove_lists = trust._remove_lists

    def exchange(folder: Path) -> None:
        folder.rename(tmp_path / "aside")
        if kind == "a link":
            folder.symlink_to(private)
        else:
            private.rename(folder)
        remove_lists(folder)

    monkeypatch.setattr(trust, "_remove_lists", exchange)
    with contextlib.suppress(MachineError):
        trust.own_folder(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert os.listxattr(tmp_path / "run") == lists


@as_root
def test_the_doctor_writes_no_verdict_into_a_folder_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", STRANGER, STRANGER)
    words = ["-m", "recipes.doctor", "device=cpu", f"run_dir={tmp_path}/run"]
    assert "belongs to another user" in helpers.run([sys.executable, *words]).expect(3).out


def test_a_submission_makes_no_folder_with_an_inherited_list(tmp_path: Path) -> None:
    set_list(tmp_path, 7, 7, 7, 0, kind="default")
    with umask(0o077):
        jobs.record(tmp_path / "me/run", b"", "7", "toy", [])
    for name in ("me", "me/run"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
        assert os.listxattr(tmp_path / name) == []


@as_root
def test_data_are_not_written_through_a_link_of_another_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "index.json").write_text("{}")
    (tmp_path / "data").mkdir()
    link = tmp_path / "data/cifar10"
    link.symlink_to(mine)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    for split in ("train", "test"):
        (tmp_path / "source" / split / "a").mkdir(parents=True)
    words = ["cifar10", f"data_dir={tmp_path}/data", f"source={tmp_path}/source"]
    assert prepare.main(words) == errors.EXIT_MACHINE
    assert "cifar10: is a link of another user; give the folder itself" in capsys.readouterr().err
    assert (mine / "index.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["text", "cifar10", "imagenet"])
def test_data_are_written_into_the_folder_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In a project folder, others can put a link in its place while they are written."""
    mine = tmp_path / "mine"
    aside = tmp_path / "aside"
    mine.mkdir()
    (mine / "precious.bin").touch()
    for split in ("train", "val", "test"):
        (tmp_path / "source" / split / "a").mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "source" / split / "a/1.png")
    (tmp_path / "source/a.txt").write_text("a text")
    checked = trust._require_place

    def exchange(descriptor: int, path: Path) -> None:
        checked(descriptor, path)
        if path.is_dir():
            os.rename(path, aside)
            os.symlink(mine, path)

    monkeypatch.setattr(trust, "_require_place", exchange)
    words = [name, f"data_dir={tmp_path}/data", f"source={tmp_path}/source", "workers=1"]
    prepare.main(words[: 3 if name == "cifar10" else 4])
    assert os.listdir(mine) == ["precious.bin"]
    assert (aside / "index.json").exists()


@as_root
def test_a_data_folder_that_another_user_puts_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = trust.own_folder

    def exchange(folder: Path, *others: Any) -> None:
        checked(folder, *others)
        os.rename(folder, tmp_path / "aside")
        folder.mkdir()
        os.chown(folder, STRANGER, STRANGER)

    monkeypatch.setattr(trust, "own_folder", exchange)
    problem = "data: was replaced by a folder of another user"
    with pytest.raises(MachineError, match=problem), trust.data_folder(tmp_path / "data"):
        pass


def test_mnist_is_not_written_through_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of a data folder of another user has links of this user."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/MNIST").symlink_to(tmp_path / "mine")
    assert prepare.main(["mnist", f"data_dir={tmp_path}/data"]) == errors.EXIT_MACHINE
    assert "MNIST is a link to" in capsys.readouterr().err
    assert not os.listdir(tmp_path / "mine")


@pytest.mark.parametrize("name", ["text", "imagenet"])
def test_a_typed_folder_may_be_a_link_of_this_user(tmp_path: Path, name: str) -> None:
    for split in ("train", "val"):
        (tmp_path / "source" / split / "a").mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "source" / split / "a/1.png")
    (tmp_path / "source/a.txt").write_text("a text")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    words = [name, f"data_dir={tmp_path}/link", f"source={tmp_path}/source", "workers=1"]
    assert prepare.main(words) == errors.EXIT_DONE
    chosen = directory.choose(str(tmp_path / "link"), "toy", None, tmp_path)
    assert attempts.open_next(chosen, "toy", {}).run_dir == tmp_path / "disk"


@as_root
def test_a_folder_for_data_is_not_behind_a_link_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "mine/text").mkdir(parents=True)
    link = tmp_path / "data"
    link.symlink_to(tmp_path / "mine")
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(MachineError, match="data: is a link of another user"):
        trust.own_folder(link / "text", "data_dir")


@as_root
def test_copied_data_has_no_file_behind_a_link_of_another_user(tmp_path: Path) -> None:
    """Else `recipes.prepare` copies a file that only this user can read into a shared folder."""
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    source = tmp_path / "source"
    (source / "own").mkdir(parents=True)
    (source / "own/a.txt").write_text("a text")
    (source / "file.txt").symlink_to(secret)
    (source / "folder").symlink_to(tmp_path)
    (source / "to_own.txt").symlink_to("own/a.txt")
    # the kernel follows a link before the dots behind it
    (source / "own/deeper").mkdir()
    (source / "own/hop.txt").symlink_to(secret)
    (source / "hop.txt").write_text("a text")
    (source / "deeper").symlink_to("own/deeper")
    (source / "dots.txt").symlink_to("deeper/../hop.txt")
    (source / "dots_to_own.txt").symlink_to("deeper/../a.txt")
    for path in (source, *source.rglob("*")):
        os.lchown(path, STRANGER, STRANGER)

    for name in ("file.txt", "folder/secret.txt", "dots.txt"):
        with pytest.raises(MachineError, match="is a link of another user"):
            list(text._documents(source / name))
        with pytest.raises(MachineError, match="is a link of another user"):
            pillow.read_file(source / name, trust.without_links_of_others)
    for name in ("to_own.txt", "dots_to_own.txt"):
        assert list(text._documents(source / name)) == ["a text"]


@as_root
def test_a_model_is_not_written_into_a_run_of_another_user(tmp_path: Path) -> None:
    """Its owner could replace it by a link to a run of this user while the model is loaded."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    os.chown(tmp_path / "run", STRANGER, STRANGER)
    os.lchown(tmp_path / "link", STRANGER, STRANGER)
    with pytest.raises(MachineError, match="run belongs to another user; give another out="):
        export.main([str(tmp_path / "run"), "safetensors"])
    with pytest.raises(MachineError, match="link: is a link of another user"):
        export.main([str(tmp_path / "link"), "safetensors"])

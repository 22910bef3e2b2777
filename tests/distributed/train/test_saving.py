"""Checkpoints written in the background: their content, which are kept, and the errors if they
cannot be written.
"""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from recipes.core.errors import DiskFull, InputError, MachineError
from recipes.core.train import checkpoint, metrics, saving
from recipes.core.train.checkpoint import Saver
from recipes.core.train.host_copy import HostCopy
from recipes.core.train.optimizers import MuonAdamW

CPU = torch.device("cpu")


def content(step: int = 1, value: float = 0.0) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "optimizer": {},
        "scheduler": {},
        "ema": None,
        "sampler": {},
        "rng": [],
    }
    return {
        "model": {"weight": torch.full((1000,), value)},
        **parts,
        "meta": {"step": step, "config": {}},
    }


def make_saver(folder: Path, keep: int = 3, keep_every_steps: int = 0) -> Saver:
    return Saver(folder, folder, lambda path, step: None, keep, keep_every_steps)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_changes_after_the_call_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those of the next save, which uses the same copy in memory: it waits."""
    held = threading.Event()
    entered = threading.Event()
    archive = torch.save

    def hold(content: Mapping[str, Any], file: IO[bytes]) -> None:
        entered.set()
        assert held.wait(20)
        archive(content, file)

    monkeypatch.setattr(torch, "save", hold)
    saver = make_saver(tmp_path)
    now = content(step=4, value=1.0)
    saver.save(now)
    assert entered.wait(20)
    now["model"]["weight"].fill_(2.0)  # the next step
    now["meta"]["step"] = 5
    second = threading.Thread(target=saver.save, args=(now,))
    second.start()
    second.join(0.2)
    # it is being written, and has no name yet
    assert names(tmp_path)[0].startswith(".step-00000004.pt.")
    held.set()
    second.join(20)
    saver.wait()
    assert names(tmp_path) == ["latest", "step-00000004.pt", "step-00000005.pt"]
    for step, value in ((4, 1.0), (5, 2.0)):
        saved = checkpoint.read(tmp_path / f"step-{step:08d}.pt")
        assert torch.equal(saved["model"]["weight"], torch.full((1000,), value))


def test_a_failed_write_is_raised_in_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saver = make_saver(folder)
    monkeypatch.setattr(torch, "save", full)
    saver.save(content())
    words = (
        rf"^run_dir='{tmp_path}/run': cannot be written \(No space left on device\): free some "
        r"space there, or "
    )
    with pytest.raises(MachineError, match=words):
        saver.wait()
    saver.check()  # told once
    assert names(folder) == []


@pytest.mark.parametrize("is_suspended", [True, False])
def test_the_wait_for_rows_of_other_ranks_does_not_count_a_suspension(
    monkeypatch: pytest.MonkeyPatch, is_suspended: bool
) -> None:
    """Two polls of ten minutes each."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 600.0

    running = (lambda: 0.0) if is_suspended else (lambda: now)
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    written = iter([False, False, True])
    world = SimpleNamespace(
        clock=SimpleNamespace(now=running),
        hosts=("a", "b"),
        store=SimpleNamespace(check=lambda names: next(written)),
    )
    settings = SimpleNamespace(run=SimpleNamespace(timeout_s=500.0))
    checkpoints: Any = SimpleNamespace(settings=settings, world=world)
    names = ["step-00000007.0a-1of2.rows"]
    if is_suspended:
        saving.Checkpoints._await_rows(checkpoints, names)
        return
    line = rf"^rank 1 on b has not written its part of a checkpoint, {names[0]}, within 500 s"
    with pytest.raises(MachineError, match=line):
        saving.Checkpoints._await_rows(checkpoints, names)


def test_free_space_is_checked_before_the_state_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=3999)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    line = r"cannot be written \(No space left on device; 4\.0 kB needed, 4\.0 kB free"
    with pytest.raises(MachineError, match=line):
        make_saver(tmp_path).save(content())
    assert names(tmp_path) == []
    # As some network file systems say.
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(total=0, free=0))
    saver = make_saver(tmp_path)
    saver.save(content())
    saver.wait()
    assert names(tmp_path) == ["latest", "step-00000001.pt"]


def test_a_metrics_row_on_a_full_disk_is_reported_in_one_line(tmp_path: Path) -> None:
    """Rows are written far more often than checkpoints, so they detect a full disk first."""
    rows = metrics.Rows(tmp_path / "metrics.jsonl")
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), rows._file.fileno())
    words = (
        rf"^run_dir='{tmp_path}': cannot be written \(No space left on device.*\): free some "
        r"space there, or "
    )
    with pytest.raises(DiskFull, match=words):
        rows.add({"step": 1})
    rows.close()


def test_rows_are_not_written_through_a_planted_link(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "keys")
    line = r"^run_dir='.*': cannot be written \(Too many levels of symbolic links\)"
    with pytest.raises(MachineError, match=line):
        metrics.Rows(tmp_path / "metrics.jsonl")
    assert not (tmp_path / "keys").exists()


def test_a_truncated_row_does_not_damage_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    for step in (2, 3):  # two more attempts
        rows = metrics.Rows(path)
        rows.add({"step": step})
        rows.close()
    assert path.read_text().splitlines() == ['{"step": 1}', '{"st', '{"step": 2}', '{"step": 3}']


def steps_left(folder: Path) -> list[int]:
    return sorted(checkpoint.step_of(path) for path in folder.glob("step-*.pt"))


@pytest.mark.parametrize(
    ("back", "best", "expected"),
    [
        (6, 6, "step-00000006.pt"),
        (4, 4, "step-00000004.pt"),
        (4, 2, "step-00000002.pt"),
        (4, 3, ""),
        (2, None, ""),
    ],
)
def test_the_best_of_a_later_step_is_forgotten(
    tmp_path: Path, back: int, best: int | None, expected: str
) -> None:
    """That of step 3 was not kept."""
    paths = {step: tmp_path / f"step-{step:08d}.pt" for step in (2, 4, 6)}
    for path in paths.values():
        path.touch()
    checkpoint.point(paths[6], "best")
    checkpoint.point_back(paths[back], {"val_top1": 0.5, "step": best} if best else None)
    assert checkpoint.named(tmp_path, "latest") == paths[back].name
    assert checkpoint.named(tmp_path, "best") == expected


def test_the_newest_best_and_interval_checkpoints_are_kept(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, keep=2, keep_every_steps=10)
    for step in range(1, 26):
        saver.save(content(step), best=step == 7)
    saver.wait()
    assert steps_left(tmp_path) == [7, 10, 20, 24, 25]
    assert checkpoint.named(tmp_path, "best") == "step-00000007.pt"
    assert checkpoint.named(tmp_path, "latest") == "step-00000025.pt"


def test_rows_without_a_checkpoint_are_removed_unless_it_is_being_written(tmp_path: Path) -> None:
    """Another rank may have written its rows of the next checkpoint already."""
    later = ["step-00000003.0b-1of2.rows", "step-00000003.notes.rows"]
    for name in ("step-00000001.0a-1of2.rows", *later):
        (tmp_path / name).touch()
    saver = make_saver(tmp_path)
    saver.save(content(step=2))
    saver.wait()
    assert names(tmp_path) == ["latest", "step-00000002.pt", *later]


def test_candidates_are_checkpoints_newest_first(tmp_path: Path) -> None:
    names = ["step-00000009.pt", "step-00000010.pt", "step-123456789.pt"]
    for name in [*names, ".step-00000011.pt.77", "step-00000012.pt.bak", "step-3.pt", "other.pt"]:
        (tmp_path / name).touch()
    assert [path.name for path in checkpoint.candidates(tmp_path)] == names[::-1]
    # the run was resumed from step 9 and has saved since
    (tmp_path / "latest").write_text("step-00000010.pt\n")
    assert [path.name for path in checkpoint.candidates(tmp_path)] == [names[1], names[0], names[2]]
    (tmp_path / "latest").write_text("\0torn")
    assert [path.name for path in checkpoint.candidates(tmp_path)] == names[::-1]
    assert checkpoint.candidates(tmp_path / "none") == []


def test_a_checkpoint_with_a_hash_in_its_archives_comment_is_read(tmp_path: Path) -> None:
    """Earlier versions wrote one."""
    torch.serialization.set_crc32_options(False)  # as a recipe can
    path = checkpoint.write(tmp_path, content(step=2))
    path.write_bytes(path.read_bytes()[:-2] + b"\x47\0sha256:" + b"0" * 64)
    assert checkpoint.read(path)["meta"]["step"] == 2


@pytest.mark.parametrize(
    "content",
    [
        {"state_dict": {}},
        [1, 2],
        {"meta": content()["meta"]},
        content() | {"meta": {"step": 1}},
        content() | {"meta": {"config": {}}},
    ],
)
def test_somebody_elses_checkpoint_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "foreign.pt")
    with pytest.raises(InputError, match=r"foreign\.pt: was not written by these recipes"):
        checkpoint.read(tmp_path / "foreign.pt")
    with pytest.raises(InputError, match=r"none\.pt: cannot be read \(No such file or directory\)"):
        checkpoint.read(tmp_path / "none.pt")


def test_a_run_resumed_from_an_older_checkpoint_keeps_the_later_ones(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, keep=2)
    (tmp_path / "step-00000000.pt").mkdir()  # cannot be removed, and does no harm
    for step in (1, 2, 30, 3, 4):
        saver.save(content(step))
    saver.wait()
    assert steps_left(tmp_path) == [0, 3, 4, 30]
    assert [checkpoint.step_of(path) for path in checkpoint.candidates(tmp_path)] == [4, 3, 0, 30]


def test_a_copy_equals_the_original_and_reuses_its_memory() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(3, 3)).to(memory_format=torch.channels_last)
    state = {"model": net.state_dict(), "list": [torch.ones(2), (1, "text")], "none": None}
    copy = HostCopy()
    first = copy.take(state)
    assert first["model"]["0.weight"].stride() == net[0].weight.stride()
    assert first["list"][1] == (1, "text")
    assert first["none"] is None
    assert checkpoint.size_of(state) == checkpoint.size_of(first)
    # keeps two averages
    begun = checkpoint.State(net, torch.optim.Adam(net.parameters()), cast(Any, nn.Module()))
    assert checkpoint.size_in_training(begun) == 3 * checkpoint.size_of(net.state_dict())
    for momentum, averages in ((0.9, 1), (0.0, 0)):
        begun.optimizer = torch.optim.SGD(net.parameters(), momentum=momentum)
        assert checkpoint.size_in_training(begun) == (1 + averages) * checkpoint.size_of(
            net.state_dict()
        )
    conv, linear = ([*layer.parameters()] for layer in net)
    groups = [{"params": conv}, {"params": linear, "betas": (0.9, 0.99)}]
    begun.optimizer = MuonAdamW(groups, lr=0.1)
    sizes = [checkpoint.size_of(part) for part in (net.state_dict(), conv, linear)]
    assert checkpoint.size_in_training(begun) == sizes[0] + sizes[1] + 2 * sizes[2]
    place = first["model"]["0.weight"].data_ptr()
    with torch.no_grad():
        net[0].weight.fill_(7)
    assert not torch.equal(first["model"]["0.weight"], net[0].weight)
    second = copy.take(state)
    assert second["model"]["0.weight"].data_ptr() == place
    assert torch.equal(second["model"]["0.weight"], net[0].weight)


def test_a_restored_state_does_not_change_with_the_file(tmp_path: Path) -> None:
    """Whose pages the ranks of a node share when they read it."""
    states = []
    for _ in range(2):
        net = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(net.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        states.append(checkpoint.State(net, optimizer, schedule, meta={"config": {}}))
    first, second = states
    first.model(torch.ones(1, 4)).sum().backward()
    first.optimizer.step()
    path = checkpoint.write(tmp_path, checkpoint.content_of(first, {}, []))
    saved = checkpoint.read(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    checkpoint.restore(path, second, saved, to_train=True)
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert not saved["model"]["weight"].any()
    whole, again = (checkpoint.content_of(state, {}, []) for state in states)
    for part in ("model", "optimizer"):
        torch.testing.assert_close(again[part], whole[part], rtol=0, atol=0)


def test_every_random_state_is_restored() -> None:
    def draw() -> tuple[Any, ...]:
        return (
            torch.rand(3).tolist(),
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
        )

    random.gauss(0, 1)  # the second of a pair is kept
    np.random.randn()
    states = torch.load(io.BytesIO(checkpoint.rng_state(CPU)), weights_only=True)
    drawn = draw()
    draw()
    checkpoint.set_rng_state(states, CPU)
    assert draw() == drawn

"""Bringing a packed copy to a node's own disk: once, whole, by one process at a time, whatever ends
it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from recipes.core import files
from recipes.core.data.packed import stage
from recipes.core.data.packed.stage import to_local_disk
from recipes.core.errors import InputError, MachineError
from tests import helpers
from tests.helpers import ROOT

SHARDS = 6
SHARD_BYTES = 300_000
STAGE = (
    "import sys; from pathlib import Path; from recipes.core.data.packed.stage import "
    "to_local_disk; "
)
STAGE += "print(to_local_disk(Path(sys.argv[1]), Path(sys.argv[2]), lambda done, total: None))"


def make(folder: Path, shards: int = SHARDS, size: int = SHARD_BYTES) -> Path:
    """A folder in the form of a packed copy; what is in its files is nothing to staging."""
    folder.mkdir(parents=True)
    splits = {}
    for split, count in (("train", shards), ("val", 1)):
        files = [
            (f"{split}-{i:05d}.bin", random.Random(f"{split} {i}").randbytes(size))
            for i in range(count)
        ]
        records = random.Random(split).randbytes(24 * 10)
        for name, content in [*files, (f"{split}.index", records)]:
            (folder / name).write_bytes(content)
        listed = [
            {"file": n, "bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in files
        ]
        splits[split] = {
            "samples": 10,
            "index_sha256": hashlib.sha256(records).hexdigest(),
            "shards": listed,
        }
        splits[split] |= {"skipped": []}
    index = {
        "format": "packed images",
        "version": 1,
        "encoding": "jpeg",
        "size": 256,
        "quality": 90,
        "classes": ["a"],
    }
    (folder / "index.json").write_text(json.dumps({**index, "splits": splits}))
    return folder


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return make(tmp_path / "packed-256")


def target(packed: Path, node: Path) -> Path:
    digest = hashlib.sha256((packed / "index.json").read_bytes()).hexdigest()
    return node / f"{packed.name}-{digest[:12]}-{os.geteuid()}"


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def ignore(done: int, total: int) -> None:
    pass


def same(folder: Path, staged: Path) -> bool:
    """Whether ``staged`` has ``folder``'s files and no more, but for the lock."""
    contents = {
        path.name: path.read_bytes() for path in staged.iterdir() if path.name != stage.LOCK
    }
    return contents == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_copy_is_whole_private_and_made_once(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    staged = to_local_disk(
        packed, tmp_path / "node", lambda done, total: told.append((done, total))
    )
    assert staged == target(packed, tmp_path / "node")
    assert same(packed, staged)
    assert staged.stat().st_mode & 0o777 == 0o700
    total = size(packed)
    assert told[0] == (0, total)
    assert told[-1] == (total, total)
    monkeypatch.setattr(stage, "_copy", lambda *arguments: pytest.fail("copied again"))
    assert to_local_disk(packed, tmp_path / "node", ignore) == staged


def test_missing_and_truncated_files_of_a_copy_are_copied_again(
    packed: Path, tmp_path: Path
) -> None:
    staged = to_local_disk(packed, tmp_path / "node", ignore)
    (staged / "train-00001.bin").unlink()
    (staged / "train-00002.bin").write_bytes(b"short")
    (staged / ".train-00001.bin.host.77.0123abcd").write_bytes(b"of a process that was killed")
    kept = (staged / "train-00003.bin").stat().st_ino
    told: list[tuple[int, int]] = []
    assert same(packed, to_local_disk(packed, tmp_path / "node", lambda *now: told.append(now)))
    total = size(packed)
    assert told[0] == (total - 2 * SHARD_BYTES, total)
    assert told[-1] == (total, total)
    assert (staged / "train-00003.bin").stat().st_ino == kept


def test_processes_of_a_node_share_one_copy(packed: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    counted = STAGE.replace(
        "print(",
        "import os; from recipes.core.data.packed import stage; c = stage._copy; "
        "stage._copy = lambda file, *to: (os.write(1, f'copied {file.name}\\n'.encode()), c(file, "
        "*to)); print(",
    )
    command = [sys.executable, "-c", counted, packed, tmp_path / "node"]
    ranks = [
        subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE) for _ in range(4)
    ]
    told = [rank.communicate(timeout=30)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert len({lines[-1] for lines in told}) == 1
    copied = sorted(line for lines in told for line in lines if line.startswith("copied"))
    assert len(copied) == len(set(copied)) == SHARDS + 1 + 3
    assert same(packed, Path(told[0][-1]))


def test_waiting_processes_report_progress(packed: Path, tmp_path: Path) -> None:
    staged = to_local_disk(packed, tmp_path / "node", ignore)
    kept = (staged / "train-00000.bin").rename(tmp_path / "kept")
    lock = os.open(staged / stage.LOCK, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    told: list[tuple[int, int]] = []
    arguments = (packed, tmp_path / "node", lambda *now: told.append(now))
    waiting = threading.Thread(target=to_local_disk, args=arguments, daemon=True)
    waiting.start()
    helpers.wait_until(lambda: told, 20, "a word on how far it is")
    total = size(packed)
    assert told[0] == (total - SHARD_BYTES, total)
    # the process that has the lock completes the copy
    inode = kept.rename(staged / "train-00000.bin").stat().st_ino
    os.close(lock)
    waiting.join(10)
    assert same(packed, staged)
    assert (staged / "train-00000.bin").stat().st_ino == inode  # not copied again


@pytest.mark.parametrize("kind", ["flipped", "short", "long", "gone", "pipe"])
def test_a_damaged_source_is_named_and_never_staged(
    packed: Path, tmp_path: Path, kind: str
) -> None:
    shard = packed / "train-00002.bin"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 4
    changed = {
        "flipped": bytes(content),
        "short": bytes(content[:-5]),
        "long": bytes(content) + b"x",
    }
    shard.unlink()
    if kind in changed:
        shard.write_bytes(changed[kind])
    if kind == "pipe":
        os.mkfifo(shard)
    line = (
        r"train-00002\.bin' (has invalid content|has \d+ bytes|is larger than|is not an ordinary "
        "file|cannot be read)"
    )
    with pytest.raises(InputError, match=line) as caught:
        to_local_disk(packed, tmp_path / "node", ignore)
    assert "\n" not in str(caught.value)
    (staged,) = (tmp_path / "node").iterdir()
    left = {path.name for path in staged.iterdir()}
    assert "train-00002.bin" not in left
    assert left <= {stage.LOCK, *(path.name for path in packed.iterdir())}


def test_a_name_in_the_index_names_no_file(packed: Path, tmp_path: Path) -> None:
    index = json.loads((packed / "index.json").read_text())
    index["splits"]["train"]["shards"][0]["file"] = "../../outside.bin"
    index["splits"]["../outside"] = index["splits"]["val"]
    (packed / "index.json").write_text(json.dumps(index))
    assert same(packed, to_local_disk(packed, tmp_path / "node", ignore))
    assert not list(tmp_path.rglob("outside*"))


@pytest.mark.parametrize("kind", ["link", "others may write", "link for a lock"])
def test_a_folder_that_another_user_may_have_created_is_refused(
    packed: Path, tmp_path: Path, kind: str
) -> None:
    node = tmp_path / "node"
    elsewhere = tmp_path / "elsewhere"
    node.mkdir()
    elsewhere.mkdir(mode=0o700)
    planted = target(packed, node)
    if kind == "link":
        planted.symlink_to(elsewhere)
    else:
        planted.mkdir(mode=0o700)
    if kind == "others may write":
        planted.chmod(0o777)
    elif kind == "link for a lock":
        (planted / stage.LOCK).symlink_to(elsewhere / "made")
    line = r"(node/.* must be a folder that belongs to you|^stage_dir='.*node': )"
    with pytest.raises(MachineError, match=line) as caught:
        to_local_disk(packed, node, ignore)
    assert "\n" not in str(caught.value)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("kind", ["a folder", "a link"])
def test_a_name_that_another_user_has_taken_stops_no_job(
    packed: Path, tmp_path: Path, kind: str
) -> None:
    """In /tmp, anyone can take it."""
    helpers.need("" if os.geteuid() == 0 else "files of another user can be made by root alone")
    taken = target(packed, tmp_path / "node")
    (tmp_path / "elsewhere").mkdir()
    taken.parent.mkdir()
    taken.mkdir() if kind == "a folder" else taken.symlink_to(tmp_path / "elsewhere")
    os.lchown(taken, 65534, 65534)
    lines = list[str]()
    assert to_local_disk(packed, tmp_path / "node", ignore, lines.append) == packed
    assert lines == [f"stage_dir=: {taken} belongs to another user: this rank reads {packed}"]
    assert list(taken.iterdir()) == []


def test_a_full_disk_keeps_the_complete_files(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "COPIERS", 1)
    with helpers.small_disk(tmp_path / "small", "1m") as small:
        with monkeypatch.context() as patch:
            patch.setattr(files, "free_bytes", lambda folder: None)
            with pytest.raises(MachineError, match=r"No space left on device\): free some space"):
                to_local_disk(packed, small, ignore)
        left = {path.name: path.stat().st_size for path in target(packed, small).iterdir()}
        assert set(left) <= {stage.LOCK, *(path.name for path in packed.iterdir())}
        assert sum(size == SHARD_BYTES for size in left.values()) == 3
        # Before anything is copied; only what is missing is asked for: 3 of 7 are there.
        with pytest.raises(MachineError, match=r"1\.2 MB needed"):
            to_local_disk(packed, small, ignore)


def test_an_unwritable_stage_dir_is_reported(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        MachineError, match=r"file/.*: cannot be created \(.*give another stage_dir="
    ):
        to_local_disk(packed, tmp_path / "file", ignore)

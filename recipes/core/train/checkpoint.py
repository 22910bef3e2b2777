"""Checkpoints: written atomically and in the background, and read without executing anything in
them.

A checkpoint is one file, the zip archive that torch.save writes. A reader verifies the CRC-32 of
each part of the archive. With strategy=fsdp, the other ranks that divide the model write a file
each, before rank 0 writes the file that names them. All files of one checkpoint contain the same
random ID.
"""

import contextlib
import io
import random
import re
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves, tree_map_only

from recipes.core import files, trust
from recipes.core.errors import InputError, MachineError
from recipes.core.train import sharding
from recipes.core.train.host_copy import HostCopy

Content = dict[str, Any]  # of a checkpoint, as docs/run-directory.md describes it
LONGEST_NAME = 4096  # bytes of the file that names a checkpoint
NAME = re.compile(r"step-(\d{8,})\.pt")
# ID of the checkpoint, number, count: no checkpoint replaces a file of another one. Earlier
# versions wrote the number of the attempt in place of the ID.
ROWS = re.compile(r"step-(\d{8,})\.[0-9a-f]+-\d+of\d+\.rows")
NUMPY_STATE = ("name", "keys", "position", "has_gauss", "gauss")  # as numpy.random.get_state()


@dataclass
class State:
    """The complete state of a run between two steps. step: completed optimiser steps.

    about: what a checkpoint tells about the model besides the keys: texts, numbers and lists of
    them, such as the names of the classes.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    ema: AveragedModel | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    meta: dict[str, Any] = field(default_factory=dict)


def rng_state(device: torch.device) -> bytes:
    """Random states of this rank: torch, its GPU, Python, and NumPy if it has been imported, in the
    format of torch.save.
    """
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss},
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        numpy = dict(zip(NUMPY_STATE, sys.modules["numpy"].random.get_state(), strict=True))
        states["numpy"] = {**numpy, "keys": torch.tensor(numpy["keys"].tolist())}
    written = io.BytesIO()
    torch.save(states, written)
    return written.getvalue()


def set_rng_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Restores the random states of `rng_state`, loaded."""
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    python = states["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    if "numpy" in states and "numpy" in sys.modules:
        numpy = [states["numpy"][name] for name in NUMPY_STATE]
        sys.modules["numpy"].random.set_state(numpy)


def content_of(state: State, sampler: Mapping[str, Any], rng: Sequence[bytes]) -> Content:
    """The content of a checkpoint of ``state``. Its tensors are those of the training, not copies.
    rng: each rank's `rng_state`.
    """
    return {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "scheduler": state.scheduler.state_dict(),
        "ema": state.ema.state_dict() if state.ema else None,
        "sampler": dict(sampler),
        "rng": [
            torch.load(io.BytesIO(part), map_location="cpu", weights_only=True) for part in rng
        ],
        "meta": {**state.meta, "step": state.step},
    }


def size_of(content: Any) -> int:
    """Bytes of the tensors in ``content``."""
    return sum(leaf.nbytes for leaf in tree_leaves(content) if isinstance(leaf, Tensor))


def size_in_training(state: State) -> int:
    """Bytes of the tensors in a checkpoint of ``state`` in training. Of an unknown optimiser, it
    assumes two averages of each weight.
    """
    size = size_of(content_of(state, {}, []))
    if state.optimizer.state:
        return size

    for group in state.optimizer.param_groups:
        averages = 2 if group.get("betas") or "momentum" not in group else bool(group["momentum"])
        size += averages * size_of(group["params"])
    return size


@dataclass
class Saver:
    """Writes checkpoints into ``folder`` in its own thread, one at a time. Each rank that writes a
    file of a checkpoint has a Saver.

    staging: as for `write`. keep, keep_every_steps: as for `prune`. saved: called from that thread
    with the path and the step of a checkpoint that is on disk, before older checkpoints are
    removed; on rank 0 only.

    number: 0 for the rank that writes the file with the name of the checkpoint; the others write
    their rows. count: ranks that divide the model. wrote: called with the name of the file of this
    rank's rows when it is on disk. await_rows: waits until the files of all others, with these
    names, are, and raises MachineError if they are not in time.
    """

    folder: Path
    staging: Path
    saved: Callable[[Path, int], None]
    keep: int
    keep_every_steps: int = 0
    number: int = 0
    count: int = 1
    wrote: Callable[[str], None] = lambda name: None
    await_rows: Callable[[Sequence[str]], None] = lambda names: None

    def __post_init__(self) -> None:
        self._copy = HostCopy()
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None  # raises its error at `check`

    def save(self, content: Content, best: bool = False, checkpoint_id: str = "") -> None:
        """Waits for the previous write, copies ``content`` and starts to write the copy. best:
        point ``best`` to this checkpoint.

        checkpoint_id: the same on all ranks that write a file of this checkpoint, and different for
        each checkpoint.

        Raises MachineError (one line) if there is not enough space or the previous write failed.
        """
        self.wait()
        whole, rows = sharding.taken_apart(content)
        kept = {"rows": rows, "id": checkpoint_id} if rows else {}
        if self.number == 0:
            kept = {**whole, **kept}
        with files.writing_to(self.folder.parent, "run_dir"):
            files.check_free(self.folder, size_of(kept))
        step = content["meta"]["step"]
        self._writing = self._pool.submit(self._write, self._copy.take(kept), step, best)

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the current write is on disk, at most ``timeout_s``. Raises MachineError (one
        line) if it failed.
        """
        futures.wait([self._writing] if self._writing else [], timeout_s)
        self.check()

    def check(self) -> None:
        """Raises the error of the last write if it has failed. Does not wait."""
        if self._writing and self._writing.done():
            done = self._writing
            self._writing = None
            done.result()

    def _write(self, content: Content, step: int, best: bool) -> None:
        # of the rows of the other ranks
        names = [
            f"step-{step:08d}.{content['id']}-{number}of{self.count}.rows"
            for number in range(1, self.count)
        ]
        with files.writing_to(self.folder.parent, "run_dir"):
            self._copy.wait()
            if self.number:
                name = names[self.number - 1]
                _write_file(self.folder / name, content, self.staging)
                self.wrote(name)
                return
            if "rows" in content:
                self.await_rows(names)
                content["parts"] = names
            path = write(self.folder, content, self.staging, best=best)
            # rows of other checkpoints of this step
            for rows in self.folder.glob(f"step-{step:08d}.*.rows"):
                if ROWS.fullmatch(rows.name) and rows.name not in names:
                    rows.unlink(missing_ok=True)
            self.saved(path, step)
            prune(self.folder, self.keep, self.keep_every_steps)


def write(
    folder: Path, content: Content, staging: Path | None = None, *, best: bool = False
) -> Path:
    """Writes ``step-XXXXXXXX.pt`` into ``folder``, then points ``best`` to it (if ``best`` is set),
    and finally ``latest``.

    The file gets its name only when it is completely on disk. staging: where it is written before;
    default: ``folder``. Raises OSError if it cannot be written, and MachineError if a later attempt
    has removed ``staging``.
    """
    path = folder / f"step-{content['meta']['step']:08d}.pt"
    _write_file(path, content, staging)
    if best:
        point(path, "best", staging)
    point(path, "latest", staging)
    return path


def _write_file(path: Path, content: Content, staging: Path | None) -> None:
    torch.serialization.set_crc32_options(True)  # the default, which a recipe can change
    files.write_whole(path, lambda file: torch.save(content, file), staging)


def point(path: Path, pointer: str, staging: Path | None = None) -> None:
    """Points ``latest`` or ``best`` in the folder of the checkpoint ``path`` to it. staging: as for
    `write`. Raises OSError.
    """
    if named(path.parent, pointer) != path.name:
        files.write_whole(
            path.with_name(pointer), lambda file: file.write(f"{path.name}\n".encode()), staging
        )


def point_back(path: Path, best: Mapping[str, Any] | None, staging: Path | None = None) -> None:
    """Points ``latest`` to the checkpoint ``path``, from which a run continues, and a ``best`` of a
    later step to the best one until then; removes it if that was not kept.

    best: as `outcome.is_best` records it. staging: as for `point`. Raises OSError.
    """
    point(path, "latest", staging)
    named_best = Path(named(path.parent, "best") or path)
    if step_of(named_best) > step_of(path):
        step = best["step"] if best else 0  # no checkpoint is of step 0
        kept = path.with_name(f"step-{step:08d}.pt")
        if kept.exists():
            point(kept, "best", staging)
        else:
            path.with_name("best").unlink()


def prune(folder: Path, keep: int, keep_every_steps: int) -> None:
    """Removes checkpoints up to the step of ``latest``, except the ``keep`` newest, multiples of
    ``keep_every_steps``, and ``best``.

    Checkpoints of later steps are not touched. They exist after a run was resumed from an earlier
    step.
    """
    there = candidates(folder)
    stay = {named(folder, "latest"), named(folder, "best")}
    newest = next((step_of(path) for path in there), 0)
    earlier = [path for path in there if step_of(path) <= newest]
    for path in earlier[keep:] if keep else []:
        is_kept = keep_every_steps and step_of(path) % keep_every_steps == 0
        if path.name not in stay and not is_kept:
            with contextlib.suppress(OSError):
                path.unlink()

    steps = {step_of(path) for path in candidates(folder)}
    # rows of checkpoints that were removed, or not completed
    for path in folder.glob("step-*.rows"):
        name = ROWS.fullmatch(path.name)
        if name and int(name[1]) < newest and int(name[1]) not in steps:
            path.unlink(missing_ok=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.stem.removeprefix("step-"))


def named(folder: Path, pointer: str) -> str:
    """Name of the checkpoint that ``latest`` or ``best`` points to; "" if there is none."""
    try:
        name = files.read_bounded(folder / pointer, LONGEST_NAME).decode().strip()
    except (OSError, ValueError):
        return ""
    return name if NAME.fullmatch(name) else ""


def candidates(folder: Path) -> list[Path]:
    """The checkpoints, newest first: the one that ``latest`` names, earlier steps, then later
    steps, which an earlier resume left.
    """
    steps = {step_of(path): path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name)}
    latest = named(folder, "latest")
    newest = step_of(Path(latest)) if latest else max(steps, default=0)
    return [steps[step] for step in sorted(steps, key=lambda step: (step > newest, -step))]


def read(path: Path | str) -> Content:
    """The content of a checkpoint, on the CPU. Raises InputError (one line) if a file is damaged or
    not a checkpoint.

    Its tensors are parts of the files, mapped into memory: the ranks of a node share these pages.
    Copy what you keep, since the files may be removed. A divided tensor is a `sharding.Divided`.
    """
    path = Path(path)
    content = _read_file(path)
    match content:
        case {
            "model": _,
            "optimizer": _,
            "scheduler": _,
            "sampler": _,
            "rng": _,
            "meta": {"config": dict(), "step": int()},
        }:
            pass
        case _:
            raise InputError(f"checkpoint {path}: was not written by these recipes")
    if "parts" not in content:
        return content

    parts = content.pop("parts")
    if not isinstance(parts, list) or not all(
        isinstance(name, str) and ROWS.fullmatch(name) for name in parts
    ):
        raise InputError(f"checkpoint {path}: lists files that are not parts of a checkpoint")
    of_ranks = [content, *(_read_file(path.with_name(name)) for name in parts)]
    try:
        # earlier versions wrote no ID into any file
        if len({part.get("id") for part in of_ranks}) > 1:
            raise KeyError("id")
        joined: Content = sharding.put_together(content, [part["rows"] for part in of_ranks])
    except (AttributeError, KeyError, IndexError, TypeError):
        fix = f"copy all files {path.stem}.* again from the run that wrote them"
        raise InputError(f"checkpoint {path}: its files do not belong together: {fix}") from None
    del joined["rows"]
    joined.pop("id", None)
    return joined


def _read_file(path: Path) -> Any:
    """The content of a file. Raises InputError, and MachineError for a link of another user.

    With ``weights_only`` no code in the file is executed; this is safe from torch 2.10 on
    (CVE-2025-32434, CVE-2026-24747). torch does not verify the archive's CRC-32s when it loads, so
    it would not detect a flipped bit in a weight; zipfile does.
    """
    try:
        with open(path, "rb", opener=trust.without_links_of_others) as file:
            place = Path(f"/proc/self/fd/{file.fileno()}")  # another user could exchange ``path``
            if not place.is_file():  # such as a pipe, which would block
                raise InputError(f"checkpoint {path}: is not a file")
            return _load(place)
    except (InputError, MachineError):
        raise
    except OSError as error:
        raise InputError(f"checkpoint {path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # a damaged archive can make torch.load raise any exception
        raise InputError(
            f"checkpoint {path}: is damaged or not a checkpoint ({type(error).__name__})"
        ) from None


def _load(path: Path) -> Any:
    """The content of an archive. Raises whatever zipfile and torch raise if it is damaged."""
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        # torch.save does not compress: it never writes an archive that unpacks to more than its own
        # size.
        unpacked = sum(part.file_size for part in parts)
        # torch.load would take a part with attributes for a folder and leave its tensor
        # uninitialised.
        if (
            unpacked > path.stat().st_size
            or any(part.external_attr for part in parts)
            or archive.testzip()
        ):
            raise zipfile.BadZipFile
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def restore(path: Path, state: State, content: Content, to_train: bool) -> None:
    """Loads a checkpoint into ``state``; optimiser and scheduler only if ``to_train``. Raises
    InputError if it is of another model.
    """
    try:
        state.model.load_state_dict(sharding.weights_of(state.model, content["model"]))
        if to_train:
            state.optimizer.load_state_dict(
                sharding.state_of(state.optimizer, content["optimizer"])
            )
            for averages in state.optimizer.state.values():
                # On a CPU, they are still parts of the file.
                averages.update(tree_map_only(Tensor, torch.clone, averages))
            state.scheduler.load_state_dict(content["scheduler"])
        if state.ema:
            state.ema.load_state_dict(content["ema"])
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"checkpoint {path}: belongs to another model ({' '.join(str(error).split())[:200]})"
        ) from None
    state.step = int(content["meta"]["step"])
    if to_train and isinstance(state.scheduler, LambdaLR):
        state.scheduler.last_epoch = state.step - 1
        state.scheduler._step_count = state.step
        # the learning rate of this step by the current schedule; it depends on `epochs`
        state.scheduler.step()

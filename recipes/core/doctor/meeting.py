"""Messages between the nodes of an examination, as files in the run directory, since the network may be broken."""

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from recipes.core.files import read_json, write_json


POLL_S = 0.3
STALE_S = 300.0  # a word that is older than this rank by more is of an earlier examination
NAMED = "examination.json"  # has its name, however old


class Meeting:
    """The folder in which the nodes leave word for each other; a word is a whole file of JSON.

    An examination that was ended before its verdict has left its words there. So the first rank gives this one a name, under which
    each word stands; who has spoken before there was one says all of it again. Who comes before the first rank may still find an
    older name: it acts on the first rank's word alone that has its ``token`` in it.
    """

    def __init__(self, folder: Path, first: bool) -> None:
        self.folder, self._is_first = folder, first
        self._told: dict[str, Mapping[str, Any]] = {}
        self.is_heard = False  # by the first rank, for sure
        self.token = secrets.token_hex(8)  # this rank's
        self.tokens: dict[str, str] = {}  # of who has told what was found here, by the words' names
        self._name = secrets.token_hex(8) if first else ""
        folder.mkdir(parents=True, exist_ok=True)
        # By the file system's clock, as the words are: this node's own may be off.
        with tempfile.TemporaryFile(dir=folder) as file:
            self._begin = os.fstat(file.fileno()).st_mtime
        if first:
            write_json(folder / NAMED, {"name": self._name})

    def tell(self, name: str, content: Mapping[str, Any]) -> None:
        self._told[name] = content
        self._learn_name()
        self._write(name)

    def wait(self, names: Sequence[str], end: float) -> dict[str, dict[str, Any]]:
        """What is there of ``names``, as soon as all is, or at ``end`` (time.monotonic)."""
        found: dict[str, dict[str, Any]] = {}
        while True:
            if self._learn_name():
                found = {}
            with contextlib.suppress(FileNotFoundError):  # who comes late finds it swept
                there = set(os.listdir(self.folder))  # once, and it makes NFS look again
                wanted = [name for name in names if name not in found and f"{name}.json" in there]
                found |= {name: word for name in wanted if (word := self._word(name))}
            if len(found) == len(names) or time.monotonic() > end:
                return found
            time.sleep(POLL_S)

    @property
    def name(self) -> str:
        """Of the examination, as far as it is known."""
        return self._name

    def _learn_name(self) -> bool:
        """Whether the first rank has named this examination since; then what was told is told again."""
        name = None if self._is_first else (read_json(self.folder / NAMED) or {}).get("name")
        if not name or name == self._name:
            return False
        self._name = str(name)
        for told in self._told:
            self._write(told)
        return True

    def _write(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / f"{name}.json", {"of": self._name, "by": self.token, "says": self._told[name]})

    def _word(self, name: str) -> dict[str, Any] | None:
        """What was told in this examination; one's own without a look at the file, which another one may have written over."""
        word = {"of": self._name, "by": self.token, "says": self._told[name]} if name in self._told else {}
        word = word or self._read(f"{name}.json") or {}
        says = word.get("says") if word.get("of") == self._name else None
        self.tokens[name] = str(word.get("by"))
        return dict(says) if isinstance(says, dict) else None

    def _read(self, file: str) -> dict[str, Any] | None:
        """A file's content, unless it is older than any that is of this examination."""
        path = self.folder / file
        with contextlib.suppress(OSError):
            if path.stat().st_mtime > self._begin - STALE_S:
                return read_json(path)
        return None

    def is_new(self, name: str) -> bool:
        """Whether a word was told since this rank began."""
        with contextlib.suppress(OSError):
            return (self.folder / f"{name}.json").stat().st_mtime >= self._begin
        return False

    def withdraw(self) -> None:
        """Takes one's own words back, in an examination that is given up; not those of another one that has come since."""
        mine = {f"{name}.json": ("by", self.token) for name in self._told} | {
            NAMED: ("name", self._name if self._is_first else "")
        }
        for file, (key, value) in mine.items():
            with contextlib.suppress(OSError):
                if (read_json(self.folder / file) or {}).get(key) == value:
                    (self.folder / file).unlink()

    def sweep(self) -> None:
        """Leaves nothing for the next examination to find."""
        shutil.rmtree(self.folder, ignore_errors=True)

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
STALE_S = 300.0  # a message that is older than this rank by more belongs to an earlier examination
NAMED = "examination.json"  # holds the examination's name; it counts whatever its age


class Meeting:
    """A folder of messages, each a JSON file that is written as a whole.

    A previous examination that was ended early leaves its messages. Therefore the first rank gives each examination a name, which each
    message carries; a rank that posted before it knew the name posts all its messages again. A rank that starts before the first
    one may still read an old name: it follows a message of the first rank only if that contains its ``token``.
    """

    def __init__(self, folder: Path, is_first: bool) -> None:
        self.folder = folder
        self.token = secrets.token_hex(8)  # identifies this rank
        self.tokens: dict[str, str] = {}  # of the senders, by the names of the messages read
        self.is_known_to_first = False  # whether the first rank has read this rank's report
        self._is_first = is_first
        self._posted: dict[str, Mapping[str, Any]] = {}
        self._name = secrets.token_hex(8) if is_first else ""
        folder.mkdir(parents=True, exist_ok=True)
        # The file system's clock also stamps the messages; this node's clock may be wrong.
        with tempfile.TemporaryFile(dir=folder) as file:
            self._begin = os.fstat(file.fileno()).st_mtime
        if is_first:
            write_json(folder / NAMED, {"name": self._name})

    @property
    def name(self) -> str:
        """The examination's name; "" or an old one before the first rank's is known."""
        return self._name

    def post(self, name: str, content: Mapping[str, Any]) -> None:
        self._posted[name] = content
        self._learn_name()
        self._write(name)

    def collect(self, names: Sequence[str], end: float) -> dict[str, dict[str, Any]]:
        """The messages ``names``, as soon as all are there; at ``end`` (time.monotonic), those that are there."""
        found: dict[str, dict[str, Any]] = {}
        while True:
            if self._learn_name():
                found = {}
            with contextlib.suppress(FileNotFoundError):  # the examination may be over, and the folder removed
                there = set(os.listdir(self.folder))  # one call for all names; it also makes NFS refresh its cache
                missing = [name for name in names if name not in found and f"{name}.json" in there]
                found |= {name: content for name in missing if (content := self._content(name))}
            if len(found) == len(names) or time.monotonic() > end:
                return found
            time.sleep(POLL_S)

    def is_new(self, name: str) -> bool:
        """Whether a message was posted after this rank began."""
        with contextlib.suppress(OSError):
            return (self.folder / f"{name}.json").stat().st_mtime >= self._begin
        return False

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _learn_name(self) -> bool:
        """Whether the first rank has named this examination since the last call. If so, all messages are posted again."""
        name = None if self._is_first else (read_json(self.folder / NAMED) or {}).get("name")
        if not name or name == self._name:
            return False
        self._name = str(name)
        for posted in self._posted:
            self._write(posted)
        return True

    def _message(self, name: str) -> dict[str, Any]:
        return {"examination": self._name, "sender": self.token, "content": self._posted[name]}

    def _write(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / f"{name}.json", self._message(name))

    def _content(self, name: str) -> dict[str, Any] | None:
        """A message of this examination. An own message is not read from the file, which another examination may have replaced."""
        message = self._message(name) if name in self._posted else self._read(f"{name}.json")
        if message is None or message.get("examination") != self._name:
            return None
        self.tokens[name] = str(message.get("sender"))
        content = message.get("content")
        return dict(content) if isinstance(content, dict) else None

    def _read(self, file: str) -> dict[str, Any] | None:
        """A file's content, unless it is too old to belong to this examination."""
        path = self.folder / file
        with contextlib.suppress(OSError):
            if path.stat().st_mtime > self._begin - STALE_S:
                return read_json(path)
        return None

"""Whose files are used. Other users share the login node, the nodes' /tmp, the project folder and
the network.

A file that decides what runs, and was found rather than typed, must be the user's own: `open_own`,
`problem_outside`. Output goes into folders of the user: `private_folder`, `own_folder`. Standard
library only.
"""

import contextlib
import grp
import hashlib
import os
import pwd
import secrets
import shlex
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from recipes.core import files
from recipes.core.errors import MachineError
from recipes.core.files import ROOT

KEY_BYTES = 32
MOST_LINKS = 40  # as the kernel allows in a path
LIST = "system.posix_acl_"  # the attribute of an access control list, without its kind


@contextlib.contextmanager
def open_own(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that decides what runs, such as the script of a job. Read it once, and use these
    bytes.

    Raises OSError, also for a link, and MachineError if the file or its folder belongs to another
    user or if another user can write to it. In such a folder, another user could give this name to
    any file of this user.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _require_own(path.parent, folder, is_above=True)
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(path.name, flags, dir_fd=folder)
    finally:
        os.close(folder)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise MachineError(f"{path}: is not an ordinary file, so it is not executed")
        _require_own(path, descriptor)
        yield file


def _require_own(path: Path, descriptor: int, is_above: bool = False) -> None:
    """Raises MachineError if an open file or folder belongs to another user, or if another user can
    write to it. A sticky folder protects its files.
    """
    status = os.fstat(descriptor)
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    problem = "" if is_sticky else who_else_writes(status, descriptor)
    if not _is_trusted(status.st_uid, path, is_above):
        problem = "belongs to another user"
    if problem:
        raise MachineError(f"{path}: {problem}, so it is not executed")


def write_own(path: Path, content: bytes) -> None:
    """Writes a file for `open_own` atomically: only its owner can write to it, whatever umask and
    access control lists allow. Raises OSError.
    """

    def write(file: IO[bytes]) -> None:
        os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o755)
        file.write(content)

    files.write_whole(path, write)


def user_key() -> bytes:
    """A random key of this user, for marks that no other user can make. It is made when it is first
    needed. b"" if the home folder is missing, belongs to another user or cannot be written, or if
    another user could have made or read the key.
    """
    with contextlib.suppress(OSError, RuntimeError):
        home = Path.home()
        path = home / ".config/recipes/key"
        if not path.exists() and home.stat().st_uid == os.geteuid():
            _make_key(path)
        with open_own(path) as file:
            key = file.read(KEY_BYTES + 1)
            status = os.fstat(file.fileno())
            is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
            if is_private and len(key) == KEY_BYTES:
                return key
    return b""


def secret_name(text: str) -> str:
    """A part of a file name, made of ``text``, that no other user can know before the file exists.
    "" without a key.
    """
    key = user_key()
    return hashlib.sha256(key + text.encode()).hexdigest()[:16] if key else ""


def _make_key(path: Path) -> None:
    """Nobody sees a part of the key. Raises OSError."""
    for folder in (path.parents[1], path.parent):
        folder.mkdir(0o700, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # with mode 600
        file.write(secrets.token_bytes(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process has made it
            os.link(file.name, path)


def who_else_writes(status: os.stat_result, place: int | Path, gets_files: bool = False) -> str:
    """Who, besides its owner, can write to a file or folder; "" if nobody can. status: of the file.
    place: its path or descriptor. gets_files: whether its new files count too.
    """
    if status.st_mode & 0o002:
        return "every user can write to it (run chmod o-w on it)"
    if gets_files and _has_list(place, "default"):
        return "its access control list decides who writes to new files (run setfacl -R -b on it)"
    if not status.st_mode & 0o020:
        return ""
    if _has_list(place):
        return "its access control list lets others write to it (remove it with setfacl -b)"
    if os.environ.get("RECIPES_TRUST_GROUP") != "1" and not _is_trusted_group(status.st_gid):
        return (
            "its group can write to it "
            "(run chmod g-w on it, or export RECIPES_TRUST_GROUP=1 if you trust the group)"
        )
    return ""


def _has_list(place: int | Path, kind: str = "access") -> bool:
    """Whether there is an access control list. The group's bits of the mode are then the most that
    the list allows. kind: "default" for the list that new files get.
    """
    try:
        return bool(os.getxattr(place, LIST + kind))
    except OSError:
        return False


def private_folder(folder: Path, fix: str = "use a clone of your own") -> Path:
    """Creates ``folder`` with mode 700 and returns it.

    For files that must be this user's own, such as those that jobs execute. Raises MachineError,
    with ``fix``, if it belongs to another user, if another user can write to it, or if it cannot be
    created.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()  # not through a link: in /tmp, anyone can create one
    except OSError as error:
        raise MachineError(f"{folder}: cannot be created ({error.strerror}): {fix}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        rule = "must be a folder that belongs to you, with mode 700 (run chmod 700 on it)"
        raise MachineError(f"{folder}: {rule}: or {fix}")
    problem = who_else_can_change(Path(os.path.realpath(folder)))
    if problem:
        raise MachineError(f"{folder}: {problem}; or {fix}")
    return folder


def private_temporary(folder: Path) -> Path:
    """``folder``, which tempfile has made. Raises MachineError if another user can exchange it,
    because $TMPDIR is neither sticky nor this user's own.
    """
    return private_folder(folder, "set TMPDIR to a folder of your own")


def who_else_can_change(path: Path) -> str:
    """Which file or folder, ``path`` or one above it, lets other users change what ``path`` holds;
    "" if none does.

    Root and the owner of this clone are trusted, and so are the groups of `_is_trusted_group`. For
    a path in the clone, folders above the clone do not count: who can change those can exchange all
    of the code. A sticky folder, such as /tmp, protects its content, and so does a folder that no
    other user can enter, unless others can exchange it. path: as os.path.realpath
    returns it; a link that another user has put into it since then is not followed.

    Raises OSError.
    """
    problems = list[str]()
    for place in (path, *path.parents):
        status = place.lstat()
        is_above = place != path
        if not _is_trusted(status.st_uid, place, is_above):
            return f"{place} belongs to another user"
        if is_above and not status.st_mode & 0o011:
            problems.clear()  # nobody else reaches what is in it, but may exchange it itself
        why = who_else_writes(status, place)
        is_sticky = is_above and status.st_mode & stat.S_ISVTX
        if why and not is_sticky:
            problems.append(f"{place}: {why}")
        if place == ROOT:
            break
    return problems[0] if problems else ""


def _is_trusted(user: int, place: Path, is_above: bool = False) -> bool:
    """Whether a user's files are used: this user's, root's, and those of the owner of this clone.
    place: the file or folder that belongs to ``user``. is_above: it is a folder above what is used.
    """
    if user in (os.geteuid(), 0):
        return True
    owner = ROOT.stat().st_uid
    overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    is_namespace = Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    if not is_namespace or user != overflow:
        return user == owner
    # In a user namespace, as of a container, the files of root and of all other users have this
    # owner. Those of root are taken to be the clone, what is in /, and folders above what is used,
    # in folders that only their owner can change.
    place = place.absolute()
    if place.is_relative_to(ROOT):
        return owner == overflow
    if place.parent == Path("/"):
        return True
    return is_above and not place.parent.stat().st_mode & 0o022


def _is_trusted_group(group: int) -> bool:
    """Whether a group is root's, has this user's name, or can change all of this clone anyway."""
    clone = ROOT.stat()
    is_shared = clone.st_mode & 0o020 and not _has_list(ROOT)  # a list may give the group less
    if group == 0 or (group == clone.st_gid and is_shared):
        return True
    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False


def resolved(path: Path, to_same_owner: bool = False) -> Path:
    """``path`` without links. Raises MachineError if one of them belongs to another user, who could
    lead a run into any folder.

    to_same_owner: such a link is followed if what it leads to belongs to its owner.
    """
    parts = list(reversed(Path(os.getcwd(), path).parts))
    real = Path("/")
    links = 0
    while parts:
        part = parts.pop()
        if part == "..":  # of what a link before it leads to, as for the kernel
            real = real.parent
            continue
        real = Path("/") if part[0] == "/" else real / part  # a path may begin with //
        if links == MOST_LINKS or not os.path.islink(real):  # also in a folder that is closed
            continue
        links += 1
        target = real.parent / os.readlink(real)
        is_followed = is_own(real, follow_symlinks=False)
        if not is_followed and to_same_owner:
            is_followed = real.lstat().st_uid == target.lstat().st_uid
        if not is_followed:
            fix = "give the folder itself"
            if to_same_owner:
                look = shlex.join(["readlink", "-f", str(real)])
                fix = f"look where it leads ({look}), then copy that file or folder"
            raise MachineError(f"{real}: is a link of another user; {fix}")
        parts += reversed(target.parts)
    return real  # links in a circle: what makes the folder says what is wrong


def without_links_of_others(path: str, flags: int) -> int:
    """For ``opener=`` of open(), of data that is copied: raises MachineError if another user's link
    leads to a file of a third, or of this user. Others could read this file in the copy.
    """
    real = resolved(Path(path), to_same_owner=True)
    descriptor = files.without_links(str(real), flags)
    _require_place(descriptor, real)
    return descriptor


def _require_place(descriptor: int, path: Path) -> None:
    """Closes the descriptor and raises MachineError if it is not of ``path``, since a folder in
    this path was exchanged meanwhile.
    """
    if os.readlink(f"/proc/self/fd/{descriptor}") != str(path):
        os.close(descriptor)
        raise MachineError(f"{path}: was replaced by a link while it was opened")


def own_without_links(path: str, flags: int) -> int:
    """For ``opener=`` of open(): as `files.without_links`, and raises MachineError if the file
    belongs to another user, who could read what is written into it.
    """
    descriptor = files.without_links(path, flags)
    if not _is_trusted(os.fstat(descriptor).st_uid, Path(path)):
        os.close(descriptor)
        raise MachineError(f"{path}: belongs to another user; remove it (rm {shlex.quote(path)})")
    return descriptor


@contextlib.contextmanager
def data_folder(folder: Path) -> Iterator[Path]:
    """Creates or checks a data folder as `own_folder` does, and yields a path to it for this
    process and its children: that of the open folder. Users who can write to a folder above, as in
    a project, could otherwise put a link in its place while files are written. Raises OSError and
    MachineError.
    """
    own_folder(folder, "data_dir")
    real = resolved(folder, to_same_owner=True)
    descriptor = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    _require_place(descriptor, real)
    try:
        if not _is_trusted(os.fstat(descriptor).st_uid, real):
            raise MachineError(f"{real}: was replaced by a folder of another user meanwhile")
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def is_own(path: Path, follow_symlinks: bool = True) -> bool:
    """Whether a file or folder belongs to this user, to root or to the owner of this clone. Raises
    OSError.
    """
    return _is_trusted(os.stat(path, follow_symlinks=follow_symlinks).st_uid, path)


def problem_outside(path: Path) -> str:
    """`who_else_can_change` of a file that decides what runs; "" in this clone, where it is as safe
    as the code. Raises OSError.
    """
    real = Path(os.path.realpath(path))
    return "" if real.is_relative_to(ROOT) else who_else_can_change(real)


def own_folder(folder: Path, key: str = "run_dir", is_listed: bool = True) -> None:
    """Creates ``folder`` and its missing parents with the mode that the umask allows, or checks
    that an existing ``folder`` belongs to this user, and so does each file, folder and link in it.
    Each folder in a run directory or a data folder is checked before files are written into it.

    key: names it in messages. is_listed: whether its content is checked; False for logs/, which
    each rank opens, and for a folder that is no run directory.

    Raises OSError. Raises MachineError if the folder, a link in its path or its content belongs to
    another user, or if another user can write to a run directory or its new files. A group may
    write to a data folder, and have files there. Raises MachineError if ``folder`` itself is a
    link: a copy of what another user has made has links of this user. A typed path is resolved
    first.
    """
    real = resolved(folder)
    if folder.is_symlink():
        fix = f"remove this link, or give another {key}="
        raise MachineError(f"{key}: {folder} is a link to {real}; {fix}")
    missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    for place in reversed(missing):
        # Mode 700 limits an inherited list until it is removed.
        inherits = _has_list(place.parent, "default")
        place.mkdir(0o700 if inherits else 0o777, exist_ok=True)
        _remove_lists(place)
    folder.mkdir(exist_ok=True)  # raises FileExistsError if there is something else
    if not is_own(folder, follow_symlinks=False):
        raise MachineError(f"{key}: {folder} belongs to another user; give another {key}=")
    status = folder.stat()
    problem = who_else_writes(status, folder, gets_files=True)
    if key == "run_dir" and problem:
        raise MachineError(f"{key}: {folder}: {problem}; or give another {key}=")
    if is_listed and key != "data_dir":
        is_of_trusted_group = status.st_mode & 0o020 and not problem
        _require_own_content(folder, key, status.st_gid if is_of_trusted_group else None)


def _require_own_content(folder: Path, key: str, group: int | None) -> None:
    """Others may have had write permission before, and `cp -a` keeps it. group: its members may
    have files there. Raises MachineError.
    """
    for path in map(Path, os.scandir(folder)):
        with contextlib.suppress(FileNotFoundError):  # a temporary file of another process
            status = path.lstat()
            if status.st_mode & 0o002 and not stat.S_ISLNK(status.st_mode):
                fix = f"run chmod -R o-w {shlex.quote(str(folder))}"
                raise MachineError(f"{key}: every user can write to {path}; {fix}")
            user = status.st_uid
            if not _is_trusted(user, path) and not (group and _is_member(user, group)):
                fix = f"remove it (rm -r {shlex.quote(str(path))}), or give another {key}="
                raise MachineError(f"{key}: {path} belongs to another user; {fix}")


def _is_member(user: int, group: int) -> bool:
    try:
        account = pwd.getpwuid(user)
    except KeyError:
        return False
    return group in os.getgrouplist(account.pw_name, account.pw_gid)


def _remove_lists(folder: Path) -> None:
    """Removes access control lists that a new folder has inherited: the kernel ignores the umask in
    favour of them.

    Another user who can write to the folder above can put a link or another folder of this user in
    its place. Links are not followed, and a folder with content is left unchanged.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            lists = [name for name in os.listxattr(descriptor) if name.startswith(LIST)]
            if not lists or os.listdir(descriptor):
                return
            for name in lists:
                os.removexattr(descriptor, name)
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(descriptor, 0o777 & ~mask)
        finally:
            os.close(descriptor)

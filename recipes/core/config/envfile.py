"""Env files: `NAME=value` lines with the same meaning for Python and for `set -a; . file` in dash and bash.

An env file says how a network is used, never which code runs. Nothing in it is evaluated. Text that a shell would expand,
split or execute is refused with the file, the line and the fix. Standard library only.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from os import PathLike, fspath
from pathlib import Path

from recipes.core import files
from recipes.core.errors import ConfigError, shown

MAX_BYTES = 64 * 1024
NOT_EXPANDED = "values are ASCII, and $, backquotes and backslashes are not expanded"
PATH_SHOWN = 300  # characters of a path that a message shows

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A POSIX shell takes each character listed here literally anywhere in an assignment; `~`, `*`, `{` and others need quotes.
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.,:/@%+=^-]")
_NOT_QUOTABLE = re.compile(r"[^ -~]|[$`\\]")

_SECRET_PART = re.compile(r"(?:API)?KEYS?|TOKENS?|SECRETS?|PASS(?:WD|WORD|PHRASE)?|CREDENTIALS?")
_REFUSED = re.compile(
    # Names that change which code runs.
    r"PATH|HOME|SHELL|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+|LD_\w+|DYLD_\w+|GCONV_PATH|GLIBC_TUNABLES|GIT_\w+|CC|CXX|CUDA_HOME"
    r"|TORCHINDUCTOR_CACHE_DIR|TORCH_EXTENSIONS_DIR|TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD|TRITON_\w*(?:PATH|DIR)"
    r"|\w*INJECTION\w*|OPENSSL_\w+|RDMAV_DRIVERS|IBV_DRIVERS|UCX_MODULE_DIR|OMP_TOOL_LIBRARIES|COMPILER_PATH|GCC_EXEC_PREFIX"
    # Every variable that bash 5.2 or dash reads as a setting, makes read-only, or assigns itself.
    r"|ENV|IFS|BASH\w*|SHELLOPTS|POSIXLY_CORRECT|PS[0-4]|PROMPT_\w+|CDPATH|GLOBIGNORE|EXECIGNORE|FUNCNAME|FUNCNEST"
    r"|OPTARG|OPTERR|OPTIND|UID|EUID|PPID|PWD|OLDPWD|SHLVL|RANDOM|SRANDOM|SECONDS|LINENO|EPOCH(?:SECONDS|REALTIME)"
    r"|HIST\w+|DIRSTACK|GROUPS|PIPESTATUS|COMP_\w+|COMPREPLY|READLINE_\w+|MAPFILE|REPLY|TMOUT|MAIL\w*|_"
    # Variables that Slurm or a launcher sets.
    r"|(?:CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|(?:SLURM|SLURMD|SBATCH|SRUN|SALLOC)_\w+"
    r"|(?:LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(?:LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_\w+|TORCHELASTIC_\w+"
    r"|OMPI_COMM_\w+|PMI_\w+|RECIPES_(?:BATCH|BY_CLOCK|LAUNCH|LINES|SPAWNED|LISTEN_FD|SCRIPT|CODE|CONTAINER\w*)"
)


class EnvFileError(ConfigError):
    """An env file, or its name, is invalid. The message is one line: the file and line, the problem, the fix."""


def parse(text: str, name: str) -> dict[str, str]:
    """Returns the settings in an env file's `text`, in the file's order. Nothing in it is expanded or executed.

    `name` is the file's name for messages. Raises EnvFileError at the first line that is not a comment, a blank line or
    a permitted `NAME=value`. The syntax is the part of POSIX.1-2017 (XCU 2.2, 2.6, 2.9.1) that contains no expansion.
    """
    settings: dict[str, str] = {}
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{shown(name, PATH_SHOWN)}:{number}"
        setting = _parse_line(line, where)
        if setting is None:
            continue
        variable, value = setting
        if variable in settings:
            raise EnvFileError(f"{where}: {variable} is already set on line {seen[variable]}; keep one of the two")
        settings[variable] = value
        seen[variable] = number
    return settings


def read(path: str | PathLike[str]) -> dict[str, str]:
    """Returns the settings in the env file at `path` (UTF-8, at most 64 KiB).

    Raises EnvFileError as `parse` does, and if the file is missing, unreadable, not an ordinary file, too large or not
    UTF-8.
    """
    name = fspath(path)
    data = _read_bytes(Path(name))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise EnvFileError(f"{shown(name, PATH_SHOWN)}:{number}: not UTF-8; save the file as UTF-8") from None
    return parse(text, name)


def apply(settings: Mapping[str, str], environ: MutableMapping[str, str]) -> dict[str, str]:
    """Adds to `environ` the settings whose names it does not have, and returns these settings.

    A variable that the user has set is unchanged, even if its value is empty.
    """
    added = {name: value for name, value in settings.items() if name not in environ}
    environ.update(added)
    return added


def files_for(network: str, root: Path, site_files: Sequence[str] = ()) -> list[Path]:
    """Returns the env files of a run, lowest precedence first: common, then the fabric's, then the site's.

    `root` is the folder of env files (`env/`). `network` is the name of a fabric (`root/<network>.env`), or a file if it
    contains a `/` or ends in `.env` (relative to the current folder), or empty for no fabric. `site_files` are relative
    to `root`. Raises EnvFileError for a fabric that `root` does not have. The files themselves are checked by `read`.
    """
    files = [root / "common.env"]
    if "/" in network or network.endswith(".env"):
        files.append(Path(os.path.expanduser(network)))  # Path.expanduser would raise for an unknown user
    elif network:
        files.append(_fabric_file(network, root))
    return files + [root / site_file for site_file in site_files]


def _fabric_file(network: str, root: Path) -> Path:
    fabrics = sorted({path.stem for path in root.glob("*.env")} - {"common"})
    if network in fabrics:
        return root / f"{network}.env"
    nearest = difflib.get_close_matches(network.lower(), fabrics, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    there = ", ".join(fabrics) if fabrics else "none"
    raise EnvFileError(
        f"network={shown(network)}: no such fabric in {shown(root, PATH_SHOWN)}; {hint}give one of: {there}"
    )


def _read_bytes(path: Path) -> bytes:
    name = shown(path, PATH_SHOWN)
    try:
        return files.read_bounded(path, MAX_BYTES)
    except FileNotFoundError:
        raise EnvFileError(f"{name}: no such file; check the path of the env file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise EnvFileError(f"{name}: cannot be read ({reason}); give the path of an env file") from None


def _parse_line(line: str, where: str) -> tuple[str, str] | None:
    """The line's name and value; None for a blank line or a comment."""
    if bad := next((one for one in line if not (one.isprintable() or one == "\t")), ""):
        raise EnvFileError(
            f"{where}: has the invisible character U+{ord(bad):04X}; save the file as plain UTF-8 with Unix line ends"
        )
    text = line.strip(" \t")
    if not text or text.startswith("#"):
        return None
    if re.match(r"export[ \t]", text):
        raise EnvFileError(f"{where}: starts with 'export'; remove this word")
    name, equals, value = line.partition("=")
    if not equals:
        raise EnvFileError(f"{where}: not a setting; write NAME=value, or # before a comment")
    if name != name.strip(" \t") or value[:1] in (" ", "\t"):
        raise EnvFileError(f"{where}: blanks before the name or around '='; write NAME=value without blanks")
    if not _NAME.fullmatch(name):
        raise EnvFileError(f"{where}: {name[:40]!r} is not a variable name; use letters, digits and _")
    _refuse_name(name, where)
    return name, _parse_value(value, f"{where}: {name}")


def is_secret(name: str) -> bool:
    """Whether a variable's value is a secret, by its name."""
    return any(_SECRET_PART.fullmatch(part) for part in name.upper().split("_"))


def _refuse_name(name: str, where: str) -> None:
    if _REFUSED.fullmatch(name):
        raise EnvFileError(
            f"{where}: {name} chooses which code runs, or belongs to the shell, to Slurm or to the launcher; remove it"
        )
    if is_secret(name):
        raise EnvFileError(f"{where}: {name} looks like a secret; env files are shared: export it in your own shell")


def _parse_value(value: str, where: str) -> str:
    """The value without its quotes. Messages never show a value, since it may be secret."""
    if value.startswith("'"):
        raise EnvFileError(f"{where} is in single quotes; use double quotes")
    if value.startswith('"'):
        return _parse_quoted(value[1:], where)
    if bad := _NOT_PLAIN.search(value):
        fix = f"put the whole value in double quotes, and comments on their own lines; {NOT_EXPANDED}"
        raise EnvFileError(f"{where} has {bad.group()!a} outside quotes; {fix}")
    return value


def _parse_quoted(text: str, where: str) -> str:
    body, quote, rest = text.partition('"')
    if bad := _NOT_QUOTABLE.search(body):
        raise EnvFileError(f"{where} has {bad.group()!a}; write the value itself; {NOT_EXPANDED}")
    if not quote:
        raise EnvFileError(f"{where} has no closing double quote on its line; add it, or write the value on one line")
    if rest:
        raise EnvFileError(f"{where} has text after the closing quote; write comments on their own lines")
    return body

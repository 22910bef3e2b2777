"""Env files: `NAME=value` lines with the same meaning for Python and for `set -a; . file` in dash
and bash.

An env file says how a network is used, never which code runs. Nothing in it is evaluated. Text that
a shell would expand, split or execute is refused with the file and the line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from os import PathLike
from pathlib import Path

from recipes.core import files, trust
from recipes.core.config import declare
from recipes.core.errors import ConfigError, shown

MAX_BYTES = 64 * 1024
PATH_SHOWN = 300  # characters of a path that a message shows

# The part of POSIX.1-2017 (XCU 2.2, 2.6, 2.9.1) without expansion: a shell takes each character
# here literally.
_SETTING = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)=([A-Za-z0-9_.,:/@%+=^-]*|"[ !#%-\[\]^_a-~]*")')
_COMMENT = re.compile(r"[ \t]*(#.*)?")
FORM = (
    "must be NAME=value or a comment; a value may have letters, digits and _.,:/@%+=^-, and "
    "between double quotes any other printable ASCII characters except $, backquotes, backslashes "
    "and double quotes (nothing is expanded)"
)

_SECRET_PART = re.compile(r"(?:API)?KEYS?|TOKENS?|SECRETS?|PASS(?:WD|WORD|PHRASE)?|CREDENTIALS?")
_REFUSED = re.compile(
    # Names that change which code runs.
    r"PATH|HOME|SHELL|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+|LD_\w+|DYLD_\w+|GCONV_PATH|GLIBC_TUNABLES|GIT_\w+|CC|CXX|CUDA_HOME"
    r"|TORCHINDUCTOR_CACHE_DIR|TORCH_EXTENSIONS_DIR|TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD|TRITON_\w*(?:PATH|DIR)"
    r"|\w*INJECTION\w*|OPENSSL_\w+|RDMAV_DRIVERS|IBV_DRIVERS|UCX_MODULE_DIR|OMP_TOOL_LIBRARIES|COMPILER_PATH|GCC_EXEC_PREFIX"
    r"|ENV|IFS|BASH\w*|SHELLOPTS|POSIXLY_CORRECT|PS[0-4]|PROMPT_\w+|CDPATH|GLOBIGNORE|EXECIGNORE|PWD|UID|EUID|PPID"
    # Variables that Slurm or a launcher sets.
    r"|(?:CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|(?:SLURM|SLURMD|SBATCH|SRUN|SALLOC)_\w+"
    r"|(?:LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(?:LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_\w+|TORCHELASTIC_\w+"
    r"|OMPI_COMM_\w+|PMI_\w+|RECIPES_(?:ATTEMPT|CHECK|CODE|CONTAINER\w*|LISTEN_FD|PYTHON|SPEC|STOP_NOTE|TASK)"
)


# What a file outside env/ may set: variables of networks, threads and messages. Other names may
# choose which code runs. So may these names if their value is a path.
_HARMLESS = re.compile(
    r"(?:NCCL|RCCL|OFI_NCCL|GLOO|TORCH_NCCL|TORCH_FR|TORCH_DISTRIBUTED|TORCH_CPP|UCX|FI|PSM[23]?|HFI|MLX[45]|EFA|CXI|SHARP|OMP|MKL)_\w+"
    r"|TORCH_SHOW_CPP_STACKTRACES|CUDA_DEVICE_MAX_CONNECTIONS|CUDA_LAUNCH_BLOCKING|MALLOC_ARENA_MAX|KMP_AFFINITY|(?:RDMAV|IBV)_FORK_SAFE"
    r"|PYTORCH_(?:CUDA_)?ALLOC_CONF"
)
# if the value is a path
_NAMES_A_FILE = re.compile(r"\w*(?:PLUGIN|LIB|PATH|DIR|DRIVER|MODULE|TOOL|CONF|COMPONENT)\w*")
_NEVER = re.compile(r"\w*(?:COMMAND|CMD|DEST|MAIL|FILE|RAS_ADDR)\w*")


def parse(text: str, name: str) -> dict[str, str]:
    """Returns the settings in an env file's `text`, in the file's order. Nothing in it is expanded
    or executed.

    `name` is the file's name for messages, which never show a value: it may be secret. Raises
    ConfigError at the first line that is not a comment, a blank line or a permitted `NAME=value`.
    """
    settings: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{shown(name, PATH_SHOWN)}:{number}"
        if not line.replace("\t", " ").isprintable():
            raise ConfigError(
                f"{where}: has an invisible character; save the file as plain UTF-8 with Unix line "
                "ends"
            )
        if _COMMENT.fullmatch(line):
            continue
        setting = _SETTING.fullmatch(line)
        if not setting:
            raise ConfigError(f"{where}: {FORM}")
        variable, value = setting.groups()
        if variable in settings:
            raise ConfigError(
                f"{where}: {variable} is set on an earlier line too; keep one of them"
            )
        if _REFUSED.fullmatch(variable):
            raise ConfigError(
                f"{where}: {variable} chooses which code runs, or belongs to the shell, "
                "to Slurm or to the launcher; remove it"
            )
        if any(_SECRET_PART.fullmatch(part) for part in variable.upper().split("_")):
            raise ConfigError(
                f"{where}: {variable} looks like a secret, and env files are shared; "
                "export it in your own shell"
            )
        settings[variable] = value.strip('"')
    return settings


def read(path: str | PathLike[str]) -> dict[str, str]:
    """Returns the settings in the env file at `path` (UTF-8, at most 64 KiB).

    Raises ConfigError as `parse` does, and if the file is missing, unreadable, not an ordinary
    file, too large or not UTF-8, or if another user can change it.
    """
    try:
        resolved = Path(os.path.realpath(path))
        problem = trust.problem_outside(resolved)
        text = files.read_bounded(resolved, MAX_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{shown(path, PATH_SHOWN)}: cannot be read ({shown(reason)}); give an env file"
        ) from None
    if problem:
        raise ConfigError(
            f"{shown(path, PATH_SHOWN)}: {shown(problem, PATH_SHOWN)}; "
            "or use a copy in env/ of your own clone"
        )
    return parse(text, str(path))


def require_harmless(settings: Mapping[str, str], name: str) -> None:
    """Raises ConfigError for a variable that only a file in env/ may set. name: the file's name for
    the message.
    """
    for variable, value in settings.items():
        is_path = _NAMES_A_FILE.fullmatch(variable) and re.search("[/.]", value)
        if not _HARMLESS.fullmatch(variable) or _NEVER.fullmatch(variable) or is_path:
            raise ConfigError(
                f"{shown(name, PATH_SHOWN)}: {variable} may choose which code runs or which file "
                "is written: set it in an env file in env/clusters/ of your clone, or export it "
                "in your own shell"
            )


def apply(settings: Mapping[str, str], environ: MutableMapping[str, str]) -> dict[str, str]:
    """Adds to `environ` the settings whose names it does not have, and returns these settings.

    A variable that the user has set is unchanged, even if its value is empty.
    """
    added = {name: value for name, value in settings.items() if name not in environ}
    environ.update(added)
    return added


def is_path(network: str) -> bool:
    """Whether ``network=`` is the path of an env file, and not the name of a fabric."""
    return "/" in network or network.endswith(".env")


def files_for(network: str, root: Path, site_files: Sequence[str] = ()) -> list[Path]:
    """Returns the env files of a run, lowest precedence first: common, then the fabric's, then the
    site's.

    `root` is the folder of env files (`env/`). `network` is the name of a fabric
    (`root/<network>.env`), or a file if it contains a `/` or ends in `.env` (relative to the
    current folder), or empty for no fabric. `site_files` are relative to `root`. Raises ConfigError
    for a fabric that `root` does not have. The files themselves are checked by `read`.
    """
    fabrics = sorted({path.stem for path in root.glob("*.env")} - {"common"})
    of_network = []
    if is_path(network):
        # Path.expanduser would raise for an unknown user
        of_network = [Path(os.path.expanduser(network))]
    elif network in fabrics:
        of_network = [root / f"{network}.env"]
    elif network:
        raise ConfigError(f"network={shown(network)}: {declare.choice(network, fabrics)}")
    return [root / "common.env", *of_network, *(root / site_file for site_file in site_files)]

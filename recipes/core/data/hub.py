"""Models of Hugging Face by a folder, or by the name that `recipes.prepare` fetched. Only `fetch`
downloads. No code of a model runs unless it is allowed.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

from recipes.core import errors, files, trust
from recipes.core.errors import InputError, MachineError

# files of a model that are fetched; of the weights only safetensors, which hold no code
FETCHED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py")
CLASS = re.compile(r"\w+\.\w+")
SHOWN = 16  # hexadecimal digits of a digest of code


def transformers() -> Any:
    """The module, without its log lines and progress bars. Raises InputError if it is missing."""
    module = errors.require("transformers", "llm")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


def fetch(name: str) -> Path:
    """Fetches a model into the cache of the Hugging Face hub, which verifies its files. Raises
    MachineError.
    """
    hub = errors.require("huggingface_hub", "llm", f"model={name}: ")
    try:
        folder = hub.snapshot_download(name, allow_patterns=FETCHED)
    except Exception as error:  # no internet, no such model, a full disk
        fix = "run this command on a machine with internet, and copy its folder $HF_HOME here"
        raise MachineError(f"model={name}: {errors.one_line(error, 120)}: {fix}") from None
    return find(str(folder))


def folder_of(model: str) -> Path:
    """The folder of a model on this machine. Raises MachineError if ``model`` is the name of one
    that was not fetched.
    """
    folder = Path(model).expanduser()
    if folder.is_dir() or folder.is_absolute():
        return folder
    hub = errors.require("huggingface_hub", "llm", f"model={model}: ")
    try:
        return Path(hub.snapshot_download(model, local_files_only=True))
    except (OSError, ValueError):
        raise MachineError(
            f"model={model}: is not in the cache of the Hugging Face hub: on a machine with "
            f"internet, run python -m recipes.prepare weights model={model} "
            "(it writes into $HF_HOME); or give the absolute path of a folder"
        ) from None


def find(model: str) -> Path:
    """The folder of a model, as `folder_of`. Raises InputError if it has no config, or no weights
    without code.
    """
    folder = folder_of(model)
    if not (folder / "config.json").is_file():
        fix = "give the folder of a model, as save_pretrained writes it"
        raise InputError(f"model={model}: {str(folder)!r} has no config.json: {fix}")
    if not any(folder.glob("*.safetensors")):
        fix = "give a copy in safetensors (save_pretrained of transformers 5 writes one)"
        pickles = [path.name for path in sorted(folder.glob("*.bin"))[:1]]
        why = f"but {pickles[0]}, a pickle, which can execute code" if pickles else "no weights"
        raise InputError(f"model={model}: {str(folder)!r} has no .safetensors, {why}: {fix}")
    require_plain(folder)
    return folder


def allows_code(model: str, folder: Path, allow_code: str) -> bool:
    """Whether the model's own code may run: if transformers lacks it, and ``allow_code`` is the
    digest of the folder's Python files. Raises InputError if it lacks it otherwise.
    """
    library = transformers()
    config = files.read_json(folder / "config.json")
    kind = str(config.get("model_type"))
    if kind in library.CONFIG_MAPPING:
        return False
    code = config.get("auto_map")
    # a class of a file in the folder itself, which is part of the digest
    if not isinstance(code, dict) or not all(CLASS.fullmatch(str(name)) for name in code.values()):
        problem = f"transformers {library.__version__} has no model_type {errors.shown(kind)}"
        raise InputError(f"model={model}: {problem}: install a newer one, or give another model=")
    digest = hashlib.sha256()
    sources = sorted(folder.rglob("*.py"))
    for source in sources:
        digest.update(f"{source.relative_to(folder)} {files.sha256(source)}\n".encode())
    allowed = digest.hexdigest()[:SHOWN]
    if allow_code != allowed:
        names = ", ".join(str(source.relative_to(folder)) for source in sources)
        raise InputError(
            f"model={model}: its config requires Python code ({names} in {folder}): "
            f"read it, then give allow_code={allowed}"
        )
    # transformers reads the files again, and executes a copy that it keeps there
    modules = Path(library.utils.HF_MODULES_CACHE)
    with files.writing_to(modules, "HF_MODULES_CACHE"):
        modules.mkdir(parents=True, exist_ok=True)
    for place in (*sources, modules):
        problem = trust.who_else_can_change(place)
        if problem:
            fix = "copy the model, or set HF_MODULES_CACHE to a folder that only you can write to"
            raise InputError(f"model={model}: {problem}, so its code is not executed: {fix}")
    return True


def require_plain(folder: Path) -> None:
    """Raises MachineError if a link of another user is in the folder of a model: it could lead to
    a private file of this user, and the run keeps copies of some files. Raises InputError for what
    is no file, such as a pipe.
    """
    for path in folder.rglob("*"):
        real = trust.resolved(path, to_same_owner=True)
        is_folder = path.is_dir() and not path.is_symlink()  # a linked one is not searched
        if not real.is_file() and not is_folder:
            raise InputError(f"{path}: is not a file: give a copy of the model without it")

"""Models of Hugging Face by a folder, or by the name that `recipes.prepare` fetched. Only `fetch`
downloads. No code of a model runs unless it is allowed.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.core import errors, files, trust
from recipes.core.errors import InputError, MachineError

# files of a model without its code; of the weights only safetensors, which hold no code either. Not
# those of a processor, which name other models.
WITHOUT_CODE = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "*.index*.json",
    "*.safetensors",
    "*.jinja",
    "*.txt",
    "*.model",
)
FETCHED = [*WITHOUT_CODE, "*.py"]
MOST_BYTES = 1 << 30  # of all files of a model but its weights
CLASS = re.compile(r"\w+\.\w+")
LONGEST_CLASS = 200  # characters
# settings with a "/" that transformers does not open; and those that name other files, code or
# settings, or that it passes to other libraries: timm opens a `checkpoint_path`
NAMES = re.compile(r"_?name_or_path|tokenizer_name|prefix")
PASSED_ON = re.compile(r"configuration_files|auto_map|attribute_map|model_args|.*_kwargs")
# settings of a tokenizer that transformers may open as files, wherever they are, or passes on
FILES = re.compile(r"vocab|merges|init_inputs|.*_(files?|spm|kwargs)")
SHOWN = 16  # hexadecimal digits of a digest of code


def transformers() -> Any:
    """The module, without its log lines and progress bars. Raises InputError if it is missing."""
    errors.require("jinja2", "llm")  # which renders chat templates
    module = errors.require("transformers", "llm")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    module.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # it does not ask whether code may run
    return module


def fetch(name: str) -> Path:
    """Fetches a model into the cache of the Hugging Face hub, which verifies its files. Raises
    InputError if the hub does not have it for this user, and MachineError.
    """
    hub = errors.require("huggingface_hub", "llm", f"model={name}: ")
    of_hub = errors.require("huggingface_hub.errors", "llm", f"model={name}: ")
    try:
        folder = hub.snapshot_download(name, allow_patterns=FETCHED)
    except (of_hub.HFValidationError, of_hub.RepositoryNotFoundError) as error:
        fix = "give its name on the Hugging Face hub; a gated or private model requires $HF_TOKEN"
        raise InputError(f"model={name}: {errors.one_line(error, 120)}: {fix}") from None
    except Exception as error:  # no internet, a full disk
        fix = "run this command on a machine with internet, and copy its folder $HF_HOME here"
        raise MachineError(f"model={name}: {errors.one_line(error, 120)}: {fix}") from None
    return find(str(folder))


def folder_of(model: str) -> Path:
    """The folder of a model on this machine. Raises MachineError if ``model`` is the name of one
    that was not fetched completely.
    """
    folder = Path(model).expanduser()
    if folder.is_dir() or folder.is_absolute():
        return folder
    hub = errors.require("huggingface_hub", "llm", f"model={model}: ")
    try:
        # huggingface_hub 2.4 refuses a folder without all of the model's files of these names
        return Path(hub.snapshot_download(model, allow_patterns=FETCHED, local_files_only=True))
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
    return folder


@contextlib.contextmanager
def opened(model: str) -> Iterator[Path]:
    """A temporary folder for transformers: copies of the small files of a model, as `folder_of`,
    without its code, and links to its weights, which are open. So nobody can exchange them after
    the checks.

    Raises MachineError for a link of another user, which could lead to a private file of this user.
    Raises InputError for what cannot be read, and for names of files outside the folder.
    """
    folder = folder_of(model)
    if not (model and folder.is_dir()):
        fix = "give the folder of a Hugging Face model"
        raise InputError(f"model={model!r}: is not a folder: {fix}")
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="recipes-"))
        # transformers names modules after the folder
        copy = trust.private_temporary(Path(temporary)) / folder.resolve().name
        _copy(folder, copy, stack)
        _require_names_inside(model, copy)
        yield copy


def _copy(folder: Path, copy: Path, stack: contextlib.ExitStack) -> None:
    """Makes ``copy`` for `opened`. stack: holds the open files."""
    copy.mkdir()
    patterns = (*WITHOUT_CODE, "additional_chat_templates/*.jinja")
    left = MOST_BYTES
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        target = copy / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.suffix == ".safetensors":
                descriptor = trust.without_links_of_others(str(path), os.O_RDONLY)
                stack.callback(os.close, descriptor)
                target.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
            else:
                real = _inside(path, folder)
                content = files.read_bounded(real, left, trust.without_links_of_others)
                left -= len(content)
                target.write_bytes(content)
        except InputError:
            raise
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            fix = "give a copy of the model without it, or another TMPDIR"
            raise InputError(f"{path}: cannot be copied to {copy} ({why}): {fix}") from None


def _inside(path: Path, folder: Path) -> Path:
    """A file of the model in ``folder``, without links. Raises MachineError for a link of another
    user, and InputError if it is in another folder, but for the files of the hub's cache: a copy
    of a folder has links of this user, and an export would publish the file.
    """
    real = trust.resolved(path, to_same_owner=True)
    home = Path(os.path.realpath(folder))
    is_of_cache = home.parent.name == "snapshots" and real.parent == home.parents[1] / "blobs"
    if not real.is_relative_to(home) and not is_of_cache:
        fix = shlex.join(["cp", "--remove-destination", str(real), str(path)])
        why = f"is a link to {real}, outside the folder of the model"
        raise InputError(f"{path}: {why}: if you may publish that file, run {fix}")
    return real


def _require_names_inside(model: str, copy: Path) -> None:
    """Raises InputError if the settings of the model may lead to a file or to code elsewhere. Drops
    such settings of a tokenizer: some versions of transformers prefer them to the files in the
    folder.
    """
    if (copy / "adapter_config.json").exists():  # names another model, which PEFT opens
        fix = "merge it into its model (merge_and_unload of PEFT), and give that folder"
        raise InputError(f"model={model}: is an adapter: {fix}")
    outside = list[str]()

    def collect(settings: dict[str, Any]) -> bool:
        for name, value in settings.items():
            is_path = not NAMES.fullmatch(name) and "/" in json.dumps(value)
            is_path |= name == "architecture" and ":" in str(value)  # local-dir: of timm
            is_passed_on = value and PASSED_ON.fullmatch(name)
            is_other = name == "tokenizer_class" and not _is_tokenizer(value)
            if is_path or is_passed_on or is_other:
                outside.append(name)
        return bool(settings)  # in place of the object, in the one around it

    for path in copy.glob("*.json"):
        is_tokenizer = path.name in ("tokenizer_config.json", "special_tokens_map.json")
        if not is_tokenizer and path.name != "config.json" and ".index." not in path.name:
            continue
        try:
            settings = json.loads(path.read_text("utf-8"))
            if not is_tokenizer and isinstance(settings, dict):
                settings.pop("auto_map", None)  # its own is for `allows_code`
                json.loads(json.dumps(settings), object_hook=collect)
        except (ValueError, RecursionError):
            raise InputError(f"model={model}: {path.name} is damaged: fetch it again") from None
        if is_tokenizer and isinstance(settings, dict):
            kept = {name: settings[name] for name in settings if not FILES.fullmatch(name)}
            path.write_text(json.dumps(kept))
            collect({"tokenizer_class": settings.get("tokenizer_class")})
    if outside:
        why = f"its {errors.shown(outside[0])} may lead to a file or to code outside its folder"
        raise InputError(f"model={model}: {why}: give a copy of the model without it")


def _is_tokenizer(name: object) -> bool:
    """Whether each class that transformers may open for a tokenizer_class is a tokenizer. It adds
    and removes the suffix Fast.
    """
    library = transformers()
    if len(str(name)) > LONGEST_CLASS:  # the search below takes the square of this time
        return False
    plain = re.sub("(Fast)+$", "", str(name))
    classes = [
        getattr(library, known) for known in (plain, f"{plain}Fast") if hasattr(library, known)
    ]
    return all(library.PreTrainedTokenizerBase in getattr(kind, "__mro__", ()) for kind in classes)


def allows_code(model: str, copy: Path, allow_code: str) -> bool:
    """Whether the model's own code may run: if transformers lacks it, and ``allow_code`` is the
    digest of the Python files of a folder that nobody else can change. Then these are linked into
    ``copy``, of `opened`. Raises InputError and MachineError if it lacks it otherwise.
    """
    library = transformers()
    config = files.read_json(copy / "config.json")
    kind = str(config.get("model_type"))
    if kind in library.CONFIG_MAPPING:
        return False
    code = config.get("auto_map")
    # a class of a file in the folder itself, which is part of the digest
    if not isinstance(code, dict) or not all(CLASS.fullmatch(str(name)) for name in code.values()):
        problem = f"transformers {library.__version__} has no model_type {errors.shown(kind)}"
        raise InputError(f"model={model}: {problem}: install a newer one, or give another model=")
    folder = Path(os.path.realpath(folder_of(model)))
    sources = python_files(folder)
    missing = {f"{name.partition('.')[0]}.py" for name in code.values()} - sources.keys()
    if missing:
        problem = f"its config requires {min(missing)}, which is missing"
        raise InputError(f"model={model}: {problem}: fetch it again, or give another one")
    needed = f"model={model}: its config requires Python code"
    digest = hashlib.sha256()
    try:
        for place in (folder, *sources.values()):
            if problem := trust.who_else_can_change(place):
                fix = "copy the folder, or its run, with cp -r, read the copy, and give it instead"
                raise InputError(f"{needed}, but {problem}: {fix}")
        for name, source in sources.items():
            digest.update(f"{name} {files.sha256(source)}\n".encode())
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)
    except OSError as error:
        problem = f"{error.filename} cannot be read ({error.strerror})"
        raise InputError(f"model={model}: {problem}: fetch it again, or remove it") from None
    allowed = digest.hexdigest()[:SHOWN]
    if allow_code != allowed:
        places = f"{', '.join(sources)} in {folder}"
        raise InputError(f"{needed} ({places}): read it, then give allow_code={allowed}")
    library.dynamic_module_utils.HF_MODULES_CACHE = _modules()
    return True


def python_files(folder: Path) -> dict[str, Path]:
    """The Python files in and below the folder of a model, without links, by their names in it."""
    names = sorted(str(source.relative_to(folder)) for source in folder.rglob("*.py"))
    return {name: Path(os.path.realpath(folder / name)) for name in names}


@functools.cache
def _modules() -> str:
    """The folder of this process to which transformers copies the code that it executes, instead of
    one of all processes, in which older copies may be writable by a group. Removed at exit.
    """
    temporary = tempfile.TemporaryDirectory(prefix="recipes-")
    atexit.register(temporary.cleanup)
    return str(trust.private_temporary(Path(temporary.name)))

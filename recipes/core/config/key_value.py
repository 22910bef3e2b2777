"""``key=value`` words, from a command line or from a YAML file. Their values are still text."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.core import files, trust
from recipes.core.config import declare
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.run_keys import RunKeys
from recipes.core.errors import ConfigError, MachineError, shown

# A config= file is often another user's, and holds keys of an experiment.
NOT_IN_FILE = {
    "recipe",
    "script",
    "program",
    "args",
    "workdir",
    "through",
    "launcher_args",
    "container",
    "container_runtime",
    "container_mounts",
    "environment",
    "allow_code",
    "extra",
    "cluster",
}
# It may be another user's, who decides the experiment and its size, and nothing else of a job or a
# run: not which files are written or deleted, which machine the ranks connect to, or who pays.
OF_ANY_FILE = {
    "nodes",
    "gpus_per_node",
    "gpu_type",
    "ranks_per_node",
    "cpus_per_rank",
    "time",
    "device",
    "variant",
}
ONLY_IN_OWN_FILE = (declare.names_of(JobKeys, RunKeys) - OF_ANY_FILE) | {"stage_dir"}
MAX_YAML = 1 << 16  # bytes of a file of keys; a larger one could take many seconds to read

Words = dict[str, str]  # values by name, as text


def read(argv: Sequence[str]) -> Words:
    """The values of the words and of the ``config=`` file, by their names. Raises ConfigError for a
    word that is not ``key=value``.
    """
    words = split(argv)
    if "config" not in words:
        return words
    file = words.pop("config")
    from_file = _from_file(Path(os.path.expanduser(file)), f"config={shown(file)}")
    if "config" in from_file:
        raise ConfigError(
            f"config={shown(from_file['config'])}: a config= file must not contain the key config; "
            "remove it"
        )
    if chooses := sorted(NOT_IN_FILE & _keys(from_file)):
        raise ConfigError(
            f"config={shown(file)}: sets {chooses[0]}, which decides what runs; "
            f"remove it, and give {chooses[0]}= itself"
        )
    return {**from_file, **words}


def _from_file(file: Path, label: str) -> Words:
    """The keys of a ``config=`` file. Raises ConfigError, also for a key that only the user's own
    file may set.
    """
    words = read_yaml(file, label)
    own_only = sorted(ONLY_IN_OWN_FILE & _keys(words))
    if not own_only:
        return words
    try:
        return read_own(Path(os.path.realpath(file)), label)
    except (OSError, MachineError) as error:
        name = own_only[0]
        raise ConfigError(
            f"{label}: sets {name}, which only your own file may set ({shown(error, 300)}); "
            f"remove it, and give {name}= itself"
        ) from None


def _keys(words: Words) -> set[str]:
    """The keys that ``words`` set, also as a sweep."""
    return {name.removeprefix("sweep.") for name in words}


def read_own(file: Path, label: str) -> Words:
    """As `read_yaml`, of a file as for `trust.open_own`. Raises also OSError and MachineError."""
    with trust.open_own(file) as own:
        # the file that was checked, also if another one takes its name meanwhile
        return read_yaml(Path(f"/proc/self/fd/{own.fileno()}"), label)


def read_yaml(file: Path, label: str) -> Words:
    """The keys of a ``config=`` file, or of a run's config.yaml, as words. label: names the file in
    a message. Raises ConfigError.
    """
    words = []
    for name, value in load_yaml(file, label).items():
        if isinstance(value, (dict, list)):
            raise ConfigError(
                f"{label}: '{shown(name)}' must be one plain value; write keys side by side, "
                "not nested"
            )
        words.append(f"{name}={value}")
    return split(words)


def split(argv: Sequence[str]) -> Words:
    """The values of ``key=value`` words by their names. Raises ConfigError for another word, and
    for a value that is not UTF-8.
    """
    words = Words()
    for word in argv:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"(sweep\.)?[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                f"'{shown(word)}' is not key=value; write key=value, "
                "without dashes in the key or blanks around ="
            )
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise ConfigError(
                f"{name}={shown(value)}: is not UTF-8; write it in UTF-8, or set PYTHONUTF8=1"
            )
        words[name] = value
    return words


def words_of(keys: Mapping[str, object]) -> list[str]:
    """The ``key=value`` words of keys, which `split` reads."""
    return [f"{name}={value}" for name, value in keys.items()]


def load_yaml(path: Path, label: str) -> dict[str, Any]:
    """The mapping in the file ``path``.

    A plain value is its text, not a value of YAML 1.1, which reads 1:00:00 as the number 3600.

    label: names the file in a message. Raises ConfigError.
    """
    import yaml  # OmegaConf's parser; imported only when a file is read, since the import is slow

    try:
        text = files.read_bounded(path, MAX_YAML).decode("utf-8")
        root = yaml.compose(text, yaml.BaseLoader)
        content = yaml.load(text, yaml.BaseLoader)
    except OSError as error:
        raise ConfigError(
            f"{label}: cannot be read ({error.strerror}); give the path of a YAML file"
        ) from None
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as error:
        reason = shown(" ".join(str(error).split()), 120)
        raise ConfigError(f"{label}: is not YAML ({reason}); write 'key: value' lines") from None
    if content in (None, ""):
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{label}: is not a mapping; write 'key: value' lines")
    names = [key.value for key, _ in root.value]
    if len(names) > len(content):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{label}: '{shown(twice)}' is set twice; remove one of the lines")
    return content

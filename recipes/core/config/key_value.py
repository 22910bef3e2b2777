"""``key=value`` words, from a command line or from a YAML file. Their values are still text."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.core.config import yaml_file
from recipes.core.errors import ConfigError, shown


def read(argv: Sequence[str]) -> dict[str, str]:
    """The words by their names, those of the ``config=`` file among them. Raises ConfigError for one that is not ``key=value``."""
    words = split(argv)
    if "config" not in words:
        return words
    file = words.pop("config")
    from_file = read_yaml(Path(os.path.expanduser(file)), f"config={shown(file)}")
    if "config" in from_file:
        raise ConfigError(
            f"config={shown(from_file['config'])}: is in a config= file; a config= file cannot name another"
        )
    return {**from_file, **words}


def read_yaml(file: Path, given: str) -> dict[str, str]:
    """The keys of a ``config=`` file, or of a run's config.yaml, as words. given: names the file in a message. Raises ConfigError."""
    words = []
    for name, value in yaml_file.load(file, given).items():
        if isinstance(value, (dict, list)):
            raise ConfigError(
                f"{given}: '{shown(name)}' must be one plain value; write the keys side by side, not nested"
            )
        words.append(f"{name}={value}")
    return split(words)


def split(argv: Sequence[str]) -> dict[str, str]:
    """The values of ``key=value`` words by their names. Raises ConfigError for another word, and for a value that is not UTF-8."""
    words: dict[str, str] = {}
    for word in argv:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"(sweep\.)?[A-Za-z_][A-Za-z0-9_]*", name):
            option = re.fullmatch(r"--?([A-Za-z_][A-Za-z0-9_-]*)(=.*)?", word, re.DOTALL)
            fix = "key=value, without blanks"
            if option:
                fix = f"{option[1].replace('-', '_')}{shown(option[2] or '=VALUE')}"
            raise ConfigError(f"'{shown(word)}' is not key=value; write {fix}")
        if "\0" in value or len(value) > 4096:
            raise ConfigError(f"{name}={shown(value)}: must have at most 4096 characters, and no NUL character")
        if any("\ud800" <= c <= "\udfff" for c in value):
            encoding = sys.getfilesystemencoding()
            fix = "write it in UTF-8" if encoding == "utf-8" else f"set PYTHONUTF8=1: this Python reads {encoding}"
            raise ConfigError(f"{name}={shown(value)}: is not UTF-8; {fix}")
        words[name] = value
    return words

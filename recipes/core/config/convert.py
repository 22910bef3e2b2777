"""Converts the text of keys to the types of their dataclass, and back."""

import dataclasses
import re
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any, cast

try:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
except ModuleNotFoundError as missing:
    fix = "activate your environment (. .venv/bin/activate), or type: make install"
    print(f"{sys.executable} has no module '{missing.name}': {fix}", file=sys.stderr)
    raise SystemExit(3) from None

from recipes.core.config import declare
from recipes.core.errors import ConfigError, shown


def build(cls: type, values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass ``cls``. OmegaConf converts the values; ``__post_init__`` checks them. Raises ConfigError."""
    merged = cast(DictConfig, OmegaConf.structured(cls))
    OmegaConf.set_readonly(merged, False)  # frozen dataclasses are read-only
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name, value in values.items():
        field = fields[name]
        refusal = ConfigError(f"{name}={shown(value)}: {_expected(field, str(value))}")
        if _is_misread(field, str(value)):
            raise refusal
        if isinstance(value, str):
            value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # not an interpolation of OmegaConf
        try:
            OmegaConf.update(merged, name, None if value == "null" and field.default is None else value)
        except (OmegaConfBaseException, RecursionError):
            raise refusal from None
    return cls(**{name: merged[name] for name in fields})


def _is_misread(field: "dataclasses.Field[Any]", text: str) -> bool:
    """Whether OmegaConf would give ``text`` an unexpected value.

    It takes any number but 0 for true, the digits of other scripts and 1_0 for numbers, ??? for a missing value, and ${…} for the
    value of another key.
    """
    if text == "???" or ("${" in text and field.type is not str):
        return True
    if field.type is bool and text.isdecimal():
        return text not in ("0", "1")
    return field.type in (int, int | None) and (not text.isascii() or "_" in text)


def _expected(field: "dataclasses.Field[Any]", text: str) -> str:
    kind = field.type if isinstance(field.type, type) else int
    if issubclass(kind, Enum):
        return declare.choice(text, kind.__members__)
    known = {bool: "must be true or false", int: "must be a whole number", float: "must be a number"}
    return known.get(kind, "must be a text")


def as_text(value: object) -> str:
    """A key's value as it is typed on the command line."""
    return value.name if isinstance(value, Enum) else str(value)


def plain(value: object) -> Any:
    """A key's value as it is written into a YAML file."""
    return value.name if isinstance(value, Enum) else value

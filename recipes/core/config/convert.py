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
    """An instance of the dataclass ``cls`` with those of ``values`` that are its keys. Raises ConfigError.

    OmegaConf converts the values.
    """
    merged = cast(DictConfig, OmegaConf.structured(cls))
    OmegaConf.set_readonly(merged, False)  # frozen dataclasses are read-only
    converted: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        given = values.get(field.name, field.default)
        value = None if given == "null" and field.default is None else given
        if isinstance(value, str):
            value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # not an interpolation of OmegaConf
        try:
            OmegaConf.update(merged, field.name, value)
            converted[field.name] = merged[field.name]  # raises for ???, OmegaConf's missing value
        except (OmegaConfBaseException, RecursionError):
            raise ConfigError(f"{field.name}={shown(given)}: {_expected(field, str(given))}") from None
    built = cls(**converted)
    declare.check(built)  # the recipe's __post_init__ may leave out super().__post_init__()
    return built


def _expected(field: "dataclasses.Field[Any]", text: str) -> str:
    kind = field.type if isinstance(field.type, type) else int
    if issubclass(kind, Enum):
        return declare.choice(text, kind.__members__)
    known = {bool: "must be true or false", int: "must be a whole number", float: "must be a number"}
    return known.get(kind, "must be text")


def plain(value: object) -> Any:
    """A key's value as it is written into a YAML file."""
    return value.name if isinstance(value, Enum) else value

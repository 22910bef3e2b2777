"""Declares a key as a dataclass field, and converts and checks its value by the declaration."""

import dataclasses
import difflib
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, cast

try:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
except ModuleNotFoundError as missing:
    fix = "activate your environment (. .venv/bin/activate), or type: make install"
    print(f"{sys.executable} has no module '{missing.name}': {fix}", file=sys.stderr)
    raise SystemExit(3) from None

from recipes.core.errors import ConfigError, shown

# a larger whole number could be written into a checkpoint, but not be read back
LARGEST = 2**63 - 1
# ends a line for some programs, controls a terminal, or is not UTF-8
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
NAME = r"[A-Za-z0-9_.+@=:-]{1,128}"
NAME_FORM = "letters, digits and _ . + @ = : - only"
NAMES = r"[A-Za-z0-9_.+@=:,-]{1,256}"


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest of ``known``, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def choice(word: str, known: Iterable[str]) -> str:
    """The rule for a value that must be one of ``known``, with the one closest to ``word``."""
    names = list(known)
    if len(names) == 1:
        return f"must be {names[0]}"
    return f"must be one of {', '.join(names)}{nearest(word, names)}"


def key(
    default: Any,
    help: str,
    *,
    low: float | None = 0,
    high: float | None = None,
    pattern: str = "",
    form: str = NAME_FORM,
    values: Sequence[str] = (),
    path: bool = False,
    may_change: bool = False,
    not_inherited: bool = False,
    instead: str = "",
) -> Any:
    """A dataclass field with what its check and ``--help`` need.

    low, high: the inclusive range of a number; None: no limit. pattern: a regular expression for
    the whole of a text, which may be empty if the default is. form: describes the pattern in a
    message, after "must be". values: the only valid texts. path: the value is a path, which becomes
    absolute when a job is submitted. may_change: a resumed run may have another value (so may
    paths). not_inherited: a resumed run does not inherit the value. instead: what to give to sbatch
    instead of this key.
    """
    meta = locals()  # each argument by its name
    return dataclasses.field(default=meta.pop("default"), metadata=meta)


def default(cls: type, name: str, value: Any) -> Any:
    """The field ``name`` of the dataclass ``cls`` with another default."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    return dataclasses.field(default=value, metadata=fields[name].metadata)


def may_change(keys: type) -> set[str]:
    """The keys of a dataclass that may have another value when a run is resumed."""
    # of all recipes in earlier versions
    return declared("may_change", keys) | declared("path", keys) | {"num_workers"}


def declared(flag: str, *classes: type) -> set[str]:
    """The keys of dataclasses that they or a base class declare with the flag ``flag`` of `key`,
    such as ``path``.
    """
    bases = (base for cls in classes for base in cls.__mro__ if dataclasses.is_dataclass(base))
    fields = (field for base in bases for field in dataclasses.fields(base))
    return {field.name for field in fields if field.metadata.get(flag)}


def check(field: "dataclasses.Field[Any]", value: object) -> None:
    """Checks the value of a key against the range, pattern or values that ``field`` declares.
    Raises ConfigError.
    """
    problem = ""
    if isinstance(value, str):
        problem = _problem_of_text(field, value)
    elif isinstance(value, (int, float)):
        problem = _problem_of_number(field, value)
    if problem:
        raise ConfigError(f"{field.name}={shown(value)}: {problem}")


def _problem_of_number(field: "dataclasses.Field[Any]", value: float) -> str:
    low = field.metadata.get("low")
    high = field.metadata.get("high")
    if high is None and isinstance(value, int):
        high = LARGEST
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if low is not None and value < low:
        return f"must be at least {low:g}"
    if high is not None and value > high:
        return f"must be at most {high:g}"
    return ""


def _problem_of_text(field: "dataclasses.Field[Any]", value: str) -> str:
    meta = field.metadata
    pattern = meta.get("pattern") if value or field.default else ""
    if CONTROL.search(value):
        return "contains a control character, such as a newline; remove it"
    if pattern and not re.fullmatch(pattern, value, re.ASCII):
        return f"must be {meta['form']}"
    if meta.get("values") and value not in meta["values"]:
        return choice(value, meta["values"])
    if value.startswith("~") and os.path.expanduser(value) == value:
        return "the home folder that ~ stands for is unknown; write the absolute path"
    return ""


def build(cls: type, values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass ``cls`` with those of ``values`` that are its keys, each of them
    checked. Raises ConfigError.

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
            raise ConfigError(
                f"{field.name}={shown(given)}: {_expected(field, str(given))}"
            ) from None
        check(field, converted[field.name])
    return cls(**converted)


def _expected(field: "dataclasses.Field[Any]", text: str) -> str:
    kind = field.type if isinstance(field.type, type) else int
    if issubclass(kind, Enum):
        return choice(text, kind.__members__)
    known = {
        bool: "must be true or false",
        int: "must be a whole number",
        float: "must be a number",
    }
    hint = f"; sweep.{field.name}= of launch.py starts a run for each value" if "," in text else ""
    return known.get(kind, "must be text") + hint


def plain(value: object) -> Any:
    """The value of a key for a YAML file: the name of an enum's member, else the value itself."""
    return value.name if isinstance(value, Enum) else value


def names_of(*classes: type) -> set[str]:
    """The names of the keys of dataclasses."""
    return {field.name for cls in classes for field in dataclasses.fields(cls)}

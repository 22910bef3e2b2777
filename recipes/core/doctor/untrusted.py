"""Values in JSON from a node that may be broken. Each function accepts any value, and any names of keys that lead into it."""

from typing import Any

from recipes.core.errors import shown

LONGEST = 300  # characters of a text


def value_at(value: object, *names: str) -> Any:
    """The value under ``names``, one within the other; None where it is missing."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def dict_at(value: object, *names: str) -> dict[str, Any]:
    found = value_at(value, *names)
    return found if isinstance(found, dict) else {}


def list_at(value: object, *names: str) -> list[Any]:
    found = value_at(value, *names)
    return found if isinstance(found, list) else []


def dicts_at(value: object, *names: str) -> list[dict[str, Any]]:
    """The dictionaries in a list."""
    return [one for one in list_at(value, *names) if isinstance(one, dict)]


def text_at(value: object, *names: str, limit: int = LONGEST) -> str:
    """A value as part of a message; "" where it is missing."""
    found = value_at(value, *names)
    return "" if found is None else shown(found, limit)


def is_number(value: object) -> bool:
    """Whether calculations with it are safe. JSON has integers of any length, too."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def is_positive(value: object) -> bool:
    return is_number(value) and value > 0  # type: ignore[operator]

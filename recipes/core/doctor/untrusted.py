"""Values in JSON from a node that may be broken: each function accepts anything."""

from typing import Any

from recipes.core.errors import shown


LONGEST = 300  # characters of a text


def text(value: object) -> str:
    """A value as text for a message; "" for None."""
    return shown("" if value is None else value, LONGEST)


def as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def is_number(value: object) -> bool:
    """Whether it is one that can be counted with: JSON has whole ones without an end, too."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def is_positive(value: object) -> bool:
    return is_number(value) and value > 0  # type: ignore[operator]

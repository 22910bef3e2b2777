"""Numbers in variables of the environment, with a message that says how to correct them."""

import re
from collections.abc import Mapping

from recipes.core.errors import ConfigError, shown

Environ = Mapping[str, str]


def number(
    environ: Environ,
    name: str,
    *,
    default: int | None = None,
    minimum: int = 0,
    below: tuple[str, int] | None = None,
    fix: str = "correct it or unset it",
) -> int:
    """The value of a variable as a whole number.

    below: what the number must be less than, in words and as a number. fix: ends each message.
    Raises ConfigError if the variable is not set and has no default, is not a plain decimal number,
    or is out of range.
    """
    if name not in environ:
        if default is None:
            raise ConfigError(f"{name} is not set: {fix}")
        return default
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < minimum:
        raise ConfigError(
            f"{name}={shown(text)}: must be a whole number of at least {minimum}: {fix}"
        )
    if below and int(text) >= below[1]:
        raise ConfigError(f"{name}={text}: must be less than {below[1]} ({below[0]}): {fix}")
    return int(text)


def require_equal(environ: Environ, name: str, value: int) -> None:
    """Raises ConfigError if a variable is set to another number than ``value``, which follows from
    the launcher.
    """
    if name in environ and number(environ, name) != value:
        raise ConfigError(
            f"{name}={environ[name]}: must be {value} here: unset it, "
            "or start the ranks with srun or torchrun"
        )

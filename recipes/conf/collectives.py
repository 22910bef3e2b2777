"""Keys of the recipe collectives."""

from dataclasses import dataclass
from enum import Enum

from recipes.core.config.declare import choice, key
from recipes.core.config.run_keys import RecipeKeys
from recipes.core.errors import ConfigError, shown

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SIZE = r"\d{1,12}[KMG]?"
OPERATIONS = (
    "send_recv",
    "broadcast",
    "reduce",
    "all_reduce",
    "gather",
    "scatter",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)

Mode = Enum("Mode", "learn bench")


@dataclass(frozen=True)
class Config(RecipeKeys):
    mode: Mode = key(
        Mode.learn,
        "learn: explain and check each operation; bench: measure the speed of operations at "
        "several sizes",
    )
    operations: str = key(
        "",
        f"bench: operations, separated by commas; default: {', '.join(OPERATIONS)}",
        pattern=r"[a-z_]+(,[a-z_]+)*",
        form="names separated by commas",
    )
    sizes: str = key(
        "4..64M",
        "bench: sizes of the whole array in bytes, as FROM..TO; each size is four times the "
        "previous one",
        pattern=rf"{SIZE}\.\.{SIZE}",
        form="FROM..TO, such as 4..64M or 1M..1G",
    )
    seconds: float = key(
        1.0,
        "bench: approximate duration of the measurement of an operation at one size, in seconds",
        low=0.01,
        high=3600,
    )

    def __post_init__(self) -> None:
        for name in self.chosen_operations():
            if name not in OPERATIONS:
                raise ConfigError(
                    f"operations={shown(self.operations)}: {choice(name, OPERATIONS)}"
                )
        if not sizes_of(self.sizes):
            raise ConfigError(
                f"sizes={shown(self.sizes)}: FROM must be at least 1, and TO at least FROM"
            )

    def chosen_operations(self) -> tuple[str, ...]:
        return tuple(self.operations.split(",")) if self.operations else OPERATIONS


def bytes_of(size: str) -> int:
    """16M is 16 · 2^20."""
    digits = size.rstrip("KMG")
    return int(digits) * UNITS[size[len(digits) :]]


def sizes_of(text: str) -> list[int]:
    """The sizes in bytes that ``sizes=`` names, in its order. Empty if FROM is 0 or above TO."""
    first, last = map(bytes_of, text.split(".."))
    return [first * 4**step for step in range(40) if 0 < first * 4**step <= last]

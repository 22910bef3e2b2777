"""Keys of the recipe collectives."""

from dataclasses import dataclass
from enum import Enum

from recipes.core.config.declare import key, nearest
from recipes.core.config.run_keys import RecipeKeys
from recipes.core.errors import ConfigError, shown

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SIZE = r"\d{1,12}[KMG]?"
SIZES = rf"{SIZE}\.\.{SIZE}|{SIZE}(,{SIZE})*"
LARGEST = 1 << 36
OPERATIONS = (
    "send_recv", "broadcast", "reduce", "all_reduce", "gather", "scatter", "all_gather", "reduce_scatter", "all_to_all",
)  # fmt: skip


class Mode(Enum):
    learn = "learn"
    bench = "bench"


@dataclass(frozen=True)
class Config(RecipeKeys):
    mode: Mode = key(Mode.learn, "learn: explain and check each operation; bench: time operations over sizes")
    operations: str = key(
        "", f"bench: operations, separated by commas; default: {', '.join(OPERATIONS)}", pattern=r"[a-z_]+(,[a-z_]+)*",
        form="names separated by commas",
    )  # fmt: skip
    sizes: str = key(
        "4..64M", "bench: sizes of the whole array in bytes, as FROM..TO (each size is four times the previous one), or a list such as 1K,64M",
        pattern=SIZES, form="FROM..TO or a list, such as 4..64M or 4,1K,64M",
    )  # fmt: skip
    seconds: float = key(1.0, "bench: seconds of timing per size and operation, approximately", low=0.01, high=3600)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.chosen_operations():
            if name not in OPERATIONS:
                raise ConfigError(
                    f"operations={shown(self.operations)}: there is no '{shown(name)}', only {', '.join(OPERATIONS)}"
                    f"{nearest(name, OPERATIONS)}"
                )
        try:
            sizes_of(self.sizes)
        except ValueError as error:
            raise ConfigError(f"sizes={shown(self.sizes)}: {error}") from None

    def chosen_operations(self) -> tuple[str, ...]:
        return tuple(self.operations.split(",")) if self.operations else OPERATIONS


def bytes_of(size: str) -> int:
    """16M is 16 · 2^20."""
    digits = size.rstrip("KMG")
    return int(digits) * UNITS[size[len(digits) :]]


def sizes_of(text: str) -> tuple[int, ...]:
    """The sizes in bytes that ``sizes=`` names, in its order. Raises ValueError with the reason if one is out of range."""
    first, dots, last = text.partition("..")
    sizes = [bytes_of(size) for size in ((first, last) if dots else text.split(","))]
    if not all(1 <= size <= LARGEST for size in sizes):
        raise ValueError("a size is 1 to 64G")
    if not dots:
        return tuple(sizes)
    if sizes[0] > sizes[1]:
        raise ValueError("TO must be at least FROM")
    found = [sizes[0]]
    while 4 * found[-1] <= sizes[1]:
        found.append(4 * found[-1])
    return tuple(found)

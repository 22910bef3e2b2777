"""Keys of the recipe collectives."""

import re
from dataclasses import dataclass
from enum import Enum

from recipes.core.config.declare import key, nearest
from recipes.core.config.run_keys import RecipeKeys
from recipes.core.errors import ConfigError, shown

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SIZE = r"\d{1,12}[KMG]?"
SIZES = rf"{SIZE}\.\.{SIZE}(:\d{{1,4}})?|{SIZE}(,{SIZE})*"
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
        "4..1G", "bench: sizes of the whole array in bytes, as FROM..TO (each size is four times the previous one), FROM..TO:FACTOR, or a list such as 1K,64M",
        pattern=SIZES, form="FROM..TO, FROM..TO:FACTOR or a list, such as 4..64M, 1K..1G:2 or 4,1K,64M",
    )  # fmt: skip
    seconds: float = key(1.0, "bench: seconds of timing per size and operation, approximately", low=0.01, high=3600)
    pairs: bool = key(False, "time every pair of nodes (on a single node: of ranks) and draw the matrix")
    pair_size: str = key(
        "16M", "bytes that a pair sends in each direction", pattern=SIZE, form="a size such as 64K, 16M or 1G"
    )

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
        if not 1 <= bytes_of(self.pair_size) <= LARGEST:
            raise ConfigError(f"pair_size={shown(self.pair_size)}: must be 1 to 64G")

    def chosen_operations(self) -> tuple[str, ...]:
        return tuple(self.operations.split(",")) if self.operations else OPERATIONS


def bytes_of(size: str) -> int:
    """16M is 16 · 2^20."""
    found = re.fullmatch(r"(\d+)([KMG]?)", size)
    assert found
    return int(found[1]) * UNITS[found[2]]


def sizes_of(text: str) -> tuple[int, ...]:
    """The sizes in bytes that ``sizes=`` names, in its order. Raises ValueError, in words, for a range that has none."""
    first, dots, rest = text.partition("..")
    if not dots:
        sizes = tuple(bytes_of(size) for size in text.split(","))
    else:
        last, _, factor = rest.partition(":")
        size, end, step = bytes_of(first), bytes_of(last), int(factor or 4)
        if step < 2 or not 0 < size <= end:
            raise ValueError("must have FROM of at least 1, TO of at least FROM, and a FACTOR of at least 2")
        found = []
        while size <= min(end, LARGEST):
            found.append(size)
            size *= step
        sizes = tuple(found)
        if end > LARGEST:
            raise ValueError("must be at most 64G")
    if not all(1 <= size <= LARGEST for size in sizes):
        raise ValueError("a size is 1 to 64G")
    return sizes

"""How long launch.py takes on a login node, for a command that is right and one that is not,
against importing torch alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial

from tests.benchmarks.measure import Figure, Size, interleaved
from tests.helpers import ROOT

RIGHT = ("launch.py", "recipe=mnist", "nodes=2", "launcher=print")
MISSPELT = ("launch.py", "recipe=mnist", "epoch=3", "launcher=print")
IMPORT_TORCH = ("-c", "import torch")


def figures(size: Size) -> list[Figure]:
    values = interleaved(
        size.rounds,
        {
            "right": partial(wall_s, RIGHT, says="#SBATCH --nodes=2"),
            "misspelt": partial(wall_s, MISSPELT, status=2, says="'epochs'"),
            "torch": partial(wall_s, IMPORT_TORCH),
        },
    )
    return [
        Figure(
            f"login, {name}",
            "s",
            " ".join(("python", *words)),
            "import torch",
            "<= 0.20",
            values[key],
            values["torch"],
        )
        for key, name, words in (
            ("right", "a right command", RIGHT),
            ("misspelt", "a misspelt key", MISSPELT),
        )
    ]


def wall_s(words: tuple[str, ...], status: int = 0, says: str = "") -> float:
    """Seconds of a whole Python process. Raises RuntimeError unless it ends with ``status`` and its
    output has ``says``.
    """
    environ = {name: value for name, value in os.environ.items() if name != "RECIPES_CLUSTER"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - start
    if done.returncode != status or says not in done.stdout + done.stderr:
        raise RuntimeError(
            f"{' '.join(words)}: status {done.returncode}, not {status} and {says!r}: {done.stderr}"
        )
    return seconds

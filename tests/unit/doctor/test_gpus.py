"""Findings on a node's GPUs, by what Slurm and torch report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes.core.doctor import commands, probes
from recipes.core.doctor.probes import Surroundings
from recipes.core.doctor.verdict import Finding
from recipes.core.place import ranks
from recipes.core.place.ranks import RankInfo

GIB = 2**30


def info(in_slurm: bool = True) -> RankInfo:
    return ranks.detect({"RANK": "0", "WORLD_SIZE": "1", **({"SLURM_JOB_ID": "7"} if in_slurm else {})})


def card(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "index": index, "uuid": f"GPU-{index}", "name": "H200", "free": 126 * GIB, "total": 140 * GIB, "correct": True,
        "tflops": 700.0, **changes,
    }  # fmt: skip


def findings(
    cards: Sequence[dict[str, Any]] | None, why: str = "", in_slurm: bool = True, smi: str = "", **environ: str
) -> list[Finding]:
    """The findings where the commands answer so; cards: what torch sees, None where it does not answer."""

    def ask(command: Sequence[str], timeout_s: float) -> tuple[str, str]:
        assert timeout_s <= 60
        if command[0] == "nvidia-smi":
            return smi, ""
        return ("", why) if cards is None else (json.dumps(cards), "")

    here = Surroundings({"SLURM_GPUS_ON_NODE": "8" if in_slurm else "", **environ}, info(in_slurm), Path())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "run", ask)
        return probes.gpus(here)[1]


EIGHT = [card(i) for i in range(8)]


def test_healthy_gpus_are_no_finding() -> None:
    assert findings(EIGHT) == []
    assert findings([], in_slurm=False) == []
    assert findings([card(0)], CUDA_VISIBLE_DEVICES="3") == []  # each task may have its own


def test_missing_gpus() -> None:
    (found,) = findings(EIGHT[:7])
    assert (found.what, found.bad, found.leave_out) == ("Slurm granted 8 GPUs and torch sees 7", True, True)
    (found,) = findings([], SLURM_GPUS_ON_NODE="")  # not the fault of the node
    assert (found.what, found.bad, found.leave_out) == ("Slurm granted 0 GPUs and torch sees 0", True, False)


@pytest.mark.parametrize(
    ("changed", "expected", "is_bad"),
    [
        ({"correct": False}, "GPU 2 (GPU-2) returns a wrong matrix product", True),
        (
            {"error": "CUDA error: an illegal memory access"},
            "GPU 2 (GPU-2) cannot be used: CUDA error: an illegal",
            True,
        ),
        ({"free": 125 * GIB}, "GPU 2 (GPU-2) has 125.0 of 140.0 GiB free", False),
    ],
)
def test_a_gpu_that_computes_wrongly_is_a_finding(changed: dict[str, Any], expected: str, is_bad: bool) -> None:
    (found,) = findings([*EIGHT[:2], card(2, **changed), *EIGHT[3:]])
    assert found.what.startswith(expected)
    assert found.bad is is_bad


def test_memory_errors() -> None:
    (found,) = findings(EIGHT, smi="".join(f"GPU-{i}, {5 if i == 4 else '[N/A]'}\n" for i in range(8)))
    what = "GPU 4 (GPU-4) has had 5 uncorrected memory errors since the driver was loaded"
    assert (found.what, found.bad) == (what, True)


def test_a_driver_that_does_not_answer() -> None:
    (found,) = findings(None, why="python did not answer in 60 s")
    assert (found.what, found.bad) == ("its GPUs could not be tested (python did not answer in 60 s)", True)
    assert findings(None, why="no driver", in_slurm=False) == []  # no GPU was granted

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
    return ranks.detect(
        {"RANK": "0", "WORLD_SIZE": "1", **({"SLURM_JOB_ID": "7"} if in_slurm else {})}
    )


def card(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "H200",
        "free": 126 * GIB,
        "total": 140 * GIB,
        "correct": True,
        "tflops": 700.0,
        **changes,
    }


def findings(
    cards: Sequence[dict[str, Any]] | None,
    why: str = "",
    in_slurm: bool = True,
    smi: str = "",
    **environ: str,
) -> list[Finding]:
    """The findings where the commands answer so; cards: what torch sees, None where it does not
    answer.
    """

    def ask(command: Sequence[str], timeout_s: float) -> tuple[str, str]:
        assert timeout_s <= 60
        if command[0] == "nvidia-smi":
            return smi, ""
        return ("", why) if cards is None else (json.dumps(cards), "")

    here = Surroundings(
        {"SLURM_GPUS_ON_NODE": "8" if in_slurm else "", **environ}, info(in_slurm), Path()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "run", ask)
        return probes._run(probes.gpus, here)[1]


EIGHT = [card(i) for i in range(8)]


def test_healthy_gpus_are_no_finding() -> None:
    assert findings(EIGHT, smi="Failed to initialize NVML\n") == []
    assert findings([], in_slurm=False) == []
    assert findings(None, why="no driver", in_slurm=False) == []  # no GPU was granted
    assert findings([card(0)], CUDA_VISIBLE_DEVICES="3") == []  # each task may have its own


@pytest.mark.parametrize(
    ("granted", "count"),
    [
        ("8", None),
        ("4", None),
        ("", 8),
    ],
)
def test_the_numbers_of_granted_gpus_may_differ_between_nodes(
    monkeypatch: pytest.MonkeyPatch, granted: str, count: int | None
) -> None:
    """Numbers that are reported must be equal on all nodes."""

    def ask(command: Sequence[str], timeout_s: float) -> tuple[str, str]:
        return "" if command[0] == "nvidia-smi" else json.dumps(EIGHT), ""

    monkeypatch.setattr(commands, "run", ask)
    here = Surroundings({"SLURM_GPUS_ON_NODE": granted}, info(), Path())
    facts, _ = probes._run(probes.gpus, here)
    assert facts["gpu_count"] == count


def test_missing_gpus() -> None:
    (finding,) = findings(EIGHT[:7])
    assert finding.what == "Slurm granted 8 GPUs and torch sees 7"
    assert finding.bad is True
    assert finding.leave_out is True
    (finding,) = findings([], SLURM_GPUS_ON_NODE="")  # not the fault of the node
    assert finding.what == "Slurm granted 0 GPUs and torch sees 0"
    assert finding.bad is True
    assert finding.leave_out is False


def third(**changed: Any) -> list[dict[str, Any]]:
    return [*EIGHT[:2], card(2, **changed), *EIGHT[3:]]


SMI = "".join(f"GPU-{i}, {5 if i == 4 else '[N/A]'}\n" for i in range(8))


@pytest.mark.parametrize(
    ("cards", "said", "expected", "is_bad"),
    [
        (third(correct=False), {}, "GPU 2 (GPU-2) returns a wrong matrix product", True),
        (
            third(error="CUDA error: an illegal x"),
            {},
            "GPU 2 (GPU-2) cannot be used: CUDA error: an illegal",
            True,
        ),
        (third(free=125 * GIB), {}, "GPU 2 (GPU-2) has 125.0 of 140.0 GiB free", False),
        (
            EIGHT,
            {"smi": SMI},
            "GPU 4 (GPU-4) has had 5 uncorrected memory errors since the driver was loaded",
            True,
        ),
        (
            None,
            {"why": "no answer in 60 s"},
            "its GPUs could not be tested (no answer in 60 s)",
            True,
        ),
    ],
)
def test_a_faulty_gpu_or_driver_is_a_finding(
    cards: Any, said: dict[str, str], expected: str, is_bad: bool
) -> None:
    (finding,) = findings(cards, **said)
    assert finding.what.startswith(expected)
    assert finding.bad is is_bad

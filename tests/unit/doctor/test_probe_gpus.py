"""Findings on a node's GPUs, by what Slurm, nvidia-smi and torch report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes.core.doctor import commands, probe_gpus
from recipes.core.doctor.node import Finding, Surroundings
from recipes.core.place import ranks
from recipes.core.place.ranks import RankInfo

GIB = 2**30


def info(local_rank: int = 0, local_world_size: int = 8, in_slurm: bool = True) -> RankInfo:
    environ = {"RANK": str(local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(local_world_size)}
    environ |= {"LOCAL_WORLD_SIZE": str(local_world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12345"}
    environ |= {"SLURM_JOB_ID": "7"} if in_slurm else {}
    found = ranks.detect(environ)
    assert found.in_slurm is in_slurm
    return found


def card(index: int, **changes: Any) -> dict[str, Any]:
    known = {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "H200",
        "free": 139 * GIB,
        "total": 140 * GIB,
        "correct": True,
        "tflops": 700.0,
    }
    return {**known, **changes}


def smi(index: int, errors: str = "0") -> str:
    return f"GPU-{index}, {errors}\n"


def findings(
    cards: Sequence[dict[str, Any]] | None, smi_text: str = "", on_cpu: bool = False, why: str = "",
    place: RankInfo | None = None, **environ: str,
) -> list[Finding]:  # fmt: skip
    """The findings where the commands answer so; cards: what torch sees, None where it does not answer."""

    def ask(command: Sequence[str], timeout_s: float) -> tuple[str, str]:
        assert timeout_s <= 60
        text = " ".join(command)
        if "gpucheck" in text:
            return ("", why) if cards is None else (json.dumps(cards), "")
        return smi_text, ""

    here = Surroundings({"SLURM_GPUS_ON_NODE": "8", **environ}, place or info(), Path(), on_cpu=on_cpu)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "run", ask)
        return probe_gpus.examine(here)[1]


def test_eight_healthy_gpus_are_no_finding() -> None:
    assert findings([card(i) for i in range(8)], "".join(map(smi, range(8)))) == []


def test_eight_granted_and_seven_visible() -> None:
    (found,) = findings([card(i) for i in range(7)])
    assert found.what == "Slurm granted 8 GPUs and torch sees 7"
    assert found.bad
    assert found.leave_out
    assert "nvidia-smi -L there; sbatch --exclude=" in found.fix
    (found,) = findings([card(i) for i in range(7)], CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")
    assert found.what == "CUDA_VISIBLE_DEVICES names 8 GPUs and torch sees 7"


def test_none_visible() -> None:
    (found,) = findings([])
    assert (found.what, found.bad) == ("Slurm granted 8 GPUs and torch sees 0", True)
    (found,) = findings([], SLURM_GPUS_ON_NODE="")
    assert (found.what, found.bad, found.leave_out) == ("Slurm granted 0 GPUs and torch sees 0", True, False)


def test_without_granted_gpus_or_on_the_cpu_no_gpu_is_missing() -> None:
    assert findings([], on_cpu=True) == []
    assert findings([], SLURM_GPUS_ON_NODE="", place=info(in_slurm=False)) == []


def test_gpus_that_torch_does_not_see_where_nobody_has_granted_any() -> None:
    at_home = {"SLURM_GPUS_ON_NODE": "", "place": info(0, 1, in_slurm=False)}
    eight = "".join(map(smi, range(8)))
    (found,) = findings([], eight, **at_home)
    assert (found.what, found.bad) == ("nvidia-smi shows 8 GPUs and torch sees 0", True)
    assert findings([card(0)], eight, **at_home) == []  # one may be cut into slices
    assert findings([], eight, CUDA_VISIBLE_DEVICES="", **at_home) == []


def test_each_task_may_have_its_own_gpu() -> None:
    assert findings([card(0)], CUDA_VISIBLE_DEVICES="3") == []


@pytest.mark.parametrize(
    ("changed", "expected", "is_bad"),
    [
        ({"correct": False}, "GPU 2 (GPU-2) computes a matrix product wrongly", True),
        (
            {"error": "CUDA error: an illegal memory access"},
            "GPU 2 (GPU-2) cannot be used: CUDA error: an illegal",
            True,
        ),
        ({"free": 60 * GIB}, "GPU 2 (GPU-2) has 60.0 of 140.0 GiB free", False),
    ],
)
def test_a_gpu_that_computes_wrongly_is_a_finding(changed: dict[str, Any], expected: str, is_bad: bool) -> None:
    (found,) = findings([card(i, **(changed if i == 2 else {})) for i in range(8)])
    assert found.what.startswith(expected)
    assert found.bad is is_bad


def test_memory_errors() -> None:
    errors = "".join(smi(i, "5" if i == 4 else "[N/A]") for i in range(8))
    (found,) = findings([card(i) for i in range(8)], errors)
    assert found.what == "GPU 4 (GPU-4) has had 5 uncorrected memory errors since the driver was loaded"


def test_a_driver_that_does_not_answer() -> None:
    (found,) = findings(None, smi(0), why="python did not answer in 60 s")
    assert found.what == "its GPUs could not be tested (python did not answer in 60 s)"
    assert found.bad

"""Figures in the documentation are those of their sources: measurements in docs/measured,
constants, versions, the table of faults.
"""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

import pytest

from recipes import doctor
from recipes.conf.doctor import Config as DoctorKeys
from recipes.core.config.run_keys import RunKeys
from recipes.core.doctor import judge
from recipes.core.run import efficiency, look, watchdog
from recipes.core.slurm import jobstate
from tests.faults import table
from tests.gpu import checks
from tests.helpers import ROOT

H100: dict[str, Any] = json.loads((ROOT / "docs/measured/h100.json").read_text())
FOUND = {name: check.get("figures", {}) for name, check in H100["checks"].items()}
FAST = FOUND["accuracy"]["fast"]
PEER = statistics.fmean(H100["reference"]["airbench94_muon"]["accuracy"])
PASSED = sum(check["result"] == "pass" for check in H100["checks"].values())
CPU: dict[str, Any] = json.loads((ROOT / "docs/measured/cpu.json").read_text())
DIGITS = [100 * accuracy for accuracy in CPU["mnist"]["val_top1"]]
LOSSES = CPU["toy"]["loss"]
USUAL = RunKeys()
PROJECT = (ROOT / "pyproject.toml").read_text()


def of_pyproject(name: str) -> str:
    """The oldest version that pyproject.toml requires, after ``name``."""
    return re.search(rf'{name}>=([0-9.]+)"', PROJECT)[1]


PYTHON = of_pyproject('requires-python = "')
TORCH = of_pyproject('"torch')
FIGURES = [
    (
        "README.md",
        f"`variant=fast` reaches {100 * FOUND['accuracy']['mean']:.1f} % test accuracy in "
        f"{FOUND['accuracy']['fast, seconds of training']:g} s of training. This is the mean of "
        f"{len(FAST)} seeds",
    ),
    ("recipes/cifar.py", f"variant=accurate {100 * FOUND['accuracy']['accurate']:.1f} %"),
    ("README.md", f"The loss falls from {LOSSES[0]:.2f} to {LOSSES[1]:.3f} in 20 epochs"),
    (
        "README.md",
        f"Test accuracy {statistics.fmean(DIGITS):.1f} % after 4 epochs (mean of {len(DIGITS)} "
        "seeds)",
    ),
    (
        "recipes/mnist.py",
        f"{statistics.fmean(DIGITS):.1f} % after 4 epochs (mean of {len(DIGITS)} seeds, "
        f"{min(DIGITS):.2f} to {max(DIGITS):.2f} %",
    ),
    ("README.md", f"{CPU['gpt']['val_bpb']:.3f} bits per byte (1 seed)"),
    ("recipes/gpt.py", f"val_bpb {CPU['gpt']['val_bpb']:.3f} after {CPU['gpt']['steps']} steps"),
    ("README.md", f"{H100['reference']['gpt']['tokens/s']:,} tokens/s"),
    *(
        ("recipes/gpt.py", f"{rate:,}")
        for name, rate in H100["reference"]["gpt"].items()
        if name != "what"
    ),
    (
        "docs/data.md",
        f"Each process decoded {FOUND['decoding']['images/s a process']} images per second",
    ),
    (
        "docs/data.md",
        {"1.0": "A training step took as long as without decoding"}[
            f"{float(FOUND['decoding']['step']):.1f}"
        ],
    ),
    (
        "docs/data.md",
        f"the GPU decoded {H100['reference']['jpeg']['GPU, batches of 64']:,} images per second",
    ),
    ("docs/data.md", f"15 CPU threads decoded {H100['reference']['jpeg']['CPU, 15 threads']:,}."),
    ("recipes/cifar.py", f"airbench's own program: {100 * PEER:.1f} % (3 runs)"),
    ("README.md", f"batch 256): {H100['reference']['imagenet']['images/s']:,} images/s"),
    (
        "docs/large-models.md",
        "{2:} with 65,536 tokens a step, {1:} with 16,384 and {0:} with 4,096".format(
            *CPU["nanogpt"]["ratio"]
        ),
    ),
    (
        "docs/large-models.md",
        "When neither is compiled, the ratio is {2:}, {1:.2f} and {0:}.".format(
            *CPU["nanogpt"]["ratio, not compiled"]
        ),
    ),
    (
        "docs/large-models.md",
        "the ratio is {2:}, {1:.2f} and {0:} (compiled)".format(
            *CPU["nanogpt"]["ratio, same settings"]
        ),
    ),
    (
        "docs/large-models.md",
        "a compiled step of `gpt` took {} ms, and a compiled step of "
        "[nanoGPT](https://github.com/karpathy/nanoGPT) took {} ms".format(
            *H100["reference"]["nanogpt"]["compiled"]
        ),
    ),
    (
        "docs/large-models.md",
        "Muon, the optimiser of `gpt`, took {} ms of its step. "
        "Without compilation, the steps took {} and {} ms.".format(
            H100["reference"]["nanogpt"]["of gpt, compiled, the optimiser"],
            *H100["reference"]["nanogpt"]["milliseconds of a step, gpt and nanoGPT"],
        ),
    ),
    (
        "docs/data.md",
        "({} and {} images per second)".format(
            *(FOUND["packed_images"][name].partition(" ")[0] for name in ("real", "fake"))
        ),
    ),
    (
        "README.md",
        f"`make gpu` runs {len(checks.TOGETHER + checks.ALONE)} checks of the GPU code on one GPU. "
        f"On an H100, all {PASSED} have passed",
    ),
    ("README.md", f"Python ≥ {PYTHON}, torch ≥ {TORCH}"),
    ("docs/resume-and-failures.md", f"other faults, {len(table.ROWS)} in total"),
    ("docs/resume-and-failures.md", f"`checkpoint_every_s={USUAL.checkpoint_every_s:.0f}`"),
    ("docs/resume-and-failures.md", f"`keep_checkpoints={USUAL.keep_checkpoints}`"),
    (
        "docs/resume-and-failures.md",
        f"{USUAL.stop_before_s:.0f} s before the job's end "
        f"(`stop_before_s={USUAL.stop_before_s:.0f}`)",
    ),
    ("docs/resume-and-failures.md", f"`timeout_s` + {watchdog.MARGIN_S:.0f} s"),
    ("docs/resume-and-failures.md", f"less than {jobstate.SHORT_S / 60:.0f} minutes"),
    (
        "docs/doctor.md",
        f"`seconds=` (default {DoctorKeys().seconds:.0f}); it ends at most {doctor.OVER_S:.0f} s",
    ),
    ("docs/doctor.md", f"is below {judge.SLOW:.0%} of it".replace("%", " %")),
    ("docs/administrators.md", f"lists one folder there every {look.POLL_S:g} s"),
    (
        "docs/watching.md",
        f"for data for at least {efficiency.WAITS:.0%} of a step".replace("%", " %"),
    ),
    (
        "docs/watching.md",
        f"needs at least {efficiency.SLOW_RANK} times as long per step as the median rank (after "
        f"{efficiency.STEPS} steps, if a step takes at least {efficiency.SHORT_S} s)",
    ),
    (
        "docs/watching.md",
        f"idle for at least {efficiency.IDLE_GPU:.0%} of a step".replace("%", " %"),
    ),
    (
        "docs/watching.md",
        f"gradients for at least {efficiency.COMMUNICATES:.0%} of a step".replace("%", " %"),
    ),
]


@pytest.mark.parametrize(("page", "text"), FIGURES)
def test_a_figure_is_that_of_its_source(page: str, text: str) -> None:
    assert text in " ".join((ROOT / page).read_text().split())

"""A run that is stopped within an epoch and resumed ends with the state of an unbroken run, to the
last bit.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from recipes.core.train import checkpoint
from tests import helpers, states
from tests.faults import conftest
from tests.faults.conftest import Start

STEPS = {"cifar": (12, 18), "imagenet": (13, 20)}  # of an epoch, and of the run
KEYS = {
    "cifar": ("arch=airbench94", "ema=0.9", "cutout=4", "global_batch_size=16"),
    "imagenet": (
        "arch=resnet18",
        "px=32",
        "val_px=32",
        "val_resize=36",
        "ema=0.9",
        "optimizer=lars",
        "mixup=0.2",
        "num_workers=2",
        "lr_batch_size=0",
        "lr=1",
        "global_batch_size=16",
    ),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.image_sets(tmp_path_factory.mktemp("images"))


@pytest.mark.fault(17)
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=pytest.mark.long if name == "imagenet" else ()) for name in STEPS],
)
def test_a_resumed_run_ends_like_an_unbroken_run(
    start: Start, images: Path, tmp_path: Path, recipe: str
) -> None:
    an_epoch, total = STEPS[recipe]
    words = (
        f"recipe={recipe}",
        "cpu_threads=1",
        "epochs=2",
        "log_every_steps=1",
        f"max_steps={total}",
    )
    words += (*KEYS[recipe], f"data_dir={images}")
    helpers.finish(start(tmp_path / "whole", *words)).expect(0)
    launcher = start(tmp_path / "stopped", *words)
    conftest.wait_for_step(launcher, tmp_path / "stopped", 4)
    launcher.send_signal(signal.SIGTERM)
    assert helpers.finish(launcher).status == 75
    helpers.finish(start(tmp_path / "stopped", *words)).expect(0)
    stopped_at = helpers.read(tmp_path / "stopped", "summary")["resumed_from_step"]
    assert 4 <= stopped_at < total
    assert stopped_at % an_epoch, "it was stopped at the end of an epoch, which shows less"
    folders = (tmp_path / "whole", tmp_path / "stopped")
    losses = [{row["step"]: row["loss"] for row in helpers.rows(folder)} for folder in folders]
    assert losses[1] == losses[0]
    newest = [checkpoint.candidates(folder / "checkpoints")[0] for folder in folders]
    assert len({states.digest(checkpoint.read(path)) for path in newest}) == 1

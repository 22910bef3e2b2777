"""A step of each recipe never waits for its device, and all tensors of a step are on it.

On torch's device "meta", whose tensors have shapes, strides and autograd but no values: reading one
on the host fails, and so does an operation on tensors of two devices. Fake CUDA tensors would need
a GPU for their backward pass.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from recipes import cifar, imagenet, mnist, toy
from recipes.core.data.in_memory import ImageSet
from recipes.core.train import loop, optimisation
from recipes.core.train.agreement import Agreement
from recipes.core.train.saving import Checkpoints
from recipes.core.train.step import Step
from tests.distributed import one_rank

META = torch.device("meta")
PX = ("px=32", "small_px=32", "val_px=32", "val_resize=32")
SMALL = ("arch=resnet18", "dataset=fake", *PX, "num_workers=0", "global_batch_size=4")
STEPS: list[tuple[ModuleType, tuple[str, ...]]] = [
    (toy, ()),
    (mnist, ("dataset=fake", "accumulate=2")),
    (cifar, ("dataset=fake", "variant=fast", "global_batch_size=8", "label_smoothing=0.1")),
    (imagenet, (*SMALL, "mixup=0.2", "ema=0.9")),
    (imagenet, (*SMALL, "optimizer=lars", "accumulate=2")),
]


def train(recipe: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Two steps, without what follows them: rows, evaluations and checkpoints do wait for the
    device.
    """
    monkeypatch.setattr(one_rank, "DEVICE", META)
    monkeypatch.setattr(optimisation, "autocast", lambda run, cfg: contextlib.nullcontext())
    monkeypatch.setattr(ImageSet, "digest", lambda images: "")  # before the first step
    monkeypatch.setattr(cifar, "whitening", lambda images: torch.zeros(24, 3, 2, 2))
    monkeypatch.setattr(Agreement, "read", lambda sums: ([0.0], "", False, 1.0))
    monkeypatch.setattr(loop._StepEnds, "_evaluate", lambda ends: True)
    monkeypatch.setattr(Checkpoints, "save", lambda checkpoints, **how: None)
    one_rank.train(recipe, folder, monkeypatch, *words, "max_steps=2")


def require_channels_last(conv: nn.Module, inputs: tuple[Any, ...]) -> None:
    if isinstance(conv, nn.Conv2d) and conv.in_channels > 1:
        assert conv.weight.is_contiguous(memory_format=torch.channels_last)
        if conv.in_channels == 3:  # the images; torch's pooling on "meta" forgets the format
            assert inputs[0].is_contiguous(memory_format=torch.channels_last), inputs[0].stride()


@pytest.mark.parametrize(("recipe", "words"), STEPS)
def test_a_step_does_not_wait_for_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: ModuleType, words: tuple[str, ...]
) -> None:
    with contextlib.ExitStack() as stack:
        if recipe in (cifar, imagenet):
            hook = nn.modules.module.register_module_forward_pre_hook(require_channels_last)
            stack.callback(hook.remove)
        train(recipe, tmp_path, monkeypatch, *words)


def test_a_step_that_waits_for_its_device_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = Step.backward

    def waits(step: Step[Any], losses: torch.Tensor) -> None:
        backward(step, losses * losses.mean().item())

    monkeypatch.setattr(Step, "backward", waits)
    with pytest.raises(RuntimeError, match=r"Tensor\.item\(\) cannot be called on meta tensors"):
        train(toy, tmp_path, monkeypatch)

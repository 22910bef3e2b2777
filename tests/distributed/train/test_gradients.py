"""What happens to the gradients before ``optimizer.step()``: clipping, and the loss scale of
float16.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from recipes.conf.mnist import Config
from recipes.core.config.run_keys import Dtype
from recipes.core.train.checkpoint import State
from recipes.core.train.gradients import (
    FIRST_SCALE,
    GROWTH_STEPS,
    Gradients,
    check_first_step,
)
from recipes.core.train.optimizers import LARS, Muon


def state_of(kind: type = torch.optim.SGD) -> State:
    """Four weights of 1 as a filter (2, 2), and an optimiser with rate 1 and momentum."""
    net = nn.Linear(2, 2, bias=False)
    nn.init.ones_(net.weight)
    optimizer = kind(net.parameters(), lr=1.0, momentum=0.5)
    return State(net, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0))


def weights_after(state: State, gradient: float) -> list[float]:
    """The weights after a step in which each gradient is ``gradient``."""
    state.model.weight.grad = torch.full((2, 2), gradient)
    state.optimizer.step()
    return state.model.weight.flatten().tolist()


@pytest.mark.parametrize(("gradient", "step"), [(3.0, 0.5), (0.25, 0.25)])  # norms of 6 and of 0.5
def test_a_norm_above_the_maximum_is_scaled_down_to_it(gradient: float, step: float) -> None:
    state = state_of()
    Gradients(state, Config(clip_grad_norm=1.0))
    assert weights_after(state, gradient) == pytest.approx([1 - step] * 4)


def test_without_both_keys_gradients_are_unchanged() -> None:
    state = state_of()
    assert Gradients(state, Config()).scale == 1
    assert weights_after(state, 3.0) == [-2.0] * 4


def test_float16_removes_the_scale_before_the_norm_is_clipped() -> None:
    state = state_of()
    gradients = Gradients(state, Config(dtype=Dtype.float16, clip_grad_norm=1.0))
    assert gradients.scale == FIRST_SCALE == 65536
    assert weights_after(state, 0.25 * gradients.scale) == [0.75] * 4
    assert state.meta["loss_scale"] == [FIRST_SCALE, 1]


@pytest.mark.parametrize("kind", [torch.optim.SGD, LARS, Muon])
@pytest.mark.parametrize("overflow", [math.inf, math.nan])
def test_a_step_that_overflows_changes_nothing_and_halves_the_scale(
    kind: type, overflow: float
) -> None:
    state = state_of(kind)
    gradients = Gradients(state, Config(dtype=Dtype.float16, clip_grad_norm=1.0))
    before = weights_after(state, 0.25)
    # the momentum of the first step would have moved them
    assert weights_after(state, overflow) == before
    assert state.meta["loss_scale"] == [FIRST_SCALE / 2, 0]
    assert gradients.scale == FIRST_SCALE / 2


def test_the_scale_doubles_after_many_steps_without_overflow() -> None:
    state = state_of()
    state.meta["loss_scale"] = [8.0, GROWTH_STEPS - 2]  # as loaded from a checkpoint
    gradients = Gradients(state, Config(dtype=Dtype.float16))
    for expected in ([8.0, GROWTH_STEPS - 1], [16.0, 0]):
        weights_after(state, 1.0)
        assert state.meta["loss_scale"] == expected
    assert gradients.scale == 16


def test_parameters_without_a_gradient_are_named_once_also_after_a_resume() -> None:
    layers = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "abcd"})
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    lines = list[str]()
    run: Any = SimpleNamespace(step=7, world=SimpleNamespace(size=1), warn=lines.append)
    run.state = SimpleNamespace(optimizer=optimizer)
    check_first_step(run, nn.ModuleDict({"module": layers}))  # as DDP names it
    for run.step in (7, 8):
        optimizer.step()
    [line] = lines
    names = "a.weight, b.weight, c.weight and 1 more"
    assert line.startswith(f"{names}: no gradient after step.backward(): use them in forward()")

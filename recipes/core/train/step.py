"""One optimiser step, as a recipe sees it: its parts, and the gradients of the mean over the global
batch.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from recipes.core.data.sampling import S
from recipes.core.errors import RunError
from recipes.core.run import watchdog
from recipes.core.train import gradients
from recipes.core.train.meter import Meter
from recipes.core.train.run import Run


@dataclass
class Common:
    """What all steps of a run have in common. accumulate: pieces of a rank's part.

    calls: in the current step, of the optimiser, and of a model that averages gradients.
    """

    run: Run
    model: nn.Module
    accumulate: int
    meter: Meter

    def __post_init__(self) -> None:
        self.calls = Counter[str]()
        self.run.state.optimizer.register_step_post_hook(lambda *call: self.calls.update(step=1))
        if isinstance(self.model, DistributedDataParallel | FSDPModule):
            self.model.register_forward_pre_hook(lambda *call: self.calls.update(forward=1))


@dataclass
class Step(Generic[S]):
    """One optimiser step, from `loop.steps`. part: this rank's part of the global batch. lr: the
    learning rate of the step.

    ends_epoch: whether the part is of the last batch of its epoch. save: set it to True, on all
    ranks, to save after this step.
    """

    _common: Common
    part: S
    ends_epoch: bool
    _scale: float
    save: bool = False

    def __post_init__(self) -> None:
        common = self._common
        scheduler = common.run.state.scheduler
        self.lr = float(scheduler.get_last_lr()[0])
        self._scheduled = scheduler.last_epoch
        # Under FSDP each piece is a collective, so all ranks have the same number of them.
        is_divided = isinstance(common.model, FSDPModule)
        self._pieces = self.part.pieces(common.accumulate, empty=is_divided)
        self._yielded = 0
        self._losses: list[Tensor] = []
        self._weights: list[Tensor] = []
        common.calls.clear()

    @property
    def parts(self) -> Iterator[S]:
        """The rank's part, or its ``accumulate`` pieces. The last backward pass averages gradients
        over the ranks.
        """
        pulse = self._common.run.world.pulse
        model = self._common.model
        parallel = isinstance(model, DistributedDataParallel | FSDPModule)
        for piece in self._pieces:
            waits = piece is not self._pieces[-1] and isinstance(model, DistributedDataParallel)
            with model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                pulse.beat(watchdog.DATA if parallel else watchdog.FORWARD)
                self._yielded += 1
                self._common.calls["forward"] = 0
                yield piece

    def backward(self, losses: Tensor, weights: Tensor | None = None) -> None:
        """Computes the gradients of a part. Call it once for each part of `parts`.

        losses: the loss of each sample, (B,), also for B = 0. DDP averages gradients over the
        ranks, so the sum is multiplied by ``world_size / global_size``: the gradient is that of the
        mean over the global batch, whatever the sizes of the ranks' parts.

        weights: (B,), if a loss is itself a mean, such as over the tokens of its sample: their
        number. The mean over the global batch is then the weighted one. On all ranks, a step has
        weights for each part or for none; with them, its last call contains a collective.

        Raises RunError if the shape is another one, if it is called twice for a part, or if the
        forward pass has bypassed DDP.
        """
        world = self._common.run.world
        done = len(self._losses)
        if done != self._yielded - 1:
            raise RunError(
                "step.backward(): called again for the same part: "
                "call it once in the loop over step.parts"
            )
        expected = (len(self._pieces[done].indices),)
        shape = tuple(losses.shape)
        if shape != expected:
            raise RunError(
                f"step.backward(): losses of shape {shape}, not {expected}: "
                'give one loss per sample, reduction="none"'
            )
        if weights is not None and weights.shape != losses.shape:
            shape = tuple(weights.shape)
            raise RunError(
                f"step.backward(): weights of shape {shape}, not {expected}: "
                "give one weight per sample"
            )
        if done and (weights is None) == bool(self._weights):
            raise RunError("step.backward(): give weights for each part of a step, or for none")
        if world.size > 1 and not self._common.calls["forward"]:
            raise RunError(
                "the forward pass has bypassed DDP: call the model that world.parallel() returned, "
                "and pass the same model to loop.steps()"
            )
        world.pulse.beat(watchdog.BACKWARD)
        loss = losses.sum() if weights is None else (losses * weights).sum()
        (loss * (self._scale * world.data.size / self.part.global_size)).backward()
        self._losses.append(loss.detach())
        if weights is not None:
            self._weights.append(weights.sum())
            if len(self._weights) == len(self._pieces):
                self._divide_by_weights()
        self._common.meter.mark("forward_backward")

    def _divide_by_weights(self) -> None:
        """Replaces the number of samples by the sum of all weights, as the divisor of the gradients
        and of the loss. A collective.

        The sum is known only after the last part. No part has to be kept until then, since the
        gradient of a sum is divided as well as the sum.
        """
        run = self._common.run
        weight = run.world.sum(torch.stack(self._weights).sum().double())
        factor = self.part.global_size / weight
        gradients.multiply(run.state.optimizer, factor)
        self._losses = [loss * factor.to(loss.dtype) for loss in self._losses]

    def check(self) -> None:
        """Raises RunError if the recipe has left out a call in this step, or made it twice."""
        run = self._common.run
        moved = run.state.scheduler.last_epoch - self._scheduled
        backward = len(self._losses)
        steps = self._common.calls["step"]
        for call, made, due, place in (
            ("step.backward()", backward, len(self._pieces), "for each part of step.parts"),
            ("optimizer.step()", steps, 1, "in each step, after the loop over step.parts"),
            ("scheduler.step()", moved, 1, "in each step, after optimizer.step()"),
        ):
            if made != due:
                times = f"called {made} times in step {run.step + 1}"
                raise RunError(f"{call}: {times}: call it once {place}")

    @property
    def loss(self) -> Tensor:
        """The sum of the losses of this rank's samples, a scalar, detached. With weights, its share
        of their weighted mean, times the samples of the batch.
        """
        return self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).sum()

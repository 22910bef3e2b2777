"""Runs a recipe's main in this process, and records the inputs and outputs of its network, its
rows, and its run.

In a world of one; or as one rank of several, of which there are no others: collectives leave its
own values as they are.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.core.place import ranks
from recipes.core.run import command_line, signals
from recipes.core.run.entry import Start
from recipes.core.train import metrics
from recipes.core.train.rendezvous import process_group
from recipes.core.train.run import Run
from recipes.core.train.world import DataPlace, World
from tests import helpers

CPU = torch.device("cpu")
DEVICE = CPU  # of the world that the recipe gets


@dataclass(frozen=True)
class Forward:
    """One forward pass. modes: whether its modules are in training mode. weights: the network's
    last parameter then.
    """

    net: nn.Module
    modes: set[bool]
    inputs: Tensor
    outputs: Tensor
    weights: Tensor
    seed: int


@dataclass
class Trained:
    """forwards: in their order, of training and of evaluation. rows: metrics.jsonl's. run: what is
    left of it.
    """

    run: Run
    results: Mapping[str, Any] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def training(self) -> list[Forward]:
        return [forward for forward in self.forwards if forward.modes == {True}]

    @property
    def evaluation(self) -> list[Forward]:
        return [forward for forward in self.forwards if forward.modes == {False}]

    @property
    def lrs(self) -> list[float]:
        return [row["lr"] for row in self.rows]


def train(
    recipe: ModuleType,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    rank: int = 0,
    size: int = 1,
) -> Trained:
    """Calls ``recipe.main`` with these keys, in a run directory that may have checkpoints
    already.
    """
    name = recipe.__name__.rpartition(".")[2]
    settings = command_line.parse(
        ["device=cpu", "log_every_steps=1", *words], recipe=name, environ={}
    )
    start = Start(settings, ranks.detect({}), {}, None)
    for part in ("logs", "checkpoints"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    with process_group(start, CPU) as world, monkeypatch.context() as patched:
        place = DataPlace(rank, size)
        # Two ranks see the same samples: what depends on the samples must not depend on the rank.
        shared = 2 if size > 1 else 1
        of_rank = dataclasses.replace(world.ranks, rank=shared * rank, world_size=shared * size)
        hosts = world.hosts * of_rank.world_size
        world = dataclasses.replace(world, ranks=of_rank, hosts=hosts, device=DEVICE)
        patched.setattr(World, "data", place)
        patched.setattr(World, "from_rank_0", lambda self, name, work: work())
        patched.setattr(World, "gather", lambda self, content: [content] * self.size)
        patched.setattr(World, "together", lambda self, name, work: work(lambda progress: None))
        attempt = helpers.attempt(folder, step=None)
        run = Run(settings, world, attempt, signals.StopFlag(), None)
        if rank:  # the rows of this rank, which plays another one
            run.rows = metrics.Rows(folder / "metrics.jsonl")
        trained = Trained(run)
        parallel = World.parallel

        def seen(net: nn.Module, inputs: tuple[Tensor], outputs: Tensor) -> None:
            *_, last = net.parameters()
            modes = {module.training for module in net.modules()}
            outputs = getattr(outputs, "logits", outputs)  # of a model of transformers
            kept = (tensor.detach().clone() for tensor in (inputs[0], outputs, last))
            forward = Forward(net, modes, *kept, torch.initial_seed())  # type: ignore[call-arg]
            trained.forwards.append(forward)

        def watched(self: World, net: nn.Module, *args: Any) -> nn.Module:
            # a copy of the network, such as the averaged one, has it too
            net.register_forward_hook(seen)
            return parallel(self, net, *args)

        patched.setattr(World, "parallel", watched)
        threads = torch.get_num_threads()
        # more of them wait for each other where other tests run beside this one
        torch.set_num_threads(1)
        try:
            trained.results = recipe.main(settings.config, run)
        finally:
            torch.set_num_threads(threads)
            run.close_rows()
            if run.checkpoints.saver:
                run.checkpoints.saver.wait()
    trained.rows = helpers.rows(folder)
    return trained


def check_second_of_three(train: Callable[..., Trained], batch: slice, validation: slice) -> None:
    """The second of three ranks has these samples of one rank's batch and validation set, and its
    own random numbers.
    """
    single = train("max_steps=1", rank=0, size=1)
    trained = train("max_steps=1", rank=1, size=3)
    # from the same seed
    assert torch.equal(trained.training[0].weights, single.training[0].weights)
    assert torch.equal(trained.training[0].inputs, single.training[0].inputs[batch])
    assert torch.equal(trained.evaluation[0].inputs, single.evaluation[0].inputs[validation])
    assert trained.results["val_samples"] == validation.stop - validation.start
    # 0: that of the weights, the same for all
    assert len({0, single.training[0].seed, trained.training[0].seed}) == 3


def check_bfloat16(train: Callable[..., Trained]) -> None:
    """Training and evaluation compute in bfloat16, and the loss in float32."""
    trained = train("max_steps=1", "dtype=bfloat16", "label_smoothing=1")
    assert trained.evaluation
    dtypes = {(forward.inputs.dtype, forward.outputs.dtype) for forward in trained.forwards}
    assert dtypes == {(torch.float32, torch.bfloat16)}
    outputs = trained.training[0].outputs
    labels = torch.zeros(len(outputs), dtype=torch.int64)  # any
    assert trained.rows[0]["loss"] == pytest.approx(cross_entropy(outputs, labels, 1), rel=1e-5)


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> float:
    """The mean loss by its definition: a share ``smoothing`` of the target is spread over all
    classes.
    """
    logarithms = logits.double().log_softmax(1)
    of_label = logarithms[torch.arange(len(labels)), labels]
    losses = (smoothing - 1) * of_label - smoothing * logarithms.mean(1)
    return float(losses.mean())


def top(logits: Tensor, labels: Tensor, k: int) -> float:
    """The share of samples whose label is among their k largest logits."""
    ranked = logits.argsort(dim=1, descending=True)[:, :k]
    hits = [int(label) in row for row, label in zip(ranked.tolist(), labels, strict=True)]
    return sum(hits) / len(hits)


def unnormalised(inputs: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """The pixels, 0 to 255, whose normalised values are ``inputs``; mean and std as torchvision
    gives them, of 0 to 1.
    """
    scale = torch.tensor(std).view(-1, 1, 1)
    pixels = (inputs * scale + torch.tensor(mean).view(-1, 1, 1)) * 255
    assert (pixels - pixels.round()).abs().max() < 0.2, "these are no normalised pixels"
    return pixels.round().to(torch.uint8)


def decayed(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The weight decay of each parameter, by its name."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    decays = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            decays[names[parameter]] = group["weight_decay"]
    return decays


def shifts(images: Tensor, reach: int, mode: str) -> dict[bytes, tuple[int, int, int]]:
    """Every way to shift each image by up to ``reach``: the pixels, and which image, how far down
    and right.
    """
    height, width = images.shape[2:]
    padded = F.pad(images.float(), (reach,) * 4, mode=mode).to(torch.uint8)
    places = range(2 * reach + 1)
    found_at = {}
    for i, y, x in itertools.product(range(len(images)), places, places):
        shifted = padded[i, :, y : y + height, x : x + width]
        found_at[shifted.numpy().tobytes()] = (i, y, x)
    return found_at

"""CIFAR-10: data-parallel training of a ResNet. All images are on the device during the whole training.

    python -m recipes.prepare cifar10 data_dir=/data                               # once, on a machine with internet
    python launch.py recipe=cifar launcher=local ranks_per_node=2 device=cpu variant=fast data_dir=/data
    sbatch sbatch/cifar_1x8.sh variant=accurate data_dir=/data

Expected accuracy and speed: not measured.
"""

from recipes.core.run import entry

# This must run before torch is imported: it sets variables from keys and env files, and torch reads some of them at import.
START = entry.begin("cifar") if __name__ == "__main__" else None

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.conf.cifar import Arch, Config
from recipes.core.data import in_memory, sampling
from recipes.core.train import loop, optimisation, session
from recipes.core.data.in_memory import AugmentedImages
from recipes.core.data.sampling import GlobalBatches
from recipes.core.train.checkpoint import State
from recipes.core.train.run import Run

MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)  # of CIFAR-10's training pixels (red, green, blue)
GREY = 121  # pixel value of the area that cutout removes
EVAL_BATCH = 1000


def resnet18(classes: int) -> nn.Module:
    """torchvision's ResNet-18 for images of 32 px: the first layer has stride 1, and no max pooling follows it."""
    net = torchvision.models.resnet18(num_classes=classes, zero_init_residual=True)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


class ResNet9(nn.Module):
    """Maps images (B, 3, H, W), H and W at least 8, to logits (B, classes). From D. Page, "How to train your ResNet" (2018)."""

    def __init__(self, classes: int) -> None:
        super().__init__()

        def conv(inputs: int, outputs: int, pool: bool = False) -> nn.Sequential:
            layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)]
            return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))

        self.stem = conv(3, 64)
        self.down1, self.block1 = conv(64, 128, pool=True), nn.Sequential(conv(128, 128), conv(128, 128))
        self.down2 = conv(128, 256, pool=True)
        self.down3, self.block3 = conv(256, 512, pool=True), nn.Sequential(conv(512, 512), conv(512, 512))
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down1(self.stem(x))
        x = self.down2(x + self.block1(x))
        x = self.down3(x)
        return 0.125 * self.head((x + self.block3(x)).amax((2, 3)))


def make_net(cfg: Config, run: Run) -> nn.Module:
    net = resnet18(10) if cfg.arch is Arch.resnet18 else ResNet9(10)
    if cfg.sync_bn:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    return net.to(run.world.device).to(memory_format=torch.channels_last)


def make_optimizer(cfg: Config, net: nn.Module, lr: float) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum. Weight decay applies to weights, not to norms and biases."""
    groups = optimisation.decay_groups(net, cfg.weight_decay)
    return torch.optim.SGD(groups, lr, momentum=cfg.momentum, nesterov=cfg.momentum > 0)


def lr_factor(cfg: Config, total_steps: int, step: int) -> float:
    """The learning rate of a step as a fraction of its peak. One cycle: it rises linearly, then falls linearly to zero."""
    rise = cfg.warmup * total_steps
    return (step + 1) / (rise + 1) if step < rise else max(0.0, (total_steps - step) / max(1.0, total_steps - rise))


def side(cfg: Config, epochs: int, epoch: int) -> int:
    """Side of the training images in an epoch, in pixels: it grows from ``small_px`` to 32 in steps of 4, over two thirds of the epochs."""
    grown = min(1.0, epoch / max(1.0, epochs * 2 / 3))
    return cfg.small_px + int((32 - cfg.small_px) * grown) // 4 * 4


def main(cfg: Config, run: Run) -> Mapping[str, Any]:
    world = run.world
    torch.manual_seed(cfg.seed)
    sets = (
        in_memory.cifar10(cfg.data_dir) if cfg.dataset == "cifar10" else in_memory.fake(50_000, 10_000, (3, 32, 32), 10)
    )
    train_set, test_set = (part.to(world.device) for part in sets)
    run.say(f"{len(train_set):,} images, {len(test_set):,} to evaluate: {cfg.dataset}")
    batches = GlobalBatches(len(train_set), cfg.global_batch_size, cfg.seed, world.rank, world.size, train_set.digest())
    batches.require_full(run.ranks, cfg.accumulate)
    net = make_net(cfg, run)
    model = world.parallel(net, compile=cfg.compile)
    optimizer = make_optimizer(cfg, net, optimisation.scaled_lr(run, cfg.lr, cfg.lr_batch_size, batches))
    ema = optimisation.averaged(run, net, cfg.ema, cfg.lr_batch_size, batches)
    steps = loop.total_steps(cfg, batches)
    epochs = -(-steps // batches.per_epoch)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(cfg, steps, step))
    images = AugmentedImages(train_set.images, cfg.crop, reflect=True, flip=cfg.flip, cutout=cfg.cutout, fill=GREY)
    autocast = optimisation.autocast(run, cfg)
    mean, std = (torch.tensor(values, device=world.device) for values in (MEAN, STD))

    def answers(best: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and labels of this rank's part of the test set."""
        part = sampling.share(len(test_set), world.rank, world.size)
        for images, labels in zip(
            *(t[part].split(EVAL_BATCH) for t in (test_set.images, test_set.labels)), strict=True
        ):
            x = in_memory.normalise(images, mean, std)
            with autocast:
                yield best(x) + best(x.flip(3)) if cfg.tta else best(x), labels

    evaluate = partial(loop.accuracy, run, answers)
    run.resume(State(net, optimizer, scheduler, ema), batches)
    for step in loop.steps(run, cfg, model, batches, evaluate):
        for shard in step.shards:
            images.draw(cfg.seed, shard.epoch)
            indices, px = shard.indices.to(world.device, non_blocking=True), side(cfg, epochs, shard.epoch)
            x = in_memory.normalise(images.take(indices), mean, std)
            if px < 32:
                x = F.interpolate(x, size=px, mode="bilinear", antialias=True)
            with autocast:
                logits = model(x).float()
            labels, smoothing = train_set.labels[indices], cfg.label_smoothing
            step.backward(F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing))
        optimizer.step()
        scheduler.step()
    return run.results


if START:
    session.run(main, START)

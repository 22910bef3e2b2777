r"""CIFAR-10: data-parallel training of a ResNet, or of airbench's networks. All images are on the
device during the whole training.

    # once, on a machine with internet
    python -m recipes.prepare cifar10 data_dir=/data
    python launch.py recipe=cifar launcher=local ranks_per_node=2 device=cpu \
        variant=fast data_dir=/data
    sbatch sbatch/cifar_1x8.sh variant=accurate data_dir=/data

Measured on one H100, CIFAR-10 recompressed as JPEG: variant=fast 90.6 % (mean of 5 seeds; 3.1 s of
training), variant=accurate 93.3 % (1 seed); airbench's own program: 90.6 % (3 runs). The original
CIFAR-10, ResNet-18 and several GPUs: not measured.
"""

from recipes.core.run import entry

# This must run before torch is imported: it sets variables from keys and env files, and torch reads
# some of them at import.
START = entry.begin("cifar") if __name__ == "__main__" else None

from collections.abc import Callable
from functools import partial

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.conf.cifar import Arch, Config
from recipes.core.data import datasets, in_memory, sampling
from recipes.core.train import checkpoint, loop, optimisation, optimizers, scores, session
from recipes.core.train.run import Results, Run

# of CIFAR-10's training pixels (red, green, blue)
MEAN = (125.3, 123.0, 113.9)
STD = (63.0, 62.1, 66.7)
GREY = 121  # pixel value of the area that cutout removes
EVAL_BATCH = 1000
# AirBench's rates for a loss that is summed over the batch. The loss here is a mean, so they are
# multiplied by its size.
BIAS_LR = 0.053
HEAD_LR = 0.67
OTHERS_MOMENTUM = 0.85


def resnet18(classes: int) -> nn.Module:
    """torchvision's ResNet-18 for images of 32 px: the first layer has stride 1, and no max pooling
    follows it.
    """
    net = torchvision.models.resnet18(num_classes=classes, zero_init_residual=True)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


class Group(nn.Module):
    """Halves the side of an image. Two convolutions; with ``deep``, a third one, and a shortcut
    past the last two.
    """

    def __init__(self, inputs: int, outputs: int, deep: bool) -> None:
        super().__init__()

        def conv(inputs: int) -> nn.Conv2d:
            layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            nn.init.dirac_(layer.weight.data[:inputs])
            return layer

        def norm() -> nn.BatchNorm2d:
            layer = nn.BatchNorm2d(outputs, eps=1e-12, momentum=0.4)
            layer.weight.requires_grad = False
            return layer

        self.first = nn.Sequential(conv(inputs), nn.MaxPool2d(2), norm(), nn.GELU())
        self.second = nn.Sequential(conv(outputs), norm())
        self.third = nn.Sequential(nn.GELU(), conv(outputs), norm()) if deep else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return F.gelu(x + self.third(self.second(x)) if self.third else self.second(x))


class AirBench(nn.Module):
    """Maps images (B, 3, 32, 32) to logits (B, classes). From K. Jordan, "94% on CIFAR-10 in 3.29
    Seconds on a Single GPU" (2024).

    The first layer is not trained, except its bias: it whitens patches of 2x2 pixels of ``images``,
    normalised, (N, 3, H, W). In each other convolution, the first filters copy one input channel
    each; the others start random. The norms have a bias but no trained weight.
    """

    def __init__(
        self, images: Tensor, classes: int, widths: tuple[int, int, int], deep: bool
    ) -> None:
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.requires_grad = False
        self.whiten.weight.data.copy_(whitening(images))
        sizes = zip((24, *widths), widths, strict=False)
        self.body = nn.Sequential(*(Group(inputs, outputs, deep) for inputs, outputs in sizes))
        self.head = nn.Linear(widths[-1], classes, bias=False)
        with torch.no_grad():
            self.head.weight /= self.head.weight.std()

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(F.gelu(self.whiten(x)))
        # Not amax(): compiled in bfloat16 (torch 2.11 and 2.15), its gradient divides by zero.
        x = F.max_pool2d(x, x.shape[2:]).flatten(1)
        return self.head(x) / x.shape[1]


def whitening(images: Tensor) -> Tensor:
    """Filters (24, 3, 2, 2) whose answers to ``images``, float (N, 3, H, W), have variance 1 and
    are not correlated.

    They are the eigenvectors of the patches' covariance, divided by the root of their eigenvalue,
    and the same times -1. Source: as `AirBench`.
    """
    patches = F.unfold(images, 2).transpose(1, 2).flatten(0, 1)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / (values + 5e-4).sqrt()).T.unflatten(1, (3, 2, 2))
    return torch.cat([filters, -filters])


def make_net(cfg: Config, run: Run, images: Tensor) -> nn.Module:
    """The network of ``arch=``, on the rank's device, in channels_last. images: some of the
    training images, normalised.
    """
    net: nn.Module
    if cfg.arch is Arch.resnet18:
        net = resnet18(10)
    else:
        deep = cfg.arch is Arch.airbench96
        net = AirBench(images, 10, (128, 384, 512) if deep else (64, 256, 256), deep)
    if cfg.sync_bn:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    return net.to(run.world.device).to(memory_format=torch.channels_last)


def make_optimizer(
    cfg: Config, net: nn.Module, lr: float, batch_size: int
) -> torch.optim.Optimizer:
    """ResNet-18: SGD with Nesterov momentum, weight decay for weights only.

    AirBench: Muon for the filters, without decay; SGD with decay for biases and the head.
    batch_size: samples of a step.
    """
    if not isinstance(net, AirBench):
        groups = optimisation.decay_groups(net, cfg.weight_decay)
        return torch.optim.SGD(groups, lr, momentum=cfg.momentum, nesterov=cfg.momentum > 0)
    filters, biases = optimisation.decay_groups(net.body, 0.0)
    sgd = [([net.whiten.bias], BIAS_LR), (biases["params"], BIAS_LR), ([net.head.weight], HEAD_LR)]
    of_sgd = {"momentum": OTHERS_MOMENTUM, "orthogonal": False}
    groups = [filters]
    for params, rate in sgd:
        decay = cfg.weight_decay / rate
        groups.append({"params": params, "lr": rate * batch_size, "weight_decay": decay, **of_sgd})
    return optimizers.Muon(groups, lr, cfg.momentum)


def lr_factors(
    cfg: Config, batches: sampling.GlobalBatches, total_steps: int, groups: int
) -> list[Callable[[int], float]]:
    """The learning rate of a step as a fraction of its peak, for each group of the optimiser.

    It rises linearly, then falls linearly to zero. The rate for the bias of AirBench's first layer
    falls to zero in three epochs.
    """

    def factor(length: int, step: int) -> float:
        rise = cfg.warmup * length
        if step < rise:
            return (step + 1) / (rise + 1)
        return max(0.0, (length - step) / max(1.0, length - rise))

    lengths = [total_steps] * groups
    if cfg.arch is not Arch.resnet18:  # `make_optimizer`'s second group is that bias
        lengths[1] = min(3 * batches.per_epoch, total_steps)
    return [partial(factor, length) for length in lengths]


def main(cfg: Config, run: Run) -> Results:
    world = run.world
    torch.manual_seed(cfg.seed)
    if cfg.dataset == "cifar10":
        sets = in_memory.load(datasets.CIFAR10, cfg.data_dir)
    else:
        sets = in_memory.fake(50_000, 10_000, (3, 32, 32))
    train_set, test_set = (part.to(world.device) for part in sets)
    run.say(f"{len(train_set):,} images, {len(test_set):,} to evaluate: {cfg.dataset}")
    digests = train_set.digest(), test_set.digest()
    batches = sampling.GlobalBatches(
        len(train_set), cfg.global_batch_size, cfg.seed, *world.data, *digests
    )
    batches.require_full(run.ranks, cfg.accumulate)
    mean, std = (torch.tensor(values, device=world.device) for values in (MEAN, STD))
    net = make_net(cfg, run, in_memory.normalise(train_set.images[:5000], mean, std))
    model = world.parallel(net, cfg)
    lr = optimisation.scaled_lr(run, cfg.lr, cfg.lr_batch_size, batches)
    optimizer = make_optimizer(cfg, net, lr, min(cfg.global_batch_size, len(train_set)))
    ema = optimisation.averaged(run, net, cfg.ema, cfg.lr_batch_size, batches)
    steps = loop.total_steps(cfg, batches)
    factors = lr_factors(cfg, batches, steps, len(optimizer.param_groups))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
    augmented = in_memory.AugmentedImages(
        train_set.images, cfg.crop, reflect=True, flip=cfg.flip, cutout=cfg.cutout, fill=GREY
    )
    autocast = optimisation.autocast(run, cfg)
    losses = partial(F.cross_entropy, reduction="none", label_smoothing=cfg.label_smoothing)

    def answers(net: nn.Module) -> scores.Pairs:
        """Logits and labels of this rank's part of the test set. Logits are sums over the views of
        `tta` and `tta_shift`.
        """
        shift = cfg.tta_shift if cfg.tta else 0
        for images, labels in test_set.batches(EVAL_BATCH, *world.data):
            x = in_memory.normalise(images, mean, std)
            views = [(1, x)]
            if shift:
                wide = F.pad(x, (shift,) * 4, "reflect")
                far = 2 * shift
                upper_left = wide[..., :-far, :-far]
                lower_right = wide[..., far:, far:]
                views = [(2, x), (1, upper_left), (1, lower_right)]
            if cfg.tta:
                views += [(weight, view.flip(3)) for weight, view in views]
            with autocast:
                logits = [weight * net(view).float() for weight, view in views]
            yield torch.stack(logits).sum(0), labels

    evaluate = partial(scores.accuracy, run, answers)
    run.resume(checkpoint.State(net, optimizer, scheduler, ema), batches)
    for step in loop.steps(run, cfg, model, batches, evaluate):
        for part in step.parts:
            augmented.draw(cfg.seed, part.epoch)
            indices = part.indices.to(world.device, non_blocking=True)
            x = in_memory.normalise(augmented.take(indices), mean, std)
            with autocast:
                logits = model(x).float()
            step.backward(losses(logits, train_set.labels[indices]))
        optimizer.step()
        scheduler.step()
    return run.results


if START:
    session.run(main, START)

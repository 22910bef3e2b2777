"""ImageNet: data-parallel training of ResNet-50, or any other torchvision classifier, from JPEG
files or a packed copy of them.

    # a short trial on random images
    python launch.py recipe=imagenet launcher=local ranks_per_node=2 device=cpu variant=dev
    # once: smaller and faster to read
    python -m recipes.prepare imagenet source=/data/imagenet data_dir=/scratch/imagenet-256
    sbatch sbatch/imagenet_2x8.sh variant=fast data_dir=/scratch/imagenet-256 stage_dir='$TMPDIR'

Expected accuracy and speed: not measured on the full ImageNet.
"""

from recipes.core.run import entry

# This must run before torch is imported: it sets variables from keys and env files, and torch reads
# some of them at import.
START = entry.begin("imagenet") if __name__ == "__main__" else None

import random
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.conf.imagenet import Config, Optimizer, Schedule
from recipes.core.data import decode, image_sets, in_memory, sampling, torch_loader
from recipes.core.data.decode import Decoder, Pixels
from recipes.core.train import (
    checkpoint,
    images,
    loop,
    models,
    optimisation,
    optimizers,
    scores,
    session,
    trained,
)
from recipes.core.train.run import Results, Run

# Of ImageNet's pixels (0 to 255). All of torchvision's weights require these values.
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)


def make_net(cfg: Config, run: Run, classes: int, pretrained: str = "") -> nn.Module:
    net = models.classifier(cfg.arch, pretrained, classes, cfg.zero_init_residual)
    if cfg.sync_bn:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    return net.to(run.world.device).to(memory_format=torch.channels_last)


def make_optimizer(cfg: Config, net: nn.Module, lr: float) -> torch.optim.Optimizer:
    """SGD or LARS. Norms and biases have weight decay only with ``decay_norms``; LARS does not
    scale their rate.
    """
    of_norms = cfg.weight_decay if cfg.decay_norms else 0.0
    weights, others = optimisation.decay_groups(net, cfg.weight_decay, of_norms)
    if cfg.optimizer is Optimizer.lars:
        return optimizers.LARS([weights, {**others, "adapt": False}], lr, cfg.momentum)
    nesterov = cfg.nesterov and cfg.momentum > 0
    return torch.optim.SGD([weights, others], lr, cfg.momentum, nesterov=nesterov)


def lr_factor(cfg: Config, steps_per_epoch: int, total_steps: int, step: int) -> float:
    """The learning rate of a step as a fraction of its peak."""
    rise = min(cfg.warmup_epochs * steps_per_epoch, total_steps / 2)
    if step >= rise and cfg.schedule is Schedule.step:
        return 0.1 ** (3 * step // max(1, total_steps))
    return optimisation.rise_and_cosine(step, rise, total_steps)


def side(cfg: Config, epochs: int, epoch: int) -> int:
    """Side of the training images in an epoch, in pixels: it grows from ``small_px`` to ``px`` in
    steps of 32, over 3/4 of the epochs.
    """
    small = cfg.small_px or cfg.px
    grown = min(1.0, epoch / max(1.0, epochs * 3 / 4))
    return cfg.px if grown == 1 else small + int((cfg.px - small) * grown) // 32 * 32


def training_crop(cfg: Config, epochs: int, decoder: Decoder, image: Pixels, epoch: int) -> Pixels:
    return decode.random_crop(decoder, image, side(cfg, epochs, epoch), cfg.min_crop, cfg.flip)


def validation_crop(cfg: Config, decoder: Decoder, image: Pixels, epoch: int) -> Pixels:
    return decode.centre_crop(decoder, image, cfg.val_px, cfg.val_resize)


def mixed(
    cfg: Config, x: Tensor, labels: Tensor, epoch: int, batch: int
) -> tuple[Tensor, Tensor, float]:
    """mixup (Zhang et al., 2018): blends each image with another image of the same rank.

    Returns the images, the labels of the other images, and the share of each image itself (1
    without mixup).
    """
    if not cfg.mixup:
        return x, labels, 1.0
    share = random.Random(f"{cfg.seed} {epoch} {batch}").betavariate(cfg.mixup, cfg.mixup)
    return x.lerp(x.flip(0), 1 - share), labels.flip(0), share


def main(cfg: Config, run: Run) -> Results:
    world = run.world
    torch.manual_seed(cfg.seed)
    train_set, val_set = images.open_sets(run, cfg.dataset, cfg.data_dir, cfg.stage_dir)
    validation = image_sets.Crops(val_set, cfg.decoder.name, partial(validation_crop, cfg))
    digests = train_set.digest(), val_set.digest()
    batches = sampling.GlobalBatches(
        len(train_set), cfg.global_batch_size, cfg.seed, *world.data, *digests
    )
    batches.require_full(run.ranks, cfg.accumulate)
    steps = loop.total_steps(cfg, batches)
    epochs = -(-steps // batches.per_epoch)
    loader = torch_loader.TorchLoader(
        image_sets.Crops(train_set, cfg.decoder.name, partial(training_crop, cfg, epochs)),
        batches,
        collate=image_sets.collate,
        num_workers=images.workers(run, cfg.num_workers),
        device=world.device,
        warn=run.warn,
    )
    run.say(f"decoder: {validation.decoder}")
    is_new = not run.will_resume()
    net = make_net(cfg, run, len(train_set.classes), cfg.pretrained if is_new else "")
    if cfg.weights and is_new:
        trained.start_from(net, cfg.weights, train_set.classes, run.say)
    model = world.parallel(net, cfg)
    lr = optimisation.scaled_lr(run, cfg.lr, cfg.lr_batch_size, batches)
    optimizer = make_optimizer(cfg, net, lr)
    ema = optimisation.averaged(run, net, cfg.ema, cfg.lr_batch_size, batches)
    factor = partial(lr_factor, cfg, batches.per_epoch, steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    autocast = optimisation.autocast(run, cfg)
    mean, std = (torch.tensor(values, device=world.device) for values in (MEAN, STD))
    losses = partial(F.cross_entropy, reduction="none", label_smoothing=cfg.label_smoothing)

    def answers(net: nn.Module) -> scores.Pairs:
        """Logits and labels of this rank's part of the validation set."""
        part = sampling.share(len(val_set), *world.data)
        for batch, labels in loader.in_order(validation, part, cfg.val_batch_size):
            with autocast:
                yield net(in_memory.normalise(batch, mean, std)), labels

    evaluate = partial(scores.accuracy, run, answers)
    about = {"classes": list(train_set.classes)}
    run.resume(checkpoint.State(net, optimizer, scheduler, ema, about), loader)
    has_weights = bool(cfg.pretrained or cfg.weights)
    for step in loop.steps(run, cfg, model, loader, evaluate, pretrained=has_weights):
        for part in step.parts:
            crops, labels = part.data
            x = in_memory.normalise(crops, mean, std)
            x, others, share = mixed(cfg, x, labels, part.epoch, part.batch)
            with autocast:
                logits = model(x).float()
            loss = losses(logits, labels)
            if share < 1:
                loss = share * loss + (1 - share) * losses(logits, others)
            step.backward(loss)
        optimizer.step()
        scheduler.step()
    if not run.results:
        return {}
    return {**run.results, "skipped_samples": loader.skipped_on_all(world.gather)}


if START:
    session.run(main, START)

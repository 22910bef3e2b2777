"""Fine-tuning: trains a pretrained classifier on your own images.

To copy this recipe, type ``python launch.py new NAME from=finetune``.

    # once, on a machine with internet
    python -m recipes.prepare weights arch=resnet50
    python launch.py recipe=finetune launcher=local ranks_per_node=2 device=cpu dataset=fake
    # a folder of images for each class
    sbatch sbatch/finetune_1x4.sh data_dir=/data/birds best_metric=val_f1

Expected accuracy: not measured.
"""

from recipes.core.run import entry

# This must run before torch is imported: it sets variables from keys and env files, and torch reads
# some of them at import.
START = entry.begin("finetune") if __name__ == "__main__" else None

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import v2

from recipes.conf.finetune import Config
from recipes.core import errors
from recipes.core.data import labelled, sampling, torch_loader
from recipes.core.train import checkpoint, loop, models, optimisation, scores, session, trained
from recipes.core.train.run import Results, Run


def transforms(cfg: Config) -> tuple[v2.Transform, v2.Transform]:
    """For training and for evaluation: from an RGB image to a float tensor (3, px, px)."""
    normalise = v2.Normalize(*models.mean_and_std(cfg.arch))
    to_tensor = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), normalise]
    named = [] if cfg.augment == "none" else [getattr(v2, cfg.augment)()]
    crop = v2.RandomResizedCrop(cfg.px, (cfg.min_crop, 1), antialias=True)
    training = [crop, v2.RandomHorizontalFlip(), *named, *to_tensor, v2.RandomErasing(cfg.erasing)]
    evaluation = [v2.Resize(cfg.val_resize, antialias=True), v2.CenterCrop(cfg.px), *to_tensor]
    return v2.Compose(training), v2.Compose(evaluation)


def make_net(
    cfg: Config,
    classes: Sequence[str],
    pretrained: bool = True,
    say: Callable[[str], object] = print,
) -> nn.Module:
    """The network on the CPU. pretrained: False if weights are loaded into it afterwards, as on a
    resume and by `recipes.load`.
    """
    is_random = not pretrained or cfg.weights or cfg.pretrained == "false"
    weights = "" if is_random else cfg.pretrained
    net = models.classifier(cfg.arch, weights, len(classes), new_head=True)
    if pretrained and cfg.weights:
        trained.start_from(net, cfg.weights, classes, say)
    if cfg.train == "head":
        models.train_only_head(net)
    elif cfg.train == "lora":
        models.add_lora(net, cfg.lora_rank)
    return net


def lr_factors(
    cfg: Config, per_epoch: int, total_steps: int, depths: Sequence[int]
) -> list[Callable[[int], float]]:
    """The learning rate of a step as a fraction of its peak, for each group: a linear rise, then a
    cosine to zero.

    depths: of the groups; 0 is the head. The rise of the others begins after ``head_epochs``.
    """

    def factor(first: float, step: int) -> float:
        length = total_steps - first
        rise = max(1.0, cfg.warmup * length)
        return max(0.0, optimisation.rise_and_cosine(step - first, rise, length))

    frozen = min(cfg.head_epochs * per_epoch, total_steps)
    return [partial(factor, frozen if depth else 0.0) for depth in depths]


def mixed(
    cfg: Config, x: Tensor, labels: Tensor, classes: int, epoch: int, batch: int
) -> tuple[Tensor, Tensor]:
    """Images and labels (B, classes), blended by mixup or CutMix. Without both, the labels are
    unchanged.
    """
    if not (cfg.mixup or cfg.cutmix):
        return x, labels
    kind, alpha = (v2.MixUp, cfg.mixup) if cfg.mixup else (v2.CutMix, cfg.cutmix)
    with torch_loader.seeded(cfg.seed, epoch, -batch):
        blended: tuple[Tensor, Tensor] = kind(num_classes=classes, alpha=alpha)(x, labels)
    return blended


def class_weights(pictures: labelled.Pictures) -> Tensor:
    """The weight of each class in the loss: one for a class of average size, more for a rare
    one.
    """
    counts = pictures.counts()
    return len(pictures) / len(counts) / counts.clamp(min=1)


def main(cfg: Config, run: Run) -> Results:
    world = run.world
    torch.manual_seed(cfg.seed)
    train_part, val_part = labelled.open_parts(
        cfg.dataset, cfg.data_dir, cfg.labels, cfg.multi_label, cfg.val_fraction, cfg.seed, run.say
    )
    train_transform, val_transform = transforms(cfg)
    train_set = labelled.Pictures(*train_part, train_transform)
    val_set = labelled.Pictures(*val_part, val_transform)
    classes = train_set.source.classes
    scores.require_class(cfg.best_metric, classes)
    counts = f"{len(train_set):,} training images and {len(val_set):,} validation images"
    run.say(f"{counts} in {len(classes)} classes")
    if not cfg.multi_label:
        empty = [name for name, count in zip(classes, val_set.counts(), strict=True) if not count]
        if empty:
            some = f"{len(empty)} of {len(classes)} classes, such as {errors.shown(empty[0])}"
            run.say(f"warning: no validation image in {some}")
    digests = train_set.digest(), val_set.digest()
    batches = sampling.GlobalBatches(
        len(train_set), cfg.global_batch_size, cfg.seed, *world.data, *digests
    )
    batches.require_full(run.ranks, cfg.accumulate)
    loader = torch_loader.TorchLoader(
        train_set, batches, num_workers=cfg.num_workers, device=world.device, warn=run.warn
    )

    net = make_net(cfg, classes, not run.will_resume(), run.say)
    models.require_size(net, cfg.arch, cfg.px)
    net.to(world.device)
    run.say(f"{cfg.arch}: {models.trained(net)}")
    model = world.parallel(net, cfg)
    groups = optimisation.layer_groups(net, cfg.lr, cfg.layer_decay, cfg.weight_decay)
    optimizer = torch.optim.AdamW(groups)
    ema = optimisation.averaged(run, net, cfg.ema, 0, batches)
    depths = [group["depth"] for group in optimizer.param_groups]
    factors = lr_factors(cfg, batches.per_epoch, loop.total_steps(cfg, batches), depths)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
    autocast = optimisation.autocast(run, cfg)
    weights = class_weights(train_set).to(world.device) if cfg.class_weights else None
    cross_entropy = partial(F.cross_entropy, weight=weights, label_smoothing=cfg.label_smoothing)

    def losses(logits: Tensor, labels: Tensor) -> Tensor:
        """One loss per sample."""
        if cfg.multi_label:
            return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
        return cross_entropy(logits, labels, reduction="none")

    def answers(net: nn.Module) -> scores.Pairs:
        """Logits and labels of this rank's part of the validation set."""
        part = sampling.share(len(val_set), *world.data)
        batch_size = 2 * cfg.global_batch_size // world.data.size + 1
        for images, labels in loader.in_order(val_set, part, batch_size):
            with autocast:
                yield net(images), labels

    metrics = scores.of_labels if cfg.multi_label else scores.of_classes
    evaluate = partial(metrics, run, answers, len(classes), classes)
    run.resume(checkpoint.State(net, optimizer, scheduler, ema, {"classes": list(classes)}), loader)
    for step in loop.steps(run, cfg, model, loader, evaluate):
        for part in step.parts:
            images, labels = part.data
            x, labels = mixed(cfg, images, labels, len(classes), part.epoch, part.batch)
            with autocast:
                logits = model(x).float()
            step.backward(losses(logits, labels))
        optimizer.step()
        scheduler.step()
    return run.results


if START:
    session.run(main, START)

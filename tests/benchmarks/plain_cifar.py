"""CIFAR-10 the straightforward way, as tutorials have it: the peer that the recipe's training is
held against.

    # DATA/<train|test>/<class>/*
    torchrun --nproc-per-node=2 -m tests.benchmarks.plain_cifar DATA EPOCHS SEED

torchvision's ResNet-18 for 32 px, DistributedDataParallel over gloo, ImageFolder with Pillow in a
DataLoader, SGD with momentum, a rate that falls to a tenth at half and at three quarters, float32.
Rank 0's last line is a JSON object: accuracy, samples that were evaluated (each once), train_s
(first step to last, evaluation left out).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

BATCH_SIZE = 128  # over all ranks
# with the usual 0.1 it comes to half of the accuracy in 8 epochs
LR = 0.02
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


def main(data: Path, epochs: int, seed: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(seed)

    normalise = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    train_set = ImageFolder(str(data / "train"), transforms.Compose(augment + normalise))
    test_set = ImageFolder(str(data / "test"), transforms.Compose(normalise))
    sampler: DistributedSampler[int] = DistributedSampler(train_set, seed=seed)
    train_loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=sampler)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), BATCH_SIZE)

    net = torchvision.models.resnet18(num_classes=len(train_set.classes))
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    model = DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [epochs // 2, epochs * 3 // 4])

    dist.barrier()
    start = time.perf_counter()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()
    train_s = time.perf_counter() - start

    model.eval()
    right = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        for images, labels in test_loader:
            right += torch.tensor([int((net(images).argmax(1) == labels).sum()), len(labels)])
    dist.all_reduce(right)
    if rank == 0:
        print(
            json.dumps(
                {
                    "accuracy": right[0].item() / right[1].item(),
                    "samples": right[1].item(),
                    "train_s": train_s,
                }
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

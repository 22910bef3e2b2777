"""The checks of ``make gpu``. Each is a function whose docstring says what must hold: it returns
figures, raises AssertionError where it does not hold, and `NotPossible` where this machine cannot
show it. On the CPU each takes the same path, in a small size.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from recipes import cifar, imagenet
from recipes.conf.imagenet import Config
from recipes.core.data import image_sets, in_memory
from recipes.core.data.image_sets import Crops
from recipes.core.data.in_memory import AugmentedImages
from recipes.core.data.sampling import GlobalBatches
from recipes.core.data.torch_loader import TorchLoader
from recipes.core.train import sharding
from recipes.core.train.host_copy import HostCopy
from recipes.core.train.optimisation import _Average
from recipes.core.train.optimizers import LARS
from recipes.gpt import GPT
from tests import states
from tests.benchmarks import inputs
from tests.benchmarks.measure import FULL, TINY
from tests.gpu.place import Figures, NotPossible, Place

TFLOPS = {"H200": 600, "H100": 500}  # at least, of products in bfloat16
# at least, of ResNet-50 in training: eager, compiled
IMAGES_PER_S = {
    "H200": (5500, 7500),
    "H100": (3850, 5250),
}
PAUSE_S = 0.05  # of the training at a checkpoint
FOREVER = ("dataset=digits", "epochs=1000", "log_every_steps=1")


def doctor(place: Place) -> Figures:
    """a product is right and fast, and the doctor finds no fault"""
    figures: Figures = {}
    if not place.dry:
        for gpu in json.loads(
            place.run("-m", "recipes.core.doctor.gpucheck", "gpus").splitlines()[-1]
        ):
            assert gpu.get("correct"), gpu
            figures["tflops"] = gpu["tflops"]
            assert gpu["tflops"] >= (place.least(TFLOPS) or 0), gpu
    place.run("-m", "recipes.doctor", f"device={place.device.type}", f"run_dir={place.folder}")
    return figures


def collectives(place: Place) -> Figures:
    """every operation of one rank is right, and is timed"""
    place.run(*place.recipe("collectives", "mode=learn", run="learn"))
    place.run(
        *place.recipe("collectives", "mode=bench", f"sizes=1M..{place.size(256, 2)}M", run="bench")
    )
    return {}


def ddp(place: Place) -> Figures:
    """gradients of DDP (channels_last, bucket views, no_sync) equal those without it"""
    place.meet()
    torch.manual_seed(0)
    net = (
        torchvision.models.resnet18(num_classes=10)
        .to(place.device)
        .to(memory_format=torch.channels_last)
    )
    x = torch.randn(16, 3, 64, 64, device=place.device).to(memory_format=torch.channels_last)

    def gradients(model: nn.Module, parallel: bool) -> list[Tensor]:
        net.zero_grad(set_to_none=True)
        for part, is_last in ((x[:8], False), (x[8:], True)):
            if parallel and not is_last:
                with model.no_sync():
                    model(part).square().sum().backward()
            else:
                model(part).square().sum().backward()
        return [p.grad.clone() for p in net.parameters()]

    alone = gradients(net, parallel=False)
    devices = None if place.dry else [place.device]
    theirs = gradients(
        DistributedDataParallel(net, device_ids=devices, gradient_as_bucket_view=True),
        parallel=True,
    )
    worst = max(
        float((a - b).norm() / a.norm().clamp(min=1e-6)) for a, b in zip(alone, theirs, strict=True)
    )
    assert worst < 1e-3, worst
    return {"largest relative difference": f"{worst:.1g}"}


def digits(place: Place) -> Figures:
    """mnist learns scikit-learn's digits, and its first 20 losses are those of the CPU"""
    keys = ("dataset=digits", "max_steps=20", "log_every_steps=1", "dtype=float32", "cpu_threads=4")
    place.run(*place.recipe("mnist", *keys, run="here"))
    place.run("-m", "recipes.mnist", "device=cpu", f"run_dir={place.folder}/cpu", *keys)
    apart = max(
        abs(a["loss"] - b["loss"])
        for a, b in zip(place.rows("here"), place.rows("cpu"), strict=True)
    )
    assert apart <= 1e-4, apart
    place.run(*place.recipe("mnist", "dataset=digits", f"epochs={place.size(20, 10)}"))
    top1 = place.summary()["val_top1"]
    assert top1 >= 0.97, top1
    return {"losses differ by at most": f"{apart:.1g}", "accuracy": round(top1, 4)}


def arithmetic(place: Place) -> Figures:
    """augmentation, normalisation, LARS and averaged weights are those of the CPU"""
    train, _ = in_memory.fake(256, 1, (3, 32, 32))
    random = torch.Generator().manual_seed(0)
    order = torch.randperm(256)

    def crop(device: torch.device) -> Tensor:
        images = AugmentedImages(
            train.images.to(device), 4, reflect=True, flip=True, cutout=8, fill=121
        )
        images.draw(0, 1)
        return images.take(order.to(device))

    here = crop(place.device)
    there = crop(torch.device("cpu"))
    assert torch.equal(here.cpu(), there)
    mean, std = (torch.tensor(values) for values in (cifar.MEAN, cifar.STD))
    pixels = in_memory.normalise(here, mean.to(place.device), std.to(place.device))
    worst = float((pixels.cpu() - in_memory.normalise(there, mean, std)).abs().max())
    net = nn.Linear(64, 8)
    weights = torch.randn(8, 64, generator=random)
    nets = [nn.Linear(64, 8) for _ in range(2)]
    for net_copy, device in zip(nets, (place.device, torch.device("cpu")), strict=True):
        net_copy.load_state_dict(net.state_dict())
        net_copy.to(device)
        average = _Average(net_copy, 0.9)
        optimizer = LARS([{"params": net_copy.parameters(), "weight_decay": 1e-4}], 0.1)
        for _ in range(3):
            net_copy.weight.grad, net_copy.bias.grad = weights.to(device), weights[:, 0].to(device)
            optimizer.step()
            average.update_parameters(net_copy)
        net_copy.average = average.module
    for a, b in zip(nets[0].state_dict().values(), nets[1].state_dict().values(), strict=True):
        worst = max(worst, float((a.cpu() - b).abs().max()))
    assert worst <= 1e-6, worst
    return {"largest difference": f"{worst:.1g}"}


NO_SYNC = """
import sys
from recipes.core.run import entry
NAME = sys.argv[1]
START = entry.begin(NAME, sys.argv[2:])
import importlib
import torch
from recipes.core.train import loop, session
def mode(name):
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(name)
record = loop._StepEnds._record
def rows_may_wait(ends, *step):
    mode("default")
    stop = record(ends, *step)
    mode("default" if ends.run.step == ends.total else "error")
    return stop
loop._StepEnds._record = rows_may_wait
session.run(importlib.import_module(f"recipes.{NAME}").main, START)
"""


def no_sync(place: Place) -> Figures:
    """steps between two rows never wait for the GPU"""
    steps = place.size(50, 4)
    keys = (*place.small_images, f"max_steps={steps}", "log_every_steps=1000")
    place.run(
        "-c",
        NO_SYNC,
        place.recipe_of_images,
        f"device={place.device.type}",
        f"run_dir={place.folder}/run",
        *keys,
    )
    assert place.summary()["steps"] == steps
    return {"steps": steps}


def host_copy(place: Place) -> Figures:
    """a checkpoint holds the weights of its step although later steps are queued, and stops the
    training for less than 50 ms
    """
    net = torchvision.models.resnet50().to(place.device) if not place.dry else nn.Linear(100, 100)
    weights = [p.detach() for p in net.parameters()]
    copy = HostCopy()
    copy.take(weights)  # allocates the memory
    copy.wait()
    expected = [weight.clone() for weight in weights]
    if not place.dry:
        torch.cuda._sleep(1_000_000_000)
    begin = time.monotonic()
    copied = copy.take(weights)
    pause = time.monotonic() - begin
    torch._foreach_add_(weights, 1.0)
    copy.wait()
    for a, b in zip(copied, expected, strict=True):
        assert torch.equal(a, b.cpu())
    assert pause < PAUSE_S, pause
    return {"pause": f"{1000 * pause:.1f} ms"}


def exact_resume(place: Place) -> Figures:
    """with deterministic=true, a run that is resumed in the middle ends with the same bits"""
    steps = place.size(60, 4)
    name = place.recipe_of_images
    keys = (*place.small_images, f"max_steps={steps}", "global_batch_size=64")
    every = (f"checkpoint_every_steps={steps // 2}", "keep_checkpoints=0", "deterministic=true")
    place.run(*place.recipe(name, *keys, *every, run="whole"))
    middle = f"resume={place.folder}/whole/checkpoints/step-{steps // 2:08d}.pt"
    place.run(*place.recipe(name, *keys, *every, middle, run="resumed"))
    whole = states.at_step(place.folder / "whole", steps)
    assert states.at_step(place.folder / "resumed", steps) == whole
    out = place.run(*place.recipe(name, *keys, middle, "deterministic=false", run="other"))
    assert place.dry or "deterministic=false" in out
    return {"steps": steps}


BUSY = """
import sys
from recipes.core.run import entry
NAME, FIRST, CYCLES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
START = entry.begin(NAME, sys.argv[4:])
import importlib
import torch
from recipes.core.train import loop, session
end = loop._StepEnds.end
def busy(ends, step):
    if torch.cuda.is_available() and ends.run.step >= FIRST:
        torch.cuda._sleep(CYCLES)
    return end(ends, step)
loop._StepEnds.end = busy
session.run(importlib.import_module(f"recipes.{NAME}").main, START)
"""


def ends(place: Place) -> Figures:
    """while the GPU is busy, SIGTERM saves (75), and SIGKILL and two SIGINTs end the run"""
    busy = ("-c", BUSY, "cifar", "0", "200000000")  # a tenth of a second for each step
    keys = (
        "dataset=fake",
        "arch=airbench94",
        "epochs=1000",
        "log_every_steps=1",
        "global_batch_size=64",
    )
    for number, expected in (
        (signal.SIGTERM, (75,)),
        (signal.SIGKILL, (-9,)),
        (signal.SIGINT, (130, -2, 75)),
    ):
        process = place.start(*busy, *place.recipe("cifar", *keys, run=number.name)[2:])
        place.until(process, number.name)
        process.send_signal(number)
        if number is signal.SIGINT:
            process.send_signal(number)
        out, _ = process.communicate(timeout=60)
        assert process.returncode in expected, f"{number.name}: {process.returncode}: {out[-1000:]}"
    return {}


def out_of_memory(place: Place) -> Figures:
    """a batch that does not fit the GPU's memory ends with a line that names the fix"""
    if place.dry:
        raise NotPossible("a CPU's memory does not end at a size")
    out = place.run(*place.recipe("cifar", "dataset=fake", "global_batch_size=50000"), status=1)
    assert "use a smaller global_batch_size=, or a larger accumulate=" in out, out[-1000:]
    return {}


def hang(place: Place) -> Figures:
    """a GPU that never ends its work: timeout_s=10 ends the run, and NCCL's flight record can be
    read meanwhile
    """
    if place.dry:
        raise NotPossible("a CPU does not hang like that")
    process = place.start(
        "-c",
        BUSY,
        "mnist",
        "5",
        "200000000000",
        *place.recipe("mnist", "timeout_s=10", *FOREVER)[2:],
    )
    place.until(process, rows=5)
    begin = time.monotonic()
    out, _ = process.communicate(timeout=60)
    took = time.monotonic() - begin
    assert "made no progress for" in out, out[-1000:]
    assert took < 40, took
    place.meet()
    dist.all_reduce(torch.ones(1, device=place.device))  # makes the communicator
    place.sync()
    torch.cuda._sleep(4_000_000_000)
    dist.all_reduce(torch.ones(1, device=place.device))
    begin = time.monotonic()
    record = pickle.loads(torch._C._distributed_c10d._dump_nccl_trace())
    assert time.monotonic() - begin < 1
    entry = record["entries"][-1]
    assert entry["profiling_name"] == "nccl:all_reduce", entry
    return {"ended after": f"{took:.1f} s", "state in the record": entry["state"]}


def steps_per_s(
    place: Place, model: nn.Module, net: nn.Module, batch: int, px: int, count: int
) -> float:
    """Training steps per second of a classifier in bfloat16, after three steps that do not
    count.
    """
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True)
    x = torch.randn(batch, 3, px, px, device=place.device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device=place.device)
    begin = 0.0
    for number in range(count + 3):
        if number == 3:
            place.sync()
            begin = time.monotonic()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(place.device.type, torch.bfloat16):
            logits = model(x).float()
        F.cross_entropy(logits, labels, label_smoothing=0.1).backward()
        optimizer.step()
    place.sync()
    return count / (time.monotonic() - begin)


def classifier(place: Place) -> nn.Module:
    arch = torchvision.models.resnet18 if place.dry else torchvision.models.resnet50
    return arch().to(place.device).to(memory_format=torch.channels_last)


def speed(place: Place) -> Figures:
    """training steps of ResNet-50, 224 px, bfloat16, eager and compiled"""
    torch.backends.cudnn.benchmark = True
    net = classifier(place)
    batch = place.size(256, 2)
    px = place.size(224, 64)
    eager = batch * steps_per_s(place, net, net, batch, px, place.size(40, 2))
    compiled = torch.compile(net, dynamic=False) if not place.dry else net
    fast = batch * steps_per_s(place, compiled, net, batch, px, place.size(40, 2))
    figures: Figures = {
        "eager": f"{eager:,.0f} images/s",
        "compiled": f"{fast:,.0f}",
    }
    least = place.least(IMAGES_PER_S)
    if least:
        assert eager >= least[0], figures
        assert fast >= least[1], figures
    return figures


def compiled(place: Place) -> Figures:
    """with compile=true, cifar's losses stay finite, in bfloat16 too"""
    if place.dry:
        raise NotPossible("the evaluation takes a CPU minutes")
    keys = (
        "dataset=fake",
        "variant=fast",
        "compile=true",
        "dtype=bfloat16",
        "max_steps=6",
        "log_every_steps=1",
    )
    place.run(*place.recipe("cifar", *keys))
    return {"last loss": round(place.rows()[-1]["loss"], 3)}


def gpt(place: Place) -> Figures:
    """gpt learns its made text in bfloat16, compiled; not compiled, a row has the GPU's time,
    arithmetic, memory and energy
    """
    small = ("seq_len=32", "sample=4") if place.dry else ()
    full = (f"max_steps={place.size(0, 4)}", *(() if place.dry else ("compile=true",)))
    place.run(*place.recipe("gpt", "dataset=bytes", *small, *full, run="whole"))
    place.run(*place.recipe("gpt", "dataset=bytes", *small, f"max_steps={place.size(40, 4)}"))
    bits = place.summary("whole")["val_bpb"]
    row = place.rows()[-1]
    assert place.dry or bits <= 0.8, bits
    assert (
        place.dry
        or {"forward_backward", "optimizer", "mfu", "gpu_memory_gb", "gpu_energy_kj"} <= row.keys()
    ), row
    return {"bits per byte": round(bits, 3)}


def fsdp(place: Place) -> Figures:
    """losses with strategy=fsdp are those without it, on one rank; `make gpus` shows several"""
    place.meet()
    losses: list[list[float]] = []
    for divided in (False, True):
        torch.manual_seed(0)
        net = GPT(256, 2, 128, 1).to(place.device)
        if divided:
            sharding.divide(net, place.device, 1, 0)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        random = torch.Generator().manual_seed(0)
        losses.append([])
        for _ in range(place.size(20, 3)):
            optimizer.zero_grad()
            loss = net(torch.randint(0, 256, (8, 65), generator=random).to(place.device)).mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    assert apart <= 1e-5, apart
    return {"losses differ by at most": f"{apart:.1g}"}


def growing_images(place: Place) -> Figures:
    """a compiled network at its second size is as fast as one that was compiled for it alone"""
    if place.dry:
        raise NotPossible("its speed on a CPU says nothing")
    rates = {}
    torch.backends.cudnn.benchmark = True
    for name, sizes in (("growing", (128, 160)), ("alone", (160,))):
        torch._dynamo.reset()
        net = torchvision.models.resnet18().to(place.device).to(memory_format=torch.channels_last)
        model = torch.compile(net, dynamic=False)
        for px in sizes:
            rates[name] = steps_per_s(place, model, net, 256, px, 30)
    share = rates["growing"] / rates["alone"]
    assert share >= 0.9, share
    return {"share": round(share, 3)}


def packed_images(place: Place) -> Figures:
    """with real photographs, packed, the recipe imagenet is as fast as with random images (95 %)"""
    jpegs = place.folder / "jpegs"
    packed = place.folder / "packed"
    source = inputs.photos(jpegs, TINY if place.dry else FULL)
    for photo in sorted((jpegs / "train").glob("*/*.JPEG")):
        for copy in range(place.size(60, 1)):  # epochs of a usual length
            photo.with_name(f"{copy}{photo.name}").symlink_to(photo)
    place.run("-m", "recipes.prepare", "imagenet", f"data_dir={packed}", f"source={jpegs}")
    small = ("arch=resnet18", "px=64", "val_px=64", "val_resize=64") if place.dry else ()
    keys = (f"global_batch_size={place.size(256, 2)}", f"max_steps={place.size(140, 4)}", *small)
    rates = {}
    for name, data in (("fake", ("dataset=fake",)), ("real", (f"data_dir={packed}",))):
        place.run(
            *place.recipe(
                "imagenet", *keys, f"log_every_steps={place.size(20, 1)}", *data, run=name
            )
        )
        rates[name] = statistics.median(row["samples_per_second"] for row in place.rows(name)[2:-1])
        wait = statistics.median(row["data_wait"] for row in place.rows(name)[2:-1])
    figures: Figures = {
        "images": source,
        **{name: f"{rate:,.0f} images/s" for name, rate in rates.items()},
    }
    figures |= {"share": round(rates["real"] / rates["fake"], 3), "data_wait": wait}
    assert place.dry or rates["real"] >= 0.95 * rates["fake"], figures
    return figures


def decoding(place: Place) -> Figures:
    """beside processes that decode images, a step takes at most 1.1 times as long"""
    workers = max(1, len(os.sched_getaffinity(0)) - 2)
    batch = place.size(256, 4)
    crops = Crops(image_sets.Fake(1_000_000), "auto", partial(imagenet.training_crop, Config(), 1))
    batches = GlobalBatches(len(crops), batch, 0, 0, 1)
    cpu = torch.device("cpu")
    loader = TorchLoader(
        crops, batches, collate=image_sets.collate, num_workers=workers, device=cpu
    )
    over = threading.Event()
    decoded = [0]

    def read() -> None:
        for part in loader.epoch(0):
            decoded[0] += len(part.indices)
            if over.is_set():
                return

    net = classifier(place)
    px = place.size(224, 32)
    alone = steps_per_s(place, net, net, batch, px, place.size(30, 3))
    with ThreadPoolExecutor(1) as pool:
        begin = time.monotonic()
        reading = pool.submit(read)
        try:
            beside = steps_per_s(place, net, net, batch, px, place.size(60, 3))
            rate = decoded[0] / (time.monotonic() - begin)
        finally:
            over.set()
        reading.result()
    figures: Figures = {
        "decoder": crops.decoder,
        "images/s a process": f"{rate / workers:,.0f}",
        "step": f"{alone / beside:.3f}",
    }
    assert place.dry or alone / beside <= 1.1, figures
    return figures


def shared_gpu(place: Place) -> Figures:
    """two ranks on one GPU over gloo have the loss of one rank; if one is killed, the other ends"""
    keys = (
        "dataset=digits",
        "global_batch_size=63",
        "log_every_steps=1",
        "backend=gloo",
        "cpu_threads=1",
    )
    place.run(*place.recipe("mnist", *keys, "max_steps=20", run="one"))
    for rank in place.ranks(*place.recipe("mnist", *keys, "max_steps=20", run="two")):
        out, _ = rank.communicate(timeout=60)
        assert rank.returncode == 0, out[-2000:]
    apart = max(
        abs(a["loss"] - b["loss"])
        for a, b in zip(place.rows("one"), place.rows("two"), strict=True)
    )
    assert apart <= 1e-3, apart
    first, second = place.ranks(*place.recipe("mnist", *keys, "epochs=1000", run="killed"))
    place.until(first, "killed")
    second.kill()
    out, _ = first.communicate(timeout=60)
    second.communicate()
    assert first.returncode == 1, (first.returncode, out[-1000:])
    assert "lost its peers" in out, out[-1000:]
    return {"losses differ by at most": f"{apart:.1g}"}


def accuracy(place: Place) -> Figures:
    """the accuracy of cifar, five seeds of variant=fast and one of accurate, on the CIFAR-10 of
    RECIPES_DATA
    """
    if place.dry or not os.environ.get("RECIPES_DATA"):
        raise NotPossible(
            "needs a GPU, and RECIPES_DATA with CIFAR-10 as `recipes.prepare cifar10` writes it"
        )
    place.run(*place.recipe("cifar", "variant=fast", "seed=0", run="fast-0"))  # alone, for its time
    fast = [
        place.recipe("cifar", "variant=fast", f"seed={seed}", run=f"fast-{seed}")
        for seed in range(1, 5)
    ]
    for process in [
        place.start(*words)
        for words in (*fast, place.recipe("cifar", "variant=accurate", run="accurate"))
    ]:
        out, _ = process.communicate(timeout=140)
        assert process.returncode == 0, out[-2000:]
    alone = place.summary("fast-0")
    accuracies = [place.summary(f"fast-{seed}")["val_top1"] for seed in range(5)]
    assert min(accuracies) >= 0.89, accuracies
    return {
        "fast": [round(top1, 4) for top1 in accuracies],
        "mean": round(statistics.fmean(accuracies), 4),
        "fast, seconds of training": round(
            50_000 * alone["epochs"] / alone["samples_per_second"], 2
        ),
        "fast, seconds of the run": round(alone["wall_seconds"], 1),
        "accurate": round(place.summary("accurate")["val_top1"], 4),
    }


def one_gpu_twice(place: Place) -> Figures:
    """two ranks that NCCL finds on one GPU end, and say so"""
    if place.dry:
        raise NotPossible("NCCL needs a GPU")
    for rank in place.ranks(*place.recipe("mnist", *FOREVER)):
        out, _ = rank.communicate(timeout=100)
        assert rank.returncode, out[-1000:]
        assert "Duplicate GPU" in out, out[-2000:]
    return {}


TOGETHER = (
    collectives,
    ddp,
    digits,
    arithmetic,
    no_sync,
    exact_resume,
    compiled,
    gpt,
    fsdp,
    ends,
    hang,
    shared_gpu,
    one_gpu_twice,
)
ALONE = (doctor, host_copy, out_of_memory, speed, growing_images, packed_images, decoding, accuracy)

"""The tutorial of data-parallel training as one file: an MLP on made data, its loop written out. The file to read first.

    python -m recipes.toy                                             # one process
    python -m recipes.toy spawn=2 device=cpu                          # two, which torch.multiprocessing starts
    torchrun --nproc-per-node=2 -m recipes.toy device=cpu             # two, which torchrun starts; again with resume: the same line
    python launch.py recipe=toy nodes=2                               # two nodes of a cluster

The loop of the other recipes is `recipes.core.train.loop.fit`, which does what this one does, and waits less for it.
What to expect: the loss falls from 0.5 to below 0.01 in 20 epochs, a second or two on a CPU.
"""

from recipes.core.data import sampling
from recipes.core.run import entry

# Keys, env files and the network come before torch, which reads some of the variables when it is imported.
START = entry.begin("toy") if __name__ == "__main__" else None

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.conf.toy import Config
from recipes.core.launch import spawn
from recipes.core.train import loop, session
from recipes.core.train.checkpoint import State
from recipes.core.data.sampling import GlobalBatches
from recipes.core.train.session import Run


def make_data(cfg: Config) -> tuple[Tensor, Tensor]:
    """Inputs (samples, 20), uniform in [0, 1), and targets (samples, 1), a smooth function of them: the same on every rank."""
    random = sampling.generator(cfg.seed, 0, stream=2)
    inputs = torch.rand(cfg.samples, 20, generator=random)
    return inputs, torch.sin(inputs @ torch.randn(20, 1, generator=random))


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def main(cfg: Config, run: Run) -> Mapping[str, Any]:
    world = run.world
    torch.manual_seed(cfg.seed)  # so that every rank begins with the same weights
    inputs, targets = (tensor.to(world.device) for tensor in make_data(cfg))
    net = make_net().to(world.device)
    model = world.parallel(net, compile=cfg.compile)  # DistributedDataParallel, where there is more than one rank
    optimizer = torch.optim.SGD(net.parameters(), cfg.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    batches = GlobalBatches(cfg.samples, cfg.global_batch_size, cfg.seed, world.rank, world.size)
    autocast = loop.autocast(run, cfg)

    def loss_sum(indices: Tensor) -> Tensor:
        """The sum of the losses of this rank's samples: ranks may have different numbers of them."""
        with autocast:
            outputs = model(inputs[indices])
        return F.mse_loss(outputs.float(), targets[indices], reduction="sum")

    @torch.inference_mode()
    def mean_loss() -> dict[str, float]:
        """Over the whole set; each rank takes its share."""
        part = sampling.share(cfg.samples, world.rank, world.size)
        total = F.mse_loss(net(inputs[part]), targets[part], reduction="sum").double()
        return {"loss": world.sum(total).item() / cfg.samples}

    state = State(net, optimizer, scheduler)
    run.resume(state, loop.sampler_state(batches))  # the newest snapshot in the run directory, if there is one
    if cfg.evaluate:
        return loop.evaluate_only(run, mean_loss)

    if state.step >= loop.total_steps(cfg, batches):
        run.say(f"already finished: step {state.step}; more epochs= continue it")
    steps, samples, begin = loop.total_steps(cfg, batches), 0, time.perf_counter()
    while state.step < steps and not run.stopping:
        epoch, first = divmod(state.step, batches.per_epoch)  # a run may have stopped in the middle of an epoch
        print(
            f"[GPU{world.rank}] Epoch {epoch + 1} | Batchsize: {-(-cfg.global_batch_size // world.size)} | Steps: {batches.per_epoch}",
            flush=True,
        )
        for shard in batches.epoch(epoch, first):
            optimizer.zero_grad()
            loss = loss_sum(shard.indices.to(world.device))
            # DDP takes the mean of the ranks' gradients; times their number it is the sum, and so this the mean over the batch.
            (loss * world.size / shard.global_size).backward()
            optimizer.step()
            scheduler.step()
            state.step += 1
            samples += shard.global_size

            last_of_epoch, last = shard.batch == batches.per_epoch - 1, state.step == steps
            stop, save = run.agree()  # a signal may have reached one rank alone: all stop at one step
            run.stopping = "" if last else stop
            if (
                save
                or last_of_epoch
                or last
                or run.stopping
                or state.step % cfg.log_every_steps == 0
                or state.step == 1
            ):
                mean = world.sum(loss.detach().double()).item() / shard.global_size
                loop.log_row(run, epoch, mean, cfg.lr, samples / (time.perf_counter() - begin))
            if save or last or run.stopping or (last_of_epoch and (epoch + 1) % cfg.save_every == 0):
                run.save(loop.sampler_state(batches), wait=last or bool(run.stopping))
            if last or run.stopping:
                break
    run.samples, run.train_s = samples, time.perf_counter() - begin
    return {} if run.stopping else mean_loss()


if START:
    if START.settings.config.spawn:
        spawn.processes("recipes.toy", START)
    session.run(main, START)

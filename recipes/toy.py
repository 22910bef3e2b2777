"""A tutorial of data-parallel training in one file: an MLP on generated data, with an explicit step loop. Read this file first.

    python -m recipes.toy                                             # one process
    python -m recipes.toy spawn=2 device=cpu                          # two, started by torch.multiprocessing
    torchrun --nproc-per-node=2 -m recipes.toy device=cpu             # two, started by torchrun; the same line again resumes
    python launch.py recipe=toy nodes=2                               # two nodes of a cluster

The other recipes use the loop `recipes.core.train.loop.fit`. It does the same as this one, with less waiting between the ranks.
Expected: the loss falls from 0.5 to below 0.01 in 20 epochs, within one or two seconds on a CPU.
"""

from recipes.core.run import entry

# This must run before torch is imported: it sets variables from keys and env files, and torch reads some of them at import.
START = entry.begin("toy") if __name__ == "__main__" else None

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.conf.toy import Config
from recipes.core.data import sampling
from recipes.core.launch import spawn
from recipes.core.train import loop, optimisation, session
from recipes.core.data.sampling import GlobalBatches
from recipes.core.train.checkpoint import State
from recipes.core.train.session import Run


def make_data(cfg: Config) -> tuple[Tensor, Tensor]:
    """Inputs (samples, 20), uniform in [0, 1), and targets (samples, 1), a smooth function of them. The same on every rank."""
    random = sampling.generator(cfg.seed, 0, stream=2)
    inputs = torch.rand(cfg.samples, 20, generator=random)
    return inputs, torch.sin(inputs @ torch.randn(20, 1, generator=random))


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def main(cfg: Config, run: Run) -> Mapping[str, Any]:
    world = run.world
    torch.manual_seed(cfg.seed)  # every rank begins with the same weights
    inputs, targets = (tensor.to(world.device) for tensor in make_data(cfg))
    net = make_net().to(world.device)
    model = world.parallel(net, compile=cfg.compile)  # DistributedDataParallel, if there is more than one rank
    optimizer = torch.optim.SGD(net.parameters(), cfg.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    batches = GlobalBatches(cfg.samples, cfg.global_batch_size, cfg.seed, world.rank, world.size)
    autocast = optimisation.autocast(run, cfg)

    def loss_sum(indices: Tensor) -> Tensor:
        """The sum of the losses of this rank's samples. A sum, since ranks may have different numbers of samples."""
        with autocast:
            outputs = model(inputs[indices])
        return F.mse_loss(outputs.float(), targets[indices], reduction="sum")

    @torch.inference_mode()
    def mean_loss() -> dict[str, float]:
        """The mean loss over the whole set. Each rank evaluates its share. Called by all ranks."""
        part = sampling.share(cfg.samples, world.rank, world.size)
        total = F.mse_loss(net(inputs[part]), targets[part], reduction="sum").double()
        return {"loss": world.sum(total).item() / cfg.samples}

    state = State(net, optimizer, scheduler)
    run.resume(state, loop.sampler_state(batches))  # loads the newest checkpoint of the run directory, if there is one
    if cfg.evaluate:
        return loop.evaluate_only(run, mean_loss)

    steps, samples, begin = loop.total_steps(cfg, batches), 0, time.perf_counter()
    if state.step >= steps:
        run.say(f"already finished: step {state.step} of {steps}; raise epochs= to continue")
    while state.step < steps and not run.stopping:
        epoch, first = divmod(state.step, batches.per_epoch)  # a run can resume in the middle of an epoch
        print(
            f"[GPU{world.rank}] Epoch {epoch + 1} | Batchsize: {-(-cfg.global_batch_size // world.size)} | Steps: {batches.per_epoch}",
            flush=True,
        )
        for shard in batches.epoch(epoch, first):
            optimizer.zero_grad()
            loss = loss_sum(shard.indices.to(world.device))
            # DDP averages the ranks' gradients. Multiplied by the number of ranks and divided by the batch size, they are the mean over the
            # global batch.
            (loss * world.size / shard.global_size).backward()
            optimizer.step()
            scheduler.step()
            state.step += 1
            samples += shard.global_size

            # A signal may reach only one rank. The sum over all ranks makes all of them stop, or save, at the same step.
            total_loss, stop, save = run.sum_step(loss).read()
            last_of_epoch, last = shard.batch == batches.per_epoch - 1, state.step == steps
            run.stopping = "" if last else stop
            save = save or run.interval_ends() or (last_of_epoch and (epoch + 1) % cfg.save_every == 0)
            ends = last or bool(run.stopping)
            if save or ends or last_of_epoch or state.step == 1 or state.step % cfg.log_every_steps == 0:
                speed = samples / (time.perf_counter() - begin)
                loop.log_row(run, epoch, total_loss / shard.global_size, cfg.lr, speed)
            if save or ends:
                run.save(wait=ends)
            if ends:
                break
    run.samples, run.train_s = samples, time.perf_counter() - begin
    return {} if run.stopping else mean_loss()


if START:
    if START.settings.config.spawn:
        spawn.processes("recipes.toy", START)
    session.run(main, START)

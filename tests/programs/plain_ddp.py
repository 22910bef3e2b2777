"""Trains a linear layer with DistributedDataParallel.

After SIGTERM, SIGUSR1 or SIGUSR2 all ranks agree to stop, rank 0 saves, and all exit with 0.
"""

import os
import signal
import time

import torch
import torch.distributed as dist
from protocol import RUN_DIR, options, record
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    args = options()
    stopped = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: stopped.append(1))

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.rand(512, 8), torch.rand(512, 1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)
    net = nn.Linear(8, 1)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters())

    checkpoint = RUN_DIR / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    record("begin", step)

    def save() -> None:
        """Saves on rank 0. The file is never half written."""
        if dist.get_rank() == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)
            record("saved", step)
        dist.barrier()

    def stop_is_agreed() -> bool:
        """Whether a rank has been asked to stop."""
        votes = torch.tensor(len(stopped))
        dist.all_reduce(votes)
        return bool(votes)

    stopping = False
    while step < args.steps and not stopping:
        sampler.set_epoch(step)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            record("step", step)
            time.sleep(args.pace)
            stopping = stop_is_agreed()
            if stopping or (args.save_every and step % args.save_every == 0):
                save()
            if stopping or step == args.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

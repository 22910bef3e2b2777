"""Trains a linear layer with accelerate. After SIGTERM all ranks agree to stop, save, and exit with
0.
"""

import os
import signal
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from protocol import RUN_DIR, options, record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    args = options()
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))

    accelerator = Accelerator(cpu=args.cpu)
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1)):
        raise SystemExit(f"this process trains alone: {accelerator.num_processes} processes")
    set_seed(0)
    loader = DataLoader(
        TensorDataset(torch.rand(512, 8), torch.rand(512, 1)),
        batch_size=8,
        num_workers=2,
        shuffle=True,
    )
    net = nn.Linear(8, 1)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.Adam(net.parameters()), loader)

    saved = {
        int(path.name.removeprefix("checkpoint-")): path for path in RUN_DIR.glob("checkpoint-*")
    }
    step = max(saved, default=0)
    if saved:
        accelerator.load_state(str(saved[step]))
    record("begin", step)

    def save() -> None:
        """Saves into a folder that is renamed when the files of all ranks are complete."""
        unfinished = RUN_DIR / "unfinished"
        accelerator.save_state(str(unfinished))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            unfinished.rename(RUN_DIR / f"checkpoint-{step}")
            record("saved", step)
        accelerator.wait_for_everyone()

    def stop_is_agreed() -> bool:
        """Whether a rank has been asked to stop."""
        votes = torch.tensor(len(stopped), device=accelerator.device)
        return bool(accelerator.reduce(votes, "sum"))

    stopping = False
    while step < args.steps and not stopping:
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(net(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            record("step", step)
            time.sleep(args.pace)
            stopping = stop_is_agreed()
            if stopping or (args.save_every and step % args.save_every == 0):
                save()
            if stopping or step == args.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()

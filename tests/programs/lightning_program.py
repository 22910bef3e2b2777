"""Trains a linear layer with Lightning, which under Slurm saves on SIGUSR1 and then requeues the
job itself.
"""

import os
import time

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from protocol import RUN_DIR, options, record
from torch.utils.data import DataLoader, TensorDataset

args = options()


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Journal(lightning.Callback):
    """Records the steps."""

    def on_train_start(self, trainer, module):
        record("begin", trainer.global_step)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        record("step", trainer.global_step)
        time.sleep(args.pace)


class RecordingIO(TorchCheckpointIO):
    """Records the checkpoints. Lightning writes a checkpoint under another name and then renames
    it.
    """

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        record("saved", checkpoint["global_step"])


def main() -> None:
    lightning.seed_everything(0)
    loader = DataLoader(
        TensorDataset(torch.rand(512, 8), torch.rand(512, 1)),
        batch_size=8,
        num_workers=2,
        shuffle=True,
    )
    periodic = ModelCheckpoint(
        RUN_DIR / "periodic", "{step}", every_n_train_steps=args.save_every, save_top_k=-1
    )
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=local_ranks,
        num_nodes=ranks // local_ranks,
        max_steps=args.steps,
        max_epochs=-1,
        default_root_dir=RUN_DIR,
        callbacks=[Journal(), periodic] if args.save_every else [Journal()],
        plugins=[RecordingIO()],
        enable_checkpointing=bool(args.save_every),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Without Slurm, Lightning does not look for the checkpoint that it has saved on a signal.
    saved = [*RUN_DIR.glob("hpc_ckpt_*.ckpt"), *RUN_DIR.glob("periodic/*.ckpt")]
    newest = max(saved, key=lambda path: path.stat().st_mtime, default=None)
    trainer.fit(Net(), loader, ckpt_path=newest)


if __name__ == "__main__":
    main()

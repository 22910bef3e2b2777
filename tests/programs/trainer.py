"""Trains a tiny GPT-2 with the Trainer of Hugging Face, which saves on SIGTERM.

By default, a callback lets the ranks agree on the step. With ``--jit`` the Trainer saves by itself,
and its ranks do not agree.
"""

import os
import signal
import time
from pathlib import Path

import torch
from protocol import RUN_DIR, options, record, steps
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

options = options()


class Journal(TrainerCallback):
    """Records the steps."""

    def on_train_begin(self, args, state, control, **kwargs):
        record("begin", state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        record("step", state.global_step)
        time.sleep(options.pace)

    def on_save(self, args, state, control, **kwargs):
        record("saved", state.global_step)


class StopTogether(TrainerCallback):
    """At SIGTERM, all ranks save and stop at the same step."""

    def __init__(self):
        self.stopped = []
        signal.signal(signal.SIGTERM, lambda number, frame: self.stopped.append(number))

    def on_step_end(self, args, state, control, **kwargs):
        votes = torch.tensor(len(self.stopped))
        torch.distributed.all_reduce(votes)
        if votes:
            control.should_save = control.should_training_stop = True


def newest_checkpoint() -> str | None:
    """The newest complete checkpoint. The Trainer saves trainer_state.json last, and deletes the
    marker at the end.
    """
    for path in sorted(
        RUN_DIR.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])
    ):
        begun = (path / "checkpoint-is-incomplete.txt").exists()
        if (path / "trainer_state.json").exists() and not begun:
            return str(path)
    return None


def main() -> None:
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(RUN_DIR),
        max_steps=options.steps,
        per_device_train_batch_size=2,
        dataloader_num_workers=2,
        enable_jit_checkpoint=options.jit,
        save_strategy="steps" if options.save_every else "no",
        save_steps=options.save_every or 500,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=options.cpu,
    )
    if arguments.world_size != int(os.environ.get("WORLD_SIZE", 1)):
        raise SystemExit(f"this process trains alone: world_size={arguments.world_size}")
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    tokens = torch.randint(64, (512, 16))
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[Journal()] if options.jit else [Journal(), StopTogether()],
    )
    resumed = newest_checkpoint()
    trainer.train(resume_from_checkpoint=resumed)
    last = newest_checkpoint()
    if options.jit and last not in (None, resumed):  # its own save calls no callback
        step = int(Path(last).name.split("-")[1])
        if step not in steps("saved"):
            record("saved", step)
    # else torch may abort the process at its exit, with gloo once in 13 runs
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

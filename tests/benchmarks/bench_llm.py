"""The recipe llm beside TRL's SFTTrainer: the same model, batches and optimiser on the CPU.

Both train in one process, in turn: while one takes its steps, the other waits. Afterwards their
weights must be equal. ``python -m tests.benchmarks.bench_llm FILE SIDE`` trains one side alone, for
its memory.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from recipes import llm
from recipes.conf.llm import Config
from recipes.core.data import hub, made_dialogues
from recipes.core.data.dialogues import Examples
from recipes.core.data.token_batches import Part
from recipes.core.errors import require
from recipes.core.run import entry
from recipes.core.train import causal, session
from recipes.core.train.run import Run
from tests.benchmarks.measure import Figure, Size, python

LONG = "ten minutes, and it needs TRL (pip install trl)"
ROWS = 4  # of a step
TOKENS = 512  # of a row; the loss counts the second half
STRETCH = 2  # steps of a side, in turn
PAIRS = 10
LR = 1e-3
STEPS = STRETCH * (PAIRS + 1)  # in stretches; one more step follows
SIDES = ("recipe", "trl")


def figures(size: Size) -> list[Figure]:
    require("trl", "bench", "bench_llm: ")
    with tempfile.TemporaryDirectory() as folder:
        measured = {}
        for side in ("both", *SIDES):
            file = Path(folder, f"{side}.json")
            python("-m", __name__, file, side)
            measured[side] = json.loads(file.read_text())
    about = f"Llama of 5.2 M parameters, {ROWS} rows of {TOKENS} tokens, float32, one rank"
    seconds = measured["both"]["seconds"]
    pairs = (seconds["recipe"], seconds["trl"])
    peaks = [[measured[side]["peak"] / 2**20] for side in SIDES]
    ours = "the recipe"
    theirs = "SFTTrainer"
    return [
        Figure("llm, step", "s", ours, theirs, "<= 1.02", *pairs, about, ratio_of="pairs"),
        Figure("llm, memory", "MiB", ours, theirs, "<= 1.05", peaks[0], peaks[1], about),
    ]


def model(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    library = hub.transformers()
    config = library.LlamaConfig(
        vocab_size=8000,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return library.AutoModelForCausalLM.from_config(config)


def examples() -> tuple[Examples, Examples]:
    """Random rows, as many as all steps take. The highest bit marks what the loss counts."""
    count = ROWS * (STEPS + 1)
    tokens = np.random.default_rng(0).integers(0, 8000, (count, TOKENS), np.uint32)
    tokens[:, TOKENS // 2 :] += np.uint32(1 << 31)
    begins = np.arange(count) * TOKENS
    lengths = np.full(count, TOKENS)
    places = np.column_stack([np.zeros(count, int), begins, lengths, lengths // 2])
    facts = {"kind": "text", "pad": 0, "vocabulary": 8000, "ends": [1]}
    made = Examples([tokens.flatten()], places, facts, "random")
    return made, Examples([tokens.flatten()], places[:1], facts, "random")


@dataclass
class Turns:
    """Hands the turn from one side to the other after each stretch. seconds: of each stretch."""

    sides: tuple[str, ...]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})

    def __post_init__(self) -> None:
        self._turn = {side: threading.Semaphore(0) for side in self.sides}
        self._turn[self.sides[0]].release()

    def stretch(self, side: str) -> Iterator[int]:
        """The steps of a side, which it takes between two iterations."""
        for turn in range(PAIRS + 1):
            self._turn[side].acquire()
            begin = time.perf_counter()
            yield from range(turn * STRETCH, (turn + 1) * STRETCH)
            self.seconds[side].append((time.perf_counter() - begin) / STRETCH)
            other = self.sides[self.sides.index(side) - 1]
            self._turn[other].release()


@dataclass
class Batches:
    """The rows in their order, for the recipe."""

    steps: Iterator[int]
    order: dict[str, Any] = field(default_factory=dict)
    per_epoch: int = STEPS + 1

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Part]:
        for step in itertools.chain(self.steps, [STEPS]):
            rows = torch.arange(step * ROWS, (step + 1) * ROWS)
            yield Part(epoch, step, rows, ROWS, rows[:, None])


def train_recipe(cfg: Config, run: Run, turns: Turns) -> Any:
    """The network of the recipe after its steps."""
    batches = Batches(turns.stretch("recipe"))
    validation = llm.TokenBatches
    sources = [lambda *_: batches, validation]
    with (
        mock.patch.object(causal, causal.tiny.__name__, model),
        mock.patch.object(made_dialogues, made_dialogues.made.__name__, examples),
        mock.patch.object(llm, llm.lr_factor.__name__, return_value=1.0),
        mock.patch.object(llm, validation.__name__, lambda *size: sources.pop(0)(*size)),
    ):
        llm.main(cfg, run)
    return run.state.model


def train_trl(folder: Path, turns: Turns) -> Any:
    """The network of SFTTrainer after the same steps."""
    import datasets
    import trl
    from torch.utils.data import SequentialSampler

    class InOrder(trl.SFTTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    class Stretches(hub.transformers().TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            next(steps, None)

    steps = turns.stretch("trl")
    made, _ = examples()
    taken = [made.take(i) for i in range(len(made))]
    rows = {
        "input_ids": [tokens.tolist() for tokens, _ in taken],
        "completion_mask": [counted.astype(int).tolist() for _, counted in taken],
    }
    arguments = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=ROWS,
        num_train_epochs=1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_length=TOKENS,
        completion_only_loss=True,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = InOrder(
        model=model(None),
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=made_dialogues.made_tokenizer(),
        callbacks=[Stretches()],
    )
    trainer.train()
    return trainer.model


def rank_main(file: Path, side: str) -> None:
    """Trains a side alone, or both in turn; writes seconds and the peak memory to ``file``."""
    turns = Turns(SIDES if side == "both" else (side,))
    nets = dict[str, Any]()

    def end() -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        seconds = {name: values[1:] for name, values in turns.seconds.items()}
        file.write_text(json.dumps({"seconds": seconds, "peak": peak}))

    def trl_side() -> None:
        torch.set_num_threads(2)
        nets["trl"] = train_trl(file.parent, turns)

    if side == "trl":
        trl_side()
        end()
        return

    def main(cfg: Config, run: Run) -> Mapping[str, Any]:
        torch.set_num_threads(2)
        other = threading.Thread(target=trl_side, daemon=True)
        if side == "both":
            other.start()
        net = train_recipe(cfg, run, turns)
        if side == "both":
            other.join()
            pairs = zip(net.parameters(), nets["trl"].parameters(), strict=True)
            if not all(torch.allclose(ours, theirs, atol=1e-3) for ours, theirs in pairs):
                raise RuntimeError("llm: the weights differ, so the work differs")
        end()
        return {}

    words = ["device=cpu", "dataset=made", f"max_len={TOKENS}", f"global_batch_size={ROWS}"]
    words += [f"lr={LR}", "pack=false", "epochs=1", "checkpoint_every_s=0", "log_every_steps=1000"]
    sys.argv[1:] = [*words, f"run_dir={file.parent / side}"]
    session.run(main, entry.begin("llm"))


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), sys.argv[2])

"""Keys of the recipe gpt. `depth` sets the size of the model; what a key leaves at 0 follows from
it by the rules here.
"""

from dataclasses import dataclass

from recipes.core.config.declare import key
from recipes.core.config.run_keys import Dtype, Mode, TrainKeys
from recipes.core.errors import ConfigError

HEAD = 64  # columns of an attention head; the default width has so many columns per block
# Tokens per step. The best batch size grows about as tokens**0.4 (Bergsma et al., 2025), and the
# tokens of the training as depth**3.
TOKENS_PER_BLOCK = 32_768
# tokens of the training per parameter in the matrices of the blocks (Hoffmann et al., 2022)
TOKENS_PER_PARAMETER = 20
# rates of AdamW for a width of 768 (nanochat); they fall as width**-0.5
EMBED_LR = 0.2
HEAD_LR = 0.004


@dataclass(frozen=True)
class Config(TrainKeys):
    prepared = ("text",)
    small_part = 1  # one sequence is enough work for a GPU: it has many positions

    dataset: str = key(
        "text",
        "text: your own text; bytes: sentences generated in memory, no download",
        values=("text", "bytes"),
    )
    depth: int = key(
        12,
        "number of blocks; width=, kv_heads=, global_batch_size=, tokens=, max_steps=, embed_lr= "
        "and head_lr= follow from it if they are 0",
        low=1,
        high=256,
    )
    width: int = key(0, "width of the model, a multiple of 64; 0: 64 * depth", high=2**16)
    kv_heads: int = key(
        0,
        "number of key/value heads; 0: one for each group of up to 4 query heads",
        high=2**10,
    )
    seq_len: int = key(1024, "tokens of a sequence", low=2, high=2**20)
    global_batch_size: int = key(
        0, "sequences per step over all ranks; 0: 32,768 * depth / seq_len", high=2**30
    )
    tokens: int = key(
        0, "tokens to train on, limited by epochs=; 0: 20 per parameter of the blocks"
    )
    max_steps: int = key(
        0,
        "maximum number of optimiser steps; 0: as many as tokens= requires",
        may_change=True,
    )
    epochs: int = 4
    lr: float = key(0.02, "peak learning rate of Muon, for the matrices of the blocks")
    momentum: float = key(0.95, "Nesterov momentum of Muon", high=1)
    weight_decay: float = key(0.1, "weight decay of the matrices of the blocks")
    embed_lr: float = key(
        0.0, "peak learning rate of AdamW for the embedding; 0: 0.2 * sqrt(768 / width)"
    )
    head_lr: float = key(
        0.0, "peak learning rate of AdamW for the head; 0: 0.004 * sqrt(768 / width)"
    )
    warmup: float = key(0.02, "fraction of the steps in which the learning rate rises", high=1)
    cooldown: float = key(
        0.4,
        "fraction of the steps, at the end, in which the learning rate falls to zero",
        high=1,
    )
    dtype: Dtype = Dtype.auto
    best_metric: str = "val_bpb"
    best_mode: Mode = Mode.min
    sample: int = key(
        100, "tokens of text to generate and print at the end", high=2**20, may_change=True
    )
    prompt: str = key("", "start of the text that sample= generates", may_change=True)

    def __post_init__(self) -> None:
        width = self.width or HEAD * self.depth
        heads = width // HEAD
        if width % HEAD:
            raise ConfigError(
                f"width={width}: must be a multiple of {HEAD}, such as {HEAD * (heads + 1)}"
            )
        kv_heads = self.kv_heads or heads // max(size for size in range(1, 5) if heads % size == 0)
        if heads % kv_heads:
            raise ConfigError(
                f"kv_heads={kv_heads}: must divide the number of heads, width/{HEAD} = {heads}"
            )
        batch = self.global_batch_size or max(1, TOKENS_PER_BLOCK * self.depth // self.seq_len)
        # A block has matrices for queries, keys and values, and the output of the attention, and
        # two matrices of the MLP.
        parameters = self.depth * (width * (width + 2 * kv_heads * HEAD) + width**2 + 8 * width**2)
        tokens = self.tokens or TOKENS_PER_PARAMETER * parameters
        scale = (768 / width) ** 0.5
        derived = {
            "width": width,
            "kv_heads": kv_heads,
            "global_batch_size": batch,
            "tokens": tokens,
            "max_steps": -(-tokens // (batch * self.seq_len)),
            "embed_lr": EMBED_LR * scale,
            "head_lr": HEAD_LR * scale,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, getattr(self, name) or value)


# Small enough for CPUs.
DATASETS = {"bytes": {"depth": 2, "seq_len": 128, "global_batch_size": 32, "epochs": 2}}

"""Keys of the recipe llm."""

from dataclasses import dataclass

from recipes.core.config.declare import key
from recipes.core.config.run_keys import Dtype, Mode, TrainKeys
from recipes.core.errors import ConfigError

LR = {"all": 1e-5, "lora": 1e-4}


@dataclass(frozen=True)
class Config(TrainKeys):
    prepared = ("dialogues",)
    small_part = 1  # one row is enough work for a GPU: it has many tokens

    dataset: str = key(
        "dialogues",
        "dialogues: your own, which recipes.prepare has written; made: dialogues generated in "
        "memory, for a tiny model with random weights",
        values=("dialogues", "made"),
    )
    model: str = key(
        "",
        "model to start from: a name on the Hugging Face hub, which recipes.prepare has fetched, "
        "or the absolute path of a folder",
        pattern=r"[/~].*|\w[\w.-]*(/\w[\w.-]*)?",
        form="a name such as Qwen/Qwen3-0.6B, or the absolute path of a folder",
    )
    allow_code: str = key(
        "",
        "digest of the Python files in the model's folder: allows a job to execute them",
        may_change=True,
        not_inherited=True,
    )
    train: str = key(
        "all",
        "all: train every weight; lora: train low-rank additions to the matrices of linear layers",
        values=("all", "lora"),
    )
    lora_rank: int = key(16, "rank of the matrices of train=lora", low=1, high=4096)
    lora_alpha: float = key(
        32.0, "the addition of train=lora is multiplied by lora_alpha / lora_rank"
    )
    lora_modules: str = key(
        "",
        "names of the linear layers with additions for train=lora, such as q_proj,v_proj; "
        "empty: all linear layers except the head",
    )
    max_len: int = key(2048, "maximum number of tokens of a row", low=2, high=2**20)
    pack: bool = key(
        True,
        "put several examples into a row of up to max_len tokens; they do not attend to each other",
    )
    global_batch_size: int = key(
        64,
        "number of rows of max_len tokens per optimiser step, over all ranks; "
        "with pack=false, examples with at most this number of tokens in total, padding included",
        low=1,
        high=2**30,
    )
    epochs: int = 3
    optimizer: str = key(
        "adamw",
        "adamw; muon: Muon for the matrices of the layers, AdamW for the other weights",
        values=("adamw", "muon"),
    )
    lr: float = key(0.0, "peak learning rate; 0 means 1e-5, or 1e-4 with train=lora")
    warmup: float = key(
        0.03,
        "fraction of the steps in which the learning rate rises (warm-up); it then falls to zero",
        high=1,
    )
    weight_decay: float = key(
        0.0, "weight decay of matrices; the additions of train=lora have none"
    )
    clip_grad_norm: float = 1.0
    recompute: bool = key(
        False,
        "keep only the input of each layer, and compute the layer again in the backward pass: "
        "less memory, a third more computation",
        may_change=True,
    )
    dtype: Dtype = Dtype.auto
    best_metric: str = "val_loss"
    best_mode: Mode = Mode.min

    def __post_init__(self) -> None:
        if self.train == "lora" and self.optimizer == "muon":
            raise ConfigError("optimizer=muon: cannot be used with train=lora: give adamw")
        if self.compile and not self.pack:
            # rows of any number of short examples would all be padded to max_len
            raise ConfigError("compile=true: requires pack=true")
        if not self.lr:
            object.__setattr__(self, "lr", LR[self.train])


# Small enough for CPUs.
DATASETS = {"made": {"max_len": 256, "global_batch_size": 8, "epochs": 2, "lr": 1e-3}}

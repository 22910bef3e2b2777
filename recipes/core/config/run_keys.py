"""The keys that every recipe has: how a run is run (`RunKeys`), and what it trains (`RecipeKeys`,
`TrainKeys`).
"""

from dataclasses import Field, dataclass
from enum import Enum
from typing import ClassVar

from recipes.core.config import declare
from recipes.core.config.declare import NAME, key
from recipes.core.errors import ConfigError

RESUME_WORDS = ("auto", "never", "best", "latest")  # of resume=, beside a path

Device = Enum("Device", "auto cuda cpu")
Backend = Enum("Backend", "auto nccl gloo")
Dtype = Enum("Dtype", "auto float32 tf32 bfloat16 float16")
Mode = Enum("Mode", "max min")


@dataclass(frozen=True)
class RunKeys:
    """How a recipe runs, whatever it trains. Keys of launch.py and of every recipe."""

    run_dir: str = key(
        "",
        "run directory; default: runs/RECIPE/ID, where ID is the job id, "
        "or a time stamp outside Slurm",
        path=True,
        not_inherited=True,
    )
    variant: str = key(
        "",
        "named preset of recipe keys, from recipes/conf/RECIPE.py",
        pattern=NAME,
        not_inherited=True,
    )
    config: str = key(
        "", "a YAML file of keys; the command line takes precedence", path=True, not_inherited=True
    )
    network: str = key(
        "", "network settings: NAME for env/NAME.env, or the path of your own env file"
    )
    device: Device = key(
        Device.auto, "auto (GPUs; outside Slurm, the CPU if there is no GPU), cuda or cpu"
    )
    backend: Backend = key(
        Backend.auto, "communication backend: auto (nccl on GPUs, gloo on CPUs), nccl or gloo"
    )
    cpu_threads: int = key(
        0,
        "CPU threads of torch per rank; 0: torch's default for a single rank, "
        "1 thread each for several ranks",
        high=4096,
    )
    environment: str = key(
        "",
        "archive of the ranks' Python environment (.tar, .tar.gz or .tar.zst): each node of a job "
        "unpacks it once, on its own disk",
        path=True,
        not_inherited=True,
    )
    resume: str = key(
        "auto",
        "auto: resume from the newest valid checkpoint of the run directory; never: refuse a run "
        "directory that has a checkpoint; best or latest: resume from checkpoints/best or "
        "checkpoints/latest; or the path of a checkpoint or of another run directory",
        pattern=".+",
        form=f"one of {', '.join(RESUME_WORDS)}, or a path",
        not_inherited=True,
    )
    force: bool = key(
        False,
        "resume even if epochs= or max_steps= makes the run shorter or changes its learning-rate "
        "schedule midway",
        not_inherited=True,
    )
    checkpoint_every_steps: int = key(0, "steps between checkpoints; 0: off")
    checkpoint_every_s: float = key(600.0, "seconds between checkpoints; 0: off")
    keep_checkpoints: int = key(3, "number of newest checkpoints to keep; 0: all")
    keep_every_steps: int = key(0, "steps between checkpoints that are never deleted; 0: off")
    keep_best: bool = key(
        True, "keep the checkpoint with the best best_metric; checkpoints/best names it"
    )
    max_requeues: int = key(
        20, "maximum number of times that a preempted job is requeued", high=10000
    )
    restarts: int = key(
        0,
        "maximum number of times that a job starts its ranks again in its allocation after a "
        "failure; nodes that do not answer or are bad are left out",
        high=1000,
    )
    spare: int = key(
        0,
        "number of nodes of the job that are in reserve, to replace nodes in a restart",
        high=1000,
    )
    min_nodes: int = key(
        0,
        "minimum number of nodes of a restart; 0: as many as at the start",
        high=100_000,
    )
    stop_before_s: float = key(
        60.0,
        "how many seconds before the time limit the ranks save and stop, at most a quarter of "
        "the limit; 0: off; programs of script=: 120 by default",
    )
    timeout_s: float = key(
        600.0,
        "seconds that a rank waits for the other ranks in a collective before the run fails",
        low=1,
        high=86400,
    )
    idle_warn_s: float = key(
        900.0,
        "seconds without work on any GPU until the log has a warning: many sites cancel jobs with "
        "idle GPUs; 0: off",
    )
    debug: bool = key(
        False,
        "set TORCH_DISTRIBUTED_DEBUG=DETAIL: torch names collectives that do not match between "
        "ranks; this is slower",
        not_inherited=True,
    )
    umask: str = key(
        "077",
        "umask of all files, in octal: 077 (only you can read them) or 027 (your group can read "
        "them too)",
        pattern="0?0[2367][2367]",
        form="three octal digits: 0, then two digits, each 2, 3, 6 or 7 (so that only you can "
        "write), such as 077 or 027",
    )

    @property
    def on_cpu(self) -> bool:
        return self.device is Device.cpu

    def __post_init__(self) -> None:
        if self.backend is Backend.nccl and self.on_cpu:
            raise ConfigError(
                "backend=nccl: requires GPUs, but device=cpu is given; "
                "leave backend= out, or give backend=gloo"
            )
        for name in ("spare", "min_nodes"):
            if getattr(self, name) and not self.restarts:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: is used only by a restart: "
                    "give restarts=1 or more"
                )


@dataclass(frozen=True)
class RecipeKeys:
    """The base of the keys of a recipe. A recipe that trains uses `TrainKeys`.

    starts_a_run: whether `recipes.core.train.session` runs it, so that `launch.py check` can start
    it up to its first step. prepared: values of ``dataset`` whose files `recipes.prepare` puts into
    ``data_dir``; launch.py looks for them before it submits a job. hint: ends the message for an
    unknown key.
    """

    # no keys, since they have no annotation: the values for a recipe that has no such key
    starts_a_run = True
    prepared: ClassVar[tuple[str, ...]] = ()
    hint = ""
    dataset = ""
    data_dir = ""
    num_workers = 0
    global_batch_size = 0
    epochs = 0
    seed = 0
    evaluate = False
    deterministic = False
    program = ""
    restart_on_hang = False

    def __init_subclass__(cls) -> None:
        # `lr: float = 0.01` changes only the default of a key of a base class
        for name in declare.names_of(cls) & vars(cls).keys():
            value = vars(cls)[name]
            if not isinstance(value, Field):
                setattr(cls, name, declare.default(cls, name, value))

    def __post_init__(self) -> None:
        """The rules between the keys of a recipe; it raises ConfigError. Each key has been checked
        before.
        """


@dataclass(frozen=True)
class TrainKeys(RecipeKeys):
    """Keys of every training recipe. A recipe's own dataclass adds to them.

    lr_depends_on_length: whether the learning rate depends on ``epochs`` or ``max_steps``.
    small_part: with fewer samples in a forward pass, starting a GPU's kernels takes longer than
    computing. A recipe may override each.
    """

    lr_depends_on_length = True
    small_part = 32
    dataset: str = key("", "data set", pattern=NAME)
    data_dir: str = key("", "folder of the data; default: $RECIPES_DATA, else data/", path=True)
    epochs: int = key(1, "passes over the training set", high=1_000_000, may_change=True)
    max_steps: int = key(
        0,
        "maximum number of optimiser steps; the learning-rate schedule ends there too; 0: no limit",
        may_change=True,
    )
    global_batch_size: int = key(
        128,
        "samples per optimiser step over all ranks; need not be divisible by the number of ranks",
        low=1,
        high=2**30,
    )
    lr: float = key(0.1, "peak learning rate")
    seed: int = key(0, "random seed of weights, sample order and augmentation", high=2**62)
    accumulate: int = key(
        1,
        "gradient accumulation: number of parts into which a rank's batch is divided to fit in "
        "memory",
        low=1,
        may_change=True,
    )
    dtype: Dtype = key(
        Dtype.float32,
        "float32; tf32: float32, but GPUs round the factors of products to 10 bits of mantissa; "
        "bfloat16: autocast; float16: autocast with a loss scale, for GPUs older than A100; "
        "auto: bfloat16 if all GPUs support it, else float32",
    )
    clip_grad_norm: float = key(
        0.0,
        "maximum norm of all gradients together; larger ones are scaled down to it; 0: off",
        may_change=True,
    )
    best_metric: str = key(
        "",
        "name of the evaluation result by which checkpoints are compared; "
        "empty: val_top1 (if the recipe has it)",
        pattern=NAME,
        may_change=True,
    )
    best_mode: Mode = key(
        Mode.max,
        "max: a larger best_metric is better; min: a smaller one (a loss)",
        may_change=True,
    )
    patience: int = key(
        0,
        "early stopping: end the run after this number of epochs without a better best_metric; "
        "0: off",
        may_change=True,
    )
    deterministic: bool = key(
        False,
        "use deterministic algorithms only; on GPUs, equal runs then have results that are equal "
        "to the bit, but are slower",
        may_change=True,
    )
    strategy: str = key(
        "ddp",
        "ddp: each rank has the whole model; fsdp: weights, gradients and optimiser state are "
        "divided over the ranks",
        values=("ddp", "fsdp"),
        may_change=True,
    )
    shard_size: int = key(
        0,
        "with strategy=fsdp, number of ranks that share one copy of the model, "
        "such as those of a node; 0: all",
        may_change=True,
    )
    compile: bool = key(False, "compile the model with torch.compile", may_change=True)
    evaluate: bool = key(
        False,
        "evaluate the newest checkpoint (or resume=PATH) without training",
        may_change=True,
        not_inherited=True,
    )
    profile: int = key(
        0,
        "record this number of steps of rank 0 with torch's profiler, "
        "into profile/ of the run directory; 0: off",
        high=1000,
        may_change=True,
        not_inherited=True,
    )
    tensorboard: bool = key(
        False,
        "write events for TensorBoard to tensorboard/ in the run directory at each checkpoint",
        may_change=True,
    )
    log_every_steps: int = key(20, "steps between rows of metrics.jsonl", low=1, may_change=True)

"""Keys: declared once in dataclasses, typed as ``key=value``, checked without torch on the login node.

Precedence: the dataclass's default < the cluster's profile (job keys, ``network``) < what the recipe's conf has for the dataset
< the keys of the run that is resumed (its ``config.yaml``) < ``variant=NAME`` < ``config=FILE.yaml`` < ``key=value``. OmegaConf merges
and converts; ``__post_init__`` of each dataclass checks ranges. A variant or a config= file given on a resume counts as typed.
"""

import contextlib
import dataclasses
import difflib
import importlib
import itertools
import math
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, cast

try:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException, ValidationError
except ModuleNotFoundError as missing:
    mend = "activate your environment (. .venv/bin/activate), or type: make install"
    print(f"{sys.executable} has no module '{missing.name}': {mend}", file=sys.stderr)
    raise SystemExit(3) from None

from recipes.core.files import ROOT
from recipes.core.config import envfile
from recipes.core.place import hostlist
from recipes.core.run import rundir
from recipes.core.errors import ConfigError, shown


MAX_YAML = 1 << 16  # bytes of a file of keys; a larger one could take many seconds to read
LARGEST = 2**63 - 1  # a larger whole number could be written into a checkpoint, and not be read back
SWEEP = "sweep."
IN_IMAGE = ("container", "container_runtime", "container_mounts")  # also $RECIPES_CONTAINER…
MOST_RUNS = 1000  # of a sweep; Slurm's MaxArraySize is 1001 where nobody has set it
RESUME_WORDS = ("auto", "never", "best", "latest")  # of resume=, beside a path
LENGTH = ("epochs", "max_steps")  # the keys that set how long a run trains
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # ends a line for some reader, or speaks to a terminal


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest of ``known``, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def key(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    pattern: str = "",
    form: str = "",
    path: bool = False,
    may_change: bool = False,
    of_launch: bool = False,
    sbatch: str = "",
) -> Any:
    """A dataclass field with what its check and ``--help`` need.

    low, high: the inclusive range of a number. pattern: a full-match expression that a text that is not empty must meet;
    form: that pattern in words. path: made absolute when a job is submitted. may_change: a resumed run may have another (paths
    may, too). of_launch: holds for this launch only; a resumed run does not inherit it. sbatch: the option of sbatch that sets the same.
    """
    meta = {
        "help": help, "low": low, "high": high, "pattern": pattern, "form": form, "path": path, "may_change": may_change,
        "of_launch": of_launch, "sbatch": sbatch,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=meta)


def may_change(keys: type) -> set[str]:
    """The keys of a dataclass that a resumed run may have otherwise: what a base declares so, a default of one's own does not undo."""
    return _declared(keys, "may_change") | _declared(keys, "path")


def _declared(keys: type, what: str) -> set[str]:
    """The keys of a dataclass that itself or a base declares with ``what``, a flag of `key`."""
    declared = (field for base in keys.__mro__ if dataclasses.is_dataclass(base) for field in dataclasses.fields(base))
    return {field.name for field in declared if field.metadata.get(what)}


def check(keys: Any) -> None:
    """Checks every field of a dataclass of keys against the range and pattern that it declares.

    Raises ConfigError for the first that is outside.
    """
    for field in dataclasses.fields(keys):
        value, meta = getattr(keys, field.name), field.metadata
        given = f"{field.name}={shown(value)}"
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{given}: wants a finite number")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if meta.get("low") is not None and value < meta["low"]:
                raise ConfigError(f"{given}: the least is {meta['low']:g}")
            high = LARGEST if meta.get("high") is None and isinstance(value, int) else meta.get("high")
            if high is not None and value > high:
                raise ConfigError(f"{given}: the most is {high:g}")
        if isinstance(value, str):
            if CONTROL.search(value):
                raise ConfigError(f"{given}: has a control character (a newline, say); write it in one plain line")
            if value and meta.get("pattern") and not re.fullmatch(meta["pattern"], value, re.ASCII):
                raise ConfigError(f"{given}: wants {meta['form']}")
            if value.startswith("~") and os.path.expanduser(value) == value:
                raise ConfigError(f"{given}: there is no home of that user; write the whole path")


class Launcher(Enum):
    slurm = "slurm"
    local = "local"
    print = "print"


class Device(Enum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class Runtime(Enum):
    auto = "auto"
    apptainer = "apptainer"
    singularity = "singularity"
    pyxis = "pyxis"


class Backend(Enum):
    auto = "auto"
    nccl = "nccl"
    gloo = "gloo"
    mpi = "mpi"


class Dtype(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


NAME = r"[A-Za-z0-9_.+@=:-]{1,128}"
NAME_FORM = "letters, digits and _ . + @ = : - only"
NAMES = r"[A-Za-z0-9_.+@=:,-]{1,256}"
MOUNT = r"(/|~/)[A-Za-z0-9_./+@=~-]*(:[A-Za-z0-9_./+@=~-]+){0,2}"
DEPENDENCY = r"(singleton|after\w*(:\d+(_(\d+|\*))?(\+\d+)?)+)([,?](singleton|after\w*(:\d+(_(\d+|\*))?(\+\d+)?)+))*"
TIME = r"\d{1,7}|\d{1,6}:\d{2}|\d{1,5}:\d{2}:\d{2}|\d{1,4}-\d{1,2}(:\d{2}){0,2}"


@dataclass(frozen=True)
class JobKeys:
    """What a job asks of Slurm, or of this machine: keys of launch.py alone."""

    recipe: str = key("", "which recipe: a file recipes/NAME.py", pattern=r"[a-z][a-z0-9_]*", form="a recipe's name")
    launcher: Launcher = key(
        Launcher.slurm, "slurm: submit; local: start the ranks here; print: show the sbatch script"
    )
    nodes: int | None = key(
        None, "number of nodes; default: 1, with gpus= as many as Slurm finds best", low=1, high=65536, sbatch="--nodes"
    )
    gpus_per_node: int | None = key(
        None, "GPUs, and so ranks, of each node; default: the cluster profile's, else 1", low=0, high=1024,
        sbatch="--ntasks-per-node and --gpus-per-node",
    )  # fmt: skip
    gpu_type: str = key(
        "", "the kind of GPU, where Slurm wants it said: a100", pattern=NAME, form=NAME_FORM, sbatch="--gpus-per-node=TYPE:NUMBER",
    )  # fmt: skip
    ranks_per_node: int | None = key(
        None, "ranks of each node, with device=cpu; default: 1", low=1, high=1024, sbatch="--ntasks-per-node"
    )
    cpus_per_rank: int | None = key(
        None, "CPUs of each rank; default: the cluster profile's, else 8 beside a GPU", low=1, high=4096,
        sbatch="--cpus-per-task",
    )  # fmt: skip
    gpus: str = key(
        "", "so many GPUs, and ranks, over whichever nodes have them: 10; launcher=local by hand: of each machine, 8,2", pattern=r"\d{1,4}(,\d{1,4})*",
        form="a whole number, or several with commas between them, such as 8,2", sbatch="--ntasks and --gpus-per-task=1",
    )  # fmt: skip
    node_rank: int = key(
        0, "which of gpus=… this machine is, launcher=local by hand", low=0, sbatch="no option: srun's own"
    )
    master: str = key(
        "", "HOST:PORT of the first machine, launcher=local by hand", pattern=r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):\d{1,5}",
        form="HOST:PORT, such as hostA:29400 or [fd00::1]:29400", sbatch="no option: srun's own",
    )  # fmt: skip
    time: str = key(
        "01:00:00", "time limit", pattern=TIME, form="a time of Slurm's: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS",
        sbatch="--time",
    )  # fmt: skip
    partition: str = key("", "Slurm partition(s)", pattern=NAMES, form=NAME_FORM, sbatch="--partition")
    account: str = key("", "Slurm account", pattern=NAME, form=NAME_FORM, sbatch="--account")
    qos: str = key("", "Slurm quality of service", pattern=NAME, form=NAME_FORM, sbatch="--qos")
    constraint: str = key(
        "", "node features", pattern=r"[A-Za-z0-9_.,:&|*()\[\]!-]{1,256}", form="features with & | , * ( ) [ ] between them",
        sbatch="--constraint",
    )  # fmt: skip
    exclude: str = key("", "nodes not to use: node[3-4],node7", sbatch="--exclude")
    reservation: str = key("", "Slurm reservation", pattern=NAMES, form=NAME_FORM, sbatch="--reservation")
    dependency: str = key(
        "", "start only after other jobs: afterok:1234, afterany:1234:1235, singleton", pattern=DEPENDENCY,
        form="what sbatch takes, such as afterok:1234 or singleton, with commas (all) or ? (any) between several",
        sbatch="--dependency",
    )  # fmt: skip
    mail: str = key(
        "", "who is told when the job ends, fails or is queued again", pattern=r"[A-Za-z0-9_.+%-]+(@[A-Za-z0-9.-]+)?",
        form="an address or a user's name", sbatch="--mail-user",
    )  # fmt: skip
    extra: str = key("", "further options of sbatch: extra='--mem=0 --switches=1'", sbatch="the options in it")
    name: str = key(
        "",
        "the job's name; default: the recipe's",
        pattern=r"[A-Za-z0-9_.+@=:-]{1,64}",
        form=f"{NAME_FORM}, at most 64",
        sbatch="--job-name",
    )
    cluster: str = key(
        "",
        "the site's profile, env/clusters/NAME.yaml; default: $RECIPES_CLUSTER",
        pattern=r"[A-Za-z0-9_-]{1,64}",
        form="letters, digits, _ and - only",
    )
    container: str = key(
        "", "an image that the ranks run in: a file (.sif, .sqsh), or an address that the runtime fetches, docker://…",
        pattern=r"[A-Za-z0-9_./:#@+~-]{1,512}", form="a path or an address, in letters, digits and _ . / : # @ + ~ -",
        sbatch="no option: export RECIPES_CONTAINER",
    )  # fmt: skip
    container_runtime: Runtime = key(
        Runtime.auto, "auto: pyxis for .sqsh and for names with #, else apptainer; singularity",
        sbatch="no option: export RECIPES_CONTAINER_RUNTIME",
    )  # fmt: skip
    container_mounts: str = key(
        "", "what the inside has beside the repository and the paths of a run: HOST or HOST:INSIDE, commas between several",
        pattern=MOUNT + f"(,{MOUNT})*",
        form="/HOST or /HOST:/INSIDE in letters, digits and _ . / + @ = ~ -, commas between several",
        sbatch="no option: export RECIPES_CONTAINER_MOUNTS",
    )  # fmt: skip
    snapshot: bool = key(
        True, "run a copy of the code as it was when this was submitted; false: as it is when the job runs"
    )
    parallel: int = key(
        0,
        "runs of a sweep (sweep.KEY=A,B,C) that go on at once; 0: as many as there is room for",
        low=0,
        high=100000,
        sbatch="--array, behind its %",
    )
    doctor: bool = key(False, "examine the nodes first, and submit the job again without those that are bad")
    max_resubmits: int = key(2, "how often doctor=true submits a job again", low=0, high=100)
    wait: bool = key(False, "wait for the job, follow rank 0's log, and return the job's outcome")

    def __post_init__(self) -> None:
        check(self)
        if self.exclude:
            try:
                hostlist.expand(self.exclude)
            except hostlist.HostListError as error:
                raise ConfigError(f"exclude={shown(self.exclude)}: {error}") from None
        minutes(self.time)
        extra_options(self.extra)
        if problem := image_problem(self.container):
            raise ConfigError(f"container={shown(self.container)}: {problem}")


# Keys of a site's profile alone: how its jobs ask Slurm for GPUs and nodes. A pattern for each, and that pattern in words.
ASKS = {
    "gpus": ("--gres|--gpus-per-node|--gpus-per-task", "must be --gres, --gpus-per-node or --gpus-per-task"),
    "exclusive": ("true|false|user|mcs|topo", "must be true, false, or a value of sbatch's --exclusive"),
    "mem": (r"\d{1,12}[KMGT]?", "must be a value of sbatch's --mem, such as 0 or 64G"),
    "segment": (r"\d{1,6}", "must be a number of nodes"),
    "switches": (rf"\d{{1,6}}(@({TIME}))?", "must be NUMBER or NUMBER@TIME"),
}

# Options of sbatch that extra= may not have, and why, beside those that a key of JobKeys is for.
OUR_OPTIONS = {
    "array": "sweep.KEY=A,B makes an array",
    "cpus-per-gpu": "give cpus_per_rank=",
    "chdir": "a job runs in the repository, and takes paths from where they were typed",
    "clusters": "log in to that cluster",
    "export": "what the ranks get is the launcher's to say",
    "export-file": "what the ranks get is the launcher's to say",
    **dict.fromkeys(("output", "error", "open-mode", "input"), "the log goes where launch.py says"),
    **dict.fromkeys(("requeue", "no-requeue"), "give max_requeues="),
    "signal": "give stop_before_s=",
    "wait": "give wait=true",
    "test-only": "type: python launch.py check",
    **dict.fromkeys(("wrap", "parsable", "help", "usage", "version", "quiet", "verbose"), "has no place in a script"),
}


def extra_options(text: str) -> dict[str, str]:
    """What ``extra=`` asks of sbatch: values by long names without dashes, "" where an option has none. Raises ConfigError."""
    given = f"extra={shown(text)}"
    options = {f.name: re.findall(r"--([a-z-]+)", f.metadata.get("sbatch", "")) for f in dataclasses.fields(JobKeys)}
    ours = {option: f"give {name}=" for name, own in options.items() for option in own} | OUR_OPTIONS
    found: dict[str, str] = {}
    for word in text.split():
        option = re.fullmatch(r"--([a-z][a-z0-9-]+)(?:=([^'\"\\\\]+))?", word)
        if not option:
            raise ConfigError(f"{given}: '{shown(word)}' is not --option or --option=value, in plain characters")
        name, value = option.groups(default="")
        # sbatch takes the beginning of an option's name for it.
        if whole := next((known for known in ours if known.startswith(name)), ""):
            raise ConfigError(f"{given}: --{name} is not for extra=: {ours[whole]}")
        if name == "gres" and "gpu" in value:
            raise ConfigError(
                f"{given}: GPUs are not for extra=: give gpus_per_node=, and gpu_type= beside it; where the site requires --gres,"
                " its profile says `gpus: --gres`"
            )
        if name in found:
            raise ConfigError(f"{given}: --{name} stands there twice")
        found[name] = value
    return found


@dataclass(frozen=True)
class RunKeys:
    """How a recipe runs, whatever it trains: keys of launch.py and of every recipe."""

    run_dir: str = key(
        "", "the run directory; default: runs/RECIPE/ID, ID the job's or a time stamp", path=True, of_launch=True
    )
    variant: str = key(
        "", "a named set of differences, see recipes/conf/RECIPE.py", pattern=NAME, form=NAME_FORM, of_launch=True
    )
    config: str = key("", "a YAML file of keys; keys typed beside it win", path=True, of_launch=True)
    network: str = key("", "the fabric, env/NAME.env, or the path of an env file of one's own")
    device: Device = key(Device.auto, "auto: the GPUs that are there (inside Slurm never the CPU by itself); cuda; cpu")
    backend: Backend = key(
        Backend.auto,
        "what the ranks talk through: auto: nccl on GPUs, gloo on CPUs; nccl; gloo; mpi, where torch has it",
    )
    cpu_threads: int = key(
        0, "torch's threads of a rank; 0: 1 with several ranks, torch's own choice for one", low=0, high=4096
    )
    resume: str = key(
        "auto",
        "auto: resume from the run directory's newest checkpoint; never; best; latest; or the path of a checkpoint or a run directory",
        of_launch=True,
    )
    force: bool = key(
        False,
        "resume although epochs= or max_steps= makes the run shorter, or changes its learning-rate schedule midway",
        of_launch=True,
    )
    takeover: bool = key(
        False, "take the run directory over from another job that still uses it; that one ends", of_launch=True
    )
    checkpoint_every_steps: int = key(0, "steps between checkpoints; 0: none by steps", low=0)
    checkpoint_every_s: float = key(600.0, "seconds between checkpoints; 0: none by time", low=0)
    keep_checkpoints: int = key(3, "the newest so many stay; 0: all", low=0)
    keep_every_steps: int = key(0, "checkpoints of every so many steps are saved and stay for ever; 0: none", low=0)
    keep_best: bool = key(
        True, "the one of the best evaluation (val_top1) is saved and stays; checkpoints/best names it"
    )
    max_requeues: int = key(20, "how often a preempted job is put back into the queue", low=0, high=10000)
    stop_before_s: float = key(
        60.0, "seconds before a job's time limit at which the ranks save and stop unasked, a quarter of its time at most; 0: never",
        low=0,
    )  # fmt: skip
    timeout_s: float = key(600.0, "seconds after which a collective that does not end is an error", low=1, high=86400)
    debug: bool = key(
        False, "TORCH_DISTRIBUTED_DEBUG=DETAIL: collectives that do not match are named; slower", of_launch=True
    )
    umask: str = key("077", "of all files that are made, in octal: 077 is for you alone, 027 for your group to read")

    def __post_init__(self) -> None:
        check(self)
        if not self.resume:
            raise ConfigError(f"resume=: give one of {', '.join(RESUME_WORDS)}, or the path of a checkpoint")
        if self.backend is Backend.nccl and self.device is Device.cpu:
            raise ConfigError("backend=nccl: is for GPUs, beside device=cpu: leave backend= out, or give backend=gloo")
        if not re.fullmatch("0?[0-7]{3}", self.umask) or self.umask[-3] != "0":
            raise ConfigError(
                f"umask={shown(self.umask)}: wants three octal digits that leave you your own files, such as 077 or 027"
            )


@dataclass(frozen=True)
class RecipeKeys:
    """What a run asks of any recipe's keys. One that trains nothing stands on this, and has keys of its own alone.

    starts_a_run: whether it is run by `recipes.core.train.session`, so that `launch.py check` can start it, and end it at its begin.
    """

    starts_a_run: ClassVar[bool] = True
    epochs: ClassVar[int] = 0
    evaluate: ClassVar[bool] = False
    seed: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class TrainKeys:
    """Keys that every training recipe has, by these names; a recipe's own dataclass adds to them.

    prepared: the values of ``dataset`` whose files are read from ``data_dir`` as `recipes.prepare` makes them; launch.py looks for
    them before it submits a job. lr_depends_on_length: whether the learning rate of a step depends on ``epochs`` or ``max_steps``;
    a recipe may override both.
    """

    starts_a_run: ClassVar[bool] = True
    prepared: ClassVar[tuple[str, ...]] = ()
    lr_depends_on_length: ClassVar[bool] = True
    dataset: str = key("", "which data", pattern=NAME, form=NAME_FORM)
    data_dir: str = key("", "folder of the data in torchvision's layout; default: $RECIPES_DATA, else data/", path=True)
    epochs: int = key(1, "passes over the training set", low=0, high=1_000_000, may_change=True)
    max_steps: int = key(
        0, "the run, and its schedule, ends after so many optimiser steps; 0: no limit", low=0, may_change=True
    )
    global_batch_size: int = key(
        128, "samples of one optimiser step over all ranks; need not divide", low=1, high=2**30
    )
    lr: float = key(0.1, "peak learning rate", low=0)
    seed: int = key(0, "seed of weights, order and augmentation", low=0, high=2**62)
    num_workers: int = key(
        0, "loader threads of a rank, where samples are read from files", low=0, high=1024, may_change=True
    )
    accumulate: int = key(
        1, "parts into which a rank's batch is cut, one after another, to fit in memory", low=1, may_change=True
    )
    dtype: Dtype = key(
        Dtype.float32, "arithmetic of the model; bfloat16 by autocast; auto: bfloat16 on a GPU that has it"
    )
    compile: bool = key(False, "torch.compile the model", may_change=True)
    evaluate: bool = key(
        False, "evaluate the newest checkpoint (or resume=PATH) and stop, without training", may_change=True,
        of_launch=True,
    )  # fmt: skip
    log_every_steps: int = key(20, "steps between rows of metrics.jsonl", low=1, may_change=True)

    def __post_init__(self) -> None:
        check(self)

    def choose_dataset(self, *names: str) -> None:
        """Raises ConfigError unless ``dataset`` is one of ``names``."""
        if self.dataset not in names:
            raise ConfigError(
                f"dataset={shown(self.dataset)}: wants one of {', '.join(names)}{nearest(self.dataset, names)}"
            )


@dataclass(frozen=True)
class Settings:
    """A command line, checked.

    typed: run and recipe keys as given (from ``config=`` and the command line), in the text that gives them again.
    of_job: the names of a job's keys that were given so.
    sweep: the keys of each run, where there are several; the rest of this is then of the first.
    saved: the keys for ``config.yaml``, with interpolations such as ``${oc.env:X}`` left as they are: the recipe's, and the run keys
    that were typed. from_run: the keys that are not typed and come from the run that is resumed. resumes: that run's directory.
    """

    recipe: str
    job: JobKeys
    run: RunKeys
    config: Any
    typed: dict[str, str]
    saved: DictConfig
    of_job: tuple[str, ...] = ()
    sweep: tuple[dict[str, str], ...] = ()
    from_run: dict[str, str] = dataclasses.field(default_factory=dict)
    resumes: Path | None = None

    def words_from_run(self) -> str:
        """The keys that come from the run, in words: those that differ from the recipe's defaults; "" for none."""
        cls, _ = recipe_conf(self.recipe)
        usual = {f.name: f.default for c in (RunKeys, cls) for f in dataclasses.fields(c)}
        usual |= _by_dataset(self.recipe, str(getattr(self.config, "dataset", "")))
        values = {name: getattr(self.config, name, getattr(self.run, name, "")) for name in self.from_run}
        return ", ".join(
            f"{name}={shown(text)}" for name, text in self.from_run.items() if _text(values[name]) != _text(usual[name])
        )


def _text(value: object) -> str:
    return value.name if isinstance(value, Enum) else str(value)


def in_image(environ: Mapping[str, str]) -> dict[str, str]:
    """What ``$RECIPES_CONTAINER``, ``…_RUNTIME`` and ``…_MOUNTS`` say; an empty one is none, whatever the profile has."""
    said = {name: environ[f"RECIPES_{name.upper()}"] for name in IN_IMAGE if f"RECIPES_{name.upper()}" in environ}
    return {name: value or ("auto" if name == "container_runtime" else "") for name, value in said.items()}


def recipe_names() -> list[str]:
    """The recipes there are: files recipes/NAME.py with a twin recipes/conf/NAME.py."""
    twins = (p.stem for p in (ROOT / "recipes" / "conf").glob("*.py") if (ROOT / "recipes" / p.name).is_file())
    return sorted(name for name in twins if name != "__init__")


Differences = Mapping[str, Mapping[str, Any]]


def recipe_conf(recipe: str) -> tuple[type, Differences]:
    """The ``Config`` dataclass and the ``VARIANTS`` of recipes/conf/RECIPE.py. Raises ConfigError for a name that is none."""
    names = recipe_names()
    if recipe not in names:
        mend = f"wants one of {', '.join(names)}{nearest(recipe, names)}"
        raise ConfigError(f"recipe={shown(recipe)}: {mend}")
    module = importlib.import_module(f"recipes.conf.{recipe}")
    return module.Config, getattr(module, "VARIANTS", {})


def recipe_keys(recipe: str) -> set[str]:
    """The names of a recipe's own keys. Raises ConfigError for a name that is none."""
    return _names(recipe_conf(recipe)[0])


def _by_dataset(recipe: str, dataset: str) -> Mapping[str, Any]:
    """What recipes/conf/RECIPE.py has in ``DATASETS`` for one of its datasets: keys that a smaller set wants otherwise."""
    module = importlib.import_module(f"recipes.conf.{recipe}")
    return cast(Differences, getattr(module, "DATASETS", {})).get(dataset, {})


def minutes(time: str) -> int:
    """Minutes, rounded up, of a time in one of Slurm's forms (``man sbatch``, --time). Raises ConfigError when zero."""
    days, _, clock = time.rpartition("-")
    if not clock:
        raise ConfigError("time=: wants minutes or HH:MM:SS")
    parts = [int(p) for p in clock.split(":")]
    if days:
        hours, mins, secs = parts + [0] * (3 - len(parts))
    else:
        hours, mins, secs = {1: (0, *parts, 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
    total_s = ((int(days or 0) * 24 + hours) * 60 + mins) * 60 + secs
    if total_s == 0:
        raise ConfigError(f"time={shown(time)}: a job of no time; give minutes or HH:MM:SS")
    return math.ceil(total_s / 60)


def parse(
    argv: Sequence[str], *, recipe: str = "", environ: Mapping[str, str] | None = None, to_start: bool = True
) -> Settings:
    """Checks a command line of ``key=value`` words and gives its settings.

    With ``recipe`` the words stand behind that recipe (or its batch script), where job keys are refused; without, behind
    launch.py, where ``recipe=`` is one of them. ``environ`` is read for ``$RECIPES_CLUSTER`` and ``$RECIPES_CONTAINER…`` alone (default: the process's).
    Where ``run_dir=`` or ``resume=`` names a run, keys that are not typed come from it. to_start: whether the run is to be started;
    False to look at how it ended. Raises ConfigError, one line, for the first thing wrong.
    """
    environ = os.environ if environ is None else environ
    words = _split(argv)
    if "config" in words:
        file = words.pop("config")
        from_file = _read_yaml(Path(os.path.expanduser(file)), f"config={shown(file)}")
        if "config" in from_file:
            raise ConfigError(
                f"config={shown(from_file['config'])}: stands in a config= file; one file of keys is read"
            )
        words = {**from_file, **words}
    of_launch = not recipe
    if swept := {name: words[name] for name in words if name.startswith(SWEEP)}:
        if not of_launch:
            name, value = next(iter(swept.items()))
            raise ConfigError(
                f"{name}={shown(value)}: is for launch.py, which makes a job of each value; here give one"
            )
        return _sweep({name: value for name, value in words.items() if name not in swept}, swept, environ)
    if of_launch:
        recipe = words.get("recipe", "")
        if not recipe:
            raise ConfigError(f"recipe= is missing: give recipe=NAME, one of {', '.join(recipe_names())}")
    recipe_class, variants = recipe_conf(recipe)
    job_names, run_names, recipe_names_ = (_names(c) for c in (JobKeys, RunKeys, recipe_class))
    for name, value in words.items():
        if name in job_names and not of_launch:
            raise ConfigError(_misplaced(name, value))
        if name not in job_names | run_names | recipe_names_:
            known = (run_names | recipe_names_ | job_names) if of_launch else (run_names | recipe_names_)
            raise ConfigError(
                f"{shown(name)}={shown(value)}: recipe {recipe} has no key '{shown(name)}'{nearest(name, known)}"
            )

    for name in ("gpus_per_node", "ranks_per_node"):
        if "gpus" in words and name in words:
            raise ConfigError(
                f"{name}={shown(words[name])}: beside gpus={shown(words['gpus'])}, which says how many ranks there are; give one of the two"
            )
    variant = words.get("variant", "")
    if variant and variant not in variants:
        there = ", ".join(variants) or "none"
        raise ConfigError(f"variant={shown(variant)}: recipe {recipe} has {there}{nearest(variant, variants)}")
    cluster = words.get("cluster") or environ.get("RECIPES_CLUSTER", "")
    profile = cluster_profile(cluster) if cluster else {}
    defaults = {k: v for k, v in profile.items() if k in (job_names | run_names) - ASKS.keys()}
    defaults |= in_image(environ)
    if "data_dir" in recipe_names_ & profile.keys() and not environ.get("RECIPES_DATA"):
        defaults["data_dir"] = profile["data_dir"]
    given = {**(variants[variant] if variant else {}), **words}
    place, _ = _build(RunKeys, {k: v for k, v in {**defaults, **given}.items() if k in run_names})
    resumes = _run_to_resume(place, recipe, recipe_class)
    from_run = {k: v for k, v in _keys_of(resumes, recipe, recipe_class).items() if k not in given} if resumes else {}
    dataset = str(given.get("dataset", from_run.get("dataset", "")))
    chosen = {**defaults, **_by_dataset(recipe, dataset), **from_run, **given}

    job, _ = _build(JobKeys, {k: v for k, v in chosen.items() if k in job_names} if of_launch else {})
    run, run_saved = _build_resumed(RunKeys, chosen, from_run, resumes)
    try:
        env_variables(run.network, cluster)
    except envfile.EnvFileError as error:
        network = chosen.get("network", "")
        raise ConfigError(f"network={shown(network)}: {error}" if "${" in str(network) else str(error)) from None
    config, recipe_saved = _build_resumed(recipe_class, chosen, from_run, resumes)
    typed = {k: v for k, v in words.items() if k not in job_names}
    of_job = tuple(name for name in words if name in job_names)
    of_run = run_names & {*given, *from_run} - _declared(RunKeys, "of_launch")
    settings = Settings(
        recipe, dataclasses.replace(job, recipe=recipe, cluster=cluster), run, config, typed,
        _saved(recipe_saved, run_saved, of_run, recipe_class), of_job, from_run=from_run, resumes=resumes,
    )  # fmt: skip
    if to_start and resumes:
        _want_same_experiment(settings, resumes, recipe_class)
    return settings


def _saved(recipe_saved: DictConfig, run_saved: DictConfig, of_run: set[str], recipe_class: type) -> DictConfig:
    """The keys for ``config.yaml``. Paths are absolute, since the run may be resumed from another folder."""
    keys, others = (
        cast(dict[str, Any], OmegaConf.to_container(of, resolve=False, enum_to_str=True))
        for of in (recipe_saved, run_saved)
    )
    keys |= {name: value for name, value in others.items() if name in of_run}
    paths = {name: str(value) for name, value in keys.items() if name in path_keys((recipe_class,)) | {"network"}}
    with contextlib.suppress(FileNotFoundError):  # this folder is gone: a relative path stays as it was typed
        paths = absolute(paths, (recipe_class,), Path())
    return OmegaConf.create({**keys, **paths})


def _run_to_resume(run: RunKeys, recipe: str, recipe_class: type) -> Path | None:
    """The run directory whose keys a launch inherits: that of ``run_dir=``, else the one that ``resume=`` names; None for neither.

    Raises ConfigError where ``run_dir=`` is another recipe's.
    """
    named = [("run_dir", Path(run.run_dir))] if run.run_dir else []
    if run.resume not in RESUME_WORDS:
        path = Path(run.resume)
        named += [("resume", one) for one in (path, path.parent, path.parent.parent)]  # RUN/checkpoints/NAME at most
    for name, path in named:
        try:
            folder = Path(os.path.realpath(path.expanduser()))
        except FileNotFoundError:  # this folder is gone, which launch.py tells
            continue
        # A file beside a checkpoint that was copied elsewhere may belong to another program.
        is_run = name == "run_dir" or (folder / "checkpoints").is_dir()
        if not is_run or not (folder / "config.yaml").is_file():
            continue
        other = recipe_of(folder)
        if other not in ("", recipe) and getattr(recipe_class, "starts_a_run", False):
            raise ConfigError(
                f"{name}={shown(getattr(run, name))}: is a run of recipe {other}, not {recipe}: give another {name}="
            )
        resumable = issubclass(recipe_class, TrainKeys) and run.resume != "never"
        return folder if resumable else None
    return None


def recipe_of(run_dir: Path) -> str:
    """The recipe of a run directory, by its records, else by the names of its keys; "" if neither shows it."""
    begun = rundir.owner(run_dir) or {}
    if begun.get("recipe"):
        return str(begun["recipe"])
    try:
        keys = set(_load_yaml(run_dir / "config.yaml", "")) - _names(RunKeys)
    except ConfigError:
        return ""
    return next((name for name in recipe_names() if recipe_keys(name) == keys), "")


def _keys_of(run_dir: Path, recipe: str, recipe_class: type) -> dict[str, str]:
    """The keys of a run that a resume inherits, as the words that give them. Raises ConfigError."""
    path = run_dir / "config.yaml"
    try:
        words = _read_yaml(path, shown(path, 4096))
    except ConfigError as error:
        raise ConfigError(f"{error}, or remove the file to resume with typed keys alone") from None
    known = _names(RunKeys) | _names(recipe_class)
    if unknown := sorted(words.keys() - known):
        raise ConfigError(
            f"{shown(path, 4096)}: has {shown(unknown[0])}=, which recipe {recipe} does not have: "
            "use the code that the run was trained with, or start another run"
        )
    launch = _declared(RunKeys, "of_launch") | _declared(recipe_class, "of_launch")
    unset = {name for name in path_keys((recipe_class,)) if not words.get(name)}  # a default of the site's holds
    return {name: value for name, value in words.items() if name not in launch | unset}


def _want_same_experiment(settings: Settings, resumes: Path, recipe_class: type) -> None:
    """Raises ConfigError where typed keys would change the experiment of a run that is resumed from a checkpoint."""
    now, folder = settings.config, resumes / "checkpoints"
    if now.evaluate or not any(folder.glob("step-*.pt")):
        return
    saved = _keys_of(resumes, settings.recipe, recipe_class)
    saved = {**_by_dataset(settings.recipe, saved.get("dataset", "")), **saved}
    then, _ = _build(recipe_class, {k: v for k, v in saved.items() if k in _names(recipe_class)})
    free = may_change(recipe_class)
    changed = [
        f"{name}: {_text(getattr(then, name))} then, {_text(getattr(now, name))} now"
        for name in (f.name for f in dataclasses.fields(recipe_class))
        if name not in free and getattr(then, name) != getattr(now, name)
    ]
    if changed:
        raise ConfigError(
            f"run_dir={shown(resumes, 4096)}: its checkpoints differ from these keys ({'; '.join(changed)}): "
            "give those, or another run_dir"
        )
    if not settings.run.force and (problem := change_of_length(then, now, _is_finished(resumes, settings.run.resume))):
        raise ConfigError(f"{problem}: leave it out, or give force=true (run {resumes})")


def _is_finished(run_dir: Path, resume: str) -> bool:
    """Whether a run is done, and is resumed from its last step."""
    status = rundir.read_status(run_dir) or {}
    name = Path(os.path.expanduser(resume)).name
    if name == "best":
        with contextlib.suppress(OSError, ValueError):
            name = (run_dir / "checkpoints" / name).read_text().strip()
    step = re.fullmatch(r"step-(\d+)\.pt", name)
    return status.get("state") == "done" and (step is None or int(step[1]) == status.get("step"))


def change_of_length(then: Any, now: Any, finished: bool) -> str:
    """Why a change of ``epochs`` or ``max_steps`` requires force=true, in words; "" if it does not.

    A finished run may be made longer; another one too, where the learning rate does not depend on its length.
    """
    for name in LENGTH:
        before, after = getattr(then, name), getattr(now, name)
        if before == after:
            continue
        change = f"{name}={after}: the run has {name}={before}"
        least = math.inf if name == "max_steps" else 0  # max_steps=0: no limit
        if (after or least) < (before or least):
            return f"{change}, and would become shorter"
        if not finished and now.lr_depends_on_length:
            return f"{change}, and the learning-rate schedule of its remaining steps would change"
    return ""


def _sweep(words: Mapping[str, str], swept: Mapping[str, str], environ: Mapping[str, str]) -> Settings:
    """The settings of each combination of the values that are swept, checked; those of the first, with all of them beside it."""
    values: dict[str, list[str]] = {}
    for word, given in swept.items():
        name = word.removeprefix(SWEEP)
        values[name] = [value.strip(" ") for value in given.split(",")]
        if name in words:
            raise ConfigError(f"{word}={shown(given)}: beside {name}={shown(words[name])}; give one of the two")
        if name in {"cpu_threads", "num_workers"} and "cpus_per_rank" not in words:
            raise ConfigError(
                f"{word}={shown(given)}: all runs of an array ask for as many CPUs: give cpus_per_rank= too"
            )
        if name in _names(JobKeys) | {"run_dir", "config", "umask", "device"}:
            raise ConfigError(
                f"{word}={shown(given)}: a sweep is over a recipe's keys, or a run's; {name}= is one for all"
            )
        if "" in values[name] or len(set(values[name])) < len(values[name]):
            raise ConfigError(f"{word}={shown(given)}: wants different values with commas between them")
    if math.prod(map(len, values.values())) > MOST_RUNS:
        raise ConfigError(
            f"{' '.join(map(shown, swept))}: {math.prod(map(len, values.values()))} runs; a job array has at most {MOST_RUNS}"
        )
    runs = tuple(dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))
    each = []
    try:
        for number, run in enumerate(runs):
            own = {"run_dir": f"{words['run_dir']}/{number}"} if words.get("run_dir") and len(runs) > 1 else {}
            one = parse([f"{k}={v}" for k, v in {**words, **run, **own}.items()], environ=environ)
            if own:  # each has a folder in the one that was typed
                keys = dataclasses.replace(one.run, run_dir=words["run_dir"])
                one = dataclasses.replace(one, run=keys, typed={**one.typed, "run_dir": words["run_dir"]})
            each.append(one)
    except ConfigError as error:
        name = str(error).partition("=")[0]
        where = f"{SWEEP}{name}={shown(swept[SWEEP + name])}: " if name in values else ""
        raise ConfigError(f"{where}{error}") from None
    if len(runs) == 1:
        return each[0]
    common = {name: value for name, value in each[0].typed.items() if name not in values}
    return dataclasses.replace(each[0], typed=common, sweep=runs)


def parse_keys(cls: type, argv: Sequence[str]) -> Any:
    """An instance of one dataclass of keys from ``key=value`` words, for a command that is no recipe. Raises ConfigError."""
    words, known = _split(argv), _names(cls)
    for name, value in words.items():
        if name not in known:
            raise ConfigError(
                f"{shown(name)}={shown(value)}: there is no key '{shown(name)}', only {', '.join(sorted(known))}"
                f"{nearest(name, known)}"
            )
    return _build(cls, words)[0]


def cluster_profile(cluster: str) -> dict[str, Any]:
    """The site's profile env/clusters/NAME.yaml: defaults of job keys, ``network``, ``data_dir``, the keys of `ASKS`, and the lists ``modules``,
    ``env_files``.

    Raises ConfigError when there is none of that name or it holds something else.
    """
    folder = ROOT / "env" / "clusters"
    there = sorted(p.stem for p in folder.glob("*.yaml"))
    if cluster not in there:
        raise ConfigError(
            f"cluster={shown(cluster)}: there is no env/clusters/{shown(cluster)}.yaml, only {', '.join(there)}{nearest(cluster, there)}"
        )
    path = folder / f"{cluster}.yaml"
    profile = {k: v for k, v in _load_yaml(path, str(path)).items() if v not in ("", "null", "~")}
    lines = {" ".join(line.split("#")[0].split()) for line in path.read_text(encoding="utf-8").splitlines()}
    keys = (
        "partition",
        "account",
        "qos",
        "constraint",
        "reservation",
        "extra",
        *IN_IMAGE,
        "gpus_per_node",
        "gpu_type",
        "cpus_per_rank",
        "time",
        "network",
    )
    for name, value in profile.items():
        if name in ("modules", "env_files"):
            pattern = r"[A-Za-z0-9_.+/-]{1,256}"
            if not isinstance(value, list) or not all(isinstance(v, str) and re.fullmatch(pattern, v) for v in value):
                raise ConfigError(f"{path}: '{name}' wants a list of names, one a line behind '- '")
        elif name == "environment":
            if not re.fullmatch(r"/[A-Za-z0-9_.+/@=-]{1,256}", str(value)) or f"environment: {value}" not in lines:
                raise ConfigError(
                    f"{path}: 'environment' wants a line 'environment: /FOLDER', of a venv or a conda environment"
                )
        elif name == "data_dir":
            if not str(value).startswith(("/", "~/", "${")):
                raise ConfigError(f"{path}: 'data_dir: {shown(value)}' must be an absolute path")
        elif name in ASKS:
            pattern, form = ASKS[name]
            if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
                raise ConfigError(f"{path}: '{name}: {shown(value)}' {form}")
        elif name not in keys:
            raise ConfigError(
                f"{path}: unknown key '{shown(name)}'{nearest(str(name), (*keys, *ASKS, 'modules', 'env_files', 'environment', 'data_dir'))}"
            )
        elif not isinstance(value, str):
            raise ConfigError(f"{path}: '{name}' wants one plain value")
    for module in profile.get("modules", ()):
        if f"- {module}" not in lines:
            raise ConfigError(
                f"{path}: 'modules' wants a line '- {module}' as it stands here: batch scripts read it too"
            )
    return profile


def env_variables(network: str, cluster: str) -> dict[str, str]:
    """What the env files set: common < the fabric's < the site's. Raises EnvFileError, or ConfigError for the profile."""
    profile = cluster_profile(cluster) if cluster else {}
    files = envfile.files_for(network, ROOT / "env", profile.get("env_files", ()))
    return envfile.merge(*(envfile.read(file) for file in files))


def path_keys(classes: Sequence[type]) -> set[str]:
    """The keys of dataclasses whose values are paths."""
    return {f.name for c in classes for f in dataclasses.fields(c) if f.metadata.get("path")}


def absolute(typed: Mapping[str, str], classes: Sequence[type], base: Path) -> dict[str, str]:
    """``typed`` with every path made absolute against ``base``, so that a job finds it wherever it runs."""
    paths = path_keys(classes)

    def full(name: str, value: str) -> str:
        is_path = (
            name in paths
            or (name == "resume" and value not in RESUME_WORDS)
            or (name == "network" and ("/" in value or value.endswith(".env")))
        )
        if not is_path or not value or "${" in value or value[0] == "$":
            return value
        found = os.path.realpath(base / Path(value).expanduser())  # Path.resolve() raises where links lead in a circle
        if CONTROL.search(found) or any("\ud800" <= c <= "\udfff" for c in found):
            raise ConfigError(
                f"{name}={shown(value)}: is {shown(found)}, which has a character that cannot be printed; give the folder another name"
            )
        return found

    return {name: full(name, value) for name, value in typed.items()}


def help_text(recipe: str = "") -> str:
    """The keys with their defaults and meanings: of one recipe, or of launch.py when ``recipe`` is empty."""
    groups: list[tuple[str, type]] = [("run keys", RunKeys)]
    if recipe:
        config, variants = recipe_conf(recipe)
        groups = [(f"keys of recipe {recipe}", config), *groups]
        title = f"python -m recipes.{recipe} key=value …   (variants: {', '.join(variants) or 'none'})"
    else:
        groups = [("job keys", JobKeys), *groups]
        title = f"python launch.py recipe=NAME key=value …   (recipes: {', '.join(recipe_names())}; their keys: python -m recipes.NAME --help)"
    lines = (
        [title]
        if recipe
        else [title, "python launch.py check recipe=NAME key=value …   says what would go wrong, and submits nothing"]
    )
    for heading, cls in groups:
        lines += ["", f"{heading}:"]
        for f in dataclasses.fields(cls):
            default = f.default.name if isinstance(f.default, Enum) else "" if f.default is None else f.default
            default = str(default).lower() if isinstance(default, bool) else default
            lines.append(f"  {f.name + '=' + str(default):<32} {f.metadata['help']}")
    return "\n".join(lines)


def _names(cls: type) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


def _split(argv: Sequence[str]) -> dict[str, str]:
    words: dict[str, str] = {}
    for word in argv:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"(sweep\.)?[A-Za-z_][A-Za-z0-9_]*", name):
            bare = re.fullmatch(r"--?([A-Za-z_][A-Za-z0-9_-]*)(=.*)?", word, re.DOTALL)
            mend = (
                f"; write {bare[1].replace('-', '_')}{shown(bare[2] or '=VALUE')}"
                if bare
                else "; write key=value, without blanks"
            )
            raise ConfigError(f"'{shown(word)}' is not key=value{mend}")
        if "\0" in value or len(value) > 4096:
            raise ConfigError(f"{name}={shown(value)}: too long, or with a NUL character")
        if any("\ud800" <= c <= "\udfff" for c in value):
            encoding = sys.getfilesystemencoding()
            fix = "write it in UTF-8" if encoding == "utf-8" else f"set PYTHONUTF8=1: this Python reads {encoding}"
            raise ConfigError(f"{name}={shown(value)}: is not UTF-8; {fix}")
        words[name] = value
    return words


def _read_yaml(file: Path, given: str) -> dict[str, str]:
    """The keys of a ``config=`` file, or of a run's config.yaml, as the words that would give the same. ``given``: as in `_load_yaml`."""
    words = []
    for name, value in _load_yaml(file, given).items():
        if isinstance(value, (dict, list)):
            raise ConfigError(
                f"{given}: '{shown(name)}' must be one plain value; write the keys side by side, not nested"
            )
        words.append(f"{name}={value}")
    return _split(words)


def _load_yaml(path: Path, given: str) -> dict[str, Any]:
    """The mapping in ``path``, every plain value as the text that stands there; ``given``: what names it in a message.

    Not as YAML 1.1 would type them, to which ``time: 1:00:00`` is the number 3600.
    """
    import yaml  # OmegaConf's own parser; imported where a file is read, since it costs as much as all else here

    try:
        if not stat.S_ISREG(path.stat().st_mode):  # asked first: open() on a named pipe would wait for a writer
            raise ValueError("no ordinary file")
        with open(path, "rb") as file:
            text = file.read(MAX_YAML + 1)
        if len(text) > MAX_YAML:
            raise ValueError(f"larger than {MAX_YAML} bytes")
        loader = yaml.BaseLoader(text.decode("utf-8"))
        node = loader.get_single_node()
        content = loader.construct_document(node) if node else None
        keys = node.value if isinstance(node, yaml.MappingNode) else []
        names = Counter(str(name.value) for name, _ in keys)
        if names and max(names.values()) > 1:
            raise ValueError(f"'{shown(names.most_common(1)[0][0])}' stands there twice")
    except OSError as error:
        raise ConfigError(f"{given}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as error:
        raise ConfigError(
            f"{given}: is not YAML ({shown(' '.join(str(error).split()), 120)}); write 'key: value' lines"
        ) from None
    if content in (None, ""):
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{given}: is not a mapping; write 'key: value' lines")
    return content


def _misplaced(name: str, value: str) -> str:
    field = next(f for f in dataclasses.fields(JobKeys) if f.name == name)
    options = field.metadata["sbatch"]
    given = f"{name}={shown(value)}"
    if name == "cluster":
        return f"{given}: a recipe takes its site's profile from the environment: export RECIPES_CLUSTER={shown(value)}"
    if not options:
        return f"{given}: is a key of launch.py alone: python launch.py {given} …"
    if options.startswith("--") and " " not in options:
        options += f"={shown(value)}"
    return f"{given}: the job's size and place are not the recipe's to set; give sbatch or srun {options}, or use launch.py"


def _build_resumed(
    cls: type, chosen: Mapping[str, Any], from_run: Mapping[str, str], resumes: Path | None
) -> tuple[Any, DictConfig]:
    """`_build` of those of the ``chosen`` keys that ``cls`` has. Its message names the run's file where the keys from there are the cause."""
    values = {name: value for name, value in chosen.items() if name in _names(cls)}
    try:
        return _build(cls, values)
    except ConfigError as error:
        if values.keys().isdisjoint(from_run):
            raise
        try:
            _build(cls, {name: value for name, value in values.items() if name not in from_run})
        except ConfigError:  # what was typed is invalid already
            raise error from None
        raise ConfigError(f"{error} (from {resumes}/config.yaml)") from None


def _build(cls: type, values: Mapping[str, Any]) -> tuple[Any, DictConfig]:
    """An instance of the dataclass ``cls``, converted and checked, and the mapping it was made of, unresolved."""
    merged = cast(DictConfig, OmegaConf.structured(cls))
    OmegaConf.set_readonly(merged, False)  # frozen dataclasses come read-only
    for name, value in values.items():
        field = next(f for f in dataclasses.fields(cls) if f.name == name)
        if field.type is bool and str(value).isdecimal() and str(value) not in ("0", "1"):
            raise ConfigError(f"{name}={shown(value)}: {_wanted(field)}")  # to OmegaConf any number but 0 is true
        if field.type in (int, int | None) and re.search(r"[^\x00-\x7f]|_", str(value)) and "${" not in str(value):
            # Python takes other scripts' digits, and 1_0 as 10.
            raise ConfigError(f"{name}={shown(value)}: {_wanted(field)}")
        _check_interpolations(name, str(value))
        try:
            OmegaConf.update(merged, name, None if value == "null" and field.default is None else value)
        except (OmegaConfBaseException, RecursionError):
            raise ConfigError(f"{name}={shown(value)}: {_wanted(field)}") from None
    resolved = {}
    for field in dataclasses.fields(cls):
        try:
            resolved[field.name] = merged[field.name]
        except (OmegaConfBaseException, RecursionError) as error:
            # A value that does not fit is not shown: it can be a variable that nobody else is to read.
            why = str(error).split("\n")[0].rpartition("interpolation: ")[2].strip('"')
            why = _wanted(field) if isinstance(error, ValidationError) else shown(why, 200)
            raise ConfigError(f"{field.name}={shown(values.get(field.name, ''))}: {why}") from None
    try:
        return cls(**resolved), merged
    except ConfigError as error:
        name, _, rest = str(error).partition("=")
        given = str(values.get(name, ""))
        if "${" not in given:
            raise
        value = shown(resolved[name])
        rule = rest.removeprefix(f"{value}: ")
        why = "does not fit" if rule == rest or value[:12] in rule else rule
        raise ConfigError(f"{name}={shown(given)}: what this stands for, which is not shown: {why}") from None


# A key's value, or a variable's with or without a default. OmegaConf has more: its oc.coerce (2.4) imports what it is told to.
INTERPOLATION = re.compile(r"\$\{(?:[A-Za-z_]\w*\}|oc\.env:([A-Za-z_]\w*)[,}])", re.ASCII)


def _check_interpolations(name: str, value: str) -> None:
    """Raises ConfigError for any that is not one of ours, or of a variable that is a secret by its name."""
    for start in re.finditer(r"\$\{", value):
        found = INTERPOLATION.match(value, start.start())
        if not found:
            raise ConfigError(f"{name}={shown(value)}: behind '${{' wants KEY}} or oc.env:VARIABLE}}, in plain letters")
        if found[1] and envfile.is_secret(found[1]):
            raise ConfigError(
                f"{name}={shown(value)}: {shown(found[1])} looks like a secret; what keys hold ends up in logs and names of files"
            )


def _wanted(field: "dataclasses.Field[Any]") -> str:
    kind = field.type if isinstance(field.type, type) else int
    if issubclass(kind, Enum):
        return f"wants one of {', '.join(kind.__members__)}"
    return {bool: "wants true or false", int: "wants a whole number", float: "wants a number"}.get(kind, "wants a text")


def image_problem(image: str) -> str:
    """What is wrong with an image's name, "" where nothing is: a file has to be there; an address is the runtime's to judge."""
    if re.match(r"[a-z][a-z0-9+.-]*://", image) or "#" in image:
        return ""
    path = os.path.expanduser(image)
    if os.path.isabs(path) or image.endswith((".sif", ".sqsh", ".img")) or image.startswith("."):
        return "" if os.path.exists(path) else "there is no such file"
    return ""

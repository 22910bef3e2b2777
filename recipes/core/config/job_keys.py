"""Job keys: what a job requests from Slurm, or from this machine. Only launch.py has them."""

import dataclasses
import math
import os
import re
from dataclasses import dataclass
from enum import Enum

from recipes.core.config.declare import NAME, NAMES, key
from recipes.core.errors import ConfigError, shown
from recipes.core.slurm import durations

IN_IMAGE = ("container", "container_runtime", "container_mounts")  # also $RECIPES_CONTAINER…

Launcher = Enum("Launcher", "slurm local print")
Runtime = Enum("Runtime", "auto apptainer singularity pyxis")

MOUNT = r"(/|~/)[A-Za-z0-9_./+@=~-]*(:[A-Za-z0-9_./+@=~-]+){0,2}"
_DEPENDENCY = r"(singleton|after\w*(:\d+(_(\d+|\*))?(\+\d+)?)+)"
DEPENDENCY = rf"{_DEPENDENCY}([,?]{_DEPENDENCY})*"


@dataclass(frozen=True)
class JobKeys:
    """What a job requests from Slurm, or from this machine. Only launch.py has these keys."""

    recipe: str = key(
        "",
        "recipe to run, a file recipes/NAME.py",
        pattern=r"[a-z][a-z0-9_]*",
        form="a recipe's name",
    )
    launcher: Launcher = key(
        Launcher.slurm,
        "slurm: submit; local: start the ranks on this machine; print: print the sbatch script",
    )
    nodes: int | None = key(
        None,
        "number of nodes; default: 1; with gpus=, Slurm chooses it",
        low=1,
        high=65536,
        instead="--nodes",
    )
    gpus_per_node: int | None = key(
        None,
        "GPUs per node, one rank per GPU; default: the profile's value, else 1",
        high=1024,
        instead="--ntasks-per-node and --gpus-per-node",
    )
    gpu_type: str = key(
        "",
        "type of GPU, if the site has several, such as a100",
        pattern=NAME,
        instead="--gpus-per-node=TYPE:NUMBER",
    )
    gpu_memory_gb: float = key(
        0.0,
        "memory of each GPU in GB; launch.py check refuses a model whose training needs more; "
        "0: not known",
    )
    ranks_per_node: int | None = key(
        None,
        "ranks per node, with device=cpu; default: 1",
        low=1,
        high=1024,
        instead="--ntasks-per-node",
    )
    cpus_per_rank: int | None = key(
        None,
        "CPUs per rank; default: the profile's value; without one, 8 on GPUs, and with "
        "device=cpu the sum of cpu_threads= (0 counts as 1) and num_workers= (-1 counts as 6)",
        low=1,
        high=4096,
        instead="--cpus-per-task",
    )
    gpus: str = key(
        "",
        "total number of GPUs, on any number of nodes, one rank per GPU, such as 10; "
        "with launcher=local on several machines: GPUs of each machine, such as 8,2",
        pattern=r"\d{1,4}(,\d{1,4})*",
        form="a whole number, or several separated by commas, such as 8,2",
        instead="--ntasks and --gpus-per-task=1",
    )
    node_rank: int = key(
        0,
        "index of this machine in gpus=, from 0, for launcher=local on several machines",
        instead="leave it out under srun",
    )
    master: str = key(
        "",
        "HOST:PORT of the first machine, for launcher=local on several machines",
        pattern=r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):\d{1,5}",
        form="HOST:PORT, such as hostA:29400 or [fd00::1]:29400",
        instead="leave it out under srun",
    )
    time: str = key(
        "01:00:00", "time limit", pattern=durations.PATTERN, form=durations.FORM, instead="--time"
    )
    partition: str = key("", "Slurm partition(s)", pattern=NAMES, instead="--partition")
    account: str = key("", "Slurm account", pattern=NAME, instead="--account")
    qos: str = key("", "Slurm quality of service", pattern=NAME, instead="--qos")
    constraint: str = key(
        "",
        "node features",
        pattern=r"[A-Za-z0-9_.,:&|*()\[\]!-]{1,256}",
        form="node features, combined with & | , * ( ) [ ]",
        instead="--constraint",
    )
    exclude: str = key(
        "",
        "nodes to exclude, such as node[3-4],node7",
        pattern=r"([A-Za-z0-9_.,-]|\[[0-9,-]+\])+",
        form="nodes such as node[3-4],node7",
        instead="--exclude",
    )
    reservation: str = key("", "Slurm reservation", pattern=NAMES, instead="--reservation")
    dependency: str = key(
        "",
        "jobs to wait for, such as afterok:1234, afterany:1234:1235 or singleton",
        pattern=DEPENDENCY,
        form="a value of sbatch's --dependency, such as afterok:1234 or singleton; several are "
        "separated by commas (all) or ? (any)",
        instead="--dependency",
    )
    mail: str = key(
        "",
        "address that Slurm notifies when the job ends, fails or is requeued",
        pattern=r"[A-Za-z0-9_.+%-]+(@[A-Za-z0-9.-]+)?",
        form="an address or a user name",
        instead="--mail-user",
    )
    extra: str = key(
        "",
        "further options of sbatch, such as extra='--mem=0 --switches=1'",
        instead="give these options to sbatch",
    )
    name: str = key(
        "", "name of the job; default: the recipe's name", pattern=NAME, instead="--job-name"
    )
    cluster: str = key(
        "",
        "profile of the site, env/clusters/NAME.yaml; default: $RECIPES_CLUSTER",
        pattern=r"[A-Za-z0-9_-]{1,64}",
        form="letters, digits, _ and - only",
        instead="export RECIPES_CLUSTER",
    )
    container: str = key(
        "",
        "container image for the ranks: a file (.sif, .sqsh), or an address that the runtime "
        "downloads, such as docker://…",
        pattern=r"[A-Za-z0-9_./:#@+~-]{1,512}",
        form="a path or an address of letters, digits and _ . / : # @ + ~ -",
        instead="export RECIPES_CONTAINER",
    )
    container_runtime: Runtime = key(
        Runtime.auto,
        "container runtime: auto (pyxis for .sqsh files and names with #, else apptainer), "
        "apptainer, singularity or pyxis",
        instead="export RECIPES_CONTAINER_RUNTIME",
    )
    container_mounts: str = key(
        "",
        "further folders to mount, HOST or HOST:INSIDE, separated by commas; "
        "the repository and the paths of the run are always mounted",
        pattern=MOUNT + f"(,{MOUNT})*",
        form="/HOST or /HOST:/INSIDE of letters, digits and _ . / + @ = ~ -, separated by commas",
        instead="export RECIPES_CONTAINER_MOUNTS",
    )
    snapshot: bool = key(
        True, "run a copy of the code, made at submission; false: run the repository's own files"
    )
    parallel: int = key(
        0,
        "maximum number of runs of a sweep (sweep.KEY=A,B,C) at the same time; 0: no limit",
        high=100000,
        instead="--array=…%N",
    )
    doctor: bool = key(
        False, "examine the nodes first; if some are bad, requeue the job without them"
    )
    max_resubmits: int = key(
        2, "how often doctor=true may requeue the job without bad nodes", high=100
    )
    forget: str = key(
        "",
        "use this node again, although the doctor found it bad in the last 24 hours; "
        "all: every such node",
        pattern=NAME,
        form="the name of a node, or all",
    )
    wait: bool = key(False, "wait for the job, print its log, and exit with the job's status")

    def __post_init__(self) -> None:
        minutes(self.time)
        extra_options(self.extra)
        if _is_missing_file(self.container):
            raise ConfigError(
                f"container={shown(self.container)}: no such file; give an image's path or address"
            )


# Further options of sbatch that extra= must not contain, as well as those that a key of JobKeys
# sets.
OUR_OPTIONS = (
    "array",
    "cpus-per-gpu",
    "chdir",
    "clusters",
    "export",
    "export-file",
    "output",
    "error",
    "open-mode",
    "input",
    "no-requeue",
    "signal",
    "tasks-per-node",
    "wait",
    "test-only",
    "wrap",
    "parsable",
    "help",
    "usage",
    "version",
    "quiet",
    "verbose",
)


def extra_options(text: str) -> dict[str, str]:
    """The options of sbatch in ``extra=``: values by long names without dashes, "" for an option
    without a value. Raises ConfigError.
    """
    label = f"extra={shown(text)}"
    ours = dict[str, str]()
    for field in dataclasses.fields(JobKeys):
        for option in re.findall(r"--([a-z-]+)", field.metadata["instead"]):
            ours[option] = f"give {field.name}="
    ours |= dict.fromkeys(OUR_OPTIONS, "it is reserved for launch.py")
    options = dict[str, str]()
    for word in text.split():
        match = re.fullmatch(r"--([a-z][a-z0-9-]+)(?:=([^'\"\\\\]+))?", word)
        if not match:
            raise ConfigError(
                f"{label}: '{shown(word)}' must be --option or --option=value, "
                "without quotes and backslashes"
            )
        name, value = match.groups(default="")
        # sbatch accepts an abbreviated option.
        if known := next((known for known in ours if known.startswith(name)), ""):
            raise ConfigError(f"{label}: must not contain --{name}; {ours[known]}")
        options[name] = value
    return options


def minutes(time: str) -> int:
    """The minutes, rounded up, of a time limit in one of Slurm's forms. Raises ConfigError for an
    empty text and for zero.
    """
    seconds = durations.seconds(time)
    if not seconds:
        raise ConfigError(f"time={shown(time)}: must be more than 0; give minutes or HH:MM:SS")
    return math.ceil(seconds / 60)


def _is_missing_file(image: str) -> bool:
    """Whether an image is a file that does not exist. The runtime checks other addresses."""
    if re.match(r"[a-z][a-z0-9+.-]*://", image) or "#" in image:
        return False
    is_file = image.startswith(("/", "~", ".")) or image.endswith((".sif", ".sqsh", ".img"))
    return is_file and not os.path.exists(os.path.expanduser(image))

"""Ranks in a container: options of srun and of the runtime that give it the code, the data and the
variables.

``apptainer`` (or ``singularity``) is a prefix of a rank's command. pyxis is used through options of
srun. Neither of them changes Slurm's variables. If the image sets a variable too, the image's value
takes precedence unless the variable is passed by name. The variables that configure the network are
passed by name.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from recipes.core.config import declare, job_keys, profiles
from recipes.core.config.parser import Settings
from recipes.core.config.run_keys import RunKeys
from recipes.core.errors import ConfigError, MachineError, shown
from recipes.core.files import ROOT
from recipes.core.run import source
from recipes.core.variables import Environ

# of the image; it needs torch, torchvision, omegaconf, and submitit for launch.py with pyxis
PYTHON = "python3"
# Modules on the host set the first two variables for another Python. Without the third, Python
# imports from the working directory first.
WITHOUT_MODULES = ("env", "-u", "PYTHONPATH", "-u", "PYTHONHOME", "-u", "PYTHONSAFEPATH")
# Each rank runs this on its node, where Slurm's prolog may have created a $TMPDIR for the job. $0
# is the runtime.
EXEC = '[ ! -d "${TMPDIR-}" ] || set -- --bind "$TMPDIR" "$@"; exec "$0" exec "$@"'
# Prefixes of the variables that take precedence over the image's values. Those that tell the ranks
# what they run are not among them: no image sets them, and a restart changes them.
PASSED_BY_NAME = (
    "NCCL_",
    "GLOO_",
    "UCX_",
    "FI_",
    "TORCH_",
    "MASTER_",
    "RECIPES_CLUSTER",
    "RECIPES_DATA",
    "RECIPES_TRUST_GROUP",
)
AMD = "/dev/kfd"  # of AMD's driver
# enroot gives a container the GPUs only if these are set. NVIDIA's own images set them.
OF_GPUS = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}


@dataclass(frozen=True)
class Container:
    """A container image and how to run it."""

    image: str  # a file, or an address from which the runtime downloads the image
    runtime: str
    mounts: tuple[str, ...] = ()  # HOST or HOST:INSIDE
    gpus: bool = True  # whether the ranks may use GPUs
    # passed to the ranks; those of the user take precedence
    variables: Mapping[str, str] = field(default_factory=dict)


def absolute_image(image: str, base: Path) -> str:
    """The absolute path of an image that is a file. An address remains unchanged."""
    path = base / Path(image).expanduser()
    return os.path.realpath(path) if image and path.exists() else image


def step(container: Container, code: Path, environ: Environ) -> tuple[list[str], list[str]]:
    """The options of srun, and the command before a rank's Python arguments.

    code: the folder to start in. environ: its variables that configure the network are passed to
    the container too.
    """
    if container.runtime == "pyxis":
        mounts = (mount if ":" in mount else f"{mount}:{mount}" for mount in container.mounts)
        named = {name for name in environ if name.startswith(PASSED_BY_NAME)}
        options = [
            f"--container-image={container.image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={code}",
            f"--container-env={','.join(sorted(named | container.variables.keys()))}",
        ]
        return options, [*WITHOUT_MODULES, PYTHON]
    command = [*WITHOUT_MODULES, "sh", "-c", EXEC, container.runtime]
    if container.gpus:
        command.append("--rocm" if os.path.exists(AMD) else "--nv")
    for mount in container.mounts:
        command += ["--bind", mount]
    return [], [*command, "--pwd", str(code), container.image, PYTHON]


def exports(container: Container, environ: Environ) -> dict[str, str]:
    """The variables to export, so that the container's and those of the user take precedence over
    those of the image.

    environ: of the ranks outside the container. Raises MachineError if this node does not have the
    runtime.
    """
    added = {name: value for name, value in container.variables.items() if name not in environ}
    if container.runtime == "pyxis":
        return added
    if not shutil.which(container.runtime, path=environ.get("PATH")):
        raise MachineError(
            f"container=: {os.uname().nodename} has no {container.runtime}: if an environment "
            "module provides it, list that module under modules: in the profile"
        )
    runtime = container.runtime.upper()
    inside = {
        f"{runtime}ENV_{name}": value
        for name, value in {**environ, **added}.items()
        if name.startswith(PASSED_BY_NAME) or name in container.variables
    }
    added |= {name: value for name, value in inside.items() if name not in environ}
    # Without NO_EVAL, a shell inside expands $ and ` in values (new in SingularityCE 3.10).
    added[f"{runtime}_NO_EVAL"] = "1"
    # packages of pip in the home folder are for another Python
    added[f"{runtime}ENV_PYTHONNOUSERSITE"] = "1"
    return added


def of_job(settings: Settings, environ: Environ) -> Container | None:
    """The container of a job's ranks, from the environment, else from the site's profile; None for
    none. Raises ConfigError.

    It gets the folders that the run needs, and the variables of the env files. The typed paths in
    the settings are absolute.
    """
    cluster = settings.job.cluster
    profile = profiles.cluster_profile(cluster)
    values = {**profile, **profiles.in_image(environ)}
    in_image = {name: values[name] for name in job_keys.IN_IMAGE if name in values}
    keys = declare.build(job_keys.JobKeys, in_image)
    if not keys.container:
        return None
    repository = source.home(ROOT)
    on_gpus = not settings.run.on_cpu
    image = absolute_image(keys.container, repository)
    runtime = keys.container_runtime.name
    # the images of enroot end with .sqsh, and enroot writes # in the address of a registry
    if runtime == "auto":
        runtime = "pyxis" if image.endswith(".sqsh") or "#" in image else "apptainer"
    mounts = [f"{folder}:{folder}" for folder in folders_of_run(settings, repository)]
    mounts += [os.path.expanduser(mount) for mount in keys.container_mounts.split(",") if mount]
    variables = profiles.env_variables(settings.run.network, cluster)
    if runtime == "pyxis" and on_gpus:
        variables = OF_GPUS | variables
    return Container(image, runtime, tuple(mounts), on_gpus, variables)


def folders_of_run(settings: Settings, root: Path) -> list[str]:
    """The folders that the container of a run needs: the repository and the absolute paths that the
    run names.

    A path that is not an existing folder is replaced by its nearest parent that is one, since a
    runtime refuses other paths. A folder inside another folder of the result is omitted. Raises
    ConfigError for a name that the runtime would divide.
    """
    # it may come from the site profile
    values = {"data_dir": settings.config.data_dir, **settings.from_run, **settings.typed}
    keys = declare.declared("path", RunKeys, type(settings.config))
    names = [values.get(key, "") for key in keys | {"data_dir", "network", "resume", "program"}]
    names += [os.environ.get(name, "") for name in ("RECIPES_DATA", "TORCH_HOME")]
    # runs and data may be links to other disks
    names += [os.path.realpath(root / name) for name in ("runs", "data")]
    folders = {root}
    for name in names:
        if name.startswith("/"):
            path = Path(name)
            folders.add(next(folder for folder in (path, *path.parents) if folder.is_dir()))
    for folder in folders:
        # another user's run that is resumed may name it, to mount a folder over /usr/bin
        if set(",:") & set(str(folder)):
            raise ConfigError(
                f"container=: folder {shown(folder, 4096)}: has a comma or a colon in its name, "
                "which separates mounts: rename it"
            )
    chosen: list[str] = []
    for folder in sorted(folders - {Path("/")}, key=lambda path: (len(path.parts), path)):
        if not any(folder.is_relative_to(other) for other in chosen):
            chosen.append(str(folder))
    return chosen

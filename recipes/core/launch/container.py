"""Ranks in a container: what srun and a runtime are told, so that the inside has the code, the data and the variables. Standard library only.

``apptainer`` (or ``singularity``) stands before a rank's command; pyxis is options of srun. Both leave Slurm's variables as they are.
A variable that the image sets too is the image's, unless it is handed over by name: that is done for those that say how a network
is used.
"""

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PYTHON = "python3"  # of the image; with torch, torchvision, omegaconf, and submitit for launch.py under pyxis
# Modules of the outside set the first two, for another Python; without the third, the working directory comes first on the path.
WITHOUT_MODULES = ("env", "-u", "PYTHONPATH", "-u", "PYTHONHOME", "-u", "PYTHONSAFEPATH")
# Each rank runs this on its node, where Slurm's prolog may have made a $TMPDIR for the job. $0: the runtime.
EXEC = '[ ! -d "${TMPDIR-}" ] || set -- --bind "$TMPDIR" "$@"; exec "$0" exec "$@"'
# Beginnings of names of variables that count inside whatever the image says.
HANDED = ("NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "RECIPES_", "MASTER_")


@dataclass(frozen=True)
class Container:
    """image: a file, or an address that the runtime fetches. mounts: HOST or HOST:INSIDE, beside what a run names itself."""

    image: str
    runtime: str
    mounts: tuple[str, ...] = ()


def chosen(image: str, runtime: str, mounts: str) -> Container | None:
    """What the keys ``container``, ``container_runtime`` and ``container_mounts`` say; None for no container."""
    if not image:
        return None
    if runtime == "auto":  # enroot's images, and the way it writes a registry's address
        runtime = "pyxis" if image.endswith(".sqsh") or "#" in image else "apptainer"
    return Container(image, runtime, tuple(os.path.expanduser(mount) for mount in mounts.split(",") if mount))


def whole(image: str, base: Path) -> str:
    """The whole path of an image that is a file; an address as it is."""
    path = base / Path(image).expanduser()
    return os.path.realpath(path) if image and path.exists() else image


def folders(words: Mapping[str, str], paths: Iterable[str], always: Sequence[Path]) -> list[str]:
    """The folders that the inside has to have: ``always``, and those that absolute ``words`` of the keys ``paths`` name.

    Only what is there, since a runtime refuses the rest; what lies in another of them is not named again.
    """
    named = [Path(value) for name in paths if (value := words.get(name, "")).startswith("/")]
    there = [next(folder for folder in (path, *path.parents) if folder.is_dir()) for path in [*always, *named]]
    found: list[Path] = []
    for path in sorted(set(there), key=lambda path: (len(path.parts), path)):
        if path != path.parent and not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return [str(path) for path in found]


def step(
    container: Container,
    code: Path,
    bound: Sequence[str],
    variables: Mapping[str, str],
    environ: Mapping[str, str],
    gpus: bool,
) -> tuple[list[str], list[str]]:
    """Options of srun, and what stands before a rank's arguments to Python.

    code: the folder to start in. bound: folders that are the same inside. variables: those of the env files, which are handed over,
    as are those of the surroundings that say how a network is used. gpus: whether the ranks have any.
    """
    mounts = [*(f"{folder}:{folder}" for folder in bound), *container.mounts]
    if container.runtime == "pyxis":
        return [
            f"--container-image={container.image}",
            f"--container-mounts={','.join(mount if ':' in mount else f'{mount}:{mount}' for mount in mounts)}",
            f"--container-workdir={code}",
            f"--container-env={','.join(sorted({*variables, *(name for name in environ if name.startswith(HANDED))}))}",
        ], [*WITHOUT_MODULES, PYTHON]
    binds = [word for mount in mounts for word in ("--bind", mount)]
    return [], [
        *WITHOUT_MODULES,
        *("sh", "-c", EXEC, container.runtime),
        *(["--nv"] if gpus else []),
        *binds,
        "--pwd",
        str(code),
        container.image,
        PYTHON,
    ]


def exports(container: Container, variables: Mapping[str, str]) -> list[str]:
    """Shell lines, of bash, that make the inside have what the env files set, and what the user has set, over what the image sets.

    variables: those of the env files, which hold where the user has not set them.
    """
    lines = [
        f'[ -n "${{{name}+x}}" ] || export {name}={shlex.quote(value)}' for name, value in sorted(variables.items())
    ]
    if container.runtime != "pyxis":
        prefix = f"{container.runtime.upper()}ENV_"
        every = " ".join([*(f'"${{!{start}@}}"' for start in HANDED), *sorted(variables)])
        lines += [
            f'for name in {every}; do there={prefix}$name; [ -n "${{!there+x}}" ] || export "$there=${{!name}}"; done',
            f"export {container.runtime.upper()}_NO_EVAL=1",  # else a shell inside expands $ and ` in values (new in SingularityCE 3.10)
            f"export {prefix}PYTHONNOUSERSITE=1",  # what pip has put into a home is for another Python
            f'command -v {container.runtime} >/dev/null || stop "container=: no {container.runtime} on $(hostname): is it a module? put it into the profile" 3',
        ]
    return lines

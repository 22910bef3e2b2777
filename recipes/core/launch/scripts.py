"""The ready batch scripts, sbatch/RECIPE_NODESxGPUS.sh: ``python -m recipes.core.launch.scripts write`` (or ``check``). Never torch."""

import sys
from pathlib import Path

from recipes.core.files import ROOT
from recipes.core.launch import slurm
from recipes.core.launch.slurm import Job

SIZES = (  # recipe, nodes, GPUs of each, minutes
    ("mnist", 1, 1, 30),
    ("mnist", 2, 8, 30),
    ("cifar", 1, 8, 60),
    ("cifar", 2, 8, 60),
    ("imagenet", 1, 8, 1440),
    ("imagenet", 2, 8, 720),
    ("imagenet", 8, 8, 360),
)


def scripts() -> dict[str, str]:
    """Path relative to the repository, and text, of every ready script."""
    found = {}
    for recipe, nodes, gpus, minutes in SIZES:
        path = f"sbatch/{recipe}_{nodes}x{gpus}.sh"
        job = Job(recipe, (), nodes, gpus, gpus, slurm.GPU_CPUS, minutes, recipe, root=None)
        header = [
            f"The recipe {recipe} on {nodes} node{'s' if nodes > 1 else ''} with {gpus} GPU{'s' if gpus > 1 else ''}"
            f"{' each' if nodes > 1 else ''}. From the repository's top folder:",
            f"    sbatch [options of sbatch] {path} [key=value ...]",
            "sbatch's options win over the ones below, one by one; the keys: python -m recipes." + recipe + " --help",
            "Made by: make sbatch (recipes/core/launch/scripts.py). Change it there.",
        ]
        found[path] = slurm.script(job, path=path, header=header)
    return found


def main(argv: list[str], root: Path = ROOT) -> int:
    """write: makes the scripts. check: status 1, naming them, where one differs from what would be made."""
    if argv not in (["write"], ["check"]):
        print("usage: python -m recipes.core.launch.scripts write|check", file=sys.stderr)
        return 2
    stale = [p for p, text in scripts().items() if not (root / p).is_file() or (root / p).read_text() != text]
    if argv == ["check"]:
        for path in stale:
            print(f"{path}: is not what make sbatch makes", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        (root / path).write_text(scripts()[path])
        (root / path).chmod(0o755)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

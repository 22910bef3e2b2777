"""Imports go one way, a login node never loads torch, importing a module changes no variable."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests import helpers
from tests.helpers import ROOT


class Room(NamedTuple):
    """below: the rooms that its modules may import besides each other. packages: from PyPI; "*":
    any.
    """

    below: str
    packages: str = ""


# The direction of imports. A room is a folder, or one module. An import that the table does not
# allow fails the test.
BASE = "errors files trust variables slurm place"
ROOMS = {
    "recipes.core.errors": Room(BASE),
    "recipes.core.files": Room(BASE),
    "recipes.core.trust": Room(BASE),
    "recipes.core.variables": Room(BASE),
    "recipes.core.place": Room(BASE),
    "recipes.core.slurm": Room(BASE),
    "recipes.core.config": Room(BASE, "omegaconf yaml"),
    "recipes.core.run": Room(f"{BASE} config", "yaml"),
    "recipes.core.program": Room(f"{BASE} run"),
    "recipes.core.report": Room(f"{BASE} run"),
    "recipes.core.launch": Room(f"{BASE} config run data.datasets", "submitit"),
    "recipes.core.data.datasets": Room(BASE),  # the login node looks for data
    "recipes.core.data": Room(f"{BASE} config run data.datasets", "*"),
    "recipes.core.train": Room(f"{BASE} config run data data.datasets", "*"),
    "recipes.core.doctor": Room(f"{BASE} config run", "torch"),
    "recipes.conf": Room("errors config"),
    "recipes.report": Room(f"{BASE} config run report"),
    "recipes.doctor": Room(f"{BASE} config run doctor conf"),
    "launch": Room(f"{BASE} config run launch"),
    "recipes": Room(f"{BASE} config run program data data.datasets train conf", "*"),
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """The longest name in ROOMS that the module's name begins with."""
    return max((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), key=len)


FILES = {
    module_name(path): path
    for path in (ROOT / "launch.py", *sorted((ROOT / "recipes").rglob("*.py")))
}
PACKAGES = {module_name(path) for path in (ROOT / "recipes").rglob("__init__.py")}


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere in it, in functions and for type
    checkers too.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {part if part in FILES else str(node.module) for part in parts}
    return names - PACKAGES


def is_allowed(module: str, other: str) -> bool:
    room = room_of(module)
    there = room_of(other)
    below = ROOMS[room].below.split()
    if room == "recipes":  # a recipe imports no recipe, and of the keys its own alone
        keys = f"recipes.conf.{module.removeprefix('recipes.')}"
        return there.removeprefix("recipes.core.") in below or other == keys
    return room == there or there.removeprefix("recipes.core.").removeprefix("recipes.") in below


def test_imports_go_one_way() -> None:
    against = set()
    foreign = []
    assert len(FILES) > 50
    for module in set(FILES) - PACKAGES:
        packages = ROOMS[room_of(module)].packages
        for other in imports(FILES[module]):
            top = other.partition(".")[0]
            if other in FILES:
                if not is_allowed(module, other):
                    against.add((module, other))
            elif packages != "*" and top not in {*packages.split(), *sys.stdlib_module_names}:
                foreign.append((module, top))
    assert not foreign
    assert not against


def test_files_do_not_import_each_other_in_a_circle() -> None:
    """What is left when files that import no other file that is left are taken away, again and
    again, is in a circle.
    """
    left = {
        module: imports(FILES[module]) & FILES.keys() - PACKAGES
        for module in FILES.keys() - PACKAGES
    }
    while free := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in free}
    assert sorted(left) == []


# Commands of a login node; all in one process, each checked after it has run.
LOGIN = """
import os, sys
def check(what):
    heavy = sorted({"torch", "torchvision", "numpy", "sklearn", "PIL"} & set(sys.modules))
    assert not heavy, f"{what} loads {heavy}"
import launch
assert launch.main(["recipe=mnist", "launcher=print", "nodes=2"]) == 0
check("launch.py")
assert launch.main(["check", "recipe=doctor", "launcher=local", "device=cpu"]) == 0
check("launch.py check")
from recipes.core.launch import batch, submit
from recipes.core.run import entry
os.dup2(2, 3)  # where the batch shell reads
assert batch.main(["begin", "mnist", "mnist.sh", "epochs=1"]) == 0
check("a batch script")
import submitit
check("submitting")
from recipes import report
assert report.main(["--help"]) == 0
check("report")
import recipes.doctor
check("doctor explain")
import recipes.prepare
check("prepare")
import recipes.export
check("export to=")
"""


def test_the_way_to_a_submission_never_loads_torch() -> None:
    helpers.run([sys.executable, "-c", LOGIN]).expect(0)


def test_importing_any_module_changes_no_variable() -> None:
    """Variables that torch and torchvision set themselves do not count."""
    code = """
import importlib, json, os, sys
import torch, torch.distributed, torchvision
before = dict(os.environ)
for name in sys.argv[1:]:
    importlib.import_module(name)
names = before.keys() | os.environ.keys()
print(json.dumps(sorted(name for name in names if before.get(name) != os.environ.get(name))))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, *FILES], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == []


def test_a_recipe_imports_only_entry_before_it_begins() -> None:
    """entry.begin sets variables that torch reads when it is imported, and other modules of core
    import torch.
    """
    seen = []
    for path in (*(ROOT / "recipes").glob("*.py"), ROOT / "tests/faults/broken.py"):
        body = ast.parse(path.read_text()).body
        begins = [i for i, node in enumerate(body) if "entry.begin(" in ast.unparse(node)]
        if begins and isinstance(body[begins[0]], ast.Assign):
            before = [
                ast.unparse(node)
                for node in body[: begins[0]]
                if isinstance(node, ast.Import | ast.ImportFrom)
            ]
            assert before == ["from recipes.core.run import entry"], path
            seen.append(path.stem)
    assert sorted(seen) == [
        "broken",
        "cifar",
        "collectives",
        "finetune",
        "gpt",
        "imagenet",
        "llm",
        "mnist",
        "toy",
    ]


OF_SLURM = re.compile(r"S(LURM|BATCH|RUN)_|\b(scontrol|squeue|sbatch|srun|scancel|sinfo|sacct)\b")


def words_of_slurm(path: Path) -> list[str]:
    """The texts in a file's code that name a variable or a command of Slurm. A text with a space is
    a message; docstrings do not count.
    """
    nodes = list(ast.walk(ast.parse(path.read_text())))
    apart = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [part for part in node.values if isinstance(part, ast.Constant)]
            apart |= {id(part) for part in parts}
            texts.append("".join(str(part.value) for part in parts))
    texts += [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart
    ]
    return [text for text in texts if OF_SLURM.search(text) and " " not in text.strip()]


def test_only_one_package_knows_slurms_variables_and_commands() -> None:
    names = {module: words_of_slurm(path) for module, path in FILES.items()}
    assert sum(map(bool, names.values())) > 2
    outside = {module: words for module, words in names.items() if words}
    assert {room_of(module) for module in outside} == {"recipes.core.slurm"}, outside

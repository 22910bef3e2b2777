"""Imports go one way, a login node never loads torch, and importing a module changes no variable."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Layer(NamedTuple):
    """modules: of recipes/core unless dotted. below: layers that they may import besides their own. packages: from PyPI; "*": any."""

    modules: str
    below: str
    packages: str


# The direction of imports. A module that is missing here fails the test, and so does an import that the table does not allow.
LAYERS = {
    "errors": Layer("errors", "", ""),
    "place": Layer("rundir jobs liveness hostlist ranks network findings outliers container", "errors", ""),
    "config": Layer("config envfile", "errors place", "omegaconf yaml"),
    "run": Layer(
        "entry gpus local logs outlook preempt rehearsal runs snapshot watchdog", "errors place config", "omegaconf"
    ),
    "launch": Layer("launch batch ready slurm submit", "errors place config run", "submitit"),
    "files": Layer("classfolder datafiles packing staging", "errors place run", "PIL"),
    "data": Layer("data images", "errors place run files", "*"),
    "train": Layer(
        "bandwidth checkpoint dist drawing lars metrics models session spawn train",
        "errors place config run files data",
        "*",
    ),
    "doctor": Layer("examine explain reach signatures variables verdict", "errors place config run", ""),
    "probes": Layer("gpucheck linkcheck", "", "torch"),  # started as processes of their own
    "conf": Layer("conf.cifar conf.collectives conf.doctor conf.imagenet conf.mnist conf.toy", "errors config", ""),
    "tools": Layer("recipes.doctor recipes.report", "errors place config run doctor conf", ""),
    "recipes": Layer(
        "cifar collectives imagenet mnist toy prepare", "errors place config run files data train conf", "*"
    ),
}
# Imports against the direction: fewer is better, and one that is gone is removed from here.
EXCEPTIONS = {("recipes.core.images", "recipes.core.session"), ("recipes.core.rehearsal", "recipes.core.datafiles")}


def full_name(layer: str, name: str) -> str:
    if name == "launch" or name.startswith("recipes."):
        return name
    return f"recipes.{name}" if layer in ("conf", "recipes") else f"recipes.core.{name}"


LAYER_OF = {full_name(layer, name): layer for layer, (modules, _, _) in LAYERS.items() for name in modules.split()}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_name(path): path for path in (ROOT / "launch.py", *sorted((ROOT / "recipes").rglob("*.py")))}
PACKAGES = {"recipes", "recipes.core", "recipes.conf"}


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere in it, functions included; not those for type checkers alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in typing_only:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
            assert node.level == 0, f"{path}: a relative import"
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {part if part in FILES else str(node.module) for part in parts}
    return found - PACKAGES


def test_imports_go_one_way() -> None:
    assert set(LAYER_OF) == set(FILES) - PACKAGES, "give a new module its layer"
    against, foreign = set(), []
    for module, layer in LAYER_OF.items():
        _, below, packages = LAYERS[layer]
        for other in imports(FILES[module]):
            if other in FILES:
                allowed = LAYER_OF[other] in (layer, *below.split())
                if layer == "recipes":  # a recipe imports no recipe, and of the keys its own alone
                    allowed &= LAYER_OF[other] != layer and other.removeprefix("recipes.conf.") in (
                        module.removeprefix("recipes."),
                        other,
                    )
                if not allowed:
                    against.add((module, other))
            else:
                top = other.partition(".")[0]
                if packages != "*" and top not in (*packages.split(), *sys.stdlib_module_names):
                    foreign.append((module, top))
    assert foreign == []
    assert against == EXCEPTIONS


# Commands of a login node; all in one process, each checked after it has run.
LOGIN = """
import sys
def check(what):
    heavy = sorted({"torch", "torchvision", "numpy", "sklearn"} & set(sys.modules))
    assert not heavy, f"{what} loads {heavy}"
import launch
assert launch.main(["recipe=mnist", "launcher=print", "nodes=2"]) == 0; check("launch.py")
assert launch.main(["check", "recipe=doctor", "launcher=local", "device=cpu"]) == 0; check("launch.py check")
from recipes.core import batch, entry, ready, submit
assert batch.main(["begin", "mnist", "epochs=1"]) == 0; check("a batch script")
assert ready.main(["check"]) in (0, 1); import submitit; check("submitting")
from recipes import report
assert report.main(["--help"]) == 0; check("report")
import recipes.doctor; check("doctor explain")
"""


def test_the_way_to_a_submission_never_loads_torch() -> None:
    ran = subprocess.run([sys.executable, "-c", LOGIN], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_importing_any_module_changes_no_variable() -> None:
    """Variables that torch and torchvision set themselves do not count."""
    code = """
import importlib, json, os, sys
import torch, torch.distributed, torchvision
before = dict(os.environ)
for name in sys.argv[1:]: importlib.import_module(name)
print(json.dumps(sorted(k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k))))
"""
    ran = subprocess.run([sys.executable, "-c", code, *FILES], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == []

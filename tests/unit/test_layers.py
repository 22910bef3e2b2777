"""Imports run one way, a login node never loads torch, and importing a module changes nothing."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The layers, lowest first: a module may import its own layer and those below.
STDLIB = {
    "hostlist", "ranks", "network", "envfile", "rundir", "logs", "local", "preempt", "watchdog", "classfolder", "signatures",
    "variables", "findings", "gpus", "examine", "reach", "verdict", "outliers", "snapshot", "container",
}  # fmt: skip
LOGIN = {"config", "slurm", "submit", "batch", "ready", "entry", "datafiles", "packing", "staging", "runs", "rehearsal"}
HEAVY = {"torch", "torchvision", "numpy", "sklearn"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted((ROOT / "recipes").rglob("*.py"))}
CORE = sorted(m for m in MODULES if m.startswith("recipes.core."))
CONF = sorted(m for m in MODULES if m.startswith("recipes.conf."))
TOP = sorted(m for m in MODULES if m.count(".") == 1 and m not in ("recipes.core", "recipes.conf"))


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere in it, in functions too."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {part if part in MODULES else str(node.module) for part in parts}
    return found


def own(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] in ("recipes", "launch")}


def foreign(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"recipes"}


def test_every_layer_was_found() -> None:
    assert {f"recipes.core.{name}" for name in STDLIB | LOGIN} <= set(CORE)
    assert {"recipes.core.dist", "recipes.core.session", "recipes.core.checkpoint"} <= set(CORE)
    assert "recipes.conf.mnist" in CONF
    assert {"recipes.mnist", "recipes.prepare"} <= set(TOP)
    assert "torch" in foreign(MODULES["recipes.mnist"]), "the walk does not see imports"
    assert "recipes.core.entry" in own(MODULES["recipes.mnist"])


@pytest.mark.parametrize("name", sorted(STDLIB))
def test_the_lowest_layer_takes_the_standard_library_and_itself(name: str) -> None:
    path = MODULES[f"recipes.core.{name}"]
    assert foreign(path) == set()
    assert own(path) <= {f"recipes.core.{other}" for other in STDLIB}


@pytest.mark.parametrize("name", sorted(LOGIN))
def test_the_login_nodes_layer_takes_neither_torch_nor_what_imports_it(name: str) -> None:
    path = MODULES[f"recipes.core.{name}"]
    allowed = {"omegaconf", "submitit", "yaml"}
    assert foreign(path) <= (allowed | {"PIL"} if name == "packing" else allowed)
    assert own(path) <= {f"recipes.core.{other}" for other in STDLIB | LOGIN}


@pytest.mark.parametrize("module", CONF)
def test_conf_takes_the_keys_alone(module: str) -> None:
    assert foreign(MODULES[module]) == set()
    assert own(MODULES[module]) <= {"recipes.core.config", "recipes.conf"}


@pytest.mark.parametrize("module", CORE)
def test_core_imports_no_recipe(module: str) -> None:
    assert {m for m in own(MODULES[module]) if not m.startswith("recipes.core.")} <= {"recipes.core"}


@pytest.mark.parametrize("module", TOP)
def test_a_recipe_imports_core_and_its_own_conf_alone(module: str) -> None:
    allowed = {*CORE, "recipes.core", f"recipes.conf.{module.rpartition('.')[2]}"}
    assert own(MODULES[module]) <= allowed


def test_launch_takes_neither_torch_nor_a_recipe() -> None:
    assert own(ROOT / "launch.py") <= {"recipes.core", *(f"recipes.core.{name}" for name in STDLIB | LOGIN)}
    assert foreign(ROOT / "launch.py") == set()


def after(code: str, *arguments: str, first: str = "") -> dict[str, list[str]]:
    """What ``code`` leaves in a new process: heavy modules loaded, and variables changed since ``first``."""
    whole = (
        "import json, os, sys\n"
        f"{first}\n"
        "before = dict(os.environ)\n"
        f"{code}\n"
        "changed = sorted(k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k))\n"
        f"heavy = sorted(m for m in {sorted(HEAVY)!r} if m in sys.modules)\n"
        "print(json.dumps({'changed': changed, 'heavy': heavy}))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", whole, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[str]] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import launch; assert launch.main(['recipe=mnist', 'launcher=print', 'nodes=2']) == 0",
        "from recipes.core import batch; assert batch.main(['begin', 'mnist', 'epochs=1']) == 0",
        "import launch; assert launch.main(['check', 'recipe=doctor', 'launcher=local', 'device=cpu']) == 0",
        "from recipes.core import submit, ready, entry; import submitit; assert ready.main(['check']) in (0, 1)",
        "from recipes import report; assert report.main(['--help']) == 0",
    ],
    ids=["launch", "batch", "check", "submit", "report"],
)
def test_the_way_to_a_submission_never_loads_torch(code: str) -> None:
    assert after(code)["heavy"] == []


def test_importing_any_module_changes_no_variable() -> None:
    # What torch and torchvision set by themselves is not the project's.
    everything = "import importlib\nfor name in sys.argv[1:]: importlib.import_module(name)"
    check = "\nassert all(name in sys.modules for name in sys.argv[1:])"
    found = after(everything + check, *MODULES, first="import torch, torch.distributed, torchvision")
    assert found["changed"] == []

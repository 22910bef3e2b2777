"""``launch.py new NAME [from=finetune]``: copies a recipe, its keys, a ready script and a test under a new name."""

import ast
import dataclasses
import keyword
import re
from collections.abc import Sequence
from pathlib import Path

from recipes.core import errors
from recipes.core.config import recipe_conf
from recipes.core.errors import ConfigError

TEST = '''"""The recipe {name} trains two steps on random data. Run it with: python -m pytest tests/test_{name}.py"""

import subprocess
import sys
from pathlib import Path


def test_{name}_trains_two_steps(tmp_path: Path) -> None:
    words = ["device=cpu", {dataset}"max_steps=2", f"run_dir={{tmp_path}}"]
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-m", "recipes.{name}", *words], cwd=root, check=True)
'''


def new(words: Sequence[str], root: Path) -> int:
    """Writes the files and prints them. Returns 0. Raises ConfigError if a name is invalid or taken."""
    name = words[0] if words else ""
    source = words[1].removeprefix("from=") if len(words) > 1 else "finetune"
    if (
        not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name)
        or len(words) > 2
        or (len(words) == 2 and not words[1].startswith("from="))
    ):
        raise ConfigError("new: give the new recipe's name (small letters, digits and _), and perhaps from=RECIPE")
    if keyword.iskeyword(name) or (root / "recipes" / name).is_dir():
        raise ConfigError(f"new {name}: is a word of Python, or a folder in recipes/: give another name")
    recipe_conf.require(source, f"from={errors.shown(source)}")
    cls, _ = recipe_conf.load(source)
    if not getattr(cls, "epochs", 0):
        raise ConfigError(f"from={source}: does not train; give from=finetune, mnist, cifar, imagenet or toy")
    texts = {
        root / f"recipes/{name}.py": _marked(
            _renamed((root / f"recipes/{source}.py").read_text(), source, name), source, name
        ),
        root / f"recipes/conf/{name}.py": _renamed((root / f"recipes/conf/{source}.py").read_text(), source, name),
        root / f"tests/test_{name}.py": TEST.format(name=name, dataset=_fake(cls)),
    }
    for script in sorted((root / "sbatch").glob(f"{source}_*.sh"))[:1]:
        place = script.with_name(script.name.replace(source, name, 1))
        texts[place] = _renamed(script.read_text(), source, name)
    if taken := [path for path in texts if path.exists()]:
        raise ConfigError(f"new {name}: {taken[0]} exists: give another name")
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if path.suffix == ".sh" else 0o644)
        print(path.relative_to(root))
    print(f"edit the parts marked EDIT in recipes/{name}.py; try it: python -m pytest tests/test_{name}.py")
    return errors.EXIT_DONE


def _renamed(text: str, old: str, new: str) -> str:
    """``text`` with the recipe's name replaced where it is a name of the recipe, not of a data set or a function."""
    before = (
        r'(?:entry\.begin\("|recipes\.conf\.|-m recipes\.|recipe=|sbatch/|Recipe |recipe |job-name=|begin |finish |^)'
    )
    text = re.sub(rf"({before}){old}(?=\b|_\dx\d)", rf"\g<1>{new}", text, flags=re.MULTILINE)
    return re.sub(rf"\b{old}(?=_\dx\d\.sh)", new, text)


def _marked(text: str, source: str, name: str) -> str:
    """A recipe with a mark at its title and at each function and class but main."""
    lines = text.splitlines(keepends=True)
    places = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in reversed([node for node in places if node.name != "main"]):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines.insert(first - 1, f"# EDIT: {node.name}\n")
    # In main, what a recipe decides itself: its nested functions, and its evaluation.
    lines = [re.sub(r"^(    )(def (\w+)|(evaluate) =)", r"\1# EDIT: \3\4\n\1\2", line) for line in lines]
    lines[0] = f'"""{name}: EDIT: what it trains, on what, and what you measured. A copy of {source}.\n'
    return "".join(lines)


def _fake(cls: type) -> str:
    """The test's argument for random data, if the recipe has such a set."""
    values = next(field.metadata["values"] for field in dataclasses.fields(cls) if field.name == "dataset")
    return '"dataset=fake", ' if "fake" in values else ""

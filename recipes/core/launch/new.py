"""``launch.py new NAME [from=finetune]``: copies a recipe, its keys, a ready script and a test
under a new name.
"""

import dataclasses
import keyword
import re
from collections.abc import Sequence
from pathlib import Path

from recipes.core.config import recipe_conf
from recipes.core.errors import ConfigError, EXIT_DONE, shown
from recipes.core.slurm import script

# The parts that are specific to a recipe: its classes, its functions except main, and the
# evaluation in main.
OWN = re.compile(r"^(?=( {0,4})(?:class \w+[(:]|def (?!main\b)\w+\(|evaluate = ))", re.MULTILINE)
TEST = '''"""{name} trains two steps on random data: python -m pytest tests/test_{name}.py"""

import subprocess
import sys
from pathlib import Path


def test_{name}_trains_two_steps(tmp_path: Path) -> None:
    words = ["device=cpu", {dataset}"max_steps=2", f"run_dir={{tmp_path}}"]
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-m", "recipes.{name}", *words], cwd=root, check=True)
'''


def new(words: Sequence[str], root: Path) -> int:
    """Writes the files and prints them. Returns 0. Raises ConfigError if a name is invalid or
    taken.
    """
    names = re.fullmatch(r"([a-z][a-z0-9_]{0,63})(?: from=(.*))?", " ".join(words))
    if not names:
        raise ConfigError(
            "new: give the name of the new recipe (lower-case letters, digits and _, first a "
            "letter), and optionally from=RECIPE"
        )
    name = names[1]
    source = names[2] or "finetune"
    if keyword.iskeyword(name) or (root / "recipes" / name).is_dir():
        raise ConfigError(
            f"new {name}: is a Python keyword, or a folder in recipes/: give another name"
        )
    recipe_conf.require(source, f"from={shown(source)}")
    cls, _ = recipe_conf.load(source)
    if not cls.epochs:
        raise ConfigError(
            f"from={source}: does not train; give from=finetune, gpt, mnist, cifar, imagenet or toy"
        )
    old = [root / f"recipes/{source}.py", root / f"recipes/conf/{source}.py"]
    old += sorted((root / script.FOLDER).glob(f"{source}_*.sh"))[:1]
    texts = {}
    for path in old:
        new_path = path.with_name(path.name.replace(source, name, 1))
        texts[new_path] = _renamed(path.read_text(), source, name)
    recipe = root / f"recipes/{name}.py"
    texts[recipe] = (
        f"# EDIT: say what {name} trains, on which data, and your results. "
        f"It is a copy of {source}.\n" + OWN.sub(r"\1# EDIT\n", texts[recipe])
    )
    fields = {field.name: field for field in dataclasses.fields(cls)}
    dataset = ""
    for value in ("fake", "bytes"):  # made in memory
        if value in fields["dataset"].metadata["values"]:
            dataset = f'"dataset={value}", '
    texts[root / f"tests/test_{name}.py"] = TEST.format(name=name, dataset=dataset)
    for path in texts:
        if path.exists():
            raise ConfigError(f"new {name}: {path} exists: give another name")
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if path.suffix == ".sh" else 0o644)
        print(path.relative_to(root))
    print(
        f"edit the parts marked EDIT in recipes/{name}.py; "
        f"try it: python -m pytest tests/test_{name}.py"
    )
    return EXIT_DONE


def _renamed(text: str, old: str, new: str) -> str:
    """``text`` with the recipe's name replaced, except where the same word names a data set or a
    function.
    """
    before = (
        r'(?:entry\.begin\("|recipes\.conf\.|-m recipes\.|recipe=|sbatch/|[Rr]ecipe |job-name='
        "|begin |finish |^)"
    )
    text = re.sub(rf"({before}){old}(?=\b|_\dx\d)", rf"\g<1>{new}", text, flags=re.MULTILINE)
    return re.sub(rf"\b{old}(?=_\dx\d\.sh)", new, text)

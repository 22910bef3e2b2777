"""launch.py new: a recipe of one's own, as a copy that runs at once."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from recipes.core.errors import ConfigError
from recipes.core.launch import new
from tests import helpers
from tests.helpers import ROOT
from tests.unit.launch.stand_ins import Bench


@pytest.fixture
def repository(bench: Bench) -> Path:
    shutil.copy(ROOT / "launch.py", bench.root)
    return bench.root


def test_a_new_recipe_runs_at_once_and_marks_what_to_edit(repository: Path) -> None:
    made = helpers.run([sys.executable, "launch.py", "new", "birds"], cwd=repository).expect(0)
    assert made.lines[:4] == [
        "recipes/birds.py",
        "recipes/conf/birds.py",
        "sbatch/birds_1x4.sh",
        "tests/test_birds.py",
    ]
    text = (repository / "recipes/birds.py").read_text()
    assert text.startswith("# EDIT: say what birds trains")
    for marked in ("def make_net(", "def transforms(", "    def losses(", "    evaluate = "):
        assert re.search(rf"^ *# EDIT\n{re.escape(marked)}", text, re.MULTILINE)
    assert "# EDIT\ndef main(" not in text
    assert "finetune" not in (repository / "sbatch/birds_1x4.sh").read_text()
    helpers.run([sys.executable, "launch.py", "new", "mine", "from=toy"], cwd=repository)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/test_mine.py"]
    helpers.run(command, cwd=repository).expect(0)


@pytest.mark.parametrize("source", ["gpt", "mnist", "cifar", "imagenet", "toy"])
def test_names_of_data_and_functions_stay(repository: Path, source: str) -> None:
    assert new.new(["mine", f"from={source}"], repository) == 0
    old, copy = ((repository / f"recipes/{name}.py").read_text() for name in (source, "mine"))
    renamed = rf"recipes\.(conf\.)?{source}|recipe={source}|sbatch/{source}|begin\("
    changed = [line for line in old.splitlines()[1:] if line not in copy.splitlines()]
    assert [line for line in changed if not re.search(renamed, line)] == []
    assert 'entry.begin("mine")' in copy
    assert "recipes.conf.mine import" in copy


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "give the name of the new recipe"),
        (["Birds"], "give the name of the new recipe"),
        (["class"], "new class: is a Python keyword"),
        (["core"], "new core: is a Python keyword, or a folder in recipes/"),
        (["toy"], r"new toy: .*/recipes/toy\.py exists: give another name"),
        (["birds", "notfrom=toy"], "give the name of the new recipe"),
        (["birds", "from=none"], "from=none: must be one of"),
        (["birds", "from=collectives"], "from=collectives: does not train"),
    ],
)
def test_a_name_that_is_taken_or_invalid_is_refused(
    repository: Path, words: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        new.new(words, repository)

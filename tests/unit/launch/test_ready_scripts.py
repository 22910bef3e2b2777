"""The text of the ready scripts in sbatch/."""

import os
import re
from pathlib import Path

import pytest

from recipes.core.config import recipe_conf
from recipes.core.launch import jobs
from tests.unit.launch.stand_ins import READY, describe, directives

PROGRAM = ((), ("program=/a.py",))  # what script requires


def test_ready_scripts_are_named_after_recipe_and_size() -> None:
    assert len(READY) >= 7
    assert all(re.fullmatch(r"[a-z]+_\d+x\d+\.sh", path.name) for path in READY)
    assert {path.name.split("_")[0] for path in READY} <= set(recipe_conf.names())


@pytest.mark.parametrize("path", READY, ids=lambda p: p.name)
def test_ready_scripts_differ_only_in_recipe_and_the_four_directives_of_their_size(
    path: Path,
) -> None:
    name = path.name.split("_")[0]
    made = jobs.sbatch_script(
        describe(f"recipe={name}", *PROGRAM[name == "script"], "gpus_per_node=8")
    )
    fix = "is not a clone of yours: cd to the top folder of your clone and run sbatch there"
    source = [
        "case $(stat -c %u sbatch sbatch/job.sh 2>&1 | xargs) in",
        '    "0 0" | "$UID $UID") . sbatch/job.sh ;;',
        f'    *) echo "{path.name}: $PWD {fix}" >&2; exit 2 ;;',
        "esac",
    ]
    begin = f'begin {name} "$@" # sets step, inside and words for the lines below'
    commands = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert commands == ["", *source, begin, *made.splitlines()[-5:]]
    shipped = directives(path.read_text())
    nodes, gpus = path.stem.partition("_")[2].split("x")
    size = {
        name: value
        for name, value in shipped.items()
        if re.search("node|task|gpu|cpu|mem|gres|exclusive", name)
    }
    assert set(size) == {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task"}
    assert size["--nodes"] == nodes
    assert size["--ntasks-per-node"] == gpus
    assert size["--gpus-per-node"] == gpus
    assert not {"--chdir", "--partition", "--account"} & set(shipped)
    options = directives(made)
    same = ("--requeue", "--open-mode", "--signal", "--job-name", "--cpus-per-task")
    assert all(shipped[option] == options[option] for option in same)
    # in the repository; a job whose log folder is missing fails silently
    assert shipped["--output"] == "%x-%j.out"
    assert os.access(path, os.X_OK)

"""``script=FILE key=value… -- ARGUMENT…``: how it becomes keys of the recipe script, and what is
refused.
"""

from pathlib import Path

import pytest

from recipes.core.errors import ConfigError
from recipes.core.run import command_line


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a program a.py and a file that cannot be executed."""
    for name in ("a.py", "data"):
        (tmp_path / name).write_text("")
    (tmp_path / "python").symlink_to("a.py")
    (tmp_path / "a.py").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("recipe", ["", "script"])  # launch.py, and a ready script
def test_the_program_and_its_arguments_become_keys(here: Path, recipe: str) -> None:
    rest = ["--lr", "0.1", "a b", "--", "recipe=x", "cluster=y", "${z}", ""]
    settings = command_line.parse(["script=a.py", "run_dir=r", "--", *rest], recipe=recipe)
    args = "--lr 0.1 'a b' -- recipe=x cluster=y '${z}' ''"
    assert settings.recipe == "script"
    assert settings.typed == {
        "run_dir": f"{here}/r",
        "program": f"{here}/a.py",
        "args": args,
        "workdir": str(here),
    }
    assert settings.config.args == args
    words = [f"{name}={value}" for name, value in settings.typed.items()]
    again = command_line.parse(words, recipe="script")  # as the ranks and `finish` read them
    assert again.config == settings.config


def test_a_link_is_not_resolved(here: Path) -> None:
    """.venv/bin/python is a link; the Python that it leads to does not know the environment."""
    config = command_line.parse(["script=./python", "workdir=/tmp"]).config
    assert config.program == f"{here}/python"
    assert config.args == ""
    assert config.workdir == "/tmp"


def test_a_launcher_may_be_the_program_of_a_node(here: Path) -> None:
    (here / "torchrun").symlink_to("a.py")
    config = command_line.parse(["script=torchrun", "through=node", "--", "b.py"]).config
    assert config.program == f"{here}/torchrun"
    assert config.args == "b.py"
    assert config.through.name == "node"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["script=b.py"], ["script=b.py: there is no such file"]),
        (["script=data"], ["script=data: is not executable; chmod +x it"]),
        (["script=a.py", "recipe=mnist"], ["script=a.py: cannot be used with recipe=mnist"]),
        (["recipe=mnist", "--", "x"], ["--: ", "give script=FILE"]),
        (["recipe=script"], ["script= is missing: give script=FILE"]),
        (
            ["script=torchrun"],
            [
                "script=torchrun: starts ranks itself: give your program as script=FILE, "
                "and through=torchrun"
            ],
        ),
        (
            ["script=/env/bin/deepspeed", "--", "a.py"],
            ["starts ranks itself: ", "and through=torchrun"],
        ),
        (
            ["script=accelerate", "through=torchrun"],
            ["script=accelerate: starts ranks itself: ", "through=accelerate"],
        ),
        (
            ["script=a.py", "epochs=3"],
            ["epochs=3: ", "arguments of your program after --, as in script=FILE -- "],
        ),
        (
            ["script=a.py", "--epochs", "3"],
            ["'--epochs' is not key=value; arguments of the program come after --"],
        ),
        (["script=a.py", "nods=3"], ["nods=3: ", "did you mean 'nodes'?"]),
        (
            ["script=a.py", "restart_on_hang=true"],
            ["restart_on_hang=true: requires silent_s=, such as "],
        ),
        (["script=a.py", "args='"], ["args=': ", "type the arguments after --"]),
    ],
)
def test_an_invalid_command_line_is_refused_with_its_fix(
    words: list[str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        command_line.parse(words)
    assert [part for part in parts if part not in str(error.value)] == []

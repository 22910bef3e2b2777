"""What a job runs, as its ranks read it."""

from pathlib import Path
from typing import Any

import pytest

from recipes.core.config import recipe_conf
from recipes.core.errors import ConfigError
from recipes.core.run import command_line, spec
from recipes.core.run.spec import Spec

WORDS = {
    "script": ["program=/bin/true", "args=--lr '1 2'", "through=node"],
    "imagenet": ["data_dir=/d ata", "variant=fast", "resume=never", "stop_before_s=7.5"],
    "finetune": ["data_dir=/d", "dataset=images"],
    "gpt": ["strategy=fsdp", "max_steps=3"],
}


def spec_of(recipe: str, words: list[str], **more: Any) -> Spec:
    """As `begin` of a job makes it."""
    settings = command_line.parse(words, recipe=recipe, environ={"RECIPES_CLUSTER": "example"})
    arguments = [f"{name}={value}" for name, value in settings.typed.items()]
    return Spec(settings, tuple(arguments), {"A": "b"}, **more)


@pytest.mark.parametrize("recipe", recipe_conf.names())
def test_the_ranks_read_the_settings_that_begin_has_resolved(recipe: str) -> None:
    words = ["device=cpu", "umask=027", "stop_before_s=7.5", *WORDS.get(recipe, [])]
    written = spec_of(recipe, words, step=("--x",), inside=("sh", "-c"), by_clock=True)
    read = spec.of_job({spec.VARIABLE: spec.to_text(written)})
    assert read == written


def test_a_typed_path_is_the_absolute_one() -> None:
    """The ranks start in the snapshot of the code, where a relative path is another folder."""
    read = spec.of_job({spec.VARIABLE: spec.to_text(spec_of("mnist", ["data_dir=here"]))})
    assert read
    assert read.settings.config.data_dir == f"{Path.cwd()}/here"
    assert read.settings.saved["data_dir"] == f"{Path.cwd()}/here"


def test_the_longest_arguments_of_a_program_reach_its_ranks() -> None:
    long = '"' * 44_000 + "é" * 23_000  # 134 kB in JSON, of 111,000 characters
    for args, is_long in (("x" * 99_000, False), ("é" * 49_000, False), (long, True)):
        written = spec_of("script", ["program=/bin/true", f"args={args}"])
        if is_long:
            with pytest.raises(ConfigError, match=r"the arguments have 67.* too long for a job"):
                spec.to_text(written)
        else:
            assert spec.of_job({spec.VARIABLE: spec.to_text(written)}) == written

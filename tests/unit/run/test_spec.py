"""What a job runs, as its ranks read it."""

import dataclasses
from pathlib import Path

import pytest

from recipes.core.config import recipe_conf
from recipes.core.errors import ConfigError
from recipes.core.run import command_line, spec
from recipes.core.run.spec import Spec

WORDS = {
    "script": ["program=/bin/true", "args=--lr '1 2'", "through=node"],
    "imagenet": ["data_dir=/d ata", "variant=short", "resume=never", "stop_before_s=7.5"],
    "finetune": ["data_dir=/d", "dataset=folder"],
    "gpt": ["strategy=fsdp", "max_steps=3"],
}


@pytest.mark.parametrize("recipe", recipe_conf.names())
def test_the_ranks_read_the_settings_that_begin_has_resolved(recipe: str) -> None:
    words = ["device=cpu", "umask=027", *WORDS.get(recipe, [])]
    settings = command_line.parse(words, recipe=recipe, environ={"RECIPES_CLUSTER": "example"})
    written = Spec(settings, tuple(words), {"NCCL_DEBUG": "a b"}, ("--x",), ("sh", "-c"), True)
    assert spec.of_job({spec.VARIABLE: spec.to_text(written)}) == written


def test_a_typed_path_is_the_absolute_one() -> None:
    """The ranks start in the snapshot of the code, where a relative path is another folder."""
    settings = command_line.parse(["data_dir=here"], recipe="mnist", environ={})
    typed = settings.absolute(settings.typed, Path("/repository"))
    absolute = Spec(dataclasses.replace(settings, typed=typed), (), {})
    read = spec.of_job({spec.VARIABLE: spec.to_text(absolute)})
    assert read
    assert read.settings.config.data_dir == "/repository/here"


def test_arguments_that_no_variable_can_hold_are_refused() -> None:
    long = f"args={'x' * 120_000}"
    settings = command_line.parse(["program=/bin/true", long], recipe="script", environ={})
    with pytest.raises(ConfigError, match="have 120022 characters, which is too long for a job"):
        spec.to_text(Spec(settings, ("program=/bin/true", long), {}))

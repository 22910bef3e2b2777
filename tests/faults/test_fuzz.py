"""Random input at each entry point is accepted, or refused in one line that names the key, the value or the file.

The entry points are the arguments of launch.py, a recipe and prepare, a file of keys, and a site's profile. Host lists,
env files and the variables of launchers are in tests/unit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import subprocess
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from recipes import prepare
from recipes.core import errors
from recipes.core.config import recipe_conf
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.run_keys import RunKeys
from recipes.core.errors import ConfigError, MachineError
from recipes.core.launch import cli, jobs, scripts
from recipes.core.run import command_line
from tests import helpers
from tests.helpers import ROOT

pytestmark = pytest.mark.fault(37, 38)

# A value that hangs exceeds the deadline of its example; the slowest takes a hundredth.
cases = settings(
    derandomize=True, database=None, max_examples=200, deadline=10_000, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip

NASTY = (
    "", " ", "-1", "00", "null", "~", "nan", "1e999", "0x10", "1_0", "9" * 4400, "\u0663", "???", "..", "/dev/null",
    "~nosuchuser/x", "$HOME", "$(touch canary)", "a;b", "a b", "'", '"', "\\", "a\r\nb", "\x1b[2J", "\x85", "\u202e",
    "\ufeff", "\u00e9", "\ud800", "\udcff", "x" * 4097, "../" * 1300, "[1]", "{a: 1}", "[[" * 800, "!!python/object:x", "*a",
    "%s%n", "#", ": ", "|", "a=b", "--wrap=x", "n[1-2]", "n[1-999999999]", "[1-65536]" * 3, "1:2:3", "8,2", "[::1]:1",
    "h:99999", "cpu", "auto", "never", "local", "digits", "example",
    # interpolations of OmegaConf
    "${lr}", "${", "${..a}", "\\${lr}", "${oc.env:HOME}", "${oc.env:\x00}", "${oc.create:{a: 1}}", "${" * 900,
    "${a:[" * 200, "${a:" + "\\" * 501 + "}",
)  # fmt: skip
ALIASES = ", ".join(f"&{y} [{', '.join([f'*{x}'] * 9)}]" for x, y in zip("abcdefghij", "bcdefghijk", strict=True))
YAML = (
    "", "---", "--- a\n--- b", "- a", "epochs", "epochs:", "epochs: [1]", "epochs: 1\nepochs: 2", "? [a]\n: 1",
    "epochs: *nosuch", "<<: {epochs: 1}", "epochs: !!python/object/apply:os.system ['x']", "!<%zz> 1",
    "%YAML " + "9" * 5000 + ".1\n---\na: 1", 'epochs: "\\UFFFFFFFF"', 'epochs: "\\ud800"', 'data_dir: "\\e[2J"', 'epochs: "',
    "epochs: |9\n  1", " epochs: 1\nlr: 1", "{epochs: 1", "[" * 500, "a: " * 800, "x" * 5000 + ": 1", "data_dir: a\u2028b",
    "nodes: 2", "config: x", "time: 1:00:00", "modules:\n  - gcc/12", "modules: [gcc/12]",
    f"partition: [&a [x], {ALIASES}]", f"modules: [&a [x], {ALIASES}]",  # written out, 9^11 entries
)  # fmt: skip


def usual(cls: type) -> dict[str, str]:
    """A valid value of each key of a dataclass."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    texts = {name: str(value.name if isinstance(value, Enum) else value) for name, value in defaults.items()}
    return {name: "2" if text == "None" else text for name, text in texts.items()}


OF_RUN = usual(RunKeys) | usual(recipe_conf.load("mnist")[0])
OF_JOB = usual(JobKeys)
VALUES = st.sampled_from(NASTY) | st.text(max_size=20)


def words_of(keys: dict[str, str]) -> st.SearchStrategy[str]:
    """Arguments: most of them a valid key, some of those with a valid value."""
    valid = st.sampled_from([f"{name}={value}" for name, value in keys.items()])
    return valid | valid | st.tuples(st.sampled_from(list(keys)), VALUES).map("=".join) | st.text(max_size=12)


LINES = st.tuples(
    st.sampled_from([*OF_RUN, "partition", "gpus_per_node", "modules", "env_files"]), VALUES | st.just("2")
)
TEXTS = st.one_of(
    st.sampled_from(YAML),
    st.lists(LINES.map(": ".join) | LINES.map(lambda line: f"{line[0]}: {json.dumps(line[1])}"), max_size=3).map(
        "\n".join
    ),
)
CONTENTS = st.binary(max_size=40) | TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass"))


def accepted(act: Callable[[], Any], names: Sequence[str]) -> bool:
    """Whether ``act`` accepts its input. If not, its message is one line with one of ``names``."""
    try:
        act()
        return True
    except ConfigError as error:
        message = str(error)
    assert message.isprintable(), ascii(message)
    assert len(message) < 800
    assert any(name in message for name in names if name), message
    return False


def culprits(words: Sequence[str]) -> list[str]:
    """What a refusal of these arguments may name: a key, or an argument that is not one, or a file."""
    parts = [part for word in words for part in (word, *word.partition("=")[::2])]
    return [errors.shown(part) for part in parts] + ["is not key=value"]


def written(words: Sequence[str]) -> str:
    """The script for these words. Bash reads the directives and the unchanged keys of the recipe in it."""
    settings = command_line.parse(words, environ={})
    with contextlib.suppress(ConfigError, MachineError):  # too few GPUs here
        layout = cli.local_layout(settings)
        assert 0 <= layout.node_rank < len(layout.ranks)
    job = jobs.describe(settings, Path("/r"), Path("/b"))
    text = scripts.sbatch_script(job)
    lines = text.split("\n")
    directives = [line for line in lines if line.startswith("#SBATCH ")]
    assert lines.index(directives[-1]) == len(directives)  # nothing between them that a shell would run
    assert all(line.isprintable() for line in directives)
    line = next((line for line in lines if line.startswith("set -- ")), 'set -- "$@"')
    assert shlex.split(line)[2:-1] == list(job.arguments)
    return text


def test_any_arguments_of_launch_become_a_script_or_are_refused(tmp_path: Path) -> None:
    found: list[bool] = []

    @cases
    @given(st.lists(words_of(OF_RUN | OF_JOB), min_size=1, max_size=3))
    def check(words: list[str]) -> None:
        file = tmp_path / f"{len(found)}.sh"
        act = lambda: file.write_text(written(["recipe=mnist", *words]), encoding="utf-8")  # noqa: E731
        found.append(accepted(act, [*culprits(words), "recipe="]))

    check()
    assert min(found.count(True), found.count(False)) > 20
    bash = ["bash", "-c", 'for file; do bash -n "$file" || exit; done', "bash", *tmp_path.glob("*.sh")]
    ran = subprocess.run(bash, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@cases
@given(st.sampled_from(list(prepare.DATASETS)), st.lists(words_of(usual(prepare.PrepareKeys)), max_size=2))
def test_any_arguments_of_prepare_are_accepted_or_refused(dataset: str, words: list[str]) -> None:
    accepted(lambda: prepare.parse([dataset, *words]), [*culprits(words), "give one dataset", "unknown dataset"])


@pytest.mark.parametrize("which", ["keys", "profile"])
def test_any_file_of_keys_and_any_profile_is_accepted_or_refused(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "env/clusters").mkdir(parents=True)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "env/common.env").touch()
    helpers.use_root(monkeypatch, tmp_path)
    file = tmp_path / "env/clusters/here.yaml"
    word = f"config={file}" if which == "keys" else "cluster=here"
    names = [f"{name}=" for name in (*OF_RUN, *OF_JOB, "config")]
    names += [str(tmp_path), "has no key", "is not key=value", "UTF-8"]
    found: list[bool] = []

    @cases
    @given(CONTENTS)
    def check(content: bytes) -> None:
        file.write_bytes(content)
        found.append(accepted(lambda: written(["recipe=mnist", word]), names))

    check()
    assert min(found.count(True), found.count(False)) > 5

"""Seeded random input at each entry point is accepted, or refused in one line that names the key, the value or the file.

The entry points are the words of launch.py, a recipe and prepare, a file of keys, and a site's profile. Host lists, env files and
the variables of launchers are in tests/unit. Each case has a bound on its time and memory, so that a value which hangs or fills a
login node is found as well. A failure shows the case, which is the same for its number on every machine.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import resource
import shlex
import signal
import string
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import FrameType

import pytest

from recipes import prepare
from recipes.core import errors
from recipes.core.config import parser, profiles, recipe_conf
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.run_keys import RunKeys
from recipes.core.errors import ConfigError, MachineError
from recipes.core.launch import cli, jobs, scripts
from recipes.core.run import command_line
from tests import helpers

ROOT = Path(__file__).resolve().parents[2]
RECIPES = recipe_conf.names()

pytestmark = pytest.mark.fault(37, 38)

CASES = {"words": 250, "files": 200, "profiles": 200, "prepare": 200}
CASE_S = 10.0  # of the CPU's time; the slowest case takes a hundredth
CASE_BYTES = 1 << 30


# --- how a case is run


class Hangs(BaseException):
    """Not an Exception: nothing on the way may take it for an error of its own."""


def _hangs(number: int, frame: FrameType | None) -> None:
    raise Hangs(f"still at work after {CASE_S:g} s of the CPU's time")


@contextmanager
def bounded() -> Iterator[None]:
    """At most so much more memory than now, and so much of the CPU's time for one case, `again` and again."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGVTALRM, _hangs)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + CASE_BYTES, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


# What is given; what is done with it; names, one of which a refusal has.
Case = tuple[object, Callable[[], object], Sequence[str]]


def fuzz(
    kind: str, make: Callable[[random.Random], Case], refusal: type[Exception], least: float = 0.05
) -> Counter[str]:
    """Runs all cases of a kind, and gives how many were taken and refused: a share ``least`` of each has to be."""
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    with bounded():
        for number in range(CASES[kind]):
            given, act, names = make(random.Random(f"{kind} {number}"))
            fault = ""
            signal.setitimer(signal.ITIMER_VIRTUAL, CASE_S)
            try:
                act()
                seen["taken"] += 1
            except refusal as error:
                seen["refused"] += 1
                fault = fault_of(str(error), names)
            except (Exception, Hangs, SystemExit) as error:
                fault = f"{type(error).__name__}: {error!s:.300}"
            if fault:
                wrong.append(f"{kind} {number}: {fault}: given {given!a:.400}")
    assert not wrong, "\n".join([f"{len(wrong)} of {CASES[kind]}:", *wrong[:20]])
    assert seen["taken"] + seen["refused"] == CASES[kind]
    assert min(seen["taken"], seen["refused"]) >= least * CASES[kind], seen
    return seen


def fault_of(message: str, names: Sequence[str], limit: int = 800) -> str:
    """What is wrong with a refusal's message; "" for nothing."""
    if not message.isprintable():
        return f"not one printable line: {message!a:.300}"
    if len(message) > limit:
        return f"{len(message)} characters: {message:.300}"
    return "" if any(name in message for name in names if name) else f"names nothing of what is given: {message}"


# --- what is given

PLAIN = string.ascii_letters + string.digits + "_.,:/@%+=^-"
NASTY = (
    "", " ", "-1", "0", "1", "00", "true", "null", "~", "nan", "-inf", "1e999", "0x10", "1_0", "9" * 19, "9" * 4400,
    "1" + "0" * 700, "1." + "1" * 4000, "\u0663", "\u00b3", "???", "..", "/", "/dev/null", "~nosuchuser/x", "$HOME", "$(touch canary)",
    "a;b", "a b", "'", '"', "\\", "a\nb", "a\r\nb", "\x1b[2J", "\x85", "\u2028", "\u202e", "\ufeff", "\u00e9", "\ud800", "\udcff",
    "x" * 256, "x" * 4097, "../" * 1300, "[1]", "{a: 1}", "[[" * 800, "!!python/object:x", "*a", "%s%s%n", "#", ": ", "- ", "|",
    "a=b", "--wrap=x", "n[1-2]", "n[2-1]", "n[1-999999999]", "[1-65536]" * 3, "1:2:3", "1-0", "8,2", "h:1", "[::1]:1", "h:99999",
    "cpu", "auto", "never", "local", "slurm", "mnist", "digits", "example",
)  # fmt: skip
INTERPOLATIONS = (
    "${lr}", "${epoch}", "${", "${}", "${..a}", "\\${lr}", "${oc.env:HOME}", "${oc.env:NO_SUCH_VARIABLE}",
    "${oc.env:NO_SUCH_VARIABLE,3}", "${oc.env:HOME,[1,2]}", "${oc.env:${lr}}", "${oc.env:A,${oc.env:B,1}}", "${oc.env:\x00}",
    "${oc.env:\ud800}", "${oc.decode:'['}", "${oc.create:{a: 1}}", "${oc.select:lr}", "${oc.coerce:int,1}", "${nosuch:}",
    "${${lr}:1}", "${a:b:c}", "${lr}${lr}" * 50, "${" * 900, "${a:[" * 200, "${oc.env:A," * 120 + "1" + "}" * 120,
    "${a:" + "\\" * 501 + "}", "${lr:}", "${data_dir}", "${run_dir}/x",
)  # fmt: skip


def some_text(chance: random.Random, most: int = 20) -> str:
    """Text of one of several alphabets, any character of Unicode among them."""
    alphabets: Sequence[Callable[[], str]] = (
        lambda: chance.choice(string.printable),
        lambda: chance.choice(PLAIN),
        lambda: chance.choice("${}[]():,.=&*!?|>-#%@`'\"\\ \n\t~^"),
        lambda: chr(chance.randrange(1, 0x110000)),
        lambda: chr(chance.randrange(1, 0x300)),
        lambda: chance.choice("0123456789eE+-._"),
    )
    character = chance.choice(alphabets)
    return "".join(character() for _ in range(chance.randint(0, most)))


def mutated(chance: random.Random, text: str) -> str:
    """``text`` with one to three small mistakes."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randint(0, len(text))
        kind = chance.randrange(5)
        if kind == 0:
            text = text[:at] + text[at + 1 :]
        elif kind == 1:
            text = text[:at] + chance.choice(PLAIN) + text[at:]
        elif kind == 2:
            text = text[:at] + text[at : at + 1].swapcase() + text[at + 1 :]
        elif kind == 3:
            text = text[:at] + text[at : at + 2][::-1] + text[at + 2 :]
        else:
            text = text[:at] + some_text(chance, 3) + text[at:]
    return text


def mutated_bytes(chance: random.Random, content: bytes) -> bytes:
    """``content`` with bytes changed, left out, put in, doubled or cut off."""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at, until = sorted((chance.randint(0, len(content)), chance.randint(0, len(content))))
        kind = chance.randrange(6)
        if kind == 0 and content:
            at = min(at, len(content) - 1)
            content = content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
        elif kind == 1:
            content = content[:at] + chance.randbytes(chance.randint(1, 4)) + content[at:]
        elif kind == 2:
            content = content[:at] + content[min(at + chance.randint(1, 30), len(content)) :]
        elif kind == 3:
            content = content[:at] + chance.choice(BYTES) + content[at:]
        elif kind == 4:
            content = content[:until] + content[at:until] + content[until:]
        else:
            content = content[:at]
    return content


BYTES = (
    b"\n",
    b"\r\n",
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"=",
    b'"',
    b"'",
    b"$",
    b"\\",
    b"\t",
    b"#",
    b"\xe2\x80\xa8",
    b"\xed\xa0\x80",
)


@dataclasses.dataclass(frozen=True)
class Known:
    """The keys that may stand on a command line, with a value that each of them takes."""

    values: dict[str, str]
    classes: dict[str, str]  # key: its dataclass

    @property
    def names(self) -> list[str]:
        return list(self.values)


def known(recipe: str) -> Known:
    values, classes = {}, {}
    for cls in (JobKeys, RunKeys, recipe_conf.load(recipe)[0]):
        for field in dataclasses.fields(cls):
            default = field.default.name if isinstance(field.default, Enum) else field.default
            values[field.name] = (
                "2" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
            )
            classes[field.name] = cls.__name__
    return Known(values, classes)


KNOWN = {recipe: known(recipe) for recipe in RECIPES}
ALL_NAMES = sorted({name for found in KNOWN.values() for name in found.names})


def some_value(chance: random.Random, usual: str) -> str:
    kind = chance.random()
    if kind < 0.35:
        return usual
    if kind < 0.6:
        return chance.choice(NASTY)
    if kind < 0.75:
        return chance.choice(INTERPOLATIONS)
    if kind < 0.85:
        return mutated(chance, usual)
    return some_text(chance)


def some_word(chance: random.Random, recipe: str) -> str:
    found = KNOWN[recipe]
    name = chance.choice(found.names)
    usual, kind = found.values[name], chance.random()
    if kind < 0.08:
        return mutated(chance, name) + "=" + some_value(chance, usual)
    if kind < 0.12:
        return some_text(chance) + chance.choice(("=", "", ":")) + some_text(chance)
    if kind < 0.14:
        return chance.choice(
            (f"--{name}={usual}", f"-{name}", name, f"{name} = {usual}", f"{name}:{usual}", f"+{name}=1", f"{name}.x=1")
        )
    return f"{name}={some_value(chance, usual)}"


def culprits(words: Sequence[str], recipe: str) -> list[str]:
    """What a refusal of these words may name: a key that was typed, or a word that is none; a path that was given."""
    names = []
    for word in words:
        name, _, value = word.partition("=")
        names += (
            [f"{name}=", name] if name.isidentifier() and name.isascii() and len(name) > 1 else [errors.shown(word)]
        )
        names += [errors.shown(name), errors.shown(value) if name in ("network", "config") else ""]
    return [name for name in names if name]


# --- keys


def settle(words: Sequence[str], recipe: str = "") -> parser.Settings:
    """What launch.py and a batch script do with words before anything is started."""
    settings = command_line.parse(words, recipe=recipe, environ={})
    job = jobs.describe(settings, Path("/r"), Path("/b"))
    scripts.sbatch_script(job)
    for keys in (settings.job, settings.run, settings.config):
        for name, value in vars(keys).items():
            assert not isinstance(value, int) or -(2**63) <= value < 2**63, name  # what a checkpoint can hold
    return settings


def lay_out(settings: parser.Settings) -> None:
    """What launcher=local makes of the same keys: ranks, or its own refusal."""
    refusal = ""
    try:
        layout = cli.local_layout(settings)
        assert 0 <= layout.node_rank < len(layout.ranks)
    except (ConfigError, MachineError) as error:
        refusal = str(error)
    assert not refusal or not fault_of(refusal, [*KNOWN[settings.recipe].names, "GPU"])


def test_any_arguments_of_launch_or_a_recipe(tmp_path: Path) -> None:
    """Accepted arguments become a script in which bash reads the directives and the unchanged keys of the recipe."""
    written: list[Path] = []

    def show(typed: Sequence[str]) -> None:
        settings = settle(typed)
        lay_out(settings)
        job = jobs.describe(settings, Path("/r"), Path("/b"))
        lines = scripts.sbatch_script(job).split("\n")
        directives = [line for line in lines if line.startswith("#SBATCH ")]
        assert len(directives) == len(scripts.directives(job)) + 2
        assert lines.index(directives[-1]) == len(directives)  # nothing between them that a shell would run
        assert all(line.isprintable() for line in directives)
        line = next((line for line in lines if line.startswith("set -- ")), 'set -- "$@"')
        assert shlex.split(line)[2:-1] == list(job.arguments)
        written.append(tmp_path / f"{len(written)}.sh")
        written[-1].write_text("\n".join(lines), encoding="utf-8")

    def make(chance: random.Random) -> Case:
        recipe = chance.choice(RECIPES)
        words = [some_word(chance, recipe) for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 5)))]
        if chance.random() < 0.3:
            mine = [w for w in words if KNOWN[recipe].classes.get(w.partition("=")[0]) != "JobKeys"] or ["epochs=1"]
            return mine, lambda: settle(mine, recipe), culprits(mine, recipe)
        typed = [f"recipe={recipe}", *words]
        return typed, lambda: show(typed), culprits(typed, recipe)

    fuzz("words", make, ConfigError)
    check = 'for file; do bash -n "$file" || exit; done'
    ran = subprocess.run(["bash", "-c", check, "bash", *written], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{y}: &{y} [{', '.join([f'*{x}'] * 9)}]" for x, y in zip("abcdefghij", "bcdefghijk", strict=True)
)
NESTED = ", ".join(f"&{y} [{', '.join([f'*{x}'] * 9)}]" for x, y in zip("abcdefghij", "bcdefghijk", strict=True))
BOMB = f"partition: [&a [{', '.join('x' * 9)}], {NESTED}]"  # written out, it would be 9^11 entries
YAML = (
    "", "---", "--- a\n--- b", "- a", "a", "epochs", "epochs:", "epochs: [1]", "epochs: {a: 1}", "epochs: 1\nepochs: 2",
    "? epochs\n: 2", "? [a]\n: 1", "&a epochs: *a", "epochs: *nosuch", "<<: {epochs: 1}", "<<: *a", "!!map {epochs: 1}",
    "epochs: !!int '3'", "epochs: !!python/object/apply:os.system ['touch canary']", "epochs: !<tag:x> 1", "epochs: !x!y 1",
    "!<%zz> 1", "%YAML 9.9\n---\na: 1", "%YAML " + "9" * 5000 + ".1\n---\na: 1", 'epochs: "\\UFFFFFFFF"', 'epochs: "\\ud800"',
    'data_dir: "\\e[2J"', 'epochs: "', "epochs: |\n  1\n", "epochs: |9\n  1", "epochs:\t1", " epochs: 1\nlr: 1", "epochs: 1#x",
    "epochs:1", "{epochs: 1", "[" * 500, "{a: " * 500, "- " * 2000, "a: " * 800, "&a " * 50, "x" * 5000 + ": 1",
    "data_dir: a\u2028b", "\ufeffepochs: 1", "nodes: 2", "config: x", "recipe: cifar", "time: 1:00:00",
    "data_dir: ${oc.env:HOME}", ALIASES, ALIASES + "\nepochs: *k", BOMB, BOMB.replace("partition", "modules"),
)  # fmt: skip


def some_yaml(chance: random.Random, names: Sequence[str], usual: dict[str, str]) -> bytes:
    kind = chance.random()
    if kind < 0.08:
        return chance.randbytes(chance.randint(0, 60))
    if kind < 0.25:
        text = chance.choice(YAML)
    else:
        lines = []
        for _ in range(chance.randint(0, 4)):
            name = chance.choice(names)
            value = some_value(chance, usual.get(name, "2"))
            plain = json.dumps(value) if chance.random() < 0.6 else value  # in double quotes: as it is
            lines.append(f"{name if chance.random() < 0.9 else mutated(chance, name)}: {plain}")
        lines += [chance.choice(YAML)] if chance.random() < 0.1 else []
        text = "\n".join(lines)
    content = text.encode("utf-8", "surrogatepass")
    if chance.random() < 0.1:
        content = text.encode(chance.choice(("utf-16", "utf-8-sig", "latin-1")), "replace")
    return mutated_bytes(chance, content) if chance.random() < 0.2 else content


def test_any_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"

    def make(chance: random.Random) -> Case:
        recipe = chance.choice(RECIPES)
        content = some_yaml(chance, KNOWN[recipe].names, KNOWN[recipe].values)
        words = [f"config={file}", *(some_word(chance, recipe) for _ in range(chance.choice((0, 0, 1))))]
        named = [f"{name}=" for name in ALL_NAMES] + [
            "config=", "recipe=", "has no key", "is not key=value", "is not UTF-8",
        ]  # fmt: skip
        named += [f"{name.decode()}=" for name in re.findall(rb"^ *(\w+) *:", content, re.MULTILINE)]  # misspelt ones

        def act() -> None:
            file.write_bytes(content)
            settle([f"recipe={recipe}", *words])

        return (content, words), act, [*named, *culprits(words, recipe)]

    fuzz("files", make, ConfigError)


def test_any_profile_of_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "env" / "clusters"
    folder.mkdir(parents=True)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for path in (ROOT / "env").glob("*.env"):
        (tmp_path / "env" / path.name).symlink_to(path)
    helpers.use_root(monkeypatch, tmp_path)
    here, taken, named = folder / "here.yaml", list[Path](), list[list[str]]()
    usual = {
        "partition": "gpu", "account": "a", "qos": "q", "constraint": "a|b", "reservation": "r",
        "gpus_per_node": "4", "cpus_per_rank": "8",
        "time": "1:00:00", "network": "efa", "modules": "\n  - gcc/12", "env_files": "\n  - efa.env",
    }  # fmt: skip
    real = (ROOT / "env" / "clusters" / "example.yaml").read_bytes()

    def make(chance: random.Random) -> Case:
        content = mutated_bytes(chance, real) if chance.random() < 0.3 else some_yaml(chance, list(usual), usual)
        typed = ["recipe=mnist", "cluster=here"]

        def act() -> None:
            here.write_bytes(content)
            settle(typed)
            taken.append(folder / f"taken{len(taken)}.txt")
            taken[-1].write_bytes(content)
            named.append(profiles.cluster_profile("here").get("modules", []))

        return content, act, [str(here), "cluster=", *(f"{name}=" for name in usual), str(folder.parent)]

    fuzz("profiles", make, ConfigError)
    # A batch script reads the modules before there is any Python: it finds the same.
    shared = (ROOT / "sbatch/job.sh").read_text().splitlines()
    reading = next(line for line in shared if "sed -n '/^modules" in line).strip().removeprefix("done < <(")
    loop = f"for profile; do {reading.removesuffix(')')}; echo =; done"
    ran = subprocess.run(["bash", "-c", loop, "bash", *taken], capture_output=True, check=True)
    chunks = ("\n" + ran.stdout.decode("utf-8", "surrogateescape")).split("\n=")[:-1]
    assert [[line for line in chunk.split("\n") if line] for chunk in chunks] == named
    assert any(named)


def test_any_arguments_of_prepare() -> None:
    def make(chance: random.Random) -> Case:
        dataset = chance.choice(list(prepare.DATASETS))
        keys = {f.name: f for f in dataclasses.fields(prepare.KEYS.get(dataset, prepare.PrepareKeys))}
        words = [dataset] if chance.random() < 0.9 else [chance.choice((mutated(chance, dataset), *NASTY))]
        for _ in range(chance.choice((0, 1, 1, 2))):
            name = chance.choice(list(keys))
            default = keys[name].default.name if isinstance(keys[name].default, Enum) else keys[name].default
            value = some_value(chance, "2" if default is None else str(default))
            words.append(f"{name if chance.random() < 0.85 else mutated(chance, name)}={value}")
        if chance.random() < 0.05:
            words.append(some_text(chance))
        return words, lambda: prepare.parse(words), [*culprits(words, ""), "give one dataset", "unknown dataset"]

    fuzz("prepare", make, ConfigError)

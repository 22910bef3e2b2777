"""Anything at all, seeded: it is taken, or refused in one line that says what is wrong.

Keys, files of keys, sites' profiles, host lists, env files, and surroundings that contradict each other. Every case has
a bound on its time and memory, so that a value which hangs or fills a login node is found as well. A failure names the
case, which is the same for its number on every machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import resource
import shutil
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

import launch
from recipes import prepare
from recipes.core import config, envfile, hostlist, ranks, slurm
from recipes.core.config import ConfigError, JobKeys, RunKeys
from recipes.core.envfile import EnvFileError
from recipes.core.hostlist import HostListError
from recipes.core.ranks import RankError, RankInfo
from recipes.core.rundir import MachineError
from tests import helpers

ROOT = Path(__file__).resolve().parents[2]
RECIPES = config.recipe_names()

pytestmark = pytest.mark.fault(37, 38)

CASES = {
    "words": 500,
    "files": 300,
    "profiles": 300,
    "scripts": 200,
    "prepare": 700,
    "hosts": 2500,
    "counts": 1500,
    "env files": 2500,
    "fabrics": 600,
    "surroundings": 5000,
}
CASE_S = 10.0  # of the CPU's time; the slowest case takes a hundredth
CASE_BYTES = 1 << 30


def test_there_are_enough_of_them() -> None:
    assert sum(CASES.values()) >= 10_000
    assert {"mnist", "cifar", "imagenet"} <= set(RECIPES)


# --- how a case is run


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """Commands that are run in this process set theirs."""
    before = os.umask(0o022)
    yield
    os.umask(before)


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
    "", " ", "\t", "-1", "0", "1", "2", "00", "true", "false", "null", "None", "~", "nan", "-inf", "1e999", "1e-400",
    "0x10", "1_0",
    "9" * 19, "9" * 400, "9" * 4000, "9" * 4400, "-" + "9" * 4000, "1" + "0" * 700, "1." + "1" * 4000, "٣", "³", "½",
    "Ⅷ", "１",
    "???", "...", "..", ".", "/", "//", "/dev/null", "a/../../b", "~nosuchuser/x", "~root", "$HOME",
    "$(touch canary)", "`id`",
    "a;b", "a&b", "a|b", "a b", "'", '"', "''", "\\", "\\n", "\\x00", "a\nb", "a\r\nb", "\x0b", "\x1b[2J", "\x7f",
    "\x85", "\u2028", "\u2029",
    "\u202e", "\ufeff", "\u200b", "\u00a0", "é", "中文", "🦄", "\ud800", "\udcff", "\U0010ffff", "x" * 255, "x" * 256,
    "x" * 4095,
    "x" * 4096, "x" * 4097, "../" * 1300, "a/" * 2000, "[", "]", "[]", "[1]", "{", "}", "{}", "{a: 1}", "[[" * 800,
    "!!python/object:x",
    "&a", "*a", "%", "%s%s%n", "{0}", "#", "# x", ": ", "- ", "?", "|", ">", "@", "a=b", "=", "==", "--", "-x",
    "--wrap=x",
    "n[1-2]", "n[1-", "n[2-1]", "n[1-999999999]", "n[" + "1," * 2000 + "1]", "[1-65536]" * 3, "n]", ",", "1:2:3",
    "1-0", "0-0", "8,2",
    "h:1", "[::1]:1", "h:99999", "cpu", "gpu", "auto", "never", "local", "slurm", "print", "mnist", "digits", "fake",
    "example",
)  # fmt: skip
INTERPOLATIONS = (
    "${lr}", "${epochs}", "${epoch}", "${seed}x", "${", "${}", "${}}", "}${", "${.}", "${..a}", "${a.b}", "${a[0]}",
    "\\${lr}", "$${lr}",
    "${oc.env:HOME}", "${oc.env:NO_SUCH_VARIABLE}", "${oc.env:NO_SUCH_VARIABLE,3}",
    "${oc.env:NO_SUCH_VARIABLE,null}", "${oc.env:}",
    "${oc.env:[]}", "${oc.env:HOME,[1,2]}", "${oc.env:'}", "${oc.env:${lr}}",
    "${oc.env:A,${oc.env:B,${oc.env:C,1}}}", "${oc.env:\x00}",
    "${oc.env:A=B}", "${oc.env:\ud800}", "${oc.env:" + "x" * 3000 + "}", "${oc.decode:'['}",
    "${oc.decode:${oc.env:HOME}}",
    "${oc.create:{a: 1}}", "${oc.create:[1]}", "${oc.select:lr}", "${oc.dict.keys:lr}", "${oc.dict.values:lr}",
    "${oc.deprecated:lr}",
    "${oc.coerce:int,1}", "${oc.coerce:antigravity.x,1}", "${oc.nosuch:1}", "${nosuch:}", "${${lr}:1}", "${a:b:c}",
    "${lr}${lr}" * 50,
    "${" * 900, "${a:" * 300, "${a:[" * 200, "${a:{b:" * 150, "${oc.env:A," * 120 + "1" + "}" * 120,
    "${a:" + "[" * 500 + "}", "${a:" + "'" * 501,
    "${a:" + "\\" * 501 + "}", "${lr", "$ {lr}", "${lr }", "${ lr}", "${lr:}", "${LR}", "${data_dir}",
    "${run_dir}/x", "${recipe}",
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
    b"\n", b"\r\n", b"\0", b"\xff", b"\xef\xbb\xbf", b"=", b"==", b'"', b"'", b"$", b"`", b"\\", b" ", b"\t", b"#",
    b"A=", b"\nA=1\n", b"export ",
    b"\nPATH=/x\n", b"\nLD_PRELOAD=x\n", b"\nHF_TOKEN=x\n", b"$(touch canary)", b";", b"\xe2\x80\xa8", b"\xc2\xa0",
    b"\xed\xa0\x80", b"\nB=\"c d\"\n",
)  # fmt: skip


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
    for cls in (JobKeys, RunKeys, config.recipe_conf(recipe)[0]):
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
            [f"{name}=", name] if name.isidentifier() and name.isascii() and len(name) > 1 else [config.shown(word)]
        )
        names += [config.shown(name), config.shown(value) if name in ("network", "config") else ""]
    return [name for name in names if name]


# --- keys


def settle(words: Sequence[str], recipe: str = "") -> config.Settings:
    """What launch.py and a batch script do with words before anything is started."""
    settings = config.parse(words, recipe=recipe, environ={})
    job = slurm.describe(settings, Path("/r"), Path("/b"))
    slurm.submitit_parameters(job, "/python")
    for keys in (settings.job, settings.run, settings.config):
        for name, value in vars(keys).items():
            assert not isinstance(value, int) or -(2**63) <= value < 2**63, name  # what a checkpoint can hold
    return settings


def lay_out(settings: config.Settings) -> None:
    """What launcher=local makes of the same keys: ranks, or its own refusal."""
    refusal = ""
    try:
        layout = launch.local_layout(settings)
        assert 0 <= layout.node_rank < len(layout.ranks)
    except (ConfigError, MachineError) as error:
        refusal = str(error)
    assert not refusal or not fault_of(refusal, [*KNOWN[settings.recipe].names, "GPU"])


def test_any_words_behind_launch_or_a_recipe() -> None:
    def make(chance: random.Random) -> Case:
        recipe = chance.choice(RECIPES)
        words = [some_word(chance, recipe) for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 5)))]
        if chance.random() < 0.3:
            mine = [w for w in words if KNOWN[recipe].classes.get(w.partition("=")[0]) != "JobKeys"] or ["epochs=1"]
            return mine, lambda: settle(mine, recipe), culprits(mine, recipe)
        typed = [f"recipe={recipe}", *words]
        return typed, lambda: lay_out(settle(typed)), culprits(typed, recipe)

    fuzz("words", make, ConfigError)


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{y}: &{y} [{', '.join([f'*{x}'] * 9)}]" for x, y in zip("abcdefghij", "bcdefghijk", strict=True)
)
NESTED = ", ".join(f"&{y} [{', '.join([f'*{x}'] * 9)}]" for x, y in zip("abcdefghij", "bcdefghijk", strict=True))
BOMB = f"partition: [&a [{', '.join('x' * 9)}], {NESTED}]"  # written out, it would be 9^11 entries
YAML = (
    "", "#", "---", "...", "--- a\n--- b", "- a", "a", "epochs", "epochs:", "epochs: [1]", "epochs: {a: 1}",
    "epochs: 1\nepochs: 2", "? epochs\n: 2",
    "? [a]\n: 1", "? {a: 1}\n: 1", "? ? a\n", "&a epochs: *a", "epochs: *nosuch", "<<: {epochs: 1}", "<<: *a",
    "<<: [1]", "=: 1", "!!map {epochs: 1}",
    "epochs: !!int '3'", "epochs: !!python/object/apply:os.system ['touch canary']", "epochs: !<tag:x> 1",
    "epochs: !x!y 1", "!%FF 1", "!<%zz> 1",
    "%YAML 1.1\n---\nepochs: 1", "%YAML 9.9\n---\na: 1", "%YAML " + "9" * 5000 + ".1\n---\na: 1",
    "%TAG ! !\n---\na: 1", "%FOO\n---\na: 1",
    'epochs: "\\UFFFFFFFF"', 'epochs: "\\U00110000"', 'epochs: "\\ud800"', 'epochs: "\\x0a"', 'data_dir: "\\e[2J"',
    'epochs: "\\q"', 'epochs: "', "epochs: '",
    "epochs: |\n  1\n", "epochs: >\n  1\n  2\n", "epochs: |9\n  1", "epochs: |+-\n 1", "epochs:\t1", "\tepochs: 1",
    " epochs: 1\nlr: 1", "epochs: 1\n lr: 1",
    "epochs: 1 # x", "epochs: 1#x", "epochs : 1", "epochs:1", "{epochs: 1}", "{epochs: 1", "[" * 500, "{a: " * 500,
    "- " * 2000, "? " * 800, "a: " * 800, "&a " * 50,
    "a:\n" * 50, "x" * 5000, "x" * 5000 + ": 1", "epochs: " + "x" * 5000, "data_dir: a\u2028b", "data_dir: a\u0085b",
    "\ufeffepochs: 1", "nodes: 2", "config: x",
    "recipe: cifar", "run_dir: ~", "time: 1:00:00", "data_dir: ${oc.env:HOME}", "epochs: ${oc.env:HOME}", ALIASES,
    ALIASES + "\nepochs: *k", "epochs: &k 1\nlr: *k",
    BOMB, BOMB.replace("partition", "epochs"), BOMB.replace("partition", "modules"),
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
    monkeypatch.setattr(config, "ROOT", tmp_path)
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
            named.append(config.cluster_profile("here").get("modules", []))

        return content, act, [str(here), "cluster=", *(f"{name}=" for name in usual), str(folder.parent)]

    fuzz("profiles", make, ConfigError)
    # A batch script reads the modules before there is any Python: it finds the same, in the words of slurm.py.
    reading = (
        next(line for line in slurm.script(ready_job()).splitlines() if "sed -n" in line)
        .strip()
        .removeprefix("done < <(")
    )
    loop = f"for profile; do {reading.removesuffix(')')}; echo =; done"
    ran = subprocess.run(["bash", "-c", loop, "bash", *taken], capture_output=True, check=True)
    chunks = ("\n" + ran.stdout.decode("utf-8", "surrogateescape")).split("\n=")[:-1]
    assert [[line for line in chunk.split("\n") if line] for chunk in chunks] == named
    assert any(named)


def ready_job() -> slurm.Job:
    return slurm.Job("mnist", (), 1, 1, 1, 1, 30, "mnist", root=None)


def test_any_command_line_that_shows_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SLURM_JOB_ID", "RECIPES_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    scripts: list[Path] = []

    class Refused(Exception):
        pass

    def make(chance: random.Random) -> Case:
        recipe = chance.choice(RECIPES)
        words = [some_word(chance, recipe) for _ in range(chance.choice((1, 1, 2, 3)))]
        words = [word for word in words if word not in ("-h", "--help", "help")]
        typed = [f"recipe={recipe}", *words, "launcher=print"]

        def act() -> None:
            status = launch.main(typed)
            out, err = capsys.readouterr()
            if status:
                assert (status, out) == (2, "")
                assert err.startswith("launch.py: ")
                assert err.endswith("\n")
                raise Refused(err[:-1])
            assert err == ""
            scripts.append(tmp_path / f"{len(scripts)}.sh")
            scripts[-1].write_text(out, encoding="utf-8")

        return typed, act, culprits(typed, recipe)

    fuzz("scripts", make, Refused)
    check = 'for file; do bash -n "$file" || exit; done'
    ran = subprocess.run(["bash", "-c", check, "bash", *scripts], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_any_words_behind_prepare() -> None:
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
        return words, lambda: prepare.parse(words), [*culprits(words, ""), "one dataset is wanted", "unknown dataset"]

    fuzz("prepare", make, ConfigError)


# --- host lists


def some_hosts(chance: random.Random) -> str:
    def number() -> str:
        return chance.choice(
            (str(chance.randint(0, 30)), f"{chance.randint(0, 12):03d}", "9" * chance.randint(1, 20), "")
        )

    def span() -> str:
        return chance.choice((number(), f"{number()}-{number()}", f"{number()}-{number()}-{number()}"))

    def item() -> str:
        text = chance.choice(("n", "rack", "a-b", "x.y", "", "node_1", "N", "é", " ", "n" * 300, "$(touch canary)"))
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
            text += (
                "["
                + ",".join(span() for _ in range(chance.choice((1, 1, 2, 4))))
                + "]"
                + chance.choice(("", "-ib", ".org", "x"))
            )
        return text

    kind = chance.random()
    if kind < 0.15:
        return chance.choice(
            (
                *NASTY,
                "n" * 90_000 + "[1-65536]",
                "n[1-65536]" * 9,
                "n[" * 5000,
                "n[1-9]," * 9000,
                "[" + "0" * 17 + "1-65536]",
            )
        )
    text = ",".join(item() for _ in range(chance.choice((1, 1, 2, 3))))
    if kind < 0.25:
        low, more = chance.randint(0, 200), chance.randint(0, 40)
        return f"n[{low}-{low + more}]"
    return mutated(chance, text) if kind < 0.6 else text


def test_any_host_list() -> None:
    def make(chance: random.Random) -> Case:
        text = some_hosts(chance)

        def act() -> None:
            hosts = hostlist.expand(text)
            assert 0 < len(hosts) <= hostlist.MAX_ITEMS
            assert sum(map(len, hosts)) < 1 << 25
            assert all(re.fullmatch(r"[A-Za-z0-9._-]+", host) for host in hosts)
            assert hostlist.expand(",".join(hosts)) == hosts  # a list of plain names is that list

        return text, act, ["host list "]

    fuzz("hosts", make, HostListError)


def test_what_slurm_takes_for_a_host_list_too_is_the_same_to_it(tmp_path: Path) -> None:
    """Asks `scontrol show hostnames`, which needs no controller. It takes less: no text behind a bracket, for one."""
    helpers.need("" if shutil.which("scontrol") else "scontrol is not there: apt-get install slurm-client")
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\n")
    environ = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    same = 0
    for number in range(CASES["hosts"]):
        text = some_hosts(random.Random(f"hosts {number}"))
        try:
            hosts = hostlist.expand(text)
        except HostListError:
            continue
        if text.startswith("-") or len(text) > 1000 or len(hosts) > 1000:
            continue
        asked = subprocess.run(
            ["scontrol", "show", "hostnames", text], env=environ, capture_output=True, text=True, check=False
        )
        assert asked.stdout.split() in (hosts, []), text
        same += asked.stdout != ""
        if same == 150:
            return
    pytest.fail(f"only {same} lists that both take")


def test_any_list_of_counts() -> None:
    def make(chance: random.Random) -> Case:
        numbers = ("1", "2", "16", "0", "", "-1", "9" * 18, "9" * 30, "65536", "65537", " 1", "1.5", "٣")
        items = [
            chance.choice(("{0}", "{0}(x{1})", "{0}(x{1}", "{0}x{1}", "(x{1})", "{0}(x)"))
            for _ in range(chance.choice((1, 1, 2, 4)))
        ]
        text = ",".join(item.format(chance.choice(numbers), chance.choice(numbers)) for item in items)
        text = (
            chance.choice(NASTY)
            if chance.random() < 0.1
            else text
            if chance.random() < 0.7
            else f"{chance.randint(1, 9)}(x{chance.randint(1, 99)})"
        )

        def act() -> None:
            counts = hostlist.expand_counts(text)
            assert 0 < len(counts) <= hostlist.MAX_ITEMS
            assert min(counts) > 0

        return text, act, ["counts "]

    fuzz("counts", make, HostListError)


# --- env files

SHIPPED = sorted((ROOT / "env").glob("*.env"))
SHELLS = [shell for shell in ("dash", "bash", "bash --posix", "busybox sh") if shutil.which(shell.split()[0])]


def some_env_file(chance: random.Random) -> bytes:
    kind = chance.random()
    if kind < 0.5:
        return mutated_bytes(chance, chance.choice(SHIPPED).read_bytes())
    if kind < 0.6:
        return chance.randbytes(chance.randint(0, 80))
    names = (
        "NCCL_DEBUG", "A", "FI_X", "_x", "a1", "if", "A B", "1A", "A-B", "A[0]", "A+", "PATH", "LD_PRELOAD",
        "HF_TOKEN", "RANK", "SLURM_X", "é", "",
    )  # fmt: skip
    values = (
        "1", "", '"a b"', '"', '""', '"a"b', "a b", "$HOME", "${A}", "$(touch canary)", "`touch canary`", "a;b", "~",
        "*", "'x'", "\\", "a#b", "#", "=", "a=b",
        "^x,y", '"#"', '"a;b&c|d"', '"~"', '"*?[x]"', '"!x"', '"\\"', "x" * 300, "\x1b[2J", "é", "-1", "%", "{a,b}",
        "a\tb", "\t", " x", "x ",
    )  # fmt: skip
    lines = []
    for _ in range(chance.randint(0, 6)):
        line = chance.choice(names if chance.random() < 0.4 else names[:5]) + chance.choice(
            ("=", "=", "=", "=", " = ", ":", "")
        )
        line += chance.choice(values) if chance.random() < 0.8 else some_text(chance)
        lines.append(chance.choice(("# " + line, "", " ", "export " + line)) if chance.random() < 0.25 else line)
    return chance.choice(("\n", "\n", "\n", "\r\n", "\n\n")).join(lines).encode("utf-8", "surrogatepass")


def by_shell(shell: str, files: Sequence[Path], cwd: Path) -> list[dict[str, str]]:
    """What ``set -a; . file`` adds to an empty environment, for each file, in one shell, which may say nothing."""
    cwd.mkdir(exist_ok=True)
    script = 'for f do ( set -a; . "$f" && exec env -0 ) || exit 1; printf "=\\0"; done'
    ran = subprocess.run(
        [*shell.split(), "-c", script, "sh", "/dev/null", *map(str, files)],
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}, cwd=cwd, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, b""), f"{shell}: {ran.stderr[:500]!r}"
    assert not list(cwd.iterdir()), f"{shell} ran something"
    chunks = ("\0" + ran.stdout.decode("utf-8")).split("\0=\0")[:-1]
    bare, *found = [
        dict(item.split("=", 1) for item in chunk.split("\0") if item and not item.startswith("_=")) for chunk in chunks
    ]
    assert all(one.items() >= bare.items() for one in found), f"{shell}: a file changed what was there"
    return [{name: value for name, value in one.items() if name not in bare} for one in found]


def test_any_env_file_and_what_is_taken_means_the_same_to_a_shell(tmp_path: Path) -> None:
    taken: list[tuple[Path, dict[str, str]]] = []

    def make(chance: random.Random) -> Case:
        content, path = some_env_file(chance), tmp_path / f"{len(taken)}.env"

        def act() -> None:
            path.write_bytes(content)
            found = envfile.read(path)
            assert all(value.isascii() and value.isprintable() for value in found.values())
            taken.append((path, found))

        return content, act, [f"{path}:", f"{path}: larger"]

    fuzz("env files", make, EnvFileError)
    assert {"dash", "bash"} <= set(SHELLS)
    meaning = [(path, found) for path, found in taken if found]
    assert len(meaning) > 300
    for shell in SHELLS:
        files = [path for path, _ in meaning]
        for (path, found), theirs in zip(meaning, by_shell(shell, files, tmp_path / "cwd"), strict=True):
            assert theirs == found, f"{shell} reads {path.read_bytes()!r} otherwise"


def test_any_name_of_a_fabric_and_any_list_of_a_sites_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What network= and a profile's env_files name, as far as they get behind the checks of keys."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.env").write_text("T_A=1\n")
    (tmp_path / "folder.env").mkdir()
    (tmp_path / "loop.env").symlink_to("loop.env")
    (tmp_path / "gone.env").symlink_to("nowhere")
    names = (
        "efa", "mine.env", "./mine.env", "folder.env", "loop.env", "gone.env", "common", "EFA", "efa.env", "nosuch",
        "x/", "/",
    )  # fmt: skip

    def make(chance: random.Random) -> Case:
        network = (
            chance.choice(names)
            if chance.random() < 0.6
            else mutated(chance, "infiniband")
            if chance.random() < 0.3
            else chance.choice(NASTY)
        )
        site = (
            [chance.choice(("efa.env", "nosuch.env", "clusters", "../x", "/dev/null", "\ud800", "a\0b", "x" * 5000))]
            if chance.random() < 0.2
            else []
        )

        def act() -> dict[str, str]:
            return envfile.merge(*(envfile.read(file) for file in envfile.files_for(network, ROOT / "env", site)))

        return (
            (network, site),
            act,
            [
                "network=",
                str(ROOT / "env"),
                repr(network),
                network,
                *site,
                *map(repr, site),
                "no such file",
                "not an ordinary file",
            ],
        )

    fuzz("fabrics", make, EnvFileError)


# --- who a process is

PLACES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE", "PMI_RANK", "PMI_SIZE",
    "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "SLURM_JOB_ID", "SLURM_STEP_ID",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",
    "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NODELIST",
    "SLURM_STEP_NODELIST", "SLURM_TASKS_PER_NODE",
    "SLURM_STEP_TASKS_PER_NODE", "SLURMD_NODENAME", "SLURM_DISTRIBUTION", "SLURM_HET_SIZE",
    "SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_JOB_NODELIST_HET_GROUP_1",
    "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT",
)  # fmt: skip


def torchrun(nodes: int, each: int, node: int, local: int) -> dict[str, str]:
    found = {
        "RANK": node * each + local,
        "WORLD_SIZE": nodes * each,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": each,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
    }
    return {**{name: str(value) for name, value in found.items()}, "MASTER_ADDR": "n1", "MASTER_PORT": "29400"}


def srun(nodes: int, each: int, node: int, local: int) -> dict[str, str]:
    found = {
        "JOB_ID": 7,
        "STEP_ID": 0,
        "PROCID": node * each + local,
        "LOCALID": local,
        "NODEID": node,
        "NTASKS": nodes * each,
        "NNODES": nodes,
    }
    found |= {"STEP_NUM_TASKS": nodes * each, "STEP_NUM_NODES": nodes}
    texts = {
        "STEP_NODELIST": f"n[1-{nodes}]",
        "STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
        "JOB_NODELIST": f"n[1-{nodes}]",
        "TASKS_PER_NODE": f"{each}(x{nodes})",
    }
    return {f"SLURM_{name}": str(value) for name, value in {**found, **texts}.items()}


def mpirun(nodes: int, each: int, node: int, local: int) -> dict[str, str]:
    found = {"RANK": node * each + local, "SIZE": nodes * each, "LOCAL_RANK": local, "LOCAL_SIZE": each}
    return {**{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in found.items()}, "MASTER_ADDR": "n1"}


def hydra(nodes: int, each: int, node: int, local: int) -> dict[str, str]:
    found = {
        "PMI_RANK": node * each + local,
        "PMI_SIZE": nodes * each,
        "MPI_LOCALRANKID": local,
        "MPI_LOCALNRANKS": each,
    }
    return {**{name: str(value) for name, value in found.items()}, "MASTER_ADDR": "n1"}


LAUNCHERS: Sequence[Callable[[int, int, int, int], dict[str, str]]] = (torchrun, srun, mpirun, hydra)


def some_surroundings(chance: random.Random) -> dict[str, str]:
    """One launcher inside another, whose layouts agree or not, with some variables gone, odd or another's."""
    environ: dict[str, str] = {}
    nodes, each = chance.randint(1, 4), chance.randint(1, 4)
    for launcher in chance.sample(LAUNCHERS, chance.choice((0, 1, 1, 1, 2, 2, 3))):
        if chance.random() < 0.4:
            nodes, each = chance.randint(1, 4), chance.randint(1, 4)
        environ |= launcher(nodes, each, chance.randrange(nodes), chance.randrange(each))
    odd = (
        "", " 1", "-1", "1.5", "0x1", "٣", "1e3", "9" * 18, "9" * 19, "9" * 5000, "a\nb", "\ud800", "\u2028", "n1",
        "n[1-2]", "n[1-99999999]", "2(x2)", "1,1",
        "n" * 90_000 + "[1-65536]", "[::1]", "fe80::1%eth0", "a..b", ".", "-x", "x" * 300, "a b", "$(touch canary)",
        "localhost", "127.0.0.1", "999.1.1.1", "4294967291",
        "4294967294", "4294967040", "arbitrary", "65536", "1024", "None",
    )  # fmt: skip
    for _ in range(chance.choice((0, 0, 1, 1, 2, 3, 6))):
        name, kind = chance.choice(PLACES), chance.random()
        if kind < 0.25:
            environ.pop(name, None)
        elif kind < 0.6:
            environ[name] = str(chance.randint(0, 5))
        elif kind < 0.8 and environ:
            environ[name] = chance.choice(list(environ.values()))
        else:
            environ[name] = chance.choice(odd)
    return environ


def test_any_surroundings() -> None:
    def make(chance: random.Random) -> Case:
        environ = some_surroundings(chance)

        def act() -> None:
            fits(ranks.detect(environ))

        return environ, act, PLACES

    fuzz("surroundings", make, RankError, least=0.2)


def fits(found: RankInfo) -> None:
    assert 0 <= found.rank < found.world_size
    assert 0 <= found.local_rank < found.local_world_size <= found.world_size
    assert 0 <= found.node_rank < found.num_nodes <= found.world_size
    assert (found.local_world_size == found.world_size) >= (found.num_nodes == 1)
    assert found.world_size == 1 or (found.master_addr and 0 < found.master_port < 65_536)
    assert not found.nodes or len(found.nodes) == found.num_nodes
    assert found.run_id is None or re.fullmatch(r"\d+(_\d+)?(\.\d+)?", found.run_id)
    if found.master_addr:
        assert found.master_addr.isascii()
        found.master_addr.encode("idna")  # what the resolver does with it first: it raises where a name cannot be one


def test_a_job_of_many_components_is_read_in_no_time() -> None:
    """65,536 nodes in components, as far as Slurm itself goes: looking each one up in a list would take hours."""
    environ = srun(1, 1, 0, 0) | {
        "SLURM_STEP_NODELIST": "n[1-65536]", "SLURM_STEP_TASKS_PER_NODE": "1(x65536)",
        "SLURM_STEP_NUM_TASKS": "65536", "SLURM_STEP_NUM_NODES": "65536",
        "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n[32769-65536]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-32768]",
    }  # fmt: skip
    with bounded():
        signal.setitimer(signal.ITIMER_VIRTUAL, CASE_S)
        assert ranks.detect(environ).nodes[0] == "n32769"
        every = {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": "n[1-65536]" for i in range(1023)}
        with pytest.raises(RankError, match="SLURM_HET_SIZE=1023"):
            ranks.detect(environ | every | {"SLURM_HET_SIZE": "1023"})

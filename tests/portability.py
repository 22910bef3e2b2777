"""`make portability`: installs, demonstrates and tests the latest commit on other versions of
Slurm, Python and torch.

    sudo python3 tests/portability.py    # all systems; prints a table, status 1 if a row failed
    # one system; its folder is kept and used again
    sudo python3 tests/portability.py --only sid --folder /big

Each Debian release of SYSTEMS is a folder made by debootstrap. Commands run in it behind
pivot_root, in their own mount, process, IPC and UTS namespaces; the tests also in their own
network, with loopback only. The row OLDEST uses this machine's Python and the oldest versions that
pyproject.toml allows; the tests of it that need Slurm are left out.

RECIPES_DATA, where it is set, is the folder of real data that some tests need.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = ("bookworm", "trixie", "sid")
OLDEST = "oldest"
OLDEST_PYTHON = "python3.10"
DEBOOTSTRAP = "debootstrap --variant=minbase"
# Slurm, what the project's own commands call, and what its tests call.
PACKAGES = (
    "slurmctld slurmd slurm-client munge python3 python3-venv python3-dev git make gcc "
    "ca-certificates"
    " iproute2 nftables procps shellcheck openmpi-bin libpmix-dev"
)
# The release that has Apptainer; an image is built there (tests/slurm/image.py), and tests run
# ranks in it.
WITH_APPTAINER = "sid"
IMAGE_PACKAGES = "apptainer debootstrap"
IMAGE = "/srv/recipes.sif"
DATA = os.environ.get("RECIPES_DATA", "")
CLONE = "srv/recipes"  # in a system's folder
# This machine's name resolution, package index and certificates, where it has its own
# configuration.
NETWORK = ("/etc/resolv.conf",)
PIP = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
STEP_S = 3 * 3600.0
NEEDS_SLURM = "tests/slurm " + " ".join(
    sorted(f"tests/faults/{path.name}" for path in (ROOT / "tests/faults").glob("test_slurm_*.py"))
)
OTHERS = "tests " + " ".join(f"--ignore={path}" for path in NEEDS_SLURM.split())

# $1: the system's folder; $2: pip's cache; $3: real data, or ""; $4: the command; then files of
# this machine that the system is to see.
ENTER = """set -e
root=$1 cache=$2 data=$3 command=$4; shift 4
hostname portability
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mkdir -p "$root/root/.cache/pip"
mount --bind "$cache" "$root/root/.cache/pip"
if [ -n "$data" ]; then
    mkdir -p "$root/srv/shared/data"
    mount --bind -o ro "$data" "$root/srv/shared/data"
fi
printf '127.0.0.1 localhost\n::1 localhost\n127.0.1.1 portability\n' > "$root/etc/hosts"
touch "$root/etc/resolv.conf"
# without a network no name server answers
[ $# != 0 ] || mount --bind /dev/null "$root/etc/resolv.conf"
for file; do
    [ ! -e "$file" ] || { touch "$root$file"; mount --bind "$file" "$root$file"; }
done
ip link set lo up
cd "$root"
pivot_root . mnt
cd /
umount --lazy /mnt
status=0
/bin/bash -c "$command" || status=$? # no exec: this shell is process 1, and waits for orphans too
exit $status
"""


class Failed(Exception):
    """A step failed. The message names the step and its log."""


@dataclasses.dataclass
class Row:
    """One line of the table. install and demo: seconds, or the failed step."""

    system: str
    slurm: str = "-"
    python: str = "-"
    torch: str = "-"
    install: str = "-"
    demo: str = "-"
    slurm_tests: str = "-"
    other_tests: str = "-"
    seconds: str = "-"
    failed: str = ""  # why


Run = Callable[..., str]


def run(argv: list[str], log: Path, environ: Mapping[str, str], cwd: Path | None = None) -> str:
    """Runs a command with its output in ``log``, and returns its output. Raises Failed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environ,
            cwd=cwd,
            timeout=STEP_S,
        )
    if done.returncode:
        raise Failed(f"{log.stem}: status {done.returncode}, see {log}")
    return log.read_text().strip()


def environment() -> dict[str, str]:
    """What the commands in a system get: pip's and the proxies' variables of this machine, nothing
    else of it.
    """
    kept = {
        k: v for k, v in os.environ.items() if k.startswith("PIP_") or k.lower().endswith("_proxy")
    }
    return {
        **kept,
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
        "RECIPES_REQUIRE_SLURM": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def inside(
    root: Path,
    cache: Path,
    command: str,
    log: Path,
    files: tuple[str, ...] = (),
    network: bool = False,
) -> str:
    """Runs a shell command in a system. files: of this machine, to be seen there under the same
    names. Raises Failed.
    """
    options = [
        "--mount",
        "--pid",
        "--ipc",
        "--uts",
        *([] if network else ["--net"]),
        "--fork",
        "--kill-child",
    ]
    argv = [
        "unshare",
        *options,
        "bash",
        "-c",
        ENTER,
        "enter",
        str(root),
        str(cache),
        DATA,
        command,
        *files,
    ]
    return run(argv, log, environment())


def make_system(name: str, root: Path, cache: Path, logs: Path) -> None:
    """A Debian release with PACKAGES in ``root``; nothing happens where it is complete already.
    Raises Failed.
    """
    if (root / "debootstrap").exists():  # interrupted
        shutil.rmtree(root)
    if not (root / "etc/debian_version").exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        run([*DEBOOTSTRAP.split(), name, str(root)], logs / "debootstrap.log", os.environ)
    stamp = root / "var/lib/recipes-packages"
    packages = f"{PACKAGES} {IMAGE_PACKAGES}" if name == WITH_APPTAINER else PACKAGES
    if stamp.exists() and stamp.read_text() == packages:
        return
    (root / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")  # start no daemon
    (root / "usr/sbin/policy-rc.d").chmod(0o755)
    # A mirror that is a snapshot has a Release file that has expired.
    apt = (
        "apt-get -o Acquire::Check-Valid-Until=false update && apt-get install -y "
        f"--no-install-recommends {packages}"
    )
    inside(root, cache, apt, logs / "packages.log", NETWORK, network=True)
    stamp.write_text(packages)


def clone(folder: Path, log: Path) -> None:
    """HEAD of this repository in ``folder``, as after `git clone`; an environment there stays.
    Raises Failed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not (folder / ".git").exists():
        run(["git", "clone", "--no-checkout", str(ROOT), str(folder)], log, os.environ)
    for words in (
        f"fetch --quiet {shlex.quote(str(ROOT))} HEAD",
        "checkout --quiet --force --detach FETCH_HEAD",
        "clean -ffdxq --exclude=.venv",
    ):
        run(["git", "-C", str(folder), *shlex.split(words)], log, os.environ)


def counts(junit: Path) -> tuple[str, bool]:
    """(what the table shows of a run of pytest, whether all is well)."""
    suites = xml.etree.ElementTree.parse(junit).getroot().iter("testsuite")
    total = 0
    failed = 0
    skipped = 0
    for suite in suites:
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    return f"{total - failed - skipped}/{failed}/{skipped}", failed == 0 and total > skipped


def pytest(row: Row, kind: str, words: str, do: Run, work: Path, workers: int) -> None:
    """Runs tests in the clone ``work``, and puts their numbers into the table. Raises Failed."""
    junit = work / f"build/{kind}.xml"
    junit.unlink(missing_ok=True)
    setattr(row, kind, "failed")
    command = (
        f".venv/bin/python -m pytest {words} -n {workers} --dist loadfile --no-loadscope-reorder "
        f"-vv --junitxml={junit.relative_to(work)}"
    )
    try:
        do(kind, command, alone=True)
    finally:
        if junit.exists():
            text, well = counts(junit)
            setattr(row, kind, text)
    if not junit.exists() or not well:
        raise Failed(f"{kind}: {getattr(row, kind)}")


def measure(
    row: Row,
    do: Run,
    work: Path,
    install: str,
    test_words: Mapping[str, str],
    chosen: argparse.Namespace,
) -> None:
    """Installs, demonstrates and tests the clone ``work``; all steps after a failed installation
    are left out.
    """
    problems = []
    began = time.monotonic()

    def demo() -> None:
        at = time.monotonic()
        row.demo = "failed"
        do("demo", "make demo", alone=True)
        row.demo = f"{time.monotonic() - at:.0f} s"

    row.install = "failed"
    clone(work, chosen.folder / "logs" / row.system / "clone.log")
    do("install", install)
    row.install = f"{time.monotonic() - began:.0f} s"
    row.python = do(
        "python", ".venv/bin/python -c 'import platform; print(platform.python_version())'"
    )
    row.torch = do("torch", ".venv/bin/python -c 'import torch; print(torch.__version__)'")
    steps = []
    for kind, words in test_words.items():
        steps.append(partial(pytest, row, kind, words, do, work, chosen.workers))
    for step in (demo, *steps):
        try:
            step()
        except (Failed, subprocess.SubprocessError) as error:
            problems.append(str(error))
    row.seconds = f"{time.monotonic() - began:.0f}"
    row.failed = "; ".join(problems)


def debian(row: Row, chosen: argparse.Namespace) -> None:
    """The row of one Debian release. Raises Failed."""
    name = row.system
    cache = chosen.folder / "pip-cache"
    root = chosen.folder / name
    logs = chosen.folder / "logs" / name
    work = chosen.folder / name / CLONE
    enter = f"cd /{CLONE}" + (
        f" && export RECIPES_TEST_IMAGE={IMAGE}" if name == WITH_APPTAINER else ""
    )

    def do(step: str, command: str, alone: bool = False) -> str:
        seen = () if alone else NETWORK + PIP
        return inside(
            root, cache, f"{enter} && {command}", logs / f"{step}.log", seen, network=not alone
        )

    make_system(name, root, cache, logs)
    row.slurm = inside(root, cache, "slurmctld -V", logs / "slurm.log").removeprefix("slurm-wlm ")
    usual = {"slurm_tests": NEEDS_SLURM, "other_tests": f'{OTHERS} -m "not long"'}
    install = "make install" + (
        f" && python3 tests/slurm/image.py {IMAGE}" if name == WITH_APPTAINER else ""
    )
    measure(
        row, do, work, install, {"slurm_tests": chosen.tests} if chosen.tests else usual, chosen
    )


def oldest(row: Row, chosen: argparse.Namespace) -> None:
    """The row of the oldest versions that pyproject.toml allows, on this machine. Raises Failed."""
    folder = chosen.folder / OLDEST
    python = chosen.python or shutil.which(OLDEST_PYTHON)
    if not python:
        row.install = f"not run: no {OLDEST_PYTHON}"
        return
    bounds = re.findall(r'[\[ ]"([\w-]+)>=([\w.]+)"', (ROOT / "pyproject.toml").read_text())
    versions = {
        name: version if "." in version else f"{version}.0"
        for name, version in bounds
        if name != "setuptools"
    }
    constraints = folder / "constraints.txt"
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{name}=={version}.*\n" for name, version in versions.items())
    if not constraints.exists() or constraints.read_text() != text:  # make compares its time
        constraints.write_text(text)
    kept = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    environ = {**kept, "PIP_CACHE_DIR": str(chosen.folder / "pip-cache")}

    def do(step: str, command: str, alone: bool = False) -> str:
        log = chosen.folder / "logs" / OLDEST / f"{step}.log"
        return run(["bash", "-c", command], log, environ, folder / "recipes")

    install = f"make install PYTHON={shlex.quote(python)} VERSIONS={shlex.quote(str(constraints))}"
    tests = chosen.tests or f'{OTHERS} -m "not long"'
    measure(row, do, folder / "recipes", install, {"other_tests": tests}, chosen)


def table(rows: list[Row]) -> str:
    """Tests: passed/failed/skipped."""
    names = [
        "system",
        "Slurm",
        "Python",
        "torch",
        "install",
        "demo",
        "tests with Slurm",
        "other tests",
        "seconds",
    ]
    fields = [field.name for field in dataclasses.fields(Row)][: len(names)]
    lines = [names, *([getattr(row, field) for field in fields] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tests the latest commit on other versions of Slurm, Python and torch."
    )
    names = [*SYSTEMS, OLDEST]
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=names,
        help=f"some of {','.join(names)}",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default="/var/tmp/recipes-portability",
        help="what is kept between runs (systems, pip's cache, logs), 10 GB a system",
    )
    parser.add_argument("--workers", type=int, default=2, help="test files at a time")
    parser.add_argument(
        "--tests", default="", help="arguments of pytest in place of the usual ones"
    )
    parser.add_argument("--python", default="", help=f"the Python of the row {OLDEST}")
    return parser.parse_args()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the command that runs
    chosen = arguments()
    chosen.folder = chosen.folder.resolve()
    absent = []
    for program in ("debootstrap", "pivot_root", "unshare", "git", "ip"):
        if not shutil.which(program):
            absent.append(program)
    if set(chosen.only) & set(SYSTEMS) and (absent or os.geteuid()):
        raise SystemExit(
            "portability: needs root, debootstrap, git and iproute2; not found: "
            f"{', '.join(absent)}"
        )
    (chosen.folder / "pip-cache").mkdir(parents=True, exist_ok=True)
    head = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always"], capture_output=True, text=True
    )
    print(
        (
            f"commit {head.stdout.strip()}; logs in {chosen.folder}/logs; uncommitted changes "
            "are left out"
        ),
        flush=True,
    )
    rows = [Row(name) for name in chosen.only]
    for row in rows:
        try:
            (oldest if row.system == OLDEST else debian)(row, chosen)
        except (Failed, OSError, subprocess.SubprocessError) as error:
            row.failed = str(error)
        print(f"{row.system}: {row.failed or row.seconds + ' s'}", flush=True)
    print(f"\n{table(rows)}\ntests: passed/failed/skipped")
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

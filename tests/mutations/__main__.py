"""Applies each mutation in a copy of the repository, runs its tests there, and reports killed or
survived.

Exit status: 0 when all are killed; 1 when one survives; 2 for an argument or a mutation that is
invalid, or tests that fail without any mutation.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tests.mutations
from tests.mutations import Mutation

ROOT = Path(__file__).resolve().parents[2]
UNCHANGED_S = 3600.0  # for all tests of the chosen mutations, on the unchanged product
# for the tests of one mutation; a mutation that makes them hang longer is killed, too
TIMEOUT_S = 400.0
# pytest's exit statuses; the others tell of errors that are no test's
PASSED = 0
FAILED = 1


def all_mutations() -> dict[str, list[Mutation]]:
    """The mutations by the name of their file of data."""
    names = sorted(
        module.name
        for module in pkgutil.iter_modules(tests.mutations.__path__)
        if module.name != "__main__"
    )
    return {name: importlib.import_module(f"tests.mutations.{name}").MUTATIONS for name in names}


def fault_of(mutation: Mutation) -> str:
    """Why a mutation cannot be applied; "" where it can."""
    path = ROOT / mutation.file
    if not path.is_file():
        return f"{mutation.file}: no such file"
    count = path.read_text().count(mutation.old)
    if count == 1:
        return ""
    return f"{mutation.file}: {mutation.old!r} occurs {count} times, must be once"


def copy_repository(folder: Path) -> Path:
    """The files that git knows or would add, as they are in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def run_tests(repository: Path, selected: list[str], timeout_s: float) -> tuple[int, str]:
    """pytest's exit status, and its output; -SIGKILL where it ran longer than allowed."""
    data = os.environ.get("RECIPES_DATA") or str(ROOT.parent / "shared" / "data")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "not long",
        "-p",
        "no:cacheprovider",
        *selected,
    ]
    process = subprocess.Popen(
        command,
        cwd=repository,
        env=os.environ | {"RECIPES_DATA": data},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
    return process.returncode, out


def try_mutation(mutation: Mutation) -> str:
    """killed, survived, or invalid (the tests did not run)."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        repository = copy_repository(Path(folder, "clone"))
        path = repository / mutation.file
        path.write_text(path.read_text().replace(mutation.old, mutation.new))
        status, output = run_tests(repository, mutation.tests.split(), TIMEOUT_S)
    state = {PASSED: "survived", FAILED: "killed", -signal.SIGKILL: "killed"}.get(status, "invalid")
    print(
        f"{state:9} {time.monotonic() - begin:5.0f} s  {mutation.file}: {mutation.bug}", flush=True
    )
    if state == "invalid":
        print(output, file=sys.stderr)
    return state


def main(argv: list[str]) -> int:
    words = dict(word.partition("=")[::2] for word in argv)
    strange = words.keys() - {"only", "workers"}
    if strange:
        print(f"{min(strange)}: give only=WORD or workers=N", file=sys.stderr)
        return 2
    only = [word for word in words.get("only", "").split(",") if word]
    chosen = [
        mutation
        for name, mutations in all_mutations().items()
        for mutation in mutations
        if not only or any(word in f"{name} {mutation.file} {mutation.bug}" for word in only)
    ]
    faults = list(filter(None, map(fault_of, chosen)))
    if not chosen:
        faults.append(f"only={words['only']}: no such mutation")
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        selected = sorted({word for mutation in chosen for word in mutation.tests.split()})
        status, output = run_tests(copy_repository(Path(folder, "clone")), selected, UNCHANGED_S)
    if status != PASSED:
        print(f"without any mutation the tests fail already:\n{output}", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(int(words.get("workers", "2"))) as pool:
        states = list(pool.map(try_mutation, chosen))
    killed = states.count("killed")
    survived = states.count("survived")
    invalid = len(states) - killed - survived
    print(f"{killed} of {len(states)} killed, {survived} survived, {invalid} invalid")
    return 2 if invalid else int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The checks of one node: each returns facts, some of which are compared between nodes, and findings. Never torch.

Whatever can hang (a file system, a driver, a resolver) runs in a separate process.
"""

import json
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

from recipes.core import files
from recipes.core.doctor import commands, probe_gpus, probe_network
from recipes.core.doctor.node import Facts, Finding, Surroundings
from recipes.core.errors import one_line

SHM_BYTES = 1 << 30  # of shared memory; a container's default is 64 MB
DISK_BYTES = 5 << 30

Check = Callable[[Surroundings], tuple[Facts, list[Finding]]]


def run_all(here: Surroundings, deadline_s: float) -> tuple[dict[str, Facts], list[Finding]]:
    """Runs all checks at once, each for at most ``deadline_s`` seconds: the facts of each, and the findings of all.

    A check that does not end is a finding.
    """
    facts: dict[str, Facts] = {}
    findings: list[Finding] = []
    pool = ThreadPoolExecutor(len(CHECKS))  # not as a context manager, which waits for threads that hang
    answers = {name: pool.submit(check, here) for name, check in CHECKS.items()}
    done, _ = wait(answers.values(), deadline_s)
    for name, answer in answers.items():
        if answer not in done:
            fix = "log in there and find what hangs; if it is only slow, raise seconds="
            findings.append(Finding(f"the check of its {name} did not end in {deadline_s:g} s", fix))
            continue
        try:
            facts[name], found = answer.result()
            findings += found
        except Exception as error:  # a fault of one check must not hide what the others find
            what = f"the check of its {name} failed ({one_line(error, 150)})"
            findings.append(Finding(what, "log in there and look", bad=False))
    pool.shutdown(wait=False, cancel_futures=True)
    return facts, findings


def torch_import(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """In a separate process: an import can hang on a file system, or crash on a broken driver."""
    out, why = commands.run([sys.executable, "-m", "recipes.core.doctor.gpucheck", "versions"], 90)
    if why:
        fix = f"check that the node sees the environment {sys.prefix} and that it is complete"
        return {}, [Finding(f"torch cannot be imported there ({why})", fix, leave_out=here.has_others)]
    return json.loads(out.splitlines()[-1]), []


def disks(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """/dev/shm, the run directory, TMPDIR and the data folder, each in a separate process: a file system may not answer."""
    temporary = here.environ.get("TMPDIR") or "/tmp"
    folders = {
        "shm": ("/dev/shm", "/dev/shm", "check that file system"),
        "run": (str(here.run_dir), f"run_dir={here.run_dir}", "check that file system, or give another run_dir="),
        "tmp": (temporary, f"TMPDIR={temporary}", "set TMPDIR to a folder that is on every node"),
    }
    if here.data_dir:
        name = f"data_dir={here.data_dir}"
        folders["data"] = (here.data_dir, name, "check the name, and that it is mounted on that node")
    findings = []
    for use, (folder, name, fix) in folders.items():
        command = [sys.executable, "-S", "-c", DISK_PROBE, folder, "read" if use == "data" else "write"]
        out, why = commands.run(command, 15)
        if why:
            leave_out = here.has_others or use == "shm"
            findings.append(Finding(f"{name} cannot be used ({why})", fix, leave_out=leave_out))
            continue
        free = json.loads(out)
        least = {"shm": SHM_BYTES, "data": 0}.get(use, DISK_BYTES)
        if free is not None and free < least:
            fix = "loader processes and NCCL share memory there: docker run --ipc=host, or clear it"
            fix = fix if use == "shm" else "free space there"
            bad = use == "shm" and free < 64 << 20
            findings.append(Finding(f"{name} has {files.size_text(free)} free", fix, bad=bad))
    return {}, findings


DISK_PROBE = """
import json, os, sys, tempfile
from recipes.core.files import free_bytes
folder, use = sys.argv[1:]
try:
    if use == "read":
        os.listdir(folder)
    else:
        tempfile.TemporaryFile(dir=folder).close()
    print(json.dumps(free_bytes(folder)))
except OSError as error:
    sys.exit(error.strerror)
"""


CHECKS: Mapping[str, Check] = {
    "torch": torch_import,
    "disks": disks,
    "interfaces": probe_network.interfaces,
    "gpus": probe_gpus.examine,
}

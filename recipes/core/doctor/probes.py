"""The checks of one node: each returns facts, some of which are compared between nodes, and findings. Never torch.

Whatever can hang (a file system, a driver, a resolver) runs in a separate process.
"""

import json
import platform
import re
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

from recipes.core import files
from recipes.core.doctor import commands, probe_gpus, probe_network
from recipes.core.doctor import variables as environment
from recipes.core.doctor.node import Facts, Finding, Report, Surroundings, small_text
from recipes.core.errors import one_line
from recipes.core.files import ROOT
from recipes.core.run import source

MANY_FILES = 4096  # open files that a rank with many loader processes and peers may need
SHM_BYTES = 1 << 30  # of shared memory; a container's default is 64 MB
DISK_BYTES = 5 << 30

Check = Callable[[Surroundings], tuple[Facts, list[Finding]]]


def run_all(here: Surroundings, deadline_s: float) -> Report:
    """Runs all checks at once, each for at most ``deadline_s`` seconds. A check that does not end is a finding."""
    report = Report(socket.gethostname())
    pool = ThreadPoolExecutor(len(CHECKS))  # not as a context manager, which waits for threads that hang
    answers = {name: pool.submit(check, here) for name, check in CHECKS.items()}
    done, _ = wait(answers.values(), deadline_s)
    for name, answer in answers.items():
        if answer not in done:
            fix = "log in there and find what hangs; if it is only slow, raise seconds="
            report.findings.append(Finding(f"the check of its {name} did not end in {deadline_s:g} s", fix))
            continue
        try:
            report.facts[name], findings = answer.result()
            report.findings += findings
        except Exception as error:  # a fault of one check must not hide what the others find
            what = f"the check of its {name} failed ({one_line(error, 150)})"
            report.findings.append(Finding(what, "log in there and look", bad=False))
    pool.shutdown(wait=False, cancel_futures=True)
    return report


def system(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """Versions of Python, the driver, and this project's commit."""
    facts: Facts = {"python": platform.python_version()}
    module = here.root / "proc/driver/nvidia/version"
    if found := re.search(r"(?:Kernel Module|Module for \w+)\s+(\d+[.\d]*)", small_text(module)):
        facts["driver"] = found[1]
    if there := source.stamp(ROOT):
        commit = str(there.get("commit") or "")
    else:
        commit, _ = commands.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], 10
        )
    facts["project"] = commit.strip() or None
    return facts, []


def torch_import(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """In a separate process: an import can hang on a file system, or crash on a broken driver."""
    out, why = commands.run([sys.executable, "-m", "recipes.core.doctor.gpucheck", "versions"], 90)
    if why:
        fix = f"check that the node sees the environment {sys.prefix} and that it is complete"
        return {}, [Finding(f"torch cannot be imported there ({why})", fix, leave_out=here.has_others)]
    return json.loads(out.splitlines()[-1]), []


def limits(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """Limits on open files and, where there is InfiniBand, on locked memory."""
    open_files, locked = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    findings = []
    if open_files != resource.RLIM_INFINITY and open_files < MANY_FILES:
        fix = f"ulimit -n {MANY_FILES} in the batch script, or ask the site"
        findings.append(Finding(f"open files (ulimit -n) are limited to {open_files}", fix, bad=False))
    has_rdma = (here.root / "sys/class/infiniband").is_dir() and here.environ.get("NCCL_IB_DISABLE") != "1"
    if locked != resource.RLIM_INFINITY and locked < 1 << 30 and has_rdma and not here.on_cpu:
        what = f"locked memory is limited to {locked // 1024} KB, and RDMA locks what it sends"
        fix = "ulimit -l unlimited (LimitMEMLOCK=infinity for slurmd; PropagateResourceLimitsExcept=MEMLOCK)"
        findings.append(Finding(what, fix, bad=here.has_others))
    return {}, findings


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


def environment_variables(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """Variables that are misspelt, conflict with each other, or cannot work."""
    found = environment.problems(here.environ)
    return {}, [Finding(f"{one.name}: {one.what}", one.fix, one.bad, leave_out=False) for one in found]


CHECKS: Mapping[str, Check] = {
    "system": system,
    "torch": torch_import,
    "limits": limits,
    "disks": disks,
    "interfaces": probe_network.interfaces,
    "variables": environment_variables,
    "gpus": probe_gpus.examine,
}

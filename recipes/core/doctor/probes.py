"""The checks of one node: each returns facts, some of which are compared between nodes, and findings. Never torch.

Whatever can hang (a file system, a driver, a resolver) runs in a separate process.
"""

import dataclasses
import json
import os
import platform
import re
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

from recipes.core.doctor import commands, probe_gpus, probe_network
from recipes.core.doctor import variables as environment
from recipes.core.doctor.node import Facts, Finding, Report, Surroundings, small_text
from recipes.core.errors import one_line
from recipes.core.files import ROOT
from recipes.core.place import hostlist
from recipes.core.run import source

MANY_FILES = 4096  # open files, or processes, that a rank with many loader processes and peers may need
SHM_BYTES = 1 << 30  # of shared memory; a container's default is 64 MB
DISK_BYTES = 5 << 30

Check = Callable[[Surroundings], tuple[Facts, list[Finding]]]


def run_all(here: Surroundings, deadline_s: float) -> Report:
    """Runs all checks at once, each for at most ``deadline_s`` seconds. A check that does not end is a finding."""
    here, report = dataclasses.replace(here, end=time.monotonic() + deadline_s), Report(socket.gethostname())
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
    """Versions of the kernel, Python, the driver, and this project's commit."""
    facts: Facts = {"kernel": platform.release(), "python": platform.python_version(), "time": time.time()}
    module = here.root / "proc/driver/nvidia/version"
    if found := re.search(r"(?:Kernel Module|Module for \w+)\s+(\d+[.\d]*)", small_text(module)):
        facts["driver"] = found[1]
    if there := source.stamp(ROOT):
        commit = str(there.get("commit") or "")
    else:
        commit, _ = commands.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], 10
        )
    facts["project"] = commit.strip()
    return facts, []


def torch_import(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """In a separate process: an import can hang on a file system, or crash on a broken driver."""
    begin = time.monotonic()
    out, why = commands.run([sys.executable, "-m", "recipes.core.doctor.gpucheck", "versions"], 90)
    if why:
        fix = f"check that the node sees the environment {sys.prefix} and that it is complete"
        return {}, [Finding(f"torch cannot be imported there ({why})", fix, leave_out=here.has_others)]
    facts = json.loads(out.splitlines()[-1])
    facts["import_s"] = round(time.monotonic() - begin, 1)
    if facts["import_s"] < 30:
        return facts, []
    fix = "put the environment on a faster file system, or into a container"
    return facts, [Finding(f"import torch takes {facts['import_s']:.0f} s", fix, bad=False)]


def cpus(here: Surroundings) -> tuple[Facts, list[Finding]]:
    allowed = sorted(os.sched_getaffinity(0))
    granted = here.environ.get("SLURM_CPUS_PER_TASK", "")
    facts: Facts = {
        "cpus": os.cpu_count(),
        "allowed": len(allowed),
        "granted_a_task": int(granted) if granted.isdecimal() else None,
    }
    if granted.isdecimal() and len(allowed) < int(granted):
        what = f"a rank may use {len(allowed)} of the {granted} CPUs that it was granted"
        fix = "give srun --cpus-per-task too (Slurm 22.05 does not pass sbatch's on to it), or --cpu-bind=none"
        return facts, [Finding(what, fix, bad=False)]
    if not granted and here.info.in_slurm and len(allowed) == 1:
        return facts, [Finding("a rank may use one CPU", "request more: --cpus-per-task=8", bad=False)]
    return facts, []


def limits(here: Surroundings) -> tuple[Facts, list[Finding]]:
    kinds = {
        "open files (ulimit -n)": resource.RLIMIT_NOFILE,
        "locked memory (ulimit -l)": resource.RLIMIT_MEMLOCK,
        "processes (ulimit -u)": resource.RLIMIT_NPROC,
        "address space (ulimit -v)": resource.RLIMIT_AS,
    }
    soft = {name: resource.getrlimit(number)[0] for name, number in kinds.items()}
    facts: Facts = {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()}
    files, locked, processes, space = facts.values()
    findings = []
    for what, limit, option in (("open files", files, "-n"), ("processes", processes, "-u")):
        if limit is not None and limit < MANY_FILES:
            fix = f"ulimit {option} {MANY_FILES} in the batch script, or ask the site"
            findings.append(Finding(f"{what} (ulimit {option}) are limited to {limit}", fix, bad=False))
    if space is not None:
        fix = "ulimit -v unlimited: CUDA reserves far more than it uses"
        findings.append(Finding(f"address space is limited to {space / 1e9:.0f} GB", fix, bad=False))
    has_rdma = (here.root / "sys/class/infiniband").is_dir() and here.environ.get("NCCL_IB_DISABLE") != "1"
    if locked is not None and locked < 1 << 30 and has_rdma and not here.on_cpu:
        what = f"locked memory is limited to {locked // 1024} KB, and RDMA locks what it sends"
        fix = "ulimit -l unlimited (LimitMEMLOCK=infinity for slurmd; PropagateResourceLimitsExcept=MEMLOCK)"
        findings.append(Finding(what, fix, bad=here.has_others))
    return facts, findings


def disks(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """/dev/shm, the run directory, TMPDIR and the data folder, each in a separate process: a file system may not answer."""
    temporary = here.environ.get("TMPDIR") or "/tmp"
    folders = {
        "shm": ("/dev/shm", "/dev/shm", "check that file system"),
        "run": (str(here.run_dir), f"run_dir={here.run_dir}", "check that file system, or give another run_dir="),
        "tmp": (temporary, f"TMPDIR={temporary}", "set TMPDIR to a folder that is on every node"),
    }
    if here.data_dir:
        folders["data"] = (
            here.data_dir,
            f"data_dir={here.data_dir}",
            "check the name, and that it is mounted on that node",
        )
    facts: Facts = {}
    findings = []
    for use, (folder, name, fix) in folders.items():
        command = [sys.executable, "-S", "-c", DISK_PROBE, folder, "read" if use == "data" else "write"]
        out, why = commands.run(command, 15)
        if why:
            leave_out = here.has_others or use == "shm"
            findings.append(Finding(f"{name} cannot be used ({why})", fix, leave_out=leave_out))
            continue
        free = json.loads(out)
        facts[use] = {"folder": folder, "free": free}
        if free is None:
            continue
        if use == "shm" and free < SHM_BYTES:
            fix = "loader processes and NCCL share memory there: docker run --ipc=host, or clear it"
            findings.append(Finding(f"/dev/shm has {free >> 20} MB free", fix, bad=free < 64 << 20))
        elif use in ("run", "tmp") and free < DISK_BYTES:
            findings.append(Finding(f"{name} has {free / 1e9:.1f} GB free", "free space there", bad=False))
    return facts, findings


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
    """Variables that are deprecated, conflict with each other, or were left by another allocation."""
    found = [
        Finding(f"{problem.name}: {problem.what}", problem.fix, problem.bad, leave_out=False)
        for problem in environment.problems(here.environ)
    ]
    job, nodes = here.environ.get("SLURM_JOB_ID"), here.environ.get("SLURM_JOB_NODELIST", "")
    own = here.environ.get("SLURMD_NODENAME")
    if nodes and own and here.info.launcher == "slurm":
        try:
            listed = hostlist.expand(nodes)
        except hostlist.HostListError:
            listed = []
        if listed and own not in listed:
            what = f"SLURM_JOB_NODELIST={nodes} (job {job}) does not have {own}"
            fix = "it was left by another allocation: unset SLURM_* before sbatch or srun"
            found.append(Finding(what, fix))
    return {}, found


def gpus(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """Whether the granted GPUs are visible, and each computes correctly."""
    return probe_gpus.examine(here.environ, here.info, here.on_cpu, partial(_run_until, here.end))


def _run_until(end: float, command: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """As `commands.run`, with the answer before ``end``. Killing a command can take `REAPED_S` more."""
    return commands.run(command, min(timeout_s, max(0.5, end - time.monotonic() - commands.REAPED_S - 1)))


CHECKS: Mapping[str, Check] = {
    "system": system,
    "torch": torch_import,
    "cpus": cpus,
    "limits": limits,
    "disks": disks,
    "interfaces": probe_network.interfaces,
    "names": probe_network.names,
    "variables": environment_variables,
    "gpus": gpus,
}

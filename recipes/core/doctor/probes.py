"""What one node finds out about itself: facts, and what is wrong with them. Standard library only; torch is asked in a child.

Whatever can hang (a file system, a driver, a resolver) is asked in a process of its own, which may be left behind.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

from recipes.core.doctor import probe_gpus
from recipes.core.run import source
from recipes.core.files import ROOT
from recipes.core.place import hostlist
from recipes.core.doctor import variables as environment
from recipes.core.doctor.node import Finding
from recipes.core.doctor.node import Facts
from recipes.core.doctor.node import Report
from recipes.core.doctor.node import Surroundings
from recipes.core.doctor import commands
from recipes.core.doctor import node
from recipes.core.doctor import probe_network

MANY_FILES = 4096  # open ones, that a rank with many loader processes and peers comes to
SHM_BYTES = 1 << 30  # of shared memory; containers come with 64 MB
DISK_BYTES = 5 << 30


Check = Callable[["Surroundings"], tuple[Facts, list[Finding]]]


def everything(here: Surroundings, deadline_s: float) -> Report:
    """All checks at once, each for at most ``deadline_s`` seconds: one that does not come back is a finding."""
    info, here = here.info, dataclasses.replace(here, end=time.monotonic() + deadline_s)
    report = Report(info.rank, info.node_rank, info.local_rank, info.local_world_size, socket.gethostname())
    checks = CHECKS if info.local_rank == 0 else (gpus,)
    pool = ThreadPoolExecutor(len(checks))  # not in a with: it would wait for a thread that hangs
    begun = {check.__name__: pool.submit(check, here) for check in checks}
    answered, _ = wait(begun.values(), deadline_s)
    for name, answer in begun.items():
        if answer not in answered:
            report.findings.append(
                Finding(
                    f"its {name} could not be looked at in {deadline_s:g} s",
                    "log in there and see what hangs; where it is only slow, a larger seconds= waits for it",
                )
            )
            continue
        try:
            facts, findings = answer.result()
            report.facts[name] = facts
            report.findings += findings
        except Exception as error:  # one check's fault is not to hide what the others find
            report.findings.append(
                Finding(
                    f"its {name} could not be looked at ({type(error).__name__}: {error})"[:200],
                    "look there by hand",
                    bad=False,
                )
            )
    pool.shutdown(wait=False, cancel_futures=True)
    return report


# The checks. Each gives facts, some of which are compared between nodes, and findings.


def system(here: Surroundings) -> tuple[Facts, list[Finding]]:
    facts: Facts = {"kernel": platform.release(), "python": platform.python_version(), "time": time.time()}
    module = here.root / "proc/driver/nvidia/version"
    if found := re.search(r"(?:Kernel Module|Module for \w+)\s+(\d+[.\d]*)", node.small_text(module)):
        facts["driver"] = found[1]
    if there := source.stamp(ROOT):
        commit = str(there.get("commit") or "")
    else:
        commit, _ = commands.ask(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], 10
        )
    facts["project"] = commit.strip()
    return facts, []


def torch(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """In a child, since an import can hang on a file system, and crash on a broken driver."""
    begin = time.monotonic()
    out, wrong = commands.ask([sys.executable, "-m", "recipes.core.doctor.gpucheck", "versions"], 90)
    if wrong:
        return {}, [
            Finding(
                f"torch cannot be imported there ({wrong})",
                f"is the environment {sys.prefix} seen on that node, and whole?",
                leave_out=here.others,
            )
        ]
    facts = json.loads(out.splitlines()[-1])
    facts["import_s"] = round(time.monotonic() - begin, 1)
    slow = [] if facts["import_s"] < 30 else [
        Finding(f"import torch takes {facts['import_s']:.0f} s", "put the environment on a faster file system, or into a container", bad=False)
    ]  # fmt: skip
    return facts, slow


def cpus(here: Surroundings) -> tuple[Facts, list[Finding]]:
    allowed = sorted(os.sched_getaffinity(0))
    granted = here.environ.get("SLURM_CPUS_PER_TASK", "")
    facts: Facts = {
        "cpus": os.cpu_count(),
        "allowed": len(allowed),
        "granted_a_task": int(granted) if granted.isdecimal() else None,
    }
    if granted.isdecimal() and len(allowed) < int(granted):
        return facts, [
            Finding(
                f"a rank may use {len(allowed)} of the {granted} CPUs that it was granted",
                "give srun --cpus-per-task too (Slurm 22.05 does not pass sbatch's on to it), or --cpu-bind=none", bad=False,
            )
        ]  # fmt: skip
    if not granted and here.info.in_slurm and len(allowed) == 1:
        return facts, [Finding("a rank may use one CPU", "ask for more: --cpus-per-task=8", bad=False)]
    return facts, []


def limits(here: Surroundings) -> tuple[Facts, list[Finding]]:
    facts: Facts = {}
    findings = []
    for name, number, least in (
        ("open files (ulimit -n)", resource.RLIMIT_NOFILE, MANY_FILES),
        ("locked memory (ulimit -l)", resource.RLIMIT_MEMLOCK, None),
        ("processes (ulimit -u)", resource.RLIMIT_NPROC, MANY_FILES),
        ("address space (ulimit -v)", resource.RLIMIT_AS, None),
    ):
        soft, _ = resource.getrlimit(number)
        limited = soft != resource.RLIM_INFINITY
        facts[name] = soft if limited else None
        if least and limited and soft < least:
            option = name.split()[-1].rstrip(")")
            findings.append(
                Finding(
                    f"{name} are limited to {soft}",
                    f"ulimit {option} {least} in the batch script, or ask the site",
                    bad=False,
                )
            )
        if number == resource.RLIMIT_AS and limited:
            findings.append(
                Finding(
                    f"address space is limited to {soft / 1e9:.0f} GB",
                    "ulimit -v unlimited: CUDA takes far more than it uses",
                    bad=False,
                )
            )
        by_rdma = (
            not here.on_cpu
            and here.environ.get("NCCL_IB_DISABLE") != "1"
            and (here.root / "sys/class/infiniband").is_dir()
        )
        if number == resource.RLIMIT_MEMLOCK and limited and by_rdma and soft < 1 << 30:
            findings.append(Finding(f"locked memory is limited to {soft // 1024} KB, and RDMA locks what it sends",
                                    "ulimit -l unlimited (LimitMEMLOCK=infinity for slurmd; PropagateResourceLimitsExcept=MEMLOCK)", bad=here.others))  # fmt: skip
    return facts, findings


def disks(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """/dev/shm, the run directory, TMPDIR and the data folder: each asked in a child, since a file system may not answer."""
    folders = [("/dev/shm", "shm"), (str(here.run_dir), "run"), (here.environ.get("TMPDIR") or "/tmp", "tmp")]
    if here.data_dir:
        folders.append((here.data_dir, "data"))
    facts: Facts = {}
    findings = []
    for folder, use in folders:
        name = {"shm": "/dev/shm", "run": f"run_dir={folder}", "tmp": f"TMPDIR={folder}", "data": f"data_dir={folder}"}[
            use
        ]
        out, wrong = commands.ask([sys.executable, "-S", "-c", LOOK, folder, "read" if use == "data" else "write"], 15)
        if wrong:
            fixes = {
                "data": "is it mounted on that node, and is that its name?",
                "tmp": "set TMPDIR to a folder that is on every node",
            }
            findings.append(
                Finding(
                    f"{name} cannot be used ({wrong})",
                    fixes.get(use, "look at that file system; give another run_dir"),
                    leave_out=here.others or use == "shm",
                )
            )
            continue
        free, total = json.loads(out)
        facts[use] = {"folder": folder, "free": free, "total": total}
        if use == "shm" and free < SHM_BYTES:
            findings.append(
                Finding(
                    f"/dev/shm has {free >> 20} MB free",
                    "loader processes and NCCL share memory there: docker run --ipc=host, or clear it",
                    bad=free < 64 << 20,
                )
            )
        elif use in ("run", "tmp") and total and free < DISK_BYTES:
            findings.append(Finding(f"{name} has {free / 1e9:.1f} GB free", "make room there", bad=False))
    return facts, findings


LOOK = """
import json, os, sys, tempfile
folder, use = sys.argv[1:]
try:
    if use == "read":
        os.listdir(folder)
    else:
        tempfile.TemporaryFile(dir=folder).close()
    found = os.statvfs(folder)
    print(json.dumps([found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize]))
except OSError as error:
    sys.exit(error.strerror)
"""


def variables(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """Variables that are deprecated, contradict each other, are wrong for this machine, or were left by another allocation."""
    found = [
        Finding(f"{problem.name}: {problem.what}", problem.fix, problem.bad, leave_out=False)
        for problem in environment.problems(here.environ)
    ]
    job, nodes = here.environ.get("SLURM_JOB_ID"), here.environ.get("SLURM_JOB_NODELIST", "")
    if nodes and here.environ.get("SLURMD_NODENAME") and here.info.launcher == "slurm":
        try:
            listed = hostlist.expand(nodes)
        except hostlist.HostListError:
            listed = []
        if listed and here.environ["SLURMD_NODENAME"] not in listed:
            found.append(Finding(f"SLURM_JOB_NODELIST={nodes} (job {job}) does not have {here.environ['SLURMD_NODENAME']}",
                                 "it was left by another allocation: unset SLURM_* before sbatch or srun"))  # fmt: skip
    return {}, found


def gpus(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """Granted, visible and usable: each one computes something whose answer is known."""
    facts, wrong = probe_gpus.look(here.environ, here.info, here.on_cpu, partial(_ask_by, here.end))
    return facts, wrong


def _ask_by(end: float, command: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """`ask`, the answer of which is there before ``end``: one that is killed can take `REAPED_S` more."""
    return commands.ask(command, min(timeout_s, max(0.5, end - time.monotonic() - commands.REAPED_S - 1)))


CHECKS: tuple[Check, ...] = (
    system,
    torch,
    cpus,
    limits,
    disks,
    probe_network.interfaces,
    probe_network.names,
    variables,
    gpus,
)

"""What one node finds out about itself: facts, and what is wrong with them. Standard library only; torch is asked in a child.

Whatever can hang (a file system, a driver, a resolver) is asked in a process of its own, which may be left behind.
"""

import contextlib
import dataclasses
import json
import math
import os
import platform
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from recipes.core.doctor import variables as environment
from recipes.core.files import ROOT
from recipes.core.place import gpus as gpu_checks
from recipes.core.place import hostlist, network
from recipes.core.place.findings import Finding
from recipes.core.place.ranks import RankInfo
from recipes.core.run import source

MANY_FILES = 4096  # open ones, that a rank with many loader processes and peers comes to
SHM_BYTES = 1 << 30  # of shared memory; containers come with 64 MB
DISK_BYTES = 5 << 30

SLOW_NAME_S = 1.0
REAPED_S = 2.0  # that a command which was killed is waited for
Facts = dict[str, Any]


@dataclass
class Report:
    """What a rank says of its node, as it is written for who judges. links: what `reach` found between it and others."""

    rank: int
    node_rank: int
    local_rank: int
    local_world_size: int
    host: str
    facts: Facts = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    links: list[Facts] = field(default_factory=list)

    def as_json(self) -> Facts:
        return asdict(self)


_ASKED: set["subprocess.Popen[str]"] = set()
_BEGINNING = threading.RLock()  # held from a command's start until it is in that set
Check = Callable[["Surroundings"], tuple[Facts, list[Finding]]]


@dataclass(frozen=True)
class Surroundings:
    """What the checks look at: the variables, this rank's place, the folders that the training will want, files of the kernel's
    (another folder in tests), and until when."""

    environ: Mapping[str, str]
    info: RankInfo
    run_dir: Path
    data_dir: str = ""
    on_cpu: bool = False
    root: Path = Path("/")
    end: float = math.inf  # by time.monotonic(): what has not come back then is not waited for

    @property
    def others(self) -> bool:
        """Whether there are nodes to compare this one with: where it is alone, what was typed wrongly looks like its own fault."""
        return self.info.num_nodes > 1


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


def ask(
    command: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None, descriptors: Sequence[int] = ()
) -> tuple[str, str]:
    """A command's stdout, and what went wrong in words ("" where nothing did). It is killed after ``timeout_s``, and not waited for.

    environ: its variables, where they are others than this process's. descriptors: open files that it is given.
    """
    try:
        with _BEGINNING:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                start_new_session=True, env=environ, pass_fds=descriptors, cwd=ROOT,
            )  # fmt: skip
            _ASKED.add(process)
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    try:
        return _answer(process, os.path.basename(command[0]), timeout_s)
    finally:
        _ASKED.discard(process)


def leave() -> None:
    """Ends the commands that are still being asked: they are sessions of their own, and would stay. For this process's end."""
    _BEGINNING.acquire(timeout=2)  # and never given back, so that no other begins
    for process in list(_ASKED):
        if process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)


def _answer(process: "subprocess.Popen[str]", name: str, timeout_s: float) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            out, _ = process.communicate(timeout=REAPED_S)
        except subprocess.TimeoutExpired:
            out = ""  # what waits for a dead file system or driver stays, and is nobody's to wait for
        return out, f"{name} did not answer in {timeout_s:g} s"
    if process.returncode:
        return out, " ".join((err or out).split())[-200:] or f"status {process.returncode}"
    return out, ""


# The checks. Each gives facts, some of which are compared between nodes, and findings.


def system(here: Surroundings) -> tuple[Facts, list[Finding]]:
    facts: Facts = {"kernel": platform.release(), "python": platform.python_version(), "time": time.time()}
    module = here.root / "proc/driver/nvidia/version"
    if found := re.search(r"(?:Kernel Module|Module for \w+)\s+(\d+[.\d]*)", _text(module)):
        facts["driver"] = found[1]
    if there := source.stamp(ROOT):
        commit = str(there.get("commit") or "")
    else:
        commit, _ = ask(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], 10)
    facts["project"] = commit.strip()
    return facts, []


def torch(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """In a child, since an import can hang on a file system, and crash on a broken driver."""
    begin = time.monotonic()
    out, wrong = ask([sys.executable, "-m", "recipes.core.doctor.gpucheck", "versions"], 90)
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
        out, wrong = ask([sys.executable, "-S", "-c", LOOK, folder, "read" if use == "data" else "write"], 15)
        if wrong:
            mends = {
                "data": "is it mounted on that node, and is that its name?",
                "tmp": "set TMPDIR to a folder that is on every node",
            }
            findings.append(
                Finding(
                    f"{name} cannot be used ({wrong})",
                    mends.get(use, "look at that file system; give another run_dir"),
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


def interfaces(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """The network's interfaces and InfiniBand ports, as sysfs tells, and the route to the other nodes."""
    facts: Facts = {"interfaces": {}, "infiniband": {}}
    findings = []
    addresses: dict[str, list[str]] = {}
    for name, address in network.own_addresses():
        addresses.setdefault(name, []).append(address)
    for folder in sorted((here.root / "sys/class/net").glob("*")):
        speed, state = _text(folder / "speed"), _text(folder / "operstate")
        facts["interfaces"][folder.name] = {
            "state": state,
            "mbit": int(speed) if speed.isdecimal() else None,
            "mtu": int(_text(folder / "mtu") or 0),
            "addresses": addresses.get(folder.name, []),
        }
    for folder in sorted((here.root / "sys/class/infiniband").glob("*/ports/*")):
        port = f"{folder.parts[-3]}:{folder.name}"
        state = _text(folder / "state").partition(": ")[2] or _text(folder / "state")
        link = _text(folder / "link_layer")
        facts["infiniband"][port] = {"state": state, "rate": _text(folder / "rate"), "link": link}
        if state not in ("ACTIVE", ""):
            findings.append(Finding(f"InfiniBand port {port} is {state} ({link or 'link unknown'})",
                                    f"if it should carry NCCL: its cable, switch and subnet manager; if not: NCCL_IB_HCA=^{port}", bad=False))  # fmt: skip
    try:
        chosen = network.choose(here.info)
    except network.NetworkError as error:
        down = [name for name, one in facts["interfaces"].items() if one["state"] == "down"]
        told = f"; down there: {', '.join(down)}" if down else ""
        return facts, [
            *findings,
            Finding(f"{error.what}{told}", error.fix),
        ]
    if not chosen:
        return facts, findings
    facts["chosen"] = {"interface": chosen.interface, "address": chosen.address, "reason": chosen.reason}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if (
            here.others
            and (value := here.environ.get(name))
            and not _names(value, chosen.interface, exact=name[0] == "G")
        ):
            findings.append(Finding(f"{name}={value}, and the route to {chosen.peer} goes by {chosen.interface}",
                                    f"unset {name}, or set it to {chosen.interface}", bad=not _any_is_there(value, facts["interfaces"], name[0] == "G")))  # fmt: skip
    return facts, findings


def _names(value: str, interface: str, exact: bool) -> bool:
    """Whether a list of interfaces as NCCL reads it (prefixes; = exact; ^ all but these), or gloo (exact), has this one."""
    if exact:
        return interface in value.split(",")
    if value.startswith("^"):
        rest = value[1:].removeprefix("=").split(",")
        return interface not in rest if value.startswith("^=") else not any(interface.startswith(one) for one in rest)
    if value.startswith("="):
        return interface in value[1:].split(",")
    return any(interface.startswith(one) for one in value.split(","))


def _any_is_there(value: str, there: Mapping[str, Any], exact: bool) -> bool:
    """Whether a list as `_names` reads it names any interface of this machine."""
    return any(_names(value, interface, exact) for interface in there)


def names(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """This node's own name, and how long the resolver takes, both ways."""
    host = socket.gethostname()
    begin = time.monotonic()
    out, wrong = ask([sys.executable, "-S", "-c", RESOLVE, host], 20)
    took = time.monotonic() - begin
    if wrong:
        return {}, [
            Finding(
                f"it does not resolve its own name {host} ({wrong})",
                f"add {host} to DNS or to /etc/hosts there",
                bad=bool(here.info.nodes),  # where the others are known by their names
            )
        ]
    addresses, reverse_s = json.loads(out)
    facts: Facts = {"addresses": addresses, "seconds": round(took, 2), "reverse_s": reverse_s}
    findings = []
    if here.info.num_nodes > 1 and addresses and all(one.startswith("127.") or one == "::1" for one in addresses):
        mend = "a rank that listens on that is not reached (the recipes' are): delete that line from /etc/hosts there"
        findings.append(Finding(f"its own name is {addresses[0]} there", mend, bad=False))
    if reverse_s > SLOW_NAME_S:
        findings.append(
            Finding(
                f"a reverse look-up takes {reverse_s:.1f} s",
                "each rank's start waits for it: mend DNS, or list the nodes in /etc/hosts",
                bad=False,
            )
        )
    return facts, findings


RESOLVE = """
import json, socket, sys, time
try:
    found = sorted({a[4][0] for a in socket.getaddrinfo(sys.argv[1], None)})
except OSError as error:
    sys.exit(str(error.strerror))
begin = time.monotonic()
try:
    socket.gethostbyaddr(found[0])
except OSError:
    pass
print(json.dumps([found, round(time.monotonic() - begin, 2)]))
"""


def variables(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """Variables that are deprecated, contradict each other, are wrong for this machine, or were left by another allocation."""
    found = [
        Finding(f"{problem.name}: {problem.what}", problem.mend, problem.bad, leave_out=False)
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
    facts, wrong = gpu_checks.look(here.environ, here.info, here.on_cpu, partial(_ask_by, here.end))
    return facts, wrong


def _ask_by(end: float, command: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """`ask`, the answer of which is there before ``end``: one that is killed can take `REAPED_S` more."""
    return ask(command, min(timeout_s, max(0.5, end - time.monotonic() - REAPED_S - 1)))


CHECKS: tuple[Check, ...] = (system, torch, cpus, limits, disks, interfaces, names, variables, gpus)


def _text(path: Path) -> str:
    """A small file's text without its end of line; "" where there is none."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""

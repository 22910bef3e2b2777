"""The checks of one node: each yields findings, and adds to its facts, some of which are compared
between nodes. Never torch.

Whatever can hang (a file system, a driver, a resolver) runs in a separate process.
"""

import json
import platform
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.core import files
from recipes.core.doctor import commands, variables
from recipes.core.doctor.verdict import Finding
from recipes.core.errors import one_line
from recipes.core.place import network
from recipes.core.place.gpus import shortage
from recipes.core.place.ranks import RankInfo
from recipes.core.slurm import environment

SHM_BYTES = 1 << 30  # of shared memory; a container's default is 64 MB
LOCKED_BYTES = 1 << 30  # of memory that RDMA may lock
FREE_SHARE = 0.9  # of a GPU's memory; with less, another process uses it
# A field that a GPU or driver does not support is [N/A].
SMI = (
    "nvidia-smi",
    "--query-gpu=uuid,ecc.errors.uncorrected.volatile.total",
    "--format=csv,noheader,nounits",
)

# The first version that can hang, the first version with the fix, the processor ("": any), when.
# Source: the notes of NCCL's releases 2.28.9 (10 November 2025) and 2.29.3 (3 February 2026).
HANGS = (
    ((2, 28, 3), (2, 28, 9), "", "in large jobs"),
    ((2, 29, 2), (2, 29, 3), "aarch64", "on ARM"),
)

Facts = dict[str, Any]


@dataclass(frozen=True)
class Surroundings:
    """This node, and what to examine on it."""

    environ: Mapping[str, str]
    info: RankInfo
    run_dir: Path
    data_dir: str = ""
    on_cpu: bool = False
    root: Path = Path("/")  # the folder that has ``proc`` and ``sys``

    @property
    def has_others(self) -> bool:
        """Whether there are other nodes. A node alone cannot be compared: what looks like its fault
        may be a mistyped key.
        """
        return self.info.num_nodes > 1


def run_all(here: Surroundings, deadline_s: float) -> tuple[Facts, list[Finding]]:
    """Runs all checks at once, each for at most ``deadline_s`` seconds: the facts and the findings
    of all.

    A check that does not end is a finding.
    """
    facts: Facts = {}
    findings = list[Finding]()
    # Not as a context manager, which waits for threads that hang. They end with the process, which
    # recipes/doctor.py leaves by os._exit.
    pool = ThreadPoolExecutor(len(CHECKS))
    answers = {name: pool.submit(_run, check, here) for name, check in CHECKS.items()}
    done, _ = wait(answers.values(), deadline_s)
    for name, answer in answers.items():
        if answer not in done:
            fix = "log in there and find what hangs; if it is only slow, raise seconds="
            findings.append(
                Finding(f"the check of the {name} did not end in {deadline_s:g} s", fix)
            )
            continue
        try:
            of_check, more = answer.result()
            facts |= of_check
            findings += more
        except Exception as error:  # a fault of one check must not hide what the others find
            what = f"the check of the {name} failed ({one_line(error, 150)})"
            findings.append(Finding(what, f"log in to the node and check the {name}", bad=False))
    pool.shutdown(wait=False, cancel_futures=True)
    return facts, findings


def _run(check: "Check", here: Surroundings) -> tuple[Facts, list[Finding]]:
    facts: Facts = {}
    return facts, list(check(here, facts))


def torch_import(here: Surroundings, facts: Facts) -> Iterator[Finding]:
    """In a separate process: an import can hang on a file system, or crash on a broken driver."""
    out, why = commands.run([sys.executable, "-m", "recipes.core.doctor.gpucheck", "versions"], 90)
    if why:
        fix = f"check that the node sees the environment {sys.prefix} and that it is complete"
        what = f"torch cannot be imported there ({why})"
        yield Finding(what, fix, leave_out=here.has_others)
        return
    facts.update(json.loads(out.splitlines()[-1]))
    yield from known_hangs(facts["nccl"] or "", platform.machine())


def known_hangs(nccl: str, machine: str) -> Iterator[Finding]:
    """A finding if this version of NCCL is in `HANGS`. nccl: "" without GPUs. machine: as of
    `platform.machine`, such as "aarch64".
    """
    number = tuple(int(part) for part in nccl.split(".") if part.isdecimal())
    for first, fixed, on, when in HANGS:
        if first <= number < fixed and on in ("", machine):
            fix = f"use a torch with NCCL {'.'.join(map(str, fixed))} or later"
            yield Finding(f"NCCL {nccl} can hang {when}", fix, bad=False)


def disks(here: Surroundings, facts: Facts) -> Iterator[Finding]:
    """/dev/shm, the run directory, TMPDIR and the data folder, each in a separate process: a file
    system may not answer.
    """
    temporary = here.environ.get("TMPDIR") or "/tmp"
    folders = [
        ("", "/dev/shm", "check that file system"),
        ("run_dir=", str(here.run_dir), "check that file system, or give another run_dir="),
        ("TMPDIR=", temporary, "set TMPDIR to a folder that is on every node"),
        ("data_dir=", here.data_dir, "check the name, and that it is mounted on that node"),
    ]
    for key, folder, fix in folders if here.data_dir else folders[:-1]:
        use = "read" if key == "data_dir=" else "write"
        command = [sys.executable, "-S", "-c", DISK_PROBE, folder, use]
        out, why = commands.run(command, 15)
        if why:
            leave_out = here.has_others or not key
            what = f"{key}{folder} cannot be used ({why})"
            yield Finding(what, fix, leave_out=leave_out)
            continue
        free = json.loads(out)
        if not key and free is not None and free < SHM_BYTES:
            fix = (
                "delete files there, or use docker run --ipc=host; "
                "loader processes and NCCL need that space"
            )
            what = f"{folder} has {files.size_text(free)} free"
            yield Finding(what, fix, bad=free < 64 << 20)


DISK_PROBE = """
import json, os, sys, tempfile
from recipes.core.files import free_bytes
folder, use = sys.argv[1:]
try:
    if use == "read":
        next(os.scandir(folder), None)  # one with a million files takes long to list
    else:
        tempfile.TemporaryFile(dir=folder).close()
    print(json.dumps(free_bytes(folder)))
except OSError as error:
    sys.exit(error.strerror)
"""


def interfaces(here: Surroundings, facts: Facts) -> Iterator[Finding]:
    """The interface on the route to the other nodes."""
    folders = here.root / "sys/class/net"
    try:
        chosen = network.choose(here.info)
    except network.NetworkError as error:
        what = error.what
        down = [path.parent.name for path in folders.glob("*/operstate") if _text(path) == "down"]
        if down:
            what += f"; interfaces that are down: {', '.join(sorted(down))}"
        yield Finding(what, error.fix)
        return
    if not chosen:
        return
    facts["interface"] = chosen.interface
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = here.environ.get(name, "")
        # NCCL reads prefixes, = before exact names, and ^ before names to avoid; gloo reads exact
        # names.
        is_listed = chosen.interface.startswith(tuple(value.lstrip("^=").split(",")))
        if value and here.has_others and is_listed == value.startswith("^"):
            what = f"{name}={value}, but the route to {chosen.peer} uses {chosen.interface}"
            fix = f"unset {name}, or set it to {chosen.interface}"
            yield Finding(what, fix, bad=False)
    speed = _mbit_per_s(folders / chosen.interface)
    cards = (path.parent for path in folders.glob("*/device"))
    speeds = [(_mbit_per_s(card), card.name) for card in cards if _text(card / "operstate") == "up"]
    highest, name = max(speeds, default=(0, ""))
    if here.has_others and highest > speed > 0 and not _ports(here):
        what = (
            f"the ranks use {chosen.interface} with {speed} Mbit/s, but {name} has {highest} Mbit/s"
        )
        fix = (
            f"if {name} reaches the other nodes, "
            f"set NCCL_SOCKET_IFNAME={name} GLOO_SOCKET_IFNAME={name}"
        )
        yield Finding(what, fix, bad=False)


def _mbit_per_s(interface: Path) -> int:
    """Speed of a network interface; 0 if its driver does not say."""
    text = _text(interface / "speed")
    return int(text) if text.isdecimal() else 0


def _ports(here: Surroundings) -> list[Path]:
    """The InfiniBand ports that NCCL may use."""
    ignores = here.on_cpu or here.environ.get("NCCL_IB_DISABLE") == "1"
    return [] if ignores else sorted((here.root / "sys/class/infiniband").glob("*/ports/*"))


def _text(path: Path) -> str:
    """The text of a small file without its line end; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def infiniband(here: Surroundings, facts: Facts) -> Iterator[Finding]:
    """Ports that are not active, and whether a process may lock the memory that it sends."""
    ports = _ports(here)
    if not ports:
        return
    for folder in ports:
        port = f"{folder.parts[-3]}:{folder.name}"
        state = _text(folder / "state").rpartition(": ")[2]
        if state not in ("ACTIVE", ""):
            fix = (
                "check its cable, switch and subnet manager; "
                f"if NCCL should not use it, set NCCL_IB_HCA=^{port}"
            )
            yield Finding(f"InfiniBand port {port} is {state}", fix, bad=False)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and limit < LOCKED_BYTES:
        fix = (
            "the site must allow ulimit -l unlimited (in Slurm: LimitMEMLOCK=infinity for slurmd, "
            "and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf)"
        )
        what = (
            f"locked memory is limited to {limit // 1024} KB, "
            "but RDMA must lock the memory that it sends"
        )
        yield Finding(what, fix, bad=here.has_others)


def gpus(here: Surroundings, facts: Facts) -> Iterator[Finding]:
    """What `gpucheck.gpus` finds on the GPUs that this process may use."""
    if here.on_cpu:
        return
    granted = environment.gpus_on_node(here.environ)
    out, why = commands.run([sys.executable, "-m", "recipes.core.doctor.gpucheck", "gpus"], 60)
    if why and granted:
        fix = f"run {sys.executable} -m recipes.core.doctor.gpucheck gpus on that node"
        yield Finding(f"its GPUs could not be tested ({why})", fix)
        return
    seen = [] if why else json.loads(out.splitlines()[-1])
    few = shortage(here.environ, len(seen))
    if few:
        yield Finding(few, "check which GPUs nvidia-smi -L lists there")
    elif here.info.in_slurm and not seen:
        fix = "request GPUs (--gpus-per-node=…), or give device=cpu"
        yield Finding("Slurm granted 0 GPUs and torch sees 0", fix, leave_out=False)
    smi, _ = commands.run(SMI, 20)  # many images do not have it
    errors = dict(line.strip().split(", ") for line in smi.splitlines() if line.count(", ") == 1)
    for gpu in seen:
        yield from _of_gpu(gpu, errors.get(gpu.get("uuid"), ""))
    # Nodes may have different numbers of granted GPUs, and `shortage` compares each with its own.
    count = None if granted else len(seen)
    name = seen[0].get("name") if seen else None
    facts.update(gpu_count=count, gpu_name=name, gpus=seen)


def _of_gpu(gpu: Mapping[str, Any], errors: str) -> Iterator[Finding]:
    """errors: uncorrected memory errors by nvidia-smi."""
    name = f"GPU {gpu['index']} ({gpu.get('uuid', 'of unknown UUID')})"
    fix = "ask the site to drain that node"
    if gpu.get("error"):
        yield Finding(f"{name} cannot be used: {gpu['error']}", fix)
        return
    if not gpu["correct"]:
        yield Finding(f"{name} returns a wrong matrix product", fix)
    if errors.isdecimal() and int(errors):
        what = f"{name} has had {errors} uncorrected memory errors since the driver was loaded"
        yield Finding(what, fix)
    if gpu["free"] < FREE_SHARE * gpu["total"]:
        what = f"{name} has {gpu['free'] / 2**30:.1f} of {gpu['total'] / 2**30:.1f} GiB free"
        fix = "find the process that uses it, possibly of an ended job, with nvidia-smi there"
        yield Finding(what, fix, bad=False)


Check = Callable[[Surroundings, Facts], Iterable[Finding]]
CHECKS: Mapping[str, Check] = {
    "torch": torch_import,
    "disks": disks,
    "interfaces": interfaces,
    "InfiniBand": infiniband,
    "variables": lambda here, facts: variables.problems(here.environ),
    "gpus": gpus,
}

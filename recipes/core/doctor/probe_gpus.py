"""The GPUs of a node: as many as were granted, and each computes correctly. torch is asked in a process of its own (`gpucheck`)."""

import csv
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from recipes.core.doctor.node import Finding
from recipes.core.place.ranks import RankInfo
from recipes.core.place import gpus


Ask = Callable[[Sequence[str], float], tuple[str, str]]
SMI_S, CHECK_S = 20.0, 60.0
LONGEST = 4096  # characters of a line of nvidia-smi's
FREE_SHARE = 0.9  # of a GPU's memory; with less, somebody else is on it
# As nvidia-smi names them; what a GPU or driver does not know comes as [N/A].
FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "temperature.gpu",
)
AS_TABLE = "--format=csv,noheader,nounits"
SMI = (
    (f"--query-gpu={','.join(FIELDS)}", AS_TABLE),
    ("--query-compute-apps=gpu_uuid,pid,used_memory", AS_TABLE),
    ("topo", "-m"),
)


def look(
    environ: Mapping[str, str], info: RankInfo, on_cpu: bool, ask: Ask, root: Path = Path("/")
) -> tuple[dict[str, Any], list[Finding]]:
    """Facts of the GPUs that this process may use, and what is wrong: what, fix, whether the node cannot be used.

    on_cpu: none is wanted. ask: runs a command for so many seconds and gives its stdout, and what went wrong.
    """
    wrong: list[Finding] = []
    facts: dict[str, Any] = {"granted": gpus.granted_gpus(environ), "ranks": info.local_world_size}
    if on_cpu or (info.local_rank and not _own_gpu(environ)):
        return facts, wrong  # the node's first rank sees the same GPUs, and tries them alone
    host = socket.gethostname()
    with ThreadPoolExecutor(len(SMI)) as pool:  # without persistence mode each loads the driver anew, and takes seconds
        (smi, why), (apps, _), (topology, _) = pool.map(lambda words: ask(["nvidia-smi", *words], SMI_S), SMI)
    there = parse_smi(smi)
    others = [row for row in _rows(apps) if len(row) == 3 and row[1].isdecimal() and not _is_check(int(row[1]))]
    expected = facts["granted"] or gpus.visible_gpus(environ, root)
    if why and expected and shutil.which("nvidia-smi"):  # many images have none, and others a tool without a GPU
        wrong.append(Finding(f"nvidia-smi fails ({why})", "the driver is broken there: tell the site", True))
    out, why = ask([sys.executable, "-m", "recipes.core.doctor.gpucheck", "gpus"], CHECK_S)
    try:
        facts["gpus"] = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        facts["gpus"] = []
        if there or facts["granted"]:
            wrong.append(
                Finding(
                    f"its GPUs could not be tried ({why or 'no answer'})",
                    f"run there: {sys.executable} -m recipes.core.doctor.gpucheck gpus",
                    True,
                )
            )
            return facts, wrong
    seen, named = len(facts["gpus"]), gpus.named_gpus(environ) is not None
    if few := gpus.shortage(environ, seen):
        wrong.append(Finding(few, f"compare nvidia-smi -L there; sbatch --exclude={host} keeps off that node", True))
    elif info.in_slurm and seen == 0:
        wrong.append(
            Finding(
                "Slurm granted 0 GPUs and torch sees 0",
                "ask for GPUs (--gpus-per-node=…), or give device=cpu",
                leave_out=False,
            )
        )
    elif seen and seen < info.local_world_size and not (seen == 1 and gpus.has_its_own(environ, info.local_world_size)):
        wrong.append(Finding(f"{info.local_world_size} ranks and {seen} GPUs", "start one rank per GPU", True))
    elif there and seen < len(there) and not info.in_slurm and not named:
        what = f"nvidia-smi shows {len(there)} GPUs and torch sees {seen}"
        wrong.append(
            Finding(what, "torch without CUDA, or too new for the driver: python -m torch.utils.collect_env", seen == 0)
        )
    for gpu in facts["gpus"]:
        wrong += _of_one(gpu, there.get(gpu.get("uuid", ""), {}))
    mine = {gpu.get("uuid") for gpu in facts["gpus"]}
    for uuid, pid, memory in others:
        if uuid in mine:
            wrong.append(
                Finding(
                    f"process {pid} uses {memory} MB of GPU {uuid}",
                    f"whose is it? ps -o user,cmd {pid} there; end it, or keep off that node",
                    False,
                )
            )
    wrong += far(topology, os.sched_getaffinity(0), info, _row_of_mine(facts["gpus"], there, info))
    return facts, wrong


def _own_gpu(environ: Mapping[str, str]) -> bool:
    """Whether this rank is shown one GPU alone (--gpus-per-task, --gpu-bind)."""
    named = gpus.named_gpus(environ)
    return named is not None and named[1] == 1


def _is_check(pid: int) -> bool:
    """Whether a process is another rank's look at its own GPU."""
    try:
        return b"recipes.core.doctor.gpucheck" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _of_one(gpu: Mapping[str, Any], smi: Mapping[str, str]) -> list[Finding]:
    name = f"GPU {gpu.get('index')} ({gpu.get('uuid', 'of unknown UUID')})"
    off = f"drain it: sbatch --exclude={socket.gethostname()} keeps off that node"
    if gpu.get("error"):
        return [Finding(f"{name} cannot be used: {gpu['error']}", off)]
    found = []
    if not gpu.get("right"):
        found.append(Finding(f"{name} computes a matrix product wrongly", off, True))
    if gpu.get("free", 0) < FREE_SHARE * gpu.get("total", 0):
        free, total = gpu["free"] / 2**30, gpu["total"] / 2**30
        found.append(
            Finding(
                f"{name} has {free:.1f} of {total:.1f} GiB free",
                "somebody else is on it, or a dead job's process: nvidia-smi there",
                False,
            )
        )
    errors = smi.get("ecc.errors.uncorrected.volatile.total", "")
    if errors.isdecimal() and int(errors):
        found.append(
            Finding(f"{name} has had {errors} uncorrected memory errors since the driver was loaded", off, True)
        )
    return found


def parse_smi(text: str) -> dict[str, dict[str, str]]:
    """nvidia-smi's rows of `FIELDS`, by UUID; those that are no such rows are left out."""
    return {row[1]: dict(zip(FIELDS, row, strict=True)) for row in _rows(text) if len(row) == len(FIELDS)}


def _rows(text: str) -> Iterator[list[str]]:
    """The rows of a table of nvidia-smi's; a line that is far too long for one is left out."""
    lines = (line for line in text.splitlines() if len(line) < LONGEST)
    return iter(csv.reader(lines, skipinitialspace=True))


def _row_of_mine(seen: Sequence[Mapping[str, Any]], there: Mapping[str, Mapping[str, str]], info: RankInfo) -> str:
    """nvidia-smi's name of this rank's GPU, by its UUID: torch's numbers are of those that are shown; "" where it is not known."""
    place = info.local_rank if len(seen) > 1 else 0
    uuid = seen[place].get("uuid", "") if place < len(seen) else ""
    return f"GPU{there[uuid]['index']}" if uuid in there else ""


def far(topology: str, allowed: set[int], info: RankInfo, mine: str) -> list[Finding]:
    """What is wrong in ``nvidia-smi topo -m``: what, fix. allowed: CPUs of this process, which is a node's local rank; mine: the
    name of its GPU there.

    A rank on CPUs that are all far from its GPU; and a GPU that reaches every NIC across the sockets while another has one near.
    """
    rows = _matrix(topology)
    names = [name for name in rows if name.startswith("GPU")]
    nics = sorted({other for name in names for other in rows[name] if re.match(r"NIC\d|mlx|bnxt|irdma", other)})
    found = []
    near = _cpus(rows.get(mine, {}).get("CPU Affinity", ""))
    if info.local_world_size > 1 and near and allowed and not near & allowed:
        found.append(
            Finding(
                f"{mine} is near CPUs {rows[mine]['CPU Affinity']}, and its rank may use none of them",
                "give srun --cpu-bind=none, or --gpu-bind=closest, or --cpus-per-task so that each socket has its ranks",
                bad=False,
            )
        )
    reach = {name: {rows[name].get(nic, "") for nic in nics} - {""} for name in names}
    behind = [name for name, ways in reach.items() if ways and ways <= {"SYS"}]
    if behind and len(behind) < len(names):
        found.append(
            Finding(
                f"{', '.join(behind)} reach every NIC across the sockets (SYS), others have one near",
                "a NIC is missing or down on that socket: compare with a node that is right",
                bad=False,
            )
        )
    return found


def _matrix(topology: str) -> dict[str, dict[str, str]]:
    """The rows of ``nvidia-smi topo -m`` by name, each by column; {} where it is none. Columns are parted by tabs, or by blanks."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in topology.splitlines()]
    header = next((line for line in lines if re.match(r"\s*GPU\d", line)), "")
    if not header:
        return {}
    columns = (
        [one.strip() for one in header.split("\t") if one.strip()]
        if "\t" in header
        else re.split(r"\s{2,}|\s(?=GPU\d|NIC\d|mlx)", header.strip())
    )
    rows = {}
    for line in lines:
        parts = [one.strip() for one in line.split("\t")] if "\t" in line else line.split()
        if parts and re.fullmatch(r"GPU\d+|NIC\d+|mlx\S+", parts[0]) and line != header:
            rows[parts[0]] = dict(zip(columns, parts[1:], strict=False))
    return rows


def _cpus(text: str) -> set[int]:
    """The CPUs of a list such as 0-31,64-95; empty for one that is none."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return set()
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return {cpu for end in ends for cpu in range(end[0], end[-1] + 1)}

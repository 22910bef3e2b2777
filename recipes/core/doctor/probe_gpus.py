"""The GPUs of a node: whether all that were granted are visible, and each computes correctly. Standard library only; torch runs
in a separate process (`gpucheck`)."""

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
from recipes.core.place import gpus
from recipes.core.place.ranks import RankInfo

RunCommand = Callable[[Sequence[str], float], tuple[str, str]]
SMI_S, CHECK_S = 20.0, 60.0
LONGEST = 4096  # characters of a line of nvidia-smi
FREE_SHARE = 0.9  # of a GPU's memory; with less, another process uses it
# Fields of nvidia-smi. One that a GPU or driver does not support is [N/A].
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


def examine(
    environ: Mapping[str, str], info: RankInfo, on_cpu: bool, run: RunCommand, root: Path = Path("/")
) -> tuple[dict[str, Any], list[Finding]]:
    """Facts and findings on the GPUs that this process may use.

    on_cpu: no GPU is needed. run: runs a command for at most so many seconds; its stdout, and why it failed ("" if it did not).
    """
    facts: dict[str, Any] = {"granted": gpus.granted_gpus(environ), "ranks": info.local_world_size}
    named = gpus.named_gpus(environ)
    if on_cpu or (info.local_rank and (named is None or named[1] != 1)):
        return facts, []  # the node's first rank sees the same GPUs and tests them
    with ThreadPoolExecutor(len(SMI)) as pool:  # without persistence mode, each call loads the driver and takes seconds
        (smi, why), (apps, _), (topology, _) = pool.map(lambda words: run(["nvidia-smi", *words], SMI_S), SMI)
    in_smi = parse_smi(smi)
    found: list[Finding] = []
    # Many images have no nvidia-smi, and others have it without a GPU.
    if why and (facts["granted"] or gpus.visible_gpus(environ, root)) and shutil.which("nvidia-smi"):
        found.append(Finding(f"nvidia-smi fails ({why})", "the driver is broken there: tell the site"))
    out, why = run([sys.executable, "-m", "recipes.core.doctor.gpucheck", "gpus"], CHECK_S)
    try:
        facts["gpus"] = seen = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        facts["gpus"] = seen = []
        if in_smi or facts["granted"]:
            fix = f"run there: {sys.executable} -m recipes.core.doctor.gpucheck gpus"
            return facts, [*found, Finding(f"its GPUs could not be tested ({why or 'no answer'})", fix)]
    found += _missing(environ, info, len(seen), len(in_smi))
    for gpu in seen:
        found += _of_one(gpu, in_smi.get(gpu.get("uuid", ""), {}))
    found += _other_processes(apps, {gpu.get("uuid") for gpu in seen})
    return facts, found + distances(topology, os.sched_getaffinity(0), info, _name_in_smi(seen, in_smi, info))


def _missing(environ: Mapping[str, str], info: RankInfo, seen: int, in_smi: int) -> list[Finding]:
    """Whether torch sees fewer GPUs than it should. seen: by torch; in_smi: by nvidia-smi."""
    if few := gpus.shortage(environ, seen):
        return [Finding(few, f"compare nvidia-smi -L there; {_leave_out()}")]
    if info.in_slurm and seen == 0:
        fix = "request GPUs (--gpus-per-node=…), or give device=cpu"
        return [Finding("Slurm granted 0 GPUs and torch sees 0", fix, leave_out=False)]
    if 0 < seen < info.local_world_size and not (seen == 1 and gpus.has_its_own(environ, info.local_world_size)):
        return [Finding(f"{info.local_world_size} ranks and {seen} GPUs", "start one rank per GPU")]
    if seen < in_smi and not info.in_slurm and gpus.named_gpus(environ) is None:
        fix = "torch without CUDA, or too new for the driver: python -m torch.utils.collect_env"
        return [Finding(f"nvidia-smi shows {in_smi} GPUs and torch sees {seen}", fix, bad=seen == 0)]
    return []


def _of_one(gpu: Mapping[str, Any], smi: Mapping[str, str]) -> list[Finding]:
    name = f"GPU {gpu.get('index')} ({gpu.get('uuid', 'of unknown UUID')})"
    fix = f"drain it: {_leave_out()}"
    if gpu.get("error"):
        return [Finding(f"{name} cannot be used: {gpu['error']}", fix)]
    found = []
    if not gpu.get("correct"):
        found.append(Finding(f"{name} computes a matrix product wrongly", fix))
    if gpu.get("free", 0) < FREE_SHARE * gpu.get("total", 0):
        what = f"{name} has {gpu['free'] / 2**30:.1f} of {gpu['total'] / 2**30:.1f} GiB free"
        found.append(Finding(what, "another process uses it, maybe of a job that died: nvidia-smi there", bad=False))
    errors = smi.get("ecc.errors.uncorrected.volatile.total", "")
    if errors.isdecimal() and int(errors):
        found.append(Finding(f"{name} has had {errors} uncorrected memory errors since the driver was loaded", fix))
    return found


def _leave_out() -> str:
    return f"sbatch --exclude={socket.gethostname()} leaves out that node"


def _other_processes(apps: str, uuids: set[Any]) -> list[Finding]:
    """Processes on these GPUs, as nvidia-smi lists them, except for checks of other ranks."""
    found = []
    for row in _rows(apps):
        if len(row) == 3 and row[0] in uuids and row[1].isdecimal() and not _is_check(int(row[1])):
            uuid, pid, memory = row
            fix = f"find its owner with ps -o user,cmd {pid} there; end it, or leave out that node"
            found.append(Finding(f"process {pid} uses {memory} MB of GPU {uuid}", fix, bad=False))
    return found


def _is_check(pid: int) -> bool:
    """Whether a process is the check of another rank's GPU."""
    try:
        return b"recipes.core.doctor.gpucheck" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def parse_smi(text: str) -> dict[str, dict[str, str]]:
    """The rows of `FIELDS` in nvidia-smi's output, by UUID. Other lines are ignored."""
    return {row[1]: dict(zip(FIELDS, row, strict=True)) for row in _rows(text) if len(row) == len(FIELDS)}


def _rows(text: str) -> Iterator[list[str]]:
    """The rows of a table of nvidia-smi. Lines that are too long to be rows are ignored."""
    lines = (line for line in text.splitlines() if len(line) < LONGEST)
    return iter(csv.reader(lines, skipinitialspace=True))


def _name_in_smi(seen: Sequence[Mapping[str, Any]], in_smi: Mapping[str, Mapping[str, str]], info: RankInfo) -> str:
    """nvidia-smi's name of this rank's GPU, "" if unknown. It is found by UUID, since torch numbers only the visible GPUs."""
    place = info.local_rank if len(seen) > 1 else 0
    uuid = seen[place].get("uuid", "") if place < len(seen) else ""
    return f"GPU{in_smi[uuid]['index']}" if uuid in in_smi else ""


def distances(topology: str, allowed: set[int], info: RankInfo, mine: str) -> list[Finding]:
    """Findings in the output of ``nvidia-smi topo -m``. allowed: CPUs of this process. mine: the name of its GPU there.

    A rank whose CPUs are all far from its GPU; and a GPU that reaches each NIC across the sockets, while another GPU has one near.
    """
    rows = _matrix(topology)
    names = [name for name in rows if name.startswith("GPU")]
    nics = sorted({other for name in names for other in rows[name] if re.match(r"NIC\d|mlx|bnxt|irdma", other)})
    found = []
    near = _cpus(rows.get(mine, {}).get("CPU Affinity", ""))
    if info.local_world_size > 1 and near and allowed and not near & allowed:
        what = f"{mine} is near CPUs {rows[mine]['CPU Affinity']}, and its rank may use none of them"
        fix = "give srun --cpu-bind=none, or --gpu-bind=closest, or --cpus-per-task so that each socket has its ranks"
        found.append(Finding(what, fix, bad=False))
    ways = {name: {rows[name].get(nic, "") for nic in nics} - {""} for name in names}
    behind = [name for name, kinds in ways.items() if kinds and kinds <= {"SYS"}]
    if behind and len(behind) < len(names):
        what = f"{', '.join(behind)} reach every NIC across the sockets (SYS), others have one near"
        fix = "a NIC is missing or down on that socket: compare with a healthy node"
        found.append(Finding(what, fix, bad=False))
    return found


def _matrix(topology: str) -> dict[str, dict[str, str]]:
    """The rows of ``nvidia-smi topo -m`` by name, each by column; {} for other text. Tabs or blanks separate columns."""
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
    """The CPUs of a list such as 0-31,64-95; empty for other text."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return set()
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return {cpu for end in ends for cpu in range(end[0], end[-1] + 1)}

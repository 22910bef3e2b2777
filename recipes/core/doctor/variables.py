"""Finds invalid, renamed and conflicting environment variables of NCCL, gloo, libfabric, Slurm and PyTorch.

Each rule holds for the versions that `variable_tables` names, at every site. An unusual value is not a problem.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from recipes.core.config import envfile
from recipes.core.doctor import variable_tables as tables
from recipes.core.errors import shown
from recipes.core.place import slurm_step
from recipes.core.place.hostlist import HostListError, expand
from recipes.core.place.launcher_variables import RankError

_FAMILY = re.compile(r"(TORCH_NCCL_|TORCH_FR_|TORCH_DISTRIBUTED_|NCCL_|GLOO_|FI_EFA_|FI_CXI_|FI_)\w+")
_INTEGER = re.compile(r"\s*[+-]?(?:0[xX][0-9a-fA-F]{1,16}|[0-9]{1,18})\s*")
_STOI = re.compile(r"\s*([+-]?[0-9]{1,9})(?![0-9])")
_BOOLEAN = re.compile(r"(?i:y|yes|1|t|true|n|no|0|f|false)")
_INTERFACE = re.compile(r"[^\s=^,/]{1,15}")  # dev_valid_name in the kernel, less what NCCL's lists use
_HCA = re.compile(r"[A-Za-z0-9_.-]+(?::[0-9]*){0,3}")
_MAX_SEARCHED = 20  # unknown names for which the nearest known one is sought: bounds the time


@dataclass(frozen=True)
class Problem:
    """An invalid variable. bad: nothing works with it; otherwise it is a warning."""

    name: str
    what: str
    fix: str
    bad: bool = False


def problems(environ: Mapping[str, str]) -> list[Problem]:
    """The problems in a process's environment, bad ones first. Only ``environ`` is read: interfaces and devices are not looked up."""
    return _sorted([*_settings(environ), *_debug_settings(environ), *_ranks(environ), *_gpus(environ)])


def check_file(path: Path, root: Path) -> list[Problem]:
    """The problems of the variables that the env file ``path`` sets, together with those of ``root/common.env``.

    An interface name that only some machines have is a problem in a file. Debug settings are not: a file has them on purpose. Raises
    EnvFileError as `envfile.read` does.
    """
    own = envfile.read(path)
    both = envfile.read(root / "common.env") | own
    found = [problem for problem in _settings(both) if problem.name in own]
    return _sorted([*found, *_interfaces_of_one_machine(own)])


def _sorted(found: list[Problem]) -> list[Problem]:
    """Each problem once, bad ones first."""
    return sorted(dict.fromkeys(found), key=lambda problem: (not problem.bad, problem.name))


def _settings(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Problems that a process and an env file can both have."""
    yield from _names(environ)
    yield from _numbers(environ)
    yield from _choices(environ)
    yield from _torch_values(environ)
    yield from _interfaces(environ)
    yield from _contradictions(environ)


def _names(environ: Mapping[str, str]) -> Iterator[Problem]:
    searched = 0
    for name in environ:
        if name in tables.REPLACED:
            yield Problem(name, *tables.REPLACED[name])
            continue
        family = _FAMILY.fullmatch(name)
        if not family or name in tables.KNOWN or len(name) > 100:
            continue
        if f"TORCH_{name}" in tables.KNOWN:
            yield Problem(name, "was renamed in PyTorch 2.2", f"set TORCH_{name}, or unset it")
            continue
        searched += 1
        if searched <= _MAX_SEARCHED and (nearest := _nearest(name, family[1])):
            what = f"is not a variable of {tables.VERSIONS}"
            yield Problem(shown(name, 100), what, f"did you mean {nearest}?")


def _nearest(name: str, family: str) -> str | None:
    # Other software has names that begin with FI_, too.
    cutoff = 0.9 if family == "FI_" else 0.85
    candidates = sorted(known for known in tables.KNOWN - tables.REPLACED.keys() if known.startswith(family))
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return found[0] if found else None


def _numbers(environ: Mapping[str, str]) -> Iterator[Problem]:
    for name in tables.KNOWN & environ.keys():
        if not name.startswith("NCCL_") or (name not in tables.RANGES and not name.endswith(("_DISABLE", "_ENABLE"))):
            continue
        value = environ[name]
        if value and not _INTEGER.fullmatch(value):
            read = _STOI.match(value)
            what = f"{_quoted(value)} is not an integer: NCCL reads {read[1] if read else 0}"
            yield Problem(name, what, "write an integer; 1 is on and 0 is off")
    for name, (least, most) in tables.RANGES.items():
        number = _number(environ.get(name, ""))
        if number is not None and number != -2 and not least <= number <= most:  # -2 is NCCL's "not set"
            yield Problem(name, f"{number} must be between {least} and {most}", "correct or unset it")
    index = _number(environ.get("NCCL_IB_GID_INDEX", ""))
    if index is not None and index > 0:
        fix = "unset it: NCCL finds the index itself from version 2.21 on (NCCL_IB_ADDR_RANGE chooses among several)"
        what = f"{index} applies to all nodes, but the valid index differs between hosts"
        yield Problem("NCCL_IB_GID_INDEX", what, fix)


def _choices(environ: Mapping[str, str]) -> Iterator[Problem]:
    for name, choices in tables.CHOICES.items():
        value = environ.get(name, "")
        compared = value.strip().upper() if name in tables.CASE_IS_IGNORED else value
        if value and compared not in choices:
            fix = f"write one of {', '.join(choices)}"
            yield Problem(name, f"{_quoted(value)} is not a valid value and is ignored", fix)
    yield from _subsystems(environ)
    for name, elements in tables.ELEMENTS.items():
        yield from _element_values(name, environ.get(name, ""), elements)
    if environ.get("NCCL_NET") == "":
        # plugin/net.cc compares names with it even if it is empty.
        yield Problem("NCCL_NET", "is empty, and NCCL searches for a network with an empty name", "unset it", bad=True)


def _subsystems(environ: Mapping[str, str]) -> Iterator[Problem]:
    level, subsystems = environ.get("NCCL_DEBUG", ""), environ.get("NCCL_DEBUG_SUBSYS", "")
    named = subsystems.removeprefix("^").split(",")
    unknown = [item for item in named if item.strip().upper() not in tables.SUBSYSTEMS]
    if subsystems and unknown:
        what = f"{_quoted(unknown[0])} is not a subsystem"
        yield Problem("NCCL_DEBUG_SUBSYS", what, f"write some of {','.join(tables.SUBSYSTEMS)}")
    elif subsystems and level.strip().upper() not in ("INFO", "TRACE"):
        yield Problem("NCCL_DEBUG_SUBSYS", "has no effect without NCCL_DEBUG=INFO", "set NCCL_DEBUG=INFO, or unset it")


def _element_values(name: str, value: str, elements: list[str]) -> Iterator[Problem]:
    """NCCL_ALGO and NCCL_PROTO: `Ring,Tree`, `^NVLS`, `allreduce:tree;broadcast:ring` (graph/tuning.cc)."""
    lists = [part.rpartition(":")[2] for part in value.split(";") if part]
    names = [item for part in lists for item in part.removeprefix("^").split(",") if item]
    invalid = [item for item in names if item.lower() not in map(str.lower, elements)]
    if invalid:
        what = f"{_quoted(invalid[0])} must be one of {', '.join(elements)}"
        yield Problem(name, what, "correct or unset it: NCCL refuses to start", bad=True)
    elif any(not part.startswith("^") for part in lists):
        fix = "unset it, or exclude only what is faulty, as in ^LL128"
        yield Problem(name, "fixes a choice that NCCL otherwise makes by message size and topology", fix)


def _torch_values(environ: Mapping[str, str]) -> Iterator[Problem]:
    refuses = "init_process_group refuses"
    for name in sorted(tables.TORCH_NUMBERS):
        if name in environ and not _STOI.match(environ[name]):
            what = f"{refuses} {_quoted(environ[name])}: it is not an integer"
            yield Problem(name, what, "write an integer, or unset it", bad=True)
    for name in sorted(tables.TORCH_BOOLEANS):
        if name in environ and not _BOOLEAN.fullmatch(environ[name]):
            what = f"{refuses} {_quoted(environ[name])}: it is not a boolean"
            yield Problem(name, what, "write 1 or 0, or unset it", bad=True)
    name = "TORCH_DISTRIBUTED_DEBUG"
    if name in environ and environ[name].upper() not in ("OFF", "INFO", "DETAIL"):
        what = f"PyTorch refuses {_quoted(environ[name])}"
        yield Problem(name, what, "write OFF, INFO or DETAIL, or unset it", bad=True)


def _interfaces(environ: Mapping[str, str]) -> Iterator[Problem]:
    nccl, gloo = environ.get("NCCL_SOCKET_IFNAME", ""), environ.get("GLOO_SOCKET_IFNAME", "")
    for name, value, syntax in (
        ("NCCL_SOCKET_IFNAME", nccl, _INTERFACE),
        ("NCCL_OOB_NET_IFNAME", environ.get("NCCL_OOB_NET_IFNAME", ""), _INTERFACE),
        ("NCCL_IB_HCA", environ.get("NCCL_IB_HCA", ""), _HCA),
    ):
        # misc/utils.cc: a leading ^ and = apply to the whole list; only commas separate names, and a blank is part of a name.
        body = value.removeprefix("^").removeprefix("=")
        invalid = [item for item in body.split(",") if item and not syntax.fullmatch(item)]
        if any(character.isspace() for character in value):
            yield Problem(name, f"{_quoted(value)} has blanks, which NCCL takes as part of a name", "remove them")
        elif invalid:
            fix = "write ^ or = once, before the whole list, as in =a,b or ^=a,b"
            yield Problem(name, f"{_quoted(invalid[0])} matches nothing", fix)
    if gloo:
        # ProcessGroupGloo: split at commas, then the exact name of an interface.
        invalid = [item for item in gloo.removesuffix(",").split(",") if not _INTERFACE.fullmatch(item)]
        if invalid:
            what = f"{_quoted(invalid[0])} is not an interface name: gloo accepts no =, ^ or prefix"
            yield Problem("GLOO_SOCKET_IFNAME", what, "write the exact name, as in eth0", bad=True)
            return
    one = nccl.removeprefix("=")
    if _INTERFACE.fullmatch(one) and _INTERFACE.fullmatch(gloo) and not gloo.startswith(one):
        what = f"names {_quoted(gloo)}, but NCCL_SOCKET_IFNAME names {_quoted(one)}"
        yield Problem("GLOO_SOCKET_IFNAME", what, "name the same interface in both, or unset both")


def _contradictions(environ: Mapping[str, str]) -> Iterator[Problem]:
    on = {name for name in ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE") if _number(environ.get(name, "")) == 1}
    net = environ.get("NCCL_NET", "").upper()
    if "NCCL_IB_DISABLE" in on and net == "IB":
        yield Problem("NCCL_NET", "is IB, which NCCL_IB_DISABLE=1 disables", "unset one of the two", bad=True)
    elif "NCCL_IB_DISABLE" in on and environ.get("NCCL_IB_HCA"):
        yield Problem("NCCL_IB_HCA", "has no effect with NCCL_IB_DISABLE=1", "unset one of the two")
    if "NCCL_P2P_DISABLE" in on and environ.get("NCCL_P2P_LEVEL"):
        yield Problem("NCCL_P2P_LEVEL", "has no effect with NCCL_P2P_DISABLE=1", "unset one of the two")
    if net in ("LIBFABRIC", "AWS LIBFABRIC", "SOCKET"):
        for name in sorted(name for name in tables.KNOWN & environ.keys() if re.match("NCCL_IB_(?!DISABLE)", name)):
            what = f"has no effect with NCCL_NET={_quoted(environ['NCCL_NET'])}"
            yield Problem(name, what, "unset one of the two")
    threads, sockets = (_number(environ.get(f"NCCL_{name}", "")) for name in ("SOCKET_NTHREADS", "NSOCKS_PERTHREAD"))
    if threads and sockets and 0 < threads <= 16 and threads * sockets > 64:  # MAX_SOCKETS in net_socket.cc
        what = f"{sockets} times NCCL_SOCKET_NTHREADS={threads} is more than 64 sockets"
        yield Problem("NCCL_NSOCKS_PERTHREAD", what, f"write {64 // threads} at most")
    providers = environ.get("FI_PROVIDER", "").lower().split(",")
    if "efa" in providers or any(name.startswith("FI_EFA_") for name in environ):
        for name in environ:
            if re.fullmatch(r"RDMAV_\w{1,90}", name):
                yield Problem(
                    shown(name, 100), "breaks EFA on newer kernels", "unset it; libfabric sets what it requires"
                )
    one, two = environ.get("PYTORCH_CUDA_ALLOC_CONF"), environ.get("PYTORCH_ALLOC_CONF")
    if one and two and one != two:
        # CUDA's settings come from the first, general ones from the second (AllocatorConfig.h, CUDAAllocatorConfig.h). Either
        # name alone is valid: PyTorch 2.12 removed its deprecation warning (pytorch issue 183387).
        what = "differs from PYTORCH_ALLOC_CONF, and PyTorch reads some settings from each"
        yield Problem("PYTORCH_CUDA_ALLOC_CONF", what, "put all settings into one of the two")


def _debug_settings(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Settings for debugging that slow down training."""
    for name, value, why in (
        ("CUDA_LAUNCH_BLOCKING", "1", "makes the CPU wait for every kernel"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "compares every collective over all ranks before it runs"),
    ):
        if environ.get(name, "").upper() == value:
            yield Problem(name, f"{value} {why}", "unset it once the fault is found")


def _ranks(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Variables left over from another allocation or launcher. torchrun and mpirun set theirs on purpose (`ranks.detect`)."""
    try:
        in_step, in_batch = slurm_step.in_step(environ), slurm_step.in_batch_shell(environ)
    except RankError:  # reported by `ranks.detect`
        in_step = in_batch = False
    launched = any(re.match("TORCHELASTIC_|GROUP_RANK$|OMPI_COMM_WORLD_RANK$|PMI_RANK$", name) for name in environ)
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    if in_step and not launched:
        one_gpu = re.fullmatch("[^,]+", environ.get("CUDA_VISIBLE_DEVICES", ""))
        for name, slurms in (("RANK", "SLURM_PROCID"), ("LOCAL_RANK", "SLURM_LOCALID"), ("WORLD_SIZE", tasks)):
            own, given = _number(environ.get(name, "")), _number(environ.get(slurms, ""))
            if one_gpu and name == "LOCAL_RANK" and own == 0:
                continue  # with --gpus-per-task, each rank's only GPU is number 0, and many scripts set LOCAL_RANK=0
            if own is not None and given is not None and own != given:
                fix = "unset RANK, LOCAL_RANK and WORLD_SIZE, and start the ranks with srun"
                yield Problem(name, f"{own} is not {slurms}={given}: it is left over from another launcher", fix)
    before_srun = "SLURM_JOB_ID" in environ and ("SLURM_STEP_ID" not in environ or in_batch)
    if before_srun and "mask_cpu:" in environ.get("SLURM_CPU_BIND", ""):
        # srun sets it for each step; in a batch shell it comes from the shell that ran sbatch.
        what = "has the CPUs of the shell that submitted the job, and srun binds the ranks to them"
        yield Problem("SLURM_CPU_BIND", what, "unset SLURM_CPU_BIND and SLURM_CPU_BIND_LIST before srun")
    yield from _master(environ)


def _master(environ: Mapping[str, str]) -> Iterator[Problem]:
    master = environ.get("MASTER_ADDR", "")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    world, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if not master or len(nodes) > 100_000 or (world and world == local):
        return
    try:
        hosts = expand(nodes) if nodes else []
    except HostListError:
        return  # reported by `ranks.detect`
    if len(hosts) < 2:
        return
    fix = "unset MASTER_ADDR and MASTER_PORT: the recipes use the job's first node"
    address = _address(master)
    if master.lower() == "localhost" or (address and address.is_loopback):
        what = f"{_quoted(master)} is local to each node, but there are {len(hosts)} nodes"
        yield Problem("MASTER_ADDR", what, fix, bad=True)
    elif not address and not any(_same_host(master, host) for host in hosts):
        what = f"{_quoted(master)} is not the name of any of the job's {len(hosts)} nodes"
        yield Problem("MASTER_ADDR", what, fix)


def _same_host(name: str, host: str) -> bool:
    """Whether two names can be the same host: with a domain, or a suffix or prefix of a fabric (node7i, node7-ib0, ib-node7)."""
    name, host = name.partition(".")[0].lower(), host.partition(".")[0].lower()
    return host in name or name in host


def _gpus(environ: Mapping[str, str]) -> Iterator[Problem]:
    name = "CUDA_VISIBLE_DEVICES"
    if name not in environ:
        return
    devices = [item.strip() for item in environ[name].split(",") if item.strip()]
    granted = _number(environ.get("SLURM_GPUS_ON_NODE", "")) or 0
    fix = "unset it and request GPUs from Slurm, which sets the variable for each step"
    if not devices and granted > 0:
        yield Problem(name, f"is empty and hides the {granted} GPUs that Slurm granted", fix)
    # torch/cuda/__init__.py, _parse_visible_devices: CUDA uses the list up to the first invalid number.
    elif len(set(devices)) < len(devices):
        yield Problem(name, f"{_quoted(environ[name])} names a GPU twice: CUDA shows none", fix, bad=True)
    elif any(item.startswith("-") for item in devices) and len(devices) > 1:
        yield Problem(name, f"{_quoted(environ[name])} has a negative number, which hides the GPUs after it", fix)


def _interfaces_of_one_machine(settings: Mapping[str, str]) -> Iterator[Problem]:
    """Interface names in a file for all nodes that depend on the hardware of one machine."""
    if any(name.startswith(("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_")) for name in settings):
        return  # the file is for one machine type, whose plugin requires the names
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = settings.get(name, "")
        if re.fullmatch(r"=?(?:eth[0-9]+|eno[0-9]+|en[psx][0-9a-z]+|em[0-9]+)", value):
            what = f"{_quoted(value)} is an interface of one machine type, and all nodes read this file"
        elif re.fullmatch(r"=?(?:lo|docker[0-9]*|virbr[0-9]*)", value):
            what = f"{_quoted(value)} does not reach other nodes"
        else:
            continue
        yield Problem(name, what, "remove it: the recipes find the interface of each node by its route to the others")


def _number(text: str) -> int | None:
    """An integer as NCCL reads it (also 0x10), None for any other text."""
    if not _INTEGER.fullmatch(text):
        return None
    digits = text.strip().lstrip("+-")
    try:
        number = int(digits, 16 if digits[:2].lower() == "0x" else 8 if digits[:1] == "0" else 10)
    except ValueError:  # 08
        return None
    return -number if "-" in text else number


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _quoted(value: str) -> str:
    """A value as part of a message; in quotes where it is empty or has blanks."""
    text = shown(value)
    return f'"{text}"' if not value or " " in value else text

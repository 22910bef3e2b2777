"""Environment variables that stop a run, misspelt names, and the lines that an env file of a site requires.

The rules hold for NCCL 2.30 and PyTorch 2.15, at every site. An unusual value is not a problem.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from recipes.core.config import envfile
from recipes.core.errors import shown
from recipes.core.place import slurm_step
from recipes.core.place.hostlist import HostListError, expand
from recipes.core.place.launcher_variables import RankError

MOST_SEARCHED = 20  # unknown names for which the nearest known one is sought: bounds the time
CUTOFF = 0.9  # of difflib. With less, a valid name that is not in the list is taken for a misspelt one
# Names that users set, and the names that resemble them.
_KNOWN = """
    GLOO_SOCKET_IFNAME NCCL_ALGO NCCL_BUFFSIZE NCCL_COLLNET_ENABLE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_DEBUG
    NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS NCCL_DMABUF_ENABLE NCCL_GRAPH_FILE NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_ADDR_FAMILY
    NCCL_IB_ADDR_RANGE NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_MERGE_NICS NCCL_IB_PCI_RELAXED_ORDERING
    NCCL_IB_QPS_PER_CONNECTION NCCL_IB_RETRY_CNT NCCL_IB_ROCE_VERSION_NUM NCCL_IB_SL NCCL_IB_TC NCCL_IB_TIMEOUT
    NCCL_IBEXT_DISABLE NCCL_LL128_BUFFSIZE NCCL_LL_BUFFSIZE NCCL_LAUNCH_MODE NCCL_MAX_NCHANNELS NCCL_MAX_P2P_NCHANNELS
    NCCL_MIN_NCHANNELS NCCL_MIN_P2P_NCHANNELS NCCL_MNNVL_ENABLE NCCL_NET NCCL_NVB_DISABLE NCCL_NVTX_DISABLE
    NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_NET_PLUGIN NCCL_NET_SHARED_BUFFERS NCCL_NET_SHARED_COMMS
    NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_NVLS_ENABLE NCCL_OOB_NET_IFNAME NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO
    NCCL_PXN_DISABLE NCCL_SHM_DISABLE NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS NCCL_TOPO_DUMP_FILE
    NCCL_TOPO_FILE NCCL_TUNER_PLUGIN
    TORCH_DISTRIBUTED_DEBUG TORCH_FR_BUFFER_SIZE TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT
    TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_ENABLE_TIMING
    TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_TRACE_BUFFER_SIZE
    FI_CXI_DEFAULT_CQ_SIZE FI_CXI_DEFAULT_RX_SIZE FI_CXI_DEFAULT_TX_SIZE FI_CXI_RX_MATCH_MODE FI_EFA_USE_DEVICE_RDMA FI_EFA_USE_HUGE_PAGE
    FI_LOG_LEVEL FI_MR_CACHE_MONITOR FI_PROVIDER
"""
KNOWN = tuple(_KNOWN.split())
# NCCL refuses to start with other elements of these lists.
_ELEMENTS = {
    "NCCL_ALGO": ("Tree", "Ring", "CollNetDirect", "CollNetChain", "CollNet", "NVLS", "NVLSTree", "PAT"),
    "NCCL_PROTO": ("LL", "LL128", "Simple"),
}


@dataclass(frozen=True)
class Problem:
    """An invalid variable. bad: nothing works with it; otherwise it is a warning."""

    name: str
    what: str
    fix: str
    bad: bool = False


def problems(environ: Mapping[str, str]) -> list[Problem]:
    """The problems in a process's environment, bad ones first. Interfaces and devices are not looked up."""
    found = [*_names(environ), *_values(environ), *_interfaces(environ), *_contradictions(environ)]
    found += [*_ranks(environ), *_master(environ), *_gpus(environ)]
    return sorted(found, key=lambda problem: (not problem.bad, problem.name))


def check_file(path: Path, root: Path) -> list[Problem]:
    """The problems of the variables that an env file sets, together with ``root/common.env``. Raises ConfigError."""
    own = envfile.read(path)
    both = envfile.read(root / "common.env") | own
    return [problem for problem in problems(both) if problem.name in own]


def _names(environ: Mapping[str, str]) -> Iterator[Problem]:
    family = re.compile(r"(?:NCCL|TORCH_NCCL|TORCH_FR|TORCH_DISTRIBUTED|GLOO|FI)_\w{1,60}")
    unknown = [name for name in environ if name not in KNOWN and family.fullmatch(name)]
    for name in unknown[:MOST_SEARCHED]:
        renamed = [f"TORCH_{name}"] if f"TORCH_{name}" in KNOWN else []  # in PyTorch 2.2
        if nearest := renamed or difflib.get_close_matches(name, KNOWN, n=1, cutoff=CUTOFF):
            yield Problem(name, "is not a known variable and has no effect", f"did you mean {nearest[0]}?")


def _values(environ: Mapping[str, str]) -> Iterator[Problem]:
    for name in sorted(environ.keys() & set(KNOWN)):
        value = environ[name]
        if name.startswith("NCCL_") and name.endswith(("_DISABLE", "_ENABLE")) and not _is_number(value or "0"):
            yield Problem(name, f"{_quoted(value)} is not an integer, and NCCL reads 0", "write 1 or 0")
    for name, elements in _ELEMENTS.items():
        # `Ring,Tree`, `^NVLS`, `allreduce:tree;broadcast:ring` (graph/tuning.cc)
        lists = [part.rpartition(":")[2].removeprefix("^") for part in environ.get(name, "").split(";")]
        items = [item for one in lists for item in one.split(",") if item]
        if invalid := [item for item in items if item.lower() not in map(str.lower, elements)]:
            what = f"{_quoted(invalid[0])} must be one of {', '.join(elements)}"
            yield Problem(name, what, "correct or unset it: NCCL refuses to start", bad=True)
    if environ.get("NCCL_NET") == "":  # plugin/net.cc compares names with it even if it is empty
        yield Problem("NCCL_NET", "is empty, and NCCL searches for a network with an empty name", "unset it", bad=True)


def _interfaces(environ: Mapping[str, str]) -> Iterator[Problem]:
    fix = "unset it: the recipes find the interface of each node by its route to the others"
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"):
        value = environ.get(name, "")
        if re.fullmatch("=?(?:lo|docker[0-9]*|virbr[0-9]*)", value):
            yield Problem(name, f"{_quoted(value)} does not reach other nodes", fix)
        elif re.search(r"\s", value):  # only commas separate names
            yield Problem(name, f"{_quoted(value)} has blanks, which are taken as part of a name", "remove them")
        elif name.startswith("GLOO") and re.search("[=^]", value):
            what = f"{_quoted(value)} is not an interface name: gloo accepts no =, ^ or prefix"
            yield Problem(name, what, "write the exact name, as in eth0", bad=True)
    nccl, gloo = environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("="), environ.get("GLOO_SOCKET_IFNAME", "")
    if re.fullmatch(r"[\w.-]+", nccl) and re.fullmatch(r"[\w.-]+", gloo) and not gloo.startswith(nccl):
        what = f"names {_quoted(gloo)}, but NCCL_SOCKET_IFNAME names {_quoted(nccl)}"
        yield Problem("GLOO_SOCKET_IFNAME", what, "name the same interface in both, or unset both")


def _contradictions(environ: Mapping[str, str]) -> Iterator[Problem]:
    if environ.get("NCCL_IB_DISABLE") != "1":
        return
    if environ.get("NCCL_NET", "").upper() == "IB":
        yield Problem("NCCL_NET", "is IB, which NCCL_IB_DISABLE=1 disables", "unset one of the two", bad=True)
    if environ.get("NCCL_IB_HCA"):
        yield Problem("NCCL_IB_HCA", "has no effect with NCCL_IB_DISABLE=1", "unset one of the two")


def _ranks(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Variables left over from another launcher. torchrun and mpirun set theirs on purpose (`ranks.detect`)."""
    try:
        in_step = slurm_step.in_step(environ)
    except RankError:  # reported by `ranks.detect`
        return
    if not in_step or any(
        re.match("TORCHELASTIC_|GROUP_RANK$|OMPI_COMM_WORLD_RANK$|PMI_RANK$", one) for one in environ
    ):
        return
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    for name, slurms in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", tasks)):
        own, given = environ.get(name, ""), environ.get(slurms, "")
        if _is_number(own) and _is_number(given) and int(own) != int(given):
            fix = "unset RANK, LOCAL_RANK and WORLD_SIZE, and start the ranks with srun"
            yield Problem(name, f"{own} is not {slurms}={given}: it is left over from another launcher", fix)


def _master(environ: Mapping[str, str]) -> Iterator[Problem]:
    master = environ.get("MASTER_ADDR", "")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    world, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if not master or not nodes or len(nodes) > 100_000 or (world and world == local):
        return
    try:
        hosts = expand(nodes)
    except HostListError:
        return  # reported by `ranks.detect`
    if len(hosts) < 2:
        return
    fix = "unset MASTER_ADDR and MASTER_PORT: the recipes use the job's first node"
    is_address = re.fullmatch(r"[0-9.]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*", master)
    if master.lower() == "localhost" or master == "::1" or (is_address and master.startswith("127.")):
        what = f"{_quoted(master)} is local to each node, but there are {len(hosts)} nodes"
        yield Problem("MASTER_ADDR", what, fix, bad=True)
    elif not is_address:
        short = [host.partition(".")[0].lower() for host in (master, *hosts)]
        if not any(host in short[0] or short[0] in host for host in short[1:]):  # node7i, node7-ib0, ib-node7
            what = f"{_quoted(master)} is not the name of any of the job's {len(hosts)} nodes"
            yield Problem("MASTER_ADDR", what, fix)


def _gpus(environ: Mapping[str, str]) -> Iterator[Problem]:
    name = "CUDA_VISIBLE_DEVICES"
    devices = [item.strip() for item in environ.get(name, "").split(",") if item.strip()]
    granted = environ.get("SLURM_GPUS_ON_NODE", "")
    fix = "unset it and request GPUs from Slurm, which sets the variable for each step"
    if name in environ and not devices and granted not in ("", "0"):
        yield Problem(name, f"is empty and hides the {shown(granted)} GPUs that Slurm granted", fix)
    elif len(set(devices)) < len(devices):  # torch/cuda/__init__.py, _parse_visible_devices
        yield Problem(name, f"{_quoted(environ[name])} names a GPU twice: CUDA shows none", fix, bad=True)


def env_lines(infiniband: Mapping[str, Mapping[str, str]], address: str, others: Sequence[str]) -> list[str]:
    """Lines for an env file that this node's network requires, each after a comment with the reason.

    infiniband: maps "mlx5_0:1" to "state" and "link" as in /sys/class/infiniband. address: reaches the other nodes; "" if unknown.
    others: all addresses of its interface. NCCL 2.30 skips ports that are not ACTIVE, mixes InfiniBand with Ethernet ports
    (transport/net_ib/init.cc), and takes an interface's IPv4 address before its IPv6 addresses (os/linux.cc).
    """
    lines = []
    active = [port for port, values in infiniband.items() if values["state"] == "ACTIVE"]
    native = sorted(port for port in active if infiniband[port]["link"] == "InfiniBand")
    if native and len(native) < len(active):
        lines.append(
            f"# Of {len(active)} ACTIVE ports {len(native)} are InfiniBand and the others Ethernet; NCCL mixes them."
        )
        lines.append(f"NCCL_IB_HCA=={','.join(native)}")
    if ":" in address and any(ip_address(other).version == 4 for other in others):
        lines.append(
            "# The other nodes are reached by IPv6; NCCL takes the interface's IPv4 address where it has both."
        )
        lines.append("NCCL_SOCKET_FAMILY=AF_INET6")
    return lines or ["# Nothing is required: NCCL finds the InfiniBand or RoCE ports, or else the interface, itself."]


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text) is not None


def _quoted(value: str) -> str:
    """A value as part of a message; in quotes where it is empty or has blanks."""
    text = shown(value)
    return f'"{text}"' if not value or " " in value else text

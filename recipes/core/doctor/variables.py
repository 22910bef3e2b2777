"""Environment variables that stop a run, and misspelt names.

The rules hold for NCCL 2.30 and PyTorch 2.15, at every site. An unusual value is not a problem.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from recipes.core.errors import shown
from recipes.core.place.hostlist import HostListError, expand
from recipes.core.place.launcher_variables import is_loopback

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
    found = [*_names(environ), *_nccl(environ), *_interfaces(environ), *_master(environ), *_gpus(environ)]
    return sorted(found, key=lambda problem: (not problem.bad, problem.name))


def _names(environ: Mapping[str, str]) -> Iterator[Problem]:
    family = re.compile(r"(?:NCCL|TORCH_NCCL|TORCH_FR|TORCH_DISTRIBUTED|GLOO|FI)_\w{1,60}")
    unknown = [name for name in environ if name not in KNOWN and family.fullmatch(name)]
    for name in unknown:
        if nearest := difflib.get_close_matches(name, KNOWN, n=1, cutoff=CUTOFF):
            yield Problem(name, "is not a known variable and has no effect", f"did you mean {nearest[0]}?")


def _nccl(environ: Mapping[str, str]) -> Iterator[Problem]:
    for name, elements in _ELEMENTS.items():
        # `Ring,Tree`, `^NVLS`, `allreduce:tree;broadcast:ring` (graph/tuning.cc)
        lists = [part.rpartition(":")[2].removeprefix("^") for part in environ.get(name, "").split(";")]
        items = [item for one in lists for item in one.split(",") if item]
        if invalid := [item for item in items if item.lower() not in map(str.lower, elements)]:
            what = f"{_quoted(invalid[0])} must be one of {', '.join(elements)}"
            yield Problem(name, what, "correct or unset it: NCCL refuses to start", bad=True)
    if environ.get("NCCL_NET") == "":  # plugin/net.cc compares names with it even if it is empty
        yield Problem("NCCL_NET", "is empty, and NCCL searches for a network with an empty name", "unset it", bad=True)
    if environ.get("NCCL_NET", "").upper() == "IB" and environ.get("NCCL_IB_DISABLE") == "1":
        yield Problem("NCCL_NET", "is IB, which NCCL_IB_DISABLE=1 disables", "unset one of the two", bad=True)


def _interfaces(environ: Mapping[str, str]) -> Iterator[Problem]:
    fix = "unset it: the recipes find the interface of each node by its route to the others"
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environ.get(name, "")
        if re.fullmatch("=?(?:lo|docker[0-9]*|virbr[0-9]*)", value):
            yield Problem(name, f"{_quoted(value)} does not reach other nodes", fix)
        elif name.startswith("GLOO") and re.search("[=^]", value):
            what = f"{_quoted(value)} is not an interface name: gloo accepts no =, ^ or prefix"
            yield Problem(name, what, "write the exact name, as in eth0", bad=True)


def _master(environ: Mapping[str, str]) -> Iterator[Problem]:
    master = environ.get("MASTER_ADDR", "")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    world, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if not is_loopback(master) or not nodes or (world and world == local):
        return
    try:
        count = len(expand(nodes))
    except HostListError:
        return  # reported by `ranks.detect`
    if count > 1:
        fix = "unset MASTER_ADDR and MASTER_PORT: the recipes use the job's first node"
        what = f"{_quoted(master)} is local to each node, but there are {count} nodes"
        yield Problem("MASTER_ADDR", what, fix, bad=True)


def _gpus(environ: Mapping[str, str]) -> Iterator[Problem]:
    name, granted = "CUDA_VISIBLE_DEVICES", environ.get("SLURM_GPUS_ON_NODE", "")
    if environ.get(name, "-").strip(", ") == "" and granted not in ("", "0"):
        fix = "unset it and request GPUs from Slurm, which sets the variable for each step"
        yield Problem(name, f"is empty and hides the {shown(granted)} GPUs that Slurm granted", fix)


def _quoted(value: str) -> str:
    """A value as part of a message; in quotes where it is empty or has blanks."""
    text = shown(value)
    return f'"{text}"' if not value or " " in value else text

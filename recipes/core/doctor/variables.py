"""Environment variables that stop a run, and misspelt names.

The rules hold for NCCL 2.30 and PyTorch 2.15, at every site. An unusual value is not a problem.
"""

import difflib
import re
from collections.abc import Iterator, Mapping

from recipes.core.doctor.verdict import Finding
from recipes.core.errors import shown

# of difflib. With less, a valid name that is not in the list is taken for a misspelt one
CUTOFF = 0.9
# Names that users set, and the names that resemble them.
_KNOWN = """
    GLOO_SOCKET_IFNAME NCCL_ALGO NCCL_BUFFSIZE NCCL_COLLNET_ENABLE NCCL_CROSS_NIC
    NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_DEBUG NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS
    NCCL_DMABUF_ENABLE NCCL_GRAPH_FILE NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_ADDR_FAMILY
    NCCL_IB_ADDR_RANGE NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_MERGE_NICS
    NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_QPS_PER_CONNECTION NCCL_IB_RETRY_CNT
    NCCL_IB_ROCE_VERSION_NUM NCCL_IB_SL NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_IBEXT_DISABLE
    NCCL_LL128_BUFFSIZE NCCL_LL_BUFFSIZE NCCL_LAUNCH_MODE NCCL_MAX_NCHANNELS
    NCCL_MAX_P2P_NCHANNELS NCCL_MIN_NCHANNELS NCCL_MIN_P2P_NCHANNELS NCCL_MNNVL_ENABLE NCCL_NET
    NCCL_NVB_DISABLE NCCL_NVTX_DISABLE NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_NET_PLUGIN
    NCCL_NET_SHARED_BUFFERS NCCL_NET_SHARED_COMMS NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS
    NCCL_NVLS_ENABLE NCCL_OOB_NET_IFNAME NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO
    NCCL_PXN_DISABLE NCCL_SHM_DISABLE NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS
    NCCL_TOPO_DUMP_FILE NCCL_TOPO_FILE NCCL_TUNER_PLUGIN TORCH_DISTRIBUTED_DEBUG
    TORCH_FR_BUFFER_SIZE TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT
    TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING
    TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_HIGH_PRIORITY
    TORCH_NCCL_TRACE_BUFFER_SIZE FI_CXI_DEFAULT_CQ_SIZE FI_CXI_DEFAULT_RX_SIZE
    FI_CXI_DEFAULT_TX_SIZE FI_CXI_RX_MATCH_MODE FI_EFA_USE_DEVICE_RDMA FI_EFA_USE_HUGE_PAGE
    FI_LOG_LEVEL FI_MR_CACHE_MONITOR FI_PROVIDER
"""
KNOWN = tuple(_KNOWN.split())
# NCCL refuses to start with other elements of these lists.
_ELEMENTS = {
    "NCCL_ALGO": (
        "Tree",
        "Ring",
        "CollNetDirect",
        "CollNetChain",
        "CollNet",
        "NVLS",
        "NVLSTree",
        "PAT",
    ),
    "NCCL_PROTO": ("LL", "LL128", "Simple"),
}


def problems(environ: Mapping[str, str]) -> list[Finding]:
    """The problems in a process's environment. Interfaces and devices are not looked up:
    `probes.interfaces` does that.
    """
    # A misspelt name, which is not in KNOWN, does not stop a run.
    return [
        Finding(f"{name}: {fault}", fix, name in KNOWN, leave_out=False)
        for name, fault, fix in _faults(environ)
    ]


def _faults(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """The name of a variable, what is wrong with it, and the fix."""
    family = re.compile(r"(?:NCCL|TORCH_NCCL|TORCH_FR|TORCH_DISTRIBUTED|GLOO|FI)_\w{1,60}")
    for name in (name for name in environ if name not in KNOWN and family.fullmatch(name)):
        for nearest in difflib.get_close_matches(name, KNOWN, n=1, cutoff=CUTOFF):
            fault = "is not a known variable and probably has no effect"
            yield name, fault, f"did you mean {nearest}?"
    for name, elements in _ELEMENTS.items():
        # `Ring,Tree`, `^NVLS`, `allreduce:tree;broadcast:ring` (graph/tuning.cc)
        known = set(map(str.lower, elements)) | {""}
        parts = environ.get(name, "").split(";")
        lists = [part.rpartition(":")[2].removeprefix("^").split(",") for part in parts]
        invalid = [item for items in lists for item in items if item.lower() not in known]
        if invalid:
            fault = f"{shown(invalid[0])} must be one of {', '.join(elements)}"
            yield name, fault, "correct or unset it: NCCL refuses to start"
    if environ.get("NCCL_NET") == "":  # plugin/net.cc compares names with it even if it is empty
        yield "NCCL_NET", "is empty, and NCCL searches for a network with an empty name", "unset it"
    if environ.get("NCCL_NET", "").upper() == "IB" and environ.get("NCCL_IB_DISABLE") == "1":
        yield "NCCL_NET", "is IB, which NCCL_IB_DISABLE=1 disables", "unset one of the two"
    value = environ.get("GLOO_SOCKET_IFNAME", "")
    if re.search("[=^]", value):
        fault = f"{shown(value)} is not an interface name: gloo accepts no =, ^ or prefix"
        yield "GLOO_SOCKET_IFNAME", fault, "write the exact name, as in eth0"

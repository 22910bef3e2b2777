"""What is wrong with the environment variables of NCCL, gloo, libfabric, Slurm and torch, and what to do about it.

A rule is here only if it holds for today's software at every site: what is merely unusual is no problem. Read for the
tables and the rules: NCCL 2.30.7 (src/, and its user guide's "Environment Variables"), PyTorch 2.15
(ProcessGroupNCCL.hpp, FlightRecorder.hpp, Utils.hpp, debug.cpp, and the names in its libraries), libfabric 2.7
(fi_param_define, getenv), aws-ofi-nccl (doc/efa-env-var.md). UCX is left to itself: it names unknown UCX_* itself.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from recipes.core.config import envfile
from recipes.core.place import ranks
from recipes.core.place.hostlist import HostListError, expand

# Without the prefix NCCL_. These are whole numbers to NCCL (NCCL_PARAM: read by strtoll).
_NCCL_NUMBERS = """
    ALLGATHERV_ENABLE ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECK_POINTERS CHUNK_SIZE COLLNET_ENABLE
    COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_SHRINK_SHARE_RESOURCES COMM_SPLIT_SHARE_RESOURCES CONNECT_ROUND_MAX_PEERS
    CROSS_NIC CUMEM_ENABLE CUMEM_HOST_ENABLE DEV_API_JIT DISABLE_MEM_MANAGER DMABUF_ENABLE ELASTIC_BUFFER_REGISTER
    ENABLE_VERSION_CHECK GDAKI_USE_RELIABLE_DB GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE GDRCOPY_FLUSH_ENABLE
    GDRCOPY_SYNC_ENABLE GDR_FLUSH_DISABLE GIN_ENABLE GIN_ERROR_QUERY_SEC GIN_GDAKI_MAX_DEST_RD_ATOMIC
    GIN_GDAKI_MAX_QP_RD_ATOMIC GIN_GDAKI_NIC_HANDLER GIN_GDAKI_QP_DEPTH GIN_IB_TC GIN_NCONNECTIONS GIN_PLUGIN_REF_COUNT
    GIN_PROXY_QUEUE_SIZE GIN_TYPE GRAPH_DUMP_FILE_RANK GRAPH_HELPER_DISABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER
    GRAPH_STREAM_ORDERING GROUP_CUDA_STREAM IB_ADAPTIVE_ROUTING IB_AR_THRESHOLD IB_DATA_DIRECT IB_DEVICE_PCI_ORDER
    IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_GID_INDEX IB_MERGE_NICS IB_MERGE_VFS IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT
    IB_MQP_RETRY_SLEEP_MSEC IB_OOO_RQ IB_PCI_RELAXED_ORDERING IB_PKEY IB_PREPOST_RECEIVE_WORK_REQUESTS
    IB_QPS_PER_CONNECTION IB_QUERY_PORT_SPEED IB_RECEIVER_SIDE_MATCHING_SCHEME IB_RESILIENCY_PORT_FAILOVER
    IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY IB_RESILIENCY_PORT_RECOVERY
    IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX
    IB_RESILIENCY_PORT_RECOVERY_START_DELAY IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM
    IB_ROUTABLE_FLID_GID_INDEX IB_SL IB_SPLIT_DATA_ON_QPS IB_SUBNET_AWARE_ROUTING IB_SUBNET_PREFIX_LEN IB_TC IB_TIMEOUT
    IB_USE_INLINE IB_WARN_RAIL_LOCAL IGNORE_COLLNET_MISMATCH IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P IGNORE_NET_MISMATCH
    IPC_USE_ABSTRACT_SOCKET L1_SHARED_MEMORY_CARVEOUT LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER
    LL128_BUFFSIZE LL128_C2C LL128_NTHREADS LL_BUFFSIZE LOCAL_REGISTER LSA_TEAM_SIZE MAX_CTAS MAX_NCHANNELS MAX_NRINGS
    MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS MIN_NCHANNELS MIN_NRINGS MIN_P2P_NCHANNELS MLOPART_RDMA_ENABLE
    MNNVL_CLIQUE_ID MNNVL_CROSS_CLIQUE MNNVL_ENABLE MNNVL_RAIL_PER_HOST MNNVL_SCATTER_NETS_ENABLE MNNVL_UUID
    MULTI_RANK_GPU_ENABLE MULTI_SEGMENT_REGISTER NCHANNELS_PER_NET_PEER NET_DISABLE_INTRA NET_FORCE_FLUSH NET_GDR_C2C
    NET_GDR_MLOPART NET_GDR_READ NET_OPTIONAL_RECV_COMPLETION NET_OVERHEAD NET_PLUGIN_REF_COUNT NET_SHARED_BUFFERS
    NET_SHARED_COMMS NSOCKS_PERTHREAD NTHREADS NUM_RMA_CTX NVB_DISABLE NVB_PRECONNECT NVLINK_UTIL_CENTRIC_SCHED_ENABLE
    NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE NVLS_ENABLE NVLS_NCHANNELS NVTX_DISABLE OOB_NET_ENABLE P2P_DIRECT_DISABLE
    P2P_DISABLE P2P_EPOCH_ENABLE P2P_LL_THRESHOLD P2P_MAX_PEERS P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE
    P2P_PER_CHANNEL_NET_BW P2P_PXN_LEVEL P2P_READ_ENABLE P2P_SCHEDULE_GROUP_SIZE P2P_USE_CUDA_MEMCPY PAT_ENABLE
    PROGRESS_APPENDOP_FREQ PROXY_APPEND_BATCH_SIZE PROXY_DUMP_SIGNAL PXN_C2C PXN_DISABLE RAS_ENABLE RAS_TIMEOUT_FACTOR
    REPORT_CONNECT_PROGRESS RMA_DISABLE RMA_PLUGIN_REF_COUNT RMA_PROXY_DUMP_SIGNAL RMA_PROXY_QUEUE_SIZE RUNTIME_CONNECT
    SET_CPU_STACK_SIZE SET_STACK_SIZE SHADOW_MEMPOOL_MAX_SIZE SHM_DISABLE SHM_LOCALITY SINGLE_PROC_MEM_REG_ENABLE
    SOCKET_INLINE SOCKET_MIN_TASKSIZE SOCKET_NTHREADS SOCKET_POLL_TIMEOUT_MSEC SOCKET_RCVBUF SOCKET_RETRY_CNT
    SOCKET_RETRY_SLEEP_MSEC SOCKET_SNDBUF SYM_CE_THRESHOLD SYM_CTAS SYM_GIN_KERNELS_ENABLE SYM_NOWIN_ENABLE
    SYM_REUSE_SYSMEM_HANDLES SYM_RS_GIN_CHUNK_SIZE SYM_TMA_ENABLE TOPO_DUMP_FILE_RANK TOPO_SPLIT_MLOPART
    UID_STAGGER_RATE UID_STAGGER_THRESHOLD UNPACK_DOUBLE_NCHANNELS WIN_ENABLE WIN_STRIDE WORK_ARGS_BYTES WORK_FIFO_BYTES
"""
_NCCL_OTHER = """
    ALGO CHECK_MODE COMM_ID CONF_FILE CTA_POLICY DEBUG DEBUG_FILE DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT
    DEBUG_TIMESTAMP_LEVELS ENV_PLUGIN GIN_PLUGIN GRAPH_DUMP_FILE GRAPH_FILE HOSTID IBVERBS_LIB IB_ADDR_FAMILY
    IB_ADDR_RANGE IB_HCA LAUNCH_MODE NET NETDEVS_POLICY NET_FORCE_MERGE NET_GDR_LEVEL NET_MERGE_LEVEL NET_MERGE_POLICY
    NET_PLUGIN NO_CACHE OOB_NET_IFNAME P2P_LEVEL PARAM_DUMP_ALL PROFILER_PLUGIN PROTO PROXY_CPUSET RAS_ADDR RMA_PLUGIN
    SET_THREAD_NAME SOCKET_FAMILY SOCKET_IFNAME SOCKET_MAGIC SYM_KERNEL THREAD_THRESHOLDS TOPO_DUMP_FILE TOPO_FILE
    TUNER_CONFIG_FILE TUNER_PLUGIN WARN_ENABLE_DEBUG_INFO
"""
# Of earlier NCCL (from 2.8 on) and of RCCL; a container's image sets NCCL_VERSION.
_NCCL_ELSEWHERE = """
    AGG_ALLOC_MODE AGG_CHANNEL_SIZE CREATE_THREAD_CONTEXT CUDA_PATH GIN_COUNTER_POOL_SIZE GIN_NCONTEXTS
    GIN_PROXY_NTHREADS GIN_SIGNAL_POOL_SIZE MNNVL NCHANNELS_PER_PEER PLUGIN_P2P PROXY_PROFILE RINGS RINGS_REMAP
    SHARED_BUFF_COUNT SHM_MEMCPY_MODE SHM_USE_CUDA_MEMCPY WORK_FIFO_DEPTH BOOTSTRAP_BIDIR_ALLGATHER LIBIBVERBS_SO
    VERSION
"""
# Plugins, tests and build systems have families of their own under these.
_NCCL_FOREIGN = re.compile(
    r"NCCL_(?:(?:FASTRAK|GPUDIRECTTCPX|DCN|SHARP|UCX|IBEXT|TESTS|INSPECTOR|PROFILER?|TUNER|NET_PLUGIN|RCCL|EP|RESHARD)_\w+"
    r"|(?:\w+_)?(?:HOME|ROOT|DIR|PATH|PREFIX|BASE|VERSION|MODULE|LIB\w*|INC\w*))"
)

# TORCH_*: a number that std::stoi takes, a boolean, a text. A wrong one of the first two ends init_process_group.
_TORCH_NUMBERS = """
    TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_COORD_CHECK_MILSEC TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC
    TORCH_NCCL_RANKS_PER_ROOT TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_FR_BUFFER_SIZE
    TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC
"""
_TORCH_BOOLEANS = """
    TORCH_NCCL_BCAST_UNIQUEID TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_CUDA_EVENT_CACHE TORCH_NCCL_DESYNC_DEBUG
    TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_EXTRA_DUMP_ON_EXEC
    TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN TORCH_NCCL_NAN_CHECK
    TORCH_NCCL_PROPAGATE_ERROR TORCH_NCCL_RETHROW_CUDA_ERRORS TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING
    TORCH_NCCL_TEARDOWN_ON_TIMEOUT TORCH_NCCL_TRACE_CPP_STACK TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK
    TORCH_FR_CPP_STACK TORCH_FR_DUMP_ON_TIMEOUT
"""
_TORCH_TEXTS = """
    TORCH_NCCL_ABORT_IN_DESTROY_PG TORCH_NCCL_DEBUG_INFO_PIPE_FILE TORCH_NCCL_DEBUG_INFO_TEMP_FILE
    TORCH_NCCL_NONBLOCKING_TIMEOUT TORCH_NCCL_USE_COMM_NONBLOCKING TORCH_FR_DUMP_DYNAMIC_FILE_NAME TORCH_FR_DUMP_TEMP_FILE
    TORCH_DISTRIBUTED_DEBUG TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P TORCH_DISTRIBUTED_USE_TORCHCOMMS
"""
_GLOO = """
    GLOO_SOCKET_IFNAME GLOO_DISABLE_CONNECTION_RETRIES GLOO_DEVICE_TRANSPORT GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY
    GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_PATH
"""
# libfabric's own, and those of the providers that env/ has files for; those of others are not looked at.
_FI = {
    "": """
    ADDR_FORMAT AV_REMOVE_CLEANUP FORK_UNSAFE HMEM HMEM_CUDA_ENABLE_ASYNC_COPY HMEM_CUDA_USE_DMABUF
    HMEM_CUDA_USE_GDRCOPY HMEM_DISABLE_P2P HMEM_NEURON_USE_DMABUF HMEM_ROCR_USE_DMABUF HMEM_SYNAPSEAI_USE_DMABUF
    HMEM_ZE_COPY_ENGINE HMEM_ZE_USE_DMABUF HOOK LOG_INTERVAL LOG_LEVEL LOG_LOCATION LOG_LOCATION_MODE LOG_PROV
    LOG_SUBSYS MR_CACHE_MAX_COUNT MR_CACHE_MAX_SIZE MR_CACHE_MONITOR MR_CUDA_CACHE_MONITOR_ENABLED
    MR_ROCR_CACHE_MONITOR_ENABLED MR_ZE_CACHE_MONITOR_ENABLED OFFLOAD_COLL_PROVIDER PERF_CNTR PREFER_SYSCONFIG
    PROVIDER PROVIDER_PATH ROCR_D2H_THRESHOLD UNIVERSE_SIZE""",
    "CXI_": """
    ATS ATS_MLOCK_MODE CNTR_SPIN_BEFORE_YIELD CNTR_TRIG_CMDQ COLL_FABRIC_MGR_CACERT COLL_FABRIC_MGR_URL COLL_JOB_ID
    COLL_JOB_STEP_ID COLL_MCAST_TOKEN COLL_RETRY_USEC COLL_TIMEOUT_USEC COLL_USE_DMA_PUT CQ_FILL_PERCENT CQ_POLICY
    CTRL_RX_EQ_MAX_SIZE DEFAULT_CQ_SIZE DEFAULT_RX_SIZE DEFAULT_TX_SIZE DEFAULT_VNI DEVICE_NAME DISABLE_ALT_READ_CMDQ
    DISABLE_CQ_HUGETLB DISABLE_CUDA_SYNC_MEMOPS DISABLE_EQ_HUGETLB DISABLE_HMEM_DEV_REGISTER DISABLE_HOST_REGISTER
    DISABLE_NON_INJECT_AMO_IDC DISABLE_NON_INJECT_MSG_IDC DISABLE_NON_INJECT_RMA_IDC EAGER_SIZE ENABLE_TRIG_OP_LIMIT
    ENABLE_WRITEDATA EQ_ACK_BATCH_SIZE FC_RETRY_USEC_DELAY FORCE_DEV_REG_COPY FORCE_ODP FORCE_ZE_HMEM_SUPPORT
    HWCOLL_ADDRS_PER_JOB HWCOLL_MIN_NODES HYBRID_POSTED_RECV_PREEMPTIVE HYBRID_PREEMPTIVE HYBRID_RECV_PREEMPTIVE
    HYBRID_UNEXPECTED_MSG_PREEMPTIVE IOTLB LLRING_MODE MR_CACHE_EVENTS_DISABLE_LE_POLL_NSECS
    MR_CACHE_EVENTS_DISABLE_POLL_NSECS MR_MATCH_EVENTS MR_TARGET_ORDERING MSG_LOSSLESS ODP OFLOW_BUF_COUNT
    OFLOW_BUF_MAX_CACHED OFLOW_BUF_MIN_POSTED OFLOW_BUF_SIZE OPTIMIZED_MRS PROV_KEY_CACHE RDZV_ALIGNED_SW_RGET
    RDZV_EAGER_SIZE RDZV_GET_MIN RDZV_PROTO RDZV_THRESHOLD REQ_BUF_MAX_CACHED REQ_BUF_MAX_COUNT REQ_BUF_MIN_POSTED
    REQ_BUF_SIZE RGET_TC RNR_APPEND_RETRY_TIMEOUT_US RNR_MAX_TIMEOUT_US RX_MATCH_MODE SAFE_DEVMEM_COPY_THRESHOLD
    SW_RX_TX_INIT_MAX TELEMETRY TELEMETRY_RGID TRUNC_OK ZBCOLL_RADIX""",
    "EFA_": """
    CQ_SIZE EFA_CQ_READ_SIZE ENABLE_SHM_TRANSFER FORK_SAFE IFACE IMPLICIT_AV_SIZE INTERNAL_RX_REFILL_THRESHOLD
    INTER_MAX_GDRCOPY_MESSAGE_SIZE INTER_MAX_MEDIUM_MESSAGE_SIZE INTER_MIN_READ_MESSAGE_SIZE INTER_MIN_READ_WRITE_SIZE
    INTER_READ_SEGMENT_SIZE MAX_MEMCPY_SIZE MAX_TIMEOUT MR_CACHE_ENABLE MR_MAX_CACHED_COUNT MR_MAX_CACHED_SIZE MTU_SIZE
    READCOPY_POOL_SIZE RECVWIN_SIZE RUNT_SIZE RX_COPY_OOO RX_COPY_UNEXP RX_SIZE RX_WINDOW_SIZE SET_CUDA_SYNC_MEMOPS
    SHM_AV_SIZE SHM_CQ_READ_SIZE SHM_MAX_MEDIUM_SIZE TIMEOUT_INTERVAL TRACK_MR TX_MIN_CREDITS TX_QUEUE_SIZE TX_SIZE
    USE_DATA_PATH_DIRECT USE_DEVICE_RDMA USE_HUGE_PAGE USE_HW_CNTR USE_SM2 USE_SQ_REQ_ID_64_BIT
    USE_UNSOLICITED_WRITE_RECV USE_ZCPY_RX""",
}

# What has no effect any more, or goes by another name: what is so, and what to do.
_REPLACED = {
    "NCCL_ASYNC_ERROR_HANDLING": ("was renamed in PyTorch 2.2", "set TORCH_NCCL_ASYNC_ERROR_HANDLING, or leave it out"),
    "NCCL_BLOCKING_WAIT": ("was renamed in PyTorch 2.2", "set TORCH_NCCL_BLOCKING_WAIT, or leave it out"),
    "NCCL_DESYNC_DEBUG": ("was renamed in PyTorch 2.2", "set TORCH_NCCL_DESYNC_DEBUG, or leave it out"),
    "NCCL_ENABLE_TIMING": ("was renamed in PyTorch 2.2", "set TORCH_NCCL_ENABLE_TIMING, or leave it out"),
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": (
        "was renamed in PyTorch 2.2",
        "set TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK, or leave it out",
    ),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": ("is the old name of the flight recorder's size", "set TORCH_FR_BUFFER_SIZE"),
    "TORCH_NCCL_AVOID_RECORD_STREAMS": ("has no effect: PyTorch avoids them always now", "leave it out"),
    "NCCL_LL_THRESHOLD": ("is gone since NCCL 2.5", "leave it out; NCCL_PROTO=^LL would exclude LL"),
    "NCCL_TREE_THRESHOLD": ("is gone since NCCL 2.5", "leave it out; NCCL_ALGO=^Tree would exclude trees"),
    "NCCL_SINGLE_RING_THRESHOLD": ("is gone since NCCL 2.3", "leave it out"),
    "NCCL_THREAD_THRESHOLD": ("is gone since NCCL 2.5", "leave it out"),
    "NCCL_IB_CUDA_SUPPORT": ("is gone since NCCL 2.4", "set NCCL_NET_GDR_LEVEL, or leave it out"),
    "NCCL_IB_GDR_LEVEL": ("was renamed in NCCL 2.4", "set NCCL_NET_GDR_LEVEL"),
    "NCCL_CHECKS_DISABLE": ("has no effect: NCCL checks arguments only if asked", "leave it out"),
    "NCCL_TIMEOUT": ("is read by nothing", "leave it out; the recipes' key is timeout_s"),
    "NCCL_DETERMINISTIC": ("is read by nothing", "leave it out"),
}

# Smallest and largest value. IBTA Architecture Specification for the widths of NCCL_IB_*: timeout 5 bits, retries 3,
# service level 4, traffic class 8. -1 is NCCL's "choose by yourself" where the smallest value here is -1.
_RANGES = {
    "NCCL_IB_TIMEOUT": (0, 31),
    "NCCL_IB_RETRY_CNT": (0, 7),
    "NCCL_IB_SL": (-1, 15),
    "NCCL_IB_TC": (-1, 255),
    "NCCL_IB_ROCE_VERSION_NUM": (1, 2),
    "NCCL_IB_GID_INDEX": (-1, 65535),
    "NCCL_IB_QPS_PER_CONNECTION": (1, 128),
    "NCCL_CROSS_NIC": (0, 2),
    "NCCL_SOCKET_NTHREADS": (0, 16),
    "NCCL_NSOCKS_PERTHREAD": (1, 64),
    "NCCL_BUFFSIZE": (1, 1 << 40),
    "NCCL_MIN_NCHANNELS": (1, 1024),
    "NCCL_MAX_NCHANNELS": (1, 1024),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (0, 3),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": (1, 1 << 31),
    "TORCH_FR_BUFFER_SIZE": (0, 1 << 31),
}
_LEVELS = ["LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS"]  # topoPathTypeStr; case matters
_CHOICES = {
    "NCCL_SOCKET_FAMILY": ["AF_INET", "AF_INET6"],
    "NCCL_IB_ADDR_FAMILY": ["AF_INET", "AF_INET6"],
    "NCCL_NET_GDR_LEVEL": [*_LEVELS, *"0123456789"],
    "NCCL_P2P_LEVEL": [*_LEVELS, *"0123456789"],
}
_DEBUG_LEVELS = ["VERSION", "WARN", "INFO", "ABORT", "TRACE", "NONE", "ERROR"]  # the last two are RCCL's
_SUBSYSTEMS = """
    INIT COLL P2P SHM NET GRAPH TUNING ENV ALLOC ALLOC_HOST CALL PROXY NVLS BOOTSTRAP REG PROFILE RAS DESTROY VERBS ALL
"""
_ELEMENTS = {
    "NCCL_ALGO": ["Tree", "Ring", "CollNetDirect", "CollNetChain", "CollNet", "NVLS", "NVLSTree", "PAT"],
    "NCCL_PROTO": ["LL", "LL128", "Simple"],
}


def _known() -> tuple[frozenset[str], frozenset[str]]:
    numbers = {f"NCCL_{name}" for name in _NCCL_NUMBERS.split()}
    others = {f"NCCL_{name}" for name in (_NCCL_OTHER + _NCCL_ELSEWHERE).split()}
    libfabric = {f"FI_{provider}{name}" for provider, names in _FI.items() for name in names.split()}
    plain = {*(_TORCH_NUMBERS + _TORCH_BOOLEANS + _TORCH_TEXTS + _GLOO).split()}
    return frozenset(numbers), frozenset(numbers | others | libfabric | plain | _REPLACED.keys())


_NUMBERS, KNOWN = _known()
_FAMILY = re.compile(r"(TORCH_NCCL_|TORCH_FR_|TORCH_DISTRIBUTED_|NCCL_|GLOO_|FI_EFA_|FI_CXI_|FI_)\w+")
_WHOLE = re.compile(r"\s*[+-]?(?:0[xX][0-9a-fA-F]{1,16}|[0-9]{1,18})\s*")
_STOI = re.compile(r"\s*([+-]?[0-9]{1,9})(?![0-9])")
_BOOLEAN = re.compile(r"(?i:y|yes|1|t|true|n|no|0|f|false)")
_INTERFACE = re.compile(r"[^\s=^,/]{1,15}")  # dev_valid_name in the kernel, less what NCCL's lists use
_HCA = re.compile(r"[A-Za-z0-9_.-]+(?::[0-9]*){0,3}")
_MAX_SEARCHED = 20  # unknown names for which a nearest one is looked for: bounds the time


@dataclass(frozen=True)
class Problem:
    """Something wrong with one variable, each text fit for one line."""

    name: str
    what: str
    mend: str
    bad: bool = False  # nothing works with it; else a warning


def problems(environ: Mapping[str, str]) -> list[Problem]:
    """What is wrong in a process's environment, the bad ones first; empty where nothing is.

    Only `environ` is read: whether an interface or a device exists is not asked. A secret's value is never shown
    (`envfile.is_secret`). Raises nothing. Sources: see the module, and beside the rules.
    """
    found = [*_of_settings(environ), *_left_on(environ), *_ranks(environ), *_gpus(environ)]
    return _in_order(found)


def check_file(path: Path, root: Path) -> list[Problem]:
    """What is wrong with what the env file `path` sets, by itself and on top of `root/common.env`.

    `root` is the folder of env files. An interface's name that is one machine's is a problem here. What is set for
    debugging is none: a file says so on purpose. Raises envfile.EnvFileError as `envfile.read` does.
    """
    own = envfile.read(path)
    both = envfile.merge(envfile.read(root / "common.env"), own)
    found = [problem for problem in _of_settings(both) if problem.name in own]
    return _in_order([*found, *_one_machines(own)])


def suggestion(
    interface: str,
    infiniband: Mapping[str, Mapping[str, str]],
    address: str,
    others: Sequence[str] = (),
    proven: bool = True,
) -> list[str]:
    """The lines for one's own env file that this node's network asks for, each after a comment that says why.

    `interface` and `address` are those that reach the other nodes (`network.Choice`), `others` the interface's
    addresses, `proven` whether the recipes find the interface by themselves on every node. `infiniband` maps
    "mlx5_0:1" to "state", "link" and "rate" as in /sys/class/infiniband. Where nothing is needed, one comment says so.
    `envfile.parse` reads the lines. Raises nothing. Source: NCCL 2.30's transport/net_ib/init.cc (ports that are not
    ACTIVE are passed over, InfiniBand and Ethernet ones taken alike) and os/linux.cc (an interface's IPv4 address
    comes before its IPv6 ones).
    """
    lines = []
    active = [port for port, values in infiniband.items() if values.get("state") in ("ACTIVE", "4: ACTIVE")]
    native = sorted(port for port in active if infiniband[port].get("link") == "InfiniBand")
    if native and len(native) < len(active) and all(_HCA.fullmatch(port) for port in native):
        lines += [
            f"# Of {len(active)} ACTIVE ports {len(native)} are InfiniBand and the others Ethernet; NCCL would mix them.",
            f"NCCL_IB_HCA=={','.join(native)}",
        ]
    if isinstance(_address(address), IPv6Address) and any(isinstance(_address(other), IPv4Address) for other in others):
        lines += [
            "# The other nodes are reached by IPv6; NCCL takes the interface's IPv4 address where it has both.",
            "NCCL_SOCKET_FAMILY=AF_INET6",
        ]
    if not proven and re.fullmatch(r"(?!lo[0-9]*$)[A-Za-z0-9_.:-]{1,15}", interface):
        lines += [
            "# The route to the other nodes cannot be asked for; right only where every node has this interface.",
            f"NCCL_SOCKET_IFNAME=={interface}",
            "# gloo takes the name as it is.",
            f"GLOO_SOCKET_IFNAME={interface}",
        ]
    if lines:
        return lines
    if infiniband and not active:
        return ["# No setting helps: no InfiniBand or RoCE port is ACTIVE, and NCCL takes TCP. Ask who runs the nodes."]
    over = f"{len(active)} InfiniBand or RoCE ports" if active else "TCP, for want of an InfiniBand or RoCE device"
    return [f"# Nothing is needed: NCCL finds its way by itself, over {over}."]


def _in_order(found: list[Problem]) -> list[Problem]:
    return sorted(dict.fromkeys(found), key=lambda problem: (not problem.bad, problem.name))


def _of_settings(environ: Mapping[str, str]) -> Iterator[Problem]:
    """What is wrong with settings wherever they come from: a process, or an env file."""
    yield from _names(environ)
    yield from _nccl_values(environ)
    yield from _torch_values(environ)
    yield from _interfaces(environ)
    yield from _contradictions(environ)


def _names(environ: Mapping[str, str]) -> Iterator[Problem]:
    searched = 0
    for name in environ:
        if name in _REPLACED:
            yield Problem(name, *_REPLACED[name])
            continue
        family = _FAMILY.fullmatch(name)
        if not family or name in KNOWN or _NCCL_FOREIGN.fullmatch(name) or len(name) > 100:
            continue
        searched += 1
        nearest = _nearest(name, family[1]) if searched <= _MAX_SEARCHED else None
        if nearest:
            what = "is no name that NCCL 2.30, PyTorch 2.15 or libfabric 2.7 reads"
            yield Problem(_text(name), what, f"did you mean {nearest}?")
        elif family[1] in ("NCCL_", "TORCH_NCCL_", "TORCH_FR_"):
            what = "is read by neither NCCL up to 2.30 nor PyTorch up to 2.15"
            yield Problem(_text(name), what, "remove it, unless a newer one or a plugin of yours reads it")


def _nearest(name: str, family: str) -> str | None:
    # Other software has names under FI_ too.
    cutoff = 0.9 if family == "FI_" else 0.85
    candidates = sorted(known for known in KNOWN - _REPLACED.keys() if known.startswith(family))
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return found[0] if found else None


def _nccl_values(environ: Mapping[str, str]) -> Iterator[Problem]:
    for name in _NUMBERS & environ.keys():
        value = environ[name]
        if value and not _WHOLE.fullmatch(value):
            read = _STOI.match(value)
            what = f"{_shown(name, value)} is no whole number: NCCL reads {read[1] if read else 0}"
            yield Problem(name, what, "write digits; 1 is on and 0 is off")
    for name, (least, most) in _RANGES.items():
        number = _number(environ.get(name, ""))
        if number is not None and number != -2 and not least <= number <= most:  # -2 is NCCL's "not set"
            yield Problem(name, f"{number} is not within {least} and {most}", "correct it, or leave it out")
    for name, choices in _CHOICES.items():
        value = environ.get(name, "")
        if value and value not in choices:
            mend = f"write one of {', '.join(choices)}"
            yield Problem(name, f"{_shown(name, value)} is none of its values, and ignored", mend)
    yield from _debug_values(environ)
    for name, elements in _ELEMENTS.items():
        yield from _element_values(name, environ.get(name, ""), elements)
    if environ.get("NCCL_NET") == "":
        # plugin/net.cc compares with it as soon as it is set at all.
        yield Problem("NCCL_NET", "is set to nothing, and no network has that name", "unset it", bad=True)
    index = _number(environ.get("NCCL_IB_GID_INDEX", ""))
    if index is not None and index > 0:
        mend = "leave it out: from 2.21 on NCCL finds the index by itself (NCCL_IB_ADDR_RANGE chooses among several)"
        yield Problem("NCCL_IB_GID_INDEX", f"{index} is one index for all nodes; it differs from host to host", mend)


def _debug_values(environ: Mapping[str, str]) -> Iterator[Problem]:
    level = environ.get("NCCL_DEBUG", "")
    if level and level.strip().upper() not in _DEBUG_LEVELS:
        yield Problem("NCCL_DEBUG", f"{_shown('NCCL_DEBUG', level)} is no level, and ignored", "write WARN or INFO")
    subsystems = environ.get("NCCL_DEBUG_SUBSYS", "")
    named = subsystems.removeprefix("^").split(",")
    unknown = [item for item in named if item.strip().upper() not in _SUBSYSTEMS.split()]
    if subsystems and unknown:
        what = f"{_shown('NCCL_DEBUG_SUBSYS', unknown[0])} is no subsystem"
        yield Problem("NCCL_DEBUG_SUBSYS", what, f"write some of {','.join(_SUBSYSTEMS.split())}")
    elif subsystems and level.strip().upper() not in ("INFO", "TRACE"):
        yield Problem("NCCL_DEBUG_SUBSYS", "has no effect without NCCL_DEBUG=INFO", "set NCCL_DEBUG=INFO, or unset it")


def _element_values(name: str, value: str, elements: list[str]) -> Iterator[Problem]:
    """NCCL_ALGO and NCCL_PROTO: `Ring,Tree`, `^NVLS`, `allreduce:tree;broadcast:ring` (graph/tuning.cc)."""
    lists = [part.rpartition(":")[2] for part in value.split(";") if part]
    names = [item for part in lists for item in part.removeprefix("^").split(",") if item]
    wrong = [item for item in names if item.lower() not in map(str.lower, elements)]
    if wrong:
        what = f"{_shown(name, wrong[0])} is none of {', '.join(elements)}"
        yield Problem(name, what, "correct it, or leave it out: NCCL refuses to start", bad=True)
    elif any(not part.startswith("^") for part in lists):
        mend = "leave it out, or exclude what is faulty, as in ^LL128"
        yield Problem(name, "forces a choice that NCCL makes better for each size and topology", mend)


def _torch_values(environ: Mapping[str, str]) -> Iterator[Problem]:
    refuses = "init_process_group refuses"
    for name in _TORCH_NUMBERS.split():
        if name in environ and not _STOI.match(environ[name]):
            what = f"{refuses} {_shown(name, environ[name])}: it is no whole number"
            yield Problem(name, what, "write digits, or unset it", bad=True)
    for name in _TORCH_BOOLEANS.split():
        if name in environ and not _BOOLEAN.fullmatch(environ[name]):
            what = f"{refuses} {_shown(name, environ[name])}: it is neither 1 nor 0"
            yield Problem(name, what, "write 1 or 0, or unset it", bad=True)
    name = "TORCH_DISTRIBUTED_DEBUG"
    if name in environ and environ[name].upper() not in ("OFF", "INFO", "DETAIL"):
        what = f"PyTorch refuses {_shown(name, environ[name])}"
        yield Problem(name, what, "write OFF, INFO or DETAIL, or unset it", bad=True)


def _interfaces(environ: Mapping[str, str]) -> Iterator[Problem]:
    nccl, gloo = environ.get("NCCL_SOCKET_IFNAME", ""), environ.get("GLOO_SOCKET_IFNAME", "")
    for name, value, syntax in (
        ("NCCL_SOCKET_IFNAME", nccl, _INTERFACE),
        ("NCCL_OOB_NET_IFNAME", environ.get("NCCL_OOB_NET_IFNAME", ""), _INTERFACE),
        ("NCCL_IB_HCA", environ.get("NCCL_IB_HCA", ""), _HCA),
    ):
        # misc/utils.cc: one leading ^ and = hold for the whole list, which commas alone cut; blanks are part of a name.
        body = value.removeprefix("^").removeprefix("=")
        wrong = [item for item in body.split(",") if item and not syntax.fullmatch(item)]
        if any(character.isspace() for character in value):
            yield Problem(name, f"{_shown(name, value)} has blanks, which NCCL takes for part of a name", "remove them")
        elif wrong:
            mend = "write ^ or = once, in front of the whole list, as in =a,b or ^=a,b"
            yield Problem(name, f"{_shown(name, wrong[0])} matches nothing", mend)
    if gloo:
        # ProcessGroupGloo: split at commas, then the exact name of an interface.
        wrong = [item for item in gloo.removesuffix(",").split(",") if not _INTERFACE.fullmatch(item)]
        if wrong:
            what = f"{_shown('GLOO_SOCKET_IFNAME', wrong[0])} is no interface's name: gloo knows no =, ^ or prefix"
            yield Problem("GLOO_SOCKET_IFNAME", what, "write the exact name alone, as in eth0", bad=True)
            return
    one = nccl.removeprefix("=")
    if _INTERFACE.fullmatch(one) and _INTERFACE.fullmatch(gloo) and not gloo.startswith(one):
        what = f"names {_shown('GLOO_SOCKET_IFNAME', gloo)}, but NCCL_SOCKET_IFNAME names {_shown('', one)}"
        yield Problem("GLOO_SOCKET_IFNAME", what, "name the same interface in both, or unset both")


def _contradictions(environ: Mapping[str, str]) -> Iterator[Problem]:
    on = {name for name in ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE") if _number(environ.get(name, "")) == 1}
    net = environ.get("NCCL_NET", "").upper()
    if "NCCL_IB_DISABLE" in on and net == "IB":
        yield Problem("NCCL_NET", "asks for IB, which NCCL_IB_DISABLE=1 forbids", "unset one of the two", bad=True)
    elif "NCCL_IB_DISABLE" in on and environ.get("NCCL_IB_HCA"):
        yield Problem("NCCL_IB_HCA", "has no effect beside NCCL_IB_DISABLE=1", "unset one of the two")
    if "NCCL_P2P_DISABLE" in on and environ.get("NCCL_P2P_LEVEL"):
        yield Problem("NCCL_P2P_LEVEL", "has no effect beside NCCL_P2P_DISABLE=1", "unset one of the two")
    if net in ("LIBFABRIC", "AWS LIBFABRIC", "SOCKET"):
        for name in sorted(name for name in KNOWN & environ.keys() if re.match("NCCL_IB_(?!DISABLE)", name)):
            what = f"has no effect beside NCCL_NET={_shown('NCCL_NET', environ['NCCL_NET'])}"
            yield Problem(name, what, "unset one of the two")
    threads, sockets = (_number(environ.get(f"NCCL_{name}", "")) for name in ("SOCKET_NTHREADS", "NSOCKS_PERTHREAD"))
    if threads and sockets and 0 < threads <= 16 and threads * sockets > 64:  # MAX_SOCKETS in net_socket.cc
        what = f"{sockets} times NCCL_SOCKET_NTHREADS={threads} is more than 64 sockets"
        yield Problem("NCCL_NSOCKS_PERTHREAD", what, f"write {64 // threads} at most")
    providers = environ.get("FI_PROVIDER", "").lower().split(",")
    if "efa" in providers or any(name.startswith("FI_EFA_") for name in environ):
        for name in environ:
            if re.fullmatch(r"RDMAV_\w{1,90}", name):
                yield Problem(_text(name), "breaks EFA on newer kernels", "unset it; libfabric does what is needed")
    one, two = environ.get("PYTORCH_CUDA_ALLOC_CONF"), environ.get("PYTORCH_ALLOC_CONF")
    if one and two and one != two:
        # Its own settings come from the one, the general ones from the other (AllocatorConfig.h, CUDAAllocatorConfig.h).
        # Neither name is a problem alone: PyTorch 2.12 took back the warning (pytorch issue 183387).
        what = "and PYTORCH_ALLOC_CONF differ, and PyTorch reads a part from each"
        yield Problem("PYTORCH_CUDA_ALLOC_CONF", what, "put everything into one of the two")


def _left_on(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Good while a fault is looked for, a brake afterwards."""
    for name, value, why in (
        ("CUDA_LAUNCH_BLOCKING", "1", "makes the CPU wait for every kernel"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "compares every collective over all ranks before it runs"),
    ):
        if environ.get(name, "").upper() == value:
            yield Problem(name, f"{value} {why}", "unset it when the fault is found")


def _ranks(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Leftovers of another allocation or launcher; torchrun's own and mpirun's are none (`ranks.detect`)."""
    try:
        in_step, in_batch = ranks.in_step(environ), ranks.in_batch_shell(environ)
    except ranks.RankError:  # which the ranks report themselves
        in_step = in_batch = False
    launched = any(re.match("TORCHELASTIC_|GROUP_RANK$|OMPI_COMM_WORLD_RANK$|PMI_RANK$", name) for name in environ)
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    if in_step and not launched:
        one_gpu = re.fullmatch("[^,]+", environ.get("CUDA_VISIBLE_DEVICES", ""))
        for name, slurms in (("RANK", "SLURM_PROCID"), ("LOCAL_RANK", "SLURM_LOCALID"), ("WORLD_SIZE", tasks)):
            own, given = _number(environ.get(name, "")), _number(environ.get(slurms, ""))
            if one_gpu and name == "LOCAL_RANK" and own == 0:
                continue  # with --gpus-per-task each rank's one GPU is number 0, and many scripts say so
            if own is not None and given is not None and own != given:
                mend = "unset RANK, LOCAL_RANK and WORLD_SIZE, and start the ranks with srun"
                yield Problem(name, f"{own} is not {slurms}={given}: left over from another launcher?", mend)
    before_srun = "SLURM_JOB_ID" in environ and ("SLURM_STEP_ID" not in environ or in_batch)
    if before_srun and "mask_cpu:" in environ.get("SLURM_CPU_BIND", ""):
        # A step has its own; a batch shell has it from where sbatch was typed only.
        what = "holds CPUs of the shell that submitted, and srun would bind the ranks to them"
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
        return  # whoever reads the list says so
    if len(hosts) < 2:
        return
    mend = "unset MASTER_ADDR and MASTER_PORT: they come from the job's first node"
    address = _address(master)
    if master.lower() == "localhost" or (address and address.is_loopback):
        what = f"{_shown('MASTER_ADDR', master)} is each node's own address, but there are {len(hosts)} nodes"
        yield Problem("MASTER_ADDR", what, mend, bad=True)
    elif not address and not any(_same_host(master, host) for host in hosts):
        what = f"{_shown('MASTER_ADDR', master)} is not named like any of the job's {len(hosts)} nodes"
        yield Problem("MASTER_ADDR", what, mend)


def _same_host(name: str, host: str) -> bool:
    """Also with a domain, and with a fabric's suffix or prefix (node7i, node7-ib0, ib-node7)."""
    name, host = name.partition(".")[0].lower(), host.partition(".")[0].lower()
    return host in name or name in host


def _gpus(environ: Mapping[str, str]) -> Iterator[Problem]:
    name = "CUDA_VISIBLE_DEVICES"
    if name not in environ:
        return
    devices = [item.strip() for item in environ[name].split(",") if item.strip()]
    granted = _number(environ.get("SLURM_GPUS_ON_NODE", "")) or 0
    mend = "unset it, and ask Slurm for the GPUs; it sets the variable for each step"
    if not devices and granted > 0:
        yield Problem(name, f"is empty and hides the {granted} GPUs that Slurm granted", mend)
    # torch/cuda/__init__.py, _parse_visible_devices: CUDA takes the list up to the first number that is not valid.
    elif len(set(devices)) < len(devices):
        yield Problem(name, f"{_shown(name, environ[name])} names a GPU twice: CUDA shows none", mend, bad=True)
    elif any(item.startswith("-") for item in devices) and len(devices) > 1:
        yield Problem(name, f"{_shown(name, environ[name])} has a negative number: what follows it is hidden", mend)


def _one_machines(settings: Mapping[str, str]) -> Iterator[Problem]:
    """Interface names that the kernel deals out in order of discovery, or by the slot, in a file for all nodes."""
    if any(name.startswith(("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_")) for name in settings):
        return  # for one machine type, whose plugin wants them named
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = settings.get(name, "")
        if re.fullmatch(r"=?(?:eth[0-9]+|eno[0-9]+|en[psx][0-9a-z]+|em[0-9]+)", value):
            what = f"{_shown(name, value)} is an interface of one kind of machine, and every node reads this file"
            yield Problem(name, what, "leave it out: the recipes find each node's own by its route to the others")
        elif re.fullmatch(r"=?(?:lo|docker[0-9]*|virbr[0-9]*)", value):
            what = f"{_shown(name, value)} does not reach other nodes"
            yield Problem(name, what, "leave it out: the recipes find each node's own by its route to the others")


def _number(text: str) -> int | None:
    """A whole number as NCCL reads it (also 0x10), None for anything else."""
    if not _WHOLE.fullmatch(text):
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


def _shown(name: str, value: str) -> str:
    """A value as it may stand in a line: short, printable, and never a secret's."""
    if envfile.is_secret(name):
        return "(not shown)"
    text = _text(value, 60)
    return f'"{text}"' if not value or " " in value else text


def _text(text: str, limit: int = 100) -> str:
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text if text.isprintable() else ascii(text)

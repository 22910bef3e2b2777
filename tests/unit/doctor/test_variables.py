"""Environment variables: each invalid one is reported with its fix, and no valid one is."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from recipes.core.config import envfile
from recipes.core.doctor.variable_tables import KNOWN
from recipes.core.doctor.variables import Problem, check_file, problems
from tests.helpers import ROOT

ENV_DIR = ROOT / "env"
FILES = sorted(ENV_DIR.rglob("*.env"))

TORCH = [name for name in KNOWN if name.startswith("TORCH_")]  # may not be set to nothing
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_JOB_NODELIST": "gpu[01-04]",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x0003",
}
BATCH = {name: value for name, value in SLURM.items() if "STEP" not in name}


def pairs(text: str) -> dict[str, str]:
    """`A=1;B=2` as a mapping; `SLURM` or `BATCH` stands for the variables above."""
    found: dict[str, str] = {}
    for item in text.split(";"):
        name, _, value = item.partition("=")
        found |= {"SLURM": SLURM, "BATCH": BATCH}.get(item) or {name: value}
    return found


# wrong; the variable named (! where nothing works); a part of what is said; right
RULES = """
NCCL_SOCKET_IFNAM=eth0 | NCCL_SOCKET_IFNAM | did you mean NCCL_SOCKET_IFNAME? | NCCL_SOCKET_IFNAME=eth0
NCCL_DEBUG_SUBSYSTEM=ENV | NCCL_DEBUG_SUBSYSTEM | did you mean NCCL_DEBUG_SUBSYS? | NCCL_DEBUG_TIMESTAMP_FORMAT=x
TORCH_NCCL_ASYNC_ERROR_HANDLIN=1 | TORCH_NCCL_ASYNC_ERROR_HANDLIN | TORCH_NCCL_ASYNC_ERROR_HANDLING? | TORCH_NCCL_ASYNC_ERROR_HANDLING=1
TORCH_NCCL_ASYNC_ERROR_HANDLING=x | TORCH_NCCL_ASYNC_ERROR_HANDLING! | refuses x | TORCH_NCCL_ASYNC_ERROR_HANDLING=3
TORCH_FR_BUFFERSIZE=5 | TORCH_FR_BUFFERSIZE | did you mean TORCH_FR_BUFFER_SIZE? | TORCH_FR_BUFFER_SIZE=5
TORCH_DISTRIBUTED_DEBUGS=INFO | TORCH_DISTRIBUTED_DEBUGS | did you mean TORCH_DISTRIBUTED_DEBUG? | TORCH_DISTRIBUTED_DEBUG=INFO
GLOO_SOCKET_IFNAMES=eth0 | GLOO_SOCKET_IFNAMES | did you mean GLOO_SOCKET_IFNAME? | GLOO_SOCKET_IFNAME=eth0
FI_EFA_USE_HUGE_PAGES=0 | FI_EFA_USE_HUGE_PAGES | did you mean FI_EFA_USE_HUGE_PAGE? | FI_EFA_USE_HUGE_PAGE=0
FI_CXI_RX_MATCHMODE=hybrid | FI_CXI_RX_MATCHMODE | did you mean FI_CXI_RX_MATCH_MODE? | FI_OPX_ANYTHING=1
FI_MR_CACHE_MONITORS=x | FI_MR_CACHE_MONITORS | did you mean FI_MR_CACHE_MONITOR? | FI_MR_CACHE_MONITOR=userfaultfd
NCCL_ASYNC_ERROR_HANDLING=1 | NCCL_ASYNC_ERROR_HANDLING | set TORCH_NCCL_ASYNC_ERROR_HANDLING | TORCH_NCCL_ASYNC_ERROR_HANDLING=3
NCCL_BLOCKING_WAIT=1 | NCCL_BLOCKING_WAIT | set TORCH_NCCL_BLOCKING_WAIT | TORCH_NCCL_BLOCKING_WAIT=1
NCCL_DESYNC_DEBUG=1 | NCCL_DESYNC_DEBUG | set TORCH_NCCL_DESYNC_DEBUG | TORCH_NCCL_DESYNC_DEBUG=1
TORCH_NCCL_TRACE_BUFFER_SIZE=5 | TORCH_NCCL_TRACE_BUFFER_SIZE | set TORCH_FR_BUFFER_SIZE | TORCH_FR_BUFFER_SIZE=0
TORCH_NCCL_AVOID_RECORD_STREAMS=1 | TORCH_NCCL_AVOID_RECORD_STREAMS | unset it | TORCH_NCCL_NAN_CHECK=1
NCCL_LL_THRESHOLD=0 | NCCL_LL_THRESHOLD | NCCL_PROTO=^LL | NCCL_P2P_LL_THRESHOLD=0
NCCL_TREE_THRESHOLD=0 | NCCL_TREE_THRESHOLD | NCCL_ALGO=^Tree | NCCL_ALGO=^Tree
NCCL_IB_CUDA_SUPPORT=1 | NCCL_IB_CUDA_SUPPORT | NCCL_NET_GDR_LEVEL | NCCL_NET_GDR_LEVEL=PHB
NCCL_CHECKS_DISABLE=1 | NCCL_CHECKS_DISABLE | no effect | NCCL_CHECK_POINTERS=1
NCCL_TIMEOUT=1800 | NCCL_TIMEOUT | timeout_s | NCCL_IB_TIMEOUT=22
FI_PROVIDER=efa;RDMAV_FORK_SAFE=1 | RDMAV_FORK_SAFE | unset it | RDMAV_FORK_SAFE=1
FI_EFA_USE_DEVICE_RDMA=1;RDMAV_HUGEPAGES_SAFE=1 | RDMAV_HUGEPAGES_SAFE | breaks EFA | FI_EFA_USE_DEVICE_RDMA=1
NCCL_IB_GID_INDEX=3 | NCCL_IB_GID_INDEX | from version 2.21 on | NCCL_IB_GID_INDEX=-1
NCCL_DEBUG=3 | NCCL_DEBUG | VERSION, WARN, INFO | NCCL_DEBUG=warn
NCCL_DEBUG_SUBSYS=NETS;NCCL_DEBUG=INFO | NCCL_DEBUG_SUBSYS | NETS is not a subsystem | NCCL_DEBUG_SUBSYS=^NET,coll;NCCL_DEBUG=INFO
NCCL_DEBUG_SUBSYS=NET | NCCL_DEBUG_SUBSYS | without NCCL_DEBUG=INFO | NCCL_DEBUG_SUBSYS=NET;NCCL_DEBUG=trace
NCCL_SOCKET_FAMILY=ipv4 | NCCL_SOCKET_FAMILY | AF_INET, AF_INET6 | NCCL_SOCKET_FAMILY=AF_INET
NCCL_IB_DISABLE=true | NCCL_IB_DISABLE | NCCL reads 0 | NCCL_IB_DISABLE=1
NCCL_BUFFSIZE=4M | NCCL_BUFFSIZE | NCCL reads 4 | NCCL_BUFFSIZE=0x400000
NCCL_BUFFSIZE=-4 | NCCL_BUFFSIZE | must be between | NCCL_BUFFSIZE=4194304
NCCL_IB_TIMEOUT=32 | NCCL_IB_TIMEOUT | between 0 and 31 | NCCL_IB_TIMEOUT=
NCCL_IB_RETRY_CNT=8 | NCCL_IB_RETRY_CNT | between 0 and 7 | NCCL_IB_RETRY_CNT=7
NCCL_SOCKET_NTHREADS=17 | NCCL_SOCKET_NTHREADS | between 0 and 16 | NCCL_SOCKET_NTHREADS=16;NCCL_NSOCKS_PERTHREAD=4
NCCL_SOCKET_NTHREADS=16;NCCL_NSOCKS_PERTHREAD=5 | NCCL_NSOCKS_PERTHREAD | write 4 at most | NCCL_SOCKET_NTHREADS=8;NCCL_NSOCKS_PERTHREAD=8
NCCL_NET_GDR_LEVEL=phb | NCCL_NET_GDR_LEVEL | SYS | NCCL_NET_GDR_LEVEL=PHB
NCCL_P2P_LEVEL=NVLINK | NCCL_P2P_LEVEL | NVL | NCCL_P2P_LEVEL=NVL
NCCL_NET= | NCCL_NET! | unset it | NCCL_NET=AWS Libfabric
NCCL_ALGO=Rings | NCCL_ALGO! | refuses to start | NCCL_ALGO=^ring,tree
NCCL_ALGO=allreduce:tree;NCCL_DEBUG=WARN | NCCL_ALGO | fixes a choice | NCCL_ALGO=
NCCL_PROTO=simple | NCCL_PROTO | fixes a choice | NCCL_PROTO=^LL128
TORCH_NCCL_ASYNC_ERROR_HANDLING= | TORCH_NCCL_ASYNC_ERROR_HANDLING! | refuses "" | TORCH_NCCL_ASYNC_ERROR_HANDLING=0
TORCH_NCCL_ASYNC_ERROR_HANDLING=4 | TORCH_NCCL_ASYNC_ERROR_HANDLING | between 0 and 3 | TORCH_NCCL_ASYNC_ERROR_HANDLING=2
TORCH_NCCL_DUMP_ON_TIMEOUT=on | TORCH_NCCL_DUMP_ON_TIMEOUT! | refuses on | TORCH_NCCL_DUMP_ON_TIMEOUT=True
TORCH_DISTRIBUTED_DEBUG=1 | TORCH_DISTRIBUTED_DEBUG! | write OFF, INFO or DETAIL | TORCH_DISTRIBUTED_DEBUG=info
NCCL_SOCKET_IFNAME=eth0, eth1 | NCCL_SOCKET_IFNAME | has blanks | NCCL_SOCKET_IFNAME=eth0,eth1
NCCL_SOCKET_IFNAME==eth0,=eth1 | NCCL_SOCKET_IFNAME | matches nothing | NCCL_SOCKET_IFNAME=^=docker0,lo
NCCL_IB_HCA=mlx5_0,^mlx5_1 | NCCL_IB_HCA | matches nothing | NCCL_IB_HCA==mlx5_0:1,mlx5_bond_0
NCCL_IB_HCA=mlx5_0 mlx5_1 | NCCL_IB_HCA | has blanks | NCCL_IB_HCA=^mlx5_2
GLOO_SOCKET_IFNAME==eth0 | GLOO_SOCKET_IFNAME! | accepts no =, ^ or prefix | GLOO_SOCKET_IFNAME=eth0,eth1
GLOO_SOCKET_IFNAME=^docker | GLOO_SOCKET_IFNAME! | exact name | GLOO_SOCKET_IFNAME=ib0
NCCL_SOCKET_IFNAME==ib0;GLOO_SOCKET_IFNAME=eth0 | GLOO_SOCKET_IFNAME | same interface | NCCL_SOCKET_IFNAME==eth0;GLOO_SOCKET_IFNAME=eth0
NCCL_SOCKET_IFNAME=ib;GLOO_SOCKET_IFNAME=eth0 | GLOO_SOCKET_IFNAME | NCCL_SOCKET_IFNAME names ib | NCCL_SOCKET_IFNAME=eth;GLOO_SOCKET_IFNAME=eth0
NCCL_IB_DISABLE=1;NCCL_NET=IB | NCCL_NET! | unset one | NCCL_IB_DISABLE=0;NCCL_NET=IB
NCCL_IB_DISABLE=1;NCCL_IB_HCA=mlx5_0 | NCCL_IB_HCA | no effect | NCCL_IB_DISABLE=0;NCCL_IB_HCA=mlx5_0
NCCL_P2P_DISABLE=1;NCCL_P2P_LEVEL=NVL | NCCL_P2P_LEVEL | no effect | NCCL_P2P_DISABLE=1
NCCL_NET=AWS Libfabric;NCCL_IB_TC=106 | NCCL_IB_TC | no effect | NCCL_NET=AWS Libfabric;NCCL_IB_DISABLE=1
NCCL_NET=Socket;NCCL_IB_HCA=mlx5_0 | NCCL_IB_HCA | no effect | NCCL_NET=IB;NCCL_IB_HCA=mlx5_0
PYTORCH_CUDA_ALLOC_CONF=a:1;PYTORCH_ALLOC_CONF=b:1 | PYTORCH_CUDA_ALLOC_CONF | one of the two | PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
CUDA_LAUNCH_BLOCKING=1 | CUDA_LAUNCH_BLOCKING | every kernel | CUDA_LAUNCH_BLOCKING=0
TORCH_DISTRIBUTED_DEBUG=DETAIL | TORCH_DISTRIBUTED_DEBUG | compares every | TORCH_DISTRIBUTED_DEBUG=OFF
SLURM;RANK=0 | RANK | not SLURM_PROCID=5 | SLURM;RANK=5
SLURM;WORLD_SIZE=1 | WORLD_SIZE | not SLURM_STEP_NUM_TASKS=8 | SLURM;WORLD_SIZE=1;RANK=0;TORCHELASTIC_RUN_ID=x
SLURM;LOCAL_RANK=3 | LOCAL_RANK | not SLURM_LOCALID=1 | SLURM;LOCAL_RANK=0;CUDA_VISIBLE_DEVICES=3
BATCH | SLURM_CPU_BIND | before srun | BATCH;SLURM_CPU_BIND=cores;RANK=3
BATCH;SLURM_STEP_ID=-5 | SLURM_CPU_BIND | before srun | BATCH;SLURM_STEP_ID=-5;SLURM_CPU_BIND=cores;RANK=3
SLURM;MASTER_ADDR=127.0.0.1 | MASTER_ADDR! | there are 2 nodes | SLURM;MASTER_ADDR=127.0.0.1;SLURM_STEP_NODELIST=gpu01
SLURM;MASTER_ADDR=localhost | MASTER_ADDR! | local to each node | SLURM;MASTER_ADDR=localhost;WORLD_SIZE=8;LOCAL_WORLD_SIZE=8
SLURM;MASTER_ADDR=login1 | MASTER_ADDR | not the name of any | SLURM;MASTER_ADDR=gpu01i.cluster.example
SLURM;MASTER_ADDR=gpu03 | MASTER_ADDR | not the name of any | SLURM;MASTER_ADDR=10.0.0.7
SLURM_GPUS_ON_NODE=4;CUDA_VISIBLE_DEVICES= | CUDA_VISIBLE_DEVICES | hides the 4 GPUs | CUDA_VISIBLE_DEVICES=
CUDA_VISIBLE_DEVICES=0,1,1 | CUDA_VISIBLE_DEVICES! | twice | CUDA_VISIBLE_DEVICES=0,1
CUDA_VISIBLE_DEVICES=0,-1,1 | CUDA_VISIBLE_DEVICES | hides the GPUs after | CUDA_VISIBLE_DEVICES=-1
"""
TABLE = [tuple(part.strip() for part in line.split(" | ")) for line in RULES.strip().splitlines()]


@pytest.mark.parametrize(("wrong", "name", "said", "right"), TABLE, ids=[f"{row[0]}" for row in TABLE])
def test_an_invalid_variable_is_reported_and_a_valid_one_is_not(wrong: str, name: str, said: str, right: str) -> None:
    found = problems(pairs(wrong))
    assert [problem.name for problem in found] == [name.removesuffix("!")]
    assert said in f"{found[0].what}; {found[0].fix}"
    assert found[0].bad == name.endswith("!")
    assert problems(pairs(right)) == []


def test_a_list_of_algorithms_may_differ_by_operation() -> None:
    assert problems({"NCCL_ALGO": "^nvls;allreduce:^tree"}) == []
    assert problems({"NCCL_ALGO": "broadcast:ring;allreduce:trees"})[0].bad


def test_the_bad_ones_come_first() -> None:
    found = problems({"CUDA_VISIBLE_DEVICES": "0,0", "CUDA_LAUNCH_BLOCKING": "1", "NCCL_NET": ""})
    assert [problem.bad for problem in found] == [True, True, False]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_shipped_file_has_no_problem(path: Path) -> None:
    assert len(FILES) >= 8
    assert check_file(path, ENV_DIR) == []


def test_every_variable_in_a_shipped_file_is_known() -> None:
    text = "\n".join(path.read_text() for path in FILES)
    named = set(re.findall(r"\b(?:NCCL|TORCH_NCCL|TORCH_FR|TORCH_DISTRIBUTED|GLOO|FI)_[A-Z0-9_]*[A-Z0-9]\b(?!_)", text))
    assert len(named) > 30
    # NCCL_LIB_DIR is for the vendor's script.
    assert {name for name in named - KNOWN if not name.startswith("NCCL_FASTRAK_")} == {"NCCL_LIB_DIR"}
    assert problems(dict.fromkeys(named - {"NCCL_NET"} - set(TORCH), "")) == []


def test_common_site_settings_are_no_problem() -> None:
    ordinary = {
        "PATH": "/usr/bin",
        "HOME": "/home/u",
        "OMP_NUM_THREADS": "1",
        "NCCL_VERSION": "2.30.7-1",
        "NCCL_HOME": "/opt/nccl",
        "NCCL_ROOT_DIR": "/opt/nccl",
        "NCCL_DEBUG": "WARN",
        "NCCL_IB_HCA": "mlx5",
        "NCCL_SHM_DISABLE": "0",
        "NCCL_SOCKET_IFNAME": "^lo,docker",
        "NCCL_IB_PCI_RELAXED_ORDERING": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_CUMEM_ENABLE": "0",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "UCX_TLS": "rc",
        "FI_PROVIDER": "cxi",
        "http_proxy": "http://user:hunter2@proxy:3128",
        **SLURM,
        **{
            f"SLURM_{name}": "1"
            for name in ["NNODES", "NODEID", "CPUS_ON_NODE", "JOB_UID", "GTIDS", "TASK_PID", "TRES_PER_TASK"]
        },
        **{
            f"SLURM_{name}": "x" for name in ["CLUSTER_NAME", "SUBMIT_DIR", "JOB_QOS", "JOB_PARTITION", "TOPOLOGY_ADDR"]
        },
        **{f"SLURM_ANY_{number}": str(number) for number in range(60)},
        "SLURM_GPUS_ON_NODE": "4",
    }
    assert problems(ordinary) == []
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "7"}
    assert problems({**ordinary, **torchrun, "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "gpu01"}) == []
    assert problems({}) == []


def test_names_of_older_nccl_and_of_plugins_are_no_problem() -> None:
    known = "SHM_USE_CUDA_MEMCPY WORK_FIFO_DEPTH SHARP_DISABLE UCX_TLS TESTS_DEVICE GPUDIRECTTCPX_CTRL_DEV INCLUDE_DIRS"
    assert problems({f"NCCL_{name}": "1" for name in known.split()}) == []


def write(folder: Path, text: str) -> Path:
    (folder / "common.env").write_text("NCCL_DEBUG=WARN\n")
    (folder / "site.env").write_text(text)
    return folder / "site.env"


@pytest.mark.parametrize(
    ("wrong", "name", "right"),
    [
        ("NCCL_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME=hsn0"),
        ("NCCL_SOCKET_IFNAME==enp65s0f1np1", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME=ib0"),
        ("GLOO_SOCKET_IFNAME=docker0", "GLOO_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME=bond0"),
        ("NCCL_DEBUG_SUBSYS=NET", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_SUBSYS=NET\nNCCL_DEBUG=INFO"),
        ("NCCL_IB_HCA=mlx5_0,=mlx5_1", "NCCL_IB_HCA", "NCCL_IB_HCA==mlx5_0,mlx5_1"),
        ("NCCL_IB_DISABLE=1\nNCCL_IB_HCA=mlx5_0", "NCCL_IB_HCA", "NCCL_IB_HCA=mlx5_0"),
    ],
)
def test_a_file_is_checked_alone_and_with_the_common_file(tmp_path: Path, wrong: str, name: str, right: str) -> None:
    assert [problem.name for problem in check_file(write(tmp_path, wrong), tmp_path)] == [name]
    assert check_file(write(tmp_path, right), tmp_path) == []


def test_debug_settings_are_a_problem_of_a_process_not_of_a_file(tmp_path: Path) -> None:
    assert check_file(write(tmp_path, "CUDA_LAUNCH_BLOCKING=1"), tmp_path) == []
    assert problems({"CUDA_LAUNCH_BLOCKING": "1"}) != []


def test_a_file_that_cannot_be_read_raises_as_envfile_does(tmp_path: Path) -> None:
    with pytest.raises(envfile.EnvFileError, match="no closing double quote"):
        check_file(write(tmp_path, 'NCCL_NET="IB'), tmp_path)
    with pytest.raises(envfile.EnvFileError, match="no such file"):
        check_file(tmp_path / "none.env", tmp_path)


# Fuzz.

RULED = sorted({*KNOWN, *(name for row in TABLE for side in (row[0], row[3]) for name in pairs(side) if name)})
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
NAMES = st.one_of(
    st.sampled_from(RULED), TEXT, st.builds("{}{}".format, st.sampled_from(["NCCL_", "FI_", "RDMAV_"]), TEXT)
)
VALUES = st.one_of(
    TEXT, st.sampled_from(["1", "-1", "08", "0x", "9" * 5000, "^", "=", ",", "a[1-", "a[0-99999999]", "::1"])
)


def is_one_line(problem: Problem) -> bool:
    texts = (problem.name, problem.what, problem.fix)
    return all(text and text.isprintable() and len(text) < 600 for text in texts)


@given(st.dictionaries(NAMES, VALUES, max_size=12))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example({"NCCL_\n": "1", "MASTER_ADDR": "\x1b[2J", "SLURM_JOB_NODELIST": "a,b"})
def test_any_environment_gives_lines_and_no_exception(environ: dict[str, str]) -> None:
    found = problems(environ)
    assert all(is_one_line(problem) for problem in found)
    assert found == problems(environ)


def test_the_time_is_bounded() -> None:
    environ = {f"NCCL_SOCKET_IFNAM{number}": "x" * 100_000 for number in range(2000)}
    environ |= dict.fromkeys(KNOWN, "9" * 100000) | {"SLURM_JOB_NODELIST": "a[0-65535]", "MASTER_ADDR": "b"}
    before = time.process_time()
    assert problems(environ)
    assert time.process_time() - before < 5


def test_the_value_of_a_secret_is_never_shown() -> None:
    value = "hunter2 is it"
    names = [*RULED, "NCCL_SOCKET_TOKEN", "NCCL_IB_SECRET", "FI_CXI_KEY", "RDMAV_PASSWORD", "http_proxy", "HF_TOKEN"]
    showing = {name for name in names if any("hunter2" in f"{one.what} {one.fix}" for one in problems({name: value}))}
    assert showing, "no value is shown at all"
    assert not any(map(envfile.is_secret, showing))

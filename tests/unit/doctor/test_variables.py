"""Environment variables: each invalid one is reported with its fix, and no valid one is."""

from pathlib import Path

import pytest

from recipes.core.config import envfile
from recipes.core.doctor.variables import problems
from tests.helpers import ROOT

FILES = sorted((ROOT / "env").rglob("*.env"))


def pairs(text: str) -> dict[str, str]:
    """`A=1&B=2` as a mapping."""
    return {name: value for name, _, value in (item.partition("=") for item in text.split("&"))}


# invalid; the variable named (! where nothing works); a part of the message; valid
RULES = """
NCCL_SOCKET_IFNAM=eth0 | NCCL_SOCKET_IFNAM | did you mean NCCL_SOCKET_IFNAME? \
| NCCL_SOCKET_IFNAME=eth0
FI_CXI_RX_MATCHMODE=hybrid | FI_CXI_RX_MATCHMODE | did you mean FI_CXI_RX_MATCH_MODE? \
| FI_OPX_ANYTHING=1
NCCL_ALGO=Rings | NCCL_ALGO! | refuses to start | NCCL_ALGO=^nvls;allreduce:^tree
NCCL_PROTO=allreduce:LL;broadcast:LL,LL12 | NCCL_PROTO! | LL12 must be one of | NCCL_PROTO=^LL128
NCCL_NET= | NCCL_NET! | unset it | NCCL_NET=AWS Libfabric
GLOO_SOCKET_IFNAME==eth0 | GLOO_SOCKET_IFNAME! | accepts no =, ^ or prefix \
| GLOO_SOCKET_IFNAME=eth0,eth1
NCCL_IB_DISABLE=1&NCCL_NET=IB | NCCL_NET! | unset one | NCCL_IB_DISABLE=0&NCCL_NET=IB
"""
TABLE = [tuple(part.strip() for part in line.split(" | ")) for line in RULES.strip().splitlines()]


@pytest.mark.parametrize(
    ("invalid", "name", "said", "valid"), TABLE, ids=[f"{row[0]}" for row in TABLE]
)
def test_an_invalid_variable_is_reported_and_a_valid_one_is_not(
    invalid: str, name: str, said: str, valid: str
) -> None:
    reported = problems(pairs(invalid))
    assert [problem.what.partition(":")[0] for problem in reported] == [name.removesuffix("!")]
    assert said in f"{reported[0].what}; {reported[0].fix}"
    assert reported[0].bad == name.endswith("!")
    assert problems(pairs(valid)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_shipped_file_has_no_problem(path: Path) -> None:
    assert len(FILES) >= 8
    assert problems(envfile.read(ROOT / "env/common.env") | envfile.read(path)) == []


def test_names_that_resemble_a_known_one_are_no_problem() -> None:
    """Valid names of NCCL, libfabric and plugins that are not in the list."""
    valid = """
        NCCL_VERSION NCCL_HOME NCCL_ROOT_DIR NCCL_P2P_PXN_LEVEL NCCL_P2P_NET_CHUNKSIZE
        NCCL_NET_GDR_C2C NCCL_IB_ECE_ENABLE NCCL_SHM_LOCALITY NCCL_MIN_CTAS NCCL_NVLS_NCHANNELS
        NCCL_NET_MERGE_LEVEL NCCL_SOCKET_RETRY_CNT NCCL_GRAPH_DUMP_FILE TORCH_NCCL_PROPAGATE_ERROR
        TORCH_FR_CPP_STACK GLOO_DEVICE_TRANSPORT FI_EFA_TX_SIZE FI_CXI_RX_SIZE FI_LOG_PROV
        NCCL_GPUDIRECTTCPX_CTRL_DEV TESTS_DEVICE UCX_TLS
    """
    assert problems(dict.fromkeys(valid.split(), "1")) == []

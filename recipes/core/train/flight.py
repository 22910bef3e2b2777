"""The collective in which this rank is, according to torch's flight recorder. Not run with NCCL on
GPUs yet.
"""

import contextlib
import json
from typing import Any, cast

import torch.distributed

from recipes.core.errors import shown

DUMPS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
LONGEST = 100  # characters of the sizes of tensors


def collective(backend: str) -> str:
    """The first collective of this rank that is not complete, else its last one; "" if torch does
    not record it. Takes up to 0.5 s.
    """
    c10d = cast(Any, torch._C._distributed_c10d)
    with contextlib.suppress(Exception):  # not every version of torch has it
        return describe(json.loads(getattr(c10d, DUMPS[backend])()))
    return ""


def describe(record: dict[str, Any]) -> str:
    """`collective` of a flight record. Raises LookupError if it has none."""
    entries = record["entries"]
    active = [entry for entry in entries if not _is_complete(entry)]
    entry = (active or entries[-1:])[0]
    name = entry["profiling_name"].partition(":")[2]
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    sizes = shown(f"{entry['input_dtypes']} {entry['input_sizes']}", LONGEST)
    state = "completed" if _is_complete(entry) else entry["state"]
    return f"{name} {number} of group {entry['process_group'][0]} ({sizes}, {state})"


def _is_complete(entry: dict[str, Any]) -> bool:
    return bool(entry["retired"] or entry["state"] == "completed")

"""The command of a task for each value of ``through=``, and the variables that it gets. Standard
library only.
"""

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core import files
from recipes.core.errors import MachineError
from recipes.core.place import gpus
from recipes.core.place.ranks import RankInfo
from recipes.core.variables import Environ

HOOK = Path(__file__).parent / "hook"
# set for the wrappers of ranks that a launcher starts: the number of its task
TASK = "RECIPES_TASK"
# Without the first, accelerate forms no group on CPUs. Without the second, its device is cpu:0, on
# which the Trainer before transformers 5.18 cannot load its checkpoint.
OF_CPU = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}


@dataclass(frozen=True)
class Launch:
    """How a task starts the program. through: the value of the key. nproc: ranks that the launcher
    starts on each node.
    """

    through: str
    program: Sequence[str]
    extra: Sequence[str]
    nproc: int
    on_cpu: bool

    @property
    def has_launcher(self) -> bool:
        return self.through in ("torchrun", "accelerate")

    def command(self, info: RankInfo, words: Sequence[str]) -> list[str]:
        """The command of a task with a launcher. words: with which the launcher starts the wrapper
        of each rank.
        """
        python = [sys.executable, "-u", "-m"]
        # from the job's snapshot: this process has changed to the repository
        wrapper = ["env", "-C", str(files.ROOT), *python, "recipes.script", *words]
        address, port = variables_of_master(info).values()
        of_torchrun = self.extra if self.through == "torchrun" else ()
        torchrun = [
            *python,
            "torch.distributed.run",
            f"--nnodes={info.num_nodes}",
            f"--node-rank={info.node_rank}",
            f"--nproc-per-node={self.nproc}",
            "--rdzv-backend=static",
            f"--master-addr={address}",
            f"--master-port={port}",
            *of_torchrun,
            "--no-python",
            *wrapper,
        ]
        if self.through == "torchrun":
            return torchrun
        accelerate = [*python, "accelerate.commands.launch"]
        # accelerate starts one process there, so it only sets the variables of its configuration
        if self.on_cpu:
            alone = ["--cpu", "--num_machines=1", "--num_processes=1"]
            return [*accelerate, *alone, *self.extra, "--no_python", *torchrun]
        total = info.num_nodes * self.nproc
        # It would switch off the FSDP or DeepSpeed of the user's configuration (accelerate 1.15).
        is_default = not self.extra and not has_accelerate_config(os.environ)
        kind = ["--multi_gpu"] if total > 1 and is_default else []
        if info.num_nodes == 1:
            # A port in the command could be taken by another user. accelerate would then choose a
            # rendezvous that executes what it receives, with the only warning of that module
            # (accelerate 1.15).
            port = "0"
            ends = ["-W", "error::UserWarning:accelerate.utils.launch"]
            accelerate = [sys.executable, *ends, *accelerate[1:]]
        return [
            *accelerate,
            *kind,
            f"--num_machines={info.num_nodes}",
            f"--machine_rank={info.node_rank}",
            f"--num_processes={total}",
            f"--main_process_ip={address}",
            f"--main_process_port={port}",
            *self.extra,
            "--no_python",
            *wrapper,
        ]


def has_accelerate_config(environ: Environ) -> bool:
    """Whether the user has a default configuration, which ``accelerate config`` writes."""
    cache = environ.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(environ.get("HF_HOME", f"{cache}/huggingface")).expanduser()
    return any(
        (home / f"accelerate/default_config.{end}").exists() for end in ("yaml", "yml", "json")
    )


def nproc_here(nproc: int, on_cpu: bool) -> int:
    """The number of ranks that a launcher starts on this node: ``nproc``, else one per GPU. Raises
    MachineError.
    """
    if nproc or on_cpu:
        return nproc or 1
    seen = gpus.visible_gpus(os.environ)
    if not seen:
        raise MachineError(
            f"{socket.gethostname()}: sees no GPU: "
            "request GPUs, or give device=cpu nproc_per_node=N"
        )
    return seen


def free_port() -> int:
    """A free port of this machine, for a single rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def variables_of_master(info: RankInfo) -> dict[str, str]:
    """Where the ranks meet."""
    return {
        "MASTER_ADDR": info.master_addr or "127.0.0.1",
        "MASTER_PORT": str(info.master_port or free_port()),
    }


def variables_of_rank(info: RankInfo) -> dict[str, str]:
    """A rank's place under torchrun's names."""
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.local_world_size),
        "NODE_RANK": str(info.node_rank),
        "GROUP_RANK": str(info.node_rank),
        "GROUP_WORLD_SIZE": str(info.num_nodes),
        **variables_of_master(info),
    }


def variables_of_node(info: RankInfo, environ: Environ) -> dict[str, str]:
    """A node's place among the nodes of the job, for a program that starts its own ranks."""
    return {
        "NNODES": str(info.num_nodes),
        "NODE_RANK": str(info.node_rank),
        "NODES": " ".join(info.nodes or [socket.gethostname()]),
        "GPUS_PER_NODE": str(gpus.visible_gpus(environ)),
        **variables_of_master(info),
    }


def with_hook(environ: Environ) -> dict[str, str]:
    """``environ``, so that Python loads the hook, and ``scontrol`` is the hook's."""
    python_path = filter(None, [str(HOOK), environ.get("PYTHONPATH", "")])
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(python_path),
        "PATH": os.pathsep.join([str(HOOK / "bin"), environ.get("PATH", os.defpath)]),
    }

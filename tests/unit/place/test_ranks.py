from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.core.errors import ConfigError, shown
from recipes.core.launch import local
from recipes.core.place.ranks import RankInfo, detect, port_for
from recipes.core.slurm.hostlist import expand_counts


def env(text: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in text.split())


def step(
    rank: int,
    local_rank: int,
    node_rank: int,
    *,
    tasks: str = "2,1",
    job: int = 6,
    step_id: int = 0,
    more: str = "",
) -> dict[str, str]:
    """What a task of srun sees on Slurm 22.05, in a job on node1 and node2; `tasks` is as in
    SLURM_TASKS_PER_NODE.
    """
    counts = expand_counts(tasks)
    nodes = "node[1-2]" if len(counts) == 2 else "node1"
    return env(
        f"SLURM_JOB_ID={job} SLURM_JOB_NODELIST=node[1-2] SLURM_JOB_NUM_NODES=2 "
        f"SLURM_NNODES={len(counts)} SLURM_NTASKS={sum(counts)} SLURM_TASKS_PER_NODE={tasks} "
        f"SLURM_STEP_ID={step_id} SLURM_STEP_NODELIST={nodes} SLURM_STEP_NUM_NODES={len(counts)} "
        f"SLURM_STEP_NUM_TASKS={sum(counts)} SLURM_STEP_TASKS_PER_NODE={tasks} SLURM_PROCID={rank} "
        f"SLURM_LOCALID={local_rank} SLURM_NODEID={node_rank} SLURMD_NODENAME=node{node_rank + 1} "
        f"SLURM_DISTRIBUTION=block {more}"
    )


def info(
    rank: str,
    local: str,
    node: str,
    *,
    addr: str = "",
    port: int = 0,
    nodes: str = "",
    in_slurm: bool = False,
    run_id: str | None = None,
    restarts: int = 0,
) -> RankInfo:
    """rank, local and node as in 2/3: number 2 of 3."""
    (r, world), (lr, local_size), (n, num_nodes) = (
        map(int, pair.split("/")) for pair in (rank, local, node)
    )
    return RankInfo(
        r,
        lr,
        n,
        world,
        local_size,
        num_nodes,
        tuple(nodes.split()),
        addr,
        port,
        in_slurm,
        run_id,
        restarts,
    )


SALLOC = (
    "SLURM_JOB_ID=16 SLURM_JOB_NODELIST=node[1-2] SLURM_NNODES=2 SLURM_NTASKS=4 "
    "SLURM_TASKS_PER_NODE=2(x2)"
)
BATCH = f"{SALLOC} SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURMD_NODENAME=node1"
INTERACTIVE = (
    f"{BATCH} SLURM_STEP_ID=4294967290 SLURM_STEP_NODELIST=node1 SLURM_STEP_NUM_NODES=1 "
    "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1"
)
# Recorded on Slurm 26.05, where a batch script and the shell that salloc starts on a node have a
# step of one task.
BATCH_26 = f"{BATCH} SLURM_STEP_ID=-5 SLURM_STEPID=-5"
TORCHRUN = (
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 "
    "MASTER_ADDR=node1 MASTER_PORT=29400 TORCHELASTIC_RESTART_COUNT=0"
)
TORCHRUN_UNEVEN = (
    "RANK=8 WORLD_SIZE=10 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 "
    "MASTER_ADDR=node1 MASTER_PORT=29400 TORCHELASTIC_RESTART_COUNT=2"
)
# Open MPI 4.1, `mpirun -n 4` in a batch script on two nodes: node1's ranks are in the batch shell,
# node2's in the step of mpirun's daemon.
OMPI = "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=1262157825"
OMPI_0 = f"{BATCH} {OMPI} OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0"
OMPI_3 = (
    f"{OMPI} OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_RANK=1 SLURM_JOB_ID=16 SLURM_LOCALID=0 "
    "SLURM_NODEID=0 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_ID=1 SLURM_STEP_NODELIST=node2 "
    "SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 "
    "SLURM_TASKS_PER_NODE=1 SLURMD_NODENAME=node2"
)
ONE = info("0/1", "0/1", "0/1")
BOTH = "node1 node2"
IN_6: dict[str, Any] = {
    "addr": "node1",
    "port": 10504,
    "nodes": BOTH,
    "in_slurm": True,
    "run_id": "6",
}

CASES: dict[str, tuple[dict[str, str], RankInfo]] = {
    "nothing set": ({}, ONE),
    "one process with a master": (
        env("MASTER_ADDR=localhost MASTER_PORT=1234"),
        replace(ONE, master_addr="localhost", master_port=1234),
    ),
    # Slurm
    "uneven nodes, rank 2": (step(2, 0, 1), info("2/3", "0/1", "1/2", **IN_6)),
    "cyclic": (
        step(2, 1, 0, step_id=1, more="SLURM_DISTRIBUTION=cyclic"),
        info("2/3", "1/2", "0/2", **IN_6 | {"port": 10508, "run_id": "6.1"}),
    ),
    "arbitrary with an address": (
        step(0, 0, 1, more="MASTER_ADDR=node2"),
        info("0/3", "0/1", "1/2", **IN_6 | {"addr": "node2"}),
    ),
    "two steps side by side, the smaller": (
        step(0, 0, 0, tasks="1", job=1, step_id=2)
        | env("SLURM_NTASKS=4 SLURM_TASKS_PER_NODE=2(x2) SLURM_NNODES=2"),
        info("0/1", "0/1", "0/1", nodes="node1", in_slurm=True, run_id="1.2"),
    ),
    "array": (
        step(3, 1, 1, tasks="2(x2)", job=9, more="SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=3"),
        info(
            "3/4", "1/2", "1/2", addr="node1", port=10756, nodes=BOTH, in_slurm=True, run_id="7_3"
        ),
    ),
    "requeued": (
        step(3, 1, 1, tasks="2(x2)", job=21, more="SLURM_RESTART_COUNT=1"),
        info("3/4", "1/2", "1/2", **IN_6 | {"port": 11765, "run_id": "21", "restarts": 1}),
    ),
    "srun --mpi=pmi2": (
        step(1, 1, 0, more="PMI_RANK=1 PMI_SIZE=3 PMI_FD=13 PMI_JOBID=6.2"),
        info("1/3", "1/2", "0/2", **IN_6),
    ),
    "preset port": (
        step(2, 0, 1, more="MASTER_PORT=29500"),
        info("2/3", "0/1", "1/2", **IN_6 | {"port": 29500}),
    ),
    "preset IPv6 address in brackets": (
        step(2, 0, 1, more="MASTER_ADDR=[fd00::1]"),
        info("2/3", "0/1", "1/2", **IN_6 | {"addr": "fd00::1"}),
    ),
    "shell of salloc": (env(SALLOC), replace(ONE, in_slurm=True, run_id="16")),
    "interactive step of Slurm 26.05": (
        env(INTERACTIVE.replace("4294967290", "-6")),
        replace(ONE, in_slurm=True, run_id="16"),
    ),
    # RANK
    "torchrun": (env(TORCHRUN), info("3/4", "1/2", "1/2", addr="node1", port=29400)),
    "torchrun inside srun": (
        step(1, 0, 1, tasks="1(x2)", step_id=2) | env(TORCHRUN),
        info("3/4", "1/2", "1/2", addr="node1", port=29400, in_slurm=True, run_id="6.2"),
    ),
    "torchrun in the batch shell of Slurm 26.05": (
        env(f"{BATCH_26} {TORCHRUN}"),
        info("3/4", "1/2", "1/2", addr="node1", port=29400, in_slurm=True, run_id="16"),
    ),
    "requeues and torchrun's restarts add up": (
        env(f"{BATCH} {TORCHRUN_UNEVEN} SLURM_RESTART_COUNT=1"),
        info(
            "8/10", "0/2", "1/2", addr="node1", port=29400, in_slurm=True, run_id="16", restarts=3
        ),
    ),
    "by hand, equal nodes": (
        env("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=65535"),
        info("5/8", "1/4", "1/2", addr="a", port=65535),
    ),
    "by hand from the Slurm task's own numbers": (
        step(2, 0, 1, more="RANK=2 WORLD_SIZE=3 LOCAL_RANK=0 MASTER_ADDR=node1 MASTER_PORT=5000"),
        info("2/3", "0/1", "1/2", **IN_6 | {"port": 5000}),
    ),
    # MPI
    "mpirun on one machine": (
        env(
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
            "OMPI_COMM_WORLD_LOCAL_SIZE=2"
        ),
        info("1/2", "1/2", "0/1", addr="127.0.0.1", port=10000),
    ),
    "mpirun with an address of the user": (
        env(
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
            "OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=127.0.0.2 MASTER_PORT=4321"
        ),
        info("1/2", "1/2", "0/1", addr="127.0.0.2", port=4321),
    ),
    "mpirun of one": (env("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1"), ONE),
    "mpirun in a batch script, the shell's node": (
        env(f"{OMPI_0} MASTER_ADDR=node1 SLURM_RESTART_COUNT=1"),
        info("0/4", "0/2", "0/2", addr="node1", port=27637, in_slurm=True, run_id="16", restarts=1),
    ),
    "mpirun of one rank a node, the daemon's node": (
        env(
            f"{OMPI_3} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=0 "
            "OMPI_COMM_WORLD_LOCAL_SIZE=1 MASTER_ADDR=node1"
        ),
        info("1/2", "0/1", "1/2", addr="node1", port=27636, in_slurm=True, run_id="16"),
    ),
    "RANK inside mpirun": (
        env(f"{OMPI} OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 {TORCHRUN}"),
        info("3/4", "1/2", "1/2", addr="node1", port=29400),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rank_is_found_from_the_launchers_variables(case: str) -> None:
    environ, expected = CASES[case]
    assert detect(environ) == expected


STEP = step(2, 0, 1)
HAND = env("RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=2")

# The environment, and what the message has to name: variable, value and fix.
CONTRADICTIONS: list[tuple[dict[str, str], list[str]]] = [
    (env(BATCH), ["batch shell of job 16", "put `srun` in front"]),
    (env(f"{BATCH} SLURM_STEP_ID=4294967291"), ["batch shell", "put `srun` in front"]),
    (env(BATCH_26), ["batch shell of job 16", "put `srun` in front"]),
    *((STEP | {"SLURM_STEP_ID": bad}, [f"SLURM_STEP_ID={bad}"]) for bad in ("-0", "-17", "-5x")),
    (env("SLURM_PROCID=0 SLURM_NTASKS=2"), ["SLURM_PROCID=0", "SLURM_JOB_ID", "unset"]),
    # numbers
    *(
        (STEP | {"SLURM_PROCID": bad}, [f"SLURM_PROCID={shown(bad)}: "])
        for bad in ("", "-1", "1_0", "١", "1\n")
    ),
    (STEP | {"SLURM_PROCID": "9" * 5000}, ["SLURM_PROCID=999", "…"]),
    (STEP | {"SLURM_ARRAY_TASK_ID": "1"}, ["SLURM_ARRAY_JOB_ID is not set"]),
    # Slurm's layout
    *(
        (
            {key: value for key, value in STEP.items() if key != name},
            [f"{name} is not set: start the ranks with srun"],
        )
        for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    ),
    (STEP | {"SLURM_PROCID": "3"}, ["SLURM_PROCID=3", "less than 3 (SLURM_STEP_NUM_TASKS)"]),
    (STEP | {"SLURM_NODEID": "2"}, ["SLURM_NODEID=2", "less than 2 (the number of nodes)"]),
    (
        STEP | {"SLURM_LOCALID": "1"},
        ["SLURM_LOCALID=1", "less than 1 (SLURM_STEP_TASKS_PER_NODE of node 1)"],
    ),
    (
        STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
        ["SLURM_STEP_TASKS_PER_NODE=2(x2)", "4 tasks", "NUM_TASKS=3"],
    ),
    (
        STEP | {"SLURM_STEP_TASKS_PER_NODE": "1(x3)"},
        ["SLURM_STEP_TASKS_PER_NODE=1(x3)", "3 nodes", "node[1-2]"],
    ),
    (STEP | {"SLURM_STEP_NODELIST": "node[1-"}, ["SLURM_STEP_NODELIST", "'node[1-'"]),
    (STEP | {"SLURMD_NODENAME": "node1"}, ["SLURM_NODEID=1", "node2", "SLURMD_NODENAME=node1"]),
    (step(0, 0, 1), ["SLURM_NODEID=1", "rank 0 must be on the first node", "remove -m arbitrary"]),
    (STEP | {"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "3", "unset it"]),
    # the master
    *(
        (STEP | {"MASTER_PORT": bad}, [f"MASTER_PORT={bad}"])
        for bad in ("0", "65536", "-1", "29500x")
    ),
    *(
        (STEP | {"MASTER_ADDR": bad}, [f"MASTER_ADDR={bad}", "2 nodes", "unset it"])
        for bad in ("localhost", "127.0.1.1", "::1")
    ),
    # RANK
    (env("RANK=0"), ["WORLD_SIZE is not set"]),
    (env("WORLD_SIZE=4"), ["WORLD_SIZE=4", "must be 1", "unset it"]),
    (env("RANK=1 WORLD_SIZE=1"), ["RANK=1", "less than 1 (WORLD_SIZE)"]),
    (HAND | {"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "less than 2 (LOCAL_WORLD_SIZE)"]),
    (HAND | {"LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "RANK=1", "GROUP_RANK"]),
    (HAND | {"LOCAL_WORLD_SIZE": "3"}, ["LOCAL_WORLD_SIZE=3", "WORLD_SIZE=4", "GROUP_RANK"]),
    (HAND | {"GROUP_WORLD_SIZE": "3"}, ["GROUP_WORLD_SIZE=3"]),
    (HAND | {"GROUP_RANK": "0"}, ["GROUP_WORLD_SIZE is not set", "set it to the number of nodes"]),
    (
        env("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=2"),
        ["LOCAL_RANK is not set"],
    ),
    (
        env("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=2"),
        ["LOCAL_WORLD_SIZE is not set", "set it to the"],
    ),
    (
        STEP | env("RANK=1 WORLD_SIZE=3 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=2"),
        ["RANK=1", "must be 2", "unset it"],
    ),
    (
        env("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_PORT=2"),
        ["MASTER_ADDR is not set", "WORLD_SIZE=2"],
    ),
    (
        env("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=a"),
        ["MASTER_PORT is not set", "WORLD_SIZE=2"],
    ),
    # MPI
    (env(OMPI_0), ["MASTER_ADDR is not set", "WORLD_SIZE=4"]),
    (env("PMI_RANK=1 PMI_SIZE=2"), ["PMI_RANK=1", "srun"]),
]


@pytest.mark.parametrize(("environ", "named"), CONTRADICTIONS)
def test_contradictory_variables_are_refused_in_one_line(
    environ: dict[str, str], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(environ)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 400
    for part in named:
        assert part in message


def test_ports_of_neighbouring_jobs_steps_and_restarts_differ() -> None:
    for first in (0, 1, 22_740, 4_294_967_000):
        ports = [port_for(first + j, s, r) for j, s, r in product(range(51), range(21), range(4))]
        assert len(set(ports)) == len(ports)
    assert all(10_000 <= port_for(job, 0, 0) < 32_768 for job in range(1000))


def test_ranks_of_the_local_launcher_have_the_places_that_it_gave_them() -> None:
    counts = (1, 3, 2)
    places = [
        (node, local_rank) for node, count in enumerate(counts) for local_rank in range(count)
    ]
    layouts = [local.Layout(counts, node, "h", 29400) for node in range(len(counts))]
    infos = [
        detect(local.rank_environment(layouts[node], rank, 29400, {})) for node, rank in places
    ]
    assert [detected.rank for detected in infos] == list(range(6))
    for (node, local_rank), detected in zip(places, infos, strict=True):
        assert detected.node_rank == node
        assert detected.local_rank == local_rank
        assert detected.local_world_size == counts[node]
        assert detected.world_size == 6
        assert detected.num_nodes == 3
        assert detected.master_addr == "h"
        assert detected.master_port == 29400


def test_a_rank_that_fails_on_a_later_machine_has_its_number_among_all() -> None:
    ended: Any = [SimpleNamespace(returncode=0), SimpleNamespace(returncode=1)]
    stop: Any = SimpleNamespace(count=0)
    end = local._end(ended, 1, None, stop, local.Layout((3, 2), node_rank=1))
    assert end.first is not None
    assert end.first["rank"] == 4

"""The memory limit of a task and the kernel's kills, as cgroups of both versions show them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from recipes.core.place import memory

JOB_1 = "sys/fs/cgroup/memory/slurm/job_7"
V1 = {
    "proc/self/cgroup": "9:cpuset:/other\n4:memory:/slurm/job_7/step_0/task_1\n",
    f"{JOB_1}/memory.limit_in_bytes": "3000000000",
    f"{JOB_1}/step_0/memory.limit_in_bytes": "2000000000",
    f"{JOB_1}/step_0/task_0/memory.max_usage_in_bytes": "1500000000",
    f"{JOB_1}/step_0/task_1/memory.max_usage_in_bytes": "400000000",
    f"{JOB_1}/step_0/task_1/memory.limit_in_bytes": "9223372036854771712",
    f"{JOB_1}/step_0/task_1/memory.oom_control": "under_oom 0\noom_kill 2\n",
}
V2 = {
    "proc/self/cgroup": "0::/slurm/job_7/step_0/task_1\n",
    "sys/fs/cgroup/slurm/job_7/memory.max": "2000000000",
    "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max",
    "sys/fs/cgroup/slurm/job_7/step_0/task_0/memory.peak": "1500000000",
    "sys/fs/cgroup/slurm/job_7/step_0/task_1/memory.peak": "400000000",
    "sys/fs/cgroup/slurm/job_7/step_0/task_1/memory.events": "max 5\noom 3\noom_kill 2\n",
    "sys/fs/cgroup/slurm/job_7/step_0/task_special/memory.peak": "4096",
    "sys/fs/cgroup/slurm/job_7/step_0/task_special/memory.events": "max 0\noom 0\noom_kill 0\n",
}


def make(root: Path, content: dict[str, str]) -> Path:
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("content", [V1, V2], ids=["v1", "v2"])
def test_the_lowest_limit_and_the_largest_rank_are_described(
    tmp_path: Path, content: dict[str, str]
) -> None:
    """The killed rank, here rank 5, need not be the largest one."""
    cgroup = memory.own_cgroup(make(tmp_path, content))
    assert memory.count_kills(cgroup) == 2
    killed, peak = memory.Memory(cgroup, 1).describe(rank=5).split("; ")
    assert killed == "was killed since its limit of 2000.0 MB was used up"
    assert peak == "peak memory: rank 4 1500.0 MB, rank 5 400.0 MB"


def test_a_node_without_limits_has_only_its_own_memory(tmp_path: Path) -> None:
    """cgroup v1 then shows a number."""
    content = {name: "9223372036854771712" if "limit" in name else V1[name] for name in V1}
    line = memory.Memory(memory.own_cgroup(make(tmp_path, content)), 1).describe(rank=5)
    assert line.startswith("was killed since the memory of its node was used up; peak memory: rank")


def test_tasks_may_be_numbered_over_all_nodes(tmp_path: Path) -> None:
    """As Slurm 26.05 does."""
    content = {
        name.replace("task_0", "task_4").replace("task_1", "task_5"): text
        for name, text in (V2 | {"proc/self/cgroup": "0::/slurm/job_7/step_0/task_5\n"}).items()
    }
    line = memory.Memory(memory.own_cgroup(make(tmp_path, content)), 1).describe(rank=5)
    assert line.endswith("; peak memory: rank 4 1500.0 MB, rank 5 400.0 MB")


def test_tasks_that_are_not_ranks_have_their_own_numbers(tmp_path: Path) -> None:
    cgroup = memory.own_cgroup(make(tmp_path, V2))
    line = memory.Memory(cgroup, 1).describe()
    assert line.endswith("; peak memory: task 0 1500.0 MB, task 1 400.0 MB")
    line = memory.Memory(cgroup.with_name("task_0"), 0).describe(rank=0)
    assert line.endswith("; peak memory: rank 0 1500.0 MB, rank 1 400.0 MB")


def test_a_process_of_no_task_has_no_number(tmp_path: Path) -> None:
    """Such as one that mpirun has started over ssh."""
    content = V2 | {"proc/self/cgroup": "0::/slurm/job_7/step_0/task_special\n"}
    line = memory.Memory(memory.own_cgroup(make(tmp_path, content)), 0).describe(rank=5)
    assert line.endswith("; peak memory: task 0 1500.0 MB, task 1 400.0 MB")


def test_only_kills_since_the_start_count(tmp_path: Path) -> None:
    cgroup = memory.own_cgroup(make(tmp_path, V2))
    assert [memory.Memory(cgroup, kills).is_exceeded for kills in (1, 2)] == [True, False]


def test_an_event_is_reported_once(tmp_path: Path) -> None:
    """A watchdog waits for the next one, and does not look hundreds of times a second."""
    # another file of the kernel that reports its changes as a cgroup of version 2 does
    (tmp_path / "memory.events").symlink_to("/sys/class/net/lo/operstate")
    events = memory.Memory(tmp_path, 0).events()
    next(events)  # until it is read, a file reports an event
    waiting = threading.Thread(target=next, args=(events,), daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()


def test_without_a_cgroup_nothing_is_known(tmp_path: Path) -> None:
    assert memory.own_cgroup(make(tmp_path, {"proc/self/cgroup": V2["proc/self/cgroup"]})) is None
    unknown = memory.Memory(None, 0)
    assert not unknown.is_exceeded
    assert unknown.describe(2) == "was killed since the memory of its node was used up"

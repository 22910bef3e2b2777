"""Each check of a node, on surroundings with one fault."""

from __future__ import annotations

import itertools
import json
import resource
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.core.doctor import commands, probes
from recipes.core.doctor.probes import Surroundings
from recipes.core.doctor.verdict import Finding
from recipes.core.place import network, ranks

ALONE = ranks.detect({})
TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "one,two",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_NODELIST": "one,two",
}


def here(
    tmp_path: Path,
    info: ranks.RankInfo = ALONE,
    root: str = "/",
    data_dir: str = "",
    **environ: str,
) -> Surroundings:
    return Surroundings(environ, info, tmp_path, data_dir, True, Path(root))


def findings(check: probes.Check, surroundings: Surroundings) -> list[Finding]:
    return probes._run(check, surroundings)[1]


def only(check: probes.Check, surroundings: Surroundings) -> Finding:
    """The only finding of a check."""
    (finding,) = findings(check, surroundings)
    assert finding.fix
    return finding


def test_this_machine_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = commands.run

    def quick(command: Sequence[str], timeout_s: float) -> tuple[str, str]:
        if "versions" in command:
            return '{"torch": "2.15.0", "nccl": null}', ""
        return ask(command, timeout_s)

    monkeypatch.setattr(commands, "run", quick)
    facts, _ = probes.run_all(here(tmp_path), 60)
    assert facts["torch"]
    assert facts["interface"] == "lo"


def test_a_check_that_hangs_or_breaks_costs_no_other_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(_: Surroundings, facts: probes.Facts) -> list[Finding]:
        time.sleep(5)
        raise AssertionError

    def breaks(_: Surroundings, facts: probes.Facts) -> list[Finding]:
        raise RuntimeError("no such thing")

    def works(_: Surroundings, facts: probes.Facts) -> list[Finding]:
        facts["a"] = 1
        return []

    checks = {"hangs": hangs, "hangs too": hangs, "breaks": breaks, "works": works}
    monkeypatch.setattr(probes, "CHECKS", checks)
    begin = time.monotonic()
    facts, problems = probes.run_all(here(tmp_path), 0.5)
    assert time.monotonic() - begin < 3
    assert [(finding.what, finding.bad) for finding in problems] == [
        ("the check of the hangs did not end in 0.5 s", True),
        ("the check of the hangs too did not end in 0.5 s", True),
        ("the check of the breaks failed (RuntimeError: no such thing)", False),
    ]
    assert facts == {"a": 1}


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = f"{tmp_path}/none"
    finding = only(probes.disks, here(tmp_path, data_dir=none))
    assert finding.what == f"data_dir={none} cannot be used (No such file or directory)"
    assert finding.bad
    # It may be the node's fault or a mistyped key, which a node alone cannot tell.
    assert not finding.leave_out
    assert only(probes.disks, here(tmp_path, ranks.detect(TASK), data_dir=none)).leave_out
    finding = only(probes.disks, here(tmp_path, TMPDIR=none))
    assert finding.what == f"TMPDIR={none} cannot be used (No such file or directory)"
    unset = findings(probes.disks, here(tmp_path, TMPDIR=""))
    assert not any("TMPDIR" in finding.what for finding in unset)
    monkeypatch.setattr(commands, "run", lambda command, timeout_s: ("", "it hangs"))
    shared, *typed = findings(probes.disks, here(tmp_path, data_dir=none))
    assert shared.leave_out  # nobody has typed /dev/shm
    assert not any(finding.leave_out for finding in typed)


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (1 << 30, []),
        (1000 << 20, [("/dev/shm has 1048.6 MB free", False)]),
        (64 << 20, [("/dev/shm has 67.1 MB free", False)]),
        (40 << 20, [("/dev/shm has 41.9 MB free", True)]),
    ],
)
def test_shared_memory_that_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, expected: list[tuple[str, bool]]
) -> None:
    asked = {}

    def ask(command: Sequence[str], timeout_s: float) -> tuple[str, str]:
        folder, asked[folder] = command[-2:]
        return json.dumps(free if folder == "/dev/shm" else 0), ""

    monkeypatch.setattr(commands, "run", ask)
    of_disks = findings(probes.disks, here(tmp_path, data_dir="/data", TMPDIR="/scratch"))
    assert [(finding.what, finding.bad) for finding in of_disks] == expected
    assert asked == {
        "/dev/shm": "write",
        str(tmp_path): "write",
        "/scratch": "write",
        "/data": "read",
    }


def test_torch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        commands, "run", lambda command, timeout_s: ('warning\n{"nccl": null}\n', "")
    )
    assert probes._run(probes.torch_import, here(tmp_path)) == ({"nccl": None}, [])
    monkeypatch.setattr(commands, "run", lambda command, timeout_s: ("", "No module named torch"))
    finding = only(probes.torch_import, here(tmp_path, ranks.detect(TASK)))
    assert finding.what == "torch cannot be imported there (No module named torch)"
    assert finding.bad is True
    assert finding.leave_out
    # alone it may be the wrong environment
    assert not only(probes.torch_import, here(tmp_path)).leave_out


def test_versions_of_nccl_that_can_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "run", lambda command, timeout_s: ('{"nccl": "2.28.7"}', ""))
    finding = only(probes.torch_import, here(tmp_path))
    assert finding.what == "NCCL 2.28.7 can hang in large jobs"
    assert finding.bad is False
    assert finding.fix == "use a torch with NCCL 2.28.9 or later"
    pairs = itertools.product(("2.28.3", "2.28.9", "2.29.2", "2.29.3", ""), ("x86_64", "aarch64"))
    hang = [(nccl, machine) for nccl, machine in pairs if list(probes.known_hangs(nccl, machine))]
    assert hang == [("2.28.3", "x86_64"), ("2.28.3", "aarch64"), ("2.29.2", "aarch64")]


def test_a_file_system_that_does_not_answer_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin = time.monotonic()
    out, wrong = commands.run(["sh", "-c", "echo so far; sleep 30"], 2)
    assert time.monotonic() - begin < 5
    assert out == "so far\n"
    assert wrong == "sh did not answer in 2 s"
    assert commands.run(["/none/such"], 1) == ("", "/none/such: No such file or directory")
    assert commands.run(["sh", "-c", "echo why >&2; exit 3"], 5) == ("", "why")


def test_a_name_that_does_not_resolve_is_not_fixed_by_an_interface(tmp_path: Path) -> None:
    two = replace(ranks.detect(TASK), nodes=("one", "no-such.invalid"))
    for name, state in (("eth0", "down"), ("eth1", "up")):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "operstate").write_text(f"{state}\n")
    finding = only(probes.interfaces, here(tmp_path, two, root=str(tmp_path)))
    assert "cannot resolve no-such.invalid (" in finding.what
    assert finding.what.endswith("; interfaces that are down: eth0")
    assert finding.fix.startswith("add the name to DNS, or to /etc/hosts on each node")


def test_an_interface_that_was_set_and_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = network.Choice("eth1", "10.0.0.1", "two", "route to two")
    monkeypatch.setattr(network, "choose", lambda info: chosen)
    two = ranks.detect(TASK)
    assert probes._run(probes.interfaces, here(tmp_path, two)) == ({"interface": "eth1"}, [])
    for value in ("eth1", "=eth1", "eth", "^docker,lo", "eth0,eth1"):
        assert findings(probes.interfaces, here(tmp_path, two, NCCL_SOCKET_IFNAME=value)) == []
    for name, value in (
        ("NCCL_SOCKET_IFNAME", "eth0"),
        ("NCCL_SOCKET_IFNAME", "^eth"),
        ("GLOO_SOCKET_IFNAME", "eth9"),
    ):
        finding = only(probes.interfaces, here(tmp_path, two, **{name: value}))
        assert finding.what == f"{name}={value}, but the route to two uses eth1"
    # alone it has no peer
    assert findings(probes.interfaces, here(tmp_path, NCCL_SOCKET_IFNAME="eth0")) == []


def test_a_faster_interface_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = network.Choice("eth1", "10.0.0.1", "two", "route to two")
    monkeypatch.setattr(network, "choose", lambda info: chosen)
    for name, speed, state, is_card in (
        ("eth1", "1000", "up", True),
        ("eth2", "25000", "up", True),
        ("eth3", "100000", "down", True),
        ("docker0", "40000", "up", False),
    ):
        folder = tmp_path / "sys/class/net" / name
        (folder / "device" if is_card else folder).mkdir(parents=True)
        (folder / "speed").write_text(f"{speed}\n")
        (folder / "operstate").write_text(f"{state}\n")
    of_two = here(tmp_path, ranks.detect(TASK), root=str(tmp_path))
    finding = only(probes.interfaces, of_two)
    assert finding.what == "the ranks use eth1 with 1000 Mbit/s, but eth2 has 25000 Mbit/s"
    assert finding.bad is False
    assert "NCCL_SOCKET_IFNAME=eth2" in finding.fix
    (tmp_path / "sys/class/net/eth1/speed").write_text("-1\n")  # unknown
    assert findings(probes.interfaces, of_two) == []
    (tmp_path / "sys/class/net/eth1/speed").write_text("1000\n")
    # which NCCL uses instead
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    assert findings(probes.interfaces, replace(of_two, on_cpu=False)) == []


def test_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [1000 << 20, resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits[0], resource.RLIM_INFINITY))
    on_gpus = replace(here(tmp_path, ranks.detect(TASK), root=str(tmp_path)), on_cpu=False)
    assert findings(probes.infiniband, on_gpus) == []
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        folder = tmp_path / f"sys/class/infiniband/{device}/ports/1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
    down, locked = findings(probes.infiniband, on_gpus)
    assert down.what == "InfiniBand port mlx5_1:1 is DOWN"
    assert down.bad is False
    limited = "locked memory is limited to 1024000 KB, but RDMA must lock the memory that it sends"
    assert locked.what == limited
    assert locked.bad is True
    _, locked = findings(probes.infiniband, replace(on_gpus, info=ALONE))
    assert not locked.bad
    limits.pop(0)
    assert findings(probes.infiniband, on_gpus) == [down]
    assert down.fix.endswith("NCCL_IB_HCA=^mlx5_1:1")
    for unused in (
        replace(on_gpus, environ={"NCCL_IB_DISABLE": "1"}),
        replace(on_gpus, on_cpu=True),
    ):
        assert findings(probes.infiniband, unused) == []

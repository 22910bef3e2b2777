"""A real Slurm cluster on this one machine: munged, slurmctld and N slurmd, for tests and for
trying things out.

    # then sinfo, sbatch, salloc, srun
    eval "$(sudo python tests/slurm/cluster.py up --nodes 2 --gpus 8)"
    sudo python tests/slurm/cluster.py down

For programs, each node is a separate host: it has its own network, host name, process, mount, IPC
and cgroup namespaces, and its own /etc/hosts, /etc/slurm, /sys and /dev/shm. The nodes share the
rest of the file system, as nodes of a cluster share a parallel file system. GPUs are device nodes
without a driver: Slurm hands them out, nothing can compute on them. Jobs are tracked and confined
by cgroups, as at most sites: to their cores, their memory and their GPUs. A node poses as one of
CPUS cores. Slurm maps them to the cores that this machine has, so several jobs may have the same
one. The login side is this machine itself: a cable (a veth pair) joins it to the nodes' switch (a
bridge in a namespace).

Everything lies in one folder, and everything that runs is a descendant of one keeper process in a
process namespace that dies with it; the keeper dies with whoever asked for the cluster. The
machine's own /etc is never touched.

Needs root and Slurm's packages, see missing(). Runs with Slurm 22.05, 24.11 and 26.05 (`make
portability`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import ipaddress
import itertools
import json
import os
import random
import re
import resource
import secrets
import select
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# not $TMPDIR: a unix socket's path has 107 characters, and ordinary users must get through
BASE = Path("/tmp")
PREFIX = "slurm-test-"
PACKAGES = "slurmctld slurmd slurm-client munge iproute2"
PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "scontrol",
    "sinfo",
    "srun",
    "ip",
    "unshare",
    "nsenter",
    "setpriv",
    "bash",
)
CONTROLLER = "slurmctl"
SLURMD_PORT = 6818
CPUS = 64  # of a node
MEMORY_PER_CPU_MB = 2000
# for local use (Linux's list of devices): no driver has it, and cgroups tell the minors apart
GPU_MAJOR = 60
CGROUPS = Path("/sys/fs/cgroup")
# of cgroup v1: those that Slurm uses
CONTROLLERS = (
    "cpuset",
    "cpuacct",
    "memory",
    "devices",
    "freezer",
)
DOCKER0 = "172.17.0.1/16"
UP_TIMEOUT_S = 30.0
# time for a killed process to end: a large one needs CPU time to release its memory
KILLED_S = 30.0
FINAL_STATES = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    ]
)


class ClusterError(RuntimeError):
    """The cluster could not be brought up, or something asked of it did not happen in time."""


@dataclass(frozen=True)
class ClusterOptions:
    nodes: int = 2
    gpus: tuple[int, ...] | int = 8  # one number for all nodes, or one a node
    kill_wait_s: int = 5
    slurmd_timeout_s: int = 20
    # no cgroups: jobs are tracked by their processes' parents, and not confined
    linuxproc: bool = False
    preempt: bool = False  # partition `high` preempts `main` by requeue
    accounting: bool = False  # starts slurmdbd and a private MariaDB, which sacct needs
    topology: str = ""  # topology.conf, for a TopologyPlugin in extra_conf
    # lines for slurm.conf; one with the key (and name) of a line written here replaces it
    extra_conf: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 64:
            raise ValueError(f"nodes={self.nodes}: give 1 to 64")
        counts = self.gpus_per_node
        if len(counts) != self.nodes or min(counts) < 0:
            raise ValueError(
                f"gpus={self.gpus}: give one count, or one for each of the {self.nodes} nodes"
            )

    @property
    def gpus_per_node(self) -> tuple[int, ...]:
        return (self.gpus,) * self.nodes if isinstance(self.gpus, int) else tuple(self.gpus)


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    address6: str  # "" without IPv6
    gpus: int
    # of its first process, as this machine sees it: /proc/PID/ns/* are the node's namespaces
    pid: int


@dataclass(frozen=True)
class Process:
    node: str
    pid: int  # as this machine sees it, fit for os.kill
    command: str


def missing() -> str | None:
    """None if a cluster can be started here, else one line with what is missing and how to fix
    it.
    """
    if not sys.platform.startswith("linux"):
        return f"a Slurm cluster on one machine needs Linux's namespaces, this is {sys.platform}"
    absent = [name for name in PROGRAMS if not _which(name)]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install {PACKAGES}"
    if os.geteuid() != 0:
        return "a Slurm cluster on one machine needs root: run with sudo"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
    )
    if probe.returncode:
        return (
            f"no new namespaces here ({probe.stderr.strip()}): in a container, start it with "
            "--privileged"
        )
    return None


def cgroups_missing() -> str | None:
    """None if the nodes can have cgroups, which need the hierarchies of cgroup v1. Else one line
    with what is missing.

    Without cgroups, a cluster is as with `linuxproc`.
    """
    absent = [name for name in CONTROLLERS if not (CGROUPS / name / "cgroup.procs").exists()]
    return (
        f"no cgroup v1 here: {CGROUPS} has no hierarchy for {', '.join(absent)}" if absent else None
    )


# --- what is the same inside and outside of the keeper
# ---------------------------------------------------------------


def accounting_missing() -> str | None:
    """None if a cluster can have accounting here, else one line with what is missing and how to
    install it.
    """
    absent = [
        name for name in ("slurmdbd", "mariadbd", "mariadb-install-db", "sacct") if not _which(name)
    ]
    return (
        f"{', '.join(absent)} not found: apt-get install slurmdbd mariadb-server"
        if absent
        else None
    )


def _which(program: str) -> str | None:
    return shutil.which(
        program, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
    )


def _start_time(pid: int) -> int | None:
    """Clock ticks after boot at which the process began; None when there is none, or only its
    zombie.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _has_ended(pid: int, began: int | None) -> bool:
    """Whether the process that began then is gone; another one may have its ID."""
    return _start_time(pid) != began


def _processes() -> Iterator[tuple[int, int]]:
    """(process id, parent's process id) of all there are."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                yield int(entry), int(fields[1])


def _wait_until(
    condition: Callable[[], object], timeout_s: float, awaited: str, log: Path | None = None
) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise ClusterError(f"{awaited} not within {timeout_s:g} s" + _tail(log))
        time.sleep(0.05)


def _tail(log: Path | None, lines: int = 15) -> str:
    if log is None:
        return ""
    text = log.read_text(errors="replace") if log.exists() else "(no such file)"
    return f"; the end of {log}:\n" + "\n".join(text.splitlines()[-lines:])


# Moves the shell to cgroups, whose files cgroup.procs $1 names. It then becomes the command that
# follows.
_JOIN = 'for procs in $1; do echo $$ > "$procs"; done; shift; exec "$@"'


def _inside(pid: int, network: bool = True) -> list[str]:
    """What to put before a command, so that it runs in the namespaces and the cgroups of the host
    with this first process.
    """
    flags = ["--mount", "--uts", "--pid", "--ipc", "--cgroup"] + (["--net"] if network else [])
    argv = ["nsenter", f"--target={pid}", *flags, "--"]
    if os.stat(f"/proc/{pid}/ns/cgroup").st_ino == os.stat("/proc/self/ns/cgroup").st_ino:
        return argv
    return [*argv, "sh", "-c", _JOIN, "join", f"{CGROUPS}/*/cgroup.procs"]


def _own_cgroup(controller: str) -> Path:
    """The cgroup of this process in a hierarchy of cgroup v1; the root of what is mounted if it is
    outside of that.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        cgroup = CGROUPS / controller / path.lstrip("/")
        if controller in controllers.split(",") and cgroup.is_dir():
            return cgroup
    return CGROUPS / controller


def _remove_cgroup(cgroup: Path) -> bool:
    """Removes a cgroup and those in it. Returns whether it is gone: it stays for a moment after its
    last process has ended.
    """
    for folder, _, _ in os.walk(cgroup, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    return not cgroup.exists()


def _client_env(conf: Path) -> dict[str, str]:
    """This process's environment without the variables of an outer allocation and of this
    project.
    """
    dropped = ("SLURM_", "SRUN_", "SBATCH_", "SALLOC_", "RECIPES_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    kept["PATH"] = kept.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"
    return kept | {"SLURM_CONF": str(conf)}


def _start_slurmd(root: Path, node: Node) -> None:
    conf = root / "etc/slurm.conf"
    log = root / f"log/slurmd-{node.name}.log"
    _daemon([*_inside(node.pid), "slurmd", "-N", node.name, "-f", str(conf)], conf, log)


def _daemon(argv: Sequence[str], conf: Path, log: Path) -> None:
    """Start a program that goes into the background by itself."""
    with log.open("ab") as out:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=_client_env(conf),
            cwd="/",
            timeout=UP_TIMEOUT_S,
        )
    if done.returncode:
        raise ClusterError(f"{shlex.join(argv)}: exit status {done.returncode}" + _tail(log))


def _idle(conf: Path, names: Sequence[str]) -> bool:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%N %t", "-n", ",".join(names)],
        capture_output=True,
        text=True,
        env=_client_env(conf),
        timeout=UP_TIMEOUT_S,
    )
    states = dict(line.split() for line in done.stdout.splitlines())
    return all(states.get(name) in ("idle", "mix", "alloc") for name in names)


# --- what a test holds
# ------------------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """A running cluster, read from its folder; any process of root can make one by
    Cluster(root).
    """

    root: Path
    options: ClusterOptions = field(init=False)
    nodes: list[Node] = field(init=False)
    _state: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._state = json.loads((self.root / "state.json").read_text())
        self.options = _options(self._state["options"])
        self.nodes = [Node(**each) for each in self._state["nodes"]]

    @property
    def conf(self) -> Path:
        return self.root / "etc/slurm.conf"

    @property
    def login_address(self) -> str:
        return str(self._state["login"])

    @property
    def env(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return {"SLURM_CONF": str(self.conf)}

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def run(self, *argv: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the login side; the keywords are subprocess.run's, `env` is added to the
        environment.
        """
        return self._run([str(each) for each in argv], **kwargs)

    def on_node(
        self, name: str, *argv: str | Path, **kwargs: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root inside a node, in `/`: what a rank there would see, but outside of
        any job.
        """
        return self._run([*_inside(self.node(name).pid), *(str(each) for each in argv)], **kwargs)

    def _run(self, argv: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        env = _client_env(self.conf) | kwargs.pop("env", {})
        defaults: dict[str, Any] = {"text": True, "timeout": 60, "stdin": subprocess.DEVNULL}
        if "input" in kwargs:
            del defaults["stdin"]
        if not {"stdout", "stderr", "capture_output"} & kwargs.keys():
            defaults["capture_output"] = True
        return subprocess.run(argv, env=env, **(defaults | kwargs))

    def submit(self, *argv: str | Path, **kwargs: Any) -> str:
        """sbatch with these arguments; the new job's id. Raises ClusterError with sbatch's message
        when refused.
        """
        done = self.run("sbatch", "--parsable", *argv, **kwargs)
        if done.returncode:
            raise ClusterError(done.stderr.strip())
        return done.stdout.strip().split(";")[0]

    def jobs(self, job_id: str | int) -> list[dict[str, str]]:
        """What `scontrol show job` knows, one mapping a job (an array or a heterogeneous job has
        several).
        """
        for _ in range(3):  # a controller on a busy machine may not answer in time
            done = self.run("scontrol", "--oneliner", "show", "job", str(job_id))
            if not re.search("timed out|Unable to contact", done.stderr):
                break
        if done.returncode:
            raise ClusterError(f"job {job_id}: {done.stderr.strip()}")
        lines = [line.split() for line in done.stdout.splitlines() if line]
        return [dict(word.split("=", 1) for word in words if "=" in word) for words in lines]

    def wait_job(self, job_id: str | int, timeout_s: float = 30) -> str:
        """Wait for a job's end; its state (`COMPLETED`, `FAILED`, …), of several tasks the first
        that is no success.
        """
        states: list[str] = []

        def ended() -> bool:
            states[:] = [job["JobState"] for job in self.jobs(job_id)]
            return all(state in FINAL_STATES for state in states)

        try:
            _wait_until(ended, timeout_s, f"the end of job {job_id}")
        except ClusterError as error:
            raise ClusterError(f"{error}: {', '.join(states)}") from None
        return next((state for state in states if state != "COMPLETED"), "COMPLETED")

    def wait_running(self, job_id: str | int, timeout_s: float = 30) -> None:
        _wait_until(
            lambda: self.jobs(job_id)[0]["JobState"] == "RUNNING",
            timeout_s,
            f"the start of job {job_id}",
        )

    def wait_idle(self, timeout_s: float = 30, names: Sequence[str] = ()) -> None:
        """Wait until the nodes (all, or these) can take a job."""
        wanted = names or [node.name for node in self.nodes]
        log = self.root / "log/slurmctld.log"
        _wait_until(lambda: _idle(self.conf, wanted), timeout_s, f"{', '.join(wanted)} ready", log)

    def processes(self, node: str = "", command: str = "", job_id: str | int = "") -> list[Process]:
        """The processes in the nodes (all, or one), whose command line holds `command`, in the job
        `job_id`.

        Slurm's own daemons and the node's first process are there too, unless a command or a job is
        given.
        """
        names = {
            os.stat(f"/proc/{each.pid}/ns/pid").st_ino: each.name
            for each in self.nodes
            if _start_time(each.pid)
        }
        processes = []
        for pid, _ in _processes():
            try:
                name = names.get(os.stat(f"/proc/{pid}/ns/pid").st_ino)
                line = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
                if not name or not line or (node and node != name) or command not in line:
                    continue
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if job_id else []
                if job_id and f"SLURM_JOB_ID={job_id}".encode() not in environ:
                    continue
            except OSError:
                continue  # it ended while we looked
            processes.append(Process(name, pid, line))
        return processes

    # faults

    def kill_slurmd(self, name: str) -> None:
        """Only the daemon dies; the node's tasks go on."""
        for process in self._slurmd(name):
            os.kill(process.pid, signal.SIGKILL)
        _wait_until(lambda: not self._slurmd(name), KILLED_S, f"end of slurmd on {name}")

    def _slurmd(self, name: str) -> list[Process]:
        return [p for p in self.processes(node=name) if Path(p.command.split()[0]).name == "slurmd"]

    def kill_node(self, name: str) -> None:
        """The node dies: its network first, so that nobody there can report it, then all its
        processes.

        Slurm takes some 30 s to find out; slurmd_timeout_s=6 with extra_conf="MessageTimeout=6"
        makes that less.
        """
        self.cut_network(name)
        first = self.node(name).pid
        pids = [process.pid for process in self.processes(node=name) if process.pid != first]
        before = [(pid, _start_time(pid)) for pid in pids]
        # in its process namespace: all but its first process
        self.on_node(name, "bash", "-c", "kill -KILL -1")
        _wait_until(
            lambda: all(_has_ended(pid, began) for pid, began in before),
            KILLED_S,
            f"the death of {name}",
        )

    def restart_slurmd(self, name: str, timeout_s: float = 30) -> None:
        """Bring back what kill_slurmd or kill_node took down, and wait until the node can take a
        job.
        """
        self.join_network(name)
        if not self._slurmd(name):
            began = time.strftime("%Y-%m-%dT%H:%M:%S")
            _start_slurmd(self.root, self.node(name))
            # the controller may still hold the dead daemon for well
            log = self.root / f"log/slurmd-{name}.log"
            _wait_until(
                lambda: self._slurmd_start(name) >= began, timeout_s, f"registration of {name}", log
            )
        self.wait_idle(timeout_s, [name])

    def _slurmd_start(self, name: str) -> str:
        words = self.run("scontrol", "show", "node", name).stdout.split()
        return next(
            (
                word.removeprefix("SlurmdStartTime=")
                for word in words
                if word.startswith("SlurmdStart")
            ),
            "",
        )

    def cut_network(self, name: str) -> None:
        """Pull the node's cable out of the switch."""
        self._switch("link", "set", name, "down")

    def join_network(self, name: str) -> None:
        self._switch("link", "set", name, "up")

    def _switch(self, *argv: str) -> None:
        self._run(
            ["nsenter", f"--target={self._state['switch']}", "--net", "--", "ip", *argv], check=True
        )

    def down(self) -> None:
        """Take all of it down and remove its folder; nothing happens where it is down already."""
        take_down(self.root)


def start(options: ClusterOptions | None = None, owner: int | None = None) -> Cluster:
    """Bring a cluster up. It goes down with the process `owner`, or stays until down() when that is
    None.

    Raises ClusterError with the end of the log of the daemon that did not come up.
    """
    reason = missing()
    if reason:
        raise ClusterError(reason)
    options = options or ClusterOptions()
    root = make_root()
    argv = [
        sys.executable,
        str(Path(__file__).resolve()),
        "_keep",
        str(root),
        json.dumps(asdict(options)),
    ]
    owner_fd = -1 if owner is None else os.pidfd_open(owner)
    try:
        # not our stderr: who captures it would wait for the keeper's end
        with (root / "keeper.log").open("wb") as log:
            keeper = subprocess.Popen(
                [*argv, str(owner_fd)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd="/",
                pass_fds=() if owner is None else (owner_fd,),
                start_new_session=True,
            )
    finally:
        if owner is not None:
            os.close(owner_fd)
    assert keeper.stdout is not None
    with keeper.stdout:
        answered = select.select([keeper.stdout], [], [], 2 * UP_TIMEOUT_S)[0]
        answer = (
            keeper.stdout.read().strip()
            if answered
            else f"no cluster within {2 * UP_TIMEOUT_S:g} s"
        )
    if answer != "ready":
        answer = answer or "the keeper died while it started the cluster" + _tail(
            root / "keeper.log"
        )
        keeper.kill()
        keeper.wait(KILLED_S)
        take_down(root)
        raise ClusterError(answer)
    _KEEPERS[keeper.pid] = keeper
    return Cluster(root)


def make_root() -> Path:
    """A new cluster's folder, named after the session of tests that it belongs to, if any (see
    tests/guardian.py).
    """
    mark, _ = resource.getrlimit(resource.RLIMIT_RSS)
    session = "" if mark == resource.RLIM_INFINITY else f"{mark}_"
    root = Path(tempfile.mkdtemp(prefix=PREFIX + session, dir=BASE))
    root.chmod(0o711)
    return root


_KEEPERS: dict[int, subprocess.Popen[str]] = {}  # our own children, to be waited for


@contextlib.contextmanager
def running_cluster(options: ClusterOptions | None = None) -> Iterator[Cluster]:
    """A cluster for the time of a `with`; it goes down with this process too, however that ends."""
    cluster = start(options, owner=os.getpid())
    try:
        yield cluster
    finally:
        cluster.down()


def take_down(root: Path) -> None:
    """Kill what state.json records and is still the same process, then remove link and folder. Safe
    to repeat.
    """
    state: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        state = json.loads((root / "state.json").read_text())
    recorded = [(pid, began) for pid, began in state.get("processes", []) if pid != os.getpid()]
    alive = [(pid, began) for pid, began in recorded if _start_time(pid) == began]
    for pid, _ in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for cgroup in state.get("cgroups", []):  # a killed process of a suspended job ends when it runs
        for frozen in Path(cgroup).glob("**/freezer.state"):
            with contextlib.suppress(OSError):
                frozen.write_text("THAWED")
    for pid, began in alive:
        keeper = _KEEPERS.pop(pid, None)
        if keeper is not None:
            keeper.wait(KILLED_S)
        gone = functools.partial(_has_ended, pid, began)
        _wait_until(gone, KILLED_S, f"end of process {pid}")
    if "link" in state:
        # the kernel takes it away with the switch's namespace, but some time later
        subprocess.run(["ip", "link", "delete", state["link"]], capture_output=True, check=False)
    for cgroup in state.get("cgroups", []):
        removed = functools.partial(_remove_cgroup, Path(cgroup))
        _wait_until(removed, KILLED_S, f"the removal of {cgroup}")
    shutil.rmtree(root, ignore_errors=True)


# --- the keeper: brings up, then waits for its owner's end
# ------------------------------------------------------------


class _Keeper:
    def __init__(self, root: Path, options: ClusterOptions, owned: bool) -> None:
        self.root = root
        self.options = options
        self.owned = owned
        self.id = secrets.token_hex(3)
        self.link = f"slt{self.id}"
        self.network = _free_network()
        self.login = str(self.network[1])
        self.slurmdbd_port = _free_port() if options.accounting else 0
        self.network6 = (
            f"fd{self.id[:2]}:{self.id[2:]}" if Path("/proc/sys/net/ipv6").exists() else ""
        )
        self.nodes: list[Node] = []
        self.names = [f"node{number}" for number in range(1, options.nodes + 1)]
        # of each node, one for each controller; empty without cgroups
        self.cgroups: dict[str, list[Path]] = {}
        if not (options.linuxproc or cgroups_missing()):
            parents = [_own_cgroup(controller) for controller in CONTROLLERS]
            self.cgroups = {
                name: [parent / f"{root.name}-{name}" for parent in parents] for name in self.names
            }
        self.switch = 0
        self.children: list[subprocess.Popen[bytes]] = []
        self.processes: list[int] = [os.getpid()]

    def save(self) -> None:
        state = {
            "id": self.id,
            "owned": self.owned,
            "options": asdict(self.options),
            "link": self.link,
            "login": self.login,
            "switch": self.switch,
            "nodes": [asdict(node) for node in self.nodes],
            "processes": [(pid, _start_time(pid)) for pid in self.processes],
            "cgroups": [str(cgroup) for cgroups in self.cgroups.values() for cgroup in cgroups],
        }
        new = self.root / "state.new"
        new.write_text(json.dumps(state))
        new.rename(self.root / "state.json")

    def address(self, number: int) -> str:
        return str(self.network[10 + number])

    def address6(self, number: int) -> str:
        # In its one short form, as the system shows it: fd41:8d5::b, not fd41:08d5::b.
        return (
            str(ipaddress.IPv6Address(f"{self.network6}::{10 + number:x}")) if self.network6 else ""
        )

    def bring_up(self) -> None:
        self.save()
        self.make_files(self.names)
        self.make_cgroups()
        holders = {name: self.spawn(name) for name in [CONTROLLER, *self.names]}
        switch = self.spawn_switch()
        controller = self.first_process(holders[CONTROLLER], CONTROLLER)
        for number, name in enumerate(self.names, 1):
            pid = self.first_process(holders[name], name)
            gpus = self.options.gpus_per_node[number - 1]
            self.nodes.append(Node(name, self.address(number), self.address6(number), gpus, pid))
        self.switch = switch.pid
        self.save()
        self.make_network()
        self.start_daemons(controller)

    def make_files(self, names: list[str]) -> None:
        folders = {
            "etc": 0o755,
            "log": 0o755,
            "run": 0o755,
            "key": 0o700,
            "state": 0o700,
            "spool": 0o755,
            "dev": 0o755,
        }
        for folder, mode in folders.items():
            (self.root / folder).mkdir()
            (self.root / folder).chmod(mode)
        key = self.root / "key/munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        for index in range(max(self.options.gpus_per_node)):
            # a device of some kind, else Slurm counts it but sets no CUDA_VISIBLE_DEVICES
            device = self.root / f"dev/nvidia{index}"
            os.mknod(device, stat.S_IFCHR, os.makedev(GPU_MAJOR, index))
            device.chmod(0o666)
        (self.root / "first-process.sh").write_text(_FIRST_PROCESS)
        (self.root / "etc/slurm.conf").write_text(self.slurm_conf(names))
        (self.root / "etc/gres.conf").write_text(self.gres_conf(names))
        (self.root / "etc/cgroup.conf").write_text(
            _CGROUP_CONF if self.cgroups else "IgnoreSystemd=yes\n"
        )
        (self.root / "etc/topology.conf").write_text(self.options.topology)
        if self.slurmdbd_port:
            (self.root / "etc/slurmdbd.conf").write_text(self.slurmdbd_conf())
        for name in [CONTROLLER, *names]:
            (self.root / "spool" / name).mkdir()
            (self.root / f"etc/hosts-{name}").write_text(self.hosts(name, names))
        for file in (self.root / "etc").iterdir():
            file.chmod(0o600 if file.name == "slurmdbd.conf" else 0o644)

    def make_cgroups(self) -> None:
        """Makes one cgroup for each node, which the node sees as the root. Clusters that run at the
        same time have nodes of the same names.
        """
        for cgroup in itertools.chain(*self.cgroups.values()):
            cgroup.mkdir()
            # empty in a new cgroup, which then accepts no process
            for setting in (
                "cpuset.cpus",
                "cpuset.mems",
            ):
                if (cgroup / setting).exists():
                    (cgroup / setting).write_text((cgroup.parent / setting).read_text())

    def hosts(self, own_name: str, names: list[str]) -> str:
        lines = ["127.0.0.1 localhost", f"{self.login} {socket.gethostname()} {CONTROLLER}"]
        for number, name in enumerate(names, 1):
            if name == own_name:  # as Debian sets it up
                lines.append(f"127.0.1.1 {name}")
                continue
            lines += [
                f"{address} {name}"
                for address in (self.address(number), self.address6(number))
                if address
            ]
        return "\n".join(lines) + "\n"

    def gres_conf(self, names: list[str]) -> str:
        lines = ["AutoDetect=off"]
        for name, count in zip(names, self.options.gpus_per_node, strict=True):
            if count:
                lines.append(f"NodeName={name} Name=gpu File={self.root}/dev/nvidia[0-{count - 1}]")
        return "\n".join(lines) + "\n"

    def slurm_conf(self, names: list[str]) -> str:
        options = self.options
        root = self.root
        storage = "slurmdbd" if options.accounting else "none"
        scheduler = "sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1"
        lines = [
            f"ClusterName=test{self.id}",
            f"SlurmctldHost={CONTROLLER}({self.login})",
            f"SlurmctldPort={_free_port()}",
            f"SlurmdPort={SLURMD_PORT}",
            "CommunicationParameters=NoCtldInAddrAny",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            "CredType=cred/munge",
            f"AuthInfo=socket={root}/run/munge.socket",
            f"StateSaveLocation={root}/state",
            f"SlurmdSpoolDir={root}/spool/%n",
            f"SlurmctldPidFile={root}/run/slurmctld.pid",
            f"SlurmdPidFile={root}/run/slurmd-%n.pid",
            f"SlurmctldLogFile={root}/log/slurmctld.log",
            f"SlurmdLogFile={root}/log/slurmd-%n.log",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            f"DefMemPerCPU={MEMORY_PER_CPU_MB}",
            f"ProctrackType=proctrack/{'cgroup' if self.cgroups else 'linuxproc'}",
            f"TaskPlugin={'task/cgroup,task/affinity' if self.cgroups else 'task/none'}",
            f"JobAcctGatherType=jobacct_gather/{'linux' if options.accounting else 'none'}",
            f"AccountingStorageType=accounting_storage/{storage}",
            "SlurmdParameters=config_overrides",
            "MpiDefault=none",
            "MailProg=/bin/true",
            "GresTypes=gpu",
            "ReturnToService=2",
            "JobRequeue=1",
            "MinJobAge=300",
            # Not from 1 on again with every cluster: a run directory is named after its job.
            f"FirstJobId={int(time.time()) % 60_000_000}",
            "EnforcePartLimits=ALL",
            f"KillWait={options.kill_wait_s}",
            f"SlurmdTimeout={options.slurmd_timeout_s}",
            # a job starts, and its node is free again, at once instead of at the next round
            f"SchedulerParameters={scheduler}",
            "CompleteWait=0",
            "EpilogMsgTime=0",
        ]
        if options.accounting:
            lines += [
                f"AccountingStorageHost={self.login}",
                f"AccountingStoragePort={self.slurmdbd_port}",
                f"AccountingStoragePass={root}/run/munge.socket",
            ]
        if options.preempt:
            lines += ["PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE"]
        for number, (name, gpus) in enumerate(zip(names, options.gpus_per_node, strict=True), 1):
            gres = f" Gres=gpu:{gpus}" if gpus else ""
            lines.append(
                f"NodeName={name} NodeAddr={self.address(number)} Sockets=1 CoresPerSocket={CPUS}"
                f" ThreadsPerCore=1 RealMemory={CPUS * MEMORY_PER_CPU_MB}{gres} State=UNKNOWN"
            )
        every = "Nodes=" + ",".join(names)
        preempted = preempting = ""
        if options.preempt:
            preempted = " PriorityTier=1 PreemptMode=REQUEUE GraceTime=0"
            preempting = " PriorityTier=10 PreemptMode=OFF"
        lines += [
            f"PartitionName=main Default=YES {every} MaxTime=INFINITE State=UP{preempted}",
            f"PartitionName=short {every} MaxTime=10 State=UP{preempted}",
            f"PartitionName=high {every} MaxTime=INFINITE State=UP{preempting}",
        ]
        extra = options.extra_conf.strip().splitlines()
        replaced = {_conf_key(line) for line in extra}
        return (
            "\n".join([*(line for line in lines if _conf_key(line) not in replaced), *extra]) + "\n"
        )

    def slurmdbd_conf(self) -> str:
        root = self.root
        lines = [
            "AuthType=auth/munge",
            f"AuthInfo=socket={root}/run/munge.socket",
            f"DbdHost={CONTROLLER}",
            f"DbdAddr={self.login}",
            f"DbdPort={self.slurmdbd_port}",
            "SlurmUser=root",
            f"LogFile={root}/log/slurmdbd.log",
            f"PidFile={root}/run/slurmdbd.pid",
            "StorageType=accounting_storage/mysql",
            "StorageUser=root",
            "StorageLoc=slurm",
        ]
        return "\n".join(lines) + "\n"

    def spawn(self, name: str) -> subprocess.Popen[bytes]:
        """A host's namespaces and its first process, which only reaps. The controller shares the
        login's network.
        """
        network, sysfs = ([], []) if name == CONTROLLER else (["--net"], ["own-sys"])
        argv = [
            "unshare",
            *network,
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        cgroups = self.cgroups.get(name, [])
        if cgroups:
            procs = " ".join(f"{cgroup}/cgroup.procs" for cgroup in cgroups)
            argv = ["sh", "-c", _JOIN, "join", procs, *argv, "--cgroup"]
        argv += [
            "bash",
            str(self.root / "first-process.sh"),
            name,
            str(self.root),
            *sysfs,
            *map(str, cgroups),
        ]
        return self.child(argv)

    def spawn_switch(self) -> subprocess.Popen[bytes]:
        child = self.child(["unshare", "--net", "bash", "-c", "echo ready; exec sleep infinity"])
        self.await_ready(child, "switch")
        return child

    def child(self, argv: list[str]) -> subprocess.Popen[bytes]:
        log = (self.root / "keeper.log").open("ab")
        with log:
            child = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.children.append(child)
        self.processes.append(child.pid)
        return child

    def await_ready(self, child: subprocess.Popen[bytes], name: str) -> None:
        assert child.stdout is not None
        answered = select.select([child.stdout], [], [], UP_TIMEOUT_S)[0]
        if not answered or child.stdout.readline() != b"ready\n":
            raise ClusterError(f"no namespaces for {name}" + _tail(self.root / "keeper.log"))

    def first_process(self, holder: subprocess.Popen[bytes], name: str) -> int:
        self.await_ready(holder, name)
        pid = next(pid for pid, parent in _processes() if parent == holder.pid)
        self.processes.append(pid)
        return pid

    def make_network(self) -> None:
        switch = ["link add br0 type bridge forward_delay 0", "link set br0 up"]
        switch += [f"link add login type veth peer name {self.link} netns {os.getpid()}"]
        switch += ["link set login master br0 up"]
        for node in self.nodes:
            switch += [f"link add {node.name} type veth peer name eth0 netns {node.pid}"]
            switch += [f"link set {node.name} master br0 up"]
            # its far end stands for a container: without one docker0 would have no carrier
            switch += [
                f"link add {node.name}c type veth peer name veth0 netns {node.pid}",
                f"link set {node.name}c up",
            ]
        _ip(switch, self.switch)
        login = [f"addr add {self.login}/24 dev {self.link}", f"link set {self.link} up"]
        if self.network6:
            login.append(f"addr add {self.network6}::1/64 dev {self.link} nodad")
        _ip(login)
        for node in self.nodes:
            lines = ["link set lo up", f"addr add {node.address}/24 dev eth0", "link set eth0 up"]
            if node.address6:
                lines.append(f"addr add {node.address6}/64 dev eth0 nodad")
            lines += [
                "link add docker0 type bridge forward_delay 0",
                f"addr add {DOCKER0} dev docker0",
            ]
            lines += ["link set veth0 master docker0 up", "link set docker0 up"]
            _ip(lines, node.pid)

    def start_daemons(self, controller: int) -> None:
        root = self.root
        conf = self.root / "etc/slurm.conf"
        log = root / "log/slurmctld.log"
        munge_log = root / "log/munged.log"
        munge = [
            f"--key-file={root}/key/munge.key",
            f"--seed-file={root}/key/seed",
            f"--socket={root}/run/munge.socket",
            f"--pid-file={root}/run/munged.pid",
            f"--log-file={munge_log}",
            "--num-threads=2",
        ]
        inside = _inside(controller, network=False)
        _daemon([*inside, "munged", *munge], conf, root / "log/munged.out")
        _wait_until((root / "run/munge.socket").exists, UP_TIMEOUT_S, "munged's socket", munge_log)
        if self.options.accounting:
            self.start_accounting(inside, conf)
        _daemon([*inside, "slurmctld", "-f", str(conf)], conf, log)
        _wait_until(lambda: self.answers(conf), UP_TIMEOUT_S, "an answer of slurmctld", log)
        for node in self.nodes:
            _start_slurmd(root, node)
        names = [node.name for node in self.nodes]
        _wait_until(lambda: _idle(conf, names), UP_TIMEOUT_S, "all nodes idle", log)

    def start_accounting(self, inside: list[str], conf: Path) -> None:
        data = self.root / "state/mariadb"
        log = self.root / "log/mariadb.log"
        socket_path = self.root / "run/mariadb.socket"
        options = ["--no-defaults", "--user=root", f"--datadir={data}"]
        _daemon(
            [
                *inside,
                "mariadb-install-db",
                *options,
                "--skip-test-db",
                "--auth-root-authentication-method=normal",
            ],
            conf,
            log,
        )
        server = ["mariadbd", *options, f"--socket={socket_path}", "--skip-networking"]
        _daemon([*inside, "sh", "-c", f"setsid {shlex.join(server)} &"], conf, log)
        _wait_until(socket_path.exists, UP_TIMEOUT_S, "MariaDB's socket", log)
        slurmdbd = [*inside, "env", f"MYSQL_UNIX_PORT={socket_path}", "slurmdbd"]
        _daemon(slurmdbd, conf, self.root / "log/slurmdbd.log")
        add = ["sacctmgr", "-i", "add", "cluster", f"test{self.id}"]

        def is_added() -> bool:
            done = subprocess.run(
                add, capture_output=True, env=_client_env(conf), timeout=UP_TIMEOUT_S
            )
            return done.returncode == 0

        _wait_until(is_added, UP_TIMEOUT_S, "an answer of slurmdbd", self.root / "log/slurmdbd.log")

    def answers(self, conf: Path) -> bool:
        done = subprocess.run(
            ["scontrol", "ping"], capture_output=True, env=_client_env(conf), timeout=UP_TIMEOUT_S
        )
        return b"is UP" in done.stdout


_CGROUP_CONF = f"""CgroupPlugin=cgroup/v1
CgroupMountpoint={CGROUPS}
ConstrainCores=yes
ConstrainRAMSpace=yes
ConstrainDevices=yes
"""

# A host's first process. $4 and so on: its cgroups. Its own /sys shows its own interfaces, and
# these cgroups as roots.
_FIRST_PROCESS = """set -e
name=$1 root=$2
hostname "$name"
mount --bind "$root/etc/hosts-$name" /etc/hosts
[ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf
[ ! -d /etc/slurm ] || mount --bind "$root/etc" /etc/slurm
mount -t tmpfs -o mode=1777 shm /dev/shm
if [ "${3-}" = own-sys ]; then
    shift 3
    all="$root/spool/$name/cgroup"
    mkdir "$all"
    if [ $# = 0 ]; then
        mount --rbind /sys/fs/cgroup "$all"
    else
        mount -t tmpfs -o mode=755 cgroup "$all"
    fi
    for cgroup; do
        controller=${cgroup#/sys/fs/cgroup/}
        controller=${controller%%/*}
        mkdir "$all/$controller"
        mount --bind "$cgroup" "$all/$controller"
    done
    mount -t sysfs sysfs /sys
    mount --rbind "$all" /sys/fs/cgroup
    umount -l "$all"
    rmdir "$all"
fi
echo ready
exec > /dev/null
while :; do sleep 3600 & wait $! || true; done
"""


def _conf_key(line: str) -> str:
    """What a line of slurm.conf sets: its key; of a partition or a node its name too."""
    key, _, value = line.split()[0].partition("=")
    return f"{key}={value}" if key in ("PartitionName", "NodeName") else key


def _ip(lines: list[str], pid: int | None = None) -> None:
    argv = (
        ["ip", "-batch", "-"]
        if pid is None
        else ["nsenter", f"--target={pid}", "--net", "--", "ip", "-batch", "-"]
    )
    done = subprocess.run(
        argv, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=UP_TIMEOUT_S
    )
    if done.returncode:
        raise ClusterError(f"ip: {done.stderr.strip()}")


def _free_network() -> ipaddress.IPv4Network:
    """A /24 that no route or address of this machine overlaps."""
    argv = ["ip", "-4", "-json", "route", "show", "table", "all"]
    taken = []
    for route in json.loads(subprocess.run(argv, capture_output=True, check=True).stdout):
        if route["dst"] not in ("default", "0.0.0.0/0"):
            taken.append(ipaddress.IPv4Network(route["dst"], strict=False))
    for _ in range(1000):
        network = ipaddress.IPv4Network(
            f"10.{random.randint(64, 254)}.{random.randint(0, 255)}.0/24"
        )
        if not any(network.overlaps(other) for other in taken):
            return network
    raise ClusterError("no free network in 10.64.0.0–10.254.255.0: this machine routes all of them")


def _free_port() -> int:
    """A port below the ephemeral ones that nobody listens on at any address; hardly the one that
    another cluster draws now.
    """
    for port in random.sample(range(6817, 9000), 500):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise ClusterError("no free port for slurmctld in 6817-8999")


def _options(mapping: dict[str, Any]) -> ClusterOptions:
    gpus = mapping["gpus"]
    return ClusterOptions(**{**mapping, "gpus": gpus if isinstance(gpus, int) else tuple(gpus)})


def _keep(root: Path, options: ClusterOptions, owner_fd: int) -> None:
    """Bring up, say `ready` on stdout, then wait for the owner's end or a signal, and take down."""

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, stop)
    try:
        try:
            keeper = _Keeper(root, options, owner_fd >= 0)
            keeper.bring_up()
        except (ClusterError, OSError, subprocess.SubprocessError) as error:
            print(error, flush=True)
            return
        print("ready", flush=True)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        select.select([owner_fd] if owner_fd >= 0 else [], [], [])
    finally:
        take_down(root)


# --- command line
# ------------------------------------------------------------------------------------------------


def _running() -> list[tuple[Path, bool, bool]]:
    """Folder, whether its keeper lives, and whether it stays until `down`, of each cluster on this
    machine.
    """
    clusters = []
    for root in sorted(BASE.glob(PREFIX + "*")):
        with contextlib.suppress(OSError):
            if root.is_symlink() or root.stat().st_uid != 0 or not root.is_dir():
                continue  # anyone may write to /tmp: root believes root's files only
            try:
                state = json.loads((root / "state.json").read_text())
            except (OSError, ValueError):
                if time.time() - root.stat().st_mtime > 2 * UP_TIMEOUT_S:
                    clusters.append((root, False, False))
                continue
            pid, began = state["processes"][0]
            clusters.append((root, _start_time(pid) == began, not state["owned"]))
    return clusters


def _up(arguments: argparse.Namespace) -> int:
    cluster = start(ClusterOptions(nodes=arguments.nodes, gpus=arguments.gpus))
    (cluster.root / "user").write_text(_user())
    for node in cluster.nodes:
        print(f"{node.name}: {node.address} {node.address6} {node.gpus} GPUs", file=sys.stderr)
    sudo = "sudo " if "SUDO_USER" in os.environ else ""
    command = f"{sudo}python3 {sys.argv[0]} down {cluster.root}"
    print(f"logs in {cluster.root}/log; take down with: {command}", file=sys.stderr)
    print(f"export SLURM_CONF={cluster.conf}")
    return 0


def _user() -> str:
    """Who has typed the command, also with sudo."""
    return os.environ.get("SUDO_UID") or str(os.getuid())


def _down(root: Path | None) -> int:
    for folder, alive, stays in _running():
        user = folder / "user"
        is_theirs = user.exists() and user.read_text() == _user() and (stays or not alive)
        if folder == root or (root is None and is_theirs):
            take_down(folder)
            print(f"{folder}: taken down", file=sys.stderr)
    return 0


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["_keep"]:
        _keep(Path(argv[1]), _options(json.loads(argv[2])), int(argv[3]))
        return 0
    parser = argparse.ArgumentParser(
        description="a real Slurm cluster on this one machine, for tests and trials"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser(
        "up", help='bring one up: eval "$(sudo python tests/slurm/cluster.py up)"'
    )
    up.add_argument("--nodes", type=int, default=2)
    up.add_argument("--gpus", type=int, default=8, help="a node")
    down = commands.add_parser("down", help="take down all clusters that this user has brought up")
    down.add_argument("root", type=Path, nargs="?", help="this one, whoever has brought it up")
    arguments = parser.parse_args(argv)
    reason = missing()
    if reason:
        print(reason, file=sys.stderr)
        return 3
    try:
        return _up(arguments) if arguments.command == "up" else _down(arguments.root)
    except (ClusterError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

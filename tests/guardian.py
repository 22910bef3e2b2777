"""Ends what a session of pytest leaves behind, however the session ends: processes, mounts, network
namespaces, clusters.

Processes: a guardian process waits until the session's controller has ended, then kills all
processes of the session. It must recognise daemons, which have neither the session's environment
nor its parent nor its session id. A resource limit is what every descendant inherits in any case,
and /proc/PID/limits shows it. So each session has a random number, its mark, as soft RLIMIT_RSS, a
limit that Linux ignores since 2.4.30 (getrlimit(2)). The guardian waits for the lock of a file that
is named after the mark: the kernel releases it when the controller dies.

Mounts and named network namespaces: the session has its own mount namespace, which ends with its
last process.

Clusters: tests/slurm/cluster.py puts the mark into the name of a cluster's folder. The guardian
takes the cluster down, with its cgroups, and removes the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BASE = Path("/tmp")  # the same for all sessions, whatever $TMPDIR is
LOCK = "recipes-tests-"
CLUSTER = "slurm-test-"
CLONE_NEWNS = 0x00020000
KILLED_S = 60.0  # for the processes of one session to end

_kept: list[Any] = []  # the lock and the guardian: both last as long as this process


def begin() -> None:
    """Marks this process and starts its guardian, unless it is part of a session already (xdist's
    workers are).
    """
    if sys.platform != "linux":
        return
    mark, limit = resource.getrlimit(resource.RLIMIT_RSS)
    if lock_file(mark).exists():
        return
    own_mounts()
    mark = secrets.randbelow(1 << 48 if limit == resource.RLIM_INFINITY else limit)
    lock = os.open(lock_file(mark), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.lockf(lock, fcntl.LOCK_EX)
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(mark)],
        cwd="/",
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _kept.extend((lock, guardian))
    resource.setrlimit(resource.RLIMIT_RSS, (mark, limit))


def own_mounts() -> None:
    """Moves this process into its own mount namespace, if its user may mount at all."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0:
        # `ip netns` mounts in /run/netns. mount prints its error where it fails, as in a chroot.
        private = "mount --make-rslave / && mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns"
        subprocess.run(private, shell=True, check=False)


def lock_file(mark: int) -> Path:
    return BASE / f"{LOCK}{mark}.lock"


def kill(mark: int) -> bool:
    """Kills the processes with this mark. Returns whether one of them was still running."""
    is_running = False
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                limit = re.search(
                    rb"Max resident set +(\S+)", Path(f"/proc/{entry}/limits").read_bytes()
                )
                if limit and limit[1] == b"%d" % mark:
                    os.kill(int(entry), signal.SIGKILL)
                    is_running |= (
                        Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[0]
                        not in b"ZX"
                    )
    return is_running


def main(mark: int) -> None:
    """Waits for the end of the session with this mark, and cleans up after it."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    with lock_file(mark).open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        deadline = time.monotonic() + KILLED_S
        while kill(mark) and time.monotonic() < deadline:
            time.sleep(0.02)
        for folder in BASE.glob(f"{CLUSTER}{mark}_*"):
            subprocess.run(
                [sys.executable, "-I", "-S", HERE / "slurm/cluster.py", "down", folder], check=False
            )
            shutil.rmtree(folder, ignore_errors=True)
        lock_file(mark).unlink()


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Two machines in place of this one: network namespaces that a cable joins. Needs root."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator


def missing() -> str | None:
    """What is not there."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    programs = [
        name for name in ("ip", "nsenter", "unshare", "mount", "hostname") if not shutil.which(name)
    ]
    return f"not installed: {', '.join(programs)}" if programs else None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@contextlib.contextmanager
def joined(*addresses: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """The names of two namespaces whose interfaces eth0 are joined. addresses: of eth0, each an
    IPv4 and an IPv6 address.
    """
    unique = secrets.token_hex(3)
    names = (f"net-{unique}-0", f"net-{unique}-1")
    with contextlib.ExitStack() as cleanup:
        for name in names:
            ip("netns", "add", name)
            cleanup.callback(ip, "netns", "del", name)
        ip(
            "-n",
            names[0],
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            names[1],
        )
        for name, (ipv4, ipv6) in zip(names, addresses, strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", ipv4, "dev", "eth0")
            ip("-n", name, "address", "add", ipv6, "dev", "eth0", "nodad")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names

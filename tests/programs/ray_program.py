"""Runs Ray tasks on all nodes. Each node runs this program once. CPU only.

The variables NNODES, NODE_RANK, NODES, MASTER_ADDR and MASTER_PORT describe the nodes. Node 0
starts the head and runs tasks until each node has run one. It writes the host names to hosts.txt in
$RECIPES_RUN_DIR and stops its head. The other nodes join, and stop when the head no longer answers.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

LIMIT_S = 120
NODES = int(os.environ["NNODES"])
NODE_RANK = int(os.environ["NODE_RANK"])
PORT = int(os.environ["MASTER_PORT"])
NAMES = os.environ["NODES"].split()


def own_address() -> str:
    """The address of this node on the route to another one. Its own name may mean 127.0.1.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(NAMES[NODE_RANK - 1]), 9))
        return probe.getsockname()[0]


OWN_ADDRESS = own_address()
HEAD = (os.environ["MASTER_ADDR"] if NODE_RANK else OWN_ADDRESS, PORT)
DEADLINE = time.monotonic() + LIMIT_S


def head_answers() -> bool:
    try:
        socket.create_connection(HEAD, timeout=5).close()
    except OSError:
        return False
    return True


def start_ray(*options: str) -> subprocess.Popen:
    """Starts Ray on this node. Nodes may share /tmp. The path is short: sockets allow 107
    characters.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
    command += [f"--node-ip-address={OWN_ADDRESS}", "--num-cpus=1", "--num-gpus=0"]
    command += [f"--temp-dir=/tmp/ray-{os.getuid()}-{HEAD[1]}-{NODE_RANK}"]
    command += ["--object-store-memory=100000000", "--disable-usage-stats"]
    # Ray's own range may contain MASTER_PORT
    command += [
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]
    # At SIGTERM, do not wait up to 30 s for tasks, or for a head that has ended.
    return subprocess.Popen(
        command, env={**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    )


def hosts_of_tasks() -> set[tuple[str, str]]:
    """The IDs and host names of the nodes on which tasks have run, when they are all nodes."""
    import ray

    @ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
    def host() -> tuple[str, str]:
        time.sleep(0.5)
        return ray.get_runtime_context().get_node_id(), socket.gethostname()

    ray.init(address=f"{HEAD[0]}:{HEAD[1]}", log_to_driver=False)
    hosts: set[tuple[str, str]] = set()
    while len(hosts) < NODES and time.monotonic() < DEADLINE:
        hosts.update(ray.get([host.remote() for _ in range(2 * NODES)]))
    ray.shutdown()
    return hosts


def wait_until(condition, ray_process: subprocess.Popen) -> None:
    while not condition() and ray_process.poll() is None and time.monotonic() < DEADLINE:
        time.sleep(0.5)


if NODE_RANK == 0:
    ray_process = start_ray("--head", f"--port={HEAD[1]}", "--include-dashboard=false")
    wait_until(head_answers, ray_process)
    if ray_process.poll() is not None:
        sys.exit("the head did not start")
    hosts = sorted(name for _, name in hosts_of_tasks())
    Path(os.environ["RECIPES_RUN_DIR"], "hosts.txt").write_text("\n".join(hosts) + "\n")
    complete = len(hosts) == NODES
else:
    while not head_answers() and time.monotonic() < DEADLINE:
        time.sleep(0.5)
    ray_process = start_ray(f"--address={HEAD[0]}:{HEAD[1]}")
    wait_until(lambda: not head_answers(), ray_process)
    complete = time.monotonic() < DEADLINE and not head_answers()
ray_process.terminate()  # not `ray stop`, which ends every Ray process of this machine
ray_process.wait()
sys.exit(0 if complete else 1)

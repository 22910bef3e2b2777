"""An examination: each rank checks its node and the links to some others, and the first rank gives the verdict.

The ranks exchange these messages (`meeting`); N is a node, R a rank:

    port-N      where the node's server listens
    report-R    what the rank found
    go          by rank 0: which ranks measure bandwidth
    final-R     the report with the bandwidth
    verdict     by rank 0, or the first rank that answers: the examination is over
    gone-R      the rank ends
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipes.core import errors
from recipes.core.doctor import commands, judge, probes, reach, verdict
from recipes.core.doctor.meeting import POLL_S, Meeting
from recipes.core.doctor.node import Finding, Surroundings
from recipes.core.errors import Kind
from recipes.core.files import write_json
from recipes.core.place import network, slurm_step
from recipes.core.place.ranks import RankInfo
from recipes.core.run import attempt as attempts
from recipes.core.run import directory

# Shares of ``seconds`` after which each part is abandoned.
CHECKS, REACH, GO, LINKS, VERDICT = 0.4, 0.55, 0.6, 0.85, 0.92
SLACK_S = 3.0  # that other ranks give rank 0 beyond its own limit
LEAVE_S = 3.0  # for the other ranks to end before the rank that gave the verdict


@dataclass(frozen=True)
class Plan:
    """What to examine. seconds: the time limit of the whole. as_json: how the verdict is printed."""

    run_dir: Path
    seconds: float = 120.0
    on_cpu: bool = False
    data_dir: str = ""
    bandwidth: bool = True
    as_json: bool = False


def run(plan: Plan, info: RankInfo) -> int:
    """Runs this rank's part of the examination. Returns its exit status: 3 on the rank that gives the verdict, if a node is bad."""
    begin = time.monotonic()

    def at(share: float) -> float:
        return begin + share * plan.seconds

    # The steps of a job come one after another, and each is an examination.
    meeting = Meeting(plan.run_dir / "reports" / f"{info.run_id or 'now'}-{info.restart_count}", info.rank == 0)
    nonce = meeting.folder.as_posix()
    server = reach.Server(info.node_rank, nonce)
    here = Surroundings(os.environ, info, plan.run_dir, plan.data_dir, plan.on_cpu)
    port_findings: list[Finding] = []
    if info.local_rank == 0:
        message, port_findings = _listen(server, info)
        meeting.post(f"port-{info.node_rank}", message)
    report = probes.run_all(here, CHECKS * plan.seconds)
    report.findings += port_findings
    examination = meeting.name
    if info.local_rank == 0:
        report.links = _probe_peers(meeting, info, nonce, at(REACH), 0.05 * plan.seconds)
    meeting.post(f"report-{info.rank}", asdict(report))
    if info.rank == 0:
        with reach.listener(0) as listener:
            meeting.post("go", _members(meeting, info, plan, listener.getsockname()[1], at(GO)))
            bandwidth = _measure(meeting, info, listener.fileno(), at(GO), at(LINKS))
    else:
        bandwidth = _measure(meeting, info, -1, at(GO) + SLACK_S, at(LINKS))
    # Before rank 0 began, the ports may have been those of an older examination, which is gone.
    if info.local_rank == 0 and meeting.name != examination:
        report.links = _probe_peers(meeting, info, nonce, at(LINKS), 0.02 * plan.seconds)
    meeting.post(f"final-{info.rank}", {**asdict(report), "bandwidth": bandwidth})
    if info.rank == 0:
        code = _give_verdict(meeting, info, plan, at(VERDICT))
    else:
        code = _stand_by(meeting, info, plan, at(VERDICT) + SLACK_S, at(1))
    server.close()
    return code


def _listen(server: reach.Server, info: RankInfo) -> tuple[dict[str, Any], list[Finding]]:
    """Starts this node's server. On the first node it also listens on the port at which the ranks will meet, if that is free."""
    message: dict[str, Any] = {"port": server.listen(), "host": socket.gethostname(), "master": False}
    if not info.nodes and (choice := _interface(info)):
        message["host"] = choice.address  # without Slurm, no node knows the others' names
    if info.rank != 0 or info.num_nodes == 1 or not info.master_port or "TORCHELASTIC_RUN_ID" in os.environ:
        return message, []
    try:
        server.listen(info.master_port, int(os.environ.get("RECIPES_LISTEN_FD", -1)))  # launch.py listens there already
        message["master"] = True
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        what = f"port {info.master_port}, at which the ranks meet, cannot be listened on ({why})"
        fix = "set MASTER_PORT to a free one for all ranks, or end what listens there (ss -ltnp)"
        return message, [Finding(what, fix)]
    return message, []


def _interface(info: RankInfo) -> network.Choice | None:
    with contextlib.suppress(network.NetworkError):
        return network.choose(info)
    return None


def _probe_peers(meeting: Meeting, info: RankInfo, nonce: str, end: float, timeout_s: float) -> list[dict[str, Any]]:
    """The links to some other nodes, as `reach.peers` chooses them."""
    wanted = reach.peers(info.node_rank, info.num_nodes)
    ports = meeting.collect([f"port-{peer}" for peer in wanted], end - 4 * timeout_s)

    def probe(peer: int) -> reach.Link:
        message = ports.get(f"port-{peer}", {})
        if "port" not in message:
            return reach.Link(peer, "silent", "no message in the run directory")
        host = info.master_addr if peer == 0 else info.nodes[peer] if info.nodes else message["host"]
        master_port = info.master_port if message.get("master") is True else 0
        return reach.probe(peer, host, message["port"], nonce, timeout_s, master_port)

    with ThreadPoolExecutor(max(1, len(wanted))) as pool:
        return [asdict(link) for link in pool.map(probe, wanted)]


def _members(meeting: Meeting, info: RankInfo, plan: Plan, port: int, end: float) -> dict[str, Any]:
    """The message ``go``: all ranks whose nodes answered and are not bad measure bandwidth, unless node 0 is bad. For rank 0.

    tokens: of the ranks whose reports rank 0 has read.
    """
    found = meeting.collect([f"report-{rank}" for rank in range(info.world_size)], end)
    reports = {report["rank"]: report for report in found.values()}
    bad = judge.verdict_of(_hosts(info), info.world_size, found.values()).bad_nodes
    members = {rank: report["node_rank"] for rank, report in sorted(reports.items()) if report["node_rank"] not in bad}
    if not plan.bandwidth or len(members) < 2 or 0 not in members:
        members = {}
    backend = "nccl" if all(_has_gpu_per_rank(reports[rank]) for rank in members) else "gloo"
    tokens = {str(rank): meeting.tokens[f"report-{rank}"] for rank in reports}
    return {"ranks": list(members), "nodes": list(members.values()), "port": port, "backend": backend, "tokens": tokens}


def _has_gpu_per_rank(report: Mapping[str, Any]) -> bool:
    """Whether a node has a GPU for each of its ranks, by the report of its first rank. True for other ranks without GPUs: they did not
    look."""
    facts = report["facts"].get("gpus", {})
    seen, ranks_there = len(facts.get("gpus", [])), facts.get("ranks", 1)
    if report["local_rank"] and not seen:
        return True
    return seen >= ranks_there or (seen == 1 and facts.get("granted", 0) >= ranks_there)


def _go(meeting: Meeting, info: RankInfo, end: float) -> dict[str, Any]:
    """The message ``go``, if rank 0 has read this rank's report; {} if none comes until ``end``."""
    while True:
        go = meeting.collect(["go"], end).get("go")
        if go and go["tokens"].get(str(info.rank)) == meeting.token:
            meeting.is_known_to_first = True
            return go
        if time.monotonic() > end or (go and meeting.is_new("go")):  # a new one that leaves out this rank
            return {}
        time.sleep(POLL_S)  # it may be that of an older examination


def _measure(meeting: Meeting, info: RankInfo, listener: int, go_end: float, end: float) -> dict[str, Any]:
    """This rank's part of the bandwidth test, in a process that is killed at ``end``: the last step it reached, and what it measured."""
    go = _go(meeting, info, go_end)
    members, nodes = go.get("ranks", []), go.get("nodes", [])
    if info.rank not in members:
        return {}
    environ = dict(os.environ)
    if choice := _interface(info):
        environ.update(network.settings(choice, environ))
    local = [rank for rank, node in zip(members, nodes, strict=True) if node == info.node_rank]
    environ.update(
        RANK=str(members.index(info.rank)), WORLD_SIZE=str(len(members)), LOCAL_RANK=str(local.index(info.rank)),
        MASTER_ADDR=info.master_addr or "127.0.0.1", MASTER_PORT=str(go["port"]), NODES=json.dumps(nodes),
    )  # fmt: skip
    left = end - time.monotonic()
    command = [sys.executable, "-m", "recipes.core.doctor.linkcheck", str(go["backend"]), str(listener), f"{left:.0f}"]
    out, why = commands.run(command, left, environ, (listener,) if listener >= 0 else ())
    found: dict[str, Any] = {"at": "its start", "pairs": []}
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            step = json.loads(line)
            found["pairs"] += [step.pop("pair")] if "pair" in step else []
            found.update(step)
    if why and "error" not in found and not found.get("ended"):
        found["error"] = why
    return found


def _hosts(info: RankInfo) -> tuple[str, ...]:
    """The host of each node by node_rank, "" where unknown."""
    return info.nodes or ("",) * info.num_nodes


def _give_verdict(meeting: Meeting, info: RankInfo, plan: Plan, end: float) -> int:
    """Waits for all final reports until ``end``, writes and prints the verdict. Returns the exit status."""
    # Unless rank 0 has read this rank's report, its messages may be old.
    known = range(0 if info.rank == 0 or meeting.is_known_to_first else 1, info.world_size)
    finals = meeting.collect([f"final-{rank}" for rank in known], end)
    early = meeting.collect([f"report-{rank}" for rank in known if f"final-{rank}" not in finals], 0)
    reports = [*finals.values(), *({**report, "early": True} for report in early.values())]
    found = judge.verdict_of(_hosts(info), info.world_size, reports)
    write_json(plan.run_dir / "doctor.json", verdict.as_json(found))
    meeting.post("verdict", {"exclude": found.exclude, "healthy": found.healthy})
    code = errors.EXIT_DONE if found.healthy else errors.EXIT_MACHINE
    worst = next((entry.what for entry in found.entries if entry.bad), "")
    if directory.job_id(os.environ):
        attempt = attempts.given(os.environ)
        if not attempt or attempt.run_dir != plan.run_dir:
            attempt = attempts.open_next(plan.run_dir, "doctor", os.environ, found.hosts)
        first = {"host": found.exclude[0] if found.exclude else None, "exit_status": code} if code else None
        state, kind = ("failed", Kind.machine) if code else ("done", None)
        number = attempt.number
        directory.write_status(plan.run_dir, state, attempt=number, step=0, reason=worst, kind=kind, first=first)
        if code:
            attempts.refuse({attempts.VARIABLE: str(attempt.folder)}, code, worst)
    print(json.dumps(verdict.as_json(found)) if plan.as_json else "\n".join(verdict.lines(found)), flush=True)
    # With srun --kill-on-bad-exit this rank must end last: otherwise srun kills the others and reports their status.
    others = [name.replace("final", "gone") for name in finals if name != f"final-{info.rank}"]
    gone = meeting.collect(others, time.monotonic() + LEAVE_S)
    if len(gone) + 1 < info.world_size:
        _end_step()
    meeting.remove()
    return code


def _end_step() -> None:
    """Lets Slurm end this step one second later. Otherwise srun waits forever for a process that hangs."""
    if slurm_step.in_step(os.environ):  # not the batch script or the shell of salloc, which also have a step id
        with contextlib.suppress(OSError):
            step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
            subprocess.Popen(["sh", "-c", 'sleep 1; exec scancel --signal=KILL "$0"', step], start_new_session=True)


def _stand_by(meeting: Meeting, info: RankInfo, plan: Plan, deputy: float, end: float) -> int:
    """Waits for the verdict while the server runs. If rank 0 gives none until ``deputy``, the first rank that answers does."""
    if not meeting.collect(["verdict"], deputy):
        alive = meeting.collect([f"final-{rank}" for rank in range(1, info.world_size)], 0)
        if min((int(name.partition("-")[2]) for name in alive), default=info.rank) == info.rank:
            return _give_verdict(meeting, info, plan, 0)
        meeting.collect(["verdict"], end)
    with contextlib.suppress(FileNotFoundError):  # the folder is removed as soon as the message is read
        meeting.post(f"gone-{info.rank}", {"rank": info.rank})
    return errors.EXIT_DONE

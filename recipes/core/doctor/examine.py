"""An examination: each node checks itself and its ways to some others, and the first rank gives the verdict."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from recipes.core.doctor import judge
from recipes.core.doctor.judge import Expected
from recipes.core.doctor import commands
from recipes.core.doctor.node import Surroundings
from recipes.core.files import write_json
from recipes.core import errors
from recipes.core.doctor import probes, reach, verdict
from recipes.core.place import network, ranks
from recipes.core.run import rundir
from recipes.core.errors import Kind
from recipes.core.doctor.node import Finding
from recipes.core.place.ranks import RankInfo
from recipes.core.doctor.meeting import POLL_S, Meeting


# Shares of ``seconds`` at which a part is given up.
LOCAL, REACH, GO, LINKS, VERDICT = 0.4, 0.55, 0.6, 0.85, 0.92
LEAVE_S = 3.0  # for the others to leave before the rank that gave the verdict


@dataclass(frozen=True)
class Plan:
    """What an examination is to do. seconds: its time limit."""

    run_dir: Path
    seconds: float = 120.0
    on_cpu: bool = False
    data_dir: str = ""
    bandwidth: bool = True
    as_json: bool = False


def examine_all(plan: Plan, info: RankInfo, leaving: list[Callable[[], None]]) -> int:
    """This rank's part of the examination, in bounded time. Gives its exit status: 3 where the first rank finds a bad node.

    leaving: gets what is to be done where this process is told to end.
    """
    begin = time.monotonic()

    def at(share: float) -> float:
        return begin + share * plan.seconds

    # A job's steps come one after another, and each is an examination of its own.
    meeting = Meeting(plan.run_dir / "reports" / f"{info.run_id or 'now'}-{info.restart_count}", info.rank == 0)
    leaving.append(meeting.withdraw)
    nonce = meeting.folder.as_posix()
    server = reach.Server(info.node_rank, nonce)
    here = Surroundings(os.environ, info, plan.run_dir, plan.data_dir, plan.on_cpu)
    taken: list[Finding] = []
    if info.local_rank == 0:
        word, taken = _listen(server, info)
        meeting.tell(f"port-{info.node_rank}", word)
    report = probes.run_all(here, LOCAL * plan.seconds)
    report.findings += taken
    asked_in = meeting.name
    if info.local_rank == 0:
        report.links = _ask_peers(meeting, info, nonce, at(REACH), 0.05 * plan.seconds)
    meeting.tell(f"report-{info.rank}", report.as_json())
    if info.rank == 0:
        with _free_port() as listener:
            meeting.tell("go", _members(meeting, info, plan, listener.getsockname()[1], at(GO)))
            group = _measure(meeting, info, listener.fileno(), at(GO), at(LINKS))
    else:
        group = _measure(meeting, info, -1, at(GO) + 3, at(LINKS))
    # Before the first rank had begun, who was asked may have been another examination's, and gone.
    if info.local_rank == 0 and meeting.name != asked_in:
        report.links = _ask_peers(meeting, info, nonce, at(LINKS), 0.02 * plan.seconds)
    meeting.tell(f"final-{info.rank}", {**report.as_json(), "bandwidth": group})
    if info.rank == 0:
        code = _judge(meeting, info, plan, at(VERDICT))
    else:
        code = _stand_by(meeting, info, plan, at(VERDICT) + 3, at(1))
    server.close()
    return code


def _listen(server: reach.Server, info: RankInfo) -> tuple[dict[str, Any], list[Finding]]:
    """Where this node listens for the others; on the first node also on the port that the ranks would meet at, if it is free."""
    word: dict[str, Any] = {"port": server.listen(), "host": socket.gethostname(), "master": False}
    if not info.nodes and (choice := _interface(info)):
        word["host"] = choice.address  # by hand no node knows another's name
    if info.rank != 0 or info.num_nodes == 1 or not info.master_port or "TORCHELASTIC_RUN_ID" in os.environ:
        return word, []
    try:
        server.listen(info.master_port, int(os.environ.get("RECIPES_LISTEN_FD", -1)))  # launch.py listens there already
        word["master"] = True
    except OSError as error:
        who = reach.who_listens(info.master_port)
        why = os.strerror(error.errno) if error.errno else str(error)
        what = f"port {info.master_port}, at which the ranks meet, cannot be listened on ({why}{f': {who}' if who else ''})"
        return word, [Finding(what, "set MASTER_PORT to a free one for all ranks, or end what listens there")]
    return word, []


def _interface(info: RankInfo) -> network.Choice | None:
    with contextlib.suppress(network.NetworkError):
        return network.choose(info)
    return None


def _ask_peers(meeting: Meeting, info: RankInfo, nonce: str, end: float, timeout_s: float) -> list[dict[str, Any]]:
    """The ways to a few other nodes, as `reach.peers` chooses them."""
    wanted = reach.peers(info.node_rank, info.num_nodes)
    ports = meeting.wait([f"port-{peer}" for peer in wanted], end - 4 * timeout_s)

    def ask(peer: int) -> reach.Link:
        word = ports.get(f"port-{peer}")
        host = info.master_addr if peer == 0 else info.nodes[peer] if info.nodes else str((word or {}).get("host", ""))
        if not word or not isinstance(word.get("port"), int):
            return reach.Link(peer, host, fault="silent", why="no word in the run directory")
        return reach.probe(
            peer, host, word["port"], nonce, timeout_s, info.master_port if word.get("master") is True else 0
        )

    with ThreadPoolExecutor(max(1, len(wanted))) as pool:
        return [link.as_json() for link in pool.map(ask, wanted)]


@contextlib.contextmanager
def _free_port() -> Iterator[socket.socket]:
    listener = reach.listener(0)
    try:
        yield listener
    finally:
        listener.close()


def _members(meeting: Meeting, info: RankInfo, plan: Plan, port: int, end: float) -> dict[str, Any]:
    """Rank 0's: who measures bandwidth: all ranks whose nodes answered and are not bad, if rank 0's is one of them."""
    names = [f"report-{rank}" for rank in range(info.world_size)]
    found = meeting.wait(names, end)
    bad = {
        node for entry in judge.verdict_of(_expected(info), found.values()).entries if entry.bad for node in entry.nodes
    }
    members = {
        rank: int(found[name]["node_rank"])
        for rank, name in enumerate(names)
        if name in found and _sound(found[name], bad)
    }
    if not plan.bandwidth or len(members) < 2 or 0 not in members:
        members = {}
    backend = "nccl" if all(map(_has_a_gpu_a_rank, (found[f"report-{rank}"] for rank in members))) else "gloo"
    heard = {str(rank): meeting.tokens[name] for rank, name in enumerate(names) if name in found}
    return {"ranks": list(members), "nodes": list(members.values()), "port": port, "backend": backend, "heard": heard}


def _has_a_gpu_a_rank(report: Mapping[str, Any]) -> bool:
    """Whether a node's first rank has seen as many GPUs as there are ranks; True of its other ranks, which do not say."""
    facts = report["facts"].get("gpus") or {}
    seen = facts.get("gpus")
    ranks_there = facts.get("ranks", 0)
    if report.get("local_rank") and not seen:
        return True
    return isinstance(seen, list) and (
        len(seen) >= ranks_there or (len(seen) == 1 and facts.get("granted", 0) >= ranks_there)
    )


def _sound(report: Mapping[str, Any], bad: set[int]) -> bool:
    return (
        isinstance(report.get("node_rank"), int)
        and isinstance(report.get("facts"), dict)
        and report["node_rank"] not in bad
    )


def _go(meeting: Meeting, info: RankInfo, end: float) -> dict[str, Any]:
    """The first rank's word on who measures, if it has heard this rank; {} where none comes until ``end``."""
    while True:
        go = meeting.wait(["go"], end).get("go")
        if go and go["heard"].get(str(info.rank)) == meeting.token:
            meeting.is_heard = True
            return go
        if time.monotonic() > end or (go and meeting.is_new("go")):  # which does without this rank
            return {}
        time.sleep(POLL_S)  # that may be another examination's


def _measure(meeting: Meeting, info: RankInfo, listener: int, go_end: float, end: float) -> dict[str, Any]:
    """This rank's part of the bandwidth test, in a process that is killed at ``end``; how far it came, and what it found."""
    go = _go(meeting, info, go_end)
    ranks_, nodes = go.get("ranks", []), go.get("nodes", [])
    if info.rank not in ranks_:
        return {}
    environ = dict(os.environ)
    if choice := _interface(info):
        environ.update(network.settings(choice, environ))
    local = [rank for rank, node in zip(ranks_, nodes, strict=True) if node == info.node_rank]
    environ.update(
        RANK=str(ranks_.index(info.rank)), WORLD_SIZE=str(len(ranks_)), LOCAL_RANK=str(local.index(info.rank)),
        MASTER_ADDR=info.master_addr or "127.0.0.1", MASTER_PORT=str(go["port"]), NODES=json.dumps(nodes),
    )  # fmt: skip
    left = end - time.monotonic()
    command = [sys.executable, "-m", "recipes.core.doctor.linkcheck", str(go["backend"]), str(listener), f"{left:.0f}"]
    out, wrong = commands.ask(command, left, environ, (listener,) if listener >= 0 else ())
    found: dict[str, Any] = {"at": "its start", "pairs": []}
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            word = json.loads(line)
            found["pairs"] += [word.pop("pair")] if "pair" in word else []
            found.update(word)
    if wrong and "error" not in found and not found.get("ended"):
        found["error"] = wrong
    return found


def _expected(info: RankInfo) -> Expected:
    return Expected(info.nodes or ("",) * info.num_nodes, info.world_size)


def _judge(meeting: Meeting, info: RankInfo, plan: Plan, end: float) -> int:
    """Waits for all final reports until ``end``, and says what they come to. Gives the exit status."""
    known = range(0 if info.rank == 0 or meeting.is_heard else 1, info.world_size)  # the first rank's may be old
    finals = meeting.wait([f"final-{rank}" for rank in known], end)
    early = meeting.wait([f"report-{rank}" for rank in known if f"final-{rank}" not in finals], 0)
    found = judge.verdict_of(
        _expected(info), [*finals.values(), *({**report, "early": True} for report in early.values())]
    )
    write_json(plan.run_dir / "doctor.json", verdict.as_json(found))
    meeting.tell("verdict", {"exclude": found.exclude, "healthy": found.healthy})
    code = errors.EXIT_DONE if found.healthy else errors.EXIT_MACHINE
    worst = next((entry.what for entry in found.entries if entry.bad), "")
    if rundir.job_id(os.environ):
        attempt = rundir.open_attempt(plan.run_dir, found.hosts, rundir.launch_id(os.environ))
        first = {"host": found.exclude[0] if found.exclude else None, "exit_status": code} if code else None
        state, kind = ("failed", Kind.machine) if code else ("done", None)
        rundir.write_status(plan.run_dir, state, attempt=attempt, step=0, reason=worst, kind=kind, first=first)
    print(json.dumps(verdict.as_json(found)) if plan.as_json else "\n".join(verdict.lines(found)), flush=True)
    # srun --kill-on-bad-exit would end the others, and its status be theirs, where this rank left before them.
    gone = meeting.wait(
        [f"gone-{name.partition('-')[2]}" for name in finals if name != f"final-{info.rank}"],
        time.monotonic() + LEAVE_S,
    )
    if len(gone) + 1 < info.world_size:
        _end_step()
    meeting.sweep()
    return code


def _end_step() -> None:
    """Has Slurm end this step a moment later: a process that hangs would keep srun waiting for ever."""
    if ranks.in_step(os.environ):  # never the batch script or the shell of salloc, which have an id too
        with contextlib.suppress(OSError):
            step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
            subprocess.Popen(["sh", "-c", 'sleep 1; exec scancel --signal=KILL "$0"', step], start_new_session=True)


def _stand_by(meeting: Meeting, info: RankInfo, plan: Plan, deputy: float, end: float) -> int:
    """Serves the others until the verdict is there. Where rank 0 gives none, the first rank that lives does."""
    if not meeting.wait(["verdict"], deputy):
        alive = meeting.wait([f"final-{rank}" for rank in range(1, info.world_size)], 0)
        if min((int(name.partition("-")[2]) for name in alive), default=info.rank) == info.rank:
            return _judge(meeting, info, plan, 0)
        meeting.wait(["verdict"], end)
    with contextlib.suppress(FileNotFoundError):  # swept as soon as it is seen
        meeting.tell(f"gone-{info.rank}", {"rank": info.rank})
    return errors.EXIT_DONE

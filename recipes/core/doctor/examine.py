"""An examination: one process on each node checks it and the links to some others, and one process
judges all reports.

In a batch job, the shell judges after srun has ended (`judge_later`). Under a
bare srun, the first node judges, or if it is silent, the lowest node that reported.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

from recipes.core import errors
from recipes.core.doctor import commands, judge, probes, reach, verdict
from recipes.core.doctor.probes import Surroundings
from recipes.core.doctor.reports import POLL_S, NodeReports, Report, Reports, Stage, stage_of
from recipes.core.files import write_json
from recipes.core.place import network
from recipes.core.place.ranks import RankInfo
from recipes.core.run import attempt as attempts
from recipes.core.run import directory
from recipes.core.slurm import client, environment

# Shares of ``seconds`` after which each part is abandoned.
CHECKS_SHARE = 0.4
REACH = 0.55
GO = 0.6
LINKS = 0.85
VERDICT = 0.92
STAND_IN = 0.96
SLACK_S = 3.0  # the other nodes wait so much longer than the limit of the first one
LEAVE_S = 2.0  # time for the other nodes to end before the node that gave the verdict


def run(
    here: Surroundings, seconds: float, judge_later: bool = False, bandwidth: bool = True
) -> int:
    """Examines this node, and judges all nodes if this process is the judge. Returns its exit
    status: 3 from the judge if a node is bad.

    Only the first rank of a node does anything. seconds: the time limit of the whole. judge_later:
    another process judges the reports. bandwidth: whether it is measured.
    """
    info = here.info
    begin = time.monotonic()
    if info.local_rank:
        return errors.EXIT_DONE

    def at(share: float) -> float:
        return begin + share * seconds

    folder = here.run_dir / "reports"
    if not judge_later:  # another step or start of this job must not read these reports
        folder = folder / f"{info.run_id or 'now'}-{info.restart_count}"
    reports = Reports(folder, info.node_rank)
    host = socket.gethostname()
    mine: Report = {"port": reach.serve(), "address": host, "host": host}
    choice = None if info.nodes else _interface(info)
    if choice:
        mine["address"] = choice.address  # without Slurm, no node knows the others' names
    reports.write(mine, Stage.listening)
    mine["facts"], findings = probes.run_all(here, CHECKS_SHARE * seconds)
    mine["findings"] = list(map(asdict, findings))
    mine["links"] = _probe_peers(reports, info, at(REACH), 0.05 * seconds)
    reports.write(mine, Stage.examined)
    if bandwidth and info.node_rank:
        first = reports.collect([0], Stage.ready, at(GO) + SLACK_S).get(0, {})
        mine["bandwidth"] = _measure(first.get("measure", {}), info, None, at(LINKS))
    else:
        # without the test too: a node that had ended would not answer the probes of the others
        others = reports.collect(range(info.num_nodes), Stage.examined, at(GO))
        if bandwidth:
            with network.listener() as listener:
                mine["measure"] = _members(others, info, listener.getsockname()[1])
                reports.write(mine, Stage.ready)
                mine["bandwidth"] = _measure(mine["measure"], info, listener.fileno(), at(LINKS))
    if reports.are_judged():  # this node is late
        return errors.EXIT_DONE
    reports.write(mine, Stage.final)
    if judge_later:
        return errors.EXIT_DONE
    if info.node_rank == 0:
        return give_verdict(reports, _hosts(info), here.run_dir, at(VERDICT))
    return _stand_by(reports, info, here.run_dir, at(STAND_IN), at(1))


def _interface(info: RankInfo) -> network.Choice | None:
    with contextlib.suppress(network.NetworkError):
        return network.choose(info)
    return None


def _probe_peers(reports: Reports, info: RankInfo, end: float, timeout_s: float) -> list[Report]:
    """The links to some other nodes, as `reach.peers` chooses them. timeout_s: of a step of a
    probe.
    """
    wanted = reach.peers(info.node_rank, info.num_nodes)
    listening = reports.collect(wanted, Stage.listening, end - 4 * timeout_s)
    # not as a context manager: the resolver has no time limit
    pool = ThreadPoolExecutor(max(1, len(listening)))
    answers = {}
    for peer, report in listening.items():
        host = info.nodes[peer] if info.nodes else report["address"]
        host = host if peer else info.master_addr
        answers[peer] = pool.submit(reach.probe, host, report["port"], timeout_s)
    done, _ = wait(answers.values(), max(0.0, end - time.monotonic()))
    pool.shutdown(wait=False)
    links = []
    for peer, answer in answers.items():
        fault, why = answer.result() if answer in done else ("connect", "timed out")
        links.append({"peer": peer, "fault": fault, "why": why})
    return links


def _members(reports: NodeReports, info: RankInfo, port: int) -> Report:
    """``measure`` in the first node's report: the nodes that measure bandwidth answered and are not
    bad. None do if node 0 is bad.
    """
    examined = _examined(reports)
    bad = judge.verdict_of(_hosts(info), examined).bad_nodes
    nodes = [node for node in examined if node not in bad]
    if len(nodes) < 2 or 0 not in nodes:
        nodes = []
    counts = (len(examined[node]["facts"].get("gpus", [])) for node in nodes)
    gpus = min(counts, default=0)
    backend = "nccl" if gpus else "gloo"
    return {"nodes": nodes, "port": port, "backend": backend, "gpus": max(1, gpus)}


def _examined(reports: NodeReports) -> NodeReports:
    return {
        n: report for n, report in sorted(reports.items()) if stage_of(report) >= Stage.examined
    }


def _measure(members: Report, info: RankInfo, listener: int | None, end: float) -> Report:
    """Runs this node's part of the bandwidth test in a process, at most until ``end``. Returns its
    last step and what it measured.
    """
    nodes = members.get("nodes", [])
    if info.node_rank not in nodes:
        return {}
    environ = dict(os.environ)
    choice = _interface(info)
    if choice:
        environ.update(network.settings(choice, environ))
    left = end - time.monotonic()
    test = {
        **members,
        "rank": nodes.index(info.node_rank),
        "host": info.master_addr,
        "listener": listener,
        "timeout_s": round(left),
    }
    command = [sys.executable, "-m", "recipes.core.doctor.linkcheck", json.dumps(test)]
    out, why = commands.run(command, left, environ, () if listener is None else (listener,))
    result: Report = {"at": "its start", "pairs": []}
    for line in out.splitlines():
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # a line of a library
            step = json.loads(line)
            result["pairs"] += [step.pop("pair")] if "pair" in step else []
            for name in {"busbw", "correct"} & step.keys():  # the worst of all GPUs
                step[name] = min(step[name], result.get(name, step[name]))
            result.update(step)
    if why and not result.get("ended"):
        result.setdefault("error", why)
    return result


def _hosts(info: RankInfo) -> tuple[str, ...]:
    """The host of each node by node_rank; "" if unknown."""
    return info.nodes or ("",) * info.num_nodes


def give_verdict(reports: Reports, hosts: Sequence[str], run_dir: Path, end: float) -> int:
    """Waits for all final reports until ``end``, writes and prints the verdict, and removes the
    reports. Returns the exit status.
    """
    collected = reports.collect(range(len(hosts)), Stage.final, end)
    seen = {
        node: {**report, "early": stage_of(report) < Stage.final}
        for node, report in _examined(collected).items()
    }
    if not seen:  # the step did not start: leaving out all nodes would not fix it
        print(f"doctor: no node has written a report into {reports.folder}", file=sys.stderr)
        return errors.EXIT_MACHINE
    judged = judge.verdict_of(hosts, seen)
    write_json(run_dir / "doctor.json", {**asdict(judged), "healthy": judged.healthy})
    code = errors.EXIT_DONE if judged.healthy else errors.EXIT_MACHINE
    attempt = attempts.given(os.environ)
    # that of recipe=doctor, which its batch script judges
    if attempt and attempt.run_dir == run_dir:
        if code:
            # bad ones are first
            attempts.refuse(os.environ, errors.MachineError(judged.entries[0].what))
        else:
            directory.write_status(run_dir, "done", attempt=attempt.number, step=0)
    print("\n".join(verdict.lines(judged)), flush=True)
    reports.remove()
    if code and len(hosts) > 1 and environment.in_step(os.environ):
        # With srun --kill-on-bad-exit this process must end last: otherwise srun kills the others
        # and reports their status.
        time.sleep(LEAVE_S)
        if any(stage_of(collected.get(node)) < Stage.final for node in range(len(hosts))):
            # Slurm ends this step one second later. Otherwise srun waits forever for a process that
            # hangs.
            client.kill_step_later(os.environ)
    return code


def _stand_by(reports: Reports, info: RankInfo, run_dir: Path, deadline: float, end: float) -> int:
    """Waits for the verdict while the server runs. If there is none at ``deadline``, the lowest
    node that reported gives it.
    """
    while not reports.are_judged() and time.monotonic() < end:
        if time.monotonic() > deadline:
            deadline = end
            alive = reports.collect(range(info.num_nodes), Stage.final, 0)
            final = [node for node, report in alive.items() if stage_of(report) >= Stage.final]
            # another node may judge just now, and remove the reports
            if info.node_rank == min(final, default=None):
                return give_verdict(reports, _hosts(info), run_dir, 0)
        time.sleep(POLL_S)
    return errors.EXIT_DONE

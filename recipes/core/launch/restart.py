"""Starts the ranks of a job again in its allocation, after a failure that a restart can cure.

The job keeps its place in the queue. Nodes that do not answer, or that the doctor finds bad, are
left out: ``spare=`` nodes replace them, or ``min_nodes=`` allows fewer.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core import files
from recipes.core.errors import ConfigError, Kind, MachineError, kind_of
from recipes.core.launch import examination, unpack
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, ledger, saves
from recipes.core.run.attempt import Attempt
from recipes.core.run.judge import Outcome
from recipes.core.run.logs import say
from recipes.core.run.outlook import HOW_TO_RESUME
from recipes.core.run.spec import Spec
from recipes.core.slurm import client, environment
from recipes.core.variables import Environ

LAG_S = 4.0  # srun may take this long to end after a rank has failed
SILENT_LAG_S = 1.0  # the same if a node does not answer, for which srun would wait
WATCH_S = 0.5  # between two looks for records
# in the folder of an attempt that failed: the nodes that did not answer then
SILENT = "silent.json"
GAINLESS = 2  # restarts in a row without a new checkpoint after which the run has failed
RESUBMITS = 2  # how often a job without enough good nodes is requeued without the bad ones


@dataclass(frozen=True)
class Restart:
    """line: what is done, for the log. attempt: the new one; None if the ranks do not start again.
    options: of srun.
    """

    line: str
    attempt: Attempt | None = None
    options: tuple[str, ...] = ()


def options_of(nodes: Sequence[str], environ: Environ) -> list[str]:
    """The options of srun for a step on some nodes of the job. Raises ConfigError if the nodes of
    the job have different numbers of tasks.
    """
    tasks = environment.tasks_per_node(environ)
    if not tasks:
        raise ConfigError("spare= and min_nodes= need the same number of ranks on each node")
    options = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes) * tasks}"]
    return [*options, f"--nodelist={','.join(nodes)}"]


def first_nodes(spec: Spec, environ: Environ) -> list[str]:
    """The options of srun with which ``spare=`` nodes are left out at the start. Raises
    ConfigError.
    """
    spare = spec.settings.run.spare
    nodes = environment.nodes_of_job(environ)
    if not spare:
        return []
    if spare >= len(nodes):
        raise ConfigError(f"spare={spare}: the job has only {len(nodes)} nodes: request more")
    return options_of(nodes[: len(nodes) - spare], environ)


def of_this_start(attempt: Attempt, environ: Environ) -> list[Attempt]:
    """The attempts of this start of the job in the run of ``attempt``, newest first."""
    launch = directory.launch_id(environ)
    every = attempts.every(attempt.run_dir)
    return [each for each in every if each.facts().get("launch") == launch]


def plan(
    attempt: Attempt, outcome: Outcome, spec: Spec, run_dir: Path, environ: Environ
) -> Restart:
    """What follows a step whose ranks have failed. Opens the new attempt, or requeues the job
    without bad nodes. run_dir: of the job; that of an evaluation's attempt is inside.
    """
    run = spec.settings.run
    recipe = spec.settings.recipe
    if not outcome.kind or not outcome.kind.is_curable:
        return Restart("")
    history = of_this_start(attempt, environ)
    used = len(history) - 1
    if used >= run.restarts:
        return Restart(f"not started again, since restarts={run.restarts} is reached")
    if not has_gained(history):
        return Restart(f"not started again, since {GAINLESS} restarts in a row made no progress")

    nodes = environment.nodes_of_job(environ)
    excluded = _excluded(attempt)
    try:
        bad = _bad_nodes([node for node in nodes if node not in excluded], spec, attempt, environ)
    except MachineError as error:
        return Restart(f"not started again, since {error}: {HOW_TO_RESUME}")
    excluded |= bad
    good = [node for node in nodes if node not in excluded]
    wanted = len(nodes) - run.spare
    fewer = len(good) if run.min_nodes and len(good) >= run.min_nodes else 0
    count = wanted if len(good) >= wanted else fewer
    if not count:
        names = ",".join(sorted(excluded))
        requeued = examination.requeue_without(names, RESUBMITS, run_dir, environ)
        return Restart(f"too few nodes are left without {names}; {requeued}")
    options = ["--overlap"]  # of a node that does not answer, Slurm has not taken back its tasks
    if excluded or run.spare:
        options += options_of(good[:count], environ)
    new = attempts.open_next(attempt.run_dir, recipe, environ)
    left_out = {"excluded": sorted(excluded), "time": time.time()}
    files.write_json(new.folder / attempts.RESTART, left_out)
    without = f" without {', '.join(sorted(bad))}" if bad else ""
    line = f"started again{without} (restart {used + 1} of at most {run.restarts})"
    took = ledger.text(ledger.recovery(new))
    return Restart("; ".join(filter(None, (line, took))), new, tuple(options))


def _excluded(attempt: Attempt) -> set[str]:
    """The nodes that the restarts so far have left out."""
    return set(files.read_json(attempt.folder / attempts.RESTART).get("excluded", ()))


def has_gained(history: Sequence[Attempt]) -> bool:
    """Whether one of the last restarts began at a later step than the start before it, or a program
    has saved a file. history: the attempts of a job, newest first.
    """
    last = history[: GAINLESS + 1]
    if len(last) <= GAINLESS:
        return True
    if last[0].facts().get("of_program"):
        return any(saves.has_changed(each) for each in last)
    return len({each.facts().get("step") for each in last}) > 1


def _bad_nodes(nodes: Sequence[str], spec: Spec, attempt: Attempt, environ: Environ) -> set[str]:
    """The nodes that do not answer, and those that the doctor finds bad among the others. Raises
    MachineError if one of the others no longer has the environment of the ranks and the doctor.
    """
    noted = files.read_json(attempt.folder / SILENT)  # by the watcher, unless srun was faster
    silent = set(noted["nodes"]) if noted else client.silent_nodes(nodes)
    rest = [node for node in nodes if node not in silent]
    if spec.settings.run.environment and not unpack.is_kept(spec.inside[-1], rest, environ):
        raise MachineError("a node no longer has the files of environment=")
    verdict = examination.examine_nodes(spec, attempt.run_dir / "doctor", rest, environ)
    return silent | set(verdict.get("exclude", ()))


def watch(attempt: Attempt, srun: int, environ: Environ) -> None:
    """Asks the nodes for an answer as soon as a rank has failed, for the restart. Ends the step if
    a rank has ended and srun has not: then a node does not answer, and Slurm finds that out only
    after minutes. srun: its process ID.
    """
    asking = None
    ended_at = None
    while attempts.start_time(srun):
        time.sleep(WATCH_S)
        records = attempts.records(attempt)
        failures = [record for record in records if kind_of(record) is not Kind.stopped]
        if failures and not asking:
            asking = threading.Thread(target=_note_silent, args=(attempt, environ))
            asking.start()
        if ended_at is None and not all(record.get("is_ending") for record in failures):
            ended_at = time.monotonic()
        silent = files.read_json(attempt.folder / SILENT).get("nodes")
        lag_s = SILENT_LAG_S if silent else LAG_S
        if ended_at is not None and time.monotonic() - ended_at > lag_s:
            say(f"a rank has failed, but srun has not ended after {lag_s:g} s: the step is ended")
            client.kill_steps(environment.job_id(environ))
            with contextlib.suppress(ProcessLookupError):
                os.kill(srun, signal.SIGKILL)
            break
    if asking:
        asking.join()


def _note_silent(attempt: Attempt, environ: Environ) -> None:
    excluded = _excluded(attempt)
    nodes = [node for node in environment.nodes_of_job(environ) if node not in excluded]
    files.write_json(attempt.folder / SILENT, {"nodes": sorted(client.silent_nodes(nodes))})

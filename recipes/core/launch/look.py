"""``launch.py look``: where each rank of a running job is, and for which ranks the others
wait. Never torch.
"""

import re
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.core import files, trust
from recipes.core.errors import EXIT_DONE, InputError, MachineError, printable, shown
from recipes.core.launch.runs import Run
from recipes.core.run import attempt as attempts
from recipes.core.run import look as requests
from recipes.core.run import watchdog
from recipes.core.run.record import State

RUNNING = (State.starting, State.running, State.unknown)
WAIT_S = 10.0  # for the answers of all ranks
POLL_S = 0.2
STUCK_S = 2.0  # a rank without progress for this long is stuck, or waits for another one
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
LIBRARY = re.compile(r"(^|/)lib(64)?/python3|^<|/hook/sitecustomize\.py$")

Answer = Mapping[str, Any]  # of a rank, as `requests.answer_requests` writes it


def look(run: Run, told: dict[str, Any]) -> int:
    """Prints where the ranks of ``run`` are, also into ``told``. Raises InputError if it does not
    run, and MachineError if it belongs to another user.
    """
    folder = Path(run.folder)
    if run.state not in RUNNING:
        raise InputError(f"{folder}: is not running: {run.state}")
    if not trust.is_own(folder):
        raise MachineError(f"{folder}: belongs to another user")
    has_begun = run.state is State.running
    attempt = attempts.owner(folder) if has_begun else attempts.newest(folder)
    hosts: dict[int, str] = {}
    if attempt:
        hosts = dict(enumerate(attempt.facts().get("hosts") or ()))
        ranks = attempts.program_ranks(attempt)
        hosts |= {rank["rank"]: rank["host"] for rank in ranks if not rank["ended"]}
    answers = ask(folder, hosts)
    lines = lines_of(answers, hosts)
    print("\n".join(map(printable, lines)))
    told |= {"run": run.folder, "lines": lines, "ranks": answers}
    return EXIT_DONE


def ask(folder: Path, ranks: Collection[int]) -> list[Answer]:
    """The answers of the ranks of a run. Returns when ``ranks`` have answered, or after WAIT_S."""
    answers = dict[int, Answer]()
    deadline = time.monotonic() + WAIT_S
    with (
        files.writing_to(folder, "run_dir"),
        tempfile.TemporaryDirectory(
            prefix=requests.PREFIX, dir=folder / "attempts", ignore_cleanup_errors=True
        ) as request,
    ):
        trust.write_own(Path(request, requests.REQUEST), b"{}\n")
        while time.monotonic() < deadline and not (ranks and answers.keys() >= set(ranks)):
            time.sleep(POLL_S)
            for answer in map(files.read_json, Path(request).glob("rank*.json")):
                if answer:
                    answers[answer["rank"]] = answer
    return list(answers.values())


def lines_of(answers: Sequence[Answer], hosts: Mapping[int, str]) -> list[str]:
    """A line for each group of processes that are at the same place, those first for which others
    wait; below it the stack of one of them. hosts: of the ranks that should have answered.
    """
    progress = {answer["rank"]: _progress(answer) for answer in answers}
    hosts = {**hosts, **{answer["rank"]: answer["host"] for answer in answers}}
    late = hosts.keys() - progress.keys()
    lines = []
    if late or not answers:
        why = "suspended, without its node, or without a view of the run directory"
        lines.append(f"{_names(late, hosts)}: no answer within {WAIT_S:g} s: {why}")
    elif len(set(progress.values())) > 1:
        least = min(progress.values())
        late = {rank for rank in progress if progress[rank] == least}

    awaited = f"waiting for {_names(late, hosts)}, "
    groups: dict[tuple[str, ...], tuple[set[int], str, str]] = {}
    for answer in sorted(answers, key=_progress):
        rank = answer["rank"]
        for number, process in enumerate(answer["processes"]):
            place = waits = seconds = ""
            if number == 0 and answer.get("unchanged_s", 0.0) > STUCK_S:
                place = f", at {watchdog.place(answer['step'], answer['phase'])}"
                seconds = f" for {answer['unchanged_s']:.0f} s"
                if late and rank not in late and answer["phase"] > watchdog.START:
                    waits = awaited
            key = ("workers of " if number else "", waits, _where(process), place)
            groups.setdefault(key, (set(), seconds, process["stack"]))[0].add(rank)
    for (workers, waits, where, place), (ranks, seconds, stack) in groups.items():
        lines.append(f"{workers}{_names(ranks, hosts)}: {waits}{where}{seconds}{place}")
        lines += stack.splitlines()
    return lines


def _progress(answer: Answer) -> tuple[int, int]:
    """How far a rank is: step and phase. A stopped rank is behind all others; ranks of a program
    are equal.
    """
    if any(process["state"] in requests.STOPPED for process in answer["processes"][:1]):
        return (-1, 0)
    return answer.get("step", 0), answer.get("phase", 0)


def _where(process: Mapping[str, Any]) -> str:
    """The function that a process executes, and the line outside of libraries that called it."""
    if process["state"] in requests.STOPPED:
        return "stopped by a signal"
    frames = FRAME.findall(process["stack"])
    if not frames:
        kernel = f"{process['state']}, {process['kernel']}"
        return f"no Python stack of {shown(process['command'], 200)} (state {kernel})"
    own = [frame for frame in frames if not LIBRARY.search(frame[0])]
    file, line, _ = (own or frames)[0]
    return f"in {frames[0][2]} at {file}:{line}"


def _names(ranks: Collection[int], hosts: Mapping[int, str]) -> str:
    """Names ranks, for example ``ranks 0-3, 5``, and their host if they share one."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    names = {hosts[rank] for rank in ranks}
    host = f" on {shown(names.pop())}" if len(names) == 1 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {text or 'of this run'}{host}"

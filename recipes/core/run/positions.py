"""Where the ranks of a run are: the question to all of them, and their answers as lines, grouped by
place. Standard library only.
"""

import re
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import mean

from recipes.core import files, trust
from recipes.core.errors import printable, shown
from recipes.core.run import look
from recipes.core.run.attempt import Attempt
from recipes.core.run.logs import say

WAIT_S = 8.0  # for the answers of all ranks
# for the rank that asks, until it has kept the answers; less than watchdog.MARGIN_S
REPORT_S = 11.0
POLL_S = 0.2
STUCK_S = 2.0  # a rank without progress for this long is stuck, or waits for another one
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
LIBRARY = re.compile(r"(^|/)lib(64)?/python3|^<|/hook/sitecustomize\.py$")
# The innermost Python frame of a rank that waits in a collective, or in a backward pass with one.
COLLECTIVE = re.compile(r"(^|/)torch/(distributed/|autograd/graph\.py)")

Answer = files.Json  # of a rank, as `look.answer_requests` writes it
Hosts = Mapping[int, str]  # by rank
Place = tuple[str, Sequence[str]]  # a line for ranks at one place, and the stack of one of them


def ask(folder: Path, ranks: Collection[int]) -> list[Answer]:
    """The answers of the ranks of a run. Returns when ``ranks`` have answered, or after WAIT_S.
    Raises OSError and MachineError.
    """
    answers = dict[int, Answer]()
    deadline = time.monotonic() + WAIT_S
    with (
        files.writing_to(folder, "run_dir"),
        tempfile.TemporaryDirectory(
            prefix=look.PREFIX, dir=folder / "attempts", ignore_cleanup_errors=True
        ) as request,
    ):
        trust.write_own(Path(request, look.REQUEST), b"{}\n")
        while time.monotonic() < deadline and not (ranks and answers.keys() >= set(ranks)):
            time.sleep(POLL_S)
            for answer in map(files.read_json, Path(request).glob("rank*.json")):
                if answer:
                    answers[answer["rank"]] = answer
    return list(answers.values())


def lines_of(answers: Sequence[Answer], hosts: Hosts) -> list[str]:
    """The lines of `places_of`, each with the stack below it."""
    return [line for head, stack in places_of(answers, hosts) for line in (head, *stack)]


def places_of(answers: Sequence[Answer], hosts: Hosts) -> list[Place]:
    """A line for each group of processes that are at the same place, those first for which others
    wait, and the lines of the stack of one of them. hosts: of the ranks that should have answered.
    """
    hosts = {**hosts, **{answer["rank"]: answer["host"] for answer in answers}}
    silent = hosts.keys() - {answer["rank"] for answer in answers}
    late = behind(answers, hosts)
    places = list[Place]()
    if silent or not answers:
        why = "the job is suspended, or the node is down or cannot read the run directory"
        if not hosts:  # they are known once the ranks have met
            why = f"they are still starting, {why}"
        places.append((f"{_names(silent, hosts)}: no answer within {WAIT_S:g} s: {why}", ()))

    awaited = f"waiting for {_names(late, hosts)}, "
    groups: dict[tuple[str, ...], list[tuple[Answer, str]]] = {}
    for answer in sorted(answers, key=_progress):
        for number, process in enumerate(answer["processes"]):
            at = waits = ""
            if number == 0 and answer.get("unchanged_s", 0.0) > STUCK_S:
                at = f", at {answer.get('at')}"
                collective = answer.get("collective")
                at += f", last collective: {collective}" if collective else ""
            if number == 0 and late and answer["rank"] not in late and _may_wait(answer):
                waits = awaited
            key = ("workers of " if number else "", waits, _where(process), at)
            groups.setdefault(key, []).append((answer, process["stack"]))
    for (workers, waits, where, at), members in groups.items():
        first, stack = members[0]
        seconds = f" for {first['unchanged_s']:.0f} s" if at else ""
        used = [answer["cpus"] for answer, _ in members if "cpus" in answer and not workers]
        cpus = f", {mean(used):.1f} CPUs per rank" if used else ""
        ranks = _names({answer["rank"] for answer, _ in members}, hosts)
        head = f"{workers}{ranks}: {waits}{where}{seconds}{at}{cpus}"
        places.append((head, stack.splitlines()))
    return places


def file_of(attempt: Attempt) -> Path:
    """In which `report` keeps where the ranks of an attempt are that hangs."""
    return attempt.run_dir / "logs" / f"hang-{attempt.number}.txt"


def report(attempt: Attempt, hosts: Hosts) -> tuple[list[str], set[int]]:
    """Asks the ranks of an attempt that hangs where they are, prints it, and keeps it with their
    stacks. Returns `lines_of` without the stacks, and the ranks that are behind.

    Several ranks may call it at about the same time: one of them asks, and the others wait for it,
    and get empty results. Raises OSError and MachineError.
    """
    path = file_of(attempt)
    try:
        file = open(path, "x")  # noqa: SIM115
    except FileExistsError:
        deadline = time.monotonic() + REPORT_S  # the end of this rank may end the one that asks
        while not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return [], set()
    with file:
        answers = ask(attempt.run_dir, hosts)
        lines = map(printable, lines_of(answers, hosts))
        file.write("\n".join([*lines, ""]))
    heads = [printable(head) for head, _ in places_of(answers, hosts)]
    say("\n".join([*heads, f"stacks in {path}"]))
    return heads, behind(answers, hosts)


def behind(answers: Sequence[Answer], hosts: Hosts) -> set[int]:
    """The ranks that have not answered, else those that are behind the others; none if all are
    equally far.
    """
    progress = {answer["rank"]: _progress(answer) for answer in answers}
    silent = hosts.keys() - progress.keys()
    if silent:
        return set(silent)
    least = min(progress.values(), default=None)
    late = {rank for rank in progress if progress[rank] == least}
    return late if len(late) < len(progress) else set()


def _progress(answer: Answer) -> tuple[int, int]:
    """How far a rank is: step and phase. A stopped rank is behind all others. A rank of a program,
    which has no steps, is ahead if it is in a collective.
    """
    if any(process["state"] in look.STOPPED for process in answer["processes"][:1]):
        return (-1, 0)
    return answer.get("step", 0), answer.get("phase", int(_is_in_collective(answer)))


def _may_wait(answer: Answer) -> bool:
    """Whether a rank is where it may wait for others."""
    if "step" in answer:
        return bool(answer["unchanged_s"] > STUCK_S and answer.get("may_wait"))
    return _is_in_collective(answer)


def _is_in_collective(answer: Answer) -> bool:
    frames = [FRAME.search(process["stack"]) for process in answer["processes"][:1]]
    return any(frame and COLLECTIVE.search(frame[1]) for frame in frames)


def _where(process: files.Json) -> str:
    """The function that a process executes, and the line outside of libraries that called it."""
    if process["state"] in look.STOPPED:
        return "stopped by a signal"
    frames = FRAME.findall(process["stack"])
    if not frames:
        kernel = f"{process['state']}, {process['kernel']}"
        return f"no Python stack of {shown(process['command'], 200)} (state {kernel})"
    own = [frame for frame in frames if not LIBRARY.search(frame[0])]
    file, line, _ = (own or frames)[0]
    return f"in {frames[0][2]} at {file}:{line}"


def _names(ranks: Collection[int], hosts: Hosts) -> str:
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
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {text or 'of this run'}{host}"

"""``launch.py runs``, ``logs``, ``cancel``, ``resume`` and ``compare``: one's runs by their folders
or jobs, with their state in Slurm. Never torch.
"""

import contextlib
import functools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipes.core import files, trust
from recipes.core.errors import (
    EXIT_DONE,
    InputError,
    MachineError,
    Next,
    next_of,
    one_line,
    printable,
    shown,
)
from recipes.core.launch.jobs import write_description
from recipes.core.run import attempt as attempts
from recipes.core.run import command_line, efficiency, in_use, outlook, record, rows, table
from recipes.core.run.record import Record, State
from recipes.core.slurm import client, jobstate
from recipes.core.slurm.client import Line

LOG_BYTES = 1 << 16  # of another user's log, from its end
WATCH_S = 5.0  # between two tables of `runs watch`
COMMANDS = ("runs", "logs", "cancel", "resume", "compare")
OPTIONS = ("--json", "--failed", "--sort")  # of `runs`
JOB_ID = re.compile(r"\d+([_+]\d+)?")  # of a job, an array task or a component
UNFINISHED = (State.stopped, State.failed, State.lost, State.cancelled, State.refused)
ACTIVE = (State.pending, State.held, State.requeued, State.starting, State.running)


@dataclass(frozen=True)
class Run:
    """A run in the list. steps: of the whole run, 0 if unknown. left_s: until the time limit; None
    if unknown.
    """

    folder: str
    recipe: str
    job: str
    state: State
    step: int
    steps: int
    epoch: int | None
    best: Mapping[str, float]
    samples_per_second: float | None
    updated: float | None
    left_s: float | None
    starts: int
    nodes: str
    note: str


def in_queue(
    run: Record, job: Line | None, alive: bool | None, has_job: bool, asked: bool = True
) -> tuple[State, str]:
    """The state of a run according to its files and its job, and a note.

    job: its line in the queue; None if it is not there. alive: whether its process on this machine
    runs, None if that cannot be seen. has_job: whether it was submitted to Slurm. asked: whether
    Slurm answered.
    """
    if job and job.state in jobstate.WAITING:
        start = f"expected to start at {job.start}" if job.start[:1].isdecimal() else ""
        note = "; ".join(filter(None, (jobstate.with_advice(job.reason), start)))
        if job.held:
            return State.held, note
        return (State.requeued if run.status.get("state") else State.pending), note
    active = State.running if run.state is State.running else State.starting
    if job and job.state not in jobstate.ENDED:
        # the run is being saved, or its job has not ended yet
        is_of_newest = run.status.get("attempt") in [attempt.number for attempt in run.attempts[:1]]
        is_last = job.state == jobstate.COMPLETING or not run.status.get("next")
        return (State.running if is_of_newest and is_last else active), job.nodes
    if run.state is State.done:
        return State.done, ""
    if run.refused and not (alive and run.state is State.running):
        return State.refused, run.refused
    if run.state is State.failed:
        return State.failed, str(run.status.get("reason") or "")
    may_be_queued = has_job and not asked
    if run.state in (State.stopped, State.cancelled):
        if may_be_queued and next_of(run.status) in (None, Next.requeued, Next.held):
            return State.unknown, "Slurm does not answer"
        step = run.status["step"]
        reason = run.status.get("reason") or ""
        return run.state, f"saved at step {step}" if step else f"stopped by {reason}"
    if alive:
        return active, ""
    if may_be_queued:
        return State.unknown, "Slurm does not answer"
    is_cancelled = job is not None and job.state == "CANCELLED"
    if run.state is State.running:
        if is_cancelled:
            return State.cancelled, "it ended before it wrote its final status"
        if alive is None and not has_job:
            return State.lost, "see recipes.doctor explain"
        return State.lost, "it ended without a final status"
    if is_cancelled:
        return State.cancelled, "before it began"
    return (State.cancelled if has_job else State.lost), "it never began"


def read(folder: Path, jobs: Mapping[str, Line] | None, cluster: str = "") -> Run:
    """A run in the list. jobs: the lines of the queue; None without Slurm. cluster: its name; "" if
    it is unknown.
    """
    run = record.read(folder)
    # those of a run that is done are not needed
    facts = {} if run.state is State.done and run.job else run.facts
    original = str(facts.get("run_dir") or run.job.get("run_dir") or run.folder)
    is_moved = original != str(run.folder)
    is_copy = is_moved and os.path.exists(original) and not os.path.samefile(original, run.folder)
    of_files = (run.job.get("job_id"), facts.get("job"))
    ids = [str(job_id) for job_id in of_files if job_id and not is_copy]
    elsewhere = facts.get("cluster") if cluster else ""
    if elsewhere and elsewhere != cluster:
        jobs = None
    lines = {job_id: jobs[job_id] for job_id in ids if jobs and job_id in jobs}
    job_id = outlook.newest(ids, {key: line.state in jobstate.ENDED for key, line in lines.items()})
    job = lines.get(job_id)
    alive = False if is_copy else in_use.is_running(facts)
    state, note = in_queue(run, job, alive, bool(ids), jobs is not None)
    notes = [note, f"a copy of {original}" if is_copy else ""]
    if state is State.unknown and elsewhere:
        notes = [f"its job is on cluster {elsewhere}"]

    best = run.summary.get("best")
    notes.append(str(run.summary.get("efficiency") or ""))
    # of others, only the last row is read
    if state in (
        State.running,
        State.starting,
        State.requeued,
        State.stopped,
        State.cancelled,
    ):
        so_far = run.best()
        if so_far:
            best = {so_far[0]: so_far[1]}
        if state is State.running:
            notes.append(efficiency.verdict(run.newest_rows, facts, run.keys))
    hidden = {"step"}
    of_newest = {**run.row, **run.summary}
    if not best or not isinstance(best, dict):
        best = table.results(of_newest)
        hidden |= {*table.OF_TRAINING}
    numbers = {key: _finite(value) for key, value in best.items() if key not in hidden}
    return Run(
        folder=str(run.folder),
        recipe=run.recipe,
        job=job_id,
        state=state,
        step=run.step,
        steps=rows.whole(run.summary.get("steps") or run.row.get("total_steps")) or 0,
        epoch=rows.whole(run.row.get("epoch")),
        best={key: number for key, number in numbers.items() if number is not None},
        samples_per_second=_finite(of_newest.get("samples_per_second")),
        updated=_finite(run.status.get("updated")),
        left_s=job.left_s if job and state is State.running else None,
        starts=len(run.attempts),
        nodes=job.nodes if job else "",
        note=shown("; ".join(filter(None, notes)), 300),
    )


def _finite(value: object) -> float | None:
    """A number from a file; None if it is none."""
    number = rows.number(value)
    return number if math.isfinite(number) else None


def find(words: Sequence[str], root: Path) -> list[Path]:
    """The run directories that ``words`` name: folders, job IDs, array elements or ``last``; all of
    ``runs/`` without words.

    Raises InputError for a word that names none.
    """
    every = root / "runs"
    folders = list[Path]()
    for word in words or [str(every)]:
        if word == table.LAST:
            named = table.last(every)
        elif word and Path(word).is_dir():
            named = list(table.run_directories(Path(word)))
        elif word.replace("_", "").isdecimal():
            named = table.of_job(every, word)
        else:
            named = []
        if not named:
            raise InputError(_why_none(word, root))
        folders += named
    return list(dict.fromkeys(folders))


def _why_none(word: str, root: Path) -> str:
    """Why ``word`` names no run directory, and what to do."""
    why = "no run was found" if word else "names no run (is a variable not set?)"
    if word.replace("_", "").isdecimal():
        job = None
        with contextlib.suppress(MachineError):  # without Slurm
            job = client.find(word, timeout_s=1.0)
        log = outlook.early_log(job, word, root)
        if log:
            return f"{word}: this job ended before it had a run directory: read its log, {log}"
        if job:
            why = f"has no run directory yet: {jobstate.describe(job)}"
    return f"{shown(word) or repr(word)}: {why}: give a run directory, a job ID, or {table.LAST}"


def command(argv: Sequence[str], root: Path) -> int:
    """Runs ``launch.py runs|logs|cancel|resume|compare …``. Returns the exit status. Raises
    InputError and MachineError.
    """
    name, *words = argv
    if name == "runs":
        return show(words, root)
    if "--json" in words:
        raise InputError(
            f"--json: launch.py {name} does not support it; "
            "use runs --json or recipes.report --json"
        )
    options = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word and word != "follow"]
    if not names and name in ("cancel", "resume"):
        raise InputError(f"{name}: give a run: a run directory, a job ID, or {table.LAST}")
    folders = find(names or [table.LAST], root)
    if name == "compare":
        return compare(folders)
    if name == "logs":
        return logs(folders[0], options.get("rank", ""), "follow" in words)
    # an answer that is missing would leave a job running, or submit it twice
    jobs = client.mine(client.ANSWER_S)
    of_run = functools.partial(read, jobs=jobs, cluster=_cluster(jobs))
    runs = [table.read_one(folder, of_run) for folder in folders]  # all, before one is changed
    if name == "cancel":
        for run in runs:
            print(f"{_short(run.folder)}: {cancel(run)}", flush=True)
        return EXIT_DONE
    if len(runs) > 1:
        runs = [run for run in runs if run.state in UNFINISHED]
    added = [f"{key}={value}" for key, value in options.items()]
    every = [to_resume(run, added) for run in runs]  # before one is submitted
    for run, arguments in zip(runs, every, strict=True):
        print(f"{_short(run.folder)}: {resume(run, arguments)}", flush=True)
    return EXIT_DONE


def show(words: Sequence[str], root: Path) -> int:
    """Prints the table of runs. words: folders and job IDs, and ``watch``, ``--json``,
    ``--failed``, ``--sort=KEY``.
    """
    sort = ""
    names = []
    for word in words:
        option, _, value = word.partition("=")
        if option == "--sort":
            sort = value
        elif option.startswith("--") and option not in OPTIONS:
            raise InputError(f"{shown(word)}: must be one of {', '.join(OPTIONS)}")
        elif not option.startswith("--") and word != "watch":
            names.append(word)
    fields = Run.__dataclass_fields__
    if sort and sort not in fields:
        raise InputError(f"--sort={shown(sort)}: must be one of {', '.join(fields)}")
    jobs = client.mine()
    cluster = _cluster(jobs)
    while True:
        of_run = functools.partial(read, jobs=jobs, cluster=cluster)
        runs = table.read_each(find(names, root), of_run)
        if "--failed" in words:
            runs = [run for run in runs if run.state in UNFINISHED]
        if sort:
            runs.sort(key=lambda run: _sortable(getattr(run, sort)))
        if "--json" in words:
            lines = [json.dumps(asdict(run)) for run in runs]
        else:
            lines = lines_of(runs, time.time())
        if "watch" not in words:
            print("\n".join(lines))
            return EXIT_DONE
        print("\033[2J\033[H" + "\n".join([time.strftime("%H:%M:%S"), *lines]), flush=True)
        time.sleep(WATCH_S)
        jobs = client.mine()


def _cluster(jobs: Mapping[str, Line] | None) -> str:
    """The name of this cluster; "" if Slurm does not answer. jobs: `client.mine`."""
    return "" if jobs is None else client.cluster_name()


def _sortable(value: Any) -> tuple[bool, Any]:
    if isinstance(value, Mapping):
        value = next(iter(value.values()), None)
    return value is None, 0 if value is None else value


def lines_of(runs: Sequence[Run], now: float) -> list[str]:
    """A table. In a terminal, a note that does not fit beside its run has its own line. now:
    time.time().
    """
    head = ["run", "state", "step", "best", "samples/s", "age", "left", "starts"]
    rows = [
        [
            _short(run.folder),
            run.state,
            f"{run.step}/{run.steps}" if run.steps else str(run.step or ""),
            next((f"{value:.4f}" for value in run.best.values()), ""),
            f"{run.samples_per_second:,.0f}" if run.samples_per_second else "",
            _age(now - run.updated) if run.updated else "",
            _age(run.left_s) if run.left_s is not None else "",
            str(run.starts),
        ]
        for run in runs
    ]
    columns = zip(head, *rows, strict=True)
    used = [
        column for column in columns if column[0] in ("run", "state", "step") or any(column[1:])
    ]
    lines = table.aligned(list(zip(*used, strict=True)))
    notes = [run.note for run in runs]
    if not any(notes):
        return lines
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    between = max(map(len, lines)) + 2
    with_notes = [f"{lines[0]:<{between}}note"]
    for line, note in zip(lines[1:], notes, strict=True):
        beside = f"{line:<{between}}{note}".rstrip()
        with_notes += [beside] if len(beside) <= width else [line, f"    {note}"]
    return with_notes


def _age(seconds: float) -> str:
    """A duration in its largest unit, such as 5m or 3d."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if abs(seconds) >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def _short(folder: str) -> str:
    return printable(folder.removeprefix(f"{os.getcwd()}/"))


def compare(folders: Sequence[Path]) -> int:
    """Prints the keys in which runs differ and their results, one column per run. Raises InputError
    for a single run.
    """
    if len(folders) < 2:
        raise InputError(
            "compare: give at least two runs: directories, job IDs, or a folder of runs"
        )
    runs = [
        table.read_one(folder, lambda path: table.entry(record.read(path))) for folder in folders
    ]
    cells = table.cells(runs)
    print("\n".join(table.aligned(list(zip(*cells, strict=True)))))
    names = shlex.join(_short(str(folder)) for folder in folders)
    print(f"curves: python -m recipes.report {names} html=compare.html")
    return EXIT_DONE


def logs(folder: Path, rank: str, follow: bool) -> int:
    """Shows the end of a log: of the batch script, or of one rank. Replaces this process by tail.
    Raises InputError.

    In a log of another user, control characters are escaped.
    """
    described = files.read_json(folder / "job.yaml") or {}
    log = Path(str(described.get("log") or ""))
    if rank or not log.is_file():
        log = folder / "logs" / f"rank{rank or 0}.log"
    if not log.is_file():
        ranks = sorted(path.stem.removeprefix("rank") for path in log.parent.glob("rank*.log"))
        have = f"its ranks are {', '.join(ranks)}" if ranks else "it has no logs yet"
        raise InputError(f"{shown(folder)}: has no {shown(log.name)}: {have}")
    is_own = trust.is_own(log)
    if follow and not is_own:
        raise InputError(f"follow: {shown(log)} belongs to another user; leave out follow")
    print(f"==> {printable(str(log))} <==", flush=True)
    if not is_own:
        with open(log, "rb", opener=files.without_links) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            lines = file.read(LOG_BYTES).decode(errors="replace").splitlines()
        print("\n".join(map(printable, lines[-40:])))
        return EXIT_DONE
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; tail ends with its reader
    os.execvp("tail", ["tail", "-n", "40", *(["-F"] if follow else []), "--", str(log)])


def cancel(run: Run) -> str:
    """Cancels the job of a run, or ends its processes on this machine. Returns what it did. Raises
    MachineError.
    """
    problem = ""
    if run.state is State.unknown:
        problem = f"is not cancelled, since it is not known whether it runs: {run.note}"
    elif run.state not in ACTIVE:
        return f"is not running: {run.state}"
    elif not trust.is_own(Path(run.folder)):
        problem = "belongs to another user; to cancel a job of yours, type scancel JOB"
    elif run.job and not JOB_ID.fullmatch(run.job):
        problem = f"{shown(run.job)} is no job ID; to cancel a job, type scancel JOB"
    if problem:
        raise MachineError(f"{_short(run.folder)}: {problem}")
    facts = attempts.facts(Path(run.folder))
    if in_use.is_running(facts) and not facts.get("job"):
        pid = facts["process"]["pid"]
        os.kill(pid, signal.SIGTERM)
        return f"process {pid} was asked to save and end"
    try:
        client.cancel(run.job)
    except (OSError, subprocess.SubprocessError) as error:
        raise MachineError(f"scancel {run.job} failed: {client.said(error)}") from None
    return f"job {run.job} was cancelled"


def to_resume(run: Run, words: Sequence[str]) -> list[str]:
    """The words of `resume`: the keys that a run has, and ``words``. Raises InputError if it cannot
    be resumed, ConfigError for a key.
    """
    folder = Path(run.folder)
    described = _own_description(folder)
    if run.state not in (*UNFINISHED, State.done):
        raise InputError(
            f"{_short(run.folder)}: is {run.state}: wait until it ends, or cancel it first"
        )
    if not described or not (folder / "job.sh").is_file():
        raise InputError(
            f"{_short(run.folder)}: was not submitted to Slurm: start it again with: "
            f"python -m recipes.{run.recipe} run_dir={shlex.quote(run.folder)}"
        )
    arguments = [str(word) for word in described.get("arguments") or ()]
    by_key = {
        word.partition("=")[0]: word for word in (*arguments, f"run_dir={run.folder}", *words)
    }
    settings = command_line.parse([*by_key.values()], recipe=str(described.get("recipe")))
    typed = settings.absolute(settings.typed, Path.cwd())
    return [f"{name}={value}" for name, value in typed.items()]


def _own_description(folder: Path) -> dict[str, Any]:
    """job.yaml, which decides what `resume` submits; {} if there is none. Raises MachineError if
    another user could have written it.
    """
    try:
        with trust.open_own(folder / "job.yaml") as file:
            described = json.loads(file.read())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise MachineError(f"{folder}/job.yaml: cannot be read ({one_line(error, 120)})") from None
    return described if isinstance(described, dict) else {}


def resume(run: Run, arguments: Sequence[str]) -> str:
    """Submits a run again with its script and the words of `to_resume`. Returns what it did. Raises
    MachineError.
    """
    folder = Path(run.folder)
    element = run.job.partition("_")[2]
    try:
        # sbatch reads the file that was checked, also if another one takes its name meanwhile.
        described = _own_description(folder)
        with trust.open_own(folder / "job.sh") as script:
            options = [*described.get("options", ())]
            if element:
                options.append(f"--array={element}")
            root = str(described.get("root"))
            job_id = client.submit_open_file(script.fileno(), arguments, options, root)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise MachineError(f"sbatch refuses {_short(run.folder)}: {client.said(error)}") from None

    if element:
        job_id = f"{job_id}_{element}"
    log = ""
    with contextlib.suppress(MachineError):  # Slurm knows the job, but does not answer now
        job = client.find(job_id, timeout_s=client.OWN_JOB_S)
        log = job.log if job else ""
    # the job has not begun
    if (files.read_json(folder / "job.yaml") or {}).get("job_id") == described.get("job_id"):
        try:
            new = {**described, "job_id": job_id, "log": log, "arguments": arguments}
            write_description(folder, new)
        except OSError as error:
            raise MachineError(
                f"{_short(run.folder)}: job {job_id} is submitted, but job.yaml cannot be written "
                f"({error.strerror}): to stop the job, type scancel {job_id}"
            ) from None
    line = f"submitted as job {job_id}"
    return f"{line}\nlog: tail -F {shlex.quote(log)}" if log else line

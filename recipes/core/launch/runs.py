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

from recipes.core import errors, files, trust
from recipes.core.errors import InputError, MachineError, Next, next_of, printable, shown
from recipes.core.launch import allocation
from recipes.core.launch.jobs import write_description
from recipes.core.run import attempt as attempts
from recipes.core.run import command_line, directory, efficiency, in_use, judge, queue, rows, table
from recipes.core.run.queue import Line

LOG_BYTES = 1 << 16  # of another user's log, from its end
WATCH_S = 5.0  # between two tables of `runs watch`
COMMANDS = ("runs", "logs", "cancel", "resume", "compare")
OPTIONS = ("--json", "--failed", "--sort")  # of `runs`
JOB_ID = re.compile(r"\d+([_+]\d+)?")  # of a job, an array task or a component
UNFINISHED = ("stopped", "failed", "lost", "cancelled", "refused")


@dataclass(frozen=True)
class Run:
    """One run. state: one of the words of `word`. steps: of the whole run, 0 if unknown. left_s:
    until the time limit; None if unknown.
    """

    folder: str
    recipe: str
    job: str
    state: str
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


def word(
    status: Mapping[str, Any],
    job: Line | None,
    refused: str,
    alive: bool | None,
    has_job: bool,
    asked: bool = True,
    is_of_newest: bool = False,
) -> tuple[str, str]:
    """The state of a run, and a note.

    job: its line in the queue; None if it is not there. refused: why its newest launch did not
    begin. alive: whether its process on this machine runs, None if that cannot be seen. has_job:
    whether it was submitted to Slurm. asked: whether Slurm answered. is_of_newest: whether the
    newest attempt has written ``status``.
    """
    state = status.get("state")
    reason = str(status.get("reason") or "")
    if job and job.state in queue.WAITING:
        start = f"expected to start at {job.start}" if job.start[:1].isdecimal() else ""
        name = "held" if job.held else "requeued" if state else "pending"
        return name, "; ".join(filter(None, (queue.with_advice(job.reason), start)))
    if job and job.state not in queue.ENDED:
        # the run is being saved, or its job has not ended yet
        is_ending = is_of_newest and (job.state == queue.COMPLETING or not status.get("next"))
        return ("running" if state == "running" or is_ending else "starting"), job.nodes
    if state == "done":
        return "done", ""
    if refused:
        return "refused", refused
    if state in ("failed", "incomplete"):
        return "failed", reason
    if (
        state == "preempted"
        and has_job
        and not asked
        and next_of(status) in (None, Next.requeued, Next.held)
    ):
        return "unknown", "Slurm does not answer"
    if state == "preempted":
        note = f"saved at step {status['step']}" if status.get("step") else f"stopped by {reason}"
        return ("cancelled" if next_of(status) is Next.cancelled else "stopped"), note
    if alive:
        return ("running" if state == "running" else "starting"), ""
    if has_job and not asked:
        return "unknown", "Slurm does not answer"
    if state == "running" and job and job.state == "CANCELLED":
        return "cancelled", "it ended before it wrote its final status"
    if state == "running":
        return (
            "lost",
            "it ended without a final status"
            if alive is False or has_job
            else "see recipes.doctor explain",
        )
    if job and job.state == "CANCELLED":
        return "cancelled", "before it began"
    return ("cancelled" if has_job else "lost"), "it never began"


def read(folder: Path, jobs: Mapping[str, Line] | None, cluster: str = "") -> Run:
    """Reads one run directory. jobs: the lines of the queue; None without Slurm. cluster: its name;
    "" if it is unknown.
    """
    status = directory.read_status(folder) or {}
    described = files.read_json(folder / "job.yaml") or {}
    done = status.get("state") == "done"
    facts = {} if done and described else attempts.facts(folder)
    summary = (files.read_json(folder / "summary.json") or {}) if done else {}
    row = {} if summary.get("steps") else table.last_row(folder / "metrics.jsonl")
    ids = [str(one) for one in (described.get("job_id"), facts.get("job")) if one]
    original = str(facts.get("run_dir") or described.get("run_dir") or folder)
    is_copy = os.path.exists(original) and not os.path.samefile(original, folder)
    elsewhere = str(facts.get("cluster") or "") if cluster else ""
    if is_copy:
        ids = []
    if elsewhere and elsewhere != cluster:
        jobs = None
    known = {one: jobs[one] for one in ids if jobs and one in jobs}
    job_id = queue.newest(ids, {one: line.state in queue.ENDED for one, line in known.items()})
    job = known.get(job_id)
    refused = "" if done else judge.why_not_begun(folder)
    alive = False if is_copy else in_use.is_running(facts)
    is_of_newest = status.get("attempt") in attempts.numbers(folder)[:1]
    name, note = word(status, job, refused, alive, bool(ids), jobs is not None, is_of_newest)
    if is_copy:
        note = "; ".join(filter(None, (note, f"a copy of {original}")))
    elif name == "unknown" and elsewhere:
        note = f"its job is on cluster {elsewhere}"
    hint = str(summary.get("efficiency") or "")
    so_far = None
    # of others, only the last row is read
    if name in (
        "running",
        "starting",
        "requeued",
        "stopped",
        "cancelled",
    ):
        keys = table.keys(folder)
        found = rows.rows(folder)
        so_far = rows.best(found, keys)
        hint = efficiency.verdict(found, facts, keys) if name == "running" else ""
    best = (
        (summary["best"] if isinstance(summary.get("best"), dict) else None)
        or ({so_far[0]: so_far[1]} if so_far else None)
        or {k: v for k, v in table.results(row | summary).items() if k not in table.OF_TRAINING}
    )
    return Run(
        folder=str(folder),
        recipe=str(described.get("recipe") or facts.get("recipe") or ""),
        job=job_id,
        state=name,
        step=_whole(row.get("step") or status.get("step")) or 0,
        steps=_whole(summary.get("steps") or row.get("total_steps")) or 0,
        epoch=_whole(row.get("epoch")),
        best={
            key: number
            for key, value in best.items()
            if key != "step" and (number := _finite(value)) is not None
        },
        samples_per_second=_finite((row | summary).get("samples_per_second")),
        updated=_finite(status.get("updated")),
        left_s=job.left_s if job and name == "running" else None,
        starts=len(attempts.numbers(folder)),
        nodes=job.nodes if job else "",
        note=errors.shown("; ".join(filter(None, (note, hint))), 300),
    )


def _finite(value: object) -> float | None:
    """A number from a file; None if it is none."""
    found = rows.number(value)
    return found if math.isfinite(found) else None


def _whole(value: object) -> int | None:
    found = _finite(value)
    return None if found is None else int(found)


def find(words: Sequence[str], root: Path) -> list[Path]:
    """The run directories that ``words`` name: folders, job IDs, array elements or ``last``; all of
    ``runs/`` without words.

    Raises InputError for a word that names none.
    """
    every = root / "runs"
    found = list[Path]()
    for one in words or [str(every)]:
        if not one:
            raise InputError(
                f"'': names no run (is a variable not set?): give a run directory, a job ID, or {table.LAST}"
            )
        folder = Path(one)
        is_job = one.replace("_", "").isdecimal()
        job = None
        if one == table.LAST:
            named = table.last(every)
        elif folder.is_dir():
            named = list(table.run_directories(folder))
        else:
            named = table.of_job(every, one) if is_job else []
        if not named:
            if is_job:
                with contextlib.suppress(MachineError):  # without Slurm
                    job = queue.find(one, timeout_s=1.0)
            where = (
                f"has no run directory yet: {queue.describe(job)}" if job else "no run was found"
            )
            raise InputError(
                f"{shown(one)}: {where}: give a run directory, a job ID, or {table.LAST}"
            )
        found += named
    return list(dict.fromkeys(found))


def command(argv: Sequence[str], root: Path) -> int:
    """Runs ``launch.py runs|logs|cancel|resume|compare …``. Returns the exit status. Raises
    InputError and MachineError.
    """
    name, *words = argv
    if "--json" in words and name != "runs":
        raise InputError(
            f"--json: launch.py {name} does not support it; use runs --json or recipes.report --json"
        )
    if name == "runs":
        return show(words, root)
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
    jobs = queue.mine(queue.ANSWER_S)
    of_run = functools.partial(read, jobs=jobs, cluster=_cluster(jobs))
    found = [table.read_one(folder, of_run) for folder in folders]  # all, before one is changed
    if name == "cancel":
        for run in found:
            print(f"{_short(run.folder)}: {cancel(run)}", flush=True)
        return errors.EXIT_DONE
    chosen = [run for run in found if run.state in UNFINISHED or len(found) == 1]
    added = [f"{name}={value}" for name, value in options.items()]
    every = [to_resume(run, added) for run in chosen]  # before one is submitted
    for run, given in zip(chosen, every, strict=True):
        print(f"{_short(run.folder)}: {resume(run, given)}", flush=True)
    return errors.EXIT_DONE


def show(words: Sequence[str], root: Path) -> int:
    """Prints the table of runs. words: folders and job IDs, and ``watch``, ``--json``,
    ``--failed``, ``--sort=KEY``.
    """
    sort = next((word.partition("=")[2] for word in words if word.startswith("--sort=")), "")
    if sort and sort not in Run.__dataclass_fields__:
        raise InputError(
            f"--sort={shown(sort)}: must be one of {', '.join(Run.__dataclass_fields__)}"
        )
    if unknown := [
        word for word in words if word.startswith("--") and word.partition("=")[0] not in OPTIONS
    ]:
        raise InputError(f"{shown(unknown[0])}: must be one of {', '.join(OPTIONS)}")
    chosen = [word for word in words if word != "watch" and not word.startswith("--")]
    jobs = queue.mine()
    cluster = _cluster(jobs)
    while True:
        found = table.read_each(
            find(chosen, root), functools.partial(read, jobs=jobs, cluster=cluster)
        )
        found = [run for run in found if "--failed" not in words or run.state in UNFINISHED]
        if sort:
            found.sort(key=lambda run: _sortable(getattr(run, sort)))
        lines = (
            [json.dumps(asdict(run)) for run in found]
            if "--json" in words
            else lines_of(found, time.time())
        )
        if "watch" not in words:
            print("\n".join(lines))
            return errors.EXIT_DONE
        print("\033[2J\033[H" + "\n".join([time.strftime("%H:%M:%S"), *lines]), flush=True)
        time.sleep(WATCH_S)
        jobs = queue.mine()


def _cluster(jobs: Mapping[str, Line] | None) -> str:
    """The name of this cluster; "" if Slurm is not there or does not answer. jobs: `queue.mine`."""
    return "" if jobs is None else queue.cluster_name()


def _sortable(value: Any) -> tuple[bool, Any]:
    if isinstance(value, Mapping):
        value = next(iter(value.values()), None)
    return (value is None, value if value is not None else 0)


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
    used = [
        i
        for i, name in enumerate(head)
        if name in ("run", "state", "step") or any(row[i] for row in rows)
    ]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    lines = table.aligned([[row[i] for i in used] for row in (head, *rows)])
    if not any(run.note for run in runs):
        return lines
    between = max(map(len, lines)) + 2
    with_notes = [f"{lines[0]:<{between}}note"]
    for line, run in zip(lines[1:], runs, strict=True):
        beside = f"{line:<{between}}{run.note}".rstrip()
        with_notes += [beside] if len(beside) <= width else [line, f"    {run.note}"]
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
    now = time.time()
    cells = table.cells(
        [table.read_one(folder, lambda path: table.read_run(path, now)) for folder in folders]
    )
    print("\n".join(table.aligned(list(zip(*cells, strict=True)))))
    print(
        f"curves: python -m recipes.report {shlex.join(_short(str(folder)) for folder in folders)} html=compare.html"
    )
    return errors.EXIT_DONE


def logs(folder: Path, rank: str, follow: bool) -> int:
    """Shows the end of a log: of the batch script, or of one rank. Replaces this process by tail.
    Raises InputError.

    In a log of another user, control characters are escaped.
    """
    described = files.read_json(folder / "job.yaml") or {}
    of_rank = folder / "logs" / f"rank{rank or 0}.log"
    batch = Path(str(described.get("log") or ""))
    chosen = batch if not rank and batch.is_file() else of_rank
    if not chosen.is_file():
        there = sorted(
            path.stem.removeprefix("rank") for path in (folder / "logs").glob("rank*.log")
        )
        have = f"its ranks are {', '.join(there)}" if there else "it has no logs yet"
        raise InputError(f"{shown(folder)}: has no {shown(chosen.name)}: {have}")
    is_own = trust.is_own(chosen)
    if follow and not is_own:
        raise InputError(f"follow: {shown(chosen)} belongs to another user; leave out follow")
    print(f"==> {printable(str(chosen))} <==", flush=True)
    if not is_own:
        with open(chosen, "rb", opener=files.without_links) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            lines = file.read(LOG_BYTES).decode(errors="replace").splitlines()
        print("\n".join(map(printable, lines[-40:])))
        return errors.EXIT_DONE
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; tail ends with its reader
    os.execvp("tail", ["tail", "-n", "40", *(["-F"] if follow else []), "--", str(chosen)])


def cancel(run: Run) -> str:
    """Cancels the job of a run, or ends its processes on this machine. Returns what it did. Raises
    MachineError.
    """
    if run.state == "unknown":
        raise MachineError(
            f"{_short(run.folder)}: is not cancelled, since it is not known whether it runs: {run.note}"
        )
    if run.state not in ("pending", "requeued", "held", "running", "starting"):
        return f"is not running: {run.state}"
    if not trust.is_own(Path(run.folder)):
        raise MachineError(
            f"{_short(run.folder)}: belongs to another user; to cancel a job of yours, type scancel JOB"
        )
    if run.job and not JOB_ID.fullmatch(run.job):
        raise MachineError(
            f"{_short(run.folder)}: {shown(run.job)} is no job ID; to cancel a job, type scancel JOB"
        )
    facts = attempts.facts(Path(run.folder))
    if in_use.is_running(facts) and not facts.get("job"):
        os.kill(int(facts["process"]["pid"]), signal.SIGTERM)
        return f"process {facts['process']['pid']} was asked to save and end"
    try:
        queue.cancel(run.job)
    except (OSError, subprocess.SubprocessError) as error:
        raise MachineError(f"scancel {run.job} failed: {queue.said(error)}") from None
    return f"job {run.job} was cancelled"


def to_resume(run: Run, words: Sequence[str]) -> list[str]:
    """The words of `resume`: the keys that a run has, and ``words``. Raises InputError if it cannot
    be resumed, ConfigError for a key.
    """
    folder = Path(run.folder)
    described = _own_description(folder)
    if run.state not in UNFINISHED and run.state != "done":
        raise InputError(
            f"{_short(run.folder)}: is {run.state}: wait until it ends, or cancel it first"
        )
    if not described or not (folder / "job.sh").is_file():
        line = f"python -m recipes.{run.recipe} run_dir={shlex.quote(run.folder)}"
        raise InputError(
            f"{_short(run.folder)}: was not submitted to Slurm: start it again with: {line}"
        )
    arguments = [str(word) for word in described.get("arguments") or ()]
    given = {word.partition("=")[0]: word for word in (*arguments, f"run_dir={run.folder}", *words)}
    settings = command_line.parse([*given.values()], recipe=str(described.get("recipe")))
    return [
        f"{name}={value}" for name, value in settings.absolute(settings.typed, Path.cwd()).items()
    ]


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
        raise MachineError(
            f"{folder}/job.yaml: cannot be read ({errors.one_line(error, 120)})"
        ) from None
    return described if isinstance(described, dict) else {}


def resume(run: Run, given: Sequence[str]) -> str:
    """Submits a run again with its script and the words of `to_resume`. Returns what it did. Raises
    MachineError.
    """
    folder = Path(run.folder)
    element = run.job.partition("_")[2]
    try:
        # sbatch reads the file that was checked, also if another one takes its name meanwhile.
        described = _own_description(folder)
        with trust.open_own(folder / "job.sh") as script:
            options = [*described.get("options", ()), *([f"--array={element}"] if element else [])]
            name = f"/proc/self/fd/{script.fileno()}"
            done = subprocess.run(
                ["sbatch", "--parsable", *options, name, *given],
                cwd=str(described.get("root")),
                env=allocation.clean_environment(os.environ),
                capture_output=True,
                text=True,
                check=True,
                pass_fds=[script.fileno()],
            )
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise MachineError(f"sbatch refuses {_short(run.folder)}: {queue.said(error)}") from None
    number = done.stdout.strip().partition(";")[0]
    log = ""
    job = f"{number}_{element}" if element else number
    with contextlib.suppress(MachineError):  # Slurm knows the job, but does not answer now
        log = (
            (found.fields.get("StdOut") or "")
            if (found := queue.find(job, timeout_s=queue.OWN_JOB_S))
            else ""
        )
    # the job has not begun
    if (files.read_json(folder / "job.yaml") or {}).get("job_id") == described.get("job_id"):
        try:
            write_description(
                folder, {**described, "job_id": job, "log": log, "arguments": [*given]}
            )
        except OSError as error:
            why = f"job {job} is submitted, but job.yaml cannot be written ({error.strerror})"
            raise MachineError(
                f"{_short(run.folder)}: {why}: to stop the job, type scancel {job}"
            ) from None
    return f"submitted as job {job}" + (f"\nlog: tail -F {shlex.quote(log)}" if log else "")

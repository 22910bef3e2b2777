"""``launch.py runs``, ``logs``, ``look``, ``cancel``, ``resume`` and ``compare``. Never torch."""

import contextlib
import functools
import hashlib
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.core import files, trust
from recipes.core.config import declare, key_value
from recipes.core.config.job_keys import JobKeys
from recipes.core.errors import (
    EXIT_DONE,
    EXIT_MACHINE,
    InputError,
    MachineError,
    one_line,
    printable,
    shown,
)
from recipes.core.launch.jobs import write_description
from recipes.core.run import attempt as attempts
from recipes.core.run import command_line, directory, in_use, ledger, positions, record, table
from recipes.core.run.record import State
from recipes.core.slurm import client
from recipes.core.slurm.script import SHARED
from recipes.core.launch.runs import Run, find, read

LOG_BYTES = 1 << 16  # of another user's log, from its end
WATCH_S = 5.0  # between two tables of `runs watch`
COMMANDS = ("runs", "logs", "look", "cancel", "resume", "compare")
OPTIONS = ("--json", "--failed", "--sort", "--ledger")  # of `runs`
KEY = re.compile(r"[A-Za-z_]\w*=")  # a path may have a = too: runs/lr=0.1
UNFINISHED = (State.stopped, State.failed, State.lost, State.cancelled, State.refused)
ACTIVE = (State.pending, State.held, State.requeued, State.starting, State.running)
MAY_HAVE_RANKS = (State.starting, State.running, State.unknown)


def command(argv: Sequence[str], root: Path, told: dict[str, Any]) -> int:
    """Runs ``launch.py runs|logs|look|cancel|resume|compare …``. Returns the exit status. told:
    gets the results of ``look`` and ``compare``. Raises InputError and MachineError.
    """
    name, *words = argv
    if name == "runs":
        return show(words, root)
    if "--json" in words:
        raise InputError(
            f"--json: launch.py {name} does not support it; "
            "use runs --json or recipes.report --json"
        )
    if name == "resume" and "--" in words:
        fix = "to change them, start the run again with its first command and its run_dir="
        raise InputError(f"--: resume keeps the arguments of the program: {fix}")
    options = dict(word.split("=", 1) for word in words if KEY.match(word))
    names = [word for word in words if not KEY.match(word) and word != "follow"]
    allowed = {"logs": {"rank"}, "resume": options.keys()}.get(name, set())
    unknown = min(options.keys() - allowed, default="")
    if unknown:
        raise InputError(f"{unknown}={shown(options[unknown])}: is not for launch.py {name}")
    if not names and name in ("cancel", "resume"):
        raise InputError(f"{name}: give a run: a run directory, a job ID, or {table.LAST}")
    folders = find(names or [table.LAST], root)
    if name == "compare":
        return compare(folders, told)
    if name == "logs":
        return logs(folders[0], options.get("rank", ""), "follow" in words)
    if name == "look":
        return look(table.read_one(folders[0], _reader(client.mine())), told)
    # an answer that is missing would leave a job running, or submit it twice
    of_run = _reader(client.mine(client.ANSWER_S))
    if name == "cancel" and len(folders) > 1:
        return cancel_all(folders, table.read_each(folders, of_run))
    runs = [table.read_one(folder, of_run) for folder in folders]  # all, before one is changed
    if name == "cancel":
        print(f"{_short(runs[0].folder)}: {cancel(runs[0])}", flush=True)
        return EXIT_DONE
    if len(runs) > 1:
        runs = [run for run in runs if run.state in UNFINISHED]
    if not runs:
        raise InputError("resume: none of these runs was stopped or has failed: name one of them")
    added = key_value.words_of(options)
    every = [to_resume(run, added) for run in runs]  # before one is submitted
    for run, arguments in zip(runs, every, strict=True):
        print(f"{_short(run.folder)}: {resume(run, arguments)}", flush=True)
    return EXIT_DONE


def _reader(jobs: Mapping[str, client.Line] | None) -> "functools.partial[Run]":
    """`read` of a folder, on this cluster. jobs: of `client.mine`."""
    cluster = "" if jobs is None else client.cluster_name()
    return functools.partial(read, jobs=jobs, cluster=cluster)


def show(words: Sequence[str], root: Path) -> int:
    """Prints the table of runs. words: folders and job IDs, and ``watch``, ``--json``,
    ``--failed``, ``--sort=KEY``; with ``--ledger``, the table of their times.
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
    if "--ledger" in words:
        return show_ledger(find(names, root), "--json" in words)
    of_run = _reader(client.mine())
    while True:
        runs = table.read_each(find(names, root), of_run)
        if "--failed" in words:
            runs = [run for run in runs if run.state in UNFINISHED]
        if sort:
            runs.sort(key=lambda run: _sortable(getattr(run, sort)))
        if "--json" in words:
            lines = [files.json_line(asdict(run)) for run in runs]
        else:
            lines = lines_of(runs, time.time())
        if "watch" not in words:
            sys.stdout.writelines(f"{line}\n" for line in lines)  # --json may have none
            return EXIT_DONE
        print("\033[2J\033[H" + "\n".join([time.strftime("%H:%M:%S"), *lines]), flush=True)
        time.sleep(WATCH_S)
        of_run = functools.partial(of_run, jobs=client.mine())


def show_ledger(folders: Sequence[Path], as_json: bool) -> int:
    """Prints where the time of each run went, and the sum of all runs."""

    def entry(folder: Path) -> dict[str, Any]:
        return {"folder": str(folder), **ledger.of_run(record.read(folder))}

    entries = table.read_each(folders, entry)
    entries.append({"folder": "all", **ledger.total(entries)})
    lines = [*map(files.json_line, entries)]
    if not as_json:
        names = ["run", *(_short(each["folder"]) for each in entries)]
        cells = zip(names, ledger.cells(entries), strict=True)
        lines = table.aligned([[name, *line] for name, line in cells])
    print("\n".join(lines))
    return EXIT_DONE


def _sortable(value: Any) -> tuple[bool, Any]:
    if isinstance(value, Mapping):
        value = next(iter(value.values()), None)
    return value is None, 0 if value is None else value


def lines_of(runs: Sequence[Run], now: float) -> list[str]:
    """A table. In a terminal, a note that does not fit beside its run has its own line. now:
    time.time().
    """
    head = ["run", "state", "step", "best", "samples/s", "effective", "age", "left", "starts"]
    rows = [
        [
            _short(run.folder),
            run.state,
            f"{run.step}/{run.steps}" if run.steps else str(run.step or ""),
            next((f"{value:.4f}" for value in run.best.values()), ""),
            f"{run.samples_per_second:,.0f}" if run.samples_per_second else "",
            f"{run.effective:.0%}" if run.effective else "",
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
    """A duration in its largest unit, such as 5m or 3d. inf is that of a job without limit."""
    if math.isinf(seconds):
        return "no limit"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if abs(seconds) >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def _short(folder: str) -> str:
    return printable(folder.removeprefix(f"{os.getcwd()}/"))


def compare(folders: Sequence[Path], told: dict[str, Any]) -> int:
    """Prints the keys in which runs differ and their results, one column per run. told: gets the
    runs. Raises InputError for a single run.
    """
    if len(folders) < 2:
        raise InputError(
            "compare: give at least two runs: directories, job IDs, or a folder of runs"
        )
    runs = [
        table.read_one(folder, lambda path: table.entry(record.read(path))) for folder in folders
    ]
    told["runs"] = runs
    cells = table.cells(runs)
    print("\n".join(table.aligned(list(zip(*cells, strict=True)))))
    names = shlex.join(_short(str(folder)) for folder in folders)
    print(f"curves: python -m recipes.report {names} html=compare.html")
    return EXIT_DONE


def logs(folder: Path, rank: str, follow: bool) -> int:
    """Shows the end of a log: of the batch script, or of one rank. Replaces this process by tail.
    Raises InputError, and MachineError if another user's link leads to a file of a third.

    In a log of another user, control characters are escaped.
    """
    described = files.read_json(folder / "job.yaml")
    log = Path(record.log_of_job(folder, described))
    if rank or not record.is_log_of(folder, log):
        log = folder / "logs" / f"rank{rank or 0}.log"
    if not log.is_file():
        ranks = sorted(path.stem.removeprefix("rank") for path in log.parent.glob("rank*.log"))
        have = f"its ranks are {', '.join(ranks)}" if ranks else "it has no logs yet"
        raise InputError(f"{shown(folder)}: has no {shown(log.name)}: {have}")
    log = trust.resolved(log, to_same_owner=True)
    is_own = trust.is_own(log)
    if follow and not is_own:
        raise InputError(f"follow: {shown(log)} belongs to another user; leave out follow")
    print(f"==> {printable(str(log))} <==", flush=True)
    if not is_own:
        with open(log, "rb", opener=trust.without_links_of_others) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            lines = file.read(LOG_BYTES).decode(errors="replace").splitlines()
        print("\n".join(map(printable, lines[-40:])))
        return EXIT_DONE
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; tail ends with its reader
    os.execvp("tail", ["tail", "-n", "40", *(["-F"] if follow else []), "--", str(log)])


def look(run: Run, told: dict[str, Any]) -> int:
    """Prints where each rank of a running job is, and for which ranks the others wait, also into
    ``told``. Raises InputError if the run does not run, and MachineError if it belongs to another
    user.
    """
    folder = Path(run.folder)
    if run.state not in MAY_HAVE_RANKS:
        raise InputError(f"{folder}: is not running: {run.state}")
    if not trust.is_own(folder):
        raise MachineError(f"{folder}: belongs to another user")
    has_begun = run.state is State.running
    attempt = attempts.owner(folder) if has_begun else attempts.newest(folder)
    hosts = attempts.hosts(attempt) if attempt else {}
    answers = positions.ask(folder, hosts)
    lines = positions.lines_of(answers, hosts)
    print("\n".join(map(printable, lines)))
    told |= {"run": run.folder, "lines": lines, "ranks": answers}
    return EXIT_DONE


def cancel_all(folders: Sequence[Path], runs: Sequence[Run]) -> int:
    """Cancels each run that can be cancelled. Returns the exit status. runs: those of ``folders``
    that can be read.
    """
    status = EXIT_DONE if len(runs) == len(folders) else EXIT_MACHINE
    for run in runs:
        try:
            print(f"{_short(run.folder)}: {cancel(run)}", flush=True)
        except MachineError as error:
            print(printable(str(error)), file=sys.stderr)
            status = EXIT_MACHINE
    return status


def cancel(run: Run) -> str:
    """Cancels the job of a run, or ends its processes on this machine. Returns what it did. Raises
    MachineError.
    """
    folder = Path(run.folder)
    problem = ""
    if run.state is State.unknown:
        problem = f"was not cancelled, since its state is unknown: {run.note}"
    elif run.state not in ACTIVE:
        return f"is not running: {run.state}"
    elif not trust.is_own(folder):
        problem = "belongs to another user; to cancel a job of yours, type scancel JOB"
    if problem:
        raise MachineError(f"{_short(run.folder)}: {problem}")
    facts = attempts.facts(folder)
    described = files.read_json(folder / "job.yaml")
    real = os.path.realpath(folder)
    marked = [
        each
        for each in (facts, described)
        if directory.is_marked(folder, each) and each.get("run_dir") == real
    ]
    jobs = [str(each.get("job_id") or each.get("job")) for each in marked]
    if facts in marked and in_use.is_running(facts) and not facts.get("job"):
        pid = facts["process"]["pid"]
        os.kill(pid, signal.SIGTERM)
        return f"process {pid} was asked to save and end"
    if facts in marked and not run.job:
        problem = f"runs on {facts['process']['host']}: type this command there"
    elif run.job not in jobs:
        problem = (
            "names no job that you have started with this run_dir=; "
            "to cancel a job of yours, type scancel JOB"
        )
    if problem:
        raise MachineError(f"{_short(run.folder)}: {problem}")
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
    first = f"the command that started it, and run_dir={shlex.quote(run.folder)}"
    for word in words:
        if word.partition("=")[0] in declare.names_of(JobKeys):
            problem = "resume keeps the size and the options of the job"
            raise InputError(f"{shown(word)}: {problem}: start the run again with {first}")
    if run.state not in (*UNFINISHED, State.done):
        raise InputError(
            f"{_short(run.folder)}: is {run.state}: wait until it ends, or cancel it first"
        )
    if not described or not (folder / "job.sh").is_file():
        run_dir = f"run_dir={run.folder}"
        again = "with: " + shlex.join(["python", "-m", f"recipes.{run.recipe}", run_dir])
        if run.recipe == command_line.SCRIPT:  # its keys are not kept
            again = f"with {first}"
        problem = "was not submitted to Slurm: start it again"
        raise InputError(f"{_short(run.folder)}: {problem} {again}")
    trust.own_folder(trust.resolved(folder))
    arguments = [str(word) for word in described.get("arguments") or ()]
    arguments += [f"run_dir={run.folder}", *words]  # of equal keys, the last one counts
    environ = {**os.environ, **_variables(described)}
    settings = command_line.parse(arguments, recipe=str(described.get("recipe")), environ=environ)
    return key_value.words_of(settings.typed)


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
    if not isinstance(described, dict):
        return {}
    if not directory.is_marked(folder, described):
        raise MachineError(_not_executed(folder, described, "job.yaml: was copied here"))
    return described


def _variables(described: Mapping[str, Any]) -> dict[str, str]:
    """Those of the shell in which the job was submitted first. {} in an earlier version's file."""
    return dict(described.get("variables") or {})


def _not_executed(folder: Path, described: dict[str, Any], why: str) -> str:
    words = shlex.join([f"recipe={described.get('recipe')}", f"run_dir={folder}"])
    fix = f"start the run again with: python launch.py {words}"
    return f"{folder}/{why}, so job.sh is not executed: {fix}"


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
            text = script.read()
            if hashlib.sha256(text).hexdigest() != described.get("script"):
                raise MachineError(_not_executed(folder, described, "job.sh: was changed"))
            shared = f"{described.get('code')}/{SHARED}"  # a ready script takes a new snapshot
            if f". {shlex.quote(shared)} ".encode() in text and not os.path.exists(shared):
                why = f"job.sh: uses {shared}, which was removed"
                raise MachineError(_not_executed(folder, described, why))
            options = [*described.get("options", ())]
            if element:
                options.append(f"--array={element}")
            root = str(described.get("root"))
            variables = _variables(described)
            job_id = client.submit_open_file(script.fileno(), arguments, options, variables, root)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise MachineError(f"sbatch refuses {_short(run.folder)}: {client.said(error)}") from None

    if element:
        job_id = f"{job_id}_{element}"
    log = ""
    with contextlib.suppress(MachineError):  # Slurm knows the job, but does not answer now
        job = client.find(job_id, timeout_s=client.OWN_JOB_S)
        log = job.log if job else ""
    # the job has not begun
    if files.read_json(folder / "job.yaml").get("job_id") == described.get("job_id"):
        try:
            new = {**described, "job_id": job_id, "log": log, "arguments": arguments}
            new["run_dir"] = os.path.realpath(folder)  # it may have been moved
            write_description(folder, new)
        except OSError as error:
            raise MachineError(
                f"{_short(run.folder)}: job {job_id} is submitted, but job.yaml cannot be written "
                f"({error.strerror}): to stop the job, type scancel {job_id}"
            ) from None
    line = f"submitted as job {job_id}"
    return f"{line}\nlog: tail -F {shlex.quote(log)}" if log else line
